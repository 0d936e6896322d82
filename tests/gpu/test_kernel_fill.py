"""The fill kernel on a GPU, held against the torch reference byte for byte.

Both run from the same garbage, and all of the memory that the slots lie in is compared, guard bytes of adopted
storages included. Only NaNs that were converted may differ in their payload. ``-k fill`` selects this file, for
compute-sanitizer.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import graphglue as gg
from graphglue.core.batch import extents_of
from graphglue.core.binding import Write
from graphglue.core.slots import widens
from graphglue.device.kernel_fill import KernelFill
from graphglue.device.packing import SlotLayout
from graphglue.testing import strategies as ggst
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
    overwrite,
    own_views,
    settle_nans,
    sources_of,
    step_and_compare,
)

DEVICE = "cuda"
BUSY_CYCLES = 1_000_000_000  # about 0.5 s of an H200
DTYPES = (*ggst.DTYPES, torch.uint16, torch.uint32)
# The sanitizer slows the host down, so that nothing stays queued.
SANITIZED = any("SANITIZER" in name for name in os.environ)


def put(tensor: torch.Tensor, offset: int = 0) -> torch.Tensor:
    """Copy a tensor to the GPU, at an element offset in larger memory."""
    base = torch.zeros(tensor.numel() + offset, dtype=tensor.dtype, device=DEVICE)
    base[offset:] = tensor.detach().reshape(-1).to(DEVICE)
    return base[offset:].view(tensor.shape)


PLACE = Place(put, lambda tensor: tensor)
KINDS: dict[str, Callable[[torch.Tensor], Any]] = {
    **kinds_at(PLACE),
    "pinned": lambda tensor: tensor.clone().pin_memory(),
    "read-only": lambda tensor: _read_only(tensor.clone().numpy()),
}


def _read_only(array: np.ndarray) -> np.ndarray:
    array.flags.writeable = False
    return array


def kernel_fill(arena: gg.Arena, bucket: gg.Bucket) -> KernelFill:
    fill = arena.fill_of(bucket)
    assert isinstance(fill, KernelFill), getattr(arena.device, "fill_fallback", "")
    return fill


def lane_of(slots: Sequence[gg.Slot], raw: int, size: int) -> Lane:
    arena = gg.Arena(slots, [size], device=DEVICE)
    bucket = arena.space.bucket(size)
    lane = Lane(arena, kernel_fill(arena, bucket), gg.Bucket(raw, raw, 1 if raw else 0), bucket, PLACE)
    Memory(lane.targets.values()).scramble(11)
    return lane


def fill_and_compare(
    fill: KernelFill, arena: gg.Arena, writes: Sequence[Write], targets: dict[str, torch.Tensor]
) -> None:
    """Run a step by the reference and by the kernel, from the same memory; both leave the same bytes."""
    memory = Memory(targets.values())
    memory.scramble(7)
    before = memory.save()
    fill_reference(writes, targets)
    converted = [
        targets[write.slot.name]
        for write in writes
        if isinstance(write.source, torch.Tensor) and write.source.dtype != write.slot.dtype
    ]
    settle_nans(converted)
    expected = memory.save()
    memory.restore(before)
    arena.device.enter_step()
    fill.load(writes)
    for write in writes:
        overwrite(write.source)  # host sources were snapshotted
    fill.run()
    settle_nans(converted)
    assert_same_memory(memory.save(), expected, str(writes))


# Any slots, any step.


def on_gpu(slot: gg.Slot, rows: int) -> gg.Slot:
    """Move an adopted storage to the GPU with its strides; drop one that the kernel can not address."""
    if slot.storage is None:
        return slot
    fields = {field: getattr(slot, field) for field in slot.__dataclass_fields__}
    try:
        SlotLayout(slot, slot.storage if slot.axis == "fixed" else slot.storage.narrow(slot.row_dim, 0, rows))
    except ValueError:
        return gg.Slot(**{**fields, "storage": None})
    old = slot.storage
    flat = torch.empty(0, dtype=old.dtype).set_(old.untyped_storage()).to(DEVICE)
    return gg.Slot(**{**fields, "storage": flat.as_strided(old.shape, old.stride(), old.storage_offset())})


@given(data=st.data())
def test_the_kernel_does_what_the_reference_does_for_any_slots_and_any_step(data: st.DataObject) -> None:
    size, width, ranks = (data.draw(st.integers(1, most), label=label) for label, most in SIZES.items())
    table = ggst.slot_tables(max_size=4, dtypes=DTYPES, adopt=(size, size * width, ranks))
    slots = [on_gpu(slot, slot.rows(size, size * width, ranks)) for slot in data.draw(table, label="slots")]
    arena = gg.Arena(slots, [size], device=DEVICE, tokens_per_request=width, num_ranks=ranks)
    bucket = arena.space.bucket(size)
    fill, targets = kernel_fill(arena, bucket), arena.targets(bucket)
    batches = ggst.batches(slots, [size], tokens_per_request=width, num_ranks=ranks, ragged=False)
    for _ in range(data.draw(st.integers(1, 3), label="steps")):
        batch = data.draw(batches, label="batch")
        raw = extents_of(batch, width)
        own = own_views(arena, raw, bucket)
        sources = {}
        for name, source in batch.sources.items():
            kind = data.draw(st.sampled_from(["given", "given", "device", "own"]), label=f"{name} comes as")
            if kind == "device" and isinstance(source, (torch.Tensor, np.ndarray)):
                source = put(
                    torch.as_tensor(np.array(source)) if isinstance(source, np.ndarray) else source, _offset(data)
                )
            sources[name] = own[name] if kind == "own" else source
        fill_and_compare(fill, arena, arena.bind(sources, raw, bucket), targets)


SIZES = {"size": 6, "width": 2, "ranks": 3}


def _offset(data: st.DataObject) -> int:
    return data.draw(st.integers(0, 3), label="offset in elements")


def test_the_comparison_sees_one_wrong_byte(monkeypatch: pytest.MonkeyPatch) -> None:
    """Show that the tests here can fail: by a tail that is not reset, a guard byte, and a stale source."""
    storage = torch.zeros(20, dtype=torch.int16, device=DEVICE)
    slot = gg.Slot("x", "request", torch.int16, 3, storage=storage[2:18])
    arena = gg.Arena([slot], [8], device=DEVICE)
    bucket = arena.space.bucket(8)
    fill, targets = kernel_fill(arena, bucket), arena.targets(bucket)
    writes = [Write(slot, put(torch.arange(5, dtype=torch.int16)), 5, 8, 3)]
    fill_and_compare(fill, arena, writes, targets)
    run = fill.run
    for broken in (storage[9:10], storage[1:2], storage[3:4]):

        def run_and_spoil(broken: torch.Tensor = broken) -> None:
            run()
            broken.add_(1)

        monkeypatch.setattr(fill, "run", run_and_spoil)
        with pytest.raises(AssertionError, match=r"memory 0 differs at bytes \[\d+\], 1 in all"):
            fill_and_compare(fill, arena, writes, targets)


# Pads, conversions, strides.

PADS = {
    torch.bool: [True, False], torch.uint8: [255], torch.int8: [-128, -1], torch.int16: [-2], torch.uint16: [65535],
    torch.int32: [-(2**31)], torch.uint32: [2**32 - 1], torch.int64: [-(2**63), 2**63 - 1], torch.uint64: [2**63 - 1],
    torch.float16: [-0.0, 0.0, math.nan, 65504.0], torch.bfloat16: [-0.0, math.inf, math.nan, 1.5],
    torch.float32: [-0.0, 0.0, math.nan, -math.inf, 1e-45], torch.float64: [-0.0, math.nan, 5e-324, 1e300],
}  # fmt: skip


def _ones_and_twos(raw: int, slot: gg.Slot) -> torch.Tensor:
    return (torch.arange(raw * slot.inner[0]).view(raw, *slot.inner) % 2 + 1).to(slot.dtype)


@pytest.mark.parametrize("dtype", PADS, ids=str)
def test_every_pad_of_every_element_size(dtype: torch.dtype) -> None:
    for pad in [*PADS[dtype], *([] if dtype == torch.bool else [gg.REPEAT_LAST])]:
        slots = [gg.Slot(f"slot{i}", "request", dtype, pad, inner=(inner,)) for i, inner in enumerate([1, 7, 33])]
        arena = gg.Arena(slots, [9], device=DEVICE)
        bucket = arena.space.bucket(9)
        fill, targets = kernel_fill(arena, bucket), arena.targets(bucket)
        for raw in (0, 1, 5, 9):
            for make in (put, lambda tensor: put(tensor, 1), torch.clone):
                writes = [Write(slot, make(_ones_and_twos(raw, slot)) if raw else None, raw, 9, pad) for slot in slots]
                fill_and_compare(fill, arena, writes, targets)


WIDENING = [
    (source, target)
    for source in (*DTYPES, torch.uint64)
    for target in (*DTYPES, torch.uint64)
    if source != target and widens(source, target)
]


def all_values(dtype: torch.dtype) -> torch.Tensor:
    """Give every value of a dtype of up to 16 bits, and edges of a wider one, NaNs left out."""
    if dtype.itemsize == 1:
        return torch.arange(256, dtype=torch.int16).to(torch.uint8).view(dtype)
    if dtype.itemsize == 2:
        values = torch.arange(-(2**15), 2**15).to(torch.int16).view(dtype)
        return values if not dtype.is_floating_point else values[~values.isnan()].clone()
    if dtype.is_floating_point:
        info = torch.finfo(dtype)
        edges = [0.0, -0.0, 1.0 + info.eps, info.max, -info.max, info.tiny, info.tiny * info.eps, math.inf, -math.inf]
        return torch.tensor(edges, dtype=dtype)
    info = torch.iinfo(dtype)
    edges = [0, 1, -1, 127, 128, -128, 255, 256, 32767, -32768, 65535, 2**31 - 1, -(2**31), 2**32 - 1]
    return torch.tensor([edge for edge in edges if info.min <= edge <= info.max]).to(dtype)


@pytest.mark.parametrize(("source", "target"), WIDENING, ids=str)
def test_every_value_is_widened_as_torch_does(source: torch.dtype, target: torch.dtype) -> None:
    values = all_values(source)
    rows = len(values) + 3
    slot = gg.Slot("x", "request", target, 0)
    arena = gg.Arena([slot], [rows], device=DEVICE)
    bucket = arena.space.bucket(rows)
    fill, targets = kernel_fill(arena, bucket), arena.targets(bucket)
    expected = torch.cat([values.to(target), torch.zeros(3, dtype=target)])
    for made in (put(values), put(values, 1), values.clone()):
        Memory(targets.values()).scramble(5)
        arena.device.enter_step()
        fill.load([Write(slot, made, len(values), rows, 0)])
        fill.run()
        assert_same_memory([targets["x"].cpu().view(torch.uint8)], [expected.view(torch.uint8)], str(made))


NARROWING = [
    (torch.int64, torch.int32, [2**31 - 1, -(2**31), 5]),
    (torch.int32, torch.int8, [-128, 127, 0]),
    (torch.int64, torch.uint8, [255, 0]),
    (torch.float32, torch.bfloat16, [1.0 + 2**-8, 1.0 + 2**-7 + 2**-8, 3.38e38, -0.0, 1e-40]),
    (torch.float32, torch.float16, [1.0 + 2**-11, 65503.0, 6e-8, 2.9e-8, -0.0]),
    (torch.float64, torch.float32, [1.0 + 2**-24, 1.0 + 2**-24 + 2**-50, 1e-46]),
    (torch.float64, torch.float16, [1.0 + 2**-11 + 2**-40, 1.0 - 2**-12 - 2**-42]),
    (torch.float64, torch.bfloat16, [1.0 + 2**-8 + 2**-40, 1.0 + 2**-7 + 2**-8 - 2**-50]),
]


@pytest.mark.parametrize(("source", "target", "values"), NARROWING, ids=str)
def test_narrowing_that_a_slot_accepts_rounds_as_torch_does(
    source: torch.dtype, target: torch.dtype, values: list[float]
) -> None:
    slot = gg.Slot("x", "request", target, 0, accepts=(source,))
    arena = gg.Arena([slot], [8], device=DEVICE)
    bucket = arena.space.bucket(8)
    for make in (put, torch.clone):
        given = make(torch.tensor(values, dtype=source))
        writes = arena.bind({"x": given}, gg.Bucket(len(values), len(values), 1), bucket)
        fill_and_compare(kernel_fill(arena, bucket), arena, writes, arena.targets(bucket))


@pytest.mark.parametrize("source", [torch.float8_e4m3fn, torch.float8_e5m2], ids=str)
@pytest.mark.parametrize("target", [None, torch.float16, torch.bfloat16, torch.float32], ids=str)
def test_eight_bit_floats_are_taken_as_they_are_and_into_wider_slots(
    source: torch.dtype, target: torch.dtype | None
) -> None:
    slot = gg.Slot("x", "request", target or source, 0.5, inner=(4,))
    lane = lane_of([slot], 3, 5)
    for start in (1.0, 2.0, 0.25):
        values = (torch.arange(12.0).view(3, 4) * start).to(source)
        for make in (put, lambda tensor: put(tensor, 3), torch.clone):
            expected = values.float()
            lane.take({"x": make(values)})
            lane.run()
            assert torch.equal(lane.targets["x"][:3].cpu().float(), expected)
            assert bool((lane.targets["x"][3:].cpu().float() == 0.5).all())


def test_storages_with_strides_of_their_own_keep_every_byte_around_their_rows() -> None:
    for dtype in (torch.int8, torch.bfloat16, torch.int32, torch.float64):
        base = torch.zeros(400, dtype=dtype, device=DEVICE)
        storages = [
            base[5:13],
            base[20:60].view(2, 5, 4),
            base[100:220].view(3, 10, 4)[:, :6],
            base[225:385].view(2, 2, 10, 4),
        ]
        for storage in storages:
            row_dim = storage.dim() - 2 if storage.dim() > 1 else 0
            inner = tuple(storage.shape[:row_dim]) + tuple(storage.shape[row_dim + 1 :])
            for pad in (2, gg.REPEAT_LAST):
                slot = gg.Slot("x", "request", dtype, pad, inner=inner, row_dim=row_dim, storage=storage)
                arena = gg.Arena([slot], [2, 4], device=DEVICE)
                for size, raw in ((2, 1), (4, 3), (4, 4), (4, 0)):
                    bucket = arena.space.bucket(size)
                    target = arena.targets(bucket)
                    numbers = torch.arange(math.prod(slot.shape(raw))).reshape(slot.shape(raw)).to(dtype)
                    for made in (put(numbers), put(numbers, 1), numbers, None):
                        write = Write(slot, made, raw, size, slot.pad)
                        fill_and_compare(kernel_fill(arena, bucket), arena, [write], target)


# Sizes: the 4 KB and the 32 KB struct, pinned memory, 16-byte words.


def test_host_sources_around_every_limit_of_the_struct_are_right() -> None:
    """64 bytes of the struct are the slot's own; the rest carries host sources."""
    kinds = set()
    for most in (4031, 4032, 4033, 20_000, 32_687, 32_688, 32_689, 32_704, 70_000):
        slot = gg.Slot("x", "request", torch.int8, 5)
        arena = gg.Arena([slot], [most], device=DEVICE)
        bucket = arena.space.bucket(most)
        fill = kernel_fill(arena, bucket)
        for raw in sorted({1, 4031, 4032, 4033, most - 1, most} & set(range(1, most + 1))):
            rng = np.random.default_rng(raw)
            source = torch.from_numpy(rng.integers(-128, 128, raw).astype(np.int8))
            writes = arena.bind({"x": source}, gg.Bucket(raw, raw, 1), bucket)
            fill_and_compare(fill, arena, writes, arena.targets(bucket))
            kinds.add(next(size for size, params in fill._structs if params is fill.params))
    assert {16, 4032, 4096, 32688} <= kinds


