"""The shipped prep "paged-decode" against its loop reference, and what it refuses."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from graphglue.errors import ContractError
from graphglue.preps import paged_decode

DTYPES = {
    "page_table": torch.int32,
    "positions": torch.int64,
    "cu_seq_lens": torch.int32,
    "write_locations": torch.int64,
}


@st.composite
def steps(draw: st.DrawFn) -> dict[str, Any]:
    """Draw page size, table and rows; lengths favour the ends of pages."""
    page_size = draw(st.integers(1, 6))
    max_context = draw(st.integers(1, 25))
    num_stretches = -(-max_context // page_size)
    pages = st.lists(st.integers(0, 40), min_size=num_stretches, max_size=num_stretches)
    table = [
        [page * page_size + offset for page in row for offset in range(page_size)][:max_context]
        for row in [[0] * num_stretches, *draw(st.lists(pages, max_size=5))]
    ]
    ends = {end + after for end in range(0, max_context + 1, page_size) for after in (0, 1)}
    near_ends = st.sampled_from(sorted(ends & set(range(1, max_context + 1))))
    lengths = draw(st.lists(near_ends | st.integers(1, max_context), max_size=9))
    rows = [draw(st.integers(0, len(table) - 1)) for _ in lengths]
    locations = [table[row][length - 1] for row, length in zip(rows, lengths, strict=True)]
    return {
        "seq_lens": lengths,
        "req_pool_indices": rows,
        "out_cache_loc": locations,
        "req_to_token": table,
        "page_size": page_size,
    }


def run_prep(step: dict[str, Any], table_dtype: torch.dtype = torch.int64) -> dict[str, torch.Tensor]:
    """Call the torch prep with a step's lists."""
    view = SimpleNamespace(
        **{
            name: torch.tensor(step[name], dtype=torch.int64)
            for name in ("seq_lens", "req_pool_indices", "out_cache_loc")
        },
        tables=SimpleNamespace(req_to_token=torch.tensor(step["req_to_token"], dtype=table_dtype)),
    )
    return paged_decode.make(step["page_size"])(view)


@given(step=steps(), table_dtype=st.sampled_from([torch.int32, torch.int64]))
def test_agrees_with_the_loop_reference(step: dict[str, Any], table_dtype: torch.dtype) -> None:
    metadata = run_prep(step, table_dtype)
    expected = paged_decode.reference(**step)
    num_stretches = -(-len(step["req_to_token"][0]) // step["page_size"])
    assert metadata.keys() == expected.keys() == DTYPES.keys() == paged_decode.CONTRACT.outputs.keys()
    for name, tensor in metadata.items():
        assert tensor.dtype == DTYPES[name]
        assert tensor.tolist() == expected[name], name
    assert metadata["page_table"].shape == (len(step["seq_lens"]), num_stretches)


@pytest.mark.parametrize("length", [1, 15, 16, 17, 31, 32, 33, 64])
def test_page_boundaries(length: int) -> None:
    table = [[0] * 64, [page * 16 + offset for page in (9, 4, 7, 1) for offset in range(16)]]
    step = {
        "seq_lens": [length],
        "req_pool_indices": [1],
        "out_cache_loc": [table[1][length - 1]],
        "req_to_token": table,
        "page_size": 16,
    }
    metadata = run_prep(step)
    assert metadata["page_table"].tolist() == [[9, 4, 7, 1]]
    stretch, offset = divmod(metadata["positions"].item(), 16)
    page = metadata["page_table"][0, stretch].item()
    assert page * 16 + offset == metadata["write_locations"].item()


def test_pad_rows_stay_in_the_sink() -> None:
    table = [[0] * 32, list(range(32, 64))]
    pads = {slot.name: slot.pad for slot in paged_decode.slots()}
    step = {name: [pad] * 3 for name, pad in pads.items()} | {"req_to_token": table, "page_size": 16}
    metadata = run_prep(step)
    assert metadata["page_table"].tolist() == [[0, 0]] * 3
    assert metadata["positions"].tolist() == metadata["write_locations"].tolist() == [0, 0, 0]


def test_write_locations_share_no_memory_with_their_slot() -> None:
    locations = torch.tensor([5])
    view = SimpleNamespace(
        seq_lens=torch.tensor([1]),
        req_pool_indices=torch.tensor([0]),
        out_cache_loc=locations,
        tables=SimpleNamespace(req_to_token=torch.zeros(1, 1, dtype=torch.int64)),
    )
    metadata = paged_decode.make(page_size=1)(view)
    locations.fill_(99)
    assert metadata["write_locations"].tolist() == [5]


def test_contract_and_slots_agree() -> None:
    slots = {slot.name: slot for slot in paged_decode.slots()}
    assert {name: slot.pad for name, slot in slots.items()} == paged_decode.CONTRACT.reads
    assert slots["req_pool_indices"].index_of in paged_decode.CONTRACT.tables


def test_refuses_more_tokens_than_requests() -> None:
    view = SimpleNamespace(
        seq_lens=torch.ones(2, dtype=torch.int64),
        req_pool_indices=torch.zeros(2, dtype=torch.int64),
        out_cache_loc=torch.zeros(8, dtype=torch.int64),
        tables=SimpleNamespace(req_to_token=torch.zeros(1, 16, dtype=torch.int64)),
    )
    with pytest.raises(ContractError, match="out_cache_loc has 8 rows and seq_lens has 2"):
        paged_decode.make()(view)


def test_refuses_a_page_size_below_one() -> None:
    with pytest.raises(ContractError, match="page_size is 0, expected at least 1"):
        paged_decode.make(page_size=0)
