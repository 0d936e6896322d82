"""The planner by example: the rules of alignment, one by one."""

from __future__ import annotations

import os
import subprocess
import sys
from functools import partial
from itertools import product
from typing import Any

import numpy as np
import pytest
import torch

import graphglue as gg
from graphglue.ranks import CostRule, Meeting, Padding, Planner, RankFacts, Role
from graphglue.ranks import facts as at
from graphglue.ranks.facts import missing_bit, stacked

DECODE, EXTEND, MIXED, VERIFY = gg.Mode.DECODE, gg.Mode.EXTEND, gg.Mode.MIXED, gg.Mode.VERIFY
GRAPH, EAGER = gg.Route.GRAPH, gg.Route.EAGER
MAX_LEN, SUM_LEN = Padding.MAX_LEN, Padding.SUM_LEN


def decode(*requests: int, **more: Any) -> list[RankFacts]:
    return [RankFacts(count, count, DECODE, **more) for count in requests]


def extend(*tokens: int, requests: int = 1) -> list[RankFacts]:
    return [RankFacts(min(count, requests), count, EXTEND) for count in tokens]


def test_decode_takes_the_bucket_of_the_largest_rank() -> None:
    plan = Planner([1, 2, 4, 8]).plan(decode(3, 1, 0))
    assert (plan.bucket, plan.forward, plan.mode) == (gg.Bucket(4, 4, 1), GRAPH, DECODE)
    assert plan.counts == (4, 4, 4)
    assert plan.rows == 12
    assert plan.roles == (Role.REAL, Role.REAL, Role.IDLE)
    assert plan.reason is gg.Reason.PADDED


def test_the_bucket_follows_requests_and_not_tokens() -> None:
    """Counts that are scaled by the width would choose another one."""
    plan = Planner([1, 2, 4, 8], width=4).plan([RankFacts(3, 12, VERIFY), RankFacts(1, 4, VERIFY)])
    assert plan.bucket == gg.Bucket(4, 16, 4)


@pytest.mark.parametrize(
    ("facts", "reason"),
    [
        (decode(4, 4), gg.Reason.UNPADDED),
        (decode(4, 3), gg.Reason.PADDED),
        (decode(0, 0), gg.Reason.IDLE),
        (decode(9, 1), gg.Reason.OVER_LADDER),
        ([RankFacts(2, 3, DECODE), *decode(1)], gg.Reason.RAGGED),
        ([*decode(1), RankFacts.refusal()], gg.Reason.RANK_VETO),
        ([RankFacts(1, 1, DECODE), RankFacts(1, 1, VERIFY)], gg.Reason.AGREED_EAGER),
        (decode(3, 1, missing=missing_bit(2)), gg.Reason.NOT_CAPTURED),
        (decode(2, 1, missing=missing_bit(2)), gg.Reason.PADDED),
    ],
)
def test_the_reason(facts: list[RankFacts], reason: gg.Reason) -> None:
    plan = Planner([1, 2, 4, 8]).plan(facts)
    assert plan.reason is reason
    graphs = (gg.Reason.UNPADDED, gg.Reason.PADDED, gg.Reason.IDLE, gg.Reason.RAGGED)
    assert plan.forward is (GRAPH if reason in graphs else EAGER)


def test_vetoes_name_the_ranks() -> None:
    facts = [*decode(1, 2), RankFacts(1, 1, DECODE, vote=False), RankFacts.refusal()]
    assert Planner([4]).plan(facts).vetoes == (2, 3)


# EXTEND.


def test_prefill_takes_the_smallest_token_bucket_of_the_largest_rank() -> None:
    plan = Planner([8, 16, 64], max_requests=4).plan([RankFacts(2, 14, EXTEND), RankFacts(1, 9, EXTEND)])
    assert (plan.bucket, plan.forward, plan.padding) == (gg.Bucket(4, 16, 0), GRAPH, MAX_LEN)
    assert plan.counts == (16, 16)


def test_an_idle_rank_makes_rows_up() -> None:
    plan = Planner([8, 16]).plan([RankFacts(1, 14, EXTEND), RankFacts(0, 0, EXTEND)])
    assert [plan.fabricated(rank) for rank in range(2)] == [0, 16]
    assert plan.forward is GRAPH


