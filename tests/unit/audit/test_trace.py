"""Each fault is named with its operation, its line in this file, and the memory it is about; correct preps pass."""

from __future__ import annotations

import functools
import inspect
import re
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch

import graphglue as gg
from graphglue.audit import trace
from graphglue.audit.certificate import Finding, Verdict
from graphglue.audit.fakes import imitate
from graphglue.audit.subject import Unseen
from graphglue.audit.witness import observe
from graphglue.errors import ContractError
from graphglue.preps import paged_decode
from tests.unit.audit.subjects import contract, good, make_runner, make_subject, table

Prep = Callable[[Any], Any]
STATE: dict[str, Any] = {}
CONSTANT = torch.arange(64)


def traced(prep: Prep, **options: Any) -> tuple[Verdict, list[Finding]]:
    STATE.clear()
    subject = make_subject(prep, **options)
    with subject.session():
        return trace.run(subject)


def line_of(prep: Prep, mark: str = "# here") -> str:
    lines, first = inspect.getsourcelines(prep)
    return f"{__file__}:{first + next(n for n, line in enumerate(lines) if mark in line)}"


# Host reads.


def reads_item(view: Any) -> Any:
    longest = view.seq_lens.max().item()  # here
    return {**good(view), "positions": view.seq_lens - longest}


def reads_list(view: Any) -> Any:
    _ = view.seq_lens.tolist()  # here
    return good(view)


def reads_array(view: Any) -> Any:
    _ = view.seq_lens.numpy().max()  # here
    return good(view)


def reads_bool(view: Any) -> Any:
    if view.seq_lens.max() > 5:  # here
        return {**good(view), "positions": view.seq_lens}
    return good(view)


def moves_to_the_host(view: Any) -> Any:
    _ = view.tables.table.cpu()  # here
    return good(view)


def compares(view: Any) -> Any:
    _ = torch.equal(view.seq_lens, view.rows)  # here
    return good(view)


# Shapes, uploads, random numbers.


def selects_by_mask(view: Any) -> Any:
    _ = view.seq_lens[view.seq_lens > 3]  # here
    return good(view)


def finds_nonzero(view: Any) -> Any:
    _ = torch.nonzero(view.seq_lens)  # here
    return good(view)


def uploads_a_list(view: Any) -> Any:
    scale = torch.tensor([1, 2, 3])  # here
    return {**good(view), "scale": scale * 2}


def uploads_through_an_index(view: Any) -> Any:
    first = view.tables.table[[0, 1]]  # here
    return {**good(view), "first": first}


def draws(view: Any) -> Any:
    noise = torch.rand(view.bucket.requests)  # here
    return {**good(view), "noise": noise}


# Writes.


def changes_a_slot(view: Any) -> Any:
    view.seq_lens.sub_(1)  # here
    return {**good(view), "positions": view.seq_lens + 0}


def changes_a_slot_by_out(view: Any) -> Any:
    torch.add(view.rows, 1, out=view.seq_lens)  # here
    return good(view)


def changes_a_table(view: Any) -> Any:
    view.tables.table[view.rows, 0] = view.seq_lens  # here
    return good(view)


# Memory from outside.


def reads_a_constant(view: Any) -> Any:
    return {**good(view), "positions": view.seq_lens + CONSTANT[: view.bucket.requests]}  # here


def keeps_a_buffer(view: Any) -> Any:
    buffer = STATE.setdefault("buffer", torch.zeros(64, dtype=torch.int64))[: view.bucket.requests]
    torch.sub(view.seq_lens, 1, out=buffer)  # here
    return {**good(view), "positions": buffer}


def reads_the_last_call(view: Any) -> Any:
    last = STATE.get(view.bucket, view.seq_lens * 0)
    now = last + view.seq_lens  # here
    STATE[view.bucket] = now
    return {**good(view), "positions": now}


def reads_beyond_its_bucket(view: Any) -> Any:
    longer = view.seq_lens.as_strided((4,), (1,))
    return {**good(view), "most": longer.max(dim=0, keepdim=True).values}  # here


