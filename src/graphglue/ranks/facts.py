"""Facts: what one rank tells the others about its next step, as one row of integers.

Every decision that changes a collective is a pure function of these rows, so whatever a rank knows by
itself (a graph that failed, a waste limit, a refused batch) travels here or does not count.
"""

from __future__ import annotations

import operator
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from graphglue.core.batch import Mode
from graphglue.errors import BindError, RankDisagreementError

VERSION = 1
# Columns of a row. The first names the layout and what the exchange is for, so that ranks that
# are in different calls, or of different versions, find out.
FORMAT, REQUESTS, TOKENS, MODE, ROW_TOKENS, VOTE, PREFILL_VOTE, REFUSED, CONVERTIBLE, PREFIX, DIGEST, CHECK = range(12)
MISSING, MISSING_EXTEND, EXTRA = 12, 13, 14  # a bit for each size of a ladder, twice; the engine's own fields
KINDS = ("a step", "a capture", "a comparison of declarations")
STEP, CAPTURE, COMPARE = ((VERSION << 8) | kind for kind in range(len(KINDS)))

MAX_TOKENS = 2**31 - 1
_WORD_BITS = 63
# Those that count tokens come last, so that a maximum tells whether any rank extends.
MODES = (Mode.DECODE, Mode.VERIFY, Mode.DRAFT, Mode.DRAFT_EXTEND, Mode.EXTEND, Mode.MIXED)
CODES = {mode: code for code, mode in enumerate(MODES)}
FIRST_EXTEND = CODES[Mode.EXTEND]


@dataclass(frozen=True)
class RankFacts:
    """State one rank's next step.

    Args:
        requests: real requests; 0 for a rank with nothing to do.
        tokens: real tokens.
        mode: what the step computes.
        vote: whether this rank can replay a graph.
        row_tokens: the tokens of each request, or the number that all share (0: they differ); by
            default all share one where that divides.
        digest: hashes what must be equal on all ranks; 0 for nothing to compare.
        extra: integers that the engine adds, equally many on every rank.
        prefill_vote: whether it can replay a prefill graph beside a rank that prefills; by default
            its vote, and for a decode rank whether it is convertible as well.
        refused: its batch was refused; the step fails on this rank once the ranks have agreed.
        convertible: a decode rank that may run as a one-token extend; by default one with a token
            for each request in mode DECODE.
        prefix: its longest prefix.
        missing: a bit for each size of the ladder in requests that it has no graph of, the smallest first.
        missing_extend: the same of the ladder in tokens.

    Raises:
        BindError: counts that contradict each other, or do not fit 63 bits.
    """

    requests: int
    tokens: int
    mode: Mode
    vote: bool = True
    row_tokens: int | Sequence[int] | None = None
    digest: int = 0
    extra: tuple[int, ...] = ()
    prefill_vote: bool | None = None
    refused: bool = False
    convertible: bool | None = None
    prefix: int = 0
    missing: int = 0
    missing_extend: int = 0

    def __post_init__(self) -> None:
        try:
            settle = object.__setattr__
            settle(self, "mode", Mode(self.mode))
            for name in ("requests", "tokens", "digest", "prefix", "missing", "missing_extend"):
                settle(self, name, operator.index(getattr(self, name)))
            settle(self, "extra", tuple(operator.index(number) for number in self.extra))
        except (TypeError, ValueError) as error:
            raise BindError(f"rank facts are not integers of a known mode: {error}; seen {self!r}") from None
        self._check_counts()
        self._complete()

    @classmethod
    def refusal(cls, mode: Mode = Mode.DECODE, extra: Iterable[int] = ()) -> RankFacts:
        """State that this rank's batch was refused: it takes part with no rows, and fails afterwards."""
        return cls(0, 0, mode, vote=False, extra=tuple(extra), refused=True)

    def beside(self, prefill: RankFacts) -> RankFacts:
        """State one decode or idle step for two runners: this runner's facts, and what ``prefill`` votes on it."""
        return replace(
            self,
            prefill_vote=prefill.prefill_vote,
            convertible=prefill.convertible,
            missing_extend=prefill.missing_extend,
        )

    @property
    def extends(self) -> bool:
        """Whether it prefills."""
        return self.requests > 0 and self.mode.counts_tokens

    def encoded(self, num_extra: int = 0) -> np.ndarray:
        """Give the row: int64[14 + num_extra], version 1.

        Raises:
            BindError: another number of extra fields.
        """
        if len(self.extra) != num_extra:
            raise BindError(f"rank facts carry {len(self.extra)} extra fields, {self.extra[:4]}; expected {num_extra}")
        kept = self.__dict__.get("_row")
        if kept is None:
            kept = np.array([*self._numbers(), *self.extra], dtype=np.int64)
            kept.flags.writeable = False
            object.__setattr__(self, "_row", kept)
        return kept

    @classmethod
    def decoded(cls, row: Sequence[int] | np.ndarray) -> RankFacts:
        """Read a row.

        Raises:
            RankDisagreementError: a row of another version, or of no step.
        """
        numbers = [int(number) for number in row]
        check_format(numbers[:1])
        return cls(
            numbers[REQUESTS], numbers[TOKENS], MODES[numbers[MODE]], bool(numbers[VOTE]), numbers[ROW_TOKENS],
            numbers[DIGEST], tuple(numbers[EXTRA:]), bool(numbers[PREFILL_VOTE]), bool(numbers[REFUSED]),
            bool(numbers[CONVERTIBLE]), numbers[PREFIX], numbers[MISSING], numbers[MISSING_EXTEND],
        )  # fmt: skip

    def _numbers(self) -> list[int]:
        flags = (self.vote, self.prefill_vote, self.refused, self.convertible)
        counts = (self.requests, self.tokens, CODES[self.mode], self.row_tokens)
        numbers = (*counts, *map(int, flags), self.prefix, self.digest)  # type: ignore[arg-type]
        return [STEP, *numbers, 0, word_of(self.missing), word_of(self.missing_extend)]  # type: ignore[list-item]

    def _check_counts(self) -> None:
        if not 0 <= self.requests <= self.tokens <= MAX_TOKENS or (self.requests == 0) != (self.tokens == 0):
            raise BindError(
                f"rank facts of {self.requests} requests and {self.tokens} tokens: expected 0 and 0, or at least one "
                f"token for each request and at most {MAX_TOKENS}"
            )
        if min(self.missing, self.missing_extend) < 0 or not all(
            -(2**63) <= number < 2**63 for number in (self.digest, self.prefix, *self.extra)
        ):
            raise BindError(f"rank facts hold a number that an int64 does not: {self!r}")

    def _complete(self) -> None:
        settle = object.__setattr__
        settle(self, "row_tokens", _shared_width(self.requests, self.tokens, self.row_tokens))
        settle(self, "vote", bool(self.vote) and not self.refused)
        one_each = self.mode is Mode.DECODE and self.requests == self.tokens > 0
        settle(self, "convertible", one_each if self.convertible is None else one_each and bool(self.convertible))
        joins = self.extends or self.requests == 0 or self.convertible
        vote = self.vote if self.prefill_vote is None else self.prefill_vote
        settle(self, "prefill_vote", bool(vote and joins and not self.refused))


