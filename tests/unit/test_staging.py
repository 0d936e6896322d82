"""Staging on the CPU tape: a runner that stages its steps is held against one that never does.

Both see the same replays; only one is also asked to stage. What is taken, and why not, is foretold by a model that
knows nothing but the batches' values.
"""

from __future__ import annotations

import gc
import weakref
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st

import graphglue as gg
from graphglue import Batch, Mode, Reason, Route, Runner, RunnerConfig, Shadow, Slot
from graphglue.device.cpu import DoneEvent, TorchFill
from graphglue.staging import Rejected, Staging
from graphglue.stepping import AHEAD, SAMPLED
from tests.prefill import Prefill
from tests.prefill import batch as prompt
from tests.prefill import make_runner as make_prefill

pytestmark = pytest.mark.usefixtures("frozen_imports")

LADDER = [2, 4]
SLOTS = [
    Slot("lens", "request", torch.int64, 1),
    Slot("rows", "request", torch.int64, 0),
    Slot("cu", "offset", torch.int32, gg.REPEAT_LAST, missing="pad"),
    Slot("ids", "token", torch.int64, 0),
]
CONTRACT: dict[str, Any] = {
    "name": "meta",
    "reads": {"lens": 1, "rows": 0, "cu": gg.REPEAT_LAST},
    "tables": ("pages",),
    "modes": {Mode.DECODE},
    "features": frozenset({"lora"}),
    "idle": "glue",
}


def meta(view: Any) -> dict[str, torch.Tensor]:
    return {"pages": view.tables.pages[view.rows] + view.lens[:, None], "ends": view.cu[1:] + view.lens}


def model(view: Any, metadata: Any) -> dict[str, torch.Tensor]:
    return {"mixed": view.ids * 1000 + metadata["pages"].sum(1) * 10 + metadata["ends"]}


def pages() -> torch.Tensor:
    return torch.arange(6 * 3).reshape(6, 3) * 7


def build(contract: dict[str, Any] | None = None, config: dict[str, Any] | None = None, **more: Any) -> Runner:
    """Build a runner over a table of its own; it stages unless the config says otherwise."""
    registry = gg.Registry()
    registered = gg.PrepContract(**{**CONTRACT, **(contract or {})})
    registry.register(registered, more.pop("plan", None), more.pop("publish", None))(more.pop("prep", meta))
    made: dict[str, Any] = {
        "slots": SLOTS,
        "ladder": LADDER,
        "registry": registry,
        "prep": "meta",
        "tables": {"pages": pages()},
        "forward": model,
        "variants": (None, "other"),
        "output_axes": "request",
        "config": RunnerConfig(**{"staging": True, "warmups": 1, **(config or {})}),
    }
    return Runner(**{**made, **more})


def captured(contract: dict[str, Any] | None = None, config: dict[str, Any] | None = None, **more: Any) -> Runner:
    runner = build(contract, config, **more)
    runner.capture(progress=False)
    return runner


def sources(requests: int, start: int = 0) -> dict[str, Any]:
    rows = np.arange(start, start + requests)
    return {
        "lens": torch.from_numpy(2 + rows % 9),
        "rows": (rows % 6).astype(np.int64),
        "cu": np.arange(0, 3 * requests + 1, 3, dtype=np.int32),
        "ids": torch.from_numpy(40 + rows * 3),
    }


def batch(requests: int, start: int = 0, **more: Any) -> Batch:
    return Batch(requests, sources(requests, start), **more)


def plain(tree: Any) -> Any:
    if isinstance(tree, dict):
        return {name: plain(leaf) for name, leaf in tree.items()}
    return tree.tolist() if isinstance(tree, torch.Tensor) else tree


def staging(runner: Runner) -> dict[str, Any]:
    return runner.stats()["staging"]


