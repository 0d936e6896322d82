"""Legal garbage: other contents that a tensor might have had, and the memory it is written to and restored.

Integers stay within the values that the tensor holds, because it may be an index; floats stay finite. What
depends on the tensor then shows, and nothing is read out of range.
"""

from __future__ import annotations

import math
import os
import sys
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from graphglue.core.differences import bits_of
from graphglue.core.slots import kind_of
from graphglue.graphs import guard, memory

MAX_BYTES = 64 << 20  # of one tensor; what lies behind is not poisoned
NUM_VARIANTS = 3  # other order, least everywhere, most everywhere: sums, extremes and order all change in one of them
_UNWRITTEN = frozenset(
    f"aten::{name}"
    for name in ("empty", "empty_like", "empty_strided", "empty_permuted", "new_empty", "new_empty_strided")
)
_RARE_NAN = {1: 0x7F, 2: 0x7FED, 4: 0x7FED_6D6D, 8: 0x7FFD_6D6D_6D6D_6D6D}  # bits; by bytes of the float


class Target(NamedTuple):
    """A stretch of memory that may be poisoned.

    Attributes:
        name: where it was found, such as "closure variable 'table'".
        tensor: the tensor that was found.
        memory: an alias to write through.
    """

    name: str
    tensor: torch.Tensor
    memory: torch.Tensor

    @property
    def is_whole(self) -> bool:
        """Whether all of the tensor is poisoned."""
        sizes = zip(self.tensor.shape, self.tensor.stride())
        return self.memory.numel() == math.prod(1 if stride == 0 else extent for extent, stride in sizes)

    def __str__(self) -> str:
        return f"{self.name} ({str(self.tensor.dtype).removeprefix('torch.')}{list(self.tensor.shape)})"


class Allocations(TorchDispatchMode):
    """Fill the memory that operations allocate and do not write: with zeros, or with what no run computes.

    Attributes:
        places: where it was allocated, file:line.
    """

    def __init__(self, poisoned: bool) -> None:
        super().__init__()
        self._poisoned = poisoned
        self.places: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if func._schema.name in _UNWRITTEN and is_plain(result) and result.numel():
            result.copy_(sentinel_of(result)) if self._poisoned else result.zero_()
            self.places.append(guard.where(sys._getframe()).partition(" in ")[0])
        return result


def is_plain(tensor: torch.Tensor) -> bool:
    """Tell whether a tensor is memory and nothing else: no subclass, no other layout, contents of its own."""
    ours = type(tensor) is torch.Tensor or type(tensor).__module__ == "torch.nn.parameter"
    return ours and tensor.layout is torch.strided and tensor.device.type in ("cpu", "cuda")


def targets_of(
    named: Iterable[tuple[str, torch.Tensor]], read_only: Iterable[tuple[int, int]] = ()
) -> tuple[list[Target], list[str]]:
    """Make targets of plain tensors; name those that are left out, because their memory can not be written.

    Args:
        named: the tensors.
        read_only: what ``read_only_ranges`` gives, for tensors that somebody else allocated.
    """
    targets, left_out = [], []
    for name, tensor in named:
        known = kind_of(tensor.dtype) != "other" or tensor.dtype.is_complex
        # Addresses on a GPU lie in ranges that the driver reserves here, which look like any other.
        fixed = tensor.is_cpu and any(begin <= tensor.data_ptr() < end for begin, end in read_only)
        if not known or fixed:
            left_out.append(name)
        elif tensor.numel():
            targets.append(Target(name, tensor, _writable_alias(tensor)))
    return targets, left_out


def variant_of(contents: torch.Tensor, variant: int) -> torch.Tensor:
    """Give legal contents that differ from ``contents``.

    Args:
        contents: a tensor of any bool, integer, floating or complex dtype.
        variant: 0 to ``NUM_VARIANTS`` - 1: another order, the least value everywhere, the largest.

    Sync: the device.
    """
    contents = contents.resolve_conj().resolve_neg()
    if contents.is_complex():
        return torch.view_as_complex(variant_of(torch.view_as_real(contents).contiguous(), variant))
    if contents.dtype is torch.bool:
        other = (~contents, torch.zeros_like(contents), torch.ones_like(contents))[variant]
        return ~contents if torch.equal(other, contents) else other
    is_float = contents.is_floating_point()
    values = contents.to(torch.float64 if is_float else torch.int64)
    values = torch.where(values.isfinite(), values, 1.0) if is_float else values
    low, high = values.amin().item(), values.amax().item()
    if low == high:
        other = torch.full_like(values, _beside(low, is_float))
    else:
        other = (
            values.flatten().roll(1).view(values.shape)
            if variant == 0
            else torch.full_like(values, (low, high)[variant - 1])
        )
    return other.to(contents.dtype)


def sentinel_of(contents: torch.Tensor) -> torch.Tensor:
    """Give contents that no run computes: a rare NaN, a large integer in every byte, the opposite of a bool."""
    if contents.dtype is torch.bool:
        return ~contents
    sentinel = torch.empty_like(contents, memory_format=torch.contiguous_format)
    size = sentinel.element_size() // (2 if contents.is_complex() else 1)
    is_integer = not (contents.is_floating_point() or contents.is_complex())
    # Neither is what the tape leaves in memory that nothing computes.
    bits_of(sentinel).fill_(int.from_bytes(b"\x6d" * size, "big") if is_integer else _RARE_NAN[size])
    return sentinel


@contextmanager
def overwritten(changes: Iterable[tuple[torch.Tensor, torch.Tensor]]) -> Iterator[None]:
    """Write other contents into memory, and what was there back at the end, whatever happens between.

    Args:
        changes: pairs of memory and contents.
    """
    written = list(changes)
    with memory.plain():
        before = [alias.clone() for alias, _ in written]
        try:
            for alias, contents in written:
                alias.copy_(contents)
            yield
        finally:
            for (alias, _), contents in zip(written, before):
                alias.copy_(contents)


def _beside(value: float, is_float: bool) -> float:
    """Give a value beside the only one that was seen: a smaller index where there is one."""
    if is_float:
        return value / 2 if value and value / 2 != value else 1.0
    return value - 1 if value > 0 else value + 1


def _writable_alias(tensor: torch.Tensor) -> torch.Tensor:
    """Give another tensor on the same memory: each element once, and no more than ``MAX_BYTES``."""
    with memory.plain():
        alias = memory.place(tensor.untyped_storage(), tensor)
        for dim, (extent, stride) in enumerate(zip(alias.shape, alias.stride())):
            alias = alias.narrow(dim, 0, 1) if extent > 1 and stride == 0 else alias
        num_bytes = alias.numel() * alias.element_size()
        if num_bytes > MAX_BYTES:
            alias = alias[: max(1, MAX_BYTES * alias.shape[0] // num_bytes)]
    return alias


def read_only_ranges() -> list[tuple[int, int]]:
    """List the mappings of this process that may not be written: a file mapped for reading ends it if it is."""
    if not os.path.exists("/proc/self/maps"):
        return []
    with open("/proc/self/maps") as maps:
        mappings = [line.split(maxsplit=2)[:2] for line in maps]
    bounds = [range_.split("-") for range_, permissions in mappings if "w" not in permissions]
    return [(int(begin, 16), int(end, 16)) for begin, end in bounds]
