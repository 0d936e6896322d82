"""A small decoder-only transformer over a paged KV cache: what the demo serves.

RMSNorm, rotary positions, grouped-query attention, SwiGLU; byte tokens; seeded random weights. The
decode forward is written as an engine's is: fixed shapes, nothing read on the host, keys and values
found through the page table; ``prefill`` has the forward that reads packed prompts. Legend of the shape comments:

    N rows of a decode step, T prompt tokens, C max_context, P page_size,
    H query heads, K key/value heads, G = H / K query heads per key/value head, D head_dim.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

# (cache, queries, keys, values) -> the values, mixed by attention
Attend = Callable[["KVCache", Tensor, Tensor, Tensor], Tensor]
NORM_EPS = 1e-6
ROTARY_BASE = 10_000.0


@dataclass(frozen=True)
class ModelShape:
    """The model's sizes; tokens unless said otherwise."""

    num_layers: int = 2
    hidden: int = 64
    num_heads: int = 4
    num_kv_heads: int = 2
    head_dim: int = 16
    ffn: int = 128
    vocab: int = 256
    max_context: int = 256
    page_size: int = 16


@dataclass(frozen=True)
class Layer:
    """The weights of one layer, each [in, out]; the norms are [hidden]."""

    attention_norm: Tensor
    query: Tensor
    key: Tensor
    value: Tensor
    output: Tensor
    ffn_norm: Tensor
    gate: Tensor
    up: Tensor
    down: Tensor


@dataclass(frozen=True)
class KVCache:
    """Keys and values of one layer, [num_pages * P, K, D] each, addressed by KV location."""

    keys: Tensor
    values: Tensor

    def write(self, locations: Tensor, keys: Tensor, values: Tensor) -> None:
        """Store one row per location; pad rows all store the same at location 0."""
        self.keys[locations] = keys
        self.values[locations] = values

    def gather(self, page_table: Tensor, page_size: int) -> tuple[Tensor, Tensor]:
        """Read each row's whole context, [N, C, K, D] twice, through ``page_table`` [N, C / P]."""
        pages = page_table.to(torch.int64)
        keys = self.keys.unflatten(0, (-1, page_size))[pages]
        values = self.values.unflatten(0, (-1, page_size))[pages]
        return keys.flatten(1, 2), values.flatten(1, 2)


