"""Query rows of the DSV4-like preps: which request each row belongs to, and how many positions it may see.

A row rule takes a view and gives ``Rows``. It reads slots alone, in shapes that are fixed for a key, so it can be
captured. Row 0 of ``req_to_token`` and KV location 0 are the sink: pad rows read the one and write the other, so
the engine gives neither to a request.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch

from graphglue.core.batch import Mode
from graphglue.core.slots import REPEAT_LAST, Slot
from graphglue.errors import ContractError

SINK = 0
PADS: dict[str, Any] = {"seq_lens": 1, "req_pool_indices": SINK, "out_cache_loc": SINK}
RAGGED_PADS: dict[str, Any] = {**PADS, "qo_indptr": REPEAT_LAST}


class Rows(NamedTuple):
    """The query rows of a step.

    Attributes:
        requests: [rows] int64; each row's row of ``req_to_token``.
        lengths: [rows] int32; the positions each row may see, its own included.
    """

    requests: torch.Tensor
    lengths: torch.Tensor


def slots(max_seq_len: int | None = None) -> list[Slot]:
    """List the slots of a step whose requests have one width.

    Args:
        max_seq_len: the largest length the engine hands in, which audits keep to: in verify and draft steps that of
            a prefix, so that the block behind it still fits into a row of ``req_to_token``.

    Slots:
        seq_lens: [requests] int64, pad 1; in decode and draft extend the new tokens included, in verify and draft not.
        req_pool_indices: [requests] int64, pad 0; each request's row of ``req_to_token``.
        out_cache_loc: [tokens] int64, pad 0; the KV location each new token is written to.
    """
    valid = None if max_seq_len is None else (1, max_seq_len)
    return [
        Slot("seq_lens", axis="request", dtype=torch.int64, pad=PADS["seq_lens"], valid=valid),
        Slot("req_pool_indices", axis="request", dtype=torch.int64, pad=SINK, index_of="req_to_token"),
        Slot("out_cache_loc", axis="token", dtype=torch.int64, pad=SINK, index_of="full_to_swa"),
    ]


def ragged_slots(max_seq_len: int | None = None) -> list[Slot]:
    """List the slots of a step whose requests differ in width.

    Args:
        max_seq_len: as ``slots`` takes it. An audit deals a step's tokens unevenly: up to all but one for each other
            request may stand behind one prefix.

    Slots: those of ``slots``, and
        qo_indptr: [requests + 1] int32, pad REPEAT_LAST; 0 and the running sum of each request's tokens.
    """
    return [*slots(max_seq_len), Slot("qo_indptr", axis="offset", dtype=torch.int32, pad=REPEAT_LAST)]


def width_of(view: Any, name: str) -> int:
    """Give the tokens that every request of the view has. A number of the key, so a captured prep may bake it.

    Raises:
        ContractError: the requests differ.
    """
    if not view.bucket.row_tokens:
        raise ContractError(
            f"{name} takes requests of one width, and the step has {view.bucket}, whose row_tokens is 0: the requests "
            "differ; use dsv4-ragged-verify for a verify step, or give all requests the width of the widest"
        )
    return int(view.bucket.row_tokens)


def decode_rows(view: Any) -> Rows:
    """Give one row for each request, which sees all of it.

    Raises:
        ContractError: more than one token for each request.

    Sync: none. Capturable: yes.
    """
    if (width := width_of(view, "dsv4-decode")) != 1:
        raise ContractError(f"dsv4-decode takes one token per request, and the step has {width}; use dsv4-verify")
    return Rows(view.req_pool_indices, view.seq_lens.to(torch.int32))


def block_rows(view: Any) -> Rows:
    """Give the rows of a block behind each request's prefix: row j sees the prefix and 1 + j tokens.

    Sync: none. Capturable: yes.
    """
    return _uniform(view, first=1, name="dsv4-verify and dsv4-draft")


def extend_rows(view: Any) -> Rows:
    """Give the rows of tokens that the length includes: row j of w sees ``seq_lens - w + 1 + j``, at least 1.

    Pad rows have length 1, so all but their last would see nothing or less.

    Sync: none. Capturable: yes.
    """
    name = "dsv4-draft-extend"
    requests, lengths = _uniform(view, first=1 - width_of(view, name), name=name)
    return Rows(requests, lengths.clamp(min=1))


def target_rows(view: Any) -> Rows:
    """Give the rows of a target step: in mode DECODE the length includes the new tokens, in VERIFY it does not.

    Sync: none. Capturable: yes.
    """
    return extend_rows(view) if view.mode is Mode.DECODE else block_rows(view)


def ragged_rows(view: Any) -> Rows:
    """Give the rows of blocks of different widths; rows beyond the last block see one position.

    Those belong to the last request of the bucket, where nothing is written and a read is in range.

    Sync: none. Capturable: yes.
    """
    offsets, requests = view.qo_indptr, view.req_pool_indices
    tokens = torch.arange(view.out_cache_loc.shape[0], dtype=offsets.dtype, device=offsets.device)
    # Ends, not starts: pad requests are empty and end where the last real one does.
    owner = torch.searchsorted(offsets[1:], tokens, right=True).clamp(max=requests.shape[0] - 1)
    lengths = torch.where(tokens < offsets[-1], view.seq_lens[owner] + 1 + tokens - offsets[owner], 1)
    return Rows(requests[owner], lengths.to(torch.int32))


def _uniform(view: Any, first: int, name: str) -> Rows:
    """Give ``width`` rows for each request, of lengths ``seq_lens + first + j``."""
    width, seq_lens, requests = width_of(view, name), view.seq_lens, view.req_pool_indices
    lengths = seq_lens[:, None] + torch.arange(first, first + width, device=seq_lens.device)
    return Rows(requests[:, None].expand(-1, width).reshape(-1), lengths.reshape(-1).to(torch.int32))
