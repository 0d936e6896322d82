"""The figures: what is counted, and that a prep that ends its process costs no other one its turn."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from ...gallery import GALLERY, figures, specimens

ROUND = {"seen_here": True, "failed": {"trace": "..."}, "missed": None}
QUIET: dict[str, Any] = {"failed": {}, "verdicts": {"trace": "pass", "pointers": "unknown"}}


def test_what_was_missed_and_what_was_a_false_alarm_is_counted() -> None:
    done = [
        (["gallery", "item", "faulty"], {**ROUND, "check": "trace"}),
        (["gallery", "to_list", "faulty"], {**ROUND, "missed": "trace says pass"}),
        (["gallery", "to_cpu", "faulty"], {"ended": "the process ended with -6", "failed": {}}),
        (["gallery", "clock", "faulty"], {**ROUND, "seen_here": False}),
        (["gallery", "item", "twin"], QUIET),
        (["gallery", "to_list", "twin"], {"failed": {"poison": "..."}}),
        (["gallery", "to_cpu", "twin"], {"raised": "ValueError: no", "failed": {}}),
        (["generated", "0"], QUIET),
        (["generated", "1"], {"failed": {"pad_image": "..."}}),
    ]
    count = figures.counted(done, "cpu")
    assert count["gallery"]["caught"] == {"trace": "1/3"}
    assert count["gallery"]["missed"] == {"to_list": "trace says pass", "to_cpu": "the process ended with -6"}
    assert set(count["gallery"]["false_alarms"]) == {"to_list", "to_cpu"}
    assert count["generated"]["num_false_alarms"] == 1
    assert count["generated"]["verdicts"] == {"trace": {"pass": 1}, "pointers": {"unknown": 1}}


def test_mutants_are_counted_by_who_caught_them() -> None:
    name = next(iter(figures.mutants.MUTANTS))
    outcomes = [
        {"family": "fault", "failed": {"trace": "."}, "agrees": True, "equivalent": None},
        {"family": "fault", "failed": {}, "agrees": True, "equivalent": None},
        {"family": "edit", "failed": {}, "agrees": False, "equivalent": None},
        {"family": "edit", "failed": {}, "agrees": True, "equivalent": "why"},
    ]
    count = figures.counted([(["mutants", name], outcome) for outcome in outcomes], "cpu")["mutants"]
    assert count["fault"] == {"total": 2, "caught by the audit": 1}
    assert count["edit"] == {"total": 2, "caught by the reference": 1, "equivalent": 1}
    assert count["survived"] == [name]


def test_every_specimen_has_its_two_jobs() -> None:
    jobs = figures.jobs_of(["gallery"], "cpu", range(0))
    assert len(jobs) == 2 * len(list(specimens("cpu"))) < 2 * len(GALLERY)
    assert figures.jobs_of(["generated"], "cpu", range(5, 8)) == [["generated", str(seed)] for seed in (5, 6, 7)]


def test_an_audit_that_raises_is_an_outcome() -> None:
    assert figures.perform(["gallery", "no such prep", "twin"], "cpu")["raised"].startswith("KeyError")


def test_a_job_that_ends_its_worker_costs_no_other_its_turn(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    script = tmp_path / "worker.py"
    script.write_text(
        "import json, os, sys\n"
        "for job in json.load(sys.stdin):\n"
        "    if job[1] == 'ends': os._exit(9)\n"
        "    print(json.dumps({'failed': {}, 'of': job[1]}), flush=True)\n"
        "    if job[1] == 'breaks': sys.exit(0)\n"
    )
    monkeypatch.setattr(figures, "__file__", str(script))
    jobs = [["shipped", name] for name in ("one", "ends", "two", "breaks", "three")]
    outcomes = {job[1]: outcome for job, outcome in figures.in_workers(jobs, "cuda")}
    assert outcomes["ends"] == {"ended": "the process ended with 9", "failed": {}}
    assert {name: outcome.get("of") for name, outcome in outcomes.items() if name != "ends"} == {
        name: name for name in ("one", "two", "breaks", "three")
    }


def test_workers_that_never_start_are_not_tried_for_ever(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    script = tmp_path / "worker.py"
    script.write_text("raise SystemExit(1)\n")
    monkeypatch.setattr(figures, "__file__", str(script))
    with pytest.raises(RuntimeError, match="4 workers in a row did nothing, the last one at"):
        list(figures.in_workers([["shipped", str(number)] for number in range(9)], "cuda"))


def test_the_script_runs_as_printed_and_writes_what_it_prints(tmp_path: Path) -> None:
    written = tmp_path / "figures.json"
    command = [
        sys.executable,
        figures.__file__,
        "--only",
        "shipped",
        "generated",
        "--generated",
        "1",
        "--json",
        written,
    ]
    done = subprocess.run([str(part) for part in command], capture_output=True, text=True, check=True)
    assert json.loads(done.stdout) == json.loads(written.read_text())
    assert json.loads(done.stdout)["generated"]["num_false_alarms"] == 0
