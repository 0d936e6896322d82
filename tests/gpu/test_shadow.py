"""The shadow check on CUDA: the fill kernel and captured preps against torch operations, without a wait."""

from __future__ import annotations

import math
import time
from collections.abc import Mapping
from typing import Any

import pytest
import torch

from graphglue import (
    Batch,
    DivergenceError,
    Mode,
    PrepContract,
    Reason,
    Route,
    RunnerConfig,
    Shadow,
    Slot,
)
from graphglue.audit.bits import Comparison, Shape, read_parting
from graphglue.audit.shadow import CAPTURING
from graphglue.device.kernel_fill import KernelFill
from graphglue.device.packing import FillParams
from graphglue.stepping import SAMPLED

from .test_runner import (
    CONTRACT,
    Engine,
    as_arrays,
    as_tensors,
    assert_results,
    cloned,
    draw,
    keep_busy,
    meta,
    model,
    slots,
    table,
)

ALL = Shadow(first=0, every=1)
COUNT = Shadow(first=0, every=1, on_mismatch="count")
DTYPES = (
    torch.bool, torch.uint8, torch.int16, torch.int32, torch.int64, torch.float16, torch.bfloat16, torch.float32,
    torch.float64, torch.complex128, torch.float8_e5m2,
)  # fmt: skip


def captured(shadow: Shadow = ALL, **more: Any) -> Engine:
    engine = Engine(config=RunnerConfig(shadow=shadow), **more)
    engine.runner.capture(progress=False)
    return engine


def seen(engine: Engine) -> dict[str, Any]:
    return engine.runner.stats()["shadow"]


def counts(engine: Engine) -> tuple[int, int, int]:
    stats = seen(engine)
    assert not stats["failed"], stats["last_failure"]
    assert not stats["pending"]
    return stats["sampled"], stats["passed"], stats["mismatched"]


class Host:
    """A value on the host that a capture bakes."""

    def __init__(self) -> None:
        self.add = 0

    def prep(self, view: Any) -> dict[str, torch.Tensor]:
        return {**meta(view), "positions": view.seq_lens - 1 + self.add}


def test_the_fill_is_the_kernel_here() -> None:
    """The tests below say nothing of the kernel otherwise."""
    engine = captured()
    assert isinstance(engine.runner.arena.fill_of(engine.runner.buckets[0]), KernelFill)
    assert engine.right(3).decision.prep is Route.GLUE
    assert engine.runner.stats()["launch_fallbacks"] == {SAMPLED: 1}


# Nothing wrong.


@pytest.mark.parametrize("kind", [dict, as_tensors, as_arrays], ids=["lists", "device", "numpy"])
def test_no_false_alarm_in_300_steps(kind: Any) -> None:
    engine = captured(contract=CONTRACT.model_copy(update={"idle": "glue"}))
    for number in range(300):
        requests = number % 17
        if not requests:
            engine.runner.replay(Batch.idle())
        elif number % 10:
            engine.step(requests, number, kind)
        else:
            engine.right(requests, number, kind)
    assert counts(engine) == (300, 300, 0)


def test_sampled_and_other_steps_take_turns_and_share_addresses() -> None:
    engine = captured(Shadow(first=2, every=5))
    addresses: dict[int, set[Any]] = {}
    for number in range(40):
        step = engine.right(1 + number % 16, number)
        found = (step.outputs["mixed"].data_ptr(), *(leaf.data_ptr() for leaf in step.metadata.values()))
        addresses.setdefault(step.decision.bucket.requests, set()).add(found)
    assert all(len(found) == 1 for found in addresses.values())
    sampled, passed, mismatched = counts(engine)
    assert sampled == passed
    assert not mismatched
    assert engine.runner.stats()["one_launch"] == 40 - sampled


