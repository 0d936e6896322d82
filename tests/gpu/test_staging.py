"""Staging on CUDA: the front of the next step on a stream of its own, beside whatever else the GPU does.

The staged step rewrites slots and metadata, so a test that queues many steps keeps their outputs only.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest
import torch

from graphglue import (
    Batch,
    CaptureHooks,
    ConfigError,
    GraphGlueError,
    PrepContract,
    Reason,
    Route,
    RunnerConfig,
    Shadow,
    Slot,
)
from graphglue.device.kernel_fill import KernelFill
from graphglue.stepping import AHEAD

from .test_runner import (
    CONTRACT,
    Engine,
    as_arrays,
    as_tensors,
    assert_results,
    draw,
    keep_busy,
    meta,
    model,
    plain,
    table,
    twin_view,
)

KINDS = {"lists": dict, "device": as_tensors, "numpy": as_arrays}
BULK_ROWS = 1 << 16


def engine_of(config: Mapping[str, Any] | None = None, **more: Any) -> Engine:
    """Build an engine that stages, and capture it."""
    engine = Engine(**more, config=RunnerConfig(**{"staging": True, "warmups": 1, **(config or {})}))
    engine.runner.capture()
    assert isinstance(engine.runner.arena.fill_of(engine.runner.space.bucket(4)), KernelFill)
    return engine


def batch(requests: int, start: int = 0, kind: Any = as_tensors) -> Batch:
    return Batch(requests, kind(draw(requests, start)))


def counts(engine: Engine) -> tuple[int, int, dict[str, int]]:
    seen = engine.runner.stats()["staging"]
    return seen["staged"], seen["staged_taken"], seen["staged_rejected"]


def check(engine: Engine, step: Any, sources: Mapping[str, Any], took: bool) -> None:
    assert (step.decision.reason is Reason.STAGED) is took
    assert_results(step.metadata, step.outputs, sources, step.decision.bucket.requests, engine.t, engine.prep)


def check_outputs(outputs: Any, sources: Mapping[str, Any], rows: int, t: torch.Tensor) -> None:
    view, raw = twin_view(sources, rows, t), len(sources["ids"])
    expected = model(view, meta(view))
    assert plain(outputs) == {name: leaf[:raw].tolist() for name, leaf in expected.items()}


def kept(step: Any) -> dict[str, torch.Tensor]:
    """Queue copies of a step's outputs on the current stream."""
    return {name: leaf.clone() for name, leaf in step.outputs.items()}


def side_stream(engine: Engine) -> torch.cuda.Stream:
    return engine.runner.arena.device._order._side  # type: ignore[attr-defined]


def warm(engine: Engine) -> None:
    """Stage and take a step, and wait, so that nothing is loaded or made for the first time while the GPU is busy."""
    step = batch(4, 0, dict)
    engine.runner.stage(step)
    assert engine.runner.replay(step).decision.reason is Reason.STAGED
    torch.cuda.synchronize()


def pool_of(engine: Engine) -> Any:
    """Give the memory pool that the engine's prep was recorded into."""
    return engine.runner._units[0].cache.entry(engine.runner.space.keys()[0]).recording.pool  # type: ignore[union-attr]


def now() -> torch.cuda.Event:
    event = torch.cuda.Event()
    event.record()
    return event


@contextmanager
def no_syncs() -> Iterator[None]:
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


# Results.


@pytest.mark.parametrize("kind", KINDS.values(), ids=KINDS)
def test_every_raw_count_is_staged_taken_and_right(kind: Any) -> None:
    engine = engine_of()
    for number, requests in enumerate((*range(1, 17), 3, 3, 3)):
        step = batch(requests, number, kind)
        assert engine.runner.stage(step)
        check(engine, engine.runner.replay(step), draw(requests, number), True)
    assert counts(engine) == (19, 19, {})
    assert engine.runner.stats()["launch_fallbacks"] == {AHEAD: 19}


def test_the_comparison_can_fail() -> None:
    engine = engine_of()
    engine.runner.replay(batch(4, 9))
    engine.runner.stage(batch(3, 5, dict))
    step = engine.runner.replay(batch(3, 5, dict))
    with pytest.raises(AssertionError):
        check(engine, step, draw(3, 6), True)
    engine.runner._staging._units = []  # type: ignore[union-attr]
    engine.runner.stage(batch(3, 7, dict))
    with pytest.raises(AssertionError):
        check(engine, engine.runner.replay(batch(3, 7, dict)), draw(3, 7), True)


