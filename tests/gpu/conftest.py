"""Skip the tests of this folder without a CUDA device; with GRAPHGLUE_REQUIRE_GPU=1 no skip passes."""

from __future__ import annotations

import os
from collections.abc import Generator
from pathlib import Path
from typing import Any

import pytest
import torch

HERE = Path(__file__).parent


def _is_here(item: pytest.Item) -> bool:
    return HERE in item.path.parents


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if torch.cuda.is_available():
        return
    for item in filter(_is_here, items):
        item.add_marker(pytest.mark.skip(reason="needs a CUDA device"))


def _forbid_skip(report: Any) -> None:
    """Turn a skip into a failure, so that an empty run can't look green."""
    if os.environ.get("GRAPHGLUE_REQUIRE_GPU") == "1" and report.skipped and not hasattr(report, "wasxfail"):
        report.outcome = "failed"
        report.longrepr = f"GRAPHGLUE_REQUIRE_GPU=1, but this was skipped: {report.longrepr}"


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> Generator[None, Any, Any]:
    report = yield
    if _is_here(item):
        _forbid_skip(report)
    return report


@pytest.hookimpl(wrapper=True)
def pytest_make_collect_report(collector: pytest.Collector) -> Generator[None, Any, Any]:
    report = yield
    if HERE in collector.path.parents:  # pytest.importorskip at the top of a module
        _forbid_skip(report)
    return report
