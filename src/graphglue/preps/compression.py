"""The shipped preps of compressed KV, "dsv4-compression-1" and "-2", and "dsv4-ragged-compression-1" and "-2".

A target model keeps, beside the KV of every token, one entry for every ``ratio`` tokens, among which an indexer
picks the best ones while the forward runs. Decode and verify steps have this metadata; draft steps have none.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from graphglue.core.batch import Mode
from graphglue.core.contract import PrepContract
from graphglue.core.slots import Slot
from graphglue.errors import ContractError
from graphglue.preps import causal, rows

if TYPE_CHECKING:
    from graphglue.registry import Registry

RATIOS = (1, 2)
LEAVES = ("out_loc", "topk_clamp1", "sparse_lengths", "sparse_indices", "indexer_block_table")


def contract(ratio: int, ragged: bool = False) -> PrepContract:
    """Give the contract of a ratio.

    Args:
        ratio: tokens to one compressed entry.
        ragged: for verify steps whose requests differ in width; else for decode and verify steps of one width.
    """
    return PrepContract(
        name=f"dsv4-{'ragged-' if ragged else ''}compression-{ratio}",
        reads=rows.RAGGED_PADS if ragged else rows.PADS,
        tables=("req_to_token",),
        outputs=dict.fromkeys(LEAVES, "token"),
        modes={Mode.VERIFY} if ragged else {Mode.DECODE, Mode.VERIFY},
        ragged=ragged,
    )


def slots(ragged: bool = False, max_seq_len: int | None = None) -> list[Slot]:
    """List the slots that a prep reads; see ``rows.slots`` and ``rows.ragged_slots``."""
    return (rows.ragged_slots if ragged else rows.slots)(max_seq_len)


def make(
    ratio: int,
    ragged: bool = False,
    page_size: int = 256,
    top_k: int = 512,
    alignment: int = 64,
    index_page_size: int = 64,
) -> causal.Prep:
    """Make the prep of a ratio.

    Args:
        ratio: tokens to one compressed entry, 1 or 2.
        ragged: as ``contract`` takes it.
        page_size: tokens of a page.
        top_k: entries that the indexer picks, 512 or 1024 in the published models.
        alignment: the columns of ``sparse_indices`` are a multiple of it.
        index_page_size: compressed entries of one of the indexer's own blocks.

    Raises:
        ContractError: another ratio, a number below 1, or pages that do not divide into the indexer's blocks.
    """
    num_blocks = _checked_blocks(ratio, page_size, index_page_size)
    if top_k < 1 or alignment < 1:
        raise ContractError(f"top_k is {top_k} and alignment {alignment}, expected at least 1")
    rows_of, columns = rows.ragged_rows if ragged else rows.target_rows, -(-top_k // alignment) * alignment

    def compression(view: Any) -> dict[str, torch.Tensor]:
        """Build the compression metadata of one step.

        Slots: ``slots()``. Tables: req_to_token [requests, max_context].

        Returns:
            out_loc: [tokens] int64, where the entry that a token completes is written; -1 where it completes none.
            topk_clamp1: [tokens] int32, the entries that each row sees, at least 1.
            sparse_lengths: [tokens] int32, how many of them are picked.
            sparse_indices: [tokens, columns] int32, all -1; the indexer fills it in the forward.
            indexer_block_table: [tokens, pages x blocks of a page] int32, the indexer's blocks of each page.

        Sync: none. Capturable: yes.
        """
        seen, locations = rows_of(view), view.out_cache_loc
        entries = (seen.lengths // ratio).clamp(min=1)
        pages = causal.page_table(seen.requests, view.tables.req_to_token, page_size)
        blocks = torch.arange(num_blocks, dtype=torch.int32, device=pages.device)
        return {
            "out_loc": torch.where(seen.lengths % ratio == 0, locations // ratio, -1),
            "topk_clamp1": entries,
            "sparse_lengths": entries.clamp(max=top_k),
            "sparse_indices": torch.full((locations.shape[0], columns), -1, dtype=torch.int32, device=pages.device),
            "indexer_block_table": (pages[:, :, None] * num_blocks + blocks).flatten(1),
        }

    return compression


def _checked_blocks(ratio: int, page_size: int, index_page_size: int) -> int:
    """Give the indexer's blocks of a page."""
    if ratio not in RATIOS:
        raise ContractError(f"compression ratio is {ratio!r}, expected one of {RATIOS}")
    if index_page_size < 1 or page_size < 1 or page_size % (ratio * index_page_size):
        raise ContractError(
            f"page_size {page_size} holds no whole number of blocks of {index_page_size} entries at ratio {ratio}; "
            "choose a multiple of ratio x index_page_size"
        )
    return page_size // (ratio * index_page_size)


def register(registry: Registry, page_size: int = 256, top_k: int = 512) -> None:
    """Register all ratios, for requests of one width and for ragged ones.

    Args:
        registry: where to register.
        page_size: tokens of a page.
        top_k: entries that the indexer picks.
    """
    for ratio in RATIOS:
        for ragged in (False, True):
            registry.register(contract(ratio, ragged))(make(ratio, ragged, page_size, top_k))
