"""The shipped prep "paged-decode": metadata of one-token-per-request decoding over a paged KV cache.

The engine keeps ``req_to_token``: row r holds, for the request in row r, the KV location of each of
its positions. A location is ``page * page_size + offset``. From it and three slots come the page
table, the positions, the cumulative lengths and the write locations that paged attention reads.

Row 0 and page 0 are the sink: pad rows read request 0 and write location 0, so the engine gives
neither to a request.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch

from graphglue.core.batch import Mode
from graphglue.core.contract import PrepContract
from graphglue.core.slots import Slot
from graphglue.errors import ContractError

if TYPE_CHECKING:
    from graphglue.registry import Registry

Prep = Callable[[Any], dict[str, torch.Tensor]]

CONTRACT = PrepContract(
    name="paged-decode",
    reads={"seq_lens": 1, "req_pool_indices": 0, "out_cache_loc": 0},
    tables=("req_to_token",),
    outputs={
        "page_table": "token",
        "positions": "token",
        "cu_seq_lens": "offset",
        "write_locations": "token",
    },
    modes={Mode.DECODE},
)


def slots() -> list[Slot]:
    """List the slots the prep reads.

    Slots:
        seq_lens: [requests] int64, pad 1; tokens of each request, the one being decoded included.
        req_pool_indices: [requests] int64, pad 0; each request's row of ``req_to_token``.
        out_cache_loc: [tokens] int64, pad 0; the KV location each new token is written to.
    """
    return [
        Slot("seq_lens", axis="request", dtype=torch.int64, pad=1),
        Slot("req_pool_indices", axis="request", dtype=torch.int64, pad=0, index_of="req_to_token"),
        Slot("out_cache_loc", axis="token", dtype=torch.int64, pad=0),
    ]


def make(page_size: int = 16) -> Prep:
    """Make the prep for pages of ``page_size`` tokens, the only number a captured prep bakes.

    Args:
        page_size: tokens of a page, at least 1.

    Raises:
        ContractError: ``page_size`` is below 1; or, from the prep, a view with more or fewer tokens
            than requests.
    """
    if page_size < 1:
        raise ContractError(f"paged-decode: page_size is {page_size}, expected at least 1")

    def paged_decode(view: Any) -> dict[str, torch.Tensor]:
        """Build the metadata of one decode step.

        Slots: ``slots()``. Tables: req_to_token [num_rows, max_context] of an integer dtype.

        Returns:
            page_table: [requests, ceil(max_context / page_size)] int32, the page of each stretch.
            positions: [requests] int64, the position of the new token.
            cu_seq_lens: [requests + 1] int32, 0 and the running sum of the lengths.
            write_locations: [requests] int64.

        Sync: none. Capturable: yes.
        """
        seq_lens, rows, locations = view.seq_lens, view.req_pool_indices, view.out_cache_loc
        if locations.shape != seq_lens.shape:
            raise ContractError(
                f"paged-decode takes one token per request: out_cache_loc has {locations.shape[0]} rows "
                f"and seq_lens has {seq_lens.shape[0]}; use a verify or draft prep for more tokens"
            )
        first_locations = view.tables.req_to_token[:, ::page_size][rows]
        total = torch.cumsum(seq_lens, dim=0, dtype=torch.int32)
        return {
            "page_table": (first_locations // page_size).to(torch.int32),
            "positions": seq_lens - 1,
            "cu_seq_lens": torch.nn.functional.pad(total, (1, 0)),
            # A copy, so that the metadata never shares memory with the slot it came from.
            "write_locations": locations.clone(),
        }

    return paged_decode


def register(registry: Registry, page_size: int = 16) -> Prep:
    """Register the prep under its name, and return it.

    Args:
        registry: where to register.
        page_size: tokens of a page.
    """
    return registry.register(CONTRACT)(make(page_size))


def reference(
    seq_lens: Sequence[int],
    req_pool_indices: Sequence[int],
    out_cache_loc: Sequence[int],
    req_to_token: Sequence[Sequence[int]],
    page_size: int = 16,
) -> dict[str, list[Any]]:
    """Compute the same metadata with plain loops over Python lists, for tests to compare with.

    Args:
        seq_lens: length of each request in tokens, the new one included.
        req_pool_indices: row of each request in ``req_to_token``.
        out_cache_loc: write location of each request's new token.
        req_to_token: KV location of each position, one row per pool row.
        page_size: tokens of a page.
    """
    page_table, positions, cu_seq_lens, write_locations = [], [], [0], []
    for length, row, location in zip(seq_lens, req_pool_indices, out_cache_loc, strict=True):
        pages = []
        for position in range(0, len(req_to_token[row]), page_size):
            pages.append(req_to_token[row][position] // page_size)
        page_table.append(pages)
        positions.append(length - 1)
        cu_seq_lens.append(cu_seq_lens[-1] + length)
        write_locations.append(location)
    return {
        "page_table": page_table,
        "positions": positions,
        "cu_seq_lens": cu_seq_lens,
        "write_locations": write_locations,
    }
