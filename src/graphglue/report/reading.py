"""Read what an engine dumped: ``json.dump(runner.stats(), file)``."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field

from graphglue.artifacts import read_json

Count = Annotated[int, Field(ge=0, lt=2**63)]
Seconds = Annotated[float, Field(ge=0, allow_inf_nan=False)]


class _Part(BaseModel):
    model_config = ConfigDict(frozen=True, extra="ignore")


class RouteStats(_Part):
    """The steps of one route, reason and bucket."""

    prep: str
    forward: str
    reason: str
    forward_reason: str | None
    bucket: tuple[Count, Count, Count] | None
    steps: Count
    real_tokens: Count
    bucket_tokens: Count
    padded_tokens: Count


class KeyMemory(_Part):
    """What a key holds, in bytes; None where nobody counts it."""

    pool_bytes: Count
    exec_bytes: Count | None
    outputs_bytes: Count
    freed_bytes: Count


class KeyStats(_Part):
    """One key."""

    mode: str
    bucket: tuple[Count, Count, Count]
    variant: str
    steps: Count
    states: dict[str, str]
    causes: dict[str, str]
    capture_seconds: Seconds
    memory: KeyMemory


class ShadowStats(_Part):
    """Samples of the shadow check by verdict."""

    sampled: Count
    passed: Count
    mismatched: Count
    failed: Count


class StagingStats(_Part):
    """Staged steps, and those of them that were taken."""

    staged: Count
    staged_taken: Count


class Stats(_Part):
    """What ``Runner.stats`` gives, as far as a report tells it."""

    version: Literal[1]
    rank: Count
    num_ranks: Count
    steps: Count
    real_tokens: Count
    bucket_tokens: Count
    padded_tokens: Count
    one_launch: Count
    launch_fallbacks: dict[str, Count]
    routes: tuple[RouteStats, ...]
    quarantines: dict[str, Count]
    shadow: ShadowStats | None
    staging: StagingStats | None
    keys: tuple[KeyStats, ...]


def read_stats(path: Path) -> Stats:
    """Read the stats of one runner.

    Raises:
        ConfigError: no such file, or something else in it.
    """
    return read_json(Stats, path, "is not what runner.stats() gives", "write it with json.dump(runner.stats(), file)")
