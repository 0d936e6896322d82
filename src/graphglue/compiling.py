"""Put a prep through torch.compile before it is recorded: fewer nodes in its graph, the same integers."""

from __future__ import annotations

import logging
from collections.abc import Callable, Hashable
from typing import Any

import torch

from graphglue.core import trees
from graphglue.core.contract import PrepContract

logger = logging.getLogger("graphglue")

Prep = Callable[..., Any]
_MAX_CHARACTERS = 240


def compiled(prep: Prep, contract: PrepContract | None, backend: str = "inductor") -> tuple[Prep, str | None]:
    """Give what to warm up and record instead of a prep whose contract asks for compilation.

    Args:
        prep: the prep.
        contract: what it declares; without ``compile`` the prep itself is given back.
        backend: torch.compile's backend.

    Returns:
        The callable, and why it is the plain prep although compilation was asked for. Whether a
        prep compiles shows when it first runs: ``CompiledPrep.fallback`` says so from then on.
    """
    if contract is None or not contract.compile:
        return prep, None
    if not torch._dynamo.is_dynamo_supported():
        reason = "torch.compile is not supported on this platform and Python version"
        logger.warning("prep %r runs as it is: %s", contract.name, reason)
        return prep, reason
    return CompiledPrep(prep, contract, backend), None


class CompiledPrep:
    """Call a prep through torch.compile; call it as it is from the first failure on.

    The first run of each key compiles. It is held against the plain prep: structure, shapes and
    dtypes must be equal, and integers bit for bit (floats may round differently once fused). A prep
    with ``effects`` is not repeated, so only one that has none is compared.

    Where a dispatch mode is active torch does not compile, and the plain prep is called: the CPU
    tape records it as it is, and a CUDA capture must be asked for with ``strict=False``.

    Attributes:
        fallback: why the plain prep is called; None while compilation holds.
    """

    def __init__(self, prep: Prep, contract: PrepContract, backend: str = "inductor") -> None:
        self.fallback: str | None = None
        self.__name__ = contract.name or getattr(prep, "__name__", "prep")
        self._prep, self._contract, self._backend = prep, contract, backend
        self._runs: dict[Hashable, Prep] = {}

    def __call__(self, *args: Any) -> Any:
        """Run the prep. Sync: the device, when a key runs for the first time. Capturable: after that."""
        if self.fallback is not None or torch._C._len_torch_dispatch_stack():
            return self._prep(*args)
        key = _geometry(args)
        run = self._runs.get(key)
        return self._first(key, args) if run is None else run(*args)

    def _first(self, key: Hashable, args: tuple[Any, ...]) -> Any:
        plain = None if self._contract.effects else trees.map_tensors(torch.clone, self._prep(*args))
        run = torch.compile(_own_code(self._prep), backend=self._backend, fullgraph=True, dynamic=False)
        try:
            result = run(*args)
        except Exception as error:  # a compiler may fail in any way; a fault of the prep itself shows below
            self._fall_back(f"it does not compile: {_brief(error)}")
            return self._prep(*args)
        if plain is not None and (changed := _difference(plain, result)):
            self._fall_back(f"compiled, it returns something else: {changed}")
            return self._prep(*args)
        self._runs[key] = run
        return result

    def _fall_back(self, reason: str) -> None:
        self.fallback = reason
        self._runs.clear()
        logger.warning("prep %r runs as it is, not compiled: %s", self.__name__, reason)


def _geometry(args: tuple[Any, ...]) -> Hashable:
    """Tell keys apart as runners do: by a view's bucket, mode and variant."""
    view = args[0] if args else None
    return getattr(view, "bucket", None), getattr(view, "mode", None), getattr(view, "variant", None)


def _own_code(prep: Prep) -> Prep:
    """Give a caller of the prep with a code object of its own.

    Torch counts recompilations by code object and gives up after 8, while a ladder has dozens of sizes.
    """

    def call(*args: Any) -> Any:
        return prep(*args)

    call.__code__ = call.__code__.replace()
    return call


def _difference(plain: Any, result: Any) -> str | None:
    """Say how two results differ in more than the rounding of floats."""
    if changed := trees.difference(plain, result):
        return changed
    for (name, one), (_, other) in zip(trees.named_leaves(plain), trees.named_leaves(result)):
        if not isinstance(one, torch.Tensor) or one.is_floating_point() or one.is_complex():
            continue
        if not torch.equal(one, other):
            return f"{name or 'the result'} has other integers"
    return None


def _brief(error: Exception) -> str:
    """Give the first lines of a compiler's error, which runs over pages, as one."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return f"{type(error).__name__}: {' '.join(lines[:2])[:_MAX_CHARACTERS]}"
