"""Tables: persistent tensors that preps read, and the check that they did not move."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Mapping
from types import MappingProxyType
from typing import Any, NamedTuple

import torch

from graphglue.core.likeness import Likeness
from graphglue.core.slots import MAPPING_NAMES, Slot
from graphglue.errors import ConfigError, ContractError, StaleTableError

TableSource = torch.Tensor | Callable[[], torch.Tensor]

_data_ptr = torch.Tensor.data_ptr


class Place(NamedTuple):
    """Where a tensor lies, as captured graphs remember it."""

    address: int
    shape: torch.Size
    stride: tuple[int, ...]
    dtype: torch.dtype

    @classmethod
    def of(cls, tensor: torch.Tensor) -> Place:
        """Read a tensor's place."""
        return cls(tensor.data_ptr(), tensor.shape, tensor.stride(), tensor.dtype)

    def __str__(self) -> str:
        dtype = str(self.dtype).removeprefix("torch.")
        return f"{hex(self.address)} {dtype}{list(self.shape)} strides {list(self.stride)}"


class Tables:
    """Hold a runner's tables: tensors, or callables that return the engine's current one.

    Args:
        sources: name -> tensor, or a callable without arguments for an engine that replaces it.
        device: where they must be.

    Raises:
        ConfigError: something that is no tensor, a tensor elsewhere, or a reserved name.
    """

    def __init__(self, sources: Mapping[str, TableSource], device: torch.device) -> None:
        self._device = device
        self._sources: dict[str, TableSource] = {}
        self._left: dict[str, weakref.ref[torch.Tensor]] = {}
        self._places: dict[str, Place] = {}
        self.tensors: dict[str, torch.Tensor] = {}
        self._callables: list[str] = []
        self._current: list[torch.Tensor] = []
        self._addresses: list[int] = []
        self._likeness = Likeness([])
        for name, source in sources.items():
            if name in MAPPING_NAMES:
                raise ConfigError(f"table name {name!r} is reserved on every view's tables; rename the table")
            self.bind(name, source)

    @property
    def names(self) -> tuple[str, ...]:
        """The tables, those whose tensors were let go of too."""
        return (*self._sources, *(name for name in self._left if name not in self._sources))

    @property
    def places(self) -> dict[str, Place]:
        """Where each table lies since it was taken in last."""
        return dict(self._places)

    def resolve(self, name: str, source: TableSource) -> torch.Tensor:
        """Give the tensor behind a source, checked; nothing is taken in."""
        tensor = _called(name, source)
        if tensor.device != self._device:
            raise ConfigError(f"table {name!r} is on {tensor.device}, expected {self._device}; move it first")
        return tensor

    def bind(self, name: str, source: TableSource) -> None:
        """Take a table in, or replace it."""
        tensor = self.resolve(name, source)
        self._left.pop(name, None)
        self._sources[name], self.tensors[name], self._places[name] = source, tensor, Place.of(tensor)
        self._callables = [key for key, given in self._sources.items() if not isinstance(given, torch.Tensor)]
        self._current = list(self.tensors.values())
        self._likeness = Likeness(self._current)
        self._addresses = [self._places[key].address for key in self.tensors]

    def let_go(self) -> None:
        """Hold no tensor any more, so that whoever made them may free them; ``current`` finds them again."""
        for name, source in list(self._sources.items()):
            if isinstance(source, torch.Tensor):
                self._left[name] = weakref.ref(source)
                del self._sources[name]
        self.tensors.clear()
        self._current, self._addresses, self._likeness = [], [], Likeness([])

    def current(self) -> dict[str, TableSource]:
        """Look every table up where it is now, for ``bind``; nothing is taken in. Sync: none.

        Raises:
            StaleTableError: one was freed, or has no memory.
        """
        kept = {name: tensor for name, left in self._left.items() if (tensor := left()) is not None}
        if freed := sorted(set(self._left) - set(kept)):
            raise StaleTableError(f"tables {freed} were freed; hand in the new ones with rebind_table(name, tensor)")
        found: dict[str, TableSource] = {**self._sources, **kept}
        for name, source in found.items():
            tensor = self.resolve(name, source)
            if tensor.numel() and not tensor.data_ptr():
                raise StaleTableError(f"table {name!r} has no memory; make it anew first, or rebind_table it")
        return found

    def check(self) -> None:
        """Compare every table with what was captured: address, shape, stride, dtype. Sync: none.

        Raises:
            StaleTableError: one of them moved.
        """
        current = self._current
        if not self._callables and self._likeness.holds(*current) and [*map(_data_ptr, current)] == self._addresses:
            return
        for name, source in self._sources.items():
            tensor = _called(name, source)
            if (place := Place.of(tensor)) != self._places[name]:
                raise StaleTableError(
                    f"table {name!r} moved: graphs read {self._places[name]} since it was taken in, it is {place} now; "
                    f"call rebind_table({name!r}, tensor) and maintain(), or put the old one back"
                )


def _called(name: str, source: Any) -> torch.Tensor:
    tensor = source() if callable(source) else source
    if not isinstance(tensor, torch.Tensor):
        seen = type(tensor).__name__
        raise ConfigError(f"table {name!r} is a {seen}; expected a tensor, or a callable returning one")
    return tensor


def check_indices(
    slots: Iterable[Slot], tables: Mapping[str, torch.Tensor], max_rows: Mapping[str, int] = MappingProxyType({})
) -> None:
    """Check that what pads an index slot is a row of the table it indexes.

    Args:
        slots: all slots.
        tables: name -> tensor.
        max_rows: slot -> its rows in the largest bucket, for capture values that differ by row.

    Raises:
        ContractError: an unknown table, or a pad, idle or capture value beyond its rows.
    """
    for slot in slots:
        if slot.index_of is None:
            continue
        if slot.index_of not in tables:
            raise ContractError(
                f"slot {slot.name!r} indexes table {slot.index_of!r}, which was not handed in; "
                f"tables are {sorted(tables)}"
            )
        rows = tables[slot.index_of].shape[0] if tables[slot.index_of].dim() else 0
        named = [(what, getattr(slot, what)) for what in ("pad", "idle", "capture")]
        if callable(slot.capture):
            named += [(f"capture({row})", slot.capture(row)) for row in range(max_rows.get(slot.name, 0))]
        for what, value in named:
            if isinstance(value, (bool, int, float)) and not 0 <= value < rows:
                raise ContractError(
                    f"slot {slot.name!r}: {what} {value} is no row of table {slot.index_of!r}, which has {rows}; "
                    "padded rows would read or write elsewhere: choose a reserved row"
                )
