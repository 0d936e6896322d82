"""The ring: one tuple a step, of values that exist anyway; spelled out only when somebody asks."""

from __future__ import annotations

from collections import deque
from typing import Any

from graphglue.core.buckets import Bucket
from graphglue.core.routing import Decision
from graphglue.flight.record import FlightPlan, FlightRecord, FlightStep
from graphglue.ledger import Ledger, Tally
from graphglue.ranks.plan import RankPlan

_NUM_NOTED = 3  # steps that an error's notes spell out


class FlightLedger(Ledger):
    """Count every step as a ledger does, and keep the last ones.

    Args:
        max_steps: how many.
    """

    def __init__(self, max_steps: int) -> None:
        super().__init__()
        self.max_steps = max_steps
        self._ring: deque[tuple[Any, ...]] = deque(maxlen=max_steps)
        self._plan: RankPlan | None = None
        self._num_agreed = 0

    def meet(self) -> None:
        """Number the agreement that begins: it is the same number on every rank."""
        self._num_agreed += 1
        self._plan = None

    def agree(self, plan: RankPlan) -> None:
        """Take in what the ranks agreed on for the step that comes."""
        self._plan = plan

    def note(self, tally: Tally, decision: Decision, raw: Bucket) -> None:
        """Count one step, and keep it. Told apart from its parent's only by the ring: a call costs more than all."""
        tally.steps += 1
        tally.real_tokens += raw.tokens
        tally.bucket_tokens += decision.bucket.tokens
        self._last.append(decision)
        self._ring.append((decision, raw, tally.launch, self._num_agreed, self._plan))
        if tally.steps == 1:
            self._tell(decision, raw)

    def raised(self, error: BaseException, batch: Any = None, forward: bool = True) -> None:
        """Keep that a step raised, and tell the error what came before it; its batch is kept by a subclass."""
        before = self.steps()[-_NUM_NOTED:]
        self._ring.append((f"{type(error).__name__}: {error}", None, None, self._num_agreed, self._plan))
        lines = [f"flight recorder, the last {len(before)} steps before this one:", *(one.spelled() for one in before)]
        _add_note(error, "\n  ".join(lines) + "\nrunner.flight_record() has them all")

    def steps(self) -> tuple[FlightStep, ...]:
        """Spell out what is kept, the oldest first."""
        kept = list(self._ring)  # copied in one go, because another thread may be counting
        number = sum(tally.steps for tally in self._noted()) - sum(one[1] is not None for one in kept)
        spelled = []
        for decision, raw, launch, agreed, plan, *more in kept:
            number += raw is not None
            step = spelled_step(agreed or number + (raw is None), decision, raw, launch, plan)
            taken, results = more or (None, None)
            batch = None if taken is None else taken.spelled()
            spelled.append(step.model_copy(update={"batch": batch, "results": results}))
        return tuple(spelled)

    def record(self, rank: int = 0, num_ranks: int = 1, device: str | None = None) -> FlightRecord:
        """Give the artifact."""
        return FlightRecord(device=device, rank=rank, num_ranks=num_ranks, steps=self.steps())


def spelled_step(
    number: int, decision: Decision | str, raw: Bucket | None, launch: str | None = None, plan: RankPlan | None = None
) -> FlightStep:
    """Spell a step out, or the error that ended it."""
    agreed = None if plan is None else _spelled_plan(plan)
    if isinstance(decision, str) or raw is None:
        return FlightStep(number=number, plan=agreed, raised=str(decision))
    key, why = decision.key, decision.forward_reason
    return FlightStep(
        number=number,
        prep=decision.prep.value,
        forward=decision.forward.value,
        reason=decision.reason.value,
        forward_reason=None if why is None else why.value,
        mode=key.mode.value,
        bucket=tuple(decision.bucket),
        raw=tuple(raw),
        variant=repr(key.variant),
        padding=None if key.padding is None else str(getattr(key.padding, "value", key.padding)),
        launch=launch,
        plan=agreed,
    )


def _spelled_plan(plan: RankPlan) -> FlightPlan:
    return FlightPlan(
        bucket=tuple(plan.bucket),
        mode=plan.mode.value,
        forward=plan.forward.value,
        padding=plan.padding.value,
        counts=tuple(int(count) for count in plan.counts),
        reason=plan.reason.value,
        digest=int(plan.digest),
    )


def _add_note(error: BaseException, note: str) -> None:
    if hasattr(error, "add_note"):
        error.add_note(note)
    else:  # Python 3.10 shows none, but keeps them for whoever looks
        error.__notes__ = [*getattr(error, "__notes__", ()), note]  # type: ignore[attr-defined]
