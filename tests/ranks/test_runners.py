"""Runners of several ranks, as threads: whatever one rank knows, all go one way, and each has its own rows."""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import event, given, settings
from hypothesis import strategies as st

import graphglue as gg
from graphglue.ranks import Padding, Planner, RankFacts, RankGroup, RankPlan, Role
from graphglue.ranks.facts import stacked

from .threads import (
    SLOTS,
    Exchange,
    Meeting,
    Model,
    all_well,
    batch_of,
    group_of,
    length_prep,
    own_of,
    runner_of,
    together,
)  # fmt: skip

EAGER, GRAPH = gg.Route.EAGER, gg.Route.GRAPH
SIZE = 3


class Group:
    """Runners of one group that stay captured; every call runs on all ranks at once."""

    def __init__(self, size: int, planner: Callable[[], Planner], **runner: Any) -> None:
        self.size, self.exchange, self.meeting = size, Exchange(size), Meeting(size)
        self.models = [Model(self.meeting, rank) for rank in range(size)]
        configs = runner.pop("configs", [{}] * size)

        def build(rank: int) -> gg.Runner:
            group = group_of(self.exchange, rank, planner(), **runner.get("group", {}))
            options = {name: value for name, value in runner.items() if name != "group"}
            built = runner_of(group, self.models[rank], **options, **configs[rank])
            built.capture(progress=False)
            return built

        self.runners: list[gg.Runner] = all_well(together(size, build))

    def each(self, run: Callable[[int, gg.Runner], Any]) -> list[Any]:
        return together(self.size, lambda rank: run(rank, self.runners[rank]))

    def step(self, batches: list[gg.Batch]) -> list[Any]:
        def run(rank: int, runner: gg.Runner) -> Any:
            step = runner.replay(batches[rank])
            outputs = {name: leaf.tolist() for name, leaf in step.outputs.items()}
            counts = runner.view(runner.space.ladder.largest).rank_counts.tolist()
            return SimpleNamespace(decision=step.decision, raw=step.raw, outputs=outputs, counts=counts)

        return self.each(run)


def check_outputs(steps: list[Any], tokens: list[int]) -> None:
    """Check every rank's rows against the sum over all ranks, computed here."""
    total = sum(sum(own_of(count)) for count in tokens)
    for step, count in zip(steps, tokens):
        assert step.outputs["own"] == own_of(count)
        assert step.outputs["all"] == [total + own for own in own_of(count)]


@pytest.fixture(scope="module")
def group() -> Group:
    """Three ranks, of which the last admits less: it is over its waste limit at 5 requests of 8."""
    return Group(SIZE, lambda: Planner([1, 2, 4, 8], row_bytes=1), configs=[{}, {}, {"waste_limit": 1.5}])


# What every step keeps.

requests = st.one_of(st.integers(0, 8), st.integers(0, 10))


@settings(max_examples=60)
@given(st.lists(requests, min_size=SIZE, max_size=SIZE), st.integers(0, 2**16))
def test_all_ranks_go_one_way_and_have_their_own_rows(group: Group, loads: list[int], seed: int) -> None:
    """With delays on the way, so that the ranks come in any order."""
    jitter = random.Random(seed)
    group.exchange.delay = lambda rank, call: jitter.random() * 0.002
    steps = all_well(group.step([batch_of(load) for load in loads]))
    assert len({(step.decision.forward, step.decision.bucket) for step in steps}) == 1
    check_outputs(steps, loads)
    decision = steps[0].decision
    own_veto = (
        loads[2] in (5,)
        or loads[2] > 8
        or (loads[2] and 1.5 * loads[2] < next(s for s in (1, 2, 4, 8) if s >= loads[2]))
    )
    assert decision.forward is (EAGER if max(loads) > 8 or own_veto else GRAPH)
    if decision.forward is GRAPH:
        assert all(step.counts == [decision.bucket.tokens] * SIZE for step in steps)
    event(f"{decision.forward.value}, idle {loads.count(0)}")


