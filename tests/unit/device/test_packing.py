"""The parameter struct says what the reference does: packed by ``FillParams``, read by an interpreter.

The interpreter shares no code with the packing (``kernel_model.py``). All memory is compared byte for byte,
guard bytes of adopted storages included; only NaNs that were converted may differ in their payload.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, Phase, assume, given, settings
from hypothesis import strategies as st

import graphglue as gg
from graphglue.core.batch import extents_of
from graphglue.core.binding import Write
from graphglue.core.slots import widens
from graphglue.device import kernel, packing
from graphglue.device.kernel_fill import KernelFill
from graphglue.device.packing import FillParams, SlotLayout
from graphglue.testing import strategies as ggst
from tests.unit.device import kernel_model
from tests.unit.device.fill_steps import (
    CHANGES,
    FAST_SLOTS,
    Lane,
    Memory,
    Place,
    assert_same_memory,
    changed,
    fill_reference,
    kinds_at,
    own_views,
    settle_nans,
    sources_of,
    step_and_compare,
)
from tests.unit.device.kernel_model import HostKernel, OnDevice, PinnedPool, interpret, on_device, read_params

DTYPES = (*ggst.DTYPES, torch.uint16, torch.uint32)
PLACE = Place(on_device, lambda tensor: tensor.as_subclass(OnDevice))
KINDS = kinds_at(PLACE)


class Staging:
    """Stand in for the pinned ring: copy a source in the slot's dtype, and give its address."""

    def __init__(self) -> None:
        self.blocks: list[torch.Tensor] = []

    def __call__(self, source: torch.Tensor, dtype: torch.dtype) -> int:
        self.blocks.append(source.detach().reshape(-1).to(dtype).clone())
        return self.blocks[-1].data_ptr()


def run_interpreter(params: FillParams) -> None:
    interpret(bytes(params.buffer), len(params.layouts), params.num_blocks)


def fill_and_compare(
    params: FillParams, writes: Sequence[Write], targets: dict[str, torch.Tensor], run: Callable[[FillParams], None]
) -> Staging:
    """Run a step by the reference and by its packed struct, from the same memory; both leave the same bytes."""
    memory, stage = Memory(targets.values()), Staging()
    memory.scramble(7)
    before = memory.save()
    fill_reference(writes, targets)
    converted = [targets[write.slot.name] for write in writes if _converts(write)]
    settle_nans(converted)
    expected = memory.save()
    memory.restore(before)
    params.pack(writes, stage)
    run(params)
    settle_nans(converted)
    assert_same_memory(memory.save(), expected, str(writes))
    return stage


def _converts(write: Write) -> bool:
    return isinstance(write.source, torch.Tensor) and write.source.dtype != write.slot.dtype


@st.composite
def cases(draw: st.DrawFn, max_slots: int = 4) -> SimpleNamespace:
    """Draw an arena and a bucket of it, with the slots that lie in regular blocks."""
    sizes, width, ranks = draw(ggst.ladders(6, max_length=3)), draw(st.integers(1, 2)), draw(st.integers(1, 3))
    table = ggst.slot_tables(max_size=max_slots, dtypes=DTYPES, adopt=(max(sizes), max(sizes) * width, ranks))
    slots = draw(table)
    arena = gg.Arena(slots, sizes, tokens_per_request=width, num_ranks=ranks)
    size = draw(st.sampled_from(sizes))
    bucket = gg.Bucket(size, size * width, width)
    layouts = {}
    for slot in slots:
        try:
            layouts[slot.name] = SlotLayout(slot, arena.targets(bucket)[slot.name])
        except ValueError:
            assert slot.storage is not None  # our own storage is always regular
    assume(layouts)
    return SimpleNamespace(arena=arena, bucket=bucket, width=width, ranks=ranks, layouts=layouts, size=size)


@st.composite
def writes_of(draw: st.DrawFn, case: SimpleNamespace) -> list[Write]:
    """Draw a step that fits the bucket: host and device sources, own views, idle, missing and computed slots."""
    arena = case.arena
    drawn = ggst.batches(
        arena.slots.values(), [case.size], tokens_per_request=case.width, num_ranks=case.ranks, ragged=False
    )
    batch = draw(drawn)
    raw = extents_of(batch, case.width)
    own = own_views(arena, raw, case.bucket)
    given = {name: own[name] if draw(st.integers(0, 5)) == 0 else source for name, source in batch.sources.items()}
    writes = [write for write in arena.bind(given, raw, case.bucket) if write.slot.name in case.layouts]
    return [
        replace(write, source=on_device(write.source, draw(st.integers(0, 3))))
        if isinstance(write.source, torch.Tensor) and draw(st.booleans())
        else write
        for write in writes
    ]


