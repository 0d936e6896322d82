"""A fleet in integers: requests arrive at many ranks, which agree on every step; nothing is computed.

What the planner would do with a real trace, on more ranks than one machine has: padded rows, how often the sum
is shorter, how many ranks idle, and the planner's own time.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from statistics import median

from graphglue.bench.timing import Sample
from graphglue.core.batch import Mode
from graphglue.core.buckets import Ladder
from graphglue.core.routing import Route
from graphglue.demo.arrivals import Request
from graphglue.ranks import Padding, Planner, RankFacts
from graphglue.ranks.facts import stacked

SIZES = [1, 2, 4, 8, 12, 16, 24, 32]
TOKEN_SIZES = [*(2**power for power in range(12)), 96, 192, 384, 768, 1536]
ROW_BYTES = 2 * 7168  # a hidden row of a large mixture of experts, in bfloat16
MAX_PROMPT, MAX_GENERATED, MAX_RUNNING = 2048, 96, 32
_WASTE = 2  # the leading engine's guard: a bucket of at most twice the prompt


@dataclass
class Tally:
    """Count what the agreed steps were."""

    num_ranks: int
    steps: int = 0
    prefill_steps: int = 0
    eager_steps: int = 0
    sum_steps: int = 0
    idle_ranks: int = 0
    real_rows: int = 0
    rows: int = 0
    planner_us: list[float] = field(default_factory=list)

    def shares(self) -> dict[str, float | bool]:
        """Give the shares of steps, ranks and rows."""
        return {
            "padded_row_share": 1 - self.real_rows / max(1, self.rows),
            "sum_len_share": self.sum_steps / self.steps,
            "idle_share": self.idle_ranks / (self.steps * self.num_ranks),
            "eager_share": self.eager_steps / self.steps,
            "prefill_share": self.prefill_steps / self.steps,
        }

    def planner(self) -> Sample:
        """Give the planner's times."""
        return Sample(tuple(self.planner_us))


class Rank:
    """One rank: prompts that wait, and how many tokens its running requests still generate."""

    def __init__(self, tokens: Ladder) -> None:
        self._tokens = tokens
        self.waiting: deque[Request] = deque()
        self.running: list[int] = []

    @property
    def load(self) -> int:
        """How many requests it has."""
        return len(self.waiting) + len(self.running)

    def facts(self) -> RankFacts:
        """State the next step: a prompt if one waits and there is room, else decode."""
        if self.waiting and len(self.running) < MAX_RUNNING:
            prompt = self.waiting[0].prompt_len
            bucket = self._tokens.cover(prompt)
            return RankFacts(1, prompt, Mode.EXTEND, vote=bucket is not None and bucket <= _WASTE * prompt)
        return RankFacts(len(self.running), len(self.running), Mode.DECODE)

    def advance(self, facts: RankFacts) -> None:
        """Take the step that was stated."""
        if facts.extends:
            self.running.append(self.waiting.popleft().generated_len)
        else:
            self.running = [left - 1 for left in self.running if left > 1]


def planner_of() -> Planner:
    """Build the planner of every rank."""
    return Planner(SIZES, row_bytes=ROW_BYTES, extend_ladder=TOKEN_SIZES, max_requests=MAX_RUNNING)


def simulate(requests: Sequence[Request], num_ranks: int, max_steps: int) -> Tally:
    """Serve requests on so many ranks, each new one where the fewest are, and plan every step."""
    planner, tally = planner_of(), Tally(num_ranks)
    ranks = [Rank(planner.extend_ladder) for _ in range(num_ranks)]
    arriving = deque(requests)
    for step in range(max_steps):
        while arriving and arriving[0].arrival <= step:
            min(ranks, key=lambda rank: rank.load).waiting.append(arriving.popleft())
        if not arriving and not any(rank.load for rank in ranks):
            break
        facts = [rank.facts() for rank in ranks]
        _count(tally, planner, facts)
        for rank, stated in zip(ranks, facts):
            rank.advance(stated)
    return tally


def _count(tally: Tally, planner: Planner, facts: Sequence[RankFacts]) -> None:
    matrix = stacked(facts)
    begin = time.perf_counter_ns()
    plan = planner.plan_encoded(matrix)
    tally.planner_us.append((time.perf_counter_ns() - begin) / 1e3)
    tally.steps += 1
    tally.prefill_steps += plan.mode.counts_tokens
    tally.eager_steps += plan.forward is Route.EAGER
    tally.sum_steps += plan.padding is Padding.SUM_LEN
    tally.idle_ranks += sum(one.requests == 0 for one in facts)
    tally.real_rows += sum(one.tokens for one in facts)
    tally.rows += plan.rows


def planner_us(num_ranks: int, rounds: int) -> float:
    """Time the planner alone on one matrix, with an idle rank: the median."""
    planner = planner_of()
    counts = [(7 * rank) % MAX_RUNNING for rank in range(num_ranks)]
    matrix = stacked([RankFacts(count, count, Mode.DECODE) for count in counts])
    times = []
    for _ in range(rounds):
        begin = time.perf_counter_ns()
        planner.plan_encoded(matrix)
        times.append((time.perf_counter_ns() - begin) / 1e3)
    return median(times)
