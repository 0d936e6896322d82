"""Fleets in integers, and the rows and targets of the section."""

from __future__ import annotations

import time
from pathlib import Path

import pytest
import torch

from graphglue import bench
from graphglue.bench import fleet, gathering, gathers, ranks
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
    for way in (gathers.GLOO, gathers.MEMORY):
        for between in (gathers.BACK_TO_BACK, gathers.PAUSE):
            gathered = section.find(ranks.gathered_label(2, way, between))
            assert gathered is not None
            assert gathered.host_us
            assert gathered.floor_us
            assert gathered.times_floor == pytest.approx(gathered.host_us / gathered.floor_us)


def test_a_row_is_held_against_the_gather_of_its_own_backend_and_rounds() -> None:
    way, floor = gathers.SHARED, gathers.BARE[gathers.NCCL]
    between = {way: [90.0, 100.0, 110.0], floor: [40.0, 50.0, 60.0], gathers.FORWARD_US: [1800.0]}
    (row,) = ranks.gathered_rows(2, {gathers.FORWARD: between})
    assert row.label == ranks.gathered_label(2, way, gathers.FORWARD)
    assert (row.host_us, row.host_p99_us, row.floor_us, row.times_floor) == (100.0, 110.0, 50.0, 2.0)
    assert "the forward takes 1800 us" in row.note


def test_the_forward_beside_an_agreement_is_recorded_with_its_sums() -> None:
    sums: list[torch.Size] = []
    forward = gathering.recorded(lambda rows: sums.append(rows.shape), torch.device("cpu"), width=8)
    assert sums == [torch.Size([64, 8])] * (2 * 40)  # once for real, once recorded
    forward.replay()
    forward.close()


def test_what_is_timed_does_not_hold_what_is_done_before_it() -> None:
    times = gathering._timed({"step": lambda: None}, 3, lambda: time.sleep(0.01))
    assert len(times["step"]) == 3
    assert max(times["step"]) < 5000
    assert min(gathering._timed({"step": lambda: time.sleep(0.01)}, 3)["step"]) > 5000


def test_ranks_that_fail_say_why() -> None:
    with pytest.raises(RuntimeError, match=r"(?s)2 nowhere ranks gave no times: .*nowhere"):
        gathers.measure(2, 20, "nowhere")


def test_targets_hold_the_figures_of_the_issue() -> None:
    rows = [Row(ranks.gathered_label(size), times_floor=1.2) for size in ranks.GATHERED]
    rows += [Row(ranks.gathered_label(2, gathers.NCCL), times_floor=1.4)]
    rows += [Row(ranks.label_of(128), host_us=51.0), Row(ranks.AFTER, in_flight=8, host_us=14.0)]
    targets = targets_of(Report({}, "", {}, "", {}, [Section("ranks", "", rows)]))
    seen = {target.what: target.reached for target in targets if target.reached is not None}
    assert list(seen.values()) == [True, True, True, False, True, False]
    assert sum("gloo ranks" in what for what in seen) == 3
