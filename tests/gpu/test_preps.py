"""The shipped DSV4-like preps and the page top-up on a GPU, against their slow references and bit by bit."""

from __future__ import annotations

import random

import pytest
import torch

import graphglue as gg
from graphglue.audit import audit

from ..gallery.rounds import failures
from ..unit.preps import padded_glue, pages
from ..unit.preps.cases import CASES, Sizes, glued_steps, listed, tensors, world

LADDER = (2, 5)


def test_padded_glue_is_padded_eager_bit_for_bit() -> None:
    outcome = padded_glue.check("cuda")
    assert outcome.mismatches == []
    assert outcome.num_checks == 640
    assert outcome.raws == set(range(2, 14))


def test_the_bit_check_sees_one_changed_value() -> None:
    def change(number: int, metadata: dict[str, torch.Tensor]) -> None:
        if number == 3:
            metadata["swa_page_indices"].view(-1)[-1] += 1

    (mismatch,) = padded_glue.check("cuda", steps=3, change=change).mismatches
    assert mismatch == "dsv4-verify, step 0, raw 2: ['swa_page_indices']"


@pytest.mark.parametrize("name", CASES)
def test_glued_equals_the_reference(name: str) -> None:
    case, held = CASES[name], tensors(world(Sizes(), 0), "cuda")
    with case.runner(Sizes(), held, LADDER, device="cuda") as runner:
        runner.capture(progress=False)
        num_glued = 0
        for seed in range(8):
            for prepared, expected in glued_steps(case, runner, held, [5, 1, 0, 3, 4, 2], seed):
                num_glued += prepared.decision.prep is gg.Route.GLUE
                assert listed(prepared.metadata) == expected
    assert num_glued >= (8 if case.ragged else 40)


@pytest.mark.parametrize("name", CASES)
def test_the_audit_finds_no_fault(name: str) -> None:
    with CASES[name].runner(Sizes(), tensors(world(Sizes(), 3), "cuda"), LADDER, device="cuda") as runner:
        assert failures(audit(runner, perturb=lambda: None)) == {}


@pytest.mark.parametrize("mode", sorted(pages.INCLUDES_NEW))
def test_the_top_up_equals_its_reference_over_whole_lives(mode: gg.Mode) -> None:
    page_size, width, rng = 2, 3, random.Random(mode.value)
    lists = pages.state(num_requests=6, max_context=11, page_size=page_size, num_pages=17)
    engine, tables = pages.Engine(lists, width, page_size, mode, rng), pages.tensors(lists, "cuda")
    shadow = gg.RunnerConfig(modes={mode}, shadow=gg.Shadow(first=8, every=3))
    with pages.runner(tables, page_size, width, device="cuda", config=shadow) as runner:
        runner.capture(progress=False)
        assert failures(audit(runner, perturb=lambda: None)) == {}
        assert pages.held(tables) == lists
        for _ in range(40):
            for name, tensor in tables.items():
                tensor.copy_(torch.tensor(lists[name]))
            seq_lens, requests = engine.choose(most=5)
            prepared = runner.prepare(pages.batch(mode, seq_lens, requests))
            assert prepared.decision.prep is (gg.Route.GLUE if requests else gg.Route.EAGER)
            pads = prepared.decision.bucket.requests - len(requests)
            padded = seq_lens + [1] * pads, requests + [0] * pads
            found = listed(prepared.metadata)
            assert found == pages.step_reference(lists, mode, width, page_size, *padded)
            assert pages.held(tables) == lists
            engine.accept(requests, found["num_unplaced"])
