"""A glued step equals the eager one: at its padded extents in every bit, and in its real rows without padding.

Slots, ladder, contract, prep, forward and batches are all generated. The eager side calls the same prep
on fresh tensors that the model of ``test_fill`` filled; no code of the library has touched them.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import Phase, event, given, settings
from hypothesis import strategies as st

import graphglue as gg
from graphglue.device import fill
from graphglue.testing import strategies as ggst

from .test_fill import Model, bits_of, tensor_of, write_bits
from .test_routing import captured_at, decide_prep, word_step

pytestmark = pytest.mark.usefixtures("frozen_imports")

TABLE_ROWS = 5
View = Any  # a gg.View, or the twin's namespace: both are read by attribute


@dataclass(frozen=True)
class Rows:
    """One step of a generated prep: what it computes from a view, rows on the first dimension.

    Attributes:
        axis: what its rows count: request, token, offset, or fixed for a result without rows.
        kind: integer, bool or float.
        row_wise: real rows do not depend on how far the batch is padded.
        text: the same in words, for reports.
        compute: view -> tensor.
    """

    axis: str
    kind: str
    row_wise: bool
    text: str
    compute: Callable[[View], torch.Tensor]

    def __repr__(self) -> str:
        return f"<{self.text}: {self.kind} per {self.axis}{'' if self.row_wise else ', depends on padding'}>"

    def then(self, text: str, change: Callable[[torch.Tensor, View], torch.Tensor], **fields: Any) -> Rows:
        """Go on with another operation."""
        compute = self.compute
        return replace(self, text=text.format(self.text), compute=lambda view: change(compute(view), view), **fields)


def read(slot: gg.Slot) -> Rows:
    """Begin with a slot."""
    kind = "bool" if slot.dtype == torch.bool else "float" if slot.dtype.is_floating_point else "integer"
    axis = slot.axis.value if slot.axis in ("request", "token", "offset") else "fixed"
    counts_padding = slot.value in (gg.BUCKET_REQUESTS, gg.BUCKET_TOKENS, gg.RANK_COUNTS)
    whole = Rows(axis, kind, not counts_padding, slot.name, lambda view: getattr(view, slot.name))
    return (
        whole.then(f"{{}}.movedim({slot.row_dim}, 0)", lambda x, v: x.movedim(slot.row_dim, 0))
        if slot.row_dim
        else whole
    )


def owner(view: View) -> torch.Tensor:
    """Give the request of each token, on the device: padded tokens belong to the last request."""
    tokens = torch.arange(view.bucket.tokens)
    request = torch.searchsorted(view.indptr[1:].to(torch.int64).contiguous(), tokens, right=True)
    return request.clamp(max=view.bucket.requests - 1)


def summed_from_zero(rows: torch.Tensor) -> torch.Tensor:
    """Give 0 and the running sums."""
    return torch.cat([rows.new_zeros((1, *rows.shape[1:])), rows.cumsum(0)])


def starts(rows: torch.Tensor, view: View) -> torch.Tensor:
    """Mark where requests start among the tokens; pad requests mark some token too."""
    marks = torch.zeros(view.bucket.tokens, dtype=torch.int64)
    return marks.scatter_(0, view.indptr[:-1].to(torch.int64).clamp(max=view.bucket.tokens - 1), 1)


def per_request(sums: torch.Tensor, view: View) -> torch.Tensor:
    """Sum tokens by request, from running sums: pad requests have no token and get 0."""
    indptr = view.indptr.to(torch.int64)
    return sums[indptr[1:]] - sums[indptr[:-1]]


@st.composite
def changes(draw: st.DrawFn, rows: Rows) -> Rows:
    """Draw one operation that fits."""
    a, b = draw(st.integers(-3, 5)), draw(st.integers(1, 4))
    wide = rows.then("{}", lambda x, v: x.to(torch.int64))
    found = [rows.then("{}.clone()", lambda x, v: x.clone())]
    if rows.kind == "bool":
        found += [
            rows.then("~{}", lambda x, v: ~x),
            wide.then("int({})", lambda x, v: x, kind="integer"),
        ]
    if rows.kind == "float":
        # Arithmetic on halves converts, and torch's scalar and vector kernels convert NaN to different bits.
        found += [
            rows.then("{}*2+1", lambda x, v: x * 2 + 1, row_wise=False),
            rows.then("float({})", lambda x, v: x.to(torch.float32), row_wise=False),
            rows.then("isnan({})", lambda x, v: x.isnan(), kind="bool"),
            rows.then("({}>0)", lambda x, v: x > 0, kind="bool"),
        ]
    if rows.kind == "integer":
        found += [
            wide.then(f"({{}}*{a}+{b})", lambda x, v: x * a + b),
            wide.then(f"({{}}//{b})", lambda x, v: x // b),
            wide.then(f"int32({{}}%{b})", lambda x, v: x.remainder(b).to(torch.int32)),
            wide.then(f"clamp({{}},{a},9)", lambda x, v: x.clamp(a, 9)),
            wide.then(f"abs_over({{}},{a})", lambda x, v: torch.where(x > a, x, -x)),
            wide.then(f"({{}}>{a})", lambda x, v: x > a, kind="bool"),
            wide.then(f"{{}}.add_({a})", lambda x, v: x.clone().add_(a)),
            wide.then("sum_inner({})", lambda x, v: x.flatten(1).sum(1) if x.dim() > 1 else x),
        ]
    if rows.kind == "integer" and rows.axis != "fixed":
        fixed = {"axis": "fixed", "row_wise": False}
        found += [
            wide.then("sum({})", lambda x, v: x.sum(), **fixed),
            wide.then("max({})", lambda x, v: torch.cat([x.reshape(-1), x.new_zeros(1)]).amax(), **fixed),
            wide.then("sorted({})", lambda x, v: x.sort(dim=0).values, row_wise=False),
            wide.then("table[{}]", lambda x, v: v.tables.table[x.remainder(TABLE_ROWS)]),
        ]
    found += _across_axes(rows, wide)
    return draw(st.sampled_from(found))


def _across_axes(rows: Rows, wide: Rows) -> list[Rows]:
    """List the operations that lead to another axis."""
    found = []
    if rows.axis == "request":
        found += [
            rows.then("{}[owner]", lambda x, v: x[owner(v)], axis="token"),
            rows.then("last_of({})", lambda x, v: x.flip(0), row_wise=False),
        ]
    if rows.axis == "request" and rows.kind == "integer":
        found += [
            wide.then("cu({})", lambda x, v: summed_from_zero(x), axis="offset"),
            wide.then("exclusive_cu({})", lambda x, v: x.cumsum(0) - x),
            wide.then("real({})", lambda x, v: torch.where(_first(x, v.num_real), x, -1)),
            wide.then("starts", starts, axis="token", row_wise=False),
        ]
    if rows.axis == "token" and rows.kind == "integer":
        found += [
            wide.then("by_request({})", lambda x, v: per_request(summed_from_zero(x), v), axis="request"),
            wide.then("positions+{}", lambda x, v: x + _along(torch.arange(x.shape[0]) - v.indptr[owner(v)], x)),
        ]
    if rows.axis == "offset" and rows.kind == "integer":
        found.append(wide.then("diff({})", lambda x, v: x[1:] - x[:-1], axis="request"))
    return found


def _along(column: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
    return column.view(-1, *[1] * (rows.dim() - 1))


def _first(rows: torch.Tensor, count: torch.Tensor) -> torch.Tensor:
    return _along(torch.arange(rows.shape[0]) < count, rows)


@st.composite
def row_programs(draw: st.DrawFn, slots: Sequence[gg.Slot]) -> Rows:
    """Draw a slot and a few operations on it."""
    rows = read(draw(st.sampled_from(slots)))
    for _ in range(draw(st.integers(0, 4))):
        rows = draw(changes(rows))
    return rows


class Program:
    """A generated prep and the forward that reads its metadata."""

    def __init__(self, leaves: list[Rows], nested: bool, outputs: list[int], all_tokens: bool) -> None:
        self.leaves, self.nested, self.num_runs = leaves, nested, 0
        tokens = [i for i in outputs if leaves[i].axis == "token"]
        self.by_default = all_tokens and bool(tokens)
        self.outputs = tokens if self.by_default else outputs

    def __repr__(self) -> str:
        return f"Program({self.leaves}, outputs={self.outputs})"

    def prep(self, view: View) -> Any:
        """Compute the metadata."""
        self.num_runs += 1
        computed = [leaf.compute(view) for leaf in self.leaves]
        if not self.nested:
            return {f"m{i}": leaf for i, leaf in enumerate(computed)}
        return {"first": computed[0], "rest": tuple(computed[1:]), "rows": view.bucket.requests, "none": None}

    def pick(self, metadata: Any, position: int) -> torch.Tensor:
        """Find a leaf in the metadata."""
        if not self.nested:
            return metadata[f"m{position}"]
        return metadata["rest"][position - 1] if position else metadata["first"]

    def names(self) -> dict[str, str]:
        """Give the contract's names of the leaves, and their axes."""
        spell = (lambda i: f"rest.{i - 1}" if i else "first") if self.nested else (lambda i: f"m{i}")
        return {spell(i): leaf.axis for i, leaf in enumerate(self.leaves)}

    def forward(self, view: View, metadata: Any) -> dict[str, torch.Tensor]:
        """Compute something from the metadata and a slot."""
        outputs = {}
        for position in self.outputs:
            leaf = self.pick(metadata, position)
            outputs[f"o{position}"] = leaf * 3 + view.num_real if leaf.dtype == torch.int64 else leaf.clone()
        return outputs

    def output_axes(self) -> dict[str, str] | None:
        """Give the axes of the forward's outputs; None where all are tokens."""
        if self.by_default:
            return None
        return {f"o{i}": {"offset": "bucket"}.get(self.leaves[i].axis, self.leaves[i].axis) for i in self.outputs}


