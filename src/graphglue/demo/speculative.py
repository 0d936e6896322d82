"""A small target and a smaller draft for speculative decoding, with the metadata of the "dsv4" preps.

The target's first layer sees a request's whole context through pages, its second one a sliding window. The draft has
one layer over a window, and writes a block at once: its rows see the window and the whole block. Weights are random,
but both models share embedding and head, and the head prefers one successor for each token, as a trained model would;
the layers turn it down often enough that drafts are taken in part.

Legend: N rows of a step, B requests, C max_context, K key/value heads, G query heads per key/value head, D head_dim.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from graphglue.demo.model import KVCache, ModelShape, Transformer

Metadata = Mapping[str, Tensor]
# How much of the head is the preferred successor; the layers answer for the rest. Chosen so that drafts are taken
# in part: at 0 hardly any token is, at 8 nearly all are.
PREFERENCE = 3.0


def build(
    shape: ModelShape, seed: int, dtype: torch.dtype, device: torch.device | str
) -> tuple[Transformer, Transformer]:
    """Draw a target of two layers, and a draft of one over the target's embedding and head."""
    target = Transformer(shape, seed=seed, dtype=dtype, device=device)
    one_layer = ModelShape(**{**vars(shape), "num_layers": 1})
    draft = Transformer(one_layer, seed=seed + 1, dtype=dtype, device=device)
    before = torch.empty(shape.vocab, dtype=torch.int64, device=device)
    before[successors(shape.vocab, 1, device)[1]] = torch.arange(shape.vocab, device=device)
    preferred = target.embedding[before].T / shape.hidden
    target.head = draft.head = (target.head + PREFERENCE * shape.hidden**0.5 * preferred).contiguous()
    draft.embedding = target.embedding
    return target, draft


def successors(vocab: int, depth: int, device: torch.device | str) -> Tensor:
    """Give the tokens that are preferred behind each token, [depth + 1, vocab]; row j is j tokens on."""
    tokens = torch.arange(vocab, device=device)
    rows = [tokens]
    for _ in range(depth):
        rows.append((rows[-1] * 5 + 7) % vocab)
    return torch.stack(rows)


@dataclass(frozen=True)
class PagedCache(KVCache):
    """The keys and values of a layer that sees the whole context.

    Args:
        page_size: tokens of a page.
    """

    page_size: int

    def attend(self, queries: Tensor, keys: Tensor, values: Tensor, view: Any, metadata: Metadata) -> Tensor:
        """Write N rows, and let each see its request up to itself. Sync: none. Capturable: yes."""
        self.write(metadata["raw_out_loc"].long(), keys, values)
        all_keys, all_values = self.gather(metadata["page_table"], self.page_size)
        columns = torch.arange(all_keys.shape[1], device=keys.device)
        return mix(queries, all_keys, all_values, columns <= metadata["positions_casual"][:, None])


@dataclass(frozen=True)
class WindowCache(KVCache):
    """The keys and values of a layer that sees a window, at locations of a smaller pool."""

    def attend(self, queries: Tensor, keys: Tensor, values: Tensor, view: Any, metadata: Metadata) -> Tensor:
        """Write N rows, and let each see what its indices name, in any order. Sync: none. Capturable: yes."""
        self.write(view.tables.full_to_swa[metadata["raw_out_loc"].long()], keys, values)
        seen = metadata["swa_page_indices"].long().clamp(min=0)
        columns = torch.arange(seen.shape[1], device=keys.device)
        return mix(queries, self.keys[seen], self.values[seen], columns < metadata["swa_topk_lengths"][:, None])


def mix(queries: Tensor, keys: Tensor, values: Tensor, visible: Tensor) -> Tensor:
    """Attend: queries [N, K, G, D] over keys and values [N, columns, K, D] where ``visible`` [N, columns] says so."""
    scores = torch.einsum("nkgd,nckd->nkgc", queries, keys) * queries.shape[-1] ** -0.5
    # A hidden column gets a weight of exactly 0, so what stale locations hold changes no bit.
    weights = torch.softmax(scores.masked_fill(~visible[:, None, None, :], float("-inf")), dim=-1)
    return torch.einsum("nkgc,nckd->nkgd", weights, values)


def new_cache(model: Transformer, kind: type[KVCache], num_locations: int, **more: Any) -> Any:
    """Make one layer's zeroed cache."""
    rows = (num_locations, model.shape.num_kv_heads, model.shape.head_dim)
    keys, values = (torch.zeros(rows, dtype=model.dtype, device=model.device) for _ in range(2))
    return kind(keys, values, **more)


