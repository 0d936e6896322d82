"""Prefill in segments on several ranks, as threads: one bucket for all, and no rank waits for one that gave up."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from hypothesis import event, given, settings
from hypothesis import strategies as st

import graphglue as gg
from graphglue.errors import SegmentError
from graphglue.ranks import Planner

from .prefill import DECODE, EXTEND, MAX_REQUESTS, NUM_LAYERS, Prefill, planner, prefill_runner, reference, works_of
from .threads import Exchange, Hang, Meeting, all_well, group_of, meet, together

EAGER, GRAPH = gg.Route.EAGER, gg.Route.GRAPH
SIZE = 3
IN_BREAK = 7  # what the collectives of breaks are told apart by, where those of segments say graph or eager


class Rank:
    """One rank's model: its collectives compare what the ranks came with.

    ``fails`` says how: in "break 0" of a step; or at the bucket of 8, while it is recorded, in "segment 1", in
    "recorded break 0", or in the engine's "hook" around the key.
    """

    def __init__(self, meeting: Meeting, rank: int, joins_in_break: bool) -> None:
        self.meeting, self.rank, self.joins_in_break = meeting, rank, joins_in_break
        self.recording, self.segment, self.fails = False, 0, ""
        self.model = Prefill(self.join, in_break=self.in_break)

    def join(self, rows: torch.Tensor, view: Any) -> torch.Tensor:
        if self.fails == f"segment {self.segment}" and self.recording and view.bucket.tokens == 8:
            float(rows.sum())  # what no recorder takes
        self.segment += 1
        start = view.meeting.start(self.rank)
        buffer = rows.new_zeros(view.meeting.rows, rows.shape[1])
        buffer[start : start + rows.shape[0]] = rows
        meet(buffer, self.meeting.number, self.rank, int(self.recording), view.meeting.rows, 0)
        return buffer

    def in_break(self, rows: torch.Tensor, view: Any, layer: int) -> None:
        recorded = self.recording and view.bucket.tokens == 8
        if self.fails == f"{'recorded ' if recorded else ''}break {layer}":
            raise RuntimeError("this rank's attention fails")
        if self.joins_in_break:
            meet(rows.sum(0), self.meeting.number, self.rank, IN_BREAK, 1, 1)

    @contextmanager
    def record(self, key: Any) -> Iterator[None]:
        if self.fails == "hook" and key.tokens == 8:
            raise RuntimeError("the engine's hook fails")
        self.recording, self.segment = True, 0
        try:
            yield
        finally:
            self.recording = False


class Group:
    """The runners of one group, each in a thread of its own at every call."""

    def __init__(self, size: int = SIZE, joins_in_break: bool = False, plan: Callable[[], Planner] = planner) -> None:
        self.exchange, self.meeting, self.plan = Exchange(size), Meeting(size, timeout_s=3.0), plan
        self.ranks = [Rank(self.meeting, rank, joins_in_break) for rank in range(size)]
        self.models = [rank.model for rank in self.ranks]
        self.runners: list[gg.Runner] = []

    def each(self, run: Callable[[int], Any]) -> list[Any]:
        return together(len(self.ranks), run)

    def build(self, changes: Sequence[dict[str, Any]] = (), **common: Any) -> Group:
        def build(rank: int) -> gg.Runner:
            own = {**common, **(changes[rank] if changes else {})}
            hooks = gg.CaptureHooks(key=self.ranks[rank].record, **own.pop("hooks", {}))
            ranks = group_of(self.exchange, rank, self.plan(), timeout_s=10.0)
            return prefill_runner(ranks, self.models[rank], hooks=hooks, **own)

        self.runners = all_well(self.each(build))
        return self

    def capture(self) -> list[Any]:
        return self.each(lambda rank: self.runners[rank].capture(progress=False))

    def captured(self, *args: Any, **common: Any) -> Group:
        self.build(*args, **common)
        all_well(self.capture())
        return self

    def step(self, loads: Sequence[Sequence[int]], seed: int = 0, modes: Sequence[gg.Mode] = ()) -> list[Any]:
        """Replay a step on all ranks; give each one's step with outputs of its own, or what it raised."""
        works = works_of(loads, seed, modes)
        for model in self.models:
            model.seen.clear()

        def run(rank: int) -> Any:
            step = self.runners[rank].replay(works[rank].batch())
            return step.decision, step.outputs["rows"].clone()

        return self.each(run)


