"""Named ranges: each part of a step inside its own, and no part of a runner that does not ask for them."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from graphglue import BindError
from graphglue.device.cpu import CpuDevice
from graphglue.ranks import Planner
from graphglue.stepping import Stepper
from tests.ranks.threads import Exchange, Meeting, Model, all_well, batch_of, group_of, runner_of, together
from tests.unit.operations import batch, make, serve

pytestmark = pytest.mark.usefixtures("frozen_imports")


@pytest.fixture
def ranges(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What is entered and left, in order."""
    seen: list[str] = []

    @contextmanager
    def named_range(self: CpuDevice, name: str) -> Iterator[None]:
        seen.append(f"+{name.removeprefix('graphglue.')}")
        try:
            yield
        finally:
            seen.append(f"-{name.removeprefix('graphglue.')}")

    monkeypatch.setattr(CpuDevice, "named_range", named_range)
    return seen


def test_a_step_in_one_launch_is_one_range(ranges: list[str]) -> None:
    runner = make(nvtx=True)
    assert ranges == []
    serve(runner, [3, 4])
    assert ranges == ["+replay", "-replay"] * 2
    ranges.clear()
    runner.prepare(batch(3))
    assert ranges == ["+fill", "-fill", "+prep", "-prep"]


def test_a_step_part_by_part_shows_each(ranges: list[str]) -> None:
    serve(make(nvtx=True), [9])
    assert ranges == ["+fill", "-fill", "+prep", "-prep", "+forward", "-forward"]


def test_copies_and_staged_steps_are_marked(ranges: list[str]) -> None:
    serve(make(nvtx=True, clone_outputs=True), [3])
    assert ranges == ["+replay", "-replay"]
    ranges.clear()
    runner = make(nvtx=True, staging=True)
    runner.stage(batch(3))
    serve(runner, [3])
    assert ranges == ["+stage", "-stage", "+prep", "-prep", "+forward", "-forward"]


def test_a_range_is_left_where_its_part_raises(ranges: list[str]) -> None:
    def prep(view: object) -> dict:
        if view.bucket.requests == 9:  # type: ignore[attr-defined]
            raise BindError("no")
        return {"m": view.x + 1}  # type: ignore[attr-defined]

    runner = make(prep, nvtx=True)
    with pytest.raises(BindError):
        runner.replay(batch(9))
    assert ranges == ["+fill", "-fill", "+prep", "-prep"]


def test_a_runner_that_does_not_ask_runs_the_code_it_always_ran(ranges: list[str]) -> None:
    runner = make()
    serve(runner, [3, 9])
    runner.prepare(batch(2))
    assert ranges == []
    assert not {"_fill", "_run_preps", "_run_launch"} & set(vars(runner._stepper))
    assert "lane_of" not in vars(runner._stepper.decider)
    assert runner._stepper._fill.__func__ is Stepper._fill


def test_ranks_show_where_they_wait_for_each_other(ranges: list[str]) -> None:
    exchange, meeting, planner = Exchange(2), Meeting(2), Planner(ladder=[2, 4])

    def run(rank: int) -> None:
        with runner_of(group_of(exchange, rank, planner), Model(meeting, rank), nvtx=True) as runner:
            runner.capture(progress=False)
            runner.replay(batch_of(1 + rank))

    all_well(together(2, run))
    assert ranges.count("+agree") == ranges.count("-agree") == 2
    assert ranges.count("+replay") == 2
