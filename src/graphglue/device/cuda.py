"""A GPU as a device: torch operations for the fill, CUDA graphs for the rest."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch

from graphglue.core.binding import Write
from graphglue.device.fill import fill_slots
from graphglue.device.streams import InFlight, StepOrder
from graphglue.errors import ConfigError
from graphglue.graphs.base import Recorder
from graphglue.graphs.cuda import CudaRecorder

_ALIGNMENT_BYTES = 16


class CudaDevice:
    """Run on one GPU, on the caller's current stream."""

    def __init__(self, device: torch.device) -> None:
        if not torch.cuda.is_available():
            raise ConfigError(f"device {str(device)!r}: torch sees no GPU here; use device='cpu' for the tape")
        index = torch.cuda.current_device() if device.index is None else device.index
        if index >= torch.cuda.device_count():
            raise ConfigError(f"device {str(device)!r}: torch sees {torch.cuda.device_count()} GPUs")
        self.torch_device = torch.device("cuda", index)
        self._order = StepOrder(self.torch_device)
        self._in_flight = InFlight()

    def recorder(self, stream: Any = None, pool: Any = None) -> Recorder:
        """Build a recorder of CUDA graphs, on the engine's stream and memory pool if given."""
        return CudaRecorder(self.torch_device, stream=stream, pool=pool)

    def enter_step(self) -> None:
        """Order this step behind the last one, which may have run on another stream. Sync: none."""
        self._order.enter()

    def fill(self, writes: Sequence[Write], targets: Mapping[str, torch.Tensor]) -> None:
        """Fill the slots on the caller's current stream.

        Host sources are packed into one pinned block before this returns, so the caller may
        overwrite them at once. Sync: none.
        """
        with torch.no_grad(), torch.cuda.device(self.torch_device):
            writes, block = self._staged(writes)
            fill_slots(writes, targets, non_blocking=True)
            sources = tuple(w.source for w in writes if isinstance(w.source, torch.Tensor))
            if sources:
                self._in_flight.hold(block, sources)

    def _staged(self, writes: Sequence[Write]) -> tuple[list[Write], torch.Tensor | None]:
        """Copy host sources into a pinned block, in the slot's dtype."""
        sources = {w.slot.name: w.source for w in writes if isinstance(w.source, torch.Tensor) and w.source.is_cpu}
        if not sources:
            return list(writes), None
        itemsizes = {write.slot.name: write.slot.dtype.itemsize for write in writes}
        total = sum(_aligned(source.numel() * itemsizes[name]) for name, source in sources.items())
        block, offset, staged = self._in_flight.block(total or 1), 0, []
        for write in writes:
            source = sources.get(write.slot.name)
            if source is not None:
                num_bytes = source.numel() * write.slot.dtype.itemsize
                pinned = block[offset : offset + num_bytes].view(write.slot.dtype).view(source.shape)
                pinned.copy_(source)
                write = replace(write, source=pinned)
                offset += _aligned(num_bytes)
            staged.append(write)
        return staged, block

    def free_bytes(self) -> int | None:
        """Free device memory in bytes, as the driver counts it."""
        return torch.cuda.mem_get_info(self.torch_device)[0]

    def used_bytes(self) -> int:
        """Device memory that torch's allocator holds, in bytes."""
        return torch.cuda.memory_reserved(self.torch_device)

    def synchronize(self) -> None:
        """Wait for all queued work. Sync: the device."""
        torch.cuda.synchronize(self.torch_device)


def _aligned(num_bytes: int) -> int:
    return -(-num_bytes // _ALIGNMENT_BYTES) * _ALIGNMENT_BYTES
