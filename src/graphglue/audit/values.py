"""Legal values for a step nobody handed in: what a slot says of its values, and a guess where it says nothing.

Values differ from each other where there is room for it, because engines give each request a row of its own,
and none is the pad, whose row is a sink. The same seed gives the same values.
"""

from __future__ import annotations

import random
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch

from graphglue.core.buckets import Bucket
from graphglue.core.slots import Axis, Number, Pad, Slot, kind_of

_GUESSED_LARGEST = 63
_FLOAT_STEPS = 8  # eighths are exact in every float dtype
_MAX_DISTINCT = 1 << 14


class Bounds(NamedTuple):
    """The inclusive range of a slot's legal values, and whether anybody stated it."""

    low: Number
    high: Number
    stated: bool


def bounds_of(slot: Slot, tables: Mapping[str, torch.Tensor]) -> Bounds:
    """Say which values a slot may hold: by ``valid`` and ``index_of``, else a guess.

    The guess is a row of every dimension of every table, from 0 or 1 up as the pad is, and up to the capture value
    where there is one: that is legal, and the worst case.
    """
    kind = kind_of(slot.dtype)
    if kind == "bool":
        return Bounds(False, True, True)
    table = tables.get(slot.index_of) if slot.index_of else None
    if slot.valid is not None or (table is not None and table.dim()):
        low, high = slot.valid if slot.valid is not None else (0, _largest_of(slot))
        if kind == "integer":
            high = min(high, _largest_of(slot))
        if table is not None and table.dim():
            low, high = max(low, 0), min(high, table.shape[0] - 1)
        return Bounds(low, max(low, high), True)
    if slot.axis is Axis.OFFSET and kind == "integer":
        return Bounds(0, _largest_of(slot), True)  # running sums of the batch's own tokens
    if kind == "float":
        return Bounds(1 / _FLOAT_STEPS, 1.0, False)
    extents = [extent for tensor in tables.values() for extent in tensor.shape if extent > 1]
    high = min([_GUESSED_LARGEST, _largest_of(slot), *(extent - 1 for extent in extents)])
    if isinstance(slot.capture, int):
        high = max(high, slot.capture)
    low = min(high, 1 if not isinstance(slot.pad, Pad) and slot.pad >= 1 else 0)
    return Bounds(low, high, False)


def split_rows(raw: Bucket, rng: random.Random) -> list[int]:
    """Deal a step's tokens to its requests: one or more each, unequal where they may be."""
    if raw.row_tokens or not raw.requests:
        return [raw.row_tokens] * raw.requests
    cuts = sorted(rng.sample(range(1, raw.tokens), raw.requests - 1))
    rows = [end - begin for begin, end in zip([0, *cuts], [*cuts, raw.tokens])]
    if len(rows) > 1 and len(set(rows)) == 1 and rows[0] > 1:
        rows[0], rows[1] = rows[0] + 1, rows[1] - 1
    return rows


def draw(slot: Slot, bounds: Bounds, rows: int, row_tokens: Sequence[int], rng: random.Random) -> torch.Tensor:
    """Draw a CPU tensor of a slot's legal values.

    Args:
        slot: the slot.
        bounds: as ``bounds_of`` says.
        rows: how many rows.
        row_tokens: tokens of each request, which offset slots sum up.
        rng: where the values come from.
    """
    shape = slot.shape(rows)
    if slot.axis is Axis.OFFSET and kind_of(slot.dtype) == "integer":
        return _spread(slot, _offsets(slot, bounds, row_tokens, rng), shape)
    count = torch.Size(shape).numel()
    values = _numbers(slot, bounds, count, rng)
    return torch.from_numpy(np.asarray(values).reshape(shape)).to(slot.dtype)


def _numbers(slot: Slot, bounds: Bounds, count: int, rng: random.Random) -> Any:
    kind = kind_of(slot.dtype)
    generator = np.random.default_rng(rng.getrandbits(64))
    if kind == "bool":
        return generator.integers(0, 2, count).astype(np.bool_)
    if kind == "float":
        steps = generator.integers(0, _FLOAT_STEPS + 1, count) / _FLOAT_STEPS
        return float(bounds.low) + steps * (float(bounds.high) - float(bounds.low))
    return np.asarray(_integers(slot, int(bounds.low), int(bounds.high), count, rng, generator), dtype=np.int64)


def _integers(slot: Slot, low: int, high: int, count: int, rng: random.Random, generator: Any) -> Any:
    if low < high and slot.pad == low:
        low += 1
    elif low < high and slot.pad == high:
        high -= 1
    if count > _MAX_DISTINCT or high - low <= count:
        return generator.integers(low, high, count, endpoint=True)
    distinct: dict[int, None] = {}  # in the order they were drawn
    while len(distinct) < count:
        value = rng.randint(low, high)
        if value != slot.pad:
            distinct[value] = None
    return list(distinct)


def _offsets(slot: Slot, bounds: Bounds, row_tokens: Iterable[int], rng: random.Random) -> list[int]:
    """Give running sums of the requests' tokens; another rising row where ``valid`` says what is legal."""
    sums = [0]
    for tokens in row_tokens:
        sums.append(sums[-1] + tokens)
    if slot.valid is None:
        return sums
    low, high = int(bounds.low), int(bounds.high)
    first = min(max(0, low), high)
    return [first, *sorted(rng.randint(first, high) for _ in sums[1:])]


def _spread(slot: Slot, values: Sequence[int], shape: Sequence[int]) -> torch.Tensor:
    """Repeat one row of numbers over a slot's other dimensions."""
    column = [-1 if dim == slot.row_dim else 1 for dim in range(len(shape))]
    return torch.tensor(values, dtype=slot.dtype).view(column).expand(shape).contiguous()


def _largest_of(slot: Slot) -> int:
    return min(torch.iinfo(slot.dtype).max, torch.iinfo(torch.int64).max) if kind_of(slot.dtype) == "integer" else 1
