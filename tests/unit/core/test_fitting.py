"""Ladders from a histogram: answers known by hand, the size it must hold out at, and what is refused."""

from __future__ import annotations

import random
from fractions import Fraction
from typing import Any

import numpy as np
import pytest

from graphglue import ConfigError, Ladder
from graphglue.core.fitting import best_fits


def test_ladders_that_are_known_by_hand() -> None:
    assert Ladder.from_histogram({1: 10, 7: 1, 8: 1}, 2) == Ladder([1, 8])
    assert Ladder.from_histogram({1: 1, 7: 10, 8: 1}, 2) == Ladder([7, 8])
    assert Ladder.from_histogram({1: 1, 7: 10, 8: 1}, 1) == Ladder([8])


def test_more_buckets_than_counts_give_every_count_and_no_more() -> None:
    assert Ladder.from_histogram({3: 1, 5: 9}, 64) == Ladder([3, 5])


def test_of_equal_ladders_it_takes_the_fewest_sizes_and_then_the_smallest_from_the_top() -> None:
    assert Ladder.from_histogram({2: 1, 4: 1, 6: 1}, 2) == Ladder([2, 6])  # [4, 6] pads two rows as well
    assert Ladder.from_histogram({2: 2, 4: 1}, 2, cost_per_bucket=4) == Ladder([4])  # [2, 4] saves 4 rows for 4


def test_the_order_of_the_histogram_does_not_matter() -> None:
    assert Ladder.from_histogram({6: 1, 2: 1, 4: 1}, 2) == Ladder.from_histogram({2: 1, 4: 1, 6: 1}, 2)


@pytest.mark.parametrize(
    ("cost", "sizes"),
    [(0, [1, 2, 4]), (1.9, [1, 2, 4]), (2, [1, 4]), (Fraction(89, 10), [1, 4]), (9, [4]), (9.5, [4])],
)
def test_a_size_stands_only_if_it_saves_more_than_it_costs(cost: Any, sizes: list[int]) -> None:
    """Size 1 saves 9 rows, size 2 saves 2 more."""
    histogram = {1: 3, 2: 1, 4: 1}
    assert [fit.padded_rows for fit in best_fits(histogram, 3)] == [11, 2, 0]
    assert Ladder.from_histogram(histogram, 3, cost_per_bucket=cost) == Ladder(sizes)


def test_sizes_are_multiples_and_hold_the_largest_count() -> None:
    assert Ladder.from_histogram({1: 5, 9: 6, 17: 1}, 2, multiple=8) == Ladder([16, 24])
    assert Ladder.from_histogram({1: 50, 9: 5, 17: 1}, 2, multiple=8) == Ladder([8, 24])


def test_the_largest_count_is_held_though_it_never_occurred() -> None:
    assert Ladder.from_histogram({4: 7, 32: 0}, 1) == Ladder([32])
    assert Ladder.from_histogram({4: 7, 20: 0, 32: 0}, 3) == Ladder([4, 32])


def test_a_largest_size_is_one_of_the_sizes() -> None:
    assert Ladder.from_histogram({4: 7}, 2, max_size=42) == Ladder([4, 42])
    assert Ladder.from_histogram({4: 7}, 1, max_size=42) == Ladder([42])
    assert Ladder.from_histogram({4: 7}, 3, max_size=4) == Ladder([4])


def test_idle_steps_need_no_size() -> None:
    assert Ladder.from_histogram({0: 10**9, 4: 1, 8: 1}, 2) == Ladder([4, 8])


def test_numpy_integers_are_integers() -> None:
    counts, numbers = np.unique(np.array([1, 1, 4, 4, 4, 9]), return_counts=True)
    ladder = Ladder.from_histogram(dict(zip(counts, numbers)), np.int64(2), max_size=np.int64(12))
    assert ladder == Ladder([4, 12])
    assert all(type(size) is int for size in ladder)


def test_8192_counts_and_64_sizes() -> None:
    """Of a fit that large each size is checked by itself: moving it to a neighbour pads no less."""
    rng = random.Random(7)
    histogram = {count: rng.randint(1, 1000) for count in range(1, 8193)}
    fit = best_fits(histogram, 64)[-1]

    def rows_between(below: int, size: int) -> int:
        return sum(histogram[count] * (size - count) for count in range(below + 1, size + 1))

    sizes = (0, *fit.sizes)
    assert sum(rows_between(below, size) for below, size in zip(sizes, sizes[1:])) == fit.padded_rows
    for below, size, above in zip(sizes, sizes[1:], sizes[2:]):
        here = rows_between(below, size) + rows_between(size, above)
        for moved in (size - 1, size + 1):
            assert rows_between(below, moved) + rows_between(moved, above) >= here


@pytest.mark.parametrize(
    ("histogram", "said"),
    [
        ([1, 2], r"histogram \[1, 2\]: expected a mapping from count to how often"),
        (None, "histogram None: expected a mapping"),
        ({}, r"histogram {}: expected at least one count from 1 up that occurred"),
        ({0: 5, 7: 0}, r"histogram {0: 5, 7: 0}: expected at least one count"),
        (dict.fromkeys(range(1, 99), 0), r"histogram {1: 0, 2: 0.*\.\.\.: expected at least one"),
        ({-1: 5}, "histogram: count=-1: expected at least 0"),
        ({1.5: 5}, r"histogram: count=1.5 \(float\): expected an integer; convert it first"),
        ({"4": 5}, r"histogram: count='4' \(str\): expected an integer"),
        ({True: 5}, r"histogram: count=True \(bool\)"),
        ({4: -1}, "histogram: how often 4 occurred=-1: expected at least 0"),
        ({4: 0.5}, r"histogram: how often 4 occurred=0.5 \(float\): expected an integer"),
        ({2**31: 1}, "ladder size 2147483648: expected at most 2147483647"),
    ],
)
def test_a_histogram_that_is_none_is_refused(histogram: Any, said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        Ladder.from_histogram(histogram, 4)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"buckets": 0}, "buckets=0: expected at least 1"),
        ({"buckets": 2.0}, r"buckets=2.0 \(float\): expected an integer"),
        ({"multiple": 0}, "multiple=0: expected at least 1"),
        ({"multiple": None}, r"multiple=None \(NoneType\)"),
        ({"max_size": 0}, "max_size=0: expected at least 1"),
        ({"max_size": 42, "multiple": 8}, "max_size=42: expected a multiple of 8, such as 48"),
        ({"max_size": 8}, r"max_size=8: the histogram has a count that takes 9, .*; give at least 9, or leave"),
        ({"max_size": 8, "multiple": 8}, "a count that takes 16"),
        *(
            ({"cost_per_bucket": cost}, "cost_per_bucket=.*: expected a number of padded rows from 0 up, such as 500")
            for cost in (-1, -0.5, float("nan"), float("inf"), True, "9", None, 1j)
        ),
    ],
)
def test_an_option_that_can_not_be_is_refused(options: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        Ladder.from_histogram({4: 3, 9: 1}, **{"buckets": 2, **options})
