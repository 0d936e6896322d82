"""Preps that upload what the host holds, draw random numbers, or wait."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from .specimens import Made, Pair, Stage, both, specimen

CUDA = ("cuda",)


@specimen("HOST-FROZEN-2", "TAIL-STALE-6", check="trace", evidence=r"tensor|lift|host")
def list_upload(stage: Stage) -> Pair:
    engine, weights = stage.engine, torch.tensor([1, 2, 4, 8, 16], device=stage.device)
    stage.tables["weights"] = weights

    def faulty(view: Any) -> Any:
        made = torch.tensor([engine.scale, 2, 4, 8, 16], device=view.rows.device)
        return {"weight": made[view.rows.clamp(max=4)]}

    def twin(view: Any) -> Any:
        return {"weight": view.tables.weights[view.rows.clamp(max=4)]}

    outputs = {"weight": "request"}
    return Pair(Made(faulty, outputs, reads=("rows",)), Made(twin, outputs, reads=("rows",), tables=("weights",)))


@specimen("HOST-FROZEN-2", check="trace", evidence=r"index|getitem|host")
def index_by_list(stage: Stage) -> Pair:
    stage.tables["ahead"] = torch.tensor([1, 0], device=stage.device)

    def faulty(view: Any) -> Any:
        return {"pair": view.tables.req_to_token[view.rows][:, [1, 0]]}

    def twin(view: Any) -> Any:
        return {"pair": view.tables.req_to_token[view.rows][:, view.tables.ahead]}

    outputs, reads = {"pair": "request"}, ("rows",)
    return Pair(
        Made(faulty, outputs, reads, ("req_to_token",)),
        Made(twin, outputs, reads, ("req_to_token", "ahead")),
    )


@specimen("TAIL-STALE-6", "HOST-FROZEN-1", check="trace", evidence=r"from_numpy|host|copy|undeclared|neither")
def mirror_upload(stage: Stage) -> Pair:
    mirror = np.arange(16)

    def faulty(view: Any) -> Any:
        lengths = torch.from_numpy(mirror[: view.seq_lens.shape[0]]).to(view.seq_lens.device)
        return {"lengths": lengths + view.seq_lens}

    def twin(view: Any) -> Any:
        return {"lengths": torch.arange(view.seq_lens.shape[0], device=view.seq_lens.device) + view.seq_lens}

    return both(faulty, twin, {"lengths": "request"})


@specimen("HOST-FROZEN-1", check="trace", evidence=r"copy|host", devices=CUDA, only_gpu=True)
def made_on_the_host(stage: Stage) -> Pair:
    """On the CPU host memory and device memory are one, so only a GPU tells them apart."""

    def faulty(view: Any) -> Any:
        return {"shifted": view.seq_lens + torch.arange(view.seq_lens.shape[0]).to(view.seq_lens.device)}

    def twin(view: Any) -> Any:
        return {"shifted": view.seq_lens + torch.arange(view.seq_lens.shape[0], device=view.seq_lens.device)}

    return both(faulty, twin, {"shifted": "request"})


# Random numbers and waiting.


@specimen("RNG-1", "RNG-3", check="trace", evidence=r"rand|random")
def random_numbers(stage: Stage) -> Pair:
    def faulty(view: Any) -> Any:
        return {"jitter": torch.rand(view.seq_lens.shape[0], device=view.seq_lens.device)}

    def twin(view: Any) -> Any:  # a hash of the row's own contents
        return {"jitter": (view.seq_lens * 2654435761).remainder(1 << 20).to(torch.float32)}

    return both(faulty, twin, {"jitter": "request"})


@specimen("RNG-4", check="trace", evidence=r"randperm|random")
def own_generator(stage: Stage) -> Pair:
    generator = torch.Generator(stage.device).manual_seed(5)

    def faulty(view: Any) -> Any:
        num = view.seq_lens.shape[0]
        return {"order": torch.randperm(num, generator=generator, device=view.seq_lens.device)}

    def twin(view: Any) -> Any:
        return {"order": torch.arange(view.seq_lens.shape[0], device=view.seq_lens.device)}

    return both(faulty, twin, {"order": "request"})


@specimen("RNG-1", check="trace", evidence=r"dropout|bernoulli|random")
def dropout(stage: Stage) -> Pair:
    def faulty(view: Any) -> Any:
        return {"scores": torch.nn.functional.dropout(view.scores, p=0.5, training=True)}

    def twin(view: Any) -> Any:
        return {"scores": torch.nn.functional.dropout(view.scores, p=0.5, training=False) * 1}

    return both(faulty, twin, {"scores": "request"}, reads=("scores",))


@specimen("HOST-FROZEN-2", check="trace", evidence=r"synchron", devices=CUDA, only_gpu=True, places=False)
def waits(stage: Stage) -> Pair:
    def faulty(view: Any) -> Any:
        torch.cuda.synchronize()
        return {"positions": view.seq_lens - 1}

    def twin(view: Any) -> Any:
        return {"positions": view.seq_lens - 1}

    return both(faulty, twin, {"positions": "request"})
