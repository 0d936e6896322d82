"""The CPU as a device: torch operations and the tape."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from graphglue.core.binding import Write
from graphglue.device.fill import fill_slots
from graphglue.errors import ConfigError
from graphglue.graphs.base import Recorder
from graphglue.graphs.tape import Tape


class CpuDevice:
    """Run on the CPU: for truth, not for speed."""

    def __init__(self, device: torch.device) -> None:
        if device.type != "cpu":
            raise ConfigError(f"device {str(device)!r}: expected 'cpu' (the tape) or 'cuda'")
        self.torch_device = torch.device("cpu")

    def recorder(self, stream: Any = None, pool: Any = None) -> Recorder:
        """Build a tape; it has neither streams nor pools."""
        return Tape()

    def enter_step(self) -> None:
        """Do nothing: the CPU runs one step after the other."""

    def fill(self, writes: Sequence[Write], targets: Mapping[str, torch.Tensor]) -> None:
        """Fill the slots; sources were read when this returns."""
        with torch.no_grad():
            fill_slots(writes, targets)

    def free_bytes(self) -> int | None:
        """Give None: host memory is not what limits capture."""
        return None

    def used_bytes(self) -> int:
        """Give 0: the tape counts its own bytes."""
        return 0

    def synchronize(self) -> None:
        """Do nothing: CPU work is done when it returns."""
