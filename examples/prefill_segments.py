"""Prefill the prompts of a trace in segments, and decode beside it.

    python examples/prefill_segments.py                          # float64, on the CPU tape
    python examples/prefill_segments.py --device cuda            # bfloat16, CUDA graphs
    python examples/prefill_segments.py --trace FILE.csv         # TIMESTAMP, ContextTokens, GeneratedTokens

Several prompts are packed into a step; one longer than the largest token bucket is read in chunks of it. What works
token by token is captured, per bucket; attention over each request's own tokens, those of earlier chunks included,
runs eagerly between the segments and sees real rows only. A second runner decodes over the same tables, and on a GPU
in the same memory pool. Every step runs a second time in an engine whose runners are switched off, eagerly at the
same padded shapes, and no bit may differ. On the CPU each prompt is also read whole and by itself: its rows are equal
but for how a matrix product rounds at another number of rows, and its first token is the same.
"""

from __future__ import annotations

import argparse
import random
import sys
from collections import Counter, deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch

import graphglue as gg
from graphglue.demo import arrivals
from graphglue.demo.chunks import Chunk, compare_ladders, pack
from graphglue.demo.model import ModelShape, Transformer, causal_attention
from graphglue.demo.pages import Lease, PagePool
from graphglue.demo.twin import compare
from graphglue.preps import paged_decode

MAX_RUNNING, MAX_PROMPT, MAX_GENERATED = 8, 100, 6
OUTPUT_AXES = {"next_token": "request", "hidden": "token"}


@dataclass
class Request:
    """A prompt, what was generated from it, and the rows that its chunks left."""

    prompt: list[int]
    num_wanted: int
    lease: Lease
    generated: list[int] = field(default_factory=list)
    hidden: list[torch.Tensor] = field(default_factory=list)

    @property
    def num_tokens(self) -> int:
        """Tokens so far."""
        return len(self.prompt) + len(self.generated)


# What a backend declares, and what is captured.

SLOTS = [
    gg.Slot("input_ids", axis="token", dtype=torch.int64, pad=0),
    gg.Slot("out_cache_loc", axis="token", dtype=torch.int64, pad=0),  # the sink page
    gg.Slot("req_pool_indices", axis="request", dtype=torch.int64, pad=0, index_of="req_to_token"),
    gg.Slot("prefix_lens", axis="request", dtype=torch.int64, pad=0),  # read by earlier chunks
    gg.Slot("cu_seqlens", axis="offset", dtype=torch.int64, pad=gg.REPEAT_LAST),
]
CONTRACT = gg.PrepContract(
    name="packed-prefill",
    reads={"prefix_lens": 0, "cu_seqlens": gg.REPEAT_LAST},
    outputs={"positions": "token", "last_rows": "request"},
    modes={gg.Mode.EXTEND},
)


def prep(view: Any) -> dict[str, torch.Tensor]:
    """Place each token in its request, and find where requests end; padded rows are at position 0."""
    begins, ends = view.cu_seqlens[:-1], view.cu_seqlens[1:]
    rows = torch.arange(view.bucket.tokens, device=ends.device)
    owner = torch.searchsorted(ends, rows, right=True).clamp(max=ends.shape[0] - 1)
    positions = rows - begins[owner] + view.prefix_lens[owner]
    return {
        "positions": torch.where(rows < ends[-1], positions, 0),
        "last_rows": (ends - 1).clamp(min=0),
    }


@gg.eager_break(row_aligned=("queries", "keys", "values"))
def attend(queries: Any, keys: Any, values: Any, cache: Any, view: Any) -> torch.Tensor:
    """Write the keys and values of this step, and attend request by request; all rows here are real."""
    live = view.live
    cache.write(live.out_cache_loc, keys, values)
    mixed, bounds = torch.zeros_like(queries), live.cu_seqlens.tolist()
    spans = zip(live.req_pool_indices.tolist(), live.prefix_lens.tolist(), bounds, bounds[1:])
    for pool_row, prefix, begin, end in spans:
        seen = view.tables.req_to_token[pool_row, : prefix + end - begin]
        mixed[begin:end] = causal_attention(queries[begin:end], cache.keys[seen], cache.values[seen], prefix)
    return mixed


