"""The footprint of each key: capture seconds, and bytes by graph, memory pool and outputs."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

from graphglue.cache import GlueGraphCache
from graphglue.core import trees
from graphglue.core.keys import Key
from graphglue.core.routing import State
from graphglue.device.base import Device
from graphglue.entry import Entry
from graphglue.graphs.segments import SegmentedRecording


class Footprints:
    """Weigh the recording of each key by what the driver has left before and after.

    The driver hands memory out in steps of 2 MiB, so one key of several may stand for all; and memory that another
    thread or process takes meanwhile counts as this key's. The sum over the keys is what to go by.

    Args:
        device: the device; one that counts no memory weighs nothing.
    """

    def __init__(self, device: Device) -> None:
        self._device = device
        self._driver_bytes: dict[Key, int] = {}

    @contextmanager
    def weighing(self, key: Key) -> Iterator[None]:
        """Weigh what is recorded and composed for a key inside. Sync: none."""
        before = self._device.free_bytes()
        yield
        after = self._device.free_bytes()
        if before is not None and after is not None:
            self._driver_bytes[key] = max(0, before - after)

    def of(self, key: Key, entries: Iterable[Entry]) -> dict[str, int | None]:
        """Give a key's bytes, JSON-ready; None where nobody counts them.

        ``pool_bytes`` are those that the allocator reserved for it: in a shared pool the largest key carries them, and
        they come back with the pool's last graph only. ``exec_bytes`` are what the driver took besides: the graphs,
        composed and apart. ``outputs_bytes`` lie within the pool. ``freed_bytes`` are what dropping this key alone
        gives back.
        """
        captured = [entry for entry in entries if entry.state is State.CAPTURED]
        pool = sum(entry.num_bytes for entry in captured)
        driver = self._driver_bytes.get(key) if captured else None
        graphs = None if driver is None else max(0, driver - pool)
        shares_pool = self._device.torch_device.type != "cpu"  # each recording of the tape has memory of its own
        return {
            "pool_bytes": pool,
            "driver_bytes": driver,
            "exec_bytes": graphs,
            "outputs_bytes": _num_bytes([entry.result for entry in captured]),
            "freed_bytes": (graphs or 0) if shares_pool else pool,
        }


def key_stats(key: Key, caches: Iterable[GlueGraphCache], footprints: Footprints, steps: int) -> dict[str, Any]:
    """Give what is known of a key, JSON-ready; ``steps`` replayed it."""
    entries = {cache.name: cache.entry(key) for cache in caches}
    memory = footprints.of(key, entries.values())
    return {
        "mode": key.mode.value,
        "bucket": list(key.bucket),
        "variant": repr(key.variant),
        "padding": getattr(key.padding, "value", key.padding),
        "steps": steps,
        "states": {name: entry.state.value for name, entry in entries.items()},
        "causes": {name: entry.cause for name, entry in entries.items() if entry.cause},
        "capture_seconds": sum(entry.capture_seconds for entry in entries.values()),
        "num_bytes": memory["pool_bytes"],
        "memory": memory,
        "segments": [part for entry in entries.values() for part in _segment_stats(entry.recording)],
    }


def _num_bytes(tree: Any) -> int:
    """Sum the bytes of a tree's tensors, each piece of memory once."""
    tensors = [leaf for leaf in trees.flatten(tree)[0] if isinstance(leaf, torch.Tensor)]
    return sum({tensor.data_ptr(): tensor.numel() * tensor.element_size() for tensor in tensors}.values())


def _segment_stats(recording: Any) -> list[dict[str, Any]]:
    """Give each segment's memory, and the break that ends it; the last one ends the forward."""
    if not isinstance(recording, SegmentedRecording):
        return []
    return [
        {"break": name, "num_bytes": num_bytes}
        for name, num_bytes in zip((*recording.breaks, None), recording.segment_bytes)
    ]
