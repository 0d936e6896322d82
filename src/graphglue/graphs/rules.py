"""What a recording refuses, why, and what to write instead: one table."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from numbers import Number
from typing import Any, NamedTuple

import torch


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
SHOWN = {"aten::lift_fresh": "a tensor of host values"}
BY_NAME: dict[str | torch.Tag, tuple[Rule, ...]] = {
    name: tuple(rule for rule in RULES if name in rule.what) for rule in RULES for name in rule.what
}
