"""Hybrid backends: a list of preps behind one runner, two attention kinds with page sizes of their own among them."""

from __future__ import annotations

import random
from collections.abc import Iterable
from typing import Any

import pytest
import torch

import graphglue as gg
from graphglue.preps import causal, compression, paged_decode, reference, top_up

from .preps import pages
from .preps.cases import CASES, Sizes, Step, drawn, listed, tensors, world

SIZES = Sizes(page_size=8, max_context=30)
SMALL = 4  # the other kind's pages: two of them lie in each of SIZES
LADDER = [1, 2, 4]
LISTS = world(SIZES, seed=3)
DECODE, VERIFY = gg.Mode.DECODE, gg.Mode.VERIFY
GLUE, EAGER, GRAPH = gg.Route.GLUE, gg.Route.EAGER, gg.Route.GRAPH
WINDOWED, PAGED = "dsv4-decode", "paged-decode"
LAYOUT = SIZES.layout


def registered(**changes: dict[str, Any]) -> gg.Registry:
    """Register both kinds; ``changes`` are made to their contracts, by prep name with underscores."""
    registry = gg.Registry()
    kinds = ((causal.CONTRACTS[WINDOWED], causal.make(WINDOWED, **LAYOUT)), (paged_decode.CONTRACT, paged(SMALL)))
    for contract, prep in kinds:
        change = changes.get(contract.name.replace("-", "_"), {})
        registry.register(contract.model_copy(update=change))(prep)
    return registry


def paged(page_size: int) -> Any:
    return paged_decode.make(page_size)


def forward(view: Any, metadata: Any) -> torch.Tensor:
    """Read what each kind's layers would, under its name."""
    window, full = metadata[WINDOWED], metadata[PAGED]
    return window["swa_page_indices"].sum(1) * 1000 + full["page_table"].sum(1) * 10 + full["positions"]


def runner_of(registry: gg.Registry | None = None, preps: Any = (WINDOWED, PAGED), **more: Any) -> gg.Runner:
    made: dict[str, Any] = {
        "slots": causal.slots(WINDOWED),
        "ladder": LADDER,
        "forward": forward,
        "tables": tensors(LISTS),
    }
    runner = gg.Runner(prep=list(preps), registry=registry or registered(), **{**made, **more})
    runner.capture(progress=False)
    return runner


def expected_of(step: Step, bucket: gg.Bucket) -> dict[str, dict[str, list[Any]]]:
    """Compute both kinds' metadata with loops."""
    padded = step.padded(bucket)
    table = LISTS["req_to_token"]
    rows = reference.decode_rows(padded.seq_lens, padded.requests)
    return {
        WINDOWED: reference.causal(rows, padded.out_cache_loc, **LISTS, **LAYOUT),
        PAGED: paged_decode.reference(padded.seq_lens, padded.requests, padded.out_cache_loc, table, SMALL),
    }


def checked(runner: gg.Runner, requests: int, seed: int = 0, **more: Any) -> gg.Step:
    """Run a step, and hold every prep's metadata and the outputs against the references."""
    step = drawn(SIZES, LISTS, [1] * requests, random.Random(seed))
    batch = gg.Batch(requests, step.sources(False), **more) if requests else gg.Batch.idle()
    replayed = runner.replay(batch)
    expected = expected_of(step, replayed.decision.bucket)
    assert {name: listed(metadata) for name, metadata in replayed.metadata.items()} == expected
    window, full = expected[WINDOWED], expected[PAGED]
    rows = zip(window["swa_page_indices"], full["page_table"], full["positions"])
    wanted = [sum(one) * 1000 + sum(two) * 10 + three for one, two, three in rows]
    assert replayed.outputs.tolist() == wanted[:requests]
    return replayed


def decided(step: gg.Step) -> dict[str, tuple[gg.Route, gg.Reason]]:
    return {name: tuple(one) for name, one in step.decision.preps.items()}  # type: ignore[misc]


# Two attention kinds, two page sizes.


def test_two_kinds_with_two_page_sizes_are_glued_and_each_is_its_reference() -> None:
    with runner_of() as runner:
        for seed, requests in enumerate([3, 4, 1, 2, 3, 1]):
            step = checked(runner, requests, seed)
            reason = gg.Reason.PADDED if requests == 3 else gg.Reason.UNPADDED
            assert decided(step) == dict.fromkeys((WINDOWED, PAGED), (GLUE, reason))
            assert (step.decision.prep, step.decision.forward, step.decision.reason) == (GLUE, GRAPH, reason)
            assert step.metadata[WINDOWED]["page_table"].shape[1] == 4
            assert step.metadata[PAGED]["page_table"].shape[1] == 8


