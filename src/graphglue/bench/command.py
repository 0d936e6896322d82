"""What the command line calls: read options, run, write files."""

from __future__ import annotations

import importlib.util
import os
import shlex
import sys
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console

from graphglue.bench import run, settings_of
from graphglue.bench.plot import draw
from graphglue.bench.report import print_report
from graphglue.bench.results import Report
from graphglue.bench.sections import Settings
from graphglue.errors import ConfigError

_WIDTH = 200  # of tables that go to a file


def parsed(
    device: str,
    steps: int | None,
    buckets: str | None,
    only: str | None,
    peers: Sequence[str],
    trace: Path | None = None,
) -> Settings:
    """Read the options as they were typed.

    Raises:
        ConfigError: an option that can not be read.
    """
    try:
        sizes = [int(size) for size in buckets.split(",")] if buckets else None
    except ValueError:
        raise ConfigError(f"--buckets {buckets}: expected numbers, such as 1,4,16") from None
    sections = [name.strip() for name in only.split(",")] if only else []
    folders = {}
    for peer in peers:
        name, separator, folder = peer.partition("=")
        if not separator or not Path(folder).is_dir():
            raise ConfigError(f"--peer {peer}: expected NAME=DIR with an existing folder")
        folders[name] = Path(folder).absolute()
    return settings_of(device, steps, sizes, sections, folders, trace)


def run_and_write(settings: Settings, json: Path | None, plot: Path | None) -> Report:
    """Run, and write what was asked for; the JSON after each section, so that a run cut short leaves it.

    Raises:
        ConfigError: a plot without matplotlib; nothing was run.
    """
    if plot is not None and importlib.util.find_spec("matplotlib") is None:
        raise ConfigError('--plot needs matplotlib: pip install "graphglue[bench]"')
    if plot is not None and settings.only and not set(settings.only) & {"floor", "peers"}:
        raise ConfigError(f"--plot draws the sections floor and peers; --only {','.join(settings.only)} has neither")
    keep = (lambda report: None) if json is None else (lambda report: report.write_json(json))
    report = run(settings, "graphglue " + shlex.join(sys.argv[1:]), keep)
    if plot is not None:
        draw(report, plot)
    return report


def show(report: Report) -> None:
    """Print the tables, as wide as the terminal; wide where they go to a file."""
    sized = sys.stdout.isatty() or "COLUMNS" in os.environ
    print_report(report, Console(width=None if sized else _WIDTH))
