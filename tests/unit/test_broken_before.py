"""What an outside engineer once broke, one test for each kind of fault, on the smallest runner that shows it.

The names say the kind. None of these repeats a feature's own tests: each failed before its fix.
"""

from __future__ import annotations

import copy
import functools
import json
import pickle
import threading
from collections.abc import Callable
from contextlib import contextmanager
from fractions import Fraction
from typing import Any

import numpy as np
import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

import graphglue as gg
from graphglue.core.binding import bind_source
from graphglue.ledger import Ledger

CPU = torch.device("cpu")
pytestmark = pytest.mark.usefixtures("frozen_imports")


def contract(**changes: Any) -> gg.PrepContract:
    """Declare the prep that most tests use."""
    return gg.PrepContract(**{"name": "p", "reads": {"n": 1, "ids": 0}, "modes": {gg.Mode.DECODE}, **changes})


def slots() -> list[gg.Slot]:
    return [
        gg.Slot("n", axis="request", dtype=torch.int64, pad=1),
        gg.Slot("ids", axis="token", dtype=torch.int64, pad=0),
    ]


def positions(view: Any) -> dict[str, torch.Tensor]:
    return {"pos": view.n - 1}


def double(view: Any, metadata: Any) -> torch.Tensor:
    return metadata["pos"] * 2


def runner(
    prep: Callable[..., Any] = positions,
    declared: gg.PrepContract | None = None,
    *,
    plan: Any = None,
    publish: Any = None,
    captured: bool = True,
    **options: Any,
) -> gg.Runner:
    """Build a small runner around one declared prep."""
    declared = declared or contract()
    registry = gg.Registry()
    registry.register(declared, plan=plan, publish=publish)(prep)
    made = gg.Runner(
        **{"slots": slots(), "ladder": [2, 4], "registry": registry, "prep": declared.name, "device": "cpu", **options}
    )
    if captured:
        made.capture()
    return made


def batch(rows: int = 3, base: int = 50, **options: Any) -> gg.Batch:
    return gg.Batch(rows, {"n": list(range(base, base + rows)), "ids": [7] * rows}, **options)


def expected(rows: int = 3, padded: int = 4, base: int = 50) -> list[int]:
    """Give the positions of ``batch`` at its bucket."""
    return [*range(base - 1, base - 1 + rows), *[0] * (padded - rows)]


def way(step: Any) -> tuple[str, str, str, str | None]:
    decision = step.decision
    why = decision.forward_reason
    return decision.prep.value, decision.forward.value, decision.reason.value, why and why.value


@pytest.fixture(scope="module")
def shared_runner() -> gg.Runner:
    """A captured runner for tests that leave it as it is."""
    return runner()


def states(made: gg.Runner, of: str = "p") -> dict[int, str]:
    return {key["bucket"][0]: key["states"][of] for key in made.stats()["keys"]}


def causes(made: gg.Runner) -> str:
    return json.dumps([key["causes"] for key in made.stats()["keys"]])


# Recordings that would repeat what was true at capture.


def memoising() -> Callable[..., Any]:
    """Keep the first result of each bucket."""
    kept: dict[Any, Any] = {}

    def prep(view: Any) -> Any:
        if view.bucket not in kept:
            kept[view.bucket] = {"pos": view.n - 1}
        return kept[view.bucket]

    return prep


def threaded(view: Any) -> dict[str, torch.Tensor]:
    """Compute in a thread, which no recording sees."""
    found: dict[str, torch.Tensor] = {}
    worker = threading.Thread(target=lambda: found.update(pos=view.n - 1))
    worker.start()
    worker.join()
    return found


def assert_never_glued(prep: Callable[..., Any]) -> None:
    made = runner(prep, captured=False, forward=double)
    made.capture()
    assert set(states(made).values()) == {"quarantined"}
    assert "is not computed by what was recorded: it was memoised, or made by another thread" in causes(made)
    assert way(made.replay(batch()))[::2] == ("eager", "quarantined")


def test_plan_stale_a_memoised_result_is_not_glued() -> None:
    """Its recording has no operation, so it would give the values of capture for ever and say nothing."""
    assert_never_glued(memoising())


def test_host_frozen_work_of_another_thread_is_not_glued() -> None:
    """What records is bound to a thread, so the operations of others are missing from the recording."""
    assert_never_glued(threaded)


