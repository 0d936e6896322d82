"""The public strategies for runners and groups of ranks: what they draw is legal, and all of it occurs."""

from __future__ import annotations

from collections import Counter
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import graphglue as gg
from graphglue.ranks import Planner, RankFacts
from graphglue.testing import strategies

LADDER, ROWS = [2, 5], 7


def runner(width: int = 1, plan: Any = None, modes: frozenset[gg.Mode] = frozenset({gg.Mode.DECODE}), **contract: Any):
    """Build a runner of a prep that indexes with what it is handed."""
    slots = [
        gg.Slot("rows", axis="request", dtype=torch.int64, pad=0, index_of="table"),
        gg.Slot("columns", axis="token", dtype=torch.int32, pad=0, valid=(1, 3)),
        gg.Slot("indptr", axis="offset", dtype=torch.int64, pad=gg.REPEAT_LAST),
        gg.Slot("planned", axis="fixed", dtype=torch.int64, pad=0, inner=(1,)),
        gg.Slot("num_real", axis="fixed", dtype=torch.int64, pad=0, value=gg.RAW_REQUESTS),
    ]
    registry = gg.Registry()
    declared = gg.PrepContract(name="p", reads={slot.name: slot.pad for slot in slots}, modes=modes, **contract)
    registry.register(declared, plan=plan)(lambda view: {"m": view.rows + view.num_real})
    config = gg.RunnerConfig(max_requests=4) if gg.Mode.EXTEND in modes else None
    return gg.Runner(
        slots=slots,
        ladder=LADDER,
        prep="p",
        registry=registry,
        tables={"table": torch.zeros(ROWS, 4)},
        tokens_per_request=width,
        config=config,
    )


RUNNERS = {
    "decode": runner(),
    "ragged verify": runner(3, modes=frozenset({gg.Mode.VERIFY, gg.Mode.DECODE}), ragged=True),
    "extend": runner(modes=frozenset({gg.Mode.EXTEND})),
    "planned": runner(plan=lambda batch, bucket: {"planned": [bucket.requests]}),
}


@pytest.mark.parametrize("name", RUNNERS)
@given(data=st.data())
def test_a_runner_s_batch_is_legal(name: str, data: st.DataObject) -> None:
    drawn = RUNNERS[name]
    batch = data.draw(strategies.runner_batches(drawn))
    step = drawn.replay(batch)  # exact extents, dtypes and names
    assert step.decision.bucket in drawn.buckets or not drawn.space.counts_tokens
    assert step.decision.reason is not gg.Reason.OVER_LADDER
    assert ("planned" in batch.sources) == (name != "planned" and batch.num_requests > 0)
    if batch.num_requests:
        rows, columns = (np.asarray(batch.sources[slot]).reshape(-1) for slot in ("rows", "columns"))
        assert 0 <= rows.min() <= rows.max() < ROWS
        assert 1 <= columns.min() <= columns.max() <= 3
        ends = np.asarray(batch.sources["indptr"]).reshape(-1)
        assert ends[0] == 0
        assert ends[-1] == step.raw.tokens
        assert np.all(np.diff(ends) >= 1)
        assert batch.row_tokens is None or np.array_equal(np.diff(ends), batch.row_tokens)


def test_every_kind_of_batch_occurs() -> None:
    seen: Counter[str] = Counter()

    @settings(max_examples=300, database=None, derandomize=True)
    @given(batch=strategies.runner_batches(RUNNERS["ragged verify"]))
    def look(batch: gg.Batch) -> None:
        seen["idle" if not batch.num_requests else "ragged" if batch.row_tokens else "uniform"] += 1
        seen["bucket" if batch.num_requests in LADDER else "padded"] += 1
        seen[batch.mode.value] += 1
        seen.update(type(source).__name__ for source in batch.sources.values())

    look()
    kinds = {"idle", "ragged", "uniform", "bucket", "padded", "decode", "verify", "Tensor", "ndarray", "list", "tuple"}
    assert kinds <= set(seen)


def test_no_idle_batch_and_no_other_container_than_asked_for() -> None:
    @given(batch=strategies.runner_batches(RUNNERS["decode"], idle=False, into=[torch.Tensor.numpy]))
    def look(batch: gg.Batch) -> None:
        assert batch.num_requests > 0
        assert {type(source) for source in batch.sources.values()} == {np.ndarray}

    look()


@pytest.mark.parametrize("modes", [[gg.Mode.DECODE, gg.Mode.VERIFY], [gg.Mode.EXTEND], list(gg.Mode)], ids=str)
@given(data=st.data())
def test_every_group_of_ranks_can_be_planned(modes: list[gg.Mode], data: st.DataObject) -> None:
    ladder = data.draw(strategies.ladders())
    width = data.draw(st.integers(1, 3))
    facts = data.draw(strategies.dp_groups(ladder, width=width, modes=modes, num_extra=2))
    assert 1 <= len(facts) <= 8
    assert len({fact.mode for fact in facts if fact.requests}) <= 1
    assert all(len(fact.extra) == 2 for fact in facts)
    plan = Planner(ladder, width=width).plan(facts)
    assert len(plan.counts) == len(facts)


def test_every_kind_of_rank_occurs_and_can_be_left_out() -> None:
    def kinds(**fields: Any) -> set[str]:
        seen: set[str] = set()

        @settings(max_examples=100, database=None, derandomize=True)
        @given(facts=strategies.dp_groups(LADDER, min_ranks=2, max_ranks=4, **fields))
        def look(facts: list[RankFacts]) -> None:
            assert 2 <= len(facts) <= 4
            for fact in facts:
                seen.add("refused" if fact.refused else "veto" if not fact.vote else "votes")
                seen.add("over" if fact.requests > LADDER[-1] else "idle" if not fact.requests else "busy")

        look()
        return seen

    assert kinds() == {"refused", "veto", "votes", "over", "idle", "busy"}
    assert kinds(vetoes=False, idle=False, over=False) == {"votes", "busy"}