def test_converted_nans_raise_no_false_alarm() -> None:
    """Kernels give a NaN that they convert different payloads."""
    kinds = {"half": torch.float16, "brain": torch.bfloat16, "wide": torch.float64, "same": torch.float32}
    reads = dict.fromkeys(kinds, math.nan)
    contract = PrepContract(name="p", reads=reads, modes={Mode.DECODE}, outputs={"half": "token"})
    engine = captured(
        prep=lambda view: {name: view[name] * 2 for name in kinds},
        contract=contract,
        slots=[
            Slot(name, "token", dtype, math.nan, inner=(3,), accepts=(torch.float32, torch.float64))
            for name, dtype in kinds.items()
        ],
        tables={},
        forward=None,
    )
    payloads = torch.tensor([0x7FC00001, -0x003FFFFF, 0x7F800001], dtype=torch.int32, device="cuda").view(torch.float32)
    for requests in (1, 3, 5, 16):
        source = payloads.repeat(requests, 1)
        engine.runner.prepare(Batch(requests, dict.fromkeys(kinds, source)))
        host = source.cpu().numpy()
        engine.runner.prepare(Batch(requests, dict.fromkeys(kinds, host)))
    assert counts(engine) == (8, 8, 0)


def test_adopted_buffers_and_their_own_views_raise_no_false_alarm() -> None:
    storage = {name: torch.zeros(16, dtype=torch.int64, device="cuda") for name in ("seq_lens", "ids")}
    engine = captured(slots=slots(**storage))
    for number in range(12):
        requests, sources = 1 + number % 16, as_tensors(draw(1 + number % 16, number))
        for name in storage:
            storage[name][:requests] = sources[name]
            sources[name] = engine.runner.view(16)[name][:requests]
        engine.runner.replay(Batch(requests, sources))
    assert counts(engine) == (12, 12, 0)


def test_sources_that_are_the_last_step_s_results_raise_no_false_alarm() -> None:
    engine = captured()
    step = engine.step(4)
    for _ in range(6):
        sources = {**as_tensors(draw(4)), "ids": step.outputs["next"], "loc": step.metadata["where"]}
        step = engine.runner.replay(Batch(4, sources))
    assert counts(engine) == (7, 7, 0)


