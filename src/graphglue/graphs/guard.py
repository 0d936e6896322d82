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

import gc
import os
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass
from numbers import Number
from types import FrameType
from typing import Any, NamedTuple, NoReturn

import torch
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from graphglue.errors import CaptureError


class Call(NamedTuple):
    """One intercepted call, as the table's conditions see it."""

    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    device: torch.device
    baked: dict[int, torch.UntypedStorage]


def _on_device(call: Call) -> bool:
    return bool(call.args) and isinstance(call.args[0], torch.Tensor) and _is_there(call.args[0], call)


def _is_there(tensor: torch.Tensor, call: Call) -> bool:
    # On the tape host constants and device tensors share one device; the baked ones are the host's.
    if tensor.device.type != call.device.type:
        return False
    return tensor.device.type != "cpu" or tensor.untyped_storage()._cdata not in call.baked


def _on_tape(call: Call) -> bool:
    return call.device.type == "cpu"


def _holds_rows(call: Call) -> bool:
    return bool(call.args[0].dim())


def _host_values(call: Call) -> bool:
    """Tell whether torch.tensor and the like are given more than one plain number for the host."""
    source = call.args[0] if call.args else call.kwargs.get("data", call.kwargs.get("obj"))
    number = isinstance(source, Number) or getattr(source, "ndim", None) == 0
    return isinstance(source, torch.Tensor) or not number or call.kwargs.get("device") is not None


def _host_sequence(call: Call) -> bool:
    source = call.args[0] if call.args else call.kwargs.get("data", call.kwargs.get("obj"))
    return not isinstance(source, torch.Tensor) and _host_values(call)


def _host_list(call: Call) -> bool:
    """Tell whether an index holds a list or an array, which torch first turns into a device tensor."""
    index = call.args[1] if isinstance(call.args[1], tuple) else call.args[1:2]
    arrays = (part for part in index if not isinstance(part, torch.Tensor))
    return any(isinstance(part, (list, range)) or getattr(part, "ndim", 0) for part in arrays)


def _masks(call: Call) -> bool:
    indices = [index for index in call.args[1] if index is not None]
    return any(index.dtype in (torch.bool, torch.uint8) for index in indices)


def _host_index(call: Call) -> bool:
    indices = [index for index in call.args[1] if index is not None]
    return call.args[0].is_cuda and any(index.device.type == "cpu" and index.dim() for index in indices)


def _masks_many(call: Call) -> bool:
    return _masks(call) and (call.args[2].numel() != 1 or any(call.args[3:4]))


def _masks_device_value(call: Call) -> bool:
    return _masks(call) and _is_there(call.args[2], call)


def _device_value(call: Call) -> bool:
    return isinstance(call.args[-1], torch.Tensor) and _is_there(call.args[-1], call)


def _host_operand(call: Call) -> bool:
    there = [_is_there(operand, call) for operand in call.args if isinstance(operand, torch.Tensor)]
    return any(there) and not all(there)


def _lacks_size(call: Call) -> bool:
    # The overload that counts takes repeats alone; the others end in it.
    return len(call.args) == 1 and call.kwargs.get("output_size") is None


def _lacks_classes(call: Call) -> bool:
    return (call.args[1] if len(call.args) > 1 else call.kwargs.get("num_classes", -1)) < 0


def _uploads(call: Call) -> bool:
    """Tell whether ``copy_(device, host)`` or ``_to_copy(host, device=)`` moves more than one number."""
    source = call.args[1] if len(call.args) > 1 else call.args[0]
    target = call.args[0].device if len(call.args) > 1 else call.kwargs.get("device")
    if target is None or source.device.type != "cpu" or not source.dim():
        return False
    return torch.device(target).type == "cuda"


def _downloads(call: Call) -> bool:
    target = call.kwargs.get("device")
    return target is not None and torch.device(target).type == "cpu" and call.args[0].is_cuda


def _always(call: Call) -> bool:
    return True


@dataclass(frozen=True)
class Rule:
    """What is refused (functions, ``aten::`` operations, tags), why, and what to write instead."""

    what: tuple[str | torch.Tag, ...]
    why: str
    instead: str
    when: Callable[[Call], bool] = _always


_READ = "reads a tensor on the host, and a replay runs no Python: what was read now would stay for ever"
_KEEP = "keep the value on the device (torch.where, gather), or let plan() compute it and pass it as a slot"
_SHAPE = "gives a result whose shape depends on contents, and a recording has fixed shapes"
_FIXED = "use torch.where with the mask, or state the size (nonzero_static, output_size=, num_classes=)"
_UPLOAD = "takes contents from host memory, which is gone or out of date when a replay runs"
_DECLARE = (
    "make the tensor once, outside, and pass it in as a table or a slot; torch.arange, torch.full and"
    " Python numbers are fine"
)
_COUNT = "has to count a boolean mask on the host to write several values through it"
_VALUE = "reads its one-element value on the host"
_WHERE = "use torch.where(mask, values, target)"

