"""A stack that nobody used: what a kernel's unset parameters hold is zero there, not what an earlier call left."""

from __future__ import annotations

import contextvars
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import TypeVar

import torch

_STACK_BYTES = 64 << 20  # more than the C library keeps for reuse, so its pages are new; only touched ones cost memory
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
        if default.type != "cpu":
            stack.enter_context(default)
        yield


def _start(thread: threading.Thread) -> None:
    """Start a thread with a large stack; the size for others is put back."""
    with _lock:
        usual = threading.stack_size(_STACK_BYTES)
        try:
            thread.start()
        finally:
            threading.stack_size(usual)
