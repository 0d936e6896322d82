"""Memory pools of the tape: a replay spoils what a CUDA replay from the same pool may overwrite.

Graphs of one pool lie on top of each other: what a capture has freed at its end, later captures use again. So a replay
keeps what recordings made before it gave, and may overwrite what later ones gave. On a GPU that hangs on sizes; here
each recording has memory of its own, and a replay always spoils the outputs of those behind it.
"""

from __future__ import annotations

import weakref
from collections.abc import Hashable, Iterable

import torch

from graphglue.graphs import memory


class TapePool:
    """The recordings of one pool, oldest first, as long as somebody keeps them."""

    def __init__(self) -> None:
        self._tenants: list[weakref.ref[Tenant]] = []

    def enter(self) -> Tenant:
        """Make the tenant of a recording that begins."""
        tenant = Tenant(self)
        self._tenants = [known for known in self._tenants if known() is not None] + [weakref.ref(tenant)]
        return tenant

    def spoil_behind(self, tenant: Tenant) -> None:
        """Spoil the outputs of the recordings that were made after a tenant's. Sync: none."""
        for known in reversed(self._tenants):
            later = known()
            if later is tenant:
                return
            if later is not None:
                later.spoil()


_given: weakref.WeakValueDictionary[Hashable, TapePool] = weakref.WeakValueDictionary()


def pool_of(handle: Hashable) -> TapePool:
    """Give the pool of an engine's handle; one that nobody else has for None."""
    if handle is None:
        return TapePool()
    return _given.setdefault(handle, TapePool())


class Tenant:
    """What one recorded callable gives out of its pool; its segments are one tenant."""

    def __init__(self, pool: TapePool) -> None:
        self._pool = pool
        self._outputs: dict[int, tuple[torch.Tensor, int]] = {}  # by storage: its bytes, and what spoils them

    def gives(self, outputs: Iterable[torch.Tensor]) -> None:
        """Note outputs that lie in the pool."""
        with memory.plain():
            for output in outputs:
                storage = output.untyped_storage()
                whole = torch.empty(0, dtype=torch.uint8).set_(storage, 0, (storage.nbytes(),), (1,))
                self._outputs[storage._cdata] = (whole, poison(output.dtype))

    def spoil(self) -> None:
        """Make the outputs read as memory that was not computed yet."""
        with memory.plain():
            for whole, byte in self._outputs.values():
                whole.fill_(byte)

    def replays(self) -> None:
        """Spoil what a replay of this recording may overwrite. Sync: none."""
        self._pool.spoil_behind(self)


def poison(dtype: torch.dtype) -> int:
    """Give the byte that makes values of a dtype stand out where nothing was computed."""
    # All ones is NaN in every float format; 0x7f in each byte is large in every integer format.
    return 0xFF if dtype.is_floating_point or dtype.is_complex else 1 if dtype is torch.bool else 0x7F
