"""The conformance suite on the shipped prep, as a backend's author uses it, and on backends that do not conform."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch

import graphglue as gg
from graphglue.core.tables import Tables
from graphglue.device import fill
from graphglue.preps import paged_decode
from graphglue.testing import PARTS, conformance
from graphglue.testing.backend import Backend
from graphglue.testing.parts import NotShown
from graphglue.testing.suite import run_part

pytestmark = pytest.mark.usefixtures("frozen_imports")

ROWS, CONTEXT = 6, 48


def make_backend() -> dict[str, Any]:
    """Give the arguments of a runner of the shipped prep."""
    locations = torch.arange(ROWS * CONTEXT).view(ROWS, CONTEXT)
    return {
        "slots": paged_decode.slots(),
        "ladder": [1, 2, 4],
        "prep": "paged-decode",
        "tables": {"req_to_token": locations},
        "forward": lambda view, metadata: {"sum": metadata["positions"] + view.out_cache_loc},
        "output_axes": "token",
    }


test = conformance(make_backend, perturb=lambda: None)


def small(prep: Callable[[Any], Any], kind: type[gg.Runner] = gg.Runner, **contract: Any) -> Callable[[], gg.Runner]:
    """Give a backend of one prep over two slots and a table."""

    def make() -> gg.Runner:
        registry = gg.Registry()
        fields = {"outputs": {"m": "request"}, "tables": ("table",), "modes": {gg.Mode.DECODE}, **contract}
        registry.register(gg.PrepContract(name="small", reads={"x": 1}, **fields))(prep)
        return kind(
            slots=[gg.Slot("x", axis="request", dtype=torch.int64, pad=1, valid=(2, 9))],
            ladder=[2, 5],
            prep="small",
            registry=registry,
            tables={"table": torch.arange(10)},
        )

    return make


def right(view: Any) -> Any:
    """Look the rows up."""
    return {"m": view.tables.table[view.x] * 2}


@pytest.mark.parametrize("part", PARTS)
@pytest.mark.parametrize("contract", [{}, {"idle": "glue"}, {"effects": ("table",)}], ids=str)
def test_a_backend_that_conforms_passes_every_part_or_is_told_why_not(part: str, contract: dict[str, Any]) -> None:
    def counting(view: Any) -> Any:
        if "effects" in contract:
            view.tables.table[:1].add_(view.x[:1])
        return right(view)

    expected = pytest.raises(NotShown) if part in ("double_capture", "pointers") else nullcontext()
    with expected:
        run_part(Backend(small(counting, **contract), max_examples=10), part)


def test_each_case_gets_a_runner_of_its_own_which_is_closed() -> None:
    made: list[gg.Runner] = []

    def make() -> gg.Runner:
        made.append(small(right)())
        return made[-1]

    backend = Backend(make, max_examples=2)
    for part in ("trace", "pad_image", "idle", "capture"):
        run_part(backend, part)
    assert len(made) == 3  # one audit for all of its checks
    for runner in made:
        with pytest.raises(gg.ClosedError):
            runner.replay(gg.Batch.idle())


def test_it_is_collected_by_pytest(pytester: pytest.Pytester) -> None:
    pytester.makepyfile(
        """
        import graphglue as gg, torch
        from graphglue.testing import conformance

        def make_backend():
            slots = [gg.Slot("x", axis="request", dtype=torch.int64, pad=0, valid=(0, 9))]
            registry = gg.Registry()
            contract = gg.PrepContract(name="p", reads={"x": 0}, outputs={"m": "request"}, modes={gg.Mode.DECODE})
            registry.register(contract)(lambda view: {"m": view.x - view.x.min()})
            return gg.Runner(slots=slots, ladder=[3], prep="p", registry=registry)

        test = conformance(make_backend, max_examples=50)
        """
    )
    done = pytester.runpytest_inprocess("-p", "no:cacheprovider", "-rA")
    found = done.parseoutcomes()
    assert found["failed"] == 2
    assert found["passed"] + found["skipped"] + found["failed"] == len(PARTS)
    done.stdout.fnmatch_lines(["*FAILED*test[[]pad_image[]]*", "*FAILED*test[[]unpadded_rows[]]*"])


def fails(part: str, make: Callable[[], gg.Runner], match: str) -> None:
    """Run a part that must fail, by an error that says why."""
    with pytest.raises((AssertionError, gg.GraphGlueError), match=match):
        run_part(Backend(make, max_examples=20), part)


def test_a_host_read_fails_the_trace_and_the_capture() -> None:
    def prep(view: Any) -> Any:
        return {"m": view.x + int(view.x[0])}

    fails("trace", small(prep), r"(?s)prep 'small' fails trace.*test_conformance\.py:\d+")
    fails("capture", small(prep), "no key could be captured.*reads a tensor on the host")


def test_a_prep_that_no_contract_lets_be_glued_fails_the_capture() -> None:
    class Other(gg.Runner):
        def capture(self, *_: Any, **__: Any) -> None:
            pass

    fails("capture", small(right, Other, host_free=False), "no prep of this backend may be glued anywhere")


def test_a_quarantined_key_fails_the_capture() -> None:
    def prep(view: Any) -> Any:
        return {"m": view.x * 2} if view.bucket.requests == 2 else {"m": view.x + int(view.x[0])}

    fails("capture", small(prep), r"prep 'small' at decode bucket \[5, 5, 1\] is quarantined, not captured: CaptureErr")


def test_a_capture_that_changes_a_table_fails() -> None:
    def prep(view: Any) -> Any:
        view.tables.table.add_(1)
        return {"m": view.x * 2}

    fails("capture", small(prep), "the capture changed a table: leaf 'table'")


def test_a_baked_host_value_fails_padded_equals_eager() -> None:
    engine = {"scale": 3}

    class Later(gg.Runner):
        def capture(self, *args: Any, **fields: Any) -> None:
            super().capture(*args, **fields)
            engine["scale"] += 1

    prep = small(lambda view: {"m": view.x * engine["scale"]}, Later)
    fails("padded_equals_eager", prep, r"prep 'small', decode bucket of \d.*glue.*leaf 'm', real row 0")


def test_rows_that_reach_each_other_fail_unpadded_rows() -> None:
    fails("unpadded_rows", small(lambda view: {"m": view.x - view.x.min()}), "leaf 'm', real row")


def test_a_tail_that_is_not_reset_fails_padded_equals_eager(monkeypatch: pytest.MonkeyPatch) -> None:
    class Stale(gg.Runner):
        """Leaves the tails of its own steps, and only of those, as they were."""

        def replay(self, batch: gg.Batch, plan: Any = None) -> gg.Step:
            with monkeypatch.context() as patch:
                patch.setattr(fill, "_write_tail", lambda *_: None)
                return super().replay(batch, plan)

    fails("padded_equals_eager", small(right, Stale), "leaf 'm', pad row")


def test_results_that_move_fail_padded_equals_eager() -> None:
    class Moving(gg.Runner):
        def replay(self, batch: gg.Batch, plan: Any = None) -> gg.Step:
            step = super().replay(batch, plan)
            step.metadata = {"m": step.metadata["m"].clone()}
            kept.append(step.metadata)
            return step

    kept: list[Any] = []
    fails("padded_equals_eager", small(right, Moving), "results of decode bucket of .* moved from")


def test_batches_that_are_never_glued_fail_padded_equals_eager() -> None:
    backend = Backend(small(right, padded=False), batches=lambda runner: one_row(runner), max_examples=3)
    with pytest.raises(AssertionError, match="none of the drawn batches was glued"):
        run_part(backend, "padded_equals_eager")


def one_row(runner: gg.Runner) -> Any:
    """Draw batches of one request, which is no bucket."""
    from hypothesis import strategies as st

    return st.builds(lambda value: gg.Batch(1, {"x": [value]}), st.integers(2, 9))


def test_an_idle_step_that_reads_the_last_one_fails_idle() -> None:
    class Lazy(gg.Runner):
        last: Any = None

        def replay(self, batch: gg.Batch, plan: Any = None) -> gg.Step:
            step = super().replay(batch, plan)
            if batch.num_requests == 0:
                step.metadata["m"].fill_(77)
            return step

    fails("idle", small(right, Lazy), "leaf 'm', pad row 0: 77, expected 2")


def test_a_table_that_moves_unseen_fails_moved_table(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Tables, "check", lambda self: None)
    fails("moved_table", small(right), "the step was not refused; expected StaleTableError naming 'table'")


def test_sources_that_are_read_late_fail_overwritten_source() -> None:
    class Late(gg.Runner):
        def replay(self, batch: gg.Batch, plan: Any = None) -> gg.Step:
            step = super().replay(batch, plan)
            step.metadata = {"m": Late.seen(torch.as_tensor(batch.sources["x"]), step.metadata["m"])}
            return step

        @staticmethod
        def seen(source: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
            return source if source.shape == rows.shape else rows

    fails("overwritten_source", small(lambda view: {"m": view.x + 0}, Late), r"leaf 'm', real row 0: 0, expected")


def test_a_refusal_after_the_first_write_fails_refused_batch() -> None:
    class Hasty(gg.Runner):
        def replay(self, batch: gg.Batch, plan: Any = None) -> gg.Step:
            self.view(5).x.add_(1)
            return super().replay(batch, plan)

    fails("refused_batch", small(right, Hasty), "a batch without 'x' was refused, but wrote")


def test_what_is_not_there_is_skipped_and_not_passed() -> None:
    def make() -> gg.Runner:
        slots = [gg.Slot("x", axis="request", dtype=torch.int64, pad=1, missing="pad", valid=(2, 9))]
        registry = gg.Registry()
        registry.register(gg.PrepContract(name="p", reads={"x": 1}, modes={gg.Mode.DECODE}))(lambda view: view.x * 2)
        return gg.Runner(slots=slots, ladder=[2], prep="p", registry=registry)

    for part, reason in (("moved_table", "no tables"), ("refused_batch", "no slot must")):
        with pytest.raises(NotShown, match=reason):
            run_part(Backend(make, max_examples=2), part)
