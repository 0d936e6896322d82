"""Preps that read a tensor on the host: what was read while recording would stay for ever.

The correct twin keeps the value on the device.
"""

from __future__ import annotations

import concurrent.futures
import ctypes
from typing import Any

import numpy as np
import torch

from .specimens import Pair, Stage, both, columns, specimen

CPU = ("cpu",)


@specimen("HOST-FROZEN-1", check="trace", evidence=r"item|_local_scalar_dense")
def item(stage: Stage) -> Pair:
    def faulty(view: Any) -> Any:
        limit = view.setting.item()
        return {"capped": view.seq_lens.clamp(max=limit)}

    def twin(view: Any) -> Any:
        return {"capped": torch.minimum(view.seq_lens, view.setting)}

    return both(faulty, twin, {"capped": "request"}, reads=("seq_lens", "setting"))


@specimen("HOST-FROZEN-1", check="trace", evidence="tolist")
def to_list(stage: Stage) -> Pair:
    def faulty(view: Any) -> Any:
        positions = [length - 1 for length in view.seq_lens.tolist()]
        return {"positions": torch.full_like(view.seq_lens, positions[0])}

    def twin(view: Any) -> Any:
        return {"positions": view.seq_lens - 1}

    return both(faulty, twin, {"positions": "request"})


@specimen("HOST-FROZEN-1", "PLAN-STALE-5", check="trace", evidence="cpu")
def to_cpu(stage: Stage) -> Pair:
    def faulty(view: Any) -> Any:
        host = view.setting.cpu()
        return {"shifted": view.seq_lens + host.to(view.seq_lens.device)}

    def twin(view: Any) -> Any:
        return {"shifted": view.seq_lens + view.setting}

    return both(faulty, twin, {"shifted": "request"}, reads=("seq_lens", "setting"))


@specimen("HOST-FROZEN-1", check="trace", evidence="numpy")
def to_numpy(stage: Stage) -> Pair:
    def faulty(view: Any) -> Any:
        longest = int(view.setting.numpy(force=True).max())
        return {"capped": view.seq_lens.clamp(max=longest)}

    def twin(view: Any) -> Any:
        return {"capped": torch.minimum(view.seq_lens, view.setting)}

    return both(faulty, twin, {"capped": "request"}, reads=("seq_lens", "setting"))


@specimen("HOST-FROZEN-6", "HOST-FROZEN-9", check="trace", evidence=r"bool|is_nonzero|_local_scalar_dense")
def branch_on_contents(stage: Stage) -> Pair:
    def faulty(view: Any) -> Any:
        if (view.setting > 3).any():
            return {"positions": view.seq_lens - 1}
        return {"positions": view.seq_lens.clone()}

    def twin(view: Any) -> Any:
        return {"positions": torch.where(view.setting > 3, view.seq_lens - 1, view.seq_lens)}

    return both(faulty, twin, {"positions": "request"}, reads=("seq_lens", "setting"))


@specimen("HOST-FROZEN-3", check="trace", evidence=r"int|index|_local_scalar_dense|item")
def loop_to_a_tensor(stage: Stage) -> Pair:
    def faulty(view: Any) -> Any:
        total = torch.zeros_like(view.seq_lens)
        for segment in range(int(view.setting)):
            total += segment
        return {"total": total + view.seq_lens}

    def twin(view: Any) -> Any:
        segments = torch.arange(8, device=view.seq_lens.device)
        total = torch.where(segments < view.setting, segments, 0).sum()
        return {"total": total + view.seq_lens}

    return both(faulty, twin, {"total": "request"}, reads=("seq_lens", "setting"))


@specimen("HOST-FROZEN-1", check="trace", evidence=r"repr|format|str|tolist|_local_scalar_dense|item")
def printed(stage: Stage) -> Pair:
    lines: list[str] = []

    def faulty(view: Any) -> Any:
        lines[:] = [f"lengths are {view.seq_lens}"]
        return {"positions": view.seq_lens - 1}

    def twin(view: Any) -> Any:
        lines[:] = [f"lengths have shape {tuple(view.seq_lens.shape)}"]
        return {"positions": view.seq_lens - 1}

    return both(faulty, twin, {"positions": "request"})


