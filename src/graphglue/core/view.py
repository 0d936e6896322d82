"""Views: what a prep and a forward see of one step."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch

from graphglue.core.batch import Mode
from graphglue.core.buckets import Bucket
from graphglue.core.live import Live, Showing
from graphglue.errors import ContractError


class Fields(Mapping[str, torch.Tensor]):
    """Read tensors by attribute or by name; binding another tensor to a name is refused."""

    def __init__(self, tensors: Mapping[str, torch.Tensor], reader: str) -> None:
        self.__dict__.update(tensors)
        self.__dict__["_names"] = tuple(tensors)
        self.__dict__["_reader"] = reader

    def __getitem__(self, name: str) -> torch.Tensor:
        if name in self._names:
            return self.__dict__[name]
        raise self._unknown(name)

    def __iter__(self) -> Iterator[str]:
        return iter(self._names)

    def __len__(self) -> int:
        return len(self._names)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):  # protocols probe for these (copy, pickle, arrays)
            raise AttributeError(name)
        raise self._unknown(name)

    def __setattr__(self, name: str, value: Any) -> None:
        raise ContractError(
            f"{self._reader} bound another tensor to {name!r}: captured graphs read the address it has now; "
            f"write into it instead, for example view.{name}.copy_(...)"
        )

    def _unknown(self, name: str) -> ContractError:
        return ContractError(
            f"{self._reader} read {name!r}, which it did not declare; declared are {sorted(self._names)}: correct the "
            "name, or declare it (for a prep in its contract, for a forward among the runner's slots or tables)"
        )


class View(Fields):
    """See one step's slots, at exactly the bucket's extents, and its tables.

    A prep's view has its declared reads and tables only; a forward's has all. There is no raw
    count here: one captured prep serves every raw count of its bucket.

    Args:
        slots: the slots, at the bucket's extents: [rows, ...] as ``Slot.shape`` gives them, at fixed addresses.
        tables: the tables.
        bucket: their extents.
        mode: what the step computes.
        variant: the batch's variant.
        reader: who reads it, in messages.
        meeting: how the rows of all ranks meet.
        showing: what ``live`` shows.

    Raises:
        ContractError: on reading a name that is not there, or on binding another tensor to one.

    Attributes:
        bucket: the extents of every slot.
        mode: what the step computes.
        variant: the batch's variant; part of the key.
        meeting: how the rows of all ranks meet: padding, counts, rows; None on one rank, and for a prep.
        live: the running step's real rows, for eager breaks of a forward. A slot of that name hides it.
        tables: the tables, by attribute or name.
    """

    tables: Fields
    bucket: Bucket
    mode: Mode
    variant: Any
    meeting: Any
    live: Live
    _showing: Showing  # what ``live`` shows; shared with the copies of this view

    def __init__(
        self,
        slots: Mapping[str, torch.Tensor],
        tables: Mapping[str, torch.Tensor],
        bucket: Bucket,
        mode: Mode = Mode.DECODE,
        variant: Any = None,
        reader: str = "the view's reader",
        meeting: Any = None,
        showing: Showing | None = None,
    ) -> None:
        super().__init__(slots, reader)
        self.__dict__.update(tables=Fields(tables, reader), bucket=bucket, mode=mode, variant=variant, meeting=meeting)
        self.__dict__["_showing"] = showing or Showing()

    def __getattr__(self, name: str) -> Any:
        return self._showing.get(self._reader) if name == "live" else super().__getattr__(name)

    def fresh(self) -> View:
        """Build the same view with tensor objects of its own, which its reader may reshape in place. Sync: none."""
        slots = {name: self[name].detach() for name in self}
        tables = {name: self.tables[name].detach() for name in self.tables}
        return View(slots, tables, self.bucket, self.mode, self.variant, self._reader, self.meeting, self._showing)


def showing_of(view: View) -> Showing:
    """Give what ``view.live`` shows."""
    return view._showing
