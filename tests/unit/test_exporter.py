"""The exporter, read by the real client library's parsers: names, kinds, labels and values against ``stats()``."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable
from typing import Any

import pytest
import torch

pytest.importorskip("prometheus_client", reason="needs the extra: pip install 'graphglue[prometheus]'")
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.metrics_core import Metric
from prometheus_client.openmetrics.exposition import generate_latest as openmetrics
from prometheus_client.openmetrics.parser import text_string_to_metric_families as parse_openmetrics
from prometheus_client.parser import text_string_to_metric_families as parse_text

import graphglue as gg
from graphglue.exporter import FAMILIES, RunnerCollector, export
from tests.unit.operations import make, serve

pytestmark = pytest.mark.usefixtures("frozen_imports")
COUNTS = [3, 1, 0, 5, 9, 8, 3]

COUNTERS = {
    "graphglue_steps_total", "graphglue_real_tokens_total", "graphglue_padded_tokens_total",
    "graphglue_one_launch_steps_total", "graphglue_launch_fallback_steps_total", "graphglue_quarantines_total",
    "graphglue_shadow_samples_total", "graphglue_staged_steps_total", "graphglue_staged_taken_steps_total",
    "graphglue_staged_rejected_steps_total", "graphglue_key_steps_total",
}  # fmt: skip
GAUGES = {"graphglue_keys", "graphglue_key_capture_seconds", "graphglue_key_bytes"}


@pytest.fixture
def runner() -> gg.Runner:
    """A runner that staged, sampled, padded and fell back."""
    made = make(staging=True, shadow={"first": 1})
    serve(made, COUNTS)
    made.stage(gg.Batch(3, {"x": [1, 2, 3]}))
    serve(made, [4])  # rejects it
    made._units[0].cache.quarantine(made._wanted[0], 'it "broke"\nhere')
    made._stepper.forget()
    return made


def text_of(runner: gg.Runner) -> Iterable[Metric]:
    registry = CollectorRegistry()
    export({"decode": runner}, registry)
    return parse_text(generate_latest(registry).decode())


def openmetrics_of(runner: gg.Runner) -> Iterable[Metric]:
    registry = CollectorRegistry()
    export({"decode": runner}, registry)
    return parse_openmetrics(openmetrics(registry).decode())


@pytest.mark.parametrize("read", [text_of, openmetrics_of])
def test_the_names_and_kinds_are_these(runner: gg.Runner, read: Callable[[gg.Runner], Iterable[Metric]]) -> None:
    kinds = {sample.name: family.type for family in read(runner) for sample in family.samples}
    assert {name for name, kind in kinds.items() if kind == "counter"} == COUNTERS
    assert {name for name, kind in kinds.items() if kind == "gauge"} == GAUGES
    assert set(kinds) == COUNTERS | GAUGES


@pytest.mark.parametrize("read", [text_of, openmetrics_of])
def test_the_values_are_those_of_the_stats(runner: gg.Runner, read: Callable[[gg.Runner], Iterable[Metric]]) -> None:
    stats, seen = runner.stats(), {}
    for family in read(runner):
        for sample in family.samples:
            assert sample.labels["runner"] == "decode"
            assert sample.labels["rank"] == "0"
            seen.setdefault(sample.name, []).append((sample.labels, sample.value))

    def total(name: str) -> float:
        return sum(value for _, value in seen[name])

    assert total("graphglue_steps_total") == stats["steps"] == len(COUNTS) + 1
    assert total("graphglue_real_tokens_total") == stats["real_tokens"]
    assert total("graphglue_padded_tokens_total") == stats["padded_tokens"]
    assert total("graphglue_quarantines_total") == 1
    assert total("graphglue_shadow_samples_total") == stats["shadow"]["passed"] > 0
    assert [(labels["why"], value) for labels, value in seen["graphglue_staged_rejected_steps_total"]] == [
        ("other_step", 1)
    ]
    over = [value for labels, value in seen["graphglue_steps_total"] if labels["reason"] == "over_ladder"]
    assert over == [1]
    assert {labels["bucket"] for labels, _ in seen["graphglue_steps_total"]} == {"exact", "1x1", "4x4", "8x8"}
    states = {(labels["part"], labels["state"]): value for labels, value in seen["graphglue_keys"]}
    assert states == {("meta", "captured"): 3, ("meta", "quarantined"): 1, ("forward", "captured"): 4}
    pool = sum(value for labels, value in seen["graphglue_key_bytes"] if labels["part"] == "pool")
    assert pool == sum(key["num_bytes"] for key in stats["keys"]) > 0


def test_counters_never_fall(runner: gg.Runner) -> None:
    def counted() -> dict[Any, float]:
        samples = [one for family in text_of(runner) if family.type == "counter" for one in family.samples]
        # A key that is dropped takes its series with it; a series that is there never falls.
        return {(one.name, *sorted(one.labels.items())): one.value for one in samples}

    before = counted()
    runner.maintain()
    serve(runner, COUNTS)
    after = counted()
    assert all(after[series] >= value for series, value in before.items())
    assert sum(after.values()) > sum(before.values())


def test_two_runners_are_told_apart() -> None:
    runners = {"draft": make(), "target": make()}
    serve(runners["target"], [3])
    registry = CollectorRegistry()
    export(runners, registry)
    assert registry.get_sample_value("graphglue_one_launch_steps_total", {"runner": "draft", "rank": "0"}) == 0
    steps = [
        (sample.labels["runner"], sample.value)
        for family in parse_text(generate_latest(registry).decode())
        for sample in family.samples
        if sample.name == "graphglue_steps_total"
    ]
    assert steps == [("target", 1)]


def test_keys_that_are_labelled_alike_are_one_series() -> None:
    """A scrape with one series twice is refused as a whole."""

    class Odd:
        def __repr__(self) -> str:
            return "odd"

    contract = gg.PrepContract(name="meta", reads={"x": 0}, outputs={"m": "request"}, modes={gg.Mode.DECODE})
    registry = gg.Registry()
    registry.register(contract)(lambda view: {"m": view.x + 1})
    slots = [gg.Slot("x", axis="request", dtype=torch.int64, pad=0)]
    variants = (Odd(), Odd())
    runner = gg.Runner(slots=slots, ladder=[2], registry=registry, prep="meta", device="cpu", variants=variants)
    runner.capture(progress=False)
    for variant in variants:
        runner.prepare(gg.Batch(1, {"x": [1]}, variant=variant))
    samples = [sample for family in text_of(runner) for sample in family.samples]
    series = [(sample.name, *sorted(sample.labels.items())) for sample in samples]
    assert len(series) == len(set(series))
    assert [sample.value for sample in samples if sample.name == "graphglue_key_steps_total"] == [2]


def test_the_text_of_an_error_is_no_label() -> None:
    stats = {
        **make().stats(),
        "launch_fallbacks": {"NVRTC is gone: at 0x7f": 2, "NVRTC is gone: at 0x80": 3, "other": 1},
    }

    class Counted:
        def stats(self) -> dict[str, Any]:
            return stats

    samples = [sample for family in text_of(Counted()) for sample in family.samples]  # type: ignore[arg-type]
    whys = {one.labels["why"]: one.value for one in samples if one.name == "graphglue_launch_fallback_steps_total"}
    assert whys == {"NVRTC is gone": 5, "other": 1}


def test_registering_asks_no_runner() -> None:
    class Unasked:
        def stats(self) -> dict[str, Any]:
            raise AssertionError("asked")

    names = [metric.name for metric in RunnerCollector({"one": Unasked()}).describe()]
    assert len(names) == len(set(names)) == len(FAMILIES)
    export({"one": Unasked()}, CollectorRegistry())


def test_without_the_client_it_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "graphglue.exporter")
    for name in [name for name in sys.modules if name.partition(".")[0] == "prometheus_client"]:
        monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(gg.ConfigError, match=r'pip install "graphglue\[prometheus\]"'):
        import graphglue.exporter  # noqa: F401