def test_plan_stale_a_buffer_that_the_prep_fills_in_place_is_glued() -> None:
    """The check must not take a persistent buffer, nor a constant that is returned as it is, for a memo."""
    buffer, constant = torch.zeros(4, dtype=torch.int64), torch.arange(4)

    def prep(view: Any) -> Any:
        out = buffer[: view.n.shape[0]]
        return {"pos": out.copy_(view.n - 1), "constant": constant}

    step = runner(prep).replay(batch())
    assert way(step)[0] == "glue"
    assert step.metadata["pos"].tolist() == expected()
    assert step.metadata["constant"].tolist() == [0, 1, 2, 3]


# Idle steps and adopted forwards.


def test_idle_skip_with_a_full_forward_graph_is_refused_however_the_graph_came() -> None:
    """An idle replay of a full graph would run it through the last step's metadata."""
    kept = torch.zeros(4, dtype=torch.int64)
    graph = gg.Tape().record(lambda: kept.add_(1))
    declared = contract(modes={gg.Mode.EXTEND}, idle="skip")
    made = runner(declared=declared, config=gg.RunnerConfig(max_requests=4))
    with pytest.raises(gg.ContractError, match=r"adopt_forward: preps \['p'\] declare idle='skip'"):
        made.adopt_forward(4, graph)
    before = kept.clone()
    made.replay(gg.Batch.idle(mode=gg.Mode.EXTEND))
    assert torch.equal(kept, before)


@pytest.mark.parametrize("end", ["close", "reset"])
def test_ownership_an_adopted_forward_survives_the_runner(end: str) -> None:
    """The graph is the engine's: dropping it must not close it."""
    kept = torch.zeros(4, dtype=torch.int64)
    graph = gg.Tape().record(lambda: kept.add_(1))
    made = runner()
    made.adopt_forward(4, graph)
    made.replay(batch())
    getattr(made, end)()
    before = int(kept[0])
    graph.replay()
    assert kept.tolist() == [before + 1] * 4


# Results whose memory or objects are shared.


def test_out_overwrite_an_expanded_result_is_captured_and_written() -> None:
    """A leaf with one element for many can not be written by the fallback; the key gets a whole one."""
    made = runner(lambda view: {"pos": (view.n - 1).unsqueeze(0).expand(3, -1)})
    step = made.replay(batch())
    assert way(step)[0] == "glue"
    assert step.metadata["pos"].tolist() == [expected()] * 3
    step = made.replay(gg.Batch.idle())
    assert way(step)[0] == "eager"
    assert step.metadata["pos"].tolist() == [[0, 0]] * 3
    assert made.replay(batch()).metadata["pos"].tolist() == [expected()] * 3


def test_out_overwrite_a_prep_that_reshapes_its_view_in_place_changes_its_own_objects_only() -> None:
    """Views once handed out the arena's one tensor object; warm-ups and recording each transposed it."""
    matrix = gg.Slot("m", axis="token", dtype=torch.int64, pad=0, inner=(2,))
    declared = contract(reads={"n": 1, "m": 0})
    made = runner(
        lambda view: {"pos": view.n.unsqueeze_(-1) - 1, "m": view.m.t_() * 1},
        declared,
        slots=[slots()[0], matrix],
        ladder=[2],
    )
    for _ in range(2):
        step = made.replay(gg.Batch(2, {"n": [5, 6], "m": torch.tensor([[1, 2], [3, 4]])}))
        assert way(step)[0] == "glue"
        assert step.metadata["m"].tolist() == [[1, 3], [2, 4]]
        assert step.metadata["pos"].tolist() == [[4], [5]]
    assert made.view(2).m.tolist() == [[1, 2], [3, 4]]
    assert made.view(2).n.shape == (2,)


def test_out_overwrite_an_eager_forward_may_reshape_its_view_and_metadata_containers() -> None:
    """The eager forward is called with what the graphs live on, so it gets objects of its own."""

    def forward(view: Any, metadata: Any) -> torch.Tensor:
        view.n.unsqueeze_(-1)
        return metadata.pop("pos") * 2

    made = runner(forward=forward)
    assert set(states(made, "forward").values()) == {"captured"}
    for _ in range(2):
        made.replay(gg.Batch.idle())
        step = made.replay(batch())
        assert way(step) == ("glue", "graph", "padded", None)
        assert step.outputs.tolist() == [98, 100, 102]
        assert step.metadata["pos"].tolist() == expected()


