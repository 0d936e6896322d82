"""The ledger: what ran, where, and why."""

from __future__ import annotations

import logging
from collections import Counter, deque
from typing import Any

from graphglue.core.buckets import Bucket
from graphglue.core.routing import Decision, Reason, Route

logger = logging.getLogger("graphglue")

# Fallbacks that were asked for by a declaration are counted, but are no news.
_EXPECTED = frozenset({Reason.IDLE_EAGER, Reason.IDLE_SKIPPED, Reason.NO_FORWARD_GRAPH, Reason.DISABLED})


class Ledger:
    """Count every step, and log each fallback's reason once. Counters only grow."""

    def __init__(self, max_decisions: int = 32) -> None:
        self._steps: Counter[tuple[Any, ...]] = Counter()
        self._real_tokens = 0
        self._bucket_tokens = 0
        self._last: deque[Decision] = deque(maxlen=max_decisions)
        self._told: set[Reason] = set()

    def note(self, decision: Decision, raw: Bucket) -> None:
        """Count one step."""
        self._steps[decision.prep, decision.forward, decision.reason, decision.forward_reason, decision.bucket] += 1
        self._real_tokens += raw.tokens
        self._bucket_tokens += decision.bucket.tokens
        self._last.append(decision)
        if decision.prep is not Route.GLUE or decision.forward_reason is not None:
            self._tell(decision, raw)

    def counters(self) -> dict[str, Any]:
        """Give all counters, JSON-ready."""
        fields = ("prep", "forward", "reason", "forward_reason", "bucket")
        return {
            "steps": sum(self._steps.values()),
            "real_tokens": self._real_tokens,
            "bucket_tokens": self._bucket_tokens,
            "routes": [{**_plain(fields, key), "steps": count} for key, count in self._steps.items()],
            "last_decisions": [
                _plain(fields, (d.prep, d.forward, d.reason, d.forward_reason, d.bucket)) for d in self._last
            ],
        }

    def _tell(self, decision: Decision, raw: Bucket) -> None:
        eager = decision.reason if decision.prep is Route.EAGER else None
        for what, reason in (("prep", eager), ("forward", decision.forward_reason)):
            if reason is None or reason in self._told:
                continue
            self._told.add(reason)
            if reason not in _EXPECTED:
                text = "the %s of a step ran eagerly: %s (real %s, bucket %s, key %s); further ones are only counted"
                logger.warning(text, what, reason.value, tuple(raw), tuple(decision.bucket), tuple(decision.key))


def _plain(fields: tuple[str, ...], values: tuple[Any, ...]) -> dict[str, Any]:
    plain = {name: getattr(value, "value", value) for name, value in zip(fields, values)}
    plain["bucket"] = list(plain["bucket"])
    return plain
