"""The fast fill: pack a step into the kernel's parameter struct, and launch it alone or in a graph."""

from __future__ import annotations

import operator
import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import torch

from graphglue.core.binding import Write
from graphglue.core.likeness import Likeness
from graphglue.core.slots import Slot, widens
from graphglue.device import kernel
from graphglue.device.base import Loaded, Take
from graphglue.device.packing import FillParams, SlotLayout, converts
from graphglue.device.streams import InFlight, StepOrder

HEAVY_BYTES = 2**18  # sources of a step that are worth letting go of soon


_data_ptr = torch.Tensor.data_ptr


def _array_of(source: Any) -> np.ndarray | None:
    try:
        if isinstance(source, torch.Tensor):
            return source.numpy() if source.is_cpu else None
        return np.asarray(source)
    except (ValueError, TypeError, RuntimeError, OverflowError):  # bfloat16, sparse, uneven rows: bind knows
        return None


# Kinds of host sources that are taken in without binding, and what makes an array of one.
_ARRAY_OF: dict[type, Callable[[Any], np.ndarray | None] | None] = {
    np.ndarray: None, torch.Tensor: _array_of, list: _array_of, tuple: _array_of,
}  # fmt: skip


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
        self._made: list[weakref.ref[Any]] = []  # sources that a launch of their own converted

    def load(self, writes: Sequence[Write]) -> None:
        """Take in a step. Host sources are copied into the parameters, or into pinned memory."""
        self._blocks, given = [], writes
        writes = [_converted(write) for write in given]
        self._made = [weakref.ref(one.source) for one, other in zip(writes, given) if one is not other]
        self._fill.pack(writes, self._stage)
        self.params = next(params for size, params in self._structs if self._fill.inline_end <= size)
        self._sources = [write.source for write in writes if isinstance(write.source, torch.Tensor)]
        if sum(source.nbytes for source in self._sources) > HEAVY_BYTES:
            self._in_flight.expect_heavy()

    def remember(self, writes: Sequence[Write], sources: Mapping[str, Any]) -> Take | None:
        """Give what takes in a step whose sources are tensors on the device, host tensors or arrays like these."""
        on_device, on_host = [], []
        for position, write in enumerate(writes):
            name, source = write.slot.name, sources.get(write.slot.name)
            if source is None:
                if name in sources or isinstance(write.source, torch.Tensor):
                    return None  # given as None, or made on the host at every step
            elif isinstance(source, torch.Tensor) and source.is_cuda:
                if write.source is not source or not converts(source.dtype, write.slot.dtype):
                    return None  # the slot's own view, or converted by a launch of its own
                on_device.append((position, name, source))
            elif (known := self._host_source(position, write, source)) is not None:
                on_host.append(known)
            else:
                return None
        return self._taker(on_device, on_host, len(sources))

    def _taker(self, on_device: list[tuple[int, str, torch.Tensor]], on_host: list[Any], num_sources: int) -> Take:
        """Build what compares, reads the addresses and packs: one closure, because each call in it would count."""
        fill, params, sizes = self._fill, self.params, [tensor.nbytes for _, _, tensor in on_device]
        holds = Likeness([tensor for _, _, tensor in on_device]).holds
        pick = _picker([name for _, name, _ in on_device])
        write, arrange, constants, shapes = fill.like_last([position for position, _, _ in on_device])
        low, high = self._low - max(sizes, default=0), self._high

        def take(sources: Mapping[str, Any]) -> bool:
            """Take a step's sources in; False if they must be bound. Sync: none."""
            try:
                tensors = pick(sources)
                if len(sources) != num_sources or (tensors and not holds(*tensors)):
                    return False
                addresses = [*map(_data_ptr, tensors)]
                if addresses and max(addresses) > low and min(addresses) < high and self._in_a_slot(addresses, sizes):
                    return False  # bind says whether that is right
                for name, kind, array_of, shape, strides, dtype, place in on_host:
                    source = sources[name]
                    if type(source) is not kind:
                        return False
                    array = source if array_of is None else array_of(source)
                    if array is None or array.shape != shape or array.strides != strides or array.dtype != dtype:
                        return False
                    place[...] = array
            except (KeyError, TypeError):  # other slots than before, or no mapping at all
                return False
            write(*arrange((*addresses, *constants)))
            if fill.shapes is not shapes:
                fill.pack_shapes(shapes)
            self.params, self._sources = params, tensors
            return True

        return take

    def run(self) -> None:
        """Launch the kernel alone, on the caller's current stream. Sync: none."""
        kernel.launch(self.params, self.order.current)
        self.launched()

    def loaded(self) -> Loaded | None:
        """Say what was loaded; what was copied into pinned memory by content, because the next copy lies elsewhere."""
        on_device = tuple(source for source in self._sources if not source.is_cpu)
        made = [reference() for reference in self._made]
        if any(source.is_inference() or any(source is one for one in made) for source in on_device):
            return None
        values = self._fill.loaded({block.data_ptr(): block.numpy() for block in self._blocks})
        return None if values is None else Loaded(values, tuple(s._version for s in on_device), on_device)

    def unload(self) -> None:
        """Let go of what was loaded; the device never read it."""
        self._blocks = self._sources = ()

    def launched(self) -> None:
        """Hold sources and pinned blocks until the device has read them."""
        opened = self._in_flight.opened  # as InFlight.hold does, without a call of it at every step
        opened.append((self._blocks, self._sources))
        self._blocks = self._sources = ()
        if len(opened) >= self._in_flight.max_steps:
            self._in_flight.seal(self.order.current)

    def _in_a_slot(self, addresses: Sequence[int], sizes: Sequence[int]) -> bool:
        return any(
            address < end and start < address + size
            for address, size in zip(addresses, sizes)
            for start, end in self._owned
        )

    def _host_source(self, position: int, write: Write, source: Any) -> tuple[Any, ...] | None:
        """Know a host source that numpy can copy into the parameters as it is: what to compare, and where it goes."""
        kind = type(source)
        if not isinstance(write.source, torch.Tensor) or not widens(write.source.dtype, write.slot.dtype):
            return None
        place = self._fill.host_place(position, write.source.numel())
        if place is None or kind not in _ARRAY_OF:
            return None
        array_of = _ARRAY_OF[kind]
        array = source if array_of is None else array_of(source)
        if array is None or (kind in (list, tuple) and array.dtype != place.dtype):
            return None  # numbers of a list need a range check where the slot is narrower
        try:
            place = place.reshape(array.shape)
        except ValueError:
            return None
        return write.slot.name, kind, array_of, array.shape, array.strides, array.dtype, place

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
