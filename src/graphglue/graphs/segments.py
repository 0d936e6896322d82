"""Segmented recordings: graphs with eager breaks between them.

What can not be captured (attention over variable lengths) is marked by ``eager_break``. While a segmented
recording is on, a call of a marked function ends the segment, runs the function and opens the next; anywhere
else, inside a plain recording and inside another break too, it is a plain call.

So that a break sees real values, each segment is replayed once as soon as it has ended: recording runs the
callable for real up to its last break. Work in the last segment does not happen. ``launch=False`` leaves that out.

Per-step state reaches a break through objects that live longer than a step (a context, static buffers). Its
tensors are held by address where the pool owns them, and as they are otherwise; tensors that hide inside other
objects stay what they were. Replaying a plain recording of the same pool inside a break is not noticed, and
overwrites what later segments read.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext
from typing import Any, NoReturn, Protocol

import torch

from graphglue.errors import CaptureError, ContractError, GraphGlueError
from graphglue.graphs import session
from graphglue.graphs.ambient import Ambient, without_modes
from graphglue.graphs.base import Recorder, Recording
from graphglue.graphs.breaks import Break
from graphglue.graphs.guard import Guard, blame
from graphglue.graphs.marks import Mark, Reaching, breaks_reached, difference, eager_break
from graphglue.graphs.segmented import Launch, SegmentedRecording

__all__ = ["Parts", "SegmentedRecording", "breaks_reached", "eager_break", "record_segments"]


class Parts(Protocol):
    """Records the segments of one callable, one behind the other."""

    rules: Guard

    @property
    def device(self) -> torch.device:
        """The device that is recorded."""

    @property
    def pool(self) -> Hashable:
        """What tells memory pools apart."""

    def around(self) -> AbstractContextManager[None]:
        """Make the recorder's stream current."""

    def call(self, run: Callable[[], Any]) -> Any:
        """Run the callable under the recorder's guards; its errors come out as ``CaptureError``."""

    def begin(self) -> None:
        """Open a segment."""

    def refusal(self) -> str | None:
        """Say why a segment can not end here; None if it can."""

    def end(self, outputs: Any) -> Recording:
        """End the open segment."""

    def abandon(self) -> None:
        """Drop the open segment."""

    def owns(self, tensor: torch.Tensor) -> bool:
        """Tell whether a tensor lies in memory that the pool hands out again."""

    def alias(self, tensor: torch.Tensor) -> torch.Tensor:
        """Give the same memory in a tensor that does not keep the pool from using it again."""

    def launch(self, recording: Any) -> Callable[[], None] | None:
        """Give what replays a segment; None if it holds no work."""


def record_segments(
    recorder: Recorder,
    run: Callable[[], Any],
    *,
    strict: bool = True,
    like: Sequence[str] | None = None,
    barrier: Callable[[], None] | None = None,
    during: Callable[[], AbstractContextManager[Any]] = nullcontext,
    launch: bool = True,
) -> SegmentedRecording:
    """Record ``run`` in segments, split at the calls of marked functions.

    Args:
        recorder: the tape or the CUDA recorder; inside its ``session``, as for a plain recording.
        run: the callable; it has run before with the same shapes, for real.
        strict: as for ``Recorder.record``. Without it side streams are the callable's to join before a break.
        like: the breaks to be reached, in order: those of another bucket, of another rank, or of the warm-up
            (``breaks_reached``).
        barrier: called before each segment runs while recording, and with it the break behind it, so that ranks meet.
        during: gives a context manager around each break's function while recording.
        launch: replay each segment as it ends, so that the break behind it sees real values. Off where nothing that
            was captured may run yet; such a break sees whatever lies in its arguments' memory, so give it a ``stub``
            if that can hurt.

    Raises:
        CaptureError: a segment holds what can not be recorded; a break raised, returned what can not be held, was
            reached on a side stream, or in another order than ``like``. The recorder stays usable.
        ContractError: a break does not keep to what its mark declares.

    Sync: none of its own. Capturable: no.
    """
    open_parts = getattr(recorder, "parts", None)
    if open_parts is None:
        raise CaptureError(f"a {type(recorder).__name__} records no segments; it needs a method parts(strict)")
    with ExitStack() as stack:
        stack.enter_context(session.alone("segmented recording"))
        stack.enter_context(session.held_collection())
        return _Splitting(open_parts, strict, like, barrier, during, launch).record(run)


