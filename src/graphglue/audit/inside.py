"""What Python objects hold, looked at without asking them: their own code may do anything when it is asked."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from contextlib import suppress
from types import FunctionType, MemberDescriptorType
from typing import Any


def is_a(thing: Any, kinds: type | tuple[type, ...]) -> bool:
    """Tell an object's kind by its type; ``isinstance`` also asks for its ``__class__``, which may raise."""
    return issubclass(type(thing), kinds)


def attributes_of(thing: Any) -> dict[str, Any]:
    """Give an object's own attributes, those in ``__slots__`` included."""
    return {**dict(slots_of(thing)), **dict_of(thing)}


def dict_of(thing: Any) -> dict[str, Any]:
    """Give what an object has in its ``__dict__``."""
    try:
        return dict(object.__getattribute__(thing, "__dict__"))
    except Exception:
        return {}


def slots_of(thing: Any) -> Iterator[tuple[str, Any]]:
    """List what an object has in its ``__slots__``."""
    for base in type(thing).__mro__:
        for attribute, descriptor in vars(base).items():
            if isinstance(descriptor, MemberDescriptorType) and attribute != "__dict__":
                with suppress(AttributeError):  # not set yet
                    yield attribute, descriptor.__get__(thing)


def cells_of(function: FunctionType) -> Iterator[tuple[str, Any]]:
    """List what a function closes over."""
    for variable, cell in zip(function.__code__.co_freevars, function.__closure__ or ()):
        with suppress(ValueError):  # a name that is not bound yet
            yield variable, cell.cell_contents


def functions_of(part: Any) -> list[FunctionType]:
    """Give the Python functions behind a member of a class: a method, a property's, a static or cached one's."""
    if isinstance(part, (staticmethod, classmethod)):
        part = part.__func__
    if isinstance(part, property):
        return [one for one in (part.fget, part.fset) if type(one) is FunctionType]
    if isinstance(part, functools.cached_property):
        part = part.func
    return [part] if type(part) is FunctionType else []
