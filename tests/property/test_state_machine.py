"""Drive a runner through everything an engine may do to it, beside a model that knows only plain eager.

Every step either equals the model bit for bit, metadata and outputs, or is refused with a reason and has
written nothing. Every decision is the one of the page (``test_routing``) for the states the model is in.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import event, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, rule

import graphglue as gg
from graphglue.testing import strategies as ggst

from .test_fill import BREAKS, Model, bits_of, storages, write_bits
from .test_routing import decide_forward, decide_prep, unwanted_padding, weakest, word_step

pytestmark = pytest.mark.usefixtures("frozen_imports")

COLD, WARM, CAPTURED, QUARANTINED = gg.State.COLD, gg.State.WARM, gg.State.CAPTURED, gg.State.QUARANTINED
TABLE_ROWS = 4
SLOTS = (
    gg.Slot("lens", axis="request", dtype=torch.int64, pad=1, idle=0, valid=(1, 50)),
    gg.Slot("rows", axis="request", dtype=torch.int64, pad=0, index_of="table", valid=(0, TABLE_ROWS - 1)),
    gg.Slot("indptr", axis="offset", dtype=torch.int32, pad=gg.REPEAT_LAST),
    gg.Slot("loc", axis="token", dtype=torch.int32, pad=7, capture=3, accepts=(torch.int64,), valid=(0, 99)),
    gg.Slot("scores", axis="token", dtype=torch.float32, pad=float("nan"), inner=(2,), missing="pad", valid=(-9, 9)),
    gg.Slot("wide", axis="request", dtype=torch.int16, pad=-1, inner=(3,), row_dim=1),
    gg.Slot("num_tokens", axis="fixed", dtype=torch.int64, pad=0, value=gg.RAW_TOKENS),
)


class BrokenOnPurpose(Exception):
    """What a prep or forward raises while it is told to fail."""


@dataclass(frozen=True)
class Fault:
    """Say who fails at which sizes, and how: it raises, or it reads the device, which only a recording refuses."""

    who: str
    how: str
    sizes: tuple[int, ...]


class Backend:
    """Hold the preps and the forward, plain eager code; they fail where a fault says so."""

    def __init__(self) -> None:
        self.fault: Fault | None = None
        self.num_runs = {"main": 0, "extra": 0, "forward": 0}

    @contextmanager
    def failing(self, fault: Fault | None) -> Iterator[None]:
        """Fail inside."""
        self.fault = fault
        try:
            yield
        finally:
            self.fault = None

    def _enter(self, who: str, view: Any) -> None:
        self.num_runs[who] += 1
        if self.fault is not None and self.fault.who == who and view.bucket.requests in self.fault.sizes:
            if self.fault.how == "raise":
                raise BrokenOnPurpose(who)
            view.lens.sum().item()

    def main(self, view: Any) -> dict[str, Any]:
        """Build the metadata of a step, of any width."""
        self._enter("main", view)
        tokens = torch.arange(view.bucket.tokens, dtype=torch.int32)
        owner = torch.searchsorted(view.indptr[1:], tokens, right=True).clamp(max=view.bucket.requests - 1)
        return {
            "positions": view.lens[owner] + tokens,
            "pages": view.tables.table[view.rows],
            "ends": view.lens.cumsum(0),
            "more": [view.scores * 2, view.wide, tokens < view.num_tokens],
            "bucket": view.bucket.requests,
        }

    def extra(self, view: Any) -> torch.Tensor:
        """Build what a second kind of attention wants."""
        self._enter("extra", view)
        return view.lens.clamp(max=3)

    def forward(self, view: Any, metadata: Any) -> dict[str, torch.Tensor]:
        """Compute from slots, a table and all metadata."""
        self._enter("forward", view)
        main = metadata.get("main", metadata)
        return {
            "token": main["positions"] * 2 + view.loc,
            "score": main["more"][0].masked_fill(main["more"][2][:, None], 1.0),
            "request": main["pages"] + metadata.get("extra", main["ends"])[:, None],
            "whole": main["more"][1] + view.tables.table[0, 0],
        }


OUTPUT_AXES = {"token": "token", "score": "token", "request": "request", "whole": "bucket"}


def leaves_of(tree: Any) -> list[Any]:
    """List the leaves of nested dicts and lists in a fixed order."""
    if isinstance(tree, dict):
        return [leaf for name in sorted(tree) for leaf in leaves_of(tree[name])]
    return [leaf for item in tree for leaf in leaves_of(item)] if isinstance(tree, (list, tuple)) else [tree]


def check_equal(seen: Any, expected: Any, what: str) -> None:
    """Compare two trees, tensors by their bits."""
    ours, theirs = leaves_of(seen), leaves_of(expected)
    assert len(ours) == len(theirs)
    for one, other in zip(ours, theirs):
        if not isinstance(other, torch.Tensor):
            assert one == other, what
            continue
        assert (one.dtype, one.shape) == (other.dtype, other.shape), what
        assert np.array_equal(bits_of(one), bits_of(other)), f"{what}: {seen}\nthe model has {expected}"


@dataclass
class KeyStates:
    """Hold what the model knows of one key: the state of each prep and of the forward."""

    preps: dict[str, gg.State]
    forward: gg.State = COLD
    results: frozenset[str] = frozenset()  # preps with a static result: kept while quarantined


class RunnerMachine(RuleBasedStateMachine):
    """One runner, its tables, and the model of both."""

    num_preps = 1

    @initialize(data=st.data())
    def build(self, data: st.DataObject) -> None:
        """Construct a runner."""
        self.backend, self.num_steps, self.last = Backend(), 0, None
        self.given_away: list[tuple[torch.Tensor, np.ndarray]] = []
        self.ladder = sorted(set(data.draw(ggst.ladders(max_size=4, max_length=2) | st.just([2, 4]), label="ladder")))
        self.width = data.draw(st.integers(1, 3), label="width")
        self.variants = data.draw(
            st.sampled_from([(None,), (None,), (None, "lora"), (None,), (None,)]), label="variants"
        )
        self.config = data.draw(configs(), label="config")
        self.contracts: dict[str, gg.PrepContract | None] = {"main": data.draw(contracts("main"), label="main")}
        if self.num_preps == 2:
            self.contracts["extra"] = data.draw(contracts("extra") | st.none(), label="extra")
        self.bound = self.current = data.draw(tables(), label="table")
        self.has_forward = data.draw(st.integers(0, 5), label="forward") != 3
        self.runner = self._runner(as_list=len(self.contracts) > 1 or data.draw(st.booleans(), label="list"))
        self.states: dict[gg.Key, KeyStates] = {}
        self.wanted: list[gg.Key] = []
        self.addresses: dict[gg.Key, list[int]] = {}
        self.model = Model(SLOTS, self.ladder, self.width)
        self.case = SimpleNamespace(
            arena=self.runner.arena, model=self.model, slots=SLOTS, extend=False, seen=self._storages()
        )
        if data.draw(st.integers(0, 7), label="capture later") != 7:
            self.capture(data)

    def _runner(self, as_list: bool) -> gg.Runner:
        registry = gg.Registry()
        preps: list[Any] = []
        for name, contract in self.contracts.items():
            prep = named(name, getattr(self.backend, name))
            if contract is not None:
                registry.register(contract)(prep)
            preps.append(name if contract is not None else prep)
        self.as_list = as_list
        return gg.Runner(
            slots=SLOTS,
            ladder=self.ladder,
            prep=preps if as_list else preps[0],
            registry=registry,
            forward=self.backend.forward if self.has_forward else None,
            tables={"table": lambda: self.current},
            tokens_per_request=self.width,
            variants=self.variants,
            output_axes=OUTPUT_AXES,
            config=self.config,
        )

    # Capture and repair.

    @rule(data=st.data())
    def capture(self, data: st.DataObject) -> None:
        """Capture all sizes or some; some may fail. A second capture is refused."""
        if self._captured_keys():
            with self._refused(gg.CaptureError, "captured already"):
                self.runner.capture()
            return
        if self.current is not self.bound:
            with self._refused(gg.StaleTableError, "table 'table' moved"):
                self.runner.capture()
            return
        sizes = data.draw(st.just(self.ladder) | subsets(self.ladder), label="sizes")
        fault = data.draw(self._faults(), label="fault")
        self.wanted = self._keys(sizes)
        self.addresses.clear()
        self._record(self.wanted, fault)
        with self.backend.failing(fault), torch.inference_mode(data.draw(st.booleans(), label="inference mode")):
            if self._captured_keys():
                self.runner.capture(None if sizes == self.ladder else sizes)
            else:
                with pytest.raises(gg.CaptureError, match="no key could be captured"):
                    self.runner.capture(sizes)
        self._forget_last()
        self._check_states()
        if fault is not None and data.draw(st.integers(0, 3), label="repair later") != 3:
            self.serve(data)
            self.maintain(data)

    @rule(data=st.data())
    def maintain(self, data: st.DataObject) -> None:
        """Repair what failed; it may fail again."""
        missing = [key for key in self.wanted if self._missing(key)]
        if missing and self.current is not self.bound:
            with self._refused(gg.StaleTableError, "moved"):
                self.runner.maintain()
            return
        fault = data.draw(self._faults(one_in=4), label="fault")
        self._record(missing, fault)
        for key in missing:
            self.addresses.pop(key, None)
        with self.backend.failing(fault):
            repaired = self.runner.maintain()
        assert set(repaired) == {key for key in missing if not self._missing(key)}
        self._check_states()
        if missing:
            self._forget_last()
            self.serve(data)

    @rule(data=st.data())
    def reset(self, data: st.DataObject) -> None:
        """Drop every key; mostly others are captured soon."""
        self.runner.reset()
        self.states.clear()
        self.addresses.clear()
        self.wanted = []
        self._forget_last()
        if data.draw(st.integers(0, 3), label="capture later") != 3:
            self.capture(data)

    # Tables.

    @rule(data=st.data())
    def change_table_in_place(self, data: st.DataObject) -> None:
        """Graphs read contents, so new ones are seen."""
        self.current.copy_(data.draw(tables(), label="contents"))

    @rule(data=st.data())
    def replace_table(self, data: st.DataObject) -> None:
        """The engine makes another tensor without saying so; mostly it puts the old one back soon."""
        if self.current is not self.bound:
            self.current = self.bound
            return
        self.current = data.draw(tables(), label="table")
        self._step(data, data.draw(self._batches(over=False), label="batch"))
        if data.draw(st.integers(0, 3), label="for long") != 3:
            self.current = self.bound

    @rule(data=st.data())
    def rebind_table(self, data: st.DataObject) -> None:
        """The engine says so: every key is dropped, and maintain() brings them back."""
        if data.draw(st.booleans(), label="new"):
            self.current = data.draw(tables(), label="table")
        self.runner.rebind_table("table", lambda: self.current)
        self.bound = self.current
        self.states.clear()
        self.addresses.clear()
        self._forget_last()
        if data.draw(st.integers(0, 3), label="maintain later") != 3:
            self.maintain(data)

    # Steps.

    @rule(data=st.data())
    def serve(self, data: st.DataObject) -> None:
        """Run a few steps as an engine mostly does: of the runner's own width, in a declared mode."""
        declared = [contract.modes for contract in self.contracts.values() if contract is not None]
        modes = [mode for mode in (gg.Mode.VERIFY, gg.Mode.DECODE) if all(mode in known for known in declared)]
        options = {"modes": modes or [gg.Mode.DECODE], "features": (), "widths": (), "ragged": False, "over": False}
        for _ in range(data.draw(st.integers(1, 4), label="steps")):
            self._step(data, replace(data.draw(self._batches(**options), label="batch"), variant=None))

    @rule(data=st.data())
    def serve_more(self, data: st.DataObject) -> None:
        """The same once more: most of what an engine does is this."""
        self.serve(data)

    @rule(data=st.data())
    def serve_anything(self, data: st.DataObject) -> None:
        """Run a few steps of any mode, width, variant and size, ragged and idle ones among them."""
        for _ in range(data.draw(st.integers(1, 4), label="steps")):
            self._step(data, data.draw(self._batches(), label="batch"))

    @rule(data=st.data())
    def idle(self, data: st.DataObject) -> None:
        """Run a step without requests."""
        self._step(data, gg.Batch.idle(mode=data.draw(st.sampled_from([gg.Mode.DECODE, gg.Mode.VERIFY]), label="mode")))

    @rule(data=st.data())
    def look(self, data: st.DataObject) -> None:
        """Ask for a decision: nothing is written."""
        batch = data.draw(self._batches(), label="batch")
        with self._unchanged():
            decision = self.runner.can_replay(batch)
        self._check_decision(decision, batch)

    @rule(data=st.data())
    def refuse(self, data: st.DataObject) -> None:
        """Run a batch that is broken in one place: it is refused, nothing is written."""
        batch = data.draw(self._batches(over=False, idle=False), label="batch")
        if self.model.bucket(batch) is None:
            return
        breaks = [break_ for break_ in BREAKS if break_(batch, self.case) is not None]
        broken = data.draw(st.sampled_from(breaks), label="broken by")(batch, self.case)
        call = self.runner.prepare if data.draw(st.booleans(), label="prepare") else self.runner.replay
        with self._refused((gg.BindError, gg.StaleTableError)):
            call(broken)

    @rule(data=st.data())
    def run_while_broken(self, data: st.DataObject) -> None:
        """A prep or forward raises in an eager step: its own error surfaces. Graphs run on."""
        batch = data.draw(self._batches(over=False), label="batch")
        if self.model.bucket(batch) is None or self.current is not self.bound:
            return
        who = data.draw(st.sampled_from([*self.contracts, "forward"]), label="who")
        fault, decision = Fault(who, "raise", tuple(range(10))), self.runner.can_replay(batch)
        if who == "forward":
            runs = self.has_forward and decision.forward is gg.Route.EAGER
        else:
            runs = decision.preps[who].route is gg.Route.EAGER
        if not runs:
            self._step(data, batch, fault)
            return
        with self.backend.failing(fault), pytest.raises(BrokenOnPurpose, match=who):
            self.runner.replay(batch)
        self._forget_last()

    @rule(seed=st.integers(0, 2**32 - 1))
    def scribble(self, seed: int) -> None:
        """Somebody writes garbage into every slot between two steps."""
        rng = np.random.default_rng(seed)
        for tensor in self._storages().values():
            write_bits(tensor, rng.integers(-128, 127, bits_of(tensor).shape).astype(bits_of(tensor).dtype))

    def teardown(self) -> None:
        """Close the runner: it is of no use any more."""
        if not hasattr(self, "runner"):
            return
        assert self.runner.stats()["steps"] == self.num_steps
        self.runner.close()
        self.runner.close()
        for call in (self.runner.replay, self.runner.prepare, self.runner.can_replay):
            with pytest.raises(gg.ClosedError):
                call(gg.Batch.idle())
        with pytest.raises(gg.ClosedError):
            self.runner.capture()

    # The step and what it must equal.

    def _step(self, data: st.DataObject, batch: gg.Batch, fault: Fault | None = None) -> None:
        prepare = data.draw(st.integers(0, 3), label="prepare") == 0
        call = self.runner.prepare if prepare else self.runner.replay
        worded = word_step(batch, self.config, self.ladder, self.width)
        if self.current is not self.bound:
            with self._refused(gg.StaleTableError, "table 'table' moved"):
                call(batch)
            return
        if not worded.covered and (prepare or not self.has_forward):
            with self._refused(gg.CapacityError, "exceeds the ladder"):
                call(batch)
            return
        batch, given = self._with_own_views(data, batch, worded)
        runs = dict(self.backend.num_runs)
        with self.backend.failing(fault), torch.inference_mode(data.draw(st.booleans(), label="inference mode")):
            step = call(given)
        self.num_steps += 1
        self._check_clones(step)
        self.last = step
        self._check_decision(step.decision, batch)
        event(f"prep {step.decision.reason.name}, forward {getattr(step.decision.forward_reason, 'name', 'GRAPH')}")
        for name, decided in step.decision.preps.items():
            assert self.backend.num_runs[name] - runs[name] == (decided.route is gg.Route.EAGER)
        eager_forward = self.has_forward and not prepare and step.decision.forward is gg.Route.EAGER
        assert self.backend.num_runs["forward"] - runs["forward"] == eager_forward
        assert step.raw == gg.Bucket(*worded.counts)
        self._check_results(step, batch, worded)

    def _check_results(self, step: gg.Step | gg.Prepared, batch: gg.Batch, worded: SimpleNamespace) -> None:
        extents, raw = step.decision.bucket, step.raw
        fresh = Model(SLOTS, self.ladder, self.width, capacity=extents[:2])
        fresh.fill(batch, extents)
        slots = fresh.tensors(extents)
        twin = SimpleNamespace(**slots, bucket=extents, tables=SimpleNamespace(table=self.current.clone()))
        metadata: Any = {name: getattr(self.backend, name)(twin) for name in self.contracts}
        check_equal(step.metadata, metadata if self.as_list else metadata["main"], f"metadata of {batch}")
        self._check_addresses(step)
        if worded.covered:
            view = self.runner.view(extents)
            for name, expected in slots.items():
                check_equal(view[name], expected, f"slot {name!r} of {batch}")
        if isinstance(step, gg.Prepared):
            for name, expected in slots.items():
                check_equal(step.view[name], expected, f"slot {name!r} as prepared for {batch}")
            return
        if not self.has_forward:
            assert step.outputs is None
            return
        outputs = self.backend.forward(twin, metadata if self.as_list else metadata["main"])
        rows = {"token": raw.tokens, "request": raw.requests}
        outputs = {name: leaf[: rows.get(OUTPUT_AXES[name])] for name, leaf in outputs.items()}
        check_equal(step.outputs, outputs, f"outputs of {batch}")

    def _check_decision(self, decision: gg.Decision, batch: gg.Batch) -> None:
        """Hold a decision against the page, for the states the model is in."""
        worded = word_step(batch, self.config, self.ladder, self.width)
        exact = not worded.covered or unwanted_padding(worded) is not None
        extents = gg.Bucket(*worded.counts) if exact else worded.bucket
        key = gg.Key(batch.mode, *extents, None, batch.variant)
        assert (decision.bucket, decision.key) == (extents, key)
        expected = {name: decide_prep(worded, self._facts(name, key)) for name in self.contracts}
        assert {name: tuple(decided) for name, decided in decision.preps.items()} == expected
        assert (decision.prep, decision.reason) == weakest(list(expected.values()))
        allowed = decide_forward(worded, self._state(key).forward if self.has_forward else None)
        assert decision.forward_reason in allowed
        assert bool(decision) is (decision.forward_reason is None)

    def _check_clones(self, step: gg.Step | gg.Prepared) -> None:
        """Hold what an earlier step gave away to its contents, if the config promises copies."""
        if self.config.clone_outputs:
            for tensor, bits in self.given_away:
                assert np.array_equal(bits_of(tensor), bits), "a later step wrote into a copy"
            leaves = leaves_of(step.metadata) + leaves_of(getattr(step, "outputs", None))
            self.given_away = [(leaf, bits_of(leaf)) for leaf in leaves if isinstance(leaf, torch.Tensor)]

    def _check_addresses(self, step: gg.Step | gg.Prepared) -> None:
        """Hold a key's metadata to its addresses as long as a forward graph reads them."""
        if step.decision.forward is gg.Route.GRAPH and not self.config.clone_outputs:
            seen = [leaf.data_ptr() for leaf in leaves_of(step.metadata) if isinstance(leaf, torch.Tensor)]
            assert self.addresses.setdefault(step.decision.key, seen) == seen

    def _with_own_views(
        self, data: st.DataObject, batch: gg.Batch, worded: SimpleNamespace
    ) -> tuple[gg.Batch, gg.Batch]:
        """Let some sources be the slots' own views; give the batch for the model, and the one handed in."""
        if not worded.covered or unwanted_padding(worded) is not None or not data.draw(st.booleans(), label="own"):
            return batch, batch
        view, own, copies = self.runner.view(worded.bucket), {}, {}
        for slot in SLOTS:
            if slot.name in batch.sources and slot.name not in ("rows", "indptr") and data.draw(st.booleans()):
                rows = self.model.rows(slot, *worded.counts[:2])
                head = view[slot.name].narrow(slot.row_dim, 0, rows)
                own[slot.name], copies[slot.name] = head, head.clone(memory_format=torch.contiguous_format)
        return replace(batch, sources={**batch.sources, **copies}), replace(batch, sources={**batch.sources, **own})

    # What the model knows.

    def _facts(self, name: str, key: gg.Key) -> SimpleNamespace:
        glue, contract = self.config.glue.get(name), self.contracts[name]
        generic = self.config.generic_glue or (contract is None and glue in ("on", "unpadded"))
        return SimpleNamespace(
            contract=contract, glue=glue or "on", generic=generic, certified=None, state=self._state(key).preps[name]
        )

    def _state(self, key: gg.Key) -> KeyStates:
        return self.states.get(key) or KeyStates(dict.fromkeys(self.contracts, COLD))

    def _keys(self, sizes: list[int]) -> list[gg.Key]:
        """List the keys of some sizes: every mode that a contract declares, ragged ones if all do."""
        known = [contract for contract in self.contracts.values() if contract is not None]
        modes = {mode for contract in known for mode in contract.modes}
        modes |= {gg.Mode.DECODE} if len(known) < len(self.contracts) else set()
        ragged = len(known) == len(self.contracts) and all(contract.ragged for contract in known)
        return [
            gg.Key(mode, size, size * self.width, each, None, variant)
            for size in sizes
            for mode in modes
            for each in [self.width] + [0] * ragged
            for variant in self.variants
        ]

    def _may_glue(self, name: str, key: gg.Key) -> bool:
        """Tell whether recording this prep at this key is of any use."""
        facts = self._facts(name, key)
        if facts.contract is None:
            return facts.generic and facts.glue != "off" and key.mode is gg.Mode.DECODE and key.row_tokens > 0
        fits = key.mode in facts.contract.modes and (facts.contract.ragged or key.row_tokens > 0)
        return facts.contract.host_free and facts.glue != "off" and fits

    def _missing(self, key: gg.Key) -> bool:
        state = self._state(key)
        preps = [state.preps[name] for name in self.contracts if self._may_glue(name, key)]
        return any(one is not CAPTURED for one in preps + [state.forward] * self.has_forward)

    def _captured_keys(self) -> list[gg.Key]:
        return [key for key, state in self.states.items() if CAPTURED in (*state.preps.values(), state.forward)]

    def _record(self, keys: list[gg.Key], fault: Fault | None) -> None:
        """Let the model warm up and record keys, one fault included. Failure is per key."""

        def fails(who: str, how: str, key: gg.Key) -> bool:
            return fault is not None and (fault.who, fault.how) == (who, how) and key.requests in fault.sizes

        for key in keys:
            state = self.states.setdefault(key, self._state(key))
            glued = [name for name in self.contracts if self._may_glue(name, key)]
            if any(state.preps[name] is not CAPTURED for name in glued):
                state.forward = COLD  # its graph reads metadata that moves
            for name in self.contracts:
                if state.preps[name] is CAPTURED:
                    continue
                state.preps[name] = QUARANTINED if fails(name, "raise", key) else WARM
                state.results |= set() if fails(name, "raise", key) else {name}
            if self.has_forward and state.forward is not CAPTURED:
                unfed = state.results != set(self.contracts)
                state.forward = QUARANTINED if unfed or fails("forward", "raise", key) else WARM
            for name in glued:
                if state.preps[name] is WARM:
                    state.preps[name] = QUARANTINED if fails(name, "read", key) else CAPTURED
            if state.forward is WARM:
                state.forward = QUARANTINED if fails("forward", "read", key) else CAPTURED

    def _check_states(self) -> None:
        """Compare all keys' states with those that the runner tells."""
        told = {(k["mode"], tuple(k["bucket"]), k["variant"]): k for k in self.runner.stats()["keys"]}
        assert len(told) == len(self.wanted)
        for key in self.wanted:
            of_key = told[key.mode.value, tuple(key.bucket), repr(key.variant)]
            ours = {name: state.value for name, state in self._state(key).preps.items()}
            ours |= {"forward": self._state(key).forward.value} if self.has_forward else {}
            assert of_key["states"] == ours, f"{key}: {of_key['causes']}"

    # Draws and snapshots.

    def _faults(self, one_in: int = 2) -> st.SearchStrategy[Fault | None]:
        """Draw a fault in one of so many draws, else none."""
        who = st.sampled_from([*self.contracts] + ["forward"] * self.has_forward)
        faults = st.builds(
            Fault, who, st.sampled_from(["read", "raise"]), (st.just(self.ladder) | subsets(self.ladder)).map(tuple)
        )
        return st.integers(1, one_in).flatmap(lambda n: faults if n == one_in else st.none())

    def _batches(self, **options: Any) -> st.SearchStrategy[gg.Batch]:
        return machine_batches(self, **options)

    def _storages(self) -> dict[str, torch.Tensor]:
        return storages(self.runner.view(max(self.ladder)), SLOTS)

    def _forget_last(self) -> None:
        """Forget the last step's results: what follows may write there."""
        self.last = None

    def _snapshot(self) -> list[bytes]:
        """Copy all bytes that a refused call must leave alone."""
        tensors = [*self._storages().values(), self.bound, self.current]
        if self.last is not None:
            tensors += [leaf for leaf in leaves_of(self.last.metadata) if isinstance(leaf, torch.Tensor)]
            tensors += [
                leaf for leaf in leaves_of(getattr(self.last, "outputs", None)) if isinstance(leaf, torch.Tensor)
            ]
        return [bits_of(tensor).tobytes() for tensor in tensors]

    @contextmanager
    def _unchanged(self) -> Iterator[None]:
        before, runs, steps = self._snapshot(), dict(self.backend.num_runs), self.runner.stats()["steps"]
        yield
        assert self._snapshot() == before
        assert self.backend.num_runs == runs
        assert self.runner.stats()["steps"] == steps

    @contextmanager
    def _refused(self, kinds: Any, text: str | None = None) -> Iterator[None]:
        with self._unchanged(), pytest.raises(kinds, match=text):
            yield


