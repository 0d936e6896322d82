"""The registry: preps by name, and plug-ins that load on demand; a broken one is named and contained."""

from __future__ import annotations

import sys
import textwrap
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from graphglue import Batch, ContractError, Mode, PrepContract, Registry, Runner, Slot


def contract(name: str = "p") -> PrepContract:
    return PrepContract(name=name, modes={Mode.DECODE})


def prep(view: Any) -> dict[str, torch.Tensor]:
    return {"m": view.x + 1}


def test_the_decorator_returns_the_function() -> None:
    registry = Registry()

    @registry.register(contract())
    def mine(view: Any) -> Any:
        return prep(view)

    assert registry.get("p").prep is mine
    assert mine.__name__ == "mine"
    assert registry.register(contract("q"))(prep) is prep


def test_a_registration_holds_everything() -> None:
    registry, declared = Registry(), contract()

    def plan(batch: Any, bucket: Any) -> dict[str, Any]:
        return {}

    def publish(metadata: Any) -> None:
        return None

    registry.register(declared, plan=plan, publish=publish)(prep)
    found = registry.get("p")
    assert (found.name, found.prep, found.contract, found.plan, found.publish) == ("p", prep, declared, plan, publish)
    assert "p" in registry
    assert "q" not in registry
    assert list(registry) == ["p"]


def test_a_callable_is_found_with_its_contract_or_declares_nothing() -> None:
    registry = Registry()
    registry.register(contract("p"))(prep)
    assert registry.find(prep).contract == contract("p")

    class Backend:
        def __call__(self, view: Any) -> Any:
            return prep(view)

    for other, name in ((lambda view: prep(view), "<lambda>"), (Backend(), "Backend")):
        found = registry.find(other)
        assert (found.name, found.contract, found.prep) == (name, None, other)


def test_a_name_is_registered_once() -> None:
    registry = Registry()
    registry.register(contract())(prep)

    def other(view: Any) -> Any:
        return view

    said = r"prep 'p' is registered already, as <function prep.*choose another contract.name, or use another Registry"
    with pytest.raises(ContractError, match=said):
        registry.register(contract())(other)
    assert registry.get("p").prep is prep


def test_registries_share_nothing() -> None:
    one, other = Registry(), Registry()
    one.register(contract())(prep)
    assert "p" not in other
    other.register(contract())(prep)


@pytest.mark.parametrize(
    ("register", "said"),
    [
        (lambda r: r.register(None), r"register\(NoneType\): expected a PrepContract, as in @registry.register"),
        (lambda r: r.register(prep), r"register\(function\): expected a PrepContract"),
        (lambda r: r.register(contract())(5), "prep 'p' is a int; expected a callable of a view"),
        (lambda r: r.register(contract(), plan={})(prep), "prep 'p': plan is a dict; expected a callable"),
        (lambda r: r.register(contract(), publish=1)(prep), "prep 'p': publish is a int; expected a callable"),
        (lambda r: r.register(contract(""))(prep), "the contract has no name; a registered prep is found by contract"),
    ],
)
def test_what_can_not_be_registered_is_refused(register: Callable[[Registry], Any], said: str) -> None:
    registry = Registry()
    with pytest.raises(ContractError, match=said):
        register(registry)
    assert list(registry) == []


def test_an_unknown_name_says_what_there_is() -> None:
    registry = Registry()
    registry.register(contract())(prep)
    with pytest.raises(
        ContractError, match=r"prep 'q' is unknown; registered are \['p'\], installed plug-ins are \[.*\]: register it"
    ):
        registry.get("q")


# Plug-ins: a distribution of three modules' worth of entry points, built here and put on sys.path.

PLUG_INS = {
    "good": "ggtest_good:register",
    "second": "ggtest_good:register_second",
    "absent": "ggtest_absent:register",
    "raises_on_import": "ggtest_raises:register",
    "no_attribute": "ggtest_good:nothing_of_that_name",
    "raises": "ggtest_bad:raises",
    "other_name": "ggtest_bad:other_name",
    "wrong_signature": "ggtest_bad:wrong_signature",
    "no_callable": "ggtest_bad:NUMBER",
}
MODULES = {
    "ggtest_good": """
        LOADED = []
        from graphglue import Mode, PrepContract

        def prep(view):
            return {"m": view.x * 5}

        def register(registry):
            LOADED.append("good")
            registry.register(PrepContract(name="good", reads={"x": 0}, modes={Mode.DECODE}))(prep)

        def register_second(registry):
            LOADED.append("second")
            registry.register(PrepContract(name="second", modes={Mode.DECODE}))(prep)
        """,
    "ggtest_raises": "raise ImportError('libflash.so is missing')",
    "ggtest_bad": """
        from graphglue import Mode, PrepContract
        NUMBER = 5

        def raises(registry):
            registry.register(PrepContract(name="half", modes={Mode.DECODE}))(lambda view: view)
            raise ValueError("no kernel for this GPU")

        def other_name(registry):
            registry.register(PrepContract(name="elsewhere", modes={Mode.DECODE}))(lambda view: view)

        def wrong_signature():
            pass
        """,
}


