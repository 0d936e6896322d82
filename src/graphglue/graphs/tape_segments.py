"""Segments on the tape: one list of steps each. What a segment computed is an address, as on a GPU."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch

from graphglue.graphs import guard, memory
from graphglue.graphs.tape import Tape, TapeRecording, _Taping


class TapeParts:
    """Record the segments of one callable on the tape."""

    def __init__(self, tape: Tape) -> None:
        self.pool: Hashable = tape.pool  # two nested replays are right here, and refused as a GPU's must be
        self.device = tape.device
        self.rules = guard.Guard(tape.device)
        self._taping = _Taping(self.rules, tape.pool)

    def around(self) -> AbstractContextManager[None]:
        """Do nothing: the tape has no stream."""
        return nullcontext()

    def call(self, run: Callable[[], Any]) -> Any:
        """Run the callable under the guards."""
        return self.rules.call(run, guard.FunctionGuard(self.rules), self._taping)

    def begin(self) -> None:
        """Open a segment."""
        self._taping.begin()

    def refusal(self) -> str | None:
        """Say why a segment can not end here; None if it can."""
        return None

    def end(self, outputs: Any) -> TapeRecording:
        """End the open segment."""
        return self._taping.finish(outputs)

    def abandon(self) -> None:
        """Drop the open segment."""

    def owns(self, tensor: torch.Tensor) -> bool:
        """Tell whether a segment allocated a tensor's memory."""
        return tensor.untyped_storage()._cdata in self._taping.made

    def alias(self, tensor: torch.Tensor) -> torch.Tensor:
        """Give the same memory in a tensor of its own."""
        with memory.plain():
            return memory.place(tensor.untyped_storage(), tensor)

    def launch(self, recording: TapeRecording) -> Callable[[], None] | None:
        """Give what replays a segment; None if it holds no work."""
        return recording.replay if recording.num_steps else None
