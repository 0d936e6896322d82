"""The shipped prep "kv-page-top-up": who takes which page, what a short stack does, and that no step runs twice."""

from __future__ import annotations

import pytest
import torch

import graphglue as gg
from graphglue.audit import audit
from graphglue.core.view import View
from graphglue.errors import ContractError
from graphglue.preps import top_up

from ...gallery.rounds import failures
from . import pages

pytestmark = pytest.mark.usefixtures("frozen_imports")


def two_requests(num_free: int = 3) -> pages.Lists:
    """Lay out pages of 4: request 1 owns page 5 and half of page 2, request 2 owns page 7, full."""
    return {
        "req_to_token": [[0] * 10, [20, 21, 22, 23, 8, 9, 10, 11, 0, 0], [28, 29, 30, 31, 0, 0, 0, 0, 0, 0]],
        "num_pages": [0, 2, 1],
        "free_pages": [9, 3, 6, 1],
        "num_free": [num_free],
    }


def take(lists: pages.Lists, mode: gg.Mode, width: int, seq_lens: list[int], requests: list[int]) -> pages.Lists:
    """Run one eager step with pages of 4, and bring the lists up to what the tables hold."""
    tables = pages.tensors(lists)
    found = pages.step_eager(top_up.make(4), tables, mode, width, seq_lens, requests)
    lists.update(pages.held(tables))
    return found


def test_a_request_that_crosses_a_boundary_takes_the_top_page() -> None:
    lists = two_requests()
    found = take(lists, gg.Mode.DECODE, 1, [7, 5, 1, 1], [1, 2, 0, 0])
    assert found == {"out_cache_loc": [10, 24, 0, 0], "num_unplaced": [0, 0, 0, 0], "num_missing_pages": [0]}
    assert lists["num_free"] == [2]
    assert lists["num_pages"] == [0, 2, 2]
    assert lists["req_to_token"][2][:8] == [28, 29, 30, 31, 24, 25, 26, 27]
    assert lists["req_to_token"][:2] == two_requests()["req_to_token"][:2]


def test_a_request_with_pages_enough_takes_none() -> None:
    lists = two_requests()
    take(lists, gg.Mode.VERIFY, 3, [5, 1], [1, 2])
    assert lists == two_requests()


def test_a_wide_block_takes_several_and_keeps_inside_its_row() -> None:
    lists = two_requests()
    found = take(lists, gg.Mode.VERIFY, 6, [4, 4], [1, 2])
    assert found["out_cache_loc"] == [8, 9, 10, 11, 24, 25, 12, 13, 14, 15, 36, 37]
    assert lists["num_free"] == [0]
    assert lists["req_to_token"][1] == [20, 21, 22, 23, 8, 9, 10, 11, 24, 25]  # a row of 10 holds half of page 6


@pytest.mark.parametrize("num_free", [0, 1])
def test_a_short_stack_serves_the_first_requests_and_says_who_lacks(num_free: int) -> None:
    lists = two_requests(num_free)
    found = take(lists, gg.Mode.VERIFY, 2, [7, 4], [1, 2])
    assert found["out_cache_loc"] == [11, 36 if num_free else 0, 0, 0]
    assert found["num_unplaced"] == [1 - num_free, 2]
    assert found["num_missing_pages"] == [2 - num_free]
    assert lists["num_free"] == [0]
    assert lists["req_to_token"][2] == two_requests()["req_to_token"][2]
    lists.update(free_pages=[3, 6, 9, 1], num_free=[2])  # the engine frees two, and asks again
    again = take(lists, gg.Mode.VERIFY, 2, [7, 4], [1, 2])
    assert again["num_unplaced"] == [0, 0]
    assert lists["num_free"] == [num_free]
    assert lists["num_pages"] == [0, 3, 2]


def test_a_token_past_the_row_is_counted_and_never_written() -> None:
    lists = two_requests()
    found = take(lists, gg.Mode.VERIFY, 4, [8], [1])
    assert found == {"out_cache_loc": [24, 25, 0, 0], "num_unplaced": [2], "num_missing_pages": [0]}
    assert lists["num_pages"] == [0, 3, 1]


@pytest.mark.parametrize("num_free", [-3, 99])
def test_a_count_that_is_no_count_gives_no_page_from_elsewhere(num_free: int) -> None:
    lists = two_requests(num_free)
    found = take(lists, gg.Mode.DECODE, 1, [5], [2])
    assert found["out_cache_loc"] == ([0] if num_free < 0 else [4])
    assert lists["num_free"] == [num_free if num_free < 0 else num_free - 1]


