"""Random numbers on the tape: a replay draws what eager code draws, from the same generators, whatever lies between."""

from __future__ import annotations

from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import graphglue as gg
from graphglue import Batch, Reason, Route
from graphglue.assembly import reached_generators
from graphglue.audit import holdings
from graphglue.graphs.draws import Draws
from tests.draws import BETWEEN, LADDER, NOISES, STEPS, Engine, draws_nothing_between_steps
from tests.prefill import Prefill, batch, make_runner

pytestmark = pytest.mark.usefixtures("frozen_imports")

# Operations of the CPU only; on a GPU they read the device.
ON_CPU: dict[str, Any] = {
    "randperm": lambda x, own: x + torch.randperm(x.shape[0]),
    "multinomial": lambda x, own: x + torch.multinomial(x.abs() + 1, x.shape[0], replacement=True),
}


@pytest.mark.parametrize("part", ["prep", "forward"])
@pytest.mark.parametrize("noise", [*NOISES, *ON_CPU])
def test_every_step_draws_what_eager_code_draws(noise: str, part: str) -> None:
    """Replays of any bucket, and eager steps between them, advance one generator alike (RNG-1)."""
    engine = Engine(part, {**NOISES, **ON_CPU}[noise]).captured()
    decisions = engine.agree(STEPS, seed=5)
    assert [bool(decision) for decision in decisions] == [requests <= 8 for requests, _ in STEPS]
    glued = [decision.prep is Route.GLUE for decision in decisions]
    assert glued == [not features and 0 < requests <= 8 for requests, features in STEPS]
    assert engine.runner.stats()["quarantines"] == {"forward": 0, "p": 0}


def test_a_step_that_draws_otherwise_is_found() -> None:
    engine = Engine("forward", lambda x, own: x + torch.rand(len(x), generator=own)).captured()
    engine.agree([(3, ())])
    engine.noise = lambda x, own: x + torch.rand(len(x) + 1, generator=own)[:-1]
    with pytest.raises(AssertionError, match="left a generator elsewhere"):
        engine.agree([(3, ())])
    engine.noise = lambda x, own: x + torch.rand(len(x))
    with pytest.raises(AssertionError, match=r"drew .*its twin"):
        engine.agree([(3, ())])


def test_a_seed_repeats_all_and_no_two_steps_draw_the_same() -> None:
    engine = Engine("forward", lambda x, own: 0 * x + torch.rand(len(x))).captured()
    runs = []
    for _ in range(2):
        torch.manual_seed(3)
        runs.append([tuple(engine.step(requests).outputs.tolist()) for requests in (3, 4, 3, 3)])
    assert runs[0] == runs[1]
    assert len(set(runs[0])) == 4


# What lies between steps leaves the generators alone.


def _fail_all(engine: Engine) -> None:
    def raises(x: torch.Tensor, own: torch.Generator) -> torch.Tensor:
        raise LookupError(f"no plan for {noise(x, own)}")

    engine.runner.reset()
    part, noise = engine.part, engine.noise
    engine.part, engine.noise = "prep", raises
    with pytest.raises(gg.CaptureError, match="no plan for"):
        engine.captured()
    engine.part, engine.noise = part, noise
    engine.runner.reset()
    engine.captured()


@pytest.mark.parametrize("part", ["prep", "forward"])
@pytest.mark.parametrize("between", [*BETWEEN, "a capture that fails"])
def test_what_lies_between_two_steps_draws_no_number(between: str, part: str) -> None:
    """A seeded service goes on as if nothing had been recorded anew (STATE-CARRY-1)."""
    draws_nothing_between_steps(
        Engine(part, NOISES["both generators"]), {**BETWEEN, "a capture that fails": _fail_all}[between]
    )


