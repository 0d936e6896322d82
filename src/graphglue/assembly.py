"""Put a runner together: find its preps, derive its keys, and hold every declaration against the others."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Any

import torch

from graphglue.cache import GlueGraphCache
from graphglue.capture import Unit
from graphglue.compiling import compiled
from graphglue.config import RunnerConfig
from graphglue.core.buckets import Ladder
from graphglue.core.contract import GENERIC, check_contracts
from graphglue.core.keys import KeySpace
from graphglue.core.slots import Slot
from graphglue.core.tables import check_indices
from graphglue.errors import ConfigError, ContractError
from graphglue.graphs.base import Recorder
from graphglue.preps import register_shipped
from graphglue.registry import Registration, Registry


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
    has_forward: bool,
) -> None:
    """Hold contracts, slots, tables and config against each other.

    Raises:
        ContractError: a contract that does not fit.
        ConfigError: a config that names an unknown prep.
    """
    contracts = {r.name: r.contract for r in registrations if r.contract is not None}
    check_contracts(contracts, slots, tables)
    check_indices(slots.values(), tables)
    names = [registration.name for registration in registrations]
    if unknown := set(config.glue) - set(names):
        raise ConfigError(f"RunnerConfig.glue names preps {sorted(unknown)}; this runner has {names}")
    for name, contract in contracts.items():
        if contract.idle == "skip" and has_forward:
            raise ContractError(
                f"prep {name!r} declares idle='skip', but the forward is one full graph, which would read the "
                "last step's metadata; use idle='eager' or 'glue'"
            )


def build_unit(registration: Registration, recorder: Recorder, config: RunnerConfig) -> Unit:
    """Give a prep its cache and what the config says of it."""
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
        certified=False if config.certificate == "require" else None,
    )
