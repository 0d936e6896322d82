"""What capture takes, per bucket; and how fast the fill moves one large slot."""

from __future__ import annotations

import itertools
import time
from statistics import median

import torch

import graphglue as gg
from graphglue.bench.results import Row, Section
from graphglue.bench.sections import Settings
from graphglue.bench.timing import Step
from graphglue.bench.workload import Workload

RATE = "the fill's rate / the copy's"
FILL, COPY = "fill of one [256, 7168] bf16 slot", "copy_ of the same bytes"
_ROWS, _WIDTH, _NUM_SOURCES = 256, 7168, 32
_NEEDS_GPU = "needs a GPU: the tape has neither device time nor device memory"


def run_capture(settings: Settings, section: Section) -> None:
    """Capture each bucket by itself: seconds, what torch reserves, what the driver takes besides."""
    gauge, workload = settings.gauge, Workload(settings.device)
    with workload.runner([min(settings.buckets)]) as first:  # compiles the fill kernel, loads cuBLAS
        first.capture(progress=False)
    for bucket in settings.buckets:
        gauge.release()
        reserved, used = gauge.reserved_bytes(), gauge.driver_bytes()
        with workload.runner([bucket]) as runner:
            begin = time.perf_counter()
            runner.capture(progress=False)
            gauge.synchronize()
            seconds = time.perf_counter() - begin
            gauge.release()
            reserved, used = gauge.reserved_bytes() - reserved, gauge.driver_bytes() - used
        values: dict[str, float | bool] = {"capture_seconds": seconds}
        if settings.on_gpu:
            values |= {"reserved_bytes": reserved, "driver_bytes": max(0, used - reserved)}
        section.rows.append(Row("capture of one bucket", bucket, values=values))
    section.notes.append(
        "a runner of its own for each bucket; driver_bytes is what the driver took beyond torch's reserve, in its "
        "own steps of 2 MiB"
        if settings.on_gpu
        else _NEEDS_GPU
    )


def run_fill(settings: Settings, section: Section) -> None:
    """Compare the device time of a large slot's fill with that of a plain copy of the same bytes."""
    if not settings.on_gpu:
        section.rows += [Row(FILL, note=_NEEDS_GPU), Row(COPY, note=_NEEDS_GPU)]
        return
    rates = []
    for label, device_us in _large_slot_us(settings).items():
        rates.append(2 * _ROWS * _WIDTH * torch.bfloat16.itemsize / device_us / 1e3)
        section.rows.append(Row(label, _ROWS, _ROWS, device_us=device_us, values={"gb_per_second": rates[-1]}))
    section.rows.append(Row(RATE, values={"rate_ratio": rates[0] / rates[1]}))
    section.notes.append(f"read and written bytes, {_NUM_SOURCES} sources in turn, queued behind a busy GPU")


def _large_slot_us(settings: Settings) -> dict[str, float]:
    """Take the device time of both in turn, a few times; give the medians."""
    arena = gg.Arena([gg.Slot("hidden", "token", torch.bfloat16, 0, inner=(_WIDTH,))], [_ROWS], device=settings.device)
    bucket, shape = arena.space.bucket(_ROWS), (_ROWS, _WIDTH)
    sources = [torch.randn(shape, device=settings.device).to(torch.bfloat16) for _ in range(_NUM_SOURCES)]
    target = torch.empty_like(sources[0])
    bound = itertools.cycle([arena.bind({"hidden": source}, bucket, bucket) for source in sources]).__next__
    turn = itertools.cycle(sources).__next__
    arena.device.enter_step()
    steps: dict[str, Step] = {FILL: lambda: arena.write(bound(), bucket), COPY: lambda: target.copy_(turn())}
    times: dict[str, list[float]] = {label: [] for label in steps}
    for _ in range(5):
        for label, step in steps.items():
            times[label].append(settings.gauge.device_us(step, host_us=50.0, steps=100, repeats=5) or 0.0)
    return {label: median(taken) for label, taken in times.items()}
