"""The shipped DSV4-like preps as one table, and worlds of tables and steps to hold them against their references."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import torch

import graphglue as gg
from graphglue.core.view import View
from graphglue.preps import causal, compression, draft, reference

Device = torch.device | str


@dataclass(frozen=True)
class Sizes:
    """The numbers that preps bake, and the extents of tables. Small ones cross every boundary in a few positions."""

    page_size: int = 4
    window: int = 6
    alignment: int = 4
    floor: int = 0
    top_k: int = 5
    index_page_size: int = 2
    max_context: int = 27
    num_requests: int = 15

    @property
    def layout(self) -> dict[str, int]:
        """What every prep with a window takes."""
        return {"page_size": self.page_size, "window": self.window, "alignment": self.alignment}

    @property
    def compressed(self) -> dict[str, int]:
        """What every compression prep takes."""
        names = ("page_size", "top_k", "alignment", "index_page_size")
        return {name: getattr(self, name) for name in names}

    @property
    def boundaries(self) -> list[int]:
        """Lengths at and beside the ends of pages and of the window."""
        ends = {*range(0, self.max_context + 1, self.page_size), self.window, self.max_context}
        return sorted(length for end in ends for length in (end - 1, end, end + 1) if 0 <= length <= self.max_context)


PUBLISHED = Sizes(256, 128, 64, top_k=512, index_page_size=64, max_context=1100)


@dataclass(frozen=True)
class Step:
    """One step as lists of real extents."""

    seq_lens: list[int]
    requests: list[int]
    row_tokens: list[int]
    out_cache_loc: list[int]

    def padded(self, bucket: gg.Bucket) -> Step:
        """Pad by hand, as the declarations say: length 1, request 0, location 0."""
        more = bucket.requests - len(self.requests)
        locations = self.out_cache_loc + [0] * (bucket.tokens - len(self.out_cache_loc))
        return Step(self.seq_lens + [1] * more, self.requests + [0] * more, self.row_tokens, locations)

    def sources(self, ragged: bool) -> dict[str, list[int]]:
        """Give what a batch hands in."""
        found = {
            "seq_lens": self.seq_lens,
            "req_pool_indices": self.requests,
            "out_cache_loc": self.out_cache_loc,
        }
        offsets = list(accumulate(self.row_tokens, initial=0))
        offsets += [offsets[-1]] * (len(self.requests) + 1 - len(offsets))
        return {**found, "qo_indptr": offsets} if ragged else found

    def batch(self, mode: gg.Mode, ragged: bool) -> gg.Batch:
        """Give the batch."""
        if not self.requests:
            return gg.Batch.idle(mode)
        return gg.Batch(len(self.requests), self.sources(ragged), mode, row_tokens=self.row_tokens)

    def view(self, case: Case, bucket: gg.Bucket, tables: Mapping[str, torch.Tensor], device: Device) -> View:
        """Show a step, which is padded already, by tensors that no code of the library has filled."""
        sources = self.sources(case.ragged)
        dtypes = {slot.name: slot.dtype for slot in case.slots}
        slots = {name: torch.tensor(sources[name], dtype=dtypes[name], device=device) for name in case.contract.reads}
        seen = {name: tables[name] for name in case.contract.tables}
        return View(slots, seen, bucket, case.mode)


@dataclass(frozen=True)
class Case:
    """One prep.

    Attributes:
        contract: what it declares.
        mode: the mode it is tried in.
        slots: the slots of its runner.
        width: tokens of each request; the most of one where they differ.
        make: sizes -> prep.
        expected: (sizes, padded step, bucket, tables as lists) -> metadata as lists, by the slow reference.
    """

    contract: gg.PrepContract
    mode: gg.Mode
    slots: tuple[gg.Slot, ...]
    width: int
    make: Callable[[Sizes], Callable[[Any], Any]]
    expected: Callable[[Sizes, Step, gg.Bucket, Mapping[str, Any]], dict[str, list[Any]]]

    @property
    def ragged(self) -> bool:
        """Whether requests may differ in width."""
        return self.contract.ragged

    def runner(self, sizes: Sizes, tables: Mapping[str, torch.Tensor], ladder: Sequence[int], **options: Any) -> Any:
        """Build a runner of this prep alone."""
        registry = gg.Registry()
        registry.register(self.contract)(self.make(sizes))
        return gg.Runner(
            slots=self.slots,
            ladder=ladder,
            prep=self.contract.name,
            registry=registry,
            tables=dict(tables),
            tokens_per_request=self.width,
            config=gg.RunnerConfig(modes={self.mode}),
            **options,
        )


# An audit may deal all but four tokens of the largest bucket to one ragged request.
MAX_PREFIX = {False: Sizes().max_context - 4, True: Sizes().max_context - 16}
RowsOf = Callable[[Step, gg.Bucket], list[reference.Row]]


def _decode(step: Step, bucket: gg.Bucket) -> list[reference.Row]:
    return reference.decode_rows(step.seq_lens, step.requests)


def _block(step: Step, bucket: gg.Bucket) -> list[reference.Row]:
    return reference.block_rows(step.seq_lens, step.requests, bucket.row_tokens)


def _ragged(step: Step, bucket: gg.Bucket) -> list[reference.Row]:
    return reference.ragged_rows(step.seq_lens, step.requests, step.row_tokens, bucket.tokens)


def _extend(step: Step, bucket: gg.Bucket) -> list[reference.Row]:
    return reference.extend_rows(step.seq_lens, step.requests, bucket.row_tokens)


def _causal(name: str, mode: gg.Mode, width: int, rows_of: RowsOf) -> Case:
    def expected(sizes: Sizes, step: Step, bucket: gg.Bucket, tables: Mapping[str, Any]) -> dict[str, list[Any]]:
        return reference.causal(rows_of(step, bucket), step.out_cache_loc, **tables, **sizes.layout, floor=sizes.floor)

    def make(sizes: Sizes) -> Callable[[Any], Any]:
        return causal.make(name, **sizes.layout, floor=sizes.floor)

    slots = tuple(causal.slots(name, MAX_PREFIX[causal.CONTRACTS[name].ragged]))
    return Case(causal.CONTRACTS[name], mode, slots, width, make, expected)


def _compression(ratio: int, mode: gg.Mode, width: int, rows_of: RowsOf, ragged: bool = False) -> Case:
    def expected(sizes: Sizes, step: Step, bucket: gg.Bucket, tables: Mapping[str, Any]) -> dict[str, list[Any]]:
        rows, table = rows_of(step, bucket), tables["req_to_token"]
        return reference.compression(rows, step.out_cache_loc, table, ratio, **sizes.compressed)

    def make(sizes: Sizes) -> Callable[[Any], Any]:
        return compression.make(ratio, ragged, **sizes.compressed)

    slots = tuple(compression.slots(ragged, MAX_PREFIX[ragged]))
    return Case(compression.contract(ratio, ragged), mode, slots, width, make, expected)


def _draft() -> Case:
    def expected(sizes: Sizes, step: Step, bucket: gg.Bucket, tables: Mapping[str, Any]) -> dict[str, list[Any]]:
        width, locations = bucket.row_tokens, step.out_cache_loc
        return reference.draft(step.seq_lens, step.requests, width, locations, **tables, **sizes.layout)

    slots = tuple(draft.slots(MAX_PREFIX[False]))
    return Case(draft.CONTRACT, gg.Mode.DRAFT, slots, 3, lambda sizes: draft.make(**sizes.layout), expected)


CASES = {
    "decode": _causal("dsv4-decode", gg.Mode.DECODE, 1, _decode),
    "verify": _causal("dsv4-verify", gg.Mode.VERIFY, 4, _block),
    "ragged verify": _causal("dsv4-ragged-verify", gg.Mode.VERIFY, 4, _ragged),
    "draft": _draft(),
    "draft extend": _causal("dsv4-draft-extend", gg.Mode.DRAFT_EXTEND, 3, _extend),
    "compression 1, decode": _compression(1, gg.Mode.DECODE, 1, _decode),
    "compression 2, decode": _compression(2, gg.Mode.DECODE, 1, _decode),
    "compression 1, verify": _compression(1, gg.Mode.VERIFY, 4, _block),
    "compression 2, verify": _compression(2, gg.Mode.VERIFY, 4, _block),
    "compression 1, ragged verify": _compression(1, gg.Mode.VERIFY, 4, _ragged, ragged=True),
    "compression 2, ragged verify": _compression(2, gg.Mode.VERIFY, 4, _ragged, ragged=True),
}


def world(sizes: Sizes, seed: int) -> dict[str, list[Any]]:
    """Lay out tables: row 0 is the sink, every other request has pages of its own in any order."""
    rng = random.Random(seed)
    stretches = -(-sizes.max_context // sizes.page_size)
    pages = rng.sample(range(1, sizes.num_requests * stretches + 1), sizes.num_requests * stretches)
    table = [[0] * sizes.max_context]
    for request in range(sizes.num_requests):
        own = pages[request * stretches : (request + 1) * stretches]
        row = [page * sizes.page_size + offset for page in own for offset in range(sizes.page_size)]
        table.append(row[: sizes.max_context])
    num_locations = (len(pages) + 1) * sizes.page_size
    return {"req_to_token": table, "full_to_swa": [*rng.sample(range(num_locations), num_locations), -1]}


def tensors(tables: Mapping[str, Any], device: Device = "cpu", dtype: torch.dtype = torch.int64) -> dict[str, Any]:
    """Make the tables' tensors."""
    return {name: torch.tensor(table, dtype=dtype, device=device) for name, table in tables.items()}


