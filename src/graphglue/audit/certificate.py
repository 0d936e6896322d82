"""Certificates: which checks a prep passed, on what, and whether that still holds."""

from __future__ import annotations

import datetime
import enum
import hashlib
import platform
import sys
from collections.abc import Iterable, Mapping
from pathlib import Path

import torch
from pydantic import BaseModel, ConfigDict

from graphglue.artifacts import read_json
from graphglue.audit.source import UNREADABLE, Source
from graphglue.core.contract import GENERIC, PrepContract
from graphglue.core.keys import Key, KeySpace
from graphglue.core.slots import Slot
from graphglue.device.base import Device
from graphglue.errors import ConfigError
from graphglue.registry import Registration

# What a certificate must have looked at; each check adds its own name in run.py.
CHECK_NAMES = ("trace", "same_ops", "poison", "double_capture", "pad_image", "pointers")


class Verdict(str, enum.Enum):
    """What a check says. UNKNOWN is neither: this device or these arguments can not show it."""

    PASS = "pass"
    FAIL = "fail"
    UNKNOWN = "unknown"


class _Plain(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class Finding(_Plain):
    """One piece of evidence.

    Attributes:
        text: what was seen, and what to do about it.
        op: the operation.
        where: file:line of the prep.
        tensor: dtype and shape of the tensor it is about.
        region: where that lies: a slot, a table, or an address.
    """

    text: str
    op: str | None = None
    where: str | None = None
    tensor: str | None = None
    region: str | None = None

    def __str__(self) -> str:
        place = ", ".join(part for part in (self.where, self.tensor, self.region) if part)
        named = f"{self.op}: {self.text}" if self.op else self.text
        return f"{named} [{place}]" if place else named


class Check(_Plain):
    """What one check says of one prep."""

    name: str
    prep: str
    verdict: Verdict
    evidence: tuple[Finding, ...] = ()
    seconds: float = 0.0


class Audited(_Plain):
    """What a prep was when it was audited.

    Attributes:
        contract: hash of its declaration.
        source: hash of its code, and of its plan's.
        functions: the functions whose code that hash covers.
        slots: hash of the slots and tables it reads.
        keys: where it was looked at.
    """

    contract: str
    source: str
    functions: tuple[str, ...]
    slots: str
    keys: tuple[str, ...]

    @classmethod
    def of(
        cls, registration: Registration, slots: Mapping[str, Slot], tables: Mapping[str, torch.Tensor], space: KeySpace
    ) -> Audited:
        """Describe a prep as it is now.

        Args:
            registration: the prep, its contract and its planner.
            slots: the runner's slots, by name.
            tables: the runner's tables, by name.
            space: the runner's keys.

        Sync: none.
        """
        declared = registration.contract or GENERIC
        source = Source.of(registration.prep, registration.plan)
        return cls(
            contract=declared.digest(),
            source=source.digest,
            functions=source.functions,
            slots=_digest_of_slots(registration, slots, tables),
            keys=tuple(sorted(_spell(key) for key in keys_of(space, declared))),
        )

    def difference(self, now: Audited) -> str | None:
        """Say why what was audited is not what is there now; None if it is."""
        if self.contract != now.contract:
            return "its contract changed"
        if now.source.startswith(UNREADABLE):
            return "its code can not be read, so nothing says whether it changed"
        if self.source != now.source:
            return f"its code changed, in one of {list(now.functions)}"
        if self.slots != now.slots:
            return "the slots or tables that it reads changed"
        if missing := sorted(set(now.keys) - set(self.keys)):
            return f"it was not audited at {missing[:4]}{' and more' if len(missing) > 4 else ''}"
        return None


class Certificate(_Plain):
    """The record of an audit.

    Attributes:
        checks: what each check says of each prep.
        preps: what each prep was, by name.
        versions: of torch, CUDA, the driver, graphglue and Python.
        device: its name.
        date: when, in UTC.
    """

    checks: tuple[Check, ...]
    preps: dict[str, Audited]
    versions: dict[str, str]
    device: str
    date: str

    @property
    def passed(self) -> bool:
        """Whether no check fails. Unknown stands only for what this device or these arguments can not show."""
        return bool(self.checks) and all(check.verdict is not Verdict.FAIL for check in self.checks)

    def covers(self, name: str, now: Audited, device: Device) -> str | None:
        """Say why this does not certify a prep as it is now, on a device; None if it does.

        Args:
            name: the prep's name.
            now: what it is now.
            device: where it is to be glued.

        Sync: none.
        """
        audited = self.preps.get(name)
        if audited is None:
            return f"prep {name!r} is not in the certificate, which has {sorted(self.preps)}"
        seen, here = {**self.versions, "device": self.device}, conditions(device)
        if changed := [what for what in here if seen.get(what) != here[what]]:
            return "; ".join(f"{what} is {here[what]!r}, audited with {seen.get(what)!r}" for what in changed)
        checks = {check.name: check.verdict for check in self.checks if check.prep == name}
        if failed := [check for check, verdict in checks.items() if verdict is Verdict.FAIL]:
            return f"checks {failed} failed"
        if absent := [check for check in CHECK_NAMES if check not in checks]:
            return f"checks {absent} were not run; audit with level='full'"
        return audited.difference(now)

    def write(self, path: Path | str) -> None:
        """Write as JSON."""
        Path(path).write_text(self.model_dump_json(indent=2) + "\n", encoding="utf-8")

    @classmethod
    def read(cls, path: Path | str) -> Certificate:
        """Read what ``write`` wrote.

        Raises:
            ConfigError: no such file, or no certificate in it.
        """
        return read_json(cls, path, "holds no certificate", "write one with graphglue audit")


def why_uncertified(path: Path | None, name: str, now: Audited, device: Device) -> str | None:
    """Say why a prep, as it is now, is not certified by the certificate at a path; None if it is."""
    if path is None:
        return "RunnerConfig.certificate_path names no file"
    try:
        return Certificate.read(path).covers(name, now, device)
    except ConfigError as error:
        return str(error)


def issue(
    checks: Iterable[Check], preps: Mapping[str, Audited], device: Device, at: datetime.datetime | None = None
) -> Certificate:
    """Write out what an audit found on a device, dated now."""
    versions = conditions(device)
    moment = at or datetime.datetime.now(datetime.timezone.utc)
    return Certificate(
        checks=tuple(checks),
        preps=dict(preps),
        device=versions.pop("device"),
        versions=versions,
        date=moment.isoformat(timespec="seconds"),
    )


def conditions(device: Device) -> dict[str, str]:
    """Name the device, and the versions of all that a verdict rests on. Sync: none."""
    return {
        "graphglue": sys.modules[__name__.partition(".")[0]].__version__,
        "torch": torch.__version__,
        "python": platform.python_version(),
        **device.versions(),
    }


def _digest_of_slots(registration: Registration, slots: Mapping[str, Slot], tables: Mapping[str, torch.Tensor]) -> str:
    contract = registration.contract
    reads = slots if contract is None else contract.reads
    seen = tables if contract is None else contract.tables
    declared = [
        (name, slot.axis, slot.dtype, slot.pad, slot.inner, slot.row_dim, slot.idle, slot.index_of, slot.value)
        for name, slot in sorted(slots.items())
        if name in reads
    ]
    held = [(name, tables[name].dtype, tables[name].dim()) for name in sorted(seen)]
    return hashlib.sha256(repr((declared, held)).encode()).hexdigest()


def keys_of(space: KeySpace, declared: PrepContract) -> list[Key]:
    """List where a prep may be glued, the smallest bucket first."""
    legal, ragged = space.keys(), declared.ragged or space.counts_tokens
    found = [key for key in legal if key.mode in declared.modes and (ragged or key.row_tokens)]
    return sorted(found, key=lambda key: (key.bucket, key.mode.value))


def _spell(key: Key) -> str:
    width = f" of {key.row_tokens}" if key.row_tokens else ""
    plain = isinstance(key.variant, (bool, int, float, str, tuple))  # other values may spell their address
    variant = "" if key.variant is None else f" {key.variant if plain else type(key.variant).__name__!r}"
    return f"{key.mode.value} {key.requests}x{key.tokens}{width}{variant}"
