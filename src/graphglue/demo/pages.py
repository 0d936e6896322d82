"""The page allocator of the demo's engine: rows of ``req_to_token`` and pages of the KV cache.

A request reserves at admission as many pages as it can ever need, so that it is never stopped
half-way, but takes each one only when it reaches it. Row 0 and page 0 belong to nobody: pad rows
read and write there.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch


@dataclass
class Lease:
    """What one running request holds: its row, its pages in order, and how many it may still take."""

    row: int
    num_reserved: int
    pages: list[int] = field(default_factory=list)


class PagePool:
    """Hand out rows and pages, and keep ``req_to_token`` true.

    Args:
        num_rows: requests that can run at once.
        num_pages: pages for requests; the sink comes on top.
        page_size: tokens of a page.
        max_context: the most tokens of a request, a multiple of ``page_size``.
        device: where ``req_to_token`` [num_rows + 1, max_context] int64 lives.
    """

    def __init__(
        self, *, num_rows: int, num_pages: int, page_size: int, max_context: int, device: torch.device
    ) -> None:
        self.page_size = page_size
        self.num_pages = num_pages + 1
        self.req_to_token = torch.zeros(num_rows + 1, max_context, dtype=torch.int64, device=device)
        # Last in, first out: pages come back in another order, so contexts are scattered before long.
        self._free_rows = list(range(num_rows, 0, -1))
        self._free_pages = list(range(num_pages, 0, -1))
        self._num_reserved = 0

    def can_admit(self, num_tokens: int) -> bool:
        """Tell whether a row and pages for ``num_tokens`` are free."""
        num_free = len(self._free_pages) - self._num_reserved
        return bool(self._free_rows) and self._pages_for(num_tokens) <= num_free

    def admit(self, num_tokens: int) -> Lease:
        """Give a row to a request of at most ``num_tokens``, and reserve its pages."""
        lease = Lease(self._free_rows.pop(), self._pages_for(num_tokens))
        self._num_reserved += lease.num_reserved
        return lease

    def grow(self, lease: Lease, num_tokens: int) -> None:
        """Take pages until the lease covers ``num_tokens``, and enter them in the table. Sync: none."""
        while len(lease.pages) * self.page_size < num_tokens:
            page, start = self._free_pages.pop(), len(lease.pages) * self.page_size
            lease.pages.append(page)
            lease.num_reserved -= 1
            self._num_reserved -= 1
            first = page * self.page_size
            self.req_to_token[lease.row, start : start + self.page_size] = torch.arange(
                first, first + self.page_size, device=self.req_to_token.device
            )

    def location(self, lease: Lease, position: int) -> int:
        """Give the KV location of a position that the lease covers."""
        return lease.pages[position // self.page_size] * self.page_size + position % self.page_size

    def release(self, lease: Lease) -> None:
        """Take everything back. The table keeps the stale row, as an engine's does."""
        self._num_reserved -= lease.num_reserved
        self._free_pages.extend(lease.pages)
        self._free_rows.append(lease.row)

    def _pages_for(self, num_tokens: int) -> int:
        return -(-num_tokens // self.page_size)
