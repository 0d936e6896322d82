"""Insight into a runner: its stats, and its last steps."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from graphglue.core.keys import Key
from graphglue.errors import ConfigError
from graphglue.flight.record import FlightRecord
from graphglue.flight.ring import FlightLedger
from graphglue.rank_space import Ranks
from graphglue.staging import Staging
from graphglue.stepping import Stepper
from graphglue.units import Unit
from graphglue.upkeep import Upkeep

STATS_VERSION = 1


class Insight:
    """Read a runner without changing it.

    Args:
        stepper, staging, upkeep, units: the runner's own; ``staging`` is None where it does not stage.
        ranks: the group it agrees with; None for a runner that agrees with nobody.
    """

    def __init__(
        self,
        stepper: Stepper,
        staging: Staging | None,
        upkeep: Upkeep,
        units: Sequence[Unit],
        ranks: Ranks | None = None,
    ) -> None:
        self._stepper, self._staging, self._upkeep, self._units = stepper, staging, upkeep, units
        self._rank, self._num_ranks = (0, 1) if ranks is None else (ranks.rank, ranks.size)

    def stats(self, keys: Iterable[Key]) -> dict[str, Any]:
        """Give counters and the state of keys, JSON-ready. Sync: samples of the shadow check."""
        stepper = self._stepper
        uncompiled = {unit.name: unit.cache.compile_fallback for unit in self._units if unit.cache.compile_fallback}
        return {
            "version": STATS_VERSION,
            "rank": self._rank,
            "num_ranks": self._num_ranks,
            **stepper.ledger.counters(),
            "quarantines": self._upkeep.num_quarantines(),
            "compile_fallbacks": uncompiled,
            "shadow": None if stepper.shadow is None else stepper.shadow.stats(),
            "staging": None if self._staging is None else self._staging.stats(),
            "keys": self._upkeep.stats(keys),
        }

    def flight_record(self) -> FlightRecord:
        """Give the last steps.

        Raises:
            ConfigError: the config asks for no flight recorder.
        """
        ledger = self._stepper.ledger
        if not isinstance(ledger, FlightLedger):
            raise ConfigError(
                "flight_record: this runner keeps no steps; build it with RunnerConfig(flight_recorder=256), the "
                "number of steps to keep"
            )
        return ledger.record(self._rank, self._num_ranks, str(self._stepper.device.torch_device))

    def raised(self, error: BaseException, batch: Any, forward: bool = True) -> None:
        """Tell an error that ends a step what the last steps were, where they are kept."""
        if isinstance(ledger := self._stepper.ledger, FlightLedger):
            ledger.raised(error, batch, forward)
