"""Kinds of faults from the field that no other test names: each on the smallest runner that would show it.

Each docstring ends with the ids of the reports; tests/README.md maps every report to its tests.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch

import graphglue as gg
from graphglue import REPEAT_LAST, Batch, BindError, Bucket, CaptureHooks, Mode, Reason, Route, RunnerConfig, Slot
from graphglue.device.arena import Arena
from tests.prefill import Prefill, batch, make_runner

I64 = torch.int64
NAN = float("nan")
LENS = Slot("lens", "request", I64, 1)
LOC = Slot("loc", "token", I64, 0)


def lasts(view: Any) -> dict[str, torch.Tensor]:
    return {"last": view.lens - 1}


def runner_of(
    prep: Callable[[Any], Any] = lasts,
    forward: Callable[[Any, Any], Any] | None = None,
    slots: tuple[Slot, ...] = (LENS,),
    outputs: dict[str, str] | None = None,
    contract: dict[str, Any] | None = None,
    plan: Callable[..., Any] | None = None,
    **more: Any,
) -> gg.Runner:
    """Build a runner of one declared prep that reads all slots."""
    registry = gg.Registry()
    declared = {"modes": {Mode.DECODE}, "outputs": outputs or {}, "reads": {slot.name: slot.pad for slot in slots}}
    registry.register(gg.PrepContract(**{"name": "p", **declared, **(contract or {})}), plan=plan)(prep)
    return gg.Runner(slots=slots, prep="p", registry=registry, forward=forward, **{"ladder": [4, 8], **more})


def captured(*args: Any, **more: Any) -> gg.Runner:
    runner = runner_of(*args, **more)
    runner.capture(progress=False)
    return runner


def glued(step: Any) -> bool:
    return step.decision.prep is Route.GLUE and step.decision.forward is Route.GRAPH


# Slots and their tails.


def sharing(storage: torch.Tensor, weight: int) -> gg.Runner:
    """Build one of several runners whose slot lies in the same memory."""
    slot = Slot("lens", "request", I64, 1, storage=storage)
    return captured(forward=lambda view, metadata: metadata["last"] * weight + view.lens, slots=(slot,))


def test_tail_stale_two_runners_over_one_storage_each_see_pads() -> None:
    """The tail is reset by the fill that both share, whichever ran before; TAIL-STALE-3."""
    storage = torch.zeros(8, dtype=I64)
    one, other = sharing(storage, 10), sharing(storage, 100)
    for first, second in ((one, other), (other, one)):
        first.replay(Batch(8, {"lens": [90] * 8}))
        step = second.replay(Batch(3, {"lens": [5, 6, 7]}))
        assert glued(step)
        assert storage[:4].tolist() == [5, 6, 7, 1]
        assert step.metadata["last"].tolist() == [4, 5, 6, 0]


def test_reset_of_one_runner_leaves_the_other_over_the_same_storage_right() -> None:
    """No graph that was dropped runs again, and none that was kept loses its slots; RESET-3."""
    storage = torch.zeros(8, dtype=I64)
    one, other = sharing(storage, 10), sharing(storage, 100)
    for runner in (one, other):
        runner.replay(Batch(8, {"lens": [90] * 8}))
    one.reset()
    for lens in ([5, 6, 7], [2, 3]):
        step = one.replay(Batch(len(lens), {"lens": lens}))
        assert step.decision.reason is Reason.NOT_CAPTURED
        assert step.outputs.tolist() == [10 * (n - 1) + n for n in lens]
        step = other.replay(Batch(len(lens), {"lens": lens}))
        assert glued(step)
        assert step.outputs.tolist() == [100 * (n - 1) + n for n in lens]


def test_pad_derived_a_total_covers_the_bucket_pads_included() -> None:
    """A sum over a slot counts its pads, in the glue and in the eager fallback alike; PAD-DERIVED-2."""
    runner = captured(lambda view: {"total": view.lens.sum().reshape(1)}, outputs={"total": "fixed"})
    for features in (frozenset(), frozenset({"lora"})):
        step = runner.prepare(Batch(3, {"lens": [5, 6, 7]}, features=features))
        assert step.metadata["total"].tolist() == [5 + 6 + 7 + 1]
        assert step.decision.prep is (Route.EAGER if features else Route.GLUE)
        full = runner.prepare(Batch(4, {"lens": [5, 6, 7, 8]}, features=features))
        assert full.metadata["total"].tolist() == [26]


def test_pad_derived_two_packed_sections_are_padded_one_by_one() -> None:
    """Offsets packed into one buffer are two slots over its parts, and each repeats its own end; PAD-DERIVED-4."""
    packed = torch.full((2, 5), 77)
    sections = [Slot(name, "offset", I64, REPEAT_LAST, storage=part) for name, part in zip("qk", packed)]
    arena = Arena(sections, [4])
    arena.fill(Batch(4, {"q": [0, 9, 18, 27, 36], "k": [0, 90, 180, 270, 360]}))
    arena.fill(Batch(2, {"q": [0, 1, 2], "k": [0, 30, 70]}))
    assert packed.tolist() == [[0, 1, 2, 2, 2], [0, 30, 70, 70, 70]]


def test_state_carry_a_flag_that_must_start_clear_is_a_fixed_slot() -> None:
    """A fixed slot that no source is given for is reset at every replay; STATE-CARRY-4."""
    flag = Slot("flag", "fixed", I64, 0, inner=(2,), missing="pad")

    def forward(view: Any, metadata: Any) -> torch.Tensor:
        seen = view.flag.sum() + metadata["last"]
        view.flag.add_(1)  # a launch that marks itself as done
        return seen

    runner = captured(forward=forward, slots=(LENS, flag))
    for start in range(4):
        step = runner.replay(Batch(3, {"lens": [start + 1, start + 2, start + 3]}))
        assert glued(step)
        assert step.outputs.tolist() == [start, start + 1, start + 2]


def test_unstaged_an_optional_slot_absent_at_capture_has_an_effect_when_given() -> None:
    """It is read by every graph, and its pad is the value of steps without it; UNSTAGED-2."""
    adapter = Slot("adapter", "request", I64, 0, missing="pad")
    runner = captured(
        lambda view: {"m": view.lens + 100 * view.adapter}, lambda view, metadata: metadata["m"] + 0, (LENS, adapter)
    )
    for given in (None, [1, 2, 3], None, [3, 2, 1]):
        more = {} if given is None else {"adapter": given}
        step = runner.replay(Batch(3, {"lens": [5, 6, 7], **more}))
        assert glued(step)
        assert step.outputs.tolist() == [n + 100 * k for n, k in zip([5, 6, 7], given or [0, 0, 0])]
        assert step.metadata["m"].tolist()[3:] == [1]


def test_rng_seeds_of_requests_are_slots_and_draw_alike_in_every_bucket() -> None:
    """A request's number depends on its own seed and offset, not on the bucket; RNG-3."""
    slots = (LENS, Slot("seed", "request", I64, 0), Slot("offset", "request", I64, 0))

    def forward(view: Any, metadata: Any) -> torch.Tensor:
        return (view.seed * 6364136223846793005 + view.offset * 1442695040888963407) >> 33

    drawn = []
    for ladder in ([4], [8]):
        step = captured(forward=forward, slots=slots, ladder=ladder).replay(
            Batch(3, {"lens": [5, 6, 7], "seed": [1, 2, 3], "offset": [7, 7, 9]})
        )
        assert glued(step)
        drawn.append(step.outputs.tolist())
    assert drawn[0] == drawn[1]
    assert len(set(drawn[0])) == 3


