"""How often each batch size occurred: read from a file, or from what a trace of arrivals would have run as.

A trace says when requests came and how long they are, not what ran together. ``decode_histogram`` makes the simplest
engine of it: every step lasts the same, a request joins at the first step that begins after it came, its prompt takes
no time and gives the first token, and each step gives one more token to every request that runs.
"""

from __future__ import annotations

import json
import math
import sys
from collections import Counter
from collections.abc import Sequence
from heapq import heappop, heappush
from itertools import pairwise
from pathlib import Path
from typing import Annotated, Any, NamedTuple

from pydantic import NonNegativeInt, Strict, TypeAdapter, ValidationError

from graphglue.demo.arrivals import TraceRow, read_trace
from graphglue.demo.chunks import chunks_of
from graphglue.errors import ConfigError

STEP_MS = 20.0
MAX_TOKENS = 2048

_EXAMPLE = 'expected a JSON object from size to how often, such as {"1": 20, "7": 3}'
_HISTOGRAM = TypeAdapter(dict[NonNegativeInt, Annotated[NonNegativeInt, Strict()]])


class Counted(NamedTuple):
    """How often each count occurred, where that is from, and the largest size that the engine is set to, if known."""

    histogram: dict[int, int]
    source: str
    max_size: int | None


def counted(
    trace: Path | None,
    histogram: Path | None,
    tokens: bool = False,
    max_tokens: int | None = None,
    step_ms: float | None = None,
    max_running: int | None = None,
) -> Counted:
    """Read a histogram, or count a trace's decode steps or, with ``tokens``, the chunks of its prompts.

    Raises:
        ConfigError: no file or two, one that can not be read, or an option of another kind of count.
    """
    if (trace is None) == (histogram is None):
        raise ConfigError("expected --trace FILE or --histogram FILE, and one of them only")
    decoding = {"--step-ms": step_ms, "--max-running": max_running}
    prefill = {"--max-tokens": max_tokens}
    if histogram is not None:
        _refuse(
            {"--tokens": tokens or None, **decoding, **prefill}, "says how to count a --trace; a histogram is counted"
        )
        return Counted(read_histogram(histogram), f"histogram {histogram}", None)
    assert trace is not None
    rows = read_trace(trace, sys.maxsize)
    if tokens:
        _refuse(decoding, "is for decode steps; leave it or --tokens out")
        limit = MAX_TOKENS if max_tokens is None else max_tokens
        source = f"trace {trace}, {len(rows)} prompts in chunks of up to {limit} tokens, each a step of its own"
        return Counted(chunk_histogram(rows, limit), source, limit)
    _refuse(prefill, "is for the chunks of prompts; add --tokens")
    step = STEP_MS if step_ms is None else step_ms
    at_most = "" if max_running is None else f", at most {max_running} at once"
    source = f"trace {trace}, {len(rows)} requests decoded in steps of {step:g} ms{at_most}"
    return Counted(decode_histogram(rows, step, max_running), source, max_running)


def _refuse(options: dict[str, Any], why: str) -> None:
    for name, value in options.items():
        if value is not None:
            raise ConfigError(f"{name} {why}")


def read_histogram(path: Path) -> dict[int, int]:
    """Read a JSON object from size to how often.

    Raises:
        ConfigError: a file that can not be read, is no such object, or names a size twice.
    """
    try:
        text = path.read_text(encoding="utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"histogram {path} can not be read as a text file: {error}") from error
    try:
        pairs = json.loads(text, object_pairs_hook=_Pairs)
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"histogram {path} is no JSON: {error}; {_EXAMPLE}") from error
    if not isinstance(pairs, _Pairs):
        raise ConfigError(f"histogram {path} holds a {type(pairs).__name__}; {_EXAMPLE}")
    try:
        histogram = _HISTOGRAM.validate_python(dict(pairs))
    except ValidationError as error:
        first = error.errors()[0]
        part = "size" if first["loc"][-1] == "[key]" else f"how often {first['loc'][0]!r} occurred"
        raise ConfigError(f"histogram {path}, {part} {first['input']!r}: {first['msg']}; {_EXAMPLE}") from error
    if len(histogram) < len(pairs):
        raise ConfigError(f"histogram {path} names a size twice; add up how often it occurred")
    return histogram


class _Pairs(list[Any]):
    """What a JSON object held, the repeated keys as well."""


def decode_histogram(rows: Sequence[TraceRow], step_ms: float, max_running: int | None = None) -> dict[int, int]:
    """Count, for each number of running requests, the decode steps; the module's text says of which engine.

    Args:
        rows: requests in order of time.
        step_ms: how long every step lasts.
        max_running: how many run at once, at most; the others wait, first come first served. None: all.

    Raises:
        ConfigError: a length or a limit that is not above 0, or requests of one token, which a prompt's step gives.
    """
    if not 0 < step_ms < math.inf:
        raise ConfigError(f"step_ms={step_ms}: expected a number of milliseconds above 0")
    if max_running is not None and max_running < 1:
        raise ConfigError(f"max_running={max_running}: expected at least 1")
    changes: Counter[int] = Counter()
    ends: list[int] = []
    if rows and not math.isfinite(rows[-1].seconds * 1000 / step_ms):
        raise ConfigError(f"step_ms={step_ms}: too many such steps in the trace's {rows[-1].seconds:g} s to be counted")
    for row in rows:
        begin, num_steps = math.ceil(row.seconds * 1000 / step_ms), row.generated_tokens - 1
        if num_steps == 0:
            continue
        if len(ends) == max_running:
            begin = max(begin, heappop(ends))
        heappush(ends, begin + num_steps)
        changes.update({begin: 1})
        changes.subtract({begin + num_steps: 1})
    if not ends:
        raise ConfigError("no request of the trace generates a second token, so it has no decode step; see --tokens")
    return _levels(changes)


def _levels(changes: Counter[int]) -> dict[int, int]:
    """Count the steps at each level above 0; ``changes`` says at which steps the level moves, and how far."""
    steps_at: Counter[int] = Counter()
    level = 0
    for step, after in pairwise(sorted(changes)):
        level += changes[step]
        steps_at[level] += after - step
    return {level: num_steps for level, num_steps in sorted(steps_at.items()) if level}


def chunk_histogram(rows: Sequence[TraceRow], max_tokens: int) -> dict[int, int]:
    """Count the chunks of the prompts by their tokens, each chunk a step of its own.

    Raises:
        ConfigError: a limit below 1.
    """
    return dict(sorted(Counter(size for row in rows for size in chunks_of(row.context_tokens, max_tokens)).items()))