def test_a_decode_rank_is_converted_where_every_rank_has_tokens() -> None:
    planner = Planner([8, 16])
    plan = planner.plan([RankFacts(1, 14, EXTEND), *decode(5)])
    assert (plan.mode, plan.forward, plan.roles) == (EXTEND, GRAPH, (Role.REAL, Role.CONVERTED))
    beside_idle = planner.plan([RankFacts(1, 14, EXTEND), *decode(5, 0)])
    assert (beside_idle.forward, beside_idle.reason) == (EAGER, gg.Reason.AGREED_EAGER)
    assert beside_idle.roles == (Role.REAL, Role.REAL, Role.IDLE)
    unable = planner.plan([RankFacts(1, 14, EXTEND), RankFacts(5, 5, DECODE, convertible=False)])
    assert (unable.forward, unable.reason, unable.vetoes) == (EAGER, gg.Reason.RANK_VETO, (1,))


def test_a_vote_on_decode_is_none_on_prefill() -> None:
    can_not_decode = RankFacts(5, 5, DECODE, vote=False, prefill_vote=True)
    planner = Planner([8, 16])
    assert planner.plan([RankFacts(1, 14, EXTEND), can_not_decode]).forward is GRAPH
    assert planner.plan([*decode(3), can_not_decode]).forward is EAGER


def test_prefill_beyond_the_ladder_is_not_rounded() -> None:
    plan = Planner([8, 16], alignment=4).plan([RankFacts(1, 30, EXTEND), RankFacts(1, 5, EXTEND)])
    assert (plan.forward, plan.padding, plan.counts, plan.rows) == (EAGER, SUM_LEN, (32, 8), 40)
    assert plan.bucket == gg.Bucket(1, 32, 0)


def test_graphs_that_tolerate_sum_len_leave_the_counts_alone() -> None:
    """No collective is recorded in them, so what meets outside has the live rows."""
    plan = Planner([8, 16], sum_len_tolerated=True).plan([RankFacts(1, 14, EXTEND), RankFacts(1, 3, EXTEND)])
    assert (plan.forward, plan.bucket.tokens, plan.counts, plan.rows) == (GRAPH, 16, (14, 3), 17)


def test_mixed_batches_replay_extend_graphs_beside_others() -> None:
    mixed, prompt = RankFacts(2, 9, MIXED), RankFacts(1, 9, EXTEND)
    planner = Planner([16])
    assert planner.plan([mixed, mixed]).mode is MIXED
    assert planner.plan([mixed, prompt]).mode is EXTEND


def test_one_planner_has_two_ladders() -> None:
    planner = Planner([1, 2, 4], extend_ladder=[64, 128], max_requests=4)
    assert planner.plan(decode(3, 1)).bucket == gg.Bucket(4, 4, 1)
    assert planner.plan([RankFacts(2, 70, EXTEND), *decode(3)]).bucket == gg.Bucket(4, 128, 0)
    assert planner.plan([RankFacts(5, 70, EXTEND), *decode(3)]).reason is gg.Reason.OVER_LADDER


# Padding.


def test_decode_sums_where_every_rank_has_tokens_and_the_rows_fit() -> None:
    fits, too_wide = (
        Planner([8], row_bytes=100, all_reduce_limit_bytes=1600),
        Planner([8], row_bytes=101, all_reduce_limit_bytes=1600),
    )
    assert fits.plan(decode(8, 7)).padding is SUM_LEN
    assert too_wide.plan(decode(8, 7)).padding is MAX_LEN
    for option in ("all_to_all", "speculative", "max_len_only"):
        assert Planner([8], **{option: True}).plan(decode(8, 7)).padding is MAX_LEN  # type: ignore[arg-type]
    assert Planner([8]).plan(decode(8)).padding is MAX_LEN  # one rank gathers nothing


def test_a_captured_bucket_keeps_the_padding_of_its_own_counts() -> None:
    planner = Planner([8])
    assert planner.plan(decode(8, 8)).padding is planner.plan(decode(8, 0)).padding is SUM_LEN
    assert planner.plan(decode(9, 9)).padding is SUM_LEN  # eager: the live counts
    assert planner.plan(decode(9, 0)).padding is MAX_LEN
    assert planner.captured_meeting(gg.Bucket(8, 8, 1), DECODE, 2) == Meeting(SUM_LEN, (8, 8), 16)


def test_a_hybrid_state_needs_a_row_everywhere() -> None:
    rule = CostRule(hybrid_state=True)
    assert rule((8, 0), EXTEND) is MAX_LEN
    assert rule((8, 1), EXTEND) is SUM_LEN
    assert CostRule()((8, 0), EXTEND) is SUM_LEN


