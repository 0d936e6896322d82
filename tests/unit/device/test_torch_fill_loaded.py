"""What the torch fill says of the step it has taken in: a step that was staged is taken only where it says the same.

``test_loaded.py`` holds both fills to one contract on small sources; here is what shows on large ones only, and what is
said where there is nothing to compare.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

import graphglue as gg
from graphglue.device.base import Loaded
from graphglue.device.cpu import TorchFill

SLOTS = [
    gg.Slot("wide", "request", torch.int64, 0, inner=(1500,)),
    gg.Slot("real", "request", torch.float32, 0.0, inner=(1500,)),
    gg.Slot("maybe", "request", torch.int64, 7, missing="pad"),
]


class Taken:
    def __init__(self) -> None:
        self.arena = gg.Arena(SLOTS, [4])
        self.bucket = self.arena.space.bucket(4)
        self.fill = TorchFill(self.arena.targets(self.bucket), self.arena.device)

    def loaded(self, sources: dict[str, Any], requests: int = 2) -> Loaded | None:
        self.fill.load(self.arena.bind(sources, gg.Bucket(requests, requests, min(requests, 1)), self.bucket))
        return self.fill.loaded()


def wide(requests: int = 2) -> dict[str, Any]:
    return {
        "wide": torch.arange(requests * 1500).view(requests, 1500),
        "real": torch.linspace(0, 1, requests * 1500).view(requests, 1500),
    }


@pytest.mark.parametrize("position", [0, 749, 750, 1499, 1500, 2250, 2999])
def test_every_element_of_a_large_source_counts(position: int) -> None:
    """What a person is shown of such a tensor leaves the middle out."""
    taken = Taken()
    for name in ("wide", "real"):
        changed = wide()
        changed[name].view(-1)[position] += 1
        assert taken.loaded(changed) != taken.loaded(wide())
    assert taken.loaded(wide()) == taken.loaded(wide()) is not None


def test_numbers_inside_a_source_are_told_apart_by_their_bits() -> None:
    taken, zero, minus, nan = Taken(), wide(), wide(), wide()
    for sources, number in ((zero, 0.0), (minus, -0.0), (nan, float("nan"))):
        sources["real"][1, 700] = number
    assert taken.loaded(zero) != taken.loaded(minus)
    assert taken.loaded(nan) == taken.loaded(nan)
    assert taken.loaded(nan) != taken.loaded(zero)


def test_a_list_an_array_and_a_tensor_of_equal_values_are_one_step() -> None:
    taken, sources = Taken(), wide()
    one = taken.loaded(sources)
    assert taken.loaded({name: source.numpy().copy() for name, source in sources.items()}) == one
    assert taken.loaded({name: source.tolist() for name, source in sources.items()}) == one


def test_a_step_without_a_source_can_be_compared_too() -> None:
    """A slot that is left out is all pad, and so is every slot of an idle step: nothing of them can change unseen."""
    taken = Taken()
    assert taken.loaded(wide()) is not None
    given = {**wide(), "maybe": np.array([7, 7])}
    assert taken.loaded(given) is not None
    idle = taken.loaded({}, 0)
    assert idle is not None
    assert idle == taken.loaded({}, 0)
    assert idle != taken.loaded(wide())


def test_a_slot_that_is_its_own_source_can_not_be_compared() -> None:
    """The engine may write it in place, which leaves no trace."""
    taken = Taken()
    own = taken.arena.view(taken.bucket)["wide"][:2]
    assert taken.loaded({**wide(), "wide": own}) is None
