"""Asleep and awake: nothing serves in between, and what serves afterwards equals eager runs, whatever was lost.

Lost memory is played by overwriting it, moved memory by other tensors, and freed memory by dropping the last
reference. A graph that reads what was lost must not serve, so most tests end in steps held against a twin.
"""

from __future__ import annotations

import gc
import re
import threading
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch

import graphglue as gg
from graphglue import Batch, ClosedError, GraphGlueError, Mode, PrepContract, Route, Runner, StaleTableError
from graphglue.ranks import Planner

from ..ranks.threads import Exchange, Meeting, Model, all_well, batch_of, group_of, own_of, runner_of, together
from .test_runner import CONTRACT, GLUED, LADDER, Engine, draw, meta, model, states, table, why

COUNTS = (3, 8, 1, 5, 2)


def engine(**more: Any) -> Engine:
    made = Engine(**more)
    made.runner.capture(progress=False)
    return made


def serves(made: Engine) -> None:
    """Run steps of every bucket, each held against a twin; all of them are glued."""
    for start, count in enumerate(COUNTS):
        assert made.right(count, start).decision.prep is Route.GLUE


def lose(runner: Runner) -> None:
    """Overwrite all memory of the runner's own: slots, metadata, outputs."""
    entries = [unit.cache.entry(key) for unit in runner._units for key in runner._wanted]
    entries += [runner._forward.entry(key) for key in runner._wanted] if runner._forward else []
    leaves = [leaf for entry in entries for leaf in torch.utils._pytree.tree_leaves(entry.result)]
    for tensor in [*runner.arena._storage.values(), *leaves]:
        if isinstance(tensor, torch.Tensor):
            tensor.fill_(77)


REFUSED: dict[str, Callable[[Engine], Any]] = {
    "replay": lambda made: made.step(3),
    "prepare": lambda made: made.runner.prepare(Batch(3, draw(3))),
    "stage": lambda made: made.runner.stage(Batch(3, draw(3))),
    "capture": lambda made: made.runner.capture(),
    "maintain": lambda made: made.runner.maintain(),
    "can_replay": lambda made: made.runner.can_replay(Batch(3, draw(3))),
    "adopt_forward": lambda made: made.runner.adopt_forward(2, None),
}


@pytest.mark.parametrize("keep_keys", [True, False])
@pytest.mark.parametrize("name", REFUSED)
def test_in_between_everything_is_refused_by_name_and_writes_nothing(name: str, keep_keys: bool) -> None:
    made = engine()
    made.runner.release(keep_keys)
    before = {slot: tensor.clone() for slot, tensor in made.runner.arena._storage.items()}
    with pytest.raises(ClosedError, match=re.escape("asleep since release()") + ".*" + re.escape("resume() first")):
        REFUSED[name](made)
    assert all(torch.equal(before[slot], tensor) for slot, tensor in made.runner.arena._storage.items())
    assert made.runner.asleep
    made.runner.resume()
    assert not made.runner.asleep
    serves(made)


@pytest.mark.parametrize("keep_keys", [True, False])
@pytest.mark.parametrize("recapture", [None, True, False])
@pytest.mark.parametrize("contents_lost", [True, False])
def test_every_way_to_wake_serves(keep_keys: bool, contents_lost: bool, recapture: bool | None) -> None:
    made = engine(config=gg.RunnerConfig(shadow=gg.Shadow(first=2)))
    serves(made)
    made.runner.release(keep_keys)
    if contents_lost:
        lose(made.runner)
    whole = made.runner.resume(contents_lost=contents_lost, recapture=recapture)
    assert len(whole) == len(LADDER)
    serves(made)
    assert made.runner.stats()["shadow"]["mismatched"] == 0


def kept_recordings(runner: Runner) -> list[Any]:
    return [runner._units[0].cache.entry(key).recording for key in runner._wanted]


def test_keys_are_kept_where_everything_is_where_it_was() -> None:
    made = engine()
    before = kept_recordings(made.runner)
    made.runner.release()
    lose(made.runner)
    made.runner.resume(recapture=False)
    assert all(one is other for one, other in zip(before, kept_recordings(made.runner)))
    made.runner.release()
    made.runner.resume()  # contents are lost, and nobody says that constants are restored
    assert not any(one is other for one, other in zip(before, kept_recordings(made.runner)))
    serves(made)


def test_slots_are_padded_again() -> None:
    made = engine()
    made.runner.release()
    lose(made.runner)
    made.runner.resume(recapture=False)
    view = made.runner.view(8)
    assert {name: set(view[name].tolist()) for name in view} == {
        "seq_lens": {1}, "rows": {0}, "loc": {0}, "ids": {0},
    }  # fmt: skip


