"""Preps that are host-free, and still wrong on a padded batch: pad rows reach real ones, or what is shared.

Their glue equals their eager run, so only the comparison with the unpadded batch shows them.
"""

from __future__ import annotations

from typing import Any

import torch

from .specimens import CONTEXT, LADDER, Pair, Stage, both, counted, specimen

CPU = ("cpu",)


def real_only(view: Any, pad: Any) -> torch.Tensor:
    """Give the lengths with every pad row replaced."""
    return torch.where(counted(view.seq_lens) < view.num_real, view.seq_lens, pad)


# Reductions over rows.


@specimen("PAD-LEAK-2", "PAD-DERIVED-2", check="pad_image", evidence="room")
def minimum_over_rows(stage: Stage) -> Pair:
    def faulty(view: Any) -> Any:
        return {"room": view.seq_lens - view.seq_lens.min()}

    def twin(view: Any) -> Any:
        return {"room": view.seq_lens - real_only(view, CONTEXT).min()}

    return both(faulty, twin, {"room": "request"}, reads=("seq_lens", "num_real"))


@specimen("PAD-DERIVED-2", "PAD-LEAK-5", check="pad_image", evidence="total")
def total_with_pads(stage: Stage) -> Pair:
    def faulty(view: Any) -> Any:
        return {"total": view.seq_lens.sum()}

    def twin(view: Any) -> Any:
        return {"total": real_only(view, 0).sum()}

    return both(faulty, twin, {"total": "fixed"}, reads=("seq_lens", "num_real"))


@specimen("PAD-LEAK-2", check="pad_image", evidence="weight")
def normalised_over_rows(stage: Stage) -> Pair:
    def faulty(view: Any) -> Any:
        return {"weight": view.scores / (view.scores + 1).sum()}

    def twin(view: Any) -> Any:
        return {"weight": view.scores / 8}

    return both(faulty, twin, {"weight": "request"}, reads=("scores",))


@specimen("PAD-LEAK-2", check="pad_image", evidence="weight")
def softmax_over_rows(stage: Stage) -> Pair:
    def faulty(view: Any) -> Any:
        return {"weight": view.scores.softmax(0)}

    def twin(view: Any) -> Any:
        return {"weight": view.scores[:, None].expand(-1, 2).softmax(1)}

    return both(faulty, twin, {"weight": "request"}, reads=("scores",))


@specimen("PAD-LEAK-2", check="pad_image", evidence="shared")
def pad_that_is_not_a_number(stage: Stage) -> Pair:
    """0 times NaN is NaN: a product does not mask."""

    def faulty(view: Any) -> Any:
        real = (counted(view.scores) < view.num_real).to(torch.float32)
        return {"shared": view.scores * 0 + (view.scores * real).sum()}

    def twin(view: Any) -> Any:
        real = counted(view.scores) < view.num_real
        return {"shared": torch.where(real, view.scores, 0).amax() + torch.zeros_like(view.scores)}

    reads, pads = ("scores", "num_real"), {"scores": float("nan")}
    return both(faulty, twin, {"shared": "request"}, reads=reads, pads=pads)


# Orders and neighbours.


@specimen("PAD-LEAK-2", check="pad_image", evidence="sorted")
def sorted_with_pads(stage: Stage) -> Pair:
    def faulty(view: Any) -> Any:
        return {"sorted": view.seq_lens.sort().values}

    def twin(view: Any) -> Any:
        return {"sorted": real_only(view, CONTEXT + 1).sort().values}

    return both(faulty, twin, {"sorted": "request"}, reads=("seq_lens", "num_real"))


@specimen("PAD-LEAK-2", check="pad_image", evidence="shortest")
def argmin_with_pads(stage: Stage) -> Pair:
    def faulty(view: Any) -> Any:
        return {"shortest": view.seq_lens.argmin()}

    def twin(view: Any) -> Any:
        return {"shortest": (real_only(view, CONTEXT + 1) * 8 + counted(view.seq_lens)).amin().remainder(8)}

    return both(faulty, twin, {"shortest": "fixed"}, reads=("seq_lens", "num_real"))