@pytest.mark.parametrize(
    ("first", "call"),
    [(gg.Batch.idle(), "replay"), (gg.Batch.idle(), "prepare"), (batch(1), "prepare")],
    ids=["idle_replay", "idle_prepare", "glued_prepare"],
)
def test_out_overwrite_metadata_containers_are_the_callers_own(first: gg.Batch, call: str) -> None:
    """Emptying what a step returned once emptied what later steps of that bucket returned."""
    made = runner(lambda view: {"pos": view.n - 1, "nested": [view.ids * 1]}, forward=double)
    metadata = getattr(made, call)(first).metadata
    metadata["nested"].clear()
    metadata.clear()
    step = made.replay(batch(2))
    assert way(step) == ("glue", "graph", "unpadded", None)
    assert step.metadata["pos"].tolist() == expected(2, 2)
    assert step.metadata["nested"][0].tolist() == [7, 7]
    assert made.replay(first).metadata.keys() == {"pos", "nested"}


def test_out_overwrite_publish_gets_a_container_of_its_own() -> None:
    """A publisher that takes its entries out must not take them out of the runner."""
    made = runner(publish=lambda metadata: metadata.clear())
    for step in (batch(), gg.Batch.idle(), batch()):
        assert made.replay(step).metadata.keys() == {"pos"}


def test_rebind_an_engine_buffer_that_was_replaced_is_not_written() -> None:
    """The fallback keeps static metadata current; a buffer that the prep only returns is not the runner's."""
    held = {"w": torch.arange(4)}
    old = held["w"]
    made = runner(lambda view: {"w": held["w"], "pos": view.n - 1}, forward=double)
    held["w"] = torch.full((4,), 99)
    step = made.replay(gg.Batch.idle())
    assert old.tolist() == [0, 1, 2, 3]
    assert step.metadata["w"].tolist() == [99] * 4
    assert way(step)[1:] == ("eager", "idle_eager", "metadata_changed")


# Fallbacks that were silent.


@pytest.mark.parametrize("call", ["prepare", "replay"])
def test_silent_fallback_changed_metadata_is_said_without_a_forward_too(call: str) -> None:
    """The engine's own forward graph reads the static metadata, which is old now."""
    more = {"rows": 0}
    made = runner(lambda view: {"pos": torch.nn.functional.pad(view.n - 1, (0, more["rows"]))})
    more["rows"] = 1
    step = getattr(made, call)(gg.Batch.idle())
    assert way(step)[1:] == ("eager", "idle_eager", "metadata_changed")
    assert step.metadata["pos"].shape == (3,)
    assert made.stats()["routes"][-1]["forward_reason"] == "metadata_changed"


def test_silent_fallback_a_bound_method_keeps_its_contract() -> None:
    """A bound method is a new object each time it is looked up, and once lost its registration by that."""

    class Backend:
        def prep(self, view: Any) -> Any:
            return positions(view)

    backend, registry = Backend(), gg.Registry()
    registry.register(contract())(backend.prep)
    made = gg.Runner(slots=slots(), ladder=[4], registry=registry, prep=backend.prep, device="cpu")
    made.capture()
    step = made.replay(batch())
    assert way(step)[0] == "glue"
    assert step.metadata["pos"].tolist() == expected()


# What the caller set for his own operations.


@contextmanager
def default_double() -> Any:
    torch.set_default_dtype(torch.float64)
    try:
        yield
    finally:
        torch.set_default_dtype(torch.float32)


@pytest.mark.parametrize(
    "ambient",
    [lambda: torch.autocast("cpu", torch.bfloat16), default_double],
    ids=["autocast", "default_dtype"],
)
def test_ambient_state_does_not_reach_the_replay(ambient: Any) -> None:
    """A CUDA graph is immune to it, and the tape is as strict."""
    made = runner(lambda view: {"x": view.n[:, None].float() @ torch.ones(1, 2), "z": torch.zeros(2) + view.n.sum()})
    with ambient():
        step = made.replay(batch())
    assert way(step)[0] == "glue"
    assert step.metadata["x"].dtype == step.metadata["z"].dtype == torch.float32
    assert step.metadata["x"].tolist() == [[50.0, 50.0], [51.0, 51.0], [52.0, 52.0], [1.0, 1.0]]


# What capture is asked for.


