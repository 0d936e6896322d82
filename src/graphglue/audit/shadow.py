"""The shadow check: while serving, hold sampled glued steps against a twin, bit for bit, and never wait.

A sampled step is launched part by part: the twin's slots, the fill, then for each glued prep its twin and the
prep itself, the comparison, and last the forward. One launch that holds no forward is compared as it is. What was
found is copied to the host behind all that, and read by a later step once it is there. Which steps are sampled is
a pure function of their numbers.
"""

from __future__ import annotations

import logging
import threading
from collections import Counter, deque
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from graphglue.audit.bits import Comparison, Shape
from graphglue.audit.sample import Mismatch, Sample
from graphglue.audit.twin import Pair, Twin
from graphglue.capture import Capture
from graphglue.config import Shadow
from graphglue.core.buckets import Bucket
from graphglue.core.differences import spell_step
from graphglue.core.keys import Key
from graphglue.core.routing import Route, State
from graphglue.device.arena import Arena
from graphglue.errors import DivergenceError
from graphglue.lanes import Lane
from graphglue.units import Unit, Views

logger = logging.getLogger("graphglue")

USED_UP = "an adopted forward that draws random numbers is launched behind its own fill only"
RANDOM = "a prep draws random numbers, which a twin would draw once more"
CAPTURING = "the caller's stream was being captured"
_FILL_ADVICE = "this bucket is filled by torch operations from now on, and its preps run eagerly until maintain()"
_PREP_ADVICE = "it runs eagerly at this key until maintain() records it anew; look for what it reads besides its view"
_MAX_TOLD = 8


