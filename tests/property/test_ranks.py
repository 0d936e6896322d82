"""All ranks derive one plan, and it is the one that the leading engine's rules give, written out here by hand.

``slow_plan`` follows the rules for data-parallel alignment rank by rank, in plain loops. It was not made from
the planner, and shares nothing with it but the names of modes, routes and paddings.
"""

from __future__ import annotations

import math
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, Phase, event, find, given, settings, target
from hypothesis import strategies as st

import graphglue as gg
from graphglue.ranks import CostRule, Padding, Planner, RankFacts, RankPlan, Role
from graphglue.ranks import planner as planner_module
from graphglue.ranks.facts import EXTRA, missing_bit, stacked

EXTENDING = (gg.Mode.EXTEND, gg.Mode.MIXED)
GRAPH, EAGER = gg.Route.GRAPH, gg.Route.EAGER


# The rules, once more and slowly.


def smallest_covering(sizes: list[int], count: int) -> int | None:
    for size in sizes:
        if size >= count:
            return size
    return None


def padding_by_cost(counts: list[int], extends: bool, limits: SimpleNamespace) -> Padding:
    """Ties go to MAX_LEN; decode takes one all-reduce where every rank has tokens and the sum fits."""
    gathered_by = len(counts)
    if extends and gathered_by > 1:
        return Padding.SUM_LEN
    if not extends and gathered_by > 1 and min(counts) > 0 and not limits.all_to_all and not limits.speculative:
        summed = 0
        for count in counts:
            summed += count * limits.row_bytes
        if summed <= limits.all_reduce_limit_bytes:
            return Padding.SUM_LEN
    return Padding.MAX_LEN if 2 * sum(counts) >= max(counts) * gathered_by else Padding.SUM_LEN


def slow_plan(facts: list[RankFacts], setup: SimpleNamespace) -> SimpleNamespace:
    busy = [one for one in facts if one.requests > 0]
    extends = any(one.mode in EXTENDING for one in busy)
    joins = [
        one.requests == 0 or one.mode in EXTENDING or (one.mode is gg.Mode.DECODE and one.tokens == one.requests)
        for one in facts
    ]
    if extends:
        votes = [one.vote and joined for one, joined in zip(facts, joins)]
    else:
        votes = [one.vote for one in facts]
    passed = all(votes) and not any(one.refused for one in facts)
    modes = {one.mode for one in busy}

    # The bucket that everybody would take.
    bucket, width = None, 0
    if not busy:
        mode = min((one.mode for one in facts), key=list(gg.Mode).index)
        size = setup.extend_ladder[0] if mode in EXTENDING else setup.ladder[0]
        bucket = (1, size, 0) if mode in EXTENDING else (size, size * setup.width, setup.width)
    elif extends:
        mode = modes.pop() if len(modes) == 1 else gg.Mode.EXTEND
        size = smallest_covering(setup.extend_ladder, max(one.tokens for one in busy))
        if size is not None:
            bucket = (max(one.requests for one in busy), size, 0)
        if any(one.mode not in EXTENDING for one in busy) and len(busy) < len(facts):
            bucket = None  # a decode rank is shown as an extend only where every rank has tokens
    elif len(modes) == 1:
        (mode,) = modes
        widths = {one.row_tokens for one in busy}
        width = widths.pop() if len(widths) == 1 else 0
        needed = max(one.requests for one in busy)
        if width == 0:
            for one in busy:
                needed = max(needed, math.ceil(one.tokens / setup.width))
        size = smallest_covering(setup.ladder, needed)
        if size is not None:
            bucket = (size, size * (width or setup.width), width)
            if bucket[1] > setup.ladder[-1] * setup.width or bucket[1] % setup.alignment:
                bucket = None
    else:
        mode = max(modes, key=list(gg.Mode).index)
    if bucket is not None:
        ladder = setup.extend_ladder if mode in EXTENDING else setup.ladder
        position = ladder.index(bucket[1] if mode in EXTENDING else bucket[0])
        name = "missing_extend" if mode in EXTENDING else "missing"
        captured = not any(getattr(one, name) & missing_bit(position) for one in facts)

    forward = GRAPH if passed and bucket is not None and captured else EAGER
    converted = extends and passed and len(busy) == len(facts)
    roles = tuple(
        Role.IDLE if one.requests == 0 else Role.CONVERTED if converted and one.mode not in EXTENDING else Role.REAL
        for one in facts
    )
    if forward is GRAPH:
        counts = [bucket[1]] * len(facts)
        padding = Padding.MAX_LEN if mode in EXTENDING else padding_by_cost(counts, False, setup)
    else:
        multiple = math.lcm(setup.alignment, width) if width else setup.alignment
        counts = [math.ceil(one.tokens / multiple) * multiple for one in facts]
        if not busy:
            counts = [bucket[1]] * len(facts)
        padding = padding_by_cost(counts, mode in EXTENDING, setup)
        if padding is Padding.MAX_LEN:
            counts = [max(counts)] * len(facts)
    rows = sum(counts) if padding is Padding.SUM_LEN else len(counts) * max(counts)
    return SimpleNamespace(
        bucket=bucket, mode=mode, forward=forward, padding=padding, counts=tuple(counts), rows=rows, roles=roles
    )


