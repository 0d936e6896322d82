"""Steps that a fill takes in, on any device: what a caller may hand in, held against the reference byte for byte.

Shared by the tests that run the fill kernel's packing on the CPU and by those that run the kernel on a GPU.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch

import graphglue as gg
from graphglue.core.binding import Write
from graphglue.device.fill import fill_slots
from graphglue.device.kernel_fill import KernelFill


class Place(NamedTuple):
    """Where device sources live: on a GPU, or in CPU memory that says it is on one.

    ``put(tensor, offset)`` copies a tensor there, at an element offset in larger memory; ``alias(tensor)``
    shows a tensor that is there already.
    """

    put: Callable[..., torch.Tensor]
    alias: Callable[[torch.Tensor], torch.Tensor]


def bytes_under(tensor: torch.Tensor) -> torch.Tensor:
    """Show all of the memory that a tensor lies in, guard bytes and gaps included, as bytes."""
    with torch.inference_mode(False):
        return torch.empty(0, dtype=torch.uint8, device=tensor.device).set_(tensor.untyped_storage())


class Memory:
    """Save, restore and compare all of the memory that some tensors lie in."""

    def __init__(self, tensors: Iterable[torch.Tensor]) -> None:
        self._tensors = [tensor for tensor in tensors if tensor.numel()]
        self.parts = list(
            {tensor.untyped_storage().data_ptr(): bytes_under(tensor) for tensor in self._tensors}.values()
        )

    def scramble(self, seed: int) -> None:
        """Overwrite everything with garbage; a bool stays 0 or 1, because torch's copies make it so."""
        rng = np.random.default_rng(seed)
        for part in self.parts:
            part.copy_(torch.from_numpy(rng.integers(0, 256, part.numel(), dtype=np.uint8)))
        for tensor in self._tensors:
            if tensor.dtype == torch.bool:
                tensor.copy_(torch.from_numpy(rng.integers(0, 2, tuple(tensor.shape)).astype(np.bool_)))

    def save(self) -> list[torch.Tensor]:
        """Copy the contents."""
        return [part.clone() for part in self.parts]

    def restore(self, saved: Sequence[torch.Tensor]) -> None:
        """Put contents back."""
        for part, contents in zip(self.parts, saved):
            part.copy_(contents)


def assert_same_memory(seen: Sequence[torch.Tensor], expected: Sequence[torch.Tensor], after: str) -> None:
    """Compare saved memory byte for byte."""
    assert len(seen) == len(expected)
    for part, (one, other) in enumerate(zip(seen, expected)):
        wrong = (one != other).nonzero().flatten().tolist()
        assert not wrong, f"after {after}: memory {part} differs at bytes {wrong[:16]}, {len(wrong)} in all"


def settle_nans(targets: Iterable[torch.Tensor]) -> None:
    """Make every NaN the same one: torch's own kernels give converted NaNs different payloads."""
    for target in targets:
        if target.dtype in (torch.float16, torch.bfloat16, torch.float32, torch.float64):
            target.masked_fill_(target.isnan(), math.nan)


def fill_reference(writes: Sequence[Write], targets: dict[str, torch.Tensor]) -> None:
    """Fill by the torch reference."""
    with torch.no_grad():
        fill_slots(writes, targets)


def own_views(arena: gg.Arena, raw: gg.Bucket, bucket: gg.Bucket) -> dict[str, torch.Tensor]:
    """Give every slot's own rows."""
    views = {}
    for slot in arena.slots.values():
        target = arena.targets(bucket)[slot.name]
        fixed = slot.axis == "fixed"
        views[slot.name] = target if fixed else target.narrow(slot.row_dim, 0, slot.rows(*raw[:2], arena.num_ranks))
    return views


class Lane:
    """Take steps in as the runner does: one that is like the last one is not bound again."""

    def __init__(self, arena: gg.Arena, fill: KernelFill, raw: gg.Bucket, bucket: gg.Bucket, place: Place) -> None:
        self.arena, self.fill, self.raw, self.bucket, self.place = arena, fill, raw, bucket, place
        self.targets = arena.targets(bucket)
        self.known: Any = None

    def take(self, sources: Any) -> bool:
        """Take a step in; tell whether it went the fast way."""
        if self.known is not None and self.known(sources):
            return True
        writes = self.arena.bind(sources, self.raw, self.bucket)
        self.fill.load(writes)
        self.known = self.fill.remember(writes, sources)
        return False

    def run(self) -> None:
        """Launch what was taken in."""
        self.arena.device.enter_step()
        self.fill.run()


