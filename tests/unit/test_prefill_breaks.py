"""Kinds of eager breaks, three ways: in segments, eagerly on the padded bucket, and at the exact extents."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import pytest
import torch

import graphglue as gg
from graphglue.errors import CaptureError, ContractError, DivergenceError
from tests.prefill import Prefill, batch, make_runner

Function = Callable[..., Any]
Model = Callable[[torch.Tensor, Any], torch.Tensor]
STEPS = ([3, 2], [8], [1, 1, 1], [5, 3, 4, 2], [16], [2, 1], [3, 2], [3, 2])


def on_rows(model: Model) -> Any:
    """Build an engine's forward around what it does with the rows of the embedded tokens."""
    table = Prefill().table
    return lambda view, metadata: {"rows": model(table[view.input_ids] * metadata["scale"][:, None], view) + 0}


def runner_of(model: Model, **config: Any) -> gg.Runner:
    return make_runner(Prefill(), forward=on_rows(model), output_axes={"rows": "bucket"}, config=config)


def disagreement(build: Callable[[], Model], steps: Sequence[list[int]] = STEPS) -> str | None:
    """Say where the three ways differ; None if they do not."""
    with (
        runner_of(build()) as graphed,
        runner_of(build(), enabled=False) as padded,
        runner_of(build(), enabled=False, padding=False) as exact,
    ):
        graphed.capture(progress=False)
        for seed, lens in enumerate(steps):
            ours, theirs, real = (one.replay(batch(lens, seed)) for one in (graphed, padded, exact))
            if ours.decision.forward is not gg.Route.GRAPH:
                return f"{lens} ran eagerly: {graphed.stats()['keys']}"
            if not torch.equal(ours.outputs["rows"], theirs.outputs["rows"]):
                return f"{lens}: the padded eager step differs"
            if not torch.equal(ours.outputs["rows"][: sum(lens)], real.outputs["rows"]):
                return f"{lens}: the exact eager step differs"
    return None


def twice(x: Any) -> Any:
    made = x * 3
    return made, made


def views(x: Any) -> Any:
    made = torch.cat([x, x], 1) * 3
    return made[:, : x.shape[1]], made


def into(x: Any, out: Any) -> Any:
    out[: x.shape[0]].copy_(x * 3)
    return out[: x.shape[0]]


def in_place(first: torch.Tensor, then: torch.Tensor) -> torch.Tensor:
    first.add_(1)
    return then


ROWS = {"row_aligned": ("x",)}
AGREE: dict[str, Callable[[], Model]] = {
    "one tensor": lambda: lambda rows, view: gg.eager_break(lambda x: x.cumsum(0), **ROWS)(rows * 2),
    "the same tensor twice": lambda: lambda rows, view: in_place(*gg.eager_break(twice, **ROWS)(rows * 1)),
    "views of one tensor": lambda: (
        lambda rows, view: in_place(*gg.eager_break(views, **ROWS)(rows * 1)).sum(1, keepdim=True)
    ),
    "an argument that is written": lambda: (
        lambda rows, view: (lambda out: in_place(gg.eager_break(into, **ROWS)(rows * 1, out), out))(
            torch.zeros_like(rows)
        )
    ),
    "its own argument": lambda: lambda rows, view: gg.eager_break(lambda x: x.mul_(2), **ROWS)(rows * 1),
    "whole numbers and flags": lambda: (
        lambda rows, view: rows * gg.eager_break(lambda x: x[:, 0] > 0, row_aligned=("x",), pad=1)(rows * 1)[:, None]
    ),
    "a tree with nothing in it": lambda: (
        lambda rows, view: gg.eager_break(lambda x: {"y": x["q"] * 2, "none": None}, **ROWS)(
            {"q": rows * 1, "k": None}
        )["y"]
    ),
    "real rows of slots": lambda: (
        lambda rows, view: gg.eager_break(
            lambda x, view: x * view.live.extend_lens.sum() + view.live.positions[:, None], **ROWS
        )(rows * 1, view)
    ),
}


@pytest.mark.parametrize("name", AGREE)
def test_three_ways_agree(name: str) -> None:
    assert disagreement(AGREE[name]) is None


