"""Put a runner together: find its preps, derive its keys, and hold every declaration against the others."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from typing import Any

import torch

from graphglue.audit.certificate import Audited, why_uncertified
from graphglue.cache import GlueGraphCache
from graphglue.capture import CaptureHooks
from graphglue.compiling import compiled
from graphglue.config import RunnerConfig
from graphglue.core.buckets import Ladder
from graphglue.core.contract import GENERIC, check_contracts
from graphglue.core.keys import KeySpace
from graphglue.core.slots import Slot
from graphglue.core.tables import check_indices
from graphglue.device.arena import Arena
from graphglue.device.base import Device, Reads
from graphglue.errors import ConfigError, ContractError
from graphglue.graphs.base import Recorder
from graphglue.preps import register_shipped
from graphglue.registry import Registration, Registry
from graphglue.units import Unit

logger = logging.getLogger("graphglue")

_ADVICE = "To certify it, run graphglue audit MODULE:FACTORY --json FILE, and name the file as certificate_path"


def check_kinds(slots: Any, tables: Any, forward: Any, registry: Any, hooks: Any, config: Any) -> None:
    """Check what kind of thing each argument of a runner is.

    Raises:
        ConfigError: something else than is expected there.
    """
    kinds = (("config", config, RunnerConfig), ("hooks", hooks, CaptureHooks), ("registry", registry, Registry))
    for what, given, kind in kinds:
        if given is not None and not isinstance(given, kind):
            raise ConfigError(f"{what} is a {type(given).__name__}; expected a {kind.__name__}")
    if not isinstance(slots, Iterable) or not isinstance(tables or {}, Mapping):
        raise ConfigError("slots are an iterable of Slot, and tables a mapping of names to tensors")
    if forward is not None and not callable(forward):
        raise ConfigError(f"forward is a {type(forward).__name__}; expected a callable of (view, metadata)")


def resolve_preps(given: Any, registry: Registry | None) -> list[Registration]:
    """Find what was registered for a name, a callable or a list of them; without a registry, among the shipped.

    Raises:
        ConfigError: nothing given, given twice, or neither a name nor callable.
        ContractError: an unknown name.
    """
    if registry is None:
        register_shipped(registry := Registry())
    found: dict[str, Registration] = {}
    preps = given if isinstance(given, (list, tuple)) else [given]
    for prep in preps:
        if not isinstance(prep, str) and not callable(prep):
            raise ConfigError(f"prep {prep!r}: expected a registered name or a callable of a view")
        registration = registry.get(prep) if isinstance(prep, str) else registry.find(prep)
        if registration.name == "forward":
            raise ConfigError("a prep named 'forward' would hide the forward in stats(); rename it")
        if registration.contract is None and registration.prep not in [known.prep for known in found.values()]:
            registration = replace(registration, name=_free_name(registration.name, found))
        if registration.name in found:
            raise ConfigError(f"prep {registration.name!r} is given twice; outputs are named by prep")
        found[registration.name] = registration
    if not found:
        raise ConfigError("prep []: expected at least one name or callable")
    return list(found.values())


def _free_name(name: str, taken: Mapping[str, Any]) -> str:
    """Tell callables of one name apart, such as two lambdas."""
    number, free = 1, name
    while free in taken:
        number += 1
        free = f"{name}_{number}"
    return free


def key_space(
    ladder: Ladder, width: int, variants: Iterable[Any], registrations: Iterable[Registration], config: RunnerConfig
) -> KeySpace:
    """Derive the legal keys: the modes any prep declares, and ragged shapes where all of them do."""
    contracts = [registration.contract or GENERIC for registration in registrations]
    modes = config.modes or frozenset().union(*(contract.modes for contract in contracts))
    ragged = all(contract.ragged for contract in contracts)
    return KeySpace(ladder, width, modes, variants, ragged, config.max_requests)


def check_declarations(
    registrations: Iterable[Registration],
    slots: Mapping[str, Slot],
    tables: Mapping[str, torch.Tensor],
    config: RunnerConfig,
    max_rows: Mapping[str, int],
) -> None:
    """Hold contracts, slots, tables and config against each other; ``max_rows`` are those of the largest bucket.

    Raises:
        ContractError: a contract that does not fit.
        ConfigError: a config that names an unknown prep.
    """
    contracts = {r.name: r.contract for r in registrations if r.contract is not None}
    check_contracts(contracts, slots, tables)
    check_indices(slots.values(), tables, max_rows)
    names = [registration.name for registration in registrations]
    if unknown := set(config.glue) - set(names):
        raise ConfigError(f"RunnerConfig.glue names preps {sorted(unknown)}; this runner has {names}")


def check_staging(config: RunnerConfig, registrations: Iterable[Registration], ranks: Any, recorder: Any) -> None:
    """Check that steps of a runner can be staged ahead, where its config asks for that.

    Raises:
        ConfigError: ranks, a recorder from outside, or a prep with effects.
    """
    if not config.staging:
        return
    if ranks is not None:
        raise ConfigError(
            "RunnerConfig(staging=True) with ranks: a step is staged before the ranks agree on it; leave one out"
        )
    if recorder is not None:
        raise ConfigError(
            "RunnerConfig(staging=True) with recorder=...: staged preps are recorded into a memory pool of their own, "
            "by a recorder that the runner makes; leave recorder out"
        )
    if changing := [r.name for r in registrations if r.contract is not None and r.contract.effects]:
        raise ConfigError(
            f"RunnerConfig(staging=True): preps {changing} declare effects, and a staged step that is not taken runs "
            "once more; leave staging off, or move what changes tables into a runner of its own"
        )


def recorders(device: Device, hooks: CaptureHooks, given: Recorder | None, staging: bool) -> tuple[Recorder, Recorder]:
    """Give the recorders of preps and forward: one for both, or two pools where preps may run beside a forward."""
    if staging:
        return device.recorders(hooks.stream, hooks.pool)
    recorder = given or device.recorder(hooks.stream, hooks.pool)
    return recorder, recorder


def check_adoption(units: Iterable[Unit], has_forward: bool) -> None:
    """Check that a runner can take in a forward that the engine captured.

    Raises:
        ContractError: a prep is skipped in IDLE steps.
        ConfigError: the runner has a forward of its own.
    """
    if skipping := [unit.name for unit in units if unit.declared.idle == "skip"]:
        raise ContractError(
            f"adopt_forward: preps {skipping} declare idle='skip', but a full graph would read the last step's "
            "metadata; use idle='eager' or 'glue'"
        )
    if has_forward:
        raise ConfigError("adopt_forward: this runner captures its own forward; build it with forward=None")


def build_unit(
    registration: Registration,
    recorder: Recorder,
    config: RunnerConfig,
    arena: Arena,
    tables: Mapping[str, torch.Tensor],
) -> Unit:
    """Give a prep its cache, and what the config and its certificate say of it. Reads the certificate's file."""
    switch = config.glue.get(registration.name)
    recorded, _ = compiled(registration.prep, registration.contract)
    return Unit(
        registration=registration,
        cache=GlueGraphCache(
            registration.prep,
            recorder=recorder,
            contract=registration.contract,
            name=registration.name,
            recorded=recorded,
        ),
        glue=switch or "on",
        generic_glue=config.generic_glue or (registration.contract is None and switch in ("on", "unpadded")),
        certified=_certified(registration, config, arena, tables),
    )


