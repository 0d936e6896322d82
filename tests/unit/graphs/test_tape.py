"""The contract, kept by the CPU tape, and what only the tape does."""

from __future__ import annotations

import gc
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch.nn import functional

from graphglue.errors import CaptureError, DivergenceError, StaleTableError
from graphglue.graphs.tape import Tape
from tests.unit.graphs.recorder_contract import *  # noqa: F403
from tests.unit.graphs.recorder_contract import check_agreement, inputs_on, same

CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def recorder() -> Tape:
    return Tape()


@pytest.fixture(scope="module")
def library() -> Iterator[Any]:
    """Four custom operations: without a fake, with one, with a wrong one, and one that only writes."""
    library = torch.library.Library("graphglue_tape_test", "DEF")
    library.define("bare(Tensor x) -> Tensor")
    library.define("faked(Tensor x) -> Tensor")
    library.define("lying(Tensor x) -> Tensor")
    library.define("store(Tensor(a!) target, Tensor x) -> ()")
    library.impl("bare", lambda x: x + 1, "CPU")
    library.impl("faked", lambda x: x + 1, "CPU")
    library.impl("lying", lambda x: x[:1] + 1, "CPU")
    library.impl("store", _store, "CPU")
    for name in ("faked", "lying"):
        torch.library.register_fake(f"graphglue_tape_test::{name}", torch.empty_like, lib=library)
    torch.library.register_fake("graphglue_tape_test::store", lambda target, x: None, lib=library)
    yield torch.ops.graphglue_tape_test
    library._destroy()


def _store(target: torch.Tensor, x: torch.Tensor) -> None:
    target.copy_(x)


def test_an_address_is_refused(recorder: Tape) -> None:
    ints, *_ = inputs_on(CPU)
    with pytest.raises(CaptureError, match=r"data_ptr hands out an address.*instead, use torch operations"):
        recorder.record(lambda: ints.data_ptr())


def test_memory_not_computed_yet_shows(recorder: Tape) -> None:
    ints, floats, _ = inputs_on(CPU)
    counts, halves, flags = recorder.record(lambda: (ints + 1, floats.bfloat16(), ints > 3)).outputs
    assert bool((counts > 1 << 60).all())
    assert bool(halves.isnan().all())
    assert same(flags, torch.ones_like(flags))


def test_only_new_memory_counts(recorder: Tape) -> None:
    ints, _, table = inputs_on(CPU)
    assert recorder.record(lambda: (ints, table[1:].t(), ints.view(2, 4))).num_bytes == 0
    assert recorder.record(lambda: ints.add_(1)).num_bytes == 0
    assert recorder.record(lambda: (ints + 1, ints > 1)).num_bytes == 8 * 8 + 8


def test_an_operation_without_a_fake_is_refused_and_with_one_is_not(recorder: Tape, library: Any) -> None:
    ints, *_ = inputs_on(CPU)
    with pytest.raises(CaptureError, match=r"bare.* no fake implementation.*test_tape\.py:.*register_fake"):
        recorder.record(lambda: library.bare(ints))
    check_agreement(recorder, lambda ints, *_: library.faked(ints))


def test_a_fake_that_lies_shows_at_replay(recorder: Tape, library: Any) -> None:
    ints, *_ = inputs_on(CPU)
    recording = recorder.record(lambda: library.lying(ints))
    with pytest.raises(DivergenceError, match=r"lying.* gave torch.int64 \(1,\).* torch.int64 \(8,\)"):
        recording.replay()


def test_a_custom_operation_that_only_writes_is_replayed(recorder: Tape, library: Any) -> None:
    def program(ints: torch.Tensor, floats: torch.Tensor, table: torch.Tensor) -> torch.Tensor:
        library.store(table[1], ints * 2)
        return table[1] + 1

    check_agreement(recorder, program)


def test_memory_that_moved_is_noticed(recorder: Tape) -> None:
    ints, *_ = inputs_on(CPU)
    recording = recorder.record(lambda: ints + 1)
    ints.resize_(4)
    recording.replay()  # it shrank in place
    ints.resize_(1 << 20)
    with pytest.raises(StaleTableError, match="resized and moved; record it again"):
        recording.replay()


