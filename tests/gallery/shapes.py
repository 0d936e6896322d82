"""Preps that need a shape from contents: a recording has fixed shapes."""

from __future__ import annotations

from typing import Any

import torch

from .specimens import Made, Pair, Stage, both, columns, specimen


@specimen("HOST-FROZEN-3", check="trace", evidence="nonzero")
def nonzero(stage: Stage) -> Pair:
    def faulty(view: Any) -> Any:
        long = torch.nonzero(view.seq_lens > 8)
        return {"count": torch.full_like(view.seq_lens, long.shape[0])}

    def twin(view: Any) -> Any:
        return {"count": (view.seq_lens > 8).to(torch.int64)}

    return both(faulty, twin, {"count": "request"})


@specimen("META-SHAPE-6", check="trace", evidence=r"index|mask|getitem|nonzero")
def mask_index(stage: Stage) -> Pair:
    def faulty(view: Any) -> Any:
        column_of = columns(view).expand(view.seq_lens.shape[0], -1)
        inside = column_of[column_of < view.seq_lens[:, None]]
        return {"flat": inside}

    def twin(view: Any) -> Any:
        column_of = columns(view).expand(view.seq_lens.shape[0], -1)
        return {"flat": torch.where(column_of < view.seq_lens[:, None], column_of, -1)}

    faulty_outputs: dict[str, str] = {}  # its rows can not be declared at all
    return Pair(Made(faulty, faulty_outputs), Made(twin, {"flat": "request"}))


@specimen("META-SHAPE-6", check="trace", evidence=r"masked_select")
def masked_select(stage: Stage) -> Pair:
    def faulty(view: Any) -> Any:
        long = torch.masked_select(view.seq_lens, view.seq_lens > 8)
        return {"total": long.sum() + view.seq_lens}

    def twin(view: Any) -> Any:
        return {"total": torch.where(view.seq_lens > 8, view.seq_lens, 0) + view.seq_lens}

    return both(faulty, twin, {"total": "request"})


@specimen("HOST-FROZEN-3", check="trace", evidence=r"unique")
def unique(stage: Stage) -> Pair:
    def faulty(view: Any) -> Any:
        adapters, place = torch.unique(view.rows, return_inverse=True)
        return {"segment": place * adapters.shape[0]}

    def twin(view: Any) -> Any:
        return {"segment": view.rows * 6}

    return both(faulty, twin, {"segment": "request"}, reads=("rows",))


@specimen("META-SHAPE-2", check="trace", evidence=r"repeat_interleave")
def repeat_interleave(stage: Stage) -> Pair:
    def faulty(view: Any) -> Any:
        counts = torch.ones_like(view.rows)
        return {"owner": torch.repeat_interleave(view.rows, counts)}

    def twin(view: Any) -> Any:
        counts = torch.ones_like(view.rows)
        return {"owner": torch.repeat_interleave(view.rows, counts, output_size=view.rows.shape[0])}

    return both(faulty, twin, {"owner": "token"}, reads=("rows",))


@specimen("META-SHAPE-6", check="trace", evidence=r"bincount")
def bincount(stage: Stage) -> Pair:
    def faulty(view: Any) -> Any:
        used = torch.bincount(view.rows)
        return {"sharers": used[view.rows].clamp(max=1)}

    def twin(view: Any) -> Any:
        return {"sharers": torch.ones_like(view.rows)}

    return both(faulty, twin, {"sharers": "request"}, reads=("rows",))


@specimen("META-SHAPE-6", check="trace", evidence=r"one_hot")
def one_hot(stage: Stage) -> Pair:
    def faulty(view: Any) -> Any:
        return {"hot": torch.nn.functional.one_hot(view.rows).sum(1)}

    def twin(view: Any) -> Any:
        return {"hot": torch.nn.functional.one_hot(view.rows, num_classes=6).sum(1)}

    return both(faulty, twin, {"hot": "request"}, reads=("rows",))


@specimen("META-SHAPE-6", check="trace", evidence=r"index_put|mask|setitem")
def write_through_a_mask(stage: Stage) -> Pair:
    def faulty(view: Any) -> Any:
        positions = view.seq_lens.clone()
        positions[positions > 8] = torch.arange(positions.shape[0], device=positions.device)[positions > 8]
        return {"positions": positions}

    def twin(view: Any) -> Any:
        places = torch.arange(view.seq_lens.shape[0], device=view.seq_lens.device)
        return {"positions": torch.where(view.seq_lens > 8, places, view.seq_lens)}

    return both(faulty, twin, {"positions": "request"})
