"""Fitted ladders: what all ladders there are say, and a slower programme where those are too many."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from fractions import Fraction
from itertools import combinations
from typing import Any

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from graphglue import Ladder
from graphglue.core import fitting
from graphglue.core.fitting import best_fits, fitted_sizes

# Small numbers of steps, so that several ladders often cost the same.
histograms = st.dictionaries(st.integers(0, 9), st.integers(0, 4), min_size=1).filter(
    lambda histogram: any(number for count, number in histogram.items() if count)
)
costs = st.one_of(st.integers(0, 12), st.floats(0, 12), st.fractions(0, 12, max_denominator=7))


def padded(sizes: Sequence[int], histogram: dict[int, int]) -> int:
    """Count padded rows step by step; idle steps have none."""
    return sum(
        number * (min(size for size in sizes if size >= count) - count) for count, number in histogram.items() if count
    )


def cheapest(
    histogram: dict[int, int], buckets: int, cost: Any = 0, multiple: int = 1, max_size: int | None = None
) -> tuple[int, ...]:
    """Try every ladder there is, of counts or not; of equal ones the fewest sizes, then the smallest from the top."""
    largest = max_size or -(-max(histogram) // multiple) * multiple
    smaller = range(multiple, largest, multiple)
    ladders = [(*sizes, largest) for number in range(buckets) for sizes in combinations(smaller, number)]
    return min(
        ladders, key=lambda sizes: (padded(sizes, histogram) + Fraction(cost) * len(sizes), len(sizes), sizes[::-1])
    )


def agree(histogram: dict[int, int], buckets: int, **options: Any) -> None:
    """Hold the programme against all ladders."""
    limits = {"multiple": options.get("multiple", 1), "max_size": options.get("max_size")}
    cost = options.get("cost", 0)
    assert fitted_sizes(histogram, buckets, cost, **limits) == cheapest(histogram, buckets, cost, **limits)


@given(histogram=histograms, buckets=st.integers(1, 6))
@example(histogram={2: 1, 4: 1, 6: 1}, buckets=2)  # two and four, and four and two, cost the same
@example(histogram={9: 0, 3: 2}, buckets=3)
def test_no_ladder_pads_less(histogram: dict[int, int], buckets: int) -> None:
    agree(histogram, buckets)


@given(histogram=histograms, buckets=st.integers(1, 5), cost=costs, multiple=st.integers(1, 3), more=st.integers(0, 2))
@example(histogram={1: 3, 2: 3}, buckets=2, cost=3, multiple=1, more=0)  # a second size saves what it costs
def test_no_ladder_costs_less(histogram: dict[int, int], buckets: int, cost: Any, multiple: int, more: int) -> None:
    agree(histogram, buckets, cost=cost, multiple=multiple)
    largest = -(-max(histogram) // multiple) * multiple
    agree(histogram, buckets, cost=cost, multiple=multiple, max_size=largest + more * multiple)


def agree_on_some() -> None:
    """Hold the programme against all ladders where a wrong step shows."""
    agree({1: 2, 2: 4, 4: 1, 5: 4, 6: 4}, 3)
    agree({2: 2, 3: 1, 4: 4, 5: 3, 6: 3, 8: 1, 9: 1}, 2)
    agree({2: 1, 4: 1, 6: 1}, 2)


@pytest.mark.parametrize(
    ("name", "fault"),
    [
        ("_is_hidden", lambda line, before, after: True),
        ("_is_hidden", lambda line, before, after: False),
        ("_height", lambda line, size: line.height - line.slope * (size - 1)),
        ("_traced", lambda points, choices: (*points.sizes[: len(choices) - 1], points.sizes[-1])),
        ("_traced", lambda points, choices: tuple(points.sizes[-len(choices) :])),
    ],
)
def test_the_comparison_can_fail(monkeypatch: pytest.MonkeyPatch, name: str, fault: Callable[..., Any]) -> None:
    agree_on_some()
    monkeypatch.setattr(fitting, name, fault)
    with pytest.raises(AssertionError):
        agree_on_some()


def test_the_search_of_the_tests_is_right_where_the_answer_is_known() -> None:
    assert cheapest({1: 10, 7: 1, 8: 1}, 2) == (1, 8)
    assert cheapest({2: 1, 4: 1, 6: 1}, 2) == (2, 6)
    assert cheapest({3: 5}, 4) == (3,)


def least_rows_by_table(histogram: dict[int, int], buckets: int) -> list[int]:
    """Run the plain programme, which tries every i below every j, on all counts up to the largest."""
    sizes = np.arange(1, max(histogram) + 1)
    number = np.array([histogram.get(int(size), 0) for size in sizes])
    times = np.concatenate([[0], np.cumsum(number)])
    rows = np.concatenate([[0], np.cumsum(number * sizes)])
    pads = sizes[None, :] * (times[None, 1:] - times[:-1, None]) - (rows[None, 1:] - rows[:-1, None])
    pads[np.tril_indices(len(sizes), -1)] = 2**60  # the size stands above what it holds
    least, found = pads[0], []
    for _ in range(buckets):
        found.append(int(least[-1]))
        least = (np.concatenate([[0], least[:-1]])[:, None] + pads).min(axis=0)
    return found


@given(
    histogram=st.dictionaries(st.integers(1, 120), st.integers(1, 10**6), min_size=1, max_size=80),
    buckets=st.integers(1, 20),
)
def test_the_plain_programme_finds_as_few_rows(histogram: dict[int, int], buckets: int) -> None:
    fits = best_fits(histogram, buckets)
    expected = least_rows_by_table(histogram, buckets)
    assert [fit.padded_rows for fit in fits] == expected[: len(fits)]
    assert len(fits) == min(buckets, len(histogram))
    assert all(rows == 0 for rows in expected[len(histogram) - 1 :])


@given(
    histogram=st.dictionaries(st.integers(1, 2**31 - 1), st.integers(1, 2**80), min_size=1, max_size=40),
    buckets=st.integers(1, 12),
)
def test_what_is_told_is_what_the_sizes_pad(histogram: dict[int, int], buckets: int) -> None:
    """With numbers beyond what 64 bits hold: they are never rounded."""
    fits = best_fits(histogram, buckets)
    for number, fit in enumerate(fits, 1):
        assert len(fit.sizes) == number
        assert fit.sizes == Ladder(fit.sizes).sizes
        assert fit.sizes[-1] == max(histogram)
        assert fit.padded_rows == padded(fit.sizes, histogram)
    saved = [before.padded_rows - after.padded_rows for before, after in zip(fits, fits[1:])]
    assert all(rows > 0 for rows in saved)
    assert saved == sorted(saved, reverse=True)  # each further size saves no more than the last
