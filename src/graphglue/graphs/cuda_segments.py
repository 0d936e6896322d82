"""Segments on a GPU: one graph each, captured one behind the other on one stream and in one pool."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Hashable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.utils import _pytree as pytree

from graphglue.errors import CaptureError
from graphglue.graphs import guard, memory
from graphglue.graphs.cuda import CudaRecorder, CudaRecording, _Holding, _normal


class _Forking(_Holding):
    """Also note the streams that operations run on: what was forked has to be joined before a segment ends."""

    def __init__(self, rules: guard.Guard, index: int) -> None:
        super().__init__(rules)
        self._index = index
        self._known: set[int] = set()
        self.streams: list[torch.cuda.Stream] = []

    def perform(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run one operation under the capture."""
        handle = torch._C._cuda_getCurrentRawStream(self._index)
        if handle not in self._known:
            self._known.add(handle)
            self.streams.append(torch.cuda.current_stream(self._index))
        return super().perform(func, args, kwargs)


class CudaParts:
    """Record the segments of one callable as CUDA graphs.

    A side stream that an operation ran on is joined when a segment ends and forked again when the next
    begins, so the callable may fork before a break and join behind it. A stream that only kernels ran on
    which torch did not dispatch, or any stream where ``strict`` is off, is not seen: left unjoined, the
    capture is refused.
    """

    def __init__(self, recorder: CudaRecorder, strict: bool) -> None:
        self._recorder, self._strict = recorder, strict
        self.device = recorder.device
        self.rules = guard.Guard(recorder.device)
        self._holding = _Forking(self.rules, recorder.device.index)
        self._graph_pool = recorder._pool
        self._graph: torch.cuda.CUDAGraph | None = None
        self._forked: list[torch.cuda.Stream] = []
        self._reserved = 0

    @property
    def pool(self) -> Hashable:
        """The memory pool of all segments."""
        return tuple(self._graph_pool)

    @contextmanager
    def around(self) -> Iterator[None]:
        """Make the recorder's device and stream current, behind the caller's work and before what follows."""
        stream = self._recorder._stream
        with torch.cuda.device(self.device):
            caller = torch.cuda.current_stream()
            for one in (caller, stream):
                with torch.cuda.stream(one):
                    if torch.cuda.is_current_stream_capturing():
                        raise CaptureError("this stream is being captured already; give the recorder its own stream")
            self._recorder._lease.claim_workspaces()
            stream.wait_stream(caller)
            try:
                with torch.cuda.stream(stream):
                    yield
            finally:
                caller.wait_stream(stream)

    def call(self, run: Callable[[], Any]) -> Any:
        """Run the callable, under the guards if strict."""
        modes = (guard.FunctionGuard(self.rules), self._holding) if self._strict else ()
        return self.rules.call(run, *modes)

    def begin(self) -> None:
        """Begin the capture of a segment."""
        if torch.cuda.current_stream(self.device) != self._recorder._stream:
            raise CaptureError("a break changed the current stream and did not change it back")
        self._reserved = torch.cuda.memory_reserved(self.device)
        self._graph, self._graph_pool = self._recorder._begin(self._graph_pool)
        for side in self._forked:
            side.wait_stream(self._recorder._stream)

    def refusal(self) -> str | None:
        """Say why a segment can not end here; None if it can."""
        current = torch.cuda.current_stream(self.device)
        if current == self._recorder._stream:
            return None
        return f"it is reached on {current}, and a segment ends on the stream it began on, {self._recorder._stream}"

    def end(self, outputs: Any) -> CudaRecording:
        """End the capture of the open segment; side streams are joined."""
        graph, pool = self._opened(), self._graph_pool
        self._join()
        self._graph = None
        try:
            with warnings.catch_warnings():
                warnings.filterwarnings("ignore", message=".*CUDA Graph is empty.*")
                self._recorder._end(graph, pool)
        except CaptureError as error:
            if "unjoined" not in str(error).lower():
                raise
            raise CaptureError(
                f"a side stream was forked from {self._recorder._stream} and is not joined where a segment ends; call "
                f"wait_stream on it before: {error}"
            ) from error
        with memory.plain():
            frozen = pytree.tree_map(_normal, outputs)
        num_bytes = max(0, torch.cuda.memory_reserved(self.device) - self._reserved)
        recording = CudaRecording(graph, frozen, num_bytes, self._holding.held, pool, self._recorder._lease)
        recording._written = self._holding.written if self._strict else None
        recording.reads = self._holding.read
        self._recorder._recordings.add(recording)
        return recording

    def _opened(self) -> torch.cuda.CUDAGraph:
        if self._graph is None:
            raise CaptureError("no segment is open")
        return self._graph

    def _join(self) -> None:
        """Make the capture wait for every stream that it has spread to."""
        self._forked = []
        for side in self._holding.streams:
            if side == self._recorder._stream:
                continue
            with torch.cuda.stream(side):
                spread = torch.cuda.is_current_stream_capturing()
            if spread:
                self._recorder._stream.wait_stream(side)
                self._forked.append(side)

    def abandon(self) -> None:
        """End the open capture and drop it."""
        graph, self._graph = self._graph, None
        if graph is not None:
            self._recorder._abandon(graph, self._graph_pool)

    def owns(self, tensor: torch.Tensor) -> bool:
        """Tell whether a tensor lies in memory that the pool hands out again."""
        if not tensor.is_cuda:
            return False
        if self._strict:
            return tensor.untyped_storage()._cdata in self._holding.made
        address = tensor.untyped_storage().data_ptr()
        blocks = torch.cuda.memory_snapshot()
        mine = (block for block in blocks if tuple(block["segment_pool_id"]) == self.pool)
        return any(block["address"] <= address < block["address"] + block["total_size"] for block in mine)

    def alias(self, tensor: torch.Tensor) -> torch.Tensor:
        """Give the same memory in a tensor that does not keep it: the pool may hand it out again.

        The address stays mapped, because each segment's graph keeps the pool.
        """
        whole = tensor.untyped_storage()
        storage: Any = torch._C._construct_storage_from_data_pointer(whole.data_ptr(), tensor.device, whole.nbytes())
        with memory.plain():
            return memory.place(storage, tensor)

    def launch(self, recording: CudaRecording) -> Callable[[], None] | None:
        """Give what launches a segment; None if its graph has no node."""
        from cuda.bindings import driver

        failed, _, count = driver.cuGraphGetNodes(driver.CUgraph(recording.graph.raw_cuda_graph()), 0)
        if int(failed) == 0 and count == 0:
            return None
        return recording.launch
