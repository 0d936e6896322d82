"""Trees of tensors: what preps and forwards return, by torch's pytree."""

from __future__ import annotations

import enum
import functools
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch.utils import _pytree as pytree

from graphglue.core.slots import Axis
from graphglue.errors import ContractError

# Leaves besides tensors that may stand in what a prep or forward returns: they are baked and compared.
_PLAIN = (type(None), bool, int, float, str, bytes, enum.Enum, torch.dtype, torch.device, torch.Size)

# How many rows a leaf has per axis, given (requests, tokens).
ROWS: Mapping[str, Callable[[int, int], int]] = {
    Axis.REQUEST.value: lambda requests, tokens: requests,
    Axis.TOKEN.value: lambda requests, tokens: tokens,
    Axis.OFFSET.value: lambda requests, tokens: requests + 1,
}


def flatten(tree: Any) -> tuple[list[Any], Any]:
    """Take a tree apart into leaves and structure."""
    return pytree.tree_flatten(tree)


def unflatten(leaves: list[Any], structure: Any) -> Any:
    """Put a tree together again."""
    return pytree.tree_unflatten(leaves, structure)


class Packed:
    """Hold a tree that is handed out again and again; every caller gets containers of his own.

    Attributes:
        tree: gives it. A plain dict or list copies itself, without a function of ours between.
    """

    __slots__ = ("tree",)

    tree: Callable[[], Any]

    def __init__(self, tree: Any) -> None:
        if type(tree) in (dict, list) and _is_flat(tree.values() if type(tree) is dict else tree):
            self.tree = tree.copy
        elif isinstance(tree, torch.Tensor) or (type(tree) is tuple and _is_flat(tree)):
            self.tree = lambda: tree
        else:
            self.tree = functools.partial(pytree.tree_unflatten, *pytree.tree_flatten(tree))


def _is_flat(values: Iterable[Any]) -> bool:
    return all(isinstance(value, (torch.Tensor, *_PLAIN)) for value in values)


def named_leaves(tree: Any) -> list[tuple[str, Any]]:
    """List leaves with their names: dict keys, indices and attributes joined by dots; "" for a bare leaf."""
    return [(".".join(_step(entry) for entry in path), leaf) for path, leaf in pytree.tree_flatten_with_path(tree)[0]]


def rebuilt(tree: Any) -> Any:
    """Give the same leaves in containers of their own."""
    return pytree.tree_map(lambda leaf: leaf, tree)


def map_tensors(change: Callable[[torch.Tensor], torch.Tensor], tree: Any) -> Any:
    """Replace every tensor of a tree."""
    return pytree.tree_map(lambda leaf: change(leaf) if isinstance(leaf, torch.Tensor) else leaf, tree)


def without(tree: Any, keys: Iterable[str], owner: str) -> tuple[Any, dict[str, Any]]:
    """Put None in the place of a dict's values; give what stood there too.

    Raises:
        ContractError: the tree is no dict, or has no such keys.
    """
    wanted = tuple(keys)
    if not wanted:
        return tree, {}
    if not isinstance(tree, dict) or not tree.keys() >= set(wanted):
        seen = sorted(map(str, tree)) if isinstance(tree, dict) else type(tree).__name__
        raise ContractError(f"{owner} declares live={list(wanted)}, keys of the dict it returns, but returned {seen}")
    return {**tree, **dict.fromkeys(wanted)}, {key: tree[key] for key in wanted}


def check_leaves(tree: Any, owner: str) -> None:
    """Refuse leaves that hide what is inside them.

    Raises:
        ContractError: an object that is neither a tensor, a plain value nor a registered container.
    """
    for name, leaf in named_leaves(tree):
        if not isinstance(leaf, (torch.Tensor, *_PLAIN)):
            raise ContractError(
                f"{owner} returned {name or 'a leaf'!r} of type {type(leaf).__name__}, whose tensors can not be seen; "
                "return dicts, lists, tuples or tensors, or register it with torch.utils._pytree.register_dataclass"
            )


def difference(captured: Any, fresh: Any) -> str | None:
    """Say how a fresh tree differs in structure from the captured one; None if it does not.

    Shape, dtype and device of tensors count, and the value of every other leaf; contents of
    tensors do not.
    """
    ours, our_structure = pytree.tree_flatten(captured)
    theirs, their_structure = pytree.tree_flatten(fresh)
    if our_structure != their_structure:
        return f"structure {their_structure}, captured {our_structure}"
    for position, (one, other) in enumerate(zip(ours, theirs)):
        if not alike(one, other):
            name = named_leaves(captured)[position][0]
            return f"leaf {name!r} is {_spell(other)}, captured {_spell(one)}"
    return None


def check_rows(tree: Any, axes: Mapping[str, Axis], requests: int, tokens: int, owner: str) -> None:
    """Hold declared row axes against what was returned.

    Raises:
        ContractError: a declared leaf that is absent, no tensor, or of another number of rows.
    """
    leaves = dict(named_leaves(tree))
    for name, axis in axes.items():
        leaf = leaves.get(name)
        if not isinstance(leaf, torch.Tensor):
            raise ContractError(
                f"{owner} declares output {name!r}, but returned {_spell_names(leaves)}; return a dict with that key, "
                "or correct contract.outputs"
            )
        if axis is Axis.FIXED:
            continue
        rows = ROWS[axis.value](requests, tokens)
        if leaf.dim() == 0 or leaf.shape[0] != rows:
            raise ContractError(
                f"{owner} declares output {name!r} on axis {axis.value}, {rows} rows at this bucket, but returned "
                f"shape {tuple(leaf.shape)}; correct contract.outputs or the prep"
            )


def _spell_names(leaves: Mapping[str, Any]) -> str:
    names = sorted(name for name, leaf in leaves.items() if isinstance(leaf, torch.Tensor))
    return "one tensor without a name" if names == [""] else f"tensors {names}"


def alike(one: Any, other: Any) -> bool:
    if isinstance(one, torch.Tensor) and isinstance(other, torch.Tensor):
        return one.shape == other.shape and one.dtype == other.dtype and one.device == other.device
    return type(one) is type(other) and bool(one == other or (one != one and other != other))


def _spell(leaf: Any) -> str:
    if isinstance(leaf, torch.Tensor):
        return f"{str(leaf.dtype).removeprefix('torch.')}{list(leaf.shape)} on {leaf.device}"
    return f"{type(leaf).__name__} {leaf!r}"


def _step(entry: Any) -> str:
    for attribute in ("key", "idx", "name"):
        if hasattr(entry, attribute):
            return str(getattr(entry, attribute))
    return str(entry)
