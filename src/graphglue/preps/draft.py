"""The shipped prep "dsv4-draft": metadata of a block that a draft model writes behind each request's prefix.

All rows of a request see the same: the window of its prefix, the oldest position first, and then the whole block.
(The causal preps run from the newest position to the oldest.) Row 0 of ``req_to_token`` and KV location 0 are the
sink of pad rows.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from graphglue.core.batch import Mode
from graphglue.core.contract import PrepContract
from graphglue.core.slots import Slot
from graphglue.preps import causal, rows

if TYPE_CHECKING:
    from graphglue.registry import Registry

CONTRACT = PrepContract(
    name="dsv4-draft", reads=rows.PADS, tables=causal.TABLES, outputs=causal.OUTPUTS, modes={Mode.DRAFT}
)


def slots(max_seq_len: int | None = None) -> list[Slot]:
    """List the slots that the prep reads: those of ``rows.slots``."""
    return rows.slots(max_seq_len)


def make(page_size: int = 256, window: int = 128, alignment: int = 64) -> causal.Prep:
    """Make the prep. The block's width is the step's tokens per request.

    Args:
        page_size: tokens of a page.
        window: positions that a row of the sliding window holds.
        alignment: the window's columns are a multiple of it.

    Raises:
        ContractError: an unusable number; or, from the prep, a step whose requests differ in width.
    """
    layout = causal.WindowLayout(page_size, window, alignment)

    def draft(view: Any) -> dict[str, torch.Tensor]:
        """Build the metadata of one draft step.

        Slots: ``slots()``; seq_lens is the prefix alone. Tables: req_to_token [requests, max_context] and
        full_to_swa [locations].

        Returns:
            page_table: [tokens, 1] int32, the request's first page; a draft reads its window only.
            raw_out_loc: [tokens] int32, where each token is written.
            seq_lens_casual: [tokens] int32, prefix and 1 + j for row j.
            positions_casual: [tokens] int32, each row's own position.
            swa_page_indices: [tokens, columns] int32, window and block, equal for all rows of a request.
            swa_topk_lengths: [tokens] int32, how many of them there are.

        Sync: none. Capturable: yes.
        """
        width, seen = rows.width_of(view, "dsv4-draft"), rows.block_rows(view)
        prefix = view.seq_lens.clamp(max=layout.window)
        window = _window_then_block(view, prefix, width, layout)
        return {
            "page_table": causal.page_table(seen.requests, view.tables.req_to_token[:, :1], layout.page_size),
            "raw_out_loc": view.out_cache_loc.to(torch.int32),
            "seq_lens_casual": seen.lengths,
            "positions_casual": seen.lengths - 1,
            "swa_page_indices": _repeated(window, width),
            "swa_topk_lengths": _repeated((prefix + width).to(torch.int32), width),
        }

    return draft


def _window_then_block(view: Any, prefix: torch.Tensor, width: int, layout: causal.WindowLayout) -> torch.Tensor:
    """Look up each request's columns: ``prefix`` positions, the oldest first, the block's locations, then -1."""
    tables = view.tables
    column = torch.arange(layout.columns(block=width), device=prefix.device)
    in_block = column - prefix[:, None]  # negative in the window
    in_window = in_block < 0
    positions = torch.where(in_window, view.seq_lens[:, None] + in_block, 0)
    window = tables.full_to_swa[tables.req_to_token[view.req_pool_indices[:, None], positions]]
    block = tables.full_to_swa[view.out_cache_loc].view(-1, width).gather(1, in_block.clamp(0, width - 1))
    return torch.where(in_window, window, torch.where(in_block < width, block, -1)).to(torch.int32)


def _repeated(per_request: torch.Tensor, width: int) -> torch.Tensor:
    """Repeat each request's row for each of its tokens."""
    return per_request[:, None].expand(-1, width, *per_request.shape[1:]).flatten(0, 1)


def register(registry: Registry, page_size: int = 256, window: int = 128, alignment: int = 64) -> causal.Prep:
    """Register the prep under its name, and return it.

    Args:
        registry: where to register.
        page_size: tokens of a page.
        window: positions that a row of the sliding window holds.
        alignment: the window's columns are a multiple of it.
    """
    return registry.register(CONTRACT)(make(page_size, window, alignment))
