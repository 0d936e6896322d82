"""The doctor: what is there is shown, what is missing says what happens instead and what helps, and nothing raises."""

from __future__ import annotations

import platform
import sys
from importlib import metadata

import pytest
import torch
from typer.testing import CliRunner

from graphglue import doctor
from graphglue.cli import app
from graphglue.device import probe
from graphglue.errors import GraphGlueError

pytestmark = pytest.mark.usefixtures("frozen_imports")


def found(part: str) -> doctor.Finding:
    (finding,) = [one for one in doctor.examine() if one.part == part]
    return finding


def test_it_tells_the_versions_that_are_installed() -> None:
    seen = {one.part: one.seen for one in doctor.examine()}
    assert seen["python"] == platform.python_version()
    assert seen["torch"] == torch.__version__
    assert seen["extra test"].startswith(f"pytest {metadata.version('pytest')}")
    assert seen["a step on the tape"].startswith("a captured step is right; not one launch: the CPU tape")


def test_the_command_shows_every_part_and_exits_with_0(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "220")
    monkeypatch.setitem(sys.modules, "cuda.bindings", None)
    ran = CliRunner().invoke(app, ["doctor"])
    assert ran.exit_code == 0, ran.output
    for part in ("torch's CUDA", "GPUs", "driver", "cuda-python", "NVRTC", "fill kernel", "a step on the GPU"):
        assert part in ran.output, part
    assert "missing" in ran.output


def test_without_cuda_python_the_fill_falls_back_and_it_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "cuda.bindings", None)
    for name in ("cuda.bindings.driver", "cuda.bindings.nvrtc"):
        monkeypatch.setitem(sys.modules, name, None)
    for part in ("NVRTC", "fill kernel"):
        finding = found(part)
        assert not finding.works
        assert "torch operation" in finding.instead
        assert "nvidia-cuda-nvrtc" in finding.advice


def test_a_missing_distribution_is_a_finding(monkeypatch: pytest.MonkeyPatch) -> None:
    def version(name: str) -> str:
        raise metadata.PackageNotFoundError(name)

    monkeypatch.setattr(probe.metadata, "version", version)
    finding = found("cuda-python")
    assert (finding.works, finding.seen) == (False, "not installed")
    assert finding.advice == 'pip install "cuda-python>=12.8"'


def test_a_machine_without_a_gpu_is_no_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(probe.torch.cuda, "is_available", lambda: False)
    findings = {one.part: one for one in doctor.examine()}
    for part in ("GPUs", "a step on the GPU"):
        assert not findings[part].works
        assert "tape" in findings[part].instead


def test_a_wrong_step_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    class Wrong(doctor.Runner):
        def replay(self, *args: object, **more: object) -> object:
            step = super().replay(*args, **more)  # type: ignore[arg-type]
            step.outputs.add_(1)
            return step

    monkeypatch.setattr(doctor, "Runner", Wrong)
    finding = found("a step on the tape")
    assert not finding.works
    assert "not [8, 10, 12]" in finding.seen


def test_every_part_that_can_be_missing_says_what_helps() -> None:
    def absent() -> str:
        raise GraphGlueError("gone")

    for question in doctor._QUESTIONS:
        finding = doctor._answered(question._replace(ask=absent))
        always_there = question.part in ("python", "torch")
        assert always_there or finding.advice, question.part
