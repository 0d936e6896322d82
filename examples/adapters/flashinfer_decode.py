"""FlashInfer's paged decode attention as a backend: its host planner runs in ``plan``, and what it plans is a slot.

    pip install -e '.[flashinfer]'

``BatchDecodeWithPagedKVCacheWrapper.plan`` splits a step's requests over thread blocks, on the host, by their lengths.
In CUDA-graph mode it writes its numbers into one pinned buffer and queues a copy of that to the device; planned again
before the copy has run, the older step reads the newer plan. Captured with the step, the plan would stay as it was.

Here the same planner plans into memory that nothing reads, and a snapshot of its numbers travels with the fill, like
any host value: any number of steps may be in flight. What reads them on the device is captured: the prep, which packs
the pages of the requests, and the forward, which runs the wrapper over the slots.

Pad rows have no pages: they read nothing, and give zeros. How a row is split depends on all lengths of its step, so its
bits are those of FlashInfer's own plan for the same rows of the same bucket, and not those of the row alone.

Captured kernels must read what the prep made and the slots, so the wrapper's buffers are set by name, and its planner's
memory is read by name; FlashInfer has no public way, and its own ``fast_decode_plan`` uses the same names. Written for
0.6.8 to 0.6.18.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

import graphglue as gg

NAME = "flashinfer-decode"
CONTRACT = gg.PrepContract(
    name=NAME,
    reads={"req_pool_indices": 0, "kv_indptr": gg.REPEAT_LAST},
    tables=("req_to_token",),
    outputs={"kv_indices": "request"},
    modes={gg.Mode.DECODE},
)


@dataclass(frozen=True)
class Layout:
    """The numbers of the attention layers, and the dtype of queries and cache."""

    num_heads: int
    num_kv_heads: int
    head_dim: int
    page_size: int
    max_context: int
    dtype: torch.dtype

    @property
    def max_pages(self) -> int:
        """Pages of the longest request."""
        return -(-self.max_context // self.page_size)

    def arguments(self) -> dict[str, Any]:
        """Give what FlashInfer's planners are told of the layers."""
        kinds = {"q_data_type": self.dtype, "kv_data_type": self.dtype}
        heads = {"num_qo_heads": self.num_heads, "num_kv_heads": self.num_kv_heads, "head_dim": self.head_dim}
        return {**heads, "page_size": self.page_size, **kinds}


class Rows:
    """FlashInfer's wrappers for one number of rows: one that plans into memory of its own, and one that runs."""

    def __init__(self, backend: FlashInferDecode, num_rows: int) -> None:
        self._backend, self._num_rows = backend, num_rows
        self._buffers = tuple(backend.zeros(size, torch.int32) for size in (num_rows + 1, 1, num_rows))
        self._planner, self._runner = (backend.new_wrapper(*self._buffers) for _ in range(2))
        self._layout = [int(number) for number in self._planner._plan_info]

    def plan(self, indptr: np.ndarray) -> np.ndarray:
        """Give the numbers of a step, as bytes. Sync: none.

        Args:
            indptr: [rows + 1] int32, the pages of all rows, those of the pad rows included.

        Raises:
            ContractError: FlashInfer laid the numbers out in another way than the captured kernels read them.
        """
        planned = self._planner._pin_memory_int_workspace_buffer
        planned.zero_()  # so that equal steps have equal bytes
        self._backend.fast_plan(
            self._planner, *self._buffers, **self._backend.layout.arguments(),
            global_override_indptr_cpu=torch.from_numpy(indptr),
        )  # fmt: skip
        layout = [int(number) for number in self._planner._plan_info]
        if layout != self._layout:
            raise gg.ContractError(
                f"FlashInfer planned {self._num_rows} rows as {layout}, and its kernels were captured for "
                f"{self._layout}: this version's CUDA-graph mode does not keep its layout; use 0.6.8 to 0.6.18"
            )
        return planned.numpy().copy()

    def run(self, view: Any, indices: Tensor, queries: Tensor, cache: tuple[Tensor, Tensor]) -> Tensor:
        """Run the kernels over a step's own buffers."""
        wrapper = self._runner
        wrapper._paged_kv_indptr_buf, wrapper._paged_kv_last_page_len_buf = view.kv_indptr, view.kv_last_page_len
        wrapper._paged_kv_indices_buf, wrapper._int_workspace_buffer = indices, view.kv_plan
        # Without programmatic launches, whose edges not every composed graph may have.
        return wrapper.run(queries, cache, enable_pdl=False)


