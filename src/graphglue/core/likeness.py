"""Likeness: tell in one call whether tensors are still what they were when they were checked."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

try:  # torch's own guards compare any number of tensors in one C++ call; 0.5 us for five, against 5 us here
    from torch._C._dynamo.guards import TensorGuards
except ImportError:  # not part of torch's public API, so it may go
    TensorGuards = None  # type: ignore[assignment,misc]


class Likeness:
    """Remember the type, dtype, device, shape and strides of checked tensors.

    ``holds(*tensors)`` may say False for tensors that are fine (the same tensor twice, another inference
    mode): the caller then checks them one by one. It never says True for ones that are not.
    """

    __slots__ = ("_seen", "holds")

    holds: Callable[..., bool]

    def __init__(self, tensors: Sequence[torch.Tensor]) -> None:
        self._seen = [_look(tensor) for tensor in tensors]
        self.holds = self._compare
        if TensorGuards is not None and tensors:
            anything: Any = [[None] * tensor.dim() for tensor in tensors]
            guards = TensorGuards(*tensors, dynamic_dims_sizes=anything, dynamic_dims_strides=anything)
            self.holds = guards.check  # called straight: one more Python call would cost as much as the check

    def _compare(self, *tensors: torch.Tensor) -> bool:
        return len(tensors) == len(self._seen) and all(
            isinstance(tensor, torch.Tensor) and _look(tensor) == seen for tensor, seen in zip(tensors, self._seen)
        )


def _look(tensor: torch.Tensor) -> tuple[object, ...]:
    return type(tensor), tensor.dtype, tensor.device, tensor.shape, tensor.stride()
