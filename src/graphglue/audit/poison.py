"""The check "poison": garbage in all that a prep did not declare must not show in what it returns.

Poisoned are the tensors that the prep can reach by itself, the memory of slots beyond the bucket, what lies
behind the sources and in the tails before a fill, and the outputs before a run. All contents are put back.
"""

from __future__ import annotations

from typing import Any

from graphglue.audit.certificate import Finding, Verdict
from graphglue.audit.evidence import Evidence, spell_error
from graphglue.audit.steps import Step
from graphglue.audit.subject import Subject, Unseen
from graphglue.audit.trial import Look, Trial
from graphglue.core.keys import Key
from graphglue.graphs import memory

NAME = "poison"


def run(subject: Subject) -> tuple[Verdict, list[Finding]]:
    """Run steps clean and under garbage, and compare all rows bit by bit.

    A clean step has the declared pads in its tails, so its pad rows are the declared pad image.

    Sync: the device. Capturable: no. On a GPU an undeclared read may end the process: run it in one of its own.
    """
    evidence, num_steps, names = Evidence(subject.prep), 0, set[str]()
    with memory.plain():
        for key in subject.keys:
            steps = [Step.drawn(subject, key, raw) for raw in ([] if evidence.is_full else _some(subject, key))]
            try:
                names |= _run_key(steps, evidence)
            except Unseen:
                raise
            except Exception as error:  # a GPU that a prep has broken fails every later call
                evidence.fail("device", f"{steps[0]}: {spell_error(error)}")  # unless a trial said what it was
                return evidence.result("")
            num_steps += len(steps)
        subject.restore()
    if not num_steps:
        evidence.unseen("", "no step was run: the prep is glued at no key, or at none that it fills exactly")
    reached = f"; reached beside slots and tables: {sorted(names)}" if names else ""
    return evidence.result(f"{num_steps} steps run under garbage{reached}")


def _run_key(steps: list[Step], evidence: Evidence) -> set[str]:
    """Run steps of one key; name the tensors that the prep reached."""
    look = Look.at(steps[0], evidence) if steps else None
    if look is None:
        return set()
    try:
        for step in steps:
            Trial(step, look, evidence).run()
    finally:
        look.close()
    return {target.name for target in look.undeclared}


def _some(subject: Subject, key: Key) -> list[Any]:
    """Choose a padded step, a full one and, where it is glued, IDLE."""
    raws = subject.raws(key)
    served = [raw for raw in raws if raw.requests]
    chosen = [served[(len(served) - 1) // 2], max(served)] if served else []
    return list(dict.fromkeys(chosen + [raw for raw in raws if not raw.requests]))