@st.composite
def machine_batches(
    draw: st.DrawFn, machine: RunnerMachine, over: bool = True, idle: bool = True, **options: Any
) -> gg.Batch:
    """Draw a batch with true token boundaries, which may exceed the ladder or be idle."""
    slots = [slot for slot in SLOTS if slot.name != "indptr"]
    common = {"modes": (gg.Mode.DECODE, gg.Mode.VERIFY, gg.Mode.DRAFT), "features": ("lora",), "widths": (1, 2)}
    most = max(machine.ladder) + (draw(st.sampled_from([0, 0, 0, 1])) if over else 0)
    strategy = ggst.batches(
        slots, machine.ladder, tokens_per_request=machine.width, max_requests=most, idle=idle, **{**common, **options}
    )
    batch = draw(strategy)
    requests, _, each = machine.model.counts(batch)
    if requests == 0:
        return batch
    variant = draw(st.sampled_from([*machine.variants, *machine.variants, "other"]))
    boundaries = np.cumsum([0, *(batch.row_tokens or [each] * requests)])
    indptr = draw(st.sampled_from([boundaries.astype(np.int32), boundaries.tolist(), boundaries.astype(np.int16)]))
    return replace(batch, variant=variant, sources={**batch.sources, "indptr": indptr})


def named(name: str, prep: Callable[..., Any]) -> Callable[..., Any]:
    """Give a bound method a name of its own, as a plain function."""

    def call(view: Any) -> Any:
        return prep(view)

    call.__name__ = name
    return call


