"""Dtypes, numbers and contents of tensors."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import torch
from hypothesis import strategies as st

from graphglue.core.slots import Number, kind_of

INTEGERS = (torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8)
FLOATS = (torch.float32, torch.float64, torch.float16, torch.bfloat16)
DTYPES = (*INTEGERS, torch.bool, *FLOATS)

# Which source dtypes widen to a slot's; every value of the one is a value of the other.
NARROWER: Mapping[torch.dtype, tuple[torch.dtype, ...]] = {
    torch.int64: (torch.int32, torch.int16, torch.int8, torch.uint8, torch.uint16, torch.uint32),
    torch.int32: (torch.int16, torch.int8, torch.uint8, torch.uint16),
    torch.int16: (torch.int8, torch.uint8),
    torch.float64: (torch.float32, torch.float16, torch.bfloat16),
    torch.float32: (torch.float16, torch.bfloat16),
}


def dtypes() -> st.SearchStrategy[torch.dtype]:
    """Draw a dtype of a slot."""
    return st.sampled_from(DTYPES)


def numbers(dtype: torch.dtype, valid: tuple[Number, Number] | None = None) -> st.SearchStrategy[Number]:
    """Draw a Python number that ``dtype`` holds exactly.

    Args:
        dtype: of a slot.
        valid: inclusive bounds; without them floats may be NaN, infinite or -0.0.
    """
    if dtype == torch.bool:
        return st.booleans()
    if kind_of(dtype) == "float":
        quarters = st.integers(-64, 64).map(lambda quarter: quarter / 4)
        if valid is not None:
            return quarters.map(lambda number: min(max(number, float(valid[0])), float(valid[1])))
        largest = torch.finfo(dtype).max
        return quarters | st.sampled_from([float("nan"), float("inf"), float("-inf"), -0.0, largest, -largest])
    low, high = (torch.iinfo(dtype).min, torch.iinfo(dtype).max) if valid is None else (int(valid[0]), int(valid[1]))
    small = st.integers(max(low, -2), min(high, 9)) if max(low, -2) <= min(high, 9) else st.nothing()
    return small | st.integers(low, high)


@st.composite
def contents(
    draw: st.DrawFn, dtype: torch.dtype, shape: Sequence[int], valid: tuple[Number, Number] | None = None
) -> torch.Tensor:
    """Draw a contiguous tensor.

    Args:
        dtype: any dtype a source may have.
        shape: its extents.
        valid: inclusive bounds of its values; all of the dtype's by default.
    """
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    extents = tuple(shape)
    if dtype == torch.bool:
        return torch.from_numpy(rng.integers(0, 2, extents).astype(np.bool_))
    if kind_of(dtype) == "float":
        quarters = rng.integers(-64, 65, extents) / 4
        if valid is not None:
            return torch.from_numpy(np.asarray(np.clip(quarters, *valid))).to(dtype)
        special = rng.choice([np.nan, np.inf, -np.inf, -0.0], extents)
        return torch.from_numpy(np.asarray(np.where(rng.random(extents) < 0.2, special, quarters))).to(dtype)
    low, high = (torch.iinfo(dtype).min, torch.iinfo(dtype).max) if valid is None else (int(valid[0]), int(valid[1]))
    if max(low, -5) <= min(high, 99) and draw(st.booleans()):
        low, high = max(low, -5), min(high, 99)
    return torch.from_numpy(np.asarray(rng.integers(low, high, extents, endpoint=True))).to(dtype)
