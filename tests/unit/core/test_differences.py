"""First differences: bits decide, rows and leaves are named, and every kind of difference is one."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from graphglue import Axis, Bucket, Mode
from graphglue.core.differences import Difference, bits_of, first_difference, spell_step, without_axis
from graphglue.core.keys import Key
from graphglue.testing import strategies

AXES = {"pages": Axis.TOKEN, "lens": Axis.REQUEST, "indptr": Axis.OFFSET, "total": Axis.FIXED}
RAW, FULL = Bucket(2, 4, 2), Bucket(4, 8, 2)
DTYPES = (*strategies.DTYPES, torch.uint16, torch.uint32, torch.uint64, torch.complex64, torch.float8_e4m3fn)


def tree(bucket: Bucket) -> dict[str, Any]:
    return {
        "pages": torch.arange(bucket.tokens * 3).view(bucket.tokens, 3),
        "lens": torch.arange(bucket.requests, dtype=torch.int32),
        "indptr": torch.arange(bucket.requests + 1),
        "total": torch.tensor(7.0),
        "free": torch.zeros(bucket.tokens),
        "width": bucket.row_tokens,
    }


def changed(leaf: str, index: Any, bucket: Bucket = FULL) -> dict[str, Any]:
    result = tree(bucket)
    result[leaf][index] = 99
    return result


def found(expected: Any, seen: Any, **options: Any) -> Difference:
    difference = first_difference(expected, seen, AXES, RAW, **options)
    assert difference is not None
    return difference


def test_equal_trees_do_not_differ() -> None:
    assert first_difference(tree(FULL), tree(FULL), AXES, RAW) is None
    assert first_difference(tree(FULL), tree(FULL)) is None
    assert first_difference(torch.empty(0, 3), torch.empty(0, 3)) is None


def test_the_first_row_and_both_values_are_named() -> None:
    seen = changed("pages", (5, 1))
    seen["pages"][6] = 99
    difference = found(tree(FULL), seen)
    assert str(difference) == "leaf 'pages', pad row 5, element [5, 1]: 99, expected 16"
    assert (difference.leaf, difference.row, difference.index) == ("pages", 5, (5, 1))
    assert str(found(tree(FULL), changed("lens", 1))) == "leaf 'lens', real row 1: 99, expected 1"
    assert str(found(tree(FULL), changed("indptr", 2))) == "leaf 'indptr', real row 2: 99, expected 2"


def test_leaves_without_rows_name_the_element() -> None:
    assert str(found(tree(FULL), changed("free", 3))) == "leaf 'free', element [3]: 99.0, expected 0.0"
    assert str(found(tree(FULL), changed("total", ()))) == "leaf 'total': 99.0, expected 7.0"
    bare = first_difference(torch.tensor([1, 2]), torch.tensor([1, 3]))
    assert str(bare) == "the result, element [1]: 3, expected 2"


@pytest.mark.parametrize(
    ("leaf", "row", "is_real"),
    [("pages", 3, True), ("pages", 4, False), ("lens", 1, True), ("lens", 2, False), ("indptr", 2, True)]
    + [("indptr", 3, False), ("total", (), True), ("free", 0, False)],
)
def test_real_rows_end_at_the_axis_and_fixed_leaves_have_no_end(leaf: str, row: Any, is_real: bool) -> None:
    assert (first_difference(tree(FULL), changed(leaf, row), AXES, RAW, rows="real") is not None) is is_real


def test_real_rows_are_compared_between_two_extents() -> None:
    assert first_difference(tree(RAW), tree(FULL), AXES, RAW, rows="real") is None
    assert found(tree(RAW), changed("pages", 3), rows="real").row == 3
    assert "int64[8, 3]" in str(found(tree(RAW), tree(FULL)))


def test_what_is_no_tensor_is_compared_whole_but_not_by_rows() -> None:
    other = {**tree(FULL), "width": 3}
    assert str(found(tree(FULL), other)) == "leaf 'width': int 3, expected int 2"
    assert first_difference(tree(FULL), other, AXES, RAW, rows="real") is None


def test_structure_shape_and_dtype_differ() -> None:
    fewer = {name: leaf for name, leaf in tree(FULL).items() if name != "lens"}
    assert "structure" in str(found(tree(FULL), fewer))
    assert "structure" in str(found(tree(FULL), fewer, rows="real"))
    wide = {**tree(FULL), "lens": tree(FULL)["lens"].to(torch.int64)}
    assert str(found(tree(FULL), wide)) == "leaf 'lens': int64[4] on cpu, expected int32[4] on cpu"
    assert found(tree(FULL), wide, rows="real").leaf == "lens"
    narrow = {**tree(FULL), "pages": tree(FULL)["pages"][:, :2]}
    assert found(tree(FULL), narrow, rows="real").leaf == "pages"


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_every_dtype_is_compared_by_its_bits(dtype: torch.dtype) -> None:
    one = torch.zeros(3, 2, dtype=dtype)
    bytes_of = one.view(torch.uint8)
    for position in (0, bytes_of.shape[1] - 1):
        other = one.clone()
        assert first_difference(one, other) is None
        other.view(torch.uint8)[2, position] ^= 1
        difference = first_difference(one, other)
        assert difference is not None
        assert difference.index[0] == 2


def test_nan_equals_the_same_nan_and_no_other() -> None:
    nan, zero = torch.tensor([float("nan")]), torch.tensor([0.0])
    assert first_difference(nan, nan.clone()) is None
    other = nan.clone()
    bits_of(other).bitwise_xor_(1)
    assert other.isnan().all()
    assert first_difference(nan, other) is not None
    assert first_difference(zero, -zero) is not None


def test_only_small_changes_of_finite_floats_are_rounding() -> None:
    one = torch.tensor([1.0, 1000.0, float("inf")])
    assert first_difference(one, one + torch.tensor([1e-5, 0, 0])).is_rounding  # type: ignore[union-attr]
    for changed_to in ([1.0, 1001.0, float("inf")], [1.0, 1000.0, 5.0], [float("nan"), 1000.0, float("inf")]):
        assert not first_difference(one, torch.tensor(changed_to)).is_rounding  # type: ignore[union-attr]
    assert not first_difference(torch.tensor([1 << 40]), torch.tensor([(1 << 40) + 1])).is_rounding  # type: ignore[union-attr]


def test_a_true_difference_comes_before_rounding() -> None:
    one = {"a": torch.tensor([1.0]), "b": torch.tensor([1])}
    other = {"a": torch.tensor([1.0 + 1e-6]), "b": torch.tensor([2])}
    assert first_difference(one, other).leaf == "b"  # type: ignore[union-attr]
    assert first_difference(one, {**other, "b": one["b"]}).leaf == "a"  # type: ignore[union-attr]


def test_strides_do_not_count() -> None:
    one = torch.arange(6).view(2, 3)
    assert first_difference(one, one.t().contiguous().t()) is None
    assert first_difference(torch.tensor(3).expand(4), torch.full((4,), 3)) is None
    assert first_difference(torch.tensor([1 + 1j]).conj(), torch.tensor([1 - 1j])) is None


def test_leaves_without_an_axis_are_named() -> None:
    assert without_axis(tree(FULL), AXES) == ["free"]
    assert without_axis(tree(FULL), {}) == ["pages", "lens", "indptr", "total", "free"]


def test_a_step_is_named() -> None:
    assert spell_step(Key(Mode.VERIFY, 4, 8, 2), RAW) == "verify bucket of 4 requests and 8 tokens, raw 2 and 4"
    ragged = spell_step(Key(Mode.DECODE, 4, 8, 0, None, "lora"))
    assert ragged == "decode bucket of 4 requests and 8 tokens, ragged, variant 'lora'"
