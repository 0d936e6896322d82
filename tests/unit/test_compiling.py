"""Compiled preps: the same integers, one compilation for each key, and a plain fallback that says why."""

from __future__ import annotations

import logging
import shutil
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

import graphglue as gg
from graphglue.bench.workload import Workload
from graphglue.bench.workload import prep as bench_prep
from graphglue.compiling import CompiledPrep, compiled
from graphglue.core.view import View

CONTRACT = gg.PrepContract(name="paged", modes={gg.Mode.DECODE}, compile=True, tables=("table",))


@pytest.fixture(autouse=True)
def _fresh_compiler() -> None:
    torch._dynamo.reset()


def view_of(size: int, table: torch.Tensor | None = None) -> View:
    table = torch.arange(100, 200) if table is None else table
    slots = {"rows": torch.arange(size) % 7, "weights": torch.linspace(0, 1, size)}
    return View(slots, {"table": table}, gg.Bucket(size, size, 1), gg.Mode.DECODE, None, "prep 'paged'")


def paged(view: Any) -> dict[str, torch.Tensor]:
    pages = view.tables.table[view.rows]
    return {"pages": pages + view.bucket.tokens, "starts": view.rows.cumsum(0), "scaled": view.weights * 2.5}


class Counting:
    """A backend that compiles nothing and counts how often it was asked."""

    def __init__(self) -> None:
        self.num_graphs = 0

    def __call__(self, module: torch.fx.GraphModule, examples: Any) -> Callable[..., Any]:
        self.num_graphs += 1
        return module.forward


def compiled_by(backend: Any, prep: Callable[..., Any] = paged, contract: gg.PrepContract = CONTRACT) -> CompiledPrep:
    run, reason = compiled(prep, contract, backend)
    assert reason is None
    assert isinstance(run, CompiledPrep)
    return run