def check_steps(data: st.DataObject, run: Callable[[FillParams], None] = run_interpreter) -> None:
    """Pack several steps into one struct, one after the other; each is right."""
    case = data.draw(cases())
    limit = data.draw(st.sampled_from([0, 16, 48, 256, 4096]), label="payload limit")
    params = FillParams(list(case.layouts.values()), limit)
    targets = {name: case.arena.targets(case.bucket)[name] for name in case.layouts}
    for _ in range(data.draw(st.integers(1, 3), label="steps")):
        fill_and_compare(params, data.draw(writes_of(case)), targets, run)


@given(data=st.data())
def test_the_struct_says_what_the_reference_does_for_any_slots_and_any_step(data: st.DataObject) -> None:
    check_steps(data)


def _no_tail(element: Any) -> Any:
    return lambda slot, payload, block, within: (
        element(slot, payload, block, within) if within < slot.head else 0x5A5A5A5A5A5A5A5A
    )


def _one_element_early(element: Any) -> Any:
    return lambda slot, payload, block, within: element(slot, payload, block, max(0, within - 1))


@pytest.mark.parametrize("break_", [_no_tail, _one_element_early])
def test_the_property_can_fail(monkeypatch: pytest.MonkeyPatch, break_: Any) -> None:
    monkeypatch.setattr(kernel_model, "_element", break_(kernel_model._element))

    @settings(max_examples=60, database=None, derandomize=True, phases=[Phase.generate], print_blob=False)
    @given(data=st.data())
    def check(data: st.DataObject) -> None:
        check_steps(data)

    with pytest.raises(AssertionError, match="memory 0 differs at bytes"):
        check()


