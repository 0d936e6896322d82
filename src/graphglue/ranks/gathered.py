"""Gathered rows: the facts of all ranks as one matrix, checked, with its extremes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from graphglue.errors import RankDisagreementError
from graphglue.ranks import facts as at

_STEERING = slice(at.MODE, at.ROW_TOKENS + 1)


class Gathered(NamedTuple):
    """Hold the rows of all ranks, and their extremes: a vote is a minimum, a count a maximum.

    Modes and widths are those of the busy ranks, which have requests; of all where none has.
    """

    rows: np.ndarray
    low: list[int]
    high: list[int]
    low_mode: int
    high_mode: int
    low_width: int
    high_width: int

    @property
    def idle(self) -> bool:
        """Whether no rank has requests."""
        return self.high[at.REQUESTS] == 0

    @property
    def some_idle(self) -> bool:
        """Whether some rank has none."""
        return self.low[at.REQUESTS] == 0

    @property
    def extends(self) -> bool:
        """Whether some rank prefills."""
        return self.high[at.REQUESTS] > 0 and self.high_mode >= at.FIRST_EXTEND

    @classmethod
    def of(cls, matrix: Any) -> Gathered:
        """Check a matrix of rows.

        Args:
            matrix: int64[ranks, fields]; a numpy array, or what numpy takes without a copy (a CPU tensor).

        Raises:
            RankDisagreementError: rows of another layout or for something else than a step, or digests that differ.
        """
        rows = matrix if isinstance(matrix, np.ndarray) else np.asarray(matrix)
        if rows.ndim != 2 or rows.dtype != np.int64 or rows.shape[0] < 1 or rows.shape[1] < at.EXTRA:
            raise RankDisagreementError(
                f"a matrix of {rows.dtype}{list(rows.shape)}: expected int64[ranks, {at.EXTRA} or more], one row of "
                "RankFacts.encoded() for each rank"
            )
        low, high = rows.min(0).tolist(), rows.max(0).tolist()
        if low[at.FORMAT] != at.STEP or high[at.FORMAT] != at.STEP:
            at.check_format(rows[:, at.FORMAT].tolist())
        if low[at.DIGEST] != high[at.DIGEST]:
            check_digests(rows[:, at.DIGEST].tolist())
        modes_and_widths = low[_STEERING], high[_STEERING]
        if low[at.REQUESTS] == 0 < high[at.REQUESTS]:
            busy = rows[rows[:, at.REQUESTS] > 0, _STEERING]
            modes_and_widths = busy.min(0).tolist(), busy.max(0).tolist()
        (low_mode, low_width), (high_mode, high_width) = modes_and_widths
        return cls(rows, low, high, low_mode, high_mode, low_width, high_width)


def check_digests(digests: Sequence[int], what: str = "what they must have in common (ladder, contracts)") -> None:
    """Compare the digests of the ranks that gave one; 0 is none.

    Raises:
        RankDisagreementError: names two ranks whose digests differ.
    """
    given = [(rank, digest) for rank, digest in enumerate(digests) if digest]
    for rank, digest in given:
        first, expected = given[0]
        if digest != expected:
            raise RankDisagreementError(
                f"rank {rank} has digest {digest:#x}, rank {first} {expected:#x}: {what} differs; build all ranks from "
                "one configuration"
            )
