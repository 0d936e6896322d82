"""An engine's pages for the prep "kv-page-top-up": the same state as lists and as tensors, and steps over it."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from typing import Any

import torch

import graphglue as gg
from graphglue.core.view import View
from graphglue.preps import reference, top_up

Lists = dict[str, list[Any]]

INCLUDES_NEW = {gg.Mode.DECODE: True, gg.Mode.VERIFY: False, gg.Mode.DRAFT: False}


def state(num_requests: int, max_context: int, page_size: int, num_pages: int, seed: int = 0) -> Lists:
    """Lay out the tables of an engine that has handed out no page; the sink's row leads into page 0."""
    free = random.Random(seed).sample(range(1, num_pages + 1), num_pages)
    sink = [position % page_size for position in range(max_context)]
    return {
        "req_to_token": [sink, *([0] * max_context for _ in range(num_requests))],
        "num_pages": [0] * (num_requests + 1),
        "free_pages": free,
        "num_free": [num_pages],
    }


def tensors(lists: Lists, device: torch.device | str = "cpu", dtype: torch.dtype = torch.int64) -> dict[str, Any]:
    """Make the tables' tensors."""
    return {name: torch.tensor(values, dtype=dtype, device=device) for name, values in lists.items()}


def held(tables: dict[str, torch.Tensor]) -> Lists:
    """Read the tables back."""
    return {name: tensor.tolist() for name, tensor in tables.items()}


def step_reference(
    lists: Lists, mode: gg.Mode, width: int, page_size: int, seq_lens: Sequence[int], requests: Sequence[int]
) -> Lists:
    """Do one step to the lists, by the slow reference."""
    ends = [length if INCLUDES_NEW[mode] else length + width for length in seq_lens]
    return reference.top_up(ends, requests, width, **lists, page_size=page_size)


def step_eager(
    prep: Callable[[Any], dict[str, torch.Tensor]],
    tables: dict[str, torch.Tensor],
    mode: gg.Mode,
    width: int,
    seq_lens: Sequence[int],
    requests: Sequence[int],
) -> Lists:
    """Do one step to the tensors, by the prep."""
    device = tables["num_free"].device
    slots = {
        "seq_lens": torch.tensor(seq_lens, dtype=torch.int64, device=device),
        "req_pool_indices": torch.tensor(requests, dtype=torch.int64, device=device),
    }
    bucket = gg.Bucket(len(requests), len(requests) * width, width)
    metadata = prep(View(slots, tables, bucket, mode))
    return {name: tensor.tolist() for name, tensor in metadata.items()}


def runner(tables: dict[str, torch.Tensor], page_size: int, width: int, **options: Any) -> gg.Runner:
    """Build a runner of the prep alone."""
    registry = gg.Registry()
    top_up.register(registry, page_size)
    most = tables["req_to_token"].shape[1] - width
    return gg.Runner(
        slots=top_up.slots(max_seq_len=most),
        ladder=options.pop("ladder", (2, 5)),
        prep=top_up.NAME,
        registry=registry,
        tables=tables,
        tokens_per_request=width,
        **options,
    )


def batch(mode: gg.Mode, seq_lens: Sequence[int], requests: Sequence[int]) -> gg.Batch:
    """Give the batch of a step."""
    if not requests:
        return gg.Batch.idle(mode)
    return gg.Batch(len(requests), {"seq_lens": list(seq_lens), "req_pool_indices": list(requests)}, mode)


class Engine:
    """Let requests come, grow, go back, starve and end, as an engine with a draft does."""

    def __init__(self, lists: Lists, width: int, page_size: int, mode: gg.Mode, rng: random.Random) -> None:
        self.lists, self.width, self.page_size, self.mode, self._rng = lists, width, page_size, mode, rng
        self._max_context = len(lists["req_to_token"][0])
        self._lengths = [0] * len(lists["num_pages"])  # of what is accepted

    def choose(self, most: int) -> tuple[list[int], list[int]]:
        """Choose a step's requests; give their lengths as the mode has them, and their rows."""
        rows = self._rng.sample(range(1, len(self._lengths)), self._rng.randint(0, most))
        more = self.width if INCLUDES_NEW[self.mode] else 0
        return [self._lengths[row] + more for row in rows], rows

    def accept(self, rows: Sequence[int], num_unplaced: Sequence[int]) -> None:
        """Go on with the requests of a step: what has no place for all its tokens stays as it is, most of the time."""
        for row, unplaced in zip(rows, num_unplaced):
            self._lengths[row] += 0 if unplaced else self._rng.randint(1, self.width)
            chance = self._rng.random()
            if self._lengths[row] > self._max_context or chance < 0.1:
                self._end(row)
            if chance < 0.05:  # a request whose prompt is left to the top-up
                self._lengths[row] = self._rng.randint(0, self._max_context)
            elif chance > 0.95:  # one that is taken back, and keeps its pages
                self._lengths[row] //= 2

    def _end(self, row: int) -> None:
        lists = self.lists
        for page in range(lists["num_pages"][row]):
            freed = lists["req_to_token"][row][page * self.page_size] // self.page_size
            lists["free_pages"][lists["num_free"][0]] = freed
            lists["num_free"][0] += 1
        lists["num_pages"][row] = self._lengths[row] = 0


def check_ownership(lists: Lists, page_size: int) -> None:
    """Hold that each page is free or owned by one request, and the sink untouched."""
    owned = [
        lists["req_to_token"][row][page * page_size] // page_size
        for row, num_pages in enumerate(lists["num_pages"])
        for page in range(num_pages)
    ]
    free = lists["free_pages"][: lists["num_free"][0]]
    assert sorted(owned + free) == list(range(1, len(lists["free_pages"]) + 1))
    assert all(location < page_size for location in lists["req_to_token"][0])
    assert lists["num_pages"][0] == 0
