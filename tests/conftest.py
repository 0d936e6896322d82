"""Set up every test: hypothesis profiles by name, one torch thread."""

from __future__ import annotations

import gc
import os

import pytest
import torch
from hypothesis import HealthCheck, Phase, settings

pytest_plugins = ("pytester",)  # the conformance suite is collected by a pytest of its own

# Two slow cores serve several workers: a slow draw says nothing about a strategy. Explaining a failure
# line by line takes minutes where an example captures graphs.
COMMON = {
    "deadline": None,
    "print_blob": True,
    "suppress_health_check": [HealthCheck.too_slow],
    "phases": [phase for phase in Phase if phase is not Phase.explain],
}

# "ci" draws the same examples for the same test, so that a change is judged by what it changed; "dev" and
# "deep" draw new ones each time and find what is still unknown.
settings.register_profile("dev", max_examples=50, stateful_step_count=10, **COMMON)
settings.register_profile("ci", max_examples=100, stateful_step_count=10, derandomize=True, **COMMON)
settings.register_profile("deep", max_examples=5000, stateful_step_count=50, **COMMON)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "dev"))

torch.set_num_threads(1)


@pytest.fixture(scope="session")
def frozen_imports() -> None:
    """Record once and freeze what the imports made, so that captures do not collect all of torch again.

    Every capture collects garbage first. Among the 300,000 objects that torch's fake tensors bring
    that takes 60 to 150 ms, and none of them is ever garbage.
    """
    from graphglue import Tape

    one = torch.ones(1)
    Tape().record(lambda: one + 1).replay()
    gc.collect()
    gc.freeze()
