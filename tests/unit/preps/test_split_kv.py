"""The prep "split-kv-decode" and its host planner: against loops, against attention in one piece, and frozen."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import graphglue as gg
from graphglue.audit import Verdict, audit
from graphglue.preps import split_kv

from .cases import Sizes, listed, tensors, world

SIZES = Sizes(max_context=40)
WORKERS, PAGE, LADDER = 8, 2, [1, 3, 6]
LISTS = world(SIZES, seed=2)
HEADS = (2, 3, 4)  # K, G, D


def caches() -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(4)
    rows = (len(LISTS["full_to_swa"]), HEADS[0], HEADS[2])
    keys, values = (torch.randn(rows, generator=generator, dtype=torch.float64) for _ in range(2))
    return keys, values


KEYS, VALUES = caches()


def forward(view: Any, metadata: Any) -> torch.Tensor:
    return split_kv.attend(view.queries, KEYS, VALUES, metadata)


def runner_of(prep: Callable[[Any], Any], planned: bool = True, **more: Any) -> gg.Runner:
    """Build a runner; without the plan its prep has to come by the pieces in another way."""
    registry = gg.Registry()
    contract, plan = split_kv.CONTRACT, split_kv.make_plan(WORKERS, PAGE)
    slots = [*split_kv.slots(WORKERS), gg.Slot("queries", "request", torch.float64, 0.0, inner=HEADS)]
    if not planned:
        contract, plan = contract.model_copy(update={"reads": {"req_pool_indices": 0}}), None
        slots = [slot for slot in slots if not slot.name.startswith("piece")]
    registry.register(contract, plan=plan)(prep)
    runner = gg.Runner(
        slots=slots, ladder=more.pop("ladder", LADDER), registry=registry, prep=split_kv.NAME, forward=forward,
        tables={"req_to_token": tensors(LISTS)["req_to_token"]}, output_axes="request", **more,
    )  # fmt: skip
    runner.capture(progress=False)
    return runner


def sources_of(seq_lens: list[int], seed: int = 0, kind: Callable[[Any], Any] = list) -> dict[str, Any]:
    rng = random.Random(seed)
    generator = torch.Generator().manual_seed(seed)
    return {
        "seq_lens": kind(seq_lens),
        "req_pool_indices": rng.sample(range(1, SIZES.num_requests + 1), len(seq_lens)),
        "queries": torch.randn(len(seq_lens), *HEADS, generator=generator, dtype=torch.float64),
    }


def whole(sources: dict[str, Any]) -> torch.Tensor:
    """Attend to each request's context in one piece, request by request."""
    rows = []
    for query, length, row in zip(sources["queries"], sources["seq_lens"], sources["req_pool_indices"]):
        seen = LISTS["req_to_token"][row][: int(length)]
        scores = torch.einsum("kgd,ckd->kgc", query, KEYS[seen]) * HEADS[2] ** -0.5
        rows.append(torch.einsum("kgc,ckd->kgd", scores.softmax(-1), VALUES[seen]))
    return torch.stack(rows)


def metadata_of(sources: dict[str, Any], bucket: gg.Bucket) -> dict[str, list[Any]]:
    lengths = [int(length) for length in sources["seq_lens"]]
    expected = split_kv.reference(lengths, sources["req_pool_indices"], LISTS["req_to_token"], WORKERS, PAGE)
    expected["piece_indptr"] += [expected["piece_indptr"][-1]] * (bucket.requests - len(lengths))
    return expected


# The planner.


@given(
    st.lists(st.integers(0, 700), min_size=1, max_size=9), st.integers(0, 30), st.integers(1, 20)
)  # fmt: skip
def test_the_plan_is_the_loop_s(seq_lens: list[int], spare: int, page_size: int) -> None:
    workers, table = len(seq_lens) + spare, [[0] * 700]
    pieces = split_kv.cut(seq_lens, workers, page_size)
    expected = split_kv.reference(seq_lens, [0] * len(seq_lens), table, workers, page_size)
    assert pieces.request.tolist() == expected["piece_request"]
    assert (pieces.end - pieces.begin).tolist() == expected["piece_lengths"]
    assert pieces.indptr.tolist() == expected["piece_indptr"]
    covered = [[] for _ in seq_lens]  # type: ignore[var-annotated]
    for request, begin, end in zip(pieces.request, pieces.begin, pieces.end):
        covered[request] += range(begin, end)
    assert covered == [list(range(length)) for length in seq_lens]
    assert pieces.size % page_size == 0


def test_pieces_are_as_small_as_the_workers_allow() -> None:
    def sizes(*seq_lens: int) -> tuple[int, list[int]]:
        pieces = split_kv.cut(seq_lens, num_workers=8, page_size=4)
        return pieces.size, (pieces.end - pieces.begin).tolist()

    assert sizes(30) == (4, [4, 4, 4, 4, 4, 4, 4, 2])
    assert sizes(40) == (8, [8, 8, 8, 8, 8, 0, 0, 0])
    assert sizes(40, 3, 3, 3) == (8, [8, 8, 8, 8, 8, 3, 3, 3])
    assert sizes(41, 3, 3, 3) == (12, [12, 12, 12, 5, 3, 3, 3, 0])


