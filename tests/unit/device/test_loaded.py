"""What a fill says of the step it has taken in: equal to another only if the fill would write the same."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import graphglue as gg
from graphglue.device.base import Fill, Loaded
from graphglue.device.cpu import TorchFill

from .fill_steps import FAST_SLOTS, sources_of
from .kernel_model import HostKernel, on_device

RAW, BUCKET = gg.Bucket(3, 3, 1), gg.Bucket(4, 4, 1)
NAMES = ("ids", "loc", "hidden", "start", "maybe")


class Taken:
    """A fill and the arena it fills, over torch operations or over the kernel's struct."""

    def __init__(self, kernel: HostKernel | None, slots: Any = FAST_SLOTS, size: int = 4) -> None:
        self.arena = gg.Arena(slots, [size])
        self.bucket = self.arena.space.bucket(size)
        targets = self.arena.targets(self.bucket)
        self.fill: Fill = TorchFill(targets, self.arena.device)
        if kernel is not None:
            self.fill = kernel.fill(self.arena.slots, targets, self.arena._owned)

    def loaded(self, sources: dict[str, Any], raw: gg.Bucket = RAW) -> Loaded | None:
        self.fill.load(self.arena.bind(sources, raw, self.bucket))
        return self.fill.loaded()


@pytest.fixture(params=["torch", "kernel"])
def taken(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Taken:
    return Taken(HostKernel(monkeypatch) if request.param == "kernel" else None)


@pytest.mark.parametrize("make", [torch.clone, torch.Tensor.numpy, torch.Tensor.tolist], ids=["host", "numpy", "list"])
def test_equal_host_values_are_the_same_step_wherever_they_lie(taken: Taken, make: Any) -> None:
    if make is torch.Tensor.tolist:  # lists of whole numbers only
        given_sources = [{**sources_of(3, 5, torch.clone), "ids": [5, 6, 7]} for _ in range(2)]
    else:
        given_sources = [sources_of(3, 5, make) for _ in range(2)]
    one, other = (taken.loaded(sources) for sources in given_sources)
    assert one == other
    assert one is not None


@pytest.mark.parametrize("name", NAMES)
def test_one_other_element_of_any_source_is_another_step(taken: Taken, name: str) -> None:
    sources = sources_of(3, 5, torch.clone)
    one = taken.loaded(sources)
    sources[name].view(-1)[-1] += 1
    assert taken.loaded(sources) != one
    sources[name].view(-1)[-1] -= 1
    assert taken.loaded(sources) == one


def test_another_extent_and_a_missing_slot_are_other_steps(taken: Taken) -> None:
    sources = sources_of(3, 5, torch.clone)
    one = taken.loaded(sources)
    without = {name: source for name, source in sources.items() if name != "maybe"}
    assert taken.loaded(without) != one
    assert taken.loaded(sources_of(2, 5, torch.clone), gg.Bucket(2, 2, 1)) != one
    assert taken.loaded({}, gg.Bucket(0, 0, 0)) != one
    assert None not in (taken.loaded(without), taken.loaded({}, gg.Bucket(0, 0, 0)))  # they can be compared
    assert taken.loaded(sources) == one


@pytest.mark.parametrize("other", [-0.0, float("nan"), 1.0])
def test_numbers_are_told_apart_by_their_bits(monkeypatch: pytest.MonkeyPatch, other: float) -> None:
    for kernel in (None, HostKernel(monkeypatch)):
        taken = Taken(kernel, [gg.Slot("x", "request", torch.float32, 0.5)], 1)
        one = taken.loaded({"x": 0.0}, gg.Bucket(1, 1, 1))
        assert taken.loaded({"x": other}, gg.Bucket(1, 1, 1)) != one
        assert taken.loaded({"x": other}, gg.Bucket(1, 1, 1)) == taken.loaded({"x": other}, gg.Bucket(1, 1, 1))


def test_junk_that_a_refused_step_left_in_the_payload_makes_no_other_step(monkeypatch: pytest.MonkeyPatch) -> None:
    taken = Taken(HostKernel(monkeypatch))
    one = taken.loaded(sources_of(2, 5, torch.clone), gg.Bucket(2, 2, 1))
    taken.loaded(sources_of(4, 90, torch.clone), gg.Bucket(4, 4, 1))
    assert taken.loaded(sources_of(2, 5, torch.clone), gg.Bucket(2, 2, 1)) == one


def test_device_sources_are_told_apart_by_address_and_version_and_are_held(monkeypatch: pytest.MonkeyPatch) -> None:
    taken, sources = Taken(HostKernel(monkeypatch)), sources_of(3, 5, on_device)
    one = taken.loaded(sources)
    assert one is not None
    assert {id(source) for source in one.sources} == {id(source) for source in sources.values()}
    assert taken.loaded(dict(sources)) == one
    assert taken.loaded({**sources, "ids": on_device(torch.arange(5, 8))}) != one  # equal values elsewhere
    sources["ids"][1] = 6  # the value it had
    assert taken.loaded(sources) != one


def test_a_source_too_large_for_the_struct_is_told_by_its_content(monkeypatch: pytest.MonkeyPatch) -> None:
    slots = [gg.Slot("x", "request", torch.int64, 0, inner=(4096,)), gg.Slot("n", "request", torch.int64, 0)]
    taken, bulk = Taken(HostKernel(monkeypatch), slots), torch.arange(3 * 4096).view(3, 4096)
    one = taken.loaded({"x": bulk, "n": [1, 2, 3]})
    assert one is not None
    assert taken.loaded({"x": bulk.clone(), "n": [1, 2, 3]}) == one  # in another pinned block
    bulk[2, 4095] = -1
    assert taken.loaded({"x": bulk, "n": [1, 2, 3]}) != one


def test_a_step_that_was_taken_in_without_binding_says_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    taken, sources = Taken(HostKernel(monkeypatch)), {**sources_of(3, 5, on_device), "ids": np.arange(5, 8)}
    one = taken.loaded(sources)
    take = taken.fill.remember(taken.arena.bind(sources, RAW, taken.bucket), sources)
    assert take is not None
    assert take(sources)
    assert taken.fill.loaded() == one
    sources["ids"][0] = 77
    assert take(sources)
    assert taken.fill.loaded() != one


def own_view(taken: Taken, sources: dict[str, Any]) -> dict[str, Any]:
    return {**sources, "ids": taken.arena.view(4).ids[:3]}


def made_in_inference_mode(taken: Taken, sources: dict[str, Any]) -> dict[str, Any]:
    with torch.inference_mode():
        return {**sources, "ids": on_device(torch.arange(5, 8))}


@pytest.mark.parametrize("change", [own_view, made_in_inference_mode])
def test_nothing_is_said_where_a_change_could_not_be_seen(monkeypatch: pytest.MonkeyPatch, change: Any) -> None:
    taken, sources = Taken(HostKernel(monkeypatch)), sources_of(3, 5, on_device)
    assert taken.loaded(change(taken, sources)) is None
    assert taken.loaded(sources) is not None


def test_torch_operations_say_nothing_of_a_slots_own_view_either() -> None:
    taken, sources = Taken(None), sources_of(3, 5, torch.clone)
    assert taken.loaded(own_view(taken, sources)) is None


def test_nothing_is_said_of_a_source_that_is_converted_on_the_device(monkeypatch: pytest.MonkeyPatch) -> None:
    taken = Taken(HostKernel(monkeypatch), [gg.Slot("x", "request", torch.float32, 0.5)])
    numbers = torch.tensor([1.0, 2.0, 0.5])
    assert taken.loaded({"x": on_device(numbers.to(torch.float8_e4m3fn))}) is None
    assert taken.loaded({"x": on_device(numbers)}) is not None


def test_what_is_not_written_is_let_go(taken: Taken) -> None:
    sources = sources_of(3, 5, torch.clone)
    taken.loaded(sources)
    before = {name: tensor.clone() for name, tensor in taken.arena.targets(taken.bucket).items()}
    taken.fill.unload()
    assert not getattr(taken.fill, "_sources", ())
    assert not getattr(taken.fill, "_writes", ())
    assert all(torch.equal(before[name], tensor) for name, tensor in taken.arena.targets(taken.bucket).items())


@given(st.lists(st.integers(0, 2), min_size=5, max_size=5), st.lists(st.integers(0, 2), min_size=5, max_size=5))
@pytest.mark.parametrize("which", ["torch", "kernel"])
def test_two_steps_say_the_same_exactly_if_they_write_the_same(which: str, one: list[int], other: list[int]) -> None:
    def sources(numbers: list[int]) -> dict[str, Any]:
        return {name: sources_of(3, start, torch.clone)[name] for name, start in zip(NAMES, numbers)}

    with pytest.MonkeyPatch.context() as patch:
        taken = Taken(HostKernel(patch) if which == "kernel" else None)

        def written(numbers: list[int]) -> tuple[Loaded | None, list[list[Any]]]:
            said = taken.loaded(sources(numbers))
            taken.fill.run()
            return said, [tensor.tolist() for tensor in taken.arena.targets(taken.bucket).values()]

        (first, wrote), (second, wrote_then) = written(one), written(other)
        assert (first == second) is (wrote == wrote_then)
