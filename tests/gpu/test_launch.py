"""One launch per step on a GPU: it composes, is counted, and gives what separate launches and eager calls give.

The engine here has slots on two axes, a table, a prep with derived metadata and a forward with a matrix product.
A step is compared bit for bit with the same functions called eagerly on a batch that was padded from scratch.
"""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from graphglue import (
    BUCKET_TOKENS,
    RAW_REQUESTS,
    REPEAT_LAST,
    Batch,
    BindError,
    CaptureError,
    ConfigError,
    GraphGlueError,
    Key,
    Mode,
    PrepContract,
    Reason,
    Registry,
    Route,
    Runner,
    RunnerConfig,
    Slot,
)
from graphglue.device import kernel
from graphglue.device.launch import ParentLaunch, PrependedLaunch
from graphglue.graphs.cuda import CudaRecorder

DEVICE = "cuda"
LADDER = [2, 4, 8]
WIDTH = 64
BUSY_CYCLES = 400_000_000  # about 0.2 s of an H200
CONTRACT = PrepContract(
    name="meta",
    reads={"seq_lens": 1, "rows": 0, "loc": -1, "cu": REPEAT_LAST},
    tables=("t",),
    outputs={"pages": "request", "positions": "request", "cu": "offset", "where": "token"},
    modes={Mode.DECODE},
    idle="glue",
)
PADS = {"seq_lens": 1, "rows": 0, "loc": -1, "ids": 3, "hidden": -0.5}


def slots() -> list[Slot]:
    return [
        Slot("seq_lens", "request", torch.int32, 1),
        Slot("rows", "request", torch.int64, 0),
        Slot("loc", "token", torch.int64, -1),
        Slot("cu", "offset", torch.int32, REPEAT_LAST),
        Slot("ids", "token", torch.int64, 3),
        Slot("hidden", "token", torch.bfloat16, -0.5, inner=(WIDTH,)),
        Slot("n", "fixed", torch.int32, 0, inner=(1,), value=BUCKET_TOKENS),
    ]


def table() -> torch.Tensor:
    return (torch.arange(7 * 12).reshape(7, 12) * 3).to(DEVICE)


def weight() -> torch.Tensor:
    return torch.linspace(-1, 1, WIDTH * WIDTH).reshape(WIDTH, WIDTH).to(torch.bfloat16).to(DEVICE)


def meta(view: Any) -> dict[str, torch.Tensor]:
    return {
        "pages": view.tables.t[view.rows][:, ::4],
        "positions": view.seq_lens - 1,
        "cu": torch.cumsum(view.cu, 0),
        "where": view.loc * 2,
    }


