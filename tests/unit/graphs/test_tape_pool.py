"""What a replay on the tape does to others of its pool: what one on a GPU may do (POOL-ALIAS-4)."""

from __future__ import annotations

import gc
import threading
import time
import weakref
from typing import Any

import pytest
import torch

import graphglue as gg
from graphglue.errors import ConfigError, ContractError
from graphglue.graphs import tape_pool
from graphglue.graphs.segments import record_segments
from graphglue.graphs.tape import Tape
from graphglue.graphs.tape_pool import pool_of

LARGE = 0x7F7F7F7F7F7F7F7F


def plus(amount: int, of: torch.Tensor) -> Any:
    return lambda: of + amount


@pytest.fixture
def source() -> torch.Tensor:
    return torch.tensor([1, 2, 3])


def test_a_replay_keeps_what_was_recorded_before_it_and_spoils_what_was_behind(source: torch.Tensor) -> None:
    tape = Tape()
    first, second, third = (tape.record(plus(amount, source)) for amount in (10, 20, 30))
    for recording in (first, second, third):
        recording.replay()
    assert [one.outputs.tolist() for one in (first, second, third)] == [[11, 12, 13], [21, 22, 23], [31, 32, 33]]
    second.replay()
    assert first.outputs.tolist() == [11, 12, 13]
    assert second.outputs.tolist() == [21, 22, 23]
    assert third.outputs.tolist() == [LARGE] * 3
    third.replay()
    assert second.outputs.tolist() == [21, 22, 23]
    assert third.outputs.tolist() == [31, 32, 33]


def test_every_dtype_shows_that_it_was_spoiled(source: torch.Tensor) -> None:
    tape = Tape()
    first = tape.record(plus(0, source))
    halves, flags, pairs, small = (source.bfloat16(), source > 9, source.to(torch.complex64), source.to(torch.int8))
    later = tape.record(lambda: (halves + 1, flags & flags, pairs + 1, {"small": small + 1}))
    later.replay()
    first.replay()
    spoiled = later.outputs
    assert bool(spoiled[0].isnan().all())
    assert bool(spoiled[1].all())
    assert bool(torch.view_as_real(spoiled[2]).isnan().all())
    assert spoiled[3]["small"].tolist() == [127] * 3


@pytest.mark.parametrize(
    "dtype", [torch.float8_e4m3fn, torch.float8_e4m3fnuz, torch.float8_e5m2, torch.float8_e5m2fnuz]
)
def test_eight_bits_show_that_they_were_spoiled_too(source: torch.Tensor, dtype: torch.dtype) -> None:
    """Two of these formats have their only NaN where others have a zero."""
    tape, floats = Tape(), source.float()
    first, later = tape.record(plus(0, source)), tape.record(lambda: floats.to(dtype))
    later.replay()
    assert later.outputs.float().tolist() == [1, 2, 3]
    first.replay()
    assert bool(later.outputs.float().isnan().all())


def test_outputs_of_any_geometry_are_spoiled_whole(source: torch.Tensor) -> None:
    def run() -> Any:
        values = source + 1
        pairs = torch.complex(values.float(), values.float())
        return values[1:], values, values.sum(), values[:0] + 1, pairs.conj(), pairs.conj().imag, values[:1].expand(3)

    tape = Tape()
    first, later = tape.record(plus(0, source)), tape.record(run)
    for _ in range(2):
        later.replay()
        part, whole, total, nothing, conjugate, negative, repeated = later.outputs
        assert (part.tolist(), whole.tolist(), int(total), repeated.tolist()) == ([3, 4], [2, 3, 4], 9, [2, 2, 2])
        assert negative.tolist() == [-2, -3, -4]
        first.replay()
        assert (part.tolist(), whole.tolist(), int(total), nothing.tolist()) == ([LARGE] * 2, [LARGE] * 3, LARGE, [])
        assert bool(torch.view_as_real(conjugate.resolve_conj()).isnan().all())


