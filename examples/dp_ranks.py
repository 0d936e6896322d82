"""Data-parallel ranks that always agree: decode, a prompt on one rank, an idle rank, a veto, a refused batch.

    torchrun --nproc-per-node 4 examples/dp_ranks.py                     # gloo, on the CPU tape
    torchrun --nproc-per-node 2 examples/dp_ranks.py --device cuda       # NCCL, one GPU for each rank

Each rank serves its own requests, and all meet in collectives inside the captured forward, so they must be in
the same bucket, all in a graph or all eager, and in the same collective. An engine has two runners here, one for
decode and one for prompts. A prompt attends to itself, over a length of its own, which no graph can hold: so the
prefill is captured in segments, with the attention as an eager break between them, and the collectives stay inside.
Before each step a rank states its facts once; the plan that comes back says which runner every rank uses. Every
rank checks its outputs, bit for bit, against the whole group's step computed alone.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, Literal

import torch
import torch.distributed as dist

import graphglue as gg
from graphglue.ranks import Padding, Planner, RankFacts, RankGroup, RankPlan

WIDTH, VOCABULARY, CONTEXT, NUM_LAYERS = 32, 97, 64, 2
DECODE, EXTEND = gg.Mode.DECODE, gg.Mode.EXTEND
LADDER, TOKEN_LADDER, MAX_REQUESTS = [1, 2, 4, 8], [2, 4, 16, 64], 16

SLOTS = [
    gg.Slot("input_ids", axis="token", dtype=torch.int64, pad=0),
    gg.Slot("positions", axis="token", dtype=torch.int64, pad=0),
    gg.Slot("lens", axis="request", dtype=torch.int64, pad=0),
    gg.Slot("real_tokens", axis="fixed", inner=(1,), dtype=torch.int64, pad=0, value=gg.RAW_TOKENS),
    gg.Slot("rank_counts", axis="rank", dtype=torch.int32, pad=0, value=gg.RANK_COUNTS),
]


# The model. Whole numbers in double precision: sums are exact in any order.


class Weights:
    """What all ranks hold."""

    def __init__(self, device: torch.device) -> None:
        rows = torch.arange(VOCABULARY * WIDTH, dtype=torch.float64, device=device)
        self.embedding = (rows.view(VOCABULARY, WIDTH) * 7) % 13
        self.scale = torch.arange(CONTEXT, dtype=torch.float64, device=device) % 5 + 1

    def hidden(self, input_ids: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
        """Give each token's row."""
        return self.embedding[input_ids] * scale[:, None]


def prep(view: gg.View) -> dict[str, torch.Tensor]:
    """Look up what attention would: here a factor for each position."""
    return {"scale": view.tables.scale[view.positions]}


@gg.eager_break(row_aligned=("rows",))
def attend(rows: torch.Tensor, view: gg.View) -> torch.Tensor:
    """Attend over each request of the step: it gets the real rows only, of an idle rank none."""
    lens: list[int] = view.live.lens.tolist()
    return attended(rows, [*lens, rows.shape[0] - sum(lens)])  # rows of no request: only while a bucket is recorded


def attended(rows: torch.Tensor, lens: Sequence[int]) -> torch.Tensor:
    """Let each row see the rows of its request up to itself."""
    return torch.cat([request.cumsum(0) for request in rows.split(list(lens))])


def forward_of(weights: Weights, rank: int, mode: gg.Mode) -> Callable[[gg.View, Any], torch.Tensor]:
    """Build a rank's forward: in each layer its own rows, plus the sum of the rows of all ranks."""

    def forward(view: gg.View, metadata: Any) -> torch.Tensor:
        rows = weights.hidden(view.input_ids, metadata["scale"])
        for _ in range(NUM_LAYERS):
            if mode is EXTEND:  # a request that decodes is one row, which sees itself
                rows = attend(rows, view)
            rows = rows + shared(rows, view, rank)
        return rows

    return forward


def shared(rows: torch.Tensor, view: gg.View, rank: int) -> torch.Tensor:
    """Sum the real rows of all ranks, by the collective that was agreed."""
    gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
    num_rows, meeting = rows.shape[0], view.meeting
    real = torch.arange(num_rows, device=rows.device) < view.real_tokens
    own = torch.where(real[:, None], rows, 0.0)
    buffer = own.new_zeros(meeting.rows, WIDTH)
    if meeting.padding is Padding.SUM_LEN:  # everybody's rows at an offset of their own, and one sum
        start = meeting.start(rank)
        buffer[start : start + num_rows] = own
        dist.all_reduce(buffer)
    else:  # equal parts
        gather(buffer, own)
    return buffer.sum(0)


