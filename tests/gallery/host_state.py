"""Preps that bake a number or a decision of the host: no read of a tensor gives them away.

Two captures that differ only in host state show them: ``perturb`` changes it between the two.
"""

from __future__ import annotations

import os
from typing import Any

import torch

from .specimens import Made, Pair, Stage, counted, specimen

BAKED = r"baked|differ|host|scalar|captur"


def planned(faulty: Any, twin: Any, value: Any, perturb: Any, outputs: dict[str, str]) -> Pair:
    """Pair a prep that bakes host state with one that gets it by a slot from ``plan``."""
    return Pair(
        Made(faulty, outputs, perturb=perturb),
        Made(
            twin,
            outputs,
            reads=("seq_lens", "setting"),
            perturb=perturb,
            plan=lambda batch, bucket: {"setting": [value()]},
        ),
    )


@specimen("HOST-FROZEN-10", "HOST-FROZEN-4", check="double_capture", evidence=BAKED)
def frozen_scalar(stage: Stage) -> Pair:
    engine = stage.engine

    def faulty(view: Any) -> Any:
        return {"scaled": view.seq_lens * engine.scale}

    def twin(view: Any) -> Any:
        return {"scaled": view.seq_lens * view.setting}

    def perturb() -> None:
        engine.scale = engine.scale % 5 + 1

    return planned(faulty, twin, lambda: engine.scale, perturb, {"scaled": "request"})


@specimen("HOST-FROZEN-10", check="double_capture", evidence=BAKED)
def frozen_scalar_tensor(stage: Stage) -> Pair:
    """A 0-dim tensor made of a Python number is a constant of the graph."""
    engine = stage.engine

    def faulty(view: Any) -> Any:
        return {"scaled": view.seq_lens * torch.tensor(engine.scale)}

    def twin(view: Any) -> Any:
        return {"scaled": view.seq_lens * view.setting}

    def perturb() -> None:
        engine.scale = engine.scale % 5 + 1

    return planned(faulty, twin, lambda: engine.scale, perturb, {"scaled": "request"})


@specimen("HOST-FROZEN-6", "FEATURE-GUARD-1", check="double_capture", evidence=BAKED)
def branch_on_an_attribute(stage: Stage) -> Pair:
    engine = stage.engine

    def faulty(view: Any) -> Any:
        return {"positions": view.seq_lens - 1 if engine.causal else view.seq_lens + 0}

    def twin(view: Any) -> Any:
        return {"positions": view.seq_lens - view.setting}

    def perturb() -> None:
        engine.causal = not engine.causal

    return planned(faulty, twin, lambda: int(engine.causal), perturb, {"positions": "request"})


