"""Tensors and the memory they lie in: placed by hand, found by address, noted while it is made."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode


@contextmanager
def plain() -> Iterator[None]:
    """Allocate normal tensors: outside inference mode, without gradients."""
    with torch.inference_mode(False), torch.no_grad():
        yield


def place(storage: torch.UntypedStorage, like: torch.Tensor) -> torch.Tensor:
    """Make a tensor on ``storage`` with the dtype and geometry of ``like``, and no other tie to it."""
    tensor = torch.empty(0, dtype=like.dtype, device=like.device)
    tensor.set_(storage, like.storage_offset(), like.size(), like.stride())
    tensor = tensor.conj() if like.is_conj() else tensor
    return torch._neg_view(tensor) if like.is_neg() else tensor


class _Noting(TorchDispatchMode):
    """Note the memory that operations compute from some other memory, by address."""

    def __init__(self, sources: set[int]) -> None:
        super().__init__()
        self._sources = sources
        self.derived: set[int] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        given = addresses((args, kwargs))
        if given & (self._sources | self.derived):
            written = given if func._schema.is_mutable else set()
            self.derived |= (addresses(result) | written) - self._sources
        return result


@contextmanager
def noted_storages(sources: set[int] | None) -> Iterator[set[int]]:
    """Collect the addresses of storages that operations inside compute from ``sources``; none where that is None."""
    if sources is None:
        yield set()
        return
    with _Noting(sources) as noting:
        yield noting.derived


def addresses(tree: Any) -> set[int]:
    """Give the addresses of the storages of a tree's tensors."""
    leaves = pytree.tree_leaves(tree)
    strided = (leaf for leaf in leaves if isinstance(leaf, torch.Tensor) and leaf.layout is torch.strided)
    return {leaf.untyped_storage().data_ptr() for leaf in strided}
