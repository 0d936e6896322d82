"""The demo as a whole: nothing differs, every route is taken, and a fault is found."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from graphglue import demo
from graphglue.demo import DemoResult
from graphglue.errors import ConfigError
from graphglue.preps import paged_decode

AZURE = Path(__file__).parents[4] / "shared" / "data" / "azure_llm_code_2023.csv"


@pytest.fixture(scope="module")
def result() -> DemoResult:
    """Serve enough requests for every route; seed 6 has silences, and piles up beyond the ladder."""
    return demo.run(device="cpu", requests=48, seed=6)


def test_no_bit_differs(result: DemoResult) -> None:
    assert result
    assert result.num_differences == 0
    assert result.differences == ()
    assert result.num_requests == 48
    # Every token but each request's first, which prefill samples, comes out of a compared step.
    assert result.num_tokens_compared == result.num_tokens - result.num_requests
    assert result.num_tokens_compared_unpadded == result.num_tokens_compared
    assert result.num_tensors_compared == 6 * result.num_steps  # four of metadata, two outputs


def test_prompts_are_read_in_segments(result: DemoResult) -> None:
    steps = result.prefill
    assert {(way.prep, way.forward, way.reason) for way in steps.routes} == {("glue", "graph", "padded")}
    assert steps.num_steps == sum(way.num_steps for way in steps.routes) > 0
    assert steps.largest_batch > 1
    assert result.prefill_buckets[-1] < result.num_prompt_tokens
    assert 0.0 < steps.padded_share < 0.5  # no bucket is more than twice as large as what it holds
    assert steps.num_tokens_compared == steps.num_tokens_compared_unpadded == result.num_requests
    assert steps.num_tensors_compared == 5 * steps.num_steps  # two of metadata, three outputs


def test_every_route_is_taken(result: DemoResult) -> None:
    ways = {(way.prep, way.forward, way.reason): way.num_steps for way in result.routes}
    assert set(ways) == {
        ("glue", "graph", "padded"),
        ("glue", "graph", "unpadded"),
        ("eager", "graph", "idle_eager"),
        ("eager", "eager", "over_ladder"),
    }
    assert sum(ways.values()) == result.num_steps
    assert result.largest_batch > 16
    assert 0.0 < result.padded_share < 0.5


def test_the_tape_says_that_it_is_not_for_speed(result: DemoResult) -> None:
    assert result.glued_us is not None
    assert result.eager_us is not None
    assert result.glued_us > 0
    assert result.eager_us > 0
    assert "for truth and not for speed" in result.timing_note


def test_the_json_has_every_field(result: DemoResult, tmp_path: Path) -> None:
    result.write_json(tmp_path / "demo.json")
    read = json.loads((tmp_path / "demo.json").read_text())
    assert read["num_differences"] == 0
    assert read["dtype"] == "float64"
    assert read["torch_version"] == torch.__version__
    assert read["device"].startswith("CPU")
    assert {way["reason"] for way in read["routes"]} >= {"padded", "unpadded", "idle_eager", "over_ladder"}
    assert {way["forward"] for way in read["prefill"]["routes"]} == {"graph"}


@pytest.mark.skipif(not AZURE.exists(), reason="needs the real trace in ../shared/data to read by path")
def test_the_real_trace_serves_without_a_difference() -> None:
    assert demo.run(trace=AZURE, device="cpu", requests=24)


def stale_tail(step: int, tensors: dict[str, torch.Tensor], num_requests: int) -> None:
    """Leave an earlier batch's lengths in the tail."""
    tensors["seq_lens"][num_requests:] = 7


def test_a_stale_tail_is_found() -> None:
    broken = demo.run(device="cpu", requests=4, fault=stale_tail)
    assert not broken
    assert broken.num_differences > len(broken.differences) == 8
    assert {found.name for found in broken.differences} >= {"positions", "cu_seq_lens"}
    positions = next(found for found in broken.differences if found.name == "positions")
    assert (positions.glued, positions.expected) == ("0", "6")


def test_a_stale_tail_of_a_prompt_is_found() -> None:
    """Requests that are not there own rows of the bucket."""

    def stale(step: int, tensors: dict[str, torch.Tensor], num_requests: int) -> None:
        spare = tensors["input_ids"].shape[0] - tensors["extend_lens"].sum()
        tensors["extend_lens"][num_requests : num_requests + 1] = spare.clamp(max=1)

    broken = demo.run(device="cpu", requests=2, prefill_fault=stale)
    assert not broken
    assert {found.name for found in broken.differences} >= {"prefill last_rows"}


def test_a_wrong_prompt_is_found_in_every_step() -> None:
    def other_prompt(step: int, tensors: dict[str, torch.Tensor], num_requests: int) -> None:
        tensors["input_ids"] += 1

    broken = demo.run(device="cpu", requests=1, prefill_fault=other_prompt)
    assert {found.name for found in broken.differences} >= {"prefill hidden", "prefill logits"}
    assert broken.num_differences > 2 * broken.prefill.num_steps  # and the decode steps behind them


def test_a_wrong_token_is_found() -> None:
    def swap(step: int, tensors: dict[str, torch.Tensor], num_requests: int) -> None:
        if step == 3:
            tensors["input_ids"][:num_requests] += 1

    broken = demo.run(device="cpu", requests=2, fault=swap)
    assert {found.name for found in broken.differences} >= {"next_token"}


def test_a_host_value_frozen_at_capture_is_found() -> None:
    """The classic of graph capture: a Python number that the graph keeps and the host moves on."""
    shipped, host = paged_decode.make(), {"shift": 0}

    def shifted(view: Any) -> dict[str, torch.Tensor]:
        metadata = shipped(view)
        return metadata | {"positions": metadata["positions"] + host["shift"]}

    def move_on(step: int, tensors: dict[str, torch.Tensor], num_requests: int) -> None:
        host["shift"] = 0 if step < 3 else 1

    broken = demo.run(device="cpu", requests=2, prep=shifted, fault=move_on)
    assert not broken
    assert ("positions", 3) in {(found.name, found.step) for found in broken.differences}


def test_requests_below_one_are_refused() -> None:
    with pytest.raises(ConfigError, match="requests=0: the demo serves at least one"):
        demo.run(requests=0)


def test_an_unknown_device_is_refused() -> None:
    with pytest.raises(ConfigError, match="device 'tpu': expected auto, cpu or cuda"):
        demo.run(device="tpu")


@pytest.mark.skipif(torch.accelerator.is_available(), reason="needs a machine without a GPU")
def test_cuda_without_a_gpu_is_refused() -> None:
    with pytest.raises(ConfigError, match="torch sees no CUDA GPU here"):
        demo.run(device="cuda")
