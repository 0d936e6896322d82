"""The launch: fill, preps and forward of one key as one graph.

Two compositions, measured to cost about the same:

- ``ParentLaunch``: a parent graph of fill node -> prep children -> forward child, launched raw. The
  forward's own graph stays usable alone, which the eager routes need. The default.
- ``PrependedLaunch``: fill node and prep children in front of the forward's root nodes, in the
  forward's own graph, replayed through torch. Torch's prologue runs, so random numbers advance, and
  any kind of node may follow. The forward's graph is used up.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from graphglue.device.base import Reads
from graphglue.device.kernel import checked
from graphglue.errors import ClosedError, GraphGlueError

# What torch instantiates with: cudaGraphInstantiateFlagAutoFreeOnLaunch | UseNodePriority.
_INSTANTIATE_FLAGS = 1 | 8


class ParentLaunch:
    """A parent graph of fill node, prep children and forward child."""

    fallback: str | None = None

    def __init__(
        self,
        fill: Any,
        preps: Sequence[torch.cuda.CUDAGraph],
        forward: Sequence[torch.cuda.CUDAGraph],
        reads: Reads | None = None,
    ) -> None:
        from cuda.bindings import driver

        self._fill, self._graphs = fill, (*preps, *forward)  # torch's objects own the memory pool: keep them
        self._driver = driver
        self._graph = checked(driver.cuGraphCreate(0))
        self._exec: Any = None
        try:
            filled = checked(driver.cuGraphAddKernelNode(self._graph, None, 0, fill.params))
            prepared = _add_children(self._graph, filled, preps)
            last = _add_children(self._graph, prepared, forward)
            _add_events(self._graph, reads, filled, prepared, last)
            self._exec = checked(driver.cuGraphInstantiate(self._graph, _INSTANTIATE_FLAGS))
        except BaseException:
            self.close()
            raise
        self.run = self._runner(filled)

    def _runner(self, filled: Any) -> Callable[[], None]:
        """Build what launches on the caller's current stream, behind the last step. Sync: none.

        A closure, because every call and every attribute that is looked up counts here, twice so where
        the code is cold. A parameter update touches later launches only: those that are queued keep theirs.
        """
        driver, exec_graph, fill = self._driver, self._exec, self._fill
        update, launch = driver.cuGraphExecKernelNodeSetParams, driver.cuGraphLaunch
        order, stream_of, launched = fill.order, fill.order.stream, fill.launched

        def run() -> None:
            """Launch the step that was loaded. Sync: none."""
            if (stream := stream_of()) != order.current:
                order.enter()
            (failed,) = update(exec_graph, filled, fill.params)
            if not failed:
                (failed,) = launch(exec_graph, stream)
            if failed:
                raise GraphGlueError(f"the CUDA driver refused the step's launch: {failed!r}")
            launched()

        return run

    def close(self) -> None:
        """Destroy the graph. Calling it twice is fine."""
        exec_graph, self._exec, self.run = self._exec, None, _closed
        graph, self._graph, self._graphs = self._graph, None, ()
        if exec_graph is not None:
            self._driver.cuGraphExecDestroy(exec_graph)
        if graph is not None:
            self._driver.cuGraphDestroy(graph)


class PrependedLaunch:
    """Fill node and prep children in front of a forward, in the forward's own graph."""

    fallback: str | None = None

    def __init__(
        self,
        fill: Any,
        preps: Sequence[torch.cuda.CUDAGraph],
        forward: torch.cuda.CUDAGraph,
        reads: Reads | None = None,
    ) -> None:
        from cuda.bindings import driver

        self._fill, self._preps, self._forward = fill, tuple(preps), forward
        graph = driver.CUgraph(forward.raw_cuda_graph())
        roots = _root_nodes(graph)
        if reads is not None and reads.tables_until_forward:
            raise GraphGlueError("an event behind a forward that draws random numbers would need its last nodes")
        self._driver, self._filled = driver, checked(driver.cuGraphAddKernelNode(graph, None, 0, fill.params))
        try:
            prepared = _add_children(graph, self._filled, preps)
            _add_events(graph, reads, self._filled, prepared, prepared)
            _depend(graph, prepared, roots)
            forward.instantiate()
        except BaseException:
            _remove_all_but(graph, roots, self._filled)
            raise
        self._exec = driver.CUgraphExec(forward.raw_cuda_graph_exec())

    def run(self) -> None:
        """Replay through torch, on the caller's current stream. Sync: none."""
        self._fill.order.enter()
        checked(self._driver.cuGraphExecKernelNodeSetParams(self._exec, self._filled, self._fill.params))
        self._forward.replay()
        self._fill.launched()

    def close(self) -> None:
        """Let the graphs go; their owner closes them."""
        self._preps = ()


def _closed() -> None:
    raise ClosedError("this launch was dropped; what it was composed of was captured anew or closed")


def _add_children(graph: Any, before: Any, children: Sequence[torch.cuda.CUDAGraph]) -> Any:
    """Add graphs as child nodes, one behind the other; give the last node."""
    from cuda.bindings import driver

    for child in children:
        raw = driver.CUgraph(child.raw_cuda_graph())
        before = checked(driver.cuGraphAddChildGraphNode(graph, [before], 1, raw))
    return before


def _add_events(graph: Any, reads: Reads | None, filled: Any, prepared: Any, last: Any) -> None:
    """Record the events behind what reads sources and tables; nothing waits for them in the graph."""
    from cuda.bindings import driver

    if reads is None:
        return
    behind_tables = last if reads.tables_until_forward else prepared
    for event, node in ((reads.sources, filled), (reads.tables, behind_tables)):
        handle = driver.CUevent(event.cuda_event)  # type: ignore[attr-defined]
        checked(driver.cuGraphAddEventRecordNode(graph, [node], 1, handle))


def _root_nodes(graph: Any) -> list[Any]:
    from cuda.bindings import driver

    _, count = checked(driver.cuGraphGetRootNodes(graph, 0))
    return list(checked(driver.cuGraphGetRootNodes(graph, count))[0])


def _remove_all_but(graph: Any, roots: Sequence[Any], filled: Any) -> None:
    """Take a half-built front off a graph again: it goes on alone, or is the engine's."""
    from cuda.bindings import driver

    kept = {int(node) for node in roots}
    for node in _root_nodes(graph):
        if int(node) not in kept and int(node) != int(filled):
            driver.cuGraphDestroyNode(node)
    driver.cuGraphDestroyNode(filled)


def _depend(graph: Any, first: Any, nodes: Sequence[Any]) -> None:
    """Make nodes run after ``first``."""
    from cuda.bindings import driver

    before, count = [first] * len(nodes), len(nodes)
    if count == 0:
        return
    try:  # CUDA 13 takes edge data as well
        checked(driver.cuGraphAddDependencies(graph, before, list(nodes), None, count))
    except TypeError:
        checked(driver.cuGraphAddDependencies(graph, before, list(nodes), count))
