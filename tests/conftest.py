"""Set up every test: hypothesis profiles by name, one torch thread."""

from __future__ import annotations

import gc
import os

import torch
from hypothesis import HealthCheck, settings

# Two slow cores serve several workers: a slow draw says nothing about a strategy.
COMMON = {"deadline": None, "print_blob": True, "suppress_health_check": [HealthCheck.too_slow]}

settings.register_profile("dev", max_examples=50, stateful_step_count=20, **COMMON)
settings.register_profile("ci", max_examples=200, stateful_step_count=20, **COMMON)
settings.register_profile("deep", max_examples=5000, stateful_step_count=50, **COMMON)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "dev"))

torch.set_num_threads(1)


def pytest_collection_finish() -> None:
    """Freeze what the imports made: each capture collects garbage, and should not walk all of torch."""
    gc.collect()
    gc.freeze()