class Transformer:
    """Hold the weights; the caches are passed in, so that several engines can share one model.

    Args:
        shape: the sizes.
        seed: seeds the weights, which are drawn on the CPU and so the same on every device.
        dtype: of weights, caches and logits.
        device: where everything lives.
    """

    def __init__(
        self, shape: ModelShape, *, seed: int = 0, dtype: torch.dtype, device: torch.device | str = "cpu"
    ) -> None:
        self.shape = shape
        self.dtype = dtype
        self.device = torch.device(device)
        draw = _Draw(seed, dtype, self.device)
        # Embeddings of norm sqrt(hidden), so that tokens differ and greedy decoding wanders.
        self.embedding = draw(shape.vocab, shape.hidden, scale=1.0)
        self.layers = [_draw_layer(shape, draw) for _ in range(shape.num_layers)]
        self.final_norm = draw.ones(shape.hidden)
        self.head = draw(shape.hidden, shape.vocab)
        self.cos, self.sin = (table.to(self.device, dtype) for table in _rotary_tables(shape))
        self.context = torch.arange(shape.max_context, device=self.device)

    def new_caches(self, num_pages: int) -> list[KVCache]:
        """Make zeroed caches of ``num_pages`` pages, one per layer; page 0 is the sink of pad rows."""
        rows = (num_pages * self.shape.page_size, self.shape.num_kv_heads, self.shape.head_dim)

        def zeros() -> Tensor:
            return torch.zeros(rows, dtype=self.dtype, device=self.device)

        return [KVCache(zeros(), zeros()) for _ in self.layers]

    def decode(self, caches: list[KVCache], view: Any, metadata: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Decode one token per row, writing its keys and values on the way.

        Args:
            caches: one per layer, written at the write locations.
            view: has input_ids [N] int64.
            metadata: of the prep "paged-decode"; positions [N] int64, write_locations [N] int64 and
                page_table [N, C / P] int32 are read.

        Returns:
            next_token: [N] int64, the most likely token.
            logits: [N, vocab] of the model's dtype.

        Sync: none. Capturable: yes.
        """
        positions = metadata["positions"]
        visible = self.context <= positions[:, None]  # [N, C]

        def attend(cache: KVCache, queries: Tensor, keys: Tensor, values: Tensor) -> Tensor:
            cache.write(metadata["write_locations"], keys, values)
            all_keys, all_values = cache.gather(metadata["page_table"], self.shape.page_size)
            scores = torch.einsum("nkgd,nckd->nkgc", queries, all_keys) * self.shape.head_dim**-0.5
            weights = _masked_softmax(scores, visible[:, None, None, :])
            return torch.einsum("nkgc,nckd->nkgd", weights, all_values)

        logits = self.hidden(caches, view.input_ids, positions, attend) @ self.head
        return {"next_token": logits.argmax(dim=-1), "logits": logits}

    def prefill(self, caches: list[KVCache], tokens: Tensor, locations: Tensor) -> Tensor:
        """Read one prompt from its start, write its keys and values, and give the first new token.

        Args:
            caches: one per layer, written at ``locations``.
            tokens: [T] int64, the prompt.
            locations: [T] int64, the KV location of each position.

        Returns:
            A 0-dim int64 tensor.

        Sync: none. Capturable: no, T differs from prompt to prompt.
        """

        def attend(cache: KVCache, queries: Tensor, keys: Tensor, values: Tensor) -> Tensor:
            cache.write(locations, keys, values)
            return causal_attention(queries, keys, values)

        hidden = self.hidden(caches, tokens, self.context[: tokens.shape[0]], attend)
        return (hidden @ self.head)[-1].argmax(dim=-1)

    def hidden(self, caches: list[KVCache], tokens: Tensor, positions: Tensor, attend: Attend) -> Tensor:
        """Run the layers; ``attend`` is what differs between decode and prefill.

        Args:
            caches: one per layer, handed to ``attend``.
            tokens: [rows] int64.
            positions: [rows] int64, in each token's own sequence.
            attend: called in each layer.

        Returns:
            The normed rows, [rows, hidden]; times ``head`` they are logits.

        Sync, Capturable: as ``attend``.
        """
        hidden = self.embedding[tokens]
        turn = (self.cos[positions], self.sin[positions])  # [rows, D / 2] each
        heads = (self.shape.num_kv_heads, -1, self.shape.head_dim)
        for layer, cache in zip(self.layers, caches, strict=True):
            normed = _rms_norm(hidden, layer.attention_norm)
            queries = _rotate((normed @ layer.query).unflatten(-1, heads), *turn)  # [rows, K, G, D]
            keys = _rotate((normed @ layer.key).unflatten(-1, heads), *turn).squeeze(2)  # [rows, K, D]
            values = (normed @ layer.value).unflatten(-1, heads).squeeze(2)
            hidden = hidden + attend(cache, queries, keys, values).flatten(1) @ layer.output
            normed = _rms_norm(hidden, layer.ffn_norm)
            hidden = hidden + (functional.silu(normed @ layer.gate) * (normed @ layer.up)) @ layer.down
        return _rms_norm(hidden, self.final_norm)


def causal_attention(queries: Tensor, keys: Tensor, values: Tensor, prefix: int = 0) -> Tensor:
    """Let each row of one sequence see the sequence up to itself.

    Args:
        queries: [T, K, G, D], the rows behind the first ``prefix`` ones.
        keys, values: [prefix + T, K, D].
        prefix: tokens in front of the queries.

    Returns:
        The mixed values, [T, K, G, D].

    Sync: none.
    """
    columns = torch.arange(keys.shape[0], device=keys.device)
    visible = columns <= columns[prefix:, None]  # [T, prefix + T]
    scores = torch.einsum("tkgd,ckd->tkgc", queries, keys) * queries.shape[-1] ** -0.5
    weights = _masked_softmax(scores, visible[:, None, None, :])
    return torch.einsum("tkgc,ckd->tkgd", weights, values)


def _rms_norm(hidden: Tensor, weight: Tensor) -> Tensor:
    return hidden * torch.rsqrt(hidden.square().mean(dim=-1, keepdim=True) + NORM_EPS) * weight


def _rotate(heads: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Turn heads [rows, K, G, D] by their positions' angles; halves are paired, as in Llama."""
    low, high = heads.chunk(2, dim=-1)
    cos, sin = cos[:, None, None, :], sin[:, None, None, :]
    return torch.cat((low * cos - high * sin, high * cos + low * sin), dim=-1)


def _masked_softmax(scores: Tensor, visible: Tensor) -> Tensor:
    # A hidden position gets a weight of exactly 0, so what stale pages hold there changes no bit.
    return torch.softmax(scores.masked_fill(~visible, float("-inf")), dim=-1)


def _rotary_tables(shape: ModelShape) -> tuple[Tensor, Tensor]:
    exponents = torch.arange(0, shape.head_dim, 2, dtype=torch.float64) / shape.head_dim
    angles = torch.outer(torch.arange(shape.max_context, dtype=torch.float64), ROTARY_BASE**-exponents)
    return angles.cos(), angles.sin()


class _Draw:
    """Draw weights on the CPU from one seeded generator, then move them."""

    def __init__(self, seed: int, dtype: torch.dtype, device: torch.device) -> None:
        self._generator = torch.Generator().manual_seed(seed)
        self._to: dict[str, Any] = {"device": device, "dtype": dtype}

    def __call__(self, num_in: int, num_out: int, scale: float | None = None) -> Tensor:
        weights = torch.randn(num_in, num_out, generator=self._generator, dtype=torch.float64)
        return (weights * (num_in**-0.5 if scale is None else scale)).to(**self._to)

    def ones(self, num: int) -> Tensor:
        return torch.ones(num, **self._to)


def _draw_layer(shape: ModelShape, draw: _Draw) -> Layer:
    width, kv_width = shape.num_heads * shape.head_dim, shape.num_kv_heads * shape.head_dim
    return Layer(
        attention_norm=draw.ones(shape.hidden),
        query=draw(shape.hidden, width),
        key=draw(shape.hidden, kv_width),
        value=draw(shape.hidden, kv_width),
        output=draw(width, shape.hidden),
        ffn_norm=draw.ones(shape.hidden),
        gate=draw(shape.hidden, shape.ffn),
        up=draw(shape.hidden, shape.ffn),
        down=draw(shape.ffn, shape.hidden),
    )