# What a capture leaves behind, and what it sees.


def test_pad_alias_a_capture_writes_no_row_but_the_sink() -> None:
    """Warm-ups and captures run on pads, and what the engine cleans behind its session stays clean; PAD-ALIAS-6."""
    cache, cleaned = torch.full((16,), 77), []

    @contextmanager
    def session() -> Iterator[None]:
        yield
        cleaned.append({row for row, value in enumerate(cache.tolist()) if value != 77})
        cache.fill_(77)

    def forward(view: Any, metadata: Any) -> torch.Tensor:
        cache.index_copy_(0, view.loc, metadata["last"])
        return cache[view.loc]

    runner = captured(forward=forward, slots=(LENS, LOC), hooks=CaptureHooks(session=session))
    assert cleaned == [{0}]
    assert cache.tolist() == [77] * 16
    step = runner.replay(Batch(3, {"lens": [5, 6, 7], "loc": [4, 9, 15]}))
    assert glued(step)
    assert {row for row, value in enumerate(cache.tolist()) if value != 77} == {0, 4, 9, 15}


def test_state_carry_an_engine_restores_in_its_session_what_warm_ups_advanced() -> None:
    """Warm-ups are real runs; nothing runs behind the session, so what it puts back stays; STATE-CARRY-1."""
    counter = torch.tensor([41])

    @contextmanager
    def session() -> Iterator[None]:
        before = counter.clone()
        yield
        assert counter != before
        counter.copy_(before)

    def forward(view: Any, metadata: Any) -> torch.Tensor:
        counter.add_(1)
        return metadata["last"] + counter

    runner = captured(forward=forward, hooks=CaptureHooks(session=session))
    assert counter.tolist() == [41]
    for turn in (1, 2):
        assert runner.replay(Batch(3, {"lens": [5, 6, 7]})).outputs.tolist() == [n + 40 + turn for n in (5, 6, 7)]


