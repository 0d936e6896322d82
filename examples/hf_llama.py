"""Serve Llama and Mistral of the transformers library, with their own forwards captured as they are.

    pip install -e '.[hf]'
    python examples/hf_llama.py                                # small, float64, on the CPU tape
    python examples/hf_llama.py --device cuda --bench          # 16 layers of a 1B model, bfloat16, CUDA graphs

The weights are random, from a seeded config; nothing is downloaded. The library's static cache counts its length by
itself and gives all rows one position, so it can not serve requests that arrive and finish one by one; hf_models.py has
a cache layer that can, and the preps that steer it.

Every step is compared, bit for bit, with the model's eager decode at the same padded shapes over a cache of its own. On
the CPU each request is also decoded alone with the library's ordinary cache, and no token may differ; with the prep of
Llama in place of its own, Mistral fails that comparison.
"""

from __future__ import annotations

import argparse
import random
import time
from collections import Counter, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from statistics import median
from types import SimpleNamespace

import torch
from hf_models import CACHE, LARGE, SMALL, Layout, Model, Prep, causal, contract_of, decode, ring
from torch import Tensor
from transformers.cache_utils import DynamicCache, StaticCache

import graphglue as gg
from graphglue.demo import arrivals


@dataclass
class Request:
    """A prompt, and what was generated from it."""

    prompt: list[int]
    num_wanted: int
    generated: list[int] = field(default_factory=list)

    @property
    def num_tokens(self) -> int:
        """Tokens so far."""
        return len(self.prompt) + len(self.generated)


class Engine:
    """A runner over a model of the library, and the model's eager decode beside it, with a cache of its own."""

    def __init__(self, model: Model, make_prep: Callable[[Layout], Prep]) -> None:
        self.model = model
        self.layout = Layout(model.shape.window if make_prep is ring else model.shape.context, model.dtype)
        self.prep = make_prep(self.layout)
        self.memory, self.eager_memory = (model.memory(self.layout.num_columns) for _ in range(2))
        registry, name = gg.Registry(), f"hf-{make_prep.__name__}"
        registry.register(contract_of(name))(self.prep)
        self.runner = gg.Runner(
            slots=[
                gg.Slot("seq_lens", axis="request", dtype=torch.int64, pad=0),
                gg.Slot("input_ids", axis="token", dtype=torch.int64, pad=0),
            ],
            ladder=model.shape.ladder,
            registry=registry,
            prep=name,
            forward=lambda view, metadata: decode(model.library, self.memory, view.input_ids, metadata),
            device=model.device,
        )
        self.steps: list[gg.Batch] = []
        self.reasons: Counter[str] = Counter()

    def admit(self, request: Request, row: int) -> None:
        """Read a prompt with the library's ordinary cache, and take over what that keeps."""
        cache = DynamicCache(config=self.model.library.config)
        request.generated.append(self.model.read(request.prompt, cache))
        for number, layer in enumerate(cache.layers):  # a sliding one keeps the newest tokens only
            num_tokens, num_kept = len(request.prompt), layer.keys.shape[2]
            columns = torch.arange(num_tokens - num_kept, num_tokens, device=self.model.device) % self.layout.width
            for memory in (self.memory, self.eager_memory):
                memory[number, 0, row][:, columns] = layer.keys[0]
                memory[number, 1, row][:, columns] = layer.values[0]

    def move(self, row: int, into: int) -> None:
        """Move a request, so that the running ones stay in the first rows and attention reads no others."""
        for memory in (self.memory, self.eager_memory):
            memory[:, :, into] = memory[:, :, row]

    def step(self, running: Sequence[Request]) -> list[int]:
        """Decode one token for each request in one replay, and compare with the eager model."""
        sources = {
            "seq_lens": [request.num_tokens for request in running],
            "input_ids": [request.generated[-1] for request in running],
        }
        batch = gg.Batch(len(running), sources)
        step = self.runner.replay(batch)
        metadata, outputs = self.eager(batch, step.decision.bucket.requests)
        for name, expected in outputs.items():
            assert torch.equal(step.outputs[name], expected[: len(running)]), f"{name} differs at {step.decision}"
        for name, expected in metadata.items():
            assert torch.equal(step.metadata[name], expected), f"{name} differs at {step.decision}"
        self.steps.append(batch)
        assert (step.decision.prep, step.decision.forward) == (gg.Route.GLUE, gg.Route.GRAPH)
        self.reasons[step.decision.reason.value] += 1
        return step.outputs["next_token"].tolist()

    def eager(self, batch: gg.Batch, num_rows: int) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
        """Decode the way the library's users do: tensors made on the host for each step, and its Python called."""
        made = {}
        for name, values in batch.sources.items():
            made[name] = torch.zeros(num_rows, dtype=torch.int64, device=self.model.device)
            made[name][: len(values)] = torch.tensor(values, device=self.model.device)
        metadata = self.prep(SimpleNamespace(seq_lens=made["seq_lens"]))
        return metadata, decode(self.model.library, self.eager_memory, made["input_ids"], metadata)

    def serve(self, wanted: Sequence[arrivals.Request], seed: int) -> list[Request]:
        """Admit, decode and retire until every request is done."""
        arriving, rng, now = deque(wanted), random.Random(seed), 0
        running: list[Request] = []
        done: list[Request] = []
        while arriving or running:
            now = max(now + 1, 0 if running else arriving[0].arrival)  # nobody runs: on to the next arrival
            while arriving and arriving[0].arrival <= now and len(running) < self.model.shape.ladder[-1]:
                one = arriving.popleft()
                prompt = [rng.randrange(self.model.shape.vocab) for _ in range(one.prompt_len)]
                running.append(Request(prompt, max(2, one.generated_len)))
                self.admit(running[-1], len(running) - 1)
            for request, token in zip(running, self.step(running), strict=True):
                request.generated.append(token)
            for row in reversed(range(len(running))):
                if len(running[row].generated) == running[row].num_wanted:
                    done.append(running[row])
                    last = running.pop()
                    if row < len(running):
                        self.move(len(running), into=row)
                        running[row] = last
        kept = slice(0, self.layout.width)
        assert torch.equal(self.memory[..., kept, :], self.eager_memory[..., kept, :])
        return done