@specimen("HOST-FROZEN-1", check="trace", evidence=r"bool|is_nonzero|_local_scalar_dense")
def asserted(stage: Stage) -> Pair:
    def faulty(view: Any) -> Any:
        assert (view.seq_lens > 0).all(), "an empty request"
        return {"positions": view.seq_lens - 1}

    def twin(view: Any) -> Any:
        assert view.seq_lens.dim() == 1
        return {"positions": view.seq_lens - 1}

    return both(faulty, twin, {"positions": "request"})


@specimen("HOST-FROZEN-4", check="trace", evidence=r"item|_local_scalar_dense")
def swallowed_read(stage: Stage) -> Pair:
    """A refusal that the prep catches is still a refusal."""

    def faulty(view: Any) -> Any:
        try:
            bound = int(view.seq_lens[0].item())
        except Exception:
            bound = 8
        return {"capped": view.seq_lens.clamp(max=bound)}

    def twin(view: Any) -> Any:
        return {"capped": view.seq_lens.clamp(max=8)}

    return both(faulty, twin, {"capped": "request"})


@specimen("HOST-FROZEN-6", check="trace", evidence=r"equal")
def compared_on_the_host(stage: Stage) -> Pair:
    def faulty(view: Any) -> Any:
        same = torch.equal(view.seq_lens, view.rows)
        return {"same": torch.full_like(view.seq_lens, int(same))}

    def twin(view: Any) -> Any:
        return {"same": (view.seq_lens == view.rows).to(torch.int64)}

    return both(faulty, twin, {"same": "request"}, reads=("seq_lens", "rows"))


@specimen("HOST-FROZEN-4", check="trace", evidence=r"item|_local_scalar_dense|arange")
def extent_from_contents(stage: Stage) -> Pair:
    def faulty(view: Any) -> Any:
        window = torch.arange(view.seq_lens.max(), device=view.seq_lens.device)
        return {"inside": (window[None] < view.seq_lens[:, None]).sum(1)}

    def twin(view: Any) -> Any:
        return {"inside": (columns(view)[None] < view.seq_lens[:, None]).sum(1)}

    return both(faulty, twin, {"inside": "request"})


# By ways around torch's functions.


@specimen("HOST-FROZEN-1", check="trace", evidence=r"numpy|array|dlpack", devices=CPU)
def as_an_array(stage: Stage) -> Pair:
    def faulty(view: Any) -> Any:
        return {"capped": view.seq_lens.clamp(max=int(np.asarray(view.setting).max()))}

    def twin(view: Any) -> Any:
        return {"capped": torch.minimum(view.seq_lens, view.setting)}

    return both(faulty, twin, {"capped": "request"}, reads=("seq_lens", "setting"))


@specimen("HOST-FROZEN-1", check="same_ops", evidence=r"scalar|differ|clamp", places=True, devices=CPU)
def bytes_of_the_storage(stage: Stage) -> Pair:
    """Neither a function nor an operation of torch is called, so only what it leads to shows."""

    def faulty(view: Any) -> Any:
        return {"capped": view.seq_lens.clamp(max=view.setting.untyped_storage()[0])}

    def twin(view: Any) -> Any:
        return {"capped": torch.minimum(view.seq_lens, view.setting)}

    return both(faulty, twin, {"capped": "request"}, reads=("seq_lens", "setting"))


@specimen("HOST-FROZEN-1", check="trace", evidence=r"data_ptr|address", devices=CPU)
def by_its_address(stage: Stage) -> Pair:
    def faulty(view: Any) -> Any:
        limit = ctypes.c_int64.from_address(view.setting.data_ptr()).value
        return {"capped": view.seq_lens.clamp(max=limit)}

    def twin(view: Any) -> Any:
        return {"capped": torch.minimum(view.seq_lens, view.setting)}

    return both(faulty, twin, {"capped": "request"}, reads=("seq_lens", "setting"))


@specimen("HOST-FROZEN-1", "PLAN-STALE-5", check="same_ops", evidence=r"scalar|differ|clamp", devices=CPU)
def in_another_thread(stage: Stage) -> Pair:
    """A planner's thread stands under none of the modes that watch the prep."""
    pool = concurrent.futures.ThreadPoolExecutor(1)

    def faulty(view: Any) -> Any:
        limit = pool.submit(lambda: int(view.setting.sum().item())).result()
        return {"capped": view.seq_lens.clamp(max=limit)}

    def twin(view: Any) -> Any:
        return {"capped": torch.minimum(view.seq_lens, view.setting)}

    return both(faulty, twin, {"capped": "request"}, reads=("seq_lens", "setting"))
