"""What segmented recordings keep on every recorder. ``recorder`` is a fixture of the module that imports this."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch

from graphglue.errors import BindError, CaptureError, ClosedError, ContractError, DivergenceError, SegmentError
from graphglue.graphs.base import Recorder
from graphglue.graphs.segments import breaks_reached, eager_break, record_segments

from .recorder_contract import inputs_on, rewrite, same

ROWS = 4


class Context:
    """Per-step state that a break reaches: what an engine's forward context is."""

    def __init__(self) -> None:
        self.factor = 1
        self.calls: list[Any] = []


def rows_on(device: torch.device) -> torch.Tensor:
    return torch.arange(ROWS * 3.0, device=device).view(ROWS, 3)


def check_usable(recorder: Recorder) -> None:
    """Record and replay, plain and segmented: what a failure could have broken."""
    ints, *_ = inputs_on(recorder.device)
    plain = recorder.record(lambda: ints * 2)
    split = record_segments(recorder, lambda: doubled(ints + 1) + 1)
    plain.replay()
    split.replay()
    assert same((plain.outputs, split.outputs), (ints * 2, (ints + 1) * 2 + 1))


@eager_break
def doubled(x: torch.Tensor) -> torch.Tensor:
    return x * 2


@eager_break
def summed(x: torch.Tensor) -> torch.Tensor:
    return x + int(x.sum())  # reads the host: no recording could hold it


@eager_break(row_aligned=("x",), pad=-7)
def scanned(x: torch.Tensor, context: Context) -> torch.Tensor:
    context.calls.append(tuple(x.shape))
    return x.cumsum(0) * context.factor


# --- what a recording is ---


def test_segments_and_breaks_run_in_order_over_changing_contents(recorder: Recorder) -> None:
    inputs = inputs_on(recorder.device)

    def run() -> Any:
        return summed(summed(inputs[0] + 1) * 2) - inputs[0], doubled(inputs[1]).relu()

    recording = record_segments(recorder, run)
    assert recording.breaks == ("summed", "summed", "doubled")
    for step in range(3):
        rewrite(inputs, step)
        recording.replay()
        assert same(recording.outputs, run())


def test_a_mark_changes_nothing_elsewhere(recorder: Recorder) -> None:
    ints, *_ = inputs_on(recorder.device)
    assert same(doubled(ints), ints * 2)
    assert doubled.__name__ == "doubled"
    recording = recorder.record(lambda: doubled(ints))
    recording.replay()
    assert same(recording.outputs, ints * 2)


def test_only_breaks_run_python_at_replay(recorder: Recorder) -> None:
    ints, *_ = inputs_on(recorder.device)
    seen: list[str] = []

    @eager_break
    def note(x: torch.Tensor) -> torch.Tensor:
        seen.append("break")
        return x + 1

    def run() -> torch.Tensor:
        seen.append("run")
        return note(ints * 2) + 1

    recording = record_segments(recorder, run)
    recording.replay()
    recording.replay()
    assert seen == ["run", "break", "break", "break"]


def test_a_break_sees_real_values_while_recording_and_the_last_segment_does_not_run(recorder: Recorder) -> None:
    ints, *_ = inputs_on(recorder.device)
    marked = torch.zeros_like(ints)
    seen: list[torch.Tensor] = []

    @eager_break
    def look(x: torch.Tensor) -> torch.Tensor:
        seen.append(x.clone())
        return x + 1

    def run() -> torch.Tensor:
        result = look(look(ints * 2) * 3)
        marked.fill_(1)
        return result

    record_segments(recorder, run)
    assert same(seen, [ints * 2, (ints * 2 + 1) * 3])
    assert not bool(marked.any())


def test_addresses_never_change(recorder: Recorder) -> None:
    ints, *_ = inputs_on(recorder.device)
    recording = record_segments(recorder, lambda: doubled(ints + 1))
    first = recording.outputs.data_ptr()
    for _ in range(3):
        recording.replay()
        assert recording.outputs.data_ptr() == first


