"""Segmented prefill: what a replay with an eager break in each layer costs the host, and what many buckets take."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from graphglue.bench.breakable import captured, load_breakable
from graphglue.bench.contenders import AGAIN, FLOOR, Contender
from graphglue.bench.prefill import FILLS, RETURNS, BareLoop, Body, Way, writing
from graphglue.bench.prefill_step import NUM_REQUESTS, Steps
from graphglue.bench.results import Row, Section
from graphglue.bench.sections import Settings, measured
from graphglue.bench.timing import Step
from graphglue.device.base import open_device
from graphglue.errors import GraphGlueError
from graphglue.graphs.base import Recorder
from graphglue.graphs.segments import SegmentedRecording, record_segments

WAYS = (FILLS, RETURNS)
BARE, BARE_AGAIN = "a bare loop of the same launches (the floor)", "the bare loop again (A/A)"
EAGER, OURS, PADDED = "eager", "segmented replay", "segmented replay, other real rows each step"
PEER = "breakable-cuda-graphs' replay"
OUR_STEP = "a whole step: Runner.replay"
PEER_STEP = "a whole step: slice copies, eager prep, breakable-cuda-graphs' replay"
MEMORY = "token buckets in one pool / the largest alone"
IN_FLIGHT = (0, 4)
_ROWS, _NUM_LAYERS, _WIDTH = 64, 32, 256
_MEMORY_BUCKETS = (8192, 6144, 4096, 3072, 2048, 1536, 1024, 768, 512, 256, 128, 64)
_MEMORY_WIDTH = 4096
_NEEDS_GPU = "needs a GPU: the tape runs every operation from Python, and takes no device memory"
_NO_PEER = "not asked for: pass --peer breakable=DIR, the folder its wheel was unpacked in"


def of_way(label: str, way: Way) -> str:
    """Name a row; the way that attention backends have has no name of its own."""
    return label + way.label


def run_segments(settings: Settings, section: Section) -> None:
    """Time a prefill body in all the ways there are to run it, then count the memory of its buckets."""
    if not settings.on_gpu:
        labels = [of_way(label, way) for way in WAYS for label in (BARE, EAGER, OURS, PADDED, PEER)]
        labels += [OUR_STEP, PEER_STEP]
        section.rows += [Row(label, note=_NEEDS_GPU) for label in (*labels, MEMORY)]
        return
    with torch.no_grad():
        for way in WAYS:
            section.rows += _times(settings, way)
        section.rows += _step_times(settings)
        section.rows.append(_memory(settings))
    section.notes.append(
        f"{_NUM_LAYERS} layers with one break each, {_ROWS} rows; the break is one small kernel, so that the host's "
        "time is what there is; one of each in every round; the peer cuts no rows"
    )
    section.notes.append(
        f"memory: {_NUM_LAYERS} layers of width {_MEMORY_WIDTH}, captured largest first and each launched once; the "
        "driver's count has torch's reserve and the graphs themselves"
    )


@dataclass(frozen=True)
class _Extents:
    """What the rows of one shape say of it."""

    num_requests: int
    bucket: int


def _times(settings: Settings, way: Way) -> list[Row]:
    body = Body(settings.device, _ROWS, _NUM_LAYERS, _WIDTH)
    contenders = [_proven(contender, body, way, settings) for contender in _contenders(settings, body, way)]
    rows = _in_turn(settings, contenders, _ROWS, 10.0, "segments")
    names = {FLOOR: BARE, AGAIN: BARE_AGAIN}
    for row in rows:
        row.label = of_way(names.get(row.label, row.label), way)
    return rows


def _step_times(settings: Settings) -> list[Row]:
    """Time whole steps: sources in, metadata, layers."""
    body = Body(settings.device, _ROWS, _NUM_LAYERS, _WIDTH)
    peer, steps = _peer(settings, body, FILLS), Steps(body, FILLS.marked)
    contenders = [Contender(OUR_STEP, steps.glued)]
    if peer.step is None:
        contenders.append(replace(peer, label=PEER_STEP))
    else:
        contenders.append(Contender(PEER_STEP, steps.by_hand(peer.step)))
    proven = [_proven(contender, body, FILLS, settings) for contender in contenders]
    with steps.runner:
        return _in_turn(settings, proven, NUM_REQUESTS, 5.0, "whole prefill steps")


def _in_turn(
    settings: Settings, contenders: Sequence[Contender], num_requests: int, budget_seconds: float, what: str
) -> list[Row]:
    """Time contenders, one of each in every round, with fewer and more steps in flight."""
    rows = []
    for in_flight in IN_FLIGHT:
        rows += measured(
            settings,
            contenders,
            _Extents(num_requests, _ROWS),
            in_flight=in_flight,
            steps=max(5, settings.steps // 4),
            budget_seconds=budget_seconds,
            deep=False,
            crowded=True,
            describe=f"{what}, {in_flight} in flight",
        )
    return rows


def _contenders(settings: Settings, body: Body, way: Way) -> list[Contender]:
    """Build them; each records for itself, in a pool of its own."""
    recorder = _warm(settings, body, way)
    with recorder.session():
        bare = BareLoop(body, way.plain, recorder).step
    ours, padded = (_recorded(_warm(settings, body, way), body, _ROWS, way) for _ in range(2))
    turn, cut = itertools.cycle(range(_ROWS - 1, _ROWS // 2, -1)).__next__, f"{_ROWS // 2 + 1} to {_ROWS - 1} are real"
    return [
        Contender(FLOOR, bare),
        Contender(EAGER, lambda: body.run(_ROWS, way.marked)),
        Contender(OURS, ours.replay),
        Contender(AGAIN, bare, note="the noise row"),
        _peer(settings, body, way),
        Contender(PADDED, lambda: padded.replay(turn()), note=cut),
    ]


def _warm(settings: Settings, body: Body, way: Way, sizes: Sequence[int] = ()) -> Recorder:
    """Build a recorder and run the body on its stream, as a capture wants it."""
    recorder = open_device(settings.device).recorder()
    with recorder.session():
        for rows in (*sizes, *sizes) or (body.rows,) * 2:
            body.run(rows, way.marked)
        recorder.finish()
    return recorder


def _recorded(recorder: Recorder, body: Body, rows: int, way: Way) -> SegmentedRecording:
    with recorder.session():
        return record_segments(recorder, lambda: body.run(rows, way.marked))


def _peer(settings: Settings, body: Body, way: Way) -> Contender:
    """Capture with the published package. Its breaks may return no tensor, so they write or copy into one."""
    folder = settings.peers.get("breakable")
    if folder is None:
        return Contender(PEER, None, why_not=_NO_PEER)
    peer = load_breakable(folder)
    try:
        return Contender(PEER, captured(peer, lambda: body.run(_ROWS, writing(peer.no_graph(way.plain)))))
    except RuntimeError as error:
        return Contender(PEER, None, why_not=f"{type(error).__name__}: {str(error).splitlines()[0][:160]}")


def _proven(contender: Contender, body: Body, way: Way, settings: Settings) -> Contender:
    """Hold the result of a contender against the eager one, bit for bit; one that differs is not timed."""
    if contender.step is None:
        return contender
    real = _ROWS // 2 + 1 if contender.label == PADDED else _ROWS  # the rows that are real in each of its steps
    try:
        fault = next(
            (text for seed in range(1, 4) if (text := _fault(contender.step, body, way, settings, seed, real))), ""
        )
    except (GraphGlueError, RuntimeError) as error:
        fault = f"{type(error).__name__}: {str(error).splitlines()[0][:160]}"
    return replace(contender, step=None, why_not=fault) if fault else contender


def _fault(step: Step, body: Body, way: Way, settings: Settings, seed: int, real: int) -> str:
    body.rewrite(seed)
    body.run(_ROWS, way.marked)
    expected = body.result.clone()
    body.rewrite(seed)
    step()
    settings.gauge.synchronize()
    same = torch.equal(body.result[:real], expected[:real])
    return "" if same else f"WRONG: the result of step {seed} differs from the eager one"


def _memory(settings: Settings) -> Row:
    """Count what the largest bucket takes, and what all take that are recorded behind it in its pool."""
    gauge, sizes = settings.gauge, _MEMORY_BUCKETS
    body = Body(settings.device, sizes[0], _NUM_LAYERS, _MEMORY_WIDTH, num_weights=1)
    recorder = _warm(settings, body, FILLS, sizes)  # kernels are loaded when they first run: not memory of a bucket

    def taken() -> tuple[int, int]:
        gauge.synchronize()
        gauge.release()
        return gauge.reserved_bytes(), gauge.driver_bytes()

    before, kept = taken(), []
    largest = before
    for rows in sizes:
        kept.append(_recorded(recorder, body, rows, FILLS))
        kept[-1].replay()
        if rows == sizes[0]:
            largest = taken()
    return _compared(_less(largest, before), _less(taken(), before), kept)


def _less(after: Sequence[int], before: Sequence[int]) -> list[int]:
    return [one - other for one, other in zip(after, before)]


def _compared(largest: Sequence[int], every: Sequence[int], recordings: Sequence[Any]) -> Row:
    graphs = sum(len(recording.segments) for recording in recordings)
    values: dict[str, float | bool] = {"num_buckets": len(recordings), "num_graphs": graphs}
    for name, one, many in zip(("reserved", "driver"), largest, every):
        values |= {f"{name}_largest_bytes": one, f"{name}_all_bytes": many}
        if one > 0:
            values[f"{name}_ratio"] = many / one
    return Row(MEMORY, _MEMORY_BUCKETS[0], values=values)
