"""The fill on CUDA: every slot equals a model that is worked out row by row on the CPU, bit for bit.

Each fill starts from slots that are full of another batch's values. Sources are host arrays, host tensors,
lists and device tensors; what they hold, where they lie and how long they live is varied here.
"""

from __future__ import annotations

import math
import weakref
from typing import Any

import numpy as np
import pytest
import torch

from graphglue import (
    BUCKET_TOKENS,
    RANK_COUNTS,
    RAW_REQUESTS,
    REPEAT_LAST,
    Arena,
    Batch,
    BindError,
    Bucket,
    CapacityError,
    Slot,
)

LADDER = [2, 4, 8]
DTYPES = [
    torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64, torch.uint16, torch.uint32,
    torch.uint64, torch.float16, torch.bfloat16, torch.float32, torch.float64,
]  # fmt: skip
BUSY_CYCLES = 1_000_000_000  # about 0.5 s


def slot(name: str = "x", axis: str = "request", dtype: torch.dtype = torch.int64, pad: Any = 0, **more: Any) -> Slot:
    return Slot(name, axis=axis, dtype=dtype, pad=pad, **more)


def values(shape: tuple[int, ...], dtype: torch.dtype, start: int = 1) -> torch.Tensor:
    """Give values on the CPU that every dtype holds exactly (a bool alternates)."""
    numbers = torch.arange(start, start + math.prod(shape), device="cpu")
    return (numbers % 2 if dtype == torch.bool else numbers % 100).to(dtype).reshape(shape)


def model(declared: Slot, source: torch.Tensor, raw: int, rows: int) -> torch.Tensor:
    """Work out on the CPU what a slot holds after a fill, row by row."""
    made = torch.empty(declared.shape(rows), dtype=declared.dtype)
    given = source.cpu().to(declared.dtype)
    for row in range(rows):
        target = made.select(declared.row_dim, row)
        if row < raw:
            target.copy_(given.select(declared.row_dim, row))
        elif declared.pad is not REPEAT_LAST:
            target.fill_(declared.pad)
        elif raw:
            target.copy_(given.select(declared.row_dim, raw - 1))
        else:
            target.zero_()
    return made


def bits(tensor: torch.Tensor) -> bytes:
    return tensor.cpu().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()


def assert_same(seen: torch.Tensor, expected: torch.Tensor) -> None:
    assert seen.dtype == expected.dtype
    assert seen.shape == expected.shape
    assert bits(seen) == bits(expected), f"{seen.cpu()} is not {expected}"


KINDS = {
    "device": lambda source: source.cuda(),
    "host": lambda source: source.clone(),
    "pinned": lambda source: source.clone().pin_memory(),
    "array": lambda source: source.clone().numpy(),
    "list": lambda source: source.tolist(),
}


def keep_busy(cycles: int = BUSY_CYCLES) -> torch.cuda.Event:
    """Keep the GPU busy; the event tells when it no longer is."""
    torch.cuda.synchronize()
    torch.cuda._sleep(cycles)
    done = torch.cuda.Event()
    done.record()
    return done


# Values.


