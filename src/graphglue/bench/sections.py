"""What all sections share: their settings, and how contenders become rows."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Protocol

import torch
from tqdm import tqdm

from graphglue.bench.contenders import AGAIN, FLOOR, Contender, Sources, differences
from graphglue.bench.gauge import Gauge
from graphglue.bench.results import Row
from graphglue.bench.timing import Sample, Step, affordable, interleaved, spread_us
from graphglue.errors import GraphGlueError

logger = logging.getLogger("graphglue")

BUCKETS = (1, 4, 16, 64, 256)
_WARM_STEPS = 5


@dataclass
class Settings:
    """Say what to run.

    Attributes:
        device: a CUDA device with an index, or the CPU.
        steps: timed steps of each row, 0 in flight.
        buckets: requests of each bucket.
        only: the sections to run; all if empty.
        peers: name -> the folder its package was unpacked in.
        trace: a CSV of arrivals for the fleets of ranks; a seeded generator's by default.
    """

    device: torch.device
    steps: int
    buckets: tuple[int, ...] = BUCKETS
    only: tuple[str, ...] = ()
    peers: Mapping[str, Path] = field(default_factory=dict)
    trace: Path | None = None

    def __post_init__(self) -> None:
        self.gauge = Gauge(self.device)

    @property
    def on_gpu(self) -> bool:
        """Whether this is a measurement; the tape is for truth."""
        return self.device.type == "cuda"


class Extents(Protocol):
    """What the rows of one shape say of it: ``Sources``, or as much of them."""

    @property
    def num_requests(self) -> int:
        """The real extent."""

    @property
    def bucket(self) -> int:
        """The captured one."""


def raw_counts(bucket: int) -> tuple[int, ...]:
    """Give the real requests to measure on a bucket: padded, then full; 13 on 16."""
    return (1,) if bucket == 1 else (bucket - 3 if bucket == 16 else bucket - 1, bucket)


def proven(contenders: Sequence[Contender], sources: Sources, gauge: Gauge) -> list[Contender]:
    """Hold every contender's metadata against the eager prep; one that differs or raises is not timed.

    Must come before they run otherwise: each takes its sources in turn, from the first.
    """
    return [_proven(contender, sources, gauge) for contender in contenders]


def _proven(contender: Contender, sources: Sources, gauge: Gauge) -> Contender:
    if contender.step is None:
        return contender
    try:
        fault = differences(contender, sources, gauge.synchronize)
    except (GraphGlueError, RuntimeError) as error:
        logger.warning("the benchmark leaves %r out: %r", contender.label, error)
        fault = f"{type(error).__name__}: {str(error).splitlines()[0][:160]}"
    return replace(contender, step=None, why_not=fault) if fault else contender


def measured(
    settings: Settings,
    contenders: Sequence[Contender],
    sources: Extents,
    *,
    in_flight: int = 0,
    steps: int | None = None,
    budget_seconds: float = 40.0,
    deep: bool = True,
    crowded: bool = False,
    describe: str = "",
) -> list[Row]:
    """Time proven contenders, each in turn with the floor, and give a row for each; those that can not run say why.

    Args:
        settings: what the run is like.
        contenders: among them FLOOR and AGAIN, which make the noise row.
        sources: what the contenders run over.
        in_flight: steps queued before a timed one.
        steps: timed steps of each, where it is not the settings' number.
        budget_seconds: cut the steps to what fits in it; the row says how many were timed.
        deep: also measure device time and steps per second.
        crowded: time all contenders in turn, so that each finds the host's caches full of the others.
        describe: shown on the progress bar.
    """
    running = {contender.label: contender.step for contender in contenders if contender.step is not None}
    rounds = settings.steps if steps is None else steps
    groups = [running] if crowded else _pairs(running)
    timed: dict[str, dict[str, Sample]] = {}
    for group in groups:
        samples = _timed(settings, group, rounds, in_flight, budget_seconds / len(groups), describe)
        timed |= {label: samples for label in group if label != FLOOR or FLOOR not in timed}
    noise = _noise(timed.get(AGAIN, {}))
    rows = [_row(contender, sources, in_flight, timed.get(contender.label, {}), noise) for contender in contenders]
    for row in rows if deep else ():
        if row.host_us is not None:
            row.device_us = settings.gauge.device_us(running[row.label], row.host_us)
            row.per_second = settings.gauge.per_second(running[row.label], max(2, min(200, rounds)))
    return rows


def _pairs(running: Mapping[str, Step]) -> list[dict[str, Step]]:
    """Put the floor beside each contender, the noise row first: A, B, A, B."""
    if FLOOR not in running:
        return [{label: step} for label, step in running.items()]
    floor = {FLOOR: running[FLOOR]}
    others = sorted((label for label in running if label != FLOOR), key=lambda label: label != AGAIN)
    return [{**floor, label: running[label]} for label in others] or [floor]


def _timed(
    settings: Settings, running: Mapping[str, Step], rounds: int, in_flight: int, budget_seconds: float, describe: str
) -> dict[str, Sample]:
    gauge = settings.gauge
    for step in running.values():
        for _ in range(_WARM_STEPS):
            step()
    gauge.synchronize()
    round_us = _round_us(running, in_flight, gauge)
    rounds = affordable(rounds, round_us, budget_seconds)
    with tqdm(total=rounds, desc=describe, unit="round", disable=None, leave=False) as bar:
        return interleaved(running, rounds, in_flight, synchronize=gauge.synchronize, progress=bar.update)


def _round_us(running: Mapping[str, Step], in_flight: int, gauge: Gauge) -> float:
    """Estimate what one round takes, the device's part included."""
    return sum(1e6 * (in_flight + 1) / gauge.per_second(step, 3) for step in running.values())


def _noise(samples: Mapping[str, Sample]) -> float | None:
    """Give how far the floor is from itself."""
    return spread_us(samples[FLOOR], samples[AGAIN]) if FLOOR in samples and AGAIN in samples else None


def _row(
    contender: Contender, sources: Extents, in_flight: int, samples: Mapping[str, Sample], noise: float | None
) -> Row:
    label, note = contender.label, contender.why_not or contender.note
    row = Row(label, sources.bucket, sources.num_requests, in_flight, note=note)
    sample, floor = samples.get(label), samples.get(FLOOR)
    if sample is None:
        return row
    row.num_steps, row.host_us, row.host_p99_us = len(sample.times_us), sample.median_us, sample.p99_us
    if floor is not None:
        row.floor_us, row.floor_p99_us = floor.median_us, floor.p99_us
        row.times_floor = sample.median_us / floor.median_us
        if noise is not None and label not in (FLOOR, AGAIN):
            row.within_noise = abs(sample.median_us - floor.median_us) <= noise
    return row
