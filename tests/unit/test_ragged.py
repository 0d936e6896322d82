"""Ragged verify as a geometry: keys of three numbers, exact uniformity, layouts refreshed at every replay."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import graphglue as gg
from graphglue.core.batch import extents_of
from graphglue.core.keys import KeySpace
from graphglue.core.view import View
from graphglue.preps import causal

from .preps.cases import CASES, Sizes, Step, drawn, listed, tensors, world

CASE, WIDTH, LADDER = CASES["ragged verify"], 4, [1, 2, 4]
VERIFY, GLUE, EAGER, GRAPH = gg.Mode.VERIFY, gg.Route.GLUE, gg.Route.EAGER, gg.Route.GRAPH
LISTS = world(Sizes(), seed=5)


def forward(view: Any, metadata: Any) -> torch.Tensor:
    """Mix what a kernel would read of each row."""
    return metadata["swa_page_indices"].sum(1) * 100 + metadata["seq_lens_casual"] * 10 + view.out_cache_loc


@pytest.fixture(scope="module")
def runner() -> Iterator[gg.Runner]:
    with CASE.runner(Sizes(), tensors(LISTS), LADDER, forward=forward) as made:
        made.capture(progress=False)
        yield made


def step_of(row_tokens: Sequence[int], seed: int = 0) -> Step:
    return drawn(Sizes(), LISTS, row_tokens, random.Random(seed))


def checked(runner: gg.Runner, row_tokens: Sequence[int], seed: int = 0) -> gg.Step:
    """Run a step over poisoned slots, and hold metadata, layout and outputs against the slow reference."""
    step = step_of(row_tokens, seed)
    slots = runner.view(LADDER[-1])
    for name in slots:
        slots[name].fill_(10**6)
    replayed = runner.replay(step.batch(VERIFY, ragged=True))
    bucket = replayed.decision.bucket
    padded = step.padded(bucket)
    expected = CASE.expected(Sizes(), padded, bucket, LISTS)
    assert listed(replayed.metadata) == expected
    offsets = [0, *np.cumsum(row_tokens).tolist()]
    offsets += [offsets[-1]] * (bucket.requests + 1 - len(offsets))
    if replayed.decision.forward is GRAPH or replayed.decision.reason is gg.Reason.NOT_CAPTURED:
        assert slots.qo_indptr[: bucket.requests + 1].tolist() == offsets
    rows = zip(expected["swa_page_indices"], expected["seq_lens_casual"], step.out_cache_loc)
    assert replayed.outputs.tolist() == [sum(window) * 100 + length * 10 + loc for window, length, loc in rows]
    return replayed


# Keys.


def test_a_key_is_tokens_requests_and_row_tokens(runner: gg.Runner) -> None:
    keys = runner.space.keys()
    geometries = {(key.tokens, key.requests, key.row_tokens) for key in keys}
    assert geometries == {(4 * size, size, row_tokens) for size in LADDER for row_tokens in (0, 4)}
    ragged, uniform = checked(runner, [4, 3, 1]), checked(runner, [4, 4, 4])
    assert (ragged.decision.bucket, uniform.decision.bucket) == (gg.Bucket(4, 16, 0), gg.Bucket(4, 16, 4))
    assert ragged.decision.key == gg.Key(VERIFY, 4, 16, 0)
    assert uniform.decision.key == gg.Key(VERIFY, 4, 16, 4)
    for one in (ragged, uniform):
        assert (one.decision.prep, one.decision.forward) == (GLUE, GRAPH)
    assert (ragged.decision.reason, uniform.decision.reason) == (gg.Reason.RAGGED, gg.Reason.PADDED)


@pytest.mark.parametrize("kind", [list, tuple, np.array, torch.tensor], ids=["list", "tuple", "numpy", "torch"])
@pytest.mark.parametrize(
    ("row_tokens", "width"),
    [
        ([4, 4, 4], 4),
        ([3, 3], 3),
        ([7], 7),
        ([4, 4, 3], 0),
        ([3, 5], 0),  # the mean is the width
        ([4, 5, 3, 4], 0),  # and ends are equal too
        ([1, 2, 1], 0),  # as many tokens as a uniform batch of another number
        ([5, 4, 4, 3], 0),  # first and last differ, and so do all sums
        ([4, 4, 4, 4, 5], 0),  # the odd one is the last
    ],
)
def test_uniform_is_what_has_one_width_exactly(kind: Any, row_tokens: list[int], width: int) -> None:
    raw = extents_of(gg.Batch(len(row_tokens), mode=VERIFY, row_tokens=kind(row_tokens)), WIDTH)
    assert raw == gg.Bucket(len(row_tokens), sum(row_tokens), width)


@given(st.lists(st.integers(1, 6), min_size=1, max_size=9))
def test_any_batch_is_ragged_if_and_only_if_two_requests_differ(row_tokens: list[int]) -> None:
    raw = extents_of(gg.Batch(len(row_tokens), mode=VERIFY, row_tokens=row_tokens), WIDTH)
    assert (raw.row_tokens == 0) == any(one != other for one in row_tokens for other in row_tokens)


# Admission: all three numbers.


@given(st.lists(st.integers(1, 9), min_size=1, max_size=7), st.sampled_from([[1, 2, 4], [2, 5], [3]]))
def test_a_bucket_covers_requests_and_tokens_and_is_the_smallest_that_does(row_tokens: list[int], ladder: Any) -> None:
    requests, tokens, space = len(row_tokens), sum(row_tokens), KeySpace(gg.Ladder(ladder), WIDTH, ragged=True)
    fitting = [size for size in ladder if size >= requests and size * WIDTH >= tokens]
    if len(set(row_tokens)) > 1:
        expected = gg.Bucket(fitting[0], fitting[0] * WIDTH, 0) if fitting else None
    else:  # one width: the rows of a bucket are as wide, and the slots must hold them
        width, size = row_tokens[0], next((size for size in ladder if size >= requests), None)
        fits = size is not None and size * width <= max(ladder) * WIDTH
        expected = gg.Bucket(size, size * width, width) if fits and size else None
    raw = extents_of(gg.Batch(requests, mode=VERIFY, row_tokens=row_tokens), WIDTH)
    assert space.cover(raw) == expected


@pytest.mark.parametrize(
    ("row_tokens", "bucket", "reason"),
    [
        ([2, 1], gg.Bucket(2, 8, 0), gg.Reason.RAGGED),
        ([7, 1], gg.Bucket(2, 8, 0), gg.Reason.RAGGED),  # one request may have more than the width
        ([8, 1], gg.Bucket(4, 16, 0), gg.Reason.RAGGED),  # tokens decide
        ([1, 1, 2], gg.Bucket(4, 16, 0), gg.Reason.RAGGED),  # requests decide
        ([4, 4, 4, 1], gg.Bucket(4, 16, 0), gg.Reason.RAGGED),
        ([5, 4, 4, 3], gg.Bucket(4, 16, 0), gg.Reason.RAGGED),  # every row of the bucket is real
        ([1, 1, 1, 1, 2], gg.Bucket(5, 6, 0), gg.Reason.OVER_LADDER),  # few tokens, but too many requests
        ([5, 4, 4, 4], gg.Bucket(4, 17, 0), gg.Reason.OVER_LADDER),  # few requests, but too many tokens
        ([3, 3], gg.Bucket(2, 6, 3), gg.Reason.NOT_CAPTURED),  # both fit, but the width is no captured one
        ([1], gg.Bucket(1, 1, 1), gg.Reason.NOT_CAPTURED),
    ],
)
def test_admission_looks_at_requests_tokens_and_width(
    runner: gg.Runner, row_tokens: list[int], bucket: gg.Bucket, reason: gg.Reason
) -> None:
    decision = checked(runner, row_tokens).decision
    assert (decision.bucket, decision.reason) == (bucket, reason)
    glued = reason is gg.Reason.RAGGED
    assert (decision.prep, decision.forward) == ((GLUE, GRAPH) if glued else (EAGER, EAGER))
    ahead = runner.can_replay(step_of(row_tokens).batch(VERIFY, ragged=True))
    assert (ahead.bucket, ahead.reason, bool(ahead)) == (bucket, reason, glued)


# The layout.


def test_the_layout_is_refreshed_at_every_replay(runner: gg.Runner) -> None:
    """One key, and another layout each time: the order, the number of requests, the tokens that are left over."""
    layouts = [[4, 3, 2, 1], [1, 2, 3, 4], [4, 4, 4, 3], [1, 9, 1], [2, 1, 1, 2], [10, 2], [4, 3, 2, 1]]
    keys = {checked(runner, row_tokens, seed).decision.key for seed, row_tokens in enumerate(layouts)}
    assert keys == {gg.Key(VERIFY, 4, 16, 0)}


def test_uniform_after_ragged_and_back(runner: gg.Runner) -> None:
    reasons = []
    for seed, row_tokens in enumerate(
        [[4, 4, 4, 4], [4, 4, 3, 1], [4, 4, 4], [4, 4, 4, 3], [4, 4, 4, 4], [2, 2], [3, 1]]
    ):
        reasons.append(checked(runner, row_tokens, seed).decision.reason.value)
    idle = runner.replay(gg.Batch.idle(VERIFY))
    reasons += [idle.decision.reason.value, checked(runner, [1, 3], 9).decision.reason.value]
    assert reasons == [
        "unpadded", "ragged", "padded", "ragged", "unpadded", "not_captured", "ragged", "idle_eager", "ragged"
    ]  # fmt: skip


def frozen_runner(offsets_of: Callable[[Any], torch.Tensor]) -> gg.Runner:
    """Build a runner of the shipped prep over another layout than the slot's."""
    made = causal.make("dsv4-ragged-verify", **Sizes().layout)

    def frozen(view: Any) -> dict[str, torch.Tensor]:
        slots = {name: view[name] for name in view} | {"qo_indptr": offsets_of(view)}
        tables = {name: getattr(view.tables, name) for name in causal.TABLES}
        return made(View(slots, tables, view.bucket, view.mode))

    registry = gg.Registry()
    registry.register(CASE.contract)(frozen)
    runner = gg.Runner(
        slots=CASE.slots, ladder=LADDER, registry=registry, prep=CASE.contract.name, forward=forward,
        tables=tensors(LISTS), tokens_per_request=WIDTH, config=gg.RunnerConfig(modes=frozenset({VERIFY})),
    )  # fmt: skip
    runner.capture(progress=False)
    return runner


