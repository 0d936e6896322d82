"""A small run on the tape, and what is written of it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console
from typer.testing import CliRunner

from graphglue import bench
from graphglue.bench.baselines import COMPILED
from graphglue.bench.contenders import AGAIN, FLOOR, ONE_DEVICE
from graphglue.bench.report import print_report
from graphglue.bench.results import SCHEMA, Report, Row, Section
from graphglue.bench.sections import Settings, raw_counts
from graphglue.cli import app
from graphglue.errors import ConfigError

ROW_TYPES: dict[str, Any] = {
    "label": str,
    "bucket": (int, type(None)),
    "raw": (int, type(None)),
    "in_flight": (int, type(None)),
    "num_steps": int,
    "host_us": (float, type(None)),
    "host_p99_us": (float, type(None)),
    "floor_us": (float, type(None)),
    "floor_p99_us": (float, type(None)),
    "times_floor": (float, type(None)),
    "device_us": (float, type(None)),
    "per_second": (float, type(None)),
    "within_noise": bool,
    "note": str,
    "values": dict,
}


@pytest.fixture(scope="module")
def report() -> Report:
    return bench.run(bench.settings_of("cpu", steps=3, buckets=(1, 4)), "graphglue bench")


def test_every_section_runs(report: Report) -> None:
    assert [section.name for section in report.sections] == list(bench.SECTIONS)
    broken = [row.note for section in report.sections for row in section.rows if row.label == "this section broke off"]
    assert not broken


def test_no_row_is_wrong_and_one_without_numbers_says_why(report: Report) -> None:
    for section in report.sections:
        for row in section.rows:
            assert "WRONG" not in row.note
            assert row.host_us is not None or row.device_us is not None or row.values or row.note


def test_rows_cover_each_bucket_padded_and_full(report: Report) -> None:
    floor = report.section("floor")
    assert floor is not None
    assert {(row.raw, row.bucket) for row in floor.rows} == {(1, 1), (3, 4), (4, 4)}
    assert all(row.num_steps == 3 for row in floor.rows if row.host_us is not None)


def test_the_noise_row_is_there_and_the_floor_is_one(report: Report) -> None:
    floor = report.section("floor")
    assert floor is not None
    again = floor.find(AGAIN, bucket=4)
    first = floor.find(FLOOR, bucket=4)
    assert again is not None
    assert first is not None
    assert again.note == "the noise row"
    assert first.times_floor == 1
    assert not again.within_noise


def test_null_cases_stay_in_the_table(report: Report) -> None:
    floor = report.section("floor")
    assert floor is not None
    row = floor.find(COMPILED, bucket=4)
    assert row is not None
    assert row.host_us is None
    assert row.note


def test_the_tape_says_that_it_is_not_for_speed(report: Report) -> None:
    assert all(any("not for speed" in note for note in section.notes) for section in report.sections)
    assert "not for speed" in report.machine["device"]
    assert report.targets == []


def test_the_file_has_machine_date_versions_command_and_all_rows(report: Report, tmp_path: Path) -> None:
    report.write_json(tmp_path / "bench.json")
    written = json.loads((tmp_path / "bench.json").read_text())
    assert set(written) == {
        "schema", "machine", "date", "versions", "command", "settings", "sections", "targets",
    }  # fmt: skip
    assert written["schema"] == SCHEMA
    assert set(written["machine"]) == {"device", "host"}
    assert set(written["versions"]) == {"graphglue", "torch", "cuda", "python"}
    assert written["command"] == "graphglue bench"
    assert written["settings"] == {"steps": 3, "buckets": [1, 4], "only": [], "peers": {}, "trace": None}
    for section, seen in zip(report.sections, written["sections"]):
        assert set(seen) == {"name", "title", "rows", "seconds", "notes"}
        assert len(seen["rows"]) == len(section.rows)
        for row in seen["rows"]:
            assert set(row) == set(ROW_TYPES)
            assert all(isinstance(row[name], kind) for name, kind in ROW_TYPES.items())


def test_the_tables_name_every_row(report: Report) -> None:
    console = Console(width=400, record=True, file=open("/dev/null", "w"))  # noqa: SIM115
    print_report(report, console)
    text = console.export_text()
    for section in report.sections:
        assert section.title in text
        assert all(row.label.split(",")[0] in text for row in section.rows)


def test_a_section_that_fails_leaves_its_error_and_the_others_run(monkeypatch: pytest.MonkeyPatch) -> None:
    def breaks(settings: Settings, section: Section) -> None:
        section.rows.append(Row("measured before"))
        raise RuntimeError("out of memory")

    monkeypatch.setattr(bench, "SECTIONS", {"first": ("one", breaks), "second": ("two", lambda *_: None)})
    report = bench.run(bench.settings_of("cpu", steps=1))
    assert [section.name for section in report.sections] == ["first", "second"]
    labels = [(row.label, row.note) for row in report.sections[0].rows]
    assert labels == [("measured before", ""), ("this section broke off", "RuntimeError: out of memory")]


@pytest.mark.parametrize(
    ("bucket", "expected"), [(1, (1,)), (4, (3, 4)), (16, (13, 16)), (64, (63, 64)), (256, (255, 256))]
)
def test_real_counts(bucket: int, expected: tuple[int, ...]) -> None:
    assert raw_counts(bucket) == expected


def test_settings_are_completed() -> None:
    settings = bench.settings_of("auto" if not torch.cuda.is_available() else "cpu")
    assert (settings.device.type, settings.steps, settings.buckets) == ("cpu", 20, (1, 4, 16))


@pytest.mark.parametrize(
    ("asked", "text"),
    [
        ({"only": ("floors",)}, "--only names ['floors']; sections are"),
        ({"peers": {"other": Path()}}, "--peer names ['other']; known are breakable, sglang"),
        ({"peers": {"sglang": Path("/nowhere")}}, "unpack the wheel of sglang"),
        ({"peers": {"breakable": Path("/nowhere")}}, "breakable_cuda_graphs.py is not there; unpack the wheel of"),
        ({"steps": 0}, "--steps 0: expected a positive number"),
        ({"buckets": (0, 4)}, "--buckets [0, 4]: expected positive numbers"),
    ],
)
def test_unusable_settings_are_refused(asked: dict[str, Any], text: str) -> None:
    with pytest.raises(ConfigError) as caught:
        bench.settings_of("cpu", **asked)
    assert text in str(caught.value)


def test_the_command_writes_what_it_is_told(tmp_path: Path) -> None:
    path = tmp_path / "bench.json"
    arguments = ["bench", "--device", "cpu", "--steps", "2", "--buckets", "2", "--only", "floor", "--json", str(path)]
    done = CliRunner().invoke(app, arguments)
    assert done.exit_code == 0, done.output
    assert json.loads(path.read_text())["settings"]["buckets"] == [2]
    assert "bare forward replay" in done.output


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (["--buckets", "1,x"], "--buckets 1,x: expected numbers"),
        (["--only", "nothing"], "--only names ['nothing']"),
        (["--peer", "sglang"], "--peer sglang: expected NAME=DIR"),
        (["--json", "/nowhere/bench.json"], "/nowhere is no directory"),
    ],
)
def test_unusable_options_exit_with_2(arguments: list[str], text: str) -> None:
    done = CliRunner().invoke(app, ["bench", "--device", "cpu", *arguments], env={"COLUMNS": "200"})
    assert done.exit_code == 2
    assert text in done.output


def test_one_launch_is_measured_through_the_runner(report: Report) -> None:
    floor = report.section("floor")
    assert floor is not None
    row = floor.find(ONE_DEVICE, bucket=4, padded=True)
    assert row is not None
    assert row.host_us is not None
