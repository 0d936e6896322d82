"""The page top-up over whole lives of requests: eager and glued equal the reference, and no page has two owners."""

from __future__ import annotations

import random

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import graphglue as gg
from graphglue.preps import top_up

from ..unit.preps import pages

pytestmark = pytest.mark.usefixtures("frozen_imports")

MODES = sorted(pages.INCLUDES_NEW)
NUM_REQUESTS, MAX_CONTEXT, PAGE_SIZE, WIDTH, NUM_PAGES = 6, 11, 2, 3, 17


@given(
    seed=st.integers(0, 2**32),
    mode=st.sampled_from(MODES),
    width=st.integers(1, 7),
    page_size=st.integers(1, 5),
    num_pages=st.integers(1, 20),
    narrow=st.booleans(),
)
def test_eager_equals_the_reference(
    seed: int, mode: gg.Mode, width: int, page_size: int, num_pages: int, narrow: bool
) -> None:
    rng, lists = random.Random(seed), pages.state(5, 13, page_size, num_pages, seed)
    engine = pages.Engine(lists, width, page_size, mode, rng)
    tables = pages.tensors(lists, dtype=torch.int32 if narrow else torch.int64)
    for _ in range(5):
        seq_lens, requests = engine.choose(most=4)
        pads = rng.randint(0 if requests else 1, 2)
        padded = seq_lens + [1] * pads, requests + [0] * pads
        found = pages.step_eager(top_up.make(page_size), tables, mode, width, *padded)
        assert found == pages.step_reference(lists, mode, width, page_size, *padded)
        assert pages.held(tables) == lists
        pages.check_ownership(lists, page_size)
        engine.accept(requests, found["num_unplaced"])
        for name, tensor in tables.items():  # what the engine frees between two steps
            tensor.copy_(torch.tensor(lists[name]))


@pytest.fixture(scope="module")
def serving() -> tuple[gg.Runner, dict[str, torch.Tensor]]:
    tables = pages.tensors(pages.state(NUM_REQUESTS, MAX_CONTEXT, PAGE_SIZE, NUM_PAGES))
    runner = pages.runner(tables, PAGE_SIZE, WIDTH)
    runner.capture(progress=False)
    return runner, tables


@given(seed=st.integers(0, 2**32), mode=st.sampled_from(MODES))
def test_glued_equals_the_reference(
    serving: tuple[gg.Runner, dict[str, torch.Tensor]], seed: int, mode: gg.Mode
) -> None:
    (runner, tables), rng = serving, random.Random(seed)
    lists = pages.state(NUM_REQUESTS, MAX_CONTEXT, PAGE_SIZE, NUM_PAGES, seed)
    engine = pages.Engine(lists, WIDTH, PAGE_SIZE, mode, rng)
    for _ in range(4):
        for name, tensor in tables.items():
            tensor.copy_(torch.tensor(lists[name]))
        seq_lens, requests = engine.choose(most=5)
        prepared = runner.prepare(pages.batch(mode, seq_lens, requests))
        assert prepared.decision.prep is (gg.Route.GLUE if requests else gg.Route.EAGER)
        pads = prepared.decision.bucket.requests - len(requests)
        padded = seq_lens + [1] * pads, requests + [0] * pads
        found = {name: tensor.tolist() for name, tensor in prepared.metadata.items()}
        assert found == pages.step_reference(lists, mode, WIDTH, PAGE_SIZE, *padded)
        assert pages.held(tables) == lists
        pages.check_ownership(lists, PAGE_SIZE)
        engine.accept(requests, found["num_unplaced"])
