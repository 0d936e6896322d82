"""The Runner on CUDA: every step is held against a twin that runs eagerly on a freshly built, pad-filled batch.

Results are static memory that the next replay rewrites, so a test that queues many steps clones each
result on the step's stream and compares at the end.
"""

from __future__ import annotations

import gc
import math
import threading
from collections.abc import Callable, Mapping
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from graphglue import (
    RAW_REQUESTS,
    Batch,
    BindError,
    CapacityError,
    CaptureHooks,
    GraphGlueError,
    Key,
    Mode,
    PrepContract,
    Reason,
    Registry,
    Route,
    Runner,
    RunnerConfig,
    Slot,
    StaleTableError,
)
from graphglue.preps import paged_decode

LADDER = [1, 2, 4, 8, 16]
PADS = {"seq_lens": 1, "rows": 0, "loc": 0, "ids": 0}
NAMES = tuple(PADS)
CONTRACT = PrepContract(
    name="meta",
    reads={"seq_lens": 1, "rows": 0, "loc": 0},
    tables=("t",),
    outputs={"pages": "request", "positions": "request", "cu": "offset", "where": "token"},
    modes={Mode.DECODE},
)
BUSY_CYCLES = 1_000_000_000  # about 0.5 s
GLUED = (Route.GLUE, Route.GRAPH, Reason.PADDED, None)
UNPADDED = (Route.GLUE, Route.GRAPH, Reason.UNPADDED, None)


def slots(**storage: torch.Tensor) -> list[Slot]:
    axis = {"seq_lens": "request", "rows": "request", "loc": "token", "ids": "token"}
    return [Slot(name, axis[name], torch.int64, pad, storage=storage.get(name)) for name, pad in PADS.items()]


def table(start: int = 0) -> torch.Tensor:
    return (torch.arange(19 * 32, device="cuda") * 3 + start).reshape(19, 32)


def meta(view: Any) -> dict[str, torch.Tensor]:
    return {
        "pages": view.tables.t[view.rows][:, ::4],
        "positions": view.seq_lens - 1,
        "cu": torch.nn.functional.pad(torch.cumsum(view.seq_lens, 0), (1, 0)),
        "where": view.loc * 2,
    }


