"""Views: slots and tables by attribute or name, and nothing that is not declared."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch

from graphglue import Bucket, ContractError, Mode, View

X, T = torch.arange(4), torch.arange(9)


def view() -> View:
    return View({"x": X}, {"t": T}, Bucket(4, 4, 1), Mode.VERIFY, "lora", "prep 'p'")


def test_slots_and_tables_by_attribute_and_by_name() -> None:
    seen = view()
    assert seen.x is seen["x"] is X
    assert seen.tables.t is seen.tables["t"] is T
    assert (list(seen), len(seen), dict(seen)) == (["x"], 1, {"x": X})
    assert list(seen.tables) == ["t"]


def test_feature_guard_a_view_knows_bucket_mode_and_variant() -> None:
    seen = view()
    assert (seen.bucket, seen.mode, seen.variant) == (Bucket(4, 4, 1), Mode.VERIFY, "lora")


@pytest.mark.parametrize("name", ["y", "t", "raw", "num_requests", "num_tokens"])
def test_what_is_not_declared_is_refused(name: str) -> None:
    said = rf"prep 'p' read '{name}', which it did not declare; declared are \['x'\]: correct the name, or declare it"
    with pytest.raises(ContractError, match=said):
        getattr(view(), name)
    with pytest.raises(ContractError, match=said):
        view()[name]
    with pytest.raises(ContractError, match=r"read 'x'.*declared are \['t'\]"):
        _ = view().tables.x


def test_names_that_are_no_slots_are_no_items() -> None:
    seen = view()
    for name in ("bucket", "mode", "tables", "_names"):
        with pytest.raises(ContractError, match="did not declare"):
            seen[name]


@pytest.mark.parametrize("name", ["x", "y", "bucket"])
def test_rebind_another_tensor_can_not_be_bound(name: str) -> None:
    seen = view()
    with pytest.raises(ContractError, match=rf"prep 'p' bound another tensor to '{name}'.*view.{name}.copy_\(...\)"):
        setattr(seen, name, torch.zeros(4))
    with pytest.raises(ContractError, match="bound another tensor to 't'"):
        seen.tables.t = T.clone()
    assert seen.x is X
    assert seen.tables.t is T


def test_private_probes_see_an_ordinary_object() -> None:
    seen: Any = view()
    assert not hasattr(seen, "__array__")
    assert not hasattr(seen, "_private")
    assert copy.copy(seen).x is X
