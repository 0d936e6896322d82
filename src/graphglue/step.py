"""What a replay returns."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from graphglue.core import trees
from graphglue.core.buckets import Bucket
from graphglue.core.routing import Decision
from graphglue.core.slots import Axis
from graphglue.core.view import View
from graphglue.errors import ConfigError, ContractError


@dataclass(slots=True)
class Step:
    """Hold one step's results. Valid until the next replay of the same runner; metadata only until a step is staged.

    Runners of one memory pool (``CaptureHooks(pool=)``) lie on top of each other: a replay keeps the results of runners
    captured before its own, and may overwrite those of runners captured after it. ``RunnerConfig(clone_outputs=True)``
    gives copies that nobody overwrites.

    Steps share the tensors: a view of one may be reshaped in place (``squeeze_``), and the tensor itself may not.

    Attributes:
        outputs: what the forward returned, narrowed to the real rows; None without a forward.
        metadata: what the prep returned, at the bucket's extent; by prep name where several run.
        decision: where the step went, and why.
        raw: the real extents.
        reads: the events behind ``sources_read`` and ``tables_read``; None where none are recorded.
    """

    outputs: Any
    metadata: Any
    decision: Decision
    raw: Bucket
    reads: Any = None

    def sources_read(self) -> Any:
        """Give the event behind the fill: from then on this step's device sources may be overwritten.

        A ``torch.cuda.Event`` (wait, query, synchronize), recorded anew by the next replay. Sync: none.

        Raises:
            ConfigError: the runner was not asked for events.
        """
        return self._checked_reads().sources

    def tables_read(self) -> Any:
        """Give the event behind the last reader of a table: from then on tables may be overwritten. Sync: none.

        Raises:
            ConfigError: the runner was not asked for events.
        """
        return self._checked_reads().tables

    def _checked_reads(self) -> Any:
        if self.reads is None:
            raise ConfigError("this runner records no events; pass RunnerConfig(events=True)")
        return self.reads


@dataclass(slots=True)
class Prepared:
    """Hold one prepared step of an engine that owns its forward. Valid until the next step.

    Attributes:
        view: all slots at ``decision.bucket``, filled, and the tables.
        metadata: what the prep returned, at the bucket's extent; by prep name where several run.
        decision: where the prep went, and why.
        raw: the real extents.
    """

    view: View
    metadata: Any
    decision: Decision
    raw: Bucket


class Outputs:
    """Narrow a forward's outputs to the real rows.

    Args:
        tree: what the forward returned.
        axes: leaf -> token, request, offset, fixed or bucket (not narrowed); one name for all
            leaves; None for tokens on dim 0 of every tensor.
        bucket: the extents it ran at.

    Raises:
        ContractError: a leaf without a declared axis, or with other rows than its axis has.
    """

    __slots__ = ("_axes", "_leaves", "_structure")

    def __init__(self, tree: Any, axes: Mapping[str, str] | str | None, bucket: Bucket) -> None:
        named = trees.named_leaves(tree)
        self._leaves, self._structure = trees.flatten(tree)
        known = {name for name, _ in named}
        if isinstance(axes, Mapping) and (unknown := sorted(set(axes) - known)):
            raise ContractError(
                f"output_axes names {unknown}, which the forward does not return; it returns {sorted(known)}"
            )
        self._axes = [_axis_of(name, leaf, axes, bucket) for name, leaf in named]

    def real(self, raw: Bucket) -> Any:
        """Cut every leaf to the real rows; views, no copies."""
        cut = [
            leaf.detach()
            if axis is None and isinstance(leaf, torch.Tensor)
            else leaf
            if axis is None
            else leaf[: trees.ROWS[axis](raw.requests, raw.tokens)]
            for leaf, axis in zip(self._leaves, self._axes)
        ]
        return trees.unflatten(cut, self._structure)


def checked_axes(axes: Any) -> dict[str, str] | str | None:
    """Check ``output_axes`` as given to a runner.

    Raises:
        ContractError: an unknown axis.
    """
    if axes is None:
        return None
    named = {"": axes} if isinstance(axes, str) else dict(axes)
    known = (*trees.ROWS, Axis.FIXED.value, "bucket")
    for name, axis in named.items():
        if str(getattr(axis, "value", axis)) not in known:
            leaf = name or "every leaf"
            raise ContractError(f"output_axes names axis {axis!r} for {leaf!r}; expected one of {list(known)}")
    cleaned = {str(name): str(getattr(axis, "value", axis)) for name, axis in named.items()}
    return cleaned[""] if isinstance(axes, str) else cleaned


def _axis_of(name: str, leaf: Any, axes: Mapping[str, str] | str | None, bucket: Bucket) -> str | None:
    """Find a leaf's row axis; None for a leaf that is not narrowed."""
    if not isinstance(leaf, torch.Tensor):
        return None
    axis = "token" if axes is None else axes if isinstance(axes, str) else axes.get(name)
    if axis is None:
        raise ContractError(f"output_axes has no entry for the forward's output {name!r}; add one")
    if axis in (Axis.FIXED.value, "bucket"):
        return None
    rows = trees.ROWS[axis](bucket.requests, bucket.tokens)
    if leaf.dim() == 0 or leaf.shape[0] != rows:
        raise ContractError(
            f"the forward's output {f'{name!r} ' if name else ''}has shape {tuple(leaf.shape)}, but output_axes "
            f"{'(by default) ' if axes is None else ''}says dim 0 is {axis}, {rows} rows at {bucket}; "
            "pass output_axes to the Runner: leaf -> token, request, fixed or bucket"
        )
    return axis
