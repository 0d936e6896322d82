"""The containers that one tensor's contents may come in."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch


def fitting(tensor: torch.Tensor) -> list[Callable[[torch.Tensor], Any]]:
    """List the containers that a CPU tensor's contents may be handed in."""
    found: list[Callable[[torch.Tensor], Any]] = [as_is, at_offset]
    has_array = tensor.dtype != torch.bfloat16
    if has_array:
        found += [as_array, as_array_at_offset, as_read_only]
    if tensor.dim() and tensor.numel():
        found += [torch.Tensor.tolist, as_tuple]
    if tensor.numel() == 1:
        found += [torch.Tensor.item] + ([as_scalar] if has_array else [])
    return found


def as_is(tensor: torch.Tensor) -> torch.Tensor:
    """Hand the tensor in itself."""
    return tensor


def at_offset(tensor: torch.Tensor) -> torch.Tensor:
    """Hand in a part of larger memory."""
    base = torch.zeros(tensor.numel() + 3, dtype=tensor.dtype)
    base[2 : 2 + tensor.numel()] = tensor.reshape(-1)
    return base[2 : 2 + tensor.numel()].view(tensor.shape)


def as_array(tensor: torch.Tensor) -> np.ndarray:
    """Hand in an array over the same memory."""
    return tensor.numpy()


def as_array_at_offset(tensor: torch.Tensor) -> np.ndarray:
    """Hand in an array that is a part of larger memory."""
    return at_offset(tensor).numpy()


def as_read_only(tensor: torch.Tensor) -> np.ndarray:
    """Hand in an array that may not be written."""
    array = tensor.numpy()
    array.flags.writeable = False
    return array


def as_scalar(tensor: torch.Tensor) -> Any:
    """Hand in a numpy scalar."""
    return tensor.numpy().reshape(())[()]


def as_tuple(tensor: torch.Tensor) -> tuple[Any, ...]:
    """Hand in nested Python numbers."""
    return tuple(tensor.tolist())
