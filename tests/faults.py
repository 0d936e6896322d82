"""Faults on purpose: an engine whose prep or forward raises at one operation, at one size, at one time.

The twin of a step is the same Python over a batch that is padded by hand; it shares no memory with the runner.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

import graphglue as gg
from graphglue.graphs import session
from tests.prefill import CONTRACT as PREFILL_CONTRACT
from tests.prefill import MAX_REQUESTS, Prefill, prep, sources
from tests.prefill import SLOTS as PREFILL_SLOTS

WARM_UP, RECORD, SERVE = "warm-up", "record", "serve"
NEVER = 10**9
LORA = frozenset({"lora"})


class Broken(Exception):
    """What a fault raises by default."""


@dataclass
class Fault:
    """Say where something raises.

    Attributes:
        part: "prep" or "forward".
        phase: while a key warms up, while it is recorded, or while it serves eagerly.
        size: the bucket's size: requests, and tokens of a prefill.
        at: the number of the operation, from 0.
        skip: how many such calls are let through before.
        error: what is raised.
        num_struck, num_seen: how often it has raised; how many operations the last such call had.
    """

    part: str
    phase: str
    size: int
    at: int = NEVER
    skip: int = 0
    error: Callable[[str], BaseException] = Broken
    num_struck: int = 0
    num_seen: int = 0


class Trip(TorchDispatchMode):
    """Count operations, and raise at one of them."""

    def __init__(self, fault: Fault) -> None:
        super().__init__()
        self._fault = fault
        fault.num_seen = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        fault = self._fault
        number, fault.num_seen = fault.num_seen, fault.num_seen + 1
        if number == fault.at:
            fault.num_struck += 1
            raise fault.error(f"operation {number}, {func}")
        return func(*args, **(kwargs or {}))


class Breakable:
    """A runner whose parts raise where its fault says so."""

    def __init__(self) -> None:
        self.fault: Fault | None = None
        self._calls = 0
        self._is_capturing = False
        self.runner: gg.Runner

    @contextmanager
    def tripping(self, part: str, size: int) -> Iterator[None]:
        """Raise inside, if the fault is for this part, phase and size."""
        phase = RECORD if session.recording() else WARM_UP if self._is_capturing else SERVE
        fault = self.fault
        if fault is None or (fault.part, fault.phase, fault.size) != (part, phase, size):
            yield
            return
        self._calls += 1
        if self._calls <= fault.skip:
            yield
            return
        with Trip(fault):
            yield

    def strike(self, fault: Fault | None) -> None:
        """Arm a fault, or none."""
        self.fault, self._calls = fault, 0

    @contextmanager
    def capturing(self) -> Iterator[None]:
        """Tell warm-ups from serving."""
        self._is_capturing = True
        try:
            yield
        finally:
            self._is_capturing = False

    def capture(self) -> None:
        """Capture all keys."""
        with self.capturing():
            self.runner.capture(progress=False)

    def maintain(self) -> list[int]:
        """Repair what can be; give the sizes that were."""
        with self.capturing():
            return sorted(self.size_of(key.bucket) for key in self.runner.maintain())

    def size_of(self, bucket: gg.Bucket) -> int:
        """Give the ladder size of a bucket."""
        raise NotImplementedError

    def states(self) -> dict[int, dict[str, str]]:
        """Give the states of prep and forward by size."""
        keys = self.runner.stats()["keys"]
        return {self.size_of(gg.Bucket(*key["bucket"])): key["states"] for key in keys}

    def causes(self, size: int) -> dict[str, str]:
        """Say why the parts of a size are quarantined."""
        keys = self.runner.stats()["keys"]
        return next(key["causes"] for key in keys if self.size_of(gg.Bucket(*key["bucket"])) == size)


PADS = {"lens": 1, "rows": 0, "ids": 0}
AXES = {"lens": "request", "rows": "request", "ids": "token"}
DECODE = gg.PrepContract(
    name="prep",
    reads={"lens": 1, "rows": 0},
    tables=("t",),
    outputs={"pages": "request", "last": "request", "cu": "offset"},
    modes={gg.Mode.DECODE},
)


class Decode(Breakable):
    """A decode engine: a prep and a forward of several operations each."""

    SIZES = (2, 4)

    def __init__(self, device: str = "cpu", contract: gg.PrepContract = DECODE, **more: Any) -> None:
        super().__init__()
        self.device = device
        self.t = (torch.arange(7 * 12, device=device) * 3).reshape(7, 12)
        self.home = {"t": self.t}
        registry = gg.Registry()
        registry.register(contract)(self.prep)
        made: dict[str, Any] = {
            "slots": [gg.Slot(name, axis=AXES[name], dtype=torch.int64, pad=pad) for name, pad in PADS.items()],
            "ladder": self.SIZES,
            "registry": registry,
            "prep": "prep",
            "tables": {"t": lambda: self.home["t"]},
            "forward": self.forward,
            "device": device,
        }
        self.runner = gg.Runner(**{**made, **more})

    def size_of(self, bucket: gg.Bucket) -> int:
        return bucket.requests

    def prep(self, view: Any) -> dict[str, torch.Tensor]:
        with self.tripping("prep", view.bucket.requests):
            last = view.lens - 1
            ends = torch.cumsum(view.lens, 0)
            return {
                "pages": view.tables.t[view.rows][:, ::4],
                "last": last,
                "cu": torch.nn.functional.pad(ends, (1, 0)),
            }

    def forward(self, view: Any, metadata: Mapping[str, torch.Tensor]) -> Any:
        with self.tripping("forward", view.bucket.requests):
            mixed = view.ids * 1000 + metadata["last"] * 10 + metadata["pages"].sum(1)
            return {"logits": mixed.to(torch.float64) / 7, "next": mixed % 97 + metadata["cu"][1:]}

    def draw(self, requests: int, start: int = 0) -> dict[str, list[int]]:
        """Give one step's values as lists."""
        rows = range(start, start + requests)
        return {
            "lens": [2 + row % 9 for row in rows],
            "rows": [1 + row % 6 for row in rows],
            "ids": [40 + row * 3 for row in rows],
        }

    def batch(self, requests: int, start: int = 0, **more: Any) -> gg.Batch:
        """Build a step."""
        return gg.Batch(requests, self.draw(requests, start), **more) if requests else gg.Batch.idle()

    def right(self, requests: int, start: int = 0, **more: Any) -> gg.Decision:
        """Run a step and hold it against its twin, bit for bit."""
        step = self.runner.replay(self.batch(requests, start, **more))
        rows = step.decision.bucket.requests
        values = self.draw(requests, start)
        padded = {name: [*values[name], *[pad] * rows][:rows] for name, pad in PADS.items()}
        tensors = {name: torch.tensor(numbers, device=self.device) for name, numbers in padded.items()}
        view = SimpleNamespace(**tensors, tables=SimpleNamespace(t=self.t), bucket=gg.Bucket(-1, -1, -1))
        metadata = self.prep(view)
        outputs = {name: leaf[:requests] for name, leaf in self.forward(view, metadata).items()}
        assert plain(step.metadata) == plain(metadata), f"metadata of {requests} requests from {start}"
        assert plain(step.outputs) == plain(outputs), f"outputs of {requests} requests from {start}"
        return step.decision

    def bytes(self) -> list[bytes]:
        """Give what the slots hold."""
        view = self.runner.arena.view(self.SIZES[-1])
        return [view[name].cpu().numpy().tobytes() for name in view]


