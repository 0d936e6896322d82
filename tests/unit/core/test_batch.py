"""Batches: what their real extents are, and counts that contradict each other."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from graphglue import Batch, BindError, Mode
from graphglue.core.batch import extents_of


@pytest.mark.parametrize(
    ("batch", "width", "extents"),
    [
        (Batch(3), 1, (3, 3, 1)),
        (Batch(3), 4, (3, 12, 4)),
        (Batch(3, num_tokens=6), 4, (3, 6, 2)),
        (Batch(3, num_tokens=3), 4, (3, 3, 1)),
        (Batch(np.int32(3), num_tokens=np.int64(6)), 1, (3, 6, 2)),
        (Batch(3, row_tokens=[4, 4, 2]), 4, (3, 10, 0)),
        (Batch(3, row_tokens=[4, 4, 2], num_tokens=10), 4, (3, 10, 0)),
        (Batch(3, row_tokens=[2, 2, 2]), 4, (3, 6, 2)),
        (Batch(2, row_tokens=np.array([1, 3])), 4, (2, 4, 0)),
        (Batch(1, row_tokens=[7]), 4, (1, 7, 7)),
        (Batch(2, num_tokens=9, mode=Mode.EXTEND), 1, (2, 9, 0)),
        (Batch(2, row_tokens=[4, 5], mode=Mode.EXTEND), 1, (2, 9, 0)),
        (Batch(2, row_tokens=[4, 4], mode=Mode.MIXED), 1, (2, 8, 0)),
        (Batch.idle(), 4, (0, 0, 0)),
        (Batch.idle(mode=Mode.EXTEND), 1, (0, 0, 0)),
        (Batch(0), 4, (0, 0, 0)),
        (Batch(0, num_tokens=0, row_tokens=[]), 4, (0, 0, 0)),
    ],
)
def test_real_extents(batch: Batch, width: int, extents: tuple[int, int, int]) -> None:
    assert extents_of(batch, width) == extents


def test_ragged_rows_are_uniform_only_if_all_are_equal() -> None:
    ragged, uniform = Batch(3, row_tokens=[4, 4, 2]), Batch(3, row_tokens=[4, 4, 4])
    assert [extents_of(b, 4).row_tokens for b in (ragged, uniform, ragged, uniform)] == [0, 4, 0, 4]


@pytest.mark.parametrize(
    ("batch", "said"),
    [
        (Batch(2.0), r"num_requests=2.0 \(float\): expected an integer"),  # type: ignore[arg-type]
        (Batch(True), r"num_requests=True \(bool\): expected an integer"),
        (Batch(None), r"num_requests=None \(NoneType\)"),  # type: ignore[arg-type]
        (Batch(-1), "num_requests=-1: expected 0 or more"),
        (Batch(2, num_tokens=-2), "num_tokens=-2: expected 0 or more"),
        (Batch(2, num_tokens="4"), r"num_tokens='4' \(str\)"),  # type: ignore[arg-type]
        (Batch(3, num_tokens=7), "num_tokens=7 does not divide among num_requests=3; pass row_tokens"),
        (Batch(3, num_tokens=0), "num_tokens=0 does not divide among num_requests=3"),
        (Batch(2, row_tokens=[1]), r"row_tokens \[1\] has 1 entries: expected one positive count for each"),
        (Batch(2, row_tokens=[1, 2, 3]), r"row_tokens \[1, 2, 3\] has 3 entries"),
        (Batch(2, row_tokens=[2, 0]), "expected one positive count for each of num_requests=2"),
        (Batch(2, row_tokens=[2, 1.5]), r"row_tokens=1.5 \(float\)"),  # type: ignore[list-item]
        (Batch(2, row_tokens=[2, 1], num_tokens=4), "num_tokens=4, but row_tokens sums to 3; leave num_tokens out"),
        (Batch(2, mode=Mode.EXTEND), "mode extend has no num_tokens; pass num_tokens or row_tokens"),
        (Batch(3, mode=Mode.EXTEND, num_tokens=2), "every request has at least one token"),
        (Batch(2, mode="decode"), r"mode='decode': expected a graphglue.Mode, such as Mode.DECODE"),  # type: ignore[arg-type]
        (Batch(0, {"x": []}), "num_requests=0 with 1 sources.*use Batch.idle"),
        (Batch(0, num_tokens=3), "num_requests=0 with 0 sources and num_tokens=3.*IDLE and carries nothing"),
        (Batch(0, row_tokens=[1]), "num_requests=0.*IDLE"),
    ],
)
def test_counts_that_contradict_are_refused(batch: Batch, said: str) -> None:
    with pytest.raises(BindError, match=said):
        extents_of(batch, 1)


def test_an_idle_batch_keeps_its_mode_and_variant() -> None:
    batch = Batch.idle(mode=Mode.VERIFY, variant="lora")
    assert (batch.num_requests, batch.mode, batch.variant) == (0, Mode.VERIFY, "lora")
    assert not batch.sources
    assert not batch.features


def test_batches_do_not_share_their_default_sources() -> None:
    one: Any = Batch(1)
    one.sources["x"] = 1
    assert Batch(1).sources == {}


@pytest.mark.parametrize("mode", list(Mode))
def test_ladder_sizes_are_tokens_in_extend_and_mixed_only(mode: Mode) -> None:
    assert mode.counts_tokens is (mode in {Mode.EXTEND, Mode.MIXED})
