"""The soak in short, and that each of its comparisons can fail. ``GRAPHGLUE_SOAK_STEPS=100000`` makes it a long one."""

from __future__ import annotations

import logging
import os
import random
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from .engine import CAPTURED, Engine, drawn, reference
from .growth import MIB, Growth
from .soak import Soak

pytestmark = pytest.mark.usefixtures("frozen_imports", "silence")
STEPS = int(os.environ.get("GRAPHGLUE_SOAK_STEPS", "1200"))


@pytest.fixture
def silence() -> Iterator[None]:
    """Keep the warnings of keys that are broken on purpose to ourselves."""
    logger = logging.getLogger("graphglue")
    before = logger.level
    logger.setLevel(logging.ERROR)
    yield
    logger.setLevel(before)


def test_nothing_drifts_or_grows_whatever_happens_between_steps() -> None:
    result = Soak(upkeep_every=STEPS // 24, check_every=4).run(STEPS)
    assert result["steps"] == STEPS
    assert result["checked"] >= STEPS // 4
    assert set(result["reasons"]) == {
        "unpadded", "padded", "ragged", "staged", "idle_eager", "over_ladder", "feature_not_audited", "not_captured",
        "quarantined",
    }  # fmt: skip
    assert sum(result["reasons"].values()) == STEPS
    assert {"taken", "rejected sources", "rejected other_step"} <= set(result["staging"])
    assert min(result["quarantines"].values()) > 0
    assert result["refused"] == 3 * 3


# Each comparison can fail.


def serving(engine: type[Engine] = Engine) -> Soak:
    soak = Soak(engine=engine, check_every=1)
    soak.engine.rewrite(soak.rng)
    soak.capture()
    return soak


def test_a_wrong_result_is_found() -> None:
    class Wrong(Engine):
        def forward(self, view: Any, metadata: Any) -> torch.Tensor:
            return super().forward(view, metadata) + (view.bucket.requests == 4)

    soak = serving(Wrong)
    with pytest.raises(AssertionError, match=r"gave .* expected"):
        soak.steps(100)


def test_wrong_metadata_are_found() -> None:
    class Wrong(Engine):
        def prep(self, view: Any) -> dict[str, torch.Tensor]:
            base = super().prep(view)["base"]
            return {"base": base.index_fill(0, base.new_zeros(1), 7) if view.bucket.requests == 8 else base}

    soak = serving(Wrong)
    with pytest.raises(AssertionError, match=r"gave .* expected"):
        soak.steps(100)


def test_another_route_is_found() -> None:
    soak = serving()
    soak.model.prep[4] = "cold"
    assert soak.model.forward[4] == CAPTURED
    with pytest.raises(AssertionError, match=r"went .* expected"):
        soak.steps(100)


@pytest.mark.parametrize("counter", ["steps", "real_tokens", "bucket_tokens"])
def test_a_counter_that_drifts_is_found(counter: str) -> None:
    soak = serving()
    soak.steps(10)
    soak.count()
    tally = next(iter(soak.runner._stepper.ledger._noted()))
    setattr(tally, counter, getattr(tally, counter) + 1)
    with pytest.raises(AssertionError, match="the runner counts"):
        soak.count()


def test_a_quarantine_that_nobody_ordered_is_found() -> None:
    soak = serving()
    soak.step()
    soak.runner._units[0].cache.quarantine(soak.runner.space.keys()[0], "by hand")
    with pytest.raises(AssertionError, match=r"quarantines.*'base': 1"):
        soak.count()


@pytest.mark.parametrize(
    ("what", "leak"),
    [("gc_objects", lambda: [[] for _ in range(5000)]), ("rss_bytes", lambda: bytearray(os.urandom(MIB)) * 40)],
)
def test_what_grows_is_found(what: str, leak: Any) -> None:
    growth = Growth("cpu")
    with pytest.raises(AssertionError, match="too short"):
        growth.check()
    for _ in range(3):
        growth.look()
    growth.check()
    kept = leak()
    growth.look()
    with pytest.raises(AssertionError, match=f"grew beyond tolerance.*{what}"):
        growth.check()
    del kept
    growth.look()
    growth.check()


def test_the_reference_is_what_the_words_say() -> None:
    step = drawn(random.Random(3))
    table = list(range(0, 640, 10))
    base, outputs = reference(step, table, len(step.lens) + 1)
    assert base[-1] == 0
    assert base[:-1] == [10 * row + length for row, length in zip(step.rows, step.lens)]
    assert outputs == [3 * token + sum(base) for token in step.ids]
