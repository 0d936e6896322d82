"""A whole prefill step: sources in, metadata, layers. A replay is the last third of what an engine does for it."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import torch

import graphglue as gg
from graphglue.bench.prefill import Attend, Body
from graphglue.bench.timing import Step

NUM_REQUESTS, MAX_REQUESTS, NUM_SOURCE_SETS, PAGE_SIZE = 7, 8, 8, 16
SLOTS = (
    *(gg.Slot(name, "token", torch.int64, 0) for name in ("input_ids", "positions", "out_cache_loc")),
    gg.Slot("seq_lens", "request", torch.int64, 1),
    gg.Slot("extend_lens", "request", torch.int64, 0),
    gg.Slot("req_pool_indices", "request", torch.int64, 0),
    gg.Slot("cu_seqlens", "offset", torch.int64, gg.REPEAT_LAST),
)
CONTRACT = gg.PrepContract(
    name="prefill",
    reads={slot.name: slot.pad for slot in SLOTS if slot.name not in ("input_ids", "positions")},
    outputs={"page": "token", "in_page": "token", "row_of_token": "token"},
    modes={gg.Mode.EXTEND},
)


def prep(view: Any) -> dict[str, torch.Tensor]:
    """Compute the metadata that attention over variable lengths reads."""
    ends = view.seq_lens.cumsum(0)
    tokens = torch.arange(view.out_cache_loc.shape[0], device=ends.device)
    owners = torch.searchsorted(view.cu_seqlens, tokens, right=True) - 1
    return {
        "prefix_lens": view.seq_lens - view.extend_lens,
        "kv_ends": ends.to(torch.int32),
        "page": view.out_cache_loc // PAGE_SIZE,
        "in_page": view.out_cache_loc % PAGE_SIZE,
        "row_of_token": view.req_pool_indices[owners.clamp(0, view.req_pool_indices.shape[0] - 1)],
    }


def sources(tokens: int, seed: int) -> dict[str, np.ndarray]:
    """Draw a step of ``tokens`` real tokens, as host arrays."""
    rng = np.random.default_rng(seed)
    cuts = np.sort(rng.choice(np.arange(1, tokens), NUM_REQUESTS - 1, replace=False))
    offsets = np.concatenate([[0], cuts, [tokens]]).astype(np.int64)
    lens = np.diff(offsets)
    return {
        "input_ids": rng.integers(0, 1000, tokens),
        "positions": np.arange(tokens) - np.repeat(offsets[:-1], lens),
        "out_cache_loc": rng.permutation(tokens * 4)[:tokens],
        "seq_lens": lens + rng.integers(0, 100, NUM_REQUESTS),
        "extend_lens": lens,
        "req_pool_indices": rng.permutation(MAX_REQUESTS)[:NUM_REQUESTS],
        "cu_seqlens": offsets,
    }


class Steps:
    """The same steps through ``Runner.replay``, and as an engine runs them that owns static buffers.

    Args:
        body: the layers.
        marked: the eager break of the runner's forward.
    """

    def __init__(self, body: Body, marked: Attend) -> None:
        registry = gg.Registry()
        registry.register(CONTRACT)(prep)
        self._turns = [sources(body.rows, seed) for seed in range(NUM_SOURCE_SETS)]
        self.runner = gg.Runner(
            slots=SLOTS,
            ladder=[body.rows],
            prep=CONTRACT.name,
            registry=registry,
            forward=lambda view, metadata: body.run(body.rows, marked),
            device=body.device,
            config=gg.RunnerConfig(max_requests=MAX_REQUESTS),
        )
        self.runner.capture(progress=False)
        self._tokens = body.rows

    @property
    def glued(self) -> Step:
        """Give the step through the runner: fill, prep and first segment are one launch."""
        replay, turn, tokens = self.runner.replay, itertools.cycle(self._turns).__next__, self._tokens
        return lambda: replay(gg.Batch(NUM_REQUESTS, turn(), mode=gg.Mode.EXTEND, num_tokens=tokens))

    def by_hand(self, replay: Callable[[], object]) -> Step:
        """Give the step of slice copies, tail resets, an eager prep and somebody's replay."""
        view = self.runner.view(self._tokens).fresh()
        turn, pads = itertools.cycle(self._turns).__next__, {"seq_lens": 1}

        def fill(given: Mapping[str, Any]) -> None:
            for name, values in given.items():
                slot, count = view[name], len(values)
                slot[:count].copy_(torch.from_numpy(values), non_blocking=True)
                if count < slot.shape[0]:
                    slot[count:].fill_(int(values[-1]) if name == "cu_seqlens" else pads.get(name, 0))

        def step() -> object:
            fill(turn())
            prep(view)
            return replay()

        return step
