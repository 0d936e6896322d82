"""The demo: a small transformer served through graphglue, every step checked against an eager twin."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import torch

from graphglue.demo import arrivals
from graphglue.demo.checked import Prep
from graphglue.demo.engine import Engine, EngineShape
from graphglue.demo.model import ModelShape, Transformer
from graphglue.demo.report import DemoResult
from graphglue.demo.twin import Difference, Fault
from graphglue.errors import ConfigError

__all__ = ["DemoResult", "Difference", "run"]

LIMITS = EngineShape()
FITTING = (
    f"prompts scaled so that the longest has {LIMITS.max_prompt} tokens, generated lengths cut at "
    f"{LIMITS.max_generated}; a step lasts as long as makes {LIMITS.ladder[-1]} requests run on average in "
    f"busy stretches, and long gaps are cut to {arrivals.max_gap(LIMITS.max_generated)} steps"
)


def run(
    trace: str | Path | None = None,
    device: str = "auto",
    requests: int = 96,
    seed: int = 0,
    *,
    prep: Prep | None = None,
    fault: Fault | None = None,
    prefill_fault: Fault | None = None,
    on_finish: Callable[[int], object] = lambda num_finished: None,
) -> DemoResult:
    """Serve requests through ``graphglue.Runner``, and compare every step with its eager twin.

    Prompts are read through graphs with eager breaks, several in a step, in chunks of the largest token
    bucket. On the CPU the model is float64 and a third engine reads and decodes without padding; on a GPU
    it is bfloat16.

    Args:
        trace: a CSV file of arrivals (TIMESTAMP, ContextTokens, GeneratedTokens); seeded ones without.
        device: "cpu", "cuda", or "auto", which takes CUDA where there is a GPU.
        requests: how many requests to serve, at least 1.
        seed: seeds arrivals, prompts and weights.
        prep: a decode prep with the contract of "paged-decode", in place of the shipped one.
        fault: breaks the twin's tensors of decode steps on purpose: (step, slot name -> tensor, real requests).
        prefill_fault: the same for the steps that read prompts.
        on_finish: called with how many requests finished, after each step.

    Raises:
        ConfigError: a trace that cannot be read, no requests, or a device that is not there.

    Sync: the device, each step.
    """
    if requests < 1:
        raise ConfigError(f"requests={requests}: the demo serves at least one")
    where = _device(device)
    rows = arrivals.generate(requests, seed) if trace is None else arrivals.read_trace(trace, requests)
    served = arrivals.fit(
        rows, max_prompt=LIMITS.max_prompt, max_generated=LIMITS.max_generated, num_running=LIMITS.ladder[-1]
    )
    on_cpu = where.type == "cpu"
    dtype = torch.float64 if on_cpu else torch.bfloat16
    model = Transformer(ModelShape(), seed=seed, dtype=dtype, device=where)
    engine = Engine(
        LIMITS, model, prep=prep, unpadded=on_cpu, fault=fault, prefill_fault=prefill_fault, seed=seed,
        on_finish=on_finish,
    )  # fmt: skip
    with _one_thread():
        tally = engine.serve(served)
    return tally.result(
        device=where,
        num_requests=len(served),
        num_prompt_tokens=sum(request.prompt_len for request in served),
        prefill_buckets=LIMITS.prefill_ladder.sizes,
        arrivals=f"seeded generator, seed {seed}" if trace is None else f"trace {trace}",
        fitting=FITTING,
        dtype=str(dtype).removeprefix("torch."),
        seed=seed,
    )


@contextmanager
def _one_thread() -> Iterator[None]:
    # The model is too small to share out: on a busy machine CPU threads only wait for each other,
    # which was seen to make a step 30 times longer.
    num_threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(num_threads)


def _device(name: str) -> torch.device:
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    has_cuda = accelerator is not None and accelerator.type == "cuda"
    if name not in ("auto", "cpu", "cuda"):
        raise ConfigError(f"device {name!r}: expected auto, cpu or cuda")
    if name == "cuda" and not has_cuda:
        raise ConfigError("device 'cuda': torch sees no CUDA GPU here; use --device cpu, or auto")
    return torch.device("cuda" if has_cuda and name != "cpu" else "cpu")