def hidden(model: Transformer, caches: list[Any], tokens: Tensor, view: Any, metadata: Metadata) -> Tensor:
    """Run a model's layers over N tokens, [N, hidden]. Sync: none. Capturable: yes.

    Tokens of a block behind the longest context are never taken; they get its last position.
    """
    return model.hidden(
        caches,
        tokens,
        metadata["positions_casual"].long().clamp(max=model.shape.max_context - 1),
        lambda cache, *rows: cache.attend(*rows, view, metadata),
    )


def verify(model: Transformer, caches: list[Any], view: Any, metadata: Metadata) -> dict[str, Tensor]:
    """Say what follows each token of each block.

    Slots: known [N] int64, -1 where a token of proposed [B, width - 1] int64 stands.

    Returns:
        block: [N] int64, the tokens that were read.
        next_token: [N] int64, the most likely token behind each.
        logits: [N, vocab].

    Sync: none. Capturable: yes.
    """
    proposed = torch.nn.functional.pad(view.proposed, (1, 0)).flatten()
    block = torch.where(view.known < 0, proposed, view.known)
    logits = hidden(model, caches, block, view, metadata) @ model.head
    return {"block": block, "next_token": logits.argmax(dim=-1), "logits": logits}


def draft(model: Transformer, caches: list[Any], preferred: Tensor, view: Any, metadata: Metadata) -> dict[str, Tensor]:
    """Propose a block behind each request's last token: next_token [N] int64, logits [N, vocab].

    The block starts as the chain of ``preferred`` successors, [width + 1, vocab], and all of it is corrected at once.

    Slots: last_token [B] int64.

    Sync: none. Capturable: yes.
    """
    tokens = preferred[: view.bucket.row_tokens, view.last_token].T.flatten()
    logits = hidden(model, caches, tokens, view, metadata) @ model.head
    return {"next_token": logits.argmax(dim=-1), "logits": logits}


def extend(model: Transformer, caches: list[Any], view: Any, metadata: Metadata) -> dict[str, Tensor]:
    """Write the draft's keys and values of tokens that were taken; gives hidden [N, hidden]. Sync: none."""
    return {"hidden": hidden(model, caches, view.input_ids, view, metadata)}


def enter_window(ring: int, view: Any, metadata: Metadata) -> dict[str, Tensor]:
    """Give the locations of a step's new tokens places in the window's pool: a ring of ``ring`` for each request.

    Returns:
        out_cache_loc: [N] int64, the locations that the prep "kv-page-top-up" found.

    Sync: none. Capturable: yes.
    """
    locations, width = metadata["out_cache_loc"], view.bucket.row_tokens
    positions = view.seq_lens[:, None] + torch.arange(width, device=locations.device)
    places = (view.req_pool_indices[:, None] * ring + positions % ring).flatten()
    # All that is written to the sink gets one place, so that no order of writes shows.
    view.tables.full_to_swa[locations] = torch.where(locations == 0, 0, places)
    return {"out_cache_loc": locations.clone()}


@dataclass
class _Seen:
    """One layer's keys and values of a single sequence, of the last ``window`` positions if there is one."""

    window: int | None = None
    keys: list[Tensor] = field(default_factory=list)
    values: list[Tensor] = field(default_factory=list)

    def attend(self, queries: Tensor, keys: Tensor, values: Tensor) -> Tensor:
        self.keys, self.values = [*self.keys, keys], [*self.values, values]
        if self.window is not None:
            self.keys, self.values = self.keys[-self.window :], self.values[-self.window :]
        all_keys, all_values = torch.cat(self.keys)[None], torch.cat(self.values)[None]
        return mix(queries, all_keys, all_values, torch.ones(1, len(self.keys), dtype=torch.bool, device=keys.device))


def plain_greedy(model: Transformer, prompt: list[int], num_wanted: int, window: int) -> list[int]:
    """Decode one token at a time, with nothing drafted, padded, paged or captured: what all else must agree with.

    Sync: the device, each token.
    """
    caches: Any = [_Seen(), _Seen(window)]
    tokens, generated = list(prompt), []
    for position in range(len(prompt) + num_wanted - 1):
        last = model.hidden(
            caches,
            torch.tensor([tokens[position]], device=model.device),
            torch.tensor([position], device=model.device),
            lambda cache, *rows: cache.attend(*rows),
        )
        if position >= len(prompt) - 1:
            generated.append(int((last @ model.head)[0].argmax()))
            tokens.append(generated[-1])
    return generated
