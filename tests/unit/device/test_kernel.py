"""The kernel's source compiles for every architecture, agrees with the packing, and is right when run on the CPU.

NVRTC needs no GPU. Where its wheel is missing the tests of it are skipped, and ``fill.cu`` itself is still built
by a C++ compiler and run, thread after thread, against the reference.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import graphglue as gg
from graphglue.core.binding import Write
from graphglue.device import kernel, packing
from graphglue.device.kernel import KernelUnavailable, compile_fill
from graphglue.device.packing import FillParams, SlotLayout
from tests.unit.device import kernel_model
from tests.unit.device.fill_steps import FAST_SLOTS, Lane, Memory, Place, sources_of, step_and_compare
from tests.unit.device.kernel_model import HostKernel, OnDevice, build_for_cpu, on_device
from tests.unit.device.test_packing import check_steps, fill_and_compare

ARCHITECTURES = ("sm_80", "sm_90", "sm_100")
ELF = b"\x7fELF"


def nvrtc_is_here() -> bool:
    try:
        from cuda.bindings import nvrtc

        return nvrtc.nvrtcVersion()[0] == 0
    except Exception:  # cuda-python reports a missing library in several ways
        return False


needs_nvrtc = pytest.mark.skipif(
    not nvrtc_is_here(), reason="NVRTC is not here: pip install cuda-python nvidia-cuda-nvrtc"
)

# What packing.py takes for granted of fill.cu.
_OFFSETS = {
    "Shape": {"pad": 0, "head": 8, "source_pitch": 12, "kind": 16, "load": 17, "rule": 18},
    "Fixed": {"target": 0, "span": 8, "inner": 12, "outer": 16, "target_pitch": 20, "store": 24, "blocks": 28},
    "Params": {"source": 0, "shape": "8 * SLOTS", "fixed": "32 * SLOTS", "payload": "64 * SLOTS"},
}
_SIZES = {"Shape": 24, "Fixed": 32, "Params": "64 * SLOTS + PAYLOAD_BYTES"}
_CODES = {
    "U8": torch.uint8, "I8": torch.int8, "U16": torch.uint16, "I16": torch.int16, "U32": torch.uint32,
    "I32": torch.int32, "U64": torch.uint64, "I64": torch.int64, "F16": torch.float16, "BF16": torch.bfloat16,
    "F32": torch.float32, "F64": torch.float64,
}  # fmt: skip


def layout_assertions() -> list[str]:
    """Write what the packing assumes as C++ that does not compile where it is wrong."""
    claims = [
        f"__builtin_offsetof({owner}, {member}) == {offset}"
        for owner, members in _OFFSETS.items()
        for member, offset in members.items()
    ]
    claims += [f"sizeof({owner}) == {size}" for owner, size in _SIZES.items()]
    claims += [f"{name} == {packing.type_code(dtype)}" for name, dtype in _CODES.items()]
    claims += [f"{name} == {getattr(packing, name)}" for name in ("MEMORY", "INLINE", "CONSTANT")]
    claims += ["PAD == 0", "REPEAT_LAST == 1"]
    return [f'static_assert({claim}, "{claim}");' for claim in claims]


def with_lines(monkeypatch: pytest.MonkeyPatch, *lines: str) -> None:
    text = kernel.source_text()
    monkeypatch.setattr(kernel, "source_text", lambda: "\n".join([text, *lines]))


# NVRTC.


@needs_nvrtc
@pytest.mark.parametrize("architecture", ARCHITECTURES)
@pytest.mark.parametrize(("num_slots", "payload_bytes"), [(1, 16), (5, 3776), (25, 31152), (64, 16), (500, 752)])
def test_the_source_compiles_for_every_architecture(architecture: str, num_slots: int, payload_bytes: int) -> None:
    cubin = compile_fill(num_slots, payload_bytes, architecture)
    assert cubin.startswith(ELF)
    assert b"graphglue_fill" in cubin


@needs_nvrtc
@pytest.mark.parametrize(("num_slots", "payload_bytes"), [(1, 16), (3, 48), (25, 31152)])
def test_the_struct_lies_as_the_packing_writes_it(
    monkeypatch: pytest.MonkeyPatch, num_slots: int, payload_bytes: int
) -> None:
    with_lines(monkeypatch, *layout_assertions())
    assert compile_fill(num_slots, payload_bytes, "sm_90").startswith(ELF)


@needs_nvrtc
@pytest.mark.parametrize("claim", ["sizeof(Fixed) == 40", "__builtin_offsetof(Shape, head) == 12", "I16 == 2"])
def test_a_struct_that_lay_elsewhere_would_not_compile(monkeypatch: pytest.MonkeyPatch, claim: str) -> None:
    with_lines(monkeypatch, f'static_assert({claim}, "it lies elsewhere");')
    with pytest.raises(KernelUnavailable, match="it lies elsewhere"):
        compile_fill(3, 48, "sm_90")


@needs_nvrtc
def test_a_broken_source_is_unavailable_with_the_compilers_log(monkeypatch: pytest.MonkeyPatch) -> None:
    with_lines(monkeypatch, "__device__ void broken() { undeclared(1); }")
    with pytest.raises(
        KernelUnavailable, match=r"(?s)NVRTC refused the fill kernel for sm_90: .*error.*undeclared.*1 error detected"
    ):
        compile_fill(1, 16, "sm_90")


@needs_nvrtc
@pytest.mark.parametrize("architecture", ["sm_1", "sm_75", "none"])
def test_an_architecture_that_the_kernel_is_not_for_is_unavailable(architecture: str) -> None:
    """sm_75 has no conversion to bfloat16 in hardware."""
    with pytest.raises(KernelUnavailable, match=rf"NVRTC refused the fill kernel for {architecture}: \S"):
        compile_fill(1, 16, architecture)


@needs_nvrtc
def test_a_struct_over_the_limit_of_by_value_parameters_is_unavailable() -> None:
    with pytest.raises(KernelUnavailable, match=r"refused the fill kernel for sm_90: \S"):
        compile_fill(1, 40_000, "sm_90")
    assert compile_fill(1, (kernel.LARGE_BYTES - 64) // 16 * 16, "sm_90").startswith(ELF)


def absent(name: str) -> Callable[[pytest.MonkeyPatch], None]:
    """Make an import fail, as where a package is not installed."""

    def apply(monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setitem(sys.modules, "cuda", ModuleType("cuda"))
        monkeypatch.setitem(sys.modules, "cuda.bindings", ModuleType("cuda.bindings"))
        monkeypatch.setitem(sys.modules, name, None)

    return apply


def without_library(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the bindings be there, and the shared library not."""

    def create(*_: object) -> None:
        raise RuntimeError('Failure finding "libnvrtc.so"')

    bindings: Any = ModuleType("cuda.bindings")
    bindings.nvrtc = SimpleNamespace(nvrtcCreateProgram=create)
    monkeypatch.setitem(sys.modules, "cuda", ModuleType("cuda"))
    monkeypatch.setitem(sys.modules, "cuda.bindings", bindings)


