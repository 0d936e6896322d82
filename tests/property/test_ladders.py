"""Bounded ladders: never more waste than the bound, never more sizes than needed, bad input refused."""

from __future__ import annotations

from collections.abc import Iterable
from fractions import Fraction
from itertools import combinations
from typing import Any

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from graphglue import ConfigError, Ladder

wastes = st.one_of(
    st.floats(0, 4),
    st.integers(0, 3),
    st.fractions(0, 2, max_denominator=64),
    st.sampled_from([0.1, 0.125, 0.25, 1 / 3, 5e-324, 1e9]),
)


def worst_waste(sizes: Iterable[int], max_tokens: int) -> Fraction:
    """Find the worst waste of all counts, the slow way and in exact numbers; infinite where one has no size."""
    ordered, worst = sorted(sizes), Fraction(0)
    for count in range(1, max_tokens + 1):
        held = [size for size in ordered if size >= count]
        if not held:
            return Fraction(10**12)
        worst = max(worst, Fraction(held[0] - count, count))
    return worst


@given(max_tokens=st.integers(1, 700), waste=wastes)
@example(max_tokens=9, waste=0.125)  # 9 over 8 is the bound, exactly
@example(max_tokens=700, waste=0.1)  # a float that is a little more than a tenth
def test_no_count_is_padded_by_more_than_the_bound(max_tokens: int, waste: Any) -> None:
    ladder = Ladder.bounded(max_tokens, waste)
    assert ladder.largest == max_tokens
    assert worst_waste(ladder, max_tokens) <= Fraction(waste)


@given(max_tokens=st.integers(1, 11), waste=wastes)
def test_no_smaller_ladder_keeps_the_bound(max_tokens: int, waste: Any) -> None:
    """Every set of fewer sizes breaks it."""
    num_sizes = len(Ladder.bounded(max_tokens, waste))
    for smaller in combinations(range(1, max_tokens), max(0, num_sizes - 2)):
        if num_sizes > 1:
            assert worst_waste([*smaller, max_tokens], max_tokens) > Fraction(waste), smaller


@given(max_tokens=st.integers(1, 10**6), waste=st.floats(0.05, 2))
def test_each_size_is_as_far_from_the_next_as_the_bound_lets_it(max_tokens: int, waste: float) -> None:
    """Size s with p below it wastes most at p + 1; a p that were one smaller would waste too much."""
    sizes = (0, *Ladder.bounded(max_tokens, waste))
    for below, size in zip(sizes, sizes[1:]):
        assert Fraction(size - below - 1, below + 1) <= Fraction(waste)
        assert below == 0 or Fraction(size - below, below) > Fraction(waste)


@given(max_tokens=st.integers(1, 2000), low=st.floats(0, 2), more=st.floats(0, 2))
def test_more_waste_takes_no_more_sizes(max_tokens: int, low: float, more: float) -> None:
    assert len(Ladder.bounded(max_tokens, low + more)) <= len(Ladder.bounded(max_tokens, low))


def test_no_waste_means_every_size() -> None:
    assert Ladder.bounded(7, 0) == Ladder(range(1, 8))


def test_a_ladder_that_is_known_by_hand() -> None:
    assert Ladder.bounded(64, 0.5).sizes == (1, 2, 4, 7, 11, 17, 27, 42, 64)
    assert Ladder.bounded(8, 100).sizes == (8,)


def test_the_bound_is_an_eighth_unless_said_otherwise() -> None:
    assert Ladder.bounded(300) == Ladder.bounded(300, Fraction(1, 8))


def test_the_largest_size_there_is_takes_few_sizes() -> None:
    assert len(Ladder.bounded(2**31 - 1, 0.125)) < 200


def test_the_search_of_the_tests_can_fail() -> None:
    assert worst_waste([4, 8], 8) == 3
    assert worst_waste([4], 8) > 10**9


@pytest.mark.parametrize(
    "waste", [-0.1, -1, float("nan"), float("inf"), float("-inf"), True, False, "0.1", None, [0.1], 1j]
)
def test_a_bound_that_is_no_number_from_0_up_is_refused(waste: Any) -> None:
    with pytest.raises(ConfigError, match=r"waste=.*: expected padded rows over real rows, such as 0\.125"):
        Ladder.bounded(8, waste)


@pytest.mark.parametrize(
    ("max_tokens", "seen"),
    [
        (0, "ladder size 0: expected a positive integer"),
        (-3, "ladder size -3: expected a positive integer"),
        (2.0, r"ladder size 2.0 \(float\)"),
        (True, r"ladder size True \(bool\)"),
        ("8", r"ladder size '8' \(str\)"),
        (None, r"ladder size None \(NoneType\)"),
        (2**31, "expected at most 2147483647"),
    ],
)
def test_a_largest_size_that_is_no_positive_integer_is_refused(max_tokens: Any, seen: str) -> None:
    with pytest.raises(ConfigError, match=seen):
        Ladder.bounded(max_tokens)


def test_a_numpy_integer_is_an_integer() -> None:
    ladder = Ladder.bounded(np.int64(40), 0.25)
    assert ladder == Ladder.bounded(40, 0.25)
    assert all(type(size) is int for size in ladder)