def test_a_disagreement_is_seen() -> None:
    def build() -> Model:
        count = iter(range(10**6))
        return lambda rows, view: gg.eager_break(lambda x: x * next(count), **ROWS)(rows * 1)

    assert "differs" in str(disagreement(build))

    def mixing() -> Model:
        return lambda rows, view: rows + gg.eager_break(lambda x: x * 1)(rows * 1).sum()

    assert disagreement(mixing) == "[3, 2]: the exact eager step differs"


@dataclass
class Opaque:
    """Hides a tensor from torch."""

    x: torch.Tensor


class Special(torch.Tensor):
    """A tensor of somebody's own."""


REFUSED: dict[str, tuple[Model, str]] = {
    "rows that nobody sees": (
        lambda rows, view: gg.eager_break(lambda x: x.x * 2, **ROWS)(Opaque(rows * 1)),
        "row-aligned.*Opaque",
    ),
    "a subclass as argument": (
        lambda rows, view: gg.eager_break(lambda x: x * 2, **ROWS)((rows * 1).as_subclass(Special)).as_subclass(
            torch.Tensor
        ),
        "given in 'x' a Special",
    ),
    "a subclass as result": (
        lambda rows, view: gg.eager_break(lambda x: (x * 2).as_subclass(Special), **ROWS)(rows * 1),
        "returned a Special",
    ),
    "a pad that half precision does not hold": (
        lambda rows, view: gg.eager_break(lambda x: x.half(), row_aligned=("x",), pad=-1e9)(rows * 1).double(),
        "pad=-1000000000.0, which torch.float16 does not hold",
    ),
    "an expanded tensor beside its base": (
        lambda rows, view: gg.eager_break(lambda x: (lambda y: (y, y.expand(-1, 8)))(x[:, :1].clone()), **ROWS)(
            rows * 1
        )[1],
        "an expanded tensor beside another",
    ),
    "a sparse result": (
        lambda rows, view: gg.eager_break(lambda x: x.to_sparse(), **ROWS)(rows * 1).to_dense(),
        "strided",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_a_static_form_can_not_keep_is_refused_at_capture(name: str) -> None:
    model, text = REFUSED[name]
    with runner_of(model) as runner, pytest.raises(ContractError, match=rf"break 0.*{text}"):
        runner.capture(progress=False)


@pytest.mark.parametrize(
    ("mark", "text"),
    [
        (lambda: gg.eager_break(row_aligned="x")(lambda x: x), r"expected \('x',\)"),
        (lambda: gg.eager_break(row_aligned=("x",), pad="0")(lambda x: x), "pad='0'; expected a number"),  # type: ignore[arg-type]
        (lambda: gg.eager_break(row_aligned=("x",), pad=1j)(lambda x: x), "expected a number"),  # type: ignore[arg-type]
        (lambda: gg.eager_break(row_aligned=("x",))(torch.nn.Linear(2, 2)), "such as a module's forward"),
        (lambda: gg.eager_break(torch.nn.functional.scaled_dot_product_attention), "mark a Python function"),
    ],
)
def test_a_mark_that_can_not_be_is_refused_at_once(mark: Callable[[], Any], text: str) -> None:
    with pytest.raises(ContractError, match=text):
        mark()


def test_real_rows_are_gone_when_a_step_is_over() -> None:
    """So that what is captured later can not bake what the last step had."""
    baking: list[bool] = []
    attend = gg.eager_break(lambda x: x * 2, **ROWS)

    def model(rows: torch.Tensor, view: Any) -> torch.Tensor:
        return attend(rows * (view.live.raw.tokens if baking else 1))

    with runner_of(model) as runner:
        runner.capture(progress=False)
        for lens in ([9], [3, 2], [3]):
            runner.replay(batch(lens))
        runner.reset()
        baking.append(True)
        runner.capture(progress=False)
        causes = [cause for key in runner.stats()["keys"] for cause in key["causes"].values()]
        assert len(causes) == 3
        assert all("outside an eager break" in cause for cause in causes)


def test_live_metadata_is_let_go() -> None:
    class Plan:
        alive = 0

        def __init__(self) -> None:
            type(self).alive += 1

        def __del__(self) -> None:
            type(self).alive -= 1

    contract = gg.PrepContract(
        name="planned", reads={"positions": 0}, outputs={"scale": "token"}, modes={gg.Mode.EXTEND}, host_free=False,
        live=("plan",),
    )  # fmt: skip
    attend = gg.eager_break(lambda x, view: x * 2, **ROWS)
    runner = make_runner(
        Prefill(), forward=on_rows(lambda rows, view: attend(rows * 1, view)), contract=contract,
        prep_function=lambda view: {"scale": view.positions * 0.5, "plan": Plan()},
    )  # fmt: skip
    with runner:
        runner.capture(progress=False)
        for lens in STEPS:
            step = runner.replay(batch(lens))
        assert isinstance(step.metadata["plan"], Plan)
        del step
        assert Plan.alive <= 1
    assert Plan.alive == 0


def test_replays_in_two_threads_leave_the_process_as_it_was() -> None:
    """What a break was recorded under is its thread's, never the process's."""
    default = torch.get_default_dtype()
    reached, go_on = threading.Event(), threading.Event()
    serving: list[bool] = []

    def waits(x: torch.Tensor) -> torch.Tensor:
        if serving:
            reached.set()
            assert go_on.wait(30)
        return x * 2

    torch.set_default_dtype(torch.bfloat16)
    try:
        waiting = runner_of(lambda rows, view: gg.eager_break(waits, **ROWS)(rows * 1))
        waiting.capture(progress=False)
    finally:
        torch.set_default_dtype(default)
    serving.append(True)
    with waiting:
        thread = threading.Thread(target=lambda: waiting.replay(batch([3, 2])))
        thread.start()
        assert reached.wait(30)
        seen = torch.get_default_dtype()
        go_on.set()
        thread.join()
    assert seen == default
    assert torch.get_default_dtype() == default


def test_a_runner_of_the_same_recorder_is_refused_inside_a_break() -> None:
    tape, nesting = gg.Tape(), []
    inner = make_runner(Prefill(), recorder=tape)

    def nested(x: torch.Tensor) -> torch.Tensor:
        if nesting:
            inner.replay(batch([2, 2]))
        return x * 2

    outer = make_runner(
        Prefill(), forward=on_rows(lambda rows, view: gg.eager_break(nested, **ROWS)(rows * 1)), recorder=tape
    )
    with inner, outer:
        inner.capture(progress=False)
        outer.capture(progress=False)
        nesting.append(True)
        with pytest.raises((CaptureError, gg.SegmentError), match="same recorder"):
            outer.replay(batch([3, 2]))
        nesting.clear()
        assert outer.replay(batch([3, 2])).decision.forward is gg.Route.GRAPH
        assert inner.replay(batch([3, 2])).decision.forward is gg.Route.GRAPH


def test_writes_past_the_real_rows_are_named_where_the_config_asks_for_it() -> None:
    def build(check: bool) -> gg.Runner:
        kept: list[torch.Tensor] = []

        def beyond(x: torch.Tensor, whole: torch.Tensor) -> torch.Tensor:
            whole.add_(1)
            return x * 2

        def model(rows: torch.Tensor, view: Any) -> torch.Tensor:
            made = rows * 1
            kept.append(made)
            return gg.eager_break(beyond, **ROWS)(made, made.view_as(made)) + made

        return runner_of(model, check_breaks=check)

    with build(True) as checked, build(False) as unchecked:
        for runner in (checked, unchecked):
            runner.capture(progress=False)
        with pytest.raises(DivergenceError, match="wrote past the 5 real rows of its argument 'x'"):
            checked.replay(batch([3, 2]))
        assert unchecked.replay(batch([3, 2])).outputs["rows"].shape[0] == 8
        assert checked.replay(batch([8])).outputs["rows"].shape[0] == 8


def test_a_bounded_ladder_keeps_its_bound_over_aligned_counts() -> None:
    for multiple in (1, 3, 8):
        ladder = gg.Ladder.bounded(2048, 0.125, multiple)
        assert all(size % multiple == 0 for size in ladder)
        assert ladder.largest >= 2048
        for count in range(1, 2049):
            rounded = -(-count // multiple) * multiple
            covered = ladder.cover(count)
            assert covered is not None
            assert covered - rounded <= 0.125 * rounded
