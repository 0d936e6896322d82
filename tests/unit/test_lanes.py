"""Lanes: what was decided for a step's counts is looked up for the next, and never served where it is not right."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import graphglue as gg
from graphglue import Batch, BindError, Mode, PrepContract, Reason, Registry, Route, Runner, RunnerConfig, Slot
from graphglue.lanes import Lane, Lanes

pytestmark = pytest.mark.usefixtures("frozen_imports")

LADDER = [2, 4, 8]


def build(**more: Any) -> Runner:
    """Build a runner with a request slot, an offset slot and a fixed one, two modes and two variants."""
    contract = PrepContract(
        name="p",
        reads={"x": 1, "cu": gg.REPEAT_LAST},
        tables=("t",),
        modes={Mode.DECODE, Mode.VERIFY},
        features=frozenset({"lora"}),
        idle="glue",
        **more.pop("contract", {}),
    )
    registry = Registry()
    registry.register(contract)(more.pop("prep", lambda view: {"m": view.x * 2 + view.tables.t[0]}))
    made: dict[str, Any] = {
        "slots": [
            Slot("x", "request", torch.int64, 1),
            Slot("cu", "offset", torch.int32, gg.REPEAT_LAST, missing="pad"),
            Slot("scale", "fixed", torch.float32, 0.5, inner=(2,), missing="pad"),
        ],
        "ladder": LADDER,
        "registry": registry,
        "prep": "p",
        "tables": {"t": torch.tensor([100])},
        "forward": lambda view, metadata: metadata["m"] + view.scale[0].long(),
        "variants": (None, "other"),
        "output_axes": "request",
    }
    return Runner(**{**made, **more})


def captured(**more: Any) -> Runner:
    runner = build(**more)
    runner.capture(progress=False)
    return runner


def batch(requests: int, **more: Any) -> Batch:
    return Batch(requests, {"x": list(range(int(requests)))} if requests else {}, **more)


def kept(runner: Runner) -> dict[Any, Lane]:
    return runner._stepper.decider._lanes._kept


# Lanes by themselves.


def lane(number: int = 0) -> Any:
    return SimpleNamespace(number=number)


def test_a_lane_is_found_by_its_counts() -> None:
    lanes, made = Lanes(), lane()
    lanes.keep((3, None), made)
    assert lanes.get((3, None)) is made
    assert lanes.get((4, None)) is None
    lanes.clear()
    assert lanes.get((3, None)) is None


def test_no_more_lanes_are_kept_than_serve() -> None:
    lanes = Lanes(max_lanes=3)
    for number in range(50):
        lanes.keep(number, lane(number))
        assert len(lanes._kept) <= 3
        assert lanes.get(number).number == number
        assert all(found is None or found.number == other for other in range(number) for found in [lanes.get(other)])


def test_counts_that_can_not_be_looked_up_are_no_error() -> None:
    lanes = Lanes()
    lanes.keep((3, {"lora"}), lane())
    assert lanes._kept == {}
    with pytest.raises(TypeError):  # the stepper catches it
        lanes.get((3, {"lora"}))


# A runner's lanes.


def test_a_step_of_known_counts_is_not_decided_again(monkeypatch: pytest.MonkeyPatch) -> None:
    runner = captured()
    first = runner.replay(batch(3))
    monkeypatch.setattr(runner._stepper.decider, "decide", lambda *_: pytest.fail("decided again"))
    again = runner.replay(batch(3))
    assert (again.decision, again.outputs.tolist()) == (first.decision, [100, 102, 104])
    with pytest.raises(pytest.fail.Exception, match="decided again"):
        runner.replay(batch(5))


def test_each_part_of_the_counts_makes_a_lane_of_its_own() -> None:
    runner = captured()
    steps = [
        batch(3), batch(4), batch(3, mode=Mode.VERIFY), batch(3, variant="other"), batch(3, num_tokens=6),
        batch(3, features=frozenset({"lora"})), batch(3, features=frozenset({"tbo"})), Batch.idle(),
    ]  # fmt: skip
    decisions = [runner.replay(step).decision for step in steps]
    assert len(kept(runner)) == len(steps)
    assert [runner.replay(step).decision for step in steps] == decisions
    assert decisions[6].reason is Reason.FEATURE_NOT_AUDITED
    assert decisions[4].bucket == gg.Bucket(4, 8, 2)


def test_steps_that_spread_as_many_tokens_otherwise_share_a_lane(monkeypatch: pytest.MonkeyPatch) -> None:
    runner = captured(contract={"ragged": True}, tokens_per_request=2)
    first = runner.replay(batch(3, row_tokens=[1, 2, 2])).decision
    number = len(kept(runner))
    monkeypatch.setattr(runner._stepper.decider, "decide", lambda *_: pytest.fail("decided again"))
    for row_tokens in ([2, 1, 2], (2, 2, 1), np.array([1, 3, 1]), [1, 2, 2]):
        again = runner.replay(batch(3, row_tokens=row_tokens))
        assert (again.decision, again.raw) == (first, gg.Bucket(3, 5, 0))
        assert again.outputs.tolist() == [100, 102, 104]
    assert len(kept(runner)) == number
    for other in ({"row_tokens": [1, 1, 2]}, {"row_tokens": [2, 2, 2]}, {"row_tokens": [1, 2, 2], "mode": Mode.VERIFY}):
        with pytest.raises(pytest.fail.Exception, match="decided again"):
            runner.replay(batch(3, **other))


@pytest.mark.parametrize("features", [{"lora"}, frozenset({"lora"}), ["lora"], ("lora",), {"lora": 1}], ids=repr)
def test_features_of_any_container_are_taken(features: Any) -> None:
    runner = captured()
    for _ in range(3):
        for given_features in (features, frozenset({"tbo"}), frozenset()):
            step = runner.replay(batch(3, features=given_features))
            assert step.outputs.tolist() == [100, 102, 104]
            unknown = given_features == frozenset({"tbo"})
            assert step.decision.prep is (Route.EAGER if unknown else Route.GLUE)


# Counts of another type than the ones a lane was made for, though equal to them.

EQUALS: dict[str, Callable[[], Batch]] = {
    "num_requests is a bool": lambda: Batch(True, {"x": [5]}),
    "num_requests is a float": lambda: Batch(3.0, {"x": [5, 6, 7]}),
    "num_requests is a tensor": lambda: Batch(torch.tensor(3.0), {"x": [5, 6, 7]}),
    "num_tokens is a float": lambda: Batch(3, {"x": [5, 6, 7]}, num_tokens=3.0),
    "num_tokens is a bool": lambda: Batch(1, {"x": [5]}, num_tokens=True),
    "mode is a text": lambda: Batch(3, {"x": [5, 6, 7]}, mode="decode"),
    "no requests and a source": lambda: Batch(0, {"x": []}),
    "no requests and a fixed source": lambda: Batch(0, {"scale": [7.0, 7.0]}),
    "no requests and an offset": lambda: Batch(0, {"cu": [3]}),
    "no requests and tokens": lambda: Batch(0, {}, num_tokens=2),
    "unequal row_tokens": lambda: Batch(3, {"x": [5, 6, 7]}, row_tokens=[1, 1]),
    "row_tokens of another sum": lambda: Batch(3, {"x": [5, 6, 7]}, num_tokens=3, row_tokens=[1, 1, 2]),
    "an unhashable variant": lambda: Batch(3, {"x": [5, 6, 7]}, variant=[1]),
    "a negative count": lambda: Batch(-3, {"x": [5, 6, 7]}),
}


def visited() -> Runner:
    """Give a runner that has lanes for all the equal counts above."""
    runner = captured()
    for step in (batch(1), batch(3), batch(1, num_tokens=1), batch(3, num_tokens=3), Batch.idle(), batch(0)):
        runner.replay(step)
    for row_tokens in ([1], [1, 1, 1], [1, 1, 2]):
        runner.replay(batch(len(row_tokens), row_tokens=row_tokens))
    return runner


@pytest.mark.parametrize("name", EQUALS)
def test_what_a_new_runner_refuses_is_refused_after_any_steps(name: str) -> None:
    for runner in (captured(), visited()):
        before = {slot: runner.view(8)[slot].clone() for slot in runner.view(8)}
        for _ in range(2):
            with pytest.raises(BindError):
                runner.replay(EQUALS[name]())
        assert all(torch.equal(runner.view(8)[slot], before[slot]) for slot in before)


@pytest.mark.parametrize("three", [np.int64(3), np.int32(3), np.uint8(3), torch.tensor(3)], ids=repr)
def test_integers_of_other_types_are_taken_as_on_a_new_runner(three: Any) -> None:
    for runner in (captured(), visited()):
        for _ in range(2):
            step = runner.replay(Batch(three, {"x": [5, 6, 7]}))
            assert (step.outputs.tolist(), step.raw) == ([110, 112, 114], gg.Bucket(3, 3, 1))
            step = runner.replay(Batch(3, {"x": [5, 6, 7]}, num_tokens=three))
            assert (step.outputs.tolist(), step.raw) == ([110, 112, 114], gg.Bucket(3, 3, 1))


@given(data=st.data())
def test_a_looked_up_decision_is_the_one_that_would_be_made(data: st.DataObject) -> None:
    runner = SHARED.setdefault("runner", captured(config=RunnerConfig(waste_limit=3.0)))
    requests = data.draw(st.integers(0, 9))
    rows = st.lists(st.integers(1, 3), min_size=requests, max_size=requests)
    step = data.draw(
        st.builds(
            batch,
            st.just(requests),
            row_tokens=st.none() | rows | st.just([2] * requests),
            mode=st.sampled_from([Mode.DECODE, Mode.VERIFY, Mode.DRAFT]),
            variant=st.sampled_from([None, "other", "third"]),
            features=st.sampled_from([frozenset(), frozenset({"lora"}), frozenset({"tbo"}), {"lora"}, ("tbo",)]),
        )
    )
    found = runner._stepper.decider.lane(step)
    raw, facts, decision = runner._stepper.decider.decide(step)
    assert (found.raw, found.facts, found.decision) == (raw, facts, decision)
    assert runner.can_replay(step) == decision


SHARED: dict[str, Runner] = {}


# What changes a state forgets the lanes.


def routes(runner: Runner, *steps: Batch) -> list[tuple[Route, Route]]:
    decisions = [runner.replay(step).decision for step in steps]
    return [(decision.prep, decision.forward) for decision in decisions]


GLUED, EAGER = (Route.GLUE, Route.GRAPH), (Route.EAGER, Route.EAGER)


def test_capture_and_reset_are_seen_by_steps_of_known_counts() -> None:
    runner = build()
    assert routes(runner, batch(3), batch(8)) == [EAGER, EAGER]
    runner.capture([4], progress=False)
    assert routes(runner, batch(3), batch(8)) == [GLUED, EAGER]
    runner.reset()
    assert routes(runner, batch(3), batch(8)) == [EAGER, EAGER]
    runner.capture(progress=False)
    assert routes(runner, batch(3), batch(8)) == [GLUED, GLUED]


def test_a_capture_that_fails_is_seen_too() -> None:
    fails: list[bool] = []

    def prep(view: Any) -> dict[str, torch.Tensor]:
        if fails:
            raise RuntimeError("fails now")
        return {"m": view.x * 2 + view.tables.t[0]}

    runner = build(prep=prep)
    runner.capture([4], progress=False)
    assert routes(runner, batch(3)) == [GLUED]
    runner.reset()
    fails.append(True)
    with pytest.raises(gg.CaptureError):
        runner.capture([4], progress=False)
    fails.clear()
    assert routes(runner, batch(3))[0][0] is Route.EAGER
    assert len(runner.maintain()) == 4  # one bucket, two modes, two variants
    assert routes(runner, batch(3)) == [GLUED]


def test_a_table_that_was_bound_anew_is_read_by_steps_of_known_counts() -> None:
    runner = captured()
    assert runner.replay(batch(3)).outputs.tolist() == [100, 102, 104]
    runner.rebind_table("t", torch.tensor([500]))
    step = runner.replay(batch(3))
    assert (step.outputs.tolist(), step.decision.prep) == ([500, 502, 504], Route.EAGER)
    runner.maintain()
    step = runner.replay(batch(3))
    assert (step.outputs.tolist(), step.decision.prep) == ([500, 502, 504], Route.GLUE)


def test_a_refused_source_leaves_the_lane_as_it_was() -> None:
    runner = captured()
    for step in (batch(3), batch(3)):
        runner.replay(step)
    for bad in ({"x": [1, 2]}, {"x": [1.5, 2.5, 3.5]}, {"x": [1, 2, 3], "nobody": [1]}, {}, None, 5):
        with pytest.raises(BindError):
            runner.replay(Batch(3, bad))
        assert runner.replay(batch(3)).outputs.tolist() == [100, 102, 104]


def test_a_slot_that_is_handed_in_now_and_then_goes_back_to_its_pad() -> None:
    runner = captured()
    for _ in range(3):
        assert runner.replay(Batch(2, {"x": [1, 2], "scale": [7.0, 0.0]})).outputs.tolist() == [109, 111]
        assert runner.replay(Batch(2, {"x": [1, 2]})).outputs.tolist() == [102, 104]


def test_outputs_of_one_lane_are_containers_of_the_callers_own() -> None:
    runner = captured(forward=lambda view, metadata: {"a": metadata["m"], "b": [metadata["m"] + 1]})
    first = runner.replay(batch(3))
    first.outputs.clear()
    first.metadata["m"] = None
    again = runner.replay(batch(3))
    assert again.outputs["a"].tolist() == [100, 102, 104]
    assert again.outputs["b"][0].tolist() == [101, 103, 105]
    assert again.metadata["m"] is not None


def test_steps_outside_the_ladder_make_no_lanes() -> None:
    runner = captured()
    for requests in range(9, 40):
        assert runner.replay(batch(requests)).decision.reason is Reason.OVER_LADDER
    assert kept(runner) == {}


def test_steps_are_counted_by_lanes_as_without_them() -> None:
    runner = captured()
    for requests in (3, 3, 4, 3, 0, 8, 0):
        runner.replay(batch(requests))
    stats = runner.stats()
    assert (stats["steps"], stats["real_tokens"]) == (7, 21)
    assert stats["bucket_tokens"] == 4 * 4 + 2 * 2 + 8
    runner.reset()
    runner.replay(batch(3))
    assert runner.stats()["steps"] == 8