@pytest.mark.parametrize(
    "rule",
    [
        lambda counts: SUM_LEN if len(counts) > 1 else MAX_LEN,
        lambda counts, mode: "sum_len" if mode is DECODE else MAX_LEN,
        lambda *given: SUM_LEN,
    ],
)
def test_an_engine_s_own_rule(rule: Any) -> None:
    planner = Planner([8], rule=rule)
    assert planner.plan(decode(8, 0)).padding is SUM_LEN
    assert planner.plan(decode(9, 0)).padding is SUM_LEN
    assert planner.declaration()["rule"] != Planner([8]).declaration()["rule"]


@pytest.mark.parametrize("rule", [lambda counts: MAX_LEN, lambda counts, mode: MAX_LEN])
def test_an_engine_s_own_rule_is_asked_for_captured_buckets_too(rule: Any) -> None:
    """With the counts that the bucket is captured with: those of the bucket, on every rank."""
    asked: list[Any] = []

    def noting(counts: tuple[int, ...], mode: gg.Mode) -> Padding:
        asked.append((counts, mode))
        return MAX_LEN

    assert Planner([8]).captured_padding(gg.Bucket(8, 8, 1), DECODE, 3) is SUM_LEN  # what is asked for otherwise
    assert Planner([8], rule=rule).captured_padding(gg.Bucket(8, 8, 1), DECODE, 3) is MAX_LEN
    assert Planner([8], rule=noting).captured_meeting(gg.Bucket(4, 8, 2), VERIFY, 3) == Meeting(MAX_LEN, (8,) * 3, 24)
    assert asked == [((8, 8, 8), VERIFY)]


def test_a_planner_hands_its_options_to_the_cost_rule() -> None:
    beyond = [RankFacts(1, 9, EXTEND), RankFacts(0, 0, EXTEND)]
    assert Planner([8]).plan(beyond).padding is SUM_LEN
    assert Planner([8], hybrid_state=True).plan(beyond).padding is MAX_LEN
    assert Planner([8], max_len_only=True).plan(beyond).padding is MAX_LEN


def test_where_a_rank_s_rows_begin() -> None:
    assert [Meeting(MAX_LEN, (4, 4, 4), 12).start(rank) for rank in range(3)] == [0, 4, 8]
    assert [Meeting(SUM_LEN, (4, 0, 2), 6).start(rank) for rank in range(3)] == [0, 4, 4]


# Alignment.


def test_every_bucket_is_a_multiple_of_the_alignment() -> None:
    planner = Planner([4, 12, 20, 28], alignment=8)
    assert list(planner.ladder) == [8, 16, 24, 32]
    assert planner.plan(decode(10, 1)).bucket.tokens == 16
    assert list(Planner([1, 2, 3], alignment=8, width=4, extend_ladder=[4, 12]).ladder) == [2, 4]
    assert list(Planner([1, 2, 3], alignment=8, width=4, extend_ladder=[4, 12]).extend_ladder) == [8, 16]


def test_live_counts_are_aligned_before_anything_is_derived() -> None:
    plan = Planner([8], alignment=4).plan(decode(9, 3, 0))
    assert (plan.counts, plan.rows) == ((12, 4, 0), 16)
    assert plan.bucket == gg.Bucket(12, 12, 1)


def test_live_counts_hold_whole_requests() -> None:
    """A rank of width 3 at alignment 2 is padded to whole requests, or its prep would have a part of one."""
    plan = Planner([4], alignment=2, width=3).plan([RankFacts(5, 15, VERIFY), RankFacts(1, 3, VERIFY)])
    assert plan.counts == (18, 6)
    assert plan.extents(0, gg.Bucket(5, 15, 3)) == gg.Bucket(6, 18, 3)


def test_a_decode_rank_beside_a_prompt_keeps_its_width() -> None:
    """Its prep gives rows for each request, so the rows that it makes up are requests; a prompt's are not."""
    planner = Planner([8, 16], rule=lambda counts: MAX_LEN)
    plan = planner.plan([RankFacts(1, 14, EXTEND), *decode(4, 0)])
    assert plan.counts == (14, 14, 14)
    assert plan.extents(0, gg.Bucket(1, 14, 0)) == gg.Bucket(1, 14, 0)
    assert plan.extents(1, gg.Bucket(4, 4, 1), 1) == gg.Bucket(14, 14, 1)
    assert plan.extents(2, gg.Bucket(0, 0, 0), 1) == gg.Bucket(14, 14, 1)
    assert plan.extents(2, gg.Bucket(0, 0, 0)) == gg.Bucket(1, 14, 0)


