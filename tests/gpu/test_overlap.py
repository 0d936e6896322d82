"""The loop of examples/overlap_loop.py on a GPU that is kept busy: the host is several steps ahead of it all the time.

A spinning kernel goes before each step, and the arrays that a step was spelled in are overwritten as soon as ``replay``
returns, so whatever is read late is read wrong. Every step is compared bit for bit with the same step run eagerly, over
caches and a relay of its own, when all is done.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import graphglue as gg
from graphglue.preps import paged_decode

sys.path.insert(0, str(Path(__file__).parents[2] / "examples"))
import overlap_loop
from overlap_loop import SHAPE, Engine, Landing, alone, draw_requests

EXAMPLE = Path(overlap_loop.__file__)
NUM_REQUESTS = 8
SPIN_CYCLES = 20_000_000  # about 10 ms, many times what the host needs for a step
PADS = {"seq_lens": 1, "req_pool_indices": 0, "out_cache_loc": 0, "input_ids": 0}


@pytest.fixture(scope="module")
def model() -> Any:
    return overlap_loop.Transformer(SHAPE, seed=0, dtype=torch.float64, device="cuda")


@pytest.fixture(scope="module")
def expected(model: Any) -> list[list[int]]:
    return [alone(model, request) for request in draw_requests(NUM_REQUESTS)]


class Busy(Engine):  # type: ignore[misc]
    """Keeps the GPU behind, overwrites the arrays at once, and keeps what each step was made from and gave."""

    def __init__(self, *arguments: Any, **more: Any) -> None:
        super().__init__(*arguments, **more)
        self.log: list[tuple[dict[str, list[int]], int, torch.Tensor, dict[str, torch.Tensor]]] = []
        self.most_behind = 0

    def replay(self, batch: gg.Batch) -> Any:
        self.most_behind = max(self.most_behind, sum(not landing.event.query() for landing, _ in self.in_flight))
        sources = {name: array.tolist() for name, array in batch.sources.items()}
        table = self.pool.req_to_token.clone()
        torch.cuda._sleep(SPIN_CYCLES)
        step = self.send(batch)
        for array in self.arrays.values():
            array.fill(1)
        outputs = {name: leaf.clone() for name, leaf in step.outputs.items()}
        self.log.append((sources, step.decision.bucket.requests, table, outputs))
        assert (step.decision.prep, step.decision.forward) == (gg.Route.GLUE, gg.Route.GRAPH)
        return step

    def send(self, batch: gg.Batch) -> Any:
        return self.runner.replay(batch)


@contextmanager
def no_syncs() -> Iterator[None]:
    """Let every hidden synchronisation raise; an event that is waited for is not one."""
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


def served(engine: Engine) -> list[list[int]]:
    requests = draw_requests(NUM_REQUESTS)
    torch.cuda.synchronize()
    with no_syncs():
        engine.serve(requests)
    torch.cuda.synchronize()
    return [request.generated for request in requests]


def check_bits(engine: Busy) -> None:
    """Run the logged steps again, eagerly and one by one, and compare every output."""
    own = SimpleNamespace(model=engine.model, caches=engine.model.new_caches(engine.pool.num_pages))
    relay, prep = torch.zeros_like(engine.relay), paged_decode.make(SHAPE.page_size)
    for number, (sources, size, table, outputs) in enumerate(engine.log):
        num_real = len(sources["seq_lens"])
        padded = {
            name: torch.tensor([*values, *[PADS[name]] * (size - num_real)], device="cuda")
            for name, values in sources.items()
        }
        view = SimpleNamespace(**padded, tables=SimpleNamespace(req_to_token=table, relay=relay))
        with torch.no_grad():
            eager = Engine.forward(own, view, prep(view))
        for name, leaf in eager.items():
            assert torch.equal(outputs[name], leaf[:num_real]), f"{name} of step {number}"


@pytest.mark.parametrize("stage", [False, True], ids=["replayed", "staged"])
@pytest.mark.parametrize("depth", [1, 6])
def test_every_step_is_the_eager_one_though_the_host_is_steps_ahead(
    model: Any, expected: list[list[int]], depth: int, stage: bool
) -> None:
    engine = Busy(model, depth, stage)
    assert served(engine) == expected
    assert engine.most_behind == depth, "the GPU was not kept behind"
    assert engine.num_wasted > 0
    check_bits(engine)
    if stage:
        counts = engine.runner.stats()["staging"]
        assert counts["staged_taken"] > 20
        assert {"other_step", "sources"} & set(counts["staged_rejected"]), "no guess was wrong"
    engine.runner.close()


def test_the_same_tokens_without_overlap(model: Any, expected: list[list[int]]) -> None:
    engine = Busy(model, 0)
    assert served(engine) == expected
    assert (engine.most_behind, engine.num_wasted) == (0, 0)
    check_bits(engine)
    engine.runner.close()


# The checks can fail: loops that share something wrongly.


class OneUpload(Busy):
    """Uploads by itself, through one pinned buffer that is written again while copies from it are queued."""

    def send(self, batch: gg.Batch) -> Any:
        if not hasattr(self, "pinned"):
            self.pinned = {
                name: torch.ones(len(array), dtype=torch.int64).pin_memory() for name, array in self.arrays.items()
            }
        sources = {}
        for name, array in batch.sources.items():
            pinned = self.pinned[name][: len(array)]
            pinned.copy_(torch.from_numpy(array))
            sources[name] = torch.empty(len(array), dtype=torch.int64, device="cuda")
            sources[name].copy_(pinned, non_blocking=True)
        step = self.runner.replay(gg.Batch(batch.num_requests, sources))
        for pinned in self.pinned.values():
            pinned.fill_(1)
        return step


class Unread(Landing):  # type: ignore[misc]
    """Keeps the view that the next replay rewrites, in place of a copy."""

    def depart(self, tokens: torch.Tensor) -> None:
        self.view = tokens
        self.event.record()

    def arrive(self, num_tokens: int) -> list[int]:
        torch.cuda.set_sync_debug_mode("default")
        tokens = self.view[:num_tokens].tolist()
        torch.cuda.set_sync_debug_mode("error")
        return tokens


def one_upload_for_all_steps(model: Any) -> Engine:
    return OneUpload(model, 3)


def one_landing_for_two_steps(model: Any) -> Engine:
    engine = Busy(model, 1)
    engine.landings = deque([engine.landings[0]] * 2)
    return engine


def outputs_that_are_looked_at_after_the_next_replay(model: Any) -> Engine:
    engine = Busy(model, 1)
    engine.landings = deque(Unread(model.device) for _ in range(2))
    return engine


@pytest.mark.parametrize(
    "wrong",
    [one_upload_for_all_steps, one_landing_for_two_steps, outputs_that_are_looked_at_after_the_next_replay],
    ids=lambda make: make.__name__,
)
def test_a_loop_that_shares_something_wrongly_is_found(
    model: Any, expected: list[list[int]], wrong: Callable[[Any], Engine]
) -> None:
    engine = wrong(model)
    assert served(engine) != expected
    engine.runner.close()


@pytest.mark.parametrize("arguments", [(), ("--stage",)], ids=["replayed", "staged"])
def test_the_example_runs(arguments: tuple[str, ...]) -> None:
    ran = subprocess.run(
        [sys.executable, EXAMPLE, "--device", "cuda", *arguments],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
        capture_output=True, text=True, check=False, timeout=280,
    )  # fmt: skip
    assert ran.returncode == 0, ran.stdout + ran.stderr
    assert ran.stdout.count("each as decoded alone") == 3