def test_the_comparison_of_outputs_can_fail(group: Group) -> None:
    steps = all_well(group.step([batch_of(3), batch_of(2), batch_of(1)]))
    with pytest.raises(AssertionError):
        check_outputs(steps, [3, 2, 2])


@pytest.mark.parametrize(
    ("loads", "forward", "reasons"),
    [
        ((3, 2, 1), GRAPH, ("padded", "padded", "padded")),
        ((8, 8, 8), GRAPH, ("unpadded", "unpadded", "unpadded")),
        ((3, 0, 0), GRAPH, ("padded", "idle", "idle")),
        ((0, 0, 0), GRAPH, ("idle", "idle", "idle")),
        ((9, 0, 1), EAGER, ("over_ladder", "rank_veto", "rank_veto")),
        ((1, 2, 5), EAGER, ("rank_veto", "rank_veto", "waste")),
        ((9, 2, 5), EAGER, ("rank_veto", "rank_veto", "rank_veto")),  # two vetoes: each hears of the other
    ],
)
def test_each_rank_says_why(group: Group, loads: tuple[int, ...], forward: gg.Route, reasons: tuple[str, ...]) -> None:
    """Counts beyond one rank's ladder go eager on all of them (OVER-CAP-3)."""
    group.exchange.delay = lambda rank, call: 0.0
    steps = all_well(group.step([batch_of(load) for load in loads]))
    assert [step.decision.forward for step in steps] == [forward] * SIZE
    assert tuple(step.decision.reason.value for step in steps) == reasons
    check_outputs(steps, list(loads))


def test_an_eager_step_uses_the_agreed_counts(group: Group) -> None:
    """SUM_LEN, because all have tokens and the rows fit: each rank's own; with an idle rank MAX_LEN by cost."""
    group.exchange.delay = lambda rank, call: 0.0
    for loads, counts in (((9, 8, 7), (9, 8, 7)), ((9, 9, 0), (9, 9, 9))):
        for seen in group.meeting.signatures:
            seen.clear()
        steps = all_well(group.step([batch_of(load) for load in loads]))
        rows = sum(counts)
        assert {seen[:2] for one in group.meeting.signatures for seen in one} == {(0, rows)}
        assert {step.decision.bucket for step in steps} == {gg.Bucket(9, 9, 1)}


# A rank that fails.


def moved(runner: gg.Runner) -> None:
    raise gg.StaleTableError("the table moved")


def test_a_refused_batch_is_agreed_on_before_it_raises(group: Group) -> None:
    short = gg.Batch(3, {"seq_lens": [1], "input_ids": [1, 2, 3]})
    before = [view.clone() for view in (group.runners[0].view(8)[slot.name] for slot in SLOTS)]
    results = group.step([short, batch_of(2), batch_of(1)])
    assert isinstance(results[0], gg.BindError)
    assert [result.decision.reason.value for result in results[1:]] == ["rank_veto", "rank_veto"]
    for old, slot in zip(before, SLOTS):
        assert torch.equal(old, group.runners[0].view(8)[slot.name])  # a refused call has written nothing
    check_outputs(all_well(group.step([batch_of(1), batch_of(2), batch_of(1)])), [1, 2, 1])


@pytest.mark.parametrize(
    "batch",
    [
        gg.Batch(3, {"seq_lens": [1, 2, 3]}),
        gg.Batch(3, {"seq_lens": [1, 2, 3], "input_ids": [1, 2, 3], "other": [1]}),
        gg.Batch(2, {"seq_lens": [1, 2], "input_ids": [1, 2, 3]}, num_tokens=3),
        gg.Batch(-1, {}),
        "no batch at all",
        gg.Batch(2, {"seq_lens": [1, 2], "input_ids": [1, 2]}, variant=[]),
        gg.Batch(2, 7, features=frozenset()),  # type: ignore[arg-type]
    ],
)
def test_whatever_is_wrong_with_a_batch_the_others_go_on(group: Group, batch: Any) -> None:
    results = group.step([batch_of(2), batch, batch_of(1)])
    assert isinstance(results[1], gg.BindError)
    assert results[0].decision.forward is results[2].decision.forward is EAGER
    check_outputs([results[0], results[2]], [2, 1])


