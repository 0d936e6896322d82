"""What people would write instead: one pinned arena with one copy, and torch.compile over the whole step."""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from typing import Any

import torch

from graphglue.bench.contenders import Contender, Recorded, Sources
from graphglue.bench.workload import PADS, Workload, prep

ARENA_SLICES = "pinned arena, 1 copy, slice copies, glue, forward"
ARENA_BLOCK = "pinned arena, 1 copy into the slots, glue, forward"
COMPILED = "torch.compile reduce-overhead, device sources"
_NUM_ARENAS = 16  # more than are in flight here; no event guards their reuse, which favours this baseline
_ALIGNMENT_BYTES = 256


class PinnedArena:
    """Stage all host sources of a step in one pinned block, and copy it in one go.

    With ``slices`` the block holds the real rows, and goes to a block on the device from which each
    slot's head is copied and its tail reset: one or two launches a slot. Without, the block has the
    padded layout of the slots themselves, tails included: the best case, which needs all slots in one
    allocation that nothing else writes.
    """

    def __init__(self, workload: Workload, sources: Sources, slices: bool) -> None:
        first, device = sources.tensors[0], sources.device
        slots = dict(vars(workload.padded(first, sources.bucket)))
        slots.pop("tables")
        ends = _ends(first if slices else slots)
        total = ends[-1][2]
        self._target = torch.zeros(total, dtype=torch.uint8, device=device)
        heads = {name: _cut(self._target, span, slots[name].dtype) for name, *span in ends}
        blocks = [torch.zeros(total, dtype=torch.uint8, pin_memory=device.type == "cuda") for _ in range(_NUM_ARENAS)]
        staged = [{name: _cut(block, span, slots[name].dtype).numpy() for name, *span in ends} for block in blocks]
        self._fresh = itertools.cycle(list(zip(blocks, staged))).__next__
        self._next = itertools.cycle(sources.numpy).__next__
        self._spread = [(slots[name], len(head), head, PADS.get(name, 0)) for name, head in heads.items()]
        if not slices:
            self._spread, slots = [], heads
        self.recorded = Recorded(workload, workload.view_of(slots))
        self._glue, self._forward = self.recorded.glue(), self.recorded.floor()

    def step(self) -> Mapping[str, torch.Tensor]:
        """Run one step. Sync: none."""
        block, staged = self._fresh()
        for name, values in self._next().items():
            place, count = staged[name], len(values)
            place[:count] = values
            if count < len(place):
                place[count:] = PADS.get(name, 0)
        self._target.copy_(block, non_blocking=True)
        for slot, count, head, pad in self._spread:
            slot[:count].copy_(head)
            if count < len(slot):
                slot[count:].fill_(pad)
        self._glue()
        self._forward()
        return self.recorded.metadata


class CompiledStep(torch.nn.Module):
    """Hold prep and forward as one module: weights and table are its buffers, so that they are not copied."""

    def __init__(self, workload: Workload) -> None:
        super().__init__()
        self._workload = workload
        self.embedding = torch.nn.Buffer(workload.embedding)
        self.req_to_token = torch.nn.Buffer(workload.tables["req_to_token"])
        self.weights = torch.nn.ParameterList([torch.nn.Parameter(w, requires_grad=False) for w in workload.weights])

    def forward(self, sources: Mapping[str, torch.Tensor]) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        """Run one step, unpadded."""
        view = _SourceView(sources, self.req_to_token)
        metadata = prep(view)
        return self._workload.layers(view.input_ids, metadata, self.embedding, list(self.weights)), metadata


class _SourceView:
    """Show sources as prep expects them."""

    def __init__(self, sources: Mapping[str, torch.Tensor], req_to_token: Any) -> None:
        self.seq_lens, self.req_pool_indices = sources["seq_lens"], sources["req_pool_indices"]
        self.out_cache_loc, self.input_ids = sources["out_cache_loc"], sources["input_ids"]
        self.tables = self
        self.req_to_token = req_to_token


def arenas(workload: Workload, sources: Sources) -> list[Contender]:
    """List the pinned arenas, for steps whose sources are on the host."""
    note = "no event guards the pinned blocks"
    contenders = []
    for label, slices in ((ARENA_SLICES, True), (ARENA_BLOCK, False)):
        arena = PinnedArena(workload, sources, slices)
        contenders.append(Contender(label, arena.step, lambda metadata: metadata, note=note))
    return contenders


def compiled(workload: Workload, sources: Sources) -> Contender:
    """Compile the whole step for these extents, or say why that is not possible here."""
    if sources.device.type != "cuda":
        return Contender(COMPILED, None, why_not="reduce-overhead replays CUDA graphs: it needs a GPU")
    torch._dynamo.reset()
    with torch.no_grad():
        run = torch.compile(CompiledStep(workload), mode="reduce-overhead", dynamic=False)
        turn = itertools.cycle(sources.on_device).__next__
        try:
            for step in sources.on_device[:5]:
                run(step)
        except Exception as error:  # a compiler may fail in any way; the row says how
            first = str(error).strip().splitlines()[0] if str(error).strip() else ""
            return Contender(COMPILED, None, why_not=f"{type(error).__name__}: {first[:160]}")

    def call() -> Any:
        with torch.no_grad():
            return run(turn())

    return Contender(
        COMPILED, call, lambda result: result[1], note="unpadded; fuses the forward's pointwise operations"
    )


def _ends(tensors: Mapping[str, torch.Tensor]) -> list[tuple[str, int, int]]:
    """Lay tensors out one after the other: name, begin and end in bytes."""
    spans, begin = [], 0
    for name, tensor in tensors.items():
        end = begin + tensor.numel() * tensor.element_size()
        spans.append((name, begin, end))
        begin = -(-end // _ALIGNMENT_BYTES) * _ALIGNMENT_BYTES
    return spans


def _cut(block: torch.Tensor, span: list[int], dtype: torch.dtype) -> torch.Tensor:
    begin, end = span
    return block[begin:end].view(dtype)
