"""Turns: one thread at a time, without waiting; and nobody's while its owner sleeps."""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from graphglue.errors import ClosedError, GraphGlueError


class Turn:
    """Let one thread in at a time, and refuse a second one instead of making it wait.

    Who sleeps keeps the turn, so that every call that needs it is refused without a check of its own.

    Attributes:
        asleep: nobody is let in but by ``even_asleep``.
    """

    __slots__ = ("_bed", "asleep", "end", "take")

    def __init__(self) -> None:
        lock = threading.Lock()
        # Called straight at every step, without a method of our own between.
        self.take: Callable[[], bool] = functools.partial(lock.acquire, False)
        self.end: Callable[[], None] = lock.release
        self.asleep = False
        self._bed = threading.Lock()  # one thread at a time among those that are let in while asleep

    def __enter__(self) -> None:
        if not self.take():
            raise self.refusal()

    def __exit__(self, *_: object) -> None:
        self.end()

    @contextmanager
    def even_asleep(self) -> Iterator[None]:
        """Let one thread in, awake or asleep; whether the turn is kept when it leaves is what ``asleep`` says then.

        Raises:
            GraphGlueError: somebody else's turn has not ended.
        """
        if not self._bed.acquire(False):
            raise in_use()
        try:
            if not self.asleep and not self.take():
                raise in_use()
            try:
                yield
            finally:
                if not self.asleep:
                    self.end()
        finally:
            self._bed.release()

    def wake(self) -> None:
        """Give the turn back, if it was kept asleep."""
        if self.asleep:
            self.asleep = False
            self.end()

    def check_awake(self) -> None:
        """Refuse what looks at no slot, and so takes no turn.

        Raises:
            ClosedError: asleep.
        """
        if self.asleep:
            raise self.refusal()

    def refusal(self) -> GraphGlueError:
        """Say why nobody is let in."""
        if not self.asleep:
            return in_use()
        return ClosedError(
            "the runner is asleep since release(), and the memory that its graphs read may be gone: call resume() first"
        )


def in_use() -> GraphGlueError:
    """Say that somebody else's turn has not ended."""
    return GraphGlueError(
        "the runner is in use, by another thread or by its own prep or forward; two steps can not share one "
        "set of slots: give each thread its own Runner"
    )
