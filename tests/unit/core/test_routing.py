"""The router: some rows written out by hand. Totality against the whole table is in tests/property."""

from __future__ import annotations

from dataclasses import replace
from itertools import combinations
from typing import Any

import pytest

from graphglue import Bucket, Key, Mode, PrepContract, Reason, Route, State
from graphglue.core.routing import TABLE, Decision, PrepFacts, StepFacts, route

CONTRACT = PrepContract(name="p", modes={Mode.DECODE})
PADDED = StepFacts(raw=Bucket(3, 3, 1), bucket=Bucket(4, 4, 1), mode=Mode.DECODE)
PREP = PrepFacts(CONTRACT, State.CAPTURED)
KEY = Key(Mode.DECODE, 4, 4, 1)


def decide(
    step: StepFacts = PADDED, prep: PrepFacts = PREP, forward: State | None = State.CAPTURED, key: Key = KEY
) -> Decision:
    return route(step, {"p": prep}, key, forward)


def declared(**fields: Any) -> PrepFacts:
    return replace(PREP, contract=PrepContract.model_construct(**{**dict(CONTRACT), **fields}))  # unchecked


IDLE = replace(PADDED, raw=Bucket(0, 0, 0))
UNPADDED = replace(PADDED, raw=Bucket(4, 4, 1))


@pytest.mark.parametrize(
    ("step", "prep", "expected"),
    [
        (PADDED, PREP, (Route.GLUE, Route.GRAPH, Reason.PADDED, None)),
        (UNPADDED, PREP, (Route.GLUE, Route.GRAPH, Reason.UNPADDED, None)),
        (IDLE, PREP, (Route.EAGER, Route.GRAPH, Reason.IDLE_EAGER, None)),
        (IDLE, declared(idle="glue"), (Route.GLUE, Route.GRAPH, Reason.IDLE, None)),
        (IDLE, declared(idle="skip"), (Route.SKIP, Route.GRAPH, Reason.IDLE_SKIPPED, None)),
        (replace(PADDED, staged=True), PREP, (Route.GLUE, Route.GRAPH, Reason.STAGED, None)),
        (PADDED, declared(padded=False), (Route.EAGER, Route.GRAPH, Reason.PADDING_NOT_DECLARED, None)),
        (UNPADDED, declared(padded=False), (Route.GLUE, Route.GRAPH, Reason.UNPADDED, None)),
        (PADDED, replace(PREP, glue="unpadded"), (Route.EAGER, Route.GRAPH, Reason.PADDING_NOT_DECLARED, None)),
        (PADDED, declared(host_free=False), (Route.EAGER, Route.GRAPH, Reason.NOT_HOST_FREE, None)),
        (PADDED, PrepFacts(None, State.CAPTURED), (Route.EAGER, Route.GRAPH, Reason.NO_CONTRACT, None)),
        (PADDED, replace(PREP, certified=False), (Route.EAGER, Route.GRAPH, Reason.NOT_CERTIFIED, None)),
        (PADDED, replace(PREP, certified=True), (Route.GLUE, Route.GRAPH, Reason.PADDED, None)),
        (PADDED, replace(PREP, state=State.QUARANTINED), (Route.EAGER, Route.GRAPH, Reason.QUARANTINED, None)),
        (PADDED, replace(PREP, state=State.WARM), (Route.EAGER, Route.GRAPH, Reason.NOT_CAPTURED, None)),
        (replace(PADDED, enabled=False), PREP, (Route.EAGER, Route.EAGER, Reason.DISABLED, Reason.DISABLED)),
        (replace(PADDED, vetoed=True), PREP, (Route.EAGER, Route.EAGER, Reason.RANK_VETO, Reason.RANK_VETO)),
        (replace(PADDED, bucket=None), PREP, (Route.EAGER, Route.EAGER, Reason.OVER_LADDER, Reason.OVER_LADDER)),
        (
            replace(PADDED, padding=False),
            PREP,
            (Route.EAGER, Route.EAGER, Reason.PADDING_DISABLED, Reason.PADDING_DISABLED),
        ),
        (replace(UNPADDED, padding=False), PREP, (Route.GLUE, Route.GRAPH, Reason.UNPADDED, None)),
        (replace(IDLE, padding=False, waste_limit=1.0), PREP, (Route.EAGER, Route.GRAPH, Reason.IDLE_EAGER, None)),
        (replace(PADDED, waste_limit=1.25), PREP, (Route.EAGER, Route.EAGER, Reason.WASTE, Reason.WASTE)),
        (replace(PADDED, waste_limit=4 / 3), PREP, (Route.GLUE, Route.GRAPH, Reason.PADDED, None)),
    ],
)
def test_rows(step: StepFacts, prep: PrepFacts, expected: tuple[Any, ...]) -> None:
    decision = decide(step, prep)
    assert (decision.prep, decision.forward, decision.reason, decision.forward_reason) == expected
    assert bool(decision) is (decision.forward is Route.GRAPH)


