"""An exporter for Prometheus: what ``runner.stats()`` counts, read when a scrape asks for it.

What only grows is a counter; what is held at the moment, keys and memory, is a gauge. Nothing is added to a step.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, NamedTuple, Protocol

from graphglue.errors import ConfigError

try:
    from prometheus_client.core import REGISTRY, CounterMetricFamily, GaugeMetricFamily, Metric
    from prometheus_client.registry import Collector, CollectorRegistry
except ImportError as error:  # the extra is not installed
    raise ConfigError(
        'graphglue.exporter needs prometheus-client, which is not installed: pip install "graphglue[prometheus]"'
    ) from error

__all__ = ["HasStats", "RunnerCollector", "export"]

Stats = Mapping[str, Any]
Values = Iterable[tuple[tuple[str, ...], float]]  # label values, value


class HasStats(Protocol):
    """What is exported: a runner, or whatever counts as one does."""

    def stats(self) -> dict[str, Any]:
        """Give counters and keys, as ``Runner.stats``."""


class _Family(NamedTuple):
    kind: type[CounterMetricFamily] | type[GaugeMetricFamily]
    name: str
    text: str
    labels: tuple[str, ...]
    values: Callable[[Stats], Values]


class RunnerCollector(Collector):
    """Collect the stats of runners.

    Args:
        runners: name -> runner; the name becomes the label ``runner``.

    Sync: a scrape waits for the samples of the shadow check that are on their way. It may come from any thread.
    """

    def __init__(self, runners: Mapping[str, HasStats]) -> None:
        self._runners = dict(runners)

    def describe(self) -> Iterator[Metric]:
        """Name the metrics without asking any runner."""
        return iter([_empty(family) for family in FAMILIES])

    def collect(self) -> Iterator[Metric]:
        """Read all runners, each once."""
        stats = {name: runner.stats() for name, runner in self._runners.items()}
        for family in FAMILIES:
            metric = _empty(family)
            for name, seen in stats.items():
                for labels, value in _summed(family.values(seen)).items():
                    metric.add_metric([name, str(seen["rank"]), *labels], value)
            yield metric


def export(runners: Mapping[str, HasStats], registry: CollectorRegistry = REGISTRY) -> RunnerCollector:
    """Register runners with a registry.

    Args:
        runners: name -> runner; the name becomes the label ``runner``.
        registry: by default the one that ``prometheus_client.start_http_server`` serves.

    Raises:
        ValueError: the registry has these metrics already.

    Sync: none; a scrape is as ``RunnerCollector`` says.
    """
    collector = RunnerCollector(runners)
    registry.register(collector)
    return collector


def _empty(family: _Family) -> CounterMetricFamily | GaugeMetricFamily:
    return family.kind(family.name, family.text, labels=("runner", "rank", *family.labels))


def _summed(values: Values) -> dict[tuple[str, ...], float]:
    """Make one series of those that are labelled alike, such as of variants that print the same: two fail a scrape."""
    sums: dict[tuple[str, ...], float] = {}
    for labels, value in values:
        sums[labels] = sums.get(labels, 0) + value
    return sums


def _extents(bucket: Iterable[int] | None) -> str:
    """Spell a bucket as requests x tokens; all steps at exact extents are one."""
    return "exact" if bucket is None else "x".join(str(extent) for extent in list(bucket)[:2])


def _routes(field: str) -> Callable[[Stats], Values]:
    def values(stats: Stats) -> Values:
        for route in stats["routes"]:
            labels = (route["prep"], route["forward"], route["reason"], route["forward_reason"] or "")
            yield (*labels, _extents(route["bucket"]), str((route["bucket"] or (0, 0, 0))[2])), route[field]

    return values


def _total(field: str) -> Callable[[Stats], Values]:
    return lambda stats: [((), stats[field])]


def _each(*path: str) -> Callable[[Stats], Values]:
    """Give a counter for each name in a mapping of the stats, if it is there."""

    def values(stats: Stats) -> Values:
        found: Any = stats
        for name in path:
            found = (found or {}).get(name)
        return [((str(name),), count) for name, count in (found or {}).items()]

    return values


def _fallbacks(stats: Stats) -> Values:
    # What follows a colon is the text of an error: stats() has it, and labels must stay few.
    return [((why.partition(":")[0],), count) for why, count in stats["launch_fallbacks"].items()]


def _shadow(stats: Stats) -> Values:
    shadow = stats["shadow"] or {}
    return [((verdict,), shadow[verdict]) for verdict in ("passed", "mismatched", "failed") if verdict in shadow]


def _staged(field: str) -> Callable[[Stats], Values]:
    return lambda stats: [((), stats["staging"][field])] if stats["staging"] else []


def _key_labels(key: Mapping[str, Any]) -> tuple[str, ...]:
    return key["mode"], _extents(key["bucket"]), str(key["bucket"][2]), key["variant"]


def _key_steps(stats: Stats) -> Values:
    return [(_key_labels(key), key["steps"]) for key in stats["keys"]]


def _key_seconds(stats: Stats) -> Values:
    return [(_key_labels(key), key["capture_seconds"]) for key in stats["keys"]]


def _key_bytes(stats: Stats) -> Values:
    for key in stats["keys"]:
        for part in ("pool", "exec", "outputs"):
            if (num_bytes := key["memory"][f"{part}_bytes"]) is not None:
                yield (*_key_labels(key), part), num_bytes


def _states(stats: Stats) -> Values:
    count: dict[tuple[str, ...], int] = {}
    for key in stats["keys"]:
        for part, state in key["states"].items():
            count[part, state] = count.get((part, state), 0) + 1
    return count.items()


_ROUTE = ("prep", "forward", "reason", "forward_reason", "bucket", "row_tokens")
_KEY = ("mode", "bucket", "row_tokens", "variant")
_C, _G = CounterMetricFamily, GaugeMetricFamily

FAMILIES = (
    _Family(_C, "graphglue_steps", "Steps, by route, reason and bucket.", _ROUTE, _routes("steps")),
    _Family(_C, "graphglue_real_tokens", "Real token rows of those steps.", _ROUTE, _routes("real_tokens")),
    _Family(_C, "graphglue_padded_tokens", "Padded token rows of those steps.", _ROUTE, _routes("padded_tokens")),
    _Family(_C, "graphglue_one_launch_steps", "Steps that were one launch.", (), _total("one_launch")),
    _Family(_C, "graphglue_launch_fallback_steps", "Glued steps of more launches.", ("why",), _fallbacks),
    _Family(_C, "graphglue_quarantines", "Keys sent to the eager fallback.", ("part",), _each("quarantines")),
    _Family(_C, "graphglue_shadow_samples", "Sampled steps that have a verdict.", ("verdict",), _shadow),
    _Family(_C, "graphglue_staged_steps", "Steps whose front ran ahead.", (), _staged("staged")),
    _Family(_C, "graphglue_staged_taken_steps", "Staged steps that were taken.", (), _staged("staged_taken")),
    _Family(
        _C,
        "graphglue_staged_rejected_steps",
        "Staged steps that were not.",
        ("why",),
        _each("staging", "staged_rejected"),
    ),
    _Family(_C, "graphglue_key_steps", "Steps that replayed a graph of the key.", _KEY, _key_steps),
    _Family(_G, "graphglue_keys", "Keys, by prep or forward and its state now.", ("part", "state"), _states),
    _Family(_G, "graphglue_key_capture_seconds", "How long the last capture took.", _KEY, _key_seconds),
    _Family(_G, "graphglue_key_bytes", "What a key holds; outputs lie in the pool.", (*_KEY, "part"), _key_bytes),
)
