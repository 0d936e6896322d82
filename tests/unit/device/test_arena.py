"""The arena: storage that never moves, and a fill that leaves exactly the batch and the pads behind.

What a fill must leave is worked out row by row in plain Python (``expected``), and every fill starts
from slots that are full of another batch's values.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch

from graphglue import (
    BUCKET_REQUESTS,
    BUCKET_TOKENS,
    RANK_COUNTS,
    RAW_REQUESTS,
    RAW_TOKENS,
    REPEAT_LAST,
    Arena,
    Batch,
    BindError,
    Bucket,
    CapacityError,
    ConfigError,
    GraphGlueError,
    Mode,
    Slot,
)
from graphglue.core.buckets import Ladder
from graphglue.core.keys import KeySpace
from graphglue.core.slots import kind_of

LADDER = [2, 4, 8]
DTYPES = [
    torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64, torch.uint16, torch.uint32,
    torch.uint64, torch.float16, torch.bfloat16, torch.float32, torch.float64,
]  # fmt: skip


def slot(name: str = "x", axis: str = "request", dtype: torch.dtype = torch.int64, pad: Any = 0, **more: Any) -> Slot:
    return Slot(name, axis=axis, dtype=dtype, pad=pad, **more)


def values(shape: tuple[int, ...], dtype: torch.dtype, start: int = 1) -> torch.Tensor:
    """Give distinct values that every dtype holds exactly (a bool alternates)."""
    count = math.prod(shape)
    numbers = torch.arange(start, start + count)
    return (numbers % 2 if dtype == torch.bool else numbers % 100).to(dtype).reshape(shape)


def expected(declared: Slot, source: torch.Tensor, raw: int, rows: int) -> list[Any]:
    """List what each row must hold after a fill."""
    by_row = source.movedim(declared.row_dim, 0) if source.dim() else source
    kept = [by_row[row].tolist() for row in range(raw)]
    if declared.pad is not REPEAT_LAST:
        blank = torch.full(declared.inner, declared.pad, dtype=declared.dtype).tolist()
        return kept + [blank] * (rows - raw)
    last = kept[-1] if kept else torch.zeros(declared.inner, dtype=declared.dtype).tolist()
    return kept + [last] * (rows - raw)


def seen(declared: Slot, tensor: torch.Tensor) -> list[Any]:
    """List a slot's rows as they are."""
    return tensor.movedim(declared.row_dim, 0).tolist()


def snapshot(arena: Arena) -> dict[str, bytes]:
    """Copy the bytes of every slot at the largest bucket."""
    view = arena.view(arena.space.ladder.largest)
    return {name: view[name].contiguous().view(-1).view(torch.uint8).numpy().tobytes() for name in view}


# The fill.


@pytest.mark.parametrize("axis", ["request", "token", "offset"])
@pytest.mark.parametrize(
    ("inner", "row_dim"), [((), 0), ((3,), 0), ((3,), 1), ((2, 3), 0), ((2, 3), 1), ((2, 3), 2), ((0,), 0)]
)
@pytest.mark.parametrize("pad", [7, REPEAT_LAST], ids=str)
def test_tail_stale_every_axis_and_every_dimension(axis: str, inner: tuple[int, ...], row_dim: int, pad: Any) -> None:
    declared = slot(axis=axis, inner=inner, row_dim=row_dim, pad=pad)
    arena = Arena([declared], LADDER, tokens_per_request=2)
    for requests, size in itertools.product(range(1, 9), LADDER):
        if requests > size:
            continue
        full = values(declared.shape(declared.rows(8, 16)), torch.int64, start=50)
        arena.fill(Batch(8, {"x": full}))
        raw, rows = declared.rows(requests, 2 * requests), declared.rows(size, 2 * size)
        source = values(declared.shape(raw), torch.int64)
        filled = arena.fill(Batch(requests, {"x": source}), Bucket(size, 2 * size, 2)).x
        assert filled.shape == declared.shape(rows)
        assert seen(declared, filled) == expected(declared, source, raw, rows)


