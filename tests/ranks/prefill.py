"""A prefill for several ranks, with collectives in its segments, and attention over single requests between them.

Whole numbers in double precision: sums are exact in any order, so a rank's rows equal those of one process that
computes the whole group's step.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist

import graphglue as gg
from graphglue.ranks import Padding, Planner

WIDTH, NUM_LAYERS, VOCABULARY, CONTEXT, MAX_REQUESTS = 4, 2, 32, 64, 4
LADDER = [4, 8, 16]
EXTEND, DECODE = gg.Mode.EXTEND, gg.Mode.DECODE
SLOTS = (
    gg.Slot("input_ids", axis="token", dtype=torch.int64, pad=0),
    gg.Slot("positions", axis="token", dtype=torch.int64, pad=0),
    gg.Slot("lens", axis="request", dtype=torch.int64, pad=0),
    gg.Slot("real_tokens", axis="fixed", inner=(1,), dtype=torch.int64, pad=0, value=gg.RAW_TOKENS),
    gg.Slot("rank_counts", axis="rank", dtype=torch.int64, pad=0, value=gg.RANK_COUNTS),
)
Join = Callable[[torch.Tensor, Any], torch.Tensor]


class Prefill:
    """Weights and the forward of one rank.

    Args:
        join: the collective: gives all ranks' rows together, in a buffer of ``view.meeting.rows``.
        device: where the weights are.
        in_break: called in each break with its rows, the view and the layer.

    Attributes:
        seen: what its breaks saw: the layer, their rows, and the lengths of the requests.
    """

    def __init__(
        self,
        join: Join,
        device: torch.device | str = "cpu",
        in_break: Callable[[torch.Tensor, Any, int], None] = lambda rows, view, layer: None,
    ) -> None:
        rows = torch.arange(VOCABULARY * WIDTH, dtype=torch.float64, device=device)
        self.table = (rows.view(VOCABULARY, WIDTH) * 7) % 13 + 1
        self.scale = torch.arange(CONTEXT, dtype=torch.float64, device=device) % 5 + 1
        self.join, self.in_break = join, in_break
        self.seen: list[tuple[int, int, list[int]]] = []

        @gg.eager_break(row_aligned=("rows",), pad=7)
        def attend(rows: torch.Tensor, view: Any, layer: int) -> torch.Tensor:
            return self.attention(rows, view, layer)

        self.attend = attend

    def attention(self, rows: torch.Tensor, view: Any, layer: int) -> torch.Tensor:
        """Let each row see the rows of its request up to itself."""
        lens = view.live.lens.tolist()
        self.seen.append((layer, rows.shape[0], lens))
        self.in_break(rows, view, layer)
        return attended(rows, lens)

    def shared(self, rows: torch.Tensor, view: Any) -> torch.Tensor:
        """Sum the real rows of all ranks."""
        real = torch.arange(rows.shape[0], device=rows.device) < view.real_tokens
        return self.join(torch.where(real[:, None], rows, 0.0), view).sum(0)

    def __call__(self, view: Any, metadata: Any) -> Any:
        rows = self.table[view.input_ids] * metadata["scale"][:, None]
        rows = rows + self.shared(rows, view)
        for layer in range(NUM_LAYERS):
            rows = rows + self.attend(rows, view, layer)
            rows = rows + self.shared(rows, view)
        return {"rows": rows * 2}


def joined(rank: int) -> Join:
    """Give the collective of real ranks: equal parts side by side, or everybody's rows at an offset and one sum."""
    gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor

    def join(rows: torch.Tensor, view: Any) -> torch.Tensor:
        meeting = view.meeting
        buffer = rows.new_zeros(meeting.rows, rows.shape[1])
        if meeting.padding is Padding.SUM_LEN:
            start = meeting.start(rank)
            buffer[start : start + rows.shape[0]] = rows
            dist.all_reduce(buffer)
        else:
            gather(buffer, rows)
        return buffer

    return join


def attended(rows: torch.Tensor, lens: Sequence[int]) -> torch.Tensor:
    """Sum the rows of each request up to each of them; rows of no request only while a bucket is recorded."""
    parts = rows.split([*lens, rows.shape[0] - sum(lens)])
    return torch.cat([part.cumsum(0) for part in parts])


class Work:
    """One rank's part of a step: the lengths of its requests, and the values of their tokens."""

    def __init__(self, lens: Sequence[int], seed: int = 0, mode: gg.Mode = EXTEND) -> None:
        self.lens, self.mode = list(lens), mode
        draws = torch.Generator().manual_seed(seed)
        self.input_ids = torch.randint(0, VOCABULARY, (sum(lens),), generator=draws)
        self.positions = torch.randint(0, CONTEXT, (sum(lens),), generator=draws)

    def batch(self, **more: Any) -> gg.Batch:
        """Hand it in."""
        if not self.lens:
            return gg.Batch.idle(self.mode)
        sources = {"input_ids": self.input_ids, "positions": self.positions, "lens": self.lens}
        return gg.Batch(len(self.lens), sources, self.mode, num_tokens=sum(self.lens), **more)


def works_of(loads: Sequence[Sequence[int]], seed: int = 0, modes: Sequence[gg.Mode] = ()) -> list[Work]:
    """Draw the parts of all ranks; each rank draws the same."""
    return [Work(lens, 100 * seed + rank, modes[rank] if modes else EXTEND) for rank, lens in enumerate(loads)]


def reference(works: Sequence[Work]) -> list[torch.Tensor]:
    """Compute the whole group's step in one process, without slots, buckets, breaks or collectives."""
    model = Prefill(lambda rows, view: rows)
    rows = [model.table[work.input_ids] * model.scale[work.positions][:, None] for work in works]
    rows = [one + torch.cat(rows).sum(0) for one in rows]
    for _ in range(NUM_LAYERS):
        rows = [one + attended(one, work.lens) for one, work in zip(rows, works)]
        rows = [one + torch.cat(rows).sum(0) for one in rows]
    return [one * 2 for one in rows]


def planner(**options: Any) -> Planner:
    """Plan for the ladder of this prefill."""
    return Planner(LADDER, max_requests=MAX_REQUESTS, **options)


def prefill_runner(ranks: Any, model: Prefill, *, idle: str = "glue", prep: Any = None, **changes: Any) -> gg.Runner:
    """Build one rank's runner; nothing is captured."""
    registry = gg.Registry()
    contract = gg.PrepContract(
        name="scales", reads={"positions": 0}, outputs={"scale": "token"}, modes={EXTEND}, idle=idle
    )
    registry.register(contract)(prep or (lambda view: {"scale": model.scale[view.positions]}))
    config = {"max_requests": MAX_REQUESTS, **changes.pop("config", {})}
    return gg.Runner(
        slots=SLOTS, ladder=LADDER, registry=registry, prep="scales", forward=model, ranks=ranks,
        config=gg.RunnerConfig(**config), **changes,
    )  # fmt: skip
