"""Plans: what the ranks of one group agreed on for one step."""

from __future__ import annotations

import enum
from typing import NamedTuple

from graphglue.core.batch import Mode
from graphglue.core.buckets import Bucket
from graphglue.core.routing import Reason, Route


class Padding(str, enum.Enum):
    """How the ranks' token rows meet in one buffer, which decides the collective that fills it.

    MAX_LEN: every rank has as many rows as the largest, and an all-gather joins them.
    SUM_LEN: every rank has its own rows at its own offset, and an all-reduce of the sum joins them.
    """

    MAX_LEN = "max_len"
    SUM_LEN = "sum_len"

    __hash__ = str.__hash__  # part of a key, which is looked up at every step


class Role(str, enum.Enum):
    """What one rank does in a step."""

    REAL = "real"
    IDLE = "idle"
    CONVERTED = "converted"  # a decode rank that runs as a one-token extend beside a prefilling peer

    __hash__ = str.__hash__


class Meeting(NamedTuple):
    """Say how the token rows of all ranks meet, for a forward: ``view.meeting``.

    Attributes:
        padding: MAX_LEN or SUM_LEN.
        counts: the padded token count of each rank.
        rows: rows of the buffer that the ranks share.
    """

    padding: Padding
    counts: tuple[int, ...]
    rows: int

    def start(self, rank: int) -> int:
        """Give the first of a rank's rows in the shared buffer."""
        return rank * max(self.counts) if self.padding is Padding.MAX_LEN else sum(self.counts[:rank])


class RankPlan(NamedTuple):
    """Hold one step's agreement; the same on every rank.

    Attributes:
        bucket: extents that cover every rank: a bucket of the ladder where the forward is a graph, the
            largest aligned live extents where it is eager.
        mode: what the step computes; EXTEND where ranks that prefill meet ranks in another mode.
        forward: GRAPH or EAGER, for all ranks.
        padding: of a graph the rule applied to the counts it was captured with, of an eager step the
            rule applied to the live aligned counts.
        counts: the padded token count of each rank.
        rows: rows of the buffer that the ranks share.
        roles: what each rank does.
        reason: why the forward is what it is.
        digest: equal on two ranks if their plans are equal; for comparison while debugging.
        vetoes: the ranks that can not replay a graph in this step.
        longest_prefix: the longest prefix of any rank.
    """

    bucket: Bucket
    mode: Mode
    forward: Route
    padding: Padding
    counts: tuple[int, ...]
    rows: int
    roles: tuple[Role, ...]
    reason: Reason
    digest: int = 0
    vetoes: tuple[int, ...] = ()
    longest_prefix: int = 0

    @property
    def meeting(self) -> Meeting:
        """How the rows of all ranks meet."""
        return Meeting(self.padding, self.counts, self.rows)

    def fabricated(self, rank: int) -> int:
        """Give the token rows that a rank without requests makes up in EXTEND; none of them is real."""
        return self.counts[rank] if self.roles[rank] is Role.IDLE and self.mode.counts_tokens else 0

    def extents(self, rank: int, raw: Bucket, width: int = 0) -> Bucket:
        """Give what one rank's slots are filled to.

        Args:
            rank: the rank.
            raw: its real extents.
            width: tokens of each request as its prep expects them, where the ranks have none in common; 0 for none.
        """
        if self.forward is Route.GRAPH:
            return self.bucket
        tokens, width = self.counts[rank], self.bucket.row_tokens or width
        if width and tokens % width == 0:
            return Bucket(tokens // width, tokens, width)
        # Somebody has to own the padded rows, so a rank that makes them up has one request.
        return Bucket(max(raw.requests, min(tokens, 1)), tokens, 0)
