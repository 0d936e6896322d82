"""The lifetime of a runner beyond its steps: asleep and awake, reset, closed."""

from __future__ import annotations

from typing import TYPE_CHECKING

from graphglue.capture import Capture
from graphglue.core.keys import Key
from graphglue.core.tables import Tables
from graphglue.errors import ClosedError, GraphGlueError
from graphglue.sleeping import Sleep
from graphglue.turn import Turn
from graphglue.upkeep import Upkeep

if TYPE_CHECKING:
    from typing_extensions import Self


class Lifetime:
    """Put a runner to sleep and wake it, reset it and close it: what its owner does between steps."""

    _turn: Turn
    _sleep: Sleep
    _tables: Tables
    _capture: Capture
    _upkeep: Upkeep
    _wanted: tuple[Key, ...] = ()
    _closed = False

    @property
    def asleep(self) -> bool:
        """Whether ``release`` was called, and ``resume`` was not."""
        return self._turn.asleep

    def release(self, keep_keys: bool = True) -> None:
        """Wait for all steps and go to sleep: what the graphs read may be unmapped, freed, replaced or overwritten.

        Until ``resume``, every step and capture is refused; ``rebind_table``, ``reset`` and ``close`` are not.
        Calling it twice is fine. With ranks all of them call it, and either all sleep or none does.

        Args:
            keep_keys: keep graphs, metadata and tables, for an engine that unmaps memory and maps it at the same
                addresses (wrap slots and capture in its region: ``Slot(storage=)``, ``CaptureHooks(session=, pool=)``).
                Without it, graphs go with their memory, cached blocks go back to the driver, and tables are not held,
                so that freeing them frees their memory. Slots stay: they are small, and their addresses are known.

        Raises:
            ClosedError: the runner was closed.
            GraphGlueError: it is in use.
            RankDisagreementError: another rank does not go to sleep, or not like this.

        Sync: the device.
        """
        with self._turn.even_asleep():
            self._check_open()
            self._sleep.begin(keep_keys, again=self._turn.asleep)
            self._turn.asleep = True

    def resume(self, contents_lost: bool = True, recapture: bool | None = None) -> list[Key]:
        """Wake up; every key equals eager runs, or was recorded anew, before it serves again.

        Tables are looked up where they are now. If one lies elsewhere than at ``release``, all keys are recorded
        anew. The others are held against eager runs of preps and forward, bit for bit, and what differs is recorded
        anew; forwards that draw random numbers, and preps that do, always are. Engine tensors (weights, tables, what
        preps and forward keep by themselves) must hold legal values by now, as for ``capture``.

        Args:
            contents_lost: memory came back with other contents: slots are padded again, and keys recorded anew,
                because a graph may read constants in it that were computed once, and workspaces that were cleared once.
            recapture: record all keys anew, as ``contents_lost`` by default. True for weights at other addresses,
                where a kept graph would read memory that is gone; False where the engine restores contents itself
                (a memory saver with a copy on the host, constants and the graphs' pool outside of what it unmaps).

        Returns:
            The keys that are whole; ``maintain()`` retries the others. An adopted forward is forgotten where keys are
            recorded anew, because they leave their metadata elsewhere: adopt it again.

        Raises:
            StaleTableError: a table was freed, or has no memory: ``rebind_table`` first. The runner sleeps on.
            GraphGlueError: the runner is not asleep.
            RankDisagreementError: ranks wake up differently, or one can not. All of them sleep on.

        With ranks all of them call it, for the same keys; what differs on one is recorded anew on all.
        Sync: the device.
        """
        with self._turn.even_asleep():
            self._check_open()
            if not self._turn.asleep:
                raise GraphGlueError("resume: the runner is awake; call release() before memory goes")
            self._sleep.end(self._wanted, contents_lost, contents_lost if recapture is None else recapture)
            self._turn.asleep = False
            return [key for key in self._wanted if not self._capture.missing(key)]

    def reset(self) -> None:
        """Drop every key and its memory; steps run eagerly until ``capture()``. Sync: the device."""
        with self._turn.even_asleep():
            self._upkeep.drop()
            self._wanted = ()

    def close(self) -> None:
        """Drop everything and refuse further use; calling it twice is fine. Sync: the device."""
        if not self._closed:
            self.reset()
            self._closed = True
            self._turn.wake()

    def __enter__(self) -> Self:
        self._check_open()
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _check_open(self, and_tables: bool = False) -> None:
        if self._closed:
            raise ClosedError("the runner was closed; build another one")
        if and_tables:
            self._tables.check()
