"""Preps that read or write memory that they did not declare.

What a captured graph reads by address must be a slot, a declared table, or made by the graph itself.
"""

from __future__ import annotations

import functools
from typing import Any

import torch

from .specimens import CONTEXT, LOCATIONS, Made, Pair, Stage, counted, specimen

UNDECLARED = r"undeclared|neither|not declare|declar"


# Reads.


@specimen("UNSTAGED-1", "PAD-ALIAS-5", check="trace", evidence=rf"({UNDECLARED})(.|\n)*16")
def constant_in_a_closure(stage: Stage) -> Pair:
    offsets = torch.arange(CONTEXT, device=stage.device)
    stage.tables["offsets"] = offsets.clone()

    def faulty(view: Any) -> Any:
        return {"inside": (offsets[None] < view.seq_lens[:, None]).sum(1)}

    def twin(view: Any) -> Any:
        return {"inside": (view.tables.offsets[None] < view.seq_lens[:, None]).sum(1)}

    outputs = {"inside": "request"}
    return Pair(Made(faulty, outputs), Made(twin, outputs, tables=("offsets",)))


@specimen("UNSTAGED-1", "LIFETIME-1", check="trace", evidence=rf"({UNDECLARED})(.|\n)*48")
def undeclared_table(stage: Stage) -> Pair:
    page_map = stage.tables["page_map"]

    def faulty(view: Any) -> Any:
        return {"swa": page_map[view.out_cache_loc]}

    def twin(view: Any) -> Any:
        return {"swa": view.tables.page_map[view.out_cache_loc]}

    outputs, reads = {"swa": "token"}, ("out_cache_loc",)
    return Pair(Made(faulty, outputs, reads), Made(twin, outputs, reads, ("page_map",)))


@specimen("LIFETIME-1", "REBIND-4", check="trace", evidence="page_map")
def declared_table_past_the_view(stage: Stage) -> Pair:
    """``rebind_table`` would not reach it."""
    page_map = stage.tables["page_map"]

    def faulty(view: Any) -> Any:
        return {"swa": page_map[view.out_cache_loc]}

    def twin(view: Any) -> Any:
        return {"swa": view.tables.page_map[view.out_cache_loc]}

    outputs, reads, tables = {"swa": "token"}, ("out_cache_loc",), ("page_map",)
    return Pair(Made(faulty, outputs, reads, tables), Made(twin, outputs, reads, tables))


@specimen("UNSTAGED-1", "REBIND-3", check="trace", evidence=UNDECLARED)
def live_tensor_instead_of_the_slot(stage: Stage) -> Pair:
    live = torch.arange(LOCATIONS, device=stage.device).flip(0)

    def faulty(view: Any) -> Any:
        return {"write_locations": live[: view.out_cache_loc.shape[0]] + 0}

    def twin(view: Any) -> Any:
        return {"write_locations": view.out_cache_loc + 0}

    outputs, reads = {"write_locations": "token"}, ("out_cache_loc",)
    return Pair(Made(faulty, outputs, reads), Made(twin, outputs, reads))


@specimen("UNSTAGED-3", check="trace", evidence="rows")
def undeclared_slot(stage: Stage) -> Pair:
    def prep(view: Any) -> Any:
        return {"mixed": view.rows + view.seq_lens}

    outputs = {"mixed": "request"}
    return Pair(Made(prep, outputs), Made(prep, outputs, ("seq_lens", "rows")))


@specimen("META-SHAPE-5", check="trace", evidence="raw")
def asks_for_the_raw_count(stage: Stage) -> Pair:
    def faulty(view: Any) -> Any:
        return {"real": counted(view.seq_lens) < view.raw}

    def twin(view: Any) -> Any:
        return {"real": counted(view.seq_lens) < view.num_real}

    outputs, reads = {"real": "request"}, ("seq_lens", "num_real")
    return Pair(Made(faulty, outputs, reads), Made(twin, outputs, reads))