def read_chunks(model: Transformer, caches: Any, view: Any, metadata: Any) -> dict[str, torch.Tensor]:
    """Run the layers over a step's tokens; each reaches the break once."""
    hidden = model.hidden(
        caches,
        view.input_ids,
        metadata["positions"],
        lambda cache, queries, keys, values: attend(queries, keys, values, cache, view),
    )
    return {"next_token": (hidden[metadata["last_rows"]] @ model.head).argmax(dim=-1), "hidden": hidden}


# The engine.


class Engine:
    """A runner for prompts and one for decoding, over caches of their own; switched off, both run eagerly."""

    def __init__(self, model: Transformer, pool: PagePool, ladder: gg.Ladder, enabled: bool) -> None:
        self.caches = model.new_caches(pool.num_pages)
        registry = gg.Registry()
        registry.register(CONTRACT)(prep)
        paged_decode.register(registry, page_size=pool.page_size)
        shared = {
            "registry": registry,
            "tables": {"req_to_token": pool.req_to_token},
            "device": model.device,
            "hooks": hooks_for(model.device),
        }
        self.prefill = gg.Runner(
            slots=SLOTS,
            ladder=ladder,
            prep=CONTRACT.name,
            forward=partial(read_chunks, model, self.caches),
            output_axes=OUTPUT_AXES,
            config=gg.RunnerConfig(max_requests=MAX_RUNNING, enabled=enabled),
            **shared,
        )
        self.decode = gg.Runner(
            slots=[*paged_decode.slots(), gg.Slot("input_ids", axis="token", dtype=torch.int64, pad=0)],
            ladder=[2, MAX_RUNNING],
            prep="paged-decode",
            forward=partial(model.decode, self.caches),
            config=gg.RunnerConfig(enabled=enabled),
            **shared,
        )

    def capture(self) -> None:
        """Capture the larger graphs first, so that the smaller ones find room in the same memory."""
        self.prefill.capture()
        self.decode.capture()


def hooks_for(device: torch.device) -> gg.CaptureHooks:
    """Let both runners of an engine capture on one stream and into one pool; they never replay at the same time."""
    if device.type != "cuda":
        return gg.CaptureHooks(pool=object())
    return gg.CaptureHooks(pool=torch.cuda.graph_pool_handle(), stream=torch.cuda.Stream())


def prefill_batch(chunks: Sequence[Chunk], requests: Sequence[Request], pool: PagePool) -> gg.Batch:
    """Spell one prefill step in plain lists."""
    bounds = [0]
    for chunk in chunks:
        bounds.append(bounds[-1] + chunk.num_tokens)
    places = [(requests[chunk.prompt], at) for chunk in chunks for at in range(chunk.begin, chunk.end)]
    sources = {
        "input_ids": [request.prompt[at] for request, at in places],
        "out_cache_loc": [pool.location(request.lease, at) for request, at in places],
        "req_pool_indices": [requests[chunk.prompt].lease.row for chunk in chunks],
        "prefix_lens": [chunk.begin for chunk in chunks],
        "cu_seqlens": bounds,
    }
    return gg.Batch(len(chunks), sources, mode=gg.Mode.EXTEND, num_tokens=bounds[-1])


def decode_batch(running: Sequence[Request], pool: PagePool) -> gg.Batch:
    """Spell one decode step in plain lists."""
    for request in running:
        pool.grow(request.lease, request.num_tokens)
    sources = {
        "seq_lens": [request.num_tokens for request in running],
        "req_pool_indices": [request.lease.row for request in running],
        "out_cache_loc": [pool.location(request.lease, request.num_tokens - 1) for request in running],
        "input_ids": [request.generated[-1] for request in running],
    }
    return gg.Batch(len(running), sources)


