"""A trial: one step of a prep, run eagerly and by replay, clean and while memory holds garbage."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

import torch

from graphglue.audit import exposed, garbage, holdings
from graphglue.audit.evidence import Evidence, spell_error, spell_tensor
from graphglue.audit.garbage import Target, overwritten
from graphglue.audit.steps import Step, note_error, recorded, snapshot
from graphglue.audit.subject import Sources
from graphglue.core import trees
from graphglue.core.differences import first_difference
from graphglue.core.slots import Axis
from graphglue.graphs import memory
from graphglue.graphs.base import Recording
from graphglue.results import storages_of

_DECLARE = "declare it as a table or a slot, or compute it inside"


@dataclass
class Look:
    """What is known of a key before anything is poisoned there."""

    watch: holdings.Watch
    derived: memory.Derived
    undeclared: list[Target]
    read_only: list[tuple[int, int]]
    recording: Recording | None

    @classmethod
    def at(cls, step: Step, evidence: Evidence) -> Look | None:
        """Run a step under watch, then record its key; None for a prep that raises."""
        subject = step.subject
        view, handed = subject.view(step.key), exposed.addresses_of_twin(subject)
        watch = holdings.Watch(lambda tensor: tensor.untyped_storage().data_ptr() in handed)
        derived = memory.Derived(storages_of((view,)))
        step.fill()
        try:
            with derived, watch:
                subject.call(view)
        except Exception as error:
            note_error(step, error, evidence, "eager")
            return None
        recording, read_only = recorded(step, evidence), garbage.read_only_ranges()
        return cls(watch, derived, exposed.undeclared(subject, watch, evidence, read_only), read_only, recording)

    def close(self) -> None:
        """Drop the recording."""
        if self.recording is not None:
            self.recording.close()


@dataclass
class Way:
    """One way to run a step: its name, how, and what a clean run gives."""

    name: str
    run: Callable[[Step], Any]
    result: Any = None
    clean: Any = None
    untouched: set[str] = field(default_factory=set)  # leaves that no run computes

    def difference(self, seen: Any, step: Step) -> str | None:
        """Say where a result differs from the clean one; untouched leaves do not count."""
        expected, seen = (_without(tree, self.untouched) for tree in (self.clean, seen))
        found = first_difference(expected, seen, step.subject.declared.outputs, step.raw)
        return None if found is None else str(found)


class Trial:
    """One step, run eagerly and by replay, clean and under garbage."""

    def __init__(self, step: Step, look: Look, evidence: Evidence) -> None:
        self._step, self._look, self._evidence = step, look, evidence

    def run(self) -> None:
        """Run all of it."""
        step, look = self._step, self._look
        exposed.fill_beyond(step.subject)
        ways = [Way("eager", _eager)]
        if (recording := look.recording) is not None:
            ways.append(Way("glued", lambda step: step.replayed(recording)))
        for way in ways:
            if self._run_clean(way):
                if way.run is _eager:
                    self._poison_allocations(way)
                self._poison_outputs(way)
                self._poison_sources(way)
                self._poison(way, exposed.beyond(step.subject, step.key), "a prep has the rows of its bucket only")
                self._poison(way, look.undeclared, _DECLARE)

    def _run_clean(self, way: Way) -> bool:
        """Run a step twice; tell whether it gives the same, so that it can be compared with."""
        step = self._step
        try:
            way.clean = snapshot(way.run(step))
            way.result = way.run(step)
        except Exception as error:
            note_error(step, error, self._evidence, way.name)
            return False
        changed = way.difference(way.result, step)
        if changed is None:
            return True
        text = f"{step}, {way.name}: two runs of one step differ, before anything was poisoned: {changed}"
        reached = [str(target) for target in self._look.undeclared]
        if way.name == "glued":
            advice = f"state is carried from run to run, in one of {reached}" if reached else "state is carried"
            self._evidence.fail("unsteady", f"{text}; {advice}: {_DECLARE}")
        else:
            self._evidence.unseen("unsteady eager", text)
        return False

    def _poison(self, way: Way, targets: list[Target], advice: str) -> None:
        """Poison all targets at once, and where that shows, one by one to name which.

        Raises what leaves the device unusable.
        """
        for variant in range(garbage.NUM_VARIANTS):
            if not targets or self._changed(way, targets, variant) is None:
                continue
            self._check_device(f"with legal garbage in {[str(one) for one in targets]}")
            guilty = [one for one in targets if self._changed(way, [one], variant)]
            for one in guilty or targets:
                changed = self._changed(way, [one] if guilty else targets, variant)
                self._note_garbage(way, one, f"{changed}; {advice}")
            targets = [one for one in targets if one not in guilty]

    def _note_garbage(self, way: Way, one: Target, changed: str) -> None:
        address = one.tensor.untyped_storage().data_ptr()
        _, operation, where = self._look.watch.foreign.get(address, (None, None, None))
        fields = {"op": operation, "where": where} if where else {}
        text = f"{self._step}, {way.name}: with legal garbage in {one}, {changed}"
        self._evidence.fail(one.name, text, tensor=spell_tensor(one.tensor), **fields)

    def _changed(self, way: Way, targets: Iterable[Target], variant: int) -> str | None:
        return self._under(way, [(one.memory, garbage.variant_of(one.memory, variant)) for one in targets], self._step)

    def _under(self, way: Way, changes: Iterable[tuple[torch.Tensor, torch.Tensor]], step: Step) -> str | None:
        """Say how the result differs while memory holds other contents. What raises then depends on them too."""
        try:
            with overwritten(changes):
                seen = snapshot(way.run(step))
                step.subject.arena.device.synchronize()
        except Exception as error:
            return f"it raised {spell_error(error)}"
        return way.difference(seen, self._step)

    def _check_device(self, about: str) -> None:
        """Stop where a prep has left the device unusable: nothing that runs on it says anything now."""
        try:
            self._step.subject.arena.device.synchronize()
        except Exception as error:
            self._evidence.fail("device", f"{self._step}: {about}, {spell_error(error)}; the device is unusable now")
            raise

    def _poison_allocations(self, way: Way) -> None:
        """Fill what the prep allocates and does not write, such as torch.empty."""
        with garbage.Allocations(poisoned=True) as allocations:
            changed = self._under(Way(way.name, Step.eager, clean=way.clean), (), self._step)
        if changed:
            text = f"with NaN or out-of-range values in memory that was allocated and not written, {changed}; write it"
            place = {"where": allocations.places[0]} if allocations.places else {}
            self._evidence.fail("allocations", f"{self._step}, {way.name}: {text}", **place)

    def _poison_sources(self, way: Way) -> None:
        """Hand sources in as the first rows of longer buffers, over slots whose tails an earlier step filled."""
        step, subject = self._step, self._step.subject
        full = [raw for raw in subject.raws(step.key) if raw.requests]
        if not step.raw.requests:
            return
        earlier = Step.drawn(subject, step.key, max(full), seed=2)

        def changed(names: Iterable[str]) -> str | None:
            given = {name: _longer(tensor) if name in names else tensor for name, tensor in step.sources.items()}
            row_tokens = getattr(step.sources, "row_tokens", ())
            earlier.fill()
            return self._under(way, (), Step(subject, step.key, step.raw, Sources(given, row_tokens)))

        if found := changed(step.sources):
            guilty = [name for name in step.sources if changed([name])]
            text = f"with garbage behind the real rows of sources {guilty or list(step.sources)}, {found}"
            self._evidence.fail("sources", f"{step}, {way.name}: {text}")

    def _poison_outputs(self, way: Way) -> None:
        """Fill the outputs with what no run computes, run, and look which leaves still hold it."""
        named = [(name, leaf) for name, leaf in trees.named_leaves(way.result) if isinstance(leaf, torch.Tensor)]
        handed = exposed.addresses_of_twin(self._step.subject)
        mine = [(name, leaf) for name, leaf in named if not memory.addresses(leaf) & handed]
        targets, _ = garbage.targets_of(mine, self._look.read_only)
        changes = [(target.memory, garbage.sentinel_of(target.memory)) for target in targets]
        try:
            with overwritten(changes):
                seen = way.run(self._step)
                way.untouched = _untouched(seen, {t.name: c for t, (_, c) in zip(targets, changes)}, targets)
                changed = way.difference(snapshot(seen), self._step)
        except Exception as error:
            changed = f"it raised {spell_error(error)}"
        if changed:
            text = f"with NaN or out-of-range values in the outputs before the run, {changed}; write every row"
            self._evidence.fail("outputs", f"{self._step}, {way.name}: {text}")
        self._note_untouched(way)

    def _note_untouched(self, way: Way) -> None:
        """Judge leaves that no run computes: results of an earlier run, or constants."""
        for name, leaf in trees.named_leaves(way.result):
            if name not in way.untouched:
                continue
            owners = [
                str(one) for one in self._look.undeclared if memory.addresses(one.tensor) & memory.addresses(leaf)
            ]
            axis = self._step.subject.declared.outputs.get(name, Axis.FIXED)
            text = f"{self._step}, {way.name}: leaf {name!r} is not computed by a run, it is {owners or 'kept memory'}"
            memoised = bool(memory.addresses(leaf) & memory.addresses(self._look.derived.kept()))
            if axis is not Axis.FIXED or memoised:
                advice = "a result of an earlier run, or rows that follow no slot: compute it in every run"
                self._evidence.fail(f"leaf {name}", f"{text}; {advice}", tensor=spell_tensor(leaf))
            else:
                advice = "nothing tells a constant from a result of an earlier run; declare a table and return that"
                self._evidence.unseen(f"leaf {name}", f"{text}; {advice}", tensor=spell_tensor(leaf))


def _eager(step: Step) -> Any:
    """Run a step eagerly; memory that nothing writes reads as zero, so that two runs are alike."""
    with garbage.Allocations(poisoned=False):
        return step.eager()


def _untouched(seen: Any, sentinels: dict[str, torch.Tensor], targets: list[Target]) -> set[str]:
    """Name the leaves whose memory a run left as it was poisoned."""
    leaves, found = dict(trees.named_leaves(seen)), set()
    for target in targets:
        leaf = leaves.get(target.name)
        same = isinstance(leaf, torch.Tensor) and leaf.data_ptr() == target.memory.data_ptr()
        if same and first_difference(sentinels[target.name], target.memory) is None:
            found.add(target.name)
    return found


def _without(tree: Any, names: set[str]) -> Any:
    leaves, structure = trees.flatten(tree)
    named = [name for name, _ in trees.named_leaves(tree)]
    return trees.unflatten([None if name in names else leaf for name, leaf in zip(named, leaves)], structure)


def _longer(tensor: torch.Tensor) -> torch.Tensor:
    """Give the same values as the start of a buffer that goes on with other legal ones."""
    if not tensor.numel():
        return tensor
    rest = garbage.variant_of(tensor, 0)
    return torch.cat([tensor.reshape(-1), rest.reshape(-1)])[: tensor.numel()].view(tensor.shape)