@pytest.mark.parametrize("name", ["pitch", "head", "type", "pad", "own view's pitch"])
def test_a_wrong_field_is_found(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    """Show that each field of a shape is compared by the steps that read it."""
    slot = gg.Slot("x", "request", torch.int32, 9, inner=(2, 3), row_dim=1, storage=torch.zeros(2, 8, 3).int())
    arena = gg.Arena([slot], [4])
    bucket = gg.Bucket(4, 4, 1)
    params = FillParams([SlotLayout(slot, arena.targets(bucket)["x"])], 4096)
    narrow = torch.arange(12, dtype=torch.int16).reshape(2, 2, 3)
    source = None if name == "own view's pitch" else on_device(narrow)
    writes = [Write(slot, source, 2, 4, 9)]
    fill_and_compare(params, writes, arena.targets(bucket), run_interpreter)

    def broken(params: FillParams) -> None:
        field, offset = {"pitch": (12, 1), "own view's pitch": (12, 1), "head": (8, 1), "type": (17, 1), "pad": (0, 1)}[
            name
        ]
        params.buffer[8 + field] = (params.buffer[8 + field] + offset) % 256
        run_interpreter(params)

    with pytest.raises(AssertionError, match="differs at bytes"):
        fill_and_compare(params, writes, arena.targets(bucket), broken)


# By hand: every pad kind and element size, conversions, strides, where a source is carried.

PADS = {
    torch.bool: [True, False], torch.uint8: [255], torch.int8: [-128, -1], torch.int16: [-2], torch.uint16: [65535],
    torch.int32: [-(2**31)], torch.uint32: [2**32 - 1], torch.int64: [-(2**63), 2**63 - 1], torch.uint64: [2**63 - 1],
    torch.float16: [-0.0, 0.0, math.nan, 65504.0], torch.bfloat16: [-0.0, math.inf, math.nan, 1.5],
    torch.float32: [-0.0, 0.0, math.nan, -math.inf, 1e-45], torch.float64: [-0.0, math.nan, 5e-324, 1e300],
    torch.float8_e4m3fn: [0.5, -0.0], torch.float8_e5m2: [-2.0],
}  # fmt: skip


def one_slot(dtype: torch.dtype, pad: Any, raw: int, make: Callable[[torch.Tensor], Any], **more: Any) -> None:
    """Fill one slot of four rows, three of them real, and compare."""
    slot = gg.Slot("x", "request", dtype, pad, **more)
    arena = gg.Arena([slot], [4])
    bucket = gg.Bucket(4, 4, 1)
    params = FillParams([SlotLayout(slot, arena.targets(bucket)["x"])], 4096)
    shape = slot.shape(raw)
    numbers = torch.arange(math.prod(shape)).reshape(shape) % 2 + 1
    source = make(numbers.to(dtype)) if raw else None
    fill_and_compare(params, [Write(slot, source, raw, 4, slot.pad)], arena.targets(bucket), run_interpreter)


@pytest.mark.parametrize("make", [on_device, torch.clone], ids=["device", "host"])
@pytest.mark.parametrize("dtype", PADS, ids=str)
def test_every_pad_of_every_element_size(dtype: torch.dtype, make: Any) -> None:
    for pad in PADS[dtype]:
        for raw in (0, 1, 3, 4):
            one_slot(dtype, pad, raw, make, inner=(3,))


@pytest.mark.parametrize("dtype", [torch.int8, torch.int16, torch.int32, torch.int64, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("make", [on_device, torch.clone], ids=["device", "host"])
def test_repeat_last_repeats_the_last_real_row_on_every_dimension_and_is_zero_without_one(
    dtype: torch.dtype, make: Any
) -> None:
    for inner, row_dim in (((), 0), ((3,), 0), ((3,), 1), ((2, 3), 1), ((2, 3), 2), ((0,), 0)):
        for raw in (0, 1, 3, 4):
            one_slot(dtype, gg.REPEAT_LAST, raw, make, inner=inner, row_dim=row_dim)


def test_the_sign_of_zero_and_the_bits_of_nan_pads_are_kept() -> None:
    for dtype, integer in ((torch.float32, torch.int32), (torch.bfloat16, torch.int16), (torch.float64, torch.int64)):
        for pad in (0.0, -0.0, math.nan):
            slot = gg.Slot("x", "request", dtype, pad)
            target = torch.ones(4, dtype=dtype)
            params = FillParams([SlotLayout(slot, target)], 64)
            params.pack([Write(slot, None, 0, 4, pad)], Staging())
            run_interpreter(params)
            expected = torch.full((4,), pad, dtype=dtype)
            assert target.view(integer).tolist() == expected.view(integer).tolist()


WIDENING = [
    (source, target)
    for source in DTYPES + (torch.uint64,)
    for target in DTYPES + (torch.uint64,)
    if source != target and widens(source, target)
]
EDGES = [0, 1, -1, 2, 127, 128, -128, 255, 256, 32767, -32768, 65535, 2**31 - 1, -(2**31), 2**32 - 1]


def edges_of(dtype: torch.dtype) -> torch.Tensor:
    """Give the values of a dtype that a conversion could get wrong."""
    if dtype.is_floating_point:
        info = torch.finfo(dtype)
        values = [0.0, -0.0, 1.0, -1.5, info.max, -info.max, info.tiny, -info.smallest_normal, info.eps, math.inf]
        return torch.tensor([*values, -math.inf, math.nan, info.tiny * info.eps], dtype=torch.float64).to(dtype)
    info = torch.iinfo(dtype)
    return torch.tensor([edge for edge in EDGES if info.min <= edge <= info.max]).to(dtype)


@pytest.mark.parametrize(("source", "target"), WIDENING, ids=str)
@pytest.mark.parametrize("make", [on_device, torch.clone], ids=["device", "host"])
def test_every_widening_conversion_keeps_the_value(source: torch.dtype, target: torch.dtype, make: Any) -> None:
    values = edges_of(source)
    slot = gg.Slot("x", "request", target, 0)
    arena = gg.Arena([slot], [len(values) + 2])
    bucket = arena.space.bucket(len(values) + 2)
    params = FillParams([SlotLayout(slot, arena.targets(bucket)["x"])], 4096)
    writes = [Write(slot, make(values), len(values), len(values) + 2, 0)]
    fill_and_compare(params, writes, arena.targets(bucket), run_interpreter)


NARROWING = [
    (torch.int64, torch.int32, [2**31 - 1, -(2**31), 5]),
    (torch.int32, torch.int8, [-128, 127, 0]),
    (torch.int64, torch.uint8, [255, 0]),
    (torch.float32, torch.bfloat16, [1.0 + 2**-8, 1.0 + 2**-7 + 2**-8, 3.38e38, -0.0, 1e-40]),
    (torch.float32, torch.float16, [1.0 + 2**-11, 65503.0, 6e-8, 2.9e-8, -0.0]),
    (torch.float64, torch.float32, [1.0 + 2**-24, 1.0 + 2**-24 + 2**-50, 1e-46]),
    # Rounds down by way of float32, which is how torch casts, and up in one step:
    (torch.float64, torch.float16, [1.0 + 2**-11 + 2**-40, 1.0 - 2**-12 - 2**-42]),
    (torch.float64, torch.bfloat16, [1.0 + 2**-8 + 2**-40, 1.0 + 2**-7 + 2**-8 - 2**-50]),
]


@pytest.mark.parametrize(("source", "target", "values"), NARROWING, ids=str)
@pytest.mark.parametrize("make", [on_device, torch.clone], ids=["device", "host"])
def test_narrowing_that_a_slot_accepts_rounds_as_torch_does(
    source: torch.dtype, target: torch.dtype, values: list[float], make: Any
) -> None:
    slot = gg.Slot("x", "request", target, 0, accepts=(source,))
    arena = gg.Arena([slot], [len(values)])
    bucket = arena.space.bucket(len(values))
    for limit in (0, 4096):
        params = FillParams([SlotLayout(slot, arena.targets(bucket)["x"])], limit)
        writes = [Write(slot, make(torch.tensor(values, dtype=source)), len(values), len(values), 0)]
        fill_and_compare(params, writes, arena.targets(bucket), run_interpreter)


def test_adopted_storages_are_filled_at_their_strides_and_nothing_around_them_changes() -> None:
    base = torch.zeros(400, dtype=torch.int16)
    storages = {
        "shifted": base[5:13],
        "more rows": base[20:60].view(2, 5, 4),
        "blocks apart": base[100:220].view(3, 10, 4)[:, :6],
        "two dimensions before": base[220:380].view(2, 2, 10, 4),
    }
    for name, storage in storages.items():
        row_dim = storage.dim() - 2 if storage.dim() > 1 else 0
        inner = tuple(storage.shape[:row_dim]) + tuple(storage.shape[row_dim + 1 :])
        slot = gg.Slot("x", "request", torch.int16, -3, inner=inner, row_dim=row_dim, storage=storage)
        arena = gg.Arena([slot], [2, 4])
        for size in (2, 4):
            target = arena.targets(arena.space.bucket(size))["x"]
            params = FillParams([SlotLayout(slot, target)], 4096)
            for raw in range(size + 1):
                source = torch.arange(math.prod(slot.shape(raw)), dtype=torch.int16).reshape(slot.shape(raw))
                for made in (source, on_device(source), None):
                    fill_and_compare(params, [Write(slot, made, raw, size, -3)], {"x": target}, run_interpreter)
        assert name


@pytest.mark.parametrize(
    "storage",
    [
        torch.zeros(4, 8).t(),  # rows next to each other, inner ones apart
        torch.zeros(8, 8)[:, ::2],
        torch.zeros(2, 3, 8, 4).transpose(0, 1),  # blocks in another order
    ],
    ids=["transposed", "every other element", "blocks swapped"],
)
def test_a_storage_without_regular_blocks_is_refused_with_its_strides(storage: torch.Tensor) -> None:
    row_dim = storage.dim() - 2
    inner = tuple(storage.shape[:row_dim]) + tuple(storage.shape[row_dim + 1 :])
    slot = gg.Slot("odd", "request", torch.float32, 0.0, inner=inner, row_dim=row_dim, storage=storage)
    with pytest.raises(ValueError, match=r"slot 'odd' has strides \(.*\), no regular blocks of rows"):
        SlotLayout(slot, storage)


def test_axis_fixed_is_one_row_and_offsets_have_one_more() -> None:
    slots = [
        gg.Slot("scale", "fixed", torch.float32, 2.5, inner=(2, 3), missing="pad"),
        gg.Slot("start", "offset", torch.int32, gg.REPEAT_LAST),
        gg.Slot("n", "fixed", torch.int64, 0, inner=(1,), value=gg.RAW_REQUESTS),
        gg.Slot("counts", "rank", torch.int32, 0, value=gg.RANK_COUNTS),
    ]
    arena = gg.Arena(slots, [4], num_ranks=3)
    bucket = gg.Bucket(4, 4, 1)
    targets = arena.targets(bucket)
    params = FillParams([SlotLayout(slot, targets[slot.name]) for slot in slots], 4096)
    steps: list[tuple[gg.Bucket, dict[str, Any]]] = [
        (gg.Bucket(2, 2, 1), {"scale": torch.ones(2, 3), "start": [0, 3, 5]}),
        (gg.Bucket(4, 4, 1), {"start": np.arange(5, dtype=np.int16)}),
        (gg.Bucket(0, 0, 0), {}),
    ]
    for raw, sources in steps:
        fill_and_compare(params, arena.bind(sources, raw, bucket, [4, 0, 4]), targets, run_interpreter)
    assert (targets["start"].tolist(), targets["n"].tolist(), targets["counts"].tolist()) == ([0] * 5, [0], [4, 0, 4])
    assert targets["scale"].flatten().tolist() == [2.5] * 6


def test_numbers_are_carried_as_constants_for_every_row() -> None:
    """A computed slot has one number and many rows; a batch may hand in one for one element."""
    slots = [gg.Slot("rows", "request", torch.int32, -1, inner=(2,), value=gg.BUCKET_TOKENS), gg.Slot(
        "one", "request", torch.float64, 0.0
    )]  # fmt: skip
    arena = gg.Arena(slots, [4])
    bucket = gg.Bucket(4, 4, 1)
    params = FillParams([SlotLayout(slot, arena.targets(bucket)[slot.name]) for slot in slots], 4096)
    for number in (-0.0, math.nan, 1e300, np.float32(0.5)):
        writes = arena.bind({"one": number}, gg.Bucket(1, 1, 1), bucket)
        assert not isinstance(writes[1].source, torch.Tensor)
        fill_and_compare(params, writes, arena.targets(bucket), run_interpreter)
        assert read_params(params.buffer, 2)[1].kind == kernel_model.CONSTANT


def test_empty_slots_take_no_block_from_the_others() -> None:
    shapes = [(0,), (3,), (0, 2), (2,), (0,)]
    slots = [gg.Slot(f"slot{i}", "request", torch.int32, 7, inner=inner) for i, inner in enumerate(shapes)]
    arena = gg.Arena(slots, [4])
    bucket = gg.Bucket(4, 4, 1)
    targets = arena.targets(bucket)
    params = FillParams([SlotLayout(slot, targets[slot.name]) for slot in slots], 4096)
    assert params.num_blocks == 1
    fill_and_compare(params, arena.bind({}, gg.Bucket(0, 0, 0), bucket), targets, run_interpreter)


def test_large_slots_get_more_blocks_and_every_block_has_one_slot() -> None:
    slots = [gg.Slot(f"slot{i}", "request", torch.int8, 7, inner=(inner,)) for i, inner in enumerate([1, 9000, 1])]
    arena = gg.Arena(slots, [8])
    bucket = gg.Bucket(8, 8, 1)
    targets = arena.targets(bucket)
    params = FillParams([SlotLayout(slot, targets[slot.name]) for slot in slots], 256)
    blocks = [slot.blocks for slot in read_params(params.buffer, 3)]
    assert (blocks, params.num_blocks) == ([1, 5, 1], 5)  # 72,000 bytes at 16 KiB a block


# Where host sources go.


def test_sources_that_fit_are_carried_in_the_payload_and_the_rest_is_staged() -> None:
    slots = [gg.Slot(f"slot{i}", "request", torch.int64, 0, inner=(inner,)) for i, inner in enumerate([64, 1, 9, 0])]
    arena = gg.Arena(slots, [4])
    bucket = gg.Bucket(4, 4, 1)
    targets = arena.targets(bucket)
    for limit, inline in ((4096, 4), (2368, 4), (2352, 3), (320, 3), (304, 2), (16, 1), (0, 1)):
        params = FillParams([SlotLayout(slot, targets[slot.name]) for slot in slots], limit)
        sources = {slot.name: torch.arange(3 * slot.inner[0]).view(3, -1) for slot in slots}
        stage = fill_and_compare(params, arena.bind(sources, gg.Bucket(3, 3, 1), bucket), targets, run_interpreter)
        kinds = [slot.kind for slot in read_params(params.buffer, 4)]
        assert kinds.count(kernel_model.INLINE) == inline, limit
        assert len(stage.blocks) == 4 - inline
        assert params.payload_bytes <= max(16, limit)
        assert params.payload_bytes % 16 == 0
        assert len(params.buffer) == 4 * 64 + params.payload_bytes
        assert params.inline_end <= params.payload_bytes


def test_inline_end_covers_the_used_payload_and_no_more() -> None:
    slots = [gg.Slot("a", "request", torch.int8, 0), gg.Slot("b", "request", torch.int32, 0, inner=(5,))]
    arena = gg.Arena(slots, [8])
    bucket = gg.Bucket(8, 8, 1)
    params = FillParams([SlotLayout(slot, arena.targets(bucket)[slot.name]) for slot in slots], 4096)

    def end_of(sources: dict[str, Any]) -> int:
        params.pack(arena.bind(sources, gg.Bucket(3, 3, 1), bucket), Staging())
        return params.inline_end

    a, b = torch.zeros(3, dtype=torch.int8), torch.zeros(3, 5, dtype=torch.int32)
    assert end_of({"a": a, "b": b}) == 16 + 3 * 5 * 4  # "a" takes the first 16 bytes, it is smaller
    assert end_of({"a": a, "b": b.to(torch.int16)}) == 16 + 3 * 5 * 4  # carried in the slot's dtype
    params.pack([Write(slots[0], a, 3, 8, 0), Write(slots[1], on_device(b), 3, 8, 0)], Staging())
    assert params.inline_end == 3
    params.pack(arena.bind({}, gg.Bucket(0, 0, 0), bucket), Staging())
    assert params.inline_end == 0


def test_a_packed_step_is_a_snapshot_of_its_host_sources() -> None:
    slots = [gg.Slot("a", "request", torch.int64, 0), gg.Slot("b", "request", torch.bfloat16, 0.0, inner=(3,))]
    arena = gg.Arena(slots, [4])
    bucket = gg.Bucket(4, 4, 1)
    params = FillParams([SlotLayout(slot, arena.targets(bucket)[slot.name]) for slot in slots], 4096)
    a, b = np.array([4, 5, 6]), torch.full((3, 3), 1.5)
    params.pack(arena.bind({"a": a, "b": b.bfloat16()}, gg.Bucket(3, 3, 1), bucket), Staging())
    a[:], b[:] = -1, -1
    run_interpreter(params)
    assert arena.view(bucket).a.tolist() == [4, 5, 6, 0]
    assert arena.view(bucket).b.tolist() == [[1.5] * 3] * 3 + [[0.0] * 3]


def test_a_source_that_requires_grad_is_carried() -> None:
    slot = gg.Slot("x", "request", torch.float32, 0.0)
    arena = gg.Arena([slot], [4])
    bucket = gg.Bucket(4, 4, 1)
    params = FillParams([SlotLayout(slot, arena.targets(bucket)["x"])], 64)
    source = torch.tensor([1.0, 2.0, 3.0], requires_grad=True)
    params.pack(arena.bind({"x": source}, gg.Bucket(3, 3, 1), bucket), Staging())
    run_interpreter(params)
    assert arena.view(bucket).x.tolist() == [1, 2, 3, 0]


def test_a_slot_of_more_elements_than_the_kernel_counts_is_refused() -> None:
    slot = gg.Slot("vast", "request", torch.uint8, 0, inner=(2**20,))
    with pytest.raises(ValueError, match=r"slot 'vast' has more than 2\*\*31 - 1 elements"):
        SlotLayout(slot, torch.empty(2**12, 2**20, dtype=torch.uint8, device="meta"))


@pytest.mark.parametrize("dtype", PADS, ids=str)
def test_bits_of_a_number_are_those_that_torch_writes(dtype: torch.dtype) -> None:
    for number in PADS[dtype]:
        word = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[dtype.itemsize]
        written = torch.full((1,), number, dtype=dtype).view(word).item()
        assert packing.bits_of(number, dtype) == written % (1 << 8 * dtype.itemsize)


# KernelFill, whole, over the interpreter: choosing the struct, and the fast path for a known step.


def host_lane(simulated: HostKernel, slots: Sequence[gg.Slot], raw: int, size: int) -> Lane:
    arena = gg.Arena(slots, [size])
    bucket = arena.space.bucket(size)
    fill = simulated.fill(arena.slots, arena.targets(bucket), arena._owned)
    return Lane(arena, fill, gg.Bucket(raw, raw, 1 if raw else 0), bucket, PLACE)


@pytest.mark.parametrize("kind", KINDS)
def test_a_step_like_the_last_goes_the_fast_way_and_is_right(monkeypatch: pytest.MonkeyPatch, kind: str) -> None:
    lane = host_lane(HostKernel(monkeypatch), FAST_SLOTS, 3, 4)
    went = [step_and_compare(lane, sources_of(3, start, KINDS[kind])) for start in (0, 40, 7)]
    assert went == [False, kind != "list", kind != "list"]


def test_a_missing_slot_and_mixed_kinds_go_the_fast_way(monkeypatch: pytest.MonkeyPatch) -> None:
    lane = host_lane(HostKernel(monkeypatch), FAST_SLOTS, 3, 4)
    for start in (0, 9, 30):
        sources = {**sources_of(3, start, on_device), "ids": np.arange(start, start + 3)}
        del sources["maybe"]
        assert step_and_compare(lane, sources) is (start > 0)
    lane = host_lane(HostKernel(monkeypatch), FAST_SLOTS, 0, 4)
    assert [step_and_compare(lane, {}) for _ in range(3)] == [False, True, True]


@pytest.mark.parametrize("source", [torch.bfloat16, torch.float16, torch.float8_e4m3fn, torch.float8_e5m2], ids=str)
@pytest.mark.parametrize("make", [on_device, torch.clone], ids=["device", "host"])
def test_narrow_floats_that_numpy_lacks_are_taken_step_after_step(
    monkeypatch: pytest.MonkeyPatch, source: torch.dtype, make: Any
) -> None:
    slot = gg.Slot("x", "request", torch.float32, 0.5)
    lane = host_lane(HostKernel(monkeypatch), [slot], 3, 4)
    for start in (1.0, 4.0, 2.0):
        step_and_compare(lane, {"x": make(torch.tensor([start, -start, 0.5]).to(source))})


@pytest.mark.parametrize("first", ["array", "host"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64], ids=str)
def test_a_host_source_of_another_float_dtype_than_the_last_is_taken(
    monkeypatch: pytest.MonkeyPatch, first: str, dtype: torch.dtype
) -> None:
    slot = gg.Slot("x", "request", torch.float32, 0.5, accepts=(torch.float64,))
    lane = host_lane(HostKernel(monkeypatch), [slot], 3, 4)
    numbers = torch.tensor([1.0, -2.0, 0.25])
    assert step_and_compare(lane, {"x": KINDS[first](numbers)}) is False
    assert step_and_compare(lane, {"x": (numbers * 2).to(dtype)}) is False
    assert step_and_compare(lane, {"x": KINDS[first](numbers)}) is not None


@pytest.mark.parametrize("raw", [1, 3])
def test_a_reversed_array_is_refused_and_one_row_of_it_is_taken(monkeypatch: pytest.MonkeyPatch, raw: int) -> None:
    """One row reversed is contiguous, though its stride is negative."""
    lane = host_lane(HostKernel(monkeypatch), [gg.Slot("x", "request", torch.int64, 1)], raw, 4)
    went = [step_and_compare(lane, {"x": np.arange(start, start + raw)[::-1]}) for start in (3, 8)]
    assert (went == [None, None]) == (raw == 3)


@pytest.mark.parametrize("given", [None, [1, 2], 5])
def test_sources_that_are_no_mapping_are_refused_after_a_known_step_too(
    monkeypatch: pytest.MonkeyPatch, given: Any
) -> None:
    lane = host_lane(HostKernel(monkeypatch), FAST_SLOTS, 3, 4)
    step_and_compare(lane, sources_of(3, 0, torch.clone))
    with pytest.raises(gg.BindError, match="sources is a"):
        lane.take(given)


def test_a_source_that_reaches_into_an_adopted_slot_is_refused_after_a_known_step_too(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """It starts before the slot's memory, and its last rows are rows that the same fill writes."""
    buffer = torch.arange(16, dtype=torch.int64)
    slot = gg.Slot("x", "request", torch.int64, 0, storage=buffer[8:])
    lane = host_lane(HostKernel(monkeypatch), [slot], 4, 8)
    outside, reaching = buffer[:4].as_subclass(OnDevice), buffer[6:10].as_subclass(OnDevice)
    assert step_and_compare(lane, {"x": outside}) is False
    assert step_and_compare(lane, {"x": outside}) is True
    assert step_and_compare(lane, {"x": reaching}) is None


@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("kind", ["device", "array", "host"])
def test_a_source_that_changed_since_the_last_step_is_refused_or_right(
    monkeypatch: pytest.MonkeyPatch, kind: str, change: str
) -> None:
    for name in ("ids", "loc", "hidden", "start", "maybe"):
        lane = host_lane(HostKernel(monkeypatch), FAST_SLOTS, 3, 4)
        Memory(lane.targets.values()).scramble(3)
        step_and_compare(lane, sources_of(3, 0, KINDS[kind]))
        step_and_compare(lane, changed(sources_of(3, 10, KINDS[kind]), name, change, lane, 10))
        step_and_compare(lane, sources_of(3, 20, KINDS[kind]))


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow])
@given(data=st.data())
def test_any_sequence_of_steps_is_refused_or_right(monkeypatch: pytest.MonkeyPatch, data: st.DataObject) -> None:
    limit = data.draw(st.sampled_from([32764, 4096, 6 * 64 + 16, 6 * 64 + 48]), label="struct bytes")
    raw = data.draw(st.integers(1, 4), label="raw")
    lane = host_lane(HostKernel(monkeypatch, limit=limit), FAST_SLOTS, raw, 4)
    Memory(lane.targets.values()).scramble(data.draw(st.integers(0, 99), label="seed"))
    kinds = {name: data.draw(st.sampled_from(sorted(KINDS)), label=name) for name in sources_of(1, 0, torch.clone)}
    for start in data.draw(st.lists(st.integers(0, 50), min_size=2, max_size=5), label="starts"):
        sources = {name: sources_of(raw, start, KINDS[kind])[name] for name, kind in kinds.items()}
        if data.draw(st.booleans(), label="change"):
            name = data.draw(st.sampled_from(sorted(sources)), label="slot")
            change = data.draw(st.sampled_from(sorted(CHANGES)), label="change")
            sources = changed(sources, name, change, lane, start)
        step_and_compare(lane, sources)


def test_the_smallest_struct_that_suffices_is_launched(monkeypatch: pytest.MonkeyPatch) -> None:
    simulated = HostKernel(monkeypatch)
    slot = gg.Slot("x", "request", torch.int8, 0)
    lane = host_lane(simulated, [slot], 9000, 9000)
    large = 64 + 16384  # payloads come in powers of two
    for raw, struct_bytes in ((9000, large), (4032, 4096), (4033, large), (17, 4096), (16, 64 + 16), (0, 64 + 16)):
        lane.raw, lane.known = gg.Bucket(raw, raw, 1 if raw else 0), None
        for turn in range(3):  # the first is bound, the others are known
            sources = {"x": torch.full((raw,), turn, dtype=torch.int8).numpy()} if raw else {}
            assert step_and_compare(lane, sources) is (turn > 0)
            assert simulated.struct_sizes[-1] == struct_bytes


def test_what_the_payload_does_not_hold_is_staged_and_held_until_it_was_read(monkeypatch: pytest.MonkeyPatch) -> None:
    slots = [
        gg.Slot("small", "request", torch.int64, 0),
        gg.Slot("wide", "request", torch.bfloat16, 2.0, inner=(7168,)),
    ]
    lane = host_lane(HostKernel(monkeypatch), slots, 3, 4)
    pool = lane.fill._in_flight
    assert isinstance(pool, PinnedPool)
    for turn in range(3):
        wide = torch.full((3, 7168), turn + 0.5, dtype=torch.float32).bfloat16()
        sources = {"small": np.arange(3), "wide": wide}
        assert step_and_compare(lane, sources) is False  # staged sources are bound at every step
        blocks, held = pool.opened[-1]
        assert [block.numel() for block in blocks] == [3 * 7168 * 2]
        assert any(source is wide for source in held)


def test_device_sources_are_held_until_they_were_read(monkeypatch: pytest.MonkeyPatch) -> None:
    lane = host_lane(HostKernel(monkeypatch), FAST_SLOTS, 3, 4)
    for start in range(3):
        sources = sources_of(3, start, on_device)
        step_and_compare(lane, sources)
        _, held = lane.fill._in_flight.opened[-1]
        assert all(any(one is source for one in held) for source in sources.values())


def test_a_refused_step_changes_nothing_that_the_next_one_launches(monkeypatch: pytest.MonkeyPatch) -> None:
    lane = host_lane(HostKernel(monkeypatch), FAST_SLOTS, 3, 4)
    step_and_compare(lane, sources_of(3, 0, KINDS["array"]))
    bad = {**sources_of(3, 50, KINDS["array"]), "maybe": np.zeros(4, np.int16)}  # the others were copied before it
    assert step_and_compare(lane, bad) is None
    assert step_and_compare(lane, sources_of(3, 9, KINDS["array"])) is not None


def test_too_many_slots_for_the_parameters_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    simulated = HostKernel(monkeypatch, limit=4096)
    slots = [gg.Slot(f"slot{i}", "request", torch.int8, 0) for i in range(64)]
    with pytest.raises(kernel.KernelUnavailable, match="64 slots do not fit the kernel's parameters"):
        host_lane(simulated, slots, 1, 1)
    lane = host_lane(simulated, slots[:63], 1, 1)
    assert step_and_compare(lane, {slot.name: 1 for slot in slots[:63]}) is False
    with pytest.raises(kernel.KernelUnavailable, match="0 slots do not fit"):
        KernelFill({}, {}, torch.device("cpu"), None, None, [(0, 0)])  # type: ignore[arg-type]
