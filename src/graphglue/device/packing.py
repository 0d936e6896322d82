"""Packing: one step's sources and extents as the parameter struct of the fill kernel.

The layout is that of ``fill.cu``: for each slot a source, a shape that changes with the real
extents, and a fixed part; then a payload that carries host sources by value.
"""

from __future__ import annotations

import ctypes
import functools
import operator
import struct
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import torch

from graphglue.core.binding import Write
from graphglue.core.slots import REPEAT_LAST, Axis, PadValue, Slot
from graphglue.device.kernel import BLOCK_THREADS

MEMORY, INLINE, CONSTANT = range(3)
_SLOT_BYTES = 64  # source 8, shape 24, fixed 32
_SHAPE = "QIIBBBBI"
_FIXED = struct.Struct("<QIIIIII")
_BLOCK_BYTES = BLOCK_THREADS * 64  # four 16-byte words a thread
_MAX_ELEMENTS = 2**31 - 1

# The kernel's element types; dtypes it only copies go by their size.
_TYPES = {
    torch.uint8: 0, torch.int8: 1, torch.uint16: 2, torch.int16: 3, torch.uint32: 4, torch.int32: 5,
    torch.uint64: 6, torch.int64: 7, torch.float16: 8, torch.bfloat16: 9, torch.float32: 10, torch.float64: 11,
}  # fmt: skip
_NUMPY = {
    torch.bool: np.bool_, torch.uint8: np.uint8, torch.int8: np.int8, torch.uint16: np.uint16, torch.int16: np.int16,
    torch.uint32: np.uint32, torch.int32: np.int32, torch.uint64: np.uint64, torch.int64: np.int64,
    torch.float16: np.float16, torch.float32: np.float32, torch.float64: np.float64,
}  # fmt: skip
_BIT_TYPES = {1: torch.uint8, 2: torch.uint16, 4: torch.uint32, 8: torch.uint64}
_NUMPY_BITS = {1: np.uint8, 2: np.uint16, 4: np.uint32, 8: np.uint64}


def converts(source: torch.dtype, target: torch.dtype) -> bool:
    """Tell whether the kernel reads this source dtype into that slot dtype."""
    return source == target or (source in _TYPES and target in _TYPES)


def type_code(dtype: torch.dtype) -> int:
    """Give the kernel's code of an element type."""
    return _TYPES.get(dtype, _TYPES[_BIT_TYPES[dtype.itemsize]])


def bits_of(value: Any, dtype: torch.dtype) -> int:
    """Give the bits of a number in a dtype, as an unsigned integer."""
    return int(torch.tensor([value], dtype=dtype, device="cpu").view(_BIT_TYPES[dtype.itemsize]).numpy()[0])


