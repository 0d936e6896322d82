"""Ranks as threads of one process: a transport with delays, and collectives that notice what would hang.

A real collective hangs where ranks meet in different ones, or where one does not come. ``Meeting`` is a
collective that compares what each rank came with and raises ``Hang`` on all of them instead. It is an operation
of torch, so that the tape records it into a forward's graph.
"""

from __future__ import annotations

import itertools
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch

import graphglue as gg
from graphglue.ranks import Padding, Planner, RankGroup


class Hang(RuntimeError):
    """What would hang with real processes."""


class Exchange:
    """Where the threads of one group leave their rows."""

    def __init__(self, size: int, delay: Callable[[int, int], float] = lambda rank, call: 0.0) -> None:
        self.size, self.delay = size, delay
        self.barrier = threading.Barrier(size)
        self.rows: list[Any] = [None] * size
        self.arrived = [0] * size
        self.calls = [0] * size

    def meet(self, rank: int, row: Any, timeout_s: float) -> list[Any]:
        self.rows[rank] = row
        self.arrived[rank] += 1
        self.barrier.wait(timeout_s)
        rows = list(self.rows)
        self.barrier.wait(timeout_s)  # nobody writes the next row before all have read this one
        return rows


class ThreadTransport:
    """One rank's end of an exchange."""

    def __init__(self, exchange: Exchange, rank: int) -> None:
        self._exchange, self.rank, self.size = exchange, rank, exchange.size

    def start(self, row: np.ndarray, timeout_s: float) -> None:
        self._row = row.copy()
        self._exchange.calls[self.rank] += 1

    def finish(self, timeout_s: float) -> np.ndarray:
        time.sleep(self._exchange.delay(self.rank, self._exchange.calls[self.rank]))
        return np.stack(self._exchange.meet(self.rank, self._row, timeout_s))

    def exchange(self, text: bytes, size: int, timeout_s: float) -> list[bytes]:
        return self._exchange.meet(self.rank, text, timeout_s)

    def absent(self, call: int, patience_s: float) -> list[int]:
        most = max(self._exchange.arrived)
        return [rank for rank, count in enumerate(self._exchange.arrived) if count < most]


_NUMBERS = itertools.count()
_OPEN: dict[int, Meeting] = {}  # an operation of torch takes numbers, and no objects


class Meeting:
    """A collective of threads: it sums buffers, and compares what the ranks came with."""

    def __init__(self, size: int, timeout_s: float = 5.0) -> None:
        self._barrier, self._timeout_s = threading.Barrier(size), timeout_s
        self._came: list[Any] = [None] * size
        self.number = next(_NUMBERS)
        _OPEN[self.number] = self
        self.signatures: list[list[tuple[int, ...]]] = [[] for _ in range(size)]

    def join(self, rank: int, buffer: torch.Tensor, signature: tuple[int, ...]) -> None:
        self._came[rank] = (signature, buffer.clone())
        try:
            self._barrier.wait(self._timeout_s)
            came = list(self._came)
            self._barrier.wait(self._timeout_s)
        except threading.BrokenBarrierError:
            raise Hang(f"rank {rank} waits in a collective of {signature}, and some rank does not come") from None
        self.signatures[rank].append(signature)
        if len({seen for seen, _ in came}) > 1:
            raise Hang(f"ranks meet in different collectives: {[seen for seen, _ in came]}")
        buffer.copy_(torch.stack([one for _, one in came]).sum(0))


@torch.library.custom_op("graphglue_tests::meet", mutates_args=("buffer",))
def meet(buffer: torch.Tensor, number: int, rank: int, recorded: int, rows: int, summed: int) -> None:
    """Join a meeting: (graph or eager, rows, all-reduce or all-gather) is what has to be equal."""
    _OPEN[number].join(rank, buffer, (recorded, rows, summed))


@meet.register_fake
def _(buffer: torch.Tensor, number: int, rank: int, recorded: int, rows: int, summed: int) -> None:
    return None


SLOTS = (
    gg.Slot("seq_lens", axis="request", dtype=torch.int64, pad=1),
    gg.Slot("input_ids", axis="token", dtype=torch.int64, pad=0),
    gg.Slot("rank_counts", axis="rank", dtype=torch.int64, pad=0, value=gg.RANK_COUNTS),
    gg.Slot("real_tokens", axis="fixed", inner=(1,), dtype=torch.int64, pad=0, value=gg.RAW_TOKENS),
)