@pytest.mark.parametrize(
    ("asked", "text"),
    [
        ([gg.Bucket(2, 4, 2)], "the ladder has [2, 4]; add it there, or give one of its sizes"),
        ([gg.Bucket(2, 6, 0)], "the ladder has [2, 4]; add it there, or give one of its sizes"),
        ([3], "the ladder has [2, 4]; add it there, or give one of its sizes"),
        (4, "expected sizes of the ladder [2, 4]"),
        ([], "expected sizes of the ladder [2, 4]"),
    ],
)
def test_asked_capture_refuses_what_it_would_not_do(asked: Any, text: str) -> None:
    """Another width was once captured as the runner's own, and an empty list blamed the forward."""
    made = runner(captured=False, tokens_per_request=3)
    with pytest.raises(gg.ConfigError) as caught:
        made.capture(asked)
    assert text in str(caught.value)


def test_asked_capture_takes_each_size_once() -> None:
    """A size given twice was recorded and listed twice."""
    made = runner(captured=False)
    made.capture([4, gg.Bucket(4, 4, 1), 4])
    assert [key["bucket"] for key in made.stats()["keys"]] == [[4, 4, 1]]


def test_asked_adopt_refuses_a_bucket_of_another_width() -> None:
    """It was silently taken for the uniform one."""
    made = runner(tokens_per_request=3)
    with pytest.raises(gg.ConfigError, match="give one of its sizes"):
        made.adopt_forward(gg.Bucket(2, 4, 2), gg.Tape().record(lambda: None))


# Failures that spread.


def test_failure_stays_with_its_key_in_maintain() -> None:
    """A repair that meets a broken declaration once dropped every graph that was replaying."""
    mood = {"how": "raise"}

    def prep(view: Any) -> Any:
        if view.bucket.requests == 2 and mood["how"] == "raise":
            raise ValueError("not yet")
        return {"other" if view.bucket.requests == 2 and mood["how"] == "break" else "pos": view.n - 1}

    made = runner(prep, contract(outputs={"pos": "token"}), ladder=[1, 2, 4])
    assert states(made) == {1: "captured", 2: "quarantined", 4: "captured"}
    mood["how"] = "break"
    assert made.maintain() == []
    assert states(made) == {1: "captured", 2: "quarantined", 4: "captured"}
    assert way(made.replay(batch()))[0] == "glue"
    assert way(made.replay(batch(2)))[::2] == ("eager", "quarantined")
    mood["how"] = ""
    assert [key.requests for key in made.maintain()] == [2]
    assert made.replay(batch(2)).metadata["pos"].tolist() == expected(2, 2)


def test_failure_stays_with_its_key_in_the_key_hook() -> None:
    """The engine's hook around one key's recording is no reason to lose the others."""
    bad = {2}

    @contextmanager
    def hook(key: gg.Key) -> Any:
        if key.requests in bad:
            raise OSError("no address")
        yield

    made = runner(hooks=gg.CaptureHooks(key=hook))
    assert states(made) == {2: "quarantined", 4: "captured"}
    assert "the key hook raised OSError: no address" in causes(made)
    assert way(made.replay(batch()))[0] == "glue"
    bad.clear()
    assert [key.requests for key in made.maintain()] == [2]


def test_failure_stays_with_its_key_when_a_repair_is_interrupted() -> None:
    """An interrupt passes through maintain(), and the healthy keys go on replaying."""
    mood: dict[str, type[BaseException]] = {"raises": ValueError}

    def prep(view: Any) -> Any:
        if view.bucket.requests == 2:
            raise mood["raises"]
        return positions(view)

    made = runner(prep)
    mood["raises"] = KeyboardInterrupt
    with pytest.raises(KeyboardInterrupt):
        made.maintain()
    assert states(made)[4] == "captured"
    assert way(made.replay(batch()))[0] == "glue"


# Sources that no slot can hold, or that only looked as if.

INTS = gg.Slot("s", axis="request", dtype=torch.int64, pad=0)


def bound(slot: gg.Slot, source: Any, rows: int) -> Any:
    return bind_source(slot, source, rows, rows, CPU)


@pytest.mark.parametrize(
    ("source", "holds"),
    [
        (np.arange(5)[::-1][:1], [4]),
        (np.array([(1, 7)], dtype=[("b", "i1"), ("a", "i8")])["a"][:1], [7]),
    ],
    ids=["reversed", "field"],
)
def test_binding_a_single_row_of_an_odd_stride_is_taken(
    source: np.ndarray, holds: list[int], shared_runner: gg.Runner
) -> None:
    """With one row numpy calls any stride contiguous, and torch refuses it with an error of its own."""
    step = shared_runner.replay(gg.Batch(1, {"n": source, "ids": [7]}))
    assert step.metadata["pos"].tolist() == [holds[0] - 1, 0]


