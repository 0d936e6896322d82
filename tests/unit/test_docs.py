"""The pages of .ci/docs: they build without a warning, have every public name, and what they print runs."""

from __future__ import annotations

import doctest
import importlib
import importlib.util
import json
import os
import re
import shutil
import subprocess
import sys
import zlib
from collections.abc import Iterable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from torch import distributed

from graphglue import Batch, Route
from graphglue.exporter import FAMILIES
from graphglue.preps import register_shipped
from graphglue.registry import Registry
from tests.unit.printed import PAGES, PRINTED, README, ROOT, blocks, commands, rows

if not PAGES.exists():
    pytest.skip("needs .ci, which a distribution leaves out", allow_module_level=True)
needs_mkdocs = pytest.mark.skipif(
    importlib.util.find_spec("mkdocs") is None, reason="needs the extra, on Python 3.11: pip install 'graphglue[docs]'"
)
# ``graphglue.graphs.segments`` has an __all__ for its siblings; what users need of it is in graphglue's own.
INTERNAL = {"graphglue.graphs.segments"}


def load_links() -> ModuleType:
    """Load the hook of the site, which lists the public modules."""
    spec = importlib.util.spec_from_file_location("graphglue_docs_links", PAGES.parent / "links.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


LINKS = load_links()


def build(root: Path, site: Path) -> subprocess.CompletedProcess[str]:
    """Build the site of a checkout, strictly: a warning is an error."""
    environment = {**os.environ, "NO_MKDOCS_2_WARNING": "1", "NO_COLOR": "1"}
    command = ["-m", "mkdocs", "build", "--strict", "-f", str(root / ".ci" / "docs" / "mkdocs.yml"), "-d", str(site)]
    ran = [sys.executable, *command]
    return subprocess.run(ran, cwd=root, capture_output=True, text=True, env=environment, timeout=300, check=False)


def documented(site: Path) -> set[str]:
    """Read the inventory: every object that has an entry on some page."""
    listed = (site / "objects.inv").read_bytes().split(b"\n", 4)[4]
    return {line.split(" ")[0] for line in zlib.decompress(listed).decode().splitlines()}


def absent(exported: Iterable[str], site: Path) -> list[str]:
    """List public names without an entry."""
    return sorted(set(exported) - documented(site))


@needs_mkdocs
def test_the_site_builds_without_a_warning_and_has_every_public_name(tmp_path: Path) -> None:
    built = build(ROOT, tmp_path)
    assert built.returncode == 0, built.stderr
    assert "WARNING" not in built.stderr
    exported = [f"{module}.{name}" for module in LINKS.MODULES for name in LINKS.exported(module)]
    assert len(exported) > 100
    assert absent(exported, tmp_path) == []
    assert absent([*exported, "graphglue.Nothing"], tmp_path) == ["graphglue.Nothing"]
    errors = (tmp_path / "errors.html").read_text()
    assert 'href="slots.html#graphglue.Slot"' in (tmp_path / "adoption.html").read_text()  # `Slot` in a page's text
    assert 'id="graphglue.BindError"' in errors


FAULTS = {
    "a page names what a class does not have": (
        ".ci/docs/pages/errors.md", "# Errors\n", "# Errors\n\nSee `Runner.replays`.\n", "'graphglue.Runner.replays'",
    ),
    "a link leads to no page": (
        ".ci/docs/pages/errors.md", "# Errors\n", "# Errors\n\n[nothing](nothing.md)\n", "'nothing.md'",
    ),
    "a docstring describes a parameter that is not there": (
        "src/graphglue/budget.py", "        stats: what", "        stat: what", "Parameter 'stat' does not appear",
    ),
    "a parameter has no annotation": (
        "src/graphglue/budget.py", "budget_bytes: int) -> BudgetPlan", "budget_bytes) -> BudgetPlan",
        "No type or annotation for parameter 'budget_bytes'",
    ),
}  # fmt: skip


@needs_mkdocs
def test_each_fault_fails_the_build(tmp_path: Path) -> None:
    """In a copy with few pages, so that it is quick: all at once, and each is named."""
    shutil.copytree(ROOT / "src", tmp_path / "src", ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copytree(PAGES.parent, tmp_path / ".ci" / "docs", ignore=shutil.ignore_patterns("__pycache__"))
    pages = tmp_path / ".ci" / "docs" / "pages"
    for page in set(pages.iterdir()) - {pages / "errors.md", pages / "runner.md"}:
        page.unlink()
    (pages / "budget.md").write_text("::: graphglue.budget.plan_budget\n")
    config = pages.parent / "mkdocs.yml"
    config.write_text(re.sub(r"^nav:\n(  .*\n)+", "", config.read_text(), flags=re.MULTILINE))
    for path, right, wrong, _ in FAULTS.values():
        spoil(tmp_path / path, right, wrong)
    built = build(tmp_path, tmp_path / "site")
    assert built.returncode != 0
    assert [said for *_, said in FAULTS.values() if said not in built.stderr] == []


def spoil(path: Path, right: str, wrong: str) -> None:
    """Put a fault into a file."""
    text = path.read_text()
    assert right in text, (path, right)
    path.write_text(text.replace(right, wrong, 1))


def test_every_module_with_an_all_is_on_a_page_or_internal() -> None:
    stating = set()
    for path in (ROOT / "src").rglob("*.py"):
        if re.search(r"^__all__ = ", path.read_text(), re.MULTILINE):
            parts = path.relative_to(ROOT / "src").with_suffix("").parts
            stating.add(".".join(parts[:-1] if parts[-1] == "__init__" else parts))
    assert stating - INTERNAL == set(LINKS.MODULES)


def public() -> list[tuple[str, Any]]:
    """List public classes and functions with their public methods."""
    found = []
    for module in LINKS.MODULES:
        held = importlib.import_module(module)
        for name in LINKS.exported(module):
            thing = getattr(held, name)
            if isinstance(thing, type):
                members = {key: value for base in thing.__mro__ for key, value in vars(base).items()}
                found += [(f"{module}.{name}.{key}", value) for key, value in members.items() if is_own(key, value)]
            if callable(thing):
                found.append((f"{module}.{name}", thing))
    return found


def is_own(name: str, member: Any) -> bool:
    """Tell whether a member is a public function or property that graphglue wrote."""
    function = member.fget if isinstance(member, property) else getattr(member, "__func__", member)
    written = str(getattr(function, "__module__", "")).startswith("graphglue") and hasattr(function, "__code__")
    return not name.startswith("_") and written and function.__code__.co_filename.startswith(str(ROOT))


def test_every_public_class_function_method_and_property_says_what_it_is_for() -> None:
    things = public()
    assert len(things) > 200
    assert [name for name, thing in things if not (thing.__doc__ or "").strip()] == []


def test_the_examples_of_docstrings_run() -> None:
    run = 0
    for path in (ROOT / "src").rglob("*.py"):
        if ">>> " in path.read_text():
            module = ".".join(path.relative_to(ROOT / "src").with_suffix("").parts)
            result = doctest.testmod(importlib.import_module(module))
            assert result.failed == 0
            run += result.attempted
    assert run >= 8


@pytest.mark.parametrize("name", [name for name, text in PRINTED.items() if blocks("python", text)])
def test_what_a_page_prints_runs(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A page that goes on from the README's example begins with it."""
    monkeypatch.chdir(tmp_path)
    text = PRINTED[name]
    (sample,) = blocks("python")
    goes_on = "README" in text.partition("```")[0]
    program = "\n".join([sample if goes_on else "import torch, graphglue as gg", *blocks("python", text)])
    names: dict[str, Any] = {"__name__": "printed"}
    try:
        exec(compile(program, name, "exec"), names)
    finally:
        if distributed.is_initialized():
            distributed.destroy_process_group()
    if name == "segments.md":
        assert names["step"].outputs[:, 0].tolist() == [4 + 2 * sum(range(5)), 12 + 2 * sum(range(5, 13))]
        assert names["step"].decision.forward is Route.GRAPH
        assert names["step"].decision.bucket.tokens == 16
    if name == "operations.md":
        assert json.loads((tmp_path / "rank0.json").read_text())["steps"] == 1


def test_no_page_prints_python_that_nobody_runs() -> None:
    assert {fence for text in PRINTED.values() for fence in re.findall(r"^```(.+)$", text, re.M)} == {"python", "sh"}
    assert set(re.findall(r"^```(.+)$", README, re.M)) == {"python", "sh", "bash", "bash tests"}


def test_printed_commands_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In a folder that has the files they name."""
    pytest.importorskip("typer", reason="needs the extra: pip install 'graphglue[cli]'")
    pytest.importorskip("matplotlib", reason="needs the extra: pip install 'graphglue[bench]'")
    from typer.testing import CliRunner

    from graphglue.cli import app

    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    lay_out(tmp_path)
    printed = {tuple(one) for text in (README, *PRINTED.values()) for one in commands(text)}
    assert {one[0] for one in printed} == {"audit", "ladder", "report", "diff", "rerun", "doctor"}
    for arguments in sorted(printed):
        ran = CliRunner().invoke(app, list(arguments))
        assert ran.exit_code == 0, (arguments, ran.output)
    written = {path.name for path in tmp_path.iterdir()}
    assert written >= {"certificate.json", "ladders.png", "report.html", "report.png"}


def lay_out(folder: Path) -> None:
    """Write the files that printed commands read; the runner behind them is the README's."""
    (sample,) = blocks("python")
    (folder / "my_engine").mkdir()
    setup = (
        "slots=slots, ladder=[2], registry=registry, prep='my-attention', tables={'req_to_token': table}, forward=model"
    )
    (folder / "my_engine" / "audits.py").write_text(f"{sample}\ndef make_runner():\n    return gg.Runner({setup})\n")
    names: dict[str, Any] = {}
    config = "config=gg.RunnerConfig(flight_recorder=4, record_sources=True)"
    exec(compile(f"{sample}\nrunner = gg.Runner({setup}, {config})\n", "README.md", "exec"), names)
    with names["runner"] as runner:
        runner.capture(progress=False)
        runner.replay(Batch(1, {"seq_lens": [7], "req_pool_indices": [3], "input_ids": [5]}))
        for rank in (0, 1):
            (folder / f"rank{rank}.json").write_text(json.dumps(runner.stats()))
            runner.flight_record().write(folder / f"flight{rank}.json")
    (folder / "sizes.json").write_text('{"1": 20, "7": 3}')
    arrivals = [f"2023-11-16 18:17:0{second}.0,{9 + second},4" for second in range(9)]
    (folder / "arrivals.csv").write_text("\n".join(["TIMESTAMP,ContextTokens,GeneratedTokens", *arrivals]))


def test_the_table_of_shipped_preps_has_all_of_them() -> None:
    registry = Registry()
    register_shipped(registry)
    table = rows(PRINTED["contracts.md"], "shipped prep")
    assert sorted(row[0].strip("`") for row in table) == sorted(registry)
    for name, modes, reads, tables, gives in table:
        contract = registry.get(name.strip("`")).contract
        assert contract is not None
        seen = [sorted(re.findall(r"[\w-]+", cell)) for cell in (modes, reads, tables, gives)]
        said = [sorted(mode.name for mode in contract.modes), sorted(contract.reads)]
        assert seen == [*said, sorted(contract.tables), sorted(contract.outputs)], name


def test_the_table_of_metrics_has_all_of_them() -> None:
    table = rows(PRINTED["operations.md"], "metric")
    suffix = {family.name: "_total" if "Counter" in family.kind.__name__ else "" for family in FAMILIES}
    assert [row[0].strip("`") for row in table] == [name + end for name, end in suffix.items()]
    assert [row[1].strip("`").replace("`", "") for row in table] == [", ".join(family.labels) for family in FAMILIES]
