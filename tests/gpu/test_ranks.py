"""Ranks on CUDA: a collective inside the captured forward, counts in the same launch, and facts through NCCL.

One GPU is one rank here; the example runs on as many as there are.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

import graphglue as gg
from graphglue.ranks import Padding, Planner, RankFacts, RankGroup, RankPlan

ROOT = Path(__file__).parents[2]
DECODE = gg.Mode.DECODE
SLOTS = (
    gg.Slot("seq_lens", axis="request", dtype=torch.int64, pad=1),
    gg.Slot("input_ids", axis="token", dtype=torch.int64, pad=0),
    gg.Slot("rank_counts", axis="rank", dtype=torch.int32, pad=0, value=gg.RANK_COUNTS),
    gg.Slot("real_tokens", axis="fixed", inner=(1,), dtype=torch.int64, pad=0, value=gg.RAW_TOKENS),
)


@pytest.fixture(scope="module", autouse=True)
def world(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """A world of one rank, with both backends, as serving engines have it."""
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    torch.cuda.set_device(0)
    store = f"file://{tmp_path_factory.mktemp('ranks')}/store"
    dist.init_process_group("cpu:gloo,cuda:nccl", store, rank=0, world_size=1)
    yield
    torch.cuda.synchronize()
    dist.destroy_process_group()


def prep(view: gg.View) -> dict[str, torch.Tensor]:
    return {"positions": view.seq_lens - 1}


def forward(view: gg.View, metadata: Any) -> torch.Tensor:
    gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
    num_rows, meeting = view.input_ids.shape[0], view.meeting
    real = torch.arange(num_rows, device=view.input_ids.device) < view.real_tokens
    own = torch.where(real, view.input_ids + metadata["positions"], 0)
    shared = own.new_zeros(max(num_rows, meeting.rows))
    if meeting.padding is Padding.SUM_LEN:
        shared[:num_rows] = own
        dist.all_reduce(shared)
    else:
        gather(shared[:num_rows], own)
    return own + shared.sum()


def runner_of(ranks: Any, ladder: tuple[int, ...] = (2, 4, 8), **config: Any) -> gg.Runner:
    registry = gg.Registry()
    contract = gg.PrepContract(
        name="positions", reads={"seq_lens": 1}, outputs={"positions": "request"}, modes={DECODE}, idle="glue"
    )
    registry.register(contract)(prep)
    runner = gg.Runner(
        slots=SLOTS, ladder=ladder, registry=registry, prep="positions", forward=forward, device="cuda", ranks=ranks,
        config=gg.RunnerConfig(**config),
    )  # fmt: skip
    runner.capture(progress=False)
    return runner


def batch_of(requests: int, on_device: bool = False) -> gg.Batch:
    if not requests:
        return gg.Batch.idle()
    sources = {"seq_lens": torch.arange(1, requests + 1), "input_ids": 10 * torch.arange(requests)}
    return gg.Batch(requests, {name: value.cuda() if on_device else value for name, value in sources.items()})


def expected(requests: int) -> list[int]:
    own = [10 * row + row for row in range(requests)]
    return [one + sum(own) for one in own]


@pytest.mark.parametrize("padding", list(Padding))
@pytest.mark.parametrize("exchange", ["host", "device"])
def test_a_collective_is_part_of_the_one_launch(padding: Padding, exchange: str) -> None:
    """The facts go by gloo in host memory, or by NCCL on a stream of their own."""
    process_group = dist.new_group(backend="nccl") if exchange == "device" else None
    group = RankGroup(process_group, Planner([2, 4, 8], rule=lambda counts: padding), timeout_s=30, check_every=2)
    with runner_of(group) as runner:
        for requests in (3, 8, 1, 0, 5, 8):
            for on_device in (False, True):
                step = runner.replay(batch_of(requests, on_device))
                assert step.decision.forward is gg.Route.GRAPH
                assert step.decision.key.padding is padding
                assert step.outputs.tolist() == expected(requests)
                assert runner.view(8).rank_counts.tolist() == [step.decision.bucket.tokens]
        stats = runner.stats()
        assert stats["one_launch"] == stats["steps"] == 12
        assert not stats["launch_fallbacks"]
        step = runner.replay(batch_of(9))
        assert step.decision.forward_reason is gg.Reason.OVER_LADDER
        assert step.outputs.tolist() == expected(9)


def test_facts_do_not_wait_for_the_forward_before_them() -> None:
    """The exchange runs on a stream of its own, beside half a second of other work."""
    group = RankGroup(dist.new_group(backend="nccl"), Planner([2]), timeout_s=30)
    group.agree(RankFacts(1, 1, DECODE))
    torch.cuda.synchronize()
    begin, busy = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    begin.record()
    torch.cuda._sleep(1_000_000_000)
    busy.record()
    group.agree(RankFacts(1, 1, DECODE))
    assert not busy.query()
    torch.cuda.synchronize()


class Peers:
    """Stand in for a group of four, whose other ranks say what a test has them say."""

    rank, size, num_extra = 1, 4, 0

    def __init__(self) -> None:
        self.planner = Planner([2, 4, 8], row_bytes=1, all_reduce_limit_bytes=100)
        self.others = [RankFacts(1, 1, DECODE)] * 3

    def agree(self, facts: RankFacts) -> RankPlan:
        first, *rest = self.others
        return self.planner.plan([first, facts, *rest])

    def every(self, flag: bool) -> bool:
        return flag

    def union(self, bits: int) -> int:
        return bits

    def compare(self, declaration: Any) -> None:
        return


def local(view: gg.View, metadata: Any) -> torch.Tensor:
    return view.input_ids + metadata["positions"] + view.rank_counts.sum()


def test_the_counts_of_all_ranks_are_staged_by_the_same_launch() -> None:
    peers, registry = Peers(), gg.Registry()
    contract = gg.PrepContract(
        name="positions", reads={"seq_lens": 1}, outputs={"positions": "request"}, modes={DECODE}, idle="glue"
    )
    registry.register(contract)(prep)
    runner = gg.Runner(
        slots=SLOTS, ladder=[2, 4, 8], registry=registry, prep="positions", forward=local, device="cuda", ranks=peers
    )
    runner.capture(progress=False)
    own = torch.tensor([11 * row for row in range(3)])
    for largest, bucket in ((1, 4), (8, 8), (2, 4), (5, 8)):
        peers.others = [RankFacts(largest, largest, DECODE)] * 3
        step = runner.replay(batch_of(3))
        assert (step.decision.forward, step.decision.bucket.tokens) == (gg.Route.GRAPH, bucket)
        assert torch.equal(step.outputs.cpu(), own + 4 * bucket)
        assert runner.view(8).rank_counts.tolist() == [bucket] * 4
    assert runner.stats()["one_launch"] == 4
    peers.others = [RankFacts(1, 1, DECODE, vote=False), RankFacts(2, 2, DECODE), RankFacts(5, 5, DECODE)]
    step = runner.replay(batch_of(3))
    assert step.decision.reason is gg.Reason.RANK_VETO
    assert torch.equal(step.outputs.cpu(), own + 1 + 3 + 2 + 5)  # SUM_LEN: each rank's own rows
    refused = gg.Batch(3, {"seq_lens": [1], "input_ids": [1, 2, 3]})
    with pytest.raises(gg.BindError, match="seq_lens"):
        runner.replay(refused)
    runner.close()


def told_by_ranks(script: str, *options: str) -> tuple[int, str]:
    """Run a script with a GPU for each rank, two at most; give how many ranks there were, and what they printed."""
    num_ranks = min(2, torch.cuda.device_count())
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT / "src"), str(ROOT), *sys.path])}
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(num_ranks)]
    command += [str(ROOT / script), *options]
    ran = subprocess.run(command, capture_output=True, text=True, timeout=280, env=environment, check=False)
    assert ran.returncode == 0, ran.stdout[-2000:] + ran.stderr[-6000:]
    return num_ranks, ran.stdout


@pytest.mark.parametrize("exchange", ["host", "device", "memory"])
def test_the_example_passes_with_a_gpu_for_each_rank(exchange: str) -> None:
    num_ranks, text = told_by_ranks("examples/dp_ranks.py", "--device", "cuda", "--exchange", exchange)
    assert f"{num_ranks} ranks agreed in 12 steps" in text


@pytest.mark.parametrize("exchange", ["host", "device", "memory", "nccl alone"])
def test_ranks_on_several_gpus_replay_decode_and_segmented_prefill_in_one_bucket(exchange: str) -> None:
    """Both paddings; a rank that idles, vetoes, is refused, or fails in an eager break. Each checks its own rows."""
    num_ranks, text = told_by_ranks("tests/gpu/rank_steps.py", "--exchange", exchange)
    print(text)
    told = [json.loads(line.split(" ", 2)[2]) for line in text.splitlines() if line.startswith("RANK ")]
    assert len(told) == num_ranks
    for rank, one in enumerate(told):
        decode = ["graph"] * 5 + ["eager", "refused" if rank else "graph" if num_ranks == 1 else "eager"]
        prefill = ["graph"] * 3 + ["eager" if num_ranks > 1 else "graph", "eager", "graph", "graph", "graph"]
        if num_ranks > 1:
            prefill[5:7] = ["SegmentError", "BindError"] if rank else ["graph", "eager"]
        for padding in Padding:
            assert one[f"decode {padding.value}"]["seen"] == decode
            assert one[f"prefill {padding.value}"]["seen"] == prefill
        assert not one["waits"]  # an agreement, for the forward before it
        if exchange == "nccl alone" and num_ranks > 1:  # the same check where it has to
            assert one["waits on the forward's communicator"]
        for of_one_story in (one[f"{what} {padding.value}"] for what in ("decode", "prefill") for padding in Padding):
            # The forward's collectives are a child of the one launch, or of the launch that its first segment is in.
            assert of_one_story["fallbacks"] == []
            assert of_one_story["one_launch"] == sum(way == "graph" for way in of_one_story["seen"])
