"""The ledger: counters that only grow, and one line of log per reason."""

from __future__ import annotations

import json
import logging
from typing import Any

import pytest

from graphglue import Bucket, Decision, Key, Mode, Reason, Route
from graphglue.ledger import Ledger


def decision(
    prep: Route = Route.GLUE,
    reason: Reason = Reason.PADDED,
    forward: Route = Route.GRAPH,
    forward_reason: Reason | None = None,
    size: int = 4,
) -> Decision:
    bucket = Bucket(size, size, 1)
    return Decision(prep, forward, bucket, Key(Mode.DECODE, *bucket), reason, forward_reason, {})


EAGER = decision(Route.EAGER, Reason.NOT_CAPTURED, Route.EAGER, Reason.NO_FORWARD_GRAPH)


def note(ledger: Ledger, decided: Decision, raw: Bucket) -> None:
    ledger.note(ledger.tally(decided, exact=False), decided, raw)


def test_a_new_ledger_is_empty() -> None:
    counters = Ledger().counters()
    assert (counters["steps"], counters["routes"], counters["last_decisions"]) == (0, [], [])


def test_steps_are_counted_by_route_reason_and_bucket() -> None:
    ledger = Ledger()
    for raw in (3, 1, 3):
        note(ledger, decision(), Bucket(raw, raw, 1))
    note(ledger, decision(reason=Reason.UNPADDED), Bucket(4, 4, 1))
    note(ledger, decision(size=8), Bucket(7, 7, 1))
    note(ledger, EAGER, Bucket(2, 2, 1))
    counters = ledger.counters()
    assert counters["steps"] == 6
    assert counters["real_tokens"] == 3 + 1 + 3 + 4 + 7 + 2
    assert counters["bucket_tokens"] == 4 * 4 + 8 + 4
    routes = {
        (r["prep"], r["forward"], r["reason"], r["forward_reason"], *r["bucket"]): r["steps"]
        for r in counters["routes"]
    }
    assert routes == {
        ("glue", "graph", "padded", None, 4, 4, 1): 3,
        ("glue", "graph", "unpadded", None, 4, 4, 1): 1,
        ("glue", "graph", "padded", None, 8, 8, 1): 1,
        ("eager", "eager", "not_captured", "no_forward_graph", 4, 4, 1): 1,
    }  # fmt: skip


def test_the_last_decisions_are_kept_and_no_more() -> None:
    ledger = Ledger(max_decisions=3)
    for size in range(1, 8):
        note(ledger, decision(size=size), Bucket(1, 1, 1))
    assert [kept["bucket"] for kept in ledger.counters()["last_decisions"]] == [[5, 5, 1], [6, 6, 1], [7, 7, 1]]


def test_counters_are_plain_values() -> None:
    ledger = Ledger()
    note(ledger, decision(), Bucket(3, 3, 1))
    note(ledger, EAGER, Bucket(3, 3, 1))
    counters = ledger.counters()
    assert json.loads(json.dumps(counters)) == counters


def messages(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records if record.name == "graphglue"]


@pytest.fixture(autouse=True)
def _log_everything(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG, "graphglue")


def test_route_key_a_fallback_is_logged_once_with_what_was_seen(caplog: pytest.LogCaptureFixture) -> None:
    ledger = Ledger()
    over = decision(Route.EAGER, Reason.OVER_LADDER, Route.EAGER, Reason.OVER_LADDER, size=17)
    for _ in range(5):
        note(ledger, over, Bucket(17, 17, 1))
    (line,) = messages(caplog)
    assert "over_ladder" in line
    assert "(17 requests and 17 tokens, run as decode bucket of 17 requests and 17 tokens)" in line
    assert caplog.records[-1].levelno == logging.WARNING


FALLBACKS = [
    reason
    for reason in Reason
    if reason
    not in {
        *(Reason.STAGED, Reason.IDLE, Reason.RAGGED, Reason.PADDED, Reason.UNPADDED),  # glued
        *(Reason.NO_FORWARD_GRAPH, Reason.FORWARD_QUARANTINED, Reason.RAGGED_KEY, Reason.AGREED_EAGER),
        *(Reason.METADATA_CHANGED, Reason.IDLE_SKIPPED),
    }
]


@pytest.mark.parametrize("reason", FALLBACKS)
def test_no_fallback_of_a_prep_is_silent(reason: Reason, caplog: pytest.LogCaptureFixture) -> None:
    ledger = Ledger()
    for _ in range(3):
        note(ledger, decision(Route.EAGER, reason), Bucket(3, 3, 1))
    lines = [line for line in messages(caplog) if reason.value in line]
    assert len(lines) == 1, lines


@pytest.mark.parametrize(
    "reason", [Reason.FORWARD_QUARANTINED, Reason.RAGGED_KEY, Reason.METADATA_CHANGED, Reason.NO_FORWARD_GRAPH]
)
def test_no_fallback_of_a_forward_is_silent(reason: Reason, caplog: pytest.LogCaptureFixture) -> None:
    ledger = Ledger()
    for _ in range(3):
        note(ledger, decision(forward=Route.EAGER, forward_reason=reason), Bucket(3, 3, 1))
    lines = [line for line in messages(caplog) if reason.value in line]
    assert len(lines) == 1, lines


def test_each_reason_has_its_own_line(caplog: pytest.LogCaptureFixture) -> None:
    ledger = Ledger()
    for reason in (Reason.WASTE, Reason.QUARANTINED, Reason.WASTE, Reason.QUARANTINED):
        note(ledger, decision(Route.EAGER, reason), Bucket(3, 3, 1))
    assert [("waste" in line, "quarantined" in line) for line in messages(caplog)] == [(True, False), (False, True)]


@pytest.mark.parametrize("reason", [Reason.PADDED, Reason.UNPADDED, Reason.IDLE])
def test_what_was_glued_is_no_news(reason: Reason, caplog: pytest.LogCaptureFixture) -> None:
    note(Ledger(), decision(reason=reason), Bucket(3, 3, 1))
    assert messages(caplog) == []


def test_ledgers_share_nothing(caplog: pytest.LogCaptureFixture) -> None:
    ledgers = [Ledger(), Ledger()]
    for ledger in ledgers:
        note(ledger, EAGER, Bucket(3, 3, 1))
    counted: list[Any] = [ledger.counters()["steps"] for ledger in ledgers]
    assert counted == [1, 1]
    assert len([line for line in messages(caplog) if "not_captured" in line]) == 2
