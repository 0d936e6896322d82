"""Hypothesis strategies for what graphglue is given: slots, ladders, batches, contracts, groups of ranks. Public.

A test of one's own prep draws a batch for its own runner, and compares::

    from hypothesis import given
    from graphglue.testing import strategies

    @given(batch=strategies.runner_batches(my_runner))
    def test_my_prep(batch): ...

========================  =====================================================================
``slots``, ``slot_tables``  one slot; all slots of a runner
``ladders``                 sizes as engines give them, unsorted and repeated
``contracts``               a contract that fits given slots
``batches``                 a batch for slots and a ladder, with any contents that the dtypes hold
``runner_batches``          a batch for a runner, with contents that its preps may index with
``sources``                 one slot's source, in any container and accepted dtype
``dp_groups``               what the ranks of a data-parallel group tell each other of one step
``dtypes``, ``numbers``, ``contents``  what they are made of
========================  =====================================================================

Everything drawn is legal; a test that wants a refusal breaks it itself. Contents come from one drawn
seed per tensor: examples shrink in slots, rows and dimensions, not value by value. Floats are numbers
that every float dtype holds exactly, and NaN, infinities and -0.0, so that a conversion is exact.

Sync: none, all tensors are on the CPU.
"""

from graphglue.testing.strategies.declarations import AXES, CaptureRows, contracts, ladders, slot_tables, slots
from graphglue.testing.strategies.groups import dp_groups
from graphglue.testing.strategies.runners import runner_batches
from graphglue.testing.strategies.steps import batches, sources
from graphglue.testing.strategies.values import DTYPES, FLOATS, INTEGERS, NARROWER, contents, dtypes, numbers

__all__ = [
    "AXES",
    "DTYPES",
    "FLOATS",
    "INTEGERS",
    "NARROWER",
    "CaptureRows",
    "batches",
    "contents",
    "contracts",
    "dp_groups",
    "dtypes",
    "ladders",
    "numbers",
    "runner_batches",
    "slot_tables",
    "slots",
    "sources",
]
