"""Cuts: the real rows of what breaks are given, and the padded ones behind them, cut once for each memory."""

from __future__ import annotations

from collections.abc import Hashable

import torch


class Cuts:
    """Cut the tensors of one recording's breaks at the real rows of a replay.

    A pool hands the same memory to layer after layer, so that the breaks of many layers are given the same rows:
    tensors that a recording made for itself and that differ in nothing but their layer are one here. What is cut
    stays until a replay has other real rows.

    Attributes:
        heads: the real rows of each place, as ``cut`` was last asked for.
    """

    def __init__(self) -> None:
        self._tensors: list[torch.Tensor] = []
        self._places: dict[Hashable, int] = {}
        self._rows: int | None = None
        self.heads: list[torch.Tensor] = []
        self._tails: list[torch.Tensor | None] = []
        self._together: dict[Hashable, list[torch.Tensor]] = {}

    def place(self, tensor: torch.Tensor, is_alias: bool) -> int:
        """Take in a tensor, and give what ``head`` and ``tail`` call it.

        Args:
            tensor: of at least one dimension.
            is_alias: the recording made it; what is the caller's own may be changed by him, and stays by itself.
        """
        key = _likeness(tensor) if is_alias else len(self._tensors)
        if key not in self._places:
            self._places[key] = len(self._tensors)
            self._tensors.append(tensor)
            self._rows = None
        return self._places[key]

    def whole(self, place: int) -> torch.Tensor:
        """Give all rows."""
        return self._tensors[place]

    def cut(self, rows: int) -> list[torch.Tensor]:
        """Cut all there is; give the real rows of each place. Sync: none."""
        if rows != self._rows:
            self._rows, self.heads = rows, [tensor[:rows] for tensor in self._tensors]
            self._tails, self._together = [None] * len(self._tensors), {}
        return self.heads

    def head(self, place: int, rows: int) -> torch.Tensor:
        """Give the real rows. Sync: none."""
        return self.cut(rows)[place]

    def tail(self, place: int, rows: int) -> torch.Tensor:
        """Give the padded rows. Sync: none."""
        self.cut(rows)
        found = self._tails[place]
        if found is None:
            found = self._tails[place] = self._tensors[place][rows:]
        return found

    def tails(self, places: tuple[int, ...], rows: int) -> list[torch.Tensor]:
        """Give the padded rows of several places, the same list to all who ask for these. Sync: none."""
        self.cut(rows)
        found = self._together.get(places)
        if found is None:
            found = self._together[places] = [self.tail(place, rows) for place in places]
        return found


def _likeness(tensor: torch.Tensor) -> Hashable:
    """Give all that a break can see of a tensor but its contents."""
    storage = tensor.untyped_storage()
    memory = (storage.data_ptr(), storage.nbytes(), tensor.storage_offset(), tensor.device, tensor.dtype)
    return (*memory, tensor.shape, tensor.stride(), tensor.is_conj(), tensor.is_neg(), tensor.requires_grad)
