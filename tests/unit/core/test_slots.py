"""Slots: shapes, rows, values that are normalised, and dtypes that widen. Faults are in test_errors.py."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from graphglue import REPEAT_LAST, Axis, Computed, ConfigError, Slot
from graphglue.core.slots import kind_of, same_pad, widens


def slot(axis: str = "request", dtype: torch.dtype = torch.int64, pad: Any = 0, **more: Any) -> Slot:
    return Slot("x", axis=axis, dtype=dtype, pad=pad, **more)


@pytest.mark.parametrize(("axis", "rows"), [("request", 3), ("token", 12), ("offset", 4), ("rank", 8), ("fixed", 1)])
def test_rows_follow_the_axis(axis: str, rows: int) -> None:
    assert slot(axis).rows(3, 12, num_ranks=8) == rows


@pytest.mark.parametrize(
    ("more", "shape"),
    [
        ({}, (5,)),
        ({"inner": (2, 3)}, (5, 2, 3)),
        ({"inner": (3,), "row_dim": 1}, (3, 5)),
        ({"inner": (2, 3), "row_dim": 1}, (2, 5, 3)),
        ({"inner": (2, 3), "row_dim": 2}, (2, 3, 5)),
        ({"inner": (0,)}, (5, 0)),
        ({"inner": [np.int64(4)]}, (5, 4)),
    ],
)
def test_rows_stand_at_row_dim(more: dict[str, Any], shape: tuple[int, ...]) -> None:
    assert slot("token", **more).shape(5) == shape


@pytest.mark.parametrize("inner", [(), (7,), (2, 3)])
def test_a_fixed_slot_has_its_inner_shape_whatever_the_step(inner: tuple[int, ...]) -> None:
    assert slot("fixed", inner=inner).shape(5) == inner


def test_an_axis_may_be_spelled_or_be_the_enum() -> None:
    assert slot("offset").axis is slot(Axis.OFFSET).axis is Axis.OFFSET


@pytest.mark.parametrize(
    ("dtype", "given", "kept"),
    [
        (torch.float32, 1, 1.0),
        (torch.bool, 1, True),
        (torch.int8, True, 1),
        (torch.int64, np.int32(7), 7),
        (torch.uint8, 255, 255),
        (torch.float16, float("inf"), float("inf")),
    ],
)
def test_a_pad_becomes_a_number_of_the_dtype(dtype: torch.dtype, given: Any, kept: Any) -> None:
    pad = slot(dtype=dtype, pad=given).pad
    assert pad == kept
    assert type(pad) is type(kept)


def test_pad_alias_a_slot_without_a_pad_can_not_be_declared() -> None:
    with pytest.raises(TypeError, match="pad"):
        Slot("out_cache_loc", axis="token", dtype=torch.int64)  # type: ignore[call-arg]


def test_idle_and_capture_are_kept_as_numbers_of_the_dtype() -> None:
    declared = slot(dtype=torch.float32, idle=2, capture=9)
    assert (declared.idle, declared.capture) == (2.0, 9.0)
    assert type(declared.idle) is type(declared.capture) is float

    def worst(row: int) -> int:
        return 100 - row

    assert slot(capture=worst).capture is worst


def test_one_accepted_dtype_may_be_given_alone() -> None:
    assert slot(dtype=torch.int32, accepts=torch.int64).accepts == (torch.int64,)


def test_a_slot_does_not_change() -> None:
    declared = slot()
    with pytest.raises(AttributeError):
        declared.pad = 5  # type: ignore[misc]
    assert declared.pad == 0


def test_slots_compare_by_identity() -> None:
    one = slot()
    assert one != slot()
    assert len({one, slot()}) == 2


@pytest.mark.parametrize("axis", ["request", "token", "offset"])
def test_cumulative_slots_may_repeat_their_last_row(axis: str) -> None:
    assert slot(axis, pad=REPEAT_LAST).pad is REPEAT_LAST


@pytest.mark.parametrize("value", list(Computed))
def test_every_computed_value_can_be_declared(value: Computed) -> None:
    assert slot("rank", value=value).value is value


INTEGERS = [
    torch.uint8, torch.uint16, torch.uint32, torch.uint64, torch.int8, torch.int16, torch.int32, torch.int64
]  # fmt: skip
FLOATS = [torch.float16, torch.bfloat16, torch.float32, torch.float64]


@pytest.mark.parametrize("source", INTEGERS)
@pytest.mark.parametrize("target", INTEGERS)
def test_integers_widen_exactly_where_every_value_fits(source: torch.dtype, target: torch.dtype) -> None:
    small, large = torch.iinfo(source), torch.iinfo(target)
    fits = all(large.min <= edge <= large.max for edge in (small.min, small.max))
    assert widens(source, target) is fits


@pytest.mark.parametrize("source", FLOATS)
@pytest.mark.parametrize("target", FLOATS)
def test_floats_widen_exactly_where_every_value_fits(source: torch.dtype, target: torch.dtype) -> None:
    info = torch.finfo(source)
    # The edges of the exponent, of the mantissa, and the smallest normal number.
    edges = torch.tensor([info.max, info.tiny, 1 + info.eps], dtype=source)
    fits = torch.equal(edges.to(torch.float64), edges.to(target).to(torch.float64))
    assert widens(source, target) is fits


@pytest.mark.parametrize(
    ("source", "target"),
    [
        (torch.bool, torch.int64),
        (torch.int64, torch.bool),
        (torch.int8, torch.float64),
        (torch.float32, torch.int64),
        (torch.complex64, torch.complex128),
    ],
)
def test_nothing_widens_to_another_kind(source: torch.dtype, target: torch.dtype) -> None:
    assert not widens(source, target)


def test_kinds() -> None:
    assert [kind_of(d) for d in (torch.bool, torch.uint16, torch.bfloat16, torch.complex64)] == [
        "bool", "integer", "float", "other"
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("one", "other", "same"),
    [
        (0, 0, True),
        (0, 0.0, True),
        (0, 1, False),
        (float("nan"), float("nan"), True),
        (float("nan"), 0, False),
        (0, float("nan"), False),
        (REPEAT_LAST, REPEAT_LAST, True),
        (REPEAT_LAST, 0, False),
        (0, REPEAT_LAST, False),
    ],
)
def test_pads_are_compared_by_value(one: Any, other: Any, same: bool) -> None:
    assert same_pad(one, other) is same


@pytest.mark.parametrize("name", ["tables", "bucket", "mode"])
def test_reserved_names_are_refused(name: str) -> None:
    with pytest.raises(ConfigError, match=f"'{name}' is reserved on every view; rename the slot"):
        Slot(name, axis="request", dtype=torch.int64, pad=0)
