"""Probe what drives a GPU here: each question answered, or the reason why it can not be."""

from __future__ import annotations

from importlib import metadata

import torch

from graphglue.device import kernel
from graphglue.errors import GraphGlueError


class Absent(GraphGlueError):
    """Something is not there, or does not answer; the text says what it said."""


def version_of(distribution: str) -> str:
    """Give the version of an installed distribution.

    Raises:
        Absent: it is not installed.
    """
    try:
        return metadata.version(distribution)
    except metadata.PackageNotFoundError as error:
        raise Absent("not installed") from error


def torch_cuda() -> str:
    """Give the CUDA that torch was built for.

    Raises:
        Absent: a build without CUDA.
    """
    if torch.version.cuda is None:
        raise Absent(f"torch {torch.__version__} was built without CUDA")
    return torch.version.cuda


def gpus() -> list[str]:
    """Name the GPUs that torch sees, with what they can and what is free.

    Raises:
        Absent: it sees none.
    """
    if not torch.cuda.is_available():
        raise Absent("torch sees none")
    found = []
    for index in range(torch.cuda.device_count()):
        major, minor = torch.cuda.get_device_capability(index)
        free, total = (size / 2**30 for size in torch.cuda.mem_get_info(index))
        name = torch.cuda.get_device_name(index)
        found.append(f"cuda:{index} {name}, sm_{major}{minor}, {free:.0f} of {total:.0f} GiB free")
    return found


def driver() -> str:
    """Give the CUDA version of the driver. Sync: none.

    Raises:
        Absent: no driver, or no cuda-python to ask it.
    """
    try:
        from cuda.bindings import driver as api

        version = kernel.checked(api.cuDriverGetVersion())
    except Exception as error:  # cuda-python reports a missing library in several ways
        raise Absent(_first_line(error)) from error
    if not version:
        raise Absent("no driver is loaded")
    return f"CUDA {version // 1000}.{version % 1000 // 10}"


def nvrtc() -> str:
    """Give the version of NVRTC.

    Raises:
        Absent: it is missing.
    """
    try:
        from cuda.bindings import nvrtc as api

        major, minor = kernel.checked(api.nvrtcVersion())
    except Exception as error:  # as above
        raise Absent(_first_line(error)) from error
    return f"{major}.{minor}"


def fill_kernel() -> str:
    """Compile the fill kernel for the GPU, or for one that could be there; needs none.

    Raises:
        Absent: it can not be compiled.
    """
    major, minor = torch.cuda.get_device_capability() if torch.cuda.is_available() else (9, 0)
    try:
        cubin = kernel.compile_fill(4, 4096, f"sm_{major}{minor}")
    except GraphGlueError as error:
        raise Absent(_first_line(error)) from error
    return f"compiles for sm_{major}{minor}, {len(cubin)} bytes"


def host_payload() -> str:
    """Say how many bytes of parameters one launch may carry on this driver.

    Raises:
        Absent: no driver to ask.
    """
    driver()
    return f"{kernel.largest_struct_bytes()} bytes"


def _first_line(error: Exception) -> str:
    text = str(error).strip().splitlines()
    return f"{type(error).__name__}: {text[0] if text else error!r}"
