"""GlueGraphCache alone, as an engine's second rung: states, quarantine, the eager fallback, owned metadata."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from typing import Any

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensor

from graphglue import (
    Bucket,
    CaptureError,
    ClosedError,
    ContractError,
    GlueGraphCache,
    Mode,
    PrepContract,
    State,
    Tape,
    View,
)

LENS, TABLE = torch.zeros(8, dtype=torch.int64), torch.arange(100, 200)


@pytest.fixture(autouse=True)
def _fresh_values() -> None:
    LENS.copy_(torch.arange(1, 9))
    TABLE.copy_(torch.arange(100, 200))


def view(size: int) -> View:
    return View({"lens": LENS[:size]}, {"t": TABLE}, Bucket(size, size, 1), reader="prep 'p'")


def views(*sizes: int) -> dict[int, View]:
    return {size: view(size) for size in sizes}


def prep(seen: View) -> dict[str, torch.Tensor]:
    return {"pages": seen.tables.t[seen.lens], "positions": seen.lens - 1}


class Counting:
    """A prep that counts its calls, and does at call n what ``faults`` says for it."""

    def __init__(self, base: Callable[..., Any] = prep, fault: Callable[[View], None] = lambda seen: None) -> None:
        self.base, self.fault, self.calls = base, fault, 0

    def __call__(self, seen: View) -> Any:
        self.calls += 1
        self.fault(seen)
        return self.base(seen)


def plain(tree: Mapping[str, torch.Tensor]) -> dict[str, list[Any]]:
    return {name: leaf.tolist() for name, leaf in tree.items()}


def addresses(tree: Mapping[str, torch.Tensor]) -> dict[str, int]:
    return {name: leaf.data_ptr() for name, leaf in tree.items()}


# States.


def test_cold_warm_captured_and_cold_again() -> None:
    cache = GlueGraphCache(prep)
    assert (cache.state(4), cache.result(4), cache.has_result(4), cache.cause(4)) == (State.COLD, None, False, None)
    with Tape().session():
        cache.warm(4, view(4))
    assert cache.state(4) is State.WARM
    assert plain(cache.result(4)) == plain(prep(view(4)))
    assert cache.capture({8: view(8), 4: view(4)}) == [8, 4]
    assert (cache.state(8), cache.state(4)) == (State.CAPTURED, State.CAPTURED)
    cache.drop(4)
    assert (cache.state(4), cache.state(8)) == (State.COLD, State.CAPTURED)
    cache.reset()
    assert cache.state(8) is State.COLD
    assert cache.capture(views(8)) == [8]


def test_host_frozen_a_replay_runs_no_python_and_reads_live_values() -> None:
    counting = Counting()
    cache = GlueGraphCache(counting)
    cache.capture(views(8, 4))
    calls = counting.calls
    for start in (5, 50):
        LENS.copy_(torch.arange(start, start + 8))
        for size in (4, 8, 4):
            assert plain(cache.run(size, view(size))) == plain(prep(view(size)))
    TABLE.neg_()
    assert plain(cache.replay(8)) == plain(prep(view(8)))
    assert counting.calls == calls


@pytest.mark.parametrize("warmups", [1, 2, 5])
def test_every_key_warms_up_as_often_as_asked_before_the_first_is_recorded(warmups: int) -> None:
    """What a first call does has been done, at the same shapes, when a key is recorded (CAPTURE-FAIL-5)."""
    order: list[tuple[int, bool]] = []

    class Watching(Tape):
        inside = False

        def record(self, run: Any, *, strict: bool = True) -> Any:
            self.inside = True
            try:
                return super().record(run, strict=strict)
            finally:
                self.inside = False

    tape = Watching()

    def watched(seen: View) -> Any:
        order.append((seen.bucket.requests, tape.inside))
        return prep(seen)

    GlueGraphCache(watched, recorder=tape, warmups=warmups).capture(views(8, 4))
    warm, recorded = order[: 2 * warmups], order[2 * warmups :]
    assert sorted(warm) == sorted([(8, False), (4, False)] * warmups)
    assert recorded == [(8, True), (4, True)]


def test_a_recorded_key_is_not_recorded_twice() -> None:
    cache = GlueGraphCache(prep, name="meta")
    cache.capture(views(8))
    with pytest.raises(CaptureError, match=r"'meta': keys \[8\] are recorded already; reset\(\) first"):
        cache.capture(views(8, 4))
    assert cache.state(4) is State.COLD


def test_replay_of_a_key_that_is_not_recorded_is_refused() -> None:
    cache = GlueGraphCache(prep, name="meta")
    with pytest.raises(CaptureError, match=r"'meta': key 4 is cold; capture it, or use run\(\)"):
        cache.replay(4)


def test_use_after_close() -> None:
    cache = GlueGraphCache(prep, name="meta")
    cache.capture(views(4))
    cache.close()
    cache.close()
    uses: list[Callable[[], Any]] = [
        lambda: cache.run(4, view(4)),
        lambda: cache.replay(4),
        lambda: cache.eager(4, view(4)),
        lambda: cache.capture(views(4)),
        cache.maintain,
        lambda: cache.warm(4, view(4)),
    ]
    for use in uses:
        with pytest.raises(ClosedError, match="the cache of 'meta' was closed; build another one"):
            use()


def test_the_name_is_the_contract_s_or_the_callable_s() -> None:
    contract = PrepContract(name="paged", modes={Mode.DECODE})
    assert GlueGraphCache(prep).name == "prep"
    assert GlueGraphCache(prep, contract=contract).name == "paged"
    assert GlueGraphCache(prep, contract=contract, name="mine").name == "mine"


def test_keys_are_anything_hashable_and_arguments_anything() -> None:
    cache = GlueGraphCache(lambda tensor: tensor * 2)
    source = torch.arange(3)
    cache.capture({("decode", 3): source})
    source.add_(10)
    assert cache.run(("decode", 3), source).tolist() == [20, 22, 24]


# Quarantine and repair.


def fails_at(size: int, broken: dict[str, bool], how: str = "item") -> Callable[[View], None]:
    def fault(seen: View) -> None:
        if broken["now"] and seen.bucket.requests == size:
            if how == "item":
                seen.lens[0].item()
            else:
                raise RuntimeError("out of pages")

    return fault


@pytest.mark.parametrize("how", ["item", "raise"])
def test_failure_is_per_key_and_maintain_repairs_it(how: str, caplog: pytest.LogCaptureFixture) -> None:
    broken = {"now": True}
    counting = Counting(fault=fails_at(8, broken, how))
    cache = GlueGraphCache(counting, name="meta")
    with caplog.at_level(logging.WARNING, "graphglue"):
        assert cache.capture(views(8, 4)) == [4]
    assert (cache.state(8), cache.state(4)) == (State.QUARANTINED, State.CAPTURED)
    said = "item" if how == "item" else "RuntimeError: out of pages (at "
    assert said in (cache.cause(8) or "")
    assert f"{__file__}:" in (cache.cause(8) or "")  # the line that did it
    (line,) = [record.getMessage() for record in caplog.records]  # not again in the second warm-up
    assert "meta at 8" in line
    assert said in line
    LENS.mul_(2)
    assert plain(cache.run(4, view(4))) == plain(prep(view(4)))
    if how == "item":
        assert plain(cache.run(8, view(8))) == plain(prep(view(8)))
    else:
        with pytest.raises(RuntimeError, match="out of pages"):
            cache.run(8, view(8))

    assert cache.maintain() == []
    assert cache.state(8) is State.QUARANTINED
    broken["now"] = False
    assert cache.maintain() == [8]
    assert (cache.state(8), cache.cause(8)) == (State.CAPTURED, None)
    calls = counting.calls
    LENS.add_(3)
    assert plain(cache.run(8, view(8))) == plain(prep(view(8)))
    assert counting.calls == calls
    assert cache.maintain() == []


def test_the_static_result_survives_a_failed_recording_and_its_repair() -> None:
    broken = {"now": True}
    cache = GlueGraphCache(Counting(fault=fails_at(8, broken)))
    cache.capture(views(8, 4))
    kept = addresses(cache.result(8))
    LENS.mul_(3)
    result, changed = cache.eager(8, view(8))
    assert changed is None
    assert addresses(result) == kept
    assert plain(result) == plain(prep(view(8)))


def test_capture_raises_only_if_no_key_could_be_recorded() -> None:
    cache = GlueGraphCache(Counting(fault=lambda seen: seen.lens[0].item()), name="meta")
    with pytest.raises(CaptureError, match=r"'meta': no key could be recorded; the first cause: CaptureError: .*item"):
        cache.capture(views(8, 4))
    assert cache.state(8) is cache.state(4) is State.QUARANTINED
    assert plain(cache.run(8, view(8))) == plain(prep(view(8)))


def test_quarantine_by_hand_until_maintained() -> None:
    counting = Counting()
    cache = GlueGraphCache(counting)
    cache.capture(views(8))
    kept = addresses(cache.result(8))
    cache.quarantine(8, "shadow found a difference")
    assert "shadow found a difference" in (cache.cause(8) or "")
    calls = counting.calls
    LENS.add_(7)
    result = cache.run(8, view(8))
    assert counting.calls == calls + 1
    assert plain(result) == plain(prep(view(8)))
    assert addresses(result) == kept
    assert cache.maintain() == [8]
    LENS.add_(7)
    assert plain(cache.run(8, view(8))) == plain(prep(view(8)))


def test_a_prep_that_changes_its_mind_between_runs_is_quarantined() -> None:
    turn = {"n": 0}

    def fickle(seen: View) -> dict[str, torch.Tensor]:
        turn["n"] += 1
        return {"a": seen.lens + 1} if turn["n"] < 3 else {"a": (seen.lens + 1).to(torch.int32)}

    cache = GlueGraphCache(fickle, warmups=2)
    with pytest.raises(CaptureError, match="recorded another result than it warmed up to"):
        cache.capture(views(4))
    assert cache.state(4) is State.QUARANTINED


@pytest.mark.parametrize(
    ("outputs", "made", "said"),
    [
        ({"a": "request"}, lambda seen: {"b": seen.lens + 1}, r"declares output 'a', but returned tensors \['b'\]"),
        ({"a": "offset"}, lambda seen: {"a": seen.lens + 1}, r"'a' on axis offset, 5 rows at this bucket"),
        ({}, lambda seen: {"a": object()}, "returned 'a' of type object, whose tensors can not be seen"),
        ({}, lambda seen: {"a": seen.undeclared}, "prep 'p' read 'undeclared', which it did not declare"),
    ],
)  # fmt: skip
def test_a_broken_declaration_is_raised_and_not_quarantined_away(outputs: Any, made: Any, said: str) -> None:
    contract = PrepContract(name="p", modes={Mode.DECODE}, outputs=outputs)
    with pytest.raises(ContractError, match=said):
        GlueGraphCache(made, contract=contract).capture(views(4))


# The eager fallback.


def test_plan_stale_the_eager_fallback_writes_into_the_static_metadata() -> None:
    cache = GlueGraphCache(prep)
    cache.capture(views(8, 4))
    kept = addresses(cache.result(4))
    for number in range(4):
        LENS.copy_(torch.arange(number, number + 8))
        result, changed = cache.eager(4, view(4)) if number % 2 else (cache.replay(4), None)
        assert changed is None
        assert result is cache.result(4)
        assert addresses(result) == kept
        assert plain(result) == plain(prep(view(4)))


CHANGES: dict[str, tuple[Callable[[dict[str, Any]], Any], str]] = {
    "dtype": (lambda m: {**m, "a": m["a"].to(torch.int32)}, r"leaf 'a' is int32\[4\] on cpu, captured int64\[4\]"),
    "shape": (lambda m: {**m, "a": m["a"][:2]}, r"leaf 'a' is int64\[2\]"),
    "structure": (lambda m: {"a": m["a"]}, "structure"),
    "more": (lambda m: {**m, "new": m["a"]}, "structure"),
    "number": (lambda m: {**m, "max_len": 9}, "leaf 'max_len' is int 9, captured int 5"),
    "none": (lambda m: {**m, "max_len": None}, "leaf 'max_len' is NoneType None|structure"),
}


@pytest.mark.parametrize("change", CHANGES)
def test_meta_shape_metadata_of_another_form_is_reported_and_left_apart(change: str) -> None:
    alter, said = CHANGES[change]
    now = {"changed": False}

    def changing(seen: View) -> Any:
        metadata = {"a": seen.lens * 2, "max_len": 5}
        return alter(metadata) if now["changed"] else metadata

    cache = GlueGraphCache(changing)
    cache.capture(views(4))
    cache.replay(4)
    static = cache.result(4)["a"].tolist()
    now["changed"] = True
    LENS.add_(1)
    fresh, changed = cache.eager(4, view(4))
    assert changed is not None
    with pytest.raises(AssertionError, match=said):
        raise AssertionError(changed)
    assert fresh is not cache.result(4)
    assert cache.result(4)["a"].tolist() == static
    now["changed"] = False
    assert cache.eager(4, view(4)) == (cache.result(4), None)
    assert cache.result(4)["a"].tolist() == (LENS[:4] * 2).tolist()


def test_a_key_that_never_ran_gives_the_fresh_result() -> None:
    cache = GlueGraphCache(prep)
    result, changed = cache.eager(4, view(4))
    assert changed is None
    assert plain(result) == plain(prep(view(4)))
    assert cache.state(4) is State.COLD
    assert not cache.has_result(4)


def test_an_eager_call_that_raises_leaves_the_static_metadata() -> None:
    broken = {"now": False}
    cache = GlueGraphCache(Counting(fault=fails_at(4, broken, "raise")))
    cache.capture(views(4))
    static = plain(cache.replay(4))
    broken["now"] = True
    LENS.add_(9)
    with pytest.raises(RuntimeError, match="out of pages"):
        cache.eager(4, view(4))
    assert plain(cache.result(4)) == static
    assert cache.state(4) is State.CAPTURED
    assert plain(cache.replay(4)) == plain(prep(view(4)))


# Who owns the metadata.


@pytest.mark.parametrize(
    "borrow",
    [
        lambda seen: {"m": seen.lens},
        lambda seen: {"m": seen.lens[:]},
        lambda seen: {"m": seen.lens.view(2, -1)},
        lambda seen: {"m": seen.tables.t},
        lambda seen: {"m": seen.tables.t[10:20]},
        lambda seen: {"m": seen.lens, "again": seen.lens},
    ],
    ids=["slot", "slice", "reshaped", "table", "part of a table", "twice"],
)
def test_unstaged_a_key_owns_what_the_prep_returned_unchanged(borrow: Callable[[View], Any]) -> None:
    cache = GlueGraphCache(borrow)
    cache.capture(views(4))
    storages = {tensor.untyped_storage().data_ptr() for tensor in (LENS, TABLE)}
    for run in (lambda: cache.replay(4), lambda: cache.eager(4, view(4))[0]):
        LENS.add_(1)
        TABLE.add_(1)
        result = run()
        assert plain(result) == plain(borrow(view(4)))
        assert all(leaf.untyped_storage().data_ptr() not in storages for leaf in result.values())
        kept = plain(result)
        LENS.add_(1)
        TABLE.add_(1)
        assert plain(result) == kept
    lens = LENS.tolist()
    cache.eager(4, view(4))
    assert LENS.tolist() == lens


def test_keys_do_not_share_metadata() -> None:
    cache = GlueGraphCache(prep)
    cache.capture(views(8, 4))
    places = [addresses(cache.result(size)) for size in (8, 4)]
    assert not set(places[0].values()) & set(places[1].values())
    large = plain(cache.replay(8))
    LENS.add_(5)
    cache.replay(4)
    assert plain(cache.result(8)) == large


def test_no_gradients_are_kept() -> None:
    weight = torch.ones(4, requires_grad=True)
    cache = GlueGraphCache(lambda seen: {"m": seen.lens * weight[: seen.bucket.requests]})
    cache.capture(views(4))
    assert not cache.replay(4)["m"].requires_grad
    assert not cache.eager(4, view(4))[0]["m"].requires_grad


# Preps that remember.


def test_pool_alias_a_scratch_made_at_first_use_serves_all_keys() -> None:
    scratch: dict[str, torch.Tensor] = {}

    def scratching(seen: View) -> dict[str, torch.Tensor]:
        rows = seen.bucket.requests
        if "buffer" not in scratch:
            scratch["buffer"] = torch.empty(8, dtype=torch.int64)
        part = scratch["buffer"][:rows]
        part.copy_(seen.lens)
        part.mul_(3)
        return {"tripled": part + 0, "sum": part.sum().reshape(1)}

    cache = GlueGraphCache(scratching)
    cache.capture(views(8, 4))
    assert type(scratch["buffer"]) is torch.Tensor
    for size in (4, 8, 4, 4, 8):
        LENS.add_(1)
        result = plain(cache.replay(size))
        assert result == {"tripled": (LENS[:size] * 3).tolist(), "sum": [int(LENS[:size].sum()) * 3]}


def test_plan_stale_what_a_prep_keeps_for_itself_is_real_and_refreshed() -> None:
    kept: dict[str, torch.Tensor] = {}

    def keeping(seen: View) -> dict[str, torch.Tensor]:
        kept["last"] = seen.lens + 1
        return {"next": kept["last"] * 2}

    cache = GlueGraphCache(keeping)
    cache.capture(views(4))
    assert not isinstance(kept["last"], FakeTensor)
    LENS.add_(10)
    cache.replay(4)
    assert kept["last"].tolist() == (LENS[:4] + 1).tolist()


def test_plan_stale_a_constant_memoised_at_warm_up_is_right_at_every_key() -> None:
    memo: dict[int, torch.Tensor] = {}

    def memoising(seen: View) -> dict[str, torch.Tensor]:
        rows = seen.bucket.requests
        if rows not in memo:
            memo[rows] = torch.arange(rows)
        return {"rank": memo[rows] + seen.lens, "iota": memo[rows]}

    cache = GlueGraphCache(memoising)
    cache.capture(views(8, 4))
    for size in (4, 8, 4):
        LENS.add_(2)
        assert plain(cache.replay(size)) == {
            "rank": (torch.arange(size) + LENS[:size]).tolist(), "iota": list(range(size))
        }  # fmt: skip
        cache.eager(size, view(size))
        assert memo[size].tolist() == list(range(size))


def test_host_frozen_a_number_stays_and_a_side_effect_does_not_happen_again() -> None:
    shift, log = {"by": 10}, []

    def shifting(seen: View) -> dict[str, torch.Tensor]:
        log.append(seen.bucket.requests)
        return {"m": seen.lens + shift["by"]}

    cache = GlueGraphCache(shifting)
    cache.capture(views(4))
    calls, shift["by"] = len(log), 99
    for _ in range(3):
        LENS.add_(1)
        assert cache.replay(4)["m"].tolist() == (LENS[:4] + 10).tolist()
    assert len(log) == calls


def test_state_carry_recording_executes_nothing() -> None:
    counter = torch.zeros(1, dtype=torch.int64)

    def writing(seen: View) -> dict[str, torch.Tensor]:
        counter.add_(1)
        return {"m": seen.lens + counter}

    cache = GlueGraphCache(writing, warmups=1)
    with Tape().session():
        cache.warm(4, view(4))
        before = int(counter)
        assert cache.record(4)
    assert int(counter) == before
    assert cache.replay(4)["m"].tolist() == (LENS[:4] + before + 1).tolist()
    assert int(counter) == before + 1


@pytest.mark.parametrize("capture_in", [torch.no_grad, torch.inference_mode])
@pytest.mark.parametrize("run_in", [torch.no_grad, torch.inference_mode])
def test_inference_mode_in_and_out(capture_in: Any, run_in: Any) -> None:
    cache = GlueGraphCache(prep)
    with capture_in():
        cache.capture(views(4))
    with run_in():
        for number in range(4):
            LENS.add_(1)
            result = cache.eager(4, view(4))[0] if number % 2 else cache.replay(4)
            assert plain(result) == plain(prep(view(4)))


def test_the_entry_tells_what_a_key_cost() -> None:
    cache = GlueGraphCache(prep)
    cache.capture(views(4))
    entry = cache.entry(4)
    assert entry.capture_seconds > 0
    assert entry.num_bytes >= sum(leaf.numel() * leaf.itemsize for leaf in cache.result(4).values())


def test_capture_of_nothing_is_nothing() -> None:
    assert GlueGraphCache(prep).capture({}) == []


@pytest.mark.parametrize("in_place", [False, True])
def test_a_cache_that_each_call_replaces_is_quarantined_and_one_written_in_place_is_not(in_place: bool) -> None:
    """The kind: a library's cache grows by concatenation, and a recording reads the tensor of the last warm-up."""
    kept = [torch.zeros(4)]

    def forward(ids: torch.Tensor) -> torch.Tensor:
        longer = torch.cat([kept[0], ids])[-4:]
        if in_place:
            kept[0].copy_(longer)
        else:
            kept[0] = longer
        return longer.sum(0, keepdim=True)

    cache, ids = GlueGraphCache(forward), torch.ones(2)
    if in_place:
        assert cache.capture({2: ids}) == [2]
        seen = kept[0].sum()
        assert cache.run(2, ids) == seen - kept[0][:2].sum() + 2
    else:
        with pytest.raises(CaptureError, match="a cache that each call replaces"):
            cache.capture({2: ids})