def step_and_compare(lane: Lane, sources: dict[str, Any]) -> bool | None:
    """Take a step in and run it: refused where binding refuses it, else right.

    Host sources are overwritten between the two, which a caller may do as soon as a replay has returned.

    Returns:
        Whether it went the fast way; None where it was refused.
    """
    memory = Memory(lane.targets.values())
    before = memory.save()
    try:
        writes = lane.arena.bind(sources, lane.raw, lane.bucket)
    except gg.BindError:
        with pytest.raises(gg.BindError):
            lane.take(sources)
        assert_same_memory(memory.save(), before, f"the refused {sources}")
        return None
    fill_reference(writes, lane.targets)
    converted = [lane.targets[name] for name, source in sources.items() if _differs(source, lane.targets[name])]
    settle_nans(converted)
    expected = memory.save()
    memory.restore(before)
    fast = lane.take(sources)
    for source in sources.values():
        overwrite(source)
    lane.run()
    settle_nans(converted)
    assert_same_memory(memory.save(), expected, f"{'fast' if fast else 'slow'} {sources}")
    return fast


def overwrite(source: Any) -> None:
    """Reuse the buffer of a host source."""
    if isinstance(source, np.ndarray) and source.flags.writeable:
        source.fill(1)
    elif isinstance(source, torch.Tensor) and source.is_cpu and source.layout is torch.strided:
        with torch.no_grad():
            source.fill_(1)


def _differs(source: Any, target: torch.Tensor) -> bool:
    return str(getattr(source, "dtype", "")).removeprefix("torch.") != str(target.dtype).removeprefix("torch.")


FAST_SLOTS = (
    gg.Slot("ids", "request", torch.int64, 1),
    gg.Slot("loc", "request", torch.int32, -1, inner=(3,)),
    gg.Slot("hidden", "request", torch.float32, 0.5, inner=(2,), row_dim=1),
    gg.Slot("start", "offset", torch.int32, gg.REPEAT_LAST),
    gg.Slot("maybe", "request", torch.int16, 4, missing="pad"),
    gg.Slot("n", "fixed", torch.int32, 0, inner=(1,), value=gg.RAW_REQUESTS),
)
_OTHER = {"ids": "loc", "loc": "ids", "hidden": "ids", "start": "loc", "maybe": "start"}


def sources_of(raw: int, start: int, make: Callable[[torch.Tensor], Any]) -> dict[str, Any]:
    """Give one step's sources for ``FAST_SLOTS``, all of one kind."""
    return {
        "ids": make(torch.arange(start, start + raw)),
        "loc": make(torch.arange(start, start + 3 * raw, dtype=torch.int32).view(raw, 3)),
        "hidden": make(torch.arange(start, start + 2 * raw).view(2, raw) / 4),
        "start": make(torch.arange(start, start + raw + 1, dtype=torch.int32)),
        "maybe": make(torch.arange(start, start + raw, dtype=torch.int16)),
    }


def kinds_at(place: Place) -> dict[str, Callable[[torch.Tensor], Any]]:
    """Name the ways to hand in a tensor."""
    return {
        "device": place.put,
        "device at an offset": lambda tensor: place.put(tensor, 1),
        "array": lambda tensor: tensor.clone().numpy(),
        "host": torch.clone,
        "list": torch.Tensor.tolist,
    }


# What a caller may hand in next, in the place of the last step's source.

Change = Callable[[torch.Tensor, str, Lane], Any]

