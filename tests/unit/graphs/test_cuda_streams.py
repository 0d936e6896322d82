"""Who is lent which capture stream, and how workspaces are claimed, over a torch.cuda that only counts."""

from __future__ import annotations

import gc
import itertools
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import pytest
import torch

from graphglue.graphs import cuda_streams
from graphglue.graphs.cuda_streams import Lease

DEVICE = torch.device("cuda", 0)


class Allocator:
    """Take one thread at a time into a pool, as torch's does, and count those it refused as users too."""

    def __init__(self) -> None:
        self.pools: list[Any] = []
        self.inside: list[Any] = []
        self.users, self.num_handles = 0, 0
        self.on: list[Any] = []

    def pool(self) -> Any:
        time.sleep(0.01)  # a second thread that looks now finds none either
        self.pools.append(made := object())
        return made

    @contextmanager
    def use(self, pool: Any, device: Any) -> Iterator[None]:
        self.users += 1
        if pool in self.inside:
            raise RuntimeError("beginAllocateToPool: already recording to mempool_id")
        self.inside.append(pool)
        try:
            yield
        finally:
            self.inside.remove(pool)
            self.users -= 1

    def handle(self) -> None:
        time.sleep(0.01)
        self.num_handles += 1


@pytest.fixture
def allocator(monkeypatch: pytest.MonkeyPatch) -> Allocator:
    made, numbers, ones = Allocator(), itertools.count(1), torch.ones

    @contextmanager
    def device(where: torch.device) -> Iterator[None]:
        made.on.append(where)
        yield

    monkeypatch.setattr(cuda_streams, "_free", {})
    monkeypatch.setattr(cuda_streams, "_pools", {})
    monkeypatch.setattr(cuda_streams, "_made", lambda device: next(numbers))
    monkeypatch.setattr(torch.cuda, "MemPool", made.pool)
    monkeypatch.setattr(torch.cuda, "use_mem_pool", made.use)
    monkeypatch.setattr(torch.cuda, "current_blas_handle", made.handle)
    monkeypatch.setattr(torch.cuda, "stream", nullcontext)
    monkeypatch.setattr(torch.cuda, "device", device)
    monkeypatch.setattr(torch, "ones", lambda *shape, dtype, device: ones(*shape))
    return made


def on_threads(run: Callable[[], Any], count: int = 8) -> list[Exception]:
    raised: list[Exception] = []

    def kept() -> None:
        try:
            run()
        except Exception as error:
            raised.append(error)

    threads = [threading.Thread(target=kept) for _ in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return raised


def test_threads_that_claim_at_once_take_turns_in_one_pool(allocator: Allocator) -> None:
    """Torch refuses the second, and its count of users then stays up, which aborts the process when it exits."""
    assert on_threads(lambda: Lease(DEVICE).claim_workspaces()) == []
    assert allocator.num_handles == 8
    assert len(allocator.pools) == 1
    assert allocator.users == 0


def test_each_device_has_a_pool_made_on_it(allocator: Allocator) -> None:
    for index in (0, 1, 1):
        Lease(torch.device("cuda", index)).claim_workspaces()
    assert len(allocator.pools) == 2
    assert [device.index for device in allocator.on] == [0, 1, 1]


def test_a_stream_is_lent_again_once_its_lease_is_gone(allocator: Allocator) -> None:
    first, second = Lease(DEVICE), Lease(DEVICE)
    assert first.stream != second.stream
    lent = first.stream
    del first
    gc.collect()
    assert Lease(DEVICE).stream == lent
    assert Lease(torch.device("cuda", 1)).stream not in (lent, second.stream)


def test_an_engine_s_stream_is_never_lent(allocator: Allocator) -> None:
    given: Any = object()
    assert Lease(DEVICE, given).stream is given
    gc.collect()
    assert Lease(DEVICE).stream is not given


def test_a_claim_that_fails_leaves_the_pool_and_other_claims(
    allocator: Allocator, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail() -> None:
        raise RuntimeError("out of memory")

    with monkeypatch.context() as patch:
        patch.setattr(torch.cuda, "current_blas_handle", fail)
        with pytest.raises(RuntimeError, match="out of memory"):
            Lease(DEVICE).claim_workspaces()
    Lease(DEVICE).claim_workspaces()
    assert (allocator.users, allocator.inside, len(allocator.pools)) == (0, [], 1)


def test_deterministic_algorithms_that_refuse_products_do_not_keep_others_from_being_captured(
    allocator: Allocator, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refusing(text: str) -> Callable[..., Any]:
        def addmm(*_: Any) -> None:
            raise RuntimeError(text)

        return addmm

    monkeypatch.setattr(
        torch,
        "addmm",
        refusing(
            "Deterministic behavior was enabled with either `torch.use_deterministic_algorithms(True)`, but this "
            "operation is not deterministic because it uses CuBLAS; set CUBLAS_WORKSPACE_CONFIG=:4096:8"
        ),
    )
    Lease(DEVICE).claim_workspaces()
    assert allocator.num_handles == 1
    monkeypatch.setattr(torch, "addmm", refusing("CUBLAS_STATUS_EXECUTION_FAILED"))
    with pytest.raises(RuntimeError, match="EXECUTION_FAILED"):
        Lease(DEVICE).claim_workspaces()


def test_without_the_driver_s_bindings_a_stream_is_torch_s(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[torch.device] = []
    monkeypatch.setattr(cuda_streams, "_free", {})
    monkeypatch.setattr(torch.cuda, "Stream", lambda device: made.append(device) or "torch's")
    for name in ("cuda", "cuda.bindings"):
        monkeypatch.setitem(sys.modules, name, None)
    lease: Any = Lease(DEVICE)
    assert (lease.stream, made) == ("torch's", [DEVICE])