def test_breaks_with_nothing_between_them_launch_nothing(recorder: Recorder) -> None:
    ints, *_ = inputs_on(recorder.device)
    recording = record_segments(recorder, lambda: doubled(summed(doubled(ints))))
    assert recording.first is None
    recording.replay()
    assert same(recording.outputs, ints * 4 + int(ints.sum()) * 2 * 2)
    assert record_segments(recorder, lambda: doubled(ints + 1)).first is not None


def test_a_callable_without_breaks_is_one_segment(recorder: Recorder) -> None:
    ints, *_ = inputs_on(recorder.device)
    recording = record_segments(recorder, lambda: ints + 1)
    recording.replay()
    assert same(recording.outputs, ints + 1)
    assert (recording.breaks, len(recording.segments), recording.rows) == ((), 1, None)


# --- results ---

RESULTS: dict[str, Callable[[torch.Tensor], Any]] = {
    "nothing": lambda x: None,
    "a tuple": lambda x: (x + 1, x.sum(1)),
    "a dict with plain values": lambda x: {"a": x * 2, "b": [3, None, "c"]},
    "views of one storage": lambda x: list((x * 2).split(1, dim=1)),
    "a column": lambda x: (x * 2)[:, 1],
    "transposed": lambda x: (x + 1).t(),
    "expanded": lambda x: x[:1].clone().expand(ROWS, 3),
    "a negative view": lambda x: torch.complex(x, x).conj().imag,
    "a conjugate": lambda x: torch.complex(x, x * 2).conj(),
    "empty": lambda x: x.new_empty(0, 3),
    "a number on the device": lambda x: x.sum(),
    "other dtypes": lambda x: (x > 3, x.bfloat16(), x.to(torch.int32)),
    "an argument": lambda x: x,
    "an argument, changed": lambda x: x.mul_(2),
    "a view of an argument": lambda x: x[1:],
    "unaligned bytes": lambda x: (x.to(torch.int8).reshape(-1)[1:4], x.to(torch.int8)[1]),
}


@pytest.mark.parametrize("name", RESULTS)
def test_results_come_back_in_any_form(recorder: Recorder, name: str) -> None:
    source = rows_on(recorder.device)
    cut = eager_break(RESULTS[name])

    def run() -> Any:
        given = source * 3 - 1
        result = cut(given)
        leaves = [leaf * 1 for leaf in torch.utils._pytree.tree_leaves(result) if isinstance(leaf, torch.Tensor)]
        return result, leaves, given + 1

    recording = record_segments(recorder, run)
    for step in range(3):
        source.mul_(-2).add_(step)
        recording.replay()
        assert same(recording.outputs, run())


def test_what_a_break_returned_may_be_changed_in_place(recorder: Recorder) -> None:
    source, kept = rows_on(recorder.device), torch.zeros(ROWS, 3, device=recorder.device)

    @eager_break
    def halves(x: torch.Tensor) -> Any:
        both = torch.cat([x, -x], 1)
        return both, both[:, :3], kept

    def run() -> Any:
        given = source + 1
        both, left, own = halves(given)
        left.add_(100)  # seen through the other view
        own.add_(1)  # a bridge: the break's own buffer is not changed by later segments
        return both, left

    recording = record_segments(recorder, run)
    recording.replay()
    recording.replay()
    fresh = torch.cat([source + 1, -source - 1], 1)
    fresh[:, :3] += 100
    assert same(recording.outputs, (fresh, fresh[:, :3]))
    assert not bool(kept.any())


CHANGES: dict[str, tuple[Callable[[torch.Tensor], Any], Callable[[torch.Tensor], Any], str]] = {
    "shape": (lambda x: x + 1, lambda x: (x + 1)[:2], r"\[2, 3\] on .*, captured float32\[4, 3\]"),
    "dtype": (lambda x: x + 1, lambda x: (x + 1).double(), r"float64.*captured float32"),
    "device": (lambda x: x + 1, lambda x: (x + 1).to("meta"), r"on meta.*captured float32\[4, 3\]"),
    "structure": (lambda x: (x + 1,), lambda x: [x + 1], "structure"),
    "one for none": (lambda x: x + 1, lambda x: (x + 1,), "structure"),
    "a plain value": (lambda x: (x + 1, 3), lambda x: (x + 1, 4), "int 4, captured int 3"),
    "nothing": (lambda x: x + 1, lambda x: None, "NoneType None|structure"),
    "own memory": (lambda x: x, lambda x: x + 1, "other memory than the argument's"),
    "an argument": (lambda x: x + 1, lambda x: x, "memory of an argument"),
}


