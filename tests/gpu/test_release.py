"""Sleep and wake on CUDA: memory is overwritten, unmapped and mapped again, freed and made elsewhere.

A table behind driver mappings plays a memory saver: its pages go, its addresses stay. Where a graph of the old state
would read memory that is gone, it must not be launched at all, so these tests also pass under a sanitizer.
"""

from __future__ import annotations

import gc
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from cuda.bindings import driver

from graphglue import Batch, CaptureHooks, ClosedError, Mode, PrepContract, Route, RunnerConfig, Shadow, StaleTableError
from graphglue.device.kernel import checked

from .test_runner import LADDER, Engine, as_arrays, as_tensors, captured, draw, keep_busy, meta, model, slots, table

COUNTS = (3, 16, 1, 5, 2, 9)
GARBAGE = 77


def serves(engine: Engine) -> None:
    for start, count in enumerate(COUNTS):
        for kind in (as_tensors, as_arrays):
            step = engine.right(count, start, kind)
            assert step.decision.prep is Route.GLUE
            assert step.decision.forward is Route.GRAPH


def recordings(engine: Engine) -> list[Any]:
    return [engine.runner._units[0].cache.entry(key).recording for key in engine.runner._wanted]


def lose(engine: Engine) -> None:
    """Overwrite slots, metadata and outputs."""
    runner = engine.runner
    caches = [*(unit.cache for unit in runner._units), *([runner._forward] if runner._forward else [])]
    results = [cache.entry(key).result for cache in caches for key in runner._wanted]
    for tensor in [*runner.arena._storage.values(), *torch.utils._pytree.tree_leaves(results)]:
        if isinstance(tensor, torch.Tensor):
            tensor.fill_(GARBAGE)


