"""Lanes: all that is decided about a step before its sources are seen.

A decision is a pure function of a step's counts and the states of its key, so it is made once for
each combination and looked up afterwards; whatever changes a state clears the lanes.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from graphglue.core import trees
from graphglue.core.buckets import Bucket
from graphglue.core.live import Live
from graphglue.core.routing import Decision, StepFacts
from graphglue.core.view import View
from graphglue.device.base import Fill, Launch, Take
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
        known: what takes in sources like those of the last steps without binding them.
        outputs, metadata: the static results, narrowed; None where they are fresh each time.
        tally: counts the steps.
        segments, leads: a forward with eager breaks; whether the launch holds the first of its segments.
        live: what its breaks see of the step.
        whole: runs the step where it is one launch and nothing else; gives metadata, outputs, decision, view.
        shadow: counts and samples the steps; None where no prep is glued, or the config does not ask for it.
        young: the first steps of the key are not over.
        stated, agreed, last: with ranks, of a lane that this rank would take alone: the facts it states, the lanes
            that it took by what was agreed, and the last of them.
        rank_counts, meeting: with ranks, of a lane that was agreed: the padded counts where they differ, and how
            the rows of all ranks meet in an eager step.
    """

    raw: Bucket
    facts: StepFacts
    decision: Decision
    tally: Tally
    views: list[View] | None = None
    forward_view: View | None = None
    fill: Fill | None = None
    launch: Launch | None = None
    known: list[Take] = field(default_factory=list)
    outputs: trees.Packed | None = None
    metadata: trees.Packed | None = None
    segments: Any = None
    leads: bool = False
    live: Live | None = None
    whole: Callable[[], tuple[Any, Any, Decision, View]] | None = None
    shadow: Any = None
    young: bool = False
    stated: Any = None
    agreed: dict[Any, Lane] = field(default_factory=dict)
    last: Lane | None = None
    rank_counts: Sequence[int] | None = None
    meeting: Any = None


def whole_run(
    lane: Lane, note: Callable[..., None], join: Callable[..., None]
) -> Callable[[], tuple[Any, Any, Decision, View]]:
    """Build the run of a step that is one launch, or one launch and the segments behind it, and nothing else.

    It does what ``Stepper._run_launch`` does, in one call: right after a wait for the device the host's caches
    are cold, and every Python function in the way costs about a microsecond.

    Args:
        lane: the lane; its launch and its results are there.
        note: counts the step.
        join: launches, and replays the segments behind.
    """
    launch, metadata, outputs, view = lane.launch, lane.metadata, lane.outputs, lane.forward_view
    assert launch is not None and metadata is not None and outputs is not None and view is not None  # noqa: PT018
    tally, decision, raw = lane.tally, lane.decision, lane.raw
    metadata_of, outputs_of = metadata.tree, outputs.tree

    def run() -> tuple[Any, Any, Decision, View]:
        launch.run()
        note(tally, decision, raw)
        return metadata_of(), outputs_of(), decision, view

    def run_segments() -> tuple[Any, Any, Decision, View]:
        join(lane, launch.run)
        note(tally, decision, raw)
        return metadata_of(), outputs_of(), decision, view

    return run if lane.segments is None else run_segments


class Lanes:
    """Keep lanes by the counts of a step."""

    def __init__(self, max_lanes: int = 4096) -> None:
        self._max_lanes = max_lanes
        self._kept: dict[Any, Lane] = {}
        self.get: Callable[[Any], Lane | None] = self._kept.get  # raises TypeError for what can not be looked up

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
