"""Faults at every operation, on the tape: each is named, is counted, and leaves other keys and the next step right.

Every step behind a fault is held against its twin bit for bit, at the key that was struck and at the others.
``GRAPHGLUE_FAULTS=all`` strikes each operation of a forward in segments, and not one of so many.
"""

from __future__ import annotations

import gc
import logging
import os
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch

import graphglue as gg
from graphglue import Reason, Route
from graphglue.device import cpu
from graphglue.graphs import session, tape
from tests.faults import (
    DECODE,
    LORA,
    NEVER,
    RECORD,
    SERVE,
    WARM_UP,
    Breakable,
    Broken,
    Decode,
    Fault,
    Segmented,
    num_operations,
)

pytestmark = pytest.mark.usefixtures("frozen_imports")
GLUE, EAGER, GRAPH = Route.GLUE, Route.EAGER, Route.GRAPH
ALL = os.environ.get("GRAPHGLUE_FAULTS") == "all"


class Drawing(Decode):
    """A forward that draws random numbers is recorded twice: the launch has a graph of its own."""

    def forward(self, view: Any, metadata: Any) -> Any:
        outputs = super().forward(view, metadata)
        with self.tripping("second", view.bucket.requests):
            return {**outputs, "next": outputs["next"] + 0 * torch.randint(9, (view.ids.shape[0],))}


# Where it strikes -> what becomes of (prep, forward), and the routes and reasons of a padded step there.
QUARANTINED = Reason.QUARANTINED
BECOMES: dict[tuple[str, str], tuple[tuple[str, str], tuple[Any, ...]]] = {
    ("prep", WARM_UP): (("quarantined",) * 2, (EAGER, EAGER, QUARANTINED, Reason.FORWARD_QUARANTINED)),
    ("prep", RECORD): (("quarantined", "captured"), (EAGER, GRAPH, QUARANTINED, None)),
    ("forward", WARM_UP): (("captured", "quarantined"), (GLUE, EAGER, None, Reason.FORWARD_QUARANTINED)),
    ("forward", RECORD): (("captured", "quarantined"), (GLUE, EAGER, None, Reason.FORWARD_QUARANTINED)),
}


