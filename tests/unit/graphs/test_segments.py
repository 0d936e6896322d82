"""Segmented recordings on the CPU tape, and how a fill leads one."""

from __future__ import annotations

import pytest
import torch

from graphglue.device.base import open_device
from graphglue.graphs.segments import eager_break, record_segments
from graphglue.graphs.tape import Tape

from .recorder_contract import inputs_on, same
from .segments_contract import *  # noqa: F403
from .segments_contract import doubled


@pytest.fixture(scope="module")
def recorder() -> Tape:
    return Tape()


class _Fill:
    """Stands for a fill: writes one number when it runs."""

    def __init__(self, target: torch.Tensor) -> None:
        self.target, self.value = target, 0

    def run(self) -> None:
        self.target.fill_(self.value)


@pytest.mark.parametrize("empty", [False, True])
def test_a_fill_and_a_prep_lead_the_first_segment_in_one_launch(recorder: Tape, empty: bool) -> None:
    slot, device = torch.zeros(3), open_device("cpu")
    prep = recorder.record(lambda: slot + 1)
    prep.replay()
    recording = record_segments(recorder, lambda: doubled(prep.outputs if empty else prep.outputs * 5) + 1)
    fill = _Fill(slot)
    launch = device.compose(fill, [prep], recording.first, None, None)
    for fill.value in (3, 4):
        recording.replay(lead=launch.run)
        assert same(recording.outputs, torch.full((3,), (fill.value + 1.0) * (1 if empty else 5) * 2 + 1))


def test_memory_is_counted_per_segment(recorder: Tape) -> None:
    ints, *_ = inputs_on(recorder.device)
    recording = record_segments(recorder, lambda: doubled(ints + 1) + 1)
    assert recording.segment_bytes == (64, 64 + 64)  # the second with the bridge in front of it
    assert recording.num_bytes == sum(recording.segment_bytes)


def test_what_segments_write_and_read_is_known(recorder: Tape) -> None:
    ints, *_ = inputs_on(recorder.device)
    other = torch.zeros_like(ints)
    recording = record_segments(recorder, lambda: doubled(ints + 1) + 1)
    assert recording.computes(recording.outputs) is True
    assert recording.computes(other) is None
    assert ints.untyped_storage().data_ptr() in recording.reads
    assert other.untyped_storage().data_ptr() not in recording.reads


def test_a_compiled_callable_breaks_its_graph_at_a_mark() -> None:
    assert getattr(eager_break(lambda x: x), "_torchdynamo_disable", False) is True
