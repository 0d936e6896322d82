"""Likeness says True only of tensors that are what they were: by torch's own guards, and without them."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st

from graphglue.core import likeness
from graphglue.core.likeness import Likeness

DTYPES = [torch.int64, torch.int32, torch.float32, torch.bfloat16, torch.bool, torch.uint8]


class AlwaysTrue:
    """Guards that a later torch may have broken."""

    def __init__(self, *tensors: torch.Tensor, **_: Any) -> None: ...

    def check(self, *tensors: torch.Tensor) -> bool:
        return True


class IgnoresStrides(AlwaysTrue):
    """Guards that compare all but strides."""

    def __init__(self, *tensors: torch.Tensor, **_: Any) -> None:
        self._seen = [self._look(tensor) for tensor in tensors]

    def check(self, *tensors: torch.Tensor) -> bool:
        return [self._look(tensor) for tensor in tensors] == self._seen

    def _look(self, tensor: torch.Tensor) -> Any:
        return type(tensor), tensor.dtype, tensor.device, tensor.shape


class OtherArguments:
    """Guards whose constructor takes other arguments."""

    def __init__(self, tensors: list[torch.Tensor]) -> None: ...


GUARDS: dict[str, Any] = {
    "torch's": likeness.TensorGuards,
    "none": None,
    "broken": AlwaysTrue,
    "half broken": IgnoresStrides,
    "changed": OtherArguments,
}


@pytest.fixture(params=GUARDS)
def guards(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    monkeypatch.setattr(likeness, "TensorGuards", GUARDS[request.param])
    likeness.guards_work.cache_clear()
    yield request.param
    likeness.guards_work.cache_clear()


class Tagged(torch.Tensor):
    """A subclass, whose operations may do anything."""


def _others() -> dict[str, torch.Tensor]:
    like = torch.zeros(2, 3)
    return {
        "dtype": like.double(),
        "dtype of the same size": like.int(),
        "device": torch.zeros(2, 3, device="meta"),
        "extents": torch.zeros(3, 3),
        "extents of the same number": torch.zeros(3, 2),
        "one row": torch.zeros(1, 3),
        "no rows": torch.zeros(0, 3),
        "dimensions": torch.zeros(2, 3, 1),
        "flat": torch.zeros(6),
        "strides": torch.zeros(3, 2).t(),
        "strides of a slice": torch.zeros(2, 6)[:, ::2],
        "rows apart": torch.zeros(2, 4)[:, :3],
        "expanded": torch.zeros(3).expand(2, 3),
        "subclass": like.as_subclass(Tagged),
        "parameter": torch.nn.Parameter(like.clone(), requires_grad=False),
        "negative bit": torch._neg_view(like.clone()),
    }


def test_which_guards_are_trusted(guards: str) -> None:
    """Guards that are private to torch are tried before they are trusted."""
    if guards == "torch's":
        assert likeness.guards_work() is (likeness.TensorGuards is not None)
    else:
        assert likeness.guards_work() is False


@pytest.mark.parametrize("name", _others())
def test_a_tensor_that_differs_in_one_way_is_not_alike(guards: str, name: str) -> None:
    first, last = torch.zeros(5, dtype=torch.int32), torch.zeros(2, 3)
    seen = Likeness([first, last])
    assert seen.holds(torch.ones(5, dtype=torch.int32), torch.ones(2, 3))
    assert not seen.holds(first, _others()[name])
    assert not Likeness([_others()[name], first]).holds(last, first)
    assert not Likeness([last]).holds(_others()[name])


def test_what_is_no_tensor_is_not_alike(guards: str) -> None:
    seen = Likeness([torch.zeros(2, 3)])
    for other in (None, 1.0, [[0.0] * 3] * 2, torch.zeros(2, 3).numpy(), "zeros"):
        assert not seen.holds(other)


def test_sparse_tensors_are_not_alike(guards: str) -> None:
    assert not Likeness([torch.zeros(2, 3)]).holds(torch.zeros(2, 3).to_sparse())


def test_another_order_is_not_alike(guards: str) -> None:
    one, other = torch.zeros(4), torch.zeros(5)
    assert not Likeness([one, other]).holds(other, one)
    assert Likeness([one, other]).holds(torch.ones(4), torch.ones(5))


def test_values_and_addresses_do_not_count(guards: str) -> None:
    base = torch.arange(40)
    seen = Likeness([base[:6]])
    assert all(seen.holds(base[start : start + 6]) for start in (0, 1, 7, 33))


def test_no_tensors_are_alike_to_none(guards: str) -> None:
    assert Likeness([]).holds()


def test_the_remembered_tensors_are_not_kept_alive(guards: str) -> None:
    tensor = torch.zeros(3)
    seen, dead = Likeness([tensor]), weakref.ref(tensor)
    del tensor
    assert dead() is None
    assert seen.holds(torch.ones(3))


def _look(tensor: torch.Tensor) -> tuple[object, ...]:
    return type(tensor), tensor.dtype, tensor.device, tuple(tensor.shape), tensor.stride()


@st.composite
def tensors(draw: st.DrawFn) -> torch.Tensor:
    shape = draw(st.lists(st.integers(0, 3), max_size=3))
    made = torch.zeros(shape, dtype=draw(st.sampled_from(DTYPES)), device=draw(st.sampled_from(["cpu", "cpu", "meta"])))
    change = draw(st.sampled_from(CHANGES))
    return change(made)


CHANGES: list[Callable[[torch.Tensor], torch.Tensor]] = [
    lambda tensor: tensor,
    lambda tensor: tensor,
    lambda tensor: tensor.transpose(0, -1) if tensor.dim() else tensor,
    lambda tensor: tensor[..., ::2] if tensor.dim() else tensor,
    lambda tensor: tensor[1:] if tensor.dim() and len(tensor) else tensor,
    lambda tensor: tensor.expand(2, *tensor.shape),
    lambda tensor: tensor.as_subclass(Tagged),
]


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow])
@given(data=st.data())
def test_true_is_said_only_of_tensors_that_look_the_same(guards: str, data: st.DataObject) -> None:
    ours = data.draw(st.lists(tensors(), min_size=1, max_size=4), label="remembered")
    theirs = [data.draw(tensors() | st.just(tensor.clone()), label="given") for tensor in ours]
    same = [_look(tensor) for tensor in ours] == [_look(tensor) for tensor in theirs]
    if Likeness(ours).holds(*theirs):
        assert same
    elif same:  # it may say False of fine ones, but not as a rule: else no step would go the fast way
        assume(len({id(tensor) for tensor in theirs}) == len(theirs))
        plain = all(type(tensor) is torch.Tensor and tensor.device.type == "cpu" for tensor in theirs)
        assert not plain


def test_the_property_can_fail(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(likeness, "TensorGuards", AlwaysTrue)
    monkeypatch.setattr(likeness, "guards_work", lambda: True)
    with pytest.raises(AssertionError):
        test_another_order_is_not_alike("broken")