class Model:
    """A forward with a weight; bf16 rounds differently wherever the order of operations does."""

    def __init__(self) -> None:
        self.weight = weight()

    def __call__(self, view: Any, metadata: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        mixed = view.ids * 1000 + metadata["positions"] * 10 + metadata["pages"].sum(1) + metadata["where"]
        hidden = torch.relu(view.hidden @ self.weight) * metadata["positions"][:, None]
        return {"next": mixed % 97 + metadata["cu"][1:] + view.n, "hidden": hidden}


def draw(raw: int, start: int = 0) -> dict[str, torch.Tensor]:
    """Give one step's values on the CPU."""
    rows = torch.arange(start, start + raw)
    return {
        "seq_lens": (2 + rows % 9).to(torch.int32),
        "rows": 1 + rows % 6,
        "loc": 5 + rows,
        "cu": torch.arange(raw + 1, dtype=torch.int32) + start,
        "ids": 40 + rows * 3,
        "hidden": ((rows[:, None] * 7 + torch.arange(WIDTH)) % 31 / 8 - 1).to(torch.bfloat16),
    }


def on_device(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.to(DEVICE)


def as_array(tensor: torch.Tensor) -> Any:
    return tensor if tensor.dtype == torch.bfloat16 else tensor.clone().numpy()


KINDS: dict[str, Callable[[torch.Tensor], Any]] = {"device": on_device, "array": as_array, "host": torch.clone}


def padded(values: Mapping[str, torch.Tensor], bucket: int, t: torch.Tensor) -> Any:
    """Build a pad-filled batch from scratch."""
    made = {}
    for name, pad in PADS.items():
        head = values[name]
        tail = torch.full((bucket - len(head), *head.shape[1:]), pad, dtype=head.dtype)
        made[name] = torch.cat([head, tail]).to(DEVICE)
    cu = values["cu"].tolist()
    raw = len(cu) - 1
    made["cu"] = torch.tensor(cu + [cu[-1]] * (bucket - raw) if raw else [0] * (bucket + 1), dtype=torch.int32)
    made["cu"] = made["cu"].to(DEVICE)
    made["n"] = torch.tensor([bucket], dtype=torch.int32, device=DEVICE)
    return SimpleNamespace(**made, tables=SimpleNamespace(t=t), variant=None)


def bits(tree: Any) -> Any:
    """Read the bits of a tree of tensors."""
    if isinstance(tree, torch.Tensor):
        return (tree.dtype, tuple(tree.shape), tree.detach().contiguous().cpu().reshape(-1).view(torch.uint8).tolist())
    return {name: bits(leaf) for name, leaf in tree.items()}


def batch_of(raw: int, start: int = 0, kind: str = "device", **more: Any) -> Batch:
    """Build a step. An upload waits for the stream, so what is to be queued is built before."""
    if raw == 0:
        return Batch.idle(variant=more.get("variant"))
    return Batch(raw, {name: KINDS[kind](value) for name, value in draw(raw, start).items()}, **more)


class Engine:
    """A runner with what it was made from."""

    def __init__(
        self, prep: Any = meta, forward: Any = None, contract: PrepContract | None = None, **more: Any
    ) -> None:
        self.prep, self.forward, self.t = prep, forward or Model(), more.pop("t", None)
        self.t = table() if self.t is None else self.t
        registry = Registry()
        hooks = {name: more.pop(name) for name in ("plan", "publish") if name in more}
        registry.register(contract or CONTRACT, **hooks)(prep)
        made: dict[str, Any] = {
            "slots": slots(),
            "ladder": LADDER,
            "registry": registry,
            "prep": (contract or CONTRACT).name,
            "tables": {"t": self.t},
            "forward": self.forward,
            "device": DEVICE,
        }
        self.runner = Runner(**{**made, **more})

    def captured(self) -> Engine:
        self.runner.capture(progress=False)
        return self

    def step(self, raw: int, start: int = 0, kind: str = "device", **more: Any) -> Any:
        return self.runner.replay(batch_of(raw, start, kind, **more))

    def right(self, raw: int, start: int = 0, kind: str = "device", **more: Any) -> Any:
        """Run a step and hold it against the eager functions."""
        step = self.step(raw, start, kind, **more)
        view = padded(draw(raw, start), step.decision.bucket.requests, self.t)
        view.variant = more.get("variant")
        metadata = self.prep(view)
        outputs = self.forward(view, metadata)
        assert bits(step.metadata) == bits(metadata), (raw, start, kind)
        assert bits(step.outputs) == bits({name: leaf[:raw] for name, leaf in outputs.items()}), (raw, start, kind)
        return step

    def launches(self) -> list[Any]:
        """Give what was composed for each key."""
        return [composed.launch for composed in self.runner._capture.launches.values()]

    @property
    def counts(self) -> tuple[int, dict[str, int]]:
        stats = self.runner.stats()
        return stats["one_launch"], stats["launch_fallbacks"]


class ForeignRecording:
    """What somebody else's recorder gives: all that the protocol asks for, and no graph."""

    def __init__(self, made: Any) -> None:
        self._made = made

    def __getattr__(self, name: str) -> Any:
        if name == "graph":
            raise AttributeError(name)
        return getattr(self._made, name)


class ForeignRecorder:
    """Somebody else's recorder."""

    def __init__(self) -> None:
        self._inner = CudaRecorder(DEVICE)
        self.device, self.session, self.finish = self._inner.device, self._inner.session, self._inner.finish

    def record(self, run: Callable[[], Any], *, strict: bool = True) -> ForeignRecording:
        return ForeignRecording(self._inner.record(run, strict=strict))


@contextmanager
def busy(cycles: int = BUSY_CYCLES) -> Iterator[torch.cuda.Event]:
    """Keep the GPU busy while steps are queued; the event tells when it no longer is."""
    torch.cuda.synchronize()
    torch.cuda._sleep(cycles)
    done = torch.cuda.Event()
    done.record()
    yield done


def prepended(engine: Engine) -> Engine:
    """Make the engine compose in the forward's own graph, as if the forward drew random numbers."""
    engine.runner._capture._random.update(dict.fromkeys(engine.runner.space.keys(), "forward"))
    return engine


# One launch.


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("compose", [lambda engine: engine, prepended], ids=["parent", "prepended"])
def test_every_step_is_one_launch_and_right(compose: Callable[[Engine], Engine], kind: str) -> None:
    engine = compose(Engine()).captured()
    expected = PrependedLaunch if compose is prepended else ParentLaunch
    assert [type(launch) for launch in engine.launches()] == [expected] * len(LADDER)
    for start in (0, 3, 20):
        for raw in (8, 1, 3, 0, 5, 8, 2, 7):
            step = engine.right(raw, start, kind)
            assert (step.decision.prep, step.decision.forward) == (Route.GLUE, Route.GRAPH)
    assert engine.counts == (24, {})
    engine.runner.close()


def test_the_comparison_can_fail() -> None:
    engine = Engine().captured()
    engine.right(3)
    engine.forward.weight[0, 0].neg_()  # the graph reads the weight where it is: both sides see it
    engine.right(3)
    engine.prep = lambda view: {**meta(view), "where": view.loc * 2 + (view.loc == -1)}
    with pytest.raises(AssertionError):
        engine.right(3)
    engine.prep = meta
    engine.right(8)
    engine.forward = lambda view, metadata: {**Model()(view, metadata), "next": view.ids}
    with pytest.raises(AssertionError):
        engine.right(8)


def test_one_launch_equals_separate_launches_bit_for_bit_whatever_ran_before() -> None:
    one, apart, in_front = (
        Engine().captured(),
        Engine(recorder=ForeignRecorder()).captured(),
        prepended(Engine()).captured(),
    )
    rng = np.random.default_rng(5)
    steps = 40
    for start in range(steps):
        raw, kind = int(rng.integers(0, 9)), ["device", "array", "host"][int(rng.integers(0, 3))]
        made = [engine.step(raw, start, kind) for engine in (one, apart, in_front)]
        metadata, outputs = [bits(step.metadata) for step in made], [bits(step.outputs) for step in made]
        assert metadata[0] == metadata[1] == metadata[2]
        assert outputs[0] == outputs[1] == outputs[2]
    assert one.counts == in_front.counts == (steps, {})
    assert apart.counts == (0, {"another recorder than graphglue's made the graphs": steps})


def test_the_two_compositions_serve_the_same_program_side_by_side() -> None:
    """Keys of one runner share nothing but the slots: some are composed one way, some the other."""
    engine = Engine()
    keys = [key for size in (2, 8) for key in engine.runner.space.keys([size])]
    engine.runner._capture._random.update(dict.fromkeys(keys, "forward"))
    engine.captured()
    assert {type(launch) for launch in engine.launches()} == {ParentLaunch, PrependedLaunch}
    for start in range(4):
        for raw in (2, 4, 8, 3, 7, 1, 0):
            engine.right(raw, start, ["device", "array"][start % 2])
    assert engine.counts == (28, {})


def test_queued_steps_keep_their_own_values_in_both_compositions() -> None:
    for engine in (Engine().captured(), prepended(Engine()).captured()):
        engine.right(8)
        batches = [batch_of(start % 9, start, ["device", "array"][start % 2]) for start in range(60)]
        kept = []
        with busy() as done:
            for batch in batches:
                step = engine.runner.replay(batch)
                kept.append((step.decision.bucket.requests, step.outputs["next"].clone()))
            assert not done.query(), "the GPU was not busy: nothing was queued"
        check_kept(engine, kept)


def check_kept(engine: Engine, kept: list[tuple[int, torch.Tensor]]) -> None:
    """Hold what was kept of steps, the n-th with n % 9 requests, against eager calls."""
    for start, (bucket, seen) in enumerate(kept):
        view = padded(draw(start % 9, start), bucket, engine.t)
        assert torch.equal(seen, engine.forward(view, engine.prep(view))["next"][: start % 9]), start


def test_a_node_made_with_the_small_struct_takes_the_large_one_and_back() -> None:
    """Capturing again after a small step builds the node from the small struct."""
    many = [Slot("x", "request", torch.int64, 0, inner=(300,)), Slot("y", "request", torch.int32, 1)]
    contract = PrepContract(name="sum", reads={"x": 0, "y": 1}, modes={Mode.DECODE}, idle="glue")
    registry = Registry()
    registry.register(contract)(lambda view: {"s": view.x.sum(1) + view.y})
    runner = Runner(
        slots=many, ladder=[8], registry=registry, prep="sum", forward=lambda v, m: m["s"] * 2, device=DEVICE
    )
    for _ in range(2):
        runner.capture(progress=False)
        for raw in (1, 8, 1, 8, 0, 8, 1):
            rows = np.arange(raw * 300).reshape(raw, 300)
            batch = Batch(raw, {"x": rows, "y": np.arange(raw, dtype=np.int32)}) if raw else Batch.idle()
            assert runner.replay(batch).outputs.tolist() == ((rows.sum(1) + np.arange(raw)) * 2).tolist()
        runner.reset()
        assert runner.stats()["launch_fallbacks"] == {}


def test_two_variants_of_one_bucket_share_its_fill() -> None:
    model = Model()

    def forward(view: Any, metadata: Any) -> dict[str, torch.Tensor]:
        made = model(view, metadata)
        return {**made, "next": made["next"] * (3 if view.variant == "lora" else 1)}

    engine = Engine(forward=forward, variants=(None, "lora")).captured()
    for start in range(6):
        engine.right(8 - start, start, "array", variant="lora" if start % 2 else None)
        engine.right(3, start, "device", variant=None if start % 2 else "lora")
    assert engine.counts == (12, {})


def test_twenty_five_slots_of_every_kind() -> None:
    dtypes = [torch.int64, torch.int32, torch.float32, torch.bfloat16, torch.int8]
    many = [
        Slot(f"s{i}", ["request", "token"][i % 2], dtypes[i % 5], i % 7, inner=[(), (3,), (2, 2)][i % 3])
        for i in range(25)
    ]
    contract = PrepContract(name="all", reads={slot.name: slot.pad for slot in many}, modes={Mode.DECODE}, idle="glue")

    def prep(view: Any) -> dict[str, torch.Tensor]:
        return {slot.name: view[slot.name] * 2 for slot in many}

    registry = Registry()
    registry.register(contract)(prep)
    runner = Runner(
        slots=many,
        ladder=[4, 8],
        registry=registry,
        prep="all",
        forward=lambda view, metadata: {name: leaf + 1 for name, leaf in metadata.items()},
        device=DEVICE,
        tokens_per_request=2,
        output_axes={slot.name: slot.axis for slot in many},
    )
    runner.capture(progress=False)
    for start in range(6):
        raw = (start * 3) % 8 + 1
        values = {
            slot.name: (torch.arange(np.prod(slot.shape(slot.rows(raw, 2 * raw)))) % 11 + start)
            .reshape(slot.shape(slot.rows(raw, 2 * raw)))
            .to(slot.dtype)
            for slot in many
        }
        sources = {
            name: on_device(value) if (int(name[1:]) + start) % 3 else as_array(value) for name, value in values.items()
        }
        step = runner.replay(Batch(raw, sources))
        bucket = step.decision.bucket
        for slot in many:
            whole = torch.full(slot.shape(slot.rows(*bucket[:2])), slot.pad, dtype=slot.dtype)
            whole[: len(values[slot.name])] = values[slot.name]
            assert torch.equal(step.metadata[slot.name].cpu(), whole * 2), slot.name
    assert runner.stats()["one_launch"] == 6


def test_several_preps_are_in_the_launch_in_order() -> None:
    registry = Registry()
    shared = torch.zeros(8, dtype=torch.int64, device=DEVICE)

    def first(view: Any) -> dict[str, torch.Tensor]:
        shared.copy_(torch.nn.functional.pad(view.x, (0, 8 - len(view.x))))
        return {"a": view.x + 1}

    def second(view: Any) -> dict[str, torch.Tensor]:
        return {"b": shared[: len(view.x)] * 10}

    for name, leaf, prep in (("first", "a", first), ("second", "b", second)):
        registry.register(PrepContract(name=name, reads={"x": 0}, outputs={leaf: "request"}, modes={Mode.DECODE}))(prep)
    runner = Runner(
        slots=[Slot("x", "request", torch.int64, 0)], ladder=[4, 8], registry=registry, prep=["first", "second"],
        forward=lambda view, metadata: metadata["first"]["a"] + metadata["second"]["b"], device=DEVICE,
    )  # fmt: skip
    runner.capture(progress=False)
    for raw in (3, 8, 5, 1):
        x = np.arange(raw) + raw
        assert runner.replay(Batch(raw, {"x": x})).outputs.tolist() == (x + 1 + x * 10).tolist()
    assert runner.stats()["one_launch"] == 4


def test_a_runner_without_a_forward_launches_fill_and_prep_together() -> None:
    engine = Engine()
    registry = Registry()
    registry.register(CONTRACT)(meta)
    runner = Runner(slots=slots(), ladder=LADDER, registry=registry, prep="meta", tables={"t": engine.t}, device=DEVICE)
    runner.capture(progress=False)
    for raw in (8, 3, 0, 1):
        sources = {name: on_device(value) for name, value in draw(raw, raw).items()}
        step = runner.replay(Batch(raw, sources) if raw else Batch.idle())
        assert bits(step.metadata) == bits(meta(padded(draw(raw, raw), step.decision.bucket.requests, engine.t)))
    assert (runner.stats()["one_launch"], runner.stats()["launch_fallbacks"]) == (4, {})


# Eager routes beside the launch.


@pytest.mark.parametrize("compose", [lambda engine: engine, prepended], ids=["parent", "prepended"])
def test_eager_preps_and_idle_steps_between_launches_are_right(compose: Callable[[Engine], Engine]) -> None:
    engine = compose(Engine(contract=CONTRACT.model_copy(update={"idle": "eager"}))).captured()
    for start in range(4):
        engine.right(5, start, "array")
        eager = engine.right(6, start + 1, "device", features=frozenset({"lora"}))
        assert (eager.decision.prep, eager.decision.forward) == (Route.EAGER, Route.GRAPH)
        engine.right(3, start + 2, "array", features=frozenset({"lora"}))
        idle = engine.right(0)
        assert idle.decision.reason is Reason.IDLE_EAGER
        engine.right(1, start + 3)
        assert engine.right(9, start).decision.reason is Reason.OVER_LADDER
        engine.right(8, start + 4, "array")
    assert engine.counts == (12, {})


def test_keys_that_were_not_captured_run_eagerly_between_those_that_were() -> None:
    engine = Engine()
    engine.runner.capture([4], progress=False)
    for start in range(3):
        for raw in (3, 8, 1, 4, 0):
            step = engine.right(raw, start, ["device", "array"][start % 2])
            assert (step.decision.forward is Route.GRAPH) == (raw in (3, 4))
    assert engine.counts == (6, {})


def test_a_quarantined_prep_is_eager_and_one_launch_once_it_was_repaired() -> None:
    faulty = [True]

    def prep(view: Any) -> dict[str, torch.Tensor]:
        if faulty[0] and view.seq_lens.shape[0] == 4:
            view.seq_lens.sum().item()
        return meta(view)

    engine = Engine(prep).captured()
    for raw, route in ((3, Route.EAGER), (8, Route.GLUE), (4, Route.EAGER), (1, Route.GLUE)):
        assert engine.right(raw, raw, "array").decision.prep is route
    assert engine.counts == (2, {})
    faulty[0] = False
    assert [key.requests for key in engine.runner.maintain()] == [4]
    for raw in (3, 8, 4, 1):
        assert engine.right(raw, raw).decision.prep is Route.GLUE
    assert engine.counts == (6, {})


def test_a_refused_step_leaves_the_next_one_right() -> None:
    engine = Engine().captured()
    engine.right(5, 0, "array")
    good = {name: as_array(value) for name, value in draw(5, 9).items()}
    for bad in ({"ids": good["ids"][:4]}, {"ids": good["ids"].astype(np.float32)}, {"nobody": good["ids"]}):
        before = bits({name: engine.runner.view(8)[name] for name in engine.runner.view(8)})
        with pytest.raises(BindError):
            engine.runner.replay(Batch(5, {**good, **bad}))
        assert bits({name: engine.runner.view(8)[name] for name in engine.runner.view(8)}) == before
        engine.right(5, 1, "array")
        engine.right(5, 2)


# Random numbers.

DRAWS = 16


def drawing(view: Any, metadata: Any) -> dict[str, torch.Tensor]:
    """Draw twice, between other work."""
    noise = torch.rand(len(view.ids), DRAWS, device=DEVICE)
    keep = torch.nn.functional.dropout(torch.ones(len(view.ids), DRAWS, device=DEVICE), 0.5)
    return {"next": metadata["where"] + view.ids, "noise": noise, "keep": keep}


def eager_draws(bucket: int) -> tuple[torch.Tensor, torch.Tensor]:
    return (
        torch.rand(bucket, DRAWS, device=DEVICE),
        torch.nn.functional.dropout(torch.ones(bucket, DRAWS, device=DEVICE), 0.5),
    )


def check_draws(engine: Engine, plan: list[tuple[int, dict[str, Any]]], seed: int = 7) -> None:
    """Run steps from a seed; their numbers are those that eager calls draw from it."""
    torch.cuda.manual_seed(seed)
    seen = []
    for start, (raw, more) in enumerate(plan):
        step = engine.step(raw, start, ["device", "array"][start % 2], **more)
        view = padded(draw(raw, start), step.decision.bucket.requests, engine.t)
        assert torch.equal(step.outputs["next"], (view.loc * 2 + view.ids)[:raw])
        outputs = step.outputs
        seen.append((step.decision.bucket.requests, raw, outputs["noise"].clone(), outputs["keep"].clone()))
    torch.cuda.manual_seed(seed)
    for number, (bucket, raw, noise, keep) in enumerate(seen):
        expected = eager_draws(bucket)
        assert torch.equal(noise, expected[0][:raw]), f"step {number} of {plan}"
        assert torch.equal(keep, expected[1][:raw]), f"step {number} of {plan}"


def test_a_forward_that_draws_random_numbers_draws_what_eager_calls_draw() -> None:
    engine = Engine(forward=drawing).captured()
    assert {type(launch) for launch in engine.launches()} == {PrependedLaunch}
    check_draws(engine, [(raw, {}) for raw in (8, 8, 3, 1, 5, 8, 2)])
    check_draws(engine, [(raw, {}) for raw in (8, 8, 3)], seed=8)
    assert engine.counts == (10, {})


def test_the_draws_would_show_numbers_that_repeat() -> None:
    """Show that the test above can fail: a parent of child graphs repeats them."""
    engine = Engine(forward=drawing)
    capture = engine.runner._capture
    compose = capture._arena.device.compose
    capture._arena.device.compose = lambda fill, preps, forward, random, *rest: compose(
        fill, preps, forward, None, *rest
    )
    engine.captured()
    with pytest.raises(AssertionError):
        check_draws(engine, [(8, {}), (8, {})])


def test_a_drawing_forward_goes_on_drawing_anew_on_the_eager_routes() -> None:
    engine = Engine(forward=drawing, contract=CONTRACT.model_copy(update={"idle": "eager"})).captured()
    lora = {"features": frozenset({"lora"})}
    check_draws(
        engine, [(8, {}), (3, lora), (3, {}), (0, {}), (8, lora), (8, {}), (0, {}), (0, {}), (2, lora), (2, {})]
    )


def test_a_prep_that_draws_is_launched_apart_and_counted_with_its_cause() -> None:
    """A prep and a forward that draw do not share a launch (RNG-4)."""

    def prep(view: Any) -> dict[str, torch.Tensor]:
        return {**meta(view), "noise": torch.rand(len(view.ids), DRAWS, device=DEVICE)}

    contract = CONTRACT.model_copy(update={"reads": {**CONTRACT.reads, "ids": 3}})
    forward: Any = lambda view, metadata: {"noise": metadata["noise"] * 2, "next": view.ids}  # noqa: E731
    engine = Engine(prep, forward, contract).captured()
    torch.cuda.manual_seed(3)
    seen = [engine.step(8, start).outputs["noise"].clone() for start in range(5)]
    torch.cuda.manual_seed(3)
    assert all(torch.equal(one, torch.rand(8, DRAWS, device=DEVICE) * 2) for one in seen)
    one_launch, fallbacks = engine.counts
    assert (one_launch, list(fallbacks.values())) == (0, [5])
    assert "a prep draws random numbers" in next(iter(fallbacks))


def test_a_prep_that_draws_draws_anew_in_a_runner_without_a_forward() -> None:
    registry = Registry()
    contract = PrepContract(name="noise", reads={"x": 0}, modes={Mode.DECODE})
    registry.register(contract)(lambda view: {"noise": torch.rand(len(view.x), DRAWS, device=DEVICE) + view.x[:, None]})
    runner = Runner(
        slots=[Slot("x", "request", torch.int64, 0)], ladder=[4], registry=registry, prep="noise", device=DEVICE
    )
    runner.capture(progress=False)
    torch.cuda.manual_seed(3)
    x = torch.arange(4, device=DEVICE)
    seen = [runner.replay(Batch(4, {"x": x})).metadata["noise"].clone() for _ in range(4)]
    torch.cuda.manual_seed(3)
    assert all(torch.equal(one, torch.rand(4, DRAWS, device=DEVICE) + x[:, None]) for one in seen)
    assert sum(runner.stats()["launch_fallbacks"].values()) == 4


# Graphs that can not be joined, and devices without the kernel.


def counted(engine: Engine, steps: int) -> dict[str, int]:
    """Check that every step was one launch or a fallback that says why; give the fallbacks."""
    one_launch, fallbacks = engine.counts
    assert one_launch + sum(fallbacks.values()) == steps
    assert all(fallbacks)
    return fallbacks


def test_a_forward_with_memory_nodes_is_right_and_counted() -> None:
    from cuda.bindings import driver

    model = Model()

    def forward(view: Any, metadata: Any) -> dict[str, torch.Tensor]:
        """Allocate, set, copy and free on the stream: under capture these become memory nodes."""
        stream = torch.cuda.current_stream().cuda_stream
        made = model(view, metadata)
        held = torch.zeros(64, dtype=torch.uint8, device=DEVICE)
        address = kernel.checked(driver.cuMemAllocAsync(4096, stream))
        kernel.checked(driver.cuMemsetD8Async(address, 7, 4096, stream))
        kernel.checked(driver.cuMemcpyDtoDAsync(held.data_ptr(), address, 64, stream))
        kernel.checked(driver.cuMemFreeAsync(address, stream))
        return {**made, "next": made["next"] + held[0]}

    engine = Engine(forward=forward).captured()
    for start in range(3):
        for raw in (8, 3, 0, 5):
            step = engine.right(raw, start, ["device", "array"][start % 2])
            assert step.decision.forward is Route.GRAPH
    fallbacks = counted(engine, 12)
    assert all("the graphs can not be composed" in why for why in fallbacks)


def _set_by_a_condition(target: torch.Tensor, value: int) -> None:
    """Set a tensor inside the body of a conditional node, whose condition is true by default."""
    from cuda.bindings import driver

    stream = torch.cuda.current_stream().cuda_stream
    status, _, graph, before, edges, count = kernel.checked(driver.cuStreamGetCaptureInfo(stream))
    assert status == driver.CUstreamCaptureStatus.CU_STREAM_CAPTURE_STATUS_ACTIVE
    context = kernel.checked(driver.cuCtxGetCurrent())
    params = driver.CUgraphNodeParams()
    params.type = driver.CUgraphNodeType.CU_GRAPH_NODE_TYPE_CONDITIONAL
    params.conditional.handle = kernel.checked(driver.cuGraphConditionalHandleCreate(graph, context, 1, 1))
    params.conditional.type = driver.CUgraphConditionalNodeType.CU_GRAPH_COND_TYPE_IF
    params.conditional.size = 1
    params.conditional.ctx = context
    node = kernel.checked(driver.cuGraphAddNode(graph, before, edges or None, count, params))
    body = params.conditional.phGraph_out[0]
    memset = driver.CUDA_MEMSET_NODE_PARAMS()
    memset.dst, memset.elementSize, memset.width, memset.height = target.data_ptr(), 4, target.numel(), 1
    memset.pitch, memset.value = 0, value
    kernel.checked(driver.cuGraphAddMemsetNode(body, None, 0, memset, context))
    kernel.checked(driver.cuStreamUpdateCaptureDependencies(stream, [node], None, 1, 1))


def test_a_forward_with_a_conditional_node_is_right_and_counted() -> None:
    model = Model()

    def forward(view: Any, metadata: Any) -> dict[str, torch.Tensor]:
        made = model(view, metadata)
        held = torch.zeros(4, dtype=torch.int32, device=DEVICE)
        if torch.cuda.is_current_stream_capturing():
            _set_by_a_condition(held, 9)
        else:
            held.fill_(9)
        return {**made, "next": made["next"] + held[0]}

    engine = Engine(forward=forward).captured()
    causes = [key["causes"] for key in engine.runner.stats()["keys"]]
    assert causes == [{}] * len(LADDER), "the conditional node could not be built, which is this test's fault"
    for start in range(3):
        for raw in (8, 3, 0, 5):
            assert engine.right(raw, start, ["device", "array"][start % 2]).decision.forward is Route.GRAPH
    assert all("the graphs can not be composed" in why for why in counted(engine, 12))


def test_graphs_of_another_recorder_are_launched_apart() -> None:
    engine = Engine(recorder=ForeignRecorder()).captured()
    for start, kind in enumerate(KINDS):
        for raw in (8, 3, 0, 5):
            engine.right(raw, start, kind)
    assert engine.counts == (0, {"another recorder than graphglue's made the graphs": 12})


@pytest.fixture
def no_compiler(monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    why = "NVRTC is not usable: none here; install nvidia-cuda-nvrtc"

    def compile_fill(*_: object) -> bytes:
        raise kernel.KernelUnavailable(why)

    kernel.load_fill.cache_clear()
    monkeypatch.setattr(kernel, "compile_fill", compile_fill)
    yield why
    kernel.load_fill.cache_clear()


def test_without_a_compiler_the_fill_is_torch_and_every_step_says_so(no_compiler: str) -> None:
    engine = Engine().captured()
    for start, kind in enumerate(KINDS):
        for raw in (8, 3, 0, 5):
            engine.right(raw, start, kind)
    assert engine.counts == (0, {no_compiler: 12})


def test_without_a_compiler_host_sources_are_still_snapshots(no_compiler: str) -> None:
    engine = Engine().captured()
    sources = {name: as_array(value) for name, value in draw(8, 5).items()}
    with busy():
        step = engine.runner.replay(Batch(8, sources))
        for source in sources.values():
            source.fill(0) if isinstance(source, np.ndarray) else source.fill_(0)
    view = padded(draw(8, 5), 8, engine.t)
    assert bits(step.outputs) == bits(engine.forward(view, meta(view)))


def test_slots_that_the_kernel_can_not_address_fall_back_with_their_strides() -> None:
    odd = torch.zeros(3, 8, dtype=torch.int64, device=DEVICE).t()
    made = [slot for slot in slots() if slot.name != "loc"] + [
        Slot("odd", "token", torch.int64, 2, inner=(3,), storage=odd)
    ]
    contract = PrepContract(name="p", reads={"odd": 2, "ids": 3}, modes={Mode.DECODE}, idle="glue")
    registry = Registry()
    registry.register(contract)(lambda view: {"s": view.odd.sum(1) + view.ids})
    runner = Runner(
        slots=made,
        ladder=[4],
        registry=registry,
        prep="p",
        forward=lambda view, metadata: metadata["s"] * 2,
        device=DEVICE,
    )
    runner.capture(progress=False)
    values = {name: on_device(value) for name, value in draw(3).items() if name != "loc"}
    step = runner.replay(Batch(3, {**values, "odd": torch.arange(9, device=DEVICE).view(3, 3)}))
    assert step.outputs.tolist() == [(3 + 40) * 2, (12 + 43) * 2, (21 + 46) * 2]
    (why,) = runner.stats()["launch_fallbacks"]
    assert "slot 'odd' has strides" in why


# Streams, threads of work, modes.


def test_two_runners_in_turn_share_nothing() -> None:
    engines = [Engine().captured(), Engine().captured()]
    batches = [[batch_of(start % 9, start, kind) for start in range(30)] for kind in ("device", "array")]
    kept: list[list[tuple[int, torch.Tensor]]] = [[], []]
    with busy(BUSY_CYCLES // 4):
        for turn in range(30):
            for engine, mine, seen in zip(engines, batches, kept):
                step = engine.runner.replay(mine[turn])
                seen.append((step.decision.bucket.requests, step.outputs["next"].clone()))
    for engine, seen in zip(engines, kept):
        check_kept(engine, seen)
    engines[0].runner.close()
    engines[1].right(5, 3)


@pytest.mark.parametrize("compose", [lambda engine: engine, prepended], ids=["parent", "prepended"])
@pytest.mark.parametrize("kind", ["device", "array"])
def test_steps_on_changing_streams_are_ordered_among_themselves(compose: Callable[[Engine], Engine], kind: str) -> None:
    engine = compose(Engine()).captured()
    streams = [torch.cuda.default_stream(), torch.cuda.Stream(), torch.cuda.Stream()]
    batches = [batch_of(start % 9, start, kind) for start in range(30)]
    torch.cuda.synchronize()
    kept = []
    for start, batch in enumerate(batches):
        with torch.cuda.stream(streams[(start * 7) % 3 if start % 5 else 0]):
            torch.cuda._sleep(2_000_000)
            step = engine.runner.replay(batch)
            torch.cuda._sleep(2_000_000)
            kept.append((step.decision.bucket.requests, step.outputs["next"].clone()))
    torch.cuda.synchronize()
    check_kept(engine, kept)


@pytest.mark.parametrize("capture_in", [nullcontext, torch.no_grad, torch.inference_mode])
@pytest.mark.parametrize("replay_in", [nullcontext, torch.no_grad, torch.inference_mode])
def test_captures_and_replays_inside_and_outside_inference_mode(capture_in: Any, replay_in: Any) -> None:
    with capture_in():
        engine = Engine(contract=CONTRACT.model_copy(update={"idle": "eager"})).captured()
    for start, kind in enumerate(KINDS):
        with replay_in():
            engine.right(5, start, kind)
            engine.right(0)
            engine.right(6, start, kind, features=frozenset({"lora"}))
            engine.right(8, start, kind)
    assert engine.counts == (6, {})


def test_a_replay_neither_waits_for_the_device_nor_allocates_on_it() -> None:
    engine = Engine().captured()
    kinds = ((8, "device"), (3, "array"), (5, "device"), (1, "host"))
    batches = [batch_of(raw, raw, kind) for raw, kind in kinds]
    for batch in batches:
        engine.runner.replay(batch)
    gc.collect()
    with busy() as done:
        allocated = torch.cuda.memory_stats()["allocation.all.allocated"]
        torch.cuda.set_sync_debug_mode("error")
        try:
            for batch in batches * 20:
                engine.runner.replay(batch)
        finally:
            torch.cuda.set_sync_debug_mode("default")
        assert not done.query(), "a replay waited for the device"
    assert torch.cuda.memory_stats()["allocation.all.allocated"] == allocated


# Ends and errors.


@pytest.mark.parametrize("end", ["reset", "close"])
@pytest.mark.parametrize("compose", [lambda engine: engine, prepended], ids=["parent", "prepended"])
def test_a_runner_ends_while_steps_are_queued_and_they_come_out_right(
    compose: Callable[[Engine], Engine], end: str
) -> None:
    log = torch.zeros(80, 8, dtype=torch.int64, device=DEVICE)
    counter = torch.zeros(1, dtype=torch.int64, device=DEVICE)
    model = Model()

    def forward(view: Any, metadata: Any) -> dict[str, torch.Tensor]:
        made = model(view, metadata)
        log.index_copy_(0, counter, torch.nn.functional.pad(made["next"], (0, 8 - len(view.ids)))[None])
        counter.add_(1)
        return made

    engine = compose(Engine(forward=forward)).captured()
    batches = [batch_of(start % 8 + 1, start, ["device", "array"][start % 2]) for start in range(40)]
    counter.zero_()
    with busy() as done:
        for batch in batches:
            engine.runner.replay(batch)
        assert not done.query(), "the GPU was not busy: nothing was queued"
        getattr(engine.runner, end)()
    junk = [torch.full((1 << 20,), 7, device=DEVICE) for _ in range(8)]
    torch.cuda.synchronize()
    assert counter.item() == 40
    for start in range(40):
        raw = start % 8 + 1
        bucket = next(size for size in LADDER if size >= raw)
        view = padded(draw(raw, start), bucket, engine.t)
        assert torch.equal(log[start, :bucket], model(view, meta(view))["next"]), start
    del junk
    if end == "reset":
        counter.zero_()
        assert engine.right(3, 2).decision.forward is Route.EAGER
        counter.zero_()
        engine.captured()
        counter.zero_()
        assert engine.right(3, 2).decision.forward is Route.GRAPH
    engine.runner.close()
    engine.runner.close()


@pytest.mark.parametrize(
    ("compose", "call"),
    [
        (lambda engine: engine, "cuGraphExecKernelNodeSetParams"),
        (lambda engine: engine, "cuGraphLaunch"),
        (prepended, "cuGraphExecKernelNodeSetParams"),
    ],
    ids=["parent's parameters", "parent's launch", "prepended's parameters"],
)
def test_a_call_that_the_driver_refuses_is_named_and_the_next_step_is_right(
    monkeypatch: pytest.MonkeyPatch, compose: Callable[[Engine], Engine], call: str
) -> None:
    from cuda.bindings import driver

    real, refuses = getattr(driver, call), [False]
    failed = (driver.CUresult.CUDA_ERROR_INVALID_VALUE,)
    monkeypatch.setattr(driver, call, lambda *args: failed if refuses[0] else real(*args))
    engine = compose(Engine()).captured()
    engine.right(5, 1, "array")
    for raw in (2, 4, 8):
        refuses[0] = True
        with pytest.raises(GraphGlueError, match=r"the CUDA driver refused.*CUDA_ERROR_INVALID_VALUE"):
            engine.step(raw, 9, "array")
        refuses[0] = False
        engine.right(raw, 3, "array")
        engine.right(raw, 4, "device")
    assert engine.counts == (7, {})


def test_what_was_composed_goes_with_the_runner() -> None:
    """A composed graph keeps its parts' memory, and no longer than the runner has them."""

    def large(view: Any, metadata: Any) -> dict[str, torch.Tensor]:
        return {"next": view.ids + metadata["where"], "large": view.hidden.float().repeat(1, 4096)}  # 8 MiB at 8

    def serve() -> None:
        engine = Engine(forward=large).captured()
        engine.step(5)
        engine.runner.close()

    serve()
    before = reserved()
    for _ in range(3):
        serve()
        assert reserved() <= before + (4 << 20)


def reserved() -> int:
    gc.collect()
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    return torch.cuda.memory_reserved()


# An engine's own forward graph, over slots that adopt its buffers.


class OwnForward:
    """An engine that captured its forward itself, over its own buffers and the runner's metadata."""

    def __init__(self, draws: bool = False, keep_graph: bool = True, capture_first: bool = True, **config: Any) -> None:
        self.buffers = {"x": torch.zeros(8, dtype=torch.int64, device=DEVICE)}
        registry = Registry()
        contract = PrepContract(name="p", reads={"x": 5}, outputs={"m": "request"}, modes={Mode.DECODE}, idle="glue")
        if config.pop("idle_eager", False):
            contract = contract.model_copy(update={"idle": "eager"})
        registry.register(contract)(lambda view: {"m": view.x * 10})
        self.runner = Runner(
            slots=[Slot("x", "request", torch.int64, 5, storage=self.buffers["x"])],
            ladder=[4], registry=registry, prep="p", device=DEVICE, config=RunnerConfig(**config),
        )  # fmt: skip
        if capture_first:
            self.runner.capture(progress=False)
        self.draws, self.keep_graph = draws, keep_graph

    def record(self, metadata: bool = True) -> tuple[torch.cuda.CUDAGraph, torch.Tensor]:
        """Capture the forward: it reads the engine's buffer, and the metadata of the bucket once there is one."""
        x = self.buffers["x"][:4]
        m = self.metadata() if metadata else torch.zeros_like(x)

        def forward() -> torch.Tensor:
            noise = (torch.rand(4, device=DEVICE) * 1e6).long() if self.draws else torch.zeros_like(x)
            return x + m + noise * 1000

        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            forward()
        torch.cuda.current_stream().wait_stream(side)
        graph = torch.cuda.CUDAGraph(keep_graph=self.keep_graph)
        with torch.cuda.graph(graph):
            out = forward()
        return graph, out

    def metadata(self) -> torch.Tensor:
        return self.runner._units[0].cache.result(Key(Mode.DECODE, 4, 4, 1))["m"]

    def adopted(self) -> OwnForward:
        graph, out = self.record()
        self.runner.adopt_forward(4, graph, out, random=self.draws)
        return self

    def step(self, raw: int, start: int, kind: str = "array", **more: Any) -> Any:
        x = np.arange(start, start + raw)
        source = x if kind == "array" else torch.from_numpy(x).to(DEVICE)
        return self.runner.replay(Batch(raw, {"x": source}, **more) if raw else Batch.idle())


def expected_x(raw: int, start: int) -> list[int]:
    return [*range(start, start + raw), *[5] * (4 - raw)]


def test_an_adopted_forward_is_in_the_launch_and_reads_the_engines_buffers() -> None:
    own = OwnForward().adopted()
    for start, raw in enumerate((3, 4, 1, 0, 2, 4)):
        step = own.step(raw, start, ["array", "device"][start % 2])
        whole = expected_x(raw, start)
        assert own.buffers["x"].tolist()[:4] == whole
        assert step.outputs.tolist() == [x + x * 10 for x in whole][:raw]
        assert step.decision.forward is Route.GRAPH
    assert (own.runner.stats()["one_launch"], own.runner.stats()["launch_fallbacks"]) == (6, {})


def test_an_adopted_forward_stays_usable_alone_and_on_the_eager_routes() -> None:
    own = OwnForward(idle_eager=True)
    graph, out = own.record()
    own.runner.adopt_forward(4, graph, out)
    for start in range(3):
        for raw, more in ((3, {}), (2, {"features": frozenset({"lora"})}), (0, {}), (4, {})):
            step = own.step(raw, start, **more)
            assert step.outputs.tolist() == [x * 11 for x in expected_x(raw, start)][:raw]
    own.buffers["x"][:4] = 100
    graph.replay()
    assert out.tolist() == [100 + m for m in own.metadata().tolist()]


def test_an_adopted_forward_that_draws_is_left_to_the_engine_on_the_eager_routes() -> None:
    """Its own graph holds the fill and the preps: replayed alone it would bring back an older step."""
    own = OwnForward(draws=True, idle_eager=True).adopted()
    for start in range(3):
        for raw, more in ((3, {}), (2, {"features": frozenset({"lora"})}), (0, {}), (4, {})):
            step = own.step(raw, start * 10, ["array", "device"][start % 2], **more)
            whole = expected_x(raw, start * 10)
            assert own.buffers["x"].tolist()[:4] == whole, (raw, more)
            assert step.metadata["m"].tolist() == [x * 10 for x in whole], (raw, more)
            if more or not raw:
                assert (step.decision.forward, step.outputs) == (Route.EAGER, None)
            else:
                assert [number % 1000 for number in step.outputs.tolist()] == [x * 11 for x in whole][:raw]


@pytest.mark.parametrize("capture_first", [True, False])
def test_an_adopted_forward_that_draws_draws_anew_in_either_order(capture_first: bool) -> None:
    own = OwnForward(draws=True, capture_first=capture_first)
    graph, out = own.record(metadata=False)
    own.runner.adopt_forward(4, graph, out, random=True)
    if not capture_first:
        own.runner.capture(progress=False)
    torch.cuda.manual_seed(3)
    seen = [[number // 1000 for number in own.step(4, 1).outputs.tolist()] for _ in range(4)]
    torch.cuda.manual_seed(3)
    assert seen == [(torch.rand(4, device=DEVICE) * 1e6).long().tolist() for _ in range(4)]


def test_bad_adoptions_are_refused_by_name() -> None:
    own = OwnForward()
    graph, out = OwnForward(keep_graph=False).record()
    with pytest.raises(CaptureError, match="keep_graph=True"):
        own.runner.adopt_forward(4, graph, out)
    with pytest.raises(CaptureError, match="keep_graph=True"):
        own.runner.adopt_forward(4, torch.cuda.CUDAGraph(keep_graph=True), out)
    with pytest.raises(CaptureError, match="keep_graph=True"):
        own.runner.adopt_forward(4, object(), out)
    with pytest.raises(ConfigError):
        own.runner.adopt_forward(3, graph, out)
    assert own.runner.replay(Batch(2, {"x": [1, 2]})).outputs is None
    own.adopted()
    graph, out = own.record()
    with pytest.raises(CaptureError, match="already"):
        own.runner.adopt_forward(4, graph, out)
    assert own.step(3, 7).outputs.tolist() == [77, 88, 99]
    engine = Engine().captured()
    with pytest.raises(ConfigError, match="captures its own forward"):
        engine.runner.adopt_forward(4, graph, out)
    engine.right(3)


# Read events.


@pytest.mark.parametrize("compose", [lambda engine: engine, prepended], ids=["parent", "prepended"])
def test_read_events_come_before_the_forward_ends(compose: Callable[[Engine], Engine]) -> None:
    """An engine overwrites its sources as soon as these events have been reached (STREAM-ORDER-1)."""
    model = Model()

    def slow(view: Any, metadata: Any) -> dict[str, torch.Tensor]:
        torch.cuda._sleep(200_000_000)  # about 0.1 s
        return model(view, metadata)

    engine = compose(Engine(forward=slow, config=RunnerConfig(events=True))).captured()
    values = draw(5, 2)
    sources = {name: on_device(value) for name, value in values.items()}
    torch.cuda.synchronize()
    step = engine.runner.replay(Batch(5, sources))
    end = torch.cuda.Event()
    end.record()
    step.sources_read().synchronize()
    step.tables_read().synchronize()
    assert not end.query(), "the events waited for the forward"
    side = torch.cuda.Stream()
    with torch.cuda.stream(side):  # an engine that overwrites its buffers once they were read
        for source in sources.values():
            source.zero_()
    torch.cuda.synchronize()
    view = padded(values, 8, engine.t)
    assert bits(step.outputs) == bits({name: leaf[:5] for name, leaf in model(view, meta(view)).items()})
    assert engine.counts == (1, {})


@pytest.mark.parametrize("recorder", [None, ForeignRecorder])
def test_an_event_is_not_reached_while_the_step_is_queued(recorder: Any) -> None:
    """Each replay records its events anew, so none is left from an earlier one (STREAM-ORDER-4)."""
    more = {} if recorder is None else {"recorder": recorder()}
    engine = Engine(config=RunnerConfig(events=True), **more).captured()
    engine.right(3)
    for features in (frozenset(), frozenset({"lora"})):
        with busy() as done:
            step = engine.step(5, 1, "array", features=features)  # an upload would wait for the device
            assert not done.query(), "the GPU was not busy: nothing was queued"
            assert not step.sources_read().query()
            assert not step.tables_read().query()
        torch.cuda.synchronize()
        assert step.sources_read().query()
        assert step.tables_read().query()


def test_events_that_were_not_asked_for_are_refused() -> None:
    step = Engine().captured().right(3)
    for event in (step.sources_read, step.tables_read):
        with pytest.raises(ConfigError, match="events=True"):
            event()


# What a launch keeps alive.


def test_sources_are_held_until_the_device_has_read_them_and_not_for_ever() -> None:
    engine = Engine().captured()
    batches = [batch_of(5, start) for start in range(64)]
    refs = [weakref.ref(batch.sources["hidden"]) for batch in batches]
    with busy() as done:
        while batches:
            engine.runner.replay(batches.pop())
        alive = sum(ref() is not None for ref in refs)
        assert not done.query(), "the GPU was not busy: nothing was queued"
    assert alive == 64, "a source was let go before the device could read it"
    for _ in range(2):  # small sources are let go in groups of 256, once a later group finds that the device is done
        torch.cuda.synchronize()
        for _ in range(256):
            engine.step(5, 1, "array")
    assert sum(ref() is not None for ref in refs) == 0


def test_counts_of_another_slot_value_are_part_of_the_launch() -> None:
    """Numbers that the step computes travel as constants of the same launch."""
    registry = Registry()
    contract = PrepContract(name="n", reads={"n": 0, "x": 0}, modes={Mode.DECODE}, idle="glue")
    registry.register(contract)(lambda view: {"m": view.x + view.n})
    runner = Runner(
        slots=[
            Slot("n", "fixed", torch.int64, 0, inner=(1,), value=RAW_REQUESTS),
            Slot("x", "request", torch.int64, 0),
        ],
        ladder=[8], registry=registry, prep="n", forward=lambda view, metadata: metadata["m"] * 1, device=DEVICE,
    )  # fmt: skip
    runner.capture(progress=False)
    for raw in (3, 8, 5, 3, 1, 0, 8):
        batch = Batch(raw, {"x": torch.zeros(raw, dtype=torch.int64, device=DEVICE)}) if raw else Batch.idle()
        assert runner.replay(batch).outputs.tolist() == [raw] * raw
    assert runner.stats()["one_launch"] == 7
