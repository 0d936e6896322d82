"""Paged decode attention by Triton kernels, as a backend. Run: python triton_decode.py, or with --device cuda

    pip install -e '.[triton]'

Prep and forward launch kernels that torch's dispatcher never sees. A CUDA graph records them like any other; the tape
can not, refuses them by name, and the runner serves the same steps eagerly (on the CPU, Triton interprets its kernels).
What they read is declared all the same, and checked on the captured graph itself: the checks "pointers" and
"double_capture" of the audit.

Each row has the same bits in every bucket and on every route, because

- nothing of the batch is an argument: kernels get addresses, and numbers that were fixed when the backend was built.
  Triton compiles another kernel for an integer that is 1 or a multiple of 16, so a row count would change the code, and
  autotuning would choose by shape or by clock;
- a row is summed in an order that its own length fixes: splits begin at fixed positions, a split goes page by page, and
  the splits are merged in order; no atomics;
- addresses are multiples of 16 (slots, torch's own memory), for which one kernel is compiled, in the warm-ups.

Metadata holds pages in 64 bits, and so do all offsets into the cache. A pad row is one position of row 0, which the
engine gives to no request; entries of the page table behind a row's length are page 0, so no stale one is read.
"""

import argparse
import logging
import os
import random

import torch

import graphglue as gg

if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")  # read when a kernel is declared

import triton
import triton.language as tl

PAGE, CONTEXT, NUM_SPLITS = 16, 128, 4
KV_HEADS, GROUP, DIM = 2, 2, 16  # GROUP query heads share a key/value head; DIM is a power of 2
HEADS, NUM_PAGES, SPLIT = KV_HEADS * GROUP, CONTEXT // PAGE, CONTEXT // NUM_SPLITS
NUM_ROWS = 12  # of req_to_token; row 0 is the pad rows'
LADDER = (1, 2, 4, 8)


# The kernels. Legend: N rows of the bucket, H query heads, K key/value heads, S splits, D head dimension.


