"""Binding one source: what is taken, and as what. The fill itself is in device/test_arena.py."""

from __future__ import annotations

import enum
from typing import Any

import numpy as np
import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from graphglue import REPEAT_LAST, BindError, Slot
from graphglue.core.binding import bind_source

CPU = torch.device("cpu")


def slot(dtype: torch.dtype = torch.int64, axis: str = "request", pad: Any = 0, **more: Any) -> Slot:
    return Slot("x", axis=axis, dtype=dtype, pad=pad, **more)


def bind(declared: Slot, source: Any, raw: int = 3, rows: int = 8) -> Any:
    return bind_source(declared, source, raw, rows, CPU)


def test_a_write_says_head_tail_and_pad() -> None:
    declared = slot(pad=7)
    write = bind(declared, [1, 2, 3])
    assert (write.slot, write.raw, write.rows, write.pad) == (declared, 3, 8, 7)
    assert write.source.tolist() == [1, 2, 3]
    assert bind(slot(pad=REPEAT_LAST), [1, 2, 3]).pad is REPEAT_LAST


@pytest.mark.parametrize(
    "source",
    [
        torch.tensor([1, 2, 3]),
        torch.tensor([1, 2, 3], dtype=torch.int32),
        torch.tensor([1, 2, 3], dtype=torch.uint8),
        np.array([1, 2, 3]),
        np.array([1, 2, 3], dtype=np.uint32),
        np.array([1, 2, 3], dtype=np.int16),
        [1, 2, 3],
        (1, 2, 3),
        range(1, 4),
        [np.int32(1), np.int64(2), 3],
        torch.arange(10)[1:4],
        np.arange(10)[1:4],
    ],
    ids=lambda source: f"{type(source).__name__}-{getattr(source, 'dtype', '')}",
)
def test_fill_copy_integers_are_taken_from_anything_that_widens(source: Any) -> None:
    assert bind(slot(), source).source.to(torch.int64).tolist() == [1, 2, 3]


@pytest.mark.parametrize(
    ("dtype", "source"),
    [
        (torch.float32, [0.5, 1.5, 2.5]),
        (torch.float32, torch.tensor([0.5, 1.5, 2.5], dtype=torch.bfloat16)),
        (torch.float64, np.array([0.5, 1.5, 2.5], dtype=np.float16)),
        (torch.bfloat16, [0.5, 1.5, 2.5]),
        (torch.float16, torch.tensor([0.5, 1.5, 2.5], dtype=torch.float16)),
    ],
)
def test_fill_copy_floats(dtype: torch.dtype, source: Any) -> None:
    assert bind(slot(dtype), source).source.to(torch.float64).tolist() == [0.5, 1.5, 2.5]


@pytest.mark.parametrize("source", [[True, False, True], np.array([True, False, True]), torch.tensor([1, 0, 1]).bool()])
def test_fill_copy_bools(source: Any) -> None:
    write = bind(slot(torch.bool), source)
    assert write.source.dtype is torch.bool
    assert write.source.tolist() == [True, False, True]


@pytest.mark.parametrize(
    ("dtype", "source", "said"),
    [
        (torch.int32, torch.tensor([2**40, 1, 1]), r"dtype torch.int64; expected torch.int32 or a dtype that widens"),
        (torch.int32, torch.tensor([1, 1, 1]), r"declare accepts=\(torch.int64,\) on the slot"),
        (torch.int64, torch.tensor([1.0, 2.0, 3.0]), "dtype torch.float32; expected a dtype of kind integer"),
        (torch.float32, torch.tensor([1, 2, 3]), "dtype torch.int64; expected a dtype of kind float"),
        (torch.int64, torch.tensor([True, False, True]), "dtype torch.bool; expected a dtype of kind integer"),
        (torch.bool, torch.tensor([0, 1, 0]), "dtype torch.int64; expected a dtype of kind bool"),
        (torch.float16, torch.tensor([1, 2, 3.0]), "dtype torch.float32; expected torch.float16"),
        (torch.float16, torch.zeros(3, dtype=torch.bfloat16), "dtype torch.bfloat16"),
        (torch.int64, torch.tensor([1, 2, 3], dtype=torch.uint64), "dtype torch.uint64"),
        (torch.int64, np.array([1, 2, 3], dtype=np.uint64), "dtype torch.uint64"),
        (torch.float32, np.zeros(3), "dtype torch.float64"),
        (torch.float32, np.zeros(3, dtype=np.complex64), "a numpy array of dtype complex64"),
        (torch.int64, np.array(["a", "b", "c"]), "a numpy array of dtype <U1"),
        (torch.int64, np.array([1, 2, 3], dtype=object), "a numpy array of dtype object"),
        (torch.int32, [2**40, 1, 1], "values from 1 to 1099511627776; expected values that torch.int32 holds"),
        (torch.uint8, [-1, 1, 1], "values from -1 to 1; expected values that torch.uint8 holds, 0 to 255"),
        (torch.float16, [1e6, 0.0, 0.0], "values that torch.float16 holds"),
        (torch.int64, [1.5, 2, 3], "a list of floats; expected numbers of kind integer"),
        (torch.float32, [1, 2, 3], "a list of integers; expected numbers of kind float"),
        (torch.int64, [True, False, True], "a list of bools; expected numbers of kind integer"),
        (torch.int64, [1, None, 3], "a list of mixed or nested values"),
        (torch.int64, [[1], [2, 3], [4]], "a list of mixed or nested values"),
        (torch.int64, [2**70, 1, 1], "a list of mixed or nested values|values from"),
        (torch.int64, {1, 2, 3}, "a set; expected a tensor, a numpy array, a list or a number"),
        (torch.int64, "123", "a str; expected a tensor"),
        (torch.int64, {"a": 1}, "a dict; expected"),
    ],
    ids=str,
)  # fmt: skip
def test_fill_copy_what_would_change_values_is_refused(dtype: torch.dtype, source: Any, said: str) -> None:
    with pytest.raises(BindError, match=f"slot 'x': the source is .*(?:{said})"):
        bind(slot(dtype), source)


