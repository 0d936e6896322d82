"""The prefill body that the section segments runs: layers with one eager break each, on token rows."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from graphglue.bench.timing import Step
from graphglue.graphs.base import Recorder, Recording
from graphglue.graphs.marks import eager_break

Attend = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]
_ROW_ALIGNED = ("queries", "keys", "values")


def attend(queries: torch.Tensor, keys: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
    """Stand in for attention: one kernel, so that what is timed is how a break is reached and left."""
    return torch.addcmul(values, queries, keys)


def attend_into(queries: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, into: torch.Tensor) -> None:
    """Do the same into memory that is given, as attention backends do."""
    torch.addcmul(values, queries, keys, out=into)


def copy_into(queries: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, into: torch.Tensor) -> None:
    """Bring the result of ``attend`` where the next segment reads it: what a break must do that may return nothing."""
    into.copy_(attend(queries, keys, values))


@dataclass(frozen=True)
class Way:
    """How a break gives its result.

    Attributes:
        label: what the tables call it; "" for the one that attention backends have.
        plain: the break's function for those who can not return tensors from it.
        marked: the same break for a segmented recording, as ``Body.run`` calls it.
    """

    label: str
    plain: Callable[[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor], None]
    marked: Attend


def writing(fill: Callable[..., None]) -> Attend:
    """Call a function that writes its result, into fresh memory that the segment before it allocates."""

    def call(queries: torch.Tensor, keys: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
        into = torch.empty_like(queries)
        fill(queries, keys, values, into)
        return into

    return call


FILLS = Way("", attend_into, writing(eager_break(row_aligned=(*_ROW_ALIGNED, "into"), writes=("into",))(attend_into)))
RETURNS = Way(", the break returns a tensor", copy_into, eager_break(row_aligned=_ROW_ALIGNED)(attend))


class Body:
    """The weights, the static input and the static result of a prefill's layers.

    Args:
        device: where it runs.
        rows: tokens of the largest bucket.
        num_layers: layers, with one break each.
        width: of the hidden rows.
        num_weights: different layers; the others share theirs.
    """

    def __init__(
        self, device: torch.device, rows: int, num_layers: int, width: int, num_weights: int | None = None
    ) -> None:
        self.device, self.rows, self.num_layers, self._width = device, rows, num_layers, width
        self._dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
        generator = torch.Generator().manual_seed(0)

        def weight(columns: int) -> torch.Tensor:
            drawn = torch.randn(width, columns, generator=generator) * width**-0.5
            return drawn.to(device, self._dtype)

        count = num_layers if num_weights is None else num_weights
        self._weights = [(weight(3 * width), weight(width)) for _ in range(count)]
        self.inputs = torch.zeros(rows, width, dtype=self._dtype, device=device)
        self.result = torch.zeros_like(self.inputs)
        self.rewrite(0)

    def rewrite(self, seed: int) -> None:
        """Put another step's hidden rows in, and spoil the result of the last one."""
        generator = torch.Generator().manual_seed(seed)
        self.inputs.copy_(torch.randn(self.rows, self._width, generator=generator))
        self.result.fill_(float("nan"))

    def enter(self, layer: int, hidden: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Compute what attention reads."""
        queries, keys, values = (_normed(hidden) @ self._of(layer)[0]).split(self._width, dim=1)
        return queries, keys, values

    def leave(self, layer: int, hidden: torch.Tensor, attended: torch.Tensor) -> torch.Tensor:
        """Compute what comes behind attention."""
        return hidden + torch.nn.functional.silu(_normed(attended) @ self._of(layer)[1])

    def run(self, rows: int, through: Attend) -> torch.Tensor:
        """Run all layers over the first rows of the input, into as many rows of the result."""
        hidden = self.inputs[:rows]
        for layer in range(self.num_layers):
            hidden = self.leave(layer, hidden, through(*self.enter(layer, hidden)))
        return self.result[:rows].copy_(hidden)

    def _of(self, layer: int) -> tuple[torch.Tensor, torch.Tensor]:
        return self._weights[layer % len(self._weights)]


def _normed(hidden: torch.Tensor) -> torch.Tensor:
    return hidden * torch.rsqrt(hidden.square().mean(1, keepdim=True) + 1e-6)


class BareLoop:
    """The same launches and break functions with nothing around them: what no replay can be below.

    Each stretch between two breaks is a recording of its own, whose outputs the loop keeps.
    """

    def __init__(self, body: Body, fill: Callable[..., None], recorder: Recorder) -> None:
        self._body, self._recorder = body, recorder
        self._recordings: list[Recording] = []
        hidden, given = body.inputs, self._record(lambda: self._enter(0, body.inputs))
        calls = [given]
        for layer in range(1, body.num_layers):
            hidden, given = self._record(partial(self._between, layer, hidden, given[3]))
            calls.append(given)
        self._record(partial(self._leave, hidden, given[3]))
        launches = [getattr(recording, "launch", recording.replay) for recording in self._recordings]
        self._last, self._turns, self._fill = launches[-1], tuple(zip(launches, calls)), fill

    def _enter(self, layer: int, hidden: torch.Tensor) -> tuple[torch.Tensor, ...]:
        given = self._body.enter(layer, hidden)
        return *given, torch.empty_like(given[0])

    def _between(self, layer: int, hidden: torch.Tensor, attended: torch.Tensor) -> Any:
        hidden = self._body.leave(layer - 1, hidden, attended)
        return hidden, self._enter(layer, hidden)

    def _leave(self, hidden: torch.Tensor, attended: torch.Tensor) -> None:
        self._body.result.copy_(self._body.leave(self._body.num_layers - 1, hidden, attended))

    def _record(self, run: Callable[[], Any]) -> Any:
        self._recordings.append(self._recorder.record(run))
        return self._recordings[-1].outputs

    @property
    def step(self) -> Step:
        """Give the loop."""
        turns, last, fill = self._turns, self._last, self._fill

        def run() -> None:
            for launch, given in turns:
                launch()
                fill(*given)
            last()

        return run
