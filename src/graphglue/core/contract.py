"""Contracts: what a backend declares about its prep."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping
from collections.abc import Set as AbstractSet
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, ValidationError, field_validator, model_validator

from graphglue.core.batch import Mode
from graphglue.core.slots import Axis, Pad, PadValue, Slot, same_pad
from graphglue.errors import ContractError

ROW_AXES = (Axis.TOKEN, Axis.REQUEST, Axis.OFFSET, Axis.FIXED)


class PrepContract(BaseModel):
    """Declare what a prep reads, returns and may be glued for.

    Attributes:
        name: the prep's name; unique within a registry.
        reads: slot -> the pad value, or a tuple of pad values, that the prep is right for.
        tables: persistent tensors it reads.
        outputs: leaf of what it returns -> row axis (token, request, offset, fixed). A leaf left
            out is returned as well, and "unknown" to the audit.
        modes: the modes it may be glued in.
        host_free: it reads nothing on the host that changes within a key.
        padded: it is right on padded replays.
        ragged: it is right for requests of different token counts.
        idle: what an IDLE step does: run it eagerly, replay it, or skip it (EXTEND only).
        features: active features it was audited with, such as "lora".
        writes: persistent tensors it fills in place, by name.
        effects: tables it changes. Such a prep is never repeated on live tables.
        reads_end: until when tables are read: by the prep, or by the forward.
        live: keys of the dict it returns whose values change shape, or are no tensors and change, from step to step.
            Only eager breaks of a segmented forward read them, by ``view.live.metadata``; the forward itself is
            handed None in their place.
        compile: put the prep through torch.compile before it is captured.

    Raises:
        ContractError: a field of the wrong kind, or fields that contradict each other.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    name: str = ""
    reads: Mapping[str, Any] = {}
    tables: tuple[str, ...] = ()
    outputs: Mapping[str, Any] = {}
    modes: AbstractSet[Mode]
    host_free: bool = True
    padded: bool = True
    ragged: bool = False
    idle: Literal["eager", "skip", "glue"] = "eager"
    features: AbstractSet[str] = frozenset()
    writes: tuple[str, ...] = ()
    effects: tuple[str, ...] = ()
    reads_end: Literal["prep", "forward"] = "prep"
    compile: bool = False
    live: tuple[str, ...] = ()

    @model_validator(mode="after")
    def _check_together(self) -> PrepContract:
        if not self.modes:
            raise ValueError("modes is empty; declare at least one, such as {Mode.DECODE}")
        if self.idle == "skip" and self.modes != {Mode.EXTEND}:
            raise ValueError(
                "idle='skip' outside segmented EXTEND: under a full graph an idle replay would read and write "
                "through the last step's metadata; use idle='eager' or 'glue'"
            )
        if self.live and self.host_free:
            raise ValueError(
                f"live names {list(self.live)}, which no captured prep returns anew; declare host_free=False, or let "
                "plan() compute them as slots"
            )
        if twice := sorted(set(self.live) & set(self.outputs)):
            raise ValueError(f"outputs and live both name {twice}; a live leaf has no rows at the bucket")
        if unknown := set(self.effects) - set(self.tables):
            raise ValueError(f"effects names {sorted(unknown)}, which tables does not; a changed table is also read")
        return self

    @field_validator("outputs")
    @classmethod
    def _check_row_axes(cls, outputs: Mapping[str, Any]) -> dict[str, Axis]:
        for leaf, axis in outputs.items():
            if axis not in ROW_AXES:
                raise ValueError(f"leaf {leaf!r} on axis {axis!r}; expected token, request, offset or fixed")
        return {leaf: Axis(axis) for leaf, axis in outputs.items()}

    @field_validator("modes", "features")
    @classmethod
    def _freeze(cls, members: AbstractSet[Any]) -> frozenset[Any]:
        return frozenset(members)

    # Defined last, so that it wraps the others.
    @model_validator(mode="wrap")
    @classmethod
    def _say_contract_error(cls, values: Any, handler: Any) -> Any:
        try:
            return handler(values)
        except ValidationError as error:
            name = values.get("name", "") if isinstance(values, Mapping) else ""
            faults = "; ".join(f"{'.'.join(map(str, e['loc'])) or 'contract'}: {e['msg']}" for e in error.errors())
            strange = any(e["type"] == "extra_forbidden" for e in error.errors())
            known = f"; fields are {sorted(cls.model_fields)}" if strange else ""
            raise ContractError(f"contract {name!r} is not usable: {faults}{known}") from error

    def __hash__(self) -> int:
        return hash(self.digest())

    def model_copy(self, *, update: Mapping[str, Any] | None = None, deep: bool = False) -> PrepContract:
        """Copy with changes, which are checked like any declaration."""
        return PrepContract(**{**self.model_dump(), **(update or {})})

    def pads_of(self, slot: str) -> tuple[PadValue, ...]:
        """Give the pad values of a slot that this prep is right for."""
        pads = self.reads[slot]
        return tuple(pads) if isinstance(pads, Iterable) and not isinstance(pads, (str, bytes)) else (pads,)

    def digest(self) -> str:
        """Hash the declaration; equal contracts have equal digests in every process."""
        fields = self.model_dump(mode="python")
        for name, value in fields.items():
            if isinstance(value, frozenset):
                fields[name] = sorted(str(getattr(item, "value", item)) for item in value)
        fields["reads"] = {slot: sorted(map(repr, self.pads_of(slot))) for slot in sorted(self.reads)}
        fields["outputs"] = {leaf: self.outputs[leaf].value for leaf in sorted(self.outputs)}
        return hashlib.sha256(repr(sorted(fields.items())).encode()).hexdigest()


