"""Steps: one step of a prep over the twin, run eagerly, by replay, or unpadded, as often as a check wants.

Slots are filled, tables restored and random numbers seeded anew before each run, so that two runs of one
step differ only where the prep differs.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch

from graphglue.audit.evidence import Evidence, spell_error
from graphglue.audit.subject import Subject, Unseen
from graphglue.core import trees
from graphglue.core.buckets import Bucket
from graphglue.core.differences import spell_step
from graphglue.core.keys import Key
from graphglue.errors import CaptureError
from graphglue.graphs.base import Recording


@dataclass(frozen=True)
class Step:
    """One step at a key.

    Attributes:
        subject: whose prep is run.
        key: where it is run.
        raw: the real extents.
        sources: what a batch hands in.
    """

    subject: Subject
    key: Key
    raw: Bucket
    sources: Mapping[str, torch.Tensor]

    @classmethod
    def drawn(cls, subject: Subject, key: Key, raw: Bucket, seed: int = 0) -> Step:
        """Draw a step."""
        return cls(subject, key, raw, subject.sources(raw, seed))

    def __str__(self) -> str:
        return spell_step(self.key, self.raw)

    def fill(self) -> None:
        """Fill the twin's slots. Sync: none."""
        self.subject.fill(self.key, self.raw, self.sources)

    def eager(self) -> Any:
        """Call the prep over the filled slots; what it returns may be memory of its own or of a slot."""
        self.fill()
        return self._run(lambda: self.subject.call(self.subject.view(self.key)))

    def replayed(self, recording: Recording) -> Any:
        """Replay a recording over the filled slots; give its outputs."""
        self.fill()
        self._run(recording.replay)
        return recording.outputs

    def unpadded(self) -> Any:
        """Call the prep over fresh tensors of the real extents."""
        view = self.subject.exact_view(self.raw, self.sources, self.key)
        return self._run(lambda: self.subject.call(view))

    def _run(self, run: Callable[[], Any]) -> Any:
        if self.subject.declared.effects:
            self.subject.restore()
        with _seeded(self.subject):
            return run()


def snapshot(tree: Any) -> Any:
    """Copy the tensors of a tree, which the next run may rewrite."""
    return trees.map_tensors(torch.clone, tree)


def recorded(step: Step, evidence: Evidence) -> Recording | None:
    """Record at a step's key; None where that is refused, which is noted as not looked at."""
    try:
        step.fill()
        return step.subject.record(step.key)
    except CaptureError as error:
        evidence.unseen("recording", f"{spell_step(step.key)}: not recorded, so only the eager prep was run: {error}")
        return None
    finally:
        step.subject.restore()


def note_error(step: Step, error: Exception, evidence: Evidence, what: str) -> None:
    """Note that the prep raised in a clean run: a fault, unless the values it was given were guessed.

    Raises:
        Unseen: that is what the error is.
    """
    if isinstance(error, Unseen):
        raise error
    text = f"{step}: the {what} prep raised {spell_error(error)}"
    if step.subject.guessed and step.subject.runs_on_pads():
        slots = list(step.subject.guessed)
        evidence.unseen(what, f"{text}; values of slots {slots} were guessed: state Slot.valid, or hand batches in")
    else:
        evidence.fail(what, text)


@contextmanager
def _seeded(subject: Subject) -> Iterator[None]:
    """Seed torch's generators, and put them back."""
    if subject.on_gpu:
        with torch.random.fork_rng(devices=[subject.arena.device.torch_device]):
            torch.manual_seed(0)
            yield
        return
    generator = torch.default_generator  # torch.manual_seed takes milliseconds where CUDA was not initialised
    state = generator.get_state()
    try:
        generator.manual_seed(0)
        yield
    finally:
        generator.set_state(state)