def drawn(
    sizes: Sizes, tables: Mapping[str, Any], row_tokens: Sequence[int], rng: random.Random, past_end: bool = False
) -> Step:
    """Draw a step: lengths favour boundaries, requests are distinct, and tokens lie anywhere but in the sink.

    Args:
        sizes, tables, row_tokens, rng: what to draw from.
        past_end: lengths may be so long that a block behind them reaches past the end of its request's row.
    """
    most = sizes.max_context - (0 if past_end else max(row_tokens, default=0))
    near = [length for length in sizes.boundaries if 1 <= length <= most]
    lengths = [rng.choice(near) if rng.random() < 0.7 else rng.randint(1, most) for _ in row_tokens]
    requests = rng.sample(range(1, sizes.num_requests + 1), len(row_tokens))
    num_locations = len(tables["full_to_swa"]) - 1
    locations = [rng.randrange(1, num_locations) for _ in range(sum(row_tokens))]
    return Step(lengths, requests, list(row_tokens), locations)


def listed(metadata: Mapping[str, torch.Tensor]) -> dict[str, list[Any]]:
    """Give metadata as lists."""
    return {name: tensor.tolist() for name, tensor in metadata.items()}


def glued_steps(
    case: Case, runner: Any, held: Mapping[str, torch.Tensor], raws: Sequence[int], seed: int
) -> Iterator[tuple[Any, dict[str, list[Any]]]]:
    """Run steps of small sizes over fresh tables and poisoned slots; give each, and what the reference says of it."""
    rng, tables = random.Random(seed), world(Sizes(), seed)
    for name, table in tensors(tables).items():
        held[name].copy_(table)
    for raw in raws:
        step = drawn(Sizes(), tables, row_tokens_of(case, raw, rng), rng, past_end=rng.random() < 0.5)
        slots = runner.view(runner.buckets[-1].requests)
        for name in slots:
            slots[name].fill_(10**6)  # an index that leads out of every table
        prepared = runner.prepare(step.batch(case.mode, case.ragged))
        bucket = prepared.decision.bucket
        yield prepared, case.expected(Sizes(), step.padded(bucket), bucket, tables)


def row_tokens_of(case: Case, num_requests: int, rng: random.Random) -> list[int]:
    """Deal each request its tokens."""
    return [rng.randint(1, case.width) if case.ragged else case.width for _ in range(num_requests)]
