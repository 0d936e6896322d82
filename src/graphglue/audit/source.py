"""The code of a prep, hashed: a certificate is for this code and no other.

Covered are the bytecode, constants and defaults of the prep and of every Python function of its top-level package
that it can name: in its closure, its defaults, its module's globals, in the containers, objects and classes that
it names, and the methods of those. Numbers, strings, tuples, and members of dicts and lists that this code reads
count as well, wherever it reads them from, unless the code assigns or changes them: then they are its state. Not
covered: contents of tensors, compiled code, and what other packages do, whose versions stand in the certificate.
"""

from __future__ import annotations

import dis
import enum
import functools
import hashlib
import secrets
import sys
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from types import BuiltinFunctionType, CodeType, FunctionType, MethodType, ModuleType
from typing import Any, NamedTuple

import torch

from graphglue.audit.inside import attributes_of, cells_of, functions_of

UNREADABLE = "unreadable"
_PLAIN = (bool, int, float, complex, str, bytes, type(None), torch.dtype, torch.device, torch.layout)
_STORES = ("STORE_ATTR", "STORE_GLOBAL", "STORE_DEREF", "DELETE_ATTR")
_CHANGES = ("STORE_SUBSCR", "DELETE_SUBSCR", "STORE_SLICE")
_CHANGERS = frozenset(
    (
        "append", "appendleft", "extend", "insert", "pop", "popitem", "clear", "remove", "sort", "reverse",
        "setdefault", "update", "add", "discard",
    )
)  # fmt: skip
_MAKERS = ("__init__", "__new__", "__post_init__", "__setstate__")  # what these assign is given, not state
_WRAPPERS = ("__wrapped__", "fn", "func")  # where decorators keep what they wrap; a Triton kernel keeps ``fn``
_CLASS_OF_OBJECT = "class"  # no name that code can have
_MAX_VALUES = 50_000


class Source(NamedTuple):
    """The hash of some callables' code, and the names of the functions that went into it."""

    digest: str
    functions: tuple[str, ...]

    @classmethod
    def of(cls, *callables: Callable[..., Any] | None) -> Source:
        """Hash callables with all that they reach; equal code has one hash in every process.

        Never raises: code that can not be read has a hash that no other has.
        """
        try:
            reading = _Reading(_package_of(callables[0]) if callables else "")
            reading.read(callables)
            lines = sorted(line for name, line in reading.lines if name not in reading.stores)
            digest = hashlib.sha256("\n".join(lines).encode("utf-8", "surrogatepass")).hexdigest()
            return cls(digest, tuple(sorted(reading.functions)))
        except Exception as error:  # objects may do anything when they are looked at
            return cls(f"{UNREADABLE}, {type(error).__name__} {secrets.token_hex(8)}", ())


class _Reader(NamedTuple):
    """What one piece of code names, and whether it changes what containers hold."""

    names: frozenset[str] = frozenset({"forward"})  # what torch calls of a module that is called
    strings: frozenset[str] = frozenset()
    stores: frozenset[str] = frozenset()
    changes: bool = False

    @classmethod
    def of(cls, code: CodeType) -> _Reader:
        """Read a code object, with the code inside it."""
        steps = list(dis.get_instructions(code))
        stores = {str(step.argval) for step in steps if step.opname in _STORES}
        names, strings = set(code.co_names), {one for one in code.co_consts if type(one) is str}
        changes = any(step.opname in _CHANGES for step in steps) or not _CHANGERS.isdisjoint(names)
        for constant in code.co_consts:
            if isinstance(constant, CodeType):
                inner = cls.of(constant)
                names, strings, stores = names | inner.names, strings | inner.strings, stores | inner.stores
                changes = changes or inner.changes
        return cls(frozenset(names), frozenset(strings), frozenset(stores), changes)


