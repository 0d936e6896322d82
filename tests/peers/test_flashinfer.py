"""FlashInfer's own wheel behind examples/adapters/flashinfer_decode.py, where it is installed and there is a GPU.

    pip install -e '.[flashinfer]'

It compiles its kernels at the first use, with nvcc and ninja, and reaches no network for that. What the adapter gives
is held against attention in one piece, and against FlashInfer's own wrapper, planned for the same padded rows.

To import it and to compile this kernel, a machine with torch, nvcc, ninja, packaging and tqdm needs 22 MB of wheels:
flashinfer-python 0.6.18.post1 (18.3; 0.6.8.post1 has 9.4), apache-tvm-ffi (3.3), nvidia-ml-py, requests, urllib3, idna,
certifi and charset-normalizer (0.7), installed with --no-deps: cutlass-dsl, cudnn-frontend and cuda-tile are for other
kernels. From 0.7 on the wheel itself has 34 to 101 MB.
"""

from __future__ import annotations

import importlib.util
import inspect
import os
import random
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import graphglue as gg
from graphglue.audit import Verdict, audit

sys.path.insert(0, str(Path(__file__).parents[2] / "examples"))
from adapters import flashinfer_decode
from adapters.flashinfer_decode import FlashInferDecode, Layout

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("flashinfer") is None, reason="needs FlashInfer: pip install -e '.[flashinfer]'"
)
needs_gpu = pytest.mark.skipif(
    not torch.cuda.is_available() and os.environ.get("GRAPHGLUE_REQUIRE_GPU") != "1",
    reason="needs a GPU to run FlashInfer's kernels",
)

LADDER, NUM_ROWS = [1, 2, 4, 8], 12
LAYOUT = Layout(num_heads=8, num_kv_heads=2, head_dim=128, page_size=16, max_context=1024, dtype=torch.bfloat16)
PAGE, CONTEXT = LAYOUT.page_size, LAYOUT.max_context


