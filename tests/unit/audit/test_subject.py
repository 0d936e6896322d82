from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import graphglue as gg
from graphglue.audit.subject import Subject, Unseen
from graphglue.core.keys import KeySpace
from graphglue.errors import BindError, CaptureError
from graphglue.testing import strategies
from tests.unit.audit.subjects import CONTEXT, TABLE_ROWS, contract, good, make_runner, make_subject, slots, table


def snapshot(runner: gg.Runner) -> dict[str, torch.Tensor]:
    views = runner.arena.targets(runner.space.bucket(runner.space.ladder.largest))
    return {name: tensor.clone() for name, tensor in {**views, **runner.tables}.items()}


def test_nothing_that_a_subject_does_reaches_the_runner() -> None:
    def prep(view: Any) -> Any:
        view.tables.table[view.rows, 0] = view.seq_lens
        return good(view)

    runner = make_runner(prep, declared=contract(effects=("table",)))
    runner.capture()
    before, keys = snapshot(runner), runner.stats()["keys"]
    (subject,) = Subject.of(runner)
    for key in subject.keys:
        for seed, raw in enumerate(subject.raws(key)):
            subject.fill(key, raw, subject.sources(raw, seed))
            subject.call(subject.view(key))
            recording = subject.record(key)
            recording.replay()
            subject.exact_view(raw, subject.sources(raw, seed), key)
    after = snapshot(runner)
    assert all(torch.equal(before[name], after[name]) for name in before)
    assert runner.stats()["keys"] == keys
    assert not torch.equal(subject.tables["table"], before["table"]), "the prep did change the twin"
    subject.restore()
    assert torch.equal(subject.tables["table"], before["table"])


def test_the_twin_of_an_adopted_buffer_is_another_buffer_of_the_same_geometry() -> None:
    buffer = torch.zeros(8, 3, dtype=torch.int64)[:, :2]
    slot = gg.Slot("x", axis="request", dtype=torch.int64, pad=7, inner=(2,), storage=buffer)
    runner = make_runner(
        lambda view: view.x + 1, declared=contract(reads={"x": 7}, tables=(), outputs={}), with_slots=[slot]
    )
    before = buffer.clone()
    (subject,) = Subject.of(runner)
    key, raw = subject.keys[-1], gg.Bucket(3, 3, 1)
    subject.fill(key, raw, subject.sources(raw, 0))
    view = subject.view(key)
    assert view.x.stride() == buffer[:4].stride()
    assert view.x[3].tolist() == [7, 7]
    assert torch.equal(buffer, before)


def test_a_prep_s_view_has_what_it_declares_and_nothing_else() -> None:
    subject = make_subject()
    view = subject.view(subject.keys[0])
    assert (set(view), set(view.tables)) == ({"seq_lens", "rows"}, {"table"})
    with pytest.raises(gg.ContractError, match="read 'locations', which it did not declare"):
        _ = view.locations


def test_a_fill_gives_heads_and_pads_and_an_exact_view_only_heads() -> None:
    subject = make_subject()
    key, raw = subject.keys[-1], gg.Bucket(3, 3, 1)
    sources = subject.sources(raw, 5)
    subject.fill(key, raw, sources)
    view, exact = subject.view(key), subject.exact_view(raw, sources, key)
    assert torch.equal(view.seq_lens[:3], sources["seq_lens"])
    assert view.seq_lens[3:].tolist() == [1]
    assert torch.equal(exact.rows, sources["rows"])
    assert exact.bucket == raw


@pytest.mark.parametrize("ladder", [(1, 2, 4), (3,), (100,)])
def test_raws_are_every_count_of_a_small_bucket_and_both_ends_of_a_large_one(ladder: tuple[int, ...]) -> None:
    subject = make_subject(ladder=ladder)
    for key in subject.keys:
        counts = [raw.requests for raw in subject.raws(key)]
        assert all(raw.tokens == raw.requests for raw in subject.raws(key))
        if key.requests <= 64:
            assert counts == list(range(1, key.requests + 1))
        else:
            assert {1, key.requests - 1, key.requests} < set(counts)
            assert len(counts) < key.requests


