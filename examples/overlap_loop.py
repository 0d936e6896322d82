"""Schedule step n + 1 on the host while step n runs. Run: python overlap_loop.py, or with --device cuda

What makes that possible, and what an engine may copy from here:

- Nobody waits for a token before it is needed. Step n leaves each token in ``relay``, a device table with one row for
  each running request, and step n + 1 takes it there: the host writes -1 where it would write a token it does not know.
- Tokens reach the host behind their step: a copy into pinned memory and an event, looked at ``depth`` steps later.
- So the host learns of a stop token late, and has scheduled the request again. Those steps are wasted, not wrong:
  their tokens are dropped, and what they write lies in the request's own row and pages, which go to another request in
  later steps of the same stream only.
- Host sources are read before ``replay`` returns. The arrays of one step are those of the next, and are overwritten at
  once, with any number of steps in flight. (Device sources may be overwritten at once by work on the same stream; on
  another stream it waits for ``step.sources_read()``, with ``RunnerConfig(events=True)``.)

With ``--stage`` the next step is staged on a guess, that no request stops, before the host has seen the last tokens;
``replay`` takes it where the guess was right, and redoes it where it was not.
"""

import argparse
import random
import time
from collections import deque
from dataclasses import dataclass, field
from types import SimpleNamespace

import numpy as np
import torch

import graphglue as gg
from graphglue.demo.model import ModelShape, Transformer
from graphglue.demo.pages import Lease, PagePool
from graphglue.preps import paged_decode

MAX_RUNNING = 4
SHAPE = ModelShape(max_context=64, page_size=16)
STOPS = frozenset(range(12))  # tokens that end a request, as its last one
FROM_RELAY = -1  # in place of a token that only the device knows


@dataclass(eq=False)
class Request:
    """A prompt, what was generated from it, and how far it was scheduled. Prompts are read token by token."""

    prompt: list[int]
    max_new: int
    generated: list[int] = field(default_factory=list)
    lease: Lease | None = None
    num_scheduled: int = 0  # tokens that are read by the steps so far, those in flight included
    is_done: bool = False

    def can_go_on(self, num_scheduled):
        """Tell whether another token may be read, as far as the host knows."""
        return not self.is_done and num_scheduled < len(self.prompt) + self.max_new - 1

    def token(self, position):
        """Give the token at a position: the prompt's, or the one that the last step leaves in the relay."""
        return self.prompt[position] if position < len(self.prompt) else FROM_RELAY


class Landing:
    """Bring one step's tokens to the host. There are as many of these as steps may be unread."""

    def __init__(self, device):
        self.host = torch.empty(MAX_RUNNING, dtype=torch.int64, pin_memory=device.type == "cuda")
        self.event = torch.cuda.Event() if device.type == "cuda" else None

    def depart(self, tokens):
        """Copy behind the step; the next replay rewrites ``tokens``, and comes behind this copy. Sync: none."""
        self.host[: len(tokens)].copy_(tokens, non_blocking=True)
        if self.event is not None:
            self.event.record()

    def arrive(self, num_tokens):
        """Give the tokens. Sync: the event behind their copy, and nothing that was queued later."""
        if self.event is not None:
            self.event.synchronize()
        return self.host[:num_tokens].tolist()


