"""Arrivals for the demo: rows of a real trace, or of a seeded generator, fitted to a small engine.

A trace is a CSV file with the columns TIMESTAMP, ContextTokens and GeneratedTokens (the Azure LLM
inference traces have them). A production trace does not fit a toy model as it stands, so ``fit``
brings it down and changes as little as it can:

- prompts: the longest prompt becomes ``max_prompt`` tokens and the others shrink in proportion;
- generated lengths: cut at ``max_generated`` tokens, not scaled, because most are short already;
- time: a step lasts as long as makes ``num_running`` requests run on average while the service is
  busy, so bursts pile up and quiet stretches thin out as they did in the trace; a gap longer than
  ``max_gap()`` steps becomes that long, which is still enough to run dry.
"""

from __future__ import annotations

import csv
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from datetime import datetime, timezone
from itertools import islice, pairwise
from pathlib import Path
from statistics import median
from typing import IO

from graphglue.errors import ConfigError

COLUMNS = ("TIMESTAMP", "ContextTokens", "GeneratedTokens")
NUM_IDLE_AFTER_GAP = 6
BURSTS = (2, 4, 8, 24, 32)
SILENCES_S = (1.0, 30.0, 60.0)
_MAX_DIGITS = 15  # of a length: floats hold such numbers exactly


@dataclass(frozen=True)
class TraceRow:
    """One request as the service saw it: seconds since the first row, lengths in tokens."""

    seconds: float
    context_tokens: int
    generated_tokens: int


@dataclass(frozen=True)
class Request:
    """One request of the demo: the step it arrives at, and its lengths in tokens."""

    arrival: int
    prompt_len: int
    generated_len: int


def read_trace(path: str | Path, num_requests: int) -> list[TraceRow]:
    """Read the first ``num_requests`` rows of a trace.

    Args:
        path: a CSV file with a header line that has the three columns, in any order.
        num_requests: how many rows are wanted; a shorter trace gives all of its rows.

    Raises:
        ConfigError: the file cannot be read, lacks a column, has no rows, or has a bad row; the
            message names the line.
    """
    try:
        with open(path, newline="", encoding="utf-8-sig") as file:
            rows = list(islice(_parse(file, str(path)), num_requests))
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        raise ConfigError(f"trace {path} can not be read as a CSV text file: {error}") from error
    if not rows:
        raise ConfigError(f"trace {path} has a header and no rows; at least one request is needed")
    return rows


def _parse(file: IO[str], path: str) -> Iterator[TraceRow]:
    reader = csv.DictReader(file)
    missing = [name for name in COLUMNS if name not in (reader.fieldnames or ())]
    if missing:
        raise ConfigError(
            f"trace {path} line 1: no column {', '.join(missing)}; the header is {reader.fieldnames}, "
            f"and {', '.join(COLUMNS)} are needed"
        )
    first = last = None
    for row in reader:
        place = f"trace {path} line {reader.line_num}"
        now = _seconds(row["TIMESTAMP"], place)
        first = now if first is None else first
        if last is not None and now < last:
            raise ConfigError(f"{place}: TIMESTAMP {row['TIMESTAMP']} is before the row above; sort the rows")
        last = now
        yield TraceRow(now - first, _tokens(row, COLUMNS[1], place), _tokens(row, COLUMNS[2], place))


def _seconds(text: str | None, place: str) -> float:
    # The fraction is read by itself: the traces have seven digits, and Python's parser takes six.
    whole, _, fraction = (text or "").strip().partition(".")
    try:
        moment = datetime.strptime(whole.replace("T", " "), "%Y-%m-%d %H:%M:%S").replace(tzinfo=timezone.utc)
        if fraction and not fraction.isdecimal():
            raise ValueError
        return moment.timestamp() + float(f"0.{fraction}")
    except ValueError:
        example = "2023-11-16 18:17:03.9799600"
        raise ConfigError(f"{place}: TIMESTAMP is {text!r}, expected for example {example}") from None


def _tokens(row: dict[str, str | None], column: str, place: str) -> int:
    text = (row[column] or "").strip().lstrip("0")
    if not (text.isascii() and text.isdecimal() and len(text) <= _MAX_DIGITS):
        expected = f"a whole number of at least 1, of {_MAX_DIGITS} digits at most"
        raise ConfigError(f"{place}: {column} is {row[column]!r}, expected {expected}")
    return int(text)


def generate(num_requests: int, seed: int = 0) -> list[TraceRow]:
    """Make rows with bursts, lulls and silences, the same ones for the same seed.

    Args:
        num_requests: how many rows to make.
        seed: seeds the generator, which is Python's own and the same on every machine.
    """
    rng = random.Random(seed)
    now, left_in_burst, rows = 0.0, rng.choice(BURSTS), []
    for _ in range(num_requests):
        context, generated = rng.lognormvariate(7.0, 0.8), rng.lognormvariate(2.8, 0.8)
        rows.append(TraceRow(now, int(context) + 1, int(generated) + 1))
        left_in_burst -= 1
        now += rng.expovariate(4.0)
        if left_in_burst == 0:
            left_in_burst = rng.choice(BURSTS)
            now += rng.choice(SILENCES_S)
    return rows


def fit(rows: Sequence[TraceRow], *, max_prompt: int, max_generated: int, num_running: int) -> list[Request]:
    """Bring rows down to an engine's size; the module's text says how.

    Args:
        rows: at least one row, in order of time.
        max_prompt: the most prompt tokens the engine takes.
        max_generated: the most tokens a request generates.
        num_running: how many requests shall run on average while the service is busy.
    """
    longest = max(row.context_tokens for row in rows)
    scale = min(1.0, max_prompt / longest)
    generated = [min(row.generated_tokens, max_generated) for row in rows]
    gaps = [after.seconds - before.seconds for before, after in pairwise(rows)]
    step = _step_seconds(gaps, sum(generated) / num_running)

    requests, moment = [], 0.0
    for row, length, gap in zip(rows, generated, [0.0, *gaps], strict=True):
        moment += min(gap / step, max_gap(max_generated))
        requests.append(Request(int(moment), max(1, int(row.context_tokens * scale)), length))
    return requests


def max_gap(max_generated: int) -> int:
    """Give the longest gap in steps: the longest request ends in it, and some idle steps follow."""
    return max_generated + NUM_IDLE_AFTER_GAP


def _step_seconds(gaps: Sequence[float], num_steps: float) -> float:
    """Spread the busy stretches over ``num_steps`` steps; a gap far above the usual one is not busy.

    Stretches too short to be spread (none, or less than the smallest number) make steps of a second.
    """
    usual = median(gaps) if gaps else 0.0
    busy = sum(gap for gap in gaps if gap <= 10 * usual)
    return busy / num_steps or 1.0
