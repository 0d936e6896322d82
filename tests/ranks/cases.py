"""What real ranks run: each function is called in a process of its own, and returns what can be written as JSON."""

from __future__ import annotations

import logging
import os
import random
import time
from collections.abc import Callable
from functools import partial
from typing import Any, Literal

import numpy as np
import torch
import torch.distributed as dist

import graphglue as gg
from graphglue.errors import SegmentError
from graphglue.graphs.tape import Tape
from graphglue.ranks import Padding, Planner, RankFacts, RankGroup, facts
from graphglue.ranks.memory import MemoryTransport

from . import prefill
from .threads import SLOTS, length_prep, own_of

DECODE, EXTEND = gg.Mode.DECODE, gg.Mode.EXTEND
LADDER = [1, 2, 4, 8]


class Forward:
    """A forward that joins the rows of all ranks by the collective that was agreed, and adds their sum to its own."""

    def __init__(self, rank: int) -> None:
        self.rank, self.eager_steps = rank, 0
        self.at: int | None = None

    def __call__(self, view: gg.View, metadata: Any) -> dict[str, torch.Tensor]:
        self.eager_steps += 1
        num_rows, meeting = view.input_ids.shape[0], view.meeting
        if view.bucket.requests == self.at:
            float(view.input_ids.sum())  # what no recorder takes
        own = torch.where(torch.arange(num_rows) < view.real_tokens, view.input_ids + 1, 0)
        shared = torch.zeros(meeting.rows, dtype=torch.int64)
        if meeting.padding is Padding.SUM_LEN:
            shared[meeting.start(self.rank) : meeting.start(self.rank) + num_rows] = own
            dist.all_reduce(shared)
        else:
            dist.all_gather(list(shared.view(len(meeting.counts), -1)), own)
        return {"own": own, "all": shared.sum() + own}


def runner_of(group: RankGroup, forward: Forward, mode: gg.Mode = DECODE, **config: Any) -> gg.Runner:
    registry = gg.Registry()
    contract = gg.PrepContract(name="lengths", reads={"seq_lens": 1}, outputs={"total": "fixed"}, modes={mode})
    registry.register(contract)(length_prep)
    planner = group.planner
    runner = gg.Runner(
        slots=SLOTS,
        ladder=planner.extend_ladder if mode is EXTEND else planner.ladder,
        registry=registry,
        prep="lengths",
        forward=forward,
        output_axes="token",
        ranks=group,
        config=gg.RunnerConfig(**config),
    )
    runner.capture(progress=False)
    return runner


def batch_of(requests: int, tokens: int | None = None, mode: gg.Mode = DECODE) -> gg.Batch:
    if requests == 0:
        return gg.Batch.idle(mode)
    tokens = requests if tokens is None else tokens
    return gg.Batch(requests, {"seq_lens": [1] * requests, "input_ids": list(range(tokens))}, mode, num_tokens=tokens)


def told(step: gg.Step, tokens: list[int], rank: int) -> list[Any]:
    """Check a rank's rows against the sum over all ranks, and tell where the step went."""
    total = sum(sum(own_of(count)) for count in tokens)
    assert step.outputs["own"].tolist() == own_of(tokens[rank])
    assert step.outputs["all"].tolist() == [total + own for own in own_of(tokens[rank])]
    decision = step.decision
    return [decision.forward.value, list(decision.bucket), str(decision.key.padding), decision.reason.value]


def steps(rank: int, size: int, exchange: Literal["group", "memory"] = "group") -> Any:
    """Random loads, idle ranks, one over the ladder, one over its own waste limit, refused batches."""
    planner = Planner(LADDER, row_bytes=1, all_reduce_limit_bytes=4 * size)
    group = RankGroup(None, planner, timeout_s=30, check_every=3, exchange=exchange)
    forward = Forward(rank)
    runner = runner_of(group, forward, waste_limit=1.5 if rank == 1 else None)
    draws, seen, refused = random.Random(size), [], 0
    for number in range(24):
        loads = [draws.choice([0, 1, 2, 3, 4, 5, 6, 7, 8, 9 if number % 6 == 5 else 8]) for _ in range(size)]
        odd = draws.randrange(size) if number % 8 == 7 and size > 1 else None
        batch = batch_of(loads[rank])
        if odd is not None:
            loads[odd] = 0
            batch = gg.Batch(2, {"seq_lens": [1]}) if rank == odd else batch
        try:
            seen.append([number, *told(runner.replay(batch), loads, rank)])
        except gg.BindError:
            assert rank == odd
            refused += 1
            seen.append([number, *[None] * 4])
    return {"seen": seen, "refused": refused, "digest": group.plan.digest if group.plan else 0}