def model(view: Any, metadata: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    mixed = view.ids * 1000 + metadata["positions"] * 10 + metadata["pages"].sum(1) + metadata["where"]
    return {"mixed": mixed, "next": mixed % 97 + metadata["cu"][1:]}


def draw(requests: int, start: int = 0) -> dict[str, list[int]]:
    rows = range(start, start + requests)
    return {
        "seq_lens": [2 + row % 29 for row in rows],
        "rows": [1 + row % 18 for row in rows],
        "loc": [5 + row for row in rows],
        "ids": [40 + row * 3 for row in rows],
    }


def as_tensors(sources: Mapping[str, list[int]]) -> dict[str, torch.Tensor]:
    return {name: torch.tensor(numbers, device="cuda") for name, numbers in sources.items()}


def as_arrays(sources: Mapping[str, list[int]]) -> dict[str, np.ndarray]:
    return {name: np.array(numbers) for name, numbers in sources.items()}


def twin_view(sources: Mapping[str, Any], rows: int, t: torch.Tensor) -> Any:
    padded = {name: [*sources.get(name, []), *[pad] * rows][:rows] for name, pad in PADS.items()}
    tensors = {name: torch.tensor(numbers, dtype=torch.int64, device="cuda") for name, numbers in padded.items()}
    return SimpleNamespace(**tensors, tables=SimpleNamespace(t=t), variant=None)


def plain(tree: Any) -> Any:
    if isinstance(tree, torch.Tensor):
        return tree.tolist()
    if isinstance(tree, Mapping):
        return {name: plain(leaf) for name, leaf in tree.items()}
    return tree


def cloned(step: Any) -> tuple[Any, Any]:
    """Queue copies of a step's results on the current stream."""
    copies = [{name: leaf.clone() for name, leaf in tree.items()} for tree in (step.metadata, step.outputs)]
    return copies[0], copies[1]


def assert_results(
    metadata: Any,
    outputs: Any,
    sources: Mapping[str, Any],
    rows: int,
    t: torch.Tensor,
    prep: Any = meta,
    forward: Any = model,
) -> None:
    """Hold a step's metadata and outputs against the twin at ``rows`` rows."""
    raw = len(sources["ids"]) if sources else 0
    view = twin_view(sources, rows, t)
    expected = prep(view)
    assert plain(metadata) == plain(expected)
    if forward is not None:
        assert plain(outputs) == {name: leaf[:raw].tolist() for name, leaf in forward(view, expected).items()}


class Engine:
    """A runner on CUDA with what it was made from."""

    def __init__(self, prep: Any = meta, contract: PrepContract = CONTRACT, **more: Any) -> None:
        registry = Registry()
        registry.register(contract)(prep)
        self.prep, self.forward = prep, more.get("forward", model)
        self.t = more.pop("t", None)
        self.t = table() if self.t is None else self.t
        made: dict[str, Any] = {
            "slots": slots(),
            "ladder": LADDER,
            "registry": registry,
            "prep": contract.name,
            "tables": {"t": self.t},
            "forward": model,
            "device": "cuda",
        }
        self.runner = Runner(**{**made, **more})

    def step(self, requests: int, start: int = 0, kind: Any = as_tensors, **more: Any) -> Any:
        return self.runner.replay(Batch(requests, kind(draw(requests, start)), **more))

    def right(self, requests: int, start: int = 0, kind: Any = as_tensors, **more: Any) -> Any:
        step = self.step(requests, start, kind, **more)
        rows = step.decision.bucket.requests
        assert_results(step.metadata, step.outputs, draw(requests, start), rows, self.t, self.prep, self.forward)
        return step


def why(step: Any) -> tuple[Route, Route, Reason, Reason | None]:
    decision = step.decision
    return decision.prep, decision.forward, decision.reason, decision.forward_reason


def captured(**more: Any) -> Engine:
    engine = Engine(**more)
    engine.runner.capture()
    return engine


def keep_busy(cycles: int = BUSY_CYCLES) -> torch.cuda.Event:
    """Keep the GPU busy; the event tells when it no longer is."""
    torch.cuda.synchronize()
    torch.cuda._sleep(cycles)
    done = torch.cuda.Event()
    done.record()
    return done


# Routes and results.


@pytest.mark.parametrize("kind", [dict, as_tensors, as_arrays], ids=["lists", "device", "numpy"])
def test_every_raw_count_is_glued_and_equal_to_the_eager_twin(kind: Any) -> None:
    engine = captured()
    for requests in range(1, 17):
        for start in (0, 7):
            step = engine.right(requests, start, kind)
            assert why(step) == (UNPADDED if requests in LADDER else GLUED)


def test_paged_decode_equals_its_loop_reference_and_its_eager_twin_for_every_raw_count() -> None:
    t = torch.randint(1, 5000, (40, 128), generator=torch.Generator().manual_seed(0))
    t[0] = 0
    runner = Runner(
        slots=paged_decode.slots(), ladder=LADDER, prep="paged-decode", tables={"req_to_token": t.cuda()}, device="cuda"
    )
    runner.capture()
    pads = {slot.name: slot.pad for slot in paged_decode.slots()}
    for requests in range(1, 17):
        sources = {
            "seq_lens": [1 + (row * 37 + requests) % 127 for row in range(requests)],
            "req_pool_indices": [1 + (row * 11 + requests) % 39 for row in range(requests)],
            "out_cache_loc": [100 + row for row in range(requests)],
        }
        prepared = runner.prepare(Batch(requests, as_arrays(sources)))
        assert prepared.decision.prep is Route.GLUE
        size = prepared.decision.bucket.requests
        padded = {name: numbers + [pads[name]] * (size - requests) for name, numbers in sources.items()}
        assert plain(prepared.metadata) == paged_decode.reference(**padded, req_to_token=t.tolist())
        view = SimpleNamespace(**as_tensors(padded), tables=SimpleNamespace(req_to_token=t.cuda()))
        twin = paged_decode.make()(view)
        for name, leaf in twin.items():
            assert leaf.dtype == prepared.metadata[name].dtype
            assert torch.equal(leaf, prepared.metadata[name])
    runner.close()


def test_all_routes_follow_each_other() -> None:
    engine = Engine()
    assert engine.right(3).decision.reason is Reason.NOT_CAPTURED
    engine.runner.capture()
    assert why(engine.right(3)) == GLUED
    assert why(engine.right(20)) == (Route.EAGER, Route.EAGER, Reason.OVER_LADDER, Reason.OVER_LADDER)
    idle = engine.runner.replay(Batch.idle())
    assert why(idle) == (Route.EAGER, Route.GRAPH, Reason.IDLE_EAGER, None)
    assert_results(idle.metadata, idle.outputs, {}, 1, engine.t)
    lora = engine.right(3, features=frozenset({"lora"}))
    assert why(lora) == (Route.EAGER, Route.GRAPH, Reason.FEATURE_NOT_AUDITED, None)
    assert why(engine.right(4)) == UNPADDED
    assert why(engine.right(3, mode=Mode.DRAFT))[:2] == (Route.EAGER, Route.EAGER)
    assert why(engine.right(3)) == GLUED


def test_host_frozen_a_replay_runs_no_python() -> None:
    calls: list[str] = []

    def prep(view: Any) -> Any:
        calls.append("prep")
        return meta(view)

    def forward(view: Any, metadata: Any) -> Any:
        calls.append("forward")
        return model(view, metadata)

    engine = captured(prep=prep, forward=forward)
    calls.clear()
    for requests in (1, 3, 16, 5):
        engine.step(requests)
    assert calls == []


def test_tail_stale_and_pad_leak_nan_rows_of_an_earlier_batch_reach_nobody() -> None:
    def prep(view: Any) -> Any:
        return {"norm": view.hidden - view.hidden.mean(0)}

    engine = captured(
        prep=prep,
        contract=PrepContract(name="p", reads={"hidden": 0.0}, modes={Mode.DECODE}, outputs={"norm": "token"}),
        slots=[Slot("hidden", "token", torch.float32, 0.0, inner=(4,))],
        tables={},
        forward=lambda view, metadata: metadata["norm"] * 2,
    )
    for _ in range(2):
        engine.runner.replay(Batch(16, {"hidden": torch.full((16, 4), math.nan, device="cuda")}))
        live = torch.arange(12.0, device="cuda").reshape(3, 4)
        step = engine.runner.replay(Batch(3, {"hidden": live}))
        expected = prep(SimpleNamespace(hidden=torch.cat([live, live.new_zeros(1, 4)])))["norm"]
        assert torch.equal(step.metadata["norm"], expected)
        assert torch.equal(step.outputs, expected[:3] * 2)


def test_pad_leak_the_live_count_is_a_device_value() -> None:
    engine = captured(
        prep=lambda view: {"n": view.live + 0},
        contract=PrepContract(name="p", reads={"live": 0}, modes={Mode.DECODE}),
        slots=[Slot("live", "fixed", torch.int32, 0, value=RAW_REQUESTS), Slot("ids", "token", torch.int64, 0)],
        tables={},
        forward=lambda view, metadata: view.ids * 0 + metadata["n"],
    )
    for requests in (3, 8, 5, 1):
        step = engine.runner.replay(Batch(requests, {"ids": list(range(requests))}))
        assert step.metadata["n"].item() == requests
        assert step.outputs.tolist() == [requests] * requests
    assert engine.runner.replay(Batch.idle()).metadata["n"].item() == 0


def test_pad_leak_a_step_depends_on_nothing_before_it() -> None:
    fresh, used = captured(), captured()
    for number in range(10):
        used.step(16 - number % 3, start=number)
    assert plain(fresh.step(3).metadata) == plain(used.step(3).metadata)


# Time.


def test_h2d_staging_host_sources_are_snapshotted_with_any_number_of_replays_queued() -> None:
    engine = captured()
    arrays = as_arrays(draw(3))
    engine.runner.replay(Batch(3, arrays))
    kept, busy = [], keep_busy()
    for start in range(40):  # below the depth of the launch queue, at which a launch waits
        for name, numbers in draw(3, start).items():
            arrays[name][:] = numbers
        kept.append(cloned(engine.runner.replay(Batch(3, arrays))))
        for array in arrays.values():
            array[:] = 1
    assert not busy.query(), "a replay waited for the GPU"
    torch.cuda.synchronize()
    for start, (metadata, outputs) in enumerate(kept):
        assert_results(metadata, outputs, draw(3, start), 4, engine.t)


def test_h2d_staging_live_and_idle_steps_obey_the_same_rule() -> None:
    engine = captured()
    arrays = as_arrays(draw(3))
    engine.runner.replay(Batch(3, arrays))
    engine.runner.replay(Batch.idle())
    kept, busy = [], keep_busy()
    for start in range(15):
        for name, numbers in draw(3, start).items():
            arrays[name][:] = numbers
        kept.append(cloned(engine.runner.replay(Batch(3, arrays))))
        for array in arrays.values():
            array[:] = 1
        kept.append(cloned(engine.runner.replay(Batch.idle())))
    assert not busy.query(), "a replay waited for the GPU"
    torch.cuda.synchronize()
    for start in range(15):
        assert_results(*kept[2 * start], draw(3, start), 4, engine.t)
        assert_results(*kept[2 * start + 1], {}, 1, engine.t)


def test_h2d_staging_mixed_sizes_and_kinds_in_flight() -> None:
    engine = captured()
    kinds = (dict, as_tensors, as_arrays)
    for kind in kinds:
        for requests in (1, 2, 4, 8, 16):
            engine.step(requests, kind=kind)
    keep_busy()
    kept = []
    for turn in range(60):
        requests = 1 + turn * 7 % 16
        sources = kinds[turn % 3](draw(requests, turn))
        step = engine.runner.replay(Batch(requests, sources))
        kept.append((requests, step.decision.bucket.requests, cloned(step)))
        if turn % 3 == 2:
            for array in sources.values():
                array[:] = 1
        del sources, step
    torch.cuda.synchronize()
    for turn, (requests, rows, (metadata, outputs)) in enumerate(kept):
        assert_results(metadata, outputs, draw(requests, turn), rows, engine.t)


def test_lifetime_device_sources_may_be_dropped_right_after_the_call() -> None:
    engine = captured()
    side = torch.cuda.Stream()
    engine.step(3)
    torch.cuda.synchronize()
    for start in range(5):
        sources = as_tensors(draw(3, start))
        torch.cuda.synchronize()
        with torch.cuda.stream(side):
            torch.cuda._sleep(BUSY_CYCLES // 10)
            kept = cloned(engine.runner.replay(Batch(3, sources)))
        del sources
        junk = [torch.full((3,), 7, device="cuda") for _ in range(500)]  # takes the sources' memory, if it is free
        torch.cuda.synchronize()
        assert_results(*kept, draw(3, start), 4, engine.t)
        del junk


def slow_model(view: Any, metadata: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    torch.cuda._sleep(5_000_000)
    made = model(view, metadata)
    torch.cuda._sleep(5_000_000)
    return {name: leaf + 0 for name, leaf in made.items()}


@pytest.mark.parametrize("order", ["default then side", "side then default", "two sides", "all three"])
@pytest.mark.parametrize("kind", [as_tensors, as_arrays], ids=["device", "numpy"])
def test_stream_order_replays_on_changing_streams_do_not_meet(order: str, kind: Any) -> None:
    engine = captured(forward=slow_model)
    default, one, two = torch.cuda.default_stream(), torch.cuda.Stream(), torch.cuda.Stream()
    streams = {
        "default then side": [default, one],
        "side then default": [one, default],
        "two sides": [one, two],
        "all three": [default, one, two, one, default],
    }[order]
    torch.cuda.synchronize()
    kept = []
    for turn in range(12):
        with torch.cuda.stream(streams[turn % len(streams)]):
            requests = (3, 16, 5)[turn % 3]
            sources = kind(draw(requests, turn))
            step = engine.runner.replay(Batch(requests, sources))
            kept.append((requests, step.decision.bucket.requests, cloned(step)))
    torch.cuda.synchronize()
    for turn, (requests, rows, (metadata, outputs)) in enumerate(kept):
        assert_results(metadata, outputs, draw(requests, turn), rows, engine.t)


def test_stream_order_eager_and_glued_steps_on_changing_streams() -> None:
    engine = captured(forward=slow_model)
    streams = [torch.cuda.default_stream(), torch.cuda.Stream()]
    torch.cuda.synchronize()
    kept = []
    for turn in range(12):
        with torch.cuda.stream(streams[turn % 2]):
            requests = (3, 20, 4)[turn % 3]
            features = frozenset({"lora"} if turn % 4 == 1 else ())
            step = engine.step(requests, turn, as_arrays, features=features)
            kept.append((requests, step.decision.bucket.requests, cloned(step)))
    torch.cuda.synchronize()
    for turn, (requests, rows, (metadata, outputs)) in enumerate(kept):
        assert_results(metadata, outputs, draw(requests, turn), rows, engine.t)


def test_stream_order_warm_up_work_is_finished_before_capture() -> None:
    memo: dict[str, torch.Tensor] = {}

    def prep(view: Any) -> Any:
        if "seven" not in memo:
            memo["seven"] = torch.zeros(1, dtype=torch.int64, device="cuda")
            torch.cuda._sleep(BUSY_CYCLES // 5)
            memo["seven"].fill_(7)
        return {**meta(view), "where": view.loc + memo["seven"]}

    engine = captured(prep=prep)
    step = engine.step(3)
    assert why(step) == GLUED
    assert step.metadata["where"].tolist() == [loc + 7 for loc in [*draw(3)["loc"], 0]]


@pytest.mark.parametrize("kind", [dict, as_tensors, as_arrays], ids=["lists", "device", "numpy"])
def test_h2d_staging_the_replay_path_has_no_implicit_sync(kind: Any) -> None:
    engine = captured()
    batches = [Batch(requests, kind(draw(requests, requests))) for requests in (3, 4, 16, 11)]
    for batch in batches:
        engine.runner.replay(batch)
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        kept = [cloned(engine.runner.replay(batch)) for batch in batches * 2]
    finally:
        torch.cuda.set_sync_debug_mode("default")
    for batch, (metadata, outputs) in zip(batches * 2, kept):
        requests = batch.num_requests
        rows = min(size for size in LADDER if size >= requests)
        assert_results(metadata, outputs, draw(requests, requests), rows, engine.t)


# Memory.


def test_rebind_addresses_are_the_same_over_a_hundred_replays() -> None:
    engine = captured()
    places: dict[tuple[Any, ...], int] = {}
    for number in range(100):
        requests = number * 5 % 17
        batch = Batch(requests, as_arrays(draw(requests, number))) if requests else Batch.idle()
        step = engine.runner.replay(batch)
        view, size = engine.runner.view(step.decision.bucket), step.decision.bucket.requests
        for kind, tree in (("slot", dict(view)), ("meta", step.metadata), ("out", step.outputs)):
            for name, leaf in tree.items():
                key = (kind, name) if kind == "slot" else (kind, name, size)
                if leaf.numel():
                    assert places.setdefault(key, leaf.data_ptr()) == leaf.data_ptr(), key
    assert len(places) == 4 + 4 * 5 + 2 * 5


@pytest.mark.parametrize("kind", [as_tensors, as_arrays], ids=["device", "numpy"])
def test_rebind_nothing_is_allocated_per_replay(kind: Any) -> None:
    engine = captured()
    sources = [kind(draw(requests)) for requests in (3, 4, 16)]
    batches = [Batch(len(source["ids"]), source) for source in sources]
    for batch in batches * 6:
        engine.runner.replay(batch)
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated(), torch.cuda.memory_reserved()
    torch.cuda.reset_peak_memory_stats()
    for number in range(50):
        engine.runner.replay(batches[number % 3])
    torch.cuda.synchronize()
    assert (torch.cuda.memory_allocated(), torch.cuda.memory_reserved()) == before
    assert torch.cuda.max_memory_allocated() == before[0]


def test_lifetime_fresh_device_sources_do_not_pile_up() -> None:
    engine = captured(
        prep=lambda view: {"m": view.ids + 1},
        contract=PrepContract(name="p", reads={"ids": 0}, modes={Mode.DECODE}),
        slots=[Slot("ids", "token", torch.int64, 0, inner=(8192,))],
        tables={},
        forward=lambda view, metadata: metadata["m"] * 2,
    )
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    for turn in range(200):
        step = engine.runner.replay(Batch(16, {"ids": torch.full((16, 8192), turn, device="cuda")}))  # 1 MiB
        if turn % 5 == 0:
            assert step.outputs[15, 8191].item() == 2 * (turn + 1)
    torch.cuda.synchronize()
    assert torch.cuda.memory_allocated() - before < 48 * 2**20


def test_reset_and_capture_again_keep_memory_flat() -> None:
    engine, other = Engine(), captured()
    seen = []
    for number in range(8):
        engine.runner.capture()
        assert why(engine.right(3, number)) == GLUED
        engine.runner.reset()
        engine.runner.reset()
        assert engine.right(3, number).decision.reason is Reason.NOT_CAPTURED
        gc.collect()
        torch.cuda.synchronize()
        torch.cuda.empty_cache()
        seen.append((torch.cuda.memory_allocated(), torch.cuda.memory_reserved()))
        assert why(other.right(5, number)) == GLUED
    for measured in zip(*seen[2:]):  # a few sources of the last steps may still be held
        assert max(measured) - min(measured) < 4 * 2**20, seen


def test_close_gives_memory_back() -> None:
    def measure() -> int:
        gc.collect()
        torch.cuda.synchronize()
        torch.cuda.empty_cache()
        return torch.cuda.memory_allocated()

    big = torch.zeros(1 << 22, device="cuda")  # 16 MiB

    def forward(view: Any, metadata: Any) -> Any:
        return view.ids.unsqueeze(1) + big[: 1 << 20].to(torch.int64).unsqueeze(0)[:, :1024]

    first = measure()
    for _ in range(4):
        engine = captured(forward=forward, output_axes="token")
        engine.step(3)
        engine.runner.close()
        del engine
    assert measure() - first < 4 * 2**20


def test_lifetime_results_stay_right_under_heavy_allocation() -> None:
    one, other = captured(), captured(ladder=[4, 16])
    generator = torch.Generator().manual_seed(0)
    address = one.step(3).outputs["mixed"].data_ptr()
    for number in range(40):
        junk = [
            torch.full((int(size),), -1, dtype=torch.int64, device="cuda")
            for size in torch.randint(1, 1 << 16, (20,), generator=generator)
        ]
        step = one.right(3, number)
        assert step.outputs["mixed"].data_ptr() == address
        other.right(13, number)
        del junk
        if number % 10 == 0:
            gc.collect()
            torch.cuda.empty_cache()


def test_lifetime_a_table_that_nobody_else_holds_stays() -> None:
    expected = table()
    engine = captured(tables={"t": table()}, t=expected)
    gc.collect()
    junk = [torch.full((19, 32), 9, device="cuda") for _ in range(200)]
    engine.right(5)
    assert len(junk) == 200


def test_lifetime_closing_one_runner_leaves_another_alone() -> None:
    one, other = captured(), captured()
    one.right(3)
    other.runner.close()
    del other
    gc.collect()
    torch.cuda.empty_cache()
    junk = [torch.full((1 << 12,), 9, device="cuda") for _ in range(200)]
    one.right(3, start=4)
    assert len(junk) == 200


def test_pool_alias_two_runners_replay_a_b_a() -> None:
    one = captured()
    one.right(3)
    other = captured(ladder=[8, 16])
    for number in range(6):
        one.right(3, number)
        other.right(13, number + 1)
        one.right(16, number + 2)


def test_pool_alias_what_a_runner_gave_outlives_replays_of_those_captured_later() -> None:
    """Three runners in one pool, captured in the order of a step, each reading what the one before gave."""
    pool, stream = torch.cuda.graph_pool_handle(), torch.cuda.Stream()

    def wide(view: Any, metadata: Any) -> Any:  # makes and frees memory that later captures find
        large = metadata["positions"][:, None].expand(-1, 1 << 16).contiguous() * 2
        return {**model(view, metadata), "large": large.sum(1)}

    chain = [captured(forward=wide, hooks=CaptureHooks(pool=pool, stream=stream)) for _ in range(3)]
    for number, requests in enumerate((3, 16, 5, 1, 9)):
        keep_busy(BUSY_CYCLES // 10)
        steps, sources = [], as_arrays(draw(requests, number))
        for engine in chain:
            steps.append(engine.runner.replay(Batch(requests, sources)))
            sources = {**sources, "ids": steps[-1].outputs["mixed"]}
        results, handed = [cloned(step) for step in steps], draw(requests, number)
        for engine, step, (metadata, outputs) in zip(chain, steps, results, strict=True):
            assert_results(metadata, outputs, handed, step.decision.bucket.requests, engine.t, meta, wide)
            handed = {**handed, "ids": outputs["mixed"].tolist()}


def test_pool_alias_buckets_replay_in_any_order() -> None:
    engine = captured()
    for number, requests in enumerate((4, 8, 4, 4, 16, 1, 2, 16, 3, 8)):
        engine.right(requests, number)


def test_pool_alias_a_scratch_made_at_first_use_serves_all_buckets() -> None:
    scratch: dict[str, torch.Tensor] = {}

    def prep(view: Any) -> dict[str, torch.Tensor]:
        if "buffer" not in scratch:
            scratch["buffer"] = torch.empty(16, dtype=torch.int64, device="cuda")
        part = scratch["buffer"][: view.seq_lens.shape[0]]
        part.copy_(view.seq_lens)
        part.mul_(3)
        return {**meta(view), "positions": part + 0}

    engine = captured(prep=prep)
    for number, requests in enumerate((4, 8, 4, 4, 16, 3, 5)):
        step = engine.step(requests, number)
        assert step.decision.prep is Route.GLUE
        size = step.decision.bucket.requests
        lens = [*draw(requests, number)["seq_lens"], *[1] * size][:size]
        assert step.metadata["positions"].tolist() == [3 * length for length in lens]


def test_pool_alias_a_buffer_that_a_smaller_bucket_needs_larger_serves_all() -> None:
    """A workspace that grows towards smaller buckets: all warm-ups come before the first capture."""
    work: dict[str, torch.Tensor] = {"w": torch.zeros(1, dtype=torch.int64, device="cuda")}

    def forward(view: Any, metadata: Any) -> Any:
        needed = 4096 // view.ids.shape[0]
        if work["w"].numel() < needed:
            work["w"] = torch.zeros(needed, dtype=torch.int64, device="cuda")
        work["w"][:needed].fill_(view.ids.shape[0])
        return {
            name: leaf + work["w"][:needed].sum() - work["w"][:needed].sum()
            for name, leaf in model(view, metadata).items()
        }

    engine = captured(forward=forward)
    for number, requests in enumerate((16, 1, 8, 2, 16, 1)):
        assert why(engine.right(requests, number)) == UNPADDED


# Failure.


@pytest.mark.parametrize("how", ["item", "tolist", "upload", "raise", "unjoined"])
def test_one_bucket_s_failed_capture_leaves_the_others_serving_and_maintain_repairs_it(how: str) -> None:
    """Whatever it failed by: a side stream that is not joined, for one (STREAM-ORDER-6)."""
    broken = {"now": True}

    def prep(view: Any) -> Any:
        shift: Any = 0
        if broken["now"] and view.bucket.requests == 8:
            if how == "item":
                shift = view.seq_lens[0].item() * 0
            elif how == "tolist":
                shift = len(view.seq_lens.tolist()) * 0
            elif how == "upload":
                shift = torch.tensor([0] * 8).to("cuda")
            elif how == "raise" and torch.cuda.is_current_stream_capturing():
                raise LookupError("no plan for this size")
            elif how == "unjoined":
                side = torch.cuda.Stream()
                side.wait_stream(torch.cuda.current_stream())
                with torch.cuda.stream(side):
                    shift = view.seq_lens * 0
                if not torch.cuda.is_current_stream_capturing():
                    torch.cuda.current_stream().wait_stream(side)
        return {**meta(view), "where": view.loc * 2 + shift}

    engine = captured(prep=prep)
    states = {key["bucket"][0]: key["states"]["meta"] for key in engine.runner.stats()["keys"]}
    assert states == {size: "quarantined" if size == 8 else "captured" for size in LADDER}
    engine.prep = meta
    for number in range(2):
        assert why(engine.right(3, number)) == GLUED
        assert why(engine.right(7, number)) == (Route.EAGER, Route.GRAPH, Reason.QUARANTINED, None)
        assert why(engine.right(16, number)) == UNPADDED
    assert engine.runner.maintain() == []
    assert why(engine.right(7))[2] is Reason.QUARANTINED
    broken["now"] = False
    assert engine.runner.maintain() == [Key(Mode.DECODE, 8, 8, 1)]
    for number, requests in enumerate((7, 3, 8, 16, 7)):
        assert engine.right(requests, number).decision.prep is Route.GLUE


def test_host_frozen_a_prep_that_reads_the_host_stays_right() -> None:
    def prep(view: Any) -> Any:
        return {**meta(view), "where": view.loc * 0 + max(view.seq_lens.tolist())}

    engine = captured(prep=prep)
    for start in (0, 5):
        step = engine.right(3, start)
        assert why(step) == (Route.EAGER, Route.GRAPH, Reason.QUARANTINED, None)
        assert step.metadata["where"].tolist() == [max(draw(3, start)["seq_lens"])] * 4
    causes = {key["causes"]["meta"] for key in engine.runner.stats()["keys"]}
    assert all("tolist" in cause and "test_runner.py" in cause for cause in causes)


def test_h2d_staging_a_tensor_of_host_values_in_a_prep_is_refused() -> None:
    engine = captured(
        prep=lambda view: {**meta(view), "where": view.loc + torch.tensor([1, 2, 3], device="cuda").sum()}
    )
    step = engine.right(3)
    assert why(step) == (Route.EAGER, Route.GRAPH, Reason.QUARANTINED, None)
    (cause,) = {key["causes"]["meta"].split(". At")[0] for key in engine.runner.stats()["keys"]}
    assert "host memory" in cause


def test_a_forward_that_can_not_be_captured_at_one_bucket() -> None:
    broken = {"now": True}

    def forward(view: Any, metadata: Any) -> Any:
        if broken["now"] and view.ids.shape[0] == 4:
            view.ids[0].item()
        return model(view, metadata)

    engine = captured(forward=forward)
    assert why(engine.right(3)) == (Route.GLUE, Route.EAGER, Reason.PADDED, Reason.FORWARD_QUARANTINED)
    assert why(engine.right(7)) == GLUED
    broken["now"] = False
    assert [key.requests for key in engine.runner.maintain()] == [4]
    assert why(engine.right(3)) == GLUED


def test_an_exception_in_an_eager_step_is_its_own_and_the_next_step_is_right() -> None:
    angry = {"now": False}

    def prep(view: Any) -> Any:
        if angry["now"]:
            raise ZeroDivisionError("in the prep")
        return meta(view)

    engine = captured(prep=prep, contract=CONTRACT.model_copy(update={"host_free": False}))
    angry["now"] = True
    with pytest.raises(ZeroDivisionError, match="in the prep"):
        engine.step(3)
    angry["now"] = False
    engine.right(3)


def test_a_refused_step_has_written_nothing() -> None:
    engine = captured()
    for _ in range(2):
        engine.right(16)
        engine.right(3)

    def snapshot() -> Any:
        return plain(dict(engine.runner.view(16)))

    good, before = as_tensors(draw(3)), snapshot()
    for sources in (
        {**good, "ids": good["ids"][:2]},
        {**good, "ids": good["ids"].to(torch.float32)},
        {**good, "ids": torch.zeros(6, dtype=torch.int64, device="cuda")[::2]},
        {**good, "extra": good["ids"]},
        {name: good[name] for name in NAMES[:3]},
    ):
        with pytest.raises(BindError):
            engine.runner.replay(Batch(3, sources))
        assert snapshot() == before
    with pytest.raises(CapacityError):
        engine.runner.prepare(Batch(17, as_tensors(draw(17))))
    assert snapshot() == before
    engine.right(3)


def test_metadata_of_another_form_sends_the_forward_to_the_eager_route() -> None:
    now = {"dtype": torch.int64}

    def prep(view: Any) -> Any:
        return {**meta(view), "where": (view.loc * 2).to(now["dtype"])}

    engine = captured(prep=prep, contract=CONTRACT.model_copy(update={"host_free": False}))
    assert why(engine.right(3))[3] is None
    now["dtype"] = torch.int32
    assert why(engine.right(3, 5))[3] is Reason.METADATA_CHANGED
    now["dtype"] = torch.int64
    assert why(engine.right(3, 2))[3] is None


# Tables, adopted storage.


def test_a_table_that_moved_is_noticed_on_every_route() -> None:
    home = {"t": table()}
    engine = captured(tables={"t": lambda: home["t"]}, t=home["t"])
    engine.right(3)
    old, home["t"] = home["t"], table(5)
    for batch in (Batch(3, as_tensors(draw(3))), Batch(4, as_arrays(draw(4))), Batch.idle(), Batch(20, draw(20))):
        with pytest.raises(StaleTableError, match="table 't' moved"):
            engine.runner.replay(batch)
    home["t"] = old
    assert why(engine.right(3)) == GLUED


def test_rebinding_and_maintain() -> None:
    engine = captured()
    engine.right(3)
    engine.t = table(1000)
    engine.runner.rebind_table("t", engine.t)
    assert engine.right(3).decision.reason is Reason.NOT_CAPTURED
    assert sorted(key.requests for key in engine.runner.maintain()) == LADDER
    for requests in (3, 4, 16):
        assert engine.right(requests).decision.prep is Route.GLUE


def test_contents_of_a_table_are_read_at_every_replay() -> None:
    engine = captured()
    engine.right(3)
    engine.t.mul_(5)
    assert why(engine.right(3)) == GLUED


def test_adopted_storage_is_what_the_graph_reads() -> None:
    guarded = torch.full((30,), 55, device="cuda")
    engine = captured(slots=slots(ids=guarded[5:25]))
    for number, requests in enumerate((3, 16, 7)):
        engine.right(requests, number)
        assert engine.runner.view(16).ids.data_ptr() == guarded[5:].data_ptr()
        assert bool((guarded[:5] == 55).all())
        assert bool((guarded[21:] == 55).all())
    own = draw(3, 9)
    guarded[5:8] = torch.tensor(own["ids"], device="cuda")
    step = engine.runner.replay(Batch(3, {**as_tensors(own), "ids": guarded[5:8]}))
    assert_results(step.metadata, step.outputs, own, 4, engine.t)


def test_outputs_of_one_step_are_sources_of_the_next() -> None:
    engine = captured()
    step = engine.step(3)
    for number in range(10):
        fed = step.outputs["next"].tolist()
        step = engine.runner.replay(Batch(3, {**as_tensors(draw(3, number)), "ids": step.outputs["next"]}))
        assert_results(step.metadata, step.outputs, {**draw(3, number), "ids": fed}, 4, engine.t)


def test_a_prep_that_returns_a_slot_unchanged_owns_its_metadata() -> None:
    engine = captured(prep=lambda view: {**meta(view), "where": view.loc})
    for number in range(3):
        step = engine.right(3, number)
        assert step.metadata["where"].data_ptr() != engine.runner.view(4).loc.data_ptr()
        eager = engine.right(3, number, features=frozenset({"lora"}))
        assert eager.metadata["where"].data_ptr() == step.metadata["where"].data_ptr()


def test_state_carry_a_prep_with_effects_runs_on_clones_until_it_serves() -> None:
    counts = torch.zeros(9, dtype=torch.int64, device="cuda")

    def bump(view: Any) -> dict[str, torch.Tensor]:
        view.tables.counts.index_add_(0, view.rows, torch.ones_like(view.rows))
        return {"seen": view.tables.counts[view.rows]}

    engine = captured(
        prep=bump,
        contract=PrepContract(
            name="ring", reads={"rows": 0}, tables=("counts",), effects=("counts",), modes={Mode.DECODE}
        ),
        slots=[Slot("rows", "request", torch.int64, 0)],
        tables={"counts": counts},
        forward=None,
    )
    assert counts.tolist() == [0] * 9
    prepared = engine.runner.prepare(Batch(3, {"rows": [3, 4, 3]}))
    assert prepared.decision.prep is Route.GLUE
    assert counts.tolist() == [1, 0, 0, 2, 1, 0, 0, 0, 0]


# Modes, threads, random numbers.


@pytest.mark.parametrize("capture_in", [torch.no_grad, torch.inference_mode])
@pytest.mark.parametrize("replay_in", [torch.no_grad, torch.inference_mode, torch.enable_grad])
def test_inference_mode_in_and_out(capture_in: Any, replay_in: Any) -> None:
    with capture_in():
        engine = captured()
    with replay_in():
        for requests in (3, 16, 20):
            engine.right(requests)
        engine.right(3, features=frozenset({"lora"}))
        engine.runner.replay(Batch.idle())
        engine.right(5)


@pytest.mark.parametrize("default", ["cpu", "cuda"])
def test_fill_copy_the_default_device_does_not_matter(default: str) -> None:
    torch.set_default_device(default)
    try:
        engine = captured()
        for kind in (dict, as_arrays, as_tensors):
            assert why(engine.right(3, kind=kind)) == GLUED
            engine.right(20, kind=kind)
    finally:
        torch.set_default_device(None)


def test_a_thread_that_uses_the_gpu_during_capture_breaks_nothing() -> None:
    stop, failures, rounds = threading.Event(), [], [0]

    def work() -> None:
        try:
            host = torch.ones(1 << 16).pin_memory()
            while not stop.is_set():
                there = torch.full((1 << 18,), 2.0, device="cuda")
                there[: 1 << 16].copy_(host, non_blocking=True)
                back = there.cpu()
                assert back[0] == 1.0
                assert back[-1] == 2.0
                rounds[0] += 1
                del there
        except BaseException as error:
            failures.append(error)

    worker = threading.Thread(target=work)
    worker.start()
    try:
        engine = Engine()
        for _ in range(3):
            engine.runner.capture()
            states = {key["states"]["meta"] for key in engine.runner.stats()["keys"]}
            assert states == {"captured"}, engine.runner.stats()["keys"]
            assert why(engine.right(3)) == GLUED
            engine.runner.reset()
    finally:
        stop.set()
        worker.join(60)
    assert failures == []
    assert rounds[0] > 0


def test_two_threads_with_runners_of_their_own_do_not_meet() -> None:
    engines, failures = [captured(), captured(ladder=[4, 16])], []

    def serve(engine: Engine) -> None:
        try:
            with torch.cuda.stream(torch.cuda.Stream()):
                for number in range(50):
                    engine.right(1 + number * 5 % 16, number, (as_arrays, as_tensors)[number % 2])
        except BaseException as error:
            failures.append(error)

    torch.cuda.synchronize()
    workers = [threading.Thread(target=serve, args=(engine,)) for engine in engines]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join(120)
    assert failures == []


def test_a_second_thread_is_refused() -> None:
    inside, leave, refused = threading.Event(), threading.Event(), []

    def forward(view: Any, metadata: Any) -> Any:
        inside.set()
        leave.wait(20)
        return model(view, metadata)

    engine = Engine(forward=forward)

    def serve() -> None:
        assert inside.wait(20)
        try:
            engine.runner.replay(Batch.idle())
        except GraphGlueError as error:
            refused.append(str(error))
        finally:
            leave.set()

    worker = threading.Thread(target=serve)
    worker.start()
    engine.right(3)
    worker.join(20)
    assert len(refused) == 1
    assert "in use, by another thread" in refused[0]


def noisy(view: Any, metadata: Any) -> dict[str, torch.Tensor]:
    return {"mixed": model(view, metadata)["mixed"], "noise": torch.rand(view.ids.shape[0], device="cuda")}


def noise_of(engine: Engine, requests: int, start: int = 0, **more: Any) -> list[float]:
    """Replay a step, hold all but the noise against the twin, and give the noise."""
    step, sources = engine.step(requests, start, **more), draw(requests, start)
    view = twin_view(sources, step.decision.bucket.requests, engine.t)
    metadata = meta(view)
    assert plain(step.metadata) == plain(metadata)
    assert step.outputs["mixed"].tolist() == model(view, metadata)["mixed"][:requests].tolist()
    noise: list[float] = step.outputs["noise"].tolist()
    assert all(0.0 <= drawn < 1.0 for drawn in noise)
    return noise


def test_random_numbers_advance_at_every_replay_and_repeat_with_the_seed() -> None:
    """Each replay draws anew, and a seed repeats all of them (RNG-1)."""
    engine = captured(forward=noisy)
    runs = []
    for _ in range(2):
        torch.cuda.manual_seed(5)
        runs.append([noise_of(engine, 3), noise_of(engine, 3), noise_of(engine, 4), noise_of(engine, 3)])
    first, second, _, fourth = runs[0]
    assert len({tuple(drawn) for drawn in (first, second, fourth)}) == 3
    assert runs[0] == runs[1]


def test_random_numbers_advance_on_every_route() -> None:
    engine = captured(forward=noisy)
    drawn = []
    for number in range(3):
        drawn.append(tuple(noise_of(engine, 3, number)))
        drawn.append(tuple(noise_of(engine, 3, number, features=frozenset({"lora"}))))
        drawn.append(tuple(noise_of(engine, 20, number))[:3])
        engine.runner.replay(Batch.idle())
    assert len(set(drawn)) == len(drawn)


def test_random_numbers_of_two_runners_and_eager_draws_differ() -> None:
    """Graphs share one generator's bookkeeping, and none repeats another's numbers (RNG-4)."""
    one, other = captured(forward=noisy), captured(forward=noisy)
    torch.cuda.manual_seed(7)
    drawn = [
        tuple(noise_of(one, 4)),
        tuple(noise_of(other, 4)),
        tuple(torch.rand(4, device="cuda").tolist()),
        tuple(noise_of(one, 4)),
    ]
    assert len(set(drawn)) == 4


# Several preps, publish, plan.


def test_plan_stale_several_preps_are_routed_alone_and_all_refreshed() -> None:
    def window(view: Any) -> dict[str, torch.Tensor]:
        return {"start": (view.seq_lens - 4).clamp(min=0)}

    def hybrid(view: Any, metadata: Any) -> Any:
        return model(view, metadata["meta"])["next"] - metadata["window"]["start"]

    registry = Registry()
    registry.register(CONTRACT)(meta)
    registry.register(PrepContract(name="window", reads={"seq_lens": 1}, modes={Mode.DECODE}, padded=False))(window)
    t = table()
    runner = Runner(
        slots=slots(), ladder=LADDER, registry=registry, prep=["meta", "window"], tables={"t": t}, forward=hybrid,
        device="cuda",
    )  # fmt: skip
    runner.capture()
    for requests, start, route in ((3, 0, Route.EAGER), (4, 2, Route.GLUE), (3, 7, Route.EAGER), (16, 1, Route.GLUE)):
        step = runner.replay(Batch(requests, as_tensors(draw(requests, start))))
        view = twin_view(draw(requests, start), step.decision.bucket.requests, t)
        metadata = {"meta": meta(view), "window": window(view)}
        assert plain(step.metadata) == plain(metadata)
        assert step.outputs.tolist() == hybrid(view, metadata)[:requests].tolist()
        assert {name: decided.route for name, decided in step.decision.preps.items()} == {
            "meta": Route.GLUE, "window": route
        }  # fmt: skip
    runner.close()


def test_publish_and_plan_run_at_every_replay() -> None:
    published: list[Any] = []
    planned: list[int] = []

    def plan(batch: Batch, bucket: Any) -> dict[str, Any]:
        planned.append(batch.num_requests)
        return {"splits": [len(planned)] * batch.num_requests}

    registry = Registry()
    contract = PrepContract(name="planned", reads={"seq_lens": 1, "splits": 1}, modes={Mode.DECODE})
    registry.register(contract, plan=plan, publish=published.append)(
        lambda view: {"share": view.seq_lens * 100 + view.splits}
    )
    runner = Runner(
        slots=[Slot(name, "request", torch.int64, 1) for name in ("seq_lens", "splits")],
        ladder=[4, 16],
        registry=registry,
        prep="planned",
        forward=lambda view, metadata: metadata["share"] + 0,
        device="cuda",
    )
    runner.capture()
    assert planned == []
    published.clear()
    for number, requests in enumerate((3, 3, 4, 1, 20), start=1):
        step = runner.replay(Batch(requests, {"seq_lens": [5] * requests}))
        assert step.outputs.tolist() == [500 + number] * requests
        assert published[-1]["share"].data_ptr() == step.metadata["share"].data_ptr()
    assert len(planned) == len(published) == 5
    runner.close()


@pytest.mark.parametrize("clone", [False, True])
def test_clone_outputs_keeps_results_from_later_replays(clone: bool) -> None:
    engine = captured(config=RunnerConfig(clone_outputs=clone))
    kept = engine.step(3)
    engine.right(4, 5)
    check: Callable[[], None] = lambda: assert_results(kept.metadata, kept.outputs, draw(3), 4, engine.t)  # noqa: E731
    if clone:
        check()
    else:
        with pytest.raises(AssertionError):
            check()
