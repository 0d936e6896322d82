"""What the fill kernel can address and convert, at the limits that no fill in these tests reaches."""

from __future__ import annotations

from itertools import product

import pytest
import torch

import graphglue as gg
from graphglue.device.packing import SlotLayout, converts

NUMBERS = [
    torch.uint8, torch.int8, torch.uint16, torch.int16, torch.uint32, torch.int32, torch.uint64, torch.int64,
    torch.float16, torch.bfloat16, torch.float32, torch.float64,
]  # fmt: skip
COPIED = [torch.bool, torch.float8_e4m3fn, torch.float8_e5m2]


def test_the_kernel_converts_between_numbers_and_only_copies_the_rest() -> None:
    """A bool or an 8-bit float that is read as the integer of its size would be filled in as that integer."""
    pairs = set(product(NUMBERS + COPIED, repeat=2))
    assert {pair for pair in pairs if converts(*pair)} == {
        *product(NUMBERS, repeat=2),
        *((kind, kind) for kind in COPIED),
    }


def layout(target: torch.Tensor) -> SlotLayout:
    return SlotLayout(gg.Slot("x", "request", torch.uint8, 0, inner=tuple(target.shape[:1]), row_dim=1), target)


@pytest.mark.parametrize("rows", [2**30, 2**30 - 1])
def test_slots_that_32_bits_can_not_address_are_left_to_torch(rows: int) -> None:
    """Meta tensors have the shapes and strides, and no memory."""
    whole = torch.empty((2, rows), dtype=torch.uint8, device="meta")
    apart = torch.empty((2, 2 * rows), dtype=torch.uint8, device="meta")[:, :4]  # few elements, far apart
    if rows == 2**30:
        for target in (whole, apart):
            with pytest.raises(ValueError, match=r"slot 'x' has more than 2\*\*31 - 1 elements"):
                layout(target)
    else:
        assert (layout(whole).outer, layout(whole).span) == (2, rows)
        assert (layout(apart).outer, layout(apart).span, layout(apart).pitch) == (2, 4, 2 * rows)


def test_a_slot_without_bytes_takes_no_block() -> None:
    assert layout(torch.empty((0, 4), dtype=torch.uint8)).num_blocks == 0
    assert layout(torch.empty((1, 4), dtype=torch.uint8)).num_blocks == 1
