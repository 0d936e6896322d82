"""Where two ranks parted: the first step that their flight records tell differently."""

from __future__ import annotations

from dataclasses import dataclass

from graphglue.errors import ConfigError
from graphglue.flight.record import FlightRecord, FlightStep

# Ranks agree on these; what each does with its own preps and counts is its own.
_AGREED = ("plan", "forward", "bucket", "padding")
_ALL = ("mode", "variant", "raw", "bucket", "padding", "prep", "forward", "reason", "forward_reason")


@dataclass(frozen=True, slots=True)
class Parting:
    """Name the first step at which two records part.

    Attributes:
        number: its number.
        fields: what differs; none where only one of them has the step.
        first: the step as the first record tells it; None where it has none.
        second: the step as the second one tells it.
    """

    number: int
    fields: tuple[str, ...]
    first: FlightStep | None
    second: FlightStep | None

    def spelled(self) -> str:
        """Say it in a few lines."""
        if self.first is None or self.second is None:
            who = "the second" if self.first is None else "the first"
            step = self.first or self.second
            assert step is not None
            return f"they part at step {self.number}, which only {who} has: {step.spelled()}"
        lines = [f"they part at step {self.number}, in {', '.join(self.fields)}:"]
        for field in self.fields:
            lines.append(f"  {field}: {getattr(self.first, field)} | {getattr(self.second, field)}")
        return "\n".join(lines)


def parting(first: FlightRecord, second: FlightRecord) -> Parting | None:
    """Find the first step at which two records part; None where they tell the same. Pure.

    Steps that ranks agreed on are compared in what ranks agree on; other runners' steps in every decision and count.

    Args:
        first: the record of one rank.
        second: the record of another rank, dumped at about the same time.

    Raises:
        ConfigError: the records have no step in common.
    """
    ours, theirs = _by_number(first), _by_number(second)
    begin = max(min(ours, default=1), min(theirs, default=1))
    end = max(max(ours, default=0), max(theirs, default=0))
    if begin > min(max(ours, default=0), max(theirs, default=0)) + 1:
        raise ConfigError(
            f"the records have no step in common: one has {_span(ours)}, the other {_span(theirs)}; dump them at the "
            "same time, or keep more steps with RunnerConfig(flight_recorder=...)"
        )
    for number in range(begin, end + 1):
        one, other = ours.get(number), theirs.get(number)
        if one is None or other is None:
            if one is other:
                continue
            return Parting(number, (), one, other)
        if fields := _differing(one, other):
            return Parting(number, fields, one, other)
    return None


def _by_number(record: FlightRecord) -> dict[int, FlightStep]:
    """Give the steps by number; one that ran and raised behind that is one step."""
    steps: dict[int, FlightStep] = {}
    for step in record.steps:
        ran = steps.get(step.number)
        joins = ran is not None and step.raised is not None and step.plan is not None
        steps[step.number] = ran.model_copy(update={"raised": step.raised}) if joins and ran is not None else step
    return steps


def _differing(one: FlightStep, other: FlightStep) -> tuple[str, ...]:
    if one.plan is not None or other.plan is not None:
        told = [(name, getattr(one, name), getattr(other, name)) for name in _AGREED]
        # A rank that raised before it was decided still took part in what was agreed.
        return tuple(
            name for name, a, b in told if a != b and (name == "plan" or None not in (one.bucket, other.bucket))
        )
    if one.raised is not None or other.raised is not None:
        return () if one.raised == other.raised else ("raised",)
    return tuple(name for name in _ALL if getattr(one, name) != getattr(other, name))


def _span(steps: dict[int, FlightStep]) -> str:
    return f"{min(steps)} to {max(steps)}" if steps else "none"