class SlotLayout:
    """Know how one slot lies in memory: ``outer`` blocks of ``span`` elements, ``inner`` to a row.

    Raises:
        ValueError: the kernel can not address it; the text says why.
    """

    def __init__(self, slot: Slot, target: torch.Tensor) -> None:
        shape = tuple(target.shape)
        if slot.axis is Axis.FIXED:
            self.inner, self.outer = target.numel(), 1
            self.span = self.pitch = self.inner
            uniform = target.is_contiguous()
        else:
            self.inner = _product(shape[slot.row_dim + 1 :])
            self.span = shape[slot.row_dim] * self.inner
            self.outer, self.pitch, uniform = _blocks(target, slot.row_dim)
        if not uniform and target.numel():
            raise ValueError(f"slot {slot.name!r} has strides {target.stride()}, no regular blocks of rows")
        if self.outer * self.span > _MAX_ELEMENTS or self.pitch > _MAX_ELEMENTS:
            raise ValueError(f"slot {slot.name!r} has more than 2**31 - 1 elements")
        self.slot, self.store = slot, type_code(slot.dtype)
        self.address = target.data_ptr()
        self.num_bytes = self.outer * self.span * slot.dtype.itemsize
        self.num_blocks = max(1, -(-self.num_bytes // _BLOCK_BYTES)) if self.num_bytes else 0

    def head(self, raw_rows: int) -> int:
        """Give the elements of one outer block that real rows have."""
        return self.inner * min(raw_rows, 1) if self.slot.axis is Axis.FIXED else self.inner * raw_rows


class FillParams:
    """Hold one bucket's parameter struct, and pack steps into it.

    Args:
        layouts: the slots at this bucket's extent.
        payload_limit: bytes that host sources may take in the struct; larger ones are left to
            ``stage``, which copies into pinned memory and gives the address.
    """

    def __init__(self, layouts: Sequence[SlotLayout], payload_limit: int) -> None:
        self.layouts, count = list(layouts), len(layouts)
        self._regions, self.payload_bytes = _payload_regions(layouts, payload_limit)
        self.head_bytes = count * _SLOT_BYTES
        self.buffer = bytearray(self.head_bytes + self.payload_bytes)
        self._memory = (ctypes.c_char * len(self.buffer)).from_buffer(self.buffer)
        self._pointers = (ctypes.c_void_p * 1)(ctypes.addressof(self._memory))
        self.kernel_params = ctypes.addressof(self._pointers)
        self._sources = struct.Struct(f"<{count}Q")
        self._shapes = struct.Struct("<" + _SHAPE * count)
        self._shape_start, fixed_start = 8 * count, 32 * count
        self.num_blocks = max((layout.num_blocks for layout in layouts), default=0)  # of the largest slot
        for position, layout in enumerate(layouts):
            extents = (layout.span, layout.inner, layout.outer, layout.pitch, layout.store, layout.num_blocks)
            _FIXED.pack_into(self.buffer, fixed_start + 32 * position, layout.address, *extents)
        self._host = [self._host_view(layout, offset) for layout, offset in zip(layouts, self._regions)]
        self._pads = [bits_of(_number(slot.pad), slot.dtype) for slot in (layout.slot for layout in layouts)]
        self.inline_end = 0
        self.shapes = b""  # what the struct holds now
        self._write_sources = functools.partial(self._sources.pack_into, self.buffer, 0)
        self._last_sources: list[int] = []

    def pack(self, writes: Sequence[Write], stage: Any) -> None:
        """Pack a step. Host sources are copied here, so the caller may overwrite them afterwards."""
        self.inline_end = 0
        placed = [self._place(position, write, stage) for position, write in enumerate(writes)]
        self._last_sources = [source for source, _ in placed]
        self._write_sources(*self._last_sources)
        self.pack_shapes(self._shape_bytes(writes, [how for _, how in placed]))

    def pack_shapes(self, shapes: bytes) -> None:
        """Pack shapes that were packed before."""
        self.buffer[self._shape_start : self._shape_start + len(shapes)] = shapes
        self.shapes = shapes

    def loaded(self, pinned: Mapping[int, np.ndarray]) -> tuple[Any, ...] | None:
        """Say what was packed: host values by content, other sources by address; None where a slot is its own source.

        Args:
            pinned: by address, the bytes that ``stage`` copied to.
        """
        shapes = bytes(self.buffer[self._shape_start : self._shape_start + self._shapes.size])
        fields, values = self._shapes.unpack(shapes), list[Any]()
        for position, source in enumerate(self._sources.unpack_from(self.buffer, 0)):
            layout, head, kind = self.layouts[position], fields[8 * position + 1], fields[8 * position + 3]
            num_bytes = head * layout.outer * layout.slot.dtype.itemsize
            if kind == MEMORY and head and source == layout.address:
                return None
            if kind == INLINE:
                start = self.head_bytes + source
                values.append(bytes(self.buffer[start : start + num_bytes]))
            else:
                at = pinned.get(source) if kind == MEMORY else None
                values.append(source if at is None else at[:num_bytes].tobytes())
        return shapes, *values

    def like_last(self, positions: Sequence[int]) -> tuple[Callable[..., None], Any, list[int], bytes]:
        """Give what packs steps like the last one but for the addresses at some positions.

        Returns:
            ``write(*sources)``; ``arrange((*addresses, *constants))``, which gives the sources in order;
            the constants; and the shapes, for ``pack_shapes``.
        """
        others = [position for position in range(len(self.layouts)) if position not in positions]
        given = {position: index for index, position in enumerate([*positions, *others])}
        indices = [given[position] for position in range(len(self.layouts))]
        in_order = indices == sorted(indices)
        arrange = tuple if in_order else operator.itemgetter(*indices)
        return self._write_sources, arrange, [self._last_sources[position] for position in others], self.shapes

    def _shape_bytes(self, writes: Sequence[Write], how: Sequence[tuple[int, int, int | None]]) -> bytes:
        flat: list[int] = []
        for position, (write, (kind, load, pitch)) in enumerate(zip(writes, how)):
            layout = self.layouts[position]
            head, repeats = layout.head(write.raw), write.pad is REPEAT_LAST
            pad = self._pad_bits(position, write.pad)
            flat += (pad, head, head if pitch is None else pitch, kind, load, int(repeats), 0, 0)
        return self._shapes.pack(*flat)

    def host_place(self, position: int, num_elements: int) -> np.ndarray | None:
        """Give the payload's elements of one slot, where numpy has its dtype and there is room."""
        region = self._host[position]
        if region is None or self.layouts[position].slot.dtype not in _NUMPY:
            return None
        return region[:num_elements]

    def _place(self, position: int, write: Write, stage: Any) -> tuple[int, tuple[int, int, int | None]]:
        layout, source = self.layouts[position], write.source
        if source is None:  # the slot's own rows: read where they are
            return layout.address, (MEMORY, layout.store, layout.pitch)
        if not isinstance(source, torch.Tensor):
            return bits_of(source, layout.slot.dtype), (CONSTANT, layout.store, None)
        if not source.is_cpu:
            return source.data_ptr(), (MEMORY, type_code(source.dtype), None)
        region = self._host[position]
        if region is None:
            return stage(source, layout.slot.dtype), (MEMORY, layout.store, None)
        _copy_host(region[: source.numel()], source, layout.slot.dtype)
        offset = self._regions[position] or 0
        self.inline_end = max(self.inline_end, offset + source.numel() * layout.slot.dtype.itemsize)
        return offset, (INLINE, layout.store, None)

    def _host_view(self, layout: SlotLayout, offset: int | None) -> np.ndarray | None:
        if offset is None:
            return None
        count, itemsize = layout.outer * layout.span, layout.slot.dtype.itemsize
        kind = _NUMPY.get(layout.slot.dtype, _NUMPY_BITS[itemsize])
        return np.frombuffer(self.buffer, kind, count, self.head_bytes + offset)

    def _pad_bits(self, position: int, pad: PadValue) -> int:
        slot = self.layouts[position].slot
        return self._pads[position] if pad is slot.pad else bits_of(_number(pad), slot.dtype)


def _copy_host(place: np.ndarray, source: torch.Tensor, dtype: torch.dtype) -> None:
    """Copy a host source into the payload, in the slot's dtype; numpy has no bfloat16, so those go as bits."""
    source = source.detach().reshape(-1)
    if dtype in _NUMPY and (source.dtype == dtype or not dtype.is_floating_point):
        np.copyto(place, source.numpy(), casting="unsafe")
    else:
        bits = source.to(dtype).view(_BIT_TYPES[dtype.itemsize]).numpy()
        np.copyto(place.view(_NUMPY_BITS[dtype.itemsize]), bits)


def _payload_regions(layouts: Sequence[SlotLayout], limit: int) -> tuple[list[int | None], int]:
    """Give each slot a place in the payload, the smallest first, while there is room."""
    regions: list[int | None] = [None] * len(layouts)
    end = 0
    for position in sorted(range(len(layouts)), key=lambda p: layouts[p].num_bytes):
        size = -(-layouts[position].num_bytes // 16) * 16
        if end + size <= limit:
            regions[position], end = end, end + size
    # In few sizes, because a kernel is compiled for each.
    return regions, min(max(256, 1 << (end - 1).bit_length()), max(16, limit)) if end else 16


def _blocks(target: torch.Tensor, dim: int) -> tuple[int, int, bool]:
    """Give the number of blocks before the row dimension, their distance, and whether all is regular."""
    step, packed = 1, True
    for extent, stride in reversed(list(zip(target.shape, target.stride()))[dim:]):
        packed = packed and (extent == 1 or stride == step)
        step *= extent
    before = [(extent, stride) for extent, stride in list(zip(target.shape, target.stride()))[:dim] if extent != 1]
    for (_, far), (extent, near) in zip(before, before[1:]):
        packed = packed and far == extent * near
    return _product(target.shape[:dim]), before[-1][1] if before else step, packed


def _number(pad: PadValue) -> Any:
    return 0 if pad is REPEAT_LAST else pad


def _product(extents: Sequence[int]) -> int:
    total = 1
    for extent in extents:
        total *= extent
    return total