def served(group: Group, loads: Sequence[Sequence[int]], seed: int = 0, modes: Sequence[gg.Mode] = ()) -> list[Any]:
    """Replay a step, hold every rank's rows against the reference, and give the decisions."""
    results = all_well(group.step(loads, seed, modes))
    for (_, rows), expected in zip(results, reference(works_of(loads, seed, modes))):
        assert torch.equal(rows, expected)
    decisions = [decision for decision, _ in results]
    assert len({(decision.forward, decision.bucket) for decision in decisions}) == 1
    return decisions


def saw(group: Group, loads: Sequence[Sequence[int]]) -> bool:
    """Tell whether every rank's breaks ran once each, on its own real rows."""
    expected = [[(layer, sum(lens), list(lens)) for layer in range(NUM_LAYERS)] for lens in loads]
    return [model.seen for model in group.models] == expected


@pytest.fixture(scope="module")
def group() -> Group:
    return Group().captured()


# What every step keeps.

lens = st.lists(st.integers(1, 6), max_size=MAX_REQUESTS)


@settings(max_examples=40)
@given(st.lists(lens, min_size=SIZE, max_size=SIZE), st.integers(0, 2**16))
def test_all_ranks_replay_one_bucket_and_have_their_own_rows(group: Group, loads: list[list[int]], seed: int) -> None:
    decisions = served(group, loads, seed)
    counts = [sum(one) for one in loads]
    bucket = next((size for size in (4, 8, 16) if size >= max(counts)), None)
    wastes = bucket is not None and any(0 < 2 * count < next(s for s in (4, 8, 16) if s >= count) for count in counts)
    assert decisions[0].forward is (GRAPH if bucket is not None and not wastes else EAGER)
    assert saw(group, loads)
    if decisions[0].forward is GRAPH:
        assert decisions[0].bucket == gg.Bucket(MAX_REQUESTS, bucket or 0, 0)
    event(f"{decisions[0].forward.value}, idle {sum(not one for one in loads)}")


def test_the_comparison_of_rows_can_fail(group: Group) -> None:
    group.models[1].table += 1.0
    with pytest.raises(AssertionError):
        served(group, [[3, 2], [8], [1, 4]])
    group.models[1].table -= 1.0
    served(group, [[3, 2], [8], [1, 4]])


def test_the_first_segment_and_its_collective_are_in_one_launch_with_the_fill(group: Group) -> None:
    decision, *_ = served(group, [[16], [3, 2], [9]])
    for runner in group.runners:
        assert runner._capture.launches[decision.key].leads
        parts = [part["break"] for part in runner.stats()["keys"][0]["segments"]]
        assert [part is None for part in parts] == [False] * NUM_LAYERS + [True]


def test_a_collective_in_an_eager_break_meets_on_every_rank() -> None:
    """On an idle rank too, whose breaks have no rows."""
    group = Group(joins_in_break=True).captured()
    for loads in ([[3, 2], [8], [1, 4]], [[7], [], [2, 2]], [[17], [3], []]):
        for seen in group.meeting.signatures:
            seen.clear()
        served(group, loads)
        assert saw(group, loads)
        assert [sum(one[0] == IN_BREAK for one in seen) for seen in group.meeting.signatures] == [NUM_LAYERS] * SIZE
        assert len({tuple(seen) for seen in group.meeting.signatures}) == 1


@pytest.mark.parametrize(
    ("loads", "reasons"),
    [
        ([[3, 2], [2, 2, 2, 2], []], ("padded", "unpadded", "idle")),
        ([[], [], [16]], ("idle", "idle", "padded")),
        ([[], [], []], ("idle", "idle", "idle")),
    ],
)
def test_an_idle_rank_keeps_the_padded_shape_and_its_breaks_see_no_rows(
    group: Group, loads: list[list[int]], reasons: tuple[str, ...]
) -> None:
    decisions = served(group, loads)
    assert {decision.forward for decision in decisions} == {GRAPH}
    assert tuple(decision.reason.value for decision in decisions) == reasons
    assert saw(group, loads)


