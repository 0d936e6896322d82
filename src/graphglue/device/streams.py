"""Order between steps and streams, and memory that the device still reads.

A step may come on another stream than the one before; both use the same slots, so the second waits
for the first. Pinned blocks and device sources are held until an event says they were read.
"""

from __future__ import annotations

import functools
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

from graphglue.device.kernel import checked

_MIN_BLOCK_BYTES = 4096
# Steps that share an event: recording one costs as much as a whole step where the code is cold.
_LIGHT_STEPS, _HEAVY_STEPS = 256, 8
_NO_STREAM = -1  # no handle: 0 is the default stream
_DISABLE_TIMING = 2  # CU_EVENT_DISABLE_TIMING


class StepOrder:
    """Make each step wait for the last one when it runs on another stream."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        # The raw handle costs 0.3 us, a stream object 5 to 7 us (measured on an H200).
        self.stream: Callable[[], int] = functools.partial(torch._C._cuda_getCurrentRawStream, device.index)
        self.current = _NO_STREAM  # of the last step
        self._side: torch.cuda.Stream | None = None
        self._left = _NO_STREAM  # of the last step, where a part of the next one ran beside it

    def enter(self) -> None:
        """Order the current stream behind the stream of the last step. Sync: none."""
        current = self.stream()
        for last in (self.current, self._left):
            if last not in (_NO_STREAM, current):
                torch.cuda.current_stream(self._device).wait_stream(self._stream_of(last))
        self.current, self._left = current, _NO_STREAM

    def _stream_of(self, handle: int) -> torch.cuda.Stream:
        # torch takes the handle 0, the default stream's, for "none given".
        default = torch.cuda.default_stream(self._device)
        return torch.cuda.ExternalStream(handle, device=self._device) if handle else default

    @contextmanager
    def beside(self, behind: Any, after: Any, callers_work: bool) -> Iterator[None]:
        """Make a stream of our own the current one, for a part of the next step; see ``Device.beside``. Sync: none."""
        with torch.cuda.device(self._device):
            side = self._side = self._side or torch.cuda.Stream(self._device)
            if callers_work:
                side.wait_stream(torch.cuda.current_stream(self._device))
            if after is not None:
                after.wait(side)
            with torch.cuda.stream(side):
                if behind is None:
                    self.enter()
                else:
                    behind.wait(side)
                    self._left = self.current if self.current != side.cuda_stream else self._left
                    self.current = side.cuda_stream  # whatever uses the slots next waits for both
                yield


class InFlight:
    """Hold pinned blocks and sources until the device has read them.

    A few steps share one event. It grows instead of waiting: with any number of steps queued no
    call blocks, and memory comes back once the device has passed them.
    """

    def __init__(self, device: torch.device) -> None:
        from cuda.bindings import driver

        self._device, self._driver = device, driver
        self.max_steps = _LIGHT_STEPS
        self._free: list[torch.Tensor] = []
        self.opened: list[tuple[Any, Any]] = []  # steps that no event covers yet
        self._sealed: deque[tuple[Any, list[tuple[Any, Any]]]] = deque()
        self._events: list[Any] = []

    def block(self, num_bytes: int) -> torch.Tensor:
        """Take a pinned block of at least ``num_bytes`` that nothing reads. Sync: none."""
        self._collect()
        for position, block in enumerate(self._free):
            if block.numel() >= num_bytes:
                return self._free.pop(position)
        size = max(_MIN_BLOCK_BYTES, 1 << (num_bytes - 1).bit_length())
        with torch.inference_mode(False):
            return torch.empty(size, dtype=torch.uint8, device="cpu", pin_memory=True)

    def hold(self, step: tuple[Any, Any], stream: int) -> None:
        """Keep a step's pinned blocks and sources alive until the work queued on a stream has run. Sync: none.

        Steps are ordered among themselves, so a later step's event covers the earlier ones.
        """
        self.opened.append(step)
        if len(self.opened) >= self.max_steps:
            self.seal(stream)

    def expect_heavy(self) -> None:
        """Let go of steps sooner: their sources are large."""
        self.max_steps = _HEAVY_STEPS

    def seal(self, stream: int) -> None:
        """Cover what was held so far by one event, and let go of what was read. Sync: none."""
        driver = self._driver
        if not self._events:
            with torch.cuda.device(self._device):
                self._events.append(checked(driver.cuEventCreate(_DISABLE_TIMING)))
        event = self._events.pop()
        checked(driver.cuEventRecord(event, stream))
        self._sealed.append((event, self.opened[:]))
        self.opened.clear()  # the same list for good: launches have it at hand
        self._collect()

    def _collect(self) -> None:
        while self._sealed and int(self._driver.cuEventQuery(self._sealed[0][0])[0]) == 0:
            event, steps = self._sealed.popleft()
            self._events.append(event)
            for blocks, _ in steps:
                self._free.extend(blocks)
