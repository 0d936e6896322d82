"""Preps of one key lie in the pool in the order of a step, whatever was repaired (POOL-ALIAS-4)."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from graphglue import Batch, Mode, PrepContract, Registry, Route, Runner, Slot

DEVICE, NAMES, NUM_PARTS = "cuda", ("a", "b", "c"), 8


def expected(lens: list[int]) -> list[int]:
    return [sum((place + 2) * length * NUM_PARTS + NUM_PARTS for place in range(len(NAMES))) for length in lens]


def registry() -> Registry:
    made = Registry()
    for place, name in enumerate(NAMES):
        contract = PrepContract(name=name, reads={"lens": 0}, outputs={name: "request"}, modes={Mode.DECODE})

        @made.register(contract)
        def prep(view: Any, place: int = place, name: str = name) -> dict[str, torch.Tensor]:
            parts = [view.lens * (place + 2) + 1 for _ in range(NUM_PARTS)]  # freed at the end, and found by the next
            return {name: torch.stack(parts).sum(0)}

    return made


@pytest.mark.parametrize("repaired", [("a",), ("b",), ("a", "c"), ("c", "b")])
def test_repaired_preps_are_not_overwritten_by_those_behind_them(repaired: tuple[str, ...]) -> None:
    with Runner(
        slots=[Slot("lens", axis="request", dtype=torch.int64, pad=0)],
        ladder=[2, 4, 8],
        registry=registry(),
        prep=list(NAMES),
        forward=lambda view, found: sum(found[name][name] for name in NAMES),
        device=DEVICE,
    ) as runner:
        runner.capture(progress=False)
        for unit in runner._units:
            for key in runner._wanted if unit.name in repaired else ():
                unit.cache.quarantine(key, "told to")
        runner._capture.drop_launches(runner._wanted)
        runner._stepper.forget()
        assert len(runner.maintain()) == len(runner._wanted)
        for lens in ([1, 2, 3], [4], [5, 6, 7, 8, 9, 10], [11, 12]):
            step = runner.replay(Batch(len(lens), {"lens": lens}))
            assert (step.decision.prep, step.decision.forward) == (Route.GLUE, Route.GRAPH)
            assert step.outputs.tolist() == expected(lens)
            assert [step.metadata[name][name].shape[0] for name in NAMES] == [step.decision.bucket.requests] * 3