@pytest.mark.parametrize(("idle", "route"), [("skip", gg.Route.SKIP), ("eager", EAGER), ("glue", gg.Route.GLUE)])
def test_an_idle_rank_s_metadata_is_what_its_contract_says(idle: str, route: gg.Route) -> None:
    calls = [0, 0]

    def prep_of(rank: int) -> Callable[[Any], Any]:
        def prep(view: Any) -> Any:
            calls[rank] += 1
            return {"scale": group.models[rank].scale[view.positions]}

        return prep

    group = Group(2)
    group.build([{"prep": prep_of(rank)} for rank in range(2)], idle=idle)
    all_well(group.capture())
    for loads in ([[3, 2], [8]], [[7], []], [[], [3]], [[2, 2], [4]]):
        before = list(calls)
        decisions = served(group, loads)
        for rank, decision in enumerate(decisions):
            assert decision.forward is GRAPH
            assert decision.prep is (gg.Route.GLUE if loads[rank] else route)
            assert calls[rank] - before[rank] == (decision.prep is EAGER)
        assert saw(group, loads)


def test_a_decode_rank_beside_a_prefilling_peer_becomes_a_one_token_extend(group: Group) -> None:
    loads, modes = [[9, 4], [1, 1, 1], [1, 1]], [EXTEND, DECODE, DECODE]
    decisions = served(group, loads, 1, modes)
    assert {decision.forward for decision in decisions} == {GRAPH}
    assert {decision.key.mode for decision in decisions} == {EXTEND}
    assert saw(group, loads)


def test_a_decode_rank_beside_an_idle_one_keeps_all_eager(group: Group) -> None:
    loads, modes = [[9, 4], [1, 1, 1], []], [EXTEND, DECODE, EXTEND]
    decisions = served(group, loads, 1, modes)
    assert {decision.forward_reason for decision in decisions} == {gg.Reason.AGREED_EAGER}
    assert saw(group, loads)


def test_segments_with_a_collective_share_a_bucket_even_where_none_is_declared() -> None:
    """Counts stay as they are then; the bucket of a graph is one for all ranks, whatever it holds."""
    group = Group(2, plan=lambda: planner(sum_len_tolerated=True)).captured()
    for loads in ([[3, 2], [12]], [[], [4]], [[9], [3]]):
        assert {decision.forward for decision in served(group, loads)} == {GRAPH}


# A rank that objects, or fails.


def test_a_wasteful_prompt_is_a_veto(group: Group) -> None:
    decisions = served(group, [[16], [1], []])
    assert [decision.reason.value for decision in decisions] == ["rank_veto", "waste", "rank_veto"]
    assert saw(group, [[16], [1], []])


def test_a_refused_batch_leaves_the_others_their_step(group: Group) -> None:
    works = works_of([[3, 2], [], [1, 4]])
    odd = gg.Batch(2, {"input_ids": [1, 2], "positions": [0], "lens": [1, 1]}, EXTEND, num_tokens=2)
    batches = [works[0].batch(), odd, works[2].batch()]
    results = group.each(lambda rank: group.runners[rank].replay(batches[rank]))
    assert isinstance(results[1], gg.BindError)
    for rank in (0, 2):
        assert results[rank].decision.reason is gg.Reason.RANK_VETO
        assert torch.equal(results[rank].outputs["rows"], reference(works)[rank])
    served(group, [[3, 2], [8], [1, 4]])


@pytest.mark.parametrize("layer", range(NUM_LAYERS))
@pytest.mark.parametrize("loads", [[[3, 2], [8], [1, 4]], [[9], [], [2]]])
def test_a_break_that_raises_leaves_no_rank_waiting(group: Group, layer: int, loads: list[list[int]]) -> None:
    """The collectives of the later segments run, and the rank's error comes out behind them."""
    group.ranks[1].fails = f"break {layer}"
    for seen in group.meeting.signatures:
        seen.clear()
    results = group.step(loads)
    group.ranks[1].fails = ""
    assert isinstance(results[1], SegmentError)
    assert "this rank's attention fails" in str(results[1])
    assert [result[0].forward for result in (results[0], results[2])] == [GRAPH] * 2
    assert [len(seen) for seen in group.meeting.signatures] == [NUM_LAYERS + 1] * SIZE
    served(group, loads, 5)


def test_a_break_that_raises_leaves_ranks_waiting_where_a_replay_ends_with_it() -> None:
    """What the rule is for: without it the others are left in a collective."""
    group = Group(2).captured()
    group.ranks[1].fails = "break 0"
    group.runners[1]._stepper.forwards.keep_going = False
    results = group.step([[3, 2], [8]])
    assert isinstance(results[0], Hang)
    assert isinstance(results[1], SegmentError)


