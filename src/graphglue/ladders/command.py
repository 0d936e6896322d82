"""What the command line calls: count, compare, write files, show the table."""

from __future__ import annotations

import os
import sys
from pathlib import Path

from rich.console import Console
from rich.table import Table

from graphglue.ladders.compare import FITTED, LadderReport, compare
from graphglue.ladders.counts import Counted
from graphglue.ladders.plot import draw

_WIDTH = 160  # of a table that goes to a file


def run(counts: Counted, buckets: int, multiple: int, max_size: int | None, cost: float, every: int) -> LadderReport:
    """Fit a ladder, and hold it beside others.

    What the engine is set to at most is the largest size, unless another is asked for.

    Raises:
        ConfigError: what ``compare`` refuses.
    """
    if max_size is None and counts.max_size is not None:
        max_size = -(-counts.max_size // multiple) * multiple
    return compare(
        counts.histogram, counts.source, buckets,
        multiple=multiple, max_size=max_size, cost_per_bucket=cost, every=every,
    )  # fmt: skip


def write(report: LadderReport, json: Path | None, plot: Path | None) -> None:
    """Write the files that were asked for."""
    if json is not None:
        report.write_json(json)
    if plot is not None:
        draw(report, plot)


def show(report: LadderReport) -> None:
    """Print the ladder and the table, as wide as the terminal; wide where they go to a file."""
    sized = sys.stdout.isatty() or "COLUMNS" in os.environ
    console = Console(width=None if sized else _WIDTH)
    for line in (
        f"counts    {report.source}",
        f"steps     {report.num_steps:,} with {report.num_rows:,} real rows, "
        f"{report.num_rows / report.num_steps:.1f} in the mean",
        f"ladder    {list(report.fitted.sizes)}",
    ):
        console.print(line, highlight=False, markup=False, soft_wrap=True)
    console.print(_table(report))


def _table(report: LadderReport) -> Table:
    table = Table("ladder")
    costs = ("cost",) if report.cost_per_bucket else ()
    for name in ("sizes", "padded rows", "of all rows", "over real", "worst step", "steps over 2x", *costs):
        table.add_column(name, justify="right")
    for ladder in report.ladders:
        cells = [
            str(len(ladder.sizes)), f"{ladder.padded_rows:,}", f"{ladder.padded_share:.2%}",
            f"{ladder.waste:.2%}", f"{ladder.worst_waste:.1%}", f"{ladder.over_twice:.1%}",
        ]  # fmt: skip
        cost = [f"{ladder.cost:,.0f}"] if costs else []
        table.add_row(ladder.name, *cells, *cost, style="bold" if ladder.name == FITTED else None)
    return table
