"""What a runner says of itself: counters against a tally by hand, footprints, the budget, the log."""

from __future__ import annotations

import json
import logging
from collections import Counter
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from graphglue import Decision, Mode, Reason, State
from graphglue.budget import plan_budget
from graphglue.core.keys import Key
from graphglue.entry import Entry
from graphglue.footprint import Footprints
from tests.unit.operations import LADDER, batch, make, serve

pytestmark = pytest.mark.usefixtures("frozen_imports")
COUNTS = [3, 1, 0, 5, 9, 8, 3, 2, 0, 7, 12]


def test_the_counters_are_those_of_a_tally_by_hand() -> None:
    runner, routes, keys, rows = make(), Counter[Any](), Counter[Any](), Counter[Any]()
    for requests in COUNTS:
        decision: Decision = runner.replay(batch(requests)).decision
        exact = requests > LADDER[-1]
        where = (decision.reason.value, None if exact else tuple(decision.bucket))
        routes[where] += 1
        rows[where] += decision.bucket.tokens - requests
        keys[tuple(decision.bucket)] += bool(decision)
    stats = runner.stats()

    def by_reason(field: str) -> dict[Any, int]:
        return {(one["reason"], one["bucket"] and tuple(one["bucket"])): one[field] for one in stats["routes"]}

    assert by_reason("steps") == routes
    assert by_reason("padded_tokens") == rows
    assert stats["padded_tokens"] == sum(rows.values()) == stats["bucket_tokens"] - stats["real_tokens"]
    assert stats["real_tokens"] == sum(COUNTS)
    assert {tuple(key["bucket"]): key["steps"] for key in stats["keys"]} == {k: n for k, n in keys.items() if n}


def test_stats_are_json_whatever_happened() -> None:
    runner = make(shadow={"first": 1}, staging=True)
    for stats in (runner.stats(), runner.stats()):
        assert json.loads(json.dumps(stats, allow_nan=False)) == stats
    serve(runner, COUNTS)
    runner.stage(batch(3))
    serve(runner, [3])
    runner._units[0].cache.quarantine(runner._wanted[0], "it broke")
    runner.reset()
    stats = runner.stats()
    assert json.loads(json.dumps(stats, allow_nan=False)) == stats
    assert stats["version"] == 1
    assert stats["steps"] == len(COUNTS) + 1


def test_a_key_that_no_step_replayed_counts_none() -> None:
    runner = make(enabled=False)
    serve(runner, [2, 2])
    assert runner.stats()["steps"] == 2
    assert {key["steps"] for key in runner.stats()["keys"]} == {0}


def test_quarantines_are_counted_for_good_and_told_with_their_cause() -> None:
    runner = make()
    assert runner.stats()["quarantines"] == {"forward": 0, "meta": 0}
    runner._units[0].cache.quarantine(runner._wanted[0], "it broke")
    runner._stepper.forget()
    (told,) = [key["causes"] for key in runner.stats()["keys"] if key["causes"]]
    assert told == {"meta": "CaptureError: it broke"}
    assert runner.maintain()
    assert not any(key["causes"] for key in runner.stats()["keys"])
    assert runner.stats()["quarantines"] == {"forward": 0, "meta": 1}


class CountingDevice:
    """A GPU whose driver has so many bytes left, one after the other."""

    torch_device = SimpleNamespace(type="cuda")

    def __init__(self, *free: int | None) -> None:
        self._free = list(free)

    def free_bytes(self) -> int | None:
        return self._free.pop(0)


KEY = Key(Mode.DECODE, 4, 4, 1)


def weighed(*free: int | None, pool: int, state: State = State.CAPTURED) -> dict[str, int | None]:
    footprints = Footprints(CountingDevice(*free))  # type: ignore[arg-type]
    with footprints.weighing(KEY):
        pass
    outputs = torch.zeros(4, dtype=torch.int64)
    result = {"m": outputs, "again": outputs, "n": torch.zeros(2, dtype=torch.int8), "k": 3}
    return footprints.of(KEY, [Entry(state, result=result, num_bytes=pool)])


def test_what_the_driver_took_beyond_the_allocator_is_the_graph_s() -> None:
    assert weighed(1000, 400, pool=450) == {
        "pool_bytes": 450, "driver_bytes": 600, "exec_bytes": 150, "outputs_bytes": 34, "freed_bytes": 150,
    }  # fmt: skip


def test_memory_that_somebody_else_freed_meanwhile_makes_no_negative_graph() -> None:
    memory = weighed(400, 1000, pool=450)
    assert (memory["driver_bytes"], memory["exec_bytes"]) == (0, 0)


