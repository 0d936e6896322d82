"""The fast fill: pack a step into the kernel's parameter struct, and launch it alone or in a graph."""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import torch

from graphglue.core.binding import Write
from graphglue.core.likeness import Likeness
from graphglue.core.slots import Slot, widens
from graphglue.device import kernel
from graphglue.device.packing import FillParams, SlotLayout, converts
from graphglue.device.streams import InFlight, StepOrder

HEAVY_BYTES = 2**18  # sources of a step that are worth letting go of soon


class HostSource:
    """Know one host source that was bound: what to compare, and where in the parameters it goes.

    Raises:
        ValueError: numpy can not copy such a source there as it is.
    """

    __slots__ = ("dtype", "kind", "name", "place", "shape", "strides")

    def __init__(self, name: str, source: Any, place: np.ndarray) -> None:
        self.name, self.kind = name, type(source)
        array = self._array(source)
        if array is None or (self.kind in (list, tuple) and array.dtype != place.dtype):
            raise ValueError  # numbers of a list need a range check where the slot is narrower
        self.dtype, self.shape, self.strides = array.dtype, array.shape, array.strides
        self.place = place.reshape(array.shape)

    def take(self, sources: Mapping[str, Any]) -> bool:
        """Copy the source into the parameters, if it is like the one that was bound."""
        source = sources.get(self.name)
        array = self._array(source) if type(source) is self.kind else None
        if array is None or array.shape != self.shape or array.strides != self.strides or array.dtype != self.dtype:
            return False
        self.place[...] = array
        return True

    def _array(self, source: Any) -> np.ndarray | None:
        if self.kind is np.ndarray:
            return source
        try:
            if self.kind is torch.Tensor:
                return source.numpy() if source.is_cpu else None
            return np.asarray(source) if self.kind in (list, tuple) else None
        except (ValueError, TypeError, RuntimeError, OverflowError):  # bfloat16, sparse, uneven rows: bind knows
            return None


class Known:
    """How a step was bound: what to compare of its sources, and all of its packing but their addresses."""

    __slots__ = ("holds", "host", "num_sources", "packed", "params", "pick", "places", "shapes")

    def __init__(self, num_sources: int, packed: list[int], shapes: bytes, params: Any) -> None:
        self.num_sources, self.packed, self.shapes, self.params = num_sources, packed, shapes, params
        self.host: list[HostSource] = []
        self.places: list[tuple[int, int]] = []  # position among the slots, size in bytes
        self.holds = Likeness([]).holds
        self.pick = _picker([])

    def expect(self, names: Sequence[str], tensors: Sequence[torch.Tensor], positions: list[int]) -> None:
        """Expect these device sources."""
        self.holds, self.pick = Likeness(tensors).holds, _picker(names)
        self.places = [(position, tensor.nbytes) for position, tensor in zip(positions, tensors)]