def test_a_layout_that_nobody_refreshes_is_seen() -> None:
    """The comparison can fail: rows are cut by the even layout of the capture, whatever the step's is."""
    even = torch.arange(LADDER[-1] + 1, dtype=torch.int32) * WIDTH
    with frozen_runner(lambda view: even[: view.bucket.requests + 1]) as runner:
        assert checked(runner, [4, 4, 4, 4]).decision.prep is GLUE
        assert runner.can_replay(step_of([4, 3, 2, 1]).batch(VERIFY, ragged=True)).prep is GLUE
        with pytest.raises(AssertionError):
            checked(runner, [4, 3, 2, 1])


def test_a_layout_that_is_kept_from_a_warm_up_is_refused() -> None:
    kept: dict[gg.Bucket, torch.Tensor] = {}
    with frozen_runner(lambda view: kept.setdefault(view.bucket, view.qo_indptr.clone())) as runner:
        decision = runner.can_replay(step_of([4, 3, 2, 1]).batch(VERIFY, ragged=True))
        assert (decision.prep, decision.reason) == (EAGER, gg.Reason.QUARANTINED)


def test_verify_lengths_are_a_layout_as_well() -> None:
    """A backend that counts in lengths (pad 0) sees the same rows as one that counts in offsets (REPEAT_LAST)."""
    contract = gg.PrepContract(
        name="by-lengths",
        reads={"verify_lens": 0, "qo_indptr": gg.REPEAT_LAST},
        outputs={"from_lengths": "offset", "from_offsets": "offset", "spare": "fixed"},
        modes={VERIFY},
        ragged=True,
    )
    registry = gg.Registry()

    @registry.register(contract)
    def by_lengths(view: Any) -> dict[str, torch.Tensor]:
        ends = torch.cumsum(view.verify_lens, 0)
        return {
            "from_lengths": torch.nn.functional.pad(ends, (1, 0)),
            "from_offsets": view.qo_indptr.to(torch.int64),
            "spare": view.bucket.tokens - ends[-1:],
        }

    slots = [
        gg.Slot("verify_lens", "request", torch.int64, 0),
        gg.Slot("qo_indptr", "offset", torch.int32, gg.REPEAT_LAST),
    ]
    with gg.Runner(slots=slots, ladder=LADDER, registry=registry, prep="by-lengths", tokens_per_request=WIDTH) as made:
        made.capture(progress=False)
        for row_tokens in ([4, 3, 2, 1], [1, 9, 1], [2, 1], [4, 4, 4], [1, 2, 4, 4]):
            offsets = [0, *np.cumsum(row_tokens).tolist()]
            sources = {"verify_lens": row_tokens, "qo_indptr": offsets}
            prepared = made.prepare(gg.Batch(len(row_tokens), sources, VERIFY, row_tokens=row_tokens))
            tail = [offsets[-1]] * (prepared.decision.bucket.requests - len(row_tokens))
            found = listed(prepared.metadata)
            assert found["from_lengths"] == found["from_offsets"] == offsets + tail
            assert found["spare"] == [prepared.decision.bucket.tokens - sum(row_tokens)]
            assert prepared.decision.prep is GLUE


