"""Kinds of faults from the field that only a GPU can show, and that no other test names.

The docstring of a test ends with the ids of the reports; tests/README.md maps every report to its tests.
"""

from __future__ import annotations

import gc
from typing import Any

import torch

import graphglue as gg
from graphglue import Batch, Reason, Route, Slot

MIB = 2**20


def reserved() -> int:
    gc.collect()
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    return torch.cuda.memory_reserved()


def test_capture_fail_a_failed_capture_gives_its_memory_back() -> None:
    """However often a key fails, memory stays flat, the others serve, and all goes with the runner; CAPTURE-FAIL-1."""
    contract = gg.PrepContract(name="p", reads={"lens": 1}, modes={gg.Mode.DECODE}, outputs={"last": "request"})
    registry = gg.Registry()
    registry.register(contract)(lambda view: {"last": view.lens - 1})

    def forward(view: Any, metadata: Any) -> torch.Tensor:
        scratch = torch.ones(view.bucket.requests * 2 * MIB, dtype=torch.int64, device="cuda")  # 16 MiB a request
        if view.bucket.requests == 8 and torch.cuda.is_current_stream_capturing():
            raise LookupError("no plan for this size")
        return metadata["last"] + scratch[0]

    first, held = reserved(), []
    with gg.Runner(
        slots=[Slot("lens", "request", torch.int64, 1)],
        ladder=[2, 8],
        prep="p",
        registry=registry,
        forward=forward,
        device="cuda",
    ) as runner:
        runner.capture(progress=False)
        for _ in range(4):
            assert runner.replay(Batch(1, {"lens": [5]})).decision.forward is Route.GRAPH
            step = runner.replay(Batch(7, {"lens": [5, 6, 7, 8, 9, 10, 11]}))
            assert step.decision.forward_reason is Reason.FORWARD_QUARANTINED
            assert step.outputs.tolist() == [5, 6, 7, 8, 9, 10, 11]
            del step
            assert runner.maintain() == []
            held.append(reserved())
    assert max(held) - min(held) < 8 * MIB, held
    del runner
    assert reserved() - first < 8 * MIB, (first, reserved())