def test_slots_are_padded_again_where_graphs_see_other_values_while_they_are_checked() -> None:
    registry = gg.Registry()
    registry.register(PrepContract(name="next", reads={"x": 0}, outputs={"y": "request"}, modes={Mode.DECODE}))(
        lambda view: {"y": view.x + 1}
    )
    slots = [gg.Slot("x", axis="request", dtype=torch.int64, pad=0, capture=5)]
    runner = Runner(slots=slots, ladder=[2, 4], registry=registry, prep="next")
    runner.capture(progress=False)
    runner.release()
    runner.resume()
    assert runner.view(4).x.tolist() == [0] * 4


@pytest.mark.parametrize("contents_lost", [True, False])
def test_what_the_shadow_check_compares_with_is_made_anew_where_contents_were_lost(contents_lost: bool) -> None:
    made = engine(config=gg.RunnerConfig(shadow=gg.Shadow(first=100)))
    made.runner.release()
    comparison = made.runner._stepper.shadow._comparison
    if contents_lost:
        for tensor in (comparison._head, comparison._window, *comparison._ends):
            tensor.fill_(77)
    made.runner.resume(contents_lost=contents_lost)
    serves(made)
    shadow = made.runner.stats()["shadow"]
    assert (shadow["passed"], shadow["mismatched"], shadow["failed"]) == (len(COUNTS), 0, 0)
    assert (made.runner._stepper.shadow._comparison is comparison) is not contents_lost


# Tables.


def test_a_table_that_moved_with_its_contents_is_read_where_it_is() -> None:
    """Equal contents hide the move from every comparison, and the old memory is no longer written."""
    kept = [table()]
    made = engine(tables={"t": lambda: kept[0]}, t=kept[0])
    made.runner.release()
    kept[0] = made.t = table()
    made.runner.resume(contents_lost=False, recapture=False)
    made.t += 5
    serves(made)


def test_a_table_behind_a_callable_that_moved_is_found_and_keys_are_recorded_anew() -> None:
    kept = [table()]
    made = engine(tables={"t": lambda: kept[0]}, t=kept[0])
    made.runner.release()
    kept[0] = made.t = table() + 5
    made.runner.resume(contents_lost=False, recapture=False)  # even so: a graph would read the old one
    serves(made)


def test_a_table_is_rebound_asleep_and_an_equal_place_keeps_keys() -> None:
    made = engine()
    before = kept_recordings(made.runner)
    made.runner.release()
    made.runner.rebind_table("t", made.t.view_as(made.t))  # made anew at the same address
    made.runner.resume(contents_lost=False)
    assert all(one is other for one, other in zip(before, kept_recordings(made.runner)))
    made.runner.release()
    made.t = table() * 2
    made.runner.rebind_table("t", made.t)
    assert made.runner.asleep
    made.runner.resume(contents_lost=False)
    assert not any(one is other for one, other in zip(before, kept_recordings(made.runner)))
    serves(made)


def test_freed_tables_free_their_memory_and_are_asked_for() -> None:
    made = engine(t=table())
    made.runner.release(keep_keys=False)
    gone = weakref.ref(made.t)
    made.t = None
    gc.collect()
    assert gone() is None, "something of the runner still holds the table"
    with pytest.raises(StaleTableError, match=r"tables \['t'\] were freed; hand in the new ones with rebind_table"):
        made.runner.resume()
    assert made.runner.asleep
    made.t = table() + 1
    made.runner.rebind_table("t", made.t)
    made.runner.resume()
    serves(made)


def test_kept_tables_are_found_by_themselves() -> None:
    made = engine()
    made.runner.release(keep_keys=False)
    assert made.runner.tables == {}
    made.runner.resume()
    assert made.runner.tables["t"] is made.t
    serves(made)


def test_a_table_without_memory_is_refused_and_one_with_new_memory_is_taken() -> None:
    made = engine()
    made.runner.release()
    size, old = made.t.untyped_storage().nbytes(), made.t.clone()
    made.t.untyped_storage().resize_(0)
    with pytest.raises(StaleTableError, match="table 't' has no memory"):
        made.runner.resume()
    made.t.untyped_storage().resize_(size)
    made.t.copy_(old)
    made.runner.resume(contents_lost=False)
    serves(made)


