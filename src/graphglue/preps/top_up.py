"""The shipped prep "kv-page-top-up": requests that run out of KV pages take their next ones, on the device.

The engine keeps a stack of free pages and, for each request, how many pages it owns. Before its new tokens are
written a request needs all pages up to the last of them; what it lacks it takes off the stack, in the order of the
batch. No number comes to the host, so the step needs no allocator in front of it.

The prep changes tables, so it is never run twice for one step: warm-ups and audits run it on clones, and the shadow
check leaves it out. Row 0, page 0 and location 0 are the sink: no request owns them, and page 0 is never free.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from graphglue.core.batch import Mode
from graphglue.core.contract import PrepContract
from graphglue.core.slots import Slot
from graphglue.errors import ContractError
from graphglue.preps import causal, rows

if TYPE_CHECKING:
    from graphglue.registry import Registry

NAME = "kv-page-top-up"
CONTRACT = PrepContract(
    name=NAME,
    reads={"seq_lens": 1, "req_pool_indices": rows.SINK},
    tables=("req_to_token", "num_pages", "free_pages", "num_free"),
    outputs={"out_cache_loc": "token", "num_unplaced": "request", "num_missing_pages": "fixed"},
    modes={Mode.DECODE, Mode.VERIFY, Mode.DRAFT},
    effects=("req_to_token", "num_pages", "num_free"),
)


class Taken(NamedTuple):
    """What each request takes: [requests, most per step] pages and whether they are granted, and what it owns then."""

    pages: torch.Tensor
    granted: torch.Tensor
    owned: torch.Tensor


def slots(max_seq_len: int | None = None) -> list[Slot]:
    """List the slots that the prep reads: seq_lens and req_pool_indices of ``rows.slots``."""
    return [slot for slot in rows.slots(max_seq_len) if slot.name in CONTRACT.reads]


def make(page_size: int = 256) -> causal.Prep:
    """Make the prep.

    Args:
        page_size: tokens of a page.

    Raises:
        ContractError: ``page_size`` is below 1; or, from the prep, a step whose requests differ in width.
    """
    if page_size < 1:
        raise ContractError(f"{NAME}: page_size is {page_size}, expected at least 1")

    def top_up(view: Any) -> dict[str, torch.Tensor]:
        """Take the pages of one step, and give the locations of its tokens.

        A stack that is too short serves the first requests of the batch. A token without a page is placed at location
        0 and counted, nothing is written for it, and its request takes the page in a later step. So does a request
        that lacks more pages than a block of this width can cross, ``ceil(width / page_size)``.

        Slots: ``slots()``. Real requests have rows of their own.
        Tables:
            req_to_token: [requests, max_context] integer, written: the locations of the pages taken.
            num_pages: [requests] integer, written: the pages that each request owns.
            free_pages: [pages] integer; free are the first ``num_free``, the last of them is taken first.
            num_free: [1] integer, written.

        Returns:
            out_cache_loc: [tokens] int64, the location of each new token; 0 where it has none.
            num_unplaced: [requests] int32, tokens of the request that have none.
            num_missing_pages: [1] int64, pages that the requests of this step still lack.

        Sync: none. Capturable: yes.
        """
        width, requests, tables = rows.width_of(view, NAME), view.req_pool_indices, view.tables
        max_context = tables.req_to_token.shape[1]
        ends = view.seq_lens if view.mode is Mode.DECODE else view.seq_lens + width
        needed = (ends.clamp(max=max_context) + page_size - 1) // page_size
        lacking = torch.where(requests == rows.SINK, 0, needed - tables.num_pages[requests]).clamp(min=0)
        taken = _take(requests, lacking, -(-width // page_size), tables)
        _enter(requests, taken, tables, page_size)
        positions = ends[:, None] + torch.arange(-width, 0, device=ends.device)
        limit = torch.where(requests == rows.SINK, 0, taken.owned * page_size).clamp(max=max_context)
        placed = (positions >= 0) & (positions < limit[:, None])
        locations = tables.req_to_token[requests[:, None], torch.where(placed, positions, 0)]
        unplaced = (~placed & (requests != rows.SINK)[:, None]).sum(1)
        return {
            "out_cache_loc": torch.where(placed, locations, rows.SINK).flatten().to(torch.int64),
            "num_unplaced": unplaced.to(torch.int32),
            "num_missing_pages": (lacking.sum() - taken.granted.sum()).view(1),
        }

    return top_up


def _take(requests: torch.Tensor, lacking: torch.Tensor, most: int, tables: Any) -> Taken:
    """Deal free pages out in the order of the batch, at most ``most`` to each request."""
    wanted = torch.arange(most, device=lacking.device) < lacking[:, None]
    ranks = wanted.flatten().cumsum(0).view_as(wanted) - 1
    num_free = tables.num_free.clamp(0, tables.free_pages.shape[0])
    granted = wanted & (ranks < num_free)
    pages = tables.free_pages[torch.where(granted, num_free - 1 - ranks, 0)]
    return Taken(pages, granted, tables.num_pages[requests] + granted.sum(1))


def _enter(requests: torch.Tensor, taken: Taken, tables: Any, page_size: int) -> None:
    """Write what was taken into the tables; what was not writes the sink's own value into the sink."""
    req_to_token, most = tables.req_to_token, taken.pages.shape[1]
    offsets = torch.arange(page_size, device=requests.device)
    first = taken.owned - taken.granted.sum(1)
    stretches = first[:, None] + torch.arange(most, device=requests.device)
    columns = stretches[:, :, None] * page_size + offsets
    entered = taken.granted[:, :, None] & (columns < req_to_token.shape[1])
    locations = taken.pages[:, :, None] * page_size + offsets
    rows_of = torch.where(entered, requests[:, None, None], rows.SINK)
    values = torch.where(entered, locations, req_to_token[rows.SINK, 0])
    req_to_token.index_put_((rows_of, torch.where(entered, columns, 0)), values.to(req_to_token.dtype))
    tables.num_pages.index_put_((requests,), taken.owned.to(tables.num_pages.dtype))
    tables.num_free.sub_(taken.granted.sum())


def register(registry: Registry, page_size: int = 256) -> causal.Prep:
    """Register the prep under its name, and return it.

    Args:
        registry: where to register.
        page_size: tokens of a page.
    """
    return registry.register(CONTRACT)(make(page_size))
