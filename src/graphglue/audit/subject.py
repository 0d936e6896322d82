"""A subject: one prep under audit, over slots and tables of its own.

The twin has the declarations of the runner's slots and clones of its tables. Nothing here reads or writes the
runner's own slots, keys or recordings, so an engine may be audited between two steps.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import torch

from graphglue.audit import modes, values
from graphglue.audit.certificate import keys_of
from graphglue.audit.extents import IDLE, extents_served, fits
from graphglue.audit.rows import Rows
from graphglue.compiling import compiled
from graphglue.core import trees
from graphglue.core.batch import Batch
from graphglue.core.buckets import Bucket
from graphglue.core.contract import GENERIC, PrepContract
from graphglue.core.keys import Key, KeySpace
from graphglue.core.slots import Slot
from graphglue.core.view import View
from graphglue.device.arena import Arena
from graphglue.errors import CaptureError
from graphglue.graphs import memory
from graphglue.graphs.base import Recording
from graphglue.results import owned


class Unseen(Exception):
    """Say that a check can not look, and why. It becomes the verdict unknown."""


class Sources(dict[str, torch.Tensor]):
    """One step's values by slot, and the tokens of each of its requests."""

    def __init__(self, tensors: Mapping[str, torch.Tensor], row_tokens: Sequence[int]) -> None:
        super().__init__(tensors)
        self.row_tokens = tuple(row_tokens)


class Region(NamedTuple):
    """A stretch of memory: a "slot" or "table" of the twin, or a "live slot" or "live table" of the runner itself."""

    begin: int
    end: int
    kind: str
    name: str

    def __str__(self) -> str:
        return f"{self.kind} {self.name}"


