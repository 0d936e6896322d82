"""A target and a draft in a data-parallel group: the target pads to the largest rank, the draft to its own batch."""

from __future__ import annotations

import random
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import graphglue as gg
from graphglue.demo import speculative
from graphglue.demo.model import ModelShape
from graphglue.preps import causal, draft, reference
from graphglue.ranks import Planner

from ..unit.preps.cases import CASES, Sizes, Step, drawn, listed, tensors, world
from .threads import SLOTS, Exchange, Meeting, Model, all_well, batch_of, group_of, together

LADDER, WIDTH, SIZE = [1, 4, 256], 4, 2
SIZES = Sizes(max_context=28, num_requests=256)
SHAPE = ModelShape(
    max_context=28, page_size=SIZES.page_size, hidden=16, num_heads=2, num_kv_heads=1, head_dim=8, ffn=16
)
VERIFY = CASES["verify"]
INPUTS = [
    gg.Slot("known", axis="token", dtype=torch.int64, pad=0),
    gg.Slot("proposed", axis="request", dtype=torch.int64, pad=0, inner=(WIDTH - 1,)),
]


class Rank:
    """One rank's engine: a target in the group, its eager twin at a bucket, and a draft that agrees with nobody."""

    def __init__(self, exchange: Exchange, rank: int) -> None:
        self.rank, self.lists = rank, world(SIZES, seed=rank)
        self.tables = tensors(self.lists)
        self.models = speculative.build(SHAPE, 3, torch.float64, "cpu")
        group = group_of(exchange, rank, Planner(LADDER, width=WIDTH, speculative=True))
        self.caches = self._caches()
        slots = [*causal.slots("dsv4-verify"), *INPUTS]
        self.target = self._runner("dsv4-verify", LADDER, slots, self._forward(self.caches), WIDTH, ranks=group)
        self.target.capture(progress=False)
        self.draft = self._runner("dsv4-draft", [1, 4], draft.slots(), lambda view, m: m["seq_lens_casual"] + 0, 3)
        self.draft.capture(progress=False)

    def _caches(self) -> list[Any]:
        num = len(self.lists["full_to_swa"])
        paged = speculative.new_cache(self.models[0], speculative.PagedCache, num - 1, page_size=SIZES.page_size)
        window = speculative.new_cache(self.models[0], speculative.WindowCache, num)
        generator = torch.Generator().manual_seed(self.rank)
        for cache in (paged, window):
            cache.keys.copy_(torch.randn(cache.keys.shape, generator=generator))
            cache.values.copy_(torch.randn(cache.values.shape, generator=generator))
        return [paged, window]

    def _forward(self, caches: list[Any]) -> Any:
        return lambda view, metadata: speculative.verify(self.models[0], caches, view, metadata)

    def _runner(
        self, prep: str, ladder: list[int], slots: Any, forward: Any, width: int, ranks: Any = None
    ) -> gg.Runner:
        registry = gg.Registry()
        causal.register(registry, **SIZES.layout)
        draft.register(registry, **SIZES.layout)
        return gg.Runner(
            slots=slots, ladder=ladder, registry=registry, prep=prep, forward=forward, tables=self.tables,
            tokens_per_request=width, ranks=ranks,
        )  # fmt: skip

    def step(self, requests: int, width: int) -> Step:
        """Draw a step of this rank."""
        return drawn(SIZES, self.lists, [width] * requests, random.Random(10 * requests + self.rank))

    def sources(self, step: Step) -> dict[str, Any]:
        """Give what the target's batch hands in; the last token of each block is a drafted one."""
        rng, num = random.Random(self.rank), len(step.requests)
        known = [-1 if at % WIDTH == WIDTH - 1 else rng.randrange(256) for at in range(num * WIDTH)]
        proposed = torch.tensor([rng.randrange(256) for _ in range(num * (WIDTH - 1))], dtype=torch.int64)
        return {**step.sources(False), "known": known, "proposed": proposed.view(-1, WIDTH - 1)}

    def verify(self, requests: int, fault: float = 0.0) -> Any:
        """Replay a verify step, and run it eagerly at the bucket that was agreed, from tensors padded by hand.

        Args:
            requests: of this rank.
            fault: is added to what the eager step reads, to show that the comparison can fail.
        """
        step = self.step(requests, WIDTH)
        sources = self.sources(step)
        twins = [copied(cache, fault) for cache in self.caches]
        batch = gg.Batch(requests, sources, gg.Mode.VERIFY) if requests else gg.Batch.idle(gg.Mode.VERIFY)
        replayed = self.target.replay(batch)
        bucket = replayed.decision.bucket
        padded, more = step.padded(bucket), bucket.requests - requests
        view = padded.view(VERIFY, bucket, self.tables, "cpu")
        metadata = causal.make("dsv4-verify", **SIZES.layout)(view)
        whole = SimpleNamespace(
            known=torch.tensor(sources["known"] + [0] * more * WIDTH),
            proposed=torch.nn.functional.pad(sources["proposed"], (0, 0, 0, more)),
            tables=SimpleNamespace(**self.tables),
        )
        eager = self._forward(twins)(whole, metadata)
        rows = reference.block_rows(padded.seq_lens, padded.requests, WIDTH)
        expected = reference.causal(rows, padded.out_cache_loc, **self.lists, **SIZES.layout)
        return replayed, metadata, expected, {name: leaf[: requests * WIDTH] for name, leaf in eager.items()}


