"""The shadow check on the CPU tape: what it finds, what it leaves alone, and when it acts.

Faults are put between the fill and the forward of a captured runner, as bytes, as Python values that a recording
has baked, and as a fill that forgets a tail. Every correct engine here is one that a naive check would accuse.
"""

from __future__ import annotations

import json
import logging
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

import graphglue as gg
from graphglue.audit.shadow import CAPTURING, RANDOM, USED_UP, ShadowCheck
from graphglue.core.binding import Write
from graphglue.device import cpu
from graphglue.preps import paged_decode
from graphglue.stepping import SAMPLED

pytestmark = pytest.mark.usefixtures("frozen_imports")

PADS = {"lens": 1, "rows": 0, "loc": 0}
ALL = gg.Shadow(first=0, every=1)
KEY_OF_4 = gg.Key(gg.Mode.DECODE, 4, 4, 1)


def slots() -> list[gg.Slot]:
    return [
        gg.Slot("lens", "request", torch.int64, 1),
        gg.Slot("rows", "request", torch.int64, 0),
        gg.Slot("loc", "token", torch.int64, 0),
    ]


def table() -> torch.Tensor:
    return torch.arange(42).reshape(7, 6) * 3


def meta(view: Any) -> dict[str, torch.Tensor]:
    return {"pages": view.tables.t[view.rows][:, ::2], "positions": view.lens - 1, "where": view.loc * 2}


def contract(name: str = "meta", **more: Any) -> gg.PrepContract:
    fields: dict[str, Any] = {
        "reads": PADS,
        "tables": ("t",),
        "outputs": {"pages": "request", "positions": "request", "where": "token"},
        "modes": {gg.Mode.DECODE},
    }
    return gg.PrepContract(name=name, **{**fields, **more})


def model(view: Any, metadata: Mapping[str, torch.Tensor]) -> torch.Tensor:
    return metadata["pages"].sum(1) + metadata["positions"] * 10 + metadata["where"] + view.loc


def draw(requests: int, start: int = 0) -> dict[str, list[int]]:
    rows = range(start, start + requests)
    return {"lens": [2 + r % 9 for r in rows], "rows": [1 + r % 6 for r in rows], "loc": [5 + r for r in rows]}


def batch(requests: int = 3, start: int = 0) -> gg.Batch:
    return gg.Batch(requests, draw(requests, start))


def build(
    prep: Any = meta, shadow: gg.Shadow | None = ALL, declared: gg.PrepContract | None = None, **more: Any
) -> gg.Runner:
    registry = gg.Registry()
    hooks = {name: more.pop(name) for name in ("plan", "publish") if name in more}
    registry.register(declared or contract(), **hooks)(prep)
    fields: dict[str, Any] = {
        "slots": slots(),
        "ladder": [1, 2, 4],
        "prep": (declared or contract()).name,
        "registry": registry,
        "tables": {"t": table()},
        "forward": model,
        "config": gg.RunnerConfig(shadow=shadow, **more.pop("config", {})),
    }
    return gg.Runner(**{**fields, **more})


def captured(*args: Any, **more: Any) -> gg.Runner:
    runner = build(*args, **more)
    runner.capture(progress=False)
    return runner


def seen(runner: gg.Runner) -> dict[str, Any]:
    """Give the counts, after checking that they add up."""
    stats = runner.stats()["shadow"]
    json.dumps(stats)
    assert stats["sampled"] == stats["passed"] + stats["mismatched"] + stats["failed"] + stats["pending"]
    return stats


def counts(runner: gg.Runner) -> tuple[int, int, int]:
    stats = seen(runner)
    return stats["passed"], stats["mismatched"], stats["failed"]


def assert_right(step: gg.Step, requests: int, start: int = 0) -> None:
    """Hold a step's metadata against the prep on a batch that is padded from scratch."""
    rows = step.decision.bucket.requests
    padded = {name: torch.tensor([*draw(requests, start)[name], *[pad] * rows][:rows]) for name, pad in PADS.items()}
    view = SimpleNamespace(**padded, tables=SimpleNamespace(t=table()))
    expected = meta(view)
    assert {name: leaf.tolist() for name, leaf in step.metadata.items()} == {
        name: leaf.tolist() for name, leaf in expected.items()
    }
    assert step.outputs.tolist() == model(view, expected)[:requests].tolist()


class Host:
    """A value on the host that a prep reads and a recording bakes."""

    def __init__(self) -> None:
        self.add = 0

    def prep(self, view: Any) -> dict[str, torch.Tensor]:
        return {**meta(view), "positions": view.lens - 1 + self.add}


