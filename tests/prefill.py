"""A small prefill for tests of segmented forwards: row-wise layers with attention over single requests between them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

import graphglue as gg

WIDTH, NUM_LAYERS, VOCABULARY, MAX_REQUESTS = 8, 3, 32, 4
SLOTS = [
    gg.Slot("input_ids", axis="token", dtype=torch.int64, pad=0),
    gg.Slot("positions", axis="token", dtype=torch.int64, pad=0),
    gg.Slot("extend_lens", axis="request", dtype=torch.int64, pad=0),
    gg.Slot("cu_seqlens", axis="offset", dtype=torch.int64, pad=gg.REPEAT_LAST),
]
CONTRACT = gg.PrepContract(
    name="prefill",
    reads={"positions": 0, "extend_lens": 0},
    outputs={"scale": "token"},
    modes={gg.Mode.EXTEND},
    idle="glue",
)


def prep(view: Any) -> Any:
    """Compute something for each token."""
    return {"scale": 1.0 / (1 + view.positions.to(torch.float64)) + 0 * view.extend_lens.sum()}


class Prefill:
    """Weights and the forward; counts what its breaks saw."""

    def __init__(self, device: str = "cpu", dtype: torch.dtype = torch.float64) -> None:
        gen = torch.Generator().manual_seed(5)
        self.table = torch.randn(VOCABULARY, WIDTH, generator=gen, dtype=torch.float64).to(device, dtype)
        self.weights = [
            torch.randn(WIDTH, WIDTH, generator=gen, dtype=torch.float64).to(device, dtype) for _ in range(NUM_LAYERS)
        ]
        self.seen: list[tuple[int, list[int]]] = []

        @gg.eager_break(row_aligned=("rows",), pad=0.5)
        def attend(rows: torch.Tensor, view: Any, layer: int) -> torch.Tensor:
            return self.attention(rows, view, layer)

        self.attend = attend

    def attention(self, rows: torch.Tensor, view: Any, layer: int) -> torch.Tensor:
        """Let each row see the rows of its request up to itself, request by request."""
        lens = view.live.extend_lens.tolist()
        self.seen.append((rows.shape[0], lens))
        parts, begin = [rows.new_zeros(0, WIDTH)], 0
        for length in lens:
            own = rows[begin : begin + length]
            parts.append(own.cumsum(0) * (layer + 1))
            begin += length
        parts.append(rows[begin:])  # rows of no request: only while a full bucket is recorded
        return torch.cat(parts)

    def forward(self, view: Any, metadata: Any) -> Any:
        """Run the layers over the bucket's tokens."""
        rows = self.table[view.input_ids] * metadata["scale"].to(self.table.dtype)[:, None]
        for layer, weight in enumerate(self.weights):
            rows = rows + self.attend(torch.tanh(rows) * weight[0], view, layer) * weight[1]
        return {"rows": rows * 2}

    def reference(self, lens: Sequence[int], ids: torch.Tensor) -> torch.Tensor:
        """Compute the real rows without runner, buckets or breaks."""
        positions = torch.cat([torch.arange(length) for length in lens]).to(self.table.device)
        rows = (
            self.table[ids.to(self.table.device)]
            * (1.0 / (1 + positions.to(torch.float64))).to(self.table.dtype)[:, None]
        )
        for layer, weight in enumerate(self.weights):
            seen = torch.tanh(rows) * weight[0]
            mixed = torch.cat([part.cumsum(0) * (layer + 1) for part in seen.split(list(lens))])
            rows = rows + mixed * weight[1]
        return rows * 2


def sources(lens: Sequence[int], seed: int = 0) -> dict[str, Any]:
    """Build a batch's sources from the requests' lengths."""
    gen = torch.Generator().manual_seed(seed)
    total = sum(lens)
    return {
        "input_ids": torch.randint(0, VOCABULARY, (total,), generator=gen).numpy(),
        "positions": torch.cat([torch.arange(length) for length in lens]).numpy(),
        "extend_lens": list(lens),
        "cu_seqlens": [0, *torch.tensor(lens).cumsum(0).tolist()],
    }


def batch(lens: Sequence[int], seed: int = 0) -> gg.Batch:
    """Build an EXTEND batch from the requests' lengths."""
    if not lens:
        return gg.Batch.idle(mode=gg.Mode.EXTEND)
    return gg.Batch(len(lens), sources(lens, seed), mode=gg.Mode.EXTEND, num_tokens=sum(lens))


def make_runner(model: Prefill, **changes: Any) -> gg.Runner:
    """Build an EXTEND runner over token buckets; nothing is captured."""
    registry = gg.Registry()
    contract = changes.pop("contract", CONTRACT)
    registry.register(contract)(changes.pop("prep_function", prep))
    config = {"max_requests": MAX_REQUESTS, **changes.pop("config", {})}
    given = {
        "slots": SLOTS,
        "ladder": [4, 8, 16],
        "prep": contract.name,
        "registry": registry,
        "forward": model.forward,
        "config": gg.RunnerConfig(**config),
        **changes,
    }
    return gg.Runner(**given)
