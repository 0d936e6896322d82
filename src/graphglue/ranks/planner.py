"""The planner: a pure function from what all ranks stated to what all of them do."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import numpy as np

from graphglue.core.batch import Mode
from graphglue.core.buckets import Bucket, Ladder
from graphglue.core.routing import Reason, Route
from graphglue.errors import ConfigError, RankDisagreementError
from graphglue.ranks import facts as at
from graphglue.ranks.facts import CODES, FIRST_EXTEND, MODES, RankFacts, missing_bit, missing_bits, stacked
from graphglue.ranks.gathered import Gathered
from graphglue.ranks.padding import CostRule, checked_rule, name_of
from graphglue.ranks.plan import Meeting, Padding, RankPlan, Role

_REASONS = {reason: code for code, reason in enumerate(Reason)}
_MAX_KEPT = 256


class _Shape(NamedTuple):
    """What the gathered rows ask for, before anybody's vote: the covering bucket, or why there is none."""

    mode: Mode
    width: int  # tokens of each request; 0 where requests differ, or modes do
    bucket: Bucket | None
    position: int  # in the ladder
    refusal: Reason | None


class Planner:
    """Derive the plan of a step from the facts of all ranks. Pure: it keeps nothing that a plan depends on.

    Args:
        ladder: the captured sizes, in requests; in tokens for EXTEND and MIXED.
        alignment: tokens of every bucket and of every count are a multiple of it (the size of the
            attention's tensor-parallel group); sizes are rounded up to it once, here.
        width: tokens per request.
        row_bytes: bytes of one token's row in the buffer that ranks share.
        all_reduce_limit_bytes: what the fast all-reduce holds.
        all_to_all: experts exchange tokens by all-to-all; see ``CostRule``.
        speculative: tokens of one request travel together; see ``CostRule``.
        rule: replaces the cost rule: ``rule(counts)`` or ``rule(counts, mode)`` gives a ``Padding``.
        extend_ladder: the captured token sizes, where one planner serves decode and prefill; ``ladder``
            by default.
        max_requests: request rows of every EXTEND bucket; the largest rank's by default.
        sum_len_tolerated: no collective is recorded in the prefill graphs, so ranks need not be rounded
            to one size for them.
        max_len_only: an all-to-all that knows equal counts only.
        hybrid_state: a recurrent state needs a row on every rank that prefills.

    Raises:
        ConfigError: a value that is not usable.
    """

    def __init__(
        self,
        ladder: Ladder | Iterable[int],
        alignment: int = 1,
        width: int = 1,
        row_bytes: int = 0,
        all_reduce_limit_bytes: int = 16 * 2**20,
        all_to_all: bool = False,
        speculative: bool = False,
        rule: Any = None,
        *,
        extend_ladder: Ladder | Iterable[int] | None = None,
        max_requests: int | None = None,
        sum_len_tolerated: bool = False,
        max_len_only: bool = False,
        hybrid_state: bool = False,
    ) -> None:
        _check_positive(alignment=alignment, width=width, max_requests=max_requests)
        self.alignment, self.width, self.max_requests = alignment, width, max_requests
        self.ladder = self.rounded(Ladder(ladder))
        self.extend_ladder = self.rounded(Ladder(ladder if extend_ladder is None else extend_ladder), tokens=True)
        self.sum_len_tolerated = sum_len_tolerated
        self._cost = CostRule(
            row_bytes, all_reduce_limit_bytes, all_to_all, speculative, max_len_only, hybrid_state
        )  # fmt: skip
        self.rule = self._cost if rule is None else checked_rule(rule)
        self._rule_name = name_of(self._cost if rule is None else rule)
        self._kept: dict[Any, tuple[Any, ...]] = {}  # tuples of equal counts and of roles, to make each once

    def rounded(self, ladder: Ladder, tokens: bool = False) -> Ladder:
        """Round sizes up so that the tokens of each are a multiple of the alignment.

        Args:
            ladder: the sizes.
            tokens: whether they count tokens; else they count requests.
        """
        return ladder.aligned(self.alignment // (1 if tokens else math.gcd(self.alignment, self.width)))

    def plan(self, facts: Sequence[RankFacts]) -> RankPlan:
        """Plan a step from the facts of all ranks, in rank order.

        Raises:
            RankDisagreementError: no rank at all, digests that differ, other numbers of extra fields.
        """
        if not facts:
            raise RankDisagreementError("a plan of no ranks: expected the facts of at least one")
        return self.plan_encoded(stacked(facts))

    def plan_encoded(self, matrix: Any) -> RankPlan:
        """Plan a step from the gathered rows: the hot form of ``plan``.

        Args:
            matrix: int64[ranks, fields], as ``RankFacts.encoded`` makes the rows; a numpy array or a CPU tensor.

        Raises:
            RankDisagreementError: rows of another layout, or digests that differ.
        """
        gathered = Gathered.of(matrix)
        shape = self._shape(gathered)
        reason, vetoes = self._refusal(gathered, shape)
        num_ranks = gathered.num_ranks
        roles, cast = self._roles(gathered, bool(vetoes))
        if reason is None and shape.bucket is not None:
            forward, bucket, reason = Route.GRAPH, shape.bucket, _why_graph(gathered, shape)
            if self.sum_len_tolerated and gathered.extends:
                padding, counts, rows = self._live_meeting(gathered, shape)
            else:
                padding, counts, rows = self.captured_meeting(bucket, shape.mode, num_ranks)
        else:
            assert reason is not None
            forward = Route.EAGER
            padding, counts, rows = self._live_meeting(gathered, shape)
            bucket = self._live_bucket(gathered, shape, self._aligned(gathered.high[at.TOKENS], shape))
        digest = _digest(bucket, shape.mode, forward, padding, counts, rows, cast, reason, vetoes)
        return RankPlan(
            bucket, shape.mode, forward, padding, counts, rows, roles, reason, digest, vetoes, gathered.high[at.PREFIX]
        )  # fmt: skip

    def captured_padding(self, bucket: Bucket, mode: Mode, num_ranks: int) -> Padding:
        """Give the padding of a captured graph: the rule applied to the counts it is captured with.

        A prefill graph is MAX_LEN: what it holds is one size for all ranks, those without tokens too.

        Args:
            bucket: its extents.
            mode: what it computes.
            num_ranks: ranks of the group.
        """
        if mode.counts_tokens:
            return Padding.MAX_LEN
        if self.rule is self._cost:
            return self._cost.of_sums(num_ranks, bucket.tokens, bucket.tokens, num_ranks * bucket.tokens, False)
        return self.rule(self._equal(num_ranks, bucket.tokens), mode)

    def captured_meeting(self, bucket: Bucket, mode: Mode, num_ranks: int) -> Meeting:
        """Give how the rows of all ranks meet in a captured graph.

        Args:
            bucket: its extents.
            mode: what it computes.
            num_ranks: ranks of the group.
        """
        padding, counts = self.captured_padding(bucket, mode, num_ranks), self._equal(num_ranks, bucket.tokens)
        return Meeting(padding, counts, num_ranks * bucket.tokens)

    def declaration(self) -> dict[str, str]:
        """Say what must be equal on all ranks, for the comparison at start-up."""
        return {
            "layout of the facts": str(at.VERSION),
            "ladder": str(list(self.ladder)),
            "ladder of EXTEND": str(list(self.extend_ladder)),
            "alignment": str(self.alignment),
            "width": str(self.width),
            "max_requests": str(self.max_requests),
            "sum_len_tolerated": str(self.sum_len_tolerated),
            "rule": self._rule_name,
        }

    # What the rows ask for.

    def _shape(self, gathered: Gathered) -> _Shape:
        high, low_mode, high_mode = gathered.high, gathered.low_mode, gathered.high_mode
        if gathered.idle:
            mode = MODES[low_mode]
            return self._covered(mode, 0 if mode.counts_tokens else self.width, 0)
        if gathered.extends:
            mode = MODES[high_mode] if low_mode == high_mode else Mode.EXTEND
            shape = self._covered(mode, 0, high[at.TOKENS], high[at.REQUESTS])
            apart = low_mode < FIRST_EXTEND and gathered.some_idle  # a decode rank that stays one
            return shape._replace(refusal=Reason.AGREED_EAGER) if apart else shape
        mode = MODES[high_mode]
        if low_mode != high_mode:
            return _Shape(mode, 0, None, 0, Reason.AGREED_EAGER)
        width = gathered.low_width if gathered.low_width == gathered.high_width else 0
        needed = high[at.REQUESTS] if width else max(high[at.REQUESTS], -(-high[at.TOKENS] // self.width))
        return self._covered(mode, width, needed)

    def _covered(self, mode: Mode, width: int, needed: int, requests: int = 0) -> _Shape:
        """Find the smallest captured size that covers the largest rank."""
        ladder = self.extend_ladder if mode.counts_tokens else self.ladder
        size = ladder.cover(needed)
        if size is None:
            return _Shape(mode, width, None, 0, Reason.OVER_LADDER)
        if mode.counts_tokens:
            rows = self.max_requests or max(requests, 1)
            if requests > rows:
                return _Shape(mode, 0, None, 0, Reason.OVER_LADDER)
            bucket = Bucket(rows, size, 0)
        else:
            bucket = Bucket(size, size * (width or self.width), width)
            if bucket.tokens > ladder.largest * self.width:  # what the slots hold
                return _Shape(mode, width, None, 0, Reason.OVER_LADDER)
            if bucket.tokens % self.alignment:  # sizes are aligned at the planner's own width
                return _Shape(mode, width, None, 0, Reason.NOT_CAPTURED)
        return _Shape(mode, width, bucket, ladder.sizes.index(size), None)

    def _refusal(self, gathered: Gathered, shape: _Shape) -> tuple[Reason | None, tuple[int, ...]]:
        """Say why the forward can not be a graph, and which ranks can not; None and nobody if it can."""
        prefill = gathered.extends or (gathered.idle and shape.mode.counts_tokens)
        vote = at.PREFILL_VOTE if prefill else at.VOTE
        if gathered.high[at.REFUSED] or not gathered.low[vote]:
            columns = gathered.columns
            vetoes = tuple(np.flatnonzero((columns[vote] == 0) | (columns[at.REFUSED] != 0)).tolist())
            return Reason.RANK_VETO, vetoes
        if shape.refusal is not None:
            return shape.refusal, ()
        column = at.MISSING_EXTEND if shape.mode.counts_tokens else at.MISSING
        if gathered.high[column] and missing_bits(gathered.columns[column]) & missing_bit(shape.position):
            return Reason.NOT_CAPTURED, ()
        return None, ()

    def _roles(self, gathered: Gathered, vetoed: bool) -> tuple[tuple[Role, ...], int]:
        """Give the role of each rank, and a number that tells this cast from others in every process."""
        decodes = gathered.low_mode < FIRST_EXTEND
        converts = gathered.extends and decodes and not gathered.some_idle and not vetoed
        if not gathered.some_idle and not converts:
            num_ranks = gathered.num_ranks
            return self._once((num_ranks, "real"), lambda: (Role.REAL,) * num_ranks), 0
        odd = gathered.columns[at.MODE] < FIRST_EXTEND if converts else gathered.columns[at.REQUESTS] == 0
        mask, choice = odd.tobytes(), (Role.REAL, Role.CONVERTED if converts else Role.IDLE)
        roles = self._once((mask, converts), lambda: tuple(map(choice.__getitem__, odd.tolist())))
        return roles, 2 * int.from_bytes(mask, "little") + converts

    # Counts of an eager step, which are not rounded to the ladder.

    def _live_meeting(self, gathered: Gathered, shape: _Shape) -> Meeting:
        num_ranks = gathered.num_ranks
        if gathered.idle and shape.bucket is not None:  # nobody has rows: all keep the smallest bucket
            counts = self._equal(num_ranks, shape.bucket.tokens)
            return Meeting(self.rule(counts, shape.mode), counts, num_ranks * shape.bucket.tokens)
        step, tokens = self._step(shape), gathered.columns[at.TOKENS]
        counts = tuple((tokens if step == 1 else (tokens + (step - 1)) // step * step).tolist())
        most, total = self._aligned(gathered.high[at.TOKENS], shape), sum(counts)
        if self.rule is self._cost:
            least = self._aligned(gathered.low[at.TOKENS], shape)
            padding = self._cost.of_sums(num_ranks, least, most, total, shape.mode.counts_tokens)
        else:
            padding = self.rule(counts, shape.mode)
        if padding is Padding.SUM_LEN:
            return Meeting(padding, counts, total)
        return Meeting(padding, self._equal(num_ranks, most), num_ranks * most)

    def _live_bucket(self, gathered: Gathered, shape: _Shape, tokens: int) -> Bucket:
        if gathered.idle and shape.bucket is not None:
            tokens = shape.bucket.tokens
        if shape.width:
            return Bucket(tokens // shape.width, tokens, shape.width)
        return Bucket(max(gathered.high[at.REQUESTS], min(tokens, 1)), tokens, 0)

    def _step(self, shape: _Shape) -> int:
        """Give what counts are a multiple of: whole requests, where all have the same width."""
        return math.lcm(self.alignment, shape.width) if shape.width else self.alignment

    def _aligned(self, tokens: int, shape: _Shape) -> int:
        return -(-tokens // self._step(shape)) * self._step(shape)

    def _equal(self, num_ranks: int, tokens: int) -> tuple[int, ...]:
        return self._once((num_ranks, tokens), lambda: (tokens,) * num_ranks)

    def _once(self, key: Any, make: Callable[[], tuple[Any, ...]]) -> tuple[Any, ...]:
        kept = self._kept.get(key)
        if kept is None:
            if len(self._kept) >= _MAX_KEPT:
                self._kept.clear()
            kept = self._kept[key] = make()
        return kept


def _why_graph(gathered: Gathered, shape: _Shape) -> Reason:
    if gathered.idle:
        return Reason.IDLE
    if shape.width == 0 and not shape.mode.counts_tokens:
        return Reason.RAGGED
    assert shape.bucket is not None
    return Reason.UNPADDED if gathered.low[at.TOKENS] == shape.bucket.tokens else Reason.PADDED


def _digest(
    bucket: Bucket, mode: Mode, forward: Route, padding: Padding, counts: tuple[int, ...], rows: int,
    cast: int, reason: Reason, vetoes: tuple[int, ...],
) -> int:  # fmt: skip
    """Hash a plan. Integers only: their hash is the same in every process, that of a string is not."""
    codes = (CODES[mode], forward is Route.GRAPH, padding is Padding.SUM_LEN, rows, _REASONS[reason])
    return hash((bucket, codes, counts, cast, vetoes)) & (2**63 - 1)


def _check_positive(**values: Any) -> None:
    for name, value in values.items():
        if (value is not None or name != "max_requests") and (type(value) is not int or value < 1):
            raise ConfigError(f"{name}={value!r}: expected a positive integer")