def subsets(sizes: list[int]) -> st.SearchStrategy[list[int]]:
    """Draw some sizes."""
    return st.lists(st.sampled_from(sizes), min_size=1, unique=True)


def tables() -> st.SearchStrategy[torch.Tensor]:
    """Draw a table."""
    return ggst.contents(torch.int64, (TABLE_ROWS, 2), (0, 99))


def contracts(name: str) -> st.SearchStrategy[gg.PrepContract]:
    """Draw a contract of one of the backend's preps; one that allows everything is as likely as all others."""
    reads = [slot for slot in SLOTS if name == "main" or slot.name == "lens"]
    outputs = {"positions": "token", "pages": "request", "ends": "request", "more.2": "token"} if name == "main" else {}
    names = ["table"] if name == "main" else []
    modes = [gg.Mode.VERIFY, gg.Mode.DECODE] if name == "main" else [gg.Mode.DECODE]
    drawn = ggst.contracts(reads, name=name, tables=names, outputs=outputs, modes=modes, features=["lora"])
    freed = {"host_free": True, "padded": True, "modes": frozenset(modes[:1])}
    return drawn | drawn.map(lambda contract: contract.model_copy(update=freed))


@st.composite
def configs(draw: st.DrawFn) -> gg.RunnerConfig:
    """Draw a config; most are the default but for quick captures."""
    return gg.RunnerConfig(
        enabled=draw(st.integers(0, 19)) != 11,
        padding=draw(st.integers(0, 9)) != 7,
        waste_limit=draw(st.sampled_from([None, None, None, None, 2.0])),
        generic_glue=draw(st.booleans()),
        glue=draw(st.sampled_from([{}, {}, {}, {}, {}, {}, {"main": "unpadded"}, {"main": "off"}])),
        clone_outputs=draw(st.sampled_from([False, False, True])),
        warmups=1,
    )