@dataclass
class Subject:
    """One prep under audit.

    Attributes:
        name: the prep's name.
        prep: the callable.
        contract: what it declares; None for a prep that declares nothing.
        declared: the contract, or what a prep without one counts as.
        plan: what its host planner is, run on the host at every step.
        arena: the twin slots.
        tables: the twin tables, all of the runner's.
        space: the runner's key space.
        on_gpu: whether the twin is on a GPU.
        keys: where the prep may be glued, the smallest bucket first; empty for one that is never glued.
        batches: batches of the engine's own, from which legal values are taken.
        perturb: changes the engine's host state, in any way a step may find it.
        live: where the runner's own slots and tables lie; a prep that reads one of those reads past its view.
        guessed: declared slots whose legal values nobody stated: ``Slot.valid``, ``index_of`` or batches do.
        returned: addresses of the storages that the prep has returned something in.
    """

    name: str
    prep: Callable[..., Any]
    contract: PrepContract | None
    declared: PrepContract
    plan: Callable[..., Any] | None
    arena: Arena
    tables: dict[str, torch.Tensor]
    space: KeySpace
    on_gpu: bool
    keys: list[Key]
    batches: tuple[Batch, ...] = ()
    perturb: Callable[[], Any] | None = None
    guessed: tuple[str, ...] = ()
    live: tuple[Region, ...] = field(default=(), repr=False)
    returned: set[int] = field(default_factory=set, repr=False)
    _pristine: dict[str, torch.Tensor] = field(default_factory=dict, repr=False)
    _bounds: dict[str, values.Bounds] = field(default_factory=dict, repr=False)
    _rows: Rows | None = field(default=None, repr=False)
    _held: tuple[Any, ...] = field(default=(), repr=False)  # live memory: its addresses must not be used again
    _recorded: Callable[..., Any] | None = field(default=None, repr=False)
    _in_session: bool = field(default=False, repr=False)

    @classmethod
    def of(cls, runner: Any, batches: Iterable[Batch] = (), perturb: Callable[[], Any] | None = None) -> list[Subject]:
        """Build one subject for each prep of a runner.

        Args:
            runner: a Runner, captured or not; it is only read.
            batches: batches as the engine hands them in; legal values are rows of them.
            perturb: changes host state that must not matter; called between two captures.

        Sync: none.
        """
        with memory.plain():
            pristine = {name: _copy(tensor) for name, tensor in runner.tables.items()}
            return [
                _build(runner, registration, pristine, tuple(batches), perturb) for registration in runner.registrations
            ]

    # The steps a key serves.

    def raws(self, key: Key, every: int = 64) -> list[Bucket]:
        """List real extents that a key serves: all up to ``every`` requests (tokens for EXTEND), a sample above.

        One request, all but one and all are in each sample. Ragged keys have several token counts for each number
        of requests. With no requests only where the contract glues IDLE steps.
        """
        found = extents_served(key, self.space, every)
        if self._rows is not None and not key.row_tokens:  # uneven requests are only known to be legal as given
            found = [raw for raw in self._rows.raws() if not raw.row_tokens and fits(raw, key.bucket)] or found
        if not self.declared.padded:
            return [raw for raw in found if raw[:2] == key.bucket[:2]]
        return found + ([IDLE] if self.declared.idle == "glue" else [])

    def sources(self, raw: Bucket, seed: int) -> Sources:
        """Draw legal values of exactly the real extents for every slot a batch hands in, on the device.

        Equal arguments give equal values. They are rows of the user's batches where those have fitting ones.
        """
        if not raw.requests:
            return Sources({}, ())
        rng = random.Random(f"{seed} {tuple(raw)}")
        dealt = self._rows.deal(raw, rng) if self._rows is not None else None
        given, row_tokens = dealt or ({}, values.split_rows(raw, rng))
        wanted = [slot for name, slot in self.arena.slots.items() if slot.value is None and name not in given]
        drawn = {slot.name: self._drawn(slot, raw, row_tokens, seed) for slot in wanted}
        return Sources({**drawn, **given}, row_tokens)

    def _drawn(self, slot: Slot, raw: Bucket, row_tokens: Sequence[int], seed: int) -> torch.Tensor:
        rng = random.Random(f"{seed} {tuple(raw)} {slot.name}")
        rows = slot.rows(raw.requests, raw.tokens, self.arena.num_ranks)
        tensor = values.draw(slot, self._bounds[slot.name], rows, row_tokens, rng)
        return tensor.to(self.arena.device.torch_device)

    def fill(self, key: Key, raw: Bucket, sources: Mapping[str, torch.Tensor]) -> None:
        """Fill the twin's slots at a key for one step, heads and tails, by torch operations. Sync: none.

        Raises:
            Unseen: the prep's host planner does not take these sources.
        """
        writes = self.arena.bind(self._planned(key, raw, key.bucket, sources), raw, key.bucket)
        self.arena.device.fill_once(writes, self.arena.targets(key.bucket))

    def view(self, key: Key) -> View:
        """Show the prep what it declares of the twin, at a key; the same memory on every call."""
        return self._view(self.arena.targets(key.bucket), key.bucket, key)

    def exact_view(self, raw: Bucket, sources: Mapping[str, torch.Tensor], key: Key) -> View:
        """Show the prep fresh tensors at exactly the real extents. Sync: none."""
        writes = self.arena.bind(self._planned(key, raw, raw, sources), raw, raw, scratch=True)
        with memory.plain():
            return self._view(self.arena.scratch(writes, raw), raw, key)

    # What the prep does.

    def call(self, view: View) -> Any:
        """Run the prep for real; raises what it raises. Sync: what the prep does."""
        with memory.plain():
            result = modes.call(self.prep, view.fresh())
        self.returned |= memory.addresses(result)
        return result

    def runs_on_pads(self) -> bool:
        """Tell whether the prep runs where all slots hold idle values or pads, which it declares itself right for."""
        try:
            for key in self.keys:
                self.arena.fill_idle(key.bucket)
                self.call(self.view(key))
        except Exception:
            return False
        return True

    def record(self, key: Key, on: Callable[[Callable[[], Recording]], Recording] = lambda run: run()) -> Recording:
        """Warm up twice and record the prep over the twin, as a runner does, by a recorder of the audit's own.

        Slots are as they were filled. The warm-ups run on the twin's tables: ``restore`` them if the prep has effects.

        Args:
            key: the key.
            on: calls what records, once the prep is warm.

        Raises:
            CaptureError: the prep can not be recorded, or raised.

        Sync: the device.
        """
        view, prep = self.view(key), self._recorded or self.prep
        recorder = self.arena.device.recorder()  # one for each, so that no two recordings share memory

        def run() -> Any:
            with torch.no_grad():
                return owned(modes.call(prep, view.fresh()), (view,))

        with memory.plain(), nullcontext() if self._in_session else recorder.session():
            try:
                for _ in range(2):
                    trees.check_leaves(run(), f"prep {self.name!r}")
            except Exception as error:
                raise CaptureError(f"the prep raised while warming up: {type(error).__name__}: {error}") from error
            recorder.finish()
            return on(lambda: recorder.record(run, strict=not self.declared.compile))

    @contextmanager
    def session(self) -> Iterator[None]:
        """Enclose any number of recordings: opening a session collects garbage, which takes longer than a recording."""
        with self.arena.device.recorder().session():
            self._in_session = True
            try:
                yield
            finally:
                self._in_session = False

    @property
    def pristine(self) -> dict[str, torch.Tensor]:
        """What the tables held when the audit began; never written."""
        return self._pristine

    def restore(self) -> None:
        """Put the tables' contents back to what they were. Sync: none."""
        with memory.plain():
            for name, tensor in self.tables.items():
                tensor.copy_(self._pristine[name])

    # Where things lie.

    def regions(self) -> list[Region]:
        """List the address ranges of all twin slots and tables, declared or not, in order."""
        return sorted(_regions_of(self.arena, self.tables))

    def region_of(self, tensor: torch.Tensor) -> Region | None:
        """Name the slot or table, of the twin or live, that a tensor lies in; None for memory that is neither."""
        begin, end = tensor.data_ptr(), tensor.data_ptr() + max(1, _span_bytes(tensor))
        known = (*self.regions(), *self.live)
        return next((region for region in known if begin < region.end and region.begin < end), None)

    def reads(self, region: Region) -> bool:
        """Tell whether the contract declares a region: a slot it reads or a table."""
        if self.contract is None:
            return True
        return region.name in (self.contract.reads if region.kind.endswith("slot") else self.contract.tables)

    def _view(self, slots: Mapping[str, torch.Tensor], bucket: Bucket, key: Key) -> View:
        contract = self.contract
        reads = slots if contract is None else {name: slots[name] for name in contract.reads}
        tables = self.tables if contract is None else {name: self.tables[name] for name in contract.tables}
        return View(reads, tables, bucket, key.mode, key.variant, f"prep {self.name!r}")

    def _planned(self, key: Key, raw: Bucket, bucket: Bucket, sources: Mapping[str, torch.Tensor]) -> Mapping[str, Any]:
        """Add what the prep's host planner computes, which replaces drawn values."""
        if self.plan is None:
            return sources
        given = sources.row_tokens if isinstance(sources, Sources) and not raw.row_tokens else None
        on_host = {name: values.cpu() for name, values in sources.items()}  # as an engine hands them to its planner
        batch = Batch(raw.requests, on_host, key.mode, raw.tokens, given or None, key.variant)
        try:
            planned = self.plan(batch, bucket)
        except Exception as error:
            raise Unseen(
                f"the plan of prep {self.name!r} raised {type(error).__name__} on drawn sources: {error}; hand batches "
                "of your own to the audit"
            ) from error
        return {**sources, **planned}


