"""The Triton backend of examples/triton_decode.py on CUDA graphs: kernels that torch's dispatcher never sees.

They are compared with attention in one piece and, bit for bit, with themselves on every other route; and what they read
is found on the captured graph: the right backend passes, faulty twins of it do not.
"""

from __future__ import annotations

import os
import random
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

import graphglue as gg
from graphglue.audit import Certificate, Verdict, audit

if not torch.cuda.is_available():
    pytest.skip("needs a CUDA device", allow_module_level=True)  # importing the example would have Triton interpret
pytest.importorskip("triton", reason="needs Triton: pip install -e '.[triton]'")
sys.path.insert(0, str(Path(__file__).parents[2] / "examples"))
import triton_decode as backend
from triton_decode import CONTEXT, CONTRACT, DIM, GROUP, HEADS, LADDER, NUM_PAGES, PAGE

ERRORS = {torch.float64: 1e-12, torch.float32: 1e-4, torch.bfloat16: 1e-2}
KERNELS = (backend.look_up_pages, backend.attend_split, backend.merge_splits)


def batch_of(num_requests: int, dtype: torch.dtype, seed: int) -> gg.Batch:
    return backend.draw_batch(num_requests, dtype, "cuda", random.Random(seed))


def num_compiled() -> list[int]:
    """Count the binaries of each kernel on this device."""
    return [len(kernel.device_caches[torch.cuda.current_device()][0]) for kernel in KERNELS]


def captured(dtype: torch.dtype, tables: dict[str, torch.Tensor], **more: Any) -> gg.Runner:
    runner = backend.make_runner(dtype, "cuda", tables, **more)
    runner.capture(progress=False)
    return runner


# Results.


@pytest.mark.parametrize("dtype", ERRORS, ids=str)
def test_every_raw_count_is_glued_right_and_equal_to_every_other_route(dtype: torch.dtype) -> None:
    tables = backend.make_tables(dtype, "cuda")
    disabled = gg.RunnerConfig(enabled=False)
    with captured(dtype, tables) as runner, backend.make_runner(dtype, "cuda", tables, disabled) as eager:
        for seed in range(3):
            for num_requests in range(1, LADDER[-1] + 1):
                batch = batch_of(num_requests, dtype, seed)
                step = runner.replay(batch)
                assert (step.decision.prep, step.decision.forward) == (gg.Route.GLUE, gg.Route.GRAPH)
                outputs, expected = step.outputs.clone(), backend.reference(batch, tables)
                torch.testing.assert_close(outputs.double(), expected, rtol=ERRORS[dtype], atol=ERRORS[dtype])
                other = eager.replay(batch)
                assert other.decision.forward is gg.Route.EAGER
                assert torch.equal(outputs, other.outputs)
                for row in range(num_requests):
                    assert torch.equal(outputs[row : row + 1], backend.alone(runner, batch, row))
        stats = runner.stats()
        assert stats["one_launch"] == stats["steps"]
        assert not stats["launch_fallbacks"]


def test_over_the_ladder_the_same_kernels_run_eagerly_with_the_same_bits() -> None:
    tables = backend.make_tables(torch.bfloat16, "cuda")
    with captured(torch.bfloat16, tables) as runner:
        batch = batch_of(11, torch.bfloat16, 5)
        step = runner.replay(batch)
        assert step.decision.reason is gg.Reason.OVER_LADDER
        outputs = step.outputs.clone()
        for row in range(11):
            assert torch.equal(outputs[row : row + 1], backend.alone(runner, batch, row))


