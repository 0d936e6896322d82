"""The conformance suite: what a backend's author runs on his own prep in three lines."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from graphglue.audit import Verdict
from graphglue.audit.certificate import CHECK_NAMES
from graphglue.testing import parts
from graphglue.testing.backend import Backend, Batches, MakeBackend
from graphglue.testing.strategies import runner_batches

PARTS = (*CHECK_NAMES, *parts.PARTS)


def conformance(
    make_backend: MakeBackend,
    *,
    perturb: Callable[[], Any] | None = None,
    batches: Batches = runner_batches,
    max_examples: int | None = None,
) -> Callable[[str], None]:
    """Make a pytest test of a backend, with one case for each audit check and each part of the suite.

    Assign it to a name that begins with ``test``, such as ``test = conformance(make_backend)``.

    The audit's checks come first (trace, same_ops, poison, double_capture, pad_image, pointers), and a case
    that this device or these arguments can not show is skipped with the reason. Then the backend's own runner
    is driven: capture, padded_equals_eager, unpadded_rows, idle, moved_table, overwritten_source, refused_batch.

    Args:
        make_backend: builds a ``Runner`` that nothing was captured on, or a dict of its arguments. Called once
            for each case; each runner is closed.
        perturb: changes the backend's host state, which must not matter to its preps; without it the case
            double_capture is skipped.
        batches: gives a hypothesis strategy of batches for a runner, where legal values depend on each other.
        max_examples: batches of each property; by default those of the hypothesis profile.

    Sync: the device.
    """
    import pytest

    backend = Backend(make_backend, perturb, batches, max_examples)

    @pytest.mark.parametrize("part", PARTS)
    def test(part: str) -> None:
        try:
            run_part(backend, part)
        except parts.NotShown as reason:
            pytest.skip(str(reason))

    return test


def run_part(backend: Backend, part: str) -> None:
    """Run one part of the suite.

    Raises:
        AssertionError: the backend does not conform.
        NotShown: there is nothing to look at.
    """
    if part in parts.PARTS:
        return parts.PARTS[part](backend)
    checks = [check for check in backend.certificate().checks if check.name == part]
    if not checks:
        raise parts.NotShown(f"the audit has no check {part!r}")
    for check in checks:
        evidence = "\n  ".join(str(finding) for finding in check.evidence)
        assert check.verdict is not Verdict.FAIL, f"prep {check.prep!r} fails {part}:\n  {evidence}"
    if unknown := [str(finding) for check in checks if check.verdict is Verdict.UNKNOWN for finding in check.evidence]:
        raise parts.NotShown(f"{part}: {'; '.join(unknown)}")
    return None
