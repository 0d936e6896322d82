"""The shipped preps "dsv4-decode", "dsv4-verify", "dsv4-ragged-verify" and "dsv4-draft-extend".

Their rows are causal: each sees the positions up to its own, in a page table and in a sliding window whose columns
run from the newest position to the oldest. ("dsv4-draft" has the other order.) The names of the results, "casual"
included, are those of the engine that this metadata was first built in.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from graphglue.core.batch import Mode
from graphglue.core.contract import PrepContract
from graphglue.core.slots import Slot
from graphglue.errors import ContractError
from graphglue.preps import rows

if TYPE_CHECKING:
    from graphglue.registry import Registry

Prep = Callable[[Any], dict[str, torch.Tensor]]

TABLES = ("req_to_token", "full_to_swa")
LEAVES = (
    "page_table",
    "raw_out_loc",
    "seq_lens_casual",
    "positions_casual",
    "swa_page_indices",
    "swa_topk_lengths",
)
OUTPUTS = dict.fromkeys(LEAVES, "token")

_ROWS: dict[str, Callable[[Any], rows.Rows]] = {
    "dsv4-decode": rows.decode_rows,
    "dsv4-verify": rows.block_rows,
    "dsv4-ragged-verify": rows.ragged_rows,
    "dsv4-draft-extend": rows.extend_rows,
}
CONTRACTS = {
    "dsv4-decode": PrepContract(
        name="dsv4-decode", reads=rows.PADS, tables=TABLES, outputs=OUTPUTS, modes={Mode.DECODE}
    ),
    "dsv4-verify": PrepContract(
        name="dsv4-verify", reads=rows.PADS, tables=TABLES, outputs=OUTPUTS, modes={Mode.VERIFY}
    ),
    "dsv4-ragged-verify": PrepContract(
        name="dsv4-ragged-verify",
        reads=rows.RAGGED_PADS,
        tables=TABLES,
        outputs=OUTPUTS,
        modes={Mode.VERIFY},
        ragged=True,
    ),
    "dsv4-draft-extend": PrepContract(
        name="dsv4-draft-extend", reads=rows.PADS, tables=TABLES, outputs=OUTPUTS, modes={Mode.DRAFT_EXTEND}
    ),
}


@dataclass(frozen=True)
class WindowLayout:
    """The numbers that a captured prep bakes.

    Args:
        page_size: tokens of a page.
        window: positions that a row of the sliding window holds.
        alignment: the window's columns are a multiple of it.
        floor: the first position that a window may show.

    Raises:
        ContractError: a number below 1 (below 0 for ``floor``).
    """

    page_size: int = 256
    window: int = 128
    alignment: int = 64
    floor: int = 0

    def __post_init__(self) -> None:
        for name, least in {"page_size": 1, "window": 1, "alignment": 1, "floor": 0}.items():
            if getattr(self, name) < least:
                raise ContractError(f"{name} is {getattr(self, name)}, expected at least {least}")

    def columns(self, block: int = 0) -> int:
        """Give the columns of a window, with a block behind it."""
        return -(-(self.window + block) // self.alignment) * self.alignment


def slots(name: str, max_seq_len: int | None = None) -> list[Slot]:
    """List the slots that a prep reads; see ``rows.slots`` and ``rows.ragged_slots``."""
    return (rows.ragged_slots if _contract(name).ragged else rows.slots)(max_seq_len)


def make(name: str, page_size: int = 256, window: int = 128, alignment: int = 64, floor: int = 0) -> Prep:
    """Make one of the preps of ``CONTRACTS``.

    Args:
        name: which one; it says what the rows are (``graphglue.preps.rows``).
        page_size: tokens of a page.
        window: positions that a row of the sliding window holds.
        alignment: the window's columns are a multiple of it.
        floor: the first position that a window may show.

    Raises:
        ContractError: an unknown name or an unusable number; or, from the prep, a step with other rows.
    """
    rows_of, layout = _ROWS[_contract(name).name], WindowLayout(page_size, window, alignment, floor)
    # Where a decode step writes is read as it was handed in; the others convert into their own buffers.
    locations = torch.int64 if name == "dsv4-decode" else torch.int32

    def causal(view: Any) -> dict[str, torch.Tensor]:
        """Build the metadata of one step.

        Slots: ``slots(name)``. Tables: req_to_token [requests, max_context], the KV location of each position;
        full_to_swa [locations], the location in the window's own pool, -1 for none.

        Returns:
            page_table: [tokens, ceil(max_context / page_size)] int32, the page of each stretch of the request.
            raw_out_loc: [tokens] int32, int64 in decode; where each token is written.
            seq_lens_casual: [tokens] int32, the positions that each row sees.
            positions_casual: [tokens] int32, each row's own position.
            swa_page_indices: [tokens, columns] int32, the window's locations, the newest first, -1 behind them.
            swa_topk_lengths: [tokens] int32, how many of them there are.

        Sync: none. Capturable: yes.
        """
        seen, lengths = rows_of(view), layout.window
        short = seen.lengths.clamp(max=lengths)
        return {
            "page_table": page_table(seen.requests, view.tables.req_to_token, layout.page_size),
            "raw_out_loc": view.out_cache_loc.to(locations, copy=True),
            "seq_lens_casual": seen.lengths,
            "positions_casual": seen.lengths - 1,
            "swa_page_indices": newest_first(seen, view.tables, layout),
            "swa_topk_lengths": torch.minimum(short, (seen.lengths - layout.floor).clamp(min=0)),
        }

    return causal


def page_table(requests: torch.Tensor, req_to_token: torch.Tensor, page_size: int) -> torch.Tensor:
    """Look up the page of each stretch of each row's request, [rows, stretches] int32. Sync: none. Capturable: yes."""
    return (req_to_token[:, ::page_size][requests] // page_size).to(torch.int32)


def newest_first(seen: rows.Rows, tables: Any, layout: WindowLayout) -> torch.Tensor:
    """Look up the window of each row: column k is the position k before the row's own. Sync: none. Capturable: yes.

    A position behind the end of the request's row lies in the sink, where "kv-page-top-up" places its token: the last
    blocks of a request that fills its row reach past it. All such tokens share that place, so they can not be taken.
    """
    back = torch.arange(layout.window, device=seen.lengths.device)
    positions = seen.lengths[:, None] - 1 - back
    shown, behind = positions >= layout.floor, positions >= tables.req_to_token.shape[1]
    # Masked by hand: an index of -1 would read the last entry, on some devices only, and one too large ends a process.
    found = tables.req_to_token[seen.requests[:, None], torch.where(shown & ~behind, positions, 0)]
    indices = torch.where(shown, tables.full_to_swa[torch.where(behind, rows.SINK, found)], -1).to(torch.int32)
    return torch.nn.functional.pad(indices, (0, layout.columns() - layout.window), value=-1)


def register(registry: Registry, page_size: int = 256, window: int = 128, alignment: int = 64) -> None:
    """Register all four under their names.

    Args:
        registry: where to register.
        page_size: tokens of a page.
        window: positions that a row of the sliding window holds.
        alignment: the window's columns are a multiple of it.
    """
    for name, contract in CONTRACTS.items():
        registry.register(contract)(make(name, page_size, window, alignment))


def _contract(name: str) -> PrepContract:
    if name not in CONTRACTS:
        raise ContractError(f"prep {name!r} is none of {sorted(CONTRACTS)}; correct the name")
    return CONTRACTS[name]