@pytest.mark.parametrize("name", CHANGES)
def test_another_result_is_refused_before_anything_is_written(recorder: Recorder, name: str) -> None:
    source, context = rows_on(recorder.device), Context()
    before, after, message = CHANGES[name]

    @eager_break
    def moody(x: torch.Tensor) -> Any:
        return (before if context.factor == 1 else after)(x)

    recording = record_segments(recorder, lambda: moody(source * 2))
    recording.replay()
    expected = torch.utils._pytree.tree_map(lambda leaf: leaf * 1, recording.outputs)
    context.factor = 2
    with pytest.raises(DivergenceError, match=rf"break 0 \('moody'\) returned.*({message}).*record again"):
        recording.replay()
    assert same(recording.outputs, expected)
    context.factor = 1
    source.add_(1)
    recording.replay()
    assert same(recording.outputs, before(source * 2))
    check_usable(recorder)


@pytest.mark.parametrize("real_rows", [None, 2])
def test_a_result_where_there_was_none_is_refused(recorder: Recorder, real_rows: int | None) -> None:
    source, context = rows_on(recorder.device), Context()

    @eager_break(row_aligned=("x", "into"), writes=("into",))
    def moody(x: torch.Tensor, into: torch.Tensor) -> Any:
        into.copy_(x)
        return None if context.factor == 1 else x + 1

    def run() -> torch.Tensor:
        into = torch.empty_like(source)
        moody(source * 2, into)
        return into + 1

    recording = record_segments(recorder, run)
    context.factor = 2
    with pytest.raises(DivergenceError, match=r"break 0 \('moody'\) returned.*NoneType"):
        recording.replay(real_rows)
    context.factor = 1
    recording.replay(real_rows)
    assert same(recording.outputs[:real_rows], (source * 2 + 1)[:real_rows])


def test_a_result_that_hides_tensors_is_refused_while_recording(recorder: Recorder) -> None:
    source = rows_on(recorder.device)

    @eager_break
    def hiding(x: torch.Tensor) -> Any:
        return Context()

    for result in (hiding, eager_break(lambda x: x.to_sparse())):
        with pytest.raises(ContractError, match=r"break 0.*(whose tensors can not be seen|strided)"):
            record_segments(recorder, lambda result=result: result(source * 2))
        check_usable(recorder)


# --- real rows ---


def test_row_aligned_arguments_are_cut_and_tails_are_padded(recorder: Recorder) -> None:
    source, context = rows_on(recorder.device), Context()
    recording = record_segments(recorder, lambda: scanned(source * 2, context) * 1)
    for real in (ROWS, 1, 3, 0, 2, 2, None):
        context.factor, rows = 5, ROWS if real is None else real
        source.add_(1)
        recording.replay(real_rows=real)
        expected = torch.full_like(source, -7)
        expected[:rows] = (source[:rows] * 2).cumsum(0) * 5
        assert same(recording.outputs, expected)
        assert context.calls[-1] == (rows, 3)


def test_an_argument_that_is_filled_in_place_gets_its_tail_padded(recorder: Recorder) -> None:
    source = rows_on(recorder.device)

    @eager_break(row_aligned=("x", "out"), writes=("out",), pad=9)
    def fill(x: torch.Tensor, out: torch.Tensor) -> None:
        out.copy_(x.flip(0))

    def run() -> torch.Tensor:
        out = torch.zeros_like(source)
        fill(source * 2, out=out)
        return out + 1

    recording = record_segments(recorder, run)
    recording.replay(real_rows=3)
    expected = torch.full_like(source, 10)
    expected[:3] = (source[:3] * 2).flip(0) + 1
    assert same(recording.outputs, expected)


