"""The speculative loop on CUDA: draft and target side by side in one memory pool, while the GPU is busy."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLE = Path(__file__).parents[2] / "examples" / "speculative.py"


def ran(*arguments: str) -> str:
    """Run the example on the GPU; it asserts that no bit differs, and that all that is padded is glued."""
    done = subprocess.run(
        [sys.executable, EXAMPLE, "--device", "cuda", *arguments],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
        capture_output=True,
        text=True,
        check=False,
        timeout=280,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.mark.parametrize("seed", ["1", "8"])
def test_glued_is_eager_bit_for_bit(seed: str) -> None:
    said = ran("--seed", seed, "--requests", "32")
    assert "0 differences from eager steps" in said
    lengths = re.findall(r"acceptance length (glued|eager): ([\d.]+)", said)
    assert [name for name, _ in lengths] == ["glued", "eager"]
    assert lengths[0][1] == lengths[1][1]
    assert 1 < float(lengths[0][1]) < 4


def test_every_runner_s_samples_pass_the_shadow_check() -> None:
    said = ran()
    samples = re.findall(r"(verify|extend|draft) (\d+) of (\d+)", said)
    assert {kind for kind, _, _ in samples} == {"verify", "extend", "draft"}
    assert all(passed == sampled != "0" for _, passed, sampled in samples)
