"""Ranks as processes that meet through gloo: 2, 4 and 8 of them, on one machine."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

from .launch import launch

pytestmark = [
    pytest.mark.skipif(not (dist.is_available() and dist.is_gloo_available()), reason="needs a torch with gloo"),
    pytest.mark.timeout(240),
]


@pytest.mark.parametrize(
    ("size", "case"),
    [(2, "steps"), (4, "steps"), (8, "steps"), (4, "steps_through_memory")],
)
def test_ranks_take_the_same_way_with_rows_of_their_own(size: int, case: str, tmp_path: Path) -> None:
    """Each checks its outputs against the sum over all ranks; here the ways they went are compared."""
    results = launch(case, size, tmp_path)
    assert len({result["digest"] for result in results}) == 1
    assert sum(result["refused"] for result in results) == 3
    forwards, paddings = set(), set()
    for of_one_step in zip(*(result["seen"] for result in results)):
        ways = [step[1:4] for step in of_one_step if step[1] is not None]
        # An eager key has extents of its own rank and no padding, so only the decision is compared.
        assert len({(forward, tuple(bucket)) for forward, bucket, _ in ways}) == 1
        forwards |= {forward for forward, _, _ in ways}
        paddings |= {padding for _, _, padding in ways}
    assert forwards == {"graph", "eager"}
    assert {"Padding.MAX_LEN", "Padding.SUM_LEN"} <= paddings


def test_the_check_of_outputs_can_fail() -> None:
    from types import SimpleNamespace

    import torch

    from .cases import told

    step = SimpleNamespace(outputs={"own": torch.tensor([1, 2]), "all": torch.tensor([5, 6])})
    with pytest.raises(AssertionError):
        told(step, [2, 2], 0)  # type: ignore[arg-type]


def test_no_rank_replays_what_another_could_not_capture(tmp_path: Path) -> None:
    for result in launch("fails_to_capture", 2, tmp_path):
        graph, eager, larger, repaired = result["seen"]
        assert graph == ["graph", [2, 2, 1]]
        assert eager == ["eager", [3, 3, 1]]
        assert larger == ["graph", [8, 8, 1]]
        assert repaired == ["graph", [4, 4, 1]]
        assert result["repaired"] == [4]


@pytest.mark.parametrize("case", ["leaves", "leaves_memory"])
def test_a_rank_that_leaves_is_named_and_nobody_hangs(case: str, tmp_path: Path) -> None:
    first, second, _ = launch(case, 3, tmp_path)
    for result in (first, second):
        assert "rank 2 did not come to it" in result["text"]
        assert result["seconds"] < 7


def test_a_rank_that_is_gone_is_named(tmp_path: Path) -> None:
    first, _ = launch("dies", 2, tmp_path)
    assert "rank 1 did not come to it" in first["text"]


def test_in_shared_memory_a_rank_that_is_gone_is_named_long_before_the_time_is_up(tmp_path: Path) -> None:
    """A socket would say it; memory does not, so the system is asked for the lock of its process."""
    first, _ = launch("dies_in_memory", 2, tmp_path)
    assert "rank 1 did not come to it" in first["text"]
    assert "rank 1 has dropped its RankGroup, or its process has ended" in first["text"]
    assert first["seconds"] < 10


def test_a_rank_that_comes_late_does_not_go_on_alone(tmp_path: Path) -> None:
    """In shared memory the rows of those who gave up are still there; it would enter its forward without them."""
    first, late, third = launch("comes_late", 3, tmp_path)
    for text in (first, third):
        assert "rank 1 did not come to it" in text
    assert "all ranks came, some of them too late" in late
    assert "has given up waiting" in late


def test_rows_in_shared_memory_are_those_of_this_gather(tmp_path: Path) -> None:
    assert launch("many_rows_through_memory", 3, tmp_path) == [0, 0, 0]


def test_memory_that_a_rank_can_not_map_is_refused_on_all_and_leaves_nothing(tmp_path: Path) -> None:
    for opened, made, tokens, left in launch("one_maps_nothing", 3, tmp_path):
        assert 'exchange="memory": rank 1 can not map what rank 0 makes: no such place' in opened
        assert 'exchange="memory": rank 0 can not map what rank 0 makes: no such place' in made
        assert 'or use exchange="group"' in opened
        assert (tokens, left) == (4, [])


def test_ranks_that_gather_in_different_places_are_found_at_start_up(tmp_path: Path) -> None:
    for text in launch("half_in_memory", 3, tmp_path):
        assert "rank 1 was built with exchange group, most ranks (rank 0) with memory" in text


def test_a_misconfigured_rank_fails_at_start_up(tmp_path: Path) -> None:
    for text in launch("misconfigured", 3, tmp_path):
        assert "rank 1 was built with ladder [1, 2, 16], most ranks (rank 0) with [1, 2, 4, 8]" in text


def test_rows_of_another_length_are_found_before_they_meet(tmp_path: Path) -> None:
    for text in launch("longer_rows", 2, tmp_path):
        assert "rank 1 was built with num_extra 3, most ranks (rank 0) with 0" in text


def test_an_engine_may_exchange_the_facts_itself(tmp_path: Path) -> None:
    expected: list[Any] = [["graph", [4, 4, 1]], ["graph", [2, 2, 1]], ["graph", [8, 8, 1]], ["graph", [2, 2, 1]]]
    assert launch("exchanged_by_the_engine", 3, tmp_path) == [expected] * 3


def test_a_prompt_on_one_rank_beside_decode_on_the_others(tmp_path: Path) -> None:
    decoding, short, long = (
        ["decode", "graph", [2, 2, 1]],
        ["extend", "graph", [8, 16, 0]],
        ["extend", "graph", [8, 64, 0]],
    )
    assert launch("two_runners", 3, tmp_path) == [[decoding, short, decoding, long]] * 3


def test_the_tape_records_collectives(tmp_path: Path) -> None:
    assert launch("recorded_collectives", 2, tmp_path) == [{"wrong": [], "num_calls": 6}] * 2


def test_prompts_go_through_segments_and_nobody_waits_for_a_rank_that_fails(tmp_path: Path) -> None:
    """Each holds its rows against the whole group's step computed alone."""
    first, second = (result["seen"] for result in launch("prefill_in_segments", 2, tmp_path))
    assert first == ["graph", "graph", "graph", "eager", "eager", "graph", "eager", "graph"]
    assert second == [*first[:5], "SegmentError", "BindError", "graph"]


def test_a_runner_without_ranks_says_that_its_forward_meets_others(tmp_path: Path) -> None:
    """A forward with collectives has an agreement, or a warning that says so (FEATURE-GUARD-6)."""
    for without, with_one, text in launch("alone_with_a_collective", 2, tmp_path):
        assert (without, with_one) == (0, 1)
        assert "hang; give it ranks=RankGroup(...)" in text
