"""Rows that meet in shared memory: whole or not at all, of this gather and no other; ranks are threads here."""

from __future__ import annotations

import gc
import os
import sys
import threading
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from graphglue.errors import ConfigError
from graphglue.ranks import memory
from graphglue.ranks.memory import MemoryTransport
from tests.ranks.threads import Exchange, ThreadTransport, all_well, together

pytestmark = pytest.mark.skipif(sys.platform == "win32", reason="needs POSIX, whose locks and maps it uses")
NUM_FIELDS = 3
NUMBERS = st.integers(-(2**63), 2**63 - 1)


def transports(size: int) -> list[MemoryTransport]:
    exchange = Exchange(size)
    built = together(size, lambda rank: MemoryTransport(ThreadTransport(exchange, rank), NUM_FIELDS, 10))  # type: ignore[arg-type]
    return all_well(built)


@pytest.fixture
def pair() -> list[MemoryTransport]:
    return transports(2)


def row_of(*numbers: int) -> np.ndarray:
    return np.array(numbers, dtype=np.int64)


@given(st.integers(0, 2**32 - 2), st.lists(st.lists(NUMBERS, min_size=6, max_size=6), min_size=1, max_size=6))
def test_rows_arrive_as_they_were_sent_over_the_end_of_the_numbers_too(first: int, gathers: list[list[int]]) -> None:
    ranks = transports(2)
    for one in ranks:
        one._number = first
    for sent in gathers:
        expected = np.array(sent, dtype=np.int64).reshape(2, NUM_FIELDS)
        for one, row in zip(ranks, expected):
            one.start(row, 1)
        for one in ranks:
            assert (one.finish(1) == expected).all()


def test_a_row_is_taken_only_once_all_its_words_are_there(pair: list[MemoryTransport]) -> None:
    """However stores become visible: here one word of the other rank's row is still that of two gathers before."""
    reader, writer = pair
    for number in range(3):
        for one in pair:
            one.start(row_of(number, number, number), 1)
        for one in pair:
            one.finish(1)
    for missing in range(2 * NUM_FIELDS):
        words = reader._halves[(reader._number + 1) & 1, writer.rank]
        before = int(words[missing])
        for one in pair:
            one.start(row_of(7, 8, 9), 1)
        after, words[missing] = int(words[missing]), before
        with pytest.raises(TimeoutError, match=r"ranks \[1\] did not write their rows within 0.01 s"):
            reader._wait(reader._halves[reader._number & 1], 0.01)
        words[missing] = after
        assert reader.finish(1).tolist() == [[7, 8, 9]] * 2
        writer.finish(1)


def test_a_row_of_the_gather_before_is_not_taken(pair: list[MemoryTransport]) -> None:
    reader, writer = pair
    for one in pair:
        one.start(row_of(1, 1, 1), 1)
    for one in pair:
        one.finish(1)
    reader.start(row_of(2, 2, 2), 1)
    with pytest.raises(TimeoutError):
        reader._wait(reader._halves[reader._number & 1], 0.001)
    writer.start(row_of(3, 3, 3), 1)
    assert reader.finish(1).tolist() == [[2, 2, 2], [3, 3, 3]]


def test_a_rank_that_ends_behind_its_last_row_has_not_failed_anybody(
    pair: list[MemoryTransport], monkeypatch: pytest.MonkeyPatch
) -> None:
    """It writes and ends between the look at its row and the look at its lock."""
    reader, writer = pair

    def ends_now(file: int, rank: int) -> bool:
        writer.start(row_of(5, 5, 5), 1)
        return True

    monkeypatch.setattr(memory, "_lock", ends_now)
    monkeypatch.setattr(memory, "_LOOK_EVERY_S", 0.0)
    reader.start(row_of(4, 4, 4), 1)
    assert reader.finish(1).tolist() == [[4, 4, 4], [5, 5, 5]]
    monkeypatch.setattr(memory, "_lock", lambda file, rank: True)
    reader.start(row_of(4, 4, 4), 1)
    with pytest.raises(ConnectionError, match="rank 1 has dropped its RankGroup, or its process has ended"):
        reader.finish(1)


@pytest.mark.parametrize("error", [None, KeyboardInterrupt])
def test_a_rank_that_comes_when_another_has_given_up_does_not_go_on_alone(
    pair: list[MemoryTransport], monkeypatch: pytest.MonkeyPatch, error: type[BaseException] | None
) -> None:
    """Its row still lies there; to agree with it would be to enter a collective that nobody comes to (RANK-SPLIT-2)."""

    def interrupted(seconds: float) -> None:
        raise KeyboardInterrupt

    early, late = pair
    early.start(row_of(1, 1, 1), 1)
    with monkeypatch.context() as patched:
        if error:
            patched.setattr(memory.time, "sleep", interrupted)
        with pytest.raises(error or TimeoutError):
            early.finish(0.01)
    late.start(row_of(2, 2, 2), 1)
    with pytest.raises(ConnectionError, match="rank 0 has given up waiting, or was interrupted"):
        late.finish(1)


def test_a_process_that_was_stopped_over_the_deadline_still_takes_what_came(
    pair: list[MemoryTransport], monkeypatch: pytest.MonkeyPatch
) -> None:
    reader, writer = pair
    clock = iter([0.0, 100.0])

    def stopped() -> float:
        if (now := next(clock)) > 0:
            writer.start(row_of(5, 5, 5), 1)
        return now

    monkeypatch.setattr(memory.time, "monotonic", stopped)
    reader.start(row_of(4, 4, 4), 1)
    assert reader.finish(1).tolist() == [[4, 4, 4], [5, 5, 5]]


def test_words_move_one_by_one(pair: list[MemoryTransport]) -> None:
    """Between strided arrays, which no copy of a block serves."""
    for one in pair:
        assert one._sent.strides == (16,)
        assert one._seen.strides[-1] == 16
        assert one._halves.ctypes.data % 8 == one._seen.ctypes.data % 8 == one._sent.ctypes.data % 8 == 0


def test_a_file_of_another_host_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """A file system may be shared where memory is not."""
    hosts = threading.local()
    exchange = Exchange(2)

    def built_on(rank: int) -> MemoryTransport:
        hosts.name = f"host-{rank}"
        return MemoryTransport(ThreadTransport(exchange, rank), NUM_FIELDS, 10)  # type: ignore[arg-type]

    monkeypatch.setattr(memory, "_host", lambda: hosts.name)
    built: list[Any] = together(2, built_on)
    assert all("rank 1 can not map what rank 0 makes: it is on another host" in str(one) for one in built)


def test_a_name_that_can_not_be_told_is_refused_on_all(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory, "_LONGEST_TEXT", 8)
    exchange = Exchange(2)
    built: list[Any] = together(2, lambda rank: MemoryTransport(ThreadTransport(exchange, rank), NUM_FIELDS, 10))  # type: ignore[arg-type]
    assert all(isinstance(one, ConfigError) and "rank 0 can not map" in str(one) for one in built)


def test_what_serves_the_set_up_is_given_back(pair: list[MemoryTransport]) -> None:
    files = [one._file for one in pair]
    for file in files:
        os.fstat(file)
    pair.clear()
    gc.collect()
    for file in files:
        with pytest.raises(OSError, match="Bad file"):
            os.fstat(file)