def test_a_table_that_lost_rows_a_pad_indexes_is_refused() -> None:
    slots = [
        gg.Slot(name, axis="request", dtype=torch.int64, pad=pad, index_of="t" if name == "rows" else None)
        for name, pad in {"seq_lens": 1, "rows": 4, "loc": 0, "ids": 0}.items()
    ]
    contract = CONTRACT.model_copy(update={"reads": {"seq_lens": 1, "rows": 4, "loc": 0}})
    made = engine(slots=slots, contract=contract)
    made.runner.release()
    made.runner.rebind_table("t", table()[:3].clone())
    with pytest.raises(gg.ContractError, match="pad 4 is no row of table 't'"):
        made.runner.resume()
    assert made.runner.asleep
    made.runner.rebind_table("t", table())
    made.runner.resume()


# Every key is checked once.


class Weights:
    """A forward that closes over a tensor, as a model over its weights; the graph knows its address."""

    def __init__(self) -> None:
        self.scale = torch.tensor([3])

    def __call__(self, view: Any, metadata: Any) -> dict[str, torch.Tensor]:
        return {name: leaf * self.scale for name, leaf in model(view, metadata).items()}


def right(made: Engine, count: int, prep: Any, forward: Any) -> Any:
    from .test_runner import assert_right

    step, sources = made.step(count)
    assert_right(step, sources, made.t, prep, forward)
    return step


def test_weights_that_moved_are_found_by_outputs() -> None:
    weights = Weights()
    made = engine(forward=weights)
    made.runner.release()
    weights.scale = torch.tensor([5])
    made.runner.resume(contents_lost=False)
    for count in COUNTS:
        step = right(made, count, meta, weights)
        assert step.decision.forward is Route.GRAPH


def test_without_a_check_old_weights_would_serve(monkeypatch: pytest.MonkeyPatch) -> None:
    """Show that the test above can fail."""
    weights = Weights()
    made = engine(forward=weights)
    monkeypatch.setattr("graphglue.rechecking.Recheck.holds", lambda self, key: True)
    made.runner.release()
    weights.scale = torch.tensor([5])
    made.runner.resume(contents_lost=False)
    with pytest.raises(AssertionError):
        right(made, 3, meta, weights)


def test_a_constant_of_a_prep_that_moved_is_found_at_the_keys_that_read_it() -> None:
    class Prep:
        offset = torch.tensor([1])

        def __call__(self, view: Any) -> Any:
            made = meta(view)
            return made if view.seq_lens.shape[0] < 4 else {**made, "where": made["where"] + self.offset}

    prep = Prep()
    made = engine(prep=prep)
    before = kept_recordings(made.runner)
    made.runner.release()
    prep.offset = torch.tensor([9])
    made.runner.resume(contents_lost=False)
    same = [one is other for one, other in zip(before, kept_recordings(made.runner))]
    assert same == [False, False, True, True]  # buckets 8, 4, 2, 1
    for count in COUNTS:
        right(made, count, prep, model)


def test_a_prep_that_is_no_eager_run_even_when_recorded_anew_is_quarantined() -> None:
    calls = []

    def prep(view: Any) -> Any:
        calls.append(1)
        return {**meta(view), "where": view.loc * 2 + len(calls)}  # a host number, frozen in each graph

    made = engine(prep=prep)
    made.runner.release()
    assert len(made.runner.resume()) == 0
    assert {state["meta"] for state in states(made.runner).values()} == {"quarantined"}
    cause = made.runner.stats()["keys"][0]["causes"]["meta"]
    assert "recorded anew by resume()" in cause
    assert "leaf 'where' differs from an eager run" in cause
    assert made.step(3)[0].decision.reason is gg.Reason.QUARANTINED


def test_checks_leave_tables_that_preps_change_as_they_were() -> None:
    def prep(view: Any) -> Any:
        view.tables.t.add_(1)
        return {"first": view.tables.t[view.rows, 0]}

    contract = PrepContract(
        name="meta", reads={"rows": 0}, tables=("t",), effects=("t",), outputs={"first": "request"}, modes={Mode.DECODE}
    )
    made = engine(prep=prep, contract=contract, forward=lambda view, metadata: {"o": view.ids + metadata["first"]})
    before = kept_recordings(made.runner)
    made.runner.release()
    at_rest = made.t.clone()
    made.runner.resume(contents_lost=False)
    assert torch.equal(made.t, at_rest)
    assert all(one is other for one, other in zip(before, kept_recordings(made.runner)))
    step, sources = made.step(3)
    assert torch.equal(made.t, at_rest + 1)
    assert step.outputs["o"].tolist() == [
        number + int(at_rest[row, 0]) + 1 for number, row in zip(sources["ids"], sources["rows"])
    ]