def test_feature_guard_warm_ups_and_recordings_have_every_field_that_replays_have() -> None:
    """Slots, counts, bucket, mode and variant are there while recording, in prep and forward; FEATURE-GUARD-3."""
    seen: dict[str, set[Any]] = {"prep": set(), "forward": set()}
    live = Slot("live", "fixed", I64, 0, value=gg.RAW_REQUESTS)

    def note(who: str, view: Any) -> None:
        seen[who].add((view.bucket.requests, view.mode, view.variant, tuple(view.lens.shape), tuple(view.live.shape)))

    def prep(view: Any) -> dict[str, torch.Tensor]:
        note("prep", view)
        return {"share": view.lens * view.live}

    def forward(view: Any, metadata: Any) -> torch.Tensor:
        note("forward", view)
        return metadata["share"] + view.live

    runner = captured(prep, forward, (LENS, live), variants=("window",))
    for fields in seen.values():
        assert fields == {(size, Mode.DECODE, "window", (size,), ()) for size in (4, 8)}
    step = runner.replay(Batch(3, {"lens": [5, 6, 7]}, variant="window"))
    assert glued(step)
    assert step.outputs.tolist() == [3 * n + 3 for n in (5, 6, 7)]


def test_host_frozen_a_bound_is_at_its_worst_while_captured_and_live_afterwards() -> None:
    """Whatever a kernel is chosen by at capture, it is chosen for the longest step; HOST-FROZEN-9."""
    seen: list[int] = []
    recording = []

    @contextmanager
    def key(_: Any) -> Iterator[None]:
        recording.append(True)
        yield
        recording.clear()

    def prep(view: Any) -> dict[str, torch.Tensor]:
        if not recording:
            seen.extend(view.lens.tolist())
        return lasts(view)

    runner = captured(prep, slots=(Slot("lens", "request", I64, 1, capture=128),), hooks=CaptureHooks(key=key))
    assert set(seen) == {128}
    for lens in ([5, 6, 7], [9, 2, 3]):
        assert runner.prepare(Batch(3, {"lens": lens})).metadata["last"].tolist() == [*(n - 1 for n in lens), 0]


# Host values.


def test_host_frozen_a_bound_that_was_captured_is_checked_by_the_plan_at_every_replay() -> None:
    """A step past the bound is refused before anything is written, and the next one is right; HOST-FROZEN-4."""

    def plan(step: Batch, bucket: Bucket) -> dict[str, Any]:
        if max(step.sources["lens"]) > 64:
            raise BindError(f"lens up to {max(step.sources['lens'])}: expected at most 64, the captured bound")
        return {}

    runner = captured(plan=plan)
    assert runner.prepare(Batch(2, {"lens": [64, 3]})).metadata["last"].tolist() == [63, 2, 0, 0]
    before = runner.view(8).lens.tolist()
    with pytest.raises(BindError, match="up to 65: expected at most 64"):
        runner.prepare(Batch(3, {"lens": [65, 3, 3]}))
    assert runner.view(8).lens.tolist() == before
    assert runner.prepare(Batch(3, {"lens": [9, 8, 7]})).metadata["last"].tolist() == [8, 7, 6, 0]


