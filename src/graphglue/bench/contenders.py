"""Contenders: the ways to run one and the same step, each as a callable without arguments."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

import graphglue as gg
from graphglue.bench.separate import OneByOne
from graphglue.bench.timing import Step
from graphglue.bench.workload import PREP, TOKENS_PER_REQUEST, Workload, prep
from graphglue.device.base import Device, open_device
from graphglue.graphs.base import Recording

NUM_SOURCE_SETS = 8
FLOOR, AGAIN = "bare forward replay (the floor)", "the floor again (A/A)"
ONE_DEVICE, ONE_NUMPY = "one launch, device sources", "one launch, numpy host sources"
ONE_TENSORS, EAGER = "one launch, CPU tensor sources", "fill kernel, eager prep, forward graph"
SEPARATE_TORCH = "torch fill, glue graph, forward graph"
SEPARATE_KERNEL = "fill kernel, glue graph, forward graph"
EAGER_ALONE, GLUE_ALONE = "eager prep alone", "glue graph alone"
UNFILLED = "glue and forward in one graph, no fill"


@dataclass(frozen=True)
class Contender:
    """One way to run a step.

    Attributes:
        label: what the tables call it.
        step: runs one step; None if it can not run here.
        metadata: finds the metadata in what a step returned, to be held against the reference;
            None for a part of a step.
        why_not: why it can not run here.
        note: what a reader must know of it.
    """

    label: str
    step: Step | None
    metadata: Callable[[Any], Mapping[str, torch.Tensor]] | None = None
    why_not: str = ""
    note: str = ""


@dataclass
class Sources:
    """The same steps' sources, wherever a contender wants them; ``NUM_SOURCE_SETS`` different steps."""

    num_requests: int
    bucket: int
    tensors: list[dict[str, torch.Tensor]]
    expected: list[dict[str, torch.Tensor]]
    device: torch.device
    numpy: list[dict[str, Any]] = field(init=False)
    on_device: list[dict[str, torch.Tensor]] = field(init=False)

    def __post_init__(self) -> None:
        self.numpy = [{name: value.numpy() for name, value in step.items()} for step in self.tensors]
        self.on_device = [{name: value.to(self.device) for name, value in step.items()} for step in self.tensors]

    @classmethod
    def draw(cls, workload: Workload, num_requests: int, bucket: int) -> Sources:
        """Draw steps, and run their prep eagerly at the padded shapes for reference."""
        steps = [workload.values(num_requests, seed) for seed in range(NUM_SOURCE_SETS)]
        expected = [prep(workload.padded(step, bucket)) for step in steps]
        return cls(num_requests, bucket, steps, expected, workload.device)


class Recorded:
    """Record prep and forward by themselves, over the slots of a view.

    The forward alone is the floor. The recordings are ours, not a runner's: what is measured next
    to a step shares nothing with it but the weights and perhaps the slots.
    """

    def __init__(self, workload: Workload, view: Any) -> None:
        recorder = open_device(workload.device).recorder()
        with torch.no_grad():
            self.metadata = prep(view)
            with recorder.session():
                for _ in range(2):
                    workload.forward(view, prep(view, self.metadata))
                recorder.finish()
                self.prep: Recording = recorder.record(lambda: prep(view, self.metadata))
                self.forward: Recording = recorder.record(lambda: workload.forward(view, self.metadata), strict=False)
                self.both: Recording = recorder.record(
                    lambda: workload.forward(view, prep(view, self.metadata)), strict=False
                )
        self.view = view

    def floor(self) -> Step:
        """Give torch's own replay of the forward where there is one."""
        return bare_replay(self.forward)

    def glue(self) -> Step:
        """Give torch's own replay of the prep."""
        return bare_replay(self.prep)

    def unfilled(self) -> Step:
        """Give torch's own replay of prep and forward in one graph."""
        return bare_replay(self.both)

    def eager_prep(self) -> Step:
        """Give the prep called from the host."""
        view, metadata = self.view, self.metadata

        def call() -> object:
            with torch.no_grad():
                return prep(view, metadata)

        return call

    def close(self) -> None:
        """Drop the recordings."""
        for recording in (self.prep, self.forward, self.both):
            recording.close()


def bare_replay(recording: Recording) -> Step:
    """Give torch's own replay where there is one."""
    graph = getattr(recording, "graph", None)
    return recording.replay if graph is None else graph.replay


def replays(runner: gg.Runner, num_requests: int, sources: Sequence[Mapping[str, Any]]) -> Step:
    """Give a step through ``Runner.replay``, with a fresh Batch and other sources each time."""
    replay, batch, turn = runner.replay, gg.Batch, itertools.cycle(sources).__next__
    return lambda: replay(batch(num_requests, turn()))


def of_runner(label: str, runner: gg.Runner, num_requests: int, sources: Sequence[Mapping[str, Any]]) -> Contender:
    """Make a contender of a runner."""
    return Contender(label, replays(runner, num_requests, sources), lambda step: step.metadata)


class Runners:
    """Build and capture one runner for each way to launch, over the same workload.

    One for each kind of sources too: a runner remembers how the last step of a shape was bound, and
    an engine's sources do not change their kind from step to step.
    """

    def __init__(self, workload: Workload, ladder: Sequence[int]) -> None:
        self.one, self.one_numpy, self.one_tensors = (_captured(workload, ladder) for _ in range(3))
        self.eager = _captured(workload, ladder, gg.RunnerConfig(glue={PREP: "off"}))
        self.separate_torch = _captured(workload, ladder, device=lambda device: OneByOne(device, torch_fill=True))
        self.separate_kernel = _captured(workload, ladder, device=lambda device: OneByOne(device, torch_fill=False))

    def contenders(self, sources: Sources) -> list[Contender]:
        """List the ways that go through ``Runner.replay``."""
        n = sources.num_requests
        return [
            of_runner(EAGER, self.eager, n, sources.on_device),
            of_runner(SEPARATE_TORCH, self.separate_torch, n, sources.on_device),
            of_runner(SEPARATE_KERNEL, self.separate_kernel, n, sources.on_device),
            of_runner(ONE_DEVICE, self.one, n, sources.on_device),
            of_runner(ONE_NUMPY, self.one_numpy, n, sources.numpy),
            of_runner(ONE_TENSORS, self.one_tensors, n, sources.tensors),
        ]

    def close(self) -> None:
        """Close all runners."""
        for runner in vars(self).values():
            runner.close()


def _captured(
    workload: Workload,
    ladder: Sequence[int],
    config: gg.RunnerConfig | None = None,
    device: Callable[[Device], Device] | None = None,
) -> gg.Runner:
    runner = workload.runner(ladder, config)
    if device is not None:
        runner.arena.device = device(runner.arena.device)
    runner.capture(progress=False)
    return runner


def differences(contender: Contender, sources: Sources, synchronize: Callable[[], None]) -> str:
    """Run a contender once for each set of sources, and hold its metadata against the reference.

    Returns:
        What differs, or nothing. Rows [0, real) are compared where a contender runs unpadded.

    Sync: the device.
    """
    assert contender.step is not None
    for number, expected in enumerate(sources.expected):
        result = contender.step()
        synchronize()
        if contender.metadata is None:
            continue
        seen = contender.metadata(result)
        for name, reference in expected.items():
            rows = sources.num_requests * (1 if name == "page_table" else TOKENS_PER_REQUEST)
            rows = min(len(seen[name]), len(reference)) if len(seen[name]) == len(reference) else rows
            if not torch.equal(seen[name][:rows], reference[:rows]):
                return f"WRONG: {name} of step {number} differs from the eager prep"
    return ""