def strikes(count: int, most: int = 24) -> Iterator[int]:
    """Give the operations to strike, the first and the last among them."""
    step = 1 if ALL else -(-count // most)
    yield from sorted({*range(0, count, step), count - 1})


def went(decision: gg.Decision) -> tuple[Any, ...]:
    reason = None if decision.prep is GLUE else decision.reason
    return decision.prep, decision.forward, reason, decision.forward_reason


def parts(engine: Breakable, size: int) -> tuple[str, str]:
    states = dict(engine.states()[size])
    forward = states.pop("forward")
    (prep,) = states.values()
    return prep, forward


def quarantines(engine: Breakable) -> tuple[int, int]:
    counts = dict(engine.runner.stats()["quarantines"])
    forward = counts.pop("forward")
    (prep,) = counts.values()
    return prep, forward


def counted(engine: Breakable) -> Counter[Any]:
    fields = ("prep", "forward", "reason", "forward_reason")
    return Counter(
        {
            (*(route[name] for name in fields), *(route["bucket"] or ())): route["steps"]
            for route in engine.runner.stats()["routes"]
        }
    )


def as_counted(decision: gg.Decision, size: int) -> tuple[Any, ...]:
    values = (decision.prep, decision.forward, decision.reason, decision.forward_reason)
    return (*(value and value.value for value in values), *(decision.bucket if size else ()))


def check_serves(engine: Any, struck: int, routes: tuple[Any, ...]) -> None:
    """Serve at the struck size and at the other in turn; hold results, routes and counters to what they should be."""
    before, steps = counted(engine), Counter[Any]()
    for start in (0, 5):
        for size in sorted(engine.SIZES, reverse=True):
            for raw in (size, size - 1) if size > 2 else (size,):
                decision = engine.right(raw, start)
                expected = routes if size == struck else (GLUE, GRAPH, None, None)
                assert went(decision) == expected, f"{raw} at {size}"
                steps[as_counted(decision, size)] += 1
    assert counted(engine) - before == steps


def check_contained(engine: Any, fault: Fault, size: int, messages: list[str]) -> None:
    """Hold everything that a fault in a capture must leave behind against its row of the table."""
    states, routes = BECOMES[fault.part, fault.phase]
    assert fault.num_struck > 0
    assert parts(engine, size) == states
    assert {parts(engine, other) for other in engine.SIZES if other != size} == {("captured",) * 2}
    assert quarantines(engine) == tuple(int(state == "quarantined") for state in states)
    causes = engine.causes(size)
    assert len(causes) == states.count("quarantined")
    for cause in causes.values():
        assert f"operation {fault.at}, " in cause, cause  # what
        assert "Broken" in cause, cause
        assert "faults.py:" in cause, cause  # where
    told = [text for text in messages if "goes eager until maintain() repairs it" in text]
    assert len(told) == states.count("quarantined"), told  # once for each, with what to do
    assert not session.recording()
    assert gc.isenabled()
    check_serves(engine, size, routes)
    engine.strike(None)
    check_serves(engine, size, routes)
    assert engine.maintain() == [size]
    check_serves(engine, size, (GLUE, GRAPH, None, None))
    assert engine.maintain() == []


@pytest.mark.parametrize("phase", [WARM_UP, RECORD])
@pytest.mark.parametrize("part", ["prep", "forward"])
@pytest.mark.parametrize("kind", [Decode, Segmented])
def test_a_capture_that_fails_at_any_operation(
    kind: Any, part: str, phase: str, caplog: pytest.LogCaptureFixture
) -> None:
    count = num_operations(kind(), part, phase)
    assert count > 4
    most = 2 if kind is Segmented else 12 if phase == RECORD else 4
    for number, at in enumerate(strikes(count, most)):
        engine = kind()
        size = engine.SIZES[-1 - number % 2]  # the first key that is recorded, and the last
        fault = Fault(part, phase, size, at)
        engine.strike(fault)
        caplog.clear()
        with caplog.at_level(logging.WARNING, "graphglue"):
            engine.capture()
        check_contained(engine, fault, size, [record.getMessage() for record in caplog.records])


@pytest.mark.parametrize("error", [MemoryError, torch.OutOfMemoryError])
@pytest.mark.parametrize(("part", "phase"), BECOMES)
def test_out_of_memory_in_a_capture_is_such_a_failure(part: str, phase: str, error: Any) -> None:
    engine = Decode()
    fault = Fault(part, phase, 4, 3, error=error)
    engine.strike(fault)
    engine.capture()
    assert error.__name__ in " ".join(engine.causes(4).values())
    check_serves(engine, 4, BECOMES[part, phase][1])
    assert engine.maintain() == []  # there is no more memory yet
    assert quarantines(engine) == tuple(2 * int(state == "quarantined") for state in BECOMES[part, phase][0])
    engine.strike(None)
    assert engine.maintain() == [4]
    check_serves(engine, 4, (GLUE, GRAPH, None, None))


def test_a_second_warm_up_that_fails_leaves_the_forward_its_metadata() -> None:
    engine = Decode()
    engine.strike(Fault("prep", WARM_UP, 4, 2, skip=1))
    engine.capture()
    assert parts(engine, 4) == ("quarantined", "captured")
    check_serves(engine, 4, (EAGER, GRAPH, QUARANTINED, None))


def test_a_forward_that_can_not_be_recorded_for_the_launch_is_told_as_that() -> None:
    """Its first recording is good, and what failed is no hook of the engine's."""
    for skip, who in ((0, "the callable raised"), (1, "joining what was recorded in one launch raised CaptureError")):
        engine = Drawing()
        engine.strike(Fault("second", RECORD, 4, 0, skip))
        engine.capture()
        assert engine.causes(4)["forward"].startswith(f"CaptureError: {who}"), engine.causes(4)
        engine.strike(None)
        assert went(engine.right(3))[1] is EAGER
        assert went(engine.right(2)) == (GLUE, GRAPH, None, None)
        assert engine.maintain() == [4]
        check_serves(engine, 4, (GLUE, GRAPH, None, None))


@pytest.mark.parametrize("phase", [WARM_UP, RECORD])
@pytest.mark.parametrize("part", ["prep", "forward"])
def test_an_interrupt_at_any_operation_leaves_no_key_half_captured(part: str, phase: str) -> None:
    for at in strikes(num_operations(Decode(), part, phase), 2):
        engine = Decode()
        engine.strike(Fault(part, phase, 2, at, error=KeyboardInterrupt))
        with pytest.raises(KeyboardInterrupt, match=f"operation {at}, "):
            engine.capture()
        engine.strike(None)
        assert {parts(engine, size) for size in engine.SIZES} == {("cold", "cold")}
        assert not session.recording()
        assert gc.isenabled()
        assert engine.right(3).reason is Reason.NOT_CAPTURED
        engine.capture()
        check_serves(engine, 2, (GLUE, GRAPH, None, None))


@pytest.mark.parametrize(("part", "phase"), BECOMES)
def test_keys_that_are_recorded_anew_by_resume_fail_one_by_one(part: str, phase: str) -> None:
    engine = Decode()
    engine.capture()
    engine.right(3)
    engine.runner.release()
    engine.strike(Fault(part, phase, 4, 3))
    with engine.capturing():
        assert [key.requests for key in engine.runner.resume()] == [2]
    check_serves(engine, 4, BECOMES[part, phase][1])


# In service.


def eager_prep(**more: Any) -> Decode:
    engine = Decode(contract=DECODE.model_copy(update={"host_free": False}), **more)
    engine.capture()
    return engine


@contextmanager
def unchanged_counters(engine: Breakable) -> Iterator[None]:
    """Hold that steps which raise are no steps."""

    def counters() -> dict[str, Any]:
        stats = engine.runner.stats()
        return {name: stats[name] for name in ("steps", "routes", "quarantines", "real_tokens", "last_decisions")}

    before = counters()
    yield
    assert counters() == before


@pytest.mark.parametrize("part", ["prep", "forward"])
@pytest.mark.parametrize("raw", [3, 4, 6], ids=["padded", "unpadded", "over the ladder"])
def test_an_eager_part_that_raises_at_any_operation(part: str, raw: int) -> None:
    """It surfaces as its own error, and the next step owes nothing to it."""
    config = gg.RunnerConfig(flight_recorder=8)
    engine = eager_prep(config=config) if part == "prep" else Decode(config=config)
    probe = Fault(part, SERVE, 4 if raw <= 4 else raw)
    engine.strike(probe)
    engine.runner.replay(engine.batch(raw))
    assert probe.num_seen > 4
    engine.right(2)
    for at in range(probe.num_seen):
        engine.strike(Fault(part, SERVE, probe.size, at))
        with unchanged_counters(engine), pytest.raises(Broken, match=f"^operation {at}, ") as caught:
            engine.runner.replay(engine.batch(raw, at))
        assert "flight recorder, the last" in caught.value.__notes__[0]
        assert engine.runner.flight_record().steps[-1].raised == str(f"Broken: {caught.value}")
        engine.right(2, at)  # while the other size still fails
        engine.strike(None)
        engine.right(raw, at + 1)


def test_a_break_that_raises_at_any_operation_of_a_replay() -> None:
    engine = Segmented()
    engine.capture()
    for layer in range(3):
        for at in range(3):
            engine.strike(Fault("break", SERVE, 8, at, skip=layer))
            said = rf"break {layer} \('.*attend'\) raised Broken\('operation {at}, .*the next one starts from the first"
            with unchanged_counters(engine), pytest.raises(gg.SegmentError, match=said):
                engine.runner.replay(engine.batch(8, at))
            engine.strike(None)
            assert went(engine.right(8, at + 1)) == went(engine.right(4, at)) == (GLUE, GRAPH, None, None)


# A launch that fails.


@contextmanager
def failing_launch(monkeypatch: pytest.MonkeyPatch, at: int) -> Iterator[list[int]]:
    """Have one recorded operation of a replay fail."""
    played, play = [0], tape._Step.play

    def count(self: Any) -> None:
        played[0] += 1
        if played[0] - 1 == at:
            raise Broken(f"launch of operation {at}")
        play(self)

    with monkeypatch.context() as patch:
        patch.setattr(tape._Step, "play", count)
        yield played


@pytest.mark.parametrize("kind", [Decode, Segmented, Drawing])
def test_a_launch_that_fails_at_any_operation(kind: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = kind()
    engine.capture()
    size = engine.SIZES[-1]
    with failing_launch(monkeypatch, NEVER) as played:
        engine.runner.replay(engine.batch(size))
    assert played[0] > 6
    for at in strikes(played[0]):
        broken = pytest.raises(Broken, match=f"launch of operation {at}$")
        with unchanged_counters(engine), failing_launch(monkeypatch, at), broken:
            engine.runner.replay(engine.batch(size, at))
        routes = {went(engine.right(raw, at + 1)) for raw in (size - 1, engine.SIZES[0])}
        assert routes == {(GLUE, GRAPH, None, None)}


def test_a_fill_that_fails_has_no_part_in_the_next_one(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = Decode()
    engine.capture()
    for start, raw in enumerate((3, 4, 2, 6, 0)):
        with monkeypatch.context() as patch, unchanged_counters(engine):
            patch.setattr(cpu, "fill_slots", lambda writes, targets: (_ for _ in ()).throw(Broken("no fill")))
            if raw <= 4:
                with pytest.raises(Broken, match="no fill"):
                    engine.runner.replay(engine.batch(raw, start))
        for other in (3, 2, 6):
            engine.right(other, start + 1)


def test_a_staged_step_that_fails_is_not_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = Decode(config=gg.RunnerConfig(staging=True))
    engine.capture()
    with failing_launch(monkeypatch, NEVER) as played:
        assert engine.runner.stage(engine.batch(3))
    engine.right(3)
    for at in range(played[0]):
        staged = engine.runner.stats()["staging"]
        with failing_launch(monkeypatch, at), pytest.raises(Broken, match=f"launch of operation {at}$"):
            engine.runner.stage(engine.batch(3, at))
        assert engine.runner.stats()["staging"] == staged
        assert engine.right(3, at).reason is Reason.PADDED
        assert engine.runner.stage(engine.batch(3, at + 1))
        assert engine.right(3, at + 1).reason is Reason.STAGED


# A table that moved.


def test_a_moved_table_is_refused_on_every_route_and_counts_nothing() -> None:
    engine = Decode()
    engine.capture()
    engine.right(3)
    before, old = engine.bytes(), engine.t
    engine.home["t"] = old + 1
    refused: list[Callable[[], Any]] = [
        *(lambda raw=raw: engine.runner.replay(engine.batch(raw)) for raw in (0, 2, 3, 6)),
        lambda: engine.runner.replay(engine.batch(3, features=LORA)),
        lambda: engine.runner.prepare(engine.batch(3)),
        lambda: engine.runner.reset() or engine.capture(),  # type: ignore[func-returns-value]
    ]
    with unchanged_counters(engine):
        for call in refused:
            said = rf"table 't' moved.*{old.data_ptr():#x}.*rebind_table\('t', tensor\)"
            with pytest.raises(gg.StaleTableError, match=said):
                call()
    assert engine.bytes() == before
    engine.home["t"] = old
    engine.capture()
    check_serves(engine, 4, (GLUE, GRAPH, None, None))
    engine.home["t"] = engine.t = old + 1
    engine.runner.rebind_table("t", lambda: engine.home["t"])
    assert engine.maintain() == [2, 4]
    check_serves(engine, 4, (GLUE, GRAPH, None, None))


# The comparisons can fail.


class Corrupting(Decode):
    """A prep that changes what it was recorded with where it fails, as a fault that was not contained would."""

    def prep(self, view: Any) -> dict[str, torch.Tensor]:
        try:
            return super().prep(view)
        except Broken:
            self.offset = 1
            raise

    offset = 0

    def forward(self, view: Any, metadata: Any) -> Any:
        outputs = super().forward(view, metadata)
        return {**outputs, "next": outputs["next"] + (self.offset if view.bucket.requests == 2 else 0)}


def test_a_fault_that_reaches_another_key_is_found() -> None:
    engine = Corrupting()
    engine.strike(Fault("prep", RECORD, 4, 2))
    engine.capture()
    with pytest.raises(AssertionError, match="outputs of 2 requests"):
        check_serves(engine, 4, BECOMES["prep", RECORD][1])


def test_another_route_or_count_than_the_table_s_is_found() -> None:
    engine = Decode()
    engine.strike(Fault("prep", RECORD, 4, 2))
    engine.capture()
    with pytest.raises(AssertionError):
        check_serves(engine, 4, (GLUE, GRAPH, None, None))
    with pytest.raises(AssertionError), unchanged_counters(engine):
        engine.right(2)


# Threads.


def test_one_runner_in_two_threads_refuses_and_is_never_wrong() -> None:
    """Of two threads' steps each is refused, or right as if it had been alone; only those are counted."""
    engine = Decode(config=gg.RunnerConfig(clone_outputs=True))
    engine.capture()
    engine.right(3)
    done, refused, failures = [0, 0], [0, 0], []

    def serve(place: int) -> None:
        number = 0
        try:
            while done[place] < 40 and number < 20_000:
                number += 1
                try:
                    engine.right(1 + (number + place) % 6, 10 * place + number % 5)
                    done[place] += 1
                except gg.GraphGlueError as error:
                    assert "in use, by another thread" in str(error)  # noqa: PT017
                    refused[place] += 1
                    time.sleep(0.001)  # or one thread may always find the other inside
        except BaseException as error:
            failures.append(error)

    workers = [threading.Thread(target=serve, args=(place,)) for place in (0, 1)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join(120)
    assert failures == []
    assert min(done) == 40
    assert engine.runner.stats()["steps"] == 1 + sum(done)
    check_serves(engine, 4, (GLUE, GRAPH, None, None))


def test_two_runners_are_captured_repaired_and_replayed_in_two_threads() -> None:
    failures: list[BaseException] = []

    def serve(part: str) -> None:
        try:
            for at in range(3):
                engine = Decode()
                engine.strike(Fault(part, RECORD, 4, at))
                engine.capture()
                check_serves(engine, 4, BECOMES[part, RECORD][1])
                engine.strike(None)
                assert engine.maintain() == [4]
                check_serves(engine, 4, (GLUE, GRAPH, None, None))
                engine.runner.close()
        except BaseException as error:
            failures.append(error)

    workers = [threading.Thread(target=serve, args=(part,)) for part in ("prep", "forward")]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join(120)
    assert failures == []
