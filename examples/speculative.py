"""Decode speculatively: a draft and a target, each with a runner of its own, over one set of tables.

    python examples/speculative.py                          # float64, on the CPU tape
    python examples/speculative.py --device cuda            # bfloat16, CUDA graphs
    python examples/speculative.py --trace FILE.csv         # TIMESTAMP, ContextTokens, GeneratedTokens

A step is four replays, and the host waits once, at its end:

    pages    "kv-page-top-up"     requests that run out of pages take their next ones off a stack, on the device
    draft    "dsv4-draft"         the draft proposes a block: it sees its window, and the whole block at once
    verify   "dsv4-verify"        the target says what follows each token of the block; the longest match is taken
    extend   "dsv4-draft-extend"  the draft reads what was taken

Prompts are read by the same steps, a block at a time: their tokens stand where drafted ones would. All of it runs a
second time in an engine whose runners are switched off, eagerly at the same padded shapes, with tables and caches of
its own: no bit of metadata or outputs may differ. On the CPU the tokens are those of plain greedy decoding, one at a
time. The runners are local to their rank; in a data-parallel group the target's takes ranks=RankGroup(...).
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
from graphglue.demo import arrivals, speculative
from graphglue.demo.model import ModelShape, Transformer
from graphglue.demo.twin import compare
from graphglue.preps import causal, draft, top_up

LADDER, MAX_RUNNING = [2, 8], 8
BLOCK, DRAFTED = 4, 3  # a block is the last token that was taken, and what is drafted behind it
MAX_PROMPT, MAX_GENERATED = 16, 14
PAGE_SIZE, WINDOW, ALIGNMENT = 4, 8, 4
# Room for a whole block behind the longest request: rows past the end share one place, in any order of writes.
SHAPE = ModelShape(max_context=36, page_size=PAGE_SIZE, hidden=32, num_heads=2, num_kv_heads=1, ffn=64)
RING = WINDOW + 2 * BLOCK  # what a step reads and writes of one request spans no more positions
KINDS = ("pages", "draft", "verify", "extend")
SHADOW = gg.Shadow(first=2, every=5, on_mismatch="raise")
INPUT_IDS = gg.Slot("input_ids", axis="token", dtype=torch.int64, pad=0)
KNOWN = gg.Slot("known", axis="token", dtype=torch.int64, pad=0)  # -1 where a drafted token stands
PROPOSED = gg.Slot("proposed", axis="request", dtype=torch.int64, pad=0, inner=(DRAFTED,))
LAST_TOKEN = gg.Slot("last_token", axis="request", dtype=torch.int64, pad=0)


@dataclass
class Request:
    """What is known of a sequence, and how much of it the target has read."""

    prompt: list[int]
    num_wanted: int
    row: int
    generated: list[int] = field(default_factory=list)
    num_read: int = 0
    num_pages: int = 0

    @property
    def known(self) -> list[int]:
        """The prompt and what was generated."""
        return self.prompt + self.generated

    def ahead(self) -> list[int]:
        """Give the next block, as far as it is known; -1 where drafted tokens belong."""
        tokens = self.known[self.num_read : self.num_read + BLOCK]
        return tokens + [-1] * (BLOCK - len(tokens))

    @property
    def done(self) -> bool:
        """Whether everything wanted is there."""
        return len(self.generated) >= self.num_wanted


# The engine: tables, caches and four runners.


class Engine:
    """Everything of one engine; switched off, its runners run eagerly."""

    def __init__(self, target: Transformer, small: Transformer, enabled: bool) -> None:
        self.device, self.num_pages = target.device, MAX_RUNNING * SHAPE.max_context // PAGE_SIZE
        self.tables = self._tables()
        locations, ring = (self.num_pages + 1) * PAGE_SIZE, (MAX_RUNNING + 1) * RING
        paged = speculative.new_cache(target, speculative.PagedCache, locations, page_size=PAGE_SIZE)
        self.caches = [paged, *(speculative.new_cache(one, speculative.WindowCache, ring) for one in (target, small))]
        self._enabled, self._registry, self._hooks = enabled, registry_of_preps(), hooks_for(self.device)
        self.runners = self._runners(target, small)

    def _runners(self, target: Transformer, small: Transformer) -> dict[str, gg.Runner]:
        """Build the runners in the order of a step, in which they are captured too.

        In one memory pool a replay keeps what runners captured before it gave, and may overwrite what later ones gave:
        the target reads the locations that "pages" found, and the draft has replayed in between.
        """
        slots, whole, window = causal.slots("dsv4-verify"), self.caches[:2], self.caches[2:]
        preferred = speculative.successors(SHAPE.vocab, DRAFTED, self.device)
        verify, extend = partial(speculative.verify, target, whole), partial(speculative.extend, small, window)
        propose, enter = partial(speculative.draft, small, window, preferred), partial(speculative.enter_window, RING)
        return {
            "pages": self._runner("kv-page-top-up", gg.Mode.VERIFY, BLOCK, top_up.slots(), enter),
            "draft": self._runner("dsv4-draft", gg.Mode.DRAFT, DRAFTED, [*draft.slots(), LAST_TOKEN], propose),
            "verify": self._runner("dsv4-verify", gg.Mode.VERIFY, BLOCK, [*slots, KNOWN, PROPOSED], verify),
            "extend": self._runner("dsv4-draft-extend", gg.Mode.DRAFT_EXTEND, BLOCK, [*slots, INPUT_IDS], extend),
        }

    def _tables(self) -> dict[str, torch.Tensor]:
        """Lay the tables out: row 0, page 0 and location 0 are the sink, and every other page is free."""
        pages = random.Random(0).sample(range(1, self.num_pages + 1), self.num_pages)
        locations = torch.zeros((self.num_pages + 1) * PAGE_SIZE + 1, dtype=torch.int64)
        locations[-1] = -1
        tables = {
            "req_to_token": torch.zeros(MAX_RUNNING + 1, SHAPE.max_context, dtype=torch.int64),
            "full_to_swa": locations,
            "num_pages": torch.zeros(MAX_RUNNING + 1, dtype=torch.int64),
            "free_pages": torch.tensor(pages),
            "num_free": torch.tensor([self.num_pages]),
        }
        return {name: table.to(self.device) for name, table in tables.items()}

    def _runner(self, prep: str, mode: gg.Mode, width: int, slots: list[gg.Slot], forward: Any) -> gg.Runner:
        return gg.Runner(
            slots=slots,
            ladder=LADDER,
            prep=prep,
            forward=forward,
            tables=self.tables,
            registry=self._registry,
            device=self.device,
            tokens_per_request=width,
            hooks=self._hooks,
            config=gg.RunnerConfig(
                enabled=self._enabled, modes=frozenset({mode}), shadow=SHADOW if self._enabled else None
            ),
        )

    def locations(self, rows: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        """Look positions [requests, width] of requests up; those before the first token are in the sink."""
        found = self.tables["req_to_token"][rows[:, None], positions.clamp(min=0)]
        return torch.where(positions < 0, 0, found).flatten()

    def release(self, request: Request) -> None:
        """Put a request's pages back on the stack. Sync: none, the host knows how many there are."""
        tables, count = self.tables, request.num_pages
        first = tables["req_to_token"][request.row, : count * PAGE_SIZE : PAGE_SIZE]
        top = tables["num_free"] + torch.arange(count, device=self.device)
        tables["free_pages"][top] = first // PAGE_SIZE
        tables["num_free"] += count
        tables["num_pages"][request.row] = 0