@dataclass
class _Reading:
    """Walk from value to value, and write down what each is.

    Attributes:
        package: of which code is read.
        lines: what was found, each with the name it was found by.
        functions: which code was read.
        names: all that this code names.
        stores: all that this code assigns.
    """

    package: str
    lines: set[tuple[str, str]] = field(default_factory=set)
    functions: set[str] = field(default_factory=set)
    names: set[str] = field(default_factory=set)
    stores: set[str] = field(default_factory=set)
    _seen: dict[Any, Any] = field(default_factory=dict)  # kept alive, so that an id is not used again
    _classes: dict[type, list[Any]] = field(default_factory=dict)  # of the package, with their objects
    _called: set[type] = field(default_factory=set)  # classes that the code names, and so may make objects of
    _waiting: deque[tuple[str, str, Any, _Reader]] = field(default_factory=deque)

    def read(self, callables: tuple[Any, ...]) -> None:
        """Walk until nothing is new."""
        for number, one in enumerate(callables):
            self._wait("", str(number), one, _Reader())
        while self._waiting:
            while self._waiting:
                self._value(*self._waiting.popleft())
            self._methods()

    def _wait(self, owner: str, name: str, value: Any, reader: _Reader) -> None:
        kind = type(value)
        if issubclass(kind, (*_PLAIN, enum.Enum)):
            self.lines.add((name, f"{owner}.{name} = {_spell(value)}"))
            return
        if issubclass(kind, type) and name != _CLASS_OF_OBJECT:
            self._called.add(value)
        key = id(value) if kind is FunctionType else (id(value), reader)
        if key not in self._seen and len(self._seen) < _MAX_VALUES:
            self._seen[key] = value
            self._waiting.append((owner, name, value, reader))

    def _value(self, owner: str, name: str, value: Any, reader: _Reader) -> None:
        kind, path = type(value), f"{owner}.{name}"
        if issubclass(kind, torch.Tensor):
            self.lines.add((name, f"{path} = tensor {value.dtype} {tuple(value.shape)}"))
        elif kind is FunctionType:
            self._function(name, path, value)
        elif kind is MethodType:
            inner = value.__func__
            self._wait(owner, name, inner, reader)
            code = inner.__code__ if type(inner) is FunctionType else None
            self._wait(path, "self", value.__self__, _Reader.of(code) if code else reader)
        elif issubclass(kind, functools.partial):
            for part in ("func", "args", "keywords"):
                self._wait(path, part, getattr(value, part), reader._replace(changes=False))
        elif issubclass(kind, (dict, list, tuple, set, frozenset)):
            self._members(path, value, reader)
        elif issubclass(kind, ModuleType):
            self._module(path, value, reader)
        elif issubclass(kind, type):
            self._class(name, path, value, reader)
        else:
            self._object(name, path, value, reader)

    def _function(self, name: str, path: str, function: FunctionType) -> None:
        """Write down a function with what it closes over and the globals it names."""
        self.lines.add((name, f"{path} = def {function.__qualname__}"))
        self._wait(path, "wrapped", vars(function).get("__wrapped__"), _Reader())
        code, module = function.__code__, str(function.__globals__.get("__name__", ""))
        if not self._is_ours(module):
            for cell, part in cells_of(function):
                if type(part) in (FunctionType, MethodType):
                    self._wait(path, cell, part, _Reader())
            return
        reader, owner = _Reader.of(code), function.__qualname__
        self.functions.add(f"{module}.{owner}")
        self.lines.add((name, f"{owner} does {_hash_of(code)}"))
        self.names |= reader.names
        if function.__name__ not in _MAKERS:
            self.stores |= reader.stores
        for number, part in enumerate(function.__defaults__ or ()):
            self._wait(owner, f"default {number}", part, reader)
        self._wait(owner, "keywords", function.__kwdefaults__, reader._replace(changes=False, strings=reader.names))
        for cell, part in cells_of(function):
            self._wait(owner, cell, part, reader)
        for known in sorted(reader.names & function.__globals__.keys()):
            self._wait(owner, known, function.__globals__[known], reader)

    def _members(self, path: str, value: Any, reader: _Reader) -> None:
        """Write down what a container holds: all of one that never changes, else functions alone."""
        fixed = not reader.changes or isinstance(value, (tuple, frozenset))
        if isinstance(value, dict):
            keywords = path.endswith(".keywords")
            named = [(repr(k), v) for k, v in dict.items(value) if type(k) is str and (keywords or k in reader.strings)]
            calls = [(f"{number}", v) for number, v in enumerate(dict.values(value)) if type(v) is FunctionType]
        else:
            named = [(f"[{number}]", part) for number, part in enumerate(_ordered(value))]
            calls = [(at, part) for at, part in named if type(part) is FunctionType]
            if fixed:
                self.lines.add(("", f"{path} has {len(named)}"))
        for at, part in [*calls, *(named if fixed else ())]:
            self._wait(path, at, part, reader)

    def _module(self, path: str, module: ModuleType, reader: _Reader) -> None:
        """Write down what code may take from a module of the package."""
        self.lines.add(("", f"{path} = module"))
        if self._is_ours(module.__name__):
            for name in sorted(reader.names & vars(module).keys()):
                self._wait(path, name, vars(module)[name], reader)

    def _class(self, name: str, path: str, kind: type, reader: _Reader) -> None:
        """Write down a class, and the constants that code takes from it; its methods follow."""
        self.lines.add((name, f"{path} = class {kind.__qualname__}"))
        if not self._is_ours(kind.__module__):
            return
        self._classes.setdefault(kind, [])
        for base in kind.__mro__:
            for known in sorted(reader.names & vars(base).keys()) if self._is_ours(base.__module__) else ():
                part = vars(base)[known]
                if not functions_of(part):
                    self._wait(base.__qualname__, known, part, reader)

    def _object(self, name: str, path: str, value: Any, reader: _Reader) -> None:
        """Write down an object: its class, what it wraps, and the attributes that code reads."""
        kind = type(value)
        if kind is BuiltinFunctionType:
            self.lines.add((name, f"{path} = {value.__qualname__}"))
            return
        self._wait(path, _CLASS_OF_OBJECT, kind, reader)
        if self._is_ours(kind.__module__):
            self._classes.setdefault(kind, []).append(value)
        self._attributes(kind.__qualname__, value, reader)
        held = attributes_of(value)
        for wrapper in _WRAPPERS:
            self._wait(path, wrapper, held.get(wrapper), reader)

    def _attributes(self, owner: str, value: Any, reader: _Reader) -> None:
        held = attributes_of(value)
        for name in sorted(reader.names & held.keys()):
            self._wait(owner, name, held[name], reader)

    def _methods(self) -> None:
        """Go on with the methods that the code so far may call, and with what they read of their objects."""
        for kind, objects in list(self._classes.items()):
            for function in self._methods_of(kind):
                if id(function) not in self._seen:
                    self._wait(kind.__qualname__, function.__name__, function, _Reader())
                    reader = _Reader.of(function.__code__)
                    for one in () if function.__name__ in _MAKERS else (kind, *objects):
                        self._wait(kind.__qualname__, function.__name__, one, reader)

    def _methods_of(self, kind: type) -> Iterator[FunctionType]:
        for base in kind.__mro__:
            for name, part in vars(base).items() if self._is_ours(base.__module__) else ():
                if name in _MAKERS and kind not in self._called:
                    continue  # its objects are there, and what was given to them is read from them
                if name in self.names or name in _Reader().names or (name[:2] == name[-2:] == "__"):
                    yield from functions_of(part)

    def _is_ours(self, module: Any) -> bool:
        return _top(str(module)) == self.package


