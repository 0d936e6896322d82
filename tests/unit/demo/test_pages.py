"""The page allocator: nobody shares a page, nobody gets the sink, nobody runs dry half-way."""

from __future__ import annotations

import torch
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from graphglue.demo.pages import Lease, PagePool

NUM_ROWS, NUM_PAGES, PAGE_SIZE, MAX_CONTEXT = 4, 10, 4, 24


class PageMachine(RuleBasedStateMachine):
    """Admit, grow and release in any order."""

    def __init__(self) -> None:
        super().__init__()
        self.pool = PagePool(
            num_rows=NUM_ROWS,
            num_pages=NUM_PAGES,
            page_size=PAGE_SIZE,
            max_context=MAX_CONTEXT,
            device=torch.device("cpu"),
        )
        self.leases: list[tuple[Lease, int]] = []

    @rule(num_tokens=st.integers(1, MAX_CONTEXT))
    def admit(self, num_tokens: int) -> None:
        if self.pool.can_admit(num_tokens):
            self.leases.append((self.pool.admit(num_tokens), num_tokens))

    @precondition(lambda self: self.leases)
    @rule(choice=st.randoms(use_true_random=False))
    def grow(self, choice) -> None:
        lease, most = choice.choice(self.leases)
        num_tokens = choice.randint(1, most)
        self.pool.grow(lease, num_tokens)
        assert len(lease.pages) * PAGE_SIZE >= num_tokens

    @precondition(lambda self: self.leases)
    @rule(choice=st.randoms(use_true_random=False))
    def release(self, choice) -> None:
        self.pool.release(self.leases.pop(choice.randrange(len(self.leases)))[0])

    @invariant()
    def rows_and_pages_have_one_owner(self) -> None:
        rows = [lease.row for lease, _ in self.leases]
        pages = [page for lease, _ in self.leases for page in lease.pages]
        assert len(set(rows)) == len(rows)
        assert len(set(pages)) == len(pages)
        assert 0 not in rows
        assert 0 not in pages

    @invariant()
    def the_table_says_where_each_position_is(self) -> None:
        assert not self.pool.req_to_token[0].any()
        for lease, _ in self.leases:
            held = len(lease.pages) * PAGE_SIZE
            expected = [self.pool.location(lease, position) for position in range(held)]
            assert self.pool.req_to_token[lease.row, :held].tolist() == expected


TestPages = PageMachine.TestCase


def test_what_was_reserved_is_not_given_away() -> None:
    pool = PagePool(num_rows=4, num_pages=4, page_size=4, max_context=16, device=torch.device("cpu"))
    lease = pool.admit(12)
    assert pool.can_admit(4)
    assert not pool.can_admit(5)
    pool.release(lease)
    assert pool.can_admit(16)
