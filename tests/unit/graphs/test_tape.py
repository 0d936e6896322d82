"""The contract, kept by the CPU tape, and what only the tape does."""

from __future__ import annotations

import pytest

from graphglue.graphs.tape import Tape
from tests.unit.graphs.recorder_contract import *  # noqa: F403


@pytest.fixture(scope="module")
def recorder() -> Tape:
    return Tape()
