"""Prefill of packed prompt chunks over a paged KV cache, as a forward with eager breaks.

Everything that works token by token is captured, one graph per bucket and stretch between two breaks. Attention
is not: its shapes are the requests' own lengths. It runs eagerly, sees the step's real rows only, and finds its
requests in ``view.live``. Legend of the shape comments, beside that of ``model``:

    R request rows, T token rows of the bucket; C tokens of one request so far.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from graphglue.core.batch import Mode
from graphglue.core.contract import PrepContract
from graphglue.core.slots import Slot
from graphglue.demo.model import KVCache, Transformer, causal_attention
from graphglue.graphs.marks import eager_break

Attention = Callable[[Tensor, Tensor, Tensor, KVCache, Any], Tensor]

CONTRACT = PrepContract(
    name="paged-prefill",
    reads={"extend_lens": 0, "prefix_lens": 0},
    outputs={"positions": "token", "last_rows": "request"},
    modes={Mode.EXTEND},
)
OUTPUT_AXES = {"next_token": "request", "logits": "request", "hidden": "token"}


def slots() -> list[Slot]:
    """List the slots of a prefill step.

    Slots:
        extend_lens: [requests] int64, pad 0; tokens of each request that this step reads.
        prefix_lens: [requests] int64, pad 0; tokens that earlier steps have read.
        req_pool_indices: [requests] int64, pad 0; each request's row of ``req_to_token``.
        out_cache_loc: [tokens] int64, pad 0; the KV location each token is written to.
        input_ids: [tokens] int64, pad 0.
    """
    return [
        Slot("extend_lens", axis="request", dtype=torch.int64, pad=0),
        Slot("prefix_lens", axis="request", dtype=torch.int64, pad=0),
        Slot("req_pool_indices", axis="request", dtype=torch.int64, pad=0, index_of="req_to_token"),
        Slot("out_cache_loc", axis="token", dtype=torch.int64, pad=0),
        Slot("input_ids", axis="token", dtype=torch.int64, pad=0),
    ]


def prep(view: Any) -> dict[str, Tensor]:
    """Build the metadata of one prefill step.

    Slots: ``slots()``. Tables: none.

    Returns:
        positions: [tokens] int64, each token's position in its request; 0 in padded rows.
        last_rows: [requests] int64, the row of each request's last token.

    Sync: none. Capturable: yes.
    """
    ends = torch.cumsum(view.extend_lens, dim=0)  # [R]
    rows = torch.arange(view.bucket.tokens, device=ends.device)
    request = torch.searchsorted(ends, rows, right=True)  # [T], R in padded rows
    owner = request.clamp(max=ends.shape[0] - 1)
    origin = ends - view.extend_lens - view.prefix_lens  # [R], the row that position 0 would have
    return {
        "positions": torch.where(request < ends.shape[0], rows - origin[owner], 0),
        "last_rows": (ends - 1).clamp(min=0),
    }


def attention(queries: Tensor, keys: Tensor, values: Tensor, cache: KVCache, view: Any) -> Tensor:
    """Write the real rows' keys and values, and let each row see its request up to itself.

    Args:
        queries: [real tokens, K, G, D].
        keys, values: [real tokens, K, D].
        cache: of the layer; written at ``out_cache_loc``, read through ``req_to_token``.
        view: the step's; the requests are in ``view.live``.

    Returns:
        The values, mixed by attention: [real tokens, K, G, D]. Rows of no request are 0.

    Sync: the device, for the requests' lengths. Capturable: no.
    """
    live = view.live
    cache.write(live.out_cache_loc, keys, values)
    mixed, begin = torch.zeros_like(queries), 0
    spans = torch.stack((live.req_pool_indices, live.prefix_lens, live.extend_lens), dim=1)
    for pool_row, prefix, length in spans.tolist():
        locations = view.tables.req_to_token[pool_row, : prefix + length]  # [C]
        rows = slice(begin, begin + length)
        mixed[rows] = causal_attention(queries[rows], cache.keys[locations], cache.values[locations], prefix)
        begin += length
    return mixed


attend = eager_break(row_aligned=("queries", "keys", "values"))(attention)


def attend_padded(queries: Tensor, keys: Tensor, values: Tensor, cache: KVCache, view: Any) -> Tensor:
    """Do by hand what a replay does around the break: hand over the real rows, and leave the others 0."""
    num_real = view.live.out_cache_loc.shape[0]
    mixed = attention(queries[:num_real], keys[:num_real], values[:num_real], cache, view)
    return functional.pad(mixed, (0, 0, 0, 0, 0, 0, 0, queries.shape[0] - num_real))


def forward(
    model: Transformer,
    caches: list[KVCache],
    view: Any,
    metadata: Mapping[str, Tensor],
    attend: Attention = attend,
) -> dict[str, Tensor]:
    """Read one step's chunks.

    Args:
        model: the weights.
        caches: one per layer, written at the write locations.
        view: the step's slots; ``view.live`` has the real rows.
        metadata: of the prep.
        attend: attention at the bucket's extents.

    Returns:
        hidden: [tokens, hidden], the last layer's rows, normed.
        logits: [requests, vocab], after each request's last token.
        next_token: [requests] int64, the most likely token; it counts where a prompt ends.

    Sync: as ``attend``. Capturable: in segments.
    """
    hidden = model.hidden(
        caches,
        view.input_ids,
        metadata["positions"],
        lambda cache, queries, keys, values: attend(queries, keys, values, cache, view),
    )
    logits = hidden[metadata["last_rows"]] @ model.head
    return {"next_token": logits.argmax(dim=-1), "logits": logits, "hidden": hidden}
