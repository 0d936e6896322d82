"""What the benchmark runs: a decode step of five slots, a prep of 40 small operations, a forward of layers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import torch

import graphglue as gg

PREP = "bench-prep"
NUM_PREP_OPS = 40
TOKENS_PER_REQUEST = 4
PADS: Mapping[str, int] = {"seq_lens": 1, "req_pool_indices": 0, "out_cache_loc": 0, "input_ids": 0, "positions": 0}
MIXED_DTYPES: Mapping[str, torch.dtype] = {"seq_lens": torch.int32, "out_cache_loc": torch.int32}
_PAGE_SIZE, _NUM_PAGES, _VOCABULARY, _POOL_ROWS = 64, 64, 1024, 512
_REQUEST_SLOTS = ("seq_lens", "req_pool_indices")
_MODULUS, _MULTIPLIER = 65521, 31


@dataclass(frozen=True)
class Size:
    """How large the forward is: what a GPU serves, or what the tape can re-run in reasonable time."""

    num_layers: int
    width: int
    dtype: torch.dtype

    @classmethod
    def of(cls, device: torch.device) -> Size:
        """Choose the size for a device."""
        return cls(40, 2048, torch.bfloat16) if device.type == "cuda" else cls(2, 32, torch.float32)


class Workload:
    """Hold weights and tables, and build the pieces of a step.

    Args:
        device: where it runs.
        num_slots: 5, or more: further token slots that nothing reads.
        mixed: give two slots another dtype (int32); all are int64 otherwise.
        num_layers: layers of the forward, if not the size's.
    """

    def __init__(
        self, device: torch.device, num_slots: int = 5, mixed: bool = False, num_layers: int | None = None
    ) -> None:
        self.device, self.size = device, Size.of(device)
        generator = torch.Generator().manual_seed(0)
        width, dtype = self.size.width, self.size.dtype
        layers = self.size.num_layers if num_layers is None else num_layers
        scale = 0.1 * width**-0.5
        self.embedding = torch.randn(_VOCABULARY, width, generator=generator).to(device, dtype)
        weight = (torch.randn(width, width, generator=generator) * scale).to(device, dtype)
        self.weights = [weight.roll(layer, 0) for layer in range(layers)]
        table = torch.randint(0, 1 << 20, (_POOL_ROWS, _NUM_PAGES), generator=generator)
        self.tables = {"req_to_token": table.to(device)}
        names = [*PADS, *(f"extra_{number:02d}" for number in range(num_slots - len(PADS)))]
        self.dtypes = {name: MIXED_DTYPES.get(name, torch.int64) if mixed else torch.int64 for name in names}

    def slots(self) -> list[gg.Slot]:
        """Declare the slots."""
        return [
            gg.Slot(name, "request" if name in _REQUEST_SLOTS else "token", dtype, PADS.get(name, 0))
            for name, dtype in self.dtypes.items()
        ]

    def registry(self) -> gg.Registry:
        """Register the prep under ``PREP``."""
        registry = gg.Registry()
        contract = gg.PrepContract(
            name=PREP,
            reads={"seq_lens": 1, "req_pool_indices": 0, "out_cache_loc": 0},
            tables=("req_to_token",),
            outputs={"page_table": "request", "positions": "token"},
            modes={gg.Mode.DECODE},
        )
        registry.register(contract)(prep)
        return registry

    def runner(self, ladder: Sequence[int], config: gg.RunnerConfig | None = None, ranks: Any = None) -> gg.Runner:
        """Build a runner over these pieces; nothing is captured yet."""
        return gg.Runner(
            slots=self.slots(),
            ladder=ladder,
            prep=PREP,
            registry=self.registry(),
            tables=self.tables,
            forward=self.forward,
            device=self.device,
            tokens_per_request=TOKENS_PER_REQUEST,
            ranks=ranks,
            config=config,
        )

    def forward(self, view: Any, metadata: Mapping[str, torch.Tensor]) -> torch.Tensor:
        """Run the forward over a view's input ids and what the prep returned."""
        return self.layers(view.input_ids, metadata, self.embedding, self.weights)

    @staticmethod
    def layers(
        input_ids: torch.Tensor,
        metadata: Mapping[str, torch.Tensor],
        embedding: torch.Tensor,
        weights: Sequence[torch.Tensor],
    ) -> torch.Tensor:
        """Run the layers: one matrix product and two pointwise operations each."""
        hidden = embedding.index_select(0, input_ids)
        hidden = hidden + metadata["positions"].to(hidden.dtype).unsqueeze(1) * 1e-6
        requests = metadata["page_table"].shape[0]
        pages = metadata["page_table"].sum(1, keepdim=True).expand(requests, TOKENS_PER_REQUEST).reshape(-1, 1)
        hidden = hidden + pages.to(hidden.dtype) * 1e-9
        for weight in weights:
            hidden = torch.nn.functional.silu(hidden @ weight) + hidden
        return hidden

    def values(self, num_requests: int, seed: int) -> dict[str, torch.Tensor]:
        """Draw the host values of one step's slots, at the real extents."""
        generator = torch.Generator().manual_seed(seed)
        highest = {"seq_lens": _PAGE_SIZE * _NUM_PAGES, "req_pool_indices": _POOL_ROWS, "input_ids": _VOCABULARY}
        values = {}
        for name, dtype in self.dtypes.items():
            rows = num_requests if name in _REQUEST_SLOTS else num_requests * TOKENS_PER_REQUEST
            low = TOKENS_PER_REQUEST if name == "seq_lens" else 0
            values[name] = torch.randint(low, highest.get(name, 1 << 20), (rows,), generator=generator).to(dtype)
        return values

    def padded(self, values: Mapping[str, torch.Tensor], bucket: int) -> SimpleNamespace:
        """Give fresh device tensors at a bucket's extents, their tails padded: what a fill must make."""
        fresh = {}
        for name, value in values.items():
            rows = bucket if name in _REQUEST_SLOTS else bucket * TOKENS_PER_REQUEST
            fresh[name] = torch.full((rows,), PADS.get(name, 0), dtype=value.dtype)
            fresh[name][: len(value)] = value
        return self.view_of({name: tensor.to(self.device) for name, tensor in fresh.items()})

    def view_of(self, tensors: Mapping[str, torch.Tensor]) -> SimpleNamespace:
        """Show tensors as prep and forward expect them, outside of any runner."""
        return SimpleNamespace(**tensors, tables=SimpleNamespace(**self.tables))