def _certified(
    registration: Registration, config: RunnerConfig, arena: Arena, tables: Mapping[str, torch.Tensor]
) -> bool | None:
    """Tell whether a prep is certified; None for one that need not be. Logs why one is not."""
    if config.certificate == "off":
        return None
    now = Audited.of(registration, arena.slots, tables, arena.space)
    why = why_uncertified(config.certificate_path, registration.name, now, arena.device)
    if why is None:
        return True
    required = config.certificate == "require"
    what = "its steps run eagerly" if required else "it is glued all the same"
    logger.warning("prep %r is not certified: %s; %s. %s", registration.name, why, what, _ADVICE)
    return False if required else None


def reached_generators(device: Device, *code: Callable[..., Any] | None) -> list[torch.Generator]:
    """List the random generators that code on a GPU reaches by name.

    Nothing watches the operations of a forward there, which may be compiled inside. On the CPU they tell themselves.
    """
    if device.torch_device.type == "cpu":
        return []
    from graphglue.audit.holdings import generators

    found = [one for each in code if each is not None for one in generators(each)]
    return [one for one in found if one.device.type == device.torch_device.type]


def read_events(device: Device, units: Iterable[Unit]) -> Reads:
    """Make the events behind the last read of sources and tables."""
    until_forward = any(unit.declared.reads_end == "forward" for unit in units)
    return Reads(device.read_event(), device.read_event(), until_forward)