def test_an_output_that_was_resized_is_spoiled_as_it_is_now(source: torch.Tensor) -> None:
    tape = Tape()
    first = tape.record(plus(0, source))
    smaller, larger = tape.record(plus(1, source)), tape.record(plus(2, source))
    smaller.outputs.untyped_storage().resize_(0)
    larger.outputs.untyped_storage().resize_(1 << 16)
    first.replay()
    assert larger.outputs.tolist() == [LARGE] * 3


def test_only_the_pool_s_own_memory_is_spoiled(source: torch.Tensor) -> None:
    """An output that is an engine's tensor, or a view of one, stays the engine's."""
    tape, kept = Tape(), torch.arange(6)
    first = tape.record(plus(0, source))
    later = tape.record(lambda: (kept[2:], kept.add_(0), source, source + 1))
    later.replay()
    first.replay()
    assert kept.tolist() == list(range(6))
    assert source.tolist() == [1, 2, 3]
    assert later.outputs[0].tolist() == [2, 3, 4, 5]
    assert later.outputs[3].tolist() == [LARGE] * 3


def test_tapes_share_a_pool_by_its_handle_and_none_without(source: torch.Tensor) -> None:
    handle, one, other = object(), Tape(), Tape()
    first, second = one.record(plus(1, source)), other.record(plus(2, source))
    second.replay()
    first.replay()
    assert second.outputs.tolist() == [3, 4, 5]
    first, second = Tape(handle).record(plus(1, source)), Tape(handle).record(plus(2, source))
    second.replay()
    first.replay()
    assert second.outputs.tolist() == [LARGE] * 3
    assert Tape(handle).pool is Tape(handle).pool
    kept = Tape((0, 7))  # equal handles are one pool, as on a GPU
    assert Tape((0, 7)).pool is kept.pool


@pytest.mark.parametrize("handle", [[], {"pool": 1}, {1}])
def test_a_pool_that_can_not_be_hashed_is_refused_in_words(handle: Any) -> None:
    with pytest.raises(ConfigError, match=rf"pool is a {type(handle).__name__}.*any hashable object"):
        Tape(handle)


