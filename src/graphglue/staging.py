"""Staging: run the front of the next step, its fill and its preps, ahead of it and beside other work.

::

    caller's stream   forward of step n | sampling, another runner, ...    | forward of step n + 1
    side stream                         | fill and preps of step n + 1     |

The front is queued behind this runner's own last forward, which reads the same slots and metadata, so there are
never two steps in one set of slots. The next replay takes it if nothing that it was made from has changed.
"""

from __future__ import annotations

import enum
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from graphglue.capture import Capture
from graphglue.config import RunnerConfig
from graphglue.core.batch import Batch
from graphglue.core.binding import Write
from graphglue.core.routing import Decision, Route
from graphglue.core.view import View
from graphglue.device.arena import Arena
from graphglue.device.base import Loaded
from graphglue.errors import ConfigError, GraphGlueError
from graphglue.flight.sources import kept_sources
from graphglue.lanes import Lane
from graphglue.results import owned
from graphglue.stepping import Stepper
from graphglue.units import Unit

Results = tuple[Any, Any, Decision, View]  # metadata, outputs, where the step went, the forward's view
Run = Callable[..., Results]  # Stepper.run, or what stands in its place

_EVENT_METHODS = ("wait", "query", "synchronize")


class NotStaged(str, enum.Enum):
    """Why a step that ``stage`` was asked for is left to its replay, besides the reasons of the router."""

    CAPTURING = "capturing"  # the caller's stream is being captured
    UNDECLARED = "undeclared"  # a prep without a contract may read what nobody watches
    DRAWS_RANDOM = "draws_random"  # a prep would draw its numbers twice where the step is not taken
    USED_UP = "used_up"  # an adopted forward that draws random numbers is launched behind its own fill only
    UNSEEN = "unseen"  # a change of a source or table could not be seen: see ``Fill.loaded``


class Rejected(str, enum.Enum):
    """Why a staged step was not taken."""

    DROPPED = "dropped"  # keys were captured, repaired or dropped, or a table was rebound
    PREPARED = "prepared"  # ``prepare`` came next
    OTHER_STEP = "other_step"  # other extents, another mode, variant, key or route
    SOURCES = "sources"  # other host values, or a device source at another address or version
    TABLES = "tables"  # a table was written


@dataclass(frozen=True, slots=True)
class Staged:
    """Hold what was staged: the lane it went, its decision, and what it was made from."""

    lane: Lane
    decision: Decision
    loaded: Loaded
    tables: tuple[int, ...]


class Staging:
    """Stage one step at a time, and run the steps of a runner that does.

    Args:
        arena: the slots.
        units: the preps.
        tables: the runner's tables; those that preps declare are watched.
        capture: knows what draws random numbers.
        stepper: describes, decides, loads and runs.
    """

    def __init__(
        self,
        arena: Arena,
        units: Sequence[Unit],
        tables: Mapping[str, torch.Tensor],
        capture: Capture,
        stepper: Stepper,
    ) -> None:
        self._device, self._units, self._tables = arena.device, list(units), tables
        self._capture, self._stepper, self._decider = capture, stepper, stepper.decider
        self._watched = [name for name in tables if any(name in unit.declared.tables for unit in units)]
        self._behind, self._is_behind = self._device.read_event(), False  # the last forward, if it ran here
        self._staged: Staged | None = None
        self._num_staged = self._num_taken = 0
        self._rejected: Counter[Rejected] = Counter()
        self._not_staged: Counter[str] = Counter()

    def stage(self, batch: Batch, after: Any = None) -> bool:
        """Fill the slots and run the preps of a step on the side stream; see ``Runner.stage``.

        Sync: none.
        """
        if self._staged is not None:
            raise _occupied(self._staged.lane)
        _check_event(after)
        lane = self._decider.lane(batch)
        self._stepper.load(lane, batch, forward_needed=False)
        loaded = None if lane.fill is None else lane.fill.loaded()
        versions = self._table_versions()
        why_not = self._why_not(lane)
        if why_not is not None or loaded is None or versions is None:
            self._leave(lane, why_not or NotStaged.UNSEEN)
            return False
        decision = self._decider.route(replace(lane.facts, staged=True), lane.decision.key)
        self._run_front(lane, loaded, after)
        self._staged = Staged(lane, decision, loaded, versions)
        self._num_staged += 1
        return True

    def run(self, lane: Lane, writes: list[Write] | None, batch: Batch, forward: bool = True) -> Results:
        """Run a step that was loaded, or its forward only where all else is there; as ``Stepper.run``.

        Sync: none of its own.
        """
        ahead, self._is_behind = self._taken(lane, forward), False
        if ahead is None:
            results = self._stepper.run(lane, writes, batch, forward)
        else:
            results = self._stepper.run_ahead(lane, batch, ahead)
        if forward and results[2].forward is Route.EAGER:
            results = _outlasting(*results)
        if forward and self._stepper.forwards.runs(results[2].forward):
            self._device.record_event(self._behind)
            self._is_behind = True
        return results

    def drop(self) -> None:
        """Forget what is staged and the last forward: slots, keys or tables are about to change. Sync: none.

        What is queued on the side stream is waited for by whatever uses the slots next.
        """
        self._is_behind = False
        if self._staged is not None:
            self._staged = None
            self._rejected[Rejected.DROPPED] += 1

    def stats(self) -> dict[str, Any]:
        """Count what was staged, taken and rejected, JSON-ready."""
        return {
            "staged": self._num_staged,
            "staged_taken": self._num_taken,
            "staged_rejected": {why.value: count for why, count in self._rejected.copy().items()},
            "not_staged": dict(self._not_staged),
        }

    def _why_not(self, lane: Lane) -> NotStaged | str | None:
        """Say why a step is not staged, if that is not up to its sources."""
        key = lane.decision.key
        if lane.fill is None or lane.decision.prep is not Route.GLUE:  # the weakest prep names the decision
            return lane.decision.reason.value
        if any(unit.registration.contract is None for unit in self._units):
            return NotStaged.UNDECLARED
        if self._capture.drawing_part(key) == "prep":
            return NotStaged.DRAWS_RANDOM
        if key in self._capture.used_up:
            return NotStaged.USED_UP
        return NotStaged.CAPTURING if self._device.is_capturing() else None

    def _leave(self, lane: Lane, why_not: NotStaged | str) -> None:
        self._not_staged[str(getattr(why_not, "value", why_not))] += 1
        if lane.fill is not None:
            lane.fill.unload()

    def _run_front(self, lane: Lane, loaded: Loaded, after: Any) -> None:
        assert lane.fill is not None
        behind = self._behind if self._is_behind else None
        callers_work = after is None and bool(loaded.sources or self._watched)
        with self._device.beside(behind, after, callers_work):
            lane.fill.run()
            for unit in self._units:
                unit.cache.replay(lane.decision.key)

    def _taken(self, lane: Lane, forward: bool) -> Decision | None:
        """Give the decision of the staged step if the one that was loaded now is the very same."""
        staged, self._staged = self._staged, None
        if staged is None:
            return None
        why = self._why_rejected(staged, lane, forward)
        if why is not None:
            self._rejected[why] += 1
            return None
        assert lane.fill is not None
        lane.fill.unload()
        self._num_taken += 1
        return staged.decision

    def _why_rejected(self, staged: Staged, lane: Lane, forward: bool) -> Rejected | None:
        was = staged.lane
        if not forward:
            return Rejected.PREPARED
        if lane.fill is None or (lane.fill, lane.raw, lane.decision) != (was.fill, was.raw, was.decision):
            return Rejected.OTHER_STEP
        if lane.fill.loaded() != staged.loaded:
            return Rejected.SOURCES
        return None if self._table_versions() == staged.tables else Rejected.TABLES

    def _table_versions(self) -> tuple[int, ...] | None:
        """Give the versions of the tables that preps read; None where torch counts none."""
        tables = [self._tables[name] for name in self._watched]
        return None if any(table.is_inference() for table in tables) else tuple(table._version for table in tables)


