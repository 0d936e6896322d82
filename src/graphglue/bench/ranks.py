"""What agreeing costs, and what the agreed steps look like on many ranks."""

from __future__ import annotations

import os
import time
from collections.abc import Mapping
from contextlib import closing
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

import graphglue as gg
from graphglue.bench import fleet, gathers
from graphglue.bench.contenders import Sources
from graphglue.bench.results import Row, Section
from graphglue.bench.sections import Settings
from graphglue.bench.timing import Sample, quiet
from graphglue.bench.workload import TOKENS_PER_REQUEST, Workload
from graphglue.demo.arrivals import fit, generate, read_trace
from graphglue.ranks import Planner, RankFacts, RankPlan

FLEETS = (8, 16, 32, 64, 128)
GATHERED = (2, 4, 8)
AFTER = "from agree's return to the replay's return, 64 ranks"
_BUCKET, _RANKS = 16, 64
IN_FLIGHT = (0, 8)


def run_ranks(settings: Settings, section: Section) -> None:
    """Simulate fleets, time the step behind the agreement, and an agreement beside a bare all-gather."""
    section.rows += _fleets(settings)
    section.rows += _after_agree(settings)
    section.rows += _gathers(settings)
    section.notes.append(
        "fleets: the trace's requests, decode buckets to 32, prompts to 2,048 tokens, a row of 14 KB, experts without "
        "all-to-all; host us is the planner's, on the gathered matrix"
    )


def label_of(num_ranks: int) -> str:
    """Name the row of a fleet."""
    return f"a fleet of {num_ranks} ranks"


def gathered_label(size: int, way: str = gathers.GLOO, between: str = gathers.BACK_TO_BACK) -> str:
    """Name the row of an agreement."""
    return f"agree on {size} ranks by {way}, {between}"


def _fleets(settings: Settings) -> list[Row]:
    rows = []
    steps = 1500 if settings.on_gpu or "ranks" in settings.only else 60
    for num_ranks in FLEETS:
        num_requests = min(8000, 48 * num_ranks)
        trace = generate(num_requests) if settings.trace is None else read_trace(settings.trace, num_requests)
        requests = fit(trace, max_prompt=fleet.MAX_PROMPT, max_generated=fleet.MAX_GENERATED, num_running=8 * num_ranks)
        tally = fleet.simulate(requests, num_ranks, steps)
        sample, row = tally.planner(), Row(label_of(num_ranks), num_steps=tally.steps)
        row.host_us, row.host_p99_us = sample.median_us, sample.p99_us
        row.values = {**tally.shares(), "planner_alone_us": fleet.planner_us(num_ranks, 200)}
        rows.append(row)
    return rows


class _Group:
    """Stand in for 64 ranks whose facts are gathered already, and note when an agreement returns."""

    rank, size, num_extra = 0, _RANKS, 0

    def __init__(self) -> None:
        self.planner = Planner([_BUCKET], width=TOKENS_PER_REQUEST)
        count = _BUCKET - 3
        row = RankFacts(count, count * TOKENS_PER_REQUEST, gg.Mode.DECODE).encoded()
        self._matrix = np.tile(row, (_RANKS, 1))
        self.returned_ns = 0

    def agree(self, facts: RankFacts) -> RankPlan:
        self._matrix[self.rank] = facts.encoded()
        plan = self.planner.plan_encoded(self._matrix)
        self.returned_ns = time.perf_counter_ns()
        return plan

    def every(self, flag: bool) -> bool:
        return flag

    def union(self, bits: int) -> int:
        return bits

    def compare(self, declaration: Mapping[str, str]) -> None:
        return


def _after_agree(settings: Settings) -> list[Row]:
    """Time what a rank still does once it knows the plan, while its peers may be in the collective already."""
    workload, group, raw = Workload(settings.device), _Group(), _BUCKET - 3
    sources = Sources.draw(workload, raw, _BUCKET)
    with closing(workload.runner([_BUCKET], ranks=group)) as runner:
        runner.capture(progress=False)
        step = _stepping(runner, raw, sources)
        rows = []
        for in_flight in IN_FLIGHT:
            times = []
            with quiet():
                for _ in range(settings.steps):
                    settings.gauge.synchronize()
                    for _ in range(in_flight):
                        step()
                    step()
                    times.append((time.perf_counter_ns() - group.returned_ns) / 1e3)
            settings.gauge.synchronize()
            sample = Sample(tuple(times))
            rows.append(Row(AFTER, _BUCKET, raw, in_flight, len(times), sample.median_us, sample.p99_us))
    return rows


def _stepping(runner: gg.Runner, raw: int, sources: Sources) -> Any:
    batches = [gg.Batch(raw, given) for given in sources.on_device]
    turn = iter(range(10**12))

    def step() -> None:
        runner.replay(batches[next(turn) % len(batches)])

    return step


def _gathers(settings: Settings) -> list[Row]:
    """Time agreements with gloo in forks, and all ways that there are with a GPU for each rank."""
    rows = []
    asked = settings.on_gpu or "ranks" in settings.only
    sizes = dict.fromkeys(GATHERED if asked else GATHERED[:1], "gloo")
    if settings.on_gpu and dist.is_available() and dist.is_nccl_available():
        sizes |= dict.fromkeys([size for size in GATHERED if size <= torch.accelerator.device_count()], "nccl")
    for size, backend in sizes.items():
        if hasattr(os, "fork") and dist.is_available() and dist.is_gloo_available():
            rows += gathered_rows(size, gathers.measure(size, max(20, min(500, settings.steps)), backend))
        else:
            rows.append(Row(gathered_label(size), note="needs gloo and fork"))
    return rows


def gathered_rows(size: int, times: gathers.Times) -> list[Row]:
    """Give a row for each way and what lies between, held against a bare gather in the same rounds."""
    rows = []
    for between, by_way in times.items():
        for way in (way for way in gathers.FLOORS if way in by_way):
            taken, floor = Sample(tuple(by_way[way])), Sample(tuple(by_way[gathers.FLOORS[way]]))
            row = Row(gathered_label(size, way, between), num_steps=len(taken.times_us))
            row.host_us, row.host_p99_us = taken.median_us, taken.p99_us
            row.floor_us, row.floor_p99_us = floor.median_us, floor.p99_us
            row.times_floor = row.host_us / row.floor_us
            row.note = f"the floor is {gathers.FLOORS[way]}; {os.cpu_count()} processors"
            if gathers.FORWARD_US in by_way:
                row.note += f"; the forward takes {Sample(tuple(by_way[gathers.FORWARD_US])).median_us:.0f} us"
            rows.append(row)
    return rows
