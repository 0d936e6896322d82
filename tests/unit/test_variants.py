"""Variants and features: LoRA, attention kinds, stream indices in the key; what is not audited goes eager.

A variant selects another forward graph, and is part of the key. A feature steers the prep only.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import pytest
import torch

import graphglue as gg

DECODE, GLUE, EAGER, GRAPH = gg.Mode.DECODE, gg.Route.GLUE, gg.Route.EAGER, gg.Route.GRAPH
LADDER = [2, 4]
ADAPTERS = torch.arange(1, 5) * 100  # what each adapter adds; row 0 is "none" and adds nothing
ADAPTERS[0] = 0


class Variant(NamedTuple):
    """What an engine captures forwards for."""

    lora: bool = False
    attention: str = "full"
    stream: int = 0


VARIANTS = tuple(Variant(*one) for one in itertools.product((False, True), ("full", "window"), (0, 1)))
CONTRACT = gg.PrepContract(
    name="meta",
    reads={"seq_lens": 1, "adapter": 0},
    tables=("adapters",),
    outputs={"positions": "request", "added": "request"},
    modes={DECODE},
    features={"lora"},
)
SLOTS = [
    gg.Slot("seq_lens", axis="request", dtype=torch.int64, pad=1),
    gg.Slot("adapter", axis="request", dtype=torch.int64, pad=0, index_of="adapters"),
    gg.Slot("input_ids", axis="token", dtype=torch.int64, pad=0),
]


def prep(view: Any) -> dict[str, torch.Tensor]:
    return {"positions": view.seq_lens - 1, "added": view.tables.adapters[view.adapter]}


def forward(view: Any, metadata: Any) -> torch.Tensor:
    """Run another computation for each variant, as an engine's model does; the Python runs at capture only."""
    lora, attention, stream = view.variant
    seen = metadata["positions"] if attention == "full" else metadata["positions"].clamp(max=3)
    rows = view.input_ids * 1000 + seen * 10 + stream
    return rows + metadata["added"] if lora else rows


def expected(sources: dict[str, list[int]], variant: Variant) -> list[int]:
    rows = []
    for length, adapter, token in zip(sources["seq_lens"], sources["adapter"], sources["input_ids"]):
        seen = length - 1 if variant.attention == "full" else min(length - 1, 3)
        added = int(ADAPTERS[adapter]) if variant.lora else 0
        rows.append(token * 1000 + seen * 10 + variant.stream + added)
    return rows


def runner_of(contract: gg.PrepContract = CONTRACT, variants: Any = VARIANTS, **more: Any) -> gg.Runner:
    registry = gg.Registry()
    registry.register(contract)(more.pop("with_prep", prep))
    made: dict[str, Any] = {"slots": SLOTS, "ladder": LADDER, "tables": {"adapters": ADAPTERS}, "forward": forward}
    runner = gg.Runner(registry=registry, prep="meta", variants=variants, **{**made, **more})
    runner.capture(progress=False)
    return runner


@pytest.fixture(scope="module")
def runner() -> Iterator[gg.Runner]:
    with runner_of() as made:
        yield made


def step(runner: gg.Runner, requests: int, variant: Any, seed: int = 0, features: Any = frozenset()) -> gg.Step:
    """Run a step, and hold its outputs against the variant's own loop."""
    rng = random.Random(seed)
    sources = {
        "seq_lens": [rng.randint(1, 9) for _ in range(requests)],
        "adapter": [rng.randrange(4) for _ in range(requests)],
        "input_ids": [rng.randrange(50) for _ in range(requests)],
    }
    batch = (
        gg.Batch(requests, sources, variant=variant, features=features) if requests else gg.Batch.idle(DECODE, variant)
    )
    replayed = runner.replay(batch)
    assert replayed.outputs.tolist() == expected(sources, variant)
    return replayed


def way(replayed: gg.Step) -> tuple[Any, ...]:
    decision = replayed.decision
    return decision.prep, decision.forward, decision.reason


# Variants.


def test_each_combination_has_keys_of_its_own(runner: gg.Runner) -> None:
    keys = runner.space.keys()
    assert len(keys) == len(set(keys)) == len(LADDER) * len(VARIANTS)
    assert {key.variant for key in keys} == set(VARIANTS)
    assert all(key["states"] == {"meta": "captured", "forward": "captured"} for key in runner.stats()["keys"])


