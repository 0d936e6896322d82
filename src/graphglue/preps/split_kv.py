"""The shipped prep "split-kv-decode": decode attention split over workers by a planner that runs on the host.

A kernel with one worker for each request leaves a GPU idle where few requests are long. So a planner cuts the keys and
values of the requests into pieces of one size, as small as a fixed number of workers allows, and the partial results
are merged. How many pieces there are and where they lie depends on the lengths, and the host decides it anew at every
step: captured as it stands, the prep would keep the pieces of the step it was captured with, and later steps would
read a part of their context only. Here ``plan`` hands its numbers in as slots, and only what reads them is captured.

Source: the work split of FlashInfer's batch decode (a binary search for the smallest piece, in whole pages).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch

from graphglue.core.batch import Batch, Mode
from graphglue.core.buckets import Bucket
from graphglue.core.contract import PrepContract
from graphglue.core.slots import REPEAT_LAST, Slot
from graphglue.errors import BindError, ContractError
from graphglue.preps import rows

if TYPE_CHECKING:
    from graphglue.registry import Plan, Prep, Registry

NAME = "split-kv-decode"
NUM_WORKERS = 64
CONTRACT = PrepContract(
    name=NAME,
    reads={
        "req_pool_indices": rows.SINK,
        "piece_request": 0,
        "piece_begin": 0,
        "piece_end": 0,
        "piece_indptr": REPEAT_LAST,
    },
    tables=("req_to_token",),
    outputs={
        "piece_request": "fixed",
        "piece_lengths": "fixed",
        "piece_locations": "fixed",
        "piece_indptr": "offset",
    },
    modes={Mode.DECODE},
)


class Pieces(NamedTuple):
    """How the context of a step is cut.

    Attributes:
        size: positions of a whole piece.
        request: [workers] int64; the request of each piece. Spare workers have none.
        begin: [workers] int64; the first position of each piece.
        end: [workers] int64; the position behind its last.
        indptr: [requests + 1] int32; the pieces of each request.
    """

    size: int
    request: np.ndarray
    begin: np.ndarray
    end: np.ndarray
    indptr: np.ndarray


def slots(num_workers: int = NUM_WORKERS) -> list[Slot]:
    """List the slots that plan and prep use; a decode forward has others beside them.

    Slots:
        seq_lens: [requests] int64, pad 1; in host memory, for the planner. Pad requests get no piece.
        req_pool_indices: [requests] int64, pad 0; each request's row of ``req_to_token``.
        piece_request, piece_begin, piece_end: [workers] int64, from the planner.
        piece_indptr: [requests + 1] int32, pad REPEAT_LAST, from the planner.
    """
    planned = ("piece_request", "piece_begin", "piece_end")
    return [
        *(slot for slot in rows.slots() if slot.name in ("seq_lens", "req_pool_indices")),
        *(Slot(name, axis="fixed", inner=(num_workers,), dtype=torch.int64, pad=0) for name in planned),
        Slot("piece_indptr", axis="offset", dtype=torch.int32, pad=REPEAT_LAST),
    ]


def cut(seq_lens: Sequence[int] | np.ndarray, num_workers: int, page_size: int) -> Pieces:
    """Cut requests into the smallest pieces of whole pages that the workers are enough for. Pure; on the host.

    Args:
        seq_lens: positions of each request.
        num_workers: pieces at most.
        page_size: a piece has a multiple of it.

    Raises:
        ContractError: more requests than workers.
    """
    lengths = np.asarray(seq_lens, dtype=np.int64)
    if len(lengths) > num_workers:
        raise ContractError(
            f"{NAME} has {num_workers} workers for {len(lengths)} requests, and each needs one; build prep and slots "
            "with num_workers of at least the largest size of the ladder"
        )
    low, high = 1, max(1, -(-int(lengths.max(initial=1)) // page_size))
    while low < high:
        middle = (low + high) // 2
        fits = int((-(-lengths // (middle * page_size))).sum()) <= num_workers
        low, high = (low, middle) if fits else (middle + 1, high)
    size = low * page_size
    indptr = np.concatenate([[0], np.cumsum(-(-lengths // size))]).astype(np.int32)
    request = np.repeat(np.arange(len(lengths)), np.diff(indptr))
    begin = (np.arange(len(request)) - indptr[request]) * size
    end = np.minimum(begin + size, lengths[request])
    spare = (0, num_workers - len(request))
    return Pieces(size, np.pad(request, spare), np.pad(begin, spare), np.pad(end, spare), indptr)


def make_plan(num_workers: int = NUM_WORKERS, page_size: int = 16) -> Plan:
    """Make the host planner.

    Args:
        num_workers: pieces at most.
        page_size: a piece has a multiple of it.

    Raises:
        ContractError: a number below 1; or, from the plan, more requests than workers.
        BindError: from the plan, lengths that are not in host memory.
    """
    if num_workers < 1 or page_size < 1:
        raise ContractError(f"{NAME}: num_workers is {num_workers} and page_size {page_size}, expected at least 1")

    def plan(batch: Batch, bucket: Bucket) -> Mapping[str, Any]:
        """Give the pieces of a step as slots. An IDLE step has none. Sync: none."""
        if not batch.num_requests:
            return {}
        pieces = cut(_on_host(batch.sources.get("seq_lens")), num_workers, page_size)
        return {
            "piece_request": pieces.request,
            "piece_begin": pieces.begin,
            "piece_end": pieces.end,
            "piece_indptr": pieces.indptr,
        }

    return plan


def _on_host(lengths: Any) -> np.ndarray:
    if lengths is None or (isinstance(lengths, torch.Tensor) and lengths.device.type != "cpu"):
        seen = "missing" if lengths is None else f"on {lengths.device}"
        raise BindError(
            f"slot 'seq_lens' is {seen}, and the planner of {NAME} reads it on the host; hand in a list, a numpy array "
            "or a CPU tensor"
        )
    return np.asarray(lengths)


def make() -> Prep:
    """Make the prep: the part that is captured."""

    def split_kv(view: Any) -> dict[str, torch.Tensor]:
        """Look the pieces of one step up.

        Slots: those of ``slots()`` but seq_lens. Tables: req_to_token [requests, max_context].

        Returns:
            piece_request: [workers] int64, the request of each piece.
            piece_lengths: [workers] int64, its positions; 0 for a spare worker.
            piece_locations: [workers, max_context] int64, their KV locations, then -1.
            piece_indptr: [requests + 1] int32, the pieces of each request.

        Sync: none. Capturable: yes.
        """
        table, lengths = view.tables.req_to_token, view.piece_end - view.piece_begin
        columns = torch.arange(table.shape[1], device=lengths.device)
        inside = columns < lengths[:, None]
        positions = torch.where(inside, view.piece_begin[:, None] + columns, 0)
        found = table[view.req_pool_indices[view.piece_request][:, None], positions]
        return {
            "piece_request": view.piece_request.clone(),
            "piece_lengths": lengths,
            "piece_locations": torch.where(inside, found, -1).to(torch.int64),
            "piece_indptr": view.piece_indptr.clone(),
        }

    return split_kv


def attend(
    queries: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, metadata: Mapping[str, torch.Tensor]
) -> torch.Tensor:
    """Attend piece by piece, and merge the pieces of each request.

    Args:
        queries: [requests, K, G, D]; one row for each request.
        keys: [locations, K, D], the whole cache.
        values: [locations, K, D], the whole cache.
        metadata: of the prep.

    Returns:
        The mixed values, [requests, K, G, D]; 0 for a request without pieces.

    Sync: none. Capturable: yes. The sums run in a fixed order, so equal inputs give equal bits.
    """
    locations, lengths = metadata["piece_locations"], metadata["piece_lengths"]
    hidden = (locations < 0)[:, None, None, :]
    seen = locations.clamp(min=0)
    scores = torch.einsum("wkgd,wckd->wkgc", queries[metadata["piece_request"]], keys[seen]) * queries.shape[-1] ** -0.5
    # 0 for a spare worker: its scores are all hidden, and infinity less infinity is no number.
    peaks = torch.where((lengths > 0)[:, None, None], scores.masked_fill(hidden, float("-inf")).amax(-1), 0.0)
    weights = torch.exp((scores - peaks[..., None]).masked_fill(hidden, float("-inf")))
    mixed = torch.einsum("wkgc,wckd->wkgd", weights, values[seen])
    return _merged(mixed, weights.sum(-1), peaks, metadata["piece_indptr"])


def _merged(mixed: torch.Tensor, sums: torch.Tensor, peaks: torch.Tensor, indptr: torch.Tensor) -> torch.Tensor:
    """Merge partial results [workers, K, G, ...] into those of requests, by the rule of log-sum-exp."""
    pieces = torch.arange(mixed.shape[0], device=indptr.device)
    own = ((pieces >= indptr[:-1, None]) & (pieces < indptr[1:, None]))[:, :, None, None]
    per_request = torch.where(own, peaks, float("-inf"))
    highest = per_request.amax(1, keepdim=True)
    shares = torch.exp(per_request - torch.where(highest.isinf(), 0.0, highest))
    total = torch.einsum("rwkg,wkg->rkg", shares, sums)[..., None]
    return torch.where(total > 0, torch.einsum("rwkg,wkgd->rkgd", shares, mixed) / total.clamp(min=1e-30), 0.0)


def register(registry: Registry, num_workers: int = NUM_WORKERS, page_size: int = 16) -> Callable[[Any], Any]:
    """Register the prep under its name, with its planner, and return it.

    Args:
        registry: where to register.
        num_workers: pieces at most; the slots need the same number.
        page_size: a piece has a multiple of it.
    """
    return registry.register(CONTRACT, plan=make_plan(num_workers, page_size))(make())


def reference(
    seq_lens: Sequence[int],
    req_pool_indices: Sequence[int],
    req_to_token: Sequence[Sequence[int]],
    num_workers: int,
    page_size: int,
) -> dict[str, list[Any]]:
    """Compute plan and metadata with plain loops, for tests to compare with; requests are the real ones."""
    size = page_size
    while sum(-(-length // size) for length in seq_lens) > num_workers:
        size += page_size
    found: dict[str, list[Any]] = {"piece_request": [], "piece_lengths": [], "piece_locations": [], "piece_indptr": [0]}
    for number, (length, row) in enumerate(zip(seq_lens, req_pool_indices, strict=True)):
        for begin in range(0, length, size):
            locations = list(req_to_token[row][begin : min(begin + size, length)])
            found["piece_request"].append(number)
            found["piece_lengths"].append(len(locations))
            found["piece_locations"].append(locations + [-1] * (len(req_to_token[row]) - len(locations)))
        found["piece_indptr"].append(len(found["piece_request"]))
    while len(found["piece_request"]) < num_workers:
        found["piece_request"].append(0)
        found["piece_lengths"].append(0)
        found["piece_locations"].append([-1] * len(req_to_token[0]))
    return found