def test_refusals_say_what_to_do() -> None:
    with pytest.raises(gg.ContractError, match="has 2 workers for 3 requests, and each needs one"):
        split_kv.cut([1, 1, 1], num_workers=2, page_size=4)
    with pytest.raises(gg.ContractError, match="num_workers is 0 and page_size 4, expected at least 1"):
        split_kv.make_plan(0, 4)
    plan = split_kv.make_plan(8, 4)
    with pytest.raises(gg.BindError, match="slot 'seq_lens' is missing"):
        plan(gg.Batch(1), gg.Bucket(1, 1, 1))
    with pytest.raises(gg.BindError, match="on meta, and the planner of split-kv-decode reads it on the host"):
        plan(gg.Batch(1, {"seq_lens": torch.ones(1, device="meta")}), gg.Bucket(1, 1, 1))


# The prep and its merge, in a runner.


@pytest.fixture(scope="module")
def runner() -> Iterator[gg.Runner]:
    with runner_of(split_kv.make()) as made:
        yield made


STEPS = [[5], [40], [1, 1, 1], [40, 1, 7], [2, 9], [17, 40, 3, 1, 8], [40] * 6, [1] * 6, [6, 5, 4, 3]]


@pytest.mark.parametrize("kind", [list, np.array, torch.tensor], ids=["list", "numpy", "torch"])
def test_glued_steps_are_the_loop_s_and_attend_as_in_one_piece(runner: gg.Runner, kind: Any) -> None:
    for seed, seq_lens in enumerate([*STEPS, *reversed(STEPS)]):
        sources = sources_of(seq_lens, seed, kind)
        step = runner.replay(gg.Batch(len(seq_lens), sources))
        assert (step.decision.prep, step.decision.forward) == (gg.Route.GLUE, gg.Route.GRAPH)
        assert listed(step.metadata) == metadata_of(sources, step.decision.bucket)
        torch.testing.assert_close(step.outputs, whole(sources), rtol=1e-12, atol=1e-13)


def test_glued_is_eager_bit_for_bit(runner: gg.Runner) -> None:
    with runner_of(split_kv.make(), config=gg.RunnerConfig(enabled=False)) as eager:
        for seed, seq_lens in enumerate(STEPS):
            sources = sources_of(seq_lens, seed)
            one, other = (each.replay(gg.Batch(len(seq_lens), sources)) for each in (runner, eager))
            assert other.decision.prep is gg.Route.EAGER
            assert torch.equal(one.outputs, other.outputs)


def test_an_idle_step_has_no_pieces(runner: gg.Runner) -> None:
    runner.replay(gg.Batch(1, sources_of([40])))
    step = runner.replay(gg.Batch.idle())
    assert step.metadata["piece_lengths"].tolist() == [0] * WORKERS
    assert step.metadata["piece_indptr"].tolist() == [0, 0]
    assert step.outputs.shape == (0, *HEADS)


def test_requests_without_pieces_get_zeros_and_no_nan() -> None:
    metadata = {
        "piece_request": torch.tensor([1, 0]),
        "piece_lengths": torch.tensor([2, 0]),
        "piece_locations": torch.tensor([[5, 6, -1], [-1, -1, -1]]),
        "piece_indptr": torch.tensor([0, 0, 1, 1]),
    }
    queries = torch.full((3, *HEADS), 1e3, dtype=torch.float64)
    mixed = split_kv.attend(queries, KEYS, VALUES, metadata)
    assert mixed[[0, 2]].abs().max() == 0
    assert mixed[1].isfinite().all()
    assert mixed[1].abs().max() > 0


def test_the_registered_prep_has_its_planner() -> None:
    registry = gg.Registry()
    split_kv.register(registry, WORKERS, PAGE)
    slots = [*split_kv.slots(WORKERS), gg.Slot("queries", "request", torch.float64, 0.0, inner=HEADS)]
    tables = {"req_to_token": tensors(LISTS)["req_to_token"]}
    with gg.Runner(slots=slots, ladder=[2], registry=registry, prep=split_kv.NAME, tables=tables) as made:
        sources = sources_of([9, 31])
        prepared = made.prepare(gg.Batch(2, sources))
        assert listed(prepared.metadata) == metadata_of(sources, gg.Bucket(2, 2, 1))


