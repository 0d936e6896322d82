"""Runners whose forward has eager breaks: EXTEND steps replayed in segments."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import pytest
import torch

import graphglue as gg
from graphglue.core.live import Live
from graphglue.errors import ContractError, DivergenceError, SegmentError
from tests.prefill import CONTRACT, MAX_REQUESTS, SLOTS, Prefill, batch, make_runner, prep, sources

STEPS = ([3, 2], [8], [1, 1, 1], [5, 3, 4, 2], [4, 4, 4, 4], [16], [2, 1], [9])


def served(runner: gg.Runner, model: Prefill, lens: Sequence[int], seed: int = 0) -> gg.Step | Any:
    """Replay a step and hold its real rows against the reference."""
    step = runner.replay(batch(lens, seed))
    assert torch.equal(step.outputs["rows"], model.reference(lens, torch.tensor(sources(lens, seed)["input_ids"])))
    return step


def captured(model: Prefill, **changes: Any) -> gg.Runner:
    runner = make_runner(model, **changes)
    runner.capture(progress=False)
    return runner


def graphed(step: Any) -> bool:
    return step.decision.forward is gg.Route.GRAPH


def causes(runner: gg.Runner) -> list[str]:
    return [cause for key in runner.stats()["keys"] for cause in key["causes"].values()]


def test_segments_compute_what_the_reference_does_and_breaks_see_the_real_rows_only() -> None:
    model = Prefill()
    with captured(model) as runner:
        for seed, lens in enumerate((*STEPS, *reversed(STEPS))):
            model.seen.clear()
            step = served(runner, model, lens, seed)
            assert graphed(step)
            assert step.decision.prep is gg.Route.GLUE
            assert model.seen == [(sum(lens), list(lens))] * len(model.weights)


def test_the_comparison_with_the_reference_can_fail() -> None:
    model = Prefill()
    with captured(model) as runner:
        model.table[:] += 1e-9  # the reference reads it anew, and so does a replay: both agree
        served(runner, model, [3, 2])
        model.attention = lambda rows, view, layer: rows * 1  # type: ignore[method-assign]
        with pytest.raises(AssertionError):
            served(runner, model, [3, 2])


def test_padded_rows_are_those_of_the_same_step_run_eagerly() -> None:
    glued, eager = Prefill(), Prefill()
    everything = {"output_axes": {"rows": "bucket"}}
    with captured(glued, **everything) as one, make_runner(eager, config={"enabled": False}, **everything) as other:
        for seed, lens in enumerate(([3, 2], [1, 1, 1], [5, 3, 2])):
            ours, theirs = one.replay(batch(lens, seed)), other.replay(batch(lens, seed))
            assert graphed(ours)
            assert not graphed(theirs)
            assert torch.equal(ours.outputs["rows"], theirs.outputs["rows"])
            assert ours.outputs["rows"].shape[0] > sum(lens)
            assert glued.seen[-1] == eager.seen[-1]


@pytest.mark.parametrize(("lens", "reason"), [([17], "over_ladder"), ([1], "waste"), ([1] * 5, "over_ladder")])
def test_what_no_bucket_serves_runs_eagerly_at_its_own_extents(lens: list[int], reason: str) -> None:
    model = Prefill()
    with captured(model) as runner:
        step = served(runner, model, lens)
        assert step.decision.reason == reason
        assert not graphed(step)
        assert model.seen[-1] == (sum(lens), lens)


def test_a_step_without_requests_keeps_the_padded_shape_and_its_breaks_see_no_rows() -> None:
    model = Prefill()
    with captured(model) as runner:
        model.seen.clear()
        step = runner.replay(gg.Batch.idle(mode=gg.Mode.EXTEND))
        assert graphed(step)
        assert step.outputs["rows"].shape[0] == 0
        assert model.seen == [(0, [])] * len(model.weights)


def test_metadata_is_there_while_a_forward_that_indexes_with_it_is_recorded() -> None:
    class Indexing(Prefill):
        def forward(self, view: Any, metadata: Any) -> Any:
            rows = self.table[view.input_ids][metadata["rows"]]
            for layer, _ in enumerate(self.weights):
                rows = rows + self.attend(torch.tanh(rows), view, layer)
            return {"rows": rows}

    def indexing(view: Any) -> Any:
        return {"rows": view.positions - view.positions + torch.arange(view.positions.shape[0])}

    contract = CONTRACT.model_copy(update={"outputs": {"rows": "token"}})
    model = Indexing()
    with captured(model, contract=contract, prep_function=indexing) as runner:
        assert causes(runner) == []
        assert graphed(runner.replay(batch([3, 2])))


def test_nothing_that_was_captured_runs_before_the_engines_session_has_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    from graphglue.graphs.tape import TapeRecording

    replayed: list[bool] = []
    inside: list[bool] = [False]
    usual = TapeRecording.replay
    monkeypatch.setattr(TapeRecording, "replay", lambda self: (replayed.append(inside[0]), usual(self))[1])

    @contextmanager
    def session() -> Iterator[None]:
        inside[0] = True
        yield
        inside[0] = False

    model = Prefill()
    with captured(model, hooks=gg.CaptureHooks(session=session)) as runner:
        assert replayed == []
        served(runner, model, [3, 2])
        assert replayed
        assert not any(replayed)
    with captured(Prefill()):
        assert replayed, "without a session the segments before a break run"


# What breaks see.


def test_live_metadata_changes_from_step_to_step_without_a_new_capture() -> None:
    class Planned(Prefill):
        planned: list[tuple[int, int, int]]

        def attention(self, rows: torch.Tensor, view: Any, layer: int) -> torch.Tensor:
            assert isinstance(view.live, Live)
            longest = view.live.metadata["longest"]
            ends = view.live.metadata["ends"]
            self.planned.append((longest, ends.shape[0], view.live.raw.tokens))
            return super().attention(rows, view, layer)

        def forward(self, view: Any, metadata: Any) -> Any:
            assert metadata["longest"] is None
            return super().forward(view, metadata)

    def planning(view: Any) -> Any:
        lens = view.extend_lens[view.extend_lens > 0]
        longest = int(lens.max()) if len(lens) else 0
        return {**prep(view), "longest": longest, "ends": lens.cumsum(0)}

    contract = CONTRACT.model_copy(update={"host_free": False, "live": ("longest", "ends"), "idle": "eager"})
    model = Planned()
    model.planned = []
    with captured(model, contract=contract, prep_function=planning) as runner:
        for seed, lens in enumerate(STEPS):
            model.planned.clear()
            step = served(runner, model, lens, seed)
            assert graphed(step)
            assert step.decision.reason is gg.Reason.NOT_HOST_FREE
            assert model.planned == [(max(lens), len(lens), sum(lens))] * len(model.weights)
            assert step.metadata["longest"] == max(lens)


def test_a_live_leaf_is_declared_as_one_of_a_dict_and_of_a_prep_that_is_not_captured() -> None:
    with pytest.raises(ContractError, match="host_free=False"):
        CONTRACT.model_copy(update={"live": ("longest",)})
    with pytest.raises(ContractError, match="both name"):
        CONTRACT.model_copy(update={"live": ("scale",), "host_free": False})
    contract = CONTRACT.model_copy(update={"live": ("longest",), "host_free": False})
    with make_runner(Prefill(), contract=contract) as runner, pytest.raises(ContractError, match=r"live=.*longest"):
        runner.capture(progress=False)


def test_reading_real_rows_outside_a_break_fails_at_capture_and_the_step_still_runs() -> None:
    class Baking(Prefill):
        def forward(self, view: Any, metadata: Any) -> Any:
            outputs = super().forward(view, metadata)
            return {"rows": outputs["rows"] + 0 * view.live.raw.requests}

    model = Baking()
    with captured(model) as runner:
        assert all("view.live outside an eager break" in cause for cause in causes(runner))
        step = served(runner, model, [3, 2])
        assert step.decision.forward_reason is gg.Reason.FORWARD_QUARANTINED


def test_a_prep_has_no_live_view() -> None:
    def curious(view: Any) -> Any:
        return {"scale": view.positions * 0.5 + view.live.raw.tokens}

    with (
        make_runner(Prefill(), prep_function=curious) as runner,
        pytest.raises(ContractError, match=r"prep .prefill. read view\.live"),
    ):
        runner.capture(progress=False)


def test_a_published_metadata_is_there_before_the_breaks_of_its_step() -> None:
    class Published(Prefill):
        installed: Any = None

        def attention(self, rows: torch.Tensor, view: Any, layer: int) -> torch.Tensor:
            if self.installed is not None:
                assert self.installed["scale"].shape[0] == view.bucket.tokens
                assert torch.equal(self.installed["scale"], view.live.metadata["scale"])
                self.checked += 1
            return super().attention(rows, view, layer)

        checked = 0

    model = Published()
    registry = gg.Registry()
    registry.register(CONTRACT, publish=lambda metadata: setattr(model, "installed", metadata))(prep)
    with captured(model, registry=registry) as runner:
        for lens in STEPS:
            model.installed, model.checked = None, 0
            assert graphed(served(runner, model, lens))
            assert model.checked == len(model.weights)


# Faults.


def failing(model: Prefill, how: Any) -> None:
    usual = model.attention

    def attention(rows: torch.Tensor, view: Any, layer: int) -> torch.Tensor:
        return how(rows) if layer == 1 else usual(rows, view, layer)

    model.attention = attention  # type: ignore[method-assign]


def exploding(rows: torch.Tensor) -> torch.Tensor:
    raise ValueError("no pages left")


@pytest.mark.parametrize(
    ("how", "error", "text"),
    [
        (exploding, SegmentError, "no pages left"),
        (lambda rows: {"rows": rows}, DivergenceError, "structure"),
        (lambda rows: rows.to(torch.float32), DivergenceError, "float32"),
        (lambda rows: rows[:, :4], DivergenceError, "4"),
        (lambda rows: rows.new_zeros(16, 8), DivergenceError, "16"),
    ],
)
def test_a_break_that_fails_is_named_and_the_runner_goes_on(how: Any, error: type[Exception], text: str) -> None:
    model = Prefill()
    usual = model.attention
    with captured(model) as runner:
        steps = runner.stats()["steps"]
        failing(model, how)
        with pytest.raises(error, match=text) as raised:
            runner.replay(batch([3, 2]))
        assert "break 1" in str(raised.value)
        assert runner.stats()["steps"] == steps
        model.attention = usual  # type: ignore[method-assign]
        for lens in STEPS:
            assert graphed(served(runner, model, lens))


def test_a_break_that_fails_while_it_is_recorded_quarantines_its_key_and_maintain_repairs_it() -> None:
    model = Prefill()
    usual = model.attention
    with make_runner(model) as runner:
        warm: list[int] = []

        def attention(rows: torch.Tensor, view: Any, layer: int) -> torch.Tensor:
            warm.append(layer)
            if len(warm) > 3 * 2 * len(model.weights):  # two warm-ups of three keys are over
                raise ValueError("not now")
            return usual(rows, view, layer)

        model.attention = attention  # type: ignore[method-assign]
        runner.capture(progress=False)
        assert len(causes(runner)) == 3
        assert all("break 0" in cause and "not now" in cause for cause in causes(runner))
        model.attention = usual  # type: ignore[method-assign]
        assert not graphed(served(runner, model, [3, 2]))
        assert len(runner.maintain()) == 3
        for lens in STEPS:
            assert graphed(served(runner, model, lens))


def test_another_order_of_breaks_than_in_the_warm_up_is_refused() -> None:
    class Wandering(Prefill):
        num_runs = 0

        def forward(self, view: Any, metadata: Any) -> Any:
            self.num_runs += 1
            if self.num_runs > 6:
                return {"rows": self.table[view.input_ids] * 2}
            return super().forward(view, metadata)

    with captured(Wandering()) as runner:
        assert all("0 breaks are reached, expected 3" in cause for cause in causes(runner))


def test_breaks_on_other_rows_than_the_tokens_are_refused() -> None:
    class PerRequest(Prefill):
        def forward(self, view: Any, metadata: Any) -> Any:
            @gg.eager_break(row_aligned=("rows",))
            def pool(rows: torch.Tensor) -> torch.Tensor:
                return rows * 2

            outputs = super().forward(view, metadata)
            return {"rows": outputs["rows"] + pool(view.extend_lens[:, None].double()).sum()}

    class OnlyRequests(PerRequest):
        def __init__(self) -> None:
            super().__init__()
            self.weights = []

    with make_runner(OnlyRequests()) as runner, pytest.raises(ContractError, match=r"4 rows, but .* has 16 tokens"):
        runner.capture(progress=False)


SKIPPING = CONTRACT.model_copy(update={"idle": "skip"})


def test_idle_steps_may_skip_the_metadata() -> None:
    model = Prefill()
    with captured(model, contract=SKIPPING) as runner:
        served(runner, model, [3, 2])
        model.seen.clear()
        step = runner.replay(gg.Batch.idle(mode=gg.Mode.EXTEND))
        assert step.decision.prep is gg.Route.SKIP
        assert graphed(step)
        assert model.seen == [(0, [])] * len(model.weights)
        for lens in STEPS:
            served(runner, model, lens)


def test_idle_metadata_is_not_skipped_where_something_reads_padded_rows_through_it() -> None:
    class Full(Prefill):
        def forward(self, view: Any, metadata: Any) -> Any:
            return {"rows": self.table[view.input_ids] * metadata["scale"][:, None]}

    class Unaligned(Prefill):
        def __init__(self) -> None:
            super().__init__()
            self.attend = gg.eager_break(lambda rows, view, layer: rows * 2)

    for model, text in ((Full(), "is one full graph"), (Unaligned(), "on all rows")):
        with make_runner(model, contract=SKIPPING) as runner, pytest.raises(ContractError, match=text):
            runner.capture(progress=False)


def test_a_recorder_without_segments_is_named() -> None:
    class Plain:
        """An engine's recorder: the tape behind another name."""

        def __init__(self) -> None:
            self._tape = gg.Tape()
            self.device, self.session, self.finish = self._tape.device, self._tape.session, self._tape.finish
            self.record = self._tape.record

    model = Prefill()
    with captured(model, recorder=Plain()) as runner:
        assert all("a Plain records no segments" in cause for cause in causes(runner))
        assert not graphed(served(runner, model, [3, 2]))


