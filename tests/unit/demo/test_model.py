"""The demo's model: paged decode against a dense recomputation of the whole sequence."""

from __future__ import annotations

from collections.abc import Sequence
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor

from graphglue.demo.model import KVCache, ModelShape, Transformer
from graphglue.preps import paged_decode

SHAPE = ModelShape(max_context=64, page_size=8)
PAGES = {1: (5, 2, 9, 7, 11, 14, 13, 12), 2: (3, 1, 4, 8, 6, 10, 15, 16)}  # pool row -> pages in order
NUM_PAGES = 17
Row = tuple[int, int, int]  # pool row, length, token


@pytest.fixture
def model() -> Transformer:
    return Transformer(SHAPE, seed=1, dtype=torch.float64)


def req_to_token() -> Tensor:
    """Build the table of both rows; row 0 is the sink."""
    table = torch.zeros(3, SHAPE.max_context, dtype=torch.int64)
    for row, pages in PAGES.items():
        first = torch.tensor(pages)[:, None] * SHAPE.page_size
        table[row] = (first + torch.arange(SHAPE.page_size)).flatten()
    return table


def decode(model: Transformer, caches: list[KVCache], rows: Sequence[Row]) -> dict[str, Tensor]:
    """Decode one token per row."""
    table = req_to_token()
    view = SimpleNamespace(
        seq_lens=torch.tensor([length for _, length, _ in rows]),
        req_pool_indices=torch.tensor([row for row, _, _ in rows]),
        out_cache_loc=torch.tensor([int(table[row, length - 1]) for row, length, _ in rows]),
        input_ids=torch.tensor([token for _, _, token in rows]),
        tables=SimpleNamespace(req_to_token=table),
    )
    return model.decode(caches, view, paged_decode.make(SHAPE.page_size)(view))


def dense_logits(model: Transformer, tokens: Sequence[int]) -> Tensor:
    """Compute the last logits with plain full attention and loops over heads; no cache, no pages."""
    shape = model.shape
    positions = torch.arange(len(tokens))
    frequencies = 10_000.0 ** -(torch.arange(0, shape.head_dim, 2, dtype=torch.float64) / shape.head_dim)
    turn = torch.polar(torch.ones(1, dtype=torch.float64), positions[:, None] * frequencies)
    half = shape.head_dim // 2

    def norm(hidden: Tensor) -> Tensor:
        return hidden / (hidden.pow(2).mean(-1, keepdim=True) + 1e-6).sqrt()

    def rotated(head: Tensor) -> Tensor:
        turned = torch.complex(head[:, :half], head[:, half:]) * turn
        return torch.cat((turned.real, turned.imag), dim=-1)

    hidden = model.embedding[list(tokens)]
    for layer in model.layers:
        normed, heads = norm(hidden), []
        for index in range(shape.num_heads):
            kv_index = index // (shape.num_heads // shape.num_kv_heads)
            mine = slice(index * shape.head_dim, (index + 1) * shape.head_dim)
            shared = slice(kv_index * shape.head_dim, (kv_index + 1) * shape.head_dim)
            scores = rotated(normed @ layer.query[:, mine]) @ rotated(normed @ layer.key[:, shared]).T
            scores = scores / shape.head_dim**0.5
            scores = scores + torch.full_like(scores, float("-inf")).triu(1)
            heads.append(scores.softmax(-1) @ (normed @ layer.value[:, shared]))
        hidden = hidden + torch.cat(heads, dim=-1) @ layer.output
        normed = norm(hidden)
        gate = normed @ layer.gate
        hidden = hidden + (gate * torch.sigmoid(gate) * (normed @ layer.up)) @ layer.down
    return norm(hidden[-1]) @ model.head


def test_paged_decode_equals_dense_recomputation(model: Transformer) -> None:
    """Two requests of different lengths decode together over page boundaries."""
    caches, table = model.new_caches(NUM_PAGES), req_to_token()
    sequences = {1: list(range(40, 53)), 2: [200, 7, 7]}
    for row, tokens in sequences.items():
        first = model.prefill(caches, torch.tensor(tokens), table[row, : len(tokens)])
        assert int(first) == int(dense_logits(model, tokens).argmax())
        tokens.append(int(first))
    for _ in range(20):
        outputs = decode(model, caches, [(row, len(tokens), tokens[-1]) for row, tokens in sequences.items()])
        for position, tokens in enumerate(sequences.values()):
            expected = dense_logits(model, tokens)
            torch.testing.assert_close(outputs["logits"][position], expected, rtol=1e-10, atol=1e-10)
            assert int(outputs["next_token"][position]) == int(expected.argmax())
            tokens.append(int(outputs["next_token"][position]))
    assert len(set(sequences[1][13:])) > 5  # it wanders, so equal tokens mean something


def test_pad_rows_change_no_real_row(model: Transformer) -> None:
    """A row's bits depend on the padded width, and on nothing that the pad rows hold."""
    prompt, table = [9, 8, 7, 6], req_to_token()
    seen = []
    for others in ([(0, 1, 0)] * 3, [(2, 5, 77), (2, 6, 3), (2, 7, 99)]):
        caches = model.new_caches(NUM_PAGES)
        model.prefill(caches, torch.tensor(prompt), table[1, :4])
        seen.append(decode(model, caches, [(1, 5, 42), *others])["logits"][0])
    assert torch.equal(*seen)


def test_stale_pages_beyond_a_context_are_not_read(model: Transformer) -> None:
    prompt, table = [9, 8, 7, 6], req_to_token()
    seen = []
    for stale in (0.0, 1e6):
        caches = model.new_caches(NUM_PAGES)
        for cache in caches:
            cache.keys.fill_(stale)
            cache.values.fill_(stale)
        model.prefill(caches, torch.tensor(prompt), table[1, :4])
        seen.append(decode(model, caches, [(1, 5, 42)])["logits"])
    assert torch.equal(*seen)


def test_weights_follow_the_seed() -> None:
    one, same, other = (Transformer(SHAPE, seed=seed, dtype=torch.float32) for seed in (5, 5, 6))
    assert torch.equal(one.head, same.head)
    assert not torch.equal(one.head, other.head)
    assert one.head.dtype == one.layers[0].gate.dtype == one.new_caches(2)[0].keys.dtype == torch.float32
