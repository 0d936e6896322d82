"""Record with CUDA graphs, on a stream and in a memory pool of the recorder's own.

``torch.cuda.graph`` is not used: when a capture fails it leaves the allocator and the generator in the
middle of it. ``capture_begin`` and ``capture_end`` are called here, and a failure is cleaned up.
"""

from __future__ import annotations

import gc
import logging
import weakref
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from typing import Any

import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils import _pytree as pytree

from graphglue.errors import CaptureError, ClosedError
from graphglue.graphs import guard, memory, session
from graphglue.graphs.cuda_streams import Lease

logger = logging.getLogger("graphglue")


class _Holding(guard.DispatchGuard):
    """Check operations, run them, and hold the memory they read that the capture did not make itself.

    The graph knows addresses only: a table whose last Python name is rebound must not be freed under it.
    """

    def __init__(self, rules: guard.Guard) -> None:
        super().__init__(rules)
        self.held: dict[int, torch.UntypedStorage] = {}
        self.written: set[int] = set()  # addresses
        self.read: set[int] = set()  # addresses of what was read before anything here wrote it
        # Weak references, which keep a storage's identity from being used again and free its memory.
        self.made: dict[int, StorageWeakRef] = {}

    def perform(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run one operation under the capture."""
        for storage in _storages((args, kwargs)):
            if storage._cdata not in self.made:
                self.held[storage._cdata] = storage
        result = func(*args, **kwargs)
        given = memory.addresses((args, kwargs))
        if func._schema.is_mutable:
            self.written |= given  # more than what it writes, to refuse nothing that is right
        else:
            self.read |= given - self.written
        self.written |= memory.addresses(result) - given
        for storage in _storages(result):
            if storage._cdata not in self.held and storage._cdata not in self.made:
                self.made[storage._cdata] = StorageWeakRef(storage)
        return result


def _storages(tree: Any) -> list[torch.UntypedStorage]:
    leaves = pytree.tree_leaves(tree)
    tensors = (leaf for leaf in leaves if isinstance(leaf, torch.Tensor) and leaf.layout is torch.strided)
    return [tensor.untyped_storage() for tensor in tensors]


def _normal(leaf: Any) -> Any:
    """Give an alias that is no inference tensor, and keeps its geometry whatever happens to ``leaf``."""
    if isinstance(leaf, torch.Tensor) and leaf.layout is torch.strided:
        return memory.place(leaf.untyped_storage(), leaf)
    return leaf


class CudaRecording:
    """A captured graph with its outputs, which stay at their addresses."""

    def __init__(
        self, graph: torch.cuda.CUDAGraph, outputs: Any, num_bytes: int, held: Any, pool: Any, lease: Lease
    ) -> None:
        self.pool = pool
        self._lease: Lease | None = lease
        self._written: set[int] | None = None
        self.reads: set[int] = set()
        self._graph: torch.cuda.CUDAGraph | None = graph
        self._outputs = outputs
        self._num_bytes = num_bytes
        self._held = held

    @property
    def is_open(self) -> bool:
        """Whether the graph is still there, and with it its pool."""
        return self._graph is not None

    @property
    def graph(self) -> torch.cuda.CUDAGraph:
        """The torch graph, made with ``keep_graph=True``: it can be composed into another."""
        if self._graph is None:
            raise ClosedError("this recording was closed; record the callable again")
        return self._graph

    @property
    def outputs(self) -> Any:
        """What the callable returned; computed by a replay."""
        if self._graph is None:
            raise ClosedError("this recording was closed; record the callable again")
        return self._outputs

    @property
    def num_bytes(self) -> int:
        """Memory in bytes that the allocator reserved for this capture; 0 if the pool had enough."""
        return self._num_bytes

    def computes(self, tensor: torch.Tensor) -> bool | None:
        """Say True where a recorded operation writes the memory of a tensor.

        Else None: a kernel that torch did not dispatch, or a recording that was not strict, may write it.
        """
        seen = self._written is not None and tensor.untyped_storage().data_ptr() in self._written
        return True if seen else None

    def replay(self) -> None:
        """Launch the graph on the caller's current stream. Sync: none."""
        session.check_replayable()
        self.graph.replay()

    @property
    def launch(self) -> Callable[[], None]:
        """What launches the graph and checks nothing: torch's replay, without the Python method in front of it."""
        return super(torch.cuda.CUDAGraph, self.graph).replay

    def close(self) -> None:
        """Drop the graph, the outputs and their memory. Calling it twice is fine."""
        graph, self._graph = self._graph, None
        self._outputs, self._held, self._lease = None, None, None
        if graph is not None:
            graph.reset()


class AdoptedGraph:
    """A forward graph that the engine captured itself; it stays the engine's.

    Raises:
        CaptureError: something else than a captured ``torch.cuda.CUDAGraph(keep_graph=True)``.
    """

    num_bytes = 0

    def __init__(self, graph: torch.cuda.CUDAGraph, outputs: Any) -> None:
        try:
            graph.raw_cuda_graph()
        except (AttributeError, RuntimeError) as error:
            raise CaptureError(
                f"a {type(graph).__name__} can not be adopted: {error}; expected a captured torch.cuda.CUDAGraph that "
                "was made with keep_graph=True"
            ) from error
        self.graph, self.outputs = graph, outputs

    def computes(self, tensor: torch.Tensor) -> None:
        """Say that nobody looked."""
        return

    def replay(self) -> None:
        """Launch the graph on the caller's current stream. Sync: none."""
        self.graph.replay()

    def close(self) -> None:
        """Leave the graph to the engine."""


class CudaRecorder:
    """Record callables on one CUDA device.

    Args:
        device: where to record.
        stream: a non-default stream to capture on; by default one that nobody else uses. The cuBLAS workspace of a
            stream that was used before is where the user's work has put it, and goes when he drops it.
        pool: a memory pool to allocate from, shared by all recordings; a new one by default.
    """

    def __init__(
        self, device: torch.device | str | int, stream: torch.cuda.Stream | None = None, pool: Any = None
    ) -> None:
        named = torch.device("cuda", device) if isinstance(device, int) else torch.device(device)
        index = torch.cuda.current_device() if named.index is None else named.index
        self._device = torch.device("cuda", index)
        self._lease = Lease(self._device, stream)
        self._stream = self._lease.stream
        self._given_pool, self._own_pool = pool, torch.cuda.graph_pool_handle()
        self._recordings: weakref.WeakSet[CudaRecording] = weakref.WeakSet()
        self._failed: list[torch.cuda.CUDAGraph] = []

    @property
    def device(self) -> torch.device:
        """The CUDA device, with its index."""
        return self._device

    @property
    def _pool(self) -> Any:
        """The pool of the next capture: torch refuses the handle of a pool whose last graph is gone."""
        if self._given_pool is not None:
            return self._given_pool
        if not any(recording.is_open and recording.pool == self._own_pool for recording in self._recordings):
            self._own_pool = torch.cuda.graph_pool_handle()
        return self._own_pool

    @contextmanager
    def session(self) -> Iterator[None]:
        """Make the recorder's stream current; order it after the caller's work, and the caller after it."""
        gc.collect()
        with session.alone("session"), session.held_collection(), torch.cuda.device(self._device):
            caller = torch.cuda.current_stream(self._device)
            self._lease.claim_workspaces()
            self._stream.wait_stream(caller)
            try:
                with torch.cuda.stream(self._stream):
                    yield
            finally:
                caller.wait_stream(self._stream)

    def finish(self) -> None:
        """Wait until the device has finished all queued work. Sync: the device."""
        torch.cuda.synchronize(self._device)

    def record(self, run: Callable[[], Any], *, strict: bool = True) -> CudaRecording:
        """Capture ``run``.

        Args:
            run: the callable; it has run before with the same shapes, for real.
            strict: check each call and operation, and hold the memory they read. Without it the caller
                keeps alive what the callable closes over.

        Raises:
            CaptureError: the callable did something that can not be captured, or raised.
        """
        with ExitStack() as stack:
            stack.enter_context(session.alone("recording"))
            stack.enter_context(session.held_collection())
            stack.enter_context(torch.cuda.device(self._device))
            stack.enter_context(torch.cuda.stream(self._stream))
            if torch.cuda.is_current_stream_capturing():
                raise CaptureError("this stream is being captured already; give the recorder its own stream")
            self._lease.claim_workspaces()
            reserved = torch.cuda.memory_reserved(self._device)
            rules = guard.Guard(self._device)
            holding = _Holding(rules)
            modes = (guard.FunctionGuard(rules), holding) if strict else ()
            graph, outputs, pool = self._capture(lambda: rules.call(run, *modes), self._pool)
            num_bytes = max(0, torch.cuda.memory_reserved(self._device) - reserved)
            with memory.plain():
                outputs = pytree.tree_map(_normal, outputs)
            recording = CudaRecording(graph, outputs, num_bytes, holding.held, pool, self._lease)
            recording._written = holding.written if strict else None
            recording.reads = holding.read
            self._recordings.add(recording)
            return recording

    @property
    def pool(self) -> tuple[int, ...]:
        """The memory pool of the next recording."""
        return tuple(self._pool)

    def parts(self, strict: bool = True) -> Any:
        """Give what records the segments of one callable, one graph each, in one pool and on one stream."""
        from graphglue.graphs.cuda_segments import CudaParts

        return CudaParts(self, strict)

    def _capture(self, run: Callable[[], Any], pool: Any) -> tuple[torch.cuda.CUDAGraph, Any, Any]:
        graph, pool = self._begin(pool)
        try:
            outputs = run()
        except BaseException:
            self._abandon(graph, pool)
            raise
        self._end(graph, pool)
        return graph, outputs, pool

    def _begin(self, pool: Any) -> tuple[torch.cuda.CUDAGraph, Any]:
        """Begin a capture; give its graph and its pool, a new one where torch takes the engine's no more.

        A pool dies with its last graph, which an engine that gives a fresh handle leaves to this recorder.
        """
        graph, is_engines = torch.cuda.CUDAGraph(keep_graph=True), pool == self._given_pool
        try:
            # thread_local: another thread's copies and allocations do not break this capture.
            graph.capture_begin(pool=pool, capture_error_mode="thread_local")
        except RuntimeError as error:
            self._abandon(graph, pool)
            if not is_engines:
                raise CaptureError(f"a capture could not begin: {error}") from error
            fresh = self._begin(self._own_pool)
            self._given_pool = None
            logger.warning("memory pool %s lost its last graph, so torch takes it no more; a new one is used", pool)
            return fresh
        return graph, pool

    def _end(self, graph: torch.cuda.CUDAGraph, pool: Any) -> None:
        try:
            graph.capture_end()
            graph.instantiate()
        except RuntimeError as error:
            self._unwind(graph, pool)
            raise CaptureError(f"the capture did not end as a valid graph; it was dropped: {error}") from error

    def _abandon(self, graph: torch.cuda.CUDAGraph, pool: Any) -> None:
        """End a capture whose callable raised. The stream leaves capture mode whether or not this raises."""
        try:
            graph.capture_end()
        except RuntimeError:
            self._unwind(graph, pool)
        else:
            graph.reset()

    def _unwind(self, graph: torch.cuda.CUDAGraph, pool: Any) -> None:
        """Undo what torch leaves behind when ``capture_end`` raises on an invalidated capture.

        Up to 2.11 it raises before it tells the allocator, which then takes the pool for still being
        captured into: the next capture is refused and ``empty_cache`` asserts. Later releases tell it
        (pytorch#180395), and the call below raises, which shows that nothing is left to do. The pool's
        count of users is given back only in the first case.
        """
        # torch's pinned-memory allocator keeps a filter that points to the graph object: keep it alive.
        self._failed.append(graph)
        graph.reset()
        try:
            torch._C._cuda_endAllocateToPool(self._device.index, pool)
        except (RuntimeError, AttributeError):
            pass
        else:
            torch._C._cuda_releasePool(self._device.index, pool)
            self._given_pool = None
        # The pinned-memory allocator can not be told, and refuses this pool's handle for a capture from now
        # on. Graphs recorded in it go on; later ones share a new pool, the recorder's own.
        self._own_pool = torch.cuda.graph_pool_handle()
        self._reset_generator()

    def _reset_generator(self) -> None:
        """Capture one small fill and drop it, because only a good capture's end resets the generator.

        After a failed one, releases that keep one state for each generator go on to raise "Offset
        increment outside graph capture" at the next random number.
        """
        graph = torch.cuda.CUDAGraph()
        with suppress(RuntimeError):
            graph.capture_begin(capture_error_mode="thread_local")
            torch.zeros(1, device=self._device)
            graph.capture_end()
            graph.reset()
