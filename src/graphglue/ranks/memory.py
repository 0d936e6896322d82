"""Memory that the ranks of one host share: rows meet there in microseconds, without a socket and without the GPU."""

from __future__ import annotations

import mmap
import os
import tempfile
import time
import weakref
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np

from graphglue.errors import ConfigError
from graphglue.ranks.transport import TorchTransport

_SPIN_S = 2e-3  # beyond it a rank waits for somebody who is late, and no longer keeps a processor busy
_NAP_SHARE, _LONGEST_NAP_S = 0.02, 5e-3  # of the time waited so far
_LAST, _GAVE_UP = 0xFFFFFFFE, 0xFFFFFFFF  # gathers are numbered from 1, and behind the last, an even one, again
_LOOK_EVERY_S = 0.1  # whether those who are late still run
_LONGEST_TEXT = 1024  # of a path, or of why there is none
_FOLDER = "/dev/shm"  # memory as files; where there is none, a file of the temporary folder is mapped
_yield: Callable[[], None] = getattr(os, "sched_yield", lambda: time.sleep(0))


class MemoryTransport:
    """Gather through memory that all ranks map; texts, and the search for who did not come, go by a process group.

    A 64-bit word holds half of a row's integer beside the number of its gather, both stored at once, as in NCCL's
    protocol LL ("Demystifying NCCL", arXiv:2507.04786, section IV). A word with the number is whole, in whatever
    order a processor shows the stores of another, so there is no lock and no fence; words move one by one, between
    strided arrays, because a copy of a block may move bytes. Gathers use two halves in turn: a rank starts gather
    n + 2 only when all have started n + 1, so when nobody reads n any more. A rank that gives up writes so in both,
    or one that comes later would agree with its rows alone.

    Building one is collective. The file has no name once all have mapped it, so nothing is left when ranks die; each
    locks a byte of it, which the system frees with its process.

    Args:
        group: where the ranks meet to set this up.
        num_fields: integers of a row.
        timeout_s: how long to wait for the others meanwhile, in seconds.

    Raises:
        ConfigError: on every rank, because one can not map it: another host, or a container with memory of its own.
    """

    def __init__(self, group: TorchTransport, num_fields: int, timeout_s: float) -> None:
        self.rank, self.size = group.rank, group.size
        self.exchange, self.absent = group.exchange, group.absent
        shape = (2, self.size, 2 * num_fields)
        self._file, memory = _mapped(group, 8 * int(np.prod(shape)), timeout_s)
        weakref.finalize(self, os.close, self._file).atexit = False  # a process that ends may still step
        self._halves = np.frombuffer(memory, dtype=np.uint64).reshape(shape)
        self._number = 0
        self._sent, self._words = _strided(shape[2:])
        self._seen, words = _strided(shape[1:])
        self._seen_halves, self._seen_numbers = words[..., 0], words[..., 1]
        self._rows = np.zeros((self.size, num_fields), dtype=np.int64)
        self._row_halves = self._rows.view(np.uint32)

    def start(self, row: np.ndarray, timeout_s: float) -> None:
        """Write this rank's row, int64[fields], where the others look for it. Sync: none."""
        self._number = number = self._number + 1 if self._number < _LAST else 1
        self._words[:, 0] = row.view(np.uint32)
        self._words[:, 1] = number
        self._halves[number & 1, self.rank] = self._sent

    def finish(self, timeout_s: float) -> np.ndarray:
        """Wait for the rows of all: int64[ranks, fields], rewritten by the next gather. Sync: the host spins and waits.

        Raises:
            TimeoutError: a rank did not come in time.
            ConnectionError: a rank has given up or left, or its process has ended.
        """
        try:
            self._wait(self._halves[self._number & 1], timeout_s)
        except BaseException:
            self._words[:, 1] = _GAVE_UP
            self._halves[:, self.rank] = self._sent
            raise
        self._row_halves[:] = self._seen_halves
        return self._rows

    def _wait(self, half: np.ndarray, timeout_s: float) -> None:
        number, begin = self._number, time.monotonic()
        now = looked = begin
        while True:
            self._seen[:] = half
            if (self._seen_numbers == number).all():
                return
            waited = now - begin  # by a clock from before the look, however long this process was stopped since
            now = time.monotonic()
            if waited < min(_SPIN_S, timeout_s):
                _yield()
                continue
            if waited > timeout_s:
                raise TimeoutError(f"ranks {self._late()} did not write their rows within {timeout_s:g} s")
            if now - looked > _LOOK_EVERY_S:
                self._look_for_the_late(half)
                looked = now
            self._check_given_up()
            time.sleep(min(_NAP_SHARE * waited, _LONGEST_NAP_S))

    def _check_given_up(self) -> None:
        given_up = (self._seen_numbers == _GAVE_UP).any(1)
        if given_up.any():
            raise ConnectionError(f"rank {given_up.argmax()} has given up waiting, or was interrupted")

    def _late(self) -> list[int]:
        return [rank for rank, came in enumerate((self._seen_numbers == self._number).all(1).tolist()) if not came]

    def _look_for_the_late(self, half: np.ndarray) -> None:
        for rank in self._late():
            if rank == self.rank or not _lock(self._file, rank):
                continue
            _unlock(self._file, rank)
            self._seen[:] = half  # it may have ended right behind its last row
            if rank in self._late():
                raise ConnectionError(f"rank {rank} has dropped its RankGroup, or its process has ended")


