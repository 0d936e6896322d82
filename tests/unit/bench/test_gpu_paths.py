"""What only a GPU runs, walked through on stand-ins: that it measures the right thing is seen there only."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from graphglue.bench import compositions, memory
from graphglue.bench.gauge import Gauge
from graphglue.bench.results import Section
from graphglue.bench.sections import Settings
from graphglue.device.cpu import TorchFill
from graphglue.graphs.tape import TapeRecording


class Module:
    """Stand for torch.cuda; a step takes 7 us on the device."""

    def __init__(self) -> None:
        self.seen: list[str] = []

    def synchronize(self) -> None:
        self.seen.append("sync")

    def _sleep(self, cycles: int) -> None:
        self.seen.append("sleep")

    def Event(self, enable_timing: bool) -> Any:
        module = self

        class Event:
            def record(self) -> None:
                self.steps = module.seen.count("step")
                module.seen.append("record")

            def elapsed_time(self, other: Any) -> float:
                return (other.steps - self.steps) * 7e-3

        return Event()


def test_device_time_is_that_of_steps_queued_behind_a_busy_gpu() -> None:
    gauge, module = Gauge(torch.device("cpu")), Module()
    gauge._module, gauge.on_gpu = module, True
    found = gauge.device_us(lambda: module.seen.append("step"), host_us=5.0, steps=3, repeats=2)
    assert found == pytest.approx(7.0)
    assert module.seen[:7] == ["sync", "sleep", "record", "step", "step", "step", "record"]


def test_there_is_no_device_time_on_the_cpu() -> None:
    gauge = Gauge(torch.device("cpu"))
    assert gauge.device_us(lambda: None, host_us=1.0) is None
    assert gauge.driver_bytes() == gauge.reserved_bytes() == 0


class Launch:
    """Stand for both compositions."""

    def __init__(self, fill: Any, preps: Any, forward: Any) -> None:
        self._fill, self._graphs = fill, [*preps, *(forward if isinstance(forward, list) else [forward])]

    def run(self) -> None:
        self._fill.run()
        for graph in self._graphs:
            graph.replay()

    def close(self) -> None:
        self._graphs = []


@pytest.fixture
def as_gpu(monkeypatch: pytest.MonkeyPatch, settings: Settings) -> Settings:
    """Let the CPU pass for a GPU whose driver has taken 2 MiB more at every look."""
    used = iter(range(0, 10**12, 2**21))
    monkeypatch.setattr(Settings, "on_gpu", property(lambda self: True))
    monkeypatch.setattr(settings.gauge, "driver_bytes", lambda: next(used))
    monkeypatch.setattr(settings.gauge, "device_us", lambda step, host_us, **_: (step(), 10.0)[1])
    monkeypatch.setattr(TapeRecording, "graph", property(lambda self: self), raising=False)
    monkeypatch.setattr(TorchFill, "remember", lambda self, writes, sources: lambda given: self.load(writes) is None)
    for name in ("PrependedLaunch", "ParentLaunch"):
        monkeypatch.setattr(compositions, name, Launch)
    monkeypatch.setattr(compositions, "FORWARD_NODES", (3, 5))
    monkeypatch.setattr(compositions, "IN_FLIGHT", (0, 2))
    monkeypatch.setattr(compositions, "_NUM_COPIES", 2)
    return settings


def test_compositions_are_compared(as_gpu: Settings) -> None:
    section = Section("compositions", "")
    compositions.run_compositions(as_gpu, section)
    assert not [row.note for row in section.rows if "WRONG" in row.note or "Error" in row.note]
    for label in (compositions.PREPENDED, compositions.PARENT):
        rows = [row for row in section.rows if row.label == label]
        shapes = [(row.values["forward_nodes"], row.in_flight) for row in rows]
        assert shapes == [(3, 0), (3, 2), (5, 0), (5, 2)]
        assert all(row.host_us is not None for row in rows)
        assert [row.device_us for row in rows] == [10.0, None, 10.0, None]
    ratios = [row.values for row in section.rows if "a_ratio" in row.values]
    assert [values["a_ratio"] for values in ratios] == [2.0, 2.0]
    advances = [row.values["random_advances"] for row in section.rows if "random_advances" in row.values]
    assert advances == [True, True]  # the tape draws anew in every replay


def test_the_fill_is_compared_with_a_copy(as_gpu: Settings, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in (("_ROWS", 4), ("_WIDTH", 16), ("_NUM_SOURCES", 2)):
        monkeypatch.setattr(memory, name, value)
    section = Section("fill", "")
    memory.run_fill(as_gpu, section)
    assert [row.device_us for row in section.rows[:2]] == [10.0, 10.0]
    assert section.rows[2].values == {"rate_ratio": 1.0}


def test_capture_is_counted(as_gpu: Settings) -> None:
    section = Section("capture", "")
    memory.run_capture(as_gpu, section)
    (row,) = section.rows
    assert row.values["reserved_bytes"] == 0
    assert row.values["driver_bytes"] == 2**21
    assert row.values["capture_seconds"] > 0