class ShadowCheck:
    """Sample the glued steps of one runner, and act on what differs.

    Args:
        rule: which steps, and what a mismatch does.
        arena: the slots.
        units: the preps.
        views: builds the preps' views.
        capture: holds the launches of each key.

    Attributes:
        step: glued steps of the runner so far, counted by the stepper.
        next: the next of them that is sampled whatever its key.
        pending: samples whose verdict nobody has read, the oldest first.
        error: what the next step raises.
    """

    def __init__(self, rule: Shadow, arena: Arena, units: Sequence[Unit], views: Views, capture: Capture) -> None:
        self.step, self.next = 0, rule.every
        self.pending: deque[Sample] = deque()
        self.error: DivergenceError | None = None
        self._rule, self._arena, self._units, self._views, self._capture = rule, arena, units, views, capture
        self._comparison = Comparison(arena.device.torch_device)
        self._of_key: dict[Key, int] = {}
        self._rebound: dict[Any, Any] = {}
        self._refilled: set[Bucket] = set()
        self._warned: set[Any] = set()
        self._lock = threading.Lock()  # held while counters change; never while anything is waited for
        self._count: Counter[str] = Counter()
        self._skipped: Counter[str] = Counter()
        self._told: deque[Mismatch] = deque(maxlen=_MAX_TOLD)
        self._failure: str | None = None

    # Which steps.

    def watch(self, lane: Lane, agreed: bool = False) -> None:
        """Have the steps of a lane counted: those with a glued prep, or all that ranks agreed to run as graphs.

        Which preps are glued is each rank's own, and all ranks sample the same steps.
        """
        if _has_glued(lane) or (agreed and lane.facts.agreed is None):
            lane.shadow = self
            lane.young = self._of_key.get(lane.decision.key, 0) < self._rule.first

    def samples(self, lane: Lane) -> bool:
        """Tell whether the step that was just counted is sampled; a pure function of its two numbers."""
        key = lane.decision.key
        of_key = self._of_key[key] = self._of_key.get(key, 0) + 1
        lane.young = of_key < self._rule.first
        if self.step == self.next:
            self.next += self._rule.every
        if not self._rule.samples(of_key, self.step) or not _has_glued(lane):
            return False
        why_not = self._why_not(key)
        if why_not is not None:
            self._skipped[why_not] += 1
        return why_not is None

    def _why_not(self, key: Key) -> str | None:
        if self._arena.device.is_capturing():
            return CAPTURING
        if key in self._capture.used_up:
            return USED_UP
        return RANDOM if self._capture.drawing_part(key) == "prep" else None

    def forget(self) -> None:
        """Begin again with the first steps of each key; every key was dropped."""
        self._of_key.clear()
        self._rebound.clear()

    def restore(self) -> None:
        """Make anew what the comparison keeps on the device; its contents were lost. Sync: none."""
        self._comparison = Comparison(self._arena.device.torch_device)

    # One sampled step.

    def begin(self, lane: Lane, sources: Mapping[str, Any], rank_counts: Sequence[int] | None = None) -> Twin:
        """Fill the twin's slots from what was bound, before the step's own are filled. Sync: none."""
        twin = Twin(self._arena, self._units, self._views, lane.decision, lane.raw, self._rebound)
        twin.fill(sources, rank_counts)
        return twin

    def check(self, twin: Twin) -> None:
        """Queue the comparison and the copy of its result to the host, before the forward. Sync: none."""
        groups, records = self._compare(twin)
        event = self._arena.device.read_event()
        self._arena.device.record_event(event)
        kept = [[(pair.what, Shape.of(pair.seen)) for pair in group] for group in groups]
        sample = Sample(twin.decision.key, twin.raw, kept, records, event, twin.broken, twin.failures)
        with self._lock:
            self._count["sampled"] += 1
            self._count["skipped_effects"] += twin.num_effects
            self.pending.append(sample)

    def _compare(self, twin: Twin) -> tuple[list[list[Pair]], torch.Tensor | None]:
        try:
            if not (groups := twin.groups()):
                return [], None
            found = self._comparison.first_partings([[pair[1:] for pair in group] for group in groups])
            with torch.inference_mode(False):
                records = torch.empty(found.shape, dtype=found.dtype, device="cpu", pin_memory=found.is_cuda)
            return groups, records.copy_(found, non_blocking=True)
        except Exception as error:  # out of memory, for one: the step goes on
            twin.failures.append(f"the comparison: {type(error).__name__}: {error}")
            return [], None

    # Verdicts.

    def settle(self, wait: bool = False) -> bool:
        """Read the verdicts that are there and act on them; tell whether the state of a key changed.

        Args:
            wait: wait for all of them. Sync: the events of the pending samples.

        Sync: none by default.
        """
        changed = False
        while self.pending and not self._arena.device.is_capturing():
            sample = self.pending[0]
            if wait:
                sample.event.synchronize()
            elif not sample.event.query():
                break
            mismatches = sample.mismatches()
            with self._lock:
                self.pending.popleft()
                self._count[sample.verdict(mismatches)] += 1
                self._told.extend(mismatches)
            self._note_failures(sample)
            for mismatch in mismatches:
                changed |= self._act(mismatch)
        return changed

    def raise_error(self) -> None:
        """Raise what the last verdicts ask for, once.

        Raises:
            DivergenceError: a sampled step differs from its twin; its preps are quarantined.
        """
        error, self.error = self.error, None
        if error is not None:
            raise error

    def stats(self) -> dict[str, Any]:
        """Count samples by verdict, JSON-ready; those on their way are waited for, and acted on by the next step.

        May be called by another thread than the one that serves. Sync: the events of the pending samples.
        """
        with self._lock:
            count, pending, told = self._count.copy(), list(self.pending), list(self._told)
        for sample in [] if self._arena.device.is_capturing() else pending:
            sample.event.synchronize()
            mismatches = sample.mismatches()
            count[sample.verdict(mismatches)] += 1
            told += mismatches
        verdicts = {name: count[name] for name in ("passed", "mismatched", "failed")}
        return {
            "sampled": count["sampled"],
            **verdicts,
            "pending": count["sampled"] - sum(verdicts.values()),
            "skipped_effects": count["skipped_effects"],
            "skipped": dict(self._skipped),
            "mismatches": [mismatch.plain() for mismatch in told[-_MAX_TOLD:]],
            "last_failure": self._failure,
        }

    def _note_failures(self, sample: Sample) -> None:
        for failure in sample.failures:
            if self._failure is None:
                text = "a sampled step could not be held against its twin, %s: %s; further ones are only counted"
                logger.warning(text, spell_step(sample.key, sample.raw), failure)
            self._failure = failure

    def _act(self, mismatch: Mismatch) -> bool:
        """Do what the rule says of a mismatch; tell whether the state of a key changed."""
        if self._rule.on_mismatch == "count":
            if (place := (mismatch.key, mismatch.prep)) not in self._warned:
                self._warned.add(place)
                logger.warning("%s; further ones there are only counted", mismatch.text)
            return False
        error = DivergenceError(f"{mismatch.text}; {_FILL_ADVICE if mismatch.prep is None else _PREP_ADVICE}")
        changed = self._refill(mismatch.key.bucket) if mismatch.prep is None else False
        changed |= self._quarantine(mismatch, error)
        if changed and self._rule.on_mismatch == "raise":
            self.error = self.error or error
        return changed

    def _quarantine(self, mismatch: Mismatch, error: DivergenceError) -> bool:
        """Send preps to the eager fallback: the one that differs, or all that stand behind a wrong fill."""
        keys = [mismatch.key]
        if mismatch.prep is None:
            keys += [key for key in self._capture.launches if key.bucket == mismatch.key.bucket]
        glued = [
            (unit, key)
            for key in dict.fromkeys(keys)
            for unit in self._units
            if mismatch.prep in (None, unit.name) and unit.cache.state(key) is State.CAPTURED
        ]
        for unit, key in glued:
            unit.cache.quarantine(key, error)
        self._capture.drop_launches(key for _, key in glued)
        return bool(glued)

    def _refill(self, bucket: Bucket) -> bool:
        """Have a bucket filled by the reference: the eager fallback reads the same slots."""
        if bucket in self._refilled:
            return False
        self._refilled.add(bucket)
        self._arena.fill_by_reference(bucket)
        return True


def _has_glued(lane: Lane) -> bool:
    return any(prep.route is Route.GLUE for prep in lane.decision.preps.values())
