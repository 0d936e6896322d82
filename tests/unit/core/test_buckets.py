"""Ladders: one list, put in order once; what it refuses, rounds and covers."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Sequence
from itertools import combinations
from typing import Any

import numpy as np
import pytest

from graphglue import Bucket, ConfigError, Ladder


@pytest.mark.parametrize(
    ("given", "sizes"),
    [
        ([4, 1, 2], (1, 2, 4)),
        ([8, 8, 8], (8,)),
        ((1,), (1,)),
        (range(1, 4), (1, 2, 3)),
        (np.array([16, 2], dtype=np.int32), (2, 16)),
        (Ladder([5, 2]), (2, 5)),
        ({7, 3}, (3, 7)),
    ],
)
def test_bucket_list_is_normalised_once(given: Any, sizes: tuple[int, ...]) -> None:
    assert Ladder(iter(given)).sizes == sizes
    ladder = Ladder(given)
    assert ladder.sizes == tuple(ladder) == sizes
    assert all(type(size) is int for size in ladder)
    assert (ladder.smallest, ladder.largest, len(ladder)) == (sizes[0], sizes[-1], len(sizes))


@pytest.mark.parametrize(
    ("given", "seen"),
    [
        ([], "ladder []: expected at least one size; give the batch sizes to capture"),
        ([0, 1], "ladder size 0: expected a positive integer; an IDLE step needs no size of its own"),
        ([4, -2], "ladder size -2: expected a positive integer; an IDLE step needs no size of its own"),
        ([1, 2.5], "ladder size 2.5 (float): expected a positive integer; convert it first"),
        ([2.0], "ladder size 2.0 (float): expected a positive integer; convert it first"),
        (["4"], "ladder size '4' (str): expected a positive integer; convert it first"),
        ([None], "ladder size None (NoneType): expected a positive integer; convert it first"),
        ([True, 2], "ladder size True (bool): expected a positive integer; convert it first"),
        ([1, 2**31], "ladder size 2147483648: expected at most 2147483647"),
        ("124", "ladder '124': expected a list of positive integers, such as [1, 2, 4, 8]"),
        (b"124", "ladder b'124': expected a list of positive integers, such as [1, 2, 4, 8]"),
        (8, "ladder 8: expected a list of positive integers, such as [1, 2, 4, 8]"),
        (None, "ladder None: expected a list of positive integers, such as [1, 2, 4, 8]"),
    ],
)
def test_bucket_list_with_a_fault_is_refused(given: Any, seen: str) -> None:
    with pytest.raises(ConfigError) as caught:
        Ladder(given)
    assert str(caught.value) == seen


@pytest.mark.parametrize(
    ("count", "size"), [(0, 2), (1, 2), (2, 2), (3, 5), (5, 5), (6, 16), (16, 16), (17, None), (10**9, None)]
)
def test_the_smallest_size_that_covers(count: int, size: int | None) -> None:
    assert Ladder([16, 2, 5]).cover(count) == size


@pytest.mark.parametrize(
    ("sizes", "multiple", "rounded"),
    [
        ([4, 5, 8], 4, (4, 8)),
        ([1, 2, 3], 1, (1, 2, 3)),
        ([1, 2, 4], 8, (8,)),
        ([42], 7, (42,)),
        ([16], 3, (18,)),
    ],
)
def test_bucket_list_is_rounded_up_to_a_multiple(sizes: list[int], multiple: int, rounded: tuple[int, ...]) -> None:
    once = Ladder(sizes).aligned(multiple)
    assert once.sizes == rounded
    assert once.aligned(multiple) == once


@pytest.mark.parametrize("multiple", [0, -4, 2.0, True])
def test_an_alignment_that_is_no_positive_integer_is_refused(multiple: Any) -> None:
    with pytest.raises(ConfigError, match="expected a positive integer"):
        Ladder([4]).aligned(multiple)


@pytest.mark.parametrize(("max_tokens", "multiple"), [(1, 3), (7, 2), (20, 2), (25, 3), (64, 8)])
@pytest.mark.parametrize("waste", [0, 0.25, 1, 1.5])
def test_a_bounded_ladder_of_multiples_keeps_the_bound_with_the_fewest_sizes(
    max_tokens: int, multiple: int, waste: float
) -> None:
    """Sizes are multiples, so counts are rounded up to them: those are what the bound holds for."""
    counts = range(multiple, max_tokens + multiple, multiple)

    def keeps_the_bound(sizes: Sequence[int]) -> bool:
        return all(min(size for size in sizes if size >= count) <= (1 + waste) * count for count in counts)

    ladder = Ladder.bounded(max_tokens, waste, multiple)
    assert set(ladder) <= set(counts)
    assert ladder.largest == counts[-1]
    assert keeps_the_bound(ladder.sizes)
    fewer = combinations(counts[:-1], max(0, len(ladder) - 2))
    assert len(ladder) == 1 or not any(keeps_the_bound((*sizes, counts[-1])) for sizes in fewer)


def test_a_ladder_is_a_value() -> None:
    one, other = Ladder([1, 2]), Ladder([2, 1, 1])
    assert one == other
    assert hash(one) == hash(other)
    assert len({hash(Ladder([1, size])) for size in range(2, 102)}) > 90  # unequal ones are found apart
    assert one != Ladder([1, 2, 4])
    assert one != (1, 2)
    assert 2 in one
    assert 3 not in one
    assert repr(one) == "Ladder([1, 2])"


def test_what_a_ladder_is_built_with_unless_said_otherwise() -> None:
    """Any size, an eighth of waste, and sizes that cost nothing but the rows they pad."""
    assert Ladder.bounded(17) == Ladder.bounded(17, 1 / 8, 1) == Ladder([1, 2, 3, 4, 5, 6, 7, 9, 11, 13, 15, 17])
    assert Ladder.from_histogram({1: 1, 2: 1}, 2) == Ladder([1, 2])  # a size that saves one row stands


def test_a_ladder_survives_being_copied_and_pickled() -> None:
    ladder = Ladder([1, 2, 8])
    assert pickle.loads(pickle.dumps(ladder)) == copy.deepcopy(ladder) == ladder


def test_a_ladder_does_not_change() -> None:
    ladder = Ladder([1, 2])
    with pytest.raises(AttributeError, match="a Ladder does not change; build another one to set 'sizes'"):
        ladder.sizes = (1, 2, 4)
    assert ladder.sizes == (1, 2)


def test_a_ladder_keeps_no_tie_to_the_list_it_came_from() -> None:
    given = [1, 2]
    ladder = Ladder(given)
    given.append(4)
    assert ladder.sizes == (1, 2)


def test_a_bucket_spells_its_extents() -> None:
    bucket = Bucket(requests=16, tokens=64, row_tokens=4)
    assert bucket == (16, 64, 4)
    assert repr(bucket) == "Bucket(requests=16, tokens=64, row_tokens=4)"
