"""Hypothesis strategies for what graphglue is given: slots, ladders, batches, contracts. Public.

A test of one's own prep draws a batch for its own slots, and compares::

    from hypothesis import given
    from graphglue.testing import strategies

    @given(batch=strategies.batches(my_slots, ladder=[1, 2, 4]))
    def test_my_prep(batch): ...

Everything drawn is legal; a test that wants a refusal breaks it itself. Contents come from one drawn
seed per tensor: examples shrink in slots, rows and dimensions, not value by value. Floats are numbers
that every float dtype holds exactly, and NaN, infinities and -0.0, so that a conversion is exact.

Sync: none, all tensors are on the CPU.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from hypothesis import strategies as st

from graphglue.core.batch import Batch, Mode
from graphglue.core.contract import PrepContract
from graphglue.core.slots import REPEAT_LAST, Axis, Computed, Number, Slot, kind_of

INTEGERS = (torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8)
FLOATS = (torch.float32, torch.float64, torch.float16, torch.bfloat16)
DTYPES = (*INTEGERS, torch.bool, *FLOATS)
AXES = (Axis.REQUEST, Axis.TOKEN, Axis.OFFSET, Axis.RANK, Axis.FIXED)

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


def ladders(max_size: int = 8, max_length: int = 4) -> st.SearchStrategy[list[int]]:
    """Draw the sizes of a ladder as engines give them: in any order, with repetitions.

    Args:
        max_size: the largest size.
        max_length: the largest number of sizes.
    """
    return st.lists(st.integers(1, max_size), min_size=1, max_size=max_length)


@dataclass(frozen=True)
class CaptureRows:
    """Give a number per row in turn: a ``Slot.capture`` that is a callable, with a readable repr."""

    values: tuple[Number, ...]

    def __call__(self, row: int) -> Number:
        """Give the number of a row."""
        return self.values[row % len(self.values)]


@st.composite
def slots(
    draw: st.DrawFn,
    name: str = "slot",
    *,
    axes: Sequence[Axis] = AXES,
    dtypes: Sequence[torch.dtype] = DTYPES,
    max_dims: int = 2,
    computed: bool = True,
    index_of: Mapping[str, int] | None = None,
    adopt: tuple[int, int, int] | None = None,
) -> Slot:
    """Draw a slot.

    Args:
        name: its name.
        axes: the axes to choose from.
        dtypes: the dtypes to choose from.
        max_dims: the largest number of dimensions besides the rows; extents are 0 to 3.
        computed: whether it may be computed from the step.
        index_of: table name -> its rows; slots that index one are drawn as well if given.
        adopt: the largest (requests, tokens, ranks); slots that adopt a storage of at least so many
            rows are drawn as well if given. Such a slot belongs to one arena.
    """
    axis = draw(st.sampled_from(axes))
    if computed and draw(st.integers(0, 5)) == 0:
        return draw(_computed_slots(name, axis))
    dtype = draw(st.sampled_from(dtypes))
    inner = tuple(draw(st.lists(st.sampled_from([2, 1, 3, 0]), max_size=max_dims)))
    row_dim = 0 if axis is Axis.FIXED else draw(st.integers(0, len(inner)))
    table = (
        draw(st.sampled_from(sorted(index_of))) if index_of and dtype == torch.int64 and draw(st.booleans()) else None
    )
    bounds = draw(st.none() | st.just((0, 9))) if kind_of(dtype) != "bool" else None
    valid = (0, index_of[table] - 1) if index_of and table else bounds
    number = numbers(dtype, valid)
    pad = number if axis in (Axis.RANK, Axis.FIXED) else number | st.just(REPEAT_LAST)
    rows = st.lists(number, min_size=1, max_size=3).map(lambda values: CaptureRows(tuple(values)))
    wider = [wide for wide, narrow in NARROWER.items() if dtype in narrow]
    slot = Slot(
        name,
        axis=axis,
        dtype=dtype,
        pad=draw(pad),
        inner=inner,
        row_dim=row_dim,
        missing=draw(st.sampled_from(["error", "pad"])),
        capture=draw(st.none() | number | rows),
        idle=draw(st.none() | number),
        index_of=table,
        accepts=draw(st.lists(st.sampled_from(wider), max_size=1).map(tuple)) if wider else (),
        valid=valid,
    )
    return slot if adopt is None or draw(st.booleans()) else draw(_adopted(slot, *adopt))


@st.composite
def slot_tables(draw: st.DrawFn, min_size: int = 1, max_size: int = 4, **options: Any) -> list[Slot]:
    """Draw the slots of a runner, named slot0, slot1 and so on.

    Args:
        min_size: the smallest number of slots.
        max_size: the largest number of slots.
        options: as ``slots`` takes them.
    """
    return [draw(slots(f"slot{i}", **options)) for i in range(draw(st.integers(min_size, max_size)))]


@st.composite
def sources(draw: st.DrawFn, slot: Slot, requests: int, tokens: int, num_ranks: int = 1) -> Any:
    """Draw what a batch may hand in for a slot: exact extents, in any accepted container and dtype.

    Tensors and arrays of the slot's dtype, a narrower one or an accepted wider one, at an offset in
    larger memory or read-only; nested lists and tuples; a number where one element is expected.

    Args:
        slot: the slot, not a computed one.
        requests: real requests.
        tokens: real tokens.
        num_ranks: ranks of the group.
    """
    shape = slot.shape(slot.rows(requests, tokens, num_ranks))
    dtype = draw(st.sampled_from([slot.dtype, *NARROWER.get(slot.dtype, ())]))
    fits = slot.valid
    if fits is not None and kind_of(dtype) == "integer":
        fits = (max(fits[0], torch.iinfo(dtype).min), min(fits[1], torch.iinfo(dtype).max))
    tensor = draw(contents(dtype, shape, fits))
    if dtype == slot.dtype and slot.accepts and draw(st.booleans()):
        tensor = tensor.to(slot.accepts[0])
    containers: list[Any] = [_as_is, _at_offset]
    if tensor.dtype != torch.bfloat16:
        containers += [_as_array, _as_array_at_offset, _as_read_only]
    if shape and tensor.numel():
        containers += [torch.Tensor.tolist, _as_tuple]
    if tensor.numel() == 1:
        containers += [torch.Tensor.item] + ([_as_scalar] if tensor.dtype != torch.bfloat16 else [])
    return draw(st.sampled_from(containers))(tensor)


@st.composite
def batches(
    draw: st.DrawFn,
    slots: Iterable[Slot],
    ladder: Iterable[int],
    *,
    tokens_per_request: int = 1,
    num_ranks: int = 1,
    modes: Sequence[Mode] = (Mode.DECODE,),
    features: Sequence[str] = (),
    max_requests: int | None = None,
    widths: Sequence[int] = (),
    ragged: bool = True,
    idle: bool = True,
) -> Batch:
    """Draw a batch: idle, unpadded, padded, of another width or ragged, with a source for each slot.

    Args:
        slots: the slots it is for.
        ladder: sizes in requests.
        tokens_per_request: the runner's width.
        num_ranks: ranks of the group.
        modes: the modes to choose from.
        features: features that may be active.
        max_requests: the most requests; the ladder's largest size by default, more is over the ladder.
        widths: other widths to choose from.
        ragged: whether requests may differ in tokens; each has 1 to ``tokens_per_request``, or one more.
        idle: whether it may have no requests.
    """
    mode = draw(st.sampled_from(modes))
    most = max(ladder) if max_requests is None else max_requests
    if most == 0 or (idle and draw(st.integers(0, 7)) == 0):
        return Batch.idle(mode=mode)
    requests = draw(st.integers(1, most))
    row_tokens = draw(_row_tokens(requests, tokens_per_request, widths, ragged))
    tokens = requests * tokens_per_request if row_tokens is None else sum(row_tokens)
    given = {}
    for slot in slots:
        if slot.value is None and not (slot.missing == "pad" and draw(st.integers(0, 3)) == 0):
            given[slot.name] = draw(sources(slot, requests, tokens, num_ranks))
    uniform = row_tokens is None or len(set(row_tokens)) == 1
    return Batch(
        requests,
        given,
        mode=mode,
        num_tokens=tokens if uniform and draw(st.booleans()) else None,
        row_tokens=row_tokens,
        features=draw(st.frozensets(st.sampled_from(features))) if features else frozenset(),
    )


@st.composite
def contracts(
    draw: st.DrawFn,
    slots: Iterable[Slot],
    *,
    name: str = "prep",
    tables: Sequence[str] = (),
    outputs: Mapping[str, Axis | str] | None = None,
    modes: Sequence[Mode] = (Mode.DECODE, Mode.VERIFY),
    features: Sequence[str] = (),
) -> PrepContract:
    """Draw a contract that fits the slots: it reads all of them, with their pads among its own.

    Args:
        slots: the slots the prep reads.
        name: the prep's name.
        tables: the tables it reads.
        outputs: leaf -> axis; the drawn contract declares some of them.
        modes: the modes to choose from.
        features: features it may be audited with.
    """
    idle: Any = draw(st.sampled_from(["eager", "glue"]))
    declared = dict(outputs or {})
    return PrepContract(
        name=name,
        reads={slot.name: draw(_pads(slot, idle)) for slot in slots},
        tables=tuple(tables),
        outputs={leaf: declared[leaf] for leaf in sorted(declared) if draw(st.booleans())},
        modes=draw(st.frozensets(st.sampled_from(modes), min_size=1)),
        host_free=draw(st.sampled_from([True, True, True, False])),
        padded=draw(st.sampled_from([True, True, False])),
        ragged=draw(st.booleans()),
        idle=idle,
        features=draw(st.frozensets(st.sampled_from(features))) if features else frozenset(),
    )


@st.composite
def _computed_slots(draw: st.DrawFn, name: str, axis: Axis) -> Slot:
    values = [value for value in Computed if value is not Computed.RANK_COUNTS or axis is Axis.RANK]
    value = draw(st.sampled_from(values))
    inner = () if value is Computed.RANK_COUNTS else draw(st.sampled_from([(), (1,), (2,)]))
    dtype = draw(st.sampled_from(INTEGERS))
    pad = draw(numbers(dtype) if axis in (Axis.RANK, Axis.FIXED) else numbers(dtype) | st.just(REPEAT_LAST))
    return Slot(name, axis=axis, dtype=dtype, pad=pad, inner=inner, value=value)


@st.composite
def _adopted(draw: st.DrawFn, slot: Slot, requests: int, tokens: int, num_ranks: int) -> Slot:
    """Give a slot an engine's buffer, which has more rows, lies at an offset and has strides of its own."""
    rows = slot.rows(requests, tokens, num_ranks) + draw(st.integers(0, 2))
    shape = slot.shape(rows)
    order = draw(st.permutations(range(len(shape))))
    offset = draw(st.integers(0, 3))
    base = torch.zeros(torch.Size(shape).numel() + offset, dtype=slot.dtype)
    permuted = base[offset:].view([shape[dim] for dim in order])
    storage = permuted.permute([order.index(dim) for dim in range(len(shape))])
    fields = {field: getattr(slot, field) for field in slot.__dataclass_fields__}
    return Slot(**{**fields, "storage": storage})


