"""Import rules: arrows point down only, the device sits in one place, and importing initialises nothing.

The arrows are those of design.md section 4, kept by import-linter's contract in pyproject.toml where it is
installed. What reaches a GPU is found in the syntax tree, so that a name in a comment is no fault.
"""

from __future__ import annotations

import ast
import os
import re
import subprocess
import sys
import textwrap
from collections.abc import Iterator
from importlib import util
from pathlib import Path

import pytest

import graphglue

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib  # pytest needs it as well

ROOT = Path(__file__).parents[2]
PACKAGE = ROOT / "src" / "graphglue"
MODULES = sorted(PACKAGE.rglob("*.py"))

# The only places that may name torch.cuda, torch._C._cuda* or the package cuda.
DEVICE_PLACES = ("device/", "graphs/cuda")


def layers() -> list[set[str]]:
    """Read the layers of import-linter's contract, the highest first, as sets of "core", "runner", ...."""
    text = (ROOT / "pyproject.toml").read_text()
    (contract,) = [one for one in tomllib.loads(text)["tool"]["importlinter"]["contracts"] if one["type"] == "layers"]
    return [
        {part.strip().strip("()").removeprefix("graphglue.") for part in re.split(r"[|:]", layer)}
        for layer in contract["layers"]
    ]


LAYERS = layers()


def relative(path: Path) -> str:
    return path.relative_to(PACKAGE).as_posix()


def dotted(node: ast.AST) -> str:
    """Spell an attribute chain, or give "" for anything else."""
    if isinstance(node, ast.Name):
        return node.id
    if isinstance(node, ast.Attribute):
        base = dotted(node.value)
        return f"{base}.{node.attr}" if base else ""
    return ""


def device_names(tree: ast.AST) -> Iterator[tuple[int, str]]:
    """Find every mention of a CUDA namespace."""
    for node in ast.walk(tree):
        found: list[str] = []
        if isinstance(node, ast.Import):
            found = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            found = [f"{node.module}.{alias.name}" for alias in node.names]
        elif isinstance(node, ast.Attribute):
            found = [dotted(node)]
        elif isinstance(node, ast.Call) and dotted(node.func) in (
            "importlib.import_module",
            "import_module",
            "__import__",
        ):
            found = [str(arg.value) for arg in node.args[:1] if isinstance(arg, ast.Constant)]
        for name in found:
            if is_device_name(name):
                yield node.lineno, name


def is_device_name(name: str) -> bool:
    parts = name.split(".")
    if parts[0] == "cuda":
        return True
    if parts[0] != "torch":
        return False
    return parts[1:2] == ["cuda"] or any(part.startswith("_cuda") for part in parts)


@pytest.mark.parametrize("path", MODULES, ids=relative)
def test_only_the_device_s_places_name_cuda(path: Path) -> None:
    found = list(device_names(ast.parse(path.read_text())))
    if relative(path).startswith(DEVICE_PLACES):
        return
    assert not found, f"{relative(path)} names {found}; only {DEVICE_PLACES} may"


def test_the_device_s_places_are_not_empty() -> None:
    named = {relative(path) for path in MODULES if list(device_names(ast.parse(path.read_text())))}
    assert "graphs/cuda.py" in named
    assert any(path.startswith("device/") for path in named)


@pytest.mark.parametrize(
    "code",
    [
        "import cuda",
        "import cuda.bindings.driver as d",
        "from cuda.bindings import nvrtc",
        "from cuda import core",
        "import torch.cuda",
        "from torch import cuda",
        "from torch.cuda import Stream",
        "x = torch.cuda.Stream()",
        "def f(s: torch.cuda.Stream): ...",
        "torch._C._cuda_getCurrentRawStream(0)",
        "from torch._C import _cuda_endAllocateToPool",
        "def f():\n    if x:\n        import cuda.core",
        "importlib.import_module('cuda.bindings')",
    ],
)
def test_the_rule_sees_every_spelling(code: str) -> None:
    assert list(device_names(ast.parse(code)))


@pytest.mark.parametrize(
    "code",
    [
        "device.type == 'cuda'",
        "tensor.is_cuda",
        "import cudapackage",
        "x.cuda_graph",
        "torch.version.cuda",
        "from . import cuda",
        "# torch.cuda",
    ],
)
def test_the_rule_sees_nothing_else(code: str) -> None:
    assert not list(device_names(ast.parse(code)))


def inner_imports(path: Path) -> Iterator[tuple[int, str]]:
    """List what a module imports from graphglue at run time, as "core", "runner", ...."""
    tree = ast.parse(path.read_text())
    for_types = {
        id(inner)
        for node in ast.walk(tree)
        if isinstance(node, ast.If) and dotted(node.test) in ("TYPE_CHECKING", "typing.TYPE_CHECKING")
        for inner in ast.walk(node)
    }
    for node in ast.walk(tree):
        if id(node) in for_types:
            continue
        names: list[str] = []
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.module:
            names = [
                f"{node.module}.{alias.name}" if node.module == "graphglue" else node.module for alias in node.names
            ]
        for name in names:
            parts = name.split(".")
            if parts[0] == "graphglue":
                yield node.lineno, parts[1] if len(parts) > 1 else ""


def level_of(part: str) -> int | None:
    return next((level for level, parts in enumerate(LAYERS) if part in parts), None)


def top_of(path: Path) -> str:
    return relative(path).split("/")[0].removesuffix(".py")


CHECKED = [path for path in MODULES if top_of(path) not in ("__init__", "__main__")]


