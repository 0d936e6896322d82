"""The bit check of padded glue: on one bucket, at every raw count below it, a glued step is the padded eager one.

The eager side calls the prep on tensors that were padded by hand; no code of the library has filled them.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

import graphglue as gg

from .cases import CASES, PUBLISHED, Case, drawn, tensors, world

BUCKET = 14
RAWS = range(2, BUCKET)
CHECKED = ("draft", "verify")
STEPS = 320  # of each
_POISON = 10**6  # an index that leads out of every table

Change = Callable[[int, dict[str, torch.Tensor]], Any]


@dataclass
class Outcome:
    """How many steps were compared, all leaves and all rows of each, and which of them differ."""

    num_checks: int = 0
    mismatches: list[str] = field(default_factory=list)
    raws: set[int] = field(default_factory=set)


def check(device: torch.device | str, steps: int = STEPS, change: Change | None = None) -> Outcome:
    """Compare ``steps`` steps of draft and of verify, at the published sizes.

    Args:
        device: where.
        steps: of each.
        change: changes the eager metadata of a step, to show that the comparison sees it.
    """
    outcome = Outcome()
    for name in CHECKED:
        lists = world(PUBLISHED, seed=len(name))
        tables = tensors(lists, device, torch.int32)
        with CASES[name].runner(PUBLISHED, tables, (BUCKET,), device=device) as runner:
            runner.capture(progress=False)
            for number in range(steps):
                _check_step(CASES[name], runner, lists, tables, number, outcome, change)
    return outcome


def _check_step(
    case: Case,
    runner: gg.Runner,
    lists: Mapping[str, Any],
    tables: Mapping[str, torch.Tensor],
    number: int,
    outcome: Outcome,
    change: Change | None,
) -> None:
    raw = RAWS[number % len(RAWS)]
    step = drawn(PUBLISHED, lists, [case.width] * raw, random.Random(number))
    slots = runner.view(BUCKET)
    for name in slots:
        slots[name].fill_(_POISON)
    prepared = runner.prepare(step.batch(case.mode, ragged=False))
    decision = prepared.decision
    assert (decision.prep, decision.reason) == (gg.Route.GLUE, gg.Reason.PADDED)
    view = step.padded(decision.bucket).view(case, decision.bucket, tables, slots["seq_lens"].device)
    eager = case.make(PUBLISHED)(view)
    if change is not None:
        change(outcome.num_checks, eager)
    differing = [
        leaf
        for leaf in sorted({*eager, *prepared.metadata})
        if eager[leaf].dtype != prepared.metadata[leaf].dtype or not torch.equal(eager[leaf], prepared.metadata[leaf])
    ]
    outcome.num_checks += 1
    outcome.raws.add(raw)
    if differing:
        outcome.mismatches.append(f"{case.contract.name}, step {number}, raw {raw}: {differing}")
