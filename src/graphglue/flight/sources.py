"""Sources: what a step was handed and what came of it, kept beside its decision so that it can be repeated."""

from __future__ import annotations

import base64
import hashlib
import json
import operator
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from pydantic import ValidationError

from graphglue.config import RunnerConfig
from graphglue.core import trees
from graphglue.core.batch import Batch, Mode
from graphglue.core.buckets import Bucket
from graphglue.core.differences import bytes_of
from graphglue.core.routing import Decision
from graphglue.errors import ConfigError
from graphglue.flight.record import FlightBatch, FlightSource
from graphglue.flight.ring import FlightLedger
from graphglue.ledger import Ledger, Tally

Run = Callable[..., tuple[Any, Any, Decision, Any]]


class Taken(NamedTuple):
    """One batch as it was handed in, by value: the engine may overwrite and drop what it handed in."""

    requests: Any
    tokens: Any
    row_tokens: Any
    mode: Any
    variant: Any
    features: Any
    sources: dict[str, Any]
    prepared: bool

    @classmethod
    def of(cls, batch: Any, prepared: bool) -> Taken | None:
        """Copy what a batch hands in; None for what is no batch. Sync: the device, for each device source."""
        if not isinstance(batch, Batch) or not isinstance(batch.sources, Mapping):
            return None
        row_tokens = tuple(batch.row_tokens) if isinstance(batch.row_tokens, Sequence) else batch.row_tokens
        counts = (batch.num_requests, batch.num_tokens, row_tokens, batch.mode, repr(batch.variant), batch.features)
        return cls(*counts, {name: _copied(source) for name, source in batch.sources.items()}, prepared)

    def spelled(self) -> FlightBatch | None:
        """Spell it out; None where its counts are no counts."""
        try:
            return FlightBatch(
                requests=operator.index(self.requests),
                tokens=None if self.tokens is None else operator.index(self.tokens),
                row_tokens=self.row_tokens,
                mode=self.mode.value,
                variant=self.variant,
                features=tuple(sorted(self.features)),
                prepared=self.prepared,
                sources={str(name): _spelled(source) for name, source in self.sources.items()},
            )
        except (ValidationError, TypeError, AttributeError):
            return None


class SourcesLedger(FlightLedger):
    """Keep the last steps with their sources, and digests of their results."""

    def __init__(self, max_steps: int) -> None:
        super().__init__(max_steps)
        self._taken: Taken | None = None

    def keeping(self, run: Run) -> Run:
        """Have each step that is run taken in before, and its results behind. Sync: the device, at every step."""

        def run_keeping(lane: Any, writes: Any, batch: Any, forward: bool = True) -> tuple[Any, Any, Decision, Any]:
            self._taken = Taken.of(batch, not forward)
            results = run(lane, writes, batch, forward)
            self._attach(digests(results[0], results[1]))
            return results

        return run_keeping

    def note(self, tally: Tally, decision: Decision, raw: Bucket) -> None:
        """Count one step, and keep it with what was taken in for it."""
        super().note(tally, decision, raw)
        self._ring[-1] = (*self._ring[-1], self._taken, None)

    def raised(self, error: BaseException, batch: Any = None, forward: bool = True) -> None:
        """Keep that a step raised, with its batch."""
        taken, self._taken = self._taken or Taken.of(batch, not forward), None
        super().raised(error)
        self._ring[-1] = (*self._ring[-1], taken, None)

    def _attach(self, results: dict[str, str]) -> None:
        self._ring[-1] = (*self._ring[-1][:-1], results)
        self._taken = None


def open_ledger(config: RunnerConfig) -> Ledger:
    """Give the ledger that a config asks for; one without a flight recorder does nothing for it."""
    if not config.flight_recorder:
        return Ledger()
    return (SourcesLedger if config.record_sources else FlightLedger)(config.flight_recorder)


def kept_sources(run: Run, ledger: Ledger) -> Run:
    """Give what runs a runner's steps and keeps their sources, where its config asks for that."""
    return ledger.keeping(run) if isinstance(ledger, SourcesLedger) else run


def tensors_of(metadata: Any, outputs: Any) -> dict[str, torch.Tensor]:
    """Name every tensor of a step's results."""
    named = [("metadata", metadata), ("outputs", outputs)]
    leaves = [(f"{what}.{name}".strip("."), leaf) for what, tree in named for name, leaf in trees.named_leaves(tree)]
    return {name: leaf for name, leaf in leaves if isinstance(leaf, torch.Tensor)}


def digests(metadata: Any, outputs: Any) -> dict[str, str]:
    """Give a digest of every tensor of a step's results. Sync: the device."""
    return {name: _digest(leaf) for name, leaf in tensors_of(metadata, outputs).items()}


