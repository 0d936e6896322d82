"""Runners to audit: three slots, a table, and whatever prep a test brings."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch

import graphglue as gg
from graphglue.audit.subject import Subject

TABLE_ROWS, CONTEXT = 32, 64


def slots() -> list[gg.Slot]:
    return [
        gg.Slot("seq_lens", axis="request", dtype=torch.int64, pad=1, valid=(1, CONTEXT - 1)),
        gg.Slot("rows", axis="request", dtype=torch.int64, pad=0, index_of="table"),
        gg.Slot("locations", axis="token", dtype=torch.int64, pad=0, valid=(0, 999)),
        gg.Slot("offsets", axis="offset", dtype=torch.int32, pad=gg.REPEAT_LAST),
    ]


def contract(**changes: Any) -> gg.PrepContract:
    declared: dict[str, Any] = {
        "name": "prep",
        "reads": {"seq_lens": 1, "rows": 0},
        "tables": ("table",),
        "outputs": {"pages": "request", "positions": "request"},
        "modes": {gg.Mode.DECODE},
    }
    return gg.PrepContract(**{**declared, **changes})


def good(view: Any) -> dict[str, torch.Tensor]:
    return {"pages": view.tables.table[view.rows, ::16] // 16, "positions": view.seq_lens - 1}


def table() -> torch.Tensor:
    return torch.arange(TABLE_ROWS * CONTEXT).view(TABLE_ROWS, CONTEXT)


def make_runner(
    prep: Callable[[Any], Any] = good,
    ladder: Iterable[int] = (1, 2, 4),
    declared: gg.PrepContract | None = None,
    plan: Any = None,
    tables: dict[str, torch.Tensor] | None = None,
    with_slots: list[gg.Slot] | None = None,
    **options: Any,
) -> gg.Runner:
    registry = gg.Registry()
    registry.register(declared or contract(), plan=plan)(prep)
    return gg.Runner(
        slots=with_slots or slots(),
        ladder=ladder,
        registry=registry,
        prep="prep",
        tables=tables or {"table": table()},
        **options,
    )


def make_subject(prep: Callable[[Any], Any] = good, batches: Any = (), **options: Any) -> Subject:
    (subject,) = Subject.of(make_runner(prep, **options), batches)
    return subject