def test_a_write_into_a_host_constant_is_refused(recorder: Tape) -> None:
    ints, *_ = inputs_on(CPU)

    def run() -> torch.Tensor:
        total = torch.tensor(0)
        total += ints.sum()  # each replay would add to the last one's total
        return total

    with pytest.raises(CaptureError, match=r"writes into a host constant.*torch\.full"):
        recorder.record(run)


def test_one_hot_agrees_with_torch(recorder: Tape) -> None:
    check_agreement(recorder, lambda ints, *_: functional.one_hot(ints, 9))
    check_agreement(recorder, lambda ints, *_: functional.one_hot(ints.view(2, 4), num_classes=8))


def test_recording_draws_no_random_number(recorder: Tape) -> None:
    _, floats, _ = inputs_on(CPU)
    own = torch.Generator().manual_seed(3)

    def run() -> list[torch.Tensor]:
        baked = torch.rand(4, generator=own)
        return [baked, torch.randperm(8), functional.dropout(floats), torch.multinomial(floats.abs(), 2)]

    before = (torch.get_rng_state(), own.get_state())
    recording = recorder.record(run)
    assert same((torch.get_rng_state(), own.get_state()), before)
    recording.replay()
    first = recording.outputs[0].clone()
    assert same(first, torch.rand(4, generator=torch.Generator().manual_seed(3)))
    recording.replay()
    assert not same(recording.outputs[0], first)


def test_a_model_with_parameters_agrees(recorder: Tape) -> None:
    torch.manual_seed(0)
    layer = torch.nn.TransformerEncoderLayer(8, 2, 16, batch_first=True).eval()
    plain = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.GELU(), torch.nn.LayerNorm(16)).eval()

    def program(ints: torch.Tensor, floats: torch.Tensor, table: torch.Tensor) -> Any:
        with torch.no_grad():
            return plain(floats), layer(floats.repeat(1, 3, 1))

    # Under any function mode torch leaves the layer's fused path, which rounds differently.
    fused = torch.backends.mha.get_fastpath_enabled()
    torch.backends.mha.set_fastpath_enabled(False)
    try:
        check_agreement(recorder, program)
    finally:
        torch.backends.mha.set_fastpath_enabled(fused)


def test_a_parameter_comes_back_without_its_gradient(recorder: Tape) -> None:
    weight = torch.nn.Parameter(torch.ones(3))
    recording = recorder.record(lambda: (weight, weight * 2))
    recording.replay()
    assert same(recording.outputs, (torch.ones(3), torch.full((3,), 2.0)))
    assert not any(leaf.requires_grad for leaf in recording.outputs)


def test_control_flow_operators_and_sparse_tensors_are_refused(recorder: Tape) -> None:
    ints, _, table = inputs_on(CPU)
    sparse = table.float().to_sparse()
    refused: list[Callable[[], Any]] = [
        lambda: torch.cond(ints[0] > 1, lambda x: x + 1, lambda x: x - 1, (ints,)),
        lambda: sparse * 2,
    ]
    for run in refused:
        with pytest.raises(CaptureError, match=r"test_tape\.py"):
            recorder.record(run)


def test_two_tapes_record_and_replay_in_two_threads() -> None:
    failures: list[BaseException] = []
    start = threading.Barrier(2)

    def work(seed: int) -> None:
        tape, (ints, *_) = Tape(), inputs_on(CPU)

        def run() -> torch.Tensor:
            total = ints
            for step in range(10):
                total = torch.where(total > step, total + seed, total)
                total[2:5].add_(seed)
            return total

        try:
            start.wait()
            for step in range(10):
                with tape.session():
                    recording = tape.record(run)
                for _ in range(5):
                    ints.copy_(torch.arange(8) + step)
                    expected_input = ints.clone()
                    recording.replay()
                    replayed, written = recording.outputs.clone(), ints.clone()
                    ints.copy_(expected_input)
                    assert same((run(), ints), (replayed, written))
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=work, args=(seed,)) for seed in (1, 100)]
    assert gc.isenabled()
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert failures == []
    assert gc.isenabled()