@pytest.mark.parametrize("real", [-1, ROWS + 1, True, 2.0, "2"])
def test_more_rows_than_recorded_are_refused(recorder: Recorder, real: Any) -> None:
    context = Context()
    recording = record_segments(recorder, lambda: scanned(rows_on(recorder.device), context))
    num_calls = len(context.calls)
    with pytest.raises(BindError, match=rf"real_rows={real!r}: this recording has 4 rows; give 0 to 4"):
        recording.replay(real_rows=real)
    assert len(context.calls) == num_calls


def test_writing_past_the_real_rows_is_seen_when_asked(recorder: Recorder) -> None:
    source, context = rows_on(recorder.device), Context()

    @eager_break(row_aligned=("x",))
    def spill(x: torch.Tensor) -> torch.Tensor:
        if context.factor == 2:
            x.as_strided((ROWS, 3), (3, 1))[-1].fill_(77)
        return x + 1

    recording = record_segments(recorder, lambda: spill(source * 2))
    recording.replay(2, check=True)
    context.factor = 2
    with pytest.raises(DivergenceError, match=r"break 0.*wrote past the 2 real rows of its argument 'x'"):
        recording.replay(2, check=True)
    recording.replay(2)  # not asked
    context.factor = 1
    recording.replay(2, check=True)
    check_usable(recorder)


def test_returning_all_rows_though_some_are_real_is_refused(recorder: Recorder) -> None:
    source = rows_on(recorder.device)
    whole = eager_break(lambda x: source + 1, row_aligned=("x",))
    recording = record_segments(recorder, lambda: whole(source * 2))
    recording.replay()
    with pytest.raises(DivergenceError, match=r"with 2 of 4 rows real.*\[4, 3\].*\[2, 3\]"):
        recording.replay(2)


BAD_ROWS: dict[str, tuple[Callable[[torch.Tensor], Any], str]] = {
    "other rows returned": (
        lambda x: eager_break(lambda x: x.sum(0), row_aligned=("x",))(x),
        r"row-aligned arguments of 4 rows and returns \(3,\)",
    ),
    "two counts in one break": (
        lambda x: eager_break(lambda x, y: x, row_aligned=("x", "y"))(x, x[:2]),
        "different numbers of rows",
    ),
    "two counts in two breaks": (
        lambda x: scanned(scanned(x, Context())[:2] + 1, Context()),
        "they share one count",
    ),
    "no rows": (lambda x: eager_break(lambda x: x, row_aligned=("x",))(x.sum()), "no rows"),
    "a pad the dtype can not hold": (
        lambda x: eager_break(lambda x: x.to(torch.int64), row_aligned=("x",), pad=0.5)(x),
        "pad=0.5, which torch.int64 does not hold",
    ),
}


@pytest.mark.parametrize("name", BAD_ROWS)
def test_rows_that_can_not_be_told_are_refused_while_recording(recorder: Recorder, name: str) -> None:
    source = rows_on(recorder.device)
    program, message = BAD_ROWS[name]
    with pytest.raises(ContractError, match=rf"break \d.*{message}"):
        record_segments(recorder, lambda: program(source * 2))
    check_usable(recorder)


def test_a_float_s_pad_is_rounded_as_the_dtype_rounds(recorder: Recorder) -> None:
    source = rows_on(recorder.device).bfloat16()
    third = eager_break(lambda x: x * 1, row_aligned=("x",), pad=1 / 3)
    recording = record_segments(recorder, lambda: third(source * 2))
    recording.replay(1)
    assert same(recording.outputs[1:], torch.full_like(source, 1 / 3)[1:])


def test_wrong_declarations_are_refused_where_they_stand() -> None:
    with pytest.raises(ContractError, match=r"has no arguments \['z'\]; its arguments are \['x'\]"):
        eager_break(lambda x: x, row_aligned=("x", "z"))
    with pytest.raises(ContractError, match="not row_aligned"):
        eager_break(lambda x: x, writes=("x",))


# --- arguments ---


def test_arguments_do_not_keep_what_only_the_recording_made(recorder: Recorder) -> None:
    source = rows_on(recorder.device)
    born: list[Any] = []

    def run() -> torch.Tensor:
        given = source * 2
        born.append(weakref.ref(given))
        return doubled(given) + 1

    recording = record_segments(recorder, run)
    gc.collect()
    assert born[0]() is None
    recording.replay()
    assert same(recording.outputs, source * 4 + 1)