def test_a_step_of_an_unknown_variant_is_a_veto(group: Group) -> None:
    """Nobody has captured it; and a batch of another width is none of the buckets."""
    for odd in (batch_of(2, variant="lora"), batch_of(2, 4)):
        steps = all_well(group.step([batch_of(2), odd, batch_of(1)]))
        assert {step.decision.forward for step in steps} == {EAGER}


def test_a_moved_table_is_a_refusal() -> None:
    tables = [[torch.zeros(4)], [torch.zeros(4)]]

    def build(rank: int, exchange: Exchange, meeting: Meeting) -> gg.Runner:
        model = Model(meeting, rank)
        registry = gg.Registry()
        contract = gg.PrepContract(name="lengths", reads={"seq_lens": 1}, tables=("t",), modes={gg.Mode.DECODE})
        registry.register(contract)(lambda view: {"total": view.seq_lens.sum() + view.tables.t[0]})
        runner = gg.Runner(
            slots=SLOTS, ladder=[2], registry=registry, prep="lengths", forward=model, output_axes="token",
            tables={"t": lambda: tables[rank][0]}, ranks=group_of(exchange, rank, Planner([2])),
            hooks=gg.CaptureHooks(key=model.record),
        )  # fmt: skip
        runner.capture(progress=False)
        return runner

    exchange, meeting = Exchange(2), Meeting(2)
    runners = all_well(together(2, lambda rank: build(rank, exchange, meeting)))
    tables[1][0] = torch.zeros(4)
    results = together(2, lambda rank: runners[rank].replay(batch_of(2)))
    assert isinstance(results[1], gg.StaleTableError)
    assert results[0].decision.reason is gg.Reason.RANK_VETO
    assert results[0].outputs["all"].tolist() == [3 + own for own in own_of(2)]  # rank 1 took part, with no rows
    runners[1].rebind_table("t", lambda: tables[1][0])
    steps = all_well(together(2, lambda rank: runners[rank].replay(batch_of(2))))
    assert {step.decision.forward for step in steps} == {EAGER}  # rank 1 dropped its graphs, and says so
    assert steps[0].decision.forward_reason is gg.Reason.AGREED_EAGER
    repaired = all_well(together(2, lambda rank: runners[rank].maintain()))
    assert [len(keys) for keys in repaired] == [1, 1]
    steps = all_well(together(2, lambda rank: runners[rank].replay(batch_of(2))))
    assert {step.decision.forward for step in steps} == {GRAPH}


class Breaking:
    """A prep that raises at one bucket, on one rank, for as long as it is told to."""

    def __init__(self) -> None:
        self.at: int | None = None

    def __call__(self, view: gg.View) -> dict[str, torch.Tensor]:
        if view.bucket.requests == self.at:
            raise RuntimeError("this rank can not prepare that bucket")
        return length_prep(view)


class BreakingModel(Model):
    """A forward that reads a tensor on the host: warm-ups pass, and no recorder takes it."""

    at: int | None = None

    def __call__(self, view: gg.View, metadata: Any) -> dict[str, torch.Tensor]:
        if view.bucket.requests == self.at:
            float(view.input_ids.sum())
        return super().__call__(view, metadata)


