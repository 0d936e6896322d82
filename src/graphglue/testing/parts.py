"""The parts of the conformance suite that run a backend's own runner: each raises where it does not conform."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from graphglue.core import trees
from graphglue.core.batch import Batch
from graphglue.core.contract import PrepContract
from graphglue.core.differences import first_difference
from graphglue.core.routing import Reason, Route
from graphglue.errors import BindError, StaleTableError
from graphglue.runner import Runner
from graphglue.step import Step
from graphglue.testing.backend import Backend, check_same, effects_undone, results_of, twin_of
from graphglue.testing.strategies import containers, runner_batches

_FEW = 5


class NotShown(Exception):
    """Say that a part has nothing to look at, and why: it is skipped, never passed."""


def capture(backend: Backend) -> None:
    """Capture every key: each prep is recorded wherever its contract lets it be glued, and tables stay as they are."""
    with backend.opened() as runner:
        tables = {name: table.clone() for name, table in runner.tables.items()}
        runner.capture(progress=False)
        changed = first_difference(tables, dict(runner.tables))
        assert changed is None, f"the capture changed a table: {changed}; declare it in contract.effects"
        expected = 0
        for key in runner.stats()["keys"]:
            for registration in runner.registrations:
                if not _glued_at(registration.contract, key):
                    continue
                expected += 1
                state = key["states"].get(registration.name)
                assert state == "captured", (
                    f"prep {registration.name!r} at {key['mode']} bucket {key['bucket']} is {state}, not captured: "
                    f"{key['causes'].get(registration.name)}"
                )
        assert expected, "no prep of this backend may be glued anywhere: it has no contract, or is not host_free"


def padded_equals_eager(backend: Backend) -> None:
    """Replay drawn batches, and compare all rows with the same preps called eagerly; results never move."""
    with backend.captured() as runner, twin_of(runner) as eager:
        addresses: dict[Any, list[int]] = {}
        glued = []

        def check(batch: Batch) -> None:
            step = _compared(runner, eager, batch, "all")
            glued.append(Route.GLUE in (step.decision.prep, *step.decision.preps.values()))
            if step.decision.prep is Route.GLUE and not runner.config.clone_outputs:
                leaves = [leaf.data_ptr() for leaf in trees.flatten(step.metadata)[0] if isinstance(leaf, torch.Tensor)]
                before = addresses.setdefault(step.decision.key, leaves)
                assert before == leaves, f"results of {step.decision.key} moved from {before} to {leaves}"

        for_batches(backend, backend.batches(runner), check)
        assert any(glued), "none of the drawn batches was glued; look at Decision.reason, or hand batches= in"


def unpadded_rows(backend: Backend) -> None:
    """Replay drawn batches, and compare the real rows with the same preps called on the unpadded batch."""
    with backend.captured() as runner, twin_of(runner, padding=False) as exact:
        for_batches(backend, backend.batches(runner), partial(_compared, runner, exact, rows="real"))


def idle(backend: Backend) -> None:
    """Replay a step without requests in every mode, and a step with some after it."""
    with backend.captured() as runner, twin_of(runner) as eager:
        for mode in runner.space.modes:
            for variant in runner.space.variants:
                skips = [r for r in runner.registrations if r.contract is not None and r.contract.idle == "skip"]
                batch = Batch.idle(mode, variant)
                if skips:
                    step = runner.replay(batch)
                    assert step.decision.reason is Reason.IDLE_SKIPPED, f"{step.decision}"
                else:
                    step = _compared(runner, eager, batch, "all")
                assert step.raw.requests == 0
                assert step.decision.bucket is not None
        for_batches(backend, backend.batches(runner), partial(_compared, runner, eager, rows="all"), _FEW)


def moved_table(backend: Backend) -> None:
    """Move each table under captured graphs: refused before anything is written, and right again once it is rebound."""
    with backend.opened() as runner:
        current = {name: table for name, table in runner.tables.items() if table.numel()}
        if not current:
            raise NotShown("the runner has no tables")
        fixed = {name: table for name, table in runner.tables.items() if name not in current}
        called = {name: partial(current.__getitem__, name) for name in current}
        with twin_of(runner, tables={**fixed, **called}) as moving, twin_of(runner) as eager:
            moving.capture(progress=False)
            for_batches(backend, backend.batches(runner), partial(_check_moved, moving, current), _FEW)
            for name, table in current.items():
                current[name] = table.clone()
                moving.rebind_table(name, called[name])
            assert moving.maintain(), "no key was captured again after the tables were rebound"
            for_batches(backend, backend.batches(runner), partial(_compared_apart, moving, eager), _FEW)


def overwritten_source(backend: Backend) -> None:
    """Overwrite every host source right after the replay returned: its step must not see that."""
    with backend.captured() as runner, twin_of(runner) as eager:
        writable = (containers.as_is, containers.as_array)

        def check(batch: Batch) -> None:
            """Replay, overwrite the sources, and compare with the eager results."""
            with effects_undone(runner):
                expected = results_of(eager, eager.replay(batch))
            with effects_undone(runner):
                step = runner.replay(batch)
                for source in batch.sources.values():
                    source[...] = 0
                check_same(runner, results_of(runner, step), expected, step, "all")

        for_batches(backend, runner_batches(runner, idle=False, into=writable), check)


def refused_batch(backend: Backend) -> None:
    """Leave out one source: the refusal names it, and no slot was written."""
    with backend.captured() as runner:
        required = [slot.name for slot in runner.arena.slots.values() if slot.missing == "error" and slot.value is None]
        refused = set()

        def check(batch: Batch) -> None:
            """Leave each source out in turn."""
            for name in set(required) & set(batch.sources):
                before = _slots(runner)
                without = {slot: source for slot, source in batch.sources.items() if slot != name}
                _refused(BindError, name, runner, replace(batch, sources=without))
                changed = first_difference(before, _slots(runner))
                assert changed is None, f"a batch without {name!r} was refused, but wrote: {changed}"
                refused.add(name)

        for_batches(backend, backend.batches(runner), check, _FEW)
        if not refused:
            raise NotShown("no slot must be handed in")


def for_batches(
    backend: Backend, batches: st.SearchStrategy[Batch], check: Callable[[Batch], Any], most: int | None = None
) -> None:
    """Call ``check`` with drawn batches, as many as the hypothesis profile says, or at most ``most``."""
    limit = backend.max_examples or settings().max_examples
    limit = limit if most is None else min(most, limit)

    @settings(max_examples=limit, deadline=None, database=None, suppress_health_check=list(HealthCheck))
    @given(batch=batches)
    def run(batch: Batch) -> None:
        check(batch)

    run()


def _compared(runner: Runner, twin: Runner, batch: Batch, rows: str) -> Step:
    """Run one batch on a twin and on the runner, compare, and give the runner's step."""
    with effects_undone(runner):
        expected = results_of(twin, twin.replay(batch))
    with effects_undone(runner):
        step = runner.replay(batch)
        check_same(runner, results_of(runner, step), expected, step, rows)
    return step


