"""Batches for a runner as it stands: its modes, widths and variants, with values that its preps may index with."""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from hypothesis import strategies as st

from graphglue.audit import values
from graphglue.core.batch import Batch, Mode
from graphglue.core.buckets import Bucket
from graphglue.core.keys import KeySpace
from graphglue.runner import Runner
from graphglue.testing.strategies import containers

Container = Callable[[torch.Tensor], Any]


@st.composite
def runner_batches(
    draw: st.DrawFn, runner: Runner, *, idle: bool = True, into: Sequence[Container] | None = None
) -> Batch:
    """Draw a batch that a runner's ladder covers: idle, unpadded, padded, or ragged where that is captured.

    Values are legal as ``Slot.valid`` and ``Slot.index_of`` say; for a slot that says neither, small
    numbers that are a row of every table. Offset slots are the running sums of the requests' tokens. What a
    host planner computes is left out.

    Args:
        runner: captured or not; only read.
        idle: whether the batch may have no requests.
        into: containers to choose from, each a function of a CPU tensor; by default all that fit, and tensors
            on the runner's device.
    """
    device = runner.arena.device.torch_device
    space = runner.space
    mode, variant = draw(st.sampled_from(space.modes)), draw(st.sampled_from(space.variants))
    if idle and draw(st.integers(0, 9)) == 0:
        return Batch.idle(mode, variant)
    raw = draw(_extents(space, mode))
    drawn, row_tokens = _legal(runner, raw, draw(st.integers(0, 2**32 - 1)))
    for registration in runner.registrations:
        if registration.plan is not None:
            planned = registration.plan(_batch(raw, drawn, mode, variant, row_tokens), space.cover(raw) or raw)
            drawn = {name: tensor for name, tensor in drawn.items() if name not in planned}
    given = {}
    for name, tensor in drawn.items():
        choices = into or [*containers.fitting(tensor), lambda tensor: tensor.to(device)]
        given[name] = draw(st.sampled_from(choices))(tensor)
    return _batch(raw, given, mode, variant, row_tokens)


@st.composite
def _extents(draw: st.DrawFn, space: KeySpace, mode: Mode) -> Bucket:
    """Draw real extents; those beside a ladder's size are as likely as all others together."""
    near = sorted(
        {size + step for size in space.ladder for step in (-1, 0, 1)} & set(range(1, space.ladder.largest + 1))
    )
    size = draw(st.sampled_from(near) | st.integers(1, space.ladder.largest))
    if mode.counts_tokens:
        return Bucket(draw(st.integers(1, min(size, space.capacity.requests))), size, 0)
    if space.ragged and space.width > 1 and size > 1 and draw(st.booleans()):
        return Bucket(size, draw(st.integers(size + 1, size * space.width)), 0)
    return Bucket(size, size * space.width, space.width)


def _legal(runner: Runner, raw: Bucket, seed: int) -> tuple[dict[str, torch.Tensor], list[int]]:
    """Draw legal values for every slot that a batch hands in, and the tokens of each request."""
    rng = random.Random(seed)
    row_tokens = values.split_rows(raw, rng)
    drawn = {}
    for name, slot in runner.arena.slots.items():
        if slot.value is None:
            rows = slot.rows(raw.requests, raw.tokens, runner.arena.num_ranks)
            drawn[name] = values.draw(slot, values.bounds_of(slot, runner.tables), rows, row_tokens, rng)
    return drawn, row_tokens


def _batch(raw: Bucket, given: Mapping[str, Any], mode: Mode, variant: Any, row_tokens: Sequence[int]) -> Batch:
    ragged = None if raw.row_tokens else tuple(row_tokens)
    return Batch(raw.requests, given, mode, raw.tokens, ragged, variant)