def fails_to_capture(rank: int, size: int) -> Any:
    """The last rank can not record its forward at 4, and is repaired later."""
    group, forward = RankGroup(None, Planner(LADDER), timeout_s=30), Forward(rank)
    forward.at = 4 if rank == size - 1 else None
    runner = runner_of(group, forward)
    seen = [told(runner.replay(batch_of(load)), [load] * size, rank)[:2] for load in (2, 3, 7)]
    forward.at = None
    repaired = [key.requests for key in runner.maintain()]
    seen.append(told(runner.replay(batch_of(3)), [3] * size, rank)[:2])
    return {"seen": seen, "repaired": repaired}


def steps_through_memory(rank: int, size: int) -> Any:
    """The same through memory that the ranks share."""
    return steps(rank, size, "memory")


def leaves(rank: int, size: int, exchange: Literal["group", "memory"] = "group") -> Any:
    """The last rank leaves after the first step; the others give up in time."""
    group = RankGroup(None, Planner(LADDER), timeout_s=2, exchange=exchange)
    group.agree(RankFacts(1, 1, DECODE))
    if rank == size - 1:
        time.sleep(8)  # it is still there, and busy with something else
        return None
    begin = time.monotonic()
    try:
        group.agree(RankFacts(1, 1, DECODE))
    except gg.RankDisagreementError as error:
        return {"text": str(error), "seconds": time.monotonic() - begin}
    return {"text": "", "seconds": 0}


def leaves_memory(rank: int, size: int) -> Any:
    """The same through memory that the ranks share."""
    return leaves(rank, size, "memory")


def dies(rank: int, size: int, exchange: Literal["group", "memory"] = "group") -> Any:
    """The last rank is gone."""
    group = RankGroup(None, Planner(LADDER), timeout_s=5 if exchange == "group" else 60, exchange=exchange)
    group.agree(RankFacts(1, 1, DECODE))
    if rank == size - 1:
        return None
    begin = time.monotonic()
    try:
        group.agree(RankFacts(1, 1, DECODE))
    except gg.RankDisagreementError as error:
        return {"text": str(error), "seconds": time.monotonic() - begin}
    return {"text": "", "seconds": 0}


def dies_in_memory(rank: int, size: int) -> Any:
    """The same through memory that the ranks share."""
    return dies(rank, size, "memory")


def comes_late(rank: int, size: int) -> Any:
    """Rank 1 comes to an agreement in shared memory when the others have given up."""
    group = RankGroup(None, Planner(LADDER), timeout_s=1, exchange="memory")
    group.agree(RankFacts(1, 1, DECODE))
    if rank == 1:
        time.sleep(2.5)
    try:
        group.agree(RankFacts(2, 2, DECODE))
    except gg.RankDisagreementError as error:
        return str(error)
    finally:
        time.sleep(3)  # their store is there for all
    return ""


def many_rows_through_memory(rank: int, size: int) -> Any:
    """Thousands of gathers with pauses in odd places, over the end of what the numbers count, in two groups at once."""
    groups = [RankGroup(None, Planner(LADDER), num_extra=extra, timeout_s=30, exchange="memory") for extra in (0, 5)]
    for group in groups:
        assert isinstance(group._transport, MemoryTransport)
        group._transport._number = 0xFFFFFFFF - 1000
    draws, seen, wrong = random.Random(rank), random.Random(0), 0
    for _ in range(3000):
        rows = [seen.randrange(-(2**63), 2**63) for _ in range(size)]
        for group in groups:
            if draws.random() < 0.02:
                time.sleep(draws.random() * 0.004)
            row = np.full(facts.EXTRA + group.num_extra, rows[rank])
            group._transport.start(row, 30)
            if draws.random() < 0.02:
                time.sleep(draws.random() * 0.004)
            wrong += not (group._transport.finish(30) == np.array(rows)[:, None]).all()
    return wrong