@specimen("PLAN-STALE-4", check="trace", evidence=UNDECLARED)
def memoised_at_warm_up(stage: Stage) -> Pair:
    engine = stage.engine

    def faulty(view: Any) -> Any:
        if engine.last is None or engine.last.shape != view.rows.shape:
            engine.last = view.rows * 2
        return {"indices": engine.last + view.seq_lens}

    def twin(view: Any) -> Any:
        return {"indices": view.rows * 2 + view.seq_lens}

    outputs, reads = {"indices": "request"}, ("rows", "seq_lens")
    return Pair(Made(faulty, outputs, reads), Made(twin, outputs, reads))


@specimen("PLAN-STALE-1", "POOL-ALIAS-1", check="trace", evidence=UNDECLARED)
def memoised_by_bucket(stage: Stage) -> Pair:
    @functools.cache
    def ramp(num: int) -> torch.Tensor:
        return torch.arange(num, device=stage.device)

    def faulty(view: Any) -> Any:
        return {"owner": ramp(view.bucket.requests) + view.rows}

    def twin(view: Any) -> Any:
        return {"owner": counted(view.rows) + view.rows}

    outputs, reads = {"owner": "request"}, ("rows",)
    return Pair(Made(faulty, outputs, reads), Made(twin, outputs, reads))


@specimen("HOST-FROZEN-10", check="trace", evidence=UNDECLARED)
def result_of_the_last_step(stage: Stage) -> Pair:
    engine = stage.engine

    def faulty(view: Any) -> Any:
        before, engine.last = engine.last, view.seq_lens * 2
        if before is None or before.shape != view.seq_lens.shape:
            before = engine.last
        return {"doubled": before + 0}

    def twin(view: Any) -> Any:
        engine.last = view.seq_lens * 2
        return {"doubled": engine.last + 0}

    outputs = {"doubled": "request"}
    return Pair(Made(faulty, outputs), Made(twin, outputs))


@specimen("REBIND-1", "REBIND-5", check="trace", evidence=UNDECLARED)
def rebound_output(stage: Stage) -> Pair:
    """Each call makes a new tensor of the old one; the graph goes on with the one of its capture."""
    engine = stage.engine
    engine.last = torch.zeros((), dtype=torch.int64, device=stage.device)

    def faulty(view: Any) -> Any:
        engine.last = engine.last + view.setting.sum()
        return {"total": engine.last + view.seq_lens}

    def twin(view: Any) -> Any:
        return {"total": view.setting.sum() + view.seq_lens}

    outputs, reads = {"total": "request"}, ("seq_lens", "setting")
    return Pair(Made(faulty, outputs, reads), Made(twin, outputs, reads))


@specimen("POOL-ALIAS-1", "LIFETIME-4", check="trace", evidence=UNDECLARED)
def scratch_kept_from_the_first_use(stage: Stage) -> Pair:
    engine = stage.engine

    def faulty(view: Any) -> Any:
        if engine.last is None:
            engine.last = torch.zeros(8, dtype=torch.int64, device=view.seq_lens.device)
        scratch = engine.last[: view.seq_lens.shape[0]]
        scratch.add_(view.seq_lens)
        return {"sums": scratch + 0}

    def twin(view: Any) -> Any:
        scratch = torch.zeros(8, dtype=torch.int64, device=view.seq_lens.device)[: view.seq_lens.shape[0]]
        scratch.add_(view.seq_lens)
        return {"sums": scratch + 0}

    outputs = {"sums": "request"}
    return Pair(Made(faulty, outputs), Made(twin, outputs))


@specimen("PLAN-STALE-4", "META-SHAPE-1", check="pad_image", evidence="positions")
def view_kept_from_the_first_call(stage: Stage) -> Pair:
    """Right over the static slots, and wrong in a step that has tensors of its own."""
    kept: dict[int, Any] = {}

    def faulty(view: Any) -> Any:
        return {"positions": kept.setdefault(view.bucket.requests, view).seq_lens - 1}

    def twin(view: Any) -> Any:
        kept[view.bucket.requests] = view
        return {"positions": view.seq_lens - 1}

    outputs = {"positions": "request"}
    return Pair(Made(faulty, outputs), Made(twin, outputs))


