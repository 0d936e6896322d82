"""The shipped prep "dsv4-draft": window then block, the oldest position first, against verify's other order."""

from __future__ import annotations

import pytest
import torch

import graphglue as gg
from graphglue.core.view import View
from graphglue.errors import ContractError
from graphglue.preps import causal, draft

from .cases import tensors
from .test_causal import TABLES, TINY


def step(seq_lens: list[int], requests: list[int], locations: list[int], width: int) -> View:
    """Show a draft step."""
    slots = {"seq_lens": seq_lens, "req_pool_indices": requests, "out_cache_loc": locations}
    made = {name: torch.tensor(values) for name, values in slots.items()}
    return View(made, tensors(TABLES), gg.Bucket(len(requests), len(locations), width), gg.Mode.DRAFT)


def test_by_hand() -> None:
    metadata = draft.make(**TINY)(step([5, 1], [1, 0], [9, 10, 0, 0], 2))
    assert {leaf: tensor.tolist() for leaf, tensor in metadata.items()} == {
        "page_table": [[5], [5], [0], [0]],
        "raw_out_loc": [9, 10, 0, 0],
        "seq_lens_casual": [6, 7, 2, 3],
        "positions_casual": [5, 6, 1, 2],
        "swa_page_indices": [[122, 123, 108, 109, 110, -1]] * 2 + [[100, 100, 100, -1, -1, -1]] * 2,
        "swa_topk_lengths": [5, 5, 3, 3],
    }


def test_the_order_is_the_reverse_of_verify_s() -> None:
    """Behind the same prefix of 5, verify's first row sees its own token and two of the prefix, the newest first."""
    view = step([5], [1], [9, 10], 2)
    drafted = draft.make(**TINY)(view)["swa_page_indices"][0].tolist()
    verified = causal.make("dsv4-verify", **TINY)(view)["swa_page_indices"][0].tolist()
    assert drafted[1:4] == verified[:3][::-1] == [123, 108, 109]


@pytest.mark.parametrize("prefix", [0, 1, 2, 3, 4, 6])
def test_a_prefix_shorter_than_the_window_leaves_no_gap(prefix: int) -> None:
    metadata = draft.make(**TINY)(step([prefix], [1], [9, 10], 2))
    seen = [100 + location for location in TABLES["req_to_token"][1][max(0, prefix - 3) : prefix]]
    assert metadata["swa_page_indices"][0].tolist() == [*seen, 109, 110, *[-1] * (4 - len(seen))]
    assert metadata["swa_topk_lengths"].tolist() == [len(seen) + 2] * 2


def test_the_page_table_is_one_column_at_any_page_size() -> None:
    metadata = draft.make(page_size=1, window=3, alignment=2)(step([5], [1], [9, 10], 2))
    assert metadata["page_table"].tolist() == [[20], [20]]


def test_refuses_requests_that_differ() -> None:
    with pytest.raises(ContractError, match="dsv4-draft takes requests of one width"):
        draft.make(**TINY)(step([5, 1], [1, 0], [9, 10, 0], 0))
