"""The nodes of a captured graph and the addresses that they carry, whatever launched them.

A kernel's parameters lie in the node as bytes. Their layout comes from the driver, so a Triton kernel, one that
was launched through cuda-python and one of cuBLAS are read alike. What the addresses point at is not read.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from graphglue.device.kernel import checked
from graphglue.errors import GraphGlueError

WORD_BYTES = 8  # an address, at the alignment that compilers give it
# cuLaunchKernel's ``extra``: pairs of a tag and a pointer, up to the end. Source: cuda.h, CU_LAUNCH_PARAM_*.
_EXTRA_END, _EXTRA_BUFFER, _EXTRA_SIZE = 0, 1, 2
_MAX_EXTRA_PAIRS = 8


class Word(NamedTuple):
    """Eight bytes that may be an address, and where in the node they stand."""

    value: int
    place: str


@dataclass(frozen=True)
class Node:
    """One node of a graph.

    Attributes:
        kind: the driver's name of its kind, such as "kernel", "memcpy" or "host".
        place: its position; inside child graphs those of the children before it, as in "3.0".
        name: of a kernel, what it is called.
        words: what may be an address in it.
        owns: the address range that it allocates, [begin, end).
        unread: why nothing could be read from it; empty if all was.
    """

    kind: str
    place: str
    name: str = ""
    words: tuple[Word, ...] = ()
    owns: tuple[int, int] | None = None
    unread: str = ""


def nodes_of(graph: torch.cuda.CUDAGraph) -> list[Node]:
    """List the nodes of a graph that was captured with ``keep_graph=True``, child graphs' nodes among them.

    Sync: none.
    """
    return read_graph(graph.raw_cuda_graph())


def read_graph(handle: int) -> list[Node]:
    """List the nodes of a ``CUgraph`` by its handle. Sync: none."""
    from cuda.bindings import driver

    return list(_Walk(driver).nodes(driver.CUgraph(int(handle)), ""))


def words_in(raw: bytes, what: str) -> list[Word]:
    """Cut a parameter into the words that may be addresses. Bytes that fill no word can not be one."""
    return [
        Word(int.from_bytes(raw[at : at + WORD_BYTES], "little"), f"{what}, byte {at}" if at else what)
        for at in range(0, len(raw) - WORD_BYTES + 1, WORD_BYTES)
    ]


class _Walk:
    """Read nodes through the driver, and remember the layouts of the kernels that were seen."""

    def __init__(self, driver: Any) -> None:
        self._driver = driver
        self._layouts: dict[int, list[tuple[int, int]]] = {}
        self._readers: dict[str, Callable[[Any, str, str], Node]] = {
            "kernel": self._kernel,
            "memcpy": self._memcpy,
            "memset": self._memset,
            "mem_alloc": self._alloc,
        }

    def nodes(self, graph: Any, above: str) -> Iterator[Node]:
        """Read the nodes of a graph and of its child graphs, each with its place below ``above``."""
        for number, handle in enumerate(self._handles(graph)):
            place, kind = f"{above}{number}", self._kind(handle)
            if kind == "graph":
                yield from self.nodes(checked(self._driver.cuGraphChildGraphNodeGetGraph(handle)), f"{place}.")
                continue
            read = self._readers.get(kind, lambda _, kind, place: Node(kind, place))
            try:
                yield read(handle, kind, place)
            except (GraphGlueError, ValueError) as error:  # the bindings refuse values newer than they are
                yield Node(kind, place, unread=str(error))

    def _handles(self, graph: Any) -> list[Any]:
        _, count = checked(self._driver.cuGraphGetNodes(graph, 0))
        return list(checked(self._driver.cuGraphGetNodes(graph, count))[0])[:count] if count else []

    def _kind(self, handle: Any) -> str:
        try:
            kind = int(checked(self._driver.cuGraphNodeGetType(handle)))
            return self._driver.CUgraphNodeType(kind).name.removeprefix("CU_GRAPH_NODE_TYPE_").lower()
        except ValueError as error:
            return f"new kind ({error})"

    def _kernel(self, handle: Any, kind: str, place: str) -> Node:
        params = checked(self._driver.cuGraphKernelNodeGetParams(handle))
        name = self._kernel_name(params)
        layout = self._layout(params)
        raw = _parameters(params, layout)
        if raw is None:
            return Node(kind, place, name, unread="the layout of its parameters is not known")
        words = [word for index, value in enumerate(raw) for word in words_in(value, f"parameter {index}")]
        return Node(kind, place, name, tuple(words))

    def _kernel_name(self, params: Any) -> str:
        driver = self._driver
        for ask, handle in ((driver.cuFuncGetName, params.func), (driver.cuKernelGetName, params.kern)):
            if int(handle):
                failed, name = ask(handle)
                if not int(failed):
                    return name.decode(errors="replace")
        return f"a kernel without a name ({int(params.func) or int(params.kern):#x})"

    def _layout(self, params: Any) -> list[tuple[int, int]]:
        """List offset and size of each parameter; the driver says where they end by refusing the next index."""
        driver = self._driver
        own = bool(int(params.func))
        ask, handle = (driver.cuFuncGetParamInfo, params.func) if own else (driver.cuKernelGetParamInfo, params.kern)
        known = self._layouts.get(int(handle))
        if known is not None:
            return known
        found: list[tuple[int, int]] = []
        while True:
            failed, *place = ask(handle, len(found))
            if int(failed) == int(driver.CUresult.CUDA_ERROR_INVALID_VALUE):
                break
            checked((failed, *place))
            found.append((int(place[0]), int(place[1])))
        self._layouts[int(handle)] = found
        return found

    def _memcpy(self, handle: Any, kind: str, place: str) -> Node:
        params = checked(self._driver.cuGraphMemcpyNodeGetParams(handle))
        ends = [self._end(params, side, what) for side, what in (("src", "source"), ("dst", "destination"))]
        if None in ends:
            return Node(kind, place, unread="it copies from or to an array, whose memory has no address")
        return Node(kind, place, words=tuple(word for word in ends if word is not None))

    def _end(self, params: Any, side: str, what: str) -> Word | None:
        types = self._driver.CUmemorytype
        kind = getattr(params, f"{side}MemoryType")
        if kind == types.CU_MEMORYTYPE_ARRAY:
            return None
        address = getattr(params, f"{side}Host" if kind == types.CU_MEMORYTYPE_HOST else f"{side}Device")
        return Word(int(address) + int(getattr(params, f"{side}XInBytes")), what)

    def _memset(self, handle: Any, kind: str, place: str) -> Node:
        params = checked(self._driver.cuGraphMemsetNodeGetParams(handle))
        return Node(kind, place, words=(Word(int(params.dst), "destination"),))

    def _alloc(self, handle: Any, kind: str, place: str) -> Node:
        params = checked(self._driver.cuGraphMemAllocNodeGetParams(handle))
        begin = int(params.dptr)
        return Node(kind, place, owns=(begin, begin + int(params.bytesize)))


def _parameters(params: Any, layout: list[tuple[int, int]]) -> list[bytes] | None:
    """Read each parameter's bytes from where the node keeps them; None for a form that is not known."""
    if not layout:  # a kernel may have none, but one that was handed some is one whose layout nobody knows
        return None if int(params.kernelParams or 0) or int(params.extra or 0) else []
    if int(params.kernelParams or 0):
        values = (ctypes.c_void_p * len(layout)).from_address(int(params.kernelParams))
        return [ctypes.string_at(value, size) for value, (_, size) in zip(values, layout)]
    buffer = _extra_buffer(int(params.extra or 0))
    if buffer is None or any(offset + size > len(buffer) for offset, size in layout):
        return None
    return [buffer[offset : offset + size] for offset, size in layout]


def _extra_buffer(address: int) -> bytes | None:
    """Read the one buffer that ``extra`` names, in which parameters stand at their offsets."""
    if not address:
        return None
    pairs: dict[int, int] = {}
    for number in range(_MAX_EXTRA_PAIRS):
        at = address + number * 2 * WORD_BYTES
        tag = ctypes.c_uint64.from_address(at).value
        if tag == _EXTRA_END:  # nothing of ours stands behind it
            break
        pairs[tag] = ctypes.c_uint64.from_address(at + WORD_BYTES).value
    if not pairs.get(_EXTRA_BUFFER) or not pairs.get(_EXTRA_SIZE):
        return None
    return ctypes.string_at(pairs[_EXTRA_BUFFER], ctypes.c_size_t.from_address(pairs[_EXTRA_SIZE]).value)
