"""A runner whose prep or forward draws random numbers, and its twin.

The twin is the same Python run over a batch that is padded by hand, from the same generator states. Behind every
step the numbers and the states of all generators are compared.
"""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import torch
from torch.nn import functional

import graphglue as gg
from graphglue import Batch

LADDER = [2, 4, 8]
LORA = frozenset({"lora"})
# (requests, features): buckets in any order, eager steps between them, idle and over the ladder.
STEPS = [
    *[(3, ()), (8, ()), (3, LORA), (1, ()), (0, ()), (11, ())],
    *[(4, ()), (3, ()), (8, LORA), (2, ()), (0, ()), (3, ())],
]
Noise = Callable[[torch.Tensor, torch.Generator], torch.Tensor]

NOISES: dict[str, Noise] = {
    "rand": lambda x, own: x + torch.rand(x.shape[0], device=x.device),
    "normal in place": lambda x, own: x + torch.empty_like(x).normal_(2.0, 3.0),
    "dropout": lambda x, own: functional.dropout(x + 1, 0.5),
    "randint twice": lambda x, own: x + torch.randint(99, x.shape, device=x.device) * torch.randint_like(x, 9),
    "a passed generator": lambda x, own: x + torch.rand(x.shape[0], generator=own, device=x.device),
    "both generators": lambda x, own: x + torch.empty_like(x).normal_(generator=own) * torch.rand_like(x),
    "a passed generator in place": lambda x, own: x + torch.empty_like(x).exponential_(generator=own),
}


class Engine:
    """A runner whose prep or forward draws, and its twin."""

    def __init__(self, part: str, noise: Noise, device: str = "cpu", **config: Any) -> None:
        self.device, self.own = device, torch.Generator(device).manual_seed(11)
        self.default = torch.default_generator if device == "cpu" else torch.cuda.default_generators[0]
        self.part, self.noise, self.broken = part, noise, 0
        registry = gg.Registry()
        contract = gg.PrepContract(name="p", reads={"x": 0.0}, outputs={"m": "request"}, modes={gg.Mode.DECODE})
        registry.register(contract)(self.prep)
        self.runner = gg.Runner(
            slots=[gg.Slot("x", axis="request", dtype=torch.float32, pad=0.0)],
            ladder=LADDER,
            registry=registry,
            prep="p",
            forward=self.forward,
            device=device,
            config=gg.RunnerConfig(**config),
        )

    def prep(self, view: Any) -> dict[str, torch.Tensor]:
        return {"m": self.noise(view.x * 2, self.own) if self.part == "prep" else view.x * 2}

    def forward(self, view: Any, metadata: Any) -> torch.Tensor:
        if self.broken == view.bucket.requests:
            raise LookupError("no plan")
        mixed = view.x + metadata["m"]
        return self.noise(mixed, self.own) if self.part == "forward" else mixed

    def captured(self) -> Engine:
        self.runner.capture(progress=False)
        return self

    def states(self) -> tuple[bytes, bytes]:
        generators = (self.default, self.own)
        one, other = (generator.get_state().numpy().tobytes() for generator in generators)
        return one, other

    def step(self, requests: int, features: Any = (), start: int = 0) -> Any:
        if not requests:
            return self.runner.replay(Batch.idle())
        x = [start + row + 0.5 for row in range(requests)]
        return self.runner.replay(Batch(requests, {"x": x}, features=frozenset(features)))

    def twin(self, requests: int, rows: int, start: int = 0) -> tuple[list[float], list[float]]:
        x = torch.zeros(rows, device=self.device)
        x[:requests] = torch.arange(requests, device=self.device) + start + 0.5
        view = SimpleNamespace(x=x, bucket=SimpleNamespace(requests=rows))
        metadata = self.prep(view)
        return metadata["m"].tolist(), self.forward(view, metadata)[:requests].tolist()

    def agree(self, steps: Any, seed: int | None = None) -> list[Any]:
        """Run steps; hold each against the twin from the same states. Gives the decisions."""
        decisions = []
        for start, (requests, features) in enumerate(steps):
            if seed is not None and start % 5 == 0:
                torch.manual_seed(seed + start)
                self.own.manual_seed(seed - start)
            before = (self.default.get_state(), self.own.get_state())
            step = self.step(requests, features, start)
            seen, after = (step.metadata["m"].tolist(), step.outputs.tolist()), self.states()
            self.default.set_state(before[0])
            self.own.set_state(before[1])
            expected = self.twin(requests, step.decision.bucket.requests, start)
            assert seen == expected, f"step {start} drew {seen}, its twin {expected}"
            assert after == self.states(), f"step {start} left a generator elsewhere than its twin"
            decisions.append(step.decision)
        return decisions


# What lies between two steps.


def sleep(engine: Engine, **how: Any) -> None:
    engine.runner.release(keep_keys=how.pop("keep_keys", True))
    engine.runner.resume(**how)


def fail_and_repair(engine: Engine) -> None:
    engine.broken = 4
    engine.runner.reset()
    engine.captured()
    assert engine.runner.maintain() == []
    engine.broken = 0
    assert [key.requests for key in engine.runner.maintain()] == [4]


BETWEEN: dict[str, Callable[[Engine], Any]] = {
    "reset and capture": lambda engine: (engine.runner.reset(), engine.captured()),
    "a key that fails and is repaired": fail_and_repair,
    "sleep with keys kept": lambda engine: sleep(engine, contents_lost=False),
    "sleep with contents lost": lambda engine: sleep(engine, contents_lost=True),
    "sleep without keys": lambda engine: sleep(engine, keep_keys=False),
}


def draws_nothing_between_steps(engine: Engine, between: Callable[[Engine], Any]) -> None:
    """Let something happen between two steps, from which the generators, and the numbers drawn next, know nothing."""
    first = engine.states()
    engine.captured()
    assert engine.states() == first, "the first capture drew"
    engine.agree(STEPS[:4])
    before = engine.states()
    between(engine)
    assert engine.states() == before, "what lies between drew"
    decisions = engine.agree(STEPS[:2])
    assert {(decision.prep, decision.forward) for decision in decisions} == {(gg.Route.GLUE, gg.Route.GRAPH)}
