"""Chunks: what prefill steps read is every token once and in order; what ladders waste is counted right."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from graphglue import ConfigError, Ladder
from graphglue.demo.chunks import Chunk, LadderWaste, chunks_of, compare_ladders, ladder_waste, pack

lengths_of_prompts = st.lists(st.integers(1, 60), max_size=12)


@given(length=st.integers(1, 500), max_tokens=st.integers(1, 70))
def test_a_prompt_is_cut_into_full_chunks_and_a_rest(length: int, max_tokens: int) -> None:
    *full, last = chunks_of(length, max_tokens)
    assert set(full) <= {max_tokens}
    assert 1 <= last <= max_tokens
    assert sum(full) + last == length


@given(lengths=lengths_of_prompts, max_tokens=st.integers(1, 32), max_requests=st.integers(1, 4))
def test_every_token_is_read_once_and_behind_those_before_it(
    lengths: list[int], max_tokens: int, max_requests: int
) -> None:
    read = [0] * len(lengths)
    order = []
    for step in pack(lengths, max_tokens, max_requests):
        assert 1 <= len(step) <= max_requests
        assert sum(chunk.num_tokens for chunk in step) <= max_tokens
        assert len({chunk.prompt for chunk in step}) == len(step)  # attention sees earlier steps' chunks
        for chunk in step:
            assert chunk.begin == read[chunk.prompt]
            read[chunk.prompt] = chunk.end
            order.append(chunk.prompt)
    assert read == lengths
    assert order == sorted(order)  # first come, first served


@given(lengths=lengths_of_prompts, max_tokens=st.integers(1, 32), max_requests=st.integers(1, 4))
def test_no_two_steps_in_a_row_fit_into_one(lengths: list[int], max_tokens: int, max_requests: int) -> None:
    steps = pack(lengths, max_tokens, max_requests)
    for step, after in zip(steps, steps[1:]):
        room = max_tokens - sum(chunk.num_tokens for chunk in step)
        assert after[0].num_tokens > room or len(step) == max_requests


def test_prompts_are_packed_whole_unless_they_are_longer_than_a_step() -> None:
    assert pack([5, 3, 20, 2], max_tokens=8, max_requests=4) == [
        [Chunk(0, 0, 5), Chunk(1, 0, 3)],
        [Chunk(2, 0, 8)],
        [Chunk(2, 8, 16)],
        [Chunk(2, 16, 20), Chunk(3, 0, 2)],
    ]


@pytest.mark.parametrize(("length", "max_tokens"), [(0, 4), (-1, 4), (4, 0)])
def test_nothing_to_cut_is_refused(length: int, max_tokens: int) -> None:
    with pytest.raises(ConfigError, match="expected both to be at least 1"):
        chunks_of(length, max_tokens)


def test_a_step_without_prompts_is_refused() -> None:
    with pytest.raises(ConfigError, match="max_requests=0"):
        pack([1], 4, 0)


def test_waste_by_hand() -> None:
    """Counts 1, 3, 5, 5 in buckets 4, 4, 8, 8: 3 + 1 + 3 + 3 padded rows over 14."""
    found = ladder_waste("two", Ladder([4, 8]), [1, 3, 5, 5])
    assert found == LadderWaste("two", num_sizes=2, waste=10 / 14, worst=3.0, over_limit=0.25)


@given(counts=st.lists(st.integers(1, 300), min_size=1, max_size=40), waste=st.sampled_from([0.0, 0.125, 0.5, 1.0]))
def test_the_bounded_ladder_keeps_its_bound_on_any_counts(counts: list[int], waste: float) -> None:
    found = ladder_waste("bounded", Ladder.bounded(300, waste), counts)
    assert 0 <= found.waste <= found.worst <= waste
    assert found.over_limit == 0


@pytest.mark.parametrize("counts", [[], [0], [9], [3, 9]])
def test_counts_that_a_ladder_does_not_hold_are_refused(counts: list[int]) -> None:
    with pytest.raises(ConfigError, match="in a ladder of up to 8: expected some from 1 to that"):
        ladder_waste("small", Ladder([8]), counts)


def test_the_usual_ladders_side_by_side() -> None:
    bounded, doubling, every = compare_ladders([700, 100, 40], max_tokens=600, bounds=[0.125])
    # Chunks 600, 100, 100, 40.
    assert (bounded.name, doubling.name, every.name) == ("bounded, waste 0.125", "doubling", "every 256")
    assert bounded.worst <= 0.125
    assert doubling.num_sizes == 11  # 1 to 512, and 600
    assert doubling.waste == pytest.approx((0 + 28 + 28 + 24) / 840)
    assert every.num_sizes == 3  # 256, 512, 600
    assert every.waste == pytest.approx((0 + 156 + 156 + 216) / 840)
    assert every.over_limit == 0.75


@pytest.mark.parametrize("max_tokens", [1, 2, 8, 255, 256, 257])
def test_every_ladder_ends_at_the_largest_chunk(max_tokens: int) -> None:
    for found in compare_ladders([1, 1000], max_tokens):
        assert found.num_sizes >= 1
        assert found.waste >= 0