def test_objects_and_foreign_tensors_are_the_callers_own(recorder: Recorder) -> None:
    source, context = rows_on(recorder.device), Context()
    weight = torch.nn.Parameter(torch.ones(3, device=recorder.device))
    step: dict[str, Any] = {"bias": 0}

    @eager_break
    def apply(x: torch.Tensor, w: Any, step: dict[str, Any], *rest: Any, **named: Any) -> torch.Tensor:
        context.calls.append((w, step, rest, sorted(named)))
        return x * w + step["bias"] + rest[0] + named["last"][0]

    recording = record_segments(recorder, lambda: apply(source * 2, weight, step, 1, last=[source * 3]) + 1)
    step["bias"] = 50
    recording.replay()
    assert same(recording.outputs, source * 2 * weight.detach() + 51 + source * 3 + 1)
    seen = context.calls[-1]
    assert seen[0] is weight
    assert seen[1] is step
    assert seen[2:] == ((1,), ["last"])


def test_a_method_can_be_a_break(recorder: Recorder) -> None:
    class Layer:
        def __init__(self, factor: int) -> None:
            self.factor = factor

        @eager_break(row_aligned=("x",))
        def attend(self, x: torch.Tensor) -> torch.Tensor:
            return x * self.factor

    source, layers = rows_on(recorder.device), [Layer(2), Layer(3)]
    recording = record_segments(recorder, lambda: layers[1].attend(layers[0].attend(source + 1) + 1))
    layers[0].factor = 7
    recording.replay()
    assert same(recording.outputs, ((source + 1) * 7 + 1) * 3)
    assert recording.breaks[0].endswith("Layer.attend")


@pytest.mark.parametrize("inference", [False, True])
@pytest.mark.parametrize("around_replay", [nullcontext, torch.no_grad, torch.inference_mode])
def test_a_break_runs_in_the_mode_that_it_was_reached_in(
    recorder: Recorder, inference: bool, around_replay: Any
) -> None:
    source, seen = rows_on(recorder.device).requires_grad_(), []

    @eager_break
    def look(x: torch.Tensor) -> torch.Tensor:
        state = (torch.is_inference_mode_enabled(), torch.is_grad_enabled(), torch.get_default_dtype())
        seen.append((*state, torch.is_autocast_enabled(recorder.device.type), torch.empty(0).device))
        return x @ x.t()

    def run() -> torch.Tensor:
        given = source * 2
        with torch.inference_mode(inference), torch.autocast(recorder.device.type, torch.bfloat16):
            return look(given) + 1

    recording = record_segments(recorder, run)
    with around_replay(), torch.device("meta"):
        recording.replay()
    assert seen[0] == seen[1]
    assert seen[0][0] is inference
    assert seen[0][3] is True
    with torch.no_grad():
        expected = run()
    assert same(recording.outputs.detach(), expected)
    assert not recording.outputs.requires_grad


def test_a_break_s_result_keeps_no_gradient_graph(recorder: Recorder) -> None:
    source, born = rows_on(recorder.device), []
    weight = torch.ones(3, device=recorder.device, requires_grad=True)

    @eager_break
    def learned(x: torch.Tensor) -> torch.Tensor:
        middle = weight * 2
        born.append(weakref.ref(middle))
        return x * middle * middle

    def run() -> torch.Tensor:
        given = source + 1
        with torch.enable_grad():
            cut = learned(given)
        return cut * 1

    recording = record_segments(recorder, run)
    recording.replay()
    assert same(recording.outputs, (source + 1) * 4)
    assert born[-1]() is None


# --- stubs, order, nesting ---


