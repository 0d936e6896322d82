"""What README.md prints runs, as printed; CI runs its test command, and no other."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
README = (ROOT / "README.md").read_text()


def blocks(info: str) -> list[str]:
    """Give the fenced blocks whose fence says ``info``."""
    return re.findall(rf"^```{info}$\n(.*?)^```$", README, re.MULTILINE | re.DOTALL)


def test_the_sample_runs_as_printed() -> None:
    """A reader copies it: no name is left out, and it needs no GPU."""
    (sample,) = blocks("python")
    check = "\nassert step.outputs['next_token'].tolist() == [2 * row for row in range(13)]"
    check += "\nassert step.decision.reason is gg.Reason.PADDED and step.decision.prep is gg.Route.GLUE"
    check += "\nassert [bucket.requests for bucket in runner.buckets] == [1, 2, 4, 8, 16]"
    run_printed(sample + check)


def test_the_prefill_sample_runs_as_printed() -> None:
    """The second prompt, 5 to 12, ends at 12: its row is 12 plus twice the sum of the prompt."""
    (sample,) = blocks("python prefill")
    check = "\nassert step.outputs[:, 0].tolist() == [4 + 2 * sum(range(5)), 12 + 2 * sum(range(5, 13))]"
    check += "\nassert step.decision.forward is gg.Route.GRAPH and step.decision.prep is gg.Route.GLUE"
    check += "\nassert step.decision.bucket.tokens == 16 and len(step.outputs) == 2"
    run_printed(sample + check)


def run_printed(program: str) -> None:
    """Run a program as a reader would."""
    path = os.pathsep.join(filter(None, [str(ROOT / "src"), os.environ.get("PYTHONPATH")]))
    ran = subprocess.run(
        [sys.executable, "-c", program],
        capture_output=True, text=True, env={**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1"}, timeout=120,
    )  # fmt: skip
    assert ran.returncode == 0, ran.stderr


def test_ci_runs_the_test_command_word_for_word() -> None:
    """.ci/run takes the command out of README with awk; a renamed fence would leave it with nothing."""
    script = ROOT / ".ci" / "run"
    if not script.exists():
        pytest.skip("a distribution without .ci")
    (command,) = blocks("bash tests")
    (extraction,) = re.findall(r'bash -euxc "\$\((awk .*? README\.md)\)"', script.read_text())
    taken = subprocess.run(["bash", "-c", extraction], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    assert taken == command
    assert "-m pytest" in taken


@pytest.mark.parametrize("info", ["bash", "bash tests"])
def test_a_command_installs_torch_before_the_package(info: str) -> None:
    """Otherwise pip resolves torch by itself, and takes another build than the reader wants."""
    (command,) = blocks(info)
    installs = [step for step in command.strip().split(" && ") if "pip install" in step]
    assert [re.search(r"install (\S+)", step).group(1) for step in installs] == ["torch==2.13.0", "-e"]  # type: ignore[union-attr]


def test_ci_installs_the_torch_that_the_commands_install() -> None:
    """One version in three places."""
    script = ROOT / ".ci" / "run"
    if not script.exists():
        pytest.skip("a distribution without .ci")
    assert set(re.findall(r"torch==([\d.]+)", README + script.read_text())) == {"2.13.0"}
