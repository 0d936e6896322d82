"""The report as a picture: the ladder's use, the waste of each rung, routes and reasons."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from graphglue.errors import ConfigError
from graphglue.report.summary import Summary

_REAL, _PAD, _SHARE, _GREY = "#2f6f9f", "#e0a33e", "#4f8a5b", "#666666"
_BAR_INCHES, _PANEL_INCHES = 0.28, 0.9


def draw(summary: Summary, path: Path) -> None:
    """Write the picture.

    Raises:
        ConfigError: matplotlib is missing.
    """
    pyplot = load_pyplot()
    panels = [("routes, prep / forward", summary.routes), ("reasons", summary.reasons)]
    heights = [_BAR_INCHES * max(1, len(bars)) + _PANEL_INCHES for bars in (summary.rungs, *(one for _, one in panels))]
    figure, axes = pyplot.subplots(3, 1, figsize=(10, sum(heights)), height_ratios=heights)
    _ladder(axes[0], summary)
    for axis, (title, counts) in zip(axes[1:], panels):
        _shares(axis, title, counts, summary.steps)
    files = f"{len(summary.sources)} runners" if len(summary.sources) > 1 else summary.sources[0].name
    figure.suptitle(
        f"{files}: {summary.steps:,} steps, {summary.all_rungs.waste:.1%} of the rows padded", x=0.01, ha="left"
    )
    figure.tight_layout()
    figure.savefig(path, dpi=150, bbox_inches="tight", format="png")
    pyplot.close(figure)


def load_pyplot() -> Any:
    """Load matplotlib without a screen.

    Raises:
        ConfigError: it is missing.
    """
    try:
        import matplotlib

        matplotlib.use("Agg")
        import matplotlib.pyplot as pyplot
    except ImportError as error:
        raise ConfigError('--png needs matplotlib: pip install "graphglue[bench]"; --html needs nothing') from error
    return pyplot


def _ladder(axis: Any, summary: Summary) -> None:
    rungs = list(summary.rungs)
    labels, real = [rung.label for rung in rungs], [rung.real_tokens for rung in rungs]
    padded = [rung.padded_tokens for rung in rungs]
    axis.barh(labels, real, color=_REAL, label="real rows")
    axis.barh(labels, padded, left=real, color=_PAD, label="padded rows")
    for position, rung in enumerate(rungs):
        text = f" {rung.waste:.0%} padded, {rung.steps:,} steps"
        axis.text(rung.real_tokens + rung.padded_tokens, position, text, va="center", fontsize=8, color=_GREY)
    axis.margins(x=0.3)
    axis.legend(frameon=False, fontsize=8, loc="upper right")
    _finish(axis, "ladder: rows by bucket (requests x tokens)")


def _shares(axis: Any, title: str, counts: Mapping[str, int], steps: int) -> None:
    names, shares = list(counts), [100 * count / (steps or 1) for count in counts.values()]
    axis.barh(names, shares, color=_SHARE)
    for position, (share, count) in enumerate(zip(shares, counts.values())):
        axis.text(share, position, f" {share:.1f}%, {count:,}", va="center", fontsize=8, color=_GREY)
    axis.set_xlim(0, 125)
    axis.set_xticks([0, 25, 50, 75, 100])
    _finish(axis, f"{title}: % of steps")


def _finish(axis: Any, title: str) -> None:
    axis.invert_yaxis()
    axis.set_title(title, loc="left", fontsize=10)
    axis.tick_params(labelsize=8, length=0)
    for side in ("top", "right", "left"):
        axis.spines[side].set_visible(False)
