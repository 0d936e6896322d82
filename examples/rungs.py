"""Climb graphglue in three rungs, each useful alone. Run: python rungs.py, or python rungs.py --device cuda

``OwnRunner`` is what an engine has before: static buffers, a loop that copies a step in and resets the tails, a
metadata prep of small operations called in each step, a forward. Rung 1 replaces its fill, rung 2 its call of the prep,
rung 3 the whole step. Each rung runs the same batches beside the engine's own way, and no bit may differ; an own fill
that forgets its tails shows that the comparison finds it.
"""

from __future__ import annotations

import argparse
import random
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

import graphglue as gg

PAGE, CONTEXT, WIDTH, NUM_ROWS = 4, 32, 64, 9
LADDER = (1, 2, 4, 8)
PADS = {"seq_lens": 1, "req_pool_indices": 0, "input_ids": 0}
Sources = Mapping[str, Sequence[int]]


class Engine:
    """What every rung keeps: the table, the weights, the prep and the forward, as plain functions of tensors."""

    def __init__(self, device: torch.device) -> None:
        generator = torch.Generator().manual_seed(0)
        self.device = device
        self.req_to_token = torch.randperm(NUM_ROWS * CONTEXT, generator=generator).view(NUM_ROWS, CONTEXT).to(device)
        self.weights = torch.randn(WIDTH, WIDTH, generator=generator, dtype=torch.float64).to(device)

    def buffers(self) -> dict[str, Tensor]:
        """Allocate the static inputs of the largest bucket, with values that are no pads."""
        return {name: torch.full((LADDER[-1],), 2, dtype=torch.int64, device=self.device) for name in PADS}

    def prep(self, inputs: Any) -> dict[str, Tensor]:
        """Build the metadata of one step; ``inputs`` has the buffers by name, at the bucket's size."""
        pages = self.req_to_token[:, ::PAGE][inputs["req_pool_indices"]] // PAGE
        return {"page_table": pages.to(torch.int32), "positions": inputs["seq_lens"] - 1}

    def forward(self, inputs: Any, metadata: Mapping[str, Tensor]) -> Tensor:
        """Stand in for a model."""
        rows = metadata["page_table"].sum(dim=1) + metadata["positions"] + inputs["input_ids"]
        return self.weights[rows % WIDTH] @ self.weights


class OwnRunner:
    """A runner as engines have it, without what a graph would change: it is the reference of every rung."""

    def __init__(self, engine: Engine, forgets_tails: bool = False) -> None:
        self.engine, self.buffers, self.forgets_tails = engine, engine.buffers(), forgets_tails

    def fill(self, sources: Sources) -> tuple[int, dict[str, Tensor]]:
        """Choose the bucket, copy each source in and reset each tail; replaced by rung 1."""
        num_real = len(sources["seq_lens"])
        bucket = next(size for size in LADDER if size >= num_real)
        for name, buffer in self.buffers.items():
            buffer[:num_real].copy_(torch.tensor(sources[name]))
            if not self.forgets_tails:
                buffer[num_real:bucket] = PADS[name]
        return bucket, {name: buffer[:bucket] for name, buffer in self.buffers.items()}

    def step(self, sources: Sources) -> tuple[dict[str, Tensor], dict[str, Tensor], Tensor]:
        """Fill, prepare and run one step; give inputs, metadata and the real rows of the output."""
        _, inputs = self.fill(sources)
        metadata = self.engine.prep(inputs)  # its call is replaced by rung 2
        return inputs, metadata, self.engine.forward(inputs, metadata)[: len(sources["seq_lens"])]


# Rung 1: the fill.


def slots(buffers: Mapping[str, Tensor] | None = None) -> list[gg.Slot]:
    """Declare the static inputs, each over the engine's own buffer if there is one."""
    axes = {"seq_lens": "request", "req_pool_indices": "request", "input_ids": "token"}
    storage = buffers or {}
    return [
        gg.Slot(name, axis=axes[name], dtype=torch.int64, pad=pad, storage=storage.get(name))
        for name, pad in PADS.items()
    ]


