"""What a draft's step costs its host, in several processes at once that share one device.

``python -m graphglue.bench.drafts DEVICE SIZE ROUNDS FOLDER`` starts the processes; each leaves its times in FOLDER.
On the CPU it imports torch once and forks them; a GPU needs a fresh process for each.

Source of the question: in the leading engine the draft prep took 170 us from the host and 58 us glued, and 620 and
64 us on the worst of 16 ranks.
"""

from __future__ import annotations

import gc
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from statistics import median
from typing import Any

import torch

from graphglue.bench import draft_steps
from graphglue.bench.draft_steps import (
    AGAIN,
    BARE,
    BUCKET,
    COMPILED,
    EAGER,
    FLOOR,
    GLUED,
    ONE,
    PREP_EAGER,
    PREP_GLUED,
    RAW,
)
from graphglue.bench.results import Row, Section
from graphglue.bench.sections import Settings

NUM_PROCESSES = 8
GLUE_US = "glue_us"
_LABELS = (FLOOR, PREP_EAGER, PREP_GLUED, EAGER, GLUED, ONE, COMPILED, BARE, AGAIN)
_TIMED_SECONDS = 6.0  # of each group of contenders in a process
_SECONDS = {"cpu": 150.0, "cuda": 90.0}  # of all, their start included

Times = dict[str, list[float]]  # of one process, by label: median and p99 in us, and the steps


def run_drafts(settings: Settings, section: Section) -> None:
    """Time a padded draft step in several processes at once; in two of the tape's, which say nothing of speed."""
    if not settings.on_gpu and not hasattr(os, "fork"):
        section.rows.append(Row(ONE, BUCKET, RAW, note="needs fork"))
        return
    times = measure(settings.device, NUM_PROCESSES if settings.on_gpu else 2, min(1000, settings.steps))
    section.rows += rows_of(times)
    if section.find(COMPILED) is None:
        section.notes.append(f"not timed, because the draft prep does not compile here: {COMPILED}")
    section.notes.append(
        f"{len(times)} processes at once on one device, {os.cpu_count()} processors; host us and p99 are medians over "
        "the processes, worst_us the largest median of one; in the leading engine, on 16 ranks, the draft prep took "
        "170 us eager and 58 us glued, on the worst rank 620 and 64 us"
    )


def rows_of(times: Sequence[Times]) -> list[Row]:
    """Give a row for each contender, over all processes."""
    rows = []
    for label in (label for label in _LABELS if all(label in one for one in times)):
        medians, p99s, steps = zip(*(one[label] for one in times), strict=True)
        row = Row(label, BUCKET, RAW, 0, int(min(steps)), median(medians), median(p99s))
        row.floor_us, row.floor_p99_us = (median(one[FLOOR][place] for one in times) for place in (0, 1))
        row.times_floor = row.host_us / row.floor_us if row.host_us is not None else None
        row.values = {"worst_us": max(medians), "worst_p99_us": max(p99s)}
        rows.append(row)
    found = {row.label: row for row in rows}
    for label in (ONE, COMPILED):
        if label in found:
            found[label].values |= _beyond(times, label, GLUE_US)
    found[AGAIN].values |= _beyond(times, AGAIN, "noise_us")
    return rows


def _beyond(times: Sequence[Times], label: str, name: str) -> dict[str, float | bool]:
    """Say what a contender takes beyond fill and forward, each process compared with itself."""
    more = [one[label][0] - one[BARE][0] for one in times]
    return {name: median(more), f"worst_{name}": max(more, key=abs)}


def measure(device: torch.device, size: int, rounds: int) -> list[Times]:
    """Give what each process saw.

    Raises:
        RuntimeError: a process did not end in time, or failed; the text has what it said.
    """
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-m", "graphglue.bench.drafts", str(device), str(size), str(rounds), folder]
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(sys.path)}
        ran = subprocess.run(
            command, env=environment, capture_output=True, text=True, timeout=_SECONDS["cpu"] + 60, check=False
        )
        left = [Path(folder) / f"{rank}.json" for rank in range(size)]
        if missing := [path.stem for path in left if not path.exists()]:
            raise RuntimeError(f"of {size} processes {missing} gave no times: {ran.stderr[-800:]}")
        return [json.loads(path.read_text()) for path in left]


def main(device: str, size: int, rounds: int, folder: Path) -> None:
    """Start the processes and wait for them; what does not end in time ends with this process."""
    from torch import multiprocessing

    kind = torch.device(device).type
    method = "fork" if kind == "cpu" else "spawn"
    if method == "fork":  # all that the tape's first recording imports, once for all of them
        with draft_steps.DraftWork(torch.device(device)).runner():
            gc.freeze()
    barrier = multiprocessing.get_context(method).Barrier(size)
    processes = multiprocessing.start_processes(
        _run, (device, rounds, folder, barrier), size, join=False, daemon=True, start_method=method
    )
    deadline = time.monotonic() + _SECONDS[kind]
    while time.monotonic() < deadline and not processes.join(timeout=1.0):
        pass


def _run(rank: int, device: str, rounds: int, folder: Path, barrier: Any) -> None:
    torch.set_num_threads(1)
    found = torch.device(device)
    if found.type != "cpu":
        torch.accelerator.set_device_index(found.index or 0)
    times = draft_steps.measure(found, rounds, _TIMED_SECONDS, lambda: barrier.wait(_SECONDS[found.type]))
    (folder / f"{rank}.json").write_text(json.dumps(times))


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), Path(sys.argv[4]))
