"""Trees of tensors: names, structure that is compared, and declared rows."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass
from typing import Any, NamedTuple

import pytest
import torch
from torch.utils import _pytree as pytree

from graphglue import Axis, ContractError, Mode
from graphglue.core import trees


class Pair(NamedTuple):
    first: Any
    second: Any


@dataclass
class Plan:
    pages: torch.Tensor
    size: int


pytree.register_dataclass(Plan)


def t(*shape: int, dtype: torch.dtype = torch.int64) -> torch.Tensor:
    return torch.zeros(shape, dtype=dtype)


def test_leaves_have_dotted_names() -> None:
    tree = {"a": t(1), "b": [t(2), {"c": t(3)}], "d": Pair(t(4), 5), "e": Plan(t(6), 7)}
    names = [name for name, _ in trees.named_leaves(tree)]
    assert names == ["a", "b.0", "b.1.c", "d.first", "d.second", "e.pages", "e.size"]
    assert [name for name, _ in trees.named_leaves(t(1))] == [""]


def test_trees_come_apart_and_together() -> None:
    tree = {"a": [t(1), 2], "b": Pair("x", None)}
    leaves, structure = trees.flatten(tree)
    again = trees.unflatten(leaves, structure)
    assert again["a"][0] is tree["a"][0]
    assert again["b"] == Pair("x", None)


def test_map_changes_tensors_only() -> None:
    mapped = trees.map_tensors(lambda tensor: tensor + 1, {"a": t(2), "n": 5, "s": "x"})
    assert mapped["a"].tolist() == [1, 1]
    assert (mapped["n"], mapped["s"]) == (5, "x")


@pytest.mark.parametrize(
    "leaf", [t(1), None, True, 3, 0.5, "x", b"x", Mode.DECODE, torch.int8, torch.device("cpu"), torch.Size([2])]
)
def test_plain_leaves_are_seen_through(leaf: Any) -> None:
    trees.check_leaves({"a": [leaf]}, "prep 'p'")


@pytest.mark.parametrize("leaf", [object(), {1, 2}, lambda: 0, type("Metadata", (), {})()])
def test_unstaged_an_object_that_hides_its_tensors_is_refused(leaf: Any) -> None:
    with pytest.raises(
        ContractError,
        match=r"prep 'p' returned 'a.0' of type \w+, whose tensors can not be seen; return dicts.*register_dataclass",
    ):
        trees.check_leaves({"a": [leaf]}, "prep 'p'")


SAME: dict[str, Any] = {"a": t(2, 3), "n": 5, "f": math.nan, "m": Mode.DECODE, "b": True}


def test_contents_of_tensors_are_no_difference() -> None:
    assert trees.difference(SAME, {**SAME, "a": t(2, 3) + 9, "f": math.nan}) is None


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"a": t(2, 4)}, r"leaf 'a' is int64\[2, 4\] on cpu, captured int64\[2, 3\] on cpu"),
        ({"a": t(2, 3, dtype=torch.int32)}, r"leaf 'a' is int32\[2, 3\].*captured int64"),
        ({"a": torch.zeros(2, 3, dtype=torch.int64, device="meta")}, "on meta, captured .* on cpu"),
        ({"a": 3}, "leaf 'a' is int 3, captured int64"),
        ({"n": t(1)}, "leaf 'n' is int64.*captured int 5"),
        ({"n": 6}, "leaf 'n' is int 6, captured int 5"),
        ({"n": 5.0}, "leaf 'n' is float 5.0, captured int 5"),
        ({"b": 1}, "leaf 'b' is int 1, captured bool True"),
        ({"f": 1.0}, "leaf 'f' is float 1.0, captured float nan"),
        ({"m": Mode.DRAFT}, "leaf 'm' is Mode"),
        ({"m": None}, "leaf 'm' is NoneType None|structure"),
        ({"new": t(1)}, "structure .*captured"),
        ({"a": [t(2, 3)]}, "structure .*captured"),
    ],
)
def test_meta_shape_everything_else_is_a_difference(change: dict[str, Any], said: str) -> None:
    difference = trees.difference(SAME, {**SAME, **change})
    assert difference is not None, f"{change} was taken for no change"
    assert re.search(said, difference, re.DOTALL), difference


def test_a_missing_leaf_is_a_difference() -> None:
    assert "structure" in (trees.difference(SAME, {"a": t(2, 3)}) or "")


AXES = {"r": Axis.REQUEST, "k": Axis.TOKEN, "o": Axis.OFFSET, "x": Axis.FIXED}


def test_declared_rows_are_held_against_the_bucket() -> None:
    fits: dict[str, Any] = {"r": t(4), "k": t(8, 3), "o": t(5), "x": t(77), "more": t(1), "n": 1}
    trees.check_rows(fits, AXES, 4, 8, "prep 'p'")
    for name, wrong, rows in (("r", t(8), 4), ("k", t(4, 3), 8), ("o", t(4), 5), ("k", torch.tensor(0), 8)):
        said = rf"prep 'p' declares output '{name}' on axis \w+, {rows} rows at this bucket, but returned shape"
        with pytest.raises(ContractError, match=said):
            trees.check_rows({**fits, name: wrong}, AXES, 4, 8, "prep 'p'")


@pytest.mark.parametrize("wrong", [{}, {"r": None}, {"r": 4}, {"r": {"deep": t(4)}}])
def test_a_declared_output_must_be_there(wrong: dict[str, Any]) -> None:
    with pytest.raises(ContractError, match=r"declares output 'r', but returned tensors \["):
        trees.check_rows({"other": t(4), **wrong}, {"r": Axis.REQUEST}, 4, 8, "prep 'p'")


def test_nested_outputs_are_declared_by_dotted_name() -> None:
    trees.check_rows({"kv": [t(1), t(4)]}, {"kv.1": Axis.REQUEST}, 4, 4, "prep 'p'")