@pytest.mark.parametrize(
    ("dtype", "kind"),
    [(d, kind) for d in DTYPES for kind in ("tensor", "array", "list") if (d, kind) != (torch.bfloat16, "array")],
    ids=str,
)
def test_tail_stale_every_dtype(dtype: torch.dtype, kind: str) -> None:
    declared = slot(dtype=dtype, pad=1, inner=(2,))
    arena = Arena([declared], LADDER)
    arena.fill(Batch(8, {"x": values((8, 2), dtype, start=20)}))
    source = values((3, 2), dtype)
    given = source if kind == "tensor" else source.numpy() if kind == "array" else source.tolist()
    filled = arena.fill(Batch(3, {"x": given})).x
    assert filled.dtype is dtype
    assert seen(declared, filled) == expected(declared, source, 3, 4)


def test_tail_stale_the_slots_that_are_reset_are_those_declared() -> None:
    pads: dict[str, tuple[torch.dtype, Any]] = {
        "seq_lens": (torch.int64, 1),
        "positions": (torch.int32, -1),
        "mask": (torch.bool, True),
        "temperature": (torch.float32, 0.5),
        "loc": (torch.int16, 3),
    }
    axes = {"positions": "token", "loc": "token"}
    arena = Arena([slot(name, axes.get(name, "request"), dtype, pad) for name, (dtype, pad) in pads.items()], [8])
    arena.fill(Batch(8, {name: values((8,), dtype, start=90) for name, (dtype, _) in pads.items()}))
    view = arena.fill(Batch(3, {name: values((3,), dtype) for name, (dtype, _) in pads.items()}))
    assert {name: view[name][3:].tolist() for name in view} == {name: [pad] * 5 for name, (_, pad) in pads.items()}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
def test_tail_stale_and_pad_leak_no_nan_of_an_earlier_batch_stays(dtype: torch.dtype) -> None:
    arena = Arena([slot("top", dtype=dtype, pad=0.0, inner=(4,)), slot("hidden", dtype=dtype, inner=(16,))], LADDER)
    nans = {name: torch.full((8, width), math.nan, dtype=dtype) for name, width in (("top", 4), ("hidden", 16))}
    assert arena.fill(Batch(8, nans)).top.isnan().all()
    ones = {name: torch.ones_like(source[:3]) for name, source in nans.items()}
    view = arena.fill(Batch(3, ones), Bucket(8, 8, 1))
    for name in view:
        assert view[name].tolist() == [[1.0] * len(view[name][0])] * 3 + [[0.0] * len(view[name][0])] * 5


def test_a_pad_may_be_nan() -> None:
    view = Arena([slot(dtype=torch.float32, pad=math.nan)], [4]).fill(Batch(1, {"x": [2.0]}))
    assert view.x[0] == 2.0
    assert view.x[1:].isnan().all()


def test_tail_stale_the_tail_reaches_the_bucket_that_was_agreed_on() -> None:
    declared = slot(pad=9)
    arena = Arena([declared], [4, 16])
    arena.fill(Batch(16, {"x": list(range(100, 116))}))
    assert arena.fill(Batch(3, {"x": [1, 2, 3]})).x.tolist() == [1, 2, 3, 9]
    assert arena.fill(Batch(3, {"x": [4, 5, 6]}), Bucket(16, 16, 1)).x.tolist() == [4, 5, 6] + [9] * 13


def test_cumulative_slots_repeat_their_last_row() -> None:
    arena = Arena([slot("cu", axis="offset", dtype=torch.int32, pad=REPEAT_LAST)], LADDER)
    assert arena.fill(Batch(3, {"cu": [0, 5, 9, 14]})).cu.tolist() == [0, 5, 9, 14, 14]
    assert arena.fill(Batch(4, {"cu": [0, 1, 2, 3, 4]})).cu.tolist() == [0, 1, 2, 3, 4]
    assert arena.fill(Batch.idle()).cu.tolist() == [0, 0, 0]