def test_many_slots_share_the_payload_and_the_large_ones_are_pinned() -> None:
    widths = [3, 1024, 16, 9000, 1, 2000]
    slots = [
        gg.Slot(f"slot{i}", "request", [torch.int64, torch.bfloat16, torch.int8][i % 3], 1, inner=(width,))
        for i, width in enumerate(widths)
    ]
    lane = lane_of(slots, 3, 4)
    for seed in range(4):
        rng = np.random.default_rng(seed)
        sources = {slot.name: torch.from_numpy(rng.integers(-9, 9, (3, *slot.inner))).to(slot.dtype) for slot in slots}
        if seed % 2:
            sources = {
                name: put(source, seed) if name in ("slot1", "slot4") else source for name, source in sources.items()
            }
        step_and_compare(lane, sources)


@pytest.mark.parametrize("inner", [7168, 7167, 1001])
@pytest.mark.parametrize("storage_offset", [0, 1])
def test_large_slots_at_every_alignment(inner: int, storage_offset: int) -> None:
    """16-byte words where source and target line up, single elements where they do not, and between them."""
    rows = 256
    base = torch.zeros(rows * inner + 8, dtype=torch.bfloat16, device=DEVICE)
    storage = base[storage_offset : storage_offset + rows * inner].view(rows, inner)
    slot = gg.Slot("hidden", "token", torch.bfloat16, -0.0, inner=(inner,), storage=storage)
    arena = gg.Arena([slot], [rows], device=DEVICE)
    bucket = arena.space.bucket(rows)
    fill, targets = kernel_fill(arena, bucket), arena.targets(bucket)
    values = torch.randn(rows, inner, device=DEVICE).to(torch.bfloat16)
    for raw in (0, 1, 3, 128, 255, 256):
        for offset in (0, 1, 4, 7, 8):
            source = put(values[:raw], offset) if raw else None
            fill_and_compare(fill, arena, [Write(slot, source, raw, rows, slot.pad)], targets)