@pytest.mark.parametrize("kind", ["device", "array"])
@pytest.mark.parametrize("axis", ["request", "token", "offset"])
@pytest.mark.parametrize("pad", [7, REPEAT_LAST], ids=str)
def test_tail_stale_every_axis_and_every_dimension(axis: str, pad: Any, kind: str) -> None:
    shapes = [((), 0), ((3,), 0), ((3,), 1), ((2, 3), 0), ((2, 3), 1), ((2, 3), 2), ((0,), 0)]
    for inner, row_dim in shapes:
        declared = slot(axis=axis, inner=inner, row_dim=row_dim, pad=pad)
        arena = Arena([declared], LADDER, device="cuda", tokens_per_request=2)
        full = values(declared.shape(declared.rows(8, 16)), torch.int64, start=50)
        for size in LADDER:
            for requests in range(1, size + 1):
                arena.fill(Batch(8, {"x": full}))
                raw, rows = declared.rows(requests, 2 * requests), declared.rows(size, 2 * size)
                source = values(declared.shape(raw), torch.int64)
                batch = Batch(requests, {"x": KINDS[kind](source)})
                assert_same(arena.fill(batch, Bucket(size, 2 * size, 2)).x, model(declared, source, raw, rows))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_tail_stale_every_dtype_from_every_kind_of_source(dtype: torch.dtype) -> None:
    for inner, pad in (((), 1), ((5,), 0), ((2, 3), REPEAT_LAST)):
        declared = slot(dtype=dtype, pad=pad, inner=inner)
        arena = Arena([declared], LADDER, device="cuda")
        for kind, make in KINDS.items():
            if kind == "array" and dtype == torch.bfloat16:
                continue  # numpy has none
            arena.fill(Batch(8, {"x": values((8, *inner), dtype, start=20)}))
            source = values((3, *inner), dtype)
            assert_same(arena.fill(Batch(3, {"x": make(source)})).x, model(declared, source, 3, 4))


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.float8_e5m2], ids=str)
def test_tail_stale_eight_bit_floats(dtype: torch.dtype) -> None:
    declared = slot(dtype=dtype, pad=0.5, inner=(3,))
    arena = Arena([declared], LADDER, device="cuda")
    source = torch.tensor([[0.5, 1.0, -2.0], [4.0, 0.0, 1.5]]).to(dtype)
    for kind in ("device", "host"):
        arena.fill(Batch(8, {"x": torch.full((8, 3), 6.0).to(dtype)}))
        seen = arena.fill(Batch(2, {"x": KINDS[kind](source)}), Bucket(4, 4, 1)).x
        expected = torch.cat([source.float(), torch.full((2, 3), 0.5)]).to(dtype)
        assert bits(seen) == bits(expected)


@pytest.mark.parametrize(
    ("dtype", "pad"),
    [
        (torch.float32, math.nan), (torch.bfloat16, math.inf), (torch.float16, -0.5), (torch.float64, 1e300),
        (torch.int64, -(2**63)), (torch.int32, -1), (torch.uint8, 255), (torch.uint16, 65535),
        (torch.uint32, 2**32 - 1), (torch.int8, -128), (torch.bool, True),
    ],
)  # fmt: skip
def test_pads_keep_every_bit(dtype: torch.dtype, pad: Any) -> None:
    declared = slot(dtype=dtype, pad=pad, inner=(3,))
    arena = Arena([declared], [8], device="cuda")
    arena.fill(Batch(8, {"x": values((8, 3), dtype)}))
    source = values((2, 3), dtype)
    assert_same(arena.fill(Batch(2, {"x": source.cuda()})).x, model(declared, source, 2, 8))


@pytest.mark.parametrize(
    ("given", "dtype"),
    [
        (torch.int32, torch.int64), (torch.uint8, torch.int64), (torch.int8, torch.int16), (torch.uint16, torch.int32),
        (torch.uint32, torch.int64), (torch.bfloat16, torch.float32), (torch.float16, torch.float64),
        (torch.float32, torch.float64), (torch.float16, torch.float32),
    ],
)  # fmt: skip
@pytest.mark.parametrize("kind", ["device", "host"])
def test_fill_copy_widening_is_exact(given: torch.dtype, dtype: torch.dtype, kind: str) -> None:
    declared = slot(dtype=dtype, pad=1)
    info = torch.finfo(given) if given.is_floating_point else torch.iinfo(given)
    source = torch.tensor([info.max, info.min, 0, 1, 5]).to(given)
    seen = Arena([declared], [8], device="cuda").fill(Batch(5, {"x": KINDS[kind](source)})).x
    assert_same(seen, model(declared, source, 5, 8))