def test_a_stub_stands_in_while_recording_only(recorder: Recorder) -> None:
    ints, calls = inputs_on(recorder.device)[0], []

    @eager_break(stub=torch.zeros_like)
    def costly(x: torch.Tensor) -> torch.Tensor:
        calls.append(0)
        return x * 5

    recording = record_segments(recorder, lambda: costly(ints + 1) + 1)
    assert not calls
    recording.replay()
    assert same(recording.outputs, (ints + 1) * 5 + 1)
    wrong = eager_break(lambda x: x * 5, stub=lambda x: x[:2] * 1)
    recording = record_segments(recorder, lambda: wrong(ints + 1))
    with pytest.raises(DivergenceError, match=r"\[8\].*captured int64\[2\]"):
        recording.replay()


def test_ranks_meet_before_each_break_while_recording(recorder: Recorder) -> None:
    ints, met = inputs_on(recorder.device)[0], []
    recording = record_segments(recorder, lambda: doubled(doubled(ints)), barrier=lambda: met.append(0))
    recording.replay()
    assert len(met) == 2


def test_breaks_inside_breaks_are_plain_calls(recorder: Recorder) -> None:
    ints, *_ = inputs_on(recorder.device)
    outer = eager_break(lambda x: summed(doubled(x)) + 1)
    run = lambda: outer(ints + 1) * 2  # noqa: E731
    recording = record_segments(recorder, run)
    assert len(recording.breaks) == 1
    recording.replay()
    assert same(recording.outputs, run())


def test_another_order_or_number_of_breaks_is_named(recorder: Recorder) -> None:
    ints, flag = inputs_on(recorder.device)[0], Context()

    def run() -> torch.Tensor:
        if flag.factor == 1:
            return summed(doubled(ints))
        return doubled(summed(ints)) if flag.factor == 2 else doubled(ints)

    warm = breaks_reached(run)
    assert warm == ("doubled", "summed")
    recording = record_segments(recorder, run, like=warm)
    recording.follow(run)
    for flag.factor, message in (
        (2, "break 0.*'doubled'"),
        (3, "1 breaks are reached, expected 2"),
    ):
        with pytest.raises(CaptureError, match=message):
            record_segments(recorder, run, like=warm)
        with pytest.raises(DivergenceError, match=message):
            recording.follow(run)
        check_usable(recorder)
    flag.factor = 1
    with pytest.raises(CaptureError, match=r"break 1 \('summed'\): it is reached where no further break"):
        record_segments(recorder, run, like=warm[:1])
    recording.replay()
    assert same(recording.outputs, run())


def test_one_callable_is_recorded_at_a_time(recorder: Recorder) -> None:
    ints, *_ = inputs_on(recorder.device)
    inner = eager_break(lambda x: record_segments(recorder, lambda: x + 1) and x)
    with pytest.raises(CaptureError, match="already under way"):
        record_segments(recorder, lambda: inner(ints * 2))
    with pytest.raises(CaptureError, match="already under way"):
        recorder.record(lambda: record_segments(recorder, lambda: ints + 1))
    with pytest.raises(CaptureError, match="already under way"):
        record_segments(recorder, lambda: recorder.record(lambda: ints + 1))
    check_usable(recorder)


def test_a_break_may_replay_a_plain_recording_made_before(recorder: Recorder) -> None:
    ints, *_ = inputs_on(recorder.device)
    other = type(recorder)() if recorder.device.type == "cpu" else type(recorder)(recorder.device)
    tripled = other.record(lambda: ints * 3)

    @eager_break
    def use(x: torch.Tensor) -> torch.Tensor:
        tripled.replay()
        return tripled.outputs + x

    recording = record_segments(recorder, lambda: use(ints + 1) * 2)
    ints.add_(1)
    recording.replay()
    assert same(recording.outputs, (ints * 3 + ints + 1) * 2)


# --- several recordings ---


def test_recordings_of_one_pool_replay_in_any_order(recorder: Recorder) -> None:
    source, context = rows_on(recorder.device), Context()

    def run(rows: int) -> torch.Tensor:
        hidden = source[:rows] + 1
        for _ in range(3):
            hidden = torch.relu(scanned(hidden * 2, context) - hidden)
        return hidden

    recordings = {rows: record_segments(recorder, lambda rows=rows: run(rows)) for rows in (4, 3, 1)}
    for rows in (1, 4, 3, 3, 1, 4):
        source.add_(1)
        recordings[rows].replay()
        assert same(recordings[rows].outputs, run(rows))
    recordings[4].close()
    recordings[1].replay()
    assert same(recordings[1].outputs, run(1))


