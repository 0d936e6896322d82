"""The Runner, top to bottom, on the CPU tape: every step is held against a twin built from plain lists.

The engine here is small but has every kind of part: four slots on two axes, a table that a slot
indexes, a prep with derived metadata and a forward that reads all of it.
"""

from __future__ import annotations

import json
import logging
import re
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from graphglue import (
    RAW_REQUESTS,
    Batch,
    BindError,
    Bucket,
    CapacityError,
    CaptureError,
    CaptureHooks,
    ContractError,
    GraphGlueError,
    Key,
    Mode,
    PrepContract,
    Reason,
    Registry,
    Route,
    Runner,
    RunnerConfig,
    Slot,
    StaleTableError,
    Tape,
)

LADDER = [1, 2, 4, 8]
PADS = {"seq_lens": 1, "rows": 0, "loc": 0, "ids": 0}
CONTRACT = PrepContract(
    name="meta",
    reads={"seq_lens": 1, "rows": 0, "loc": 0},
    tables=("t",),
    outputs={"pages": "request", "positions": "request", "cu": "offset", "where": "token"},
    modes={Mode.DECODE},
)


def slots(width: int = 1) -> list[Slot]:
    axis = {"seq_lens": "request", "rows": "request", "loc": "token", "ids": "token"}
    return [Slot(name, axis=axis[name], dtype=torch.int64, pad=pad) for name, pad in PADS.items()]


def table() -> torch.Tensor:
    return torch.arange(7 * 12).reshape(7, 12) * 3


def meta(view: Any) -> dict[str, torch.Tensor]:
    return {
        "pages": view.tables.t[view.rows][:, ::4],
        "positions": view.seq_lens - 1,
        "cu": torch.nn.functional.pad(torch.cumsum(view.seq_lens, 0), (1, 0)),
        "where": view.loc * 2,
    }