class Mapped:
    """Memory whose pages can be unmapped and mapped again at the same address, as a memory saver does."""

    def __init__(self, num_bytes: int) -> None:
        torch.cuda.current_stream().synchronize()  # makes the context current
        self._place = driver.CUmemAllocationProp()
        self._place.type = driver.CUmemAllocationType.CU_MEM_ALLOCATION_TYPE_PINNED
        self._place.location.type = driver.CUmemLocationType.CU_MEM_LOCATION_TYPE_DEVICE
        self._place.location.id = torch.cuda.current_device()
        flags = driver.CUmemAllocationGranularity_flags.CU_MEM_ALLOC_GRANULARITY_MINIMUM
        unit = int(checked(driver.cuMemGetAllocationGranularity(self._place, flags)))
        self.num_bytes = -(-num_bytes // unit) * unit
        self.address = checked(driver.cuMemAddressReserve(self.num_bytes, 0, 0, 0))
        self.map()

    def map(self) -> None:
        self._pages = checked(driver.cuMemCreate(self.num_bytes, self._place, 0))
        checked(driver.cuMemMap(self.address, self.num_bytes, 0, self._pages, 0))
        access = driver.CUmemAccessDesc()
        access.location = self._place.location
        access.flags = driver.CUmemAccess_flags.CU_MEM_ACCESS_FLAGS_PROT_READWRITE
        checked(driver.cuMemSetAccess(self.address, self.num_bytes, [access], 1))

    def unmap(self) -> None:
        torch.cuda.synchronize()
        checked(driver.cuMemUnmap(self.address, self.num_bytes))
        checked(driver.cuMemRelease(self._pages))

    def tensor(self, *shape: int, offset: int = 0) -> torch.Tensor:
        """Give an int64 tensor over it, ``offset`` bytes from its start."""
        place = (int(self.address) + offset, False)
        described = {"shape": shape, "typestr": "<i8", "data": place, "version": 2, "strides": None}
        holder = type("Holder", (), {"__cuda_array_interface__": described})()
        return torch.as_tensor(holder, device="cuda")


@pytest.mark.parametrize("recapture", [False, True])
def test_pages_that_were_unmapped_and_mapped_again(recapture: bool) -> None:
    memory = Mapped(1 << 20)
    t = memory.tensor(19, 32)
    t.copy_(table())
    buffers = {name: memory.tensor(16, offset=(1 << 16) * (1 + n)) for n, name in enumerate(("seq_lens", "ids"))}
    engine = captured(t=t, slots=slots(**buffers))
    serves(engine)
    before = recordings(engine)
    engine.runner.release()
    memory.unmap()
    with pytest.raises(ClosedError, match="asleep since release"):
        engine.step(3)
    memory.map()
    memory.tensor(memory.num_bytes // 8).fill_(GARBAGE)
    t.copy_(table())  # the engine's to restore
    assert len(engine.runner.resume(recapture=recapture)) == len(LADDER)
    assert all(one is other for one, other in zip(before, recordings(engine))) is not recapture
    serves(engine)
    engine.runner.close()


@pytest.mark.parametrize("keep_keys", [True, False])
@pytest.mark.parametrize("recapture", [None, False])
def test_contents_that_were_lost(keep_keys: bool, recapture: bool | None) -> None:
    engine = captured(config=RunnerConfig(shadow=Shadow(first=3, every=4)))
    serves(engine)
    engine.runner.release(keep_keys)
    lose(engine)
    comparison = engine.runner._stepper.shadow._comparison
    for tensor in (comparison._head, comparison._window, *comparison._ends):
        tensor.fill_(GARBAGE)
    engine.runner.resume(recapture=recapture)
    serves(engine)
    verdicts = engine.runner.stats()["shadow"]
    assert verdicts["passed"] > 0
    assert (verdicts["mismatched"], verdicts["failed"]) == (0, 0)


def test_release_waits_for_steps_that_are_queued() -> None:
    engine = captured()
    engine.right(3)
    busy = keep_busy()
    engine.step(3, kind=as_arrays)  # an upload would wait for the device
    assert not busy.query(), "the GPU was not busy: nothing was queued"
    engine.runner.release()
    assert busy.query()
    engine.runner.resume(contents_lost=False)
    serves(engine)


def test_dropped_keys_give_their_memory_back_to_the_driver() -> None:
    def forward(view: Any, metadata: Any) -> Any:
        large = view.ids.float()[:, None].expand(-1, 1 << 22).contiguous()  # 256 MiB at bucket 16
        return {**model(view, metadata), "sum": (large * 2).sum(1)}

    engine = Engine(forward=forward)
    torch.cuda.empty_cache()
    idle = torch.cuda.memory_reserved()
    engine.runner.capture()
    serves_with(engine, forward)
    torch.cuda.synchronize()
    held = torch.cuda.memory_reserved()
    assert held - idle > 200 << 20
    engine.runner.release(keep_keys=False)
    assert torch.cuda.memory_reserved() - idle < 32 << 20
    engine.runner.resume()
    serves_with(engine, forward)


def serves_with(engine: Engine, forward: Any) -> None:
    engine.forward = forward
    for start, count in enumerate(COUNTS):
        assert engine.right(count, start).decision.forward is Route.GRAPH


def test_tables_that_were_freed_and_made_elsewhere() -> None:
    engine = captured(t=table())
    engine.runner.release(keep_keys=False)
    gone = weakref.ref(engine.t)
    engine.t = None
    gc.collect()
    torch.cuda.empty_cache()
    assert gone() is None
    with pytest.raises(StaleTableError, match="were freed"):
        engine.runner.resume()
    spacer = torch.empty(1 << 20, device="cuda")
    engine.t = table(5)
    engine.runner.rebind_table("t", engine.t)
    engine.runner.resume()
    serves(engine)
    assert spacer is not None


def test_a_moved_table_behind_a_callable_is_never_read_where_it_was() -> None:
    kept = [table()]
    engine = captured(tables={"t": lambda: kept[0]}, t=kept[0])
    engine.runner.release()
    old, kept[0] = kept[0], table(9)
    engine.t = kept[0]
    old.fill_(-1)
    engine.runner.resume(contents_lost=False, recapture=False)
    serves(engine)


def test_weights_that_moved_are_found_or_recorded_anew() -> None:
    class Weights:
        scale = torch.tensor([3], device="cuda")

        def __call__(self, view: Any, metadata: Any) -> Any:
            return {name: leaf * self.scale for name, leaf in model(view, metadata).items()}

    weights = Weights()
    engine = captured(forward=weights)
    for recapture in (False, True):
        engine.runner.release()
        old = weights.scale  # held, so that a graph that reads it reads something
        weights.scale = old + 2
        engine.runner.resume(contents_lost=False, recapture=recapture)
        serves_with(engine, weights)


def test_kept_keys_are_checked_through_their_one_launch_and_stay() -> None:
    engine = captured()
    serves(engine)
    launched, before = engine.runner.stats()["one_launch"], recordings(engine)
    engine.runner.release()
    engine.runner.resume(contents_lost=False)
    assert engine.runner.stats()["one_launch"] == launched  # checks are no steps
    assert all(one is other for one, other in zip(before, recordings(engine)))
    serves(engine)


def test_a_forward_that_draws_random_numbers_is_recorded_anew() -> None:
    def forward(view: Any, metadata: Any) -> Any:
        return {"noise": torch.rand(view.ids.shape[0], device="cuda")}

    engine = captured(forward=forward)
    before = [engine.runner._forward.entry(key).recording for key in engine.runner._wanted]
    engine.runner.release()
    engine.runner.resume(contents_lost=False)
    after = [engine.runner._forward.entry(key).recording for key in engine.runner._wanted]
    assert not any(one is other for one, other in zip(before, after))
    drawn = [engine.step(3).outputs["noise"].tolist() for _ in range(4)]
    assert len({tuple(numbers) for numbers in drawn}) == 4


def test_an_adopted_forward_is_kept_with_the_metadata_that_it_reads() -> None:
    buffers = {"ids": torch.zeros(16, dtype=torch.int64, device="cuda")}
    engine = captured(forward=None, slots=slots(**buffers))
    metadata = engine.runner.prepare(Batch(8, as_tensors(draw(8)))).metadata
    graph = torch.cuda.CUDAGraph(keep_graph=True)
    with torch.cuda.graph(graph):
        outputs = buffers["ids"][:8] + metadata["positions"]
    engine.runner.adopt_forward(8, graph, outputs)
    engine.runner.release()
    lose(engine)
    engine.runner.resume(recapture=False)
    sources = draw(8, 4)
    step = engine.runner.replay(Batch(8, as_tensors(sources)))
    assert step.decision.forward is Route.GRAPH
    assert step.outputs.tolist() == [a + b - 1 for a, b in zip(sources["ids"], sources["seq_lens"])]
    engine.runner.release()
    engine.runner.resume()
    assert engine.runner.replay(Batch(8, as_tensors(sources))).decision.forward is Route.EAGER


def test_a_staged_step_does_not_outlive_sleep() -> None:
    engine = captured(config=RunnerConfig(staging=True))
    engine.right(2)
    assert engine.runner.stage(Batch(3, as_tensors(draw(3))))
    engine.runner.release()
    lose(engine)
    engine.runner.resume(recapture=False)
    serves(engine)
    assert engine.runner.stats()["staging"]["staged_taken"] == 0


def test_memory_is_flat_over_rounds_of_sleep() -> None:
    engine = captured()
    seen = []
    for number in range(8):
        engine.runner.release(keep_keys=number % 2 == 0)
        engine.runner.resume(contents_lost=number % 3 != 0)
        engine.right(3)
        torch.cuda.synchronize()
        gc.collect()
        torch.cuda.empty_cache()
        seen.append(torch.cuda.memory_reserved())
    assert max(seen[4:]) <= max(seen[:4])


def test_two_runners_in_one_pool_sleep_and_wake() -> None:
    hooks = CaptureHooks(pool=torch.cuda.graph_pool_handle(), stream=torch.cuda.Stream())
    one, other = captured(hooks=hooks), captured(hooks=hooks)
    for engine in (one, other):
        engine.runner.release()
    for engine in (one, other):
        lose(engine)
    for engine in (one, other):
        engine.runner.resume()
    for engine in (one, other, one):
        serves(engine)


@pytest.mark.parametrize("keep_keys", [True, False])
def test_a_runner_alone_in_an_engine_s_pool_is_recorded_anew(keep_keys: bool) -> None:
    """The pool dies with its last graph: torch refuses its handle, at once or after its memory was given back."""
    engine = captured(hooks=CaptureHooks(pool=torch.cuda.graph_pool_handle()))
    for _ in range(2):
        engine.runner.release(keep_keys)
        assert len(engine.runner.resume()) == len(LADDER)
        serves(engine)


def test_it_sleeps_on_one_stream_and_serves_on_another() -> None:
    engine = captured()
    with torch.cuda.stream(torch.cuda.Stream()):
        engine.right(3)
        engine.runner.release()
        lose(engine)
        torch.cuda.synchronize()
        engine.runner.resume(recapture=False)
    serves(engine)


class CustomAllReduce:
    """Read a pointer table at replay that is filled when the session ends; NaN stands for an unknown address."""

    def __init__(self) -> None:
        self.known = torch.full((64,), torch.nan, device="cuda")
        self.open, self.number, self.noted = False, 0, list[int]()

    @contextmanager
    def capture(self) -> Iterator[None]:
        self.open = True
        try:
            yield
            for number in self.noted:
                self.known[number] = 2.0
        finally:
            self.open, self.noted = False, []

    def __call__(self, rows: torch.Tensor) -> torch.Tensor:
        if not self.open:
            return rows * 2
        if not torch.cuda.is_current_stream_capturing():
            return torch.zeros_like(rows)
        self.noted.append(self.number)
        self.number += 1
        return rows * self.known[self.number - 1]


def test_an_all_reduce_that_registers_at_the_end_of_its_session() -> None:
    all_reduce = CustomAllReduce()

    def forward(view: Any, metadata: Any) -> Any:
        return {"sum": all_reduce(all_reduce(view.ids.float() + metadata["positions"]) + 1)}

    def twin(view: Any, metadata: Any) -> Any:
        return {"sum": ((view.ids.float() + metadata["positions"]) * 2 + 1) * 2}

    contract = PrepContract(
        name="meta", reads={"seq_lens": 1, "rows": 0, "loc": 0}, tables=("t",), modes={Mode.DECODE},
        outputs={"pages": "request", "positions": "request", "cu": "offset", "where": "token"},
    )  # fmt: skip
    engine = captured(
        prep=meta, contract=contract, forward=forward, hooks=CaptureHooks(session=all_reduce.capture)
    )  # fmt: skip
    serves_with(engine, twin)
    engine.runner.release()
    engine.runner.resume()
    assert all_reduce.number == 4 * len(LADDER)
    serves_with(engine, twin)
    engine.runner.release()
    engine.runner.resume(contents_lost=False)
    assert all_reduce.number == 4 * len(LADDER)
    serves_with(engine, twin)