@pytest.mark.parametrize(
    ("given", "dtype"),
    [
        (torch.int64, torch.int32),
        (torch.int64, torch.int16),
        (torch.float32, torch.bfloat16),
        (torch.float64, torch.float32),
    ],
)
@pytest.mark.parametrize("kind", ["device", "host"])
def test_fill_copy_declared_narrowing(given: torch.dtype, dtype: torch.dtype, kind: str) -> None:
    declared = slot(dtype=dtype, pad=1, accepts=(given,))
    source = torch.tensor([1, -7, 100, 3, 12345]).to(given) / (3 if given.is_floating_point else 1)
    source = source.to(given)
    seen = Arena([declared], [8], device="cuda").fill(Batch(5, {"x": KINDS[kind](source)})).x
    assert_same(seen, model(declared, source, 5, 8))


@pytest.mark.parametrize("dtype", [torch.int8, torch.int16, torch.int32, torch.int64], ids=str)
def test_fill_copy_a_source_may_start_anywhere(dtype: torch.dtype) -> None:
    declared = slot(dtype=dtype, pad=9, axis="token", inner=(3,))
    arena = Arena([declared], [64, 512], device="cuda")
    for rows in (1, 7, 33, 300):
        for offset in (0, 1, 3, 5):
            base = values((rows * 3 + 8,), dtype).cuda()
            source = base[offset : offset + rows * 3].view(rows, 3)
            assert_same(
                arena.fill(Batch(rows, {"x": source})).x, model(declared, source, rows, 64 if rows <= 64 else 512)
            )


@pytest.mark.parametrize("kind", ["device", "array", "host"])
@pytest.mark.parametrize("inner", [1, 700, 3001, 100_000], ids=lambda inner: f"{inner * 7 * 4} bytes")
def test_large_sources_and_long_tails(kind: str, inner: int) -> None:
    declared = slot(dtype=torch.int32, pad=3, inner=(inner,))
    arena = Arena([declared, slot("y", pad=4)], [16], device="cuda")
    arena.fill(Batch(16, {"x": values((16, inner), torch.int32, start=9), "y": list(range(16))}))
    source = values((7, inner), torch.int32)
    view = arena.fill(Batch(7, {"x": KINDS[kind](source), "y": list(range(7))}))
    assert_same(view.x, model(declared, source, 7, 16))
    assert view.y.tolist() == [*range(7), *[4] * 9]


def test_many_slots_are_filled_together() -> None:
    slots = [
        slot(f"s{number}", dtype=DTYPES[number % len(DTYPES)], pad=1, axis=("request", "token", "offset")[number % 3])
        for number in range(40)
    ]
    arena = Arena(slots, LADDER, device="cuda", tokens_per_request=2)
    for requests in (8, 3, 5, 1):
        sources = {s.name: values((s.rows(requests, 2 * requests),), s.dtype, start=requests) for s in slots}
        mixed = {
            name: KINDS[("device", "host", "list")[number % 3]](source)
            for number, (name, source) in enumerate(sources.items())
        }
        view = arena.fill(Batch(requests, mixed))
        size = view.bucket.requests
        for s in slots:
            raw, rows = s.rows(requests, 2 * requests), s.rows(size, 2 * size)
            assert_same(view[s.name], model(s, sources[s.name], raw, rows))


