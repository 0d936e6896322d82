"""After any sequence of fills every slot equals a model of its memory, and a refused fill changed nothing.

The model is plain numpy and loops: it shares no code with the library, and compares bits, so that NaN
equals itself and -0.0 does not equal 0.0.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import Phase, assume, given, settings
from hypothesis import strategies as st

import graphglue as gg
from graphglue.core.keys import KeySpace
from graphglue.device import fill
from graphglue.testing import strategies as ggst

# The signed integer that has a dtype's width: what bits are compared as.
WORDS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
ARRAY_WORDS = {1: np.int8, 2: np.int16, 4: np.int32, 8: np.int64}


def bits_of(tensor: torch.Tensor) -> np.ndarray:
    """Read a tensor's bits, of any strides, as an array of integers that is a copy."""
    return tensor.detach().contiguous().view(WORDS[tensor.element_size()]).cpu().numpy().copy()


def write_bits(tensor: torch.Tensor, bits: np.ndarray) -> None:
    """Write bits into a tensor in place."""
    tensor.view(WORDS[tensor.element_size()]).copy_(torch.from_numpy(bits.copy()))


def tensor_of(bits: np.ndarray, dtype: torch.dtype) -> torch.Tensor:
    """Build a fresh tensor from bits."""
    return torch.from_numpy(np.array(bits)).view(dtype)


def encode(values: Any, dtype: torch.dtype) -> np.ndarray:
    """Turn numbers that ``dtype`` holds exactly into its bits."""
    if dtype == torch.bfloat16:  # a bfloat16 is the upper half of a float32
        return np.asarray(np.asarray(values, np.float32).view(np.uint32) >> 16, np.uint16).view(np.int16)
    array = np.asarray(values).astype(str(dtype).removeprefix("torch."))
    return array.view(ARRAY_WORDS[array.itemsize])


def encode_source(source: Any, shape: tuple[int, ...], dtype: torch.dtype) -> np.ndarray:
    """Turn what a batch handed in into a slot's bits."""
    if isinstance(source, torch.Tensor):
        if source.dtype == dtype:
            return bits_of(source)
        if source.dtype == torch.bfloat16:
            source = (bits_of(source).view(np.uint16).astype(np.uint32) << 16).view(np.float32)
        else:
            source = source.numpy()
    return encode(source, dtype).reshape(shape)


def is_nan(bits: np.ndarray, dtype: torch.dtype) -> np.ndarray:
    """Find the NaNs among the bits of a float dtype."""
    return np.asarray(tensor_of(bits, dtype).isnan().numpy())


def covering(ladder: Iterable[int], count: int) -> int | None:
    """Find the smallest size that is large enough."""
    sizes = [size for size in ladder if size >= count]
    return min(sizes) if sizes else None


def counts_of(batch: gg.Batch, width: int, in_tokens: bool = False) -> tuple[int, int, int]:
    """Read (requests, tokens, tokens of each request or 0) off a legal batch."""
    if batch.num_requests == 0:
        return 0, 0, 0
    if batch.row_tokens is not None:
        uniform = len(set(batch.row_tokens)) == 1 and not in_tokens
        return batch.num_requests, sum(batch.row_tokens), batch.row_tokens[0] if uniform else 0
    tokens = batch.num_requests * width if batch.num_tokens is None else batch.num_tokens
    return batch.num_requests, tokens, 0 if in_tokens else tokens // batch.num_requests


def bucket_of(
    counts: tuple[int, int, int], ladder: Sequence[int], width: int, max_requests: int | None = None
) -> gg.Bucket | None:
    """Choose the bucket by the words of design.md section 5; None over the ladder or the slots."""
    requests, tokens, each = counts
    if max_requests is not None:  # the ladder counts tokens
        size = covering(ladder, tokens)
        return None if size is None or requests > max_requests else gg.Bucket(max_requests, size, 0)
    if requests == 0:
        return gg.Bucket(min(ladder), min(ladder) * width, width)
    if each == 0:
        fitting = [size for size in ladder if size >= requests and size * width >= tokens]
        return gg.Bucket(min(fitting), min(fitting) * width, 0) if fitting else None
    size = covering(ladder, requests)
    if size is None or size * each > max(ladder) * width:
        return None
    return gg.Bucket(size, size * each, each)


