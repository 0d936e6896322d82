"""Binding: hold one step's sources against the slots, before anything is written.

``bind_source`` decides with values what the fill will do with one slot. All checks are here, so a
refused batch has written nothing.
"""

from __future__ import annotations

import functools
import numbers
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch._subclasses.fake_tensor import FakeTensor

from graphglue.core.slots import Axis, Number, PadValue, Slot, kind_of, widens
from graphglue.errors import BindError

# The ones that torch lacks are refused.
_TORCH_DTYPES = {
    np.dtype(name): getattr(torch, name)
    for name in ("bool", "uint8", "uint16", "uint32", "uint64", "int8", "int16", "int32", "int64")
    + ("float16", "float32", "float64")
}


@dataclass(slots=True)
class Write:
    """Say what the fill does with one slot.

    Rows [0, raw) take ``source``: a tensor of exactly that extent, a number, or None where they
    hold the right values already (the source is the slot's own view). Rows [raw, rows) take
    ``pad``; REPEAT_LAST repeats row raw - 1, and is 0 where there is none.
    """

    slot: Slot
    source: torch.Tensor | Number | None
    raw: int
    rows: int
    pad: PadValue


def bind_source(slot: Slot, source: Any, raw: int, rows: int, device: torch.device) -> Write:
    """Check one source against its slot and return what the fill will do.

    Args:
        slot: the slot.
        source: a tensor on ``device`` or the CPU, a numpy array, a list or tuple, or a number
            where one element is expected.
        raw: real rows of this step.
        rows: rows of the bucket.
        device: the device of the slots.

    Raises:
        BindError: dtype, extent, device, stride or kind is off.
    """
    if isinstance(source, torch.Tensor):
        tensor = _checked_tensor(slot, source, device)
    elif isinstance(source, np.ndarray):
        tensor = _from_array(slot, source)
    elif isinstance(source, (int, float, np.generic)):
        return Write(slot, _single(slot, source, raw), raw, rows, slot.pad)
    elif isinstance(source, (list, tuple, range)):
        tensor = _from_list(slot, source)
    else:
        raise _fault(slot, f"a {type(source).__name__}", "a tensor, a numpy array, a list or a number")
    expected = slot.shape(raw)
    if tensor.shape != expected:
        raise _fault(
            slot,
            f"extent {tuple(tensor.shape)}",
            f"exactly {expected}, the real extent on axis {Axis(slot.axis).value}: nothing is cut, padded or broadcast",
        )
    return Write(slot, tensor, raw, rows, slot.pad)


