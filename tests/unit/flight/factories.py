"""Factories for ``graphglue rerun``: runners like the recorded one, and runners that are not."""

from __future__ import annotations

from typing import Any

import torch

import graphglue as gg
from tests.ranks.threads import Exchange, group_of

SLOTS = [
    gg.Slot("x", axis="request", dtype=torch.int64, pad=0),
    gg.Slot("h", axis="token", dtype=torch.float32, pad=0.0, missing="pad"),
]
CONTRACT = gg.PrepContract(
    name="meta", reads={"x": 0}, outputs={"m": "request"}, modes={gg.Mode.DECODE}, ragged=True, features={"known"}
)
table = torch.arange(50) * 3


def meta(view: Any) -> dict[str, torch.Tensor]:
    return {"m": table[view.x] + 1}


def model(view: Any, metadata: Any) -> dict[str, torch.Tensor]:
    scale = 2.0 if view.variant == "lora" else 1.0
    return {"ids": metadata["m"].sum() + torch.arange(view.h.shape[0]), "h": view.h * scale + 0.1}


def make(prep: Any = meta, forward: Any = model, **more: Any) -> gg.Runner:
    registry = gg.Registry()
    registry.register(CONTRACT)(prep)
    given = {
        "slots": SLOTS, "ladder": [4], "registry": registry, "prep": "meta", "forward": forward,
        "variants": (None, "lora"), "tokens_per_request": 2, **more,
    }  # fmt: skip
    return gg.Runner(**given)


def recording(**config: Any) -> gg.Runner:
    return make(config=gg.RunnerConfig(flight_recorder=32, record_sources=True, **config))


def plain() -> gg.Runner:
    return make()


def captured() -> tuple[gg.Runner, None]:
    runner = make()
    runner.capture(progress=False)
    return runner, None


def frozen() -> gg.Runner:
    """A prep whose number is baked at capture: what it replays is not what it computes."""
    calls = [0]

    def prep(view: Any) -> dict[str, torch.Tensor]:
        calls[0] += 1
        return {"m": meta(view)["m"] + (calls[0] > 1)}

    return make(prep)


def other_integers() -> gg.Runner:
    return make(lambda view: {"m": meta(view)["m"] * 2})


def other_floats() -> gg.Runner:
    return make(forward=lambda view, metadata: {**model(view, metadata), "h": view.h * 1.0000001 + 0.1})


def raising() -> gg.Runner:
    def forward(view: Any, metadata: Any) -> Any:
        raise LookupError("no kernel")

    return make(forward=forward)


def unhappy() -> gg.Runner:
    raise OSError("no weights")


def no_runner() -> object:
    return object()


def no_lora() -> gg.Runner:
    return make(variants=(None,))


def ranked() -> gg.Runner:
    group = group_of(Exchange(1), 0, gg.ranks.Planner([4], width=2), timeout_s=5)
    return make(ranks=group)