def _mapped(group: TorchTransport, num_bytes: int, timeout_s: float) -> tuple[int, mmap.mmap]:
    """Make the file on rank 0, map it on all, and take its name away; refuse on all what one can not do."""
    path, refusal, file = "", "", -1
    memory: Any = None
    with ExitStack() as name, ExitStack() as kept:
        try:
            if group.rank == 0:
                file, path = tempfile.mkstemp(prefix="graphglue-", dir=_FOLDER if os.path.isdir(_FOLDER) else None)
                kept.callback(os.close, file)
                name.callback(Path(path).unlink, missing_ok=True)
                _give_room(file, num_bytes)
                if len(os.fsencode(path)) > _LONGEST_TEXT - 64:
                    raise OSError(f"{path} is a longer name than can be told")
        except OSError as error:
            path, refusal = "", str(error) or type(error).__name__
        told = f"{_host()} {path}" if path else ""
        told = os.fsdecode(group.exchange(os.fsencode(told), _LONGEST_TEXT, timeout_s)[0])
        host, _, path = told.partition(" ")
        try:
            if path and host != _host():  # whose file system may be the same
                raise OSError("it is on another host")
            if group.rank and path:
                file = os.open(path, os.O_RDWR | os.O_CLOEXEC)
                kept.callback(os.close, file)
            if path:
                memory = mmap.mmap(file, num_bytes)
                refusal = "" if _lock(file, group.rank) else f"its place in {path} is taken"
        except (OSError, ValueError) as error:
            refusal = str(error) or type(error).__name__
        for rank, text in enumerate(group.exchange(os.fsencode(refusal)[:_LONGEST_TEXT], _LONGEST_TEXT, timeout_s)):
            if text:
                raise ConfigError(
                    f'exchange="memory": rank {rank} can not map what rank 0 makes: {text.decode(errors="replace")}. '
                    f"All must be on one host and see one {_FOLDER}; share it between containers, or use "
                    'exchange="group"'
                )
        kept.pop_all()
    return file, memory


def _give_room(file: int, num_bytes: int) -> None:
    """Make a file long; where the system can, so that no room is an error here and no signal at a write later."""
    if hasattr(os, "posix_fallocate"):
        os.posix_fallocate(file, 0, num_bytes)
    else:
        os.ftruncate(file, num_bytes)


def _strided(shape: tuple[int, ...]) -> tuple[np.ndarray, np.ndarray]:
    """Give 64-bit words with a gap behind each, so that copies move them one by one, and their 32-bit halves."""
    words = np.zeros((*shape, 2), dtype=np.uint64)
    return words[..., 0], words.view(np.uint32).reshape(*shape, 4)[..., :2]


def _host() -> str:
    """Name this boot of this host, in containers too; nothing where the system does not say."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        return ""


def _lock(file: int, rank: int) -> bool:
    """Take the byte of a rank; tell whether it was free."""
    import fcntl  # not on Windows, which has none of this

    try:
        fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB, 1, rank)
    except OSError:
        return False
    return True


def _unlock(file: int, rank: int) -> None:
    import fcntl

    fcntl.lockf(file, fcntl.LOCK_UN, 1, rank)
