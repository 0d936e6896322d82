"""The adapters for two engines' interfaces, on small stand-ins of them, written from their public documentation.

What matters is where a backend's Python points: at the metadata of the step that runs, on every route, and never at
what a capture, a check or a twin made, nor at what a prefill in between installed. So steps of all kinds follow each
other in random order, and after each of them the attribute, the addresses behind it and the outputs are looked at.
"""

from __future__ import annotations

import enum
import itertools
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, fields
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import graphglue as gg
from graphglue import Batch, Mode, PrepContract, Reason, Registry, Route, Runner, RunnerConfig, Slot
from graphglue.audit import audit
from graphglue.graphs import session

sys.path.insert(0, str(Path(__file__).parents[2] / "examples"))
from adapters import sglang_style, vllm_style

LADDER, CONTEXT, PAGE = [1, 2, 4, 8], 16, 4
MANY = 11  # requests, more than the ladder holds


def table() -> torch.Tensor:
    return torch.arange(9 * CONTEXT).view(9, CONTEXT) * 3


def draw(requests: int, start: int = 0) -> dict[str, list[int]]:
    rows = range(start, start + requests)
    return {
        "seq_lens": [1 + row % 15 for row in rows],
        "req_pool_indices": [1 + row % 8 for row in rows],
        "out_cache_loc": [4 + row for row in rows],
        "input_ids": [30 + row * 7 for row in rows],
    }


