"""Whatever a prep did not declare and reads is named, wherever it keeps it; contents are always put back."""

from __future__ import annotations

import functools
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import graphglue as gg
from graphglue.audit import exposed, garbage, holdings, poison, trial
from graphglue.audit.certificate import Verdict
from graphglue.audit.subject import Subject
from tests.unit.audit.subjects import contract, good, make_runner, slots, table

pytestmark = pytest.mark.usefixtures("frozen_imports")

Prep = Callable[[Any], Any]
OUT = {"out": "request"}


def audited(prep: Prep, outputs: dict[str, str] = OUT, **options: Any) -> Subject:
    changes = {"outputs": outputs, "reads": {"seq_lens": 1, "rows": 0}, **options.pop("changes", {})}
    (subject,) = Subject.of(make_runner(prep, declared=contract(**changes), **options))
    return subject


def judged(prep: Prep, outputs: dict[str, str] = OUT, **options: Any) -> tuple[Verdict, str]:
    verdict, found = poison.run(audited(prep, outputs, **options))
    return verdict, "\n".join(map(str, found))


def test_the_correct_prep_passes_and_says_what_was_run() -> None:
    verdict, text = judged(good, {"pages": "request"})
    assert verdict is Verdict.PASS
    assert text == "5 steps run under garbage"


# Tensors that were not declared, in every place Python has for them.

GLOBAL = torch.arange(64)
NESTED = {"deep": [SimpleNamespace(table=torch.arange(64))]}


def closed() -> Prep:
    secret = torch.arange(64)
    return lambda view: {"out": secret[view.seq_lens]}


def defaulted() -> Prep:
    def prep(view: Any, secret: Any = torch.arange(64)) -> Any:  # noqa: B008
        return {"out": secret[view.seq_lens]}

    return prep


class Backend:
    def __init__(self) -> None:
        self.secret = torch.arange(64)

    def prep(self, view: Any) -> Any:
        return {"out": self.secret[view.seq_lens]}

    def __call__(self, view: Any) -> Any:
        return self.prep(view)


def helped(view: Any) -> Any:
    return GLOBAL[view.seq_lens]


def partial() -> Prep:
    return functools.partial(lambda secret, view: {"out": secret[view.seq_lens]}, torch.arange(64))


@functools.lru_cache
def hidden() -> torch.Tensor:
    return torch.arange(64)


PLACES: dict[str, tuple[Callable[[], Prep], str]] = {
    "closure": (closed, "closure variable 'secret' (int64[64])"),
    "default argument": (defaulted, "default argument 'secret'"),
    "bound self": (lambda: Backend().prep, "self.secret"),
    "callable object": (Backend, "self.secret"),
    "global": (lambda: lambda view: {"out": GLOBAL[view.seq_lens]}, "global 'GLOBAL'"),
    "global of a function it calls": (lambda: lambda view: {"out": helped(view)}, "global 'helped': global 'GLOBAL'"),
    "containers": (
        lambda: lambda view: {"out": NESTED["deep"][0].table[view.seq_lens]},
        "global 'NESTED'['deep'][0].table",
    ),
    "partial": (partial, "arguments[0]"),
    "out of sight of Python": (
        lambda: lambda view: {"out": hidden()[view.seq_lens]},
        "a tensor that aten::index reads at ",
    ),
}


@pytest.mark.parametrize("place", PLACES)
def test_an_undeclared_table_is_named_wherever_it_is_kept(place: str) -> None:
    make, name = PLACES[place]
    verdict, text = judged(make())
    assert verdict is Verdict.FAIL
    assert f"with legal garbage in {name}" in text
    assert "leaf 'out', real row 0: " in text
    assert "aten::index: " in text
    assert "test_poison.py:" in text
    assert "[int64[64]]" in text or ", int64[64]" in text


