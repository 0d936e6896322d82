"""What a run of the demo found: counted while it runs, told when it ends."""

from __future__ import annotations

import json
import platform
from collections import Counter
from collections.abc import Iterable
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from statistics import median
from typing import Any

import torch

from graphglue.core.buckets import Bucket
from graphglue.core.routing import Decision, Route
from graphglue.demo.twin import Difference

MAX_KEPT_DIFFERENCES = 8
TAPE_NOTE = "CPU tape: it replays what a CUDA graph would, for truth and not for speed; time a GPU instead"
GRAPH_NOTE = "CUDA graphs: host time of the whole replay call, nothing awaited; the GPU's time is not in it"


@dataclass(frozen=True)
class RouteCount:
    """Steps that went one way, for one reason."""

    prep: str
    forward: str
    reason: str
    num_steps: int


@dataclass(frozen=True)
class StepsResult:
    """What one runner's steps came to.

    ``padded_share`` is pad rows / bucket rows over the steps with requests. The times are medians in
    microseconds over the same steps, those with prep and forward both replayed; None without any.
    """

    num_steps: int
    routes: tuple[RouteCount, ...]
    largest_batch: int
    padded_share: float
    glued_us: float | None
    eager_us: float | None
    num_tensors_compared: int
    num_tokens_compared: int
    num_tokens_compared_unpadded: int


@dataclass(frozen=True)
class DemoResult(StepsResult):
    """What happened. Truthy when nothing differed, in decode steps and in those that read the prompts.

    The counts of steps, their times and what was compared are those of decoding; ``prefill`` has the same
    for the prompts, whose rows are tokens.
    """

    num_requests: int
    num_prompt_tokens: int
    num_tokens: int
    prefill: StepsResult
    prefill_buckets: tuple[int, ...]
    timing_note: str
    num_differences: int
    differences: tuple[Difference, ...]
    arrivals: str
    fitting: str
    device: str
    dtype: str
    torch_version: str
    python_version: str
    seed: int

    def __bool__(self) -> bool:
        return self.num_differences == 0

    def to_json(self) -> str:
        """Spell the result as JSON text."""
        return json.dumps(asdict(self), indent=2)

    def write_json(self, path: str | Path) -> None:
        """Write the result to a file, as JSON."""
        Path(path).write_text(self.to_json() + "\n", encoding="utf-8")


@dataclass
class StepCount:
    """Count one runner's steps while the engine runs."""

    num_tensors_compared: int = 0
    num_tokens_compared: int = 0
    num_tokens_compared_unpadded: int = 0
    largest_batch: int = 0
    _routes: Counter[tuple[str, str, str]] = field(default_factory=Counter)
    _num_rows: int = 0
    _num_pad_rows: int = 0
    _glued_us: list[float] = field(default_factory=list)
    _eager_us: list[float] = field(default_factory=list)

    def note(self, decision: Decision, raw: Bucket, glued_us: float, eager_us: float) -> None:
        """Count one step where it went, its padding, and its times if prep and forward were replayed."""
        self.largest_batch = max(self.largest_batch, raw.requests)
        self._routes[decision.prep.value, decision.forward.value, decision.reason.value] += 1
        if raw.requests:
            self._num_rows += decision.bucket.tokens
            self._num_pad_rows += decision.bucket.tokens - raw.tokens
        if decision.prep is Route.GLUE and decision.forward is Route.GRAPH:
            self._glued_us.append(glued_us)
            self._eager_us.append(eager_us)

    def result(self) -> StepsResult:
        """Close the count."""
        return StepsResult(
            num_steps=self._routes.total(),
            routes=tuple(RouteCount(*way, num_steps) for way, num_steps in self._routes.most_common()),
            largest_batch=self.largest_batch,
            padded_share=self._num_pad_rows / self._num_rows if self._num_rows else 0.0,
            glued_us=median(self._glued_us) if self._glued_us else None,
            eager_us=median(self._eager_us) if self._eager_us else None,
            num_tensors_compared=self.num_tensors_compared,
            num_tokens_compared=self.num_tokens_compared,
            num_tokens_compared_unpadded=self.num_tokens_compared_unpadded,
        )


@dataclass
class Tally:
    """Count while the engine runs."""

    num_tokens: int = 0
    decode: StepCount = field(default_factory=StepCount)
    prefill: StepCount = field(default_factory=StepCount)
    num_differences: int = 0
    differences: list[Difference] = field(default_factory=list)

    def note_differences(self, differences: Iterable[Difference]) -> None:
        """Count all, and keep the first few."""
        for difference in differences:
            self.num_differences += 1
            if len(self.differences) < MAX_KEPT_DIFFERENCES:
                self.differences.append(difference)

    def result(self, *, device: torch.device, **said: Any) -> DemoResult:
        """Close the count; ``said`` are the result's fields that were known before the run."""
        decode = self.decode.result()
        return DemoResult(
            **{one.name: getattr(decode, one.name) for one in fields(decode)},
            num_tokens=self.num_tokens,
            prefill=self.prefill.result(),
            timing_note=TAPE_NOTE if device.type == "cpu" else GRAPH_NOTE,
            num_differences=self.num_differences,
            differences=tuple(self.differences),
            device=_name_of(device),
            torch_version=torch.__version__,
            python_version=platform.python_version(),
            **said,
        )


def _name_of(device: torch.device) -> str:
    if device.type == "cpu":
        return f"CPU ({platform.machine()}, one thread)"
    return torch.get_device_module(device).get_device_name(device)