def test_steps_of_all_variants_in_any_order_are_each_right_and_replay_a_graph(runner: gg.Runner) -> None:
    order = [(variant, requests) for variant in VARIANTS for requests in (1, 2, 3, 4)] * 2
    random.Random(6).shuffle(order)
    for seed, (variant, requests) in enumerate(order):
        replayed = step(runner, requests, variant, seed)
        reason = gg.Reason.UNPADDED if requests in LADDER else gg.Reason.PADDED
        assert way(replayed) == (GLUE, GRAPH, reason)
        size = 2 if requests < 3 else 4
        assert replayed.decision.key == gg.Key(DECODE, size, size, 1, None, variant)


def test_the_comparison_tells_variants_apart() -> None:
    """A step of one variant that ran as another would be seen: the outputs of all eight differ."""
    sources = {"seq_lens": [9, 5], "adapter": [3, 1], "input_ids": [4, 7]}
    assert len({tuple(expected(sources, variant)) for variant in VARIANTS}) == len(VARIANTS)


def test_an_idle_step_takes_the_graph_of_its_variant(runner: gg.Runner) -> None:
    for variant in VARIANTS:
        replayed = step(runner, 0, variant)
        assert way(replayed) == (EAGER, GRAPH, gg.Reason.IDLE_EAGER)
        assert replayed.decision.key.variant == variant


@pytest.mark.parametrize(
    "variant",
    [Variant(True, "full", 2), Variant(False, "window", -1)],
    ids=["a stream more", "no stream"],
)
def test_a_variant_that_nobody_captured_is_eager_and_right(runner: gg.Runner, variant: Variant) -> None:
    replayed = step(runner, 3, variant)
    assert way(replayed) == (EAGER, EAGER, gg.Reason.NOT_CAPTURED)
    assert replayed.decision.forward_reason is gg.Reason.NO_FORWARD_GRAPH
    assert way(step(runner, 3, VARIANTS[0]))[:2] == (GLUE, GRAPH)


def test_equal_values_are_one_variant(runner: gg.Runner) -> None:
    """Variants are compared as dict keys are: what the engine makes anew at each step finds the captured one."""
    assert way(step(runner, 3, Variant(True, "win" + "dow", 1)))[:2] == (GLUE, GRAPH)
    with runner_of(variants=(Variant(), Variant(), Variant(stream=1))) as twice:
        assert len(twice.space.keys()) == 2 * len(LADDER)


@pytest.mark.parametrize("variant", [[True], {"lora": 1}])
def test_a_variant_that_can_not_be_looked_up_is_refused(runner: gg.Runner, variant: Any) -> None:
    with pytest.raises(gg.BindError, match="expected a hashable value, which is part of the key"):
        runner.replay(gg.Batch(1, {"seq_lens": [1], "adapter": [0], "input_ids": [1]}, variant=variant))
    with pytest.raises(gg.ConfigError, match="expected hashable values"):
        runner_of(variants=[variant])
    with pytest.raises(gg.ConfigError, match="expected at least one"):
        runner_of(variants=[])


def test_the_hook_around_each_key_knows_its_variant() -> None:
    """An engine that captures on one stream of several enters the one of the key's index."""
    entered: list[gg.Key] = []

    @contextmanager
    def on_stream(key: gg.Key) -> Iterator[None]:
        entered.append(key)
        yield

    with runner_of(hooks=gg.CaptureHooks(key=on_stream)) as made:
        assert entered == list(made.space.keys())
        for index in (0, 1):
            assert sum(key.variant.stream == index for key in entered) == len(entered) // 2


def test_one_variant_s_failure_is_its_own() -> None:
    broken = {"now": True}

    def failing(view: Any, metadata: Any) -> torch.Tensor:
        if view.variant.attention == "window" and broken["now"]:
            float(view.input_ids.sum())  # what no recorder takes
        return forward(view, metadata)

    with runner_of(forward=failing) as made:
        for variant in VARIANTS:
            replayed = step(made, 3, variant)
            window = variant.attention == "window"
            assert way(replayed) == (GLUE, EAGER if window else GRAPH, gg.Reason.PADDED)
            assert replayed.decision.forward_reason is (gg.Reason.FORWARD_QUARANTINED if window else None)
        broken["now"] = False
        assert {key.variant.attention for key in made.maintain()} == {"window"}
        assert way(step(made, 3, Variant(attention="window")))[:2] == (GLUE, GRAPH)


