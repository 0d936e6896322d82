"""The small target and draft of the speculative demo: their plain decoding, and a loop whose checks can fail."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from graphglue.demo import arrivals, speculative
from graphglue.demo.model import ModelShape, Transformer

EXAMPLE = Path(__file__).parents[3] / "examples" / "speculative.py"
SHAPE = ModelShape(max_context=36, page_size=4, hidden=32, num_heads=2, num_kv_heads=1, ffn=64)
WINDOW = 5


@pytest.fixture(scope="module")
def models() -> tuple[Transformer, Transformer]:
    return speculative.build(SHAPE, seed=1, dtype=torch.float64, device="cpu")


@pytest.fixture(scope="module")
def example() -> Any:
    """Give the example as a module."""
    spec = importlib.util.spec_from_file_location("speculative_example", EXAMPLE)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


def recomputed(model: Transformer, prompt: list[int], num_wanted: int, window: int) -> list[int]:
    """Generate each token from the whole sequence before it, under one mask for each layer."""
    tokens = list(prompt)
    for _ in range(num_wanted):
        places = torch.arange(len(tokens))
        causal = places <= places[:, None]
        masks: Any = [causal, causal & (places > places[:, None] - window)]

        def attend(mask: Any, queries: Any, keys: Any, values: Any) -> torch.Tensor:
            scores = torch.einsum("tkgd,ckd->tkgc", queries, keys) * queries.shape[-1] ** -0.5
            weights = torch.softmax(scores.masked_fill(~mask[:, None, None, :], float("-inf")), dim=-1)
            return torch.einsum("tkgc,ckd->tkgd", weights, values)

        rows = model.hidden(masks, torch.tensor(tokens), places, attend)
        tokens.append(int((rows @ model.head)[-1].argmax()))
    return tokens[len(prompt) :]


def test_plain_greedy_is_the_whole_sequence_recomputed(models: tuple[Transformer, Transformer]) -> None:
    prompts = [[3], [9, 200, 41], list(range(40, 52))]
    plain = [speculative.plain_greedy(models[0], prompt, 9, WINDOW) for prompt in prompts]
    assert plain == [recomputed(models[0], prompt, 9, WINDOW) for prompt in prompts]
    assert plain != [recomputed(models[0], prompt, 9, 1) for prompt in prompts], "the window changes nothing"


def test_the_target_follows_its_preference_in_part(models: tuple[Transformer, Transformer]) -> None:
    preferred = speculative.successors(SHAPE.vocab, 1, "cpu")[1]
    assert sorted(preferred.tolist()) == list(range(SHAPE.vocab))
    tokens = [7, *speculative.plain_greedy(models[0], [7], 30, WINDOW)]
    followed = sum(int(preferred[one]) == other for one, other in zip(tokens, tokens[1:]))
    assert 5 < followed < 30


def served(example: Any, spoil: Any = None) -> Any:
    """Serve a few requests in two engines that are both switched off; spoil the second one before the third step."""
    models = speculative.build(example.SHAPE, 1, torch.float64, "cpu")
    one, other = (example.Loop(example.Engine(*models, enabled=False)) for _ in range(2))
    serving = example.Serving(one, other)
    if spoil is not None:
        step = other.step

        def spoiled() -> None:
            if serving.num_steps == 2:
                spoil(other.engine)
            step()

        other.step = spoiled
    serving.serve([arrivals.Request(0, 5, 7), arrivals.Request(0, 2, 9), arrivals.Request(3, 9, 3)], seed=0)
    return serving


def test_two_eager_engines_agree_with_each_other_and_with_plain_greedy(
    example: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    serving = served(example)
    assert serving.num_differences == 0
    assert serving.num_compared > 0
    target, _ = speculative.build(example.SHAPE, 1, torch.float64, "cpu")
    example.check_greedy(target, serving.graphs.done)
    assert "3 requests equal plain greedy decoding" in capsys.readouterr().out
    serving.graphs.done[0].generated[-1] += 1
    with pytest.raises(AssertionError):
        example.check_greedy(target, serving.graphs.done)


def spoil_pages(engine: Any) -> None:
    engine.caches[0].keys[4:] += 1.0


def spoil_draft(engine: Any) -> None:
    engine.caches[2].values[example_ring(engine) :] += 1.0


def spoil_map(engine: Any) -> None:
    engine.tables["full_to_swa"][4:-1] = 0


def example_ring(engine: Any) -> int:
    return engine.caches[2].keys.shape[0] // engine.tables["num_pages"].shape[0]


@pytest.mark.parametrize("spoil", [spoil_pages, spoil_draft, spoil_map])
def test_the_comparison_of_the_loops_sees_what_was_spoiled(
    example: Any, spoil: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    serving = served(example, spoil)
    assert serving.num_differences > 0
    assert "differs" in capsys.readouterr().err
    with pytest.raises(AssertionError):
        example.check(serving)


def test_a_spoiled_draft_costs_acceptance_and_no_token(example: Any, capsys: pytest.CaptureFixture[str]) -> None:
    """What the target did not say is never taken, so the output does not depend on the draft."""

    def propose_nothing(engine: Any) -> None:
        replay = engine.runners["draft"].replay

        def wrong(batch: Any) -> Any:
            step = replay(batch)
            step.outputs["next_token"].fill_(0)
            return step

        engine.runners["draft"].replay = wrong

    serving = served(example, propose_nothing)
    target, _ = speculative.build(example.SHAPE, 1, torch.float64, "cpu")
    example.check_greedy(target, serving.eager.done)
    assert example.mean_taken(serving.eager.taken) < example.mean_taken(serving.graphs.taken)
    capsys.readouterr()


@pytest.mark.parametrize(
    ("prompt", "block", "followed", "generated", "num_read"),
    [
        ([5], [5, 1, 2, 3], [1, 2, 3, 4], [1, 2, 3, 4], 4),  # all are taken
        ([5], [5, 1, 2, 3], [1, 9, 3, 4], [1, 9], 2),
        ([5], [5, 1, 2, 3], [9, 2, 3, 4], [9], 1),
        ([5], [5, 1, 2, 3], [1, 2, 9, 3], [1, 2, 9], 3),  # what follows a mismatch does not count
        ([5, 6], [5, 6, 2, 3], [7, 2, 3, 4], [2, 3, 4], 4),  # a prompt's own token is taken, whatever the target says
        ([5, 6, 7, 8], [5, 6, 7, 8], [1, 2, 3, 4], [4], 4),
        ([5, 6, 7, 8, 9], [5, 6, 7, 8], [1, 2, 3, 4], [], 4),  # the token behind the block is known
    ],
)
def test_a_block_is_taken_as_far_as_greedy_decoding_goes(
    example: Any, prompt: list[int], block: list[int], followed: list[int], generated: list[int], num_read: int
) -> None:
    models = speculative.build(example.SHAPE, 1, torch.float64, "cpu")
    loop = example.Loop(example.Engine(*models, enabled=False))
    request = example.Request(prompt, 9, row=1)
    loop._take(request, block, followed)
    assert (request.generated, request.num_read) == (generated, num_read)
    assert loop.taken.total() == (len(prompt) == 1)
