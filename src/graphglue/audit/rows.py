"""Rows of the engine's own batches, dealt anew: legal values where a slot alone does not say what is legal.

A request keeps its rows of every slot, so what belongs together stays together: its length, its table row, its
tokens. Requests of all batches are dealt to the steps that a check runs.
"""

from __future__ import annotations

import random
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

import torch

from graphglue.audit.values import Bounds
from graphglue.core.batch import Batch, extents_of
from graphglue.core.binding import bind_source
from graphglue.core.buckets import Bucket
from graphglue.core.slots import Axis, Slot, kind_of
from graphglue.device.arena import Arena


class Given(NamedTuple):
    """One batch of the engine's: its extents, where each request's tokens begin, and its tensors by slot."""

    raw: Bucket
    starts: tuple[int, ...]
    tensors: dict[str, torch.Tensor]

    def tokens(self, request: int) -> range:
        """Give the token rows of a request."""
        return range(self.starts[request], self.starts[request + 1])


class Rows:
    """Hold the engine's batches, and deal their requests to steps.

    Args:
        batches: as the engine hands them in; those without requests are left out.
        arena: whose slots they are for.

    Raises:
        BindError: a batch that does not fit the slots.
    """

    def __init__(self, batches: Iterable[Batch], arena: Arena) -> None:
        self._slots = arena.slots
        self._given = [_taken(batch, arena) for batch in batches if batch.num_requests]
        carried = [set(given.tensors) for given in self._given]
        self.names = set.intersection(*carried) if carried else set()

    def raws(self) -> list[Bucket]:
        """List the extents of the batches, each once."""
        return list(dict.fromkeys(given.raw for given in self._given))

    def bounds(self, name: str) -> Bounds:
        """Give the range of values that a slot was seen with."""
        tensors = [given.tensors[name] for given in self._given if given.tensors[name].numel()]
        if not tensors or kind_of(self._slots[name].dtype) == "bool":
            return Bounds(False, True, True)
        values = torch.cat([tensor.flatten().to(torch.float64) for tensor in tensors])
        low, high = values.min().item(), values.max().item()
        return Bounds(low, high, True) if tensors[0].is_floating_point() else Bounds(int(low), int(high), True)

    def deal(self, raw: Bucket, rng: random.Random) -> tuple[dict[str, torch.Tensor], list[int]] | None:
        """Give the values of a step, on the device, and each request's tokens; None where no requests fit.

        Requests of one width are dealt in any order. Uneven ones are dealt as a batch that has the same extents.
        """
        if not raw.row_tokens:
            alike = [given for given in self._given if given.raw == raw]
            if not alike:
                return None
            given = rng.choice(alike)
            picks = [(given, request) for request in range(raw.requests)]
        else:
            pool = [
                (given, request)
                for given in self._given
                for request in range(given.raw.requests)
                if len(given.tokens(request)) == raw.row_tokens
            ]
            if not pool:
                return None
            enough = len(pool) >= raw.requests
            picks = rng.sample(pool, raw.requests) if enough else rng.choices(pool, k=raw.requests)
        return {name: self._dealt(name, picks) for name in self.names}, [len(g.tokens(r)) for g, r in picks]

    def _dealt(self, name: str, picks: Sequence[tuple[Given, int]]) -> torch.Tensor:
        slot = self._slots[name]
        if slot.axis in (Axis.FIXED, Axis.RANK):
            return picks[0][0].tensors[name].clone()
        dim = slot.row_dim
        if slot.axis is Axis.OFFSET:
            return self._summed(name, dim, picks)
        if slot.axis is Axis.REQUEST:
            return torch.cat([given.tensors[name].narrow(dim, request, 1) for given, request in picks], dim)
        parts = [(given.tensors[name], given.tokens(request)) for given, request in picks]
        return torch.cat([tensor.narrow(dim, rows.start, len(rows)) for tensor, rows in parts], dim)

    def _summed(self, name: str, dim: int, picks: Sequence[tuple[Given, int]]) -> torch.Tensor:
        """Sum up how far each request's offsets reach."""
        first = picks[0][0].tensors[name].narrow(dim, 0, 1)
        steps = [_step_of(given.tensors[name], dim, request) for given, request in picks]
        return torch.cat([first, *steps], dim).cumsum(dim).to(first.dtype)


def _step_of(offsets: torch.Tensor, dim: int, request: int) -> torch.Tensor:
    return offsets.narrow(dim, request + 1, 1) - offsets.narrow(dim, request, 1)


def _taken(batch: Batch, arena: Arena) -> Given:
    """Copy what a batch carries, checked and converted as a fill would."""
    raw = extents_of(batch, arena.space.width)
    counts = batch.row_tokens if batch.row_tokens is not None else _even(raw)
    starts = [0]
    for count in counts:
        starts.append(starts[-1] + count)
    tensors = {name: _converted(arena.slots[name], batch.sources, raw, arena) for name in batch.sources}
    return Given(raw, tuple(starts), tensors)


def _even(raw: Bucket) -> list[int]:
    """Deal tokens to requests that nobody counted one by one, as in EXTEND."""
    each, left = divmod(raw.tokens, raw.requests)
    return [each + (request < left) for request in range(raw.requests)]


def _converted(slot: Slot, sources: Mapping[str, object], raw: Bucket, arena: Arena) -> torch.Tensor:
    device = arena.device.torch_device
    rows = slot.rows(raw.requests, raw.tokens, arena.num_ranks)
    tensor = torch.empty(slot.shape(rows), dtype=slot.dtype, device=device)
    arena.device.fill_once([bind_source(slot, sources[slot.name], rows, rows, device)], {slot.name: tensor})
    return tensor
