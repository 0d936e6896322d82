"""The launch, the order of steps and the memory in flight, over a driver that only notes what it is asked.

What a GPU does with it is in tests/gpu/test_launch.py; here is what must be asked of it, and what is left behind
when it refuses.
"""

from __future__ import annotations

import gc
import sys
import weakref
from collections.abc import Callable
from contextlib import nullcontext
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch

from graphglue.device import streams
from graphglue.device.base import Reads, SeparateLaunches
from graphglue.device.cuda import CudaDevice
from graphglue.device.kernel_fill import KernelFill
from graphglue.device.launch import ParentLaunch, PrependedLaunch
from graphglue.device.streams import InFlight, StepOrder
from graphglue.errors import ClosedError, GraphGlueError
from graphglue.graphs.cuda import CudaRecording

REFUSED = 999


class Driver(ModuleType):
    """Note every call; give fresh handles; refuse what ``refuses`` names."""

    def __init__(self, edge_data: bool = True) -> None:
        super().__init__("cuda.bindings.driver")
        self.calls: list[tuple[str, Any]] = []
        self.refuses: dict[str, int] = {}  # name -> successful calls before it is refused
        self.done: set[Any] = set()  # events that the device has reached
        self._edge_data, self._handles = edge_data, 0

    def CUgraph(self, raw: Any) -> Any:
        return raw

    def CUgraphExec(self, raw: Any) -> Any:
        return raw

    def CUevent(self, raw: Any) -> Any:
        return raw

    def _call(self, name: str, *args: Any, gives: str | None = None) -> tuple[Any, ...]:
        if name in self.refuses:
            if self.refuses[name] == 0:
                return (REFUSED, None) if gives else (REFUSED,)
            self.refuses[name] -= 1
        self.calls.append((name, args))
        if gives is None:
            return (0,)
        self._handles += 1
        return 0, f"{gives}{self._handles}"

    def cuGraphCreate(self, flags: int) -> Any:
        return self._call("create", gives="graph")

    def cuGraphAddKernelNode(self, graph: Any, before: Any, count: int, params: Any) -> Any:
        return self._call("kernel", graph, before, params, gives="node")

    def cuGraphAddChildGraphNode(self, graph: Any, before: Any, count: int, child: Any) -> Any:
        return self._call("child", graph, tuple(before), child, gives="node")

    def cuGraphAddEventRecordNode(self, graph: Any, before: Any, count: int, event: Any) -> Any:
        return self._call("event node", graph, tuple(before), event, gives="node")

    def cuGraphInstantiate(self, graph: Any, flags: int) -> Any:
        return self._call("instantiate", graph, flags, gives="exec")

    def cuGraphExecKernelNodeSetParams(self, exec_graph: Any, node: Any, params: Any) -> Any:
        return self._call("update", exec_graph, node, params)

    def cuGraphLaunch(self, exec_graph: Any, stream: int) -> Any:
        return self._call("launch", exec_graph, stream)

    def cuGraphExecDestroy(self, exec_graph: Any) -> Any:
        return self._call("destroy exec", exec_graph)

    def cuGraphDestroy(self, graph: Any) -> Any:
        return self._call("destroy", graph)

    def cuGraphGetRootNodes(self, graph: Any, count: int = 0) -> Any:
        roots = ["root1", "root2"]
        return 0, roots[:count], len(roots)

    def cuGraphAddDependencies(self, graph: Any, before: Any, after: Any, *rest: Any) -> Any:
        if len(rest) != (2 if self._edge_data else 1):
            raise TypeError("takes other arguments")
        return self._call("depend", graph, tuple(before), tuple(after))

    def cuEventCreate(self, flags: int) -> Any:
        return self._call("event", gives="event")

    def cuEventRecord(self, event: Any, stream: int) -> Any:
        self.done.discard(event)
        return self._call("record", event, stream)

    def cuEventQuery(self, event: Any) -> Any:
        return (0 if event in self.done else 600,)

    def named(self, name: str) -> list[Any]:
        return [args for called, args in self.calls if called == name]