@st.composite
def _row_tokens(draw: st.DrawFn, requests: int, width: int, widths: Sequence[int], ragged: bool) -> list[int] | None:
    kinds = ["default", "uniform"] + ["other"] * bool(widths) + ["ragged"] * ragged
    match draw(st.sampled_from(kinds)):
        case "uniform":
            return [width] * requests
        case "other":
            return [draw(st.sampled_from(widths))] * requests
        case "ragged":
            return draw(st.lists(st.integers(1, width + 1), min_size=requests, max_size=requests))
    return None


@st.composite
def _pads(draw: st.DrawFn, slot: Slot, idle: str) -> Any:
    """Draw what a contract says of a slot's pad: the pad alone, or among others it is right for."""
    others = [slot.idle] if idle == "glue" and slot.idle is not None else []
    if draw(st.booleans()):
        others.append(draw(numbers(slot.dtype)))
    return tuple(draw(st.permutations([slot.pad, *others]))) if others else slot.pad


# Containers of one tensor's contents.


def _as_is(tensor: torch.Tensor) -> torch.Tensor:
    return tensor


def _at_offset(tensor: torch.Tensor) -> torch.Tensor:
    base = torch.zeros(tensor.numel() + 3, dtype=tensor.dtype)
    base[2 : 2 + tensor.numel()] = tensor.reshape(-1)
    return base[2 : 2 + tensor.numel()].view(tensor.shape)


def _as_array(tensor: torch.Tensor) -> np.ndarray:
    return tensor.numpy()


def _as_array_at_offset(tensor: torch.Tensor) -> np.ndarray:
    return _at_offset(tensor).numpy()


def _as_read_only(tensor: torch.Tensor) -> np.ndarray:
    array = tensor.numpy()
    array.flags.writeable = False
    return array


def _as_scalar(tensor: torch.Tensor) -> Any:
    return tensor.numpy().reshape(())[()]


def _as_tuple(tensor: torch.Tensor) -> tuple[Any, ...]:
    return tuple(tensor.tolist())