def test_host_frozen_what_steers_a_prep_is_in_the_key() -> None:
    """A variant that a prep branches on has graphs of its own, right each time it changes; HOST-FROZEN-6."""
    runner = captured(
        lambda view: {"m": view.lens * 2 if view.variant == "long" else view.lens + 1},
        lambda view, metadata: metadata["m"] + 0,
        variants=("short", "long"),
    )
    for variant in ("long", "short", "short", "long"):
        step = runner.replay(Batch(3, {"lens": [5, 6, 7]}, variant=variant))
        assert glued(step)
        assert step.outputs.tolist() == [2 * n if variant == "long" else n + 1 for n in (5, 6, 7)]


def test_plan_stale_a_forward_that_builds_metadata_from_host_values_is_not_captured() -> None:
    """It would keep the values of the capture; it runs eagerly, and says so; PLAN-STALE-5."""

    def forward(view: Any, metadata: Any) -> torch.Tensor:
        pages = torch.tensor([n * 3 for n in view.lens.tolist()])
        return pages + metadata["last"]

    runner = captured(forward=forward)
    for lens in ([5, 6, 7], [50, 60, 70]):
        step = runner.replay(Batch(3, {"lens": lens}))
        assert (step.decision.prep, step.decision.forward) == (Route.GLUE, Route.EAGER)
        assert step.decision.forward_reason is Reason.FORWARD_QUARANTINED
        assert step.outputs.tolist() == [3 * n + n - 1 for n in lens]


def test_meta_shape_metadata_is_reused_only_for_the_step_it_was_made_for() -> None:
    """A staged step is prepared anew if its source has changed, whatever the caller believes; META-SHAPE-4."""
    runner = captured(forward=lambda view, metadata: metadata["last"] + 0, config=RunnerConfig(staging=True))
    lens = torch.tensor([5, 6, 7])
    for change in (0, 10, 0):
        assert runner.stage(Batch(3, {"lens": lens}))
        lens += change if change else 0
        step = runner.replay(Batch(3, {"lens": lens.clone() if change else lens}))
        assert step.outputs.tolist() == (lens - 1).tolist()
        assert (step.decision.reason is Reason.STAGED) == (change == 0)


# Results.


def test_pad_leak_rows_behind_an_eager_break_are_its_pad() -> None:
    """What a break leaves unwritten is set to its pad before the next segment, whatever ran before; PAD-LEAK-4."""
    factor = [NAN]
    mark = gg.eager_break(lambda x: x * factor[0], row_aligned=("x",), pad=-7)

    def forward(view: Any, metadata: Any) -> dict[str, torch.Tensor]:
        return {"rows": mark(view.positions.to(torch.float32)[:, None] * 1) + 0}

    with make_runner(Prefill(), forward=forward, output_axes={"rows": "bucket"}) as runner:
        runner.capture(progress=False)
        for seed, (lens, rows) in enumerate((([8], 8), ([16], 16), ([3, 2], 8), ([1, 1, 1], 4))):
            factor[0] = NAN if seed < 2 else 1
            step = runner.replay(batch(lens, seed))
            assert (step.decision.forward, step.decision.bucket.tokens) == (Route.GRAPH, rows)
            real, padded = step.outputs["rows"].split([sum(lens), rows - sum(lens)])
            assert real.isnan().all() == (seed < 2)
            assert (padded == -7).all()


@pytest.mark.parametrize("reader", ["one", "other"])
def test_out_overwrite_results_that_two_callers_hold_are_theirs(reader: str) -> None:
    """Owned results survive any replay of the same graph; OUT-OVERWRITE-1, OUT-OVERWRITE-4."""
    runner = captured(forward=lambda view, metadata: metadata["last"] + 0, config=RunnerConfig(clone_outputs=True))
    held: dict[str, Any] = {}
    for turn in range(4):
        for caller, start in (("one", 10), ("other", 20)):
            if caller in held and caller == reader:
                assert held[caller][0].outputs.tolist() == held[caller][1]
                assert held[caller][0].metadata["last"].tolist()[:3] == held[caller][1]
            lens = [start + turn, start + turn + 1, start + turn + 2]
            held[caller] = runner.replay(Batch(3, {"lens": lens})), [n - 1 for n in lens]