class KernelFill:
    """Fill one bucket's slots with one kernel, whose parameters carry the step.

    Args:
        slots: the slots by name.
        targets: each slot at the bucket's extent.
        device: where they are.
        order: knows the stream of the current step.
        in_flight: holds sources until they were read.
        owned: address ranges of all slots' memory.

    Raises:
        KernelUnavailable: NVRTC is missing, or a slot lies in a way the kernel can not address.
    """

    def __init__(
        self,
        slots: Mapping[str, Slot],
        targets: Mapping[str, torch.Tensor],
        device: torch.device,
        order: StepOrder,
        in_flight: InFlight,
        owned: Sequence[tuple[int, int]],
    ) -> None:
        try:
            layouts = [SlotLayout(slot, targets[name]) for name, slot in slots.items()]
        except ValueError as error:
            raise kernel.KernelUnavailable(str(error)) from None
        self._in_flight, self._owned, self.order = in_flight, owned, order
        self._low, self._high = min(start for start, _ in owned), max(end for _, end in owned)
        head_bytes = 64 * len(layouts)
        limit = kernel.largest_struct_bytes() - head_bytes
        if limit < 16 or not layouts:
            raise kernel.KernelUnavailable(f"{len(layouts)} slots do not fit the kernel's parameters")
        self._fill = FillParams(layouts, limit // 16 * 16)
        small, large = max(16, (kernel.SMALL_BYTES - head_bytes) // 16 * 16), self._fill.payload_bytes
        # Each launch copies the struct, so a step is given the smallest one that holds its host sources.
        sizes = sorted({min(size, large) for size in (16, small, large)})
        self._structs = [(size, self._node_params(device, size)) for size in sizes]
        self.params = self._structs[-1][1]
        self._blocks: Any = ()
        self._sources: Any = ()

    def load(self, writes: Sequence[Write]) -> None:
        """Take in a step. Host sources are copied into the parameters, or into pinned memory."""
        self._blocks = []
        writes = [_converted(write) for write in writes]
        self._fill.pack(writes, self._stage)
        self.params = next(params for size, params in self._structs if self._fill.inline_end <= size)
        self._sources = [write.source for write in writes if isinstance(write.source, torch.Tensor)]
        if sum(source.nbytes for source in self._sources) > HEAVY_BYTES:
            self._in_flight.expect_heavy()

    def remember(self, writes: Sequence[Write], sources: Mapping[str, Any]) -> Known | None:
        """Remember a step whose sources are tensors on the device, host tensors or arrays."""
        fill = self._fill
        known = Known(len(sources), fill.last_sources, fill.last_shapes, self.params)
        names, tensors, positions = [], [], []
        for position, write in enumerate(writes):
            source = sources.get(write.slot.name)
            if source is None:
                if write.slot.name in sources or isinstance(write.source, torch.Tensor):
                    return None  # given as None, or made on the host at every step
            elif isinstance(source, torch.Tensor) and source.is_cuda:
                if write.source is not source or not converts(source.dtype, write.slot.dtype):
                    return None  # the slot's own view, or converted by a launch of its own
                names.append(write.slot.name)
                tensors.append(source)
                positions.append(position)
            else:
                host = self._host_source(position, write, source)
                if host is None:
                    return None
                known.host.append(host)
        known.expect(names, tensors, positions)
        return known

    def load_known(self, known: Known, sources: Mapping[str, Any]) -> bool:
        """Take in a step like a remembered one: compare, read the addresses, pack."""
        try:
            tensors = known.pick(sources)
            if len(sources) != known.num_sources:
                return False
        except (KeyError, TypeError):  # other slots than before, or no mapping at all
            return False
        packed = known.packed
        if tensors:
            if not known.holds(*tensors):
                return False
            low, high = self._low, self._high
            for (position, size), tensor in zip(known.places, tensors):
                address = tensor.data_ptr()
                if address < high and low < address + size and self._in_a_slot(address, size):
                    return False  # bind says whether that is right
                packed[position] = address
        for host in known.host:
            if not host.take(sources):
                return False
        self._fill.pack_packed(packed, known.shapes)
        self.params, self._sources = known.params, tensors
        return True

    def run(self) -> None:
        """Launch the kernel alone, on the caller's current stream. Sync: none."""
        kernel.launch(self.params, self.order.current)
        self.launched()

    def launched(self) -> None:
        """Hold sources and pinned blocks until the device has read them."""
        self._in_flight.hold((self._blocks, self._sources), self.order.current)
        self._blocks, self._sources = (), ()

    def _in_a_slot(self, address: int, size: int) -> bool:
        return any(address < end and start < address + size for start, end in self._owned)

    def _host_source(self, position: int, write: Write, source: Any) -> HostSource | None:
        """Know a host source that numpy can copy into the parameters as it is."""
        if not isinstance(write.source, torch.Tensor) or not widens(write.source.dtype, write.slot.dtype):
            return None
        place = self._fill.host_place(position, write.source.numel())
        try:
            return None if place is None else HostSource(write.slot.name, source, place)
        except ValueError:
            return None

    def _stage(self, source: torch.Tensor, dtype: torch.dtype) -> int:
        """Copy a host source that is too large for the parameters into pinned memory; give its address."""
        block = self._in_flight.block(source.numel() * dtype.itemsize)
        pinned = block[: source.numel() * dtype.itemsize].view(dtype)
        pinned.copy_(source.reshape(-1))
        self._blocks.append(block)
        return pinned.data_ptr()

    def _node_params(self, device: torch.device, payload_bytes: int) -> Any:
        num_slots = len(self._fill.layouts)
        function = kernel.load_fill(device.index, num_slots, payload_bytes, kernel.source_hash())
        return kernel.node_params(function, max(1, self._fill.num_blocks), num_slots, self._fill.kernel_params)


def _converted(write: Write) -> Write:
    """Convert on the device what the kernel can not read (a float8 source of a wider slot)."""
    source = write.source
    if isinstance(source, torch.Tensor) and source.is_cuda and not converts(source.dtype, write.slot.dtype):
        return Write(write.slot, source.to(write.slot.dtype), write.raw, write.rows, write.pad)
    return write


def _picker(names: Sequence[str]) -> Callable[[Mapping[str, Any]], tuple[Any, ...]]:
    """Build what takes the named sources out of a batch, in order."""
    if len(names) > 1:
        return operator.itemgetter(*names)
    return (lambda sources: (sources[names[0]],)) if names else (lambda sources: ())
