"""Steps that are recorded with their sources, and repeated on the tape."""

from __future__ import annotations

import json
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as npst
from typer.testing import CliRunner

import graphglue as gg
from graphglue import Batch, BindError, ConfigError
from graphglue.cli import app
from graphglue.flight import FlightRecord, FlightSource
from graphglue.flight.ring import FlightLedger
from graphglue.flight.sources import SourcesLedger, Taken, batch_of
from graphglue.rerun import repeat
from tests.unit.flight.factories import make, meta, model, recording

pytestmark = pytest.mark.usefixtures("frozen_imports")
HERE = "tests.unit.flight.factories"
I64 = torch.int64


def step_of(requests: int, start: int = 0, width: int = 2, **more: Any) -> Batch:
    x = [start + row for row in range(requests)]
    return Batch(requests, {"x": x, "h": np.arange(requests * width, dtype=np.float32) + start}, **more)


def ragged() -> Batch:
    return Batch(3, {"x": (1, 2, 3), "h": torch.arange(5.0)}, row_tokens=[1, 3, 1])


STEPS: dict[str, Callable[[], Batch]] = {
    "padded": lambda: step_of(3),
    "unpadded": lambda: step_of(4, 5),
    "idle": Batch.idle,
    "over the ladder": lambda: step_of(5, 2),
    "ragged": ragged,
    "a variant": lambda: step_of(3, 1, variant="lora"),
    "a feature": lambda: step_of(3, 1, features=frozenset({"unknown", "known"})),
    "another width": lambda: step_of(2, 3, width=1, num_tokens=2),
    "a slot left out": lambda: Batch(2, {"x": torch.tensor([7, 9])}),
    "a number": lambda: Batch(1, {"x": 7, "h": [0.5, float("nan")]}),
}


def recorded(path: Path, *batches: Batch, run: str = "replay", **config: Any) -> list[Any]:
    with recording(**config) as runner:
        runner.capture(progress=False)
        results = []
        for batch in batches:
            try:
                results.append(getattr(runner, run)(batch).decision)
            except Exception as error:
                results.append(error)
        runner.flight_record().write(path)
    return results


@pytest.mark.parametrize("run", ["replay", "prepare"])
@pytest.mark.parametrize("name", STEPS)
def test_any_step_is_repeated_as_it_was(name: str, run: str, tmp_path: Path) -> None:
    (decision,) = recorded(tmp_path / "f.json", STEPS[name](), run=run)
    found = repeat(tmp_path / "f.json", f"{HERE}:plain")
    assert found, found.spelled()
    assert (found.changed, found.differences) == ([], [])
    if isinstance(decision, Exception):
        assert (name, run) == ("over the ladder", "prepare")
        assert found.glued.step.raised is not None
        assert found.glued.step.raised.startswith("CapacityError: ")
        return
    told = [decision.prep.value, decision.forward.value, decision.reason.value, tuple(decision.bucket)]
    for one in (found.recorded, found.glued.step):
        assert [one.prep, one.forward, one.reason, one.bucket] == told
    assert found.eager.step.prep == found.eager.step.forward == "eager"
    assert found.eager.step.bucket == found.glued.step.bucket
    num = len(found.glued.results or {})
    assert num == (1 if run == "prepare" else 3)
    assert f"{num} of {num} as recorded on cpu" in found.spelled()


def test_a_step_is_kept_as_it_was_when_it_was_called(tmp_path: Path) -> None:
    """Host sources may be overwritten at once, and outputs that are fed back are rewritten by the step itself."""
    with recording() as runner:
        runner.capture(progress=False)
        x, h = np.array([3, 4]), torch.arange(4.0)
        runner.replay(Batch(2, {"x": x, "h": h}))
        x[:], h[:] = 0, 0
        first = runner.replay(Batch(2, {"x": [3, 4], "h": torch.arange(4.0)}))
        fed = first.outputs["h"].clone()
        runner.replay(Batch(2, {"x": [5, 6], "h": first.outputs["h"]}))
        record = runner.flight_record()
        record.write(tmp_path / "f.json")
    one, two, three = (batch_of(step.batch, ()) for step in record.steps if step.batch is not None)
    assert one.sources["x"].tolist() == [3, 4]
    assert one.sources["h"].tolist() == [0, 1, 2, 3]
    assert record.steps[0].results == record.steps[1].results
    assert torch.equal(three.sources["h"], fed)
    assert two.sources["x"] == [3, 4]
    for number in (1, 2, 3):
        assert repeat(tmp_path / "f.json", f"{HERE}:captured", number)


