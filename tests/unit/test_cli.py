"""The command line: exit codes, output, and what it says without its extra."""

from __future__ import annotations

import functools
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("typer", reason="needs the extra: pip install 'graphglue[cli]'")
pytest.importorskip("rich", reason="needs the extra: pip install 'graphglue[cli]'")
from typer.testing import CliRunner

from graphglue import demo
from graphglue.cli import app

ROOT = Path(__file__).parents[2]
SMALL_RUN = ["demo", "--device", "cpu", "--requests", "6", "--seed", "1"]


def test_the_demo_tells_what_it_served_and_exits_with_0(tmp_path: Path) -> None:
    path = tmp_path / "demo.json"
    ran = CliRunner().invoke(app, [*SMALL_RUN, "--json", str(path)])
    assert ran.exit_code == 0, ran.output
    for text in ("6 requests", "0 differences", "padded", "idle_eager", "bit for bit", "not for speed"):
        assert text in ran.output, text
    assert json.loads(path.read_text())["num_differences"] == 0


def test_a_difference_exits_with_1(monkeypatch: pytest.MonkeyPatch) -> None:
    def fault(step: int, tensors: dict, num_requests: int) -> None:
        tensors["seq_lens"][num_requests:] = 9

    monkeypatch.setattr(demo, "run", functools.partial(demo.run, fault=fault))
    ran = CliRunner().invoke(app, SMALL_RUN)
    assert ran.exit_code == 1
    assert "the first of them" in ran.output
    assert "positions" in ran.output


def test_a_bad_trace_exits_with_2(tmp_path: Path) -> None:
    (tmp_path / "trace.csv").write_text("TIMESTAMP,ContextTokens,GeneratedTokens\nnever,1,1\n")
    ran = CliRunner().invoke(app, ["demo", "--trace", str(tmp_path / "trace.csv")])
    assert ran.exit_code == 2
    assert "line 2: TIMESTAMP is 'never'" in ran.output


def test_a_folder_that_is_not_there_is_refused_before_the_run(tmp_path: Path) -> None:
    ran = CliRunner().invoke(app, ["demo", "--json", str(tmp_path / "nowhere" / "demo.json")])
    assert ran.exit_code == 2


@pytest.mark.parametrize("missing", ["typer", "rich"])
def test_without_the_extra_it_says_what_to_install(missing: str) -> None:
    program = f"import sys; sys.modules[{missing!r}] = None; from graphglue.__main__ import main; main()"
    ran = subprocess.run(
        [sys.executable, "-c", program],
        capture_output=True,
        text=True,
        env=os.environ | {"PYTHONPATH": os.pathsep.join([str(ROOT / "src"), *sys.path])},
        timeout=120,
        check=False,
    )
    assert ran.returncode == 2
    assert f'needs {missing}, which is not installed: pip install "graphglue[cli]"' in ran.stderr
