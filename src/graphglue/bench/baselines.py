"""What people would write instead: one pinned arena with one copy, and torch.compile over the whole step."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import torch

from graphglue.bench.contenders import Contender, Recorded, Sources
from graphglue.bench.workload import PADS, Workload, prep

ARENA_SLICES = "pinned arena, one copy, slice copies, glue, forward"
ARENA_BLOCK = "pinned arena, one copy into the slots, glue, forward"
COMPILED = 'torch.compile(mode="reduce-overhead") of prep and forward'
_NUM_ARENAS = 16  # more than are ever in flight here; no event is recorded, which favours this baseline


class PinnedArena:
    """Stage all host sources of a step in one pinned block, and copy it in one go.

    With ``slices`` the block holds the real rows only, and goes to a block on the device from which
    each slot's head is copied and its tail reset: a few launches per slot. Without, the block has the
    padded layout of the slots themselves, tails included: the best case, where one allocation holds
    all slots and nothing else writes them.
    """

    def __init__(self, sources: Sources, recorded: Recorded, slices: bool) -> None:
        self._slices, self._recorded = slices, recorded
        self._slots = {name: recorded.view[name] for name in sources.tensors[0]}
        rows = {name: len(value) if slices else len(self._slots[name]) for name, value in sources.tensors[0].items()}
        places = self._places(rows)
        total = sum(size for _, size, _ in places.values())
        device = sources.device
        self._blocks = [
            torch.zeros(total, dtype=torch.uint8, pin_memory=device.type == "cuda") for _ in range(_NUM_ARENAS)
        ]
        self._target = torch.zeros(total, dtype=torch.uint8, device=device)
        self._heads = {name: _cut(self._target, place) for name, place in places.items()}
        self._staged = [{name: _cut(block, place).numpy() for name, place in places.items()} for block in self._blocks]
        self._fresh = itertools.cycle(zip(self._blocks, self._staged)).__next__
        self._next = itertools.cycle(sources.numpy).__next__
        if not slices:
            self._own_slots()

    def step(self) -> Mapping[str, torch.Tensor]:
        """Run one step. Sync: none."""
        block, staged = self._fresh()
        for name, values in self._next().items():
            place = staged[name]
            count = len(values)
            place[:count] = values
            if count < len(place):
                place[count:] = PADS.get(name, 0)
        self._target.copy_(block, non_blocking=True)
        if self._slices:
            self._spread()
        self._glue()
        self._forward()
        return self._metadata

    def _spread(self) -> None:
        for name, head in self._heads.items():
            slot, count = self._slots[name], len(head)
            slot[:count].copy_(head)
            if count < len(slot):
                slot[count:].fill_(PADS.get(name, 0))

    def _own_slots(self) -> None:
        """Record prep and forward over slots that are cut from the block."""
        self._recorded = self._recorded.over(self._heads)

    @property
    def _glue(self) -> Callable[[], object]:
        return self._recorded.glue()

    @property
    def _forward(self) -> Callable[[], object]:
        return self._recorded.floor()

    @property
    def _metadata(self) -> Mapping[str, torch.Tensor]:
        return self._recorded.metadata
