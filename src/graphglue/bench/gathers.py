"""What an agreement costs beside a bare all-gather of the same bytes: real processes, which meet through a backend.

``python -m graphglue.bench.gathers BACKEND SIZE ROUNDS FOLDER`` starts the ranks; rank 0 leaves the medians in FOLDER.
With gloo it imports torch once and forks them; with NCCL each has a GPU and a fresh process. A rank must know the
result on the host, so the bare all-gather of NCCL has its copies to the device and back, and waits for them.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from statistics import median
from typing import Any

_SECONDS = 120.0


def measure(size: int, rounds: int, backend: str = "gloo") -> dict[str, float]:
    """Give the medians of both, in us, as rank 0 sees them; the backend is "gloo" or "nccl".

    Raises:
        RuntimeError: the ranks did not end in time, or failed; the text has what they said.
    """
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-m", "graphglue.bench.gathers", backend, str(size), str(rounds), folder]
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(sys.path)}
        ran = subprocess.run(
            command, env=environment, capture_output=True, text=True, timeout=_SECONDS + 60, check=False
        )
        left = Path(folder) / "medians.json"
        if not left.exists():
            raise RuntimeError(f"{size} {backend} ranks gave no times: {ran.stderr[-800:]}")
        times: dict[str, float] = json.loads(left.read_text())
        return times


def main(backend: str, size: int, rounds: int, folder: Path) -> None:
    """Start the ranks and wait for them; what does not end in time ends with this process."""
    from torch import multiprocessing

    ranks = multiprocessing.start_processes(
        _run,
        (backend, size, rounds, folder),
        size,
        join=False,
        daemon=True,
        start_method="fork" if backend == "gloo" else "spawn",
    )
    deadline = time.monotonic() + _SECONDS
    while time.monotonic() < deadline and not ranks.join(timeout=1.0):
        pass


def _run(rank: int, backend: str, size: int, rounds: int, folder: Path) -> None:
    import torch
    import torch.distributed as dist

    from graphglue.core.batch import Mode
    from graphglue.ranks import Planner, RankFacts, RankGroup, facts

    torch.set_num_threads(1)
    if backend == "nccl":
        torch.accelerator.set_device_index(rank)
    dist.init_process_group(backend, f"file://{folder}/store", rank=rank, world_size=size)
    group = RankGroup(None, Planner([1, 2, 4, 8, 16], row_bytes=1), timeout_s=60)
    stated = RankFacts(rank + 1, rank + 1, Mode.DECODE)
    bare = _on_device(size, facts.EXTRA) if backend == "nccl" else _on_host(size, facts.EXTRA)
    medians = _medians({"bare": bare, "agree": lambda: group.agree(stated)}, rounds)
    if rank == 0:
        (folder / "medians.json").write_text(json.dumps(medians))
    dist.barrier()
    if backend == "nccl":
        dist.destroy_process_group()


def _on_host(size: int, num_fields: int) -> Callable[[], Any]:
    import torch
    import torch.distributed as dist

    sent = torch.zeros(num_fields, dtype=torch.int64)
    received = [torch.zeros_like(sent) for _ in range(size)]
    return lambda: dist.all_gather(received, sent)


def _on_device(size: int, num_fields: int) -> Callable[[], Any]:
    import torch
    import torch.distributed as dist

    index = torch.accelerator.current_device_index()
    accelerator: Any = torch.accelerator.current_accelerator()
    device = torch.device(accelerator.type, index)
    gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
    sent = torch.zeros(num_fields, dtype=torch.int64, pin_memory=True)
    received = torch.zeros(size * num_fields, dtype=torch.int64, pin_memory=True)
    device_sent, device_received = torch.zeros_like(sent, device=device), torch.zeros_like(received, device=device)

    def step() -> None:
        device_sent.copy_(sent, non_blocking=True)
        gather(device_received, device_sent)
        received.copy_(device_received, non_blocking=True)
        torch.accelerator.synchronize(device)

    return step


def _medians(steps: Mapping[str, Callable[[], Any]], rounds: int) -> dict[str, float]:
    """Time the steps in turn, each in every round."""
    times: dict[str, list[float]] = {name: [] for name in steps}
    for number in range(rounds + 10):
        for name, step in steps.items():
            begin = time.perf_counter_ns()
            step()
            if number >= 10:
                times[name].append((time.perf_counter_ns() - begin) / 1e3)
    return {name: median(taken) for name, taken in times.items()}


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), Path(sys.argv[4]))