def _compared_apart(moving: Runner, eager: Runner, batch: Batch) -> None:
    """Compare runners that have tables of their own."""
    with effects_undone(eager):
        expected = results_of(eager, eager.replay(batch))
    with effects_undone(moving):
        step = moving.replay(batch)
        check_same(moving, results_of(moving, step), expected, step, "all")


def _check_moved(moving: Runner, current: dict[str, torch.Tensor], batch: Batch) -> None:
    with effects_undone(moving):
        moving.replay(batch)
    for name, table in current.items():
        before, current[name] = _slots(moving), table.clone()
        try:
            _refused(StaleTableError, name, moving, batch)
        finally:
            current[name] = table
        changed = first_difference(before, _slots(moving))
        assert changed is None, f"table {name!r} moved and the step was refused, but it wrote: {changed}"


def _refused(kind: type[Exception], name: str, runner: Runner, batch: Batch) -> None:
    """Replay a batch that must be refused by an error that names a slot or table."""
    try:
        runner.replay(batch)
    except kind as error:
        if repr(name) not in str(error):
            raise AssertionError(f"the refusal does not name {name!r}: {error}") from error
    else:
        raise AssertionError(f"the step was not refused; expected {kind.__name__} naming {name!r}")


def _slots(runner: Runner) -> dict[str, Any]:
    view = runner.view(runner.space.ladder.largest)
    return {name: view[name].clone() for name in view}


def _glued_at(contract: PrepContract | None, key: Mapping[str, Any]) -> bool:
    if contract is None or not contract.host_free:
        return False
    counted = any(mode.counts_tokens for mode in contract.modes)
    uniform = counted or key["bucket"][2] or contract.ragged
    return key["mode"] in {mode.value for mode in contract.modes} and bool(uniform)


_ALL = (capture, padded_equals_eager, unpadded_rows, idle, moved_table, overwritten_source, refused_batch)
PARTS: dict[str, Callable[[Backend], None]] = {part.__name__: part for part in _ALL}