def missing_bit(position: int) -> int:
    """Give the bit of a ladder's size; those beyond the row's room share its last one."""
    return 1 << min(position, _WORD_BITS - 1)


def word_of(bits: int) -> int:
    """Fit bits into an int64; the last one stands for all larger sizes, so that none of them is replayed."""
    top = (1 << _WORD_BITS) - 1
    return bits if bits <= top else (bits | 1 << (_WORD_BITS - 1)) & top


def missing_bits(words: np.ndarray) -> int:
    """Give the sizes that any rank has no graph of, from the word of each."""
    return int(np.bitwise_or.reduce(words))


def stacked(facts: Sequence[RankFacts]) -> np.ndarray:
    """Stack the rows of all ranks, in rank order: int64[ranks, fields].

    Raises:
        RankDisagreementError: ranks with different numbers of extra fields.
    """
    num_extra = len(facts[0].extra)
    for rank, one in enumerate(facts):
        if len(one.extra) != num_extra:
            raise RankDisagreementError(
                f"rank {rank} carries {len(one.extra)} extra fields, rank 0 {num_extra}; engines add equally many"
            )
    return np.stack([one.encoded(num_extra) for one in facts])


def check_format(formats: Sequence[int]) -> None:
    """Check that all ranks are in a step, and of this version.

    Raises:
        RankDisagreementError: names the first rank that differs, and how.
    """
    for rank, seen in enumerate(formats):
        if seen != STEP:
            raise RankDisagreementError(
                f"rank {rank} is in {name_of(seen)}, while this plan is for {name_of(STEP)}; ranks make the same calls "
                "in the same order"
            )


def name_of(kind: int) -> str:
    """Say what an exchange is for."""
    if kind >> 8 != VERSION or kind & 255 >= len(KINDS):
        return f"an exchange of layout {kind >> 8} (here it is {VERSION}: run one graphglue on all ranks)"
    return KINDS[kind & 255]


def _shared_width(requests: int, tokens: int, given: Any) -> int:
    """Give the tokens that each request has; 0 where they differ."""
    if requests == 0:
        return 0
    if given is None:
        return tokens // requests if tokens % requests == 0 else 0
    if isinstance(given, (int, np.integer)):
        if given and given * requests != tokens:
            raise BindError(
                f"rank facts of {requests} requests with row_tokens={given} and tokens={tokens}: no product"
            )
        return int(given)
    try:
        widths = [operator.index(width) for width in given]
    except TypeError:
        raise BindError(f"row_tokens={given!r}: expected a number, or one for each of {requests} requests") from None
    if len(widths) != requests or sum(widths) != tokens or min(widths) < 1:
        raise BindError(f"row_tokens {widths[:8]}: expected one positive count for each of {requests}, {tokens} in all")
    return widths[0] if len(set(widths)) == 1 else 0
