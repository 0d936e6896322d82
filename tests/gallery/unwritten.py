"""Preps that leave rows which nobody wrote: they hold what an earlier step, or another graph, left there."""

from __future__ import annotations

from typing import Any

import torch

from .specimens import CONTEXT, Pair, Stage, both, counted, specimen


@specimen("PAD-LEAK-4", "PAD-LEAK-8", check="poison", evidence="table")
def tail_never_written(stage: Stage) -> Pair:
    def faulty(view: Any) -> Any:
        table = torch.empty(view.seq_lens.shape[0], 4, dtype=torch.int64, device=view.seq_lens.device)
        table[:, :2] = view.seq_lens[:, None]
        return {"table": table}

    def twin(view: Any) -> Any:
        table = torch.zeros(view.seq_lens.shape[0], 4, dtype=torch.int64, device=view.seq_lens.device)
        table[:, :2] = view.seq_lens[:, None]
        return {"table": table}

    return both(faulty, twin, {"table": "request"})


@specimen("PAD-LEAK-7", check="poison", evidence="plan")
def holes_in_a_plan(stage: Stage) -> Pair:
    """Entries that no request owns keep what an earlier launch left."""

    def places(view: Any) -> torch.Tensor:
        return torch.where(counted(view.rows) < view.num_real, view.rows * 2, 15)

    def faulty(view: Any) -> Any:
        plan = torch.empty(16, dtype=torch.int64, device=view.rows.device)
        return {"plan": plan.scatter_(0, places(view), 1).index_fill_(0, view.num_real * 0 + 15, 1)}

    def twin(view: Any) -> Any:
        plan = torch.zeros(16, dtype=torch.int64, device=view.rows.device)
        return {"plan": plan.scatter_(0, places(view), 1).index_fill_(0, view.num_real * 0 + 15, 1)}

    return both(faulty, twin, {"plan": "fixed"}, reads=("rows", "num_real"))


@specimen("PAD-LEAK-8", "REBIND-7", check="poison", evidence="lengths")
def buffer_that_stays_empty(stage: Stage) -> Pair:
    def faulty(view: Any) -> Any:
        lengths = torch.empty_like(view.seq_lens)
        torch.where(view.seq_lens > CONTEXT, view.seq_lens, lengths)
        return {"lengths": lengths}

    def twin(view: Any) -> Any:
        lengths = torch.empty_like(view.seq_lens)
        return {"lengths": torch.where(view.seq_lens > 0, view.seq_lens, lengths)}

    return both(faulty, twin, {"lengths": "request"})


@specimen("PAD-LEAK-4", "TAIL-STALE-1", check="poison", evidence="positions")
def only_the_live_prefix(stage: Stage) -> Pair:
    """Rows behind the real ones keep what was there."""

    def faulty(view: Any) -> Any:
        positions = torch.empty_like(view.seq_lens)
        return {"positions": torch.where(counted(view.seq_lens) < view.num_real, view.seq_lens - 1, positions)}

    def twin(view: Any) -> Any:
        return {"positions": torch.where(counted(view.seq_lens) < view.num_real, view.seq_lens - 1, 0)}

    return both(faulty, twin, {"positions": "request"}, reads=("seq_lens", "num_real"))