def test_pad_leak_a_fill_depends_on_nothing_before_it() -> None:
    slots = [slot("a", pad=3), slot("c", axis="offset", pad=REPEAT_LAST), slot("t", axis="token", pad=-1, inner=(2,))]
    fresh, used = (Arena(slots, LADDER, tokens_per_request=2) for _ in range(2))
    for requests in (8, 7, 8, 5):
        used.fill(Batch(requests, {
            "a": list(range(requests)), "c": list(range(requests + 1)), "t": values((2 * requests, 2), torch.int64)
        }))  # fmt: skip
    batch = Batch(3, {"a": [1, 2, 3], "c": [0, 2, 4, 6], "t": values((6, 2), torch.int64)})
    one, other = fresh.fill(batch), used.fill(batch)
    assert {name: one[name].tolist() for name in one} == {name: other[name].tolist() for name in other}


def test_pad_leak_storage_starts_from_known_values() -> None:
    view = Arena([slot("a", pad=7), slot("b", pad=1, idle=5), slot("c", axis="offset", pad=REPEAT_LAST)], [4]).view(4)
    assert (view.a.tolist(), view.b.tolist(), view.c.tolist()) == ([7] * 4, [5] * 4, [0] * 5)


@pytest.mark.parametrize("kind", ["tensor", "array"])
def test_h2d_staging_sources_are_read_when_the_call_returns(kind: str) -> None:
    arena = Arena([slot()], [2])
    source: Any = torch.tensor([1, 2]) if kind == "tensor" else np.array([1, 2])
    filled = arena.fill(Batch(2, {"x": source})).x
    source[:] = 77
    assert filled.tolist() == [1, 2]


def test_fill_copy_a_source_may_need_grad_or_be_an_inference_tensor() -> None:
    arena = Arena([slot(dtype=torch.float32)], [2])
    assert arena.fill(Batch(2, {"x": torch.ones(2, requires_grad=True)})).x.tolist() == [1, 1]
    with torch.inference_mode():
        source = torch.full((2,), 5.0)
    filled = arena.fill(Batch(2, {"x": source})).x
    assert filled.tolist() == [5, 5]
    assert not filled.requires_grad


# Idle, missing, fixed, rank and computed slots.


def test_an_idle_step_holds_idle_values_or_pads_everywhere() -> None:
    slots = [
        slot("pads", pad=3),
        slot("idles", pad=3, idle=9),
        slot("cu", axis="offset", pad=REPEAT_LAST),
        slot("cu_idle", axis="offset", pad=REPEAT_LAST, idle=2),
        slot("flag", axis="fixed", pad=4),
        slot("flag_idle", axis="fixed", pad=4, idle=6, inner=(2,)),
        slot("ranks", axis="rank", pad=8),
    ]
    arena = Arena(slots, [2, 4], num_ranks=3)
    arena.fill(Batch(4, {
        "pads": [1] * 4, "idles": [1] * 4, "cu": [1] * 5, "cu_idle": [1] * 5, "flag": 1, "flag_idle": [1, 1],
        "ranks": [1, 1, 1],
    }))  # fmt: skip
    view = arena.fill(Batch.idle())
    assert {name: view[name].tolist() for name in view} == {
        "pads": [3, 3], "idles": [9, 9], "cu": [0, 0, 0], "cu_idle": [2, 2, 2], "flag": 4, "flag_idle": [6, 6],
        "ranks": [8, 8, 8],
    }  # fmt: skip
    assert view.bucket == Bucket(2, 2, 1)


def test_fill_copy_an_optional_slot_that_is_left_out_is_pad_and_not_the_last_step_s() -> None:
    slots = [slot("opt", pad=5, missing="pad"), slot("fix", axis="fixed", pad=5, missing="pad", inner=(2,))]
    arena = Arena(slots, [4])
    assert arena.fill(Batch(3, {"opt": [1, 2, 3], "fix": [1, 2]})).opt.tolist() == [1, 2, 3, 5]
    for left_out in ({}, {"opt": None, "fix": None}):
        view = arena.fill(Batch(3, left_out))
        assert (view.opt.tolist(), view.fix.tolist()) == ([5] * 4, [5, 5])


def test_rebind_a_slot_keeps_its_address_with_and_without_a_source() -> None:
    arena = Arena([slot("opt", missing="pad", inner=(2,), pad=5)], [4])
    places = {
        arena.fill(batch).opt.data_ptr() for batch in (Batch(2, {"opt": [[1, 2], [3, 4]]}), Batch(2), Batch.idle())
    }
    assert len(places) == 1