# Writes.


@specimen("STATE-CARRY-2", check="trace", evidence=r"seq_lens")
def writes_a_slot(stage: Stage) -> Pair:
    def faulty(view: Any) -> Any:
        view.seq_lens.add_(1)
        return {"next": view.seq_lens * 2}

    def twin(view: Any) -> Any:
        return {"next": (view.seq_lens + 1) * 2}

    outputs = {"next": "request"}
    return Pair(Made(faulty, outputs), Made(twin, outputs))


@specimen("STATE-CARRY-2", check="trace", evidence=r"seq_lens")
def writes_a_slot_through_a_view(stage: Stage) -> Pair:
    def faulty(view: Any) -> Any:
        positions = view.seq_lens.view(-1, 1).expand(-1, 1)[:, 0]
        positions.sub_(1)
        return {"positions": positions + 0}

    def twin(view: Any) -> Any:
        positions = view.seq_lens.view(-1, 1).expand(-1, 1)[:, 0].clone()
        positions.sub_(1)
        return {"positions": positions + 0}

    outputs = {"positions": "request"}
    return Pair(Made(faulty, outputs), Made(twin, outputs))


@specimen("STATE-CARRY-2", check="trace", evidence=r"seq_lens")
def slot_as_out_argument(stage: Stage) -> Pair:
    def faulty(view: Any) -> Any:
        torch.clamp(view.seq_lens, max=8, out=view.seq_lens)
        return {"capped": view.seq_lens + 0}

    def twin(view: Any) -> Any:
        capped = torch.empty_like(view.seq_lens)
        torch.clamp(view.seq_lens, max=8, out=capped)
        return {"capped": capped}

    outputs = {"capped": "request"}
    return Pair(Made(faulty, outputs), Made(twin, outputs))


@specimen("STATE-CARRY-1", "PAD-ALIAS-6", check="trace", evidence=r"page_map")
def writes_a_table(stage: Stage) -> Pair:
    """The twin declares the effect, so that it is never repeated on live tables."""

    def prep(view: Any) -> Any:
        view.tables.page_map.index_fill_(0, view.out_cache_loc, 0)
        return {"locations": view.out_cache_loc + 0}

    outputs, reads, tables = {"locations": "token"}, ("out_cache_loc",), ("page_map",)
    effects = {"effects": ("page_map",)}
    return Pair(Made(prep, outputs, reads, tables), Made(prep, outputs, reads, tables, contract=effects))


@specimen("STATE-CARRY-1", check="trace", evidence=UNDECLARED)
def writes_an_engine_s_tensor(stage: Stage) -> Pair:
    ring = torch.zeros(8, dtype=torch.int64, device=stage.device)
    stage.tables["ring"] = ring.clone()

    def faulty(view: Any) -> Any:
        ring[: view.seq_lens.shape[0]].copy_(view.seq_lens)
        return {"positions": view.seq_lens - 1}

    def twin(view: Any) -> Any:
        view.tables.ring[: view.seq_lens.shape[0]].copy_(view.seq_lens)
        return {"positions": view.seq_lens - 1}

    outputs = {"positions": "request"}
    return Pair(Made(faulty, outputs), Made(twin, outputs, tables=("ring",), contract={"effects": ("ring",)}))


@specimen("REBIND-4", check="trace", evidence=r"seq_lens")
def rebinds_a_slot(stage: Stage) -> Pair:
    def faulty(view: Any) -> Any:
        view.seq_lens = view.seq_lens + 1
        return {"next": view.seq_lens * 2}

    def twin(view: Any) -> Any:
        lengths = view.seq_lens + 1
        return {"next": lengths * 2}

    outputs = {"next": "request"}
    return Pair(Made(faulty, outputs), Made(twin, outputs))