def test_any_order_of_calls_gives_what_plain_replays_give() -> None:
    ours, plain_engine = engine_of(), engine_of({"staging": False})
    rng = np.random.default_rng(3)
    pool = [(batch(n, start, kind), n) for n in (1, 3, 4, 7) for start, kind in ((0, dict), (4, as_tensors))]
    pool.append((Batch.idle(), 0))
    staged, taken = None, 0
    for _ in range(120):
        call, pick = rng.integers(0, 4), int(rng.integers(0, len(pool)))
        step, requests = pool[pick]
        if call == 0 and staged is None:
            staged = pick if ours.runner.stage(step) else None
            assert (staged is None) is (requests == 0)  # IDLE runs eagerly here
        elif call == 1:
            one, other = ours.runner.prepare(step), plain_engine.runner.prepare(step)
            assert plain(one.metadata) == plain(other.metadata)
            staged = None
        else:
            if staged is not None and rng.integers(0, 2):
                step, pick = pool[staged][0], staged
            one, other = ours.runner.replay(step), plain_engine.runner.replay(step)
            assert plain(one.metadata) == plain(other.metadata)
            assert plain(one.outputs) == plain(other.outputs)
            assert (one.decision.reason is Reason.STAGED) is (staged == pick)
            taken, staged = taken + (staged == pick), None
    seen = counts(ours)
    assert seen[1] == taken > 5
    assert seen[0] == taken + sum(seen[2].values()) + (staged is not None)


def test_host_sources_may_be_overwritten_once_staged_and_large_ones_too() -> None:
    slots = [Slot("bulk", "request", torch.int64, 0, inner=(8192,)), Slot("n", "request", torch.int64, 0)]
    contract = PrepContract(name="p", reads={"bulk": 0, "n": 0}, modes=CONTRACT.modes)
    engine = engine_of(
        prep=lambda view: {"sums": view.bulk.sum(1) + view.n}, contract=contract, slots=slots, tables={},
        forward=lambda view, metadata: metadata["sums"] * 2,
    )  # fmt: skip
    bulk = np.arange(3 * 8192).reshape(3, 8192)
    expected = [2 * (int(row.sum()) + 1) for row in bulk]
    keep_busy(100_000_000)
    engine.runner.stage(Batch(3, {"bulk": bulk, "n": [1, 1, 1]}))
    same = bulk.copy()
    bulk[:] = 0
    step = engine.runner.replay(Batch(3, {"bulk": same, "n": [1, 1, 1]}))
    assert (step.outputs.tolist(), step.decision.reason) == (expected, Reason.STAGED)
    engine.runner.stage(Batch(3, {"bulk": same, "n": [1, 1, 1]}))
    same[2, 8191] += 5
    step = engine.runner.replay(Batch(3, {"bulk": same, "n": [1, 1, 1]}))
    assert (step.outputs.tolist(), step.decision.reason) == ([*expected[:2], expected[2] + 10], Reason.PADDED)


# Beside a busy GPU.


def test_nothing_waits_on_the_host_and_a_running_forward_keeps_its_results() -> None:
    engine = engine_of()
    batches = [batch(4 - number % 2, number, dict) for number in range(20)]
    warm(engine)
    outputs, busy = [], keep_busy()
    with no_syncs():
        for number, step in enumerate(batches):
            replayed = engine.runner.replay(step)
            if number + 1 < len(batches):
                # A staged step of another extent in every third place, so that some are rejected.
                engine.runner.stage(batches[number + 1] if number % 3 else batch(2, number, dict))
            outputs.append((kept(replayed), replayed.decision.reason))
    assert not busy.query(), "staging waited for the GPU"
    torch.cuda.synchronize()
    for number, (seen, reason) in enumerate(outputs):
        requests = 4 - number % 2
        check_outputs(seen, draw(requests, number), 4, engine.t)
        assert (reason is Reason.STAGED) is bool(number and (number - 1) % 3)
    assert counts(engine)[2] == {"other_step": 7}


def test_the_front_runs_while_the_callers_stream_is_busy_with_something_else() -> None:
    engine = engine_of()
    sources = as_tensors(draw(3, 8))
    warm(engine)
    ready, busy = now(), keep_busy()
    engine.runner.stage(Batch(3, sources), after=ready)
    side_stream(engine).synchronize()
    assert not busy.query(), "the front ran behind the caller's work"
    step = engine.runner.replay(Batch(3, sources))
    assert not busy.query()
    check(engine, step, draw(3, 8), True)


