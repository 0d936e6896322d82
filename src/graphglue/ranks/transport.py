"""Transports: how the rows of all ranks come together, through torch.distributed or anything like it."""

from __future__ import annotations

import itertools
import time
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any, Protocol

import numpy as np
import torch
import torch.distributed as dist

from graphglue.errors import ConfigError


class Transport(Protocol):
    """Gather one row of integers from every rank. Every rank makes the same calls in the same order."""

    rank: int
    size: int

    def start(self, row: np.ndarray, timeout_s: float) -> None:
        """Send this rank's row. Sync: none.

        Args:
            row: int64[fields], read before this returns.
            timeout_s: how long ``finish`` may wait, in seconds.
        """

    def finish(self, timeout_s: float) -> np.ndarray:
        """Wait for the rows of all: int64[ranks, fields], rewritten by the next gather. Sync: the host waits.

        Raises:
            Exception: a rank did not come in time, or is gone.
        """

    def exchange(self, text: bytes, size: int, timeout_s: float) -> list[bytes]:
        """Gather one text from every rank. For start-up, not for steps. Sync: the host waits.

        Args:
            text: this rank's.
            size: the most bytes that any rank sends; the same on all.
            timeout_s: how long to wait, in seconds.
        """

    def absent(self, call: int, patience_s: float) -> list[int] | None:
        """Find the ranks that did not come to a call that failed; None where nobody can tell.

        Args:
            call: its number, from 1, the same on every rank.
            patience_s: how long to look for stragglers, in seconds.
        """


_SERIALS: defaultdict[str, Iterator[int]] = defaultdict(itertools.count)  # tell the users of one group apart


class TorchTransport:
    """Gather through a process group: one all-gather of one small persistent tensor.

    Host memory is gathered where the group has a backend for it (gloo); else the rows travel through
    device memory, on a stream of their own, so that the gather does not wait for the forward before it. A
    communicator orders all that is launched on it, so where it is the forward's the gather waits all the same.

    Args:
        process_group: None for the default group; where that has no backend for host memory, forwards use its
            communicator as a rule, and each transport makes one of its own over the same ranks.
        num_fields: integers of a row.
        timeout_s: of that communicator, in seconds.

    Raises:
        ConfigError: torch.distributed is not initialised, or this process is not in the group.
    """

    def __init__(self, process_group: dist.ProcessGroup | None, num_fields: int, timeout_s: float) -> None:
        if not dist.is_available() or not dist.is_initialized():
            raise ConfigError("torch.distributed is not initialised; call init_process_group before building RankGroup")
        group: Any = dist.group.WORLD if process_group is None else process_group
        if process_group is None and not _has_host(group):
            group = dist.new_group(timeout=timedelta(seconds=timeout_s))
        self.rank = dist.get_rank(group)
        if self.rank < 0:
            raise ConfigError("this process is no member of the group it was given; build RankGroup on its ranks only")
        self._group = group
        self.size = dist.get_world_size(group)
        self._on_host = _has_host(group)
        self._serial = next(_SERIALS[group.group_name])
        self._options: Any = dist.distributed_c10d.AllgatherOptions()
        with torch.inference_mode(False):
            pinned = not self._on_host
            self._send = torch.zeros(num_fields, dtype=torch.int64, pin_memory=pinned)
            self._received = torch.zeros(self.size, num_fields, dtype=torch.int64, pin_memory=pinned)
            if not self._on_host:
                self._lend_device_memory()
        self._flat = self._received.view(-1)
        self._row, self._rows = self._send.numpy(), self._received.numpy()
        self._timeout_s = 0.0
        self._work: Any = None

    def start(self, row: np.ndarray, timeout_s: float) -> None:
        """Send this rank's row. Sync: none."""
        self._row[:] = row
        if timeout_s != self._timeout_s:
            self._wait_at_most(timeout_s)
        if self._on_host:
            self._work = self._group._allgather_base(self._flat, self._send, self._options)
            return
        with _current(self._stream):
            self._device_send.copy_(self._send, non_blocking=True)
            self._gather(self._device_flat, self._device_send)
            self._received.copy_(self._device_received, non_blocking=True)
            self._done.record(self._stream)

    def finish(self, timeout_s: float) -> np.ndarray:
        """Wait for the rows of all. Sync: the host waits."""
        if self._on_host:
            work, self._work = self._work, None
            work.wait()
            return self._rows
        deadline = time.monotonic() + timeout_s
        while not self._done.query():
            if time.monotonic() > deadline:
                raise TimeoutError(f"the gather did not end within {timeout_s} s")
        return self._rows

    def exchange(self, text: bytes, size: int, timeout_s: float) -> list[bytes]:
        """Gather one text from every rank."""
        self._wait_at_most(timeout_s)
        device = self._send.device if self._on_host else self._device_send.device
        send = torch.zeros(size, dtype=torch.uint8)
        send[: len(text)] = torch.frombuffer(bytearray(text), dtype=torch.uint8) if text else 0
        received = torch.zeros(self.size * size, dtype=torch.uint8, device=device)
        self._gather(received, send.to(device))
        rows = received.cpu().view(self.size, size).numpy()
        return [row.tobytes().rstrip(b"\0") for row in rows]

    def absent(self, call: int, patience_s: float) -> list[int] | None:
        """Ask the group's store who else came to a call: each rank that is left behind leaves a note there."""
        try:
            _, store = dist.distributed_c10d._world.pg_map[self._group]
            notes = [f"graphglue/{self._serial}/{call}/{rank}" for rank in range(self.size)]
            store.set(notes[self.rank], "here")
            deadline = time.monotonic() + patience_s
            while True:
                away = [rank for rank, note in enumerate(notes) if not store.check([note])]
                if not away or time.monotonic() > deadline:
                    return away
                time.sleep(0.02)
        except (RuntimeError, KeyError, ValueError, AttributeError):  # the store went with the rank that held it
            return None

    def _gather(self, received: torch.Tensor, send: torch.Tensor) -> None:
        """Wait for a gather: the host where its memory is gathered, else the current stream."""
        work = self._group._allgather_base(received, send, self._options)
        if work is not None:  # NCCL gives none for what it launched on the current stream
            work.wait()

    def _wait_at_most(self, timeout_s: float) -> None:
        self._options.timeout, self._timeout_s = timedelta(seconds=timeout_s), timeout_s

    def _lend_device_memory(self) -> None:
        """Give a group without a host backend (NCCL) its device twins of the two tensors, and a stream."""
        accelerator: Any = torch.accelerator.current_accelerator()
        device = torch.device(accelerator.type, torch.accelerator.current_device_index())
        self._device_send = torch.zeros_like(self._send, device=device)
        self._device_received = torch.zeros_like(self._received, device=device)
        self._device_flat = self._device_received.view(-1)
        self._stream, self._done = torch.Stream(device), torch.Event(device)
        self._options.asyncOp = False  # on the current stream, not on one that waits for it and that it waits for
        torch.accelerator.synchronize(device)


def _has_host(group: Any) -> bool:
    return torch.device("cpu") in group._device_types


@contextmanager
def _current(stream: torch.Stream) -> Iterator[None]:
    before = torch.accelerator.current_stream(stream.device)
    torch.accelerator.set_stream(stream)
    try:
        yield
    finally:
        torch.accelerator.set_stream(before)