@specimen("HOST-FROZEN-2", "PLAN-STALE-5", check="double_capture", evidence=BAKED)
def frozen_plan(stage: Stage) -> Pair:
    """A planner of the host chose how many splits; the graph keeps those of its capture."""
    engine = stage.engine

    def splits() -> int:
        return max(1, sum(engine.host_lens) // 4)

    def faulty(view: Any) -> Any:
        return {"chunk": (view.seq_lens + splits() - 1) // splits()}

    def twin(view: Any) -> Any:
        return {"chunk": (view.seq_lens + view.setting - 1) // view.setting.clamp(min=1)}

    def perturb() -> None:
        engine.host_lens.append(9)

    return planned(faulty, twin, splits, perturb, {"chunk": "request"})


@specimen("HOST-FROZEN-3", check="double_capture", evidence=BAKED)
def loop_over_segments(stage: Stage) -> Pair:
    engine = stage.engine

    def faulty(view: Any) -> Any:
        total = view.seq_lens.clone()
        for segment in engine.segments:
            total = total + segment
        return {"total": total}

    def twin(view: Any) -> Any:
        return {"total": view.seq_lens + view.setting}

    def perturb() -> None:
        engine.segments.append(2)

    return planned(faulty, twin, lambda: sum(engine.segments), perturb, {"total": "request"})


@specimen("HOST-FROZEN-1", "TAIL-STALE-6", check="double_capture", evidence=BAKED)
def host_mirror(stage: Stage) -> Pair:
    engine = stage.engine

    def faulty(view: Any) -> Any:
        return {"room": max(engine.host_lens) - view.seq_lens}

    def twin(view: Any) -> Any:
        return {"room": view.setting - view.seq_lens}

    def perturb() -> None:
        engine.host_lens.append(max(engine.host_lens) + 1)

    return planned(faulty, twin, lambda: max(engine.host_lens), perturb, {"room": "request"})


@specimen("HOST-FROZEN-3", "PAD-LEAK-5", check="double_capture", evidence=BAKED)
def raw_count_of_the_backend(stage: Stage) -> Pair:
    engine = stage.engine

    def faulty(view: Any) -> Any:
        return {"real": torch.where(counted(view.seq_lens) < engine.raw_bs, view.seq_lens, 0)}

    def twin(view: Any) -> Any:
        return {"real": torch.where(counted(view.seq_lens) < view.num_real, view.seq_lens, 0)}

    def perturb() -> None:
        engine.raw_bs = engine.raw_bs % 5 + 1

    outputs = {"real": "request"}
    return Pair(Made(faulty, outputs, perturb=perturb), Made(twin, outputs, ("seq_lens", "num_real"), perturb=perturb))


@specimen("HOST-FROZEN-6", check="double_capture", evidence=BAKED)
def environment(stage: Stage) -> Pair:
    name = "GALLERY_WINDOW"

    def window() -> int:
        return int(os.environ.get(name, "4"))

    def faulty(view: Any) -> Any:
        return {"start": (view.seq_lens - window()).clamp(min=0)}

    def twin(view: Any) -> Any:
        return {"start": (view.seq_lens - view.setting).clamp(min=0)}

    def perturb() -> None:
        os.environ[name] = str(window() % 7 + 1)

    return planned(faulty, twin, window, perturb, {"start": "request"})


@specimen("RANK-SPLIT-3", check="double_capture", evidence=BAKED)
def counts_of_other_ranks(stage: Stage) -> Pair:
    engine = stage.engine
    engine.rank_counts = [1, 2]

    def faulty(view: Any) -> Any:
        return {"start": view.seq_lens + sum(engine.rank_counts)}

    def twin(view: Any) -> Any:
        return {"start": view.seq_lens + view.setting}

    def perturb() -> None:
        engine.rank_counts[0] += 1

    return planned(faulty, twin, lambda: sum(engine.rank_counts), perturb, {"start": "request"})


@specimen("HOST-FROZEN-4", "HOST-FROZEN-9", check="double_capture", evidence=BAKED)
def bound_never_reached(stage: Stage) -> Pair:
    """No step that is legal now reaches the bound; one that is legal later will."""
    engine = stage.engine
    engine.limit = 1 << 20

    def faulty(view: Any) -> Any:
        return {"capped": view.seq_lens.clamp(max=engine.limit)}

    def twin(view: Any) -> Any:
        return {"capped": torch.minimum(view.seq_lens, view.setting)}

    def perturb() -> None:
        engine.limit += 1

    return planned(faulty, twin, lambda: engine.limit, perturb, {"capped": "request"})


@specimen("HOST-FROZEN-10", check="double_capture", evidence=BAKED)
def frozen_plain_leaf(stage: Stage) -> Pair:
    engine = stage.engine

    def faulty(view: Any) -> Any:
        return {"positions": view.seq_lens - 1, "num_splits": engine.scale}

    def twin(view: Any) -> Any:
        return {"positions": view.seq_lens - 1, "num_splits": view.setting + 0}

    def perturb() -> None:
        engine.scale = engine.scale % 5 + 1

    outputs, reads = {"positions": "request"}, ("seq_lens", "setting")
    plan = {"plan": lambda batch, bucket: {"setting": [engine.scale]}}
    return Pair(
        Made(faulty, outputs, perturb=perturb),
        Made(twin, {**outputs, "num_splits": "fixed"}, reads, perturb=perturb, **plan),
    )


@specimen("HOST-FROZEN-6", check="double_capture", evidence=BAKED)
def frozen_dtype(stage: Stage) -> Pair:
    engine = stage.engine
    engine.dtype = torch.int32

    def faulty(view: Any) -> Any:
        return {"positions": (view.seq_lens - 1).to(engine.dtype)}

    def twin(view: Any) -> Any:
        return {"positions": (view.seq_lens - 1).to(torch.int32)}

    def perturb() -> None:
        engine.dtype = torch.int64 if engine.dtype == torch.int32 else torch.int32

    outputs = {"positions": "request"}
    return Pair(Made(faulty, outputs, perturb=perturb), Made(twin, outputs, perturb=perturb))


@specimen("UNSTAGED-4", "UNSTAGED-2", check="double_capture", evidence=rf"{BAKED}|structure")
def leaf_that_comes_and_goes(stage: Stage) -> Pair:
    engine = stage.engine

    def faulty(view: Any) -> Any:
        found = {"positions": view.seq_lens - 1}
        return {**found, "causal": view.seq_lens + 0} if engine.causal else found

    def twin(view: Any) -> Any:
        return {"positions": view.seq_lens - 1, "causal": view.seq_lens * view.setting}

    def perturb() -> None:
        engine.causal = not engine.causal

    return planned(faulty, twin, lambda: int(engine.causal), perturb, {"positions": "request"})


@specimen("HOST-FROZEN-2", "PLAN-STALE-1", check="double_capture", evidence=BAKED)
def plan_that_leaves_attributes(stage: Stage) -> Pair:
    """The host planner runs at every step, and the graph keeps what it left at the capture. Nobody perturbs."""
    engine = stage.engine

    def leave(batch: Any, bucket: Any) -> dict[str, Any]:
        engine.raw_bs = batch.num_requests
        return {"setting": [batch.num_requests]}

    def faulty(view: Any) -> Any:
        return {"real": torch.where(counted(view.seq_lens) < engine.raw_bs, view.seq_lens, view.setting * 0)}

    def twin(view: Any) -> Any:
        return {"real": torch.where(counted(view.seq_lens) < view.setting, view.seq_lens, 0)}

    outputs, reads = {"real": "request"}, ("seq_lens", "setting")
    return Pair(Made(faulty, outputs, reads, plan=leave), Made(twin, outputs, reads, plan=leave))