# The figures.


class LibraryStatic:
    """The library's own fast way: its static cache, compiled with CUDA graphs; one position for all rows."""

    def __init__(self, model: Model, num_columns: int) -> None:
        torch._dynamo.config.recompile_limit = 64  # one for each size
        self._model, self._num_columns = model, num_columns
        self._call = torch.compile(model.library.forward, mode="reduce-overhead", fullgraph=True, dynamic=False)
        self._caches = {size: self._cache(size) for size in model.shape.ladder}
        self._lengths = dict.fromkeys(self._caches, 0)
        for size in reversed(model.shape.ladder):
            for _ in range(4):  # compile, warm up, record, replay
                self.step(gg.Batch(size, {"input_ids": [1] * size}))

    def _cache(self, size: int) -> StaticCache:
        cache = StaticCache(config=self._model.library.config, max_cache_len=self._num_columns)
        input_ids = torch.ones(size, 1, dtype=torch.int64, device=self._model.device)
        # The first call allocates, which must not be compiled.
        self._model.library(input_ids=input_ids, use_cache=True, **{CACHE: cache})
        return cache

    def step(self, batch: gg.Batch) -> Tensor:
        """Decode one token for each row; the lengths of the requests can not be said."""
        size = next(size for size in self._caches if size >= batch.num_requests)
        if self._lengths[size] == 0:
            self._caches[size].reset()
        self._lengths[size] = (self._lengths[size] + 1) % (self._num_columns - 1)
        input_ids = torch.zeros(size, 1, dtype=torch.int64)
        input_ids[: batch.num_requests, 0] = torch.tensor(batch.sources["input_ids"])
        torch.compiler.cudagraph_mark_step_begin()
        logits = self._call(
            input_ids=input_ids.to(self._model.device), use_cache=True, **{CACHE: self._caches[size]}
        ).logits
        return logits[: batch.num_requests, 0].argmax(dim=-1)