def test_a_step_that_was_refused_is_refused_again(tmp_path: Path) -> None:
    bad = [Batch(2, {"x": [1]}), Batch(2, {"x": {1, 2}}), step_of(2), Batch(2.5, {})]  # type: ignore[arg-type]
    told = recorded(tmp_path / "f.json", *bad)
    assert [type(one) for one in told] == [BindError, BindError, gg.Decision, BindError]
    record = FlightRecord.read(tmp_path / "f.json")
    assert [step.batch is None for step in record.steps] == [False, False, False, True]
    found = repeat(tmp_path / "f.json", f"{HERE}:plain", 1)  # three steps have that number: nothing ran before
    assert found, found.spelled()
    assert "raised BindError: slot 'x': the source is extent (1,)" in found.spelled()


def test_staged_steps_are_kept_when_they_are_replayed(tmp_path: Path) -> None:
    with recording(staging=True) as runner:
        runner.capture(progress=False)
        batch = step_of(3)
        assert runner.stage(batch)
        assert runner.replay(batch).decision.reason is gg.Reason.STAGED
        runner.flight_record().write(tmp_path / "f.json")
    found = repeat(tmp_path / "f.json", f"{HERE}:plain")
    assert found
    assert [step.reason for step in (found.recorded, found.glued.step)] == ["staged", "padded"]


# What differs is said.


def test_a_replay_that_is_no_eager_run_is_a_difference(tmp_path: Path) -> None:
    recorded(tmp_path / "f.json", step_of(3))
    found = repeat(tmp_path / "f.json", f"{HERE}:frozen")
    assert not found
    assert any(text.startswith("metadata: glued is not eager: ") for text in found.differences), found.differences


def test_other_integers_than_were_recorded_are_a_difference(tmp_path: Path) -> None:
    recorded(tmp_path / "f.json", step_of(3))
    found = repeat(tmp_path / "f.json", f"{HERE}:other_integers")
    assert not found
    assert found.differences == [f"{name}: not what was recorded on cpu" for name in ("metadata.m", "outputs.ids")]


def test_other_floats_are_told_and_are_none(tmp_path: Path) -> None:
    recorded(tmp_path / "f.json", step_of(3, 5))
    found = repeat(tmp_path / "f.json", f"{HERE}:other_floats")
    assert found
    assert "2 of 3 as recorded on cpu; floats ['outputs.h'] are not" in found.spelled()


@pytest.mark.parametrize(("factory", "said"), [("plain", "nothing"), ("raising", "LookupError")])
def test_another_error_than_was_recorded_is_a_difference(factory: str, said: str, tmp_path: Path) -> None:
    recorded(tmp_path / "f.json", Batch(2, {"x": [1]}) if factory == "plain" else step_of(3))
    if factory == "plain":  # the step is right here, and was refused then
        text = (tmp_path / "f.json").read_text().replace('"requests": 2', '"requests": 1')
        (tmp_path / "f.json").write_text(text)
    found = repeat(tmp_path / "f.json", f"{HERE}:{factory}")
    assert not found
    then = "BindError" if factory == "plain" else "nothing"
    assert f"recorded: raised {then}; now: raised {said}" in found.differences


