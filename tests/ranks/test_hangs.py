"""The six ways in which data-parallel ranks hang, each prevented by a rule; without the rule the test sees the hang.

The catalogue: (a) a graph on one rank and an eager step on another, (b) two buckets, (c) two kinds of collective
in one bucket, (d) a size chosen from a rank's own floats, (e) a rank that leaves the step while its peers wait,
(f) a vote that is asked again when the forward runs.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

import graphglue as gg
from graphglue import agreeing
from graphglue.agreeing import Agreement
from graphglue.ranks import Padding, Planner, RankGroup
from graphglue.ranks import group as group_module

from .threads import Exchange, Hang, Meeting, Model, all_well, batch_of, group_of, own_of, runner_of, together

Built = Callable[[int, RankGroup, Model], gg.Runner]


def step_of_all(
    size: int, planner: Callable[[int], Planner], build: Built, batches: list[gg.Batch]
) -> tuple[list[Any], Meeting]:
    """Capture on every rank, then run one step; give each rank's step or what it raised."""
    exchange, meeting = Exchange(size), Meeting(size, timeout_s=3.0)

    def run(rank: int) -> gg.Step:
        model = Model(meeting, rank)
        group = group_of(exchange, rank, planner(rank))
        with build(rank, group, model) as runner:
            runner.capture(progress=False)
            for seen in meeting.signatures:
                seen.clear()
            return runner.replay(batches[rank])

    return together(size, run), meeting


def agreed(steps: list[gg.Step]) -> gg.Decision:
    """Check that every rank went the same way, and give one's decision."""
    assert len({(step.decision.forward, step.decision.bucket) for step in steps}) == 1
    return steps[0].decision


def hangs(results: list[Any]) -> bool:
    return any(isinstance(result, Hang) for result in results)


def asks_again(self: Agreement, batch: gg.Batch, alone: Any, plan: Any, converted: bool) -> Any:
    """Decide by this rank's own rows after the agreement, at the agreed bucket: eager where one of them holds."""
    space = self._arena.space
    bucket = space.bucket(plan.bucket.tokens) if space.counts_tokens else plan.bucket
    facts = replace(alone.facts, bucket=bucket)
    if agreeing.admits(facts):
        return GRAPH_LANE(self, batch, alone, plan, converted)
    return self._eager_lane(batch, alone, plan, converted, False)


def takes_its_own_bucket(self: Agreement, batch: gg.Batch, alone: Any, plan: Any, converted: bool) -> Any:
    """Pad to what covers this rank's own rows."""
    own = self._arena.space.cover(alone.raw)
    return GRAPH_LANE(self, batch, alone, plan._replace(bucket=own), converted)


def votes_yes(*args: Any, **more: Any) -> Any:
    return replace(STATED(*args, **more), vote=True, prefill_vote=True)


GRAPH_LANE, STATED = Agreement._graph_lane, agreeing.stated


def plain(rank: int) -> Planner:
    return Planner([2, 4, 8])


def decoding(rank: int, group: RankGroup, model: Model) -> gg.Runner:
    return runner_of(group, model)


# (a)


def switched_off_on_one(rank: int, group: RankGroup, model: Model) -> gg.Runner:
    return runner_of(group, model, waste_limit=1.5 if rank == 1 else None)


def test_a_one_rank_that_must_not_replay_keeps_all_eager() -> None:
    """Its own admission travels as a vote; the others have nothing against the graph (RANK-SPLIT-2)."""
    results, meeting = step_of_all(3, plain, switched_off_on_one, [batch_of(2), batch_of(5), batch_of(8)])
    steps = all_well(results)
    assert agreed(steps).forward is gg.Route.EAGER
    assert [step.decision.reason for step in steps] == [gg.Reason.RANK_VETO, gg.Reason.WASTE, gg.Reason.RANK_VETO]
    assert {seen[0] for one in meeting.signatures for seen in one} == {0}


def test_a_without_the_vote_a_graph_meets_an_eager_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(agreeing, "stated", votes_yes)
    monkeypatch.setattr(Agreement, "_graph_lane", asks_again)
    results, _ = step_of_all(3, plain, switched_off_on_one, [batch_of(2), batch_of(5), batch_of(8)])
    assert hangs(results)


# (b)


def test_b_all_ranks_take_the_bucket_of_the_largest() -> None:
    """One bucket for all, however few rows a rank has (RANK-SPLIT-2)."""
    results, meeting = step_of_all(3, plain, decoding, [batch_of(1), batch_of(7), batch_of(0)])
    decision = agreed(all_well(results))
    assert (decision.forward, decision.bucket) == (gg.Route.GRAPH, gg.Bucket(8, 8, 1))
    assert {seen[1] for one in meeting.signatures for seen in one} == {24}


