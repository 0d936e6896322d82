"""Turns: one thread at a time, without waiting."""

from __future__ import annotations

import threading

from graphglue.errors import GraphGlueError


class Turn:
    """Let one thread in at a time, and refuse a second one instead of making it wait."""

    __slots__ = ("_lock", "end")

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self.end = self._lock.release

    def take(self) -> None:
        """Begin a turn.

        Raises:
            GraphGlueError: somebody else's turn has not ended.
        """
        if not self._lock.acquire(False):
            raise GraphGlueError(
                "the runner is in use, by another thread or by its own prep or forward; two steps can not share one "
                "set of slots: give each thread its own Runner"
            )

    def __enter__(self) -> None:
        self.take()

    def __exit__(self, *_: object) -> None:
        self.end()