FLOAT8 = gg.Slot("f", axis="request", dtype=torch.float8_e4m3fn, pad=0.0)
SCALAR = gg.Slot("s", axis="fixed", dtype=torch.float32, pad=0.0)
FLOATS = gg.Slot("s", axis="request", dtype=torch.float32, pad=0.0)


@pytest.mark.parametrize(
    ("slot", "source", "text"),
    [
        (INTS, np.ma.array([1, 2], mask=[False, True]), "is a masked array; expected a plain one"),
        (FLOATS, [torch.ones(1, requires_grad=True)] * 2, "slot 's': the source is"),
        (SCALAR, Fraction(1, 2), "source is a Fraction"),
    ],
    ids=["masked", "list_of_tensors_with_grad", "fraction"],
)
def test_binding_what_the_slot_can_not_hold_is_refused(slot: gg.Slot, source: Any, text: str) -> None:
    """Each was once written anyway, or ended in an error of torch or numpy."""
    with pytest.raises(gg.BindError) as caught:
        bound(slot, source, 2)
    assert text in str(caught.value)


def test_binding_an_infinity_is_refused_only_where_the_dtype_has_none() -> None:
    """float8_e4m3fn clamped it to 448."""
    slot = gg.Slot("f", axis="request", dtype=torch.float8_e5m2, pad=0.0)
    assert bound(slot, [float("inf"), 2.0], 2).source.float().tolist() == [np.inf, 2.0]
    for refusing, source in ((FLOAT8, [float("inf"), 2.0]), (FLOAT8, [2.0, -np.inf])):
        with pytest.raises(gg.BindError, match="is an infinity; expected values that torch"):
            bound(refusing, source, 2)


def test_binding_a_fake_tensor_is_refused_before_the_first_write() -> None:
    """It once failed inside the fill, behind the slots that come before it."""
    with FakeTensorMode():
        fake = torch.ones(3, dtype=torch.int64)
    made = runner()
    made.replay(batch())
    before = {name: slot.clone() for name, slot in made.view(4).items()}
    with pytest.raises(gg.BindError, match="a fake tensor, which has no contents"):
        made.replay(gg.Batch(3, {"n": [1, 2, 3], "ids": fake}))
    assert all(torch.equal(made.view(4)[name], slot) for name, slot in before.items())


# Declarations that failed later, in an error of torch or Python.


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"row_dim": "1"}, "row_dim='1' is not usable; expected an integer"),
        ({"accepts": 3}, "accepts=3"),
        ({"valid": 3}, "valid=3 is not usable; expected (low, high)"),
        ({"dtype": getattr(torch, "float4_e2m1fn_x2", None)}, "float4_e2m1fn_x2"),
        ({"dtype": getattr(torch, "uint4", None)}, "uint4"),
        ({"dtype": getattr(torch, "float8_e8m0fnu", None), "pad": 0.0}, "float8_e8m0fnu"),
        ({"storage": torch.zeros(1, dtype=torch.int64).expand(8)}, "storage that overlaps itself"),
        *[({"name": name}, f"'{name}'") for name in ("keys", "values", "items", "get", "fresh", "class", "lambda")],
    ],
    ids=lambda value: str(value)[:30] if isinstance(value, str) else None,
)
def test_declaration_of_a_slot_is_refused_where_it_is_written(options: dict[str, Any], text: str) -> None:
    """A name that hides the mapping's own, a dtype no fill knows, memory that overlaps itself."""
    if options.get("dtype", 0) is None:
        pytest.skip("needs a torch that has this dtype")
    with pytest.raises(gg.ConfigError) as caught:
        gg.Slot(**{"name": "s", "axis": "request", "dtype": torch.int64, "pad": 0, **options})
    assert text in str(caught.value)


