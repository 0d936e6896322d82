"""What is switched on around a call: noticed in each of its parts, and switched on again."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from contextlib import AbstractContextManager, ExitStack, nullcontext
from typing import Any

import pytest
import torch
from torch.overrides import TorchFunctionMode

from graphglue.graphs.ambient import Ambient


class Passing(TorchFunctionMode):
    """A function mode that changes nothing."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*args, **(kwargs or {}))


SWITCHED: dict[str, Callable[[], AbstractContextManager[Any]]] = {
    "nothing": nullcontext,
    "no gradients": torch.no_grad,
    "inference": torch.inference_mode,
    "autocast": lambda: torch.autocast("cpu", torch.bfloat16),
    "autocast to another dtype": lambda: torch.autocast("cpu", torch.float16),
    "a default device": lambda: torch.device("meta"),
    "another mode": Passing,
}


@pytest.mark.parametrize(("recorded", "around"), [*itertools.product(SWITCHED, SWITCHED)])
def test_each_difference_is_noticed_and_switched(recorded: str, around: str) -> None:
    with ExitStack() as stack:
        stack.enter_context(SWITCHED[recorded]())
        ambient = Ambient.here("cpu")
        assert ambient.is_on
        stack.pop_all().close()
    alike = {recorded, around} <= {"nothing", "another mode"} or recorded == around
    with SWITCHED[around]():
        assert ambient.is_on is alike
        assert (Ambient.here("cpu") == ambient) is alike
        with ambient.on():
            assert ambient.is_on or around == "a default device"  # where there was none, the CPU stands over it
            assert torch.empty(0).device.type == ("meta" if recorded == "a default device" else "cpu")
        assert ambient.is_on is alike
