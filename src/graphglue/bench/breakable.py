"""The published package for graphs with eager breaks, loaded from where its wheel was unpacked.

Nothing of it is kept here. ``pip download --no-deps breakable-cuda-graphs==0.1.0``, unpack, and pass the folder as
``--peer breakable=DIR``.
"""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from graphglue.bench.timing import Step
from graphglue.errors import ConfigError

MODULE = "breakable_cuda_graphs"


def load_breakable(folder: Path) -> Any:
    """Load the package's one module from an unpacked wheel.

    Raises:
        ConfigError: it is not there, or another one is imported.
    """
    source = (folder / f"{MODULE}.py").resolve()
    if not source.is_file():
        raise ConfigError(
            f"--peer breakable={folder}: {source.name} is not there; unpack the wheel of breakable-cuda-graphs 0.1.0 "
            "there"
        )
    if MODULE not in sys.modules:
        spec = importlib.util.spec_from_file_location(MODULE, source)
        assert spec is not None
        assert spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        sys.modules[MODULE] = module
        spec.loader.exec_module(module)
    there = sys.modules[MODULE]
    if Path(there.__file__ or "").resolve() != source:
        raise ConfigError(f"another {MODULE} is imported, from {there.__file__}; start a fresh process")
    return there


def captured(peer: Any, run: Callable[[], object]) -> Step:
    """Capture a callable whose breaks are marked by the peer's ``no_graph``; give its replay.

    Sync: the device, which its captures wait for.
    """
    graph = peer.BreakableCUDAGraph()
    with peer.breakable_graph(graph, capture_error_mode="thread_local"):
        run()
    replay: Step = graph.replay
    return replay
