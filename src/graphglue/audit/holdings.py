"""Holdings: the tensors a prep can get at without being handed them.

What its Python objects hold is walked, and what a run hands to torch is watched. A tensor that both miss is
read by a kernel that was given an address, which the pointers of a captured graph show.
"""

from __future__ import annotations

import functools
import sys
from collections import deque
from collections.abc import Callable, Iterator
from types import CodeType, FunctionType, MethodType, ModuleType
from typing import Any

import numpy as np
import torch
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from graphglue.audit.evidence import code_of
from graphglue.audit.garbage import is_plain
from graphglue.audit.inside import cells_of, dict_of, is_a, slots_of
from graphglue.graphs import guard, memory

_MAX_OBJECTS = 20_000
_OUR_PREPS = ("graphglue.preps", "graphglue.demo")
_NAMESPACES = ("types", "functools", "collections")  # of Python's own: they hold what others put there
_PLAIN = (str, bytes, int, float, complex, bool, type(None), torch.dtype, torch.device)


def reachable(prep: Callable[..., Any]) -> tuple[dict[str, torch.Tensor], bool]:
    """Find the tensors in a prep's closure, bound self, default arguments, attributes and named globals.

    Returns:
        Tensors by where they were found, and whether everything was walked.
    """
    things, is_complete = _walked(prep)
    return {name: thing for name, thing, _ in things if is_a(thing, torch.Tensor)}, is_complete


def host_values(prep: Callable[..., Any]) -> list[str]:
    """Name the numbers and flags that may change under a prep: attributes, and what dicts, lists and names hold.

    Arrays are among them: they may be the host's mirror of what the device holds.
    """
    return [
        name
        for name, thing, holder in _walked(prep)[0]
        if is_a(thing, (bool, int, float, np.ndarray)) and not is_a(holder, (tuple, frozenset, type))
    ]


def generators(prep: Callable[..., Any]) -> list[torch.Generator]:
    """List the random generators that a prep reaches."""
    return [thing for _, thing, _ in _walked(prep)[0] if is_a(thing, torch.Generator)]


def _walked(prep: Callable[..., Any]) -> tuple[list[tuple[str, Any, Any]], bool]:
    """Walk objects breadth first: containers, attributes, and the functions that the code names.

    Objects may be of any package, but of the code of others nothing is walked: there is no end to it.

    Returns:
        Tensors, arrays, generators and plain values, each with its name and holder, and whether all was walked.
    """
    found: list[tuple[str, Any, Any]] = []
    seen: dict[int, Any] = {}  # holds what it knows, so that no id is used again
    waiting, package = deque([("", prep, prep)]), _package_of(code_of(prep))
    while waiting and len(seen) < _MAX_OBJECTS:
        name, thing, holder = waiting.popleft()
        if is_a(thing, _PLAIN):
            found.append((name, thing, holder))
        elif id(thing) not in seen:
            seen[id(thing)] = thing
            if is_a(thing, (torch.Tensor, torch.Generator, np.ndarray)):
                found.append((name, thing, holder))
            else:
                parts = () if _is_code_of_others(thing, package) else _parts(name, thing)
                waiting.extend((name, part, thing) for name, part in parts)
    return found, not waiting


def _parts(name: str, thing: Any) -> Iterator[tuple[str, Any]]:
    if is_a(thing, FunctionType):
        yield from _parts_of_function(name, thing)
    elif is_a(thing, MethodType):
        yield from ((_join(name, "self"), thing.__self__), (name, thing.__func__))
    elif is_a(thing, functools.partial):
        yield from (
            (name, thing.func),
            (_join(name, "arguments"), thing.args),
            (_join(name, "keywords"), thing.keywords),
        )
    elif is_a(thing, dict):
        yield from ((f"{name}[{key!r}]", part) for key, part in list(dict.items(thing)))
    elif is_a(thing, (list, tuple, set, frozenset, deque)):
        yield from ((f"{name}[{position}]", part) for position, part in enumerate(list(thing)))
    elif is_a(thing, type):
        yield from _parts_of_class(name, thing)
    elif not is_a(thing, ModuleType) and not _is_opaque(type(thing)):
        attributes = [*slots_of(thing), *dict_of(thing).items()]
        yield from ((f"{name or 'self'}.{attribute}", part) for attribute, part in attributes)
        yield (name or "self", type(thing))