# Where facts are gathered: host memory, device memory, or memory that the ranks of one host share (the fastest).
EXCHANGES = ("host", "device", "memory")

# What comes in: a pure function of step and rank, so that each rank knows what all of them have.


class Work:
    """One rank's requests of one step: the tokens of each, at their positions."""

    def __init__(self, step: int, rank: int, mode: gg.Mode, lens: Sequence[int]) -> None:
        self.mode, self.lens, num_tokens = mode, list(lens), sum(lens)
        self.input_ids = [(31 * step + 7 * rank + 3 * token) % VOCABULARY for token in range(num_tokens)]
        self.positions = [(step + rank + token) % CONTEXT for token in range(num_tokens)]

    def batch(self) -> gg.Batch:
        """Hand it in."""
        if not self.lens:
            return gg.Batch.idle(self.mode)
        sources = {"input_ids": self.input_ids, "positions": self.positions, "lens": self.lens}
        return gg.Batch(len(self.lens), sources, self.mode, num_tokens=sum(self.lens))


# What happens, the load of each rank ("p12+5" are prompts of 12 and of 5 tokens), and who objects how.
STORY: Sequence[tuple[str, Sequence[int | str], str]] = [
    ("different loads", (3, 1, 4, 2), ""),
    ("rank 1 goes idle", (3, 0, 4, 2), ""),
    ("rank 1 is back, in another bucket", (3, 6, 4, 2), ""),
    ("a prompt on rank 0, the others decode", ("p12", 2, 4, 2), ""),
    ("a prompt beside an idle rank and decode", ("p12", 0, 4, 2), ""),
    ("prompts of different lengths", ("p12+3", "p30+20", "p9", "p2+4+7+3"), ""),
    ("prompts beside an idle rank", ("p12", 0, "p5+4", "p16"), ""),
    ("rank 1 vetoes the graph", (2, 2, 1, 2), "veto"),
    ("rank 1 has more than the ladder holds", (2, 9, 1, 2), ""),
    ("rank 1's batch is refused", (2, 3, 1, 2), "refused"),
    ("all go on", (2, 3, 1, 2), ""),
    ("nobody has work", (0, 0, 0, 0), ""),
]


def works_of(step: int, loads: Sequence[int | str], size: int) -> list[Work]:
    """Read a line of the story, for any number of ranks."""
    works = []
    for rank in range(size):
        load = loads[rank % len(loads)]
        if isinstance(load, str):
            works.append(Work(step, rank, EXTEND, [int(length) for length in load[1:].split("+")]))
        else:
            works.append(Work(step, rank, DECODE, [1] * load))
    return works


def reference(weights: Weights, works: Sequence[Work], rank: int) -> torch.Tensor:
    """Compute the whole group's step in one process, without slots, padding or collectives; give a rank's rows."""
    device = weights.scale.device
    rows = [
        weights.hidden(
            torch.tensor(work.input_ids, dtype=torch.int64, device=device),
            weights.scale[torch.tensor(work.positions, dtype=torch.int64, device=device)],
        )
        for work in works
    ]
    for _ in range(NUM_LAYERS):
        rows = [attended(own, work.lens) if work.lens else own for own, work in zip(rows, works)]
        rows = [own + torch.cat(rows).sum(0) for own in rows]
    return rows[rank]


# The engine.