def test_the_front_does_not_run_before_the_runners_own_forward_has_ended() -> None:
    """Whatever ``after`` says: the forward that is queued reads the slots that the front fills."""
    engine = engine_of()
    warm(engine)
    ready, busy = now(), keep_busy()
    step = engine.runner.replay(batch(3, 1, dict))
    engine.runner.stage(batch(4, 2, dict), after=ready)
    outputs = kept(step)
    assert not busy.query()
    side_stream(engine).synchronize()
    assert busy.query(), "the front overtook the forward"
    check_outputs(outputs, draw(3, 1), 4, engine.t)
    check(engine, engine.runner.replay(batch(4, 2, dict)), draw(4, 2), True)


def test_the_front_comes_behind_the_forward_of_an_engine_that_owns_it() -> None:
    engine = engine_of(forward=None)
    prepared = engine.runner.prepare(batch(4))
    model(prepared.view, prepared.metadata)
    warm(engine)
    ready, busy = now(), keep_busy()
    prepared = engine.runner.prepare(batch(3, 1, dict))
    seen = {name: leaf.clone() for name, leaf in model(prepared.view, prepared.metadata).items()}
    engine.runner.stage(batch(4, 2, dict), after=ready)
    assert not busy.query()
    check_outputs({name: leaf[:3] for name, leaf in seen.items()}, draw(3, 1), 4, engine.t)
    step = engine.runner.replay(batch(4, 2, dict))
    assert plain(step.metadata) == plain(meta(twin_view(draw(4, 2), 4, engine.t)))


def test_another_runners_forward_in_the_same_memory_pool_is_left_alone() -> None:
    """The engine gives both runners its pool; the preps that are staged have one of their own."""

    def sleeping(view: Any, metadata: Any) -> torch.Tensor:
        bulk = view.ids[:, None] * 1000 + torch.arange(BULK_ROWS, device="cuda")
        torch.cuda._sleep(400_000_000)
        return (bulk * 2).sum(1) + metadata["positions"]

    def large(view: Any) -> dict[str, torch.Tensor]:
        junk = view.loc[:, None] * 77 + torch.arange(BULK_ROWS, device="cuda")
        return {"positions": view.seq_lens - 1, "junk": (junk * 3).sum(1)}

    hooks = CaptureHooks(pool=torch.cuda.graph_pool_handle(), stream=torch.cuda.Stream())
    contract = PrepContract(name="large", reads={"seq_lens": 1, "loc": 0}, modes=CONTRACT.modes)
    target = engine_of({"staging": False}, prep=large, contract=contract, forward=sleeping, ladder=[4], hooks=hooks)
    draft = engine_of(
        prep=large,
        contract=contract,
        forward=lambda view, metadata: metadata["junk"] + view.ids,
        ladder=[4],
        hooks=hooks,
    )
    assert pool_of(draft) != pool_of(target) == hooks.pool
    warm(draft)
    ready = now()
    step = target.runner.replay(batch(3, 2, dict))
    running = now()
    draft.runner.stage(batch(4, 6, dict), after=ready)
    side_stream(draft).synchronize()
    assert not running.query(), "nothing ran side by side"
    numbers = torch.arange(BULK_ROWS).sum().item() * 2
    ids, lens = draw(3, 2)["ids"], draw(3, 2)["seq_lens"]
    assert step.outputs.tolist() == [one * 2000 * BULK_ROWS + numbers + length - 1 for one, length in zip(ids, lens)]
    taken = draft.runner.replay(batch(4, 6, dict))
    assert taken.decision.reason is Reason.STAGED
    junk = [loc * 231 * BULK_ROWS + torch.arange(BULK_ROWS).sum().item() * 3 for loc in draw(4, 6)["loc"]]
    assert taken.outputs.tolist() == [one + number for one, number in zip(junk, draw(4, 6)["ids"])]


# When sources are ready, and when they change.


def test_sources_that_the_callers_stream_has_yet_to_compute_are_waited_for() -> None:
    engine, fresh = engine_of(), as_tensors(draw(3, 6))
    sources = {name: torch.ones_like(tensor) for name, tensor in fresh.items()}
    warm(engine)
    busy = keep_busy()
    for name, tensor in fresh.items():
        sources[name].copy_(tensor)
    engine.runner.stage(Batch(3, sources))
    step = engine.runner.replay(Batch(3, sources))
    assert not busy.query()
    check(engine, step, draw(3, 6), True)


