"""Leave the process as the audit found it: random numbers, torch's settings, and what the runner itself holds.

Preps are called for real, and a faulty one may draw, set and write whatever it reaches. What a prep keeps for
itself it may change, as in any call: its own counters and caches know what was done to them.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from typing import Any, NamedTuple

import numpy as np
import torch

from graphglue.audit import garbage, holdings, modes
from graphglue.audit.garbage import Target
from graphglue.audit.subject import Subject
from graphglue.core.differences import bits_of
from graphglue.graphs import memory

_MAX_BYTES = 512 << 20  # of buffers that preps write, all together


class Setting(NamedTuple):
    """Something of the whole process that a prep may set."""

    read: Callable[[], Any]
    write: Callable[[Any], Any]


SETTINGS = (
    Setting(random.getstate, random.setstate),
    Setting(np.random.get_state, np.random.set_state),
    Setting(torch.get_rng_state, torch.set_rng_state),
    Setting(torch.get_default_dtype, torch.set_default_dtype),
    Setting(torch.get_num_threads, torch.set_num_threads),
    Setting(torch.get_deterministic_debug_mode, torch.set_deterministic_debug_mode),
    Setting(
        lambda: getattr(torch._GLOBAL_DEVICE_CONTEXT, "device_context", None),
        lambda context: setattr(torch._GLOBAL_DEVICE_CONTEXT, "device_context", context),
    ),
)


@contextmanager
def left_as_found(runner: Any, subjects: Iterable[Subject]) -> Iterator[None]:
    """Put back what the calls between change of settings, generators, and the runner's slots, tables and metadata.

    Sync: the device.
    """
    subjects = list(subjects)
    devices = [runner.arena.device.torch_device] if any(subject.on_gpu for subject in subjects) else []
    found = [(setting, setting.read()) for setting in SETTINGS]
    generators = [(one, one.get_state()) for subject in subjects for one in _generators_of(subject)]
    before = modes.modes_on()
    with memory.plain():
        held = _contents_of(runner, subjects)
    fork = torch.random.fork_rng(devices=devices)
    fork.__enter__()
    try:
        yield
    finally:
        modes.switch_off(before)
        with suppress(RuntimeError):  # a GPU that a prep has broken takes no state
            fork.__exit__(None, None, None)
        for setting, value in found:
            if not _same(setting.read(), value):
                setting.write(value)
        for generator, state in generators:
            generator.set_state(state)
        with suppress(RuntimeError), memory.plain():  # nor any contents
            _put_back(held, subjects)


def _same(one: Any, other: Any) -> bool:
    return one is other or repr(one) == repr(other) if not isinstance(one, torch.Tensor) else torch.equal(one, other)


def _generators_of(subject: Subject) -> list[torch.Generator]:
    return [one for code in (subject.prep, subject.plan) if code is not None for one in holdings.generators(code)]


class _Held(NamedTuple):
    """Memory and what stood there; ``always`` is the runner's own, the rest only where it holds metadata."""

    memory: torch.Tensor
    contents: torch.Tensor
    always: bool


def _contents_of(runner: Any, subjects: list[Subject]) -> list[_Held]:
    """Copy the runner's slots and tables, and the buffers that preps say they write."""
    arena = runner.arena
    slots = arena.targets(arena.space.bucket(arena.space.ladder.largest)).values()
    held = [_Held(tensor, tensor.clone(), True) for tensor in slots]
    pristine = subjects[0].pristine if subjects else {}
    held += [_Held(_once(table), _once(pristine[name]), True) for name, table in runner.tables.items()]
    left = _MAX_BYTES
    for target in _buffers_of(subjects):
        left -= target.memory.numel() * target.memory.element_size()
        if left >= 0:
            held.append(_Held(target.memory, target.memory.clone(), False))
    return held


def _once(tensor: torch.Tensor) -> torch.Tensor:
    """Give each element once of a tensor that repeats some."""
    for dim, (extent, stride) in enumerate(zip(tensor.shape, tensor.stride())):
        tensor = tensor.narrow(dim, 0, 1) if extent > 1 and stride == 0 else tensor
    return tensor


def _buffers_of(subjects: list[Subject]) -> list[Target]:
    named = [
        item
        for subject in subjects
        if subject.declared.writes
        for item in holdings.reachable(subject.prep)[0].items()
        if garbage.is_plain(item[1])
    ]
    return garbage.targets_of(named, garbage.read_only_ranges())[0] if named else []


def _put_back(held: list[_Held], subjects: list[Subject]) -> None:
    returned = set().union(*(subject.returned for subject in subjects))
    for one in held:
        if (one.always or memory.addresses(one.memory) & returned) and not _equal(one.memory, one.contents):
            memory.place(one.memory.untyped_storage(), one.memory).copy_(one.contents)


def _equal(one: torch.Tensor, other: torch.Tensor) -> bool:
    return torch.equal(bits_of(one), bits_of(other))