def test_a_prep_that_is_not_right_for_padding_has_full_buckets_only() -> None:
    subject = make_subject(declared=contract(padded=False))
    assert [subject.raws(key) for key in subject.keys] == [[key.bucket] for key in subject.keys]


def test_idle_steps_are_looked_at_where_they_are_glued() -> None:
    idle = gg.Bucket(0, 0, 0)
    assert all(idle in subject.raws(subject.keys[0]) for subject in [make_subject(declared=contract(idle="glue"))])
    subject = make_subject(declared=contract(idle="glue"))
    assert idle not in make_subject().raws(subject.keys[0])
    subject.fill(subject.keys[-1], idle, subject.sources(idle, 0))
    assert subject.view(subject.keys[-1]).seq_lens.tolist() == [1] * 4


def test_ragged_keys_have_uneven_splits() -> None:
    subject = make_subject(declared=contract(ragged=True), tokens_per_request=3)
    ragged = [key for key in subject.keys if key.row_tokens == 0]
    assert ragged
    for key in ragged:
        for raw in subject.raws(key):
            sources = subject.sources(raw, 1)
            assert raw.row_tokens == 0
            assert sum(sources.row_tokens) == raw.tokens <= key.tokens
            assert min(sources.row_tokens) >= 1
            assert len(set(sources.row_tokens)) > 1
            assert sources["offsets"].tolist()[-1] == raw.tokens
            assert sources["locations"].shape == (raw.tokens,)


def test_extend_keys_count_tokens() -> None:
    config = gg.RunnerConfig(max_requests=4)
    subject = make_subject(declared=contract(modes={gg.Mode.EXTEND}), ladder=[8], config=config)
    (key,) = subject.keys
    raws = subject.raws(key)
    assert {raw.tokens for raw in raws} == set(range(1, 9))
    assert {raw.requests for raw in raws} == {1, 2, 3, 4}
    for raw in raws:
        subject.fill(key, raw, subject.sources(raw, 0))


def test_a_prep_that_is_never_glued_has_no_keys() -> None:
    assert make_subject(declared=contract(host_free=False)).keys == []
    assert make_subject(config=gg.RunnerConfig(glue={"prep": "off"})).keys == []
    assert (
        make_subject(declared=contract(modes={gg.Mode.VERIFY}), config=gg.RunnerConfig(modes={gg.Mode.DECODE})).keys
        == []
    )


@given(st.data())
def test_sources_are_legal_exact_and_reproducible(data: st.DataObject) -> None:
    drawn = data.draw(strategies.slot_tables(index_of={"table": TABLE_ROWS}, max_size=3))
    reads = {slot.name: slot.pad for slot in drawn}
    prep = contract(reads=reads, outputs={})
    subject = make_subject(lambda view: view.tables.table + 0, declared=prep, with_slots=drawn, ladder=[4])
    raw, seed = gg.Bucket(data.draw(st.integers(1, 4)), 0, 1), data.draw(st.integers(0, 9))
    raw = raw._replace(tokens=raw.requests)
    one, other = subject.sources(raw, seed), subject.sources(raw, seed)
    assert set(one) == {slot.name for slot in drawn if slot.value is None}
    for slot in drawn:
        if slot.value is not None:
            continue
        values = one[slot.name]
        assert torch.equal(values, other[slot.name])
        assert values.dtype is slot.dtype
        assert values.shape == slot.shape(slot.rows(raw.requests, raw.tokens))
        if slot.valid is not None and values.numel():
            assert values.min() >= slot.valid[0]
            assert values.max() <= slot.valid[1]
    subject.fill(subject.keys[0], raw, one)


def test_index_slots_hold_different_rows_and_never_the_sink() -> None:
    subject = make_subject(ladder=[16])
    for seed in range(20):
        rows = subject.sources(gg.Bucket(16, 16, 1), seed)["rows"]
        assert len(set(rows.tolist())) == 16
        assert 0 not in rows
        assert rows.max() < TABLE_ROWS


def test_offsets_are_running_sums_of_the_tokens() -> None:
    subject = make_subject(tokens_per_request=2)
    assert subject.sources(gg.Bucket(3, 6, 2), 0)["offsets"].tolist() == [0, 2, 4, 6]