def _parts_of_function(name: str, function: FunctionType) -> Iterator[tuple[str, Any]]:
    code, names = function.__code__, _names_in(function.__code__)
    held = [(f"closure variable {variable!r}", part) for variable, part in cells_of(function)]
    held += [(f"global {v!r}", function.__globals__[v]) for v in sorted(names & function.__globals__.keys())]
    for what, part in held:
        if is_a(part, ModuleType):
            yield from _parts_of_module(_join(name, what), part, names)
        else:
            yield _join(name, what), part
    arguments, defaults = code.co_varnames[: code.co_argcount], function.__defaults__ or ()
    named = [*zip(arguments[len(arguments) - len(defaults) :], defaults), *(function.__kwdefaults__ or {}).items()]
    yield from ((_join(name, f"default argument {argument!r}"), part) for argument, part in named)
    yield from ((_join(name, f"function attribute {attribute!r}"), part) for attribute, part in vars(function).items())


def _parts_of_module(name: str, module: ModuleType, names: set[str], depth: int = 3) -> Iterator[tuple[str, Any]]:
    """List what the code may take from a module, by the names it uses."""
    for attribute in sorted(names & vars(module).keys()):
        part = vars(module)[attribute]
        if is_a(part, ModuleType):
            if depth:
                yield from _parts_of_module(f"{name}.{attribute}", part, names, depth - 1)
        else:
            yield f"{name}.{attribute}", part


def _parts_of_class(name: str, kind: type) -> Iterator[tuple[str, Any]]:
    """List what a class and its bases of the same package hold: constants, and the functions of its methods."""
    for base in kind.__mro__:
        if _package_of(base) == _package_of(kind) and not _is_opaque(base):
            for attribute, part in vars(base).items():
                if is_a(part, (staticmethod, classmethod)):
                    part = part.__func__
                yield f"{name}.{attribute}", part.fget if is_a(part, property) else part


def _names_in(code: CodeType) -> set[str]:
    names = set(code.co_names)
    for constant in code.co_consts:
        if is_a(constant, CodeType):
            names |= _names_in(constant)
    return names


def _package_of(code: FunctionType | type) -> str:
    return str(code.__module__).partition(".")[0]


def _is_code_of_others(thing: Any, package: str) -> bool:
    if not is_a(thing, (FunctionType, type)):
        return False
    return _package_of(thing) != package or package in ("torch", "numpy") or package in sys.stdlib_module_names


def _is_opaque(kind: type) -> bool:
    """Tell whether objects of a class are left alone: a runner's slots and a logger's handlers are not a prep's."""
    ours = kind.__module__.startswith("graphglue.") and not kind.__module__.startswith(_OUR_PREPS)
    return ours or (_package_of(kind) in sys.stdlib_module_names and _package_of(kind) not in _NAMESPACES)


def _join(name: str, part: str) -> str:
    return f"{name}: {part}" if name else part


class Watch(TorchDispatchMode):
    """Note the tensors that operations read and did not make, each with the first operation and line.

    Args:
        is_declared: tells the slots and tables that the prep was handed.
    """

    def __init__(self, is_declared: Callable[[torch.Tensor], bool]) -> None:
        super().__init__()
        self._is_declared = is_declared
        self._made: dict[int, torch.UntypedStorage] = {}  # holds what it knows, so that no address is used again
        self.foreign: dict[int, tuple[torch.Tensor, str, str]] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given = _plain((args, kwargs))
        for tensor in () if _is_view(func) or memory.ignores_values(func) else given:
            address = tensor.untyped_storage().data_ptr()
            if address not in self._made and address not in self.foreign and not self._is_declared(tensor):
                self.foreign[address] = (tensor, func._schema.name, guard.where(sys._getframe()).partition(" in ")[0])
        result = func(*args, **(kwargs or {}))
        known = {tensor.untyped_storage().data_ptr() for tensor in given}
        for tensor in _plain(result):
            storage = tensor.untyped_storage()
            if storage.data_ptr() not in known:
                self._made[storage.data_ptr()] = storage
        return result


def _is_view(func: Any) -> bool:
    """Tell whether an operation gives another view of what it was given, and reads nothing."""
    returns = func._schema.returns
    return not func._schema.is_mutable and bool(returns) and all(given.alias_info is not None for given in returns)


def _plain(tree: Any) -> list[torch.Tensor]:
    return [leaf for leaf in pytree.tree_leaves(tree) if is_a(leaf, torch.Tensor) and is_plain(leaf)]
