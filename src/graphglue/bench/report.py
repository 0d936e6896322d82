"""Print a run as tables."""

from __future__ import annotations

from collections.abc import Iterable

from rich.console import Console
from rich.table import Table

from graphglue.bench.results import Report, Row, Section, Target

_DEVICE_NOTE = "device us: queued behind a busy GPU, so that the host's time is not in it"
_NOISE_MARK = "~"


def print_report(report: Report, console: Console) -> None:
    """Print machine, every section, and the targets."""
    machine = ", ".join(f"{name} {value}" for name, value in report.machine.items())
    versions = ", ".join(f"{name} {value}" for name, value in report.versions.items())
    for line in (machine, versions, f"{report.date}  {report.command}"):
        console.print(line, highlight=False, markup=False)
    for section in report.sections:
        console.print(_section(section))
        for note in section.notes:
            console.print(f"  {note}", highlight=False, markup=False)
    if any(row.device_us is not None for section in report.sections for row in section.rows):
        console.print(_DEVICE_NOTE, highlight=False, markup=False)
    console.print(
        f"{_NOISE_MARK} as close to the floor as the floor is to itself: no difference is claimed",
        highlight=False,
        markup=False,
    )
    if report.targets:
        console.print(_targets(report.targets))


def _section(section: Section) -> Table:
    table = Table(title=f"{section.name}: {section.title} ({section.seconds:.0f} s)", title_justify="left")
    table.add_column("row", overflow="fold", min_width=34, max_width=58)
    for name in (
        "real",
        "in flight",
        "steps",
        "host us",
        "p99",
        "floor us",
        "floor p99",
        "x floor",
        "device us",
        "steps/s",
    ):
        table.add_column(name, justify="right")
    table.add_column("", overflow="fold", max_width=60)
    last = None
    for row in section.rows:
        shape = (row.bucket, row.raw, row.in_flight) if row.num_steps or row.note else last
        if last is not None and shape != last:
            table.add_section()
        last = shape
        table.add_row(*_cells(row))
    return table


def _cells(row: Row) -> Iterable[str]:
    mark = _NOISE_MARK if row.within_noise else ""
    real = "" if row.bucket is None else f"{row.bucket}" if row.raw is None else f"{row.raw} on {row.bucket}"
    yield row.label
    yield real
    yield "" if row.in_flight is None or not row.num_steps else str(row.in_flight)
    yield str(row.num_steps) if row.num_steps else ""
    yield _number(row.host_us, 1)
    yield _number(row.host_p99_us, 1)
    yield _number(row.floor_us, 1)
    yield _number(row.floor_p99_us, 1)
    yield mark + _number(row.times_floor, 2)
    yield _number(row.device_us, 1)
    yield _number(row.per_second, 0)
    values = ", ".join(f"{name} {_value(value)}" for name, value in row.values.items())
    yield "; ".join(text for text in (values, row.note) if text)


def _number(value: float | None, digits: int) -> str:
    return "" if value is None else f"{value:,.{digits}f}"


def _value(value: float | bool) -> str:
    return str(value) if isinstance(value, (bool, int)) else f"{value:,.3g}" if abs(value) < 1000 else f"{value:,.0f}"


def _targets(targets: Iterable[Target]) -> Table:
    table = Table("to reach on an H200", "limit", "seen", "", title="targets", title_justify="left")
    for target in targets:
        mark = "-" if target.reached is None else "[green]reached[/]" if target.reached else "[red]missed[/]"
        table.add_row(target.what, target.limit, target.seen, mark)
    return table
