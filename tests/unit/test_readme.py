"""What README.md prints runs, as printed; its tables are the code's; CI runs its test command, and no other."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from graphglue import PrepContract, Reason, Slot, errors
from graphglue.audit.certificate import CHECK_NAMES
from graphglue.core.routing import TABLE
from tests.unit.printed import PAGES, README, ROOT, blocks, rows


def test_the_sample_runs_as_printed() -> None:
    """A reader copies it: no name is left out, and it needs no GPU."""
    (sample,) = blocks("python")
    check = "\nassert step.outputs['next_token'].tolist() == [2 * row for row in range(13)]"
    check += "\nassert step.decision.reason is gg.Reason.PADDED and step.decision.prep is gg.Route.GLUE"
    check += "\nassert len(step.metadata['positions']) == 16 and idle.outputs['next_token'].shape == (0,)"
    check += "\nassert not large and large.reason is gg.Reason.OVER_LADDER"
    check += "\nassert [bucket.requests for bucket in runner.buckets] == [1, 2, 4, 8, 16]"
    path = os.pathsep.join(filter(None, [str(ROOT / "src"), os.environ.get("PYTHONPATH")]))
    ran = subprocess.run(
        [sys.executable, "-c", sample + check],
        capture_output=True, text=True, env={**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1"}, timeout=120,
    )  # fmt: skip
    assert ran.returncode == 0, ran.stderr


def names(cells: list[list[str]]) -> list[str]:
    """Give the names in the first cells of a table."""
    return [name for row in cells for name in re.findall(r"\w+", row[0])]


def test_the_table_of_reasons_has_those_of_the_router_in_its_order() -> None:
    """And the sentence behind it has the reasons of forwards."""
    table = names(rows(README, "reason"))
    assert table == list(dict.fromkeys(row.reason.name for row in TABLE))
    (behind,) = re.findall(r"^`forward_reason` says .*?\n\n", README, re.MULTILINE | re.DOTALL)
    assert set(re.findall(r"[A-Z]+_[A-Z_]+", behind)) == {reason.name for reason in Reason} - set(table)


def test_the_table_of_errors_has_all_of_them() -> None:
    """Each row says what to do, or that there is nothing to do."""
    raised = {name for name, kind in vars(errors).items() if isinstance(kind, type) and name != "GraphGlueError"}
    table = rows(README, "error")
    assert sorted(names(table)) == sorted(raised)
    assert {len(row) for row in table} == {3}


def test_the_table_of_contracts_has_every_field() -> None:
    assert sorted(names(rows(README, "field"))) == sorted(PrepContract.model_fields)


def test_the_table_of_slots_has_every_field() -> None:
    told = {*names(rows(README, "a slot's")), "name", "dtype", "row_dim"}  # these say what they are
    assert told == set(Slot.__dataclass_fields__)


def test_the_table_of_checks_has_every_check() -> None:
    assert tuple(names(rows(README, "check"))) == CHECK_NAMES


def test_links_lead_to_files_and_headings() -> None:
    """Those to pages are read in the repository too, where nothing builds a site."""
    links = re.findall(r"\]\(([^)#]*)(?:#([\w-]+))?\)", README)
    assert len(links) > 5
    for path, anchor in links:
        target = ROOT / path if path else ROOT / "README.md"
        if path.startswith(".ci/") and not PAGES.exists():
            continue  # a distribution without .ci
        assert target.exists(), path
        headings = [re.sub(r"[^\w -]", "", title).lower().replace(" ", "-") for title in titles(target)]
        assert not anchor or anchor in headings, (path, anchor)


def titles(page: Path) -> list[str]:
    """Give the headings of a page."""
    return re.findall(r"^#+ (.*)$", page.read_text(), re.MULTILINE)


def test_ci_runs_the_test_command_word_for_word() -> None:
    """.ci/run takes the command out of README with awk; a renamed fence would leave it with nothing."""
    script = ROOT / ".ci" / "run"
    if not script.exists():
        pytest.skip("needs .ci, which a distribution leaves out")
    (command,) = blocks("bash tests")
    (extraction,) = re.findall(r'bash -euxc "\$\((awk .*? README\.md)\)"', script.read_text())
    taken = subprocess.run(["bash", "-c", extraction], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    assert taken == command
    assert "-m pytest" in taken


@pytest.mark.parametrize("info", ["bash", "bash tests"])
def test_a_command_installs_torch_before_the_package(info: str) -> None:
    """Otherwise pip resolves torch by itself, and takes another build than the reader wants."""
    (command,) = blocks(info)
    installs = [step for step in command.strip().split(" && ") if "pip install" in step]
    assert [re.search(r"install (\S+)", step).group(1) for step in installs] == ["torch==2.13.0", "-e"]  # type: ignore[union-attr]


def test_ci_installs_the_torch_that_the_commands_install() -> None:
    """One version in three places."""
    script = ROOT / ".ci" / "run"
    if not script.exists():
        pytest.skip("needs .ci, which a distribution leaves out")
    assert set(re.findall(r"torch==([\d.]+)", README + script.read_text())) == {"2.13.0"}
