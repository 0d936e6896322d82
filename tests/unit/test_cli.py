"""The command line: exit codes, output, and what it says without its extra."""

from __future__ import annotations

import functools
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("typer", reason="needs the extra: pip install 'graphglue[cli]'")
pytest.importorskip("rich", reason="needs the extra: pip install 'graphglue[cli]'")
from typer.testing import CliRunner

from graphglue import bench, demo
from graphglue.audit import Certificate, Verdict
from graphglue.cli import app

ROOT = Path(__file__).parents[2]
SMALL_RUN = ["demo", "--device", "cpu", "--requests", "6", "--seed", "1"]


def test_the_demo_tells_what_it_served_and_exits_with_0(tmp_path: Path) -> None:
    path = tmp_path / "demo.json"
    ran = CliRunner().invoke(app, [*SMALL_RUN, "--json", str(path)])
    assert ran.exit_code == 0, ran.output
    for text in ("6 requests", "0 differences", "padded", "idle_eager", "bit for bit", "not for speed", "in segments"):
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


WRITES = {
    ("demo", "--json"): [], ("bench", "--json"): [], ("bench", "--plot"): [], ("audit", "--json"): ["no.such:factory"],
    ("ladder", "--json"): ["--histogram", "no.json"], ("ladder", "--plot"): ["--histogram", "no.json"],
    ("report", "--html"): ["no.json"], ("report", "--png"): ["no.json"],
}  # fmt: skip


@pytest.mark.parametrize(("command", "option"), WRITES)
def test_a_directory_is_no_file_to_write_and_is_refused_before_the_run(
    command: str, option: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "300")
    ran = CliRunner().invoke(app, [command, *WRITES[command, option], option, str(tmp_path)])
    assert ran.exit_code == 2
    assert "is a directory; expected the name of a file" in ran.output
    assert option in ran.output


def test_a_section_of_the_benchmark_that_breaks_off_exits_with_1(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(settings: Any, section: Any) -> None:
        raise OSError("no clock")

    monkeypatch.setenv("COLUMNS", "200")  # a note is not broken into lines
    monkeypatch.setitem(bench.SECTIONS, "floor", ("what a replay costs", broken))
    ran = CliRunner().invoke(app, ["bench", "--device", "cpu", "--steps", "1", "--only", "floor"])
    assert (ran.exit_code, "no clock" in ran.output) == (1, True)
    monkeypatch.setitem(bench.SECTIONS, "floor", ("what a replay costs", lambda settings, section: None))
    assert CliRunner().invoke(app, ["bench", "--device", "cpu", "--steps", "1", "--only", "floor"]).exit_code == 0


AUDITED = """
import torch, graphglue as gg

def make(prep=lambda view: {"last": view.seq_lens - 1}, forward=None):
    slot = gg.Slot("seq_lens", axis="request", dtype=torch.int64, pad=1, valid=(1, 9))
    contract = gg.PrepContract(name="prep", reads={"seq_lens": 1}, outputs={"last": "request"}, modes={gg.Mode.DECODE})
    registry = gg.Registry()
    registry.register(contract)(prep)
    return gg.Runner(slots=[slot], ladder=[2], registry=registry, prep="prep")

def faulty():
    return make(lambda view: {"last": view.seq_lens - view.seq_lens.max().item()})

class State:
    step = 3

def perturb():
    State.step += 1

def perturbed():
    return make(lambda view: {"last": view.seq_lens - State.step}), perturb

def broken():
    raise OSError("no engine here")

def three():
    return make(), perturb, 3

number = 3
"""


def audited(folder: Path, monkeypatch: pytest.MonkeyPatch, *arguments: str) -> Any:
    """Run ``graphglue audit`` in a folder of its own, whose module is named after it."""
    name = f"audited_{folder.name}"
    (folder / f"{name}.py").write_text(AUDITED)
    monkeypatch.chdir(folder)
    monkeypatch.setenv("COLUMNS", "200")
    monkeypatch.setattr(sys, "path", [*sys.path])
    return CliRunner().invoke(app, ["audit", *(argument.replace("MODULE", name) for argument in arguments)])


def test_an_audit_shows_each_check_and_writes_the_certificate(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ran = audited(tmp_path, monkeypatch, "MODULE:make", "--json", "c.json")
    assert ran.exit_code == 0, ran.output
    for text in ("trace", "same_ops", "poison", "double_capture", "pad_image", "pointers", "passed: ", "torch"):
        assert text in ran.output, text
    assert Certificate.read(tmp_path / "c.json").passed


@pytest.mark.parametrize(
    ("factory", "check", "evidence"),
    [("faulty", "trace", "reads a tensor on the host"), ("perturbed", "double_capture", "captured twice")],
)
def test_a_faulty_prep_exits_with_1_and_its_evidence(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, factory: str, check: str, evidence: str
) -> None:
    ran = audited(tmp_path, monkeypatch, f"MODULE:{factory}", "--json", "c.json")
    assert ran.exit_code == 1, ran.output
    assert "not passed" in ran.output
    assert evidence in " ".join(ran.output.split())
    found = {one.name: one.verdict for one in Certificate.read(tmp_path / "c.json").checks}
    assert found[check] is Verdict.FAIL


def test_the_static_level_runs_fewer_checks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ran = audited(tmp_path, monkeypatch, "MODULE:make", "--level", "static")
    assert ran.exit_code == 0, ran.output
    assert "pad_image" not in ran.output


@pytest.mark.parametrize(
    ("target", "said"),
    [
        ("MODULE", "expected MODULE:FACTORY"),
        ("no_such_module:make", "module 'no_such_module' can not be imported: ModuleNotFoundError"),
        ("MODULE:nothing", "has no attribute 'nothing'"),
        ("MODULE:number", "is a int; expected a callable"),
        ("MODULE:broken", "raised OSError: no engine here"),
        ("MODULE:three", "returned 3 values; expected a Runner, or (Runner, perturb)"),
        ("MODULE:State", "audit of a State, which has no"),
    ],
)
def test_an_audit_that_can_not_run_exits_with_2(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, target: str, said: str
) -> None:
    ran = audited(tmp_path, monkeypatch, target)
    assert ran.exit_code == 2
    assert said in ran.output


def test_a_certificate_into_a_folder_that_is_not_there_is_refused_before_the_audit(tmp_path: Path) -> None:
    ran = CliRunner().invoke(app, ["audit", "never.imported:make", "--json", str(tmp_path / "nowhere" / "c.json")])
    assert ran.exit_code == 2
    assert "--json" in ran.output


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