def test_slots_of_which_nobody_says_what_is_legal_are_named() -> None:
    guessed = [gg.Slot("seq_lens", axis="request", dtype=torch.int64, pad=1), *slots()[1:]]
    assert make_subject(with_slots=guessed).guessed == ("seq_lens",)
    assert make_subject().guessed == ()
    values = make_subject(with_slots=guessed, ladder=[64]).sources(gg.Bucket(64, 64, 1), 0)["seq_lens"]
    assert values.max() < TABLE_ROWS, "a guess is a row of every table in every dimension"
    guessed[0] = gg.Slot("seq_lens", axis="request", dtype=torch.int64, pad=1, capture=5000)
    values = make_subject(with_slots=guessed, ladder=[64]).sources(gg.Bucket(64, 64, 1), 0)["seq_lens"]
    assert CONTEXT < values.max() <= 5000, "a capture value is the worst case"


def batch(*lengths: int, width: int = 1) -> gg.Batch:
    """Make a batch whose slots belong together: row 10 + n has length n, its locations are 100 n and on."""
    locations = [100 * length + token for length in lengths for token in range(width)]
    sources = {"seq_lens": list(lengths), "rows": [10 + length for length in lengths], "locations": locations}
    offsets = torch.arange(len(lengths) + 1, dtype=torch.int32) * width
    return gg.Batch(len(lengths), {**sources, "offsets": offsets}, num_tokens=len(locations))


def test_values_are_rows_of_the_engine_s_own_batches_and_belong_together() -> None:
    subject = make_subject(batches=[batch(3, 5, width=2), batch(7, width=2)], tokens_per_request=2)
    seen = set()
    for seed in range(10):
        sources = subject.sources(gg.Bucket(3, 6, 2), seed)
        assert torch.equal(sources["rows"], sources["seq_lens"] + 10)
        assert torch.equal(sources["locations"].view(3, 2)[:, 0], sources["seq_lens"] * 100)
        assert sources["offsets"].tolist() == [0, 2, 4, 6]
        assert sorted(sources["seq_lens"].tolist()) == [3, 5, 7], "no request twice while there are enough"
        seen.add(tuple(sources["seq_lens"].tolist()))
    assert len(seen) > 1
    assert subject.guessed == ()


def test_more_requests_than_the_batches_have_are_dealt_twice() -> None:
    subject = make_subject(batches=[batch(3)])
    assert subject.sources(gg.Bucket(4, 4, 1), 0)["seq_lens"].tolist() == [3, 3, 3, 3]


def test_uneven_requests_come_as_they_were_given() -> None:
    uneven = gg.Batch(
        2,
        {
            "seq_lens": [4, 6],
            "rows": [1, 2],
            "locations": [1, 2, 3],
            "offsets": torch.tensor([0, 2, 3], dtype=torch.int32),
        },
        row_tokens=[2, 1],
    )
    subject = make_subject(batches=[uneven], declared=contract(ragged=True), tokens_per_request=2)
    (key,) = [key for key in subject.keys if key.row_tokens == 0 and key.requests == 2]
    assert subject.raws(key) == [gg.Bucket(2, 3, 0)]
    sources = subject.sources(gg.Bucket(2, 3, 0), 3)
    assert sources.row_tokens == (2, 1)
    assert sources["locations"].tolist() == [1, 2, 3]


def test_a_batch_that_does_not_fit_is_refused() -> None:
    with pytest.raises(BindError, match="slot 'seq_lens': the source is"):
        make_subject(batches=[gg.Batch(2, {"seq_lens": [1.5, 2.5]})])


def test_a_planner_s_values_replace_drawn_ones() -> None:
    seen: list[tuple[int, gg.Bucket]] = []

    def plan(step: gg.Batch, bucket: gg.Bucket) -> dict[str, Any]:
        seen.append((step.num_requests, bucket))
        return {"seq_lens": [9] * step.num_requests}

    subject = make_subject(plan=plan)
    key, raw = subject.keys[-1], gg.Bucket(2, 2, 1)
    subject.fill(key, raw, subject.sources(raw, 0))
    assert subject.view(key).seq_lens.tolist() == [9, 9, 1, 1]
    subject.exact_view(raw, subject.sources(raw, 0), key)
    assert seen == [(2, key.bucket), (2, raw)]


