"""The loop of examples/overlap_loop.py: every token is that of its request decoded alone, however late the host looks.

The tape runs a step at once, so a loop that reads or overwrites too late would still be right on it. Two sentinels show
such reads: sources that are overwritten with other legal values as soon as ``replay`` returns, and a stream whose work
runs only when somebody waits for it, as on a GPU that is behind.
"""

from __future__ import annotations

import sys
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

import graphglue as gg

sys.path.insert(0, str(Path(__file__).parents[2] / "examples"))
import overlap_loop
from overlap_loop import FROM_RELAY, Engine, Landing, alone, draw_requests

NUM_REQUESTS = 5
CPU = torch.device("cpu")
pytestmark = pytest.mark.usefixtures("frozen_imports")


@pytest.fixture(scope="module")
def model() -> Iterator[Any]:
    shape = replace(overlap_loop.SHAPE, num_layers=1)  # each step runs its operations one by one here
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(overlap_loop, "SHAPE", shape)
        yield overlap_loop.Transformer(shape, seed=4, dtype=torch.float64)


@pytest.fixture(scope="module")
def expected(model: Any) -> list[list[int]]:
    return [alone(model, request) for request in draw_requests(NUM_REQUESTS)]


class Overwriting(Engine):  # type: ignore[misc]
    """Overwrites every host source, to its end, as soon as ``replay`` returns."""

    def replay(self, batch: gg.Batch) -> Any:
        step = super().replay(batch)
        for array in self.arrays.values():
            array.fill(1)
        return step


class Late(Engine):  # type: ignore[misc]
    """Runs a step, and the copy of its tokens, when the host waits for it: a stand-in for a GPU that is behind."""

    def __init__(self, *arguments: Any, snapshots: bool = True) -> None:
        super().__init__(*arguments)
        self.queue: deque[Callable[[], None]] = deque()
        self.snapshots, self.most_queued = snapshots, 0
        self.landings = deque(LateLanding(self) for _ in self.landings)

    def replay(self, batch: gg.Batch) -> Any:
        take = np.array if self.snapshots else np.asarray
        sources = {name: take(array) for name, array in batch.sources.items()}
        tokens: list[int] = []

        def run() -> None:
            outputs = self.runner.replay(gg.Batch(batch.num_requests, sources)).outputs
            tokens.extend(outputs["next_token"].tolist())

        self.queue.append(run)
        for array in self.arrays.values():
            array.fill(1)
        return SimpleNamespace(outputs={"next_token": tokens})


class LateLanding:
    """What ``Landing`` is to a GPU, for ``Late``."""

    def __init__(self, engine: Late) -> None:
        self.engine, self.host = engine, [0] * overlap_loop.MAX_RUNNING
        self.has_run = True

    def depart(self, tokens: list[int]) -> None:
        self.has_run = False
        self.engine.queue.append(lambda: self.copy(tokens))
        self.engine.most_queued = max(self.engine.most_queued, len(self.engine.queue) // 2)

    def copy(self, tokens: list[int]) -> None:
        self.host[: len(tokens)] = tokens
        self.has_run = True

    def arrive(self, num_tokens: int) -> list[int]:
        while not self.has_run:
            self.engine.queue.popleft()()
        return self.host[:num_tokens]


def served(engine: Engine) -> list[list[int]]:
    """Serve the requests, and give what was generated."""
    requests = draw_requests(NUM_REQUESTS)
    engine.serve(requests)
    engine.runner.close()
    assert engine.pool.can_admit(16 * engine.pool.page_size), "pages were lost"
    return [request.generated for request in requests]


# What holds.


@pytest.mark.parametrize("depth", [0, 1, 4])
def test_tokens_are_those_of_decoding_alone_though_sources_are_overwritten_at_once(
    model: Any, expected: list[list[int]], depth: int
) -> None:
    engine = Overwriting(model, depth)
    assert served(engine) == expected
    stopped = sum(
        tokens[-1] in overlap_loop.STOPS and len(tokens) < request.max_new
        for tokens, request in zip(expected, draw_requests(NUM_REQUESTS))
    )
    assert engine.num_wasted <= depth * stopped
    assert (engine.num_wasted > 0) is (depth > 0)


@pytest.mark.parametrize("depth", [1, 3])
def test_steps_that_run_late_give_the_same_tokens(model: Any, expected: list[list[int]], depth: int) -> None:
    engine = Late(model, depth)
    assert served(engine) == expected
    assert engine.most_queued == depth + 1, "the host did not run ahead"


def test_a_guess_is_staged_and_taken_or_redone(model: Any, expected: list[list[int]]) -> None:
    engine = Overwriting(model, 1, stage=True)
    assert served(engine) == expected
    counts = engine.runner.stats()["staging"]
    assert counts["staged_taken"] > 20
    assert {"other_step", "sources"} & set(counts["staged_rejected"]), "no guess was wrong"


def test_a_finished_request_s_row_serves_another_one_while_its_wasted_step_is_in_flight(
    model: Any, expected: list[list[int]]
) -> None:
    met: list[tuple[Any, Any]] = []

    class Watched(Engine):  # type: ignore[misc]
        def launch(self, reads: Any) -> None:
            wasted = [one for _, flight in self.in_flight for one, _ in flight if one.is_done]
            met.extend((one, other) for one in wasted for other, _ in reads if one.lease.row == other.lease.row)
            super().launch(reads)

    assert served(Watched(model, 3)) == expected
    assert met
    assert all(one is not other for one, other in met)


# The comparison can fail: loops that share something wrongly.


class Unread(Landing):  # type: ignore[misc]
    """Keeps the view that the next replay rewrites, in place of a copy."""

    def depart(self, tokens: torch.Tensor) -> None:
        self.view = tokens

    def arrive(self, num_tokens: int) -> list[int]:
        return self.view[:num_tokens].tolist()


def one_landing_for_two_steps(model: Any) -> Engine:
    engine = Engine(model, 1)
    (landing, _) = engine.landings
    engine.landings = deque([landing, landing])
    return engine


def outputs_that_are_looked_at_after_the_next_replay(model: Any) -> Engine:
    engine = Engine(model, 1)
    engine.landings = deque(Unread(CPU) for _ in range(2))
    return engine


def sources_that_are_read_when_the_step_runs(model: Any) -> Engine:
    return Late(model, 1, snapshots=False)


def a_token_that_the_host_makes_up(model: Any) -> Engine:
    class WithoutRelay(Engine):  # type: ignore[misc]
        def forward(self, view: Any, metadata: Any) -> Any:
            own = SimpleNamespace(input_ids=view.input_ids.clamp(min=-1 - FROM_RELAY))
            return self.model.decode(self.caches, own, metadata)

    return WithoutRelay(model, 1)


@pytest.mark.parametrize(
    "wrong",
    [
        one_landing_for_two_steps,
        outputs_that_are_looked_at_after_the_next_replay,
        sources_that_are_read_when_the_step_runs,
        a_token_that_the_host_makes_up,
    ],
    ids=lambda make: make.__name__,
)
def test_a_loop_that_shares_something_wrongly_is_found(
    model: Any, expected: list[list[int]], wrong: Callable[[Any], Engine]
) -> None:
    assert served(wrong(model)) != expected
