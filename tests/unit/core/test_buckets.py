"""Ladders: one list, put in order once; what it refuses, rounds and covers."""

from __future__ import annotations

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
        (iter([3, 1, 3]), (1, 3)),
        (Ladder([5, 2]), (2, 5)),
        ({7, 3}, (3, 7)),
    ],
)
def test_bucket_list_is_normalised_once(given: Any, sizes: tuple[int, ...]) -> None:
    ladder = Ladder(given)
    assert ladder.sizes == tuple(ladder) == sizes
    assert all(type(size) is int for size in ladder)
    assert (ladder.smallest, ladder.largest, len(ladder)) == (sizes[0], sizes[-1], len(sizes))


@pytest.mark.parametrize(
    ("given", "seen"),
    [
        ([], r"ladder \[\]: expected at least one size"),
        ([0, 1], "ladder size 0: expected a positive integer; an IDLE step needs no size"),
        ([4, -2], "ladder size -2: expected a positive integer"),
        ([1, 2.5], r"ladder size 2.5 \(float\): expected a positive integer; convert it first"),
        ([2.0], r"ladder size 2.0 \(float\)"),
        (["4"], r"ladder size '4' \(str\)"),
        ([None], r"ladder size None \(NoneType\)"),
        ([True, 2], r"ladder size True \(bool\)"),
        ("124", r"ladder '124': expected a list of positive integers, such as \[1, 2, 4, 8\]"),
        (8, "ladder 8: expected a list of positive integers"),
        (None, "ladder None: expected a list"),
    ],
)
def test_bucket_list_with_a_fault_is_refused(given: Any, seen: str) -> None:
    with pytest.raises(ConfigError, match=seen):
        Ladder(given)


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


def test_a_ladder_is_a_value() -> None:
    one, other = Ladder([1, 2]), Ladder([2, 1, 1])
    assert one == other
    assert hash(one) == hash(other)
    assert one != Ladder([1, 2, 4])
    assert one != (1, 2)
    assert 2 in one
    assert 3 not in one
    assert repr(one) == "Ladder([1, 2])"


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
