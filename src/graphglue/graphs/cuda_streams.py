"""Capture streams, and the memory of what cuBLAS keeps for each of them.

A captured matrix product reads and writes the workspace that torch keeps for a thread's cuBLAS handle and a stream. It
lies in torch's general memory and is dropped when anybody asks: ``torch.compile``'s CUDA graphs do, and from torch 2.12
on each reset of a graph does, for the stream that it was captured on (pytorch#193402). Replays then write what lies
there next, or fault. So it is claimed from a pool that is never given back, before anything runs on the stream; and a
stream is lent to one borrower at a time, so that what runs side by side has workspaces of its own.
"""

from __future__ import annotations

import threading
import weakref

import torch

from graphglue.errors import CaptureError
from graphglue.graphs import memory

_free: dict[int, list[torch.cuda.Stream]] = {}  # by device; as many as there were borrowers at one time
_pools: dict[int, torch.cuda.MemPool] = {}  # by device
# Torch refuses a pool that another thread allocates from, and counts the refused one as its user from then on.
_claiming = threading.Lock()


class Lease:
    """The use of a stream; recordings that were captured on it keep it.

    Args:
        device: where.
        stream: the engine's own; one that nobody else uses by default.
    """

    def __init__(self, device: torch.device, stream: torch.cuda.Stream | None = None) -> None:
        self.device = device
        if stream is not None:
            self.stream = stream
            return
        free = _free.setdefault(device.index, [])
        try:
            self.stream = free.pop()
        except IndexError:
            self.stream = _made(device)
        weakref.finalize(self, free.append, self.stream)  # without a lock: it may run anywhere

    def claim_workspaces(self) -> None:
        """Make this thread's workspaces of the stream where nothing else is allocated; leave those that are there.

        Sync: none. The calling thread is not capturing, and allocates from no other pool of the user's.
        """
        with _claiming, torch.cuda.device(self.device):
            pool = _pools.get(self.device.index)
            if pool is None:
                pool = _pools[self.device.index] = torch.cuda.MemPool()
            with torch.cuda.stream(self.stream), torch.cuda.use_mem_pool(pool, self.device), memory.plain():
                torch.cuda.current_blas_handle()
                self._use_bias()

    def _use_bias(self) -> None:
        """Compute a product with a bias: cublasLt has a workspace of its own where torch is told so."""
        ones = torch.ones(16, 16, dtype=torch.float16, device=self.device)
        try:
            with torch.autocast("cuda", enabled=False):
                torch.addmm(ones[0], ones, ones)
        except RuntimeError as error:
            # Where only deterministic algorithms are allowed and this is not set, torch refuses everybody's products.
            if "CUBLAS_WORKSPACE_CONFIG" not in str(error):
                raise


def _made(device: torch.device) -> torch.cuda.Stream:
    """Make a stream of the driver's; torch has 32, which it gives to all who ask in turn."""
    try:
        from cuda.bindings import driver
    except ImportError:  # they come for Linux only; steps are launched part by part then, and may share a workspace
        return torch.cuda.Stream(device)
    with torch.cuda.device(device):
        torch.cuda.current_stream().query()  # makes the device's context, and makes it current
        failed, handle = driver.cuStreamCreate(int(driver.CUstream_flags.CU_STREAM_NON_BLOCKING))
    if int(failed):
        raise CaptureError(f"the CUDA driver made no stream to capture on: {failed!r}")
    return torch.cuda.ExternalStream(int(handle), device)
