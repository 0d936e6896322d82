"""Keys: the exact geometry a graph was captured for, and the space of legal ones."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

from graphglue.core.batch import Mode
from graphglue.core.buckets import Bucket, Ladder
from graphglue.errors import ConfigError


class Key(NamedTuple):
    """What one captured graph is for. The raw count is never part of it.

    ``padding`` is the agreed MAX_LEN or SUM_LEN of a rank group, None on one rank.
    """

    mode: Mode
    requests: int
    tokens: int
    row_tokens: int
    padding: Any = None
    variant: Any = None

    @property
    def bucket(self) -> Bucket:
        """The extents of this key."""
        return Bucket(self.requests, self.tokens, self.row_tokens)

    def __str__(self) -> str:
        """Spell it for people, in messages and logs."""
        shape = f"{self.requests} requests and {self.tokens} tokens" + ("" if self.row_tokens else ", ragged")
        padding = "" if self.padding is None else f", {getattr(self.padding, 'value', self.padding)}"
        variant = "" if self.variant is None else f", variant {self.variant!r}"
        return f"{self.mode.value} bucket of {shape}{padding}{variant}"


class KeySpace:
    """Hold the legal keys: capture enumerates it, routing looks up in it.

    Args:
        ladder: sizes in requests, or in tokens for EXTEND and MIXED.
        width: tokens per request.
        modes: the modes that are captured.
        variants: the forward variants that are captured.
        ragged: also capture each size for requests of different token counts.
        max_requests: request rows of every bucket where the ladder counts tokens; else it is the
            ladder's largest size.

    ``padding_of(mode, bucket)`` gives the padding that a rank group records a key with; None on one rank.

    Raises:
        ConfigError: modes that count tokens beside modes that count requests, or no max_requests.
    """

    def __init__(
        self,
        ladder: Ladder,
        width: int = 1,
        modes: Iterable[Mode] = (Mode.DECODE,),
        variants: Iterable[Any] = (None,),
        ragged: bool = False,
        max_requests: int | None = None,
    ) -> None:
        if type(width) is not int or width < 1:
            raise ConfigError(f"tokens_per_request={width!r}: expected a positive integer")
        self.ladder, self.width, self.ragged = ladder, width, ragged
        self.modes = tuple(sorted(set(modes), key=lambda mode: mode.value))
        self.variants = _checked_variants(variants)
        self.counts_tokens = any(mode.counts_tokens for mode in self.modes)
        if self.counts_tokens and not all(mode.counts_tokens for mode in self.modes):
            raise ConfigError(
                f"modes {[mode.value for mode in self.modes]}: a ladder counts tokens for EXTEND and MIXED and "
                "requests for the others; give EXTEND a Runner of its own (RunnerConfig.modes picks)"
            )
        if self.counts_tokens and max_requests is None:
            raise ConfigError("an EXTEND ladder counts tokens; set RunnerConfig(max_requests=...) for the request rows")
        self.padding_of: Callable[[Mode, Bucket], Any] = _no_padding
        rows = max_requests if self.counts_tokens else ladder.largest
        self.capacity = Bucket(rows or 0, ladder.largest * (1 if self.counts_tokens else width), 0)

    def bucket(self, size: int, ragged: bool = False) -> Bucket:
        """Give the extents of a ladder size."""
        if self.counts_tokens:
            return Bucket(self.capacity.requests, size, 0)
        return Bucket(size, size * self.width, 0 if ragged else self.width)

    def cover(self, raw: Bucket) -> Bucket | None:
        """Find the smallest bucket that covers real extents; None where none does.

        Zero requests take the smallest bucket. A uniform batch of another width k has buckets of
        that width, and a ragged one the smallest size n with n >= requests and n x width >= tokens.
        """
        if self.counts_tokens:
            size = self.ladder.cover(raw.tokens)
            return None if size is None or raw.requests > self.capacity.requests else self.bucket(size)
        if raw.requests == 0:
            return self.bucket(self.ladder.smallest)
        ragged = raw.row_tokens == 0
        needed = max(raw.requests, -(-raw.tokens // self.width)) if ragged else raw.requests
        size = self.ladder.cover(needed)
        if size is None:
            return None
        bucket = self.bucket(size, ragged=True) if ragged else Bucket(size, size * raw.row_tokens, raw.row_tokens)
        return None if bucket.tokens > self.capacity.tokens else bucket

    def key(self, mode: Mode, bucket: Bucket, variant: Any = None) -> Key:
        """Give the key of a bucket, with the padding that its ranks agree on, if there are any."""
        return Key(mode, *bucket, self.padding_of(mode, bucket), variant)

    def keys(self, sizes: Iterable[int] | None = None) -> tuple[Key, ...]:
        """List the keys to capture, the largest first, so that smaller ones reuse its memory."""
        ordered = sorted(self.ladder if sizes is None else sizes, reverse=True)
        shapes = (False, True) if self.ragged and not self.counts_tokens else (False,)
        return tuple(
            self.key(mode, self.bucket(size, ragged), variant)
            for size in ordered
            for mode in self.modes
            for ragged in shapes
            for variant in self.variants
        )

    def sizes_of(self, buckets: Iterable[int | Bucket]) -> list[int]:
        """Read sizes of the ladder from sizes or buckets, each once.

        Raises:
            ConfigError: none given, or one that the ladder does not have.
        """
        if not isinstance(buckets, Iterable) or not (wanted := list(buckets)):
            raise ConfigError(f"capture of {buckets!r}: expected sizes of the ladder {list(self.ladder)}")
        sizes = []
        for bucket in wanted:
            counted = self.counts_tokens
            size = (bucket.tokens if counted else bucket.requests) if isinstance(bucket, Bucket) else bucket
            if size not in self.ladder or (isinstance(bucket, Bucket) and bucket != self.bucket(size)):
                raise ConfigError(
                    f"capture of {bucket!r}: the ladder has {list(self.ladder)}; add it there, or give one of its sizes"
                )
            sizes.append(size)
        return list(dict.fromkeys(sizes))


def _no_padding(mode: Mode, bucket: Bucket) -> None:
    return None


def _checked_variants(variants: Iterable[Any]) -> tuple[Any, ...]:
    try:
        distinct = tuple(dict.fromkeys(variants))
    except TypeError:
        raise ConfigError(f"variants={variants!r}: expected hashable values, which are part of each key") from None
    if not distinct:
        raise ConfigError("variants=(): expected at least one; (None,) for a forward without variants")
    return distinct
