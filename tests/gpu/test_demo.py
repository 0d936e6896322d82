"""The demo on CUDA: every step is compared with an eager twin, and nothing differs."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from graphglue import demo

EXAMPLES = Path(__file__).parents[2] / "examples"


@pytest.fixture(scope="module")
def result() -> demo.DemoResult:
    """Serve enough requests for every route; seed 6 has silences, and piles up beyond the ladder."""
    return demo.run(device="cuda", requests=48, seed=6)


def test_no_bit_differs(result: demo.DemoResult) -> None:
    assert result, result.differences
    assert result.num_differences == 0
    assert result.num_requests == 48
    assert result.num_tensors_compared == 6 * result.num_steps
    assert result.num_tokens_compared == result.num_tokens - result.num_requests


def test_every_route_is_taken(result: demo.DemoResult) -> None:
    assert {(way.prep, way.forward, way.reason) for way in result.routes} == {
        ("glue", "graph", "padded"),
        ("glue", "graph", "unpadded"),
        ("eager", "graph", "idle_eager"),
        ("eager", "eager", "over_ladder"),
    }


def test_prompts_are_read_in_segments(result: demo.DemoResult) -> None:
    steps = result.prefill
    assert {(way.prep, way.forward, way.reason) for way in steps.routes} == {("glue", "graph", "padded")}
    assert steps.largest_batch > 1
    assert steps.num_tensors_compared == 5 * steps.num_steps > 0
    assert steps.num_tokens_compared == result.num_requests
    assert steps.glued_us is not None


def test_it_says_where_it_ran(result: demo.DemoResult) -> None:
    assert result.device == torch.cuda.get_device_name()
    assert result.dtype == "bfloat16"
    assert result.glued_us is not None
    assert result.eager_us is not None


def test_a_stale_tail_would_be_found() -> None:
    def stale(step: int, tensors: dict[str, torch.Tensor], num_requests: int) -> None:
        tensors["seq_lens"][num_requests:] = 7

    broken = demo.run(device="cuda", requests=4, fault=stale)
    assert not broken
    assert {found.name for found in broken.differences} >= {"positions", "cu_seq_lens"}


def test_a_stale_tail_of_a_prompt_would_be_found() -> None:
    def stale(step: int, tensors: dict[str, torch.Tensor], num_requests: int) -> None:
        spare = tensors["input_ids"].shape[0] - tensors["extend_lens"].sum()
        tensors["extend_lens"][num_requests : num_requests + 1] = spare.clamp(max=1)

    broken = demo.run(device="cuda", requests=2, prefill_fault=stale)
    assert not broken
    assert {found.name for found in broken.differences} >= {"prefill last_rows"}


def test_the_example_of_prefill_passes() -> None:
    """Both runners capture on one stream and into one pool; the example asserts that no bit differs."""
    done = subprocess.run(
        [sys.executable, EXAMPLES / "prefill_segments.py", "--device", "cuda"],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
        capture_output=True,
        text=True,
        check=False,
        timeout=280,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "0 differences from eager steps" in done.stdout


def test_a_trace_serves_without_a_difference(tmp_path: Path) -> None:
    rows = [f"2023-11-16 18:17:{second:02d}.9799600,{400 + 37 * second},{3 + second % 9}" for second in range(30)]
    trace = tmp_path / "trace.csv"
    trace.write_text("\n".join(["TIMESTAMP,ContextTokens,GeneratedTokens", *rows]) + "\n")
    served = demo.run(trace=trace, device="cuda", requests=24)
    assert served, served.differences
    assert served.num_requests == 24


def test_the_command_line(tmp_path: Path) -> None:
    pytest.importorskip("typer", reason="needs the extra cli")
    pytest.importorskip("rich", reason="needs the extra cli")
    path = tmp_path / "demo.json"
    done = subprocess.run(
        [sys.executable, "-m", "graphglue", "demo", "--device", "cuda", "--requests", "16", "--json", str(path)],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
        capture_output=True,
        text=True,
        check=False,
        timeout=280,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "0 differences" in done.stdout
    assert json.loads(path.read_text())["num_differences"] == 0
