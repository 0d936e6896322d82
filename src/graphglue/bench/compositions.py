"""The two compositions of one launch, side by side: host time, device time, memory, random numbers."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch

import graphglue as gg
from graphglue.bench.contenders import AGAIN, FLOOR, Contender, Sources
from graphglue.bench.results import Row, Section
from graphglue.bench.sections import Settings, measured, proven
from graphglue.bench.workload import TOKENS_PER_REQUEST, Workload, prep
from graphglue.core.binding import Write
from graphglue.device.base import Launch
from graphglue.device.launch import ParentLaunch, PrependedLaunch
from graphglue.graphs.base import Recorder

PREPENDED, PARENT = "A: in the forward's own graph, torch replay", "B: parent of child graphs, raw launch"
FORWARD_NODES = (100, 500, 2000)
IN_FLIGHT = (0, 1, 2, 8, 64)
_BUCKET, _RAW, _NUM_COPIES = 16, 13, 24
_BUDGET_SECONDS = 2.5


@dataclass
class _Pieces:
    """What both compositions are made of."""

    arena: gg.Arena
    recorder: Recorder
    view: Any
    metadata: dict[str, torch.Tensor]
    writes: list[Write]
    sources: dict[str, torch.Tensor]
    kept: list[Any] = field(default_factory=list)

    def record(self, run: Callable[[], Any]) -> Any:
        """Record a callable after a warm-up."""
        with torch.no_grad(), self.recorder.session():
            run()
            self.recorder.finish()
            return self.recorder.record(run, strict=False)

    def step(self, launch: Launch) -> Callable[[], object]:
        """Load the fill and launch, as a runner does with a step like the last one."""
        fill, sources = self.arena.fill_of(self.arena.space.bucket(_BUCKET)), self.sources
        fill.load(self.writes)
        take = fill.remember(self.writes, sources)
        assert take is not None

        def run() -> dict[str, torch.Tensor]:
            take(sources)
            launch.run()
            return self.metadata

        return run


def run_compositions(settings: Settings, section: Section) -> None:
    """Compare both compositions over forwards of 100, 500 and 2,000 nodes."""
    if not settings.on_gpu:
        note = "needs a GPU: the tape composes nothing"
        section.rows += [Row(PREPENDED, note=note), Row(PARENT, note=note)]
        return
    workload = Workload(settings.device, num_layers=0)
    sources = Sources.draw(workload, _RAW, _BUCKET)
    pieces = _pieces(workload, sources)
    for num_nodes in FORWARD_NODES:
        section.rows += _times(settings, pieces, sources, num_nodes)
        section.rows.append(_memory(settings, pieces, num_nodes))
    section.rows += [_random(settings, pieces, label) for label in (PREPENDED, PARENT)]
    section.notes.append(
        "no Runner around it; forwards of small pointwise operations; memory over "
        f"{_NUM_COPIES} graphs each, all launched once, beyond torch's reserve"
    )


def _pieces(workload: Workload, sources: Sources) -> _Pieces:
    arena = gg.Arena(workload.slots(), [_BUCKET], device=workload.device, tokens_per_request=TOKENS_PER_REQUEST)
    bucket, raw = arena.space.bucket(_BUCKET), arena.space.bucket(_RAW)
    view = workload.view_of(arena.targets(bucket))
    # One set only: what differs here is the launch.
    sources.on_device, sources.expected = sources.on_device[:1], sources.expected[:1]
    writes = arena.bind(sources.on_device[0], raw, bucket)
    return _Pieces(arena, arena.device.recorder(), view, prep(view), writes, sources.on_device[0])


def _forward(num_nodes: int, device: torch.device, random: bool = False) -> Callable[[], torch.Tensor]:
    hidden = torch.ones(_BUCKET * TOKENS_PER_REQUEST, 256, device=device)

    def run() -> torch.Tensor:
        result = hidden + torch.rand_like(hidden) if random else hidden
        for _ in range(num_nodes - random):
            result = result + 1.0
        return result

    return run


def _times(settings: Settings, pieces: _Pieces, sources: Sources, num_nodes: int) -> list[Row]:
    contenders = proven(_contenders(settings, pieces, num_nodes), sources, settings.gauge)
    rows = []
    for in_flight in IN_FLIGHT:
        rows += measured(
            settings,
            contenders,
            sources,
            in_flight=in_flight,
            steps=max(5, settings.steps // 4),
            budget_seconds=_BUDGET_SECONDS,
            deep=in_flight == 0,
            describe=f"{num_nodes} nodes, {in_flight} in flight",
        )
    for row in rows:
        row.values["forward_nodes"] = num_nodes
    return rows


def _contenders(settings: Settings, pieces: _Pieces, num_nodes: int) -> list[Contender]:
    forward = _forward(num_nodes, settings.device)
    prepared = pieces.record(lambda: prep(pieces.view, pieces.metadata))
    bare, first, second = (pieces.record(forward) for _ in range(3))
    pieces.kept.append(forward)  # it owns what the graphs read
    fill = pieces.arena.fill_of(pieces.arena.space.bucket(_BUCKET))
    launches: dict[str, Launch] = {
        PREPENDED: PrependedLaunch(fill, [prepared.graph], first.graph),
        PARENT: ParentLaunch(fill, [prepared.graph], [second.graph]),
    }
    return [
        Contender(FLOOR, bare.graph.replay),
        *(Contender(label, pieces.step(launch), lambda metadata: metadata) for label, launch in launches.items()),
        Contender(AGAIN, bare.graph.replay, note="the noise row"),
    ]


def _memory(settings: Settings, pieces: _Pieces, num_nodes: int) -> Row:
    """Count what the driver takes for forwards alone, and on top of them for each composition.

    Each composition has forwards of its own, and nothing is dropped in between: what the driver had freed
    it would give out again, uncounted.
    """
    forward = _forward(num_nodes, settings.device)
    prepared = pieces.record(lambda: prep(pieces.view, pieces.metadata))
    fill = pieces.arena.fill_of(pieces.arena.space.bucket(_BUCKET))
    values: dict[str, float | bool] = {"forward_nodes": num_nodes}
    kept: list[Any] = [forward]
    for name in ("a", "b"):
        before = _beyond_reserve(settings)
        forwards = [pieces.record(forward) for _ in range(_NUM_COPIES)]
        for recording in forwards:
            recording.replay()
        alone = _beyond_reserve(settings) - before
        composed = [
            PrependedLaunch(fill, [prepared.graph], recording.graph)
            if name == "a"
            else ParentLaunch(fill, [prepared.graph], [recording.graph])
            for recording in forwards
        ]
        with_all = _launched(settings, pieces, composed) - before
        kept += [*forwards, *composed]
        if alone > 0:  # the driver counts in steps of 2 MiB, which small graphs do not fill
            values |= {f"{name}_alone_bytes": alone / _NUM_COPIES, f"{name}_ratio": with_all / alone}
    return Row("driver memory of the composed graphs / of the forwards alone", _BUCKET, values=values)


def _launched(settings: Settings, pieces: _Pieces, launches: list[Any]) -> int:
    for launch in launches:
        pieces.step(launch)()
    return _beyond_reserve(settings)


def _beyond_reserve(settings: Settings) -> int:
    settings.gauge.release()
    return settings.gauge.driver_bytes() - settings.gauge.reserved_bytes()


def _random(settings: Settings, pieces: _Pieces, label: str) -> Row:
    """Tell whether random numbers of a forward move on from one launch to the next."""
    prepared = pieces.record(lambda: prep(pieces.view, pieces.metadata))
    run = _forward(10, settings.device, random=True)  # kept: it owns what the graph reads
    forward = pieces.record(run)
    fill = pieces.arena.fill_of(pieces.arena.space.bucket(_BUCKET))
    if label == PREPENDED:
        launch: Any = PrependedLaunch(fill, [prepared.graph], forward.graph)
    else:
        launch = ParentLaunch(fill, [prepared.graph], [forward.graph])
    step, seen = pieces.step(launch), []
    for _ in range(2):
        step()
        settings.gauge.synchronize()
        seen.append(forward.outputs.clone())
    return Row(f"random numbers move on: {label[0]}", values={"random_advances": not torch.equal(*seen)})
