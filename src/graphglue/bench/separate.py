"""Devices that join less: what a step costs when fill, glue and forward are launched one by one, or without glue."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from graphglue.core.slots import Slot
from graphglue.device.base import Device, Fill, Launch, Reads, SeparateLaunches
from graphglue.device.cpu import TorchFill
from graphglue.graphs.base import Recording


class OneByOne:
    """Stand in front of a device, and keep it from composing.

    Args:
        device: does everything else.
        torch_fill: also fill by torch operations, one or two for each slot, instead of one kernel.
    """

    def __init__(self, device: Device, torch_fill: bool) -> None:
        self._device, self._torch_fill = device, torch_fill

    def bucket_fill(
        self, slots: Mapping[str, Slot], targets: Mapping[str, torch.Tensor], owned: Sequence[tuple[int, int]]
    ) -> Fill:
        """Build the fill of a bucket."""
        if self._torch_fill:
            return TorchFill(targets, self._device)
        return self._device.bucket_fill(slots, targets, owned)

    def compose(
        self, fill: Fill, preps: Sequence[Recording], forward: Recording | None, random: str | None, reads: Reads | None
    ) -> Launch:
        """Launch one by one."""
        return SeparateLaunches(self._device, fill, preps, forward, reads, "the benchmark asks for it")

    def __getattr__(self, name: str) -> Any:
        return getattr(self._device, name)


class WithoutPreps:
    """Stand in front of a device, and leave the preps out of what it composes: metadata stays as it was captured.

    Args:
        device: does everything else.
    """

    def __init__(self, device: Device) -> None:
        self._device = device

    def compose(
        self, fill: Fill, preps: Sequence[Recording], forward: Recording | None, random: str | None, reads: Reads | None
    ) -> Launch:
        """Join fill and forward."""
        return self._device.compose(fill, (), forward, random, reads)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._device, name)