@pytest.mark.parametrize("dtype", [torch.int8, torch.int16, torch.int32, torch.int64], ids=str)
def test_every_head_and_span_around_a_16_byte_word(dtype: torch.dtype) -> None:
    per_word = 16 // dtype.itemsize
    for span in range(1, 3 * per_word + 2):
        slot = gg.Slot("x", "request", dtype, -2)
        arena = gg.Arena([slot], [span], device=DEVICE)
        bucket = arena.space.bucket(span)
        fill, targets = kernel_fill(arena, bucket), arena.targets(bucket)
        memory = Memory(targets.values())
        for raw in range(span + 1):
            values = torch.arange(1, raw + 1).to(dtype)
            memory.scramble(raw)
            before = memory.save()[0][span * dtype.itemsize :]
            arena.device.enter_step()
            fill.load([Write(slot, put(values), raw, span, -2)])
            fill.run()
            assert targets["x"].tolist() == [*values.tolist(), *[-2] * (span - raw)]
            assert torch.equal(memory.save()[0][span * dtype.itemsize :], before)


def test_one_struct_serves_real_extents_in_any_order() -> None:
    slots = [gg.Slot("x", "request", torch.int32, -1, inner=(5,)), gg.Slot("cu", "offset", torch.int32, gg.REPEAT_LAST)]
    arena = gg.Arena(slots, [64], device=DEVICE)
    bucket = arena.space.bucket(64)
    fill, targets = kernel_fill(arena, bucket), arena.targets(bucket)
    for turn, raw in enumerate([64, 1, 0, 33, 2, 63, 64, 0, 17]):
        make = [put, torch.clone, lambda tensor: tensor.clone().numpy()][turn % 3]
        sources = {
            "x": make(torch.arange(raw * 5, dtype=torch.int32).view(raw, 5) + turn),
            "cu": make(torch.arange(raw + 1, dtype=torch.int32) * turn),
        }
        writes = arena.bind(sources if raw else {}, gg.Bucket(raw, raw, 1 if raw else 0), bucket)
        fill_and_compare(fill, arena, writes, targets)