FAULTS: list[tuple[Prep, str, str | None, str | None]] = [
    (reads_item, "item: reads a tensor on the host", "int64[]", None),
    (reads_list, "tolist: reads a tensor on the host", "int64[4]", "slot seq_lens"),
    (reads_array, "numpy: reads a tensor on the host", "int64[4]", "slot seq_lens"),
    (reads_bool, "__bool__: reads a tensor on the host", "bool[]", None),
    (moves_to_the_host, "cpu: reads a tensor on the host", "int64[32, 64]", "table table"),
    (compares, "equal: reads a tensor on the host", "int64[4]", "slot seq_lens"),
    (selects_by_mask, "gives a result whose shape depends on contents", "int64[4]", "slot seq_lens"),
    (finds_nonzero, "nonzero.*shape depends on contents", "int64[4]", "slot seq_lens"),
    (uploads_a_list, "tensor: takes contents from host memory", None, None),
    (uploads_through_an_index, "takes contents from host memory", "int64[32, 64]", "table table"),
    (draws, "rand.*draws random numbers", None, None),
    (changes_a_slot, "sub_: writes into slot 'seq_lens'", "int64[4]", "slot seq_lens"),
    (changes_a_slot_by_out, "writes into slot 'seq_lens'", "int64[4]", "slot seq_lens"),
    (
        changes_a_table,
        "writes into table 'table', which contract.effects does not name",
        "int64[32]",
        "table table",
    ),
    (reads_a_constant, "neither a slot, a table nor made in this call", "int64[4]", "address 0x"),
    (keeps_a_buffer, "writes in place into a buffer that it keeps and does not declare", "int64[4]", "address 0x"),
    (reads_the_last_call, "reads a tensor that an earlier call made and kept", "int64[4]", "address 0x"),
]


@pytest.mark.parametrize(("prep", "said", "tensor", "region"), FAULTS, ids=[fault[0].__name__ for fault in FAULTS])
def test_a_fault_is_named_with_its_line_its_tensor_and_its_memory(
    prep: Prep, said: str, tensor: str | None, region: str | None
) -> None:
    verdict, found = traced(prep, ladder=[4])
    assert verdict is Verdict.FAIL
    finding = found[0]
    assert re.search(said, str(finding)), finding
    assert finding.where == line_of(prep)
    assert tensor is None or finding.tensor == tensor
    assert region is None or str(finding.region).startswith(region)


def test_values_beyond_the_bucket_are_another_step_s() -> None:
    verdict, found = traced(reads_beyond_its_bucket, ladder=[2, 4])
    assert verdict is Verdict.FAIL
    assert "beyond its bucket" in found[0].text
    assert traced(reads_beyond_its_bucket, ladder=[4])[0] is Verdict.PASS


def test_a_slot_or_table_that_the_contract_does_not_name_is_named_with_the_error() -> None:
    def prep(view: Any) -> Any:
        return {**good(view), "positions": view.locations}

    with pytest.raises(ContractError, match="read 'locations', which it did not declare"):
        traced(prep)


def test_what_a_prep_did_before_it_raised_is_told_first() -> None:
    def prep(view: Any) -> Any:
        count = view.seq_lens.max().item()
        return {**good(view), "positions": view.seq_lens + torch.zeros(count + 64)}

    verdict, found = traced(prep, ladder=[4])
    assert verdict is Verdict.FAIL
    assert found[0].op is not None
    assert "item" in found[0].op
    assert "RuntimeError" in found[-1].text


def test_a_memoised_result_is_a_leaf_that_nothing_made() -> None:
    def prep(view: Any) -> Any:
        if view.bucket not in STATE:
            STATE[view.bucket] = view.seq_lens - 1
        return {**good(view), "positions": STATE[view.bucket]}

    verdict, found = traced(prep)
    assert verdict is Verdict.FAIL
    assert "returns leaf 'positions' that no operation of this call made: it was kept" in found[0].text


def test_what_another_thread_computes_is_a_leaf_that_nothing_made() -> None:
    def prep(view: Any) -> Any:
        result: list[torch.Tensor] = []
        thread = threading.Thread(target=lambda: result.append(view.seq_lens - 1))
        thread.start()
        thread.join()
        return {**good(view), "positions": result[0]}

    verdict, found = traced(prep)
    assert verdict is Verdict.FAIL
    assert "returns leaf 'positions' that no operation of this call made" in found[0].text