@specimen("PAD-LEAK-2", check="pad_image", evidence="least")
def smallest_two(stage: Stage) -> Pair:
    def faulty(view: Any) -> Any:
        return {"least": view.seq_lens - view.seq_lens.topk(1, largest=False).values}

    def twin(view: Any) -> Any:
        return {"least": view.seq_lens - real_only(view, CONTEXT + 1).topk(1, largest=False).values}

    return both(faulty, twin, {"least": "request"}, reads=("seq_lens", "num_real"))


@specimen("PAD-DERIVED-2", check="pad_image", evidence="behind")
def sums_from_the_end(stage: Stage) -> Pair:
    def faulty(view: Any) -> Any:
        return {"behind": view.seq_lens.flip(0).cumsum(0).flip(0)}

    def twin(view: Any) -> Any:
        return {"behind": real_only(view, 0).flip(0).cumsum(0).flip(0)}

    return both(faulty, twin, {"behind": "request"}, reads=("seq_lens", "num_real"))


@specimen("PAD-LEAK-2", check="pad_image", evidence="before")
def wraps_around(stage: Stage) -> Pair:
    def faulty(view: Any) -> Any:
        return {"before": view.seq_lens.roll(1, 0)}

    def twin(view: Any) -> Any:
        return {"before": torch.nn.functional.pad(view.seq_lens, (1, 0))[:-1]}

    return both(faulty, twin, {"before": "request"})


@specimen("PAD-LEAK-1", "IDLE-RANK-2", check="pad_image", evidence="newest")
def last_row_for_the_last_request(stage: Stage) -> Pair:
    def faulty(view: Any) -> Any:
        return {"newest": view.seq_lens[-1:] + 0}

    def twin(view: Any) -> Any:
        return {"newest": view.seq_lens[(view.num_real - 1).clamp(min=0)[None]]}

    return both(faulty, twin, {"newest": "fixed"}, reads=("seq_lens", "num_real"))


# Counts that hold the pads as well.


@specimen("PAD-LEAK-5", "HOST-FROZEN-3", check="pad_image", evidence="count")
def bucket_for_the_real_count(stage: Stage) -> Pair:
    def faulty(view: Any) -> Any:
        return {"count": torch.full((), view.bucket.requests, device=view.seq_lens.device) + view.seq_lens[0]}

    def twin(view: Any) -> Any:
        return {"count": view.num_real + view.seq_lens[0]}

    return both(faulty, twin, {"count": "fixed"}, reads=("seq_lens", "num_real"))


@specimen("PAD-LEAK-5", check="pad_image", evidence="ones")
def pads_counted_as_requests(stage: Stage) -> Pair:
    def faulty(view: Any) -> Any:
        return {"ones": (view.seq_lens < 3).sum()}

    def twin(view: Any) -> Any:
        return {"ones": (real_only(view, CONTEXT) < 3).sum()}

    return both(faulty, twin, {"ones": "fixed"}, reads=("seq_lens", "num_real"))


@specimen("HOST-FROZEN-6", "HOST-FROZEN-9", check="pad_image", evidence="positions")
def branch_on_the_bucket(stage: Stage) -> Pair:
    """Legal in a key, and still wrong: a request's result may not depend on how far the batch is padded."""

    def faulty(view: Any) -> Any:
        return {"positions": view.seq_lens - 1 if view.bucket.requests > LADDER[1] - 1 else view.seq_lens + 0}

    def twin(view: Any) -> Any:
        return {"positions": view.seq_lens - 1 if view.mode.value == "decode" else view.seq_lens + 0}

    return both(faulty, twin, {"positions": "request"})


