"""The example as a user starts it: four ranks under torchrun, which check themselves."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch.distributed as dist

ROOT = Path(__file__).parents[2]


@pytest.mark.skipif(not (dist.is_available() and dist.is_gloo_available()), reason="needs a torch with gloo")
@pytest.mark.timeout(240)
@pytest.mark.parametrize("exchange", ["host", "memory"])
def test_the_example_passes_on_four_ranks(exchange: str) -> None:
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT / "src"), *sys.path]), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "4"]
    ran = subprocess.run(
        [*command, str(ROOT / "examples" / "dp_ranks.py"), "--exchange", exchange],
        capture_output=True, text=True, timeout=200, env=environment, check=False,
    )  # fmt: skip
    assert ran.returncode == 0, ran.stderr[-4000:]
    assert "4 ranks agreed in 12 steps; 47 outputs equal the single process, bit for bit" in ran.stdout
    for what in (
        "graph  decode",
        "eager  decode",
        "graph  extend",
        "sum_len",
        "max_len",
        "rank_veto",
        "idle",
        "'extend': 2",
    ):
        assert what in ran.stdout, what


def test_it_says_how_to_start_it() -> None:
    environment = {name: value for name, value in os.environ.items() if name != "RANK"}
    environment["PYTHONPATH"] = os.pathsep.join([str(ROOT / "src"), *sys.path])
    command = [sys.executable, str(ROOT / "examples" / "dp_ranks.py")]
    ran = subprocess.run(command, capture_output=True, text=True, timeout=120, env=environment, check=False)
    assert ran.returncode != 0
    assert "torchrun --nproc-per-node 4 examples/dp_ranks.py" in ran.stderr
