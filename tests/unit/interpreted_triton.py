"""The kernels of examples/triton_decode.py, interpreted on the CPU: against attention in one piece, and without a tape.

Triton decides when it is first imported whether it interprets, so test_triton_decode.py runs these in a process of
their own, with TRITON_INTERPRET=1.
"""

from __future__ import annotations

import logging
import random
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import graphglue as gg

sys.path.insert(0, str(Path(__file__).parents[2] / "examples"))
import triton_decode as backend
from triton_decode import CONTEXT, DIM, GROUP, HEADS, NUM_PAGES, PAGE, SPLIT

LENGTHS = [1, PAGE, SPLIT + 1, CONTEXT, PAGE + 3]


def drawn(lengths: list[int], dtype: torch.dtype = torch.float64) -> tuple[gg.Batch, dict[str, torch.Tensor]]:
    """Draw a step, over a cache that is NaN wherever the step has no position."""
    batch = backend.draw_batch(len(lengths), dtype, "cpu", random.Random(3))
    batch = gg.Batch(len(lengths), {**batch.sources, "seq_lens": lengths})
    tables = backend.make_tables(dtype, "cpu")
    kept = [tables["req_to_token"][row, :length] for row, length in zip(batch.sources["req_pool_indices"], lengths)]
    legal = torch.cat([*kept, torch.zeros(1, dtype=torch.int64)])
    for name in ("k_cache", "v_cache"):
        full = torch.full_like(tables[name], torch.nan)
        full[legal] = tables[name][legal]
        tables[name] = full
    return batch, tables


def view_of(batch: gg.Batch, tables: dict[str, torch.Tensor], num_rows: int, **changes: Any) -> Any:
    """Show a step at a bucket, padded as the slots say."""
    sources, spare = {**batch.sources, **changes}, num_rows - batch.num_requests
    queries = torch.cat([sources["queries"], sources["queries"].new_zeros(spare, HEADS, DIM)])
    return SimpleNamespace(
        seq_lens=torch.tensor([*sources["seq_lens"], *[1] * spare]),
        req_pool_indices=torch.tensor([*sources["req_pool_indices"], *[0] * spare]),
        queries=queries, tables=SimpleNamespace(**tables), bucket=gg.Bucket(num_rows, num_rows, 1),
    )  # fmt: skip


def run(view: Any) -> torch.Tensor:
    return backend.forward(view, backend.prep(view))


@pytest.mark.parametrize(("dtype", "error"), [(torch.float64, 1e-12), (torch.float32, 1e-5)])
def test_attention_is_that_in_one_piece_and_reads_nothing_else(dtype: torch.dtype, error: float) -> None:
    batch, tables = drawn(LENGTHS, dtype)
    out = run(view_of(batch, tables, 6))
    expected = backend.reference(batch, tables)
    torch.testing.assert_close(out[: len(LENGTHS)].to(torch.float64), expected, rtol=error, atol=error)
    sink = tables["v_cache"][0].repeat_interleave(GROUP, 0)
    assert all(torch.equal(row, sink) for row in out[len(LENGTHS) :]), "a pad row sees position 0 of row 0, alone"


def test_a_row_has_the_same_bits_in_every_bucket() -> None:
    batch, tables = drawn([SPLIT + 1, 2 * PAGE])
    padded, exact = run(view_of(batch, tables, 4)), run(view_of(batch, tables, 2))
    assert torch.equal(padded[:2], exact)
    alone = gg.Batch(1, {name: values[1:] for name, values in batch.sources.items()})
    assert torch.equal(run(view_of(alone, tables, 1)), exact[1:])


@pytest.mark.parametrize("change", ["longer", "another row"])
def test_a_wrong_length_or_row_is_found(change: str) -> None:
    batch, tables = drawn([SPLIT + 1])
    other = {"seq_lens": [SPLIT + 2]} if change == "longer" else {"req_pool_indices": [0]}
    assert not torch.allclose(run(view_of(batch, tables, 1, **other)), backend.reference(batch, tables))


def test_the_page_table_has_the_pages_of_a_row_and_the_sink_behind_them() -> None:
    batch, tables = drawn(LENGTHS)
    made = backend.prep(view_of(batch, tables, 6))
    assert made["page_table"].dtype == made["lengths"].dtype == torch.int64
    for row, length, pages in zip(batch.sources["req_pool_indices"], LENGTHS, made["page_table"].tolist()):
        first = tables["req_to_token"][row].tolist()[::PAGE]
        real = -(-length // PAGE)
        assert pages == [*[one // PAGE for one in first[:real]], *[0] * (NUM_PAGES - real)]
    assert made["page_table"][len(LENGTHS) :].tolist() == [[0] * NUM_PAGES]
    assert made["lengths"].tolist() == [*LENGTHS, 1]


def test_the_tape_refuses_the_kernels_by_name_and_the_steps_are_served(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.CRITICAL, "graphglue")
    batch, tables = drawn([PAGE + 1])
    with backend.make_runner(torch.float64, "cpu", tables) as runner:
        with pytest.raises(gg.CaptureError, match="data_ptr hands out an address, and a kernel launched by address"):
            runner.capture([1], progress=False)
        step = runner.replay(batch)
        assert step.decision.reason is gg.Reason.QUARANTINED
        torch.testing.assert_close(step.outputs, backend.reference(batch, tables), rtol=1e-12, atol=1e-12)
