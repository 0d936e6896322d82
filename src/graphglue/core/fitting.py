"""The ladder that pads a histogram of batch sizes least: an exact dynamic programme over its counts."""

from __future__ import annotations

import operator
from collections.abc import Mapping
from fractions import Fraction
from itertools import accumulate
from typing import Any, NamedTuple

from graphglue.errors import ConfigError


class Fit(NamedTuple):
    """The sizes that pad a histogram least, of as many sizes, and the rows that they pad."""

    sizes: tuple[int, ...]
    padded_rows: int


class _Points(NamedTuple):
    """What may be a size, upwards, and sums over all that occurred below the point of the same position.

    ``times`` and ``rows`` have one entry more than ``sizes``: steps, and their real rows, of the points before it.
    """

    sizes: list[int]
    times: list[int]
    rows: list[int]


class _Line(NamedTuple):
    """Padded rows up to a size x if ``below`` points are held by smaller ones: ``height - slope * x``, and a constant.

    The constant, what all steps up to x come to, is the same for every line.
    """

    slope: int
    height: int
    below: int


def fitted_sizes(
    histogram: Mapping[int, int],
    buckets: int,
    cost_per_bucket: float | Fraction = 0,
    multiple: int = 1,
    max_size: int | None = None,
) -> tuple[int, ...]:
    """Find the sizes, at most ``buckets``, that cost least: padded rows, and ``cost_per_bucket`` for each size.

    Of those that cost the same, the fewest sizes, and of those the ones that, read from the largest down, are smallest.

    Args:
        histogram: how often each count occurred.
        buckets: how many sizes at most.
        cost_per_bucket: what a size costs, in padded rows over the whole histogram: its memory or its capture
            seconds, at the weight the caller gives them.
        multiple: what every size is a multiple of.
        max_size: the largest size, though no step was that large; else the largest count, rounded up to ``multiple``.

    Raises:
        ConfigError: a histogram in which nothing occurred, a number out of range, or a count above ``max_size``.

    Source: exact, and in integers; see ``best_fits``.
    """
    cost = _checked_cost(cost_per_bucket)
    fits = best_fits(histogram, buckets, multiple, max_size)
    return min(fits, key=lambda fit: fit.padded_rows + cost * len(fit.sizes)).sizes  # the first of several, the fewest


def best_fits(histogram: Mapping[int, int], buckets: int, multiple: int = 1, max_size: int | None = None) -> list[Fit]:
    """Find the best 1, 2, ... sizes, up to ``buckets`` or as many as can be of use.

    Args and Raises: those of ``fitted_sizes``, whose ties are decided here.

    Source: some best sizes are all counts that occurred, rounded up, and the largest: a size between two of them pads
    less at the lower one. So least(k, j), the padded rows of k sizes that hold the first j counts with the largest at
    the j-th, is the minimum over i < j of least(k - 1, i) and what the j-th pads the counts i + 1 to j by. As a
    function of the j-th size each i is a line, steeper than those before it, so the minimum walks along their lower
    envelope: O(counts x sizes) in all, by comparisons of integers, without rounding.
    """
    points = _points(_checked_histogram(histogram), multiple, max_size)
    num_points = len(points.sizes)
    least = [0] * (num_points + 1)
    fits, choices = [], []
    for num_sizes in range(1, min(_whole("buckets", buckets), num_points) + 1):
        least, below = _one_size_more(points, least, num_sizes)
        choices.append(below)
        fits.append(Fit(_traced(points, choices), least[num_points]))
    return fits


