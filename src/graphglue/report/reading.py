"""Read what an engine dumped: ``json.dump(runner.stats(), file)``."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict

from graphglue.artifacts import read_json


class _Part(BaseModel):
    model_config = ConfigDict(frozen=True, extra="ignore")


class RouteStats(_Part):
    """The steps of one route, reason and bucket."""

    prep: str
    forward: str
    reason: str
    forward_reason: str | None
    bucket: tuple[int, int, int] | None
    steps: int
    real_tokens: int
    bucket_tokens: int
    padded_tokens: int


class KeyMemory(_Part):
    """What a key holds, in bytes; None where nobody counts it."""

    pool_bytes: int
    exec_bytes: int | None
    outputs_bytes: int
    freed_bytes: int


class KeyStats(_Part):
    """One key."""

    mode: str
    bucket: tuple[int, int, int]
    variant: str
    steps: int
    states: dict[str, str]
    causes: dict[str, str]
    capture_seconds: float
    memory: KeyMemory


class Stats(_Part):
    """What ``Runner.stats`` gives, as far as a report tells it."""

    version: Literal[1]
    rank: int
    num_ranks: int
    steps: int
    real_tokens: int
    bucket_tokens: int
    padded_tokens: int
    one_launch: int
    launch_fallbacks: dict[str, int]
    routes: tuple[RouteStats, ...]
    quarantines: dict[str, int]
    shadow: dict[str, Any] | None
    staging: dict[str, Any] | None
    keys: tuple[KeyStats, ...]


def read_stats(path: Path) -> Stats:
    """Read the stats of one runner.

    Raises:
        ConfigError: no such file, or something else in it.
    """
    return read_json(Stats, path, "is not what runner.stats() gives", "write it with json.dump(runner.stats(), file)")