def test_an_unaligned_bucket_of_another_width_is_not_captured() -> None:
    plan = Planner([2, 4], alignment=4, width=2).plan([RankFacts(1, 1, DECODE), RankFacts(1, 1, DECODE)])
    assert (plan.forward, plan.reason) == (EAGER, gg.Reason.NOT_CAPTURED)


# The encoded form.


def test_engines_may_hand_in_the_matrix() -> None:
    planner, facts = Planner([4]), [RankFacts(2, 2, DECODE, extra=(7,)), RankFacts(1, 1, DECODE, extra=(8,))]
    matrix = stacked(facts)
    assert matrix[:, at.EXTRA].tolist() == [7, 8]
    assert planner.plan_encoded(torch.from_numpy(matrix)) == planner.plan(facts)


@pytest.mark.parametrize(
    "matrix",
    [
        np.zeros((2, 14), np.int32),
        np.zeros((0, 14), np.int64),
        np.zeros((2, 13), np.int64),
        np.zeros(14, np.int64),
        [[1, 2]],
    ],
)
def test_no_matrix_of_rows_is_refused(matrix: Any) -> None:
    with pytest.raises(gg.RankDisagreementError, match=r"expected int64\[ranks, 14 or more\]"):
        Planner([4]).plan_encoded(matrix)


def test_no_ranks_are_refused() -> None:
    with pytest.raises(gg.RankDisagreementError, match=r"^a plan of no ranks: expected the facts of at least one$"):
        Planner([4]).plan([])


def test_digests_are_compared_where_they_are_given() -> None:
    """What must be alike on all ranks and is no count, such as a split, is stated as a digest (RANK-SPLIT-4)."""
    planner = Planner([4])
    assert planner.plan(decode(1, digest=5) + decode(1) + decode(2, digest=5)).forward is GRAPH
    with pytest.raises(gg.RankDisagreementError, match="rank 2 has digest 0x6, rank 0 0x5"):
        planner.plan(decode(1, digest=5) + decode(1) + decode(2, digest=6))


def test_the_digest_tells_plans_apart() -> None:
    """Plans have one digest if and only if they are equal, whatever it is that differs, and whoever planned."""
    some = [*decode(0, 1, 3, 5, 9), RankFacts(2, 3, DECODE), RankFacts(3, 3, VERIFY), *extend(0, 3, 9)]
    some += [RankFacts(1, 1, DECODE, vote=False), RankFacts.refusal(DECODE)]
    planners = [
        Planner([4, 8]), Planner([8, 16]), Planner([4, 8], rule=lambda counts: MAX_LEN),
        Planner([4, 8], sum_len_tolerated=True), Planner([8, 16], sum_len_tolerated=True), Planner([4, 8], width=3),
    ]  # fmt: skip
    plans = [planner.plan(facts) for planner in planners for facts in product(some, some)]
    assert all(0 < plan.digest < 2**63 for plan in plans)
    by_digest: dict[int, set[Any]] = {}
    for plan in plans:
        by_digest.setdefault(plan.digest, set()).add(plan)
    assert all(len(equal) == 1 for equal in by_digest.values())
    assert len(by_digest) == len({plan._replace(digest=0) for plan in plans})


def test_the_digest_is_the_same_in_every_process() -> None:
    here = Planner([4, 8]).plan(decode(3, 0)).digest
    script = (
        "from graphglue import Mode; from graphglue.ranks import Planner, RankFacts;"
        "print(Planner([4, 8]).plan([RankFacts(3, 3, Mode.DECODE), RankFacts(0, 0, Mode.DECODE)]).digest)"
    )
    for seed in ("1", "2"):
        environment = {**os.environ, "PYTHONHASHSEED": seed, "PYTHONPATH": os.pathsep.join(sys.path)}
        command = [sys.executable, "-c", script]
        ran = subprocess.run(command, capture_output=True, text=True, check=True, env=environment)
        assert int(ran.stdout) == here


def test_the_longest_prefix_of_any_rank() -> None:
    facts = [RankFacts(1, 9, EXTEND, prefix=70), RankFacts(1, 4, EXTEND, prefix=12)]
    assert Planner([16]).plan(facts).longest_prefix == 70


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"alignment": 0}, "alignment=0"),
        ({"width": 1.5}, r"width=1\.5"),
        ({"max_requests": 0}, "max_requests=0"),
        ({"rule": 7}, "rule=7"),
        ({"extend_ladder": [0]}, "ladder size 0"),
    ],
)
def test_a_planner_refuses(options: dict[str, Any], text: str) -> None:
    with pytest.raises(gg.ConfigError, match=text):
        Planner([4], **options)


