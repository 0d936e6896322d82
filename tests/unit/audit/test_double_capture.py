"""What a capture bakes of the host shows in the second capture; what the host does not steer, does not."""

from __future__ import annotations

import itertools
import os
import random
import time
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import graphglue as gg
from graphglue.audit import double_capture
from graphglue.audit.certificate import Verdict
from graphglue.audit.subject import Subject
from tests.unit.audit.subjects import contract, good, make_runner, slots

pytestmark = pytest.mark.usefixtures("frozen_imports")

Prep = Callable[[Any], Any]
OUT = {"out": "request"}


def judged(prep: Prep, perturb: Any = None, outputs: dict[str, str] = OUT, **options: Any) -> tuple[Verdict, str]:
    changes = {"outputs": outputs, "reads": {"seq_lens": 1, "rows": 0}, **options.pop("changes", {})}
    runner = make_runner(prep, declared=contract(**changes), **options)
    (subject,) = Subject.of(runner, (), perturb)
    verdict, found = double_capture.run(subject)
    return verdict, "\n".join(map(str, found))


def test_a_prep_that_nobody_perturbs_is_unknown_and_says_what_to_pass() -> None:
    engine = SimpleNamespace(raw_bs=3, flags=[True])

    def prep(view: Any) -> Any:
        return {"out": view.seq_lens + 0 * len(engine.flags)}

    verdict, text = judged(prep)
    assert verdict is Verdict.UNKNOWN
    assert "pass perturb=" in text
    assert "closure variable 'engine'.raw_bs" in text


STATE: dict[str, Any] = {}


def perturb() -> None:
    STATE.update(count=9, flag=False, lens=[5, 6], text="b", tensor=torch.tensor(9))


BAKED: dict[str, Prep] = {
    "scalar": lambda view: {"out": view.seq_lens + STATE["count"]},
    "branch": lambda view: {"out": view.seq_lens * 2 if STATE["flag"] else view.seq_lens},
    "loop": lambda view: {"out": sum((view.seq_lens for _ in STATE["lens"]), view.seq_lens)},
    "text": lambda view: {"out": view.seq_lens, "kind": STATE["text"]},
    "other tensor": lambda view: {"out": view.seq_lens + STATE["tensor"]},
    "shape": lambda view: {"out": view.seq_lens, "more": view.seq_lens.new_zeros(STATE["count"])},
    "structure": lambda view: {"out": view.seq_lens, **({"more": view.seq_lens} if STATE["flag"] else {})},
}


@pytest.mark.parametrize("name", BAKED)
def test_what_perturb_changes_and_a_capture_baked_fails(name: str) -> None:
    STATE.update(count=1, flag=True, lens=[5], text="a", tensor=torch.tensor(1))
    verdict, text = judged(BAKED[name], perturb)
    assert verdict is Verdict.FAIL
    assert "the same slots, captured twice:" in text
    assert "decode bucket of 1 requests" in text


def test_the_same_value_in_a_slot_passes() -> None:
    STATE.update(count=1)
    counted = [*slots(), gg.Slot("count", axis="fixed", dtype=torch.int64, pad=0, valid=(0, 9))]
    changes = {"reads": {"seq_lens": 1, "count": 0}}
    prep = lambda view: {"out": view.seq_lens + view.count}  # noqa: E731
    assert judged(prep, perturb, with_slots=counted, changes=changes)[0] is Verdict.PASS
    assert judged(good, perturb, {"pages": "request"})[0] is Verdict.PASS


def test_a_difference_names_leaf_row_and_both_values() -> None:
    STATE.update(count=1)
    late = lambda view: {"out": view.seq_lens * 0 + STATE["count"] * (view.bucket.requests == 4)}  # noqa: E731
    verdict, text = judged(late, perturb)
    assert verdict is Verdict.FAIL
    assert "decode bucket of 4 requests and 4 tokens, raw 4 and 4" in text
    assert "leaf 'out', real row 0: 9, expected 1 in the first capture" in text
    assert f"{__file__}:" in text


def test_a_baked_value_that_no_legal_step_shows_is_found_in_the_operations() -> None:
    STATE.update(count=1 << 20)
    verdict, text = judged(lambda view: {"out": view.seq_lens.clamp(max=(1 << 20) + STATE["count"])}, perturb)
    assert verdict is Verdict.FAIL
    assert "operation 0 is aten.clamp.default(" in text
    assert f"{__file__}:" in text
    STATE.update(flag=True)
    more = lambda view: [view.seq_lens + 1, {"out": view.seq_lens}][1] if STATE["flag"] else {"out": view.seq_lens}  # noqa: E731
    assert judged(more, perturb)[0] is Verdict.FAIL


def test_what_larger_buckets_left_behind_is_found_in_a_smaller_one() -> None:
    seen = [0]

    def prep(view: Any) -> Any:
        seen[0] = max(seen[0], view.bucket.requests)
        return {"out": view.seq_lens * seen[0]}

    verdict, text = judged(prep)
    assert verdict is Verdict.FAIL
    assert "bucket of 1 requests" in text


