"""The fill kernel without a GPU, twice: an interpreter of its parameter struct, and its own source built for the CPU.

The interpreter is plain Python written from the layout in ``fill.cu``; it shares no code with ``packing.py``.
It reads the packed bytes and follows their addresses, so the tensors must be CPU memory. The build runs
``fill.cu`` itself, thread after thread, behind a few definitions that a C++ compiler lacks.

``HostKernel`` puts either in the place of the GPU, so that ``KernelFill`` runs whole on the CPU.
"""

from __future__ import annotations

import ctypes
import functools
import math
import shutil
import struct
import subprocess
import tempfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch

from graphglue.core.slots import Slot
from graphglue.device import kernel
from graphglue.device.kernel_fill import KernelFill
from graphglue.device.streams import InFlight

BLOCK_THREADS = 256

# Element types by their code in fill.cu.
TYPES = ("u8", "i8", "u16", "i16", "u32", "i32", "u64", "i64", "f16", "bf16", "f32", "f64")
SIZES = (1, 1, 2, 2, 4, 4, 8, 8, 2, 2, 4, 8)
MEMORY, INLINE, CONSTANT = 0, 1, 2
PAD, REPEAT_LAST = 0, 1

_SHAPE = struct.Struct("<QIIBBBBI")
_FIXED = struct.Struct("<QIIIIII")


class SlotParams(NamedTuple):
    """What the struct says of one slot, in the words of fill.cu."""

    source: int
    pad: int
    head: int
    source_pitch: int
    kind: int
    load: int
    rule: int
    target: int
    span: int
    inner: int
    outer: int
    target_pitch: int
    store: int
    blocks: int


def read_params(params: bytes, num_slots: int) -> list[SlotParams]:
    """Read the struct's three arrays: sources of 8 bytes, shapes of 24, fixed parts of 32."""
    slots = []
    for slot in range(num_slots):
        (source,) = struct.unpack_from("<Q", params, 8 * slot)
        pad, head, pitch, kind, load, rule, *_ = _SHAPE.unpack_from(params, 8 * num_slots + 24 * slot)
        fixed = _FIXED.unpack_from(params, 32 * num_slots + 32 * slot)
        slots.append(SlotParams(source, pad, head, pitch, kind, load, rule, *fixed))
    return slots


def interpret(params: bytes, num_slots: int, num_blocks: int) -> None:
    """Fill what the struct says. A slot that is given too few blocks stays as it is."""
    slots, payload = read_params(params, num_slots), params[64 * num_slots :]
    for slot in slots:
        if 0 < slot.blocks <= num_blocks:
            _fill(slot, payload)


def _fill(slot: SlotParams, payload: bytes) -> None:
    size = SIZES[slot.store]
    for block in range(slot.outer):
        for within in range(slot.span):
            address = slot.target + (block * slot.target_pitch + within) * size
            bits = _element(slot, payload, block, within) & (1 << 8 * size) - 1
            ctypes.memmove(address, bits.to_bytes(size, "little"), size)


def _element(slot: SlotParams, payload: bytes, block: int, within: int) -> int:
    """Give the bits of one element of the target."""
    if within < slot.head:
        return _source_bits(slot, payload, block * slot.source_pitch + within)
    if slot.rule == PAD:
        return slot.pad
    if slot.head == 0:
        return 0
    row_start = slot.head - slot.inner
    return _source_bits(slot, payload, block * slot.source_pitch + row_start + within % slot.inner)


def _source_bits(slot: SlotParams, payload: bytes, index: int) -> int:
    if slot.kind == CONSTANT:
        return slot.source
    size = SIZES[slot.load]
    if slot.kind == INLINE:
        begin = slot.source + index * size
        assert begin + size <= len(payload), f"element {index} lies at {begin}, behind the payload of {len(payload)}"
        raw = payload[begin : begin + size]
    else:
        raw = ctypes.string_at(slot.source + index * size, size)
    return convert(int.from_bytes(raw, "little"), slot.load, slot.store)


def convert(bits: int, load: int, store: int) -> int:
    """Turn the bits of one element type into those of another of the same kind."""
    if load == store:
        return bits
    if TYPES[load][0] in "ui":
        size = SIZES[load]
        signed = TYPES[load][0] == "i"
        return int.from_bytes(bits.to_bytes(size, "little"), "little", signed=signed) % (1 << 64)
    return _encode_float(_decode_float(bits, load), store)


