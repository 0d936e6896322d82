"""The contract, kept by CUDA graphs, and what only CUDA does: uploads, failed captures, streams, memory."""

from __future__ import annotations

import gc
from collections.abc import Callable
from typing import Any

import pytest
import torch

from graphglue.errors import CaptureError
from graphglue.graphs.cuda import CudaRecorder
from tests.unit.graphs.recorder_contract import *  # noqa: F403
from tests.unit.graphs.recorder_contract import inputs_on, same


@pytest.fixture(scope="module")
def recorder() -> CudaRecorder:
    return CudaRecorder("cuda")


def check_usable(recorder: CudaRecorder) -> None:
    """Allocate, draw, record, replay and compare: all that a failed capture could have broken."""
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    ints, floats, _ = inputs_on(recorder.device)
    assert bool((torch.rand(8, device=recorder.device) < 1).all())
    assert not torch.cuda.is_current_stream_capturing()
    torch.zeros(8).pin_memory()
    floats.normal_()
    recording = recorder.record(lambda: (ints * 2, torch.rand(8, device=recorder.device)))
    recording.replay()
    first = recording.outputs[1].clone()
    recording.replay()
    assert same(recording.outputs[0], ints * 2)
    assert not same(recording.outputs[1], first)


UPLOADS: dict[str, Callable[[torch.Tensor, torch.Tensor], Any]] = {
    "copy_": lambda ints, host: ints.copy_(host),
    "_to_copy": lambda ints, host: host.to(ints.device),
    "copy_ of pinned memory": lambda ints, host: ints.copy_(host.pin_memory(), non_blocking=True),
    "index": lambda ints, host: ints[host],
    "index_put": lambda ints, host: ints.index_put_((host,), ints),
    "frombuffer": lambda ints, host: torch.frombuffer(bytearray(64), dtype=torch.int64).to(ints.device),
    "slice assignment": lambda ints, host: ints[:4].copy_(host[:4]),
}


@pytest.mark.parametrize("name", UPLOADS)
def test_an_upload_is_refused(recorder: CudaRecorder, name: str) -> None:
    ints, *_ = inputs_on(recorder.device)
    host = torch.arange(8)
    with pytest.raises(CaptureError, match=r"takes contents from host memory.*test_recorder_contract\.py:"):
        recorder.record(lambda: UPLOADS[name](ints, host))
    check_usable(recorder)


def test_a_download_is_refused(recorder: CudaRecorder) -> None:
    ints, *_ = inputs_on(recorder.device)
    with pytest.raises(CaptureError, match="reads a tensor on the host"):
        recorder.record(lambda: ints.to("cpu", non_blocking=True))
    check_usable(recorder)


def test_an_address_may_be_taken(recorder: CudaRecorder) -> None:
    ints, *_ = inputs_on(recorder.device)
    recording = recorder.record(lambda: (ints + 1, ints.data_ptr()))
    recording.replay()
    assert same(recording.outputs, (ints + 1, ints.data_ptr()))


def _sync(ints: torch.Tensor) -> Any:
    return ints + ints.sum().item()


def _draw_then_sync(ints: torch.Tensor) -> Any:
    return torch.rand(8, device=ints.device) + ints.sum().item()


def _swallowed_sync(ints: torch.Tensor) -> Any:
    try:
        return ints + int(ints[0])
    except Exception:
        return ints + 1


def _unjoined_stream(ints: torch.Tensor) -> Any:
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        return ints + 1


def _legacy_upload(ints: torch.Tensor) -> Any:
    return ints + torch.arange(8).to(ints.device)


def _plain_error(ints: torch.Tensor) -> Any:
    doubled = ints * 2
    raise KeyError(str(doubled.shape))


