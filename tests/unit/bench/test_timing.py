"""Timing on fakes: who runs when, what is timed, what the numbers mean."""

from __future__ import annotations

import gc
from collections.abc import Callable

import pytest

from graphglue.bench.timing import Sample, affordable, interleaved, quiet, slope, spread_us


class Stage:
    """Note who runs, with a clock that only the steps move."""

    def __init__(self) -> None:
        self.seen: list[str] = []
        self.now_ns = 0

    def step(self, label: str, takes_us: int = 1) -> Callable[[], None]:
        def run() -> None:
            self.seen.append(label)
            self.now_ns += takes_us * 1000

        return run

    def synchronize(self) -> None:
        self.seen.append("sync")
        self.now_ns += 5_000_000

    def clock_ns(self) -> int:
        self.seen.append("clock")
        return self.now_ns

    def run(self, takes_us: dict[str, int], rounds: int, in_flight: int = 0) -> dict[str, Sample]:
        steps = {label: self.step(label, us) for label, us in takes_us.items()}
        return interleaved(steps, rounds, in_flight, synchronize=self.synchronize, clock_ns=self.clock_ns)


def test_each_takes_its_turn_in_every_round() -> None:
    stage = Stage()
    stage.run({"A": 1, "B": 1, "C": 1}, rounds=2)
    assert [who for who in stage.seen if who not in ("sync", "clock")] == ["A", "B", "C", "A", "B", "C"]


def test_the_device_is_idle_before_a_turn_and_nothing_stands_between_clock_and_step() -> None:
    stage = Stage()
    stage.run({"A": 1, "B": 1}, rounds=1)
    assert stage.seen == ["sync", "clock", "A", "clock", "sync", "clock", "B", "clock", "sync"]


def test_steps_in_flight_are_of_the_same_kind_and_untimed() -> None:
    stage = Stage()
    samples = stage.run({"A": 3, "B": 1}, rounds=1, in_flight=2)
    assert stage.seen[:6] == ["sync", "A", "A", "clock", "A", "clock"]
    assert samples["A"].times_us == (3.0,)


def test_only_the_step_is_timed() -> None:
    samples = Stage().run({"A": 7, "B": 2}, rounds=4)
    assert samples["A"].times_us == (7.0,) * 4
    assert samples["B"].times_us == (2.0,) * 4


def test_progress_is_told_after_each_round() -> None:
    told: list[int] = []
    interleaved({"A": lambda: None}, 3, synchronize=lambda: None, progress=lambda: told.append(1))
    assert len(told) == 3


def test_median_and_p99() -> None:
    sample = Sample(tuple(float(number) for number in range(1, 201)))
    assert sample.median_us == 100.5
    assert sample.p99_us == 198.0
    assert Sample((4.0,)).p99_us == 4.0
    assert Sample(tuple([1.0] * 99 + [50.0])).p99_us == 1.0
    assert Sample(tuple([1.0] * 98 + [50.0] * 2)).p99_us == 50.0


def test_noise_is_what_two_rows_of_the_same_thing_differ_by() -> None:
    assert spread_us(Sample((1.0, 2.0, 3.0)), Sample((2.5, 2.5))) == 0.5
    assert spread_us(Sample((2.5,)), Sample((2.0,))) == 0.5


def test_slope_is_the_cost_of_one_more() -> None:
    assert slope([(5, 10.0), (10, 12.0), (15, 14.0)]) == pytest.approx(0.4)
    assert slope([(1, 3.0), (2, 3.0)]) == 0


@pytest.mark.parametrize(
    ("rounds", "round_us", "seconds", "expected"),
    [
        (2000, 1000.0, 20.0, 2000),
        (2000, 20_000.0, 20.0, 1000),
        (2000, 1e9, 20.0, 5),
        (3, 1e9, 20.0, 3),
        (10, 0.0, 1, 10),
    ],
)
def test_rounds_are_cut_to_a_budget(rounds: int, round_us: float, seconds: float, expected: int) -> None:
    assert affordable(rounds, round_us, seconds) == expected


def test_collection_is_held_back_and_restored() -> None:
    frozen = gc.get_freeze_count()
    with quiet():
        assert not gc.isenabled()
        assert gc.get_freeze_count() > frozen
    assert gc.isenabled()


def test_collection_that_was_off_stays_off() -> None:
    gc.disable()
    try:
        with quiet():
            pass
        assert not gc.isenabled()
    finally:
        gc.enable()


def test_collection_comes_back_after_an_error() -> None:
    with pytest.raises(ZeroDivisionError), quiet():
        raise ZeroDivisionError
    assert gc.isenabled()
