"""A GPU as a device: the fill kernel, CUDA graphs, and both in one launch."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch

from graphglue.core.binding import Write
from graphglue.core.slots import Slot
from graphglue.device.base import Fill, Launch, Reads, SeparateLaunches
from graphglue.device.cpu import TorchFill
from graphglue.device.fill import fill_slots
from graphglue.device.kernel import KernelUnavailable, checked
from graphglue.device.kernel_fill import HEAVY_BYTES, KernelFill
from graphglue.device.launch import ParentLaunch, PrependedLaunch
from graphglue.device.streams import InFlight, StepOrder
from graphglue.errors import ConfigError, GraphGlueError
from graphglue.graphs.base import Recorder, Recording
from graphglue.graphs.cuda import AdoptedGraph, CudaRecorder, CudaRecording

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
        self.enter_step = self._order.enter  # called at every step, so without a method of our own between
        self.beside = self._order.beside
        self._in_flight = InFlight(self.torch_device)
        self.fill_fallback: str | None = None

    def recorder(self, stream: Any = None, pool: Any = None) -> Recorder:
        """Build a recorder of CUDA graphs, on the engine's stream and memory pool if given."""
        return CudaRecorder(self.torch_device, stream=stream, pool=pool)

    def recorders(self, stream: Any = None, pool: Any = None) -> tuple[Recorder, Recorder]:
        """Build two recorders, each on a stream of its own: one with a pool of its own, one with the engine's."""
        return self.recorder(), self.recorder(stream, pool)

    def bucket_fill(
        self, slots: Mapping[str, Slot], targets: Mapping[str, torch.Tensor], owned: Sequence[tuple[int, int]]
    ) -> Fill:
        """Build a fill of one kernel; of torch operations where that is not possible, and say why."""
        try:
            return KernelFill(slots, targets, self.torch_device, self._order, self._in_flight, owned)
        except KernelUnavailable as error:
            self.fill_fallback = str(error)
            return TorchFill(targets, self)

    def fill_once(self, writes: Sequence[Write], targets: Mapping[str, torch.Tensor]) -> None:
        """Fill targets by torch operations on the caller's current stream.

        Host sources are packed into one pinned block before this returns, so the caller may
        overwrite them at once. Sync: none.
        """
        with torch.no_grad(), torch.cuda.device(self.torch_device):
            writes, blocks = self._staged(writes)
            fill_slots(writes, targets, non_blocking=True)
            if any(isinstance(w.source, torch.Tensor) and w.source.nbytes > HEAVY_BYTES for w in writes):
                self._in_flight.expect_heavy()
            stream = torch._C._cuda_getCurrentRawStream(self.torch_device.index)
            self._in_flight.hold((blocks, [write.source for write in writes]), stream)

    def compose(
        self, fill: Fill, preps: Sequence[Recording], forward: Recording | None, random: str | None, reads: Reads | None
    ) -> Launch:
        """Join fill, preps and forward in one launch, or say why they are launched one by one."""
        recordings = [*preps, *([forward] if forward else [])]
        graphs = [recording.graph for recording in recordings if isinstance(recording, (CudaRecording, AdoptedGraph))]
        if not isinstance(fill, KernelFill):
            why = self.fill_fallback or "the fill is not one kernel"
        elif len(graphs) != len(recordings):
            why = "another recorder than graphglue's made the graphs"
        elif random == "prep":
            why = "a prep draws random numbers, which only its own replay advances"
        else:
            try:
                return self._composed(fill, graphs, len(preps), random, reads)
            except GraphGlueError as error:  # memory and conditional nodes can not be children
                why = f"the graphs can not be composed: {error}"
        return SeparateLaunches(self, fill, preps, forward, reads, why)

    def adopt(self, graph: Any, outputs: Any) -> Recording:
        """Take in a ``torch.cuda.CUDAGraph(keep_graph=True)`` that the engine captured."""
        return AdoptedGraph(graph, outputs)

    def read_event(self) -> torch.cuda.Event:
        """Make an event; recording it once gives it a handle, which a graph's node needs."""
        with torch.cuda.device(self.torch_device):
            event = torch.cuda.Event()
            event.record()
            return event

    def record_event(self, event: Any) -> None:
        """Record an event on the caller's current stream. Sync: none."""
        event.record(torch.cuda.current_stream(self.torch_device))

    def _composed(
        self,
        fill: KernelFill,
        graphs: list[torch.cuda.CUDAGraph],
        num_preps: int,
        random: str | None,
        reads: Reads | None,
    ) -> Launch:
        with torch.cuda.device(self.torch_device):
            if random:
                return PrependedLaunch(fill, graphs[:num_preps], graphs[num_preps], reads)
            return ParentLaunch(fill, graphs[:num_preps], graphs[num_preps:], reads)

    def is_capturing(self) -> bool:
        """Tell whether the caller's current stream is being captured. Sync: none."""
        with torch.cuda.device(self.torch_device):
            return torch.cuda.is_current_stream_capturing()

    def random_offset(self) -> int:
        """Give the position of the device's default generator. Sync: none."""
        return torch.cuda.default_generators[self.torch_device.index].get_offset()

    def generators(self) -> tuple[torch.Generator, ...]:
        """Give the GPU's, and the CPU's: warm-ups may draw from both."""
        return torch.cuda.default_generators[self.torch_device.index], torch.default_generator

    def free_bytes(self) -> int | None:
        """Free device memory in bytes, as the driver counts it."""
        return torch.cuda.mem_get_info(self.torch_device)[0]

    def trim(self) -> None:
        """Free the blocks that torch caches. Sync: the device."""
        with torch.cuda.device(self.torch_device):
            torch.cuda.empty_cache()

    @contextmanager
    def named_range(self, name: str) -> Iterator[None]:
        """Push an NVTX range, and pop it whatever happens inside. Sync: none."""
        torch.cuda.nvtx.range_push(name)
        try:
            yield
        finally:
            torch.cuda.nvtx.range_pop()

    def versions(self) -> dict[str, str]:
        """Name the GPU, torch's CUDA and the driver's. Sync: none."""
        from cuda.bindings import driver as api

        driver = checked(api.cuDriverGetVersion())
        return {
            "device": torch.cuda.get_device_name(self.torch_device),
            "cuda": str(torch.version.cuda),
            "driver": f"{driver // 1000}.{driver % 1000 // 10}",
        }

    def synchronize(self) -> None:
        """Wait for all queued work. Sync: the device."""
        torch.cuda.synchronize(self.torch_device)

    def _staged(self, writes: Sequence[Write]) -> tuple[list[Write], list[torch.Tensor]]:
        """Copy host sources into a pinned block, in the slot's dtype."""
        sources = {w.slot.name: w.source for w in writes if isinstance(w.source, torch.Tensor) and w.source.is_cpu}
        if not sources:
            return list(writes), []
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
        return staged, [block]


def _aligned(num_bytes: int) -> int:
    return -(-num_bytes // _ALIGNMENT_BYTES) * _ALIGNMENT_BYTES