@pytest.mark.parametrize("break_", [absent("cuda.bindings"), absent("cuda.bindings.nvrtc"), without_library])
def test_without_nvrtc_the_kernel_is_unavailable_and_says_what_to_install(
    monkeypatch: pytest.MonkeyPatch, break_: Callable[[pytest.MonkeyPatch], None]
) -> None:
    break_(monkeypatch)
    with pytest.raises(KernelUnavailable, match=r"NVRTC is not usable: .*; install nvidia-cuda-nvrtc"):
        compile_fill(1, 16, "sm_90")


def test_the_hash_names_the_source(monkeypatch: pytest.MonkeyPatch) -> None:
    before = kernel.source_hash()
    assert before == kernel.source_hash()
    with_lines(monkeypatch, "// another kernel")
    assert kernel.source_hash() != before


@pytest.mark.parametrize("seen", [(1,), (1, "value"), (1, "one", "two")])
def test_a_driver_error_is_an_error_of_ours_that_names_it(seen: tuple[Any, ...]) -> None:
    with pytest.raises(gg.GraphGlueError, match="the CUDA driver refused: 1"):
        kernel.checked(seen)
    assert kernel.checked((0,)) is None
    assert kernel.checked((0, "value")) == "value"
    assert kernel.checked((0, "one", "two")) == ("one", "two")


# The source itself, on the CPU.


def run_on_cpu(params: FillParams) -> None:
    build_for_cpu(len(params.layouts))(bytes(params.buffer), len(params.layouts), params.num_blocks)


def test_the_struct_lies_as_the_packing_writes_it_for_a_host_compiler_too(monkeypatch: pytest.MonkeyPatch) -> None:
    with_lines(monkeypatch, *layout_assertions())
    assert build_for_cpu.__wrapped__(3, 48).struct_bytes == 3 * 64 + 48
    with_lines(monkeypatch, 'static_assert(sizeof(Shape) == 32, "it lies elsewhere");')
    with pytest.raises(AssertionError, match="it lies elsewhere"):
        build_for_cpu.__wrapped__(3, 48)


@given(data=st.data())
def test_the_source_does_what_the_reference_does_for_any_slots_and_any_step(data: st.DataObject) -> None:
    check_steps(data, run_on_cpu)


@pytest.mark.parametrize("kind", ["device", "array"])
def test_the_source_is_right_for_steps_that_are_known(monkeypatch: pytest.MonkeyPatch, kind: str) -> None:
    arena = gg.Arena(FAST_SLOTS, [4])
    bucket = arena.space.bucket(4)
    fill = HostKernel(monkeypatch, run=None).fill(arena.slots, arena.targets(bucket), arena._owned)
    place = Place(on_device, lambda tensor: tensor.as_subclass(OnDevice))
    lane = Lane(arena, fill, gg.Bucket(3, 3, 1), bucket, place)
    make: Any = on_device if kind == "device" else torch.Tensor.numpy
    assert [step_and_compare(lane, sources_of(3, start, make)) for start in (0, 50, 9)] == [False, True, True]


