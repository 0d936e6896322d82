"""Serve a small transformer with a continuous-batching loop over graphglue. Run: python decode_loop.py

The loop is an engine's, in small: a scheduler admits requests, slots take the step's values, one
replay runs fill, metadata prep and forward, and the sampled tokens go back to the requests.
"""

import random
from collections import Counter, deque
from dataclasses import dataclass, field
from functools import partial

import torch

import graphglue as gg
from graphglue.demo.model import ModelShape, Transformer
from graphglue.demo.pages import Lease, PagePool
from graphglue.preps import paged_decode

MAX_RUNNING = 4


@dataclass
class Request:
    """A prompt, and what was generated from it."""

    prompt: list[int]
    num_wanted: int
    generated: list[int] = field(default_factory=list)
    lease: Lease | None = None

    @property
    def num_tokens(self) -> int:
        """Tokens so far."""
        return len(self.prompt) + len(self.generated)


def prefill(model, caches, pool, request):
    """Read the prompt eagerly, and sample the first token."""
    pool.grow(request.lease, len(request.prompt))
    locations = [pool.location(request.lease, position) for position in range(len(request.prompt))]
    first = model.prefill(caches, torch.tensor(request.prompt), torch.tensor(locations))
    request.generated.append(int(first))


def batch_of(running, pool):
    """Spell one decode step: plain lists, one entry per running request; padding is graphglue's."""
    if not running:
        return gg.Batch.idle()
    for request in running:
        pool.grow(request.lease, request.num_tokens)
    sources = {
        "seq_lens": [request.num_tokens for request in running],
        "req_pool_indices": [request.lease.row for request in running],
        "out_cache_loc": [pool.location(request.lease, request.num_tokens - 1) for request in running],
        "input_ids": [request.generated[-1] for request in running],
    }
    return gg.Batch(num_requests=len(running), sources=sources)


def serve(model, caches, pool, runner, arrivals):
    """Run steps until every request is done; ``arrivals`` are (step, request) in order."""
    arriving, running, reasons, number = deque(arrivals), [], Counter(), 0
    while arriving or running:
        # Schedule.
        while arriving and arriving[0][0] <= number and len(running) < MAX_RUNNING:
            request = arriving.popleft()[1]
            request.lease = pool.admit(len(request.prompt) + request.num_wanted)
            prefill(model, caches, pool, request)
            running.append(request)
        # Replay: fill, prep and forward.
        step = runner.replay(batch_of(running, pool))
        reasons[step.decision.reason.value] += 1
        # Sample; the outputs are already cut to the real rows.
        for request, token in zip(running, step.outputs["next_token"].tolist(), strict=True):
            request.generated.append(token)
        # Retire.
        for request in running:
            if len(request.generated) >= request.num_wanted:
                pool.release(request.lease)
        running = [request for request in running if len(request.generated) < request.num_wanted]
        number += 1
    return reasons


def recomputed(model, request):
    """Generate the same tokens the slow way: every token from a fresh prefill of all before it."""
    tokens = list(request.prompt)
    for _ in request.generated:
        caches = model.new_caches(1 + model.shape.max_context // model.shape.page_size)
        locations = torch.arange(len(tokens)) + model.shape.page_size
        tokens.append(int(model.prefill(caches, torch.tensor(tokens), locations)))
    return tokens[len(request.prompt) :]


def main():
    """Serve six requests that come in two bursts, and hold every token against recomputation."""
    shape = ModelShape(max_context=64, page_size=16)
    model = Transformer(shape, seed=0, dtype=torch.float64)
    pool = PagePool(num_rows=MAX_RUNNING, num_pages=16, page_size=16, max_context=64, device=model.device)
    caches = model.new_caches(pool.num_pages)
    rng = random.Random(0)
    requests = [Request(list(rng.randbytes(rng.randint(3, 30))), rng.randint(4, 20)) for _ in range(6)]
    arrivals = list(zip((0, 2, 2, 40, 40, 40), requests, strict=True))

    registry = gg.Registry()
    paged_decode.register(registry, page_size=16)
    with gg.Runner(
        slots=[*paged_decode.slots(), gg.Slot("input_ids", axis="token", dtype=torch.int64, pad=0)],
        ladder=[1, 2, 4],
        registry=registry,
        prep="paged-decode",
        tables={"req_to_token": pool.req_to_token},
        forward=partial(model.decode, caches),
        device="cpu",
    ) as runner:
        runner.capture()
        reasons = serve(model, caches, pool, runner, arrivals)

    for request in requests:
        assert request.generated == recomputed(model, request)
    assert reasons["padded"]
    assert reasons["unpadded"]
    assert reasons["idle_eager"]
    num_tokens = sum(len(request.generated) for request in requests)
    print(f"{num_tokens} tokens, all as recomputed; steps {dict(reasons)}")


if __name__ == "__main__":
    main()
