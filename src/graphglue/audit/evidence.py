"""Evidence: what a check saw, each thing once, and the verdict that follows."""

from __future__ import annotations

import functools
from collections.abc import Callable
from types import FunctionType, MethodType
from typing import Any

import torch

from graphglue.audit.certificate import Finding, Verdict
from graphglue.graphs import guard

_MAX_FINDINGS = 8  # of one kind: the first ones are what a person acts on


class Evidence:
    """Collect findings of one check of one prep.

    Args:
        prep: the callable, whose line is given where a finding has no better one.
    """

    def __init__(self, prep: Callable[..., Any]) -> None:
        self._where = place_of(prep)
        self._failed: dict[str, Finding] = {}
        self._unseen: dict[str, Finding] = {}

    @property
    def is_full(self) -> bool:
        """Whether there is enough to act on, so that the rest need not be looked at."""
        return len(self._failed) >= _MAX_FINDINGS

    @property
    def failed(self) -> tuple[Finding, ...]:
        """The faults so far."""
        return tuple(self._failed.values())

    def fail(self, about: str, text: str, **fields: Any) -> None:
        """Note a fault. Of each thing it may be about the first finding is kept."""
        self._failed.setdefault(about, Finding(text=text, **{"where": self._where, **fields}))

    def unseen(self, about: str, text: str, **fields: Any) -> None:
        """Note what could not be looked at."""
        self._unseen.setdefault(about, Finding(text=text, **{"where": self._where, **fields}))

    def result(self, passed: str) -> tuple[Verdict, list[Finding]]:
        """Give the verdict: fail if anything failed, unknown if anything was not looked at, else pass.

        Args:
            passed: what was looked at, said where nothing failed.
        """
        failed, unseen = list(self._failed.values()), list(self._unseen.values())
        if failed:
            return Verdict.FAIL, failed[:_MAX_FINDINGS] + unseen[:_MAX_FINDINGS]
        found = [*unseen[:_MAX_FINDINGS], Finding(text=passed)]
        return (Verdict.UNKNOWN if unseen else Verdict.PASS), found


def code_of(prep: Callable[..., Any]) -> FunctionType | type:
    """Give the function behind a callable, or the class of a callable object, without asking the object."""
    inner: Any = prep
    while isinstance(inner, (functools.partial, MethodType)):
        inner = inner.func if isinstance(inner, functools.partial) else inner.__func__
    return inner if isinstance(inner, (FunctionType, type)) else type(inner)


def place_of(prep: Callable[..., Any]) -> str | None:
    """Name file and line of a callable's code; None for one that has none in Python."""
    code = getattr(vars(code_of(prep)).get("__call__", code_of(prep)), "__code__", None)
    return None if code is None else f"{code.co_filename}:{code.co_firstlineno}"


def spell_error(error: BaseException) -> str:
    """Name an error, and the user's line that it passed through."""
    text, place = " ".join(str(error).split())[:240], guard.blame(error)
    return f"{type(error).__name__}: {text}" + (f" (at {place})" if ":" in place else "")


def spell_tensor(tensor: torch.Tensor) -> str:
    """Give dtype and shape."""
    return f"{str(tensor.dtype).removeprefix('torch.')}{list(tensor.shape)}"
