"""What broke when engines were written from the migration guide alone, each break as a kind.

Objects of several classes behind one backend, steps that leave nothing to install, metadata that is reshaped where it
is installed, single rows with odd strides, and tables that shrink below what a capture reads.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import graphglue as gg
from graphglue import (
    Batch,
    CaptureHooks,
    ContractError,
    Mode,
    PrepContract,
    Reason,
    Registry,
    Route,
    Runner,
    RunnerConfig,
    Slot,
)
from graphglue.core.differences import bytes_of
from graphglue.errors import RankDisagreementError
from graphglue.flight.sources import digests
from graphglue.ranks import Planner

from ..ranks.threads import Exchange, Meeting, Model, all_well, batch_of, group_of, own_of, runner_of, together

sys.path.insert(0, str(Path(__file__).parents[2] / "examples"))
from adapters import sglang_style
from adapters.objects import Objects

LADDER = [1, 2, 4]


def slots() -> list[Slot]:
    return [Slot("lens", "request", torch.int64, pad=1), Slot("ids", "token", torch.int64, pad=0)]


def make(prep: Callable[[Any], Any], publish: Any = None, forward: Any = None, **more: Any) -> Runner:
    """Build a runner of one prep that reads the lengths."""
    registry = Registry()
    contract = {"reads": {"lens": 1}, "modes": {Mode.DECODE}, "outputs": {"x": "request"}, **more.pop("contract", {})}
    registry.register(PrepContract(name="p", **contract), publish=publish)(prep)
    return Runner(
        slots=more.pop("slots", slots()), ladder=more.pop("ladder", LADDER), registry=registry, prep="p",
        forward=forward, **more,
    )  # fmt: skip


def batch(requests: int, **more: Any) -> Batch:
    return Batch(requests, {"lens": [5 + row for row in range(requests)], "ids": [3] * requests}, **more)


# One backend, several classes of metadata.


@dataclass
class Inner:
    ends: torch.Tensor


@dataclass(frozen=True)
class DecodeMetadata:
    x: torch.Tensor
    size: int


@dataclass
class PrefillMetadata:
    x: torch.Tensor
    inner: Inner
    size: int = 0

    def __post_init__(self) -> None:
        self.size += 1  # run twice, it would say two


class Backend:
    forward_metadata: Any = None

    def init_forward_metadata_out_graph(self, forward_batch: Any) -> None:
        lens = forward_batch.seq_lens
        decodes = forward_batch.forward_mode == "decode"
        self.forward_metadata = (
            DecodeMetadata(lens * 2, 7) if decodes else PrefillMetadata(lens * 3, Inner(lens.cumsum(0)))
        )


def test_each_step_is_installed_as_the_class_that_its_own_prep_made() -> None:
    backend, registry = Backend(), Registry()
    adapter = sglang_style.BackendAdapter(backend, renamed={"seq_lens": "lens"})
    outputs = {Mode.DECODE: {"x": "request"}, Mode.EXTEND: {"x": "request", "inner.ends": "request"}}
    names = [
        adapter.register(
            registry, PrepContract(name=mode.value, reads={"lens": 1}, outputs=outputs[mode], modes={mode})
        )
        for mode in outputs
    ]
    decode = Runner(slots=slots(), ladder=LADDER, registry=registry, prep=names[0])
    prefill = Runner(
        slots=slots(), ladder=[4, 8], registry=registry, prep=names[1], config=RunnerConfig(max_requests=2)
    )
    for runner in (decode, prefill):
        runner.capture(progress=False)
    for count in (3, 1, 6):  # the last is beyond the decode ladder
        if count <= LADDER[-1]:
            decode.prepare(batch(count))
            installed = backend.forward_metadata
            assert type(installed) is DecodeMetadata
            assert installed.x[:count].tolist() == [2 * (5 + row) for row in range(count)]
        prefill.prepare(Batch(1, {"lens": [count], "ids": [3] * count}, Mode.EXTEND, num_tokens=count))
        installed = backend.forward_metadata
        assert type(installed) is PrefillMetadata
        assert (installed.size, installed.x.tolist()[0], type(installed.inner)) == (1, 3 * count, Inner)


def test_objects_come_apart_and_together() -> None:
    objects, one = Objects(), torch.ones(2)
    made = PrefillMetadata(one, Inner(one * 2), 4)
    again = objects.together(objects.apart(made))
    assert (type(again), type(again.inner), again.size) == (PrefillMetadata, Inner, 5)
    assert again is not made
    assert again.inner is not made.inner
    assert (again.x is made.x, again.inner.ends is made.inner.ends) == (True, True)
    for other in ((1, 2), {"x": one}, None, DecodeMetadata):
        assert objects.together(objects.apart(other)) is other


# A step that skips its metadata where there is none to go on with.


@gg.eager_break(row_aligned=("rows",))
def attend(rows: torch.Tensor, lens: torch.Tensor) -> torch.Tensor:
    return rows + 1


def skipping(publish: Any, forward: Any) -> Runner:
    return make(
        lambda view: {"x": view.lens * 2}, publish, forward, contract={"modes": {Mode.EXTEND}, "idle": "skip"},
        ladder=[4, 8], config=RunnerConfig(max_requests=2),
    )  # fmt: skip


def test_an_eager_forward_of_an_idle_step_has_metadata_though_nothing_was_captured() -> None:
    installed: list[Any] = []
    runner = skipping(installed.append, lambda view, metadata: attend(view.ids, metadata["x"]))
    idle = Batch.idle(mode=Mode.EXTEND)
    step = runner.replay(idle)
    assert (step.decision.prep, step.decision.reason) == (Route.EAGER, Reason.NOT_CAPTURED)
    assert runner.can_replay(idle).prep is Route.EAGER
    assert [one["x"].tolist() for one in installed] == [[2, 2]]
    runner.capture(progress=False)
    step = runner.replay(idle)
    assert (step.decision.prep, step.decision.forward) == (Route.SKIP, Route.GRAPH)
    runner._forward.quarantine(step.decision.key, "a test")  # type: ignore[union-attr]
    runner._stepper.forget()
    step = runner.replay(idle)  # eager, over what the key holds
    assert (step.decision.prep, step.decision.forward) == (Route.SKIP, Route.EAGER)


def test_nothing_is_published_where_an_idle_step_made_nothing() -> None:
    installed: list[Any] = []
    runner = skipping(installed.append, None)
    prepared = runner.prepare(Batch.idle(mode=Mode.EXTEND))
    assert (prepared.decision.prep, prepared.metadata, installed) == (Route.SKIP, None, [])


# What is installed is its holder's to reshape.


def test_an_installed_tensor_may_be_reshaped_in_place_on_every_route() -> None:
    def publish(metadata: Any) -> None:
        metadata["x"].unsqueeze_(0)  # as a layer does that wants another rank

    runner = make(
        lambda view: {"x": view.lens * 2}, publish, lambda view, metadata: metadata["x"] + view.ids,
        config=RunnerConfig(staging=True, shadow=gg.Shadow(first=1, every=4)),
    )  # fmt: skip
    runner.capture(progress=False)
    for _ in range(2):
        for count, more in ((3, {}), (4, {}), (6, {}), (2, {"features": frozenset({"lora"})}), (1, {})):
            if count == 4:
                assert runner.stage(batch(count))
            step = runner.replay(batch(count, **more))
            assert step.metadata["x"].shape == (step.decision.bucket.requests,)
            assert step.outputs.tolist() == [2 * (5 + row) + 3 for row in range(count)]
    assert runner.stats()["shadow"]["mismatched"] == 0


def test_an_eager_step_s_metadata_is_not_the_key_s_own_tensors() -> None:
    runner = make(lambda view: {"x": view.lens * 2}, forward=lambda view, metadata: metadata["x"] + 0)
    runner.capture(progress=False)
    eagerly = frozenset({"lora"})
    runner.replay(batch(3, features=eagerly)).metadata["x"].unsqueeze_(0)
    step = runner.replay(batch(3, features=eagerly))
    assert (step.metadata["x"].shape, step.decision.forward) == ((4,), Route.GRAPH)


# One row of a column: contiguous by name, and its stride is not 1.


def column(values: torch.Tensor) -> torch.Tensor:
    return torch.stack([values, values * 2], dim=1)[:, 0]


@pytest.mark.parametrize("recapture", [False, True])
def test_a_single_row_with_a_stride_wakes(recapture: bool) -> None:
    runner = make(
        lambda view: {"x": column(view.lens)}, forward=lambda view, metadata: column(metadata["x"]),
        config=RunnerConfig(flight_recorder=4),
    )  # fmt: skip
    runner.capture(progress=False)
    metadata = runner.replay(batch(1)).metadata
    assert metadata["x"].stride() != (1,)  # else this shows nothing
    runner.release()
    assert len(runner.resume(contents_lost=recapture)) == len(LADDER)
    for count in (1, 2, 3):
        step = runner.replay(batch(count))
        assert (step.decision.prep, step.outputs.tolist()) == (Route.GLUE, [5 + row for row in range(count)])
    assert digests(metadata, None)


def _array(strided: bool) -> np.ndarray:
    return np.array([5, 77])[::2] if strided else np.array([5])


@pytest.mark.parametrize("kind", [lambda strided: _array(strided), lambda strided: torch.from_numpy(_array(strided))])
def test_a_single_row_with_a_stride_is_staged(kind: Callable[[bool], Any]) -> None:
    runner = make(
        lambda view: {"x": view.lens * 2}, forward=lambda view, metadata: metadata["x"] + 0,
        config=RunnerConfig(staging=True),
    )  # fmt: skip
    runner.capture(progress=False)
    assert runner.stage(Batch(1, {"lens": kind(True), "ids": kind(True)}))
    step = runner.replay(Batch(1, {"lens": kind(False), "ids": kind(False)}))  # the same bytes
    assert (step.decision.reason, step.outputs.tolist()) == (Reason.STAGED, [10])


@pytest.mark.parametrize("dtype", [torch.int64, torch.bfloat16, torch.bool, torch.complex64])
def test_bytes_are_those_of_the_elements(dtype: torch.dtype) -> None:
    rows = torch.tensor([[1, 0], [0, 1], [1, 1]]).to(dtype)
    for tensor in (rows, rows[:, 1], rows[1:2, 1], rows[1, 1], rows[:0]):
        plain = torch.empty(tensor.numel(), dtype=dtype)
        plain.copy_(tensor.flatten())
        assert bytes_of(tensor).tolist() == plain.view(torch.uint8).tolist()
    assert not torch.equal(bytes_of(torch.tensor(0.0)), bytes_of(torch.tensor(-0.0)))


# Waking up.


def test_a_prep_that_raises_while_it_is_checked_is_quarantined_and_the_runner_wakes() -> None:
    calls = [0, 0]  # in all, and the last that is well: each key warms up twice and is recorded

    def prep(view: Any) -> Any:
        calls[0] += 1
        if calls[0] > calls[1]:
            raise OSError("a file is gone")
        return {"x": view.lens * 2}

    runner = make(prep, forward=lambda view, metadata: metadata["x"] + 0)
    calls[1] = 100
    runner.capture(progress=False)
    num_calls = calls[0]
    runner.release()
    calls[:] = [0, num_calls]
    assert runner.resume() == []
    assert not runner.asleep
    calls[1] = 1000
    step = runner.replay(batch(3))
    assert (step.decision.reason, step.outputs.tolist()) == (Reason.QUARANTINED, [10, 12, 14])
    assert len(runner.maintain()) == len(LADDER)


@pytest.mark.parametrize("failing_rank", [0, 1])
def test_ranks_sleep_on_where_a_session_of_one_fails_at_its_end(failing_rank: int) -> None:
    fails, exchange, meeting = [False], Exchange(2), Meeting(2)

    @contextmanager
    def session_of(rank: int) -> Iterator[None]:
        yield
        if fails[0] and rank == failing_rank:
            raise OSError("a peer's handle is gone")

    def build(rank: int) -> Runner:
        group = group_of(exchange, rank, Planner(LADDER))
        runner = runner_of(group, Model(meeting, rank))
        runner._capture._hooks = CaptureHooks(session=lambda: session_of(rank))
        return runner

    runners = all_well(together(2, build))
    all_well(together(2, lambda rank: runners[rank].capture(progress=False)))
    all_well(together(2, lambda rank: runners[rank].release()))
    fails[0] = True
    raised = together(2, lambda rank: runners[rank].resume())
    assert [type(raised[failing_rank]), type(raised[1 - failing_rank])] == [OSError, RankDisagreementError]
    assert all(runner.asleep for runner in runners)
    fails[0] = False
    assert [len(keys) for keys in together(2, lambda rank: runners[rank].resume())] == [3, 3]
    steps = all_well(together(2, lambda rank: runners[rank].replay(batch_of(1 + rank))))
    for rank, step in enumerate(steps):
        assert (step.decision.forward, step.outputs["own"].tolist()) == (Route.GRAPH, own_of(1 + rank))


# A table that shrinks below what a capture reads: refused before anything indexes beyond it.


@pytest.mark.parametrize("asleep", [False, True])
def test_a_table_without_the_rows_of_the_capture_values_is_refused(asleep: bool) -> None:
    def indexed(row: int) -> int:
        return row + 2

    def build(table: torch.Tensor) -> Runner:
        rows = Slot("lens", "request", torch.int64, pad=1, index_of="t", capture=indexed)
        return make(
            lambda view: {"x": view.tables.t[view.lens]}, slots=[rows, slots()[1]], tables={"t": table},
            contract={"tables": ("t",)},
        )  # fmt: skip

    small, text = torch.zeros(4, dtype=torch.int64), r"slot 'lens': capture\(2\) 4 is no row of table 't', which has 4"
    with pytest.raises(ContractError, match=text):
        build(small)
    runner = build(torch.arange(9) * 10)
    runner.capture(progress=False)
    if not asleep:
        with pytest.raises(ContractError, match=text):
            runner.rebind_table("t", small)
    else:
        runner.release()
        runner.rebind_table("t", small)
        with pytest.raises(ContractError, match=text):
            runner.resume()
        assert runner.asleep
        runner.rebind_table("t", torch.arange(9) * 10)
        assert len(runner.resume()) == len(LADDER)
    assert runner.prepare(batch(3)).metadata["x"][:3].tolist() == [50, 60, 70]
