"""The published package for graphs with eager breaks, where its wheel is unpacked: one model through both.

    pip download --no-deps breakable-cuda-graphs==0.1.0 && unzip -q breakable_cuda_graphs-*.whl -d .peers/breakable

The folder is ignored by git; GRAPHGLUE_PEER_BREAKABLE names another one. The package captures on CUDA only. It does
not cut arguments to real rows, so its break does that by itself, from the same per-step state that ours has.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch

from graphglue.bench.breakable import MODULE, captured, load_breakable
from graphglue.device.base import open_device
from graphglue.graphs.segments import SegmentedRecording, eager_break, record_segments

FOLDER = Path(os.environ.get("GRAPHGLUE_PEER_BREAKABLE", Path(__file__).parents[2] / ".peers" / "breakable"))
HAS_WHEEL = (FOLDER / f"{MODULE}.py").is_file()
needs_wheel = pytest.mark.skipif(not HAS_WHEEL, reason=f"needs the wheel of breakable-cuda-graphs 0.1.0 in {FOLDER}")
needs_gpu = pytest.mark.skipif(
    not torch.cuda.is_available() and os.environ.get("GRAPHGLUE_REQUIRE_GPU") != "1",
    reason="needs a GPU to capture CUDA graphs",
)
ROWS, WIDTH, NUM_LAYERS, PAD = 24, 32, 4, 0.25
LENGTHS = ([24], [5, 19], [1, 1, 22], [7, 6, 4, 3, 4])  # of requests; all rows are real
CUT = ([23], [5, 9], [1], [2, 3, 1], [12, 12], [17, 4])

Attend = Callable[..., None]


@dataclass
class Step:
    """Per-step state that the break reaches: the lengths of this step's requests."""

    lengths: list[int] = field(default_factory=lambda: [ROWS])

    @property
    def real_rows(self) -> int:
        return sum(self.lengths)


class Model:
    """Layers of norm, projection, attention over variable lengths, residual."""

    def __init__(self, device: torch.device) -> None:
        generator = torch.Generator().manual_seed(0)
        drawn = torch.randn(NUM_LAYERS, 2, WIDTH, 3 * WIDTH, generator=generator).to(device) * WIDTH**-0.5
        self.weights = [(layer[0], layer[1, :, :WIDTH].contiguous()) for layer in drawn]
        self.inputs = torch.zeros(ROWS, WIDTH, device=device)
        self.step = Step()

    def feed(self, seed: int, lengths: list[int]) -> None:
        """Give the next step: hidden rows, padded ones of zeros, and the lengths of its requests."""
        self.step.lengths = lengths
        values = torch.randn(ROWS, WIDTH, generator=torch.Generator().manual_seed(seed))
        values[self.step.real_rows :] = 0
        self.inputs.copy_(values)

    def run(self, attend: Attend) -> torch.Tensor:
        hidden = self.inputs
        for layer, (entry, leave) in enumerate(self.weights):
            normed = torch.nn.functional.layer_norm(hidden, (WIDTH,))
            queries, keys, values = (normed @ entry).split(WIDTH, dim=1)
            attended = torch.empty_like(hidden)
            attend(queries, keys, values, attended, layer)
            hidden = hidden + torch.nn.functional.silu(attended @ leave)
        return hidden

    def attend(self, queries: Any, keys: Any, values: Any, into: Any, layer: int) -> None:
        """Attend within each request, whose lengths the host reads: no graph could hold it."""
        assert len(queries) == self.step.real_rows
        begin = 0
        for length in self.step.lengths:
            rows = slice(begin, begin + length)
            scores = (queries[rows] @ keys[rows].T) * (layer + 1) / WIDTH
            into[rows] = scores.softmax(1) @ values[rows]
            begin += length

    def attend_padded(self, queries: Any, keys: Any, values: Any, into: Any, layer: int) -> None:
        """Cut to the real rows by hand and pad the rest: what ours declares."""
        real = self.step.real_rows
        self.attend(queries[:real], keys[:real], values[:real], into[:real], layer)
        into[real:].fill_(PAD)

    def eager(self) -> torch.Tensor:
        return self.run(self.attend_padded).clone()

    def segmented(self) -> SegmentedRecording:
        """Record it through graphglue."""
        aligned = ("queries", "keys", "values", "into")
        marked = eager_break(row_aligned=aligned, writes=("into",), pad=PAD)(self.attend)
        recorder = open_device(self.inputs.device).recorder()
        with recorder.session():
            for _ in range(2):
                self.run(marked)
            recorder.finish()
            return record_segments(recorder, lambda: self.run(marked))


@pytest.fixture(autouse=True)
def no_grad() -> Any:
    with torch.no_grad():
        yield


def check_ours(model: Model, recording: SegmentedRecording) -> None:
    for seed, lengths in enumerate([*LENGTHS, *CUT, *LENGTHS]):
        model.feed(seed, lengths)
        expected = model.eager()
        recording.replay(model.step.real_rows, check=True)
        assert torch.equal(recording.outputs, expected), lengths
        assert bool(expected.isfinite().all())


def test_ours_equals_eager_on_the_tape() -> None:
    model = Model(torch.device("cpu"))
    check_ours(model, model.segmented())


def test_the_comparison_sees_rows_lengths_and_order() -> None:
    model = Model(torch.device("cpu"))
    model.feed(0, [5, 9])
    expected = model.eager()
    for lengths in ([9, 5], [5, 10], [14]):
        model.step.lengths = lengths
        assert not torch.equal(model.eager(), expected)
    model.step.lengths = [5, 9]
    model.weights.reverse()
    assert not torch.equal(model.eager(), expected)


@needs_wheel
def test_the_package_has_what_the_bench_calls() -> None:
    peer = load_breakable(FOLDER)
    assert peer.__version__ == "0.1.0"
    assert {"BreakableCUDAGraph", "breakable_graph", "no_graph"} <= set(peer.__all__)


@needs_wheel
@needs_gpu
def test_one_model_through_both_gives_the_same_bits() -> None:
    peer, model = load_breakable(FOLDER), Model(torch.device("cuda", 0))
    recording = model.segmented()
    check_ours(model, recording)
    model.feed(0, [ROWS])
    results: list[torch.Tensor] = []
    replay = captured(peer, lambda: results.append(model.run(peer.no_graph(model.attend_padded))))
    for seed, lengths in enumerate([*LENGTHS, *CUT, *LENGTHS], start=100):
        model.feed(seed, lengths)
        expected = model.eager()
        replay()
        theirs = results[0].clone()
        recording.replay(model.step.real_rows)
        assert torch.equal(theirs, expected), lengths
        assert torch.equal(recording.outputs, theirs), lengths


@needs_wheel
@needs_gpu
def test_its_breaks_may_return_no_tensor_and_ours_may() -> None:
    """What a user of the package rewrites: a break that returns its result."""
    peer, device = load_breakable(FOLDER), torch.device("cuda", 0)
    source, recorder = torch.arange(6.0, device=device), open_device(device).recorder()
    doubled = eager_break(lambda x: x * 2)
    with recorder.session():
        recording = record_segments(recorder, lambda: doubled(source + 1) - 1)
    source.add_(3)
    recording.replay()
    assert torch.equal(recording.outputs, (source + 1) * 2 - 1)
    with pytest.raises(RuntimeError, match="returns one or more CUDA tensors"):
        captured(peer, lambda: peer.no_graph(lambda x: x * 2)(source + 1) - 1)
    torch.cuda.synchronize()
