"""Ladders side by side: the figures are those of counting step by step, and all have the same largest size."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from graphglue import ConfigError, Ladder
from graphglue.ladders.compare import LadderReport, compare, padding_of, usual_ladders
from graphglue.ladders.plot import draw

HISTOGRAM = {0: 4, 1: 10, 3: 2, 9: 1, 40: 0}

histograms = st.dictionaries(st.integers(1, 70), st.integers(1, 9), min_size=1)


def test_figures_that_are_known_by_hand() -> None:
    """16 real rows in 4 steps, run in 2 + 2 + 8 + 12 = 24; 1 in 2 is twice as large, and no more."""
    one = padding_of("mine", Ladder([2, 8, 12]), {1: 2, 3: 1, 11: 1}, cost_per_bucket=2.5)
    assert one.sizes == (2, 8, 12)
    assert one.padded_rows == 8
    assert one.padded_share == 8 / 24
    assert one.waste == 8 / 16
    assert one.worst_waste == 5 / 3
    assert one.over_twice == 1 / 4
    assert one.cost == 8 + 3 * 2.5


def test_a_count_that_the_ladder_does_not_hold_is_refused() -> None:
    with pytest.raises(ConfigError, match="count 9 in a ladder of up to 8: expected one that holds it"):
        padding_of("short", Ladder([8]), {1: 1, 9: 1})


@given(histogram=histograms, buckets=st.integers(1, 20), multiple=st.integers(1, 9), more=st.integers(0, 3))
def test_no_other_ladder_of_as_many_sizes_pads_less(
    histogram: dict[int, int], buckets: int, multiple: int, more: int
) -> None:
    largest = (-(-max(histogram) // multiple) + more) * multiple
    report = compare(histogram, "", buckets, multiple=multiple, max_size=largest)
    assert report.least_rows[min(buckets, len(report.least_rows)) - 1] == report.fitted.padded_rows
    for ladder in report.ladders:
        assert ladder.sizes[-1] == largest
        assert not any(size % multiple for size in ladder.sizes)
        assert ladder.padded_rows >= report.least_rows[min(len(ladder.sizes), len(report.least_rows)) - 1]
    assert len(report.ladders[-1].sizes) <= buckets


def test_the_usual_ladders() -> None:
    ladders = usual_ladders(42, 8)
    assert ladders["doubling"].sizes == (1, 2, 4, 8, 16, 32, 42)
    assert ladders["every 8"].sizes == (1, 2, 4, 8, 16, 24, 32, 40, 42)
    assert usual_ladders(40, 8, every=12)["every 12"].sizes == (1, 2, 4, 8, 12, 24, 36, 40)
    assert usual_ladders(48, 8, multiple=6)["doubling"].sizes == (6, 12, 18, 36, 48)
    assert usual_ladders(1, 8) == {"doubling": Ladder([1]), "every 8": Ladder([1]), "bounded, waste 0": Ladder([1])}


def test_the_bounded_ladder_has_as_many_sizes_as_it_may_and_the_least_bound() -> None:
    (name,) = [name for name in usual_ladders(64, 9) if name.startswith("bounded, waste ")]
    bound = float(name.removeprefix("bounded, waste "))
    assert len(Ladder.bounded(64, bound)) <= 9 < len(Ladder.bounded(64, bound - 0.001))


@pytest.mark.parametrize(
    ("every", "largest", "least"), [(0, 8, 1), (-1, 65_536, 1), (1, 65_537, 2), (30_517, 2_000_000_000, 30_518)]
)
def test_a_distance_that_makes_no_ladder_or_too_many_sizes_is_refused(every: int, largest: int, least: int) -> None:
    with pytest.raises(ConfigError, match=f"every={every} up to {largest}: expected at least {least}, for 65536 sizes"):
        usual_ladders(largest, 4, every=every)
    assert len(usual_ladders(largest, 4, every=least)) == 3


def test_a_report_counts_steps_with_rows_and_survives_its_file(tmp_path: Path) -> None:
    report = compare(HISTOGRAM, "by hand", 2, cost_per_bucket=3)
    assert (report.num_steps, report.num_rows) == (13, 25)
    assert report.fitted.sizes == (3, 40)
    assert report.fitted.cost == report.fitted.padded_rows + 6
    report.write_json(tmp_path / "r.json")
    assert LadderReport.model_validate_json((tmp_path / "r.json").read_text()) == report


@pytest.mark.parametrize("ending", ["png", "svg"])
def test_a_picture_is_drawn(tmp_path: Path, ending: str) -> None:
    pytest.importorskip("matplotlib", reason="the plot needs matplotlib, of the extra bench")
    path = tmp_path / f"ladders.{ending}"
    draw(compare(HISTOGRAM, "by hand", 2), path)
    assert path.read_bytes().startswith({"png": b"\x89PNG", "svg": b"<?xml"}[ending])


def test_a_picture_in_words_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"ladders\.txt: expected a name that ends in \.png, \.svg, \.pdf"):
        draw(compare(HISTOGRAM, "by hand", 2), tmp_path / "ladders.txt")


def test_without_matplotlib_it_says_what_to_install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(ConfigError, match=r'--plot needs matplotlib: pip install "graphglue\[bench\]"'):
        draw(compare(HISTOGRAM, "by hand", 2), tmp_path / "ladders.png")