def test_outputs_of_equal_names_do_not_meet() -> None:
    """Both have a page_table; a list keeps them apart, in the order of the list, and shares no memory."""
    with runner_of() as runner:
        step = checked(runner, 3)
        assert list(step.metadata) == [WINDOWED, PAGED]
        one, other = (step.metadata[name]["page_table"] for name in (WINDOWED, PAGED))
        assert one.untyped_storage().data_ptr() != other.untyped_storage().data_ptr()
    with runner_of(preps=(PAGED, WINDOWED)) as runner:
        assert list(checked(runner, 3).metadata) == [PAGED, WINDOWED]


def test_the_comparison_with_the_references_can_fail() -> None:
    registry = gg.Registry()
    registry.register(causal.CONTRACTS[WINDOWED])(causal.make(WINDOWED, **LAYOUT))
    registry.register(paged_decode.CONTRACT)(paged(SIZES.page_size))  # the other kind's page size
    with runner_of(registry) as runner, pytest.raises(AssertionError):
        checked(runner, 3)


def test_a_kind_may_be_there_twice_with_page_sizes_of_its_own() -> None:
    """Two groups of layers with one kind of attention: the same function under two contracts."""
    registry = registered()
    registry.register(paged_decode.CONTRACT.model_copy(update={"name": "other-pages"}))(paged(SIZES.page_size))
    with runner_of(registry, (WINDOWED, PAGED, "other-pages")) as runner:
        step = drawn(SIZES, LISTS, [1] * 3, random.Random(7))
        metadata = runner.replay(gg.Batch(3, step.sources(False))).metadata
        padded = step.padded(gg.Bucket(4, 4, 1))
        for name, page_size in ((PAGED, SMALL), ("other-pages", SIZES.page_size)):
            table = LISTS["req_to_token"]
            values = (padded.seq_lens, padded.requests, padded.out_cache_loc, table, page_size)
            assert listed(metadata[name]) == paged_decode.reference(*values)


# The weakest declaration wins.

WEAKER: list[Any] = [
    ({"padded": False}, {}, {}, (EAGER, gg.Reason.PADDING_NOT_DECLARED)),
    ({"host_free": False}, {}, {}, (EAGER, gg.Reason.NOT_HOST_FREE)),
    ({"modes": {VERIFY}}, {"modes": frozenset({DECODE})}, {}, (EAGER, gg.Reason.MODE_NOT_DECLARED)),
    ({}, {"glue": {PAGED: "off"}}, {}, (EAGER, gg.Reason.SWITCHED_OFF)),
    ({}, {"glue": {PAGED: "unpadded"}}, {}, (EAGER, gg.Reason.PADDING_NOT_DECLARED)),
    ({}, {}, {"features": frozenset({"lora"})}, (EAGER, gg.Reason.FEATURE_NOT_AUDITED)),
]


@pytest.mark.parametrize("order", [(WINDOWED, PAGED), (PAGED, WINDOWED)], ids=["first", "last"])
@pytest.mark.parametrize(("change", "config", "more", "weakest"), WEAKER, ids=lambda value: str(value)[:40])
def test_the_weakest_declaration_names_the_decision_and_the_other_stays_glued(
    change: dict[str, Any], config: dict[str, Any], more: dict[str, Any], weakest: Any, order: Any
) -> None:
    registry = registered(dsv4_decode={"features": {"lora"}}, paged_decode=change)
    with runner_of(registry, order, config=gg.RunnerConfig(**config)) as runner:
        for seed in range(3):
            step = checked(runner, 3, seed, **more)
            assert decided(step) == {WINDOWED: (GLUE, gg.Reason.PADDED), PAGED: weakest}
            assert (step.decision.prep, step.decision.reason) == weakest
            assert step.decision.forward is GRAPH, "an eager prep writes into what the graph reads"


def test_an_idle_step_is_as_weak_as_the_weakest() -> None:
    with runner_of(registered(dsv4_decode={"idle": "glue"})) as runner:
        step = checked(runner, 0)
        assert decided(step) == {WINDOWED: (GLUE, gg.Reason.IDLE), PAGED: (EAGER, gg.Reason.IDLE_EAGER)}
        assert (step.decision.prep, step.decision.reason) == (EAGER, gg.Reason.IDLE_EAGER)
    with runner_of(registered(dsv4_decode={"idle": "glue"}, paged_decode={"idle": "glue"})) as runner:
        assert checked(runner, 0).decision.reason is gg.Reason.IDLE