def test_empty_slots_and_empty_sources() -> None:
    slots = [
        gg.Slot(f"slot{i}", "request", torch.int32, 7, inner=inner) for i, inner in enumerate([(0,), (3,), (0, 2)])
    ]
    lane = lane_of(slots, 3, 4)
    for make in (put, torch.clone, put, torch.clone):
        step_and_compare(lane, {slot.name: make(torch.ones(slot.shape(3), dtype=torch.int32)) for slot in slots})
    only_empty = lane_of(slots[::2], 3, 4)
    step_and_compare(only_empty, {slot.name: put(torch.ones(slot.shape(3), dtype=torch.int32)) for slot in slots[::2]})


# The fast path for a step like the last.


@pytest.mark.parametrize("kind", KINDS)
def test_a_step_like_the_last_is_right_without_being_bound(kind: str) -> None:
    lane = lane_of(FAST_SLOTS, 3, 4)
    went = [step_and_compare(lane, sources_of(3, start, KINDS[kind])) for start in (0, 40, 7)]
    assert went[0] is False
    if kind in ("device", "device at an offset", "array", "host"):
        assert went[1:] == [True, True]


@pytest.mark.parametrize("change", CHANGES)
def test_a_source_that_changed_since_the_last_step_is_refused_or_right(change: str) -> None:
    for kind in ("device", "array", "host"):
        for name in ("ids", "loc", "hidden", "start", "maybe"):
            lane = lane_of(FAST_SLOTS, 3, 4)
            step_and_compare(lane, sources_of(3, 0, KINDS[kind]))
            step_and_compare(lane, changed(sources_of(3, 10, KINDS[kind]), name, change, lane, 10))
            step_and_compare(lane, sources_of(3, 20, KINDS[kind]))


