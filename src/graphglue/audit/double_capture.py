"""The check "double_capture": two captures under different host states must be one and the same computation.

Between the two the harness runs other steps, lets the host planner see other requests, reseeds Python's random
numbers and calls the user's ``perturb()``. Call counters and clocks move by themselves.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import zip_longest
from typing import Any, NamedTuple

from graphglue.audit import holdings
from graphglue.audit.certificate import Finding, Verdict
from graphglue.audit.evidence import Evidence
from graphglue.audit.steps import Step, note_error, snapshot
from graphglue.audit.subject import Subject
from graphglue.audit.witness import Testimony, observe
from graphglue.core.batch import Batch
from graphglue.core.differences import first_difference, spell_step
from graphglue.core.keys import Key
from graphglue.errors import CaptureError
from graphglue.graphs import memory
from graphglue.graphs.base import Recording

NAME = "double_capture"
_CALLS_PER_KEY = 5  # two warm-ups and the recording, between two that are looked at
_CYCLE = 12  # a host value that comes back after 2, 3, 4, 6 or 12 calls is another one in the second capture
_BAKED = (
    "a host value was baked: a Python number, an attribute, a counter or the time. Pass it as a slot, through plan() "
    "if the host computes it"
)


class Capture(NamedTuple):
    """A key captured under one host state: what the prep did, and its recording."""

    testimony: Testimony
    recording: Recording


def run(subject: Subject) -> tuple[Verdict, list[Finding]]:
    """Record every key twice, under two host states and equal slots, and replay both on the same slots.

    Compared are what the replays give, and the operations with their scalars: a value that no legal step shows now
    is baked all the same. Any difference is a host value, whether or not somebody perturbs. Without a difference
    the verdict is a pass only where ``perturb`` changed the host state in between, or a host planner did and the
    prep reaches no other host value.

    Sync: the device. Capturable: no.
    """
    evidence = Evidence(subject.prep)
    served = {key: raws for key in subject.keys if (raws := [raw for raw in subject.raws(key) if raw.requests])}
    with memory.plain():
        first = {key: _record(subject, key, raws, evidence, "first") for key, raws in served.items()}
        with _other_host_state(subject, served, evidence):
            for key, raws in served.items():
                if first[key] is None or evidence.is_full:
                    continue
                second = _record(subject, key, raws, evidence, "second")
                if second is not None:
                    _compare(subject, key, raws, (first[key], second), evidence)
                    second.recording.close()
        for capture in first.values():
            if capture is not None:
                capture.recording.close()
        subject.restore()
    if not served:
        evidence.unseen("", "nothing was captured: the prep is glued at no key, or at none that it fills exactly")
    elif subject.perturb is None and not evidence.failed and (subject.plan is None or _host_values(subject)):
        evidence.unseen("", f"no difference, but nobody changed the host state in between; {_advice(subject)}")
    return evidence.result(f"{len(served)} keys captured twice, under two host states; replays are equal")


def _record(subject: Subject, key: Key, raws: list[Any], evidence: Evidence, which: str) -> Capture | None:
    """Record a key over equal slots, the host planner having seen other steps."""
    step = Step.drawn(subject, key, max(raws))
    try:
        step.fill()
        if subject.plan is not None:
            slots = subject.arena.targets(key.bucket)
            before = snapshot(slots)
            _show_planner(subject.plan, Step.drawn(subject, key, raws[0] if which == "first" else max(raws), 1), which)
            for name, tensor in slots.items():
                tensor.copy_(before[name])
        opening = observe(subject, key)
        recording = subject.record(key)  # warms up, so that what a prep sets up at its first call is no difference
        seen = observe(subject, key)
        _note_kept(key, opening, seen, evidence)
        return Capture(seen, recording)
    except CaptureError as error:
        evidence.fail("recording", f"{spell_step(key)}: the {which} capture was refused: {error}")
        return None
    finally:
        subject.restore()


def _note_kept(key: Key, opening: Testimony, seen: Testimony, evidence: Evidence) -> None:
    """Note what only the first call read on the host: it kept that, and no later call looks again."""
    again = {finding.where for finding in seen.read}
    for one in opening.read:
        if one.where not in again:
            text = f"{spell_step(key)}: only the first call {one.text}"
            evidence.fail(f"{one.where} kept", text, **one.model_dump(exclude_none=True, exclude={"text"}))


def _show_planner(plan: Callable[..., Any], step: Step, which: str) -> None:
    """Let the planner see a step: one request first, then all, with every feature that the contract declares."""
    step.fill()
    if which == "second":
        declared, rows = step.subject.declared, getattr(step.sources, "row_tokens", None)
        plan(
            Batch(
                step.raw.requests,
                step.sources,
                mode=step.key.mode,
                num_tokens=step.raw.tokens,
                row_tokens=rows if rows and not step.raw.row_tokens else None,
                variant=step.key.variant,
                features=frozenset(declared.features),
            ),
            step.key.bucket,
        )


@contextmanager
def _other_host_state(subject: Subject, served: dict[Key, list[Any]], evidence: Evidence) -> Iterator[None]:
    """Change what a prep may find on the host; Python's random numbers are put back, and what perturb() can undo."""
    state, undo = random.getstate(), None
    try:
        random.seed(0 if random.random() else 1)
        undo = subject.perturb() if subject.perturb is not None else None
        if served and not evidence.failed:
            num_calls = 1 + -(len(served) * _CALLS_PER_KEY) % _CYCLE
            _run_more(subject, *next(iter(served.items())), num_calls, evidence)
        yield
    finally:
        random.setstate(state)
        if callable(undo):
            undo()


def _run_more(subject: Subject, key: Key, raws: list[Any], num_calls: int, evidence: Evidence) -> None:
    for seed in range(num_calls):
        step = Step.drawn(subject, key, raws[seed % len(raws)], seed)
        try:
            step.eager()
        except Exception as error:
            return note_error(step, error, evidence, "eager")
    return None


def _compare(
    subject: Subject, key: Key, raws: list[Any], pair: tuple[Capture | None, Capture], evidence: Evidence
) -> None:
    first, second = pair
    assert first is not None
    for seed, raw in enumerate(dict.fromkeys([max(raws), raws[len(raws) // 2], raws[0]])):
        step = Step.drawn(subject, key, raw, seed)
        try:
            one, other = snapshot(step.replayed(first.recording)), step.replayed(second.recording)
        except Exception as error:
            return note_error(step, error, evidence, "glued")
        found = first_difference(one, other, subject.declared.outputs, raw)
        if found is not None:
            text = f"{step}: the same slots, captured twice: {found} in the first capture; {_BAKED}"
            return evidence.fail(found.leaf, text)
    _compare_operations(key, first.testimony, second.testimony, evidence)
    return None


def _compare_operations(key: Key, first: Testimony, second: Testimony, evidence: Evidence) -> None:
    for number, (one, other) in enumerate(zip_longest(first.operations, second.operations)):
        if one != other:
            seen = other or one
            assert seen is not None
            text = f"{spell_step(key)}: captured twice, operation {number} is {other}, {one} in the first capture"
            return evidence.fail(seen.where, f"{text}; {_BAKED}", op=seen.name, where=seen.where)
    return None


def _host_values(subject: Subject) -> list[str]:
    return holdings.host_values(subject.prep)


def _advice(subject: Subject) -> str:
    values = _host_values(subject)
    named = f", such as {values[:6]}" if values else ""
    return f"pass perturb=, which changes what the engine may change between two steps{named}"
