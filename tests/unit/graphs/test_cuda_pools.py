"""Which memory pool a CUDA recorder captures into, over an allocator that only counts users.

The rules are those of torch's two caching allocators, for the device and for pinned memory: a pool lives as long as a
graph uses it, and the handle of one whose last graph is gone is refused, until nothing of it is left.
"""

from __future__ import annotations

import itertools
from collections import Counter
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from graphglue.errors import CaptureError
from graphglue.graphs import cuda

Pool = tuple[int, int]


class Allocators:
    """Count the users of each pool, on the device and on the host."""

    def __init__(self) -> None:
        self.counts: tuple[Counter[Pool], Counter[Pool]] = Counter(), Counter()
        self.underway: list[Pool] = []
        self.numbers = itertools.count(1)
        self.is_busy = False

    def begin(self, pool: Pool) -> None:
        if self.is_busy:
            raise RuntimeError("a capture is not possible now")
        for users in self.counts:
            if pool in users and not users[pool]:
                raise RuntimeError("INTERNAL ASSERT FAILED: it->second->use_count > 0")
            users[pool] += 1
            if users is self.counts[0]:
                self.underway.append(pool)

    def end(self, index: int, pool: Pool) -> None:
        if pool not in self.underway:
            raise RuntimeError("endAllocatePool: not currently recording to mempool_id")
        self.underway.remove(pool)

    def release(self, index: int, pool: Pool) -> None:
        self.counts[0][pool] -= 1

    def handle(self) -> Pool:
        return 0, next(self.numbers)


@pytest.fixture
def allocators(monkeypatch: pytest.MonkeyPatch) -> Allocators:
    made = Allocators()

    class Graph:
        """Begins and ends as torch's does."""

        def __init__(self, keep_graph: bool = False) -> None:
            self.pool: Pool | None = None
            self.is_ended = False

        def capture_begin(self, pool: Pool | None = None, capture_error_mode: str = "") -> None:
            pool = pool or (next(made.numbers), 0)
            made.begin(pool)
            self.pool = pool

        def capture_end(self) -> None:
            if self.pool is None:
                raise RuntimeError("operation not permitted in the present state")
            made.end(0, self.pool)
            self.is_ended = True

        def instantiate(self) -> None:
            return

        def reset(self) -> None:
            if self.is_ended and self.pool is not None:
                for users in made.counts:
                    users[self.pool] -= 1
            self.is_ended = False

    nothing = {"current_device": 0, "memory_reserved": 0, "is_current_stream_capturing": False, "Stream": None}
    for name, value in nothing.items():
        monkeypatch.setattr(torch.cuda, name, lambda *_, value=value: value)
    for name in ("device", "stream"):
        monkeypatch.setattr(torch.cuda, name, nullcontext)
    monkeypatch.setattr(torch.cuda, "CUDAGraph", Graph)
    monkeypatch.setattr(torch.cuda, "graph_pool_handle", made.handle)
    monkeypatch.setattr(torch._C, "_cuda_endAllocateToPool", made.end, raising=False)
    monkeypatch.setattr(torch._C, "_cuda_releasePool", made.release, raising=False)
    monkeypatch.setattr(cuda.CudaRecorder, "_reset_generator", lambda self: None)
    lease = SimpleNamespace(stream=None, claim_workspaces=lambda: None)
    monkeypatch.setattr(cuda, "Lease", lambda *_: lease)
    return made


def recorded(recorder: cuda.CudaRecorder, count: int = 3) -> list[Any]:
    return [recorder.record(lambda: torch.ones(2)) for _ in range(count)]


def pools_of(recordings: list[Any]) -> set[Pool]:
    return {recording.pool for recording in recordings}


@pytest.mark.parametrize("is_trimmed", [False, True], ids=["memory kept", "memory given back"])
def test_an_engine_s_pool_that_lost_its_last_graph_is_left_for_a_new_one(
    allocators: Allocators, is_trimmed: bool
) -> None:
    given = allocators.handle()
    recorder = cuda.CudaRecorder("cuda:0", pool=given)
    first = recorded(recorder)
    assert pools_of(first) == {given}
    for recording in first:
        recording.close()
    if is_trimmed:  # the device forgets the pool then, and the host's allocator does not
        del allocators.counts[0][given]
    (fresh,) = pools_of(second := recorded(recorder))
    assert fresh != given
    assert allocators.underway == []
    for recording in second:
        recording.close()
    assert len(pools_of(recorded(recorder))) == 1


def test_an_engine_s_pool_is_kept_while_any_graph_uses_it(allocators: Allocators) -> None:
    given = allocators.handle()
    allocators.begin(given)  # a graph of the engine's own
    allocators.end(0, given)
    recorder = cuda.CudaRecorder("cuda:0", pool=given)
    for _ in range(3):
        made = recorded(recorder)
        assert pools_of(made) == {given}
        for recording in made:
            recording.close()


def test_what_no_other_pool_would_help_leaves_the_engine_s_alone(allocators: Allocators) -> None:
    given = allocators.handle()
    recorder = cuda.CudaRecorder("cuda:0", pool=given)
    allocators.is_busy = True
    with pytest.raises(CaptureError, match="could not begin: a capture is not possible now"):
        recorded(recorder)
    allocators.is_busy = False
    assert pools_of(recorded(recorder)) == {given}
