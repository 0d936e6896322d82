"""A certificate is for one declaration, one code, one device and its versions; anything else is out of date."""

from __future__ import annotations

import functools
import logging
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from pydantic import ValidationError

import graphglue as gg
from graphglue.audit import Audited, Certificate, Check, Finding, Verdict, audit
from graphglue.audit.certificate import CHECK_NAMES, conditions, issue, why_uncertified
from graphglue.audit.source import Source
from graphglue.device.base import Device, open_device
from graphglue.errors import ConfigError
from graphglue.preps import paged_decode
from tests.unit.audit import subjects
from tests.unit.audit.subjects import contract, good, make_runner, slots, table

SCALE = 3
CPU = open_device("cpu")


def check(name: str = "trace", verdict: Verdict = Verdict.PASS, prep: str = "prep") -> Check:
    return Check(name=name, prep=prep, verdict=verdict)


def audited(runner: gg.Runner) -> Audited:
    return Audited.of(runner.registrations[0], runner.arena.slots, runner.tables, runner.space)


def full(runner: gg.Runner, **verdicts: Verdict) -> Certificate:
    checks = [check(name, verdicts.get(name, Verdict.PASS)) for name in CHECK_NAMES]
    return issue(checks, {"prep": audited(runner)}, CPU)


# Verdicts.


@pytest.mark.parametrize(
    ("verdicts", "passed"),
    [
        ([Verdict.PASS, Verdict.PASS], True),
        ([Verdict.PASS, Verdict.UNKNOWN], True),
        ([Verdict.UNKNOWN, Verdict.FAIL], False),
        ([Verdict.FAIL], False),
        ([], False),
    ],
)
def test_a_certificate_passes_where_no_check_fails(verdicts: list[Verdict], passed: bool) -> None:
    assert issue([check(verdict=verdict) for verdict in verdicts], {}, CPU).passed is passed


def test_a_finding_is_one_line_that_says_where() -> None:
    finding = Finding(text="is read", op="aten::add", where="prep.py:3", tensor="int64[4]", region="table t")
    assert str(finding) == "aten::add: is read [prep.py:3, int64[4], table t]"
    assert str(Finding(text="is read")) == "is read"


def test_a_certificate_is_frozen_and_refuses_unknown_keys() -> None:
    certificate = full(make_runner())
    with pytest.raises(ValidationError):
        certificate.device = "another"  # type: ignore[misc]
    with pytest.raises(ValidationError):
        Certificate.model_validate({**certificate.model_dump(), "signed": True})


# Files.


def test_what_is_written_is_read_again(tmp_path: Path) -> None:
    certificate = audit(make_runner(ladder=[2]))
    certificate.write(tmp_path / "c.json")
    assert Certificate.read(tmp_path / "c.json") == certificate


@pytest.mark.parametrize(
    ("text", "said"), [(None, "can not be read"), ("{}", "holds no certificate"), ("\x00", "holds no certificate")]
)
def test_a_file_that_is_no_certificate_is_named(tmp_path: Path, text: str | None, said: str) -> None:
    path = tmp_path / "c.json"
    if text is not None:
        path.write_text(text)
    with pytest.raises(ConfigError, match=said) as caught:
        Certificate.read(path)
    assert str(path) in str(caught.value)


# What it covers.


def test_a_certificate_covers_what_was_audited() -> None:
    runner = make_runner()
    assert full(runner).covers("prep", audited(make_runner()), CPU) is None
    runner.capture()
    assert full(runner).covers("prep", audited(runner), CPU) is None, "capturing changes nothing"