@st.composite
def programs(draw: st.DrawFn, slots: Sequence[gg.Slot]) -> Program:
    """Draw a prep of one to four leaves, and a forward."""
    leaves = draw(st.lists(row_programs(slots), min_size=1, max_size=4))
    outputs = draw(st.lists(st.sampled_from(range(len(leaves))), unique=True, min_size=1))
    return Program(leaves, draw(st.booleans()), sorted(outputs), draw(st.booleans()))


def backbone() -> list[gg.Slot]:
    """List slots that every program may use: token boundaries, table rows, and the real count."""
    return [
        gg.Slot("indptr", axis="offset", dtype=torch.int32, pad=gg.REPEAT_LAST),
        gg.Slot("rows", axis="request", dtype=torch.int64, pad=0, index_of="table", valid=(0, TABLE_ROWS - 1)),
        gg.Slot("num_real", axis="fixed", dtype=torch.int64, pad=0, value=gg.RAW_REQUESTS),
    ]


@st.composite
def machines(draw: st.DrawFn, **config: Any) -> SimpleNamespace:
    """Draw a runner, its program and its model; nothing is captured yet."""
    ladder = draw(ggst.ladders(max_size=6, max_length=2) | st.just([2, 5]))
    width = draw(st.integers(1, 4))
    adopt = (max(ladder), max(ladder) * width, 1)
    drawn = draw(ggst.slot_tables(max_size=3, adopt=adopt, index_of={"table": TABLE_ROWS}))
    slots = draw(st.permutations(backbone() + drawn))
    program = draw(programs([slot for slot in slots if slot.name != "num_real"]))
    contract = draw(ggst.contracts(slots, tables=["table"], outputs=program.names()))
    contract = contract.model_copy(update={"host_free": True, "padded": True})
    table = draw(ggst.contents(torch.int64, (TABLE_ROWS, 2), (-9, 9)))
    registry = gg.Registry()
    registry.register(contract)(program.prep)
    runner = gg.Runner(
        slots=slots, ladder=ladder, prep="prep", registry=registry, tables={"table": table},
        forward=program.forward, tokens_per_request=width, output_axes=program.output_axes(),
        config=gg.RunnerConfig(warmups=1, clone_outputs=draw(st.booleans()), **config),
    )  # fmt: skip
    return SimpleNamespace(
        runner=runner, program=program, contract=contract, table=table, slots=slots, ladder=ladder, width=width,
        model=Model(slots, ladder, width), addresses={},
    )  # fmt: skip


