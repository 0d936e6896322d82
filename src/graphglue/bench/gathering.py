"""The ranks that ``gathers`` times: ``python -m graphglue.bench.gathering BACKEND SIZE ROUNDS FOLDER``.

With "gloo" it imports torch once and forks them; with "nccl" each has a GPU and a fresh process. Rank 0 leaves the
times in FOLDER. A rank must know the result on the host, so the bare all-gather of NCCL has its copies to the device
and back, and waits for them.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from graphglue.bench.gathers import (
    BACK_TO_BACK,
    BARE,
    FORWARD,
    FORWARD_US,
    GLOO,
    MEMORY,
    NCCL,
    PAUSE,
    SECONDS,
    SHARED,
    Times,
)
from graphglue.core.batch import Mode
from graphglue.device.base import open_device
from graphglue.graphs.base import Recording
from graphglue.ranks import Planner, RankFacts, RankGroup, facts

_PAUSE_S, _WARM_ROUNDS = 1e-3, 10
_NUM_LAYERS, _ROWS, _WIDTH = 40, 64, 7168  # a decode step: weights that are read once, and a sum over the ranks
Step = Callable[[], Any]


def main(backend: str, size: int, rounds: int, folder: Path) -> None:
    """Start the ranks and wait for them; what does not end in time ends with this process."""
    from torch import multiprocessing

    ranks = multiprocessing.start_processes(
        _run,
        (backend, size, rounds, folder),
        size,
        join=False,
        daemon=True,
        start_method="spawn" if backend == "nccl" else "fork",
    )
    deadline = time.monotonic() + SECONDS
    while time.monotonic() < deadline and not ranks.join(timeout=1.0):
        pass


def _run(rank: int, backend: str, size: int, rounds: int, folder: Path) -> None:
    torch.set_num_threads(1)
    if backend == "nccl":
        torch.accelerator.set_device_index(rank)
        backend = "cpu:gloo,cuda:nccl"
    dist.init_process_group(backend, f"file://{folder}/store", rank=rank, world_size=size)
    times = _by_host(rank, size, rounds) if backend == "gloo" else _by_all(rank, size, rounds)
    if rank == 0:
        (folder / "times.json").write_text(json.dumps(times))
    dist.barrier()
    dist.destroy_process_group()


def _by_host(rank: int, size: int, rounds: int) -> Times:
    return _between(_host_steps(rank, size), rounds, {BACK_TO_BACK: _nothing, PAUSE: _pause})


def _by_all(rank: int, size: int, rounds: int) -> Times:
    device = torch.device("cuda", torch.accelerator.current_device_index())
    forwards = dist.new_group(backend="nccl")
    steps = _host_steps(rank, size) | _device_steps(rank, size, forwards, device)
    forward = recorded(lambda rows: dist.all_reduce(rows, group=forwards), device)

    def begin() -> None:
        torch.accelerator.synchronize()
        forward.replay()

    def alone() -> None:
        forward.replay()
        torch.accelerator.synchronize()

    times = _between(steps, rounds, {BACK_TO_BACK: _nothing, PAUSE: _pause, FORWARD: begin})
    torch.accelerator.synchronize()
    times[FORWARD] |= _timed({FORWARD_US: alone}, rounds)
    forward.close()  # its collectives would keep the group from being destroyed (pytorch#115388)
    return times


def _between(steps: Mapping[str, Step], rounds: int, works: Mapping[str, Step]) -> Times:
    """Time the steps behind each kind of work; all ranks meet in between, or one would time another's lateness."""
    meeting = RankGroup(None, Planner([1]), timeout_s=60, exchange="memory")

    def behind(work: Step) -> Step:
        def before() -> None:
            work()
            meeting.every(True)

        return before

    return {name: _timed(steps, rounds, behind(work)) for name, work in works.items()}


def _nothing() -> None:
    return


def _pause() -> None:
    end = time.perf_counter() + _PAUSE_S
    while time.perf_counter() < end:
        pass


def _host_steps(rank: int, size: int) -> dict[str, Step]:
    sent = torch.zeros(facts.EXTRA, dtype=torch.int64)
    received = [torch.zeros_like(sent) for _ in range(size)]
    return {
        BARE[GLOO]: lambda: dist.all_gather(received, sent),
        GLOO: _agreeing(rank, RankGroup(None, _planner(), timeout_s=60)),
        MEMORY: _agreeing(rank, RankGroup(None, _planner(), timeout_s=60, exchange="memory")),
    }


def _device_steps(rank: int, size: int, forwards: dist.ProcessGroup, device: torch.device) -> dict[str, Step]:
    gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
    sent = torch.zeros(facts.EXTRA, dtype=torch.int64, pin_memory=True)
    received = torch.zeros(size * facts.EXTRA, dtype=torch.int64, pin_memory=True)
    device_sent, device_received = torch.zeros_like(sent, device=device), torch.zeros_like(received, device=device)
    own = dist.new_group(backend="nccl")

    def bare() -> None:
        device_sent.copy_(sent, non_blocking=True)
        gather(device_received, device_sent, group=own)
        received.copy_(device_received, non_blocking=True)
        torch.accelerator.current_stream(device).synchronize()

    return {
        BARE[NCCL]: bare,
        NCCL: _agreeing(rank, RankGroup(dist.new_group(backend="nccl"), _planner(), timeout_s=60)),
        SHARED: _agreeing(rank, RankGroup(forwards, _planner(), timeout_s=60)),
    }


def _planner() -> Planner:
    return Planner([1, 2, 4, 8, 16], row_bytes=1)


def _agreeing(rank: int, group: RankGroup) -> Step:
    stated = RankFacts(rank + 1, rank + 1, Mode.DECODE)
    return lambda: group.agree(stated)


def recorded(reduce: Callable[[torch.Tensor], Any], device: torch.device, width: int = _WIDTH) -> Recording:
    """Record a decode step: weights that are read once in each layer, and a sum over the ranks behind it."""
    rows = torch.zeros(_ROWS, width, device=device, dtype=torch.bfloat16)
    weight = torch.zeros(width, width, device=device, dtype=torch.bfloat16)

    def forward() -> torch.Tensor:
        flowing = rows
        for _ in range(_NUM_LAYERS):
            flowing = flowing @ weight
            reduce(flowing)
        return flowing

    recorder = open_device(device).recorder()
    with torch.no_grad(), recorder.session():
        forward()
        recorder.finish()
        return recorder.record(forward, strict=False)


def _timed(steps: Mapping[str, Step], rounds: int, before: Step = _nothing) -> dict[str, list[float]]:
    """Time the steps in turn, each in every round, with something before each that is not timed."""
    times: dict[str, list[float]] = {name: [] for name in steps}
    for number in range(rounds + _WARM_ROUNDS):
        for name, step in steps.items():
            before()
            begin = time.perf_counter_ns()
            step()
            if number >= _WARM_ROUNDS:
                times[name].append((time.perf_counter_ns() - begin) / 1e3)
    return times


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), Path(sys.argv[4]))