def test_a_prep_may_depend_on_the_variant() -> None:
    """The variant is in the key of the prep as well, so what it decides is baked for each."""

    def by_kind(view: Any) -> dict[str, torch.Tensor]:
        made = prep(view)
        if view.variant.attention == "window":
            made["positions"] = made["positions"].clamp(max=3)
        return made

    with runner_of(with_prep=by_kind) as made:
        for seed, variant in enumerate([*VARIANTS, *reversed(VARIANTS)]):
            replayed = step(made, 3, variant, seed)
            assert way(replayed)[:2] == (GLUE, GRAPH)
            assert variant.attention == "full" or max(replayed.metadata["positions"].tolist()) <= 3


# Features.


@pytest.mark.parametrize("audited", [frozenset(), frozenset({"lora"}), frozenset({"lora", "tbo"})], ids=sorted)
@pytest.mark.parametrize("active", [(), ("lora",), ("tbo",), ("lora", "tbo"), ("other",)], ids=str)
def test_a_prep_is_glued_only_with_features_that_its_contract_was_audited_with(
    audited: frozenset[str], active: tuple[str, ...]
) -> None:
    contract = CONTRACT.model_copy(update={"features": audited})
    with runner_of(contract, variants=VARIANTS[:2]) as made:
        for requests in (3, 4):
            replayed = step(made, requests, VARIANTS[0], features=frozenset(active))
            if set(active) <= audited:
                assert way(replayed)[0] is GLUE
            else:
                assert way(replayed) == (EAGER, GRAPH, gg.Reason.FEATURE_NOT_AUDITED)


def test_a_feature_changes_no_key_and_a_variant_does(runner: gg.Runner) -> None:
    """LoRA on is both: adapters steer the prep, which was audited with them, and the forward is another one."""
    with_feature = step(runner, 3, Variant(lora=True), features=frozenset({"lora"}))
    without = step(runner, 3, Variant(lora=True))
    assert with_feature.decision.key == without.decision.key
    assert way(with_feature) == way(without) == (GLUE, GRAPH, gg.Reason.PADDED)
    off = step(runner, 3, Variant(lora=False))
    assert off.decision.key != without.decision.key
    unknown = step(runner, 3, Variant(lora=True), features=frozenset({"lora", "tbo"}))
    assert way(unknown) == (EAGER, GRAPH, gg.Reason.FEATURE_NOT_AUDITED), "the forward of the variant still replays"


def test_decisions_of_other_features_are_not_remembered_for_a_step(runner: gg.Runner) -> None:
    """Equal counts with other features follow each other: each is decided by its own."""
    for features, route in ((set(), GLUE), ({"tbo"}, EAGER), ({"lora"}, GLUE), ({"tbo", "lora"}, EAGER), (set(), GLUE)):
        assert way(step(runner, 3, VARIANTS[3], features=frozenset(features)))[0] is route


def test_of_several_preps_only_those_not_audited_go_eager() -> None:
    registry = gg.Registry()
    registry.register(CONTRACT)(prep)
    other = gg.PrepContract(name="other", reads={"seq_lens": 1}, outputs={"double": "request"}, modes={DECODE})
    registry.register(other)(lambda view: {"double": view.seq_lens * 2})
    with gg.Runner(
        slots=SLOTS, ladder=LADDER, prep=["meta", "other"], registry=registry, tables={"adapters": ADAPTERS},
        forward=lambda view, metadata: metadata["meta"]["added"] + metadata["other"]["double"],
    ) as made:  # fmt: skip
        made.capture(progress=False)
        sources = {"seq_lens": [4, 5, 6], "adapter": [1, 0, 3], "input_ids": [0, 0, 0]}
        for features, route in ((frozenset(), GLUE), (frozenset({"lora"}), EAGER)):
            replayed = made.replay(gg.Batch(3, sources, features=features))
            assert replayed.outputs.tolist() == [208, 10, 412]
            assert replayed.decision.preps["meta"].route is GLUE
            assert replayed.decision.preps["other"].route is route
            assert replayed.decision.prep is route
            assert replayed.decision.forward is GRAPH


def test_features_are_a_set_of_names(runner: gg.Runner) -> None:
    sources = {"seq_lens": [1], "adapter": [0], "input_ids": [1]}
    with pytest.raises(gg.BindError, match="expected a set of names"):
        runner.replay(gg.Batch(1, sources, variant=VARIANTS[0], features="lora"))  # type: ignore[arg-type]