def other_code(view: Any) -> dict[str, torch.Tensor]:
    return {"pages": view.tables.table[view.rows, ::16] // 16, "positions": view.seq_lens - 2}


def other_slots() -> list[gg.Slot]:
    return [gg.Slot("seq_lens", axis="request", dtype=torch.int32, pad=1), *slots()[1:]]


CHANGES: list[tuple[dict[str, Any], str]] = [
    ({"declared": contract(ragged=True)}, "its contract changed"),
    ({"prep": other_code}, r"its code changed, in one of \['tests.*other_code'\]"),
    ({"plan": lambda batch, bucket: {}}, "its code changed"),
    ({"with_slots": other_slots()}, "the slots or tables that it reads changed"),
    ({"tables": {"table": table().to(torch.int32)}}, "the slots or tables that it reads changed"),
    ({"ladder": [1, 2, 4, 8]}, r"it was not audited at \['decode 8x8 of 1'\]"),
    ({"tokens_per_request": 2}, "it was not audited at"),
]


@pytest.mark.parametrize(("changes", "said"), CHANGES)
def test_a_change_puts_it_out_of_date(changes: dict[str, Any], said: str) -> None:
    now = audited(make_runner(**changes))
    why = full(make_runner()).covers("prep", now, CPU)
    assert why is not None
    assert re.search(said, why), why


@pytest.mark.parametrize(
    "changes",
    [
        {"ladder": [1, 4]},  # fewer buckets than were audited
        {"tables": {"table": torch.zeros(99, 64, dtype=torch.int64)}},  # another pool size
        {"with_slots": [*slots()[:3], gg.Slot("offsets", axis="offset", dtype=torch.int64, pad=0)]},  # is not read
    ],
)
def test_what_the_prep_does_not_depend_on_may_change(changes: dict[str, Any]) -> None:
    assert full(make_runner()).covers("prep", audited(make_runner(**changes)), CPU) is None


class OtherDevice:
    """The CPU, with something changed."""

    def __init__(self, **changes: str) -> None:
        self._changes = changes

    def versions(self) -> dict[str, str]:
        return {**CPU.versions(), **self._changes}


@pytest.mark.parametrize("what", ["device", "cuda", "driver"])
def test_another_device_or_driver_puts_it_out_of_date(what: str) -> None:
    device: Any = OtherDevice(**{what: "another"})
    why = full(make_runner()).covers("prep", audited(make_runner()), device)
    assert why is not None
    assert f"{what} is 'another', audited with" in why


def test_another_version_puts_it_out_of_date(monkeypatch: pytest.MonkeyPatch) -> None:
    certificate = full(make_runner())
    monkeypatch.setattr(gg, "__version__", "9.9")
    why = certificate.covers("prep", audited(make_runner()), CPU)
    assert why == f"graphglue is '9.9', audited with '{certificate.versions['graphglue']}'"
    assert set(conditions(CPU)) >= {"graphglue", "torch", "python", "device"}


def test_failed_and_missing_checks_are_named() -> None:
    runner = make_runner()
    assert full(runner, poison=Verdict.UNKNOWN).covers("prep", audited(runner), CPU) is None
    assert full(runner, poison=Verdict.FAIL).covers("prep", audited(runner), CPU) == "checks ['poison'] failed"
    static = issue([check("trace"), check("same_ops"), check("pointers")], {"prep": audited(runner)}, CPU)
    why = static.covers("prep", audited(runner), CPU)
    assert why == "checks ['poison', 'double_capture', 'pad_image'] were not run; audit with level='full'"
    assert "prep 'other' is not in the certificate" in str(full(runner).covers("other", audited(runner), CPU))


# The code that is hashed.


def scaled(view: Any) -> Any:
    return view.x * SCALE + helped(view)


def helped(view: Any) -> Any:
    return view.y + 1


class Backend:
    def __init__(self, page: int) -> None:
        self.page, self.calls, self.unused = page, 0, page

    def prep(self, view: Any) -> Any:
        self.calls += 1
        return self.pages(view)

    def pages(self, view: Any) -> Any:
        return view.x // self.page


class Called(Backend):
    def __call__(self, view: Any) -> Any:
        return self.prep(view)


def closing(over: Any) -> Any:
    def prep(view: Any) -> Any:
        return view.x + over

    return prep


def test_a_function_s_helpers_and_numbers_count(monkeypatch: pytest.MonkeyPatch) -> None:
    before = Source.of(scaled)
    assert before.functions == (f"{__name__}.helped", f"{__name__}.scaled")
    assert Source.of(scaled) == before
    monkeypatch.setitem(globals(), "SCALE", 4)
    assert Source.of(scaled).digest != before.digest
    monkeypatch.setitem(globals(), "SCALE", 3)
    monkeypatch.setitem(globals(), "helped", lambda view: view.y + 2)
    assert Source.of(scaled).digest != before.digest


@pytest.mark.parametrize(
    "form", [lambda page: Backend(page).prep, Called, lambda page: functools.partial(Called(page))]
)
def test_an_object_s_attributes_count_where_its_code_reads_them_and_does_not_assign_them(form: Any) -> None:
    one = form(16)
    before = Source.of(one)
    assert f"{__name__}.Backend.pages" in before.functions
    assert Source.of(form(32)).digest != before.digest
    owner = getattr(one, "__self__", None) or getattr(one, "func", one)
    owner.calls, owner.unused = 7, 7
    assert Source.of(one).digest == before.digest


@pytest.mark.parametrize(
    ("one", "other", "equal"),
    [
        (closing(1), closing(1), True),
        (closing(1), closing(2), False),
        (closing((1, 2)), closing((1, 3)), False),
        (closing(closing(1)), closing(closing(2)), False),
        (closing(frozenset({"a", "b"})), closing(frozenset({"b", "a"})), True),
        (closing(torch.zeros(2)), closing(torch.ones(2)), True),
        (closing(torch.zeros(2)), closing(torch.zeros(3)), False),
        (closing([1]), closing([2]), False),
        (functools.partial(good, 1), functools.partial(good, 2), False),
        (functools.partial(good, step=1), functools.partial(good, step=2), False),
        (lambda view, step=1: step, lambda view, step=2: step, False),
        (lambda view: view.x + 1, lambda view: view.x + 1, True),
        (lambda view: view.x + 1, lambda view: view.x + 2, False),
        (lambda view: view.x, lambda view: view.y, False),
        (lambda view: [one + 1 for one in view], lambda view: [one + 2 for one in view], False),
        (torch.neg, torch.abs, False),
    ],
)
def test_equal_code_has_equal_hashes(one: Any, other: Any, equal: bool) -> None:
    assert (Source.of(one).digest == Source.of(other).digest) is equal


def test_a_decorated_prep_is_read_to_its_end() -> None:
    def wrapped(step: int) -> Any:
        def inner(view: Any) -> Any:
            return view.x + step

        @functools.wraps(inner)
        def outer(view: Any) -> Any:
            return inner(view)

        return outer

    assert Source.of(wrapped(1)).digest != Source.of(wrapped(2)).digest


def test_what_is_taken_from_a_module_of_the_same_package_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    def prep(view: Any) -> Any:
        return subjects.good(view)

    before = Source.of(prep)
    assert "tests.unit.audit.subjects.good" in before.functions
    monkeypatch.setattr(subjects, "good", other_code)
    assert Source.of(prep).digest != before.digest


def test_functions_that_call_each_other_end() -> None:
    def one(view: Any) -> Any:
        return other(view)

    def other(view: Any) -> Any:
        return one(view)

    assert len(Source.of(one).functions) == 2


def test_the_hash_is_the_same_in_another_process() -> None:
    code = (
        "from graphglue.audit.source import Source; from graphglue.preps import paged_decode as p;"
        "print(Source.of(p.make(16)).digest)"
    )
    for seed in ("1", "2"):
        environment = {**os.environ, "PYTHONHASHSEED": seed}
        out = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True)
        assert out.stdout.strip() == Source.of(paged_decode.make(16)).digest
    assert Source.of(paged_decode.make(16)).digest != Source.of(paged_decode.make(8)).digest


