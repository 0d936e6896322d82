"""The leading engine's own classes, loaded from its published wheel: the same padded step through its code.

Nothing of it is kept here. ``pip download --no-deps sglang==0.5.23``, unpack, and pass the folder as
``--peer sglang=DIR``. Its package imports half an engine, so only the modules of the step are loaded,
and two that they ask small questions of are stood in for.
"""

from __future__ import annotations

import dataclasses
import importlib
import importlib.util
import itertools
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import torch

from graphglue.bench.contenders import Contender, Recorded, Sources
from graphglue.bench.workload import TOKENS_PER_REQUEST, Workload, prep
from graphglue.errors import ConfigError

MODULES = (
    "sglang/srt/environ.py",
    "sglang/srt/model_executor/input_buffers.py",
    "sglang/srt/model_executor/cuda_graph_buffer_registry.py",
    "sglang/srt/model_executor/runner/metadata_glue_graph.py",
    "sglang/kernels/ops/memory/small_copy.py",
)
DEFAULT, GLUED, GLUED_HOST = (
    "sglang defaults: fill, eager prep, forward graph",
    "sglang best flags: fill, its glue graph, forward graph",
    "sglang best flags, numpy sources: pin, copy, the same",
)
_FILL_FLAG = "SGLANG_OPT_CUDA_GRAPH_FILL_FAST_PATH"  # the step reads it twice; off by default
# The padding policies of its own build_decode_registry; input_ids' tail is left as it was.
_POLICIES = {
    "input_ids": "FOREACH_COPY",
    "positions": "ZERO",
    "out_cache_loc": "ZERO",
    "req_pool_indices": "ZERO",
    "seq_lens": "FILL_SENTINEL",
}
_REQUEST_SLOTS = ("req_pool_indices", "seq_lens")


@dataclass(frozen=True)
class Engine:
    """The modules of the step: its buffer registry, the same with its fast path on, its glue graph."""

    registry: Any
    fast_registry: Any
    glue: Any


def load_sglang(folder: Path) -> Engine:
    """Load the modules of the step from an unpacked wheel, and nothing else of it.

    Raises:
        ConfigError: a module is not where the wheel of 0.5.23 has it, or another sglang is imported.
    """
    missing = [name for name in MODULES if not (folder / name).is_file()]
    if missing:
        raise ConfigError(f"--peer sglang={folder}: {missing} are not there; unpack the wheel of sglang 0.5.23 there")
    there = sys.modules.get("sglang")
    if there is not None and str(folder / "sglang") not in list(there.__path__):
        raise ConfigError(f"another sglang is imported, from {list(there.__path__)}; start a fresh process")
    for module in MODULES:
        parts = module.split("/")[:-1]
        for depth in range(1, len(parts) + 1):
            _add_package(".".join(parts[:depth]), folder.joinpath(*parts[:depth]))
    _stand_in("sglang.srt.utils", is_npu=lambda: False)
    _stand_in("sglang.srt.runtime_context", get_parallel=lambda: SimpleNamespace(num_dp_ranks=1))
    names = [module.removesuffix(".py").replace("/", ".") for module in MODULES]
    environ, _, registry, glue = (importlib.import_module(name) for name in names[:4])
    fast = _second_copy(registry)
    # Both run in turn, so the flag can not be one environment variable; reading it costs the same.
    flag = environ.EnvBool(True)
    flag.name = _FILL_FLAG + "_ON"
    fast.envs = SimpleNamespace(**{_FILL_FLAG: flag})
    return Engine(registry, fast, glue)


def _second_copy(module: ModuleType) -> Any:
    """Load a module once more, with globals of its own."""
    name = module.__name__ + "_fast"
    if name not in sys.modules:
        assert module.__file__ is not None
        spec = importlib.util.spec_from_file_location(name, module.__file__)
        assert spec is not None
        assert spec.loader is not None
        sys.modules[name] = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(sys.modules[name])
    return sys.modules[name]


def _add_package(name: str, folder: Path) -> None:
    """Make a package of a folder without running its ``__init__``."""
    if name not in sys.modules:
        package = ModuleType(name)
        package.__path__ = [str(folder)]
        sys.modules[name] = package


def _stand_in(name: str, **members: Any) -> None:
    module = ModuleType(name)
    vars(module).update(members)
    sys.modules.setdefault(name, module)


@dataclass
class ForwardBatch:
    """Carry a step as the registry reads it; it finds slots by attribute."""

    batch_size: int
    input_ids: torch.Tensor
    positions: torch.Tensor
    out_cache_loc: torch.Tensor
    req_pool_indices: torch.Tensor
    seq_lens: torch.Tensor


