"""Breaks: what runs eagerly between two segments, with the arguments it was recorded with.

A break's result goes into *bridges*, tensors whose addresses the later segments read. A bridge is allocated
inside the segment behind the break, so it is pool memory like any intermediate: once the callable drops it,
later segments and smaller buckets use it again. A result that lies in an argument's memory stays where it is.
"""

from __future__ import annotations

import inspect
from collections import OrderedDict
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any, NamedTuple

import torch
from torch.utils import _pytree as pytree

from graphglue.core import trees
from graphglue.errors import ContractError, DivergenceError, SegmentError
from graphglue.graphs.ambient import Ambient, without_modes
from graphglue.graphs.bridges import Bridges, Memory, addresses, allocated, check_plain, is_strided
from graphglue.graphs.cuts import Cuts
from graphglue.graphs.marks import Mark

Arguments = tuple[tuple[Any, ...], dict[str, Any]]


class _Held(NamedTuple):
    """One argument as a recording keeps it: leaves by structure, or the caller's own object (``leaves`` None)."""

    name: str
    value: Any
    leaves: list[Any] | None
    structure: Any
    owned: list[bool]
    is_aligned: bool

    def given(self) -> Any:
        """Give the argument with all its rows."""
        return self.value if self.leaves is None else pytree.tree_unflatten(self.leaves, self.structure)

    def places(self, cuts: Cuts) -> list[int | None]:
        """Take the tensors of a row-aligned argument in, to be cut."""
        pairs = zip(self.leaves or (), self.owned)
        return [cuts.place(leaf, mine) if isinstance(leaf, torch.Tensor) else None for leaf, mine in pairs]


class _Tree(NamedTuple):
    """A row-aligned argument that is a tree: where it stands in a call, and where what is cut of it stands."""

    key: int | str
    held: _Held
    places: list[int | None]

    def cut(self, cuts: Cuts, rows: int) -> Any:
        """Give the argument with its real rows."""
        pairs = zip(self.places, self.held.leaves or ())
        leaves = [leaf if place is None else cuts.head(place, rows) for place, leaf in pairs]
        return pytree.tree_unflatten(leaves, self.held.structure)


class Prepared(NamedTuple):
    """One break at one number of real rows: the function, its arguments, and what takes in its result."""

    run: Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    accept: Callable[[Any], None]
    step: Break