def check_same(ours: Runner, one: Any, theirs: Runner, other: Any, took: bool) -> None:
    """Hold a step, and all slots behind it, against the same step of a runner that does not stage."""
    reason = Reason.STAGED if took else other.decision.reason
    assert (one.decision.reason, one.decision.prep, one.decision.forward) == (
        reason, other.decision.prep, other.decision.forward,
    )  # fmt: skip
    assert (one.decision.key, one.decision.bucket, one.raw) == (other.decision.key, other.decision.bucket, other.raw)
    assert plain(one.metadata) == plain(other.metadata)
    assert plain(getattr(one, "outputs", None)) == plain(getattr(other, "outputs", None))
    if other.decision.bucket.requests in LADDER:
        for name in ours.arena.slots:
            seen, expected = (runner.view(other.decision.bucket)[name] for runner in (ours, theirs))
            assert torch.equal(seen, expected), name


# Any interleaving.


class Pair:
    """Drive both runners, and foretell what is taken."""

    def __init__(self, ours: Runner, theirs: Runner) -> None:
        self.ours, self.theirs = ours, theirs
        for runner in (ours, theirs):
            runner.tables["pages"].copy_(pages())
            runner.replay(Batch.idle())  # rejects what an earlier example left
        self.batches = [
            batch(3), batch(3), batch(3, 1), batch(2), batch(4, 2), batch(3, variant="other"), Batch.idle(),
            batch(3, features=frozenset({"lora"})), batch(3, features=frozenset({"unknown"})),
            batch(3, mode=Mode.VERIFY), batch(5),
        ]  # fmt: skip
        self.before, self.expected = staging(ours), Counter[str]()
        self.staged: Any = None
        self.writes = 0

    def print_of(self, number: int) -> Any:
        """Give what has to be the same for a step to be taken; the features that a prep knows change nothing."""
        step = self.batches[number]
        return (
            step.num_requests,
            step.mode,
            step.variant,
            {name: source.tolist() for name, source in step.sources.items()},
        )

    def gluable(self, number: int) -> bool:
        step = self.batches[number]
        return step.mode is Mode.DECODE and "unknown" not in step.features and step.num_requests <= max(LADDER)

    def stage(self, number: int) -> None:
        step = self.batches[number]
        if self.staged is not None:
            with pytest.raises(gg.GraphGlueError, match="two steps can not share one set of slots"):
                self.ours.stage(step)
        elif step.num_requests > max(LADDER):
            with pytest.raises(gg.CapacityError):
                self.ours.stage(step)
        else:
            assert self.ours.stage(step) is self.gluable(number)
            if self.gluable(number):
                self.staged = (self.print_of(number), self.writes)
                self.expected["staged"] += 1

    def replay(self, number: int) -> None:
        step, took = self.batches[number], False
        if self.staged is not None:
            printed, writes = self.staged
            ours, same = self.print_of(number), self.gluable(number)
            if not same or ours[:3] != printed[:3]:
                why = Rejected.OTHER_STEP.value
            elif ours != printed:
                why = Rejected.SOURCES.value
            else:
                why = "taken" if writes == self.writes else Rejected.TABLES.value
            took, self.staged = why == "taken", None
            self.expected[why] += 1
        check_same(self.ours, self.ours.replay(step), self.theirs, self.theirs.replay(step), took)

    def prepare(self, number: int) -> None:
        step = self.batches[number]
        if step.num_requests > max(LADDER):
            return
        self.expected[Rejected.PREPARED.value] += self.staged is not None
        self.staged = None
        check_same(self.ours, self.ours.prepare(step), self.theirs, self.theirs.prepare(step), False)

    def refused(self, number: int) -> None:
        """Hand in a step that is refused in its last source: what is staged stays."""
        step = self.batches[number]
        with pytest.raises(gg.BindError):
            self.ours.replay(replace(step, sources={**step.sources, "ids": [0.5]}))

    def write_source(self, number: int) -> None:
        for source in list(self.batches[number].sources.values())[:1]:
            source[-1] += 1

    def write_table(self, number: int) -> None:
        self.writes += 1
        for runner in (self.ours, self.theirs):
            runner.tables["pages"][number % 6] += 1

    def maintain(self, number: int) -> None:
        for runner in (self.ours, self.theirs):
            assert runner.maintain() == []  # nothing is missing, so nothing is dropped

    def end(self) -> None:
        """Hold the counters against what was foretold."""
        now, expected = staging(self.ours), self.expected
        assert now["staged"] - self.before["staged"] == expected["staged"]
        assert now["staged_taken"] - self.before["staged_taken"] == expected["taken"]
        rejected = Counter(now["staged_rejected"]) - Counter(self.before["staged_rejected"])
        assert rejected == Counter({why.value: expected[why.value] for why in Rejected if expected[why.value]})
        pending = expected["staged"] - expected["taken"] - sum(rejected.values())
        assert pending == (self.staged is not None)


