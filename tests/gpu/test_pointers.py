"""The check "pointers" on a GPU: what each kind of launch reads, found in the graph; and no false alarm.

A pair is a faulty prep and the right one that does the same job. Kernels are torch's, Triton's, cuBLAS's, and CUDA C
that is compiled here and launched through cuda-python in each form that the driver takes.
"""

from __future__ import annotations

import ctypes
import functools
import time
import weakref
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest
import torch

from graphglue import Mode, PrepContract, Registry, Runner, Slot
from graphglue.audit import pointers
from graphglue.audit.atlas import strange
from graphglue.audit.certificate import Verdict
from graphglue.audit.subject import Subject
from graphglue.device.kernel import checked
from graphglue.device.nodes import nodes_of, read_graph
from graphglue.graphs.cuda import CudaRecorder
from graphglue.graphs.cuda_streams import Lease
from graphglue.preps import paged_decode

triton = pytest.importorskip("triton", reason="needs Triton, whose kernels torch's dispatcher does not see")
tl = pytest.importorskip("triton.language", reason="needs Triton")

DEVICE = "cuda"
ROWS, WIDTH = 8, 64
LADDER = (2, 8)


def audited(prep: Callable[[Any], Any], tables: dict[str, torch.Tensor] | None = None, **changes: Any) -> Subject:
    """Build a runner of one prep over two slots it reads, one that it does not, and its tables."""
    tables = {"t": table()} if tables is None else tables
    contract = PrepContract(
        **{
            "name": "p", "reads": {"x": 0, "rows": 0}, "tables": tuple(tables), "outputs": {},
            "modes": {Mode.DECODE}, **changes,
        }
    )  # fmt: skip
    registry = Registry()
    registry.register(contract)(prep)
    slots = [
        Slot("x", "request", torch.int64, 0, valid=(0, 7)),
        Slot("rows", "request", torch.int64, 0, valid=(0, ROWS - 1)),
        Slot("hidden", "request", torch.int64, 0, valid=(0, 7)),
    ]
    runner = Runner(slots=slots, ladder=LADDER, registry=registry, prep="p", tables=tables, device=DEVICE)
    return Subject.of(runner)[0]


def table(rows: int = ROWS, width: int = WIDTH) -> torch.Tensor:
    return torch.arange(rows * width, device=DEVICE).view(rows, width)


def verdict_of(subject: Subject) -> tuple[Verdict, str]:
    with subject.session():
        verdict, findings = pointers.run(subject)
    torch.cuda.synchronize()
    return verdict, "\n".join(map(str, findings))


def check_passes(subject: Subject) -> None:
    verdict, text = verdict_of(subject)
    assert verdict is Verdict.PASS, text


# Kernels of our own.


@triton.jit
def triton_add(x, y, out, n, B: tl.constexpr):  # type: ignore[no-untyped-def]
    i = tl.arange(0, B)
    tl.store(out + i, tl.load(x + i, mask=i < n) + tl.load(y + i, mask=i < n), mask=i < n)


