"""The comparison itself: every kind of difference is found, and equal bits are equal."""

from __future__ import annotations

import pytest
import torch

from graphglue.demo.twin import compare

NAN = float("nan")


@pytest.mark.parametrize(
    "tensor",
    [
        torch.tensor([1.0, NAN, -0.0], dtype=torch.float64),
        torch.tensor([[1.0, NAN]], dtype=torch.bfloat16),
        torch.tensor([True, False]),
        torch.tensor(7),
        torch.empty(0, 3),
        torch.arange(6, dtype=torch.int32).reshape(2, 3).T,
    ],
)
def test_a_copy_is_equal(tensor: torch.Tensor) -> None:
    assert list(compare(0, {"x": tensor}, {"x": tensor.clone()})) == []


@pytest.mark.parametrize(
    ("glued", "expected", "row"),
    [
        (torch.tensor([1, 2, 3]), torch.tensor([1, 2, 4]), 2),
        (torch.tensor([[1, 2], [3, 4]]), torch.tensor([[1, 2], [9, 4]]), 1),
        (torch.tensor([0.0]), torch.tensor([-0.0]), 0),
        (torch.tensor([NAN]), torch.tensor([1.0]), 0),
        (torch.tensor([1, 2]), torch.tensor([1, 2], dtype=torch.int32), None),
        (torch.tensor([1, 2]), torch.tensor([[1, 2]]), None),
        (torch.tensor(1), torch.tensor(2), 0),
    ],
)
def test_a_difference_has_its_row(glued: torch.Tensor, expected: torch.Tensor, row: int | None) -> None:
    (found,) = compare(3, {"x": glued}, {"x": expected})
    assert (found.step, found.name, found.row) == (3, "x", row)


def test_a_missing_tensor_is_a_difference() -> None:
    same = torch.ones(2)
    found = list(compare(0, {"same": same, "extra": same}, {"same": same, "absent": same}))
    assert [(each.name, each.glued, each.expected) for each in found] == [
        ("absent", "nothing", "torch.float32 (2,)"),
        ("extra", "torch.float32 (2,)", "nothing"),
    ]
