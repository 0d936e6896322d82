"""The host-planned prep on a GPU: what the planner computes travels as slots, and the merge is the same in a graph."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch

import graphglue as gg
from graphglue.preps import split_kv

from ..unit.preps.cases import Sizes, listed, tensors, world

SIZES, WORKERS, PAGE, LADDER, HEADS = Sizes(max_context=40), 8, 2, [1, 3, 6], (2, 3, 4)
LISTS = world(SIZES, seed=2)
STEPS = [[5], [40], [1, 1, 1], [40, 1, 7], [2, 9], [17, 40, 3, 1, 8], [40] * 6, [1] * 6, [6, 5, 4, 3]]


def test_glued_steps_are_the_loop_s_and_attend_as_in_one_piece() -> None:
    rows = (len(LISTS["full_to_swa"]), HEADS[0], HEADS[2])
    keys, values = (torch.randn(rows, dtype=torch.float64, device="cuda") for _ in range(2))
    registry = gg.Registry()
    split_kv.register(registry, WORKERS, PAGE)
    runner = gg.Runner(
        slots=[*split_kv.slots(WORKERS), gg.Slot("queries", "request", torch.float64, 0.0, inner=HEADS)],
        ladder=LADDER, registry=registry, prep=split_kv.NAME, output_axes="request", device="cuda",
        tables={"req_to_token": tensors(LISTS, "cuda")["req_to_token"]},
        forward=lambda view, metadata: split_kv.attend(view.queries, keys, values, metadata),
    )  # fmt: skip
    with runner:
        runner.capture(progress=False)
        for seed, seq_lens in enumerate([*STEPS, *reversed(STEPS)]):
            requests = random.Random(seed).sample(range(1, SIZES.num_requests + 1), len(seq_lens))
            queries = torch.randn(len(seq_lens), *HEADS, dtype=torch.float64, device="cuda")
            sources: dict[str, Any] = {"seq_lens": seq_lens, "req_pool_indices": requests, "queries": queries}
            step = runner.replay(gg.Batch(len(seq_lens), sources))
            assert (step.decision.prep, step.decision.forward) == (gg.Route.GLUE, gg.Route.GRAPH)
            expected = split_kv.reference(seq_lens, requests, LISTS["req_to_token"], WORKERS, PAGE)
            spare = step.decision.bucket.requests - len(seq_lens)
            expected["piece_indptr"] += [expected["piece_indptr"][-1]] * spare
            assert listed(step.metadata) == expected
            for query, length, row, mixed in zip(queries, seq_lens, requests, step.outputs, strict=True):
                seen = LISTS["req_to_token"][row][:length]
                scores = torch.einsum("kgd,ckd->kgc", query, keys[seen]) * HEADS[2] ** -0.5
                whole = torch.einsum("kgc,ckd->kgd", scores.softmax(-1), values[seen])
                torch.testing.assert_close(mixed, whole, rtol=1e-11, atol=1e-12)


def test_lengths_on_the_device_are_refused_with_what_to_do() -> None:
    registry = gg.Registry()
    split_kv.register(registry, WORKERS, PAGE)
    tables = {"req_to_token": tensors(LISTS, "cuda")["req_to_token"]}
    slots = split_kv.slots(WORKERS)
    with gg.Runner(
        slots=slots, ladder=[2], registry=registry, prep=split_kv.NAME, tables=tables, device="cuda"
    ) as made:
        lengths = torch.tensor([3, 4], device="cuda")
        with pytest.raises(gg.BindError, match="reads it on the host; hand in a list, a numpy array or a CPU tensor"):
            made.prepare(gg.Batch(2, {"seq_lens": lengths, "req_pool_indices": [1, 2]}))
