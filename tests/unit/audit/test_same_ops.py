"""What depends on the step is named by the first operation that differs, with both sides and its line."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import pytest
import torch

import graphglue as gg
from graphglue.audit import same_ops
from graphglue.audit.certificate import Finding, Verdict
from graphglue.audit.subject import Unseen
from tests.unit.audit.subjects import contract, good, make_subject, slots

Prep = Callable[[Any], Any]
STATE: dict[str, Any] = {}


def compared(prep: Prep, **options: Any) -> tuple[Verdict, list[Finding]]:
    STATE.clear()
    return same_ops.run(make_subject(prep, **options))


def line_of(prep: Prep) -> str:
    lines, first = inspect.getsourcelines(prep)
    return f"{__file__}:{first + next(n for n, line in enumerate(lines) if '# here' in line)}"


def a_scalar(view: Any) -> Any:
    STATE["calls"] = STATE.get("calls", 0) + 1
    return {**good(view), "positions": view.seq_lens - STATE["calls"]}  # here


def a_branch(view: Any) -> Any:
    STATE["calls"] = STATE.get("calls", 0) + 1
    if STATE["calls"] % 5:
        return {**good(view), "positions": view.seq_lens - 1}
    return {**good(view), "positions": view.seq_lens.neg()}  # here


def a_shape(view: Any) -> Any:
    STATE["calls"] = STATE.get("calls", 0) + 1
    return {**good(view), "more": torch.arange(STATE["calls"])}  # here


def a_dtype(view: Any) -> Any:
    STATE["calls"] = STATE.get("calls", 0) + 1
    return {**good(view), "positions": view.seq_lens.to(torch.int32 if STATE["calls"] < 4 else torch.int16)}  # here


def one_more(view: Any) -> Any:
    STATE["calls"] = STATE.get("calls", 0) + 1
    found = good(view)
    if STATE["calls"] == 6:
        found["positions"] = found["positions"] + 0  # here
    return found


def a_baked_number(view: Any) -> Any:
    STATE["calls"] = STATE.get("calls", 0) + 1
    return {**good(view), "positions": view.seq_lens - torch.tensor(STATE["calls"])}  # here


def contents(view: Any) -> Any:
    positions = view.seq_lens - 1
    if bool((view.seq_lens > 30).all()):
        positions = positions * 2  # here
    return {**good(view), "positions": positions}


def the_raw_count(view: Any) -> Any:
    count = int(view.count[0])
    return {"positions": view.seq_lens[:count].sum(dim=0, keepdim=True).expand(view.bucket.requests) + 0}  # here


FAULTS = [a_scalar, a_branch, a_shape, a_dtype, one_more, a_baked_number]


@pytest.mark.parametrize("prep", FAULTS)
def test_the_first_operation_that_differs_is_named(prep: Prep) -> None:
    verdict, found = compared(prep, ladder=[4])
    assert verdict is Verdict.FAIL
    assert found[0].where == line_of(prep)
    assert "recorded was" in found[0].text


def test_both_sides_are_told() -> None:
    _, found = compared(a_scalar, ladder=[1])
    assert "aten.sub.Tensor(int64[1] in slot seq_lens + 0, 4)" in found[0].text
    assert "recorded was aten.sub.Tensor(int64[1] in slot seq_lens + 0, 3)" in found[0].text
    assert "a step of 1 requests and 1 tokens in bucket (1, 1, 1)" in found[0].text


def test_contents_that_steer_are_found() -> None:
    verdict, _ = compared(contents, ladder=[1])
    assert verdict is Verdict.FAIL


def test_the_raw_count_that_steers_is_found() -> None:
    count = gg.Slot("count", axis="fixed", dtype=torch.int32, pad=0, inner=(1,), value=gg.RAW_REQUESTS)
    declared = contract(reads={"seq_lens": 1, "count": 0}, tables=(), outputs={})
    verdict, found = compared(the_raw_count, ladder=[4], declared=declared, with_slots=[*slots(), count])
    assert verdict is Verdict.FAIL
    assert "_local_scalar_dense" in found[0].text, "the read comes before what it steers"


@pytest.mark.parametrize(("first", "second"), [(3, 4), (None, 1), ("a", "b")])
def test_a_plain_leaf_that_differs_is_named(first: Any, second: Any) -> None:
    def prep(view: Any) -> Any:
        STATE["calls"] = STATE.get("calls", 0) + 1
        return {**good(view), "longest": first if STATE["calls"] < 5 else second}

    verdict, found = compared(prep, ladder=[2])
    assert verdict is Verdict.FAIL
    assert repr(first) in found[0].text
    assert repr(second) in found[0].text


def test_another_result_of_the_same_looks_is_found() -> None:
    def prep(view: Any) -> Any:
        STATE["calls"] = STATE.get("calls", 0) + 1
        one, other = view.seq_lens - 1, view.seq_lens - 1
        return {**good(view), "positions": one if STATE["calls"] < 5 else other}

    verdict, found = compared(prep, ladder=[2])
    assert verdict is Verdict.FAIL
    assert "returns" in found[0].text


def test_what_the_first_calls_make_is_no_difference() -> None:
    def prep(view: Any) -> Any:
        if "buffer" not in STATE:
            STATE["buffer"] = torch.zeros(64, dtype=torch.int64)
        return {**good(view), "positions": STATE["buffer"][: view.bucket.requests].copy_(view.seq_lens)}

    assert compared(prep)[0] is Verdict.PASS


def test_a_correct_prep_passes_and_says_how_many_steps_were_looked_at() -> None:
    verdict, found = compared(good, ladder=[1, 2, 4])
    assert verdict is Verdict.PASS
    assert found[0].text == f"{1 + 2 + 4 + 3 * 3} steps at 3 keys did what is recorded for them"


def test_a_bucket_may_steer() -> None:
    def prep(view: Any) -> Any:
        return good(view) if view.bucket.requests < 4 else {**good(view), "wide": torch.arange(view.bucket.requests)}

    assert compared(prep)[0] is Verdict.PASS


def test_no_step_is_unseen() -> None:
    subject = make_subject(declared=contract(padded=False, ragged=True))
    subject.keys = [key for key in subject.keys if key.row_tokens == 0]
    with pytest.raises(Unseen, match="no step is served"):
        same_ops.run(subject)