def test_idle_missing_fixed_rank_and_computed_slots() -> None:
    slots = [
        slot("a", pad=3, idle=9),
        slot("cu", axis="offset", pad=REPEAT_LAST),
        slot("opt", pad=5, missing="pad", inner=(2,)),
        slot("flag", axis="fixed", dtype=torch.bool, pad=False),
        slot("temp", axis="fixed", dtype=torch.float32, pad=0.5, inner=(2, 2)),
        slot("ranks", axis="rank", pad=8),
        slot("live", axis="fixed", dtype=torch.int32, value=RAW_REQUESTS),
        slot("size", axis="request", dtype=torch.int32, pad=-1, value=BUCKET_TOKENS),
        slot("counts", axis="rank", dtype=torch.int32, value=RANK_COUNTS),
    ]
    arena = Arena(slots, [2, 4], device="cuda", num_ranks=3)
    sources = {"a": [1, 2, 3], "cu": [0, 1, 3, 6], "flag": True, "temp": [[1.0, 2.0], [3.0, 4.0]], "ranks": [4, 5, 6]}
    for _ in range(2):
        view = arena.fill(Batch(3, {**sources, "opt": torch.tensor([[1, 2], [3, 4], [5, 6]], device="cuda")}))
        assert {name: view[name].tolist() for name in view} == {
            "a": [1, 2, 3, 3], "cu": [0, 1, 3, 6, 6], "opt": [[1, 2], [3, 4], [5, 6], [5, 5]], "flag": True,
            "temp": [[1, 2], [3, 4]], "ranks": [4, 5, 6], "live": 3, "size": [4, 4, 4, -1], "counts": [4, 4, 4],
        }  # fmt: skip
        assert arena.fill(Batch(3, sources)).opt.tolist() == [[5, 5]] * 4
        view = arena.fill(Batch.idle())
        assert {name: view[name].tolist() for name in view} == {
            "a": [9, 9], "cu": [0, 0, 0], "opt": [[5, 5]] * 2, "flag": False, "temp": [[0.5, 0.5]] * 2,
            "ranks": [8, 8, 8], "live": 0, "size": [-1, -1], "counts": [2, 2, 2],
        }  # fmt: skip


def test_capture_values() -> None:
    arena = Arena([slot(capture=lambda row: 100 - row), slot("n", capture=7), slot("p", pad=3)], [4], device="cuda")
    arena.fill_capture(Bucket(4, 4, 1))
    view = arena.view(4)
    assert (view.x.tolist(), view.n.tolist(), view.p.tolist()) == ([100, 99, 98, 97], [7] * 4, [3] * 4)


# Where slots lie.


def test_rebind_addresses_never_change() -> None:
    arena = Arena([slot("r", inner=(3,)), slot("t", axis="token", inner=(3,), row_dim=1)], LADDER, device="cuda")
    places = {name: arena.view(8)[name].data_ptr() for name in ("r", "t")}
    for requests in (1, 8, 3, 5):
        view = arena.fill(
            Batch(requests, {"r": values((requests, 3), torch.int64), "t": values((3, requests), torch.int64)})
        )
        assert {name: view[name].data_ptr() for name in view} == places
        assert all(view[name].is_contiguous() for name in view)


@pytest.mark.parametrize("dtype", [torch.int8, torch.int16, torch.int64], ids=str)
def test_over_cap_rows_around_an_adopted_slot_stay_as_they_are(dtype: torch.dtype) -> None:
    guarded = torch.full((50, 3), 55, dtype=dtype, device="cuda")
    declared = slot(dtype=dtype, storage=guarded[7:15], pad=1, inner=(3,))
    arena = Arena([declared], [2, 8], device="cuda")
    for requests in (8, 3, 1, 7):
        source = values((requests, 3), dtype)
        for kind in ("device", "host"):
            seen = arena.fill(Batch(requests, {"x": KINDS[kind](source)})).x
            assert_same(seen, model(declared, source, requests, len(seen)))
            assert bool((guarded[:7] == 55).all())
            assert bool((guarded[15:] == 55).all())


def test_adopted_storage_is_sliced_where_rows_are_not_in_front() -> None:
    storage = torch.zeros(3, 21, dtype=torch.int64, device="cuda")
    declared = slot(storage=storage[:, 1:11], pad=9, inner=(3,), row_dim=1, axis="token")
    arena = Arena([declared], LADDER, device="cuda")
    for requests in (8, 3):
        source = values((3, requests), torch.int64)
        seen = arena.fill(Batch(requests, {"x": source.cuda()})).x
        assert_same(seen, model(declared, source, requests, seen.shape[1]))
    assert bool((storage[:, 0] == 0).all())
    assert bool((storage[:, 11:] == 0).all())


