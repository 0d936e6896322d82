"""Timing: every contender takes its turn in each round, so that all see the same machine."""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from statistics import median

Step = Callable[[], object]


@dataclass(frozen=True)
class Sample:
    """The times of one contender, in us, in the order they were taken."""

    times_us: tuple[float, ...]

    @property
    def median_us(self) -> float:
        """The median."""
        return median(self.times_us)

    @property
    def p99_us(self) -> float:
        """The 99th percentile, by nearest rank."""
        ordered = sorted(self.times_us)
        return ordered[min(len(ordered) - 1, max(0, -(-len(ordered) * 99 // 100) - 1))]


@contextmanager
def quiet() -> Iterator[None]:
    """Freeze what garbage collection knows and hold it back, so that no collection falls into a step."""
    was_enabled = gc.isenabled()
    gc.collect()
    gc.freeze()
    gc.disable()
    try:
        yield
    finally:
        gc.unfreeze()
        if was_enabled:
            gc.enable()


def interleaved(
    steps: Mapping[str, Step],
    rounds: int,
    in_flight: int = 0,
    *,
    synchronize: Callable[[], None],
    clock_ns: Callable[[], int] = time.perf_counter_ns,
    progress: Callable[[], object] = lambda: None,
) -> dict[str, Sample]:
    """Time contenders in turn: A, B, ..., A, B, ..., one step of each in every round.

    Args:
        steps: label -> what to time.
        rounds: timed steps of each.
        in_flight: untimed steps of the same contender that are queued right before the timed one.
        synchronize: waits for the device; called before each turn.
        clock_ns: the clock, in nanoseconds.
        progress: called after each round.

    Sync: the device, before each turn; never between a turn's steps.
    """
    times: dict[str, list[float]] = {label: [] for label in steps}
    turns = [(step, times[label].append) for label, step in steps.items()]
    with quiet():
        for _ in range(rounds):
            for step, note in turns:
                synchronize()
                for _ in range(in_flight):
                    step()
                begin = clock_ns()
                step()
                note((clock_ns() - begin) / 1e3)
            progress()
    synchronize()
    return {label: Sample(tuple(taken)) for label, taken in times.items()}


def spread_us(first: Sample, second: Sample) -> float:
    """Give the noise: how far the medians of two rows of the very same thing are apart."""
    return abs(first.median_us - second.median_us)


def slope(points: Sequence[tuple[float, float]]) -> float:
    """Fit a line by least squares; give what one more unit costs."""
    mean_x = sum(x for x, _ in points) / len(points)
    mean_y = sum(y for _, y in points) / len(points)
    spread = sum((x - mean_x) ** 2 for x, _ in points)
    return sum((x - mean_x) * (y - mean_y) for x, y in points) / spread


def affordable(rounds: int, round_us: float, budget_seconds: float, least: int = 5) -> int:
    """Cut the rounds to what fits a time budget, but not below ``least``."""
    return max(min(least, rounds), min(rounds, int(budget_seconds * 1e6 / max(round_us, 1e-3))))
