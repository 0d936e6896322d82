"""Units and views: a runner's preps, and what preps and forward see at a key."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from graphglue.cache import GlueGraphCache
from graphglue.core import trees
from graphglue.core.batch import Batch
from graphglue.core.buckets import Bucket
from graphglue.core.contract import GENERIC, PrepContract
from graphglue.core.keys import Key
from graphglue.core.live import Live
from graphglue.core.routing import Decision, PrepFacts, Route
from graphglue.core.slots import Axis
from graphglue.core.view import View
from graphglue.device.arena import Arena
from graphglue.errors import BindError, ContractError
from graphglue.graphs.memory import addresses
from graphglue.graphs.segments import SegmentedRecording
from graphglue.registry import Registration


@dataclass(frozen=True, slots=True)
class Unit:
    """One prep of a runner: what was registered, where it is recorded, what the config says of it."""

    registration: Registration
    cache: GlueGraphCache
    glue: str
    generic_glue: bool
    certified: bool | None

    @property
    def name(self) -> str:
        """The prep's name."""
        return self.registration.name

    @property
    def declared(self) -> PrepContract:
        """The contract, or what a prep without one counts as."""
        return self.registration.contract or GENERIC

    def facts(self, key: Key) -> PrepFacts:
        """Give what the router knows of this prep at a key."""
        return PrepFacts(
            self.registration.contract, self.cache.state(key), self.glue, self.generic_glue, self.certified
        )

    def run(self, route: Route, key: Key, view: View) -> tuple[Any, str | None]:
        """Run the prep on its route; return its metadata, and how it differs from what a graph reads."""
        if route is Route.GLUE:
            return self.cache.replay(key), None
        if route is Route.SKIP:
            return self.cache.result(key), None
        return self.cache.eager(key, view)

    def may_glue(self, key: Key, ragged: bool) -> bool:
        """Tell whether any step at this key could be glued, so that recording it is of use."""
        declared = self.declared
        allowed = self.registration.contract is not None or self.generic_glue
        fits = key.mode in declared.modes and (declared.ragged or not ragged)
        return allowed and declared.host_free and self.glue != "off" and self.certified is not False and fits


_MAX_VIEWS = 4096


class Views:
    """Build and keep the views of each key: one per prep, and the forward's."""

    def __init__(self, arena: Arena, tables: dict[str, torch.Tensor], units: Sequence[Unit]) -> None:
        self._arena, self._tables, self._units = arena, tables, units
        self._kept: dict[Key, tuple[list[View], View]] = {}
        self.meeting_of: Callable[[Key], Any] = lambda key: None  # how the rows of all ranks meet at a captured key

    def of(self, key: Key) -> tuple[list[View], View]:
        """Give the preps' views and the forward's view over the static slots at a key."""
        found = self._kept.get(key)
        if found is None:
            found = self.over(self._arena.targets(key.bucket), key)
            if len(self._kept) < _MAX_VIEWS:  # an engine may hand in any number of variants
                self._kept[key] = found
        return found

    def over(self, slots: dict[str, torch.Tensor], key: Key, meeting: Any = None) -> tuple[list[View], View]:
        """Build the views over other tensors than the static slots; ``meeting`` is that of ranks in an eager step."""
        meeting = self.meeting_of(key) if meeting is None else meeting
        forward = View(slots, self._tables, key.bucket, key.mode, key.variant, "the forward", meeting)
        return [self.prep_view(unit, slots, self._tables, key) for unit in self._units], forward

    def prep_view(self, unit: Unit, slots: dict[str, torch.Tensor], tables: dict[str, torch.Tensor], key: Key) -> View:
        """Build a prep's view: its declared reads and tables only."""
        contract = unit.registration.contract
        reads = slots if contract is None else {name: slots[name] for name in contract.reads}
        seen = tables if contract is None else {name: tables[name] for name in contract.tables}
        return View(reads, seen, key.bucket, key.mode, key.variant, f"prep {unit.name!r}")

    def live(self, slots: Mapping[str, torch.Tensor], raw: Bucket, metadata: Any) -> Live:
        """Cut slots to a step's real rows, for eager breaks."""
        cut = {}
        for name, tensor in slots.items():
            slot = self._arena.slots[name]
            rows = trees.ROWS.get(Axis(slot.axis).value)
            cut[name] = tensor if rows is None else tensor.narrow(slot.row_dim, 0, rows(raw.requests, raw.tokens))
        return Live(cut, raw, metadata)

    def clear(self) -> None:
        """Forget all views; a table was replaced."""
        self._kept.clear()


def planned(units: Iterable[Unit], decision: Decision, batch: Batch) -> Mapping[str, Any]:
    """Add to a batch's sources what the backends' host planners compute for its step.

    Raises:
        BindError: a plan that is no mapping, or gives a slot that somebody else gives.
    """
    sources = batch.sources
    for unit in units:
        plan = unit.registration.plan
        if plan is None or decision.preps[unit.name].route is Route.SKIP:
            continue
        made = plan(batch, decision.key.bucket)
        if not isinstance(made, Mapping):
            seen = type(made).__name__
            raise BindError(f"the plan of prep {unit.name!r} returned a {seen}; expected slot names with values")
        if twice := sorted(set(made) & set(sources)):
            other = "from the batch" if set(twice) <= set(batch.sources) else "from the plan of another prep"
            raise BindError(f"slots {twice} come {other} and from the plan of prep {unit.name!r}; leave one out")
        sources = {**sources, **made}
    return sources


def check_skipping(units: Iterable[Unit], key: Key, segments: SegmentedRecording | None) -> None:
    """Hold a key's forward against the preps that IDLE steps skip; ``segments`` is None for one full graph.

    Raises:
        ContractError: it would read what such a prep left behind.
    """
    for unit in units:
        if unit.declared.idle != "skip":
            continue
        if segments is None:
            seen = "is one full graph"
        elif segments.unaligned:
            seen = f"has breaks {list(segments.unaligned)} on all rows"
        elif segments.reads & addresses(_integers(unit.cache.result(key))):  # no reads where nobody looked, as on a GPU
            seen = "reads integers of its metadata between its breaks"
        else:
            continue
        raise ContractError(
            f"prep {unit.name!r} declares idle='skip', but the forward {seen}: an IDLE replay would read through the "
            "last step's metadata, which another bucket may have overwritten; mark what reads it with "
            "eager_break(row_aligned=...), or use idle='eager' or 'glue'"
        )


def _integers(tree: Any) -> list[torch.Tensor]:
    """Give what may be an index: other leaves leave padded rows with other values, and nothing worse."""
    leaves = [leaf for leaf in trees.flatten(tree)[0] if isinstance(leaf, torch.Tensor) and leaf.numel()]
    return [leaf for leaf in leaves if not (leaf.is_floating_point() or leaf.is_complex() or leaf.dtype is torch.bool)]
