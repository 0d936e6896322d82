"""Random programs of tensor operations, some of them breaks; and their slow reference, run eagerly."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from hypothesis import strategies as st

from graphglue.graphs.segments import eager_break

ROWS, WIDTH, PAD = 5, 3, 11


def _read(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return x + (int(y.sum()) % 7 if x.shape[0] else 0)  # reads the host: only a break may


def _swap(x: torch.Tensor, y: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    both = torch.cat([y, x], 1)
    return both[:, :WIDTH], both[:, WIDTH:]


def _fill(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return x.copy_(y.flip(0) - x)


# name -> what it computes from two tensors of ROWS x WIDTH; the result is one such tensor, or two.
OPERATIONS: dict[str, Callable[[torch.Tensor, torch.Tensor], Any]] = {
    "add": lambda x, y: x + y * 3,
    "scan": lambda x, y: x.cumsum(0) - y,
    "mix": lambda x, y: x - y.sum(0, keepdim=True) % 5,
    "roll": lambda x, y: torch.where(y > 0, x.flip(0), y),
    "gather": lambda x, y: x.gather(0, y.long().abs() % max(1, x.shape[0])),
    "change": lambda x, y: x.add_(y),
    "fill": _fill,
    "swap": _swap,
    "copy": lambda x, y: (x.clone(), x - y),
    "columns": lambda x, y: x.t().contiguous().t() * 2 + y,
    "read": _read,
}


@dataclass(frozen=True)
class Step:
    """One operation on two of the values so far; as a break or not, cut to real rows or not."""

    name: str
    left: int
    right: int
    is_break: bool
    is_aligned: bool


def steps() -> st.SearchStrategy[list[Step]]:
    step = st.builds(
        Step,
        name=st.sampled_from(sorted(OPERATIONS)),
        left=st.integers(0, 30),
        right=st.integers(0, 30),
        is_break=st.booleans(),
        is_aligned=st.booleans(),
    )
    return st.lists(step, min_size=1, max_size=12)


def broken(step: Step) -> bool:
    return step.is_break or step.name == "read"


MARKED = {
    (name, aligned): eager_break(operation, row_aligned=("x", "y") if aligned else (), pad=PAD)
    for name, operation in OPERATIONS.items()
    for aligned in (False, True)
}


def marked(step: Step, x: torch.Tensor, y: torch.Tensor, real_rows: int) -> Any:
    """Call an operation as an engine would: through its mark if it is a break."""
    call = MARKED[step.name, step.is_aligned] if broken(step) else OPERATIONS[step.name]
    return call(x, y)


def reference(step: Step, x: torch.Tensor, y: torch.Tensor, real_rows: int) -> Any:
    """Call an operation with no library: a row-aligned break on real rows alone, its tails padded by hand."""
    operation = OPERATIONS[step.name]
    if not (broken(step) and step.is_aligned):
        return operation(x, y)
    result = operation(x[:real_rows], y[:real_rows])
    if step.name in ("change", "fill"):  # the argument itself is what it returns
        x[real_rows:] = PAD
        return x
    padded = []
    for part in result if isinstance(result, tuple) else (result,):
        whole = torch.full((ROWS, WIDTH), PAD, dtype=part.dtype, device=part.device)
        whole[:real_rows] = part
        padded.append(whole)
    return tuple(padded) if isinstance(result, tuple) else padded[0]


def run(program: list[Step], inputs: list[torch.Tensor], call: Callable[..., Any], real_rows: int) -> Any:
    """Run a program. A value that was dropped by then is None: its memory is used again."""
    values = [inputs[0] * 1, inputs[1] - inputs[0]]
    for step in program:
        left, right = values[step.left % len(values)], values[step.right % len(values)]
        if left is right and step.name in ("fill", "change"):
            right = right * 1
        result = call(step, left, right, real_rows)
        values.extend(result if isinstance(result, tuple) else (result,))
        values = values[-4:]  # older ones are dropped, so that their memory is used again
    inputs[2].add_(values[-1])
    return {"values": values, "state": inputs[2] * 2}