def test_fixed_and_rank_slots_have_no_tail() -> None:
    arena = Arena([slot("f", axis="fixed", inner=(2, 3), pad=9), slot("r", axis="rank", pad=9)], [4], num_ranks=2)
    view = arena.fill(Batch(1, {"f": values((2, 3), torch.int64), "r": [4, 5]}))
    assert view.f.tolist() == [[1, 2, 3], [4, 5, 6]]
    assert view.r.tolist() == [4, 5]


def test_a_number_fills_one_element() -> None:
    arena = Arena([slot("f", axis="fixed"), slot("one")], [2])
    view = arena.fill(Batch(1, {"f": 7, "one": 8}))
    assert (view.f.item(), view.one.tolist()) == (7, [8, 0])


@pytest.mark.parametrize(
    ("batch", "counts"),
    [
        (Batch(3), {"rr": 3, "rt": 6, "br": 4, "bt": 8}),
        (Batch(4), {"rr": 4, "rt": 8, "br": 4, "bt": 8}),
        (Batch(3, row_tokens=[1, 2, 2]), {"rr": 3, "rt": 5, "br": 4, "bt": 8}),
        (Batch(3, num_tokens=3), {"rr": 3, "rt": 3, "br": 4, "bt": 4}),
        (Batch.idle(), {"rr": 0, "rt": 0, "br": 2, "bt": 4}),
    ],
)
def test_pad_leak_the_live_count_is_a_device_value(batch: Batch, counts: dict[str, int]) -> None:
    named = {"rr": RAW_REQUESTS, "rt": RAW_TOKENS, "br": BUCKET_REQUESTS, "bt": BUCKET_TOKENS}
    slots = [slot(name, axis="fixed", dtype=torch.int32, value=value) for name, value in named.items()]
    view = Arena(slots, LADDER, tokens_per_request=2).fill(batch)
    assert {name: int(view[name]) for name in view} == counts


def test_a_computed_slot_with_rows_is_padded_like_any_other() -> None:
    view = Arena([slot("n", value=RAW_REQUESTS, pad=-1)], [4]).fill(Batch(3))
    assert view.n.tolist() == [3, 3, 3, -1]


def test_rank_counts_are_the_padded_tokens_of_every_rank() -> None:
    arena = Arena([slot("counts", axis="rank", dtype=torch.int32, value=RANK_COUNTS)], [2, 4], num_ranks=3)
    assert arena.fill(Batch(3)).counts.tolist() == [4, 4, 4]
    assert arena.fill(Batch.idle()).counts.tolist() == [2, 2, 2]
    arena.write(arena.bind({}, Bucket(3, 3, 1), Bucket(4, 4, 1), rank_counts=[4, 8, 2]), Bucket(4, 4, 1))
    assert arena.view(4).counts.tolist() == [4, 8, 2]


def test_pad_derived_capture_values_differ_from_pads() -> None:
    slots = [
        slot("number", pad=0, capture=7),
        slot("rows", pad=0, capture=lambda row: 100 - row),
        slot("wide", pad=0, capture=lambda row: row, inner=(2,), row_dim=1),
        slot("plain", pad=3),
        slot("fixed", axis="fixed", pad=0, capture=lambda row: 5 + row, inner=(2,)),
        slot("live", axis="fixed", value=RAW_REQUESTS),
    ]
    arena = Arena(slots, [2, 4])
    arena.fill_capture(Bucket(4, 4, 1))
    view = arena.view(4)
    assert {name: view[name].tolist() for name in view} == {
        "number": [7] * 4, "rows": [100, 99, 98, 97], "wide": [[0, 1, 2, 3]] * 2, "plain": [3] * 4,
        "fixed": [5, 5], "live": 4,
    }  # fmt: skip
    sources = {"number": [1], "rows": [1], "wide": [[1], [1]], "plain": [1], "fixed": [1, 1]}
    view = arena.fill(Batch(1, sources), Bucket(4, 4, 1))
    assert (view.number.tolist(), view.rows.tolist()) == ([1, 0, 0, 0], [1, 0, 0, 0])


# Where things lie.