def test_pad_rows_and_real_rows_read_no_page_but_their_own() -> None:
    """All memory that is no position of this step is NaN, and the rows of the bucket are looked at, pads included."""
    dtype = torch.float32
    tables = backend.make_tables(dtype, "cuda")
    registry = gg.Registry()
    registry.register(CONTRACT)(backend.prep)
    with gg.Runner(
        slots=backend.slots(dtype), ladder=LADDER, registry=registry, prep=CONTRACT.name, tables=tables,
        forward=backend.forward, device="cuda", output_axes="bucket",
    ) as runner:  # fmt: skip
        runner.capture(progress=False)
        whole = {name: tables[name].clone() for name in ("k_cache", "v_cache")}
        for num_requests in (8, 5, 1, 3):
            batch = batch_of(num_requests, dtype, num_requests)
            rows, lengths = batch.sources["req_pool_indices"], batch.sources["seq_lens"]
            kept = [tables["req_to_token"][row, :length] for row, length in zip(rows, lengths)]
            legal = torch.cat([*kept, torch.zeros(1, dtype=torch.int64, device="cuda")])
            for name, full in whole.items():
                tables[name].fill_(torch.nan)
                tables[name][legal] = full[legal]
            out = runner.replay(batch).outputs
            torch.testing.assert_close(
                out[:num_requests].double(), backend.reference(batch, tables), rtol=1e-4, atol=1e-4
            )
            sink = tables["v_cache"][0].repeat_interleave(GROUP, 0)
            assert out.shape == (next(size for size in LADDER if size >= num_requests), HEADS, DIM)
            assert all(torch.equal(row, sink) for row in out[num_requests:])


def test_one_binary_serves_all_buckets_and_nothing_is_compiled_after_the_warm_ups() -> None:
    """A second binary could sum in another order, and a capture may not compile."""
    dtype = torch.float16  # no other test has these
    tables, before = backend.make_tables(dtype, "cuda"), num_compiled()
    with captured(dtype, tables) as runner:
        after = num_compiled()
        prep, *attention = [now - then for now, then in zip(after, before)]
        assert attention == [1, 1]
        assert prep <= 1  # it has no floats, and may have been compiled before
        for seed, num_requests in enumerate((1, 8, 3, 11, 5)):  # 11 runs eagerly, on tensors of its own
            runner.replay(batch_of(num_requests, dtype, seed))
        assert num_compiled() == after


def test_steps_queued_behind_a_busy_gpu_keep_their_own_values() -> None:
    dtype = torch.bfloat16
    tables = backend.make_tables(dtype, "cuda")
    with captured(dtype, tables) as runner:
        batches = [batch_of(1 + number % 8, dtype, number) for number in range(30)]
        runner.replay(batches[0])
        torch.cuda.synchronize()
        torch.cuda._sleep(1_000_000_000)
        busy = torch.cuda.Event()
        busy.record()
        outputs = [runner.replay(batch).outputs.clone() for batch in batches]
        assert not busy.query(), "a replay waited for the GPU"
        for batch, seen in zip(batches, outputs):
            assert torch.equal(seen, runner.replay(batch).outputs)


# The audit: of the prep, and of prep and forward as one, so that the forward's kernels are looked at as well.

WHOLE = CONTRACT.model_copy(
    update={
        "name": "whole",
        "reads": {**CONTRACT.reads, "queries": 0.0},
        "tables": ("req_to_token", "k_cache", "v_cache"),
        "outputs": {**CONTRACT.outputs, "mixed": "token"},
    }
)


def whole(view: Any) -> dict[str, torch.Tensor]:
    metadata = backend.prep(view)
    return {**metadata, "mixed": backend.forward(view, metadata)}


def audited(prep: Any, contract: gg.PrepContract, perturb: Any = lambda: None) -> Certificate:
    registry = gg.Registry()
    registry.register(contract)(prep)
    with gg.Runner(
        slots=backend.slots(torch.float32), ladder=(1, 4), registry=registry, prep=contract.name,
        tables=TABLES, device="cuda",
    ) as runner:  # fmt: skip
        return audit(runner, perturb=perturb)


def verdicts(certificate: Certificate) -> dict[str, Verdict]:
    return {check.name: check.verdict for check in certificate.checks}


def told(certificate: Certificate, name: str) -> str:
    (check,) = [check for check in certificate.checks if check.name == name]
    return "\n".join(map(str, check.evidence))


TABLES: dict[str, torch.Tensor] = {}


@pytest.fixture(autouse=True)
def _tables() -> None:
    # Without NaN, because an audit also draws steps of row 0.
    TABLES.update({name: table.nan_to_num() for name, table in backend.make_tables(torch.float32, "cuda").items()})


