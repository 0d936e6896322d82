"""The report: its sums against the dumped files, its page, its picture, and what it refuses."""

from __future__ import annotations

import json
import sys
from collections import Counter
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("typer", reason="needs the extra: pip install 'graphglue[cli]'")
from typer.testing import CliRunner

from graphglue.cli import app
from graphglue.errors import ConfigError
from graphglue.report import read_stats, summarize
from graphglue.report.command import parsed_bytes
from graphglue.report.html import page
from tests.unit.operations import make, serve

pytestmark = pytest.mark.usefixtures("frozen_imports")
COUNTS = [3, 1, 0, 5, 9, 8, 3, 2]


@pytest.fixture
def stats() -> dict[str, Any]:
    """The stats of a runner with a quarantined key whose cause looks like markup."""
    runner = make()
    serve(runner, COUNTS)
    runner._units[0].cache.quarantine(runner._wanted[0], "[bold]<b>lost</b>[/bold]")
    runner._stepper.forget()
    serve(runner, [8])
    return runner.stats()


@pytest.fixture
def files(stats: dict[str, Any], tmp_path: Path) -> list[Path]:
    """Two ranks' files; the second is as the first."""
    paths = [tmp_path / "rank0.json", tmp_path / "rank1.json"]
    for rank, path in enumerate(paths):
        path.write_text(json.dumps({**stats, "rank": rank, "num_ranks": 2}))
    return paths


def test_the_sums_are_those_of_both_files(stats: dict[str, Any], files: list[Path]) -> None:
    summary = summarize({path.stem: read_stats(path) for path in files})
    assert summary.steps == 2 * stats["steps"] == 2 * (len(COUNTS) + 1)
    reasons: Counter[str] = Counter()
    rows: dict[str, list[int]] = {}
    for route in stats["routes"]:
        reasons[route["reason"]] += 2 * route["steps"]
        label = "exact" if route["bucket"] is None else f"{route['bucket'][0]}x{route['bucket'][1]}"
        sums = rows.setdefault(label, [0, 0, 0])
        for position, name in enumerate(("steps", "real_tokens", "padded_tokens")):
            sums[position] += 2 * route[name]
    assert summary.reasons == reasons
    assert {rung.label: [rung.steps, rung.real_tokens, rung.padded_tokens] for rung in summary.rungs} == rows
    assert [rung.label for rung in summary.rungs] == ["1x1", "2x2", "4x4", "8x8", "exact"]
    assert summary.all_rungs.waste == stats["padded_tokens"] / stats["bucket_tokens"]
    assert sum(summary.routes.values()) == summary.steps
    assert summary.sources[0].glued == sum(r["steps"] for r in stats["routes"] if r["prep"] == "glue") / stats["steps"]
    assert [held.key.causes for held in summary.quarantined] == [{"meta": "CaptureError: [bold]<b>lost</b>[/bold]"}] * 2


def report(*arguments: object, columns: int = 200, monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.setenv("COLUMNS", str(columns))
    return CliRunner().invoke(app, ["report", *map(str, arguments)])


def test_the_page_in_the_terminal(files: list[Path], monkeypatch: pytest.MonkeyPatch) -> None:
    ran = report(*files, monkeypatch=monkeypatch)
    assert ran.exit_code == 0, ran.output
    for text in ("rank0 (rank 0)", "rank1 (rank 1)", "4x4", "exact", "glue / graph", "over_ladder", "quarantined now"):
        assert text in ran.output, text
    assert "[bold]<b>lost</b>[/bold]" in ran.output  # no markup


def test_a_runner_that_ran_nothing_is_shown_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "s.json").write_text(json.dumps(make().stats()))
    ran = report(
        tmp_path / "s.json", "--html", tmp_path / "r.html", "--png", tmp_path / "r.png", monkeypatch=monkeypatch
    )
    assert ran.exit_code == 0, ran.output
    assert "no key is quarantined now; 0 were" in ran.output