def rows_of(slot: gg.Slot, requests: int, tokens: int, num_ranks: int) -> int:
    """Count a slot's rows."""
    return {"request": requests, "token": tokens, "offset": requests + 1, "rank": num_ranks, "fixed": 1}[slot.axis]


class SlotModel:
    """Hold one slot's memory as bits, and write it row by row."""

    def __init__(self, slot: gg.Slot, rows: int) -> None:
        self.slot = slot
        self.adopted = slot.storage is not None
        shape = tuple(slot.storage.shape) if self.adopted else self.shape(rows)
        self.memory = np.zeros(shape, ARRAY_WORDS[torch.empty(0, dtype=slot.dtype).element_size()])

    def shape(self, rows: int) -> tuple[int, ...]:
        """Give the shape at a number of rows."""
        shape = list(self.slot.inner)
        if self.slot.axis != "fixed":
            shape.insert(self.slot.row_dim, rows)
        return tuple(shape)

    def at(self, rows: int) -> np.ndarray:
        """Show a bucket: the first elements of our memory, packed; the first rows of an adopted one."""
        if self.slot.axis == "fixed":
            return self.memory
        if self.adopted:
            return np.moveaxis(np.moveaxis(self.memory, self.slot.row_dim, 0)[:rows], 0, self.slot.row_dim)
        shape = self.shape(rows)
        return self.memory.reshape(-1)[: int(np.prod(shape))].reshape(shape)

    def by_row(self, rows: int) -> np.ndarray:
        """Show a bucket with its rows on the first dimension; axis fixed is one row."""
        return self.at(rows)[None] if self.slot.axis == "fixed" else np.moveaxis(self.at(rows), self.slot.row_dim, 0)

    def write(self, rows: int, raw: int, head: np.ndarray | None, pad: Any = None) -> None:
        """Write ``head`` into the first ``raw`` rows, unless it is None, and the pad into the others."""
        target = self.by_row(rows)
        if head is not None and self.slot.axis == "fixed":
            head = head[None]
        elif head is not None:
            head = np.moveaxis(head, self.slot.row_dim, 0)
        for row in range(rows):
            if row >= raw:
                target[row] = self.pad_of(target, row, self.slot.pad if pad is None else pad)
            elif head is not None:
                target[row] = head[row]

    def pad_of(self, target: np.ndarray, row: int, pad: Any) -> Any:
        """Give what a row of the tail holds; the row before it is right already."""
        if pad is not gg.REPEAT_LAST:
            return encode(pad, self.slot.dtype)
        return target[row - 1] if row else encode(0, self.slot.dtype)