class Break:
    """One call of a marked function, as it was reached while recording.

    Args:
        mark: the function and what it declares.
        bound: the call's arguments.
        memory: knows which memory the recording's pool owns.
        ambient: what was switched on where it was reached.
        place: position among the recording's breaks, for messages.

    Raises:
        ContractError: row-aligned arguments have no rows, or different numbers of them.
    """

    def __init__(self, mark: Mark, bound: inspect.BoundArguments, memory: Memory, ambient: Ambient, place: int) -> None:
        self.mark, self.ambient, self.place = mark, ambient, place
        self._bound, self._memory = bound, memory
        self._held = [self._hold(name, value) for name, value in bound.arguments.items()]
        self.rows = self._count_rows()
        self._bridges: Bridges | None = None
        self._given: tuple[int | None, Arguments]
        self._bare: list[tuple[Any, int]] = []  # row-aligned tensors: where in a call, and where in what is cut
        self._trees: list[_Tree] = []

    def __str__(self) -> str:
        """Name it in messages."""
        return f"break {self.place} ({self.mark.name!r})"

    def _hold(self, name: str, value: Any) -> _Held:
        """Keep weak aliases of pool memory; leave everything else the caller's own object, containers too."""
        leaves, structure = pytree.tree_flatten(value)
        owned = [is_strided(leaf) and self._memory.owns(leaf) for leaf in leaves]
        aligned = name in self.mark.row_aligned
        if aligned:  # what hides tensors can not be cut: the function would see padded rows
            trees.check_leaves(value, f"{self} declares {name!r} row-aligned, and the forward")
        if not any(owned) and not aligned:
            return _Held(name, value, None, None, [], False)
        check_plain([leaf for leaf, mine in zip(leaves, owned) if mine or aligned], f"{self} is given in {name!r}")
        kept = [self._memory.alias(leaf) if mine else leaf for leaf, mine in zip(leaves, owned)]
        return _Held(name, None, kept, structure, owned, aligned)

    def _count_rows(self) -> int | None:
        found: dict[str, int] = {}
        for name, tensor in self._aligned():
            if tensor.dim() == 0:
                raise ContractError(f"{self} declares {name!r} row-aligned, but it has no rows (0 dimensions)")
            found[name] = tensor.shape[0]
        if len(set(found.values())) > 1:
            raise ContractError(f"{self}: row-aligned arguments have different numbers of rows: {found}")
        return next(iter(found.values()), None)

    def _aligned(self, names: tuple[str, ...] | None = None) -> list[tuple[str, torch.Tensor]]:
        wanted = self.mark.row_aligned if names is None else names
        held = [one for one in self._held if one.name in wanted and one.leaves is not None]
        return [(one.name, leaf) for one in held for leaf in one.leaves or () if isinstance(leaf, torch.Tensor)]

    def first(self) -> Any:
        """Call the function, or its stub, while recording: with the caller's own arguments and all rows."""
        with self.ambient.on():
            return (self.mark.stub or self.mark.run)(*self._bound.args, **self._bound.kwargs)

    def bridge(self, result: Any) -> Any:
        """Give the callable what it reads from then on; call it inside the segment behind the break.

        Raises:
            ContractError: a result that can not be held, or does not keep to what the mark declares.
        """
        given = addresses(dict(self._bound.arguments))
        static = allocated(str(self), result, given)  # under the recorder's modes: the segment's own memory
        with without_modes():
            filled = [tensor for _, tensor in self._aligned(self.mark.writes)]
            self._bridges = Bridges(str(self), static, result, given, filled, self.rows, self.mark.pad, self._memory)
        del self._bound  # it keeps pool memory
        return pytree.tree_unflatten(static, pytree.tree_structure(result))

    def settle(self) -> None:
        """Bring the first result into the bridges, once the segment behind the break has ended."""
        if self._bridges is not None:
            self._bridges.settle()

    def join(self, cuts: Cuts) -> None:
        """Get ready for replays, with what the breaks of one recording cut together."""
        bound = inspect.BoundArguments(self.mark.signature, OrderedDict((one.name, one.given()) for one in self._held))
        whole: Arguments = (bound.args, bound.kwargs)
        self._cuts, self._whole, self._given = cuts, whole, (None, whole)
        order = list(self.mark.signature.parameters)
        for held in self._held:
            if held.is_aligned:
                places = held.places(cuts)
                key = held.name if held.name in whole[1] else order.index(held.name)
                if held.structure.is_leaf() and places[0] is not None:
                    self._bare.append((key, places[0]))
                else:
                    self._trees.append(_Tree(key, held, places))
        if self._bridges is not None:
            self._bridges.join(cuts)

    def prepared(self, real_rows: int | None) -> Prepared:
        """Give what a replay calls, and with what, at one number of real rows."""
        rows = real_rows if real_rows != self.rows and self.rows is not None else None
        args, kwargs = self._given[1] if self._given[0] == rows else self._arguments(rows)
        assert self._bridges is not None
        return Prepared(self.mark.run, args, kwargs, self._bridges.accepting(rows), self)

    def failure(self, error: Exception) -> Exception:
        """Give what a replay raises where the function raised."""
        if isinstance(error, DivergenceError):
            return error
        return SegmentError(
            f"{self} raised {error!r} while a recording was replayed; what the replay computed is void, and the "
            "next one starts from the first segment"
        )

    def run(self, real_rows: int | None, check: bool = False) -> None:
        """Call the function and bring its result into the bridges, on the caller's current stream.

        Raises:
            SegmentError: the function raised.
            DivergenceError: it returned something else than while recording, or wrote past the real rows.

        Sync: none of its own; the device with ``check``.
        """
        call = self.prepared(real_rows)
        rows = self._given[0]
        try:
            with self._watched(rows) if check and rows is not None else nullcontext():
                fresh = call.run(*call.args, **call.kwargs)
        except DivergenceError:
            raise
        except Exception as error:
            raise self.failure(error) from error
        call.accept(fresh)

    def _arguments(self, rows: int | None) -> Arguments:
        """Build what the function is called with, and keep it for replays with as many real rows."""
        given = self._whole
        if rows is not None:
            args, kwargs, cuts = [*given[0]], {**given[1]}, self._cuts
            by_place: Any = (args, kwargs)
            for key, place in self._bare:
                by_place[type(key) is str][key] = cuts.head(place, rows)
            for tree in self._trees:
                by_place[type(tree.key) is str][tree.key] = tree.cut(cuts, rows)
            given = tuple(args), kwargs
        self._given = rows, given
        return given

    @contextmanager
    def _watched(self, rows: int) -> Iterator[None]:
        """Compare the padded rows of row-aligned arguments before and after. Sync: the device."""
        tails = [(name, leaf[rows:]) for name, leaf in self._aligned()]
        before = [_bits(tail).clone() for _, tail in tails]
        yield
        for (name, tail), old in zip(tails, before):
            if not torch.equal(_bits(tail), old):
                raise DivergenceError(
                    f"{self} wrote past the {rows} real rows of its argument {name!r}, into rows up to {self.rows}; "
                    "let it write through the argument it is given, not through another view of that memory"
                )


def _bits(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.resolve_conj().resolve_neg().contiguous().reshape(-1).view(torch.uint8)
