"""The audit: run each check on each prep, and write down what they say."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from typing import Any, Literal, NamedTuple

from graphglue.audit import double_capture, pad_image, pointers, poison, same_ops, trace
from graphglue.audit.as_found import left_as_found
from graphglue.audit.certificate import Audited, Certificate, Check, Finding, Verdict, issue
from graphglue.audit.subject import Subject, Unseen
from graphglue.audit.witness import place_of
from graphglue.core.batch import Batch
from graphglue.errors import ConfigError
from graphglue.graphs import memory

Level = Literal["full", "static"]
Run = Callable[[Subject], tuple[Verdict, list[Finding]]]


class Entry(NamedTuple):
    """One check: its name, what it does, and whether it is part of the static level."""

    name: str
    run: Run
    static: bool


CHECKS = (
    Entry(trace.NAME, trace.run, True),
    Entry(same_ops.NAME, same_ops.run, True),
    Entry(poison.NAME, poison.run, False),
    Entry(double_capture.NAME, double_capture.run, False),
    Entry(pad_image.NAME, pad_image.run, False),
    Entry(pointers.NAME, pointers.run, True),
)


def audit(
    runner: Any,
    level: Level = "full",
    batches: Iterable[Batch] | None = None,
    perturb: Callable[[], Any] | None = None,
) -> Certificate:
    """Check what the preps of a runner declare, over twins of its slots and tables.

    The runner's own slots, keys and tables stay as they are. A prep that does wrong makes a check fail, with
    evidence; it never makes this raise. On a GPU nothing is poisoned here, because a prep that reads poison as an
    index ends the process: ``graphglue audit MODULE:FACTORY`` does that in a process of its own.

    Args:
        runner: a Runner, captured or not.
        level: "full", or "static" for trace, same_ops and pointers.
        batches: batches as the engine hands them in; legal values are taken from them.
        perturb: changes host state that must not matter to the preps; called once for each prep. What it returns
            is called at the end, if it can be.

    Raises:
        ConfigError: arguments of the wrong kind.
        BindError: a batch that does not fit the slots.

    Sync: the device. Capturable: no.
    """
    return run_checks(runner, level, batches, perturb)


def run_checks(
    runner: Any,
    level: Level = "full",
    batches: Iterable[Batch] | None = None,
    perturb: Callable[[], Any] | None = None,
    *,
    poisoning: bool | None = None,
) -> Certificate:
    """Run the checks of a level; see ``audit``.

    Args:
        runner: as ``audit`` takes it.
        level: as ``audit`` takes it.
        batches: as ``audit`` takes them.
        perturb: as ``audit`` takes it.
        poisoning: whether this process may lose its device to a prep that reads poison as an index; by default
            where that is the CPU.
    """
    given = _checked(runner, level, batches, perturb)
    subjects = Subject.of(runner, given, perturb)
    preps = {
        registration.name: Audited.of(registration, runner.arena.slots, runner.tables, runner.space)
        for registration in runner.registrations
    }
    on_cpu = runner.arena.device.torch_device.type == "cpu"
    wanted = [entry for entry in CHECKS if level == "full" or entry.static]
    order = sorted(wanted, key=lambda entry: _turn(entry, on_cpu))
    bench = _Bench(on_cpu if poisoning is None else poisoning)
    with left_as_found(runner, subjects):
        found = {(subject.name, entry.name): bench.check(entry, subject) for entry in order for subject in subjects}
    checks = [found[subject.name, entry.name] for subject in subjects for entry in wanted]
    return issue(checks, preps, runner.arena.device)


def _turn(entry: Entry, on_cpu: bool) -> int:
    """Order the checks: first what needs host state that no other check has used up ("the largest bucket so far").

    On a GPU poison comes last of all: a prep that reads it out of range leaves a device that runs nothing more.
    """
    if entry.name == double_capture.NAME:
        return 0
    return 2 if entry.name == poison.NAME and not on_cpu else 1


def _checked(runner: Any, level: str, batches: Any, perturb: Any) -> tuple[Batch, ...]:
    if lacks := [name for name in ("registrations", "tables", "arena", "space") if not hasattr(runner, name)]:
        raise ConfigError(f"audit of a {type(runner).__name__}, which has no {lacks}; expected a graphglue.Runner")
    if level not in ("full", "static"):
        raise ConfigError(f"level={level!r}: expected 'full' or 'static'")
    if perturb is not None and not callable(perturb):
        raise ConfigError(f"perturb is a {type(perturb).__name__}; expected a callable without arguments")
    given = (batches,) if isinstance(batches, Batch) else tuple(batches or ())
    if strange := [type(batch).__name__ for batch in given if not isinstance(batch, Batch)]:
        raise ConfigError(f"batches hold {strange}; expected graphglue.Batch")
    return given


class _Bench:
    """Run checks one by one, as long as the device holds."""

    def __init__(self, poisoning: bool) -> None:
        self._poisoning = poisoning
        self._broken: str | None = None

    def check(self, entry: Entry, subject: Subject) -> Check:
        """Run one check; whatever it lets through becomes a verdict."""
        begin = time.perf_counter()
        with memory.plain():
            verdict, evidence = self._verdict(entry, subject)
            if self._broken is None and (cause := _restored(subject)) is not None:
                self._broken = f"prep {subject.name!r} left the device unusable in {entry.name}: {cause}"
                verdict, evidence = Verdict.FAIL, [*evidence, Finding(text=self._broken)]
        seconds = round(time.perf_counter() - begin, 4)
        return Check(name=entry.name, prep=subject.name, verdict=verdict, evidence=tuple(evidence), seconds=seconds)

    def _verdict(self, entry: Entry, subject: Subject) -> tuple[Verdict, list[Finding]]:
        if self._broken is not None:
            return Verdict.UNKNOWN, [Finding(text=self._broken)]
        if not subject.keys:
            return Verdict.UNKNOWN, [Finding(text="this prep is never glued here, so there is nothing to check")]
        if entry.name == "poison" and not self._poisoning:
            text = "not in a process that serves; run graphglue audit MODULE:FACTORY, which has its own"
            return Verdict.UNKNOWN, [Finding(text=text)]
        try:
            with subject.session():
                verdict, evidence = entry.run(subject)
        except Unseen as error:
            return Verdict.UNKNOWN, [Finding(text=str(error))]
        except (Exception, SystemExit) as error:  # nobody asked for the end of this process
            return _raised(subject, error)
        return verdict, [*evidence, *_guesses(subject)] if verdict is Verdict.PASS else evidence


def _restored(subject: Subject) -> str | None:
    """Put the tables back, and wait; say why that fails."""
    try:
        subject.restore()
        subject.arena.device.synchronize()
    except Exception as error:
        return _spell(error)
    return None


def _raised(subject: Subject, error: BaseException) -> tuple[Verdict, list[Finding]]:
    """Judge a prep that raised: its own fault, unless only values that were guessed made it raise."""
    finding = Finding(text=_spell(error), where=place_of(error))
    if not subject.guessed or not subject.runs_on_pads():
        return Verdict.FAIL, [finding]
    return Verdict.UNKNOWN, [finding, *_guesses(subject)]


def _guesses(subject: Subject) -> list[Finding]:
    if not subject.guessed:
        return []
    text = (
        f"with guessed values in slots {list(subject.guessed)}: Slot(valid=...), Slot(index_of=...) or batches= say "
        "which are legal"
    )
    return [Finding(text=text)]


def _spell(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}"