def _one_size_more(points: _Points, least: list[int], num_sizes: int) -> tuple[list[int], list[int]]:
    """Give, for each number of points, the least padded rows and how many points the smaller sizes then hold."""
    sizes, times, rows = points
    more, below = [0] * len(least), [0] * len(least)
    envelope: list[_Line] = []
    first = 0
    for held in range(num_sizes, len(least)):
        smaller, size = held - 1, sizes[held - 1]
        if num_sizes > 1 or smaller == 0:
            line = _Line(times[smaller], least[smaller] + rows[smaller], smaller)
            while len(envelope) - first > 1 and _is_hidden(envelope[-1], envelope[-2], line):
                envelope.pop()
            envelope.append(line)
        # A line that is only as low as the one before it does not win: the sizes stay small.
        while len(envelope) - first > 1 and _height(envelope[first + 1], size) < _height(envelope[first], size):
            first += 1
        more[held] = _height(envelope[first], size) + size * times[held] - rows[held]
        below[held] = envelope[first].below
    return more, below


def _height(line: _Line, size: int) -> int:
    return line.height - line.slope * size


def _is_hidden(line: _Line, before: _Line, after: _Line) -> bool:
    """Tell whether ``after`` passes below ``line`` no later than that passes below ``before``."""
    return (after.height - line.height) * (line.slope - before.slope) <= (line.height - before.height) * (
        after.slope - line.slope
    )


def _traced(points: _Points, choices: list[list[int]]) -> tuple[int, ...]:
    sizes, held = [], len(points.sizes)
    for below in reversed(choices):
        sizes.append(points.sizes[held - 1])
        held = below[held]
    return tuple(reversed(sizes))


def _points(histogram: Mapping[int, int], multiple: int, max_size: int | None) -> _Points:
    step = _whole("multiple", multiple)
    times: dict[int, int] = {}
    rows: dict[int, int] = {}
    for count, number in histogram.items():
        size = -(-count // step) * step
        times[size] = times.get(size, 0) + number
        rows[size] = rows.get(size, 0) + number * count
    largest = _checked_largest(max(times), step, max_size)
    # Lines are steeper one by one only if every point below the largest occurred.
    sizes = sorted(size for size in {*times, largest} if times.get(size) or size == largest)
    return _Points(
        sizes,
        [0, *accumulate(times.get(size, 0) for size in sizes)],
        [0, *accumulate(rows.get(size, 0) for size in sizes)],
    )


def _checked_largest(largest: int, step: int, max_size: int | None) -> int:
    if max_size is None:
        return largest
    size = _whole("max_size", max_size)
    if size % step:
        raise ConfigError(f"max_size={size}: expected a multiple of {step}, such as {-(-size // step) * step}")
    if size < largest:
        raise ConfigError(
            f"max_size={size}: the histogram has a count that takes {largest}, and the largest count is always "
            f"held; give at least {largest}, or leave larger counts out"
        )
    return size


def _checked_histogram(histogram: Any) -> dict[int, int]:
    """Leave idle steps out, which need no size of their own, and refuse what is no count."""
    if not isinstance(histogram, Mapping):
        raise ConfigError(
            f"histogram {histogram!r}: expected a mapping from count to how often, such as {{1: 20, 7: 3}}"
        )
    checked: dict[int, int] = {}
    for count, number in histogram.items():
        rows = _whole("histogram: count", count, least=0)
        checked[rows] = _whole(f"histogram: how often {rows} occurred", number, least=0)
    checked.pop(0, None)
    if not any(checked.values()):
        raise ConfigError(f"histogram {_short(histogram)}: expected at least one count from 1 up that occurred")
    return checked


def _checked_cost(cost: Any) -> Fraction:
    if isinstance(cost, bool) or not isinstance(cost, (int, float, Fraction)) or not 0 <= cost < float("inf"):
        raise ConfigError(f"cost_per_bucket={cost!r}: expected a number of padded rows from 0 up, such as 500")
    return Fraction(cost)


def _whole(what: str, value: Any, least: int = 1) -> int:
    try:
        if isinstance(value, bool):
            raise TypeError
        number = operator.index(value)
    except TypeError:
        raise ConfigError(f"{what}={value!r} ({type(value).__name__}): expected an integer; convert it first") from None
    if number < least:
        raise ConfigError(f"{what}={number}: expected at least {least}")
    return number


def _short(histogram: Mapping[int, int]) -> str:
    text = str(dict(histogram))
    return text if len(text) <= 60 else text[:57] + "..."
