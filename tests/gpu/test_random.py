"""Random numbers on a GPU: replays advance torch's graph-safe generators as eager code does, whatever the order."""

from __future__ import annotations

import pytest
import torch

import graphglue as gg
from graphglue import Route
from tests.draws import BETWEEN, LADDER, NOISES, STEPS, Engine, draws_nothing_between_steps

DEFAULT = [name for name in NOISES if "generator" not in name]
PASSED = [name for name in NOISES if "generator" in name]


@pytest.mark.parametrize("part", ["prep", "forward"])
@pytest.mark.parametrize("noise", DEFAULT)
def test_graphs_of_all_buckets_advance_one_generator_as_eager_code_does(noise: str, part: str) -> None:
    """Replays, eager steps between them and a graph of another bucket draw on where the last one stopped (RNG-1)."""
    engine = Engine(part, NOISES[noise], "cuda").captured()
    decisions = engine.agree(STEPS, seed=5)
    assert [bool(decision) for decision in decisions] == [requests <= 8 for requests, _ in STEPS]
    glued = [decision.prep is Route.GLUE for decision in decisions]
    assert glued == [not features and 0 < requests <= 8 for requests, features in STEPS]
    assert {engine.runner._capture.drawing_part(key) for key in engine.runner.space.keys(LADDER)} == {part}
    stats = engine.runner.stats()
    if part == "forward":  # in the forward's own graph, which torch replays
        assert stats["one_launch"] == sum(glued)
    else:
        assert list(stats["launch_fallbacks"]) == ["a prep draws random numbers, which only its own replay advances"]


def test_a_step_that_draws_otherwise_is_found() -> None:
    engine = Engine("forward", NOISES["rand"], "cuda").captured()
    engine.agree([(3, ()), (8, ())])
    engine.noise = lambda x, own: x + torch.rand(2 * x.shape[0], device=x.device)[::2]
    with pytest.raises(AssertionError, match=r"drew .*its twin|left a generator elsewhere"):
        engine.agree([(3, ())])


@pytest.mark.parametrize("part", ["prep", "forward"])
@pytest.mark.parametrize("noise", PASSED)
def test_a_passed_generator_is_drawn_from_as_eager_code_does(noise: str, part: str) -> None:
    """Glued where torch can capture it; refused by name and run eagerly where it can not (RNG-4)."""
    engine = Engine(part, NOISES[noise], "cuda")
    try:
        engine.captured()
    except gg.CaptureError as error:  # there is always a key: the other part draws nothing
        raise AssertionError("nothing was captured") from error
    decisions = engine.agree(STEPS, seed=5)
    state = {key["states"]["p" if part == "prep" else "forward"] for key in engine.runner.stats()["keys"]}
    assert state in ({"captured"}, {"quarantined"})
    if state == {"quarantined"}:
        causes = [cause for key in engine.runner.stats()["keys"] for cause in key["causes"].values()]
        assert causes
        assert all("generator" in cause.lower() for cause in causes), causes
    else:
        assert any(decision.prep is Route.GLUE for decision in decisions)
        assert {engine.runner._capture.drawing_part(key) for key in engine.runner.space.keys(LADDER)} == {part}
    torch.rand(3, device="cuda")  # the default generator has left its capture


@pytest.mark.parametrize("part", ["prep", "forward"])
@pytest.mark.parametrize("between", BETWEEN)
def test_what_lies_between_two_steps_draws_no_number(between: str, part: str) -> None:
    """Warm-ups and checks draw, and put the generators back (STATE-CARRY-1)."""
    draws_nothing_between_steps(Engine(part, NOISES["dropout"], "cuda"), BETWEEN[between])
