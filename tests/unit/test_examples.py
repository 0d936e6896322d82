"""Run every example as a user does; each asserts its own result."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
# The examples of other issues may need a GPU or several ranks; those bring tests of their own.
ON_ANY_MACHINE = ("quickstart_cpu", "write_a_prep", "decode_loop", "check_a_backend")


@pytest.mark.parametrize("name", ON_ANY_MACHINE)
def test_example_passes(name: str) -> None:
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(ROOT / "src"), *sys.path])}
    ran = subprocess.run(
        [sys.executable, ROOT / "examples" / f"{name}.py"],
        capture_output=True,
        text=True,
        timeout=120,
        env=environment,
        check=False,
    )
    assert ran.returncode == 0, ran.stderr
    assert ran.stdout.strip()


def test_the_quickstart_is_short() -> None:
    assert len((ROOT / "examples" / "quickstart_cpu.py").read_text().splitlines()) < 60
