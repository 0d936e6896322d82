"""What an outside engineer once broke: ranks that raised alone, or went on alone, while the others waited."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch

import graphglue as gg
from graphglue.ranks import Planner, RankFacts, RankGroup

from .threads import (
    SLOTS,
    Exchange,
    Hang,
    Meeting,
    Model,
    all_well,
    batch_of,
    group_of,
    length_prep,
    own_of,
    runner_of,
    together,
)

DECODE, EXTEND, VERIFY = gg.Mode.DECODE, gg.Mode.EXTEND, gg.Mode.VERIFY
GRAPH, EAGER = gg.Route.GRAPH, gg.Route.EAGER
Build = Callable[[int, RankGroup, Model], Any]
LADDER = [2, 4, 8]


def decoding(rank: int, group: RankGroup, model: Model) -> gg.Runner:
    return runner_of(group, model)


def on_two(
    body: Callable[[int, Any, RankGroup], Any],
    build: Build = decoding,
    planner: Callable[[], Planner] = lambda: Planner(LADDER),
    capture: bool = True,
) -> list[Any]:
    """Run a body on two ranks; a rank that waits for one that does not come is seen within seconds."""
    exchange, meeting = Exchange(2), Meeting(2, timeout_s=3.0)

    def run(rank: int) -> Any:
        group = group_of(exchange, rank, planner(), timeout_s=3.0)
        runner = build(rank, group, Model(meeting, rank))
        if capture:
            runner.capture(progress=False)
        return body(rank, runner, group)

    return together(2, run)


def raised(call: Callable[[], Any]) -> Any:
    """Give what a call returned, or raised."""
    try:
        return call()
    except Exception as error:
        return error


def went(step: gg.Step) -> tuple[gg.Route, int]:
    return step.decision.forward, step.decision.bucket.tokens


# Idle ranks.


@pytest.mark.parametrize("mode", [EXTEND, VERIFY])
def test_ranks_idle_in_a_mode_that_is_not_captured_share_the_idle_graph(mode: gg.Mode) -> None:
    steps = all_well(on_two(lambda rank, runner, group: runner.replay(gg.Batch.idle(mode))))
    assert [went(step) for step in steps] == [(GRAPH, 2)] * 2


def prefilling(rank: int, group: RankGroup, model: Model) -> gg.Runner:
    return runner_of(group, model, modes=(EXTEND,))


def test_a_prefill_runner_idles_in_whatever_mode() -> None:
    planner = lambda: Planner([4, 16], max_requests=4)  # noqa: E731
    steps = all_well(on_two(lambda rank, runner, group: runner.replay(gg.Batch.idle()), prefilling, planner))
    assert [went(step) for step in steps] == [(GRAPH, 4)] * 2


def both(rank: int, group: RankGroup, model: Model) -> Any:
    """Two runners that share a group."""
    runners = runner_of(group, model), runner_of(group, model, modes=(EXTEND,))
    for runner in runners:
        runner.capture(progress=False)
    return runners


def test_an_idle_rank_in_the_other_runner_keeps_all_eager() -> None:
    """It can not know what its peers do, and has no graph of theirs there."""

    def body(rank: int, runners: Any, group: RankGroup) -> list[Any]:
        decode, prefill = runners
        first = prefill.replay(batch_of(1, 9, EXTEND)) if rank == 0 else decode.replay(gg.Batch.idle())
        second = decode.replay(batch_of(3)) if rank == 0 else prefill.replay(gg.Batch.idle(EXTEND))
        return [first, second]

    planner = lambda: Planner(LADDER, extend_ladder=[4, 16], max_requests=4)  # noqa: E731
    mine, idle = all_well(on_two(body, both, planner, capture=False))
    assert [step.decision.forward for step in (*mine, *idle)] == [EAGER] * 4
    assert mine[0].outputs["own"].tolist() == own_of(9)
    assert mine[1].outputs["own"].tolist() == own_of(3)


# Captures and repairs that one rank is refused.


def closed_on_rank_1(rank: int, group: RankGroup, model: Model) -> gg.Runner:
    runner = decoding(rank, group, model)
    if rank == 1:
        runner.close()
    return runner


@pytest.mark.parametrize(
    ("build", "sizes", "error"),
    [(closed_on_rank_1, [[2], [2]], gg.ClosedError), (decoding, [[2], [3]], gg.ConfigError)],
    ids=["closed", "no size of the ladder"],
)
def test_a_capture_that_one_rank_is_refused_begins_nowhere(build: Build, sizes: Any, error: type[Exception]) -> None:
    begin = time.monotonic()
    results = on_two(lambda rank, runner, group: runner.capture(sizes[rank], False), build, capture=False)
    assert time.monotonic() - begin < 2.5  # nobody waited
    assert isinstance(results[1], error)
    with pytest.raises(gg.RankDisagreementError, match=r"rank 1 .* sizes to capture refused"):
        raise results[0]


def test_keys_that_one_rank_has_captured_already_are_refused_on_all() -> None:
    def body(rank: int, runner: gg.Runner, group: RankGroup) -> Any:
        if rank == 0:
            runner.reset()
        return runner.capture(progress=False)

    results = on_two(body)
    assert isinstance(results[1], gg.CaptureError)
    assert isinstance(results[0], gg.RankDisagreementError)


@contextmanager
def failing_session() -> Iterator[None]:
    raise ValueError("no address could be registered")
    yield


def session_fails_on_rank_1(rank: int, group: RankGroup, model: Model) -> gg.Runner:
    registry = gg.Registry()
    contract = gg.PrepContract(name="lengths", reads={"seq_lens": 1}, outputs={"total": "fixed"}, modes={DECODE})
    registry.register(contract)(length_prep)
    hooks = gg.CaptureHooks(session=failing_session if rank == 1 else None, key=model.record)
    return gg.Runner(
        slots=SLOTS, ladder=LADDER, registry=registry, prep="lengths", forward=model, output_axes="token",
        ranks=group, hooks=hooks,
    )  # fmt: skip


def test_a_session_that_fails_on_one_rank_ends_the_capture_of_all() -> None:
    begin = time.monotonic()
    results = on_two(lambda rank, runner, group: runner.capture(progress=False), session_fails_on_rank_1, capture=False)
    assert time.monotonic() - begin < 2.5
    assert isinstance(results[1], ValueError)
    with pytest.raises(gg.CaptureError, match="another rank could not begin"):
        raise results[0]


@pytest.mark.parametrize("away", ["closed", "reset"])
def test_a_rank_that_can_not_repair_keeps_all_from_it(away: str) -> None:
    """The others go on, in step with it."""

    def body(rank: int, runner: gg.Runner, group: RankGroup) -> list[Any]:
        if rank == 1:
            runner.close() if away == "closed" else runner.reset()
        else:
            runner._forward.quarantine(runner._wanted[0], "lost")  # type: ignore[union-attr]
            runner._stepper.forget()
        return [raised(runner.maintain), raised(lambda: runner.replay(batch_of(1)))]

    other, gone = all_well(on_two(body))
    assert other[0] == []
    assert other[1].decision.forward is EAGER
    if away == "closed":
        assert [type(one) for one in gone] == [gg.ClosedError] * 2
    else:
        assert (gone[0], gone[1].decision.forward) == ([], EAGER)


def test_a_table_that_moved_on_one_rank_keeps_all_from_a_repair() -> None:
    def build(rank: int, group: RankGroup, model: Model) -> gg.Runner:
        registry = gg.Registry()
        contract = gg.PrepContract(
            name="lengths", reads={"seq_lens": 1}, tables=("table",), outputs={"total": "fixed"}, modes={DECODE}
        )
        registry.register(contract)(lambda view: {"total": (view.tables.table[0] + view.seq_lens.sum()).reshape(1)})
        tables = [torch.ones(4)]
        runner = gg.Runner(
            slots=SLOTS, ladder=LADDER, registry=registry, prep="lengths", forward=model, output_axes="token",
            ranks=group, tables={"table": lambda: tables[0]}, hooks=gg.CaptureHooks(key=model.record),
        )  # fmt: skip
        runner.moving = tables  # type: ignore[attr-defined]
        return runner

    def body(rank: int, runner: Any, group: RankGroup) -> list[Any]:
        if rank == 1:
            runner.moving[0] = torch.ones(4)
        else:
            runner._forward.quarantine(runner._wanted[0], "lost")
            runner._stepper.forget()
        seen = [raised(runner.maintain)]
        if rank == 1:
            runner.rebind_table("table", lambda: runner.moving[0])
        return [*seen, [key.requests for key in runner.maintain()], runner.replay(batch_of(8))]

    other, moved = all_well(on_two(body, build))
    assert other[0] == []
    assert isinstance(moved[0], gg.StaleTableError)
    assert (other[1], moved[1]) == ([8, 4, 2], [8, 4, 2])
    assert went(other[2]) == went(moved[2]) == (GRAPH, 8)


def test_what_a_capture_meets_in_is_compared_at_start_up() -> None:
    def build(rank: int, group: RankGroup, model: Model) -> gg.Runner:
        return runner_of(group, model, warmups=1 + rank)

    for result in on_two(lambda rank, runner, group: None, build, capture=False):
        with pytest.raises(gg.RankDisagreementError, match="rank 1 was built with warmups 2"):
            raise result


class Lora:
    """A variant whose spelling holds an address."""

    def __hash__(self) -> int:
        return 1

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Lora)


def test_variants_are_compared_without_their_addresses() -> None:
    def build(rank: int, group: RankGroup, model: Model) -> gg.Runner:
        return gg.Runner(slots=SLOTS, ladder=LADDER, prep=length_prep, ranks=group, variants=(Lora(),))

    assert on_two(lambda rank, runner, group: "built", build, capture=False) == ["built", "built"]


# Steps that fail on one rank, eagerly.


def prep_fails_on_rank_1(rank: int, group: RankGroup, model: Model) -> gg.Runner:
    def prep(view: gg.View) -> dict[str, torch.Tensor]:
        if rank == 1 and view.seq_lens.shape[0] == 9 and bool((view.seq_lens == 2).any()):
            raise ValueError("this rank's lengths")
        return length_prep(view)

    return runner_of(group, model, prep=prep)


def publish_fails_on_rank_1(rank: int, group: RankGroup, model: Model) -> gg.Runner:
    published = []

    def publish(metadata: Any) -> None:
        published.append(metadata)
        if rank == 1 and len(published) == 1:
            raise ValueError("what the backend points at")

    registry = gg.Registry()
    contract = gg.PrepContract(name="lengths", reads={"seq_lens": 1}, outputs={"total": "fixed"}, modes={DECODE})
    registry.register(contract, publish=publish)(length_prep)
    return gg.Runner(
        slots=SLOTS, ladder=LADDER, registry=registry, prep="lengths", forward=model, output_axes="token",
        ranks=group, hooks=gg.CaptureHooks(key=model.record),
    )  # fmt: skip


@pytest.mark.parametrize("build", [prep_fails_on_rank_1, publish_fails_on_rank_1], ids=["prep", "publish"])
def test_a_rank_whose_eager_step_fails_joins_the_others_first(build: Build) -> None:
    def body(rank: int, runner: gg.Runner, group: RankGroup) -> list[Any]:
        return [raised(lambda: runner.replay(batch_of(9))), raised(lambda: runner.replay(batch_of(3)))]

    other, failed = all_well(on_two(body, build))
    assert went(other[0]) == (EAGER, 9)
    assert isinstance(failed[0], ValueError)
    assert went(other[1]) == went(failed[1]) == (GRAPH, 4)  # nothing is left over


def test_without_the_stand_in_the_others_hang(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("graphglue.agreeing.Agreement._stand_in", lambda self, plan, forward: None)
    results = on_two(lambda rank, runner, group: runner.replay(batch_of(9)), prep_fails_on_rank_1)
    assert isinstance(results[0], Hang)


def test_what_is_no_facts_is_a_refusal_to_the_others() -> None:
    exchange = Exchange(2)

    def run(rank: int) -> list[Any]:
        group = group_of(exchange, rank, Planner(LADDER), timeout_s=3.0)
        seen = [raised(lambda: group.agree(RankFacts(1, 1, DECODE) if rank == 0 else None))]  # type: ignore[arg-type]
        return [*seen, group.agree(RankFacts(1, 1, DECODE)).forward]

    told, odd = all_well(together(2, run))
    assert (told[0].forward, told[0].vetoes, told[1]) == (EAGER, (1,), GRAPH)
    assert isinstance(odd[0], gg.BindError)
    assert odd[1] is GRAPH


def test_groups_with_other_planners_that_cross_on_one_process_group_find_out() -> None:
    """An idle rank may pick the group of its decode runner while a peer prefills in another."""
    exchange = Exchange(2)

    def run(rank: int) -> Any:
        decode = group_of(exchange, rank, Planner(LADDER), timeout_s=3.0)
        prefill = group_of(exchange, rank, Planner([16, 64]), timeout_s=3.0)
        return (prefill if rank == 0 else decode).agree(
            RankFacts(9, 9, EXTEND) if rank == 0 else RankFacts(0, 0, DECODE)
        )

    for result in together(2, run):
        with pytest.raises(gg.RankDisagreementError, match="agreed in another RankGroup"):
            raise result
