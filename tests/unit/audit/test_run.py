"""The audit runs every check on every prep, and turns whatever happens into a verdict."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

import graphglue as gg
from graphglue.audit import Certificate, Check, Verdict, audit, run, run_checks
from graphglue.audit.certificate import CHECK_NAMES, Finding
from graphglue.audit.run import Entry
from graphglue.audit.subject import Subject, Unseen
from graphglue.errors import BindError, ConfigError
from tests.unit.audit.subjects import contract, good, make_runner, slots, table

Run = Callable[[Subject], tuple[Verdict, list[Finding]]]


def by_name(certificate: Certificate, prep: str = "prep") -> dict[str, Check]:
    return {check.name: check for check in certificate.checks if check.prep == prep}


def passing(subject: Subject) -> tuple[Verdict, list[Finding]]:
    return Verdict.PASS, [Finding(text="looked")]


def with_checks(monkeypatch: pytest.MonkeyPatch, **runs: Run) -> None:
    monkeypatch.setattr(run, "CHECKS", tuple(Entry(name, one, name != "poison") for name, one in runs.items()))


def test_every_check_is_run_and_a_correct_prep_passes() -> None:
    certificate = audit(make_runner())
    assert [check.name for check in certificate.checks] == list(CHECK_NAMES)
    assert certificate.passed
    found = {name: check.verdict.value for name, check in by_name(certificate).items()}
    assert found == {
        "trace": "pass",
        "same_ops": "pass",
        "poison": "pass",
        "double_capture": "unknown",
        "pad_image": "pass",
        "pointers": "unknown",
    }
    assert all(check.evidence for check in certificate.checks)
    assert certificate.device.startswith("cpu")
    assert certificate.preps["prep"].contract == contract().digest()


def test_the_static_level_runs_three() -> None:
    names = [check.name for check in audit(make_runner(), level="static").checks]
    assert names == ["trace", "same_ops", "pointers"]


def test_the_table_of_checks_is_what_a_certificate_asks_for() -> None:
    assert tuple(entry.name for entry in run.CHECKS) == CHECK_NAMES


def test_each_prep_of_a_runner_is_checked() -> None:
    registry = gg.Registry()
    registry.register(contract(name="one"))(good)
    registry.register(contract(name="two"))(lambda view: {**good(view), "pages": view.seq_lens.tolist()})
    runner = gg.Runner(slots=slots(), ladder=[2], registry=registry, prep=["one", "two"], tables={"table": table()})
    certificate = audit(runner)
    assert [check.prep for check in certificate.checks] == ["one"] * 6 + ["two"] * 6
    assert by_name(certificate, "one")["trace"].verdict is Verdict.PASS
    assert by_name(certificate, "two")["trace"].verdict is Verdict.FAIL
    assert not certificate.passed


def faults() -> dict[str, Any]:
    def raises(view: Any) -> Any:
        raise ValueError("no kernel for this")

    def returns_an_object(view: Any) -> Any:
        return object()

    def has_too_many_rows(view: Any) -> Any:
        return {**good(view), "positions": torch.zeros(99)}

    def breaks_on_the_last_bucket(view: Any) -> Any:
        return good(view)["positions"][4] if view.bucket.requests == 4 else good(view)

    def recurses(view: Any) -> Any:
        return recurses(view)

    def asserts(view: Any) -> Any:
        raise AssertionError

    return {one.__name__: one for one in (raises, returns_an_object, has_too_many_rows, breaks_on_the_last_bucket,
                                          recurses, asserts)}  # fmt: skip


@pytest.mark.parametrize("name", list(faults()))
def test_a_faulty_prep_makes_a_check_fail_and_never_the_audit_raise(name: str) -> None:
    certificate = audit(make_runner(faults()[name]))
    assert not certificate.passed
    failed = [check for check in certificate.checks if check.verdict is Verdict.FAIL]
    assert failed
    assert all(check.evidence for check in failed)


def test_what_a_prep_raised_is_evidence_with_its_line() -> None:
    evidence = by_name(audit(make_runner(faults()["raises"])))["trace"].evidence
    assert evidence[0].text == "ValueError: no kernel for this"
    assert str(evidence[0].where).startswith(__file__)


def test_an_audit_leaves_a_captured_runner_as_it_was() -> None:
    def changing(view: Any) -> Any:
        view.tables.table[view.rows, 0] = view.seq_lens
        return good(view)

    runner = make_runner(changing, declared=contract(effects=("table",)))
    runner.capture(progress=False)
    sources = {"seq_lens": [5], "rows": [3], "locations": [1], "offsets": torch.tensor([0, 1], dtype=torch.int32)}
    before = runner.replay(gg.Batch(1, sources)).metadata["positions"].clone()
    held = runner.tables["table"].clone()
    slots_before = {name: slot.clone() for name, slot in runner.arena.targets(gg.Bucket(4, 4, 1)).items()}
    stats = runner.stats()
    audit(runner)
    assert runner.stats() == stats
    assert torch.equal(runner.tables["table"], held)
    after = runner.arena.targets(gg.Bucket(4, 4, 1))
    assert all(torch.equal(slots_before[name], after[name]) for name in after)
    assert torch.equal(runner.replay(gg.Batch(1, sources)).metadata["positions"], before)


def test_an_error_that_a_check_lets_through_is_a_fail(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(subject: Subject) -> tuple[Verdict, list[Finding]]:
        raise RuntimeError("let through")

    with_checks(monkeypatch, trace=broken, same_ops=passing)
    checks = by_name(audit(make_runner()))
    assert (checks["trace"].verdict, checks["trace"].evidence[0].text) == (Verdict.FAIL, "RuntimeError: let through")
    assert checks["same_ops"].verdict is Verdict.PASS


def test_what_can_not_be_looked_at_is_unknown(monkeypatch: pytest.MonkeyPatch) -> None:
    def unseen(subject: Subject) -> tuple[Verdict, list[Finding]]:
        raise Unseen("needs another device")

    with_checks(monkeypatch, trace=unseen)
    check = by_name(audit(make_runner()))["trace"]
    assert (check.verdict, check.evidence[0].text) == (Verdict.UNKNOWN, "needs another device")


def test_a_prep_that_is_never_glued_is_unknown() -> None:
    certificate = audit(make_runner(lambda view: view.seq_lens.tolist(), declared=contract(host_free=False)))
    assert {check.verdict for check in certificate.checks} == {Verdict.UNKNOWN}
    assert "never glued" in certificate.checks[0].evidence[0].text


def test_tables_are_put_back_between_checks(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[bool] = []

    def changing(subject: Subject) -> tuple[Verdict, list[Finding]]:
        seen.append(bool((subject.tables["table"] == 7).all()))
        subject.tables["table"].fill_(7)
        return Verdict.PASS, []

    with_checks(monkeypatch, trace=changing, same_ops=changing)
    audit(make_runner())
    assert seen == [False, False]


def test_poison_stays_out_of_a_process_that_serves(monkeypatch: pytest.MonkeyPatch) -> None:
    with_checks(monkeypatch, poison=passing)
    for poisoning, verdict in ((True, Verdict.PASS), (False, Verdict.UNKNOWN)):
        check = by_name(run_checks(make_runner(), poisoning=poisoning))["poison"]
        assert check.verdict is verdict
    assert "graphglue audit MODULE:FACTORY" in check.evidence[0].text
    assert by_name(audit(make_runner()))["poison"].verdict is Verdict.PASS, "a CPU has nothing to lose"


def test_a_broken_device_is_told_once_and_nothing_else_is_blamed(monkeypatch: pytest.MonkeyPatch) -> None:
    def breaking(subject: Subject) -> tuple[Verdict, list[Finding]]:
        def restore() -> None:
            raise RuntimeError("an illegal memory access was encountered")

        subject.restore = restore  # type: ignore[method-assign]
        return Verdict.PASS, []

    with_checks(monkeypatch, trace=breaking, same_ops=passing, poison=passing)
    checks = by_name(audit(make_runner()))
    assert checks["trace"].verdict is Verdict.FAIL
    assert "illegal memory access" in checks["trace"].evidence[-1].text
    assert checks["same_ops"].verdict is checks["poison"].verdict is Verdict.UNKNOWN
    assert "left the device unusable in trace" in checks["poison"].evidence[0].text


def guessing() -> list[gg.Slot]:
    return [gg.Slot("seq_lens", axis="request", dtype=torch.int64, pad=1), *slots()[1:]]


def test_a_pass_with_guessed_values_says_so() -> None:
    assert "guessed" not in str(by_name(audit(make_runner()))["trace"].evidence)
    assert "guessed values in slots ['seq_lens']" in str(
        by_name(audit(make_runner(with_slots=guessing())))["trace"].evidence
    )


def test_a_prep_that_only_guessed_values_break_is_not_blamed() -> None:
    few = torch.arange(8)

    def picky(view: Any) -> Any:
        return {**good(view), "positions": view.tables.few[view.seq_lens - 1]}

    def broken(view: Any) -> Any:
        return {**good(view), "positions": view.tables.few[view.seq_lens + 100]}

    declared = contract(tables=("table", "few"))
    tables = {"table": table(), "few": few}
    for prep, verdict in ((picky, Verdict.UNKNOWN), (broken, Verdict.FAIL)):
        runner = make_runner(prep, declared=declared, tables=tables, with_slots=guessing())
        (subject,) = Subject.of(runner)
        subject._bounds["seq_lens"] = subject._bounds["seq_lens"]._replace(high=1000)

        def check(subject: Subject, prep: Any = prep) -> tuple[Verdict, list[Finding]]:
            prep(subject.exact_view(gg.Bucket(1, 1, 1), subject.sources(gg.Bucket(1, 1, 1), 0), subject.keys[0]))
            return Verdict.PASS, []

        found = run._Bench(True).check(Entry("trace", check, True), subject)
        assert found.verdict is verdict, found


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ({"level": "most"}, "level='most': expected 'full' or 'static'"),
        ({"perturb": 3}, "perturb is a int"),
        ({"batches": [3]}, r"batches hold \['int'\]; expected graphglue.Batch"),
    ],
)
def test_wrong_arguments_are_refused(arguments: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        audit(make_runner(), **arguments)
    with pytest.raises(ConfigError, match="audit of a dict, which has no"):
        audit({})


def test_a_batch_that_does_not_fit_is_the_caller_s_fault() -> None:
    with pytest.raises(BindError, match="slot 'rows'"):
        audit(make_runner(), batches=gg.Batch(2, {"rows": [1.0, 2.0]}))


def test_batches_and_perturb_reach_the_checks(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[Subject] = []

    def look(subject: Subject) -> tuple[Verdict, list[Finding]]:
        seen.append(subject)
        return Verdict.PASS, []

    with_checks(monkeypatch, trace=look)
    step = gg.Batch(1, {"seq_lens": [5], "rows": [3]})
    audit(make_runner(), batches=[step], perturb=print)
    assert seen[0].batches == (step,)
    assert seen[0].perturb is print
    assert seen[0].sources(gg.Bucket(2, 2, 1), 0)["seq_lens"].tolist() == [5, 5]


def test_an_audit_works_inside_inference_mode_and_under_another_default_dtype() -> None:
    torch.set_default_dtype(torch.float64)
    try:
        with torch.inference_mode():
            assert audit(make_runner()).passed
    finally:
        torch.set_default_dtype(torch.float32)


def test_interrupts_are_not_swallowed(monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(subject: Subject) -> tuple[Verdict, list[Finding]]:
        raise KeyboardInterrupt

    with_checks(monkeypatch, trace=interrupted)
    with pytest.raises(KeyboardInterrupt):
        audit(make_runner())