def test_meta_shape_views_are_exactly_the_bucket_at_one_address() -> None:
    slots = [
        slot("r", inner=(3,)),
        slot("t", axis="token", dtype=torch.int8),
        slot("o", axis="offset", dtype=torch.int16),
        slot("m", axis="token", inner=(3,), row_dim=1),
        slot("m2", axis="request", inner=(2, 5), row_dim=2, dtype=torch.bfloat16),
        slot("f", axis="fixed", inner=(6,)),
    ]
    arena = Arena(slots, [2, 4, 8, 16], tokens_per_request=3)
    places: dict[str, set[int]] = {declared.name: set() for declared in slots}
    for size in (16, 2, 8, 4, 16):
        view = arena.view(size)
        for declared in slots:
            tensor = view[declared.name]
            assert tensor.shape == declared.shape(declared.rows(size, 3 * size))
            assert tensor.is_contiguous()
            assert tensor.data_ptr() % tensor.element_size() == 0
            places[declared.name].add(tensor.data_ptr())
    assert {name: len(addresses) for name, addresses in places.items()} == dict.fromkeys(places, 1)


def test_views_of_a_bucket_are_the_same_tensors_every_time() -> None:
    arena = Arena([slot()], LADDER)
    assert arena.view(4).x is arena.view(4).x is arena.fill(Batch(3, {"x": [1, 2, 3]})).x


@pytest.mark.parametrize(("limit", "ladder"), [(100, [112, 8]), (1, [1])])
def test_over_cap_slots_have_the_rows_of_the_largest_bucket(limit: int, ladder: list[int]) -> None:
    arena = Arena([slot(), slot("t", axis="token")], ladder, tokens_per_request=3)
    view = arena.fill(Batch(limit, {"x": list(range(limit)), "t": list(range(3 * limit))}))
    assert (len(view.x), len(view.t)) == (max(ladder), 3 * max(ladder))


def test_slots_do_not_overlap() -> None:
    slots = [slot(f"s{number}", dtype=dtype, inner=(3,)) for number, dtype in enumerate(DTYPES)]
    arena = Arena(slots, LADDER)
    arena.fill(Batch(8, {declared.name: values((8, 3), declared.dtype) for declared in slots}))
    view = arena.view(8)
    assert all(torch.equal(view[declared.name], values((8, 3), declared.dtype)) for declared in slots)


def test_extend_ladders_size_request_slots_by_max_requests() -> None:
    space = KeySpace(Ladder([16, 64]), modes=[Mode.EXTEND], max_requests=3)
    arena = Arena([slot("lens", pad=0), slot("ids", axis="token", pad=-1)], space)
    view = arena.fill(Batch(2, {"lens": [4, 5], "ids": list(range(9))}, mode=Mode.EXTEND, num_tokens=9))
    assert view.lens.tolist() == [4, 5, 0]
    assert view.ids.tolist() == [*range(9), *[-1] * 7]


# Adopted storage.


def test_adopted_storage_is_filled_where_it_is() -> None:
    storage = torch.full((10,), 55)
    arena = Arena([slot(storage=storage, pad=1)], LADDER)
    view = arena.fill(Batch(3, {"x": [7, 8, 9]}))
    assert view.x.data_ptr() == storage.data_ptr()
    assert storage.tolist()[:4] == [7, 8, 9, 1]


@pytest.mark.parametrize("branches", [1, 3])
def test_over_cap_rows_around_an_adopted_slot_stay_as_they_are(branches: int) -> None:
    """Every factor of an extent counts, as the branches of each request, up to the largest bucket; OVER-CAP-5."""
    rows = 8 * branches
    guarded = torch.full((4 + rows + 8, 3), 55)
    slots = [slot(axis="token", storage=guarded[4 : 4 + rows], pad=1, inner=(3,))]
    arena = Arena(slots, [2, 8], tokens_per_request=branches)
    for requests in (8, 3, 1, 0):
        source = values((requests * branches, 3), torch.int64)
        view = arena.fill(Batch(requests, {"x": source} if requests else {}, num_tokens=requests * branches))
        assert view.x.tolist() == [*source.tolist(), *[[1] * 3] * (len(view.x) - len(source))]
        assert len(view.x) == branches * (8 if requests > 2 else 2)
        assert (guarded[:4] == 55).all()
        assert (guarded[4 + rows :] == 55).all()
    slots = [slot(axis="token", storage=guarded[4 : 3 + rows], pad=1, inner=(3,))]
    with pytest.raises(ConfigError, match="but ladder size 8 needs"):
        Arena(slots, [2, 8], tokens_per_request=branches)