@pytest.fixture(scope="module")
def pair() -> Iterator[tuple[Runner, Runner]]:
    with captured() as ours, captured(config={"staging": False}) as theirs:
        yield ours, theirs


CALLS = ("stage", "replay", "prepare", "refused", "write_source", "write_table", "maintain")
NUMBERS = st.integers(0, 10)
FOLLOWED = st.tuples(NUMBERS, st.booleans()).map(lambda pick: [("stage", pick[0]), ("replay", pick[0])])
PROGRAMS = st.lists(
    FOLLOWED | st.tuples(st.sampled_from(CALLS), NUMBERS).map(lambda call: [call]), min_size=1, max_size=10
).map(lambda parts: [call for part in parts for call in part])


def run_program(pair: tuple[Runner, Runner], program: Sequence[tuple[str, int]]) -> Counter[str]:
    both = Pair(*pair)
    for call, number in program:
        getattr(both, call)(number)
    both.end()
    return both.expected


@example(program=[("stage", 0), ("replay", 0), ("stage", 0), ("replay", 1), ("stage", 6), ("replay", 6)])
@example(program=[("stage", 0), ("write_source", 0), ("replay", 0), ("stage", 0), ("replay", 2)])
@example(program=[("stage", 3), ("write_table", 1), ("replay", 3), ("stage", 3), ("prepare", 3), ("replay", 3)])
@example(
    program=[("stage", 0), ("replay", 10), ("stage", 0), ("refused", 4), ("replay", 7), ("stage", 0), ("stage", 3)]
)
@given(program=PROGRAMS)
def test_any_interleaving_gives_what_plain_replays_give(
    pair: tuple[Runner, Runner], program: list[tuple[str, int]]
) -> None:
    run_program(pair, program)


def takes_all(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Staging, "_why_rejected", lambda *_: None)