def test_after_says_from_when_sources_of_another_stream_are_ready() -> None:
    engine, fresh, other = engine_of(), as_tensors(draw(3, 6)), torch.cuda.Stream()
    sources = {name: torch.ones_like(tensor) for name, tensor in fresh.items()}
    warm(engine)
    with torch.cuda.stream(other):
        torch.cuda._sleep(200_000_000)
        for name, tensor in fresh.items():
            sources[name].copy_(tensor)
        ready = now()
    engine.runner.stage(Batch(3, sources), after=ready)
    check(engine, engine.runner.replay(Batch(3, sources)), draw(3, 6), True)


def test_an_event_that_was_never_recorded_is_refused() -> None:
    """CUDA takes it for one that has happened, so the front would read sources before they are ready."""
    engine = engine_of()
    with pytest.raises(ConfigError, match="after was never recorded"):
        engine.runner.stage(batch(3), after=torch.cuda.Event())
    assert counts(engine) == (0, 0, {})
    event = torch.cuda.Event()
    event.record()
    assert engine.runner.stage(batch(3), after=event)


@pytest.mark.parametrize("how", ["in place", "elsewhere"])
def test_sources_that_were_overwritten_are_not_taken(how: str) -> None:
    engine, sources = engine_of(), as_tensors(draw(3, 6))
    fresh = {name: torch.from_numpy(array).pin_memory() for name, array in as_arrays(draw(3, 1)).items()}
    warm(engine)
    busy = keep_busy()
    engine.runner.stage(Batch(3, sources))
    if how == "elsewhere":  # the staged tensors are held, so that none of these lies where they lay
        sources.clear()
        sources.update({name: pinned.to("cuda", non_blocking=True) for name, pinned in fresh.items()})
    else:
        for name, pinned in fresh.items():
            sources[name].copy_(pinned, non_blocking=True)
    step = engine.runner.replay(Batch(3, sources))
    assert not busy.query()
    check(engine, step, draw(3, 1), False)
    assert counts(engine) == (2, 1, {"sources": 1})


def test_a_table_that_was_written_is_not_read_as_it_was() -> None:
    engine = engine_of()
    step = batch(3, 2, dict)
    warm(engine)
    busy = keep_busy()
    engine.runner.stage(step)
    engine.t.add_(1)
    replayed = engine.runner.replay(step)
    assert not busy.query()
    check(engine, replayed, draw(3, 2), False)
    assert counts(engine) == (2, 1, {"tables": 1})


def test_a_table_that_another_runners_graph_wrote_is_not_read_as_it_was() -> None:
    shared = table()

    def bump(view: Any) -> dict[str, torch.Tensor]:
        view.tables.t.add_(1)
        return {"first": view.tables.t[view.rows, 0]}

    effects = PrepContract(name="bump", reads={"rows": 0}, tables=("t",), effects=("t",), modes=CONTRACT.modes)
    reader = engine_of(t=shared)
    writer = engine_of({"staging": False}, prep=bump, contract=effects, forward=None, t=shared)
    reader.runner.stage(batch(3, 2, dict))
    assert writer.runner.replay(batch(2, 0, dict)).decision.prep is Route.GLUE
    check(reader, reader.runner.replay(batch(3, 2, dict)), draw(3, 2), False)
    assert counts(reader) == (1, 0, {"tables": 1})


def test_the_last_outputs_are_the_next_steps_sources() -> None:
    engine = engine_of()
    numbers, expected = draw(4), draw(4)["ids"]
    sources: dict[str, Any] = {**as_tensors(numbers)}
    step = engine.runner.replay(Batch(4, sources))
    for number in range(12):
        view = twin_view({**numbers, "ids": expected}, 4, engine.t)
        expected = model(view, meta(view))["next"].tolist()
        following = Batch(4, {**sources, "ids": step.outputs["next"]})
        assert engine.runner.stage(following if number % 3 else batch(3))
        step = engine.runner.replay(following)
        assert (step.decision.reason is Reason.STAGED) is bool(number % 3)
    view = twin_view({**numbers, "ids": expected}, 4, engine.t)
    assert step.outputs["next"].tolist() == model(view, meta(view))["next"].tolist()


# Streams, forwards of other kinds, upkeep.