def test_a_segmented_replay_inside_a_break_of_the_same_pool_is_refused(recorder: Recorder) -> None:
    ints, flag = inputs_on(recorder.device)[0], Context()
    inner = record_segments(recorder, lambda: doubled(ints + 5))

    @eager_break
    def nested(x: torch.Tensor) -> torch.Tensor:
        if flag.factor == 2:
            inner.replay()
        return x + 1

    outer = record_segments(recorder, lambda: nested(ints * 2))
    flag.factor = 2
    with pytest.raises(SegmentError, match=r"break 0.*whose memory the outer one still reads"):
        outer.replay()
    inner.replay()
    flag.factor = 1
    outer.replay()
    assert same((inner.outputs, outer.outputs), ((ints + 5) * 2, ints * 2 + 1))


def test_a_replay_inside_a_recording_is_refused(recorder: Recorder) -> None:
    ints, *_ = inputs_on(recorder.device)
    recording = record_segments(recorder, lambda: doubled(ints + 1))
    with pytest.raises(CaptureError, match="replay inside a recording"):
        recorder.record(recording.replay)
    with pytest.raises(CaptureError, match="replay inside a recording"):
        record_segments(recorder, recording.replay)
    check_usable(recorder)


def test_a_closed_recording_says_so(recorder: Recorder) -> None:
    ints, *_ = inputs_on(recorder.device)
    recording = record_segments(recorder, lambda: doubled(ints + 1))
    recording.close()
    recording.close()
    for use in (recording.replay, lambda: recording.outputs, lambda: recording.first):
        with pytest.raises(ClosedError):
            use()


# --- failures ---


def test_a_break_that_raises_at_replay_is_named_and_the_recording_goes_on(recorder: Recorder) -> None:
    ints, flag = inputs_on(recorder.device)[0], Context()

    @eager_break
    def failing(x: torch.Tensor) -> torch.Tensor:
        if flag.factor == 2:
            raise KeyError("page")
        return x + 1

    recording = record_segments(recorder, lambda: doubled(failing(ints * 2) * 3))
    flag.factor = 2
    with pytest.raises(SegmentError, match=r"break 0 \('.*failing'\) raised KeyError\('page'\)") as caught:
        recording.replay()
    assert isinstance(caught.value.__cause__, KeyError)
    flag.factor = 1
    recording.replay()
    assert same(recording.outputs, (ints * 2 + 1) * 6)
    check_usable(recorder)


@pytest.mark.parametrize("swallow", [False, True])
def test_a_break_that_raises_while_recording_leaves_the_recorder_usable(recorder: Recorder, swallow: bool) -> None:
    ints, *_ = inputs_on(recorder.device)

    @eager_break
    def failing(x: torch.Tensor) -> torch.Tensor:
        raise KeyError("page")

    def run() -> torch.Tensor:
        try:
            return failing(doubled(ints + 1))
        except Exception:
            if not swallow:
                raise
            return doubled(ints * 2)

    with pytest.raises(CaptureError, match=r"break 1 \('.*failing'\): it raised at .*segments_contract.py:.*page"):
        record_segments(recorder, run)
    check_usable(recorder)


def test_a_segment_that_can_not_be_recorded_leaves_the_recorder_usable(recorder: Recorder) -> None:
    ints, *_ = inputs_on(recorder.device)
    for run in (lambda: doubled(ints + int(ints.sum())), lambda: doubled(ints + 1) + int(ints.sum())):
        with pytest.raises(CaptureError, match="reads a tensor on the host"):
            record_segments(recorder, run)
        check_usable(recorder)
    with pytest.raises(KeyboardInterrupt):
        record_segments(recorder, lambda: (doubled(ints + 1), _interrupt()))
    check_usable(recorder)


def _interrupt() -> None:
    raise KeyboardInterrupt


def test_a_recorder_that_knows_no_segments_is_named() -> None:
    with pytest.raises(CaptureError, match="a object records no segments"):
        record_segments(object(), lambda: None)  # type: ignore[arg-type]