def test_a_device_that_counts_nothing_says_so() -> None:
    memory = weighed(None, None, pool=450)
    assert (memory["driver_bytes"], memory["exec_bytes"], memory["pool_bytes"]) == (None, None, 450)


def test_a_key_that_is_no_longer_captured_holds_nothing() -> None:
    memory = weighed(1000, 400, pool=450, state=State.QUARANTINED)
    assert [memory[f"{part}_bytes"] or 0 for part in ("pool", "exec", "outputs", "freed")] == [0, 0, 0, 0]


def test_the_tape_s_keys_hold_what_they_allocated() -> None:
    runner = make()
    for key in runner.stats()["keys"]:
        requests = key["bucket"][0]
        assert key["memory"]["outputs_bytes"] == 2 * 8 * requests  # metadata and output, int64 each
        assert key["memory"]["freed_bytes"] == key["memory"]["pool_bytes"] == key["num_bytes"] >= 2 * 8 * requests


def key_of(steps: int, pool: int, exec_bytes: int | None, freed: int) -> dict[str, Any]:
    memory = {"pool_bytes": pool, "exec_bytes": exec_bytes, "freed_bytes": freed}
    return {"mode": "decode", "bucket": [1, 1, 1], "variant": "None", "steps": steps, "memory": memory}


def test_the_budget_names_the_fewest_steps_per_byte_first() -> None:
    stats = {"keys": [key_of(90, 0, 30, 30), key_of(10, 0, 10, 10), key_of(0, 0, 5, 5), key_of(8, 0, 20, 20)]}
    plan = plan_budget(stats, 40)
    assert [drop.position for drop in plan.drops] == [2, 3]
    assert (plan.held_bytes, plan.left_bytes, plan.enough) == (65, 40, True)
    assert plan_budget(stats, 65).drops == ()


def test_pools_go_only_when_every_key_goes() -> None:
    stats = {"keys": [key_of(1, 100, 10, 10), key_of(50, 0, 10, 10)]}
    assert [drop.position for drop in plan_budget(stats, 110).drops] == [0]
    plan = plan_budget(stats, 99)
    assert (len(plan.drops), plan.left_bytes) == (2, 0)


KEYS = st.builds(
    lambda steps, pool, graphs, shared: key_of(steps, pool, graphs, graphs if shared else pool + graphs),
    st.integers(0, 50), st.integers(0, 50), st.integers(0, 50), st.booleans(),
)  # fmt: skip


@given(st.lists(KEYS, max_size=6), st.integers(0, 200))
def test_a_budget_s_plan_is_enough_and_names_nothing_in_vain(keys: list[Any], budget: int) -> None:
    plan = plan_budget({"keys": keys}, budget)
    assert plan.enough
    assert plan.held_bytes == sum(one["memory"]["pool_bytes"] + one["memory"]["exec_bytes"] for one in keys)
    positions = [drop.position for drop in plan.drops]
    assert len(set(positions)) == len(positions)
    if plan.left_bytes:  # without its last drop it would not be enough, and no other key is worth less
        assert plan.left_bytes == plan.held_bytes - sum(drop.freed_bytes for drop in plan.drops)
        assert not plan.drops or plan.left_bytes + plan.drops[-1].freed_bytes > budget
        worth = [keys[at]["steps"] / keys[at]["memory"]["freed_bytes"] for at in positions]
        kept = [one for at, one in enumerate(keys) if at not in positions and one["memory"]["freed_bytes"]]
        assert all(one["steps"] / one["memory"]["freed_bytes"] >= max(worth) for one in kept if worth)


def test_capture_tells_its_begin_and_end(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "graphglue")
    make()
    told = [record.getMessage() for record in caplog.records if record.name == "graphglue"]
    assert "capture of 4 keys begins" in told[0]
    assert "capture ends: 4 of 4 keys" in told[-1]


def test_steps_tell_each_reason_once_and_nothing_else_above_debug(caplog: pytest.LogCaptureFixture) -> None:
    runner = make(shadow={"first": 2, "every": 3})
    runner._units[0].cache.quarantine(runner._wanted[-1], "it broke")
    runner._stepper.forget()
    caplog.clear()
    caplog.set_level(logging.DEBUG, "graphglue")
    serve(runner, COUNTS)
    told = [record for record in caplog.records if record.levelno > logging.DEBUG]
    levels = {
        reason: record.levelname for reason in Reason for record in told if f" {reason.value} (" in record.getMessage()
    }
    assert levels == {Reason.QUARANTINED: "WARNING", Reason.OVER_LADDER: "WARNING", Reason.IDLE_EAGER: "INFO"}
    assert len(told) == 3
    caplog.clear()
    serve(runner, COUNTS * 5)
    assert [record.getMessage() for record in caplog.records if record.levelno > logging.DEBUG] == []
