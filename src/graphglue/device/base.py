"""The one small protocol that the CPU and a GPU both keep."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol

import torch

from graphglue.core.binding import Write
from graphglue.core.slots import Slot
from graphglue.errors import ConfigError
from graphglue.graphs.base import Recorder, Recording

Take = Callable[[Mapping[str, Any]], bool]  # takes a step's sources in; False if they must be bound


@dataclass(frozen=True, slots=True)
class Loaded:
    """Say what a fill has taken in: equal to another only if the fill would write the same.

    Attributes:
        values: per slot what comes from the host, byte for byte, and where the rest lies; and all extents and pads.
        versions: the version that torch counts of each device source.
        sources: the device sources, held so that no other tensor comes to lie at their addresses.
    """

    values: tuple[Any, ...]
    versions: tuple[int, ...]
    sources: tuple[torch.Tensor, ...] = field(compare=False)


class Fill(Protocol):
    """Fill one bucket's slots: take a step's sources in, then write them all."""

    def load(self, writes: Sequence[Write]) -> None:
        """Take in a step that was bound. Host values are snapshotted now. Sync: none."""

    def remember(self, writes: Sequence[Write], sources: Mapping[str, Any]) -> Take | None:
        """Give what takes in a step whose sources are like these without binding it; None if nothing can."""

    def run(self) -> None:
        """Write what was loaded, on the caller's current stream. Sync: none."""

    def loaded(self) -> Loaded | None:
        """Say what was loaded; None where a change of a source could not be seen. Sync: none.

        That is so of a slot's own view, of a source that a launch of its own converts, and of device tensors
        made in inference mode, whose versions torch does not count.
        """

    def unload(self) -> None:
        """Let go of what was loaded: it is not written."""


class ReadEvent(Protocol):
    """Tell when the device has read something; a ``torch.cuda.Event``, or one that is always done."""

    def wait(self, stream: Any = None) -> None:
        """Make a stream wait."""

    def query(self) -> bool:
        """Tell whether it has happened."""

    def synchronize(self) -> None:
        """Make the host wait. Sync: the event."""


class Reads(NamedTuple):
    """The events of one runner's steps: sources read after the fill, tables after preps or forward."""

    sources: ReadEvent
    tables: ReadEvent
    tables_until_forward: bool


class Launch(Protocol):
    """Run a loaded fill and what was recorded for one key, one after the other."""

    @property
    def fallback(self) -> str | None:
        """Why this is more than one launch; None if it is one."""

    def run(self) -> None:
        """Launch on the caller's current stream. Sync: none."""

    def close(self) -> None:
        """Drop what was composed. Calling it twice is fine."""


