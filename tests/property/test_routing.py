"""The router agrees with the table of design.md section 6, written out here by hand, for all facts.

``decide_prep`` and ``decide_forward`` are that page in plain ifs. They were not made from the source's
table, and share nothing with it but the names of routes and reasons.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from types import SimpleNamespace

import pytest
import torch
from hypothesis import event, given
from hypothesis import strategies as st

import graphglue as gg
from graphglue.core import routing
from graphglue.core.routing import PrepFacts, StepFacts, route, route_prep
from graphglue.testing import strategies as ggst

from .test_fill import bucket_of, counts_of

pytestmark = pytest.mark.usefixtures("frozen_imports")

EAGER, GLUE, SKIP, GRAPH = gg.Route.EAGER, gg.Route.GLUE, gg.Route.SKIP, gg.Route.GRAPH
Why = gg.Reason

# Reasons that route() does not give here: one comes from what ranks agreed on (StepFacts.agreed, see
# unit/ranks/test_admission.py), the other from what an eager prep returned.
LATER = {Why.AGREED_EAGER, Why.METADATA_CHANGED}


def decide_prep(step: SimpleNamespace, prep: SimpleNamespace) -> tuple[gg.Route, gg.Reason]:
    """Transcribe rows 1 to 15.

    ``step``: enabled, vetoed, covered, requests, tokens, bucket_tokens, is_bucket, padding, waste_limit,
    mode, features, ragged, staged. ``prep``: contract (or None), glue, generic, certified, state.
    """
    if (reason := refused_admission(step)) is not None:
        return EAGER, reason
    idle, contract = step.requests == 0, prep.contract
    if contract is None:  # as PrepContract(modes={DECODE}, padded=False) would
        host_free, padded, ragged, on_idle = True, False, False, "eager"
        modes, features = {gg.Mode.DECODE}, set()
    else:
        host_free, padded, ragged, on_idle = contract.host_free, contract.padded, contract.ragged, contract.idle
        modes, features = contract.modes, contract.features
    if idle and on_idle == "skip":
        return SKIP, Why.IDLE_SKIPPED
    if idle and on_idle == "eager":
        return EAGER, Why.IDLE_EAGER
    if not host_free:
        return EAGER, Why.NOT_HOST_FREE
    if contract is None and not prep.generic:
        return EAGER, Why.NO_CONTRACT
    if prep.glue == "off":
        return EAGER, Why.SWITCHED_OFF
    if step.mode not in modes:
        return EAGER, Why.MODE_NOT_DECLARED
    if any(feature not in features for feature in step.features):
        return EAGER, Why.FEATURE_NOT_AUDITED
    if step.ragged and not ragged:
        return EAGER, Why.RAGGED_NOT_DECLARED
    is_padded = idle or not step.is_bucket
    if is_padded and (not padded or prep.glue == "unpadded"):
        return EAGER, Why.PADDING_NOT_DECLARED
    if prep.certified is False:
        return EAGER, Why.NOT_CERTIFIED
    if prep.state is gg.State.QUARANTINED:
        return EAGER, Why.QUARANTINED
    if prep.state is not gg.State.CAPTURED:
        return EAGER, Why.NOT_CAPTURED
    if step.staged:
        return GLUE, Why.STAGED
    if idle:
        return GLUE, Why.IDLE
    if step.ragged:
        return GLUE, Why.RAGGED
    if is_padded:
        return GLUE, Why.PADDED
    return GLUE, Why.UNPADDED


def refused_admission(step: SimpleNamespace) -> gg.Reason | None:
    """Transcribe rows 1 to 4, which send the forward to the eager route as well."""
    if not step.enabled:
        return Why.DISABLED
    if step.vetoed:
        return Why.RANK_VETO
    if not step.covered:
        return Why.OVER_LADDER
    return unwanted_padding(step)


def unwanted_padding(step: SimpleNamespace) -> gg.Reason | None:
    """Transcribe row 4: such a step runs at its own extents."""
    if step.requests > 0 and not step.padding and not step.is_bucket:
        return Why.PADDING_DISABLED
    if step.requests > 0 and step.waste_limit and step.bucket_tokens > step.waste_limit * step.tokens:
        return Why.WASTE
    return None


def decide_forward(step: SimpleNamespace, forward: gg.State | None) -> set[gg.Reason | None]:
    """Give the reasons that the page allows for the forward's route; None stands for GRAPH."""
    if (reason := refused_admission(step)) is not None:
        return {reason}
    if forward is gg.State.CAPTURED:
        return {None}
    if forward is None:
        return {Why.NO_FORWARD_GRAPH}
    if forward is gg.State.QUARANTINED:
        # The page does not say which of the two a ragged batch with a broken key of its own gets.
        return {Why.FORWARD_QUARANTINED, Why.RAGGED_KEY} if step.ragged else {Why.FORWARD_QUARANTINED}
    return {Why.RAGGED_KEY} if step.ragged else {Why.NO_FORWARD_GRAPH}