@pytest.mark.parametrize(
    ("column", "number"),
    [(at.REQUESTS, -3), (at.REQUESTS, 2**40), (at.TOKENS, -1), (at.TOKENS, 2**62), (at.MODE, 7), (at.MODE, -1)],
)
def test_a_row_that_no_facts_have_is_refused(column: int, number: int) -> None:
    matrix = stacked([RankFacts(3, 3, DECODE), RankFacts(1, 1, DECODE)])
    matrix[1, column] = number
    with pytest.raises(gg.RankDisagreementError, match="rank 1 gave a row that no facts have"):
        Planner([1, 2, 4]).plan_encoded(matrix)


def test_a_matrix_that_is_not_on_the_host_is_refused() -> None:
    with pytest.raises(gg.RankDisagreementError, match="gather rows to the host"):
        Planner([1]).plan_encoded(torch.zeros(2, 14, dtype=torch.int64, device="meta"))


def test_a_declaration_names_what_must_be_equal_on_all_ranks() -> None:
    """The names and values are what an operator reads where two ranks were started differently."""
    planner = Planner([3, 8], alignment=4, width=2, extend_ladder=[62], max_requests=5, row_bytes=7, rule=None)
    assert planner.declaration() == {
        "layout of the facts": "1",
        "ladder": "[4, 8]",
        "ladder of EXTEND": "[64]",
        "alignment": "4",
        "width": "2",
        "max_requests": "5",
        "sum_len_tolerated": "False",
        "rule": repr(CostRule(row_bytes=7)),
    }


def test_a_planner_of_a_ladder_alone() -> None:
    assert Planner([8, 16]).declaration() == {
        "layout of the facts": "1",
        "ladder": "[8, 16]",
        "ladder of EXTEND": "[8, 16]",
        "alignment": "1",
        "width": "1",
        "max_requests": "None",
        "sum_len_tolerated": "False",
        "rule": repr(CostRule(0, 16 * 1024 * 1024, False, False, False, False)),
    }


@pytest.mark.parametrize(
    ("option", "other", "name"),
    [
        ("alignment", 4, "alignment"),
        ("width", 2, "width"),
        ("max_requests", 5, "max_requests"),
        ("sum_len_tolerated", True, "sum_len_tolerated"),
        ("extend_ladder", [16], "ladder of EXTEND"),
        ("ladder", [16], "ladder"),
        *(
            (option, other, "rule")
            for option, other in {
                "row_bytes": 1, "all_reduce_limit_bytes": 1, "all_to_all": True, "speculative": True,
                "max_len_only": True, "hybrid_state": True, "rule": CostRule(row_bytes=1),
            }.items()
        ),
    ],
)  # fmt: skip
def test_ranks_that_were_built_differently_declare_it(option: str, other: Any, name: str) -> None:
    usual = {"ladder": [8], "extend_ladder": [8]}
    one, another = Planner(**usual).declaration(), Planner(**{**usual, option: other}).declaration()  # type: ignore[arg-type]
    assert {key for key in one if one[key] != another[key]} == {name}


def one_way(counts: tuple[int, ...]) -> Padding:
    return Padding.MAX_LEN


def other_way(counts: tuple[int, ...]) -> Padding:
    return Padding.SUM_LEN


@pytest.mark.parametrize(
    ("rule", "other"),
    [(one_way, other_way), (CostRule(row_bytes=1), CostRule(row_bytes=2)), (partial(one_way), partial(other_way))],
)
def test_rules_of_an_engine_s_own_are_told_apart_at_start_up(rule: Any, other: Any) -> None:
    names = [Planner([1], rule=one).declaration()["rule"] for one in (rule, rule, other)]
    assert names[0] == names[1] != names[2]
    assert " at 0x" not in names[0]


def test_roles_are_words() -> None:
    plan = Planner([1, 2]).plan([RankFacts(1, 1, DECODE), RankFacts(0, 0, DECODE)])
    assert list(plan.roles) == ["real", "idle"]


@pytest.mark.parametrize("prefill", [False, True])
def test_ranks_that_all_idle_in_extend_are_asked_for_their_prefill_vote(prefill: bool) -> None:
    facts = [RankFacts(0, 0, EXTEND, vote=not prefill, prefill_vote=prefill)] * 2
    assert (Planner([4]).plan(facts).forward is GRAPH) is prefill