def test_ragged_keys_are_there_only_if_every_prep_declares_them() -> None:
    """One kind that takes ragged batches does not make the runner take them."""
    ragged = ("dsv4-ragged-verify", "dsv4-ragged-compression-2")
    for preps, has_keys in ((ragged, True), ((*ragged, "static"), False)):
        registry = gg.Registry()
        causal.register(registry, **LAYOUT)
        compressed = compression.make(2, True, **SIZES.compressed | {"page_size": SMALL, "index_page_size": 1})
        registry.register(compression.contract(2, True))(compressed)
        static = gg.PrepContract(name="static", reads={"seq_lens": 1}, modes={VERIFY})
        registry.register(static)(lambda view: {"lengths": view.seq_lens + 1})
        with gg.Runner(
            slots=causal.slots("dsv4-ragged-verify"), ladder=LADDER, prep=list(preps), registry=registry,
            tables=tensors(LISTS), tokens_per_request=4, forward=lambda view, metadata: view.out_cache_loc + 0,
        ) as runner:  # fmt: skip
            runner.capture(progress=False)
            step = drawn(SIZES, LISTS, [4, 1, 2], random.Random(1))
            replayed = runner.replay(step.batch(VERIFY, ragged=True))
            assert {bucket.row_tokens for bucket in runner.buckets} == ({0, 4} if has_keys else {4})
            assert replayed.decision.reason is (gg.Reason.RAGGED if has_keys else gg.Reason.RAGGED_NOT_DECLARED)
            bucket = gg.Bucket(4, 16, 0)
            expected = CASES["ragged verify"].expected(SIZES, step.padded(bucket), bucket, LISTS)
            assert listed(replayed.metadata["dsv4-ragged-verify"]) == expected
            assert replayed.outputs.tolist() == step.out_cache_loc


def test_a_prep_with_effects_stands_beside_one_without() -> None:
    """The page top-up changes its tables once a step, whatever route the other prep goes."""
    width, page_size = 2, 2
    lists = pages.state(num_requests=4, max_context=12, page_size=page_size, num_pages=20)
    registry = gg.Registry()
    top_up.register(registry, page_size)
    lengths = gg.PrepContract(name="lengths", reads={"seq_lens": 1}, modes={VERIFY}, padded=False)
    registry.register(lengths)(lambda view: {"ends": view.seq_lens + 2})
    tables = pages.tensors(lists)
    with gg.Runner(
        slots=top_up.slots(), ladder=[2, 4], prep=[top_up.NAME, "lengths"], registry=registry, tables=tables,
        tokens_per_request=width, config=gg.RunnerConfig(modes=frozenset({VERIFY}), shadow=gg.Shadow(first=4)),
    ) as runner:  # fmt: skip
        runner.capture(progress=False)
        for requests in ([1, 2, 3], [2, 3, 1, 4], [4], [3, 1]):
            seq_lens = [2 * row for row in range(len(requests))]
            prepared = runner.prepare(pages.batch(VERIFY, seq_lens, requests))
            pads = prepared.decision.bucket.requests - len(requests)
            padded = seq_lens + [1] * pads, requests + [0] * pads
            assert listed(prepared.metadata[top_up.NAME]) == pages.step_reference(
                lists, VERIFY, width, page_size, *padded
            )
            assert pages.held(tables) == lists
            assert prepared.metadata["lengths"]["ends"].tolist() == [one + 2 for one in padded[0]]
            assert prepared.decision.preps[top_up.NAME].route is GLUE
            assert prepared.decision.preps["lengths"].route is (EAGER if pads else GLUE)


# What does not go together is refused at construction.


def build(pads: Iterable[tuple[str, Any]], slot_pad: Any, **more: Any) -> gg.Runner:
    registry = gg.Registry()
    for name, pad in pads:
        contract = gg.PrepContract(name=name, reads={"seq_lens": pad}, modes={DECODE}, **more)
        registry.register(contract)(lambda view: {"lengths": view.seq_lens + 1})
    slots = [gg.Slot("seq_lens", axis="request", dtype=torch.int64, pad=slot_pad)]
    return gg.Runner(slots=slots, ladder=LADDER, prep=[name for name, _ in pads], registry=registry)


