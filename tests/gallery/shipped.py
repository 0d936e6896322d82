"""The shipped preps, with what an audit of them and a comparison with their slow references need."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from types import ModuleType
from typing import Any

import torch

import graphglue as gg
from graphglue.preps import paged_decode


@dataclass(frozen=True)
class Shipped:
    """A shipped prep, and what an audit and its reference need.

    Attributes:
        name: its registered name.
        module: where its source is.
        make: module -> prep.
        slots: with the range of legal values.
        tables: builds them on a device.
        expected: (module, sources and tables as lists) -> metadata as lists, by the slow reference.
        contract: what it declares.
    """

    name: str
    module: ModuleType
    make: Callable[[ModuleType], Callable[[Any], Any]]
    slots: tuple[gg.Slot, ...]
    tables: Callable[[torch.device], dict[str, torch.Tensor]]
    expected: Callable[[dict[str, Any]], dict[str, Any]]
    contract: gg.PrepContract

    def runner(self, prep: Callable[[Any], Any], device: torch.device | str = "cpu", ladder: tuple[int, ...] = (2, 5)):
        """Build a runner of a prep with this one's declaration."""
        registry = gg.Registry()
        registry.register(self.contract)(prep)
        device = torch.device(device)
        return gg.Runner(
            slots=self.slots,
            ladder=ladder,
            prep=self.contract.name,
            registry=registry,
            tables=self.tables(device),
            device=device,
        )


def _paged_decode() -> Shipped:
    valid = {"seq_lens": (2, 48), "req_pool_indices": (0, 5), "out_cache_loc": (0, 95)}

    def tables(device: torch.device) -> dict[str, torch.Tensor]:
        return {"req_to_token": torch.arange(6 * 48, device=device).mul(5).remainder(96).view(6, 48)}

    return Shipped(
        name="paged-decode",
        module=paged_decode,
        make=lambda module: module.make(page_size=16),
        slots=tuple(replace(slot, valid=valid[slot.name]) for slot in paged_decode.slots()),
        tables=tables,
        expected=lambda listed: paged_decode.reference(**listed, page_size=16),
        contract=paged_decode.CONTRACT,
    )


SHIPPED = {shipped.name: shipped for shipped in (_paged_decode(),)}