def test_adopted_storage_with_gaps_between_rows() -> None:
    wide = torch.zeros(8, 6, dtype=torch.int64, device="cuda")
    arena = Arena([slot(storage=wide[:, 1], pad=4)], LADDER, device="cuda")
    arena.fill(Batch(3, {"x": [1, 2, 3]}))
    assert wide[:4, 1].tolist() == [1, 2, 3, 4]
    assert bool((wide[:, [0, 2, 3, 4, 5]] == 0).all())


@pytest.mark.parametrize("adopted", [False, True])
def test_the_slot_s_own_view_is_not_copied_and_its_tail_is_reset(adopted: bool) -> None:
    more = {"storage": torch.zeros(8, 2, dtype=torch.int64, device="cuda")} if adopted else {}
    declared = slot(pad=9, inner=(2,), **more)
    arena = Arena([declared], LADDER, device="cuda")
    for requests in (1, 3, 4, 7, 8):
        own = arena.view(8).x
        own.copy_(values((8, 2), torch.int64, start=requests))
        expected = own[:requests].cpu()
        seen = arena.fill(Batch(requests, {"x": own[:requests]})).x
        assert_same(seen, model(declared, expected, requests, len(seen)))


def test_the_slot_s_own_view_after_other_sources_of_the_same_form() -> None:
    declared = slot(pad=9)
    arena = Arena([declared, slot("y", pad=8)], [8], device="cuda")
    for turn in range(3):
        source = values((5,), torch.int64, start=turn)
        for _ in range(2):  # the second is like the first, and may be packed faster
            assert_same(arena.fill(Batch(5, {"x": source.cuda(), "y": [1] * 5})).x, model(declared, source, 5, 8))
        own = arena.view(8)
        own.x.fill_(70 + turn)
        seen = arena.fill(Batch(5, {"x": own.x[:5], "y": [1] * 5})).x
        assert seen.tolist() == [70 + turn] * 5 + [9] * 3
        with pytest.raises(BindError, match="lies in the memory of slot 'y'"):
            arena.fill(Batch(5, {"x": own.y[:5], "y": [1] * 5}))


def test_sources_of_changing_kind_dtype_and_place() -> None:
    declared, other = slot(pad=9), slot("y", dtype=torch.float32, pad=0.5, missing="pad")
    arena = Arena([declared, other], [8], device="cuda")
    turn = 0
    for kind in ("device", "array", "device", "host", "list", "array", "pinned", "device"):
        for dtype in (torch.int64, torch.int32, torch.int64):
            turn += 1
            source, second = values((5,), dtype, start=turn), values((5,), torch.float32, start=turn)
            given = (
                {"x": KINDS[kind](source)} if turn % 3 == 0 else {"x": KINDS[kind](source), "y": KINDS[kind](second)}
            )
            view = arena.fill(Batch(5, given))
            assert_same(view.x, model(declared, source.to(torch.int64), 5, 8))
            assert_same(view.y, model(other, second, 0 if turn % 3 == 0 else 5, 8))


# Errors on the device.


