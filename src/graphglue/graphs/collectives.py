"""Collectives on the tape: operations of a process group, which finish behind the call that starts them.

Both families are recorded: ``c10d`` (``torch.distributed.all_reduce`` and its kin, which write into their
arguments, though their schema does not say so) and ``_c10d_functional``. While recording none of them runs,
so no rank waits for another; a replay runs each and waits for it. On CUDA the capture records what the
backend launches, and nothing here is needed.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.utils import _pytree as pytree

_IN_PLACE, _FUNCTIONAL = "c10d", "_c10d_functional"


def is_in_place(func: Any) -> bool:
    """Tell whether an operation is one of ``torch.distributed``'s own, which write into their first argument."""
    return func.namespace == _IN_PLACE


def started(func: Any, args: tuple[Any, ...]) -> Any:
    """Give what such an operation returns once it has started: its first argument, and a work that is done."""
    from torch._C._distributed_c10d import FakeWork

    work = FakeWork().boxed()
    return (args[0], work) if len(func._schema.returns) > 1 else work


def finished(func: Any, result: Any) -> Any:
    """Wait until what an operation started has ended; return its result."""
    if func.namespace == _IN_PLACE:
        work = result[-1] if isinstance(result, tuple) else result
        work.wait()
    elif func.namespace == _FUNCTIONAL and func._schema.name != f"{_FUNCTIONAL}::wait_tensor":
        for leaf in pytree.tree_leaves(result):
            torch.ops._c10d_functional.wait_tensor(leaf)
    return result


def is_collective(func: Any) -> bool:
    """Tell whether an operation meets other processes."""
    return func.namespace in (_IN_PLACE, _FUNCTIONAL)