RULES: tuple[Rule, ...] = (
    Rule(("item", "tolist", "numpy", "__array__", "__dlpack__", "cpu"), _READ, _KEEP, _on_device),
    Rule(("__bool__", "__int__", "__float__", "__complex__", "__index__"), _READ, _KEEP, _on_device),
    Rule(("__repr__", "__format__", "__contains__"), _READ, _KEEP, _on_device),
    Rule(("__deepcopy__", "__reduce_ex__"), _READ, "use clone()", _on_device),
    Rule(("equal", "allclose", "is_nonzero"), _READ, _KEEP, _on_device),
    Rule(("tensor", "new_tensor"), _UPLOAD, _DECLARE, _host_values),
    Rule(("as_tensor", "asarray"), _UPLOAD, _DECLARE, _host_sequence),
    Rule(("__getitem__", "__setitem__"), _UPLOAD, _DECLARE, _host_list),
    Rule(("pin_memory",), _UPLOAD, _DECLARE),
    Rule(
        ("data_ptr",),
        "hands out an address, and a kernel launched by address escapes the tape",
        "use torch operations, or record on CUDA",
        _on_tape,
    ),
    Rule(("aten::_local_scalar_dense", "aten::equal", "aten::allclose"), _READ, _KEEP, _on_device),
    Rule((torch.Tag.data_dependent_output,), _READ, _KEEP),
    Rule(("aten::index",), _SHAPE, _FIXED, _masks),
    Rule(("aten::repeat_interleave",), _SHAPE, _FIXED, _lacks_size),
    Rule(("one_hot", "aten::one_hot"), _SHAPE, _FIXED, _lacks_classes),
    Rule((torch.Tag.dynamic_output_shape,), _SHAPE, _FIXED),
    Rule(("aten::lift_fresh", "aten::lift_fresh_copy"), _UPLOAD, _DECLARE, _holds_rows),
    Rule(("aten::_to_copy", "aten::copy_"), _UPLOAD, _DECLARE, _uploads),
    Rule(("aten::_to_copy",), _READ, _KEEP, _downloads),
    Rule(("aten::index", "aten::index_put", "aten::index_put_"), _UPLOAD, _DECLARE, _host_index),
    Rule(("aten::where",), _UPLOAD, "pass the number itself, torch.where(mask, values, 0)", _host_operand),
    Rule(("aten::index_put", "aten::index_put_", "aten::_index_put_impl_"), _COUNT, _WHERE, _masks_many),
    Rule(("aten::index_put", "aten::index_put_"), _VALUE, _WHERE, _masks_device_value),
    Rule(("aten::masked_fill", "aten::masked_fill_"), _VALUE, _WHERE, _device_value),
    Rule(("aten::index_fill", "aten::index_fill_"), _VALUE, "pass a Python number", _device_value),
)
# What torch calls the step that ends torch.Tensor([..]), from_numpy and the like says nothing to a user.
_SHOWN = {"aten::lift_fresh": "a tensor of host values"}
_BY_NAME: dict[str | torch.Tag, tuple[Rule, ...]] = {
    name: tuple(rule for rule in RULES if name in rule.what) for rule in RULES for name in rule.what
}


class Guard:
    """Remember what one recording refused, what Python is calling, and which constants were baked."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.refusal: CaptureError | None = None
        self.calling = ""
        self.baked: dict[int, torch.UntypedStorage] = {}

    def check(self, keys: tuple[str | torch.Tag, ...], args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Raise ``CaptureError`` if a rule of the first known key holds: the name, else its tags."""
        rules = next((_BY_NAME[key] for key in keys if key in _BY_NAME), ())
        call = Call(args, kwargs, self.device, self.baked)
        for rule in rules:
            if rule.when(call):
                self.refuse(str(keys[0]), rule.why, rule.instead)

    def refuse(self, name: str, why: str, instead: str) -> NoReturn:
        """Raise the error, and keep it for a callable that swallows it."""
        name = _SHOWN.get(name, name)
        if self.calling and self.calling not in name:
            name = f"{self.calling} ({name})"
        self.refusal = CaptureError(f"{name} {why}. At {where(sys._getframe())}; instead, {instead}.")
        raise self.refusal

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


@contextmanager
def plain() -> Iterator[None]:
    """Allocate normal tensors: outside inference mode, without gradients."""
    with torch.inference_mode(False), torch.no_grad():
        yield


def place(storage: torch.UntypedStorage, like: torch.Tensor) -> torch.Tensor:
    """Make a tensor on ``storage`` with the dtype and geometry of ``like``, and no other tie to it."""
    tensor = torch.empty(0, dtype=like.dtype, device=like.device)
    tensor.set_(storage, like.storage_offset(), like.size(), like.stride())
    tensor = tensor.conj() if like.is_conj() else tensor
    return torch._neg_view(tensor) if like.is_neg() else tensor


_here = threading.local()


@contextmanager
def alone(what: str) -> Iterator[None]:
    """Refuse a second ``session`` or ``recording`` inside the first, in one thread."""
    for name in {"recording", what}:
        if getattr(_here, name, False):
            raise CaptureError(f"a {name} is already under way in this thread; end it before this {what}")
    setattr(_here, what, True)
    try:
        yield
    finally:
        setattr(_here, what, False)


def recording() -> bool:
    """Tell whether this thread is inside a recording."""
    return bool(getattr(_here, "recording", False))


_gc_lock = threading.Lock()
_gc_holders = 0
_gc_was_enabled = False


@contextmanager
def held_collection() -> Iterator[None]:
    """Hold garbage collection back; the last holder of all threads restores it.

    A collection inside a capture may destroy an older graph, which the device does not allow then: the
    capture is invalidated. It may also free memory, or run foreign finalisers.
    """
    global _gc_holders, _gc_was_enabled
    with _gc_lock:
        if not _gc_holders:
            _gc_was_enabled = gc.isenabled()
            gc.disable()
        _gc_holders += 1
    try:
        yield
    finally:
        with _gc_lock:
            _gc_holders -= 1
            if not _gc_holders and _gc_was_enabled:
                gc.enable()
