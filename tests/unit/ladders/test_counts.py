"""Counts: a trace's steps are those of an engine that is run step by step; files are checked."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from graphglue import ConfigError
from graphglue.demo.arrivals import TraceRow
from graphglue.ladders.counts import Counted, chunk_histogram, counted, decode_histogram, read_histogram

TRACE = "TIMESTAMP,ContextTokens,GeneratedTokens\n2023-11-16 18:00:00.000,5,3\n2023-11-16 18:00:00.010,12,4\n"

gaps_and_lengths = st.lists(st.tuples(st.integers(0, 6), st.integers(1, 7)), min_size=1, max_size=12)


def rows_of(requests: list[tuple[int, int]]) -> list[TraceRow]:
    """Make rows of (seconds since the one before, generated tokens)."""
    now, rows = 0, []
    for gap, generated in requests:
        now += gap
        rows.append(TraceRow(float(now), 1, generated))
    return rows


def run_step_by_step(rows: list[TraceRow], step_s: int, max_running: int | None) -> dict[int, int]:
    """Run a loop as an engine would: admit, decode, retire."""
    waiting = [(row.seconds, row.generated_tokens - 1) for row in rows if row.generated_tokens > 1]
    running: list[int] = []
    sizes: Counter[int] = Counter()
    step = 0
    while waiting or running:
        while waiting and waiting[0][0] <= step * step_s and (max_running is None or len(running) < max_running):
            running.append(waiting.pop(0)[1])
        sizes[len(running)] += 1
        running = [left - 1 for left in running if left > 1]
        step += 1
    del sizes[0]
    return dict(sizes)


@given(
    requests=gaps_and_lengths.filter(lambda requests: any(generated > 1 for _, generated in requests)),
    step_s=st.integers(1, 4),
    max_running=st.one_of(st.none(), st.integers(1, 4)),
)
def test_decode_steps_are_those_of_an_engine(
    requests: list[tuple[int, int]], step_s: int, max_running: int | None
) -> None:
    rows = rows_of(requests)
    assert decode_histogram(rows, step_s * 1000, max_running) == run_step_by_step(rows, step_s, max_running)


def test_decode_steps_that_are_known_by_hand() -> None:
    """At 0 s, 3 tokens: steps 0 and 1. At 1 s, 4 tokens: steps 1, 2 and 3. A limit of 1 makes it wait for step 2."""
    rows = rows_of([(0, 3), (1, 4)])
    assert decode_histogram(rows, 1000) == {1: 3, 2: 1}
    assert decode_histogram(rows, 1000, max_running=1) == {1: 5}
    assert decode_histogram(rows, 100) == {1: 5}


@pytest.mark.parametrize(
    ("step_ms", "max_running", "said"),
    [
        (0, None, "step_ms=0: expected a number of milliseconds above 0"),
        (-1.0, None, "step_ms=-1.0"),
        (float("nan"), None, "step_ms=nan"),
        (float("inf"), None, "step_ms=inf"),
        (20, 0, "max_running=0: expected at least 1"),
    ],
)
def test_an_engine_that_can_not_be_is_refused(step_ms: float, max_running: int | None, said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        decode_histogram(rows_of([(0, 3)]), step_ms, max_running)


def test_requests_of_one_token_decode_nothing() -> None:
    with pytest.raises(ConfigError, match="no request of the trace generates a second token"):
        decode_histogram(rows_of([(0, 1), (1, 1)]), 20)


def test_prompts_are_counted_in_chunks() -> None:
    rows = [TraceRow(0.0, tokens, 1) for tokens in (5, 20, 8, 21)]
    assert chunk_histogram(rows, 8) == {4: 1, 5: 2, 8: 5}


def test_what_was_counted_says_of_what_and_up_to_where(tmp_path: Path) -> None:
    trace = tmp_path / "trace.csv"
    trace.write_text(TRACE)
    said = f"trace {trace}, 2 requests decoded in steps of 20 ms"
    assert counted(trace, None) == Counted({1: 3, 2: 1}, said, None)
    assert counted(trace, None, step_ms=5.0, max_running=9) == Counted(
        {1: 5}, f"trace {trace}, 2 requests decoded in steps of 5 ms, at most 9 at once", 9
    )
    chunks = counted(trace, None, tokens=True, max_tokens=8)
    assert chunks.histogram == {4: 1, 5: 1, 8: 1}
    assert chunks.max_size == 8
    assert counted(trace, None, tokens=True).max_size == 2048


def test_a_histogram_file_is_read(tmp_path: Path) -> None:
    path = tmp_path / "h.json"
    path.write_text('{"1": 20, "7": 3, "0": 5, "12": 0}')
    assert read_histogram(path) == {1: 20, 7: 3, 0: 5, 12: 0}
    assert counted(None, path) == Counted({1: 20, 7: 3, 0: 5, 12: 0}, f"histogram {path}", None)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", "is no JSON: Expecting value: line 1 column 1"),
        ("{'1': 2}", "is no JSON: Expecting property name"),
        ("[" * 100_000, "is no JSON: "),
        ("[1, 2]", "holds a list; expected a JSON object from size to how often"),
        ("3", "holds a int; expected a JSON object"),
        ('{"a": 1}', "h.json, size 'a': Input should be a valid integer"),
        ('{"1.5": 1}', "h.json, size '1.5': Input should be a valid integer"),
        ('{"-1": 1}', "h.json, size '-1': Input should be greater than or equal to 0"),
        ('{"1": -1}', "h.json, how often '1' occurred -1: Input should be greater than or equal to 0"),
        ('{"1": 1.5}', "how often '1' occurred 1.5: Input should be a valid integer"),
        ('{"1": "2"}', "how often '1' occurred '2': Input should be a valid integer"),
        ('{"1": true}', "how often '1' occurred True: Input should be a valid integer"),
        ('{"1": NaN}', "how often '1' occurred nan: Input should be a valid integer"),
        ('{"1": {"2": 3}}', "how often '1' occurred .*: Input should be a valid integer"),
        ('{"1": 2, "1": 3}', "h.json names a size twice; add up how often it occurred"),
        ('{"1": 2, "01": 3}', "h.json names a size twice"),
    ],
)
def test_a_file_that_is_no_histogram_is_refused(tmp_path: Path, text: str, said: str) -> None:
    path = tmp_path / "h.json"
    path.write_text(text)
    with pytest.raises(ConfigError, match=said):
        read_histogram(path)


def test_a_file_that_can_not_be_read_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"nothing\.json can not be read as a text file: .*No such file"):
        read_histogram(tmp_path / "nothing.json")
    (tmp_path / "bytes.json").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(ConfigError, match=r"bytes\.json can not be read as a text file"):
        read_histogram(tmp_path / "bytes.json")
