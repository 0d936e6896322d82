"""The registry: preps by name, with their contracts. A value passed in, never a global."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from importlib import metadata
from types import MethodType
from typing import Any, TypeVar

from graphglue.core.batch import Batch
from graphglue.core.buckets import Bucket
from graphglue.core.contract import PrepContract
from graphglue.errors import ContractError

logger = logging.getLogger("graphglue")

ENTRY_POINT_GROUP = "graphglue.preps"
Prep = Callable[..., Any]
Plan = Callable[[Batch, Bucket], Mapping[str, Any]]
Publish = Callable[[Any], None]
PrepT = TypeVar("PrepT", bound=Prep)


@dataclass(frozen=True, slots=True)
class Registration:
    """A prep, what it declares, and the callables that come with it.

    Args:
        name: the prep's name within a runner.
        prep: called with a view, returns a tree of metadata tensors.
        contract: what it declares; None for a prep that declares nothing.
        plan: ``plan(batch, bucket) -> {slot: values}``, run on the host at every replay.
        publish: ``publish(metadata)``, run on every replay, to install what the backend's Python
            objects must point at.
    """

    name: str
    prep: Prep
    contract: PrepContract | None = None
    plan: Plan | None = None
    publish: Publish | None = None


def _is_same(one: Prep, other: Prep) -> bool:
    """Tell whether two callables are one; a bound method is a new object each time it is looked up."""
    if isinstance(one, MethodType) and isinstance(other, MethodType):
        return one.__self__ is other.__self__ and one.__func__ is other.__func__
    return one is other


class Registry:
    """Hold preps by name.

    Names that nobody registered here are looked for among the installed plug-ins: an entry point
    of group ``graphglue.preps`` names a function that takes a registry and registers a prep of the
    entry point's name. Plug-ins load on demand; a broken one fails the runner that asked for it and
    nobody else.
    """

    def __init__(self) -> None:
        self._registrations: dict[str, Registration] = {}

    def register(
        self, contract: PrepContract, plan: Plan | None = None, publish: Publish | None = None
    ) -> Callable[[PrepT], PrepT]:
        """Register the decorated prep and return it unchanged.

        Args:
            contract: what the prep declares; it is found by ``contract.name``.
            plan: ``plan(batch, bucket) -> {slot: values}``, run on the host at every replay; what it gives are sources.
            publish: ``publish(metadata)``, run on every replay, to install what the backend's own objects point at.

        Raises:
            ContractError: a contract without a name, a name that is taken, or something not callable.
        """
        if not isinstance(contract, PrepContract):
            seen = type(contract).__name__
            raise ContractError(f"register({seen}): expected a PrepContract, as in @registry.register(contract)")
        for what, hook in (("plan", plan), ("publish", publish)):
            if hook is not None and not callable(hook):
                raise ContractError(f"prep {contract.name!r}: {what} is a {type(hook).__name__}; expected a callable")

        def keep(prep: PrepT) -> PrepT:
            """Check the prep, keep it, and give it back."""
            if not callable(prep):
                raise ContractError(f"prep {contract.name!r} is a {type(prep).__name__}; expected a callable of a view")
            if not contract.name:
                raise ContractError("the contract has no name; a registered prep is found by contract.name")
            if contract.name in self._registrations:
                raise ContractError(
                    f"prep {contract.name!r} is registered already, as {self._registrations[contract.name].prep!r}; "
                    "choose another contract.name, or use another Registry"
                )
            self._registrations[contract.name] = Registration(contract.name, prep, contract, plan, publish)
            return prep

        return keep

    def get(self, name: str) -> Registration:
        """Find a prep by name, among the installed plug-ins too.

        Raises:
            ContractError: nobody registered the name, or its plug-in is broken.
        """
        if name not in self._registrations:
            self._load_plug_in(name)
        return self._registrations[name]

    def find(self, prep: Prep) -> Registration:
        """Give a callable's registration; one that declares nothing if it was not registered."""
        for registration in self._registrations.values():
            if _is_same(registration.prep, prep):
                return registration
        return Registration(getattr(prep, "__name__", type(prep).__name__), prep)

    def __contains__(self, name: object) -> bool:
        return name in self._registrations

    def __iter__(self) -> Iterator[str]:
        return iter(self._registrations)

    def _load_plug_in(self, name: str) -> None:
        found = list(metadata.entry_points(group=ENTRY_POINT_GROUP, name=name))
        if not found:
            installed = sorted({point.name for point in metadata.entry_points(group=ENTRY_POINT_GROUP)})
            raise ContractError(
                f"prep {name!r} is unknown; registered are {sorted(self._registrations)}, "
                f"installed plug-ins are {installed}: register it, or correct the name. The preps that ship are in the "
                "registry that a runner has without registry=, or come with graphglue.preps.register_shipped(registry)"
            )
        point = found[0]
        before = dict(self._registrations)
        try:
            point.load()(self)
            if name not in self._registrations:
                raise ContractError(f"it registered {sorted(set(self._registrations) - set(before))}")
        except Exception as error:  # a plug-in may fail in any way; it must not take others down
            self._registrations = before
            source = point.dist.name if point.dist else "unknown distribution"
            raise ContractError(
                f"prep {name!r}: its plug-in {point.value!r} of {source!r} is broken: "
                f"{type(error).__name__}: {error}; fix or uninstall it"
            ) from error
        logger.info("loaded prep %s from plug-in %s", name, point.value)