def test_a_step_that_ranks_agreed_on_says_that_it_is_decided_alone(tmp_path: Path) -> None:
    recorded(tmp_path / "f.json", step_of(3))
    plan = {
        "bucket": [4, 8, 2], "mode": "decode", "forward": "graph", "padding": "max_len", "counts": [8, 8],
        "reason": "padded", "digest": 7,
    }  # fmt: skip
    record = json.loads((tmp_path / "f.json").read_text())
    record["steps"][0]["plan"] = plan
    record["steps"][0]["bucket"] = [2, 4, 2]  # another than the runner takes alone: metadata have other rows there
    record["steps"][0]["results"]["metadata.m"] = "0" * 16
    (tmp_path / "f.json").write_text(json.dumps(record))
    found = repeat(tmp_path / "f.json", f"{HERE}:plain")
    assert found
    assert "here it was decided alone, so its bucket may be another" in found.spelled()
    assert "2 of 2 as recorded on cpu" in found.spelled()


def test_what_is_kept_does_not_keep_the_engine_s_own_tensors() -> None:
    with recording() as runner:
        batch = Batch(2, {"x": torch.tensor([1, 2])})
        kept = weakref.ref(batch.sources["x"])
        runner.replay(batch)
        runner.replay(Batch.idle())
        del batch
        assert kept() is None


# What can not be repeated is refused.


REFUSED: list[tuple[str, int | None, str]] = [
    ("plain", 9, "step 9 is not in the record, which holds steps 1 to 1"),
    ("unhappy", None, "unhappy raised OSError: no weights"),
    ("no_runner", None, "returned a object; expected a Runner"),
    ("nowhere", None, "has no attribute 'nowhere'"),
    ("no_lora", None, r"the step's variant is 'lora'; the runner has \['None'\]: pass variants"),
    ("ranked", None, "returned a runner with ranks; a step is repeated alone: pass ranks=None"),
]


@pytest.mark.parametrize(("factory", "number", "said"), REFUSED, ids=[row[0] for row in REFUSED])
def test_what_can_not_be_repeated_is_refused(factory: str, number: int | None, said: str, tmp_path: Path) -> None:
    recorded(tmp_path / "f.json", step_of(3, variant="lora"))
    with pytest.raises(ConfigError, match=said):
        repeat(tmp_path / "f.json", f"{HERE}:{factory}", number)


def test_a_record_without_sources_says_how_to_keep_them(tmp_path: Path) -> None:
    with make(config=gg.RunnerConfig(flight_recorder=4)) as runner:
        runner.replay(step_of(2))
        runner.flight_record().write(tmp_path / "f.json")
    advice = r"RunnerConfig\(flight_recorder=256, record_sources=True\)"
    for number, said in ((None, "no step of the record has kept"), (1, "step 1 has not kept")):
        with pytest.raises(ConfigError, match=f"{said} its sources; record with {advice}"):
            repeat(tmp_path / "f.json", f"{HERE}:plain", number)
    FlightRecord().write(tmp_path / "f.json")
    with pytest.raises(ConfigError, match="which holds no steps"):
        repeat(tmp_path / "f.json", f"{HERE}:plain", 1)


def test_a_source_that_could_not_be_kept_is_named(tmp_path: Path) -> None:
    recorded(tmp_path / "f.json", Batch(2, {"x": {1, 2}}))
    with pytest.raises(ConfigError, match="the source of slot 'x' was a set, which is not kept"):
        repeat(tmp_path / "f.json", f"{HERE}:plain")


def test_a_runner_elsewhere_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    recorded(tmp_path / "f.json", step_of(3))
    monkeypatch.setattr("graphglue.device.cpu.CpuDevice.__init__", _on_meta)
    with pytest.raises(ConfigError, match="plain returned a runner on meta; a step is repeated on the tape"):
        repeat(tmp_path / "f.json", f"{HERE}:plain")


def _on_meta(self: Any, device: Any) -> None:
    self.torch_device = torch.device("meta")


# What it costs.