class HybridMachine(RunnerMachine):
    """A runner with two preps, each routed alone."""

    num_preps = 2


# Each takes half of the profile's examples, and its step count.
TestOnePrep = RunnerMachine.TestCase
TestTwoPreps = HybridMachine.TestCase
TestOnePrep.settings = TestTwoPreps.settings = settings(max_examples=settings.default.max_examples // 2)


def test_a_forward_reads_what_a_repaired_prep_computes() -> None:
    """The rarest path of the machine, walked once for sure: refused while recording, repaired, replayed."""
    backend, registry = Backend(), gg.Registry()
    contract = gg.PrepContract(name="extra", reads={"lens": (1, 0)}, modes={gg.Mode.DECODE})
    registry.register(contract)(backend.extra)
    with gg.Runner(
        slots=SLOTS[:1], ladder=[2], prep="extra", registry=registry, forward=lambda view, metadata: metadata * 2
    ) as runner:
        with backend.failing(Fault("extra", "read", (2,))):
            runner.capture()
        step = runner.replay(gg.Batch(2, {"lens": [1, 2]}))
        assert (step.decision.reason, step.decision.forward) == (gg.Reason.QUARANTINED, gg.Route.GRAPH)
        assert step.outputs.tolist() == [2, 4]
        assert len(runner.maintain()) == 1
        step = runner.replay(gg.Batch(2, {"lens": [3, 1]}))
        assert (step.decision.prep, step.decision.forward) == (gg.Route.GLUE, gg.Route.GRAPH)
        assert step.outputs.tolist() == [6, 2]
