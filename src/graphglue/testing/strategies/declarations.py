"""What is declared: slots, ladders and contracts."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from hypothesis import strategies as st

from graphglue.core.batch import Mode
from graphglue.core.contract import PrepContract
from graphglue.core.slots import REPEAT_LAST, Axis, Computed, Number, Slot, kind_of
from graphglue.testing.strategies.values import DTYPES, INTEGERS, NARROWER, numbers

AXES = (Axis.REQUEST, Axis.TOKEN, Axis.OFFSET, Axis.RANK, Axis.FIXED)


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
    return replace(slot, storage=storage)


@st.composite
def _pads(draw: st.DrawFn, slot: Slot, idle: str) -> Any:
    """Draw what a contract says of a slot's pad: the pad alone, or among others it is right for."""
    others = [slot.idle] if idle == "glue" and slot.idle is not None else []
    if draw(st.booleans()):
        others.append(draw(numbers(slot.dtype)))
    return tuple(draw(st.permutations([slot.pad, *others]))) if others else slot.pad