def test_b_with_buckets_of_their_own_ranks_hang(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Agreement, "_graph_lane", takes_its_own_bucket)
    results, _ = step_of_all(3, plain, decoding, [batch_of(1), batch_of(7), batch_of(0)])
    assert hangs(results)


# (c)


def one_with_wider_rows(rank: int) -> Planner:
    """Rows of rank 1 do not fit the fast all-reduce in a bucket of 8, so it would gather instead."""
    return Planner([2, 4, 8], row_bytes=64 if rank == 1 else 1, all_reduce_limit_bytes=512)


def test_c_ranks_with_other_padding_rules_are_found_at_start_up() -> None:
    results, _ = step_of_all(2, one_with_wider_rows, decoding, [batch_of(7), batch_of(7)])
    assert all(isinstance(result, gg.RankDisagreementError) for result in results)
    assert "row_bytes=64" in str(results[0])
    assert "rank 1" in str(results[0])


def test_c_without_the_comparison_two_kinds_of_collective_meet(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(RankGroup, "compare", lambda self, declaration: None)
    monkeypatch.setattr(group_module, "_identity_of", lambda declaration: 1)  # nor at every step
    results, _ = step_of_all(2, one_with_wider_rows, decoding, [batch_of(7), batch_of(7)])
    assert hangs(results)


def test_c_a_bucket_keeps_its_collective_when_a_rank_idles() -> None:
    """The rule on live counts would leave SUM_LEN, which needs tokens everywhere; the graph can not follow."""
    results, meeting = step_of_all(2, lambda rank: Planner([2, 4, 8]), decoding, [batch_of(8), batch_of(0)])
    assert agreed(all_well(results)).key.padding is Padding.SUM_LEN
    assert {seen for one in meeting.signatures for seen in one} == {(1, 16, 1)}


def test_c_a_padding_of_the_live_counts_is_no_key_that_was_captured(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without the rule, a rank looks for a graph of MAX_LEN, which nobody has captured."""

    def by_live_counts(self: Agreement, batch: gg.Batch, alone: Any, plan: Any, converted: bool) -> Any:
        padding = Padding.MAX_LEN if alone.facts.idle else plan.padding
        monkeypatch.setattr(self._arena.space, "padding_of", lambda mode, bucket: padding)
        return GRAPH_LANE(self, batch, alone, plan, converted)

    monkeypatch.setattr(Agreement, "_graph_lane", by_live_counts)
    results, _ = step_of_all(2, lambda rank: Planner([2, 4, 8]), decoding, [batch_of(8), batch_of(0)])
    assert hangs(results)


# (d)


def budgets() -> list[gg.Batch]:
    """Each rank sets its budget of verified tokens from an acceptance rate of its own: 9 and 16."""
    rates, requests = (0.56, 0.98), 4
    tokens = [round(rate * 4 * requests) for rate in rates]
    return [
        batch_of(requests, count, gg.Mode.VERIFY, row_tokens=[count - 3 * (count // 4), *[count // 4] * 3])
        for count in tokens
    ]


def verifying(rank: int, group: RankGroup, model: Model) -> gg.Runner:
    return runner_of(group, model, modes=(gg.Mode.VERIFY,), ragged=True)


def test_d_a_size_from_floats_is_agreed_as_an_integer() -> None:
    """Both take the tier that holds both budgets (RANK-SPLIT-3, FEATURE-GUARD-6)."""
    results, meeting = step_of_all(2, lambda rank: Planner([3, 4, 8], width=4), verifying, budgets())
    decision = agreed(all_well(results))
    assert (decision.forward, decision.bucket) == (gg.Route.GRAPH, gg.Bucket(4, 16, 0))
    assert [step.raw.tokens for step in results] == [9, 16]
    assert {seen[1] for one in meeting.signatures for seen in one} == {32}


def test_d_with_tiers_of_their_own_ranks_hang(monkeypatch: pytest.MonkeyPatch) -> None:
    def own_tier(self: Agreement, batch: gg.Batch, alone: Any, plan: Any, converted: bool) -> Any:
        rows = -(-alone.raw.tokens // 4)
        size = self._arena.space.ladder.cover(rows)
        return GRAPH_LANE(self, batch, alone, plan._replace(bucket=gg.Bucket(size, 4 * size, 0)), converted)

    monkeypatch.setattr(Agreement, "_graph_lane", own_tier)
    monkeypatch.setattr(Agreement, "_check_covered", lambda *_: None)
    few = batch_of(3, 9, gg.Mode.VERIFY, row_tokens=[3, 2, 4])
    many = batch_of(4, 15, gg.Mode.VERIFY, row_tokens=[4, 4, 4, 3])
    results, _ = step_of_all(2, lambda rank: Planner([3, 4, 8], width=4), verifying, [few, many])
    assert hangs(results)


# (e)


def refusing_plan(rank: int) -> Any:
    """A host planner that fails on rank 1, after the agreement."""

    def plan(batch: gg.Batch, bucket: gg.Bucket) -> dict[str, Any]:
        if rank == 1:
            raise ValueError("the host planner of rank 1 failed")
        return {}

    return plan


def planning(rank: int, group: RankGroup, model: Model) -> gg.Runner:
    return runner_of(group, model, plan=refusing_plan(rank))


def check_company(results: list[Any], error: type[Exception]) -> None:
    """Check that rank 1 failed and the others have their results."""
    assert isinstance(results[1], error)
    for rank in (0, 2):
        assert isinstance(results[rank], gg.Step), results[rank]
        total = sum(own_of(3) + own_of(5))
        assert results[rank].outputs["all"].tolist() == [total + own for own in own_of((3, 0, 5)[rank])]


@pytest.mark.parametrize("build", [planning, decoding], ids=["host planner", "batch"])
def test_e_a_rank_that_fails_joins_the_others_step_first(build: Built) -> None:
    short = gg.Batch(4, {"seq_lens": [1, 2], "input_ids": [1, 2, 3, 4]})
    batches = [batch_of(3), batch_of(4) if build is planning else short, batch_of(5)]
    results, _ = step_of_all(3, plain, build, batches)
    check_company(results, ValueError if build is planning else gg.BindError)
    veto = build is decoding  # it was refused before the agreement, so the others were told
    assert results[0].decision.forward is (gg.Route.EAGER if veto else gg.Route.GRAPH)
    assert results[0].decision.reason is (gg.Reason.RANK_VETO if veto else gg.Reason.PADDED)


@pytest.mark.parametrize("build", [planning, decoding], ids=["host planner", "batch"])
def test_e_a_rank_that_leaves_at_once_keeps_the_others_waiting(build: Built, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Agreement, "_stand_in", lambda self, plan, forward: None)
    short = gg.Batch(4, {"seq_lens": [1, 2], "input_ids": [1, 2, 3, 4]})
    batches = [batch_of(3), batch_of(4) if build is planning else short, batch_of(5)]
    results, _ = step_of_all(3, plain, build, batches)
    assert hangs(results)


def test_e_a_step_meets_the_others_once_before_its_launch() -> None:
    """A second wait for peers inside the step would be one for ranks that wait in a collective."""
    exchange, meeting = Exchange(2), Meeting(2)

    def run(rank: int) -> list[int]:
        model = Model(meeting, rank)
        with decoding(rank, group_of(exchange, rank, plain(rank)), model) as runner:
            runner.capture(progress=False)
            counts = [exchange.calls[rank]]
            for requests in ((1, 2), (9, 1), (0, 0), (3, 0), (8, 8)):
                runner.replay(batch_of(requests[rank]))
                counts.append(exchange.calls[rank])
        return [later - earlier for earlier, later in zip(counts, counts[1:])]

    assert all_well(together(2, run)) == [[1] * 5, [1] * 5]


# (f)


def prefilling(rank: int, group: RankGroup, model: Model) -> gg.Runner:
    return runner_of(group, model, modes=(gg.Mode.EXTEND,))


def prompts() -> list[gg.Batch]:
    """On its own, rank 0 fills more than half of its bucket of 16; of the agreed one, 64, it fills less."""
    return [batch_of(2, 10, gg.Mode.EXTEND), batch_of(3, 50, gg.Mode.EXTEND)]


def by_tokens(rank: int) -> Planner:
    return Planner([16, 64], max_requests=4)


def test_f_the_vote_is_not_asked_again_when_the_forward_runs() -> None:
    results, _ = step_of_all(2, by_tokens, prefilling, prompts())
    decision = agreed(all_well(results))
    assert (decision.forward, decision.bucket) == (gg.Route.GRAPH, gg.Bucket(4, 64, 0))


def test_f_a_vote_asked_again_is_answered_otherwise(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Agreement, "_graph_lane", asks_again)
    results, _ = step_of_all(2, by_tokens, prefilling, prompts())
    assert hangs(results)