class Model:
    """Hold the memory of all slots of an arena, and fill it as the design says."""

    def __init__(
        self,
        slots: Sequence[gg.Slot],
        ladder: Sequence[int],
        width: int = 1,
        num_ranks: int = 1,
        max_requests: int | None = None,
        capacity: tuple[int, int] | None = None,
    ) -> None:
        self.slots, self.ladder, self.width, self.num_ranks = slots, ladder, width, num_ranks
        self.max_requests = max_requests
        by_tokens = max_requests is not None
        largest = (max_requests, max(ladder)) if by_tokens else (max(ladder), max(ladder) * width)
        self.capacity = largest if capacity is None else capacity
        self.memory = {slot.name: SlotModel(slot, self.rows(slot, *self.capacity)) for slot in slots}

    def rows(self, slot: gg.Slot, requests: int, tokens: int) -> int:
        """Count a slot's rows."""
        return rows_of(slot, requests, tokens, self.num_ranks)

    def counts(self, batch: gg.Batch) -> tuple[int, int, int]:
        """Read a batch's real counts."""
        return counts_of(batch, self.width, self.max_requests is not None)

    def bucket(self, batch: gg.Batch) -> gg.Bucket | None:
        """Choose a batch's bucket."""
        return bucket_of(self.counts(batch), self.ladder, self.width, self.max_requests)

    def fill(self, batch: gg.Batch, bucket: gg.Bucket) -> None:
        """Fill all slots for a batch."""
        requests, tokens, _ = self.counts(batch)
        for slot in self.slots:
            memory = self.memory[slot.name]
            rows, raw = self.rows(slot, *bucket[:2]), self.rows(slot, requests, tokens)
            if slot.value is not None:
                self.fill_computed(slot, (requests, tokens), bucket)
            elif slot.name in batch.sources:
                head = encode_source(batch.sources[slot.name], memory.shape(raw), slot.dtype)
                memory.write(rows, raw, head)
            else:
                memory.write(rows, 0, None, slot.idle if requests == 0 else None)

    def fill_computed(self, slot: gg.Slot, raw: tuple[int, int], bucket: gg.Bucket) -> None:
        """Fill a slot with a number of the step."""
        rows, raw_rows = self.rows(slot, *bucket[:2]), self.rows(slot, *raw)
        number = {
            gg.RAW_REQUESTS: raw[0],
            gg.RAW_TOKENS: raw[1],
            gg.BUCKET_REQUESTS: bucket.requests,
            gg.BUCKET_TOKENS: bucket.tokens,
            gg.RANK_COUNTS: bucket.tokens,
        }[slot.value]
        memory = self.memory[slot.name]
        memory.write(rows, raw_rows, np.broadcast_to(encode(number, slot.dtype), memory.shape(raw_rows)))

    def fill_capture(self, bucket: gg.Bucket) -> None:
        """Fill all slots with what preps see while they are recorded."""
        for slot in self.slots:
            memory, rows = self.memory[slot.name], self.rows(slot, *bucket[:2])
            if slot.value is not None:
                self.fill_computed(slot, bucket[:2], bucket)
            elif callable(slot.capture):
                for row in range(rows):
                    memory.by_row(rows)[row] = encode(slot.capture(row), slot.dtype)
            else:
                memory.write(rows, 0, None, slot.capture)

    def take_nan_payloads(self, batch: gg.Batch, bucket: gg.Bucket, view: gg.View) -> None:
        """Take over the bits of NaNs that were converted: torch's scalar and vector kernels give different ones."""
        for name, source in batch.sources.items():
            slot = self.memory[name].slot
            if slot.dtype.is_floating_point and getattr(source, "dtype", None) != slot.dtype:
                ours, now = self.memory[name].at(self.rows(slot, *bucket[:2])), bits_of(view[name])
                both = is_nan(ours, slot.dtype) & is_nan(now, slot.dtype)
                ours[both] = now[both]

    def tensors(self, bucket: gg.Bucket) -> dict[str, torch.Tensor]:
        """Build fresh tensors of a bucket's extents from the memory."""
        return {
            slot.name: tensor_of(self.memory[slot.name].at(self.rows(slot, *bucket[:2])), slot.dtype)
            for slot in self.slots
        }


def storages(view: gg.View, slots: Iterable[gg.Slot]) -> dict[str, torch.Tensor]:
    """Give the whole memory of each slot: an adopted storage, or the view at the largest bucket."""
    return {slot.name: view[slot.name] if slot.storage is None else slot.storage for slot in slots}


def check_memory(model: Model, seen: dict[str, torch.Tensor], after: str) -> None:
    """Compare all memory of all slots with the model, bit for bit."""
    for name, memory in model.memory.items():
        assert np.array_equal(bits_of(seen[name]), memory.memory), (
            f"slot {name!r} after {after}:\n{seen[name]}\nexpected\n{tensor_of(memory.memory, memory.slot.dtype)}"
        )


@st.composite
def arenas(draw: st.DrawFn, device: str) -> SimpleNamespace:
    """Draw an arena whose memory is garbage, and its model."""
    sizes, ranks = draw(ggst.ladders(max_size=6, max_length=3)), draw(st.integers(1, 3))
    width = draw(st.integers(1, 3))
    max_requests = draw(st.none() | st.just(3)) if width == 1 else None
    capacity = (max_requests or max(sizes), max(sizes) * width, ranks)
    slots = draw(ggst.slot_tables(adopt=capacity if device == "cpu" else None))
    ladder: Any = sizes
    if max_requests is not None:
        ladder = KeySpace(gg.Ladder(sizes), modes=[gg.Mode.EXTEND], max_requests=max_requests)
    arena = gg.Arena(slots, ladder, device=device, tokens_per_request=width, num_ranks=ranks)
    model = Model(slots, sizes, width, ranks, max_requests)
    largest = arena.view(arena.space.bucket(max(sizes)))
    case = SimpleNamespace(
        arena=arena, model=model, slots=slots, seen=storages(largest, slots), extend=max_requests is not None
    )
    poison(case, draw(st.integers(0, 2**32 - 1)))
    return case


