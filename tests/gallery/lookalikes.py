"""Correct preps that look like wrong ones: what engines do beside the metadata, and no check may call a fault."""

from __future__ import annotations

import contextlib
import functools
import logging
import time
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch.utils import _pytree as pytree

from .specimens import CONTEXT, Made, Stage, counted

LOOKALIKES: dict[str, Callable[[Stage], Made]] = {}
logger = logging.getLogger(__name__)


def lookalike(build: Callable[[Stage], Made]) -> Callable[[Stage], Made]:
    """Enter a builder under its name."""
    LOOKALIKES[build.__name__] = build
    return build


@dataclass
class Metadata:
    """What a backend returns, as an object of its own."""

    positions: torch.Tensor
    page_size: int
    causal: torch.Tensor | None = None


pytree.register_dataclass(Metadata)


@lookalike
def method_of_a_large_backend(stage: Stage) -> Made:
    class Settings:
        def __getattr__(self, name: str) -> Any:
            raise RuntimeError(f"{name} is not set")

    class Backend:
        __slots__ = ("__weakref__", "calls", "config", "history", "layer", "model", "never_set", "unused")

        def __init__(self) -> None:
            self.config, self.calls, self.history = Settings(), 0, []
            self.layer = torch.nn.Linear(3, 3, device=stage.device)  # its weights are nobody's business here
            self.unused = {"cache": [torch.ones(4, device=stage.device).expand(3, 4)], "host": np.arange(5)}
            self.model = weakref.proxy(self)

        @property
        def broken(self) -> Any:
            raise AssertionError("a property that must not be read")

        def prepare(self, view: Any) -> Any:
            self.calls += 1
            self.history.append(tuple(view.bucket))
            return {"positions": view.seq_lens - 1}

    return Made(Backend().prepare, {"positions": "request"})


@lookalike
def metrics_and_logs(stage: Stage) -> Made:
    spent: list[float] = []

    def prep(view: Any) -> Any:
        begin = time.perf_counter()
        logger.debug("bucket %s, shape %s", view.bucket, view.seq_lens.shape)
        with torch.profiler.record_function("prep"):
            positions = view.seq_lens - 1
        spent.append(time.perf_counter() - begin)
        return {"positions": positions}

    return Made(prep, {"positions": "request"})


