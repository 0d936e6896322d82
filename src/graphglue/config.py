"""RunnerConfig: everything about a runner that is a plain value."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from graphglue.core.batch import Mode
from graphglue.errors import ConfigError

ENVIRONMENT_PREFIX = "GRAPHGLUE_"
_FROM_ENVIRONMENT = (
    "enabled",
    "padding",
    "waste_limit",
    "generic_glue",
    "certificate",
    "certificate_path",
    "clone_outputs",
    "events",
    "flight_recorder",
    "nvtx",
    "record_sources",
    "staging",
    "warmups",
)


class Shadow(BaseModel):
    """Configure the shadow check: sampled glued steps are held against an eager twin, bit for bit. Frozen.

    Attributes:
        first: sample the first glued steps of each key.
        every: sample every so many glued steps of the runner; 0 for none but the first ones.
        on_mismatch: "quarantine" runs the prep eagerly at that key until ``maintain()``; "raise" does so as well, and
            raises ``DivergenceError`` from the next step before it writes anything; "count" only counts.

    Raises:
        ConfigError: an unknown key or a value of the wrong kind.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    first: int = Field(default=8, ge=0)
    every: int = Field(default=1000, ge=0)
    on_mismatch: Literal["quarantine", "raise", "count"] = "quarantine"

    def samples(self, of_key: int, of_runner: int) -> bool:
        """Tell whether a glued step is sampled. Pure, so that ranks that agree on the numbers agree on the steps.

        Args:
            of_key: its number among the glued steps of its key, from 1.
            of_runner: its number among those of the runner, from 1.
        """
        return of_key <= self.first or (self.every > 0 and of_runner % self.every == 0)

    @model_validator(mode="wrap")
    @classmethod
    def _say_config_error(cls, values: Any, handler: Any) -> Any:
        return _validated(cls, values, handler)


class RunnerConfig(BaseModel):
    """Configure a runner. Frozen; unknown keys are refused.

    A field of a plain kind that is not given is read from the environment, for example
    ``GRAPHGLUE_ENABLED=0`` or ``GRAPHGLUE_WASTE_LIMIT=2``.

    Attributes:
        enabled: off sends every prep and forward to the eager route.
        padding: off runs a batch that is no bucket exactly at its own extents, eagerly.
        waste_limit: largest bucket tokens / real tokens; by default 2 in EXTEND, none elsewhere.
        generic_glue: glue preps without a contract, on unpadded DECODE replays with no feature active.
        glue: per prep: "on", "unpadded" (never on padded replays) or "off".
        certificate: "require" glues no prep without a valid certificate; "warn" glues it, and logs why it has none.
        certificate_path: the file that ``graphglue audit MODULE:FACTORY --json FILE`` wrote.
        clone_outputs: return copies that later replays do not rewrite.
        events: record ``Step.sources_read()`` and ``Step.tables_read()``; about 4 us of device time a step.
        flight_recorder: keep the decisions, plans and counts of this many last steps, for ``Runner.flight_record`` and
            for the notes of an error that ends a step; 0 keeps none.
        record_sources: also keep what those steps were handed, and digests of what they gave, so that
            ``graphglue rerun`` can repeat one on the CPU. For hunting a fault: it waits for the device at every step.
        nvtx: mark fill, prep, replay, forward and agree as NVTX ranges, for a profiler.
        staging: let ``Runner.stage`` run the front of the next step beside other work. Preps are then recorded into a
            memory pool of their own, and each replay records one event behind its forward.
        max_requests: request rows where the ladder counts tokens (EXTEND).
        modes: the modes to capture; by default all that the contracts declare.
        warmups: real runs of each key before it is recorded; a forward's run on live memory (``Runner.capture``).
        shadow: hold sampled glued steps against an eager twin while serving; None holds none.
        check_breaks: compare the padded rows of what eager breaks are given before and after each, and raise if one
            wrote past the real rows. For tests: it waits for the device.

    Raises:
        ConfigError: an unknown key or a value of the wrong kind.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    enabled: bool = True
    padding: bool = True
    waste_limit: float | None = Field(default=None, ge=1.0)
    generic_glue: bool = False
    glue: dict[str, Literal["on", "unpadded", "off"]] = {}
    certificate: Literal["off", "warn", "require"] = "off"
    certificate_path: Path | None = None
    clone_outputs: bool = False
    events: bool = False
    flight_recorder: int = Field(default=0, ge=0)
    record_sources: bool = False
    nvtx: bool = False
    staging: bool = False
    max_requests: int | None = Field(default=None, ge=1)
    modes: frozenset[Mode] | None = None
    warmups: int = Field(default=2, ge=1)
    shadow: Shadow | None = None
    check_breaks: bool = False

    @model_validator(mode="after")
    def _check_recorder(self) -> RunnerConfig:
        if self.record_sources and not self.flight_recorder:
            raise ValueError("record_sources needs a flight recorder; pass flight_recorder=256 too, the steps to keep")
        return self

    @model_validator(mode="wrap")
    @classmethod
    def _say_config_error(cls, values: Any, handler: Any) -> Any:
        if isinstance(values, dict):
            values = {**_environment(), **values}
        return _validated(cls, values, handler)

    def model_copy(self, *, update: Mapping[str, Any] | None = None, deep: bool = False) -> RunnerConfig:
        """Copy with changes, which are checked like any configuration."""
        return RunnerConfig(**{**self.model_dump(), **(update or {})})

    def waste_limit_in(self, mode: Mode) -> float:
        """Give the waste limit of a mode; 0 for none.

        Source: the leading engine's guard, bucket > 2 x tokens, for prefill only.
        """
        if self.waste_limit is not None:
            return self.waste_limit
        return 2.0 if mode is Mode.EXTEND else 0.0


def _validated(kind: type[BaseModel], values: Any, handler: Callable[[Any], Any]) -> Any:
    try:
        return handler(values)
    except ValidationError as error:
        faults = "; ".join(f"{'.'.join(map(str, e['loc']))}: {e['msg']}" for e in error.errors())
        raise ConfigError(f"{kind.__name__} is not usable: {faults}; known are {sorted(kind.model_fields)}") from error


def _environment() -> dict[str, str]:
    names = {field: ENVIRONMENT_PREFIX + field.upper() for field in _FROM_ENVIRONMENT}
    return {field: os.environ[name] for field, name in names.items() if name in os.environ}