class Device(Protocol):
    """Run a runner's device work."""

    @property
    def torch_device(self) -> torch.device:
        """The device, with an index where it has one."""

    def recorder(self, stream: Any = None, pool: Any = None) -> Recorder:
        """Build the recorder of this device, on the engine's stream and memory pool if given."""

    def recorders(self, stream: Any = None, pool: Any = None) -> tuple[Recorder, Recorder]:
        """Build two recorders that share neither stream nor memory pool: what they record may run side by side.

        The first one's are its own, the second one's are the engine's if given.
        """

    def enter_step(self) -> None:
        """Order this step behind the last one, which may have run on another stream. Sync: none."""

    def beside(self, behind: ReadEvent | None, after: Any, callers_work: bool) -> AbstractContextManager[None]:
        """Queue what runs inside beside the caller's work; later steps come behind it. Sync: none.

        Args:
            behind: the event behind the last step; None for all that is queued where it ran.
            after: an event to wait for besides.
            callers_work: wait for all that is queued on the caller's current stream as well.
        """

    def bucket_fill(
        self, slots: Mapping[str, Slot], targets: Mapping[str, torch.Tensor], owned: Sequence[tuple[int, int]]
    ) -> Fill:
        """Build the fill of a bucket's slots, which it writes step after step.

        Args:
            slots: the slots by name.
            targets: each slot at the bucket's extent.
            owned: address ranges of all slots' memory, which no source may lie in unseen.
        """

    def fill_once(self, writes: Sequence[Write], targets: Mapping[str, torch.Tensor]) -> None:
        """Write heads and tails into any targets, slot name -> tensor. Sync: none."""

    def compose(
        self, fill: Fill, preps: Sequence[Recording], forward: Recording | None, random: str | None, reads: Reads | None
    ) -> Launch:
        """Join a fill with what was recorded behind it, in one launch where the device can.

        Args:
            fill: the bucket's fill.
            preps: the recorded preps, in order.
            forward: the recorded forward; None for an engine that owns its own.
            random: what draws random numbers: "prep", "forward" or nothing.
            reads: events to record on the way, if the config asks for them.
        """

    def adopt(self, graph: Any, outputs: Any) -> Recording:
        """Take in a graph that the engine captured itself.

        Raises:
            CaptureError: it can not be composed or replayed here.
        """

    def read_event(self) -> ReadEvent:
        """Make an event."""

    def record_event(self, event: Any) -> None:
        """Record an event behind what was queued so far, on the caller's current stream. Sync: none."""

    def is_capturing(self) -> bool:
        """Tell whether the caller's current stream is being captured. Sync: none."""

    def random_offset(self) -> int:
        """Give the position of the device's random generator; it moves when numbers are drawn."""

    def generators(self) -> tuple[torch.Generator, ...]:
        """Give the default generators that code of this device may draw from."""

    def free_bytes(self) -> int | None:
        """Free device memory in bytes; None where nobody counts it."""

    def trim(self) -> None:
        """Give memory that nothing uses, but torch keeps, back to the driver. Sync: the device."""

    def named_range(self, name: str) -> AbstractContextManager[None]:
        """Name what is queued inside for a profiler. Sync: none."""

    def versions(self) -> dict[str, str]:
        """Name the device, and the versions of what drives it, as a certificate records them."""

    def synchronize(self) -> None:
        """Wait for all queued work. Sync: the device. Never called while replaying."""


class SeparateLaunches:
    """Launch the fill and each recording one by one: what a device does that can not join them."""

    def __init__(
        self,
        device: Device,
        fill: Fill,
        preps: Sequence[Recording],
        forward: Recording | None,
        reads: Reads | None,
        fallback: str,
    ) -> None:
        self._device, self._fill, self._preps, self._forward = device, fill, tuple(preps), forward
        self._reads = reads
        self.fallback: str | None = fallback

    def run(self) -> None:
        """Launch the fill and the recordings, in order. Sync: none."""
        self._device.enter_step()
        self._fill.run()
        self._record("sources", True)
        for recording in self._preps:
            recording.replay()
        self._record("tables", self._reads is not None and not self._reads.tables_until_forward)
        if self._forward is not None:
            self._forward.replay()
        self._record("tables", self._reads is not None and self._reads.tables_until_forward)

    def close(self) -> None:
        """Drop the recordings; their owner closes them."""
        self._preps, self._forward = (), None

    def _record(self, what: str, now: bool) -> None:
        if self._reads is not None and now:
            self._device.record_event(getattr(self._reads, what))


def open_device(device: torch.device | str) -> Device:
    """Open the device that slots and graphs live on.

    Raises:
        ConfigError: a device type that is neither "cpu" nor "cuda", or no such GPU.
    """
    try:
        torch_device = torch.device(device)
    except (RuntimeError, TypeError) as error:
        raise ConfigError(f"device {device!r}: expected 'cpu' (the tape) or 'cuda'; torch says: {error}") from None
    if torch_device.type == "cuda":
        from graphglue.device.cuda import CudaDevice

        return CudaDevice(torch_device)
    from graphglue.device.cpu import CpuDevice

    return CpuDevice(torch_device)