def test_without_keeping_them_a_capture_would_move_the_generators(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = Engine("forward", NOISES["both generators"])
    monkeypatch.setattr(engine.runner._capture.draws, "kept", nullcontext)
    before = engine.states()
    engine.captured()
    assert all(one != other for one, other in zip(engine.states(), before))


# Who draws is known, so that nothing draws twice for one step.


@pytest.mark.parametrize("part", ["prep", "forward", "none"])
@pytest.mark.parametrize("noise", ["rand", "a passed generator"])
def test_the_part_that_draws_is_known(noise: str, part: str) -> None:
    engine = Engine(part, NOISES[noise]).captured()
    found = {engine.runner._capture.drawing_part(key) for key in engine.runner.space.keys(LADDER)}
    assert found == {None if part == "none" else part}


@pytest.mark.parametrize("noise", ["rand", "a passed generator"])
def test_sampled_and_staged_steps_draw_once(noise: str) -> None:
    engine = Engine("prep", NOISES[noise], shadow=gg.Shadow(first=9, every=1), staging=True).captured()
    assert not engine.runner.stage(Batch(3, {"x": [1.0, 2.0, 3.0]}))
    engine.agree([(3, ()), (8, ()), (3, ())])
    stats = engine.runner.stats()
    assert stats["staging"]["not_staged"] == {"draws_random": 1}
    assert (stats["shadow"]["sampled"], stats["shadow"]["mismatched"]) == (0, 0)
    assert sum(stats["shadow"]["skipped"].values()) == 3


@pytest.mark.parametrize("noise", ["rand", "a passed generator"])
def test_a_forward_that_draws_is_sampled_and_staged_and_draws_once(noise: str) -> None:
    engine = Engine("forward", NOISES[noise], shadow=gg.Shadow(first=9, every=1), staging=True).captured()
    engine.agree([(3, ()), (8, ()), (3, ())])
    before = engine.states()
    x = [0.5, 1.5, 2.5]
    assert engine.runner.stage(Batch(3, {"x": x}))
    assert engine.states() == before
    step = engine.runner.replay(Batch(3, {"x": x}))
    assert step.decision.reason is Reason.STAGED
    assert engine.states() != before
    assert engine.runner.stats()["shadow"]["passed"] == 4


def test_two_runners_and_the_engine_draw_in_turn_from_one_generator() -> None:
    """No runner repeats or skips what another has drawn (RNG-4)."""
    engines = [Engine(part, NOISES["rand"]).captured() for part in ("prep", "forward")]
    torch.manual_seed(9)
    for number in range(3):
        for engine in engines:
            engine.agree([(3 + number, ())])
        torch.rand(number + 1)


def test_generators_that_code_on_a_gpu_names_are_found_without_watching_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """A forward there may be compiled inside, so that nothing watches what it passes to its operations."""
    own, host = SimpleNamespace(device=torch.device("cuda", 1)), torch.Generator()
    monkeypatch.setattr(holdings, "generators", lambda code: [own, host] if code is not None else [])
    gpu, cpu = (SimpleNamespace(torch_device=torch.device(name)) for name in ("cuda:1", "cpu"))
    code: Any = lambda view: None  # noqa: E731
    assert reached_generators(gpu, code, None) == [own]  # type: ignore[arg-type]
    assert reached_generators(cpu, code, None) == []  # type: ignore[arg-type]
    monkeypatch.undo()
    assert holdings.generators(lambda view: torch.rand(3, generator=host)) == [host]
    draws = Draws(lambda: 0, ())
    before = draws.position()
    draws.see(host)
    draws.see(host)
    known, state = draws.position(), host.get_state()
    assert len(known) == len(before) + 1
    with draws.kept():
        torch.rand(3, generator=host)
        assert draws.position() != known
    assert torch.equal(host.get_state(), state)


class Noisy(Prefill):
    """Draws in segments, and in the breaks between them, for the padded rows too."""

    def attention(self, rows: torch.Tensor, view: Any, layer: int) -> torch.Tensor:
        return super().attention(rows, view, layer) + torch.rand(1, dtype=rows.dtype)

    def forward(self, view: Any, metadata: Any) -> Any:
        rows = super().forward(view, metadata)["rows"]
        return {"rows": rows + torch.rand(rows.shape, dtype=rows.dtype)}


def test_segments_and_breaks_draw_in_the_order_of_eager_code() -> None:
    with make_runner(Noisy()) as runner, make_runner(Noisy()) as eager:
        before = torch.get_rng_state()
        runner.capture(progress=False)
        assert torch.equal(torch.get_rng_state(), before)
        drawn = []
        for one in (runner, eager):
            torch.manual_seed(4)
            steps = [
                one.replay(batch(lens, seed)) for seed, lens in enumerate([[3, 2], [8], [1, 4], [3, 2]]) for _ in "ab"
            ]
            drawn.append([step.outputs["rows"].tolist()[:1] for step in steps[-1:]] + [torch.rand(3).tolist()])
            forward = {step.decision.forward for step in steps}
            assert forward == {Route.GRAPH if one is runner else Route.EAGER}
        assert drawn[0] == drawn[1]
