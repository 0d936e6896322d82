"""Draws: which random generators the captured code draws from, and their states kept over a capture."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch


class Draws:
    """Know the generators that preps and forwards draw from, besides the device's default one.

    Args:
        offset: gives the position of the device's default generator.
        defaults: the default generators that code of this device may draw from.
    """

    def __init__(self, offset: Callable[[], int], defaults: Iterable[torch.Generator]) -> None:
        self._offset, self._defaults = offset, tuple(defaults)
        self._passed: dict[torch.Generator, torch.Tensor] = {}  # with the state that they are put back to

    def see(self, generator: Any) -> None:
        """Take in a generator that an operation is about to draw from."""
        if generator not in self._passed and generator not in self._defaults:
            self._passed[generator] = generator.get_state()

    def position(self) -> tuple[Any, ...]:
        """Give what changes whenever a number is drawn. Sync: none."""
        return (self._offset(), *(state_of(generator) for generator in self._passed))

    @contextmanager
    def kept(self) -> Iterator[None]:
        """Put all generators back to where they stood; one that is seen inside to where it stood then. Sync: none."""
        defaults = [(generator, generator.get_state()) for generator in self._defaults]
        self._passed = {generator: generator.get_state() for generator in self._passed}
        try:
            yield
        finally:
            for generator, state in (*defaults, *self._passed.items()):
                generator.set_state(state)


def state_of(generator: torch.Generator) -> int:
    """Tell a generator's state from others."""
    return hash(generator.get_state().numpy().tobytes())