@specimen("META-SHAPE-2", "FEATURE-GUARD-6", check="pad_image", evidence="owner")
def one_width_for_all(stage: Stage) -> Pair:
    """Right for uniform requests, and declared for ragged ones."""

    def faulty(view: Any) -> Any:
        num_tokens, num_requests = view.bucket.tokens, view.bucket.requests
        tokens = torch.arange(num_tokens, device=view.indptr.device)
        return {"owner": tokens // -(-num_tokens // num_requests)}

    def twin(view: Any) -> Any:
        tokens = torch.arange(view.bucket.tokens, device=view.indptr.device)
        owner = torch.searchsorted(view.indptr[1:].contiguous(), tokens, right=True)
        return {"owner": owner.clamp(max=view.bucket.requests - 1)}

    fields = {"reads": ("indptr",), "width": 2, "contract": {"ragged": True}}
    return both(faulty, twin, {"owner": "token"}, **fields)


# Pads as indices.


@specimen("PAD-ALIAS-1", "PAD-ALIAS-2", check="pad_image", evidence="inverse")
def pad_as_an_index(stage: Stage) -> Pair:
    """Pad rows write where a real row has its place."""

    def faulty(view: Any) -> Any:
        inverse = torch.zeros_like(view.order)
        return {"inverse": inverse.scatter_reduce(0, view.order, counted(view.order) + 1, "amax")}

    def twin(view: Any) -> Any:
        num = view.order.shape[0]
        place = torch.where(counted(view.order) < view.num_real, view.order, num)
        inverse = torch.zeros(num + 1, dtype=torch.int64, device=view.order.device)
        return {"inverse": inverse.scatter_reduce(0, place, counted(view.order) + 1, "amax")[:num]}

    return both(faulty, twin, {"inverse": "request"}, reads=("order", "num_real"))


@specimen("PAD-ALIAS-1", check="pad_image", evidence="sharers")
def pad_is_a_real_index(stage: Stage) -> Pair:
    """Index 0 is the pad, and an adapter that requests use."""

    def faulty(view: Any) -> Any:
        same = view.order[:, None] == view.order[None, :]
        return {"sharers": same.sum(1)}

    def twin(view: Any) -> Any:
        same = view.order[:, None] == view.order[None, :]
        return {"sharers": (same & (counted(view.order) < view.num_real)).sum(1)}

    return both(faulty, twin, {"sharers": "request"}, reads=("order", "num_real"))


@specimen("PAD-DERIVED-1", check="pad_image", evidence=r"index|bound|range", devices=CPU)
def pad_leads_out_of_range(stage: Stage) -> Pair:
    """The pad is legal, what is derived of it is not; on a GPU this ends the process."""

    def faulty(view: Any) -> Any:
        window = view.tables.req_to_token[view.rows]
        return {"oldest": window.gather(1, (view.seq_lens - 2)[:, None])}

    def twin(view: Any) -> Any:
        window = view.tables.req_to_token[view.rows]
        return {"oldest": window.gather(1, (view.seq_lens - 2).clamp(min=0)[:, None])}

    fields = {"reads": ("seq_lens", "rows"), "tables": ("req_to_token",)}
    return both(faulty, twin, {"oldest": "request"}, **fields)


@specimen("META-SHAPE-5", "OVER-CAP-5", check="pad_image", evidence=r"bound|storage|wide")
def reads_beyond_the_bucket(stage: Stage) -> Pair:
    """The slot's storage goes on behind the bucket: rows of an earlier, larger step."""

    def faulty(view: Any) -> Any:
        whole = view.seq_lens.as_strided((LADDER[1],), (1,))
        return {"wide": view.seq_lens + whole.amax() * 0}

    def twin(view: Any) -> Any:
        return {"wide": view.seq_lens + view.seq_lens[0] * 0}

    return both(faulty, twin, {"wide": "request"})


@specimen("META-SHAPE-1", check="pad_image", evidence="positions")
def rows_of_another_size(stage: Stage) -> Pair:
    def faulty(view: Any) -> Any:
        return {"positions": torch.arange(LADDER[1], device=view.seq_lens.device) + view.seq_lens[0]}

    def twin(view: Any) -> Any:
        return {"positions": counted(view.seq_lens) + view.seq_lens[0]}

    return both(faulty, twin, {"positions": "request"})


@specimen("IDLE-RANK-2", "IDLE-RANK-3", check="pad_image", evidence="Zero|division", devices=CPU)
def divides_by_the_real_count(stage: Stage) -> Pair:
    """Declared for IDLE steps, where nothing is real."""

    def faulty(view: Any) -> Any:
        return {"share": CONTEXT // view.num_real + view.seq_lens}

    def twin(view: Any) -> Any:
        return {"share": CONTEXT // view.num_real.clamp(min=1) + view.seq_lens}

    fields = {"reads": ("seq_lens", "num_real"), "contract": {"idle": "glue"}}
    return both(faulty, twin, {"share": "request"}, **fields)
