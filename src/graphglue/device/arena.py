"""The arena: static storage for every slot, and the fill that keeps it right. Usable alone."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import numpy as np
import torch

from graphglue.core.batch import Batch, extents_of
from graphglue.core.binding import Write, bind_source
from graphglue.core.buckets import Bucket, Ladder
from graphglue.core.keys import KeySpace
from graphglue.core.slots import Axis, Computed, Slot
from graphglue.core.view import View
from graphglue.device.base import Device, Fill, open_device
from graphglue.device.cpu import TorchFill
from graphglue.errors import BindError, CapacityError, ConfigError
from graphglue.graphs.memory import place

_ALIGNMENT_BYTES = 256  # what a GPU's own allocations give; every dtype and 16-byte access is served


class Arena:
    """Hold one static tensor per slot, at the ladder's largest bucket, and fill them step by step.

    After a fill, rows [0, raw) of every slot hold the batch's values and rows [raw, bucket) its
    pad, on every axis and trailing dimension, whatever ran before.

    Args:
        slots: the slots; names are unique.
        ladder: sizes in requests, or a key space, which knows width and modes as well.
        device: "cpu" or a CUDA device.
        tokens_per_request: token rows per request.
        num_ranks: rows of slots on axis rank.

    Raises:
        ConfigError: repeated names, or an adopted storage that the largest bucket does not fit.

    Sync: none. All storage is allocated here, outside inference mode. Capturable: no.
    """

    def __init__(
        self,
        slots: Iterable[Slot],
        ladder: Ladder | Iterable[int] | KeySpace,
        *,
        device: torch.device | str = "cpu",
        tokens_per_request: int = 1,
        num_ranks: int = 1,
    ) -> None:
        space = ladder if isinstance(ladder, KeySpace) else KeySpace(Ladder(ladder), tokens_per_request)
        if type(num_ranks) is not int or num_ranks < 1:
            raise ConfigError(f"num_ranks={num_ranks!r}: expected a positive integer")
        self.space, self.num_ranks = space, num_ranks
        self.slots = _by_name(slots)
        self.max_rows = {name: self._rows(slot, space.capacity) for name, slot in self.slots.items()}
        _check_computed(self.slots.values(), space.capacity)
        self.device: Device = open_device(device)
        with torch.inference_mode(False), torch.no_grad():
            self._storage, self._owned = self._allocate_all()
        self._starts, self._spans = self._index_storage()
        self._targets: dict[Bucket, dict[str, torch.Tensor]] = {}
        self._fills: dict[Bucket, Fill] = {}
        self.device.enter_step()  # so that a first step on another stream comes behind this fill
        self.fill_idle(space.bucket(space.ladder.largest))

    def view(self, bucket: Bucket | int) -> View:
        """Show all slots at one bucket, or size. Each starts at the slot's address, for good. Sync: none."""
        bucket = self.bucket_of(bucket)
        return View(self.targets(bucket), {}, bucket, reader="the arena's view")

    def bucket_of(self, bucket: Bucket | int) -> Bucket:
        """Give the extents of a size of the ladder, or check those that are given.

        Raises:
            ConfigError: no size of the ladder.
            CapacityError: more than the slots hold.
        """
        if not isinstance(bucket, Bucket):
            if isinstance(bucket, int) and bucket > self.space.ladder.largest:
                raise over_capacity(self.space.bucket(bucket), self.space)
            if bucket not in self.space.ladder:
                raise ConfigError(f"{bucket!r} is no size of the ladder {list(self.space.ladder)}")
            return self.space.bucket(bucket)
        if min(bucket) < 0 or not self.fits(bucket):
            raise over_capacity(bucket, self.space)
        return bucket

    def fill(self, batch: Batch, bucket: Bucket | int | None = None) -> View:
        """Fill the slots for one batch, and show them at its bucket. Sync: none.

        Args:
            batch: the step; host sources may be overwritten as soon as this returns, device ones once the fill has run.
            bucket: what to fill to; the smallest that covers the batch by default.

        Raises:
            BindError: a source does not fit; nothing was written.
            CapacityError: the batch exceeds the ladder or a slot; nothing was written.
        """
        raw = extents_of(batch, self.space.width)
        bucket = self.space.cover(raw) if bucket is None else self.bucket_of(bucket)
        if bucket is None:
            raise over_capacity(raw, self.space)
        if bucket.requests < raw.requests or bucket.tokens < raw.tokens:
            raise CapacityError(
                f"a batch of {raw} does not fit {bucket}; leave the bucket out, or give one that covers it"
            )
        writes = self.bind(batch.sources, raw, bucket)
        self.device.enter_step()
        self.write(writes, bucket)
        return self.view(bucket)

    def bind(
        self,
        sources: Mapping[str, Any],
        raw: Bucket,
        bucket: Bucket,
        rank_counts: Sequence[int] | None = None,
        scratch: bool = False,
    ) -> list[Write]:
        """Hold sources against every slot and return what the fill will do. Writes nothing.

        Args:
            sources: slot name -> values.
            raw: the real extents.
            bucket: the extents to fill.
            rank_counts: the padded token count of every rank.
            scratch: fill other tensors than the slots, so that a slot's own view is a source like others.

        Raises:
            BindError: a missing or unknown slot, or a source of the wrong dtype, extent, device or stride.
        """
        if not isinstance(sources, Mapping):
            raise BindError(f"sources is a {type(sources).__name__}; expected a mapping of slot names to values")
        for name in sources:
            slot = self.slots.get(name)
            if slot is None:
                raise BindError(f"the batch hands in {name!r}, which is no slot; slots are {sorted(self.slots)}")
            if slot.value is not None:
                raise BindError(f"slot {name!r} is computed ({slot.value.name}); leave it out of the batch")
        return [self._bind_slot(slot, sources, raw, bucket, rank_counts, scratch) for slot in self.slots.values()]

    def write(self, writes: Sequence[Write], bucket: Bucket) -> None:
        """Run a fill, as ``bind`` gave it for this bucket, on the caller's current stream. Sync: none."""
        fill = self.fill_of(bucket)
        fill.load(writes)
        fill.run()

    def fill_of(self, bucket: Bucket) -> Fill:
        """Give the fill of a bucket of the ladder; the same one on every call."""
        found = self._fills.get(bucket)
        if found is None:
            found = self.device.bucket_fill(self.slots, self.targets(bucket), self._owned)
            if bucket in self._targets:
                self._fills[bucket] = found
        return found

    def fill_by_reference(self, bucket: Bucket) -> None:
        """Fill a bucket by torch operations from now on; its own fill was found to be wrong."""
        self._fills[bucket] = TorchFill(self.targets(bucket), self.device)

    def fill_capture(self, bucket: Bucket) -> None:
        """Fill a bucket's slots with the values that preps see while they are recorded. Sync: none."""
        writes = [self._capture_write(slot, bucket) for slot in self.slots.values()]
        self.device.fill_once(writes, self.targets(bucket))

    def fill_idle(self, bucket: Bucket) -> None:
        """Fill a bucket's slots with idle values. Sync: none."""
        self.device.fill_once(self.bind({}, Bucket(0, 0, 0), bucket), self.targets(bucket))

    def scratch(self, writes: Sequence[Write], bucket: Bucket) -> dict[str, torch.Tensor]:
        """Fill fresh tensors at the writes' own extents; the slots stay as they are. Sync: none."""
        with torch.inference_mode(False):
            device = self.device.torch_device
            fresh = {
                name: torch.empty(slot.shape(self._rows(slot, bucket)), dtype=slot.dtype, device=device)
                for name, slot in self.slots.items()
            }
        self.device.fill_once(writes, fresh)
        return fresh

    def targets(self, bucket: Bucket) -> dict[str, torch.Tensor]:
        """Give every slot at the bucket's extent; the same tensors on every call."""
        found = self._targets.get(bucket)
        if found is None:
            with torch.inference_mode(False):
                found = {name: self._cut(slot, self._rows(slot, bucket)) for name, slot in self.slots.items()}
            if (bucket.tokens if self.space.counts_tokens else bucket.requests) in self.space.ladder:
                self._targets[bucket] = found
        return found

    def fits(self, bucket: Bucket) -> bool:
        """Tell whether every slot has the rows of these extents."""
        return bucket.requests <= self.space.capacity.requests and bucket.tokens <= self.space.capacity.tokens

    def _rows(self, slot: Slot, extents: Bucket) -> int:
        return slot.rows(extents.requests, extents.tokens, self.num_ranks)

    def _allocate_all(self) -> tuple[dict[str, torch.Tensor], list[tuple[int, int]]]:
        """Cut our own slots from one block, and adopt the others; give the address ranges of all."""
        shapes = {name: slot.shape(self.max_rows[name]) for name, slot in self.slots.items()}
        sizes = {
            name: torch.Size(shape).numel() * self.slots[name].dtype.itemsize
            for name, shape in shapes.items()
            if self.slots[name].storage is None
        }
        block = torch.empty(sum(map(_aligned, sizes.values())), dtype=torch.uint8, device=self.device.torch_device)
        storage, offset = {}, 0
        for name, slot in self.slots.items():
            if slot.storage is not None:
                storage[name] = self._adopt(slot)
                continue
            storage[name] = block[offset : offset + sizes[name]].view(slot.dtype).view(shapes[name])
            offset += _aligned(sizes[name])
        adopted = [storage[name] for name, slot in self.slots.items() if slot.storage is not None]
        return storage, [(t.data_ptr(), t.data_ptr() + _span_bytes(t)) for t in (block, *adopted)]

    def _adopt(self, slot: Slot) -> torch.Tensor:
        assert slot.storage is not None
        for size in self.space.ladder:
            needed = slot.shape(self._rows(slot, self.space.bucket(size)))
            if not _holds(slot, tuple(slot.storage.shape), needed):
                raise ConfigError(
                    f"slot {slot.name!r}: the adopted storage has shape {tuple(slot.storage.shape)}, but ladder size "
                    f"{size} needs {needed} (rows on dimension {slot.row_dim}); enlarge it or cut the ladder"
                )
        if slot.storage.device != self.device.torch_device:
            raise ConfigError(
                f"slot {slot.name!r}: the adopted storage is on {slot.storage.device}, the slots on "
                f"{self.device.torch_device}; allocate it there"
            )
        # An alias outside inference mode: a buffer made inside it could not be filled from outside.
        return place(slot.storage.untyped_storage(), slot.storage)

    def _cut(self, slot: Slot, rows: int) -> torch.Tensor:
        """Cut a bucket's extent from the slot's start: contiguous in our storage, a slice of an adopted one."""
        storage = self._storage[slot.name]
        if slot.axis is Axis.FIXED:
            return storage
        if slot.storage is not None or slot.row_dim == 0:
            return storage.narrow(slot.row_dim, 0, rows)
        shape = slot.shape(rows)
        return storage.view(-1)[: torch.Size(shape).numel()].view(shape)

    def _index_storage(self) -> tuple[list[int], list[tuple[int, str]]]:
        """Index the slots' memory, so that a source inside it is found by bisection."""
        spans = sorted((t.data_ptr(), t.data_ptr() + _span_bytes(t), n) for n, t in self._storage.items() if t.numel())
        for (_, end, one), (start, _, other) in zip(spans, spans[1:]):
            if start < end:
                raise ConfigError(f"slots {one!r} and {other!r} adopt overlapping storages; give each its own")
        return [start for start, _, _ in spans], [(end, name) for _, end, name in spans]

    def _bind_slot(
        self,
        slot: Slot,
        sources: Mapping[str, Any],
        raw: Bucket,
        bucket: Bucket,
        counts: Sequence[int] | None,
        scratch: bool,
    ) -> Write:
        rows, raw_rows = self._rows(slot, bucket), self._rows(slot, raw)
        if slot.value is not None:
            return self._computed_write(slot, raw, bucket, counts)
        source = sources.get(slot.name)
        if source is None:
            if raw.requests == 0:
                return Write(slot, None, 0, rows, slot.pad if slot.idle is None else slot.idle)
            if slot.missing == "pad":
                return Write(slot, None, 0, rows, slot.pad)
            raise BindError(
                f"slot {slot.name!r} is missing from the batch, which hands in {sorted(sources)}; "
                "hand it in, or declare missing='pad'"
            )
        if isinstance(source, torch.Tensor) and not scratch and self._is_own(slot, source, raw_rows, bucket):
            return Write(slot, None, raw_rows, rows, slot.pad)
        write = bind_source(slot, source, raw_rows, rows, self.device.torch_device)
        shared = isinstance(source, np.ndarray) and isinstance(write.source, torch.Tensor) and not scratch
        if shared and self._is_own(slot, write.source, raw_rows, bucket):
            write.source = None
        return write

    def _is_own(self, slot: Slot, source: Any, raw_rows: int, bucket: Bucket) -> bool:
        """Tell whether a source is the slot's own view; refuse any other that lies in a slot's memory."""
        owner = self._owner(source)
        if owner is None:
            return False
        target = self.targets(bucket)[slot.name]
        head = target if slot.axis is Axis.FIXED else target.narrow(slot.row_dim, 0, raw_rows)
        if owner == slot.name and source.data_ptr() == head.data_ptr():
            if source.shape != head.shape or source.dtype != head.dtype:
                return False  # binding names what is off
            if source.stride() == head.stride():
                return True
        raise BindError(
            f"slot {slot.name!r}: the source lies in the memory of slot {owner!r}, which the same fill writes; "
            f"hand in a copy, or the slot's own view narrowed to the real rows"
        )

    def _owner(self, source: torch.Tensor) -> str | None:
        elsewhere = source.device != self.device.torch_device or source.layout is not torch.strided
        if elsewhere or source.numel() == 0:
            return None
        start = source.data_ptr()
        position = bisect_right(self._starts, start) - 1
        if position >= 0 and start < self._spans[position][0]:
            return self._spans[position][1]
        following = position + 1
        inside = following < len(self._starts) and self._starts[following] < start + _span_bytes(source)
        return self._spans[following][1] if inside else None

    def _computed_write(self, slot: Slot, raw: Bucket, bucket: Bucket, counts: Sequence[int] | None) -> Write:
        rows, raw_rows = self._rows(slot, bucket), self._rows(slot, raw)
        if slot.value is None or slot.value is Computed.RANK_COUNTS:
            if counts is None:  # a number is part of the step's parameters, without a host tensor
                return Write(slot, bucket.tokens, rows, rows, slot.pad)
            values = list(counts)
            if len(values) != self.num_ranks or max(values) > torch.iinfo(slot.dtype).max:
                raise CapacityError(
                    f"slot {slot.name!r}: counts {values} do not fit {self.num_ranks} ranks of {slot.dtype}"
                )
            return Write(slot, torch.tensor(values, dtype=slot.dtype, device="cpu"), rows, rows, slot.pad)
        number = {
            Computed.RAW_REQUESTS: raw.requests,
            Computed.RAW_TOKENS: raw.tokens,
            Computed.BUCKET_REQUESTS: bucket.requests,
            Computed.BUCKET_TOKENS: bucket.tokens,
        }[slot.value]
        if number > torch.iinfo(slot.dtype).max:
            raise CapacityError(f"slot {slot.name!r}: {slot.dtype} can not hold {slot.value.name} {number}")
        return Write(slot, number, raw_rows, rows, slot.pad)

    def _capture_write(self, slot: Slot, bucket: Bucket) -> Write:
        rows = self._rows(slot, bucket)
        if slot.value is not None:
            return self._computed_write(slot, bucket, bucket, None)
        if callable(slot.capture):
            return Write(slot, _capture_rows(slot, slot.capture, rows), rows, rows, slot.pad)
        return Write(slot, None, 0, rows, slot.pad if slot.capture is None else slot.capture)


