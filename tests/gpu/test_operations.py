"""On a GPU: what graphs and pools take per key, ranges that the profiler sees, and a doctor that finds all well."""

from __future__ import annotations

import json

import pytest
import torch

import graphglue as gg
from graphglue import doctor
from graphglue.budget import plan_budget

pytestmark = pytest.mark.usefixtures("frozen_imports")


def make(**config: object) -> gg.Runner:
    """Build a runner whose forward has enough nodes for its graphs to weigh something."""
    contract = gg.PrepContract(name="meta", reads={"x": 0}, outputs={"m": "request"}, modes={gg.Mode.DECODE})
    registry = gg.Registry()
    registry.register(contract)(lambda view: {"m": view.x + 1})

    def forward(view: gg.View, metadata: dict[str, torch.Tensor]) -> torch.Tensor:
        rows = metadata["m"][:, None].float() * torch.ones(1, 4096, device=view.x.device)
        for _ in range(400):
            rows = rows + 1
        return rows

    return gg.Runner(
        slots=[gg.Slot("x", axis="request", dtype=torch.int64, pad=0)], ladder=[8, 64, 256], registry=registry,
        prep="meta", forward=forward, device="cuda", config=gg.RunnerConfig(**config),
    )  # fmt: skip


def test_keys_tell_what_they_take() -> None:
    with make() as runner:
        runner.capture(progress=False)
        for requests in (5, 5, 200):
            runner.replay(gg.Batch(requests, {"x": list(range(requests))}))
        stats = runner.stats()
        assert json.loads(json.dumps(stats, allow_nan=False)) == stats
        keys = {key["bucket"][0]: key for key in stats["keys"]}
        assert {size: key["steps"] for size, key in keys.items()} == {8: 2, 64: 0, 256: 1}
        memory = [key["memory"] for key in keys.values()]
        assert all(one["driver_bytes"] is not None for one in memory)
        assert sum(one["driver_bytes"] for one in memory) > 0
        assert keys[256]["memory"]["pool_bytes"] > 0  # the largest key carries the pool
        assert keys[256]["memory"]["outputs_bytes"] >= 256 * 4096 * 4
        assert all(one["freed_bytes"] == one["exec_bytes"] for one in memory)
        held = plan_budget(stats, 0).held_bytes
        assert plan_budget(stats, held).drops == ()
        assert plan_budget(stats, 0).enough


def test_ranges_are_pushed_and_popped(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[str] = []
    push, pop = torch.cuda.nvtx.range_push, torch.cuda.nvtx.range_pop
    monkeypatch.setattr(torch.cuda.nvtx, "range_push", lambda name: seen.append(f"+{name}") or push(name))
    monkeypatch.setattr(torch.cuda.nvtx, "range_pop", lambda: seen.append("-") or pop())
    with make(nvtx=True) as runner:
        runner.capture(progress=False)
        seen.clear()
        step = runner.replay(gg.Batch(3, {"x": [1, 2, 3]}))
        assert seen == ["+graphglue.replay", "-"]
        assert step.outputs[:, 0].tolist() == [402.0, 403.0, 404.0]
        seen.clear()
        runner.prepare(gg.Batch(3, {"x": [1, 2, 3]}))
        assert seen == ["+graphglue.fill", "-", "+graphglue.prep", "-"]


def test_the_flight_recorder_changes_no_result_and_allocates_nothing() -> None:
    with make(flight_recorder=64) as runner:
        runner.capture(progress=False)
        batch = gg.Batch(3, {"x": [1, 2, 3]})
        runner.replay(batch)
        torch.cuda.synchronize()
        before = torch.cuda.memory_stats()["allocation.all.allocated"]
        for _ in range(200):
            step = runner.replay(batch)
        assert torch.cuda.memory_stats()["allocation.all.allocated"] == before
        assert step.outputs[:, 0].tolist() == [402.0, 403.0, 404.0]
        assert [one.number for one in runner.flight_record().steps] == list(range(138, 202))
        assert {one.launch for one in runner.flight_record().steps} == {""}


def test_the_doctor_finds_all_well() -> None:
    findings = {one.part: one for one in doctor.examine()}
    for part in ("torch's CUDA", "GPUs", "driver", "NVRTC", "fill kernel", "kernel parameters", "a step on the GPU"):
        assert findings[part].works, findings[part]
    assert findings["a step on the GPU"].seen == "a captured step is right, in one launch"