def test_a_small_bucket_leaves_rows_beyond_it_alone() -> None:
    storage = torch.zeros(8, dtype=torch.int64)
    arena = Arena([slot(storage=storage, pad=1)], [2, 8])
    arena.fill(Batch(8, {"x": list(range(10, 18))}))
    arena.fill(Batch(1, {"x": [5]}))
    assert storage.tolist() == [5, 1, 12, 13, 14, 15, 16, 17]


def test_an_adopted_storage_of_several_rows_per_position_is_sliced() -> None:
    storage = torch.zeros(3, 10, dtype=torch.int64)
    arena = Arena([slot(storage=storage, pad=9, inner=(3,), row_dim=1, axis="token")], LADDER)
    view = arena.fill(Batch(3, {"x": values((3, 3), torch.int64)}))
    assert view.x.data_ptr() == storage.data_ptr()
    assert view.x.stride() == (10, 1)
    assert view.x.tolist() == [[1, 2, 3, 9], [4, 5, 6, 9], [7, 8, 9, 9]]


def test_an_adopted_storage_may_be_strided() -> None:
    wide = torch.zeros(8, 6, dtype=torch.int64)
    arena = Arena([slot(storage=wide[:, 1], pad=4)], LADDER)
    arena.fill(Batch(3, {"x": [1, 2, 3]}))
    assert wide[:4, 1].tolist() == [1, 2, 3, 4]
    assert (wide[:, [0, 2, 3, 4, 5]] == 0).all()


@pytest.mark.parametrize(
    ("shape", "more", "said"),
    [
        ((7,), {}, r"slot 'x': the adopted storage has shape \(7,\), but ladder size 8 needs \(8,\)"),
        ((1,), {}, r"ladder size 2 needs \(2,\) \(rows on dimension 0\); enlarge it or cut the ladder"),
        ((8, 2), {}, r"shape \(8, 2\), but ladder size 2 needs \(2,\)"),
        ((8, 3), {"inner": (2,)}, r"shape \(8, 3\), but ladder size 2 needs \(2, 2\)"),
        ((8,), {"axis": "offset"}, r"shape \(8,\), but ladder size 8 needs \(9,\)"),
        ((8,), {"axis": "token"}, r"shape \(8,\), but ladder size 8 needs \(16,\)"),
        ((3,), {"axis": "fixed", "inner": (2,)}, r"shape \(3,\), but ladder size 2 needs \(2,\)"),
    ],
)
def test_over_cap_an_adopted_storage_that_is_too_small_is_refused(
    shape: tuple[int, ...], more: dict[str, Any], said: str
) -> None:
    with pytest.raises(ConfigError, match=said):
        Arena([slot(storage=torch.zeros(shape, dtype=torch.int64), **more)], LADDER, tokens_per_request=2)


def test_bucket_list_capacity_names_the_first_size_that_does_not_fit() -> None:
    with pytest.raises(ConfigError, match=r"shape \(4,\), but ladder size 17 needs \(17,\)"):
        Arena([slot(storage=torch.zeros(4, dtype=torch.int64))], [1, 17, 33])


def test_an_adopted_storage_elsewhere_is_refused() -> None:
    with pytest.raises(ConfigError, match="slot 'x': the adopted storage is on meta, the slots on cpu"):
        Arena([slot(storage=torch.empty(8, dtype=torch.int64, device="meta"))], LADDER)


@pytest.mark.parametrize(("one", "other"), [((0, 8), (0, 8)), ((0, 8), (7, 15)), ((4, 12), (0, 5))])
def test_pad_alias_overlapping_storages_are_refused(one: tuple[int, int], other: tuple[int, int]) -> None:
    shared = torch.zeros(16, dtype=torch.int64)
    with pytest.raises(ConfigError, match=r"slots '[ab]' and '[ab]' adopt overlapping storages; give each its own"):
        Arena([slot("a", storage=shared[slice(*one)]), slot("b", storage=shared[slice(*other)])], [1])


