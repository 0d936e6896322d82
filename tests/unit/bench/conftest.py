"""Settings and sources of a small run on the tape."""

from __future__ import annotations

import pytest
import torch

from graphglue.bench.contenders import Sources
from graphglue.bench.sections import Settings
from graphglue.bench.workload import Workload


@pytest.fixture
def settings() -> Settings:
    return Settings(torch.device("cpu"), steps=2, buckets=(4,))


@pytest.fixture(scope="module")
def sources() -> Sources:
    return Sources.draw(Workload(torch.device("cpu")), 3, 4)