def test_the_same_table_declared_passes() -> None:
    secret = torch.arange(64)
    prep = lambda view: {"out": view.tables.secret[view.seq_lens]}  # noqa: E731
    tables = {"table": table(), "secret": secret}
    assert judged(prep, tables=tables, changes={"tables": ("secret",)})[0] is Verdict.PASS


def test_a_tensor_that_does_not_show_in_the_result_passes() -> None:
    scratch, unused = torch.zeros(64, dtype=torch.int64), torch.ones(5)

    def prep(view: Any) -> Any:
        assert unused is not None
        used = scratch[: view.bucket.requests]
        used.copy_(view.seq_lens)
        return {"out": used + 1}

    verdict, text = judged(prep)
    assert verdict is Verdict.PASS
    assert "reached beside slots and tables: [\"closure variable 'scratch'\", \"closure variable 'unused'\"]" in text


@pytest.mark.parametrize("value", [torch.tensor(3), torch.tensor(0), torch.zeros(1), torch.tensor([True])], ids=str)
def test_one_value_is_poisoned_too(value: torch.Tensor) -> None:
    assert judged(lambda view: {"out": view.seq_lens + value})[0] is Verdict.FAIL


@pytest.mark.parametrize("of", [torch.sum, torch.amax, torch.amin, torch.argmax, torch.std], ids=lambda of: of.__name__)
def test_what_an_order_does_not_change_still_shows(of: Callable[[torch.Tensor], torch.Tensor]) -> None:
    values = torch.tensor([2.0, 7.0, 5.0, 11.0])
    assert judged(lambda view: {"out": view.seq_lens + of(values)})[0] is Verdict.FAIL


def test_each_of_several_tensors_is_named() -> None:
    one, other, idle = torch.arange(64), torch.arange(64), torch.arange(64)
    verdict, text = judged(lambda view: {"out": one[view.seq_lens] + other[view.rows] + idle.shape[0]})
    assert verdict is Verdict.FAIL
    assert "'one'" in text
    assert "'other'" in text
    assert "'idle'" not in text


def test_an_index_that_is_kept_stays_in_range() -> None:
    rows = torch.tensor([1, 0])
    verdict, text = judged(lambda view: {"out": view.seq_lens[:1].expand(2)[rows][:1] + rows.sum() + view.rows})
    assert verdict is Verdict.FAIL
    assert "raised" not in text


# The memory around what was handed in.


def test_slots_beyond_the_bucket_are_poisoned() -> None:
    def faulty(view: Any) -> Any:
        return {"out": view.seq_lens + view.seq_lens.as_strided((4,), (1,)).sum()}

    verdict, text = judged(faulty)
    assert verdict is Verdict.FAIL
    assert "slot 'seq_lens' beyond the bucket" in text
    assert judged(lambda view: {"out": view.seq_lens + view.seq_lens[0]})[0] is Verdict.PASS


@pytest.mark.parametrize("row_dim", [0, 1])
@pytest.mark.parametrize("adopted", [False, True])
def test_all_kinds_of_slot_memory_go_on_beyond_the_bucket(row_dim: int, adopted: bool) -> None:
    shape = (3, 6) if row_dim else (6, 3)
    storage = torch.zeros(shape, dtype=torch.int32) if adopted else None
    wide = gg.Slot(
        "wide", "request", torch.int32, 0, inner=(3,), row_dim=row_dim, valid=(1, 9), storage=storage, missing="pad"
    )
    subject = audited(good, {"pages": "request"}, with_slots=[*slots(), wide])
    key = subject.keys[0]
    handed, rest = subject.arena.targets(key.bucket)["wide"], exposed.beyond(subject, key)
    (behind,) = [one for one in rest if "'wide'" in one.name]
    before = handed.clone()
    with garbage.overwritten([(behind.memory, torch.full_like(behind.memory, 7))]):
        assert torch.equal(handed, before)
        largest = subject.arena.targets(subject.keys[-1].bucket)["wide"]
        assert int((largest == 7).sum()) == largest.numel() - handed.numel()


