"""What an engine hands in: sources in any container, and batches."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from hypothesis import strategies as st

from graphglue.core.batch import Batch, Mode
from graphglue.core.slots import Slot, kind_of
from graphglue.testing.strategies import containers
from graphglue.testing.strategies.values import NARROWER, contents


@st.composite
def sources(draw: st.DrawFn, slot: Slot, requests: int, tokens: int, num_ranks: int = 1) -> Any:
    """Draw what a batch may hand in for a slot: exact extents, in any accepted container and dtype.

    Tensors and arrays of the slot's dtype, a narrower one or an accepted wider one, at an offset in
    larger memory or read-only; nested lists and tuples; a number where one element is expected.

    Args:
        slot: the slot, not a computed one.
        requests: real requests.
        tokens: real tokens.
        num_ranks: ranks of the group.
    """
    shape = slot.shape(slot.rows(requests, tokens, num_ranks))
    dtype = draw(st.sampled_from([slot.dtype, *NARROWER.get(slot.dtype, ())]))
    fits = slot.valid
    if fits is not None and kind_of(dtype) == "integer":
        fits = (max(fits[0], torch.iinfo(dtype).min), min(fits[1], torch.iinfo(dtype).max))
    tensor = draw(contents(dtype, shape, fits))
    if dtype == slot.dtype and slot.accepts and draw(st.booleans()):
        tensor = tensor.to(slot.accepts[0])
    return draw(st.sampled_from(containers.fitting(tensor)))(tensor)


@st.composite
def batches(
    draw: st.DrawFn,
    slots: Iterable[Slot],
    ladder: Iterable[int],
    *,
    tokens_per_request: int = 1,
    num_ranks: int = 1,
    modes: Sequence[Mode] = (Mode.DECODE,),
    features: Sequence[str] = (),
    max_requests: int | None = None,
    widths: Sequence[int] = (),
    ragged: bool = True,
    idle: bool = True,
) -> Batch:
    """Draw a batch: idle, unpadded, padded, of another width or ragged, with a source for each slot.

    Args:
        slots: the slots it is for.
        ladder: sizes in requests.
        tokens_per_request: the runner's width.
        num_ranks: ranks of the group.
        modes: the modes to choose from.
        features: features that may be active.
        max_requests: the most requests; the ladder's largest size by default, more is over the ladder.
        widths: other widths to choose from.
        ragged: whether requests may differ in tokens; each has 1 to ``tokens_per_request``, or one more.
        idle: whether it may have no requests.
    """
    mode = draw(st.sampled_from(modes))
    most = max(ladder) if max_requests is None else max_requests
    if most == 0 or (idle and draw(st.integers(0, 7)) == 0):
        return Batch.idle(mode=mode)
    requests = draw(st.integers(1, most))
    row_tokens = draw(_row_tokens(requests, tokens_per_request, widths, ragged))
    tokens = requests * tokens_per_request if row_tokens is None else sum(row_tokens)
    given = {}
    for slot in slots:
        if slot.value is None and not (slot.missing == "pad" and draw(st.integers(0, 3)) == 0):
            given[slot.name] = draw(sources(slot, requests, tokens, num_ranks))
    uniform = row_tokens is None or len(set(row_tokens)) == 1
    return Batch(
        requests,
        given,
        mode=mode,
        num_tokens=tokens if uniform and draw(st.booleans()) else None,
        row_tokens=row_tokens,
        features=draw(st.frozensets(st.sampled_from(features))) if features else frozenset(),
    )


@st.composite
def _row_tokens(draw: st.DrawFn, requests: int, width: int, widths: Sequence[int], ragged: bool) -> list[int] | None:
    kinds = ["default", "uniform"] + ["other"] * bool(widths) + ["ragged"] * ragged
    match draw(st.sampled_from(kinds)):
        case "uniform":
            return [width] * requests
        case "other":
            return [draw(st.sampled_from(widths))] * requests
        case "ragged":
            return draw(st.lists(st.integers(1, width + 1), min_size=requests, max_size=requests))
    return None
