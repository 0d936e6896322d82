"""What lies where, as a captured graph may address it, and which addresses need a word. Values only, no device."""

from __future__ import annotations

import enum
from bisect import bisect_right
from collections.abc import Callable, Iterable, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass

from graphglue.audit.subject import Region
from graphglue.device.allocations import Allocation, Block
from graphglue.device.nodes import Node, Word

# What these name is an address whatever it is. A kernel's parameters may hold any eight bytes.
COPIES = ("memcpy", "memset")
_BELOW_COUNT = 1 << 24  # a 32-bit field holds sizes, strides and counts below it; of addresses 1 in 256 ends like one
_LEAST_ADDRESS, _BEYOND_ADDRESSES = 1 << 16, 1 << 57  # numbers below are counts, those above no address on x86 or Arm


class Kind(str, enum.Enum):
    """Whose memory a stretch is."""

    SLOT = "slot"
    TABLE = "table"
    LIVE_SLOT = "live slot"  # the runner's own, not the twin's
    LIVE_TABLE = "live table"
    KEPT = "kept output"  # a buffer that contract.writes names
    POOL = "pool"  # made inside the recording
    MEMO = "memo"  # made while the prep warmed up, and read by operations of the recording
    SCRATCH = "scratch"  # made then too, or on the recording's stream, and no operation reads it
    OTHER = "other"
    FREED = "freed"
    HOST = "host"  # page-locked; what the driver does not know is no stretch
    DEVICE = "device"  # not of torch's allocator
    MANAGED = "managed"


@dataclass(frozen=True)
class Stretch:
    """Addresses [begin, end) of one kind.

    Attributes:
        name: the slot or table; of other memory, what it is part of.
        declared: whether the prep may use it.
    """

    begin: int
    end: int
    kind: Kind
    name: str = ""
    declared: bool = False

    def __str__(self) -> str:
        return f"{self.kind.value} {self.name}".rstrip()


Layer = Sequence[Stretch]


@dataclass(frozen=True)
class Sight:
    """An address in a node, and what it falls into; None for memory that the driver does not know."""

    node: Node
    word: Word
    stretch: Stretch | None

    @property
    def place(self) -> tuple[str, str]:
        """Where it stands in the graph."""
        return self.node.place, self.word.place

    @property
    def is_certain(self) -> bool:
        """Whether it is an address for sure, and not what a struct's unset field happened to hold."""
        return self.node.kind in COPIES

    @property
    def is_countlike(self) -> bool:
        """Whether it may be a 32-bit number whose upper four bytes are padding that holds half an address.

        The operation itself leaves that half on the stack, so each recording has it. The first address of memory that
        somebody holds is none.
        """
        begin = None if self.stretch is None or self.stretch.kind is Kind.FREED else self.stretch.begin
        return not self.is_certain and self.word.value != begin and self.word.value % (1 << 32) < _BELOW_COUNT


def classify(address: int, layers: Iterable[Layer]) -> Stretch | None:
    """Find the stretch that an address lies in; the first layer that has one wins.

    Args:
        address: any eight bytes.
        layers: each in order of address, without overlaps.
    """
    for layer in layers:
        at = bisect_right(layer, address, key=lambda stretch: stretch.begin) - 1
        if at >= 0 and address < layer[at].end:
            return layer[at]
    return None


def in_order(stretches: Iterable[Stretch]) -> list[Stretch]:
    """Sort stretches into a layer; empty ones hold no address."""
    return sorted((one for one in stretches if one.begin < one.end), key=lambda one: (one.begin, one.end))


def chart_regions(regions: Iterable[Region], reads: Callable[[Region], bool]) -> list[Stretch]:
    """Chart slots and tables, of the twin and live. A live one is never declared: the prep has a view."""
    charted = []
    for region in regions:
        kind = Kind(region.kind)
        declared = kind in (Kind.SLOT, Kind.TABLE) and reads(region)
        charted.append(Stretch(region.begin, region.end, kind, region.name, declared))
    return in_order(charted)


def chart_blocks(
    blocks: Iterable[Block], pool: tuple[int, int], before: Iterable[Block], reads: AbstractSet[int] = frozenset()
) -> list[Stretch]:
    """Chart torch's memory.

    Args:
        blocks: all blocks, while the recording is open.
        pool: the recording's own pool.
        before: all blocks before the prep warmed up.
        reads: where the memory begins that torch's operations read in the recording.
    """
    blocks = list(blocks)
    held = {(block.begin, block.end) for block in before if block.live}
    streams = {block.stream for block in blocks if block.pool == pool}
    charted = []
    for block in blocks:
        # A library's workspace is made once for each stream. A graph that made nothing does not tell its stream.
        is_near = block.stream != 0 and (block.stream in streams or not streams)
        kind = _kind_of(block, pool, (block.begin, block.end) not in held, is_near, block.begin in reads)
        charted.append(Stretch(block.begin, block.end, kind, f"block of {block.num_bytes} bytes", kind is Kind.POOL))
    return in_order(charted)


def _kind_of(block: Block, pool: tuple[int, int], is_new: bool, is_near: bool, is_read: bool) -> Kind:
    if block.pool == pool:
        return Kind.POOL
    if not block.live:
        return Kind.FREED
    if is_read:
        return Kind.MEMO if is_new else Kind.OTHER
    return Kind.SCRATCH if is_new or is_near else Kind.OTHER


def chart_owned(nodes: Iterable[Node]) -> list[Stretch]:
    """Chart the memory that the graph's own nodes allocate."""
    return in_order(Stretch(*node.owns, Kind.POOL, "of the graph", True) for node in nodes if node.owns is not None)


def sights_of(nodes: Iterable[Node], layers: Sequence[Layer], ask: Callable[[int], Allocation | None]) -> list[Sight]:
    """List all addresses of a graph with what they fall into.

    Args:
        nodes: the graph's nodes.
        layers: what is charted.
        ask: gives the allocation of an address that is not charted, if it has one.
    """
    found = []
    for node in nodes:
        for word in node.words:
            stretch = classify(word.value, layers)
            if stretch is None and _LEAST_ADDRESS <= word.value < _BEYOND_ADDRESSES:
                stretch = _beyond(ask(word.value))
            if stretch is not None or node.kind in COPIES:
                found.append(Sight(node, word, stretch))
    return found


def _beyond(allocation: Allocation | None) -> Stretch | None:
    if allocation is None:
        return None
    size = allocation.end - allocation.begin
    return Stretch(allocation.begin, allocation.end, Kind(allocation.kind), f"allocation of {size} bytes")


def strange(sights: Iterable[Sight]) -> list[Sight]:
    """Keep the addresses of memory that the prep may not use, as far as it is charted."""
    return [sight for sight in sights if sight.stretch is None or not sight.stretch.declared]


def confirmed(first: Iterable[Sight], second: Iterable[Sight]) -> list[Sight]:
    """Keep what a second recording, on a clean stack, has in the same places.

    Memory that was freed counts only at the same address: what warm-ups left in unset fields is elsewhere by then.
    """
    again = {sight.place: sight for sight in second}

    def holds(sight: Sight) -> bool:
        other = again.get(sight.place)
        if sight.is_certain or other is None:
            return sight.is_certain
        freed = any(one.stretch is not None and one.stretch.kind is Kind.FREED for one in (sight, other))
        return not freed or sight.word.value == other.word.value

    return [sight for sight in first if holds(sight)]