def test_a_fill_that_copies_too_much_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    subject = audited(lambda view: {"out": view.seq_lens + view.seq_lens[-1]})
    assert poison.run(subject)[0] is Verdict.PASS
    plain = Subject.fill

    def careless(self: Subject, key: Any, raw: Any, sources: Any) -> None:
        plain(self, key, raw, sources)
        if "seq_lens" in sources:
            part, source = self.arena.targets(key.bucket)["seq_lens"], sources["seq_lens"]
            whole = source.as_strided((min(part.numel(), source.untyped_storage().nbytes() // 8),), (1,))
            part[: whole.numel()].copy_(whole)

    monkeypatch.setattr(Subject, "fill", careless)
    verdict, found = poison.run(subject)
    assert verdict is Verdict.FAIL
    assert "garbage behind the real rows of sources ['seq_lens']" in "\n".join(map(str, found))


def test_a_fill_that_leaves_old_tails_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    subject = audited(lambda view: {"out": view.seq_lens * 1})
    plain = Subject.fill

    def forgetful(self: Subject, key: Any, raw: Any, sources: Any) -> None:
        part = self.arena.targets(key.bucket)["seq_lens"]
        before = part.clone()
        plain(self, key, raw, sources)
        part[raw.requests :] = before[raw.requests :]

    monkeypatch.setattr(Subject, "fill", forgetful)
    assert poison.run(subject)[0] is Verdict.FAIL


# Outputs.


def test_rows_that_no_run_writes_are_found() -> None:
    def faulty(view: Any) -> Any:
        out = torch.empty(view.bucket.requests, 2, dtype=torch.int64)
        out[:, 0] = view.seq_lens
        return {"out": out}

    def twin(view: Any) -> Any:
        out = torch.empty(view.bucket.requests, 2, dtype=torch.int64)
        out.copy_(view.seq_lens[:, None])
        return {"out": out}

    verdict, text = judged(faulty)
    assert verdict is Verdict.FAIL
    assert "in the outputs before the run, leaf 'out', real row 0, element [0, 1]" in text
    assert judged(twin)[0] is Verdict.PASS


def test_memory_that_is_allocated_and_not_written_is_found_behind_other_operations() -> None:
    def prep(of: Callable[[torch.Tensor], torch.Tensor]) -> Prep:
        return lambda view: {"out": torch.where(view.seq_lens > 0, view.seq_lens, 0) + of(view.seq_lens)[:1] % 7}

    for unwritten in (torch.empty_like, lambda lens: lens.new_empty(3), lambda lens: torch.empty(2, dtype=lens.dtype)):
        verdict, text = judged(prep(unwritten))
        assert verdict is Verdict.FAIL
        assert "allocated and not written, leaf 'out', real row 0" in text
        assert "test_poison.py:" in text
    assert judged(prep(lambda lens: torch.empty_like(lens).fill_(3)))[0] is Verdict.PASS


def test_kept_outputs_are_fine_if_each_run_writes_all_of_them() -> None:
    kept = torch.zeros(4, dtype=torch.int64)

    def twin(view: Any) -> Any:
        return {"out": torch.add(view.seq_lens, 1, out=kept[: view.bucket.requests])}

    def faulty(view: Any) -> Any:
        return {"out": kept[: view.bucket.requests].add_(view.seq_lens)}

    assert judged(twin)[0] is Verdict.PASS
    verdict, text = judged(faulty)
    assert verdict is Verdict.FAIL
    assert "closure variable 'kept'" in text


def test_a_memoised_result_is_found() -> None:
    memo: dict[Any, Any] = {}

    def rows(view: Any) -> Any:
        if view.bucket not in memo:
            memo[view.bucket] = view.seq_lens + 1
        return {"out": memo[view.bucket]}

    verdict, text = judged(rows)
    assert verdict is Verdict.FAIL
    assert "leaf 'out' is not computed by a run" in text

    def read(view: Any) -> Any:
        return {"out": rows(view)["out"] * 2}

    memo.clear()
    verdict, text = judged(read)
    assert verdict is Verdict.FAIL
    assert "closure variable 'memo'" in text

    def fixed(view: Any) -> Any:
        if "total" not in memo:
            memo["total"] = view.seq_lens.sum()
        return {"out": view.seq_lens + 1, "total": memo["total"]}

    memo.clear()
    verdict, text = judged(fixed, {"out": "request", "total": "fixed"})
    assert verdict is Verdict.FAIL
    assert "leaf 'total' is not computed by a run" in text


def test_a_constant_that_is_returned_as_it_is_is_unknown() -> None:
    workspace = torch.zeros(16)
    verdict, text = judged(
        lambda view: {"out": view.seq_lens + 1, "workspace": workspace}, {"out": "request", "workspace": "fixed"}
    )
    assert verdict is Verdict.UNKNOWN
    assert "closure variable 'workspace'" in text
    verdict, _ = judged(lambda view: {"out": view.seq_lens + 1, "rows": workspace[: view.bucket.requests]}, {
        "out": "request", "rows": "request",
    })  # fmt: skip
    assert verdict is Verdict.FAIL


def test_results_that_are_not_numbers_are_computed_all_the_same() -> None:
    assert judged(lambda view: {"out": view.seq_lens * float("nan")})[0] is Verdict.PASS
    assert judged(lambda view: {"out": view.seq_lens == view.seq_lens, "n": None, "k": 3})[0] is Verdict.PASS
    assert judged(lambda view: {"out": view.seq_lens, "t": view.tables.table})[0] is Verdict.PASS


# Steady and whole.


def test_state_that_goes_on_from_run_to_run_is_found() -> None:
    count = torch.zeros(1, dtype=torch.int64)
    verdict, text = judged(lambda view: {"out": view.seq_lens + count.add_(1)})
    assert verdict is Verdict.FAIL
    assert "two runs of one step differ" in text
    assert "closure variable 'count'" in text


def test_random_numbers_are_seeded_and_host_counters_are_not_poisons_business() -> None:
    assert judged(lambda view: {"out": view.seq_lens + torch.randint(9, (1,))})[0] is Verdict.PASS
    calls: list[int] = []
    verdict, text = judged(lambda view: (calls.append(1), {"out": view.seq_lens + len(calls)})[1])
    assert verdict is Verdict.UNKNOWN
    assert "eager: two runs of one step differ" in text


def test_contents_are_put_back_even_if_the_prep_raises() -> None:
    secret, weights = torch.arange(8), torch.nn.Linear(2, 2)
    before, weight = secret.clone(), weights.weight.detach().clone()

    def prep(view: Any) -> Any:
        if int(secret[0]):
            raise RuntimeError("poisoned")
        return {"out": view.seq_lens + weights.weight.detach().sum().to(torch.int64)}

    verdict, text = judged(prep)
    assert verdict is Verdict.FAIL
    assert f"it raised RuntimeError: poisoned (at {__file__}:" in text
    assert torch.equal(secret, before)
    assert torch.equal(weights.weight, weight)


def test_what_can_not_be_recorded_is_run_eagerly_and_not_passed() -> None:
    verdict, text = judged(lambda view: {"out": view.seq_lens + int(view.seq_lens[0])})
    assert verdict is Verdict.UNKNOWN
    assert "not recorded" in text
    assert judged(lambda view: {"out": view.seq_lens + GLOBAL[int(view.seq_lens[0])]})[0] is Verdict.FAIL


def test_the_runners_own_memory_is_never_written_and_reading_it_fails() -> None:
    live = table()
    runner = make_runner(
        lambda view: {"out": live[view.rows, 3]}, declared=contract(outputs=OUT), tables={"table": live}
    )
    storage = live.untyped_storage()
    version = live._version
    written: list[int] = []
    (subject,) = Subject.of(runner)
    with pytest.MonkeyPatch.context() as patch:
        plain = garbage.overwritten

        def noted(changes: Any) -> Any:
            changes = list(changes)
            written.extend(memory.untyped_storage().data_ptr() for memory, _ in changes)
            return plain(changes)

        patch.setattr(trial, "overwritten", noted)
        verdict, found = poison.run(subject)
    assert verdict is Verdict.FAIL
    text = "\n".join(map(str, found))
    assert "is the runner's live table table, read past the view" in text
    assert f"{__file__}:" in text
    assert written
    assert storage.data_ptr() not in written
    assert live._version == version


def test_a_live_table_that_is_only_held_passes() -> None:
    live = table()
    engine = SimpleNamespace(req_to_token=live)
    prep = lambda view: {"out": view.tables.table[view.rows, 3] + 0 * len(vars(engine))}  # noqa: E731
    (subject,) = Subject.of(make_runner(prep, declared=contract(outputs=OUT), tables={"table": live}))
    assert poison.run(subject)[0] is Verdict.PASS


def test_what_is_too_large_or_too_odd_to_poison_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    class Odd(torch.Tensor):
        pass

    held = [torch.zeros(100, dtype=torch.int64), torch.zeros(3).as_subclass(Odd), torch.zeros(2, device="meta")]
    prep = lambda view: {"out": view.seq_lens + 0 * len(held)}  # noqa: E731
    verdict, text = judged(prep)
    assert verdict is Verdict.UNKNOWN
    assert "not poisoned, or not as a whole: [\"closure variable 'held'[1]\"]" in text
    held.pop(1)
    assert judged(prep)[0] is Verdict.PASS
    monkeypatch.setattr(exposed, "_MAX_TOTAL_BYTES", 400)
    assert "closure variable 'held'[0] (int64[100])" in judged(prep)[1]
    monkeypatch.undo()
    monkeypatch.setattr(garbage, "MAX_BYTES", 400)
    assert judged(prep)[0] is Verdict.UNKNOWN
    monkeypatch.undo()
    monkeypatch.setattr(holdings, "_MAX_OBJECTS", 2)
    verdict, text = judged(prep)
    assert verdict is Verdict.UNKNOWN
    assert "more objects than were walked" in text


def test_tables_that_a_prep_changes_are_put_back_before_each_run() -> None:
    def prep(view: Any) -> Any:
        before = view.tables.table[view.rows, 0].clone()
        view.tables.table[view.rows, 0] += 1
        return {"out": before}

    subject = audited(prep, changes={"effects": ("table",)})
    before = subject.tables["table"].clone()
    assert poison.run(subject)[0] is Verdict.PASS
    assert torch.equal(subject.tables["table"], before)


def test_idle_and_ragged_steps_are_run_too() -> None:
    secret = torch.arange(64)
    only_idle = lambda view: {"out": torch.where((view.rows == 0).all(), secret[view.seq_lens], view.seq_lens)}  # noqa: E731
    few = [*slots()[:1], gg.Slot("rows", "request", torch.int64, 0, index_of="table", valid=(1, 9)), *slots()[2:]]
    assert judged(only_idle, with_slots=few)[0] is Verdict.PASS
    verdict, text = judged(only_idle, with_slots=few, changes={"idle": "glue"})
    assert verdict is Verdict.FAIL
    assert "raw 0 and 0" in text

    only_ragged = lambda view: {"out": view.seq_lens + (0 if view.bucket.row_tokens else secret[3])}  # noqa: E731
    changes = {"ragged": True}
    verdict, text = judged(only_ragged, tokens_per_request=2, changes=changes, ladder=(2,))
    assert verdict is Verdict.FAIL
    assert "ragged" in text


def test_the_check_can_fail_only_through_its_comparison(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trial.Way, "difference", lambda *_: None)
    assert judged(closed())[0] is Verdict.PASS
