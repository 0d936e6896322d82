"""Narrowed calls: breaks of an eager forward see real rows only, as they do between segments."""

from __future__ import annotations

import inspect
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch.utils import _pytree as pytree

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
    held = {leaf.untyped_storage().data_ptr() for leaf in pytree.tree_leaves(given) if isinstance(leaf, torch.Tensor)}
    return pytree.tree_map_only(torch.Tensor, lambda leaf: _widened(leaf, real_rows, rows, mark.pad, held), result)


def _has_rows(value: Any, rows: int) -> bool:
    leaves = [leaf for leaf in pytree.tree_leaves(value) if isinstance(leaf, torch.Tensor)]
    return bool(leaves) and all(leaf.dim() > 0 and leaf.shape[0] == rows for leaf in leaves)


def _widened(leaf: torch.Tensor, real_rows: int, rows: int, pad: float, held: set[int]) -> torch.Tensor:
    """Give a result its padded rows: where it lies in an argument's memory, those of the argument."""
    if leaf.dim() == 0 or leaf.shape[0] != real_rows:
        return leaf
    shape = (rows, *leaf.shape[1:])
    if leaf.untyped_storage().data_ptr() in held:
        wide = leaf.as_strided(shape, leaf.stride(), leaf.storage_offset())
    else:
        wide = leaf.new_empty(shape)
        wide[:real_rows].copy_(leaf)
    wide[real_rows:].fill_(pad)
    return wide