def test_the_first_row_that_holds_wins() -> None:
    everything = replace(PADDED, enabled=False, vetoed=True, bucket=None)
    assert decide(everything).reason is Reason.DISABLED
    assert decide(replace(everything, enabled=True)).reason is Reason.RANK_VETO
    assert decide(replace(everything, enabled=True, vetoed=False)).reason is Reason.OVER_LADDER
    barely = declared(host_free=False, modes={Mode.DRAFT})
    assert decide(prep=barely).reason is Reason.NOT_HOST_FREE
    assert decide(prep=declared(modes={Mode.DRAFT}, padded=False)).reason is Reason.MODE_NOT_DECLARED


@pytest.mark.parametrize(
    ("features", "known", "reason"),
    [
        (set(), set(), Reason.PADDED),
        ({"lora"}, set(), Reason.FEATURE_NOT_AUDITED),
        ({"lora"}, {"lora"}, Reason.PADDED),
        ({"lora", "tbo"}, {"lora"}, Reason.FEATURE_NOT_AUDITED),
        ({"lora"}, {"lora", "tbo"}, Reason.PADDED),
    ],
)
def test_feature_guard_every_active_feature_must_be_declared(
    features: set[str], known: set[str], reason: Reason
) -> None:
    step = replace(PADDED, features=frozenset(features))
    assert decide(step, declared(features=frozenset(known))).reason is reason


@pytest.mark.parametrize("step", [PADDED, UNPADDED])
def test_generic_glue_is_for_unpadded_decode_without_features(step: StepFacts) -> None:
    generic = PrepFacts(None, State.CAPTURED, generic_glue=True)
    assert decide(step, generic).prep is (Route.GLUE if step is UNPADDED else Route.EAGER)
    assert decide(replace(step, features=frozenset({"lora"})), generic).reason is Reason.FEATURE_NOT_AUDITED
    assert decide(replace(step, mode=Mode.VERIFY), generic).reason is Reason.MODE_NOT_DECLARED


@pytest.mark.parametrize(
    ("ragged", "state", "reason"),
    [
        (False, State.CAPTURED, None),
        (False, State.COLD, Reason.NO_FORWARD_GRAPH),
        (False, State.WARM, Reason.NO_FORWARD_GRAPH),
        (False, State.QUARANTINED, Reason.FORWARD_QUARANTINED),
        (False, None, Reason.NO_FORWARD_GRAPH),
        (True, State.CAPTURED, None),
        (True, State.COLD, Reason.RAGGED_KEY),
        (True, None, Reason.NO_FORWARD_GRAPH),
    ],
)
def test_why_the_forward_is_no_graph(ragged: bool, state: State | None, reason: Reason | None) -> None:
    step = replace(PADDED, raw=Bucket(3, 10, 0), bucket=Bucket(4, 16, 0), ragged=ragged)
    decision = decide(step, declared(ragged=True), state)
    assert decision.forward_reason is reason
    assert decision.prep is Route.GLUE


def test_ragged_needs_the_declaration_and_says_ragged_before_padded() -> None:
    step = replace(PADDED, raw=Bucket(3, 10, 0), bucket=Bucket(4, 16, 0), ragged=True)
    assert decide(step).reason is Reason.RAGGED_NOT_DECLARED
    assert decide(step, declared(ragged=True)).reason is Reason.RAGGED
    assert decide(step, declared(ragged=True, padded=False)).reason is Reason.PADDING_NOT_DECLARED


def test_of_equally_weak_preps_the_earlier_row_names_the_decision_in_any_order() -> None:
    """What is not captured follows from what is not declared, so that is the reason to be told."""
    step = replace(PADDED, raw=Bucket(3, 10, 0), bucket=Bucket(4, 16, 0), ragged=True)
    cold, undeclared = replace(declared(ragged=True), state=State.COLD), PREP
    for preps in ({"a": cold, "b": undeclared}, {"b": undeclared, "a": cold}):
        decision = route(step, preps, KEY, State.CAPTURED)
        assert (decision.prep, decision.reason) == (Route.EAGER, Reason.RAGGED_NOT_DECLARED)
        assert decision.preps["a"].reason is Reason.NOT_CAPTURED


# Preps that go eagerly in one and the same step, in the order of the page's rows. Row 7 has three reasons.
UNDECLARED = replace(
    PADDED, raw=Bucket(3, 10, 0), bucket=Bucket(4, 16, 0), mode=Mode.VERIFY, features=frozenset({"lora"}), ragged=True
)
ALL = {"modes": {Mode.VERIFY}, "features": frozenset({"lora"}), "ragged": True}
IN_ORDER = [
    (6, Reason.IDLE_EAGER, declared(**ALL)),
    (7, Reason.NOT_HOST_FREE, declared(**ALL, idle="glue", host_free=False)),
    (7, Reason.SWITCHED_OFF, replace(declared(**ALL, idle="glue"), glue="off")),
    (8, Reason.MODE_NOT_DECLARED, declared(**{**ALL, "modes": {Mode.DECODE}}, idle="glue")),
    (9, Reason.FEATURE_NOT_AUDITED, declared(**{**ALL, "features": frozenset()}, idle="glue")),
    (10, Reason.RAGGED_NOT_DECLARED, declared(**{**ALL, "ragged": False}, idle="glue")),
    (11, Reason.PADDING_NOT_DECLARED, declared(**ALL, idle="glue", padded=False)),
    (12, Reason.NOT_CERTIFIED, replace(declared(**ALL, idle="glue"), certified=False)),
    (13, Reason.QUARANTINED, replace(declared(**ALL, idle="glue"), state=State.QUARANTINED)),
    (14, Reason.NOT_CAPTURED, replace(declared(**ALL, idle="glue"), state=State.WARM)),
]