# A runner that asks for it.


def write_certificate(path: Path, runner: gg.Runner | None = None, **verdicts: Verdict) -> Path:
    full(runner or make_runner(), **verdicts).write(path)
    return path


def replayed(config: gg.RunnerConfig, prep: Any = good) -> tuple[gg.Route, gg.Reason]:
    with make_runner(prep, config=config, forward=lambda view, metadata: metadata["positions"] + 0) as runner:
        runner.capture(progress=False)
        sources = {"seq_lens": [5], "rows": [3], "locations": [1], "offsets": torch.tensor([0, 1], dtype=torch.int32)}
        step = runner.replay(gg.Batch(1, sources))
        assert step.outputs.tolist() == [4 if prep is good else 3]
        return step.decision.prep, step.decision.reason


def test_a_certified_prep_is_glued(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = write_certificate(tmp_path / "c.json")
    config = gg.RunnerConfig(certificate="require", certificate_path=path)
    assert replayed(config) == (gg.Route.GLUE, gg.Reason.UNPADDED)
    assert "not certified" not in caplog.text


@pytest.mark.parametrize(
    ("verdicts", "prep", "written", "said"),
    [
        ({}, good, False, "can not be read"),
        ({"trace": Verdict.FAIL}, good, True, r"checks \['trace'\] failed"),
        ({}, other_code, True, "its code changed"),
    ],
)
@pytest.mark.parametrize("certificate", ["require", "warn"])
def test_an_uncertified_prep_is_sent_to_the_fallback_or_glued_with_a_warning(
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
    certificate: Any,
    verdicts: Any,
    prep: Any,
    written: bool,
    said: str,
) -> None:
    path = tmp_path / "c.json"
    if written:
        write_certificate(path, **verdicts)
    config = gg.RunnerConfig(certificate=certificate, certificate_path=path)
    with caplog.at_level(logging.WARNING, logger="graphglue"):
        went = replayed(config, prep)
    expected = (gg.Route.EAGER, gg.Reason.NOT_CERTIFIED), (gg.Route.GLUE, gg.Reason.UNPADDED)
    assert went == expected[certificate == "warn"]
    warnings = [record.getMessage() for record in caplog.records if "not certified" in record.getMessage()]
    assert len(warnings) == 1
    assert "graphglue audit MODULE:FACTORY --json FILE" in warnings[0]
    caplog.clear()
    assert why_uncertified(path, "prep", audited(make_runner(prep)), CPU) is not None


def test_no_path_is_no_certificate() -> None:
    assert "certificate_path names no file" in str(why_uncertified(None, "prep", audited(make_runner()), CPU))
    assert replayed(gg.RunnerConfig(certificate="require")) == (gg.Route.EAGER, gg.Reason.NOT_CERTIFIED)


def test_off_reads_no_file(tmp_path: Path) -> None:
    config = gg.RunnerConfig(certificate="off", certificate_path=tmp_path / "absent.json")
    assert replayed(config)[0] is gg.Route.GLUE


def test_the_path_comes_from_the_environment_as_well(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = write_certificate(tmp_path / "c.json")
    monkeypatch.setenv("GRAPHGLUE_CERTIFICATE", "require")
    monkeypatch.setenv("GRAPHGLUE_CERTIFICATE_PATH", str(path))
    assert gg.RunnerConfig().certificate_path == path
    assert replayed(gg.RunnerConfig())[0] is gg.Route.GLUE


def test_an_audit_s_own_certificate_certifies(tmp_path: Path) -> None:
    audit(make_runner()).write(tmp_path / "c.json")
    config = gg.RunnerConfig(certificate="require", certificate_path=tmp_path / "c.json")
    assert replayed(config)[0] is gg.Route.GLUE


def test_every_device_names_itself() -> None:
    device: Device = CPU
    assert device.versions()["device"].startswith("cpu ")