def test_it_is_off_by_default_and_nothing_is_in_the_way_then() -> None:
    for config in (gg.RunnerConfig(), gg.RunnerConfig(flight_recorder=4)):
        with make(config=config) as runner:
            assert runner._run == runner._stepper.run
            assert type(runner._stepper.ledger) is not SourcesLedger
    assert type(runner._stepper.ledger) is FlightLedger
    with pytest.raises(ConfigError, match=r"record_sources needs a flight recorder; pass flight_recorder=256 too"):
        gg.RunnerConfig(record_sources=True)


def test_counters_are_the_same_with_and_without() -> None:
    told = []
    for config in (gg.RunnerConfig(flight_recorder=32), gg.RunnerConfig(flight_recorder=32, record_sources=True)):
        with make(config=config) as runner:
            runner.capture(progress=False)
            for name, build in STEPS.items():
                runner.replay(build())
                assert runner.flight_record().steps[-1].raised is None, name
            stats, record = runner.stats(), runner.flight_record()
            kept = ("batch", "results")
            steps = [step.model_copy(update=dict.fromkeys(kept)) for step in record.steps]
            told.append([stats[name] for name in ("steps", "routes", "real_tokens", "last_decisions")] + [steps])
    assert told[0] == told[1]


# Sources, bit for bit.

DTYPES = [torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64]
FLOATS = [torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.complex64, torch.float8_e4m3fn]


def _again(source: Any) -> Any:
    taken = Taken.of(Batch(1, {"x": source}), False)
    assert taken is not None
    spelled = taken.spelled()
    assert spelled is not None
    read = type(spelled).model_validate_json(spelled.model_dump_json())
    return batch_of(read, ()).sources["x"]


@given(st.sampled_from(DTYPES + FLOATS), st.lists(st.integers(0, 4), max_size=3), st.randoms())
def test_tensors_come_back_bit_for_bit(dtype: torch.dtype, shape: list[int], rng: Any) -> None:
    count = int(np.prod(shape)) * dtype.itemsize
    numbers = [rng.randrange(2 if dtype is torch.bool else 256) for _ in range(count)]
    tensor = torch.tensor(numbers, dtype=torch.uint8).view(dtype).reshape(shape)
    again = _again(tensor)
    assert (again.dtype, again.shape) == (tensor.dtype, tensor.shape)
    assert again.reshape(-1).view(torch.uint8).tolist() == numbers
    assert again.data_ptr() != tensor.data_ptr() or not count


@given(
    npst.arrays(st.sampled_from(["i8", "i4", "u2", "f4", "f8", "?", ">i4"]), npst.array_shapes(min_dims=0, min_side=0))
)
def test_arrays_come_back_bit_for_bit(array: np.ndarray) -> None:
    again = _again(array)
    assert (again.dtype, again.shape, again.tobytes()) == (array.dtype, array.shape, array.tobytes())


@given(
    st.recursive(st.booleans() | st.integers() | st.floats(), lambda inner: st.lists(inner, max_size=3), max_leaves=8)
)
def test_numbers_and_lists_come_back(value: Any) -> None:
    assert repr(_again(value)) == repr(value)


def test_what_is_none_of_these_is_said_not_to_be_kept() -> None:
    for source, said in (({1}, "a set"), (["a"], "a list"), (np.array(["a"]), "a ndarray"), (None, "a NoneType")):
        taken = Taken.of(Batch(1, {"x": source}), False)
        assert taken is not None
        assert taken.spelled().sources["x"] == FlightSource(kind="unkept", value=said)  # type: ignore[union-attr]
    assert Taken.of(3, False) is None


def _in_itself() -> list[Any]:
    own: list[Any] = []
    own.append(own)
    return own


UNREADABLE = {
    "no contents": lambda: torch.empty(3, device="meta", dtype=I64),
    "thousands of digits": lambda: [10**5000, 1, 2],
    "a list that holds itself": _in_itself,
}


