"""The parts of the check "pointers" that need no device: words, charts, a graph walk over a driver made of values."""

from __future__ import annotations

import contextvars
import ctypes
import mmap
import struct
import threading
from collections.abc import Callable
from enum import IntEnum
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from graphglue.audit import atlas, names, pointers
from graphglue.audit.atlas import Kind, Sight, Stretch, classify
from graphglue.audit.certificate import Verdict
from graphglue.audit.subject import Region, Unseen
from graphglue.core.batch import Mode
from graphglue.core.keys import Key
from graphglue.device import stack
from graphglue.device.allocations import Allocation, Block, _blocks
from graphglue.device.nodes import Node, Word, _Walk, words_in
from graphglue.device.stack import on_fresh_stack
from graphglue.errors import CaptureError, GraphGlueError

from . import subjects

KEY = Key(Mode.DECODE, 4, 4, 1)

# Words.


@given(st.binary(max_size=64))
def test_words_are_the_aligned_eight_bytes(raw: bytes) -> None:
    found = words_in(raw, "parameter 3")
    assert [word.value for word in found] == [value for (value,) in struct.iter_unpack("<Q", raw[: len(raw) // 8 * 8])]
    assert [word.place for word in found] == ["parameter 3", *(f"parameter 3, byte {8 * n}" for n in range(1, 8))][
        : len(found)
    ]


def test_a_pointer_behind_a_number_in_a_struct_is_a_word() -> None:
    raw = struct.pack("@iPc7xP", 16, 0x7F0000001000, b"x", 0x7F0000002000)
    assert [word.value for word in words_in(raw, "p")][1::2] == [0x7F0000001000, 0x7F0000002000]


# Classification.

spans = st.lists(st.tuples(st.integers(0, 200), st.integers(0, 9)), max_size=12)


@st.composite
def layers(draw: Any) -> list[list[Stretch]]:
    """Draw layers of stretches that do not overlap within one."""
    found = []
    for _ in range(draw(st.integers(0, 3))):
        begin, layer = 0, []
        for gap, length in draw(spans):
            begin += gap
            layer.append(Stretch(begin, begin + length, draw(st.sampled_from(Kind)), str(len(layer))))
            begin += length
        found.append(atlas.in_order(draw(st.permutations(layer))))
    return found


@given(layers(), st.integers(0, 400))
def test_classify_finds_what_a_search_of_everything_finds(layers: list[list[Stretch]], address: int) -> None:
    expected = next((s for layer in layers for s in layer if s.begin <= address < s.end), None)
    assert classify(address, layers) == expected


def test_the_last_byte_is_inside_and_the_next_is_not() -> None:
    layer = [Stretch(100, 108, Kind.SLOT, "a"), Stretch(108, 116, Kind.OTHER)]
    assert [getattr(classify(at, [layer]), "kind", None) for at in (99, 100, 107, 108, 115, 116)] == [
        None, Kind.SLOT, Kind.SLOT, Kind.OTHER, Kind.OTHER, None,
    ]  # fmt: skip


def test_a_slot_wins_over_the_block_that_it_lies_in() -> None:
    slots, blocks = [Stretch(512, 640, Kind.SLOT, "a", True)], [Stretch(0, 4096, Kind.OTHER)]
    assert classify(600, [slots, blocks]) == slots[0]
    assert classify(640, [slots, blocks]) == blocks[0]


# Charts.


def test_regions_are_declared_as_the_contract_says_and_live_ones_never() -> None:
    regions = [
        Region(0, 8, "slot", "a"),
        Region(8, 16, "slot", "b"),
        Region(16, 24, "table", "t"),
        Region(24, 32, "live table", "t"),
        Region(32, 40, "live slot", "a"),
    ]
    charted = atlas.chart_regions(regions, lambda region: region.name in ("a", "t"))
    assert [(s.kind, s.declared) for s in charted] == [
        (Kind.SLOT, True), (Kind.SLOT, False), (Kind.TABLE, True), (Kind.LIVE_TABLE, False), (Kind.LIVE_SLOT, False),
    ]  # fmt: skip


COMMON, OWN, OLDER = (0, 0), (0, 7), (0, 6)


def test_blocks_are_told_apart_by_pool_age_stream_and_reader() -> None:
    own = Block(0, 512, OWN, 5, 8, True)
    freed_inside = Block(512, 1024, OWN, 5, 8, False)
    engine = Block(1024, 1536, COMMON, 0, 8, True)
    gone = Block(1536, 2048, COMMON, 0, 8, False)
    kept = Block(2048, 2560, OLDER, 3, 8, True)
    workspace = Block(2560, 3072, COMMON, 5, 8, True)
    memo = Block(3072, 3584, COMMON, 4, 8, True)
    hidden_memo = Block(3584, 4096, COMMON, 4, 8, True)
    reused = Block(4096, 4608, COMMON, 0, 8, True)
    blocks = [own, freed_inside, engine, gone, kept, workspace, memo, hidden_memo, reused]
    before = [engine, kept, workspace, Block(4096, 4608, COMMON, 0, 8, False)]
    charted = {s.begin: s for s in atlas.chart_blocks(blocks, OWN, before, {memo.begin, engine.begin})}
    expected = {
        own: Kind.POOL, freed_inside: Kind.POOL, engine: Kind.OTHER, gone: Kind.FREED, kept: Kind.OTHER,
        workspace: Kind.SCRATCH, memo: Kind.MEMO, hidden_memo: Kind.SCRATCH, reused: Kind.SCRATCH,
    }  # fmt: skip
    assert {block: charted[block.begin].kind for block in blocks} == expected
    assert [s.begin for s in charted.values() if s.declared] == [own.begin, freed_inside.begin]


def test_a_segment_is_cut_into_its_blocks() -> None:
    segment = {
        "address": 4096, "stream": 9, "segment_pool_id": [0, 3],
        "blocks": [
            {"address": 4096, "size": 512, "requested_size": 100, "state": "active_allocated"},
            {"size": 1024, "state": "inactive"},
        ],
    }  # fmt: skip
    assert _blocks(segment) == [
        Block(4096, 4608, (0, 3), 9, 100, True), Block(4608, 5632, (0, 3), 9, 1024, False),
    ]  # fmt: skip


# Sights.


def kernel(*values: int, place: str = "0", name: str = "add") -> Node:
    return Node("kernel", place, name, tuple(Word(value, f"parameter {n}") for n, value in enumerate(values)))


def test_numbers_are_no_addresses_and_the_driver_is_asked_for_the_rest() -> None:
    asked: list[int] = []

    def ask(address: int) -> Allocation | None:
        asked.append(address)
        return Allocation(1 << 30, 1 << 31, "managed") if 1 << 30 <= address < 1 << 31 else None

    known = [Stretch(1 << 20, 1 << 21, Kind.SLOT, "a", True)]
    node = kernel(0, 16, (1 << 20) + 8, (1 << 30) + 8, 1 << 40, (1 << 63) + 5, (1 << 64) - 1)
    found = atlas.sights_of([node], [known], ask)
    assert [(sight.word.place, sight.stretch and sight.stretch.kind) for sight in found] == [
        ("parameter 2", Kind.SLOT), ("parameter 3", Kind.MANAGED),
    ]  # fmt: skip
    assert asked == [(1 << 30) + 8, 1 << 40]


def test_what_a_copy_names_is_an_address_even_if_nobody_knows_it() -> None:
    node = Node("memcpy", "0", words=(Word(1 << 40, "source"), Word(8, "destination")))
    found = atlas.sights_of([node], [[Stretch(0, 16, Kind.SLOT, "a", True)]], lambda address: None)
    assert [sight.stretch and sight.stretch.name for sight in found] == [None, "a"]
    assert atlas.strange(found) == found[:1]


def sight(value: int, kind: Kind, place: str = "0", node_kind: str = "kernel") -> Sight:
    stretch = Stretch(value - value % 512, value - value % 512 + 512, kind)
    return Sight(Node(node_kind, place), Word(value, "parameter 1"), stretch)


@pytest.mark.parametrize(
    ("first", "second", "counts"),
    [
        (sight(4096, Kind.OTHER), sight(4096, Kind.OTHER), True),
        (sight(4096, Kind.OTHER), None, False),
        (sight(4096, Kind.OTHER), sight(4096, Kind.OTHER, place="1"), False),
        (sight(4096, Kind.SCRATCH), sight(8192, Kind.SCRATCH), True),  # made anew by each recording's warm-ups
        (sight(4096, Kind.FREED), sight(4096, Kind.FREED), True),
        (sight(4096, Kind.FREED), sight(8192, Kind.FREED), False),  # what warm-ups left behind
        (sight(4096, Kind.OTHER), sight(8192, Kind.FREED), False),
        (sight(4096, Kind.FREED, node_kind="memcpy"), None, True),
    ],
)
def test_only_what_a_second_recording_has_too_counts(first: Sight, second: Sight | None, counts: bool) -> None:
    assert atlas.confirmed([first], [second] if second else []) == ([first] if counts else [])


# The walk, over a driver made of values.


class Types(IntEnum):
    CU_MEMORYTYPE_HOST = 1
    CU_MEMORYTYPE_DEVICE = 2
    CU_MEMORYTYPE_ARRAY = 3
    CU_MEMORYTYPE_UNIFIED = 4


class Kinds(IntEnum):
    CU_GRAPH_NODE_TYPE_KERNEL = 0
    CU_GRAPH_NODE_TYPE_MEMCPY = 1
    CU_GRAPH_NODE_TYPE_MEMSET = 2
    CU_GRAPH_NODE_TYPE_HOST = 3
    CU_GRAPH_NODE_TYPE_GRAPH = 4
    CU_GRAPH_NODE_TYPE_EMPTY = 5
    CU_GRAPH_NODE_TYPE_MEM_ALLOC = 10
    CU_GRAPH_NODE_TYPE_CONDITIONAL = 13


class Result(IntEnum):
    CUDA_SUCCESS = 0
    CUDA_ERROR_INVALID_VALUE = 1
    CUDA_ERROR_NOT_FOUND = 500


OK = (Result.CUDA_SUCCESS,)


class FakeDriver:
    """A driver whose graphs are lists of (kind, params), and whose functions are lists of (offset, size)."""

    CUmemorytype, CUgraphNodeType, CUresult = Types, Kinds, Result

    def __init__(self, functions: dict[int, list[tuple[int, int]]] | None = None) -> None:
        self.functions = functions or {}
        self.num_layout_calls = 0

    def cuGraphGetNodes(self, graph: Any, count: int) -> Any:
        return (*OK, graph[:count], len(graph))

    def cuGraphNodeGetType(self, node: Any) -> Any:
        return *OK, node[0]

    def _params(self, node: Any) -> Any:
        return *OK, node[1]

    cuGraphKernelNodeGetParams = cuGraphMemcpyNodeGetParams = cuGraphMemsetNodeGetParams = _params
    cuGraphChildGraphNodeGetGraph = cuGraphMemAllocNodeGetParams = _params

    def cuFuncGetName(self, handle: int) -> Any:
        return (*OK, b"function") if handle in self.functions else (Result.CUDA_ERROR_NOT_FOUND, None)

    def cuKernelGetName(self, handle: int) -> Any:
        return *OK, b"library kernel"

    def cuFuncGetParamInfo(self, handle: int, index: int) -> Any:
        self.num_layout_calls += 1
        if handle not in self.functions:
            return Result.CUDA_ERROR_NOT_FOUND, None, None
        layout = self.functions[handle]
        return (*OK, *layout[index]) if index < len(layout) else (Result.CUDA_ERROR_INVALID_VALUE, None, None)

    cuKernelGetParamInfo = cuFuncGetParamInfo


ALIVE: list[Any] = []


def packed(layout: list[tuple[int, int]], values: list[bytes]) -> bytes:
    buffer = bytearray(max((offset + size for offset, size in layout), default=0))
    for (offset, size), value in zip(layout, values, strict=True):
        buffer[offset : offset + size] = value
    return bytes(buffer)


def kernel_params(func: int = 0, kern: int = 0, values: int = 0, extra: int = 0) -> Any:
    return SimpleNamespace(func=func, kern=kern, kernelParams=values, extra=extra)


def as_array(layout: list[tuple[int, int]], values: list[bytes]) -> dict[str, int]:
    """Lay parameters out as an array of addresses."""
    buffers = [ctypes.create_string_buffer(value, len(value)) for value in values]
    array = (ctypes.c_void_p * len(buffers))(*map(ctypes.addressof, buffers))
    ALIVE.append((buffers, array))
    return {"values": ctypes.addressof(array)}


def as_extra(order: tuple[int, ...], cut: int = 0) -> Callable[..., dict[str, int]]:
    """Lay parameters out as one buffer, with the pairs in the given order."""

    def lay(layout: list[tuple[int, int]], values: list[bytes]) -> dict[str, int]:
        raw = packed(layout, values)
        buffer, size = ctypes.create_string_buffer(raw, len(raw)), ctypes.c_size_t(len(raw) - cut)
        pointers = {1: ctypes.addressof(buffer), 2: ctypes.addressof(size)}
        flat = [part for tag in order for part in (tag, pointers[tag])]
        array = (ctypes.c_uint64 * (len(flat) + 1))(*flat, 0)
        ALIVE.append((buffer, size, array))
        return {"extra": ctypes.addressof(array)}

    return lay


LAYOUT = [(0, 4), (8, 8), (16, 24), (40, 4)]
VALUES = [struct.pack("<I", 7), struct.pack("<Q", 111), struct.pack("<QQQ", 1, 222, 333), struct.pack("<I", 9)]


@pytest.mark.parametrize("lay", [as_array, as_extra((1, 2)), as_extra((2, 1))], ids=["array", "buffer", "size first"])
@pytest.mark.parametrize("handle", ["func", "kern"])
def test_a_kernels_words_are_read_in_every_form(lay: Callable[..., dict[str, int]], handle: str) -> None:
    params = kernel_params(**{handle: 50}, **lay(LAYOUT, VALUES))
    (node,) = _Walk(FakeDriver({50: LAYOUT})).nodes([(0, params)], "")
    assert node.name == ("function" if handle == "func" else "library kernel")
    assert node.words == (
        Word(111, "parameter 1"), Word(1, "parameter 2"), Word(222, "parameter 2, byte 8"),
        Word(333, "parameter 2, byte 16"),
    )  # fmt: skip
    assert not node.unread


def test_a_kernel_that_can_not_be_read_says_so_and_one_without_parameters_is_read() -> None:
    driver = FakeDriver({50: LAYOUT, 51: []})
    strange = [
        kernel_params(func=50),  # neither form
        kernel_params(func=50, **as_extra((1,))(LAYOUT, VALUES)),  # a buffer without a size
        kernel_params(func=50, **as_extra((1, 2), cut=8)(LAYOUT, VALUES)),  # shorter than the layout
        kernel_params(func=51, **as_array(LAYOUT, VALUES)),  # parameters of which the driver knows nothing
        kernel_params(func=52, **as_array(LAYOUT, VALUES)),  # a function that the driver refuses
    ]
    found = list(_Walk(driver).nodes([(0, params) for params in [*strange, kernel_params(func=51)]], ""))
    assert [bool(node.unread) for node in found] == [True] * 5 + [False]
    assert "CUDA_ERROR_NOT_FOUND" in found[4].unread
    assert not any(node.words for node in found)


def test_a_layout_is_asked_for_once() -> None:
    driver = FakeDriver({50: LAYOUT})
    params = kernel_params(func=50, **as_array(LAYOUT, VALUES))
    assert len(list(_Walk(driver).nodes([(0, params)] * 9, ""))) == 9
    assert driver.num_layout_calls == len(LAYOUT) + 1


def memcpy(source: Types, destination: Types = Types.CU_MEMORYTYPE_DEVICE) -> Any:
    return SimpleNamespace(
        srcMemoryType=source, srcHost=1000, srcDevice=2000, srcXInBytes=5,
        dstMemoryType=destination, dstHost=3000, dstDevice=4000, dstXInBytes=0,
    )  # fmt: skip


@pytest.mark.parametrize(
    ("params", "addresses"),
    [
        (memcpy(Types.CU_MEMORYTYPE_DEVICE), [2005, 4000]),
        (memcpy(Types.CU_MEMORYTYPE_HOST), [1005, 4000]),
        (memcpy(Types.CU_MEMORYTYPE_UNIFIED), [2005, 4000]),
        (memcpy(Types.CU_MEMORYTYPE_DEVICE, Types.CU_MEMORYTYPE_HOST), [2005, 3000]),
    ],
)
def test_both_ends_of_a_copy_are_words(params: Any, addresses: list[int]) -> None:
    (node,) = _Walk(FakeDriver()).nodes([(1, params)], "")
    assert node.words == (Word(addresses[0], "source"), Word(addresses[1], "destination"))


def test_a_copy_of_an_array_is_unread() -> None:
    (node,) = _Walk(FakeDriver()).nodes([(1, memcpy(Types.CU_MEMORYTYPE_ARRAY))], "")
    assert "array" in node.unread


def test_children_are_walked_and_every_kind_is_named() -> None:
    inner = [(5, None), (2, SimpleNamespace(dst=77))]
    graph = [
        (3, None),
        (4, [*inner, (4, inner)]),
        (10, SimpleNamespace(dptr=4096, bytesize=256)),
        (13, None),
        (99, None),
    ]
    found = list(_Walk(FakeDriver()).nodes(graph, ""))
    assert [(node.place, node.kind) for node in found[:-1]] == [
        ("0", "host"), ("1.0", "empty"), ("1.1", "memset"), ("1.2.0", "empty"), ("1.2.1", "memset"),
        ("2", "mem_alloc"), ("3", "conditional"),
    ]  # fmt: skip
    assert found[2].words == (Word(77, "destination"),)
    assert atlas.chart_owned(found) == [Stretch(4096, 4352, Kind.POOL, "of the graph", True)]
    assert "99" in found[-1].kind


def test_a_driver_that_refuses_a_graph_is_named() -> None:
    driver = FakeDriver()
    driver.cuGraphGetNodes = lambda graph, count: (Result.CUDA_ERROR_NOT_FOUND, None, None)  # type: ignore[method-assign]
    with pytest.raises(GraphGlueError, match="CUDA_ERROR_NOT_FOUND"):
        list(_Walk(driver).nodes([], ""))


# Verdicts.


def judged(sights: list[Sight], nodes: tuple[Node, ...] = (), prep: Any = subjects.good) -> tuple[Verdict, list[str]]:
    judge = pointers._Judge(SimpleNamespace(prep=prep))  # type: ignore[arg-type]
    judge.nodes(pointers.Look(list(nodes), sights), KEY)
    judge.sights(sights, KEY, pointers._workspaces(sights))
    verdict, findings = judge.evidence.result("all of it")
    return verdict, [str(finding) for finding in findings]


@pytest.mark.parametrize("kind", [kind for kind in Kind if kind not in (Kind.POOL, Kind.KEPT, Kind.SCRATCH)])
def test_strange_memory_fails_with_its_kind_its_place_and_its_address(kind: Kind) -> None:
    verdict, (text,) = judged([sight(0x1234508, kind)])
    assert verdict is Verdict.FAIL
    for part in (kind.value, "0x1234400", "parameter 1", "node 0", "4 requests"):
        assert part in text


def test_one_memory_is_one_finding_and_two_are_two() -> None:
    again = [sight(0x10000, Kind.OTHER), sight(0x10008, Kind.OTHER, place="1"), sight(0x20000, Kind.OTHER)]
    assert len(judged(again)[1]) == 2


def test_memory_that_no_tensor_lies_in_is_unknown_beside_the_recording_and_a_workspace_for_cublas() -> None:
    scratch = Stretch(0x10000, 0x20000, Kind.SCRATCH)

    def of(name: str, stretch: Stretch = scratch) -> Sight:
        return Sight(kernel(0x10000, name=name), Word(0x10000, "parameter 0"), stretch)

    assert judged([of("custom")])[0] is Verdict.UNKNOWN
    for name in ("nvjet_sm90_tst", "void cutlass::Kernel2<x>", "_ZN8cublasLt19splitKreduce_kernelILi32E", "gemmSN_NN"):
        assert judged([of(name)]) == (Verdict.PASS, ["all of it"])
    memset = Sight(Node("memset", "4"), Word(0x10008, "destination"), scratch)
    assert judged([of("sm80_xmma_gemm"), memset])[0] is Verdict.PASS
    assert judged([memset])[0] is Verdict.UNKNOWN
    assert judged([of("gemm", Stretch(0x10000, 0x20000, Kind.OTHER))])[0] is Verdict.FAIL
    assert judged([of("gemm", Stretch(0x10000, 0x20000, Kind.DEVICE))])[0] is Verdict.UNKNOWN


def test_a_tensor_is_named_as_the_prep_reaches_it() -> None:
    cache = torch.arange(64)

    def prep(view: Any) -> Any:
        return cache + view.seq_lens

    address = cache.data_ptr() + 8
    stretch = Stretch(address - 8, address + 504, Kind.SCRATCH)
    verdict, (text,) = judged([Sight(kernel(address), Word(address, "parameter 0"), stretch)], prep=prep)
    assert verdict is Verdict.FAIL
    assert "closure variable 'cache' int64[64]" in text
    assert names.Names(subjects.good).at(address) is not None, "a tensor that only Python knows is found, unnamed"


def test_pageable_memory_in_a_copy_fails() -> None:
    pageable = Sight(Node("memcpy", "2"), Word(0x5555000, "source"), None)
    verdict, (text,) = judged([pageable])
    assert verdict is Verdict.FAIL
    assert "pageable" in text
    assert "0x5555000" in text


@pytest.mark.parametrize(
    ("node", "verdict", "text"),
    [
        (Node("host", "0"), Verdict.FAIL, "host"),
        (Node("conditional", "0"), Verdict.UNKNOWN, "conditional"),
        (Node("batch_mem_op", "0"), Verdict.UNKNOWN, "batch_mem_op"),
        (Node("kernel", "0", "mine", unread="no layout"), Verdict.UNKNOWN, "mine"),
        (Node("memcpy", "0", unread="an array"), Verdict.UNKNOWN, "array"),
        (Node("empty", "0"), Verdict.PASS, ""),
        (Node("event_record", "0"), Verdict.PASS, ""),
        (Node("mem_alloc", "0", owns=(1, 2)), Verdict.PASS, ""),
        (kernel(7), Verdict.UNKNOWN, "no address of any memory"),
    ],
)
def test_nodes_are_judged_by_kind(node: Node, verdict: Verdict, text: str) -> None:
    found, lines = judged([], (node,))
    assert found is verdict
    assert text in lines[0]


def test_kernels_are_named_readably_and_shortly() -> None:
    mangled = "_ZN2at6native29vectorized_elementwise_kernelILi4ENS0_11FillFunctorIlEESt5arrayIPcLm1EEEEviT0_T1_"
    assert pointers.spell_op(kernel(name=mangled)).startswith("at::native::vectorized_elementwise_kernel<4, ")
    assert pointers.spell_op(kernel(name="add_kernel")) == "add_kernel"
    assert len(pointers.spell_op(kernel(name="x" * 999))) < 200


def test_without_a_gpu_nothing_was_looked_at() -> None:
    with pytest.raises(Unseen, match="needs a GPU"):
        pointers.run(subjects.make_subject())


# The second recording.


class Scripted:
    """A subject whose looks are written down beforehand; an error among them is raised."""

    def __init__(self, *looks: pointers.Look | Exception) -> None:
        self.prep, self.on_gpu, self.keys, self.left = subjects.good, True, [KEY], list(looks)
        self.arena = SimpleNamespace(device=SimpleNamespace(torch_device=torch.device("cpu"), synchronize=lambda: None))
        self.looks = 0
        self.raws = lambda key: [key.bucket]
        self.sources = lambda raw, seed: {}
        self.fill = lambda key, raw, sources: None

    def verdict(self, monkeypatch: pytest.MonkeyPatch) -> tuple[Verdict, str]:
        def next_look(subject: Any, key: Key, fresh_stack: bool = False) -> pointers.Look:
            assert fresh_stack is (self.looks > 0)
            self.looks += 1
            look = self.left.pop(0)
            if isinstance(look, Exception):
                raise look
            return look

        monkeypatch.setattr(pointers, "look", next_look)
        verdict, findings = pointers.run(self)  # type: ignore[arg-type]
        assert not self.left, "a look was not needed"
        return verdict, "\n".join(map(str, findings))


OWN_OUTPUT = Sight(Node("kernel", "0"), Word(4096, "parameter 0"), Stretch(4096, 8192, Kind.POOL, "", True))


def looked(*sights: Sight, name: str = "") -> pointers.Look:
    return pointers.Look([Node("kernel", "0", name)], [OWN_OUTPUT, *sights])


def test_nothing_strange_needs_no_second_recording(monkeypatch: pytest.MonkeyPatch) -> None:
    verdict, text = Scripted(looked()).verdict(monkeypatch)
    assert verdict is Verdict.PASS
    assert "1 keys; 1 addresses, 1 kernel nodes" in text


def test_a_leftover_is_forgotten_and_what_stands_in_both_recordings_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    leftover, real = sight(4096, Kind.OTHER), sight(8192, Kind.OTHER, place="1")
    assert Scripted(looked(leftover), looked()).verdict(monkeypatch)[0] is Verdict.PASS
    verdict, text = Scripted(looked(leftover, real), looked(real)).verdict(monkeypatch)
    assert verdict is Verdict.FAIL
    assert "0x2000" in text
    assert "0x1000" not in text


@pytest.mark.parametrize("second", [CaptureError("no stack"), RuntimeError("no thread"), looked(name="another kernel")])
def test_doubt_that_a_second_recording_can_not_settle_is_unknown(second: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    verdict, text = Scripted(looked(sight(4096, Kind.OTHER)), second).verdict(monkeypatch)
    assert verdict is Verdict.UNKNOWN
    assert "1 addresses may be leftovers" in text


def test_the_address_of_a_copy_needs_no_second_recording(monkeypatch: pytest.MonkeyPatch) -> None:
    assert Scripted(looked(sight(4096, Kind.HOST, node_kind="memcpy"))).verdict(monkeypatch)[0] is Verdict.FAIL


HALF = 0x7F45 << 32  # what an operation leaves beside a 32-bit field


@pytest.mark.parametrize(
    ("value", "kind", "verdict"),
    [
        (HALF + 999, Kind.OTHER, Verdict.PASS),  # no element begins there: a number
        (HALF + 4096, Kind.OTHER, Verdict.UNKNOWN),
        (HALF, Kind.OTHER, Verdict.FAIL),  # where the memory begins
        (HALF, Kind.FREED, Verdict.UNKNOWN),
        (HALF + (1 << 24) + 4, Kind.OTHER, Verdict.FAIL),
        (HALF + (1 << 24) + 999, Kind.FREED, Verdict.FAIL),
    ],
)
def test_a_number_beside_half_an_address_is_no_address(
    value: int, kind: Kind, verdict: Verdict, monkeypatch: pytest.MonkeyPatch
) -> None:
    memory = Stretch(HALF, HALF + (1 << 32), kind, "cache")
    seen = looked(Sight(Node("kernel", "0", "gather"), Word(value, "parameter 0, byte 416"), memory))
    assert Scripted(seen, seen).verdict(monkeypatch)[0] is verdict


def test_a_prep_that_can_not_be_recorded_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    verdict, text = Scripted(CaptureError("item() reads a tensor on the host")).verdict(monkeypatch)
    assert verdict is Verdict.FAIL
    assert "item() reads" in text


def test_a_fresh_stack_gives_results_and_errors_and_the_callers_surroundings() -> None:
    variable = contextvars.ContextVar("variable", default=0)
    variable.set(5)
    usual, here = threading.stack_size(), threading.get_ident()
    assert on_fresh_stack(torch.device("cpu"), lambda: (variable.get(), threading.get_ident() != here)) == (5, True)
    with torch.device("meta"):
        assert on_fresh_stack(torch.device("cpu"), lambda: torch.zeros(1).device.type) == "meta"
    with pytest.raises(KeyError, match="inside"):
        on_fresh_stack(torch.device("cpu"), lambda: {}["inside"])
    assert threading.stack_size() == usual


def test_no_thread_is_given_the_stack_of_an_ended_one(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[int] = []
    real = threading.stack_size
    monkeypatch.setattr(threading, "stack_size", lambda size=0: (asked.append(size), real(size))[1])
    for _ in range(3):
        on_fresh_stack(torch.device("cpu"), lambda: None)
    sizes = asked[::2]
    assert sizes == sorted(set(sizes))
    assert len(sizes) == 3


def test_a_sweep_leaves_zeros_where_an_operation_will_run_and_each_operation_runs_below_it() -> None:
    seen: dict[str, int] = {}

    def dirty_words() -> int:
        end = (stack.frame_address() - stack._KEPT_BYTES) & -mmap.PAGESIZE
        return sum(map(bool, ctypes.string_at(end - (32 << 10), 32 << 10)))

    def run() -> None:
        stack._below(stack.frame_address() - (128 << 10), lambda: None)  # its frames leave words behind
        seen["before"] = dirty_words()
        swept = stack._sweep()
        seen["after"] = dirty_words()
        seen["below"] = swept - stack._below(swept, stack.frame_address)

    on_fresh_stack(torch.device("cpu"), run, sweep=False)
    assert seen["before"] > 0
    assert seen["after"] == 0
    assert seen["below"] > 0


def test_swept_operations_compute_and_raise_as_others_do() -> None:
    numbers = torch.arange(6).reshape(2, 3)
    swept = on_fresh_stack(torch.device("cpu"), lambda: (numbers.sum(1), torch.cat([numbers, numbers])))
    assert [part.tolist() for part in swept] == [[3, 12], [[0, 1, 2], [3, 4, 5], [0, 1, 2], [3, 4, 5]]]
    with pytest.raises(RuntimeError, match="size of tensor"):
        on_fresh_stack(torch.device("cpu"), lambda: numbers + torch.zeros(2))
