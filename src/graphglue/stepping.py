"""What ``Runner.replay`` does with a lane: load, and run."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch

from graphglue.cache import GlueGraphCache
from graphglue.capture import Capture
from graphglue.config import RunnerConfig
from graphglue.core import trees
from graphglue.core.batch import Batch
from graphglue.core.binding import Write
from graphglue.core.keys import Key
from graphglue.core.routing import Decision, Reason, Route, State
from graphglue.core.view import View
from graphglue.deciding import Decider
from graphglue.device.arena import Arena, over_capacity
from graphglue.device.base import Reads
from graphglue.errors import ContractError
from graphglue.flight.sources import open_ledger
from graphglue.forwards import Forwards
from graphglue.lanes import Lane
from graphglue.units import Unit, Views, planned

if TYPE_CHECKING:
    from graphglue.audit.shadow import ShadowCheck
    from graphglue.audit.twin import Twin

SAMPLED = "a sampled step is launched part by part: its twin is compared before the forward"
AHEAD = "a step whose fill and preps were staged ahead: only its forward was left"
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
        self._arena, self._units = arena, list(units)
        self.forwards = Forwards(forward, run_forward, views, capture, output_axes)
        self.forwards.check = config.check_breaks
        self._views, self._capture, self._config = views, capture, config
        self._join = join
        self._plans = [unit for unit in units if unit.registration.plan is not None]
        self._publishers = [unit for unit in units if unit.registration.publish is not None]
        self._reads = reads
        self._tables_until_forward = reads is not None and reads.tables_until_forward
        self.ledger, self.device = open_ledger(config), arena.device
        self.stand_in: Callable[[], None] | None = None  # joins the other ranks' eager step without rows
        self._late: Exception | None = None  # raised when the step has ended
        self.shadow = self._open_shadow(config)
        self.decider = Decider(
            arena, units, self.forwards, views, capture, output_axes, config, self.ledger, self.shadow, reads
        )
        self._planned_last: Mapping[str, Any] = {}

    @property
    def plans_on_host(self) -> bool:
        """Whether some backend's host planner runs at every step."""
        return bool(self._plans)

    @property
    def forward(self) -> GlueGraphCache | None:
        """The recorded forwards, or those that the engine captured itself."""
        return self.forwards.cache

    def bind(self, stand_in: Callable[[], None]) -> None:
        """Go by what ranks agreed: no forward changes its route any more, and no rank waits for this one in vain.

        Args:
            stand_in: joins the other ranks' eager step without rows.
        """
        self.decider.bound = self.forwards.keep_going = True
        self.stand_in = stand_in

    def forget(self, anew: bool = False) -> None:
        """Forget all decisions: the state of a key changed; ``anew`` where every key was dropped."""
        self.decider.forget()
        if anew and self.shadow is not None:
            self.shadow.forget()

    def settle(self, wait: bool = False) -> None:
        """Act on the shadow check's verdicts: those that are there, or all of them. Sync: none, unless it waits."""
        if self.shadow is not None and self.shadow.settle(wait):
            self.forget()

    def load(self, lane: Lane, batch: Batch, forward_needed: bool = True) -> list[Write] | None:
        """Hold the sources against the slots, and take them in; host values are snapshotted now.

        This is the last check, and nothing is written before it has passed.

        Returns:
            The writes of a step that is not filled into its bucket's slots; None for one that is.

        Raises:
            BindError: a source does not fit.
            CapacityError: nothing covers the batch, and there is no forward that could run it eagerly.
        """
        for take in lane.known:
            if take(batch.sources):
                return None
        scratch = lane.facts.beyond
        if scratch and (self.forwards.python is None or not forward_needed):
            raise over_capacity(lane.raw, self._arena.space)
        sources = batch.sources
        if self._plans:
            sources = self._planned_last = planned(self._plans, lane.decision, batch)
        writes = self._arena.bind(sources, lane.raw, lane.decision.key.bucket, lane.rank_counts, scratch)
        if lane.fill is None:
            return writes
        lane.fill.load(writes)
        if not self._plans and (learned := lane.fill.remember(writes, sources)) is not None:
            lane.known = [learned, *lane.known[: _MAX_KNOWN - 1]]
        return None

    def load_nothing(self, lane: Lane) -> list[Write] | None:
        """Take in a step without rows, and ask no host planner; what a twin is made from is forgotten. As ``load``."""
        self._planned_last = {}
        writes = self._arena.bind({}, lane.raw, lane.decision.key.bucket, lane.rank_counts, lane.facts.beyond)
        if lane.fill is None:
            return writes
        lane.fill.load(writes)
        return None

    def run(
        self, lane: Lane, writes: list[Write] | None, batch: Batch, forward: bool = True
    ) -> tuple[Any, Any, Decision, View]:
        """Fill, prepare and run the forward, on the caller's current stream. Sync: none of its own.

        Returns:
            Metadata, outputs narrowed to the real rows, the decision, and the forward's view.
        """
        shadow = lane.shadow
        if shadow is not None:  # counted here: a call would cost a microsecond where the code is cold
            shadow.step += 1
            if (lane.young or shadow.step == shadow.next) and shadow.samples(lane):
                return self._run_beside_twin(lane, batch, forward)
        if forward and lane.whole is not None:
            return lane.whole()
        if lane.launch is not None and (forward or lane.decision.forward is not Route.GRAPH):
            return self._run_launch(lane, forward)
        self._arena.device.enter_step()
        return self._run_parts(lane, writes, forward)

    def run_ahead(self, lane: Lane, batch: Batch, decision: Decision) -> tuple[Any, Any, Decision, View]:
        """Run what is left of a step whose fill and preps ran ahead, by its decision; it is sampled like any other.

        Sync: none of its own.
        """
        shadow, twin = lane.shadow, None
        self._arena.device.enter_step()  # behind the fill and the preps
        if shadow is not None:
            shadow.step += 1
            if (lane.young or shadow.step == shadow.next) and shadow.samples(lane):
                twin = self._begin_twin(lane, batch)
        return self._run_parts(lane, None, True, twin, decision)

    def _begin_twin(self, lane: Lane, batch: Batch) -> Twin:
        assert self.shadow is not None
        return self.shadow.begin(lane, self._planned_last if self._plans else batch.sources, lane.rank_counts)

    def _run_beside_twin(self, lane: Lane, batch: Batch, forward: bool) -> tuple[Any, Any, Decision, View]:
        self._arena.device.enter_step()
        twin = self._begin_twin(lane, batch)
        # A forward may write in place what is compared, so one inside the launch is left for later.
        if lane.launch is not None and lane.outputs is None and not any(unit.declared.effects for unit in self._units):
            return self._run_launch(lane, forward, twin)
        return self._run_parts(lane, None, forward, twin)

    def _run_parts(
        self,
        lane: Lane,
        writes: list[Write] | None,
        forward: bool,
        twin: Twin | None = None,
        ahead: Decision | None = None,
    ) -> tuple[Any, Any, Decision, View]:
        self._late = None
        try:
            views, forward_view = self._fill(lane, writes) if ahead is None else self._views.of(lane.decision.key)
            self._record_read("sources", True)
            decided = lane.decision if ahead is None else ahead
            metadata, given, decision = self._run_preps(decided, views, twin, ahead is not None)
        except Exception:
            if forward and self.decider.bound:
                self._keep_company(lane)
            raise
        self._record_read("tables", not self._tables_until_forward)
        if twin is not None and self.shadow is not None:
            self.shadow.check(twin)
        outputs = self.forwards.outputs(lane, decision, forward_view, given, metadata) if forward else None
        self._record_read("tables", self._tables_until_forward)
        how = SAMPLED if twin is not None else AHEAD if ahead is not None else None
        by_parts = how if lane.launch is not None else None
        as_decided = decision is lane.decision and by_parts is None
        tally = lane.tally if as_decided else self.ledger.tally(decision, lane.facts.exact, by_parts)
        self.ledger.note(tally, decision, lane.raw)
        self._raise_late()
        return self._handed_out(metadata), self._handed_out(outputs), decision, forward_view

    def _raise_late(self) -> None:
        if self._late is not None:
            late, self._late = self._late, None
            raise late

    def _keep_company(self, lane: Lane) -> None:
        """Run what was agreed though a prep raised: the other ranks are in its collectives, and wait."""
        if lane.decision.forward is Route.GRAPH and self.forward is not None:
            for unit in self._units:
                _freshen(unit, lane.decision.key)
            self.forwards.replay(lane, self._capture.metadata(lane.decision.key))
        elif self.forwards.python is not None and self.stand_in is not None:
            self.stand_in()

    def _run_launch(self, lane: Lane, forward: bool, twin: Twin | None = None) -> tuple[Any, Any, Decision, View]:
        assert lane.launch is not None
        assert lane.metadata is not None
        assert lane.forward_view is not None
        launch, key, self._late = lane.launch, lane.decision.key, None

        def begin() -> None:
            """Launch what was composed, and publish, before any eager break reads what is published."""
            launch.run()
            if twin is not None and self.shadow is not None:
                for position in range(len(self._units)):
                    twin.prepare(position)
                self.shadow.check(twin)
            for unit in self._publishers:
                self._publish(unit, unit.cache.result(key))

        self.forwards.join(lane, begin)
        metadata = lane.metadata.tree()
        if lane.outputs is not None:
            outputs = lane.outputs.tree()
        else:  # fill and preps were one launch; the forward has no graph
            run = self.forwards.outputs
            outputs = run(lane, lane.decision, lane.forward_view, metadata, metadata) if forward else None
        self.ledger.note(lane.tally, lane.decision, lane.raw)  # a step that a forward's own error ended is none
        if lane.outputs is None or lane.segments is not None:
            self._record_read("tables", self._tables_until_forward)
        self._raise_late()
        if self._config.clone_outputs:
            metadata, outputs = self._handed_out(metadata), self._handed_out(outputs)
        return metadata, outputs, lane.decision, lane.forward_view

    def _fill(self, lane: Lane, writes: list[Write] | None) -> tuple[list[View], View]:
        key = lane.decision.key
        if lane.fill is not None and lane.views is not None and lane.forward_view is not None:
            lane.fill.run()
            return lane.views, lane.forward_view
        assert writes is not None
        if lane.facts.beyond:  # fresh tensors, the slots stay as they are
            return self._views.over(self._arena.scratch(writes, key.bucket), key, lane.meeting)
        self._arena.device.fill_once(writes, self._arena.targets(key.bucket))
        return self._views.over(self._arena.targets(key.bucket), key, lane.meeting)

    def _run_preps(
        self, decision: Decision, views: list[View], twin: Twin | None = None, ahead: bool = False
    ) -> tuple[Any, Any, Decision]:
        """Run the preps on their routes; give their metadata, the same as a forward is handed it, and the decision.

        Those that ran ahead were glued: their metadata is there.
        """
        results, given, changes = [], [], []
        for position, (unit, view) in enumerate(zip(self._units, views)):
            if twin is not None:
                twin.prepare(position)
            if ahead:
                result, changed = unit.cache.result(decision.key), None
            else:
                result, changed = unit.run(decision.preps[unit.name].route, decision.key, view)
            skipped = result is None and decision.preps[unit.name].route is Route.SKIP  # there is nothing to install
            if unit.registration.publish is not None and not skipped:
                self._publish(unit, result)
            if changed and self.decider.bound:
                _freshen(unit, decision.key)
            results.append(_lent(result))
            given.append(trees.without(results[-1], unit.declared.live, unit.name)[0])
            changes.append(changed)
        readable = decision.forward_reason in (None, Reason.NO_FORWARD_GRAPH)
        if readable and any(changes):  # a graph, ours or the engine's, reads the static metadata, which is old now
            if self.decider.bound and decision:
                self._late = self._late or _changed_alone(next(filter(None, changes)))
            else:
                decision = replace(decision, forward=Route.EAGER, forward_reason=Reason.METADATA_CHANGED)
        return self._join(results), self._join(given), decision

    def _publish(self, unit: Unit, result: Any) -> None:
        try:
            unit.registration.publish(_lent(result))  # type: ignore[misc]
        except Exception as error:
            if not self.decider.bound:
                raise
            self._late = self._late or error  # the other ranks wait in the forward

    def _open_shadow(self, config: RunnerConfig) -> ShadowCheck | None:
        if config.shadow is None:
            return None
        from graphglue.audit.shadow import ShadowCheck  # a runner without one loads no audit

        return ShadowCheck(config.shadow, self._arena, self._units, self._views, self._capture)

    def _record_read(self, what: str, now: bool) -> None:
        if self._reads is not None and now:
            self._arena.device.record_event(getattr(self._reads, what))

    def _handed_out(self, tree: Any) -> Any:
        return trees.map_tensors(torch.clone, tree) if self._config.clone_outputs else tree


def _freshen(unit: Unit, key: Key) -> None:
    """Have a prep's graph write the metadata that a forward is about to read though the prep itself gave none.

    Graphs of the same pool, replayed since its own last one, may have left anything there, such as indices that fault.
    """
    if unit.cache.state(key) is State.CAPTURED and not unit.declared.effects:
        with suppress(Exception):  # what the prep raised is told
            unit.cache.replay(key)


def _lent(result: Any) -> Any:
    """Give a result in containers and tensor objects of its own, which whoever holds it may reshape in place."""
    return trees.map_tensors(torch.Tensor.detach, result)


def _changed_alone(how: str) -> ContractError:
    return ContractError(
        f"a prep that ran eagerly returned other metadata than its graph reads: {how}. The ranks had agreed on the "
        "graph, so it ran with an earlier step's metadata, and this rank's outputs are void; return what was captured"
    )
