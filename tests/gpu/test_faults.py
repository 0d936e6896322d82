"""Faults on purpose on a GPU: captures that fail, memory that runs out, launches that can not be joined, and the soak.

The tables and the twin are those of ``tests/unit/test_faults.py`` and ``tests/faults.py``. What a driver refuses at a
launch is in ``test_launch.py``, how one key's failure looks from outside in ``test_runner.py``.
"""

from __future__ import annotations

import gc
import logging
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch

import graphglue as gg
from graphglue import Route
from tests.faults import DECODE, RECORD, SERVE, WARM_UP, Broken, Decode, Fault, Segmented, num_operations
from tests.soak.soak import Soak
from tests.unit.test_faults import (
    BECOMES,
    EAGER,
    GLUE,
    GRAPH,
    check_contained,
    check_serves,
    parts,
    quarantines,
    strikes,
    unchanged_counters,
)

MIB = 2**20
WHOLE = (GLUE, GRAPH, None, None)


def reserved() -> int:
    gc.collect()
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    return torch.cuda.memory_reserved()


@pytest.mark.parametrize("phase", [WARM_UP, RECORD])
@pytest.mark.parametrize("part", ["prep", "forward"])
@pytest.mark.parametrize("kind", [Decode, Segmented])
def test_a_capture_that_fails_at_any_operation(
    kind: Any, part: str, phase: str, caplog: pytest.LogCaptureFixture
) -> None:
    count = num_operations(kind("cuda"), part, phase)
    assert count > 4
    for number, at in enumerate(strikes(count, 6)):
        engine = kind("cuda")
        size = engine.SIZES[-1 - number % 2]
        fault = Fault(part, phase, size, at)
        engine.strike(fault)
        caplog.clear()
        with caplog.at_level(logging.WARNING, "graphglue"):
            engine.capture()
        check_contained(engine, fault, size, [record.getMessage() for record in caplog.records])


@pytest.mark.parametrize("phase", [WARM_UP, RECORD])
def test_an_interrupt_leaves_no_key_half_captured(phase: str) -> None:
    engine = Decode("cuda")
    engine.strike(Fault("forward", phase, 2, 3, error=KeyboardInterrupt))
    with pytest.raises(KeyboardInterrupt):
        engine.capture()
    engine.strike(None)
    assert {parts(engine, size) for size in engine.SIZES} == {("cold", "cold")}
    assert not torch.cuda.is_current_stream_capturing()
    engine.capture()
    check_serves(engine, 2, WHOLE)


# What a stream that is captured does not allow.


def _on_a_side_stream(view: Any) -> None:
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        view.ids + 1


ILLEGAL: dict[str, Any] = {
    "item": lambda view: view.ids[0].item(),
    "cpu": lambda view: view.ids.cpu(),
    "nonzero": lambda view: view.ids.nonzero(),
    "synchronize": lambda view: torch.cuda.synchronize(),
    "a side stream that is not joined": _on_a_side_stream,
}


class Illegal(Decode):
    """A forward that does at one size, while it is recorded, what a capture does not allow."""

    act: Any = None
    size = 4

    def forward(self, view: Any, metadata: Any) -> Any:
        outputs = super().forward(view, metadata)
        if self.act is not None and view.bucket.requests == self.size and torch.cuda.is_current_stream_capturing():
            self.act(view)
            outputs = {name: leaf + 0 for name, leaf in outputs.items()}  # and goes on
        return outputs


@pytest.mark.parametrize("size", Decode.SIZES)
@pytest.mark.parametrize("how", ILLEGAL)
def test_an_illegal_operation_in_a_capture_leaves_pool_stream_and_generator_usable(how: str, size: int) -> None:
    engine = Illegal("cuda")
    engine.act, engine.size = ILLEGAL[how], size
    engine.capture()
    assert parts(engine, size) == ("captured", "quarantined")
    assert quarantines(engine) == (0, 1)
    assert not torch.cuda.is_current_stream_capturing()
    torch.rand(4, device="cuda")
    check_serves(engine, size, BECOMES["forward", RECORD][1])
    held = []
    for _ in range(3):  # a repair that fails costs nothing that stays
        assert engine.maintain() == []
        check_serves(engine, size, BECOMES["forward", RECORD][1])
        held.append(reserved())
    assert max(held) - min(held) < 8 * MIB, held
    engine.act = None
    assert engine.maintain() == [size]
    check_serves(engine, size, WHOLE)


# Out of memory.


class Hungry(Decode):
    """A forward that takes memory at the largest size while it is recorded."""

    num_bytes = 0
    only_recorded = True

    def forward(self, view: Any, metadata: Any) -> Any:
        outputs = super().forward(view, metadata)
        recorded = torch.cuda.is_current_stream_capturing() or not self.only_recorded
        if self.num_bytes and view.bucket.requests == 4 and recorded:
            taken = torch.empty(self.num_bytes, dtype=torch.uint8, device="cuda")
            taken.zero_()
        return outputs


@contextmanager
def memory_limit(num_bytes: int) -> Iterator[None]:
    """Let torch reserve so many bytes more than it has."""
    total = torch.cuda.mem_get_info()[1]
    torch.cuda.set_per_process_memory_fraction((reserved() + num_bytes) / total)
    try:
        yield
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0)


