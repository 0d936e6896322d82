"""What a replay on the tape does to others of its pool: what one on a GPU may do (POOL-ALIAS-4)."""

from __future__ import annotations

import gc
import weakref
from typing import Any

import pytest
import torch

import graphglue as gg
from graphglue.graphs.segments import record_segments
from graphglue.graphs.tape import Tape

LARGE = 0x7F7F7F7F7F7F7F7F


def plus(amount: int, of: torch.Tensor) -> Any:
    return lambda: of + amount


@pytest.fixture
def source() -> torch.Tensor:
    return torch.tensor([1, 2, 3])


def test_a_replay_keeps_what_was_recorded_before_it_and_spoils_what_was_behind(source: torch.Tensor) -> None:
    tape = Tape()
    first, second, third = (tape.record(plus(amount, source)) for amount in (10, 20, 30))
    for recording in (first, second, third):
        recording.replay()
    assert [one.outputs.tolist() for one in (first, second, third)] == [[11, 12, 13], [21, 22, 23], [31, 32, 33]]
    second.replay()
    assert first.outputs.tolist() == [11, 12, 13]
    assert second.outputs.tolist() == [21, 22, 23]
    assert third.outputs.tolist() == [LARGE] * 3
    third.replay()
    assert second.outputs.tolist() == [21, 22, 23]
    assert third.outputs.tolist() == [31, 32, 33]


def test_every_dtype_shows_that_it_was_spoiled(source: torch.Tensor) -> None:
    tape = Tape()
    first = tape.record(plus(0, source))
    halves, flags, pairs, small = (source.bfloat16(), source > 9, source.to(torch.complex64), source.to(torch.int8))
    later = tape.record(lambda: (halves + 1, flags & flags, pairs + 1, {"small": small + 1}))
    later.replay()
    first.replay()
    spoiled = later.outputs
    assert bool(spoiled[0].isnan().all())
    assert bool(spoiled[1].all())
    assert bool(torch.view_as_real(spoiled[2]).isnan().all())
    assert spoiled[3]["small"].tolist() == [127] * 3


def test_only_the_pool_s_own_memory_is_spoiled(source: torch.Tensor) -> None:
    """An output that is an engine's tensor, or a view of one, stays the engine's."""
    tape, kept = Tape(), torch.arange(6)
    first = tape.record(plus(0, source))
    later = tape.record(lambda: (kept[2:], kept.add_(0), source, source + 1))
    later.replay()
    first.replay()
    assert kept.tolist() == list(range(6))
    assert source.tolist() == [1, 2, 3]
    assert later.outputs[0].tolist() == [2, 3, 4, 5]
    assert later.outputs[3].tolist() == [LARGE] * 3


def test_tapes_share_a_pool_by_its_handle_and_none_without(source: torch.Tensor) -> None:
    handle, one, other = object(), Tape(), Tape()
    first, second = one.record(plus(1, source)), other.record(plus(2, source))
    second.replay()
    first.replay()
    assert second.outputs.tolist() == [3, 4, 5]
    first, second = Tape(handle).record(plus(1, source)), Tape(handle).record(plus(2, source))
    second.replay()
    first.replay()
    assert second.outputs.tolist() == [LARGE] * 3
    assert Tape(handle).pool is Tape(handle).pool


def test_the_segments_of_one_callable_keep_each_other_s_memory(source: torch.Tensor) -> None:
    tape = Tape()

    @gg.eager_break
    def outside(values: torch.Tensor) -> torch.Tensor:
        return values * 2

    def run() -> dict[str, torch.Tensor]:
        early = source + 1
        late = outside(early) + 1
        return {"early": early, "late": late}

    first = tape.record(plus(0, source))
    segmented = record_segments(tape, run)
    segmented.replay()
    assert {name: leaf.tolist() for name, leaf in segmented.outputs.items()} == {"early": [2, 3, 4], "late": [5, 7, 9]}
    first.replay()
    assert all(leaf.tolist() == [LARGE] * 3 for leaf in segmented.outputs.values())
    segmented.replay()
    assert {name: leaf.tolist() for name, leaf in segmented.outputs.items()} == {"early": [2, 3, 4], "late": [5, 7, 9]}


def test_a_pool_keeps_nothing_of_a_recording_that_was_closed_or_dropped(source: torch.Tensor) -> None:
    tape = Tape()
    first = tape.record(plus(0, source))
    outputs = []
    for close in (True, False):
        recording = tape.record(plus(1, source))
        outputs.append(weakref.ref(recording.outputs))
        if close:
            recording.close()
    del recording
    gc.collect()
    first.replay()
    assert [output() for output in outputs] == [None, None]


def runner_of(handle: object, amount: int, **config: Any) -> gg.Runner:
    registry = gg.Registry()
    contract = gg.PrepContract(name="one", reads={"seq_lens": 0}, outputs={"lens": "request"}, modes={gg.Mode.DECODE})
    registry.register(contract)(lambda view: {"lens": view.seq_lens + amount})
    runner = gg.Runner(
        slots=[gg.Slot("seq_lens", axis="request", dtype=torch.int64, pad=0)],
        ladder=[2, 4],
        registry=registry,
        prep="one",
        forward=lambda view, metadata: metadata["lens"] * 10,
        device="cpu",
        hooks=gg.CaptureHooks(pool=handle),
        config=gg.RunnerConfig(**config),
    )
    runner.capture(progress=False)
    return runner


@pytest.mark.parametrize("shared", [True, False])
def test_runners_of_one_pool_read_each_other_s_outputs_in_the_order_of_their_capture(shared: bool) -> None:
    """What a runner gave is there after the replay of one captured behind it, and of any runner of another pool."""
    handle = object() if shared else None
    first, second = runner_of(handle, 1), runner_of(handle, 2)
    given = first.replay(gg.Batch(3, {"seq_lens": [1, 2, 3]})).outputs
    again = second.replay(gg.Batch(3, {"seq_lens": given})).outputs
    assert given.tolist() == [20, 30, 40]
    assert again.tolist() == [220, 320, 420]
    chained = first.replay(gg.Batch(3, {"seq_lens": again})).outputs  # a source is read before anything is spoiled
    assert chained.tolist() == [2210, 3210, 4210]
    assert again.tolist() == ([LARGE] * 3 if shared else [220, 320, 420])
    first.close()
    second.close()


def test_outputs_that_are_clones_are_the_caller_s_in_any_order() -> None:
    """``clone_outputs`` takes them out of the pool."""
    handle = object()
    first = runner_of(handle, 1)
    second = runner_of(handle, 2, clone_outputs=True)
    owned = second.replay(gg.Batch(3, {"seq_lens": [1, 2, 3]})).outputs
    first.replay(gg.Batch(3, {"seq_lens": [1, 2, 3]}))
    assert owned.tolist() == [30, 40, 50]
    first.close()
    second.close()
