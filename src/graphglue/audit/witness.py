"""A witness: what one real run of a prep did, operation by operation.

The run is under the same two modes as a recording, with the same rules, but a rule that is broken is noted
instead of refused, so that one run shows all there is. Each operation is written down with its scalars and with
where its tensors lie: in a slot or table, in the n-th memory that the run made, or outside.
"""

from __future__ import annotations

import sys
from bisect import bisect_right
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch.utils import _pytree as pytree

from graphglue.audit import modes
from graphglue.audit.certificate import Finding
from graphglue.audit.subject import Region, Subject
from graphglue.core import trees
from graphglue.core.keys import Key
from graphglue.graphs import guard, memory
from graphglue.graphs.rules import BY_NAME, Call

# Operations that write all they are given without reading it, or that write some of it and read none.
_OVERWRITES = frozenset(
    f"aten::{name}"
    for name in (
        "copy_", "fill_", "zero_", "index_put_", "_index_put_impl_", "index_copy_", "index_fill_", "scatter_",
        "masked_fill_", "masked_scatter_", "set_", "resize_", "_foreach_copy_", "_foreach_zero_",
    )
)  # fmt: skip
_SCALARS = (int, float, bool, complex, str, type(None), torch.dtype, torch.device, torch.layout, torch.memory_format)
_MAX_HOST_VALUES = 16
_HOST_READ = BY_NAME["item"][0].why
_NAMESPACES = ("aten", "prims", "prim", "profiler", "quantized")