@pytest.fixture
def driver(monkeypatch: pytest.MonkeyPatch) -> Driver:
    return install(monkeypatch, Driver())


def install(monkeypatch: pytest.MonkeyPatch, driver: Driver) -> Driver:
    bindings: Any = ModuleType("cuda.bindings")
    bindings.driver = driver
    monkeypatch.setitem(sys.modules, "cuda", ModuleType("cuda"))
    monkeypatch.setitem(sys.modules, "cuda.bindings", bindings)
    monkeypatch.setitem(sys.modules, "cuda.bindings.driver", driver)
    monkeypatch.setattr(torch.cuda, "device", lambda device: nullcontext())
    return driver


def fill_of(stream: int = 7) -> Any:
    """Give a fill that counts how often its sources were handed over."""
    order = SimpleNamespace(current=stream, stream=lambda: order.current, enter=lambda: None)
    fill = SimpleNamespace(params="params1", order=order, count=0)

    def launched() -> None:
        fill.count += 1

    fill.launched = launched
    return fill


class Graph:
    """A torch graph by name; it notes what is done to it."""

    def __init__(self, name: str) -> None:
        self.name, self.done = name, []

    def raw_cuda_graph(self) -> str:
        return self.name

    def raw_cuda_graph_exec(self) -> str:
        return f"exec of {self.name}"

    def instantiate(self) -> None:
        self.done.append("instantiate")

    def replay(self) -> None:
        self.done.append("replay")

    def reset(self) -> None:
        self.done.append("reset")


EVENTS = Reads(SimpleNamespace(cuda_event="sources"), SimpleNamespace(cuda_event="tables"), False)  # type: ignore[arg-type]


# A parent of child graphs.


def test_a_parent_chains_fill_preps_and_forward(driver: Driver) -> None:
    launch = ParentLaunch(fill_of(), [Graph("a"), Graph("b")], [Graph("forward")])
    assert driver.named("kernel") == [("graph1", None, "params1")]
    assert driver.named("child") == [
        ("graph1", ("node2",), "a"),
        ("graph1", ("node3",), "b"),
        ("graph1", ("node4",), "forward"),
    ]
    assert driver.named("instantiate") == [("graph1", 1 | 8)]  # what torch instantiates with: priorities are kept
    assert launch.fallback is None


def test_a_step_updates_the_parameters_and_launches_on_the_callers_stream(driver: Driver) -> None:
    fill = fill_of(stream=7)
    launch = ParentLaunch(fill, [], [Graph("forward")])
    for params, stream in (("params1", 7), ("params2", 9)):
        fill.params, fill.order.current = params, stream
        launch.run()
    assert driver.calls[-4:] == [
        ("update", ("exec4", "node2", "params1")),
        ("launch", ("exec4", 7)),
        ("update", ("exec4", "node2", "params2")),
        ("launch", ("exec4", 9)),
    ]
    assert fill.count == 2


@pytest.mark.parametrize("name", ["update", "launch"])
def test_a_refused_step_is_named_and_hands_no_sources_over(driver: Driver, name: str) -> None:
    fill = fill_of()
    launch = ParentLaunch(fill, [], [Graph("forward")])
    driver.refuses[name] = 0
    with pytest.raises(GraphGlueError, match=r"the CUDA driver refused.*999"):
        launch.run()
    assert fill.count == 0
    assert driver.named("launch") == []
    driver.refuses.clear()
    launch.run()
    assert fill.count == 1


@pytest.mark.parametrize(
    ("name", "before"),
    [
        ("create", 0),
        ("kernel", 0),
        ("child", 0),
        ("child", 1),
        ("event node", 0),
        ("event node", 1),
        ("instantiate", 0),
    ],
)
def test_what_a_failed_composition_made_is_destroyed(driver: Driver, name: str, before: int) -> None:
    driver.refuses[name] = before
    with pytest.raises(GraphGlueError, match="the CUDA driver refused: 999"):
        ParentLaunch(fill_of(), [Graph("a")], [Graph("forward")], EVENTS)
    assert len(driver.named("destroy")) == len(driver.named("create"))
    assert len(driver.named("destroy exec")) == len(driver.named("instantiate"))