def same(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> bool:
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


@pytest.mark.parametrize("contract", [None, gg.PrepContract(modes={gg.Mode.DECODE})])
def test_a_prep_that_does_not_ask_is_given_back(contract: gg.PrepContract | None) -> None:
    assert compiled(paged, contract) == (paged, None)


def test_an_unsupported_platform_is_said_at_once(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(torch._dynamo, "is_dynamo_supported", lambda: False)
    with caplog.at_level(logging.WARNING, "graphglue"):
        run, reason = compiled(paged, CONTRACT)
    assert run is paged
    assert reason == "torch.compile is not supported on this platform and Python version"
    assert "'paged'" in caplog.text


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_results_equal_the_plain_prep_s(backend: str) -> None:
    run = compiled_by(backend)
    with torch.no_grad():
        for size in (4, 1, 4, 16):
            assert same(run(view_of(size)), paged(view_of(size)))
    assert run.fallback is None


@pytest.mark.skipif(not (shutil.which("g++") or shutil.which("clang++")), reason="inductor needs a C++ compiler")
def test_inductor_keeps_integers_bit_for_bit() -> None:
    run = compiled_by("inductor")
    workload = Workload(torch.device("cpu"))
    with torch.no_grad():
        assert same(run(view_of(5)), paged(view_of(5)))
        both = compiled_by("inductor", bench_prep)
        view = workload.padded(workload.values(3, seed=0), 4)
        assert same(both(view), bench_prep(view))
    assert run.fallback is None
    assert both.fallback is None


def test_every_key_compiles_once_and_a_long_ladder_meets_no_limit() -> None:
    backend = Counting()
    run = compiled_by(backend)
    with torch.no_grad():
        for _ in range(2):
            for size in range(1, 21):
                assert same(run(view_of(size)), paged(view_of(size)))
    assert run.fallback is None
    assert backend.num_graphs == 20


def test_other_tensors_of_a_key_are_seen() -> None:
    run = compiled_by("eager")
    with torch.no_grad():
        run(view_of(4))
        other = torch.arange(500, 600)
        assert same(run(view_of(4, other)), paged(view_of(4, other)))


def fails_to_compile(view: Any) -> dict[str, torch.Tensor]:
    torch._dynamo.graph_break()
    return {"rows": view.rows + 1}


def test_a_prep_that_does_not_compile_runs_as_it_is_and_says_so_once(caplog: pytest.LogCaptureFixture) -> None:
    run = compiled_by("eager", fails_to_compile)
    with caplog.at_level(logging.WARNING, "graphglue"), torch.no_grad():
        for size in (4, 8):
            assert same(run(view_of(size)), fails_to_compile(view_of(size)))
    assert run.fallback is not None
    assert run.fallback.startswith("it does not compile: ")
    assert len([record for record in caplog.records if record.name == "graphglue"]) == 1


def test_a_compiler_that_raises_is_named() -> None:
    def broken(module: Any, examples: Any) -> Any:
        raise RuntimeError("no such back end")

    run = compiled_by(broken)
    with torch.no_grad():
        assert same(run(view_of(4)), paged(view_of(4)))
    assert run.fallback is not None
    assert "no such back end" in run.fallback


@pytest.mark.parametrize("shift", [1, 0.5])
def test_a_compiler_that_changes_the_result_is_found_out(shift: float) -> None:
    def wrong(module: torch.fx.GraphModule, examples: Any) -> Callable[..., Any]:
        return lambda *args: tuple(leaf if leaf.is_floating_point() else leaf + shift for leaf in module.forward(*args))

    run = compiled_by(wrong)
    with torch.no_grad():
        assert same(run(view_of(4)), paged(view_of(4)))
    assert run.fallback is not None
    assert run.fallback.startswith("compiled, it returns something else: ")


def test_floats_may_round_differently() -> None:
    def rounding(module: torch.fx.GraphModule, examples: Any) -> Callable[..., Any]:
        return lambda *args: tuple(
            leaf * (1 + 1e-6) if leaf.is_floating_point() else leaf for leaf in module.forward(*args)
        )

    run = compiled_by(rounding)
    with torch.no_grad():
        run(view_of(4))
    assert run.fallback is None


def test_the_prep_s_own_error_surfaces() -> None:
    def undeclared(view: Any) -> Any:
        return view.nothing

    run = compiled_by("eager", undeclared)
    with pytest.raises(gg.ContractError, match="'nothing', which it did not declare"):
        run(view_of(4))


def test_a_prep_with_effects_is_run_once() -> None:
    table = torch.zeros(8, dtype=torch.int64)

    def counts(view: Any) -> dict[str, torch.Tensor]:
        view.tables.table.add_(1)
        return {"rows": view.rows + 1}

    contract = gg.PrepContract(
        name="counts", modes={gg.Mode.DECODE}, compile=True, tables=("table",), effects=("table",)
    )
    run = compiled_by("eager", counts, contract)
    with torch.no_grad():
        run(view_of(4, table))
    assert table.tolist() == [1] * 8
    assert run.fallback is None


def test_in_place_results_are_compared_with_what_the_plain_prep_wrote() -> None:
    kept = torch.zeros(4, dtype=torch.int64)

    def fills(view: Any) -> torch.Tensor:
        return kept.copy_(view.rows * 3)

    def wrong(module: torch.fx.GraphModule, examples: Any) -> Callable[..., Any]:
        def run(*args: Any) -> Any:
            result = module.forward(*args)
            kept.add_(1)
            return result

        return run

    run = compiled_by(wrong, fills)
    with torch.no_grad():
        assert run(view_of(4)).tolist() == [0, 3, 6, 9]
    assert run.fallback is not None


class Mode(TorchDispatchMode):
    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*args, **(kwargs or {}))


def test_under_a_dispatch_mode_the_plain_prep_is_called() -> None:
    backend = Counting()
    run = compiled_by(backend)
    with torch.no_grad(), Mode():
        assert same(run(view_of(4)), paged(view_of(4)))
    assert backend.num_graphs == 0
    assert run.fallback is None


def test_the_tape_records_it() -> None:
    run = compiled_by("eager")
    view, cache = view_of(4), gg.GlueGraphCache(run, device="cpu")
    cache.capture({4: view})
    view.rows.add_(1)
    assert same(cache.replay(4), paged(view))
    assert run.fallback is None