def test_a_prep_that_raises_beside_segments_leaves_no_rank_waiting() -> None:
    broken = [False]

    def prep(view: Any) -> Any:
        if broken[0]:
            raise RuntimeError("no metadata today")
        return {"scale": group.models[1].scale[view.positions]}

    group = Group(2)
    group.captured([{}, {"prep": prep, "config": {"glue": {"scales": "off"}}}])
    served(group, [[3, 2], [8]])
    broken[0] = True
    results = group.step([[3, 2], [8]])
    assert results[0][0].forward is GRAPH
    assert str(results[1]) == "no metadata today"
    broken[0] = False
    served(group, [[7], [3, 2]])


class Indexing(Prefill):
    """Looks its scales up in the forward, between the breaks."""

    def __call__(self, view: Any, metadata: Any) -> Any:
        return super().__call__(view, {"scale": self.scale[metadata["scale"]]})


@pytest.mark.parametrize(
    ("way", "told"), [("raises", "no metadata today"), ("changes", "a prep that ran eagerly returned other metadata")]
)
def test_a_forward_that_others_wait_in_reads_no_metadata_that_another_bucket_overwrote(way: str, told: str) -> None:
    """The prep of this bucket gave none, and a larger one's graph has replayed since its last: an index would fault."""
    broken = [False]

    def prep_of(rank: int) -> Callable[[Any], Any]:
        def prep(view: Any) -> Any:
            if not (broken[0] and rank):
                return {"scale": view.positions + 0}
            if way == "raises":
                raise RuntimeError("no metadata today")
            return {"scale": view.positions + 0, "more": view.positions + 1}

        return prep

    group = Group(2)
    for model in group.models:
        model.__class__ = Indexing
    group.captured([{"prep": prep_of(rank)} for rank in range(2)], idle="eager")
    served(group, [[3], [2]])
    served(group, [[9], [12]])
    broken[0] = True
    results = group.step([[3], []])
    assert results[0][0].forward is GRAPH
    assert told in str(results[1])
    broken[0] = False
    served(group, [[3], []])


# Capture: recording in segments runs their collectives for real.


def causes_at(tokens: int, group: Group) -> list[str]:
    """Tell why each rank's forward is quarantined at a bucket."""
    keys = [next(key for key in runner.stats()["keys"] if key["bucket"][1] == tokens) for runner in group.runners]
    return [key["causes"].get("forward", "") for key in keys]


WAYS = ["segment 0", "segment 1", "segment 2", "recorded break 0", "recorded break 1", "hook"]


@pytest.mark.parametrize("way", WAYS)
def test_a_rank_that_fails_to_record_leaves_no_rank_waiting(way: str) -> None:
    group = Group(2).build()
    group.ranks[1].fails = way
    begin = time.monotonic()
    all_well(group.capture())
    assert time.monotonic() - begin < 2.5  # nobody waited for a time-out
    causes = causes_at(8, group)
    assert causes[1]
    ends = way in ("segment 2", "recorded break 1")  # nothing runs behind the last break, so nobody is kept from it
    assert causes[0] == "" if ends else "another rank could not record it" in causes[0]
    assert {one.forward_reason for one in served(group, [[3, 2], [8]])} == {gg.Reason.AGREED_EAGER}
    for loads in ([[16], [9]], [[4], []]):
        assert {one.forward for one in served(group, loads)} == {GRAPH}
    group.ranks[1].fails = ""
    repaired = all_well(group.each(lambda rank: group.runners[rank].maintain()))
    assert [[key.tokens for key in keys] for keys in repaired] == [[8], [8]]
    assert {one.forward for one in served(group, [[3, 2], [8]])} == {GRAPH}


def test_ranks_wait_for_one_that_fails_to_record_where_they_do_not_vote() -> None:
    """What the votes are for."""
    group = Group(2).build()
    group.ranks[1].fails = "segment 1"
    for runner in group.runners:
        runner._capture.lockstep.votes = None
    group.capture()
    assert "Hang(" in causes_at(8, group)[0]


def test_a_rank_that_fails_to_warm_up_keeps_all_from_recording() -> None:
    """Its forward raises behind its last collective; the others would wait for it in the recording."""
    group = Group(2).build()

    class Late(Prefill):
        def __call__(self, view: Any, metadata: Any) -> Any:
            outputs = Prefill.__call__(self, view, metadata)
            if view.bucket.tokens == 8 and self.fails:
                raise RuntimeError("out of something")
            return outputs

        fails = True

    group.models[1].__class__ = Late
    all_well(group.capture())
    causes = causes_at(8, group)
    assert "another rank could not run it" in causes[0]
    assert "out of something" in causes[1]
    Late.fails = False
    assert {one.forward_reason for one in served(group, [[3, 2], [8]])} == {gg.Reason.AGREED_EAGER}
    assert {one.forward for one in served(group, [[16], [9]])} == {GRAPH}
    all_well(group.each(lambda rank: group.runners[rank].maintain()))
    assert {one.forward for one in served(group, [[3, 2], [8]])} == {GRAPH}