def test_a_step_that_failed_to_wake_is_no_step_and_the_next_try_finds_what_moved() -> None:
    made = engine()
    made.runner.release()
    made.t = table() * 3
    made.runner.rebind_table("t", made.t)
    fill, broken = made.runner.arena.fill_idle, [True]

    def failing(bucket: Any) -> None:
        if broken.pop() if broken else False:
            raise RuntimeError("no memory yet")
        fill(bucket)

    made.runner.arena.fill_idle = failing  # type: ignore[method-assign]
    with pytest.raises(RuntimeError, match="no memory yet"):
        made.runner.resume()
    assert made.runner.asleep
    with pytest.raises(ClosedError):
        made.step(1)
    made.runner.resume(contents_lost=False, recapture=False)
    serves(made)


# Around it.


def test_release_twice_and_reset_and_close_are_fine_asleep() -> None:
    made = engine()
    made.runner.release()
    made.runner.release(keep_keys=False)
    made.runner.reset()
    assert made.runner.asleep
    assert made.runner.resume() == []
    assert why(made.step(3)[0])[0] is Route.EAGER
    made.runner.capture(progress=False)
    assert why(made.right(3)) == GLUED
    made.runner.release()
    made.runner.close()
    for call in (made.runner.resume, made.runner.release, lambda: made.step(1)):
        with pytest.raises(ClosedError, match="the runner was closed"):
            call()


def test_a_runner_that_is_awake_is_not_woken() -> None:
    made = engine()
    with pytest.raises(GraphGlueError, match=re.escape("the runner is awake; call release()")):
        made.runner.resume()
    serves(made)


def test_a_runner_that_was_never_captured_sleeps_too() -> None:
    made = Engine()
    made.runner.release()
    assert made.runner.resume() == []
    assert made.right(3).decision.prep is Route.EAGER


def test_release_is_refused_inside_a_step() -> None:
    made: list[Engine] = []
    errors: list[Exception] = []

    def prep(view: Any) -> Any:
        if made:
            try:
                made[0].runner.release()
            except GraphGlueError as error:
                errors.append(error)
        return meta(view)

    made.append(Engine(prep=prep))
    made[0].right(3)
    assert "in use" in str(errors[0])
    assert not made[0].runner.asleep


def test_only_one_thread_wakes_it() -> None:
    made = engine()
    made.runner.release()
    begun, go, errors = threading.Event(), threading.Event(), []
    fill = made.runner.arena.fill_idle

    def waiting(bucket: Any) -> None:
        begun.set()
        go.wait(10)
        fill(bucket)

    made.runner.arena.fill_idle = waiting  # type: ignore[method-assign]
    thread = threading.Thread(target=made.runner.resume)
    thread.start()
    begun.wait(10)
    for call in (made.runner.resume, made.runner.reset, lambda: made.step(1)):
        try:
            call()
        except GraphGlueError as error:
            errors.append(error)
    go.set()
    thread.join()
    assert ["in use" in str(error) for error in errors] == [True, True, False]
    serves(made)


def test_a_staged_step_does_not_outlive_sleep() -> None:
    made = engine(config=gg.RunnerConfig(staging=True))
    made.right(2)
    assert made.runner.stage(Batch(3, draw(3)))
    made.runner.release()
    lose(made.runner)
    made.runner.resume(recapture=False)
    made.right(3)
    assert made.runner.stats()["staging"]["staged_taken"] == 0


def test_an_adopted_forward_is_kept_or_forgotten_with_the_metadata_that_it_reads() -> None:
    from graphglue import Tape

    made = engine(forward=None)
    prepared = made.runner.prepare(Batch(8, draw(8)))
    view, metadata, tape = made.runner.view(8), prepared.metadata, Tape()
    with tape.session():
        graph = tape.record(lambda: view.ids + metadata["positions"])
    made.runner.adopt_forward(8, graph, graph.outputs)
    assert made.step(8)[0].decision.forward is Route.GRAPH
    made.runner.release()
    made.runner.resume(recapture=False)
    step, sources = made.step(8)
    assert step.decision.forward is Route.GRAPH
    assert step.outputs.tolist() == [a + b - 1 for a, b in zip(sources["ids"], sources["seq_lens"])]
    made.runner.release()
    made.runner.resume()
    assert made.step(8)[0].decision.forward is Route.EAGER


# Prefill in segments.