def test_a_launch_is_closed_once_and_refuses_to_run(driver: Driver) -> None:
    launch = ParentLaunch(fill_of(), [Graph("a")], [Graph("forward")])
    launch.close()
    launch.close()
    assert driver.named("destroy exec") == [("exec5",)]
    assert driver.named("destroy") == [("graph1",)]
    with pytest.raises(ClosedError):
        launch.run()
    assert driver.named("launch") == []


def test_a_launch_keeps_the_graphs_that_own_its_memory(driver: Driver) -> None:
    prep, forward = Graph("a"), Graph("forward")
    refs = [weakref.ref(prep), weakref.ref(forward)]
    launch = ParentLaunch(fill_of(), [prep], [forward])
    del prep, forward
    gc.collect()
    assert all(ref() is not None for ref in refs)
    launch.close()
    gc.collect()
    assert all(ref() is None for ref in refs)


@pytest.mark.parametrize(("until_forward", "behind"), [(False, "node3"), (True, "node4")])
def test_events_stand_behind_what_reads(driver: Driver, until_forward: bool, behind: str) -> None:
    ParentLaunch(fill_of(), [Graph("a")], [Graph("forward")], EVENTS._replace(tables_until_forward=until_forward))
    assert driver.named("event node") == [("graph1", ("node2",), "sources"), ("graph1", (behind,), "tables")]


# In the forward's own graph.


@pytest.mark.parametrize("edge_data", [True, False], ids=["CUDA 13", "CUDA 12"])
def test_fill_and_preps_go_in_front_of_every_root(monkeypatch: pytest.MonkeyPatch, edge_data: bool) -> None:
    driver, forward = install(monkeypatch, Driver(edge_data)), Graph("forward")
    fill = fill_of()
    launch = PrependedLaunch(fill, [Graph("a"), Graph("b")], forward)  # type: ignore[list-item, arg-type]
    assert driver.named("kernel") == [("forward", None, "params1")]
    assert driver.named("child") == [("forward", ("node1",), "a"), ("forward", ("node2",), "b")]
    assert driver.named("depend") == [("forward", ("node3", "node3"), ("root1", "root2"))]
    fill.params = "params2"
    launch.run()
    assert driver.named("update") == [("exec of forward", "node1", "params2")]
    assert forward.done == ["instantiate", "replay"]
    assert (driver.named("launch"), fill.count) == ([], 1)  # torch launches, so that random numbers advance
    launch.close()
    launch.close()
    assert forward.done == ["instantiate", "replay"]  # its owner closes it


