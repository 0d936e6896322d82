"""What an eager break sees of the running step beyond its bucket: the real rows."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch

from graphglue.core.buckets import Bucket
from graphglue.errors import ContractError


class Live(Mapping[str, torch.Tensor]):
    """Show one step's real rows to eager breaks: slots by attribute or name, cut to the real extents.

    Attributes:
        raw: the real extents; those of the bucket while a forward warms up or is recorded.
        metadata: what the preps returned in this step, the leaves that ``PrepContract.live`` names among it.
    """

    __slots__ = ("_slots", "metadata", "raw")

    def __init__(self, slots: Mapping[str, torch.Tensor], raw: Bucket, metadata: Any) -> None:
        self._slots, self.raw, self.metadata = slots, raw, metadata

    def beside(self, metadata: Any) -> Live:
        """Give the same rows beside another step's metadata."""
        return Live(self._slots, self.raw, metadata)

    def __getitem__(self, name: str) -> torch.Tensor:
        if name in self._slots:
            return self._slots[name]
        raise ContractError(f"an eager break read {name!r}, which is no slot; slots are {sorted(self._slots)}")

    def __getattr__(self, name: str) -> torch.Tensor:
        if name.startswith("_"):  # protocols probe for these (copy, pickle, arrays)
            raise AttributeError(name)
        return self[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._slots)

    def __len__(self) -> int:
        return len(self._slots)


class Showing:
    """Hold what ``view.live`` shows; a view and its copies share one."""

    __slots__ = ("live",)

    def __init__(self) -> None:
        self.live: Live | None = None

    def get(self, reader: str) -> Live:
        """Give what is shown.

        Raises:
            ContractError: nothing is: ``live`` is for eager breaks, and what is captured must not read it.
        """
        if self.live is None:
            raise ContractError(
                f"{reader} read view.live outside an eager break: real rows change from step to step, so what is "
                "captured must not depend on them; read it in a function marked with eager_break"
            )
        return self.live

    @contextmanager
    def on(self, live: Live | None) -> Iterator[None]:
        """Show something for a while."""
        before, self.live = self.live, live
        try:
            yield
        finally:
            self.live = before