def test_segments_are_checked_and_recorded_anew_too() -> None:
    scale = [torch.tensor(2)]
    contract = PrepContract(name="p", reads={"loc": 0}, outputs={"where": "token"}, modes={Mode.EXTEND})

    @gg.eager_break(row_aligned=("rows",))
    def attend(rows: torch.Tensor) -> torch.Tensor:
        return rows.cumsum(0)

    def forward(view: Any, metadata: Any) -> torch.Tensor:
        return attend(view.loc + metadata["where"]) * scale[0]

    registry = gg.Registry()
    registry.register(contract)(lambda view: {"where": view.loc * 2})
    runner = Runner(
        slots=[gg.Slot("loc", axis="token", dtype=torch.int64, pad=0, capture=lambda row: row + 1)],
        ladder=[4, 8], prep="p", registry=registry, forward=forward, config=gg.RunnerConfig(max_requests=2),
    )  # fmt: skip
    runner.capture(progress=False)
    batch = Batch(1, {"loc": [1, 2, 3]}, Mode.EXTEND, num_tokens=3)
    assert runner.replay(batch).outputs.tolist() == [6, 18, 36]
    segments = [runner._forward.entry(key).recording for key in runner._wanted]  # type: ignore[union-attr]
    runner.release()
    runner.resume(contents_lost=False)
    after = [runner._forward.entry(key).recording for key in runner._wanted]  # type: ignore[union-attr]
    assert all(one is other for one, other in zip(segments, after))
    assert runner.replay(batch).outputs.tolist() == [6, 18, 36]
    runner.release()
    scale[0] = torch.tensor(10)
    runner.resume(contents_lost=False)
    step = runner.replay(batch)
    assert step.outputs.tolist() == [30, 90, 180]
    assert step.decision.forward is Route.GRAPH


# Ranks: all of them together.


class Group:
    """Two ranks as threads."""

    def __init__(self, size: int = 2) -> None:
        exchange, meeting = Exchange(size), Meeting(size)
        self.planner = Planner([1, 2, 4])
        self.models = [Model(meeting, rank) for rank in range(size)]
        self.runners: list[Runner] = self.all(
            lambda rank: runner_of(group_of(exchange, rank, self.planner), self.models[rank])
        )
        all_well(self.all(lambda rank: self.runners[rank].capture(progress=False)))

    def all(self, run: Callable[[int], Any]) -> list[Any]:
        return together(len(self.models), run)


def both_serve(group: Group) -> None:
    steps = all_well(group.all(lambda rank: group.runners[rank].replay(batch_of(2 + rank))))
    for rank, step in enumerate(steps):
        assert step.decision.forward is Route.GRAPH
        assert step.outputs["own"].tolist() == own_of(2 + rank)
        assert step.outputs["all"].tolist() == [one + sum(own_of(2)) + sum(own_of(3)) for one in own_of(2 + rank)]


@pytest.mark.parametrize("recapture", [True, False])
def test_ranks_sleep_and_wake_together(recapture: bool) -> None:
    group = Group()
    both_serve(group)
    assert group.all(lambda rank: group.runners[rank].release()) == [None, None]
    with pytest.raises(ClosedError, match="asleep"):  # at once, without an exchange that nobody else joins
        group.runners[0].replay(batch_of(1))
    whole = group.all(lambda rank: group.runners[rank].resume(recapture=recapture))
    assert [len(keys) for keys in whole] == [3, 3]
    both_serve(group)


def test_what_differs_on_one_rank_is_recorded_anew_on_all(monkeypatch: pytest.MonkeyPatch) -> None:
    group = Group()
    before = [kept_recordings(runner) for runner in group.runners]
    unit = group.runners[1]._units[0]
    key = group.runners[1]._wanted[1]
    replay = unit.cache.replay

    def wrong(at: Any) -> Any:
        result = replay(at)
        if at == key and unit.cache.entry(at).recording is before[1][1]:
            result["total"].add_(1)
        return result

    monkeypatch.setattr(unit.cache, "replay", wrong)
    group.all(lambda rank: group.runners[rank].release())
    group.all(lambda rank: group.runners[rank].resume(contents_lost=False))
    for rank, runner in enumerate(group.runners):
        same = [one is other for one, other in zip(before[rank], kept_recordings(runner))]
        assert same == [True, False, True]
    both_serve(group)


def test_ranks_that_sleep_differently_do_not_sleep() -> None:
    group = Group()
    raised = group.all(lambda rank: group.runners[rank].release(keep_keys=rank == 0))
    assert all(isinstance(error, gg.RankDisagreementError) for error in raised)
    assert not any(runner.asleep for runner in group.runners)
    both_serve(group)
    group.all(lambda rank: group.runners[rank].release())
    raised = group.all(lambda rank: group.runners[rank].resume(contents_lost=rank == 0))
    assert all(isinstance(error, gg.RankDisagreementError) for error in raised)
    assert all(runner.asleep for runner in group.runners)
    group.all(lambda rank: group.runners[rank].resume())
    both_serve(group)
