"""Preps that change by themselves: by a counter, a clock, what was called before, or being recorded."""

from __future__ import annotations

import random
import time
from typing import Any

import torch

from .specimens import Made, Pair, Stage, specimen

STEPS = {"done": 0}  # a global of this module, as engines have them


@specimen("STATE-CARRY-4", "HOST-FROZEN-10", check="same_ops", evidence=r"add|scalar|differ", places=True)
def global_counter(stage: Stage) -> Pair:
    def faulty(view: Any) -> Any:
        STEPS["done"] += 1
        return {"stamped": view.seq_lens + STEPS["done"]}

    def twin(view: Any) -> Any:
        STEPS["done"] += 1  # counted, and nothing is computed from it
        return {"stamped": view.seq_lens + 1}

    outputs = {"stamped": "request"}
    return Pair(Made(faulty, outputs), Made(twin, outputs))


@specimen("HOST-FROZEN-10", check="same_ops", evidence=r"add|scalar|differ", places=True)
def clock(stage: Stage) -> Pair:
    def faulty(view: Any) -> Any:
        return {"stamped": view.seq_lens + time.perf_counter_ns()}

    def twin(view: Any) -> Any:
        begin = time.perf_counter_ns()
        return {"stamped": view.seq_lens + min(begin, 1)}

    outputs = {"stamped": "request"}
    return Pair(Made(faulty, outputs), Made(twin, outputs))


@specimen("RNG-1", check="same_ops", evidence=r"add|scalar|differ", places=True)
def random_number_of_python(stage: Stage) -> Pair:
    draws = random.Random(3)

    def faulty(view: Any) -> Any:
        return {"jitter": view.seq_lens + draws.randrange(1 << 30)}

    def twin(view: Any) -> Any:
        return {"jitter": view.seq_lens + random.Random(3).randrange(1 << 30)}

    outputs = {"jitter": "request"}
    return Pair(Made(faulty, outputs), Made(twin, outputs))


@specimen("PLAN-STALE-4", "REBIND-5", check="same_ops", evidence=r"differ|op", places=False)
def takes_turns(stage: Stage) -> Pair:
    """Two variants in turn, as double buffering does."""
    engine = stage.engine

    def faulty(view: Any) -> Any:
        engine.step += 1
        return {"positions": view.seq_lens - 1 if engine.step % 2 else view.seq_lens + 0}

    def twin(view: Any) -> Any:
        engine.step += 1
        return {"positions": view.seq_lens - 1}

    outputs = {"positions": "request"}
    return Pair(Made(faulty, outputs), Made(twin, outputs))


@specimen("PLAN-STALE-4", "META-SHAPE-1", check="pad_image", evidence="glued", devices=("cuda",), only_gpu=True)
def skips_work_while_capturing(stage: Stage) -> Pair:
    """On the CPU nothing tells a prep that it is recorded."""

    def faulty(view: Any) -> Any:
        if torch.cuda.is_current_stream_capturing():
            return {"positions": torch.zeros_like(view.seq_lens)}
        return {"positions": view.seq_lens - 1}

    def twin(view: Any) -> Any:
        return {"positions": view.seq_lens - 1}

    outputs = {"positions": "request"}
    return Pair(Made(faulty, outputs), Made(twin, outputs))


@specimen("LIFETIME-1", "LIFETIME-2", check="double_capture", evidence=r"baked|differ|host|captur")
def grows_with_what_it_has_seen(stage: Stage) -> Pair:
    """What the first capture of a small bucket bakes depends on whether a larger one came before."""
    engine = stage.engine
    engine.largest = 0

    def faulty(view: Any) -> Any:
        engine.largest = max(engine.largest, view.bucket.requests)
        return {"stride": view.seq_lens * engine.largest}

    def twin(view: Any) -> Any:
        engine.largest = max(engine.largest, view.bucket.requests)
        return {"stride": view.seq_lens * 5}

    outputs = {"stride": "request"}
    return Pair(Made(faulty, outputs), Made(twin, outputs, perturb=lambda: None))