@pytest.mark.parametrize("slot_pad", [0, 1, 7])
@pytest.mark.parametrize(
    ("pads", "said"),
    [
        ([("a", 0), ("b", 1)], "slot 'seq_lens': prep 'a' needs pad 0, prep 'b' needs pad 1; no value serves both"),
        ([("b", 1), ("a", 0)], "slot 'seq_lens': prep 'b' needs pad 1, prep 'a' needs pad 0; no value serves both"),
        ([("a", (0, 2)), ("b", (1, 3))], "prep 'a' needs pad 0 or 2, prep 'b' needs pad 1 or 3"),
        ([("a", 0), ("b", (0, 1)), ("c", 1)], "slot 'seq_lens'"),  # each two neighbours agree, all three do not
    ],
)
def test_preps_that_need_different_pads_of_one_slot_are_refused(pads: Any, said: str, slot_pad: int) -> None:
    with pytest.raises(gg.ContractError, match=said):
        build(pads, slot_pad)


@pytest.mark.parametrize("pads", [[("a", 1), ("b", 1)], [("a", (0, 1)), ("b", 1)], [("a", (0, 1)), ("b", (1, 2))]])
def test_preps_that_share_a_pad_need_that_one(pads: Any) -> None:
    build(pads, 1).close()
    with pytest.raises(gg.ContractError, match="slot 'seq_lens' has pad 5, but prep 'a' is right for"):
        build(pads, 5)


def test_a_pad_that_only_one_of_the_shipped_kinds_takes_is_refused() -> None:
    """A kind whose lengths are 0 where nothing is (as some backends want) has no place beside these two."""
    registry = registered()
    contract = gg.PrepContract(name="zero-lengths", reads={"seq_lens": 0}, modes={DECODE})
    registry.register(contract)(lambda view: {"lengths": view.seq_lens + 0})
    with pytest.raises(gg.ContractError, match="prep 'paged-decode' needs pad 1, prep 'zero-lengths' needs pad 0"):
        runner_of(registry, (WINDOWED, PAGED, "zero-lengths"))
    other = gg.Slot("lengths_or_zero", axis="request", dtype=torch.int64, pad=0)  # as the refusal advises
    registry = registered()
    contract = gg.PrepContract(name="zero-lengths", reads={"lengths_or_zero": 0}, modes={DECODE})
    registry.register(contract)(lambda view: {"lengths": view.lengths_or_zero + 0})
    slots = [*causal.slots(WINDOWED), other]
    with runner_of(registry, (WINDOWED, PAGED, "zero-lengths"), slots=slots) as runner:
        step = drawn(SIZES, LISTS, [1] * 3, random.Random(2))
        sources = {**step.sources(False), "lengths_or_zero": step.seq_lens}
        replayed = runner.replay(gg.Batch(3, sources))
        assert replayed.metadata["zero-lengths"]["lengths"].tolist() == [*step.seq_lens, 0]
        assert replayed.metadata[PAGED]["positions"].tolist() == [*[one - 1 for one in step.seq_lens], 0]


@pytest.mark.parametrize(
    ("preps", "error", "said"),
    [
        ((WINDOWED, WINDOWED), gg.ConfigError, "prep 'dsv4-decode' is given twice; outputs are named by prep"),
        ((WINDOWED, "unknown"), gg.ContractError, "unknown"),
        ((), gg.ConfigError, "expected at least one"),
    ],
)
def test_other_lists_are_refused(preps: Any, error: Any, said: str) -> None:
    with pytest.raises(error, match=said):
        runner_of(preps=preps)


def test_a_table_that_only_one_of_them_reads_must_be_there() -> None:
    with pytest.raises(gg.ContractError, match="prep 'dsv4-decode' reads table 'full_to_swa'"):
        runner_of(tables={"req_to_token": tensors(LISTS)["req_to_token"]})


def test_two_planners_that_give_one_slot_are_told_apart_from_a_batch_that_does() -> None:
    registry = gg.Registry()
    for name in ("a", "b"):
        contract = gg.PrepContract(name=name, reads={"split": 0}, modes={DECODE})
        plan = lambda batch, bucket: {"split": [1] * batch.num_requests}  # noqa: E731
        registry.register(contract, plan=plan)(lambda view: {"split": view.split + 1})
    slots = [gg.Slot("split", axis="request", dtype=torch.int64, pad=0)]
    for preps, sources, said in (
        (["a", "b"], {}, r"slots \['split'\] come from the plan of another prep and from the plan of prep 'b'"),
        (["a"], {"split": [1, 1]}, r"slots \['split'\] come from the batch and from the plan of prep 'a'"),
    ):
        with (
            gg.Runner(slots=slots, ladder=LADDER, prep=preps, registry=registry) as runner,
            pytest.raises(gg.BindError, match=said),
        ):
            runner.prepare(gg.Batch(2, sources))
