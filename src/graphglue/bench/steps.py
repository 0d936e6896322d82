"""The main section: one step in all the ways there are, per bucket, padded and full, with steps in flight."""

from __future__ import annotations

from contextlib import ExitStack, closing
from pathlib import Path

from graphglue.bench import baselines, peers
from graphglue.bench.contenders import (
    AGAIN,
    EAGER_ALONE,
    FLOOR,
    GLUE_ALONE,
    ONE_DEVICE,
    ONE_NUMPY,
    UNFILLED,
    Contender,
    Recorded,
    Runners,
    Sources,
    of_runner,
)
from graphglue.bench.results import Row, Section
from graphglue.bench.sections import Settings, measured, proven, raw_counts
from graphglue.bench.workload import Workload

IN_FLIGHT = (0, 2, 8)
MIXED = ", mixed dtypes"
DEEP_BUCKET = 16  # where steps in flight and the compiled step are measured
_ARENA_FROM = 64  # from here host sources are large enough for a pinned arena to be a question
_NOT_COMPILED = f"measured at bucket {DEEP_BUCKET} only: each compilation takes a good part of a minute"


def run_floor(settings: Settings, section: Section) -> None:
    """Measure every contender, per bucket, padded and full."""
    workload = Workload(settings.device)
    with closing(Runners(workload, settings.buckets)) as runners:
        for bucket in settings.buckets:
            for raw in raw_counts(bucket):
                section.rows += _one_shape(settings, workload, runners, bucket, raw)
        section.notes.append(f"steps in flight are measured at bucket {DEEP_BUCKET} only")
        if fallbacks := runners.one.stats()["launch_fallbacks"]:
            section.notes.append(f"the one-launch rows are more than one launch: {fallbacks}")


def _one_shape(settings: Settings, workload: Workload, runners: Runners, bucket: int, raw: int) -> list[Row]:
    sources = Sources.draw(workload, raw, bucket)
    with closing(Recorded(workload, runners.one.view(bucket))) as recorded:
        contenders = proven(_contenders(workload, runners, recorded, sources), sources, settings.gauge)
        rows = []
        for in_flight in IN_FLIGHT if bucket == DEEP_BUCKET else (0,):
            rows += measured(
                settings,
                contenders,
                sources,
                in_flight=in_flight,
                steps=settings.steps if in_flight == 0 else max(5, settings.steps // 10),
                deep=in_flight == 0,
                describe=f"{raw} on {bucket}, {in_flight} in flight",
            )
        return rows


def _contenders(workload: Workload, runners: Runners, recorded: Recorded, sources: Sources) -> list[Contender]:
    """List them so that the noise row does not follow the same one as the floor does."""
    contenders = [
        Contender(FLOOR, recorded.floor()),
        *runners.contenders(sources),
        Contender(AGAIN, recorded.floor(), note="the noise row"),
    ]
    if sources.bucket >= _ARENA_FROM:
        contenders += baselines.arenas(workload, sources)
    if sources.bucket != DEEP_BUCKET:
        return [*contenders, Contender(baselines.COMPILED, None, why_not=_NOT_COMPILED)]
    return [
        *contenders,
        Contender(GLUE_ALONE, recorded.glue(), note="a part of a step"),
        Contender(EAGER_ALONE, recorded.eager_prep(), note="a part of a step"),
        Contender(UNFILLED, recorded.unfilled(), note="a part of a step"),
        baselines.compiled(workload, sources),
    ]


def run_crowd(settings: Settings, section: Section) -> None:
    """Measure the padded step once more with every contender in each round: a colder start for all."""
    workload, raw = Workload(settings.device), raw_counts(DEEP_BUCKET)[0]
    sources = Sources.draw(workload, raw, DEEP_BUCKET)
    with ExitStack() as stack:
        runners = stack.enter_context(closing(Runners(workload, [DEEP_BUCKET])))
        recorded = stack.enter_context(closing(Recorded(workload, runners.one.view(DEEP_BUCKET))))
        contenders = [
            Contender(FLOOR, recorded.floor()),
            *runners.contenders(sources),
            Contender(AGAIN, recorded.floor(), note="the noise row"),
            Contender(EAGER_ALONE, recorded.eager_prep(), note="a part of a step"),
        ]
        contenders = proven(contenders, sources, settings.gauge)
        steps = max(5, settings.steps // 4)
        section.rows += measured(settings, contenders, sources, steps=steps, deep=False, crowded=True, describe="crowd")


def run_peers(settings: Settings, section: Section) -> None:
    """Measure the leading engine's own classes beside the one launch, with one dtype and with mixed ones."""
    folder = settings.peers.get("sglang")
    if folder is None:
        note = "not asked for: pass --peer sglang=DIR, the folder its wheel was unpacked in"
        section.rows += [Row(label, note=note) for label in (peers.DEFAULT, peers.GLUED, peers.GLUED_HOST)]
        return
    for mixed in (False, True):
        largest = () if mixed or max(settings.buckets) == DEEP_BUCKET else (max(settings.buckets),)
        shapes = [(bucket, raw_counts(bucket)[0]) for bucket in (DEEP_BUCKET, *largest)]
        for bucket, raw in (*shapes, (DEEP_BUCKET, DEEP_BUCKET)):
            section.rows += _beside_peer(settings, folder, bucket, raw, mixed)
    section.notes.append("it resets the tails that its own registry resets; input_ids' tail is left as it was")


def _beside_peer(settings: Settings, folder: Path, bucket: int, raw: int, mixed: bool) -> list[Row]:
    workload = Workload(settings.device, mixed=mixed)
    engine, sources = peers.load_sglang(folder), Sources.draw(workload, raw, bucket)
    with workload.runner([bucket]) as from_device, workload.runner([bucket]) as from_host:
        for runner in (from_device, from_host):
            runner.capture(progress=False)
        with closing(Recorded(workload, from_device.view(bucket))) as recorded:
            contenders = [
                Contender(FLOOR, recorded.floor()),
                of_runner(ONE_DEVICE, from_device, raw, sources.on_device),
                of_runner(ONE_NUMPY, from_host, raw, sources.numpy),
                Contender(AGAIN, recorded.floor(), note="the noise row"),
                *peers.contenders(engine, workload, sources),
            ]
            contenders = proven(contenders, sources, settings.gauge)
            rows = measured(settings, contenders, sources, describe=f"sglang, {raw} on {bucket}")
    for row in rows if mixed else ():
        row.label += MIXED
    return rows