def bench(engine: Engine, num_steps: int, rounds: int, with_library: bool) -> None:
    """Time the served steps again, in turn: each way runs all of them, reading the tokens back as an engine does."""
    stride = max(1, len(engine.steps) // num_steps)
    steps = engine.steps[::stride][:num_steps]
    ways: dict[str, Callable[[gg.Batch], Tensor]] = {
        "eager": lambda batch: engine.eager(batch, batch.num_requests)[1]["next_token"],
        "graphglue": lambda batch: engine.runner.replay(batch).outputs["next_token"],
    }
    if with_library:
        begin = time.perf_counter()
        try:
            ways["static cache, compiled"] = LibraryStatic(engine.model, engine.layout.num_columns).step
            print(f"the library's static cache compiled in {time.perf_counter() - begin:.0f} s")
        except Exception as error:  # a compiler may be missing, or refuse the model; the other ways are timed anyway
            print(f"the library's static cache could not be compiled here: {type(error).__name__}: {error}")
    sizes = [batch.num_requests for batch in steps]
    print(
        f"{len(steps)} steps of {min(sizes)} to {max(sizes)} requests, {rounds} rounds; each step reads its tokens back"
    )
    print(f"{'way':24} {'tokens/s':>10} {'host us a step':>15}")
    taken: dict[str, list[tuple[float, float]]] = {name: [] for name in ways}
    for _ in range(rounds):
        for name, way in ways.items():
            taken[name].append(timed(way, steps))
    for name, times in taken.items():
        print(f"{name:24} {median(t for t, _ in times):10,.0f} {median(us for _, us in times):15,.0f}")
    if engine.model.device.type == "cpu":
        print("These times mean nothing: the tape is for truth, not for speed.")


def timed(way: Callable[[gg.Batch], Tensor], steps: Sequence[gg.Batch]) -> tuple[float, float]:
    """Give tokens per second, and the median host time in us from a step's call to its return."""
    host_us, begin = [], time.perf_counter()
    for batch in steps:
        called = time.perf_counter()
        tokens = way(batch)
        host_us.append((time.perf_counter() - called) * 1e6)
        tokens.tolist()
    seconds = time.perf_counter() - begin
    return sum(batch.num_requests for batch in steps) / seconds, median(host_us)


# The story.


def serve(kind: str, make_prep: Callable[[Layout], Prep], chosen: argparse.Namespace) -> tuple[Engine, list[Request]]:
    """Serve a trace with a model of the library, and tell how it went."""
    shape, dtype = (SMALL, torch.float64) if chosen.device == "cpu" else (LARGE, torch.bfloat16)
    shape = replace(shape, num_layers=chosen.layers or shape.num_layers)
    engine = Engine(Model(kind, shape, chosen.seed, dtype, torch.device(chosen.device)), make_prep)
    engine.runner.capture(progress=False)
    rows = arrivals.generate(chosen.requests or (8 if chosen.device == "cpu" else 160), chosen.seed)
    limits = {"max_prompt": shape.max_prompt, "max_generated": shape.max_generated}
    done = engine.serve(arrivals.fit(rows, num_running=shape.ladder[-1] * 3 // 4, **limits), chosen.seed)
    num_tokens, stats = sum(len(request.generated) for request in done), engine.runner.stats()
    print(
        f"{type(engine.model.library).__name__}, prep {make_prep.__name__}: {len(done)} requests, {num_tokens} tokens, "
        f"{len(engine.steps)} steps {dict(engine.reasons)}, all as the eager model bit for bit; "
        f"{stats['one_launch']} were one launch"
    )
    return engine, done


def num_differing(engine: Engine, done: Sequence[Request]) -> int:
    """Count the requests that differ from being decoded alone."""
    return sum(request.generated != engine.model.alone(request.prompt, request.num_wanted) for request in done)


def main() -> None:
    """Serve Llama and Mistral, compare every token, and time the steps if asked to."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--layers", type=int, help="2 on the CPU, 16 on a GPU")
    parser.add_argument("--requests", type=int, help="8 on the CPU, 160 on a GPU")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--bench", action="store_true", help="time Llama's steps: eager, compiled by the library, here")
    parser.add_argument("--steps", type=int, default=200, help="served steps that are timed")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--without-library", action="store_true", help="do not compile the library's static cache")
    chosen = parser.parse_args()
    torch.set_num_threads(1)
    torch.backends.cuda.enable_cudnn_sdp(False)  # on an H200 it gives other bits from call to call, eagerly too
    with torch.no_grad():
        for kind, make_prep in (("llama", causal), ("mistral", ring)):
            engine, done = serve(kind, make_prep, chosen)
            if chosen.device == "cpu":  # in float64, so that no token hangs on how a product rounds
                assert num_differing(engine, done) == 0
                print("  each token is that of its request decoded alone with the library's ordinary cache")
            if kind == "llama" and chosen.bench:
                bench(engine, chosen.steps, chosen.rounds, not chosen.without_library)
            engine.runner.close()
        if chosen.device == "cpu":
            chosen.requests = 4
            engine, done = serve("mistral", causal, chosen)
            differ = num_differing(engine, done)
            assert differ > 0
            print(f"  that is Llama's prep: {differ} requests differ from being decoded alone")
            engine.runner.close()


if __name__ == "__main__":
    main()
