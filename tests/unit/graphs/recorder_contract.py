"""What every recorder keeps. ``recorder`` is a module-scoped fixture of the module that imports this.

Module-scoped on purpose: recordings of earlier tests, and captures that failed, come before later ones.
"""

from __future__ import annotations

import gc
import threading
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils import _pytree as pytree

from graphglue.errors import CaptureError, ClosedError
from graphglue.graphs.base import Recorder

Program = Callable[..., Any]


def same(left: Any, right: Any) -> bool:
    """Tell whether two trees agree in structure, dtypes, shapes and every bit."""
    lefts, left_spec = pytree.tree_flatten(left)
    rights, right_spec = pytree.tree_flatten(right)
    return left_spec == right_spec and all(map(_same_leaf, lefts, rights))


def _same_leaf(left: Any, right: Any) -> bool:
    if not (isinstance(left, torch.Tensor) and isinstance(right, torch.Tensor)):
        return type(left) is type(right) and left == right
    if left.dtype != right.dtype or left.shape != right.shape:
        return False
    return torch.equal(_bits(left), _bits(right))


def _bits(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.resolve_conj().resolve_neg().contiguous().reshape(-1).view(torch.uint8)


def inputs_on(device: torch.device) -> list[torch.Tensor]:
    """An int64 and a float32 vector of 8, and an int64 table of 4 x 8."""
    ints = torch.tensor([3, 0, 5, 1, 7, 2, 6, 4], device=device)
    floats = torch.linspace(-2.0, 3.0, 8, device=device)
    return [ints, floats, torch.arange(32, device=device).view(4, 8)]


def rewrite(inputs: list[torch.Tensor], step: int) -> None:
    """Give the inputs this step's contents, in place."""
    for index, tensor in enumerate(inputs):
        fresh = inputs_on(tensor.device)[index]
        tensor.copy_(fresh.roll(step, -1) if tensor.dtype is torch.int64 else fresh * (1 + step) - step)


def check_agreement(recorder: Recorder, program: Program) -> None:
    """Replay a program on three fills of its inputs, each compared bitwise with the eager program."""
    inputs = inputs_on(recorder.device)
    program(*(tensor.clone() for tensor in inputs))  # the warm-up
    recording = recorder.record(lambda: program(*inputs))
    for step in range(3):
        rewrite(inputs, step)
        twins = [tensor.clone() for tensor in inputs]
        expected = program(*twins)
        recording.replay()
        assert same(recording.outputs, expected)
        assert same(inputs, twins)


# --- the comparison itself ---


def test_same_can_fail() -> None:
    one = torch.tensor([1.0, 2.0])
    assert same({"a": (one, None)}, {"a": (one.clone(), None)})
    assert not same(one, one.double())
    assert not same(one, one.view(2, 1))
    assert not same(one, torch.tensor([1.0, 2.0000002]))
    assert not same(torch.tensor(0.0), torch.tensor(-0.0))
    assert not same((one, one), [one, one])
    assert not same((one, None), (one, 3))
    assert same(torch.tensor(float("nan")), torch.tensor(float("nan")))


def test_agreement_can_fail(recorder: Recorder) -> None:
    calls: list[int] = []

    def drifting(ints: torch.Tensor, *_: torch.Tensor) -> torch.Tensor:
        calls.append(0)
        return ints + len(calls)

    with pytest.raises(AssertionError):
        check_agreement(recorder, drifting)


# --- what capture bakes and what it does not ---


def test_replay_runs_no_python(recorder: Recorder) -> None:
    calls: list[int] = []
    ints, *_ = inputs_on(recorder.device)

    def run() -> torch.Tensor:
        calls.append(0)
        return ints + 1

    recording = recorder.record(run)
    for _ in range(3):
        recording.replay()
    assert len(calls) == 1
    assert same(recording.outputs, ints + 1)


def test_a_number_stays_baked(recorder: Recorder) -> None:
    ints, *_ = inputs_on(recorder.device)
    factor = 2
    recording = recorder.record(lambda: (ints * factor, ints + torch.tensor(factor)))
    factor = 5
    recording.replay()
    assert same(recording.outputs, (ints * 2, ints + 2))


def test_a_rebound_tensor_is_not_seen_and_a_rewritten_one_is(recorder: Recorder) -> None:
    ints, *_ = inputs_on(recorder.device)
    table = torch.zeros_like(ints)
    recording = recorder.record(lambda: table + ints)
    table.fill_(10)
    recording.replay()
    assert same(recording.outputs, ints + 10)
    table = torch.full_like(ints, 99)
    for _ in range(8):  # memory of a table that nobody holds would be handed out again here
        torch.full_like(ints, 77)
    recording.replay()
    assert same(recording.outputs, ints + 10)


def test_what_is_done_to_the_tensor_object_later_is_not_seen(recorder: Recorder) -> None:
    ints, *_ = inputs_on(recorder.device)
    kept: list[torch.Tensor] = []

    def run() -> torch.Tensor:
        kept.append(ints * 2)
        return kept[-1]

    source, expected = ints, ints * 2
    recording = recorder.record(run)
    address = recording.outputs.data_ptr()
    ints = ints.clone()
    source.data = torch.zeros_like(source)
    kept[0].unsqueeze_(0)
    kept[0].set_()
    ints.zero_()
    recording.replay()
    assert recording.outputs.data_ptr() == address
    assert same(recording.outputs, expected)


def test_capture_executes_nothing(recorder: Recorder) -> None:
    ints, floats, table = inputs_on(recorder.device)
    where = torch.tensor([1, 3], device=recorder.device)

    def run() -> torch.Tensor:
        table[2].copy_(ints)
        table.index_put_((where, where), where)
        table[:, 1:3].add_(5)
        ints.zero_()
        floats.masked_fill_(floats > 0, -1.0)
        return table.scatter_(1, table % 8, 7)

    before = [tensor.clone() for tensor in (ints, floats, table)]
    recording = recorder.record(run)
    assert same([ints, floats, table], before)
    recording.replay()
    assert not same(table, before[2])
    assert same(ints, torch.zeros_like(ints))


def test_outputs_keep_their_addresses_and_nothing_is_allocated(recorder: Recorder) -> None:
    ints, floats, _ = inputs_on(recorder.device)
    recording = recorder.record(lambda: {"a": ints * 2, "b": (floats.exp(), ints.view(2, 4).t())})
    leaves = pytree.tree_leaves(recording.outputs)
    places = [leaf.data_ptr() for leaf in leaves]
    assert recording.num_bytes >= 0
    recording.replay()
    gc.collect()
    count = sum(type(thing) is torch.Tensor for thing in gc.get_objects())
    for step in range(50):
        ints.fill_(step)
        recording.replay()
        assert [leaf.data_ptr() for leaf in pytree.tree_leaves(recording.outputs)] == places
        assert all(leaf is now for leaf, now in zip(leaves, pytree.tree_leaves(recording.outputs), strict=True))
    gc.collect()
    assert sum(type(thing) is torch.Tensor for thing in gc.get_objects()) == count
    assert same(leaves[0], ints * 2)


def test_an_input_returned_unchanged_is_the_input_memory(recorder: Recorder) -> None:
    ints, _, table = inputs_on(recorder.device)
    recording = recorder.record(lambda: (ints, table[1], ints + 1))
    assert recording.outputs[0].data_ptr() == ints.data_ptr()
    assert recording.outputs[1].data_ptr() == table[1].data_ptr()
    ints.fill_(9)
    recording.replay()
    assert same(recording.outputs, (ints, table[1], ints + 1))


def test_trees_come_back_as_they_were(recorder: Recorder) -> None:
    ints, floats, _ = inputs_on(recorder.device)

    def tree() -> dict[str, Any]:
        return {"x": (ints + 1, None), "y": [{"z": floats * 2}, 3, "word"], "empty": ints[:0], "none": None}

    recording = recorder.record(tree)
    recording.replay()
    assert same(recording.outputs, tree())


# --- views, aliases, out= ---


def _write_through_view(ints: torch.Tensor, *_: torch.Tensor) -> Any:
    base = ints * 10
    base[2:5].add_(100)
    base.view(2, 4).t()[1].zero_()
    return base, base[2:5], base.view(2, 4).t()


def _expand_and_stride(ints: torch.Tensor, *_: torch.Tensor) -> Any:
    base = ints + 0
    wide = base.expand(3, 8)
    windows = base.as_strided((3, 3), (2, 1), 1)
    windows[1].mul_(3)
    return wide.sum(0), windows, windows.sum(1), wide


def _dtype_view(ints: torch.Tensor, floats: torch.Tensor, *_: torch.Tensor) -> Any:
    base = ints * 3
    halves = base.view(torch.int32)
    halves[::2] += 1
    return base, halves, floats.view(torch.int32) + 1, base.view(torch.uint8)


def _out_variants(ints: torch.Tensor, floats: torch.Tensor, table: torch.Tensor) -> Any:
    target, grown = torch.empty_like(ints), torch.empty(0, dtype=ints.dtype, device=ints.device)
    torch.add(ints, 1, out=target)
    torch.mul(ints, 2, out=grown)
    torch.sub(table[0], ints, out=table[3])
    values, order = torch.empty_like(floats), torch.empty_like(ints)
    torch.sort(floats, out=(values, order))
    return target, grown, values, order, table[3]


def _write_to_inputs(ints: torch.Tensor, floats: torch.Tensor, table: torch.Tensor) -> Any:
    ints.add_(1).clamp_(max=7)
    table[1, 2:6] = ints[:4]
    floats[ints > 3] = 0.5
    table.index_put_((ints[:2] % 4, ints[2:4]), ints[:2], accumulate=False)
    return table[1] + ints, floats.clone()


def _change_geometry_in_place(ints: torch.Tensor, *_: torch.Tensor) -> Any:
    base = ints * 3
    base.unsqueeze_(0)
    flipped = base.t()
    base.squeeze_().add_(1)
    base.resize_(2, 4)
    other = torch.empty(0, dtype=ints.dtype, device=ints.device).set_(base)
    other.mul_(2)
    return base, flipped, other


def _rebind_data(ints: torch.Tensor, *_: torch.Tensor) -> Any:
    base = ints * 3
    old = base.view(8)
    base.data = ints + 7
    base.mul_(2)
    return base, old


def _unbind_and_join(ints: torch.Tensor, floats: torch.Tensor, table: torch.Tensor) -> Any:
    rows = table.unbind(0)
    left, right = ints.split([3, 5])
    joined = torch.cat([right, left])
    return torch.stack([rows[0], joined]), ints.chunk(2), floats[2:], table[:, ::2], table.diagonal()


def _foreach_and_complex(ints: torch.Tensor, floats: torch.Tensor, *_: torch.Tensor) -> Any:
    parts = [ints * 1, ints * 2]
    torch._foreach_add_(parts, 5)
    whole = torch.complex(floats, floats)
    turned = whole.conj()
    return parts, turned * whole, turned.imag, torch.view_as_real(whole), turned


def _no_rows(ints: torch.Tensor, floats: torch.Tensor, *_: torch.Tensor) -> Any:
    return ints[:0] + 1, floats.new_zeros(0, 3), torch.cat([ints[:0], ints]), ints.new_empty(0).sum()


def _scalars(ints: torch.Tensor, floats: torch.Tensor, *_: torch.Tensor) -> Any:
    last = ints[-1]
    small = last.to(torch.int32)
    return torch.where(last > 2, last, 0), torch.where(small > 2, small, 0), torch.where(last > 2, floats, 0.5)


def _metadata_idioms(ints: torch.Tensor, floats: torch.Tensor, table: torch.Tensor) -> Any:
    offsets = torch.zeros(9, dtype=torch.int32, device=ints.device)
    offsets[1:] = torch.cumsum(ints, 0)
    repeated = torch.repeat_interleave(ints, ints, output_size=28)
    classes = torch.nn.functional.one_hot(ints, 8)
    spots = torch.searchsorted(offsets, torch.arange(28, device=ints.device, dtype=torch.int32), right=True)
    pages = table.gather(1, ints.view(1, 8).expand(4, 8)) // 2
    return offsets, repeated, classes, spots, pages, table[ints % 4], floats.topk(3), ints.flip(0).bool()


AGREEING = [
    _write_through_view,
    _expand_and_stride,
    _dtype_view,
    _out_variants,
    _write_to_inputs,
    _change_geometry_in_place,
    _rebind_data,
    _unbind_and_join,
    _foreach_and_complex,
    _no_rows,
    _scalars,
    _metadata_idioms,
]


@pytest.mark.filterwarnings("ignore:An output with one or more elements was resized")
@pytest.mark.parametrize("inference", [False, True], ids=["normal", "inference"])
@pytest.mark.parametrize("program", AGREEING, ids=lambda program: program.__name__.strip("_"))
def test_replay_agrees_with_eager(recorder: Recorder, program: Program, inference: bool) -> None:
    def run(*inputs: torch.Tensor) -> Any:
        with torch.inference_mode(inference):
            return program(*inputs)

    check_agreement(recorder, run)


# --- inference mode ---


@pytest.mark.parametrize("inside", [False, True], ids=["recorded-outside", "recorded-inside"])
def test_recorded_in_one_mode_and_replayed_in_the_other(recorder: Recorder, inside: bool) -> None:
    ints, _, table = inputs_on(recorder.device)
    kept: list[torch.Tensor] = []

    def run() -> torch.Tensor:
        kept.append(ints * 2)
        table[0].copy_(kept[0])
        return kept[0] + table[1]

    with torch.inference_mode(inside):
        recording = recorder.record(run)
    with torch.inference_mode(not inside):
        recording.replay()
        assert same(recording.outputs, ints * 2 + table[1])
    assert same(table[0], ints * 2)
    assert not recording.outputs.is_inference()
    recording.outputs.add_(1)  # an eager fallback writes its results here, in normal mode


def test_a_table_made_in_inference_mode_is_written(recorder: Recorder) -> None:
    ints, *_ = inputs_on(recorder.device)
    with torch.inference_mode():
        table = torch.zeros(4, 8, dtype=torch.int64, device=recorder.device)

        def run() -> torch.Tensor:
            table[1].add_(ints)
            return table.index_fill_(0, ints[:1] % 4, 3)

        recording = recorder.record(run)
        assert not table.any()
    recording.replay()
    recording.replay()
    assert same(table[1], ints * 2)
    assert same(recording.outputs, table)
    assert bool((table[3] == 3).all())


# --- what is refused ---


def _branch(ints: torch.Tensor, *_: torch.Tensor) -> Any:
    return ints + 1 if (ints > 3).any() else ints


def _array(ints: torch.Tensor, *_: torch.Tensor) -> Any:
    return np.asarray(ints)


READS = "reads a tensor on the host"
SHAPE = "shape depends on contents"
HOST = "takes contents from host memory"
VALUE = "reads its one-element value on the host"
REFUSED: list[tuple[str, Program, str]] = [
    ("item", lambda i, f, t: i + i[0].item(), READS),
    ("tolist", lambda i, f, t: i.tolist(), READS),
    ("numpy", lambda i, f, t: i.numpy(), READS),
    ("__array__", _array, READS),
    ("cpu", lambda i, f, t: i.cpu(), READS),
    ("__bool__", _branch, READS),
    ("__int__", lambda i, f, t: int(i[0]), READS),
    ("__float__", lambda i, f, t: float(f[0]), READS),
    ("__index__", lambda i, f, t: [1] * i[0].__index__(), READS),
    ("__repr__", lambda i, f, t: repr(i), READS),
    ("__format__", lambda i, f, t: f"{i[0]}", READS),
    ("__dlpack__", lambda i, f, t: i.__dlpack__(), READS),
    ("__contains__", lambda i, f, t: 3 in i, READS),
    ("equal", lambda i, f, t: torch.equal(i, i), READS),
    ("allclose", lambda i, f, t: torch.allclose(f, f), READS),
    ("is_nonzero", lambda i, f, t: torch.is_nonzero(i[0]), READS),
    ("arange", lambda i, f, t: torch.arange(i[0]), READS),
    ("__getitem__", lambda i, f, t: t[i[0]], READS),
    ("deepcopy", lambda i, f, t: __import__("copy").deepcopy(i), READS),
    ("nonzero", lambda i, f, t: i.nonzero(), SHAPE),
    ("where", lambda i, f, t: torch.where(i > 3), SHAPE),
    ("masked_select", lambda i, f, t: i.masked_select(i > 3), SHAPE),
    ("index", lambda i, f, t: i[i > 3], SHAPE),
    ("index", lambda i, f, t: t[:, i > 3], SHAPE),
    ("_unique2", lambda i, f, t: i.unique(), SHAPE),
    ("unique_consecutive", lambda i, f, t: i.unique_consecutive(), SHAPE),
    ("bincount", lambda i, f, t: i.bincount(), SHAPE),
    ("repeat_interleave", lambda i, f, t: f.repeat_interleave(i), SHAPE),
    ("one_hot", lambda i, f, t: torch.nn.functional.one_hot(i), SHAPE),
    ("tensor", lambda i, f, t: i + torch.tensor([1] * 8, device=i.device), HOST),
    ("tensor", lambda i, f, t: i + torch.tensor(3, device=i.device), HOST),
    ("tensor", lambda i, f, t: torch.tensor([1, 2]), HOST),
    ("as_tensor", lambda i, f, t: torch.as_tensor(np.arange(8)), HOST),
    ("asarray", lambda i, f, t: torch.asarray([1.5]), HOST),
    ("host values", lambda i, f, t: torch.from_numpy(np.arange(8)), HOST),
    ("host values", lambda i, f, t: torch.LongTensor([1, 2]), HOST),
    ("new_tensor", lambda i, f, t: i.new_tensor([1, 2]), HOST),
    ("pin_memory", lambda i, f, t: i.pin_memory(), HOST),
    ("__getitem__", lambda i, f, t: i[[0, 2]], HOST),
    ("__setitem__", lambda i, f, t: t.__setitem__((slice(None), np.array([1, 2])), 0), HOST),
    ("where", lambda i, f, t: torch.where(f > 0, f, torch.tensor(0.5)), HOST),
    ("index_put", lambda i, f, t: i.__setitem__(i > 3, i[:4]), "has to count a boolean mask"),
    ("index_put", lambda i, f, t: i.index_put_((i > 3,), i[:1], accumulate=True), "has to count a boolean mask"),
    ("index_put", lambda i, f, t: i.__setitem__(i > 3, i[0] + 1), VALUE),
    ("masked_fill", lambda i, f, t: i.masked_fill(i > 3, i[0]), VALUE),
    ("index_fill", lambda i, f, t: i.index_fill(0, i[:2], i[0]), VALUE),
]


@pytest.mark.parametrize("inference", [False, True], ids=["normal", "inference"])
@pytest.mark.parametrize("case", range(len(REFUSED)), ids=[f"{i}-{case[0]}" for i, case in enumerate(REFUSED)])
def test_refused_with_its_reason_and_place(recorder: Recorder, case: int, inference: bool) -> None:
    name, program, reason = REFUSED[case]
    inputs = inputs_on(recorder.device)
    before = [tensor.clone() for tensor in inputs]
    earlier = recorder.record(lambda: inputs[0] * 2)
    with torch.inference_mode(inference), pytest.raises(CaptureError) as caught:
        recorder.record(lambda: program(*inputs))
    text = str(caught.value)
    assert name in text
    assert reason in text
    assert "recorder_contract.py:" in text
    assert "; instead, " in text
    assert same(inputs, before)
    later = recorder.record(lambda: inputs[0] + 1)
    for recording, expected in ((earlier, inputs[0] * 2), (later, inputs[0] + 1)):
        recording.replay()
        assert same(recording.outputs, expected)


def test_a_swallowed_refusal_is_raised_all_the_same(recorder: Recorder) -> None:
    ints, *_ = inputs_on(recorder.device)

    def run() -> torch.Tensor:
        try:
            return ints + int(ints[0])
        except CaptureError:
            return ints + 3

    with pytest.raises(CaptureError, match="__int__ reads a tensor"):
        recorder.record(run)


def test_an_error_of_the_callable_is_the_cause_and_is_located(recorder: Recorder) -> None:
    ints, *_ = inputs_on(recorder.device)
    problem = KeyError("no such layer")

    def layer() -> torch.Tensor:
        raise problem

    with pytest.raises(CaptureError, match=r"recorder_contract\.py:\d+ in layer.*no such layer") as caught:
        recorder.record(lambda: ints + layer())
    assert caught.value.__cause__ is problem
    with pytest.raises(CaptureError, match=r"recorder_contract\.py:\d+ in .*RuntimeError") as caught:
        recorder.record(lambda: ints + ints[:3])
    assert isinstance(caught.value.__cause__, RuntimeError)


@pytest.mark.parametrize("kind", [KeyboardInterrupt, SystemExit])
def test_an_interrupt_passes_through(recorder: Recorder, kind: type[BaseException]) -> None:
    ints, *_ = inputs_on(recorder.device)

    def run() -> torch.Tensor:
        ints.mul_(2)
        raise kind

    with pytest.raises(kind):
        recorder.record(run)
    recording = recorder.record(lambda: ints * 2)
    recording.replay()
    assert same(recording.outputs, ints * 2)


# --- callables that remember ---


def test_what_a_callable_keeps_is_rewritten_by_replays(recorder: Recorder) -> None:
    ints, *_ = inputs_on(recorder.device)

    class Prep:
        memo: torch.Tensor | None = None
        last: torch.Tensor

        def __call__(self) -> torch.Tensor:
            if self.memo is None:
                self.memo = ints * 2
            self.last = self.memo + 1
            return self.last

    prep = Prep()
    first = recorder.record(prep)
    memo, last = prep.memo, prep.last
    assert memo is not None
    second = recorder.record(prep)  # reads the memo that replays of the first one write
    for step in (1, 2):
        ints.fill_(step)
        first.replay()
        assert same((memo, last), (ints * 2, ints * 2 + 1))
        assert last.data_ptr() == first.outputs.data_ptr()
        second.replay()
        assert same(second.outputs, ints * 2 + 1)


def test_a_cached_scratch_serves_recordings_of_two_sizes_in_any_order(recorder: Recorder) -> None:
    ints, *_ = inputs_on(recorder.device)
    cache: dict[str, torch.Tensor] = {}

    def run(size: int) -> torch.Tensor:
        scratch = cache.setdefault("scratch", torch.empty(8, dtype=torch.int64, device=recorder.device))[:size]
        transient = ints[:size] * 3
        torch.add(transient, size, out=scratch)
        return scratch.cumsum(0) + transient

    recordings = {size: recorder.record(lambda size=size: run(size)) for size in (8, 4)}
    for step, size in enumerate((4, 8, 4, 4, 8)):
        ints.fill_(step)
        recordings[size].replay()
        tripled = ints[:size] * 3
        assert same(recordings[size].outputs, (tripled + size).cumsum(0) + tripled)
        assert same(cache["scratch"][:size], tripled + size)


def test_recordings_can_feed_each_other(recorder: Recorder) -> None:
    ints, *_ = inputs_on(recorder.device)
    first = recorder.record(lambda: ints * 2)
    second = recorder.record(lambda: first.outputs.add_(1))
    for step in range(3):
        ints.fill_(step)
        first.replay()
        second.replay()
        second.replay()
        assert same(first.outputs, ints * 2 + 2)
        assert second.outputs.data_ptr() == first.outputs.data_ptr()


# --- random numbers ---


def test_random_numbers_advance_and_reseeding_repeats_them(recorder: Recorder) -> None:
    _, floats, _ = inputs_on(recorder.device)

    def run() -> tuple[torch.Tensor, ...]:
        noisy = floats.clone().normal_()
        return torch.rand(8, device=floats.device), noisy, torch.nn.functional.dropout(floats + 9, 0.5)

    run()
    recording = recorder.record(run)

    def draws() -> list[list[torch.Tensor]]:
        torch.manual_seed(5)
        rounds = []
        for _ in range(3):
            recording.replay()
            rounds.append([leaf.clone() for leaf in recording.outputs])
        return rounds

    first, again = draws(), draws()
    assert same(first, again)
    for left, right in ((0, 1), (1, 2), (0, 2)):
        assert not any(same(one, other) for one, other in zip(first[left], first[right], strict=True))


# --- sessions and lifetimes ---


def test_warm_ups_and_recordings_of_a_session_see_the_work_before_it(recorder: Recorder) -> None:
    ints, *_ = inputs_on(recorder.device)
    counter = torch.zeros_like(ints)
    counter.add_(1)
    with recorder.session():
        for _ in range(2):
            counter.add_(ints)
        recorder.finish()
        recording = recorder.record(lambda: counter.add_(1) * 2)
        recorder.finish()
        recording.replay()
    assert same(counter, ints * 2 + 2)
    assert same(recording.outputs, counter * 2)


def test_a_session_holds_collection_back_and_restores_it(recorder: Recorder) -> None:
    was_enabled = gc.isenabled()
    try:
        for before in (True, False):
            (gc.enable if before else gc.disable)()
            with recorder.session():
                assert not gc.isenabled()
                recorder.finish()
            assert gc.isenabled() is before
            with pytest.raises(ValueError, match="inner"), recorder.session():
                raise ValueError("inner")
            assert gc.isenabled() is before
    finally:
        (gc.enable if was_enabled else gc.disable)()


def test_a_session_or_recording_inside_its_like_is_refused(recorder: Recorder) -> None:
    ints, *_ = inputs_on(recorder.device)
    with recorder.session():
        with pytest.raises(CaptureError, match="session is already under way in this thread"), recorder.session():
            pass
        recording = recorder.record(lambda: ints + 1)  # the refusal left the outer one open
    with pytest.raises(CaptureError, match="recording is already under way in this thread"):
        recorder.record(lambda: recorder.record(lambda: ints + 1).outputs)

    def session_inside() -> None:
        with recorder.session():
            pass

    with pytest.raises(CaptureError, match="recording is already under way in this thread"):
        recorder.record(session_inside)
    with pytest.raises(CaptureError, match="replay inside a recording"):
        recorder.record(recording.replay)
    recording.replay()
    assert same(recording.outputs, ints + 1)


def test_closing_twice_is_fine_and_a_closed_recording_says_so(recorder: Recorder) -> None:
    ints, *_ = inputs_on(recorder.device)
    recording = recorder.record(lambda: ints + 1)
    other = recorder.record(lambda: ints + 2)
    recording.close()
    recording.close()
    with pytest.raises(ClosedError):
        recording.replay()
    with pytest.raises(ClosedError):
        _ = recording.outputs
    other.replay()
    assert same(other.outputs, ints + 2)


def test_another_thread_may_work_on_the_device_meanwhile(recorder: Recorder) -> None:
    ints, *_ = inputs_on(recorder.device)
    stop, failures = threading.Event(), []

    def work() -> None:
        try:
            while not stop.is_set():
                assert bool((torch.arange(64, device=recorder.device) + 1).sum().item() == 2080)
        except Exception as error:
            failures.append(error)

    thread = threading.Thread(target=work)
    thread.start()
    try:
        for step in range(20):
            recording = recorder.record(lambda step=step: ints * step)
            recording.replay()
            assert same(recording.outputs, ints * step)
    finally:
        stop.set()
        thread.join()
    assert not failures


# --- any program ---

SIZE = 8
Registers = dict[str, list[torch.Tensor]]


def _index(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.remainder(SIZE)


def _order(tensor: torch.Tensor) -> torch.Tensor:
    return torch.sort(tensor, stable=True).indices


def _add_to_slice(left: torch.Tensor, right: torch.Tensor, k: int) -> torch.Tensor:
    left[k:].add_(right[: SIZE - k].clone())  # an in-place write may not overlap what it reads
    return left


def _halves(left: torch.Tensor, right: torch.Tensor, k: int) -> torch.Tensor:
    left.view(torch.int32)[::2].add_(k)
    return left + right


# Each takes two int64 vectors and a number below 8, and gives an int64 vector; some write to the first.
INT_OPS: dict[str, Program] = {
    "add": lambda a, b, k: a + b,
    "mul": lambda a, b, k: a * (k - 3),
    "sub": lambda a, b, k: torch.sub(a, b, alpha=k),
    "floordiv": lambda a, b, k: a // (k + 1),
    "gather": lambda a, b, k: a.gather(0, _index(b)),
    "index_select": lambda a, b, k: a.index_select(0, _index(b)),
    "index": lambda a, b, k: a[_index(b)],
    "cumsum": lambda a, b, k: a.cumsum(0),
    "where": lambda a, b, k: torch.where(a > b, a, k),
    "compare": lambda a, b, k: (a < b).to(torch.int64) + (b == k),
    "clamp": lambda a, b, k: a.clamp(-k, k * 10),
    "sort": lambda a, b, k: torch.sort(a, descending=bool(k % 2), stable=True).values,
    "argsort": lambda a, b, k: _order(a),
    "searchsorted": lambda a, b, k: torch.searchsorted(torch.sort(a).values, b, right=bool(k % 2)),
    "cat": lambda a, b, k: torch.cat([a[k:], b[:k]]),
    "stack": lambda a, b, k: torch.stack([a, b], 1).view(2, SIZE)[k % 2],
    "transpose": lambda a, b, k: a.view(2, 4).t().reshape(SIZE),
    "alias": lambda a, b, k: a.view(SIZE),
    "roll": lambda a, b, k: a.roll(k),
    "max": lambda a, b, k: torch.maximum(a, b).amax().expand(SIZE) + 0,
    "scatter": lambda a, b, k: a.scatter(0, _order(b), b),
    "add_": lambda a, b, k: a.add_(b),
    "mul_": lambda a, b, k: a.mul_(k),
    "copy_": lambda a, b, k: a.copy_(b),
    "fill_": lambda a, b, k: a[k:].fill_(k).new_full((SIZE,), k),
    "slice_": _add_to_slice,
    "setitem": lambda a, b, k: a.__setitem__(slice(0, k), b[:k]),
    "scatter_": lambda a, b, k: a.scatter_(0, _order(b), b + k),
    "index_put_": lambda a, b, k: a.index_put_((_order(b),), b - k),
    "masked_fill_": lambda a, b, k: a.masked_fill_(b > k, -k),
    "set_masked": lambda a, b, k: a.__setitem__(b > k, k),
    "dtype_view": _halves,
    "out": lambda a, b, k: torch.add(a, b, out=torch.empty_like(a)),
}
FLOAT_OPS: dict[str, Program] = {
    "add": lambda a, b, k: a + b,
    "mul": lambda a, b, k: a * (k * 0.25),
    "div": lambda a, b, k: a / (k + 1),
    "neg": lambda a, b, k: -a,
    "where": lambda a, b, k: torch.where(a > b, a, b),
    "minimum": lambda a, b, k: torch.minimum(a, b),
    "clamp": lambda a, b, k: a.clamp(-k, k + 0.5),
    "sort": lambda a, b, k: torch.sort(a, stable=True).values,
    "roll": lambda a, b, k: a.roll(k),
    "cat": lambda a, b, k: torch.cat([a[k:], b[:k]]),
    "half": lambda a, b, k: a.to(torch.bfloat16).to(torch.float32),
    "add_": lambda a, b, k: a.add_(b, alpha=k),
    "slice_": _add_to_slice,
    "masked_fill_": lambda a, b, k: a.masked_fill_(b < 0, float(k)),
    "lerp": lambda a, b, k: torch.lerp(a, b, k / 8),
}
CROSS_OPS: dict[str, Program] = {
    "to_float": lambda ints, floats, k: ("float", ints.remainder(1000).to(torch.float32)),
    "to_int": lambda ints, floats, k: ("int", floats.nan_to_num(0.0, 1.0, -1.0).clamp(-1e6, 1e6).to(torch.int64)),
    "take": lambda ints, floats, k: ("float", floats[_index(ints)]),
    "rank": lambda ints, floats, k: ("int", _order(floats)),
    "bucket": lambda ints, floats, k: ("int", torch.bucketize(floats, torch.sort(floats).values)),
    "mask": lambda ints, floats, k: ("float", floats.masked_fill(ints > k, 0.0)),
}

small = st.integers(0, 7)
steps = st.one_of(
    st.tuples(st.just("int"), st.sampled_from(sorted(INT_OPS)), small, small, small),
    st.tuples(st.just("float"), st.sampled_from(sorted(FLOAT_OPS)), small, small, small),
    st.tuples(st.just("cross"), st.sampled_from(sorted(CROSS_OPS)), small, small, small),
)


def interpret(program: list[tuple[str, str, int, int, int]], *inputs: torch.Tensor) -> Any:
    """Run a generated program; its registers begin as the inputs themselves, so some steps write to them."""
    registers: Registers = {"int": [inputs[0], inputs[2][1], inputs[2][:, 0].repeat(2)], "float": [inputs[1]]}
    for family, name, left, right, k in program:
        ints, floats = registers["int"], registers["float"]
        if family == "cross":
            kind, result = CROSS_OPS[name](ints[left % len(ints)], floats[right % len(floats)], k)
        else:
            pool, kind = registers[family], family
            ops = INT_OPS if family == "int" else FLOAT_OPS
            result = ops[name](pool[left % len(pool)], pool[right % len(pool)], k)
        if result is not None:
            registers[kind].append(result)
    return registers


@settings(deadline=None)
@given(program=st.lists(steps, min_size=10, max_size=30))
def test_any_program_replays_as_it_runs(recorder: Recorder, program: list[Any]) -> None:
    check_agreement(recorder, lambda *inputs: interpret(program, *inputs))


@pytest.mark.parametrize("name", sorted(INT_OPS))
def test_each_int_operation_replays_as_it_runs(recorder: Recorder, name: str) -> None:
    check_agreement(recorder, lambda *inputs: interpret([("int", name, 0, 1, k) for k in (1, 5)], *inputs))
