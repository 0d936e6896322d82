"""What ladders pad a histogram by: the fitted one beside doubling, every so many, and a bounded one."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Mapping
from pathlib import Path

from pydantic import BaseModel, ConfigDict

from graphglue.core.buckets import Ladder
from graphglue.core.fitting import best_fits
from graphglue.errors import ConfigError

FITTED = "fitted"
_MAX_CURVE = 64
_MAX_EVEN = 65_536


class LadderPadding(BaseModel):
    """What one ladder pads the steps of a histogram by.

    Attributes:
        name: how the ladder is made.
        sizes: its sizes.
        padded_rows: rows that are no real ones, over all steps.
        padded_share: padded rows over all rows that run.
        waste: padded rows over real rows.
        worst_waste: that of the step it is worst for.
        over_twice: the share of the steps whose bucket is more than twice as large, which EXTEND runs eagerly.
        cost: padded rows, and the cost of a bucket for each size.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    name: str
    sizes: tuple[int, ...]
    padded_rows: int
    padded_share: float
    waste: float
    worst_waste: float
    over_twice: float
    cost: float


class LadderReport(BaseModel):
    """A fitted ladder, and others over the same counts.

    Attributes:
        source: where the counts are from.
        histogram: how often each count occurred; idle steps, of 0, take no part.
        num_steps: steps with a count above 0.
        num_rows: their real rows.
        buckets: how many sizes were allowed.
        multiple: what every size is a multiple of.
        cost_per_bucket: what a size costs, in padded rows.
        ladders: the fitted one first.
        least_rows: the padded rows of the best 1, 2, ... sizes.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    source: str
    histogram: dict[int, int]
    num_steps: int
    num_rows: int
    buckets: int
    multiple: int
    cost_per_bucket: float
    ladders: tuple[LadderPadding, ...]
    least_rows: tuple[int, ...]

    @property
    def fitted(self) -> LadderPadding:
        """The ladder that costs least."""
        return self.ladders[0]

    def write_json(self, path: Path) -> None:
        """Write it all to a file."""
        path.write_text(self.model_dump_json(indent=2) + "\n", encoding="utf-8")


def compare(
    histogram: Mapping[int, int],
    source: str,
    buckets: int,
    *,
    multiple: int = 1,
    max_size: int | None = None,
    cost_per_bucket: float = 0,
    every: int = 8,
) -> LadderReport:
    """Fit a ladder to a histogram, and hold it beside the usual ones with the same largest size.

    Args:
        histogram: how often each count occurred.
        source: where that is from, for the report.
        buckets, multiple, max_size, cost_per_bucket: as ``Ladder.from_histogram`` takes them.
        every: the distance of the sizes of the even ladder.

    Raises:
        ConfigError: what ``Ladder.from_histogram`` or ``usual_ladders`` refuses.
    """
    fitted = Ladder.from_histogram(histogram, buckets, cost_per_bucket, multiple, max_size)
    ladders = {FITTED: fitted, **usual_ladders(fitted.largest, buckets, multiple, every)}
    real = {count: number for count, number in sorted(histogram.items()) if count and number}
    curve = best_fits(histogram, max(buckets, _MAX_CURVE), multiple, max_size)
    return LadderReport(
        source=source,
        histogram=dict(sorted(histogram.items())),
        num_steps=sum(real.values()),
        num_rows=sum(count * number for count, number in real.items()),
        buckets=buckets,
        multiple=multiple,
        cost_per_bucket=cost_per_bucket,
        ladders=tuple(padding_of(name, ladder, real, cost_per_bucket) for name, ladder in ladders.items()),
        least_rows=tuple(fit.padded_rows for fit in curve),
    )


def usual_ladders(largest: int, buckets: int, multiple: int = 1, every: int = 8) -> dict[str, Ladder]:
    """Give the ladders that engines have: doubling, every so many above powers of two, and the bounded one.

    The bounded one wastes as little in its worst step as ``buckets`` sizes can, to a thousandth.

    Args:
        largest: the largest size of each, a multiple of ``multiple``.
        buckets: how many sizes the bounded ladder may have.
        multiple: what every size is a multiple of.
        every: the distance of the even sizes; below them stand powers of two, as in serving engines.

    Raises:
        ConfigError: a distance below 1, or one that makes too many sizes.
    """
    least = -(-largest // _MAX_EVEN)
    if every < least:
        raise ConfigError(f"every={every} up to {largest}: expected at least {least}, for {_MAX_EVEN} sizes at most")
    doubling = [2**power for power in range(largest.bit_length()) if 2**power < largest]
    even = [*(size for size in doubling if size < every), *range(every, largest, every)]
    thousandth = bisect_left(range(1000 * largest), -buckets, key=lambda n: -len(_bounded(largest, n, multiple)))
    return {
        "doubling": Ladder([*doubling, largest]).aligned(multiple),
        f"every {every}": Ladder([*even, largest]).aligned(multiple),
        f"bounded, waste {thousandth / 1000:g}": _bounded(largest, thousandth, multiple),
    }


def _bounded(largest: int, thousandths: int, multiple: int) -> Ladder:
    return Ladder.bounded(largest, thousandths / 1000, multiple)


def padding_of(name: str, ladder: Ladder, histogram: Mapping[int, int], cost_per_bucket: float = 0) -> LadderPadding:
    """Count what a ladder pads the steps of a histogram by.

    Args:
        name: the ladder's.
        ladder: holds every count.
        histogram: how often each count, from 1 up, occurred.
        cost_per_bucket: what a size costs, in padded rows.

    Raises:
        ConfigError: a count above the ladder's largest size.
    """
    if max(histogram) > ladder.largest:
        raise ConfigError(f"count {max(histogram)} in a ladder of up to {ladder.largest}: expected one that holds it")
    padded = {count: (ladder.cover(count) or 0) - count for count in histogram}
    num_rows = sum(count * number for count, number in histogram.items())
    padded_rows = sum(padded[count] * number for count, number in histogram.items())
    over_twice = sum(number for count, number in histogram.items() if padded[count] > count)
    return LadderPadding(
        name=name,
        sizes=ladder.sizes,
        padded_rows=padded_rows,
        padded_share=padded_rows / (padded_rows + num_rows),
        waste=padded_rows / num_rows,
        worst_waste=max(rows / count for count, rows in padded.items()),
        over_twice=over_twice / sum(histogram.values()),
        cost=padded_rows + cost_per_bucket * len(ladder),
    )
