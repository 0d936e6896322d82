"""What each of several GPUs' processes runs: ``torchrun --nproc-per-node 2 tests/gpu/rank_steps.py --exchange host``.

Decode with a collective inside the one launch, and prefill in segments with collectives in each; ranks that idle,
veto, are refused and fail. Every rank holds its rows against the whole group's step computed alone; rank 0 prints
what it saw as JSON.
"""

from __future__ import annotations

import argparse
import json
import os
import time
from collections.abc import Callable
from functools import partial
from statistics import median
from typing import Any

import torch
import torch.distributed as dist

import graphglue as gg
from graphglue.ranks import Padding, Planner, RankGroup
from tests.ranks import prefill
from tests.ranks.cases import prefill_in_segments

SLOTS = (
    gg.Slot("seq_lens", axis="request", dtype=torch.int64, pad=1),
    gg.Slot("input_ids", axis="token", dtype=torch.int64, pad=0),
    gg.Slot("rank_counts", axis="rank", dtype=torch.int32, pad=0, value=gg.RANK_COUNTS),
    gg.Slot("real_tokens", axis="fixed", inner=(1,), dtype=torch.int64, pad=0, value=gg.RAW_TOKENS),
)
DECODE_STORY = [(3, 2), (3, 0), (0, 8), (8, 8), (0, 0), (9, 2), (1, 5)]
ROUNDS, CYCLES = 200, 200_000_000
Build = Callable[..., RankGroup]


def runner_of(group: RankGroup, rank: int, device: str) -> gg.Runner:
    """Capture a decode runner whose ranks sum their rows."""
    join, registry = prefill.joined(rank), gg.Registry()

    def forward(view: gg.View, metadata: Any) -> torch.Tensor:
        rows = view.input_ids + metadata["positions"]
        own = torch.where(torch.arange(rows.shape[0], device=rows.device) < view.real_tokens, rows, 0)
        return own + join(own[:, None], view).sum()

    contract = gg.PrepContract(
        name="positions", reads={"seq_lens": 1}, outputs={"positions": "request"}, modes={gg.Mode.DECODE}, idle="glue"
    )
    registry.register(contract)(lambda view: {"positions": view.seq_lens - 1})
    runner = gg.Runner(
        slots=SLOTS, ladder=[2, 4, 8], registry=registry, prep="positions", forward=forward, device=device, ranks=group
    )
    runner.capture(progress=False)
    return runner


def batch_of(requests: int) -> gg.Batch:
    """Give a step, with tokens that tell its rows apart."""
    if not requests:
        return gg.Batch.idle()
    return gg.Batch(requests, {"seq_lens": torch.arange(1, requests + 1), "input_ids": 10 * torch.arange(requests)})


def expected_of(loads: list[int], rank: int) -> list[int]:
    """Compute a rank's rows, and what all of them add."""
    total = sum(11 * row for load in loads for row in range(load))
    return [11 * row + total for row in range(loads[rank])]


def decode(rank: int, size: int, device: str, build: Build, padding: Padding) -> dict[str, Any]:
    """Run decode steps with one padding, captured and eager."""
    group = build(Planner([2, 4, 8], rule=RULES[padding]), timeout_s=30, check_every=2)
    seen = []
    with runner_of(group, rank, device) as runner:
        for number, line in enumerate(DECODE_STORY):
            loads = [line[other % 2] for other in range(size)]
            batch = batch_of(loads[rank])
            if number == 6 and size > 1:  # rank 1 is refused, and takes part with no rows
                loads[1] = 0
                batch = gg.Batch(3, {"seq_lens": [1], "input_ids": [1, 2, 3]}) if rank == 1 else batch
            try:
                step = runner.replay(batch)
            except gg.BindError:
                seen.append("refused")
                continue
            assert step.outputs.tolist() == expected_of(loads, rank), (number, step.decision)
            seen.append(step.decision.forward.value)
        stats = runner.stats()
        times = timed(group, runner, batch_of(3))
    return {"seen": seen, "one_launch": stats["one_launch"], "fallbacks": list(stats["launch_fallbacks"]), **times}


def synchronize() -> None:
    """Wait for the device, where there is one."""
    if torch.cuda.is_initialized():
        torch.cuda.synchronize()