@pytest.mark.parametrize("name", UNREADABLE)
def test_a_source_that_can_not_be_kept_hides_neither_the_step_s_error_nor_the_record(name: str) -> None:
    with recording() as runner:
        runner.capture(progress=False)
        runner.replay(step_of(3))
        with pytest.raises(BindError, match="slot 'x'") as refused:
            runner.replay(Batch(3, {"x": UNREADABLE[name](), "h": np.zeros(6, np.float32)}))
        assert "step 1: " in refused.value.__notes__[0]
        runner.replay(step_of(4))
        steps = runner.flight_record().steps
    assert [step.raised is None for step in steps] == [True, False, True]
    assert steps[1].batch is not None
    assert steps[1].batch.sources["x"].kind == "unkept"
    assert steps[1].batch.sources["h"].kind == "array"


CHANGES: list[tuple[str, dict[str, Any]]] = [
    ("h", {"bits": "AAAA"}),
    ("h", {"bits": "no base 64"}),
    ("h", {"shape": [-1, 7]}),
    ("h", {"dtype": "O"}),
    ("h", {"dtype": "none such"}),
    ("h", {"kind": "tensor", "dtype": "none_such"}),
    ("h", {"kind": "tensor", "dtype": "nn"}),
    ("h", {"kind": "tensor", "dtype": None}),
    ("x", {"value": "[1, 2"}),
]


@pytest.mark.parametrize(("slot", "change"), CHANGES)
def test_a_source_that_was_changed_since_is_refused_by_its_slot(
    slot: str, change: dict[str, Any], tmp_path: Path
) -> None:
    recorded(tmp_path / "f.json", step_of(3))
    record = json.loads((tmp_path / "f.json").read_text())
    record["steps"][0]["batch"]["sources"][slot].update(change)
    (tmp_path / "f.json").write_text(json.dumps(record))
    with pytest.raises(ConfigError, match=f"the source of slot '{slot}' is no .*; it was changed since"):
        repeat(tmp_path / "f.json", f"{HERE}:plain")


def test_a_mode_that_there_is_not_is_refused(tmp_path: Path) -> None:
    recorded(tmp_path / "f.json", step_of(3))
    text = (tmp_path / "f.json").read_text().replace('"decode"', '"dream"')
    (tmp_path / "f.json").write_text(text)
    with pytest.raises(ConfigError, match=r"mode is 'dream'; modes are \['decode'"):
        repeat(tmp_path / "f.json", f"{HERE}:plain")


def test_a_record_is_utf_8_whatever_the_locale(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    record = FlightRecord(device="é漢")
    monkeypatch.setattr("io.text_encoding", lambda encoding, level=2: encoding or "ascii")
    record.write(tmp_path / "f.json")
    assert FlightRecord.read(tmp_path / "f.json") == record


# The command.


def test_the_command_repeats_and_exits_with_what_it_found(tmp_path: Path) -> None:
    path = str(tmp_path / "f.json")
    recorded(tmp_path / "f.json", step_of(3), step_of(4))
    listed = CliRunner().invoke(app, ["rerun", path])
    assert listed.exit_code == 0
    assert listed.output.count("can be repeated with --factory") == 2
    ran = CliRunner().invoke(app, ["rerun", path, "--factory", f"{HERE}:plain", "--step", "1"])
    assert ran.exit_code == 0, ran.output
    for text in ("recorded  step 1", "glued     step 1", "eager     step 1", "glue/graph (padded)", "bit for bit"):
        assert text in ran.output
    differs = CliRunner().invoke(app, ["rerun", path, "--factory", f"{HERE}:frozen"])
    assert differs.exit_code == 1
    assert "differs   metadata: glued is not eager" in differs.output
    assert "bit for bit" not in differs.output
    for argv in (["rerun", str(tmp_path / "none.json")], ["rerun", path, "--factory", "nowhere"]):
        refused = CliRunner().invoke(app, argv)
        assert refused.exit_code == 2
        assert "graphglue rerun: " in refused.output


def test_the_factories_differ_from_the_recorded_runner_by_what_they_say() -> None:
    view = type("View", (), {"x": torch.tensor([1, 2]), "h": torch.arange(4.0), "variant": None})()
    assert meta(view)["m"].tolist() == [4, 7]
    assert model(view, meta(view))["ids"].tolist() == [11, 12, 13, 14]
