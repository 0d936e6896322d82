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


@pytest.mark.parametrize("dtype", [torch.bool, torch.complex64, *INTEGERS, *FLOATS])
def test_every_dtype_widens_to_itself(dtype: torch.dtype) -> None:
    assert widens(dtype, dtype)


@pytest.mark.parametrize("source", FLOATS)
@pytest.mark.parametrize("target", FLOATS)
def test_floats_widen_exactly_where_every_value_fits(source: torch.dtype, target: torch.dtype) -> None:
    info = torch.finfo(source)
    # The edges of the exponent, of the mantissa, and the smallest normal number.
    edges = torch.tensor([info.max, info.tiny, 1 + info.eps], dtype=source)
    fits = torch.equal(edges.to(torch.float64), edges.to(target).to(torch.float64))
    assert widens(source, target) is fits


EIGHT_BITS = [torch.float8_e4m3fn, torch.float8_e5m2, torch.float8_e4m3fnuz, torch.float8_e5m2fnuz]


@pytest.mark.parametrize("source", EIGHT_BITS)
@pytest.mark.parametrize("target", [*EIGHT_BITS, torch.float16, torch.bfloat16, torch.float32])
def test_floats_of_8_bits_widen_exactly_where_every_value_fits(source: torch.dtype, target: torch.dtype) -> None:
    every = torch.arange(256, dtype=torch.uint8).view(source).to(torch.float32)
    fits = torch.allclose(every.to(target).to(torch.float32), every, rtol=0, atol=0, equal_nan=True)
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


OVERLAPPING, SPARSE = torch.zeros(1, dtype=torch.int64).expand(4), torch.zeros(4, dtype=torch.int64).to_sparse()


@pytest.mark.parametrize(
    ("more", "said"),
    [
        ({"dtype": "int64"}, "slot 'x': dtype 'int64' is not usable; expected a bool, integer or floating torch.dtype"),
        ({"dtype": np.dtype("int64")}, "a bool, integer or floating torch.dtype"),
        ({"dtype": [torch.int64]}, "a bool, integer or floating torch.dtype"),
        ({"dtype": torch.float8_e4m3fn, "pad": float("inf")}, "torch.float8_e4m3fn, which has no infinity"),
        ({"row_dim": 1.0, "inner": (2,)}, "row_dim=1.0 is not usable; expected an integer"),
        ({"row_dim": True, "inner": (2,)}, "row_dim=True is not usable; expected an integer"),
        ({"row_dim": 2, "inner": (2,)}, "row_dim=2 is not usable; expected 0 to 1, the number of inner dimensions"),
        ({"axis": "fixed", "row_dim": 1, "inner": (2,)}, "row_dim=1 is not usable; expected 0 to 0"),
        ({"accepts": 5}, "accepts=5 is not usable; expected dtypes of the same kind as torch.int64"),
        ({"accepts": (torch.int32, "int64")}, "accepts 'int64' is not usable"),
        ({"accepts": ([torch.int32],)}, "accepts .* is not usable"),
        ({"idle": lambda row: row}, "idle <function .* is not usable; expected a number of torch.int64"),
        ({"valid": (1, 2, 3)}, "valid=.* is not usable; expected .low, high. with low <= high"),
        ({"valid": (2, 1)}, "valid=.* is not usable"),
        ({"valid": 5}, "valid=5 is not usable"),
        ({"axis": "rank", "inner": (2,), "value": Computed.RANK_COUNTS}, "axis='rank' and no inner dimensions"),
        ({"axis": "token", "value": Computed.RANK_COUNTS}, "axis='rank' and no inner dimensions"),
        ({"storage": OVERLAPPING}, "storage that overlaps itself is not usable; .* pass .contiguous"),
        ({"storage": SPARSE}, "storage Tensor is not usable; expected a strided torch.Tensor"),
        ({"storage": [1, 2]}, "storage list is not usable"),
    ],
)
def test_what_a_slot_refuses(more: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        slot(**more)


@pytest.mark.parametrize("name", ["class", "None", "seq-lens", "", "_hidden", "9lives", None, ["lens"]])
def test_names_that_no_view_could_have_are_refused(name: Any) -> None:
    with pytest.raises(ConfigError, match=r"expected a public Python identifier, because preps read view.<name>"):
        Slot(name, axis="request", dtype=torch.int64, pad=0)


def test_what_a_slot_takes_that_looks_like_a_fault() -> None:
    assert slot(dtype=torch.float32, pad=0.1).pad == 0.1  # rounded where it is written, as every float is
    assert slot(valid=[0, 5]).valid == [0, 5]
    assert slot(valid=(5, 5)).valid == (5, 5)
    assert slot(storage=torch.zeros(1, dtype=torch.int64).expand(1)).storage is not None
    one_row = torch.zeros(8, dtype=torch.int64).as_strided((1, 4), (0, 1))  # a stride that nothing steps by
    assert slot(inner=(4,), storage=one_row).storage is one_row
