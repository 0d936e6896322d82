"""Gathered rows: the facts of all ranks as one matrix, checked, with its extremes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from graphglue.errors import BindError, RankDisagreementError
from graphglue.ranks import facts as at


class Gathered(NamedTuple):
    """Hold the rows of all ranks, and their extremes: a vote is a minimum, a count a maximum.

    Modes and widths are those of the busy ranks, which have requests; of all where none has.
    """

    columns: np.ndarray  # int64[fields, ranks], contiguous: that is four times as fast to reduce
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
            RankDisagreementError: rows of another layout or for something else than a step, rows that no facts
                have, or digests that differ.
        """
        rows = matrix if isinstance(matrix, np.ndarray) else _on_host(matrix)
        if rows.ndim != 2 or rows.dtype != np.int64 or rows.shape[0] < 1 or rows.shape[1] < at.EXTRA:
            raise RankDisagreementError(
                f"a matrix of {rows.dtype}{list(rows.shape)}: expected int64[ranks, {at.EXTRA} or more], one row of "
                "RankFacts.encoded() for each rank"
            )
        columns = np.ascontiguousarray(rows.T)
        low, high = np.minimum.reduce(columns, 1).tolist(), np.maximum.reduce(columns, 1).tolist()
        if low[at.FORMAT] != at.STEP or high[at.FORMAT] != at.STEP:
            at.check_format(rows[:, at.FORMAT].tolist())
        least = min(low[at.REQUESTS : at.PREFIX])
        if least < 0 or high[at.MODE] >= len(at.MODES) or not high[at.REQUESTS] <= high[at.TOKENS] <= at.MAX_TOKENS:
            _check_rows(rows)
        if low[at.DIGEST] != high[at.DIGEST]:
            check_digests(rows[:, at.DIGEST].tolist())
        steering = (low[at.MODE], high[at.MODE], low[at.ROW_TOKENS], high[at.ROW_TOKENS])
        if low[at.REQUESTS] == 0 < high[at.REQUESTS]:
            steering = _of_busy(columns, *steering)
        return cls(columns, low, high, *steering)

    @property
    def num_ranks(self) -> int:
        """How many ranks there are."""
        return self.columns.shape[1]


def _of_busy(columns: np.ndarray, low_mode: int, high_mode: int, low_width: int, high_width: int) -> Any:
    """Leave ranks without requests out of the extremes of modes and widths; they have any mode, and no width."""
    requests, widths = columns[at.REQUESTS], columns[at.ROW_TOKENS]
    if low_mode == high_mode and np.count_nonzero(widths == high_width) == np.count_nonzero(requests):
        return low_mode, high_mode, high_width, high_width
    busy = requests > 0
    modes, widths = columns[at.MODE][busy].tolist(), widths[busy].tolist()
    return min(modes), max(modes), min(widths), max(widths)


def _on_host(matrix: Any) -> np.ndarray:
    try:
        return np.asarray(matrix)
    except (TypeError, ValueError, RuntimeError) as error:
        raise RankDisagreementError(f"a plan of a {type(matrix).__name__}: {error}; gather rows to the host") from None


def _check_rows(rows: np.ndarray) -> None:
    """Check each rank's numbers as its own facts would.

    Raises:
        RankDisagreementError: names the rank whose row no facts have, and what is wrong.
    """
    for rank, row in enumerate(rows.tolist()):
        try:
            if not (0 <= row[at.MODE] < len(at.MODES) and min(row[at.REQUESTS : at.PREFIX]) >= 0):
                raise BindError(f"columns {at.REQUESTS} to {at.PREFIX - 1} are {row[at.REQUESTS : at.PREFIX]}")
            at.RankFacts.decoded(row)
        except BindError as error:
            raise RankDisagreementError(
                f"rank {rank} gave a row that no facts have: {error}; hand in what RankFacts.encoded() makes"
            ) from None


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