def prep(view: Any, into: Mapping[str, torch.Tensor] | None = None) -> dict[str, torch.Tensor]:
    """Build page table and positions, in ``NUM_PREP_OPS`` small operations as attention backends do.

    Args:
        view: seq_lens [requests], req_pool_indices [requests], out_cache_loc [tokens], integers;
            tables.req_to_token [rows, pages] int64.
        into: write the results there instead of into fresh tensors.

    Sync: none. Capturable: yes.
    """
    lens, device = view.seq_lens, view.seq_lens.device
    tokens = view.out_cache_loc.shape[0]
    width = tokens // lens.shape[0]
    pages = view.tables.req_to_token.index_select(0, view.req_pool_indices)  # 1: [requests, pages]
    column = torch.arange(_NUM_PAGES, device=device)  # 2
    used = (lens + (_PAGE_SIZE - 1)) // _PAGE_SIZE  # 3, 4
    dead = column >= used.unsqueeze(1)  # 5
    page_table = pages.masked_fill(dead, 0)  # 6
    row = torch.arange(tokens, device=device)  # 7
    request, offset = row // width, row % width  # 8, 9
    first = lens.index_select(0, request) - width  # 10, 11
    positions = (first + offset).clamp(min=0)  # 12, 13
    starts = used.cumsum(0).index_select(0, request)  # 14, 15
    mixed = positions + starts + view.out_cache_loc  # 16, 17
    for _ in range((NUM_PREP_OPS - 19) // 3):  # 18 to 38
        mixed = (mixed * _MULTIPLIER + positions) % _MODULUS
    out: Mapping[str, Any] = into or {"page_table": None, "positions": None}
    return {
        "page_table": torch.add(page_table, 0, out=out["page_table"]),  # 39
        "positions": torch.add(positions, mixed, out=out["positions"]),  # 40
    }