def way_to_run(
    config: RunnerConfig,
    arena: Arena,
    units: Sequence[Unit],
    tables: Mapping[str, torch.Tensor],
    capture: Capture,
    stepper: Stepper,
) -> tuple[Staging | None, Run]:
    """Give what stages a runner's steps, if its config asks for that, and what runs those that were loaded."""
    staging = Staging(arena, units, tables, capture, stepper) if config.staging else None
    run: Run = kept_sources(stepper.run if staging is None else staging.run, stepper.ledger)
    changed = sorted({name for unit in units for name in unit.declared.effects})
    return staging, _counting_writes(run, tables, changed) if changed else run


def _counting_writes(run: Run, tables: Mapping[str, torch.Tensor], changed: Sequence[str]) -> Run:
    """Have torch count what preps write into tables: a graph does not, and another runner may have staged a reader."""

    def run_counting(*args: Any, **more: Any) -> Results:
        try:
            return run(*args, **more)
        finally:
            for name in changed:
                if not tables[name].is_inference():
                    torch.autograd.graph.increment_version(tables[name])

    return run_counting


def not_asked_for() -> ConfigError:
    """Say that a runner was not built for staging."""
    return ConfigError(
        "stage: this runner does not stage steps, because preps that run beside a forward need a memory pool of their "
        "own; build it with RunnerConfig(staging=True)"
    )


def _check_event(after: Any) -> None:
    if after is None:
        return
    if isinstance(after, type) or not all(callable(getattr(after, name, None)) for name in _EVENT_METHODS):
        seen = f"the class {after.__name__}" if isinstance(after, type) else f"a {type(after).__name__}"
        raise ConfigError(f"stage: after is {seen}; expected an event, such as torch.cuda.Event()")
    if getattr(after, "cuda_event", None) == 0:  # CUDA takes such an event for one that has happened
        raise ConfigError(
            "stage: after was never recorded, so nothing would be waited for; record it behind what makes the sources "
            "and tables ready, or leave it out"
        )


def _outlasting(metadata: Any, outputs: Any, decision: Decision, view: View) -> Results:
    """Copy what an eager forward returned of the slots and the metadata: a staged step writes both beside them."""
    return metadata, owned(outputs, (dict(view), metadata)), decision, view


def _occupied(lane: Lane) -> GraphGlueError:
    return GraphGlueError(
        f"stage: a step of {tuple(lane.raw)} is staged at {tuple(lane.decision.bucket)} and was not replayed, and two "
        "steps can not share one set of slots: replay it first; the replay of any other batch rejects it"
    )
