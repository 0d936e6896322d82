"""The group: one exchange a step, comparisons at start-up, and errors that name the rank."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import graphglue as gg
from graphglue.ranks import Planner, RankFacts, RankGroup

from ...ranks.threads import Exchange, ThreadTransport, all_well, group_of, together

DECODE = gg.Mode.DECODE


def facts(requests: int, **more: Any) -> RankFacts:
    return RankFacts(requests, requests, DECODE, **more)


def test_all_ranks_get_one_plan_and_everybody_s_facts() -> None:
    exchange = Exchange(3)

    def run(rank: int) -> Any:
        group = group_of(exchange, rank, Planner([1, 2, 4]), num_extra=1)
        plan = group.agree(facts(rank, extra=(10 * rank,)))
        assert group.plan is plan
        return plan, group.facts(), group.matrix[:, -1].tolist()

    results = all_well(together(3, run))
    assert {plan for plan, _, _ in results} == {Planner([1, 2, 4]).plan([facts(0), facts(1), facts(2)])}
    for _, seen, extra in results:
        assert seen == [facts(rank, extra=(10 * rank,)) for rank in range(3)]
        assert extra == [0, 10, 20]


def test_begin_and_finish_leave_room_for_other_work() -> None:
    exchange = Exchange(2)

    def run(rank: int) -> Any:
        group = group_of(exchange, rank, Planner([4]))
        group.begin(facts(rank + 1))
        with pytest.raises(gg.GraphGlueError, match="begin\\(\\) twice"):
            group.begin(facts(1))
        with pytest.raises(gg.GraphGlueError, match="under way"):
            group.every(True)
        plan = group.finish()
        with pytest.raises(gg.GraphGlueError, match="without begin"):
            group.finish()
        return plan

    assert len(set(all_well(together(2, run)))) == 1


def test_facts_that_can_not_be_sent_are_a_refusal_to_the_others() -> None:
    exchange = Exchange(2)

    def run(rank: int) -> Any:
        return group_of(exchange, rank, Planner([4])).agree(facts(1, extra=(5,) if rank == 1 else ()))

    results = together(2, run)
    assert isinstance(results[1], gg.BindError)
    assert (results[0].reason, results[0].vetoes) == (gg.Reason.RANK_VETO, (1,))


def test_flags_and_bits_of_all_ranks() -> None:
    exchange = Exchange(3)

    def run(rank: int) -> Any:
        group = group_of(exchange, rank, Planner([4]))
        return group.every(True), group.every(rank != 1), group.union(1 << rank), group.union(0), group.union(1 << 60)

    assert all_well(together(3, run)) == [(True, False, 0b111, 0, 1 << 60)] * 3


@pytest.mark.parametrize(
    ("odd", "text"),
    [
        (Planner([1, 2, 8]), r"rank 1 was built with ladder \[1, 2, 8\], most ranks \(rank 0\) with \[1, 2, 4\]"),
        (Planner([1, 2, 4], row_bytes=8), "row_bytes=8"),
        (Planner([1, 2, 4], rule=lambda counts: "max_len"), "rule"),
        (Planner([1, 2, 4], max_requests=3), "rank 1 was built with max_requests 3"),
    ],
)
def test_a_misconfigured_rank_fails_at_start_up(odd: Planner, text: str) -> None:
    exchange = Exchange(3)
    results = together(3, lambda rank: group_of(exchange, rank, odd if rank == 1 else Planner([1, 2, 4])))
    for result in results:
        assert isinstance(result, gg.RankDisagreementError)
    with pytest.raises(gg.RankDisagreementError, match=text):
        raise results[0]


def test_ranks_in_different_calls_find_out() -> None:
    exchange = Exchange(2)

    def run(rank: int) -> Any:
        group = group_of(exchange, rank, Planner([4]))
        return group.every(True) if rank == 0 else group.agree(facts(1))

    results = together(2, run)
    with pytest.raises(gg.RankDisagreementError, match="rank 1 is in a step, rank 0 in a capture"):
        raise results[0]
    with pytest.raises(gg.RankDisagreementError, match="rank 0 is in a capture, while this plan is for a step"):
        raise results[1]


class Straying(Planner):
    """A planner of another build: it rounds once more, and nobody would notice by its declaration."""

    def plan_encoded(self, matrix: Any) -> Any:
        plan = super().plan_encoded(matrix)
        return plan._replace(counts=tuple(count + 1 for count in plan.counts), digest=plan.digest ^ 1)


@pytest.mark.parametrize("check_every", [0, 2])
def test_plans_that_part_are_found_while_debugging(check_every: int) -> None:
    exchange = Exchange(2)

    def run(rank: int) -> int:
        group = group_of(exchange, rank, (Straying if rank == 1 else Planner)([1, 2, 4]), check_every=check_every)
        for step in range(5):
            group.agree(facts(step))
        return 5

    results = together(2, run)
    if not check_every:
        assert results == [5, 5]  # nobody looked
        return
    for result in results:
        with pytest.raises(gg.RankDisagreementError, match=r"rank 1 was built with counts \(2, 2\).* with \(1, 1\)"):
            raise result


def test_plans_that_agree_are_compared_and_pass() -> None:
    exchange = Exchange(2)

    def run(rank: int) -> int:
        group = group_of(exchange, rank, Planner([1, 2, 4]), check_every=1)
        for step in range(5):
            group.agree(facts((step + rank) % 4))
        return exchange.calls[rank]

    assert all_well(together(2, run)) == [6, 6]  # one comparison at start-up, and one exchange a step


class Failing:
    """A transport whose exchange fails at the third call."""

    rank, size = 0, 2

    def __init__(self, away: list[int] | None, at_start: bool) -> None:
        self._away, self._at_start, self._calls = away, at_start, 0

    def start(self, row: np.ndarray, timeout_s: float) -> None:
        self._calls += 1
        self._row = row.copy()
        if self._calls == 3 and self._at_start:
            raise RuntimeError("connection reset\nand a long trace")

    def finish(self, timeout_s: float) -> np.ndarray:
        if self._calls == 3:
            raise RuntimeError("connection reset\nand a long trace")
        return np.stack([self._row, self._row])

    def exchange(self, text: bytes, size: int, timeout_s: float) -> list[bytes]:
        return [text, text]

    def absent(self, call: int, patience_s: float) -> list[int] | None:
        return self._away


@pytest.mark.parametrize("at_start", [False, True])
@pytest.mark.parametrize(
    ("away", "text"),
    [([1], "rank 1 did not come to it"), ([0, 1], "ranks 0, 1 did not"), ([], "too late"), (None, "some rank is gone")],
)
def test_a_failed_exchange_is_a_disagreement_and_ends_the_group(away: Any, text: str, at_start: bool) -> None:
    group = RankGroup(Failing(away, at_start), Planner([4]), timeout_s=0.1)
    group.agree(facts(1))
    with pytest.raises(gg.RankDisagreementError, match=text) as caught:
        group.agree(facts(2))
    assert "step 2 with 2 requests of 2 tokens" in str(caught.value)
    assert str(caught.value).endswith("The backend says: connection reset")
    with pytest.raises(gg.RankDisagreementError, match="of no use after a failed exchange"):
        group.agree(facts(2))


@pytest.mark.parametrize(
    ("make", "text"),
    [
        (lambda: RankGroup(ThreadTransport(Exchange(1), 0), [1, 2]), "expected a graphglue.ranks.Planner"),  # type: ignore[arg-type]
        (lambda: group_of(Exchange(1), 0, Planner([1]), timeout_s=0), "timeout_s=0"),
        (lambda: group_of(Exchange(1), 0, Planner([1]), timeout_s=float("inf")), "timeout_s=inf"),
        (lambda: group_of(Exchange(1), 0, Planner([1]), timeout_s="5"), "timeout_s='5'"),
        (lambda: group_of(Exchange(1), 0, Planner([1]), check_every=-1), "check_every=-1"),
        (lambda: group_of(Exchange(1), 0, Planner([1]), num_extra=1.5), r"num_extra=1\.5"),
        (lambda: RankGroup(None, Planner([1])), "not initialised"),
        (lambda: RankGroup(-100, Planner([1])), "process_group is -100; expected a torch.distributed group"),  # type: ignore[arg-type]
    ],
)
def test_a_group_refuses(make: Any, text: str) -> None:
    with pytest.raises(gg.ConfigError, match=text):
        make()


class OneBuffer(ThreadTransport):
    """It gathers into the same memory every time, as collectives do."""

    def finish(self, timeout_s: float) -> np.ndarray:
        rows = super().finish(timeout_s)
        self._rows = getattr(self, "_rows", np.zeros_like(rows))
        self._rows[:] = rows
        return self._rows


def test_the_rows_of_a_step_outlive_other_exchanges() -> None:
    group = RankGroup(OneBuffer(Exchange(1), 0), Planner([1, 2]))
    group.agree(facts(2))
    group.union(5)
    assert [one.requests for one in group.facts()] == [2]


@pytest.mark.parametrize("method", ["start", "finish", "exchange"])
def test_a_rank_that_was_interrupted_in_a_call_makes_no_other(method: str) -> None:
    """What it sends next could be paired with what its peers sent for the step before."""

    class Interrupted(ThreadTransport):
        armed = False

    def interrupt(self: Interrupted, *args: Any) -> Any:
        if self.armed:
            raise KeyboardInterrupt
        return getattr(ThreadTransport, method)(self, *args)

    setattr(Interrupted, method, interrupt)
    transport = Interrupted(Exchange(1), 0)
    group = RankGroup(transport, Planner([4]), timeout_s=5)
    group.agree(facts(1))
    transport.armed = True
    with pytest.raises(KeyboardInterrupt):
        group.compare({"a": "b"}) if method == "exchange" else group.agree(facts(1))
    transport.armed = False
    for _ in range(2):
        with pytest.raises(gg.RankDisagreementError, match=r"of no use .* Rank 0 was interrupted in exchange"):
            group.agree(facts(1))
