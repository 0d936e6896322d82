"""What the command line calls: read the files, sum up, print, draw."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from graphglue.budget import BudgetPlan, plan_budget
from graphglue.errors import ConfigError
from graphglue.report import html, page, plot
from graphglue.report.reading import Stats, read_stats
from graphglue.report.summary import summarize


def run(files: Sequence[Path], to_html: Path | None, to_png: Path | None, budget_bytes: int | None) -> None:
    """Report on the stats in files, one runner each.

    Raises:
        ConfigError: a file that is not what ``runner.stats()`` gives, or a picture without matplotlib.
    """
    if to_png is not None:
        plot.load_pyplot()  # says what to install, before anything is printed
    read = {path: read_stats(path) for path in files}
    names = _names(read)
    summary = summarize({names[path]: stats for path, stats in read.items()})
    budgets: dict[str, BudgetPlan] = {}
    if budget_bytes is not None:
        budgets = {names[path]: plan_budget(stats.model_dump(), budget_bytes) for path, stats in read.items()}
    page.show(summary, budgets)
    if to_html is not None:
        html.write(summary, budgets, to_html)
    if to_png is not None:
        plot.draw(summary, to_png)


def parsed_bytes(text: str) -> int:
    """Read a number of bytes, such as 900000, 512MiB or 2GiB.

    Raises:
        ConfigError: something else.
    """
    number, factor = text.strip(), 1
    for unit, size in (("KiB", 2**10), ("MiB", 2**20), ("GiB", 2**30)):
        if number.endswith(unit):
            number, factor = number.removesuffix(unit).strip(), size
    try:
        num_bytes = int(float(number) * factor)
    except (ValueError, OverflowError):
        num_bytes = -1
    if num_bytes < 0:
        raise ConfigError(f"--budget {text}: expected bytes, such as 900000, 512MiB or 2GiB")
    return num_bytes


def _names(read: Mapping[Path, Stats]) -> dict[Path, str]:
    """Name the files by what tells them apart: the file's name, and the rank where there are several."""
    stems = [path.stem for path in read]
    names = {}
    for path, stats in read.items():
        name = path.stem if stems.count(path.stem) == 1 else str(path)
        names[path] = name if stats.num_ranks == 1 else f"{name} (rank {stats.rank})"
    return names
