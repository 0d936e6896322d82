"""Recheck: hold what a key replays against eager runs of the same code, before it serves again."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import Any

import torch

from graphglue.capture import Capture
from graphglue.core import trees
from graphglue.core.differences import bytes_of
from graphglue.core.keys import Key
from graphglue.core.routing import Route, State, StepFacts
from graphglue.device.arena import Arena
from graphglue.lanes import Lane
from graphglue.results import copy_into
from graphglue.stepping import Stepper
from graphglue.units import Unit, Views

logger = logging.getLogger("graphglue")


class Recheck:
    """Compare graphs with eager runs, bit for bit, on the slots' capture values.

    The forward counts as well: its outputs are the only sign of weights that moved. Tables that preps declare to
    change are put back behind every run; what a forward changes is the engine's, as while it warms up.

    Args:
        arena: the slots; they hold capture values afterwards.
        units: the preps.
        tables: the runner's tables.
        views: what preps and forward see.
        capture: knows what is composed, and what ranks say together.
        stepper: builds lanes, and holds the forwards.
        join: gives the metadata of all preps as the forward sees it.
    """

    def __init__(
        self,
        arena: Arena,
        units: Sequence[Unit],
        tables: dict[str, torch.Tensor],
        views: Views,
        capture: Capture,
        stepper: Stepper,
        join: Callable[[list[Any]], Any],
    ) -> None:
        self._arena, self._units, self._tables, self._views = arena, list(units), tables, views
        self._capture, self._stepper, self._decider, self._join = capture, stepper, stepper.decider, join
        self._effects = sorted({name for unit in units for name in unit.declared.effects})

    def holds(self, key: Key) -> bool:
        """Tell whether all that a key replays equals eager runs, on every rank; logs what does not. Sync: the device.

        With ranks, all of them call it for the same keys in the same order: forwards meet in collectives.
        """
        agreed = self._agreed(key, lambda: self._whole(key) or self._prep_fault(key))
        if not agreed or self._stepper.forwards.python is None:
            return agreed
        return self._agreed(key, lambda: self._forward_difference(key))

    def difference(self, key: Key) -> tuple[Unit, str] | None:
        """Find the first glued prep that differs from an eager run at a key, and say how. Sync: the device."""
        self._arena.device.enter_step()
        self._arena.fill_capture(key.bucket)
        for unit, view in zip(self._units, self._views.of(key)[0]):
            compare = partial(self._prep_difference, unit, key, view)
            if unit.cache.state(key) is State.CAPTURED and (how := _told(compare)):
                return unit, how
        return None

    def _prep_fault(self, key: Key) -> str | None:
        found = self.difference(key)
        return None if found is None else f"prep {found[0].name!r}: {found[1]}"

    def _whole(self, key: Key) -> str | None:
        if self._capture.missing(key):
            return "something of it has no graph"
        return "it draws random numbers" if self._capture.drawing_part(key) else None

    def _agreed(self, key: Key, fault: Callable[[], str | None]) -> bool:
        """Bring the ranks' findings together: a key with a fault anywhere is recorded anew everywhere."""
        why = _told(fault)
        if why is not None:
            logger.info("key %s is recorded anew: %s", tuple(key), why)
        return self._capture.together(why is None)

    def _prep_difference(self, unit: Unit, key: Key, view: Any) -> str | None:
        with self._tables_kept():
            seen = _copied(unit.cache.replay(key))
            changed = self._changed_tables()
        with self._tables_kept():
            expected, how = unit.cache.eager(key, view)  # it writes into the static result
            if how is not None:
                return how
            changed_eagerly = self._changed_tables()
        return _parting(seen, expected, unit.declared.compile) or _parting(changed, changed_eagerly)

    def _forward_difference(self, key: Key) -> str | None:
        lane = self._lane(key)
        if lane.outputs is None:
            return None
        with self._tables_kept():
            self._replay(lane)
            seen = _copied(lane.outputs.tree())
        with self._tables_kept():
            expected = self._run(lane)
        how = trees.difference(seen, expected) or _parting(seen, expected)
        return how and f"the forward: {how}"

    def _lane(self, key: Key) -> Lane:
        ragged = key.row_tokens == 0 and not self._arena.space.counts_tokens
        facts = StepFacts(key.bucket, key.bucket, key.mode, ragged=ragged)
        return self._decider.lane_of(key.bucket, facts, self._decider.route(facts, key))

    def _replay(self, lane: Lane) -> None:
        """Run a key as a step does: through its launch, if it has one."""
        key, fill = lane.decision.key, lane.fill
        assert fill is not None
        self._arena.device.enter_step()
        self._arena.fill_capture(key.bucket)
        sources = {
            name: tensor.clone()
            for name, tensor in self._arena.targets(key.bucket).items()
            if self._arena.slots[name].value is None
        }
        fill.load(self._arena.bind(sources, lane.raw, key.bucket, lane.rank_counts))
        if lane.launch is not None:
            self._stepper.forwards.join(lane, lane.launch.run)
        else:
            fill.run()
            self._stepper.forwards.replay(lane, self._metadata(key)[1])

    def _run(self, lane: Lane) -> Any:
        """Run a key's forward eagerly, over metadata of the same preps."""
        key = lane.decision.key
        self._arena.device.enter_step()
        self._arena.fill_capture(key.bucket)
        eagerly, metadata = replace(lane.decision, forward=Route.EAGER), self._metadata(key)
        assert lane.forward_view is not None
        return self._stepper.forwards.outputs(lane, eagerly, lane.forward_view, self._capture.metadata(key), metadata)

    def _metadata(self, key: Key) -> tuple[Any, Any]:
        """Run a key's preps on what the slots hold; give what the forward is handed, and the same with what is live."""
        results = []
        for unit, view in zip(self._units, self._views.of(key)[0]):
            glued = unit.cache.state(key) is State.CAPTURED
            results.append(unit.cache.replay(key) if glued else unit.cache.eager(key, view)[0])
        given = [trees.without(one, unit.declared.live, unit.name)[0] for unit, one in zip(self._units, results)]
        return self._join(given), self._join(results)

    def _changed_tables(self) -> list[torch.Tensor]:
        return [self._tables[name].clone() for name in self._effects]

    @contextmanager
    def _tables_kept(self) -> Iterator[None]:
        """Put back what preps with effects change."""
        kept = self._changed_tables()
        try:
            yield
        finally:
            copy_into([self._tables[name] for name in self._effects], kept)


def _told(fault: Callable[[], str | None]) -> str | None:
    """Give a fault in words, an error too: a runner that can not compare wakes all the same, and its ranks with it."""
    try:
        return fault()
    except Exception as error:
        return f"{type(error).__name__}: {error}"


def _copied(tree: Any) -> Any:
    return trees.map_tensors(torch.clone, tree)


def _parting(seen: Any, expected: Any, but_floats: bool = False) -> str | None:
    """Name the first leaf of two trees of one structure whose bytes differ. Sync: the device."""
    for (name, one), (_, other) in zip(trees.named_leaves(seen), trees.named_leaves(expected)):
        if not isinstance(one, torch.Tensor) or (but_floats and one.is_floating_point()):
            continue
        if not torch.equal(bytes_of(one), bytes_of(other)):
            return f"leaf {name!r} differs from an eager run"
    return None
