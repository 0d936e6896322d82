"""The one small protocol that the CPU and a GPU both keep."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import torch

from graphglue.core.binding import Write
from graphglue.graphs.base import Recorder


class Device(Protocol):
    """Run a runner's device work."""

    @property
    def torch_device(self) -> torch.device:
        """The device, with an index where it has one."""

    def recorder(self, stream: Any = None, pool: Any = None) -> Recorder:
        """Build the recorder of this device, on the engine's stream and memory pool if given."""

    def enter_step(self) -> None:
        """Order this step behind the last one, which may have run on another stream. Sync: none."""

    def fill(self, writes: Sequence[Write], targets: Mapping[str, torch.Tensor]) -> None:
        """Write heads and tails into ``targets``, slot name -> tensor of the bucket's extent.

        Host sources are snapshotted when this returns; device sources are kept alive until they
        were read. Sync: none. Capturable: no.
        """

    def free_bytes(self) -> int | None:
        """Free device memory in bytes; None where nobody counts it."""

    def used_bytes(self) -> int:
        """Device memory that the allocator holds, in bytes."""

    def synchronize(self) -> None:
        """Wait for all queued work. Sync: the device. Never called while replaying."""


def open_device(device: torch.device | str) -> Device:
    """Open the device that slots and graphs live on.

    Raises:
        ConfigError: a device type that is neither "cpu" nor "cuda", or no such GPU.
    """
    torch_device = torch.device(device)
    if torch_device.type == "cuda":
        from graphglue.device.cuda import CudaDevice

        return CudaDevice(torch_device)
    from graphglue.device.cpu import CpuDevice

    return CpuDevice(torch_device)
