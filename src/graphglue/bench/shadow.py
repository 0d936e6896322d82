"""What the shadow check costs: a step that is not sampled, and one that is."""

from __future__ import annotations

from contextlib import ExitStack, closing

import graphglue as gg
from graphglue.bench.contenders import AGAIN, FLOOR, Contender, Recorded, Sources, of_runner
from graphglue.bench.results import Row, Section
from graphglue.bench.sections import Settings, measured, proven, raw_counts
from graphglue.bench.workload import Workload

OFF, NOT_SAMPLED, IS_SAMPLED = "no shadow check", "shadow check, no step sampled", "shadow check, every step sampled"
COST_NOT_SAMPLED, COST_SAMPLED = "a step that is not sampled costs more", "a sampled step costs more"
_BUCKETS = (16, 256)
_RULES = {OFF: None, NOT_SAMPLED: gg.Shadow(first=0, every=0), IS_SAMPLED: gg.Shadow(first=0, every=1)}


def run_shadow(settings: Settings, section: Section) -> None:
    """Measure the one launch without a shadow check, and with one that samples no step or every step."""
    for bucket in _BUCKETS if settings.on_gpu else _BUCKETS[:1]:
        section.rows += _one_bucket(settings, bucket)


def _one_bucket(settings: Settings, bucket: int) -> list[Row]:
    workload, raw = Workload(settings.device), raw_counts(bucket)[0]
    sources = Sources.draw(workload, raw, bucket)
    with ExitStack() as stack:
        runners = {}
        for label, rule in _RULES.items():
            runners[label] = stack.enter_context(workload.runner([bucket], gg.RunnerConfig(shadow=rule)))
            runners[label].capture(progress=False)
        recorded = stack.enter_context(closing(Recorded(workload, runners[OFF].view(bucket))))
        contenders = [
            Contender(FLOOR, recorded.floor()),
            *(of_runner(label, runner, raw, sources.on_device) for label, runner in runners.items()),
            Contender(AGAIN, recorded.floor(), note="the noise row"),
        ]
        contenders = proven(contenders, sources, settings.gauge)
        rows = measured(settings, contenders, sources, describe=f"shadow, {raw} on {bucket}")
        seen = runners[IS_SAMPLED].stats()["shadow"]
    cost = Row(COST_SAMPLED, bucket, raw, values=_more(rows, IS_SAMPLED))
    cost.values |= {"steps_sampled": seen["sampled"], "mismatched": seen["mismatched"], "failed": seen["failed"]}
    return [*rows, Row(COST_NOT_SAMPLED, bucket, raw, values=_more(rows, NOT_SAMPLED)), cost]


def _more(rows: list[Row], label: str) -> dict[str, float | bool]:
    """Give how much more a row takes than the one without a check."""
    found = {row.label: row for row in rows}
    more: dict[str, float | bool] = {}
    for name in ("host_us", "device_us"):
        with_check, without = getattr(found[label], name), getattr(found[OFF], name)
        if with_check is not None and without is not None:
            more[name] = with_check - without
    return more