# What a prep without a contract counts as once generic glue is on: design.md section 5.
GENERIC = PrepContract(modes=frozenset({Mode.DECODE}), padded=False)


def check_contracts(contracts: Mapping[str, PrepContract], slots: Mapping[str, Slot], tables: Iterable[str]) -> None:
    """Hold contracts against the slots and tables they will run on.

    Raises:
        ContractError: an unknown slot or table, two preps that need different pads of one slot, or
            a slot whose pad (or, for idle="glue", idle value) the contract is not right for.
    """
    known_tables = set(tables)
    for name, contract in contracts.items():
        for read in contract.reads:
            if read not in slots:
                raise ContractError(
                    f"prep {name!r} reads slot {read!r}, which is unknown; slots are {sorted(slots)}: "
                    "declare the slot, or correct contract.reads"
                )
        for table in contract.tables:
            if table not in known_tables:
                raise ContractError(
                    f"prep {name!r} reads table {table!r}, which was not handed in; tables are {sorted(known_tables)}"
                )
    for name, slot in slots.items():
        _check_common_pad(slot, {reader: c for reader, c in contracts.items() if name in c.reads})


def _check_common_pad(slot: Slot, readers: Mapping[str, PrepContract]) -> None:
    names = list(readers)
    for first, second in zip(names, names[1:]):
        ours, theirs = readers[first].pads_of(slot.name), readers[second].pads_of(slot.name)
        if not any(same_pad(one, other) for one in ours for other in theirs):
            raise ContractError(
                f"slot {slot.name!r}: prep {first!r} needs pad {_spell(ours)}, prep {second!r} needs pad "
                f"{_spell(theirs)}; no value serves both: give each its own slot"
            )
    for name, contract in readers.items():
        pads = contract.pads_of(slot.name)
        if not any(same_pad(slot.pad, pad) for pad in pads):
            raise ContractError(
                f"slot {slot.name!r} has pad {_spell((slot.pad,))}, but prep {name!r} is right for "
                f"{_spell(pads)}; change the slot's pad or the contract"
            )
        if contract.idle == "glue" and slot.idle is not None and not any(same_pad(slot.idle, pad) for pad in pads):
            raise ContractError(
                f"slot {slot.name!r} has idle value {slot.idle!r}, but prep {name!r} glues IDLE steps and is right "
                f"for {_spell(pads)}; change the idle value or use idle='eager'"
            )


def _spell(pads: tuple[PadValue, ...]) -> str:
    return " or ".join(pad.name if isinstance(pad, Pad) else repr(pad) for pad in pads)
