"""Rerun: repeat a step of a flight record on the tape, glued and eagerly, and say whether all three agree.

What a record holds is the step: what it was handed, where it went, digests of what it gave. Tables, weights and
whatever else preps and forward read are the factory's to bring into the state of that step.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from graphglue.audit.command import made
from graphglue.core.batch import Batch
from graphglue.core.differences import first_difference
from graphglue.core.routing import State
from graphglue.errors import CaptureError, ConfigError
from graphglue.flight.record import FlightBatch, FlightRecord, FlightStep
from graphglue.flight.ring import spelled_step
from graphglue.flight.sources import batch_of, digests, tensors_of
from graphglue.runner import Runner

_ADVICE = "record with RunnerConfig(flight_recorder=256, record_sources=True)"


@dataclass(frozen=True)
class Run:
    """One run of the step: where it went and what it gave, or what it raised."""

    step: FlightStep
    metadata: Any = None
    outputs: Any = None
    results: dict[str, str] | None = None
    floats: frozenset[str] = frozenset()  # the names of results that another device may round otherwise


@dataclass(frozen=True)
class Rerun:
    """A step as it was recorded, and its two runs. Truthy where nothing differs that has to be equal.

    Attributes:
        recorded: the step of the record.
        device: what it ran on then.
        glued: the run of a captured runner.
        eager: the run of one without graphs.
    """

    recorded: FlightStep
    device: str | None
    glued: Run
    eager: Run

    def __bool__(self) -> bool:
        return not self.differences

    @property
    def differences(self) -> list[str]:
        """Say what differs: the two runs anywhere, and the record from them in all but floats."""
        found = [*self._between_runs()]
        if self.recorded.raised is not None or self.glued.step.raised is not None:
            then, now = (_kind(step.raised) for step in (self.recorded, self.glued.step))
            return found + ([] if then == now else [f"recorded: raised {then}; now: raised {now}"])
        exact = [name for name in self.changed if name not in self.glued.floats]
        return found + [f"{name}: not what was recorded on {self.device or 'another device'}" for name in exact]

    def _between_runs(self) -> list[str]:
        glued, eager = self.glued, self.eager
        if glued.step.raised is not None or eager.step.raised is not None:
            ours, theirs = _kind(glued.step.raised), _kind(eager.step.raised)
            return [] if ours == theirs else [f"glued: raised {ours}; eager: raised {theirs}"]
        parts = (("metadata", eager.metadata, glued.metadata), ("outputs", eager.outputs, glued.outputs))
        found = [(what, first_difference(expected, seen)) for what, expected, seen in parts]
        return [f"{what}: glued is not eager: {text}" for what, text in found if text is not None]

    @property
    def changed(self) -> list[str]:
        """Name the results whose digest is not the recorded one."""
        then, now = self.recorded.results or {}, self.glued.results or {}
        return [name for name in self.held if then.get(name) != now.get(name)]

    @property
    def held(self) -> list[str]:
        """Name the results that are held against the record: metadata have the rows of the bucket that was taken."""
        then, now = self.recorded.results or {}, self.glued.results or {}
        elsewhere = self.recorded.bucket != self.glued.step.bucket
        names = sorted(then.keys() | now.keys()) if then else []
        return [name for name in names if not (elsewhere and name.startswith("metadata"))]

    def spelled(self) -> str:
        """Say it in a few lines."""
        runs = (("recorded", self.recorded), ("glued", self.glued.step), ("eager", self.eager.step))
        lines = [f"{name:<9} {step.spelled()}" for name, step in runs]
        if self.recorded.plan is not None:
            lines.append("ranks     agreed on that step; here it was decided alone, so its bucket may be another")
        lines += [f"differs   {text}" for text in self.differences]
        lines += self._told_results()
        return "\n".join(lines)

    def _told_results(self) -> list[str]:
        if self.glued.step.raised is not None or self.eager.step.raised is not None:
            return []
        now = self.glued.results or {}
        equal = [] if self._between_runs() else [f"results   {len(now)} tensors, glued and eager equal bit for bit"]
        if not self.recorded.results:
            return [*equal, "          nothing was recorded to hold them against"]
        rounded = [name for name in self.changed if name in self.glued.floats]
        told = f"          {len(self.held) - len(self.changed)} of {len(self.held)} as recorded on {self.device}"
        note = f"; floats {rounded} are not, which another device may round otherwise" if rounded else ""
        return [*equal, told + note]


def _kind(raised: str | None) -> str:
    """Give the class of an error; its text may hold addresses."""
    return "nothing" if raised is None else raised.partition(":")[0]


def repeat(path: Path | str, target: str, number: int | None = None) -> Rerun:
    """Repeat a step of a flight record on the tape.

    Args:
        path: what ``runner.flight_record().write(FILE)`` wrote.
        target: ``MODULE:FACTORY``, called twice; it returns a runner like the recorded one, on the CPU, and the same
            one each time: same weights, same contents of tables.
        number: the step's; by default the last that can be repeated.

    Raises:
        ConfigError: a file, step or factory that is not usable.
    """
    record = FlightRecord.read(path)
    step, kept = chosen(record, number)
    return Rerun(step, record.device, *(_run(target, step.number, kept, glued) for glued in (True, False)))


def chosen(record: FlightRecord, number: int | None) -> tuple[FlightStep, FlightBatch]:
    """Pick a step with its batch: by its number, or the last one; of those with one number, the one that raised.

    Raises:
        ConfigError: no such step, or none whose sources were kept.
    """
    steps = [step for step in record.steps if number in (None, step.number)]
    if not record.steps:
        raise ConfigError("nothing to repeat in the record, which holds no steps: write it after some")
    if not steps:
        numbers = [step.number for step in record.steps]
        raise ConfigError(f"step {number} is not in the record, which holds steps {min(numbers)} to {max(numbers)}")
    kept = [step for step in steps if step.batch is not None]
    for step in [*(step for step in kept if step.raised is not None and number is not None), *reversed(kept)]:
        assert step.batch is not None
        return step, step.batch
    which = "no step of the record has" if number is None else f"step {number} has not"
    raise ConfigError(f"{which} kept its sources; {_ADVICE}")


def _run(target: str, number: int, kept: FlightBatch, glued: bool) -> Run:
    runner, _ = made(target)
    if not isinstance(runner, Runner):
        raise ConfigError(f"{target} returned a {type(runner).__name__}; expected a Runner")
    with runner:
        _check(runner, target)
        batch = batch_of(kept, runner.space.variants)
        try:
            _prepared(runner, glued)
            return _stepped(runner, number, batch, kept.prepared)
        except Exception as error:
            return Run(spelled_step(number, f"{type(error).__name__}: {error}", None))


def _check(runner: Runner, target: str) -> None:
    device = runner.arena.device.torch_device
    if device.type != "cpu":
        raise ConfigError(f"{target} returned a runner on {device}; a step is repeated on the tape: pass device='cpu'")
    if runner._agreement is not None:
        raise ConfigError(f"{target} returned a runner with ranks; a step is repeated alone: pass ranks=None")


def _prepared(runner: Runner, glued: bool) -> None:
    """Bring a runner to where all is captured, or nothing."""
    if not glued:
        runner.reset()
    elif not any(State.CAPTURED.value in key["states"].values() for key in runner.stats()["keys"]):
        try:
            runner.capture(progress=False)
        except CaptureError:
            return  # nothing can be glued: its decision says so


def _stepped(runner: Runner, number: int, batch: Batch, prepared: bool) -> Run:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)  # both runs draw the same numbers
        done: Any = runner.prepare(batch) if prepared else runner.replay(batch)
    metadata, outputs = done.metadata, None if prepared else done.outputs
    found = digests(metadata, outputs)
    named = tensors_of(metadata, outputs).items()
    floats = frozenset(name for name, leaf in named if leaf.is_floating_point() or leaf.is_complex())
    return Run(spelled_step(number, done.decision, done.raw), metadata, outputs, found, floats)