def without_tails(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the fill of a bucket write heads only, and leave the reference as it is."""

    def run(self: Any) -> None:
        writes, self._writes = self._writes, ()
        heads = [Write(w.slot, w.source, w.raw, w.raw, w.pad) for w in writes if w.raw]
        self._device.fill_once(heads, self._targets)

    monkeypatch.setattr(cpu.TorchFill, "run", run)


@contextmanager
def spoiled(change: Callable[[Any], None]) -> Iterator[None]:
    """Change what glued preps left, behind them and before anything is compared."""
    check = ShadowCheck.check

    def spoil(self: ShadowCheck, twin: Any) -> None:
        for unit in self._units:
            if twin.decision.preps[unit.name].route is gg.Route.GLUE:
                change(unit.cache.result(twin.decision.key))
        check(self, twin)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ShadowCheck, "check", spoil)
        yield


# The rule.


def test_a_rule_has_defaults_and_is_a_plain_frozen_value() -> None:
    rule = gg.Shadow()
    assert (rule.first, rule.every, rule.on_mismatch) == (8, 1000, "quarantine")
    assert gg.RunnerConfig().shadow is None
    assert gg.RunnerConfig(shadow={"first": 2}).shadow == gg.Shadow(first=2)
    assert gg.RunnerConfig(shadow=rule).model_copy(update={"padding": False}).shadow == rule
    with pytest.raises(Exception, match="frozen"):
        rule.first = 3  # type: ignore[misc]


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"first": -1}, "Shadow is not usable: first: .*greater than or equal to 0; known are"),
        ({"every": -5}, "every"),
        ({"on_mismatch": "ignore"}, "on_mismatch: .*'quarantine', 'raise' or 'count'"),
        ({"often": 3}, "often: Extra inputs"),
    ],
)
def test_a_rule_that_is_not_usable_is_refused(fields: dict[str, Any], said: str) -> None:
    for make in (gg.Shadow, lambda **one: gg.RunnerConfig(shadow=one)):
        with pytest.raises(gg.ConfigError, match=said):
            make(**fields)


@pytest.mark.parametrize(
    "rule", [gg.Shadow(first=2, every=5), gg.Shadow(first=0, every=3), gg.Shadow(first=3, every=0)]
)
def test_which_steps_are_sampled_depends_on_their_numbers_only(rule: gg.Shadow) -> None:
    runner = captured(shadow=rule)
    of_key: dict[int, int] = {}
    sampled = 0
    for number in range(1, 41):
        requests = 1 + (number * number) % 4
        bucket = next(size for size in (1, 2, 4) if size >= requests)
        of_key[bucket] = of_key.get(bucket, 0) + 1
        runner.replay(batch(requests, number))
        expected = of_key[bucket] <= rule.first or (rule.every and number % rule.every == 0)
        sampled += bool(expected)
        assert rule.samples(of_key[bucket], number) == bool(expected)
        assert seen(runner)["sampled"] == sampled
    assert 0 < sampled < 40


def test_steps_that_are_not_glued_do_not_count() -> None:
    runner = captured(shadow=gg.Shadow(first=0, every=2))
    for step in (gg.Batch.idle(), gg.Batch(9, draw(9)), batch(), gg.Batch.idle(), batch()):
        runner.replay(step)
    assert seen(runner)["sampled"] == 1


def test_a_refused_step_does_not_count() -> None:
    runner = captured(shadow=gg.Shadow(first=0, every=2))
    runner.replay(batch())
    for _ in range(3):
        with pytest.raises(gg.BindError):
            runner.replay(gg.Batch(3, {}))
    assert seen(runner)["sampled"] == 0
    runner.replay(batch())
    assert seen(runner)["sampled"] == 1


def test_without_a_rule_nothing_is_kept() -> None:
    runner = captured(shadow=None)
    assert_right(runner.replay(batch()), 3)
    assert runner.stats()["shadow"] is None


# Nothing wrong.


def test_a_sampled_step_gives_what_any_other_gives_and_is_counted_as_it_runs() -> None:
    runner, plain = captured(shadow=gg.Shadow(first=2, every=0)), captured(shadow=None)
    addresses = set()
    for start in range(4):
        one, other = runner.replay(batch(3, start)), plain.replay(batch(3, start))
        assert_right(one, 3, start)
        assert (one.decision.prep, one.decision.forward, one.decision.reason) == (
            other.decision.prep, other.decision.forward, other.decision.reason,
        )  # fmt: skip
        addresses.add((one.outputs.data_ptr(), *(leaf.data_ptr() for leaf in one.metadata.values())))
    assert len(addresses) == 1
    stats = runner.stats()
    assert stats["launch_fallbacks"][SAMPLED] == 2
    assert stats["routes"] == plain.stats()["routes"]
    assert counts(runner) == (2, 0, 0)


def test_no_false_alarm_in_300_steps_of_every_kind_of_source() -> None:
    runner = captured(declared=contract(idle="glue"))
    kinds: list[Callable[[list[int]], Any]] = [
        list, tuple, np.array, torch.tensor, lambda numbers: torch.tensor(numbers, dtype=torch.int32),
        lambda numbers: np.array(numbers, dtype=np.int16),
    ]  # fmt: skip
    for number in range(300):
        requests = number % 5
        sources = {name: kinds[number % len(kinds)](numbers) for name, numbers in draw(requests, number).items()}
        step = runner.replay(gg.Batch(requests, sources if requests else {}))
        if requests:
            assert_right(step, requests, number)
    assert counts(runner) == (300, 0, 0)


def test_every_kind_of_slot_is_compared_at_the_bucket_s_extent_without_a_false_alarm() -> None:
    buffer = torch.zeros(3, 9, dtype=torch.int64)
    kinds = [
        gg.Slot("cu", "offset", torch.int32, gg.REPEAT_LAST),
        gg.Slot("grid", "request", torch.int64, -1, inner=(3,), row_dim=1, storage=buffer),
        gg.Slot("turned", "token", torch.bfloat16, 2.5, inner=(2, 2), row_dim=2),
        gg.Slot("scale", "fixed", torch.float64, 1.0, inner=(2, 3)),
        gg.Slot("flags", "request", torch.bool, True),
        gg.Slot("half", "token", torch.float16, float("nan")),
        gg.Slot("num", "fixed", torch.int32, 0, value=gg.RAW_REQUESTS),
        gg.Slot("maybe", "request", torch.int8, 7, missing="pad"),
        gg.Slot("tiny", "request", torch.float8_e5m2, 0.0, accepts=(torch.float32,)),
    ]
    reads = {slot.name: slot.pad for slot in kinds}
    declared = gg.PrepContract(name="all", reads=reads, outputs={"g": "fixed"}, modes={gg.Mode.DECODE}, idle="glue")

    def prep(view: Any) -> dict[str, torch.Tensor]:
        dense = view.grid.is_contiguous()  # a twin of another geometry would say otherwise
        scaled = view.scale.sum() * 0 + view.num
        return {"g": view.grid * 2, "h": view.half * 3, "t": view.turned + 1, "n": scaled, "dense": dense}

    runner = gg.Runner(
        slots=kinds, ladder=[2, 4], prep=prep, tables={}, device="cpu", registry=_registry(declared, prep),
        config=gg.RunnerConfig(shadow=ALL),
    )  # fmt: skip
    runner.capture(progress=False)
    for number in range(24):
        requests = number % 5
        floats = torch.linspace(-2, 2, 4 * max(1, requests)).reshape(2, 2, max(1, requests))
        floats[0, 0, 0] = float("nan")
        bucket = 2 if requests <= 2 else 4
        own = runner.view(bucket).grid.narrow(1, 0, max(1, requests))
        sources = {
            "cu": np.arange(requests + 1, dtype=np.int32),
            "grid": own if number % 2 else torch.arange(3 * requests).reshape(3, requests),
            "turned": floats.to(torch.bfloat16),
            "scale": runner.view(bucket).scale if number % 3 else floats.new_full((2, 3), float("nan")),
            "flags": [bool(row % 2) for row in range(requests)],
            "half": floats[0, 0].to(torch.bfloat16).to(torch.float16),
            "tiny": floats[0, 0].clone(),
        }
        runner.prepare(gg.Batch(requests, sources) if requests else gg.Batch.idle())
    assert counts(runner) == (24, 0, 0)


def _registry(declared: gg.PrepContract, prep: Any) -> gg.Registry:
    registry = gg.Registry()
    registry.register(declared)(prep)
    return registry


def test_a_forward_that_writes_slots_and_metadata_in_place_raises_no_false_alarm() -> None:
    def forward(view: Any, metadata: Any) -> torch.Tensor:
        found = model(view, metadata)
        view.lens.add_(1)
        metadata["positions"].mul_(3)
        return found

    runner = captured(forward=forward)
    for start in range(6):
        runner.replay(batch(3, start))
    assert counts(runner) == (6, 0, 0)


def test_sources_that_are_the_last_step_s_results_are_read_before_they_are_rewritten() -> None:
    def prep(view: Any) -> dict[str, torch.Tensor]:
        return {**meta(view), "next": view.lens + 1}

    runner, plain = (captured(prep, shadow=shadow, declared=contract()) for shadow in (ALL, None))
    for one in (runner, plain):
        step = one.replay(batch(4))
        for _ in range(5):
            step = one.replay(gg.Batch(4, {**draw(4), "lens": step.metadata["next"], "loc": step.outputs}))
    assert counts(runner) == (6, 0, 0)
    last = [one.replay(batch(4)).outputs.tolist() for one in (runner, plain)]
    assert last[0] == last[1]


@pytest.mark.parametrize("order", [["change", "meta"], ["meta", "change"]])
def test_a_prep_with_effects_runs_once_a_step_and_readers_of_what_it_changes_raise_no_false_alarm(
    order: list[str],
) -> None:
    t = table()

    def change(view: Any) -> dict[str, torch.Tensor]:
        view.tables.t.index_add_(0, view.rows, torch.ones(view.rows.shape[0], 6, dtype=torch.int64))
        return {"rows": view.rows + 1}

    registry = gg.Registry()
    effects = contract("change", outputs={"rows": "request"}, effects=("t",))
    registry.register(effects)(change)
    registry.register(contract())(meta)
    runner = gg.Runner(
        slots=slots(), ladder=[4], prep=order, registry=registry, tables={"t": t},
        config=gg.RunnerConfig(shadow=ALL),
    )  # fmt: skip
    runner.capture(progress=False)
    before = t.clone()
    runner.prepare(batch(3))
    runner.prepare(batch(3))
    assert (t - before)[:, 0].tolist() == [2, 2, 2, 2, 0, 0, 0]
    assert counts(runner) == (2, 0, 0)
    assert seen(runner)["skipped_effects"] == 2


def test_a_prep_that_returns_its_own_buffer_raises_no_false_alarm() -> None:
    buffer = torch.zeros(4, dtype=torch.int64)

    def prep(view: Any) -> dict[str, torch.Tensor]:
        return {**meta(view), "own": torch.mul(view.lens, 5, out=buffer)}

    runner = captured(prep, ladder=[4])
    for start in range(4):
        step = runner.replay(batch(3, start))
        assert step.metadata["own"].tolist() == [5 * n for n in draw(3, start)["lens"]] + [5]
    assert counts(runner) == (4, 0, 0)


def test_a_planned_value_is_compared_and_planned_once() -> None:
    calls = []

    def plan(step: gg.Batch, bucket: gg.Bucket) -> dict[str, Any]:
        calls.append(step.num_requests)
        return {"lens": [len(calls)] * step.num_requests}

    runner = captured(plan=plan)
    for start in range(3):
        sources = draw(3, start)
        del sources["lens"]
        step = runner.replay(gg.Batch(3, sources))
        assert step.metadata["positions"].tolist() == [start, start, start, 0]
    assert calls == [3, 3, 3]
    assert counts(runner) == (3, 0, 0)


def test_what_a_backend_points_at_is_the_step_s_own_metadata_behind_a_sampled_step() -> None:
    backend = SimpleNamespace(metadata=None)

    def prep(view: Any) -> dict[str, torch.Tensor]:
        backend.metadata = meta(view)
        return backend.metadata

    runner = captured(prep, publish=lambda metadata: setattr(backend, "metadata", metadata))
    for run in (runner.replay, runner.prepare):
        step = run(batch(3))
        assert [leaf.data_ptr() for leaf in backend.metadata.values()] == [
            leaf.data_ptr() for leaf in step.metadata.values()
        ]
    assert counts(runner) == (2, 0, 0)


def test_steps_inside_and_outside_inference_mode_are_compared() -> None:
    for inside in (False, True):
        runner = build()
        with torch.inference_mode(inside):
            runner.capture(progress=False)
        for number in range(4):
            with torch.inference_mode(number % 2 == 0):
                assert_right(runner.replay(batch(3, number)), 3, number)
        assert counts(runner) == (4, 0, 0)


def test_the_shipped_prep_raises_no_false_alarm() -> None:
    t = torch.randint(1, 5000, (40, 128), generator=torch.Generator().manual_seed(0))
    runner = gg.Runner(
        slots=paged_decode.slots(), ladder=[1, 2, 4, 8], prep="paged-decode", tables={"req_to_token": t},
        config=gg.RunnerConfig(shadow=ALL),
    )  # fmt: skip
    runner.capture(progress=False)
    for number in range(40):
        rows = range(1 + number % 8)
        sources = {
            "seq_lens": [1 + (row * 37 + number) % 127 for row in rows],
            "req_pool_indices": [1 + (row * 11 + number) % 39 for row in rows],
            "out_cache_loc": [100 + row for row in rows],
        }
        runner.prepare(gg.Batch(len(rows), sources))
    assert counts(runner) == (40, 0, 0)


def test_ragged_steps_are_compared() -> None:
    runner = captured(declared=contract(ragged=True), tokens_per_request=2, forward=None)
    for row_tokens in ([1, 2], [2, 1], [2, 1, 1]):
        sources = {**draw(len(row_tokens)), "loc": list(range(sum(row_tokens)))}
        runner.prepare(gg.Batch(len(row_tokens), sources, row_tokens=row_tokens))
    assert counts(runner) == (3, 0, 0)


def test_a_forward_that_draws_random_numbers_leaves_its_outputs_where_the_launch_does(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    drawn = [0]

    def forward(view: Any, metadata: Any) -> torch.Tensor:
        drawn[0] += 1
        return model(view, metadata)

    monkeypatch.setattr(cpu.CpuDevice, "random_offset", lambda self: drawn[0])
    runner = captured(forward=forward, shadow=gg.Shadow(first=0, every=2))
    key = KEY_OF_4
    assert runner._capture.launches[key].outputs is not runner._stepper.forward.result(key)  # recorded twice
    addresses = set()
    for start in range(4):
        step = runner.replay(batch(3, start))
        assert_right(step, 3, start)
        addresses.add(step.outputs.data_ptr())
    assert len(addresses) == 1
    assert counts(runner) == (2, 0, 0)


@pytest.mark.parametrize("forward", [None, model])
def test_one_launch_without_a_forward_is_compared_as_it_is(forward: Any) -> None:
    runner = captured(forward=forward)
    for start in range(3):
        (runner.prepare if forward is None else runner.replay)(batch(3, start))
    assert counts(runner) == (3, 0, 0)
    assert runner.stats()["launch_fallbacks"].get(SAMPLED, 0) == (0 if forward is None else 3)
    with spoiled(lambda metadata: metadata["where"].add_(1)):
        runner.prepare(batch(3))
    assert seen(runner)["mismatched"] == 1


def test_steps_that_ranks_agreed_on_count_whichever_preps_are_glued() -> None:
    """Two ranks, one of which has quarantined a prep, sample the same steps."""
    one, other = (captured(shadow=gg.Shadow(first=1, every=3)) for _ in range(2))
    other._units[0].cache.quarantine(KEY_OF_4, "this rank's own trouble")
    sampled: list[list[bool]] = [[], []]
    for runner, found in zip((one, other), sampled):
        runner._stepper.decider.bound = True
        shadow = runner._stepper.shadow
        for number in range(10):
            runner.replay(batch(3 if number % 2 else 2, number))
            found.append(shadow._rule.samples(shadow._of_key.get(KEY_OF_4, 0), shadow.step))
    assert one._stepper.shadow.step == other._stepper.shadow.step == 10
    assert sampled[0] == sampled[1]
    assert one._stepper.shadow._of_key == other._stepper.shadow._of_key
    assert seen(other)["sampled"] < seen(one)["sampled"]


# What is found.


def test_a_frozen_host_value_is_found_and_the_key_goes_eager_a_step_later() -> None:
    host = Host()
    runner = captured(host.prep)
    host.add = 4
    runner.replay(batch(3))
    assert _state(runner, 4) == "captured"
    found = seen(runner)
    assert (found["mismatched"], found["pending"]) == (1, 0)
    assert _state(runner, 4) == "captured"  # only a step or maintain() acts
    step = runner.replay(batch(3, 1))
    assert (step.decision.prep, step.decision.reason) == (gg.Route.EAGER, gg.Reason.QUARANTINED)
    assert step.metadata["positions"].tolist() == [n + 3 for n in draw(3, 1)["lens"]] + [4]
    (mismatch,) = found["mismatches"]
    text = (
        "a glued step differs from its eager twin, decode bucket of 4 requests and 4 tokens, raw 3 and 3: "
        "prep 'meta', leaf 'positions', real row 0: 1, expected 5"
    )
    assert mismatch == {
        "mode": "decode", "bucket": [4, 4, 1], "variant": "None", "raw": [3, 3, 1], "prep": "meta",
        "leaf": "positions", "row": 0, "text": text,
    }  # fmt: skip
    assert "DivergenceError" in runner.stats()["keys"][0]["causes"]["meta"]
    assert text in runner.stats()["keys"][0]["causes"]["meta"]


def _state(runner: gg.Runner, requests: int) -> str:
    return next(key["states"]["meta"] for key in runner.stats()["keys"] if key["bucket"][0] == requests)


def test_only_the_key_that_differs_goes_eager_and_maintain_repairs_it() -> None:
    host = Host()
    runner = captured(host.prep)
    host.add = 4
    runner.replay(batch(3))
    assert runner.maintain() == [KEY_OF_4]  # which reads the verdict that nobody has read
    step = runner.replay(batch(3, 1))
    assert step.decision.prep is gg.Route.GLUE
    assert step.metadata["positions"].tolist() == [n + 3 for n in draw(3, 1)["lens"]] + [4]
    assert counts(runner) == (1, 1, 0)
    assert (_state(runner, 2), _state(runner, 4)) == ("captured", "captured")


@pytest.mark.parametrize("place", ["slot", "leaf"])
@pytest.mark.parametrize("row", [0, 2, 3])
def test_the_first_differing_row_is_named_real_or_pad(place: str, row: int) -> None:
    runner = captured(shadow=gg.Shadow(first=0, every=1, on_mismatch="count"))

    def change(metadata: Any) -> None:
        tensor = metadata["pages"][:, 1] if place == "leaf" else runner.view(4).rows
        tensor[row:] += 1

    with spoiled(change):
        runner.replay(batch(3))
    (found,) = seen(runner)["mismatches"]
    kind = "pad" if row == 3 else "real"
    name = "slot 'rows', " if place == "slot" else "prep 'meta', leaf 'pages', "
    element = f", element [{row}, 1]" if place == "leaf" else ""
    assert f": {name}{kind} row {row}{element}: " in found["text"]
    assert (found["prep"], found["row"]) == (None if place == "slot" else "meta", row)


def test_a_tail_that_is_not_reset_is_found_and_the_bucket_is_filled_by_the_reference(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    runner = captured(variants=(None, "lora"))
    runner.replay(batch(4))
    with monkeypatch.context() as patch:
        without_tails(patch)
        runner.replay(batch(3))
    (found,) = seen(runner)["mismatches"]
    assert found["text"].endswith(": slot 'lens', pad row 3: 5, expected 1")
    assert found["prep"] is None
    before = runner.arena.fill_of(gg.Bucket(4, 4, 1))
    assert {key.requests for key in runner._capture.launches} == {1, 2, 4}
    for variant in (None, "lora"):  # both stand behind the same fill
        step = runner.replay(gg.Batch(3, draw(3), variant=variant))
        assert step.decision.reason is gg.Reason.QUARANTINED
        assert_right(step, 3)
    assert {key.requests for key in runner._capture.launches} == {1, 2}
    assert runner.arena.fill_of(gg.Bucket(4, 4, 1)) is not before
    assert runner.replay(batch(2)).decision.prep is gg.Route.GLUE
    assert len(runner.maintain()) == 2
    step = runner.replay(batch(3))
    assert step.decision.prep is gg.Route.GLUE
    assert_right(step, 3)


def test_a_prep_that_writes_nothing_into_its_own_buffer_is_found() -> None:
    """Its twin writes the right values there first, so they must be put back."""
    buffer, live = torch.zeros(4, dtype=torch.int64), [False]

    def prep(view: Any) -> dict[str, torch.Tensor]:
        if live[0]:
            torch.mul(view.lens, 5, out=buffer)
        return {**meta(view), "own": buffer}

    runner = captured(prep, ladder=[4])
    live[0] = True
    runner.replay(batch(3))
    (found,) = seen(runner)["mismatches"]
    assert (found["leaf"], found["row"]) == ("own", 0)


def test_a_leaf_that_is_no_tensor_and_a_changed_structure_are_found() -> None:
    for changed in ({"width": 4}, {"width": 3, "more": 1}):
        extra: dict[str, Any] = {"width": 3}

        def prep(view: Any, extra: dict[str, Any] = extra) -> dict[str, Any]:
            return {**meta(view), **extra}

        runner = captured(prep)
        extra.update(changed)
        runner.replay(batch(3))
        (found,) = seen(runner)["mismatches"]
        assert found["prep"] == "meta"
        assert "width" in found["text"] if len(changed) == 1 else "structure" in found["text"]


def test_of_two_preps_only_the_one_that_differs_goes_eager() -> None:
    host, registry = Host(), gg.Registry()
    registry.register(contract())(meta)
    registry.register(contract("host"))(host.prep)
    runner = gg.Runner(
        slots=slots(), ladder=[4], prep=["meta", "host"], registry=registry, tables={"t": table()},
        config=gg.RunnerConfig(shadow=ALL),
    )  # fmt: skip
    runner.capture(progress=False)
    host.add = 1
    runner.prepare(batch(3))
    routes = {name: prep.route for name, prep in runner.prepare(batch(3)).decision.preps.items()}
    assert routes == {"meta": gg.Route.GLUE, "host": gg.Route.EAGER}
    # What is still glued beside an eager prep is still sampled.
    with spoiled(lambda metadata: metadata["pages"].add_(1)):
        runner.prepare(batch(3))
    routes = {name: prep.route for name, prep in runner.prepare(batch(3)).decision.preps.items()}
    assert routes == {"meta": gg.Route.EAGER, "host": gg.Route.EAGER}


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_only_a_converted_nan_may_have_any_payload(dtype: torch.dtype) -> None:
    declared = gg.PrepContract(name="float", reads={"x": 0.0}, outputs={"y": "request"}, modes={gg.Mode.DECODE})

    def prep(view: Any) -> dict[str, torch.Tensor]:
        return {"y": view.x * 1, "z": view.x.isnan()}

    runner = gg.Runner(
        slots=[gg.Slot("x", "request", torch.float64, 0.0)], ladder=[4], prep="float",
        registry=_registry(declared, prep), config=gg.RunnerConfig(shadow=gg.Shadow(every=1, on_mismatch="count")),
    )  # fmt: skip
    runner.capture(progress=False)

    def change(metadata: Any) -> None:
        for tensor in (metadata["y"], runner.view(4).x):
            tensor.view(torch.int64)[0] ^= 1

    with spoiled(change):
        runner.prepare(gg.Batch(3, {"x": torch.tensor([float("nan"), 0.0, 1.0], dtype=dtype)}))
    assert counts(runner) == ((1, 0, 0) if dtype == torch.float32 else (0, 1, 0))


def test_nan_equals_nan_and_the_sign_of_zero_counts() -> None:
    declared = gg.PrepContract(name="float", reads={"x": 0.0}, outputs={"y": "request"}, modes={gg.Mode.DECODE})

    def prep(view: Any) -> dict[str, torch.Tensor]:
        return {"y": view.x * 1}

    runner = gg.Runner(
        slots=[gg.Slot("x", "request", torch.float32, 0.0)], ladder=[4], prep="float",
        registry=_registry(declared, prep), config=gg.RunnerConfig(shadow=gg.Shadow(every=1, on_mismatch="count")),
    )  # fmt: skip
    runner.capture(progress=False)
    runner.prepare(gg.Batch(3, {"x": [float("nan"), 0.0, float("-inf")]}))
    assert counts(runner) == (1, 0, 0)
    with spoiled(lambda metadata: metadata["y"][1:2].neg_()):
        runner.prepare(gg.Batch(3, {"x": [float("nan"), 0.0, 1.0]}))
    assert seen(runner)["mismatches"][-1]["text"].endswith("leaf 'y', real row 1: -0.0, expected 0.0")


# What a mismatch does.


def test_raise_refuses_the_next_step_once_and_has_written_nothing() -> None:
    host = Host()
    runner = captured(host.prep, shadow=gg.Shadow(first=0, every=1, on_mismatch="raise"))
    host.add = 4
    step = runner.replay(batch(3))
    held = [tensor.clone() for tensor in (*runner.view(4).values(), *step.metadata.values())]
    with pytest.raises(gg.DivergenceError) as caught:
        runner.replay(batch(4, 2))
    for part in ("prep 'meta'", "bucket of 4 requests", "raw 3", "leaf 'positions'", "row 0", "maintain()"):
        assert part in str(caught.value)
    for tensor, kept in zip((*runner.view(4).values(), *step.metadata.values()), held):
        assert torch.equal(tensor, kept)
    later = runner.replay(batch(4, 2))
    assert later.decision.reason is gg.Reason.QUARANTINED
    assert later.metadata["positions"].tolist() == [n + 3 for n in draw(4, 2)["lens"]]


def test_raise_reaches_prepare_and_comes_after_maintain_as_well() -> None:
    host = Host()
    runner = captured(host.prep, shadow=gg.Shadow(first=0, every=1, on_mismatch="raise"))
    host.add = 4
    runner.prepare(batch(3))
    assert runner.maintain() == [KEY_OF_4]
    with pytest.raises(gg.DivergenceError):
        runner.prepare(batch(3))
    assert runner.prepare(batch(3)).decision.prep is gg.Route.GLUE


def test_count_only_counts_and_tells_once(caplog: pytest.LogCaptureFixture) -> None:
    host = Host()
    runner = captured(host.prep, shadow=gg.Shadow(first=0, every=1, on_mismatch="count"))
    host.add = 4
    with caplog.at_level(logging.WARNING, "graphglue"):
        for start in range(5):
            assert runner.replay(batch(3, start)).decision.prep is gg.Route.GLUE
    assert counts(runner) == (0, 5, 0)
    assert len([record for record in caplog.records if "differs from its eager twin" in record.message]) == 1
    for start in range(20):
        runner.replay(batch(3, start))
    assert len(seen(runner)["mismatches"]) == 8  # the last ones


def test_an_engine_s_own_forward_keeps_the_memory_it_reads_after_a_mismatch() -> None:
    """The adopted graph reads the metadata where it lay; recording the prep anew would move it."""
    host = Host()
    runner = captured(host.prep, forward=None)
    prepared, tape = runner.prepare(batch(3)), gg.Tape()
    with tape.session():
        graph = tape.record(lambda: model(prepared.view, prepared.metadata))
    runner.adopt_forward(4, graph, graph.outputs)
    host.add = 4
    runner.replay(batch(3))
    runner.replay(batch(3))
    assert runner.maintain() == []
    step = runner.replay(batch(3, 1))
    assert (step.decision.prep, step.decision.forward) == (gg.Route.EAGER, gg.Route.GRAPH)
    lens, start = draw(3, 1)["lens"], draw(3, 1)
    pages = table()[start["rows"]][:, ::2].sum(1).tolist()
    assert step.outputs.tolist() == [p + (n + 3) * 10 + loc * 3 for p, n, loc in zip(pages, lens, start["loc"])]


def test_a_twin_that_can_not_be_made_takes_nothing_down(caplog: pytest.LogCaptureFixture) -> None:
    broken = [False]

    def prep(view: Any) -> dict[str, torch.Tensor]:
        if broken[0]:
            raise ValueError("no eager here")
        return meta(view)

    runner = captured(prep)
    broken[0] = True
    with caplog.at_level(logging.WARNING, "graphglue"):
        for start in range(3):
            assert_right(runner.replay(batch(3, start)), 3, start)
    assert counts(runner) == (0, 0, 3)
    assert "ValueError: no eager here" in seen(runner)["last_failure"]
    assert len([record for record in caplog.records if "could not be held against" in record.message]) == 1
    # The fill is compared all the same.
    with spoiled(lambda metadata: runner.view(4).loc.add_(1)):
        runner.replay(batch(3))
    assert seen(runner)["mismatched"] == 1


# When a verdict is read.


class LateEvent:
    """An event that happens when the test says so."""

    happened = False
    waits = 0

    def query(self) -> bool:
        return LateEvent.happened

    def synchronize(self) -> None:
        LateEvent.waits += 1
        LateEvent.happened = True

    def wait(self, stream: Any = None) -> None:
        raise AssertionError("nothing waits for a verdict")


@pytest.fixture
def late(monkeypatch: pytest.MonkeyPatch) -> type[LateEvent]:
    LateEvent.happened, LateEvent.waits = False, 0
    monkeypatch.setattr(cpu.CpuDevice, "read_event", lambda self: LateEvent())
    return LateEvent


@pytest.mark.parametrize("on_mismatch", ["quarantine", "raise"])
def test_a_verdict_that_is_not_there_is_not_waited_for(on_mismatch: Any, late: type[LateEvent]) -> None:
    host = Host()
    runner = captured(host.prep, shadow=gg.Shadow(first=0, every=1, on_mismatch=on_mismatch))
    host.add = 4
    for start in range(5):
        assert runner.replay(batch(3, start)).decision.prep is gg.Route.GLUE
    assert len(runner._stepper.shadow.pending) == 5
    assert late.waits == 0
    late.happened = True
    if on_mismatch == "raise":
        with pytest.raises(gg.DivergenceError, match="raw 3"):
            runner.replay(batch(3))
    assert runner.replay(batch(3)).decision.prep is gg.Route.EAGER
    assert late.waits == 0
    assert counts(runner) == (0, 5, 0)


@pytest.mark.parametrize("call", ["maintain", "stats", "close", "reset"])
def test_what_may_wait_reads_all_verdicts(call: str, late: type[LateEvent]) -> None:
    host = Host()
    runner = captured(host.prep)
    host.add = 4
    runner.replay(batch(3))
    getattr(runner, call)()
    assert late.waits
    assert counts(runner) == (0, 1, 0)


def test_stats_may_be_asked_by_another_thread_while_a_step_runs(late: type[LateEvent]) -> None:
    inside, go, told = threading.Event(), threading.Event(), []

    def publish(metadata: Any) -> None:
        if told:
            inside.set()
            assert go.wait(30)

    runner = captured(publish=publish)
    runner.replay(batch(3))
    told.append(None)
    serving = threading.Thread(target=lambda: told.append(runner.replay(batch(3, 1))))
    serving.start()
    assert inside.wait(30)
    assert counts(runner) == (1, 0, 0)
    go.set()
    serving.join(30)
    assert_right(told[-1], 3, 1)
    assert counts(runner) == (2, 0, 0)


def test_reset_begins_again_with_the_first_steps_of_each_key() -> None:
    runner = captured(shadow=gg.Shadow(first=2, every=0))
    for _ in range(5):
        runner.replay(batch())
    assert seen(runner)["sampled"] == 2
    runner.reset()
    runner.capture(progress=False)
    for _ in range(5):
        runner.replay(batch())
    assert counts(runner) == (4, 0, 0)


# What is not sampled, and says so.


def test_nothing_is_sampled_or_read_while_the_caller_captures(monkeypatch: pytest.MonkeyPatch) -> None:
    host = Host()
    runner = captured(host.prep)
    host.add = 4
    runner.replay(batch(3))
    with monkeypatch.context() as patch:
        patch.setattr(cpu.CpuDevice, "is_capturing", lambda self: True)
        assert runner.replay(batch(3)).decision.prep is gg.Route.GLUE
        assert seen(runner)["pending"] == 1
    assert runner.replay(batch(3)).decision.prep is gg.Route.EAGER
    assert seen(runner)["skipped"] == {CAPTURING: 1}


def test_an_adopted_forward_that_is_used_up_is_not_launched_part_by_part() -> None:
    runner = captured(forward=None)
    prepared, tape = runner.prepare(batch(3)), gg.Tape()
    with tape.session():
        graph = tape.record(lambda: model(prepared.view, prepared.metadata))
    runner.adopt_forward(4, graph, graph.outputs, random=True)
    assert_right(runner.replay(batch(3)), 3)
    assert seen(runner)["skipped"] == {USED_UP: 1}
    assert seen(runner)["sampled"] == 1


def test_a_prep_that_draws_random_numbers_is_not_repeated(monkeypatch: pytest.MonkeyPatch) -> None:
    drawn = [0]

    def prep(view: Any) -> dict[str, torch.Tensor]:
        drawn[0] += 1
        return meta(view)

    monkeypatch.setattr(cpu.CpuDevice, "random_offset", lambda self: drawn[0])
    runner = captured(prep)
    before = drawn[0]
    assert_right(runner.replay(batch(3)), 3)
    assert drawn[0] == before
    assert seen(runner)["skipped"] == {RANDOM: 1}