@lookalike
def numbers_kept_by_bucket(stage: Stage) -> Made:
    @functools.cache
    def splits(num_requests: int) -> int:
        return 3

    def prep(view: Any) -> Any:
        return {"chunk": view.seq_lens // splits(view.bucket.requests)}

    return Made(prep, {"chunk": "request"})


@lookalike
def set_up_at_the_first_call(stage: Stage) -> Made:
    engine = stage.engine
    engine.plan = None

    def prep(view: Any) -> Any:
        if engine.plan is None:
            torch.zeros(8, device=view.seq_lens.device).add_(1)  # what a library does once
            engine.plan = 2
        return {"positions": view.seq_lens - engine.plan}

    return Made(prep, {"positions": "request"})


@lookalike
def declared_buffer(stage: Stage) -> Made:
    kept = torch.zeros(8, dtype=torch.int64, device=stage.device)

    def prep(view: Any) -> Any:
        rows = kept[: view.seq_lens.shape[0]]
        rows.copy_(view.seq_lens)
        rows.sub_(1)
        return {"positions": rows}

    return Made(prep, {"positions": "request"}, contract={"writes": ("positions",)})


@lookalike
def declared_buffer_of_each_bucket(stage: Stage) -> Made:
    kept: dict[int, torch.Tensor] = {}

    def prep(view: Any) -> Any:
        rows = kept.get(view.bucket.requests)
        if rows is None:
            rows = kept[view.bucket.requests] = torch.empty_like(view.seq_lens)
        torch.sub(view.seq_lens, 1, out=rows)
        return {"positions": rows}

    return Made(prep, {"positions": "request"}, contract={"writes": ("positions",)})


@lookalike
def declared_effect(stage: Stage) -> Made:
    stage.tables["ring"] = torch.zeros(8, dtype=torch.int64, device=stage.device)

    def prep(view: Any) -> Any:
        view.tables.ring[: view.seq_lens.shape[0]].add_(view.seq_lens)
        return {"sums": view.tables.ring[: view.seq_lens.shape[0]] + 0}

    return Made(prep, {"sums": "request"}, tables=("ring",), contract={"effects": ("ring",)})


@lookalike
def slot_and_table_handed_back(stage: Stage) -> Made:
    def prep(view: Any) -> Any:
        return {"lengths": view.seq_lens, "rows": view.rows.view(-1, 1), "map": view.tables.page_map}

    outputs = {"lengths": "request", "rows": "request", "map": "fixed"}
    return Made(prep, outputs, ("seq_lens", "rows"), ("page_map",))


@lookalike
def object_with_plain_and_absent_leaves(stage: Stage) -> Made:
    def prep(view: Any) -> Any:
        return Metadata(view.seq_lens - 1, 16)

    return Made(prep, {"positions": "request"})


@lookalike
def constants_of_python_numbers(stage: Stage) -> Made:
    def prep(view: Any) -> Any:
        rows = view.seq_lens
        made = torch.full_like(rows, 2) * torch.tensor(3) + rows.new_zeros(rows.shape[0]) + rows.new_full((), 4)
        return {"made": made + rows + torch.ones((), dtype=torch.int64, device=rows.device)}

    return Made(prep, {"made": "request"})


@lookalike
def own_scratch_in_place(stage: Stage) -> Made:
    def prep(view: Any) -> Any:
        scratch = torch.empty(view.seq_lens.shape[0], CONTEXT, dtype=torch.int64, device=view.seq_lens.device)
        scratch.fill_(0)
        scratch[:, 0] = view.seq_lens
        scratch.cumsum_(1).clamp_(max=9)
        return {"table": scratch.t().contiguous().t()}

    return Made(prep, {"table": "request"})


@lookalike
def scattered_with_a_row_for_pads(stage: Stage) -> Made:
    def prep(view: Any) -> Any:
        num = view.seq_lens.shape[0]
        place = torch.where(counted(view.seq_lens) < view.num_real, counted(view.seq_lens), num)
        made = torch.zeros(num + 1, dtype=torch.int64, device=view.seq_lens.device)
        return {"lengths": made.scatter_(0, place, view.seq_lens)[:num]}

    return Made(prep, {"lengths": "request"}, ("seq_lens", "num_real"))


@lookalike
def partial_of_a_callable_object(stage: Stage) -> Made:
    class Prep:
        def __call__(self, page_size: int, view: Any) -> Any:
            return {"pages": (view.seq_lens + page_size - 1) // page_size}

    return Made(functools.partial(Prep(), 4), {"pages": "request"})


@lookalike
def contexts_and_exceptions(stage: Stage) -> Made:
    def prep(view: Any) -> Any:
        with contextlib.suppress(AttributeError):
            stage.engine.not_there.at_all()
        with torch.inference_mode():
            positions = view.seq_lens - 1
        with torch.autocast(view.seq_lens.device.type, enabled=False):
            return {"positions": positions.clone()}

    return Made(prep, {"positions": "request"})


@lookalike
def tables_by_name_and_in_a_loop(stage: Stage) -> Made:
    def prep(view: Any) -> Any:
        found = {}
        for name in sorted(view.tables):
            table = view.tables[name]
            found[name] = table[view.rows] if table.dim() == 2 else table[view["rows"]]
        return found

    tables = ("page_map", "req_to_token")
    return Made(prep, dict.fromkeys(tables, "request"), ("rows",), tables)


@lookalike
def mode_that_is_part_of_the_key(stage: Stage) -> Made:
    import graphglue as gg

    def prep(view: Any) -> Any:
        return {"positions": view.seq_lens - (1 if view.mode is gg.Mode.DECODE else 0)}

    return Made(prep, {"positions": "request"}, contract={"modes": {gg.Mode.DECODE, gg.Mode.VERIFY}})


@lookalike
def leaf_without_an_axis(stage: Stage) -> Made:
    def prep(view: Any) -> Any:
        return {"positions": view.seq_lens - 1, "least": view.seq_lens.amin()}

    return Made(prep, {"positions": "request"})
