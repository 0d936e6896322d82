"""Narrowed calls: breaks of an eager forward see real rows only, as they do between segments."""

from __future__ import annotations

import inspect
from collections import Counter
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch.utils import _pytree as pytree

from graphglue.core import trees
from graphglue.graphs.bridges import addresses, is_strided
from graphglue.graphs.marks import Mark, Reaching


def narrowed(real_rows: int, rows: int) -> AbstractContextManager[None]:
    """Let marked functions run as a segmented replay runs them, while their caller runs eagerly.

    Row-aligned arguments of ``rows`` rows are cut to the real ones, and the padded tails of what comes back are set to
    the mark's pad: an eager step then has the same values in its padded rows too.

    Args:
        real_rows: how many rows a break sees.
        rows: the rows that the callable runs at.

    Sync: none.
    """

    def reached(mark: Mark, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        with Reaching(None):
            return _call(mark, mark.bind(args, kwargs), real_rows, rows)

    return Reaching(None if real_rows == rows else reached)


def _call(mark: Mark, bound: inspect.BoundArguments, real_rows: int, rows: int) -> Any:
    for name in mark.row_aligned:  # as while recording
        trees.check_leaves(bound.arguments[name], f"break {mark.name!r} declares {name!r} row-aligned, and the forward")
    aligned = [name for name in mark.row_aligned if _has_rows(bound.arguments[name], rows)]
    given = {name: bound.arguments[name] for name in aligned}
    for name in aligned:
        bound.arguments[name] = pytree.tree_map_only(torch.Tensor, lambda leaf: leaf[:real_rows], given[name])
    result = mark.run(*bound.args, **bound.kwargs)
    if not aligned:
        return result
    for name in mark.writes:
        for leaf in pytree.tree_leaves(given.get(name)):
            if isinstance(leaf, torch.Tensor):
                leaf[real_rows:].fill_(mark.pad)
    widening = _Widening(result, real_rows, rows, mark.pad, addresses(dict(bound.arguments)))
    return pytree.tree_map_only(torch.Tensor, widening.of, result)


def _has_rows(value: Any, rows: int) -> bool:
    leaves = [leaf for leaf in pytree.tree_leaves(value) if isinstance(leaf, torch.Tensor)]
    return bool(leaves) and all(leaf.dim() > 0 and leaf.shape[0] == rows for leaf in leaves)


class _Widening:
    """Give one result its padded rows; what shared memory shares it, as between segments.

    Args:
        result: what the break returned.
        real_rows, rows: see ``narrowed``.
        pad: the value of padded rows.
        held: addresses of the arguments' storages; what lies there stays there.
    """

    def __init__(self, result: Any, real_rows: int, rows: int, pad: float, held: frozenset[int]) -> None:
        leaves = (leaf for leaf in pytree.tree_leaves(result) if is_strided(leaf))
        self._sharing = Counter(leaf.untyped_storage().data_ptr() for leaf in leaves)
        self._real_rows, self._rows, self._pad, self._held = real_rows, rows, pad, held
        self._grown: dict[tuple[int, int], torch.Tensor] = {}

    def of(self, leaf: torch.Tensor) -> torch.Tensor:
        """Widen one tensor; one without the real rows stays as it is."""
        if not is_strided(leaf) or leaf.dim() == 0 or leaf.shape[0] != self._real_rows:
            return leaf
        wide = self._memory_of(leaf)
        wide[self._real_rows :].fill_(self._pad)
        return wide

    def _memory_of(self, leaf: torch.Tensor) -> torch.Tensor:
        shape, storage = (self._rows, *leaf.shape[1:]), leaf.untyped_storage()
        row_bytes = leaf.stride(0) * leaf.itemsize
        inner = 1 + sum((extent - 1) * stride for extent, stride in zip(leaf.shape[1:], leaf.stride()[1:]))
        end = (leaf.storage_offset() + (self._rows - 1) * leaf.stride(0) + inner) * leaf.itemsize
        if storage.data_ptr() in self._held and end <= storage.nbytes():
            return leaf.as_strided(shape, leaf.stride(), leaf.storage_offset())
        alone = self._sharing[storage.data_ptr()] == 1
        if alone or not leaf.numel() or leaf.stride(0) < inner:  # or rows lie between one another, and can not grow
            wide = leaf.new_empty(shape)
            wide[: self._real_rows].copy_(leaf)
            return wide
        key = storage.data_ptr(), row_bytes
        if key not in self._grown:
            num_bytes = storage.nbytes() + self._rows * row_bytes
            grown = torch.empty(num_bytes, dtype=torch.uint8, device=leaf.device)
            grown[: storage.nbytes()].copy_(torch.empty(0, dtype=torch.uint8, device=leaf.device).set_(storage))
            self._grown[key] = grown
        grown = self._grown[key]
        count = grown.numel() // leaf.itemsize * leaf.itemsize
        return grown[:count].view(leaf.dtype).as_strided(shape, leaf.stride(), leaf.storage_offset())
