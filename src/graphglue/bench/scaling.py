"""How the host's cost grows: with the number of slots, and with the number of captured keys in use."""

from __future__ import annotations

import itertools
from contextlib import ExitStack, closing

import graphglue as gg
from graphglue.bench.contenders import (
    AGAIN,
    FLOOR,
    ONE_DEVICE,
    ONE_NUMPY,
    Contender,
    Recorded,
    Sources,
    of_runner,
    replays,
)
from graphglue.bench.results import Row, Section
from graphglue.bench.sections import Settings, measured, proven
from graphglue.bench.timing import Step, affordable, interleaved, slope
from graphglue.bench.workload import Workload

SLOT_COUNTS = (5, 10, 15, 20, 25)
PER_SLOT = "one more slot"
ONE_KEY, ALL_KEYS = "one key, again and again", "all keys in turn"
_BUCKET, _RAW = 16, 13


def run_slots(settings: Settings, section: Section) -> None:
    """Measure the one launch with 5 to 25 slots, from the device and from the host."""
    with ExitStack() as stack:
        contenders: list[Contender] = []
        sources = None
        for count in SLOT_COUNTS:
            workload = Workload(settings.device, num_slots=count)
            drawn = Sources.draw(workload, _RAW, _BUCKET)
            for kind, values in ((ONE_DEVICE, drawn.on_device), (ONE_NUMPY, drawn.numpy)):
                runner = stack.enter_context(workload.runner([_BUCKET]))
                runner.capture(progress=False)
                contender = of_runner(f"{kind}, {count} slots", runner, _RAW, values)
                contenders += proven([contender], drawn, settings.gauge)
            if sources is None:
                sources = drawn
                recorded = stack.enter_context(closing(Recorded(workload, runner.view(_BUCKET))))
                contenders.append(Contender(FLOOR, recorded.floor()))
        contenders.append(Contender(AGAIN, recorded.floor(), note="the noise row"))
        assert sources is not None
        section.rows += measured(
            settings, contenders, sources, steps=max(5, settings.steps // 2), deep=False, crowded=True, describe="slots"
        )  # all in each round: a slow minute of the machine must not fall on one number of slots
    for kind in (ONE_DEVICE, ONE_NUMPY):
        section.rows.append(_per_slot(section, kind))


def _per_slot(section: Section, kind: str) -> Row:
    points = []
    for count in SLOT_COUNTS:
        row = section.find(f"{kind}, {count} slots")
        if row is not None and row.host_us is not None:
            points.append((float(count), row.host_us))
    values: dict[str, float | bool] = {"us_per_slot": slope(points)} if len(points) > 1 else {}
    note = f"least squares over {', '.join(map(str, SLOT_COUNTS))} slots"
    return Row(f"{PER_SLOT}: {kind}", _BUCKET, _RAW, values=values, note=note)


def run_keys(settings: Settings, section: Section) -> None:
    """Replay 64 captured keys in turn, beside one key again and again."""
    num_keys = 64 if settings.on_gpu else 4
    workload = Workload(settings.device)
    sizes = range(1, num_keys + 1)
    with workload.runner(sizes) as runner:
        runner.capture(progress=False)
        single = num_keys // 2
        steps = {
            ONE_KEY: _of_size(workload, runner, single),
            ALL_KEYS: _in_turn([_of_size(workload, runner, size) for size in sizes]),
        }
        rounds = _rounds(settings, steps, num_keys)
        samples = interleaved(steps, rounds, synchronize=settings.gauge.synchronize)
    for label, sample in samples.items():
        row = Row(label, single if label == ONE_KEY else None, None, 0, rounds, sample.median_us, sample.p99_us)
        section.rows.append(row)
    ratio = samples[ALL_KEYS].p99_us / samples[ONE_KEY].p99_us
    section.rows.append(Row(f"p99 of {num_keys} keys / p99 of one", values={"p99_ratio": ratio}))


def _of_size(workload: Workload, runner: gg.Runner, size: int) -> Step:
    return replays(runner, size, Sources.draw(workload, size, size).on_device)


def _in_turn(steps: list[Step]) -> Step:
    turn = itertools.cycle(steps).__next__
    return lambda: turn()()


def _rounds(settings: Settings, steps: dict[str, Step], num_keys: int) -> int:
    """Warm every key, and take whole turns of all keys."""
    per_second = [settings.gauge.per_second(step, 2 * num_keys) for step in steps.values()]
    rounds = affordable(settings.steps, sum(1e6 / each for each in per_second), budget_seconds=15.0)
    return max(1, -(-rounds // num_keys)) * num_keys
