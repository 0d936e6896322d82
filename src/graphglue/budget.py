"""The memory budget: which captured keys to give up first, from a runner's stats alone."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

__all__ = ["BudgetPlan", "Drop", "plan_budget"]


class Drop(NamedTuple):
    """One key to drop: its number in ``stats["keys"]``, its step count, and the bytes that come back."""

    position: int
    mode: str
    bucket: tuple[int, ...]
    variant: str
    steps: int
    freed_bytes: int


class BudgetPlan(NamedTuple):
    """What to drop to stay within a budget.

    Attributes:
        held_bytes: what the captured keys hold now.
        budget_bytes: what they may hold.
        drops: the keys to drop, in this order: the fewest steps per byte first.
        left_bytes: what is held then.
        enough: whether that is within the budget.
    """

    held_bytes: int
    budget_bytes: int
    drops: tuple[Drop, ...]
    left_bytes: int

    @property
    def enough(self) -> bool:
        """Whether what is left is within the budget."""
        return self.left_bytes <= self.budget_bytes


def plan_budget(stats: Mapping[str, Any], budget_bytes: int) -> BudgetPlan:
    """Name the keys to drop first so that the rest fits a budget. Pure.

    A key's pool memory comes back only with the last key of the pool, so a drop counts for what it gives back alone
    (``freed_bytes``), and the pools count as held until nothing is left. Keep a ladder without the sizes named here:
    ``reset()``, then ``capture(buckets=...)``.

    Args:
        stats: what ``runner.stats()`` gave.
        budget_bytes: what graphs, pools and outputs of all keys may take.
    """
    keys = [(position, key) for position, key in enumerate(stats["keys"]) if _held_bytes(key)]
    held = left = sum(_held_bytes(key) for _, key in keys)
    drops: list[Drop] = []
    for drop in sorted((_drop(*one) for one in keys), key=_worth):
        if left <= budget_bytes:
            break
        if drop.freed_bytes:
            drops.append(drop)
            left -= drop.freed_bytes
    if left > budget_bytes:  # single drops do not do it: the pools have to go as well
        drops, left = sorted((_drop(*one) for one in keys), key=_worth), 0
    return BudgetPlan(held, budget_bytes, tuple(drops), left)


def _held_bytes(key: Mapping[str, Any]) -> int:
    memory = key["memory"]
    return memory["pool_bytes"] + (memory["exec_bytes"] or 0)


def _drop(position: int, key: Mapping[str, Any]) -> Drop:
    return Drop(position, key["mode"], tuple(key["bucket"]), key["variant"], key["steps"], key["memory"]["freed_bytes"])


def _worth(drop: Drop) -> tuple[float, int, int]:
    """Order by steps per byte; of equals the one that frees more, then the earlier."""
    return (drop.steps / drop.freed_bytes if drop.freed_bytes else float("inf"), -drop.freed_bytes, drop.position)
