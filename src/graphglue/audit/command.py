"""What the command line calls: find the factory, audit its runner, show the certificate."""

from __future__ import annotations

import importlib
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from graphglue.audit.certificate import Certificate, Check, Verdict
from graphglue.audit.run import Level, run_checks
from graphglue.errors import ConfigError

_WIDTH = 160  # of a table that goes to a file
_STYLES = {Verdict.PASS: "green", Verdict.FAIL: "bold red", Verdict.UNKNOWN: "yellow"}


def run(target: str, level: Level, json: Path | None) -> Certificate:
    """Audit the runner that ``MODULE:FACTORY`` makes, in this process, and close it.

    Raises:
        ConfigError: the factory can not be found or called, or makes no runner.
    """
    runner, perturb = made(target)
    try:
        certificate = run_checks(runner, level, perturb=perturb, poisoning=True)
    finally:
        if hasattr(runner, "close"):
            runner.close()
    if json is not None:
        certificate.write(json)
    return certificate


def made(target: str) -> tuple[Any, Callable[[], Any] | None]:
    """Call the factory at ``MODULE:FACTORY``; it returns a runner, or a runner and a ``perturb`` callable.

    Raises:
        ConfigError: no such module or attribute, or the factory raised.
    """
    factory = _found(target)
    try:
        result = factory()
    except (Exception, SystemExit) as error:  # an exit would end this command as if the audit had passed
        raise ConfigError(f"{target} raised {type(error).__name__}: {error}") from error
    if isinstance(result, tuple):
        if len(result) != 2:
            raise ConfigError(f"{target} returned {len(result)} values; expected a Runner, or (Runner, perturb)")
        return result
    return result, None


def show(certificate: Certificate) -> None:
    """Print the checks with their evidence, as wide as the terminal; wide where they go to a file."""
    sized = sys.stdout.isatty() or "COLUMNS" in os.environ
    console = Console(width=None if sized else _WIDTH)
    table = Table("prep", "check", "verdict", "evidence", show_lines=True)
    table.add_column("s", justify="right")
    for check in certificate.checks:
        verdict = Text(check.verdict.value, _STYLES[check.verdict])
        table.add_row(check.prep, check.name, verdict, _evidence(check), f"{check.seconds:.2f}")
    console.print(table)
    conditions = ", ".join(f"{what} {version}" for what, version in certificate.versions.items())
    console.print(f"on {certificate.device}, {conditions}", highlight=False, markup=False)
    counts = [f"{_count(certificate, verdict)} {verdict.value}" for verdict in Verdict]
    style, word = ("bold green", "passed") if certificate.passed else ("bold red", "not passed")
    console.print(Text(f"{word}: {', '.join(counts)}", style))


def _found(target: str) -> Callable[[], Any]:
    module, colon, path = target.partition(":")
    if not (module and colon and path):
        raise ConfigError(f"{target!r}: expected MODULE:FACTORY, such as my_engine.audits:make_runner")
    if os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())  # the console script starts without it, python -m with it
    try:
        found: Any = importlib.import_module(module)
        for name in path.split("."):
            found = getattr(found, name)
    except AttributeError as error:
        raise ConfigError(f"{target!r}: {error}; name a callable without arguments") from error
    except (Exception, SystemExit) as error:
        raise ConfigError(f"module {module!r} can not be imported: {type(error).__name__}: {error}") from error
    if not callable(found):
        raise ConfigError(f"{target!r} is a {type(found).__name__}; expected a callable without arguments")
    return found


def _evidence(check: Check) -> Text:
    return Text("\n".join(str(finding) for finding in check.evidence), overflow="fold")


def _count(certificate: Certificate, verdict: Verdict) -> int:
    return sum(check.verdict is verdict for check in certificate.checks)