CHANGES: dict[str, Change] = {
    "another address": lambda source, name, lane: lane.place.put(source, 2),
    "on the host": lambda source, name, lane: source.clone(),
    "an array": lambda source, name, lane: source.clone().numpy(),
    "a list": lambda source, name, lane: source.tolist(),
    "a narrower dtype": lambda source, name, lane: lane.place.put(source.to(_NARROW[source.dtype])),
    "a narrower host dtype": lambda source, name, lane: source.to(_NARROW[source.dtype]),
    "a wider dtype": lambda source, name, lane: lane.place.put(source.to(_WIDE[source.dtype])),
    "one row more": lambda source, name, lane: lane.place.put(torch.cat([source, source[:1]])),
    "one row less": lambda source, name, lane: lane.place.put(source[:-1]),
    "one array row more": lambda source, name, lane: torch.cat([source, source[:1]]).numpy(),
    "one host row less": lambda source, name, lane: source[:-1].clone(),
    "one dimension more": lambda source, name, lane: lane.place.put(source[None]),
    "flat": lambda source, name, lane: lane.place.put(source.reshape(-1)),
    "other extents": lambda source, name, lane: lane.place.put(source.reshape(source.shape[::-1])),
    "strided": lambda source, name, lane: lane.place.put(torch.stack([source] * 2, -1))[..., 0],
    "strided in an array": lambda source, name, lane: torch.stack([source] * 2, -1).numpy()[..., 0],
    "reversed": lambda source, name, lane: source.numpy()[::-1],
    "big-endian": lambda source, name, lane: source.numpy().astype(source.numpy().dtype.newbyteorder()),
    "read-only": lambda source, name, lane: _read_only(source.clone().numpy()),
    "a subclass of array": lambda source, name, lane: source.clone().numpy().view(np.ma.MaskedArray),
    "a parameter": lambda source, name, lane: torch.nn.Parameter(source.clone(), requires_grad=False),
    "a device parameter": lambda source, name, lane: torch.nn.Parameter(lane.place.put(source), requires_grad=False),
    "requires grad": lambda source, name, lane: source.clone().requires_grad_(),
    "a device source that requires grad": lambda source, name, lane: lane.place.put(source).requires_grad_(),
    "negative view": lambda source, name, lane: torch._neg_view(source.clone()),
    "negative view on the device": lambda source, name, lane: torch._neg_view(lane.place.put(source)),
    "its own view": lambda source, name, lane: _own(lane, name),
    "another slot's view": lambda source, name, lane: _own(lane, _OTHER[name]),
    "its own view, one element on": lambda source, name, lane: _shifted(lane, name, source),
    "None": lambda source, name, lane: None,
    "left out": lambda source, name, lane: ...,
    "a number": lambda source, name, lane: 3,
    "another kind": lambda source, name, lane: lane.place.put(source != 0),
    "sparse": lambda source, name, lane: source.to_sparse(),
}
_NARROW = {
    torch.int64: torch.int32, torch.int32: torch.int16, torch.int16: torch.int8, torch.float32: torch.bfloat16,
}  # fmt: skip
_WIDE = {
    torch.int64: torch.uint64, torch.int32: torch.int64, torch.int16: torch.int32, torch.float32: torch.float64,
}  # fmt: skip


def _read_only(array: np.ndarray) -> np.ndarray:
    array.flags.writeable = False
    return array


def _own(lane: Lane, name: str) -> torch.Tensor:
    return lane.place.alias(own_views(lane.arena, lane.raw, lane.bucket)[name])


def _shifted(lane: Lane, name: str, source: torch.Tensor) -> torch.Tensor:
    """Give rows of the slot's memory that are not its first; the first where all rows are real."""
    flat = lane.targets[name].view(-1)
    start = min(1, flat.numel() - source.numel())
    return lane.place.alias(flat[start : start + source.numel()].view(source.shape))


def changed(sources: dict[str, Any], name: str, change: str, lane: Lane, start: int) -> dict[str, Any]:
    """Change one source of a step; where this kind of source can not be changed so, leave it."""
    plain = sources_of(lane.raw.requests, start, torch.clone)[name]
    if change == "requires grad" and not plain.is_floating_point():
        return sources
    if change == "a device source that requires grad" and not plain.is_floating_point():
        return sources
    made = CHANGES[change](plain, name, lane)
    rest = {other: source for other, source in sources.items() if other != name}
    return rest if made is ... else {**rest, name: made}
