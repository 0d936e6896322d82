"""A picture of a run: what each way to run the step costs, in multiples of the bare forward replay."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from graphglue.bench.contenders import AGAIN, EAGER_ALONE, FLOOR, GLUE_ALONE, UNFILLED
from graphglue.bench.results import Report, Row
from graphglue.bench.steps import MIXED
from graphglue.errors import ConfigError

_OURS, _BASELINE, _PEER, _GREY = "#1f77b4", "#b8b8b8", "#d97706", "#666666"
_LEFT_OUT = (FLOOR, AGAIN, GLUE_ALONE, EAGER_ALONE, UNFILLED)
_BAR_INCHES, _PANEL_INCHES = 0.27, 0.75


def draw(report: Report, path: Path) -> None:
    """Write horizontal bars per bucket on a logarithmic axis, the noise shaded.

    Raises:
        ConfigError: matplotlib is missing, or no step was timed.
    """
    try:
        import matplotlib

        matplotlib.use("Agg")
        import matplotlib.pyplot as pyplot
    except ImportError as error:
        raise ConfigError('--plot needs matplotlib: pip install "graphglue[bench]"') from error
    panels = _panels(report)
    if not panels:
        raise ConfigError("--plot: no step was timed; run the section floor or peers")
    heights = [_BAR_INCHES * len(rows) + _PANEL_INCHES for _, rows, _ in panels]
    figure, axes = pyplot.subplots(
        len(panels), 1, sharex=True, squeeze=False, figsize=(11, sum(heights) + 1.2), height_ratios=heights
    )
    for axis, (title, rows, noise) in zip(axes[:, 0], panels):
        _panel(axis, title, rows, noise)
    _label(figure, list(axes[:, 0]), report)
    figure.savefig(path, dpi=150, bbox_inches="tight")
    pyplot.close(figure)


def _panels(report: Report) -> list[tuple[str, list[Row], float]]:
    """Give title, rows and noise of the padded shape of each bucket; only what was timed in turn stands together."""
    shapes: dict[tuple[int, int, bool], list[Row]] = {}
    for beside_peer, name in enumerate(("floor", "peers")):
        for row in report.rows((name,)):
            if row.bucket is None or row.raw is None or row.times_floor is None:
                continue
            padded = row.raw < row.bucket or row.bucket == 1
            if padded and not row.in_flight and not row.label.endswith(MIXED):
                shapes.setdefault((row.bucket, row.raw, bool(beside_peer)), []).append(row)
    return [(_title(*shape), *_bars(rows)) for shape, rows in sorted(shapes.items())]


def _title(bucket: int, raw: int, beside_peer: bool) -> str:
    title = f"{raw} {'request' if raw == 1 else 'requests'} on bucket {bucket}"
    return title + ", beside the leading engine's own classes" if beside_peer else title


def _bars(rows: Sequence[Row]) -> tuple[list[Row], float]:
    noise = max((abs((row.times_floor or 1) - 1) for row in rows if row.label == AGAIN), default=0.0)
    return sorted((row for row in rows if row.label not in _LEFT_OUT), key=lambda row: row.times_floor or 0.0), noise


def _panel(axis: Any, title: str, rows: Sequence[Row], noise: float) -> None:
    labels = [row.label for row in rows]
    values = [row.times_floor or 0.0 for row in rows]
    colors = [_color(label) for label in labels]
    axis.barh(labels, [value - 1 for value in values], left=1, color=colors, height=0.72, zorder=2)
    axis.axvspan(1 / (1 + noise), 1 + noise, color="#2ca02c", alpha=0.25, lw=0, zorder=1)
    axis.axvline(1, color="#2ca02c", lw=1.2, zorder=3)
    for position, row in enumerate(rows):
        text = f" {row.times_floor:.1f} x   {row.host_us:.1f} us"
        weight = "bold" if _color(row.label) == _OURS else "normal"
        at = max(row.times_floor or 1.0, 1.0)
        axis.text(at, position, text, va="center", ha="left", fontsize=8, color="#333333", fontweight=weight)
    axis.set_xscale("log")
    axis.invert_yaxis()
    axis.set_title(title, loc="left", fontsize=10, fontweight="bold")
    axis.tick_params(axis="y", length=0, labelsize=8.5)
    for name, color in zip(axis.get_yticklabels(), colors):
        name.set_color("black" if color == _OURS else _GREY)
    axis.spines[["top", "right", "left"]].set_visible(False)
    axis.grid(axis="x", which="major", color="#e5e5e5", zorder=0)


def _label(figure: Any, axes: Sequence[Any], report: Report) -> None:
    from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter

    low, high = axes[-1].get_xlim()
    axes[-1].set_xlim(min(low, 0.9), high * 2.2)  # room for the numbers behind the longest bar
    axes[-1].xaxis.set_major_locator(LogLocator(subs=(1.0, 2.0, 5.0)))
    axes[-1].xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g} x"))
    axes[-1].xaxis.set_minor_formatter(NullFormatter())
    axes[-1].set_xlabel("host time of one step, in multiples of the bare forward replay (log scale; less is better)")
    device, date = report.machine.get("device", ""), report.date[:10]
    figure.suptitle("What one decode step costs the host", x=0.01, ha="left", fontsize=14, fontweight="bold")
    steps = max((row.num_steps for row in report.rows(("floor", "peers"))), default=0)
    figure.text(
        0.01, -0.01,
        f"{device}, {date}. Medians of up to {steps:,} steps, each in turn with the floor, none in flight. "
        "Blue: graphglue; orange: the leading engine's own classes; grey: others. Green band: the floor against "
        "itself, below which nothing is claimed.",
        fontsize=8, color=_GREY, ha="left", va="top", wrap=True,
    )  # fmt: skip
    figure.tight_layout(rect=(0, 0, 1, 0.985))


def _color(label: str) -> str:
    if label.startswith("one launch"):
        return _OURS
    return _PEER if label.startswith("sglang") else _BASELINE
