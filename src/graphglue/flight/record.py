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


class FlightSource(_Plain):
    """What a batch handed in for one slot, bit for bit.

    Attributes:
        kind: a tensor or an array; a value (a number or a list); or unkept, something else.
        dtype: of a tensor or an array.
        shape: of a tensor or an array.
        bits: the bytes of a tensor or an array, in base 64.
        value: the value, as JSON; for one that is not kept, what it was.
    """

    kind: Literal["tensor", "array", "value", "unkept"]
    dtype: str | None = None
    shape: tuple[int, ...] | None = None
    bits: str | None = None
    value: str | None = None


class FlightBatch(_Plain):
    """A batch as it was handed in.

    Attributes:
        variant: the ``repr`` of the variant.
        prepared: by ``prepare``, so without the forward.
        sources: by slot.
    """

    requests: int
    tokens: int | None
    row_tokens: tuple[int, ...] | None
    mode: str
    variant: str
    features: tuple[str, ...]
    prepared: bool
    sources: dict[str, FlightSource]


class FlightStep(_Plain):
    """One step. Everything but its number is None where it raised before it was decided.

    Attributes:
        number: with ranks the number of the agreement, the same on every rank; else of the step, from 1.
        raw: the real extents.
        launch: None where preps or forward ran eagerly, "" in one launch, else why it was more.
        plan: what the ranks agreed on.
        raised: the error that ended it.
        batch: what it was handed, and ``results`` a digest of each tensor that it gave, where a runner keeps those.
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
    batch: FlightBatch | None = None
    results: dict[str, str] | None = None

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
        device: what the runner ran on, such as cpu.
        rank: whose it is; 0 without ranks.
        num_ranks: of how many.
        steps: the steps.
    """

    version: Literal[1] = 1
    device: str | None = None
    rank: int = 0
    num_ranks: int = 1
    steps: tuple[FlightStep, ...] = ()

    def write(self, path: Path | str) -> None:
        """Write the record as JSON."""
        Path(path).write_text(self.model_dump_json(indent=1) + "\n", encoding="utf-8")

    @classmethod
    def read(cls, path: Path | str) -> FlightRecord:
        """Read a record that ``write`` wrote.

        Raises:
            ConfigError: no such file, or something else in it.
        """
        advice = "write one with runner.flight_record().write(FILE)"
        return read_json(cls, path, "is no flight record of version 1", advice)
