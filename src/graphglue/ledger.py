"""The ledger: what ran, where, and why."""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from graphglue.core.buckets import Bucket
from graphglue.core.keys import Key
from graphglue.core.routing import Decision, Reason, Route

logger = logging.getLogger("graphglue")

# Fallbacks that were asked for by a declaration are counted, but are no news.
_EXPECTED = frozenset({Reason.IDLE_EAGER, Reason.IDLE_SKIPPED, Reason.NO_FORWARD_GRAPH, Reason.DISABLED})


@dataclass(slots=True)
class Tally:
    """Count the steps of one route at one bucket; all exact steps of a route share one.

    ``launch`` says how they run: None where preps or forward run eagerly, "" in one launch, and
    otherwise why they can not. ``key`` is the key whose graphs they replay; None where they replay none.
    """

    decision: Decision
    bucket: Bucket | None
    launch: str | None = None
    key: Key | None = None
    steps: int = 0
    real_tokens: int = 0
    bucket_tokens: int = 0


class Ledger:
    """Count every step, and log each fallback's reason once. Counters only grow."""

    def __init__(self, max_decisions: int = 32) -> None:
        self._tallies: dict[Any, Tally] = {}
        self._last: deque[Decision] = deque(maxlen=max_decisions)
        self._told: set[Reason] = set()

    def tally(self, decision: Decision, exact: bool, launch: str | None = None) -> Tally:
        """Give the counter of a decision; an engine meets any number of exact extents, so those share one."""
        bucket = None if exact else decision.bucket
        replayed = _replayed(decision)
        return self._tallies.setdefault(
            (*_route(decision), bucket, launch, replayed), Tally(decision, bucket, launch, replayed)
        )

    def note(self, tally: Tally, decision: Decision, raw: Bucket) -> None:
        """Count one step."""
        tally.steps += 1
        tally.real_tokens += raw.tokens
        tally.bucket_tokens += decision.bucket.tokens
        self._last.append(decision)
        if tally.steps == 1:
            self._tell(decision, raw)

    def counters(self) -> dict[str, Any]:
        """Give all counters, JSON-ready."""
        fields = ("prep", "forward", "reason", "forward_reason", "bucket")
        tallies = self._noted()
        routes: dict[Any, list[Tally]] = {}
        for tally in tallies:
            routes.setdefault((*_route(tally.decision), tally.bucket), []).append(tally)
        return {
            **_sums(tallies),
            "one_launch": sum(tally.steps for tally in tallies if tally.launch == ""),
            "launch_fallbacks": _summed((tally.launch, tally.steps) for tally in tallies if tally.launch),
            "routes": [{**_plain(fields, route), **_sums(those)} for route, those in routes.items()],
            "last_decisions": [_plain(fields, (*_route(one), one.bucket)) for one in list(self._last)],
        }

    def replays(self) -> dict[Key, int]:
        """Count the steps that replayed a graph of each key."""
        return _summed((tally.key, tally.steps) for tally in self._noted() if tally.key is not None)

    def _noted(self) -> list[Tally]:
        # Copied in one go, because another thread may be counting.
        return [tally for tally in list(self._tallies.values()) if tally.steps]

    def _tell(self, decision: Decision, raw: Bucket) -> None:
        eager = decision.reason if decision.prep is Route.EAGER else None
        for what, reason in (("prep", eager), ("forward", decision.forward_reason)):
            if reason is None or reason in self._told:
                continue
            self._told.add(reason)
            level = logging.INFO if reason in _EXPECTED else logging.WARNING
            text = "the %s of a step ran eagerly: %s (%d requests and %d tokens, run as %s); others are only counted"
            logger.log(level, text, what, reason.value, raw.requests, raw.tokens, decision.key)


def _summed(counts: Iterable[tuple[Any, int]]) -> dict[Any, int]:
    total: dict[Any, int] = {}
    for key, count in counts:
        total[key] = total.get(key, 0) + count
    return total


def _sums(tallies: Iterable[Tally]) -> dict[str, int]:
    steps, real, bucket = (sum(counts) for counts in zip((0, 0, 0), *map(_counts, tallies)))
    return {"steps": steps, "real_tokens": real, "bucket_tokens": bucket, "padded_tokens": bucket - real}


def _counts(tally: Tally) -> tuple[int, int, int]:
    return tally.steps, tally.real_tokens, tally.bucket_tokens


def _replayed(decision: Decision) -> Key | None:
    """Give the key whose graphs a step replays: there are as many of those as were captured, and no more."""
    glued = any(prep.route is Route.GLUE for prep in decision.preps.values())
    return decision.key if glued or decision.forward is Route.GRAPH else None


def _route(decision: Decision) -> tuple[Any, ...]:
    return decision.prep, decision.forward, decision.reason, decision.forward_reason


def _plain(fields: tuple[str, ...], values: tuple[Any, ...]) -> dict[str, Any]:
    plain = {name: getattr(value, "value", value) for name, value in zip(fields, values)}
    plain["bucket"] = None if plain["bucket"] is None else list(plain["bucket"])
    return plain