# The design's table, row by row.
TABLE = """disabled | rank_veto | over_ladder | padding_disabled waste | idle_skipped | idle_eager
    | not_host_free no_contract switched_off | mode_not_declared | feature_not_audited | ragged_not_declared
    | padding_not_declared | not_certified | quarantined | not_captured | staged idle ragged padded unpadded"""
ROW_OF = {reason: row for row, reasons in enumerate(TABLE.split("|")) for reason in reasons.split()}


def weakest(preps: list[tuple[gg.Route, gg.Reason]]) -> tuple[gg.Route, gg.Reason]:
    """Give the decision that stands for several preps: an eager one, else a skipped one, of the table's first row."""
    return min(preps, key=lambda decided: ([EAGER, SKIP, GLUE].index(decided[0]), ROW_OF[decided[1].value]))


# Extents of a step: (raw, bucket); the bucket holds twice the raw tokens, or three times, or exactly them.
EXTENTS = {
    "over": (gg.Bucket(9, 9, 1), None),
    "idle": (gg.Bucket(0, 0, 0), gg.Bucket(2, 2, 1)),
    "exact": (gg.Bucket(4, 4, 1), gg.Bucket(4, 4, 1)),
    "padded": (gg.Bucket(2, 2, 1), gg.Bucket(4, 4, 1)),
    "wasted": (gg.Bucket(2, 2, 1), gg.Bucket(6, 6, 1)),
    "ragged over": (gg.Bucket(2, 9, 0), None),
    "ragged exact": (gg.Bucket(4, 8, 0), gg.Bucket(4, 8, 0)),
    "ragged tokens": (gg.Bucket(4, 7, 0), gg.Bucket(4, 8, 0)),
    "ragged wasted": (gg.Bucket(3, 3, 0), gg.Bucket(4, 8, 0)),
}


def every_step() -> Iterator[tuple[StepFacts, SimpleNamespace]]:
    """Enumerate the facts of a step, twice: as the router takes them, and as the page words them."""
    for (name, (raw, bucket)), *facts in itertools.product(
        EXTENTS.items(),
        [(True, False), (False, False), (True, True), (False, True)],
        [True, False],
        [0.0, 2.0],
        [gg.Mode.DECODE, gg.Mode.VERIFY],
        [frozenset(), frozenset({"lora"}), frozenset({"lora", "tbo"})],
        [False, True],
    ):
        (enabled, vetoed), padding, waste_limit, mode, features, staged = facts
        if not enabled and vetoed and (features or staged):
            continue  # one of the two decides; the rest of the product tells nothing more
        ragged = name.startswith("ragged")
        common = {
            "enabled": enabled, "vetoed": vetoed, "padding": padding, "waste_limit": waste_limit,
            "mode": mode, "features": features, "ragged": ragged, "staged": staged,
        }  # fmt: skip
        worded = SimpleNamespace(
            **common, covered=bucket is not None, requests=raw.requests, tokens=raw.tokens,
            bucket_tokens=bucket.tokens if bucket else 0, is_bucket=bucket is not None and raw[:2] == bucket[:2],
        )  # fmt: skip
        yield StepFacts(raw=raw, bucket=bucket, **common), worded


