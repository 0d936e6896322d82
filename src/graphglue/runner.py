"""The Runner: one padded decode step after the other, each sent to the glue graph or the eager fallback."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch

from graphglue import assembly
from graphglue.agreeing import Agreement
from graphglue.cache import GlueGraphCache
from graphglue.capture import Capture, CaptureHooks
from graphglue.config import RunnerConfig
from graphglue.core.batch import Batch
from graphglue.core.buckets import Bucket, Ladder
from graphglue.core.keys import Key
from graphglue.core.routing import Decision
from graphglue.core.slots import Slot
from graphglue.core.tables import Tables, TableSource, check_indices
from graphglue.core.view import View
from graphglue.device.arena import Arena
from graphglue.errors import CaptureError, ConfigError
from graphglue.flight.record import FlightRecord
from graphglue.graphs import session
from graphglue.graphs.base import Recorder
from graphglue.insight import Insight
from graphglue.lifetime import Lifetime
from graphglue.ranges import mark_ranges
from graphglue.rank_space import agreed_space, checked_ranks
from graphglue.ranks.facts import RankFacts
from graphglue.ranks.plan import RankPlan
from graphglue.rechecking import Recheck
from graphglue.registry import Prep, Registration, Registry
from graphglue.sleeping import Sleep
from graphglue.staging import not_asked_for, way_to_run
from graphglue.step import Outputs, Prepared, Step, checked_axes
from graphglue.stepping import Stepper
from graphglue.turn import Turn
from graphglue.units import Views
from graphglue.upkeep import Upkeep


class Runner(Lifetime):
    """Serve decode steps by replaying graphs captured per bucket.

    Args:
        slots: the static tensors that prep and forward read.
        ladder: the sizes to capture, in requests (in tokens for EXTEND).
        prep: the metadata prep: a registered name, a callable, or a list of either.
        forward: ``forward(view, metadata) -> tensors``; None for an engine that owns its forward.
        tables: name -> persistent tensor that preps read, or a callable returning the current one.
        registry: where names are looked up; None for the preps that ship with graphglue.
        device: "cpu" (the tape: for truth, not for speed) or a CUDA device.
        tokens_per_request: token rows per request.
        variants: the forward variants to capture (``Batch.variant``).
        output_axes: leaf of the forward's outputs -> token, request, fixed or bucket (not
            narrowed); None when dim 0 of every output is tokens.
        ranks: a rank group; every rank then makes the same calls. None for a runner that agrees with nobody.
        hooks: context managers around the capture, the engine's own pool and stream.
        recorder: records instead of the device's own recorder.
        config: everything that is a plain value.

    Raises:
        ContractError: a contract that does not fit the slots, tables or other contracts.
        ConfigError: slots, ladder, device or config that are not usable.

    A runner serves one thread at a time; a second one is refused. ``close()`` it, or use it as a context manager.
    """

    def __init__(
        self,
        *,
        slots: Iterable[Slot],
        ladder: Ladder | Iterable[int],
        prep: str | Prep | Iterable[str | Prep],
        forward: Callable[[View, Any], Any] | None = None,
        tables: Mapping[str, TableSource] | None = None,
        registry: Registry | None = None,
        device: torch.device | str = "cpu",
        tokens_per_request: int = 1,
        variants: Iterable[Any] = (None,),
        output_axes: Mapping[str, str] | str | None = None,
        ranks: Any = None,
        hooks: CaptureHooks | None = None,
        recorder: Recorder | None = None,
        config: RunnerConfig | None = None,
    ) -> None:
        assembly.check_kinds(slots, tables, forward, registry, hooks, config)
        self.config = config or RunnerConfig()
        self._output_axes = checked_axes(output_axes)
        self._several = isinstance(prep, (list, tuple))
        registrations = assembly.resolve_preps(prep, registry)
        assembly.check_staging(self.config, registrations, ranks, recorder)
        space = assembly.key_space(Ladder(ladder), tokens_per_request, variants, registrations, self.config)
        self.space = agreed_space(space, checked_ranks(ranks), self.config.max_requests)
        self.arena = Arena(slots, self.space, device=device, num_ranks=1 if ranks is None else ranks.size)
        self._tables = Tables(tables or {}, self.arena.device.torch_device)
        arena, tensors = self.arena, self._tables.tensors
        assembly.check_declarations(registrations, arena.slots, tensors, self.config, arena.max_rows)
        hooks = hooks or CaptureHooks()
        preps_recorder, recorder = assembly.recorders(arena.device, hooks, recorder, self.config.staging)
        self._recorders = (preps_recorder, recorder)
        self._units = [assembly.build_unit(one, preps_recorder, self.config, arena, tensors) for one in registrations]
        self._reads = assembly.read_events(arena.device, self._units) if self.config.events else None
        self._forward = forward and GlueGraphCache(forward, recorder=recorder, name="forward", segmented=True)
        self._views = Views(arena, tensors, self._units)
        self._capture = Capture(
            arena, self._units, self._forward, self._views, tensors, recorder, hooks,
            join=self._join, warmups=self.config.warmups, reads=self._reads,
        )  # fmt: skip
        self._stepper = Stepper(
            arena, self._units, self._forward, forward, self._views, self._capture,
            self._output_axes, self.config, self._join, self._reads,
        )  # fmt: skip
        self._decider = self._stepper.decider
        self._staging, self._run = way_to_run(self.config, arena, self._units, tensors, self._capture, self._stepper)
        self._upkeep = Upkeep(arena, self._units, self._capture, self._stepper, self._staging, self._output_axes)
        self._turn = Turn()
        self._agreement = None if ranks is None else self._agree(ranks, registrations)
        recheck = Recheck(arena, self._units, tensors, self._views, self._capture, self._stepper, self._join)
        self._sleep = Sleep(
            arena, self._tables, self._views, self._capture, self._stepper, self._upkeep, recheck, self._agreement
        )
        self._insight = Insight(self._stepper, self._staging, self._upkeep, self._units, ranks)
        if self.config.nvtx:
            mark_ranges(arena.device, self._stepper, self._staging, self._agreement)

    def _agree(self, ranks: Any, registrations: Iterable[Registration]) -> Agreement:
        """Compare with the other ranks what their graphs must have in common, and let steps be agreed from then on."""
        agreement = Agreement(
            ranks, self._stepper, self.arena, self._capture, self._views, self.config, self._check_step
        )
        agreement.compare(registrations, self.arena.slots.values())
        return agreement

    @property
    def buckets(self) -> tuple[Bucket, ...]:
        """The buckets that are captured, the smallest first; before ``capture()`` those that will be."""
        keys = self._wanted or self.space.keys()
        return tuple(sorted({key.bucket for key in keys}))

    @property
    def registrations(self) -> tuple[Registration, ...]:
        """The preps with what they declare, in order."""
        return tuple(unit.registration for unit in self._units)

    @property
    def tables(self) -> dict[str, torch.Tensor]:
        """The tables that preps read, by name."""
        return dict(self._tables.tensors)

    def capture(self, buckets: Iterable[int | Bucket] | None = None, progress: bool | None = None) -> None:
        """Capture every key of the ladder, or of some of its sizes, the largest first.

        A key that fails is quarantined: it runs eagerly until ``maintain()`` repairs it. Random generators that preps
        and forward draw from (the default ones, and those that they pass) stand afterwards where they stood before,
        as after ``maintain`` and ``resume``: a seeded service draws the same numbers, captured or not.
        Each key first runs for real, ``RunnerConfig.warmups`` times, on the slots' capture values. A forward's warm-ups
        run on live engine memory: what it writes (KV caches, states, counters) is written. Let capture values point at
        a sink, or save that memory and restore it in ``CaptureHooks(session=)``, which stands around all of it. Preps
        with ``effects`` warm up on clones of the tables that they change.

        Args:
            buckets: sizes of the ladder, or buckets; all by default.
            progress: show a bar; by default on a terminal.

        Raises:
            CaptureError: no key could be captured, or keys are captured already.
            ContractError: a prep or forward does not keep what it declared.
            StaleTableError: a table moved since the runner took it in.

        Sync: the device, once. Capturable: no.
        """
        with self._turn:
            together = self._agreement.ready if self._agreement is not None else lambda name, check: check()
            self._wanted = self.space.keys(together("sizes to capture", lambda: self._sizes_to_capture(buckets)))
            if not self._upkeep.record(self._wanted, progress):
                raise CaptureError(f"no key could be captured; {self._upkeep.first_cause(self._wanted)}")

    def replay(self, batch: Batch, plan: RankPlan | None = None) -> Step:
        """Run one step and return its results, which the next replay rewrites.

        Args:
            batch: the step; its host sources may be overwritten as soon as this returns.
            plan: what the ranks agreed on, for a runner with ranks.

        Raises:
            BindError: the batch does not fit the slots; nothing was written.
            StaleTableError: a table moved; nothing was written.
            DivergenceError: a sampled step differed, once, where the config asks for it; nothing was written.
            CapacityError: the batch exceeds the ladder and there is no forward to run eagerly.

        Sync: none of its own. Runs on the caller's current stream.
        """
        if not self._turn.take():
            raise self._turn.refusal()
        try:
            if self._agreement is None:
                self._check_step(plan)
                lane = self._decider.lane(batch)  # describe, admit, route
                writes = self._stepper.load(lane, batch)  # bind: the last check, nothing is written before
            else:
                lane, writes = self._agreement.enter(batch, plan)  # the same, and agree before route
            metadata, outputs, decision, _ = self._run(lane, writes, batch)  # launch, check, note; or take the staged
            return Step(outputs, metadata, decision, lane.raw, self._reads)
        except Exception as error:
            self._insight.raised(error, batch)
            raise
        finally:
            self._turn.end()

    def can_replay(self, batch: Batch) -> Decision:
        """Decide a step without running it: truthy when its forward replays as a graph.

        Looks at the counts only, writes nothing and communicates with nobody. Sync: none.
        """
        self._check_open()
        self._turn.check_awake()
        return self._decider.decide(batch)[2]

    def facts(self, batch: Batch) -> RankFacts:
        """State a step for the other ranks, for an engine that exchanges facts itself and calls ``replay(plan=)``.

        Communicates with nobody. A batch that is refused is stated as such, and raises in ``replay``. Sync: none.
        """
        if self._agreement is None:
            raise ConfigError("facts: this runner has no ranks; build it with ranks=RankGroup(...)")
        with self._turn:
            return self._agreement.facts(batch)

    def prepare(self, batch: Batch, plan: RankPlan | None = None) -> Prepared:
        """Fill the slots and run the preps of one step, for an engine that owns its forward; else as ``replay``.

        Raises:
            BindError, StaleTableError, DivergenceError: as ``replay``.
            CapacityError: the batch exceeds the ladder or a slot; nothing was written.

        Sync: none of its own. Runs on the caller's current stream.
        """
        with self._turn:
            try:
                if self._agreement is None:
                    self._check_step(plan)
                    lane = self._decider.lane(batch)
                    writes = self._stepper.load(lane, batch, forward_needed=False)
                else:
                    lane, writes = self._agreement.enter(batch, plan, forward=False)
                metadata, _, decision, view = self._run(lane, writes, batch, forward=False)
                return Prepared(view, metadata, decision, lane.raw)
            except Exception as error:
                self._insight.raised(error, batch, forward=False)
                raise

    def stage(self, batch: Batch, after: Any = None) -> bool:
        """Fill the slots and run the preps of the next step beside other work, so that its replay is its forward only.

        ``replay`` takes a staged step if its extents, route and host values, and address and version of its device
        sources and of the tables that preps read, are the very same. Else the step runs as usual, and what was staged
        is rejected, as by ``prepare``: ``stats()["staging"]`` counts both, with reasons.

        Args:
            batch: the next step; its host sources may be overwritten as soon as this returns.
            after: the event that device sources and tables are ready from. Without one, where there are any, all
                that is queued on the caller's current stream is waited for.

        Returns:
            Whether it was staged. Not so where a prep is not glued (IDLE, eager, exact extents), has no contract or
            draws random numbers, where an adopted forward does, and where changes can not be seen: of a slot's own
            view, of a source that is converted, or that was made in inference mode.

        Raises:
            BindError, CapacityError, StaleTableError, DivergenceError: as ``prepare``.
            ConfigError: no staging in the config, which ranks, effects and ``recorder`` exclude; no recorded ``after``.
            GraphGlueError: the last staged step was neither replayed nor rejected.

        Streams: runs on a stream of the runner's own, behind the runner's last forward; behind all that is queued
        where the last step ran, if the engine owns that forward. From now on slots and metadata are this step's; the
        last outputs stay. What torch counts no version of is not noticed (writes through ``.data``, by graphs or
        by other libraries): call ``torch.autograd.graph.increment_version``. Adopted slots must be this runner's alone.
        A host planner runs here and in ``replay``. Sync: none. Capturable: no.
        """
        with self._turn:
            self._check_step()
            if self._staging is None:
                raise not_asked_for()
            return self._staging.stage(batch, after)

    def adopt_forward(
        self, bucket: int | Bucket, graph: Any, outputs: Any = None, variant: Any = None, random: bool = False
    ) -> None:
        """Take in a forward graph that the engine captured itself, over slots that adopt its buffers.

        From then on a replay at this bucket is one launch of fill, preps and that graph.

        Args:
            bucket: a bucket, or a size of the ladder.
            graph: a captured ``torch.cuda.CUDAGraph(keep_graph=True)``; on the CPU a recording of the tape.
            outputs: the static tensors it writes, for ``Step.outputs``.
            variant: the variant it is for.
            random: it draws random numbers; it is then composed in its own graph, which is used up.

        Raises:
            ConfigError: the runner has a forward of its own.
            CaptureError: a graph without keep_graph, or a bucket that was adopted before.
            ContractError: outputs that do not have the rows that output_axes says.

        Sync: none.
        """
        with self._turn:
            self._check_open()
            assembly.check_adoption(self._units, self._forward is not None)
            bucket = self.space.bucket(self.space.sizes_of([bucket])[0])
            recording = self.arena.device.adopt(graph, outputs)
            Outputs(outputs, self._output_axes, bucket)  # checks the declared axes
            self._upkeep.adopt(self.space.key(self.space.modes[0], bucket, variant), recording, random)

    def view(self, bucket: int | Bucket) -> View:
        """Show all slots and tables at a bucket, or at a size of the ladder, as ``Arena.view`` does. Sync: none."""
        self._check_open()
        bucket = self.arena.bucket_of(bucket)
        return View(self.arena.targets(bucket), self._tables.tensors, bucket, self.space.modes[0], None, "runner.view")

    def rebind_table(self, name: str, table: TableSource) -> None:
        """Replace a table by a tensor or a callable, and drop every key for ``maintain()`` (asleep: for ``resume()``).

        Raises:
            ConfigError: an unknown name, or a table that is on another device.
            ContractError: a pad that is no row of the new table.

        Sync: the device.
        """
        with self._turn.even_asleep():
            self._check_open()
            if name not in self._tables.names:
                raise ConfigError(f"table {name!r} is unknown; tables are {sorted(self._tables.names)}")
            tables = {**self._tables.tensors, name: self._tables.resolve(name, table)}
            if not self.asleep:  # else resume() looks at all tables, and drops keys if this one lies elsewhere
                check_indices(self.arena.slots.values(), tables, self.arena.max_rows)
                self._upkeep.drop()
            self._tables.bind(name, table)
            self._views.clear()

    def maintain(self) -> list[Key]:
        """Retry quarantined keys and capture missing ones; return those that are whole now.

        Never called by a replay; warm-ups run as in ``capture``. With ranks all of them call it. Sync: the device.
        """
        with self._turn:
            if self._agreement is not None:
                keys = self._agreement.missing_keys(self._wanted, self._capture.missing, self._check_open)
            else:
                self._check_open()
                self._stepper.settle(wait=True)
                keys = [key for key in self._wanted if self._capture.missing(key)]
            if keys:
                self._tables.check()
                self._upkeep.record(keys, progress=False, repair=True)
            return [key for key in keys if not self._capture.missing(key)]

    def stats(self) -> dict[str, Any]:
        """Give counters since construction and every key's state, JSON-ready. Sync: samples of the shadow check."""
        return self._insight.stats(self._wanted)

    def flight_record(self) -> FlightRecord:
        """Give the last steps that ``RunnerConfig(flight_recorder=N)`` keeps; ConfigError without it. Sync: none."""
        return self._insight.flight_record()

    # Around the step.

    def _join(self, results: list[Any]) -> Any:
        """Give one prep's metadata as it is, and that of a list by prep name."""
        return {unit.name: result for unit, result in zip(self._units, results)} if self._several else results[0]

    def _sizes_to_capture(self, buckets: Iterable[int | Bucket] | None) -> list[int]:
        self._check_open()
        if any(self._capture.captured(key) for key in self._wanted):
            raise CaptureError("keys are captured already; call reset() first, or maintain() to retry single ones")
        self._tables.check()
        return self.space.sizes_of(self.space.ladder if buckets is None else buckets)

    def _check_step(self, plan: Any = None) -> None:
        """Refuse what no step may run with: a closed runner, a plan nobody agreed on, a moved table."""
        if self._closed:
            self._check_open()
        if plan is not None:
            raise ConfigError("replay(plan=...): this runner has no ranks to agree with; leave plan out")
        if (shadow := self._stepper.shadow) is not None and (shadow.pending or shadow.error):
            self._stepper.settle()
            shadow.raise_error()
        if session.num_replaying:
            session.check_pools(self._recorders)
        self._tables.check()
