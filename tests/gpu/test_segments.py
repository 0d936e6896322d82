"""Segmented recordings on CUDA: the contract, and what only a GPU has: graphs, one pool, streams, one launch."""

from __future__ import annotations

import gc
from typing import Any

import pytest
import torch
from hypothesis import given, settings

from graphglue import CaptureError, Slot
from graphglue.core.binding import Write
from graphglue.device.base import open_device
from graphglue.device.launch import ParentLaunch
from graphglue.graphs.cuda import CudaRecorder
from graphglue.graphs.segments import eager_break, record_segments
from tests.property.segment_programs import steps
from tests.property.test_segments import REPLAYS, check
from tests.unit.graphs.recorder_contract import inputs_on, same
from tests.unit.graphs.segments_contract import *  # noqa: F403
from tests.unit.graphs.segments_contract import check_usable, doubled

DEVICE = torch.device("cuda", 0)


@pytest.fixture(scope="module")
def recorder() -> CudaRecorder:
    return CudaRecorder(DEVICE)


@settings(max_examples=50)
@given(program=steps(), replays=REPLAYS)
def test_segmented_replay_equals_eager(program: list[Any], replays: list[tuple[int, int]]) -> None:
    check(CudaRecorder(DEVICE), program, torch.int64, replays)


def test_one_graph_per_segment_in_one_pool(recorder: CudaRecorder) -> None:
    ints, *_ = inputs_on(DEVICE)
    recording = record_segments(recorder, lambda: doubled(doubled(ints + 1) * 3) - 1)
    assert len(recording.segments) == 3
    assert len({tuple(segment.graph.pool()) for segment in recording.segments}) == 1
    recording.replay()
    assert same(recording.outputs, (ints + 1) * 12 - 1)


def layers(hidden: torch.Tensor, num_layers: int) -> torch.Tensor:
    for _ in range(num_layers):
        hidden = doubled(hidden + 1) * 0.25
    return hidden


def with_workspaces() -> CudaRecorder:
    """Make a recorder that has what cuBLAS keeps for its stream, which is no bucket's memory."""
    made = CudaRecorder(DEVICE)
    with made.session():
        return made


def reserved(run: Any) -> int:
    torch.cuda.empty_cache()
    before = torch.cuda.memory_reserved()
    keep = run()
    torch.cuda.empty_cache()
    used = torch.cuda.memory_reserved() - before
    del keep
    return used


def test_bridges_and_arguments_do_not_keep_pool_memory() -> None:
    """Thirty-two layers need about what two need: intermediates and bridges are used again."""
    source = torch.zeros(4 << 20, device=DEVICE)  # 16 MiB

    def used(num_layers: int) -> int:
        mine = with_workspaces()
        return reserved(lambda: record_segments(mine, lambda: layers(source, num_layers)))

    assert used(32) <= used(2) + 2 * source.nbytes