@pytest.mark.parametrize("part", ["prep", "forward"])
def test_a_rank_that_fails_to_capture_keeps_all_from_that_bucket(part: str) -> None:
    """And no rank leaves the others waiting in a warm-up or a capture (RANK-SPLIT-7)."""
    exchange, meeting = Exchange(2), Meeting(2)
    preps, models = [Breaking(), Breaking()], [BreakingModel(meeting, rank) for rank in range(2)]
    broken: Any = preps[1] if part == "prep" else models[1]
    broken.at = 4

    def build(rank: int) -> gg.Runner:
        runner = runner_of(group_of(exchange, rank, Planner([2, 4, 8])), models[rank], prep=preps[rank])
        runner.capture(progress=False)
        return runner

    runners = all_well(together(2, build))
    if part == "forward":
        assert {seen[0] for one in meeting.signatures for seen in one} == {0}  # warm-ups, on both ranks alike

    def step(*loads: int) -> list[gg.Decision]:
        results = all_well(together(2, lambda rank: runners[rank].replay(batch_of(loads[rank]))))
        return [result.decision for result in results]

    assert {decision.forward for decision in step(2, 1)} == {GRAPH}
    assert {decision.forward for decision in step(8, 5)} == {GRAPH}
    if part == "forward":
        decisions = step(3, 1)
        assert {decision.forward for decision in decisions} == {EAGER}
        assert {decision.forward_reason for decision in decisions} == {gg.Reason.AGREED_EAGER}
    broken.at = None
    assert {decision.forward for decision in step(3, 1)} == {EAGER}  # until it is repaired
    repaired = all_well(together(2, lambda rank: runners[rank].maintain()))
    assert [[key.requests for key in keys] for keys in repaired] == [[4], [4]]
    assert {decision.forward for decision in step(3, 1)} == {GRAPH}
    assert {decision.bucket for decision in step(3, 1)} == {gg.Bucket(4, 4, 1)}
    assert all_well(together(2, lambda rank: runners[rank].maintain())) == [[], []]


def test_a_broken_declaration_on_one_rank_ends_its_capture_and_nobody_else_s() -> None:
    """It goes through the whole capture, because the others warm their forwards up together with it."""
    exchange, meeting = Exchange(2), Meeting(2)
    runners: dict[int, gg.Runner] = {}

    def build(rank: int) -> gg.Runner:
        prep = (lambda view: "no tensor at all") if rank == 1 else length_prep
        runners[rank] = runner_of(group_of(exchange, rank, Planner([2, 4])), Model(meeting, rank), prep=prep)
        runners[rank].capture(progress=False)
        return runners[rank]

    results = together(2, build)
    assert isinstance(results[1], gg.ContractError)
    assert isinstance(results[0], gg.Runner)
    decision = together(2, lambda rank: runners[rank].facts(batch_of(2)))
    assert [facts.missing for facts in decision] == [0b11, 0b11]  # no forward was warmed up alone


def test_an_idle_rank_takes_any_variant(group: Group) -> None:
    steps = all_well(group.step([batch_of(2), gg.Batch.idle(variant="lora"), batch_of(1)]))
    assert {step.decision.forward for step in steps} == {GRAPH}


def test_an_eager_prep_that_changes_its_metadata_fails_behind_the_step() -> None:
    """The ranks have agreed on the graph, so it runs, and the rank whose metadata is void says so afterwards."""
    wide = [False, False]

    def prep_of(rank: int) -> Callable[[gg.View], dict[str, torch.Tensor]]:
        return lambda view: {"total": view.seq_lens.sum().reshape(1).expand(2 if wide[rank] else 1).clone()}

    exchange, meeting = Exchange(2), Meeting(2)

    def build(rank: int) -> gg.Runner:
        group = group_of(exchange, rank, Planner([2]))
        runner = runner_of(group, Model(meeting, rank), prep=prep_of(rank), glue={"lengths": "off"})
        runner.capture(progress=False)
        return runner

    runners = all_well(together(2, build))
    wide[1] = True
    results = together(2, lambda rank: runners[rank].replay(batch_of(2)))
    assert isinstance(results[1], gg.ContractError)
    assert "agreed" in str(results[1])
    assert results[0].decision.forward is GRAPH
    assert results[0].outputs["all"].tolist() == [6 + own for own in own_of(2)]
    wide[1] = False
    steps = all_well(together(2, lambda rank: runners[rank].replay(batch_of(2))))
    assert {step.decision.forward for step in steps} == {GRAPH}


# Plans that the engine got itself.