def test_a_planner_that_does_not_take_drawn_values_leaves_the_prep_unseen() -> None:
    def plan(step: gg.Batch, bucket: gg.Bucket) -> dict[str, Any]:
        raise KeyError("cascade")

    subject = make_subject(plan=plan)
    with pytest.raises(Unseen, match=r"plan of prep 'prep' raised KeyError on drawn sources.*hand batches"):
        subject.fill(subject.keys[0], gg.Bucket(1, 1, 1), subject.sources(gg.Bucket(1, 1, 1), 0))


def test_a_recording_replays_what_the_slots_hold() -> None:
    subject = make_subject()
    key, raw = subject.keys[-1], gg.Bucket(3, 3, 1)
    with subject.session():
        one, other = subject.record(key), subject.record(key)
    for seed in range(3):
        sources = subject.sources(raw, seed)
        subject.fill(key, raw, sources)
        one.replay()
        other.replay()
        assert torch.equal(one.outputs["positions"][:3], sources["seq_lens"] - 1)
        assert torch.equal(other.outputs["pages"], good(subject.view(key))["pages"])


@pytest.mark.parametrize(
    ("prep", "said"),
    [
        (lambda view: view.seq_lens.tolist(), "tolist reads a tensor on the host"),
        (lambda view: {"x": object()}, "warming up: ContractError: prep 'prep' returned 'x' of type object"),
        (lambda view: 1 // 0, "warming up: ZeroDivisionError"),
    ],
)
def test_a_prep_that_can_not_be_recorded_says_why(prep: Any, said: str) -> None:
    subject = make_subject(prep)
    with pytest.raises(CaptureError, match=said):
        subject.record(subject.keys[0])


def test_memory_is_named_by_slot_and_table_of_the_twin_and_of_the_runner() -> None:
    runner = make_runner(tables={"table": table()})
    (subject,) = Subject.of(runner)
    view = subject.view(subject.keys[-1])
    assert str(subject.region_of(view.seq_lens[2:])) == "slot seq_lens"
    assert str(subject.region_of(view.tables.table[5])) == "table table"
    assert str(subject.region_of(runner.view(4).rows)) == "live slot rows"
    assert str(subject.region_of(runner.tables["table"])) == "live table table"
    assert subject.region_of(torch.zeros(4)) is None
    (locations,) = [region for region in subject.regions() if region.name == "locations"]
    assert not subject.reads(locations)
    assert subject.reads(next(region for region in subject.regions() if region.name == "rows"))
    (region,) = [region for region in subject.regions() if region.kind == "table"]
    assert region.end - region.begin == CONTEXT * TABLE_ROWS * 8


def test_the_runner_s_memory_is_held_so_that_its_addresses_stay_its_own() -> None:
    subject = make_subject()  # nobody else keeps the runner
    taken = [torch.empty(256, dtype=torch.uint8) for _ in range(200)]
    assert all(subject.region_of(tensor) is None for tensor in taken)


def test_a_prep_without_a_contract_sees_everything_and_is_only_glued_unpadded() -> None:
    runner = gg.Runner(slots=slots(), ladder=[2], prep=good, tables={"table": table()})
    (subject,) = Subject.of(runner)
    assert subject.contract is None
    assert set(subject.view(subject.keys[0])) == {slot.name for slot in slots()}
    assert subject.raws(subject.keys[0]) == [gg.Bucket(2, 2, 1)]
    assert isinstance(subject.space, KeySpace)


def test_a_runner_shows_its_registrations_and_tables_and_can_not_be_changed_through_them() -> None:
    runner = make_runner()
    (registration,) = runner.registrations
    assert (registration.name, registration.prep, registration.contract) == ("prep", good, contract())
    runner.tables["table"] = torch.zeros(1)
    runner.tables.pop("table")
    assert torch.equal(runner.tables["table"], table())
    for name in ("registrations", "tables"):
        with pytest.raises(AttributeError):
            setattr(runner, name, ())


def test_a_prep_runs_on_pads_or_it_does_not() -> None:
    def picky(view: Any) -> Any:
        if not bool((view.seq_lens == 1).all()):
            raise ValueError("not a pad")
        return good(view)

    assert make_subject(picky).runs_on_pads()
    assert not make_subject(lambda view: 1 // 0).runs_on_pads()