def _capture_rows(slot: Slot, capture: Callable[[int], Any], rows: int) -> torch.Tensor:
    """Spread a capture value per row over the slot's other dimensions."""
    values = [slot.checked_number(capture(row), f"capture({row})") for row in range(rows)]
    shape = slot.shape(rows)
    if slot.axis is Axis.FIXED:
        return torch.full(shape, values[0], dtype=slot.dtype, device="cpu")
    column = [-1 if dim == slot.row_dim else 1 for dim in range(len(shape))]
    return torch.tensor(values, dtype=slot.dtype, device="cpu").view(column).expand(shape).contiguous()


def over_capacity(raw: Bucket, space: KeySpace) -> CapacityError:
    """Build the error of a batch that nothing here can hold."""
    return CapacityError(
        f"a batch of {raw.requests} requests and {raw.tokens} tokens exceeds the ladder {list(space.ladder)} or the "
        f"slots' capacity of {space.capacity.requests} requests and {space.capacity.tokens} tokens; "
        "split the batch, enlarge the ladder, or run it eagerly"
    )


def _by_name(slots: Iterable[Slot]) -> dict[str, Slot]:
    named: dict[str, Slot] = {}
    for slot in slots:
        if not isinstance(slot, Slot):
            raise ConfigError(f"slot {slot!r}: expected a graphglue.Slot")
        if slot.name in named:
            raise ConfigError(f"slot {slot.name!r} is declared twice; names are unique")
        named[slot.name] = slot
    return named


