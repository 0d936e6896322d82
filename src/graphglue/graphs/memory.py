"""Tensors and the memory they lie in: placed by hand, found by address, noted while it is made."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator
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


class Derived(TorchDispatchMode):
    """Note the tensors that operations compute from some memory, as long as somebody keeps them.

    Args:
        sources: addresses of storages; what is computed from them, and from that, is noted.
        draws: told each random generator that an operation is about to draw from.
    """

    def __init__(self, sources: set[int], draws: Callable[[Any], None] | None = None) -> None:
        super().__init__()
        self._draws = draws
        self._sources, self._seen = sources, set(sources)
        self._made: set[int] = set()  # what was there before is the engine's own state, however it is written
        self._noted: list[weakref.ref[torch.Tensor]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if self._draws is not None and kwargs and (generator := kwargs.get("generator")) is not None:
            self._draws(generator)
        result = func(*args, **(kwargs or {}))
        given = (args, kwargs)
        fresh = addresses(result) - addresses(given)
        self._seen -= fresh  # new memory: what was seen at this address before has been freed
        self._made |= fresh
        if addresses(given) & self._seen and not ignores_values(func):
            for tensor in _tensors((result, given) if func._schema.is_mutable else result):
                address = tensor.untyped_storage().data_ptr()
                if address in self._made:
                    self._seen.add(address)
                    self._noted.append(weakref.ref(tensor))
        return result

    def kept(self) -> list[torch.Tensor]:
        """Give what was noted and is still alive, the sources left out."""
        alive = [tensor for ref in self._noted if (tensor := ref()) is not None]
        return [tensor for tensor in alive if not addresses(tensor) & self._sources]


def ignores_values(func: Any) -> bool:
    """Tell whether an operation takes only the geometry of its arguments."""
    name = func._schema.name.removeprefix("aten::")
    return name.startswith(("new_", "empty_like", "zeros_like", "ones_like", "full_like"))


def _tensors(tree: Any) -> list[torch.Tensor]:
    leaves = pytree.tree_leaves(tree)
    return [leaf for leaf in leaves if isinstance(leaf, torch.Tensor) and leaf.layout is torch.strided]


def addresses(tree: Any) -> set[int]:
    """Give the addresses of the storages of a tree's tensors."""
    return {tensor.untyped_storage().data_ptr() for tensor in _tensors(tree)}