@pytest.fixture(scope="module", autouse=True)
def linkable_driver(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Let the linker find libcuda.so where only the driver's libcuda.so.1 is installed."""
    if not torch.cuda.is_available():
        yield
        return
    torch.cuda.init()
    mapped = {line.split()[-1] for line in Path("/proc/self/maps").read_text().splitlines() if "libcuda.so" in line}
    folder = tmp_path_factory.mktemp("driver")
    (folder / "libcuda.so").symlink_to(sorted(mapped)[0])
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("LIBRARY_PATH", os.pathsep.join(filter(None, [str(folder), os.environ.get("LIBRARY_PATH")])))
        yield


def test_the_names_that_the_adapter_uses_are_there() -> None:
    from flashinfer import BatchDecodeWithPagedKVCacheWrapper as Wrapper
    from flashinfer.decode import fast_decode_plan

    made = inspect.signature(Wrapper.__init__).parameters
    buffers = {f"paged_kv_{name}_buffer" for name in ("indptr", "indices", "last_page_len")}
    assert {"use_cuda_graph", *buffers} <= set(made)
    assert set(LAYOUT.arguments()) <= set(inspect.signature(getattr(Wrapper, "_plan_impl", Wrapper.plan)).parameters)
    planned = inspect.signature(fast_decode_plan).parameters
    assert {*LAYOUT.arguments(), "global_override_indptr_cpu"} <= set(planned)
    assert "enable_pdl" in inspect.signature(Wrapper.run).parameters
    source = inspect.getsource(Wrapper.run) + inspect.getsource(fast_decode_plan)
    for name in ("indptr", "indices", "last_page_len"):
        assert f"self._paged_kv_{name}_buf," in source
    assert source.count("self._int_workspace_buffer,") >= 2
    assert "self._pin_memory_int_workspace_buffer," in source
    assert "self._plan_info = self._cached_module.plan(" in source


class Engine:
    """A runner of the backend over one layer on the GPU."""

    def __init__(self, kind: type[FlashInferDecode] = FlashInferDecode) -> None:
        generator = torch.Generator().manual_seed(0)
        self.backend = kind(LAYOUT, "cuda", workspace_bytes=64 << 20)
        pages = torch.randperm((NUM_ROWS - 1) * LAYOUT.max_pages, generator=generator).view(NUM_ROWS - 1, -1) + 1
        table = torch.cat(
            [torch.zeros(1, CONTEXT, dtype=torch.int64), (pages[:, :, None] * PAGE + torch.arange(PAGE)).flatten(1)]
        )
        shape = (NUM_ROWS * LAYOUT.max_pages, PAGE, LAYOUT.num_kv_heads, LAYOUT.head_dim)
        self.table = table.cuda()
        self.keys, self.values = (torch.randn(shape, generator=generator).to("cuda", LAYOUT.dtype) for _ in range(2))
        self.keys[0] = self.values[0] = torch.nan  # pad rows read nothing
        registry = gg.Registry()
        self.backend.register(registry)
        queries = gg.Slot("queries", "request", LAYOUT.dtype, 0.0, inner=(LAYOUT.num_heads, LAYOUT.head_dim))
        self.runner = gg.Runner(
            slots=[*self.backend.slots(), queries], ladder=LADDER, registry=registry, prep=flashinfer_decode.NAME,
            tables={"req_to_token": self.table}, forward=self.forward, device="cuda", output_axes="bucket",
        )  # fmt: skip

    def forward(self, view: Any, metadata: Any) -> torch.Tensor:
        return self.backend.attend(view, metadata, view.queries, self.keys, self.values)

    def captured(self) -> Engine:
        self.runner.capture(progress=False)
        return self

    def whole(self, batch: gg.Batch) -> torch.Tensor:
        """Attend to each request's positions in one piece, in float64."""
        rows, sources, group = [], batch.sources, LAYOUT.num_heads // LAYOUT.num_kv_heads
        for query, length, row in zip(sources["queries"], sources["seq_lens"], sources["req_pool_indices"]):
            seen = self.table[row, : int(length)]
            keys, values = (
                cache.flatten(0, 1)[seen].double().repeat_interleave(group, dim=1) for cache in (self.keys, self.values)
            )
            scores = torch.einsum("hd,chd->hc", query.double(), keys) * LAYOUT.head_dim**-0.5
            rows.append(torch.einsum("hc,chd->hd", scores.softmax(-1), values))
        return torch.stack(rows)

    def is_right(self, batch: gg.Batch, outputs: torch.Tensor) -> bool:
        real = outputs[: batch.num_requests].double()
        return bool(torch.allclose(real, self.whole(batch), rtol=1e-2, atol=2e-3))


def drawn(num_requests: int, seed: int, lengths: list[int] | None = None) -> gg.Batch:
    rng = random.Random(f"{num_requests} {seed}")
    edges = (1, PAGE, PAGE + 1, 128, 129, CONTEXT)
    lengths = lengths or [rng.choice((*edges, rng.randint(1, CONTEXT))) for _ in range(num_requests)]
    shape = (num_requests, LAYOUT.num_heads, LAYOUT.head_dim)
    queries = torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to("cuda", LAYOUT.dtype)
    rows = rng.sample(range(1, NUM_ROWS), num_requests)
    return gg.Batch(num_requests, {"seq_lens": lengths, "req_pool_indices": rows, "queries": queries})


class OwnWrapper:
    """FlashInfer's wrapper as an engine uses it in CUDA-graph mode, for one bucket; pad rows have no pages."""

    def __init__(self, engine: Engine, num_rows: int) -> None:
        from flashinfer.decode import fast_decode_plan

        self.engine, self.num_rows, self.fast_plan = engine, num_rows, fast_decode_plan
        sizes = (num_rows + 1, num_rows * LAYOUT.max_pages, num_rows)
        self.buffers = tuple(torch.zeros(size, dtype=torch.int32, device="cuda") for size in sizes)
        self.wrapper = engine.backend.new_wrapper(*self.buffers)
        self.queries = torch.zeros(num_rows, LAYOUT.num_heads, LAYOUT.head_dim, dtype=LAYOUT.dtype, device="cuda")

    def numbers(self, batch: gg.Batch) -> tuple[np.ndarray, list[int], list[int]]:
        """Give indptr, indices and the lengths of the last pages, from loops."""
        indptr, indices, last = [0], [], []
        for length, row in zip(batch.sources["seq_lens"], batch.sources["req_pool_indices"]):
            indices += (self.engine.table[row, :length:PAGE] // PAGE).tolist()
            indptr.append(len(indices))
            last.append((length - 1) % PAGE + 1)
        spare = self.num_rows - batch.num_requests
        return np.array(indptr + [indptr[-1]] * spare, np.int32), indices, last + [1] * spare

    def upload(self, batch: gg.Batch) -> tuple[np.ndarray, list[torch.Tensor]]:
        indptr, indices, last = self.numbers(batch)
        return indptr, [torch.tensor(list(one), dtype=torch.int32, device="cuda") for one in (indptr, indices, last)]

    def plan(self, batch: gg.Batch, uploaded: tuple[np.ndarray, list[torch.Tensor]]) -> None:
        """Plan a step into the wrapper's one pinned buffer, and set the device's buffers behind what is queued."""
        indptr, tensors = uploaded
        for buffer, given in zip(self.buffers, tensors):
            buffer[: len(given)].copy_(given)
        self.queries[: batch.num_requests].copy_(batch.sources["queries"])
        self.fast_plan(
            self.wrapper, *self.buffers, **LAYOUT.arguments(), global_override_indptr_cpu=torch.from_numpy(indptr)
        )

    def run(self) -> torch.Tensor:
        return self.wrapper.run(self.queries, (self.engine.keys, self.engine.values), enable_pdl=False)


@needs_gpu
def test_glued_steps_are_right_and_have_the_bits_of_flashinfer_s_own_wrapper() -> None:
    engine = Engine().captured()
    own = {size: OwnWrapper(engine, size) for size in LADDER}
    for seed in range(3):
        for num_requests in range(1, LADDER[-1] + 1):
            batch = drawn(num_requests, seed)
            step = engine.runner.replay(batch)
            assert (step.decision.prep, step.decision.forward) == (gg.Route.GLUE, gg.Route.GRAPH)
            assert engine.is_right(batch, step.outputs)
            assert torch.equal(step.outputs[num_requests:], torch.zeros_like(step.outputs[num_requests:]))
            eager = own[len(step.outputs)]
            eager.plan(batch, eager.upload(batch))
            assert torch.equal(eager.run()[:num_requests], step.outputs[:num_requests])
    stats = engine.runner.stats()
    print(f"\none launch: {stats['one_launch']} of {stats['steps']}; {stats['launch_fallbacks']}")
    engine.runner.close()


@needs_gpu
def test_idle_steps_and_steps_above_the_ladder() -> None:
    engine = Engine().captured()
    for num_requests in (3, 9, 11, 3):
        batch = drawn(num_requests, 4)
        assert engine.is_right(batch, engine.runner.replay(batch).outputs)
    idle = engine.runner.replay(gg.Batch.idle())
    assert not idle.outputs.any()
    engine.runner.close()


def alternating() -> list[gg.Batch]:
    """Draw steps with one piece and with many, in turn, so that each plan is wrong for its neighbours."""
    return [drawn(2, number, [1000, 900] if number % 2 == 0 else [5, 9]) for number in range(12)]


@needs_gpu
def test_steps_queued_behind_a_busy_gpu_keep_their_own_plans() -> None:
    engine, batches = Engine().captured(), alternating()
    engine.runner.replay(batches[0])
    torch.cuda.synchronize()
    torch.cuda._sleep(1_000_000_000)
    busy = torch.cuda.Event()
    busy.record()
    outputs = [engine.runner.replay(batch).outputs.clone() for batch in batches]
    assert not busy.query(), "a replay waited for the GPU"
    assert [engine.is_right(batch, seen) for batch, seen in zip(batches, outputs)] == [True] * len(batches)
    engine.runner.close()


@needs_gpu
def test_planned_into_one_pinned_buffer_they_do_not() -> None:
    """The same steps by the wrapper alone: right one by one, wrong with several in flight."""
    engine, batches = Engine(), alternating()
    own = OwnWrapper(engine, 2)
    uploaded = [own.upload(batch) for batch in batches]

    def served(wait: bool) -> list[bool]:
        torch.cuda.synchronize()
        if not wait:
            torch.cuda._sleep(1_000_000_000)
        outputs = []
        for batch, numbers in zip(batches, uploaded):
            own.plan(batch, numbers)
            outputs.append(own.run().clone())
            if wait:
                torch.cuda.synchronize()
        return [engine.is_right(batch, seen) for batch, seen in zip(batches, outputs)]

    assert served(wait=True) == [True] * len(batches)
    assert not all(served(wait=False))


@needs_gpu
def test_the_audit_finds_no_fault() -> None:
    class OnTheHost(FlashInferDecode):
        """Takes the lengths that an audit draws, which are on the device."""

        def plan(self, batch: gg.Batch, bucket: gg.Bucket) -> Any:
            lengths = batch.sources.get("seq_lens")
            return super().plan(gg.Batch(batch.num_requests, {"seq_lens": torch.as_tensor(lengths).cpu()}), bucket)

    engine = Engine(OnTheHost)
    batches = [drawn(count, 0) for count in (1, 2, 3, 5, 8)]
    certificate = audit(engine.runner, perturb=lambda: None, batches=batches)
    found = {check.name: check.verdict for check in certificate.checks}
    assert Verdict.FAIL not in found.values(), certificate.checks
    assert found["pointers"] is Verdict.PASS, certificate.checks
    engine.runner.close()