def by_triton(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    out = torch.empty_like(x)
    triton_add[(1,)](x, y, out, len(x), B=16)
    return out


SOURCE = b"""
struct Operands { int n; const long long* y; char tag[3]; long long* out; };
extern "C" __global__ void add(const long long* x, Operands p, int k) {
    int i = threadIdx.x;
    if (i < p.n) p.out[i] = x[i] + p.y[i] + k;
}
extern "C" __global__ void nothing() {}
"""


class Operands(ctypes.Structure):
    _fields_ = [("n", ctypes.c_int), ("y", ctypes.c_void_p), ("tag", ctypes.c_char * 3), ("out", ctypes.c_void_p)]


@functools.cache
def cubin() -> bytes:
    from cuda.bindings import nvrtc

    program = checked(nvrtc.nvrtcCreateProgram(SOURCE, b"add.cu", 0, [], []))
    major, minor = torch.cuda.get_device_capability()
    checked(nvrtc.nvrtcCompileProgram(program, 1, [f"--gpu-architecture=sm_{major}{minor}".encode()]))
    compiled = b" " * checked(nvrtc.nvrtcGetCUBINSize(program))
    nvrtc.nvrtcGetCUBIN(program, compiled)
    return compiled


@functools.cache
def function(name: bytes = b"add") -> Any:
    from cuda.bindings import driver

    return checked(driver.cuModuleGetFunction(checked(driver.cuModuleLoadData(cubin())), name))


@functools.cache
def library_function() -> Any:
    from cuda.bindings import driver

    library = checked(driver.cuLibraryLoadData(cubin(), [], [], 0, [], [], 0))
    return driver.CUfunction(int(checked(driver.cuLibraryGetKernel(library, b"add"))))


def stream() -> int:
    return torch.cuda.current_stream().cuda_stream


def launch(x: int, y: int, out: torch.Tensor, form: str = "array", k: int = 3) -> torch.Tensor:
    """Launch ``out = x + y + k`` through cuda-python, from addresses."""
    from cuda.bindings import driver

    values = [ctypes.c_void_p(x), Operands(len(out), y, b"abc", out.data_ptr()), ctypes.c_int(k)]
    grid = (1, 1, 1, 16, 1, 1, 0, stream())
    if form == "extra":
        raw = b"".join(bytes(value) for value in values)
        buffer, size = ctypes.create_string_buffer(raw, len(raw)), ctypes.c_size_t(len(raw))
        extra = (ctypes.c_void_p * 5)(1, ctypes.addressof(buffer), 2, ctypes.addressof(size), 0)
        checked(driver.cuLaunchKernel(function(), *grid, 0, ctypes.addressof(extra)))
    else:
        array = (ctypes.c_void_p * 3)(*map(ctypes.addressof, values))
        handle = library_function() if form == "library" else function()
        checked(driver.cuLaunchKernel(handle, *grid, ctypes.addressof(array), 0))
    return out


def by_driver(x: torch.Tensor, y: torch.Tensor, form: str = "array") -> torch.Tensor:
    return launch(x.data_ptr(), y.data_ptr(), torch.empty_like(x), form)


@torch.library.custom_op("graphglue_test::hidden_product", mutates_args=())
def hidden_product(x: torch.Tensor, handle: int) -> torch.Tensor:
    """Multiply by a matrix that only a handle leads to, as an extension does."""
    return x @ HIDDEN[handle]()


@hidden_product.register_fake
def _(x: torch.Tensor, handle: int) -> torch.Tensor:
    return torch.empty_like(x)


HIDDEN: list[Any] = []


# What is found.


class Pair(NamedTuple):
    """A faulty prep and its right twin; ``says`` is in the evidence against the first."""

    faulty: Callable[[Any], Any]
    twin: Callable[[Any], Any]
    says: tuple[str, ...]
    tables: dict[str, torch.Tensor] | None = None
    changes: dict[str, Any] = {}  # noqa: RUF012


PAIRS: dict[str, Callable[[], Pair]] = {}


def pair(make: Callable[[], Pair]) -> Callable[[], Pair]:
    PAIRS[make.__name__] = make
    return make


def _closed_over(add: Callable[..., torch.Tensor], *says: str) -> Pair:
    cache = torch.arange(WIDTH, device=DEVICE)

    def faulty(view: Any) -> Any:
        return {"m": add(view.x, cache)}

    def twin(view: Any) -> Any:
        return {"m": add(view.x, view.tables.t[0, : len(view.x)])}

    return Pair(faulty, twin, ("undeclared", "closure variable 'cache' int64[64]", "other", *says))


@pair
def a_tensor_that_torch_reads() -> Pair:
    return _closed_over(lambda x, y: x + y[: len(x)], "elementwise_kernel")


@pair
def a_tensor_that_triton_reads() -> Pair:
    return _closed_over(by_triton, "triton_add", "parameter 1")


@pair
def a_tensor_in_a_struct_of_a_kernel_of_cuda_python() -> Pair:
    return _closed_over(by_driver, "add", "parameter 1, byte 8")


@pair
def a_tensor_in_a_buffer_of_parameters() -> Pair:
    return _closed_over(functools.partial(by_driver, form="extra"), "add", "parameter 1, byte 8")


@pair
def a_tensor_that_a_library_kernel_reads() -> Pair:
    return _closed_over(functools.partial(by_driver, form="library"), "add", "parameter 1, byte 8")


def _weights(dtype: torch.dtype, width: int) -> Pair:
    weights = torch.eye(width, device=DEVICE).to(dtype)
    HIDDEN.append(weakref.ref(weights))
    handle, engine = len(HIDDEN) - 1, SimpleNamespace(weights=weights)

    def rows(view: Any) -> torch.Tensor:
        return view.x.to(dtype)[:, None].expand(-1, width).contiguous()

    def faulty(view: Any) -> Any:
        return {"m": hidden_product(rows(view), handle)}

    def twin(view: Any) -> Any:
        return {"m": rows(view) @ view.tables.w}

    PAIRS_ALIVE.append(engine)
    spelled = f"{str(dtype).removeprefix('torch.')}[{width}, {width}]"
    return Pair(faulty, twin, ("undeclared", spelled), {"w": weights.clone()})


PAIRS_ALIVE: list[Any] = []


@pair
def weights_of_a_matrix_product_in_float32() -> Pair:
    return _weights(torch.float32, 64)


@pair
def weights_of_a_matrix_product_in_bfloat16() -> Pair:
    return _weights(torch.bfloat16, 1024)


@pair
def a_slot_that_is_not_declared() -> Pair:
    def faulty(view: Any) -> Any:
        x = view.x
        beside = 256 // x.element_size() * 2  # slots stand one behind the other, each from a multiple of 256 bytes
        return {"m": x.as_strided((len(x),), (1,), x.storage_offset() + beside) + x}

    return Pair(faulty, lambda view: {"m": view.rows + view.x}, ("slot hidden", "does not read"))


@pair
def a_table_past_the_view() -> Pair:
    t = table()
    return Pair(
        lambda view: {"m": t[view.rows]},
        lambda view: {"m": view.tables.t[view.rows]},
        ("live table t", "view.tables"),
        {"t": t},
    )


@pair
def memory_that_was_freed() -> Pair:
    def build() -> int:
        return torch.zeros(1 << 19, dtype=torch.int64, device=DEVICE).data_ptr()  # too large to be given out again

    address = build()
    return Pair(
        lambda view: {"m": launch(view.x.data_ptr(), address, torch.empty_like(view.x))},
        lambda view: {"m": by_driver(view.x, view.tables.t)},
        ("nobody holds", "freed", f"{address:#x}"),
    )


@pair
def what_a_warm_up_kept_for_a_kernel_of_its_own() -> Pair:
    kept: dict[int, torch.Tensor] = {}

    def faulty(view: Any) -> Any:
        if len(view.x) not in kept:
            kept[len(view.x)] = view.x * 2
        return {"m": by_driver(view.x, kept[len(view.x)])}

    return Pair(faulty, lambda view: {"m": by_driver(view.x, view.x * 2)}, ("kept", "closure variable 'kept'"))


@pair
def what_a_call_leaves_to_the_next() -> Pair:
    last: list[torch.Tensor] = []

    def faulty(view: Any) -> Any:
        before = last[0][: len(view.x)] if last else view.x
        last[:] = [torch.zeros(8, dtype=torch.int64, device=DEVICE) + before.sum()]
        return {"m": view.x + before}

    return Pair(faulty, lambda view: {"m": view.x + view.x.sum()}, ("memory that a warm-up made",))


@pair
def page_locked_memory_that_a_kernel_reads() -> Pair:
    pinned = torch.arange(WIDTH).pin_memory()
    return Pair(
        lambda view: {"m": launch(view.x.data_ptr(), pinned.data_ptr(), torch.empty_like(view.x))},
        lambda view: {"m": by_driver(view.x, view.tables.t)},
        ("host memory", "parameter 1, byte 8", "int64[64]"),
    )


def _copied(source: torch.Tensor, *says: str) -> Pair:
    def faulty(view: Any) -> Any:
        from cuda.bindings import driver

        out = torch.empty_like(view.x)
        checked(driver.cuMemcpyHtoDAsync(out.data_ptr(), source.data_ptr(), out.nbytes, stream()))
        return {"m": out}

    return Pair(faulty, lambda view: {"m": view.tables.t[0, : len(view.x)].clone()}, ("memcpy node", "source", *says))


@pair
def a_copy_from_page_locked_memory() -> Pair:
    return _copied(torch.arange(WIDTH).pin_memory(), "host memory")


@pair
def a_copy_from_pageable_memory() -> Pair:
    return _copied(torch.arange(WIDTH), "pageable host memory")


@pair
def a_copy_to_the_host() -> Pair:
    pinned = torch.zeros(WIDTH, dtype=torch.int64).pin_memory()

    def faulty(view: Any) -> Any:
        from cuda.bindings import driver

        checked(driver.cuMemcpyDtoHAsync(pinned.data_ptr(), view.x.data_ptr(), view.x.nbytes, stream()))
        return {"m": view.x + 1}

    return Pair(faulty, lambda view: {"m": view.x + 1}, ("memcpy node", "destination", "host memory"))


@pair
def a_memset_of_a_buffer_of_its_own() -> Pair:
    buffer = torch.zeros(WIDTH, dtype=torch.int32, device=DEVICE)

    def cleared(out: torch.Tensor) -> torch.Tensor:
        from cuda.bindings import driver

        checked(driver.cuMemsetD32Async(out.data_ptr(), 0, out.numel(), stream()))
        return out

    def faulty(view: Any) -> Any:
        cleared(buffer)
        return {"m": view.x + 1}

    def twin(view: Any) -> Any:
        return {"m": cleared(torch.empty(8, dtype=torch.int32, device=DEVICE))}

    return Pair(faulty, twin, ("memset node", "undeclared", "closure variable 'buffer' int32[64]"))


@pair
def a_buffer_that_is_kept_and_returned() -> Pair:
    buffers = {n: torch.zeros(n, dtype=torch.int64, device=DEVICE) for n in LADDER}

    def faulty(view: Any) -> Any:
        buffers[len(view.x)].copy_(view.x)
        return {"m": view.x + buffers[len(view.x)]}

    def twin(view: Any) -> Any:
        return {"kept": buffers[len(view.x)].copy_(view.x), "m": view.x + 1}

    return Pair(faulty, twin, ("undeclared",), None, {"writes": ("kept",)})


@pair
def memory_that_is_not_torchs() -> Pair:
    from cuda.bindings import driver

    torch.zeros(1, device=DEVICE)
    address = int(checked(driver.cuMemAlloc(1 << 12)))
    checked(driver.cuMemsetD32(address, 0, 1 << 10))
    return Pair(
        lambda view: {"m": launch(view.x.data_ptr(), address, torch.empty_like(view.x))},
        lambda view: {"m": by_driver(view.x, view.tables.t)},
        ("undeclared device memory", f"{address:#x}"),
    )


@pair
def managed_memory() -> Pair:
    from cuda.bindings import driver

    torch.zeros(1, device=DEVICE)
    address = int(checked(driver.cuMemAllocManaged(1 << 12, 1)))  # CU_MEM_ATTACH_GLOBAL
    checked(driver.cuMemsetD32(address, 0, 1 << 10))
    return Pair(
        lambda view: {"m": launch(view.x.data_ptr(), address, torch.empty_like(view.x))},
        lambda view: {"m": by_driver(view.x, view.tables.t)},
        ("managed memory", f"{address:#x}"),
    )


@ctypes.CFUNCTYPE(None, ctypes.c_void_p)
def on_the_host(user: Any) -> None:
    """Do nothing, on the host."""


@pair
def a_function_on_the_host() -> Pair:
    def faulty(view: Any) -> Any:
        from cuda.bindings import driver

        checked(driver.cuLaunchHostFunc(stream(), ctypes.cast(on_the_host, ctypes.c_void_p).value, 0))
        return {"m": view.x + 1}

    return Pair(faulty, lambda view: {"m": view.x + 1}, ("host node", "function on the host"))


@pytest.mark.parametrize("name", PAIRS)
def test_a_faulty_prep_is_found_with_its_evidence(name: str) -> None:
    made = PAIRS[name]()
    verdict, text = verdict_of(audited(made.faulty, made.tables))
    assert verdict is Verdict.FAIL, text
    for part in made.says:
        assert part in text, f"{part!r} is not in:\n{text}"


@pytest.mark.parametrize("name", PAIRS)
def test_its_right_twin_passes(name: str) -> None:
    made = PAIRS[name]()
    check_passes(audited(made.twin, made.tables, **made.changes))


def test_a_fault_at_one_bucket_alone_is_found() -> None:
    cache = torch.arange(WIDTH, device=DEVICE)
    verdict, text = verdict_of(audited(lambda view: {"m": view.x + (cache[:8] if len(view.x) == 8 else 1)}))
    assert verdict is Verdict.FAIL, text
    assert "8 requests" in text


def test_a_declared_effect_is_no_fault_and_leaves_the_table_alone() -> None:
    t = table()
    before = t.clone()

    def prep(view: Any) -> Any:
        view.tables.t[0].add_(1)
        return {"m": view.tables.t[view.rows]}

    check_passes(audited(prep, {"t": t}, effects=("t",)))
    assert torch.equal(t, before)


def test_a_kernel_that_names_no_memory_is_unknown() -> None:
    def prep(view: Any) -> Any:
        from cuda.bindings import driver

        checked(driver.cuLaunchKernel(function(b"nothing"), 1, 1, 1, 1, 1, 1, 0, stream(), 0, 0))
        return {"m": view.x + 1}

    verdict, text = verdict_of(audited(prep))
    assert verdict is Verdict.UNKNOWN, text
    assert "nothing" in text


def test_random_numbers_are_not_passed() -> None:
    verdict, text = verdict_of(audited(lambda view: {"m": torch.rand(len(view.x), device=DEVICE)}))
    assert verdict is not Verdict.PASS, text


def test_a_prep_that_can_not_be_recorded_fails_with_the_reason() -> None:
    verdict, text = verdict_of(audited(lambda view: {"m": view.x + view.x.sum().item()}))
    assert verdict is Verdict.FAIL
    assert "can not be recorded" in text
    assert "item" in text


# No false alarm.


def _side_stream(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    side, here = torch.cuda.Stream(), torch.cuda.current_stream()
    side.wait_stream(here)
    with torch.cuda.stream(side):
        doubled = x * 2
    here.wait_stream(side)
    return doubled + y


def _own_memory(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    """Use memory that the graph allocates itself; outside a capture plain memory does."""
    from cuda.bindings import driver

    out = torch.empty_like(x)
    address = checked(driver.cuMemAllocAsync(256, stream()))
    checked(driver.cuMemcpyDtoDAsync(address, x.data_ptr(), x.nbytes, stream()))
    launch(int(address), y.data_ptr(), out)
    checked(driver.cuMemFreeAsync(address, stream()))
    return out


OPS: dict[str, Callable[[torch.Tensor, torch.Tensor], Any]] = {
    "add": lambda x, y: x + y,
    "cat": lambda x, y: torch.cat([x, y]),
    "many": lambda x, y: (torch.cat([x, y] * 9), torch.stack([x, y], 1)),
    "stack": lambda x, y: torch.stack([x, y]),
    "foreach": lambda x, y: torch._foreach_add([x, y], 1),
    "index": lambda x, y: x[y % len(x)],
    "two indices": lambda x, y: torch.stack([x, y])[y % 2, x % len(x)],
    "index_put": lambda x, y: torch.zeros_like(x).index_put_((y % len(x),), x),
    "scatter": lambda x, y: torch.zeros_like(x).scatter_(0, y % len(x), x),
    "where": lambda x, y: torch.where(x > y, x, y),
    "sort": lambda x, y: tuple(torch.sort(x * y)),
    "cumsum": lambda x, y: torch.cumsum(x + y, 0),
    "strided": lambda x, y: (x.expand(4, len(x)).t().contiguous(), y[::2] + x[::2]),
    "reduce": lambda x, y: (x.expand(64, len(x)).sum(0), y.max(), y.min(), (x * y).float().mean()),
    "large reduce": lambda x, y: x.float()[:, None].expand(-1, 1 << 16).sum(),
    "topk": lambda x, y: tuple(torch.topk(x, 2)),
    "repeat": lambda x, y: (torch.repeat_interleave(x, 3), x.repeat(3)),
    "search": lambda x, y: (torch.searchsorted(x, y), torch.bucketize(y, x)),
    "move": lambda x, y: (torch.nn.functional.pad(x, (0, 4)), torch.flip(x, (0,)), torch.roll(y, 1)),
    "make": lambda x, y: (torch.arange(len(x), device=DEVICE) + x, torch.full((4,), 3, device=DEVICE)),
    "outer": lambda x, y: (torch.tril(x.expand(len(x), len(x))), torch.outer(x, y)),
    "casts": lambda x, y: (x.to(torch.int32), y.float().softmax(0), x.bool() & y.bool(), (x.float() / 3).round()),
    "take": lambda x, y: (torch.gather(x, 0, y % len(x)), x.index_select(0, y % len(x))),
    "one_hot": lambda x, y: torch.nn.functional.one_hot(x % 8, 8),
    "copy": lambda x, y: (x.clone(), torch.empty_like(y).copy_(y)),
    "triton": by_triton,
    "driver": by_driver,
    "buffer of parameters": functools.partial(by_driver, form="extra"),
    "library": functools.partial(by_driver, form="library"),
    "side stream": _side_stream,
    "memory of the graph's own": _own_memory,
}


@pytest.fixture
def leftovers() -> list[torch.Tensor]:
    """Run every operation on tensors of the engine, so that their addresses stand on the stack; keep them alive."""
    decoys = [torch.arange(16, device=DEVICE) for _ in range(8)]
    for first, second in zip(decoys, decoys[1:]):
        for run in OPS.values():
            run(first, second)
    torch.cat(decoys * 20)
    torch._foreach_add(decoys * 4, 1)
    torch.cuda.synchronize()
    return decoys


@pytest.mark.parametrize("name", OPS)
def test_an_operation_over_slots_and_tables_raises_no_alarm(name: str, leftovers: list[torch.Tensor]) -> None:
    run = OPS[name]
    check_passes(audited(lambda view: run(view.x, view.tables.t[0, : len(view.x)])))
    check_passes(audited(lambda view: run(view.x, view.rows)))


def test_leftovers_in_unset_fields_do_occur_so_the_second_recording_is_needed(
    leftovers: list[torch.Tensor], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without it the check would blame preps for what stood on the stack."""
    monkeypatch.setattr(Lease, "claim_workspaces", lambda self: None)  # its products write over the stack
    seen = 0
    for run in OPS.values():
        subject = audited(lambda view, run=run: run(view.x, view.rows))
        with subject.session():
            for key in subject.keys:
                pointers._fill(subject, key)
                seen += len(strange(pointers.look(subject, key).sights))
    print(f"\n{seen} strange words in {len(OPS)} correct preps before the second recording")
    assert seen


SHAPES = [
    (8, 64, 64, torch.bfloat16), (16, 2048, 2048, torch.bfloat16), (256, 4096, 256, torch.bfloat16),
    (1024, 1024, 1024, torch.bfloat16), (16, 64, 64, torch.float32), (8, 65536, 8, torch.float32),
    (1, 4096, 4096, torch.float32), (64, 512, 512, torch.float16),
]  # fmt: skip


@pytest.mark.parametrize(("m", "k", "n", "dtype"), SHAPES, ids=[f"{m}x{k}x{n} {d}" for m, k, n, d in SHAPES])
def test_matrix_products_and_their_workspaces_raise_no_alarm(m: int, k: int, n: int, dtype: torch.dtype) -> None:
    tables = {"w": torch.randn(k, n, device=DEVICE).to(dtype), "bias": torch.randn(n, device=DEVICE).to(dtype)}

    def prep(view: Any) -> Any:
        rows = view.x.sum().to(dtype).expand(m, k).contiguous()
        w, bias = view.tables.w, view.tables.bias
        return {"mm": rows @ w, "linear": torch.nn.functional.linear(rows, w.t(), bias), "bmm": rows[None] @ w[None]}

    check_passes(audited(prep, tables))


def test_a_compiled_prep_raises_no_alarm() -> None:
    check_passes(audited(lambda view: {"m": torch.cumsum(view.x * 2 + view.rows, 0) % 7}, compile=True))


def test_shipped_preps_raise_no_alarm() -> None:
    registry = Registry()
    registry.register(paged_decode.CONTRACT)(paged_decode.make(16))
    runner = Runner(
        slots=paged_decode.slots(), ladder=[1, 2, 4, 8, 16, 32], registry=registry, prep=paged_decode.CONTRACT.name,
        tables={"req_to_token": table(64, 512).to(torch.int32)}, device=DEVICE,
    )  # fmt: skip
    for subject in Subject.of(runner):
        check_passes(subject)


def test_preps_without_a_contract_are_looked_at_too() -> None:
    cache = torch.arange(8, device=DEVICE)
    runner = Runner(
        slots=[Slot("x", "request", torch.int64, 0, valid=(0, 7))], ladder=LADDER, device=DEVICE,
        prep=[lambda view: {"m": view.x + 1}], tables={},
    )  # fmt: skip
    check_passes(Subject.of(runner)[0])
    runner = Runner(
        slots=[Slot("x", "request", torch.int64, 0, valid=(0, 7))], ladder=LADDER, device=DEVICE,
        prep=[lambda view: {"m": view.x + cache[: len(view.x)]}], tables={},
    )  # fmt: skip
    assert verdict_of(Subject.of(runner)[0])[0] is Verdict.FAIL


# The walk.


def test_nodes_of_child_graphs_are_read() -> None:
    from cuda.bindings import driver

    x, y = torch.arange(16, device=DEVICE), torch.ones(16, dtype=torch.int64, device=DEVICE)
    recorder = CudaRecorder(DEVICE)
    by_triton(x, y)
    recording = recorder.record(lambda: by_triton(x, y))
    alone = nodes_of(recording.graph)
    inner = checked(driver.cuGraphCreate(0))
    checked(driver.cuGraphAddChildGraphNode(inner, None, 0, driver.CUgraph(recording.graph.raw_cuda_graph())))
    outer = checked(driver.cuGraphCreate(0))
    checked(driver.cuGraphAddEmptyNode(outer, None, 0))
    checked(driver.cuGraphAddChildGraphNode(outer, None, 0, inner))
    found = read_graph(int(outer))
    assert [node.kind for node in found] == ["empty", *(node.kind for node in alone)]
    assert [node.words for node in found[1:]] == [node.words for node in alone]
    assert {word.value for node in found for word in node.words} >= {x.data_ptr(), y.data_ptr()}
    assert found[1].place == "1.0.0"
    for graph in (inner, outer):
        checked(driver.cuGraphDestroy(graph))


def test_a_kernel_of_which_the_addresses_are_known_is_read_word_for_word() -> None:
    """The reference is what was handed to the launch."""
    x, y = torch.arange(16, device=DEVICE), torch.ones(16, dtype=torch.int64, device=DEVICE)
    out = torch.empty_like(x)
    recorder = CudaRecorder(DEVICE)
    for form in ("array", "extra", "library"):
        launch(x.data_ptr(), y.data_ptr(), out, form)
        recording = recorder.record(lambda form=form: launch(x.data_ptr(), y.data_ptr(), out, form))
        (node,) = nodes_of(recording.graph)
        assert node.name == "add", node
        assert [(word.value, word.place) for word in node.words] == [
            (x.data_ptr(), "parameter 0"), (16, "parameter 1"), (y.data_ptr(), "parameter 1, byte 8"),
            (int.from_bytes(b"abc", "little"), "parameter 1, byte 16"), (out.data_ptr(), "parameter 1, byte 24"),
        ]  # fmt: skip


def test_the_time_of_a_look_is_told() -> None:
    def prep(view: Any) -> Any:
        y = view.tables.t[view.rows]
        for step in range(39):
            y = y + step
        return {"m": y}

    subject = audited(prep)
    with subject.session():
        key = subject.keys[-1]
        pointers._fill(subject, key)
        pointers.look(subject, key)
        begin = time.perf_counter()
        seen = pointers.look(subject, key)
        whole = time.perf_counter() - begin
        recording = subject.record(key)
        begin = time.perf_counter()
        nodes = nodes_of(recording.graph)
        walk = time.perf_counter() - begin
        begin = time.perf_counter()
        verdict, _ = pointers.run(subject)
        check = time.perf_counter() - begin
    assert len(nodes) == len(seen.nodes) == 40
    assert verdict is Verdict.PASS
    print(
        f"\n40 nodes: walk {walk * 1e3:.2f} ms; a look with its recording {whole * 1e3:.1f} ms; "
        f"the check of {len(subject.keys)} keys {check * 1e3:.1f} ms"
    )
