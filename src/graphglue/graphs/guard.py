"""Refuse, while recording, what a replay could not repeat: one table, and the two modes that consult it.

Python sees some calls only (``tolist`` dispatches no operation), the dispatcher sees others only (an
index that reads its own bounds), so a recording runs under both: ``FunctionGuard`` outside and a
``DispatchGuard`` inside. Both look names up in ``RULES`` and neither has rules of its own. What a
callable refuses stays refused: a swallowed ``CaptureError`` is raised again when the callable returns.

Known limits: ``torch.frombuffer`` and ``torch.from_dlpack`` tell neither mode that they ran; on CUDA
their upload is refused, on the tape their contents stay as they were. ``nn.TransformerEncoderLayer``
and ``nn.MultiheadAttention`` leave their fused path under any function mode, so they round differently.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from contextlib import AbstractContextManager, ExitStack
from types import FrameType
from typing import Any, NoReturn

import torch
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from graphglue.errors import CaptureError, GraphGlueError
from graphglue.graphs.rules import BY_NAME, SHOWN, Call


class Guard:
    """Remember what one recording refused, what Python is calling, and which constants were baked."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.refusal: GraphGlueError | None = None
        self.calling = ""
        self.baked: dict[int, torch.UntypedStorage] = {}

    def check(self, keys: tuple[str | torch.Tag, ...], args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Raise ``CaptureError`` if a rule of the first known key holds: the name, else its tags."""
        rules = next((BY_NAME[key] for key in keys if key in BY_NAME), ())
        call = Call(args, kwargs, self.device, self.baked)
        for rule in rules:
            if rule.when(call):
                self.refuse(str(keys[0]), rule.why, rule.instead)

    def refuse(self, name: str, why: str, instead: str) -> NoReturn:
        """Raise the error, and keep it for a callable that swallows it."""
        self.refusal = CaptureError(f"{self.named(name)} {why}. At {where(sys._getframe())}; instead, {instead}.")
        raise self.refusal

    def named(self, name: str) -> str:
        """Name an operation as its author wrote it: with what Python is calling, where that is something else."""
        name = SHOWN.get(name, name)
        return f"{self.calling} ({name})" if self.calling and self.calling not in name else name

    def call(self, run: Callable[[], Any], *modes: AbstractContextManager[Any]) -> Any:
        """Run a callable under ``modes``, without gradients; its errors come out as ``CaptureError``."""
        try:
            with ExitStack() as stack:
                for mode in (torch.no_grad(), *modes):
                    stack.enter_context(mode)
                result = run()
        except Exception as error:
            if error is self.refusal:
                raise
            text = str(self.refusal) if self.refusal else f"the callable raised at {blame(error)}: {error!r}"
            raise CaptureError(text) from error
        if self.refusal is not None:
            raise self.refusal
        return result


class FunctionGuard(TorchFunctionMode):
    """Check what Python calls."""

    def __init__(self, guard: Guard) -> None:
        super().__init__()
        self._guard = guard

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        name = getattr(func, "__name__", "")
        self._guard.check((name,), args, kwargs)
        if name == "one_hot" and self._guard.device.type == "cpu":
            func = _one_hot
        outer, self._guard.calling = self._guard.calling, name
        try:
            return func(*args, **kwargs)
        finally:
            self._guard.calling = outer


def _one_hot(tensor: torch.Tensor, num_classes: int = -1) -> torch.Tensor:
    """Give what torch's one_hot gives on CUDA; the CPU's own reads the range of ``tensor`` on the host."""
    return (tensor.unsqueeze(-1) == torch.arange(num_classes, device=tensor.device)).to(torch.int64)


class DispatchGuard(TorchDispatchMode):
    """Check what reaches the dispatcher, and hand each plain operation to ``perform``."""

    def __init__(self, guard: Guard) -> None:
        super().__init__()
        self._guard = guard

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if any(kind is not torch.Tensor for kind in types):
            return NotImplemented  # a tensor subclass unwraps itself first, and its parts come back here
        with torch._C.DisableTorchFunction():
            self._guard.check((func._schema.name, *func.tags), args, kwargs)
            # Under inference mode composite operations arrive whole; their parts are what counts.
            if torch._C._dispatch_has_kernel_for_dispatch_key(func.name(), "CompositeImplicitAutograd"):
                with self:
                    return func.decompose(*args, **kwargs)
            if func._schema.name == "aten::lift_fresh":
                storage = args[0].untyped_storage()
                self._guard.baked[storage._cdata] = storage
            return self.perform(func, args, kwargs)

    def perform(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run one operation; a subclass may do something else with it."""
        return func(*args, **kwargs)


_PACKAGE = os.path.dirname(os.path.dirname(os.path.abspath(__file__))) + os.sep
_AUTHORS = tuple(os.path.join(_PACKAGE, name) + os.sep for name in ("preps", "demo"))
_TORCH = os.path.dirname(os.path.abspath(torch.__file__)) + os.sep
_STDLIB = os.path.dirname(os.path.abspath(os.__file__)) + os.sep


def _is_user(frame: FrameType) -> bool:
    """Tell whether a frame is outside torch, numpy, Python itself and graphglue (its preps are users)."""
    name = frame.f_code.co_filename
    if name.startswith((_TORCH, "<frozen")) or f"{os.sep}numpy{os.sep}" in name:
        return False
    if name.startswith(_STDLIB):
        return "-packages" in name
    return name.startswith(_AUTHORS) or not name.startswith(_PACKAGE)


def where(frame: FrameType | None) -> str:
    """Name the innermost user line at or above ``frame``."""
    while frame is not None and not _is_user(frame):
        frame = frame.f_back
    if frame is None:
        return "an unknown place"
    return f"{frame.f_code.co_filename}:{frame.f_lineno} in {frame.f_code.co_name}"


def blame(error: BaseException) -> str:
    """Name the innermost user line that an error passed through."""
    place, trace = "an unknown place", error.__traceback__
    while trace is not None:
        if _is_user(trace.tb_frame):
            code = trace.tb_frame.f_code
            place = f"{code.co_filename}:{trace.tb_lineno} in {code.co_name}"
        trace = trace.tb_next
    return place