class Operand(NamedTuple):
    """A tensor that an operation was given or gave: what it looks like and where it lies."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    place: str

    def __str__(self) -> str:
        return f"{spell(self.dtype, self.shape)} in {self.place}"


@dataclass(frozen=True, slots=True)
class Operation:
    """One operation of a run. Two are equal if they did the same; ``where`` does not count."""

    name: str
    given: tuple[Any, ...]
    made: tuple[Any, ...]
    where: str = field(compare=False)

    def __str__(self) -> str:
        return f"{self.name}({', '.join(map(str, self.given))}) -> {', '.join(map(str, self.made))}"


class Touch(NamedTuple):
    """One read or write of memory that the run did not make."""

    tensor: torch.Tensor
    op: str
    where: str
    writes: bool
    first: bool  # nothing in this run had written that memory before


@dataclass
class Testimony:
    """What a run did.

    Attributes:
        operations: all of them, in order.
        broken: the rules of a recording that were broken, each once for a line.
        read: those of them that read on the host what slots or tables hold, or what was computed from it.
        touches: reads and writes of memory the run did not make.
        unseen: what the run did that can not be looked into, and why.
        result: what the prep returned.
        returned: its leaves by name: plain values, and where tensors lie.
        made: the storages the run made, by identity; held, so that none is used again.
        baked: those that torch made of host values, in the same way.
        error: what the prep raised.
    """

    operations: list[Operation] = field(default_factory=list)
    broken: list[Finding] = field(default_factory=list)
    read: list[Finding] = field(default_factory=list)
    touches: list[Touch] = field(default_factory=list)
    unseen: list[Finding] = field(default_factory=list)
    result: Any = None
    returned: tuple[tuple[str, Any], ...] = ()
    made: dict[int, torch.UntypedStorage] = field(default_factory=dict)
    baked: dict[int, torch.UntypedStorage] = field(default_factory=dict)
    error: Exception | None = None


def observe(subject: Subject, key: Key) -> Testimony:
    """Run the prep once, for real, over the twin as it is filled, and tell what it did. Sync: what the prep does."""
    view, seen = subject.view(key).fresh(), Testimony()
    notes = _Notes(subject, seen)
    witness = _Witness(notes)
    with memory.plain():
        try:
            with guard.FunctionGuard(notes), witness:
                seen.result = modes.call(subject.prep, view)
        except Exception as error:
            seen.error = error
            return seen
        seen.returned = tuple((name, witness.spelled(leaf)) for name, leaf in trees.named_leaves(seen.result))
    return seen


def spell(dtype: torch.dtype, shape: Iterable[int]) -> str:
    """Write a dtype and shape, such as int64[4, 2]."""
    return f"{str(dtype).removeprefix('torch.')}{list(shape)}"


def here() -> str:
    """Give file:line of the prep that is running."""
    return guard.where(sys._getframe()).partition(" in ")[0]


def place_of(error: BaseException) -> str | None:
    """Give file:line of the innermost line of the prep that an error, or what caused it, passed through."""
    for one in (error.__cause__, error):
        place = guard.blame(one).partition(" in ")[0] if one is not None else ""
        if ":" in place:
            return place
    return None


class _Notes(guard.Guard):
    """Note what breaks a rule, and go on."""

    def __init__(self, subject: Subject, seen: Testimony) -> None:
        super().__init__(subject.arena.device.torch_device)
        self.seen, self.baked = seen, seen.baked
        self.regions = sorted((*subject.regions(), *subject.live))
        self.told_by_step: set[int] = set()  # storages that hold what slots or tables say
        self._told: set[tuple[str, str]] = set()

    def check(self, keys: tuple[str | torch.Tag, ...], args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Note the first rule that a call breaks."""
        if keys[0] == "data_ptr" and self.device.type != "cpu":
            self.unseen("data_ptr", "hands out an address; what a kernel does that is launched with it was not seen")
        rules = next((BY_NAME[key] for key in keys if key in BY_NAME), ())
        call = Call(args, kwargs, self.device, self.baked)
        broken = next((rule for rule in rules if rule.when(call)), None)
        if broken is not None:
            self.note(self.named(str(keys[0])), f"{broken.why}; {broken.instead}", args)

    def note(self, op: str, text: str, args: Any) -> None:
        """Note a fault, once for each line and kind: the parts of one call break the same rule again."""
        place = here()
        if (place, text) in self._told:
            return
        self._told.add((place, text))
        with torch._C.DisableTorchFunction():
            tensor = next((leaf for leaf in pytree.tree_leaves(args) if _is_plain(leaf)), None)
            finding = finding_of(text, op, place, tensor, self.regions)
        self.seen.broken.append(finding)
        if text.startswith(_HOST_READ) and tensor is not None and self.depends_on_step(tensor):
            self.seen.read.append(finding)

    def depends_on_step(self, tensor: torch.Tensor) -> bool:
        """Tell whether a tensor lies in a slot or table, or was computed from one."""
        storage = tensor.untyped_storage()._cdata
        return storage in self.told_by_step or _region(tensor, self.regions) is not None

    def unseen(self, op: str, text: str) -> None:
        """Note what can not be looked into."""
        place = here()
        if (place, text) not in self._told:
            self._told.add((place, text))
            self.seen.unseen.append(Finding(text=text, op=op, where=place))


def finding_of(
    text: str, op: str | None, where: str | None, tensor: torch.Tensor | None, regions: list[Region]
) -> Finding:
    """Make a finding about a tensor."""
    if tensor is None:
        return Finding(text=text, op=op, where=where)
    region = _region(tensor, regions)
    named = str(region) if region else f"address {hex(tensor.data_ptr())}"
    return Finding(text=text, op=op, where=where, tensor=spell(tensor.dtype, tensor.shape), region=named)