def test_neighbouring_storages_are_fine() -> None:
    shared = torch.zeros(16, dtype=torch.int64)
    arena = Arena([slot("a", storage=shared[:8], pad=1), slot("b", storage=shared[8:], pad=2)], LADDER)
    arena.fill(Batch(7, {"a": [5] * 7, "b": [6] * 7}))
    assert shared.tolist() == [5] * 7 + [1] + [6] * 7 + [2]


# A source that is the slot's own view.


@pytest.mark.parametrize("adopted", [False, True])
@pytest.mark.parametrize("requests", [1, 3, 4])
def test_the_slot_s_own_view_is_not_copied_and_its_tail_is_reset(adopted: bool, requests: int) -> None:
    more = {"storage": torch.zeros(8, 2, dtype=torch.int64)} if adopted else {}
    arena = Arena([slot(pad=9, inner=(2,), **more)], [4, 8])
    own = arena.view(8).x
    own.copy_(values((8, 2), torch.int64))
    view = arena.fill(Batch(requests, {"x": own[:requests]}))
    assert view.x.tolist() == values((requests, 2), torch.int64).tolist() + [[9, 9]] * (4 - requests)


def test_the_slot_s_own_view_is_recognised_where_rows_are_not_in_front() -> None:
    storage = torch.zeros(3, 8, dtype=torch.int64)
    arena = Arena([slot(pad=9, inner=(3,), row_dim=1, storage=storage)], [4, 8])
    storage[:, :3] = values((3, 3), torch.int64)
    view = arena.fill(Batch(3, {"x": storage[:, :3]}))
    assert view.x.tolist() == [[1, 2, 3, 9], [4, 5, 6, 9], [7, 8, 9, 9]]


@pytest.mark.parametrize(
    "take",
    [
        lambda a, b: {"a": b[:3], "b": [0] * 3},
        lambda a, b: {"a": a[1:4], "b": [0] * 3},
        lambda a, b: {"a": [0] * 3, "b": a[4:7]},
        lambda a, b: {"a": a.numpy()[1:4], "b": [0] * 3},
    ],
    ids=["another slot", "shifted", "another slot's tail", "as an array"],
)
def test_fill_copy_a_source_in_memory_that_the_fill_writes_is_refused(take: Any) -> None:
    arena = Arena([slot("a"), slot("b")], [8])
    arena.fill(Batch(8, {"a": list(range(8)), "b": list(range(10, 18))}))
    before = snapshot(arena)
    view = arena.view(8)
    with pytest.raises(BindError, match=r"slot '[ab]': the source lies in the memory of slot '[ab]'.*hand in a copy"):
        arena.fill(Batch(3, take(view.a, view.b)))
    assert snapshot(arena) == before


# Modes and devices.


MODES = [torch.no_grad, torch.inference_mode, torch.enable_grad]


@pytest.mark.parametrize("build_in", MODES)
@pytest.mark.parametrize("fill_in", MODES)
def test_inference_mode_in_and_out(build_in: Any, fill_in: Any) -> None:
    with build_in():
        arena = Arena([slot(dtype=torch.float32, pad=1)], LADDER)
        first = arena.view(4).x
    with fill_in():
        view = arena.fill(Batch(3, {"x": torch.arange(3.0)}))
    assert view.x is first
    assert not view.x.is_inference()
    assert view.x.tolist() == [0, 1, 2, 1]


@pytest.mark.parametrize("fill_in", MODES)
def test_storage_from_inference_mode_can_be_adopted(fill_in: Any) -> None:
    with torch.inference_mode():
        storage = torch.zeros(8, dtype=torch.int64)
    arena = Arena([slot(storage=storage, pad=1)], LADDER)
    with fill_in():
        arena.fill(Batch(3, {"x": [5, 6, 7]}))
    assert storage[:4].tolist() == [5, 6, 7, 1]


@pytest.fixture
def meta_default() -> Iterator[None]:
    torch.set_default_device("meta")
    try:
        yield
    finally:
        torch.set_default_device(None)


