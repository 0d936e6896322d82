"""What a thread has switched on around a call: gradients, inference mode, autocast and default device.

A break runs at every replay as it ran while it was recorded, whatever the caller of the replay has switched on.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from typing import NamedTuple

import torch
from torch._C import _len_torch_function_stack
from torch.overrides import _get_current_function_mode_stack, _pop_mode, _push_mode
from torch.utils._device import DeviceContext
from torch.utils._python_dispatch import _disable_current_modes


class Ambient(NamedTuple):
    """What is switched on."""

    grad: bool
    inference: bool
    device: torch.device | None
    autocast: tuple[tuple[str, bool, torch.dtype], ...]

    @classmethod
    def here(cls, device_type: str) -> Ambient:
        """Take down what is on now in this thread, for work on the CPU and on a type of device."""
        modes = reversed(_get_current_function_mode_stack())
        device = next((mode.device for mode in modes if isinstance(mode, DeviceContext)), None)
        kinds = tuple(_autocast_of(kind) for kind in dict.fromkeys(("cpu", device_type)))
        return cls(torch.is_grad_enabled(), torch.is_inference_mode_enabled(), device, kinds)

    @property
    def is_on(self) -> bool:
        """Whether it is on in this thread; the same as to compare with ``here``, and faster, for every replay."""
        if self.device is not None or _len_torch_function_stack():
            return Ambient.here(self.autocast[-1][0]) == self
        return (
            torch.is_grad_enabled() is self.grad
            and torch.is_inference_mode_enabled() is self.inference
            and all(_autocast_of(kind[0]) == kind for kind in self.autocast)
        )

    def on(self) -> AbstractContextManager[None]:
        """Switch it on again. Sync: none."""
        return nullcontext() if self.is_on else self._switched(Ambient.here(self.autocast[-1][0]))

    @contextmanager
    def _switched(self, now: Ambient) -> Iterator[None]:
        with ExitStack() as stack:
            if self.inference != now.inference:
                stack.enter_context(torch.inference_mode(self.inference))
            stack.enter_context(torch.set_grad_enabled(self.grad))
            for wanted, current in zip(self.autocast, now.autocast):
                if wanted != current:
                    kind, enabled, dtype = wanted
                    stack.enter_context(torch.autocast(kind, dtype=dtype, enabled=enabled))
            if self.device != now.device:
                stack.enter_context(torch.device(self.device or "cpu"))
            yield  # the default dtype is the process's, not the thread's: setting it reaches other threads


def _autocast_of(kind: str) -> tuple[str, bool, torch.dtype]:
    return kind, torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind)


@contextmanager
def without_modes() -> Iterator[None]:
    """Take all function and dispatch modes of this thread off, and put them back."""
    taken = []
    with _disable_current_modes():
        try:
            while _get_current_function_mode_stack():
                taken.append(_pop_mode())
            yield
        finally:
            for mode in reversed(taken):
                _push_mode(mode)