def test_too_few_workers_refuse_the_step_before_anything_is_written(runner: gg.Runner) -> None:
    registry = gg.Registry()
    split_kv.register(registry, 2, PAGE)
    tables = {"req_to_token": tensors(LISTS)["req_to_token"]}
    with gg.Runner(
        slots=split_kv.slots(2), ladder=[4], registry=registry, prep=split_kv.NAME, tables=tables
    ) as made:  # fmt: skip
        before = made.view(4).seq_lens.clone()
        sources = sources_of([9, 31, 1])
        sources.pop("queries")
        with pytest.raises(gg.ContractError, match="build prep and slots with num_workers"):
            made.prepare(gg.Batch(3, sources))
        assert torch.equal(made.view(4).seq_lens, before)


# What the plan is for: the same prep, with the planner's numbers baked into the capture.


class Planner:
    """An engine's planner object: the host's lengths of the running step."""

    def __init__(self) -> None:
        self.seq_lens = [1]

    def __call__(self, view: Any) -> dict[str, torch.Tensor]:
        """Do what the prep does, from numbers that the host has now; nothing here reads a tensor on the host."""
        pieces = split_kv.cut(self.seq_lens, WORKERS, PAGE)
        columns = torch.arange(view.tables.req_to_token.shape[1])
        rows = []
        for request, begin, end in zip(pieces.request.tolist(), pieces.begin.tolist(), pieces.end.tolist()):
            inside = columns < end - begin
            row = view.req_pool_indices[request : request + 1]
            found = view.tables.req_to_token[row, torch.where(inside, columns + begin, 0)]
            rows.append(torch.where(inside, found, -1))
        indptr = [*pieces.indptr.tolist(), *[int(pieces.indptr[-1])] * view.bucket.requests]
        numbers = {
            "piece_request": pieces.request.tolist(),
            "piece_lengths": (pieces.end - pieces.begin).tolist(),
            "piece_indptr": indptr[: view.bucket.requests + 1],
        }
        baked = {name: torch.stack([torch.full((), one) for one in values]) for name, values in numbers.items()}
        return {**baked, "piece_indptr": baked["piece_indptr"].to(torch.int32), "piece_locations": torch.stack(rows)}


def served(runner: gg.Runner, planner: Planner | None = None) -> list[bool]:
    """Serve steps of other lengths; tell of each whether its results are those of attention in one piece."""
    right = []
    for seed, seq_lens in enumerate([[1], [5], [40], [33]]):
        sources = sources_of(seq_lens, seed)
        if planner is not None:
            planner.seq_lens = seq_lens
        step = runner.replay(gg.Batch(len(seq_lens), sources))
        right.append(torch.allclose(step.outputs, whole(sources), rtol=1e-12, atol=1e-13))
    return right


def test_a_frozen_plan_gives_wrong_results_and_one_that_travels_as_slots_holds(runner: gg.Runner) -> None:
    planner = Planner()
    with runner_of(planner, planned=False, config=gg.RunnerConfig(glue={split_kv.NAME: "off"})) as eager:
        assert served(eager, planner) == [True] * 4, "run anew at each step, the prep is right"
    planner = Planner()
    with runner_of(planner, planned=False) as frozen:
        assert frozen.can_replay(gg.Batch(1, sources_of([40]))).prep is gg.Route.GLUE, "nothing refused it"
        assert served(frozen, planner) == [True, False, False, False], "each later step sees a single position"
    assert runner.can_replay(gg.Batch(1, sources_of([40]))).prep is gg.Route.GLUE
    assert served(runner) == [True] * 4


def test_the_shadow_check_finds_a_frozen_plan_and_lets_one_in_slots_pass() -> None:
    planner, shadow = Planner(), gg.RunnerConfig(shadow=gg.Shadow(first=8))
    with runner_of(planner, planned=False, config=shadow) as frozen:
        right = served(frozen, planner)
        assert right[:2] == [True, False]
        assert right[-1], "in quarantine, the prep runs eagerly"
        assert frozen.stats()["shadow"]["mismatched"] >= 1
    with runner_of(split_kv.make(), config=shadow) as planned:
        assert served(planned) == [True] * 4
        counts = planned.stats()["shadow"]
        assert counts["passed"] == counts["sampled"] == 4


def test_the_audit_finds_a_frozen_plan_by_what_the_host_changes() -> None:
    planner = Planner()

    def perturb() -> None:
        planner.seq_lens = [planner.seq_lens[0] % 30 + 7]

    def verdict(runner: gg.Runner) -> Verdict:
        certificate = audit(runner, perturb=perturb)
        return next(check.verdict for check in certificate.checks if check.name == "double_capture")

    with runner_of(planner, planned=False, ladder=[1]) as frozen:
        assert verdict(frozen) is Verdict.FAIL
    with runner_of(split_kv.make(), ladder=[1, 3]) as planned:
        batches = [gg.Batch(len(one), sources_of(one, seed)) for seed, one in enumerate(STEPS[:5])]
        certificate = audit(planned, perturb=perturb, batches=batches)
        assert {check.name for check in certificate.checks if check.verdict is Verdict.FAIL} == set()
