"""The forward of a step: one graph, segments with eager breaks between them, or the engine's Python."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch

from graphglue.cache import GlueGraphCache
from graphglue.capture import Capture
from graphglue.core import trees
from graphglue.core.keys import Key
from graphglue.core.routing import Decision, Route
from graphglue.core.view import View, showing_of
from graphglue.graphs.narrowed import narrowed
from graphglue.graphs.segments import SegmentedRecording
from graphglue.lanes import Lane
from graphglue.results import copy_into
from graphglue.step import Outputs
from graphglue.units import Views


class Forwards:
    """Run a runner's forwards.

    Args:
        cache: the recorded forwards, or those that the engine captured itself; None without any.
        run: the engine's Python; None for an engine that owns its forward.
        views: cut slots to the real rows, for eager breaks.
        capture: knows what was composed for a key.
        output_axes: row axes of the outputs.
    """

    def __init__(
        self,
        cache: GlueGraphCache | None,
        run: Callable[[View, Any], Any] | None,
        views: Views,
        capture: Capture,
        output_axes: Mapping[str, str] | str | None,
    ) -> None:
        self.cache, self.python = cache, run
        self._views, self._capture, self._output_axes = views, capture, output_axes
        self.check = False  # that no break writes past the real rows
        self.keep_going = False  # with ranks: a break that raises leaves no other rank waiting in a later segment

    def runs(self, forward: Route) -> bool:
        """Tell whether a step whose forward takes this route runs it here, and not in the engine."""
        return self.python is not None or (forward is Route.GRAPH and self.cache is not None)

    def segments(self, key: Key) -> SegmentedRecording | None:
        """Give a key's segments; None where its forward has no eager breaks, or no graph."""
        recording = None if self.cache is None else self.cache.entry(key).recording
        return recording if isinstance(recording, SegmentedRecording) else None

    def join(self, lane: Lane, begin: Callable[[], None]) -> None:
        """Launch what was composed for a lane's key by ``begin``, and behind it the segments that it does not hold.

        Raises:
            SegmentError: an eager break raised.

        Sync: none.
        """
        if lane.segments is None:
            return begin()
        assert lane.forward_view is not None
        showing = showing_of(lane.forward_view)
        showing.live = lane.live
        try:
            if lane.leads:
                lane.segments.replay(lane.raw.tokens, lead=begin, check=self.check, keep_going=self.keep_going)
            else:
                begin()
                lane.segments.replay(lane.raw.tokens, check=self.check, keep_going=self.keep_going)
        finally:
            showing.live = None  # nothing may read it once the step is over, and it may hold much
        return None

    def replay(self, lane: Lane, metadata: Any) -> None:
        """Replay a lane's forward behind a fill and preps that ran one by one. Sync: none."""
        assert self.cache is not None
        if lane.segments is None:
            self.cache.replay(lane.decision.key)
        else:
            assert lane.live is not None
            assert lane.forward_view is not None
            with showing_of(lane.forward_view).on(lane.live.beside(metadata)):
                lane.segments.replay(lane.raw.tokens, check=self.check, keep_going=self.keep_going)
        if lane.launch is not None:
            self._mirror_outputs(lane.decision.key)

    def outputs(self, lane: Lane, decision: Decision, view: View, metadata: Any, live_metadata: Any) -> Any:
        """Run the forward on its route; give its outputs, narrowed to the real rows.

        Args:
            lane: the step's.
            decision: where its forward goes by now.
            view: what the forward sees.
            metadata: what it is handed.
            live_metadata: the same with what the contracts call live, for its eager breaks.

        Sync: none of its own.
        """
        if decision.forward is Route.GRAPH and self.cache is not None:
            self.replay(lane, live_metadata)
            return None if lane.outputs is None else lane.outputs.tree()
        if self.python is None:
            return None
        key, raw = decision.key, lane.raw
        live = self._views.live(view, raw, live_metadata)
        with torch.no_grad(), showing_of(view).on(live), narrowed(raw.tokens, key.tokens):
            outputs = self.python(view.fresh(), trees.map_tensors(torch.Tensor.detach, metadata))
        return Outputs(outputs, self._output_axes, key.bucket).real(raw)

    def show(self, lane: Lane, key: Key, metadata: Any) -> None:
        """Let a lane with a captured forward know its segments, and what their breaks see."""
        lane.segments = self.segments(key)
        if lane.segments is not None and lane.forward_view is not None:
            lane.live = self._views.live(lane.forward_view, lane.raw, metadata)

    def _mirror_outputs(self, key: Key) -> None:
        """Bring outputs to where the launch, left aside for once, would have left them."""
        assert self.cache is not None
        usual, outputs = self._capture.launches[key].outputs, self.cache.result(key)
        if usual is not outputs:  # a forward that draws random numbers is recorded twice
            copy_into(usual, outputs)