class Shallow(Prefill):
    """A layer without attention, so one break less."""

    def __call__(self, view: Any, metadata: Any) -> Any:
        rows = self.table[view.input_ids] * metadata["scale"][:, None]
        rows = rows + self.shared(rows, view)
        rows = rows + self.attend(rows, view, 0)
        rows = rows + self.shared(rows, view)
        return {"rows": rows + self.shared(rows, view)}


class Renamed(Prefill):
    """As many breaks, and one of another name."""

    def __call__(self, view: Any, metadata: Any) -> Any:
        @gg.eager_break(row_aligned=("rows",))
        def mixed(rows: torch.Tensor) -> torch.Tensor:
            return rows * 1

        rows = self.table[view.input_ids] * metadata["scale"][:, None]
        rows = rows + self.shared(rows, view)
        for layer in range(NUM_LAYERS):
            rows = rows + (mixed(rows) if layer else self.attend(rows, view, layer))
            rows = rows + self.shared(rows, view)
        return {"rows": rows}


class Unbroken(Prefill):
    """No breaks at all, and the same collectives."""

    def __call__(self, view: Any, metadata: Any) -> Any:
        rows = self.table[view.input_ids] * metadata["scale"][:, None]
        for _ in range(NUM_LAYERS + 1):
            rows = rows + self.shared(rows, view)
        return {"rows": rows}


@pytest.mark.parametrize("odd", [Shallow, Renamed, Unbroken])
def test_ranks_that_reach_other_breaks_are_told_at_capture(odd: type[Prefill]) -> None:
    group = Group(SIZE).build()
    group.models[1].__class__ = odd
    begin = time.monotonic()
    results = group.capture()
    assert time.monotonic() - begin < 2.5
    for result in results:
        assert isinstance(result, gg.RankDisagreementError)
        assert "rank 1 was built with forward 0 (extend 4x16) reaching the eager breaks" in str(result)
        assert "'Prefill.__init__" not in str(result)
    for runner in group.runners:
        assert {state for key in runner.stats()["keys"] for state in key["states"].values()} <= {"cold"}


def test_a_rank_that_takes_another_way_while_it_is_recorded_fails_alone_and_nobody_waits() -> None:
    """Its warm-ups reached what all ranks reach."""
    group = Group(2).build()

    class Wavering(Shallow):
        def __call__(self, view: Any, metadata: Any) -> Any:
            odd = group.ranks[1].recording and view.bucket.tokens == 8
            return (Shallow if odd else Prefill).__call__(self, view, metadata)

    group.models[1].__class__ = Wavering
    all_well(group.capture())
    assert "expected" in causes_at(8, group)[1]
    assert {one.forward_reason for one in served(group, [[3, 2], [8]])} == {gg.Reason.AGREED_EAGER}
    assert {one.forward for one in served(group, [[16], [9]])} == {GRAPH}


def test_a_broken_declaration_while_recording_ends_one_rank_s_capture() -> None:
    """It raises when the rank has taken part in the whole capture."""
    group = Group(2).build()

    @contextmanager
    def undeclared(key: Any) -> Iterator[None]:
        with Rank.record(group.ranks[1], key):
            yield
        if key.tokens == 8:
            raise gg.ContractError("the hook found another contract")

    group.runners[1]._capture._hooks = gg.CaptureHooks(key=undeclared)
    results = group.capture()
    assert results[0] is None
    assert isinstance(results[1], gg.ContractError)


def test_the_engine_s_barrier_is_met_before_every_segment_that_runs_in_a_capture() -> None:
    barrier, calls = threading.Barrier(2), [0, 0]

    def met(rank: int) -> Callable[[], None]:
        def meet_all() -> None:
            calls[rank] += 1
            barrier.wait(5.0)

        return meet_all

    group = Group(2).captured([{"hooks": {"barrier": met(rank)}} for rank in range(2)])
    assert calls == [NUM_LAYERS * 3] * 2
    served(group, [[3, 2], [8]])
    assert calls == [NUM_LAYERS * 3] * 2