# Draws.


@st.composite
def setups(draw: st.DrawFn) -> SimpleNamespace:
    alignment = draw(st.sampled_from([1, 1, 2, 4, 8, 3]))
    width = draw(st.sampled_from([1, 1, 2, 4, 3]))
    sizes = draw(st.lists(st.integers(1, 40), min_size=1, max_size=6))
    step = alignment // math.gcd(alignment, width)
    given_sizes = sorted(set(sizes))
    extend = draw(st.lists(st.integers(1, 200), min_size=1, max_size=6))
    return SimpleNamespace(
        given=given_sizes,
        given_extend=sorted(set(extend)),
        ladder=sorted({-(-size // step) * step for size in sizes}),
        extend_ladder=sorted({-(-size // alignment) * alignment for size in extend}),
        alignment=alignment,
        width=width,
        row_bytes=draw(st.sampled_from([0, 1, 64, 4096])),
        all_reduce_limit_bytes=draw(st.sampled_from([64, 4096, 16 * 2**20])),
        all_to_all=draw(st.booleans()),
        speculative=draw(st.booleans()),
    )


def planner_of(setup: SimpleNamespace) -> Planner:
    return Planner(
        setup.given, setup.alignment, setup.width, setup.row_bytes, setup.all_reduce_limit_bytes, setup.all_to_all,
        setup.speculative, extend_ladder=setup.given_extend,
    )  # fmt: skip


@st.composite
def rank_facts(draw: st.DrawFn, setup: SimpleNamespace, modes: list[gg.Mode]) -> RankFacts:
    mode = draw(st.sampled_from(modes))
    vote = draw(st.sampled_from([True] * 12 + [False]))
    refused = draw(st.sampled_from([False] * 12 + [True]))
    masks = st.sampled_from([0] * 6 + [1, 2, 5, missing_bit(5)])
    missing = {"missing": draw(masks), "missing_extend": draw(masks)}
    if draw(st.integers(0, 4)) == 0:
        return RankFacts(0, 0, mode, vote, refused=refused, **missing)
    most = setup.ladder[-1] + (2 if draw(st.integers(0, 9)) == 0 else 0)
    requests = draw(st.integers(1, max(1, most)))
    if mode in EXTENDING:
        tokens = draw(st.integers(requests, max(requests, setup.extend_ladder[-1])))
    elif draw(st.integers(0, 5)) == 0:
        tokens = draw(st.integers(requests, requests * setup.width + 1))
    else:
        tokens = requests * setup.width
    return RankFacts(requests, tokens, mode, vote, refused=refused, **missing)


@st.composite
def groups(draw: st.DrawFn) -> tuple[SimpleNamespace, list[RankFacts]]:
    setup = draw(setups())
    kinds = st.sampled_from([[gg.Mode.DECODE]] * 4 + [[gg.Mode.DECODE, gg.Mode.EXTEND]] * 3 + [list(gg.Mode)])
    modes = draw(kinds)
    return setup, draw(st.lists(rank_facts(setup, modes), min_size=1, max_size=9))


# Agreement with the rules.


@given(groups())
def test_the_planner_follows_the_rules(group: tuple[SimpleNamespace, list[RankFacts]]) -> None:
    setup, facts = group
    plan, slow = planner_of(setup).plan(facts), slow_plan(facts, setup)
    assert agrees(planner_of(setup), setup, facts), f"{plan}, but the rules give {slow}"
    event(f"{plan.forward.value} {plan.reason.value} {plan.padding.value}")


@pytest.mark.parametrize(
    ("counts", "padding"),
    [
        ([8, 7, 6, 0], Padding.MAX_LEN),  # 32 rows against 42
        ([8, 3, 3, 1], Padding.SUM_LEN),  # 32 against 30
        ([8, 0, 0, 0], Padding.SUM_LEN),
        ([8, 4, 4, 0], Padding.MAX_LEN),  # a tie
        ([5], Padding.MAX_LEN),
    ],
)
def test_the_rules_examples(counts: list[int], padding: Padding) -> None:
    """Eager steps, with nothing but the cost rule: the all-reduce of the sum fits nowhere."""
    setup = SimpleNamespace(row_bytes=1, all_reduce_limit_bytes=0, all_to_all=False, speculative=False)
    assert padding_by_cost(counts, False, setup) is padding
    facts = [RankFacts(count, count, gg.Mode.DECODE, vote=False) for count in counts]
    assert Planner([16], row_bytes=1, all_reduce_limit_bytes=0).plan(facts).padding is padding


def agrees(planner: Planner, setup: SimpleNamespace, facts: list[RankFacts]) -> bool:
    plan, slow = planner.plan(facts), slow_plan(facts, setup)
    same_bucket = plan.forward is EAGER or tuple(plan.bucket) == slow.bucket
    names = ("forward", "mode", "roles", "padding", "counts", "rows")
    return same_bucket and all(getattr(plan, name) == getattr(slow, name) for name in names)


def ties_to_sum(self: CostRule, num_ranks: int, least: int, most: int, total: int, extends: bool) -> Padding:
    at_tie = 2 * total == most * num_ranks and num_ranks > 1
    return Padding.SUM_LEN if at_tie else RULE(self, num_ranks, least, most, total, extends)


RULE = CostRule.of_sums
FAULTS = {
    "no alignment of live counts": (Planner, "_step", lambda self, shape: 1),
    "decode ranks are never converted": (
        Planner,
        "_roles",
        lambda self, seen, vetoed: ((Role.REAL,) * seen.num_ranks, 0),
    ),
    "a failed capture is forgotten": (planner_module, "missing_bits", lambda words: 0),
    "ties go to SUM_LEN": (CostRule, "of_sums", ties_to_sum),
    "a captured bucket follows the live counts": (Planner, "captured_padding", lambda *_: Padding.MAX_LEN),
    "a vote is not asked for": (Planner, "_refusal", lambda self, seen, shape: (shape.refusal, ())),
}


@pytest.mark.parametrize("name", FAULTS)
def test_the_comparison_with_the_rules_can_fail(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(*FAULTS[name])
    quiet = settings(max_examples=3000, database=None, phases=[Phase.generate], suppress_health_check=list(HealthCheck))
    find(groups(), lambda group: not agrees(planner_of(group[0]), *group), settings=quiet)


# What makes it an agreement.


@given(groups())
def test_the_encoded_form_gives_the_same_plan(group: tuple[SimpleNamespace, list[RankFacts]]) -> None:
    setup, facts = group
    planner = planner_of(setup)
    matrix = stacked(facts)
    padded = np.zeros((len(facts), EXTRA + 3), dtype=np.int64)  # a matrix inside a larger one
    padded[:, :EXTRA] = matrix
    expected = planner.plan(facts)
    assert planner.plan_encoded(matrix) == expected
    assert planner.plan_encoded(torch.from_numpy(matrix)) == expected
    assert planner.plan_encoded(padded[:, :EXTRA]) == expected
    assert planner.plan_encoded(np.asfortranarray(matrix)) == expected


@given(groups())
def test_facts_survive_the_wire(group: tuple[SimpleNamespace, list[RankFacts]]) -> None:
    for one in group[1]:
        assert RankFacts.decoded(one.encoded()) == one


@given(groups())
def test_every_rank_derives_the_same_plan(group: tuple[SimpleNamespace, list[RankFacts]]) -> None:
    """One planner per rank, each with a history of its own."""
    setup, facts = group
    first, second = planner_of(setup), planner_of(setup)
    second.plan([RankFacts(1, 1, gg.Mode.DECODE)] * len(facts))
    second.plan([RankFacts(0, 0, gg.Mode.DECODE)] * len(facts))
    assert first.plan(facts) == second.plan(facts)
    assert first.plan(facts).digest == second.plan(facts).digest


@given(groups(), st.data())
def test_permuting_ranks_permutes_the_counts_only(
    group: tuple[SimpleNamespace, list[RankFacts]], data: st.DataObject
) -> None:
    setup, facts = group
    order = data.draw(st.permutations(range(len(facts))))
    planner = planner_of(setup)
    plan, permuted = planner.plan(facts), planner.plan([facts[rank] for rank in order])
    rank_wise = {"counts", "roles", "vetoes", "digest"}
    for name in set(RankPlan._fields) - rank_wise:
        assert getattr(plan, name) == getattr(permuted, name), name
    assert permuted.counts == tuple(plan.counts[rank] for rank in order)
    assert permuted.roles == tuple(plan.roles[rank] for rank in order)
    assert {order[rank] for rank in permuted.vetoes} == set(plan.vetoes)


@given(groups())
def test_the_bucket_covers_every_rank(group: tuple[SimpleNamespace, list[RankFacts]]) -> None:
    setup, facts = group
    plan = planner_of(setup).plan(facts)
    for rank, one in enumerate(facts):
        raw = gg.Bucket(one.requests, one.tokens, one.row_tokens)
        extents = plan.extents(rank, raw)
        assert plan.bucket.requests >= one.requests
        assert plan.bucket.tokens >= one.tokens
        assert extents.requests >= one.requests
        assert extents.tokens >= one.tokens
        assert extents.tokens == plan.counts[rank]
        assert plan.counts[rank] % setup.alignment == 0
        assert extents.row_tokens == plan.bucket.row_tokens
        own = plan.extents(rank, raw, raw.row_tokens)  # of a prep that expects so many
        assert own.requests >= one.requests
        assert own.tokens == extents.tokens
        assert not extents.row_tokens or extents.requests * extents.row_tokens == extents.tokens


@given(groups())
def test_one_size_one_collective(group: tuple[SimpleNamespace, list[RankFacts]]) -> None:
    """What fixes a collective is equal by construction: under MAX_LEN all parts, under SUM_LEN the whole."""
    setup, facts = group
    plan = planner_of(setup).plan(facts)
    if plan.padding is Padding.MAX_LEN:
        assert len(set(plan.counts)) == 1
        assert plan.rows == len(facts) * plan.counts[0]
    else:
        assert plan.rows == sum(plan.counts)
    if plan.forward is GRAPH:
        assert set(plan.counts) == {plan.bucket.tokens}
        target(float(plan.rows))


@given(groups(), st.data())
def test_one_rank_that_can_not_keeps_every_rank_from_the_graph(
    group: tuple[SimpleNamespace, list[RankFacts]], data: st.DataObject
) -> None:
    """A graph with a collective never meets an eager rank: vote, failed capture, any reason at all (RANK-SPLIT-5)."""
    setup, facts = group
    planner = planner_of(setup)
    plan = planner.plan(facts)
    rank = data.draw(st.integers(0, len(facts) - 1))
    one = facts[rank]
    ladder = setup.extend_ladder if plan.mode in EXTENDING else setup.ladder
    size = plan.bucket.tokens if plan.mode in EXTENDING else plan.bucket.requests
    objections = {
        "vote": RankFacts(one.requests, one.tokens, one.mode, vote=False),
        "refusal": RankFacts.refusal(one.mode),
        "over the ladder": RankFacts(max(setup.ladder) + 1, (max(setup.ladder) + 1) * setup.width, gg.Mode.VERIFY),
    }
    if plan.forward is GRAPH:
        missing = {"missing_extend" if plan.mode in EXTENDING else "missing": missing_bit(ladder.index(size))}
        objections["capture"] = RankFacts(one.requests, one.tokens, one.mode, **missing)
    name = data.draw(st.sampled_from(sorted(objections)))
    changed = [*facts[:rank], objections[name], *facts[rank + 1 :]]
    assert planner.plan(changed).forward is EAGER
    event(f"{name}, was {plan.forward.value}")


@given(setups(), st.lists(st.integers(0, 40), min_size=2, max_size=9), st.data())
def test_a_captured_bucket_keeps_its_padding_when_a_rank_idles(
    setup: SimpleNamespace, requests: list[int], data: st.DataObject
) -> None:
    """The collective is part of the graph, so it can not follow this step's counts."""
    requests = [min(count, setup.ladder[-1]) for count in requests]
    planner = planner_of(setup)
    facts = [RankFacts(count, count * setup.width, gg.Mode.DECODE) for count in requests]
    plan = planner.plan(facts)
    largest = requests.index(max(requests))
    idle = data.draw(st.sets(st.integers(0, len(facts) - 1)))
    idling = [RankFacts(0, 0, gg.Mode.DECODE) if rank in idle - {largest} else one for rank, one in enumerate(facts)]
    later = planner.plan(idling)
    assert plan.forward is later.forward is GRAPH
    assert (later.bucket, later.padding, later.counts, later.rows) == (
        plan.bucket,
        plan.padding,
        plan.counts,
        plan.rows,
    )


@given(setups(), st.integers(1, 8), st.sampled_from(list(gg.Mode)))
def test_no_tokens_anywhere_is_the_smallest_bucket(setup: SimpleNamespace, num_ranks: int, mode: gg.Mode) -> None:
    plan = planner_of(setup).plan([RankFacts(0, 0, mode)] * num_ranks)
    smallest = setup.extend_ladder[0] if mode in EXTENDING else setup.ladder[0] * setup.width
    assert (plan.forward, plan.reason, plan.mode) == (GRAPH, gg.Reason.IDLE, mode)
    assert plan.bucket.tokens == smallest
    assert set(plan.roles) == {Role.IDLE}
    assert all(plan.fabricated(rank) == (smallest if mode in EXTENDING else 0) for rank in range(num_ranks))
