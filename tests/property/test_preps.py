"""Every shipped DSV4-like prep equals its slow reference: eagerly at any sizes, and glued through a runner."""

from __future__ import annotations

import functools
import random
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import graphglue as gg
from graphglue.audit import audit
from graphglue.preps import causal

from ..gallery.rounds import failures
from ..unit.preps import padded_glue
from ..unit.preps.cases import CASES, Case, Sizes, Step, drawn, glued_steps, listed, row_tokens_of, tensors, world

pytestmark = pytest.mark.usefixtures("frozen_imports")

LADDER = (2, 5)
SEEDS = st.integers(0, 2**32)
NAMES = st.sampled_from(sorted(CASES))


@st.composite
def sizes(draw: st.DrawFn) -> Sizes:
    """Draw small sizes; pages divide into the indexer's blocks at both ratios."""
    index_page_size = draw(st.integers(1, 2))
    return Sizes(
        page_size=2 * index_page_size * draw(st.integers(1, 2)),
        window=draw(st.integers(1, 9)),
        alignment=draw(st.sampled_from([1, 2, 4, 5])),
        floor=draw(st.sampled_from([0, 0, 1, 4])),
        top_k=draw(st.integers(1, 9)),
        index_page_size=index_page_size,
        max_context=draw(st.integers(6, 21)),
        num_requests=6,
    )


def bucket_of(case: Case, row_tokens: list[int], num_requests: int) -> gg.Bucket:
    """Give the bucket of a size: ragged where the requests differ."""
    uniform = set(row_tokens) <= {case.width}
    return gg.Bucket(num_requests, num_requests * case.width, case.width if uniform else 0)


@settings(max_examples=6 * settings().max_examples)
@given(name=NAMES, sizes=sizes(), seed=SEEDS, raw=st.integers(0, 5), pads=st.integers(0, 3), narrow=st.booleans())
def test_eager_equals_the_reference(name: str, sizes: Sizes, seed: int, raw: int, pads: int, narrow: bool) -> None:
    case, rng, tables = CASES[name], random.Random(seed), world(sizes, seed)
    step = drawn(sizes, tables, row_tokens := row_tokens_of(case, raw, rng), rng, past_end=rng.random() < 0.5)
    if not raw and not pads:
        pads = 1
    bucket = bucket_of(case, row_tokens, raw + pads)
    padded, held = step.padded(bucket), tensors(tables, dtype=torch.int32 if narrow else torch.int64)
    metadata = case.make(sizes)(padded.view(case, bucket, held, "cpu"))
    assert metadata.keys() == case.contract.outputs.keys()
    assert listed(metadata) == case.expected(sizes, padded, bucket, tables)


@functools.cache
def serving(name: str) -> tuple[gg.Runner, dict[str, torch.Tensor]]:
    """Capture a runner once; examples write into its tables."""
    held = tensors(world(Sizes(), 0))
    runner = CASES[name].runner(Sizes(), held, LADDER)
    runner.capture(progress=False)
    return runner, held


@given(name=NAMES, seed=SEEDS, raws=st.lists(st.integers(0, 5), min_size=1, max_size=3))
def test_glued_equals_the_reference(name: str, seed: int, raws: list[int]) -> None:
    case, (runner, held) = CASES[name], serving(name)
    for raw, (prepared, expected) in zip(raws, glued_steps(case, runner, held, raws, seed), strict=True):
        bucket = prepared.decision.bucket
        captured = bucket.row_tokens in (0, case.width)  # requests that happen to share another width have no key
        assert prepared.decision.prep is (gg.Route.GLUE if raw and captured else gg.Route.EAGER)
        assert bucket.requests in LADDER
        assert listed(prepared.metadata) == expected


def test_padded_glue_is_padded_eager_bit_for_bit() -> None:
    outcome = padded_glue.check("cpu")
    assert outcome.mismatches == []
    assert outcome.num_checks == 640
    assert outcome.raws == set(range(2, 14))


@pytest.mark.parametrize("leaf", causal.LEAVES)
def test_the_bit_check_sees_one_changed_value(leaf: str) -> None:
    def change(number: int, metadata: dict[str, torch.Tensor]) -> None:
        if number == 3:
            metadata[leaf].view(-1)[-1] += 1

    (mismatch,) = padded_glue.check("cpu", steps=3, change=change).mismatches
    assert mismatch == f"dsv4-verify, step 0, raw 2: ['{leaf}']"


@pytest.mark.parametrize("name", CASES)
def test_a_changed_value_parts_from_the_reference(name: str) -> None:
    """Each leaf, and each input, is looked at: one other value anywhere is a difference."""
    case, rng, tables = CASES[name], random.Random(name), world(Sizes(), 1)
    row_tokens = [case.width] * 4
    step, bucket = drawn(Sizes(), tables, row_tokens, rng), bucket_of(case, row_tokens, 5)

    def run(step: Step, held: dict[str, torch.Tensor]) -> dict[str, Any]:
        return case.make(Sizes())(step.padded(bucket).view(case, bucket, held, "cpu"))

    metadata, expected = run(step, tensors(tables)), case.expected(Sizes(), step.padded(bucket), bucket, tables)
    assert listed(metadata) == expected
    for tensor in metadata.values():
        tensor.view(-1)[-1] += 1
        assert listed(metadata) != expected
        tensor.view(-1)[-1] -= 1
    for change in ("seq_lens", "requests", "out_cache_loc"):
        values = [value - 2 if value > 2 else value + 2 for value in getattr(step, change)]
        assert listed(run(replace(step, **{change: values}), tensors(tables))) != expected, change


@pytest.mark.parametrize("name", CASES)
def test_the_audit_passes(name: str) -> None:
    case = CASES[name]
    with case.runner(Sizes(), tensors(world(Sizes(), 3)), LADDER) as runner:
        certificate = audit(runner, perturb=lambda: None)
    assert failures(certificate) == {}
    verdicts = {check.name: check.verdict.value for check in certificate.checks}
    assert verdicts.pop("pointers") in ("pass", "unknown")
    assert set(verdicts.values()) == {"pass"}
