"""What one process measures of a draft's padded step: its prep from the host, as a graph, and in one launch."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from typing import Any

import torch

import graphglue as gg
from graphglue.bench.contenders import bare_replay
from graphglue.bench.gauge import Gauge
from graphglue.bench.separate import OneByOne, WithoutPreps
from graphglue.bench.timing import Sample, Step, interleaved
from graphglue.core.view import View
from graphglue.demo import speculative
from graphglue.demo.model import ModelShape
from graphglue.device.base import Device, open_device
from graphglue.graphs.base import Recording
from graphglue.preps import draft

FLOOR = "bare replay of a draft's forward (the floor)"
PREP_EAGER, PREP_GLUED = "draft prep alone, eager", "draft prep alone, its glue graph"
EAGER = "draft step: fill kernel, eager prep, forward graph"
GLUED = "draft step: fill kernel, glue graph, forward graph"
ONE = "draft step: one launch of fill, glue and forward"
COMPILED = "draft step: one launch of fill, compiled glue and forward"
BARE, AGAIN = "draft step: one launch of fill and forward, no glue", "the same again, no glue (A/A)"
GROUPS = ((BARE, ONE, COMPILED, AGAIN), (FLOOR, PREP_EAGER, PREP_GLUED, EAGER, GLUED))  # timed in turn with each other
BUCKET, RAW, BLOCK = 16, 13, 3
_NUM_SOURCES, _CHUNK = 8, 100
_COMPILED = draft.CONTRACT.model_copy(update={"compile": True})
_CONFIG_EAGER = gg.RunnerConfig(glue={draft.CONTRACT.name: "off"})


class DraftWork:
    """Hold a small draft, its tables and steps' sources, at the published sizes on a GPU; the tape has small ones.

    Args:
        device: where.
    """

    def __init__(self, device: torch.device) -> None:
        on_gpu, self.device = device.type == "cuda", device
        page_size, window, alignment, max_context = (256, 128, 64, 4096) if on_gpu else (4, 8, 4, 32)
        self.prep = draft.make(page_size, window, alignment)
        shape = ModelShape(max_context=max_context, page_size=page_size)
        _, self._model = speculative.build(shape, 0, torch.bfloat16 if on_gpu else torch.float32, device)
        ring, generator = window + 2 * BLOCK, torch.Generator().manual_seed(0)
        self._caches = [speculative.new_cache(self._model, speculative.WindowCache, (BUCKET + 1) * ring)]
        self._preferred = speculative.successors(shape.vocab, BLOCK, device)
        places = torch.randint(0, (BUCKET + 1) * ring, (max_context + 1,), generator=generator)
        places[-1] = -1
        table = torch.randint(1, max_context, (BUCKET + 1, max_context), generator=generator, dtype=torch.int32)
        self.tables = {"req_to_token": table.to(device), "full_to_swa": places.to(device)}
        self.slots = [*draft.slots(), gg.Slot("last_token", axis="request", dtype=torch.int64, pad=0)]
        self.sources = [self._drawn(max_context, shape.vocab, generator) for _ in range(_NUM_SOURCES)]

    def _drawn(self, max_context: int, vocab: int, generator: torch.Generator) -> dict[str, torch.Tensor]:
        rows = torch.randperm(BUCKET, generator=generator)[:RAW] + 1
        lengths = torch.randint(1, max_context - BLOCK, (RAW,), generator=generator)
        locations = torch.randint(1, max_context, (RAW * BLOCK,), generator=generator)
        last = torch.randint(0, vocab, (RAW,), generator=generator)
        values = (lengths, rows, locations, last)
        return {slot.name: value.to(self.device) for slot, value in zip(self.slots, values, strict=True)}

    def forward(self, view: Any, metadata: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """Propose a block. Sync: none. Capturable: yes."""
        return speculative.draft(self._model, self._caches, self._preferred, view, metadata)

    @contextmanager
    def runner(
        self,
        config: gg.RunnerConfig | None = None,
        device: Callable[[Device], Any] | None = None,
        contract: gg.PrepContract = draft.CONTRACT,
    ) -> Iterator[gg.Runner]:
        """Build and capture a runner; ``device`` stands something in front of its device."""
        registry = gg.Registry()
        registry.register(contract)(self.prep)
        with gg.Runner(
            slots=self.slots, ladder=[BUCKET], prep=draft.CONTRACT.name, registry=registry, tables=self.tables,
            forward=self.forward, device=self.device, tokens_per_request=BLOCK, config=config,
        ) as runner:  # fmt: skip
            if device is not None:
                runner.arena.device = device(runner.arena.device)
            runner.capture(progress=False)
            yield runner

    def expected(self, number: int) -> dict[str, torch.Tensor]:
        """Run the prep eagerly over one step's sources, padded by hand."""
        slots = {}
        for slot in self.slots:
            value = self.sources[number][slot.name]
            rows = BUCKET * (BLOCK if slot.axis is gg.Axis.TOKEN else 1)
            slots[slot.name] = torch.full((rows,), int(slot.pad), dtype=slot.dtype, device=self.device)  # type: ignore[arg-type]
            slots[slot.name][: len(value)] = value
        return self.prep(View(slots, self.tables, gg.Bucket(BUCKET, BUCKET * BLOCK, BLOCK), gg.Mode.DRAFT))


