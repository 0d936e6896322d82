"""Effects: what a step did to the tables that ``contract.effects`` names, beside what it returned.

Pads must change nothing that a real row may read. They may write where the pad of an index slot leads: that row
is a sink.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from graphglue.audit.evidence import Evidence
from graphglue.audit.steps import Step
from graphglue.audit.subject import Subject
from graphglue.core.differences import Difference, first_difference
from graphglue.core.slots import Pad, kind_of

_ADVICE = "let pad rows write nowhere but into a sink row, which the pad of an index slot names"


def of(subject: Subject) -> dict[str, torch.Tensor]:
    """Copy the tables that the prep says it changes, as they are now. Sync: none."""
    return {name: subject.tables[name].clone() for name in subject.declared.effects}


def compare_glued(step: Step, eager: Any, glued: Any, evidence: Evidence) -> None:
    """Note a table that a replay changes otherwise than the eager prep."""
    found = first_difference(eager, glued)
    if found is not None:
        evidence.fail(f"effect of glued on {found.leaf}", f"{step}: glued, which changes a table otherwise: {found}")


def compare_unpadded(
    step: Step, unpadded: Mapping[str, torch.Tensor], padded: Mapping[str, torch.Tensor], evidence: Evidence
) -> None:
    """Note a table that pads change outside its sink rows; ``unpadded`` is what it was for IDLE.

    A slot that is no index of the table may lead anywhere, so what shows there is not sure to be a fault.
    """
    for name in unpadded:
        stated = _sinks(step.subject, name, stated=True)
        sinks = stated or _sinks(step.subject, name, stated=False)
        found = _beside(sinks, {name: unpadded[name]}, {name: padded[name]})
        if found is None:
            continue
        text = f"{step}: pads change table {name!r} outside rows {sinks}: {found}; {_ADVICE}"
        if (stated or not sinks) and not found.is_rounding:
            evidence.fail(f"effect of pads on {name}", text)
        else:
            advice = f"Slot(index_of={name!r}) says which slot names its sink"
            evidence.unseen(f"effect of pads on {name}", f"{text}; {advice}")


def _sinks(subject: Subject, table: str, stated: bool) -> list[int]:
    """List the rows of a table that pads lead to: by slots that are its index, or by any integer slot."""
    num_rows = subject.tables[table].shape[0] if subject.tables[table].dim() else 0
    found = set[int]()
    for name, slot in subject.arena.slots.items():
        known = slot.index_of == table if stated else kind_of(slot.dtype) == "integer"
        if subject.contract is None or name not in subject.contract.reads or not known:
            continue
        values = (slot.pad, slot.pad if slot.idle is None else slot.idle)
        found |= {int(value) for value in values if not isinstance(value, Pad) and 0 <= value < num_rows}
    return sorted(found)


def _beside(sinks: list[int], one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> Difference | None:
    for name, tensor in other.items():
        tensor = other[name] = tensor.clone()
        if sinks:
            tensor[sinks] = one[name][sinks]
    return first_difference(one, other)
