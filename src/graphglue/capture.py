"""The capture of a runner's keys: warm every one up, then record them, the largest first."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from tqdm import tqdm

from graphglue.cache import GlueGraphCache
from graphglue.core.keys import Key
from graphglue.core.live import Live
from graphglue.core.routing import State
from graphglue.core.view import View, showing_of
from graphglue.device.arena import Arena
from graphglue.device.base import Launch, Reads
from graphglue.errors import CaptureError, ContractError
from graphglue.footprint import Footprints
from graphglue.graphs.base import Recorder, Recording
from graphglue.graphs.draws import Draws
from graphglue.graphs.segments import SegmentedRecording
from graphglue.lockstep import Lockstep
from graphglue.ranks.started import Others
from graphglue.step import Outputs
from graphglue.units import Unit, Views, check_skipping

logger = logging.getLogger("graphglue")


@dataclass(frozen=True, slots=True)
class CaptureHooks:
    """Let an engine stand around the capture.

    Args:
        session: ``session()`` gives a context manager around the whole capture, warm-ups included (custom all-reduce
            registers its addresses when it ends; an engine saves there what its forward's warm-ups write, and restores
            it). Nothing captured is launched before it has exited: eager breaks of a forward then see what lies in
            memory while they are recorded, so give costly ones a ``stub``.
        key: ``key(key)`` gives a context manager around the recording of each key.
        pool: the engine's own memory pool. Once its last graph is gone torch takes it no more, and a new one is used.
            Capture the runners of one pool in the order in which they replay in a step, if one reads what another gave
            (``Step``). On the CPU any hashable object is a pool, equal ones the same, and what a GPU may overwrite is.
        stream: the engine's own capture stream. cuBLAS has a workspace for each stream: give one that runs nothing
            else, and that nothing but the runners of one engine is captured on.
        barrier: called before each eager break runs while a forward is recorded in segments, so that ranks meet.
    """

    session: Callable[[], AbstractContextManager[Any]] | None = None
    key: Callable[[Key], AbstractContextManager[Any]] | None = None
    pool: Any = None
    stream: Any = None
    barrier: Callable[[], None] | None = None


@dataclass(frozen=True, slots=True)
class Composed:
    """The launch of one key.

    Attributes:
        outputs: what its forward computes.
        has_forward: the forward is part of it, or follows it in segments.
        fallback: why something of it is launched apart; empty if nothing is.
        leads: the first segment of a forward with eager breaks is part of it.
    """

    launch: Launch
    outputs: Any
    has_forward: bool
    fallback: str = ""
    leads: bool = False


class Capture:
    """Warm up and record keys, for all preps and the forward of a runner."""

    def __init__(
        self,
        arena: Arena,
        units: Sequence[Unit],
        forward: GlueGraphCache | None,
        views: Views,
        tables: dict[str, torch.Tensor],
        recorder: Recorder,
        hooks: CaptureHooks,
        *,
        join: Callable[[list[Any]], Any],
        warmups: int,
        reads: Reads | None,
    ) -> None:
        self._arena, self._units, self._forward, self._views = arena, units, forward, views
        self._tables, self._recorder, self._hooks = tables, recorder, hooks
        self._join, self._warmups = join, warmups
        self._reads = reads
        self.adopted: GlueGraphCache | None = None  # the engine's own forwards
        self.used_up: set[Key] = set()  # adopted forwards that can only be launched behind their own fill
        self.launches: dict[Key, Composed] = {}
        self._random: dict[Key, str] = {}  # which part of a key draws random numbers
        self.together: Callable[[bool], bool] = bool  # whether a flag holds on every rank
        self.lockstep, self.others = Lockstep(forward, hooks.barrier), Others()
        self._broken: ContractError | None = None
        self.footprints = Footprints(arena.device)
        self.draws = Draws(lambda: arena.device.random_offset(), arena.device.generators())
        for cache in self._caches():
            cache.on_draw = self.draws.see

    def run(self, keys: Sequence[Key], progress: bool | None = None, contain: bool = False) -> list[Key]:
        """Capture keys in the order given; return those with a recorded prep or forward.

        All keys warm up before the first is recorded, so that what a prep or forward grows or
        memoises is in place; the slots hold their capture values before every run.

        Args:
            keys: the keys.
            progress: show a bar; by default on a terminal.
            contain: quarantine a key whose prep or forward breaks its declaration, instead of raising.

        Raises:
            ContractError: a prep or forward does not keep what it declared.

        Sync: the device, once.
        """
        logger.info("capture of %d keys begins", len(keys))
        begin = time.perf_counter()
        self.drop_launches(keys)
        for cache in self._caches():
            cache.begin()
        for key in keys:  # before the session: a graph that goes may take cuBLAS's workspaces of its stream along
            self._drop_behind(key)
        with ExitStack() as session, self._bar(2 * len(keys), progress) as bar:
            self._begin(session)
            for key in keys:
                self._show(bar, "warm-up", key)
                self._warm(key, contain)
            self._recorder.finish()
            self.lockstep.agree(keys)
            for key in keys:
                self._show(bar, "capture", key)
                with self.lockstep.recording(key), self._containing(False), self.footprints.weighing(key):
                    self._record_in_hook(key)
        if self.together is bool:
            self.others.warn()
        if self._broken is not None:
            broken, self._broken = self._broken, None
            raise broken
        recorded = [key for key in keys if self.captured(key)]
        logger.info("capture ends: %d of %d keys, %.2f s", len(recorded), len(keys), time.perf_counter() - begin)
        return recorded

    def _begin(self, session: ExitStack) -> None:
        """Enter the sessions, on all ranks or on none."""
        refusal = None
        try:
            session.enter_context(self._hooks.session() if self._hooks.session else nullcontext())
            session.enter_context(self._recorder.session())
            session.enter_context(self.draws.kept())
        except Exception as error:
            refusal = error
        together = self.together(refusal is None)
        if refusal is not None:
            raise refusal
        if not together:
            raise CaptureError("another rank could not begin the capture; its own error says why")

    def drop_launches(self, keys: Iterable[Key]) -> None:
        """Drop what was composed for these keys."""
        for key in keys:
            if (composed := self.launches.pop(key, None)) is not None:
                composed.launch.close()

    def drawing_part(self, key: Key) -> str | None:
        """Name the part of a key that draws random numbers: "prep" or "forward"."""
        return self._random.get(key)

    def captured(self, key: Key) -> bool:
        """Tell whether anything of a key replays."""
        return any(cache.state(key) is State.CAPTURED for cache in self._caches())

    def _caches(self) -> list[GlueGraphCache]:
        return [unit.cache for unit in self._units] + ([self._forward] if self._forward else [])

    def missing(self, key: Key) -> bool:
        """Tell whether anything of a key that could be recorded is not.

        Not so where an engine's own forward reads what the preps left: recorded anew they would leave it elsewhere,
        and the old memory is gone. Such preps go on eagerly, into the same memory.
        """
        if self._is_adopted(key) and all(unit.cache.has_result(key) for unit in self._units):
            return False
        preps = [unit.cache for unit in self._units if self._may_glue(unit, key)]
        caches = preps + ([self._forward] if self._forward else [])
        return any(cache.state(key) is not State.CAPTURED for cache in caches)

    def _is_adopted(self, key: Key) -> bool:
        return self.adopted is not None and self.adopted.state(key) is State.CAPTURED

    def _drop_behind(self, key: Key) -> None:
        """Drop what stands behind a prep that is recorded anew: recordings lie in the pool in the order of a step.

        The forward's graph reads metadata that is about to move. A prep's own would be replayed behind the new
        recording, which it lies in front of, and overwrite what that gives.
        """
        anew = [self._may_glue(unit, key) and unit.cache.state(key) is not State.CAPTURED for unit in self._units]
        if True not in anew or self._is_adopted(key):
            return
        if self._forward is not None:
            self._forward.drop(key)
        for unit in self._units[anew.index(True) :]:
            if unit.cache.entry(key).recording is not None:
                unit.cache.drop(key)

    def _warm(self, key: Key, contain: bool) -> None:
        for _ in range(self._warmups):
            self._arena.fill_capture(key.bucket)
            with self._watch_random(key, "prep"):
                for unit, view in zip(self._units, self._views.of(key)[0]):
                    with self._containing(contain):
                        self._warm_prep(unit, key, view)
            if self._forward is not None and self._forward.state(key) is not State.CAPTURED:
                with self._watch_random(key, "forward"), self._containing(contain):
                    self._warm_forward(self._forward, key)

    @contextmanager
    def _containing(self, contain: bool) -> Iterator[None]:
        """Go on behind a broken declaration, whose key is quarantined, where that is asked for or other ranks wait."""
        try:
            yield
        except ContractError as error:
            if not contain and self.together is bool:
                raise
            if not contain and self._broken is None:
                self._broken = error  # raised when this rank has taken part in the whole capture

    @contextmanager
    def _watch_random(self, key: Key, part: str) -> Iterator[None]:
        """Note that a part of a key draws random numbers: the generator moves when it runs for real."""
        begin = self.draws.position()
        yield
        if self.draws.position() != begin:
            self._random.setdefault(key, part)

    def _warm_forward(self, forward: GlueGraphCache, key: Key) -> None:
        failed = [unit for unit in self._units if not unit.cache.has_result(key)]
        if self.together(not failed):  # else one rank would wait in a collective of the forward for the others
            view = self._views.of(key)[1]
            with showing_of(view).on(self._live(key)), self.others.watched():
                forward.warm(key, view, self.metadata(key), keep=False)
        elif failed:
            cause = failed[0].cache.cause(key)
            forward.quarantine(key, f"prep {failed[0].name!r} gave it no metadata: {cause}")
        else:
            forward.quarantine(key, "a prep failed on another rank")

    def _warm_prep(self, unit: Unit, key: Key, view: View) -> None:
        """Run a prep for real; one with effects runs on clones of the tables it changes."""
        live = view
        if effects := unit.declared.effects:
            tables = {name: t.clone() if name in effects else t for name, t in self._tables.items()}
            view = self._views.prep_view(unit, self._arena.targets(key.bucket), tables, key)
        if unit.cache.state(key) is State.CAPTURED:  # its graph gives the forward its metadata
            unit.cache.eager(key, view) if effects else unit.cache.replay(key)
        else:
            unit.cache.warm(key, view, live_args=(live,))

    def _record_in_hook(self, key: Key) -> None:
        """Record a key inside the engine's hook; a hook that raises quarantines the key."""
        try:
            with self._hooks.key(key) if self._hooks.key else nullcontext():
                self._record(key)
        except ContractError:
            raise
        except Exception as error:
            self._give_up(key, "the key hook", error)

    def _give_up(self, key: Key, who: str, error: Exception) -> None:
        """Quarantine all of a key."""
        self.drop_launches([key])
        for cache in self._caches():
            cache.quarantine(key, f"{who} raised {type(error).__name__}: {error}")

    def _refresh(self, key: Key) -> None:
        """Have recorded preps give a key's metadata again: other keys' graphs may have overwritten it since."""
        for unit, view in zip(self._units, self._views.of(key)[0]):
            if unit.cache.state(key) is State.CAPTURED:
                self._warm_prep(unit, key, view)

    def _record(self, key: Key) -> None:
        self._arena.fill_capture(key.bucket)
        if self._forward is not None and self._forward.entry(key).breaks and self._hooks.session is None:
            self._refresh(key)
        for unit in self._units:
            if self._may_glue(unit, key):
                unit.cache.record(key, strict=not unit.declared.compile)
        if self._forward is not None and self._forward.state(key) is State.WARM:
            _, view = self._views.of(key)
            # The forward is the engine's own code, compiled inside for all we know: not strict.
            self._forward.record(
                key, view, self.metadata(key), strict=False,
                during=lambda: showing_of(view).on(self._live(key)), barrier=self.lockstep.barrier,
                launch=self._hooks.session is None,
            )  # fmt: skip
        try:
            self.compose(key)
        except ContractError:
            raise
        except Exception as error:
            self._give_up(key, "joining what was recorded in one launch", error)

    def adopt(self, key: Key, random: bool) -> None:
        """Compose a key with the forward that the engine captured for it."""
        if random:
            self._random[key] = "forward"
            self.used_up.add(key)
        self.compose(key)

    def compose(self, key: Key) -> None:
        """Join the fill and all that was recorded for a key, with the forward if it has a graph."""
        entries = [unit.cache.entry(key) for unit in self._units]
        preps = [entry.recording for entry in entries if entry.state is State.CAPTURED and entry.recording]
        if len(preps) != len(entries):
            return
        random, cache = self._random.get(key), self._forward or self.adopted
        forward = cache.entry(key).recording if cache is not None and cache.state(key) is State.CAPTURED else None
        if isinstance(forward, SegmentedRecording):
            self._compose_segments(key, preps, forward, random)
            return
        if forward is None and random == "forward":
            random = None
        elif random == "forward" and (own := self._forward) is not None:
            # Such a forward is composed in its own graph, which is used up by that; record another.
            forward = self._recorder.record(lambda: own.call(key), strict=False)
        device, fill = self._arena.device, self._arena.fill_of(key.bucket)
        launch = device.compose(fill, preps, forward, random, self._reads)
        self.drop_launches([key])
        outputs = None if forward is None else forward.outputs
        self.launches[key] = Composed(launch, outputs, forward is not None, launch.fallback or "")

    def _compose_segments(
        self, key: Key, preps: list[Recording], forward: SegmentedRecording, random: str | None
    ) -> None:
        """Join the fill and the preps with a forward's first segment; the others follow that launch one by one."""
        first, apart = forward.first, ""
        if random == "forward":
            first, random = None, None
            apart = "a forward in segments draws random numbers, which only its own replay advances"
        launch = self._arena.device.compose(self._arena.fill_of(key.bucket), preps, first, random, self._reads)
        self.drop_launches([key])
        fallback, leads = launch.fallback or apart, first is not None
        self.launches[key] = Composed(launch, forward.outputs, True, fallback, leads)

    def check_forward(self, key: Key, axes: Mapping[str, str] | str | None, contain: bool) -> None:
        """Hold a captured forward against the declared axes, and its breaks against the rows and the contracts."""
        if self._forward is None or self._forward.state(key) is not State.CAPTURED:
            return
        try:
            Outputs(self._forward.result(key), axes, key.bucket)
            self._check_breaks(key, self._forward.entry(key).recording)
        except ContractError as error:
            if not contain:
                raise
            self.drop_launches([key])
            self._forward.quarantine(key, str(error))

    def _check_breaks(self, key: Key, recording: Recording | SegmentedRecording | None) -> None:
        segments = recording if isinstance(recording, SegmentedRecording) else None
        if segments is not None and segments.rows not in (None, key.tokens):
            raise ContractError(
                f"the forward's eager breaks have row-aligned arguments of {segments.rows} rows, but {key.bucket} has "
                f"{key.tokens} tokens, and the real rows of a step are its tokens; align arguments with a row per token"
            )
        check_skipping(self._units, key, segments)

    def metadata(self, key: Key) -> Any:
        """Give a key's static metadata, as the forward sees it."""
        return self._join([unit.cache.result(key) for unit in self._units])

    def _live(self, key: Key) -> Live:
        """Show eager breaks a step that fills its bucket."""
        newest = self._join([unit.cache.newest(key) for unit in self._units])
        return self._views.live(self._arena.targets(key.bucket), key.bucket, newest)

    def _may_glue(self, unit: Unit, key: Key) -> bool:
        return unit.may_glue(key, ragged=key.row_tokens == 0 and not self._arena.space.counts_tokens)

    def _bar(self, total: int, progress: bool | None) -> tqdm:
        return tqdm(total=total, disable=None if progress is None else not progress, unit="key", leave=False)

    def _show(self, bar: tqdm, what: str, key: Key) -> None:
        free = self._arena.device.free_bytes()
        memory = "" if free is None else f", {free / 2**30:.1f} GiB free"
        bar.set_description(f"{what} {key.mode.value} {key.requests}x{key.tokens}{memory}", refresh=False)
        bar.update()
