"""The report in a terminal."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping

from rich.console import Console, Group, RenderableType
from rich.table import Table
from rich.text import Text

from graphglue.budget import BudgetPlan
from graphglue.report.summary import Held, Rung, Summary

_WIDTH = 160  # of a page that goes to a file
_BAR = 30  # columns of a full bar
_MAX_KEYS = 20


def show(summary: Summary, budgets: Mapping[str, BudgetPlan], console: Console | None = None) -> None:
    """Print the page, as wide as the terminal; wide where it goes to a file."""
    sized = sys.stdout.isatty() or "COLUMNS" in os.environ
    console = console or Console(width=None if sized else _WIDTH)
    parts: list[RenderableType] = [_sources(summary), _ladder(summary)]
    for title, counts in (
        ("routes, prep / forward", summary.routes),
        ("reasons", summary.reasons),
        ("why forwards ran eagerly", summary.forward_reasons),
        ("why a glued step was more than one launch", summary.launch_fallbacks),
        ("shadow check", summary.shadow),
        ("staging", summary.staging),
    ):
        if counts:
            parts.append(_shares(title, counts, summary.steps))
    parts.append(_quarantines(summary))
    if summary.keys:
        parts.append(_keys(summary.keys))
    parts += [Text(line) for name, plan in budgets.items() for line in spelled_budget(name, plan)]
    console.print(Group(*parts))


def spelled_budget(name: str, plan: BudgetPlan) -> list[str]:
    """Say what to drop for a budget, a line each."""
    held, budget = spelled_bytes(plan.held_bytes), spelled_bytes(plan.budget_bytes)
    if not plan.drops:
        return [f"{name}: {held} held, within the budget of {budget}"]
    lines = [f"{name}: {held} held, over the budget of {budget}; drop first, {spelled_bytes(plan.left_bytes)} is left:"]
    for drop in plan.drops:
        bucket, freed = "x".join(map(str, drop.bucket[:2])), spelled_bytes(drop.freed_bytes)
        lines.append(f"  {drop.mode} {bucket} variant {drop.variant}: {drop.steps} steps, {freed} by itself")
    return lines


def spelled_bytes(num_bytes: int | None) -> str:
    """Spell bytes in the unit that suits them; "-" where nobody counts them."""
    if num_bytes is None:
        return "-"
    size = float(num_bytes)
    for unit in ("B", "KiB", "MiB"):
        if size < 1024:
            return f"{size:.0f} {unit}" if unit == "B" else f"{size:.1f} {unit}"
        size /= 1024
    return f"{size:.1f} GiB"


def _table(title: str, *columns: str, text: int = 1) -> Table:
    table = Table(title=title, title_justify="left")
    for position, column in enumerate(columns):
        table.add_column(column, justify="left" if position < text else "right", overflow="fold")
    return table


def _sources(summary: Summary) -> Table:
    table = _table("runners", "file", "steps", "padded", "glued", "graph", "one launch", "quarantines")
    for one in summary.sources:
        shares = (f"{share:.1%}" for share in (one.waste, one.glued, one.graphs, one.one_launch))
        table.add_row(Text(one.name), f"{one.steps:,}", *shares, str(one.num_quarantines))
    return table


def _ladder(summary: Summary) -> Table:
    table = _table("ladder: # real rows, . padded rows", "bucket", "rows", "steps", "real", "padded", "waste", text=2)
    largest = max((rung.real_tokens + rung.padded_tokens for rung in summary.rungs), default=0) or 1
    for rung in (*summary.rungs, summary.all_rungs):
        bar = Text() if rung.label == "all" else _bar(rung, largest)
        counts = (rung.steps, rung.real_tokens, rung.padded_tokens)
        table.add_row(rung.label, bar, *(f"{count:,}" for count in counts), f"{rung.waste:.1%}")
    return table


def _bar(rung: Rung, largest: int) -> Text:
    rows = rung.real_tokens + rung.padded_tokens
    length = -(-rows * _BAR // largest)
    real = round(length * rung.real_tokens / rows) if rows else 0
    return Text.assemble(("#" * real, "green"), ("." * (length - real), "yellow"))


def _shares(title: str, counts: Mapping[str, int], steps: int) -> Table:
    table = _table(title, "", "share", "steps", "", text=2)
    for name, count in counts.items():
        share = count / steps if steps else 0.0
        table.add_row(Text(name), Text("#" * round(min(share, 1) * _BAR), "cyan"), f"{count:,}", f"{share:.1%}")
    return table


def _quarantines(summary: Summary) -> RenderableType:
    total = sum(one.num_quarantines for one in summary.sources)
    if not summary.quarantined:
        return Text(f"no key is quarantined now; {total} were since the start", "green")
    table = _table("quarantined now", "file", "key", "part", "cause", text=4)
    for held in summary.quarantined:
        for part, cause in held.key.causes.items():
            table.add_row(Text(held.source), Text(spelled_key(held)), Text(part), Text(cause))
    return table


def _keys(keys: tuple[Held, ...]) -> Table:
    title = "keys" if len(keys) <= _MAX_KEYS else f"keys, {_MAX_KEYS} of {len(keys)} that hold the most"
    table = _table(title, "file", "key", "steps", "capture s", "pool", "graphs", "outputs", text=2)
    for held in sorted(keys, key=_held_bytes, reverse=True)[:_MAX_KEYS]:
        key, memory = held.key, held.key.memory
        sizes = (spelled_bytes(size) for size in (memory.pool_bytes, memory.exec_bytes, memory.outputs_bytes))
        counts = (f"{key.steps:,}", f"{key.capture_seconds:.3f}")
        table.add_row(Text(held.source), Text(spelled_key(held)), *counts, *sizes)
    return table


def spelled_key(held: Held) -> str:
    """Name a key in a line."""
    key = held.key
    variant = "" if key.variant == "None" else f" variant {key.variant}"
    return f"{key.mode} {key.bucket[0]}x{key.bucket[1]}{variant}"


def _held_bytes(held: Held) -> int:
    return held.key.memory.pool_bytes + (held.key.memory.exec_bytes or 0)
