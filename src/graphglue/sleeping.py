"""Sleep: let go of a runner's memory between steps, for sleep mode or new weights, and take it up again.

::

    awake --release()--> asleep --resume()--> every key held against an eager run, or recorded anew --> awake
                          |  steps and captures are refused; rebind_table, reset and close are not

What an engine with a memory saver needs is that its graphs are still there: its memory comes back at the same
addresses, and a graph is right again once what it reads is. So keys are kept by default. Where something came back at
another address, or a graph may read what nobody can restore, keys are recorded anew.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import Any

from graphglue.agreeing import Agreement
from graphglue.capture import Capture
from graphglue.core.keys import Key
from graphglue.core.tables import Place, Tables, TableSource, check_indices
from graphglue.device.arena import Arena
from graphglue.errors import DivergenceError, RankDisagreementError
from graphglue.rechecking import Recheck
from graphglue.stepping import Stepper
from graphglue.units import Views
from graphglue.upkeep import Upkeep

logger = logging.getLogger("graphglue")


class Sleep:
    """Put a runner to sleep, and wake it.

    Args:
        arena: the slots.
        tables: let go of, and found again.
        views: forgotten, because they hold tables.
        capture: knows what is composed, and what ranks say together.
        stepper: forgets its lanes.
        upkeep: drops and records keys.
        recheck: holds keys against eager runs.
        agreement: makes all ranks do it together; None for a runner that agrees with nobody.
    """

    def __init__(
        self,
        arena: Arena,
        tables: Tables,
        views: Views,
        capture: Capture,
        stepper: Stepper,
        upkeep: Upkeep,
        recheck: Recheck,
        agreement: Agreement | None,
    ) -> None:
        self._arena, self._tables, self._views, self._capture = arena, tables, views, capture
        self._stepper, self._upkeep, self._recheck, self._agreement = stepper, upkeep, recheck, agreement
        self._places: dict[str, Place] = {}

    def begin(self, keep_keys: bool, again: bool) -> None:
        """Wait for all steps, and let go of what keys are not kept for; ``again`` while asleep. Sync: the device."""
        self._ready("release", lambda: keep_keys)
        if not again:
            self._places = self._tables.places
        if keep_keys:
            self._upkeep.settle()
            return
        self._upkeep.drop()
        self._views.clear()
        self._tables.let_go()
        self._arena.device.trim()

    def end(self, wanted: Sequence[Key], contents_lost: bool, recapture: bool) -> None:
        """Take tables and slots up again, and make every key right. Sync: the device.

        Raises:
            StaleTableError: a table is gone; nothing was changed.
            RankDisagreementError: another rank could not record its keys.
        """
        found: dict[str, TableSource] = {}

        def look() -> Any:
            found.update(self._tables.current())
            resolved = {name: self._tables.resolve(name, source) for name, source in found.items()}
            check_indices(self._arena.slots.values(), resolved, self._arena.max_rows)
            return contents_lost, recapture, [tuple(key.bucket) for key in wanted]

        self._ready("resume", look)
        moved = self._take_in(found)
        if contents_lost and self._stepper.shadow is not None:
            self._stepper.shadow.restore()
        with self._capture.draws.kept():
            anew = self._make_right_together(wanted, recapture or bool(moved))
        self._pad_slots()
        self._arena.device.synchronize()
        logger.info("resumed: %d of %d keys recorded anew; tables that moved: %s", len(anew), len(wanted), moved)

    def _make_right_together(self, wanted: Sequence[Key], recapture: bool) -> Sequence[Key]:
        """Make keys right on all ranks, or have none wake: one that slept on would keep the others waiting."""
        anew: Sequence[Key] = ()
        refusal = None
        try:
            anew = self._make_right(wanted, recapture)
        except Exception as error:  # a session of the engine's that failed when it ended
            refusal = error
        together = self._capture.together(refusal is None)
        if refusal is not None:
            raise refusal
        if not together:
            raise RankDisagreementError(
                "resume: another rank could not record its keys anew, so all of them sleep on; its own error says why"
            )
        return anew

    def _make_right(self, wanted: Sequence[Key], recapture: bool) -> Sequence[Key]:
        """Record keys anew, those of all ranks or those that differ from eager runs; give them."""
        if self._capture.together(not recapture):
            anew: Sequence[Key] = [key for key in wanted if not self._recheck.holds(key)]
            self._upkeep.drop(anew)
        else:
            anew = wanted
            self._upkeep.drop()
        if anew:
            for key in self._upkeep.record(anew, progress=False, repair=True):
                self._check_new(key)
        return anew

    def _check_new(self, key: Key) -> None:
        """Quarantine preps that differ from eager runs though they were recorded just now."""
        if self._capture.drawing_part(key) == "prep":
            return
        while (found := self._recheck.difference(key)) is not None:
            unit, how = found
            error = DivergenceError(
                f"prep {unit.name!r} at {tuple(key)} was recorded anew by resume(), and its replay is no eager run: "
                f"{how}; it runs eagerly until maintain()"
            )
            unit.cache.quarantine(key, error)
            self._capture.drop_launches([key])

    def _take_in(self, found: dict[str, TableSource]) -> list[str]:
        """Bind the tables as they are now; name those that lie elsewhere than they did."""
        for name, source in found.items():
            self._tables.bind(name, source)
        self._views.clear()
        places = self._tables.places
        return [name for name in found if places[name] != self._places.get(name)]

    def _pad_slots(self) -> None:
        self._arena.device.enter_step()
        self._arena.fill_idle(self._arena.space.bucket(self._arena.space.ladder.largest))

    def _ready(self, name: str, check: Callable[[], Any]) -> Any:
        return check() if self._agreement is None else self._agreement.ready(name, check)