@pytest.mark.usefixtures("meta_default")
def test_fill_copy_slots_live_on_their_device_whatever_the_default() -> None:
    slots = [
        slot("x", capture=lambda row: row + 1, pad=9),
        slot("empty", inner=(0,)),
        slot("counts", axis="rank", dtype=torch.int32, value=RANK_COUNTS),
        slot("live", axis="fixed", value=RAW_REQUESTS),
        slot("cu", axis="offset", pad=REPEAT_LAST),
    ]
    arena = Arena(slots, [2, 4], num_ranks=2)
    arena.fill_capture(Bucket(4, 4, 1))
    assert arena.view(4).x.tolist() == [1, 2, 3, 4]
    view = arena.fill(Batch(3, {"x": [5, 6, 7], "empty": [[], [], []], "cu": (0, 1, 2, 3)}))
    assert {view[name].device.type for name in view} == {"cpu"}
    assert (view.x.tolist(), view.counts.tolist(), int(view.live)) == ([5, 6, 7, 9], [4, 4], 3)
    assert arena.fill(Batch(1, {"x": np.array([8]), "empty": [[]], "cu": [0, 1]})).x.tolist() == [8, 9]


def test_a_device_that_is_neither_cpu_nor_cuda_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"device 'meta': expected 'cpu' \(the tape\) or 'cuda'"):
        Arena([slot()], LADDER, device="meta")


# Refusals that are the arena's own; what a source may be is in core/test_binding.py.


@pytest.mark.parametrize(
    ("batch", "bucket", "error"),
    [
        (Batch(9, {"a": [1] * 9, "b": [1] * 9}), None, CapacityError),
        (Batch(4, {"a": [1] * 4, "b": [1] * 4}), Bucket(2, 2, 1), GraphGlueError),
        (Batch(4, {"a": [1] * 4, "b": [1] * 4}), Bucket(16, 16, 1), GraphGlueError),
        (Batch(4, {"a": [1] * 4, "b": [1] * 5}), None, BindError),
        (Batch(4, {"a": [1] * 4}), None, BindError),
        (Batch(4, {"a": [1] * 4, "b": [1] * 4, "c": [1] * 4}), None, BindError),
    ],
    ids=["over the ladder", "bucket too small", "bucket beyond the slots", "extent", "missing", "unknown"],
)
def test_over_cap_a_refused_fill_has_written_nothing(
    batch: Batch, bucket: Bucket | None, error: type[Exception]
) -> None:
    arena = Arena([slot("a"), slot("b")], LADDER)
    arena.fill(Batch(8, {"a": list(range(8)), "b": list(range(8))}))
    before = snapshot(arena)
    with pytest.raises(error):
        arena.fill(batch, bucket)
    assert snapshot(arena) == before


def test_what_fits() -> None:
    arena = Arena([slot()], LADDER, tokens_per_request=2)
    assert arena.fits(Bucket(8, 16, 2))
    assert arena.fits(Bucket(1, 16, 16))
    assert not arena.fits(Bucket(9, 9, 1))
    assert not arena.fits(Bucket(8, 17, 0))


def test_names_are_unique() -> None:
    with pytest.raises(ConfigError, match="slot 'x' is declared twice; names are unique"):
        Arena([slot(), slot(dtype=torch.int32)], LADDER)


def test_kinds_of_all_dtypes_are_known() -> None:
    assert {kind_of(dtype) for dtype in DTYPES} == {"bool", "integer", "float"}


def test_scratch_tensors_leave_the_slots_alone() -> None:
    arena = Arena([slot("a", pad=3), slot("f", axis="fixed", inner=(2,))], [2])
    arena.fill(Batch(2, {"a": [1, 2], "f": [3, 4]}))
    before, bucket = snapshot(arena), Bucket(5, 5, 1)
    fresh = arena.scratch(arena.bind({"a": [9] * 5, "f": [8, 8]}, bucket, bucket), bucket)
    assert {name: tensor.tolist() for name, tensor in fresh.items()} == {"a": [9] * 5, "f": [8, 8]}
    assert snapshot(arena) == before