def test_smaller_buckets_use_the_memory_of_the_largest() -> None:
    source, mine = torch.zeros(4 << 20, device=DEVICE), with_workspaces()

    def all_of(sizes: list[int]) -> list[Any]:
        # Outputs are held, so each bucket gives back a small one.
        return [record_segments(mine, lambda size=size: layers(source[:size], 8)[:1].clone()) for size in sizes]

    largest = reserved(lambda: all_of([4 << 20]))
    mine = with_workspaces()
    many = reserved(lambda: all_of([(4 << 20) // n for n in range(1, 13)]))
    assert many <= 1.3 * largest


@pytest.mark.parametrize("strict", [True, False])
def test_contents_hold_while_memory_is_used_again(strict: bool) -> None:
    source, mine = torch.arange(1 << 18, device=DEVICE, dtype=torch.float64), CudaRecorder(DEVICE)
    recording = record_segments(mine, lambda: layers(source, 6), strict=strict)
    gc.collect()
    torch.cuda.empty_cache()
    for _ in range(3):
        source.add_(3)
        noise = [torch.full((1 << 18,), float("nan"), device=DEVICE, dtype=torch.float64) for _ in range(8)]
        del noise
        recording.replay()
        assert same(recording.outputs, layers(source, 6))


def test_random_numbers_advance_through_segments_and_breaks(recorder: CudaRecorder) -> None:
    floats = inputs_on(DEVICE)[1]
    noisy = eager_break(lambda x: x + torch.rand_like(x))

    def run() -> torch.Tensor:
        return noisy(floats + torch.rand_like(floats)) + torch.rand_like(floats)

    recording = record_segments(recorder, run)
    torch.manual_seed(5)
    expected = [run() for _ in range(3)]
    torch.manual_seed(5)
    for one in expected:
        recording.replay()
        assert same(recording.outputs, one)


# --- streams ---


def test_a_side_stream_is_joined_at_a_break_and_forked_again_behind_it(recorder: CudaRecorder) -> None:
    ints, side = inputs_on(DEVICE)[0], torch.cuda.Stream()

    def run() -> torch.Tensor:
        main = torch.cuda.current_stream()
        side.wait_stream(main)
        with torch.cuda.stream(side):
            beside = ints * 3
        cut = doubled(ints + 1)
        with torch.cuda.stream(side):
            beside = beside + 1
        main.wait_stream(side)
        return cut + beside

    recording = record_segments(recorder, run)
    for _ in range(3):
        ints.add_(1)
        recording.replay()
        assert same(recording.outputs, (ints + 1) * 2 + ints * 3 + 1)


def test_a_break_on_a_side_stream_is_refused_by_name(recorder: CudaRecorder) -> None:
    ints, side = inputs_on(DEVICE)[0], torch.cuda.Stream()

    def run() -> torch.Tensor:
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            return doubled(ints + 1)

    with pytest.raises(CaptureError, match=r"break 0 \('doubled'\): it is reached on .*join the side stream"):
        record_segments(recorder, run)
    check_usable(recorder)


def test_an_unseen_side_stream_that_is_not_joined_is_refused(recorder: CudaRecorder) -> None:
    """The error says where (STREAM-ORDER-6)."""
    ints, side = inputs_on(DEVICE)[0], torch.cuda.Stream()

    def run() -> torch.Tensor:
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            ints * 3
        return doubled(ints + 1)

    with pytest.raises(CaptureError, match=r"break 0.*(side stream|valid graph)"):
        record_segments(recorder, run, strict=False)
    check_usable(recorder)


def test_a_replay_runs_on_the_callers_stream(recorder: CudaRecorder) -> None:
    ints, *_ = inputs_on(DEVICE)
    recording = record_segments(recorder, lambda: doubled(ints + 1) * 3)
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        torch.cuda._sleep(20_000_000)
        ints.fill_(7)
        recording.replay()
        seen = recording.outputs.clone()
    torch.cuda.current_stream().wait_stream(stream)
    assert same(seen, torch.full_like(ints, 48))


def test_recording_is_ordered_behind_the_callers_work(recorder: CudaRecorder) -> None:
    ints, seen = inputs_on(DEVICE)[0], []
    keep = eager_break(lambda x: seen.append(x.clone()) or x)
    torch.cuda.synchronize()
    torch.cuda._sleep(20_000_000)
    ints.fill_(9)
    record_segments(recorder, lambda: keep(ints + 1))
    assert same(seen[0], torch.full_like(ints, 10))


# --- one launch ---


def test_fill_prep_and_first_segment_are_one_launch(recorder: CudaRecorder) -> None:
    device = open_device("cuda")
    slots = {"n": Slot("n", "request", torch.int64, 1)}
    target = torch.ones(8, dtype=torch.int64, device=DEVICE)
    owned = [(target.data_ptr(), target.data_ptr() + target.nbytes)]
    fill = device.bucket_fill(slots, {"n": target}, owned)
    prep = recorder.record(lambda: target + 1)
    recording = record_segments(recorder, lambda: doubled(prep.outputs * 5) + 1)
    launch = device.compose(fill, [prep], recording.first, None, None)
    assert isinstance(launch, ParentLaunch), launch.fallback
    for value in (3, 4):
        source = torch.full((5,), value, dtype=torch.int64, device=DEVICE)
        fill.load([_write(slots["n"], source)])
        recording.replay(lead=launch.run)
        filled = torch.ones_like(target)
        filled[:5] = value
        assert same(recording.outputs, (filled + 1) * 10 + 1)
    recording.replay()  # the first segment's own graph goes on alone
    assert same(recording.outputs, (filled + 1) * 10 + 1)
    launch.close()


def _write(slot: Slot, source: torch.Tensor) -> Write:
    return Write(slot, source, 5, 8, 1)


def test_replays_allocate_nothing_that_stays(recorder: CudaRecorder) -> None:
    source = torch.zeros(1 << 20, device=DEVICE)
    recording = record_segments(recorder, lambda: layers(source, 4))
    recording.replay()
    torch.cuda.synchronize()
    allocated = torch.cuda.memory_allocated()
    for _ in range(20):
        recording.replay()
    torch.cuda.synchronize()
    assert torch.cuda.memory_allocated() == allocated