@pytest.mark.parametrize(
    ("make", "text"),
    [
        (lambda: gg.Arena([INTS], [4], num_ranks=-1), "num_ranks=-1: expected a positive integer"),
        (lambda: gg.Arena([INTS], [4], num_ranks=True), "num_ranks=True: expected a positive integer"),
        (lambda: gg.Ladder([2**62]), "expected at most 2147483647"),
        (lambda: runner(slots=5, captured=False), "slots are an iterable of Slot"),
        (lambda: runner(tables=[torch.zeros(1)], captured=False), "tables a mapping of names"),
        (lambda: runner(registry=5, captured=False), "registry is a int; expected a Registry"),
        (lambda: runner(hooks=5, captured=False), "hooks is a int; expected a CaptureHooks"),
    ],
)
def test_declaration_of_an_arena_or_runner_is_refused_where_it_is_written(make: Any, text: str) -> None:
    """These ended in a TypeError or RuntimeError deep inside."""
    with pytest.raises(gg.ConfigError) as caught:
        make()
    assert text in str(caught.value)


@pytest.mark.parametrize(
    ("size", "error"),
    [(9, gg.CapacityError), (gg.Bucket(9, 9, 1), gg.CapacityError), (-1, gg.ConfigError), (3, gg.ConfigError)],
)
def test_declaration_of_a_view_is_checked_alike_on_arena_and_runner(size: Any, error: type[Exception]) -> None:
    """The arena narrowed out of range, and showed rows that are no size of the ladder."""
    made = runner(captured=False)
    for owner in (made.arena, made):
        with pytest.raises(error):
            owner.view(size)
    with pytest.raises(error):
        made.arena.fill(batch(1), size)


def test_declaration_fill_takes_a_size_as_view_does() -> None:
    """One took a size or a bucket, the other a bucket only."""
    arena = gg.Arena([INTS], [2, 4])
    assert arena.fill(gg.Batch(1, {"s": [9]}), 4).s.tolist() == [9, 0, 0, 0]


def test_declaration_a_computed_slot_too_narrow_for_an_eager_step_is_refused_unwritten() -> None:
    """int8 holds the ladder, and not a step above it that runs eagerly."""
    raw = gg.Slot("raw", axis="fixed", dtype=torch.int8, pad=0, value=gg.RAW_TOKENS)
    made = runner(slots=[*slots(), raw], ladder=[100], forward=lambda view, metadata: metadata["pos"])
    assert made.replay(batch(120)).outputs.tolist() == expected(120, 120)
    with pytest.raises(gg.CapacityError, match=r"slot 'raw': torch.int8 can not hold RAW_TOKENS 200"):
        made.replay(batch(200))


# Batches of odd kinds.


@pytest.mark.parametrize(
    ("given", "text"),
    [
        (lambda: None, "a step of type NoneType; expected a graphglue.Batch"),
        (lambda: batch(features=None), "features=None: expected a set of names"),
        (lambda: batch(features="lora"), "features='lora': expected a set of names"),
        (lambda: batch(features=iter(["lora"])), "expected a set of names"),
        (lambda: batch(1, row_tokens=1), "row_tokens=1: expected the tokens of each request, in a list"),
        (lambda: batch(row_tokens=(1 for _ in range(3))), "expected the tokens of each request, in a list"),
        (lambda: gg.Batch(0, 5), "sources is a int; expected a mapping"),
    ],
)
def test_batch_of_an_odd_kind_is_refused_each_time(given: Any, text: str, shared_runner: gg.Runner) -> None:
    """An iterator was consumed by the first look, so that the second decided something else."""
    made, odd = shared_runner, given()
    for _ in range(2):
        with pytest.raises(gg.BindError) as caught:
            made.replay(odd)
        assert text in str(caught.value)


def test_batch_features_that_change_are_looked_at_anew() -> None:
    """A set hashed by identity kept its first decision when it gained a feature."""

    class Names(set):  # type: ignore[type-arg]
        __hash__ = object.__hash__  # type: ignore[assignment]

    made, names = runner(), Names()
    assert way(made.replay(batch(features=names)))[0] == "glue"
    names.add("lora")
    assert way(made.replay(batch(features=names)))[::2] == ("eager", "feature_not_audited")


@pytest.mark.parametrize("planned", [None, [("n", [1])]])
def test_batch_a_plan_that_returns_no_mapping_is_refused(planned: Any) -> None:
    """What a host planner returns travels as slots."""
    made = runner(plan=lambda batch, bucket: planned)
    with pytest.raises(gg.BindError, match=r"the plan of prep 'p' returned a (NoneType|list); expected slot names"):
        made.replay(batch())


# Values that are frozen, copied and named.


