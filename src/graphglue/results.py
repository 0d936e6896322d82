"""Results: who owns what a prep returned, and how a fresh one gets to where graphs read."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from graphglue.core import trees
from graphglue.core.view import View


def owned(result: Any, args: tuple[Any, ...]) -> Any:
    """Copy leaves that lie in a slot or table: each key owns its result, and the fallback writes into it."""
    borrowed = storages_of(args)

    def own(tensor: torch.Tensor) -> torch.Tensor:
        # An expanded leaf has one element for many, which the fallback could not write.
        repeated = any(stride == 0 and extent > 1 for extent, stride in zip(tensor.shape, tensor.stride()))
        shared = tensor.untyped_storage().data_ptr() in borrowed
        return tensor.clone(memory_format=torch.contiguous_format) if repeated or shared else tensor

    return trees.map_tensors(own, result)


def moved(persistent: Mapping[str, int], fresh: Any) -> str | None:
    """Name a buffer that the prep returns as it is and that was replaced: the old one is not ours to write."""
    if not persistent:
        return None
    leaves = dict(trees.named_leaves(fresh))
    for name, address in persistent.items():
        if leaves[name].data_ptr() != address:
            return f"leaf {name!r} is another buffer than the captured one"
    return None


def storages_of(args: tuple[Any, ...]) -> set[int]:
    return {tensor.untyped_storage().data_ptr() for arg in args for tensor in _tensors_of(arg)}


def _tensors_of(arg: Any) -> list[torch.Tensor]:
    if isinstance(arg, View):
        return [*(arg[name] for name in arg), *(arg.tables[name] for name in arg.tables)]
    if not isinstance(arg, torch.Tensor) and hasattr(arg, "__dict__"):
        arg = vars(arg)
    leaves = trees.flatten(arg)[0]
    return [leaf for leaf in leaves if isinstance(leaf, torch.Tensor)]


def copy_into(static: Any, fresh: Any) -> None:
    # Inside inference mode, because a static tensor captured there refuses writes from outside it.
    with torch.inference_mode():
        for target, source in zip(trees.flatten(static)[0], trees.flatten(fresh)[0]):
            if isinstance(target, torch.Tensor) and target is not source:
                target.copy_(source)
