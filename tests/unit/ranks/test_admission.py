"""Admission: the rows that a rank decides alone, as a vote, and what the router does with what was agreed."""

from __future__ import annotations

from typing import Any

import pytest

import graphglue as gg
from graphglue.core.buckets import Bucket, Ladder
from graphglue.core.keys import Key, KeySpace
from graphglue.core.routing import PrepFacts, State, StepFacts, route
from graphglue.ranks.admission import admits, missing_sizes, mode_of, stated

DECODE, EXTEND = gg.Mode.DECODE, gg.Mode.EXTEND
THREE, IDLE, FOUR = Bucket(3, 3, 1), Bucket(0, 0, 0), Bucket(4, 4, 1)


def step(raw: Bucket = THREE, bucket: Bucket | None = FOUR, mode: gg.Mode = DECODE, **more: Any) -> StepFacts:
    return StepFacts(raw, bucket, mode, **more)


@pytest.mark.parametrize(
    ("facts", "vote"),
    [
        (step(), True),
        (step(enabled=False), False),
        (step(bucket=None), False),
        (step(padding=False), False),
        (step(FOUR, FOUR, padding=False), True),
        (step(waste_limit=1.2), False),
        (step(IDLE, FOUR, waste_limit=1.2), True),
        (step(IDLE, FOUR, enabled=False), False),
    ],
)
def test_rows_1_to_4_are_the_vote(facts: StepFacts, vote: bool) -> None:
    assert admits(facts) is vote
    assert stated(facts, True, 0).vote is vote
    if facts.idle:
        assert stated(facts, True, 0, extends=True).prefill_vote is vote


def test_what_a_rank_has_not_captured_is_a_vote_too() -> None:
    assert not stated(step(), known=False, missing=0).vote
    assert stated(step(IDLE), known=False, missing=0).vote  # a rank without requests takes any mode
    facts = stated(step(), True, 0b10, extra=(0,))
    assert (facts.missing, facts.missing_extend, facts.extra) == (0b10, 0, (0,))
    assert (facts.convertible, facts.prefill_vote) == (False, False)  # its runner extends nothing


def test_a_decode_step_of_a_prefill_runner_votes_on_prefill() -> None:
    facts = stated(step(), known=False, missing=1, extends=True, joining=True)
    assert (facts.vote, facts.prefill_vote, facts.convertible) == (False, True, True)
    assert (facts.missing, facts.missing_extend) == (0, 1)
    assert not stated(step(), False, 0, extends=True, joining=False).prefill_vote


def test_an_idle_rank_votes_for_what_its_own_runner_replays() -> None:
    decode, prefill = stated(step(IDLE), True, 0), stated(step(IDLE), True, 0, extends=True, mode=EXTEND)
    assert (decode.vote, decode.prefill_vote) == (True, False)
    assert (prefill.vote, prefill.prefill_vote, prefill.mode) == (False, True, EXTEND)
    one = decode.beside(prefill)  # both runners of an engine: whatever the peers do
    assert (one.vote, one.prefill_vote) == (True, True)


def test_a_prompt_has_no_shared_width() -> None:
    facts = stated(step(Bucket(2, 9, 0), Bucket(4, 16, 0), EXTEND), True, 0)
    assert (facts.requests, facts.tokens, facts.prefill_vote) == (2, 9, True)
    ragged = stated(step(Bucket(2, 4, 0), Bucket(4, 8, 0)), True, 0)
    assert ragged.row_tokens == 0  # though two tokens each would divide


def test_missing_sizes() -> None:
    space = KeySpace(Ladder([1, 2, 4]))
    assert [missing_sizes(space, sizes) for sizes in ([1, 2, 4], [1, 4], [])] == [0, 0b10, 0b111]
    long = KeySpace(Ladder(range(1, 101)))
    assert missing_sizes(long, range(1, 99)) == 1 << 62  # the last bit stands for all larger sizes


@pytest.mark.parametrize(
    ("idle", "converted", "mode"), [(False, False, DECODE), (True, False, EXTEND), (False, True, EXTEND)]
)
def test_the_mode_a_rank_runs_in(idle: bool, converted: bool, mode: gg.Mode) -> None:
    assert mode_of(DECODE, EXTEND, idle=idle, converted=converted) is mode


# The router, once the ranks have agreed on an eager step.


def decided(facts: StepFacts, forward: State | None = State.CAPTURED) -> gg.Decision:
    contract = gg.PrepContract(name="p", modes={DECODE})
    key = Key(facts.mode, *(facts.agreed or FOUR), None, None)
    return route(facts, {"p": PrepFacts(contract, State.COLD)}, key, forward)


def test_an_agreed_eager_step_is_eager_whatever_is_captured() -> None:
    decision = decided(step(agreed=Bucket(3, 3, 1)))
    assert (decision.forward, decision.forward_reason) == (gg.Route.EAGER, gg.Reason.AGREED_EAGER)
    assert decision.reason is gg.Reason.NOT_CAPTURED
    assert decided(step(), State.CAPTURED).forward is gg.Route.GRAPH


@pytest.mark.parametrize(
    ("more", "reason"),
    [
        ({"vetoed": True}, gg.Reason.RANK_VETO),
        ({"bucket": None}, gg.Reason.OVER_LADDER),
        ({"waste_limit": 1.1}, gg.Reason.WASTE),
        ({"enabled": False, "vetoed": True}, gg.Reason.DISABLED),
        ({"bucket": None, "vetoed": True}, gg.Reason.RANK_VETO),
    ],
)
def test_the_rank_that_objected_says_why(more: dict[str, Any], reason: gg.Reason) -> None:
    decision = decided(step(agreed=Bucket(3, 3, 1), **more))
    assert (decision.reason, decision.forward_reason) == (reason, reason)


def test_an_agreed_step_is_filled_at_what_was_agreed() -> None:
    wide, exact = step(agreed=Bucket(9, 9, 1)), step(agreed=Bucket(3, 3, 1))
    assert (wide.exact, wide.padded, wide.beyond) == (True, True, False)
    assert (exact.exact, exact.padded, exact.beyond) == (True, False, False)
    assert step(agreed=Bucket(9, 9, 1), scratch=True).beyond
    assert step(bucket=None, agreed=Bucket(9, 9, 1)).beyond is False  # the slots may hold it all the same
    assert step(bucket=None).beyond
    assert not step().beyond