def test_warm_up_and_audit_leave_the_live_tables_as_they_were() -> None:
    lists = pages.state(num_requests=5, max_context=12, page_size=4, num_pages=9)
    tables = pages.tensors(lists)
    with pages.runner(tables, 4, 3, config=gg.RunnerConfig(modes={gg.Mode.VERIFY})) as runner:
        runner.capture(progress=False)
        assert pages.held(tables) == lists
        certificate = audit(runner, perturb=lambda: None)
    assert failures(certificate) == {}
    assert pages.held(tables) == lists
    assert {check.verdict.value for check in certificate.checks if check.name != "pointers"} == {"pass"}


@pytest.mark.parametrize("glue", ["on", "off"])
def test_no_step_is_repeated_or_shadowed(glue: str) -> None:
    lists = pages.state(num_requests=5, max_context=12, page_size=2, num_pages=30)
    tables = pages.tensors(lists)
    config = gg.RunnerConfig(shadow=gg.Shadow(first=8, every=1), glue={top_up.NAME: glue})
    with pages.runner(tables, 2, 2, config=config) as runner:
        if glue == "on":
            runner.capture(progress=False)
        for prefix in range(0, 10, 2):
            step = runner.prepare(pages.batch(gg.Mode.VERIFY, [prefix] * 3, [1, 2, 5]))
            assert step.decision.prep is (gg.Route.GLUE if glue == "on" else gg.Route.EAGER)
            pages.step_reference(lists, gg.Mode.VERIFY, 2, 2, [prefix] * 3, [1, 2, 5])
            assert pages.held(tables) == lists
        runner.prepare(gg.Batch.idle(gg.Mode.VERIFY))
        assert pages.held(tables) == lists
    assert lists["num_free"] == [15]


def test_pads_are_placed_in_the_sink_whatever_it_owns() -> None:
    lists = two_requests()
    lists["num_pages"][0] = 2
    lists["req_to_token"][0] = [0, 1, 2, 3] * 2 + [0, 1]
    before = [*lists["req_to_token"][0]]
    found = take(lists, gg.Mode.VERIFY, 3, [5, 1], [1, 0])
    assert found["out_cache_loc"] == [9, 10, 11, 0, 0, 0]
    assert take(lists, gg.Mode.DECODE, 3, [8, 1], [1, 0])["out_cache_loc"] == [9, 10, 11, 0, 0, 0]
    assert lists["req_to_token"][0] == before
    assert lists["num_pages"] == [2, 2, 1]


def test_one_step_takes_as_many_pages_as_its_block_can_cross() -> None:
    lists = two_requests()
    lists["num_pages"][2] = 0
    found = take(lists, gg.Mode.VERIFY, 2, [8], [2])
    assert found == {"out_cache_loc": [0, 0], "num_unplaced": [2], "num_missing_pages": [2]}
    assert lists["num_pages"] == [0, 2, 1]


def test_dtypes() -> None:
    tables = pages.tensors(two_requests(), dtype=torch.int32)
    slots = {"seq_lens": torch.tensor([5]), "req_pool_indices": torch.tensor([2])}
    metadata = top_up.make(4)(View(slots, tables, gg.Bucket(1, 1, 1), gg.Mode.DECODE))
    dtypes = {"out_cache_loc": torch.int64, "num_unplaced": torch.int32, "num_missing_pages": torch.int64}
    assert {name: tensor.dtype for name, tensor in metadata.items()} == dtypes
    assert {tensor.dtype for tensor in tables.values()} == {torch.int32}


def test_the_effects_are_all_that_it_changes() -> None:
    tables = pages.tensors(two_requests())
    before = {name: tensor.clone() for name, tensor in tables.items()}
    pages.step_eager(top_up.make(4), tables, gg.Mode.DECODE, 1, [5], [2])
    changed = {name for name, tensor in tables.items() if not torch.equal(tensor, before[name])}
    assert changed == set(top_up.CONTRACT.effects)


def test_refuses_requests_that_differ_in_width_and_pages_of_nothing() -> None:
    view = View({}, {}, gg.Bucket(2, 6, 0), gg.Mode.VERIFY)
    with pytest.raises(ContractError, match="kv-page-top-up takes requests of one width"):
        top_up.make(4)(view)
    with pytest.raises(ContractError, match="page_size is 0, expected at least 1"):
        top_up.make(0)
