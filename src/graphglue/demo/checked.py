"""Decode steps that are run two or three times over, and held against each other.

Every engine in here has KV caches and sampled tokens of its own: the glued one goes through
``graphglue.Runner``, the twin runs eagerly at the same padded shapes, and the third, if asked for,
runs eagerly without padding. The first two must agree on every bit, the third on every token.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

import graphglue as gg
from graphglue.demo.model import KVCache, Transformer
from graphglue.demo.pair import Pair, spelled
from graphglue.demo.report import Tally
from graphglue.demo.twin import Difference, EagerTwin, Fault
from graphglue.preps import paged_decode

Prep = Callable[[Any], Mapping[str, Tensor]]
Sampled = dict[str, int]  # engine -> its own token
Caches = dict[str, list[KVCache]]  # engine -> its own, one for each layer
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
        caches: of each engine; with those of an unpadded one it decodes without padding as well.
        tally: what is counted.
        ladder: the batch sizes to capture.
        req_to_token: the engine's table, [num_rows, max_context] int64.
        prep: the decode prep that is captured, and called by the twins.
        fault: breaks the twin's filled tensors on purpose, to show that the comparison can fail.
    """

    def __init__(
        self,
        model: Transformer,
        caches: Caches,
        tally: Tally,
        *,
        ladder: Sequence[int],
        req_to_token: Tensor,
        prep: Prep,
        fault: Fault | None = None,
    ) -> None:
        self._device, self._tally = model.device, tally
        slots = [*paged_decode.slots(), gg.Slot("input_ids", axis="token", dtype=torch.int64, pad=0)]
        registry = gg.Registry()
        registry.register(paged_decode.CONTRACT)(prep)
        self.runner = gg.Runner(
            slots=slots,
            ladder=ladder,
            registry=registry,
            prep=paged_decode.CONTRACT.name,
            tables={"req_to_token": req_to_token},
            forward=partial(model.decode, caches[GLUED]),
            device=model.device,
        )

        def twin(name: str) -> EagerTwin:
            return EagerTwin(prep, partial(model.decode, caches[name]), slots, req_to_token)

        axes = {"next_token": "token", "logits": "token"}
        self._pair = Pair(self.runner, twin(TWIN), tally, tally.decode, axes=axes, fault=fault)
        self._unpadded = twin(UNPADDED) if UNPADDED in caches else None

    def decode(self, step: int, rows: Sequence[Row]) -> list[Sampled]:
        """Run one step everywhere, count what differs, and give each row's new tokens.

        Args:
            step: the step's number; it also picks the kinds of sources.
            rows: who is there; with nobody the step is IDLE.

        Sync: the device.
        """
        raw = gg.Bucket(len(rows), len(rows), 1)
        batch = gg.Batch(len(rows), self._sources(step, rows, GLUED)) if rows else gg.Batch.idle()
        replayed, expected = self._pair.step(step, raw, batch, self._sources(step, rows, TWIN))
        if not rows:
            return []
        tokens = {GLUED: replayed["next_token"].tolist(), TWIN: expected["next_token"].tolist()}
        self._tally.decode.num_tokens_compared += len(rows)
        if self._unpadded is not None:
            _, outputs = self._unpadded.step(raw, raw, self._sources(step, rows, UNPADDED), None)
            tokens[UNPADDED] = outputs["next_token"].tolist()
            self._tally.decode.num_tokens_compared_unpadded += len(rows)
            self._tally.note_differences(other_tokens(step, "", tokens[GLUED], tokens[UNPADDED]))
        return [{name: column[row] for name, column in tokens.items()} for row in range(len(rows))]

    def _sources(self, step: int, rows: Sequence[Row], engine: str) -> dict[str, Any]:
        columns = {
            "seq_lens": [row.num_tokens for row in rows],
            "req_pool_indices": [row.pool_row for row in rows],
            "out_cache_loc": [row.location for row in rows],
            "input_ids": [row.last[engine] for row in rows],
        }
        return spelled(columns, step, self._device)


def other_tokens(step: int, label: str, glued: Sequence[int], unpadded: Sequence[int]) -> list[Difference]:
    """Find the tokens that an engine without padding samples otherwise."""
    return [
        Difference(step, f"{label}next_token, unpadded", row, str(one), str(other))
        for row, (one, other) in enumerate(zip(glued, unpadded, strict=True))
        if one != other
    ]