@pytest.fixture
def plug_ins(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Install a distribution with good and broken plug-ins for one test."""
    info = tmp_path / "ggtest_plug_ins-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: ggtest-plug-ins\nVersion: 1.0\n")
    points = "\n".join(f"{name} = {value}" for name, value in PLUG_INS.items())
    (info / "entry_points.txt").write_text(f"[graphglue.preps]\n{points}\n")
    for name, text in MODULES.items():
        (tmp_path / f"{name}.py").write_text(textwrap.dedent(text))
    monkeypatch.syspath_prepend(str(tmp_path))
    yield
    for name in MODULES:
        sys.modules.pop(name, None)


@pytest.mark.usefixtures("plug_ins")
def test_a_plug_in_loads_on_demand_and_once() -> None:
    registry = Registry()
    assert "ggtest_good" not in sys.modules
    assert "good" not in registry
    found = registry.get("good")
    assert found.contract is not None
    assert found.contract.name == "good"
    assert registry.get("good") is found
    assert sys.modules["ggtest_good"].LOADED == ["good"]
    assert list(registry) == ["good"]


@pytest.mark.usefixtures("plug_ins")
def test_a_registered_prep_goes_before_a_plug_in_of_its_name() -> None:
    registry = Registry()
    registry.register(contract("good"))(prep)
    assert registry.get("good").prep is prep
    assert "ggtest_good" not in sys.modules


BROKEN = {
    "absent": "ModuleNotFoundError: No module named 'ggtest_absent'",
    "raises_on_import": "ImportError: libflash.so is missing",
    "no_attribute": "AttributeError: .*nothing_of_that_name",
    "raises": "ValueError: no kernel for this GPU",
    "other_name": r"it registered \['elsewhere'\]",
    "wrong_signature": "TypeError: .*wrong_signature",
    "no_callable": "TypeError: 'int' object is not callable",
}


@pytest.mark.usefixtures("plug_ins")
@pytest.mark.parametrize("name", BROKEN)
def test_a_broken_plug_in_is_named_and_contained(name: str) -> None:
    registry = Registry()
    registry.register(contract("mine"))(prep)
    said = rf"prep '{name}': its plug-in '{PLUG_INS[name]}' of 'ggtest-plug-ins' is broken: .*{BROKEN[name]}.*; fix or"
    for _ in range(2):  # it stays broken, and does not become half registered
        with pytest.raises(ContractError, match=said):
            registry.get(name)
        assert list(registry) == ["mine"]
    assert registry.get("good").name == "good"
    assert registry.get("second").name == "second"


@pytest.mark.usefixtures("plug_ins")
def test_an_unknown_name_lists_the_installed_plug_ins_without_loading_them() -> None:
    with pytest.raises(ContractError, match=r"installed plug-ins are \[.*'good'.*'second'.*\]"):
        Registry().get("nobody")
    assert not {"ggtest_good", "ggtest_bad"} & set(sys.modules)


@pytest.mark.usefixtures("plug_ins")
def test_a_runner_takes_a_plug_in_by_name_and_is_not_hurt_by_a_broken_one() -> None:
    slots = [Slot("x", axis="request", dtype=torch.int64, pad=0)]
    with pytest.raises(ContractError, match="plug-in 'ggtest_raises:register'"):
        Runner(slots=slots, ladder=[2], prep="raises_on_import")
    with Runner(slots=slots, ladder=[2], prep="good") as runner:
        runner.capture()
        step = runner.replay(Batch(1, {"x": [3]}))
    assert step.metadata["m"].tolist() == [15, 0]


def test_the_shipped_preps_are_there_without_a_registry() -> None:
    from graphglue.preps import paged_decode, register_shipped

    registry = Registry()
    register_shipped(registry)
    assert registry.get("paged-decode").contract == paged_decode.CONTRACT
    runner = Runner(
        slots=paged_decode.slots(),
        ladder=[2],
        prep="paged-decode",
        tables={"req_to_token": torch.zeros(4, 16, dtype=torch.int64)},
    )
    runner.capture()
    step = runner.replay(Batch(1, {"seq_lens": [3], "req_pool_indices": [1], "out_cache_loc": [7]}))
    assert step.metadata["positions"].tolist() == [2, 0]
