"""Agreeing: what a runner with ranks does between a batch and its launch.

    admit    every check that this rank can make alone: counts, sources, tables. Nothing is raised yet
    agree    one exchange with the other ranks, or a plan that the engine got itself
    route    the lane of what was agreed; no row of the table changes its bucket or forward

A batch that is refused still takes part: the rank joins the others' step with no rows, and raises afterwards.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

from graphglue.capture import Capture
from graphglue.config import RunnerConfig
from graphglue.core.batch import Batch, Mode
from graphglue.core.binding import Write
from graphglue.core.buckets import Bucket
from graphglue.core.keys import Key, KeySpace
from graphglue.core.routing import Route, State, StepFacts
from graphglue.device.arena import Arena
from graphglue.errors import BindError, ClosedError, ConfigError, RankDisagreementError
from graphglue.flight.ring import FlightLedger
from graphglue.lanes import Lane
from graphglue.rank_space import Ranks
from graphglue.ranks.admission import admits, missing_sizes, mode_of, stated
from graphglue.ranks.facts import RankFacts
from graphglue.ranks.plan import RankPlan, Role
from graphglue.registry import Registration
from graphglue.stepping import Stepper
from graphglue.units import Views

logger = logging.getLogger("graphglue")

_MAX_AGREED = 64  # lanes that one lane remembers; peers have any number of buckets, but a ladder has few


class _Admission(NamedTuple):
    """What a rank knows of a batch before the agreement.

    Attributes:
        facts: what it states.
        alone: the lane it would take alone; None for a batch that is refused.
        loaded, writes: the lane that took the sources in, and what is left to write.
        refusal: what refuses the batch.
    """

    facts: RankFacts
    alone: Lane | None = None
    loaded: Lane | None = None
    writes: list[Write] | None = None
    refusal: Exception | None = None


class Agreement:
    """Hold a runner's steps to what its ranks agree on.

    Args:
        ranks: the group.
        stepper: decides, loads and runs.
        arena: the slots.
        capture, views: told that ranks meet in what they capture.
        config: what this rank admits.
        check: refuses what no step may run with: a closed runner, a moved table.
    """

    def __init__(
        self,
        ranks: Ranks,
        stepper: Stepper,
        arena: Arena,
        capture: Capture,
        views: Views,
        config: RunnerConfig,
        check: Callable[[], None],
    ) -> None:
        self.ranks, self._arena, self._capture = ranks, arena, capture
        self._stepper, self._decider = stepper, stepper.decider
        self.agree = ranks.agree
        self._config, self._check = config, check
        self._counts_vary = ranks.planner.sum_len_tolerated  # of one captured bucket
        self._extra = (0,) * getattr(ranks, "num_extra", 0)
        self._entered: RankPlan | None = None  # what the running step was agreed to be
        self._flight = stepper.ledger if isinstance(stepper.ledger, FlightLedger) else None
        stepper.bind(self._stand_in_again)
        capture.together, capture.lockstep.votes = ranks.every, ranks
        views.meeting_of = lambda key: ranks.planner.captured_meeting(key.bucket, key.mode, ranks.size)

    def compare(self, registrations: Iterable[Registration], slots: Iterable[Any]) -> None:
        """Compare with the other ranks what their graphs must have in common. Sync: the host waits."""
        space = self._arena.space
        contracts = {
            f"contract {one.name!r}": one.contract.digest() if one.contract else "none" for one in registrations
        }
        named = [f"{slot.name}: {slot.axis.value} {slot.dtype} {slot.inner} {slot.pad}" for slot in slots]
        shapes = {"modes": str(space.modes), "ragged": str(space.ragged)}
        shapes["variants"] = re.sub(r" at 0x[0-9a-f]+", "", repr(space.variants))  # an address is each rank's own
        captures = {"warmups": str(self._config.warmups), "forward": str(self._stepper.forward is not None)}
        self.ranks.compare({**contracts, "slots": str(named), **shapes, **captures})

    def ready(self, name: str, check: Callable[[], Any]) -> Any:
        """Make a check on every rank before any goes on to what needs all; give its result. Sync: the host waits.

        Raises:
            Exception: what the check raised here.
            RankDisagreementError: it was refused on another rank, or gave something else there.
        """
        result, refusal = _attempt(check)
        try:
            self.ranks.compare({name: str(result) if refusal is None else f"refused ({refusal})"})
        except RankDisagreementError:
            if refusal is None:
                raise
        if refusal is not None:
            raise refusal
        return result

    def facts(self, batch: Batch) -> RankFacts:
        """State a step, for an engine that exchanges facts itself. Writes nothing, and raises for no batch."""
        return self._admitted(batch, True).facts

    def enter(self, batch: Batch, plan: RankPlan | None, forward: bool = True) -> tuple[Lane, list[Write] | None]:
        """Admit a batch, agree, and give the lane that was agreed, loaded.

        Raises:
            BindError, StaleTableError and whatever else refuses the batch, once the ranks have agreed.
            RankDisagreementError: the ranks could not agree, or a plan does not fit this rank.
        """
        if self._flight is not None:
            self._flight.meet()
        if plan is not None:
            self._check_plan(plan)
        own = self._admitted(batch, forward)
        if plan is None:
            plan = self.agree(own.facts)
        if self._flight is not None:
            self._flight.agree(plan)
        refusal = own.refusal
        if own.alone is not None:
            try:
                lane, writes = self._lane(batch, own.alone, plan), own.writes
                if lane is not own.loaded:
                    writes = self._stepper.load(lane, batch, forward)
                own.alone.last = lane if lane.fill is not None else None
                self._entered = plan
                return lane, writes
            except Exception as error:  # the plan of a host planner raises what it likes
                refusal = error
        self._entered = None
        self._stand_in(plan, forward)
        assert refusal is not None
        raise refusal

    def missing_keys(
        self, wanted: Sequence[Key], missing: Callable[[Key], bool], check: Callable[[bool], Any]
    ) -> list[Key]:
        """Find the keys to repair: those of every size that some rank misses. Sync: the host waits.

        All ranks take part in a repair, because a forward warms up with its collectives; so there is none while
        one of them is refused by its own check, or wants no keys since a reset.
        """
        self._stepper.settle(wait=True)
        refusal = _attempt(lambda: check(True))[1]
        together = self.ranks.every(refusal is None and bool(wanted))
        if refusal is not None:
            raise refusal
        if not together:
            if wanted:
                logger.warning("maintain: another rank can not capture now, so no rank repairs anything")
            return []
        space, forward = self._arena.space, self._stepper.forward
        lacking = {_size(space, key) for key in wanted if missing(key)}
        bits = self.ranks.union(missing_sizes(space, set(space.ladder) - lacking))
        keys = [key for key in wanted if bits & missing_sizes(space, set(space.ladder) - {_size(space, key)})]
        self._arena.device.synchronize()  # a graph that still runs must not lose its memory
        if forward is not None and self._capture.adopted is None:
            for key in keys:
                forward.drop(key)
        return keys

    # Admission.

    def _admitted(self, batch: Batch, forward: bool) -> _Admission:
        """Make every check that needs no other rank, and take the sources in where the last such step took them."""
        try:
            self._check()
            alone = self._decider.lane(batch)
            if alone.stated is None:
                alone.stated = self._state(alone.facts, batch.variant)
            if self._stepper.plans_on_host:  # once a step, for the bucket that is agreed
                return _Admission(alone.stated, alone)
            ahead = alone.last or alone
            return _Admission(alone.stated, alone, ahead, self._stepper.load(ahead, batch, forward))
        except Exception as error:
            mode = batch.mode if isinstance(getattr(batch, "mode", None), Mode) else self._arena.space.modes[0]
            return _Admission(RankFacts.refusal(mode, self._extra), refusal=error)

    def _state(self, step: StepFacts, variant: Any) -> RankFacts:
        space = self._arena.space
        shapes = self._shapes()
        known = shapes is None or (step.mode, self._form(step.raw), variant) in shapes
        joining = None
        if space.counts_tokens and step.mode is Mode.DECODE and not step.idle:
            alone = replace(step, mode=Mode.EXTEND, waste_limit=self._config.waste_limit_in(Mode.EXTEND))
            joining = admits(alone) and (shapes is None or (Mode.EXTEND, 0, variant) in shapes)
        modes = space.modes if shapes is None else sorted({mode for mode, _, _ in shapes}, key=space.modes.index)
        mode = modes[0] if step.idle and modes and step.mode not in modes else None  # nothing of its own to run in
        extends, missing = space.counts_tokens, self._missing()
        return stated(step, known, missing, mode=mode, extends=extends, joining=joining, extra=self._extra)

    def _shapes(self) -> set[tuple[Mode, int, Any]] | None:
        """List what forwards are captured for: mode, width and variant; None for an engine that owns its forward."""
        if self._stepper.forward is None:
            return None
        return {(key.mode, key.row_tokens, key.variant) for key in self._forward_keys()}

    def _form(self, raw: Bucket) -> int:
        return 0 if self._arena.space.counts_tokens else raw.row_tokens

    def _forward_keys(self) -> list[Key]:
        """List the keys that have a forward once all are captured; an adopted forward has one mode and shape."""
        keys = self._arena.space.keys()
        if self._capture.adopted is None:
            return list(keys)
        mode, width = self._arena.space.modes[0], self._arena.space.bucket(self._arena.space.ladder.smallest).row_tokens
        return [key for key in keys if key.mode is mode and key.row_tokens == width]

    def _missing(self) -> int:
        space, forward = self._arena.space, self._stepper.forward
        if forward is None:
            return 0
        lacking = {
            _size(space, key)
            for key in self._forward_keys()
            if forward.state(key) is not State.CAPTURED or key in self._capture.used_up
        }
        return missing_sizes(space, set(space.ladder) - lacking)

    # Routing by what was agreed.

    def _check_plan(self, plan: Any) -> None:
        if not isinstance(plan, RankPlan) or len(plan.counts) != self.ranks.size:
            seen = f"one of {len(plan.counts)} ranks" if isinstance(plan, RankPlan) else f"a {type(plan).__name__}"
            raise ConfigError(f"plan is {seen}; expected the RankPlan of all {self.ranks.size} ranks")

    def _lane(self, batch: Batch, local: Lane, plan: RankPlan, scratch: bool = False) -> Lane:
        rank = self.ranks.rank
        converted = plan.roles[rank] is Role.CONVERTED and self._arena.space.counts_tokens
        if plan.forward is Route.EAGER:
            return self._eager_lane(batch, local, plan, converted, scratch)
        signature = (plan.bucket, plan.mode, converted, plan.counts if self._counts_vary else None)
        lane = local.agreed.get(signature)
        if lane is None:
            if len(local.agreed) >= _MAX_AGREED:
                local.agreed.clear()
            lane = local.agreed[signature] = self._graph_lane(batch, local, plan, converted)
        return lane

    def _graph_lane(self, batch: Batch, local: Lane, plan: RankPlan, converted: bool) -> Lane:
        space, raw, step = self._arena.space, local.raw, local.facts
        bucket = space.bucket(plan.bucket.tokens) if space.counts_tokens else plan.bucket
        if converted:
            raw = Bucket(raw.requests, raw.tokens, 0)
        self._check_covered(raw, bucket, plan)
        ragged = bucket.row_tokens == 0 and not space.counts_tokens and not step.idle
        facts = StepFacts(raw, bucket, plan.mode, step.features, ragged)
        known = not step.idle or batch.variant in space.variants
        variant = batch.variant if known else space.variants[0]  # a rank without requests takes any
        decision = self._decider.route(facts, space.key(plan.mode, bucket, variant))
        if self._stepper.forward is not None and not decision:
            raise RankDisagreementError(
                f"rank {self.ranks.rank}: the plan says GRAPH at {tuple(bucket)} in mode {plan.mode.value}, but it has "
                f"no graph there ({decision.forward_reason}); send what Runner.facts gives, it says what is missing"
            )
        lane = self._decider.lane_of(raw, facts, decision)
        lane.rank_counts = None if set(plan.counts) == {bucket.tokens} else plan.counts
        return lane

    def _eager_lane(self, batch: Batch, local: Lane, plan: RankPlan, converted: bool, scratch: bool) -> Lane:
        rank, raw, step = self.ranks.rank, local.raw, local.facts
        if converted:
            raw = Bucket(raw.requests, raw.tokens, 0)
        width = self._arena.space.width if step.idle and not self._arena.space.counts_tokens else raw.row_tokens
        extents = plan.extents(rank, raw, width)
        self._check_covered(raw, extents, plan)
        mode = mode_of(step.mode, plan.mode, idle=step.idle, converted=converted)
        facts = replace(
            step,
            raw=raw,
            mode=mode,
            vetoed=any(other != rank for other in plan.vetoes),
            agreed=extents,
            scratch=scratch or not self._arena.fits(extents),
        )
        # A key without padding, which is never captured: what is eager here is eager as a whole.
        decision = replace(self._decider.route(facts, Key(mode, *extents, None, batch.variant)), bucket=plan.bucket)
        lane = self._decider.lane_of(raw, facts, decision)
        lane.rank_counts, lane.meeting = plan.counts, plan.meeting
        return lane

    def _check_covered(self, raw: Bucket, extents: Bucket, plan: RankPlan) -> None:
        if raw.requests > extents.requests or raw.tokens > extents.tokens:
            raise BindError(
                f"rank {self.ranks.rank}: the plan gives it {tuple(extents)}, but its batch has {tuple(raw)}; a plan "
                "is for the batch whose facts were gathered"
            )

    def _stand_in_again(self) -> None:
        """Join an eager step whose prep raised on this rank's own rows; once, because it may raise on no rows too."""
        plan, self._entered = self._entered, None
        if plan is not None:
            self._stand_in(plan, True)

    def _stand_in(self, plan: RankPlan, forward: bool) -> None:
        """Join the other ranks' step with no rows, so that none of them waits for this one in a collective."""
        if not forward or not self._stepper.forwards.runs(plan.forward):
            return
        batch = Batch.idle(plan.mode, self._arena.space.variants[0])
        try:
            alone = self._decider.lane(batch)
            try:
                lane = self._lane(batch, alone, plan, scratch=True)
            except RankDisagreementError:  # no graph here any more: the same collectives, run eagerly
                lane = self._lane(batch, alone, plan._replace(forward=Route.EAGER), scratch=True)
            # What failed may be the host planner, which ``load`` would ask.
            self._stepper.run(lane, self._stepper.load_nothing(lane), batch)
        except ClosedError:
            return
        except Exception:
            logger.exception("rank %d was refused, and could not join the step of the others either", self.ranks.rank)


def _attempt(check: Callable[[], Any]) -> tuple[Any, Exception | None]:
    try:
        return check(), None
    except Exception as error:
        return None, error


def _size(space: KeySpace, key: Key) -> int:
    return key.tokens if space.counts_tokens else key.requests
