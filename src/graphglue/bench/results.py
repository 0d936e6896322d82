"""What a run of the benchmark gives: rows, grouped in sections, and what they were measured on."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

SCHEMA = 2
BROKEN = "this section broke off"


@dataclass
class Row:
    """One measured thing.

    Attributes:
        label: what was measured.
        bucket: requests of the bucket; None where there is none.
        raw: real requests.
        in_flight: steps of the same kind that were queued right before the timed one.
        num_steps: timed steps.
        host_us, host_p99_us: median and 99th percentile of the host's time for one step.
        floor_us, floor_p99_us: the floor's, in the same rounds.
        times_floor: host_us in multiples of floor_us.
        device_us: the device's time for one step, queued behind a busy GPU.
        per_second: steps per second back to back.
        within_noise: closer to the floor than the floor is to itself (A/A): no difference is claimed.
        note: what a reader must know; why there are no numbers, if there are none.
        values: further numbers, with their unit in the name.
    """

    label: str
    bucket: int | None = None
    raw: int | None = None
    in_flight: int | None = None
    num_steps: int = 0
    host_us: float | None = None
    host_p99_us: float | None = None
    floor_us: float | None = None
    floor_p99_us: float | None = None
    times_floor: float | None = None
    device_us: float | None = None
    per_second: float | None = None
    within_noise: bool = False
    note: str = ""
    values: dict[str, float | bool] = field(default_factory=dict)


@dataclass
class Section:
    """Rows of one question.

    Attributes:
        name: what ``--only`` calls it.
        title: the question.
        rows: the answers.
        seconds: how long it took.
        notes: what holds for all rows.
    """

    name: str
    title: str
    rows: list[Row] = field(default_factory=list)
    seconds: float = 0.0
    notes: list[str] = field(default_factory=list)

    def find(self, label: str, bucket: int | None = None, padded: bool | None = None, in_flight: int = 0) -> Row | None:
        """Find a row with numbers."""
        for row in self.rows:
            fits = row.label == label and (row.in_flight or 0) == in_flight
            fits = fits and (bucket is None or row.bucket == bucket)
            if fits and (padded is None or (row.raw != row.bucket) == padded):
                return row
        return None


@dataclass
class Target:
    """One line of the table of what is to be reached, and what was seen."""

    what: str
    limit: str
    seen: str
    reached: bool | None


@dataclass
class Report:
    """All of one run."""

    machine: dict[str, Any]
    date: str
    versions: dict[str, str]
    command: str
    settings: dict[str, Any]
    sections: list[Section] = field(default_factory=list)
    targets: list[Target] = field(default_factory=list)

    def section(self, name: str) -> Section | None:
        """Find a section that was run."""
        return next((section for section in self.sections if section.name == name), None)

    @property
    def broken(self) -> list[str]:
        """Name the sections that broke off."""
        return [section.name for section in self.sections if any(row.label == BROKEN for row in section.rows)]

    def rows(self, names: Iterable[str]) -> list[Row]:
        """Give the rows of several sections."""
        return [row for name in names if (section := self.section(name)) for row in section.rows]

    def plain(self) -> dict[str, Any]:
        """Give everything as plain values, JSON-ready."""
        return {"schema": SCHEMA, **dataclasses.asdict(self)}

    def write_json(self, path: Path) -> None:
        """Write everything to a file."""
        path.write_text(json.dumps(self.plain(), indent=1) + "\n", encoding="utf-8")