@pytest.mark.parametrize(("prep", "contract"), [(backend.prep, CONTRACT), (whole, WHOLE)], ids=["prep", "whole"])
def test_the_backend_passes_by_pointers_and_double_capture(prep: Any, contract: gg.PrepContract) -> None:
    certificate = audited(prep, contract)
    found = verdicts(certificate)
    assert found["pointers"] is Verdict.PASS, told(certificate, "pointers")
    assert found["double_capture"] is Verdict.PASS, told(certificate, "double_capture")
    assert Verdict.FAIL not in found.values(), certificate.checks
    assert found["trace"] is Verdict.UNKNOWN, "torch sees that an address is handed out, not what is done with it"


def test_a_cache_past_the_view_is_found_by_pointers() -> None:
    def past_the_view(view: Any) -> dict[str, torch.Tensor]:
        metadata = backend.prep(view)
        own = type("Own", (), {"queries": view.queries, "bucket": view.bucket, "tables": type("T", (), TABLES)})
        return {**metadata, "mixed": backend.forward(own, metadata)}

    certificate = audited(past_the_view, WHOLE)
    assert verdicts(certificate)["pointers"] is Verdict.FAIL
    assert "the runner's own table, past the view" in told(certificate, "pointers")
    assert "attend_split" in told(certificate, "pointers")


def test_a_page_table_that_was_kept_is_found_by_pointers() -> None:
    kept = torch.zeros(LADDER[-1], NUM_PAGES, dtype=torch.int64, device="cuda")

    def with_a_table_of_its_own(view: Any) -> dict[str, torch.Tensor]:
        metadata = {**backend.prep(view), "page_table": kept[: view.bucket.requests]}
        return {"lengths": metadata["lengths"], "mixed": backend.forward(view, metadata)}

    contract = WHOLE.model_copy(update={"outputs": {"lengths": "request", "mixed": "token"}})
    certificate = audited(with_a_table_of_its_own, contract)
    assert verdicts(certificate)["pointers"] is Verdict.FAIL
    assert "kept" in told(certificate, "pointers")


def test_a_slot_that_is_not_declared_is_found_by_pointers() -> None:
    reader: dict[str, gg.Runner] = {}

    def with_live_queries(view: Any) -> dict[str, torch.Tensor]:
        metadata = backend.prep(view)
        queries = reader["runner"].view(view.bucket).queries
        own = type("Own", (), {"queries": queries, "bucket": view.bucket, "tables": view.tables})
        return {**metadata, "mixed": backend.forward(own, metadata)}

    registry, contract = gg.Registry(), WHOLE.model_copy(update={"reads": dict(CONTRACT.reads)})
    registry.register(contract)(with_live_queries)
    with gg.Runner(
        slots=backend.slots(torch.float32), ladder=(1, 4), registry=registry, prep="whole", tables=TABLES,
        device="cuda",
    ) as runner:  # fmt: skip
        reader["runner"] = runner
        certificate = audit(runner, perturb=lambda: None)
    assert verdicts(certificate)["pointers"] is Verdict.FAIL
    assert "queries" in told(certificate, "pointers")


def test_a_number_of_the_host_that_a_kernel_is_given_is_found_by_double_capture() -> None:
    state = {"page": PAGE}

    def with_a_host_number(view: Any) -> dict[str, torch.Tensor]:
        made = backend.prep(view)
        backend.look_up_pages[(view.bucket.requests,)](
            view.seq_lens, view.req_pool_indices, view.tables.req_to_token, made["page_table"], made["lengths"],
            CONTEXT=CONTEXT, PAGE=state["page"], NUM_PAGES=CONTEXT // state["page"],
        )  # fmt: skip
        return made

    certificate = audited(with_a_host_number, CONTRACT, lambda: state.update(page=2 * PAGE))
    assert verdicts(certificate)["double_capture"] is Verdict.FAIL
    assert verdicts(audited(backend.prep, CONTRACT))["double_capture"] is Verdict.PASS


def test_the_example_runs() -> None:
    done = subprocess.run(
        [sys.executable, backend.__file__, "--device", "cuda"],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
        capture_output=True, text=True, check=False, timeout=280,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    num_replays, num_launches = done.stdout.split(" of ")[-1].split(" replays ")
    assert num_launches.split()[0] == num_replays
