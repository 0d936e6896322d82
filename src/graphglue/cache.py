"""GlueGraphCache: one callable, recorded once per key. Usable alone."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Hashable, Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch

from graphglue.core import trees
from graphglue.core.contract import PrepContract
from graphglue.core.routing import State
from graphglue.core.view import View
from graphglue.device.base import open_device
from graphglue.entry import Entry, not_computed
from graphglue.errors import CaptureError, ClosedError, ContractError, GraphGlueError
from graphglue.graphs.base import Recorder, Recording
from graphglue.graphs.guard import blame
from graphglue.graphs.memory import Derived, addresses
from graphglue.graphs.segments import breaks_reached, record_segments
from graphglue.results import copy_into, moved, owned, storages_of

logger = logging.getLogger("graphglue")


class GlueGraphCache:
    """Record a prep once per key, replay it, and fall back to calling it.

    Failure is per key: a key that can not be recorded is QUARANTINED with its cause, keeps its
    static result for the eager fallback, and is retried by ``maintain()``. The states are drawn at ``State``.

    All keys of a recorder lie in one memory pool: a replay keeps the results of keys that were recorded before its own,
    and may overwrite those of keys that were recorded after it.

    Args:
        prep: called with a view (or any arguments); returns a tree of tensors.
        recorder: records it; by default the one of ``device``.
        device: "cpu" or a CUDA device, where no recorder is given.
        contract: what the prep declares; its declared outputs are checked when a key warms up.
        name: named in errors and logs.
        warmups: real runs before a key is recorded.
        segmented: split recordings at eager breaks, if any are reached; else these run as plain calls.
        recorded: what is warmed up and recorded instead of the prep (its compiled form).

    Examples:
        >>> import torch, graphglue as gg
        >>> arena = gg.Arena([gg.Slot("lens", axis="request", dtype=torch.int64, pad=1)], [2, 4])
        >>> cache = gg.GlueGraphCache(lambda view: {"last": view.lens - 1}, device="cpu")
        >>> cache.capture({size: arena.view(size) for size in (4, 2)})  # the largest first
        [4, 2]
        >>> view = arena.fill(gg.Batch(3, {"lens": [5, 6, 7]}))
        >>> cache.run(4, view)["last"].tolist()  # glued if it could be recorded, else eager
        [4, 5, 6, 0]
    """

    def __init__(
        self,
        prep: Callable[..., Any],
        *,
        recorder: Recorder | None = None,
        device: torch.device | str = "cpu",
        contract: PrepContract | None = None,
        name: str | None = None,
        warmups: int = 2,
        segmented: bool = False,
        recorded: Callable[..., Any] | None = None,
    ) -> None:
        self.name = name or (contract.name if contract and contract.name else getattr(prep, "__name__", "prep"))
        self.contract = contract
        self._prep, self._recorded_prep = prep, recorded or prep
        self._recorder = recorder or open_device(device).recorder()
        self._warmups, self._segmented = max(1, warmups), segmented
        self._entries: dict[Hashable, Entry] = {}
        self._derived: list[Derived] = []  # what warm-ups computed from slots
        self.on_draw: Callable[[Any], None] | None = None  # told the generators that are passed to random operations
        self.num_quarantines = 0  # it only grows: a key that fails again counts again
        self._failed: set[Hashable] = set()  # since the last capture began: one key may fail in each of its warm-ups
        self._closed = False

    @property
    def compile_fallback(self) -> str | None:
        """Why the prep is recorded as it is though its contract asks for compilation; None if it is compiled."""
        asked = self.contract is not None and self.contract.compile
        if asked and self._recorded_prep is self._prep:
            return "torch.compile is not supported here"
        return getattr(self._recorded_prep, "fallback", None) if asked else None

    def state(self, key: Hashable) -> State:
        """Tell where a key stands."""
        entry = self._entries.get(key)
        return State.COLD if entry is None else entry.state

    def entry(self, key: Hashable) -> Entry:
        """Give all that is known of a key."""
        return self._entries.get(key) or Entry()

    def has_result(self, key: Hashable) -> bool:
        """Tell whether a key has a static result."""
        return self.entry(key).has_result

    def cause(self, key: Hashable) -> str | None:
        """Say why a key is quarantined."""
        return self.entry(key).cause

    def result(self, key: Hashable) -> Any:
        """Give a key's static result, None while it is COLD."""
        return self.entry(key).result

    def newest(self, key: Hashable) -> Any:
        """Give a key's static result with the last values of what the contract calls live."""
        entry = self.entry(key)
        return {**entry.result, **entry.live} if entry.live else entry.result

    def capture(self, views: Mapping[Hashable, Any]) -> list[Hashable]:
        """Warm up and record every key, in the order given; return those that were recorded.

        All keys warm up before the first is recorded, so that whatever a prep memoises or grows is
        in place. Values in the slots are the caller's; give them worst-case ones.

        Raises:
            CaptureError: no key could be recorded, or one is recorded already.

        Sync: the device, once between warm-ups and recording. Capturable: no.
        """
        self._check_open()
        if taken := [key for key in views if self.state(key) is State.CAPTURED]:
            raise CaptureError(f"{self.name!r}: keys {taken} are recorded already; reset() first")
        self.begin()
        with self._recorder.session():
            for key, view in views.items():
                for _ in range(self._warmups):
                    self.warm(key, view)
            self._recorder.finish()
            recorded = [key for key in views if self.record(key)]
        if views and not recorded:
            cause = self.cause(next(iter(views)))
            raise CaptureError(f"{self.name!r}: no key could be recorded; the first cause: {cause}")
        return recorded

    def run(self, key: Hashable, *args: Any) -> Any:
        """Replay a key if it is recorded, else call the prep; return the key's static result.

        Sync: none of its own. The arguments are used by the eager call only.
        """
        if self.state(key) is State.CAPTURED:
            return self.replay(key)
        return self.eager(key, *args)[0]

    def replay(self, key: Hashable) -> Any:
        """Replay a recorded key on the caller's current stream; no Python of the prep runs. Sync: none."""
        self._check_open()
        entry = self._entries.get(key)
        if entry is None or entry.state is not State.CAPTURED or entry.recording is None:
            raise CaptureError(f"{self.name!r}: key {key} is {self.state(key).value}; capture it, or use run()")
        entry.recording.replay()
        return entry.result

    def eager(self, key: Hashable, *args: Any) -> tuple[Any, str | None]:
        """Call the prep and write its result into the key's static one.

        Returns:
            The static result and None; or, where structure, shape, dtype or a plain leaf differ
            from the captured ones, the fresh result and how it differs: nothing that reads the
            static one may be replayed then.

        Sync: none of its own.
        """
        self._check_open()
        whole = self._call(self._prep, args)
        fresh, live = trees.without(whole, self._live, f"prep {self.name!r}")
        entry = self._entries.get(key)
        if entry is None or not entry.has_result:
            trees.check_leaves(fresh, f"prep {self.name!r}")
            return whole, None
        changed = trees.difference(entry.result, fresh) or moved(entry.persistent, fresh)
        if changed is None:
            copy_into(entry.result, fresh)
            entry.live = {}
            return ({**entry.result, **live} if live else entry.result), None
        return whole, changed

    def begin(self) -> None:
        """Begin a capture: a key that fails from now on is counted again, and once."""
        self._failed.clear()

    def warm(self, key: Hashable, *args: Any, live_args: tuple[Any, ...] | None = None, keep: bool = True) -> Any:
        """Run the prep for real; return the key's static result.

        The first run's result becomes the static one, later runs write into it. A failure
        quarantines the key; its static result, if it has one, stays.

        Args:
            key: the key.
            args: what the prep is called with now.
            live_args: what it will be recorded with, if that differs (``args`` may hold clones).
            keep: give the key a static result; off where nothing reads it before it is recorded.

        Raises:
            ContractError: the prep did not keep its declaration; every key would fail alike.
        """
        self._check_open()
        entry = self._entries.setdefault(key, Entry())
        entry.args = args if live_args is None else live_args
        try:
            # On a GPU a forward is not watched: it may be compiled inside, which a mode would switch off.
            watched = not self._is_compiled and (keep or self._recorder.device.type == "cpu")
            if watched and entry.state is not State.CAPTURED:
                with Derived(storages_of((*args, *entry.args)), self.on_draw) as derived:
                    fresh = self._warmed(entry, args)
                self._derived.append(derived)
            else:
                fresh = self._warmed(entry, args)
            self._check_result(fresh, args)
            if keep:
                self._keep_result(key, entry, fresh, args)
        except Exception as error:
            self._quarantine(key, entry, error)
            if isinstance(error, ContractError):
                raise
            return entry.result
        if entry.state in (State.COLD, State.QUARANTINED):
            entry.state = State.WARM
        return entry.result

    def _warmed(self, entry: Entry, args: tuple[Any, ...]) -> Any:
        """Run for real; note the breaks that are reached, and set aside what is live."""
        results = []
        if self._segmented:
            entry.breaks = breaks_reached(lambda: results.append(self._call(self._recorded_prep, args)))
        else:
            results.append(self._call(self._recorded_prep, args))
        fresh, entry.live = trees.without(results[0], self._live, f"prep {self.name!r}")
        return fresh

    def record(
        self,
        key: Hashable,
        *args: Any,
        strict: bool = True,
        during: Callable[[], AbstractContextManager[Any]] = nullcontext,
        barrier: Callable[[], None] | None = None,
        launch: bool = True,
    ) -> bool:
        """Record a warm key; tell whether it worked. A failure quarantines the key.

        Must run inside the recorder's session, after ``finish()``. A new recording brings a new
        static result: whatever read the old one must be recorded again.

        Args:
            key: the key.
            args: what to record with; what the key warmed up with by default.
            strict: see ``Recorder.record``.
            during: as ``record_segments`` takes it.
            barrier: as ``record_segments`` takes it.
            launch: as ``record_segments`` takes it.
        """
        self._check_open()
        entry = self._entries[key]
        if entry.state is not State.WARM:
            return entry.state is State.CAPTURED
        begin, entry.args = time.perf_counter(), args or entry.args
        # From before it is recorded, because a cache that each call replaces is gone afterwards. Held, because memory
        # that is freed meanwhile may be given out anew.
        self._derived = [noted for noted in self._derived if noted.kept()]
        memoised = [tensor for noted in self._derived for tensor in noted.kept()]
        try:
            if entry.breaks:
                recording: Recording = record_segments(
                    self._recorder, lambda: self._recorded(entry.args), strict=strict,
                    like=entry.breaks, during=during, barrier=barrier, launch=launch,
                )  # fmt: skip
            else:
                recording = self._recorder.record(lambda: self._recorded(entry.args), strict=strict)
            changed = trees.difference(entry.result, recording.outputs) if entry.has_result else None
            changed = changed or not_computed(recording, entry, self.contract, addresses(memoised))
            if changed:
                recording.close()
                raise CaptureError(f"{self.name!r} at {key}: recorded another result than it warmed up to: {changed}")
        except CaptureError as error:
            self._quarantine(key, entry, error)
            return False
        if entry.has_result:  # what is recorded behind it may run on it before anything of it was replayed
            copy_into(recording.outputs, entry.result)
        entry.recording, entry.result, entry.has_result = recording, recording.outputs, True
        entry.state, entry.cause = State.CAPTURED, None
        entry.capture_seconds, entry.num_bytes = time.perf_counter() - begin, recording.num_bytes
        logger.info("captured %s at %s: %.3f s, %d bytes", self.name, key, entry.capture_seconds, entry.num_bytes)
        return True

    def adopt(self, key: Hashable, recording: Recording) -> None:
        """Take in a recording that somebody else made for a key.

        Raises:
            CaptureError: the key has one already.
        """
        self._check_open()
        if self.state(key) is State.CAPTURED:
            raise CaptureError(f"{self.name!r}: key {key} has a graph already; reset() first")
        self._entries[key] = Entry(State.CAPTURED, (), recording.outputs, True, recording)

    def call(self, key: Hashable) -> Any:
        """Call the prep as it was recorded for a key; its result is the caller's."""
        return self._recorded(self._entries[key].args)

    def quarantine(self, key: Hashable, cause: str | Exception) -> None:
        """Send a key to the eager fallback until ``maintain()`` repairs it; its static result stays."""
        error = CaptureError(cause) if isinstance(cause, str) else cause
        self._quarantine(key, self._entries.setdefault(key, Entry()), error)

    def maintain(self) -> list[Hashable]:
        """Retry every quarantined key; return those that are recorded now. Never called by a replay.

        Sync: the device.
        """
        self._check_open()
        keys = [key for key, entry in self._entries.items() if entry.state is State.QUARANTINED and entry.args]
        self.begin()
        with self._recorder.session():
            for key in keys:
                self.warm(key, *self._entries[key].args)
            self._recorder.finish()
            return [key for key in keys if self.record(key)]

    def drop(self, key: Hashable) -> None:
        """Forget a key; it is COLD again."""
        entry = self._entries.pop(key, None)
        if entry is not None and entry.recording is not None:
            entry.recording.close()

    def reset(self) -> None:
        """Forget every key. The caller makes sure that none of them still runs."""
        for key in list(self._entries):
            self.drop(key)

    def close(self) -> None:
        """Forget every key and refuse further use; calling it twice is fine."""
        self.reset()
        self._closed = True

    @property
    def _live(self) -> tuple[str, ...]:
        return () if self.contract is None else self.contract.live

    @property
    def _is_compiled(self) -> bool:
        return self.contract is not None and self.contract.compile

    def _recorded(self, args: tuple[Any, ...]) -> Any:
        with torch.no_grad():
            return owned(self._call(self._recorded_prep, args), args)

    def _call(self, prep: Callable[..., Any], args: tuple[Any, ...]) -> Any:
        """Call a prep with tensor objects and containers of its own, which it may reshape in place."""
        detach = torch.Tensor.detach
        own = [arg.fresh() if isinstance(arg, View) else trees.map_tensors(detach, arg) for arg in args]
        with torch.no_grad():
            return prep(*own)

    def _keep_result(self, key: Hashable, entry: Entry, fresh: Any, args: tuple[Any, ...]) -> None:
        if not entry.has_result:
            entry.result, entry.has_result = owned(fresh, (*args, *entry.args)), True
        elif changed := trees.difference(entry.result, fresh):
            raise CaptureError(f"{self.name!r} at {key}: two runs at one key returned different results: {changed}")
        else:
            copy_into(entry.result, fresh)

    def _check_result(self, result: Any, args: tuple[Any, ...]) -> None:
        trees.check_leaves(result, f"prep {self.name!r}")
        view = args[0] if args else None
        if self.contract is not None and isinstance(view, View):
            axes = self.contract.outputs
            trees.check_rows(result, axes, view.bucket.requests, view.bucket.tokens, f"prep {self.name!r}")

    def _quarantine(self, key: Hashable, entry: Entry, error: Exception) -> None:
        self.num_quarantines += key not in self._failed
        self._failed.add(key)
        place = "" if isinstance(error, GraphGlueError) else f" (at {blame(error)})"
        cause = f"{type(error).__name__}: {error}{place}"
        told = entry.state is State.QUARANTINED and entry.cause == cause  # in the warm-up before
        entry.state, entry.cause = State.QUARANTINED, cause
        level = logging.DEBUG if told else logging.WARNING
        logger.log(level, "%s at %s goes eager until maintain() repairs it: %s", self.name, key, cause)

    def _check_open(self) -> None:
        if self._closed:
            raise ClosedError(f"the cache of {self.name!r} was closed; build another one")