def fill_rung(engine: Engine, batches: Sequence[Sources], own: OwnRunner) -> int:
    """Let an arena fill the engine's own buffers; the engine goes on as before."""
    buffers = engine.buffers()
    arena = gg.Arena(slots(buffers), LADDER, device=engine.device)
    num_differing = 0
    for sources in batches:
        bucket, expected = own.fill(sources)
        arena.fill(gg.Batch(len(sources["seq_lens"]), sources))  # all checks come before the first write
        num_differing += not all(torch.equal(buffers[name][:bucket], expected[name]) for name in PADS)
    return num_differing


# Rung 2: the prep, recorded once for each bucket.


def glue_rung(engine: Engine, batches: Sequence[Sources], own: OwnRunner) -> int:
    """Replay the engine's prep where it was called; its results stay at one address for each bucket."""
    arena = gg.Arena(slots(), LADDER, device=engine.device)
    num_differing, addresses = 0, {}
    with torch.no_grad():
        cache = gg.GlueGraphCache(engine.prep, device=engine.device)
        cache.capture({size: arena.view(size) for size in reversed(LADDER)})
        for sources in batches:
            _, expected, output = own.step(sources)
            num_real = len(sources["seq_lens"])
            view = arena.fill(gg.Batch(num_real, sources))
            metadata = cache.run(view.bucket.requests, view)  # recorded, else called
            same = all(torch.equal(metadata[name], expected[name]) for name in expected)
            num_differing += not (same and torch.equal(engine.forward(view, metadata)[:num_real], output))
            address = metadata["page_table"].data_ptr()
            assert addresses.setdefault(view.bucket, address) == address  # so that a forward graph may read it
    assert all(cache.state(size) is gg.State.CAPTURED for size in LADDER)
    cache.close()
    return num_differing


# Rung 3: the whole step.


def runner_rung(engine: Engine, batches: Sequence[Sources], own: OwnRunner) -> int:
    """Hand the step over: bucket, fill, prep and forward, one launch on a GPU, and a reason for each route."""
    contract = gg.PrepContract(
        name="rungs",
        reads={"seq_lens": 1, "req_pool_indices": 0},
        outputs={"page_table": "token", "positions": "token"},
        modes={gg.Mode.DECODE},
        tables=("req_to_token",),
    )
    registry = gg.Registry()
    registry.register(contract)(engine.prep)
    num_differing = 0
    with gg.Runner(
        slots=slots(),
        ladder=LADDER,
        registry=registry,
        prep="rungs",
        tables={"req_to_token": engine.req_to_token},  # a table that is replaced is an error, not a wild read
        forward=engine.forward,
        device=engine.device,
    ) as runner:
        runner.capture(progress=False)
        for sources in batches:
            _, metadata, output = own.step(sources)
            step = runner.replay(gg.Batch(len(sources["seq_lens"]), sources))
            assert (step.decision.prep, step.decision.forward) == (gg.Route.GLUE, gg.Route.GRAPH)
            same = all(torch.equal(step.metadata[name], metadata[name]) for name in metadata)
            num_differing += not (same and torch.equal(step.outputs, output))
    return num_differing


def draw_batches(num_batches: int) -> list[Sources]:
    """Draw steps of all sizes, larger and smaller ones in turn, so that a tail may hold what an older step left."""
    rng = random.Random(0)
    sizes = [rng.randint(1, LADDER[-1]) for _ in range(num_batches)]
    draw: dict[str, Callable[[], int]] = {
        "seq_lens": lambda: rng.randint(1, CONTEXT),
        "req_pool_indices": lambda: rng.randrange(1, NUM_ROWS),
        "input_ids": lambda: rng.randrange(WIDTH),
    }
    return [{name: [number() for _ in range(size)] for name, number in draw.items()} for size in sizes]


def main() -> None:
    """Climb the rungs, and show that each comparison can fail."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    engine = Engine(torch.device(parser.parse_args().device))
    batches = draw_batches(40)
    for name, rung in (("gg.Arena", fill_rung), ("gg.GlueGraphCache", glue_rung), ("gg.Runner", runner_rung)):
        differing = rung(engine, batches, OwnRunner(engine))
        found = rung(engine, batches, OwnRunner(engine, forgets_tails=True))
        print(f"{name:18} {len(batches)} steps, {differing} differ; from an own fill that forgets its tails {found} do")
        assert differing == 0
        assert found > 0


if __name__ == "__main__":
    main()