def poison(case: SimpleNamespace, seed: int) -> None:
    """Write random bits into all slots, as whatever ran before may have left them."""
    rng = np.random.default_rng(seed)
    for name, memory in case.model.memory.items():
        words = memory.memory.dtype
        low, high = (0, 1) if memory.slot.dtype == torch.bool else (np.iinfo(words).min, np.iinfo(words).max)
        memory.memory[...] = rng.integers(low, high, memory.memory.shape, words, endpoint=True)
        write_bits(case.seen[name], memory.memory)


@st.composite
def fitting_batches(draw: st.DrawFn, case: SimpleNamespace) -> gg.Batch:
    """Draw a batch that its arena can hold."""
    model = case.model
    if case.extend:
        modes, tokens = [gg.Mode.EXTEND], draw(st.integers(0, max(model.ladder)))
        requests = min(tokens, draw(st.integers(0, model.max_requests)))
        drawn = draw(ggst.batches([], [1], modes=modes, max_requests=0))
        if requests == 0:
            return drawn
        sources = {
            slot.name: draw(ggst.sources(slot, requests, tokens, model.num_ranks))
            for slot in case.slots
            if slot.value is None and not (slot.missing == "pad" and draw(st.booleans()))
        }
        return gg.Batch(requests, sources, mode=gg.Mode.EXTEND, num_tokens=tokens)
    common = {"tokens_per_request": model.width, "num_ranks": model.num_ranks}
    batch = draw(ggst.batches(case.slots, model.ladder, **common, widths=(1, 2, 4)))
    if model.bucket(batch) is None:
        batch = draw(ggst.batches(case.slots, model.ladder, **common, ragged=False))
    return batch


def fill_once(case: SimpleNamespace, data: st.DataObject) -> str:
    """Fill one batch, by the smallest bucket or a larger one that was agreed on."""
    batch = data.draw(fitting_batches(case), label="batch")
    bucket = case.model.bucket(batch)
    larger = [size for size in case.model.ladder if not case.extend and bucket.requests < size]
    forced = None
    if larger and bucket.row_tokens in (0, case.model.width) and data.draw(st.booleans(), label="force"):
        size = data.draw(st.sampled_from(larger), label="forced size")
        forced = bucket = gg.Bucket(size, size * case.model.width, bucket.row_tokens)
    with torch.inference_mode(data.draw(st.booleans(), label="inference mode")):
        view = case.arena.fill(batch, forced)
    case.model.fill(batch, bucket)
    case.model.take_nan_payloads(batch, bucket, view)
    assert view.bucket == bucket
    for slot in case.slots:
        rows, memory = case.model.rows(slot, *bucket[:2]), case.model.memory[slot.name]
        assert view[slot.name].shape == memory.shape(rows)
        assert view[slot.name].data_ptr() == case.seen[slot.name].data_ptr()
        assert slot.storage is not None or view[slot.name].is_contiguous()
    return f"fill of {batch} at {bucket}"


def refuse_once(case: SimpleNamespace, data: st.DataObject) -> str:
    """Break a batch in one place: it is refused."""
    batch = data.draw(fitting_batches(case), label="batch")
    breaks = [break_ for break_ in BREAKS if break_(batch, case) is not None]
    assume(breaks)
    broken = data.draw(st.sampled_from(breaks), label="broken by")(batch, case)
    with pytest.raises(gg.BindError):
        case.arena.fill(broken)
    return f"refused {broken}"


