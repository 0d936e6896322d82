"""What an agreement costs beside a bare all-gather of the same bytes: real processes, which meet through gloo.

``python -m graphglue.bench.gathers SIZE ROUNDS FOLDER`` imports torch once and forks the ranks; rank 0 leaves the
medians in FOLDER.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any

_SECONDS = 120.0


def measure(size: int, rounds: int) -> dict[str, float]:
    """Give the medians of both, in us, as rank 0 sees them.

    Raises:
        RuntimeError: the ranks did not end in time, or failed; the text has what they said.
    """
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-m", "graphglue.bench.gathers", str(size), str(rounds), folder]
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(sys.path)}
        ran = subprocess.run(
            command, env=environment, capture_output=True, text=True, timeout=_SECONDS + 60, check=False
        )
        left = Path(folder) / "medians.json"
        if not left.exists():
            raise RuntimeError(f"{size} ranks gave no times: {ran.stderr[-800:]}")
        times: dict[str, float] = json.loads(left.read_text())
        return times


def main(size: int, rounds: int, folder: Path) -> None:
    """Fork the ranks and wait for them; what does not end in time ends with this process."""
    from torch import multiprocessing

    ranks = multiprocessing.start_processes(
        _run, (size, rounds, folder), size, join=False, daemon=True, start_method="fork"
    )
    deadline = time.monotonic() + _SECONDS
    while time.monotonic() < deadline and not ranks.join(timeout=1.0):
        pass


def _run(rank: int, size: int, rounds: int, folder: Path) -> None:
    import torch
    import torch.distributed as dist

    from graphglue.core.batch import Mode
    from graphglue.ranks import Planner, RankFacts, RankGroup, facts

    torch.set_num_threads(1)
    dist.init_process_group("gloo", f"file://{folder}/store", rank=rank, world_size=size)
    group = RankGroup(None, Planner([1, 2, 4, 8, 16], row_bytes=1), timeout_s=60)
    stated = RankFacts(rank + 1, rank + 1, Mode.DECODE)
    sent = torch.zeros(facts.EXTRA, dtype=torch.int64)
    received = [torch.zeros_like(sent) for _ in range(size)]
    steps: dict[str, Callable[[], Any]] = {
        "bare": lambda: dist.all_gather(received, sent),
        "agree": lambda: group.agree(stated),
    }
    times: dict[str, list[float]] = {name: [] for name in steps}
    for number in range(rounds + 10):
        for name, step in steps.items():
            begin = time.perf_counter_ns()
            step()
            if number >= 10:
                times[name].append((time.perf_counter_ns() - begin) / 1e3)
    if rank == 0:
        (folder / "medians.json").write_text(json.dumps({name: median(taken) for name, taken in times.items()}))
    dist.barrier()


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[3]))