@given(data=st.data())
def test_any_sequence_of_steps_is_refused_or_right(data: st.DataObject) -> None:
    raw = data.draw(st.integers(1, 4), label="raw")
    lane = lane_of(FAST_SLOTS, raw, 4)
    kinds = {name: data.draw(st.sampled_from(sorted(KINDS)), label=name) for name in sources_of(1, 0, torch.clone)}
    for start in data.draw(st.lists(st.integers(0, 50), min_size=2, max_size=6), label="starts"):
        sources = {name: sources_of(raw, start, KINDS[kind])[name] for name, kind in kinds.items()}
        if data.draw(st.booleans(), label="change"):
            name = data.draw(st.sampled_from(sorted(sources)), label="slot")
            change = data.draw(st.sampled_from(sorted(CHANGES)), label="change")
            sources = changed(sources, name, change, lane, start)
        step_and_compare(lane, sources)


def test_a_source_that_reaches_into_an_adopted_slot_is_refused_after_a_known_step_too() -> None:
    buffer = torch.arange(16, device=DEVICE)
    slot = gg.Slot("x", "request", torch.int64, 0, storage=buffer[8:])
    arena = gg.Arena([slot], [8], device=DEVICE)
    bucket = arena.space.bucket(8)
    lane = Lane(arena, kernel_fill(arena, bucket), gg.Bucket(4, 4, 1), bucket, PLACE)
    outside, reaching, own = (PLACE.alias(buffer[start : start + 4]) for start in (0, 6, 8))
    assert step_and_compare(lane, {"x": outside}) is False
    assert step_and_compare(lane, {"x": outside}) is True
    assert step_and_compare(lane, {"x": reaching}) is None
    assert step_and_compare(lane, {"x": own}) is False