def test_fill_copy_narrowing_needs_a_declaration_and_values_that_fit() -> None:
    narrow = slot(torch.int32, accepts=(torch.int64,))
    assert bind(narrow, torch.tensor([1, 2, 3])).source.tolist() == [1, 2, 3]
    assert bind(narrow, np.array([1, 2, 3])).source.tolist() == [1, 2, 3]
    for source in (torch.tensor([2**40, 1, 1]), np.array([1, -(2**40), 1])):
        with pytest.raises(BindError, match=r"values that torch.int32 holds, -2147483648 to 2147483647"):
            bind(narrow, source)


def test_fill_copy_narrowed_floats_may_be_infinite_but_must_not_become_so() -> None:
    narrow = slot(torch.float16, accepts=(torch.float32,))
    special = torch.tensor([float("inf"), float("nan"), -1.0])
    assert bind(narrow, special).source is special
    with pytest.raises(BindError, match=r"values that torch.float16 holds"):
        bind(narrow, torch.tensor([1e30, 0.0, 0.0]))


@pytest.mark.parametrize("wide", [2**63, 2**64 - 1])
def test_narrowed_integers_are_compared_exactly(wide: int) -> None:
    """As floats, 2**63 and the largest int64 are one number."""
    for source in (torch.tensor([wide], dtype=torch.uint64), np.array([wide], dtype=np.uint64)):
        with pytest.raises(BindError, match=rf"values from {wide} to {wide}; expected values that torch.int64 holds"):
            bind(slot(accepts=torch.uint64), source, raw=1)
    largest = torch.tensor([2**63 - 1], dtype=torch.uint64)
    assert bind(slot(accepts=torch.uint64), largest, raw=1).source is largest


def test_narrowed_floats_may_be_of_a_dtype_that_numpy_lacks() -> None:
    narrow = slot(torch.float16, accepts=torch.bfloat16)
    fits, beyond = (torch.tensor([number], dtype=torch.bfloat16) for number in (65280.0, 65536.0))
    assert bind(narrow, fits, raw=1).source is fits
    with pytest.raises(BindError, match=r"values that torch.float16 holds"):
        bind(narrow, beyond, raw=1)


def test_an_infinity_is_refused_where_the_dtype_has_none() -> None:
    """Some 8-bit floats have none: it would become a NaN."""
    narrow = slot(torch.float8_e4m3fn, accepts=torch.float32)
    fits = torch.tensor([1.0, -448.0, float("nan")])
    assert bind(narrow, fits).source is fits
    with pytest.raises(BindError, match=r"an infinity; expected values that torch.float8_e4m3fn holds; it has no inf"):
        bind(narrow, torch.tensor([1.0, float("inf"), 0.0]))
    assert bind(slot(torch.float8_e5m2, accepts=torch.float32), torch.tensor([float("inf")]), raw=1).raw == 1


def test_narrowed_sources_may_be_empty() -> None:
    for source in (torch.empty(0, dtype=torch.int64), np.empty(0, dtype=np.int64)):
        assert bind(slot(torch.int32, accepts=torch.int64), source, raw=0).raw == 0


@pytest.mark.parametrize("rows", [0, 1, 2, 4, 8])
def test_fill_copy_the_extent_is_exactly_raw(rows: int) -> None:
    for source in (torch.zeros(rows, dtype=torch.int64), np.zeros(rows, np.int64), [0] * rows):
        with pytest.raises(
            BindError, match=rf"extent \({rows},\); expected exactly \(3,\), the real extent on axis request"
        ):
            bind(slot(), source)


