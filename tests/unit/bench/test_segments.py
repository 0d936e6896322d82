"""The section segments, walked through on the tape with a stand-in for the peer; it measures on a GPU only."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from graphglue.bench import prefill, segments
from graphglue.bench.breakable import MODULE, load_breakable
from graphglue.bench.prefill import FILLS, RETURNS, BareLoop, Body, Way
from graphglue.bench.results import Row, Section
from graphglue.bench.sections import Settings
from graphglue.errors import ConfigError
from graphglue.graphs.tape import Tape

SAME = pytest.mark.parametrize("way", segments.WAYS, ids=["fills", "returns"])


@pytest.fixture
def as_gpu(monkeypatch: pytest.MonkeyPatch, settings: Settings) -> Settings:
    """Let the CPU pass for a GPU, with few layers and a peer that runs eagerly."""
    reserved, driver = iter((0, 100, 120)), iter((1000, 1200, 1500))
    monkeypatch.setattr(Settings, "on_gpu", property(lambda self: True))
    monkeypatch.setattr(settings.gauge, "reserved_bytes", lambda: next(reserved))
    monkeypatch.setattr(settings.gauge, "driver_bytes", lambda: next(driver))
    small = {"_ROWS": 8, "_NUM_LAYERS": 2, "_WIDTH": 4, "_MEMORY_BUCKETS": (8, 4, 2), "_MEMORY_WIDTH": 4}
    for name, value in small.items():
        monkeypatch.setattr(segments, name, value)
    monkeypatch.setattr(segments, "load_breakable", lambda folder: SimpleNamespace(no_graph=lambda run: run))
    monkeypatch.setattr(segments, "captured", lambda peer, run: run)
    settings.peers = {"breakable": Path("/unpacked")}
    return settings


def ran(settings: Settings) -> dict[tuple[str, int | None], Row]:
    section = Section("segments", "")
    segments.run_segments(settings, section)
    return {(row.label, row.in_flight): row for row in section.rows}


def test_every_way_is_timed_and_right(as_gpu: Settings) -> None:
    rows = ran(as_gpu)
    labels = (segments.BARE, segments.BARE_AGAIN, segments.EAGER, segments.OURS, segments.PADDED, segments.PEER)
    timed = {(segments.of_way(label, way), n) for label in labels for way in segments.WAYS for n in segments.IN_FLIGHT}
    steps = {(label, n) for label in (segments.OUR_STEP, segments.PEER_STEP) for n in segments.IN_FLIGHT}
    assert set(rows) == timed | steps | {(segments.MEMORY, None)}
    assert all(rows[key].host_us is not None for key in steps)
    assert not [row.note for row in rows.values() if "WRONG" in row.note or "Error" in row.note]
    for key in timed:
        assert rows[key].host_us is not None, rows[key].note
        assert rows[key].times_floor is not None


def test_memory_is_held_against_the_largest_bucket_alone(as_gpu: Settings) -> None:
    values = ran(as_gpu)[segments.MEMORY, None].values
    assert values == {
        "num_buckets": 3, "num_graphs": 9,
        "reserved_largest_bytes": 100, "reserved_all_bytes": 120, "reserved_ratio": 1.2,
        "driver_largest_bytes": 200, "driver_all_bytes": 500, "driver_ratio": 2.5,
    }  # fmt: skip


def test_without_the_peer_its_rows_say_how_to_ask_for_it(as_gpu: Settings) -> None:
    as_gpu.peers = {}
    row = ran(as_gpu)[segments.PEER, 0]
    assert row.host_us is None
    assert "--peer breakable=DIR" in row.note


def test_a_peer_that_can_not_capture_is_left_out(as_gpu: Settings, monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(peer: Any, run: Callable[[], object]) -> None:
        raise RuntimeError("capture failed\nand more")

    monkeypatch.setattr(segments, "captured", refused)
    assert ran(as_gpu)[segments.PEER, 0].note == "RuntimeError: capture failed"


def test_a_wrong_result_is_not_timed(as_gpu: Settings, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(segments, "captured", lambda peer, run: lambda: None)
    row = ran(as_gpu)[segments.PEER, 0]
    assert row.host_us is None
    assert row.note == "WRONG: the result of step 1 differs from the eager one"


def test_on_the_cpu_it_says_what_is_not_measured(settings: Settings) -> None:
    rows = ran(settings)
    assert {label for label, _ in rows} >= {segments.OURS, segments.PEER, segments.BARE, segments.MEMORY}
    assert all(row.note.startswith("needs a GPU") and row.host_us is None for row in rows.values())


# --- the body ---


@SAME
def test_the_bare_loop_computes_what_the_body_does(way: Way) -> None:
    body, tape = Body(torch.device("cpu"), rows=6, num_layers=3, width=4), Tape()
    with tape.session():
        loop = BareLoop(body, way.plain, tape).step
    for seed in range(3):
        body.rewrite(seed)
        expected = body.run(6, way.marked).clone()
        body.rewrite(seed)
        assert not torch.equal(body.result, expected)
        loop()
        assert torch.equal(body.result, expected)
        assert bool(expected.isfinite().all())


def test_both_breaks_give_the_same_and_each_layer_matters() -> None:
    body = Body(torch.device("cpu"), rows=4, num_layers=2, width=4)
    expected = body.run(4, FILLS.marked).clone()
    assert torch.equal(body.run(4, RETURNS.marked), expected)
    assert torch.equal(body.run(4, prefill.writing(prefill.copy_into)), expected)
    body.num_layers = 1
    assert not torch.equal(body.run(4, FILLS.marked), expected)


# --- the peer's folder ---


@pytest.fixture
def not_imported(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    before = sys.modules.pop(MODULE, None)
    yield
    sys.modules.pop(MODULE, None)
    if before is not None:
        sys.modules[MODULE] = before


@pytest.mark.usefixtures("not_imported")
def test_the_peer_is_loaded_from_its_folder_once(tmp_path: Path) -> None:
    (tmp_path / f"{MODULE}.py").write_text("names = []")
    peer = load_breakable(tmp_path)
    assert peer.names == []
    assert load_breakable(tmp_path) is peer


@pytest.mark.usefixtures("not_imported")
def test_another_one_that_is_imported_already_is_refused(tmp_path: Path) -> None:
    for name in ("first", "second"):
        (tmp_path / name).mkdir()
        (tmp_path / name / f"{MODULE}.py").write_text("")
    load_breakable(tmp_path / "first")
    with pytest.raises(ConfigError, match=r"another breakable_cuda_graphs is imported, from .*first"):
        load_breakable(tmp_path / "second")


def test_a_folder_without_it_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"breakable_cuda_graphs.py is not there; unpack the wheel"):
        load_breakable(tmp_path)