def length_prep(view: gg.View) -> dict[str, torch.Tensor]:
    return {"total": view.seq_lens.sum().reshape(1)}  # of an idle rank too, which may have no rows at all


class Model:
    """A forward whose ranks sum one buffer; padded rows add nothing to it."""

    def __init__(self, meeting: Meeting, rank: int) -> None:
        self._meeting, self._rank, self.recording = meeting, rank, False

    @contextmanager
    def record(self, key: Any) -> Iterator[None]:
        self.recording = True
        try:
            yield
        finally:
            self.recording = False

    def __call__(self, view: gg.View, metadata: Any) -> dict[str, torch.Tensor]:
        num_rows, together = view.input_ids.shape[0], view.meeting
        real = torch.arange(num_rows) < view.real_tokens
        own = torch.where(real, view.input_ids + 1, 0)
        start = together.start(self._rank)
        buffer = torch.zeros(together.rows, dtype=torch.int64)
        buffer[start : start + num_rows] = own
        summed = int(together.padding is Padding.SUM_LEN)
        meet(buffer, self._meeting.number, self._rank, int(self.recording), together.rows, summed)
        return {"own": own, "all": buffer.sum() + own}


def runner_of(
    group: RankGroup,
    model: Model,
    *,
    modes: Sequence[gg.Mode] = (gg.Mode.DECODE,),
    prep: Callable[[gg.View], Any] = length_prep,
    plan: Any = None,
    ragged: bool = False,
    **config: Any,
) -> gg.Runner:
    planner = group.planner
    registry = gg.Registry()
    reads, outputs = {"seq_lens": 1}, {"total": "fixed"}
    contract = gg.PrepContract(
        name="lengths", reads=reads, outputs=outputs, modes=set(modes), idle="glue", ragged=ragged
    )
    registry.register(contract, plan=plan)(prep)
    counts_tokens = modes[0].counts_tokens
    if counts_tokens:
        config.setdefault("max_requests", planner.max_requests)
    return gg.Runner(
        slots=SLOTS,
        ladder=planner.extend_ladder if counts_tokens else planner.ladder,
        registry=registry,
        prep="lengths",
        forward=model,
        output_axes="token",
        tokens_per_request=1 if counts_tokens else planner.width,
        ranks=group,
        hooks=gg.CaptureHooks(key=model.record),
        config=gg.RunnerConfig(**config),
    )


def batch_of(requests: int, tokens: int | None = None, mode: gg.Mode = gg.Mode.DECODE, **more: Any) -> gg.Batch:
    if requests == 0:
        return gg.Batch.idle(mode)
    tokens = requests if tokens is None else tokens
    sources = {"seq_lens": list(range(1, requests + 1)), "input_ids": list(range(tokens))}
    return gg.Batch(requests, sources, mode, num_tokens=tokens, **more)


def own_of(tokens: int) -> list[int]:
    """Give what a rank of so many tokens adds, in order."""
    return [token + 1 for token in range(tokens)]


def together(size: int, run: Callable[[int], Any], timeout_s: float = 60.0) -> list[Any]:
    """Run a function of the rank in a thread for each; give what each returned, or the exception it raised."""
    results: list[Any] = [TimeoutError("this rank's thread did not end")] * size

    def one(rank: int) -> None:
        try:
            results[rank] = run(rank)
        except BaseException as error:
            results[rank] = error

    threads = [threading.Thread(target=one, args=(rank,), daemon=True) for rank in range(size)]
    for thread in threads:
        thread.start()
    deadline = time.monotonic() + timeout_s
    for thread in threads:
        thread.join(max(0.0, deadline - time.monotonic()))
    return results


def all_well(results: Sequence[Any]) -> list[Any]:
    """Give the results; raise the first exception among them."""
    for result in results:
        if isinstance(result, BaseException):
            raise result
    return list(results)


def group_of(exchange: Exchange, rank: int, planner: Planner, **options: Any) -> RankGroup:
    options.setdefault("timeout_s", 20.0)
    return RankGroup(ThreadTransport(exchange, rank), planner, **options)