def every_contract() -> list[gg.PrepContract | None]:
    """List what contracts can say, as far as the table asks for it."""
    declared: list[gg.PrepContract | None] = [None]
    for host_free, padded, ragged, idle in itertools.product(
        [True, False], [True, False], [True, False], ["eager", "glue"]
    ):
        declared.append(
            gg.PrepContract(
                modes={gg.Mode.DECODE}, host_free=host_free, padded=padded, ragged=ragged, idle=idle, features={"lora"}
            )
        )
    return [*declared, gg.PrepContract(modes={gg.Mode.EXTEND}, idle="skip")]


STEPS = list(every_step())
PREP_STATES = list(itertools.product(["on", "unpadded", "off"], [True, False], [None, True, False], gg.State))
CONTRACTS = every_contract()


def spell(contract: gg.PrepContract | None) -> str:
    """Name a contract in a test's id."""
    if contract is None:
        return "none"
    return "-".join([contract.idle] + [flag for flag in ("host_free", "padded", "ragged") if getattr(contract, flag)])


def first_difference(contract: gg.PrepContract | None) -> str | None:
    """Compare the router with the page on every combination of facts with this contract."""
    for glue, generic, certified, state in PREP_STATES:
        facts = PrepFacts(contract, state, glue, generic, certified)
        worded = SimpleNamespace(contract=contract, state=state, glue=glue, generic=generic, certified=certified)
        for step, step_worded in STEPS:
            row, expected = route_prep(step, facts), decide_prep(step_worded, worded)
            if (row.prep, row.reason) != expected:
                return f"{step}, {facts}: {row}, the page says {expected}"
    return None


@pytest.mark.parametrize("contract", CONTRACTS, ids=spell)
def test_the_table_agrees_with_the_page_on_every_combination_of_facts(contract: gg.PrepContract | None) -> None:
    assert first_difference(contract) is None


