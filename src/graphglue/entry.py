"""An entry: where one key of a cache stands, and whether its recording computes what it returns."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch

from graphglue.core import trees
from graphglue.core.contract import PrepContract
from graphglue.core.routing import State
from graphglue.core.slots import Axis
from graphglue.graphs.base import Recording


@dataclass(slots=True)
class Entry:
    """Where one key stands. ``result`` is static: its addresses never change while graphs read it."""

    state: State = State.COLD
    args: tuple[Any, ...] = ()
    result: Any = None
    has_result: bool = False
    recording: Recording | None = None
    cause: str | None = None
    persistent: dict[str, int] = field(default_factory=dict)  # leaves the prep returns as they are: their addresses
    capture_seconds: float = 0.0
    num_bytes: int = 0
    live: dict[str, Any] = field(default_factory=dict)  # the last values of what contract.live names
    breaks: tuple[str, ...] = ()  # the eager breaks that it reached while it warmed up


def not_computed(recording: Recording, entry: Entry, contract: PrepContract | None, memoised: set[int]) -> str | None:
    """Name a leaf that no recorded operation computes: replays would return what it held at capture.

    A persistent buffer or a constant that the prep returns as it is, is fine where it is not declared
    to have a row for each token or request; what it memoised of the
    slots when it warmed up, or computed in another thread, is not.

    Args:
        recording: what was recorded.
        entry: the key's; persistent buffers among its leaves are noted there.
        contract: what the prep declares.
        memoised: addresses of what warm-ups computed from slots, and somebody kept until it was recorded.
    """
    # An engine's own recorder may not look at what it records.
    computes: Any = getattr(recording, "computes", lambda leaf: None)
    reads: set[int] = getattr(recording, "reads", set())
    advice = "compute it anew in every call, or make it before the runner is captured and write into it in place"
    if reads & memoised:
        return (
            "what was recorded reads memory that a warm-up computed from slots, "
            f"a memoised result or a cache that each call replaces; {advice}"
        )
    named = trees.named_leaves(recording.outputs)
    warmed = trees.flatten(entry.result)[0] if entry.has_result else [None] * len(named)
    for (name, leaf), before in zip(named, warmed):
        if not isinstance(leaf, torch.Tensor) or leaf.numel() == 0:
            continue
        storage, computed = leaf.untyped_storage().data_ptr(), computes(leaf)
        if computed or (computed is None and storage not in memoised):
            continue
        kept = isinstance(before, torch.Tensor) and storage == before.untyped_storage().data_ptr()
        rows = contract is not None and contract.outputs.get(name, Axis.FIXED) is not Axis.FIXED
        if rows or storage in memoised or (entry.has_result and not kept):
            what = f"leaf {name!r} is not computed by what was recorded: it was memoised, or made by another thread"
            return f"{what}; {advice}"
        if kept:
            entry.persistent[name] = leaf.data_ptr()
    return None