def _decode_float(bits: int, code: int) -> float:
    if TYPES[code] == "bf16":  # the upper half of a float32
        bits, code = bits << 16, TYPES.index("f32")
    form = {"f16": "<e", "f32": "<f", "f64": "<d"}[TYPES[code]]
    return struct.unpack(form, bits.to_bytes(SIZES[code], "little"))[0]


def _encode_float(value: float, code: int) -> int:
    """Round to the nearest, ties to even; a double goes by way of float, as torch casts."""
    if TYPES[code] == "f64":
        return int(np.float64(value).view(np.uint64))
    with np.errstate(over="ignore"):
        single = np.float32(value)
        if TYPES[code] == "f16":
            return int(np.float16(single).view(np.uint16))
    word = int(single.view(np.uint32))
    if TYPES[code] == "f32":
        return word
    if math.isnan(value):
        return 0x7FFF
    return word + 0x7FFF + (word >> 16 & 1) >> 16


# The kernel's own source, built for the CPU.

_SHIM = r"""
#include <algorithm>
#include <cmath>
#include <cstring>
#define __device__
#define __global__
#define __grid_constant__
#define __forceinline__ inline
using std::max;
using std::min;
struct uint4 { unsigned x, y, z, w; };
static uint4 make_uint4(unsigned x, unsigned y, unsigned z, unsigned w) { return {x, y, z, w}; }
template <class To, class From> static To as(From from) { To to; memcpy(&to, &from, sizeof to); return to; }
static unsigned __float_as_uint(float f) { return as<unsigned>(f); }
static float __uint_as_float(unsigned u) { return as<float>(u); }
static double __longlong_as_double(long long l) { return as<double>(l); }
static long long __double_as_longlong(double d) { return as<long long>(d); }
static struct { unsigned x, y; } blockIdx, threadIdx, blockDim, gridDim;

static float from_half(unsigned short h) {
    const int exponent = h >> 10 & 31, mantissa = h & 1023;
    const float sign = h >> 15 ? -1.f : 1.f;
    if (exponent == 31) return mantissa ? NAN : sign * INFINITY;
    return sign * (exponent ? ldexpf(1024 + mantissa, exponent - 25) : ldexpf(mantissa, -24));
}
static unsigned short to_half(float f) {
    const unsigned short sign = __float_as_uint(f) >> 31 << 15;
    if (std::isnan(f)) return 0x7fff;
    int exponent;
    f = frexpf(fabsf(f), &exponent);  // f in [0.5, 1)
    if (f == 0) return sign;
    if (std::isinf(f) || exponent > 16) return sign | 0x7c00;
    const int bits = exponent < -13 ? 24 + exponent : 11;  // subnormals have fewer
    const float rounded = bits < 0 ? 0 : rintf(ldexpf(f, bits));
    const float value = ldexpf(rounded, exponent - bits);
    if (value >= 65520.f) return sign | 0x7c00;
    const unsigned word = __float_as_uint(value);
    if (value < ldexpf(1, -14)) return sign | (unsigned short)ldexpf(value, 24);
    return sign | ((word >> 23) - 112) << 10 | (word >> 13 & 1023);
}
static unsigned short to_bfloat(float f) {
    const unsigned word = __float_as_uint(f);
    return std::isnan(f) ? 0x7fff : word + 0x7fff + (word >> 16 & 1) >> 16;
}
static unsigned short half;
static void ptx(const char* text, float& value, unsigned short& half, unsigned long long bits) {
    if (strstr(text, "cvt.f32.f16")) value = from_half(bits);
    else if (strstr(text, "cvt.rn.f16.f32")) half = to_half(value);
    else if (strstr(text, "cvt.rn.bf16.f32")) half = to_bfloat(value);
    else std::abort();
}
#define asm(...) ptx(#__VA_ARGS__, value, half, bits)
"""

_ENTRY = r"""
extern "C" unsigned struct_bytes() { return sizeof(Params); }
extern "C" void run(const Params* params, unsigned blocks, unsigned threads) {
    gridDim.x = blocks, gridDim.y = SLOTS, blockDim.x = threads;
    for (unsigned block = 0; block < blocks * SLOTS; block++)
        for (unsigned thread = 0; thread < threads; thread++) {
            blockIdx.x = block % blocks, blockIdx.y = block / blocks, threadIdx.x = thread;
            graphglue_fill(*params);
        }
}
"""


