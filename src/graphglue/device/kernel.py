"""The fill kernel: CUDA C compiled with NVRTC, once per device and shape of its parameter struct."""

from __future__ import annotations

import functools
import hashlib
import importlib.resources
from typing import Any

import torch

from graphglue.errors import GraphGlueError

SMALL_BYTES = 4096  # what every driver passes to a kernel by value
LARGE_BYTES = 32764  # since CUDA 12.1; source: CUDA programming guide, __grid_constant__ parameters
_LARGE_SINCE = 12010
BLOCK_THREADS = 256


class KernelUnavailable(GraphGlueError):
    """The fill kernel can not be used here; the fill falls back to torch operations, and says so."""


def source_text() -> str:
    """Read the kernel's CUDA C."""
    return importlib.resources.files("graphglue.device").joinpath("fill.cu").read_text()


def source_hash() -> str:
    """Hash the kernel's CUDA C; part of what a compiled kernel is cached under."""
    return hashlib.sha256(source_text().encode()).hexdigest()[:16]


def compile_fill(num_slots: int, payload_bytes: int, architecture: str) -> bytes:
    """Compile the kernel for one architecture, such as ``"sm_90"``; needs no GPU.

    Args:
        num_slots: slots in the parameter struct, at least 1.
        payload_bytes: bytes for host sources in it, a multiple of 16.
        architecture: what to compile for.

    Raises:
        KernelUnavailable: NVRTC is missing, or refuses the source; the compiler's log is in the text.
    """
    try:
        from cuda.bindings import nvrtc

        (failed, program) = nvrtc.nvrtcCreateProgram(source_text().encode(), b"fill.cu", 0, [], [])
    except Exception as error:  # cuda-python reports a missing library in several ways
        raise KernelUnavailable(f"NVRTC is not usable: {error!r}; install nvidia-cuda-nvrtc") from error
    options = [f"--gpu-architecture={architecture}", f"-DSLOTS={num_slots}", f"-DPAYLOAD_BYTES={payload_bytes}"]
    encoded = [option.encode() for option in (*options, "--std=c++17")]
    (failed,) = nvrtc.nvrtcCompileProgram(program, len(encoded), encoded)
    if int(failed):
        log = _nvrtc_bytes(program, nvrtc.nvrtcGetProgramLogSize, nvrtc.nvrtcGetProgramLog)
        raise KernelUnavailable(f"NVRTC refused the fill kernel for {architecture}: {log.decode().strip()}")
    cubin = _nvrtc_bytes(program, nvrtc.nvrtcGetCUBINSize, nvrtc.nvrtcGetCUBIN)
    nvrtc.nvrtcDestroyProgram(program)
    return cubin


@functools.cache
def load_fill(device_index: int, num_slots: int, payload_bytes: int, _source: str) -> Any:
    """Load the kernel on a device and give its function; the same one on every call.

    Sync: none. The module is never unloaded: graphs hold its function.
    """
    from cuda.bindings import driver

    major, minor = torch.cuda.get_device_capability(device_index)
    cubin = compile_fill(num_slots, payload_bytes, f"sm_{major}{minor}")
    with torch.cuda.device(device_index):
        torch.cuda.current_stream()  # makes the device's context current
        module = checked(driver.cuModuleLoadData(cubin))
        return checked(driver.cuModuleGetFunction(module, b"graphglue_fill"))


def largest_struct_bytes() -> int:
    """Give the size limit of a by-value parameter struct on this driver."""
    from cuda.bindings import driver

    return LARGE_BYTES if checked(driver.cuDriverGetVersion()) >= _LARGE_SINCE else SMALL_BYTES


def checked(result: tuple[Any, ...]) -> Any:
    """Unpack a driver call.

    Raises:
        GraphGlueError: the driver refused; the text names its error.
    """
    if int(result[0]):
        raise GraphGlueError(f"the CUDA driver refused: {result[0]!r}")
    return None if len(result) == 1 else result[1] if len(result) == 2 else result[1:]


def _nvrtc_bytes(program: Any, size: Any, read: Any) -> bytes:
    text = b" " * checked(size(program))
    read(program, text)
    return text


def node_params(function: Any, num_blocks: int, num_slots: int, kernel_params: int) -> Any:
    """Build the parameters of a launch or a graph node.

    Args:
        function: the loaded kernel.
        num_blocks: blocks of ``BLOCK_THREADS`` threads that the largest slot takes.
        num_slots: slots; each has a row of blocks.
        kernel_params: the address of the array of parameter addresses; it must outlive the result.
    """
    from cuda.bindings import driver

    params = driver.CUDA_KERNEL_NODE_PARAMS()
    params.func = function
    params.gridDimX, params.gridDimY, params.gridDimZ = num_blocks, num_slots, 1
    params.blockDimX, params.blockDimY, params.blockDimZ = BLOCK_THREADS, 1, 1
    params.sharedMemBytes = 0
    params.kernelParams = kernel_params
    return params


def launch(params: Any, stream: int) -> None:
    """Launch the kernel alone. Sync: none."""
    from cuda.bindings import driver

    grid = (params.gridDimX, params.gridDimY, params.gridDimZ)
    block = (params.blockDimX, params.blockDimY, params.blockDimZ)
    checked(driver.cuLaunchKernel(params.func, *grid, *block, 0, stream, int(params.kernelParams), 0))