@pytest.mark.parametrize("idle", [False, True])
def test_of_two_eager_preps_the_one_whose_row_comes_first_on_the_page_names_the_decision(idle: bool) -> None:
    """Whatever the order of the preps. A step is idle or ragged, so not every row holds in both."""
    step = replace(UNDECLARED, raw=Bucket(0, 0, 0), ragged=False) if idle else UNDECLARED
    not_here = Reason.RAGGED_NOT_DECLARED if idle else Reason.IDLE_EAGER
    for (first, reason, one), (later, _, other) in combinations([row for row in IN_ORDER if row[1] is not not_here], 2):
        for preps in ({"a": one, "b": other}, {"b": other, "a": one}) if first < later else ({"a": one, "b": other},):
            assert route(step, preps, KEY, None).reason is reason


def test_the_weakest_of_several_preps_names_the_decision() -> None:
    preps = {"a": PREP, "b": declared(padded=False), "c": PREP}
    decision = route(PADDED, preps, KEY, State.CAPTURED)
    assert (decision.prep, decision.reason) == (Route.EAGER, Reason.PADDING_NOT_DECLARED)
    assert {name: (d.route, d.reason) for name, d in decision.preps.items()} == {
        "a": (Route.GLUE, Reason.PADDED),
        "b": (Route.EAGER, Reason.PADDING_NOT_DECLARED),
        "c": (Route.GLUE, Reason.PADDED),
    }
    skipping = route(IDLE, {"a": declared(idle="glue"), "b": declared(idle="skip")}, KEY, None)
    assert (skipping.prep, skipping.reason) == (Route.SKIP, Reason.IDLE_SKIPPED)


@pytest.mark.parametrize(
    ("step", "exact"),
    [
        (PADDED, False),
        (replace(PADDED, bucket=None), True),
        (replace(PADDED, padding=False), True),
        (replace(UNPADDED, padding=False), False),
        (replace(PADDED, waste_limit=1.0), True),
        (replace(IDLE, padding=False, waste_limit=1.0), False),
    ],
)
def test_rows_3_and_4_run_at_exact_extents(step: StepFacts, exact: bool) -> None:
    assert step.exact is exact


# The rows of design.md section 6, by number.
PAGE = {
    1: "disabled", 2: "rank_veto", 3: "over_ladder", 4: "padding_disabled waste", 5: "idle_skipped", 6: "idle_eager",
    7: "not_host_free no_contract switched_off", 8: "mode_not_declared", 9: "feature_not_audited",
    10: "ragged_not_declared", 11: "padding_not_declared", 12: "not_certified", 13: "quarantined", 14: "not_captured",
    15: "staged idle ragged padded unpadded",
}  # fmt: skip


def test_the_rows_have_the_numbers_of_the_page() -> None:
    expected = [(number, Reason(reason)) for number, reasons in PAGE.items() for reason in reasons.split()]
    assert [(row.number, row.reason) for row in TABLE] == expected
    assert [row.number for row in TABLE if not row.admits] == [1, 2, 3, 4, 4]  # where the forward goes eagerly as well


def test_reasons_and_routes_are_closed_enums() -> None:
    """Their values are what counters, reports and the exporter say: the names, in small letters."""
    assert {route.value for route in Route} == {"glue", "graph", "eager", "skip"}
    assert {reason.name for reason in Reason} == {
        "DISABLED", "RANK_VETO", "OVER_LADDER", "PADDING_DISABLED", "WASTE", "IDLE_SKIPPED", "IDLE_EAGER",
        "NOT_HOST_FREE", "NO_CONTRACT", "SWITCHED_OFF", "MODE_NOT_DECLARED", "FEATURE_NOT_AUDITED",
        "RAGGED_NOT_DECLARED", "PADDING_NOT_DECLARED", "NOT_CERTIFIED", "QUARANTINED", "NOT_CAPTURED", "STAGED",
        "IDLE", "RAGGED", "PADDED", "UNPADDED", "NO_FORWARD_GRAPH", "FORWARD_QUARANTINED", "RAGGED_KEY",
        "AGREED_EAGER", "METADATA_CHANGED",
    }  # fmt: skip
    assert {state.name for state in State} == {"COLD", "WARM", "CAPTURED", "QUARANTINED"}
    assert all(word.value == word.name.lower() for words in (Route, Reason, State) for word in words)
