"""Lanes: all that is decided about a step before its sources are seen.

A decision is a pure function of a step's counts and the states of its key, so it is made once for
each combination and looked up afterwards; whatever changes a state clears the lanes.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from graphglue.core import trees
from graphglue.core.buckets import Bucket
from graphglue.core.routing import Decision, StepFacts
from graphglue.core.view import View
from graphglue.device.base import Fill, Launch
from graphglue.ledger import Tally


@dataclass(slots=True)
class Lane:
    """Hold what every step of the same counts shares.

    Attributes:
        raw: the real extents.
        facts, decision: what the router knew, and decided.
        views, forward_view: over the static slots; None where the step has slots of its own.
        fill: the bucket's fill; None where the step is filled into other tensors.
        launch: all in one, where every prep is glued; None where they run one by one.
        known: how the last steps' sources were bound, where one like them need not be bound again.
        outputs, metadata: the static results, narrowed; None where they are fresh each time.
        tally: counts the steps.
    """

    raw: Bucket
    facts: StepFacts
    decision: Decision
    tally: Tally
    views: list[View] | None = None
    forward_view: View | None = None
    fill: Fill | None = None
    launch: Launch | None = None
    known: list[Any] = field(default_factory=list)
    outputs: trees.Packed | None = None
    metadata: trees.Packed | None = None


class Lanes:
    """Keep lanes by the counts of a step."""

    def __init__(self, max_lanes: int = 4096) -> None:
        self._max_lanes = max_lanes
        self._kept: dict[Any, Lane] = {}

    def get(self, key: Any) -> Lane | None:
        """Find a lane; None if there is none, or the key can not be looked up."""
        try:
            return self._kept.get(key)
        except TypeError:  # an engine's features as a plain set
            return None

    def keep(self, key: Any, lane: Lane) -> None:
        """Keep a lane; all are dropped where an engine makes more of them than serve."""
        if len(self._kept) >= self._max_lanes:
            self._kept.clear()
        try:
            self._kept[key] = lane
        except TypeError:
            return

    def clear(self) -> None:
        """Forget all lanes: the state of a key changed."""
        self._kept.clear()