def refuse_bucket(case: SimpleNamespace, data: st.DataObject) -> str:
    """Ask for a bucket that does not hold the batch, or that the slots do not have: it is refused."""
    batch = data.draw(fitting_batches(case), label="batch")
    requests, tokens, each = case.model.counts(batch)
    largest = case.model.capacity
    buckets = [gg.Bucket(largest[0] + 1, largest[1] + 1, each), gg.Bucket(largest[0], largest[1] + 1, each)]
    if requests:
        buckets += [gg.Bucket(requests - 1, tokens, each), gg.Bucket(requests, tokens - 1, each)]
    bucket = data.draw(st.sampled_from(buckets), label="bucket")
    with pytest.raises(gg.CapacityError):
        case.arena.fill(batch, bucket)
    return f"refused {batch} at {bucket}"


def refill_own_view(case: SimpleNamespace, data: st.DataObject) -> str:
    """Hand in the slots' own views: nothing is copied, only tails are reset."""
    batch = data.draw(fitting_batches(case), label="batch")
    bucket, counts = case.model.bucket(batch), case.model.counts(batch)
    view, own = case.arena.view(bucket), {}
    for slot in case.slots if counts[0] else ():
        raw = case.model.rows(slot, *counts[:2])
        head = view[slot.name] if slot.axis == "fixed" else view[slot.name].narrow(slot.row_dim, 0, raw)
        if slot.value is None and data.draw(st.booleans(), label=f"own {slot.name}"):
            own[slot.name] = head
    before = {name: head.clone() for name, head in own.items()}
    case.arena.fill(replace(batch, sources={**batch.sources, **own}))
    batch = replace(batch, sources={**batch.sources, **before})
    case.model.fill(batch, bucket)
    case.model.take_nan_payloads(batch, bucket, view)
    return f"fill of {batch} at {bucket}, from the slots' own views"


def fill_values(case: SimpleNamespace, data: st.DataObject) -> str:
    """Fill capture or idle values, or garbage, at some bucket."""
    bucket = case.arena.space.bucket(data.draw(st.sampled_from(case.model.ladder), label="size"))
    what = data.draw(st.sampled_from(["capture", "idle", "garbage"]), label="values")
    if what == "capture":
        case.arena.fill_capture(bucket)
        case.model.fill_capture(bucket)
    elif what == "idle":
        case.arena.fill_idle(bucket)
        case.model.fill(gg.Batch.idle(), bucket)
    else:
        poison(case, data.draw(st.integers(0, 2**32 - 1), label="seed"))
    return f"{what} values at {bucket}"


# Ways to break a batch. Each gives the broken batch, or None where it has nothing to break.

Break = Callable[[gg.Batch, SimpleNamespace], "gg.Batch | None"]


def _one_source(batch: gg.Batch, case: SimpleNamespace, change: Callable[[gg.Slot, torch.Tensor], Any]) -> Any:
    """Change the last source that ``change`` can break, so that those before it are right."""
    counts = case.model.counts(batch)
    for slot in reversed(case.slots):
        if slot.name in batch.sources:
            shape = case.model.memory[slot.name].shape(case.model.rows(slot, *counts[:2]))
            good = tensor_of(encode_source(batch.sources[slot.name], shape, slot.dtype), slot.dtype)
            broken = change(slot, good)
            if broken is not None:
                return replace(batch, sources={**batch.sources, slot.name: broken})
    return None


def missing_slot(batch: gg.Batch, case: SimpleNamespace) -> gg.Batch | None:
    needed = [slot.name for slot in case.slots if slot.name in batch.sources and slot.missing == "error"]
    return replace(batch, sources={n: s for n, s in batch.sources.items() if n != needed[-1]}) if needed else None


def unknown_slot(batch: gg.Batch, case: SimpleNamespace) -> gg.Batch | None:
    return replace(batch, sources={**batch.sources, "slot99": [0]}) if batch.num_requests else None


def computed_slot(batch: gg.Batch, case: SimpleNamespace) -> gg.Batch | None:
    computed = [slot for slot in case.slots if slot.value is not None]
    if not computed or not batch.num_requests:
        return None
    rows = case.model.rows(computed[-1], *case.model.counts(batch)[:2])
    source = torch.zeros(case.model.memory[computed[-1].name].shape(rows), dtype=computed[-1].dtype)
    return replace(batch, sources={**batch.sources, computed[-1].name: source})


