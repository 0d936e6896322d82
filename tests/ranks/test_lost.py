"""A rank that is lost while runners serve: named in time, counted nowhere, and nobody else's trouble.

What a group says of it is in ``test_runners`` and, with real processes, in ``test_processes``; here is what becomes
of the runners.
"""

from __future__ import annotations

import threading
from typing import Any

import pytest

import graphglue as gg
from graphglue.ranks import Planner
from tests.faults import DECODE, Decode

from .threads import Exchange, group_of, together

pytestmark = pytest.mark.usefixtures("frozen_imports")
SIZE, LOST = 3, 1
GLUED = (gg.Route.GLUE, gg.Route.GRAPH)


def test_a_lost_rank_is_named_and_what_does_not_need_it_goes_on() -> None:
    exchange, again, alone = Exchange(SIZE), Exchange(SIZE), threading.Barrier(SIZE - 1)

    def serve(rank: int) -> dict[str, Any]:
        engine = Decode(contract=DECODE, ranks=group_of(exchange, rank, Planner(Decode.SIZES), timeout_s=0.5))
        engine.capture()
        first = engine.right(1 + rank, rank)
        assert (first.prep, first.forward) == GLUED
        assert first.bucket.requests == 4
        if rank == LOST:
            engine.runner.close()
            return {}
        said = []
        before = engine.bytes(), engine.runner.stats()["routes"]
        for raw in (3, 0):  # the first that misses it, and one behind: nothing waits twice
            with pytest.raises(gg.RankDisagreementError) as caught:
                engine.runner.replay(engine.batch(raw))
            said.append(str(caught.value))
        assert (engine.bytes(), engine.runner.stats()["routes"]) == before
        assert engine.runner.can_replay(engine.batch(3))
        alone.wait(20)
        own = Decode()  # what agrees with nobody serves on
        own.capture()
        decision = own.right(3, rank)
        assert (decision.prep, decision.forward) == GLUED
        engine.runner.close()
        return {"said": said}

    results = together(SIZE, serve)
    for rank in (0, 2):
        assert isinstance(results[rank], dict), results[rank]
        first, second = results[rank]["said"]
        assert f"Rank {rank} waited up to 0.5 s in exchange" in first
        assert f"step 2 with {3} requests of {3} tokens: rank {LOST} did not come to it" in first
        assert "restart the group" in first
        assert second.startswith("the group is of no use after a failed exchange; build another. Rank")

    def restart(rank: int) -> bool:
        engine = Decode(contract=DECODE, ranks=group_of(again, rank, Planner(Decode.SIZES), timeout_s=20))
        engine.capture()
        decision = engine.right(3, rank)
        return (decision.prep, decision.forward) == GLUED

    assert together(SIZE, restart) == [True] * SIZE
