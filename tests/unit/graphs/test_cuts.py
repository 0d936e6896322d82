"""What breaks are given is cut once for each memory, and never mixed up."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from graphglue.graphs.cuts import Cuts
from graphglue.graphs.segments import eager_break, record_segments
from graphglue.graphs.tape import Tape

BASE = torch.arange(24.0).view(6, 4)
OTHERS: dict[str, Callable[[], torch.Tensor]] = {
    "another memory": lambda: BASE.clone(),
    "another offset": lambda: BASE[:, 1:3],
    "another stride": lambda: BASE.view(-1)[:12].view(6, 2),
    "other rows": lambda: BASE[:5, :2],
    "another dtype": lambda: BASE.view(torch.int32)[:, :2],
    "a conjugate": lambda: torch.complex(BASE, BASE).conj(),
    "with gradients": lambda: BASE.detach()[:, :2].requires_grad_(),
}


def test_the_same_memory_is_cut_once() -> None:
    cuts = Cuts()
    place = cuts.place(BASE[:, :2], True)
    assert cuts.place(BASE[:, :2], True) == place
    assert cuts.head(place, 4) is cuts.head(place, 4)
    assert torch.equal(cuts.head(place, 4), BASE[:4, :2])
    assert torch.equal(cuts.tail(place, 4), BASE[4:, :2])
    for rows in (2, 4, 0, 6):
        assert (len(cuts.head(place, rows)), len(cuts.tail(place, rows))) == (rows, 6 - rows)


@pytest.mark.parametrize("name", OTHERS)
def test_what_differs_is_cut_by_itself(name: str) -> None:
    cuts, other = Cuts(), OTHERS[name]()
    places = cuts.place(BASE[:, :2], True), cuts.place(other, True)
    assert places[0] != places[1]
    assert torch.equal(cuts.head(places[1], 3), other[:3])


def test_what_is_the_callers_own_stays_by_itself() -> None:
    cuts = Cuts()
    first, second = torch.zeros(6), torch.zeros(6)
    second.set_(first)  # the same memory now, until its owner changes one of them
    places = cuts.place(first, False), cuts.place(second, False)
    assert places[0] != places[1]
    second.set_(torch.ones(6))
    assert bool(cuts.head(places[1], 2).all())
    assert not bool(cuts.head(places[0], 2).any())


def test_a_later_tensor_is_cut_as_well() -> None:
    cuts = Cuts()
    first = cuts.place(BASE, True)
    assert len(cuts.head(first, 2)) == 2
    second = cuts.place(BASE.clone(), True)
    assert len(cuts.tail(second, 2)) == 4


def test_arguments_in_every_place_of_a_call_are_cut() -> None:
    source, seen = torch.arange(8.0).view(4, 2), []

    @eager_break(row_aligned=("tree", "x", "named"), pad=-1)
    def attend(
        plain: int, tree: dict[str, torch.Tensor], x: torch.Tensor, *rest: int, named: torch.Tensor
    ) -> torch.Tensor:
        seen.append((plain, rest, len(tree["a"]), len(tree["b"]), len(x), len(named)))
        return tree["a"] + tree["b"] + x + named

    recording = record_segments(
        Tape(), lambda: attend(7, {"a": source * 2, "b": source}, source * 3, 8, 9, named=source * 4) + 0
    )
    for rows in (3, 1, 4, 0, 3):
        source.add_(1)
        recording.replay(rows)
        assert seen[-1] == (7, (8, 9), rows, rows, rows, rows)
        assert torch.equal(recording.outputs[:rows], (source * 10)[:rows])
        assert bool((recording.outputs[rows:] == -1).all())


def test_a_named_argument_is_cut_where_no_other_is() -> None:
    source = torch.arange(8.0).view(4, 2)
    twice = eager_break(lambda *, x: x * 2, row_aligned=("x",), pad=-1)
    recording = record_segments(Tape(), lambda: twice(x=source + 1) + 0)
    for rows in (3, 4, 1):
        recording.replay(rows)
        assert torch.equal(recording.outputs[:rows], ((source + 1) * 2)[:rows])
        assert bool((recording.outputs[rows:] == -1).all())