def one_row_more(batch: gg.Batch, case: SimpleNamespace) -> gg.Batch | None:
    def change(slot: gg.Slot, good: torch.Tensor) -> Any:
        return torch.cat([good, good.narrow(0, 0, 1)]) if good.dim() and good.shape[0] else None

    return _one_source(batch, case, change)


def one_row_only(batch: gg.Batch, case: SimpleNamespace) -> gg.Batch | None:
    def change(slot: gg.Slot, good: torch.Tensor) -> Any:
        rows_dim = slot.row_dim if slot.axis != "fixed" else 0
        many = good.dim() and good.shape[rows_dim] > 1
        return good.narrow(rows_dim, 0, 1).contiguous() if many else None

    return _one_source(batch, case, change)


def padded_already(batch: gg.Batch, case: SimpleNamespace) -> gg.Batch | None:
    """Hand in a slot at the bucket's extent instead of the real one."""
    bucket = case.model.bucket(batch)

    def change(slot: gg.Slot, good: torch.Tensor) -> Any:
        shape = case.model.memory[slot.name].shape(case.model.rows(slot, *bucket[:2]))
        return torch.zeros(shape, dtype=slot.dtype) if shape != tuple(good.shape) else None

    return _one_source(batch, case, change)


def one_dimension_more(batch: gg.Batch, case: SimpleNamespace) -> gg.Batch | None:
    return _one_source(
        batch, case, lambda slot, good: good[None].numpy() if slot.dtype != torch.bfloat16 else good[None]
    )


def another_kind(batch: gg.Batch, case: SimpleNamespace) -> gg.Batch | None:
    def change(slot: gg.Slot, good: torch.Tensor) -> Any:
        return good.to(torch.float32 if not slot.dtype.is_floating_point else torch.int32)

    return _one_source(batch, case, change)


def wider_dtype(batch: gg.Batch, case: SimpleNamespace) -> gg.Batch | None:
    def change(slot: gg.Slot, good: torch.Tensor) -> Any:
        wide = [wide for wide, narrow in ggst.NARROWER.items() if slot.dtype in narrow and wide not in slot.accepts]
        return good.to(wide[0]) if wide else None

    return _one_source(batch, case, change)


def value_out_of_range(batch: gg.Batch, case: SimpleNamespace) -> gg.Batch | None:
    """Hand in a list with a number that the slot's dtype does not hold."""

    def change(slot: gg.Slot, good: torch.Tensor) -> Any:
        if slot.dtype in (torch.bool, torch.int64, torch.float64) or not good.numel() or not good.dim():
            return None
        largest = torch.finfo(slot.dtype).max if slot.dtype.is_floating_point else torch.iinfo(slot.dtype).max
        values = good.to(torch.float64 if slot.dtype.is_floating_point else torch.int64)
        values.view(-1)[-1] = largest * 2
        return values.tolist()

    return _one_source(batch, case, change)


def strided(batch: gg.Batch, case: SimpleNamespace) -> gg.Batch | None:
    def change(slot: gg.Slot, good: torch.Tensor) -> Any:
        spread = torch.stack([good, good], dim=-1)[..., 0]
        return None if spread.is_contiguous() else spread

    return _one_source(batch, case, change)


def number_for_many(batch: gg.Batch, case: SimpleNamespace) -> gg.Batch | None:
    return _one_source(batch, case, lambda slot, good: good.view(-1)[0].item() if good.numel() > 1 else None)


def not_a_source(batch: gg.Batch, case: SimpleNamespace) -> gg.Batch | None:
    return _one_source(batch, case, lambda slot, good: "zero")


def inside_another_slot(batch: gg.Batch, case: SimpleNamespace) -> gg.Batch | None:
    """Hand in memory of another slot, which the same fill writes."""

    def change(slot: gg.Slot, good: torch.Tensor) -> Any:
        for other in case.slots:
            if other.name == slot.name or not case.seen[other.name].is_contiguous() or not good.numel():
                continue
            memory = case.seen[other.name].view(-1).view(torch.uint8)
            num_bytes = good.numel() * good.element_size()
            if memory.numel() >= num_bytes and memory.storage_offset() % good.element_size() == 0:
                return memory[:num_bytes].view(slot.dtype).view(good.shape)
        return None

    return _one_source(batch, case, change)