def test_stage_and_replay_may_come_on_any_stream() -> None:
    engine, streams = engine_of(), [torch.cuda.Stream() for _ in range(3)]
    torch.cuda.synchronize()
    outputs = []
    for number in range(18):
        step = batch(3, number, dict)
        with torch.cuda.stream(streams[number % 3]):
            torch.cuda._sleep(2_000_000)
            engine.runner.stage(step)
        with torch.cuda.stream(streams[number // 2 % 3]):
            replayed = engine.runner.replay(step)
            assert replayed.decision.reason is Reason.STAGED
            outputs.append(kept(replayed))
    torch.cuda.synchronize()
    for number, seen in enumerate(outputs):
        check_outputs(seen, draw(3, number), 4, engine.t)


def test_a_forward_that_draws_random_numbers_draws_the_same_ones() -> None:
    def drawing(view: Any, metadata: Any) -> torch.Tensor:
        return view.ids + metadata["positions"] + torch.rand(len(view.ids), device="cuda")

    results = []
    for stages in (True, False):
        engine = engine_of({"staging": stages}, forward=drawing)
        torch.cuda.manual_seed(5)
        seen = []
        for number in range(6):
            step = batch(3, number, dict)
            if stages:
                engine.runner.stage(step if number % 3 else batch(4))
            seen.append(engine.runner.replay(step).outputs.tolist())
        results.append(seen)
    assert results[0] == results[1]
    assert len({round(row[0] % 1, 6) for row in results[0]}) == 6


def test_a_prep_that_draws_random_numbers_is_left_to_its_replay() -> None:
    contract = PrepContract(name="p", reads={"ids": 0}, modes=CONTRACT.modes)
    engine = engine_of(
        prep=lambda view: {"noise": torch.rand(len(view.ids), device="cuda") + view.ids}, contract=contract,
        forward=lambda view, metadata: metadata["noise"],
    )  # fmt: skip
    assert not engine.runner.stage(batch(3))
    assert engine.runner.stats()["staging"]["not_staged"] == {"draws_random": 1}
    assert engine.runner.replay(batch(3)).decision.prep is Route.GLUE


def test_an_adopted_forward_is_run_behind_what_was_staged() -> None:
    engine = engine_of(forward=None)
    prepared = engine.runner.prepare(batch(4, 1, dict))
    view, metadata = prepared.view, prepared.metadata
    graph, stream = torch.cuda.CUDAGraph(keep_graph=True), torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        model(view, metadata)
        graph.capture_begin()
        outputs = model(view, metadata)
        graph.capture_end()
    torch.cuda.current_stream().wait_stream(stream)
    graph.instantiate()
    engine.runner.adopt_forward(4, graph, outputs)
    for number in range(4):
        step = batch(3 + number % 2, number, dict)
        assert engine.runner.stage(step)
        check(engine, engine.runner.replay(step), draw(3 + number % 2, number), True)


def test_taken_steps_are_sampled_by_the_shadow_check() -> None:
    engine = engine_of({"shadow": Shadow(first=4, every=0)})
    for number in range(4):
        step = batch(3, number, as_tensors if number % 2 else dict)
        engine.runner.stage(step)
        if number == 3:
            torch.cuda.synchronize()
            engine.runner.view(4).seq_lens[1] += 50
        assert engine.runner.replay(step).decision.reason is Reason.STAGED
    shadow = engine.runner.stats()["shadow"]
    assert (shadow["sampled"], shadow["passed"], shadow["mismatched"]) == (4, 3, 1)


@pytest.mark.parametrize("change", ["rebind", "reset", "close"])
def test_what_is_staged_is_dropped_with_the_keys_while_the_gpu_is_busy(change: str) -> None:
    engine = engine_of()
    engine.runner.replay(batch(4))
    keep_busy(100_000_000)
    engine.runner.stage(batch(3))
    with pytest.raises(GraphGlueError, match="two steps can not share one set of slots"):
        engine.runner.stage(batch(3))
    if change == "close":
        engine.runner.close()
    elif change == "reset":
        engine.runner.reset()
        engine.runner.capture()
    else:
        engine.t = table(5)
        engine.runner.rebind_table("t", engine.t)
        engine.runner.maintain()
    assert counts(engine) == (1, 0, {"dropped": 1})
    if change != "close":
        check(engine, engine.runner.replay(batch(3)), draw(3), False)
        engine.runner.stage(batch(3, 4, dict))
        check(engine, engine.runner.replay(batch(3, 4, dict)), draw(3, 4), True)


def test_sources_made_in_inference_mode_are_left_to_their_replay_and_others_are_taken_inside_it() -> None:
    engine, outside = engine_of(), as_tensors(draw(3, 2))
    with torch.inference_mode():
        inside = as_tensors(draw(3))
        assert not engine.runner.stage(Batch(3, inside))
        check(engine, engine.runner.replay(Batch(3, inside)), draw(3), False)
        assert engine.runner.stage(Batch(3, outside))
        check(engine, engine.runner.replay(Batch(3, outside)), draw(3, 2), True)
    assert engine.runner.stats()["staging"]["not_staged"] == {"unseen": 1}
