"""Prompts that are read two or three times over, and held against each other.

The glued engine reads packed chunks through graphs with eager breaks; the twin runs the same steps eagerly at the
same padded shapes, and agrees on every bit; a third, if asked for, reads each prompt whole and by itself, and
agrees on every first token.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from itertools import chain

import torch
from torch import Tensor

import graphglue as gg
from graphglue.demo import prefill
from graphglue.demo.checked import GLUED, TWIN, UNPADDED, Caches, Sampled, other_tokens
from graphglue.demo.chunks import Chunk, pack
from graphglue.demo.model import Transformer
from graphglue.demo.pair import Pair, spelled
from graphglue.demo.report import Tally
from graphglue.demo.twin import EagerTwin, Fault

LABEL = "prefill "


@dataclass(frozen=True)
class Prompt:
    """A prompt to read: its tokens, its row of ``req_to_token``, and the KV location of each token."""

    tokens: Sequence[int]
    pool_row: int
    locations: Sequence[int]


class CheckedPrefill:
    """Read prompts through graphglue, and check each step against eager twins.

    Args:
        model: what to read with.
        caches: of each engine; with those of an unpadded one each prompt is read whole as well.
        tally: what is counted.
        ladder: the token buckets to capture; longer prompts are chunked at the largest.
        max_requests: the most prompts of a step.
        req_to_token: the engine's table, [num_rows, max_context] int64.
        fault: breaks the twin's filled tensors on purpose, to show that the comparison can fail.
    """

    def __init__(
        self,
        model: Transformer,
        caches: Caches,
        tally: Tally,
        *,
        ladder: gg.Ladder,
        max_requests: int,
        req_to_token: Tensor,
        fault: Fault | None = None,
    ) -> None:
        self._model, self._caches, self._tally = model, caches, tally
        self._max_tokens, self._max_requests = ladder.largest, max_requests
        slots, registry = prefill.slots(), gg.Registry()
        registry.register(prefill.CONTRACT)(prefill.prep)
        self.runner = gg.Runner(
            slots=slots,
            ladder=ladder,
            registry=registry,
            prep=prefill.CONTRACT.name,
            tables={"req_to_token": req_to_token},
            forward=partial(prefill.forward, model, caches[GLUED]),
            output_axes=prefill.OUTPUT_AXES,
            device=model.device,
            config=gg.RunnerConfig(max_requests=max_requests),
        )
        run_twin = partial(prefill.forward, model, caches[TWIN], attend=prefill.attend_padded)
        twin = EagerTwin(prefill.prep, run_twin, slots, req_to_token)
        axes = prefill.OUTPUT_AXES
        self._pair = Pair(self.runner, twin, tally, tally.prefill, axes=axes, label=LABEL, fault=fault)

    def read(self, step: int, prompts: Sequence[Prompt]) -> list[Sampled]:
        """Read prompts in as many steps as it takes; give each engine's first token after each.

        Args:
            step: the engine's step, for the report; it also picks the kinds of sources.
            prompts: who has arrived; every location is theirs.

        Sync: the device.
        """
        first: list[Sampled] = [{} for _ in prompts]
        for chunks in pack([len(prompt.tokens) for prompt in prompts], self._max_tokens, self._max_requests):
            replayed, expected = self._step(step, prompts, chunks)
            for chunk, token, twins in zip(chunks, replayed, expected, strict=True):
                if chunk.end == len(prompts[chunk.prompt].tokens):
                    first[chunk.prompt] = {GLUED: token, TWIN: twins}
                    self._tally.prefill.num_tokens_compared += 1
        if UNPADDED in self._caches:
            self._read_whole(step, prompts, first)
        return first

    def _step(self, step: int, prompts: Sequence[Prompt], chunks: Sequence[Chunk]) -> tuple[list[int], list[int]]:
        owners = [prompts[chunk.prompt] for chunk in chunks]
        spans = [slice(chunk.begin, chunk.end) for chunk in chunks]
        columns = {
            "extend_lens": [chunk.num_tokens for chunk in chunks],
            "prefix_lens": [chunk.begin for chunk in chunks],
            "req_pool_indices": [owner.pool_row for owner in owners],
            "out_cache_loc": list(chain(*(owner.locations[span] for owner, span in zip(owners, spans, strict=True)))),
            "input_ids": list(chain(*(owner.tokens[span] for owner, span in zip(owners, spans, strict=True)))),
        }
        raw = gg.Bucket(len(chunks), sum(columns["extend_lens"]), 0)
        sources = spelled(columns, step, self._model.device)
        batch = gg.Batch(raw.requests, sources, mode=gg.Mode.EXTEND, num_tokens=raw.tokens)
        replayed, expected = self._pair.step(step, raw, batch, sources)
        return replayed["next_token"].tolist(), expected["next_token"].tolist()

    def _read_whole(self, step: int, prompts: Sequence[Prompt], first: Sequence[Sampled]) -> None:
        model, device = self._model, self._model.device
        for prompt, sampled in zip(prompts, first, strict=True):
            tokens = torch.tensor(prompt.tokens, device=device)
            locations = torch.tensor(prompt.locations, device=device)
            sampled[UNPADDED] = int(model.prefill(self._caches[UNPADDED], tokens, locations))
        self._tally.prefill.num_tokens_compared_unpadded += len(prompts)
        glued, unpadded = ([sampled[engine] for sampled in first] for engine in (GLUED, UNPADDED))
        self._tally.note_differences(other_tokens(step, LABEL, glued, unpadded))
