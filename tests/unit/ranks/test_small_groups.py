"""Every group of two small ranks, against the rules in plain loops: the bucket, the reason and the eager extents.

The property tests draw large groups; these leave no small one out, and compare what an eager step is filled to as well.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from itertools import product
from types import SimpleNamespace
from typing import Any

import pytest

import graphglue as gg
from graphglue.ranks import Padding, Planner, RankFacts, RankPlan, Role

DECODE, VERIFY, EXTEND, MIXED = gg.Mode.DECODE, gg.Mode.VERIFY, gg.Mode.EXTEND, gg.Mode.MIXED
Why = gg.Reason


def live_counts(counts: tuple[int, ...]) -> Padding:
    """Leave every rank its own rows, so that a plan shows each rank's count."""
    return Padding.SUM_LEN


def up(count: int, multiple: int) -> int:
    return math.ceil(count / multiple) * multiple


def smallest(sizes: list[int], *counts: int) -> int | None:
    return next((size for size in sizes if all(size >= count for count in counts)), None)


def decode_rules(facts: list[RankFacts], ladder: list[int], width: int, alignment: int) -> SimpleNamespace:
    """Follow the rules for ranks that decode: sizes count requests, and the slots hold the largest of them."""
    busy = [one for one in facts if one.requests]
    if not busy:
        size = ladder[0]
        return SimpleNamespace(bucket=(size, size * width, width), reason=Why.IDLE, mode=DECODE)
    requests, tokens = [one.requests for one in busy], [one.tokens for one in busy]
    modes = [mode for mode in (DECODE, VERIFY) if any(one.mode is mode for one in busy)]
    each = {one.tokens / one.requests if one.row_tokens else 0 for one in busy}
    shared = int(each.pop()) if len(each) == 1 and len(modes) == 1 else 0
    plan = SimpleNamespace(mode=modes[-1], bucket=None, reason=Why.OVER_LADDER)
    if len(modes) == 2:
        plan.reason = Why.AGREED_EAGER
    elif shared:
        size = smallest(ladder, *requests)
        if size is not None and size * shared <= ladder[-1] * width:
            fits = size * shared % alignment == 0
            plan.bucket = (size, size * shared, shared) if fits else None
            full = all(one.tokens == size * shared for one in facts)
            plan.reason = (Why.UNPADDED if full else Why.PADDED) if fits else Why.NOT_CAPTURED
    else:
        size = smallest(ladder, *requests, *(math.ceil(count / width) for count in tokens))
        if size is not None:
            plan.bucket, plan.reason = (size, size * width, 0), Why.RAGGED
    if not all(one.vote for one in facts):
        plan.bucket, plan.reason = None, Why.RANK_VETO
    if plan.bucket is None:
        whole = math.lcm(alignment, shared) if shared else alignment
        plan.counts = tuple(up(one.tokens, whole) for one in facts)
        most = max(plan.counts)
        plan.eager = (most // shared, most, shared) if shared else (max(requests), most, 0)
    return plan


def extend_rules(facts: list[RankFacts], ladder: list[int], max_requests: int | None, alignment: int) -> Any:
    """Follow the rules where a rank prefills, or all idle in EXTEND: sizes count tokens."""
    busy = [one for one in facts if one.requests]
    requests, tokens = max(one.requests for one in facts), max(one.tokens for one in facts)
    rows, size = max_requests or max(requests, 1), smallest(ladder, tokens)
    modes = {one.mode for one in busy}
    plan = SimpleNamespace(mode=MIXED if modes == {MIXED} else EXTEND, bucket=None, reason=Why.PADDED)
    if not busy:
        plan.mode, plan.reason = min((one.mode for one in facts), key=[DECODE, VERIFY, EXTEND, MIXED].index), Why.IDLE
    elif any(not one.prefill_vote for one in facts):
        plan.reason = Why.RANK_VETO
    elif DECODE in modes and len(busy) < len(facts):
        plan.reason = Why.AGREED_EAGER
    elif size is None or requests > rows:
        plan.reason = Why.OVER_LADDER
    elif all(one.tokens == size for one in facts):
        plan.reason = Why.UNPADDED
    if plan.reason in (Why.IDLE, Why.PADDED, Why.UNPADDED):
        plan.bucket = (rows, size, 0)
    plan.counts = tuple(up(one.tokens, alignment) for one in facts)
    plan.eager = (requests, max(plan.counts), 0)
    return plan


def difference(plan: RankPlan, rules: SimpleNamespace, num_ranks: int) -> list[str]:
    """Name what differs between a plan and the rules."""
    if rules.bucket is not None:
        expected = {
            "bucket": rules.bucket, "forward": gg.Route.GRAPH, "counts": (rules.bucket[1],) * num_ranks,
            "rows": num_ranks * rules.bucket[1],
        }  # fmt: skip
    else:
        counts = rules.counts
        expected = {"bucket": rules.eager, "forward": gg.Route.EAGER, "counts": counts, "rows": sum(counts)}
    expected |= {"reason": rules.reason, "mode": rules.mode}
    found = [
        f"{name} {getattr(plan, name)}, not {seen}" for name, seen in expected.items() if getattr(plan, name) != seen
    ]
    numbers = (*plan.bucket, *plan.counts, plan.rows)  # they become shapes
    return found + [f"{number!r} is no integer" for number in numbers if type(number) is not int]


def decoding(most: int, width: int) -> Iterator[RankFacts]:
    yield RankFacts(0, 0, DECODE)
    for requests in range(1, most + 1):
        near = {
            *range(requests, requests + 3),
            *(requests * width + more for more in (-1, 0, 1)),
            requests * (width + 1),
        }
        yield from (RankFacts(requests, tokens, DECODE) for tokens in sorted(near) if tokens >= requests)
    yield from (RankFacts(2, 4, DECODE, row_tokens=0), RankFacts(1, 2, VERIFY), RankFacts(3, 6, VERIFY))
    yield RankFacts(3, 3, DECODE, vote=False)


@pytest.mark.parametrize(
    ("alignment", "width", "ladder"), [(1, 1, [1, 3]), (1, 2, [1, 3]), (4, 2, [2, 4]), (2, 3, [2, 4])]
)
def test_every_small_group_that_decodes(alignment: int, width: int, ladder: list[int]) -> None:
    planner = Planner([1, 3], alignment, width, rule=live_counts)  # one for all: plans depend on no other
    assert list(planner.ladder) == ladder
    some = list(decoding(ladder[-1] + 1, width))
    for facts in [[one] for one in some] + [list(pair) for pair in product(some, some)]:
        plan = planner.plan(facts)
        assert not difference(plan, decode_rules(facts, ladder, width, alignment), len(facts)), facts
        assert plan.roles == tuple(Role.REAL if one.requests else Role.IDLE for one in facts)


def extending() -> Iterator[RankFacts]:
    yield from (RankFacts(0, 0, mode) for mode in (DECODE, EXTEND, MIXED))
    for mode, requests in product((EXTEND, MIXED), (1, 3)):
        yield from (RankFacts(requests, tokens, mode) for tokens in (requests, 4, 5, 8, 9))
    yield from (RankFacts(count, count, DECODE) for count in (1, 3, 9))
    yield RankFacts(1, 1, DECODE, convertible=False)
    yield RankFacts(1, 4, EXTEND, vote=False)


@pytest.mark.parametrize("max_requests", [None, 2])
@pytest.mark.parametrize("alignment", [1, 4])
def test_every_small_group_that_prefills(max_requests: int | None, alignment: int) -> None:
    planner = Planner([4, 8], alignment, rule=live_counts, max_requests=max_requests)
    some = list(extending())
    for facts in [[one] for one in some] + [list(pair) for pair in product(some, some)]:
        idle = not any(one.requests for one in facts)
        if not (any(one.extends for one in facts) or (idle and all(one.mode.counts_tokens for one in facts))):
            continue  # ranks that decode, as above
        plan, rules = planner.plan(facts), extend_rules(facts, [4, 8], max_requests, alignment)
        assert not difference(plan, rules, len(facts)), facts
        converts = all(one.requests for one in facts) and rules.reason is not Why.RANK_VETO
        assert plan.roles == tuple(
            Role.IDLE if not one.requests else Role.CONVERTED if converts and one.mode is DECODE else Role.REAL
            for one in facts
        )


@pytest.mark.parametrize("mode", [DECODE, EXTEND])
def test_ranks_that_all_idle_and_may_not_replay_keep_the_smallest_bucket(mode: gg.Mode) -> None:
    """The vote that counts is the one for what they would replay."""
    for vote, prefill_vote in product([True, False], repeat=2):
        facts = [RankFacts(0, 0, mode), RankFacts(0, 0, mode, vote=vote, prefill_vote=prefill_vote)]
        plan = Planner([4], width=2, extend_ladder=[8]).plan(facts)
        admits = prefill_vote if mode is EXTEND else vote
        assert plan.forward is (gg.Route.GRAPH if admits else gg.Route.EAGER)
        assert plan.bucket == (gg.Bucket(1, 8, 0) if mode is EXTEND else gg.Bucket(4, 8, 2))
        assert (plan.counts, plan.rows, plan.vetoes) == ((8, 8), 16, () if admits else (1,))


def test_every_set_of_idle_ranks_has_a_digest_of_its_own() -> None:
    """A plan that differs in nothing but who idles is another plan."""
    planner = Planner([4])
    busy, idle = RankFacts(2, 2, DECODE), RankFacts(0, 0, DECODE)
    plans = [planner.plan([busy, *others]) for others in product([busy, idle], repeat=9)]
    assert len({plan.digest for plan in plans}) == len({plan.roles for plan in plans}) == 2**9


def test_a_fault_in_the_rules_would_show() -> None:
    facts = [RankFacts(3, 5, DECODE), RankFacts(1, 1, DECODE)]
    plan = Planner([1, 2, 4], width=2, rule=live_counts).plan(facts)
    assert not difference(plan, decode_rules(facts, [1, 2, 4], 2, 1), 2)
    assert difference(plan, decode_rules(facts, [1, 2, 8], 2, 1), 2)
    assert difference(plan, decode_rules(facts, [1, 2, 4], 1, 1), 2)
    prompt = [RankFacts(1, 9, EXTEND), RankFacts(1, 2, EXTEND)]
    eager = Planner([4, 8], rule=live_counts).plan(prompt)
    assert not difference(eager, extend_rules(prompt, [4, 8], None, 1), 2)
    assert difference(eager, extend_rules(prompt, [4, 8], None, 4), 2)
