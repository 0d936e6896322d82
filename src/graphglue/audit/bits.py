"""Bits: find where two sets of tensors part first, on the device, and read it there later.

All tensors of a group are laid end to end as bytes, so the number of launches does not grow with the number of
tensors. Bytes are compared: NaN equals the same NaN, and -0.0 is not 0.0.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from graphglue.core.differences import bytes_of

_MAX_ITEM_BYTES = 16  # complex128
_WINDOW_BYTES = 2 * _MAX_ITEM_BYTES - 1  # whichever of its bytes differs, the whole element is inside
_POSITION_BYTES = 8
RECORD_BYTES = _POSITION_BYTES + 2 * _WINDOW_BYTES


class Shape(NamedTuple):
    """What is kept of a compared tensor: enough to name an element of it."""

    extents: tuple[int, ...]
    dtype: torch.dtype

    @classmethod
    def of(cls, tensor: torch.Tensor) -> Shape:
        """Read a tensor's."""
        return cls(tuple(tensor.shape), tensor.dtype)

    @property
    def num_bytes(self) -> int:
        """Its size."""
        return torch.Size(self.extents).numel() * self.dtype.itemsize


@dataclass(frozen=True, slots=True)
class Parting:
    """The first element that differs.

    Attributes:
        position: which tensor of the group.
        index: which element of it.
        seen, expected: what the first and the second set hold there.
    """

    position: int
    index: tuple[int, ...]
    seen: Any
    expected: Any


class Comparison:
    """Compare groups of tensors on one device.

    Sync: none. Every launch goes to the caller's current stream.
    """

    def __init__(self, device: torch.device) -> None:
        with torch.inference_mode(False):
            self._head = torch.zeros(_MAX_ITEM_BYTES, dtype=torch.uint8, device=device)
            # The byte behind the last one always differs, so that the search ends there where nothing else does.
            self._ends = [
                torch.full((_MAX_ITEM_BYTES + 1,), number, dtype=torch.uint8, device=device) for number in (0, 1)
            ]
            self._window = torch.arange(1 - _MAX_ITEM_BYTES, _MAX_ITEM_BYTES, device=device)

    def first_partings(self, groups: Sequence[Sequence[tuple[torch.Tensor, torch.Tensor]]]) -> torch.Tensor:
        """Find the first difference of each group.

        Args:
            groups: pairs of tensors of the same shape and dtype, what is seen first; at least one group.

        Returns:
            uint8 [groups, ``RECORD_BYTES``] on the device, to be read by ``read_parting``.

        Sync: none. Capturable: yes.
        """
        with torch.inference_mode():
            return torch.cat([self._first_parting(pairs) for pairs in groups]).view(len(groups), RECORD_BYTES)

    def _first_parting(self, pairs: Sequence[tuple[torch.Tensor, torch.Tensor]]) -> torch.Tensor:
        seen, expected = ([bytes_of(tensor) for tensor in side] for side in zip(*pairs)) if pairs else ([], [])
        laid = [self._head, *seen, self._ends[0], self._head, *expected, self._ends[1]]
        both = torch.cat(laid).view(2, -1)
        # argmax gives the first of equal maxima.
        first = torch.argmax((both[0] != both[1]).view(torch.uint8)).view(1)
        around = both.index_select(1, first + self._window)
        return torch.cat([first.view(torch.uint8), around.view(-1)])


def read_parting(record: torch.Tensor, shapes: Sequence[Shape]) -> Parting | None:
    """Read one group's record, on the host; None where nothing differs.

    Args:
        record: uint8 [``RECORD_BYTES``] on the CPU.
        shapes: those of the group's tensors, in order.
    """
    numbers = record.tolist()
    first = int.from_bytes(bytes(numbers[:_POSITION_BYTES]), sys.byteorder) - _MAX_ITEM_BYTES
    begin = 0
    for position, shape in enumerate(shapes):
        end = begin + shape.num_bytes
        if first < end:
            element, byte = divmod(first - begin, shape.dtype.itemsize)
            windows = (numbers[_POSITION_BYTES + side * _WINDOW_BYTES :] for side in (0, 1))
            seen, expected = (_element(window, byte, shape.dtype) for window in windows)
            return Parting(position, _unravel(element, shape.extents), seen, expected)
        begin = end
    return None


def _element(window: list[int], byte: int, dtype: torch.dtype) -> Any:
    """Read the element one of whose bytes, number ``byte``, stands in the middle of a window."""
    begin = _MAX_ITEM_BYTES - 1 - byte
    numbers = torch.tensor(window[begin : begin + dtype.itemsize], dtype=torch.uint8, device="cpu")
    return numbers.view(dtype).item()


def _unravel(element: int, extents: tuple[int, ...]) -> tuple[int, ...]:
    index: list[int] = []
    for extent in reversed(extents):
        element, place = divmod(element, extent)
        index.insert(0, place)
    return tuple(index)