@st.composite
def machine_batches(draw: st.DrawFn, machine: SimpleNamespace) -> gg.Batch:
    """Draw a batch that the machine's runner can hold, with true token boundaries."""
    slots = [slot for slot in machine.slots if slot.name != "indptr"]
    declared = sorted(machine.contract.modes)
    common = {"tokens_per_request": machine.width, "modes": [*declared, *declared, gg.Mode.DECODE, gg.Mode.VERIFY]}
    widths, ragged = draw(st.sampled_from([(), (), (1, 2, 3)])), machine.contract.ragged or draw(st.booleans())
    batch = draw(ggst.batches(slots, machine.ladder, **common, widths=widths, ragged=ragged))
    if machine.model.bucket(batch) is None:
        batch = draw(ggst.batches(slots, machine.ladder, **common, ragged=False))
    requests, tokens, each = machine.model.counts(batch)
    if requests == 0:
        return batch
    boundaries = np.cumsum([0, *(batch.row_tokens or [each] * requests)]).astype(np.int32)
    assert boundaries[-1] == tokens
    return replace(batch, sources={**batch.sources, "indptr": boundaries})


def twin_view(machine: SimpleNamespace, bucket: gg.Bucket, extents: gg.Bucket) -> SimpleNamespace:
    """Build what an eager step sees: fresh tensors with the model's contents.

    Args:
        machine: the runner and its model, filled at ``bucket``.
        bucket: the bucket of the fill.
        extents: how many of its rows to show: the bucket's, or the real ones.
    """
    tensors = {}
    for slot in machine.slots:
        rows = machine.model.memory[slot.name].by_row(machine.model.rows(slot, *bucket[:2]))
        if slot.axis == "fixed":
            tensors[slot.name] = tensor_of(rows[0], slot.dtype)
            continue
        cut = np.moveaxis(rows[: machine.model.rows(slot, *extents[:2])], 0, slot.row_dim)
        # Strides as in the arena: they choose between torch's scalar and vector kernels.
        static = machine.runner.view(bucket)[slot.name].narrow(slot.row_dim, 0, cut.shape[slot.row_dim])
        tensors[slot.name] = torch.empty_strided(cut.shape, static.stride(), dtype=slot.dtype)
        write_bits(tensors[slot.name], cut)
    tables = SimpleNamespace(table=machine.table.clone())
    return SimpleNamespace(**tensors, tables=tables, bucket=extents)