def test_the_runner_s_own_slots_and_tables_are_told_from_other_memory() -> None:
    def slot(view: Any) -> Any:
        return {**good(view), "positions": STATE["runner"].view(view.bucket).seq_lens - 1}

    def own_table(view: Any) -> Any:
        return {**good(view), "pages": STATE["table"][view.rows, ::16]}

    for prep, said in ((slot, "reads live slot 'seq_lens' of the runner"), (own_table, "reads live table 'table'")):
        STATE["table"] = table()
        STATE["runner"] = make_runner(prep, tables={"table": STATE["table"]})
        (subject,) = trace.Subject.of(STATE["runner"])
        verdict, found = trace.run(subject)
        assert verdict is Verdict.FAIL
        assert said in found[0].text


# What is right.


def test_a_buffer_that_writes_names_may_be_filled_in_place_and_read_behind_that() -> None:
    def prep(view: Any) -> Any:
        buffer = STATE.setdefault("buffer", torch.zeros(64, dtype=torch.int64))[: view.bucket.requests]
        torch.sub(view.seq_lens, 1, out=buffer)
        return {**good(view), "positions": buffer, "doubled": buffer * 2}

    assert traced(prep, declared=contract(writes=("positions",)))[0] is Verdict.PASS
    assert traced(prep, declared=contract(writes=("pages",)))[0] is Verdict.FAIL


def test_a_buffer_that_is_read_before_it_is_written_carries_the_last_run() -> None:
    def prep(view: Any) -> Any:
        buffer = STATE.setdefault("buffer", torch.zeros(64, dtype=torch.int64))[: view.bucket.requests]
        buffer.add_(view.seq_lens)
        return {**good(view), "positions": buffer}

    verdict, found = traced(prep, declared=contract(writes=("positions",)))
    assert verdict is Verdict.FAIL
    assert "before this run has written it" in found[0].text


@pytest.mark.parametrize("writes", ["plan", "plan.positions"])
def test_a_leaf_inside_is_named_by_its_path_or_by_what_holds_it(writes: str) -> None:
    def prep(view: Any) -> Any:
        buffer = STATE.setdefault("buffer", torch.zeros(64, dtype=torch.int64))[: view.bucket.requests]
        return {"plan": {"positions": buffer.copy_(view.seq_lens)}}

    assert traced(prep, declared=contract(outputs={}, writes=(writes,)))[0] is Verdict.PASS
    assert traced(prep, declared=contract(outputs={}, writes=("pla",)))[0] is Verdict.FAIL


def test_a_table_that_effects_names_may_be_written() -> None:
    assert traced(changes_a_table, declared=contract(effects=("table",)))[0] is Verdict.PASS


def returns_a_slot(view: Any) -> Any:
    return {**good(view), "positions": view.seq_lens}


def reshapes_its_own_view(view: Any) -> Any:
    view.seq_lens.unsqueeze_(1)
    return {**good(view), "positions": view.seq_lens.squeeze(1) - 1}


def uses_numbers(view: Any) -> Any:
    steps = torch.arange(view.bucket.requests) + torch.tensor(3)
    return {**good(view), "positions": torch.where(view.seq_lens > 2, steps, 0), "width": 3}


def shapes_like_a_constant(view: Any) -> Any:
    return {**good(view), "positions": torch.zeros_like(CONSTANT[: view.bucket.requests]) + view.seq_lens}


def writes_into_its_own(view: Any) -> Any:
    positions = torch.empty_like(view.seq_lens)
    positions.copy_(view.seq_lens)
    positions[:1].add_(1)
    return {**good(view), "positions": positions.index_fill_(0, torch.arange(1), 4)}


class AsMethod:
    def prep(self, view: Any) -> Any:
        self.last = view.bucket
        return good(view)


CORRECT: list[Prep] = [
    good, returns_a_slot, reshapes_its_own_view, uses_numbers, shapes_like_a_constant, writes_into_its_own,
    AsMethod().prep, functools.partial(lambda step, view: {**good(view), "positions": view.seq_lens - step}, 2),
]  # fmt: skip