@pytest.mark.parametrize(
    "source", [torch.tensor(5), np.array(5), torch.zeros(1, dtype=torch.int64), [0], np.zeros((3, 1), np.int64)]
)
def test_fill_copy_nothing_broadcasts(source: Any) -> None:
    with pytest.raises(BindError, match="nothing is cut, padded or broadcast"):
        bind(slot(), source)


@pytest.mark.parametrize(
    ("declared", "shape"),
    [
        (slot(inner=(2,)), (3, 2)),
        (slot(inner=(2,), row_dim=1), (2, 3)),
        (slot(axis="offset"), (3,)),
        (slot(axis="fixed", inner=(4, 5)), (4, 5)),
    ],
)
def test_every_dimension_is_compared(declared: Slot, shape: tuple[int, ...]) -> None:
    assert bind(declared, np.ones(shape, np.int64)).source.shape == shape
    wrong = (*shape[:-1], shape[-1] + 1)
    with pytest.raises(BindError, match="expected exactly"):
        bind(declared, np.ones(wrong, np.int64))


big = torch.arange(24).reshape(3, 8)


@pytest.mark.parametrize(
    ("source", "advice"),
    [
        (big[:, ::2], r"strides \(8, 2\) for shape \(3, 4\); expected a contiguous source; call .contiguous\(\)"),
        (big[:, :4], r"call .contiguous\(\)"),
        (big.t()[:3, :3][:, :3].t(), r"call .contiguous\(\)"),
        (torch.arange(4).expand(3, 4), r"strides \(0, 1\).*call .contiguous\(\)"),
        (big.numpy()[:, ::2], "call np.ascontiguousarray"),
        (big.numpy()[::-1, :4], "call np.ascontiguousarray"),
        (big.numpy()[:, :4].astype(">i8"), "in native byte order; call np.ascontiguousarray"),
    ],
)
def test_fill_copy_strided_sources_are_refused_with_the_way_out(source: Any, advice: str) -> None:
    with pytest.raises(BindError, match=advice):
        bind(slot(inner=(source.shape[1],)), source)


def test_fill_copy_an_offset_is_fine() -> None:
    assert bind(slot(inner=(8,)), big[1:], raw=2).source.tolist() == big[1:].tolist()
    assert bind(slot(inner=(8,)), big.numpy()[1:], raw=2).source.tolist() == big[1:].tolist()


def test_a_tensor_elsewhere_is_refused() -> None:
    with pytest.raises(BindError, match="a tensor on meta; expected one on cpu or the CPU; move it first"):
        bind(slot(), torch.empty(3, dtype=torch.int64, device="meta"))


def test_a_tensor_on_the_cpu_or_on_the_slots_own_device_is_taken() -> None:
    """Meta stands for a device: what lies there is not looked at, so a narrowed value that does not fit is not seen."""
    host, there = torch.tensor([1, 2, 3]), torch.empty(3, dtype=torch.int64, device="meta")
    narrow = slot(torch.int32, accepts=torch.int64)
    for device in (torch.device("meta"), torch.device("cuda", 0)):
        assert bind_source(slot(), host, 3, 8, device).source is host
    assert bind_source(slot(), there, 3, 8, torch.device("meta")).source is there
    assert bind_source(narrow, there, 3, 8, torch.device("meta")).source is there
    with pytest.raises(BindError, match=r"a tensor on meta; expected one on cuda:0 or the CPU"):
        bind_source(slot(), there, 3, 8, torch.device("cuda", 0))
    with pytest.raises(BindError, match=r"values that torch.int32 holds"):
        bind_source(narrow, host * 2**40, 3, 8, torch.device("meta"))


def test_a_tensor_without_plain_contents_is_refused() -> None:
    """Its memory holds something else than its values, and the fill copies memory."""
    with FakeTensorMode():
        fake = torch.zeros(3, dtype=torch.int64)
    with pytest.raises(BindError, match="a fake tensor, which has no contents; expected a real one"):
        bind(slot(), fake)
    negated = torch.tensor([1 + 2j]).conj().imag  # minus 2, kept as 2 and a bit that says so
    assert negated.is_neg()
    assert negated.is_contiguous()
    with pytest.raises(BindError, match=r"negative bit; expected plain values in memory; call .resolve_neg\(\)"):
        bind(slot(torch.float32), negated, raw=1)


def test_a_masked_array_is_refused() -> None:
    with pytest.raises(BindError, match=r"a masked array; expected a plain one; .* call .filled\(value\)"):
        bind(slot(), np.ma.array([1, 2, 3], mask=[False, True, False]))


def test_a_sparse_tensor_is_refused() -> None:
    with pytest.raises(BindError, match=r"layout torch.sparse_coo; expected a strided one; call .to_dense\(\)"):
        bind(slot(), torch.tensor([1, 0, 2]).to_sparse())


