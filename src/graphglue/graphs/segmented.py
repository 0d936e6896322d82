"""What a segmented recording is, once it is made: launches and breaks in order."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from typing import Any

import torch

from graphglue.errors import BindError, ClosedError, DivergenceError
from graphglue.graphs import memory, session
from graphglue.graphs.base import Recording
from graphglue.graphs.breaks import Break
from graphglue.graphs.cuts import Cuts
from graphglue.graphs.marks import Reaching, breaks_reached, difference

Launch = Callable[[], None]
# The segment before a break, and the break: what is called, what takes its result in, and who it is.
Turn = tuple[Launch | None, Callable[[], Any], Callable[[Any], None] | None, Break]


class SegmentedRecording:
    """Segments and breaks of one callable, in order. It keeps alive all memory that its replays touch.

    Args:
        pool: tells memory pools apart.
        segments: the recorded segments, one more than breaks.
        launches: what replays each segment; None for an empty one.
        breaks: the breaks between them.

    Attributes:
        breaks: the names of its breaks, in order.
        segments: the recorded segments, one more than breaks; an empty one is not launched.
        rows: the padded rows of row-aligned breaks; None if there are none.
        unaligned: the names of breaks without row-aligned arguments, which run on padded rows too.
    """

    segments: tuple[Recording, ...]
    breaks: tuple[str, ...]
    rows: int | None
    unaligned: tuple[str, ...]

    def __init__(
        self,
        pool: Hashable,
        segments: Sequence[Recording],
        launches: Sequence[Launch | None],
        breaks: Sequence[Break],
    ) -> None:
        self.segments, self.breaks = tuple(segments), tuple(step.mark.name for step in breaks)
        self.pool, self.num_bytes = pool, sum(segment.num_bytes for segment in segments)
        self.unaligned = tuple(step.mark.name for step in breaks if step.rows is None)
        self.rows = next((step.rows for step in breaks if step.rows is not None), None)
        self._outputs = segments[-1].outputs
        self._first, self._last = launches[0], launches[-1] if breaks else None
        self._breaks: tuple[Break, ...] | None = tuple(breaks)
        self._ambient = breaks[0].ambient if breaks and len({step.ambient for step in breaks}) == 1 else None
        # The segment before each break; the first one is launched by itself.
        self._launches = (None, *launches[1:-1])
        cuts = Cuts()
        for step in breaks:
            step.join(cuts)
        self._whole = self._turns_at(None)
        self._cut: tuple[int | None, list[Turn]] = (None, self._whole)

    @property
    def first(self) -> Recording | None:
        """The segment that a fill may be joined with in one launch; None if a break comes first."""
        self._opened()
        return self.segments[0] if self._first is not None else None

    @property
    def segment_bytes(self) -> tuple[int, ...]:
        """Memory in bytes that each segment added."""
        return tuple(segment.num_bytes for segment in self.segments)

    @property
    def outputs(self) -> Any:
        """What the callable returned; computed by a replay."""
        self._opened()
        return self._outputs

    @property
    def reads(self) -> set[int]:
        """The addresses of what segments read before a segment wrote it."""
        return {address for segment in self.segments for address in getattr(segment, "reads", ())}

    def computes(self, tensor: torch.Tensor) -> bool | None:
        """Tell whether a segment writes the memory of a tensor; a break may too, so None for "not seen"."""
        return True if any(segment.computes(tensor) for segment in self.segments) else None

    def replay(
        self,
        real_rows: int | None = None,
        *,
        lead: Callable[[], None] | None = None,
        check: bool = False,
        keep_going: bool = False,
    ) -> None:
        """Run segments and breaks in order on the caller's current stream.

        Args:
            real_rows: how many rows row-aligned breaks see; all by default.
            lead: launched instead of the first segment: a launch that holds the fill, the preps and ``first``.
            check: also compare the padded rows of row-aligned arguments before and after each break.
            keep_going: run what follows a break that raised, because other ranks wait in it; then raise its error.

        Raises:
            BindError: more real rows than were recorded; nothing ran.
            SegmentError: a break raised.
            DivergenceError: a break returned something else than while recording, or wrote past the real rows.
            CaptureError: inside a recording, or inside a break of a recording of the same pool.

        After an error the next replay starts from the first segment. Sync: none; the device with ``check``.
        """
        self._opened()
        session.check_replayable()
        self._check_rows(real_rows)
        turns = self._whole if real_rows is None or real_rows == self.rows else self._turns(real_rows)
        raised: Exception | None = None
        with session.replaying(self.pool), Reaching(None):
            if (first := lead or self._first) is not None:
                first()
            if check or self._ambient is None:
                raised = _each(turns, real_rows if check and turns is not self._whole else None, keep_going)
            else:
                with self._ambient.on():
                    raised = _all(turns, keep_going)
            if self._last is not None:
                self._last()
        if raised is not None:
            raise raised

    def _turns(self, real_rows: int | None) -> list[Turn]:
        """Look up what is called once for a number of rows."""
        if self._cut[0] != real_rows:
            with memory.plain():  # what is cut now serves later replays, whatever is switched on around them
                self._cut = (real_rows, self._turns_at(real_rows))
        return self._cut[1]

    def _turns_at(self, real_rows: int | None) -> list[Turn]:
        return [(launch, *step.prepared(real_rows), step) for launch, step in zip(self._launches, self._opened())]

    def follow(self, run: Callable[[], Any]) -> None:
        """Call ``run`` eagerly and compare the breaks it reaches with those recorded.

        Raises:
            DivergenceError: another order or another number of breaks.

        Sync: what ``run`` does.
        """
        if changed := difference(self.breaks, breaks_reached(run)):
            raise DivergenceError(f"the callable takes another way than while it was recorded: {changed}")

    def close(self) -> None:
        """Drop segments, breaks, outputs and their memory. Calling it twice is fine."""
        self._breaks, self._outputs, self._first, self._last = None, None, None, None
        self._cut, self._whole, self._launches = (None, []), [], ()
        for segment in self.segments:
            segment.close()

    def _check_rows(self, real_rows: int | None) -> None:
        if real_rows is None or self.rows is None:
            return
        if isinstance(real_rows, bool) or not isinstance(real_rows, int) or not 0 <= real_rows <= self.rows:
            raise BindError(f"real_rows={real_rows!r}: this recording has {self.rows} rows; give 0 to {self.rows}")

    def _opened(self) -> tuple[Break, ...]:
        if self._breaks is None:
            raise ClosedError("this recording was closed; record the callable again")
        return self._breaks


def _all(turns: Sequence[Turn], keep_going: bool) -> Exception | None:
    """Run segments and breaks, all under one ambient; give the first error if one goes on."""
    raised: Exception | None = None
    left = iter(turns)
    while True:
        launched, running = False, None
        try:
            for launch, call, accept, step in left:
                launched = False
                if launch is not None:
                    launch()
                launched, running = True, step
                fresh = call()
                running = None
                if accept is not None:
                    accept(fresh)
                elif fresh is not None:
                    step.take(fresh, None)
            return raised
        except Exception as error:
            fault = error if running is None else running.failure(error)
            if not (keep_going and launched):  # behind a launch that failed nothing can go on
                if fault is error:
                    raise
                raise fault from error
            if fault is not error:
                fault.__cause__ = error
            raised = raised or fault  # the turn after this one is next


def _each(turns: Sequence[Turn], watched_rows: int | None, keep_going: bool) -> Exception | None:
    """Run segments and breaks, each under what was on where it was reached; give the first error if one goes on."""
    raised: Exception | None = None
    for launch, call, accept, step in turns:
        if launch is not None:
            launch()
        try:
            with step.ambient.on():
                step.run((call, accept), watched_rows if step.rows is not None else None)
        except Exception as error:
            if not keep_going:
                raise
            raised = raised or error
    return raised
