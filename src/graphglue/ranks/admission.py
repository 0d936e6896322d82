"""Admission: what a rank states about its own step, before anything is agreed. Pure.

Rows 1 to 4 of the router's table (disabled, over the ladder, padding, waste) are decided by each rank alone, so
with ranks they are a vote: after the agreement none of them is asked again.
"""

from __future__ import annotations

from collections.abc import Iterable

from graphglue.core.batch import Mode
from graphglue.core.keys import KeySpace
from graphglue.core.routing import ADMISSION, PrepFacts, StepFacts
from graphglue.ranks.facts import RankFacts, missing_bit

_NO_PREP = PrepFacts(None)  # these rows look at the step alone


def admits(step: StepFacts) -> bool:
    """Tell whether this rank's own rows let the step's forward be a graph."""
    return not any(row.holds(step, _NO_PREP) for row in ADMISSION)


def stated(
    step: StepFacts,
    known: bool,
    missing: int,
    *,
    mode: Mode | None = None,
    extends: bool = False,
    joining: bool | None = None,
    extra: tuple[int, ...] = (),
) -> RankFacts:
    """State a step.

    Args:
        step: what this rank would decide it by, alone.
        known: its mode, shape and variant are among the captured ones.
        missing: a bit for each size that this rank has no graph of.
        mode: what it states instead of the step's own mode.
        extends: its runner's sizes count tokens.
        joining: whether it could run as a one-token extend beside a rank that prefills; None for a
            step that is no decode step, or a runner that can not extend.
        extra: the fields that the engine adds elsewhere.
    """
    raw, vote = step.raw, admits(step)
    joins = joining
    if step.idle:  # it takes any shape, but a runner for decode replays no prefill graph, nor the reverse
        joins, vote = extends and vote, vote and not extends
    return RankFacts(
        raw.requests,
        raw.tokens,
        mode or step.mode,
        vote=vote and (known or step.idle),
        row_tokens=None if step.idle or step.mode.counts_tokens else raw.row_tokens,
        prefill_vote=joins,
        convertible=joining is not None,
        missing=0 if extends else missing,
        missing_extend=missing if extends else 0,
        extra=extra,
    )


def missing_sizes(space: KeySpace, captured: Iterable[int]) -> int:
    """Give a bit for each size of the ladder that is not captured."""
    there = set(captured)
    return sum({missing_bit(position) for position, size in enumerate(space.ladder) if size not in there})


def mode_of(own: Mode, agreed: Mode, *, idle: bool, converted: bool) -> Mode:
    """Give the mode a rank runs in: its own, or the agreed one where it has nothing of its own or is converted."""
    return agreed if idle or converted else own
