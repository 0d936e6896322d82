"""What a report tells, as values: sums over ranks, shares, and the ladder's use. Pure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from graphglue.report.reading import KeyStats, RouteStats, Stats


@dataclass(frozen=True, slots=True)
class Rung:
    """The steps of one bucket; ``label`` is requests x tokens, or "exact" for all that ran at exact extents."""

    label: str
    steps: int
    real_tokens: int
    padded_tokens: int

    @property
    def waste(self) -> float:
        """Padded rows over all rows."""
        rows = self.real_tokens + self.padded_tokens
        return self.padded_tokens / rows if rows else 0.0


@dataclass(frozen=True, slots=True)
class Source:
    """One file's runner, in a line."""

    name: str
    steps: int
    waste: float
    glued: float
    graphs: float
    one_launch: float
    num_quarantines: int


@dataclass(frozen=True, slots=True)
class Held:
    """One captured or quarantined key of one file."""

    source: str
    key: KeyStats


@dataclass(frozen=True, slots=True)
class Summary:
    """All that is told.

    Attributes:
        sources: the files.
        rungs: the ladder's use, the smallest bucket first, exact extents last.
        routes: step counts by route, the most frequent first.
        reasons: step counts by reason.
        forward_reasons: step counts by why a forward did not replay.
        launch_fallbacks: step counts by why a step was more than one launch.
        shadow: samples by verdict; empty where it was off.
        staging: staged steps by what became of them; empty where it was off.
        quarantined: keys that are quarantined now, with their causes.
        keys: all keys, with what they hold.
    """

    sources: tuple[Source, ...]
    rungs: tuple[Rung, ...]
    routes: Mapping[str, int]
    reasons: Mapping[str, int]
    forward_reasons: Mapping[str, int]
    launch_fallbacks: Mapping[str, int]
    shadow: Mapping[str, int]
    staging: Mapping[str, int]
    quarantined: tuple[Held, ...]
    keys: tuple[Held, ...]

    @property
    def steps(self) -> int:
        """All steps."""
        return sum(source.steps for source in self.sources)

    @property
    def all_rungs(self) -> Rung:
        """The ladder as one."""
        sums = [[rung.steps, rung.real_tokens, rung.padded_tokens] for rung in self.rungs]
        return Rung("all", *(sum(column) for column in zip(*sums, (0, 0, 0))))


def summarize(read: Mapping[str, Stats]) -> Summary:
    """Sum up the stats of one or several files, name -> stats."""
    routes = [route for stats in read.values() for route in stats.routes]
    held = tuple(Held(name, key) for name, stats in read.items() for key in stats.keys)
    every = read.values()
    return Summary(
        sources=tuple(_source(name, stats) for name, stats in read.items()),
        rungs=_rungs(routes),
        routes=_counted((f"{route.prep} / {route.forward}", route.steps) for route in routes),
        reasons=_counted((route.reason, route.steps) for route in routes),
        forward_reasons=_counted((route.forward_reason, route.steps) for route in routes if route.forward_reason),
        launch_fallbacks=_counted(one for stats in every for one in stats.launch_fallbacks.items()),
        shadow=_counted(one for stats in every for one in (stats.shadow or ())),
        staging=_counted(one for stats in every for one in (stats.staging or ())),
        quarantined=tuple(one for one in held if "quarantined" in one.key.states.values()),
        keys=held,
    )


def _source(name: str, stats: Stats) -> Source:
    steps = stats.steps or 1
    return Source(
        name=name,
        steps=stats.steps,
        waste=stats.padded_tokens / stats.bucket_tokens if stats.bucket_tokens else 0.0,
        glued=sum(route.steps for route in stats.routes if route.prep == "glue") / steps,
        graphs=sum(route.steps for route in stats.routes if route.forward == "graph") / steps,
        one_launch=stats.one_launch / steps,
        num_quarantines=sum(stats.quarantines.values()),
    )


def _rungs(routes: Iterable[RouteStats]) -> tuple[Rung, ...]:
    sums: dict[tuple[int, int, int] | None, list[int]] = {}
    for route in routes:
        counts = sums.setdefault(route.bucket, [0, 0, 0])
        for position, count in enumerate((route.steps, route.real_tokens, route.padded_tokens)):
            counts[position] += count
    ordered = sorted(sums.items(), key=lambda one: one[0] or (float("inf"),))
    return tuple(Rung(_label(bucket), *counts) for bucket, counts in ordered)


def _label(bucket: Sequence[int] | None) -> str:
    if bucket is None:
        return "exact"
    requests, tokens, row_tokens = bucket
    return f"{requests}x{tokens}" + ("" if row_tokens else " ragged")


def _counted(counts: Iterable[tuple[str, int]]) -> dict[str, int]:
    total: Counter[str] = Counter()
    for name, count in counts:
        total[name] += count
    return dict(total.most_common())