@triton.jit
def look_up_pages(
    seq_lens, rows, req_to_token, page_table, lengths,
    CONTEXT: tl.constexpr, PAGE: tl.constexpr, NUM_PAGES: tl.constexpr,
):  # fmt: skip
    """Write row n of page_table [N, CONTEXT / PAGE] int64 and lengths [N] int64. Grid: N."""
    row = tl.program_id(0).to(tl.int64)
    length, column = tl.load(seq_lens + row), tl.arange(0, NUM_PAGES)
    first = tl.load(req_to_token + tl.load(rows + row) * CONTEXT + column * PAGE)
    tl.store(page_table + row * NUM_PAGES + column, tl.where(column * PAGE < length, first // PAGE, 0))
    tl.store(lengths + row, length)


@triton.jit
def attend_split(
    queries, keys, values, page_table, lengths, mixed, peaks, sums,
    GROUP: tl.constexpr, NUM_PAGES: tl.constexpr, PAGE: tl.constexpr, SPLIT: tl.constexpr, DIM: tl.constexpr,
    SCALE: tl.constexpr, REAL: tl.constexpr,
):  # fmt: skip
    """Attend to one split of a row's positions, page by page. Grid: N, H, S."""
    row, head, split = tl.program_id(0).to(tl.int64), tl.program_id(1), tl.program_id(2)
    num_heads, num_splits = tl.num_programs(1), tl.num_programs(2)
    length, own, dim = tl.load(lengths + row), tl.arange(0, PAGE), tl.arange(0, DIM)
    query = tl.load(queries + (row * num_heads + head) * DIM + dim).to(REAL) * SCALE
    peak, total, mix = tl.full([1], float("-inf"), REAL), tl.zeros([1], REAL), tl.zeros([DIM], REAL)
    begin, end = split * SPLIT, tl.minimum(split * SPLIT + SPLIT, length)
    while begin < end:
        location = tl.load(page_table + row * NUM_PAGES + begin // PAGE) * PAGE + own
        offset = (location * (num_heads // GROUP) + head // GROUP)[:, None] * DIM + dim[None, :]
        inside = begin + own < length
        key = tl.load(keys + offset, mask=inside[:, None], other=0).to(REAL)
        score = tl.where(inside, tl.sum(query[None, :] * key, 1), float("-inf"))
        highest = tl.maximum(peak, tl.max(score, 0))  # finite: a page that is reached has a position inside
        weight, fade = tl.exp(score - highest), tl.exp(peak - highest)
        value = tl.load(values + offset, mask=inside[:, None], other=0).to(REAL)
        mix, total = mix * fade + tl.sum(weight[:, None] * value, 0), total * fade + tl.sum(weight, 0)
        peak, begin = highest, begin + PAGE
    place, one = (row * num_heads + head) * num_splits + split, tl.arange(0, 1)
    tl.store(mixed + place * DIM + dim, mix)
    tl.store(peaks + place + one, peak)
    tl.store(sums + place + one, total)


@triton.jit
def merge_splits(mixed, peaks, sums, out, NUM_SPLITS: tl.constexpr, DIM: tl.constexpr):
    """Merge the splits of a row's head, those without a position with weight 0. Grid: N, H."""
    place = tl.program_id(0).to(tl.int64) * tl.num_programs(1) + tl.program_id(1)
    split, dim = place * NUM_SPLITS + tl.arange(0, NUM_SPLITS), tl.arange(0, DIM)
    peak = tl.load(peaks + split)
    weight = tl.exp(peak - tl.max(peak, 0))
    total = tl.sum(weight * tl.load(sums + split), 0)
    mix = tl.sum(weight[:, None] * tl.load(mixed + split[:, None] * DIM + dim[None, :]), 0)
    tl.store(out + place * DIM + dim, (mix / total).to(out.dtype.element_ty))


# The backend.

CONTRACT = gg.PrepContract(
    name="triton-decode",
    reads={"seq_lens": 1, "req_pool_indices": 0},
    tables=("req_to_token",),
    outputs={"page_table": "request", "lengths": "request"},
    modes={gg.Mode.DECODE},
)


def slots(dtype):
    """List the slots: what the prep reads, and the forward's queries."""
    return [
        gg.Slot("seq_lens", "request", torch.int64, pad=1, valid=(1, CONTEXT)),
        gg.Slot("req_pool_indices", "request", torch.int64, pad=0, index_of="req_to_token"),
        gg.Slot("queries", "token", dtype, pad=0.0, inner=(HEADS, DIM)),
    ]


def prep(view):
    """Look up the pages of each row. Tables: req_to_token [rows, CONTEXT] int64. Sync: none. Capturable: yes."""
    num_rows, like = view.bucket.requests, view.seq_lens
    made = {"page_table": like.new_empty(num_rows, NUM_PAGES), "lengths": like.new_empty(num_rows)}
    look_up_pages[(num_rows,)](
        view.seq_lens, view.req_pool_indices, view.tables.req_to_token, made["page_table"], made["lengths"],
        CONTEXT=CONTEXT, PAGE=PAGE, NUM_PAGES=NUM_PAGES,
    )  # fmt: skip
    return made


def forward(view, metadata):
    """Attend. Tables: k_cache, v_cache [locations, K, D]. Returns [tokens, H, D]. Sync: none. Capturable: yes."""
    queries, num_rows = view.queries, view.bucket.requests
    real = torch.float64 if queries.dtype == torch.float64 else torch.float32
    mixed = torch.empty(num_rows, HEADS, NUM_SPLITS, DIM, dtype=real, device=queries.device)
    peaks, sums = (mixed.new_empty(num_rows, HEADS, NUM_SPLITS) for _ in range(2))
    out = torch.empty_like(queries)
    attend_split[(num_rows, HEADS, NUM_SPLITS)](
        queries, view.tables.k_cache, view.tables.v_cache, metadata["page_table"], metadata["lengths"],
        mixed, peaks, sums, GROUP=GROUP, NUM_PAGES=NUM_PAGES, PAGE=PAGE, SPLIT=SPLIT, DIM=DIM, SCALE=DIM**-0.5,
        REAL=tl.float64 if real == torch.float64 else tl.float32,
    )  # fmt: skip
    merge_splits[(num_rows, HEADS)](mixed, peaks, sums, out, NUM_SPLITS=NUM_SPLITS, DIM=DIM)
    return out


# The engine's side, and what everything is compared with.


def make_tables(dtype, device, seed=0):
    """Scatter the pages of each row over the cache; page 0 stays the pad rows', and is all NaN behind position 0."""
    generator = torch.Generator().manual_seed(seed)
    pages = torch.randperm((NUM_ROWS - 1) * NUM_PAGES, generator=generator).view(-1, NUM_PAGES) + 1
    locations = (pages[:, :, None] * PAGE + torch.arange(PAGE)).view(-1, CONTEXT)
    sink = torch.arange(CONTEXT)[None] % PAGE
    size = (NUM_PAGES * NUM_ROWS * PAGE, KV_HEADS, DIM)
    keys, values = (torch.randn(size, generator=generator, dtype=torch.float64).to(dtype) for _ in range(2))
    keys[1:PAGE] = values[1:PAGE] = torch.nan
    made = {"req_to_token": torch.cat([sink, locations]), "k_cache": keys, "v_cache": values}
    return {name: table.to(device) for name, table in made.items()}


def make_runner(dtype, device, tables, config=None):
    """Build a runner of the backend."""
    registry = gg.Registry()
    registry.register(CONTRACT)(prep)
    return gg.Runner(
        slots=slots(dtype), ladder=LADDER, registry=registry, prep=CONTRACT.name, tables=tables, forward=forward,
        device=device, config=config,
    )  # fmt: skip


def draw_batch(num_requests, dtype, device, rng):
    """Draw a step: lengths at the edges of pages and splits among them."""
    edges = (1, PAGE, PAGE + 1, SPLIT, SPLIT + 1, CONTEXT)
    lengths = [rng.choice((*edges, rng.randint(1, CONTEXT))) for _ in range(num_requests)]
    rows = rng.sample(range(1, NUM_ROWS), num_requests)
    generator = torch.Generator().manual_seed(rng.randrange(1 << 30))
    queries = torch.randn(num_requests, HEADS, DIM, generator=generator, dtype=torch.float64).to(device, dtype)
    return gg.Batch(num_requests, {"seq_lens": lengths, "req_pool_indices": rows, "queries": queries})


def reference(batch, tables):
    """Attend to each request's positions in one piece, request by request, in float64."""
    sources, rows = batch.sources, []
    for query, length, row in zip(sources["queries"], sources["seq_lens"], sources["req_pool_indices"], strict=True):
        seen = tables["req_to_token"][row, :length]
        keys, values = (tables[name][seen].to(torch.float64) for name in ("k_cache", "v_cache"))
        scores = torch.einsum("kgd,ckd->kgc", query.to(torch.float64).view(KV_HEADS, GROUP, DIM), keys) * DIM**-0.5
        rows.append(torch.einsum("kgc,ckd->kgd", scores.softmax(-1), values).view(HEADS, DIM))
    return torch.stack(rows)


def alone(runner, batch, number):
    """Run one request of a step by itself."""
    own = {name: values[number : number + 1] for name, values in batch.sources.items()}
    return runner.replay(gg.Batch(1, own)).outputs


def serve(runner, tables, dtype, num_steps):
    """Run drawn steps of all sizes in turn; compare each with the reference, and its rows with themselves alone."""
    rng, device, error = random.Random(0), tables["k_cache"].device, 1e-12 if dtype == torch.float64 else 1e-2
    for number in range(num_steps):
        batch = draw_batch(1 + number * 3 % LADDER[-1], dtype, device, rng)
        step = runner.replay(batch)
        outputs = step.outputs.clone()
        torch.testing.assert_close(outputs.to(torch.float64), reference(batch, tables), rtol=error, atol=error)
        assert (step.decision.prep is gg.Route.GLUE) == (step.decision.forward is gg.Route.GRAPH) == outputs.is_cuda
        for row in range(batch.num_requests):
            assert torch.equal(outputs[row : row + 1], alone(runner, batch, row))


def main():
    """Serve on a GPU with graphs; on the CPU let the tape refuse, and serve without."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    device = parser.parse_args().device
    dtype, num_steps = (torch.float64, 3) if device == "cpu" else (torch.bfloat16, 40)
    tables = make_tables(dtype, device)
    with make_runner(dtype, device, tables) as runner:
        if device == "cpu":
            logging.getLogger("graphglue").setLevel(logging.CRITICAL)  # the refusal is wanted
            try:
                runner.capture([1], progress=False)
            except gg.CaptureError as refusal:
                print(refusal)
        else:
            runner.capture(progress=False)
        serve(runner, tables, dtype, num_steps)
        stats = runner.stats()
    print(
        f"{num_steps} steps as the reference, each row bit for bit as its request alone; of {stats['steps']} replays "
        f"{stats['one_launch']} were one launch"
    )


if __name__ == "__main__":
    main()
