"""What a prep could read beside what it declares: tensors that it reaches, and its slots beyond the bucket."""

from __future__ import annotations

import torch

from graphglue.audit import garbage, holdings
from graphglue.audit.evidence import Evidence, spell_tensor
from graphglue.audit.garbage import Target
from graphglue.audit.steps import Step
from graphglue.audit.subject import Subject
from graphglue.core.keys import Key
from graphglue.core.slots import Axis
from graphglue.graphs import memory

_MAX_TOTAL_BYTES = 512 << 20
_MAX_NAMES = 8


def addresses_of_twin(subject: Subject) -> set[int]:
    """Give the storages of the twin's slots and tables, which the view hands out."""
    return memory.addresses([_whole_slots(subject), subject.tables])


def undeclared(
    subject: Subject, watch: holdings.Watch, evidence: Evidence, read_only: list[tuple[int, int]]
) -> list[Target]:
    """List what a prep reaches and was not handed: what a run read first, then what its objects hold.

    The runner's own slots and tables are not among them. A run that read those is noted as a fault.
    """
    held, is_complete = holdings.reachable(subject.prep)
    strange = [name for name, tensor in held.items() if not garbage.is_plain(tensor) and tensor.device.type != "meta"]
    reached = {name: tensor for name, tensor in held.items() if garbage.is_plain(tensor)}
    handed, known = addresses_of_twin(subject), memory.addresses(list(reached.values()))
    unnamed = [
        (f"a tensor that {operation} reads at {where}", tensor)
        for address, (tensor, operation, where) in watch.foreign.items()
        if address not in known
    ]
    found = [(name, tensor) for name, tensor in (*unnamed, *reached.items()) if not memory.addresses(tensor) & handed]
    found.sort(key=lambda item: not memory.addresses(item[1]) & watch.foreign.keys())
    own = [(name, tensor) for name, tensor in found if not _note_live(subject, name, tensor, watch, evidence)]
    targets, left_out = garbage.targets_of(own, read_only)
    kept = _within_budget(targets)
    left_out += strange + [str(target) for target in targets if target not in kept or not target.is_whole]
    if left_out:
        evidence.unseen("left out", f"not poisoned, or not as a whole: {left_out[:_MAX_NAMES]}")
    if not is_complete:
        evidence.unseen("incomplete", "the prep reaches more objects than were walked; let it hold fewer")
    return kept


def beyond(subject: Subject, key: Key) -> list[Target]:
    """List the memory of each slot behind a key's bucket."""
    found, wholes = [], _whole_slots(subject)
    for name, part in subject.arena.targets(key.bucket).items():
        slot, whole = subject.arena.slots[name], wholes[name]
        if slot.axis is Axis.FIXED or part.numel() == whole.numel():
            continue
        if slot.storage is None:  # a bucket's rows lie at the start of the slot, whatever its row_dim is
            rest = whole.view(-1)[part.numel() :]
        else:
            rows = part.shape[slot.row_dim]
            rest = whole.narrow(slot.row_dim, rows, whole.shape[slot.row_dim] - rows)
        found.append((f"slot {name!r} beyond the bucket", rest))
    return garbage.targets_of(found)[0]


def fill_beyond(subject: Subject) -> None:
    """Give all rows of the slots legal values."""
    key = max(subject.keys, key=lambda key: key.bucket)
    if served := [raw for raw in subject.raws(key) if raw.requests]:
        Step.drawn(subject, key, max(served), seed=1).fill()


def _note_live(subject: Subject, name: str, tensor: torch.Tensor, watch: holdings.Watch, evidence: Evidence) -> bool:
    """Tell whether a tensor is the runner's own, which is never written; note a run that reads it.

    Backends hold the engine's tables, and most take them from their view all the same. A read that torch does not
    see is the business of the checks "trace", which says what it can't look into, and "pointers".
    """
    region = subject.region_of(tensor)
    if region is None:
        return False
    _, operation, where = watch.foreign.get(tensor.untyped_storage().data_ptr(), (None, None, None))
    if where is not None:
        text = f"{name} is the runner's {region}, read past the view: read view.{region.name}, or declare the table"
        evidence.fail(name, text, op=operation, where=where, tensor=spell_tensor(tensor), region=str(region))
    return True


def _whole_slots(subject: Subject) -> dict[str, torch.Tensor]:
    arena = subject.arena
    return arena.targets(arena.space.bucket(arena.space.ladder.largest))


def _within_budget(targets: list[Target]) -> list[Target]:
    kept, total = [], 0
    for one in targets:
        total += one.memory.numel() * one.memory.element_size()
        if total <= _MAX_TOTAL_BYTES:
            kept.append(one)
    return kept
