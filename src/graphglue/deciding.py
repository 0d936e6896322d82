"""Where a step goes: looked up by its counts, or decided by the router's table and kept for the next time."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

import torch

from graphglue.capture import Capture
from graphglue.config import RunnerConfig
from graphglue.core import trees
from graphglue.core.batch import Batch, Mode, extents_of
from graphglue.core.buckets import Bucket
from graphglue.core.keys import Key
from graphglue.core.routing import Decision, PrepDecision, Reason, Route, StepFacts, route
from graphglue.device.arena import Arena
from graphglue.device.base import Reads
from graphglue.forwards import Forwards
from graphglue.lanes import Lane, Lanes, whole_run
from graphglue.ledger import Ledger
from graphglue.step import Outputs
from graphglue.units import Unit, Views

if TYPE_CHECKING:
    from graphglue.audit.shadow import ShadowCheck


class Decider:
    """Give each batch its lane. Writes nothing, and no method waits for the device.

    Args:
        arena: its slots, and the key space.
        units: the preps; their keys' states are facts of every decision.
        forwards: the runner's.
        views: views of slots and tables.
        capture: knows what was composed for a key.
        output_axes: row axes of the outputs.
        config: the runner's.
        ledger: counts the steps of each lane.
        shadow: watches lanes; None where the config asks for none.
        reads: records events behind the last read of sources and tables.
    """

    def __init__(
        self,
        arena: Arena,
        units: Sequence[Unit],
        forwards: Forwards,
        views: Views,
        capture: Capture,
        output_axes: Mapping[str, str] | str | None,
        config: RunnerConfig,
        ledger: Ledger,
        shadow: ShadowCheck | None,
        reads: Reads | None,
    ) -> None:
        self._arena, self._units, self._forwards, self._views = arena, units, forwards, views
        self._capture, self._output_axes, self._config = capture, output_axes, config
        self._ledger, self._shadow = ledger, shadow
        self._handed_on = config.clone_outputs or any(unit.registration.publish is not None for unit in units)
        self._tables_until_forward = reads is not None and reads.tables_until_forward
        self._lanes = Lanes()
        self.bound = False  # to what ranks agreed on

    def forget(self) -> None:
        """Forget all decisions: the state of a key changed."""
        self._lanes.clear()

    def lane(self, batch: Batch) -> Lane:
        """Describe a batch and decide where it goes.

        Raises:
            BindError: counts that contradict each other.
        """
        if type(batch) is not Batch:
            return self._new_lane(batch)  # refuses it
        if batch.row_tokens is not None:
            return self._lane_of_rows(batch)
        # Equal values of another type (13.0, "decode") are not checked by a lookup, so they are not looked up.
        plain = (
            type(batch.num_requests) is int
            and type(batch.mode) is Mode
            and (batch.num_tokens is None or type(batch.num_tokens) is int)
            and type(batch.features) is frozenset
            and (batch.num_requests > 0 or (isinstance(batch.sources, Mapping) and not batch.sources))
        )
        counts = (batch.num_requests, batch.num_tokens, batch.mode, batch.variant, batch.features)
        try:
            lane = self._lanes.get(counts) if plain else None
        except TypeError:  # a variant that can not be looked up; describing the batch says so
            lane, plain = None, False
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
        exact = facts.exact or bucket is None
        key = Key(batch.mode, *raw, None, batch.variant) if exact else space.key(batch.mode, bucket, batch.variant)  # type: ignore[arg-type]
        return raw, facts, self.route(facts, key)

    def route(self, facts: StepFacts, key: Key) -> Decision:
        """Look a step up in the table, at its key's states."""
        preps = {unit.name: unit.facts(key) for unit in self._units}
        decision = route(facts, preps, key, None if self._forwards.cache is None else self._forwards.cache.state(key))
        if decision.forward is Route.GRAPH and decision.prep is not Route.GLUE and key in self._capture.used_up:
            decision = replace(decision, forward=Route.EAGER, forward_reason=Reason.NO_FORWARD_GRAPH)
        runs_eagerly = self._forwards.python is not None and decision.forward is Route.EAGER
        return self._with_metadata(decision, key) if runs_eagerly and facts.idle else decision

    def _with_metadata(self, decision: Decision, key: Key) -> Decision:
        """Skip no prep that left nothing yet: an eager forward is handed its metadata, and would be handed None."""
        empty = [unit for unit in self._units if not unit.cache.has_result(key)]
        bare = [unit.name for unit in empty if decision.preps[unit.name].route is Route.SKIP]
        if not bare:
            return decision
        run = PrepDecision(Route.EAGER, Reason.NOT_CAPTURED)
        reason = decision.reason if decision.prep is Route.EAGER else run.reason
        preps = {**decision.preps, **dict.fromkeys(bare, run)}
        return replace(decision, prep=Route.EAGER, reason=reason, preps=preps)

    def lane_of(self, raw: Bucket, facts: StepFacts, decision: Decision) -> Lane:
        """Build the lane of a decision."""
        lane = Lane(raw, facts, decision, self._ledger.tally(decision, facts.exact))
        if facts.exact:
            return lane
        key = decision.key
        lane.fill = self._arena.fill_of(decision.bucket)
        lane.views, lane.forward_view = self._views.of(key)
        outputs = None if self._forwards.cache is None else self._forwards.cache.result(key)
        # The weakest prep names the decision, so all of them are glued.
        composed = self._capture.launches.get(key) if decision.prep is Route.GLUE else None
        if composed is not None and composed.has_forward is (decision.forward is Route.GRAPH):
            lane.launch, lane.leads, outputs = composed.launch, composed.leads, composed.outputs
            lane.metadata = trees.Packed(trees.map_tensors(torch.Tensor.detach, self._capture.metadata(key)))
            lane.tally = self._ledger.tally(decision, False, composed.fallback)
        if decision.forward is Route.GRAPH:
            lane.outputs = trees.Packed(Outputs(outputs, self._output_axes, decision.bucket).real(raw))
            self._forwards.show(lane, key, self._capture.metadata(key))
        more = self._handed_on or (lane.segments and self._tables_until_forward)
        if lane.launch is not None and lane.outputs is not None and not more:
            lane.whole = whole_run(lane, self._ledger.note, self._forwards.join)
        if self._shadow is not None:
            self._shadow.watch(lane, self.bound)
        return lane

    def _lane_of_rows(self, batch: Batch) -> Lane:
        """Describe a batch that says what its requests have: whatever that is, steps of equal extents share a lane."""
        raw = extents_of(batch, self._arena.space.width)  # checks every count
        counts = (raw, batch.mode, batch.variant, frozenset(batch.features))
        lane = self._lanes.get(counts)
        if lane is None:
            lane = self._new_lane(batch)
            if lane.fill is not None:
                self._lanes.keep(counts, lane)
        return lane

    def _new_lane(self, batch: Batch) -> Lane:
        return self.lane_of(*self.decide(batch))