# Refusals.


def test_without_the_declaration_a_ragged_batch_is_eager_and_the_static_prep_says_what_to_use() -> None:
    static = CASES["verify"]
    with static.runner(Sizes(), tensors(LISTS), LADDER, forward=forward) as made:
        made.capture(progress=False)
        assert {bucket.row_tokens for bucket in made.buckets} == {WIDTH}
        ragged = step_of([4, 3, 1]).batch(VERIFY, ragged=False)
        decision = made.can_replay(ragged)
        assert (decision.prep, decision.reason) == (EAGER, gg.Reason.RAGGED_NOT_DECLARED)
        assert decision.forward_reason is gg.Reason.RAGGED_KEY
        with pytest.raises(gg.ContractError, match="the requests differ; use dsv4-ragged-verify"):
            made.replay(ragged)
        step = step_of([4, 4, 4])
        replayed = made.replay(step.batch(VERIFY, ragged=False))
        bucket = replayed.decision.bucket
        assert listed(replayed.metadata) == static.expected(Sizes(), step.padded(bucket), bucket, LISTS)
        assert replayed.decision.prep is GLUE


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"row_tokens": [4, 0, 4]}, "one positive count for each"),
        ({"row_tokens": [4, 4]}, r"has 2 entries"),
        ({"num_tokens": 9, "row_tokens": [4, 3, 1]}, "row_tokens sums to 8"),
        ({"row_tokens": 4}, "expected the tokens of each request, in a list"),
        ({"row_tokens": torch.ones(3, dtype=torch.int64, device="meta")}, "row_tokens is on meta, where"),
        ({"num_tokens": torch.tensor(8, device="meta")}, "num_tokens is on meta, where reading it would"),
        ({"row_tokens": {4, 3, 1}}, "expected the tokens of each request, in a list"),  # in no order
        ({"row_tokens": {4: "a", 3: "b", 1: "c"}}, "expected the tokens of each request, in a list"),
        ({"row_tokens": [4, 3.0, 1]}, "expected an integer"),
    ],
)
def test_a_layout_that_contradicts_itself_is_refused_before_anything_is_written(
    runner: gg.Runner, change: dict[str, Any], said: str
) -> None:
    checked(runner, [4, 3, 2, 1])
    before = {name: tensor.clone() for name, tensor in slots_of(runner).items()}
    sources = step_of([4, 3, 1]).sources(ragged=True)
    with pytest.raises(gg.BindError, match=said):
        runner.replay(gg.Batch(3, sources, VERIFY, **change))
    assert all(torch.equal(tensor, before[name]) for name, tensor in slots_of(runner).items())


def test_a_layout_of_other_extents_than_its_sources_is_refused(runner: gg.Runner) -> None:
    sources = step_of([4, 3, 1]).sources(ragged=True)
    for row_tokens in ([4, 3, 2], [4, 4, 4]):
        with pytest.raises(gg.BindError, match=r"slot 'out_cache_loc'.*expected exactly"):
            runner.replay(gg.Batch(3, sources, VERIFY, row_tokens=row_tokens))


def slots_of(runner: gg.Runner) -> dict[str, torch.Tensor]:
    view = runner.view(LADDER[-1])
    return {name: view[name] for name in view}
