"""Run one case on several real processes, which meet through gloo: ``python -m tests.ranks.launch CASE SIZE FOLDER``.

One process imports everything and forks the ranks, because importing torch is what takes the time. Each rank
leaves its result, or its traceback, in FOLDER; a rank that does not end in time is killed.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
import traceback
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
SECONDS = 90.0


def launch(case: str, size: int, folder: Path) -> list[Any]:
    """Run a case from a test; give the result of each rank.

    Raises:
        AssertionError: a rank raised, or did not end in time; the message has its traceback.
    """
    path = os.pathsep.join([str(ROOT), str(ROOT / "src"), *sys.path])
    environment = {**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
    command = [sys.executable, "-m", "tests.ranks.launch", case, str(size), str(folder)]
    ran = subprocess.run(
        command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=SECONDS + 60, check=False
    )
    results = []
    for rank in range(size):
        left = folder / f"{rank}.json"
        assert left.exists(), f"rank {rank} of {case} left nothing: {ran.stdout[-3000:]}{ran.stderr[-3000:]}"
        result = json.loads(left.read_text())
        assert "error" not in result, f"rank {rank} of {case}: {result['error']}"
        results.append(result["value"])
    return results


def main(case: str, size: int, folder: Path) -> None:
    from tests.ranks import cases

    ranks = {}
    for rank in range(size):
        child = os.fork()
        if child == 0:
            run_rank(getattr(cases, case), rank, size, folder)
            os._exit(0)
        ranks[child] = rank
    deadline = time.monotonic() + SECONDS
    while ranks and time.monotonic() < deadline:
        child, _ = os.waitpid(-1, os.WNOHANG)
        if child:
            ranks.pop(child)
        else:
            time.sleep(0.02)
    for child, rank in ranks.items():
        write(folder, rank, {"error": f"did not end within {SECONDS} s"})
        os.kill(child, signal.SIGKILL)


def run_rank(case: Any, rank: int, size: int, folder: Path) -> None:
    from datetime import timedelta

    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    try:
        store = f"file://{folder}/store"
        dist.init_process_group("gloo", store, timeout=timedelta(seconds=60), rank=rank, world_size=size)
        write(folder, rank, {"value": case(rank, size)})
    except BaseException:
        write(folder, rank, {"error": traceback.format_exc()})
    sys.stdout.flush()
    sys.stderr.flush()


def write(folder: Path, rank: int, result: dict[str, Any]) -> None:
    (folder / f"{rank}.json").write_text(json.dumps(result))


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), Path(sys.argv[3]))