# Routes and idle steps.


def test_idle_rank_every_route_says_its_bucket_and_an_idle_one_has_no_live_rows() -> None:
    """Glued, eager, over the ladder and idle: the bucket is there, and the live count; IDLE-RANK-2, 3 and 4."""
    live = Slot("live", "fixed", I64, 0, value=gg.RAW_REQUESTS)
    runner = captured(
        lambda view: {"last": view.lens - 1, "live": view.live.reshape(1) + 0},
        lambda view, metadata: metadata["last"] + 0,
        (LENS, live),
        outputs={"last": "request", "live": "fixed"},
    )
    runner.replay(Batch(8, {"lens": [90] * 8}))
    routes = {
        Reason.PADDED: (Batch(3, {"lens": [5, 6, 7]}), 4, 3),
        Reason.FEATURE_NOT_AUDITED: (Batch(3, {"lens": [5, 6, 7]}, features=frozenset({"lora"})), 4, 3),
        Reason.OVER_LADDER: (Batch(9, {"lens": [5] * 9}), 9, 9),
        Reason.IDLE_EAGER: (Batch.idle(), 4, 0),
    }
    for reason, (one, rows, real) in routes.items():
        step = runner.replay(one)
        assert step.decision.reason is reason
        assert (step.decision.bucket, step.raw.requests) == (Bucket(rows, rows, 1), real)
        assert {name: (leaf.dtype, len(leaf)) for name, leaf in step.metadata.items()} == {
            "last": (I64, rows), "live": (I64, 1)
        }  # fmt: skip
        assert step.metadata["live"].tolist() == [real]
        assert step.outputs.shape == (real,)


@pytest.mark.parametrize(("tokens", "width"), [(42, 7), (2, 1), (1, 1), (60, 3)])
def test_bucket_list_a_configured_maximum_is_always_a_bucket_and_none_is_above(tokens: int, width: int) -> None:
    """The largest step hits a graph whatever the width, and no size goes past it; BUCKET-LIST-4, BUCKET-LIST-5."""
    ladder = gg.Ladder.bounded(tokens // width)
    assert ladder.largest == tokens // width
    runner = captured(forward=lambda view, metadata: view.loc + 0, slots=(LENS, LOC), ladder=ladder,
                      tokens_per_request=width)  # fmt: skip
    requests = tokens // width
    step = runner.replay(Batch(requests, {"lens": [5] * requests, "loc": list(range(tokens))}))
    assert glued(step)
    assert step.decision.bucket == Bucket(requests, tokens, width)
    assert step.outputs.tolist() == list(range(tokens))


def test_route_key_every_size_is_a_whole_number_of_requests_of_full_width() -> None:
    """Sizes count requests, so no captured bucket ends in a short one; ROUTE-KEY-4."""
    runner = captured(slots=(LENS, LOC), ladder=[1, 5, 16], tokens_per_request=3)
    assert runner.buckets == (Bucket(1, 3, 3), Bucket(5, 15, 3), Bucket(16, 48, 3))


def test_capture_fail_each_key_that_fails_is_logged_once_with_its_cause(caplog: pytest.LogCaptureFixture) -> None:
    """And the others serve; CAPTURE-FAIL-3."""

    def prep(view: Any) -> dict[str, torch.Tensor]:
        if view.bucket.requests == 8:
            view.lens.tolist()  # what no recorder takes
        return lasts(view)

    with caplog.at_level("WARNING", "graphglue"):
        runner = captured(prep)
        for _ in range(3):
            assert runner.prepare(Batch(3, {"lens": [5, 6, 7]})).decision.prep is Route.GLUE
            assert runner.prepare(Batch(5, {"lens": [5] * 5})).decision.reason is Reason.QUARANTINED
    (line,) = [record.getMessage() for record in caplog.records if "maintain()" in record.getMessage()]
    assert "p at " in line
    assert "8" in line
    assert "tolist" in line
