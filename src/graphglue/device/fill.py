"""The fill: write a step's sources into the slots, and reset every tail.

This is the reference in torch operations: one copy per head, one write per tail.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from graphglue.core.binding import Write
from graphglue.core.slots import REPEAT_LAST, Axis


def fill_slots(writes: Sequence[Write], targets: Mapping[str, torch.Tensor], non_blocking: bool = False) -> None:
    """Fill each slot: rows [0, raw) from the source, rows [raw, rows) from the pad.

    Args:
        writes: one per slot, all checked.
        targets: slot name -> the slot at the bucket's extent; rows stand at the slot's row_dim.
        non_blocking: host sources are pinned, so their copies need not be waited for.

    Sync: none for device and pinned sources. Capturable: no.
    """
    for write in writes:
        target = targets[write.slot.name]
        if write.slot.axis is Axis.FIXED:
            _write_head(target, write.source if write.raw else write.pad, non_blocking)
            continue
        dim = write.slot.row_dim
        if write.raw:
            _write_head(target.narrow(dim, 0, write.raw), write.source, non_blocking)
        if write.raw < write.rows:
            _write_tail(target, dim, write)


def _write_head(head: torch.Tensor, source: Any, non_blocking: bool) -> None:
    if isinstance(source, torch.Tensor):
        head.copy_(source, non_blocking=non_blocking)
    elif source is not None:
        head.fill_(source)


def _write_tail(target: torch.Tensor, dim: int, write: Write) -> None:
    tail = target.narrow(dim, write.raw, write.rows - write.raw)
    if write.pad is not REPEAT_LAST:
        tail.fill_(write.pad)
    elif write.raw:
        tail.copy_(target.narrow(dim, write.raw - 1, 1).expand_as(tail))
    else:
        tail.zero_()
