"""What cuBLAS keeps for a stream stays where captured products have it, whoever drops it (LIFETIME-5).

``torch.compile``'s CUDA graphs drop the workspaces of all streams, and from torch 2.12 on each reset of a graph drops
those of the stream that it was captured on.
"""

from __future__ import annotations

import gc
from collections.abc import Callable
from typing import Any

import pytest
import torch

from graphglue import CaptureError
from graphglue.graphs.cuda import CudaRecorder

LEAST_WORKSPACE = 4 << 20


def segments(stream: torch.cuda.Stream) -> set[tuple[int, int]]:
    """Give address and size of what torch has for a stream, as far as a workspace may lie there."""
    found = [one for one in torch.cuda.memory_snapshot() if one["stream"] == stream.cuda_stream]
    return {(one["address"], one["total_size"]) for one in found if one["total_size"] >= LEAST_WORKSPACE}


def drop_workspaces() -> list[torch.Tensor]:
    """Drop all workspaces, give their memory back, and let other tensors have it."""
    torch.cuda.synchronize()
    torch._C._cuda_clearCublasWorkspaces()
    torch.cuda.empty_cache()
    return [torch.full((1 << 24,), 7, dtype=torch.int32, device="cuda") for _ in range(32)]  # 64 MiB each


def products() -> list[Callable[[], torch.Tensor]]:
    """Give products that are summed up in parts, and some with a bias; small integers, so that no order shows."""
    torch.manual_seed(0)
    made = []
    for rows, inner, columns in ((16, 16384, 64), (1, 8192, 256), (64, 4096, 4096), (8, 32768, 16)):
        one, other = (
            torch.randint(-1, 2, shape, device="cuda").to(torch.bfloat16) for shape in ((rows, inner), (inner, columns))
        )
        bias = torch.randint(-3, 3, (columns,), device="cuda").to(torch.bfloat16)
        made += [lambda a=one, b=other: a @ b, lambda a=one, b=other, c=bias: torch.addmm(c, a, b)]
    return made


def recorded(recorder: CudaRecorder, runs: list[Callable[[], torch.Tensor]]) -> list[Any]:
    with recorder.session():
        for run in runs:
            run()
        recorder.finish()
        return [recorder.record(run) for run in runs]


def assert_right(recordings: list[Any], expected: list[torch.Tensor], junk: list[torch.Tensor]) -> None:
    for _ in range(2):
        for recording, value in zip(recordings, expected, strict=True):
            recording.outputs.fill_(float("nan"))
            recording.replay()
            assert torch.equal(recording.outputs, value)
    assert all(bool((one == 7).all()) for one in junk), "a replay wrote into memory of somebody else"


def test_products_are_right_after_all_workspaces_were_dropped() -> None:
    recorder, runs = CudaRecorder("cuda"), products()
    expected = [run() for run in runs]
    recordings = recorded(recorder, runs)
    assert_right(recordings, expected, drop_workspaces())
    more = recorded(recorder, runs)  # workspaces are claimed anew, and are the old ones' memory
    assert_right([*more, *recordings], [*expected, *expected], drop_workspaces())


def test_a_capture_stream_s_workspace_stays_mapped_and_another_s_does_not() -> None:
    """Show that dropping takes memory away: that of a stream that nobody claimed it for."""
    recorder, plain, run = CudaRecorder("cuda"), torch.cuda.Stream(), products()[0]
    with torch.cuda.stream(plain):
        run()
    recording = recorded(recorder, [run])[0]
    before = {stream: segments(stream) for stream in (plain, recorder._stream)}
    assert all(before.values())
    junk = drop_workspaces()
    assert not segments(plain)
    assert segments(recorder._stream) & before[recorder._stream]
    assert_right([recording], [run()], junk)


def test_a_graph_that_is_reset_or_fails_takes_nothing_from_the_others() -> None:
    recorder, runs = CudaRecorder("cuda"), products()
    expected = [run() for run in runs]
    recordings = recorded(recorder, runs)
    for number in (1, 3):
        recordings[number].close()
    with pytest.raises(CaptureError):
        recorder.record(lambda: runs[0]().sum().item())
    kept = [0, 2, *range(4, len(runs))]
    assert_right([recordings[at] for at in kept], [expected[at] for at in kept], drop_workspaces())


def test_a_stream_is_lent_to_one_recorder_at_a_time_and_kept_by_its_recordings() -> None:
    first, second = CudaRecorder("cuda"), CudaRecorder("cuda")
    shared = {torch.cuda.Stream().cuda_stream for _ in range(64)}  # torch's own, in turn
    assert first._stream != second._stream
    assert not {first._stream.cuda_stream, second._stream.cuda_stream} & shared
    recording, lent = recorded(first, [lambda: torch.ones(4, device="cuda") * 2])[0], first._stream
    del first
    gc.collect()
    others = [CudaRecorder("cuda") for _ in range(8)]
    assert lent not in [one._stream for one in others]
    recording.replay()
    assert recording.outputs.tolist() == [2.0] * 4
    recording.close()
    del recording, others
    gc.collect()
    assert lent in [one._stream for one in [CudaRecorder("cuda") for _ in range(16)]]


def test_an_engine_s_own_stream_is_captured_on_and_stays_the_engine_s() -> None:
    stream, seen = torch.cuda.Stream(), []

    def run() -> torch.Tensor:
        seen.append(torch.cuda.current_stream())
        return torch.ones(4, device="cuda") + 1

    recorder = CudaRecorder("cuda", stream=stream)
    recording = recorded(recorder, [run])[0]
    assert seen == [stream, stream]
    recording.close()
    del recorder, recording
    gc.collect()
    assert stream not in [CudaRecorder("cuda")._stream for _ in range(16)]