@pytest.mark.parametrize(
    "program", [_sync, _draw_then_sync, _swallowed_sync, _unjoined_stream, _legacy_upload, _plain_error]
)
def test_a_capture_that_the_device_invalidates_leaves_all_else_usable(
    recorder: CudaRecorder, program: Callable[[torch.Tensor], Any]
) -> None:
    ints, *_ = inputs_on(recorder.device)
    earlier = recorder.record(lambda: ints * 3)
    for _ in range(2):
        with pytest.raises(CaptureError):
            recorder.record(lambda: program(ints), strict=False)
    check_usable(recorder)
    check_usable(CudaRecorder(recorder.device))
    earlier.replay()
    assert same(earlier.outputs, ints * 3)


def test_a_stream_that_is_captured_already_is_left_alone(recorder: CudaRecorder) -> None:
    ints, *_ = inputs_on(recorder.device)
    stream, outer = torch.cuda.Stream(), torch.cuda.CUDAGraph()
    mine = CudaRecorder(recorder.device, stream=stream)
    with torch.cuda.graph(outer, stream=stream):
        doubled = ints * 2
        with pytest.raises(CaptureError, match="captured already"):
            mine.record(lambda: ints + 1)
    outer.replay()
    assert same(doubled, ints * 2)


def test_a_replay_runs_on_the_callers_stream(recorder: CudaRecorder) -> None:
    ints, *_ = inputs_on(recorder.device)
    recording = recorder.record(lambda: ints * 2)
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        torch.cuda._sleep(20_000_000)
        ints.fill_(7)  # queued behind the sleep: a replay on another stream would not see it
        recording.replay()
        seen = recording.outputs.clone()
    torch.cuda.current_stream().wait_stream(stream)
    assert same(seen, torch.full_like(ints, 14))


def test_a_session_is_ordered_after_and_before_the_callers_work(recorder: CudaRecorder) -> None:
    ints, *_ = inputs_on(recorder.device)
    torch.cuda._sleep(20_000_000)
    ints.fill_(3)
    with recorder.session():
        assert torch.cuda.current_stream() != torch.cuda.default_stream()
        seen = ints * 2
        torch.cuda._sleep(20_000_000)
        ints.fill_(4)
    assert same((seen, ints * 1), (torch.full_like(ints, 6), torch.full_like(ints, 4)))


def test_replays_allocate_nothing_and_close_gives_memory_back(recorder: CudaRecorder) -> None:
    mine = CudaRecorder(recorder.device)
    big = torch.zeros(1 << 22, device=mine.device)
    torch.cuda.synchronize()
    before = torch.cuda.memory_reserved()
    recording = mine.record(lambda: (big + 1).mul_(2))
    assert recording.num_bytes >= big.nbytes
    allocated = torch.cuda.memory_allocated()
    for _ in range(50):
        recording.replay()
    torch.cuda.synchronize()
    assert torch.cuda.memory_allocated() == allocated
    assert bool((recording.outputs == 2).all())
    recording.close()
    gc.collect()
    torch.cuda.empty_cache()
    assert torch.cuda.memory_reserved() <= before + (4 << 20)


def test_recordings_share_the_pool_that_was_given(recorder: CudaRecorder) -> None:
    pool = torch.cuda.graph_pool_handle()
    mine = CudaRecorder(recorder.device, pool=pool)
    ints, *_ = inputs_on(recorder.device)
    first, second = mine.record(lambda: ints + 1), mine.record(lambda: ints + 2)
    assert first.graph.pool() == second.graph.pool() == pool
    first.replay()
    second.replay()
    assert same((first.outputs, second.outputs), (ints + 1, ints + 2))


def test_a_table_that_nobody_else_holds_stays_alive(recorder: CudaRecorder) -> None:
    holder = {"table": torch.full((1 << 20,), 5, device=recorder.device)}
    recording = recorder.record(lambda: holder["table"] + 1)
    holder.clear()
    gc.collect()
    torch.cuda.empty_cache()
    torch.full((1 << 20,), 9, device=recorder.device)
    recording.replay()
    assert bool((recording.outputs == 6).all())
