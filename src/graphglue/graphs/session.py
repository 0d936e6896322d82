"""Sessions: one at a time in a thread, with garbage collection held back."""

from __future__ import annotations

import gc
import threading
from collections.abc import Hashable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

from graphglue.errors import CaptureError


class _Here(threading.local):
    """What is under way in this thread."""

    recording = False

    def __init__(self) -> None:
        self.pools: list[Hashable] = []  # of segmented replays


_here = _Here()
_count_lock = threading.Lock()


@contextmanager
def alone(what: str) -> Iterator[None]:
    """Refuse a second ``session`` or ``recording`` inside the first, in one thread."""
    for name in {"recording", what}:
        if getattr(_here, name, False):
            raise CaptureError(f"a {name} is already under way in this thread; end it before this {what}")
    setattr(_here, what, True)
    try:
        yield
    finally:
        setattr(_here, what, False)


num_replaying = 0  # segmented replays under way in any thread; a look at it costs next to nothing


def check_pools(recorders: Iterable[Any]) -> None:
    """Refuse a step inside a break of a segmented replay that uses the memory of one of its recorders."""
    for recorder in recorders:
        check_pool(getattr(recorder, "pool", None))  # an engine's own recorder may not name its pool


def check_pool(pool: Hashable) -> None:
    """Refuse a replay inside a break of a segmented one that uses the same memory.

    Raises:
        CaptureError: it would overwrite what later segments read.
    """
    if pool is not None and pool in _here.pools:
        raise CaptureError(
            "a break replays another recording of the same recorder, whose memory the outer one still reads; record "
            "the inner one with a recorder, or a pool, of its own"
        )


def check_replayable() -> None:
    """Refuse a replay inside a recording.

    Raises:
        CaptureError: this thread is inside a recording.
    """
    if recording():
        raise CaptureError("a replay inside a recording is not recorded; replay after it has ended")


class replaying:
    """Refuse a second segmented replay inside the first where both use one memory pool.

    A break that replays another recording of the pool would overwrite what later segments read.
    """

    def __init__(self, pool: Hashable) -> None:
        self._pool = pool

    def __enter__(self) -> None:
        global num_replaying
        check_pool(self._pool)
        _here.pools.append(self._pool)
        with _count_lock:
            num_replaying += 1

    def __exit__(self, *_: object) -> None:
        global num_replaying
        _here.pools.pop()
        with _count_lock:
            num_replaying -= 1


def recording() -> bool:
    """Tell whether this thread is inside a recording."""
    return _here.recording


_gc_lock = threading.Lock()
_gc_holders = 0
_gc_was_enabled = False


@contextmanager
def held_collection() -> Iterator[None]:
    """Hold garbage collection back; the last holder of all threads restores it.

    A collection inside a capture may destroy an older graph, which the device does not allow then: the
    capture is invalidated. It may also free memory, or run foreign finalisers.
    """
    global _gc_holders, _gc_was_enabled
    with _gc_lock:
        if not _gc_holders:
            _gc_was_enabled = gc.isenabled()
            gc.disable()
        _gc_holders += 1
    try:
        yield
    finally:
        with _gc_lock:
            _gc_holders -= 1
            if not _gc_holders and _gc_was_enabled:
                gc.enable()
