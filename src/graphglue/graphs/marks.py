"""Marks: ``eager_break`` names a function that runs eagerly between two segments of a recording."""

from __future__ import annotations

import functools
import inspect
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar, overload

from graphglue.errors import ContractError

Function = TypeVar("Function", bound=Callable[..., Any])


@dataclass(frozen=True)
class Mark:
    """What ``eager_break`` was told about a function."""

    run: Callable[..., Any]
    stub: Callable[..., Any] | None
    row_aligned: tuple[str, ...]
    writes: tuple[str, ...]
    pad: float
    name: str
    signature: inspect.Signature

    def __post_init__(self) -> None:
        """Refuse names that the function does not have."""
        known = [name for name, parameter in self.signature.parameters.items() if _is_named(parameter)]
        if unknown := [name for name in (*self.row_aligned, *self.writes) if name not in known]:
            hint = "" if known else "; mark a function that names them, such as a module's forward"
            raise ContractError(f"break {self.name!r} has no arguments {unknown}; its arguments are {known}{hint}")
        if not isinstance(self.pad, (int, float)):
            raise ContractError(f"break {self.name!r} has pad={self.pad!r}; expected a number")
        if beside := [name for name in self.writes if name not in self.row_aligned]:
            raise ContractError(
                f"break {self.name!r} writes {beside}, which are not row_aligned; only the padded tails of "
                "row-aligned arguments are reset"
            )

    def bind(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> inspect.BoundArguments:
        """Give a call's arguments by name; what was left out stands at its default, as in the call itself."""
        bound = self.signature.bind(*args, **kwargs)
        bound.apply_defaults()
        return bound


def _names(names: Sequence[str]) -> tuple[str, ...]:
    if isinstance(names, str):
        raise ContractError(f"eager_break takes lists of argument names; expected ({names!r},) instead of {names!r}")
    return tuple(names)


def _is_named(parameter: inspect.Parameter) -> bool:
    return parameter.kind not in (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)


class _Here(threading.local):
    """What a marked function does in this thread; None for a plain call."""

    reached: Callable[[Mark, tuple[Any, ...], dict[str, Any]], Any] | None = None


_here = _Here()


@overload
def eager_break(function: Function) -> Function: ...


@overload
def eager_break(
    *,
    stub: Callable[..., Any] | None = None,
    row_aligned: Sequence[str] = (),
    writes: Sequence[str] = (),
    pad: float = 0,
) -> Callable[[Function], Function]: ...


def eager_break(
    function: Any = None,
    *,
    stub: Callable[..., Any] | None = None,
    row_aligned: Sequence[str] = (),
    writes: Sequence[str] = (),
    pad: float = 0,
) -> Any:
    """Mark a function that runs eagerly between two segments of a segmented recording.

    While a runner captures, it also runs for real in each warm-up of each key, on all rows and on capture values. Each
    replay calls it with the same argument objects: write into tensors, but do not resize, reshape in place or rebind
    them, and do not change containers. Plain values that it is given or returns are those of the recording.

    Args:
        function: the function or method. It returns a tree of tensors and plain values, or None.
        stub: called instead while recording, for a function that is too costly or waits for other ranks;
            its result has the function's structure, shapes and dtypes.
        row_aligned: arguments cut to the real rows of dimension 0 before a replay calls the function.
            Every tensor that it returns then has these rows, and its padded tail is set to ``pad``.
        writes: those of them that the function fills in place; their tails are set to ``pad`` as well.
        pad: the value of padded rows.

    Raises:
        ContractError: the function has no such arguments.

    Capturable: no; that is what it is for.

    Examples:
        >>> import torch, graphglue as gg
        >>> @gg.eager_break(row_aligned=("rows",))
        ... def attend(rows):
        ...     return rows.cumsum(0)
        >>> attend(torch.ones(3)).tolist()  # outside a segmented recording it is a plain call
        [1.0, 2.0, 3.0]
    """
    if function is None:
        return functools.partial(eager_break, stub=stub, row_aligned=row_aligned, writes=writes, pad=pad)
    name = getattr(function, "__qualname__", type(function).__name__).rpartition("<locals>.")[2]
    try:
        signature = inspect.signature(function)
    except (TypeError, ValueError) as error:  # a builtin, or no callable at all
        raise ContractError(f"eager_break of {function!r}: {error}; mark a Python function that calls it") from error
    mark = Mark(function, stub, _names(row_aligned), _names(writes), pad, name, signature)

    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        reached = _here.reached
        return function(*args, **kwargs) if reached is None else reached(mark, args, kwargs)

    call._torchdynamo_disable = True  # type: ignore[attr-defined]  # compiled code breaks its graph here as well
    return call


def breaks_reached(run: Callable[[], Any]) -> tuple[str, ...]:
    """Call ``run`` and name the breaks it reaches, in order; hold it against ``SegmentedRecording.breaks``."""
    names: list[str] = []

    def note(mark: Mark, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        names.append(mark.name)
        with Reaching(None):
            return mark.run(*args, **kwargs)

    with Reaching(note):
        run()
    return tuple(names)


class Reaching:
    """Set what marked functions do in this thread, and set it back."""

    def __init__(self, reached: Any) -> None:
        self._reached = reached

    def __enter__(self) -> None:
        self._before, _here.reached = _here.reached, self._reached

    def __exit__(self, *error: object) -> None:
        _here.reached = self._before


def difference(expected: Sequence[str], seen: Sequence[str]) -> str | None:
    """Say how two lists of breaks differ; None if they do not."""
    for place, (one, other) in enumerate(zip(expected, seen)):
        if one != other:
            return f"break {place} is {other!r}, expected {one!r}"
    return None if len(expected) == len(seen) else f"{len(seen)} breaks are reached, expected {len(expected)}"
