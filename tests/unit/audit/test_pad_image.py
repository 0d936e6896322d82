"""Padding that shows is found at every raw count, and named by key, leaf and row; padding that does not, passes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

import graphglue as gg
from graphglue.audit import pad_image
from graphglue.audit.certificate import Finding, Verdict
from graphglue.audit.evidence import Evidence
from graphglue.audit.subject import Unseen
from graphglue.core import differences
from tests.unit.audit.subjects import contract, good, make_subject, slots

pytestmark = pytest.mark.usefixtures("frozen_imports")

Prep = Callable[[Any], Any]
REQUEST = {"out": "request"}


def judged(prep: Prep, outputs: dict[str, str] = REQUEST, **options: Any) -> tuple[Verdict, str]:
    changes = options.pop("changes", {})
    declared = contract(**{"outputs": outputs, "reads": {"seq_lens": 1, "rows": 0}, **changes})
    verdict, found = pad_image.run(make_subject(prep, declared=declared, **options))
    assert all(isinstance(one, Finding) and one.text for one in found)
    return verdict, "\n".join(map(str, found))


def test_the_correct_prep_passes_and_says_how_much_was_compared() -> None:
    verdict, found = pad_image.run(make_subject(good))
    assert verdict is Verdict.PASS
    assert [one.text for one in found] == ["10 steps at 3 keys compared bit by bit"]


REDUCED: dict[str, tuple[Prep, Prep]] = {
    "mean over rows": (
        lambda view: {"out": view.seq_lens - view.seq_lens.sum()},
        lambda view: {"out": view.seq_lens - view.seq_lens.cumsum(0)},
    ),
    "order of rows": (
        lambda view: {"out": view.seq_lens.sort().values},
        lambda view: {"out": view.seq_lens.clamp(min=2)},
    ),
    "last row": (
        lambda view: {"out": view.seq_lens + view.seq_lens[-1]},
        lambda view: {"out": view.seq_lens + view.seq_lens[0]},
    ),
    "bucket for the count": (
        lambda view: {"out": view.seq_lens + view.bucket.requests},
        lambda view: {"out": view.seq_lens + view.bucket.row_tokens},
    ),
}


@pytest.mark.parametrize("name", REDUCED)
def test_pads_that_reach_real_rows_fail(name: str) -> None:
    faulty, twin = REDUCED[name]
    verdict, text = judged(faulty)
    assert verdict is Verdict.FAIL
    # Bucket 1 is never padded and 2 is the first that is.
    step = "decode bucket of 2 requests and 2 tokens, raw 1 and 1"
    assert text.startswith(f"{step}: padded, which differs from unpadded: leaf 'out', real row 0: ")
    assert "test_pad_image.py:" in text
    assert judged(twin)[0] is Verdict.PASS


def test_one_raw_count_of_one_bucket_is_enough() -> None:
    def faulty(view: Any) -> Any:
        wrong = (view.seq_lens == 1).sum() == 3  # pads are 1, real lengths are more
        return {"out": torch.where(wrong, view.seq_lens + 1, view.seq_lens)}

    few = [gg.Slot("seq_lens", axis="request", dtype=torch.int64, pad=1, valid=(2, 60)), *slots()[1:]]
    verdict, text = judged(faulty, ladder=(8,), with_slots=few)
    assert verdict is Verdict.FAIL
    assert "bucket of 8 requests and 8 tokens, raw 5 and 5" in text
    assert judged(lambda view: {"out": view.seq_lens}, ladder=(8,), with_slots=few)[0] is Verdict.PASS


def test_a_view_kept_from_an_earlier_step_is_found() -> None:
    kept: dict[int, Any] = {}
    verdict, _ = judged(lambda view: {"out": kept.setdefault(view.bucket.requests, view).seq_lens + 1}, ladder=(2,))
    assert verdict is Verdict.FAIL


def test_fixed_leaves_must_not_depend_on_how_much_is_padding() -> None:
    assert judged(lambda view: {"out": view.seq_lens.sum()}, {"out": "fixed"})[0] is Verdict.FAIL
    assert judged(lambda view: {"out": view.rows.amax()}, {"out": "fixed"})[0] is Verdict.PASS  # pad 0 is neutral


def test_offset_leaves_have_one_row_more() -> None:
    def offsets(shift: int) -> Prep:
        def prep(view: Any) -> Any:
            sums = torch.nn.functional.pad(view.seq_lens.cumsum(0), (1, 0))
            return {"out": sums + shift * view.seq_lens[-1]}

        return prep

    assert judged(offsets(0), {"out": "offset"})[0] is Verdict.PASS
    assert judged(offsets(1), {"out": "offset"})[0] is Verdict.FAIL


def test_a_leaf_without_an_axis_is_unknown_and_named() -> None:
    def prep(view: Any) -> Any:
        return {"out": view.seq_lens + 1, "free": view.seq_lens.flip(0), "size": view.bucket.requests}

    verdict, text = judged(prep)
    assert verdict is Verdict.UNKNOWN
    assert "leaf 'free' has no row axis" in text
    assert "'out'" not in text
    assert "'size'" not in text


def test_a_leaf_without_an_axis_is_compared_where_nothing_is_padded() -> None:
    calls: list[int] = []

    def drifting(view: Any) -> Any:
        calls.append(1)
        return {"out": view.seq_lens + 1, "free": view.seq_lens + len(calls)}

    verdict, text = judged(drifting)
    assert verdict is Verdict.FAIL
    assert "leaf 'free'" in text
    assert judged(lambda view: {"free": view.seq_lens}, {}, changes={"padded": False})[0] is Verdict.PASS


def test_a_contract_that_is_not_padded_is_compared_at_full_buckets_only() -> None:
    faulty = REDUCED["last row"][0]
    assert judged(faulty, changes={"padded": False})[0] is Verdict.PASS
    assert judged(faulty)[0] is Verdict.FAIL


def test_idle_steps_are_compared_where_they_are_glued() -> None:
    faults: list[str] = []

    def prep(view: Any) -> Any:
        if faults and not torch._C._len_torch_dispatch_stack() and bool((view.rows == 0).all()):
            return {"out": view.seq_lens + 1}  # eager, and no request
        return {"out": view.seq_lens}

    assert judged(prep, changes={"idle": "glue"})[0] is Verdict.PASS
    faults.append("eager IDLE steps differ")
    verdict, text = judged(prep, changes={"idle": "glue"})
    assert verdict is Verdict.FAIL
    assert "raw 0 and 0: glued, which differs from eager" in text


def test_glued_and_eager_are_compared_in_pad_rows_and_plain_leaves_too() -> None:
    def by_rows(view: Any) -> Any:
        glued = bool(torch._C._len_torch_dispatch_stack())
        return {"out": torch.where(view.seq_lens == 1, int(glued), view.seq_lens)}

    few = [gg.Slot("seq_lens", axis="request", dtype=torch.int64, pad=1, valid=(2, 60)), *slots()[1:]]
    verdict, text = judged(by_rows, with_slots=few)
    assert verdict is Verdict.FAIL
    assert "glued, which differs from eager: leaf 'out', pad row 1: 1, expected 0" in text
    verdict, text = judged(lambda view: {"out": view.seq_lens, "n": torch._C._len_torch_dispatch_stack()})
    assert verdict is Verdict.FAIL
    assert "glued, which differs from eager: leaf 'n': int" in text


def test_nan_is_no_difference() -> None:
    assert judged(lambda view: {"out": view.seq_lens.double() * float("nan")})[0] is Verdict.PASS


def test_declared_rows_that_are_not_there_fail() -> None:
    verdict, text = judged(lambda view: {"out": torch.zeros(8, dtype=torch.int64) + view.seq_lens[0]})
    assert verdict is Verdict.FAIL
    assert "declares output 'out' on axis request" in text


def test_floats_that_round_otherwise_at_another_width_are_unknown() -> None:
    weights = torch.rand(64, generator=torch.Generator().manual_seed(1)).view(1, 64) - 0.5

    def rounding(view: Any) -> Any:
        inputs = view.seq_lens.to(torch.float32)[:, None] * weights.to(view.seq_lens.device)
        scale = 1 + 1e-7 * (view.bucket.requests > 2)  # what another kernel at another shape does
        return {"out": (inputs * scale).sum(1)}

    verdict, text = judged(rounding)
    assert verdict is Verdict.UNKNOWN
    assert "round otherwise at another shape" in text

    def leaking(view: Any) -> Any:
        return {"out": view.seq_lens.to(torch.float32) + 1e-2 * view.seq_lens.sum()}

    assert judged(leaking)[0] is Verdict.FAIL


def test_compiled_preps_may_round_but_not_change_integers(monkeypatch: pytest.MonkeyPatch) -> None:
    def compiled_to(recorded: Prep) -> Verdict:
        declared = contract(outputs={"out": "request", "n": "request"}, compile=True)
        subject = make_subject(plain, declared=declared)
        subject._recorded = recorded
        return pad_image.run(subject)[0]

    def plain(view: Any) -> Any:
        return {"out": view.seq_lens.to(torch.float32) * 0.3, "n": view.seq_lens}

    def fused(view: Any) -> Any:
        return {"out": view.seq_lens.to(torch.float32) * 0.3 * (1 + 1e-6), "n": view.seq_lens}

    def wrong(view: Any) -> Any:
        return {"out": view.seq_lens.to(torch.float32) * 0.3, "n": view.seq_lens + 1}

    assert compiled_to(plain) is compiled_to(fused) is Verdict.PASS
    assert compiled_to(wrong) is Verdict.FAIL


def test_what_can_not_be_recorded_is_compared_eagerly_and_not_passed() -> None:
    verdict, text = judged(lambda view: {"out": view.seq_lens + int(view.seq_lens[0])})
    assert verdict is Verdict.UNKNOWN
    assert "not recorded" in text
    verdict, text = judged(lambda view: {"out": view.seq_lens + int(view.seq_lens[-1])})
    assert verdict is Verdict.FAIL
    assert "differs from unpadded" in text


@pytest.mark.parametrize("faults", ["padded", "unpadded"])
def test_a_prep_that_raises_fails_with_the_line(faults: str) -> None:
    def prep(view: Any) -> Any:
        if (view.bucket.requests == 3) is (faults == "unpadded"):  # 3 is no bucket
            raise ValueError("no such size")
        return {"out": view.seq_lens}

    verdict, text = judged(prep)
    assert verdict is Verdict.FAIL
    assert f"the {faults} prep raised ValueError: no such size (at {__file__}:" in text


def test_a_prep_that_raises_on_guessed_values_is_unknown() -> None:
    def prep(view: Any) -> Any:
        return {"out": torch.zeros(4, dtype=torch.int64)[view.seq_lens]}

    unstated = [gg.Slot("seq_lens", axis="request", dtype=torch.int64, pad=1), *slots()[1:]]
    verdict, text = judged(prep, with_slots=unstated)
    assert verdict is Verdict.UNKNOWN
    assert "['seq_lens'] were guessed" in text
    stated = [gg.Slot("seq_lens", axis="request", dtype=torch.int64, pad=1, valid=(1, 60)), *slots()[1:]]
    assert judged(prep, with_slots=stated)[0] is Verdict.FAIL


def test_tables_that_a_prep_changes_are_put_back_before_each_run() -> None:
    def prep(view: Any) -> Any:
        before = view.tables.table[view.rows, 0].clone()
        view.tables.table[view.rows, 0] += 1
        return {"out": before}

    subject = make_subject(prep, declared=contract(outputs=REQUEST, effects=("table",)))
    before = subject.tables["table"].clone()
    assert pad_image.run(subject)[0] is Verdict.PASS
    assert torch.equal(subject.tables["table"], before)


def test_ragged_keys_are_compared_at_several_splits() -> None:
    def spread(of: Callable[[Any], Any]) -> Prep:
        def prep(view: Any) -> Any:
            row = torch.arange(view.bucket.tokens, device=view.offsets.device)
            owner = torch.searchsorted(view.offsets[1:].contiguous(), row, right=True).clamp(max=view.rows.shape[0] - 1)
            return {"out": of(view)[owner]}

        return prep

    options: dict[str, Any] = {
        "tokens_per_request": 3,
        "changes": {"ragged": True, "reads": {"rows": 0, "offsets": gg.REPEAT_LAST}},
    }
    assert judged(spread(lambda view: view.rows), {"out": "token"}, **options)[0] is Verdict.PASS
    last = spread(lambda view: view.rows + (0 if view.bucket.row_tokens else view.rows[-1]))
    verdict, text = judged(last, {"out": "token"}, **options)
    assert verdict is Verdict.FAIL
    assert "tokens, ragged, raw 2 and" in text


def test_preps_with_host_planners_see_what_they_plan() -> None:
    def plan(batch: gg.Batch, bucket: gg.Bucket) -> dict[str, Any]:
        return {"total": torch.tensor([batch.num_requests])}

    planned = [*slots(), gg.Slot("total", axis="fixed", dtype=torch.int64, pad=0, inner=(1,))]
    options: dict[str, Any] = {"plan": plan, "with_slots": planned, "changes": {"reads": {"seq_lens": 1, "total": 0}}}
    assert judged(lambda view: {"out": view.seq_lens + view.total}, **options)[0] is Verdict.PASS

    def broken(batch: gg.Batch, bucket: gg.Bucket) -> dict[str, Any]:
        raise KeyError("host mirror")

    with pytest.raises(Unseen, match="host mirror"):
        judged(lambda view: {"out": view.seq_lens}, **{**options, "plan": broken})


def test_the_check_stops_once_there_is_enough_to_act_on(monkeypatch: pytest.MonkeyPatch) -> None:
    leaves = {f"leaf{i}": "request" for i in range(20)}
    outputs: list[int] = []

    def prep(view: Any) -> Any:
        outputs.append(view.bucket.requests)
        step = len(outputs)
        return {name: view.seq_lens + (i == step % 20) for i, name in enumerate(leaves)}

    verdict, found = pad_image.run(make_subject(prep, ladder=tuple(range(1, 33)), declared=contract(outputs=leaves)))
    assert verdict is Verdict.FAIL
    assert len(found) <= 10
    assert max(outputs) < 32


def test_the_check_can_fail_only_through_its_comparison(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pad_image, "first_difference", lambda *_, **__: None)
    assert judged(REDUCED["last row"][0])[0] is Verdict.PASS
    monkeypatch.setattr(pad_image, "first_difference", lambda *_, **__: differences.Difference("out", "differs"))
    assert judged(lambda view: {"out": view.seq_lens})[0] is Verdict.FAIL


def test_evidence_of_a_kind_is_kept_once() -> None:
    evidence = Evidence(good)
    for number in range(20):
        evidence.fail("same", f"finding {number}")
    verdict, found = evidence.result("")
    assert (verdict, [one.text for one in found]) == (Verdict.FAIL, ["finding 0"])
    assert found[0].where is not None
    assert found[0].where.startswith(str(good.__code__.co_filename))