def _package_of(one: Any) -> str:
    """Name the top-level package of a callable's own code, under partials, methods and decorators."""
    for _ in range(100):
        held = attributes_of(one)
        if type(one) is MethodType:
            one = one.__func__
        elif isinstance(one, functools.partial):
            one = one.func
        elif inner := next((held[name] for name in _WRAPPERS if callable(held.get(name))), None):
            one = inner
        else:
            break
    module = one.__globals__.get("__name__", "") if type(one) is FunctionType else type(one).__module__
    return _top(str(module))


def _top(module: str) -> str:
    """Name a module's top-level package: the same whether it was imported or is the program that runs."""
    if module == "__main__":
        main = sys.modules["__main__"]
        spec, file = getattr(main, "__spec__", None), str(getattr(main, "__file__", None) or "")
        module = spec.name if spec else file.rpartition("/")[2].removesuffix(".py")
    return module.partition(".")[0]


def _ordered(members: Any) -> list[Any]:
    return sorted(members, key=_spell) if isinstance(members, (set, frozenset)) else list(members)


def _spell(value: Any) -> str:
    """Write a plain value, whatever a subclass makes of its own text."""
    kind = type(value)
    if issubclass(kind, enum.Enum):
        return f"{kind.__qualname__}.{value._name_} = {_spell(value._value_)}"
    if issubclass(kind, (tuple, frozenset)):
        return f"({', '.join(map(_spell, _ordered(value)))})"
    base: Any = next((base for base in _PLAIN if issubclass(kind, base)), None)
    return kind.__qualname__ if base is None else base.__repr__(value)


def _hash_of(code: CodeType) -> str:
    """Hash bytecode without its file and lines; constants may hold more code."""
    constants = [_hash_of(one) if isinstance(one, CodeType) else _spell(one) for one in code.co_consts]
    names = (code.co_names, code.co_varnames, code.co_freevars, code.co_cellvars)
    return hashlib.sha256(repr((code.co_code.hex(), names, constants)).encode()).hexdigest()