class Engine:
    """Serve requests with up to ``depth`` steps whose tokens the host has not seen when it schedules the next one."""

    def __init__(self, model, depth, stage=False):
        self.model, self.depth, self.stages = model, depth, stage
        self.pool = PagePool(num_rows=MAX_RUNNING, num_pages=16, page_size=16, max_context=64, device=model.device)
        self.caches = model.new_caches(self.pool.num_pages)
        self.relay = torch.zeros(MAX_RUNNING + 1, dtype=torch.int64, device=model.device)  # row 0 is the pad rows'
        self.arrays = {
            name: np.zeros(MAX_RUNNING, np.int64)
            for name in ("seq_lens", "req_pool_indices", "out_cache_loc", "input_ids")
        }
        self.landings = deque(Landing(model.device) for _ in range(depth + 1))
        self.in_flight = deque()  # (landing, [(request, position), ...]) of each step, the oldest first
        self.running, self.num_steps, self.num_wasted = [], 0, 0
        registry = gg.Registry()
        paged_decode.register(registry, page_size=SHAPE.page_size)
        self.runner = gg.Runner(
            slots=[*paged_decode.slots(), gg.Slot("input_ids", axis="token", dtype=torch.int64, pad=0)],
            ladder=[1, 2, MAX_RUNNING],
            registry=registry,
            prep="paged-decode",
            tables={"req_to_token": self.pool.req_to_token, "relay": self.relay},
            forward=self.forward,
            device=model.device,
            config=gg.RunnerConfig(staging=stage),
        )
        self.runner.capture(progress=False)

    def forward(self, view, metadata):
        """Decode one token for each row, from the relay where the host did not know it, and leave the next one there.

        Sync: none. Capturable: yes. Pad rows bring a token of their own and leave theirs in row 0.
        """
        rows, relay = view.req_pool_indices, view.tables.relay
        tokens = torch.where(view.input_ids == FROM_RELAY, relay[rows], view.input_ids)
        outputs = self.model.decode(self.caches, SimpleNamespace(input_ids=tokens), metadata)
        relay[rows] = outputs["next_token"]
        return outputs

    def serve(self, requests):
        """Run steps until every request is done."""
        waiting = deque(requests)
        while waiting or self.running or self.in_flight:
            while waiting and len(self.running) < MAX_RUNNING:
                self.running.append(request := waiting.popleft())
                request.lease = self.pool.admit(len(request.prompt) + request.max_new)
            if reads := self.next_reads():
                self.launch(reads)
            if len(self.in_flight) > self.depth or not reads:  # enough is unread, or nobody can go on unseen
                self.land()

    def next_reads(self):
        """Give the requests that go on, each with the position it reads next."""
        return [(one, one.num_scheduled) for one in self.running if one.can_go_on(one.num_scheduled)]

    def batch_of(self, reads):
        """Spell a step in the arrays that every step is spelled in."""
        for number, (request, position) in enumerate(reads):
            self.pool.grow(request.lease, position + 1)  # writes the table behind the steps in flight
            self.arrays["seq_lens"][number] = position + 1
            self.arrays["req_pool_indices"][number] = request.lease.row
            self.arrays["out_cache_loc"][number] = self.pool.location(request.lease, position)
            self.arrays["input_ids"][number] = request.token(position)
        return gg.Batch(len(reads), {name: array[: len(reads)] for name, array in self.arrays.items()})

    def launch(self, reads):
        """Queue a step and the copy of its tokens. Sync: none."""
        step = self.replay(self.batch_of(reads))
        landing = self.landings.popleft()
        landing.depart(step.outputs["next_token"])
        self.landings.append(landing)
        self.in_flight.append((landing, reads))
        self.num_steps += 1
        for request, _ in reads:
            request.num_scheduled += 1
        if self.stages and (guess := self.next_reads()):
            self.runner.stage(self.batch_of(guess))

    def replay(self, batch):
        """Queue one step; from its return on the arrays may be overwritten. Sync: none."""
        return self.runner.replay(batch)

    def land(self):
        """Look at the tokens of the oldest step that was not looked at, and end the requests that are done."""
        landing, reads = self.in_flight.popleft()
        for (request, position), token in zip(reads, landing.arrive(len(reads)), strict=True):
            self.num_wasted += request.is_done
            if request.is_done or position < len(request.prompt) - 1:  # scheduled once too often; or in the prompt
                continue
            request.generated.append(token)
            if token in STOPS or len(request.generated) == request.max_new:
                request.is_done = True
                self.running.remove(request)
                self.pool.release(request.lease)


def draw_requests(num_requests, seed=0):
    """Draw prompts of 3 to 12 tokens, and how many may follow."""
    rng = random.Random(seed)
    return [Request([*rng.randbytes(rng.randint(3, 12))], rng.randint(6, 24)) for _ in range(num_requests)]


def alone(model, request):
    """Generate a request's tokens the slow way: each from a fresh read of all before it."""
    tokens = list(request.prompt)
    for _ in range(request.max_new):
        caches = model.new_caches(1 + SHAPE.max_context // SHAPE.page_size)
        locations = torch.arange(len(tokens), device=model.device) + SHAPE.page_size
        tokens.append(int(model.prefill(caches, torch.tensor(tokens, device=model.device), locations)))
        if tokens[-1] in STOPS:
            break
    return tokens[len(request.prompt) :]


def main():
    """Serve the same requests with no, one and three steps unread, and hold every token against decoding alone."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--stage", action="store_true", help="stage the next step on a guess")
    parser.add_argument("--requests", type=int, default=6)
    chosen = parser.parse_args()
    model = Transformer(SHAPE, seed=0, dtype=torch.float64, device=chosen.device)
    expected = [alone(model, request) for request in draw_requests(chosen.requests)]
    for depth in (0, 1, 3):
        requests, engine = draw_requests(chosen.requests), Engine(model, depth, chosen.stage)
        begin = time.perf_counter()
        engine.serve(requests)
        milliseconds = (time.perf_counter() - begin) * 1e3 / engine.num_steps
        assert [request.generated for request in requests] == expected
        assert engine.num_wasted <= depth * chosen.requests
        staging = engine.runner.stats().get("staging")
        engine.runner.close()
        took = f"; staged {staging['staged']}, taken {staging['staged_taken']}" if chosen.stage else ""
        took += f"; {milliseconds:.2f} ms a step" if chosen.device == "cuda" else ""
        print(
            f"{depth} steps unread: {sum(map(len, expected))} tokens, each as decoded alone; {engine.num_steps} steps, "
            f"{engine.num_wasted} reads wasted behind a stop{took}"
        )


if __name__ == "__main__":
    main()