def test_a_forward_without_nodes_is_composed_too(driver: Driver, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(driver, "cuGraphGetRootNodes", lambda graph, count=0: (0, [], 0))
    PrependedLaunch(fill_of(), [], Graph("forward"))  # type: ignore[arg-type]
    assert driver.named("depend") == []


def test_a_refused_update_does_not_replay(driver: Driver) -> None:
    forward, fill = Graph("forward"), fill_of()
    launch = PrependedLaunch(fill, [], forward)  # type: ignore[arg-type]
    driver.refuses["update"] = 0
    with pytest.raises(GraphGlueError, match="the CUDA driver refused: 999"):
        launch.run()
    assert (forward.done, fill.count) == (["instantiate"], 0)


# What is composed, and what says why it is not.


class Recorded(CudaRecording):
    """A recording of ours by name."""

    def __init__(self, name: str) -> None:
        self._graph = Graph(name)  # type: ignore[assignment]


class Foreign:
    """A recording of somebody else's recorder."""

    def __init__(self, log: list[str], name: str) -> None:
        self.replay: Callable[[], None] = lambda: log.append(name)


def device_of(fallback: str | None = None) -> CudaDevice:
    device = object.__new__(CudaDevice)
    device.torch_device, device.fill_fallback = torch.device("cuda", 0), fallback
    return device


def kernel_fill() -> Any:
    fill = object.__new__(KernelFill)
    fill.__dict__.update(vars(fill_of()))
    return fill


def test_a_parent_is_the_default_and_random_numbers_need_the_forwards_own_graph(driver: Driver) -> None:
    device, preps, forward = device_of(), [Recorded("a")], Recorded("forward")
    assert type(device.compose(kernel_fill(), preps, forward, None, None)) is ParentLaunch
    assert type(device.compose(kernel_fill(), preps, forward, "forward", None)) is PrependedLaunch
    assert type(device.compose(kernel_fill(), preps, None, None, None)) is ParentLaunch
    assert [args[2] for args in driver.named("child")] == ["a", "forward", "a", "a"]


def test_each_reason_against_one_launch_is_named(driver: Driver) -> None:
    preps, forward = [Recorded("a")], Recorded("forward")
    foreign: Any = Foreign([], "b")
    torch_fill: Any = SimpleNamespace(run=lambda: None)
    until_forward = EVENTS._replace(tables_until_forward=True)

    def why(device: CudaDevice, *composed: Any) -> str | None:
        launch = device.compose(*composed)
        assert type(launch) is SeparateLaunches
        return launch.fallback

    assert why(device_of("no NVRTC here"), torch_fill, preps, forward, None, None) == "no NVRTC here"
    assert why(device_of(), torch_fill, preps, forward, None, None) == "the fill is not one kernel"
    assert "another recorder" in (why(device_of(), kernel_fill(), [foreign], forward, None, None) or "")
    assert "another recorder" in (why(device_of(), kernel_fill(), preps, foreign, None, None) or "")
    assert "a prep draws random numbers" in (why(device_of(), kernel_fill(), preps, forward, "prep", None) or "")
    assert "can not be composed" in (why(device_of(), kernel_fill(), preps, forward, "forward", until_forward) or "")
    driver.refuses["child"] = 1
    text = why(device_of(), kernel_fill(), preps, forward, None, None)
    assert text == "the graphs can not be composed: the CUDA driver refused: 999"


@pytest.mark.parametrize(("until_forward", "order"), [(False, "fill S a b T forward"), (True, "fill S a b forward T")])
def test_separate_launches_run_in_order_with_their_events(until_forward: bool, order: str) -> None:
    log: list[str] = []
    device: Any = SimpleNamespace(record_event=log.append, enter_step=lambda: None)
    fill: Any = SimpleNamespace(run=lambda: log.append("fill"))
    preps: Any = [Foreign(log, "a"), Foreign(log, "b")]
    forward: Any = Foreign(log, "forward")
    reads: Any = Reads("S", "T", until_forward)  # type: ignore[arg-type]
    SeparateLaunches(device, fill, preps, forward, reads, "why").run()
    assert " ".join(log) == order
    log.clear()
    launch = SeparateLaunches(device, fill, preps, None, None, "why")
    launch.run()
    assert log == ["fill", "a", "b"]
    launch.close()
    launch.close()


# Memory in flight.


@pytest.fixture
def in_flight(driver: Driver, monkeypatch: pytest.MonkeyPatch) -> InFlight:
    empty = torch.empty
    monkeypatch.setattr(streams.torch, "empty", lambda *size, pin_memory=False, **more: empty(*size, **more))
    return InFlight(torch.device("cuda", 0))


def reach(driver: Driver) -> None:
    """Let the device reach everything that was queued."""
    driver.done.update(event for event, _ in driver.named("record"))


def test_a_pinned_block_is_not_handed_out_before_the_device_has_read_it(driver: Driver, in_flight: InFlight) -> None:
    in_flight.expect_heavy()
    used = set()
    for _ in range(100):
        block = in_flight.block(100)
        assert block.data_ptr() not in used
        used.add(block.data_ptr())
        in_flight.hold(([block], ()), stream=3)
    reach(driver)
    again = {in_flight.block(100).data_ptr() for _ in range(50)}
    assert len(again) == 50
    assert len(again & used) >= 40  # what was read is used again


def test_no_step_waits_and_memory_stays_bounded_once_the_device_keeps_up(driver: Driver, in_flight: InFlight) -> None:
    in_flight.expect_heavy()
    seen = set()
    for _ in range(1000):
        block = in_flight.block(5000)
        seen.add(block.data_ptr())
        in_flight.hold(([block], ()), stream=3)
        del block
        reach(driver)
    assert len(seen) <= 2 * in_flight.max_steps + 1
    assert len(driver.named("event")) <= 3
    assert {name for name, _ in driver.calls} == {"event", "record"}  # nothing that waits


@pytest.mark.parametrize("heavy", [False, True])
def test_sources_are_kept_until_they_were_read_and_let_go_then(
    driver: Driver, in_flight: InFlight, heavy: bool
) -> None:
    if heavy:
        in_flight.expect_heavy()
    steps = 3 * in_flight.max_steps
    refs = []
    for _ in range(steps):
        source = torch.zeros(4)
        refs.append(weakref.ref(source))
        in_flight.hold(((), (source,)), stream=3)
        del source
    assert all(ref() is not None for ref in refs)
    reach(driver)
    for _ in range(in_flight.max_steps):
        in_flight.hold(((), ()), stream=3)
    assert all(ref() is None for ref in refs)


def test_steps_that_the_device_has_not_reached_keep_theirs_while_earlier_ones_go(
    driver: Driver, in_flight: InFlight
) -> None:
    in_flight.expect_heavy()
    groups = []
    for _ in range(3):
        sources = [torch.zeros(4) for _ in range(in_flight.max_steps)]
        groups.append([weakref.ref(source) for source in sources])
        while sources:
            in_flight.hold(((), (sources.pop(),)), stream=3)
    driver.done.add(driver.named("record")[0][0])
    in_flight.block(10)
    alive = [sum(ref() is not None for ref in group) for group in groups]
    assert alive == [0, in_flight.max_steps, in_flight.max_steps]


def test_blocks_are_large_enough_and_found_again(driver: Driver, in_flight: InFlight) -> None:
    in_flight.expect_heavy()
    for num_bytes in (1, 4096, 4097, 10_000, 1 << 20):
        block = in_flight.block(num_bytes)
        assert block.numel() >= num_bytes
        assert block.dtype == torch.uint8
        for _ in range(in_flight.max_steps):
            in_flight.hold(([block], ()) if block is not None else ((), ()), stream=1)
            block = None
    reach(driver)
    large = in_flight.block(1 << 20)
    assert large.numel() >= 1 << 20
    assert len(driver.named("event")) <= 6


# Order between streams.


class Stream:
    """A stream by its handle; it notes whom it waits for."""

    def __init__(self, handle: int, waits: list[tuple[int, int]]) -> None:
        self.handle, self._waits = handle, waits

    def wait_stream(self, other: Stream) -> None:
        self._waits.append((self.handle, other.handle))


def test_a_step_waits_for_the_last_one_only_on_another_stream(monkeypatch: pytest.MonkeyPatch) -> None:
    waits: list[tuple[int, int]] = []
    current = [0]
    monkeypatch.setattr(torch._C, "_cuda_getCurrentRawStream", lambda index: current[0], raising=False)
    monkeypatch.setattr(torch.cuda, "default_stream", lambda device: Stream(0, waits))
    monkeypatch.setattr(torch.cuda, "ExternalStream", lambda handle, device: Stream(handle, waits))
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: Stream(current[0], waits))
    order = StepOrder(torch.device("cuda", 0))
    for handle in (5, 5, 0, 0, 9, 5, 5, 0):
        current[0] = handle
        order.enter()
        assert order.current == handle
    assert waits == [(0, 5), (9, 0), (5, 9), (0, 5)]
