"""Collectives that this process starts, counted by the process groups themselves."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch.distributed as dist

logger = logging.getLogger("graphglue")


def collectives_started() -> dict[str, int]:
    """Count what each process group of several ranks has started, eagerly or into a graph. Sync: none.

    An operation of a group shows here however it was called, from compiled code too; kernels that reach other
    devices by themselves do not.
    """
    if not (dist.is_available() and dist.is_initialized()):
        return {}
    groups: list[Any] = [group for group in list(dist.distributed_c10d._world.pg_map) if dist.get_world_size(group) > 1]
    return {group.group_name: sum(_number(group, device) for device in group._device_types) for group in groups}


def _number(group: Any, device: Any) -> int:
    try:
        return int(group._get_backend(device)._get_sequence_number_for_group())
    except (RuntimeError, AttributeError):  # a backend that does not count
        return 0


class Others:
    """Notice that a forward meets other processes, and say so where nothing keeps these in one bucket.

    Attributes:
        met: the process groups that it used.
    """

    def __init__(self) -> None:
        self.met: set[str] = set()

    @contextmanager
    def watched(self) -> Iterator[None]:
        """Watch a real run; what another thread starts meanwhile is taken for the forward's."""
        before = collectives_started()
        yield
        self.met |= {name for name, count in collectives_started().items() if count != before.get(name)}

    def warn(self) -> None:
        """Log that a runner without ranks picks its buckets alone."""
        if self.met:
            logger.warning(
                "the forward meets other processes (process groups %s), and this runner has no ranks: it picks its "
                "buckets alone. Ranks with batches of their own then replay different graphs, and hang; give it "
                "ranks=RankGroup(...). Where all of them have one batch (tensor parallelism) all is well",
                sorted(self.met),
            )
