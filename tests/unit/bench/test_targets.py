"""Targets, the noise mark and the plot, over made-up rows."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from graphglue.bench import baselines, contenders, memory, scaling, segments
from graphglue.bench.contenders import AGAIN, FLOOR, ONE_DEVICE, ONE_NUMPY, Contender, Sources
from graphglue.bench.plot import draw
from graphglue.bench.results import Report, Row, Section
from graphglue.bench.sections import Settings, measured
from graphglue.bench.targets import targets_of
from graphglue.errors import ConfigError


def timed(label: str, host_us: float, device_us: float = 0.0, bucket: int = 16, raw: int = 13) -> Row:
    return Row(label, bucket, raw, 0, 2000, host_us, host_us + 2, 4.0, 6.0, host_us / 4.0, device_us)


def floor_section() -> Section:
    rows = [
        timed(FLOOR, 4.0, 350.0),
        timed(ONE_DEVICE, 12.0, 404.0),
        timed(ONE_NUMPY, 24.0, 404.0),
        timed(AGAIN, 4.2, 350.0),
        timed(contenders.GLUE_ALONE, 3.0, 53.0),
        timed(contenders.EAGER_ALONE, 300.0, 60.0),
        timed(contenders.UNFILLED, 4.0, 402.0),
        timed(ONE_NUMPY, 30.0, bucket=256, raw=255),
        timed(baselines.ARENA_SLICES, 60.0, bucket=256, raw=255),
        timed(baselines.ARENA_BLOCK, 25.0, bucket=256, raw=255),
    ]
    return Section("floor", "one step", rows)


def segments_section() -> Section:
    rows = [
        timed(segments.of_way(label, way), host_us)
        for way, times in zip(segments.WAYS, ((400.0, 500.0), (450.0, 500.0)))
        for label, host_us in zip((segments.OURS, segments.PEER), times)
    ]
    rows += [timed(segments.OUR_STEP, 300.0), timed(segments.PEER_STEP, 600.0)]
    memory_row = Row(segments.MEMORY, values={"reserved_ratio": 1.1, "driver_ratio": 1.31})
    return Section("segments", "", [*rows, memory_row])


def report_of(*sections: Section) -> Report:
    return Report({"device": "a GPU"}, "2026-11-29T00:00:00+00:00", {}, "", {}, list(sections))


def test_targets_hold_what_was_seen_against_the_limits() -> None:
    seen = {target.what.split(" (noise")[0]: target for target in targets_of(report_of(floor_section()))}
    assert seen["one launch, device sources, x the floor"].reached
    assert seen["one launch, device sources, x the floor"].seen == "3.00 x"
    assert seen["the same, us more than the floor"].seen == "8.00 us"
    assert seen["one launch, numpy sources, x the floor"].reached is False
    assert seen["device time beyond forward + glue, each replayed alone"].seen == "1.00 us"
    assert seen["device time beyond forward + glue in one graph"].seen == "2.00 us"
    assert seen["host cost of the glued prep / the eager prep"].seen == "0.010"
    assert seen[f"numpy sources, 255 on 256 / {baselines.ARENA_SLICES}"].reached
    assert seen[f"numpy sources, 255 on 256 / {baselines.ARENA_BLOCK}"].reached is False


def test_the_noise_is_named_beside_the_target() -> None:
    assert any("noise 0.20 us" in target.what for target in targets_of(report_of(floor_section())))


def test_what_was_not_measured_is_left_open() -> None:
    targets = targets_of(report_of())
    assert len(targets) == 28
    assert all(target.reached is None and target.seen == "-" for target in targets)


def test_the_other_sections_targets() -> None:
    sections = [
        Section("fill", "", [Row("the fill's rate / the copy's", values={"rate_ratio": 0.7})]),
        Section("slots", "", [Row(f"{scaling.PER_SLOT}: {ONE_DEVICE}", values={"us_per_slot": 0.3})]),
        Section("keys", "", [timed(scaling.ONE_KEY, 8.0), timed(scaling.ALL_KEYS, 10.0)]),
        Section("compositions", "", [Row("m", values={"forward_nodes": 2000, "a_ratio": 1.05, "b_ratio": 2.2})]),
        segments_section(),
    ]
    seen = {target.what: target.reached for target in targets_of(report_of(*sections)) if target.reached is not None}
    assert seen == {
        memory.FILL + ", rate / a plain copy's": False,
        f"one more slot, {ONE_DEVICE}": True,
        "p99 of all keys in turn / one key": True,
        "driver memory at 2,000 nodes, A / the forwards alone": True,
        "driver memory at 2,000 nodes, B / the forwards alone": False,
        "segmented replay / breakable-cuda-graphs'": True,
        "segmented replay / breakable-cuda-graphs', the break returns a tensor": False,
        "a whole prefill step / one with slice copies, eager prep and breakable-cuda-graphs'": True,
        "12 token buckets / the largest alone, allocator": True,
        "12 token buckets / the largest alone, driver": False,
    }


def test_a_row_within_the_noise_is_marked(
    settings: Settings, sources: Sources, monkeypatch: pytest.MonkeyPatch
) -> None:
    from graphglue.bench import sections
    from graphglue.bench.timing import Sample

    made_up = {FLOOR: 4.0, "close": 4.1, "far": 5.0, AGAIN: 4.2}
    samples = {label: Sample((us,)) for label, us in made_up.items()}
    monkeypatch.setattr(sections, "interleaved", lambda *_, **__: samples)
    rows = measured(settings, [Contender(label, lambda: None) for label in made_up], sources, deep=False)
    assert {row.label: row.within_noise for row in rows} == {FLOOR: False, "close": True, "far": False, AGAIN: False}
    assert [row.times_floor for row in rows] == pytest.approx([1, 1.025, 1.25, 1.05])


def test_each_contender_takes_turns_with_the_floor_alone(
    settings: Settings, sources: Sources, monkeypatch: pytest.MonkeyPatch
) -> None:
    from graphglue.bench import sections
    from graphglue.bench.timing import Sample

    floors = iter((4.0, 8.0, 2.0))
    groups: list[list[str]] = []

    def interleaved(steps: dict[str, object], *_: object, **__: object) -> dict[str, Sample]:
        groups.append(list(steps))
        return {label: Sample((next(floors) if label == FLOOR else 8.0,)) for label in steps}

    monkeypatch.setattr(sections, "interleaved", interleaved)
    contenders = [Contender(label, lambda: None) for label in (FLOOR, "one", "two", AGAIN)]
    rows = {row.label: row for row in measured(settings, contenders, sources, deep=False)}
    assert groups == [[FLOOR, AGAIN], [FLOOR, "one"], [FLOOR, "two"]]
    assert {label: row.times_floor for label, row in rows.items()} == {FLOOR: 1.0, AGAIN: 2.0, "one": 1.0, "two": 4.0}
    assert {label: row.floor_us for label, row in rows.items()} == {FLOOR: 4.0, AGAIN: 4.0, "one": 8.0, "two": 2.0}
    groups.clear()
    floors = iter((4.0,))
    measured(settings, contenders, sources, deep=False, crowded=True)
    assert groups == [[FLOOR, "one", "two", AGAIN]]


def test_the_plot_is_written(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib", reason="the plot needs matplotlib, of the extra bench")
    peers = Section("peers", "", [timed("sglang defaults", 500.0), timed("sglang, mixed dtypes", 600.0)])
    draw(report_of(floor_section(), peers), tmp_path / "bench.png")
    assert (tmp_path / "bench.png").read_bytes().startswith(b"\x89PNG")


def test_a_plot_of_nothing_is_refused(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib", reason="the plot needs matplotlib, of the extra bench")
    with pytest.raises(ConfigError, match="no step was timed"):
        draw(report_of(), tmp_path / "bench.png")


def test_a_plot_without_matplotlib_names_the_extra(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(ConfigError, match=r'pip install "graphglue\[bench\]"'):
        draw(report_of(floor_section()), tmp_path / "bench.png")