@pytest.mark.parametrize("prep", CORRECT)
def test_a_correct_prep_passes_and_says_what_was_looked_at(prep: Prep) -> None:
    verdict, found = traced(prep)
    assert (verdict, [str(one) for one in found][1:]) == (Verdict.PASS, []), found
    assert "operations at 3 keys" in found[0].text


def test_the_shipped_prep_passes() -> None:
    runner = gg.Runner(slots=paged_decode.slots(), ladder=[1, 4], prep="paged-decode", tables={"req_to_token": table()})
    (subject,) = trace.Subject.of(runner)
    assert trace.run(subject)[0] is Verdict.PASS


# What was not looked at.


@torch.library.custom_op("graphglue_tests::minus_one", mutates_args=())
def minus_one(lengths: torch.Tensor) -> torch.Tensor:
    return lengths - 1


@minus_one.register_fake
def _(lengths: torch.Tensor) -> torch.Tensor:
    return torch.empty_like(lengths)


def test_an_operation_that_is_not_torch_s_own_leaves_the_verdict_open() -> None:
    def prep(view: Any) -> Any:
        return {**good(view), "positions": minus_one(view.seq_lens)}

    verdict, found = traced(prep)
    assert verdict is Verdict.UNKNOWN
    assert "minus_one: is no operation of torch's own; what it does inside" in str(found[0])


def test_a_kernel_that_is_given_an_address_is_refused_as_on_the_tape() -> None:
    def prep(view: Any) -> Any:
        _ = view.seq_lens.data_ptr()
        return good(view)

    verdict, found = traced(prep)
    assert verdict is Verdict.FAIL
    assert "data_ptr: hands out an address" in str(found[0])


def test_a_prep_with_no_step_to_run_is_unseen() -> None:
    subject = make_subject(declared=contract(padded=False, ragged=True))
    subject.keys = [key for key in subject.keys if key.row_tokens == 0]
    with pytest.raises(Unseen, match="no step is served"):
        trace.run(subject)


def test_a_fault_at_one_key_of_many_is_found() -> None:
    def prep(view: Any) -> Any:
        if view.bucket.requests == 4:
            _ = view.seq_lens.tolist()
        return good(view)

    assert traced(prep, ladder=[1, 2, 4, 8])[0] is Verdict.FAIL
    assert traced(prep, ladder=[1, 2, 8])[0] is Verdict.PASS


# The run on fakes, which a GPU needs besides its capture.


def test_a_prep_that_needs_contents_fails_on_fakes() -> None:
    subject = make_subject(reads_item)
    verdict, finding = imitate(subject, subject.keys[0]) or (Verdict.PASS, Finding(text=""))
    assert verdict is Verdict.FAIL
    assert finding.where == line_of(reads_item)


def test_a_prep_that_runs_on_shapes_alone_passes_on_fakes() -> None:
    subject = make_subject(reads_a_constant)
    assert imitate(subject, subject.keys[0]) is None


def test_a_kernel_outside_torch_can_not_be_run_on_fakes() -> None:
    def prep(view: Any) -> Any:
        raise RuntimeError("no kernel image\nfor fakes")

    subject = make_subject(prep)
    verdict, finding = imitate(subject, subject.keys[0]) or (Verdict.PASS, Finding(text=""))
    assert verdict is Verdict.UNKNOWN
    assert finding.text.endswith("RuntimeError: no kernel image")


# The witness.


def test_a_run_is_the_same_wherever_its_memory_was_allocated() -> None:
    subject = make_subject(uses_numbers)
    key, raw = subject.keys[-1], gg.Bucket(3, 3, 1)
    subject.fill(key, raw, subject.sources(raw, 0))
    one = observe(subject, key)
    held = [torch.empty(4, dtype=torch.int64) for _ in range(50)]
    other = observe(subject, key)
    assert one.operations == other.operations
    assert one.returned == other.returned
    assert len(held) == 50
    assert not one.broken


def test_a_run_tells_which_result_an_operation_took() -> None:
    def prep(view: Any) -> Any:
        one, other = view.seq_lens + 1, view.seq_lens + 1
        return {**good(view), "positions": (other if STATE.get("other") else one) + 2}

    subject = make_subject(prep)
    STATE.clear()
    first = observe(subject, subject.keys[0])
    STATE["other"] = True
    second = observe(subject, subject.keys[0])
    assert first.operations != second.operations