@pytest.mark.parametrize("dtype", [torch.int8, torch.int16, torch.int32, torch.int64], ids=str)
@pytest.mark.parametrize("raised", [0, 1], ids=["aligned", "unaligned"])
def test_every_head_and_span_around_a_16_byte_word(dtype: torch.dtype, raised: int) -> None:
    """16-byte words where source and target line up, single elements where they do not."""
    per_word = 16 // dtype.itemsize
    base = torch.zeros(4 * per_word + 8, dtype=dtype)
    start = -(base.data_ptr() // dtype.itemsize) % per_word + raised
    for span in range(1, 3 * per_word + 2):
        storage = base[start : start + span]
        slot = gg.Slot("x", "request", dtype, -2, storage=storage)
        params = FillParams([SlotLayout(slot, storage)], 4096)
        for raw in range(span + 1):
            source = torch.zeros(span + per_word, dtype=dtype)
            at = -(source.data_ptr() // dtype.itemsize) % per_word
            source = source[at : at + raw]
            source.copy_(torch.arange(1, raw + 1))
            writes = [Write(slot, source.as_subclass(OnDevice), raw, span, -2)]
            fill_and_compare(params, writes, {"x": storage}, run_on_cpu)


def test_several_blocks_share_one_slot_and_leave_nothing_out() -> None:
    """72 KB and more: a slot of many blocks, with heads that end inside a block and a word."""
    slots = [gg.Slot(f"slot{i}", "request", torch.int16, -7, inner=(inner,)) for i, inner in enumerate([3, 4099, 1])]
    arena = gg.Arena(slots, [9])
    bucket = arena.space.bucket(9)
    targets = arena.targets(bucket)
    params = FillParams([SlotLayout(slot, targets[slot.name]) for slot in slots], 256)
    assert params.num_blocks == 5
    for raw in (0, 1, 5, 9):
        values = {slot.name: torch.arange(raw * slot.inner[0]).view(raw, *slot.inner).short() for slot in slots}
        for offset in (0, 1, 8):
            writes = [Write(slot, on_device(values[slot.name], offset), raw, 9, -7) for slot in slots]
            fill_and_compare(params, writes, targets, run_on_cpu)


@pytest.mark.parametrize(("source", "target"), [
    (torch.float16, torch.float32), (torch.float16, torch.float64), (torch.bfloat16, torch.float32),
    (torch.bfloat16, torch.float64), (torch.int16, torch.int64), (torch.uint16, torch.int32),
    (torch.int8, torch.int16), (torch.uint8, torch.int64),
], ids=str)  # fmt: skip
def test_every_value_of_a_short_type_is_widened_exactly(source: torch.dtype, target: torch.dtype) -> None:
    if source.itemsize == 1:
        values = torch.arange(256, dtype=torch.int16).to(torch.uint8).view(source)
    else:
        values = torch.arange(-(2**15), 2**15).to(torch.int16).view(source)
    slot = gg.Slot("x", "request", target, 0)
    arena = gg.Arena([slot], [len(values)])
    targets = arena.targets(arena.space.bucket(len(values)))
    params = FillParams([SlotLayout(slot, targets["x"])], 0)
    fill_and_compare(params, [Write(slot, on_device(values), len(values), len(values), 0)], targets, run_on_cpu)


def test_a_source_with_a_wrong_line_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """Show that the runs above can fail: three slips in the source, each found."""
    text = kernel.source_text()
    slot = gg.Slot("x", "request", torch.int16, -2)
    arena = gg.Arena([slot], [29])
    targets = arena.targets(arena.space.bucket(29))
    params = FillParams([SlotLayout(slot, targets["x"])], 4096)
    slips = {
        "u64 bits = s.pad;": "u64 bits = s.pad + 1;",
        "(s.head + per_word - 1) / per_word": "s.head / per_word",
        "for (; w < words; w += threads) to[w] = from[w];": "for (; w + 1 < words; w += threads) to[w] = from[w];",
    }
    for line, slip in slips.items():
        assert line in text
        monkeypatch.setattr(kernel, "source_text", lambda line=line, slip=slip: text.replace(line, slip))
        broken = build_for_cpu.__wrapped__(1)
        writes = [Write(slot, on_device(torch.arange(20, dtype=torch.int16)), 20, 29, -2)]
        memory = Memory(targets.values())
        memory.scramble(1)
        with pytest.raises(AssertionError, match="differs at bytes"):
            fill_and_compare(
                params, writes, targets, lambda params, run=broken: run(bytes(params.buffer), 1, params.num_blocks)
            )


def test_the_model_and_the_source_know_the_same_types() -> None:
    assert [name.lower() for name in _CODES] == list(kernel_model.TYPES)
    assert [dtype.itemsize for dtype in _CODES.values()] == list(kernel_model.SIZES)
    assert kernel_model.BLOCK_THREADS == kernel.BLOCK_THREADS
