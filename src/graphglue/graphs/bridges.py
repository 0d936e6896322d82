"""Bridges: where a break's result goes, at addresses that later segments read."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, NoReturn, Protocol

import torch
from torch.utils import _pytree as pytree

from graphglue.core import trees
from graphglue.errors import ContractError, DivergenceError
from graphglue.graphs.cuts import Cuts
from graphglue.graphs.memory import place, plain

_ALIGNMENT_BYTES = 16


class Memory(Protocol):
    """Knows the memory that a segmented recording's pool owns."""

    @property
    def device(self) -> torch.device:
        """The device that is recorded."""

    def owns(self, tensor: torch.Tensor) -> bool:
        """Tell whether a tensor lies in memory that the pool hands out again."""

    def alias(self, tensor: torch.Tensor) -> torch.Tensor:
        """Give the same memory in a tensor that does not keep the pool from using it again."""


class _Cut(NamedTuple):
    """The static result at some real rows: its leaves, and the tails behind them."""

    rows: int | None
    heads: Sequence[Any]
    tails: Sequence[torch.Tensor]


class Bridges:
    """The static form of one break's result.

    Args:
        owner: the break, for messages.
        static: the leaves of the static result, from ``allocated``.
        result: what the break returned while recording.
        given: addresses of the storages of its arguments.
        filled: arguments it declares to fill, whose tails are reset too.
        rows: padded rows of its row-aligned arguments; None if it has none.
        pad: the value of the padded tails.
        memory: the pool's.

    Raises:
        ContractError: a tensor without the padded rows, or a pad that its dtype does not hold.
    """

    def __init__(
        self,
        owner: str,
        static: Sequence[Any],
        result: Any,
        given: frozenset[int],
        filled: Sequence[torch.Tensor],
        rows: int | None,
        pad: float,
        memory: Memory,
    ) -> None:
        self._owner, self._rows, self._pad, self._given = owner, rows, pad, given
        leaves, self._structure = pytree.tree_flatten(result)
        self._is_nothing, self._is_bare = result is None, isinstance(result, torch.Tensor)
        # Weak where the pool owns the memory: the callable alone decides how long a bridge is taken.
        self._targets = [_alias(leaf, memory) for leaf in static]
        self._in_argument = [isinstance(leaf, torch.Tensor) and _address(leaf) in given for leaf in static]
        tensors = [target for target in self._targets if isinstance(target, torch.Tensor)]
        self._padded = [*tensors, *(_alias(tensor, memory) for tensor in filled)] if rows is not None else []
        for tensor in self._padded:
            self._check_padded(tensor)
        self._whole = _Cut(None, self._targets, [])
        fresh = [new if beside else old for old, new, beside in zip(leaves, self._targets, self._in_argument)]
        self._first: Any = pytree.tree_unflatten(fresh, self._structure)

    def settle(self) -> None:
        """Copy the first result in. Sync: none."""
        first, self._first = self._first, None
        self.accept(first, None)

    def _check_padded(self, tensor: torch.Tensor) -> None:
        if tensor.dim() == 0 or tensor.shape[0] != self._rows:
            raise ContractError(
                f"{self._owner} has row-aligned arguments of {self._rows} rows and returns {tuple(tensor.shape)}; "
                "every tensor that it returns has these rows in dimension 0, so return others from another break"
            )
        if not _holds(tensor.dtype, self._pad):
            raise ContractError(f"{self._owner} declares pad={self._pad}, which {tensor.dtype} does not hold")

    def join(self, cuts: Cuts) -> None:
        """Get ready for replays, with what the breaks of one recording cut together."""
        self._cuts = cuts
        if self._rows is not None:
            self._heads = [cuts.place(leaf, True) if isinstance(leaf, torch.Tensor) else None for leaf in self._targets]
            self._tails = tuple(dict.fromkeys(cuts.place(tensor, True) for tensor in self._padded))

    def accept(self, fresh: Any, rows: int | None) -> None:
        """Check a fresh result, then copy it in and reset the padded tails. Sync: none.

        Raises:
            DivergenceError: it differs in structure, shape, dtype, plain values or aliasing; nothing was written.
        """
        self._taking(self._at(rows))(fresh)

    def accepting(self, rows: int | None) -> Callable[[Any], None] | None:
        """Build what ``accept`` does at one number of real rows; None where it does nothing to nothing.

        Each Python call in it counts, break by break, so the common forms have functions of their own.
        """
        if self._is_nothing:
            return None if rows is None or not self._tails else self._resetting(rows)
        if self._is_bare and not self._in_argument[0]:
            return self._copying(rows)
        return self._taking(self._at(rows))

    def _taking(self, cut: _Cut) -> Callable[[Any], None]:
        """Take in any tree."""

        def accept(fresh: Any) -> None:
            self._copy(fresh, cut)
            for tail in cut.tails:
                tail.fill_(self._pad)

        return accept

    def _resetting(self, rows: int) -> Callable[[Any], None]:
        """Take in nothing, and reset the tails."""
        tails, pad = self._cuts.tails(self._tails, rows), self._pad

        def accept(fresh: Any) -> None:
            if fresh is not None:
                self._refuse(fresh, self._at(rows))
            for tail in tails:
                tail.fill_(pad)

        return accept

    def _copying(self, rows: int | None) -> Callable[[Any], None]:
        """Take in one tensor with memory of its own: what ``_copy`` does, but without trees."""
        target, tails = self._targets[0], self._whole.tails
        if rows is not None and (place := self._heads[0]) is not None:
            target, tails = self._cuts.cut(rows)[place], self._cuts.tails(self._tails, rows)
        shape, dtype, device, copy = target.shape, target.dtype, target.device, target.copy_
        pad, given, tensor = self._pad, self._given, torch.Tensor

        def accept(fresh: Any) -> None:
            """Take in what the break returned."""
            if (
                not isinstance(fresh, tensor)
                or fresh.shape != shape
                or fresh.dtype is not dtype
                or fresh.device != device
                or fresh.untyped_storage().data_ptr() in given
            ):
                self._copy(fresh, self._at(rows))  # says what is wrong
            else:
                copy(fresh.detach() if fresh.requires_grad else fresh)
            for tail in tails:
                tail.fill_(pad)

        return accept

    def _copy(self, fresh: Any, cut: _Cut) -> None:
        leaves, copies = self._leaves_of(fresh, cut), []
        for target, leaf, in_argument in zip(cut.heads, leaves, self._in_argument):
            if isinstance(leaf, torch.Tensor) and leaf.numel():
                self._check_aliasing(target, leaf, in_argument, cut.rows)
                if not in_argument:
                    copies.append((target, leaf))
        for target, leaf in copies:
            target.copy_(leaf.detach() if leaf.requires_grad else leaf)

    def _leaves_of(self, fresh: Any, cut: _Cut) -> Sequence[Any]:
        """Take a fresh result apart, and hold its leaves against the static ones."""
        leaves, structure = pytree.tree_flatten(fresh)
        if structure != self._structure or not all(map(trees.alike, cut.heads, leaves)):
            self._refuse(fresh, cut)
        return leaves

    def _refuse(self, fresh: Any, cut: _Cut) -> NoReturn:
        expected = pytree.tree_unflatten(cut.heads, self._structure)
        self._diverge(trees.difference(expected, fresh) or "another structure", cut.rows)

    # The two forms of one rule: later segments may write in place into what a break returned.
    def _check_aliasing(self, target: torch.Tensor, leaf: torch.Tensor, in_argument: bool, rows: int | None) -> None:
        if in_argument:
            if leaf.data_ptr() != target.data_ptr() or _strides(leaf) != _strides(target):
                self._diverge("other memory than the argument's that it returned", rows)
        elif leaf.untyped_storage().data_ptr() in self._given:
            self._diverge("memory of an argument, where it returned memory of its own", rows)

    def _diverge(self, seen: str, rows: int | None) -> NoReturn:
        real = "" if rows is None else f" with {rows} of {self._rows} rows real"
        raise DivergenceError(
            f"{self._owner} returned{real}: {seen} while it was recorded; later segments read what was recorded. "
            "Return the same structure, shapes and dtypes on every call, or record again"
        )

    def _at(self, rows: int | None) -> _Cut:
        """Cut the targets to the real rows, and the tails behind them."""
        if rows is None:
            return self._whole
        cuts, pairs = self._cuts.cut(rows), zip(self._targets, self._heads)
        heads = [leaf if place is None else cuts[place] for leaf, place in pairs]
        return _Cut(rows, heads, self._cuts.tails(self._tails, rows))