@pytest.mark.parametrize("position", range(len(routing.TABLE) - 1), ids=lambda i: routing.TABLE[i].reason.value)
def test_the_comparison_sees_every_row(position: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Show that the test above can fail: without any one row of the table it does."""
    monkeypatch.setattr(routing, "TABLE", routing.TABLE[:position] + routing.TABLE[position + 1 :])
    contracts = [CONTRACTS[-1]] + [c for c in CONTRACTS if c and c.idle == "glue" and c.padded]
    assert any(first_difference(contract) for contract in contracts + CONTRACTS)


def test_the_forward_agrees_with_the_page_on_every_combination_of_facts() -> None:
    key = gg.Key(gg.Mode.DECODE, 4, 4, 1)
    facts = {"prep": PrepFacts(CONTRACTS[1], gg.State.CAPTURED)}
    for step, worded in STEPS:
        for forward in [None, *gg.State]:
            decision = route(step, facts, key, forward)
            assert decision.forward_reason in decide_forward(worded, forward), f"{step}, forward {forward}: {decision}"
            assert decision.forward is (GRAPH if decision.forward_reason is None else EAGER)
            assert bool(decision) is (decision.forward is GRAPH)
            assert decision.bucket == key.bucket


def test_every_reason_is_reachable() -> None:
    seen = set()
    for contract in (
        None,
        CONTRACTS[1],
        CONTRACTS[2],
        gg.PrepContract(modes={gg.Mode.DECODE}, ragged=True, idle="glue"),
    ):
        for glue, generic, certified, state in PREP_STATES:
            seen |= {route_prep(step, PrepFacts(contract, state, glue, generic, certified)).reason for step, _ in STEPS}
    seen |= {route_prep(step, PrepFacts(CONTRACTS[-1])).reason for step, _ in STEPS}
    seen |= {route_prep(step, PrepFacts(contract)).reason for contract in CONTRACTS for step, _ in STEPS}
    key = gg.Key(gg.Mode.DECODE, 4, 4, 1)
    seen |= {
        route(step, {"prep": PrepFacts(None)}, key, forward).forward_reason
        for step, _ in STEPS
        for forward in [None, *gg.State]
    }
    assert set(Why) - seen == LATER


steps = st.sampled_from(STEPS)
preps = st.tuples(st.sampled_from(CONTRACTS), st.sampled_from(PREP_STATES))


@given(step=steps, drawn=st.lists(preps, min_size=1, max_size=3), forward=st.none() | st.sampled_from(gg.State))
def test_several_preps_are_routed_alone_and_the_weakest_names_the_decision(
    step: tuple[StepFacts, SimpleNamespace], drawn: list, forward: gg.State | None
) -> None:
    facts, worded = {}, []
    for position, (contract, (glue, generic, certified, state)) in enumerate(drawn):
        facts[f"prep{position}"] = PrepFacts(contract, state, glue, generic, certified)
        worded.append(SimpleNamespace(contract=contract, state=state, glue=glue, generic=generic, certified=certified))
    key = gg.Key(step[0].mode, 4, 4, 1, None, "variant")
    decision = route(step[0], facts, key, forward)
    assert decision == route(step[0], facts, key, forward)
    expected = [decide_prep(step[1], prep) for prep in worded]
    assert [tuple(decision.preps[f"prep{i}"]) for i in range(len(drawn))] == expected
    assert (decision.prep, decision.reason) == weakest(expected)
    assert decision.forward_reason in decide_forward(step[1], forward)
    assert decision.key == key


# The facts themselves: a runner reads them off its config, its contracts and a batch.

MODES = (gg.Mode.DECODE, gg.Mode.VERIFY, gg.Mode.DRAFT)


@st.composite
def configs(draw: st.DrawFn) -> gg.RunnerConfig:
    """Draw a config, most of it as by default."""
    return gg.RunnerConfig(
        enabled=draw(st.integers(0, 19)) != 9,
        padding=draw(st.integers(0, 9)) != 9,
        waste_limit=draw(st.sampled_from([None, None, None, 1.0, 1.5, 2.0])),
        generic_glue=draw(st.booleans()),
        glue=draw(st.sampled_from([{}, {}, {}, {"prep": "on"}, {"prep": "unpadded"}, {"prep": "off"}])),
        certificate=draw(st.sampled_from(["off"] * 9 + ["require"])),
    )


def word_step(batch: gg.Batch, config: gg.RunnerConfig, ladder: list[int], width: int) -> SimpleNamespace:
    """Put a batch and a config in the page's words."""
    counts = counts_of(batch, width)
    bucket = bucket_of(counts, ladder, width)
    return SimpleNamespace(
        enabled=config.enabled, vetoed=False, padding=config.padding, waste_limit=config.waste_limit or 0,
        mode=batch.mode, features=batch.features, ragged=counts[0] > 0 and counts[2] == 0, staged=False,
        covered=bucket is not None, requests=counts[0], tokens=counts[1], bucket=bucket, counts=counts,
        bucket_tokens=bucket.tokens if bucket else 0, is_bucket=bucket is not None and counts[:2] == bucket[:2],
    )  # fmt: skip


def captured_at(contract: gg.PrepContract | None, step: SimpleNamespace, width: int) -> bool:
    """Tell whether a whole capture has this step's key: its mode is declared, its width the runner's."""
    declared = {gg.Mode.DECODE} if contract is None else contract.modes
    ragged = contract is not None and contract.ragged
    return step.mode in declared and (ragged if step.ragged else step.counts[2] in (0, width))


@given(data=st.data())
def test_a_runner_decides_as_the_page_says_before_and_after_capture(data: st.DataObject) -> None:
    slot = gg.Slot("lens", axis="request", dtype=torch.int64, pad=1)
    everything = gg.PrepContract(name="prep", reads={"lens": 1}, modes=MODES[:2], ragged=True, idle="glue")
    declared = ggst.contracts([slot], modes=MODES[:2], features=["lora"]) | st.just(everything)
    contract = data.draw(declared | declared | st.none(), label="contract")
    config, ladder = data.draw(configs(), label="config"), data.draw(ggst.ladders(max_length=3), label="ladder")
    width, with_forward = data.draw(st.integers(1, 2), label="width"), data.draw(st.booleans(), label="forward")

    def prep(view: gg.View) -> torch.Tensor:
        return view.lens + 1

    def forward(view: gg.View, metadata: torch.Tensor) -> torch.Tensor:
        return metadata * 2

    registry = gg.Registry()
    if contract is not None:
        registry.register(contract)(prep)
    runner = gg.Runner(
        slots=[slot], ladder=ladder, prep=prep, registry=registry, tokens_per_request=width, config=config,
        forward=forward if with_forward else None, output_axes="request",
    )  # fmt: skip
    generic = config.generic_glue or config.glue.get("prep") in ("on", "unpadded")
    certified = False if config.certificate == "require" else None
    may_glue = certified is None and config.glue.get("prep") != "off"
    may_glue = may_glue and (contract.host_free if contract is not None else generic)
    for captured in [False, True]:
        if captured and (may_glue or with_forward):
            runner.capture()
        for _ in range(4 if captured else 1):
            features = data.draw(st.sampled_from([(), (), ("lora",), ("lora", "tbo")]), label="features")
            batch = data.draw(
                ggst.batches(
                    [slot], ladder, tokens_per_request=width, modes=MODES, features=features,
                    max_requests=max(ladder) + data.draw(st.sampled_from([0, 0, 0, 1])), widths=(1, 2, 3),
                ),
                label="batch",
            )  # fmt: skip
            step = word_step(batch, config, ladder, width)
            here = captured and captured_at(contract, step, width)
            state = gg.State.CAPTURED if here and may_glue else gg.State.COLD
            prep_worded = SimpleNamespace(
                contract=contract, glue=config.glue.get("prep", "on"), generic=generic, certified=certified, state=state
            )
            event(f"prep {decide_prep(step, prep_worded)[1].name}")
            decision = runner.can_replay(batch)
            assert (decision.prep, decision.reason) == decide_prep(step, prep_worded)
            allowed = decide_forward(step, (gg.State.CAPTURED if here else gg.State.COLD) if with_forward else None)
            assert decision.forward_reason in allowed
            exact = not step.covered or unwanted_padding(step) is not None
            assert decision.bucket == (gg.Bucket(*step.counts) if exact else step.bucket)
            assert decision == runner.can_replay(batch)
            if step.covered or with_forward:
                assert runner.replay(batch).decision == decision


def test_a_metadata_change_is_the_reason_of_an_eager_forward() -> None:
    """The one reason that no table has: an eager prep that returned something else than was captured."""
    slot = gg.Slot("lens", axis="request", dtype=torch.int64, pad=1)
    dtype = torch.int64

    def prep(view: gg.View) -> torch.Tensor:
        return view.lens.to(dtype)

    with gg.Runner(slots=[slot], ladder=[2], prep=prep, forward=lambda view, metadata: metadata * 2) as runner:
        runner.capture()
        assert runner.replay(gg.Batch(1, {"lens": [3]})).decision.forward is GRAPH
        dtype = torch.int32
        step = runner.replay(gg.Batch(1, {"lens": [3]}))
        assert (step.decision.forward, step.decision.forward_reason) == (EAGER, Why.METADATA_CHANGED)
        assert step.outputs.tolist() == [6]
        assert step.outputs.dtype == torch.int32
