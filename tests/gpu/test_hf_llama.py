"""Llama and Mistral of the transformers library on CUDA: their own forwards, captured, in one launch with the step."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("transformers", reason="needs transformers: pip install -e '.[hf]'")

EXAMPLES = Path(__file__).parents[2] / "examples"


def ran(name: str, *arguments: str) -> str:
    """Run an example on the GPU; it asserts that no bit differs from the eager model."""
    done = subprocess.run(
        [sys.executable, EXAMPLES / f"{name}.py", "--device", "cuda", *arguments],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
        capture_output=True,
        text=True,
        check=False,
        timeout=280,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_both_models_are_served_in_one_launch_a_step() -> None:
    said = ran("hf_llama", "--layers", "4", "--requests", "40", "--bench", "--steps", "20", "--without-library")
    steps = re.findall(r"(\d+) steps \{.*\}, all as the eager model bit for bit; (\d+) were one launch", said)
    assert len(steps) == 2
    assert all(served == launched for served, launched in steps)
    ways = re.findall(r"^(eager|graphglue) +([\d,]+) +([\d,]+)$", said, re.MULTILINE)
    assert [name for name, *_ in ways] == ["eager", "graphglue"]


def test_the_rungs_are_the_engine_s_own_way() -> None:
    said = ran("rungs")
    assert re.findall(r"40 steps, (\d+) differ", said) == ["0", "0", "0"]
