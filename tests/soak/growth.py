"""Growth: what a process and a device hold, looked at whenever the same things should be there."""

from __future__ import annotations

import gc
import os
from dataclasses import dataclass, field
from pathlib import Path

import torch

MIB = 2**20
# Over a whole run, however long: what an allocator keeps moves by this much, and a leak of a few bytes a step by more.
TOLERANCES = {
    "rss_bytes": 24 * MIB,
    "gc_objects": 3000,
    "allocated_bytes": MIB,
    "reserved_bytes": 32 * MIB,
    "driver_bytes": 64 * MIB,
}


def held(device: str) -> dict[str, int]:
    """Count what is held now. Sync: the device."""
    gc.collect()
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    found = {"rss_bytes": pages * os.sysconf("SC_PAGE_SIZE"), "gc_objects": len(gc.get_objects())}
    if device != "cpu":
        torch.cuda.synchronize()
        free, total = torch.cuda.mem_get_info()
        found["allocated_bytes"] = torch.cuda.memory_allocated()
        found["reserved_bytes"] = torch.cuda.memory_reserved()
        found["driver_bytes"] = total - free
    return found


@dataclass
class Growth:
    """Hold what is there against what was there after the warm-up.

    Args:
        device: whose memory is counted as well.
        num_warm: looks that belong to the warm-up.
    """

    device: str
    num_warm: int = 2
    looks: list[dict[str, int]] = field(default_factory=list)

    def look(self) -> None:
        """Look once, at a moment that is like the last one."""
        self.looks.append(held(self.device))

    @property
    def grown(self) -> dict[str, int]:
        """How much more there is than after the warm-up."""
        if len(self.looks) <= self.num_warm:
            raise AssertionError(f"{len(self.looks)} looks, {self.num_warm} of them warm-up: the run is too short")
        first, last = self.looks[self.num_warm - 1], self.looks[-1]
        return {name: last[name] - first[name] for name in last}

    def check(self) -> None:
        """Fail if anything grew by more than its tolerance."""
        over = {name: grown for name, grown in self.grown.items() if grown > TOLERANCES[name]}
        assert not over, f"grew beyond tolerance: {over}, of {self.looks[self.num_warm - 1]}; tolerated {TOLERANCES}"
