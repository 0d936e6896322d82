"""The shipped causal preps: examples by hand, the order of the window, dtypes, pad rows, and what they refuse."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import graphglue as gg
from graphglue.core.view import View
from graphglue.errors import ContractError
from graphglue.preps import causal, compression, draft, paged_decode, register_shipped, top_up

from .cases import CASES, PUBLISHED, Sizes, Step, tensors, world

TINY = {"page_size": 4, "window": 3, "alignment": 2}
# Request 1 lies in pages 5 and 2; the window's own pool holds location x at 100 + x.
TABLES = {
    "req_to_token": [[0] * 8, [20, 21, 22, 23, 8, 9, 10, 11]],
    "full_to_swa": [*range(100, 124), -1],
}


def run(name: str, mode: gg.Mode, bucket: gg.Bucket, **slots: list[int]) -> dict[str, Any]:
    """Run a prep of pages of 4 and windows of 3 on slots given as lists."""
    made = {slot: torch.tensor(values) for slot, values in slots.items()}
    metadata = causal.make(name, **TINY)(View(made, tensors(TABLES), bucket, mode))
    return {leaf: tensor.tolist() for leaf, tensor in metadata.items()}


def test_decode_by_hand() -> None:
    slots = {"seq_lens": [6, 1], "req_pool_indices": [1, 0], "out_cache_loc": [9, 0]}
    assert run("dsv4-decode", gg.Mode.DECODE, gg.Bucket(2, 2, 1), **slots) == {
        "page_table": [[5, 2], [0, 0]],
        "raw_out_loc": [9, 0],
        "seq_lens_casual": [6, 1],
        "positions_casual": [5, 0],
        "swa_page_indices": [[109, 108, 123, -1], [100, -1, -1, -1]],
        "swa_topk_lengths": [3, 1],
    }


def test_verify_by_hand_the_newest_position_first() -> None:
    slots = {"seq_lens": [1], "req_pool_indices": [1], "out_cache_loc": [21, 22, 23]}
    found = run("dsv4-verify", gg.Mode.VERIFY, gg.Bucket(1, 3, 3), **slots)
    assert found["seq_lens_casual"] == [2, 3, 4]
    assert found["swa_page_indices"] == [[121, 120, -1, -1], [122, 121, 120, -1], [123, 122, 121, -1]]
    assert found["swa_topk_lengths"] == [2, 3, 3]


def test_ragged_verify_by_hand() -> None:
    slots = {
        "seq_lens": [4, 1, 1],
        "req_pool_indices": [1, 1, 0],
        "out_cache_loc": [8, 9, 21, 0, 0, 0],
        "qo_indptr": [0, 2, 3, 3],
    }
    found = run("dsv4-ragged-verify", gg.Mode.VERIFY, gg.Bucket(3, 6, 0), **slots)
    assert found["seq_lens_casual"] == [5, 6, 2, 1, 1, 1]
    assert found["page_table"] == [[5, 2]] * 3 + [[0, 0]] * 3
    assert found["swa_page_indices"][1:4] == [[109, 108, 123, -1], [121, 120, -1, -1], [100, -1, -1, -1]]


def test_one_width_is_the_same_ragged_or_not() -> None:
    slots = {"seq_lens": [4, 2], "req_pool_indices": [1, 1], "out_cache_loc": [8, 9, 22, 23]}
    uniform = run("dsv4-verify", gg.Mode.VERIFY, gg.Bucket(2, 4, 2), **slots)
    assert uniform == run("dsv4-ragged-verify", gg.Mode.VERIFY, gg.Bucket(2, 4, 2), **slots, qo_indptr=[0, 2, 4])


def test_draft_extend_by_hand_and_clamped() -> None:
    slots = {"seq_lens": [5, 1], "req_pool_indices": [1, 0], "out_cache_loc": [22, 23, 8, 0, 0, 0]}
    found = run("dsv4-draft-extend", gg.Mode.DRAFT_EXTEND, gg.Bucket(2, 6, 3), **slots)
    assert found["seq_lens_casual"] == [3, 4, 5, 1, 1, 1]
    assert found["positions_casual"] == [2, 3, 4, 0, 0, 0]
    assert found["swa_topk_lengths"] == [3, 3, 3, 1, 1, 1]


@pytest.mark.parametrize(
    ("name", "mode", "row_tokens", "offsets", "first"),
    [
        ("dsv4-verify", gg.Mode.VERIFY, 3, {}, 6),
        ("dsv4-ragged-verify", gg.Mode.VERIFY, 0, {"qo_indptr": [0, 3]}, 6),
        ("dsv4-draft-extend", gg.Mode.DRAFT_EXTEND, 3, {}, 9),
    ],
)
def test_a_block_that_reaches_past_its_row_reads_the_sink(
    name: str, mode: gg.Mode, row_tokens: int, offsets: dict[str, list[int]], first: int
) -> None:
    """Positions 6 and 7 are the last of a row of 8; the token at 8 was placed at location 0, as by the top-up."""
    slots = {"seq_lens": [first], "req_pool_indices": [1], "out_cache_loc": [10, 11, 0], **offsets}
    found = run(name, mode, gg.Bucket(1, 3, row_tokens), **slots)
    assert found["positions_casual"] == [6, 7, 8]
    assert found["swa_page_indices"] == [[110, 109, 108, -1], [111, 110, 109, -1], [100, 111, 110, -1]]
    assert found["swa_topk_lengths"] == [3, 3, 3]


@pytest.mark.parametrize("name", ["dsv4-verify", "dsv4-ragged-verify"])
def test_a_block_behind_an_empty_prefix_sees_itself_alone(name: str) -> None:
    slots = {"seq_lens": [0, 1], "req_pool_indices": [1, 0], "out_cache_loc": [20, 21, 0, 0]}
    offsets = {"qo_indptr": [0, 2, 2]} if "ragged" in name else {}
    found = run(name, gg.Mode.VERIFY, gg.Bucket(2, 4, 0 if offsets else 2), **slots, **offsets)
    assert found["seq_lens_casual"][:2] == [1, 2]
    assert found["swa_page_indices"][:2] == [[120, -1, -1, -1], [121, 120, -1, -1]]


@pytest.mark.parametrize("name", CASES)
def test_pad_rows_read_and_write_the_sink_alone(name: str) -> None:
    """Poison every row of every table but the sink's: an IDLE step's metadata does not change."""
    case = CASES[name]
    width = 0 if case.ragged else case.width
    bucket = gg.Bucket(2, 2 * case.width, width)
    idle = Step([], [], [], []).padded(bucket)
    held = tensors(world(Sizes(), 1))
    clean = case.make(Sizes())(idle.view(case, bucket, held, "cpu"))
    held["req_to_token"][1:] = 10**6
    held["full_to_swa"][1:] = 10**6
    poisoned = case.make(Sizes())(idle.view(case, bucket, held, "cpu"))
    assert all(torch.equal(clean[leaf], poisoned[leaf]) for leaf in clean)
    written = clean["raw_out_loc" if "raw_out_loc" in clean else "out_loc"]
    assert set(written.tolist()) <= {0, -1}


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("table_dtype", [torch.int32, torch.int64])
def test_dtypes_and_published_extents(name: str, table_dtype: torch.dtype) -> None:
    case = CASES[name]
    bucket = gg.Bucket(2, 2 * case.width, case.width)
    held = tensors(world(PUBLISHED, 1), dtype=table_dtype)
    metadata = case.make(PUBLISHED)(Step([], [], [], []).padded(bucket).view(case, bucket, held, "cpu"))
    wide = {"out_loc"} | ({"raw_out_loc"} if name == "decode" else set())
    for leaf, tensor in metadata.items():
        assert tensor.dtype == (torch.int64 if leaf in wide else torch.int32), leaf
        assert tensor.is_contiguous()
    columns = {"page_table": 1 if name == "draft" else 5, "swa_page_indices": 192 if name == "draft" else 128}
    columns |= {"sparse_indices": 512, "indexer_block_table": 20 // (2 if "compression 2" in name else 1)}
    for leaf in columns.keys() & metadata.keys():
        assert metadata[leaf].shape == (bucket.tokens, columns[leaf]), leaf


@pytest.mark.parametrize("name", CASES)
def test_no_result_shares_memory_with_a_slot(name: str) -> None:
    case = CASES[name]
    bucket = gg.Bucket(2, 2 * case.width, case.width)
    view = Step([], [], [], []).padded(bucket).view(case, bucket, tensors(world(Sizes(), 1)), "cpu")
    metadata = case.make(Sizes())(view)
    before = {leaf: tensor.clone() for leaf, tensor in metadata.items()}
    for slot in view:
        view[slot].fill_(7)
    assert all(torch.equal(metadata[leaf], before[leaf]) for leaf in before)


def test_every_prep_is_registered_with_slots_that_fit() -> None:
    registry = gg.Registry()
    register_shipped(registry)
    assert set(registry) == {
        "paged-decode", "dsv4-decode", "dsv4-verify", "dsv4-ragged-verify", "dsv4-draft-extend", "dsv4-draft",
        "dsv4-compression-1", "dsv4-compression-2", "dsv4-ragged-compression-1", "dsv4-ragged-compression-2",
        "kv-page-top-up", "split-kv-decode",
    }  # fmt: skip
    for name, contract in causal.CONTRACTS.items():
        assert registry.get(name).contract == contract
        assert {slot.name: slot.pad for slot in causal.slots(name)} == contract.reads
    for ragged in (False, True):
        assert {slot.name: slot.pad for slot in compression.slots(ragged)} == compression.contract(1, ragged).reads
    assert {slot.name: slot.pad for slot in draft.slots()} == draft.CONTRACT.reads
    assert {slot.name: slot.pad for slot in top_up.slots()} == top_up.CONTRACT.reads
    assert registry.get("paged-decode").contract == paged_decode.CONTRACT


def test_refusals_say_what_to_use() -> None:
    ragged, wide = gg.Bucket(2, 4, 0), gg.Bucket(2, 4, 2)
    slots = {"seq_lens": [2, 2], "req_pool_indices": [1, 1], "out_cache_loc": [8, 9, 10, 11]}
    with pytest.raises(ContractError, match="row_tokens is 0: the requests differ; use dsv4-ragged-verify"):
        run("dsv4-verify", gg.Mode.VERIFY, ragged, **slots)
    with pytest.raises(ContractError, match="one token per request, and the step has 2; use dsv4-verify"):
        run("dsv4-decode", gg.Mode.DECODE, wide, **slots)
    with pytest.raises(ContractError, match="prep 'dsv4' is none of"):
        causal.make("dsv4")
    with pytest.raises(ContractError, match="window is 0, expected at least 1"):
        draft.make(window=0)
    with pytest.raises(ContractError, match="floor is -1, expected at least 0"):
        causal.make("dsv4-verify", floor=-1)
