"""The parts of a step that ``Runner.replay`` names: decide, load, run."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch

from graphglue.cache import GlueGraphCache
from graphglue.capture import Capture, Unit, Views
from graphglue.config import RunnerConfig
from graphglue.core import trees
from graphglue.core.batch import Batch, Mode, extents_of
from graphglue.core.binding import Write
from graphglue.core.buckets import Bucket
from graphglue.core.keys import Key
from graphglue.core.routing import Decision, Reason, Route, StepFacts, route
from graphglue.core.view import View
from graphglue.device.arena import Arena, over_capacity
from graphglue.device.base import Reads
from graphglue.errors import BindError
from graphglue.lanes import Lane, Lanes
from graphglue.ledger import Ledger
from graphglue.step import Outputs

_MAX_KNOWN = 3  # ways of binding that a lane remembers: an engine has one, and a second for warm-up or tests


class Stepper:
    """Run steps over a runner's slots, preps and forward."""

    def __init__(
        self,
        arena: Arena,
        units: Sequence[Unit],
        forward: GlueGraphCache | None,
        run_forward: Callable[[View, Any], Any] | None,
        views: Views,
        capture: Capture,
        output_axes: Mapping[str, str] | str | None,
        config: RunnerConfig,
        join: Callable[[list[Any]], Any],
        reads: Reads | None,
    ) -> None:
        self._arena, self._units, self._run_forward = arena, list(units), run_forward
        self.forward = forward  # the recorded forwards, or those that the engine captured itself
        self._views, self._capture, self._output_axes, self._config = views, capture, output_axes, config
        self._join = join
        self._plans = [unit for unit in units if unit.registration.plan is not None]
        self._publishers = [unit for unit in units if unit.registration.publish is not None]
        self._reads = reads
        self._tables_until_forward = reads is not None and reads.tables_until_forward
        self._lanes = Lanes()
        self.ledger = Ledger()

    def forget(self) -> None:
        """Forget all decisions: the state of a key changed."""
        self._lanes.clear()

    def lane(self, batch: Batch) -> Lane:
        """Describe a batch and decide where it goes. Writes nothing. Sync: none.

        Raises:
            BindError: counts that contradict each other.
        """
        if type(batch) is not Batch:
            return self._new_lane(batch)  # refuses it
        # Equal values of another type (13.0, "decode") are not checked by a lookup, so they are not looked up.
        plain = (
            type(batch.num_requests) is int
            and type(batch.mode) is Mode
            and (batch.num_tokens is None or type(batch.num_tokens) is int)
            and type(batch.features) is frozenset
            and batch.row_tokens is None
            and (batch.num_requests > 0 or (isinstance(batch.sources, Mapping) and not batch.sources))
        )
        counts = (batch.num_requests, batch.num_tokens, batch.mode, batch.variant, batch.features)
        lane = self._lanes.get(counts) if plain else None
        if lane is None:
            lane = self._new_lane(batch)
            if plain and lane.fill is not None:
                self._lanes.keep(counts, lane)
        return lane

    def decide(self, batch: Batch) -> tuple[Bucket, StepFacts, Decision]:
        """Decide where a batch goes: a pure function of its counts and its key's states."""
        raw = extents_of(batch, self._arena.space.width)
        space, config = self._arena.space, self._config
        bucket = space.cover(raw)
        facts = StepFacts(
            raw=raw,
            bucket=bucket,
            mode=batch.mode,
            features=frozenset(batch.features),
            ragged=raw.row_tokens == 0 and raw.requests > 0 and not space.counts_tokens,
            enabled=config.enabled,
            padding=config.padding,
            waste_limit=config.waste_limit_in(batch.mode),
        )
        key = Key(batch.mode, *(raw if facts.exact or bucket is None else bucket), None, batch.variant)
        preps = {unit.name: unit.facts(key) for unit in self._units}
        decision = route(facts, preps, key, None if self.forward is None else self.forward.state(key))
        if decision.forward is Route.GRAPH and decision.prep is not Route.GLUE and key in self._capture.used_up:
            decision = replace(decision, forward=Route.EAGER, forward_reason=Reason.NO_FORWARD_GRAPH)
        return raw, facts, decision

    def load(self, lane: Lane, batch: Batch, forward_needed: bool = True) -> list[Write] | None:
        """Hold the sources against the slots, and take them in; host values are snapshotted now.

        This is the last check, and nothing is written before it has passed.

        Returns:
            The writes of a step that is not filled into its bucket's slots; None for one that is.

        Raises:
            BindError: a source does not fit.
            CapacityError: nothing covers the batch, and there is no forward that could run it eagerly.
        """
        for known in lane.known:
            if lane.fill.load_known(known, batch.sources):  # type: ignore[union-attr]
                return None
        scratch = lane.facts.bucket is None
        if scratch and (self._run_forward is None or not forward_needed):
            raise over_capacity(lane.raw, self._arena.space)
        sources = self._planned(lane, batch) if self._plans else batch.sources
        writes = self._arena.bind(sources, lane.raw, lane.decision.bucket, scratch=scratch)
        if lane.fill is None:
            return writes
        lane.fill.load(writes)
        if not self._plans and (known := lane.fill.remember(writes, sources)) is not None:
            lane.known = [known, *lane.known[: _MAX_KNOWN - 1]]
        return None

    def run(self, lane: Lane, writes: list[Write] | None, forward: bool = True) -> tuple[Any, Any, Decision, View]:
        """Fill, prepare and run the forward, on the caller's current stream. Sync: none of its own.

        Returns:
            Metadata, outputs narrowed to the real rows, the decision, and the forward's view.
        """
        self._arena.device.enter_step()
        if lane.launch is not None and (forward or lane.decision.forward is not Route.GRAPH):
            return self._run_launch(lane, forward)
        views, forward_view = self._fill(lane, writes)
        self._record_read("sources", True)
        metadata, decision = self._run_preps(lane.decision, views)
        self._record_read("tables", not self._tables_until_forward)
        outputs = self._run_model(lane, decision, forward_view, metadata) if forward else None
        self._record_read("tables", self._tables_until_forward)
        tally = lane.tally if decision is lane.decision else self.ledger.tally(decision, lane.facts.exact)
        self.ledger.note(tally, decision, lane.raw)
        return self._handed_out(metadata), self._handed_out(outputs), decision, forward_view

    def _run_launch(self, lane: Lane, forward: bool) -> tuple[Any, Any, Decision, View]:
        assert lane.launch is not None
        assert lane.metadata is not None
        assert lane.forward_view is not None
        lane.launch.run()
        for unit in self._publishers:
            unit.registration.publish(trees.rebuilt(unit.cache.result(lane.decision.key)))  # type: ignore[misc]
        self.ledger.note(lane.tally, lane.decision, lane.raw)
        metadata = lane.metadata.tree()
        if lane.outputs is not None:
            outputs = lane.outputs.tree()
        else:  # fill and preps were one launch; the forward has no graph
            outputs = self._run_model(lane, lane.decision, lane.forward_view, metadata) if forward else None
            self._record_read("tables", self._tables_until_forward)
        if self._config.clone_outputs:
            metadata, outputs = self._handed_out(metadata), self._handed_out(outputs)
        return metadata, outputs, lane.decision, lane.forward_view

    def _new_lane(self, batch: Batch) -> Lane:
        raw, facts, decision = self.decide(batch)
        lane = Lane(raw, facts, decision, self.ledger.tally(decision, facts.exact))
        if facts.exact:
            return lane
        key = decision.key
        lane.fill = self._arena.fill_of(decision.bucket)
        lane.views, lane.forward_view = self._views.of(key)
        outputs = self.forward.result(key) if self.forward is not None else None
        # The weakest prep names the decision, so all of them are glued.
        composed = self._capture.launches.get(key) if decision.prep is Route.GLUE else None
        if composed is not None and composed.has_forward is (decision.forward is Route.GRAPH):
            lane.launch, outputs = composed.launch, composed.outputs
            lane.metadata = trees.Packed(trees.map_tensors(torch.Tensor.detach, self._capture.metadata(key)))
            lane.tally = self.ledger.tally(decision, False, lane.launch.fallback or "")
        if decision.forward is Route.GRAPH:
            lane.outputs = trees.Packed(Outputs(outputs, self._output_axes, decision.bucket).real(raw))
        return lane

    def _planned(self, lane: Lane, batch: Batch) -> Mapping[str, Any]:
        """Add what the backends' host planners compute for this step."""
        sources = batch.sources
        for unit in self._plans:
            if lane.decision.preps[unit.name].route is Route.SKIP:
                continue
            planned = unit.registration.plan(batch, lane.decision.bucket)  # type: ignore[misc]
            if not isinstance(planned, Mapping):
                seen = type(planned).__name__
                raise BindError(f"the plan of prep {unit.name!r} returned a {seen}; expected slot names with values")
            if twice := sorted(set(planned) & set(sources)):
                raise BindError(
                    f"slots {twice} come from the batch and from the plan of prep {unit.name!r}; leave one out"
                )
            sources = {**sources, **planned}
        return sources

    def _fill(self, lane: Lane, writes: list[Write] | None) -> tuple[list[View], View]:
        bucket, key = lane.decision.bucket, lane.decision.key
        if lane.fill is not None and lane.views is not None and lane.forward_view is not None:
            lane.fill.run()
            return lane.views, lane.forward_view
        assert writes is not None
        if lane.facts.bucket is None:  # more rows than the slots have: fresh tensors, the slots stay as they are
            return self._views.over(self._arena.scratch(writes, bucket), key)
        self._arena.device.fill_once(writes, self._arena.targets(bucket))
        return self._views.over(self._arena.targets(bucket), key)

    def _run_preps(self, decision: Decision, views: list[View]) -> tuple[Any, Decision]:
        results, changes = [], []
        for unit, view in zip(self._units, views):
            result, changed = unit.run(decision.preps[unit.name].route, decision.key, view)
            if unit.registration.publish is not None:
                unit.registration.publish(trees.rebuilt(result))
            results.append(trees.rebuilt(result))
            changes.append(changed)
        readable = decision.forward_reason in (None, Reason.NO_FORWARD_GRAPH)
        if readable and any(changes):  # a graph, ours or the engine's, reads the static metadata, which is old now
            decision = replace(decision, forward=Route.EAGER, forward_reason=Reason.METADATA_CHANGED)
        return self._join(results), decision

    def _run_model(self, lane: Lane, decision: Decision, view: View, metadata: Any) -> Any:
        if decision.forward is Route.GRAPH and self.forward is not None:
            self.forward.replay(decision.key)
            return None if lane.outputs is None else lane.outputs.tree()
        if self._run_forward is None:
            return None
        with torch.no_grad():
            outputs = self._run_forward(view.fresh(), trees.map_tensors(torch.Tensor.detach, metadata))
        return Outputs(outputs, self._output_axes, decision.bucket).real(lane.raw)

    def _record_read(self, what: str, now: bool) -> None:
        if self._reads is not None and now:
            self._arena.device.record_event(getattr(self._reads, what))

    def _handed_out(self, tree: Any) -> Any:
        return trees.map_tensors(torch.clone, tree) if self._config.clone_outputs else tree
