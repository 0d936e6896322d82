"""The check "same ops": a prep does the same for every raw count of a bucket, and whatever the slots hold.

A recording is one run of the prep over the capture values, replayed for all steps of its key. So the operations,
with their scalars, shapes and dtypes and with where their tensors lie, and what is returned, must not depend on
the step. Two warm-ups come first, as in a runner, so that what a prep makes at its first call is made.
"""

from __future__ import annotations

from itertools import zip_longest
from typing import Any

from graphglue.audit.certificate import Verdict
from graphglue.audit.evidence import Evidence
from graphglue.audit.subject import Subject, Unseen
from graphglue.audit.witness import Operation, Testimony, observe
from graphglue.core.buckets import Bucket
from graphglue.core.keys import Key

NAME = "same_ops"
_WARMUPS = 2
_MORE_CONTENTS = 3  # at one raw count


def run(subject: Subject) -> tuple[Verdict, list[Any]]:
    """Compare all steps that a key serves with what would be recorded, at every key. Sync: the device."""
    evidence = Evidence(subject.prep)
    num_steps = sum(_compare_key(subject, key, evidence) for key in subject.keys if not evidence.is_full)
    if not num_steps:
        raise Unseen("no step is served by any key of this prep")
    return evidence.result(f"{num_steps} steps at {len(subject.keys)} keys did what is recorded for them")


def _compare_key(subject: Subject, key: Key, evidence: Evidence) -> int:
    raws = subject.raws(key)
    if not raws:
        return 0
    subject.arena.fill_capture(key.bucket)
    for _ in range(_WARMUPS):
        subject.call(subject.view(key))
    recorded = _observed(subject, key, evidence)
    steps = [*enumerate(raws), *((len(raws) + more, max(raws)) for more in range(_MORE_CONTENTS))]
    for seed, raw in steps:
        subject.fill(key, raw, subject.sources(raw, seed))
        _compare(recorded, _observed(subject, key, evidence), key, raw, evidence)
    subject.restore()
    return len(steps)


def _observed(subject: Subject, key: Key, evidence: Evidence) -> Testimony:
    seen = observe(subject, key)
    if seen.error is not None:
        raise seen.error
    for finding in seen.unseen:
        evidence.unseen(str(finding), finding.text, op=finding.op, where=finding.where)
    return seen


def _compare(recorded: Testimony, seen: Testimony, key: Key, raw: Bucket, evidence: Evidence) -> None:
    """Note the first operation that differs, or else the first leaf that is returned."""
    step = f"a step of {raw.requests} requests and {raw.tokens} tokens in bucket {tuple(key.bucket)}"
    for number, (ours, theirs) in enumerate(zip_longest(recorded.operations, seen.operations)):
        if ours != theirs:
            text = f"operation {number} of {step} is {_spell(theirs)}; recorded was {_spell(ours)}"
            return evidence.fail(_place(theirs or ours), f"{text}. {_ADVICE}", **_fields(theirs or ours))
    for ours, theirs in zip_longest(recorded.returned, seen.returned):
        if ours != theirs:
            return evidence.fail("returned", f"{step} returns {theirs}; recorded was {ours}. {_ADVICE}")
    return None


_ADVICE = "What differs stays as it was recorded: keep it on the device, or let plan() pass it as a slot"


def _spell(operation: Operation | None) -> str:
    return "missing" if operation is None else f"{operation} at {operation.where}"


def _place(operation: Operation | None) -> str:
    return "" if operation is None else operation.where


def _fields(operation: Operation | None) -> dict[str, Any]:
    return {} if operation is None else {"op": operation.name, "where": operation.where}