def registry_of_preps() -> gg.Registry:
    """Register the shipped preps at the sizes of this engine."""
    registry = gg.Registry()
    causal.register(registry, PAGE_SIZE, WINDOW, ALIGNMENT)
    draft.register(registry, PAGE_SIZE, WINDOW, ALIGNMENT)
    top_up.register(registry, PAGE_SIZE)
    return registry


def hooks_for(device: torch.device) -> gg.CaptureHooks:
    """Let all runners of an engine capture on one stream and into one pool; they never replay at the same time."""
    if device.type != "cuda":
        return gg.CaptureHooks(pool=object())
    return gg.CaptureHooks(pool=torch.cuda.graph_pool_handle(), stream=torch.cuda.Stream())


# The loop.


class Loop:
    """One engine's requests; ``step`` is the story."""

    def __init__(self, engine: Engine) -> None:
        self.engine, self.device = engine, engine.device
        self.running: list[Request] = []
        self.done: list[Request] = []
        self.seen: dict[str, dict[str, torch.Tensor]] = {}  # of the last step
        self.decisions: dict[str, gg.Decision] = {}
        self.taken: Counter[int] = Counter()  # tokens that a drafted block brought -> blocks

    def step(self) -> None:
        """Run one step. Sync: the device, once, for what the target said."""
        requests, rows = self.running, [request.row for request in self.running]
        prefix = {"seq_lens": [request.num_read for request in requests], "req_pool_indices": rows}
        placed = self._replay("pages", gg.Mode.VERIFY, prefix).outputs["out_cache_loc"]
        block = {"out_cache_loc": placed.view(-1, BLOCK)[:, :DRAFTED].reshape(-1).contiguous()}
        last = {"last_token": [request.known[request.num_read] for request in requests]}
        drafted = self._replay("draft", gg.Mode.DRAFT, {**prefix, **block, **last}).outputs["next_token"]
        tokens = {"known": [token for one in requests for token in one.ahead()], "proposed": drafted.view(-1, DRAFTED)}
        said = self._replay("verify", gg.Mode.VERIFY, {**prefix, **tokens, "out_cache_loc": placed}).outputs
        blocks, followed = (said[name].view(-1, BLOCK).tolist() for name in ("block", "next_token"))
        assert int(self.seen["pages"]["num_missing_pages"]) == 0, "more requests than the pages are for"
        for request, proposed, follow in zip(requests, blocks, followed, strict=True):
            self._take(request, proposed, follow)
        self._retire()
        self._extend()

    def _take(self, request: Request, block: Sequence[int], followed: Sequence[int]) -> None:
        """Take the longest part of a block that greedy decoding would have written, and the token behind it."""
        known = len(request.known) - request.num_read
        num_taken = next((at for at in range(known, BLOCK) if block[at] != followed[at - 1]), BLOCK)
        end = min(request.num_read + BLOCK, SHAPE.max_context)  # the last blocks reach past the request's row
        request.num_pages = max(request.num_pages, -(-end // PAGE_SIZE))
        request.num_read += num_taken
        if known <= BLOCK:
            fresh = [*block[known:num_taken], followed[num_taken - 1]]
            request.generated += fresh[: request.num_wanted - len(request.generated)]
        if known == 1:
            self.taken[num_taken] += 1

    def _extend(self) -> None:
        """Let the draft read the last tokens of each request, so that its window holds no rejected ones."""
        ends = [request.num_read for request in self.running]
        rows = [request.row for request in self.running]
        at = [list(range(end - BLOCK, end)) for end in ends]
        tokens = [request.known[p] if p >= 0 else 0 for request, ps in zip(self.running, at) for p in ps]
        pool_rows, positions = (torch.tensor(one, dtype=torch.int64, device=self.device) for one in (rows, at))
        located = self.engine.locations(pool_rows, positions.view(-1, BLOCK))
        sources = {"seq_lens": ends, "req_pool_indices": rows, "input_ids": tokens, "out_cache_loc": located}
        self._replay("extend", gg.Mode.DRAFT_EXTEND, sources)

    def _retire(self) -> None:
        for request in [request for request in self.running if request.done]:
            self.engine.release(request)
            self.done.append(request)
        self.running = [request for request in self.running if not request.done]

    def _replay(self, kind: str, mode: gg.Mode, sources: dict[str, Any]) -> gg.Step:
        batch = gg.Batch(len(self.running), sources, mode) if self.running else gg.Batch.idle(mode)
        step = self.engine.runners[kind].replay(batch)
        # Copies: the next replay of this runner rewrites what it returned.
        self.seen[kind] = {name: leaf.clone() for name, leaf in {**step.metadata, **step.outputs}.items()}
        self.decisions[kind] = step.decision
        return step


class Serving:
    """Serve the same requests in two engines, in lockstep, and hold every tensor of one against the other's."""

    def __init__(self, graphs: Loop, eager: Loop) -> None:
        self.graphs, self.eager = graphs, eager
        self.ways: Counter[tuple[str, ...]] = Counter()
        self.num_steps = self.num_compared = self.num_differences = 0

    def serve(self, wanted: Sequence[arrivals.Request], seed: int) -> None:
        """Admit, step and retire until every request is done; an empty engine steps IDLE once, and skips the rest."""
        arriving, rng, now = deque(wanted), random.Random(seed), 0
        while arriving or self.graphs.running:
            while arriving and arriving[0].arrival <= now and len(self.graphs.running) < MAX_RUNNING:
                self._admit(arriving.popleft(), rng)
            idle = not self.graphs.running
            for loop in (self.graphs, self.eager):
                keep_busy(loop.device)
                loop.step()
            self._compare()
            now = arriving[0].arrival if idle and arriving else now + 1

    def _admit(self, one: arrivals.Request, rng: random.Random) -> None:
        free = min(set(range(1, MAX_RUNNING + 1)) - {request.row for request in self.graphs.running})
        prompt = list(rng.randbytes(one.prompt_len))
        for loop in (self.graphs, self.eager):
            loop.running.append(Request(prompt, one.generated_len, free))

    def _compare(self) -> None:
        self.num_steps += 1
        for kind in KINDS:
            seen, expected = self.graphs.seen[kind], self.eager.seen[kind]
            self.num_compared += len(expected)
            for found in compare(self.num_steps, seen, expected):
                self.num_differences += 1
                print(f"{kind} differs: {found}", file=sys.stderr)
            decision = self.graphs.decisions[kind]
            self.ways[kind, decision.prep.value, decision.forward.value, decision.reason.value] += 1


def keep_busy(device: torch.device) -> None:
    """Give a GPU some milliseconds of other work, so that the host is far ahead of it when it queues a step."""
    if device.type == "cuda":
        work = torch.ones(4096, 4096, dtype=torch.bfloat16, device=device)
        for _ in range(8):
            work = work @ work * 0


def mean_taken(taken: Counter[int]) -> float:
    """Give the acceptance length: the tokens that a drafted block brought, the one behind the match included."""
    return sum(length * num for length, num in taken.items()) / max(1, taken.total())


def options() -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--trace", help="CSV of arrivals; seeded ones without it")
    parser.add_argument("--requests", type=int, default=16)
    parser.add_argument("--seed", type=int, default=1)
    return parser.parse_args()


def main() -> None:
    """Serve, hold every step against the eager engine, and tell where the steps went."""
    chosen = options()
    torch.set_num_threads(1)  # the models are too small to share out
    rows = (
        arrivals.generate(chosen.requests, chosen.seed)
        if chosen.trace is None
        else arrivals.read_trace(chosen.trace, chosen.requests)
    )
    wanted = arrivals.fit(rows, max_prompt=MAX_PROMPT, max_generated=MAX_GENERATED, num_running=MAX_RUNNING)
    dtype = torch.float64 if chosen.device == "cpu" else torch.bfloat16
    target, small = speculative.build(SHAPE, chosen.seed, dtype, chosen.device)
    graphs, eager = (Engine(target, small, enabled) for enabled in (True, False))
    for runner in graphs.runners.values():
        runner.capture(progress=False)
    serving = Serving(Loop(graphs), Loop(eager))
    serving.serve(wanted, chosen.seed)
    tell(serving)
    check(serving)
    if chosen.device == "cpu":
        check_greedy(target, serving.graphs.done)
    for engine in (graphs, eager):
        for runner in engine.runners.values():
            runner.close()


def tell(serving: Serving) -> None:
    """Print where the steps went, and what the drafts were worth."""
    done = serving.graphs.done
    print(
        f"{len(done)} requests, {sum(len(one.prompt) for one in done)} prompt tokens, "
        f"{sum(len(one.generated) for one in done)} generated, in {serving.num_steps} steps"
    )
    line = "{:8} {:6} {:8} {:12} {:>5}".format
    print(line("replay", "prep", "forward", "reason", "steps"))
    for way, num_steps in sorted(serving.ways.items()):
        print(line(*way, num_steps))
    for name, loop in (("glued", serving.graphs), ("eager", serving.eager)):
        spread = ", ".join(f"{length}: {loop.taken[length]}" for length in range(1, BLOCK + 1))
        print(f"acceptance length {name}: {mean_taken(loop.taken):.4f} (blocks by tokens {spread})")
    shadows = {kind: runner.stats()["shadow"] for kind, runner in serving.graphs.engine.runners.items()}
    print("shadow check: " + ", ".join(f"{kind} {one['passed']} of {one['sampled']}" for kind, one in shadows.items()))
    print(f"{serving.num_compared} tensors compared, {serving.num_differences} differences from eager steps")


def check(serving: Serving) -> None:
    """Hold what must be so on every device."""
    graphs, eager = serving.graphs, serving.eager
    assert serving.num_differences == 0
    assert [one.generated for one in graphs.done] == [one.generated for one in eager.done]
    assert graphs.taken == eager.taken
    assert graphs.taken.total() > graphs.taken[1] > 0, "drafts were never taken, or always"
    for kind in KINDS:
        ways = {reason: (prep, forward) for name, prep, forward, reason in serving.ways if name == kind}
        assert ways.pop("idle_eager", None) in (None, ("eager", "graph"))
        assert "padded" in ways
        assert set(ways.values()) == {("glue", "graph")}, ways
    for kind, runner in graphs.engine.runners.items():
        shadow = runner.stats()["shadow"]
        assert shadow["passed"] == shadow["sampled"], shadow
        assert shadow["sampled"] or kind == "pages", "a prep with effects is never repeated, every other one is"
    assert int(graphs.engine.tables["num_free"]) == graphs.engine.num_pages


def check_greedy(target: Transformer, done: Sequence[Request]) -> None:
    """Decode every request plainly, one token at a time: not one token differs."""
    for request in done:
        plain = speculative.plain_greedy(target, request.prompt, request.num_wanted, WINDOW)
        assert request.generated == plain, (request.generated, plain)
    print(f"{len(done)} requests equal plain greedy decoding, token by token")


if __name__ == "__main__":
    main()
