"""Generated preps that are correct: seeded compositions of row-wise operations over slots and tables.

Everything here is host-free and independent of padding by construction. An audit that fails one of them
raises a false alarm. The same seed gives the same prep.
"""

from __future__ import annotations

import random
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch

import graphglue as gg

from .operations import BOOL, CONTEXT, FLOAT, INTEGER, LOCATIONS, ROWS, Value, changes, joined


class Scene(NamedTuple):
    """What a generated prep runs on."""

    slots: list[gg.Slot]
    tables: dict[str, torch.Tensor]
    width: int
    ragged: bool
    ladder: list[int]


def scene(rng: random.Random, device: torch.device) -> Scene:
    """Draw slots, tables, ladder and width."""
    int_dtype = rng.choice([torch.int64, torch.int32])
    listed = [
        gg.Slot("indptr", axis="offset", dtype=rng.choice([torch.int64, torch.int32]), pad=gg.REPEAT_LAST),
        gg.Slot("num_real", axis="fixed", dtype=torch.int64, pad=0, value=gg.RAW_REQUESTS),
        gg.Slot("num_tokens", axis="fixed", dtype=torch.int64, pad=0, value=gg.RAW_TOKENS),
        gg.Slot("seq_lens", axis="request", dtype=int_dtype, pad=rng.choice([0, 1, 7]), valid=(1, CONTEXT)),
        gg.Slot("rows", axis="request", dtype=torch.int64, pad=0, index_of="req_to_token"),
        gg.Slot("locations", axis="token", dtype=int_dtype, pad=0, valid=(0, LOCATIONS - 1)),
        gg.Slot("scores", axis="request", dtype=torch.float32, pad=rng.choice([0.0, 1.5]), valid=(0, 4)),
        gg.Slot("flags", axis="token", dtype=torch.bool, pad=False),
        gg.Slot("window", axis="fixed", dtype=torch.int64, pad=2, inner=(1,), valid=(1, CONTEXT)),
        gg.Slot("rope", axis="token", dtype=torch.int64, pad=0, inner=(3,), row_dim=rng.choice([0, 1]), valid=(0, 50)),
    ]
    must = listed[:3]
    chosen = must + rng.sample(listed[3:], rng.randint(2, len(listed) - 3))
    locations = torch.arange(ROWS * CONTEXT, device=device).mul(7).remainder(LOCATIONS).view(ROWS, CONTEXT)
    tables = {
        "req_to_token": locations.to(rng.choice([torch.int64, torch.int32])),
        "page_map": torch.arange(LOCATIONS, device=device).flip(0).to(rng.choice([torch.int64, torch.int32])),
        "scales": torch.arange(LOCATIONS, device=device).to(torch.float32) / 4,
    }
    ladder = sorted(rng.sample(range(1, 7), rng.randint(1, 2)))
    return Scene(rng.sample(chosen, len(chosen)), tables, rng.choice([1, 1, 2, 3]), rng.random() < 0.3, ladder)


def read(slot: gg.Slot) -> Value:
    """Begin with a slot, rows on the first dimension."""
    kind = BOOL if slot.dtype == torch.bool else FLOAT if slot.dtype.is_floating_point else INTEGER
    axis = "fixed" if slot.axis.value == "fixed" else slot.axis.value
    inner = slot.inner[0] if slot.inner and axis != "fixed" else 0
    return Value(axis, kind, inner, slot.name, lambda view: view[slot.name].movedim(slot.row_dim, 0))


@dataclass
class Composed:
    """A generated prep: a callable object, as backends have them, with state that nothing is computed from."""

    leaves: list[Value]
    nested: bool
    num_runs: int = 0
    shapes: dict[Any, int] = field(default_factory=dict)

    def __call__(self, view: Any) -> Any:
        """Compute the metadata."""
        self.num_runs += 1
        self.shapes[view.bucket] = self.shapes.get(view.bucket, 0) + 1
        computed = [leaf.compute(view) for leaf in self.leaves]
        if not self.nested:
            return {f"m{i}": leaf for i, leaf in enumerate(computed)}
        return {"first": computed[0], "rest": tuple(computed[1:]), "mode": view.mode.value, "none": None}

    def forget(self) -> None:
        """Change the host state: nothing that is computed depends on it."""
        self.num_runs += 17
        self.shapes.clear()

    def outputs(self, rng: random.Random) -> Mapping[str, str]:
        """Declare most of the leaves."""
        spell = (lambda i: f"rest.{i - 1}" if i else "first") if self.nested else (lambda i: f"m{i}")
        return {spell(i): leaf.axis for i, leaf in enumerate(self.leaves) if i == 0 or rng.random() < 0.8}


def leaf(chosen: Scene, rng: random.Random) -> Value:
    """Draw one leaf: a slot, some operations on it, and perhaps another one of its axis."""
    value = read(rng.choice(chosen.slots))
    for _ in range(rng.randint(0, 5)):
        value = rng.choice(changes(value, rng))
    others = [read(slot) for slot in chosen.slots]
    fitting = [other for other in others if other.axis == value.axis and other.kind != FLOAT]
    if fitting and value.kind != FLOAT and rng.random() < 0.4:
        value = joined(value, rng.choice(fitting), rng)
    return value


def prep(seed: int, device: torch.device | str = "cpu") -> tuple[gg.Runner, Composed]:
    """Build the runner of a seed's prep; nothing is captured."""
    rng, device = random.Random(seed), torch.device(device)
    chosen = scene(rng, device)
    composed = Composed([leaf(chosen, rng) for _ in range(rng.randint(1, 4))], rng.random() < 0.3)
    contract = gg.PrepContract(
        name="generated",
        reads={slot.name: slot.pad for slot in chosen.slots},
        tables=tuple(chosen.tables),
        outputs=composed.outputs(rng),
        modes=frozenset(rng.choice([{gg.Mode.DECODE}, {gg.Mode.DECODE, gg.Mode.VERIFY}])),
        padded=rng.random() < 0.9,
        ragged=chosen.ragged,
        idle=rng.choice(["eager", "eager", "glue"]),
    )
    registry = gg.Registry()
    registry.register(contract)(composed)
    runner = gg.Runner(
        slots=chosen.slots,
        ladder=chosen.ladder,
        prep="generated",
        registry=registry,
        tables=chosen.tables,
        device=device,
        tokens_per_request=chosen.width,
    )
    return runner, composed
