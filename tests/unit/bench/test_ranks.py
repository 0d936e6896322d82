"""Fleets in integers, and the rows and targets of the section."""

from __future__ import annotations

from pathlib import Path

import pytest

from graphglue import bench
from graphglue.bench import fleet, gathers, ranks
from graphglue.bench.results import Report, Row, Section
from graphglue.bench.targets import targets_of
from graphglue.demo.arrivals import Request, fit, generate

TRACE = """TIMESTAMP,ContextTokens,GeneratedTokens
2023-11-16 18:17:03.9799600,4808,10
2023-11-16 18:17:04.0319600,3180,8
2023-11-16 18:17:04.0781490,110,27
"""


def requests_of(count: int, num_ranks: int) -> list[Request]:
    return fit(generate(count), max_prompt=256, max_generated=16, num_running=4 * num_ranks)


@pytest.mark.parametrize("num_ranks", [1, 4, 32])
def test_a_fleet_serves_every_request(num_ranks: int) -> None:
    requests = requests_of(40, num_ranks)
    tally = fleet.simulate(requests, num_ranks, 100_000)
    prompts = sum(request.prompt_len for request in requests)
    generated = sum(request.generated_len for request in requests)
    assert tally.real_rows == prompts + generated  # each token once, on one rank or another
    assert tally.rows >= tally.real_rows
    assert len(tally.planner_us) == tally.steps
    assert all(0 <= share <= 1 for share in tally.shares().values())


def test_one_rank_pads_to_its_buckets_only() -> None:
    tally = fleet.simulate([Request(0, 8, 3)], 1, 100)
    assert (tally.steps, tally.prefill_steps, tally.idle_ranks, tally.rows) == (4, 1, 0, 11)


def test_more_ranks_than_requests_idle() -> None:
    shares = fleet.simulate([Request(0, 8, 3)], 4, 100).shares()
    assert shares["idle_share"] == 3 / 4


def test_the_trace_is_read_and_a_gather_is_timed(tmp_path: Path) -> None:
    trace = tmp_path / "trace.csv"
    trace.write_text(TRACE)
    section = Section("ranks", "")
    ranks.run_ranks(bench.settings_of("cpu", steps=3, trace=trace), section)
    fleets = [row for row in section.rows if row.label.startswith("a fleet")]
    assert [row.label for row in fleets] == [ranks.label_of(size) for size in ranks.FLEETS]
    assert all(row.host_us and row.num_steps for row in fleets)
    after = section.find(ranks.AFTER)
    assert after is not None
    assert after.num_steps == 3
    gathered = section.find(ranks.gathered_label(2))
    assert gathered is not None
    assert gathered.host_us
    assert gathered.times_floor


def test_ranks_that_fail_say_why() -> None:
    with pytest.raises(RuntimeError, match="2 gloo ranks gave no times"):
        gathers.measure(2, -100)


def test_targets_hold_the_figures_of_the_issue() -> None:
    rows = [Row(ranks.gathered_label(size), times_floor=1.2) for size in ranks.GATHERED]
    rows += [Row(ranks.label_of(128), host_us=51.0), Row(ranks.AFTER, in_flight=8, host_us=14.0)]
    targets = targets_of(Report({}, "", {}, "", {}, [Section("ranks", "", rows)]))
    seen = {target.what: target.reached for target in targets if target.reached is not None}
    assert list(seen.values()) == [True, True, True, True, False]
    assert sum("gloo ranks" in what for what in seen) == 3