class _Splitting:
    """One segmented recording while it is made."""

    def __init__(
        self,
        open_parts: Callable[[bool], Parts],
        strict: bool,
        like: Sequence[str] | None,
        barrier: Callable[[], None] | None,
        during: Callable[[], AbstractContextManager[Any]],
        launch: bool,
    ) -> None:
        self._parts, self._like, self._barrier, self._during = open_parts(strict), like, barrier, during
        self._may_launch = launch
        self._segments: list[Recording] = []
        self._launches: list[Launch | None] = []
        self._breaks: list[Break] = []
        self._names: list[str] = []
        self._recording = ExitStack()
        self._is_open = False

    def record(self, run: Callable[[], Any]) -> SegmentedRecording:
        """Run the callable; give what was recorded, or leave nothing behind."""
        with self._parts.around():
            try:
                self._open()
                with Reaching(self._reach):
                    outputs = self._parts.call(run)
                if self._like is not None and (changed := difference(self._like, self._names)):
                    raise CaptureError(f"the callable takes another way than expected: {changed}")
                self._close(outputs)
            except BaseException:
                self._drop()
                raise
            return SegmentedRecording(self._parts.pool, self._segments, self._launches, self._breaks)

    def _reach(self, mark: Mark, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Do what a marked function does here. A failure stays one, though the callable may swallow it."""
        if self._parts.rules.refusal is not None:
            raise self._parts.rules.refusal
        try:
            return self._split(mark, args, kwargs)
        except Exception as error:
            self._refuse(mark, error)

    def _refuse(self, mark: Mark, error: Exception) -> NoReturn:
        what = str(error) if isinstance(error, GraphGlueError) else f"it raised at {blame(error)}: {error!r}"
        name = f"break {len(self._names) - 1} ({mark.name!r})"
        kind = ContractError if isinstance(error, ContractError) else CaptureError
        refusal = kind(what if what.startswith("break ") else f"{name}: {what}")
        self._parts.rules.refusal = refusal
        raise refusal from error

    def _split(self, mark: Mark, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        self._names.append(mark.name)
        self._check_order()
        if why := self._parts.refusal():
            raise CaptureError(f"{why}; join the side stream before the break")
        self._close(None)
        ambient = Ambient.here(self._parts.device.type)
        with without_modes(), Reaching(None):
            step = Break(mark, mark.bind(args, kwargs), self._parts, ambient, len(self._breaks))
            self._check_rows(step)
            if self._barrier is not None:
                self._barrier()
            if self._may_launch and (launch := self._launches[-1]) is not None:
                launch()
            with self._during():
                result = step.first()
        self._open()
        seen = step.bridge(result)
        self._breaks.append(step)
        return seen

    def _check_order(self) -> None:
        place = len(self._names) - 1
        if self._like is None or list(self._like[place : place + 1]) == self._names[place:]:
            return
        expected = repr(self._like[place]) if place < len(self._like) else "no further break"
        raise CaptureError(f"it is reached where {expected} was expected; breaks keep one order")

    def _check_rows(self, step: Break) -> None:
        known = next((other for other in self._breaks if other.rows is not None), step)
        if step.rows is not None and step.rows != known.rows:
            raise ContractError(
                f"{step} has {step.rows} row-aligned rows, {known} has {known.rows}; they share one count"
            )

    def _open(self) -> None:
        self._recording.enter_context(session.alone("recording"))
        try:
            self._parts.begin()
        except BaseException:
            self._recording.close()
            raise
        self._is_open = True

    def _close(self, outputs: Any) -> None:
        """End the open segment, and bring the break before it to its bridges."""
        self._is_open = False
        try:
            segment = self._parts.end(outputs)
        finally:
            self._recording.close()
        self._segments.append(segment)
        with without_modes():
            self._launches.append(self._parts.launch(segment))
            if self._breaks:
                self._breaks[-1].settle()

    def _drop(self) -> None:
        if self._is_open:
            self._is_open = False
            try:
                self._parts.abandon()
            finally:
                self._recording.close()
        for segment in self._segments:
            segment.close()
