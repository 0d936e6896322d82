"""What an agreement costs on real ranks, by each way that facts meet, beside a bare all-gather of the same bytes."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

# The ways. The last is what RankGroup(None) keeps clear of.
GLOO, NCCL, MEMORY, SHARED = "gloo", "NCCL", "shared memory", "the forward's NCCL communicator"
# What each is held against, a gather of the same bytes alone.
BARE = {GLOO: "a bare all_gather by gloo", NCCL: "a bare all_gather by NCCL with its copies, on the current stream"}
FLOORS = {GLOO: BARE[GLOO], MEMORY: BARE[GLOO], NCCL: BARE[NCCL], SHARED: BARE[NCCL]}
# What ranks do between two agreements.
BACK_TO_BACK, PAUSE, FORWARD = "back to back", "after 1 ms of other work", "while a forward is under way"
FORWARD_US = "the forward alone"
SECONDS = 120.0
Times = dict[str, dict[str, list[float]]]


def measure(size: int, rounds: int, backend: str = "gloo") -> Times:
    """Give the times in us as rank 0 sees them: what lies between two agreements -> way or bare gather -> times.

    With "gloo" the ranks are forks of one process; with "nccl" each has a GPU, and all ways are timed.

    Raises:
        RuntimeError: the ranks did not end in time, or failed; the text has what they said.
    """
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-m", "graphglue.bench.gathering", backend, str(size), str(rounds), folder]
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(sys.path)}
        ran = subprocess.run(
            command, env=environment, capture_output=True, text=True, timeout=SECONDS + 60, check=False
        )
        left = Path(folder) / "times.json"
        if not left.exists():
            raise RuntimeError(f"{size} {backend} ranks gave no times: {ran.stderr[-800:]}")
        times: Times = json.loads(left.read_text())
        return times