class Serving:
    """Serve requests in two engines, step by step, and hold every tensor of one against the other's."""

    def __init__(self, graphs: Engine, eager: Engine, pool: PagePool) -> None:
        self.graphs, self.eager, self.pool = graphs, eager, pool
        self.ways: Counter[tuple[str, ...]] = Counter()
        self.num_rows = self.num_real_rows = self.num_differences = 0

    def step(self, kind: str, batch: gg.Batch) -> gg.Step:
        """Replay a step of one kind of runner, and run it eagerly."""
        replayed, expected = getattr(self.graphs, kind).replay(batch), getattr(self.eager, kind).replay(batch)
        self.compare(kind, replayed.metadata, expected.metadata)
        self.compare(kind, replayed.outputs, expected.outputs)
        decision = replayed.decision
        bucket = f"{decision.bucket.tokens:4}"
        self.ways[kind, bucket, decision.prep.value, decision.forward.value, decision.reason.value] += 1
        if kind == "prefill":
            self.num_rows += decision.bucket.tokens
            self.num_real_rows += replayed.raw.tokens
        return replayed

    def compare(self, what: str, seen: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
        """Count the tensors that differ in any bit."""
        for found in compare(sum(self.ways.values()), seen, expected):
            self.num_differences += 1
            print(f"{what} differs: {found}", file=sys.stderr)

    def compare_caches(self) -> None:
        """Compare what was written; page 0 is the sink of padded rows."""
        for one, other in zip(self.graphs.caches, self.eager.caches, strict=True):
            for name in ("keys", "values"):
                ours, theirs = (getattr(cache, name)[self.pool.page_size :] for cache in (one, other))
                self.compare("cache", {name: ours}, {name: theirs})

    def read(self, requests: Sequence[Request]) -> None:
        """Read the prompts that arrived, in as few steps as hold them; each samples its first token."""
        largest = self.graphs.prefill.buckets[-1].tokens
        for request in requests:
            self.pool.grow(request.lease, len(request.prompt))
        for chunks in pack([len(request.prompt) for request in requests], largest, MAX_RUNNING):
            step = self.step("prefill", prefill_batch(chunks, requests, self.pool))
            rows = step.outputs["hidden"].split([chunk.num_tokens for chunk in chunks])
            for chunk, own, token in zip(chunks, rows, step.outputs["next_token"].tolist(), strict=True):
                request = requests[chunk.prompt]
                request.hidden.append(own.clone())
                if chunk.end == len(request.prompt):
                    request.generated.append(token)

    def serve(self, wanted: Sequence[arrivals.Request], seed: int) -> list[Request]:
        """Admit, read, decode and retire until every request is done."""
        arriving, rng = deque(wanted), random.Random(seed)
        running: list[Request] = []
        done: list[Request] = []
        now = 0
        while arriving or running:
            now = max(now + 1, 0 if running else arriving[0].arrival)  # nobody runs: on to the next arrival
            admitted = []
            while arriving and arriving[0].arrival <= now and len(running) + len(admitted) < MAX_RUNNING:
                one = arriving.popleft()
                lease = self.pool.admit(one.prompt_len + one.generated_len)
                admitted.append(Request(list(rng.randbytes(one.prompt_len)), one.generated_len, lease))
            self.read(admitted)
            running += admitted
            if decoding := [request for request in running if len(request.generated) < request.num_wanted]:
                step = self.step("decode", decode_batch(decoding, self.pool))
                for request, token in zip(decoding, step.outputs["next_token"].tolist(), strict=True):
                    request.generated.append(token)
            finished = [request for request in running if len(request.generated) == request.num_wanted]
            for request in finished:
                self.pool.release(request.lease)
            running = [request for request in running if len(request.generated) < request.num_wanted]
            done += finished
        return done


def check_whole_prompts(model: Transformer, requests: Sequence[Request]) -> float:
    """Read every prompt whole and alone; give the largest distance of its rows, and compare its first token."""
    furthest = 0.0
    for request in requests:
        tokens, positions = torch.tensor(request.prompt), torch.arange(len(request.prompt))
        rows = model.hidden(
            model.new_caches(1), tokens, positions, lambda cache, queries, *others: causal_attention(queries, *others)
        )
        torch.testing.assert_close(torch.cat(request.hidden), rows, rtol=1e-11, atol=1e-11)
        assert request.generated[0] == int((rows @ model.head)[-1].argmax())
        furthest = max(furthest, float((torch.cat(request.hidden) - rows).abs().max()))
    return furthest


def options() -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--trace", help="CSV of arrivals; seeded ones without it")
    parser.add_argument("--requests", type=int, default=16)
    parser.add_argument("--max-tokens", type=int, default=32, help="the largest token bucket")
    parser.add_argument("--waste", type=float, default=0.5, help="padded rows over real ones, at most, per bucket")
    parser.add_argument("--seed", type=int, default=0)
    return parser.parse_args()


def engines_for(chosen: argparse.Namespace, model: Transformer) -> tuple[Engine, Engine, PagePool]:
    """Build an engine with graphs and one without, over one page table."""
    page_size, max_context = model.shape.page_size, model.shape.max_context
    pool = PagePool(
        num_rows=MAX_RUNNING,
        num_pages=MAX_RUNNING * max_context // page_size,
        page_size=page_size,
        max_context=max_context,
        device=model.device,
    )
    ladder = gg.Ladder.bounded(chosen.max_tokens, chosen.waste)
    return Engine(model, pool, ladder, enabled=True), Engine(model, pool, ladder, enabled=False), pool


def main() -> None:
    """Serve the trace, check every step, and tell where the steps went."""
    chosen = options()
    torch.set_num_threads(1)  # the model is too small to share out
    rows = arrivals.generate(2000, chosen.seed) if chosen.trace is None else arrivals.read_trace(chosen.trace, 10**9)
    limits = {"max_prompt": MAX_PROMPT, "max_generated": MAX_GENERATED, "num_running": MAX_RUNNING}
    wanted = arrivals.fit(rows[: chosen.requests], **limits)
    on_cpu = chosen.device == "cpu"
    dtype = torch.float64 if on_cpu else torch.bfloat16
    model = Transformer(ModelShape(), seed=chosen.seed, dtype=dtype, device=chosen.device)
    graphs, eager, pool = engines_for(chosen, model)
    with graphs.prefill, graphs.decode, eager.prefill, eager.decode:
        graphs.capture()
        serving = Serving(graphs, eager, pool)
        served = serving.serve(wanted, chosen.seed)
        serving.compare_caches()
        tell(serving, served)
    if on_cpu:
        print(f"prompts read whole: first tokens equal, rows within {check_whole_prompts(model, served):.1e}")
    tell_waste([row.context_tokens for row in rows], max_tokens=2048)
    assert serving.num_differences == 0
    assert {forward for kind, _, _, forward, _ in serving.ways if kind == "prefill"} == {"graph"}


def tell(serving: Serving, served: Sequence[Request]) -> None:
    """Print where the steps went."""
    num_tokens = sum(len(request.prompt) for request in served)
    num_generated = sum(len(request.generated) for request in served)
    buckets = [bucket.tokens for bucket in serving.graphs.prefill.buckets]
    print(f"{len(served)} requests, {num_tokens} prompt tokens, {num_generated} generated; token buckets {buckets}")
    line = "{:8} {:>6} {:6} {:8} {:12} {:>5}".format
    print(line("step", "bucket", "prep", "forward", "reason", "steps"))
    for way, num_steps in sorted(serving.ways.items(), reverse=True):
        print(line(*way, num_steps))
    padded = 1 - serving.num_real_rows / serving.num_rows
    print(f"{padded:.1%} of the rows of prefill steps padded; {serving.num_differences} differences from eager steps")


def tell_waste(lengths: Sequence[int], max_tokens: int) -> None:
    """Print what ladders would pad the trace's prompts by, were each chunk a step of its own."""
    print(f"\n{len(lengths)} prompts of up to {max(lengths)} tokens in chunks of {max_tokens}, padded rows over real:")
    print(f"{'ladder':20} {'buckets':>7} {'in all':>8} {'at worst':>9} {'over 2x':>8}")
    for one in compare_ladders(lengths, max_tokens):
        print(f"{one.name:20} {one.num_sizes:7} {one.waste:8.1%} {one.worst:9.0%} {one.over_limit:8.2%}")


if __name__ == "__main__":
    main()
