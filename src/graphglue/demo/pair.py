"""A runner beside its eager twin: both run each step, and every tensor of one is held against the other's."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from time import perf_counter
from typing import Any

import numpy
import torch
from torch import Tensor

import graphglue as gg
from graphglue.core.trees import ROWS
from graphglue.demo.report import StepCount, Tally
from graphglue.demo.twin import EagerTwin, Fault, Outputs, compare


class Pair:
    """Run steps twice, and count what differs.

    Args:
        runner: replays them.
        twin: runs them eagerly at the same padded shapes.
        tally: where differences are counted.
        count: where steps are counted.
        axes: leaf of the outputs -> what its rows are.
        label: stands in front of tensor names in the report.
        fault: breaks the twin's filled tensors on purpose, to show that the comparison can fail.
    """

    def __init__(
        self,
        runner: gg.Runner,
        twin: EagerTwin,
        tally: Tally,
        count: StepCount,
        *,
        axes: Mapping[str, str],
        label: str = "",
        fault: Fault | None = None,
    ) -> None:
        self.runner, self.twin = runner, twin
        self._tally, self._count = tally, count
        self._axes, self._label, self._fault = axes, label, fault
        self._device = runner.arena.device.torch_device

    def step(self, step: int, raw: gg.Bucket, batch: gg.Batch, sources: Mapping[str, Any]) -> tuple[Outputs, Outputs]:
        """Run one step both ways; give the real rows of the outputs, the replayed ones first.

        Args:
            step: the engine's step, for the report.
            raw: the real extents.
            batch: for the runner.
            sources: the same for the twin, with its own sampled tokens.

        Sync: the device.
        """
        replayed, glued_us = self._timed(lambda: self.runner.replay(batch))
        bucket, fault = replayed.decision.bucket, partial(self._fault, step) if self._fault else None
        (metadata, outputs), eager_us = self._timed(lambda: self.twin.step(bucket, raw, sources, fault))
        self._count.note(replayed.decision, raw, glued_us, eager_us)
        real = {name: leaf[: ROWS[self._axes[name]](raw.requests, raw.tokens)] for name, leaf in outputs.items()}
        self._compare(step, replayed.metadata, metadata)
        self._compare(step, replayed.outputs, real)
        return replayed.outputs, real

    def _compare(self, step: int, glued: Outputs, expected: Outputs) -> None:
        self._count.num_tensors_compared += len(expected)
        self._tally.note_differences(compare(step, self._labelled(glued), self._labelled(expected)))

    def _labelled(self, tensors: Outputs) -> dict[str, Tensor]:
        return {self._label + name: tensor for name, tensor in tensors.items()}

    def _timed(self, run: Callable[[], Any]) -> tuple[Any, float]:
        """Measure the host time of a call in us; the device is idle before it and done after it."""
        self._synchronize()
        start = perf_counter()
        result = run()
        elapsed_us = (perf_counter() - start) * 1e6
        self._synchronize()
        return result, elapsed_us

    def _synchronize(self) -> None:
        if self._device.type != "cpu":
            torch.accelerator.synchronize(self._device)


def spelled(columns: Mapping[str, list[int]], step: int, device: torch.device) -> dict[str, Any]:
    """Spell each slot's numbers in another kind of source, and differently at each step.

    Kinds: a list, a numpy array (int32 widens), a tensor on the device or the host.
    """
    return {name: _spelled(numbers, step + place, device) for place, (name, numbers) in enumerate(columns.items())}


def _spelled(numbers: list[int], turn: int, device: torch.device) -> Any:
    match turn % 5:
        case 0:
            return numbers
        case 1:
            return numpy.array(numbers, dtype=numpy.int64)
        case 2:
            return torch.tensor(numbers, dtype=torch.int64, device=device)
        case 3:
            return numpy.array(numbers, dtype=numpy.int32)
    return torch.tensor(numbers, dtype=torch.int64)