@pytest.mark.parametrize("path", CHECKED, ids=relative)
def test_arrows_point_down_only(path: Path) -> None:
    part = top_of(path)
    level = level_of(part)
    assert level is not None, f"graphglue.{part} stands in no layer of pyproject.toml's contract; add it"
    for line, imported in inner_imports(path):
        target = level_of(imported)
        assert imported == part or target is None or target >= level, (
            f"{relative(path)}:{line} imports graphglue.{imported}, which stands above it"
        )


def test_the_lower_layers_are_those_of_the_design() -> None:
    order = [level_of(part) for part in ("cli", "runner", "cache", "graphs", "registry", "core", "errors")]
    assert None not in order
    assert order == sorted(order)  # type: ignore[type-var]
    assert len(set(order)) == len(order)


@pytest.mark.parametrize("path", MODULES, ids=relative)
def test_every_folder_is_a_package(path: Path) -> None:
    assert (path.parent / "__init__.py").is_file()


def test_nothing_below_the_demo_imports_the_package_itself() -> None:
    """``import graphglue as gg`` inside the package makes a cycle; the demo is a user and may."""
    for path in MODULES:
        if relative(path).split("/")[0] in ("demo", "testing", "bench", "cli.py"):
            continue
        assert "" not in [imported for _, imported in inner_imports(path)], relative(path)


@pytest.mark.skipif(util.find_spec("importlinter") is None, reason="needs import-linter, of the extra dev")
def test_import_linter_s_contract_is_kept() -> None:
    code = "from importlinter.cli import lint_imports_command as lint; lint()"
    done = subprocess.run(
        [sys.executable, "-c", code, "--no-cache"],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT / "src")},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "0 broken" in done.stdout


def run_fresh(code: str) -> str:
    """Run code in a new process, and give what it printed."""
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code)],
        env={**os.environ, "PYTHONPATH": str(ROOT / "src")},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def test_importing_initialises_no_device_and_loads_no_extra() -> None:
    loaded = run_fresh(
        """
        import sys
        import torch
        before = set(sys.modules)
        import graphglue
        assert not torch.cuda.is_initialized()
        new = {name.split(".")[0] for name in set(sys.modules) - before}
        print(sorted(new & {"cuda", "typer", "rich", "click", "hypothesis", "pytest"}))
        """
    )
    assert loaded == "[]"


def test_a_cpu_runner_loads_no_cuda_package() -> None:
    loaded = run_fresh(
        """
        import sys
        import torch
        before = set(sys.modules)  # torch itself looks for the cuda package where it is installed
        import graphglue as gg
        slots, config = [gg.Slot("x", "request", torch.int64, 0)], gg.RunnerConfig(generic_glue=True)
        runner = gg.Runner(slots=slots, ladder=[2], prep=lambda view: {"m": view.x + 1}, config=config)
        runner.capture()
        assert runner.replay(gg.Batch(2, {"x": [1, 2]})).metadata["m"].tolist() == [2, 3]
        assert not torch.cuda.is_initialized()
        print(sorted(name for name in set(sys.modules) - before if name.split(".")[0] == "cuda"))
        """
    )
    assert loaded == "[]"


def test_the_package_works_where_the_cuda_package_is_absent() -> None:
    assert (
        run_fresh(
            """
        import sys
        sys.modules["cuda"] = None
        import torch
        import graphglue as gg
        arena = gg.Arena([gg.Slot("x", "request", torch.int64, 7)], [2])
        print(arena.fill(gg.Batch(1, {"x": [1]})).x.tolist())
        """
        )
        == "[1, 7]"
    )


def test_all_is_sorted_and_complete() -> None:
    public = graphglue.__all__
    # isort's order: constants, then classes, then the rest, as ruff's RUF022 keeps it.
    assert public == sorted(public, key=lambda name: (0 if name.isupper() else 1 if name[0].isupper() else 2, name))
    assert len(set(public)) == len(public)
    assert all(hasattr(graphglue, name) for name in public)
    defined = {
        alias.asname or alias.name
        for node in ast.parse((PACKAGE / "__init__.py").read_text()).body
        if isinstance(node, ast.ImportFrom)
        for alias in node.names
    } | {
        target.id
        for node in ast.parse((PACKAGE / "__init__.py").read_text()).body
        if isinstance(node, ast.Assign)
        for target in node.targets
        if isinstance(target, ast.Name)
    }
    assert {name for name in defined if not name.startswith("_")} == set(public) - {"__version__"}


def test_the_names_of_the_design_are_public() -> None:
    design = {
        "Arena", "Batch", "Bucket", "CaptureHooks", "Decision", "GlueGraphCache", "Ladder", "Mode", "PrepContract",
        "Reason", "Registry", "Route", "Runner", "RunnerConfig", "Slot", "Step", "REPEAT_LAST", "RAW_REQUESTS",
        "RAW_TOKENS", "BUCKET_REQUESTS", "BUCKET_TOKENS", "RANK_COUNTS", "GraphGlueError", "ContractError", "BindError",
        "CapacityError", "CaptureError", "StaleTableError", "DivergenceError", "RankDisagreementError", "ClosedError",
        "ConfigError",
    }  # fmt: skip
    assert design <= set(graphglue.__all__)


def test_types_are_shipped() -> None:
    assert (PACKAGE / "py.typed").is_file()


@pytest.mark.parametrize("path", MODULES, ids=relative)
def test_no_module_is_named_for_nothing(path: Path) -> None:
    """design.md section 10, 11."""
    parts = relative(path).removesuffix(".py").split("/")
    assert not {"utils", "util", "helper", "helpers", "manager", "wrapper", "info", "data", "common", "misc"} & set(
        parts
    )
