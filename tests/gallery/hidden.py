"""Preps whose reads no check on the CPU can see: an operation finds the tensor by itself, as an extension does.

The dispatcher sees the operation and the tensors it is handed, not what it reads besides, and a walk through
Python's objects ends at a weak reference as it ends at an extension's own memory. Only the kernel's own
parameters, in the captured graph, give the address away.
"""

from __future__ import annotations

import weakref
from typing import Any

import torch

from .specimens import LOCATIONS, Made, Pair, Stage, specimen

HELD: list[Any] = []


@torch.library.custom_op("gallery::look_up", mutates_args=())
def look_up(index: torch.Tensor, handle: int) -> torch.Tensor:
    """Index the tensor that stands behind a handle."""
    return HELD[handle]()[index]


@look_up.register_fake
def _(index: torch.Tensor, handle: int) -> torch.Tensor:
    return torch.empty_like(index)


@torch.library.custom_op("gallery::project", mutates_args=())
def project(rows: torch.Tensor, handle: int) -> torch.Tensor:
    """Multiply by the weights that stand behind a handle: a matrix product of cuBLAS."""
    return rows @ HELD[handle]()


@project.register_fake
def _(rows: torch.Tensor, handle: int) -> torch.Tensor:
    return torch.empty_like(rows)


def hold(stage: Stage, tensor: torch.Tensor) -> int:
    """Let the engine keep a tensor, and give the handle that an operation finds it by."""
    stage.engine.held = tensor
    HELD.append(weakref.ref(tensor))
    return len(HELD) - 1


@specimen("UNSTAGED-1", "LIFETIME-1", check="pointers", evidence=r"0x|undeclared|other", only_gpu=True)
def table_inside_an_operation(stage: Stage) -> Pair:
    handle = hold(stage, torch.arange(LOCATIONS, device=stage.device).flip(0))

    def faulty(view: Any) -> Any:
        return {"swa": look_up(view.out_cache_loc, handle)}

    def twin(view: Any) -> Any:
        return {"swa": view.tables.page_map[view.out_cache_loc]}

    outputs, reads = {"swa": "token"}, ("out_cache_loc",)
    return Pair(Made(faulty, outputs, reads), Made(twin, outputs, reads, ("page_map",)))


@specimen("LIFETIME-1", "LIFETIME-5", check="pointers", evidence=r"0x|undeclared|other", only_gpu=True)
def weights_inside_an_operation(stage: Stage) -> Pair:
    weights = torch.eye(16, device=stage.device).flip(0)
    stage.tables["weights"] = weights.clone()
    handle = hold(stage, weights)

    def rows_of(view: Any) -> torch.Tensor:
        return view.rows.to(torch.float32)[:, None].expand(-1, 16).contiguous()  # small integers: exact at any width

    def faulty(view: Any) -> Any:
        return {"projected": project(rows_of(view), handle)}

    def twin(view: Any) -> Any:
        return {"projected": rows_of(view) @ view.tables.weights}

    outputs, reads = {"projected": "request"}, ("rows",)
    return Pair(Made(faulty, outputs, reads), Made(twin, outputs, reads, ("weights",)))
