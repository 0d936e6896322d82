"""Lockstep: ranks that record a forward in segments, which runs its collectives for real.

A plain recording runs nothing. One in segments runs each segment as soon as it has ended, because its break needs
the values, so a rank that gives up would leave the others waiting in the collectives of the next segment. The ranks
therefore vote: whether all are ready for a key, before each segment runs, and once more behind the key. A rank that
fails votes for the last time, wherever it stands, and the others stop at that vote:

    rank 0   ready   segment 0 runs   "and segment 1?"   another rank gave up: stop
    rank 1   ready   segment 0 runs   segment 1 can not be recorded: "no"
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Protocol

from graphglue.cache import GlueGraphCache
from graphglue.core.keys import Key
from graphglue.core.routing import State
from graphglue.errors import CaptureError


class Votes(Protocol):
    """What lockstep needs of a rank group."""

    def every(self, flag: bool) -> bool:
        """Tell whether a flag holds on every rank."""

    def compare(self, declaration: Mapping[str, str]) -> None:
        """Compare what must be equal on all ranks."""


class Lockstep:
    """Record forwards with eager breaks on all ranks, or on none.

    Args:
        forward: the recorded forwards; None for an engine that owns its forward.
        met: called behind each vote: the engine's own barrier.
    """

    def __init__(self, forward: GlueGraphCache | None, met: Callable[[], None] | None) -> None:
        self._forward, self._met = forward, met
        self.votes: Votes | None = None  # of a runner with ranks
        self._segmented: set[Key] = set()
        self._is_together = False  # a key is recorded in segments, and no rank has given up

    def agree(self, keys: Iterable[Key]) -> None:
        """Leave out, on all ranks, what some rank can not record in segments. Call it once all keys are warm.

        Raises:
            RankDisagreementError: ranks reach other eager breaks; on every rank.

        Sync: the host waits for all ranks.
        """
        if self.votes is None or self._forward is None:
            return
        reached = {}
        for key in keys:
            entry = self._forward.entry(key)
            is_warm = entry.state is State.WARM
            if self.votes.every(is_warm):
                reached[key] = list(entry.breaks)
            elif is_warm and entry.breaks:
                self._forward.quarantine(key, "another rank could not run it, and recording it waits for all ranks")
        # A variant's repr may hold an address, so the place in the order tells variants apart.
        self.votes.compare(
            {
                f"forward {place} ({key.mode.value} {key.requests}x{key.tokens}) reaching the eager breaks": str(names)
                for place, (key, names) in enumerate(reached.items())
            }
        )
        self._segmented = {key for key, names in reached.items() if names}

    @contextmanager
    def recording(self, key: Key) -> Iterator[None]:
        """Enclose all that may fail while a key is recorded. Sync: the host waits for all ranks."""
        self._is_together = key in self._segmented
        yield
        if self._is_together and self.votes is not None and self._forward is not None:
            self._is_together = False
            self.votes.every(self._forward.state(key) is State.CAPTURED)

    def barrier(self) -> None:
        """Meet the other ranks before a segment runs. Sync: the host waits for all ranks.

        Raises:
            CaptureError: another rank gave up.
        """
        if self._is_together and self.votes is not None and not self.votes.every(True):
            self._is_together = False
            raise CaptureError("another rank could not record it; that rank's log says why")
        if self._met is not None:
            self._met()
