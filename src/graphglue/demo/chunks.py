"""Prompts in chunks: what prefill steps read, and what a ladder of token buckets pads them by."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

from graphglue.core.buckets import Ladder
from graphglue.errors import ConfigError


@dataclass(frozen=True)
class Chunk:
    """The tokens ``begin`` to ``end`` of a prompt; ``prompt`` is its position among those handed in."""

    prompt: int
    begin: int
    end: int

    @property
    def num_tokens(self) -> int:
        """How many tokens it has."""
        return self.end - self.begin


@dataclass(frozen=True)
class LadderWaste:
    """What a ladder pads some counts by.

    ``waste`` is padded rows over real ones, of all counts, ``worst`` that of the worst count, and ``over_limit`` the
    share of the counts whose bucket is more than twice as large, which the router runs eagerly instead.
    """

    name: str
    num_sizes: int
    waste: float
    worst: float
    over_limit: float


def chunks_of(length: int, max_tokens: int) -> list[int]:
    """Cut a prompt at the largest bucket: full chunks, and what is left.

    Args:
        length: tokens of the prompt.
        max_tokens: the largest bucket.

    Raises:
        ConfigError: a length or a limit below 1.
    """
    if length < 1 or max_tokens < 1:
        raise ConfigError(f"a prompt of {length} tokens in chunks of {max_tokens}: expected both to be at least 1")
    full, rest = divmod(length, max_tokens)
    return [max_tokens] * full + [rest] * (rest > 0)


def pack(lengths: Sequence[int], max_tokens: int, max_requests: int) -> list[list[Chunk]]:
    """Lay prompts out in steps, first come first served: whole ones, and in chunks those longer than a bucket.

    A step takes chunks while they fit; a prompt's chunks come in order, in steps of their own.

    Args:
        lengths: tokens of each prompt.
        max_tokens: the most tokens of a step, the largest bucket.
        max_requests: the most prompts of a step.

    Raises:
        ConfigError: a length or a limit below 1.
    """
    if max_requests < 1:
        raise ConfigError(f"max_requests={max_requests}: a step takes at least one prompt")
    left = deque(_all_chunks(lengths, max_tokens))
    steps: list[list[Chunk]] = []
    while left:
        step, room = [left.popleft()], max_tokens
        room -= step[0].num_tokens
        # A full chunk leaves no room, so no step has two chunks of one prompt.
        while left and left[0].num_tokens <= room and len(step) < max_requests:
            room -= left[0].num_tokens
            step.append(left.popleft())
        steps.append(step)
    return steps


def _all_chunks(lengths: Sequence[int], max_tokens: int) -> list[Chunk]:
    chunks = []
    for prompt, length in enumerate(lengths):
        begin = 0
        for num_tokens in chunks_of(length, max_tokens):
            chunks.append(Chunk(prompt, begin, begin + num_tokens))
            begin += num_tokens
    return chunks


def ladder_waste(name: str, ladder: Ladder, counts: Sequence[int]) -> LadderWaste:
    """Tell what a ladder pads counts by, each in a step of its own.

    Args:
        name: the ladder's, for the table.
        ladder: token buckets.
        counts: real tokens of each step.

    Raises:
        ConfigError: no counts, or one that the ladder does not hold.
    """
    covers = {count: ladder.cover(count) for count in set(counts)}
    padded = {count: size - count for count, size in covers.items() if size is not None and count > 0}
    if not padded or len(padded) < len(covers):
        refused = sorted(set(covers) - set(padded))
        raise ConfigError(f"counts {refused} in a ladder of up to {ladder.largest}: expected some from 1 to that")
    return LadderWaste(
        name,
        num_sizes=len(ladder),
        waste=sum(padded[count] for count in counts) / sum(counts),
        worst=max(rows / count for count, rows in padded.items()),
        over_limit=sum(padded[count] > count for count in counts) / len(counts),
    )


def compare_ladders(
    lengths: Sequence[int], max_tokens: int, bounds: Sequence[float] = (0.125, 0.25)
) -> list[LadderWaste]:
    """Hold bounded ladders against two usual ones, on prompts in chunks of up to ``max_tokens``.

    Args:
        lengths: tokens of each prompt, at least one.
        max_tokens: the largest bucket.
        bounds: the waste of each bounded ladder.

    Raises:
        ConfigError: a length, a limit or a bound that is not usable.
    """
    counts = [num_tokens for length in lengths for num_tokens in chunks_of(length, max_tokens)]
    doubling = [2**power for power in range(max_tokens.bit_length()) if 2**power < max_tokens]
    ladders = {
        **{f"bounded, waste {waste:g}": Ladder.bounded(max_tokens, waste) for waste in bounds},
        "doubling": Ladder([*doubling, max_tokens]),
        "every 256": Ladder([*range(256, max_tokens, 256), max_tokens]),
    }
    return [ladder_waste(name, ladder, counts) for name, ladder in ladders.items()]
