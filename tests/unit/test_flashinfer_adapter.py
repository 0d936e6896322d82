"""The adapter for FlashInfer's host planner, on a small stand-in of the wrapper, written from its documentation.

The stand-in plans as the wrapper does: from lengths, on the host, into one buffer whose contents the device reads in
``run``. So a plan that is missing, frozen, or another step's gives wrong results here as well. The real wheel is tested
in tests/peers/test_flashinfer.py.
"""

from __future__ import annotations

import random
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch

import graphglue as gg

sys.path.insert(0, str(Path(__file__).parents[2] / "examples"))
from adapters import flashinfer_decode
from adapters.flashinfer_decode import FlashInferDecode, Layout

LADDER, WORKERS, NUM_ROWS = [1, 2, 4], 8, 8
LAYOUT = Layout(num_heads=4, num_kv_heads=2, head_dim=4, page_size=2, max_context=12, dtype=torch.float64)
PAGE, CONTEXT = LAYOUT.page_size, LAYOUT.max_context


class Wrapper:
    """Stand in for ``flashinfer.BatchDecodeWithPagedKVCacheWrapper`` in CUDA-graph mode, in operations of torch."""

    def __init__(
        self,
        float_workspace_buffer: torch.Tensor,
        kv_layout: str = "NHD",
        use_cuda_graph: bool = False,
        paged_kv_indptr_buffer: Any = None,
        paged_kv_indices_buffer: Any = None,
        paged_kv_last_page_len_buffer: Any = None,
    ) -> None:
        assert (kv_layout, use_cuda_graph) == ("NHD", True)
        self._paged_kv_indptr_buf, self._paged_kv_indices_buf = paged_kv_indptr_buffer, paged_kv_indices_buffer
        self._paged_kv_last_page_len_buf = paged_kv_last_page_len_buffer
        self.reset_workspace_buffer(float_workspace_buffer, torch.zeros(4096, dtype=torch.uint8))

    def reset_workspace_buffer(self, float_workspace: torch.Tensor, int_workspace: torch.Tensor) -> None:
        self._int_workspace_buffer = int_workspace
        self._pin_memory_int_workspace_buffer = torch.full(int_workspace.shape, 77, dtype=torch.uint8)

    def plan(
        self, indptr: torch.Tensor, indices: torch.Tensor, last_page_len: torch.Tensor, num_qo_heads: int,
        num_kv_heads: int, head_dim: int, page_size: int, *, q_data_type: Any, kv_data_type: Any,
    ) -> None:  # fmt: skip
        own = (self._paged_kv_indptr_buf, self._paged_kv_indices_buf, self._paged_kv_last_page_len_buf)
        for buffer, given in zip(own, (indptr, indices, last_page_len)):
            buffer[: len(given)].copy_(given)
        self._group, self._page = num_qo_heads // num_kv_heads, page_size
        self._plan_numbers(indptr)

    def _plan_numbers(self, indptr: torch.Tensor) -> None:
        """Cut all rows into the smallest pieces that the workers are enough for."""
        pages, size = indptr.diff().clamp(min=1), 1
        while int((-(-pages // size)).sum()) > WORKERS:
            size += 1
        pieces = [(row, piece) for row, count in enumerate(pages.tolist()) for piece in range(-(-count // size))]
        numbers = np.full(1 + 2 * WORKERS, -1, np.int32)
        numbers[0] = size
        numbers[1 : 1 + 2 * len(pieces)] = np.asarray(pieces, np.int32).reshape(-1)
        planned = self._pin_memory_int_workspace_buffer
        planned[: numbers.nbytes] = torch.from_numpy(numbers.view(np.uint8))
        self._int_workspace_buffer.copy_(planned)  # the copy that FlashInfer queues
        self._plan_info = [WORKERS, *LAYOUT_CHANGES, len(indptr)]

    def run(self, q: torch.Tensor, paged_kv_cache: Any, enable_pdl: bool | None = None) -> torch.Tensor:
        """Attend piece by piece, and merge; every worker sees its own positions only."""
        indptr, indices = self._paged_kv_indptr_buf, self._paged_kv_indices_buf
        last = self._paged_kv_last_page_len_buf
        numbers = self._int_workspace_buffer[: 4 * (1 + 2 * WORKERS)].view(torch.int32).to(torch.int64)
        size, pieces = numbers[0] * self._page, numbers[1:].view(WORKERS, 2)
        row, piece = pieces[:, 0].clamp(min=0), pieces[:, 1]
        held = (indptr[1:] - indptr[:-1]).to(torch.int64)
        lengths = torch.where(held > 0, (held - 1) * self._page + last, 0)
        at = torch.arange(CONTEXT, device=q.device)
        seen = (pieces[:, :1] >= 0) & (at >= piece[:, None] * size) & (at < (piece[:, None] + 1) * size)
        seen = seen & (at < lengths[row][:, None])
        slots = torch.where(seen, indptr[row][:, None] + at // self._page, 0)
        keys, values = (
            cache[indices[slots].to(torch.int64), at % self._page].repeat_interleave(self._group, dim=2)
            for cache in paged_kv_cache
        )
        scores = torch.einsum("whd,wchd->whc", q[row], keys) * q.shape[-1] ** -0.5
        weights = torch.where(seen[:, None], scores.clamp(-50, 50).exp(), 0.0)
        own = (row == torch.arange(len(q), device=q.device)[:, None]).to(q.dtype)
        total = torch.einsum("rw,whc->rh", own, weights)[..., None]
        mixed = torch.einsum("rw,whc,wchd->rhd", own, weights, values)
        return torch.where(total > 0, mixed / total.clamp(min=1e-300), 0.0)


LAYOUT_CHANGES: list[int] = []


def fast_decode_plan(
    self: Wrapper, indptr: Any, indices: Any, last_page_len: Any, num_qo_heads: int, num_kv_heads: int, head_dim: int,
    page_size: int, *, q_data_type: Any, kv_data_type: Any, global_override_indptr_cpu: torch.Tensor,
) -> None:  # fmt: skip
    """Plan without touching the wrapper's buffers, as FlashInfer's function of that name does."""
    self._plan_numbers(global_override_indptr_cpu)


@pytest.fixture(scope="module", autouse=True)
def flashinfer(frozen_imports: None) -> Iterator[None]:
    package, decode = ModuleType("flashinfer"), ModuleType("flashinfer.decode")
    package.BatchDecodeWithPagedKVCacheWrapper = Wrapper  # type: ignore[attr-defined]
    decode.fast_decode_plan = fast_decode_plan  # type: ignore[attr-defined]
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(sys.modules, "flashinfer", package)
        patch.setitem(sys.modules, "flashinfer.decode", decode)
        yield


def tables() -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    pages = torch.randperm(NUM_ROWS * CONTEXT // PAGE, generator=generator).view(NUM_ROWS, -1) + 1
    return {"req_to_token": (pages[:, :, None] * PAGE + torch.arange(PAGE)).flatten(1)}


def caches(table: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Make a cache whose page 0, where pad rows would look, is NaN."""
    generator = torch.Generator().manual_seed(2)
    shape = (int(table.max()) // PAGE + 1, PAGE, LAYOUT.num_kv_heads, LAYOUT.head_dim)
    keys, values = (torch.randn(shape, generator=generator, dtype=LAYOUT.dtype) for _ in range(2))
    keys[0] = values[0] = torch.nan
    return keys, values


class Engine:
    """A runner of the backend over one layer."""

    def __init__(self, backend: FlashInferDecode | None = None, **config: Any) -> None:
        self.backend = backend or FlashInferDecode(LAYOUT, "cpu", workspace_bytes=64, plan_bytes=256)
        self.tables = tables()
        self.keys, self.values = caches(self.tables["req_to_token"])
        registry = gg.Registry()
        self.backend.register(registry)
        queries = gg.Slot("queries", "request", LAYOUT.dtype, 0.0, inner=(LAYOUT.num_heads, LAYOUT.head_dim))
        self.runner = gg.Runner(
            slots=[*self.backend.slots(), queries], ladder=LADDER, registry=registry, prep=flashinfer_decode.NAME,
            tables=self.tables, forward=self.forward, device="cpu", config=gg.RunnerConfig(**config),
        )  # fmt: skip

    def forward(self, view: Any, metadata: Any) -> torch.Tensor:
        return self.backend.attend(view, metadata, view.queries, self.keys, self.values)

    def whole(self, batch: gg.Batch) -> torch.Tensor:
        """Attend to each request's positions in one piece."""
        rows = []
        sources = batch.sources
        for query, length, row in zip(sources["queries"], sources["seq_lens"], sources["req_pool_indices"]):
            seen = self.tables["req_to_token"][row, : int(length)]
            keys, values = (
                cache.flatten(0, 1)[seen].repeat_interleave(LAYOUT.num_heads // LAYOUT.num_kv_heads, dim=1)
                for cache in (self.keys, self.values)
            )
            scores = torch.einsum("hd,chd->hc", query, keys) * LAYOUT.head_dim**-0.5
            rows.append(torch.einsum("hc,chd->hd", scores.softmax(-1), values))
        return torch.stack(rows)


def drawn(num_requests: int, seed: int, kind: Any = list) -> gg.Batch:
    rng = random.Random(f"{num_requests} {seed}")
    shape = (num_requests, LAYOUT.num_heads, LAYOUT.head_dim)
    lengths = [rng.choice((1, PAGE, PAGE + 1, CONTEXT, rng.randint(1, CONTEXT))) for _ in range(num_requests)]
    sources = {
        "seq_lens": kind(lengths),
        "req_pool_indices": rng.sample(range(1, NUM_ROWS), num_requests),
        "queries": torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=LAYOUT.dtype),
    }
    return gg.Batch(num_requests, sources)


@pytest.fixture(scope="module")
def engine() -> Iterator[Engine]:
    made = Engine()
    with made.runner as runner:
        runner.capture(progress=False)
        yield made


@pytest.mark.parametrize("kind", [list, np.array, torch.tensor], ids=["list", "numpy", "torch"])
def test_glued_steps_attend_by_the_plan_of_their_own_lengths(engine: Engine, kind: Any) -> None:
    for seed in range(3):
        for num_requests in (1, 3, 4, 2):
            batch = drawn(num_requests, seed, kind)
            step = engine.runner.replay(batch)
            assert (step.decision.prep, step.decision.forward) == (gg.Route.GLUE, gg.Route.GRAPH)
            torch.testing.assert_close(step.outputs, engine.whole(batch), rtol=1e-12, atol=1e-13)


def test_the_pages_of_the_requests_are_packed(engine: Engine) -> None:
    batch = drawn(3, 7)
    step = engine.runner.replay(batch)
    expected: list[int] = []
    for length, row in zip(batch.sources["seq_lens"], batch.sources["req_pool_indices"]):
        expected += (engine.tables["req_to_token"][row, :length:PAGE] // PAGE).tolist()
    assert step.metadata["kv_indices"].flatten().tolist() == expected + [0] * (4 * LAYOUT.max_pages - len(expected))


def test_every_route_gives_the_same_bits_and_leaves_no_wrapper_bound_elsewhere(engine: Engine) -> None:
    batch = drawn(3, 1)
    glued = engine.runner.replay(batch).outputs.clone()
    lora = engine.runner.replay(gg.Batch(3, batch.sources, features=frozenset({"lora"})))
    assert (lora.decision.prep, lora.decision.forward) == (gg.Route.EAGER, gg.Route.GRAPH)
    assert torch.equal(lora.outputs, glued)
    for num_requests in (5, 7):  # above the ladder, on tensors of their own
        many = drawn(num_requests, 3)
        step = engine.runner.replay(many)
        assert step.decision.reason is gg.Reason.OVER_LADDER
        torch.testing.assert_close(step.outputs, engine.whole(many), rtol=1e-12, atol=1e-13)
    assert torch.equal(engine.runner.replay(batch).outputs, glued)
    disabled = Engine(enabled=False)
    assert torch.equal(disabled.runner.replay(batch).outputs, glued)


def test_an_idle_step_reads_no_page(engine: Engine) -> None:
    engine.runner.replay(drawn(1, 0))
    step = engine.runner.replay(gg.Batch.idle())
    assert step.outputs.shape == (0, LAYOUT.num_heads, LAYOUT.head_dim)
    assert step.metadata["kv_indices"].flatten().tolist() == [0] * LAYOUT.max_pages


def test_a_frozen_plan_is_wrong() -> None:
    class Frozen(FlashInferDecode):
        """Hands in the numbers of the first step again and again, as if they had been captured."""

        first: Any = None

        def plan(self, batch: gg.Batch, bucket: gg.Bucket) -> Any:
            made = super().plan(batch, bucket)
            self.first = made["kv_plan"] if self.first is None else self.first
            return {**made, "kv_plan": self.first}

    frozen = Engine(Frozen(LAYOUT, "cpu", workspace_bytes=64, plan_bytes=256))
    right = []
    with frozen.runner as runner:
        runner.capture(progress=False)
        for length in (1, CONTEXT):
            batch = gg.Batch(1, {**drawn(1, 0).sources, "seq_lens": [length]})
            right.append(torch.allclose(runner.replay(batch).outputs, frozen.whole(batch)))
    assert right == [True, False]


def test_refusals_come_before_anything_is_written(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    batch = drawn(3, 0)
    with pytest.raises(gg.BindError, match="FlashInfer's planner reads it on the host; hand in a list or an array"):
        engine.runner.replay(gg.Batch(3, {**batch.sources, "seq_lens": torch.ones(3, device="meta")}))
    engine.runner.replay(batch)
    before = engine.runner.view(4).kv_plan.clone()
    monkeypatch.setattr(sys.modules[__name__], "LAYOUT_CHANGES", [9])
    with pytest.raises(gg.ContractError, match="this version's CUDA-graph mode does not keep its layout"):
        engine.runner.replay(drawn(3, 1))
    assert torch.equal(engine.runner.view(4).kv_plan, before)


def test_plans_of_equal_steps_have_equal_bytes_so_that_a_staged_step_is_taken() -> None:
    staged = Engine(staging=True)
    with staged.runner as runner:
        runner.capture(progress=False)
        for seed in range(3):
            batch = drawn(3, seed)
            assert runner.stage(batch)
            step = runner.replay(batch)
            assert step.decision.reason is gg.Reason.STAGED
            torch.testing.assert_close(step.outputs, staged.whole(batch), rtol=1e-12, atol=1e-13)


def test_the_audit_finds_no_fault(engine: Engine) -> None:
    from graphglue.audit import Verdict, audit

    certificate = audit(engine.runner, perturb=lambda: None, batches=[drawn(count, 0) for count in (1, 3, 4)])
    assert {check.name: check for check in certificate.checks if check.verdict is Verdict.FAIL} == {}
