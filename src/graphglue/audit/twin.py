"""The twin of one served step: the batch's own sources, filled by the reference and prepared eagerly, beside the slots.

Each part of the twin is made right before what it is held against, from the same state of the world: the fill from
sources that the step has not touched, each prep from the tables as they are when the glued one runs. The comparison
is queued before the forward, which may write into slots and metadata in place.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch

from graphglue.core import trees
from graphglue.core.binding import Write
from graphglue.core.buckets import Bucket
from graphglue.core.routing import Decision, Route
from graphglue.core.slots import Axis
from graphglue.device.arena import Arena
from graphglue.results import copy_into, owned
from graphglue.units import Unit, Views


@dataclass(frozen=True, slots=True)
class Compared:
    """What one tensor of a comparison is.

    Attributes:
        prep: the prep that made it; None for a slot.
        name: the slot, or the leaf's dotted name.
        axis: what its rows count, which stand on dim 0 of what is compared; None where nobody declared it.
        extent: its real rows; None where rows can not be told from pads.
    """

    prep: str | None
    name: str
    axis: Axis | None
    extent: int | None

    @property
    def has_rows(self) -> bool:
        """Whether dim 0 counts rows."""
        return self.axis is not Axis.FIXED

    def __str__(self) -> str:
        if self.prep is None:
            return f"slot {self.name!r}"
        return f"prep {self.prep!r}, " + (f"leaf {self.name!r}" if self.name else "the result")


class Pair(NamedTuple):
    """Two tensors to compare: what the step uses, and what its twin has."""

    what: Compared
    seen: torch.Tensor
    expected: torch.Tensor


class Twin:
    """Build the twin of one step, part by part, and pair it with what the step uses.

    Args:
        arena: the slots.
        units: the preps, in order.
        views: builds the preps' views over the twin's slots.
        decision: where the step goes.
        raw: its real extents.
        rebound: what earlier twins found of each prep at this key: leaves that lie in memory of the prep's own.

    Attributes:
        broken: structure, shape or a plain leaf differs: prep and how.
        failures: what could not be made.
        num_effects: preps that are not repeated because they change tables.
    """

    def __init__(
        self,
        arena: Arena,
        units: Sequence[Unit],
        views: Views,
        decision: Decision,
        raw: Bucket,
        rebound: dict[Any, Any],
    ) -> None:
        self.decision, self.raw = decision, raw
        self.broken: list[tuple[str, str]] = []
        self.failures: list[str] = []
        self.num_effects = 0
        self._arena, self._units, self._view_source, self._rebound = arena, units, views, rebound
        self._slots: dict[str, torch.Tensor] = {}
        self._views: list[Any] = []
        self._converted: set[str] = set()  # slots whose NaNs may have any payload
        self._prepared: list[tuple[Unit, Any, Any]] = []

    def fill(self, sources: Mapping[str, Any], rank_counts: Sequence[int] | None = None) -> None:
        """Fill scratch slots from what the step was bound to, before its own fill. Host values are read here.

        Sync: none.
        """
        bucket = self.decision.key.bucket
        targets = self._arena.targets(bucket)
        with self._contained("the twin's slots"):
            bound = self._arena.bind(sources, self.raw, bucket, rank_counts)
            writes = [self._with_head(write, targets) for write in bound]
            self._converted = {write.slot.name for write in writes if _converts_floats(write)}
            slots = _like(targets)
            self._arena.device.fill_once(writes, slots)
            self._views = self._view_source.over(slots, self.decision.key)[0]
            self._slots = slots

    def prepare(self, position: int) -> None:
        """Run one prep eagerly over the scratch slots, right before the step runs it. Sync: what the prep does."""
        unit = self._units[position]
        if not self._views or self.decision.preps[unit.name].route is not Route.GLUE:
            return
        if unit.declared.effects:
            self.num_effects += 1
            return
        with self._contained(f"prep {unit.name!r}"):
            static = unit.cache.result(self.decision.key)
            fresh = self._eager(unit, self._views[position], static)
            if changed := trees.difference(static, fresh):
                self.broken.append((unit.name, changed))
            else:
                self._prepared.append((unit, static, fresh))

    def groups(self) -> list[list[Pair]]:
        """Pair what the step uses with the twin: one group for the slots, then one for each prep.

        Sync: none. To be called behind the preps and before the forward.
        """
        if not self._slots:
            return []
        return [self._slot_pairs(), *(self._leaf_pairs(*prepared) for prepared in self._prepared)]

    def _slot_pairs(self) -> list[Pair]:
        pairs = []
        for name, twin in self._slots.items():
            slot = self._arena.slots[name]
            target, axis = self._arena.targets(self.decision.key.bucket)[name], Axis(slot.axis)
            dim = 0 if axis is Axis.FIXED else slot.row_dim
            real = slot.rows(self.raw.requests, self.raw.tokens, self._arena.num_ranks)
            what = Compared(None, name, axis, None if axis is Axis.FIXED else real)
            pairs.append(_pair(what, target.movedim(dim, 0), twin.movedim(dim, 0), name in self._converted))
        return pairs

    def _leaf_pairs(self, unit: Unit, static: Any, fresh: Any) -> list[Pair]:
        pairs = []
        for (name, leaf), (_, twin) in zip(trees.named_leaves(static), trees.named_leaves(fresh)):
            # Compiled arithmetic is fused, and may round otherwise than the plain prep's.
            if isinstance(leaf, torch.Tensor) and not (unit.declared.compile and leaf.is_floating_point()):
                axis = unit.declared.outputs.get(name)
                rows = None if axis is None else trees.ROWS.get(axis.value)
                real = None if rows is None else rows(self.raw.requests, self.raw.tokens)
                pairs.append(_pair(Compared(unit.name, name, axis, real), leaf, twin, bool(self._converted)))
        return pairs

    def _eager(self, unit: Unit, view: Any, static: Any) -> Any:
        """Call the plain prep; what it writes into memory that the glued one writes too is put back.

        Otherwise a glued prep that writes nothing would be found to have written the right values.
        """
        place = (unit.name, self.decision.key)
        leaves = [leaf for leaf in trees.flatten(static)[0] if isinstance(leaf, torch.Tensor)]
        storages = [leaf.untyped_storage().data_ptr() for leaf in leaves]
        known = self._rebound.get(place)
        kept = [leaf.clone() if known is None or number in known else None for number, leaf in enumerate(leaves)]
        with torch.no_grad():
            fresh = owned(unit.registration.prep(view.fresh()), (view,))
        trees.check_leaves(fresh, f"prep {unit.name!r}")
        shared = {storage for storage in map(_storage, trees.flatten(fresh)[0]) if storage in storages}
        fresh = trees.map_tensors(lambda leaf: leaf.clone() if _storage(leaf) in shared else leaf, fresh)
        for leaf, storage, copy in zip(leaves, storages, kept):
            if storage in shared and copy is not None:
                copy_into(leaf, copy)
        self._rebound[place] = {number for number, storage in enumerate(storages) if storage in shared}
        return fresh

    def _with_head(self, write: Write, targets: Mapping[str, torch.Tensor]) -> Write:
        """Give a source that is the slot's own view as a source like others."""
        if write.source is not None or not write.raw:
            return write
        target = targets[write.slot.name]
        fixed = write.slot.axis is Axis.FIXED
        return replace(write, source=target if fixed else target.narrow(write.slot.row_dim, 0, write.raw))

    @contextmanager
    def _contained(self, what: str) -> Iterator[None]:
        """Note what goes wrong: a twin that can not be made must not take the step down."""
        try:
            yield
        except Exception as error:
            self.failures.append(f"{what}: {type(error).__name__}: {error}")


def _like(tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Make tensors of the same geometry, strides included: operations choose their kernels by it."""
    with torch.inference_mode(False):
        return {
            name: torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device=tensor.device)
            for name, tensor in tensors.items()
        }


def _pair(what: Compared, seen: torch.Tensor, expected: torch.Tensor, settle: bool) -> Pair:
    return Pair(what, *map(_with_one_nan, (seen, expected))) if settle else Pair(what, seen, expected)


def _with_one_nan(tensor: torch.Tensor) -> torch.Tensor:
    """Make every NaN the same one: kernels give a NaN that they convert different payloads."""
    if not tensor.is_floating_point():
        return tensor
    wide = tensor.to(torch.float32) if tensor.element_size() == 1 else tensor  # few kernels know 8-bit floats
    return wide.masked_fill(wide.isnan(), math.nan)


def _converts_floats(write: Write) -> bool:
    """Tell whether a write converts from one float dtype to another."""
    source = write.source
    return isinstance(source, torch.Tensor) and source.is_floating_point() and source.dtype != write.slot.dtype


def _storage(leaf: Any) -> int | None:
    return leaf.untyped_storage().data_ptr() if isinstance(leaf, torch.Tensor) else None
