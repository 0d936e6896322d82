"""A backend under test: runners of its own making, and twins of its preps alone over the same tables."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
from hypothesis import strategies as st

from graphglue.audit import Certificate, audit
from graphglue.core import trees
from graphglue.core.batch import Batch
from graphglue.core.differences import first_difference, spell_step
from graphglue.core.slots import Axis
from graphglue.core.tables import TableSource
from graphglue.registry import Registry
from graphglue.runner import Runner
from graphglue.step import Step
from graphglue.testing.strategies import runner_batches

MakeBackend = Callable[[], Runner | Mapping[str, Any]]
Batches = Callable[[Runner], st.SearchStrategy[Batch]]


@dataclass
class Backend:
    """What a conformance suite tests.

    Attributes:
        make: builds a runner, or the arguments of one.
        perturb: changes host state that must not matter to the preps; for the audit.
        batches: gives a strategy of batches for a runner; by default ``runner_batches``.
        max_examples: batches of each property; by default those of the hypothesis profile.
    """

    make: MakeBackend
    perturb: Callable[[], Any] | None = None
    batches: Batches = runner_batches
    max_examples: int | None = None
    _certificate: Certificate | None = None

    @contextmanager
    def opened(self) -> Iterator[Runner]:
        """Build a runner with nothing captured, and close it at the end."""
        made = self.make()
        with made if isinstance(made, Runner) else Runner(**made) as runner:
            runner.reset()
            yield runner

    @contextmanager
    def captured(self) -> Iterator[Runner]:
        """Build a runner with every key captured, and close it at the end."""
        with self.opened() as runner:
            runner.capture(progress=False)
            yield runner

    def certificate(self) -> Certificate:
        """Audit the preps, once."""
        if self._certificate is None:
            with self.opened() as runner:
                self._certificate = audit(runner, perturb=self.perturb)
        return self._certificate


@contextmanager
def twin_of(runner: Runner, tables: Mapping[str, TableSource] | None = None, **config: Any) -> Iterator[Runner]:
    """Build a runner of the same preps without a forward, over slots of its own and the same tables.

    Args:
        runner: only read.
        tables: other tables.
        config: fields of its configuration that differ.
    """
    registry, preps = Registry(), list[Any]()
    for registration in runner.registrations:
        if registration.contract is None:
            preps.append(registration.prep)
            continue
        registry.register(registration.contract, registration.plan, registration.publish)(registration.prep)
        preps.append(registration.name)
    twin = Runner(
        slots=[replace(slot, storage=None) for slot in runner.arena.slots.values()],
        ladder=runner.space.ladder,
        prep=preps,
        tables=runner.tables if tables is None else tables,
        registry=registry,
        device=runner.arena.device.torch_device,
        tokens_per_request=runner.space.width,
        variants=runner.space.variants,
        config=runner.config.model_copy(update={"certificate": "off", **config}),
    )
    with twin:
        yield twin


@contextmanager
def effects_undone(runner: Runner) -> Iterator[None]:
    """Put back what preps change in their tables, so that two runs of one step start alike."""
    tables = runner.tables
    before = {name: tables[name].clone() for name in _effects(runner)}
    try:
        yield
    finally:
        for name, contents in before.items():
            tables[name].copy_(contents)


def results_of(runner: Runner, step: Step) -> dict[str, Any]:
    """Copy a step's metadata by prep, and the tables that preps change."""
    metadata, tables = trees.map_tensors(torch.clone, step.metadata), runner.tables
    return {
        "metadata": metadata if runner._several else {runner.registrations[0].name: metadata},
        "tables": {name: tables[name].clone() for name in _effects(runner)},
    }


def check_same(runner: Runner, seen: Mapping[str, Any], expected: Mapping[str, Any], step: Step, rows: str) -> None:
    """Compare results bit for bit.

    Args:
        runner: whose contracts say which axis a leaf has.
        seen: what ``results_of`` gave.
        expected: the same of the run that is right.
        step: named in the message.
        rows: "all", or "real" for the rows of real requests and tokens alone.

    Raises:
        AssertionError: names the prep, the leaf and the first element that differ.
    """
    what = f"{spell_step(step.decision.key, step.raw)}, {step.decision.prep.value} ({step.decision.reason.value})"
    for registration in runner.registrations:
        axes: Mapping[str, Axis] = registration.contract.outputs if registration.contract else {}
        name = registration.name
        found = first_difference(expected["metadata"][name], seen["metadata"][name], axes, step.raw, rows)
        if found is not None and not (rows == "real" and found.is_rounding):
            raise AssertionError(f"prep {name!r}, {what}: {found}")
    found = first_difference(expected["tables"], seen["tables"]) if rows == "all" else None
    if found is not None:
        raise AssertionError(f"{what}: the tables that preps change differ: {found}")


def _effects(runner: Runner) -> list[str]:
    declared = [registration.contract for registration in runner.registrations if registration.contract]
    return sorted({name for contract in declared for name in contract.effects})
