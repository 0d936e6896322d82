"""Speculative decoding at its edges, in the engine of examples/speculative.py: no token differs from plain greedy ones.

Its runners are switched off here, so that each case costs no capture; the example itself holds graphs against them.
"""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

import graphglue as gg
from graphglue.demo import speculative
from graphglue.demo.model import ModelShape

PATH = Path(__file__).parents[2] / "examples" / "speculative.py"
SHAPE = {"hidden": 16, "num_heads": 2, "num_kv_heads": 1, "head_dim": 8, "ffn": 16}
MAX_CONTEXT = 15


@pytest.fixture
def example(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[ModuleType]:
    """Load the example with other sizes: those that are given, and what it derives from them."""
    spec = importlib.util.spec_from_file_location("speculative_at_its_edges", PATH)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, spec.name, module)  # its dataclasses look their module up
    spec.loader.exec_module(module)
    given = {"BLOCK": 4, "PAGE_SIZE": 4, "WINDOW": 4, "ALIGNMENT": 1, **request.param}
    module.SHAPE = ModelShape(max_context=MAX_CONTEXT, page_size=given["PAGE_SIZE"], **SHAPE)
    module.DRAFTED, module.RING = given["BLOCK"] - 1, given["WINDOW"] + 2 * given["BLOCK"]
    module.PROPOSED = module.gg.Slot("proposed", "request", torch.int64, 0, inner=(module.DRAFTED,))
    for name, value in given.items():
        setattr(module, name, value)
    return module


def served(example: ModuleType, target: Any, small: Any, wanted: list[tuple[int, int]]) -> tuple[list[Any], Any]:
    """Serve requests of (prompt, generated) tokens, the second half once the first one is done.

    Returns:
        The requests; and how often a drafted block brought how many tokens.
    """
    loop, half = example.Loop(example.Engine(target, small, enabled=False)), -(-len(wanted) // 2)
    made = [
        example.Request([(7 * row + 3 * place) % 256 for place in range(prompt)], generated, row % half + 1)
        for row, (prompt, generated) in enumerate(wanted)
    ]
    for wave in (made[:half], made[half:]):
        loop.running = [*wave]
        while loop.running:
            loop.step()
        loop.step()  # IDLE
    assert int(loop.engine.tables["num_free"]) == loop.engine.num_pages, "pages were lost"
    return made, loop.taken


EDGES = {
    "as it is": {},
    "one drafted token": {"BLOCK": 2},
    "a block wider than two pages": {"BLOCK": 5, "PAGE_SIZE": 2},
    "pages of one token": {"PAGE_SIZE": 1},
    "a window of one": {"WINDOW": 1},
    "pages that do not fill a row": {"PAGE_SIZE": 6},
}


@pytest.mark.parametrize("example", EDGES.values(), ids=EDGES.keys(), indirect=True)
def test_requests_that_fill_their_rows_are_decoded_to_the_end(
    example: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The last blocks reach past the row; requests end at once, in the middle of a block and together."""
    monkeypatch.setattr(speculative, "PREFERENCE", 3.0)
    target, small = speculative.build(example.SHAPE, 5, torch.float64, "cpu")
    wanted = [(6, MAX_CONTEXT - 6), (MAX_CONTEXT - 1, 1), (1, MAX_CONTEXT - 1), (2, 1), (MAX_CONTEXT - 3, 3), (3, 5)]
    for request, (prompt, generated) in zip(served(example, target, small, wanted)[0], wanted, strict=True):
        assert len(request.generated) == generated
        assert request.generated == speculative.plain_greedy(target, request.prompt, generated, example.WINDOW), prompt


@pytest.mark.parametrize("example", [{}], indirect=True)
@pytest.mark.parametrize(("off_by", "lengths"), [(1, {1}), (0, {4})], ids=["none taken", "all taken"])
def test_however_many_drafted_tokens_are_taken_the_tokens_are_the_same(
    example: ModuleType, off_by: int, lengths: set[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    target, small = speculative.build(example.SHAPE, 6, torch.float64, "cpu")
    replay = example.Loop._replay

    def foretold(loop: Any, kind: str, mode: gg.Mode, sources: dict[str, Any]) -> gg.Step:
        """Replay; and propose what greedy decoding will write, or never that."""
        step = replay(loop, kind, mode, sources)
        if kind != "draft":
            return step
        tokens = []
        for one in loop.running:
            ahead = MAX_CONTEXT - len(one.prompt)
            known = one.prompt + speculative.plain_greedy(target, one.prompt, ahead, example.WINDOW)
            tokens += [(token + off_by) % 256 for token in known[one.num_read + 1 : one.num_read + example.BLOCK]]
        return replace(step, outputs={**step.outputs, "next_token": torch.tensor(tokens, dtype=torch.int64)})

    monkeypatch.setattr(example.Loop, "_replay", foretold)
    requests, taken = served(example, target, small, [(4, 7), (3, 8)])
    for request in requests:
        assert request.generated == speculative.plain_greedy(target, request.prompt, request.num_wanted, example.WINDOW)
    assert set(taken) == lengths
