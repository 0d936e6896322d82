"""The shadow check finds any changed byte, and accuses no correct engine.

Runners, preps and batches are those of ``test_padded_equals_eager``. The comparison by itself is held against
numpy's bytes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import assume, event, given, reject
from hypothesis import strategies as st

import graphglue as gg
from graphglue.audit.bits import Comparison, Shape, read_parting
from graphglue.core import trees
from graphglue.device.cpu import TorchFill
from graphglue.testing import strategies as ggst
from graphglue.units import Unit

from .test_padded_equals_eager import machine_batches, machines

pytestmark = pytest.mark.usefixtures("frozen_imports")

EVERY = gg.Shadow(first=0, every=1, on_mismatch="count")


def memory_of(tensor: torch.Tensor) -> np.ndarray:
    """Show the bytes of a dense tensor, in place."""
    return tensor.as_strided((tensor.numel(),), (1,)).view(torch.uint8).numpy()


# The comparison.


@st.composite
def tensors(draw: st.DrawFn) -> torch.Tensor:
    """Draw a tensor of any geometry, NaNs among its values."""
    dtype = draw(ggst.dtypes())
    shape = draw(st.lists(st.integers(0, 4), max_size=3))
    dense = draw(ggst.contents(dtype, shape))
    if dense.dim() < 2 or not draw(st.booleans()):
        return dense
    return dense.movedim(0, -1) if draw(st.booleans()) else dense[:, ::2]


def first_byte(ones: list[torch.Tensor], others: list[torch.Tensor]) -> tuple[int, tuple[int, ...]] | None:
    """Find the first differing element, one byte after the other."""
    for position, (one, other) in enumerate(zip(ones, others)):
        dense = [memory_of(tensor.contiguous().clone()) for tensor in (one, other)]
        for offset, (a, b) in enumerate(zip(*dense)):
            if a != b:
                element = offset // one.element_size()
                return position, tuple(int(i) for i in np.unravel_index(element, one.shape)) if one.dim() else ()
    return None


@given(groups=st.lists(st.lists(tensors(), max_size=4), min_size=1, max_size=3), data=st.data())
def test_the_first_differing_byte_of_each_group_is_found(groups: list[list[torch.Tensor]], data: st.DataObject) -> None:
    twins = [[tensor.contiguous().clone() for tensor in group] for group in groups]
    for number, group in enumerate(twins):
        whole = [tensor for tensor in group if tensor.numel()]
        for tensor in data.draw(st.lists(st.sampled_from(whole), max_size=3)) if whole else []:
            offset = data.draw(st.integers(0, tensor.nbytes - 1), label=f"byte of group {number}")
            memory_of(tensor)[offset] ^= data.draw(st.integers(1, 255) if tensor.dtype != torch.bool else st.just(1))
    records = Comparison(torch.device("cpu")).first_partings([list(zip(*pair)) for pair in zip(groups, twins)])
    for record, group, twin in zip(records, groups, twins):
        expected, found = first_byte(group, twin), read_parting(record, [Shape.of(tensor) for tensor in group])
        event(f"something differs: {expected is not None}")
        assert (expected is None) == (found is None)
        if expected is not None and found is not None:
            assert (found.position, found.index) == expected
            position, index = expected
            assert repr(found.seen) == repr(group[position][index].item())
            assert repr(found.expected) == repr(twin[position][index].item())


# The runner.


@contextmanager
def behind(owner: type, name: str, change: Callable[[Any, Any], None]) -> Iterator[None]:
    """Call ``change`` with the object and what its method returned."""
    method = getattr(owner, name)

    def changed(self: Any, *args: Any) -> Any:
        result = method(self, *args)
        change(self, result)
        return result

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(owner, name, changed)
        yield


def captured(data: st.DataObject) -> SimpleNamespace:
    machine = data.draw(machines(shadow=EVERY), label="machine")
    with torch.inference_mode(data.draw(st.booleans(), label="capture in inference mode")):
        machine.runner.capture()
    return machine


@given(data=st.data())
def test_correct_preps_never_mismatch(data: st.DataObject) -> None:
    machine = captured(data)
    sampled = 0
    for _ in range(data.draw(st.integers(1, 4), label="steps")):
        with torch.inference_mode(data.draw(st.booleans(), label="inference mode")):
            step = machine.runner.replay(data.draw(machine_batches(machine), label="batch"))
        sampled += step.decision.prep is gg.Route.GLUE
        if data.draw(st.booleans(), label="change the table"):
            machine.table.add_(1)
    stats = machine.runner.stats()["shadow"]
    event(f"steps sampled: {sampled}")
    assert (stats["sampled"], stats["passed"]) == (sampled, sampled), stats
    machine.runner.close()


@given(data=st.data())
def test_a_single_changed_byte_of_slots_or_metadata_is_found(data: st.DataObject) -> None:
    machine = captured(data)
    batch = data.draw(machine_batches(machine), label="batch")
    runner, decision = machine.runner, machine.runner.can_replay(batch)
    assume(decision.prep is gg.Route.GLUE)
    named = runner.view(decision.bucket)
    slots = {slot.name: named[slot.name] for slot in machine.slots}
    leaves = dict(trees.named_leaves(runner._capture.metadata(decision.key)))
    places = [("slot", name, tensor) for name, tensor in slots.items()]
    places += [("leaf", name, leaf) for name, leaf in leaves.items() if isinstance(leaf, torch.Tensor)]
    what, name, tensor = data.draw(st.sampled_from([place for place in places if place[2].numel()]), label="place")
    index = tuple(data.draw(st.integers(0, extent - 1), label="index") for extent in tensor.shape)
    byte = data.draw(st.integers(0, tensor.element_size() - 1), label="byte")

    def flip(*_: Any) -> None:
        element = tensor[index].reshape(1).clone()
        memory_of(element)[byte] ^= 1
        with torch.inference_mode():
            tensor[index] = element[0]

    with behind(TorchFill if what == "slot" else Unit, "run", flip):
        try:
            runner.replay(batch)
        except IndexError:  # the byte made an index that no table has, so the prep itself raised
            assert what == "slot"
            reject()
    stats = runner.stats()["shadow"]
    event(f"a byte of a {what} in {tensor.dtype}")
    runner.close()
    if tensor.is_floating_point() and tensor[index].isnan() and converts_floats(machine, batch, decision.bucket):
        assert stats["failed"] == 0  # a NaN that was converted, or computed from one, may have any payload
        return
    assert (stats["mismatched"], stats["failed"]) == (1, 0)
    (found,) = stats["mismatches"]
    assert (found["leaf"], found["prep"]) == (name, None if what == "slot" else machine.contract.name)
    slot = machine.runner.arena.slots[name] if what == "slot" else None
    has_rows = bool(index) and (slot is None or gg.Axis(slot.axis) is not gg.Axis.FIXED)
    if has_rows and found["row"] is not None:
        assert found["row"] == index[slot.row_dim if slot else 0]
    assert has_rows or found["row"] is None


def converts_floats(machine: SimpleNamespace, batch: gg.Batch, bucket: gg.Bucket) -> bool:
    """Tell whether any source of a step is of another float dtype than its slot."""
    writes = machine.runner.arena.bind(batch.sources, gg.Bucket(*machine.model.counts(batch)), bucket)
    sources = [(write.source, write.slot) for write in writes if isinstance(write.source, torch.Tensor)]
    return any(source.is_floating_point() and source.dtype != slot.dtype for source, slot in sources)
