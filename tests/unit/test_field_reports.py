"""The table of tests/README.md: each kind of fault from the field has a row, and each test that a row names exists."""

from __future__ import annotations

import ast
import functools
import re
from pathlib import Path
from typing import NamedTuple

import pytest

from ..gallery import GALLERY

TESTS = Path(__file__).parents[1]
REPORTS = TESTS.parents[1] / "shared" / "cases" / "field-reports.md"
GALLERY_TESTS = {"unit/audit/test_gallery.py", "gpu/test_gallery.py"}
NOT_APPLICABLE = "not applicable:"
MAX_OPEN = 0  # rows without a test and without a reason; it may fall, never rise
MAX_NOT_APPLICABLE = 1


class Row(NamedTuple):
    """One row: a report, its tests, where they run, and a remark."""

    kind: str
    tests: tuple[str, ...]
    where: str
    note: str

    @property
    def family(self) -> str:
        return self.kind.rpartition("-")[0]


def rows_of(text: str) -> list[Row]:
    """Read the rows of all tables whose first cell is the id of a report."""
    found = []
    for line in text.splitlines():
        cells = [cell.strip() for cell in line.strip().strip("|").split(" | ")]
        if re.fullmatch(r"[A-Z0-9]+(-[A-Z0-9]+)*-\d+", cells[0]):
            kind, tests, where, note = [*cells, "", "", ""][:4]
            found.append(Row(kind, tuple(re.findall(r"`([^`]+)`", tests)), where, note))
    return found


@functools.cache
def functions(path: str) -> dict[str, str]:
    """Map the tests of a file, by their syntax, to their docstrings; none if there is no such file."""
    tree = syntax(path)
    return {
        node.name: ast.get_docstring(node) or ""
        for node in (ast.walk(tree) if tree else ())
        if isinstance(node, ast.FunctionDef) and node.name.startswith("test_")
    }


@functools.cache
def syntax(path: str) -> ast.Module | None:
    file = TESTS / path
    return ast.parse(file.read_text(encoding="utf-8")) if file.is_file() else None


@functools.cache
def strings(path: str) -> frozenset[str]:
    """Give the texts in a file, among them the ids of its parameters."""
    return frozenset(
        node.value
        for node in ast.walk(syntax(path) or ast.Module([], []))
        if isinstance(node, ast.Constant) and isinstance(node.value, str)
    )


def parts(test: str) -> tuple[str, str, str]:
    """Split "path::test_name[parameter]"."""
    path, _, name = test.partition("::")
    name, _, parameter = name.partition("[")
    return path, name, parameter.removesuffix("]")


def missing(test: str) -> str | None:
    """Say what of a test is not there; None if all is."""
    path, name, parameter = parts(test)
    if name not in functions(path):
        return f"{path} has no {name}"
    known = GALLERY.keys() if path in GALLERY_TESTS else strings(path)
    there = any(parameter == one or parameter.startswith(f"{one}-") for one in known if one)
    return f"{test} has no such parameter" if parameter and not there else None


def names_kind(test: str, row: Row) -> bool:
    """Tell whether a test names its kind: in its name, its docstring, its parameter or its specimen."""
    path, name, parameter = parts(test)
    spelled = row.family.lower().replace("-", "_")
    if path in GALLERY_TESTS and parameter:
        return row.kind in GALLERY[parameter].kinds
    in_text = re.search(rf"\b{row.kind}\b", functions(path)[name])
    return spelled in name or bool(in_text) or parameter.startswith(spelled)


def faults(rows: list[Row]) -> list[str]:
    """List what is wrong with the rows, each by itself and together."""
    found = [f"{row.kind} has two rows" for i, row in enumerate(rows) if row.kind in {one.kind for one in rows[:i]}]
    for row in rows:
        absent = [absent for test in row.tests if (absent := missing(test))]
        found += [f"{row.kind}: {one}" for one in absent]
        if not row.tests and row.note != "open" and not re.match(rf"{NOT_APPLICABLE} \w+", row.note):
            found.append(f"{row.kind} has no test: a row without one is 'open', or '{NOT_APPLICABLE}' with a reason")
        if row.tests and not absent and not any(names_kind(test, row) for test in row.tests):
            found.append(f"{row.kind}: none of its tests names it")
        if row.where != spelled_where(row.tests):
            found.append(f"{row.kind}: stands for {row.where!r}, its tests for {spelled_where(row.tests)!r}")
    return found


def spelled_where(tests: tuple[str, ...]) -> str:
    folders = {"gpu" if test.startswith("gpu/") else "cpu" for test in tests}
    return " ".join(sorted(folders)) or "-"


TABLES = (TESTS / "README.md").read_text(encoding="utf-8").split("\n### ")[1:]
CORE, OPTIONAL = map(rows_of, TABLES)
ROWS = [*CORE, *OPTIONAL]


def test_every_row_names_tests_that_exist_and_that_name_its_kind() -> None:
    assert faults(ROWS) == []


def test_rows_that_are_open_or_do_not_apply_become_no_more() -> None:
    assert sum(row.note == "open" for row in ROWS) <= MAX_OPEN
    assert sum(row.note.startswith(NOT_APPLICABLE) for row in ROWS) <= MAX_NOT_APPLICABLE


def test_every_report_has_a_row_and_those_of_the_core_come_first_and_have_tests() -> None:
    assert (len(CORE), len(OPTIONAL)) == (46, 69)
    assert all(row.tests for row in CORE)
    if REPORTS.is_file():
        reports = told(REPORTS.read_text(encoding="utf-8"))
        assert [row.kind for row in CORE] == [row.kind for row, is_core in reports if is_core]
        assert [row.kind for row in OPTIONAL] == [row.kind for row, is_core in reports if not is_core]


def told(text: str) -> list[tuple[Row, bool]]:
    """Read the reports, and which of them follow from what the library promises."""
    lines = [line for line in text.splitlines() if rows_of(line)]
    return [(rows_of(line)[0], line.rstrip(" |").endswith("core")) for line in lines]


GOOD = "| TAIL-STALE-1 | `unit/device/test_arena.py::test_tail_stale_every_dtype` | cpu | |"
SPECIMEN = "| RNG-1 | `unit/audit/test_gallery.py::test_the_right_check_names_the_right_thing[{}]` | cpu | |"


@pytest.mark.parametrize(
    ("line", "said"),
    [
        (GOOD, None),
        (GOOD.replace("every_dtype", "no_dtype"), "has no test_tail_stale_no_dtype"),
        (GOOD.replace("test_arena", "test_nowhere"), "test_nowhere.py has no"),
        (GOOD.replace("cpu", "gpu"), "stands for 'gpu'"),
        (GOOD.replace("TAIL-STALE", "ROUTE-KEY"), "none of its tests names it"),
        (f"{GOOD}\n{GOOD}", "has two rows"),
        ("| RNG-9 | - | - | |", "has no test"),
        ("| RNG-9 | - | - | not applicable: |", "has no test"),
        ("| RNG-9 | - | - | later |", "has no test"),
        ("| RNG-9 | - | - | not applicable: it draws nothing |", None),
        ("| RNG-9 | - | - | open |", None),
        (SPECIMEN.format("item"), "none of its tests names it"),
        (SPECIMEN.format("nothing"), "has no such parameter"),
    ],
)
def test_the_check_of_the_table_can_fail(line: str, said: str | None) -> None:
    found = faults(rows_of(line))
    assert found == [] if said is None else any(said in one for one in found), found
