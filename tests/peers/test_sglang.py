"""The leading engine's own classes, where its wheel is unpacked: they load, and get the inputs that ours get.

    pip download --no-deps sglang==0.5.23 && unzip -q sglang-*.whl -d .peers/sglang

The folder is ignored by git; GRAPHGLUE_PEER_SGLANG names another one.
"""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch

from graphglue.bench.contenders import Sources, differences
from graphglue.bench.peers import MODULES, Engine, PeerStep, contenders, load_sglang
from graphglue.bench.workload import PADS, Workload
from graphglue.errors import ConfigError

FOLDER = Path(os.environ.get("GRAPHGLUE_PEER_SGLANG", Path(__file__).parents[2] / ".peers" / "sglang"))
CPU = torch.device("cpu")
needs_wheel = pytest.mark.skipif(
    not all((FOLDER / name).is_file() for name in MODULES), reason=f"needs the wheel of sglang 0.5.23 in {FOLDER}"
)


@pytest.fixture
def engine() -> Engine:
    return load_sglang(FOLDER)


def test_a_folder_without_the_wheel_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="unpack the wheel"):
        load_sglang(tmp_path)


@needs_wheel
def test_its_classes_are_found(engine: Engine) -> None:
    assert engine.registry.CudaGraphBufferRegistry.__name__ == "CudaGraphBufferRegistry"
    assert engine.glue.MetadataGlueGraph.NUM_WARMUP == 2
    assert load_sglang(FOLDER) == engine


@needs_wheel
def test_its_default_flags_and_its_best_ones(engine: Engine) -> None:
    flag = "SGLANG_OPT_CUDA_GRAPH_FILL_FAST_PATH"
    assert getattr(engine.registry.envs, flag).get() is False
    assert getattr(engine.fast_registry.envs, flag).get() is True


@needs_wheel
@pytest.mark.parametrize("mixed", [False, True])
@pytest.mark.parametrize(("raw", "bucket"), [(3, 4), (4, 4)])
def test_its_inputs_equal_ours(engine: Engine, raw: int, bucket: int, mixed: bool) -> None:
    workload = Workload(CPU, mixed=mixed)
    sources = Sources.draw(workload, raw, bucket)
    peer = PeerStep(engine, workload, sources, best=False)
    with workload.runner([bucket]) as runner:
        runner.capture(progress=False)
        ours = runner.view(bucket)
        for values in sources.on_device:
            peer.step()
            runner.arena.fill(_batch(raw, values))
            for name in PADS:
                rows = raw * 4 if name == "input_ids" else len(ours[name])  # it leaves this one's tail as it was
                assert torch.equal(peer.slots[name][:rows], ours[name][:rows]), name


@needs_wheel
def test_its_results_equal_the_reference(engine: Engine) -> None:
    workload = Workload(CPU)
    sources = Sources.draw(workload, 3, 4)
    default = contenders(engine, workload, sources)[0]
    assert not differences(default, sources, lambda: None)


def _batch(raw: int, values: dict[str, torch.Tensor]) -> object:
    import graphglue as gg

    return gg.Batch(raw, values)
