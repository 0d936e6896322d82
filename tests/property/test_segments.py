"""Any split of a random program into segments and breaks replays what the program computes eagerly, bit for bit."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from graphglue.graphs.base import Recorder
from graphglue.graphs.segments import record_segments
from graphglue.graphs.tape import Tape

from ..unit.graphs.recorder_contract import same
from .segment_programs import OPERATIONS, ROWS, WIDTH, Step, broken, marked, reference, run, steps

pytestmark = pytest.mark.usefixtures("frozen_imports")


def fresh(seed: int, dtype: torch.dtype, device: torch.device) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    drawn = torch.randint(-9, 9, (3, ROWS, WIDTH), generator=generator).to(dtype) / (1 if dtype is torch.int64 else 4)
    return [part.to(dtype).to(device) for part in drawn]


def check(recorder: Recorder, program: list[Step], dtype: torch.dtype, replays: list[tuple[int, int]]) -> None:
    """Record once; compare each replay, and what it did to persistent memory, with the reference."""
    inputs = fresh(0, dtype, recorder.device)
    recording = record_segments(recorder, lambda: run(program, inputs, marked, ROWS))
    assert len(recording.breaks) == sum(map(broken, program))
    for seed, real_rows in replays:
        contents = fresh(seed, dtype, recorder.device)
        for target, source in zip(inputs, contents):
            target.copy_(source)
        expected = run(program, contents, reference, real_rows)
        recording.replay(real_rows=real_rows)
        assert same(recording.outputs, expected)
        assert same(inputs, contents)
    recording.close()


REPLAYS = st.lists(st.tuples(st.integers(1, 99), st.integers(0, ROWS)), min_size=2, max_size=4)


@given(program=steps(), dtype=st.sampled_from([torch.int64, torch.float32]), replays=REPLAYS)
def test_segmented_replay_equals_eager(program: list[Step], dtype: torch.dtype, replays: list[tuple[int, int]]) -> None:
    check(Tape(), program, dtype, replays)


@given(program=steps(), splits=st.lists(st.booleans(), min_size=12, max_size=12), seed=st.integers(1, 99))
def test_two_splits_of_one_program_agree(program: list[Step], splits: list[bool], seed: int) -> None:
    program = [replace(step, is_aligned=False) for step in program]
    other = [replace(step, is_break=split) for step, split in zip(program, splits)]
    results = []
    for split in (program, other):
        inputs = fresh(0, torch.float32, torch.device("cpu"))
        recording = record_segments(Tape(), lambda split=split, inputs=inputs: run(split, inputs, marked, ROWS))
        for target, source in zip(inputs, fresh(seed, torch.float32, torch.device("cpu"))):
            target.copy_(source)
        recording.replay()
        results.append((recording.outputs, inputs))
    assert same(*results)


@pytest.mark.parametrize("name", sorted(OPERATIONS))
def test_every_operation_is_held_as_a_break(name: str) -> None:
    """Hold each alone, so that none hides behind what hypothesis happens to draw."""
    for aligned in (False, True):
        step = Step(name, 0, 1, True, aligned)
        after = Step("add", 2, 3, False, False)
        check(Tape(), [step, after, step], torch.float32, [(1, ROWS), (2, 2), (3, 0), (4, 1)])


def test_the_comparison_can_fail() -> None:
    """A break that is cut to other rows than the reference's, and one that forgets the pad."""
    inputs = fresh(0, torch.float32, torch.device("cpu"))
    program = [Step("scan", 0, 1, True, True)]
    recording = record_segments(Tape(), lambda: run(program, inputs, marked, ROWS))
    contents = [tensor.clone() for tensor in inputs]
    recording.replay(real_rows=3)
    assert not same(recording.outputs["values"], run(program, contents, reference, 2)["values"])
    unpadded = run([replace(program[0], is_aligned=False)], contents, reference, 3)
    assert not same(recording.outputs["values"], unpadded["values"])
