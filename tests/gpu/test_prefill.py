"""EXTEND runners in segments on a GPU: fill, preps and the first segment are one launch."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import graphglue as gg
from graphglue.errors import SegmentError
from tests.prefill import CONTRACT, Prefill, batch, make_runner, prep

STEPS = ([3, 2], [8], [1, 1, 1], [5, 3, 4, 2], [4, 4, 4, 4], [16], [2, 1], [9], [], [5, 5])
ROWS = {"output_axes": {"rows": "bucket"}}


def pair(dtype: torch.dtype = torch.float32, **changes: Any) -> tuple[gg.Runner, gg.Runner, Prefill, Prefill]:
    """Build a runner in segments and one that runs everything eagerly."""
    glued, eager = Prefill("cuda", dtype), Prefill("cuda", dtype)
    one = make_runner(glued, device="cuda", **ROWS, **changes)
    one.capture(progress=False)
    return one, make_runner(eager, device="cuda", config={"enabled": False}, **ROWS), glued, eager


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16], ids=str)
def test_segments_equal_the_same_step_run_eagerly_bit_for_bit(dtype: torch.dtype) -> None:
    one, other, glued, eager = pair(dtype)
    with one, other:
        for seed, lens in enumerate((*STEPS, *reversed(STEPS))):
            ours, theirs = one.replay(batch(lens, seed)), other.replay(batch(lens, seed))
            assert ours.decision.forward is gg.Route.GRAPH
            assert ours.decision.prep is gg.Route.GLUE
            assert theirs.decision.forward is gg.Route.EAGER
            assert torch.equal(ours.outputs["rows"], theirs.outputs["rows"]), lens
            assert glued.seen[-1] == eager.seen[-1]
        stats = one.stats()
        assert stats["one_launch"] == stats["steps"] == 2 * len(STEPS)
        assert stats["launch_fallbacks"] == {}


def test_the_comparison_can_fail() -> None:
    one, other, _, eager = pair()
    with one, other:
        eager.weights[0][0] += 1
        ours, theirs = one.replay(batch([3, 2])), other.replay(batch([3, 2]))
        assert not torch.equal(ours.outputs["rows"], theirs.outputs["rows"])


@pytest.mark.parametrize(
    "config",
    [{"clone_outputs": True}, {"events": True}, {"glue": {"prefill": "off"}}, {"shadow": gg.Shadow(first=99, every=1)}],
    ids=str,
)
def test_segments_on_every_path_of_a_step(config: dict[str, Any]) -> None:
    contract = CONTRACT.model_copy(update={"reads_end": "forward"})
    one, other, _, _ = pair(contract=contract, config=config)
    with one, other:
        for seed, lens in enumerate(STEPS):
            ours, theirs = one.replay(batch(lens, seed)), other.replay(batch(lens, seed))
            assert ours.decision.forward is gg.Route.GRAPH
            if "events" in config:
                ours.tables_read().synchronize()
            assert torch.equal(ours.outputs["rows"], theirs.outputs["rows"])
        if "shadow" in config:
            assert one.stats()["shadow"]["mismatches"] == []


def test_a_published_metadata_is_there_before_the_breaks() -> None:
    model = Prefill("cuda", torch.float32)
    installed: list[Any] = []
    usual = model.attention

    def attention(rows: torch.Tensor, view: Any, layer: int) -> torch.Tensor:
        checked.append(bool(installed) and installed[-1]["scale"].data_ptr() == view.live.metadata["scale"].data_ptr())
        return usual(rows, view, layer)

    checked: list[bool] = []
    registry = gg.Registry()
    registry.register(CONTRACT, publish=installed.append)(prep)
    with make_runner(model, device="cuda", registry=registry) as runner:
        runner.capture(progress=False)
        model.attention = attention  # type: ignore[method-assign]
        installed.clear()
        runner.replay(batch([3, 2]))
        assert checked == [True] * 3


def test_a_break_that_raises_leaves_the_runner_usable() -> None:
    one, other, glued, _ = pair()
    usual = glued.attention

    def attention(rows: torch.Tensor, view: Any, layer: int) -> torch.Tensor:
        if layer == 1:
            raise ValueError("no pages left")
        return usual(rows, view, layer)

    with one, other:
        glued.attention = attention  # type: ignore[method-assign]
        with pytest.raises(SegmentError, match="no pages left"):
            one.replay(batch([3, 2]))
        glued.attention = usual  # type: ignore[method-assign]
        for seed, lens in enumerate(STEPS):
            ours, theirs = one.replay(batch(lens, seed)), other.replay(batch(lens, seed))
            assert torch.equal(ours.outputs["rows"], theirs.outputs["rows"])


def test_random_numbers_in_segments_advance_with_every_replay_as_eagerly() -> None:
    class Noisy(Prefill):
        def forward(self, view: Any, metadata: Any) -> Any:
            rows = super().forward(view, metadata)["rows"]
            return {"rows": rows + torch.rand_like(rows)}

    one, other = (
        make_runner(Noisy("cuda", torch.float32), device="cuda", config=c, **ROWS) for c in ({}, {"enabled": False})
    )
    with one, other:
        one.capture(progress=False)
        drawn = []
        for runner in (one, other):
            torch.cuda.manual_seed(7)
            drawn.append([runner.replay(batch([3, 2])).outputs["rows"].clone() for _ in range(3)])
        for ours, theirs in zip(*drawn):
            assert torch.equal(ours, theirs)
        assert not torch.equal(drawn[0][0], drawn[0][1])
        assert any("random numbers" in why for why in one.stats()["launch_fallbacks"])


def test_many_steps_queued_behind_a_busy_gpu_are_right() -> None:
    one, other, _, _ = pair(config={"clone_outputs": True})
    with one, other:
        expected = [other.replay(batch(lens, seed)).outputs["rows"].clone() for seed, lens in enumerate(STEPS * 5)]
        torch.cuda._sleep(200_000_000)
        seen = [one.replay(batch(lens, seed)).outputs["rows"] for seed, lens in enumerate(STEPS * 5)]
        for ours, theirs in zip(seen, expected):
            assert torch.equal(ours, theirs)


def test_memory_of_all_buckets_is_little_more_than_that_of_the_largest() -> None:
    """Smaller buckets, captured later, use the memory of larger ones again."""

    def reserved(ladder: list[int]) -> int:
        torch.cuda.empty_cache()
        before = torch.cuda.memory_reserved()
        with make_runner(Wide("cuda", torch.float32), device="cuda", ladder=ladder) as runner:
            runner.capture(progress=False)
            return torch.cuda.memory_reserved() - before

    class Wide(Prefill):
        def forward(self, view: Any, metadata: Any) -> Any:
            rows = super().forward(view, metadata)["rows"]
            return {"rows": rows + rows.repeat(1, 2000).tanh().sum(1, keepdim=True)}

    ladder = [256 * size for size in range(1, 13)]
    largest = reserved(ladder[-1:])
    assert largest > 0
    assert reserved(ladder) <= 1.3 * largest + (32 << 20)