def timed(group: RankGroup, runner: gg.Runner, batch: gg.Batch) -> dict[str, float]:
    """Give the host's medians for an agreement, and for the step behind it."""
    steps: dict[str, list[float]] = {"agree_us": [], "replay_us": []}
    facts = runner.facts(batch)
    for number in range(ROUNDS + 10):
        synchronize()
        begin = time.perf_counter_ns()
        plan = group.agree(facts)
        between = time.perf_counter_ns()
        runner.replay(batch, plan=plan)
        end = time.perf_counter_ns()
        if number >= 10:
            steps["agree_us"].append((between - begin) / 1e3)
            steps["replay_us"].append((end - between) / 1e3)
    synchronize()
    return {name: round(median(taken), 1) for name, taken in steps.items()}


def prefill_times(rank: int, build: Build, device: str) -> dict[str, float]:
    """Time a segmented prefill."""
    group = build(prefill.planner(), timeout_s=30)
    with prefill.prefill_runner(group, prefill.Prefill(prefill.joined(rank), device), device=device) as runner:
        runner.capture(progress=False)
        return timed(group, runner, prefill.Work([9, 4]).batch())


def waits(rank: int, group: RankGroup, device: str) -> bool:
    """Tell whether an agreement waits for a forward that is under way: a tenth of a second, then a collective."""

    def slow(view: gg.View, metadata: Any) -> torch.Tensor:
        torch.cuda._sleep(CYCLES)
        return view.input_ids + join(view.input_ids[:, None], view).sum(0)

    join, registry, over = prefill.joined(rank), gg.Registry(), torch.cuda.Event()
    contract = gg.PrepContract(
        name="none", reads={"seq_lens": 1}, outputs={"lens": "request"}, modes={gg.Mode.DECODE}, idle="glue"
    )
    registry.register(contract)(lambda view: {"lens": view.seq_lens + 0})
    with gg.Runner(
        slots=SLOTS, ladder=[2], registry=registry, prep="none", forward=slow, device=device, ranks=group
    ) as runner:
        runner.capture(progress=False)
        batch = batch_of(2)
        for _ in range(2):  # the first step makes what is made once
            plan = group.agree(runner.facts(batch))
            runner.replay(batch, plan=plan)
            over.record()
            group.agree(runner.facts(batch))
            waited = over.query()
            synchronize()
    return waited


def max_len(counts: Any) -> Padding:
    return Padding.MAX_LEN


def sum_len(counts: Any) -> Padding:
    return Padding.SUM_LEN


RULES: dict[Padding, Callable[[Any], Padding]] = {Padding.MAX_LEN: max_len, Padding.SUM_LEN: sum_len}


def main() -> None:
    options = argparse.ArgumentParser()
    options.add_argument("--exchange", choices=("host", "device", "memory", "nccl alone"), default="host")
    options.add_argument("--dry", action="store_true", help="on the CPU with gloo, to check this file")
    chosen = options.parse_args()
    torch.set_num_threads(1)
    device = "cpu" if chosen.dry else f"cuda:{os.environ['LOCAL_RANK']}"
    if not chosen.dry:
        torch.cuda.set_device(device)
    backends = {"nccl alone": "nccl"}.get(chosen.exchange, "cpu:gloo,cuda:nccl")
    dist.init_process_group("gloo" if chosen.dry else backends)
    own = dist.new_group(backend="nccl") if chosen.exchange == "device" else None
    build = partial(RankGroup, own, exchange="memory" if chosen.exchange == "memory" else "group")
    rank, size = dist.get_rank(), dist.get_world_size()
    told: dict[str, Any] = {"ranks": size, "exchange": chosen.exchange}
    for padding in Padding:
        told[f"decode {padding.value}"] = decode(rank, size, device, build, padding)
        told[f"prefill {padding.value}"] = prefill_in_segments(rank, size, device, build, RULES[padding])
    told["prefill times"] = prefill_times(rank, build, device)
    if not chosen.dry:
        told["waits"] = waits(rank, build(Planner([2]), timeout_s=30), device)
        if chosen.exchange == "nccl alone":  # what RankGroup(None) keeps clear of
            told["waits on the forward's communicator"] = waits(
                rank, RankGroup(dist.group.WORLD, Planner([2]), timeout_s=30), device
            )
    for number in range(size):  # one line after the other
        dist.barrier()
        if number == rank:
            print(f"RANK {rank} {json.dumps(told)}", flush=True)
    synchronize()
    dist.barrier()  # no rank tears the group down while another is still in it
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