def test_threads_find_one_pool_for_a_handle() -> None:
    class Slow:
        """Let other threads in while handles are compared."""

        def __hash__(self) -> int:
            time.sleep(0.002)
            return 1

    handle, found = Slow(), []
    threads = [threading.Thread(target=lambda: found.append(pool_of(handle))) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(found) == 8
    assert len(set(map(id, found))) == 1


def test_what_a_closed_recording_gave_is_the_pool_s_as_long_as_somebody_holds_it(source: torch.Tensor) -> None:
    """Its memory is not given out anew, and lies where graphs that go on write all the same."""
    tape = Tape()
    first, later = tape.record(plus(0, source)), tape.record(plus(1, source))
    later.replay()
    held = later.outputs
    later.close()
    del later
    last = tape.record(lambda: held + 0)
    last.replay()
    assert last.outputs.tolist() == held.tolist() == [2, 3, 4]
    first.replay()
    assert held.tolist() == last.outputs.tolist() == [LARGE] * 3


def test_a_recording_that_returns_another_s_output_does_not_make_it_its_own(source: torch.Tensor) -> None:
    tape = Tape()
    first = tape.record(plus(1, source))
    between, last = tape.record(plus(2, source)), tape.record(lambda: first.outputs)
    first.replay()
    between.replay()
    assert last.outputs.tolist() == [2, 3, 4]


def test_a_pool_forgets_what_nobody_holds() -> None:
    tape, values = Tape(), torch.ones(1)
    kept = [tape.record(lambda: values + 1) for _ in range(3)]
    for _ in range(1000):
        tape.record(lambda: values + 1).close()
    assert len(tape.pool._blocks) < 3 * tape_pool._FEW
    kept[2].replay()
    kept[0].replay()
    assert bool(kept[2].outputs.isnan())


def test_the_segments_of_one_callable_keep_each_other_s_memory(source: torch.Tensor) -> None:
    tape = Tape()

    @gg.eager_break
    def outside(values: torch.Tensor) -> torch.Tensor:
        return values * 2

    def run() -> dict[str, torch.Tensor]:
        early = source + 1
        late = outside(early) + 1
        return {"early": early, "late": late}

    first = tape.record(plus(0, source))
    segmented = record_segments(tape, run)
    segmented.replay()
    assert {name: leaf.tolist() for name, leaf in segmented.outputs.items()} == {"early": [2, 3, 4], "late": [5, 7, 9]}
    first.replay()
    assert all(leaf.tolist() == [LARGE] * 3 for leaf in segmented.outputs.values())
    segmented.replay()
    assert {name: leaf.tolist() for name, leaf in segmented.outputs.items()} == {"early": [2, 3, 4], "late": [5, 7, 9]}


def test_what_is_recorded_inside_a_break_stands_between_two_segments(source: torch.Tensor) -> None:
    """Its replay may overwrite what later segments make, and that of the first segment what it gives."""
    tape, inner = Tape(), []

    @gg.eager_break
    def outside(values: torch.Tensor) -> torch.Tensor:
        if not inner:
            inner.append(tape.record(plus(5, source)))
        return values * 2

    def run() -> dict[str, torch.Tensor]:
        early = source + 1
        return {"early": early, "late": outside(early) + 1}

    segmented = record_segments(tape, run)
    segmented.replay()
    inner[0].replay()
    assert segmented.outputs["early"].tolist() == [2, 3, 4]
    assert segmented.outputs["late"].tolist() == [LARGE] * 3
    segmented.replay()
    assert inner[0].outputs.tolist() == [LARGE] * 3
    assert segmented.outputs["late"].tolist() == [5, 7, 9]


def test_the_segments_of_one_replay_spoil_what_is_behind_once(
    source: torch.Tensor, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A forward with a break in each layer would write all that is behind it in each layer."""
    tape = Tape()
    outside = gg.eager_break(lambda values: values * 2)

    def run() -> torch.Tensor:
        return outside(outside(source + 1) + 1) + 1

    segmented, later, spoiled = record_segments(tape, run), tape.record(plus(1, source)), []
    block = tape_pool._Block
    monkeypatch.setattr(block, "spoil", lambda self, spoil=block.spoil: (spoiled.append(self), spoil(self)))
    for number in (1, 2):
        later.replay()
        segmented.replay()
        assert later.outputs.tolist() == [LARGE] * 3
        assert len(spoiled) == number


def test_a_pool_keeps_nothing_of_a_recording_that_was_closed_or_dropped(source: torch.Tensor) -> None:
    tape = Tape()
    first = tape.record(plus(0, source))
    outputs = []
    for close in (True, False):
        recording = tape.record(plus(1, source))
        outputs.append(weakref.ref(recording.outputs))
        if close:
            recording.close()
    del recording
    gc.collect()
    first.replay()
    assert [output() for output in outputs] == [None, None]


def runner_of(handle: object, amount: int, **config: Any) -> gg.Runner:
    registry = gg.Registry()
    contract = gg.PrepContract(name="one", reads={"seq_lens": 0}, outputs={"lens": "request"}, modes={gg.Mode.DECODE})
    registry.register(contract)(lambda view: {"lens": view.seq_lens + amount})
    runner = gg.Runner(
        slots=[gg.Slot("seq_lens", axis="request", dtype=torch.int64, pad=0)],
        ladder=[2, 4],
        registry=registry,
        prep="one",
        forward=lambda view, metadata: metadata["lens"] * 10,
        device="cpu",
        hooks=gg.CaptureHooks(pool=handle),
        config=gg.RunnerConfig(**config),
    )
    runner.capture(progress=False)
    return runner


@pytest.mark.parametrize("shared", [True, False])
def test_runners_of_one_pool_read_each_other_s_outputs_in_the_order_of_their_capture(shared: bool) -> None:
    """What a runner gave is there after the replay of one captured behind it, and of any runner of another pool."""
    handle = object() if shared else None
    first, second = runner_of(handle, 1), runner_of(handle, 2)
    given = first.replay(gg.Batch(3, {"seq_lens": [1, 2, 3]})).outputs
    again = second.replay(gg.Batch(3, {"seq_lens": given})).outputs
    assert given.tolist() == [20, 30, 40]
    assert again.tolist() == [220, 320, 420]
    chained = first.replay(gg.Batch(3, {"seq_lens": again})).outputs  # a source is read before anything is spoiled
    assert chained.tolist() == [2210, 3210, 4210]
    assert again.tolist() == ([LARGE] * 3 if shared else [220, 320, 420])
    first.close()
    second.close()


def test_outputs_that_are_clones_are_the_caller_s_in_any_order() -> None:
    """``clone_outputs`` takes them out of the pool."""
    handle = object()
    first = runner_of(handle, 1)
    second = runner_of(handle, 2, clone_outputs=True)
    owned = second.replay(gg.Batch(3, {"seq_lens": [1, 2, 3]})).outputs
    first.replay(gg.Batch(3, {"seq_lens": [1, 2, 3]}))
    assert owned.tolist() == [30, 40, 50]
    first.close()
    second.close()


# The order of a key's recordings in the pool is that of a step, whatever is repaired.


def slots() -> list[gg.Slot]:
    return [gg.Slot("seq_lens", axis="request", dtype=torch.int64, pad=0)]


def prep_of(registry: gg.Registry, name: str, factor: int, effects: bool = False) -> None:
    contract = gg.PrepContract(
        name=name,
        reads={"seq_lens": 0},
        outputs={name: "request"},
        modes={gg.Mode.DECODE},
        tables=("count",) if effects else (),
        effects=("count",) if effects else (),
    )

    @registry.register(contract)
    def prep(view: Any) -> dict[str, torch.Tensor]:
        if effects:
            view.tables.count.add_(1)
        return {name: view.seq_lens * factor + 1}


def quarantine(runner: gg.Runner, sizes: list[int], *caches: Any) -> None:
    """Do what a shadow check does that finds a difference."""
    for key in [key for key in runner._wanted if key.requests in sizes]:
        for cache in caches:
            cache.quarantine(key, "told to")
        runner._capture.drop_launches([key])
    runner._stepper.forget()


@pytest.mark.parametrize("repaired", [("a",), ("b",), ("a", "c"), ("c", "b"), ("a", "b", "c")])
def test_preps_that_are_repaired_stand_in_the_order_of_a_step(repaired: tuple[str, ...]) -> None:
    """A prep behind a repaired one would overwrite what that gave, and the forward read it."""
    registry = gg.Registry()
    for number, name in enumerate("abc", 2):
        prep_of(registry, name, number)
    with gg.Runner(
        slots=slots(), ladder=[2, 4], registry=registry, prep=[*"abc"], device="cpu",
        forward=lambda view, found: sum(found[name][name] * 100**place for place, name in enumerate("abc")),
    ) as runner:  # fmt: skip
        runner.capture(progress=False)
        batches = [gg.Batch(3, {"seq_lens": [1, 2, 3]}), gg.Batch(2, {"seq_lens": [4, 5]})]
        expected = [runner.replay(batch).outputs.tolist() for batch in batches]
        assert expected[0] == [(2 * n + 1) + (3 * n + 1) * 100 + (4 * n + 1) * 10000 for n in (1, 2, 3)]
        quarantine(runner, [2, 4], *(unit.cache for unit in runner._units if unit.name in repaired))
        assert [runner.replay(batch).outputs.tolist() for batch in batches] == expected
        assert len(runner.maintain()) == 2
        for batch, outputs in zip(batches * 2, expected * 2):
            step = runner.replay(batch)
            assert (step.decision.prep, step.decision.forward) == (gg.Route.GLUE, gg.Route.GRAPH)
            assert step.outputs.tolist() == outputs


@pytest.mark.parametrize("effects", [False, True])
def test_breaks_see_a_key_s_own_metadata_while_a_forward_is_recorded_anew(effects: bool) -> None:
    """Other keys' preps are replayed before, and may overwrite it: an index of a break would fault."""
    registry, seen, table = gg.Registry(), [], torch.zeros(1, dtype=torch.int64)
    prep_of(registry, "a", 3, effects)

    @gg.eager_break
    def attend(values: torch.Tensor) -> torch.Tensor:
        seen.append(values.tolist())
        return values + 0

    with gg.Runner(
        slots=slots(), ladder=[2, 4], registry=registry, prep="a", device="cpu",
        tables={"count": table} if effects else None, forward=lambda view, found: attend(found["a"]) * 10,
    ) as runner:  # fmt: skip
        runner.capture(progress=False)
        quarantine(runner, [4], runner._units[0].cache)
        runner.maintain()  # from now on the large key lies behind the small one
        for size in (4, 2):
            runner.replay(gg.Batch(size, {"seq_lens": [1] * size}))
        quarantine(runner, [2, 4], runner._forward)
        seen.clear()
        before = table.tolist()
        assert len(runner.maintain()) == 2
        assert seen
        assert {value for values in seen for value in values} == {1}
        assert table.tolist() == before
        assert runner.replay(gg.Batch(2, {"seq_lens": [1, 2]})).outputs.tolist() == [40, 70]
        assert runner.replay(gg.Batch(3, {"seq_lens": [1, 2, 3]})).outputs.tolist() == [40, 70, 100]


@pytest.mark.parametrize("kind", ["index", "scale", "inside the break"])
def test_a_skipped_prep_s_integers_are_not_read_between_breaks(kind: str) -> None:
    """An IDLE step that skips the prep would index by whatever another bucket's replay has left there."""
    registry, values = gg.Registry(), torch.arange(8.0)
    contract = gg.PrepContract(
        name="a", reads={"ids": 0}, outputs={"row": "token"}, modes={gg.Mode.EXTEND}, idle="skip"
    )
    registry.register(contract)(lambda view: {"row": view.ids * 1 if kind != "scale" else view.ids * 1.0})

    @gg.eager_break(row_aligned=("rows", "index"))
    def attend(rows: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
        return rows + (values[index] if kind == "inside the break" else 1)

    def forward(view: Any, found: Any) -> torch.Tensor:
        rows = {"index": lambda: values[found["row"]], "scale": lambda: found["row"] * 2}.get(
            kind, lambda: view.ids * 1.0
        )
        return attend(rows(), found["row"]) * 2

    with gg.Runner(
        slots=[gg.Slot("ids", axis="token", dtype=torch.int64, pad=0)], ladder=[4, 8], registry=registry, prep="a",
        forward=forward, device="cpu", config=gg.RunnerConfig(max_requests=2),
    ) as runner:  # fmt: skip
        if kind == "index":
            with pytest.raises(
                ContractError, match="'a' declares idle='skip', but the forward reads integers of its met"
            ):
                runner.capture(progress=False)
            return
        runner.capture(progress=False)
        for size in (3, 7):
            runner.replay(gg.Batch(1, {"ids": [*range(size)]}, mode=gg.Mode.EXTEND, num_tokens=size))
        step = runner.replay(gg.Batch.idle(mode=gg.Mode.EXTEND))
        assert (step.decision.prep, step.decision.forward) == (gg.Route.SKIP, gg.Route.GRAPH)
        assert step.outputs.shape == (0,)
