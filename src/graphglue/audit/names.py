"""Names for memory: the tensor that lies at an address, and where a prep's author finds it."""

from __future__ import annotations

import gc
from collections.abc import Callable
from contextlib import suppress
from typing import Any, NamedTuple

import torch

from graphglue.audit import holdings


class Named(NamedTuple):
    """A tensor, and where it was found; empty where nothing that the prep reaches holds it."""

    name: str
    tensor: torch.Tensor


class Names:
    """Find tensors by address: first those that a prep reaches, then all that Python knows.

    Args:
        prep: the callable.
    """

    def __init__(self, prep: Callable[..., Any]) -> None:
        self._prep = prep

    def at(self, address: int) -> Named | None:
        """Give the first tensor in whose storage an address lies. Nothing is remembered: tensors come and go."""
        for name, tensor in holdings.reachable(self._prep)[0].items():
            if covers(tensor, address):
                return Named(name, tensor)
        alive = (thing for thing in gc.get_objects() if issubclass(type(thing), torch.Tensor))
        return next((Named("", tensor) for tensor in alive if covers(tensor, address)), None)


def covers(tensor: torch.Tensor, address: int) -> bool:
    """Tell whether an address lies in a tensor's storage."""
    with suppress(Exception):  # fake, sparse and wrapped tensors have no memory of their own
        storage = tensor.untyped_storage()
        return storage.data_ptr() <= address < storage.data_ptr() + storage.nbytes()
    return False