@pytest.mark.parametrize("number", [5, np.int32(5), np.int64(5)])
def test_a_number_stands_for_one_element(number: Any) -> None:
    assert bind(slot(), number, raw=1).source == 5
    assert bind(slot(axis="fixed"), number).source == 5
    assert bind(slot(axis="fixed", inner=(1, 1)), number).source == 5
    with pytest.raises(BindError, match=r"values of extent \(3,\); a number fits one element only"):
        bind(slot(), number, raw=3)


class Pool(enum.IntEnum):
    FIRST = 4


@pytest.mark.parametrize(
    ("dtype", "given", "kept"),
    [
        (torch.bool, True, True),
        (torch.bool, np.bool_(False), False),
        (torch.float32, 1.5, 1.5),
        (torch.float32, np.float32(2.5), 2.5),
        (torch.int64, Pool.FIRST, 4),
        (torch.int64, np.uint8(7), 7),
    ],
)
def test_a_number_is_kept_as_python_s_own(dtype: torch.dtype, given: Any, kept: Any) -> None:
    source = bind(slot(dtype), given, raw=1).source
    assert source == kept
    assert type(source) is type(kept)


@pytest.mark.parametrize(
    ("dtype", "number", "said"),
    [
        (torch.int64, 1.0, "a number of kind integer"),
        (torch.int64, True, "a number of kind integer"),
        (torch.float32, 1, "a number of kind float"),
        (torch.bool, 1, "a number of kind bool"),
        (torch.int32, np.int64(1), "dtype torch.int64"),
        (torch.int8, 1000, "values that torch.int8 holds, -128 to 127"),
        (torch.int64, 2**70, "values that torch.int64 holds"),
        (torch.int64, 1j, "a complex; expected a tensor"),
    ],
)
def test_a_number_of_another_kind_is_refused(dtype: torch.dtype, number: Any, said: str) -> None:
    with pytest.raises(BindError, match=said):
        bind(slot(dtype), number, raw=1)


def test_a_read_only_array_is_taken_without_a_warning(recwarn: pytest.WarningsRecorder) -> None:
    array = np.array([1, 2, 3])
    array.flags.writeable = False
    assert bind(slot(), array).source.tolist() == [1, 2, 3]
    assert not recwarn.list


def test_single_rows_have_any_stride() -> None:
    """Arrays of one row are contiguous whatever their strides say; torch takes no odd ones."""
    backwards = np.arange(1, 9)[::-8]
    inside = np.array([(1, 8)], dtype=[("small", np.int32), ("large", np.int64)])["large"]
    assert (backwards.strides, inside.strides) == ((-64,), (12,))
    for array in (backwards, inside):
        assert array.flags.c_contiguous
        assert bind(slot(), array, raw=1).source.tolist() == [8]


def test_empty_lists_are_taken_where_no_rows_are_expected() -> None:
    assert bind(slot(inner=(0,)), [[], [], []]).source.shape == (3, 0)


def test_a_number_s_write_says_head_tail_and_pad_too() -> None:
    declared = slot(pad=7)
    write = bind(declared, 5, raw=1)
    assert (write.slot, write.source, write.raw, write.rows, write.pad) == (declared, 5, 1, 8, 7)


@pytest.mark.parametrize("dtype", [torch.uint8, torch.int32, torch.uint64])
@pytest.mark.parametrize("values", [[], [1, 2, 3]])
def test_a_list_becomes_a_cpu_tensor_of_the_slot_s_dtype_whatever_the_default_device(
    dtype: torch.dtype, values: list[int]
) -> None:
    with torch.device("meta"):
        source = bind(slot(dtype), values, raw=len(values)).source
    assert (source.dtype, source.device, source.tolist()) == (dtype, CPU, values)


def test_a_list_beyond_int64_is_refused_where_the_slot_holds_no_more() -> None:
    with pytest.raises(
        BindError, match=r"values from 9223372036854775808 to .*; expected values that torch.int64 holds"
    ):
        bind(slot(), [2**63, 2**63 + 1], raw=2)


def test_a_refused_number_is_shown() -> None:
    with pytest.raises(BindError, match=r"the source is the number 1.5; expected a number of kind integer"):
        bind(slot(), 1.5, raw=1)
    with pytest.raises(BindError, match=r"the source is the number 5; expected values of extent \(3,\)"):
        bind(slot(), 5)


@pytest.mark.parametrize("spelt", [list, lambda values: np.array(values, np.ulonglong), np.asarray])
def test_unsigned_integers_beyond_the_signed_ones_are_taken_however_numpy_calls_them(spelt: Any) -> None:
    values = [2**63, 2**64 - 1, 2**63 + 5]
    write = bind(slot(dtype=torch.uint64), spelt(values), raw=3)
    assert write.source.dtype is torch.uint64
    assert write.source.tolist() == values
