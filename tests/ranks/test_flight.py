"""Flight records of ranks: what was agreed is in them, and the step where two part is found."""

from __future__ import annotations

from typing import Any

import pytest

from graphglue import BindError
from graphglue.flight import FlightRecord, parting
from graphglue.ranks import Planner
from tests.ranks.threads import Exchange, Meeting, Model, all_well, batch_of, group_of, runner_of, together

pytestmark = pytest.mark.usefixtures("frozen_imports")
STEPS = [(1, 2), (3, 0), (4, 4), (0, 1), (2, 3)]


def flown(refused: int | None = None) -> list[FlightRecord]:
    """Run two ranks through the steps; rank 1 hands in a misfit at one of them."""
    exchange, meeting, planner = Exchange(2), Meeting(2), Planner(ladder=[2, 4])

    def run(rank: int) -> FlightRecord:
        model = Model(meeting, rank)
        with runner_of(group_of(exchange, rank, planner), model, flight_recorder=16) as runner:
            runner.capture(progress=False)
            for position, counts in enumerate(STEPS):
                batch: Any = batch_of(counts[rank])
                if position == refused and rank == 1:
                    batch = type(batch)(counts[rank], {**batch.sources, "input_ids": [1] * 9})
                    with pytest.raises(BindError):
                        runner.replay(batch)
                else:
                    runner.replay(batch)
            return runner.flight_record()

    return all_well(together(2, run))


def test_what_was_agreed_is_kept_and_the_same() -> None:
    first, second = flown()
    assert [(record.rank, record.num_ranks) for record in (first, second)] == [(0, 2), (1, 2)]
    assert [step.number for step in first.steps] == [1, 2, 3, 4, 5]
    assert [step.plan for step in first.steps] == [step.plan for step in second.steps]
    assert [step.plan.bucket[0] for step in first.steps if step.plan] == [2, 4, 4, 2, 4]
    assert [step.raw[0] for step in second.steps if step.raw] == [counts[1] for counts in STEPS]
    assert parting(first, second) is None


def test_a_refused_batch_keeps_the_numbers_together() -> None:
    first, second = flown(refused=2)
    assert parting(first, second) is None
    assert max(step.number for step in first.steps) == max(step.number for step in second.steps) == len(STEPS)
    assert [step.number for step in second.steps if step.raised] == [3]
    assert next(step.reason for step in first.steps if step.number == 3) == "rank_veto"


def test_a_rank_that_went_elsewhere_is_found() -> None:
    first, second = flown()
    steps = list(second.steps)
    steps[3] = steps[3].model_copy(update={"bucket": (4, 4, 1)})
    found = parting(first, second.model_copy(update={"steps": tuple(steps)}))
    assert found is not None
    assert (found.number, found.fields) == (4, ("bucket",))