COUNTER = itertools.count()
MOVING: dict[str, Prep] = {
    "call counter": lambda view: {"out": view.seq_lens + next(COUNTER)},
    "clock": lambda view: {"out": view.seq_lens + time.perf_counter_ns()},
    "random numbers of Python": lambda view: {"out": view.seq_lens + random.randrange(1 << 40)},
    "random bytes": lambda view: {"out": view.seq_lens + int.from_bytes(os.urandom(6), "big")},
}


@pytest.mark.parametrize("name", MOVING)
def test_what_moves_by_itself_fails_without_perturb(name: str) -> None:
    assert judged(MOVING[name])[0] is Verdict.FAIL


@pytest.mark.parametrize("cycle", [2, 3, 4, 6, 12])
@pytest.mark.parametrize("ladder", [(1,), (1, 2), (1, 2, 3, 4)])
def test_what_comes_back_after_some_calls_fails(cycle: int, ladder: tuple[int, ...]) -> None:
    calls = itertools.count()
    assert judged(lambda view: {"out": view.seq_lens + next(calls) % cycle}, ladder=ladder)[0] is Verdict.FAIL


def test_random_numbers_of_python_go_on_as_if_nothing_had_happened() -> None:
    random.seed(5)
    expected = random.random()
    random.seed(5)
    judged(lambda view: {"out": view.seq_lens}, lambda: random.seed(6))
    assert random.random() == expected


def test_random_numbers_of_torch_are_no_host_value() -> None:
    verdict, _ = judged(lambda view: {"out": view.seq_lens + torch.randint(1 << 40, (1,))}, lambda: None)
    assert verdict is Verdict.PASS  # the check "trace" refuses them


def test_a_planner_that_leaves_what_it_saw_on_the_host_is_found() -> None:
    backend = SimpleNamespace(raw=0, features=frozenset())
    planned = [*slots(), gg.Slot("total", axis="fixed", dtype=torch.int64, pad=0, inner=(1,))]

    def plan(batch: gg.Batch, bucket: gg.Bucket) -> dict[str, Any]:
        backend.raw, backend.features = batch.num_requests, batch.features
        return {"total": torch.tensor([batch.num_requests])}

    options: dict[str, Any] = {"plan": plan, "with_slots": planned}
    changes = {"reads": {"seq_lens": 1, "total": 0}, "features": {"lora"}}
    faulty = lambda view: {"out": view.seq_lens + backend.raw}  # noqa: E731
    assert judged(faulty, **options, changes=changes)[0] is Verdict.FAIL
    assert judged(lambda view: {"out": view.seq_lens + view.total}, **options, changes=changes)[0] is Verdict.PASS
    by_feature = lambda view: {"out": view.seq_lens + len(backend.features)}  # noqa: E731
    assert judged(by_feature, **options, changes=changes)[0] is Verdict.FAIL


def test_a_refused_capture_fails_with_its_error() -> None:
    verdict, text = judged(lambda view: {"out": view.seq_lens + int(view.seq_lens[0])}, perturb)
    assert verdict is Verdict.FAIL
    assert "the first capture was refused" in text
    assert "reads a tensor on the host" in text

    STATE.update(flag=True)
    later = lambda view: {"out": view.seq_lens if STATE["flag"] else view.seq_lens + view.seq_lens.tolist()[0]}  # noqa: E731
    verdict, text = judged(later, perturb)
    assert verdict is Verdict.FAIL
    assert "the second capture was refused" in text


def test_perturb_is_called_once_and_undone_if_it_says_how() -> None:
    calls: list[str] = []

    def change() -> Callable[[], None]:
        calls.append("change")
        return lambda: calls.append("undo")

    assert judged(good, change, {"pages": "request"})[0] is Verdict.PASS
    assert calls == ["change", "undo"]


def test_an_error_of_perturb_is_raised_and_all_is_put_back() -> None:
    def broken() -> None:
        raise RuntimeError("no engine")

    random.seed(7)
    state = random.getstate()
    with pytest.raises(RuntimeError, match="no engine"):
        judged(good, broken, {"pages": "request"})
    assert random.getstate() == state


def test_tables_that_a_prep_changes_are_put_back() -> None:
    def prep(view: Any) -> Any:
        view.tables.table.add_(1)
        return {"out": view.tables.table[view.rows, 0].clone()}

    runner = make_runner(prep, declared=contract(outputs=OUT, effects=("table",)))
    (subject,) = Subject.of(runner, (), lambda: None)
    before = subject.tables["table"].clone()
    assert double_capture.run(subject)[0] is Verdict.PASS
    assert torch.equal(subject.tables["table"], before)


def test_the_check_can_fail_only_through_its_comparison(monkeypatch: pytest.MonkeyPatch) -> None:
    STATE.update(count=1)
    monkeypatch.setattr(double_capture, "_compare_operations", lambda *_: None)
    assert judged(BAKED["scalar"], perturb)[0] is Verdict.FAIL
    STATE.update(count=1)
    monkeypatch.setattr(double_capture, "first_difference", lambda *_: None)
    assert judged(BAKED["scalar"], perturb)[0] is Verdict.PASS
