"""What a prep holds is found wherever Python can keep it, and what a run reads is watched."""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable
from dataclasses import dataclass, field
from types import ModuleType, SimpleNamespace
from typing import Any, ClassVar

import pytest
import torch

from graphglue.audit import holdings

GLOBAL, UNUSED = torch.ones(1), torch.ones(2)
SETTINGS = {"scale": 3, "kept": torch.ones(3)}


def helper(view: Any) -> Any:
    return view + GLOBAL


class Backend:
    shared: ClassVar[list[torch.Tensor]] = [torch.ones(4)]
    factor = 2

    def __init__(self) -> None:
        self.buffers = {"a": [torch.ones(5)]}
        self.engine = SimpleNamespace(step=7, lens=torch.ones(6))
        self.me = self

    def prep(self, view: Any) -> Any:
        return self.inner(view)

    def inner(self, view: Any) -> Any:
        return view + GLOBAL

    @property
    def table(self) -> Any:
        return SETTINGS["kept"]

    @staticmethod
    def fixed(view: Any, scale: Any = torch.ones(7)) -> Any:  # noqa: B008
        return view * scale


class Slotted:
    __slots__ = ("one", "unset")

    def __init__(self) -> None:
        self.one = torch.ones(8)

    def __call__(self, view: Any) -> Any:
        return view


@dataclass
class Hostile:
    held: torch.Tensor = field(default_factory=lambda: torch.ones(9))

    def __getattr__(self, name: str) -> Any:
        raise RuntimeError(name)

    def __call__(self, view: Any) -> Any:
        return view


def sizes(prep: Callable[..., Any]) -> dict[str, int]:
    found, is_complete = holdings.reachable(prep)
    assert is_complete
    return {name: tensor.numel() for name, tensor in found.items()}


def test_closures_defaults_globals_and_attributes() -> None:
    one, deep = torch.ones(10), {"k": [torch.ones(11)]}

    def prep(view: Any, given: Any = torch.ones(12), *, named: Any = torch.ones(13)) -> Any:  # noqa: B008
        return lambda: helper(one) if deep else SETTINGS

    prep.cache = torch.ones(14)  # type: ignore[attr-defined]
    assert sizes(prep) == {
        "closure variable 'one'": 10,
        "closure variable 'deep'['k'][0]": 11,
        "default argument 'given'": 12,
        "default argument 'named'": 13,
        "function attribute 'cache'": 14,
        "global 'helper': global 'GLOBAL'": 1,
        "global 'SETTINGS'['kept']": 3,
    }


def test_a_bound_self_with_its_class_and_what_it_holds() -> None:
    assert sizes(Backend().prep) == {
        "self.buffers['a'][0]": 5,
        "self.engine.lens": 6,
        "self.shared[0]": 4,
        "self.inner: global 'GLOBAL'": 1,
        "self.table: global 'SETTINGS'['kept']": 3,
        "self.fixed: default argument 'scale'": 7,
    }


def test_callable_objects_slots_partials_and_modules() -> None:
    assert sizes(Slotted()) == {"self.one": 8}
    assert sizes(Hostile()) == {"self.held": 9}
    partial = functools.partial(helper, torch.ones(15), key=torch.ones(16))
    assert sizes(partial) == {"arguments[0]": 15, "keywords['key']": 16, "global 'GLOBAL'": 1}
    assert sizes(torch.nn.Linear(2, 3)) == {"self._parameters['weight']": 6, "self._parameters['bias']": 3}


def test_names_of_other_modules_are_looked_up_there(monkeypatch: pytest.MonkeyPatch) -> None:
    elsewhere, inner = ModuleType("elsewhere"), ModuleType("elsewhere.inner")
    vars(elsewhere).update(inner=inner, other=torch.ones(20))
    vars(inner).update(pages=torch.ones(21), helper=helper)
    monkeypatch.setitem(globals(), "elsewhere_global", elsewhere)

    def closed(view: Any) -> Any:
        return elsewhere.inner.pages + view

    def named(view: Any) -> Any:
        return elsewhere_global.inner.helper(view)  # type: ignore[name-defined]  # noqa: F821

    assert sizes(closed) == {"closure variable 'elsewhere'.inner.pages": 21}
    assert sizes(named) == {"global 'elsewhere_global'.inner.helper: global 'GLOBAL'": 1}


def test_code_of_other_packages_loggers_and_graphglue_are_not_walked() -> None:
    import graphglue as gg

    logger = logging.getLogger("somebody")
    logger.held = torch.ones(22)  # type: ignore[attr-defined]

    runner = gg.Runner(
        slots=[gg.Slot("lens", axis="request", dtype=torch.int64, pad=1)], ladder=[1], prep=lambda view: view.lens
    )

    def prep(view: Any) -> Any:
        assert view is not None
        return torch.nn.functional.pad(runner, view), logger

    assert sizes(prep) == {}


def test_a_walk_that_ends_early_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(holdings, "_MAX_OBJECTS", 10)
    chain = [[number] for number in range(100)]
    assert not holdings.reachable(lambda view: chain)[1]


def test_host_values_are_what_may_change() -> None:
    backend = Backend()
    names = holdings.host_values(backend.prep)
    assert "self.engine.step" in names
    assert "self.factor" not in names
    sizes_of = (1, 2)
    assert holdings.host_values(lambda view: sizes_of) == []


def watched(prep: Callable[[torch.Tensor], Any], view: torch.Tensor) -> list[tuple[str, int]]:
    watch = holdings.Watch(lambda tensor: tensor.untyped_storage().data_ptr() == view.untyped_storage().data_ptr())
    with watch:
        prep(view)
    for _, _, where in watch.foreign.values():
        assert "test_holdings.py:" in where
    return [(operation, tensor.numel()) for tensor, operation, _ in watch.foreign.values()]


def test_a_watch_notes_what_was_neither_handed_nor_made() -> None:
    view, other = torch.ones(4), torch.arange(5)
    assert watched(lambda view: view + view[:2].sum(), view) == []
    assert watched(lambda view: view * other[:4], view) == [("aten::mul", 4)]
    assert watched(lambda view: (torch.ones(4) + view) * torch.empty_like(other).shape[0], view) == []
    assert watched(lambda view: [view.new_zeros(3).add_(1) for _ in range(4)], view) == []
    assert watched(lambda view: other.sum() + other.amax(), view) == [("aten::sum", 5)]