def one_maps_nothing(rank: int, size: int) -> Any:
    """Rank 1 can not open the file, then rank 0 can not make one; nothing stays, and the next group works."""
    told = []
    for broken, name in ((1, "open"), (0, "posix_fallocate")):
        whole = getattr(os, name)
        if rank == broken:
            setattr(os, name, _refuses)
        try:
            RankGroup(None, Planner(LADDER), timeout_s=20, exchange="memory")
        except gg.ConfigError as error:
            told.append(str(error))
        finally:
            setattr(os, name, whole)
    plan = RankGroup(None, Planner(LADDER), timeout_s=20, exchange="memory").agree(RankFacts(3, 3, DECODE))
    dist.barrier()
    left = (
        [name for name in os.listdir("/dev/shm") if name.startswith("graphglue-")] if os.path.isdir("/dev/shm") else []
    )
    return [*told, plan.bucket.tokens, left]


def _refuses(*args: Any) -> Any:
    raise OSError("no such place")


def half_in_memory(rank: int, size: int) -> Any:
    """Rank 1 gathers by the process group, the others through memory."""
    try:
        RankGroup(None, Planner(LADDER), timeout_s=20, exchange="group" if rank == 1 else "memory")
    except gg.RankDisagreementError as error:
        return str(error)
    return ""


def misconfigured(rank: int, size: int) -> Any:
    """Rank 1 has another ladder."""
    try:
        RankGroup(None, Planner([1, 2, 16] if rank == 1 else LADDER), timeout_s=20)
    except gg.RankDisagreementError as error:
        return str(error)
    return ""


def exchanged_by_the_engine(rank: int, size: int) -> Any:
    """The engine gathers the facts with its own collective, in a row that holds more, and overlaps nothing."""
    group, forward = RankGroup(None, Planner(LADDER), timeout_s=30), Forward(rank)
    runner, seen = runner_of(group, forward), []
    for loads in ([3] + [0] * (size - 1), list(range(size)), [8] * size):
        batch = batch_of(loads[rank])
        row = torch.zeros(2 + facts.EXTRA, dtype=torch.int64)
        row[2:] = torch.from_numpy(runner.facts(batch).encoded().copy())
        gathered = [torch.empty_like(row) for _ in range(size)]
        dist.all_gather(gathered, row)
        plan = group.planner.plan_encoded(torch.stack(gathered)[:, 2:])
        seen.append(told(runner.replay(batch, plan=plan), loads, rank)[:2])
    group.begin(runner.facts(batch_of(rank)))  # or with the group, beside other work
    plan = group.finish()
    seen.append(told(runner.replay(batch_of(rank), plan=plan), list(range(size)), rank)[:2])
    return seen


def two_runners(rank: int, size: int) -> Any:
    """Decode and prefill: one exchange says which runner all ranks use, and who is converted."""
    planner = Planner(LADDER, extend_ladder=[2, 4, 16, 64], max_requests=8)
    group, forward = RankGroup(None, planner, timeout_s=30), Forward(rank)
    decode = runner_of(group, forward)
    prefill = runner_of(group, forward, EXTEND, max_requests=8)
    seen = []
    for prompt in (0, 12, 0, 40):
        tokens = [prompt or 2, *range(1, size)]
        batch = batch_of(1, prompt, EXTEND) if prompt and rank == 0 else batch_of(tokens[rank])
        stated = prefill.facts(batch) if batch.mode is EXTEND else decode.facts(batch).beside(prefill.facts(batch))
        plan = group.agree(stated)
        runner = prefill if plan.mode is EXTEND else decode
        seen.append([plan.mode.value, *told(runner.replay(batch, plan=plan), tokens, rank)[:2]])
    return seen