def stepping(runner: gg.Runner, work: DraftWork) -> Step:
    """Give a padded step through ``Runner.replay``, with a fresh batch and other sources each time."""
    replay, batch, turn = runner.replay, gg.Batch, itertools.cycle(work.sources).__next__
    return lambda: replay(batch(RAW, turn(), gg.Mode.DRAFT))


def check(label: str, step: Step, work: DraftWork, synchronize: Callable[[], None]) -> None:
    """Hold the metadata of one step for each set of sources against the eager prep.

    Raises:
        RuntimeError: a leaf differs.

    Sync: the device.
    """
    for number in range(_NUM_SOURCES):
        replayed: Any = step()
        synchronize()
        for name, leaf in work.expected(number).items():
            if not torch.equal(replayed.metadata[name], leaf):
                raise RuntimeError(f"WRONG: {name} of step {number} of {label!r} differs from the eager prep")


@contextmanager
def contenders(work: DraftWork, gauge: Gauge) -> Iterator[dict[str, Step]]:
    """Give what is timed, by label; what has the step's metadata is held against the eager prep first."""
    with (
        work.runner() as one, work.runner(_CONFIG_EAGER) as eager, work.runner(device=WithoutPreps) as bare,
        work.runner(device=WithoutPreps) as again,  # another runner: the first one's caches would be warm
        work.runner(device=lambda device: OneByOne(device, torch_fill=False)) as glued, ExitStack() as more,
    ):  # fmt: skip
        steps = {label: stepping(runner, work) for label, runner in ((ONE, one), (EAGER, eager), (GLUED, glued))}
        if work.device.type == "cuda":  # the tape records a prep as it is
            compiled = more.enter_context(work.runner(contract=_COMPILED))
            if not compiled.stats()["compile_fallbacks"]:
                steps[COMPILED] = stepping(compiled, work)
        for label, step in steps.items():
            check(label, step, work, gauge.synchronize)
        steps[BARE], steps[AGAIN] = stepping(bare, work), stepping(again, work)
        view = one.view(BUCKET)
        prep, forward = _recorded(work, view)
        steps[FLOOR], steps[PREP_GLUED] = bare_replay(forward), bare_replay(prep)
        steps[PREP_EAGER] = torch.no_grad()(lambda: work.prep(view))
        yield steps
        gauge.synchronize()
        for recording in (prep, forward):
            recording.close()


def _recorded(work: DraftWork, view: View) -> tuple[Recording, Recording]:
    """Record prep and forward by themselves, over a runner's slots."""
    recorder = open_device(work.device).recorder()
    with torch.no_grad(), recorder.session():
        for _ in range(2):
            metadata = work.prep(view)
            work.forward(view, metadata)
        recorder.finish()
        prep = recorder.record(lambda: work.prep(view))
        return prep, recorder.record(lambda: work.forward(view, metadata), strict=False)


def measure(device: torch.device, rounds: int, seconds: float, meet: Callable[[], object]) -> dict[str, list[float]]:
    """Time all contenders in this process; give median and p99 in us, and the number of steps, by label.

    Args:
        device: where.
        rounds: timed steps of each, or as many as fit.
        seconds: what each group of contenders may take.
        meet: waits for the other processes, so that all are timed at the same time.

    Sync: the device.
    """
    gauge, found = Gauge(device), {}
    with contenders(DraftWork(device), gauge) as steps:
        for step in steps.values():
            for _ in range(5):
                step()
        gauge.synchronize()
        meet()
        for group in GROUPS:
            for label, sample in _timed(
                {name: steps[name] for name in group if name in steps}, rounds, seconds, gauge
            ).items():
                found[label] = [sample.median_us, sample.p99_us, len(sample.times_us)]
    return found


def _timed(steps: Mapping[str, Step], rounds: int, seconds: float, gauge: Gauge) -> dict[str, Sample]:
    """Time steps in turn, a chunk of rounds after the other while there is time: processes share the device."""
    deadline, done = time.monotonic() + seconds, 0
    times: dict[str, list[float]] = {label: [] for label in steps}
    while done < rounds and (not done or time.monotonic() < deadline):
        chunk = interleaved(steps, min(_CHUNK, rounds - done), synchronize=gauge.synchronize)
        done += min(_CHUNK, rounds - done)
        for label, sample in chunk.items():
            times[label] += sample.times_us
    return {label: Sample(tuple(taken)) for label, taken in times.items()}
