"""What is soaked: a small runner with every kind of route, the slow reference of its steps, and a model of its routes.

Reference and model are plain Python over lists and share nothing with the library but its names.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

import graphglue as gg
from graphglue.graphs import session

LADDER, WIDTH, TABLE_ROWS = (1, 2, 4, 8), 2, 64
SLOTS = (
    gg.Slot("lens", axis="request", dtype=torch.int64, pad=0),
    gg.Slot("rows", axis="request", dtype=torch.int64, pad=0, index_of="t"),
    gg.Slot("ids", axis="token", dtype=torch.int64, pad=0),
)
CONTRACT = gg.PrepContract(
    name="base",
    reads={"lens": 0, "rows": 0},
    tables=("t",),
    outputs={"base": "request"},
    modes={gg.Mode.DECODE},
    ragged=True,
)
CONFIG = gg.RunnerConfig(staging=True, flight_recorder=64, shadow=gg.Shadow(first=2, every=997))
COLD, CAPTURED, QUARANTINED = "cold", "captured", "quarantined"


@dataclass
class Fault:
    """Make one part raise while it is recorded at one size."""

    part: str = ""
    size: int = 0

    def strike(self, part: str, view: Any) -> None:
        """Raise if this is the part, the size and the time."""
        if part == self.part and view.bucket.requests == self.size and session.recording():
            raise LookupError(f"{part} has no plan for {self.size} requests")


@dataclass(frozen=True)
class Drawn:
    """One step as plain lists.

    Attributes:
        kind: idle, uniform, ragged, over or feature.
        row_tokens: the tokens of each request.
        lens, rows, ids: what the slots are given.
    """

    kind: str
    row_tokens: tuple[int, ...]
    lens: list[int]
    rows: list[int]
    ids: list[int]

    def batch(self, wrap: Callable[[list[int]], Any]) -> gg.Batch:
        """Build the batch, its sources wrapped as lists, arrays or tensors."""
        if self.kind == "idle":
            return gg.Batch.idle()
        sources = {name: wrap(getattr(self, name)) for name in ("lens", "rows", "ids")}
        features = frozenset({"lora"}) if self.kind == "feature" else frozenset()
        row_tokens = self.row_tokens if self.kind == "ragged" else None
        return gg.Batch(len(self.lens), sources, row_tokens=row_tokens, features=features)


def drawn(rng: random.Random) -> Drawn:
    """Draw a step of any kind."""
    kind = rng.choices(("idle", "uniform", "ragged", "over", "feature"), (6, 60, 20, 4, 5))[0]
    if kind == "idle":
        return Drawn(kind, (), [], [], [])
    largest = LADDER[-1]
    requests = rng.randint(largest + 1, 2 * largest) if kind == "over" else rng.randint(1, largest)
    row_tokens = [WIDTH] * requests
    if kind == "ragged":  # never more tokens than the ladder's largest size has
        requests = max(2, requests)
        row_tokens = [1, WIDTH] + [rng.randint(1, WIDTH) for _ in range(requests - 2)]
        rng.shuffle(row_tokens)
    return Drawn(
        kind,
        tuple(row_tokens),
        [rng.randint(1, 999) for _ in range(requests)],
        [rng.randrange(TABLE_ROWS) for _ in range(requests)],
        [rng.randint(0, 9999) for _ in range(sum(row_tokens))],
    )


@dataclass
class Model:
    """Say where a step goes, from the states of the sizes alone; one state for a size's uniform and ragged keys."""

    prep: dict[int, str] = field(default_factory=lambda: dict.fromkeys(LADDER, COLD))
    forward: dict[int, str] = field(default_factory=lambda: dict.fromkeys(LADDER, COLD))

    def set_all(self, state: str, fault: Fault | None = None) -> None:
        """Set all sizes, but the one where a fault strikes."""
        for part, states in (("prep", self.prep), ("forward", self.forward)):
            for size in states:
                struck = fault is not None and (fault.part, fault.size) == (part, size)
                states[size] = QUARANTINED if struck else state

    def size_of(self, step: Drawn) -> int:
        """Give the ladder size that covers a step."""
        needed = max(len(step.lens), -(-sum(step.row_tokens) // WIDTH))
        return next(size for size in LADDER if size >= needed)

    def expects(self, step: Drawn, staged: bool) -> tuple[str, str, str, str | None, tuple[int, int, int] | None]:
        """Give prep, forward, reason, forward reason and bucket; no bucket where the step runs exactly."""
        if step.kind == "over":
            return "eager", "eager", "over_ladder", "over_ladder", None
        size = self.size_of(step)
        prep, reason = self._prep(step, size, staged)
        state, ragged = self.forward[size], step.kind == "ragged"
        cold = "ragged_key" if ragged else "no_forward_graph"
        why = {CAPTURED: None, QUARANTINED: "forward_quarantined", COLD: cold}[state]
        bucket = (size, size * WIDTH, 0 if ragged else WIDTH)
        return prep, "graph" if why is None else "eager", reason, why, bucket

    def _prep(self, step: Drawn, size: int, staged: bool) -> tuple[str, str]:
        if step.kind == "idle":
            return "eager", "idle_eager"
        if step.kind == "feature":
            return "eager", "feature_not_audited"
        if self.prep[size] == QUARANTINED:
            return "eager", "quarantined"
        if self.prep[size] == COLD:
            return "eager", "not_captured"
        if staged:
            return "glue", "staged"
        exact = len(step.lens) == size
        return "glue", "ragged" if step.kind == "ragged" else "unpadded" if exact else "padded"


def reference(step: Drawn, table: Sequence[int], rows: int) -> tuple[list[int], list[int]]:
    """Compute metadata and outputs by loops."""
    base = [table[row] + length for row, length in zip(step.rows, step.lens)]
    total = sum(base)
    return base + [0] * (rows - len(base)), [3 * token + total for token in step.ids]


class Engine:
    """A runner with its table, its fault and the wraps of its sources."""

    def __init__(self, device: str = "cpu", config: gg.RunnerConfig = CONFIG) -> None:
        self.device, self.fault = device, Fault()
        self.numbers = [0] * TABLE_ROWS
        self.table = torch.zeros(TABLE_ROWS, dtype=torch.int64, device=device)
        registry = gg.Registry()
        registry.register(CONTRACT)(self.prep)
        self.runner = gg.Runner(
            slots=SLOTS, ladder=LADDER, registry=registry, prep="base", tables={"t": self.table},
            forward=self.forward, tokens_per_request=WIDTH, device=device, config=config,
        )  # fmt: skip
        self.wraps: list[Callable[[list[int]], Any]] = [list, np.array, torch.tensor]
        if device != "cpu":
            self.wraps.append(lambda numbers: torch.tensor(numbers, device=device))

    def prep(self, view: Any) -> dict[str, torch.Tensor]:
        """Look up a row of the table for each request."""
        self.fault.strike("prep", view)
        return {"base": view.tables.t[view.rows] + view.lens}

    def forward(self, view: Any, metadata: Any) -> torch.Tensor:
        """Mix a token with the metadata of all requests."""
        self.fault.strike("forward", view)
        return view.ids * 3 + metadata["base"].sum()

    def rewrite(self, rng: random.Random) -> None:
        """Change what the table holds, in place; row 0 stays the pads' own."""
        self.numbers = [0, *(rng.randint(0, 10**6) for _ in range(TABLE_ROWS - 1))]
        self.table.copy_(torch.tensor(self.numbers))
