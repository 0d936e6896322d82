"""The flight recorder: the ring against what the steps said, errors' notes, the artifact, and where two parted."""

from __future__ import annotations

import tracemalloc
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from typer.testing import CliRunner

from graphglue import BindError, ConfigError
from graphglue.cli import app
from graphglue.flight import FlightPlan, FlightRecord, FlightStep, parting
from graphglue.flight.ring import FlightLedger
from graphglue.ledger import Ledger
from tests.unit.operations import batch, make, serve

pytestmark = pytest.mark.usefixtures("frozen_imports")
COUNTS = [3, 1, 0, 5, 9, 8, 3]


def test_the_last_steps_are_those_that_were_decided() -> None:
    runner, told = make(flight_recorder=4), []
    for requests in COUNTS:
        step = runner.replay(batch(requests))
        told.append((step.decision.reason.value, tuple(step.decision.bucket), tuple(step.raw)))
    record = runner.flight_record()
    assert [(one.reason, one.bucket, one.raw) for one in record.steps] == told[-4:]
    assert [one.number for one in record.steps] == [4, 5, 6, 7]
    assert [one.forward_reason for one in record.steps] == [None, "over_ladder", None, None]
    assert (record.rank, record.num_ranks) == (0, 1)


def test_counters_are_the_same_with_and_without() -> None:
    plain, recorded = make(), make(flight_recorder=3)
    for runner in (plain, recorded):
        serve(runner, COUNTS)
    for name in ("steps", "routes", "real_tokens", "padded_tokens", "last_decisions", "launch_fallbacks"):
        assert plain.stats()[name] == recorded.stats()[name], name


def test_a_runner_without_one_has_no_part_of_it() -> None:
    runner = make()
    assert type(runner._stepper.ledger) is Ledger
    with pytest.raises(ConfigError, match=r"RunnerConfig\(flight_recorder=256\)"):
        runner.flight_record()
    with pytest.raises(BindError) as caught:
        runner.replay(_misfit())
    assert not getattr(caught.value, "__notes__", [])


def _misfit() -> Any:
    step = batch(3)
    return type(step)(3, {"x": [1]})


def test_an_error_is_told_the_steps_before_it() -> None:
    runner = make(flight_recorder=8)
    serve(runner, [3, 9])
    for run in (runner.replay, runner.prepare):
        with pytest.raises(BindError) as caught:
            run(_misfit())
        (note,) = caught.value.__notes__
        assert "step 1: decode raw (3, 3, 1) bucket (4, 4, 1), glue/graph (padded)" in note
        assert "over_ladder" in note
    serve(runner, [2])
    steps = runner.flight_record().steps
    assert [(one.number, one.raised is None) for one in steps] == [
        (1, True), (2, True), (3, False), (3, False), (3, True),
    ]  # fmt: skip
    assert "expected exactly (3,)" in str(steps[2].raised)


def test_a_prep_that_raises_is_told_as_its_own_error() -> None:
    def prep(view: Any) -> dict[str, torch.Tensor]:
        if view.bucket.requests == 9:
            raise OSError("no table")
        return {"m": view.x + 1}

    runner = make(prep, flight_recorder=8)
    serve(runner, [3])
    with pytest.raises(OSError, match="no table") as caught:
        runner.replay(batch(9))
    assert "step 1: decode raw (3, 3, 1)" in caught.value.__notes__[0]
    assert runner.flight_record().steps[-1].raised == "OSError: no table"


def test_the_artifact_is_read_as_it_was_written(tmp_path: Path) -> None:
    runner = make(flight_recorder=8)
    serve(runner, COUNTS)
    runner.flight_record().write(tmp_path / "flight.json")
    assert FlightRecord.read(tmp_path / "flight.json") == runner.flight_record()


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("{", "Invalid JSON"),
        ('{"version": 2}', "version"),
        ('{"version": 1, "engine": 3}', "engine"),
        (None, "can not be"),
    ],
)
def test_what_is_no_record_is_refused(tmp_path: Path, text: str | None, said: str) -> None:
    if text is not None:
        (tmp_path / "f.json").write_text(text)
    with pytest.raises(ConfigError, match=said):
        FlightRecord.read(tmp_path / "f.json")


def test_a_full_ring_takes_no_more_memory() -> None:
    runner = make(flight_recorder=16)
    serve(runner, [3] * 50)
    tracemalloc.start()
    try:
        before = tracemalloc.get_traced_memory()[0]
        serve(runner, [3] * 500)
        grown = tracemalloc.get_traced_memory()[0] - before
    finally:
        tracemalloc.stop()
    assert grown < 8192