def test_an_arena_that_was_built_on_another_stream_is_filled_after_its_first_values() -> None:
    side = torch.cuda.Stream()
    slot = gg.Slot("x", "request", torch.int64, -1)
    source = torch.arange(5, device=DEVICE)
    torch.cuda.synchronize()
    with torch.cuda.stream(side):
        torch.cuda._sleep(BUSY_CYCLES // 4)
        arena = gg.Arena([slot], [8], device=DEVICE)  # fills its idle values behind the sleep
    view = arena.fill(gg.Batch(5, {"x": source}))
    torch.cuda.synchronize()
    assert view.x.tolist() == [0, 1, 2, 3, 4, -1, -1, -1]


# Many steps behind a busy GPU: a forward appends what it saw to a log, at a counter on the device.

BUCKET = 16


def logging_runner(wide: int, steps: int) -> tuple[gg.Runner, torch.Tensor, torch.Tensor]:
    """Build a captured runner; give its log (steps, 4, rows) and the counter of the next entry."""
    log = torch.zeros(steps + 16, 4, BUCKET, dtype=torch.int64, device=DEVICE)
    counter = torch.zeros(1, dtype=torch.int64, device=DEVICE)
    contract = gg.PrepContract(
        name="double", reads={"x": -1}, outputs={"twice": "request"}, modes={gg.Mode.DECODE}, idle="glue"
    )
    registry = gg.Registry()
    registry.register(contract)(lambda view: {"twice": view.x * 2})

    def forward(view: Any, metadata: Any) -> torch.Tensor:
        entry = torch.stack([view.x, metadata["twice"], view.wide[:, 0].long(), view.wide[:, -1].long()])
        log.index_copy_(0, counter, entry[None])
        counter.add_(1)
        return view.x + 0

    runner = gg.Runner(
        slots=[
            gg.Slot("x", "request", torch.int64, -1),
            gg.Slot("wide", "request", torch.float32, -2.0, inner=(wide,)),
        ],
        ladder=[BUCKET],
        registry=registry,
        prep="double",
        forward=forward,
        device=DEVICE,
    )
    runner.capture(progress=False)
    log.zero_()
    counter.zero_()
    return runner, log, counter


def raw_of(step: int) -> int:
    """Give step after step another number of requests; now and then none."""
    return (step * 7) % (BUCKET + 1)


def expected_log(steps: int) -> torch.Tensor:
    entries = torch.empty(steps, 4, BUCKET, dtype=torch.int64)
    for step in range(steps):
        raw = raw_of(step)
        x = torch.full((BUCKET,), -1)
        x[:raw] = torch.arange(raw) + step * 100
        wide = torch.full((BUCKET,), -2)
        wide[:raw] = step
        entries[step] = torch.stack([x, x * 2, wide, wide + (wide != -2)])
    return entries


def keep_busy(cycles: int = BUSY_CYCLES) -> torch.cuda.Event:
    torch.cuda.synchronize()
    torch.cuda._sleep(cycles)
    done = torch.cuda.Event()
    done.record()
    return done


@pytest.mark.parametrize(
    ("kind", "wide", "steps"),
    [
        ("array", 4, 1000),  # all in 4 KB of parameters
        ("host", 4, 1000),
        ("array", 300, 1000),  # all in 32 KB
        ("array", 2048, 300),  # the wide one in pinned memory
        ("host", 2048, 300),
        ("device", 300, 1000),
        ("mixed", 300, 1000),
    ],
)
def test_steps_queued_behind_a_busy_gpu_keep_their_own_values(kind: str, wide: int, steps: int) -> None:
    runner, log, counter = logging_runner(wide, steps)
    x, rows = np.empty(BUCKET, np.int64), np.empty((BUCKET, wide), np.float32)
    done = keep_busy()
    for step in range(steps):
        raw = raw_of(step)
        x[:] = np.arange(BUCKET) + step * 100
        rows[:] = step
        rows[:, -1] += 1
        if step == 100:
            assert SANITIZED or not done.query(), "the GPU was not busy: nothing was queued"
        sources: dict[str, Any] = {"x": x[:raw], "wide": rows[:raw]}
        if kind == "host":
            sources = {name: torch.from_numpy(source) for name, source in sources.items()}
        if kind == "device" or (kind == "mixed" and step % 3):
            sources["x"] = torch.arange(raw, device=DEVICE) + step * 100
        if kind == "device":
            sources["wide"] = torch.full((raw, wide), float(step), device=DEVICE)
            sources["wide"][:, -1] += 1
        runner.replay(gg.Batch(raw, sources) if raw else gg.Batch.idle())
        x.fill(-77)  # the caller's buffers are used again at once
        rows.fill(-77)
        del sources
    torch.cuda.synchronize()
    assert counter.item() == steps
    assert torch.equal(log[:steps].cpu(), expected_log(steps))
    assert runner.stats()["one_launch"] == steps
    assert runner.stats()["launch_fallbacks"] == {}
    runner.close()


def test_device_sources_freed_on_the_stream_that_owns_them_are_read_first() -> None:
    """The stream that owns the memory is idle, so what is freed there is handed out and overwritten at once."""
    steps = 1000
    runner, log, _ = logging_runner(4, steps)
    side = torch.cuda.Stream()
    done = keep_busy()
    for step in range(steps):
        raw = raw_of(step)
        with torch.cuda.stream(side):
            x = torch.arange(raw, device=DEVICE) + step * 100
            wide = torch.full((raw, 4), float(step), device=DEVICE)
            wide[:, -1] += 1
        ready = torch.cuda.Event()
        ready.record(side)
        torch.cuda.current_stream().wait_event(ready)
        if step == 50:
            assert SANITIZED or not done.query(), "the GPU was not busy: nothing was queued"
        runner.replay(gg.Batch(raw, {"x": x, "wide": wide}) if raw else gg.Batch.idle())
        del x, wide
        with torch.cuda.stream(side):
            junk = [torch.full((raw,), -77, device=DEVICE), torch.full((raw, 4), -77.0, device=DEVICE)]
        del junk
    torch.cuda.synchronize()
    assert torch.equal(log[:steps].cpu(), expected_log(steps))
    runner.close()


def test_the_log_would_show_a_source_that_was_read_too_late() -> None:
    """Show that the two tests above can fail: here the source really is overwritten before it is read."""
    runner, log, _ = logging_runner(4, 4)
    x, wide = torch.arange(3, device=DEVICE) + 300, torch.full((3, 4), 3.0, device=DEVICE)
    side = torch.cuda.Stream()
    keep_busy(BUSY_CYCLES // 4)
    runner.replay(gg.Batch(3, {"x": x, "wide": wide}))
    with torch.cuda.stream(side):
        x.fill_(-77)
    torch.cuda.synchronize()
    assert log[0, 0, :3].tolist() == [-77] * 3
    runner.close()


def test_a_step_with_values_beside_its_neighbours_shows_no_others_rows() -> None:
    """A write of raw + 1 rows would be hidden by the next tail reset; compare after every single step."""
    runner, log, counter = logging_runner(4, 64)
    for step in range(64):
        raw = raw_of(step)
        sources = {"x": np.arange(raw) + step * 100, "wide": np.full((raw, 4), step, np.float32)}
        sources["wide"][:, -1] += 1
        out = runner.replay(gg.Batch(raw, sources) if raw else gg.Batch.idle()).outputs
        assert out.tolist() == [row + step * 100 for row in range(raw)]
        assert log[counter.item() - 1].tolist() == expected_log(step + 1)[step].tolist()
    runner.close()


def test_idle_values_numbers_and_rank_counts() -> None:
    """They go by other fields of the struct than pads and tensors."""
    slots = [
        gg.Slot("a", "request", torch.float32, math.nan, idle=-0.0),
        gg.Slot("b", "request", torch.int16, gg.REPEAT_LAST, idle=12),
        gg.Slot("n", "fixed", torch.int64, 0, inner=(2,), value=gg.BUCKET_TOKENS),
        gg.Slot("counts", "rank", torch.int32, 0, value=gg.RANK_COUNTS),
        gg.Slot("one", "request", torch.float64, 0.5),
    ]
    arena = gg.Arena(slots, [4], device=DEVICE, num_ranks=3)
    bucket = arena.space.bucket(4)
    fill, targets = kernel_fill(arena, bucket), arena.targets(bucket)
    fill_and_compare(fill, arena, arena.bind({}, gg.Bucket(0, 0, 0), bucket, [4, 1, 4]), targets)
    assert (targets["b"].tolist(), targets["counts"].tolist(), targets["n"].tolist()) == ([12] * 4, [4, 1, 4], [4, 4])
    given = {"a": np.float32(1.5), "b": -3, "one": 1e300}
    fill_and_compare(fill, arena, arena.bind(given, gg.Bucket(1, 1, 1), bucket), targets)
    assert (targets["b"].tolist(), targets["one"].tolist()) == ([-3] * 4, [1e300, 0.5, 0.5, 0.5])
