"""The artifact of the flight recorder: plain values, with a version."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

from pydantic import BaseModel, ConfigDict

from graphglue.artifacts import read_json


class _Plain(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class FlightPlan(_Plain):
    """What the ranks agreed on for a step; the same on every rank."""

    bucket: tuple[int, ...]
    mode: str
    forward: str
    padding: str
    counts: tuple[int, ...]
    reason: str
    digest: int


class FlightStep(_Plain):
    """One step. Everything but its number is None where it raised before it was decided.

    Attributes:
        number: with ranks the number of the agreement, the same on every rank; else of the step, from 1.
        raw: the real extents.
        launch: None where preps or forward ran eagerly, "" in one launch, else why it was more.
        plan: what the ranks agreed on.
        raised: the error that ended it.
    """

    number: int
    prep: str | None = None
    forward: str | None = None
    reason: str | None = None
    forward_reason: str | None = None
    mode: str | None = None
    bucket: tuple[int, ...] | None = None
    raw: tuple[int, ...] | None = None
    variant: str | None = None
    padding: str | None = None
    launch: str | None = None
    plan: FlightPlan | None = None
    raised: str | None = None

    def spelled(self) -> str:
        """Spell the step in one line."""
        if self.raised is not None:
            return f"step {self.number}: raised {self.raised}"
        why = self.reason if self.forward_reason is None else f"{self.reason}, forward {self.forward_reason}"
        return (
            f"step {self.number}: {self.mode} raw {self.raw} bucket {self.bucket}, {self.prep}/{self.forward} ({why})"
        )


class FlightRecord(_Plain):
    """The last steps of one runner, the oldest first.

    Attributes:
        version: of this format.
        rank, num_ranks: whose it is; 0 of 1 without ranks.
        steps: the steps.
    """

    version: Literal[1] = 1
    rank: int = 0
    num_ranks: int = 1
    steps: tuple[FlightStep, ...] = ()

    def write(self, path: Path | str) -> None:
        """Write the record as JSON."""
        Path(path).write_text(self.model_dump_json(indent=1) + "\n")

    @classmethod
    def read(cls, path: Path | str) -> FlightRecord:
        """Read a record that ``write`` wrote.

        Raises:
            ConfigError: no such file, or something else in it.
        """
        advice = "write one with runner.flight_record().write(FILE)"
        return read_json(cls, path, "is no flight record of version 1", advice)
