"""Arrivals: traces read or refused, generated ones repeatable, both fitted to the engine."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from graphglue.demo.arrivals import Request, TraceRow, fit, generate, max_gap, read_trace
from graphglue.errors import ConfigError

AZURE = Path(__file__).parents[4] / "shared" / "data" / "azure_llm_code_2023.csv"
HEADER = "TIMESTAMP,ContextTokens,GeneratedTokens\n"
GOOD = "2023-11-16 18:17:03.9799600,4808,10\n"


def trace(folder: Path, text: str) -> Path:
    """Write a trace."""
    path = folder / "trace.csv"
    path.write_text(text, encoding="utf-8")
    return path


def test_reads_rows_in_seconds_since_the_first(tmp_path: Path) -> None:
    path = trace(tmp_path, HEADER + GOOD + "2023-11-16 18:17:05.4799600,3180,8\n")
    assert read_trace(path, 10) == [TraceRow(0.0, 4808, 10), TraceRow(1.5, 3180, 8)]


def test_reads_no_more_rows_than_asked_for(tmp_path: Path) -> None:
    path = trace(tmp_path, HEADER + GOOD + "this row is never reached\n")
    assert len(read_trace(path, 1)) == 1


def test_takes_columns_in_any_order_and_others_beside(tmp_path: Path) -> None:
    path = trace(tmp_path, "GeneratedTokens,id,TIMESTAMP,ContextTokens\n8,x,2023-11-16T18:17:03,100\n")
    assert read_trace(path, 1) == [TraceRow(0.0, 100, 8)]


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ("yesterday,1,2", "line 3: TIMESTAMP is 'yesterday', expected for example 2023-11-16"),
        ("2023-11-16 18:17:04.x,1,2", "line 3: TIMESTAMP is '2023-11-16 18:17:04.x'"),
        ("2023-11-16 18:17:02,1,2", "line 3: TIMESTAMP 2023-11-16 18:17:02 is before the row above; sort"),
        ("2023-11-16 18:17:05,0,2", "line 3: ContextTokens is '0', expected a whole number of at least 1"),
        ("2023-11-16 18:17:05,5,-1", "line 3: GeneratedTokens is '-1', expected a whole number"),
        ("2023-11-16 18:17:05,5,2.5", "line 3: GeneratedTokens is '2.5'"),
        ("2023-11-16 18:17:04.-9,1,2", "line 3: TIMESTAMP is '2023-11-16 18:17:04.-9'"),
        (f"2023-11-16 18:17:05,5,{'9' * 5000}", "a whole number of at least 1, of 15 digits at most"),
        ("2023-11-16 18:17:05,5,\u0660", "line 3: GeneratedTokens is '\u0660', expected"),
        ("2023-11-16 18:17:05,5", "line 3: GeneratedTokens is None"),
        ("2023-11-16 18:17:05", "line 3: ContextTokens is None"),
    ],
)
def test_a_bad_row_is_named_by_its_line(tmp_path: Path, row: str, message: str) -> None:
    with pytest.raises(ConfigError) as refused:
        read_trace(trace(tmp_path, HEADER + GOOD + row + "\n"), 10)
    assert message in str(refused.value)


def test_a_header_without_the_columns_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"line 1: no column ContextTokens; the header is \['TIMESTAMP'"):
        read_trace(trace(tmp_path, "TIMESTAMP,GeneratedTokens\n"), 1)


def test_a_trace_without_rows_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="has a header and no rows"):
        read_trace(trace(tmp_path, HEADER), 1)


@pytest.mark.parametrize("content", [None, b"\xff\xfe\x00binary"])
def test_a_file_that_is_no_text_is_refused(tmp_path: Path, content: bytes | None) -> None:
    path = tmp_path / "trace.csv"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(ConfigError, match=r"trace\.csv can not be read as a CSV text file"):
        read_trace(path, 1)


def test_the_generator_repeats_itself_and_listens_to_its_seed() -> None:
    assert generate(50, seed=3) == generate(50, seed=3) != generate(50, seed=4)
    assert generate(50, seed=3) == generate(80, seed=3)[:50]


def concurrency(requests: list[Request], max_running: int) -> list[int]:
    """Count who decodes at each step, were the engine to admit at once up to ``max_running``."""
    arriving, lengths, sizes, step = list(requests), [], [], 0
    while arriving or lengths:
        while arriving and arriving[0].arrival <= step and len(lengths) < max_running:
            lengths.append(arriving.pop(0).generated_len)
        sizes.append(len(lengths))
        lengths = [left - 1 for left in lengths if left > 1]
        step += 1
    return sizes


@pytest.mark.parametrize("seed", range(4))
def test_generated_arrivals_reach_from_idle_to_over_the_ladder(seed: int) -> None:
    sizes = concurrency(fit(generate(96, seed), max_prompt=192, max_generated=48, num_running=16), 18)
    assert min(sizes) == 0
    assert max(sizes) > 16
    assert len(set(sizes)) > 10


@pytest.mark.skipif(not AZURE.exists(), reason="needs the real trace in ../shared/data to read by path")
def test_the_real_trace_has_idle_gaps_and_bursts() -> None:
    rows = read_trace(AZURE, 96)
    assert rows[0] == TraceRow(0.0, 4808, 10)
    sizes = concurrency(fit(rows, max_prompt=192, max_generated=48, num_running=16), 18)
    assert min(sizes) == 0
    assert max(sizes) > 16


rows_in_order = st.lists(
    st.tuples(st.floats(0, 1e6), st.integers(1, 10**6), st.integers(1, 10**6)), min_size=1, max_size=30
).map(lambda rows: [TraceRow(*row) for row in sorted(rows)])


@given(rows=rows_in_order, max_prompt=st.integers(1, 300), max_generated=st.integers(1, 50))
def test_fitting_keeps_order_and_limits(rows: list[TraceRow], max_prompt: int, max_generated: int) -> None:
    requests = fit(rows, max_prompt=max_prompt, max_generated=max_generated, num_running=4)
    assert len(requests) == len(rows)
    assert requests[0].arrival == 0
    for before, after in pairwise(requests):
        assert 0 <= after.arrival - before.arrival <= max_gap(max_generated) + 1
    for row, request in zip(rows, requests, strict=True):
        assert 1 <= request.prompt_len <= min(max_prompt, row.context_tokens)
        assert request.generated_len == min(row.generated_tokens, max_generated)


def test_requests_that_come_at_one_moment_arrive_at_one_step() -> None:
    rows = [TraceRow(0.0, 10, 3)] * 4
    assert {request.arrival for request in fit(rows, max_prompt=8, max_generated=8, num_running=2)} == {0}


@pytest.mark.parametrize("moment", [0.0, 5e-324, 1e-300, 1e-7])
def test_gaps_below_the_clock_s_resolution_still_make_whole_steps(moment: float) -> None:
    rows = [TraceRow(0.0, 10, 3), *(TraceRow(moment, 10, 3) for _ in range(9)), TraceRow(1.0, 10, 3)]
    arrivals = [request.arrival for request in fit(rows, max_prompt=8, max_generated=8, num_running=2)]
    assert arrivals[0] == 0
    assert arrivals == sorted(arrivals)
    assert arrivals[-1] <= max_gap(8) + 10
