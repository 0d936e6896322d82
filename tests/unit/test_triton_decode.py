"""The Triton backend of examples/triton_decode.py on the CPU: its kernels interpreted, and the example itself."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("triton") is None, reason="needs Triton: pip install -e '.[triton]'"
)


def ran(*command: str) -> str:
    """Run Python in a process of its own, in which Triton interprets its kernels; give what it printed."""
    path = os.pathsep.join([str(ROOT / "src"), str(ROOT), *filter(None, sys.path)])
    done = subprocess.run(
        [sys.executable, *command],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": path, "TRITON_INTERPRET": "1"},
        capture_output=True,
        text=True,
        check=False,
        timeout=280,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_interpreted_kernels() -> None:
    file = Path(__file__).with_name("interpreted_triton.py")
    said = ran("-m", "pytest", "-q", "-p", "no:xdist", "-p", "no:cacheprovider", str(file))
    assert "7 passed" in said


def test_the_example_says_what_the_tape_refuses_and_is_right() -> None:
    said = ran("examples/triton_decode.py")
    assert "data_ptr hands out an address, and a kernel launched by address escapes the tape" in said
    assert "3 steps as the reference, each row bit for bit as its request alone" in said