# Around it.


def test_stats_show_each_segments_memory_and_the_break_that_ends_it() -> None:
    with captured(Prefill()) as runner:
        for key in runner.stats()["keys"]:
            named = [part["break"] for part in key["segments"]]
            assert len(named) == 4
            assert named[-1] is None
            assert all("attend" in name for name in named[:-1])
            assert all(part["num_bytes"] >= 0 for part in key["segments"])
            assert sum(part["num_bytes"] for part in key["segments"]) <= key["num_bytes"]


def test_a_forward_that_draws_random_numbers_in_segments_says_what_is_launched_apart(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    model = Prefill()
    with make_runner(model) as runner:
        offsets = iter(range(10**6))
        monkeypatch.setattr(runner.arena.device, "random_offset", lambda: next(offsets))
        runner._capture._random = dict.fromkeys(runner.space.keys(), "forward")
        monkeypatch.setattr(runner.arena.device, "random_offset", lambda: 0)
        runner.capture(progress=False)
        composed = runner._capture.launches[runner.space.keys()[0]]
        assert not composed.leads
        assert composed.has_forward
        for lens in STEPS:
            assert graphed(served(runner, model, lens))


@pytest.mark.parametrize(
    "config",
    [
        {"clone_outputs": True},
        {"events": True},
        {"glue": {"prefill": "off"}},
        {"shadow": gg.Shadow(first=100, every=1)},
    ],
    ids=str,
)
def test_segments_on_every_path_of_a_step(config: dict[str, Any]) -> None:
    contract = CONTRACT.model_copy(update={"reads_end": "forward"})
    model = Prefill()
    with captured(model, contract=contract, config=config) as runner:
        for seed, lens in enumerate((*STEPS, *STEPS)):
            step = served(runner, model, lens, seed)
            assert graphed(step)
            assert torch.equal(step.metadata["scale"][: sum(lens)], torch.cat(
                [1.0 / (1 + torch.arange(length).double()) for length in lens]
            ))  # fmt: skip
            if "events" in config:
                step.tables_read().synchronize()
        if "shadow" in config:
            assert runner.stats()["shadow"]["mismatches"] == []


def test_a_barrier_is_met_before_each_break_that_is_recorded() -> None:
    met: list[int] = []
    model = Prefill()
    hooks = gg.CaptureHooks(barrier=lambda: met.append(len(model.seen)))
    with captured(model, hooks=hooks) as runner:
        assert len(met) == 3 * len(model.weights)
        served(runner, model, [3, 2])
        assert len(met) == 3 * len(model.weights)


def test_decode_and_prefill_runners_share_one_recorder() -> None:
    """Two runners on one pool, replayed in any order."""
    tape = gg.Tape()
    model = Prefill()

    def decode(view: Any, metadata: Any) -> Any:
        return {"rows": model.table[view.input_ids] * metadata["scale"][:, None]}

    registry = gg.Registry()
    outputs, modes = {"scale": "token"}, {gg.Mode.DECODE}
    contract = gg.PrepContract(name="decode", reads={"input_ids": 0}, outputs=outputs, modes=modes)
    registry.register(contract)(lambda view: {"scale": view.input_ids * 0.5})
    decoding = gg.Runner(
        slots=SLOTS[:1], ladder=[2, 4], prep="decode", registry=registry, forward=decode, recorder=tape
    )
    with captured(model, recorder=tape) as runner, decoding:
        decoding.capture(progress=False)
        for seed, lens in enumerate(STEPS):
            served(runner, model, lens, seed)
            step = decoding.replay(gg.Batch(3, {"input_ids": [1, 2, 3]}))
            ids = torch.tensor([1, 2, 3])
            assert torch.equal(step.outputs["rows"], model.table[ids] * (ids * 0.5)[:, None])


def test_a_runner_inside_a_break_of_another_one() -> None:
    inner_model = Prefill()
    inner = captured(inner_model)

    class Nesting(Prefill):
        def attention(self, rows: torch.Tensor, view: Any, layer: int) -> torch.Tensor:
            served(inner, inner_model, [2, 1], layer)
            return super().attention(rows, view, layer)

    model = Nesting()
    with inner, captured(model) as runner:
        for lens in STEPS:
            assert graphed(served(runner, model, lens))


def test_max_requests_rows_are_what_request_slots_have() -> None:
    with captured(Prefill()) as runner:
        assert runner.view(8).extend_lens.shape == (MAX_REQUESTS,)
        assert runner.view(8).input_ids.shape == (8,)
        with pytest.raises(ContractError, match="outside an eager break"):
            _ = runner.view(8).live
