"""The shipped compression preps: which token completes an entry, how many each row sees, and the indexer's blocks."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import graphglue as gg
from graphglue.core.view import View
from graphglue.errors import ContractError
from graphglue.preps import compression

from .cases import tensors
from .test_causal import TABLES

TINY = {"page_size": 4, "top_k": 3, "alignment": 2, "index_page_size": 1}


def run(ratio: int, mode: gg.Mode, seq_lens: list[int], locations: list[int]) -> dict[str, Any]:
    """Run a step of request 1 and, behind it, of the sink."""
    slots = {"seq_lens": seq_lens, "req_pool_indices": [1, 0], "out_cache_loc": locations}
    made = {name: torch.tensor(values) for name, values in slots.items()}
    view = View(made, tensors(TABLES), gg.Bucket(2, len(locations), len(locations) // 2), mode)
    return {leaf: tensor.tolist() for leaf, tensor in compression.make(ratio, **TINY)(view).items()}


def test_ratio_2_by_hand() -> None:
    assert run(2, gg.Mode.VERIFY, [5, 1], [9, 10, 11, 0, 0, 0]) == {
        "out_loc": [4, -1, 5, 0, -1, 0],  # rows of lengths 6, 7, 8 and 2, 3, 4
        "topk_clamp1": [3, 3, 4, 1, 1, 2],
        "sparse_lengths": [3, 3, 3, 1, 1, 2],
        "sparse_indices": [[-1] * 4] * 6,
        "indexer_block_table": [[10, 11, 4, 5]] * 3 + [[0, 1, 0, 1]] * 3,
    }


def test_ratio_1_by_hand() -> None:
    found = run(1, gg.Mode.DECODE, [6, 1], [9, 0])
    assert found["out_loc"] == [9, 0]
    assert found["topk_clamp1"] == [6, 1]
    assert found["sparse_lengths"] == [3, 1]
    assert found["indexer_block_table"] == [[20, 21, 22, 23, 8, 9, 10, 11], [0, 1, 2, 3] * 2]


def test_one_entry_is_seen_before_the_first_is_complete() -> None:
    found = run(2, gg.Mode.DECODE, [1, 1], [20, 0])
    assert found["topk_clamp1"] == [1, 1]
    assert found["out_loc"] == [-1, -1]


def test_refuses_what_it_can_not_build() -> None:
    with pytest.raises(ContractError, match=r"compression ratio is 4, expected one of \(1, 2\)"):
        compression.make(4)
    with pytest.raises(ContractError, match="page_size 64 holds no whole number of blocks of 64 entries at ratio 2"):
        compression.make(2, page_size=64)
    with pytest.raises(ContractError, match="top_k is 0 and alignment 64, expected at least 1"):
        compression.make(1, top_k=0)