class CpuBuild:
    """Run fill.cu itself for structs of one number of slots and one payload size."""

    def __init__(self, library: ctypes.CDLL) -> None:
        self._library = library
        self.struct_bytes = library.struct_bytes()

    def __call__(self, params: bytes, num_slots: int, num_blocks: int) -> None:
        """Fill what the struct says; a payload that is cut short is followed by junk."""
        assert len(params) <= self.struct_bytes
        memory = ctypes.create_string_buffer(self.struct_bytes + 16)
        ctypes.memset(memory, 0xA5, len(memory))
        address = -(-ctypes.addressof(memory) // 16) * 16
        ctypes.memmove(address, bytes(params), len(params))
        self._library.run(ctypes.c_void_p(address), num_blocks, BLOCK_THREADS)


@functools.cache
def build_for_cpu(num_slots: int, payload_bytes: int = 4096) -> CpuBuild:
    """Build fill.cu with g++; skip the test where there is none."""
    compiler = shutil.which("g++")
    if compiler is None:
        pytest.skip("needs g++, to build fill.cu for the CPU")
    with tempfile.TemporaryDirectory() as folder:
        source, library = Path(folder, "fill.cpp"), Path(folder, "fill.so")
        source.write_text(_SHIM + kernel.source_text() + _ENTRY)
        macros = [f"-DSLOTS={num_slots}", f"-DPAYLOAD_BYTES={payload_bytes}"]
        options = ["-std=c++17", "-O1", "-fno-strict-aliasing", "-shared", "-fPIC", "-w", *macros]
        made = subprocess.run([compiler, *options, "-o", library, source], capture_output=True, text=True, check=False)
        assert made.returncode == 0, made.stderr
        return CpuBuild(ctypes.CDLL(str(library)))


# KernelFill, whole, without a GPU.


class OnDevice(torch.Tensor):
    """A CPU tensor that says it is on a GPU, so that it is packed by address."""

    is_cuda = property(lambda self: True)
    is_cpu = property(lambda self: False)


def on_device(tensor: torch.Tensor, offset: int = 0) -> OnDevice:
    """Copy a tensor to "the device", at an element offset in larger memory."""
    base = torch.zeros(tensor.numel() + offset, dtype=tensor.dtype)
    base[offset:] = tensor.reshape(-1)
    return base[offset:].view(tensor.shape).as_subclass(OnDevice)


class PinnedPool(InFlight):
    """Stand in for the memory in flight: fresh blocks, and a list of what is held."""

    def __init__(self) -> None:  # no driver here
        self.opened: list[tuple[Any, Any]] = []
        self.max_steps = 10**9

    def block(self, num_bytes: int) -> torch.Tensor:
        """Give a block that is full of junk."""
        return torch.full((max(4096, num_bytes),), 0x5A, dtype=torch.uint8)


class HostKernel:
    """Put a CPU implementation in the place of the compiled kernel.

    Args:
        monkeypatch: undoes it.
        run: ``interpret``, or None for the CPU build of fill.cu with the struct's own sizes.
        limit: what the driver says is the largest struct.
    """

    def __init__(
        self, monkeypatch: pytest.MonkeyPatch, run: Callable[..., None] | None = interpret, limit: int = 32764
    ) -> None:
        self.run, self.launched = run, [0]
        self.struct_sizes: list[int] = []
        monkeypatch.setattr(kernel, "largest_struct_bytes", lambda: limit)
        monkeypatch.setattr(kernel, "load_fill", lambda index, num_slots, payload_bytes, source: SimpleNamespace(
            num_slots=num_slots, payload_bytes=payload_bytes
        ))  # fmt: skip
        monkeypatch.setattr(kernel, "node_params", self._node_params)
        monkeypatch.setattr(kernel, "launch", self._launch)

    def fill(
        self, slots: Mapping[str, Slot], targets: Mapping[str, torch.Tensor], owned: Sequence[tuple[int, int]]
    ) -> KernelFill:
        """Build a fill over CPU tensors."""
        order: Any = SimpleNamespace(current=0)
        pool: Any = PinnedPool()
        return KernelFill(slots, targets, torch.device("cpu"), order, pool, owned)

    def _node_params(self, function: Any, num_blocks: int, num_slots: int, kernel_params: int) -> Any:
        assert num_slots == function.num_slots
        return SimpleNamespace(function=function, num_blocks=num_blocks, kernel_params=kernel_params)

    def _launch(self, params: Any, stream: int) -> None:
        num_slots, payload_bytes = params.function.num_slots, params.function.payload_bytes
        address = ctypes.c_void_p.from_address(params.kernel_params).value
        self.struct_sizes.append(64 * num_slots + payload_bytes)
        struct_bytes = ctypes.string_at(address, self.struct_sizes[-1])
        run = self.run or build_for_cpu(num_slots, payload_bytes)
        run(struct_bytes, num_slots, params.num_blocks)
