"""The report as one HTML page: no script, nothing loaded, light or dark as the reader's system is."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from html import escape
from pathlib import Path

from graphglue.budget import BudgetPlan
from graphglue.report.page import spelled_budget, spelled_bytes, spelled_key
from graphglue.report.summary import Rung, Summary

_STYLE = """
:root { color-scheme: light dark; --ink: #1c1d1f; --quiet: #6b6f76; --paper: #fcfcfa; --line: #e2e2dc;
  --real: #2f6f9f; --pad: #e0a33e; --bad: #b3372c; }
@media (prefers-color-scheme: dark) { :root { --ink: #e6e6e3; --quiet: #9a9ea6; --paper: #17181a; --line: #303236;
  --real: #6aa9d8; --pad: #d39a3c; --bad: #ef7d72; } }
body { font: 15px/1.5 system-ui, sans-serif; color: var(--ink); background: var(--paper); margin: 2rem auto;
  max-width: 62rem; padding: 0 1.5rem; }
h1 { font-size: 1.5rem; margin: 0 0 .2rem; } h2 { font-size: 1.05rem; margin: 2.2rem 0 .6rem; }
.figures { display: flex; flex-wrap: wrap; gap: 2.2rem; margin: 1.2rem 0; }
.figures b { display: block; font-size: 1.7rem; font-weight: 600; line-height: 1.2; }
.figures span, .legend, p { color: var(--quiet); }
table { border-collapse: collapse; width: 100%; font-variant-numeric: tabular-nums; }
th { text-align: left; font-weight: 500; color: var(--quiet); }
th, td { padding: .25rem .7rem .25rem 0; border-bottom: 1px solid var(--line); vertical-align: top; }
td.n, th.n { text-align: right; white-space: nowrap; } td.bar { width: 45%; }
.bar div { display: flex; height: .85rem; margin-top: .3rem; } .bar i { display: block; }
.real { background: var(--real); } .pad { background: var(--pad); } .bad { color: var(--bad); }
.legend i { display: inline-block; width: .8rem; height: .8rem; margin: 0 .35rem 0 .9rem; vertical-align: -1px; }
pre { white-space: pre-wrap; }
"""


def write(summary: Summary, budgets: Mapping[str, BudgetPlan], path: Path) -> None:
    """Write the page."""
    path.write_text(page(summary, budgets), encoding="utf-8")


def page(summary: Summary, budgets: Mapping[str, BudgetPlan]) -> str:
    """Give the page as text."""
    sections = [_head(summary), _ladder(summary.rungs)]
    for title, counts in (
        ("Routes, prep / forward", summary.routes),
        ("Reasons", summary.reasons),
        ("Why forwards ran eagerly", summary.forward_reasons),
        ("Why a glued step was more than one launch", summary.launch_fallbacks),
        ("Shadow check", summary.shadow),
        ("Staging", summary.staging),
    ):
        if counts:
            sections.append(_shares(title, counts, summary.steps))
    sections += [_quarantines(summary), _sources(summary), _keys(summary)]
    if lines := [line for name, plan in budgets.items() for line in spelled_budget(name, plan)]:
        sections.append("<h2>Memory budget</h2><pre>" + escape("\n".join(lines)) + "</pre>")
    body = "\n".join(section for section in sections if section)
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8"><title>graphglue report</title>'
        f"<style>{_STYLE}</style></head>\n<body>\n{body}\n</body></html>\n"
    )


def _head(summary: Summary) -> str:
    steps = summary.steps or 1
    glued = sum(one.glued * one.steps for one in summary.sources) / steps
    launches = sum(one.one_launch * one.steps for one in summary.sources) / steps
    figures = (
        (f"{summary.steps:,}", "steps"),
        (f"{summary.all_rungs.waste:.1%}", "of the rows padded"),
        (f"{glued:.1%}", "of the steps glued"),
        (f"{launches:.1%}", "in one launch"),
        (str(len(summary.quarantined)), "keys quarantined now"),
    )
    cells = "".join(f"<div><b>{figure}</b><span>{text}</span></div>" for figure, text in figures)
    return f'<h1>graphglue report</h1>\n<div class="figures">{cells}</div>'


def _ladder(rungs: Iterable[Rung]) -> str:
    rungs = list(rungs)
    largest = max((rung.real_tokens + rung.padded_tokens for rung in rungs), default=0) or 1
    legend = '<p class="legend"><i class="real"></i>real rows<i class="pad"></i>padded rows</p>'
    rows = []
    for rung in rungs:
        bar = _bar((rung.real_tokens / largest, "real"), (rung.padded_tokens / largest, "pad"))
        counts = (f"{rung.steps:,}", f"{rung.real_tokens:,}", f"{rung.padded_tokens:,}", f"{rung.waste:.1%}")
        rows.append(_row(escape(rung.label), bar, *counts))
    return "<h2>Ladder</h2>" + legend + _table(("bucket", "", "steps", "real", "padded", "waste"), rows)


def _shares(title: str, counts: Mapping[str, int], steps: int) -> str:
    steps = steps or 1
    rows = [
        _row(escape(name), _bar((count / steps, "real")), f"{count:,}", f"{count / steps:.1%}")
        for name, count in counts.items()
    ]
    return f"<h2>{title}</h2>" + _table(("", "", "steps", "share"), rows)


def _quarantines(summary: Summary) -> str:
    if not summary.quarantined:
        total = sum(one.num_quarantines for one in summary.sources)
        return f"<h2>Quarantines</h2><p>No key is quarantined now; {total} were since the start.</p>"
    cells = [
        f'<tr><td>{escape(held.source)}</td><td>{escape(spelled_key(held))}</td><td>{escape(part)}</td><td class="bad">'
        f"{escape(cause)}</td></tr>"
        for held in summary.quarantined
        for part, cause in held.key.causes.items()
    ]
    head = "<tr><th>file</th><th>key</th><th>part</th><th>cause</th></tr>"
    return f"<h2>Quarantined now</h2><table>{head}{''.join(cells)}</table>"


def _sources(summary: Summary) -> str:
    rows = [
        _row(escape(one.name), _bar((1 - one.waste, "real"), (one.waste, "pad")), f"{one.steps:,}", f"{one.waste:.1%}",
             f"{one.glued:.1%}", f"{one.graphs:.1%}", f"{one.one_launch:.1%}")
        for one in summary.sources
    ]  # fmt: skip
    return "<h2>Runners</h2>" + _table(("file", "", "steps", "padded", "glued", "graph", "one launch"), rows)


def _keys(summary: Summary) -> str:
    largest = max((held.key.memory.pool_bytes + (held.key.memory.exec_bytes or 0) for held in summary.keys), default=0)
    rows = []
    for held in summary.keys:
        key, memory = held.key, held.key.memory
        bar = _bar((memory.pool_bytes / (largest or 1), "real"), ((memory.exec_bytes or 0) / (largest or 1), "pad"))
        sizes = (spelled_bytes(size) for size in (memory.pool_bytes, memory.exec_bytes, memory.outputs_bytes))
        name = escape(f"{held.source}: {spelled_key(held)}")
        rows.append(_row(name, bar, f"{key.steps:,}", f"{key.capture_seconds:.3f}", *sizes))
    legend = '<p class="legend"><i class="real"></i>memory pool<i class="pad"></i>graphs, as the driver counts</p>'
    head = ("key", "", "steps", "capture s", "pool", "graphs", "outputs")
    return "<h2>Keys</h2>" + legend + _table(head, rows) if rows else ""


def _table(head: tuple[str, ...], rows: Iterable[str]) -> str:
    cells = "".join(f"<th{' class=n' if position > 1 else ''}>{name}</th>" for position, name in enumerate(head))
    return f"<table><tr>{cells}</tr>{''.join(rows)}</table>"


def _row(name: str, bar: str, *numbers: str) -> str:
    cells = "".join(f'<td class="n">{number}</td>' for number in numbers)
    return f'<tr><td>{name}</td><td class="bar">{bar}</td>{cells}</tr>'


def _bar(*parts: tuple[float, str]) -> str:
    return (
        "<div>"
        + "".join(f'<i class="{kind}" style="width:{100 * share:.2f}%"></i>' for share, kind in parts)
        + "</div>"
    )