class FlashInferDecode:
    """Attend to paged keys and values with FlashInfer.

    Args:
        layout: the layers' numbers.
        device: a CUDA device.
        workspace_bytes: FlashInfer's memory for partial results, shared by all buckets and layers.
        plan_bytes: room for a plan's numbers; FlashInfer says so if it is too small.
    """

    def __init__(
        self,
        layout: Layout,
        device: torch.device | str = "cuda",
        workspace_bytes: int = 128 << 20,
        plan_bytes: int = 32 << 10,
    ) -> None:
        from flashinfer import BatchDecodeWithPagedKVCacheWrapper
        from flashinfer.decode import fast_decode_plan

        self._kind, self.fast_plan = BatchDecodeWithPagedKVCacheWrapper, fast_decode_plan
        self.layout, self.device, self.plan_bytes = layout, torch.device(device), plan_bytes
        self.workspace = self.zeros(workspace_bytes, torch.uint8)
        self._rows: dict[int, Rows] = {}

    def slots(self) -> list[gg.Slot]:
        """List the slots that plan, prep and forward use; a decode forward has others beside them.

        Slots:
            seq_lens: [requests] int64, pad 1; in host memory, for the planner.
            req_pool_indices: [requests] int64, pad 0; each request's row of ``req_to_token``.
            kv_indptr: [requests + 1] int32, pad REPEAT_LAST; kv_last_page_len: [requests] int32; kv_plan: [plan_bytes]
                uint8; all from the planner.
        """
        return [
            gg.Slot("seq_lens", "request", torch.int64, pad=1, valid=(1, self.layout.max_context)),
            gg.Slot("req_pool_indices", "request", torch.int64, pad=0, index_of="req_to_token"),
            gg.Slot("kv_indptr", "offset", torch.int32, pad=gg.REPEAT_LAST),
            gg.Slot("kv_last_page_len", "request", torch.int32, pad=1),
            gg.Slot("kv_plan", "fixed", torch.uint8, pad=0, inner=(self.plan_bytes,)),
        ]

    def register(self, registry: gg.Registry) -> None:
        """Register the prep with its planner."""
        registry.register(CONTRACT, plan=self.plan)(self.prep)

    def plan(self, batch: gg.Batch, bucket: gg.Bucket) -> Mapping[str, Any]:
        """Plan a step on the host. An IDLE step has no pages. Sync: none.

        Raises:
            BindError: lengths that are not in host memory.
        """
        if not batch.num_requests:
            return {}
        lengths = batch.sources.get("seq_lens")
        if lengths is None or (isinstance(lengths, Tensor) and lengths.device.type != "cpu"):
            raise gg.BindError("slot 'seq_lens': FlashInfer's planner reads it on the host; hand in a list or an array")
        lengths = np.asarray(lengths, dtype=np.int64)
        indptr = np.zeros(bucket.requests + 1, np.int32)
        indptr[1 : len(lengths) + 1] = np.cumsum(-(-lengths // self.layout.page_size))
        indptr[len(lengths) + 1 :] = indptr[len(lengths)]
        return {
            "kv_indptr": indptr[: len(lengths) + 1],
            "kv_last_page_len": ((lengths - 1) % self.layout.page_size + 1).astype(np.int32),
            "kv_plan": self.rows(bucket.requests).plan(indptr),
        }

    def prep(self, view: Any) -> dict[str, Tensor]:
        """Pack the pages of the requests, one request behind the other.

        Slots: kv_indptr, req_pool_indices. Tables: req_to_token [rows, max_context].

        Returns:
            kv_indices: [requests, max_pages] int32; read flat, the pages of all requests, then 0.

        Sync: none. Capturable: yes.
        """
        num_rows, indptr, table = view.bucket.requests, view.kv_indptr, view.tables.req_to_token
        flat = torch.arange(num_rows * self.layout.max_pages, dtype=torch.int32, device=indptr.device)
        inside = flat < indptr[-1]
        row = torch.searchsorted(indptr[1:], flat, right=True).clamp(max=num_rows - 1)
        column = torch.where(inside, flat - indptr[row], 0) * self.layout.page_size
        pages = table[view.req_pool_indices[row], column] // self.layout.page_size
        return {"kv_indices": torch.where(inside, pages, 0).to(torch.int32).view(num_rows, -1)}

    def attend(
        self, view: Any, metadata: Mapping[str, Tensor], queries: Tensor, keys: Tensor, values: Tensor
    ) -> Tensor:
        """Attend in one layer of the forward.

        Args:
            view, metadata: of the step.
            queries: [requests, H, D].
            keys, values: [pages, page_size, K, D], one layer's cache.

        Returns:
            The mixed values, [requests, H, D]; 0 for pad rows.

        Sync: none. Capturable: yes, once a warm-up has run at this bucket: that compiles or loads the kernels.
        """
        return self.rows(view.bucket.requests).run(view, metadata["kv_indices"].flatten(), queries, (keys, values))

    def rows(self, num_rows: int) -> Rows:
        """Give the wrappers for a number of rows."""
        if num_rows not in self._rows:
            self._rows[num_rows] = Rows(self, num_rows)
        return self._rows[num_rows]

    def zeros(self, size: int, dtype: torch.dtype) -> Tensor:
        """Allocate a buffer."""
        return torch.zeros(size, dtype=dtype, device=self.device)

    def new_wrapper(self, indptr: Tensor, indices: Tensor, last_page_len: Tensor) -> Any:
        """Make a wrapper in CUDA-graph mode, and plan it once, for rows without pages."""
        wrapper = self._kind(
            self.workspace, "NHD", use_cuda_graph=True, paged_kv_indptr_buffer=indptr, paged_kv_indices_buffer=indices,
            paged_kv_last_page_len_buffer=last_page_len,
        )  # fmt: skip
        wrapper.reset_workspace_buffer(self.workspace, self.zeros(self.plan_bytes, torch.uint8))
        none, last = torch.zeros(0, dtype=torch.int32), torch.ones(len(last_page_len), dtype=torch.int32)
        wrapper.plan(torch.zeros(len(indptr), dtype=torch.int32), none, last, **self.layout.arguments())
        return wrapper
