"""A stack that nobody used: what a kernel's unset parameters hold is zero there, not what an earlier call left."""

from __future__ import annotations

import contextvars
import itertools
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import TypeVar

import torch

# The C library gives a new thread the stack of an ended one, if it is large enough, and what that thread left near its
# top is still there. So each stack is larger than all before it. Only pages that are touched cost memory.
_STACK_BYTES = itertools.count(64 << 20, 1 << 16)
_lock = threading.Lock()
Result = TypeVar("Result")


def on_fresh_stack(device: torch.device, run: Callable[[], Result]) -> Result:
    """Run a callable on a thread of its own, with the caller's device, default device and context variables.

    Raises:
        BaseException: what the callable raises.

    Sync: the device, before the callable runs.
    """
    context, default = contextvars.copy_context(), torch.get_default_device()
    results: list[Result] = []
    errors: list[BaseException] = []

    def body() -> None:
        try:
            with _surroundings(device, default):
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
