"""A small runner that the tests of stats, report, exporter and flight recorder watch."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

import graphglue as gg

LADDER = [1, 2, 4, 8]


def make(prep: Callable[[Any], Any] | None = None, **config: Any) -> gg.Runner:
    """Build a runner of one slot; it is captured."""
    contract = gg.PrepContract(name="meta", reads={"x": 0}, outputs={"m": "request"}, modes={gg.Mode.DECODE})
    registry = gg.Registry()
    registry.register(contract)(prep or (lambda view: {"m": view.x + 1}))
    runner = gg.Runner(
        slots=[gg.Slot("x", axis="request", dtype=torch.int64, pad=0)],
        ladder=LADDER,
        registry=registry,
        prep="meta",
        forward=lambda view, metadata: {"o": metadata["m"] * 2},
        config=gg.RunnerConfig(**config),
    )
    runner.capture(progress=False)
    return runner


def batch(requests: int) -> gg.Batch:
    """Give a step of so many requests."""
    return gg.Batch(requests, {"x": list(range(requests))}) if requests else gg.Batch.idle()


def serve(runner: gg.Runner, counts: list[int]) -> None:
    """Replay a step of each count."""
    for requests in counts:
        runner.replay(batch(requests))
