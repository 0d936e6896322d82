"""The doctor: what works on this machine, what falls back to what, and what to install."""

from __future__ import annotations

import platform
from collections.abc import Callable
from typing import NamedTuple

import torch

from graphglue.core.batch import Batch, Mode
from graphglue.core.contract import PrepContract
from graphglue.core.slots import Slot
from graphglue.device import probe
from graphglue.errors import GraphGlueError
from graphglue.registry import Registry
from graphglue.runner import Runner

__all__ = ["Finding", "examine"]


class Finding(NamedTuple):
    """What was asked, what came out, and where it does not work what happens instead and what helps."""

    part: str
    works: bool
    seen: str
    instead: str = ""
    advice: str = ""


class _Question(NamedTuple):
    part: str
    ask: Callable[[], str]
    instead: str
    advice: str


def examine() -> list[Finding]:
    """Ask everything, in order. Never raises for what is missing; initialises CUDA where there is a GPU.

    Sync: the device, where there is one.
    """
    return [_answered(question) for question in _QUESTIONS]


def _answered(question: _Question) -> Finding:
    try:
        return Finding(question.part, True, question.ask())
    except (GraphGlueError, RuntimeError) as error:
        return Finding(question.part, False, str(error), question.instead, question.advice)


def _tried(device: str) -> str:
    """Capture a small runner and replay one padded step; say how it was launched.

    Raises:
        GraphGlueError: it can not be captured, or computed something else.
    """
    contract = PrepContract(name="doctor", reads={"lens": 1}, outputs={"last": "request"}, modes={Mode.DECODE})
    registry = Registry()
    registry.register(contract)(lambda view: {"last": view.lens - 1})
    with Runner(
        slots=[Slot("lens", axis="request", dtype=torch.int64, pad=1)], ladder=[4], registry=registry, prep="doctor",
        forward=lambda view, metadata: metadata["last"] * 2, device=device,
    ) as runner:  # fmt: skip
        runner.capture(progress=False)
        step = runner.replay(Batch(3, {"lens": [5, 6, 7]}))
        if step.outputs.tolist() != [8, 10, 12] or not step.decision:
            raise GraphGlueError(
                f"a step gave {step.outputs.tolist()} by {step.decision.reason.value}, not [8, 10, 12]"
            )
        stats = runner.stats()
    if stats["one_launch"]:
        return "a captured step is right, in one launch"
    return f"a captured step is right; not one launch: {', '.join(stats['launch_fallbacks'])}"


def _on_gpu() -> str:
    probe.gpus()
    return _tried("cuda")


_TAPE = 'device="cpu": the tape, for truth and not for speed'
_TORCH_FILL = "the fill takes a torch operation or two for each slot, and a step several launches"

_DRIVER = "the NVIDIA driver, for CUDA 12.1 or later"
_BINDINGS = 'pip install "cuda-python>=12.8"'
_KERNEL = "an NVRTC that knows the GPU: pip install -U nvidia-cuda-nvrtc"

_QUESTIONS = (
    _Question("python", platform.python_version, "", ""),
    _Question("torch", lambda: torch.__version__, "", ""),
    _Question("torch's CUDA", probe.torch_cuda, _TAPE, "a CUDA build of torch, from https://pytorch.org/get-started"),
    _Question("GPUs", lambda: "; ".join(probe.gpus()), _TAPE, "a GPU that CUDA_VISIBLE_DEVICES shows"),
    _Question("driver", probe.driver, _TAPE, _DRIVER),
    _Question("cuda-python", lambda: probe.version_of("cuda-python"), _TORCH_FILL, _BINDINGS),
    _Question("cuda-bindings", lambda: probe.version_of("cuda-bindings"), _TORCH_FILL, _BINDINGS),
    _Question("NVRTC", probe.nvrtc, _TORCH_FILL, "pip install nvidia-cuda-nvrtc"),
    _Question("fill kernel", probe.fill_kernel, _TORCH_FILL, _KERNEL),
    _Question("kernel parameters", probe.host_payload, _TAPE, _DRIVER),
    _Question("a step on the tape", lambda: _tried("cpu"), "", "report it: this should work everywhere"),
    _Question("a step on the GPU", _on_gpu, _TAPE, "what is missing above"),
    _Question("extra cli", lambda: _extra("typer", "rich"), "no command line", 'pip install "graphglue[cli]"'),
    _Question("extra bench", lambda: _extra("matplotlib"), "no pictures", 'pip install "graphglue[bench]"'),
    _Question(
        "extra prometheus", lambda: _extra("prometheus-client"), "no exporter", 'pip install "graphglue[prometheus]"'
    ),
    _Question(
        "extra test", lambda: _extra("pytest", "hypothesis"), "no conformance suite", 'pip install "graphglue[test]"'
    ),
)  # fmt: skip


def _extra(*distributions: str) -> str:
    return ", ".join(f"{name} {probe.version_of(name)}" for name in distributions)