@pytest.mark.parametrize("only_recorded", [True, False], ids=["recording", "warm-up"])
@pytest.mark.parametrize("num_bytes", [1 << 50, 512 * MIB], ids=["beyond the device", "beyond a limit"])
def test_out_of_memory_in_a_capture(num_bytes: int, only_recorded: bool) -> None:
    """The other keys serve, memory is not lost, and the key is repaired when there is more (CAPTURE-FAIL-1)."""
    before = reserved()
    engine = Hungry("cuda")
    engine.num_bytes, engine.only_recorded = num_bytes, only_recorded
    with memory_limit(128 * MIB):
        engine.capture()
        assert parts(engine, 4) == ("captured", "quarantined")
        assert "OutOfMemoryError" in engine.causes(4)["forward"]
        assert "test_faults.py" in engine.causes(4)["forward"]
        engine.num_bytes = 0  # an eager step would run out as well
        check_serves(engine, 4, BECOMES["forward", RECORD][1])
        engine.num_bytes = num_bytes
        assert engine.maintain() == []
        assert quarantines(engine) == (0, 2)
        assert reserved() - before < 128 * MIB
    engine.num_bytes = min(num_bytes, 512 * MIB)
    assert engine.maintain() == [4]
    check_serves(engine, 4, WHOLE)
    engine.runner.close()
    del engine
    assert reserved() - before < 64 * MIB


@pytest.mark.parametrize(
    "call", ["cuGraphCreate", "cuGraphAddKernelNode", "cuGraphAddChildGraphNode", "cuGraphInstantiate"]
)
def test_a_launch_that_can_not_be_joined_for_want_of_memory_runs_part_by_part(
    call: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    from cuda.bindings import driver

    with monkeypatch.context() as patch:
        patch.setattr(driver, call, lambda *args: (driver.CUresult.CUDA_ERROR_OUT_OF_MEMORY, None))
        engine = Decode("cuda")
        engine.capture()
    check_serves(engine, 4, WHOLE)
    (why,) = engine.runner.stats()["launch_fallbacks"]
    assert "the graphs can not be composed" in why
    assert "CUDA_ERROR_OUT_OF_MEMORY" in why
    assert engine.runner.stats()["one_launch"] == 0
    engine.runner.reset()
    engine.capture()
    check_serves(engine, 4, WHOLE)
    assert engine.runner.stats()["one_launch"] > 0


# In service.


@pytest.mark.parametrize("raw", [3, 4, 6], ids=["padded", "unpadded", "over the ladder"])
@pytest.mark.parametrize("part", ["prep", "forward"])
def test_an_eager_part_that_raises_at_any_operation(part: str, raw: int) -> None:
    contract = DECODE.model_copy(update={"host_free": False}) if part == "prep" else DECODE
    engine = Decode("cuda", contract)
    if part == "prep":
        engine.capture()
    probe = Fault(part, SERVE, 4 if raw <= 4 else raw)
    engine.strike(probe)
    engine.runner.replay(engine.batch(raw))
    assert probe.num_seen > 4
    engine.right(2)
    for at in range(probe.num_seen):
        engine.strike(Fault(part, SERVE, probe.size, at))
        with unchanged_counters(engine), pytest.raises(Broken, match=f"^operation {at}, "):
            engine.runner.replay(engine.batch(raw, at))
        engine.right(2, at)
        engine.strike(None)
        engine.right(raw, at + 1)


def test_a_break_that_raises_at_any_operation_of_a_replay() -> None:
    engine = Segmented("cuda")
    engine.capture()
    for layer in range(3):
        for at in range(3):
            engine.strike(Fault("break", SERVE, 8, at, skip=layer))
            with (
                unchanged_counters(engine),
                pytest.raises(gg.SegmentError, match=rf"break {layer} \('.*attend'\) raised"),
            ):
                engine.runner.replay(engine.batch(8, at))
            engine.strike(None)
            for size in (8, 4):
                decision = engine.right(size, at + 1)
                assert (decision.prep, decision.forward) == (Route.GLUE, Route.GRAPH)


# Threads.


def test_captures_that_fail_beside_a_thread_that_uses_the_gpu_break_nothing_there() -> None:
    """THREAD-1, THREAD-4: what fails is the key that was struck, and nothing of the other thread's."""
    stop, failures, rounds = threading.Event(), [], [0]

    def work() -> None:
        try:
            host = torch.ones(1 << 14).pin_memory()
            with torch.cuda.stream(torch.cuda.Stream()):
                while not stop.is_set():
                    there = torch.full((1 << 16,), 2.0, device="cuda")
                    there[: 1 << 14].copy_(host, non_blocking=True)
                    assert float(there.sum()) == 2.0 * ((1 << 16) - (1 << 14)) + (1 << 14)
                    rounds[0] += 1
        except BaseException as error:
            failures.append(error)

    worker = threading.Thread(target=work)
    worker.start()
    try:
        for number in range(6):
            engine = Illegal("cuda") if number % 2 else Decode("cuda")
            if isinstance(engine, Illegal):
                engine.act = ILLEGAL["item"]
            else:
                engine.strike(Fault("forward", RECORD, 4, number))
            engine.capture()
            assert parts(engine, 4) == ("captured", "quarantined")
            check_serves(engine, 4, (GLUE, EAGER, None, gg.Reason.FORWARD_QUARANTINED))
            engine.strike(None)
            if isinstance(engine, Illegal):
                engine.act = None
            assert engine.maintain() == [4]
            check_serves(engine, 4, WHOLE)
    finally:
        stop.set()
        worker.join(60)
    assert failures == []
    assert rounds[0] > 0


# The soak.


def test_nothing_drifts_or_grows_whatever_happens_between_steps() -> None:
    """``python -m tests.soak --steps 200000 --device cuda`` is the long one."""
    result = Soak("cuda", upkeep_every=100, check_every=4).run(3200)
    assert result["steps"] == 3200
    assert {"allocated_bytes", "reserved_bytes", "driver_bytes"} <= set(result["grown"])
    assert {"staged", "ragged", "padded", "quarantined", "over_ladder"} <= set(result["reasons"])
