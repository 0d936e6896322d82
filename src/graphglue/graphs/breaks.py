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
from functools import partial
from typing import Any, NamedTuple

import torch
from torch.utils import _pytree as pytree

from graphglue.core import trees
from graphglue.core.differences import bytes_of
from graphglue.errors import ContractError, DivergenceError, SegmentError
from graphglue.graphs.ambient import Ambient, without_modes
from graphglue.graphs.bridges import Bridges, Memory, addresses, allocated, check_plain, is_strided
from graphglue.graphs.cuts import Cuts
from graphglue.graphs.marks import Mark


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
    """A row-aligned argument that is a tree: its place in a call, and where what is cut of it stands."""

    key: Any
    held: _Held
    places: list[int | None]

    def cut(self, cuts: Cuts, rows: int) -> Any:
        """Give the argument with its real rows."""
        pairs = zip(self.places, self.held.leaves or ())
        leaves = [leaf if place is None else cuts.head(place, rows) for place, leaf in pairs]
        return pytree.tree_unflatten(leaves, self.held.structure)


# A break at one number of real rows: the function with its arguments, and what takes its result in; None where there is
# nothing to do for a break that returns nothing.
Prepared = tuple[Callable[[], Any], Callable[[Any], None] | None]


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
        # Row-aligned arguments: where each stands in a call, by position or by name, and where in what is cut.
        self._at: list[tuple[int, int]] = []
        self._named: list[tuple[str, int]] = []
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
        assert self._bridges is not None
        self._cuts = cuts
        self._bridges.join(cuts)
        bound = inspect.BoundArguments(self.mark.signature, OrderedDict((one.name, one.given()) for one in self._held))
        self._args, self._kwargs = [*bound.args], bound.kwargs
        order = list(self.mark.signature.parameters)
        for held in self._held:
            if held.is_aligned:
                self._find(held, held.name if held.name in self._kwargs else order.index(held.name))
        self._whole = partial(self.mark.run, *self._args, **self._kwargs), self._bridges.accepting(None)

    def _find(self, held: _Held, key: Any) -> None:
        """Note where a row-aligned argument stands."""
        places = held.places(self._cuts)
        if not held.structure.is_leaf() or places[0] is None:
            self._trees.append(_Tree(key, held, places))
        elif isinstance(key, str):
            self._named.append((key, places[0]))
        else:
            self._at.append((key, places[0]))
            self._args[key] = self._cuts.whole(places[0])  # layers that are given the same memory share it

    def prepared(self, real_rows: int | None) -> Prepared:
        """Give what a replay calls, and with what, at one number of real rows."""
        if real_rows is None or real_rows == self.rows or self.rows is None:
            return self._whole
        args, kwargs, heads = [*self._args], self._kwargs, self._cuts.cut(real_rows)
        for at, place in self._at:
            args[at] = heads[place]
        if self._named or self._trees:
            kwargs = {**kwargs, **{name: heads[place] for name, place in self._named}}
            by_place: Any = (args, kwargs)
            for tree in self._trees:
                by_place[type(tree.key) is str][tree.key] = tree.cut(self._cuts, real_rows)
        assert self._bridges is not None
        return partial(self.mark.run, *args, **kwargs), self._bridges.accepting(real_rows)

    def take(self, fresh: Any, accept: Callable[[Any], None] | None) -> None:
        """Bring a fresh result to where it is read.

        Raises:
            DivergenceError: it is something else than while recording; nothing was written.
        """
        assert self._bridges is not None
        if accept is not None:
            accept(fresh)
        elif fresh is not None:
            self._bridges.accept(fresh, None)

    def failure(self, error: Exception) -> Exception:
        """Give what a replay raises where the function raised."""
        if isinstance(error, DivergenceError):
            return error
        return SegmentError(
            f"{self} raised {error!r} while a recording was replayed; what the replay computed is void, and the "
            "next one starts from the first segment"
        )

    def run(self, prepared: Prepared, watched_rows: int | None) -> None:
        """Call the function and bring its result into the bridges, on the caller's current stream.

        Args:
            prepared: what is called, and what takes its result in.
            watched_rows: compare the rows of row-aligned arguments behind these; None for no comparison.

        Raises:
            SegmentError: the function raised.
            DivergenceError: it returned something else than while recording, or wrote past the real rows.

        Sync: none of its own; the device where rows are watched.
        """
        call, accept = prepared
        try:
            with nullcontext() if watched_rows is None else self._watched(watched_rows):
                fresh = call()
        except DivergenceError:
            raise
        except Exception as error:
            raise self.failure(error) from error
        self.take(fresh, accept)

    @contextmanager
    def _watched(self, rows: int) -> Iterator[None]:
        """Compare the padded rows of row-aligned arguments before and after. Sync: the device."""
        tails = [(name, leaf[rows:]) for name, leaf in self._aligned()]
        before = [bytes_of(tail).clone() for _, tail in tails]
        yield
        for (name, tail), old in zip(tails, before):
            if not torch.equal(bytes_of(tail), old):
                raise DivergenceError(
                    f"{self} wrote past the {rows} real rows of its argument {name!r}, into rows up to {self.rows}; "
                    "let it write through the argument it is given, not through another view of that memory"
                )
