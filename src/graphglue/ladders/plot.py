"""A picture of ladders: the counts with each ladder's sizes below, and padded rows by number of sizes."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator
from itertools import accumulate
from pathlib import Path
from typing import Any

from graphglue.errors import ConfigError
from graphglue.ladders.compare import FITTED, LadderReport

FORMATS = (".png", ".svg", ".pdf")
_OURS, _GREY, _LIGHT = "#1f77b4", "#666666", "#b8b8b8"
_RIVALS = ("#d97706", "#2ca02c", "#9467bd")


def check(path: Path) -> None:
    """Refuse a picture that can not be drawn, before anything is counted.

    Raises:
        ConfigError: matplotlib is missing, or the name of the file has no ending that it can write.
    """
    if path.suffix.lower() not in FORMATS:
        raise ConfigError(f"--plot {path}: expected a name that ends in {', '.join(FORMATS)}")
    if importlib.util.find_spec("matplotlib") is None:
        raise ConfigError('--plot needs matplotlib: pip install "graphglue[bench]"')


def draw(report: LadderReport, path: Path) -> None:
    """Write the picture to a file.

    Raises:
        ConfigError: what ``check`` refuses.
    """
    check(path)
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as pyplot

    figure, (counts, rungs, curve) = pyplot.subplots(
        3, 1, figsize=(10, 8), height_ratios=(2.2, 1.5, 3.2), layout="constrained"
    )
    rungs.sharex(counts)
    _draw_counts(counts, report)
    _draw_rungs(rungs, report)
    _draw_curve(curve, report)
    for axis in (counts, rungs, curve):
        axis.spines[["top", "right"]].set_visible(False)
    figure.suptitle("What ladders pad", x=0.01, ha="left", fontsize=14, fontweight="bold")
    figure.text(0.01, -0.01, report.source, fontsize=8, color=_GREY, ha="left", va="top", wrap=True)
    figure.savefig(path, dpi=150, bbox_inches="tight")
    pyplot.close(figure)


def _colors(report: LadderReport) -> Iterator[str]:
    rivals = iter(_RIVALS)
    return (_OURS if ladder.name == FITTED else next(rivals) for ladder in report.ladders)


def _draw_counts(axis: Any, report: LadderReport) -> None:
    counts = [count for count in report.histogram if count]
    below = accumulate(100 * report.histogram[count] / report.num_steps for count in counts)
    axis.fill_between([0, *counts], [0, *below], step="post", color=_LIGHT, lw=0)
    axis.set_ylim(0, 100)
    axis.set_ylabel("% of steps\nup to that size")
    axis.set_title(f"{report.num_steps:,} steps by real rows", loc="left", fontsize=10, fontweight="bold")
    axis.tick_params(axis="x", labelbottom=False)


def _draw_rungs(axis: Any, report: LadderReport) -> None:
    names = [f"{ladder.name}: {len(ladder.sizes)}" for ladder in report.ladders]
    for position, (ladder, color) in enumerate(zip(report.ladders, _colors(report))):
        axis.vlines(ladder.sizes, position - 0.36, position + 0.36, color=color, lw=1.2)
    axis.set_yticks(range(len(names)), names, fontsize=8.5)
    axis.invert_yaxis()
    axis.tick_params(axis="y", length=0)
    axis.set_xlabel("sizes of each ladder, and their number")


def _draw_curve(axis: Any, report: LadderReport) -> None:
    shares = [100 * rows / (rows + report.num_rows) for rows in report.least_rows]
    axis.plot(range(1, len(shares) + 1), shares, color=_OURS, lw=1.2, marker=".", ms=4, label="best of as many sizes")
    for ladder, color in zip(report.ladders, _colors(report)):
        share, num_sizes = 100 * ladder.padded_share, len(ladder.sizes)
        axis.plot([num_sizes], [share], "o", ms=8, color=color, label=f"{ladder.name}: {share:.2f} %")
    axis.set_xscale("log", base=2)
    axis.xaxis.set_major_formatter("{x:g}")
    axis.set_ylim(bottom=0)
    axis.set_xlabel("sizes (log scale)")
    axis.set_ylabel("% of rows padded")
    axis.set_title("Padded rows by number of sizes (less is better)", loc="left", fontsize=10, fontweight="bold")
    axis.grid(color="#e5e5e5")
    axis.legend(frameon=False, fontsize=8.5)