def model(view: Any, metadata: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    mixed = view.ids * 1000 + metadata["positions"] * 10 + metadata["pages"].sum(1) + metadata["where"]
    return {"logits": mixed.to(torch.float64) / 7, "next": mixed % 97 + metadata["cu"][1:]}


def draw(requests: int, start: int = 0) -> dict[str, list[int]]:
    """Give one step's values as lists."""
    rows = range(start, start + requests)
    return {
        "seq_lens": [2 + row % 9 for row in rows],
        "rows": [1 + row % 6 for row in rows],
        "loc": [5 + row for row in rows],
        "ids": [40 + row * 3 for row in rows],
    }


def twin_view(sources: Mapping[str, Any], rows: int, t: torch.Tensor) -> Any:
    """Build a pad-filled batch from scratch."""
    padded = {name: [*sources.get(name, []), *[pad] * rows][:rows] for name, pad in PADS.items()}
    tensors = {name: torch.tensor(numbers, dtype=torch.int64) for name, numbers in padded.items()}
    return SimpleNamespace(**tensors, tables=SimpleNamespace(t=t), variant=None)


def plain(tree: Any) -> Any:
    if isinstance(tree, torch.Tensor):
        return tree.tolist()
    if isinstance(tree, Mapping):
        return {name: plain(leaf) for name, leaf in tree.items()}
    return tree


def assert_right(
    step: Any, sources: Mapping[str, Any], t: torch.Tensor, prep: Any = meta, forward: Any = model
) -> None:
    """Hold a step's metadata and outputs against the twin at the decision's bucket."""
    raw = len(next(iter(sources.values()))) if sources else 0
    view = twin_view(sources, step.decision.bucket.requests, t)
    metadata = prep(view)
    assert plain(step.metadata) == plain(metadata)
    if forward is not None:
        assert plain(step.outputs) == {name: leaf[:raw].tolist() for name, leaf in forward(view, metadata).items()}


class Engine:
    """A runner with what it was made from."""

    def __init__(self, prep: Any = meta, contract: PrepContract | None = CONTRACT, **more: Any) -> None:
        registry = Registry()
        hooks = {name: more.pop(name) for name in ("plan", "publish") if name in more}
        named = contract is not None and callable(prep)
        if contract is not None and named:
            registry.register(contract, **hooks)(prep)
        self.t = more.pop("t", table())
        made: dict[str, Any] = {
            "slots": slots(),
            "ladder": LADDER,
            "registry": registry,
            "prep": contract.name if contract and named else prep,
            "tables": {"t": self.t},
            "forward": model,
        }
        self.runner = Runner(**{**made, **more})

    def step(self, requests: int, start: int = 0, **more: Any) -> tuple[Any, dict[str, list[int]]]:
        sources = draw(requests, start)
        return self.runner.replay(Batch(requests, sources, **more)), sources

    def right(self, requests: int, start: int = 0, **more: Any) -> Any:
        step, sources = self.step(requests, start, **more)
        assert_right(step, sources, self.t)
        return step

    def slot_bytes(self) -> dict[str, bytes]:
        view = self.runner.view(self.runner.space.ladder.largest)
        return {name: view[name].numpy().tobytes() for name in view}


def why(step: Any) -> tuple[Route, Route, Reason, Reason | None]:
    decision = step if not hasattr(step, "decision") else step.decision
    return decision.prep, decision.forward, decision.reason, decision.forward_reason


def states(runner: Runner) -> dict[int, dict[str, str]]:
    return {key["bucket"][0]: key["states"] for key in runner.stats()["keys"]}


GLUED = (Route.GLUE, Route.GRAPH, Reason.PADDED, None)
UNPADDED = (Route.GLUE, Route.GRAPH, Reason.UNPADDED, None)


class Log(Tape):
    """A tape that notes what happens to it."""

    def __init__(self) -> None:
        super().__init__()
        self.events: list[str] = []
        self.recording = False

    @contextmanager
    def session(self) -> Iterator[None]:
        self.events.append("recorder+")
        with super().session():
            yield
        self.events.append("recorder-")

    def finish(self) -> None:
        self.events.append("finish")

    def record(self, run: Callable[[], Any], *, strict: bool = True) -> Any:
        self.events.append("record")
        self.recording = True
        try:
            made = super().record(run, strict=strict)
        finally:
            self.recording = False
        play, events = made.replay, self.events

        class Noted:
            outputs, num_bytes, close = made.outputs, made.num_bytes, made.close

            def replay(self) -> None:
                events.append("replay")
                play()

        return Noted()

    def count(self, event: str) -> int:
        return sum(1 for seen in self.events if seen == event)


# The routes of a plain decode runner.


@pytest.mark.parametrize("kind", [list, np.array, torch.tensor], ids=["list", "numpy", "torch"])
def test_padded_and_unpadded_steps_are_glued(kind: Any) -> None:
    engine = Engine()
    engine.runner.capture()
    for requests in range(1, 9):
        for start in (0, 3, 20):
            sources = {name: kind(numbers) for name, numbers in draw(requests, start).items()}
            step = engine.runner.replay(Batch(requests, sources))
            assert_right(step, draw(requests, start), engine.t)
            assert why(step) == (UNPADDED if requests in LADDER else GLUED)
            assert step.raw == Bucket(requests, requests, 1)
            assert step.decision.bucket == Bucket(*[min(size for size in LADDER if size >= requests)] * 2, 1)


def test_outputs_are_cut_to_the_real_rows_and_metadata_is_not() -> None:
    engine = Engine()
    engine.runner.capture()
    step = engine.right(3)
    assert {name: len(leaf) for name, leaf in step.outputs.items()} == {"logits": 3, "next": 3}
    assert {name: len(leaf) for name, leaf in step.metadata.items()} == {
        "pages": 4, "positions": 4, "cu": 5, "where": 4
    }  # fmt: skip


def test_host_frozen_a_replay_runs_no_python_of_prep_or_forward() -> None:
    calls: list[str] = []

    def prep(view: Any) -> Any:
        calls.append("prep")
        return meta(view)

    def forward(view: Any, metadata: Any) -> Any:
        calls.append("forward")
        return model(view, metadata)

    engine = Engine(prep, forward=forward)
    engine.runner.capture()
    calls.clear()
    for requests in (1, 3, 8, 5):
        engine.right(requests)
    assert calls == []


def test_before_capture_every_step_is_eager_and_right() -> None:
    engine = Engine()
    for requests in (3, 8):
        step = engine.right(requests)
        assert why(step)[:3] == (Route.EAGER, Route.EAGER, Reason.NOT_CAPTURED)
        assert step.decision.bucket.requests == {3: 4, 8: 8}[requests]


def test_idle_steps_take_the_smallest_bucket_and_have_no_rows() -> None:
    for idle, expected in (("eager", (Route.EAGER, Reason.IDLE_EAGER)), ("glue", (Route.GLUE, Reason.IDLE))):
        engine = Engine(contract=CONTRACT.model_copy(update={"idle": idle}))
        engine.runner.capture()
        engine.right(8)
        step = engine.runner.replay(Batch.idle())
        assert (step.decision.prep, step.decision.reason, step.decision.forward) == (*expected, Route.GRAPH)
        assert (step.decision.bucket, step.raw) == (Bucket(1, 1, 1), Bucket(0, 0, 0))
        assert_right(step, {}, engine.t)
        assert {name: len(leaf) for name, leaf in step.outputs.items()} == {"logits": 0, "next": 0}
        engine.right(3)


def test_pad_leak_a_step_depends_on_nothing_before_it() -> None:
    fresh, used = Engine(), Engine()
    for engine in (fresh, used):
        engine.runner.capture()
    for number in range(10):
        used.right(8 - number % 3, start=number)
    assert plain(fresh.right(3).metadata) == plain(used.right(3).metadata)


def test_tail_stale_and_pad_leak_nan_rows_of_an_earlier_batch_reach_nobody() -> None:
    contract = PrepContract(name="p", reads={"hidden": 0.0}, modes={Mode.DECODE}, outputs={"norm": "token"})

    def prep(view: Any) -> Any:
        return {"norm": view.hidden - view.hidden.mean(0)}

    def forward(view: Any, metadata: Any) -> Any:
        return metadata["norm"] * 2

    engine = Engine(
        prep, contract, slots=[Slot("hidden", "token", torch.float32, 0.0, inner=(3,))], tables={}, forward=forward
    )
    engine.runner.capture()
    engine.runner.replay(Batch(8, {"hidden": torch.full((8, 3), torch.nan)}))
    live = torch.arange(9.0).reshape(3, 3)
    step = engine.runner.replay(Batch(3, {"hidden": live}))
    padded = torch.cat([live, torch.zeros(1, 3)])
    assert torch.equal(step.metadata["norm"], padded - padded.mean(0))
    assert torch.equal(step.outputs, ((padded - padded.mean(0)) * 2)[:3])


def test_pad_alias_padded_rows_write_the_sink_row_only() -> None:
    cache = torch.full((16,), 77)

    def forward(view: Any, metadata: Any) -> Any:
        cache.index_copy_(0, view.loc, view.ids)
        return view.ids + 0

    engine = Engine(forward=forward)
    engine.runner.capture()
    cache.fill_(77)
    engine.runner.replay(Batch(3, {**draw(3), "loc": [4, 9, 15], "ids": [1, 2, 3]}), None)
    changed = {row for row, value in enumerate(cache.tolist()) if value != 77}
    assert changed == {0, 4, 9, 15}
    assert cache[[4, 9, 15]].tolist() == [1, 2, 3]


def test_pad_alias_an_undeclared_tensor_of_a_prep_is_read_live() -> None:
    hidden = torch.tensor([5])
    engine = Engine(lambda view: {**meta(view), "where": view.loc + hidden}, CONTRACT)
    engine.runner.capture()
    for value in (5, 9):
        hidden.fill_(value)
        step, sources = engine.step(3)
        assert step.metadata["where"].tolist() == [loc + value for loc in [*sources["loc"], 0]]
        assert why(step) == GLUED


@pytest.mark.parametrize("pad", [1, 4])
def test_pad_derived_the_pad_is_checked_against_what_the_prep_is_right_for(pad: int) -> None:
    width = 4
    contract = PrepContract(name="verify", reads={"seq_lens": 4}, modes={Mode.VERIFY}, outputs={"pos": "token"})

    def prep(view: Any) -> Any:
        return {"pos": (view.seq_lens[:, None] - width + torch.arange(width)).reshape(-1)}

    more = {
        "slots": [Slot("seq_lens", "request", torch.int64, pad)],
        "tables": {},
        "forward": None,
        "tokens_per_request": width,
    }
    if pad == 1:
        with pytest.raises(ContractError, match="slot 'seq_lens' has pad 1, but prep 'verify' is right for 4"):
            Engine(prep, contract, **more)
        return
    engine = Engine(prep, contract, **more)
    engine.runner.capture()
    step = engine.runner.replay(Batch(3, {"seq_lens": [9, 4, 6]}, mode=Mode.VERIFY))
    assert step.metadata["pos"].tolist() == [5, 6, 7, 8, 0, 1, 2, 3, 2, 3, 4, 5, 0, 1, 2, 3]
    assert step.decision.reason is Reason.PADDED


@pytest.mark.parametrize("width", [1, 3])
def test_meta_shape_views_have_exactly_the_bucket_s_rows_on_every_route(width: int) -> None:
    seen: list[tuple[Any, ...]] = []

    def prep(view: Any) -> Any:
        seen.append((view.bucket, len(view.seq_lens), len(view.rows), len(view.loc)))
        return {"m": view.loc + 1}

    engine = Engine(
        prep,
        PrepContract(name="p", reads={"seq_lens": 1, "rows": 0, "loc": 0}, modes={Mode.DECODE}, host_free=False),
        forward=None,
        tokens_per_request=width,
    )
    for requests, size in ((1, 1), (2, 2), (3, 4), (5, 8), (8, 8)):
        sources = {"seq_lens": [3] * requests, "rows": [1] * requests, "loc": [2] * requests * width}
        prepared = engine.runner.prepare(Batch(requests, {**sources, "ids": [0] * requests * width}))
        assert seen[-1] == (Bucket(size, size * width, width), size, size, size * width)
        assert prepared.decision.bucket == Bucket(size, size * width, width)
        assert len(prepared.view.ids) == size * width


def test_unstaged_all_routes_give_the_same_fields_at_the_bucket_s_shape() -> None:
    engine = Engine()
    forms = []

    def note(step: Any) -> None:
        rows = step.decision.bucket.requests
        forms.append({
            name: (leaf.dtype, leaf.dim(), leaf.shape[0] - rows, leaf.shape[1:]) for name, leaf in step.metadata.items()
        })  # fmt: skip

    note(engine.right(3))
    engine.runner.capture()
    note(engine.right(3))
    note(engine.right(4))
    note(engine.runner.replay(Batch.idle()))
    note(engine.right(11))
    assert all(form == forms[0] for form in forms)
    assert set(forms[0]) == set(CONTRACT.outputs)


def test_rebind_addresses_are_the_same_over_a_hundred_replays() -> None:
    engine = Engine()
    engine.runner.capture()
    places: dict[tuple[Any, ...], int] = {}
    for number in range(100):
        requests = number * 5 % 9
        step = engine.runner.replay(Batch(requests, draw(requests, number)) if requests else Batch.idle())
        view, size = engine.runner.view(step.decision.bucket), step.decision.bucket.requests
        for kind, tree in (("slot", dict(view)), ("meta", step.metadata), ("out", step.outputs)):
            for name, leaf in tree.items():
                key = (kind, name) if kind == "slot" else (kind, name, size)
                if leaf.numel():
                    assert places.setdefault(key, leaf.data_ptr()) == leaf.data_ptr(), key
    assert len(places) == 4 + 4 * 4 + 4 * 2


def test_rebind_what_an_engine_writes_into_a_view_is_overwritten_by_the_fill() -> None:
    engine = Engine()
    engine.runner.capture()
    engine.runner.view(8).seq_lens.fill_(99)
    engine.right(3)


def test_the_slot_s_own_view_is_a_source() -> None:
    engine = Engine()
    engine.runner.capture()
    sources = draw(3)
    own = engine.runner.view(8).ids[:3]
    own.copy_(torch.tensor(sources["ids"]))
    step = engine.runner.replay(Batch(3, {**sources, "ids": own}))
    assert_right(step, sources, engine.t)


def test_outputs_of_one_step_are_sources_of_the_next() -> None:
    engine = Engine()
    engine.runner.capture()
    step, sources = engine.step(3)
    for number in range(4):
        fed = step.outputs["next"].tolist()
        sources = {**draw(3, number), "ids": fed}
        step = engine.runner.replay(Batch(3, {**sources, "ids": step.outputs["next"]}))
        assert_right(step, sources, engine.t)


@pytest.mark.parametrize("capture_in", [torch.no_grad, torch.inference_mode])
@pytest.mark.parametrize("replay_in", [torch.no_grad, torch.inference_mode, torch.enable_grad])
def test_inference_mode_in_and_out(capture_in: Any, replay_in: Any) -> None:
    with capture_in():
        engine = Engine()
        engine.runner.capture()
    with replay_in():
        for requests in (3, 8, 11):
            engine.right(requests)
        assert why(engine.runner.replay(Batch.idle()))[0] is Route.EAGER


# Capture.


def test_bucket_list_the_public_list_is_what_is_captured() -> None:
    engine = Engine(ladder=[4, 1, 4, 2])
    expected = tuple(Bucket(size, size, 1) for size in (1, 2, 4))
    assert engine.runner.buckets == expected
    engine.runner.capture()
    assert engine.runner.buckets == expected
    assert {tuple(key["bucket"]) for key in engine.runner.stats()["keys"]} == set(expected)
    assert all(set(kept.values()) == {"captured"} for kept in states(engine.runner).values())


@pytest.mark.parametrize("some", [[2, 8], [8, 2, 2], [Bucket(2, 2, 1), 8]])
def test_some_sizes_can_be_captured(some: list[Any]) -> None:
    engine = Engine()
    engine.runner.capture(buckets=some)
    assert engine.runner.buckets == (Bucket(2, 2, 1), Bucket(8, 8, 1))
    assert engine.right(2).decision.prep is Route.GLUE
    assert engine.right(7).decision.prep is Route.GLUE
    step = engine.right(4)
    assert why(step)[:3] == (Route.EAGER, Route.EAGER, Reason.NOT_CAPTURED)


@pytest.mark.parametrize(("progress", "shown"), [(True, True), (False, False), (None, False)])
def test_progress_is_shown_on_request(progress: bool | None, shown: bool, capsys: pytest.CaptureFixture[str]) -> None:
    def slow(view: Any) -> Any:
        time.sleep(0.06)  # a bar shows itself every 0.1 s
        return meta(view)

    Engine(slow, ladder=[2, 4]).runner.capture(progress=progress)
    said = capsys.readouterr()
    assert said.out == ""
    assert bool(re.search(r"(warm-up|capture) decode [24]x[24]", said.err)) is shown
    assert bool(said.err) is shown


def test_keys_are_recorded_largest_first_after_all_warm_ups() -> None:
    """What a warm-up grows is in place, and small keys may use a large one's memory (LIFETIME-2, POOL-ALIAS-5)."""
    log, calls = Log(), []

    def prep(view: Any) -> Any:
        calls.append((view.bucket.requests, log.recording))
        return meta(view)

    Engine(prep, recorder=log, config=RunnerConfig(warmups=3)).runner.capture()
    warm = [size for size, recorded in calls if not recorded]
    recorded = [size for size, recorded in calls if recorded]
    assert sorted(warm) == sorted(LADDER * 3)
    assert recorded == [8, 4, 2, 1]
    assert calls.index((8, True)) >= len(warm)
    assert log.events.index("finish") < log.events.index("record")


def hooked(log: Log, **fields: Any) -> CaptureHooks:
    @contextmanager
    def session() -> Iterator[None]:
        log.events.append("session+")
        try:
            yield
        finally:
            log.events.append("session-")

    @contextmanager
    def per_key(key: Key) -> Iterator[None]:
        log.events.append(f"key+{key.requests}")
        try:
            yield
        finally:
            log.events.append(f"key-{key.requests}")

    return CaptureHooks(session=session, key=per_key, **fields)


def test_hooks_stand_around_the_session_and_each_key_and_nothing_is_launched_inside() -> None:
    log = Log()
    engine = Engine(ladder=[2, 4], recorder=log, hooks=hooked(log))
    engine.runner.capture()
    assert log.events == [
        "session+", "recorder+", "finish",
        "key+4", "record", "record", "key-4", "key+2", "record", "record", "key-2",
        "recorder-", "session-",
    ]  # fmt: skip
    engine.right(3)
    assert log.events.count("replay") == 2
    assert log.events.index("replay") > log.events.index("session-")


def test_hooks_are_left_when_a_key_or_the_capture_fails() -> None:
    log = Log()

    def prep(view: Any) -> Any:
        if view.bucket.requests == 4:
            view.seq_lens.tolist()
        return meta(view)

    engine = Engine(prep, ladder=[2, 4], recorder=log, hooks=hooked(log))
    engine.runner.capture()
    for left, entered in (("key-4", "key+4"), ("session-", "session+")):
        assert log.count(left) == log.count(entered) == 1
    log.events.clear()
    broken = Engine(lambda view: {"other": view.loc + 1}, recorder=log, hooks=hooked(log))
    with pytest.raises(ContractError):
        broken.runner.capture()
    assert log.count("session-") == log.count("session+") == 1


def test_pad_derived_preps_see_capture_values_while_recorded_and_pads_in_tails_after() -> None:
    seen: list[tuple[bool, list[int]]] = []
    log = Log()

    def prep(view: Any) -> Any:
        if not log.recording:
            seen.append((True, view.seq_lens.tolist()))
        return {"m": view.seq_lens + 0}

    contract = PrepContract(name="p", reads={"seq_lens": 0}, modes={Mode.DECODE})
    lens = Slot("seq_lens", "request", torch.int64, 0, capture=7)
    engine = Engine(prep, contract, slots=[lens], tables={}, forward=None, recorder=log, ladder=[4])
    engine.runner.capture()
    assert seen
    assert all(values == [7] * 4 for _, values in seen)
    for _ in range(3):
        assert engine.runner.prepare(Batch(2, {"seq_lens": [3, 4]})).metadata["m"].tolist() == [3, 4, 0, 0]


def test_state_carry_slots_are_filled_again_before_every_warm_up() -> None:
    seen, log = [], Log()

    def forward(view: Any, metadata: Any) -> Any:
        if not log.recording:
            seen.append(view.seq_lens.tolist())
        view.seq_lens.add_(1)
        return metadata["positions"] + view.seq_lens

    engine = Engine(forward=forward, recorder=log, ladder=[2], config=RunnerConfig(warmups=4))
    engine.runner.capture()
    assert seen == [[1, 1]] * 4
    for start in (0, 5):
        step, sources = engine.step(1, start)
        assert step.outputs.tolist() == [2 * sources["seq_lens"][0]]


def test_state_carry_capture_changes_no_table_that_a_prep_only_reads() -> None:
    engine = Engine()
    before = engine.t.clone()
    engine.runner.capture()
    engine.right(5)
    assert torch.equal(engine.t, before)


EFFECTS = PrepContract(name="ring", reads={"rows": 0}, tables=("counts",), effects=("counts",), modes={Mode.DECODE})


def bump(view: Any) -> dict[str, torch.Tensor]:
    view.tables.counts.index_add_(0, view.rows, torch.ones_like(view.rows))
    return {"seen": view.tables.counts[view.rows]}


def test_state_carry_a_prep_with_effects_runs_on_clones_until_it_serves() -> None:
    counts = torch.zeros(9, dtype=torch.int64)
    engine = Engine(
        bump, EFFECTS, slots=[Slot("rows", "request", torch.int64, 0)], tables={"counts": counts}, forward=None
    )
    engine.runner.capture()
    assert counts.tolist() == [0] * 9
    assert engine.runner.maintain() == []
    model_counts = [0] * 9
    for rows in ([3, 4, 3], [8], [1, 2, 3, 4]):
        prepared = engine.runner.prepare(Batch(len(rows), {"rows": rows}))
        assert prepared.decision.prep is Route.GLUE
        size = prepared.decision.bucket.requests
        for row in [*rows, *[0] * (size - len(rows))]:
            model_counts[row] += 1
        assert counts.tolist() == model_counts
        assert prepared.metadata["seen"].tolist() == [model_counts[row] for row in [*rows, *[0] * size]][:size]


def test_state_carry_maintain_repeats_no_effects_on_live_tables() -> None:
    counts, broken = torch.zeros(9, dtype=torch.int64), {"now": True}

    def prep(view: Any) -> Any:
        if broken["now"] and view.bucket.requests == 4:
            view.rows.tolist()
        return bump(view)

    rows = [Slot("rows", "request", torch.int64, 0)]
    engine = Engine(prep, EFFECTS, slots=rows, tables={"counts": counts}, forward=None)
    engine.runner.capture()
    broken["now"] = False
    assert [key.requests for key in engine.runner.maintain()] == [4]
    assert counts.tolist() == [0] * 9


def test_capture_fails_only_if_nothing_could_be_captured() -> None:
    def prep(view: Any) -> Any:
        view.seq_lens[0].item()
        return meta(view)

    engine = Engine(prep, forward=None)
    with pytest.raises(CaptureError, match=r"no key could be captured; the first cause: CaptureError: .*item"):
        engine.runner.capture()
    prepared = engine.runner.prepare(Batch(3, draw(3)))
    assert (prepared.decision.prep, prepared.decision.reason) == (Route.EAGER, Reason.QUARANTINED)
    assert plain(prepared.metadata) == plain(meta(twin_view(draw(3), 4, engine.t)))


def test_an_interrupted_capture_leaves_no_key_behind_and_can_be_repeated() -> None:
    stop = {"now": True}

    def forward(view: Any, metadata: Any) -> Any:
        if stop["now"] and view.bucket.requests == 2:
            raise KeyboardInterrupt
        return model(view, metadata)

    engine = Engine(forward=forward)
    with pytest.raises(KeyboardInterrupt):
        engine.runner.capture()
    stop["now"] = False
    assert engine.right(3).decision.reason is Reason.NOT_CAPTURED
    engine.runner.capture()
    assert why(engine.right(3)) == GLUED


# Quarantine, maintain.


def breaking_at(size: int, broken: dict[str, Any]) -> Callable[[Any], Any]:
    def prep(view: Any) -> Any:
        if broken["how"] == "item" and view.bucket.requests == size:
            view.seq_lens[0].item()
        if broken["how"] == "raise" and view.bucket.requests == size:
            raise LookupError("no plan for this size")
        return meta(view)

    return prep


def test_host_frozen_a_prep_that_reads_the_host_is_quarantined_and_stays_right() -> None:
    def prep(view: Any) -> Any:
        longest = max(view.seq_lens.tolist())
        return {**meta(view), "where": view.loc * 0 + longest}

    engine = Engine(prep)
    engine.runner.capture()
    for start in (0, 5):
        step, sources = engine.step(3, start)
        assert why(step) == (Route.EAGER, Route.GRAPH, Reason.QUARANTINED, None)
        assert step.metadata["where"].tolist() == [max(sources["seq_lens"])] * 4
        assert_right(step, sources, engine.t, prep)
    (cause,) = {key["causes"]["meta"] for key in engine.runner.stats()["keys"]}
    assert "tolist" in cause
    assert "test_runner.py" in cause


def test_one_bucket_s_failure_leaves_the_others_serving_and_maintain_repairs_it() -> None:
    broken = {"how": "item"}
    engine = Engine(breaking_at(8, broken))
    engine.runner.capture()
    assert states(engine.runner) == {
        size: {"meta": "quarantined" if size == 8 else "captured", "forward": "captured"} for size in LADDER
    }
    assert why(engine.right(3)) == GLUED
    assert why(engine.right(7)) == (Route.EAGER, Route.GRAPH, Reason.QUARANTINED, None)
    assert engine.runner.maintain() == []
    assert why(engine.right(7, start=2))[2] is Reason.QUARANTINED
    broken["how"] = ""
    assert engine.runner.maintain() == [Key(Mode.DECODE, 8, 8, 1)]
    for start in (0, 4):
        assert why(engine.right(7, start)) == GLUED
        assert why(engine.right(3, start)) == GLUED
    assert engine.runner.maintain() == []


def test_a_prep_that_raises_at_one_bucket() -> None:
    broken = {"how": "raise"}
    engine = Engine(breaking_at(8, broken))
    engine.runner.capture()
    assert states(engine.runner)[8] == {"meta": "quarantined", "forward": "quarantined"}
    assert why(engine.right(3)) == GLUED
    with pytest.raises(LookupError, match="no plan for this size"):
        engine.step(7)
    assert why(engine.right(3, start=4)) == GLUED
    broken["how"] = ""
    assert why(engine.right(7)) == (Route.EAGER, Route.EAGER, Reason.QUARANTINED, Reason.FORWARD_QUARANTINED)
    assert [key.requests for key in engine.runner.maintain()] == [8]
    assert why(engine.right(7)) == GLUED


def test_a_forward_that_can_not_be_recorded_at_one_bucket() -> None:
    broken = {"now": True}

    def forward(view: Any, metadata: Any) -> Any:
        if broken["now"] and view.bucket.requests == 4:
            raise RuntimeError("no kernel")
        return model(view, metadata)

    engine = Engine(forward=forward)
    engine.runner.capture()
    assert states(engine.runner)[4] == {"meta": "captured", "forward": "quarantined"}
    with pytest.raises(RuntimeError, match="no kernel"):
        engine.step(3)
    broken["now"] = False
    assert why(engine.right(3)) == (Route.GLUE, Route.EAGER, Reason.PADDED, Reason.FORWARD_QUARANTINED)
    assert [key.requests for key in engine.runner.maintain()] == [4]
    assert why(engine.right(3)) == GLUED


@pytest.mark.parametrize("who", ["prep", "forward"])
def test_a_step_that_its_prep_or_forward_ended_is_not_counted(who: str) -> None:
    """Whether the other one was a graph or not."""
    broken = {"prep": False, "forward": False}

    def raising(name: str, run: Any) -> Any:
        def call(view: Any, *args: Any) -> Any:
            if broken[name]:
                raise RuntimeError(f"{name} today")
            return run(view, *args)

        return call

    engine = Engine(prep=raising("prep", meta), forward=raising("forward", model))
    broken[who] = True
    with suppress(CaptureError):  # no key's prep: nothing is captured then
        engine.runner.capture()
    broken[who] = False
    engine.right(3)
    for number in range(1, 4):
        assert engine.runner.stats()["steps"] == number
        broken[who] = True
        with pytest.raises(RuntimeError, match=f"{who} today"):
            engine.step(3, number)
        assert engine.runner.stats()["steps"] == number
        broken[who] = False
        assert why(engine.right(3, number))[who == "forward"] is Route.EAGER


def test_an_exception_in_an_eager_step_is_its_own_and_the_next_step_is_right() -> None:
    angry = {"now": False}

    def prep(view: Any) -> Any:
        if angry["now"]:
            raise ZeroDivisionError("in the prep")
        return meta(view)

    engine = Engine(prep, contract=CONTRACT.model_copy(update={"host_free": False}))
    engine.runner.capture()
    assert why(engine.right(3)) == (Route.EAGER, Route.GRAPH, Reason.NOT_HOST_FREE, None)
    angry["now"] = True
    for batch in (Batch(3, draw(3, 4)), Batch.idle(), Batch(11, draw(11))):
        with pytest.raises(ZeroDivisionError, match="in the prep"):
            engine.runner.replay(batch)
    angry["now"] = False
    engine.right(2)
    engine.right(3)


def test_metadata_of_another_form_sends_the_forward_to_the_eager_route() -> None:
    now = {"dtype": torch.int64}

    def prep(view: Any) -> Any:
        metadata = meta(view)
        return {**metadata, "where": metadata["where"].to(now["dtype"])}

    engine = Engine(prep, contract=CONTRACT.model_copy(update={"host_free": False}))
    engine.runner.capture()
    assert why(engine.right(3)) == (Route.EAGER, Route.GRAPH, Reason.NOT_HOST_FREE, None)
    now["dtype"] = torch.int32
    step = engine.right(3, start=5)
    assert why(step) == (Route.EAGER, Route.EAGER, Reason.NOT_HOST_FREE, Reason.METADATA_CHANGED)
    assert step.metadata["where"].dtype is torch.int32
    now["dtype"] = torch.int64
    assert why(engine.right(3, start=2))[3] is None


# Several preps.

WINDOW = PrepContract(
    name="window", reads={"seq_lens": (0, 1)}, outputs={"start": "request"}, modes={Mode.DECODE}, padded=False
)


def window(view: Any) -> dict[str, torch.Tensor]:
    return {"start": (view.seq_lens - 4).clamp(min=0)}


def hybrid(view: Any, metadata: Any) -> Any:
    return model(view, metadata["meta"])["next"] - metadata["window"]["start"]


def two_preps(second: Any = window, contract: PrepContract = WINDOW, **more: Any) -> Engine:
    registry = Registry()
    registry.register(CONTRACT)(meta)
    registry.register(contract)(second)
    return Engine(registry=registry, prep=["meta", "window"], **{"forward": hybrid, **more})


def test_plan_stale_several_preps_are_routed_alone_and_all_refreshed() -> None:
    engine = two_preps()
    engine.runner.capture()
    for requests, start, route in ((3, 0, Route.EAGER), (4, 2, Route.GLUE), (3, 7, Route.EAGER)):
        step, sources = engine.step(requests, start)
        view = twin_view(sources, 4, engine.t)
        metadata = {"meta": meta(view), "window": window(view)}
        assert plain(step.metadata) == plain(metadata)
        assert step.outputs.tolist() == hybrid(view, metadata)[:requests].tolist()
        decided = {name: decision.route for name, decision in step.decision.preps.items()}
        assert decided == {"meta": Route.GLUE, "window": route}
        assert (step.decision.prep, step.decision.forward) == (route, Route.GRAPH)
    assert step.decision.reason is Reason.PADDING_NOT_DECLARED


def test_a_broken_prep_among_several_goes_eager_alone() -> None:
    def second(view: Any) -> Any:
        view.seq_lens[0].item()
        return window(view)

    engine = two_preps(second, WINDOW.model_copy(update={"padded": True}))
    engine.runner.capture()
    step, sources = engine.step(3)
    assert {name: decision.reason for name, decision in step.decision.preps.items()} == {
        "meta": Reason.PADDED, "window": Reason.QUARANTINED
    }  # fmt: skip
    assert plain(step.metadata["window"]) == plain(window(twin_view(sources, 4, engine.t)))
    assert step.decision.forward is Route.GRAPH


def test_one_prep_in_a_list_is_named_all_the_same() -> None:
    registry = Registry()
    registry.register(CONTRACT)(meta)
    engine = Engine(registry=registry, prep=["meta"], forward=lambda view, metadata: metadata["meta"]["positions"] + 0)
    engine.runner.capture()
    step, sources = engine.step(2)
    assert set(step.metadata) == {"meta"}
    assert step.outputs.tolist() == [length - 1 for length in sources["seq_lens"]]


def test_a_callable_that_is_registered_keeps_its_contract() -> None:
    registry = Registry()
    registry.register(CONTRACT)(meta)
    engine = Engine(contract=None, registry=registry)
    engine.runner.capture()
    assert why(engine.right(3)) == GLUED


# publish, plan.


def test_publish_runs_on_every_route_with_the_step_s_metadata() -> None:
    published: list[Any] = []
    engine = Engine(publish=published.append)
    engine.right(3)
    engine.runner.capture()
    published.clear()
    steps = [engine.right(3), engine.right(4), engine.runner.replay(Batch.idle()), engine.right(11)]
    assert [step.decision.reason for step in steps] == [
        Reason.PADDED, Reason.UNPADDED, Reason.IDLE_EAGER, Reason.OVER_LADDER
    ]  # fmt: skip
    assert len(published) == 4
    for step, metadata in zip(steps, published):
        assert {name: leaf.data_ptr() for name, leaf in metadata.items()} == {
            name: leaf.data_ptr() for name, leaf in step.metadata.items()
        }


PLANNED = PrepContract(name="planned", reads={"seq_lens": 1, "splits": 1}, modes={Mode.DECODE})


def planned(view: Any) -> dict[str, torch.Tensor]:
    return {"share": view.seq_lens * 100 + view.splits}


def planning(plan: Any, **more: Any) -> Engine:
    lens, splits = (Slot(name, "request", torch.int64, 1) for name in ("seq_lens", "splits"))
    made = {"slots": [lens, splits], "tables": {}, "forward": lambda view, m: m["share"] + 0}
    return Engine(planned, PLANNED, plan=plan, **{**made, **more})


def test_host_frozen_a_plan_runs_on_the_host_at_every_replay_and_travels_as_slots() -> None:
    calls: list[tuple[int, Bucket]] = []

    def plan(batch: Batch, bucket: Bucket) -> dict[str, Any]:
        calls.append((batch.num_requests, bucket))
        return {"splits": [len(calls)] * batch.num_requests}

    engine = planning(plan)
    engine.runner.capture()
    assert calls == []
    for number, requests in enumerate((3, 3, 4, 1, 11), start=1):
        step = engine.runner.replay(Batch(requests, {"seq_lens": [5] * requests}))
        size = step.decision.bucket.requests
        assert step.metadata["share"].tolist() == [500 + number] * requests + [101] * (size - requests)
        assert step.outputs.tolist() == [500 + number] * requests
        assert calls[-1] == (requests, Bucket(size, size, 1))
        assert step.decision.prep is (Route.EAGER if requests == 11 else Route.GLUE)
    assert len(calls) == 5


@pytest.mark.parametrize(
    ("plan", "error", "said"),
    [
        (lambda b, k: {"splits": [1]}, BindError, r"slot 'splits': the source is extent \(1,\); expected exactly"),
        (lambda b, k: {"unknown": [1] * 3, "splits": [1] * 3}, BindError, "'unknown', which is no slot"),
        (lambda b, k: {"seq_lens": [1] * 3, "splits": [1] * 3}, BindError, r"slots \['seq_lens'\] come from the batch"),
        (lambda b, k: {}, BindError, "slot 'splits' is missing"),
        (lambda b, k: 1 // 0, ZeroDivisionError, "division"),
    ],
)  # fmt: skip
def test_a_faulty_plan_is_refused_before_anything_is_written(plan: Any, error: Any, said: str) -> None:
    good = {"now": True}
    engine = planning(lambda b, k: {"splits": [2] * b.num_requests} if good["now"] else plan(b, k))
    engine.runner.capture()
    engine.runner.replay(Batch(8, {"seq_lens": list(range(8))}))
    before, good["now"] = engine.slot_bytes(), False
    with pytest.raises(error, match=said):
        engine.runner.replay(Batch(3, {"seq_lens": [5] * 3}))
    assert engine.slot_bytes() == before


# Tables.


def test_contents_of_a_table_are_read_at_every_replay() -> None:
    engine = Engine()
    engine.runner.capture()
    engine.right(3)
    engine.t.mul_(5)
    assert why(engine.right(3)) == GLUED


@pytest.mark.parametrize(
    "batch",
    [Batch(3, draw(3)), Batch(4, draw(4)), Batch.idle(), Batch(11, draw(11)), Batch(3, draw(3), mode=Mode.DRAFT)],
    ids=["padded", "unpadded", "idle", "over the ladder", "not captured"],
)
def test_a_table_that_moved_is_noticed_on_every_route(batch: Batch) -> None:
    home = {"t": table()}
    engine = Engine(tables={"t": lambda: home["t"]})
    engine.runner.capture()
    engine.right(8)
    before, home["t"] = engine.slot_bytes(), table()
    with pytest.raises(StaleTableError, match=r"table 't' moved: .* call rebind_table\('t', tensor\)"):
        engine.runner.replay(batch)
    assert engine.slot_bytes() == before
    assert engine.runner.can_replay(batch).bucket.requests >= 1


def test_rebinding_drops_every_key_and_maintain_captures_them_again() -> None:
    engine = Engine()
    engine.runner.capture()
    engine.t = table() + 1000
    engine.runner.rebind_table("t", engine.t)
    assert why(engine.right(3))[:3] == (Route.EAGER, Route.EAGER, Reason.NOT_CAPTURED)
    assert sorted(key.requests for key in engine.runner.maintain()) == LADDER
    for requests in (3, 4, 7):
        assert engine.right(requests).decision.prep is Route.GLUE


def test_rebinding_to_a_callable_and_to_another_shape() -> None:
    home = {"t": table()}
    engine = Engine(tables={"t": lambda: home["t"]})
    engine.runner.capture()
    home["t"] = engine.t = torch.arange(9 * 20).reshape(9, 20)
    engine.runner.rebind_table("t", lambda: home["t"])
    engine.runner.maintain()
    step = engine.right(5)
    assert step.metadata["pages"].shape == (8, 5)
    assert why(step) == GLUED


def test_a_refused_rebind_changes_nothing() -> None:
    indexed = [
        Slot("rows", "request", torch.int64, 0, index_of="t", capture=5) if slot.name == "rows" else slot
        for slot in slots()
    ]
    engine = Engine(slots=indexed)
    engine.runner.capture()
    for name, bad, error in (
        ("t", torch.zeros(2, 12, dtype=torch.int64), ContractError),
        ("t", torch.zeros(7, 12, device="meta"), GraphGlueError),
        ("t", [1, 2], GraphGlueError),
        ("u", table(), GraphGlueError),
    ):
        with pytest.raises(error):
            engine.runner.rebind_table(name, bad)
        assert why(engine.right(3)) == GLUED
    assert why(engine.right(11))[2] is Reason.OVER_LADDER


def test_lifetime_a_table_that_nobody_else_holds_stays_readable() -> None:
    engine = Engine(tables={"t": table()})
    engine.runner.capture()
    junk = [torch.full((7, 12), 9) for _ in range(50)]
    engine.right(5)
    assert len(junk) == 50


# Reset, close.


def test_reset_goes_eager_until_the_next_capture() -> None:
    engine = Engine()
    engine.runner.capture()
    for _ in range(3):
        engine.runner.reset()
        engine.runner.reset()
        assert engine.runner.stats()["keys"] == []
        assert why(engine.right(3))[:3] == (Route.EAGER, Route.EAGER, Reason.NOT_CAPTURED)
        engine.runner.capture()
        assert why(engine.right(3)) == GLUED


def test_a_context_manager_closes_and_closing_twice_is_fine() -> None:
    engine = Engine()
    with engine.runner as runner:
        assert runner is engine.runner
        runner.capture()
        engine.right(3)
    runner.close()
    runner.close()
    assert runner.stats()["steps"] == 1


def test_a_context_manager_closes_after_an_error_too() -> None:
    engine = Engine()
    with pytest.raises(LookupError), engine.runner:
        raise LookupError
    with pytest.raises(GraphGlueError, match="was closed"):
        engine.runner.replay(Batch.idle())


def test_lifetime_closing_one_runner_leaves_another_alone() -> None:
    one, other = Engine(), Engine()
    for engine in (one, other):
        engine.runner.capture()
    one.right(3)
    other.runner.close()
    one.right(3, start=4)


def test_pool_alias_runners_share_nothing() -> None:
    one, other = Engine(), Engine(ladder=[8, 16])
    one.runner.capture()
    first, sources = one.step(3)
    other.runner.capture()
    other.right(3, start=9)
    assert_right(first, sources, one.t)
    for start in range(4):
        one.right(3, start)
        other.right(13, start + 1)


# Over the ladder.


def test_over_cap_runs_eagerly_at_exact_extents_and_leaves_the_slots() -> None:
    engine = Engine()
    engine.runner.capture()
    engine.right(8)
    before = engine.slot_bytes()
    for requests in (9, 30):
        step = engine.right(requests)
        assert why(step) == (Route.EAGER, Route.EAGER, Reason.OVER_LADDER, Reason.OVER_LADDER)
        assert step.decision.bucket == step.raw == Bucket(requests, requests, 1)
        assert engine.slot_bytes() == before
    assert why(engine.right(3)) == GLUED


def test_over_cap_without_a_forward_is_refused() -> None:
    engine = Engine(forward=None)
    engine.runner.capture()
    engine.runner.replay(Batch(8, draw(8)))
    before = engine.slot_bytes()
    for call in (engine.runner.replay, engine.runner.prepare):
        with pytest.raises(CapacityError, match=r"9 requests and 9 tokens exceeds the ladder \[1, 2, 4, 8\].*split"):
            call(Batch(9, draw(9)))
    assert engine.slot_bytes() == before
    decision = engine.runner.can_replay(Batch(9, draw(9)))
    assert decision.reason is Reason.OVER_LADDER
    assert not decision


def test_over_cap_prepare_is_refused_with_a_forward_too() -> None:
    engine = Engine()
    engine.runner.capture()
    with pytest.raises(CapacityError, match="exceeds the ladder"):
        engine.runner.prepare(Batch(9, draw(9)))


def test_over_cap_more_tokens_than_the_slots_have() -> None:
    engine = Engine(
        lambda view: {"m": view.loc + 1},
        PrepContract(name="p", reads={"loc": 0}, modes={Mode.DECODE}),
        forward=lambda view, metadata: view.ids + metadata["m"],
        tokens_per_request=2,
    )
    engine.runner.capture()
    tokens = 8 * 3
    sources = {"seq_lens": [1] * 8, "rows": [1] * 8, "loc": list(range(tokens)), "ids": list(range(tokens))}
    step = engine.runner.replay(Batch(8, sources, num_tokens=tokens))
    assert step.decision.reason is Reason.OVER_LADDER
    assert step.outputs.tolist() == [2 * token + 1 for token in range(tokens)]


def test_over_cap_a_slot_s_own_view_is_a_source_there_too() -> None:
    engine = Engine(
        lambda view: {"m": view.ids + view.flag[0]},
        PrepContract(name="p", reads={"ids": 0, "flag": 0}, modes={Mode.DECODE}),
        slots=[Slot("ids", "token", torch.int64, 0), Slot("flag", "fixed", torch.int64, 0, inner=(2,))],
        tables={},
        forward=lambda view, metadata: metadata["m"] * view.flag[1],
    )
    engine.runner.capture()
    engine.runner.replay(Batch(2, {"ids": [1, 2], "flag": [5, 6]}))
    step = engine.runner.replay(Batch(9, {"ids": list(range(9)), "flag": engine.runner.view(8).flag}))
    assert step.decision.reason is Reason.OVER_LADDER
    assert step.outputs.tolist() == [(value + 5) * 6 for value in range(9)]


# prepare, can_replay, view.


def test_prepare_fills_and_preps_for_an_engine_that_owns_its_forward() -> None:
    engine = Engine(forward=None)
    engine.runner.capture()
    places = set()
    for start in range(4):
        sources = draw(3, start)
        prepared = engine.runner.prepare(Batch(3, sources))
        view = twin_view(sources, 4, engine.t)
        assert plain(prepared.metadata) == plain(meta(view))
        assert {name: prepared.view[name].tolist() for name in PADS} == {
            name: getattr(view, name).tolist() for name in PADS
        }
        assert prepared.view.tables.t is engine.t
        assert prepared.raw == Bucket(3, 3, 1)
        assert why(prepared) == (Route.GLUE, Route.EAGER, Reason.PADDED, Reason.NO_FORWARD_GRAPH)
        assert not prepared.decision
        places.add((prepared.view.ids.data_ptr(), prepared.metadata["positions"].data_ptr()))
        outputs = model(prepared.view, prepared.metadata)
        assert plain(outputs) == plain(model(view, meta(view)))
    assert len(places) == 1


def test_a_runner_without_a_forward_has_no_outputs() -> None:
    engine = Engine(forward=None)
    engine.runner.capture()
    step, sources = engine.step(3)
    assert step.outputs is None
    assert_right(step, sources, engine.t, forward=None)


@pytest.mark.parametrize("captured", [False, True])
def test_can_replay_decides_as_replay_does_and_writes_nothing(captured: bool) -> None:
    engine = Engine()
    if captured:
        engine.runner.capture()
    engine.right(8)
    before, steps = engine.slot_bytes(), engine.runner.stats()["steps"]
    batches = [
        Batch(3, draw(3)),
        Batch(4, draw(4)),
        Batch.idle(),
        Batch(11, draw(11)),
        Batch(2, draw(2), mode=Mode.DRAFT),
    ]
    decisions = [engine.runner.can_replay(batch) for batch in batches]
    assert engine.slot_bytes() == before
    assert engine.runner.stats()["steps"] == steps
    assert [bool(decision) for decision in decisions] == [captured, captured, captured, False, False]
    assert decisions == [engine.runner.replay(batch).decision for batch in batches]


def test_can_replay_looks_at_counts_only() -> None:
    engine = Engine()
    engine.runner.capture()
    assert engine.runner.can_replay(Batch(3)).reason is Reason.PADDED
    with pytest.raises(BindError, match="num_requests=-1"):
        engine.runner.can_replay(Batch(-1))


def test_the_view_of_a_bucket_shows_all_slots_and_tables() -> None:
    engine = Engine(tokens_per_request=2)
    for bucket in (4, Bucket(4, 8, 2)):
        view = engine.runner.view(bucket)
        assert {name: len(view[name]) for name in view} == {"seq_lens": 4, "rows": 4, "loc": 8, "ids": 8}
        assert view.tables.t is engine.t
        assert view.bucket == Bucket(4, 8, 2)
    with pytest.raises(CapacityError, match="exceeds the ladder"):
        engine.runner.view(16)


def test_a_prep_sees_what_it_declared_and_the_forward_sees_all() -> None:
    seen: dict[str, Any] = {}

    def prep(view: Any) -> Any:
        seen["prep"] = (sorted(view), sorted(view.tables), view.mode, view.variant)
        return {"m": view.loc + 1}

    def forward(view: Any, metadata: Any) -> Any:
        seen["forward"] = (sorted(view), sorted(view.tables), view.mode, view.variant)
        return metadata["m"] + 0

    engine = Engine(prep, PrepContract(name="p", reads={"loc": 0}, modes={Mode.DECODE}), forward=forward)
    for run in (lambda: engine.step(3), engine.runner.capture, lambda: engine.step(3)):
        seen.clear()
        run()
        if seen:
            assert seen["prep"] == (["loc"], [], Mode.DECODE, None)
            assert seen["forward"] == (sorted(PADS), ["t"], Mode.DECODE, None)


@pytest.mark.parametrize("what", ["slot", "table"])
def test_unstaged_a_prep_that_reads_what_it_did_not_declare_is_refused(what: str) -> None:
    def prep(view: Any) -> Any:
        return {"m": view.ids + 1 if what == "slot" else view.tables.u + 1}

    engine = Engine(prep, PrepContract(name="p", reads={"loc": 0}, tables=("t",), modes={Mode.DECODE}), tables={
        "t": table(), "u": table()
    })  # fmt: skip
    name = "ids" if what == "slot" else "u"
    for call in (engine.runner.capture, lambda: engine.runner.replay(Batch(3, draw(3)))):
        with pytest.raises(ContractError, match=f"prep 'p' read '{name}', which it did not declare"):
            call()


# Configuration.


@pytest.mark.parametrize("clone", [False, True])
def test_clone_outputs_keeps_results_from_later_replays(clone: bool) -> None:
    engine = Engine(config=RunnerConfig(clone_outputs=clone))
    engine.runner.capture()
    kept, sources = engine.step(3)
    engine.right(4, start=5)
    if clone:
        assert_right(kept, sources, engine.t)
    else:
        with pytest.raises(AssertionError):
            assert_right(kept, sources, engine.t)


@pytest.mark.parametrize("requests", [3, 11])
def test_clone_outputs_holds_on_the_eager_route_too(requests: int) -> None:
    engine = Engine(
        forward=lambda view, m: {"ids": view.ids, "pos": m["positions"]}, config=RunnerConfig(clone_outputs=True)
    )
    if requests == 11:
        engine.runner.capture()
    kept, sources = engine.step(requests)
    engine.step(requests, start=7)
    assert kept.outputs["ids"].tolist() == sources["ids"]
    assert kept.outputs["pos"].tolist() == [length - 1 for length in sources["seq_lens"]]


def test_disabled_by_config_everything_is_eager() -> None:
    engine = Engine(config=RunnerConfig(enabled=False))
    for requests in (3, 4, 11):
        assert why(engine.right(requests)) == (Route.EAGER, Route.EAGER, Reason.DISABLED, Reason.DISABLED)
    assert why(engine.runner.replay(Batch.idle()))[2] is Reason.DISABLED


def test_disabled_by_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GRAPHGLUE_ENABLED", "0")
    assert why(Engine().right(3))[2] is Reason.DISABLED


@pytest.mark.parametrize(
    ("switch", "padded", "unpadded"),
    [
        ("on", Reason.PADDED, Reason.UNPADDED),
        ("unpadded", Reason.PADDING_NOT_DECLARED, Reason.UNPADDED),
        ("off", Reason.SWITCHED_OFF, Reason.SWITCHED_OFF),
    ],
)
def test_glue_switches(switch: Any, padded: Reason, unpadded: Reason) -> None:
    engine = Engine(config=RunnerConfig(glue={"meta": switch}))
    engine.runner.capture()
    assert engine.right(3).decision.reason is padded
    assert engine.right(4).decision.reason is unpadded
    assert engine.right(4).decision.forward is Route.GRAPH


@pytest.mark.parametrize("config", [{}, {"generic_glue": True}, {"glue": {"meta": "on"}}, {"glue": {"meta": "off"}}])
def test_a_prep_without_a_contract(config: dict[str, Any]) -> None:
    engine = Engine(contract=None, config=RunnerConfig(**config))
    engine.runner.capture()
    on = config.get("generic_glue") or config.get("glue") == {"meta": "on"}
    assert why(engine.right(4)) == (UNPADDED if on else (Route.EAGER, Route.GRAPH, Reason.NO_CONTRACT, None))
    assert engine.right(3).decision.reason is (Reason.PADDING_NOT_DECLARED if on else Reason.NO_CONTRACT)
    lora = engine.right(4, features=frozenset({"lora"})).decision
    assert lora.reason is (Reason.FEATURE_NOT_AUDITED if on else Reason.NO_CONTRACT)
    assert lora.forward is Route.GRAPH


def test_feature_guard_an_undeclared_feature_goes_eager_and_stays_right() -> None:
    engine = Engine(contract=CONTRACT.model_copy(update={"features": frozenset({"tbo"})}))
    engine.runner.capture()
    for requests in (3, 4):
        step = engine.right(requests, features=frozenset({"lora"}))
        assert why(step) == (Route.EAGER, Route.GRAPH, Reason.FEATURE_NOT_AUDITED, None)
        assert engine.right(requests, features=frozenset({"tbo"})).decision.prep is Route.GLUE


def test_padding_off_runs_what_is_no_bucket_exactly() -> None:
    seen: list[int] = []

    def forward(view: Any, metadata: Any) -> Any:
        seen.append(len(view.ids))
        return model(view, metadata)

    engine = Engine(forward=forward, config=RunnerConfig(padding=False))
    engine.runner.capture()
    seen.clear()
    assert why(engine.right(4)) == UNPADDED
    step = engine.right(3)
    assert why(step) == (Route.EAGER, Route.EAGER, Reason.PADDING_DISABLED, Reason.PADDING_DISABLED)
    assert step.decision.bucket == step.raw == Bucket(3, 3, 1)
    assert seen == [3]
    assert why(engine.runner.replay(Batch.idle()))[:2] == (Route.EAGER, Route.GRAPH)


def test_a_wasteful_bucket_is_not_used() -> None:
    engine = Engine(ladder=[1, 8], config=RunnerConfig(waste_limit=2))
    engine.runner.capture()
    assert why(engine.right(4)) == GLUED
    step = engine.right(3)
    assert why(step) == (Route.EAGER, Route.EAGER, Reason.WASTE, Reason.WASTE)
    assert step.decision.bucket == Bucket(3, 3, 1)
    assert why(engine.right(1)) == UNPADDED
    assert why(engine.runner.replay(Batch.idle()))[2] is Reason.IDLE_EAGER


def test_a_required_certificate_that_is_absent_keeps_the_prep_eager() -> None:
    engine = Engine(config=RunnerConfig(certificate="require"))
    engine.runner.capture()
    assert why(engine.right(3)) == (Route.EAGER, Route.GRAPH, Reason.NOT_CERTIFIED, None)


# Modes, variants, ragged, EXTEND, output axes.


def test_route_key_a_mode_that_is_not_declared_goes_eager() -> None:
    engine = Engine()
    engine.runner.capture()
    step = engine.right(4, mode=Mode.VERIFY)
    assert why(step) == (Route.EAGER, Route.EAGER, Reason.MODE_NOT_DECLARED, Reason.NO_FORWARD_GRAPH)


def test_route_key_every_declared_mode_has_its_keys() -> None:
    engine = Engine(
        lambda view: {**meta(view), "where": view.loc + (1 if view.mode is Mode.DRAFT else 0)},
        CONTRACT.model_copy(update={"modes": frozenset({Mode.DECODE, Mode.DRAFT})}),
    )
    engine.runner.capture()
    for mode, shift in ((Mode.DECODE, 0), (Mode.DRAFT, 1), (Mode.DECODE, 0)):
        step, sources = engine.step(3, mode=mode)
        assert why(step) == GLUED
        assert step.metadata["where"].tolist() == [loc + shift for loc in [*sources["loc"], 0]]


def test_route_key_variants_have_keys_of_their_own() -> None:
    log = Log()

    def forward(view: Any, metadata: Any) -> Any:
        return model(view, metadata)["next"] * (-1 if view.variant == "lora" else 1)

    engine = Engine(forward=forward, ladder=[4], variants=(None, "lora"), recorder=log)
    engine.runner.capture()
    recorded = log.count("record")
    assert recorded == 4
    for number in range(10):
        variant = "lora" if number % 2 else None
        step, sources = engine.step(3, number, variant=variant)
        view = twin_view(sources, 4, engine.t)
        view.variant = variant
        assert why(step) == GLUED
        assert step.outputs.tolist() == forward(view, meta(view))[:3].tolist()
    assert log.count("record") == recorded
    step, sources = engine.step(3, variant="unknown")
    assert why(step) == (Route.EAGER, Route.EAGER, Reason.NOT_CAPTURED, Reason.NO_FORWARD_GRAPH)
    assert (
        step.outputs.tolist()
        == forward(twin_view(sources, 4, engine.t), meta(twin_view(sources, 4, engine.t)))[:3].tolist()
    )


RAGGED = PrepContract(name="ragged", reads={"counts": 0}, outputs={"ends": "request"}, modes={Mode.VERIFY}, ragged=True)


def ends(view: Any) -> dict[str, torch.Tensor]:
    return {"ends": torch.cumsum(view.counts, 0)}


def ragged_forward(view: Any, metadata: Any) -> Any:
    tokens = torch.arange(len(view.ids))
    owner = (tokens[:, None] >= metadata["ends"][None, :]).sum(1)
    return view.ids * 10 + owner


def ragged_engine(ragged: bool, **more: Any) -> Engine:
    return Engine(
        ends,
        RAGGED.model_copy(update={"ragged": ragged}),
        slots=[Slot("counts", "request", torch.int64, 0), Slot("ids", "token", torch.int64, 0)],
        tables={},
        forward=ragged_forward,
        tokens_per_request=4,
        ladder=[1, 2, 4],
        **more,
    )


def ragged_step(engine: Engine, counts: list[int]) -> Any:
    tokens = sum(counts)
    ids = list(range(100, 100 + tokens))
    batch = Batch(len(counts), {"counts": counts, "ids": ids}, mode=Mode.VERIFY, row_tokens=counts)
    step = engine.runner.replay(batch)
    owners = [row for row, count in enumerate(counts) for _ in range(count)]
    assert step.outputs.tolist() == [value * 10 + owner for value, owner in zip(ids, owners)]
    assert step.metadata["ends"][: len(counts)].tolist() == torch.tensor(counts).cumsum(0).tolist()
    return step


def test_ragged_rows_have_graphs_of_their_own_where_declared() -> None:
    engine = ragged_engine(True)
    engine.runner.capture()
    for counts in ([4, 4, 2], [4, 4, 4], [4, 4, 2], [1, 1], [3, 3], [4], [1, 2, 3, 4]):
        step = ragged_step(engine, counts)
        uniform = len(set(counts)) == 1
        if not uniform:
            size = min(n for n in (1, 2, 4) if n >= len(counts) and 4 * n >= sum(counts))
            assert step.decision.bucket == Bucket(size, 4 * size, 0)
            assert why(step) == (Route.GLUE, Route.GRAPH, Reason.RAGGED, None)
        elif counts[0] == 4:
            assert step.decision.bucket.row_tokens == 4
            assert why(step)[:2] == (Route.GLUE, Route.GRAPH)
        else:  # a uniform batch of another width has a key of its own, which nobody captured
            assert step.decision.bucket == Bucket(2, 2 * counts[0], counts[0])
            assert why(step) == (Route.EAGER, Route.EAGER, Reason.NOT_CAPTURED, Reason.NO_FORWARD_GRAPH)


def test_ragged_rows_go_eager_where_not_declared() -> None:
    engine = ragged_engine(False)
    engine.runner.capture()
    assert {bucket.row_tokens for bucket in engine.runner.buckets} == {4}
    for counts in ([4, 4, 2], [4, 4, 4], [1, 3]):
        step = ragged_step(engine, counts)
        if len(set(counts)) > 1:
            assert why(step) == (Route.EAGER, Route.EAGER, Reason.RAGGED_NOT_DECLARED, Reason.RAGGED_KEY)
        else:
            assert why(step) == GLUED


def test_ragged_twelve_tokens_are_not_one_shape() -> None:
    engine = ragged_engine(True)
    engine.runner.capture()
    assert ragged_step(engine, [4, 4, 4]).decision.bucket == Bucket(4, 16, 4)
    assert ragged_step(engine, [3, 3, 3, 3]).decision.bucket == Bucket(4, 12, 3)
    assert ragged_step(engine, [4, 4, 3, 1]).decision.bucket == Bucket(4, 16, 0)
    with pytest.raises(BindError, match="row_tokens"):
        ragged_step(engine, [12, 0, 0])


EXTEND = PrepContract(
    name="prefill", reads={"counts": 0}, outputs={"ends": "request"}, modes={Mode.EXTEND}, ragged=True
)


def extend_engine(contract: PrepContract = EXTEND, prep: Any = ends, **more: Any) -> Engine:
    made: dict[str, Any] = {
        "slots": [
            Slot("counts", "request", torch.int64, 0),
            Slot("ids", "token", torch.int64, 0),
            Slot("live", "fixed", torch.int64, 0, value=RAW_REQUESTS),
        ],
        "tables": {},
        "ladder": [8, 16],
        "config": RunnerConfig(max_requests=3),
    }
    return Engine(prep, contract, **{**made, **more})


def test_extend_ladders_are_tokens_and_request_slots_have_max_requests_rows() -> None:
    def forward(view: Any, metadata: Any) -> Any:
        return {"ids": view.ids * 2, "last": metadata["ends"] - 1, "live": view.live * 1}

    axes = {"ids": "token", "last": "request", "live": "fixed"}
    engine = extend_engine(forward=forward, output_axes=axes)
    engine.runner.capture()
    assert engine.runner.buckets == (Bucket(3, 8, 0), Bucket(3, 16, 0))

    def serve(counts: list[int], **more: Any) -> Any:
        ids = list(range(sum(counts)))
        batch = Batch(len(counts), {"counts": counts, "ids": ids}, mode=Mode.EXTEND, row_tokens=counts, **more)
        step = engine.runner.replay(batch)
        assert step.outputs["ids"].tolist() == [2 * value for value in ids]
        assert step.outputs["last"].tolist() == (torch.tensor(counts).cumsum(0) - 1).tolist()
        assert step.outputs["live"].tolist() == len(counts)
        return step

    assert serve([3, 4]).decision.bucket == Bucket(3, 8, 0)
    assert serve([8]).decision.prep is Route.GLUE
    assert serve([4, 4, 8]).decision.bucket == Bucket(3, 16, 0)
    assert serve([5, 3, 1]).decision.forward is Route.GRAPH
    wasteful = serve([3])
    assert why(wasteful) == (Route.EAGER, Route.EAGER, Reason.WASTE, Reason.WASTE)
    assert wasteful.decision.bucket == Bucket(1, 3, 0)
    for counts in ([17], [1, 1, 1, 5]):
        assert why(serve(counts))[2] is Reason.OVER_LADDER


def test_extend_may_skip_idle_steps_and_still_publishes() -> None:
    calls: list[str] = []

    def prep(view: Any) -> Any:
        calls.append("prep")
        return ends(view)

    published: list[Any] = []
    contract = EXTEND.model_copy(update={"idle": "skip"})
    engine = extend_engine(contract, prep, forward=None, publish=published.append)
    engine.runner.capture()
    engine.runner.prepare(Batch(1, {"counts": [7], "ids": [1] * 7}, mode=Mode.EXTEND, num_tokens=7))
    calls.clear()
    prepared = engine.runner.prepare(Batch.idle(mode=Mode.EXTEND))
    assert (prepared.decision.prep, prepared.decision.reason) == (Route.SKIP, Reason.IDLE_SKIPPED)
    assert prepared.view.counts.tolist() == [0, 0, 0]
    assert calls == []
    assert len(published) == 2


def test_extend_can_not_skip_idle_steps_under_a_full_graph() -> None:
    engine = extend_engine(EXTEND.model_copy(update={"idle": "skip"}), forward=lambda view, m: view.ids + 0)
    with pytest.raises(ContractError, match="prep 'prefill' declares idle='skip', but the forward is one full graph"):
        engine.runner.capture()


@pytest.mark.parametrize(
    ("axes", "made", "rows"),
    [
        (None, lambda v, m: v.ids * 2, 6),
        ("token", lambda v, m: v.ids * 2, 6),
        ("request", lambda v, m: v.seq_lens * 2, 3),
        ("bucket", lambda v, m: v.ids * 2, 8),
        ("fixed", lambda v, m: v.ids.sum().reshape(1), 1),
        ("offset", lambda v, m: torch.nn.functional.pad(v.seq_lens, (1, 0)), 4),
    ],
)
def test_pad_leak_outputs_are_narrowed_by_their_axis_on_every_route(axes: Any, made: Any, rows: int) -> None:
    engine = Engine(
        lambda view: {"m": view.loc + 1},
        PrepContract(name="p", reads={"loc": 0}, modes={Mode.DECODE}),
        forward=made,
        output_axes=axes,
        tokens_per_request=2,
    )
    sources = {"seq_lens": [4, 5, 6], "rows": [1] * 3, "loc": [2] * 6, "ids": [1, 2, 3, 4, 5, 6]}
    eager = engine.runner.replay(Batch(3, sources))
    engine.runner.capture()
    glued = engine.runner.replay(Batch(3, sources))
    assert (eager.decision.forward, glued.decision.forward) == (Route.EAGER, Route.GRAPH)
    assert len(eager.outputs) == len(glued.outputs) == rows
    assert eager.outputs.tolist() == glued.outputs.tolist()


def test_output_axes_by_leaf_in_any_structure() -> None:
    def forward(view: Any, metadata: Any) -> Any:
        return {"a": [view.ids * 2, view.seq_lens * 3], "scale": 0.5}

    engine = Engine(forward=forward, output_axes={"a.0": "token", "a.1": "bucket"})
    engine.runner.capture()
    step, sources = engine.step(3)
    assert step.outputs["a"][0].tolist() == [2 * value for value in sources["ids"]]
    assert len(step.outputs["a"][1]) == 4
    assert step.outputs["scale"] == 0.5


@pytest.mark.parametrize(
    ("axes", "made", "said"),
    [
        (None, lambda v, m: v.ids.sum(), r"has shape \(\), but output_axes \(by default\) says dim 0 is token"),
        (None, lambda v, m: {"h": v.ids[:1] + 1}, r"output 'h' has shape \(1,\).*pass output_axes to the Runner"),
        ({"h": "token"}, lambda v, m: {"h": v.ids + 1, "g": v.ids + 1}, "output_axes has no entry .* output 'g'"),
        ({"h": "offset"}, lambda v, m: {"h": v.ids + 1}, "output_axes says dim 0 is offset"),
    ],
)  # fmt: skip
def test_outputs_that_do_not_fit_their_axes_are_refused_at_capture(axes: Any, made: Any, said: str) -> None:
    engine = Engine(forward=made, output_axes=axes, ladder=[4])
    with pytest.raises(ContractError, match=said):
        engine.runner.capture()
    with pytest.raises(ContractError, match=said):
        engine.runner.replay(Batch(4, draw(4)))


def test_an_unknown_output_axis_is_refused_at_construction() -> None:
    with pytest.raises(ContractError, match="output_axes names axis 'row' for 'h'; expected one of"):
        Engine(output_axes={"h": "row"})


# Threads.


def test_a_second_thread_is_refused_and_the_first_goes_on() -> None:
    inside, leave = threading.Event(), threading.Event()

    def forward(view: Any, metadata: Any) -> Any:
        inside.set()
        assert leave.wait(20)
        return model(view, metadata)

    engine, steps = Engine(forward=forward), []
    worker = threading.Thread(target=lambda: steps.append(engine.step(3)))
    worker.start()
    assert inside.wait(20)
    try:
        uses: list[Callable[[], Any]] = [
            lambda: engine.runner.replay(Batch.idle()),
            lambda: engine.runner.prepare(Batch.idle()),
            engine.runner.capture,
            engine.runner.maintain,
            engine.runner.reset,
            engine.runner.close,
            lambda: engine.runner.rebind_table("t", table()),
        ]
        for use in uses:
            with pytest.raises(GraphGlueError, match=r"the runner is in use, by another thread.*its own Runner"):
                use()
    finally:
        leave.set()
        worker.join(20)
    step, sources = steps[0]
    assert_right(step, sources, engine.t)
    engine.right(2)


def test_a_prep_that_replays_its_own_runner_is_refused() -> None:
    box: dict[str, Runner] = {}

    def prep(view: Any) -> Any:
        box["runner"].replay(Batch.idle())
        return meta(view)

    box["runner"] = Engine(prep).runner
    with pytest.raises(GraphGlueError, match="in use, by another thread or by its own prep or forward"):
        box["runner"].replay(Batch(3, draw(3)))


def test_threads_with_runners_of_their_own_do_not_meet() -> None:
    failures: list[BaseException] = []

    def serve() -> None:
        try:
            engine = Engine(ladder=[4])
            for number in range(20):
                engine.right(1 + number % 4, number)
        except BaseException as error:
            failures.append(error)

    workers = [threading.Thread(target=serve) for _ in range(3)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join(60)
    assert failures == []


# What it tells.


def test_route_key_each_fallback_is_logged_once(caplog: pytest.LogCaptureFixture) -> None:
    engine = Engine()
    engine.runner.capture()
    with caplog.at_level(logging.WARNING, "graphglue"):
        for requests in (9, 10, 9, 30):
            engine.right(requests)
        engine.right(3, features=frozenset({"lora"}))
        engine.right(4, features=frozenset({"tbo"}))
        engine.right(3)
    lines = [record.getMessage() for record in caplog.records if record.name == "graphglue"]
    assert len(lines) == 2
    assert "over_ladder" in lines[0]
    assert "9" in lines[0]
    assert "feature_not_audited" in lines[1]


def test_route_key_captured_keys_are_reached() -> None:
    engine = Engine()
    engine.runner.capture()
    for requests in range(1, 9):
        engine.right(requests)
    engine.right(9)
    routes = engine.runner.stats()["routes"]
    glued = sum(way["steps"] for way in routes if way["prep"] == "glue" and way["forward"] == "graph")
    assert glued == 8
    assert sum(way["steps"] for way in routes) == engine.runner.stats()["steps"] == 9
    assert {way["bucket"][0] for way in routes if way["prep"] == "glue"} == set(LADDER)


def test_stats_are_json_and_tell_steps_tokens_and_keys() -> None:
    def prep(view: Any) -> Any:
        if view.bucket.requests == 8:
            view.seq_lens[0].item()
        return meta(view)

    engine = Engine(prep, variants=(None, ("lora", 3)))
    empty = engine.runner.stats()
    assert (empty["steps"], empty["keys"]) == (0, [])
    engine.runner.capture()
    for requests in (3, 7, 11, 0):
        engine.runner.replay(Batch(requests, draw(requests)) if requests else Batch.idle())
    stats = json.loads(json.dumps(engine.runner.stats()))
    assert stats["steps"] == 4
    assert stats["real_tokens"] == 3 + 7 + 11
    assert stats["bucket_tokens"] == 4 + 8 + 11 + 1
    assert len(stats["keys"]) == 2 * len(LADDER)
    for key in stats["keys"]:
        size = key["bucket"][0]
        assert key["states"]["meta"] == ("quarantined" if size == 8 else "captured")
        assert ("item" in key["causes"].get("meta", "")) is (size == 8)
    assert {key["variant"] for key in stats["keys"]} == {"None", "('lora', 3)"}
    assert {way["reason"] for way in stats["routes"]} == {"padded", "quarantined", "over_ladder", "idle_eager"}


def test_counters_only_grow() -> None:
    engine = Engine()
    engine.runner.capture()
    engine.right(3)
    engine.runner.reset()
    engine.runner.capture()
    engine.right(3)
    engine.runner.close()
    assert engine.runner.stats()["steps"] == 2