class PrepBackend:
    """Stand for an attention backend: the same prep, into buffers that the forward graph reads."""

    attn_backend_list = None

    def __init__(self, workload: Workload, metadata: dict[str, torch.Tensor]) -> None:
        self._tables = SimpleNamespace(**workload.tables)
        self.forward_metadata = metadata

    def init_forward_metadata_out_graph(self, fb_view: Any) -> None:
        """Run the prep over the engine's view of its buffers."""
        view = SimpleNamespace(
            seq_lens=fb_view.seq_lens,
            req_pool_indices=fb_view.req_pool_indices,
            out_cache_loc=fb_view.out_cache_loc,
            tables=self._tables,
        )
        with torch.no_grad():
            prep(view, self.forward_metadata)


class PeerStep:
    """Run the step as the engine's decode runner does: fill, prep, replay.

    Args:
        engine: its modules.
        workload: weights, tables, slot dtypes.
        sources: the steps.
        best: with its optional fast paths and its glue graph; its defaults otherwise.
    """

    def __init__(self, engine: Engine, workload: Workload, sources: Sources, best: bool) -> None:
        self._best, self._sources = best, sources
        self._raw, self._bucket = sources.num_requests, sources.bucket
        self._tokens = (self._raw * TOKENS_PER_REQUEST, self._bucket * TOKENS_PER_REQUEST)
        self.registry = self._build_registry(engine.fast_registry if best else engine.registry, workload)
        self.slots = {name: self.registry.get_slot(name).slice_for(self._bucket, self._tokens[1]) for name in _POLICIES}
        self.recorded = Recorded(workload, workload.view_of(self.slots))
        self._forward = self.recorded.floor()
        self._backend = PrepBackend(workload, self.recorded.metadata)
        self._glue = engine.glue.MetadataGlueGraph(workload.device)
        self._batches = [ForwardBatch(self._raw, **_named(step)) for step in sources.on_device]
        self._next_batch = itertools.cycle(self._batches).__next__
        self._next_numpy = itertools.cycle(sources.numpy).__next__

    def step(self) -> Mapping[str, torch.Tensor]:
        """Run one step from device sources."""
        return self._run(self._next_batch())

    def step_from_host(self) -> Mapping[str, torch.Tensor]:
        """Run one step from numpy sources, which its registry wants on the device first."""
        device = self._sources.device
        moved = {
            name: torch.from_numpy(values).pin_memory().to(device, non_blocking=True)
            for name, values in _named(self._next_numpy()).items()
        }
        return self._run(ForwardBatch(self._raw, **moved))

    def _run(self, batch: ForwardBatch) -> Mapping[str, torch.Tensor]:
        """Do what load_batch and replay do; each flag is read where the engine reads it."""
        self.registry.fill_from(
            batch,
            raw_bs=self._raw,
            padded_bs=self._bucket,
            raw_num_tokens=self._tokens[0],
            padded_num_tokens=self._tokens[1],
        )
        if self._best and self._glue.is_captured(self._bucket):
            self._glue.replay(self._bucket)
        else:
            view = self.registry.extract_buffer(
                padded_bs=self._bucket, padded_num_tokens=self._tokens[1], forward_batch_template=batch
            )
            if self._best:
                self._glue.run(self._backend, view, self._bucket)
            else:
                self._backend.init_forward_metadata_out_graph(view)
        self._forward()
        return self.recorded.metadata

    def _build_registry(self, engine: Any, workload: Workload) -> Any:
        registry = engine.CudaGraphBufferRegistry(
            device=workload.device, max_bs=self._bucket, max_num_tokens=self._tokens[1]
        )
        for name, policy in _POLICIES.items():
            by_request = name in _REQUEST_SLOTS
            slot = engine.GraphSlot(
                name,
                (lambda requests, tokens: (requests,)) if by_request else (lambda requests, tokens: (tokens,)),
                workload.dtypes[name],
                axis="bs" if by_request else "tokens",
                padding_policy=engine.PaddingPolicy[policy],
                pad_value=1 if policy == "FILL_SENTINEL" else None,
            )
            registry.register_slot(slot)
        return registry


def contenders(engine: Engine, workload: Workload, sources: Sources) -> list[Contender]:
    """List the engine's ways to run the step."""
    default, best = (PeerStep(engine, workload, sources, best) for best in (False, True))
    note = "" if sources.num_requests == sources.bucket else "its own route goes eager here; its classes are called"
    return [
        Contender(DEFAULT, default.step, _given),
        Contender(GLUED, best.step, _given, note=note),
        Contender(GLUED_HOST, best.step_from_host, _given, note=note),
    ]


def _given(metadata: Mapping[str, torch.Tensor]) -> Mapping[str, torch.Tensor]:
    return metadata


def _named(step: Mapping[str, Any]) -> dict[str, Any]:
    fields = [field.name for field in dataclasses.fields(ForwardBatch)][1:]
    return {name: step[name] for name in fields}