def _check_computed(slots: Iterable[Slot], capacity: Bucket) -> None:
    """Refuse a computed slot that could not hold the largest count."""
    most = max(capacity.requests, capacity.tokens)
    for slot in slots:
        if slot.value is not None and torch.iinfo(slot.dtype).max < most:
            raise ConfigError(
                f"slot {slot.name!r}: {slot.dtype} can not hold {slot.value.name}, up to {most} here; use a wider dtype"
            )


def _holds(slot: Slot, seen: tuple[int, ...], needed: tuple[int, ...]) -> bool:
    """Tell whether a storage of this shape has room: more rows are fine, other dimensions are exact."""
    row_dim = None if slot.axis is Axis.FIXED else slot.row_dim
    return len(seen) == len(needed) and all(
        have >= want if dim == row_dim else have == want for dim, (have, want) in enumerate(zip(seen, needed))
    )


def _aligned(num_bytes: int) -> int:
    return -(-num_bytes // _ALIGNMENT_BYTES) * _ALIGNMENT_BYTES


def _span_bytes(tensor: torch.Tensor) -> int:
    """Bytes from a tensor's first element to the end of its last."""
    last = sum((extent - 1) * abs(stride) for extent, stride in zip(tensor.shape, tensor.stride()))
    return (last + 1) * tensor.element_size() if tensor.numel() else 0