def takes_any_sources(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(TorchFill, "loaded", lambda self: gg.device.base.Loaded((), (), ()))  # type: ignore[attr-defined]


def takes_any_tables(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Staging, "_table_versions", lambda self: ())


def fills_nothing(patch: pytest.MonkeyPatch) -> None:
    real = Staging._run_front

    def run_front(self: Staging, *args: Any) -> None:
        with pytest.MonkeyPatch.context() as inner:
            inner.setattr(TorchFill, "run", lambda fill: None)
            real(self, *args)

    patch.setattr(Staging, "_run_front", run_front)


def prepares_nothing(patch: pytest.MonkeyPatch) -> None:
    real = Staging._run_front

    def run_front(self: Staging, *args: Any) -> None:
        units, self._units = self._units, []
        real(self, *args)
        self._units = units

    patch.setattr(Staging, "_run_front", run_front)


def never_takes(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Staging, "_why_rejected", lambda *_: Rejected.SOURCES)


@pytest.mark.parametrize(
    ("break_", "program"),
    [
        (takes_all, [("stage", 0), ("replay", 4)]),
        (takes_any_sources, [("stage", 0), ("write_source", 0), ("replay", 0)]),
        (takes_any_tables, [("stage", 3), ("write_table", 2), ("replay", 3)]),
        (fills_nothing, [("replay", 4), ("stage", 0), ("replay", 0)]),
        (prepares_nothing, [("replay", 4), ("stage", 2), ("replay", 2)]),
        (never_takes, [("stage", 0), ("replay", 0)]),
    ],
    ids=lambda given_value: getattr(given_value, "__name__", ""),
)
def test_the_comparison_can_fail(
    pair: tuple[Runner, Runner],
    monkeypatch: pytest.MonkeyPatch,
    break_: Callable[[pytest.MonkeyPatch], None],
    program: list[tuple[str, int]],
) -> None:
    run_program(pair, program)
    break_(monkeypatch)
    with pytest.raises(AssertionError):
        run_program(pair, program)


# What is where, and when.


def test_slots_and_metadata_hold_the_staged_step_and_the_last_outputs_stay() -> None:
    with captured() as runner, captured(config={"staging": False}) as twin:
        last = runner.replay(batch(4))
        outputs = plain(last.outputs)
        assert runner.stage(batch(3, 5))
        expected = twin.replay(batch(3, 5))
        assert plain({n: runner.view(4)[n] for n in runner.arena.slots}) == plain(
            {n: twin.view(4)[n] for n in twin.arena.slots}
        )
        assert plain(last.metadata) == plain(expected.metadata)  # the same bucket, so the same memory
        assert plain(last.outputs) == outputs != plain(expected.outputs)
        assert runner.stats()["steps"] == 1


def test_a_taken_step_runs_no_prep_and_writes_no_slot(monkeypatch: pytest.MonkeyPatch) -> None:
    with captured() as runner:
        expected = plain(runner.replay(batch(3)).outputs)
        runner.stage(batch(3))
        monkeypatch.setattr(TorchFill, "run", lambda self: pytest.fail("filled again"))
        monkeypatch.setattr(runner._units[0].cache, "replay", lambda key: pytest.fail("prepared again"))
        step = runner.replay(batch(3))
        assert plain(step.outputs) == expected
        assert runner.stats()["launch_fallbacks"][AHEAD] == 1
        with pytest.raises(pytest.fail.Exception, match="filled again"):
            runner.replay(batch(3))


def test_host_sources_may_be_overwritten_once_staged_and_what_they_held_counts() -> None:
    with captured() as runner, captured(config={"staging": False}) as twin:
        given_sources = sources(3)
        runner.stage(Batch(3, given_sources))
        given_sources["rows"][:] = 5
        check_same(runner, runner.replay(batch(3)), twin, twin.replay(batch(3)), True)
        runner.stage(Batch(3, given_sources))
        given_sources["rows"][:] = 4
        check_same(runner, runner.replay(Batch(3, given_sources)), twin, twin.replay(Batch(3, given_sources)), False)
        assert staging(runner)["staged_rejected"] == {"sources": 1}


def test_a_ragged_step_is_taken_however_its_tokens_are_spread() -> None:
    with captured({"ragged": True}, forward=None, tokens_per_request=2) as runner:
        given_sources = {**sources(3), "ids": [1, 2, 3, 4]}
        step = Batch(3, given_sources, row_tokens=[1, 2, 1])
        assert runner.stage(step)
        assert runner.replay(replace(step, row_tokens=[1, 2, 1])).decision.reason is Reason.STAGED
        assert runner.stage(step)
        assert runner.replay(replace(step, row_tokens=[2, 1, 1])).decision.prep is Route.GLUE
        assert staging(runner)["staged_taken"] == 2  # the slots say nothing of how the tokens are spread


def test_a_forward_in_segments_sees_the_rows_of_the_step_it_takes() -> None:
    prefill = Prefill()
    with make_prefill(prefill, config={"staging": True}) as runner:
        runner.capture(progress=False)
        for number, lens in enumerate(([3, 2], [1, 1, 2], [8])):
            prefill.seen.clear()
            assert runner.stage(prompt(lens, number))
            assert prefill.seen == []
            step = runner.replay(prompt(lens, number))
            assert step.decision.reason is Reason.STAGED
            ids = torch.as_tensor(prompt(lens, number).sources["input_ids"])
            assert torch.equal(step.outputs["rows"], prefill.reference(lens, ids))
            assert prefill.seen == [(sum(lens), lens)] * len(prefill.weights)


def test_an_adopted_forward_and_an_eager_one_are_run_behind_what_was_staged() -> None:
    with captured(forward=None) as runner, captured(config={"staging": False}) as twin:
        kept = runner.prepare(batch(3))
        tape, view = gg.Tape(), runner.view(4)
        with tape.session():
            graph = tape.record(lambda: model(view, kept.metadata))
        runner.adopt_forward(4, graph, graph.outputs)
        runner.stage(batch(3, 2))
        check_same(runner, runner.replay(batch(3, 2)), twin, twin.replay(batch(3, 2)), True)
        runner.stage(batch(2))  # nobody captured a forward there, so the engine runs it
        step = runner.replay(batch(2))
        assert (step.outputs, step.decision.reason) == (None, Reason.STAGED)
        assert plain(step.metadata) == plain(twin.replay(batch(2)).metadata)
    with captured() as runner, captured(config={"staging": False}) as twin:
        for one in (runner, twin):
            one._forward.quarantine(one.space.keys()[0], "lost")  # type: ignore[union-attr]
            one._stepper.forget()
        at = runner.space.keys()[0].requests
        assert runner.stage(batch(at))
        check_same(runner, runner.replay(batch(at)), twin, twin.replay(batch(at)), True)


def test_copies_are_given_away_of_a_taken_step_too() -> None:
    with captured(config={"clone_outputs": True}) as runner:
        runner.stage(batch(3))
        step = runner.replay(batch(3))
        before = plain([step.metadata, step.outputs][0]), plain(step.outputs)
        runner.stage(batch(3, 7))
        runner.replay(batch(3, 7))
        assert (plain(step.metadata), plain(step.outputs)) == before


def test_metadata_is_published_by_the_replay_that_takes_it_once() -> None:
    seen: list[Any] = []
    with captured(publish=lambda metadata: seen.append(plain(metadata))) as runner:
        seen.clear()
        runner.stage(batch(3))
        assert seen == []
        step = runner.replay(batch(3))
        assert seen == [plain(step.metadata)]


def test_what_a_host_planner_changed_its_mind_about_is_not_taken() -> None:
    planned = [7]
    plan = lambda step, bucket: {"lens": [planned[0]] * step.num_requests}  # noqa: E731
    with captured(plan=plan) as runner:
        step = Batch(3, {name: source for name, source in sources(3).items() if name != "lens"})
        runner.stage(step)
        assert runner.replay(step).decision.reason is Reason.STAGED
        runner.stage(step)
        planned[0] = 8
        assert runner.replay(step).decision.reason is Reason.PADDED
        assert staging(runner)["staged_rejected"] == {"sources": 1}
        assert runner.view(4).lens.tolist() == [8, 8, 8, 1]


# Tables and keys that change in between.


def test_a_moved_table_refuses_the_step_and_leaves_what_is_staged() -> None:
    current = [pages()]
    with captured(tables={"pages": lambda: current[0]}) as runner:
        first = current[0]
        runner.stage(batch(3))
        current[0] = pages()
        with pytest.raises(gg.StaleTableError, match="moved"):
            runner.replay(batch(3))
        with pytest.raises(gg.StaleTableError):
            runner.stage(batch(3))
        current[0] = first
        assert runner.replay(batch(3)).decision.reason is Reason.STAGED


def test_a_table_that_no_prep_reads_may_be_written() -> None:
    other = torch.zeros(3)
    with captured(tables={"pages": pages(), "other": other}) as runner:
        runner.stage(batch(3))
        other += 1
        assert runner.replay(batch(3)).decision.reason is Reason.STAGED


def test_a_prep_with_effects_in_another_runner_counts_as_a_write(monkeypatch: pytest.MonkeyPatch) -> None:
    shared, counted = pages(), list[Any]()
    monkeypatch.setattr(torch.autograd.graph, "increment_version", counted.append)

    def bump(view: Any) -> dict[str, torch.Tensor]:
        view.tables.pages.add_(1)
        return {"first": view.tables.pages[view.rows, 0]}

    contract = {"tables": ("pages",), "effects": ("pages",), "idle": "eager"}
    with captured(tables={"pages": shared}) as reader, captured(
        contract, {"staging": False}, prep=bump, forward=None, tables={"pages": shared}
    ) as writer:  # fmt: skip
        counted.clear()
        reader.replay(batch(3))
        assert counted == []
        writer.replay(batch(3))
        assert [table.data_ptr() for table in counted] == [shared.data_ptr()]


CHANGES: dict[str, Callable[[Runner], Any]] = {
    "rebind_table": lambda runner: (runner.rebind_table("pages", pages() + 1), runner.maintain()),
    "reset": lambda runner: (runner.reset(), runner.capture(progress=False)),
    "maintain": lambda runner: (
        runner._units[0].cache.quarantine(runner.space.keys()[0], "lost"), runner._stepper.forget(), runner.maintain(),
    ),
}  # fmt: skip


@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
def test_what_changes_keys_drops_what_is_staged(change: Callable[[Runner], Any]) -> None:
    with captured() as runner, captured(config={"staging": False}) as twin:
        for one in (runner, twin):
            if one is runner:
                runner.stage(batch(3))
            change(one)
        assert staging(runner)["staged_rejected"] == {"dropped": 1}
        check_same(runner, runner.replay(batch(3)), twin, twin.replay(batch(3)), False)
        assert runner.stage(batch(3))
        check_same(runner, runner.replay(batch(3)), twin, twin.replay(batch(3)), True)


def test_a_closed_runner_stages_nothing() -> None:
    runner = captured()
    runner.stage(batch(3))
    runner.close()
    assert staging(runner)["staged_rejected"] == {"dropped": 1}
    with pytest.raises(gg.ClosedError):
        runner.stage(batch(3))


def test_a_key_that_is_quarantined_in_between_runs_eagerly() -> None:
    with captured() as runner, captured(config={"staging": False}) as twin:
        runner.stage(batch(3))
        for one in (runner, twin):
            key = one.can_replay(batch(3)).key
            one._units[0].cache.quarantine(key, "lost")
            one._stepper.forget()
        check_same(runner, runner.replay(batch(3)), twin, twin.replay(batch(3)), False)
        assert staging(runner)["staged_rejected"] == {"other_step": 1}


# Refusals, and steps that are left to their replay.


class Unrecorded(DoneEvent):
    """What a torch.cuda.Event looks like before it is recorded."""

    cuda_event = 0


def test_a_refused_stage_has_written_nothing_and_says_what_to_do() -> None:
    with captured() as runner:
        runner.replay(batch(4))
        before = plain({n: runner.view(4)[n] for n in runner.arena.slots})
        for kind, text, step, more in [
            (gg.BindError, "slot 'ids'", Batch(3, {**sources(3), "ids": [1, 2]}), {}),
            (gg.CapacityError, "exceeds the ladder", batch(5), {}),
            (gg.ConfigError, "after is a int; expected an event", batch(3), {"after": 3}),
            (gg.ConfigError, "after is the class DoneEvent", batch(3), {"after": DoneEvent}),
            (gg.ConfigError, "after was never recorded, so nothing would be waited", batch(3), {"after": Unrecorded()}),
        ]:
            with pytest.raises(kind, match=text):
                runner.stage(step, **more)
        assert plain({n: runner.view(4)[n] for n in runner.arena.slots}) == before
        assert staging(runner) == {"staged": 0, "staged_taken": 0, "staged_rejected": {}, "not_staged": {}}
        runner.stage(batch(3))
        with pytest.raises(gg.GraphGlueError, match=r"a step of \(3, 3, 1\) is staged at \(4, 4, 1\).*replay it first"):
            runner.stage(batch(3))
        assert runner.replay(batch(3)).decision.reason is Reason.STAGED


@pytest.mark.parametrize(
    ("contract", "config", "step", "reason"),
    [
        ({"idle": "eager"}, {}, Batch.idle(), "idle_eager"),
        ({"padded": False}, {}, batch(3), "padding_not_declared"),
        ({}, {"padding": False}, batch(3), "padding_disabled"),
        ({}, {"waste_limit": 1.0}, batch(3), "waste"),
        ({}, {"enabled": False}, batch(3), "disabled"),
        ({}, {"glue": {"meta": "off"}}, batch(3), "switched_off"),
        ({}, {}, batch(3, mode=Mode.VERIFY), "mode_not_declared"),
    ],
    ids=lambda given_value: given_value if isinstance(given_value, str) else "",
)
def test_a_step_whose_prep_is_not_glued_is_left_to_its_replay(
    contract: dict[str, Any], config: dict[str, Any], step: Batch, reason: str
) -> None:
    with captured(contract, config) as runner, captured(contract, {**config, "staging": False}) as twin:
        assert not runner.stage(step)
        assert staging(runner)["not_staged"] == {reason: 1}
        check_same(runner, runner.replay(step), twin, twin.replay(step), False)


def test_what_can_not_be_seen_to_change_is_left_to_its_replay() -> None:
    with captured() as runner:
        own = runner.view(4).ids[:3]
        assert not runner.stage(Batch(3, {**sources(3), "ids": own}))
        with torch.inference_mode():
            unversioned = pages()
        runner.rebind_table("pages", unversioned)
        runner.maintain()
        assert not runner.stage(batch(3))
        assert staging(runner)["not_staged"] == {"unseen": 2}


@pytest.mark.parametrize("left", [True, False])
def test_sources_of_a_step_that_was_left_or_taken_are_held_by_nobody(left: bool) -> None:
    with captured() as runner:
        given = sources(3)
        if left:
            given["ids"] = runner.view(4).ids[:3]  # its own view: a change could not be seen
        kept, step = weakref.ref(given["lens"]), Batch(3, given)
        assert runner.stage(step) is not left
        if not left:
            assert runner.replay(step).decision.reason is Reason.STAGED
        del given, step
        gc.collect()
        assert kept() is None


def test_a_prep_without_a_contract_is_left_to_its_replay() -> None:
    """Nobody knows what it reads, so nobody could tell that a staged step is old."""
    hidden = pages()

    def prep(view: Any) -> dict[str, torch.Tensor]:
        return {"pages": hidden[view.rows] + view.lens[:, None], "ends": view.cu[1:] + view.lens}

    made = {"slots": SLOTS, "ladder": LADDER, "forward": model, "output_axes": "request"}
    with Runner(**made, prep=prep, config=RunnerConfig(staging=True, generic_glue=True)) as runner:
        runner.capture(progress=False)
        assert runner.replay(batch(4)).decision.prep is Route.GLUE
        assert not runner.stage(batch(4))
        hidden.add_(1000)
        expected = model(runner.view(4), meta_of(runner.view(4), hidden))
        assert plain(runner.replay(batch(4)).outputs) == plain(expected)
        assert staging(runner)["not_staged"] == {"undeclared": 1}


def meta_of(view: Any, table: torch.Tensor) -> dict[str, torch.Tensor]:
    return {"pages": table[view.rows] + view.lens[:, None], "ends": view.cu[1:] + view.lens}


def test_what_an_eager_forward_returned_of_slots_and_metadata_stays_too() -> None:
    def lends(view: Any, metadata: Any) -> dict[str, torch.Tensor]:
        return {"ids": view.ids, "ends": metadata["ends"], "sum": metadata["ends"] + view.ids}

    with captured(forward=lends) as runner:
        for key in tuple(runner.space.keys()):
            runner._forward.quarantine(key, "so that it runs eagerly")
        runner._capture.drop_launches(list(runner._capture.launches))
        runner._stepper.forget()
        step = runner.replay(batch(3))
        assert (step.decision.prep, step.decision.forward) == (Route.GLUE, Route.EAGER)
        before = plain(step.outputs)
        assert runner.stage(batch(3, 7))
        assert plain(step.outputs) == before
        assert runner.view(4).ids[:3].tolist() != before["ids"]


def test_a_prep_that_draws_random_numbers_is_left_to_its_replay() -> None:
    with captured() as runner:
        runner._capture._random = dict.fromkeys(runner.space.keys(), "prep")
        assert not runner.stage(batch(3))
        runner._capture._random, runner._capture.used_up = {}, set(runner.space.keys())
        assert not runner.stage(batch(3))
        assert staging(runner)["not_staged"] == {"draws_random": 1, "used_up": 1}


@pytest.mark.parametrize(
    ("more", "text"),
    [
        ({"ranks": object()}, "with ranks"),
        ({"recorder": gg.Tape()}, "leave recorder out"),
        ({"contract": {"effects": ("pages",), "idle": "eager"}}, r"preps \['meta'\] declare effects"),
    ],
    ids=["ranks", "recorder", "effects"],
)
def test_a_runner_that_could_not_redo_a_step_does_not_stage(more: dict[str, Any], text: str) -> None:
    """Declarations that exclude each other are refused at construction, and both are named (FEATURE-GUARD-5)."""
    with pytest.raises(gg.ConfigError, match=text):
        build(**more)
    if "ranks" not in more:
        build(**more, config={"staging": False}).close()


def test_a_runner_that_was_not_asked_to_stage_says_so_and_counts_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    with build(config={"staging": False}) as runner:
        with pytest.raises(gg.ConfigError, match=r"build it with RunnerConfig\(staging=True\)"):
            runner.stage(batch(3))
        assert staging(runner) is None
        assert runner._run == runner._stepper.run  # nothing in the way of its steps
    monkeypatch.setenv("GRAPHGLUE_STAGING", "1")
    assert RunnerConfig().staging


# Streams, which the CPU does not have: what the device is asked for.


def test_the_front_waits_for_the_last_forward_and_for_sources_and_tables_unless_after_is_given(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    asked: list[tuple[bool, Any, bool]] = []

    def beside(behind: Any, after: Any, callers_work: bool) -> Any:
        asked.append((behind is not None, after, callers_work))
        return nullcontext()

    def ask(runner: Runner, **more: Any) -> tuple[bool, Any, bool]:
        asked.clear()
        monkeypatch.setattr(runner.arena.device, "beside", beside)
        assert runner.stage(batch(3), **more)
        runner.replay(Batch.idle())
        return asked[0]

    event = gg.device.cpu.DoneEvent()  # type: ignore[attr-defined]
    with captured() as runner:
        assert ask(runner) == (False, None, True)  # no step yet: behind whatever is queued
        assert ask(runner) == (True, None, True)
        assert ask(runner, after=event) == (True, event, False)
        runner.prepare(batch(2))  # the engine's own forward may still read the slots
        assert ask(runner, after=event) == (False, event, False)
        assert ask(runner, after=event) == (True, event, False)
        runner.rebind_table("pages", pages())
        runner.maintain()
        assert ask(runner)[0] is False
    with captured(forward=None) as runner:
        runner.replay(batch(2))
        assert ask(runner)[0] is False
    untabled = {"tables": ()}
    with captured(untabled, prep=lambda view: {"m": view.lens * 2}, forward=None, tables={}) as runner:
        assert ask(runner) == (False, None, False)  # host sources only: nothing to wait for
        loaded, there = TorchFill.loaded, torch.empty(3, device="meta")  # meta stands for the device
        monkeypatch.setattr(TorchFill, "loaded", lambda fill: replace(loaded(fill), sources=(there,)))
        assert ask(runner) == (False, None, True)  # what the caller queued may still be writing it
        assert ask(runner, after=event) == (False, event, False)


# The shadow check.


@pytest.mark.parametrize("every", [0, 3])
def test_taken_steps_are_sampled_like_any_other(every: int) -> None:
    config = {"shadow": Shadow(first=2, every=every)}
    with captured(config=config) as runner, captured(config={**config, "staging": False}) as twin:
        for number in range(9):
            step = batch(3 + number % 2, number)
            runner.stage(step if number % 4 else batch(2))
            check_same(runner, runner.replay(step), twin, twin.replay(step), bool(number % 4))
        ours, theirs = (one.stats()["shadow"] for one in (runner, twin))
        assert ours == theirs
        assert ours["passed"] == ours["sampled"] == (2 if every == 0 else 5)  # two of the key; steps 3, 6 and 9
        assert runner.stats()["launch_fallbacks"][SAMPLED] == ours["sampled"]


@pytest.mark.parametrize("where", ["slot", "metadata"])
def test_a_front_that_was_overwritten_is_found_by_the_shadow_check(where: str) -> None:
    with captured(config={"shadow": Shadow(first=9)}) as runner:
        step = runner.replay(batch(3))
        runner.stage(batch(3))
        (runner.view(4).lens if where == "slot" else step.metadata["ends"])[1] += 50
        assert runner.replay(batch(3)).decision.reason is Reason.STAGED
        shadow = runner.stats()["shadow"]
        assert (shadow["passed"], shadow["mismatched"]) == (1, 1)
