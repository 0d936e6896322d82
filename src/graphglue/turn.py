"""Turns: one thread at a time, without waiting."""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable

from graphglue.errors import GraphGlueError


class Turn:
    """Let one thread in at a time, and refuse a second one instead of making it wait."""

    __slots__ = ("end", "take")

    def __init__(self) -> None:
        lock = threading.Lock()
        # Called straight at every step, without a method of our own between.
        self.take: Callable[[], bool] = functools.partial(lock.acquire, False)
        self.end: Callable[[], None] = lock.release

    def __enter__(self) -> None:
        if not self.take():
            raise in_use()

    def __exit__(self, *_: object) -> None:
        self.end()


def in_use() -> GraphGlueError:
    """Say that somebody else's turn has not ended."""
    return GraphGlueError(
        "the runner is in use, by another thread or by its own prep or forward; two steps can not share one "
        "set of slots: give each thread its own Runner"
    )