def same_bits(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Compare dtype, shape and bits."""
    return one.dtype == other.dtype and one.shape == other.shape and np.array_equal(bits_of(one), bits_of(other))


def check_step(machine: SimpleNamespace, batch: gg.Batch, data: st.DataObject) -> None:
    """Run one step and its two eager twins, and compare all there is."""
    program, counts, bucket = machine.program, machine.model.counts(batch), machine.model.bucket(batch)
    runs = program.num_runs
    with torch.inference_mode(data.draw(st.booleans(), label="inference mode")):
        step = machine.runner.replay(batch)
    worded = word_step(batch, gg.RunnerConfig(), machine.ladder, machine.width)
    state = gg.State.CAPTURED if captured_at(machine.contract, worded, machine.width) else gg.State.COLD
    prep = SimpleNamespace(contract=machine.contract, glue="on", generic=False, certified=None, state=state)
    assert (step.decision.prep, step.decision.reason) == decide_prep(worded, prep)
    assert step.decision.bucket == bucket
    assert program.num_runs - runs == (step.decision.prep is gg.Route.EAGER)
    event(f"prep {step.decision.prep.value}: {step.decision.reason.value}")

    machine.model.fill(batch, bucket)
    machine.model.take_nan_payloads(batch, bucket, machine.runner.view(bucket))
    check_against_padded(machine, step, bucket, gg.Bucket(*counts))
    if counts[0]:
        check_against_unpadded(machine, step, bucket, gg.Bucket(*counts))
    check_slots(machine, batch, bucket)
    check_addresses(machine, step)


def check_slots(machine: SimpleNamespace, batch: gg.Batch, bucket: gg.Bucket) -> None:
    """Compare what the step left in the slots with the model."""
    view = machine.runner.view(bucket)
    for slot in machine.slots:
        expected = machine.model.memory[slot.name].at(machine.model.rows(slot, *bucket[:2]))
        assert np.array_equal(bits_of(view[slot.name]), expected), f"slot {slot.name!r} of {batch} at {bucket}"


def check_against_padded(machine: SimpleNamespace, step: gg.Step, bucket: gg.Bucket, raw: gg.Bucket) -> None:
    """Compare every bit of the metadata, and the outputs, with the same prep and forward run eagerly."""
    program, view = machine.program, twin_view(machine, bucket, bucket)
    metadata = program.prep(view)
    outputs = program.forward(view, metadata)
    for position, leaf in enumerate(program.leaves):
        seen, expected = program.pick(step.metadata, position), program.pick(metadata, position)
        assert same_bits(seen, expected), f"metadata {leaf}: {seen}\nthe padded twin has {expected}"
    if program.nested:
        assert (step.metadata["rows"], step.metadata["none"]) == (bucket.requests, None)
    assert step.outputs.keys() == outputs.keys()
    for position in program.outputs:
        leaf, seen, expected = program.leaves[position], step.outputs[f"o{position}"], outputs[f"o{position}"]
        if leaf.axis in ("request", "token"):
            expected = expected[: raw.requests if leaf.axis == "request" else raw.tokens]
        assert same_bits(seen, expected), f"output of {leaf}: {seen}\nthe padded twin has {expected}"


def check_against_unpadded(machine: SimpleNamespace, step: gg.Step, bucket: gg.Bucket, raw: gg.Bucket) -> None:
    """Compare the real rows of what does not depend on padding with an eager step that has none."""
    program, view = machine.program, twin_view(machine, bucket, raw)
    metadata = program.prep(view)
    outputs = program.forward(view, metadata)
    rows = {"request": raw.requests, "token": raw.tokens, "offset": raw.requests + 1}
    for position, leaf in enumerate(program.leaves):
        if not leaf.row_wise:
            continue
        pairs = [(program.pick(step.metadata, position), program.pick(metadata, position))]
        if position in program.outputs:
            pairs.append((step.outputs[f"o{position}"], outputs[f"o{position}"]))
        for seen, expected in pairs:
            real = seen[: rows[leaf.axis]] if leaf.axis in rows else seen
            assert same_bits(real, expected), f"real rows of {leaf}: {real}\nwithout padding {expected}"


def check_addresses(machine: SimpleNamespace, step: gg.Step) -> None:
    """Hold a key's metadata to its addresses, outside all slots: its forward graph reads them, whoever wrote there."""
    if step.decision.forward is gg.Route.GRAPH and not machine.runner.config.clone_outputs:
        leaves = range(len(machine.program.leaves))
        seen = [machine.program.pick(step.metadata, position).data_ptr() for position in leaves]
        assert machine.addresses.setdefault(step.decision.key, seen) == seen
        view = machine.runner.view(step.decision.bucket)
        slots = {view[slot.name].untyped_storage().data_ptr() for slot in machine.slots}
        for position in leaves:
            leaf = machine.program.pick(step.metadata, position)
            assert leaf.untyped_storage().data_ptr() not in slots or not leaf.numel()


def check_machine(data: st.DataObject, before_replays: Callable[[], Any] = lambda: None) -> None:
    """Capture a generated runner, and replay generated batches on it."""
    machine = data.draw(machines(), label="machine")
    with torch.inference_mode(data.draw(st.booleans(), label="capture in inference mode")):
        machine.runner.capture()
    before_replays()
    for _ in range(data.draw(st.integers(1, 4), label="steps")):
        check_step(machine, data.draw(machine_batches(machine), label="batch"), data)
        if data.draw(st.booleans(), label="change the table"):
            machine.table.add_(1)
    machine.runner.close()


@given(data=st.data())
def test_a_padded_step_equals_the_eager_one_and_its_real_rows_the_unpadded_one(data: st.DataObject) -> None:
    check_machine(data)


def test_the_property_fails_without_the_tail_fill(monkeypatch: pytest.MonkeyPatch) -> None:
    """Show that the test can fail by the metadata alone: without the reset, padded rows are the last step's."""
    monkeypatch.setattr(sys.modules[__name__], "check_slots", lambda *_: None)

    @settings(max_examples=100, database=None, derandomize=True, phases=[Phase.generate], print_blob=False)
    @given(data=st.data())
    def check(data: st.DataObject) -> None:
        with monkeypatch.context() as patch:
            check_machine(data, lambda: patch.setattr(fill, "_write_tail", lambda *_: None))

    with pytest.raises(AssertionError, match="the padded twin has"):
        check()