class Engine:
    """One rank: a runner for decode, one for prompts, and a group that all ranks are in."""

    def __init__(
        self, device: torch.device, process_group: dist.ProcessGroup | None, exchange: Literal["group", "memory"]
    ) -> None:
        self.rank, self.weights = dist.get_rank(), Weights(device)
        planner = Planner(
            LADDER,
            row_bytes=8 * WIDTH,
            all_reduce_limit_bytes=4096,
            extend_ladder=TOKEN_LADDER,
            max_requests=MAX_REQUESTS,
        )
        self.group = RankGroup(process_group, planner, timeout_s=60, check_every=4, exchange=exchange)
        self.runners = {mode: self._runner(mode, device) for mode in (DECODE, EXTEND)}

    def _runner(self, mode: gg.Mode, device: torch.device) -> gg.Runner:
        registry = gg.Registry()
        contract = gg.PrepContract(
            name="scales",
            reads={"positions": 0},
            tables=("scale",),
            outputs={"scale": "token"},
            modes={mode},
            idle="glue",
        )
        registry.register(contract)(prep)
        runner = gg.Runner(
            slots=SLOTS,
            ladder=LADDER if mode is DECODE else TOKEN_LADDER,
            registry=registry,
            prep="scales",
            tables={"scale": self.weights.scale},
            forward=forward_of(self.weights, self.rank, mode),
            device=device,
            ranks=self.group,
            config=gg.RunnerConfig(max_requests=MAX_REQUESTS if mode is EXTEND else None),
        )
        runner.capture(progress=False)
        return runner

    def facts(self, batch: gg.Batch) -> RankFacts:
        """State a step; whether a peer prefills is not known yet, so a decode step is stated for both runners."""
        prefill = self.runners[EXTEND].facts(batch)
        return prefill if batch.mode is EXTEND else self.runners[DECODE].facts(batch).beside(prefill)

    def step(self, batch: gg.Batch, veto: bool) -> tuple[RankPlan, gg.Step]:
        """Agree, and run the step on the runner that was agreed."""
        facts = self.facts(batch)
        if veto:  # something this rank needs and a graph does not have
            facts = replace(facts, vote=False, prefill_vote=False)
        plan = self.group.agree(facts)
        graphs = EXTEND if plan.mode is EXTEND else DECODE
        own = batch.mode if batch.num_requests else graphs  # what runs eagerly stays where it belongs
        return plan, self.runners[graphs if plan.forward is gg.Route.GRAPH else own].replay(batch, plan=plan)

    def num_breaks(self, mode: gg.Mode) -> int:
        """Count the eager breaks of a runner's largest bucket."""
        return sum(part["break"] is not None for part in self.runners[mode].stats()["keys"][0]["segments"])

    def close(self) -> None:
        """Drop the graphs; they hold collectives, so before the process group."""
        for runner in self.runners.values():
            runner.close()


def run(engine: Engine, size: int) -> int:
    """Tell the story, check every step, and give the number of comparisons."""
    rank, compared = engine.rank, 0
    for number, (what, loads, objection) in enumerate(STORY):
        works = works_of(number, loads, size)
        batch = works[rank].batch()
        objects = rank == 1 and bool(objection)
        if objection == "refused" and size > 1:
            works[1] = Work(number, 1, DECODE, [])  # it takes part with no rows
            if objects:
                batch = gg.Batch(3, {"input_ids": [1, 2, 3], "positions": [0], "lens": [1, 1, 1]})
        try:
            plan, step = engine.step(batch, objects and objection == "veto")
        except gg.BindError:
            if objects and objection == "refused":
                continue  # the others went on without it
            raise
        expected = reference(engine.weights, works, rank)
        assert torch.equal(step.outputs, expected), f"rank {rank} differs in step {number}, {what}: {step.decision}"
        assert step.decision.forward is plan.forward
        compared += 1
        if rank == 0:
            told = (plan.forward.value, plan.mode.value, plan.bucket.tokens, plan.padding.value, plan.reason.value)
            print(f"{what:42} {told[0]:6} {told[1]:7} bucket {told[2]:3} {told[3]} {told[4]:13} counts {plan.counts}")
    return compared


def main() -> None:
    """Meet the other ranks, tell the story, and say whether all agreed."""
    options = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    options.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    options.add_argument("--exchange", choices=EXCHANGES, default="host", help="where facts are gathered")
    chosen = options.parse_args()
    if "RANK" not in os.environ:
        sys.exit("start it with: torchrun --nproc-per-node 4 examples/dp_ranks.py")
    torch.set_num_threads(1)
    device = torch.device("cpu")
    if chosen.device == "cuda":
        device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
        torch.cuda.set_device(device)
    dist.init_process_group("cpu:gloo,cuda:nccl" if chosen.device == "cuda" else "gloo")
    # Gloo gathers host memory; NCCL device memory, by a communicator that no forward uses, or it would wait for it.
    exchange = dist.new_group(backend="nccl") if chosen.exchange == "device" else None
    size = dist.get_world_size()
    engine = Engine(device, exchange, "memory" if chosen.exchange == "memory" else "group")
    breaks = {mode.value: engine.num_breaks(mode) for mode in (DECODE, EXTEND)}
    assert breaks == {"decode": 0, "extend": NUM_LAYERS}
    compared = run(engine, size)
    total = torch.tensor([compared])
    dist.all_reduce(total)
    if engine.rank == 0:
        refused = sum(objection == "refused" for _, _, objection in STORY) if size > 1 else 0
        assert total.item() == size * len(STORY) - refused
        print(f"eager breaks in a captured step: {breaks}")
        print(
            f"{size} ranks agreed in {len(STORY)} steps; {total.item()} outputs equal the single process, bit for bit"
        )
    engine.close()
    dist.barrier()  # no rank tears the group down while another is still in it
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
