"""Buckets and ladders: the padded extents that graphs are captured at."""

from __future__ import annotations

import math
import operator
from bisect import bisect_left
from collections.abc import Iterable, Iterator, Mapping
from fractions import Fraction
from typing import Any, NamedTuple

from graphglue.core.fitting import fitted_sizes
from graphglue.errors import ConfigError

_LARGEST_SIZE = 2**31 - 1


class Bucket(NamedTuple):
    """Extents of a step, raw or captured.

    ``row_tokens`` is the width that all requests share; 0 where requests differ (ragged, EXTEND).
    """

    requests: int
    tokens: int
    row_tokens: int


class Ladder:
    """Hold the ordered sizes that graphs are captured at: requests, or tokens for EXTEND.

    A list that is unsorted or repeats itself is put in order once, here. One that is empty, or has
    a size that is not a positive integer, is refused.

    Args:
        sizes: the sizes in any order, or a ladder.

    Raises:
        ConfigError: empty, zero, negative or non-integer sizes.

    Examples:
        >>> ladder = Ladder([8, 1, 4, 2, 4])
        >>> ladder, ladder.cover(3), ladder.cover(9)
        (Ladder([1, 2, 4, 8]), 4, None)
        >>> ladder.aligned(4)
        Ladder([4, 8])
    """

    __slots__ = ("sizes",)

    sizes: tuple[int, ...]

    def __init__(self, sizes: Iterable[int]) -> None:
        object.__setattr__(self, "sizes", tuple(sorted({_checked_size(size) for size in _iterated(sizes)})))
        if not self.sizes:
            raise ConfigError("ladder []: expected at least one size; give the batch sizes to capture")

    @classmethod
    def bounded(cls, max_tokens: int, waste: float = 0.125, multiple: int = 1) -> Ladder:
        """Build the ladder with the fewest sizes that pads every count up to ``max_tokens`` by at most ``waste``.

        Args:
            max_tokens: the largest size.
            waste: padded rows over real rows, at most; 0 gives every size.
            multiple: what every size is a multiple of, such as the alignment of ranks; the bound then holds for counts
                that are rounded up to it. ``aligned`` rounds sizes afterwards, and keeps no bound.

        Raises:
            ConfigError: a waste that is no number from 0 up.

        Source: a size s whose next smaller size is p serves the counts p + 1 to s, of which p + 1 wastes most; so
        the largest size that may follow p is floor((1 + waste) x (p + 1)). Going down from ``max_tokens``, the size
        before s is the smallest p with s <= (1 + waste) x (p + 1).
        """
        if isinstance(waste, bool) or not isinstance(waste, (int, float, Fraction)) or not 0 <= waste < float("inf"):
            raise ConfigError(f"waste={waste!r}: expected padded rows over real rows, such as 0.125")
        step = _checked_size(multiple)
        growth, size = 1 + Fraction(waste), -(-_checked_size(max_tokens) // step)
        sizes = []
        while size > 0:
            sizes.append(size * step)
            size = math.ceil(size / growth) - 1
        return cls(sizes)

    @classmethod
    def from_histogram(
        cls,
        histogram: Mapping[int, int],
        buckets: int,
        cost_per_bucket: float | Fraction = 0,
        multiple: int = 1,
        max_size: int | None = None,
    ) -> Ladder:
        """Build the ladder of at most ``buckets`` sizes that pads the steps of a histogram least, exactly.

        Args:
            histogram: how often each batch size occurred, such as ``{1: 20, 7: 3}``; 0, an idle step, is left out.
            buckets: how many sizes at most. Fewer are given where more save nothing.
            cost_per_bucket: what one more size costs, in padded rows over the whole histogram, such as its memory or
                its capture seconds at a weight of yours.
            multiple: what every size is a multiple of; counts are rounded up to it.
            max_size: the largest size, for steps larger than any in the histogram; else the largest count.

        Of ladders that cost the same it is the one with the fewest sizes, and of those the one whose sizes, read from
        the largest down, are smallest.

        Raises:
            ConfigError: a histogram in which nothing occurred, a number out of range, or a count above ``max_size``.
        """
        return cls(fitted_sizes(histogram, buckets, cost_per_bucket, multiple, max_size))

    @property
    def smallest(self) -> int:
        """The smallest size."""
        return self.sizes[0]

    @property
    def largest(self) -> int:
        """The largest size."""
        return self.sizes[-1]

    def cover(self, count: int) -> int | None:
        """Give the smallest size that holds ``count``, or None above the largest."""
        position = bisect_left(self.sizes, count)
        return self.sizes[position] if position < len(self.sizes) else None

    def aligned(self, multiple: int) -> Ladder:
        """Round every size up to a multiple; sizes that meet become one. Idempotent."""
        step = _checked_size(multiple)
        return Ladder(-(-size // step) * step for size in self.sizes)

    def __setattr__(self, name: str, value: Any) -> None:
        raise AttributeError(f"a Ladder does not change; build another one to set {name!r}")

    def __iter__(self) -> Iterator[int]:
        return iter(self.sizes)

    def __len__(self) -> int:
        return len(self.sizes)

    def __contains__(self, size: object) -> bool:
        return size in self.sizes

    def __eq__(self, other: object) -> bool:
        return self.sizes == other.sizes if isinstance(other, Ladder) else NotImplemented

    def __hash__(self) -> int:
        return hash(self.sizes)

    def __reduce__(self) -> tuple[Any, ...]:
        return Ladder, (self.sizes,)

    def __repr__(self) -> str:
        return f"Ladder({list(self.sizes)})"


def _iterated(sizes: Any) -> Iterable[Any]:
    if isinstance(sizes, (str, bytes)) or not isinstance(sizes, Iterable):
        raise ConfigError(f"ladder {sizes!r}: expected a list of positive integers, such as [1, 2, 4, 8]")
    return sizes


def _checked_size(size: Any) -> int:
    try:
        if isinstance(size, bool):
            raise TypeError
        number = operator.index(size)
    except TypeError:
        raise ConfigError(
            f"ladder size {size!r} ({type(size).__name__}): expected a positive integer; convert it first"
        ) from None
    if number > _LARGEST_SIZE:
        raise ConfigError(f"ladder size {number}: expected at most {_LARGEST_SIZE}")
    if number < 1:
        raise ConfigError(f"ladder size {number}: expected a positive integer; an IDLE step needs no size of its own")
    return number
