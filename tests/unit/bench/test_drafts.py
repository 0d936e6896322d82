"""The section on a draft's step: what it times, the rows and the target. (test_run.py starts its processes.)"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from types import SimpleNamespace

import pytest
import torch

import graphglue as gg
from graphglue.bench import draft_steps, drafts
from graphglue.bench.draft_steps import AGAIN, BARE, BLOCK, BUCKET, COMPILED, FLOOR, GROUPS, ONE, RAW, DraftWork
from graphglue.bench.gauge import Gauge
from graphglue.bench.results import Report, Row, Section
from graphglue.bench.separate import WithoutPreps
from graphglue.bench.targets import targets_of

CPU = torch.device("cpu")
LABELS = [*itertools.chain(*GROUPS)]
pytestmark = pytest.mark.usefixtures("frozen_imports")


@pytest.fixture(scope="module")
def work() -> DraftWork:
    return DraftWork(CPU)


@pytest.fixture(scope="module")
def runner(work: DraftWork) -> Iterator[gg.Runner]:
    with work.runner() as made:
        yield made


def test_one_process_times_every_contender_once_all_are_there(monkeypatch: pytest.MonkeyPatch) -> None:
    met = []
    monkeypatch.setattr(draft_steps, "_CHUNK", 2)
    times = draft_steps.measure(CPU, 3, 60.0, lambda: met.append(True))
    assert met == [True]
    assert sorted(times) == sorted({*LABELS} - {COMPILED}), "the tape records a prep as it is"
    assert all(0 < median <= p99 and steps == 3 for median, p99, steps in times.values())


def test_no_more_rounds_than_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(draft_steps, "_CHUNK", 2)
    found = draft_steps._timed({"a": lambda: None}, 100, 0.0, Gauge(CPU))
    assert len(found["a"].times_us) == 2, "one chunk at least"


def test_steps_are_padded_and_glued_and_checked(work: DraftWork, runner: gg.Runner) -> None:
    step = draft_steps.stepping(runner, work)
    draft_steps.check("whole", step, work, lambda: None)
    decision = step().decision  # type: ignore[attr-defined]
    assert (decision.prep, decision.reason) == (gg.Route.GLUE, gg.Reason.PADDED)
    assert decision.bucket == gg.Bucket(BUCKET, BUCKET * BLOCK, BLOCK)
    with pytest.raises(RuntimeError, match=r"WRONG: \w+ of step 0 of 'of another step' differs from the eager prep"):
        draft_steps.check("of another step", lambda: runner.replay(_batch(work, 1)), work, lambda: None)


def test_what_leaves_the_preps_out_runs_fill_and_forward_alone(work: DraftWork) -> None:
    with work.runner(device=WithoutPreps) as bare:
        captured = bare.replay(_batch(work, 0)).metadata["seq_lens_casual"].clone()
        step = bare.replay(_batch(work, 1))
        assert step.decision.prep is gg.Route.GLUE
        assert torch.equal(step.metadata["seq_lens_casual"], captured), "metadata was made anew"
        assert bare.view(BUCKET).seq_lens[:RAW].tolist() == work.sources[1]["seq_lens"].tolist()


def _batch(work: DraftWork, number: int) -> gg.Batch:
    return gg.Batch(RAW, work.sources[number], gg.Mode.DRAFT)


def made_up() -> list[drafts.Times]:
    """Give what three processes saw: glue takes 0.5, 0.9 and 3.0 us there."""
    return [
        {label: [20.0 + slow, 30.0 + slow, 900 + slow] for label in LABELS}
        | {ONE: [20.0 + slow + glue, 31.0 + slow, 900], FLOOR: [10.0, 15.0, 900], AGAIN: [19.9 + slow, 30.0, 900]}
        for slow, glue in ((0, 0.5), (4, 0.9), (40, 3.0))
    ]


def test_rows_have_the_median_and_the_worst_process() -> None:
    rows = {row.label: row for row in drafts.rows_of(made_up())}
    assert sorted(rows) == sorted(LABELS)
    bare, one, again = rows[BARE], rows[ONE], rows[AGAIN]
    assert (bare.host_us, bare.host_p99_us, bare.num_steps) == (24.0, 34.0, 900)
    assert bare.values == {"worst_us": 60.0, "worst_p99_us": 70.0}
    assert (bare.bucket, bare.raw, bare.times_floor) == (BUCKET, RAW, 2.4)
    assert one.values["glue_us"] == pytest.approx(0.9)
    assert one.values["worst_glue_us"] == pytest.approx(3.0)
    assert again.values["noise_us"] == pytest.approx(-0.1)


def test_a_contender_that_one_process_lacks_has_no_row() -> None:
    times = made_up()
    del times[1][COMPILED]
    assert COMPILED not in {row.label for row in drafts.rows_of(times)}


@pytest.mark.parametrize(("glue_us", "reached"), [(0.9, True), (1.1, False)])
def test_the_target_is_that_of_the_issue(glue_us: float, reached: bool) -> None:
    rows = [Row(label, BUCKET, RAW, 0, values={drafts.GLUE_US: glue_us}) for label in (ONE, COMPILED)]
    targets = targets_of(Report({}, "", {}, "", {}, [Section("speculative", "", rows)]))
    seen = [target for target in targets if target.seen != "-"]
    assert [(one.limit, one.reached) for one in seen] == [("at most 1.00 us", reached)] * 2


def test_processes_that_fail_say_why(monkeypatch: pytest.MonkeyPatch) -> None:
    failed = SimpleNamespace(stderr="process 1: out of memory")
    monkeypatch.setattr(drafts.subprocess, "run", lambda *_, **__: failed)
    with pytest.raises(RuntimeError, match=r"of 2 processes \['0', '1'\] gave no times: process 1: out of memory"):
        drafts.measure(CPU, 2, 3)