class Segmented(Breakable, Prefill):
    """A prefill engine: segments with eager breaks between them."""

    SIZES = (4, 8)

    def __init__(self, device: str = "cpu", dtype: torch.dtype = torch.float64, **more: Any) -> None:
        Breakable.__init__(self)
        Prefill.__init__(self, device, dtype)
        registry = gg.Registry()
        registry.register(PREFILL_CONTRACT)(self.prep)
        config = gg.RunnerConfig(max_requests=MAX_REQUESTS)
        self.runner = gg.Runner(
            slots=PREFILL_SLOTS, ladder=self.SIZES, registry=registry, prep="prefill", forward=self.run, device=device,
            **{"config": config, **more},
        )  # fmt: skip

    def size_of(self, bucket: gg.Bucket) -> int:
        return bucket.tokens

    def prep(self, view: Any) -> Any:
        with self.tripping("prep", view.bucket.tokens):
            return prep(view)

    def run(self, view: Any, metadata: Any) -> Any:
        with self.tripping("forward", view.bucket.tokens):
            return self.forward(view, metadata)

    def attention(self, rows: torch.Tensor, view: Any, layer: int) -> torch.Tensor:
        with self.tripping("break", self.SIZES[-1]):
            return super().attention(rows, view, layer)

    def batch(self, tokens: int, start: int = 0) -> gg.Batch:
        """Build a prompt step of two requests."""
        given = sources([tokens - 1, 1], start)
        return gg.Batch(2, given, mode=gg.Mode.EXTEND, num_tokens=tokens)

    def right(self, tokens: int, start: int = 0) -> gg.Decision:
        """Run a step and hold it against what needs neither runner nor breaks."""
        step = self.runner.replay(self.batch(tokens, start))
        ids = torch.from_numpy(sources([tokens - 1, 1], start)["input_ids"])
        expected = self.reference([tokens - 1, 1], ids)
        same = torch.equal(step.outputs["rows"], expected) if self.table.is_cpu else torch.allclose(
            step.outputs["rows"], expected
        )  # fmt: skip
        assert same, f"outputs of {tokens} tokens from {start}"
        return step.decision


def plain(tree: Any) -> Any:
    """Give a tree of tensors as lists."""
    if isinstance(tree, torch.Tensor):
        return tree.tolist()
    return {name: plain(leaf) for name, leaf in tree.items()} if isinstance(tree, Mapping) else tree


def num_operations(engine: Breakable, part: str, phase: str) -> int:
    """Count the operations of a part in a phase, in a run without a fault; the engine is captured then."""
    fault = Fault(part, phase, engine.SIZES[-1])  # type: ignore[attr-defined]
    engine.strike(fault)
    engine.capture()
    engine.strike(None)
    return fault.num_seen