def copied(cache: Any, fault: float) -> Any:
    """Copy a layer's cache."""
    return replace(cache, keys=cache.keys + fault, values=cache.values + fault)


@pytest.fixture(scope="module")
def ranks() -> list[Rank]:
    exchange = Exchange(SIZE)
    return all_well(together(SIZE, lambda rank: Rank(exchange, rank), timeout_s=240))


@pytest.mark.parametrize("loads", [(1, 256), (0, 256), (3, 1), (1, 1), (256, 200)])
def test_a_target_is_padded_to_the_largest_rank_and_equals_the_eager_step_there(
    ranks: list[Rank], loads: tuple[int, ...]
) -> None:
    size = next(one for one in LADDER if one >= max(loads))
    results = all_well(together(SIZE, lambda rank: ranks[rank].verify(loads[rank])))
    for load, (replayed, metadata, expected, eager) in zip(loads, results):
        decision = replayed.decision
        assert decision.bucket == gg.Bucket(size, size * WIDTH, WIDTH)
        assert decision.forward is gg.Route.GRAPH
        reason = gg.Reason.UNPADDED if load == size else gg.Reason.PADDED if load else gg.Reason.IDLE_EAGER
        assert decision.reason is reason
        assert decision.prep is (gg.Route.GLUE if load else gg.Route.EAGER)
        assert listed(replayed.metadata) == listed(metadata) == expected
        assert replayed.outputs["logits"].shape == (load * WIDTH, SHAPE.vocab)
        for name, leaf in eager.items():
            assert torch.equal(replayed.outputs[name], leaf), f"{name} is not that of the eager step"


def test_the_comparison_with_the_eager_step_can_fail(ranks: list[Rank]) -> None:
    results = all_well(together(SIZE, lambda rank: ranks[rank].verify((1, 256)[rank], fault=1e-6)))
    for replayed, _, _, eager in results:
        assert torch.equal(replayed.outputs["block"], eager["block"])
        assert not torch.equal(replayed.outputs["logits"], eager["logits"])


def test_a_draft_keeps_to_its_own_bucket_beside_a_peer_of_256(ranks: list[Rank]) -> None:
    """The draft is no call that all ranks make: rank 0 drafts alone, and pads to 1 while its target pads to 256."""
    own = ranks[0]
    step = own.step(1, 3)
    drafted = own.draft.replay(step.batch(gg.Mode.DRAFT, ragged=False))
    assert drafted.decision.bucket == gg.Bucket(1, 3, 3)
    assert drafted.decision.prep is gg.Route.GLUE
    expected = reference.draft(step.seq_lens, step.requests, 3, step.out_cache_loc, **own.lists, **SIZES.layout)
    assert listed(drafted.metadata) == expected
    results = all_well(together(SIZE, lambda rank: ranks[rank].verify((1, 256)[rank])))
    assert {replayed.decision.bucket for replayed, *_ in results} == {gg.Bucket(256, 256 * WIDTH, WIDTH)}


def planned_runner(exchange: Exchange, meeting: Meeting, rank: int) -> gg.Runner:
    """Build one rank's runner: every glued step is held against its twin, and rank 0's planner fails for 3 requests."""

    def plan(batch: gg.Batch, bucket: gg.Bucket) -> dict[str, list[int]]:
        if rank == 0 and batch.num_requests == 3:
            raise ValueError("no plan for three")
        return {"planned": [batch.num_requests + 5]}

    registry, model = gg.Registry(), Model(meeting, rank)
    contract = gg.PrepContract(
        name="planned", reads={"planned": 0}, outputs={"total": "fixed"}, modes={gg.Mode.DECODE}, idle="glue"
    )
    registry.register(contract, plan=plan)(lambda view: {"total": view.planned * 2})
    runner = gg.Runner(
        slots=[*SLOTS, gg.Slot("planned", "fixed", torch.int64, 0, inner=(1,))],
        ladder=[1, 4], registry=registry, prep="planned", forward=model, output_axes="token",
        ranks=group_of(exchange, rank, Planner([1, 4])), hooks=gg.CaptureHooks(key=model.record),
        config=gg.RunnerConfig(shadow=gg.Shadow(first=9, every=1, on_mismatch="raise")),
    )  # fmt: skip
    runner.capture(progress=False)
    return runner


def test_a_rank_that_stands_in_without_its_planner_is_no_divergence() -> None:
    """The twin of such a step was given what the last step's planner had said, and both fill and prep were blamed."""
    exchange, meeting = Exchange(SIZE), Meeting(SIZE)
    runners = all_well(together(SIZE, lambda rank: planned_runner(exchange, meeting, rank)))

    def step(*loads: int) -> list[Any]:
        return together(SIZE, lambda rank: runners[rank].replay(batch_of(loads[rank])))

    idle, _ = all_well(step(0, 2))
    assert idle.metadata["total"].tolist() == [10]
    refused, other = step(3, 2)
    assert repr(refused) == "ValueError('no plan for three')"
    assert other.decision.forward is gg.Route.GRAPH
    for loads in ((2, 2), (1, 4)):
        assert {one.decision.prep for one in all_well(step(*loads))} == {gg.Route.GLUE}
    for runner in runners:
        shadow = runner.stats()["shadow"]
        assert (shadow["passed"], shadow["failed"]) == (4, 0)
