"""Decode steps that are run two or three times over, and held against each other.

Every engine in here has KV caches and sampled tokens of its own: the glued one goes through
``graphglue.Runner``, the twin runs eagerly at the same padded shapes, and the third, if asked for,
runs eagerly without padding. The first two must agree on every bit, the third on every token.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from time import perf_counter
from typing import Any

import numpy
import torch
from torch import Tensor

import graphglue as gg
from graphglue.demo.model import Transformer
from graphglue.demo.report import Tally
from graphglue.demo.twin import Difference, EagerTwin, Fault, compare
from graphglue.preps import paged_decode

Prep = Callable[[Any], Mapping[str, Tensor]]
Sampled = dict[str, int]  # engine -> its own token
GLUED, TWIN, UNPADDED = "glued", "twin", "unpadded"


@dataclass(frozen=True)
class Row:
    """One request's row of a decode step; ``last`` is what each engine sampled for it last."""

    num_tokens: int
    pool_row: int
    location: int
    last: Sampled


class CheckedDecoder:
    """Decode through graphglue, and check each step against eager twins.

    Args:
        model: what to decode with.
        ladder: the batch sizes to capture.
        req_to_token: the engine's table, [num_rows, max_context] int64.
        num_pages: pages of each engine's caches, the sink included.
        prep: the decode prep that is captured, and called by the twins.
        unpadded: also decode without padding.
        fault: breaks the twin's filled tensors on purpose, to show that the comparison can fail.
    """

    def __init__(
        self,
        model: Transformer,
        *,
        ladder: Sequence[int],
        req_to_token: Tensor,
        num_pages: int,
        prep: Prep,
        unpadded: bool = False,
        fault: Fault | None = None,
    ) -> None:
        self.tally = Tally()
        self._model, self._fault = model, fault
        self._slots = [*paged_decode.slots(), gg.Slot("input_ids", axis="token", dtype=torch.int64, pad=0)]
        names = (TWIN, UNPADDED) if unpadded else (TWIN,)
        self._twins = {name: EagerTwin(model, prep, self._slots, req_to_token, num_pages) for name in names}
        caches = model.new_caches(num_pages)
        self._caches = {GLUED: caches} | {name: twin.caches for name, twin in self._twins.items()}

        registry = gg.Registry()
        registry.register(paged_decode.CONTRACT)(prep)
        self.runner = gg.Runner(
            slots=self._slots,
            ladder=ladder,
            registry=registry,
            prep=paged_decode.CONTRACT.name,
            tables={"req_to_token": req_to_token},
            forward=partial(model.decode, caches),
            device=model.device,
        )

    def prefill(self, prompt: Sequence[int], locations: Sequence[int]) -> Sampled:
        """Read one prompt in every engine, eagerly; each samples its own first token. Sync: the device."""
        tokens = torch.tensor(prompt, device=self._model.device)
        where = torch.tensor(locations, device=self._model.device)
        return {name: int(self._model.prefill(kept, tokens, where)) for name, kept in self._caches.items()}

    def decode(self, step: int, rows: Sequence[Row]) -> list[Sampled]:
        """Run one step everywhere, count what differs, and give each row's new tokens.

        Args:
            step: the step's number; it also picks the kinds of sources.
            rows: who is there; with nobody the step is IDLE.

        Sync: the device.
        """
        num_requests = len(rows)
        batch = gg.Batch(num_requests, self._sources(step, rows, GLUED)) if rows else gg.Batch.idle()
        replayed, glued_us = self._timed(lambda: self.runner.replay(batch))

        sources = self._sources(step, rows, TWIN)
        bucket, fault = replayed.decision.bucket, partial(self._fault, step) if self._fault else None
        run_twin = partial(self._twins[TWIN].step, bucket, num_requests, sources, fault)
        (metadata, outputs), eager_us = self._timed(run_twin)
        self.tally.note_step(replayed.decision, num_requests, glued_us, eager_us)

        real = {name: leaf[:num_requests] for name, leaf in outputs.items()}
        self._compare(step, replayed.metadata, metadata)
        self._compare(step, replayed.outputs, real)
        if not rows:
            return []
        tokens = {GLUED: replayed.outputs["next_token"].tolist(), TWIN: real["next_token"].tolist()}
        self.tally.num_tokens_compared += num_requests
        if UNPADDED in self._twins:
            tokens[UNPADDED] = self._decode_unpadded(step, rows, tokens[GLUED])
        return [{name: column[row] for name, column in tokens.items()} for row in range(num_requests)]

    def _decode_unpadded(self, step: int, rows: Sequence[Row], glued: list[int]) -> list[int]:
        sources = self._sources(step, rows, UNPADDED)
        exact = gg.Bucket(len(rows), len(rows), 1)
        tokens = self._twins[UNPADDED].step(exact, len(rows), sources, None)[1]["next_token"].tolist()
        self.tally.num_tokens_compared_unpadded += len(rows)
        self.tally.note_differences(
            Difference(step, "next_token, unpadded", row, str(one), str(other))
            for row, (one, other) in enumerate(zip(glued, tokens, strict=True))
            if one != other
        )
        return tokens

    def _compare(self, step: int, glued: Mapping[str, Tensor], expected: Mapping[str, Tensor]) -> None:
        self.tally.num_tensors_compared += len(expected)
        self.tally.note_differences(compare(step, glued, expected))

    def _sources(self, step: int, rows: Sequence[Row], engine: str) -> dict[str, Any]:
        """Spell each slot's values in another kind of source, and differently at each step."""
        values = {
            "seq_lens": [row.num_tokens for row in rows],
            "req_pool_indices": [row.pool_row for row in rows],
            "out_cache_loc": [row.location for row in rows],
            "input_ids": [row.last[engine] for row in rows],
        }
        return {
            name: _spelled(numbers, step + position, self._model.device)
            for position, (name, numbers) in enumerate(values.items())
        }

    def _timed(self, run: Callable[[], Any]) -> tuple[Any, float]:
        """Measure the host time of a call in us; the device is idle before it and done after it."""
        self._synchronize()
        start = perf_counter()
        result = run()
        elapsed_us = (perf_counter() - start) * 1e6
        self._synchronize()
        return result, elapsed_us

    def _synchronize(self) -> None:
        if self._model.device.type != "cpu":
            torch.accelerator.synchronize(self._model.device)


def _spelled(numbers: list[int], turn: int, device: torch.device) -> Any:
    """Spell numbers as a list, a numpy array (int32 widens), or a tensor on the device or the host."""
    match turn % 5:
        case 0:
            return numbers
        case 1:
            return numpy.array(numbers, dtype=numpy.int64)
        case 2:
            return torch.tensor(numbers, dtype=torch.int64, device=device)
        case 3:
            return numpy.array(numbers, dtype=numpy.int32)
    return torch.tensor(numbers, dtype=torch.int64)