def check_plain(leaves: Sequence[Any], what: str) -> None:
    """Refuse tensor subclasses, which a static form would hand on as plain tensors.

    Raises:
        ContractError: there is one.
    """
    for leaf in leaves:
        if isinstance(leaf, torch.Tensor) and type(leaf) not in (torch.Tensor, torch.nn.Parameter):
            raise ContractError(f"{what} a {type(leaf).__name__}; a static form is a plain tensor")


def is_strided(leaf: Any) -> bool:
    """Tell whether a leaf is a tensor with memory of its own."""
    return isinstance(leaf, torch.Tensor) and leaf.layout is torch.strided


def _address(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


def _holds(dtype: torch.dtype, value: float) -> bool:
    """Tell whether a dtype holds a number; floats round it."""
    if dtype.is_floating_point or dtype.is_complex:
        return not math.isfinite(value) or abs(value) <= torch.finfo(dtype).max
    if dtype is torch.bool:
        return value in (0, 1)
    return value == value // 1 and torch.iinfo(dtype).min <= value <= torch.iinfo(dtype).max


def _strides(tensor: torch.Tensor) -> list[int]:
    return [stride for stride, extent in zip(tensor.stride(), tensor.shape) if extent > 1]


def _alias(leaf: Any, memory: Memory) -> Any:
    if not isinstance(leaf, torch.Tensor):
        return leaf
    if memory.owns(leaf):
        return memory.alias(leaf)
    with plain():
        return place(leaf.untyped_storage(), leaf)


def allocated(owner: str, result: Any, given: frozenset[int]) -> list[Any]:
    """Allocate the static form of a result, leaf by leaf; what lies in an argument's memory stays.

    Raises:
        ContractError: a leaf that is neither a strided tensor nor a plain value.
    """
    trees.check_leaves(result, owner)
    leaves = pytree.tree_leaves(result)
    check_plain(leaves, f"{owner} returned")
    for leaf in leaves:
        if isinstance(leaf, torch.Tensor) and leaf.layout is not torch.strided:
            raise ContractError(f"{owner} returned a {leaf.layout} tensor; a bridge holds strided tensors")
    return _Allocation(owner, leaves, given).leaves


def addresses(tree: Any) -> frozenset[int]:
    """Give the addresses of the storages of a tree's tensors."""
    return frozenset(_address(leaf) for leaf in pytree.tree_leaves(tree) if is_strided(leaf))


class _Allocation:
    """Memory for a result's leaves: leaves that share a storage share one here, with the same distances."""

    def __init__(self, owner: str, leaves: list[Any], given: frozenset[int]) -> None:
        self._owner = owner
        self._bases: dict[int, tuple[torch.Tensor, int]] = {}
        self._fresh = [leaf for leaf in leaves if isinstance(leaf, torch.Tensor) and _address(leaf) not in given]
        self.leaves = [self._static(leaf, given) for leaf in leaves]

    def _static(self, leaf: Any, given: frozenset[int]) -> Any:
        if not isinstance(leaf, torch.Tensor) or (_address(leaf) in given and leaf.numel()):
            return leaf
        if _overlaps(leaf) and sum(_address(other) == _address(leaf) for other in self._fresh) > 1:
            raise ContractError(
                f"{self._owner} returned an expanded tensor beside another one of the same memory; return one of them, "
                "or a clone"
            )
        if _overlaps(leaf) or not leaf.numel():
            return torch.empty(leaf.shape, dtype=leaf.dtype, device=leaf.device)
        base, start = self._base(leaf)
        count = base.numel() // leaf.itemsize * leaf.itemsize
        offset = leaf.storage_offset() - start // leaf.itemsize
        return base[:count].view(leaf.dtype).as_strided(leaf.shape, leaf.stride(), offset)

    def _base(self, leaf: torch.Tensor) -> tuple[torch.Tensor, int]:
        key = _address(leaf)
        if key not in self._bases:
            spans = [
                _span(other)
                for other in self._fresh
                if _address(other) == key and other.numel() and not _overlaps(other)
            ]
            start = min(begin for begin, _ in spans) // _ALIGNMENT_BYTES * _ALIGNMENT_BYTES
            size = -(-(max(end for _, end in spans) - start) // _ALIGNMENT_BYTES) * _ALIGNMENT_BYTES
            self._bases[key] = torch.empty(size, dtype=torch.uint8, device=leaf.device), start
        return self._bases[key]


def _span(tensor: torch.Tensor) -> tuple[int, int]:
    """Give the bytes of its storage that a tensor reaches: first, and behind the last."""
    last = sum((extent - 1) * stride for extent, stride in zip(tensor.shape, tensor.stride()))
    begin = tensor.storage_offset() * tensor.itemsize
    return int(begin), int(begin + (last + 1) * tensor.itemsize)


def _overlaps(tensor: torch.Tensor) -> bool:
    """Tell whether two indices may share an element: such a tensor can not be written."""
    reach = 1
    for stride, extent in sorted(zip(tensor.stride(), tensor.shape)):
        if extent > 1 and stride < reach:
            return True
        reach += (extent - 1) * stride
    return False