def test_a_refused_fill_has_written_nothing() -> None:
    arena = Arena([slot("a"), slot("b", dtype=torch.int32)], LADDER, device="cuda")
    good = {"a": torch.arange(3, device="cuda"), "b": torch.arange(3, device="cuda", dtype=torch.int32)}
    for _ in range(2):
        arena.fill(Batch(3, good))
    before = {name: bits(arena.view(8)[name]) for name in ("a", "b")}
    faults: list[tuple[dict[str, Any], str]] = [
        ({**good, "b": torch.arange(3, device="cuda")}, "slot 'b': the source is dtype torch.int64"),
        ({**good, "b": good["b"][:2]}, r"slot 'b': the source is extent \(2,\)"),
        ({**good, "b": good["b"][:1]}, r"extent \(1,\).*broadcast"),
        ({**good, "b": torch.zeros(6, device="cuda", dtype=torch.int32)[::2]}, r"call .contiguous\(\)"),
        ({**good, "b": torch.zeros(1, device="cuda", dtype=torch.int32).expand(3)}, r"call .contiguous\(\)"),
        ({**good, "b": torch.zeros(3, device="meta", dtype=torch.int32)}, "a tensor on meta; expected one on cuda:0"),
        ({"a": good["a"]}, "slot 'b' is missing"),
        ({**good, "c": good["a"]}, "'c', which is no slot"),
        ({"a": good["a"], "c": good["b"]}, "'c', which is no slot"),
        ({**good, "a": torch.ones(3, device="cuda")}, "slot 'a': the source is dtype torch.float32"),
    ]  # fmt: skip
    for sources, said in faults:
        with pytest.raises(BindError, match=said):
            arena.fill(Batch(3, sources))
        assert {name: bits(arena.view(8)[name]) for name in ("a", "b")} == before
        arena.fill(Batch(3, good))
    with pytest.raises(CapacityError):
        arena.fill(Batch(9, {"a": [0] * 9, "b": [0] * 9}))
    assert {name: bits(arena.view(8)[name]) for name in ("a", "b")} == before


# Time: who may change, drop or overwrite what, and when.


@pytest.mark.parametrize("kind", ["array", "host", "pinned"])
@pytest.mark.parametrize("inner", [1, 3000], ids=["small", "large"])
def test_h2d_staging_host_sources_are_snapshotted(kind: str, inner: int) -> None:
    declared = slot(dtype=torch.int32, pad=-1, inner=(inner,))
    arena = Arena([declared], LADDER, device="cuda")
    source = KINDS[kind](values((3, inner), torch.int32))
    arena.fill(Batch(3, {"x": source}))  # whatever is compiled or allocated once is, from here on
    kept, busy = [], keep_busy()
    for turn in range(50):
        source[:] = turn
        kept.append(arena.fill(Batch(3, {"x": source})).x.clone())
        source[:] = -9999
    assert not busy.query(), "the fill waited for the GPU"
    torch.cuda.synchronize()
    for turn, seen in enumerate(kept):
        assert bool((seen[:3] == turn).all()), turn
        assert bool((seen[3:] == -1).all()), turn