def test_an_engine_may_exchange_the_facts_itself(group: Group) -> None:
    calls = list(group.exchange.calls)
    loads = [3, 0, 1]
    facts = all_well(group.each(lambda rank, runner: runner.facts(batch_of(loads[rank]))))
    plan = Planner([1, 2, 4, 8], row_bytes=1).plan_encoded(stacked(facts))
    steps = all_well(group.each(lambda rank, runner: runner.replay(batch_of(loads[rank]), plan=plan)))
    assert {(step.decision.forward, step.decision.bucket) for step in steps} == {(GRAPH, gg.Bucket(4, 4, 1))}
    assert group.exchange.calls == calls  # nothing was exchanged by the runners


def test_facts_of_a_refused_batch_say_so(group: Group) -> None:
    facts = group.runners[0].facts(gg.Batch(3, {}))
    assert facts.refused
    assert (facts.requests, facts.vote) == (0, False)


@pytest.mark.parametrize("plan", ["a plan", Planner([8]).plan([RankFacts(1, 1, gg.Mode.DECODE)] * 2)])
def test_a_plan_of_another_group_is_refused(group: Group, plan: Any) -> None:
    with pytest.raises(gg.ConfigError, match="RankPlan of all 3 ranks"):
        group.runners[0].replay(batch_of(1), plan=plan)


def test_a_plan_that_does_not_cover_the_batch_is_refused_behind_the_step(group: Group) -> None:
    """The others go by it, so this rank joins them with no rows."""
    plan = Planner([1, 2, 4, 8], row_bytes=1).plan([RankFacts(1, 1, gg.Mode.DECODE)] * SIZE)
    loads = [1, 1, 3]
    results = group.each(lambda rank, runner: runner.replay(batch_of(loads[rank]), plan=plan))
    assert isinstance(results[2], gg.BindError)
    assert "the plan gives it" in str(results[2])
    assert [result.outputs["all"].tolist() for result in results[:2]] == [[3], [3]]


def test_a_graph_that_a_rank_lost_after_its_vote_is_an_error_that_says_so() -> None:
    """It joins the step's collectives first, eagerly; here they tell that apart, a device may not."""
    lonely = Group(2, lambda: Planner([2]))
    facts = [runner.facts(batch_of(2)) for runner in lonely.runners]
    plan = Planner([2]).plan(facts)
    lonely.runners[1].reset()
    for seen in lonely.meeting.signatures:
        seen.clear()
    results = lonely.each(lambda rank, runner: runner.replay(batch_of(2), plan=plan))
    assert isinstance(results[1], gg.RankDisagreementError)
    assert "no graph there" in str(results[1])
    assert lonely.meeting.signatures == [[(1, 4, 1)], [(0, 4, 1)]]


# Engines that own their forward.


def prepared_runners(exchange: Exchange) -> list[gg.Runner]:
    def build(rank: int) -> gg.Runner:
        registry = gg.Registry()
        contract = gg.PrepContract(name="lengths", reads={"seq_lens": 1}, modes={gg.Mode.DECODE}, idle="glue")
        registry.register(contract)(length_prep)
        group = group_of(exchange, rank, Planner([2, 4, 8]))
        runner = gg.Runner(slots=SLOTS, ladder=[2, 4, 8], registry=registry, prep="lengths", ranks=group)
        runner.capture(progress=False)
        return runner

    return all_well(together(2, build))


def test_an_engine_s_own_forward_is_prepared_for_at_the_agreed_bucket() -> None:
    runners = prepared_runners(Exchange(2))
    loads = (3, 7)
    steps = all_well(together(2, lambda rank: runners[rank].prepare(batch_of(loads[rank]))))
    for step, load in zip(steps, loads):
        assert (step.decision.prep, step.decision.bucket) == (gg.Route.GLUE, gg.Bucket(8, 8, 1))
        assert step.view.seq_lens.tolist() == [*range(1, load + 1), *[1] * (8 - load)]
        assert step.view.rank_counts.tolist() == [8, 8]
    over = together(2, lambda rank: runners[rank].prepare(batch_of((3, 9)[rank])))
    assert isinstance(over[1], gg.CapacityError)  # nothing could run it, so it is refused
    assert (over[0].decision.forward, over[0].decision.reason) == (EAGER, gg.Reason.RANK_VETO)
    assert over[0].decision.bucket == gg.Bucket(3, 3, 1)