def expected(sources: dict[str, list[int]]) -> list[int]:
    """Compute what the model returns, from lists."""
    t = table().tolist()
    steps = zip(*(sources[name] for name in ("seq_lens", "req_pool_indices", "out_cache_loc", "input_ids")))
    return [
        number * 1000 + length - 1 + loc * 2 + sum(one // PAGE for one in t[row][::PAGE]) + CONTEXT
        for length, row, loc, number in steps
    ]


def address_of(metadata: Any) -> dict[str, int]:
    named = vars(metadata) if hasattr(metadata, "__dict__") else metadata
    return {name: leaf.data_ptr() for name, leaf in named.items() if isinstance(leaf, torch.Tensor)}


# The first engine: backends that install their metadata on themselves.


@dataclass
class ForwardMetadata:
    page_table: torch.Tensor
    positions: torch.Tensor
    where: torch.Tensor
    max_len: int


class Backend:
    """Build metadata before a step, and install it, as the interface asks."""

    def __init__(self) -> None:
        self.forward_metadata: Any = None
        self.made: list[Any] = []

    def init_forward_metadata_out_graph(self, forward_batch: Any) -> None:
        pool = forward_batch.req_to_token_pool.req_to_token
        self.forward_metadata = ForwardMetadata(
            page_table=pool[forward_batch.req_pool_indices, ::PAGE] // PAGE,
            positions=forward_batch.seq_lens - 1,
            where=forward_batch.out_cache_loc * 2,
            max_len=CONTEXT,
        )
        self.made.append(self.forward_metadata)

    def attend(self, rows: torch.Tensor) -> torch.Tensor:
        metadata = self.forward_metadata
        return rows + metadata.positions + metadata.where + metadata.page_table.sum(1) + metadata.max_len


READS = {"seq_lens": 1, "req_pool_indices": 0, "out_cache_loc": 0}
OUTPUTS = {"page_table": "request", "positions": "request", "where": "token"}


def slots() -> list[Slot]:
    axes = {"seq_lens": "request", "req_pool_indices": "request", "out_cache_loc": "token", "input_ids": "token"}
    return [Slot(name, axis, torch.int64, READS.get(name, 0)) for name, axis in axes.items()]


class First:
    """A decode and a prefill runner over one backend, and the engine's own prefill beside them."""

    def __init__(self, shadow: bool = True, publish: bool = True) -> None:
        self.backend, self.t = Backend(), table()
        self.adapter = sglang_style.BackendAdapter(self.backend)
        if not publish:
            self.adapter.register = self.unpublished  # type: ignore[method-assign]
        registry = Registry()
        decode, extend = (
            PrepContract(name=mode.value, reads=READS, tables=("req_to_token",), outputs=OUTPUTS, modes={mode})
            for mode in (Mode.DECODE, Mode.EXTEND)
        )
        more: dict[str, Any] = {"registry": registry, "tables": {"req_to_token": self.t}}
        config = RunnerConfig(staging=True, shadow=gg.Shadow(first=2, every=3) if shadow else None)
        self.runner = Runner(
            slots=slots(), ladder=LADDER, prep=self.adapter.register(registry, decode),
            forward=self.adapter.forward(self.model), config=config, **more,
        )  # fmt: skip
        self.prefill = Runner(
            slots=slots(), ladder=[4, 16], prep=self.adapter.register(registry, extend),
            config=RunnerConfig(max_requests=4), **more,
        )  # fmt: skip
        self.backend.forward_metadata = self.owned = object()
        self.runner.capture(progress=False)
        self.prefill.capture(progress=False)

    def unpublished(self, registry: Registry, contract: PrepContract) -> str:
        registry.register(contract)(self.adapter.prep)
        return contract.name

    def model(self, forward_batch: Any) -> torch.Tensor:
        return self.backend.attend(forward_batch.input_ids * 1000)

    def batch(self, requests: int, start: int = 0, **more: Any) -> Batch:
        return Batch(requests, draw(requests, start), **more)

    def check(self, step: Any, runner: Runner | None = None) -> None:
        """Hold what is installed against a step."""
        runner = runner or self.runner
        installed = self.backend.forward_metadata
        assert type(installed) is ForwardMetadata
        assert not any(installed is one for one in self.backend.made), "what a capture or a twin made is installed"
        assert address_of(installed) == address_of(step.metadata)
        for field in fields(installed):
            one, other = getattr(installed, field.name), step.metadata[field.name]
            assert torch.equal(one, other) if isinstance(one, torch.Tensor) else one == other
        unit, key = runner._units[0], step.decision.key
        if unit.cache.has_result(key):  # what graphs of that key read
            assert address_of(installed) == address_of(unit.cache.result(key))
            return
        slots = {tensor.untyped_storage().data_ptr() for tensor in runner.arena._storage.values()}
        for leaf in vars(installed).values():  # a step of its own extents: nothing of it lies in the slots
            assert not isinstance(leaf, torch.Tensor) or leaf.untyped_storage().data_ptr() not in slots


def test_the_first_engine_s_steps_are_right_on_every_route() -> None:
    engine = First()
    seen = []
    for count in (3, 8, MANY, 1, 4):
        step = engine.runner.replay(engine.batch(count))
        assert step.outputs.tolist() == expected(draw(count))
        engine.check(step)
        seen.append(step.decision.reason)
    assert seen == [Reason.PADDED, Reason.UNPADDED, Reason.OVER_LADDER, Reason.UNPADDED, Reason.UNPADDED]


def test_capture_audit_maintain_and_sleep_leave_the_attribute_alone() -> None:
    engine = First()
    assert engine.backend.forward_metadata is engine.owned
    step = engine.runner.replay(engine.batch(3))
    mine = engine.backend.forward_metadata
    assert audit(engine.runner)
    engine.runner._units[0].cache.quarantine(step.decision.key, "a test")
    engine.runner.maintain()
    engine.runner.release()
    engine.runner.resume()
    engine.runner.release()
    engine.runner.resume(contents_lost=False)
    assert engine.backend.forward_metadata is mine


def test_without_publish_a_prefill_stays_installed() -> None:
    """Show that ``check`` can fail."""
    engine = First(publish=False)
    engine.backend.forward_metadata = foreign = ForwardMetadata(*[torch.zeros(1)] * 3, 0)
    step = engine.runner.replay(engine.batch(3))
    assert engine.backend.forward_metadata is foreign
    with pytest.raises(AssertionError):
        engine.check(step)


FEW = settings(max_examples=max(8, settings().max_examples // 5))  # each captures two runners
STEPS = st.one_of(
    st.tuples(st.just("replay"), st.integers(1, 8)),
    st.tuples(st.just("over"), st.integers(9, 12)),
    st.tuples(st.just("feature"), st.integers(1, 8)),
    st.tuples(st.just("stage"), st.integers(1, 8)),
    st.tuples(st.just("prepare"), st.integers(1, 8)),
    st.tuples(st.just("quarantine"), st.sampled_from(LADDER)),
    st.tuples(st.just("extend"), st.integers(1, 20)),
    st.tuples(st.sampled_from(["idle", "foreign", "maintain", "sleep", "refused"]), st.just(0)),
)


class Interleaved:
    """Run one kind of step after the other on the first engine, and look at the attribute after each."""

    def __init__(self) -> None:
        self.engine = First()
        self.start = itertools.count()

    def run(self, what: str, number: int) -> None:
        before = self.engine.backend.forward_metadata
        step = getattr(self, what)(number)
        if step is None:  # no step: nothing was installed but what a prefill of the engine's own did
            assert what == "foreign" or self.engine.backend.forward_metadata is before

    def served(self, number: int, **more: Any) -> Any:
        start = next(self.start)
        step = self.engine.runner.replay(self.engine.batch(number, start, **more))
        assert step.outputs.tolist() == expected(draw(number, start))
        self.engine.check(step)
        return step

    replay = over = served

    def feature(self, number: int) -> Any:
        step = self.served(number, features=frozenset({"lora"}))
        assert step.decision.prep is Route.EAGER
        return step

    def stage(self, number: int) -> Any:
        start, before = next(self.start), self.engine.backend.forward_metadata
        self.engine.runner.stage(self.engine.batch(number, start))
        assert self.engine.backend.forward_metadata is before  # the step that runs now may still ask
        self.foreign(0)
        step = self.engine.runner.replay(self.engine.batch(number, start))
        assert step.outputs.tolist() == expected(draw(number, start))
        self.engine.check(step)
        return step

    def prepare(self, number: int) -> Any:
        step = self.engine.runner.prepare(self.engine.batch(number, next(self.start)))
        self.engine.check(step)
        return step

    def extend(self, number: int) -> Any:
        sources = draw(number)
        sources |= {name: sources[name][:1] for name in ("seq_lens", "req_pool_indices")}
        batch = Batch(1, sources, Mode.EXTEND, num_tokens=number)
        if number > 16:
            with pytest.raises(gg.CapacityError):
                self.engine.prefill.prepare(batch)
            return None
        step = self.engine.prefill.prepare(batch)
        self.engine.check(step, self.engine.prefill)
        return step

    def idle(self, number: int) -> Any:
        step = self.engine.runner.replay(Batch.idle())
        self.engine.check(step)
        return step

    def foreign(self, number: int) -> None:
        """Run a prefill by the engine's own path."""
        self.engine.backend.forward_metadata = ForwardMetadata(*[torch.zeros(2, dtype=torch.int64)] * 3, 1)

    def quarantine(self, size: int) -> None:
        runner = self.engine.runner
        key = next(key for key in runner._wanted if key.requests == size)
        runner._units[0].cache.quarantine(key, "a test")
        runner._capture.drop_launches([key])
        runner._stepper.forget()

    def maintain(self, number: int) -> None:
        self.engine.runner.maintain()

    def sleep(self, number: int) -> None:
        self.engine.runner.release()
        self.engine.runner.resume(contents_lost=False)

    def refused(self, number: int) -> None:
        with pytest.raises(gg.BindError):
            self.engine.runner.replay(Batch(2, {"seq_lens": [1]}))


@FEW
@given(st.lists(STEPS, min_size=4, max_size=12))
def test_the_attribute_is_the_running_step_s_in_any_order_of_steps(steps: list[tuple[str, int]]) -> None:
    run = Interleaved()
    for what, number in steps:
        run.run(what, number)


def test_every_kind_of_step_after_every_other() -> None:
    run = Interleaved()
    kinds = {"replay": 3, "over": MANY, "feature": 5, "stage": 6, "prepare": 2, "quarantine": 4, "extend": 7, "idle": 0}
    kinds |= dict.fromkeys(["foreign", "maintain", "refused"], 0)
    for first, second in itertools.product(kinds, kinds):
        run.run(first, kinds[first])
        run.run(second, kinds[second])


def test_a_hybrid_backend_installs_on_each_of_its_leaves() -> None:
    full, linear = Backend(), Backend()

    class Hybrid:
        def init_forward_metadata_out_graph(self, forward_batch: Any) -> None:
            for leaf in (full, linear):
                leaf.init_forward_metadata_out_graph(forward_batch)

    adapter = sglang_style.BackendAdapter(Hybrid(), leaves={"full": full, "linear": linear})
    registry = Registry()
    outputs = {f"{leaf}.{name}": axis for leaf in ("full", "linear") for name, axis in OUTPUTS.items()}
    contract = PrepContract(
        name="hybrid", reads=READS, tables=("req_to_token",), outputs=outputs, modes={Mode.DECODE}
    )  # fmt: skip
    runner = Runner(
        slots=slots(), ladder=LADDER, registry=registry, tables={"req_to_token": table()},
        prep=adapter.register(registry, contract),
        forward=adapter.forward(lambda batch: linear.attend(full.attend(batch.input_ids * 0))),
    )  # fmt: skip
    runner.capture(progress=False)
    full.forward_metadata = linear.forward_metadata = None
    sources = draw(3)
    step = runner.replay(Batch(3, sources))
    ones = [one - 1000 * number for one, number in zip(expected(sources), sources["input_ids"])]
    assert step.outputs.tolist() == [2 * one for one in ones]
    assert address_of(full.forward_metadata) == address_of(step.metadata["full"])
    assert address_of(linear.forward_metadata) == address_of(step.metadata["linear"])


def test_a_backend_that_raises_leaves_the_attribute_alone() -> None:
    engine = First()

    def broken(forward_batch: Any) -> None:
        engine.backend.forward_metadata = "half built"
        raise RuntimeError("no")

    engine.runner.replay(engine.batch(3))
    before = engine.backend.forward_metadata
    engine.backend.init_forward_metadata_out_graph = broken  # type: ignore[method-assign]
    with pytest.raises(RuntimeError, match="no"):
        engine.runner.replay(engine.batch(MANY))
    assert engine.backend.forward_metadata is before


# The second engine: builders with persistent buffers, and a forward context.


class Support(enum.Enum):
    NEVER = 0
    UNIFORM_SINGLE_TOKEN_DECODE = 1
    UNIFORM_BATCH = 2
    ALWAYS = 3


@dataclass
class Common:
    """What every builder is handed."""

    query_start_loc: Any
    query_start_loc_cpu: Any
    seq_lens: Any
    seq_lens_cpu: Any
    num_reqs: int
    num_actual_tokens: int
    max_query_len: int
    max_seq_len: int
    block_table_tensor: Any
    slot_mapping: Any


@dataclass
class BuiltMetadata:
    block_table: torch.Tensor
    context_lens: torch.Tensor
    slot_mapping: torch.Tensor
    num_actual_tokens: int
    max_seq_len: int


class Builder:
    """Build metadata in buffers that stay, whatever the size of the batch."""

    cudagraph_support = Support.UNIFORM_SINGLE_TOKEN_DECODE

    def __init__(self, scale: int = 1) -> None:
        self.scale = scale
        self.context_lens = torch.zeros(16, dtype=torch.int64)

    def build(self, common_prefix_len: int, common: Common) -> BuiltMetadata:
        lens = self.context_lens[: common.num_reqs]
        lens.copy_((common.seq_lens - 1).clamp(min=0) * self.scale)
        return BuiltMetadata(
            block_table=common.block_table_tensor * 1,
            context_lens=lens,
            slot_mapping=common.slot_mapping + 0,
            num_actual_tokens=common.num_actual_tokens,
            max_seq_len=common.max_seq_len,
        )


PADS = {"query_start_loc": gg.REPEAT_LAST, "seq_lens": 0, "block_table": 0, "slot_mapping": -1}


def vllm_slots() -> list[Slot]:
    axes = {"query_start_loc": "offset", "seq_lens": "request", "block_table": "request", "slot_mapping": "token"}
    made = [
        Slot(name, axis, torch.int64, PADS[name], inner=(3,) if name == "block_table" else ())
        for name, axis in axes.items()
    ]
    return [*made, Slot("input_ids", "token", torch.int64, 0)]


def vllm_draw(requests: int, start: int = 0) -> dict[str, Any]:
    rows = range(start, start + requests)
    return {
        "query_start_loc": list(range(requests + 1)),
        "seq_lens": [1 + row % 9 for row in rows],
        "block_table": [[row % 5, row % 7, 1] for row in rows],
        "slot_mapping": [8 + row for row in rows],
        "input_ids": [3 + row for row in rows],
    }


def vllm_expected(sources: dict[str, Any], scales: tuple[int, ...]) -> list[int]:
    return [
        number * 100 + sum((length - 1) * scale + sum(blocks) + where + CONTEXT for scale in scales)
        for number, length, blocks, where in zip(
            *(sources[name] for name in ("input_ids", "seq_lens", "block_table", "slot_mapping"))
        )
    ]


class Second:
    """One runner over the builders of several KV groups."""

    def __init__(self, scales: tuple[int, ...] = (1, 5), **config: Any) -> None:
        self.context, self.scales = SimpleNamespace(attn_metadata=None), scales
        registry, self.adapters = Registry(), {}
        for scale in scales:
            name, builder = f"group-{scale}", Builder(scale)
            adapter = vllm_style.BuilderAdapter(builder, [f"layers.{scale}"], self.context, Common, CONTEXT)
            outputs = {"block_table": "request", "context_lens": "request", "slot_mapping": "token"}
            contract = vllm_style.contract_of(builder, name, reads=PADS, outputs=outputs, writes=("context_lens",))
            adapter.register(registry, contract)
            self.adapters[name] = adapter
        several = len(scales) > 1
        self.runner = Runner(
            slots=vllm_slots(), ladder=LADDER, registry=registry,
            prep=list(self.adapters) if several else next(iter(self.adapters)),
            forward=vllm_style.forward_of(
                self.adapters if several else next(iter(self.adapters.values())), self.model
            ),
            config=RunnerConfig(**config),
        )  # fmt: skip
        self.runner.capture(progress=False)

    def model(self, view: Any) -> torch.Tensor:
        rows = view.input_ids * 100
        for scale in self.scales:
            metadata = self.context.attn_metadata[f"layers.{scale}"]
            rows = rows + metadata.context_lens + metadata.block_table.sum(1) + metadata.slot_mapping
            rows = rows + metadata.max_seq_len
        return rows

    def served(self, requests: int, start: int = 0, **more: Any) -> Any:
        sources = vllm_draw(requests, start)
        step = self.runner.replay(Batch(requests, sources, **more))
        assert step.outputs.tolist() == vllm_expected(sources, self.scales)
        self.check(step)
        return step

    def check(self, step: Any) -> None:
        for name, adapter in self.adapters.items():
            metadata = step.metadata[name] if len(self.adapters) > 1 else step.metadata
            for layer in adapter.layers:
                assert address_of(self.context.attn_metadata[layer]) == address_of(metadata)


@pytest.mark.parametrize("scales", [(2,), (1, 5)])
def test_the_second_engine_s_steps_are_right_on_every_route(scales: tuple[int, ...]) -> None:
    engine = Second(scales, shadow=gg.Shadow(first=2, every=3))
    assert engine.context.attn_metadata is None
    reasons = [engine.served(count, count).decision.reason for count in (3, 8, MANY, 1, 8, 2, 3)]
    assert set(reasons) == {Reason.PADDED, Reason.UNPADDED, Reason.OVER_LADDER}
    assert engine.runner.stats()["shadow"]["mismatched"] == 0


@FEW
@given(
    st.lists(
        st.one_of(
            st.tuples(st.sampled_from(["replay", "feature"]), st.integers(1, 8)),
            st.tuples(st.just("over"), st.integers(9, 12)),
            st.tuples(st.sampled_from(["idle", "prefill", "quarantine", "sleep"]), st.integers(1, 8)),
        ),
        min_size=4,
        max_size=12,
    )
)
def test_the_forward_context_is_the_running_step_s_in_any_order_of_steps(steps: list[tuple[str, int]]) -> None:
    engine = Second(shadow=gg.Shadow(first=1, every=2))
    runner, cache = engine.runner, engine.runner._units[0].cache
    for position, (what, number) in enumerate(steps):
        before = engine.context.attn_metadata
        if what == "prefill":  # by the engine's own path: the same builders, into the same buffers
            for adapter in engine.adapters.values():
                adapter.builder.context_lens.fill_(-9)
            engine.context.attn_metadata = {"layers.1": "prefill", "layers.5": "prefill"}
        elif what == "idle":
            engine.check(runner.replay(Batch.idle()))
        elif what == "quarantine":
            cache.quarantine(runner._wanted[number % 4], "a test")
            runner._capture.drop_launches([runner._wanted[number % 4]])
            runner._stepper.forget()
        elif what == "sleep":
            runner.release()
            runner.resume(contents_lost=bool(number % 2))
            assert engine.context.attn_metadata is before
        else:
            features = frozenset({"lora"}) if what == "feature" else frozenset()
            engine.served(number, position, features=features)


def test_a_builder_that_reads_a_length_on_the_host_is_refused_by_name() -> None:
    class Planner(Builder):
        def build(self, common_prefix_len: int, common: Common) -> BuiltMetadata:
            common.max_seq_len = common.seq_lens_cpu.max()
            return super().build(common_prefix_len, common)

    adapter = vllm_style.BuilderAdapter(Planner(), ["a"], SimpleNamespace(attn_metadata=None), Common, CONTEXT)
    registry = Registry()
    adapter.register(registry, vllm_style.contract_of(adapter.builder, "planner", reads=PADS))
    runner = Runner(slots=vllm_slots(), ladder=[2], registry=registry, prep="planner")
    with pytest.raises(gg.ContractError, match=r"reads seq_lens_cpu\.max on the host"):
        runner.capture(progress=False)


@pytest.mark.parametrize(
    ("support", "modes", "ragged", "host_free"),
    [
        (Support.NEVER, {Mode.DECODE}, False, False),
        (Support.UNIFORM_SINGLE_TOKEN_DECODE, {Mode.DECODE}, False, True),
        (Support.UNIFORM_BATCH, {Mode.DECODE, Mode.VERIFY}, False, True),
        (Support.ALWAYS, {Mode.DECODE, Mode.VERIFY}, True, True),
    ],
)
def test_a_builder_s_support_is_its_contract(support: Any, modes: set[Mode], ragged: bool, host_free: bool) -> None:
    contract = vllm_style.contract_of(SimpleNamespace(cudagraph_support=support), "b")
    assert (contract.modes, contract.ragged, contract.host_free) == (modes, ragged, host_free)


def test_a_builder_that_never_supports_graphs_is_built_eagerly() -> None:
    class Never(Builder):
        cudagraph_support = Support.NEVER

    engine = Second((2,))
    adapter = vllm_style.BuilderAdapter(Never(2), ["layers.2"], engine.context, Common, CONTEXT)
    registry = Registry()
    adapter.register(registry, vllm_style.contract_of(adapter.builder, "never", reads=PADS))
    with Runner(
        slots=vllm_slots(), ladder=LADDER, registry=registry, prep="never",
        forward=vllm_style.forward_of(adapter, engine.model),
    ) as runner:  # fmt: skip
        runner.capture(progress=False)
        step = runner.replay(Batch(3, vllm_draw(3)))
        assert (step.decision.prep, step.decision.reason) == (Route.EAGER, Reason.NOT_HOST_FREE)
        assert step.outputs.tolist() == vllm_expected(vllm_draw(3), (2,))


def test_each_batch_has_its_mode() -> None:
    engine = Second((2,))
    registry = Registry()
    registry.register(PrepContract(name="p", reads={"loc": 0}, outputs={"x": "token"}, modes={Mode.EXTEND}))(
        lambda view: {"x": view.loc + 1}
    )

    @gg.eager_break(row_aligned=("rows",))
    def attend(rows: torch.Tensor) -> torch.Tensor:
        return rows.cumsum(0)

    mixed = Runner(
        slots=[Slot("loc", "token", torch.int64, 0)], ladder=[4, 8], registry=registry, prep="p",
        forward=lambda view, metadata: attend(metadata["x"]) * 2, config=RunnerConfig(max_requests=4),
    )  # fmt: skip
    mixed.capture(progress=False)
    dispatcher = vllm_style.Dispatcher(engine.runner, mixed)
    prompt = Batch(1, {"loc": [1, 2, 3]}, Mode.EXTEND, num_tokens=3)
    long = Batch(1, {"loc": [0] * 9}, Mode.EXTEND, num_tokens=9)
    decode, many = (Batch(count, vllm_draw(count)) for count in (3, MANY))
    assert [dispatcher.mode(batch) for batch in (decode, many, prompt, long)] == ["FULL", "NONE", "PIECEWISE", "NONE"]
    assert dispatcher.replay(prompt).outputs.tolist() == [4, 10, 18]
    assert dispatcher.replay(decode).outputs.tolist() == vllm_expected(vllm_draw(3), (2,))
    alone = vllm_style.Dispatcher(engine.runner)
    assert alone.mode(prompt) == "NONE"
    with pytest.raises(gg.ConfigError, match="no runner serves extend batches"):
        alone.replay(prompt)


# A custom all-reduce, which registers the addresses that graphs use when its session ends.


_REGISTERED: set[int] = set()
_NUMBERS = itertools.count()


@torch.library.custom_op("graphglue_tests::registered_sum", mutates_args=())
def registered_sum(rows: torch.Tensor, number: int) -> torch.Tensor:
    """Reduce by addresses that were looked up at the end of the session; before that it would read anywhere."""
    if number not in _REGISTERED:
        raise RuntimeError(f"all-reduce {number} ran before its addresses were registered")
    return rows * 2


@registered_sum.register_fake
def _(rows: torch.Tensor, number: int) -> torch.Tensor:
    return torch.empty_like(rows)


class CustomAllReduce:
    """Two ranks that hold the same rows; while a graph is recorded nothing is known but that it will be needed."""

    def __init__(self) -> None:
        self.open, self.noted = False, list[int]()
        self.sessions = self.warmed = 0

    @contextmanager
    def capture(self) -> Iterator[None]:
        self.open, self.sessions = True, self.sessions + 1
        try:
            yield
            _REGISTERED.update(self.noted)  # one exchange of handles for all of them
        finally:
            self.open, self.noted = False, []

    def __call__(self, rows: torch.Tensor) -> torch.Tensor:
        if not self.open:
            return rows * 2  # through a buffer that was registered at start-up
        if not session.recording():
            self.warmed += 1
            return torch.zeros_like(rows)  # a warm-up allocates as the capture will, and computes nothing
        self.noted.append(number := next(_NUMBERS))
        return registered_sum(rows, number)


def reducing(segmented: bool, all_reduce: Callable[[torch.Tensor], torch.Tensor], hooks: gg.CaptureHooks) -> Runner:
    @gg.eager_break(row_aligned=("rows",))
    def attend(rows: torch.Tensor) -> torch.Tensor:
        return rows + 1

    def forward(view: Any, metadata: Any) -> torch.Tensor:
        rows = all_reduce(view.input_ids + metadata["positions"])
        return all_reduce(attend(rows) if segmented else rows + 1)

    mode = Mode.EXTEND if segmented else Mode.DECODE
    registry = Registry()
    contract = PrepContract(name="p", reads={"loc": 0}, outputs={"positions": "token"}, modes={mode})
    registry.register(contract)(lambda view: {"positions": view.loc * 3})
    return Runner(
        slots=[Slot("loc", "token", torch.int64, 0), Slot("input_ids", "token", torch.int64, 0)],
        ladder=[2, 4], registry=registry, prep="p", forward=forward, hooks=hooks,
        config=RunnerConfig(max_requests=2 if segmented else None),
    )  # fmt: skip


@pytest.mark.parametrize("segmented", [False, True])
def test_an_all_reduce_that_registers_at_the_end_of_its_session(segmented: bool) -> None:
    all_reduce = CustomAllReduce()
    runner = reducing(segmented, all_reduce, gg.CaptureHooks(session=all_reduce.capture))

    def serves() -> None:
        for count in (2, 3, 4, 1):
            sources = {"loc": list(range(count)), "input_ids": list(range(5, 5 + count))}
            more = {"mode": Mode.EXTEND, "num_tokens": count} if segmented else {}
            step = runner.replay(Batch(1 if segmented else count, sources, **more))
            assert step.decision.forward is Route.GRAPH
            assert step.outputs.tolist() == [4 * (5 + 4 * row) + 2 for row in range(count)]

    runner.capture(progress=False)
    assert (all_reduce.sessions, all_reduce.warmed) == (1, 2 * 2 * 2)  # keys, warm-ups, calls
    serves()
    runner._forward.quarantine(runner._wanted[0], "a test")  # type: ignore[union-attr]
    runner._stepper.forget()
    runner.maintain()
    assert all_reduce.sessions == 2
    serves()
    runner.release()
    assert len(runner.resume()) == 2  # recorded anew, in a session of its own
    assert all_reduce.sessions == 3
    serves()
    runner.release()
    runner.resume(contents_lost=False)  # checked: outside of a session, so nothing new is registered
    assert all_reduce.sessions == 3
    serves()


def test_a_launch_inside_the_session_would_be_noticed() -> None:
    """Show that the test above can fail: without the hook nothing is ever registered."""
    all_reduce = CustomAllReduce()
    runner = reducing(False, all_reduce, gg.CaptureHooks())
    all_reduce.open = True
    runner.capture(progress=False)
    with pytest.raises(RuntimeError, match="ran before its addresses were registered"):
        runner.replay(Batch(2, {"loc": [0, 1], "input_ids": [1, 2]}))


def test_a_session_that_fails_leaves_no_key_that_reads_unregistered_addresses() -> None:
    all_reduce = CustomAllReduce()
    failing = [True]

    @contextmanager
    def capture() -> Iterator[None]:
        with all_reduce.capture():
            yield
            if failing[0]:
                raise OSError("a peer is gone")

    runner = reducing(False, all_reduce, gg.CaptureHooks(session=capture))
    with pytest.raises(OSError, match="a peer is gone"):
        runner.capture(progress=False)
    batch = Batch(2, {"loc": [0, 1], "input_ids": [5, 6]})
    assert runner.replay(batch).decision.forward is Route.EAGER
    assert runner.replay(batch).outputs.tolist() == [22, 38]
    failing[0] = False
    runner.reset()
    runner.capture(progress=False)
    step = runner.replay(batch)
    assert (step.decision.forward, step.outputs.tolist()) == (Route.GRAPH, [22, 38])