def step_of(number: int, **more: Any) -> FlightStep:
    values = {"prep": "glue", "forward": "graph", "reason": "padded", "mode": "decode", "bucket": (4, 4, 1)}
    return FlightStep(number=number, **{**values, "raw": (3, 3, 1), **more})


PLAN = FlightPlan(
    bucket=(4, 4, 1), mode="decode", forward="graph", padding="max_len", counts=(4, 4), reason="padded", digest=7
)


def record_of(*steps: FlightStep) -> FlightRecord:
    return FlightRecord(steps=steps)


def test_records_that_tell_the_same_do_not_part() -> None:
    one = record_of(*(step_of(number) for number in range(3, 9)))
    assert parting(one, one) is None
    assert parting(one, record_of(*one.steps[2:])) is None  # a shorter ring
    assert parting(record_of(), record_of()) is None


@given(st.integers(1, 20), st.integers(1, 20), st.sampled_from(["raw", "reason", "forward", "bucket"]))
def test_the_first_step_that_differs_is_named(length: int, where: int, field: str) -> None:
    steps = [step_of(number) for number in range(1, length + 1)]
    where = min(where, length)
    other = {"raw": (2, 2, 1), "reason": "unpadded", "forward": "eager", "bucket": (8, 8, 1)}[field]
    changed = [step.model_copy(update={field: other}) if step.number >= where else step for step in steps]
    found = parting(record_of(*steps), record_of(*changed))
    assert found is not None
    assert (found.number, found.fields) == (where, (field,))


def test_ranks_may_differ_in_what_is_their_own() -> None:
    one = step_of(1, plan=PLAN)
    own = {"raw": (1, 1, 1), "reason": "idle_eager", "prep": "eager", "variant": "'b'"}
    assert parting(record_of(one), record_of(one.model_copy(update=own))) is None
    other = one.model_copy(update={"plan": PLAN.model_copy(update={"digest": 8})})
    found = parting(record_of(one), record_of(other))
    assert found is not None
    assert found.fields == ("plan",)


def test_a_rank_that_was_refused_did_not_part_by_that() -> None:
    refused = [
        step_of(1, plan=PLAN),
        FlightStep(number=1, plan=PLAN, raised="BindError: misfit"),
        step_of(2, plan=PLAN),
    ]
    others = [step_of(1, plan=PLAN), step_of(2, plan=PLAN)]
    assert parting(record_of(*refused), record_of(*others)) is None
    undecided = [FlightStep(number=1, plan=PLAN, raised="BindError: misfit"), step_of(2, plan=PLAN)]
    assert parting(record_of(*undecided), record_of(*others)) is None


def test_a_rank_that_stopped_parted_there() -> None:
    steps = [step_of(number) for number in range(1, 6)]
    found = parting(record_of(*steps[:3]), record_of(*steps))
    assert found is not None
    assert found.number == 4
    assert "which only the second has" in found.spelled()


def test_records_of_different_times_are_refused() -> None:
    with pytest.raises(ConfigError, match="one has 1 to 1, the other 9 to 9"):
        parting(record_of(step_of(1)), record_of(step_of(9)))


def test_the_command_names_the_step_and_exits_with_1(tmp_path: Path) -> None:
    paths = [str(tmp_path / name) for name in ("a.json", "b.json")]
    steps = [step_of(1, plan=PLAN), step_of(2, plan=PLAN)]
    record_of(*steps).write(paths[0])
    record_of(*steps).write(paths[1])
    same = CliRunner().invoke(app, ["diff", *paths])
    assert (same.exit_code, same.output.strip()) == (0, "they tell the same")
    record_of(steps[0], step_of(2, plan=PLAN, forward="eager")).write(paths[1])
    parted = CliRunner().invoke(app, ["diff", *paths])
    assert parted.exit_code == 1
    assert "they part at step 2, in forward:\n  forward: graph | eager" in parted.output
    assert CliRunner().invoke(app, ["diff", paths[0], str(tmp_path / "none.json")]).exit_code == 2


def test_notes_reach_errors_where_python_adds_none() -> None:
    class Old(Exception):
        add_note = property(lambda self: (_ for _ in ()).throw(AttributeError("add_note")))

    ledger, error = FlightLedger(2), Old("x")
    ledger.raised(error)
    assert "flight recorder" in error.__notes__[0]