def test_an_adopted_forward_is_agreed_on_as_well() -> None:
    """Rank 1 has adopted none for the bucket of 4, so nobody replays there."""
    runners = prepared_runners(Exchange(2))
    for rank, runner in enumerate(runners):
        for size in (2, 4, 8):
            if (rank, size) == (1, 4):
                continue
            view = runner.view(size)

            def forward(view: gg.View = view) -> torch.Tensor:
                return view.input_ids + 5

            with gg.Tape().session():
                recording = gg.Tape().record(forward)
            runner.adopt_forward(size, recording, recording.outputs)
    for loads, forward in (((2, 1), GRAPH), ((3, 1), EAGER), ((7, 1), GRAPH)):
        steps = all_well(together(2, lambda rank, loads=loads: runners[rank].replay(batch_of(loads[rank]))))
        assert {step.decision.forward for step in steps} == {forward}
        if forward is GRAPH:
            assert [step.outputs.tolist() for step in steps] == [[row + 5 for row in range(load)] for load in loads]


# A draft that is local to its rank.


def test_a_draft_without_ranks_does_not_vote(group: Group) -> None:
    """Each rank drafts as often as it likes, between the steps that are agreed."""

    def draft_runner() -> gg.Runner:
        runner = gg.Runner(slots=SLOTS[:2], ladder=[2, 4], prep=length_prep, forward=lambda view, m: view.input_ids + 1)
        runner.capture(progress=False)
        return runner

    drafts = [draft_runner() for _ in range(SIZE)]
    calls = list(group.exchange.calls)

    def run(rank: int, runner: gg.Runner) -> list[Any]:
        for draft in range(rank):  # rank 0 does not draft at all, rank 2 twice
            step = drafts[rank].replay(batch_of(draft + 1))
            assert step.outputs.tolist() == [token + 1 for token in range(draft + 1)]
        return runner.replay(batch_of(rank)).outputs["own"].tolist()

    assert all_well(group.each(run)) == [own_of(rank) for rank in range(SIZE)]
    assert [now - then for now, then in zip(group.exchange.calls, calls)] == [1] * SIZE


# EXTEND.


@pytest.fixture(scope="module")
def prefill() -> Group:
    return Group(SIZE, lambda: Planner([8, 16, 64], alignment=4, max_requests=8), modes=(gg.Mode.EXTEND,))


def prompt(requests: int, tokens: int = 0) -> gg.Batch:
    return batch_of(requests, tokens, gg.Mode.EXTEND)


def test_prefill_ranks_share_the_smallest_bucket_that_covers_the_largest(prefill: Group) -> None:
    steps = all_well(prefill.step([prompt(1, 14), prompt(2, 9), prompt(0)]))
    assert {(step.decision.forward, step.decision.bucket) for step in steps} == {(GRAPH, gg.Bucket(8, 16, 0))}
    assert steps[0].decision.key.padding is Padding.MAX_LEN
    check_outputs(steps, [14, 9, 0])
    assert steps[2].counts == [16] * SIZE


def test_a_decode_rank_becomes_a_one_token_extend(prefill: Group) -> None:
    steps = all_well(prefill.step([prompt(1, 14), batch_of(5), batch_of(6)]))
    assert {(step.decision.forward, step.decision.bucket) for step in steps} == {(GRAPH, gg.Bucket(8, 16, 0))}
    assert {step.decision.key.mode for step in steps} == {gg.Mode.EXTEND}
    check_outputs(steps, [14, 5, 6])


def test_a_decode_rank_beside_an_idle_one_keeps_all_eager(prefill: Group) -> None:
    """Conversion needs tokens everywhere; else the graph of the prefilling rank would meet a decode step."""
    steps = all_well(prefill.step([prompt(1, 14), batch_of(5), prompt(0)]))
    assert {step.decision.forward for step in steps} == {EAGER}
    assert {step.decision.forward_reason for step in steps} == {gg.Reason.AGREED_EAGER}
    check_outputs(steps, [14, 5, 0])


