"""The benchmark's step is what it says: 40 small operations, row-wise, the same on every route."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from graphglue.bench.baselines import CompiledStep, arenas, compiled
from graphglue.bench.contenders import ONE_DEVICE, Contender, Recorded, Sources, differences, of_runner
from graphglue.bench.separate import OneByOne
from graphglue.bench.workload import NUM_PREP_OPS, PADS, Workload, prep

CPU = torch.device("cpu")


class Counting(TorchDispatchMode):
    """Count the operations that launch something."""

    def __init__(self) -> None:
        super().__init__()
        self.num_ops = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.num_ops += not func.is_view
        return func(*args, **(kwargs or {}))


@pytest.fixture(scope="module")
def workload() -> Workload:
    return Workload(CPU)


@pytest.fixture(scope="module")
def sources(workload: Workload) -> Sources:
    return Sources.draw(workload, 3, 4)


def test_the_prep_has_as_many_operations_as_it_says(workload: Workload) -> None:
    view = workload.padded(workload.values(13, seed=0), 16)
    for into in (None, prep(view)):
        with Counting() as counting:
            prep(view, into)
        assert counting.num_ops == NUM_PREP_OPS


@pytest.mark.parametrize("mixed", [False, True])
def test_real_rows_do_not_depend_on_padding(mixed: bool) -> None:
    workload = Workload(CPU, mixed=mixed)
    values = workload.values(3, seed=1)
    exact, padded = prep(workload.padded(values, 3)), prep(workload.padded(values, 4))
    assert torch.equal(exact["page_table"], padded["page_table"][:3])
    assert torch.equal(exact["positions"], padded["positions"][:12])
    assert {value.dtype for value in values.values()} == ({torch.int32, torch.int64} if mixed else {torch.int64})


def test_the_prep_writes_where_it_is_told(workload: Workload) -> None:
    view = workload.padded(workload.values(2, seed=0), 2)
    into = {name: torch.zeros_like(value) for name, value in prep(view).items()}
    assert all(prep(view, into)[name] is tensor for name, tensor in into.items())
    assert all(torch.equal(into[name], value) for name, value in prep(view).items())


def test_further_slots_are_filled_and_read_by_nobody() -> None:
    workload = Workload(CPU, num_slots=9)
    assert [slot.name for slot in workload.slots()][len(PADS) :] == ["extra_00", "extra_01", "extra_02", "extra_03"]
    sources = Sources.draw(workload, 3, 4)
    with workload.runner([4]) as runner:
        runner.capture(progress=False)
        assert not differences(of_runner(ONE_DEVICE, runner, 3, sources.on_device), sources, lambda: None)


def test_a_wrong_contender_is_found_out(workload: Workload, sources: Sources) -> None:
    wrong = [{name: value + 1 for name, value in step.items()} for step in sources.expected]
    turn = iter(wrong)
    found = differences(Contender("wrong", lambda: next(turn), lambda result: result), sources, lambda: None)
    assert found == "WRONG: page_table of step 0 differs from the eager prep"


def test_recordings_replay_what_was_recorded(workload: Workload, sources: Sources) -> None:
    view = workload.padded(sources.tensors[0], 4)
    recorded = Recorded(workload, view)
    recorded.glue()()
    assert all(torch.equal(recorded.metadata[name], value) for name, value in sources.expected[0].items())
    recorded.floor()()
    assert torch.equal(recorded.forward.outputs, workload.forward(view, recorded.metadata))
    recorded.close()


@pytest.mark.parametrize("torch_fill", [True, False])
def test_one_by_one_launches_separately_and_says_so(workload: Workload, sources: Sources, torch_fill: bool) -> None:
    with workload.runner([4]) as runner:
        runner.arena.device = OneByOne(runner.arena.device, torch_fill)  # type: ignore[assignment]
        runner.capture(progress=False)
        assert not differences(of_runner("separate", runner, 3, sources.on_device), sources, lambda: None)
        assert runner.stats()["launch_fallbacks"] == {"the benchmark asks for it": len(sources.tensors)}


def test_arenas_fill_the_same_slots(workload: Workload, sources: Sources) -> None:
    for contender in arenas(workload, sources):
        assert not differences(contender, sources, lambda: None)


def test_the_compiled_step_computes_the_same(workload: Workload, sources: Sources) -> None:
    step = CompiledStep(workload)
    hidden, metadata = step(sources.on_device[0])
    assert torch.equal(metadata["page_table"], sources.expected[0]["page_table"][:3])
    view = workload.view_of(sources.on_device[0])
    assert torch.equal(hidden, workload.forward(view, prep(view)))


def test_the_compiled_row_says_why_it_does_not_run_here(workload: Workload, sources: Sources) -> None:
    contender = compiled(workload, sources)
    assert contender.step is None
    assert "needs a GPU" in contender.why_not


def test_a_gpu_s_size_is_that_of_the_issue() -> None:
    from graphglue.bench.workload import Size

    assert Size.of(torch.device("cuda")) == Size(40, 2048, torch.bfloat16)
