"""The demo's prefill: its prep against loops, packed chunks against each prompt read whole, and who writes where."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import graphglue as gg
from graphglue.audit import audit
from graphglue.demo import prefill
from graphglue.demo.chunks import Chunk, pack
from graphglue.demo.model import ModelShape, Transformer
from graphglue.demo.pages import PagePool
from graphglue.demo.twin import EagerTwin, compare

SHAPE = ModelShape(num_layers=2, max_context=64, page_size=8)
MAX_REQUESTS, LADDER = 3, gg.Ladder([4, 9, 16])


@given(spans=st.lists(st.tuples(st.integers(1, 5), st.integers(0, 9)), max_size=MAX_REQUESTS), spare=st.integers(0, 6))
def test_the_prep_equals_loops(spans: list[tuple[int, int]], spare: int) -> None:
    padded = [*spans, *[(0, 0)] * (MAX_REQUESTS - len(spans))]
    positions = [prefix + at for length, prefix in spans for at in range(length)]
    view = SimpleNamespace(
        extend_lens=torch.tensor([length for length, _ in padded]),
        prefix_lens=torch.tensor([prefix for _, prefix in padded]),
        bucket=gg.Bucket(MAX_REQUESTS, len(positions) + spare, 0),
    )
    metadata = prefill.prep(view)
    assert metadata["positions"].tolist() == positions + [0] * spare
    num_read, last_rows = 0, []
    for length, _ in padded:
        num_read += length
        last_rows.append(max(0, num_read - 1))
    assert metadata["last_rows"].tolist() == last_rows


class Reading:
    """A runner over a page pool, and the steps that read prompts."""

    def __init__(self, **config: Any) -> None:
        self.model = Transformer(SHAPE, seed=2, dtype=torch.float64)
        self.pool = PagePool(num_rows=6, num_pages=30, page_size=8, max_context=64, device=self.model.device)
        self.caches = self.model.new_caches(self.pool.num_pages)
        registry = gg.Registry()
        registry.register(prefill.CONTRACT)(prefill.prep)
        self.runner = gg.Runner(
            slots=prefill.slots(),
            ladder=LADDER,
            registry=registry,
            prep=prefill.CONTRACT.name,
            tables={"req_to_token": self.pool.req_to_token},
            forward=partial(prefill.forward, self.model, self.caches),
            output_axes=prefill.OUTPUT_AXES,
            config=gg.RunnerConfig(max_requests=MAX_REQUESTS, **config),
        )

    def admit(self, prompts: Sequence[Sequence[int]]) -> list[tuple[int, list[int]]]:
        """Give each prompt a pool row and locations."""
        rows = []
        for prompt in prompts:
            lease = self.pool.admit(len(prompt))
            self.pool.grow(lease, len(prompt))
            rows.append((lease.row, [self.pool.location(lease, at) for at in range(len(prompt))]))
        return rows

    def batch(self, prompts: Sequence[Sequence[int]], rows: Sequence[Any], chunks: Sequence[Chunk]) -> gg.Batch:
        """Spell a step."""
        places = [(chunk.prompt, at) for chunk in chunks for at in range(chunk.begin, chunk.end)]
        sources = {
            "extend_lens": [chunk.num_tokens for chunk in chunks],
            "prefix_lens": [chunk.begin for chunk in chunks],
            "req_pool_indices": [rows[chunk.prompt][0] for chunk in chunks],
            "out_cache_loc": [rows[prompt][1][at] for prompt, at in places],
            "input_ids": [prompts[prompt][at] for prompt, at in places],
        }
        return gg.Batch(len(chunks), sources, mode=gg.Mode.EXTEND, num_tokens=len(places))

    def read(self, prompts: Sequence[Sequence[int]]) -> tuple[list[torch.Tensor], list[int], list[gg.Decision]]:
        """Read prompts; give each one's rows and first token, and where the steps went."""
        rows = self.admit(prompts)
        hidden: list[list[torch.Tensor]] = [[] for _ in prompts]
        first, decisions = [0] * len(prompts), []
        for chunks in pack([len(prompt) for prompt in prompts], LADDER.largest, MAX_REQUESTS):
            step = self.runner.replay(self.batch(prompts, rows, chunks))
            decisions.append(step.decision)
            parts = step.outputs["hidden"].split([chunk.num_tokens for chunk in chunks])
            for chunk, part, token in zip(chunks, parts, step.outputs["next_token"].tolist(), strict=True):
                hidden[chunk.prompt].append(part.clone())
                first[chunk.prompt] = token
        return [torch.cat(parts) for parts in hidden], first, decisions


