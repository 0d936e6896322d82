"""``graphglue ladder``: what it prints, what it writes, and each thing that it refuses."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("typer", reason="needs the extra: pip install 'graphglue[cli]'")
pytest.importorskip("rich", reason="needs the extra: pip install 'graphglue[cli]'")
from typer.testing import CliRunner

from graphglue.cli import app

TRACE = "TIMESTAMP,ContextTokens,GeneratedTokens\n2023-11-16 18:00:00.000,5,3\n2023-11-16 18:00:00.010,12,4\n"


@pytest.fixture(autouse=True)
def _files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "160")
    Path("h.json").write_text('{"1": 20, "3": 2, "9": 1}')
    Path("t.csv").write_text(TRACE)


def ladder(*arguments: str) -> Any:
    """Run ``graphglue ladder``."""
    return CliRunner().invoke(app, ["ladder", *arguments])


def test_a_histogram_gives_its_ladder_beside_others() -> None:
    ran = ladder("--histogram", "h.json", "--buckets", "2")
    assert ran.exit_code == 0, ran.output
    for text in ("23 with 35 real rows", "ladder    [1, 9]", "fitted", "doubling", "every 8", "bounded, waste "):
        assert text in ran.output, text
    (fitted,) = [line for line in ran.output.splitlines() if "fitted" in line]
    assert [cell.strip() for cell in fitted.strip("│ ").split("│")] == [
        "fitted", "2", "12", "25.53%", "34.29%", "200.0%", "8.7%"
    ]  # fmt: skip
    assert "cost" not in ran.output


def test_a_cost_has_a_column_and_its_say() -> None:
    ran = ladder("--histogram", "h.json", "--buckets", "3", "--cost-per-bucket", "1000")
    assert "ladder    [9]" in ran.output
    assert "cost" in ran.output
    assert "1,172" in ran.output


def test_the_json_has_everything() -> None:
    ran = ladder("--trace", "t.csv", "--multiple", "4", "--max-size", "8", "--every", "2", "--json", "out.json")
    assert ran.exit_code == 0, ran.output
    report = json.loads(Path("out.json").read_text())
    assert report["histogram"] == {"1": 3, "2": 1}
    assert [one["name"] for one in report["ladders"]][:3] == ["fitted", "doubling", "every 2"]
    assert report["ladders"][0]["sizes"] == [4, 8]
    assert report["least_rows"][0] == 27


@pytest.mark.parametrize(
    ("arguments", "sizes"),
    [
        (["--max-running", "9"], "[1, 2, 9]"),
        (["--max-running", "9", "--multiple", "4"], "[4, 12]"),
        (["--max-running", "9", "--max-size", "7"], "[1, 2, 7]"),
        (["--tokens"], "[5, 12, 2048]"),
        (["--tokens", "--max-tokens", "8"], "[4, 5, 8]"),
    ],
)
def test_what_an_engine_is_set_to_at_most_is_a_size(arguments: list[str], sizes: str) -> None:
    ran = ladder("--trace", "t.csv", *arguments)
    assert f"ladder    {sizes}" in ran.output


def test_a_picture_is_written() -> None:
    pytest.importorskip("matplotlib", reason="the plot needs matplotlib, of the extra bench")
    ran = ladder("--histogram", "h.json", "--plot", "out.png")
    assert ran.exit_code == 0, ran.output
    assert Path("out.png").read_bytes().startswith(b"\x89PNG")


H, T = ("--histogram", "h.json"), ("--trace", "t.csv")


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ((), "expected --trace FILE or --histogram FILE, and one of them only"),
        ((*H, *T), "expected --trace FILE or --histogram FILE, and one of them only"),
        ((*H, "--tokens"), "--tokens says how to count a --trace; a histogram is counted"),
        ((*H, "--max-tokens", "9"), "--max-tokens says how to count a --trace"),
        ((*H, "--step-ms", "9"), "--step-ms says how to count a --trace"),
        ((*H, "--max-running", "9"), "--max-running says how to count a --trace"),
        ((*T, "--max-tokens", "9"), "--max-tokens is for the chunks of prompts; add --tokens"),
        ((*T, "--tokens", "--step-ms", "9"), "--step-ms is for decode steps; leave it or --tokens out"),
        ((*T, "--tokens", "--max-running", "9"), "--max-running is for decode steps"),
        ((*T, "--step-ms", "0"), "step_ms=0.0: expected a number of milliseconds above 0"),
        (("--histogram", "no.json"), "histogram no.json can not be read as a text file"),
        (("--histogram", "t.csv"), "histogram t.csv is no JSON"),
        (("--trace", "no.csv"), "trace no.csv can not be read as a CSV text file"),
        (("--trace", "h.json"), "trace h.json line 1: no column TIMESTAMP"),
        ((*H, "--max-size", "8"), "max_size=8: the histogram has a count that takes 9"),
        ((*H, "--max-size", "42", "--multiple", "8"), "max_size=42: expected a multiple of 8, such as 48"),
        ((*H, "--cost-per-bucket", "-1"), "cost_per_bucket=-1.0: expected a number of padded rows from 0 up"),
        ((*H, "--max-size", "2000000000"), "every=8 up to 2000000000: expected at least 30518"),
        ((*H, "--plot", "out.txt"), "--plot out.txt: expected a name that ends in .png, .svg, .pdf"),
        ((*T, "--step-ms", "1e-308"), "step_ms=1e-308: too many such steps"),
        ((*H, "--json", "/dev/full"), "a file can not be written: [Errno 28]"),
    ],
)
def test_what_can_not_be_used_exits_with_2_and_says_why(arguments: tuple[str, ...], said: str) -> None:
    ran = ladder(*arguments)
    assert ran.exit_code == 2, ran.output
    assert f"graphglue ladder: {said}" in ran.output


def test_a_picture_without_matplotlib_exits_with_2(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    ran = ladder("--histogram", "h.json", "--json", "out.json", "--plot", "out.png")
    assert ran.exit_code == 2
    assert '--plot needs matplotlib: pip install "graphglue[bench]"' in ran.output
    assert not Path("out.json").exists()


@pytest.mark.parametrize("option", ["--json", "--plot"])
def test_a_folder_that_is_not_there_is_refused(option: str) -> None:
    ran = ladder("--histogram", "h.json", option, str(Path("nowhere") / "out.png"))
    assert ran.exit_code == 2
    assert "is no directory" in ran.output
    assert option in ran.output


@pytest.mark.parametrize(
    "option", ["--buckets", "--multiple", "--max-size", "--every", "--max-tokens", "--max-running"]
)
def test_a_number_below_1_is_refused(option: str) -> None:
    ran = ladder("--histogram", "h.json", option, "0")
    assert ran.exit_code == 2
    assert option in ran.output
