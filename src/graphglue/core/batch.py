"""What an engine hands in for one step."""

from __future__ import annotations

import enum
import operator
from collections.abc import Collection, Mapping, Sequence, Set
from dataclasses import dataclass, field
from typing import Any

from graphglue.core.buckets import Bucket
from graphglue.errors import BindError


class Mode(str, enum.Enum):
    """What a step computes. A batch with no requests is IDLE, in any mode."""

    DECODE = "decode"
    VERIFY = "verify"
    DRAFT = "draft"
    DRAFT_EXTEND = "draft_extend"
    EXTEND = "extend"
    MIXED = "mixed"

    __hash__ = str.__hash__  # a key is looked up at every step, and Enum's own hash runs Python

    @property
    def counts_tokens(self) -> bool:
        """Whether ladder sizes of this mode are tokens rather than requests."""
        return self in (Mode.EXTEND, Mode.MIXED)


@dataclass(slots=True)
class Batch:
    """Hand in one step.

    Args:
        num_requests: real requests; for a step with none use ``Batch.idle()``.
        sources: slot name -> this step's values with exactly the real extents: a tensor on the
            runner's device or the CPU, a numpy array, a list; a number where one element is expected.
        mode: what the step computes.
        num_tokens: real tokens; num_requests x tokens_per_request by default.
        row_tokens: tokens of each request; ragged unless all are equal.
        variant: what selects another forward graph (LoRA on, attention variant); part of the key.
        features: active features that steer the prep only.
    """

    num_requests: int
    sources: Mapping[str, Any] = field(default_factory=dict)
    mode: Mode = Mode.DECODE
    num_tokens: int | None = None
    row_tokens: Sequence[int] | None = None
    variant: Any = None
    features: frozenset[str] = frozenset()

    @classmethod
    def idle(cls, mode: Mode = Mode.DECODE, variant: Any = None) -> Batch:
        """Build the batch of a step with nothing to do."""
        return cls(num_requests=0, mode=mode, variant=variant)


def extents_of(batch: Batch, width: int) -> Bucket:
    """Read a batch's real extents: ``Bucket(requests, tokens, row_tokens)``.

    ``row_tokens`` is 0 where requests differ in length, and in the modes whose ladder counts tokens.

    Args:
        batch: the step.
        width: tokens per request of the runner.

    Raises:
        BindError: counts that are not integers, contradict each other, or leave no request
            without being IDLE.
    """
    if not isinstance(batch, Batch):
        raise BindError(f"a step of type {type(batch).__name__}; expected a graphglue.Batch")
    if not isinstance(batch.mode, Mode):
        raise BindError(f"mode={batch.mode!r}: expected a graphglue.Mode, such as Mode.DECODE")
    if not isinstance(batch.sources, Mapping):
        raise BindError(f"sources is a {type(batch.sources).__name__}; expected a mapping of slot names to values")
    if isinstance(batch.features, str) or not isinstance(batch.features, Collection):
        raise BindError(f"features={batch.features!r}: expected a set of names, such as frozenset({{'lora'}})")
    try:
        hash(batch.variant)
    except TypeError:
        raise BindError(f"variant={batch.variant!r}: expected a hashable value, which is part of the key") from None
    requests = _count(batch.num_requests, "num_requests")
    given = None if batch.num_tokens is None else _count(batch.num_tokens, "num_tokens")
    if requests == 0:
        return _idle_extents(batch, given)
    if batch.row_tokens is not None:
        return _ragged_extents(batch.mode, requests, given, batch.row_tokens)
    if batch.mode.counts_tokens:
        if given is None:
            raise BindError(f"a batch in mode {batch.mode.value} has no num_tokens; pass num_tokens or row_tokens")
        return Bucket(requests, _at_least(given, requests), 0)
    tokens = requests * width if given is None else given
    if tokens % requests or not tokens:
        raise BindError(
            f"num_tokens={tokens} does not divide among num_requests={requests}; "
            "pass row_tokens, the tokens of each request"
        )
    return Bucket(requests, tokens, tokens // requests)


def _idle_extents(batch: Batch, tokens: int | None) -> Bucket:
    if batch.sources or tokens or (batch.row_tokens is not None and len(batch.row_tokens)):
        raise BindError(
            f"num_requests=0 with {len(batch.sources)} sources and num_tokens={tokens}: a batch without "
            "requests is IDLE and carries nothing; use Batch.idle(mode=...)"
        )
    return Bucket(0, 0, 0)


def _ragged_extents(mode: Mode, requests: int, given: int | None, row_tokens: Sequence[int]) -> Bucket:
    if not hasattr(row_tokens, "__len__") or isinstance(row_tokens, (Mapping, Set)):  # a set has no order
        raise BindError(f"row_tokens={row_tokens!r}: expected the tokens of each request, in a list")
    rows = [_count(tokens, "row_tokens") for tokens in row_tokens]
    if len(rows) != requests or min(rows) < 1:
        raise BindError(
            f"row_tokens {rows[:8]} has {len(rows)} entries: expected one positive count for each of "
            f"num_requests={requests}"
        )
    tokens = sum(rows)
    if given is not None and given != tokens:
        raise BindError(f"num_tokens={given}, but row_tokens sums to {tokens}; leave num_tokens out")
    uniform = rows[0] == max(rows) == min(rows) and not mode.counts_tokens
    return Bucket(requests, tokens, rows[0] if uniform else 0)


def _at_least(tokens: int, requests: int) -> int:
    if tokens < requests:
        raise BindError(f"num_tokens={tokens} for num_requests={requests}: every request has at least one token")
    return tokens


def _count(number: Any, what: str) -> int:
    if type(number) is int and number >= 0:
        return number
    place = getattr(number, "device", None)
    if getattr(place, "type", "cpu") != "cpu":  # a tensor; numpy names its device, which is always the host's
        raise BindError(f"{what} is on {place}, where reading it would make the host wait; hand in host numbers")
    try:
        if isinstance(number, bool):
            raise TypeError
        count = operator.index(number)
    except TypeError:
        raise BindError(f"{what}={number!r} ({type(number).__name__}): expected an integer") from None
    if count < 0:
        raise BindError(f"{what}={count}: expected 0 or more")
    return count