def _digest(tensor: torch.Tensor) -> str:
    plain = tensor.detach().cpu()
    content = hashlib.sha256(f"{plain.dtype} {tuple(plain.shape)} ".encode())
    content.update(bytes_of(plain).numpy().tobytes())
    return content.hexdigest()[:16]


def _copied(source: Any) -> Any:
    if isinstance(source, torch.Tensor):
        return _copied_tensor(source) if source.layout is torch.strided else source
    if isinstance(source, np.ndarray):
        return source.copy()
    return list(source) if isinstance(source, (list, tuple, range)) else source


def _copied_tensor(source: torch.Tensor) -> torch.Tensor:
    try:
        return source.detach().to("cpu", copy=True)
    except RuntimeError:  # it has no contents, or its device is beyond reading: that is for the step itself to say
        return torch.empty(0, device="meta")


def _spelled(source: Any) -> FlightSource:
    try:
        return _spelled_value(source)
    except (ValueError, RecursionError):  # numbers of thousands of digits, a list that holds itself
        return FlightSource(kind="unkept", value=f"a {type(source).__name__}")


def _spelled_value(source: Any) -> FlightSource:
    if isinstance(source, np.ndarray) and source.dtype.kind in "biuf":
        bits = base64.b64encode(source.tobytes()).decode()
        return FlightSource(kind="array", dtype=source.dtype.str, shape=source.shape, bits=bits)
    if isinstance(source, torch.Tensor) and source.layout is torch.strided and source.device.type == "cpu":
        bits = base64.b64encode(bytes_of(source).numpy().tobytes()).decode()
        dtype = str(source.dtype).removeprefix("torch.")
        return FlightSource(kind="tensor", dtype=dtype, shape=tuple(source.shape), bits=bits)
    plain_value = source.item() if isinstance(source, np.generic) else source
    if isinstance(plain_value, (bool, int, float)) or (isinstance(plain_value, list) and _is_plain(plain_value)):
        return FlightSource(kind="value", value=json.dumps(plain_value))
    return FlightSource(kind="unkept", value=f"a {type(source).__name__}")


def _is_plain(values: list[Any]) -> bool:
    return all(
        isinstance(value, (bool, int, float)) or (isinstance(value, (list, tuple)) and _is_plain(list(value)))
        for value in values
    )


def handed_in(source: FlightSource, slot: str) -> Any:
    """Give a source as it was handed in.

    Raises:
        ConfigError: it could not be kept, or what was kept is not whole.
    """
    if source.kind == "unkept":
        raise ConfigError(f"the source of slot {slot!r} was {source.value}, which is not kept: repeat another step")
    try:
        return json.loads(source.value or "null") if source.kind == "value" else _rows_of(source)
    except (ValueError, TypeError, RuntimeError) as error:  # whatever numpy, torch and json say to what is not whole
        raise ConfigError(
            f"the source of slot {slot!r} is no {source.kind} of dtype {source.dtype} and shape {source.shape} in the "
            f"record: {error}; it was changed since it was written"
        ) from error


def _rows_of(source: FlightSource) -> Any:
    content = bytearray(base64.b64decode(source.bits or "", validate=True))
    if source.kind == "array":
        return np.frombuffer(content, dtype=np.dtype(source.dtype)).reshape(source.shape or ())
    dtype = getattr(torch, source.dtype or "", None)
    if not isinstance(dtype, torch.dtype):
        raise TypeError("torch has no such dtype")
    flat = torch.frombuffer(content, dtype=torch.uint8) if content else torch.empty(0, dtype=torch.uint8)
    return flat.view(dtype).reshape(source.shape or ())


def batch_of(kept: FlightBatch, variants: Sequence[Any]) -> Batch:
    """Build the batch that was kept.

    Args:
        kept: the batch.
        variants: those of the runner that repeats it.

    Raises:
        ConfigError: a variant that the runner does not have, a mode that there is not, or a source that could not be
            kept.
    """
    named = {repr(variant): variant for variant in (None, *variants)}
    if kept.variant not in named:
        raise ConfigError(f"the step's variant is {kept.variant}; the runner has {sorted(named)}: pass variants=...")
    if kept.mode not in (modes := [mode.value for mode in Mode]):
        raise ConfigError(f"the step's mode is {kept.mode!r}; modes are {modes}: the record was changed")
    return Batch(
        kept.requests,
        {name: handed_in(source, name) for name, source in kept.sources.items()},
        Mode(kept.mode),
        kept.tokens,
        None if kept.row_tokens is None else list(kept.row_tokens),
        named[kept.variant],
        frozenset(kept.features),
    )
