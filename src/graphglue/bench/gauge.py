"""Gauges: device time, memory and names, through torch's device-agnostic modules."""

from __future__ import annotations

import gc
import platform
import time
from statistics import median
from typing import Any

import torch

from graphglue.bench.timing import Step

_CYCLES_PER_US = 2000  # an H200 runs at up to 1.98 GHz; at a lower clock the wait only gets longer
_MAX_HOLD_US = 100_000


class Gauge:
    """Measure on one device.

    Args:
        device: a CUDA device with an index, or the CPU.
    """

    def __init__(self, device: torch.device) -> None:
        self.device, self.on_gpu = device, device.type == "cuda"
        self._module: Any = torch.get_device_module(device)

    def synchronize(self) -> None:
        """Wait for the device. Sync: the device."""
        if self.on_gpu:
            self._module.synchronize()

    def device_us(self, step: Step, host_us: float, steps: int = 10, repeats: int = 15) -> float | None:
        """Give a step's device time: events around a batch of steps that is queued behind a busy GPU.

        The GPU is kept busy until the host has queued the whole batch, so that the host's own time
        is not in it. None on the CPU, where nothing is queued.

        Sync: the device, before and after.
        """
        if not self.on_gpu:
            return None
        hold_us = min(_MAX_HOLD_US, 3 * steps * host_us + 200)
        times = []
        for _ in range(repeats):
            begin, end = (self._module.Event(enable_timing=True) for _ in range(2))
            self.synchronize()
            self._module._sleep(int(hold_us * _CYCLES_PER_US))
            begin.record()
            for _ in range(steps):
                step()
            end.record()
            self.synchronize()
            times.append(begin.elapsed_time(end) * 1e3 / steps)
        return median(times)

    def per_second(self, step: Step, steps: int) -> float:
        """Give the steps per second, back to back, the wait for the last one included. Sync: the device."""
        self.synchronize()
        begin = time.perf_counter()
        for _ in range(steps):
            step()
        self.synchronize()
        return steps / (time.perf_counter() - begin)

    def reserved_bytes(self) -> int:
        """Give what torch's allocator holds."""
        return self._module.memory_reserved() if self.on_gpu else 0

    def driver_bytes(self) -> int:
        """Give what the driver counts as used on the device, by everybody. Sync: the device."""
        if not self.on_gpu:
            return 0
        self.synchronize()
        free, total = self._module.mem_get_info()
        return total - free

    def release(self) -> None:
        """Give the allocator's unused blocks back, so that what is counted next is in use."""
        gc.collect()  # a closed runner's capture stream, with its workspaces, is lent to the next one
        if self.on_gpu:
            self._module.empty_cache()

    def name(self) -> str:
        """Name the device."""
        if self.on_gpu:
            return str(self._module.get_device_name())
        return f"{platform.machine()} CPU, the tape: for truth, not for speed"