def test_a_wasteful_prompt_is_a_veto(prefill: Group) -> None:
    """20 tokens in a bucket of 64."""
    steps = all_well(prefill.step([prompt(1, 14), prompt(2, 20), prompt(1, 64)]))
    assert [step.decision.reason.value for step in steps] == ["rank_veto", "waste", "rank_veto"]
    check_outputs(steps, [14, 20, 64])


def test_a_plan_of_an_idle_rank_says_how_many_rows_it_makes_up() -> None:
    facts = [RankFacts(1, 14, gg.Mode.EXTEND), RankFacts(0, 0, gg.Mode.EXTEND)]
    plan = Planner([8, 16], max_requests=8).plan(facts)
    assert [plan.fabricated(rank) for rank in range(2)] == [0, 16]
    assert plan.roles == (Role.REAL, Role.IDLE)


# Construction.


def test_a_runner_and_its_ranks_plan_for_one_ladder() -> None:
    exchange = Exchange(1)
    group = group_of(exchange, 0, Planner([2, 4], width=2))
    options: dict[str, Any] = {"slots": SLOTS, "prep": length_prep, "ranks": group}
    with pytest.raises(gg.ConfigError, match=r"tokens_per_request=1, but the ranks plan for width=2"):
        gg.Runner(ladder=[2, 4], **options)
    with pytest.raises(gg.ConfigError, match=r"ladder \[2, 8\] rounds to \[2, 8\] at alignment 1"):
        gg.Runner(ladder=[2, 8], tokens_per_request=2, **options)
    with pytest.raises(gg.ConfigError, match=r"expected a graphglue\.ranks\.RankGroup"):
        gg.Runner(ladder=[2, 4], **{**options, "ranks": object()})


def test_sizes_are_rounded_to_the_alignment_once() -> None:
    """In requests: with four tokens each, two requests are a multiple of eight."""
    planner = Planner([1, 2, 3, 8], alignment=8, width=4)
    assert list(planner.ladder) == [2, 4, 8]
    group = group_of(Exchange(1), 0, planner)
    runner = gg.Runner(slots=SLOTS, ladder=[1, 2, 3, 8], prep=length_prep, ranks=group, tokens_per_request=4)
    assert [bucket.tokens for bucket in runner.buckets] == [8, 16, 32]


def test_contracts_are_compared_at_start_up() -> None:
    exchange, meeting = Exchange(2), Meeting(2)

    def build(rank: int) -> gg.Runner:
        return runner_of(group_of(exchange, rank, Planner([2])), Model(meeting, rank), ragged=rank == 1)

    results = together(2, build)
    assert all(isinstance(result, gg.RankDisagreementError) for result in results)
    assert "contract 'lengths'" in str(results[0])


def test_a_runner_alone_takes_no_plan() -> None:
    runner = gg.Runner(slots=SLOTS, ladder=[2], prep=length_prep)
    plan = Planner([2]).plan([RankFacts(1, 1, gg.Mode.DECODE)])
    with pytest.raises(gg.ConfigError, match="no ranks"):
        runner.replay(batch_of(1), plan=plan)
    with pytest.raises(gg.ConfigError, match="no ranks"):
        runner.facts(batch_of(1))


def test_a_late_rank_is_named() -> None:
    """It hangs elsewhere, so the others give up in time and say who it was."""
    exchange = Exchange(3)

    def run(rank: int) -> RankPlan | float:
        group: RankGroup = group_of(exchange, rank, Planner([2]), timeout_s=0.5)
        group.agree(RankFacts(1, 1, gg.Mode.DECODE))
        if rank == 1:
            time.sleep(1.5)
            return 0.0
        return group.agree(RankFacts(1, 1, gg.Mode.DECODE))

    results = together(3, run)
    for rank in (0, 2):
        assert isinstance(results[rank], gg.RankDisagreementError)
        assert "rank 1 did not come to it" in str(results[rank])