def _build(
    runner: Any,
    registration: Any,
    pristine: dict[str, torch.Tensor],
    batches: tuple[Batch, ...],
    perturb: Callable[[], Any] | None,
) -> Subject:
    declared = registration.contract or GENERIC
    slots = [_own_storage(slot) for slot in runner.arena.slots.values()]
    arena = Arena(slots, runner.space, device=runner.arena.device.torch_device, num_ranks=runner.arena.num_ranks)
    rows = Rows(batches, arena) if batches else None
    bounds = {name: values.bounds_of(slot, runner.tables) for name, slot in arena.slots.items()}
    if rows is not None:
        bounds.update((name, rows.bounds(name)) for name in rows.names if not bounds[name].stated)
    reads = arena.slots if registration.contract is None else declared.reads
    never = not declared.host_free or runner.config.glue.get(registration.name) == "off"
    return Subject(
        name=registration.name,
        prep=registration.prep,
        contract=registration.contract,
        declared=declared,
        plan=registration.plan,
        arena=arena,
        tables={name: _copy(tensor) for name, tensor in pristine.items()},
        space=runner.space,
        on_gpu=arena.device.torch_device.type == "cuda",
        keys=[] if never else keys_of(runner.space, declared),
        batches=batches,
        perturb=perturb,
        guessed=tuple(n for n in reads if not bounds[n].stated and arena.slots[n].value is None),
        live=tuple(_regions_of(runner.arena, runner.tables, "live ")),
        _pristine=pristine,
        _bounds=bounds,
        _rows=rows,
        _held=(runner.arena, runner.tables),
        _recorded=compiled(registration.prep, registration.contract)[0],
    )


def _regions_of(arena: Arena, tables: Mapping[str, torch.Tensor], prefix: str = "") -> list[Region]:
    slots = arena.targets(arena.space.bucket(arena.space.ladder.largest))
    named = [("slot", *item) for item in slots.items()] + [("table", *item) for item in tables.items()]
    return [
        Region(tensor.data_ptr(), tensor.data_ptr() + _span_bytes(tensor), prefix + kind, name)
        for kind, name, tensor in named
        if tensor.numel()
    ]


def _own_storage(slot: Slot) -> Slot:
    """Give a slot that adopted the engine's buffer one of its own, with the same geometry."""
    return slot if slot.storage is None else replace(slot, storage=_copy(slot.storage))


def _copy(tensor: torch.Tensor) -> torch.Tensor:
    """Copy a tensor with its geometry."""
    if any(stride == 0 and extent > 1 for extent, stride in zip(tensor.shape, tensor.stride())):
        return tensor.clone()
    return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device=tensor.device).copy_(tensor)


def _span_bytes(tensor: torch.Tensor) -> int:
    last = sum((extent - 1) * abs(stride) for extent, stride in zip(tensor.shape, tensor.stride()))
    return (last + 1) * tensor.element_size() if tensor.numel() else 0
