"""Slow references of the shipped DSV4-like preps: plain loops over Python lists, for tests to compare with.

Nothing here is shared with the preps. A row is a pair: the request's row of ``req_to_token``, and the number of
positions it sees. Lists have the padded extents of a step; a step without padding is one of them.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

Row = tuple[int, int]
Table = Sequence[Sequence[int]]


def decode_rows(seq_lens: Sequence[int], requests: Sequence[int]) -> list[Row]:
    """List the rows of a decode step: each request once, at its whole length."""
    return [(request, length) for request, length in zip(requests, seq_lens, strict=True)]


def block_rows(seq_lens: Sequence[int], requests: Sequence[int], width: int) -> list[Row]:
    """List the rows of a verify or draft step: row j of a request sees its prefix and j + 1 tokens of the block."""
    found = []
    for request, prefix in zip(requests, seq_lens, strict=True):
        for j in range(width):
            found.append((request, prefix + 1 + j))
    return found


def ragged_rows(
    seq_lens: Sequence[int], requests: Sequence[int], row_tokens: Sequence[int], num_tokens: int
) -> list[Row]:
    """List the rows of a ragged verify step.

    Args:
        seq_lens: prefix of each request, the pad requests included.
        requests: row of each request, likewise.
        row_tokens: tokens of each real request.
        num_tokens: rows of the step; those behind the last block belong to the last request and see one position.
    """
    found = []
    for request, prefix, tokens in zip(requests, seq_lens, row_tokens):
        for j in range(tokens):
            found.append((request, prefix + 1 + j))
    while len(found) < num_tokens:
        found.append((requests[-1], 1))
    return found


def extend_rows(seq_lens: Sequence[int], requests: Sequence[int], width: int) -> list[Row]:
    """List the rows of a draft extend step: the last ``width`` positions of each request, none below length 1."""
    found = []
    for request, length in zip(requests, seq_lens, strict=True):
        for j in range(width):
            seen = length - width + 1 + j
            found.append((request, seen if seen > 1 else 1))
    return found


def causal(
    rows: Sequence[Row],
    out_cache_loc: Sequence[int],
    req_to_token: Table,
    full_to_swa: Sequence[int],
    page_size: int = 256,
    window: int = 128,
    alignment: int = 64,
    floor: int = 0,
) -> dict[str, list[Any]]:
    """Compute what the preps of ``graphglue.preps.causal`` do."""
    found: dict[str, list[Any]] = _lengths(rows, out_cache_loc)
    found |= {"page_table": [], "swa_page_indices": [], "swa_topk_lengths": []}
    for request, length in rows:
        found["page_table"].append(_pages(req_to_token[request], page_size))
        indices: list[int] = []
        position = length - 1
        while position >= floor and len(indices) < window:
            has_place = position < len(req_to_token[request])
            indices.append(full_to_swa[req_to_token[request][position] if has_place else 0])
            position -= 1
        found["swa_topk_lengths"].append(len(indices))
        found["swa_page_indices"].append(_filled(indices, window, alignment))
    return found


def draft(
    seq_lens: Sequence[int],
    requests: Sequence[int],
    width: int,
    out_cache_loc: Sequence[int],
    req_to_token: Table,
    full_to_swa: Sequence[int],
    page_size: int = 256,
    window: int = 128,
    alignment: int = 64,
) -> dict[str, list[Any]]:
    """Compute what the prep of ``graphglue.preps.draft`` does."""
    found: dict[str, list[Any]] = _lengths(block_rows(seq_lens, requests, width), out_cache_loc)
    found |= {"page_table": [], "swa_page_indices": [], "swa_topk_lengths": []}
    for number, (request, prefix) in enumerate(zip(requests, seq_lens, strict=True)):
        indices = []
        for position in range(prefix - window if prefix > window else 0, prefix):
            indices.append(full_to_swa[req_to_token[request][position]])
        for location in out_cache_loc[number * width : (number + 1) * width]:
            indices.append(full_to_swa[location])
        for _ in range(width):
            found["page_table"].append([req_to_token[request][0] // page_size])
            found["swa_topk_lengths"].append(len(indices))
            found["swa_page_indices"].append(_filled(indices, window + width, alignment))
    return found


def compression(
    rows: Sequence[Row],
    out_cache_loc: Sequence[int],
    req_to_token: Table,
    ratio: int,
    page_size: int = 256,
    top_k: int = 512,
    alignment: int = 64,
    index_page_size: int = 64,
) -> dict[str, list[Any]]:
    """Compute what the preps of ``graphglue.preps.compression`` do."""
    found: dict[str, list[Any]] = {"out_loc": [], "topk_clamp1": [], "sparse_lengths": []}
    found |= {"sparse_indices": [], "indexer_block_table": []}
    for (request, length), location in zip(rows, out_cache_loc, strict=True):
        completes = length % ratio == 0
        found["out_loc"].append(location // ratio if completes else -1)
        entries = length // ratio if length >= ratio else 1
        found["topk_clamp1"].append(entries)
        found["sparse_lengths"].append(entries if entries < top_k else top_k)
        found["sparse_indices"].append(_filled([], top_k, alignment))
        blocks, per_page = [], page_size // ratio // index_page_size
        for page in _pages(req_to_token[request], page_size):
            for block in range(per_page):
                blocks.append(page * per_page + block)
        found["indexer_block_table"].append(blocks)
    return found


def top_up(
    ends: Sequence[int],
    requests: Sequence[int],
    width: int,
    req_to_token: list[list[int]],
    num_pages: list[int],
    free_pages: Sequence[int],
    num_free: list[int],
    page_size: int = 256,
) -> dict[str, list[Any]]:
    """Do what the prep of ``graphglue.preps.top_up`` does, to the lists that are handed in.

    Args:
        ends: length of each request with its new tokens; the other arguments are the prep's slots and tables.
    """
    max_context = len(req_to_token[0])
    found: dict[str, list[Any]] = {"out_cache_loc": [], "num_unplaced": [], "num_missing_pages": [0]}
    for request, end in zip(requests, ends, strict=True):
        if request == 0:
            found["out_cache_loc"] += [0] * width
            found["num_unplaced"].append(0)
            continue
        last, most = (end if end < max_context else max_context), -(-width // page_size)
        while num_pages[request] * page_size < last:
            if not most or not num_free[0]:
                missing = -(-(last - num_pages[request] * page_size) // page_size)
                found["num_missing_pages"][0] += missing
                break
            num_free[0] -= 1
            for offset in range(page_size):
                position = num_pages[request] * page_size + offset
                if position < max_context:
                    req_to_token[request][position] = free_pages[num_free[0]] * page_size + offset
            num_pages[request] += 1
            most -= 1
        placed = 0
        for position in range(end - width, end):
            has_page = 0 <= position < max_context and position < num_pages[request] * page_size
            found["out_cache_loc"].append(req_to_token[request][position] if has_page else 0)
            placed += has_page
        found["num_unplaced"].append(width - placed)
    return found


def _lengths(rows: Sequence[Row], out_cache_loc: Sequence[int]) -> dict[str, list[Any]]:
    """Compute what causal and draft metadata have in common; tokens that are not there are written to location 0."""
    return {
        "raw_out_loc": [*out_cache_loc, *[0] * (len(rows) - len(out_cache_loc))],
        "seq_lens_casual": [length for _, length in rows],
        "positions_casual": [length - 1 for _, length in rows],
    }


def _pages(locations: Sequence[int], page_size: int) -> list[int]:
    return [locations[position] // page_size for position in range(0, len(locations), page_size)]


def _filled(indices: Sequence[int], least: int, alignment: int) -> list[int]:
    """Fill a row of indices up with -1, to the first multiple of the alignment that holds ``least``."""
    num_columns = alignment
    while num_columns < least:
        num_columns += alignment
    return [*indices, *[-1] * (num_columns - len(indices))]
