"""The CPU as a device: torch operations and the tape."""

from __future__ import annotations

import platform
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch

from graphglue.core.binding import Write
from graphglue.core.differences import bytes_of
from graphglue.core.slots import Slot
from graphglue.device.base import Device, Fill, Launch, Loaded, ReadEvent, Reads, SeparateLaunches
from graphglue.device.fill import fill_slots
from graphglue.errors import CaptureError, ConfigError
from graphglue.graphs.base import Recorder, Recording
from graphglue.graphs.draws import state_of
from graphglue.graphs.tape import Tape, TapeRecording


class TorchFill:
    """Fill by torch operations, one or two for each slot."""

    def __init__(self, targets: Mapping[str, torch.Tensor], device: Device) -> None:
        self._targets, self._device = targets, device
        self._writes: Sequence[Write] = ()

    def load(self, writes: Sequence[Write]) -> None:
        """Take in a step that was bound."""
        self._writes = writes

    def remember(self, writes: Sequence[Write], sources: Mapping[str, Any]) -> None:
        """Remember nothing: this fill is not the fast one."""
        return

    def run(self) -> None:
        """Write what was loaded; host values are read before this returns."""
        writes, self._writes = self._writes, ()
        self._device.fill_once(writes, self._targets)

    def loaded(self) -> Loaded | None:
        """Say what was loaded; host values by their bytes."""
        sources = [write.source for write in self._writes if isinstance(write.source, torch.Tensor)]
        on_device = tuple(source for source in sources if not source.is_cpu)
        own_view = any(write.source is None and write.raw for write in self._writes)
        if own_view or any(source.is_inference() for source in on_device):
            return None
        values = tuple((write.raw, write.rows, repr(write.pad), _value_of(write.source)) for write in self._writes)
        return Loaded(values, tuple(source._version for source in on_device), on_device)

    def unload(self) -> None:
        """Let go of what was loaded."""
        self._writes = ()


def _value_of(source: Any) -> Any:
    """Give what tells a source from others: a number by its digits, because 0.0 equals -0.0 and no NaN itself."""
    if not isinstance(source, torch.Tensor):
        return repr(source)
    if not source.is_cpu:
        return source.dtype, source.data_ptr()
    return source.dtype, bytes_of(source).numpy().tobytes()


class DoneEvent:
    """An event that has happened: the CPU reads at once."""

    def wait(self, stream: Any = None) -> None:
        """Return at once."""

    def query(self) -> bool:
        """Say yes."""
        return True

    def synchronize(self) -> None:
        """Return at once."""


class AdoptedTape:
    """A forward that the engine recorded itself; it stays the engine's."""

    num_bytes = 0

    def __init__(self, recording: TapeRecording, outputs: Any) -> None:
        self._recording, self.outputs = recording, outputs

    def computes(self, tensor: torch.Tensor) -> bool:
        """Tell whether a recorded operation writes the memory of a tensor."""
        return self._recording.computes(tensor)

    def replay(self) -> None:
        """Run the recorded operations. Sync: none."""
        self._recording.replay()

    def close(self) -> None:
        """Leave the recording to the engine."""


class CpuDevice:
    """Run on the CPU: for truth, not for speed."""

    def __init__(self, device: torch.device) -> None:
        if device.type != "cpu":
            raise ConfigError(f"device {str(device)!r}: expected 'cpu' (the tape) or 'cuda'")
        self.torch_device = torch.device("cpu")

    def recorder(self, stream: Any = None, pool: Any = None) -> Recorder:
        """Build a tape, on the engine's memory pool if given; it has no streams."""
        return Tape(pool)

    def recorders(self, stream: Any = None, pool: Any = None) -> tuple[Recorder, Recorder]:
        """Build two tapes: one with a pool of its own, one with the engine's if given."""
        return self.recorder(), self.recorder(pool=pool)

    def enter_step(self) -> None:
        """Do nothing: the CPU runs one step after the other."""

    def beside(self, behind: ReadEvent | None, after: Any, callers_work: bool) -> AbstractContextManager[None]:
        """Run at once: the CPU has nothing to run beside, and what events stand for is done."""
        return nullcontext()

    def bucket_fill(
        self, slots: Mapping[str, Slot], targets: Mapping[str, torch.Tensor], owned: Sequence[tuple[int, int]]
    ) -> Fill:
        """Build a fill of torch operations."""
        return TorchFill(targets, self)

    def fill_once(self, writes: Sequence[Write], targets: Mapping[str, torch.Tensor]) -> None:
        """Fill the targets; sources were read when this returns."""
        with torch.no_grad():
            fill_slots(writes, targets)

    def compose(
        self, fill: Fill, preps: Sequence[Recording], forward: Recording | None, random: str | None, reads: Reads | None
    ) -> Launch:
        """Run one after the other: the tape has no launches to save."""
        return SeparateLaunches(self, fill, preps, forward, reads, "the CPU tape launches nothing")

    def adopt(self, graph: Any, outputs: Any) -> Recording:
        """Take in a recording of the tape."""
        if not isinstance(graph, TapeRecording):
            seen = type(graph).__name__
            raise CaptureError(f"a {seen} can not be adopted on the CPU; expected what Tape.record returns")
        return AdoptedTape(graph, outputs)

    def read_event(self) -> DoneEvent:
        """Give an event that has happened."""
        return DoneEvent()

    def record_event(self, event: Any) -> None:
        """Do nothing: the CPU has read what it was given."""

    def is_capturing(self) -> bool:
        """Give False: the tape records no stream."""
        return False

    def random_offset(self) -> int:
        """Tell the default generator's state from others; a tape's replay draws from it by itself."""
        return state_of(torch.default_generator)

    def generators(self) -> tuple[torch.Generator, ...]:
        """Give the CPU's."""
        return (torch.default_generator,)

    def free_bytes(self) -> int | None:
        """Give None: host memory is not what limits capture."""
        return None

    def trim(self) -> None:
        """Do nothing: host memory that is freed is gone."""

    def named_range(self, name: str) -> AbstractContextManager[None]:
        """Name nothing: the tape has no profiler."""
        return nullcontext()

    def versions(self) -> dict[str, str]:
        """Name the kind of processor; nothing else drives it."""
        return {"device": f"cpu {platform.machine()}"}

    def synchronize(self) -> None:
        """Do nothing: CPU work is done when it returns."""
