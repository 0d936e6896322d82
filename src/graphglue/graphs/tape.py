"""Record and replay on the CPU: as strict as a CUDA capture, for truth and not for speed.

While recording nothing is computed. Each operation runs once on fakes, which know shapes and storages
but hold no contents, and what the callable gets for the result is a *twin*: a real tensor at the address
that every replay will write. So a view of a twin, an in-place write and a tensor the callable keeps for
itself all behave as in a CUDA graph. A replay re-runs the operations in order and copies each new result
into its twin, so it is slower than the eager callable.

Memory that was not computed yet reads as NaN, or as a large integer: a value used too early shows.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Hashable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch._subclasses import fake_tensor
from torch.utils import _pytree as pytree

from graphglue.errors import CaptureError, ClosedError, DivergenceError, StaleTableError
from graphglue.graphs import collectives, guard, memory, session
from graphglue.graphs.tape_pool import Part, TapePool, poison, pool_of

# These make memory and no contents: a replay has nothing to do for them.
_UNFILLED = frozenset(
    f"aten::{name}"
    for name in ("empty", "empty_like", "empty_strided", "empty_permuted", "new_empty", "new_empty_strided")
)


def _geometry(tensor: torch.Tensor) -> tuple[Any, ...]:
    storage = tensor.untyped_storage()
    bits = (tensor.is_conj(), tensor.is_neg())
    shape = (tuple(tensor.size()), tensor.stride(), tensor.storage_offset())
    return (storage._cdata, storage.nbytes(), tensor.dtype, shape, bits)


@dataclass(slots=True)
class _Step:
    """One recorded operation: its frozen arguments, and the twins of its new results by position."""

    func: Any
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    twins: tuple[tuple[int, torch.Tensor], ...]
    meets: bool = False  # other processes, so its result is there once it was waited for

    def play(self) -> None:
        """Run the operation and write its results to where the recording said they would be."""
        result = self.func(*self.args, **self.kwargs)
        if self.meets:
            collectives.finished(self.func, result)
        leaves = [result] if isinstance(result, torch.Tensor) else pytree.tree_leaves(result)
        for position, twin in self.twins:
            seen = leaves[position]
            if seen.shape != twin.shape or seen.dtype != twin.dtype:
                raise DivergenceError(
                    f"{self.func} gave {seen.dtype} {tuple(seen.shape)}, its fake implementation"
                    f" {twin.dtype} {tuple(twin.shape)}; correct the fake implementation"
                )
            twin.copy_(seen)


class _Fakes:
    """Fake versions of real tensors: one fake storage for each real one, so that aliasing holds."""

    def __init__(self) -> None:
        self.mode = fake_tensor.FakeTensorMode()
        self.owners: dict[int, torch.UntypedStorage] = {}
        self._bases: dict[tuple[int, int], torch.Tensor] = {}
        self._views: dict[tuple[Any, ...], torch.Tensor] = {}

    def of(self, real: torch.Tensor) -> torch.Tensor:
        """Give the fake of a real tensor as its geometry is now."""
        if real.layout is not torch.strided:
            raise CaptureError(f"the tape holds strided tensors, not {real.layout}")
        key = _geometry(real)
        if key not in self._views:
            base = self._base(real.untyped_storage())
            with self.mode:
                whole = base[: base.numel() // real.itemsize * real.itemsize].view(real.dtype)
                fake = whole.as_strided(real.size(), real.stride(), real.storage_offset())
                fake = fake.conj() if real.is_conj() else fake
                self._views[key] = torch._neg_view(fake) if real.is_neg() else fake
        return self._views[key]

    def _base(self, storage: torch.UntypedStorage) -> torch.Tensor:
        key = (storage._cdata, storage.nbytes())
        if key not in self._bases:
            with self.mode:
                base = torch.empty(storage.nbytes(), dtype=torch.uint8, device="cpu")
            self._bases[key] = base
            # The strong reference keeps the real storage's identity from being used again.
            self.owners[base.untyped_storage()._cdata] = storage
        return self._bases[key]

    def follow(self, real: torch.Tensor, fake: torch.Tensor) -> None:
        """Resize a real ``out=`` argument as the operation resized its fake."""
        if real.size() != fake.size():
            self._views.pop(_geometry(real))
            real.resize_(fake.size())


class _Taping(guard.DispatchGuard):
    """Turn dispatched operations into steps, and give the callable twins for their results."""

    def __init__(self, rules: guard.Guard, pool: TapePool) -> None:
        super().__init__(rules)
        self._pool, self._part = pool, pool.enter()
        self.steps: list[_Step] = []
        self.num_bytes = 0
        self.fakes = _Fakes()
        # What operations allocated, and the part that they did it in.
        self.made: dict[int, tuple[torch.UntypedStorage, Part]] = {}
        self._aliases: dict[tuple[Any, ...], torch.Tensor] = {}

    def perform(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Record one operation."""
        if torch.Tag.inplace_view in func.tags:
            # Only the tensor object changes (unsqueeze_, set_, resize_), so it happens now, as on CUDA.
            with torch.inference_mode():
                return func(*args, **kwargs)
        with memory.plain():
            self._refuse_constant(func, args, kwargs)
            if collectives.is_in_place(func):
                frozen_args, frozen_kwargs = pytree.tree_map(self.freeze, (args, kwargs))
                self.steps.append(_Step(func, frozen_args, frozen_kwargs, (), meets=True))
                return collectives.started(func, args)
            return self._note(func, args, kwargs)

    def _refuse_constant(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Refuse a write into a baked host constant: each replay would start from the last one's result."""
        for position, argument in enumerate(func._schema.arguments):
            value = args[position] if position < len(args) else kwargs.get(argument.name)
            storage = value.untyped_storage() if isinstance(value, torch.Tensor) else None
            written = argument.alias_info is not None and argument.alias_info.is_write
            if written and storage is not None and storage._cdata in self._guard.baked:
                self._guard.refuse(str(func), "writes into a host constant", "start from torch.full")

    def _note(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        leaves, spec = pytree.tree_flatten((args, kwargs))
        fakes = [self._fake(leaf) for leaf in leaves]
        result = self._imitate(func, *pytree.tree_unflatten(fakes, spec))
        given = {id(fake): leaf for fake, leaf in zip(fakes, leaves) if isinstance(leaf, torch.Tensor)}
        for fake, leaf in zip(fakes, leaves):
            if isinstance(leaf, torch.Tensor):
                self.fakes.follow(leaf, fake)
        frozen_args, frozen_kwargs = pytree.tree_unflatten([self.freeze(leaf) for leaf in leaves], spec)
        outs, out_spec = pytree.tree_flatten(result)
        fresh: dict[int, torch.UntypedStorage] = {}
        reals = [self._twin(out, given, fresh) for out in outs]
        twins = tuple((i, self.freeze(reals[i])) for i, out in enumerate(outs) if _storage_id(out) in fresh)
        works = func._schema.is_mutable or not func._schema.returns or twins
        if works and func._schema.name not in _UNFILLED:
            self.steps.append(_Step(func, frozen_args, frozen_kwargs, twins, collectives.is_collective(func)))
        return pytree.tree_unflatten(reals, out_spec)

    def _fake(self, leaf: Any) -> Any:
        # A fake run draws no random numbers, and its kernels do not take the CPU's generator.
        if isinstance(leaf, torch.Generator):
            return None
        return self.fakes.of(leaf) if isinstance(leaf, torch.Tensor) else leaf

    def _imitate(self, func: Any, args: Any, kwargs: Any) -> Any:
        """Run an operation on fakes."""
        try:
            with self.fakes.mode:
                return func(*args, **kwargs)
        except fake_tensor.UnsupportedOperatorException:
            self._guard.refuse(
                str(func),
                "has no fake implementation, so its result's shape is not known without running it",
                "register one with torch.library.register_fake",
            )
        except (fake_tensor.DataDependentOutputException, fake_tensor.DynamicOutputShapeException) as error:
            self._guard.refuse(
                str(error.func),
                "reads contents on the host, which a replay can not do",
                "keep the value and the shape independent of contents",
            )

    def _twin(self, out: Any, given: dict[int, Any], fresh: dict[int, torch.UntypedStorage]) -> Any:
        """Give the real tensor of a fake result: an argument itself, a view of one, or new memory."""
        if not isinstance(out, torch.Tensor):
            return out
        if id(out) in given:
            return given[id(out)]
        key = _storage_id(out)
        storage = self.fakes.owners.get(key) or fresh.get(key)
        if storage is None:
            storage = fresh[key] = self._allocate(out)
        return memory.place(storage, out)

    def _allocate(self, like: torch.Tensor) -> torch.UntypedStorage:
        num_bytes = like.untyped_storage().nbytes()
        self.num_bytes += num_bytes
        storage = torch.full((num_bytes,), poison(like.dtype), dtype=torch.uint8, device="cpu").untyped_storage()
        self.made[storage._cdata] = storage, self._part
        return storage

    def freeze(self, leaf: Any) -> Any:
        """Give an alias that later rebinding, ``.data =`` or in-place reshaping of ``leaf`` won't touch."""
        if not isinstance(leaf, torch.Tensor):
            return leaf
        key = _geometry(leaf)
        if key not in self._aliases:
            self._aliases[key] = memory.place(leaf.untyped_storage(), leaf)
        return self._aliases[key]

    def begin(self) -> None:
        """Begin a part behind all that was recorded so far."""
        self._part = self._pool.enter(self._part.owner)

    def finish(self, outputs: Any) -> TapeRecording:
        """Make the recording of what was noted."""
        with memory.plain():
            frozen = pytree.tree_map(self.freeze, outputs)
        storages = [tensor.untyped_storage() for tensor in self._aliases.values()]
        unique = {storage._cdata: storage for storage in storages}.values()
        for key, leaf in {_storage_id(leaf): leaf for leaf in pytree.tree_leaves(frozen)}.items():
            if key in self.made:
                self.made[key][1].gives(leaf)
        recording = TapeRecording(tuple(self.steps), frozen, self.num_bytes, unique, self._part)
        self.steps, self.num_bytes, self._aliases = [], 0, {}  # a next segment starts anew
        return recording


def _storage_id(out: Any) -> int:
    return out.untyped_storage()._cdata if isinstance(out, torch.Tensor) else -1


def _written(steps: tuple[_Step, ...]) -> frozenset[int]:
    """List the addresses of the storages that steps write: new results, and arguments changed in place."""
    found = {twin.untyped_storage().data_ptr() for step in steps for _, twin in step.twins}
    for step in steps:
        schema, unsaid = step.func._schema, collectives.is_in_place(step.func)
        for position, argument in enumerate(schema.arguments):
            written = argument.alias_info is not None and argument.alias_info.is_write
            if not written and not (unsaid and position == 0):
                continue
            given = step.args[position] if position < len(step.args) else step.kwargs.get(argument.name)
            found |= memory.addresses(given)
    return frozenset(found)


def _read_first(steps: tuple[_Step, ...]) -> frozenset[int]:
    """List the addresses of the storages that steps read before any step has written them."""
    written: set[int] = set()
    read: set[int] = set()
    for step in steps:
        changed = _written((step,))
        read |= memory.addresses((step.args, step.kwargs)) - written - changed
        written |= changed
    return frozenset(read)


@contextmanager
def _default_dtype(dtype: torch.dtype) -> Iterator[None]:
    before = torch.get_default_dtype()
    if before == dtype:
        yield
        return
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


class TapeRecording:
    """A recorded callable. Its outputs, and all memory between, stay at their addresses."""

    def __init__(
        self,
        steps: tuple[_Step, ...],
        outputs: Any,
        num_bytes: int,
        storages: Iterable[torch.UntypedStorage],
        part: Part,
    ) -> None:
        self._steps: tuple[_Step, ...] | None = steps
        self._part = part
        self._outputs = outputs
        self._num_bytes = num_bytes
        self._addresses = tuple((storage, storage.data_ptr()) for storage in storages)
        self._written = _written(steps)
        self.reads = _read_first(steps)
        self._default_dtype = torch.get_default_dtype()

    @property
    def outputs(self) -> Any:
        """What the callable returned; computed by a replay."""
        self._opened()
        return self._outputs

    @property
    def num_bytes(self) -> int:
        """Memory in bytes that this recording added."""
        return self._num_bytes

    @property
    def num_steps(self) -> int:
        """How many operations a replay runs."""
        return len(self._opened())

    def computes(self, tensor: torch.Tensor) -> bool:
        """Tell whether a recorded operation writes the memory of a tensor."""
        return tensor.untyped_storage().data_ptr() in self._written

    def replay(self) -> None:
        """Run the recorded operations in order. Sync: none (the CPU computes at once).

        What recordings made later in the same pool gave is spoiled.

        Raises:
            StaleTableError: memory that the recording uses was reallocated by ``resize_``.
        """
        steps = self._opened()
        session.check_replayable()
        if any(storage.data_ptr() != address for storage, address in self._addresses):
            raise StaleTableError("a tensor that this recording uses was resized and moved; record it again")
        self._part.replays()
        # All tensors of the steps are normal ones: inference mode only spares autograd. What the caller set
        # for his own operations (autocast, the default dtype) must not reach these.
        with torch.inference_mode(), torch.autocast("cpu", enabled=False), _default_dtype(self._default_dtype):
            for step in steps:
                step.play()

    def close(self) -> None:
        """Drop the steps, the outputs and their memory. Calling it twice is fine."""
        self._steps, self._outputs, self._addresses = None, None, ()

    def _opened(self) -> tuple[_Step, ...]:
        if self._steps is None:
            raise ClosedError("this recording was closed; record the callable again")
        return self._steps


class Tape:
    """Record callables on the CPU.

    Args:
        pool: what tells the engine's memory pool from others; recordings of one pool may overwrite each other's
            outputs. A pool of the tape's own by default.
    """

    def __init__(self, pool: Hashable = None) -> None:
        self._pool = pool_of(pool)

    @property
    def device(self) -> torch.device:
        """The CPU."""
        return torch.device("cpu")

    @contextmanager
    def session(self) -> Iterator[None]:
        """Enclose warm-ups and recordings: garbage collection is held back. Sync: none."""
        gc.collect()
        with session.alone("session"), session.held_collection():
            yield

    def finish(self) -> None:
        """Return at once: the CPU has finished what was called. Sync: none."""

    def record(self, run: Callable[[], Any], *, strict: bool = True) -> TapeRecording:
        """Record ``run``. The tape is always strict, because it can not see what it does not check.

        Raises:
            CaptureError: the callable did something that cannot be replayed, or raised.
        """
        with session.alone("recording"):
            rules = guard.Guard(self.device)
            taping = _Taping(rules, self._pool)
            outputs = rules.call(run, guard.FunctionGuard(rules), taping)
            return taping.finish(outputs)

    @property
    def pool(self) -> TapePool:
        """The memory pool of all recordings."""
        return self._pool

    def parts(self, strict: bool = True) -> Any:
        """Give what records the segments of one callable. The tape is always strict."""
        from graphglue.graphs.tape_segments import TapeParts

        return TapeParts(self)
