"""Ranges: name the parts of a step for a profiler.

The parts are wrapped once, when a runner is built that asks for it; one that does not runs the code it always ran.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from graphglue.agreeing import Agreement
from graphglue.device.base import Device
from graphglue.lanes import Lane
from graphglue.staging import Staging
from graphglue.stepping import Stepper

PREFIX = "graphglue."


def mark_ranges(device: Device, stepper: Stepper, staging: Staging | None, agreement: Agreement | None) -> None:
    """Mark fill, prep, forward, replay, stage and agree of one runner.

    ``replay`` is a step in one launch, with its fill and preps inside. A step that is launched part by part shows
    ``fill``, ``prep`` and ``forward``; ``agree`` is the exchange with the other ranks.

    Sync: none.
    """
    parts = (
        (stepper, "_fill", "fill"),
        (stepper, "_run_preps", "prep"),
        (stepper.forwards, "outputs", "forward"),
        (stepper, "_run_launch", "replay"),
        (staging, "_run_front", "stage"),
        (agreement, "agree", "agree"),
    )
    for owner, method, name in parts:
        if owner is not None:
            setattr(owner, method, _inside(device, name, getattr(owner, method)))
    lane_of = stepper.decider.lane_of

    def marked_lane_of(*args: Any) -> Lane:
        lane = lane_of(*args)
        if lane.whole is not None:
            lane.whole = _inside(device, "replay", lane.whole)
        return lane

    setattr(stepper.decider, "lane_of", marked_lane_of)  # noqa: B010 - a method, for type checkers


def _inside(device: Device, name: str, run: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(run)
    def marked(*args: Any, **more: Any) -> Any:
        with device.named_range(PREFIX + name):
            return run(*args, **more)

    return marked
