"""The upkeep of a runner's keys: captured, repaired and dropped between steps, never inside one."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from graphglue.assembly import reached_generators
from graphglue.cache import GlueGraphCache
from graphglue.capture import Capture
from graphglue.core.keys import Key
from graphglue.device.arena import Arena
from graphglue.errors import CaptureError
from graphglue.footprint import key_stats
from graphglue.graphs.base import Recording
from graphglue.staging import Staging
from graphglue.stepping import Stepper
from graphglue.units import Unit


class Upkeep:
    """Keep a runner's keys.

    Args:
        arena: the slots, whose device is waited for before memory goes.
        units: the preps.
        capture: warms up and records.
        stepper: forgets its decisions when the state of a key changes.
        staging: forgets what it staged; None for a runner that does not stage.
        output_axes: row axes of the forward's outputs.
    """

    def __init__(
        self,
        arena: Arena,
        units: Sequence[Unit],
        capture: Capture,
        stepper: Stepper,
        staging: Staging | None,
        output_axes: Mapping[str, str] | str | None,
    ) -> None:
        self._arena, self._units, self._capture, self._stepper = arena, units, capture, stepper
        self._staging, self._output_axes = staging, output_axes
        preps = [unit.registration.prep for unit in units]
        for generator in reached_generators(arena.device, stepper.forwards.python, *preps):
            capture.draws.see(generator)

    def record(self, keys: Iterable[Key], progress: bool | None, repair: bool = False) -> list[Key]:
        """Capture keys. A broken declaration fails all of a first capture, and only its key in a repair.

        Sync: the device.
        """
        try:
            self._begin()
            self._arena.device.enter_step()
            self._stepper.forget()
            recorded = self._capture.run(tuple(keys), progress, contain=repair)
            for key in recorded:
                self._capture.check_forward(key, self._output_axes, contain=repair)
        except BaseException:  # a broken declaration or an interrupt: no key is left half captured
            self.drop(keys if repair else None)
            raise
        return recorded

    def drop(self, keys: Iterable[Key] | None = None) -> None:
        """Drop keys with their memory, all by default. Sync: the device."""
        self._begin()
        self._arena.device.synchronize()  # a graph that still runs must not lose its memory
        self._stepper.settle(wait=True)
        self._stepper.forget(anew=keys is None)
        for key in list(self._capture.launches) if keys is None else keys:
            self._capture.drop_launches([key])
        for cache in self._caches():
            if keys is None:
                cache.reset()
            else:
                for key in keys:
                    cache.drop(key)

    def settle(self) -> None:
        """Wait for all steps, and forget what is staged and decided; keys stay. Sync: the device."""
        self._begin()
        self._arena.device.synchronize()
        self._stepper.settle(wait=True)
        self._stepper.forget()

    def adopt(self, key: Key, recording: Recording, random: bool) -> None:
        """Take in a forward that the engine captured for a key, and compose it. Sync: none.

        Raises:
            CaptureError: the key has one already.
        """
        if (adopted := self._stepper.forwards.cache) is None:
            adopted = GlueGraphCache(_engine_forward, name="forward")
            self._stepper.forwards.cache = self._capture.adopted = adopted
        adopted.adopt(key, recording)
        self._begin()
        self._capture.adopt(key, random)
        self._stepper.forget()

    def first_cause(self, keys: Iterable[Key]) -> str:
        """Say why the first of the keys that failed did."""
        causes = [cause for key in keys for cache in self._caches() if (cause := cache.cause(key))]
        return f"the first cause: {causes[0]}" if causes else "there is no forward, and no prep may be glued"

    def stats(self, keys: Iterable[Key]) -> list[dict[str, Any]]:
        """Give the state of every key, JSON-ready."""
        replays, footprints = self._stepper.ledger.replays(), self._capture.footprints
        return [key_stats(key, self._caches(), footprints, replays.get(key, 0)) for key in keys]

    def num_quarantines(self) -> dict[str, int]:
        """Count how often a key of each prep or forward was quarantined, since construction."""
        return {str(cache.name): cache.num_quarantines for cache in self._caches()}

    def _begin(self) -> None:
        if self._staging is not None:
            self._staging.drop()

    def _caches(self) -> list[GlueGraphCache]:
        forward = self._stepper.forward
        return ([forward] if forward else []) + [unit.cache for unit in self._units]


def _engine_forward(*_: object) -> None:
    raise CaptureError("the engine captured this forward; graphglue can not run it eagerly")