def test_names_are_no_markup_anywhere(stats: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever a key, a route or a prep is called, in the terminal as on the page."""
    odd = "[red]<i>\u00e9[/blue]"
    key = {**stats["keys"][0], "variant": odd, "mode": odd, "states": {odd: "quarantined"}, "causes": {odd: odd}}
    route = {**stats["routes"][0], "prep": odd, "forward": odd, "reason": odd, "forward_reason": odd}
    changed = {**stats, "keys": [key], "routes": [route], "launch_fallbacks": {odd: 1}}
    (tmp_path / f"{odd.replace('/', '')}.json").write_text(json.dumps(changed))
    (path,) = tmp_path.glob("*.json")
    ran = report(path, "--html", tmp_path / "r.html", "--budget", "0", columns=900, monkeypatch=monkeypatch)
    assert ran.exit_code == 0, ran.output
    for shown in (f"{odd} 8x8 variant {odd}", f"{odd} / {odd}"):
        assert shown in ran.output, shown
    tags = _Tags()
    tags.feed((tmp_path / "r.html").read_text(encoding="utf-8"))
    assert (tags.open, odd in " ".join(tags.text)) == ([], True)


def test_counts_that_do_not_add_up_are_shown_as_they_are(
    stats: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    routes = [{**route, "steps": 2**62} for route in stats["routes"]]
    (tmp_path / "s.json").write_text(json.dumps({**stats, "routes": routes}))
    ran = report(tmp_path / "s.json", "--html", tmp_path / "r.html", monkeypatch=monkeypatch)
    assert ran.exit_code == 0, ran.output
    assert f"{2**62:,}" in ran.output


def test_a_file_from_an_editor_that_marks_utf_8_is_read(
    stats: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "s.json").write_text(json.dumps(stats), encoding="utf-8-sig")
    assert report(tmp_path / "s.json", monkeypatch=monkeypatch).exit_code == 0


class _Tags(HTMLParser):
    """Check that what opens closes, and collect the text."""

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.text: list[str] = []
        self.loads: list[str] = []

    def handle_starttag(self, tag: str, attrs: Any) -> None:
        if tag != "meta":
            self.open.append(tag)
        self.loads += [value for name, value in attrs if name in ("src", "href")]

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.text.append(data)


def test_the_html_page_is_whole_and_loads_nothing(files: list[Path]) -> None:
    tags = _Tags()
    tags.feed(page(summarize({path.stem: read_stats(path) for path in files}), {}))
    assert tags.open == []
    assert tags.loads == []
    text = " ".join(tags.text)
    for shown in ("of the rows padded", "4x4", "over_ladder", "<b>lost</b>", "memory pool"):
        assert shown in text, shown
    assert "b" not in tags.open
    assert "script" not in page(summarize({}), {})


def test_pictures_and_pages_are_written(files: list[Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("matplotlib", reason="the picture needs matplotlib, of the extra bench")
    ran = report(*files, "--html", tmp_path / "r.html", "--png", tmp_path / "r.png", monkeypatch=monkeypatch)
    assert ran.exit_code == 0, ran.output
    assert (tmp_path / "r.png").read_bytes().startswith(b"\x89PNG")
    assert (tmp_path / "r.html").read_text().startswith("<!doctype html>")


def test_a_picture_without_matplotlib_names_the_extra(files: list[Path], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    ran = report(files[0], "--png", files[0].with_name("r.png"), monkeypatch=monkeypatch)
    assert ran.exit_code == 2
    assert 'pip install "graphglue[bench]"' in ran.output
    assert "runners" not in ran.output  # refused before anything was shown


def test_a_budget_names_keys(stats: dict[str, Any], files: list[Path], monkeypatch: pytest.MonkeyPatch) -> None:
    held = sum(key["memory"]["pool_bytes"] for key in stats["keys"])
    ran = report(files[0], "--budget", held, monkeypatch=monkeypatch)
    assert "within the budget" in ran.output
    ran = report(files[0], "--budget", held - 1, monkeypatch=monkeypatch)
    assert ran.exit_code == 0
    least = min(stats["keys"], key=lambda key: key["steps"] / key["memory"]["freed_bytes"])
    assert f"decode {least['bucket'][0]}x{least['bucket'][1]} variant None: {least['steps']} steps" in ran.output


@pytest.mark.parametrize(
    ("text", "num_bytes"), [("900", 900), ("2KiB", 2048), ("1.5 MiB", 3 * 2**19), ("2GiB", 2**31), ("0", 0)]
)
def test_a_budget_is_read_in_bytes(text: str, num_bytes: int) -> None:
    assert parsed_bytes(text) == num_bytes


@pytest.mark.parametrize("text", ["-1", "two", "3 parsecs", "", "inf", "nan"])
def test_a_budget_that_is_no_size_is_refused(text: str) -> None:
    with pytest.raises(ConfigError, match="512MiB"):
        parsed_bytes(text)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"version": 2}, "version"),
        ({"routes": 3}, "routes"),
        ({"keys": [{"mode": "decode"}]}, "keys.0.bucket"),
        ({"steps": -1}, "steps"),
        ({"real_tokens": 10**400}, "real_tokens"),
        ({"shadow": {"sampled": "many"}}, "shadow.sampled"),
        ({"staging": {"staged": 1.5}}, "staging.staged"),
        (None, "Invalid JSON"),
    ],
)
def test_what_is_no_dump_is_refused(
    stats: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, change: dict[str, Any] | None, said: str
) -> None:
    (tmp_path / "s.json").write_text("{" if change is None else json.dumps({**stats, **change}))
    ran = report(tmp_path / "s.json", monkeypatch=monkeypatch)
    assert ran.exit_code == 2
    assert said in ran.output
    assert "json.dump(runner.stats(), file)" in ran.output


@pytest.mark.parametrize("option", ["--html", "--png"])
def test_a_disk_that_is_full_is_said_behind_the_report_and_without_a_traceback(
    option: str, files: list[Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    full = Path("/dev/full")  # opens, and takes nothing
    ran = report(files[0], option, full if full.exists() else files[0] / "no folder", monkeypatch=monkeypatch)
    assert ran.exit_code == 2
    assert not full.exists() or "graphglue report: a file can not be written: [Errno 28]" in ran.output
    assert not full.exists() or "routes, prep / forward" in ran.output
    assert isinstance(ran.exception, SystemExit)


def test_a_file_or_folder_that_is_not_there_is_refused(files: list[Path], monkeypatch: pytest.MonkeyPatch) -> None:
    assert report("nowhere.json", monkeypatch=monkeypatch).exit_code == 2
    for option in ("--html", "--png"):
        ran = report(files[0], option, "/nowhere/at/all.x", monkeypatch=monkeypatch)
        assert ran.exit_code == 2
        assert option in ran.output
