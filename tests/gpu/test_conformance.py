"""The conformance suite on a GPU: the shipped prep conforms, and what this process can not show is said."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import pytest
import torch

import graphglue as gg
from graphglue.preps import paged_decode
from graphglue.testing import PARTS
from graphglue.testing.backend import Backend
from graphglue.testing.parts import NotShown
from graphglue.testing.suite import run_part

ROWS, CONTEXT = 9, 64


def make_backend() -> dict[str, Any]:
    """Give the arguments of a runner of the shipped prep, with a forward."""
    locations = torch.arange(ROWS * CONTEXT, device="cuda").view(ROWS, CONTEXT)
    return {
        "slots": paged_decode.slots(),
        "ladder": [1, 2, 4, 8],
        "prep": "paged-decode",
        "tables": {"req_to_token": locations},
        "forward": lambda view, metadata: {"sum": metadata["positions"] + view.out_cache_loc},
        "output_axes": "token",
        "device": "cuda",
    }


BACKEND = Backend(make_backend, perturb=lambda: None, max_examples=50)


@pytest.mark.parametrize("part", PARTS)
def test_the_shipped_prep_conforms(part: str) -> None:
    # Poisoning happens in a process of its own: graphglue audit.
    with pytest.raises(NotShown, match="graphglue audit") if part == "poison" else nullcontext():
        run_part(BACKEND, part)


@pytest.mark.parametrize("part", ["trace", "capture"])
def test_a_host_read_does_not_conform(part: str) -> None:
    def make() -> gg.Runner:
        registry = gg.Registry()
        contract = gg.PrepContract(name="reads", reads={"x": 0}, outputs={"m": "request"}, modes={gg.Mode.DECODE})
        registry.register(contract)(lambda view: {"m": view.x + view.x.max().item()})
        slots = [gg.Slot("x", axis="request", dtype=torch.int64, pad=0, valid=(0, 9))]
        return gg.Runner(slots=slots, ladder=[2], prep="reads", registry=registry, device="cuda")

    with pytest.raises((AssertionError, gg.CaptureError), match=r"reads a tensor on the host|item"):
        run_part(Backend(make, max_examples=2), part)
