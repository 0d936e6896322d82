"""The real extents that one key serves: all of them where they are few, both ends and some between where not."""

from __future__ import annotations

from graphglue.core.buckets import Bucket
from graphglue.core.keys import Key, KeySpace

_BETWEEN = 6  # counts between the ends of a bucket that is too large to try all
IDLE = Bucket(0, 0, 0)


def extents_served(key: Key, space: KeySpace, every: int) -> list[Bucket]:
    """List real extents with requests in them, up to ``every`` counts of requests (of tokens for EXTEND).

    Uneven requests, which have no common width, come with several token counts for each number of requests.
    """
    bucket = key.bucket
    if space.counts_tokens:
        return [
            Bucket(requests, tokens, 0)
            for tokens in _sample(bucket.tokens, every)
            for requests in sorted({1, min(tokens, bucket.requests)})
        ]
    counts = _sample(bucket.requests, every)
    if key.row_tokens:
        return [Bucket(requests, requests * key.row_tokens, key.row_tokens) for requests in counts]
    return [
        Bucket(requests, tokens, 0)
        for requests in counts
        for tokens in sorted({requests + 1, (requests + 1 + bucket.tokens) // 2, bucket.tokens})
        if 1 < requests < tokens <= bucket.tokens
    ]


def fits(raw: Bucket, bucket: Bucket) -> bool:
    """Tell whether a bucket covers real extents."""
    return raw.requests <= bucket.requests and raw.tokens <= bucket.tokens


def _sample(count: int, every: int) -> list[int]:
    """List 1 to ``count``; where that is more than ``every``, both ends and some between."""
    if count <= every:
        return list(range(1, count + 1))
    between = {1 + (count - 1) * step // (_BETWEEN + 1) for step in range(1, _BETWEEN + 1)}
    return sorted({1, 2, count - 1, count} | between)