class _Witness(guard.DispatchGuard):
    """Run operations, and write down what each was given, where it lay and what it made."""

    def __init__(self, notes: _Notes) -> None:
        super().__init__(notes)
        self._notes, self._seen = notes, notes.seen
        self._ordinals: dict[int, int] = {}  # storage -> the n-th that this run made
        self._written: set[int] = set()

    def perform(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run one operation."""
        self._look(func, args, kwargs)
        leaves = pytree.tree_leaves((args, kwargs))
        given = tuple(self.spelled(leaf) for leaf in leaves)
        place = here()
        self._seen.touches.extend(self._touches(func, args, kwargs, place))
        result = func(*args, **kwargs)
        known = {leaf.untyped_storage()._cdata for leaf in leaves if _is_plain(leaf)}
        results = pytree.tree_leaves(result)
        for leaf in filter(_is_plain, results):
            storage = leaf.untyped_storage()
            if storage._cdata not in known:
                self._ordinals.setdefault(storage._cdata, len(self._ordinals))
                self._seen.made[storage._cdata] = storage
        self._follow(func, leaves, results)
        made = tuple(self.spelled(leaf) for leaf in results)
        self._seen.operations.append(Operation(str(func), given, made, place))
        return result

    def _follow(self, func: Any, given: list[Any], made: list[Any]) -> None:
        """Note which memory holds what slots or tables say from now on."""
        if memory.ignores_values(func) or not any(self._notes.depends_on_step(one) for one in filter(_is_plain, given)):
            return
        for one in filter(_is_plain, [*made, *(given if func._schema.is_mutable else ())]):
            self._notes.told_by_step.add(one.untyped_storage()._cdata)

    def _look(self, func: Any, args: Any, kwargs: Any) -> None:
        """Note what an operation does besides reading and writing its arguments."""
        if torch.Tag.nondeterministic_seeded in func.tags:
            text = "draws random numbers; let plan() draw them and pass them as a slot, or draw them in the forward"
            self._notes.note(self._notes.named(func._schema.name), text, ())
        if func.namespace not in _NAMESPACES:
            text = "is no operation of torch's own; what it does inside, besides to its arguments, was not seen"
            self._notes.unseen(func._schema.name, text)

    def _touches(self, func: Any, args: Any, kwargs: Any, place: str) -> list[Touch]:
        """List what an operation reads and writes of memory that this run did not make."""
        if torch.Tag.inplace_view in func.tags:
            return []
        reads_nothing = _is_view(func) or memory.ignores_values(func)
        found: list[Touch] = []
        for position, argument in enumerate(func._schema.arguments):
            value = args[position] if position < len(args) else kwargs.get(argument.name)
            writes = argument.alias_info is not None and argument.alias_info.is_write
            for tensor in filter(_is_plain, pytree.tree_leaves(value)):
                storage = tensor.untyped_storage()._cdata
                first = storage not in self._written
                if writes:
                    self._written.add(storage)
                if storage in self._seen.made or storage in self._notes.baked or not tensor.numel():
                    continue
                if writes:
                    found.append(Touch(tensor, func._schema.name, place, True, first))
                if _reads_old(func) if writes else not reads_nothing:
                    found.append(Touch(tensor, func._schema.name, place, False, first))
        return found

    def spelled(self, leaf: Any) -> Any:
        """Describe a tensor by its looks and its memory, another value by itself: comparable between runs."""
        if not _is_plain(leaf):
            return repr(leaf) if isinstance(leaf, _SCALARS) else type(leaf).__name__
        return Operand(leaf.dtype, tuple(leaf.shape), leaf.stride(), self._place(leaf))

    def _place(self, tensor: torch.Tensor) -> str:
        storage = tensor.untyped_storage()._cdata
        if storage in self._ordinals:
            return f"result {self._ordinals[storage]} + {tensor.storage_offset()}"
        if storage in self._notes.baked:
            return f"host values {tensor.flatten()[:_MAX_HOST_VALUES].tolist()}"
        region = _region(tensor, self._notes.regions)
        if region is None:
            return f"memory from outside at {hex(tensor.data_ptr())}"
        return f"{region} + {tensor.data_ptr() - region.begin}"


def _region(tensor: torch.Tensor, regions: list[Region]) -> Region | None:
    at = bisect_right(regions, tensor.data_ptr(), key=lambda region: region.begin) - 1
    return regions[at] if at >= 0 and tensor.data_ptr() < regions[at].end else None


def _is_plain(leaf: Any) -> bool:
    return isinstance(leaf, torch.Tensor) and leaf.layout is torch.strided


def _is_view(func: Any) -> bool:
    """Tell whether an operation only gives another view of what it was given."""
    returns = func._schema.returns
    return not func._schema.is_mutable and bool(returns) and all(given.alias_info is not None for given in returns)


def _reads_old(func: Any) -> bool:
    """Tell whether an operation that writes in place first reads what stood there, as ``add_`` does."""
    name = func._schema.name
    return name.endswith("_") and name not in _OVERWRITES and func._schema.overload_name != "out"
