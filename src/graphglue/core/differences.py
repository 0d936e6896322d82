"""Differences: where two results part, bit for bit, said in one way by every check that compares."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from graphglue.core import trees
from graphglue.core.buckets import Bucket
from graphglue.core.keys import Key
from graphglue.core.slots import Axis

_INTEGER_OF_BYTES = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_MAX_ULPS = 64  # fused or reordered arithmetic moves a float by a few units of its last place, sums by some more


@dataclass(frozen=True, slots=True)
class Difference:
    """Say where two trees part first.

    Attributes:
        leaf: the leaf's dotted name; "" for a bare tensor, or where the structure differs.
        text: what differs, in words.
        row: the first differing row of a leaf that has rows.
        index: the first differing element.
        is_rounding: only floats differ, and by no more than another order of arithmetic explains.
    """

    leaf: str
    text: str
    row: int | None = None
    index: tuple[int, ...] = ()
    is_rounding: bool = False

    def __str__(self) -> str:
        return self.text


def first_difference(
    expected: Any,
    seen: Any,
    axes: Mapping[str, Axis | str] | None = None,
    raw: Bucket | None = None,
    rows: str = "all",
) -> Difference | None:
    """Find the first leaf and row in which two trees differ; bits are compared, so NaN equals the same NaN.

    Args:
        expected: the tree that is right.
        seen: the tree in question.
        axes: leaf -> row axis; a leaf without one, or on axis fixed, has no rows.
        raw: the real extents, for rows="real" and to tell pad rows from real ones.
        rows: "all" compares every leaf whole, plain leaves too. "real" compares tensors that have an axis:
            rows below the real extent, fixed ones whole; the trees may be of different extents then.

    Returns:
        None where nothing differs. A difference beyond rounding is given before one that may be rounding.

    Sync: the device, for tensors on a GPU.
    """
    ours, theirs = trees.named_leaves(expected), trees.named_leaves(seen)
    if trees.flatten(expected)[1] != trees.flatten(seen)[1]:
        text = f"structure {[name for name, _ in theirs]}, expected {[name for name, _ in ours]}"
        return Difference("", text)
    axes, rounding = axes or {}, None
    for (name, one), (_, other) in zip(ours, theirs):
        found = _leaf_difference(name, one, other, axes.get(name), raw, rows)
        if found is not None and not found.is_rounding:
            return found
        rounding = rounding or found
    return rounding


def bits_of(tensor: torch.Tensor) -> torch.Tensor:
    """View a tensor as integers, which compare by bits; a complex one has two for each element."""
    plain = tensor.detach().resolve_conj().resolve_neg()
    plain = torch.view_as_real(plain) if plain.is_complex() else plain
    return plain.view(_INTEGER_OF_BYTES[plain.element_size()])


def bytes_of(tensor: torch.Tensor) -> torch.Tensor:
    """Show a tensor's bytes in a row, so that NaN equals the same NaN, and -0.0 is not 0.0. Sync: none."""
    plain = tensor.detach().resolve_conj().resolve_neg().contiguous()
    # A single element counts as contiguous whatever its strides are, and keeps them in a view.
    return plain.as_strided((plain.numel(),), (1,)).view(torch.uint8)


def without_axis(tree: Any, axes: Mapping[str, Axis | str]) -> list[str]:
    """Name the tensors of a tree that no row axis was declared for: their real rows can't be told from pads."""
    return [name for name, leaf in trees.named_leaves(tree) if isinstance(leaf, torch.Tensor) and name not in axes]


def spell_step(key: Key, raw: Bucket | None = None) -> str:
    """Name a key, and the real extents of a step at it."""
    return f"{key}" if raw is None else f"{key}, raw {raw.requests} and {raw.tokens}"


def spell_element(
    what: str, row: int | None, index: tuple[int, ...], extent: int | None, seen: Any, expected: Any
) -> str:
    """Say what one differing element holds, and where it stands among the ``extent`` real rows and the pads."""
    return f"{what}{_spell_place(row, index, extent)}: {seen!r}, expected {expected!r}"


def _leaf_difference(
    name: str, one: Any, other: Any, axis: Axis | str | None, raw: Bucket | None, rows: str
) -> Difference | None:
    tensors = isinstance(one, torch.Tensor) and isinstance(other, torch.Tensor)
    axis = None if axis is None else Axis(axis)
    extent = None if axis in (None, Axis.FIXED) or raw is None else trees.ROWS[axis.value](raw.requests, raw.tokens)
    if rows == "real":
        if not tensors or axis is None:
            return None
        if extent is not None:
            one, other = one[:extent], other[:extent]
    if changed := trees.difference(one, other):
        text = changed.removeprefix("leaf '' is ").replace(", captured ", ", expected ")
        return Difference(name, f"{_spell_leaf(name)}: {text}")
    return _element_difference(name, one, other, axis, extent) if tensors and one.numel() else None


def _element_difference(
    name: str, one: torch.Tensor, other: torch.Tensor, axis: Axis | None, extent: int | None
) -> Difference | None:
    bits, other_bits = bits_of(one), bits_of(other)
    if torch.equal(bits, other_bits):
        return None
    unequal = bits != other_bits
    if one.is_complex():
        unequal = unequal.any(dim=-1)
    index = tuple(int(i) for i in unequal.reshape(one.shape).nonzero()[0])
    row = index[0] if axis not in (None, Axis.FIXED) and index else None
    text = spell_element(_spell_leaf(name), row, index, extent, other[index].item(), one[index].item())
    return Difference(name, text, row, index, _is_rounding(one, other))


def _is_rounding(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Tell whether finite floats differ by a few units of the last place of the largest among them."""
    if not one.is_floating_point():
        return False
    ours, theirs = one.detach().to(torch.float64), other.detach().to(torch.float64)
    if not torch.equal(ours.isfinite(), theirs.isfinite()):
        return False
    apart = ~ours.isfinite() & (bits_of(one) != bits_of(other))
    ours, theirs = ours.nan_to_num(0, 0, 0), theirs.nan_to_num(0, 0, 0)
    largest = torch.maximum(ours.abs(), theirs.abs()).amax()
    limit = _MAX_ULPS * torch.finfo(one.dtype).eps * largest
    return not bool(apart.any()) and bool(((ours - theirs).abs() <= limit).all())


def _spell_leaf(name: str) -> str:
    return f"leaf {name!r}" if name else "the result"


def _spell_place(row: int | None, index: tuple[int, ...], extent: int | None) -> str:
    if row is None:
        return f", element {list(index)}" if index else ""
    kind = "" if extent is None else "real " if row < extent else "pad "
    return f", {kind}row {row}" + (f", element {list(index)}" if len(index) > 1 else "")