def _checked_tensor(slot: Slot, tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    if tensor.device != device and tensor.device.type != "cpu":
        raise _fault(slot, f"a tensor on {tensor.device}", f"one on {device} or the CPU; move it first")
    if tensor.layout is not torch.strided:
        raise _fault(slot, f"a tensor of layout {tensor.layout}", "a strided one; call .to_dense()")
    if isinstance(tensor, FakeTensor):
        raise _fault(slot, "a fake tensor, which has no contents", "a real one")
    if tensor.is_neg():
        raise _fault(slot, "a tensor with torch's negative bit", "plain values in memory; call .resolve_neg()")
    _check_dtype(slot, tensor.dtype)
    if not tensor.is_contiguous():
        seen = f"of strides {tensor.stride()} for shape {tuple(tensor.shape)}"
        raise _fault(slot, seen, "a contiguous source; call .contiguous()")
    if tensor.device.type == "cpu" and not widens(tensor.dtype, slot.dtype):
        exact = tensor.detach() if kind_of(tensor.dtype) == "integer" else tensor.detach().to(torch.float64)
        _check_range(slot, exact.numpy())
    return tensor


def _from_array(slot: Slot, array: np.ndarray) -> torch.Tensor:
    if isinstance(array, np.ma.MaskedArray):
        raise _fault(slot, "a masked array", "a plain one; its masked elements would be written; call .filled(value)")
    dtype = _TORCH_DTYPES.get(array.dtype.newbyteorder("="))
    if dtype is None:
        raise _fault(slot, f"a numpy array of dtype {array.dtype}", f"{slot.dtype} or a dtype that widens to it")
    _check_dtype(slot, dtype)
    if not array.flags.c_contiguous or not array.dtype.isnative:
        seen = f"a numpy array of strides {array.strides} and dtype {array.dtype.str}"
        raise _fault(slot, seen, "a contiguous one in native byte order; call np.ascontiguousarray")
    if not widens(dtype, slot.dtype):
        _check_range(slot, array)
    # torch warns about arrays it could write through, and refuses odd strides of single rows; such copies are rare.
    plain = array.flags.writeable and all(stride >= 0 and stride % array.itemsize == 0 for stride in array.strides)
    return _tensor_of(array if plain else np.array(array))


def _from_list(slot: Slot, values: Iterable[Any]) -> torch.Tensor:
    """Build a CPU tensor of the slot's dtype; Python numbers carry no width, so values must fit."""
    try:
        array = np.asarray(values)
    except (ValueError, TypeError, RuntimeError, OverflowError):  # rows of different lengths, or no numbers at all
        array = np.empty(0, object)
    if array.size == 0 and array.dtype != object:
        return torch.empty(array.shape, dtype=slot.dtype, device="cpu")
    kind = {"b": "bool", "i": "integer", "u": "integer", "f": "float"}.get(array.dtype.kind)
    if kind != kind_of(slot.dtype):
        raise _fault(
            slot,
            f"a list of {'mixed or nested values' if kind is None else kind + 's'}",
            f"numbers of kind {kind_of(slot.dtype)}, for {slot.dtype}",
        )
    if kind != "bool":
        _check_range(slot, array)
    return _tensor_of(array).to(slot.dtype)


def _tensor_of(array: np.ndarray) -> torch.Tensor:
    # numpy makes large integers "unsigned long long", which is uint64 by a name that torch does not take.
    return torch.from_numpy(array.view("u8") if array.dtype.char == "Q" else array)


def _single(slot: Slot, number: Any, raw: int) -> Number:
    shape = slot.shape(raw)
    if torch.Size(shape).numel() != 1:
        raise _fault(slot, f"the number {number!r}", f"values of extent {shape}; a number fits one element only")
    if isinstance(number, np.generic):
        _check_dtype(slot, _TORCH_DTYPES.get(number.dtype, torch.complex64))
        number = number.item()
    kind = "bool" if isinstance(number, bool) else "integer" if isinstance(number, numbers.Integral) else "float"
    if kind != kind_of(slot.dtype):
        raise _fault(slot, f"the number {number!r}", f"a number of kind {kind_of(slot.dtype)}, for {slot.dtype}")
    if kind != "bool":
        _check_range(slot, np.asarray([number]))
    return int(number) if kind == "integer" else number


def _check_dtype(slot: Slot, dtype: torch.dtype) -> None:
    if dtype is slot.dtype or dtype in slot.accepts or widens(dtype, slot.dtype):
        return
    if kind_of(dtype) == kind_of(slot.dtype):
        advice = f"{slot.dtype} or a dtype that widens to it; convert it, or declare accepts=({dtype},) on the slot"
    else:
        advice = f"a dtype of kind {kind_of(slot.dtype)}, for {slot.dtype}; convert it first"
    raise _fault(slot, f"dtype {dtype}", advice)


def _check_range(slot: Slot, values: np.ndarray) -> None:
    """Refuse host values that the slot's dtype would change beyond rounding; device values can't be seen."""
    low: float
    high: float
    if kind_of(slot.dtype) == "integer":
        low, high = torch.iinfo(slot.dtype).min, torch.iinfo(slot.dtype).max
    else:
        high = torch.finfo(slot.dtype).max
        low, finite = -high, np.isfinite(values)
        if not _holds_infinity(slot.dtype) and np.isinf(values).any():
            raise _fault(slot, "an infinity", f"values that {slot.dtype} holds; it has no infinity")
        values = values[finite]
    if values.size and (values.min() < low or values.max() > high):
        raise _fault(
            slot, f"values from {values.min()} to {values.max()}", f"values that {slot.dtype} holds, {low} to {high}"
        )


@functools.cache
def _holds_infinity(dtype: torch.dtype) -> bool:
    return bool(torch.tensor(float("inf"), device="cpu").to(dtype).to(torch.float32).isinf())


def _fault(slot: Slot, seen: str, expected: str) -> BindError:
    return BindError(f"slot {slot.name!r}: the source is {seen}; expected {expected}")
