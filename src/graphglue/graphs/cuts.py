"""Cuts: the real rows of what breaks are given, and the padded ones behind them, cut once for each memory."""

from __future__ import annotations

from collections.abc import Hashable

import torch


class Cuts:
    """Cut the tensors of one recording's breaks at the real rows of a replay.

    A pool hands the same memory to layer after layer, so that the breaks of many layers are given the same rows:
    tensors that a recording made for itself and that differ in nothing but their layer are one here. What is cut
    stays until a replay has other real rows.
    """

    def __init__(self) -> None:
        self._tensors: list[torch.Tensor] = []
        self._places: dict[Hashable, int] = {}
        self._rows: int | None = None
        self._heads: list[torch.Tensor | None] = []
        self._tails: list[torch.Tensor | None] = []

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

    def head(self, place: int, rows: int) -> torch.Tensor:
        """Give the real rows. Sync: none."""
        if rows != self._rows:
            self._begin(rows)
        found = self._heads[place]
        if found is None:
            found = self._heads[place] = self._tensors[place][:rows]
        return found

    def tail(self, place: int, rows: int) -> torch.Tensor:
        """Give the padded rows. Sync: none."""
        if rows != self._rows:
            self._begin(rows)
        found = self._tails[place]
        if found is None:
            found = self._tails[place] = self._tensors[place][rows:]
        return found

    def _begin(self, rows: int) -> None:
        self._rows, self._heads = rows, [None] * len(self._tensors)
        self._tails = self._heads.copy()


def _likeness(tensor: torch.Tensor) -> Hashable:
    """Give all that a break can see of a tensor but its contents."""
    storage = tensor.untyped_storage()
    memory = (storage.data_ptr(), storage.nbytes(), tensor.storage_offset(), tensor.device, tensor.dtype)
    return (*memory, tensor.shape, tensor.stride(), tensor.is_conj(), tensor.is_neg(), tensor.requires_grad)