@pytest.fixture
def reading() -> Reading:
    """Capture the runner."""
    reading = Reading()
    reading.runner.capture(progress=False)
    return reading


PROMPTS = [[5, 9, 200], list(range(37)), [7], [1, 2, 3, 4, 5, 6], [250, 250]]


def test_packed_chunks_equal_each_prompt_read_whole(reading: Reading) -> None:
    """Matrix products may round otherwise at another number of rows; the tokens are the same."""
    hidden, first, decisions = reading.read(PROMPTS)
    assert {decision.forward for decision in decisions} == {gg.Route.GRAPH}
    assert {decision.prep for decision in decisions} == {gg.Route.GLUE}
    for prompt, rows, token in zip(PROMPTS, hidden, first, strict=True):
        tokens = torch.tensor(prompt)
        whole = reading.model.hidden(
            reading.model.new_caches(1),
            tokens,
            torch.arange(len(prompt)),
            lambda cache, queries, *others: prefill.causal_attention(queries, *others),
        )
        torch.testing.assert_close(rows, whole, rtol=1e-11, atol=1e-11)
        caches = reading.model.new_caches(30)
        assert token == int(reading.model.prefill(caches, tokens, torch.arange(len(prompt)) + 8))


def test_a_switched_off_runner_gives_the_same_bits(reading: Reading) -> None:
    eager = Reading(enabled=False)
    ours, tokens, _ = reading.read(PROMPTS)
    theirs, expected, decisions = eager.read(PROMPTS)
    assert {decision.forward for decision in decisions} == {gg.Route.EAGER}
    assert tokens == expected
    assert all(torch.equal(*pair) for pair in zip(ours, theirs, strict=True))
    for one, other in zip(reading.caches, eager.caches, strict=True):
        assert torch.equal(one.keys[8:], other.keys[8:])
        assert torch.equal(one.values[8:], other.values[8:])


def test_nothing_is_written_beside_the_own_locations(reading: Reading) -> None:
    for cache in reading.caches:
        cache.keys.fill_(3.0)
        cache.values.fill_(3.0)
    reading.read([[4, 5, 6]])
    own = reading.pool.req_to_token[1, :3]  # the first row to be given out
    for cache in reading.caches:
        touched = (cache.keys != 3.0).flatten(1).any(dim=1).nonzero().flatten()
        assert touched.tolist() == own.tolist()  # not even the sink: the break sees real rows only


def test_the_way_by_hand_equals_the_marked_break(reading: Reading) -> None:
    """The demo's twin pads by hand what a replay pads around the break."""
    hidden, _, _ = reading.read([[4, 5, 6, 7, 8]])
    twin = Reading(enabled=False)
    rows = twin.admit([[4, 5, 6, 7, 8]])
    batch = twin.batch([[4, 5, 6, 7, 8]], rows, [Chunk(0, 0, 5)])
    bucket = gg.Bucket(MAX_REQUESTS, 9, 0)
    run = partial(prefill.forward, twin.model, twin.caches, attend=prefill.attend_padded)
    by_hand = EagerTwin(prefill.prep, run, prefill.slots(), twin.pool.req_to_token)
    _, outputs = by_hand.step(bucket, gg.Bucket(1, 5, 0), batch.sources, None)
    assert list(compare(0, {"hidden": hidden[0]}, {"hidden": outputs["hidden"][:5]})) == []


def test_attention_that_forgets_the_earlier_chunks_would_be_found(
    reading: Reading, monkeypatch: pytest.MonkeyPatch
) -> None:
    def forgetful(queries: Any, keys: Any, values: Any, prefix: int) -> torch.Tensor:
        return prefill_attention(queries, keys[prefix:], values[prefix:], 0)

    prefill_attention = prefill.causal_attention
    eager = Reading(enabled=False)
    whole, _, _ = eager.read(PROMPTS)
    monkeypatch.setattr(prefill, "causal_attention", forgetful)
    forgot, _, _ = reading.read(PROMPTS)
    same = [torch.equal(*pair) for pair in zip(whole, forgot, strict=True)]
    assert same == [True, False, True, True, True]  # only the second prompt has more than one chunk


def test_the_contract_passes_the_audit(reading: Reading) -> None:
    certificate = audit(reading.runner)
    assert certificate.passed, certificate