def test_lifetime_device_sources_may_be_dropped_right_after_the_call() -> None:
    arena = Arena([slot(dtype=torch.int32, pad=-1, inner=(4096,))], [8], device="cuda")
    side = torch.cuda.Stream()
    for turn in range(5):
        source = torch.full((5, 4096), turn, dtype=torch.int32, device="cuda")
        torch.cuda.synchronize()
        with torch.cuda.stream(side):
            torch.cuda._sleep(BUSY_CYCLES // 10)
            seen = arena.fill(Batch(5, {"x": source})).x
            kept = seen.clone()
        del source
        # On the stream that owned the source its memory would be handed out again at once.
        junk = [torch.full((5, 4096), 777, dtype=torch.int32, device="cuda") for _ in range(20)]
        torch.cuda.synchronize()
        assert bool((kept[:5] == turn).all()), turn
        assert bool((kept[5:] == -1).all())
        del junk


def test_lifetime_device_sources_are_released_after_they_were_read() -> None:
    arena = Arena([slot(dtype=torch.int32, inner=(32768,))], [8], device="cuda")
    dead: list[weakref.ref[torch.Tensor]] = []
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    for turn in range(200):
        source = torch.full((8, 32768), turn, dtype=torch.int32, device="cuda")  # 1 MiB
        arena.fill(Batch(8, {"x": source}))
        dead.append(weakref.ref(source))
        del source
        if turn % 4 == 0:
            torch.cuda.synchronize()
    torch.cuda.synchronize()
    held = torch.cuda.memory_allocated() - before
    assert held < 48 * 2**20, f"{held / 2**20:.0f} MiB of sources are still held"
    assert sum(ref() is not None for ref in dead) < 48


@pytest.mark.parametrize("kind", ["device", "array"])
def test_stream_order_fills_on_changing_streams_do_not_meet(kind: str) -> None:
    arena = Arena([slot(dtype=torch.int32, pad=-1, inner=(512,))], LADDER, device="cuda")
    streams = [torch.cuda.default_stream(), torch.cuda.Stream(), torch.cuda.Stream()]
    torch.cuda.synchronize()
    kept = []
    for turn in range(30):
        with torch.cuda.stream(streams[(turn * 7) % 3 if turn % 5 else 0]):
            torch.cuda._sleep(2_000_000)
            source = torch.full((3, 512), turn, dtype=torch.int32, device="cuda" if kind == "device" else "cpu")
            seen = arena.fill(Batch(3, {"x": source if kind == "device" else source.numpy()})).x
            torch.cuda._sleep(2_000_000)
            kept.append(seen.clone())
    torch.cuda.synchronize()
    for turn, seen in enumerate(kept):
        assert bool((seen[:3] == turn).all()), turn


@pytest.mark.parametrize("kind", ["device", "array", "list"])
def test_h2d_staging_a_fill_does_not_synchronise(kind: str) -> None:
    declared = slot(pad=9)
    arena = Arena([declared, slot("n", axis="rank", value=RANK_COUNTS)], LADDER, device="cuda")
    batches = [Batch(requests, {"x": KINDS[kind](values((requests,), torch.int64))}) for requests in (3, 4, 8, 1)]
    for batch in batches:
        arena.fill(batch)
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        for batch in batches * 3:
            arena.fill(batch)
        arena.fill(Batch.idle())
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.mark.parametrize("default", ["cpu", "cuda", "meta"])
def test_fill_copy_the_default_device_does_not_matter(default: str) -> None:
    source = np.arange(3, dtype=np.int64)
    torch.set_default_device(default)
    try:
        slots = [
            slot(capture=lambda row: row),
            slot("wide", dtype=torch.int32, inner=(3000,), pad=2),
            slot("n", axis="rank", value=RANK_COUNTS),
        ]
        arena = Arena(slots, LADDER, device="cuda", num_ranks=2)
        arena.fill_capture(Bucket(4, 4, 1))
        wide = np.full((3, 3000), 6, dtype=np.int32)
        for given in (source, source.tolist()):
            view = arena.fill(Batch(3, {"x": given, "wide": wide}))
            assert {view[name].device.type for name in view} == {"cuda"}
            assert (view.x.tolist(), view.n.tolist()) == ([0, 1, 2, 0], [4, 4])
            assert view.wide.sum().item() == 3 * 3000 * 6 + 3000 * 2
    finally:
        torch.set_default_device(None)


@pytest.mark.parametrize("build_in", [torch.no_grad, torch.inference_mode])
@pytest.mark.parametrize("fill_in", [torch.no_grad, torch.inference_mode])
@pytest.mark.parametrize("adopt_in", [None, torch.no_grad, torch.inference_mode])
def test_inference_mode_in_and_out(build_in: Any, fill_in: Any, adopt_in: Any) -> None:
    more: dict[str, Any] = {}
    if adopt_in is not None:
        with adopt_in():
            more["storage"] = torch.zeros(8, dtype=torch.float32, device="cuda")
    with build_in():
        arena = Arena([slot(dtype=torch.float32, pad=1.0, **more)], LADDER, device="cuda")
    for kind in ("device", "host"):
        with fill_in():
            view = arena.fill(Batch(3, {"x": KINDS[kind](torch.arange(3.0))}))
        assert view.x.tolist() == [0, 1, 2, 1]
