"""The memory that exists on a device: torch's blocks, and what the driver knows besides them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from graphglue.device.kernel import checked


@dataclass(frozen=True)
class Block:
    """A block of torch's allocator, [begin, end).

    Attributes:
        pool: the id of its memory pool; (0, 0) is the common one.
        stream: the stream that it was allocated on.
        num_bytes: what was asked for; a block is rounded up.
        live: whether somebody holds it.
    """

    begin: int
    end: int
    pool: tuple[int, int]
    stream: int
    num_bytes: int
    live: bool


@dataclass(frozen=True)
class Allocation:
    """Memory that the driver knows, [begin, end); ``kind`` is device, host or managed."""

    begin: int
    end: int
    kind: str


def torch_blocks(device: torch.device) -> list[Block]:
    """List all blocks of torch's allocator on a device, in order. Sync: none."""
    return sorted(
        (block for segment in _segments() if segment["device"] == device.index for block in _blocks(segment)),
        key=lambda block: block.begin,
    )


def _segments() -> list[dict[str, Any]]:
    try:  # without the history of allocations, which may be long
        return torch.cuda.memory_snapshot(include_traces=False)
    except TypeError:
        return torch.cuda.memory_snapshot()


def _blocks(segment: dict[str, Any]) -> list[Block]:
    pool = tuple(segment.get("segment_pool_id", (0, 0)))
    found, begin = [], segment["address"]
    for block in segment["blocks"]:
        begin = block.get("address", begin)
        end = begin + block["size"]
        asked = block.get("requested_size", block["size"])
        found.append(Block(begin, end, pool, segment["stream"], asked, block["state"] == "active_allocated"))
        begin = end
    return found


def driver_allocation(address: int) -> Allocation | None:
    """Ask the driver for the allocation that an address lies in; None if it is no address of its. Sync: none."""
    from cuda.bindings import driver

    ask, attribute = driver.cuPointerGetAttribute, driver.CUpointer_attribute
    failed, kind = ask(attribute.CU_POINTER_ATTRIBUTE_MEMORY_TYPE, address)
    if int(failed) == int(driver.CUresult.CUDA_ERROR_INVALID_VALUE):
        return None
    checked((failed, kind))
    begin = checked(ask(attribute.CU_POINTER_ATTRIBUTE_RANGE_START_ADDR, address))
    size = checked(ask(attribute.CU_POINTER_ATTRIBUTE_RANGE_SIZE, address))
    managed = checked(ask(attribute.CU_POINTER_ATTRIBUTE_IS_MANAGED, address))
    on_host = int(kind) == int(driver.CUmemorytype.CU_MEMORYTYPE_HOST)
    return Allocation(int(begin), int(begin) + int(size), "managed" if managed else "host" if on_host else "device")
