"""The check "pad_image": a padded step is what it would be without padding, glued as well as eager."""

from __future__ import annotations

from typing import Any

from graphglue.audit import effects
from graphglue.audit.certificate import Finding, Verdict
from graphglue.audit.evidence import Evidence, spell_tensor
from graphglue.audit.steps import Step, note_error, recorded, snapshot
from graphglue.audit.subject import Subject
from graphglue.core import trees
from graphglue.core.differences import Difference, first_difference, without_axis
from graphglue.core.keys import Key
from graphglue.errors import ContractError
from graphglue.graphs import memory
from graphglue.graphs.base import Recording

NAME = "pad_image"
_SEEDS_OF_KEY = 1 << 12


def run(subject: Subject) -> tuple[Verdict, list[Finding]]:
    """Compare, for every step that each key serves, the glued, the eager and the unpadded prep bit by bit.

    Glued and eager are compared whole. Against the unpadded batch real rows are compared, by the axis that
    the contract declares; a leaf without one is not looked at, unless nothing is padded.

    Sync: the device. Capturable: no.
    """
    evidence = Evidence(subject.prep)
    num_steps = 0
    with memory.plain():
        for key in subject.keys:
            if evidence.is_full:
                break
            num_steps += _compare_key(subject, key, evidence)
        subject.restore()
    if not num_steps:
        evidence.unseen("", "no step was compared: the prep is glued at no key, or at none that it fills exactly")
    return evidence.result(f"{num_steps} steps at {len(subject.keys)} keys compared bit by bit")


def _compare_key(subject: Subject, key: Key, evidence: Evidence) -> int:
    raws = subject.raws(key)
    if not raws:
        return 0
    recording = recorded(Step.drawn(subject, key, max(raws)), evidence)
    # The first one comes again, and no two have the same values: what was kept of an earlier step shows.
    for seed, raw in enumerate([*raws, raws[0]], start=1 + _SEEDS_OF_KEY * subject.keys.index(key)):
        _compare_step(Step.drawn(subject, key, raw, seed), recording, evidence)
    if recording is not None:
        recording.close()
    return len(raws) + 1


def _compare_step(step: Step, recording: Recording | None, evidence: Evidence) -> None:
    axes, what = step.subject.declared.outputs, "padded"
    try:
        padded, changed = snapshot(step.eager()), effects.of(step.subject)
        trees.check_rows(padded, axes, *step.key.bucket[:2], f"prep {step.subject.name!r}")
        if recording is not None:
            what = "glued"
            glued = step.replayed(recording)
            _note(step, first_difference(padded, glued, axes, step.raw), "glued, which differs from eager: ", evidence)
            effects.compare_glued(step, changed, effects.of(step.subject), evidence)
        before = {name: step.subject.pristine[name] for name in changed}
        if step.raw.requests:
            what = "unpadded"
            _compare_unpadded(step, padded, step.unpadded(), evidence)
            before = effects.of(step.subject)
        effects.compare_unpadded(step, before, changed, evidence)
    except ContractError as error:
        evidence.fail("rows", f"{step}: {error}")
    except Exception as error:
        note_error(step, error, evidence, what)


def _compare_unpadded(step: Step, padded: Any, unpadded: Any, evidence: Evidence) -> None:
    axes, leaves = step.subject.declared.outputs, dict(trees.named_leaves(padded))
    rows = "all" if step.raw[:2] == step.key.bucket[:2] else "real"
    for leaf in without_axis(padded, axes) if rows == "real" else ():
        text = f"leaf {leaf!r} has no row axis in contract.outputs, so its real rows were not looked at; declare one"
        evidence.unseen(f"axis of {leaf}", text, tensor=spell_tensor(leaves[leaf]))
    found = first_difference(unpadded, padded, axes, step.raw, rows)
    _note(step, found, "padded, which differs from unpadded: ", evidence, shapes_differ=True)


def _note(step: Step, found: Difference | None, what: str, evidence: Evidence, shapes_differ: bool = False) -> None:
    if found is None:
        return
    if not found.is_rounding or not (shapes_differ or step.subject.declared.compile):
        evidence.fail(f"{what}{found.leaf}", f"{step}: {what}{found}")
    elif shapes_differ:
        text = f"{step}: {what}{found}; floats round otherwise at another shape, so a leak as small would not show"
        evidence.unseen(f"{what}{found.leaf}", text)
