"""A continuous-batching engine in small: requests come, are read, decode together, and leave."""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import count

from graphglue.core.buckets import Ladder
from graphglue.demo.arrivals import Request
from graphglue.demo.checked import GLUED, TWIN, UNPADDED, CheckedDecoder, Prep, Row, Sampled
from graphglue.demo.checked_prefill import CheckedPrefill, Prompt
from graphglue.demo.model import Transformer
from graphglue.demo.pages import Lease, PagePool
from graphglue.demo.report import Tally
from graphglue.demo.twin import Fault
from graphglue.preps import paged_decode


@dataclass(frozen=True)
class EngineShape:
    """The engine's limits. ``max_running`` above the ladder's end makes some steps leave the ladder.

    Prompts are read in token buckets of up to ``max_chunk`` tokens, and up to ``max_prefilled`` in a step.
    """

    ladder: tuple[int, ...] = (1, 2, 4, 8, 16)
    max_chunk: int = 64
    max_prefilled: int = 6
    max_running: int = 18
    max_prompt: int = 192
    max_generated: int = 48
    num_pages: int = 200

    @property
    def prefill_ladder(self) -> Ladder:
        """The token buckets; none is more than twice as large as what it holds, where the router would run eagerly."""
        return Ladder.bounded(self.max_chunk, waste=1.0)


@dataclass
class Running:
    """One request on its way: its KV lease, its length with the token to decode, and what is left."""

    lease: Lease
    num_tokens: int
    num_left: int
    sampled: Sampled

    def take(self, sampled: Sampled) -> None:
        """Append a new token."""
        self.sampled = sampled
        self.num_tokens += 1
        self.num_left -= 1


class Engine:
    """Serve requests with decode steps that are checked against eager twins.

    Args:
        shape: the limits; ``max_prompt + max_generated`` fits the model's context.
        model: what to serve.
        prep: the decode prep; "paged-decode" by default.
        unpadded: also read and decode without padding, and compare the tokens.
        fault: breaks the twin's filled tensors of decode steps on purpose, to show that the comparison can fail.
        prefill_fault: the same for the steps that read prompts.
        seed: seeds the prompts.
        on_finish: called with how many requests finished, after each step.
    """

    def __init__(
        self,
        shape: EngineShape,
        model: Transformer,
        *,
        prep: Prep | None = None,
        unpadded: bool = False,
        fault: Fault | None = None,
        prefill_fault: Fault | None = None,
        seed: int = 0,
        on_finish: Callable[[int], object] = lambda num_finished: None,
    ) -> None:
        self._on_finish = on_finish
        self._prompts = random.Random(seed)
        self._running: list[Running] = []
        page_size = model.shape.page_size
        self._pool = PagePool(
            num_rows=shape.max_running,
            num_pages=shape.num_pages,
            page_size=page_size,
            max_context=model.shape.max_context,
            device=model.device,
        )
        names = (GLUED, TWIN, UNPADDED) if unpadded else (GLUED, TWIN)
        caches = {name: model.new_caches(self._pool.num_pages) for name in names}
        self._tally, table = Tally(), self._pool.req_to_token
        self._decoder = CheckedDecoder(
            model,
            caches,
            self._tally,
            ladder=shape.ladder,
            req_to_token=table,
            prep=prep or paged_decode.make(page_size),
            fault=fault,
        )
        self._prefill = CheckedPrefill(
            model,
            caches,
            self._tally,
            ladder=shape.prefill_ladder,
            max_requests=shape.max_prefilled,
            req_to_token=table,
            fault=prefill_fault,
        )

    def serve(self, requests: Sequence[Request]) -> Tally:
        """Capture, then run steps until every request has all its tokens. Sync: the device, each step.

        Args:
            requests: in order of arrival; each fits the shape's limits.
        """
        arriving, waiting = deque(requests), deque[Request]()
        with self._decoder.runner as decode, self._prefill.runner as prefill:
            decode.capture()
            prefill.capture()
            for step in count():
                while arriving and arriving[0].arrival <= step:
                    waiting.append(arriving.popleft())
                self._admit(step, waiting)
                if not (arriving or waiting or self._running):
                    break
                self._decode(step)
        return self._tally

    def _admit(self, step: int, waiting: deque[Request]) -> None:
        """Start requests, first come first served, while rows and pages last, and read their prompts."""
        admitted, prompts = [], []
        while waiting and self._pool.can_admit(waiting[0].prompt_len + waiting[0].generated_len):
            request = waiting.popleft()
            lease = self._pool.admit(request.prompt_len + request.generated_len)
            self._pool.grow(lease, request.prompt_len)
            locations = [self._pool.location(lease, position) for position in range(request.prompt_len)]
            prompts.append(Prompt(list(self._prompts.randbytes(request.prompt_len)), lease.row, locations))
            admitted.append(Running(lease, request.prompt_len, request.generated_len, {}))
        for running, sampled in zip(admitted, self._prefill.read(step, prompts), strict=True):
            running.take(sampled)
        self._running += admitted
        self._tally.num_tokens += len(admitted)
        self._retire()

    def _decode(self, step: int) -> None:
        """Give every running request its next token; with none the step is IDLE."""
        rows = []
        for running in self._running:
            self._pool.grow(running.lease, running.num_tokens)
            location = self._pool.location(running.lease, running.num_tokens - 1)
            rows.append(Row(running.num_tokens, running.lease.row, location, running.sampled))
        for running, sampled in zip(self._running, self._decoder.decode(step, rows), strict=True):
            running.take(sampled)
        self._tally.num_tokens += len(rows)
        self._retire()

    def _retire(self) -> None:
        finished = [running for running in self._running if running.num_left == 0]
        for running in finished:
            self._pool.release(running.lease)
        self._running = [running for running in self._running if running.num_left > 0]
        self._on_finish(len(finished))
