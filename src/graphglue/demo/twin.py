"""The eager twin of a glued step, and the comparison of the two, bit for bit.

The twin shares nothing with graphglue but the decision's bucket: it builds its tensors from scratch
with plain torch, has KV caches and sampled tokens of its own, and calls the same prep and the same
model functions from the host.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from graphglue.core.buckets import Bucket
from graphglue.core.slots import Slot

Fault = Callable[[int, dict[str, Tensor], int], None]  # (step, the twin's filled tensors, real requests)
Outputs = Mapping[str, Tensor]
SAME_SIZE_INTEGER = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


class EagerTwin:
    """Run a step with fresh tensors and eager calls.

    Args:
        prep: the function that the runner captured.
        forward: ``forward(view, metadata)``, over caches of the twin's own.
        slots: names, axes, dtypes and pads of the inputs, in the order they are filled.
        req_to_token: the engine's table, only read.
    """

    def __init__(
        self,
        prep: Callable[[Any], Outputs],
        forward: Callable[[Any, Any], Outputs],
        slots: Sequence[Slot],
        req_to_token: Tensor,
    ) -> None:
        self._prep, self._forward, self._slots = prep, forward, slots
        self._tables = SimpleNamespace(req_to_token=req_to_token)

    def step(
        self, bucket: Bucket, raw: Bucket, sources: Mapping[str, Any], fault: Callable[..., None] | None
    ) -> tuple[Outputs, Outputs]:
        """Run prep and forward at the bucket's shapes, and give metadata and outputs, pad rows included.

        Args:
            bucket: the padded extents, or the real ones for an unpadded step.
            raw: the real ones.
            sources: slot name -> its real values.
            fault: called with the filled tensors and the real requests, to break them on purpose.

        Sync: the forward's.
        """
        real = {slot.name: slot.rows(raw.requests, raw.tokens) for slot in self._slots}
        tensors = {slot.name: self._filled(slot, bucket, real[slot.name], sources) for slot in self._slots}
        if fault is not None:
            fault(tensors, raw.requests)
        live = SimpleNamespace(**{name: tensor[: real[name]] for name, tensor in tensors.items()})
        view = SimpleNamespace(**tensors, tables=self._tables, bucket=bucket, live=live)
        metadata = self._prep(view)
        return metadata, self._forward(view, metadata)

    def _filled(self, slot: Slot, bucket: Bucket, num_real: int, sources: Mapping[str, Any]) -> Tensor:
        num_rows = slot.rows(bucket.requests, bucket.tokens)
        pad: Any = slot.pad  # a number: the demo has no cumulative slot
        filled = torch.full((num_rows,), pad, dtype=slot.dtype, device=self._tables.req_to_token.device)
        if num_real:
            filled[:num_real].copy_(torch.as_tensor(sources[slot.name]), non_blocking=True)
        return filled


@dataclass(frozen=True)
class Difference:
    """One tensor of one step that is not what its twin is; ``row`` is None where shapes differ."""

    step: int
    name: str
    row: int | None
    glued: str
    expected: str


def compare(step: int, glued: Mapping[str, Tensor], expected: Mapping[str, Tensor]) -> Iterator[Difference]:
    """Find every tensor that differs in name, dtype, shape or any bit. Sync: the device.

    Args:
        step: the step's number, for the report.
        glued: name -> tensor, from the replay.
        expected: name -> tensor, from the twin.
    """
    for name in sorted({*glued, *expected}):
        one, other = glued.get(name), expected.get(name)
        if one is None or other is None or (one.dtype, one.shape) != (other.dtype, other.shape):
            yield Difference(step, name, None, _geometry(one), _geometry(other))
            continue
        ours, theirs = _bits(one), _bits(other)
        if not torch.equal(ours, theirs):
            row = int((ours != theirs).any(dim=1).nonzero()[0])
            yield Difference(step, name, row, *(_spell(torch.atleast_1d(each)[row]) for each in (one, other)))


def _bits(tensor: Tensor) -> Tensor:
    """Show a tensor's bits as integers [rows, elements], so that NaN equals NaN and 0.0 is not -0.0."""
    num_rows = tensor.shape[0] if tensor.dim() else 1
    rows = tensor.detach().contiguous().reshape(num_rows, prod(tensor.shape[1:]))
    return rows.view(SAME_SIZE_INTEGER[tensor.element_size()])


def _geometry(tensor: Tensor | None) -> str:
    return "nothing" if tensor is None else f"{tensor.dtype} {tuple(tensor.shape)}"


def _spell(row: Tensor, max_elements: int = 8) -> str:
    elements = row.flatten().tolist()
    more = ", ..." if len(elements) > max_elements else ""
    return ", ".join(map(str, elements[:max_elements])) + more