@pytest.mark.parametrize("clone", [copy.copy, copy.deepcopy, lambda one: pickle.loads(pickle.dumps(one))])
def test_values_a_ladder_is_copied_and_pickled(clone: Any) -> None:
    """Its own guard against changes stood in the way of every copy."""
    ladder = gg.Ladder([1, 2, 8])
    assert clone(ladder) == ladder
    with pytest.raises(AttributeError):
        clone(ladder).sizes = (1,)


def test_values_a_contract_is_hashed_by_what_it_says() -> None:
    """It is frozen, so it may be a key."""
    assert {contract(): 1}[contract()] == 1
    assert hash(contract()) != hash(contract(name="q"))


def test_values_a_changed_copy_is_checked_like_a_declaration() -> None:
    """model_copy skipped every check; the fault then came out of the capture, as somebody else's."""
    copied = contract().model_copy(update={"outputs": {"pos": "token"}})
    step = runner(declared=copied).replay(batch())
    assert way(step)[0] == "glue"
    with pytest.raises(gg.ContractError, match="idle"):
        contract().model_copy(update={"idle": "skipp"})
    with pytest.raises(gg.ConfigError, match="warmups"):
        gg.RunnerConfig().model_copy(update={"warmups": "many"})


def test_values_callables_of_one_name_are_told_apart() -> None:
    """Two lambdas or partials have no way to be named."""
    pair = [functools.partial(lambda by, view: {"pos": view.n - by}, by) for by in (1, 2)]
    made = gg.Runner(slots=slots(), ladder=[4], prep=pair, device="cpu", config=gg.RunnerConfig(generic_glue=True))
    made.capture()
    metadata = made.replay(batch()).metadata
    assert [tree["pos"].tolist()[:3] for tree in metadata.values()] == [[49, 50, 51], [48, 49, 50]]
    assert list(metadata) == ["partial", "partial_2"]
    with pytest.raises(gg.ConfigError, match="given twice"):
        gg.Runner(slots=slots(), ladder=[4], prep=[pair[0], pair[0]], device="cpu")


def test_values_no_prep_is_named_forward() -> None:
    """It would hide the forward's state in stats()."""
    with pytest.raises(gg.ConfigError, match="a prep named 'forward' would hide the forward"):
        runner(declared=contract(name="forward"), captured=False)


def test_values_an_output_axis_of_no_leaf_is_refused() -> None:
    """A typing mistake in output_axes was accepted."""
    axes = {"out": "token", "typo": "request"}
    made = runner(forward=lambda view, m: {"out": m["pos"] * 2}, output_axes=axes, captured=False)
    with pytest.raises(gg.ContractError, match=r"output_axes names \['typo'\], which the forward does not return"):
        made.capture()


# Tables, counters, memory.


def test_stale_table_is_found_by_capture_and_said_rightly() -> None:
    """Capture recorded over the old table, and every replay then refused it; nothing had been captured."""
    held = {"t": torch.arange(100)}
    made = runner(
        lambda view: {"o": view.tables.t[view.n]},
        contract(tables=("t",)),
        tables={"t": lambda: held["t"]},
        captured=False,
    )
    held["t"] = torch.arange(100) * 2
    for call in (made.capture, lambda: made.replay(batch())):
        with pytest.raises(gg.StaleTableError, match="since it was taken in") as caught:
            call()
        assert "captured graphs read" not in str(caught.value)
    made.rebind_table("t", lambda: held["t"])
    made.capture()
    assert made.replay(batch()).metadata["o"].tolist() == [100, 102, 104, 2]


def test_growth_counters_do_not_grow_with_the_extents_of_exact_steps() -> None:
    """A prefill engine meets hundreds of thousands of extents."""
    exact = gg.RunnerConfig(max_requests=2)
    made = runner(
        declared=contract(modes={gg.Mode.EXTEND}), forward=lambda view, _: view.ids * 2, ladder=[2], config=exact
    )
    ledger: Ledger = made._stepper.ledger
    for tokens in range(3, 40):
        sources = {"n": [5], "ids": list(range(tokens))}
        step = made.replay(gg.Batch(1, sources, num_tokens=tokens, mode=gg.Mode.EXTEND))
        assert way(step)[2] == "over_ladder"
    assert len(ledger._tallies) == 1
    stats = made.stats()
    assert (stats["steps"], stats["real_tokens"]) == (37, sum(range(3, 40)))