def own_memory_shifted(batch: gg.Batch, case: SimpleNamespace) -> gg.Batch | None:
    """Hand in the slot's own memory, but not from its start."""

    def change(slot: gg.Slot, good: torch.Tensor) -> Any:
        if not case.seen[slot.name].is_contiguous() or slot.axis == "fixed":
            return None
        memory = case.seen[slot.name].view(-1)
        return memory[1 : 1 + good.numel()].view(good.shape) if 0 < good.numel() < memory.numel() else None

    return _one_source(batch, case, change)


def over_the_ladder(batch: gg.Batch, case: SimpleNamespace) -> gg.Batch | None:
    return None if case.extend else gg.Batch(max(case.model.ladder) + 1, batch.sources)


def idle_with_sources(batch: gg.Batch, case: SimpleNamespace) -> gg.Batch | None:
    return replace(batch, num_requests=0, num_tokens=None, row_tokens=None) if batch.sources else None


def uneven_tokens(batch: gg.Batch, case: SimpleNamespace) -> gg.Batch | None:
    return replace(batch, num_tokens=batch.num_requests * 2 - 1, row_tokens=[2] * batch.num_requests)


BREAKS: tuple[Break, ...] = (
    missing_slot,
    unknown_slot,
    computed_slot,
    one_row_more,
    one_row_only,
    padded_already,
    one_dimension_more,
    another_kind,
    wider_dtype,
    value_out_of_range,
    strided,
    number_for_many,
    not_a_source,
    inside_another_slot,
    own_memory_shifted,
    over_the_ladder,
    idle_with_sources,
    uneven_tokens,
)

ACTIONS = (fill_once, fill_once, fill_once, refuse_once, refuse_bucket, refill_own_view, fill_values)


def check_fills(data: st.DataObject, actions: Sequence[Callable[..., str]] = ACTIONS, device: str = "cpu") -> None:
    """Fill an arena several times; after each call all its memory equals the model's."""
    case = data.draw(arenas(device), label="arena")
    for _ in range(data.draw(st.integers(1, 4), label="steps")):
        after = data.draw(st.sampled_from(actions), label="action")(case, data)
        check_memory(case.model, case.seen, after)


@given(data=st.data())
def test_every_slot_equals_the_model_after_any_sequence_of_fills(data: st.DataObject) -> None:
    check_fills(data)


@given(data=st.data())
def test_a_refused_batch_changes_no_byte_of_any_slot(data: st.DataObject) -> None:
    check_fills(data, [fill_once, refuse_once, refuse_once, refuse_bucket])


@pytest.mark.parametrize("break_", BREAKS)
def test_each_way_to_break_a_batch_is_found_and_refused(break_: Break) -> None:
    """The refusals above are only worth something if each kind of them really occurs."""
    slots = [
        gg.Slot("first", axis="fixed", dtype=torch.int32, pad=0, inner=(2,)),
        gg.Slot("count", axis="rank", dtype=torch.int32, pad=0, value=gg.RAW_REQUESTS),
        gg.Slot("many", axis="request", dtype=torch.int32, pad=0, inner=(2,)),
    ]
    arena, model = gg.Arena(slots, [2, 4]), Model(slots, [2, 4])
    case = SimpleNamespace(arena=arena, model=model, slots=slots, extend=False, seen=storages(arena.view(4), slots))
    poison(case, 1)
    broken = break_(gg.Batch(3, {"first": [1, 2], "many": [[1, 2], [3, 4], [5, 6]]}), case)
    with pytest.raises(gg.BindError):
        arena.fill(broken)
    check_memory(model, case.seen, f"refused {broken}")


def test_the_property_fails_without_the_tail_fill(monkeypatch: pytest.MonkeyPatch) -> None:
    """Show that the test can fail: what it is for is the reset of the tails."""
    monkeypatch.setattr(fill, "_write_tail", lambda *_: None)

    @settings(max_examples=50, database=None, derandomize=True, phases=[Phase.generate], print_blob=False)
    @given(data=st.data())
    def check(data: st.DataObject) -> None:
        check_fills(data, [fill_once])

    with pytest.raises(AssertionError, match="slot 'slot"):
        check()