def test_a_forward_that_writes_slots_and_metadata_in_place_raises_no_false_alarm() -> None:
    def forward(view: Any, metadata: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        found = model(view, metadata)
        view.ids.add_(1)
        metadata["positions"].mul_(3)
        return found

    engine = captured(forward=forward)
    for number in range(20):
        engine.step(1 + number % 16, number)
    assert counts(engine) == (20, 20, 0)


def test_random_numbers_go_on_through_sampled_steps_as_eager_calls_draw_them() -> None:
    def forward(view: Any, metadata: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        return {**model(view, metadata), "noise": torch.rand(view.ids.shape[0], device="cuda")}

    engine = captured(Shadow(first=1, every=2), forward=forward)
    torch.manual_seed(7)
    kept, addresses = [], set()
    for number in range(6):
        step = engine.step(4, number)
        kept.append(step.outputs["noise"].clone())
        addresses.add(step.outputs["noise"].data_ptr())
    torch.manual_seed(7)
    assert all(torch.equal(noise, torch.rand(4, device="cuda")) for noise in kept)
    assert len(addresses) == 1
    assert counts(engine) == (4, 4, 0)


def test_sources_may_be_overwritten_as_soon_as_a_sampled_step_returns() -> None:
    engine = captured()
    arrays, on_device = as_arrays(draw(3)), as_tensors(draw(3))
    for sources in (arrays, on_device):
        engine.runner.replay(Batch(3, sources))
    assert counts(engine) == (2, 2, 0)
    others = [as_tensors(draw(3, start + 1)) for start in range(4)]
    kept, busy = [], keep_busy()
    for start in range(4):  # few, because a sampled step is dozens of launches, and their queue has an end
        for name, numbers in draw(3, start).items():
            arrays[name][:] = numbers
        kept.append(cloned(engine.runner.replay(Batch(3, arrays))))
        for array in arrays.values():
            array[:] = 1
    for start in range(4):
        kept.append(cloned(engine.runner.replay(Batch(3, on_device))))
        for name, tensor in on_device.items():
            tensor.copy_(others[start][name])
    assert not busy.query(), "a sampled step waited for the GPU"
    torch.cuda.synchronize()
    for number, (metadata, outputs) in enumerate(kept):
        assert_results(metadata, outputs, draw(3, number % 4), 4, engine.t)
    assert counts(engine) == (10, 10, 0)


def test_steps_on_several_streams_raise_no_false_alarm() -> None:
    engine, streams = captured(), [torch.cuda.Stream() for _ in range(3)]
    for number in range(30):
        with torch.cuda.stream(streams[number % 3]):
            torch.cuda._sleep(100_000 * (number % 2))
            engine.step(1 + number % 16, number)
    torch.cuda.synchronize()
    assert counts(engine) == (30, 30, 0)


def test_sampling_keeps_memory_flat() -> None:
    engine = captured()
    for number in range(40):
        engine.step(1 + number % 16, number)
    seen(engine)
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    for number in range(2000):
        engine.step(1 + number % 16, number)
    seen(engine)
    torch.cuda.synchronize()
    # The sources of up to 256 steps are held until an event says that they were read, 200 KB here.
    assert torch.cuda.memory_allocated() <= before + 2**19


# What is found.


def test_a_fault_of_the_fill_kernel_s_tails_is_found_and_mended(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = captured()
    with monkeypatch.context() as patch:
        patch.setattr(FillParams, "_pad_bits", lambda self, position, pad: 9)
        engine.step(13)
    (found,) = seen(engine)["mismatches"]
    assert found["text"].endswith("slot 'seq_lens', pad row 13: 9, expected 1")
    step = engine.right(13)
    assert (step.decision.prep, step.decision.forward, step.decision.reason) == (
        Route.EAGER, Route.GRAPH, Reason.QUARANTINED,
    )  # fmt: skip
    assert not isinstance(engine.runner.arena.fill_of(step.decision.bucket), KernelFill)
    assert engine.right(3).decision.prep is Route.GLUE
    assert [key.requests for key in engine.runner.maintain()] == [16]
    assert engine.right(13).decision.prep is Route.GLUE
    assert seen(engine)["mismatched"] == 1


def test_a_fault_of_the_fill_kernel_s_heads_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """Sources like the last ones are taken in without binding: such a step must not hide from the twin."""
    engine = captured(COUNT)
    engine.right(5)
    write = KernelFill.run

    def late(self: KernelFill) -> None:
        write(self)
        engine.runner.arena.targets(engine.runner.arena.bucket_of(8))["loc"][2] = 77

    with monkeypatch.context() as patch:
        patch.setattr(KernelFill, "run", late)
        engine.step(5, 3)
    (found,) = seen(engine)["mismatches"]
    assert found["text"].endswith(f"slot 'loc', real row 2: 77, expected {draw(5, 3)['loc'][2]}")


@pytest.mark.parametrize("on_mismatch", ["quarantine", "raise", "count"])
def test_a_frozen_host_value_is_found(on_mismatch: Any) -> None:
    host = Host()
    engine = captured(Shadow(first=0, every=1, on_mismatch=on_mismatch), prep=host.prep)
    engine.right(5)
    host.add = 4
    step = engine.step(5)
    held = [tensor.clone() for tensor in (*engine.runner.view(8).values(), *step.metadata.values())]
    torch.cuda.synchronize()
    if on_mismatch == "raise":
        with pytest.raises(DivergenceError, match="prep 'meta', leaf 'positions', real row 0: 1, expected 5"):
            engine.step(6, 2)
        now = (*engine.runner.view(8).values(), *step.metadata.values())
        assert all(torch.equal(one, other) for one, other in zip(held, now))
    if on_mismatch == "count":
        assert engine.step(5).decision.prep is Route.GLUE
        assert seen(engine)["mismatched"] == 2
        return
    assert engine.right(5).decision.reason is Reason.QUARANTINED
    assert [key.requests for key in engine.runner.maintain()] == [8]
    assert engine.right(5).decision.prep is Route.GLUE
    assert seen(engine)["mismatched"] == 1


def test_a_changed_byte_of_any_dtype_is_found_wherever_it_is() -> None:
    comparison = Comparison(torch.device("cuda"))
    for dtype in DTYPES:
        shapes = [(3, 5), (70_001,), (), (0, 4)]
        ones = [torch.zeros(shape, device="cuda").to(dtype) for shape in shapes]
        others = [one.clone() for one in ones]
        same = comparison.first_partings([list(zip(ones, others))]).cpu()
        assert read_parting(same[0], [Shape.of(one) for one in ones]) is None
        for position, element in ((0, 7), (1, 0), (1, 70_000), (2, 0)):
            bits = others[position].view(-1).view(torch.uint8)
            for byte in dict.fromkeys((dtype.itemsize - 1, 0)):
                bits[element * dtype.itemsize + byte] ^= 1
                record = comparison.first_partings([list(zip(ones, others))]).cpu()[0]
                found = read_parting(record, [Shape.of(one) for one in ones])
                index = {0: (element // 5, element % 5), 1: (element,), 2: ()}[position]
                assert found is not None
                assert (found.position, found.index) == (position, index)
            others[position].copy_(ones[position])


# When a verdict is read.


def test_a_sampled_step_does_not_wait_and_its_verdict_comes_later() -> None:
    host = Host()
    engine = captured(prep=host.prep)
    for number in range(3):
        engine.right(5, number)
    assert counts(engine) == (3, 3, 0)
    host.add = 4
    sources = [as_tensors(draw(5, number)) for number in range(5)]
    busy, begin = keep_busy(), time.perf_counter()
    for one in sources:
        assert engine.runner.replay(Batch(5, one)).decision.prep is Route.GLUE
    took = time.perf_counter() - begin
    assert not busy.query(), f"a sampled step waited for the GPU: {took:.3f} s"
    assert len(engine.runner._stepper.shadow.pending) == 5
    torch.cuda.synchronize()
    assert engine.right(5).decision.reason is Reason.QUARANTINED
    assert counts(engine) == (8, 3, 5)


def test_a_key_goes_eager_while_its_dropped_launch_still_runs() -> None:
    def slow_model(view: Any, metadata: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        torch.cuda._sleep(60_000_000)  # about 30 ms
        return model(view, metadata)

    host = Host()
    engine = captured(Shadow(first=0, every=2), prep=host.prep, forward=slow_model)
    engine.right(5, kind=as_arrays)  # building device tensors would wait
    engine.right(5, kind=as_arrays)
    assert counts(engine) == (1, 1, 0)
    engine.step(5, kind=as_arrays)
    host.add = 4
    engine.step(5, kind=as_arrays)  # sampled; its verdict is there before its forward is done
    launched = cloned(engine.step(5, 1, as_arrays))  # one launch: it waits behind that forward
    behind = torch.cuda.Event()
    behind.record()
    engine.runner._stepper.shadow.pending[0].event.synchronize()
    step = engine.step(5, 2, as_arrays)
    late = cloned(step)
    assert not behind.query(), "the launch had ended before it was dropped"
    assert step.decision.reason is Reason.QUARANTINED
    torch.cuda.synchronize()
    frozen = Host()
    assert_results(*launched, draw(5, 1), 8, engine.t, frozen.prep, slow_model)
    assert_results(*late, draw(5, 2), 8, engine.t, host.prep, slow_model)


def test_nothing_is_sampled_or_read_while_the_caller_captures() -> None:
    engine = captured()
    engine.right(5)
    engine.step(5)
    pending, stepper = len(engine.runner._stepper.shadow.pending), engine.runner._stepper
    side, graph = torch.cuda.Stream(), torch.cuda.CUDAGraph()
    x = torch.zeros(4, device="cuda")
    lane = stepper.decider.lane(Batch(5, as_tensors(draw(5))))
    torch.cuda.synchronize()
    with torch.cuda.stream(side):
        graph.capture_begin()
        x.add_(1)
        assert engine.runner.arena.device.is_capturing()
        stepper.shadow.step += 1
        assert not stepper.shadow.samples(lane)
        stepper.settle()
        graph.capture_end()
    assert pending
    assert len(stepper.shadow.pending) == pending
    graph.replay()
    torch.cuda.synchronize()
    assert x.tolist() == [1, 1, 1, 1]
    assert seen(engine)["skipped"] == {CAPTURING: 1}
    assert not engine.runner.arena.device.is_capturing()


def test_a_table_that_the_forward_changes_raises_no_false_alarm() -> None:
    t = table()

    def forward(view: Any, metadata: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        found = model(view, metadata)
        view.tables.t.add_(1)
        return found

    engine = captured(forward=forward, t=t)
    for number in range(10):
        engine.step(5, number)
    assert counts(engine) == (10, 10, 0)