def test_growth_views_do_not_grow_with_the_variants_of_a_batch(monkeypatch: pytest.MonkeyPatch) -> None:
    """An engine may put an adapter's id into the variant."""
    monkeypatch.setattr("graphglue.units._MAX_VIEWS", 5)
    made = runner(forward=double)
    for variant in range(12):
        assert way(made.replay(batch(variant=variant)))[2] == "not_captured"
    assert len(made._views._kept) == 5


def test_monitoring_counters_are_read_while_steps_are_counted() -> None:
    """A metrics thread reads stats() beside the steps, and one is counted while it looks at the last ones."""
    ledger, decision = Ledger(), runner(captured=False).can_replay(batch())
    tally = ledger.tally(decision, False)

    class Looked:
        """Count a step when it is looked at, as another thread might just then."""

        def __getattr__(self, name: str) -> Any:
            ledger.note(tally, decision, gg.Bucket(3, 3, 1))
            return getattr(decision, name)

    for _ in range(2):
        ledger.note(tally, Looked(), gg.Bucket(3, 3, 1))
    last = ledger.counters()["last_decisions"]
    assert {one["reason"] for one in last} == {decision.reason.value}
    assert ledger.counters()["steps"] > len(last) >= 2


def test_state_carry_an_engine_s_state_that_a_forward_reads_and_then_writes_is_no_memo() -> None:
    """What was there before the warm-up is the engine's, however the warm-up wrote it."""
    state = torch.zeros(4, dtype=torch.int64)

    def forward(view: Any, metadata: Any) -> torch.Tensor:
        before = state[: view.bucket.tokens].clone()
        state[: view.bucket.tokens].add_(view.x)
        return before + metadata["pos"]

    config = gg.RunnerConfig(generic_glue=True)
    slots = [gg.Slot("x", "token", torch.int64, 1)]
    with gg.Runner(slots=slots, ladder=[4], prep=lambda v: {"pos": v.x - 1}, forward=forward, config=config) as runner:
        runner.capture()
        state.zero_()
        for turn in range(3):
            step = runner.replay(gg.Batch(4, {"x": [1, 2, 3, 4]}))
            assert step.decision.forward is gg.Route.GRAPH
            assert step.outputs.tolist() == [turn * x + x - 1 for x in (1, 2, 3, 4)]


@pytest.mark.parametrize("early", [False, True])
def test_plan_stale_a_memoised_forward_or_intermediate_is_not_replayed(early: bool) -> None:
    """The memo may be the forward's, stand one operation before the result, or be older than the capture."""
    memo: dict[Any, torch.Tensor] = {}

    def prep(view: Any) -> dict[str, torch.Tensor]:
        kept = memo.setdefault(view.bucket, view.x - 1)
        return {"pos": kept if early else kept + 0}

    contract = gg.PrepContract(name="p", reads={"x": 1}, modes={gg.Mode.DECODE}, outputs={"pos": "token"})
    registry = gg.Registry()
    registry.register(contract)(prep)
    runner = gg.Runner(slots=[gg.Slot("x", "token", torch.int64, 1)], ladder=[4], prep="p", registry=registry)
    if early:
        runner.replay(gg.Batch(3, {"x": [20, 21, 22]}))
    with pytest.raises(gg.CaptureError, match="memoised"):
        runner.capture()
    assert runner.replay(gg.Batch(3, {"x": [20, 21, 22]})).decision.reason is gg.Reason.QUARANTINED


def test_plan_stale_a_constant_in_memory_that_was_freed_is_no_memo() -> None:
    """A constant may be made where a temporary of the slots lay; addresses come back."""
    memo: dict[Any, torch.Tensor] = {}

    def prep(view: Any) -> dict[str, torch.Tensor]:
        (view.x + 1).sum()  # freed at once
        if view.bucket not in memo:
            memo[view.bucket] = torch.arange(view.bucket.tokens) * 3
        return {"pos": view.x + memo[view.bucket]}

    contract = gg.PrepContract(name="p", reads={"x": 1}, modes={gg.Mode.DECODE}, outputs={"pos": "token"})
    registry = gg.Registry()
    registry.register(contract)(prep)
    slots = [gg.Slot("x", "token", torch.int64, 1)]
    with gg.Runner(slots=slots, ladder=[1, 2, 4, 8], prep="p", registry=registry) as runner:
        runner.capture()
        for size in (1, 2, 4, 8):
            step = runner.replay(gg.Batch(size, {"x": torch.arange(size)}))
            assert step.decision.prep is gg.Route.GLUE
            assert step.metadata["pos"].tolist() == [4 * row for row in range(size)]
