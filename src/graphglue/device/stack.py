"""A clean stack: what a kernel's unset parameters hold is zero there, not what an earlier call left.

A launch copies a whole struct from the stack, the fields that nobody set among them. They hold what was there: often
an address that an earlier operation worked with, or half of one.
"""

from __future__ import annotations

import contextvars
import ctypes
import functools
import itertools
import mmap
import os
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from typing import Any, TypeVar

import torch
from torch.utils._python_dispatch import TorchDispatchMode

# The C library gives a new thread the stack of an ended one, if it is large enough, and what that thread left near its
# top is still there. So each stack is larger than all before it. Only pages that are touched cost memory.
_STACK_BYTES = itertools.count(64 << 20, 1 << 16)
_SWEPT_BYTES = 4 << 20  # deeper than an operation goes
_KEPT_BYTES = 16 << 10  # the frame of the call that sweeps lies there
_URC_NORMAL_STOP = 4  # ends the walk at the first frame. Source: the C++ ABI's exception handling, level I
_STEP = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_void_p, ctypes.c_void_p)
_lock = threading.Lock()
Result = TypeVar("Result")


def on_fresh_stack(device: torch.device, run: Callable[[], Result], sweep: bool = True) -> Result:
    """Run a callable on a thread of its own, with the caller's device, default device and context variables.

    Args:
        device: the device that is current there.
        run: what runs.
        sweep: give each operation that torch dispatches stack memory that holds zeros; else only the first call of
            each depth finds zeros. The sweep is a dispatch mode, under which compiled code may run uncompiled.

    Raises:
        BaseException: what the callable raises.

    Sync: the device, before the callable runs.
    """
    context, default = contextvars.copy_context(), torch.get_default_device()
    results: list[Result] = []
    errors: list[BaseException] = []

    def body() -> None:
        try:
            with _surroundings(device, default), _Swept() if sweep else nullcontext():
                results.append(context.run(run))
        except BaseException as error:  # it goes on in the caller's thread
            errors.append(error)

    thread = threading.Thread(target=body, name="graphglue-fresh-stack")
    _start(thread)
    thread.join()
    if errors:
        raise errors[0]
    return results[0]


@contextmanager
def _surroundings(device: torch.device, default: torch.device) -> Iterator[None]:
    with ExitStack() as stack:
        if device.type == "cuda":
            stack.enter_context(torch.cuda.device(device))
            torch.cuda.synchronize(device)  # makes the context current here, which a kernel of one's own may need
            torch.cuda.current_blas_handle()  # each thread has its own, which can not be made while a graph is captured
        if default.type != "cpu":
            stack.enter_context(default)
        yield


def _start(thread: threading.Thread) -> None:
    """Start a thread with a stack of a size not asked for before; the size for others is put back."""
    with _lock:
        usual = threading.stack_size(next(_STACK_BYTES))
        try:
            thread.start()
        finally:
            threading.stack_size(usual)


class _Swept(TorchDispatchMode):
    """Run each operation below everything that earlier ones wrote, on pages given back to the system."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        begin = _sweep()
        return _below(begin, lambda: func(*args, **(kwargs or {})))


def _sweep() -> int:
    """Give the pages below this call back, so that they read as zeros; tell where they end.

    Raises:
        OSError: the system does not take them.
    """
    end = (frame_address() - _KEPT_BYTES) & -mmap.PAGESIZE
    libc = ctypes.CDLL(None, use_errno=True)
    begin = ctypes.c_void_p(end - _SWEPT_BYTES)
    if libc.madvise(begin, ctypes.c_size_t(_SWEPT_BYTES), mmap.MADV_DONTNEED):
        raise OSError(ctypes.get_errno(), f"stack pages can not be given back: {os.strerror(ctypes.get_errno())}")
    return end


def _below(address: int, run: Callable[[], Result]) -> Result:
    """Call from a frame below an address of this thread's stack."""
    if frame_address() < address:
        return run()
    # A call through C takes stack memory, which one of Python's own does not.
    return next(_below(address, again) for again in (run,))


def frame_address() -> int:
    """Give an address in the stack frame of this call, by the unwinder of the compiler's runtime library."""
    unwinder, found = _unwinder(), []

    def step(context: int, _: int) -> int:
        found.append(unwinder._Unwind_GetCFA(context))
        return _URC_NORMAL_STOP

    unwinder._Unwind_Backtrace(_STEP(step), None)
    return int(found[0])


@functools.cache
def _unwinder() -> ctypes.CDLL:
    library = ctypes.CDLL("libgcc_s.so.1")
    library._Unwind_GetCFA.restype = ctypes.c_size_t
    library._Unwind_GetCFA.argtypes = [ctypes.c_void_p]
    return library