def recorded_collectives(rank: int, size: int) -> Any:
    """Every family of collectives, recorded by the tape: a replay gives what the eager call gives."""
    from torch.distributed import _functional_collectives as functional

    source, world = torch.ones(4), dist.group.WORLD

    def reduced() -> torch.Tensor:
        buffer = source * 2
        dist.all_reduce(buffer)
        return buffer + 1

    def gathered() -> torch.Tensor:
        parts = torch.zeros(size, 4)
        dist.all_gather(list(parts), source * 3)
        return parts + 0

    def scattered() -> torch.Tensor:
        mine = torch.zeros(4)
        dist.reduce_scatter(mine, [source * (part + 1) for part in range(size)])
        return mine + 0

    def broadcast() -> torch.Tensor:
        buffer = source + 0
        dist.broadcast(buffer, 0)
        return buffer + 0

    def later() -> torch.Tensor:
        buffer = source * 2
        work = dist.all_reduce(buffer, async_op=True)
        work.wait()
        return buffer + 1

    def by_value() -> torch.Tensor:
        return functional.all_reduce(source * 2, "sum", world) + 1

    calls = {"all_reduce": reduced, "all_gather": gathered, "reduce_scatter": scattered, "broadcast": broadcast}
    calls |= {"async": later, "functional": by_value}
    wrong = []
    for name, call in calls.items():
        call()
        with Tape().session():
            recording = Tape().record(call)
        for value in range(20):
            source.fill_(value + rank)
            recording.replay()
            if not torch.equal(recording.outputs, call()):
                wrong.append(name)
    return {"wrong": sorted(set(wrong)), "num_calls": len(calls)}


def longer_rows(rank: int, size: int) -> Any:
    """Rank 1 has rows of another length, on which gloo ends the process where it gathers them."""
    try:
        RankGroup(None, Planner(LADDER), num_extra=3 if rank == 1 else 0, timeout_s=20)
    except gg.RankDisagreementError as error:
        return str(error)
    return ""


def prefill_in_segments(
    rank: int,
    size: int,
    device: str = "cpu",
    build: Callable[..., RankGroup] | None = None,
    rule: Any = None,
) -> Any:
    """Prompts through segments with eager breaks: idle, vetoing, refused and failing ranks, each held to its rows.

    Args:
        rank, size: this rank, and how many there are.
        device: where the forward runs.
        build: makes the group of a planner; by default over the default process group.
        rule: the planner's, for what runs eagerly.
    """

    def fail(rows: torch.Tensor, view: gg.View, layer: int) -> None:
        if failing and layer == 0:
            raise RuntimeError("this rank's attention fails")

    failing = False
    model = prefill.Prefill(prefill.joined(rank), device, fail)
    group = (build or partial(RankGroup, None))(prefill.planner(rule=rule), timeout_s=30, check_every=2)
    runner = prefill.prefill_runner(group, model, device=device)
    runner.capture(progress=False)
    seen = []
    story = [[[3, 2], [8]], [[5], []], [[], [2, 2]], [[16], [1]], [[17], [3]], [[9], [10]], [[4], [7]], [[], []]]
    for number, line in enumerate(story):
        works = prefill.works_of([line[other % 2] for other in range(size)], number)
        failing = number == 5 and rank == 1
        batch = works[rank].batch()
        if number == 6 and size > 1:  # rank 1 is refused, and takes part with no rows
            works[1] = prefill.Work([])
            batch = gg.Batch(1, {"lens": [1]}, EXTEND, num_tokens=1) if rank == 1 else batch
        try:
            step = runner.replay(batch)
        except (gg.BindError, SegmentError) as error:
            seen.append(type(error).__name__)
            continue
        if number != 5:  # where the failing rank's rows are void, and so is their sum
            assert torch.equal(step.outputs["rows"].cpu(), prefill.reference(works)[rank]), (number, step.decision)
        seen.append(step.decision.forward.value)
    stats = runner.stats()
    runner.close()  # its graphs hold collectives, so before the process group
    return {"seen": seen, "one_launch": stats["one_launch"], "fallbacks": list(stats["launch_fallbacks"])}


def alone_with_a_collective(rank: int, size: int) -> Any:
    """A runner without ranks whose forward meets the others, and one whose forward does not."""
    told: list[str] = []
    listener = logging.Handler()
    listener.emit = lambda record: told.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("graphglue").addHandler(listener)
    heard = []
    for join in (lambda rows, view: rows, lambda rows, view: dist.all_reduce(rows) or rows):
        runner = prefill.prefill_runner(None, prefill.Prefill(join))
        runner.capture(progress=False)
        heard.append([text for text in told if "no ranks" in text])
    return [len(heard[0]), len(heard[1]), heard[1][0] if heard[1] else ""]
