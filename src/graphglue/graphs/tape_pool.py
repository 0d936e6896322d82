"""Memory pools of the tape: a replay spoils what a CUDA replay from the same pool may overwrite.

Graphs of one pool lie on top of each other: what a capture has freed at its end, later captures use again. So a replay
keeps what recordings made before it gave, and may overwrite what later ones gave, as long as anybody holds that. On a
GPU that hangs on sizes; here each recording has memory of its own, and a replay always spoils what lies behind it.
"""

from __future__ import annotations

import bisect
import ctypes
import itertools
import threading
import weakref
from collections.abc import Hashable
from dataclasses import dataclass
from typing import Any

import torch
from torch.multiprocessing.reductions import StorageWeakRef

from graphglue.errors import ConfigError

_FEW = 64  # blocks that are kept without a look at who still holds them


@dataclass(frozen=True, slots=True)
class Part:
    """A segment of a recorded callable, or all of it; its place among the recordings of a pool.

    Args:
        pool: the pool.
        place: counts what was recorded into the pool.
        owner: tells the callable; its segments keep each other's memory.
    """

    pool: TapePool
    place: int
    owner: object

    def gives(self, output: torch.Tensor) -> None:
        """Note an output whose memory was made while this part was recorded."""
        self.pool.hold(_Block(self.place, self.owner, StorageWeakRef(output.untyped_storage()), poison(output.dtype)))

    def replays(self) -> None:
        """Spoil what a replay of this part may overwrite. Sync: none."""
        self.pool.spoil_behind(self)


@dataclass(frozen=True, slots=True)
class _Block:
    """Memory that a part gave; it is there as long as somebody holds it, though the recording may be closed."""

    place: int
    owner: object
    storage: StorageWeakRef
    byte: int

    def spoil(self) -> None:
        """Make it read as memory that was not computed yet."""
        alive: Any = torch.UntypedStorage._new_with_weak_ptr(self.storage.cdata)
        if alive is not None:  # its size and address are of now: an engine may resize it
            ctypes.memset(alive.data_ptr(), self.byte, alive.nbytes())


class TapePool:
    """The memory that the recordings of one pool gave, in the order in which they were made."""

    def __init__(self) -> None:
        self._count, self._lock = itertools.count(), threading.Lock()
        self._blocks: list[_Block] = []
        self._few = _FEW
        self._last: tuple[object, int] = (None, -1)  # owner and place of what replayed last

    def enter(self, owner: object = None) -> Part:
        """Give the part that is recorded from now on, of a callable of its own by default."""
        return Part(self, next(self._count), owner or object())

    def hold(self, block: _Block) -> None:
        """Take a block in."""
        with self._lock:
            if len(self._blocks) >= self._few:
                self._blocks = [known for known in self._blocks if not known.storage.expired()]
                self._few = max(_FEW, 2 * len(self._blocks))
            bisect.insort(self._blocks, block, key=_place)

    def spoil_behind(self, part: Part) -> None:
        """Spoil what others than the part's owner gave after it. Sync: none."""
        (owner, place), self._last = self._last, (part.owner, part.place)
        if owner is part.owner and place < part.place:
            return  # a later segment of one replay: the one before has spoiled more
        with self._lock:
            behind = self._blocks[bisect.bisect_right(self._blocks, part.place, key=_place) :]
        for block in behind:
            if block.owner is not part.owner:
                block.spoil()


def _place(block: _Block) -> int:
    return block.place


_given: weakref.WeakValueDictionary[Hashable, TapePool] = weakref.WeakValueDictionary()
_lock = threading.Lock()


def pool_of(handle: Hashable) -> TapePool:
    """Give the pool of an engine's handle, the same for equal ones; one that nobody else has for None.

    Raises:
        ConfigError: it can not be hashed.
    """
    if handle is None:
        return TapePool()
    try:
        hash(handle)
    except TypeError as error:
        raise ConfigError(
            f"pool is a {type(handle).__name__}, which can not be hashed: on the CPU a memory pool is any hashable "
            "object, and equal ones are one pool; give object()"
        ) from error
    with _lock:
        return _given.setdefault(handle, TapePool())


def poison(dtype: torch.dtype) -> int:
    """Give the byte that makes values of a dtype stand out where nothing was computed."""
    if dtype in (torch.float8_e4m3fnuz, torch.float8_e5m2fnuz):
        return 0x80  # their only NaN
    # All ones is NaN in every other float format that has one; 0x7f in each byte is large in every integer format.
    return 0xFF if dtype.is_floating_point or dtype.is_complex else 1 if dtype is torch.bool else 0x7F
