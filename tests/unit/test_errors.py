"""Bad input: every fault has its own error of the tree, says what to do, and has written nothing.

Each row of a table is a fault, the class that names it, and what its text must say: what was seen, what
was expected, where, and the next move. After a refused call the bytes of all slots, tables and
metadata are what they were, and the next step is right.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch

import graphglue as gg
from graphglue import (
    REPEAT_LAST,
    Batch,
    BindError,
    Bucket,
    CapacityError,
    CaptureError,
    ClosedError,
    ConfigError,
    ContractError,
    Mode,
    PrepContract,
    Registry,
    Runner,
    RunnerConfig,
    Slot,
    StaleTableError,
)


class Fault(NamedTuple):
    """One row: what is done wrong, and what must come of it."""

    name: str
    call: Callable[..., Any]
    error: type[Exception]
    said: tuple[str, ...]


def parametrized(faults: list[Fault]) -> Any:
    return pytest.mark.parametrize("fault", faults, ids=[fault.name for fault in faults])


def check(fault: Fault, *args: Any) -> None:
    """Call, and hold the error's class and text against the row."""
    with pytest.raises(gg.GraphGlueError) as caught:
        fault.call(*args)
    assert type(caught.value) is fault.error, repr(caught.value)
    text = str(caught.value)
    for part in fault.said:
        assert re.search(part, text, re.DOTALL), f"{part!r} is not said: {text}"


# An engine in service.


def slots() -> list[Slot]:
    return [
        Slot("lens", "request", torch.int64, 1),
        Slot("rows", "request", torch.int32, 0, index_of="t"),
        Slot("loc", "token", torch.int32, 0, accepts=(torch.int64,)),
        Slot("hidden", "token", torch.float32, 0.0, inner=(2,)),
        Slot("cu", "offset", torch.int64, REPEAT_LAST),
        Slot("flag", "fixed", torch.bool, False, missing="pad"),
        Slot("live", "fixed", torch.int64, 0, value=gg.RAW_REQUESTS),
    ]


CONTRACT = PrepContract(
    name="meta", reads={"lens": 1, "rows": 0}, tables=("t",), outputs={"pages": "request"}, modes={Mode.DECODE}
)


def meta(view: Any) -> dict[str, torch.Tensor]:
    return {"pages": view.tables.t[view.rows] + view.lens}


def forward(view: Any, metadata: Any) -> torch.Tensor:
    return view.hidden.sum(1) + view.loc + metadata["pages"] + view.cu[1:]


def sources(requests: int = 3, **more: Any) -> dict[str, Any]:
    good: dict[str, Any] = {
        "lens": [5 + row for row in range(requests)],
        "rows": [row % 4 for row in range(requests)],
        "loc": [7 + row for row in range(requests)],
        "hidden": [[0.5, float(row)] for row in range(requests)],
        "cu": list(range(0, 2 * requests + 1, 2)),
    }
    good.update(more)
    return {name: source for name, source in good.items() if source is not LEFT_OUT}


LEFT_OUT = object()


class Engine:
    """A captured runner that has served, and every byte it could wrongly write."""

    def __init__(self) -> None:
        self.through = "replay"
        self.home = {"t": torch.arange(100, 110)}
        registry = Registry()
        registry.register(CONTRACT)(meta)
        self.runner = Runner(
            slots=slots(),
            ladder=[2, 4],
            registry=registry,
            prep="meta",
            forward=forward,
            tables={"t": lambda: self.home["t"]},
        )
        self.runner.capture()
        self.step(4)
        self.metadata = self.step(3).metadata

    def step(self, requests: int) -> Any:
        return self.runner.replay(Batch(requests, sources(requests)))

    def run(self, batch: Batch) -> Any:
        return getattr(self.runner, self.through)(batch)

    def replay(self, requests: int = 3, **more: Any) -> Any:
        return self.run(Batch(requests, sources(requests, **more)))

    def bytes(self) -> list[bytes]:
        view = self.runner.arena.view(4)
        tensors = [*(view[name] for name in view), self.home["t"], *self.metadata.values()]
        return [tensor.numpy().tobytes() for tensor in tensors]

    def assert_serves(self) -> None:
        step = self.step(3)
        assert step.decision.prep is gg.Route.GLUE
        expected = [0.5 + row + 7 + row + 100 + row % 4 + 5 + row + 2 * (row + 1) for row in range(3)]
        assert step.outputs.tolist() == expected


@pytest.fixture(scope="module")
def engine() -> Engine:
    """Serve all rows from one engine: that each still finds it whole is part of the test."""
    return Engine()


big = torch.arange(24, dtype=torch.float32).reshape(3, 8)
I64 = torch.int64

BIND: list[Fault] = [
    Fault("float into integer", lambda e: e.replay(lens=[1.5, 2.0, 3.0]), BindError,
          ("slot 'lens'", "a list of floats", "numbers of kind integer, for torch.int64")),
    Fault("integer tensor into float", lambda e: e.replay(hidden=torch.ones(3, 2, dtype=I64)), BindError,
          ("slot 'hidden'", "dtype torch.int64", "kind float, for torch.float32", "convert it first")),
    Fault("bool into integer", lambda e: e.replay(lens=np.array([True, False, True])), BindError,
          ("slot 'lens'", "dtype torch.bool", "kind integer")),
    Fault("integer into bool", lambda e: e.replay(flag=1), BindError,
          ("slot 'flag'", "the number 1", "kind bool, for torch.bool")),
    Fault("narrowing that is not declared", lambda e: e.replay(rows=torch.tensor([1, 2, 3])), BindError,
          ("slot 'rows'", "dtype torch.int64", "torch.int32 or a dtype that", r"declare accepts=\(torch.int64,\)")),
    Fault("narrowing that loses values", lambda e: e.replay(loc=torch.tensor([1, 2**40, 3])), BindError,
          ("slot 'loc'", "values from 1 to 1099511627776", "values that torch.int32 holds")),
    Fault("a list that does not fit", lambda e: e.replay(rows=[1, 2**40, 3]), BindError,
          ("slot 'rows'", "1099511627776", "torch.int32 holds")),
    Fault("an unsigned that does not fit", lambda e: e.replay(lens=np.array([1, 2, 3], np.uint64)), BindError,
          ("slot 'lens'", "dtype torch.uint64", "widens")),
    Fault("a double into a float slot", lambda e: e.replay(hidden=np.zeros((3, 2))), BindError,
          ("slot 'hidden'", "dtype torch.float64", "torch.float32 or a dtype that widens")),
    Fault("a dtype torch lacks", lambda e: e.replay(lens=np.array(["a", "b", "c"])), BindError,
          ("slot 'lens'", "a numpy array of dtype <U1", "torch.int64")),
    Fault("one row too few", lambda e: e.replay(lens=[1, 2]), BindError,
          ("slot 'lens'", r"extent \(2,\)", r"exactly \(3,\)", "axis request", "nothing is cut, padded or broadcast")),
    Fault("one row too many", lambda e: e.replay(lens=[1, 2, 3, 4]), BindError,
          ("slot 'lens'", r"extent \(4,\)", r"exactly \(3,\)")),
    Fault("the bucket's rows", lambda e: e.replay(hidden=torch.zeros(4, 2)), BindError,
          ("slot 'hidden'", r"extent \(4, 2\)", r"exactly \(3, 2\)", "axis token")),
    Fault("one row does not broadcast", lambda e: e.replay(lens=torch.tensor([9])), BindError,
          ("slot 'lens'", r"extent \(1,\)", "broadcast")),
    Fault("a 0-dim tensor does not broadcast", lambda e: e.replay(lens=torch.tensor(9)), BindError,
          ("slot 'lens'", r"extent \(\)", "broadcast")),
    Fault("a number does not broadcast", lambda e: e.replay(lens=9), BindError,
          ("slot 'lens'", "the number 9", r"values of extent \(3,\)", "one element only")),
    Fault("a wrong inner dimension", lambda e: e.replay(hidden=torch.zeros(3, 3)), BindError,
          ("slot 'hidden'", r"extent \(3, 3\)", r"exactly \(3, 2\)")),
    Fault("offsets without the first", lambda e: e.replay(cu=[2, 4, 6]), BindError,
          ("slot 'cu'", r"extent \(3,\)", r"exactly \(4,\)", "axis offset")),
    Fault("rows of different lengths", lambda e: e.replay(hidden=[[1.0], [1.0, 2.0], [1.0]]), BindError,
          ("slot 'hidden'", "mixed or nested values", "kind float")),
    Fault("a column slice", lambda e: e.replay(hidden=big[:, ::4]), BindError,
          ("slot 'hidden'", r"strides \(8, 4\) for shape \(3, 2\)", r"call .contiguous\(\)")),
    Fault("a transpose", lambda e: e.replay(hidden=big[:2, :3].t()), BindError,
          ("slot 'hidden'", r"strides \(1, 8\)", r"call .contiguous\(\)")),
    Fault("an expanded row", lambda e: e.replay(hidden=torch.zeros(1, 2).expand(3, 2)), BindError,
          ("slot 'hidden'", r"strides \(0, 1\)", r"call .contiguous\(\)")),
    Fault("a strided array", lambda e: e.replay(lens=np.arange(6)[::2]), BindError,
          ("slot 'lens'", r"strides \(16,\)", "np.ascontiguousarray")),
    Fault("another device", lambda e: e.replay(lens=torch.empty(3, dtype=I64, device="meta")), BindError,
          ("slot 'lens'", "a tensor on meta", "one on cpu", "move it first")),
    Fault("no strided layout", lambda e: e.replay(lens=torch.tensor([1, 0, 2]).to_sparse()), BindError,
          ("slot 'lens'", "sparse", r"to_dense\(\)")),
    Fault("no source at all", lambda e: e.replay(lens={1, 2, 3}), BindError,
          ("slot 'lens'", "a set", "a tensor, a numpy array, a list or a number")),
    Fault("unstaged: a missing slot", lambda e: e.replay(rows=LEFT_OUT), BindError,
          ("slot 'rows' is missing", r"hands in \['cu', 'hidden', 'lens', 'loc'\]", "declare missing='pad'")),
    Fault("unstaged: an unknown slot", lambda e: e.replay(positions=[1, 2, 3]), BindError,
          ("'positions', which is no slot", r"slots are \['cu', 'flag', .*'rows'\]")),
    Fault("unstaged: a computed slot", lambda e: e.replay(live=3), BindError,
          ("slot 'live' is computed", "RAW_REQUESTS", "leave it out")),
    Fault("a source in another slot's memory", lambda e: e.replay(lens=e.runner.arena.view(4).cu[:3]), BindError,
          ("slot 'lens'", "lies in the memory of slot 'cu'", "hand in a copy")),
    Fault("no requests but sources", lambda e: e.run(Batch(0, sources(0))), BindError,
          ("num_requests=0 with 5 sources", "IDLE", r"Batch.idle\(mode=...\)")),
    Fault("no requests but tokens", lambda e: e.run(Batch(0, num_tokens=3)), BindError,
          ("num_requests=0", "num_tokens=3", "IDLE")),
    Fault("a negative count", lambda e: e.run(Batch(-1, sources(3))), BindError,
          ("num_requests=-1", "expected 0 or more")),
    Fault("a count that is no integer", lambda e: e.run(Batch(3.0, sources(3))), BindError,  # type: ignore[arg-type]
          ("num_requests=3.0", "expected an integer")),
    Fault("tokens that do not divide", lambda e: e.run(Batch(3, sources(3), num_tokens=4)), BindError,
          ("num_tokens=4 does not divide among num_requests=3", "pass row_tokens")),
    Fault("row_tokens of other requests", lambda e: e.run(Batch(3, sources(3), row_tokens=[1, 1])), BindError,
          ("row_tokens", "2 entries", "num_requests=3")),
    Fault("a mode that is none", lambda e: e.run(Batch(3, sources(3), mode="decode")), BindError,  # type: ignore[arg-type]
          ("mode='decode'", "expected a graphglue.Mode")),
]  # fmt: skip

USE: list[Fault] = [
    Fault("over the ladder without a forward's help", lambda e: e.runner.prepare(Batch(5, sources(5))), CapacityError,
          ("5 requests and 5 tokens", r"ladder \[2, 4\]", "capacity of 4 requests and 4 tokens", "split the batch")),
    Fault("a view beyond the ladder", lambda e: e.runner.view(8), CapacityError,
          ("8 requests", r"ladder \[2, 4\]")),
    Fault("the arena over the ladder", lambda e: e.runner.arena.fill(Batch(5, sources(5))), CapacityError,
          ("5 requests", r"ladder \[2, 4\]")),
    Fault("a plan without ranks", lambda e: e.runner.replay(Batch(3, sources(3)), plan=object()), ConfigError,
          ("plan", "no ranks", "leave plan out")),
    Fault("capture twice", lambda e: e.runner.capture(), CaptureError,
          ("captured already", r"reset\(\)", r"maintain\(\)")),
    Fault("a table that is unknown", lambda e: e.runner.rebind_table("u", torch.zeros(1)), ConfigError,
          ("table 'u' is unknown", r"tables are \['t'\]")),
    Fault("a table elsewhere", lambda e: e.runner.rebind_table("t", torch.zeros(9, device="meta")), ConfigError,
          ("table 't' is on meta", "expected cpu", "move it first")),
    Fault("a table that is none", lambda e: e.runner.rebind_table("t", [1, 2]), ConfigError,
          ("table 't' is a list", "expected a tensor, or a callable")),
    Fault("a table too small for the pads", lambda e: e.runner.rebind_table("t", torch.zeros(0, dtype=I64)),
          ContractError, ("slot 'rows': pad 0 is no row of table 't'", "which has 0", "choose a reserved row")),
]  # fmt: skip


@pytest.mark.parametrize("through", ["replay", "prepare"])
@parametrized(BIND)
def test_a_bad_batch_is_refused_and_has_written_nothing(fault: Fault, through: str, engine: Engine) -> None:
    engine.step(4)
    engine.step(3)
    before, engine.through = engine.bytes(), through
    check(fault, engine)
    assert engine.bytes() == before
    engine.assert_serves()


@parametrized(USE)
def test_wrong_use_is_refused_and_has_written_nothing(fault: Fault, engine: Engine) -> None:
    engine.step(3)
    before = engine.bytes()
    check(fault, engine)
    assert engine.bytes() == before
    engine.assert_serves()


MOVES = {
    "replaced": lambda t: t.clone(),
    "another shape": lambda t: t[:5],
    "another dtype": lambda t: t.view(torch.float64),
    "another stride": lambda t: t.as_strided((5,), (2,)),
}


@pytest.mark.parametrize("move", MOVES)
def test_a_table_that_moved_is_never_read(move: str, engine: Engine) -> None:
    """A workspace that grew is another table, and no graph reads the old one (LIFETIME-1)."""
    engine.step(3)
    before, old = engine.bytes(), engine.home["t"]
    engine.home["t"] = MOVES[move](old)
    said = (
        "table 't' moved",
        f"{old.data_ptr():#x}",
        r"rebind_table\('t', tensor\)",
        r"maintain\(\)",
        "put the old one back",
    )
    for number, call in enumerate((engine.runner.replay, engine.runner.prepare)):
        check(Fault(move, lambda call=call: call(Batch(3, sources(3))), StaleTableError, said))
        check(Fault(move, lambda call=call: call(Batch.idle()), StaleTableError, said))
        assert number < 2
    engine.home["t"] = old
    assert engine.bytes() == before
    engine.assert_serves()


# Life and death of a runner.

AFTER_CLOSE: list[Fault] = [
    Fault(name, call, ClosedError, ("the runner was closed", "build another one"))
    for name, call in {
        "replay": lambda r: r.replay(Batch(3, sources(3))),
        "idle": lambda r: r.replay(Batch.idle()),
        "prepare": lambda r: r.prepare(Batch(3, sources(3))),
        "can_replay": lambda r: r.can_replay(Batch(3)),
        "capture": lambda r: r.capture(),
        "maintain": lambda r: r.maintain(),
        "rebind_table": lambda r: r.rebind_table("t", torch.zeros(9)),
        "view": lambda r: r.view(2),
        "with": lambda r: r.__enter__(),
    }.items()
]


@parametrized(AFTER_CLOSE)
def test_a_closed_runner_refuses_everything(fault: Fault) -> None:
    runner = Engine().runner
    runner.close()
    check(fault, runner)
    runner.close()


def test_use_after_close_is_refused_alone_or_closed() -> None:
    cache = gg.GlueGraphCache(lambda view: view + 1, name="meta")
    cache.close()
    check(
        Fault(
            "cache",
            lambda: cache.run(1, torch.zeros(1)),
            ClosedError,
            ("the cache of 'meta' was closed", "build another"),
        )
    )
    with gg.Tape().session():
        recording = gg.Tape().record(lambda: torch.zeros(1) + 1)
    recording.close()
    check(Fault("recording", recording.replay, ClosedError, ("recording was closed", "record the callable again")))


# Declarations that can not be served: nothing is built.


def build(prep: Any = meta, contract: PrepContract | None = None, **more: Any) -> Runner:
    registry = more.pop("registry", None) or Registry()
    declared = contract or CONTRACT
    registry.register(declared)(prep)
    made: dict[str, Any] = {
        "slots": slots(),
        "ladder": [2, 4],
        "registry": registry,
        "prep": declared.name,
        "tables": {"t": torch.arange(10)},
        "forward": forward,
    }
    return Runner(**{**made, **more})


def contract(**fields: Any) -> PrepContract:
    return PrepContract(**{"name": "p", "modes": {Mode.DECODE}, **fields})


def two_preps(ours: Any, theirs: Any, pad: Any) -> Runner:
    registry = Registry()
    for name, reads in (("a", ours), ("b", theirs)):
        registry.register(contract(name=name, reads={"lens": reads}))(lambda view: {"m": view.lens + 1})
    lens = Slot("lens", "request", torch.int64, pad)
    return Runner(slots=[lens], ladder=[2], registry=registry, prep=["a", "b"])


def slot(name: Any = "x", axis: Any = "request", dtype: Any = torch.int64, pad: Any = 0, **more: Any) -> Slot:
    return Slot(name, axis, dtype, pad, **more)


STORAGE = torch.zeros(16, dtype=I64)

BUILD: list[Fault] = [
    # pads and contracts
    Fault("slot and contract differ in the pad", lambda: build(contract=contract(reads={"lens": 0})), ContractError,
          ("slot 'lens' has pad 1", "prep 'p' is right for 0", "change the slot's pad or the contract")),
    Fault("none of several pads", lambda: build(contract=contract(reads={"lens": (0, 2)})), ContractError,
          ("slot 'lens' has pad 1", "0 or 2")),
    Fault("a cumulative slot that is not expected", lambda: build(contract=contract(reads={"cu": 0})), ContractError,
          ("slot 'cu' has pad REPEAT_LAST", "right for 0")),
    Fault("contract and contract differ in the pad", lambda: two_preps(0, 1, 0), ContractError,
          ("slot 'lens'", "prep 'a' needs pad 0", "prep 'b' needs pad 1", "give each its own slot")),
    Fault("contract and contract differ, the other slot", lambda: two_preps(0, 1, 1), ContractError,
          ("slot 'lens'", "prep 'a' needs pad 0", "prep 'b' needs pad 1")),
    Fault("a contract reads an unknown slot", lambda: build(contract=contract(reads={"lense": 1})), ContractError,
          ("prep 'p' reads slot 'lense'", "unknown", r"slots are \['cu', .*'lens'", "declare the slot, or correct")),
    Fault("a contract reads an unknown table", lambda: build(contract=contract(tables=("pages",))), ContractError,
          ("prep 'p' reads table 'pages'", "not handed in", r"tables are \['t'\]")),
    Fault("a slot indexes an unknown table", lambda: build(slots=[*slots(), slot(index_of="u")]), ContractError,
          ("slot 'x' indexes table 'u'", "not handed in", r"tables are \['t'\]")),
    Fault("a pad beyond the table", lambda: build(slots=[*slots(), slot(pad=10, index_of="t")]), ContractError,
          ("slot 'x': pad 10 is no row of table 't', which has 10", "choose a reserved row")),
    Fault("a negative pad into a table", lambda: build(slots=[*slots(), slot(pad=-1, index_of="t")]), ContractError,
          ("slot 'x': pad -1 is no row of table 't'",)),
    Fault("a contract without modes", lambda: contract(modes=set()), ContractError,
          ("contract 'p'", "modes is empty", r"\{Mode.DECODE\}")),
    Fault("an unknown field", lambda: contract(pads={}), ContractError,
          ("contract 'p'", "pads", "fields are .*'reads'")),
    Fault("an output on no row axis", lambda: contract(outputs={"m": "rank"}), ContractError,
          ("contract 'p'", "leaf 'm' on axis 'rank'", "token, request, offset or fixed")),
    Fault("idle='skip' outside EXTEND", lambda: contract(idle="skip"), ContractError,
          ("contract 'p'", "idle='skip' outside segmented EXTEND", "use idle='eager' or 'glue'")),
    Fault("idle='skip' under a full graph",
          lambda: build(
              lambda view: {"m": torch.zeros(1)}, contract(modes={Mode.EXTEND}, idle="skip"), output_axes="fixed",
              forward=lambda view, metadata: metadata["m"] + 1, config=RunnerConfig(max_requests=4),
          ).capture(progress=False),
          ContractError, ("prep 'p' declares idle='skip'", "one full graph", "use idle='eager' or 'glue'")),
    Fault("an idle value that is no idle value", lambda: contract(idle="sometimes"), ContractError,
          ("contract 'p'", "idle", "'eager', 'skip' or 'glue'")),
    Fault("effects on no table", lambda: contract(effects=("ring",)), ContractError,
          ("contract 'p'", r"effects names \['ring'\]", "tables does not")),
    Fault("an unknown prep", lambda: Runner(slots=slots(), ladder=[2], prep="nobody"), ContractError,
          ("prep 'nobody' is unknown", "register it, or correct the name")),
    Fault("a prep registered twice", lambda: _twice(), ContractError,
          ("prep 'meta' is registered already", "choose another contract.name")),
    Fault("an output axis that is none", lambda: build(output_axes={"h": "rows"}), ContractError,
          ("output_axes names axis 'rows' for 'h'", "expected one of")),
    # ladders
    Fault("an empty ladder", lambda: build(ladder=[]), ConfigError, (r"ladder \[\]", "at least one size")),
    Fault("a zero size", lambda: build(ladder=[0, 1]), ConfigError, ("ladder size 0", "positive integer")),
    Fault("a negative size", lambda: build(ladder=[-4]), ConfigError, ("ladder size -4", "positive integer")),
    Fault("a size that is no integer", lambda: build(ladder=[1.5]), ConfigError,
          (r"ladder size 1.5 \(float\)", "positive integer", "convert it")),
    Fault("a ladder that is no list", lambda: build(ladder=8), ConfigError, ("ladder 8", "a list of positive int")),
    Fault("a size that is not on the ladder", lambda: build().capture([3]), ConfigError,
          ("capture of 3", r"the ladder has \[2, 4\]", "add it there")),
    # slots
    Fault("a name that is no identifier", lambda: slot("seq-lens"), ConfigError,
          ("slot name 'seq-lens'", "public Python identifier", "rename the slot")),
    Fault("a private name", lambda: slot("_x"), ConfigError, ("slot name '_x'", "public Python identifier")),
    Fault("a name that is no string", lambda: slot(5), ConfigError, ("slot name 5", "identifier")),
    Fault("a reserved name", lambda: slot("tables"), ConfigError, ("slot name 'tables' is reserved", "rename")),
    Fault("a name twice", lambda: build(slots=[*slots(), slot("lens")]), ConfigError,
          ("slot 'lens' is declared twice", "unique")),
    Fault("an unknown axis", lambda: slot(axis="row"), ConfigError,
          ("slot 'x': axis 'row' is not usable", "request, token, offset, rank, fixed")),
    Fault("a complex dtype", lambda: slot(dtype=torch.complex64), ConfigError,
          ("slot 'x': dtype torch.complex64", "bool, integer or floating")),
    Fault("a dtype that is none", lambda: slot(dtype=int), ConfigError, ("slot 'x': dtype", "torch.dtype")),
    Fault("a pad out of range", lambda: slot(dtype=torch.uint8, pad=256), ConfigError,
          ("slot 'x': pad 256", r"torch.uint8 in \[0, 255\]")),
    Fault("a fraction as an integer's pad", lambda: slot(pad=0.5), ConfigError, ("slot 'x': pad 0.5", "torch.int64")),
    Fault("no pad", lambda: slot(pad=None), ConfigError, ("slot 'x': pad None", "torch.int64")),
    Fault("a text as a float's pad", lambda: slot(dtype=torch.float32, pad="0"), ConfigError,
          ("slot 'x': pad '0'", "torch.float32")),
    Fault("a pad that is infinite in the dtype", lambda: slot(dtype=torch.float16, pad=1e6), ConfigError,
          ("slot 'x': pad 1000000.0", "torch.float16")),
    Fault("a tail rule without a tail", lambda: slot(axis="fixed", pad=REPEAT_LAST), ConfigError,
          ("slot 'x': pad REPEAT_LAST on axis fixed", "no tail")),
    Fault("an idle value out of range", lambda: slot(dtype=torch.int8, idle=200), ConfigError,
          ("slot 'x': idle 200", "torch.int8")),
    Fault("a capture value of another kind", lambda: slot(capture=1.5), ConfigError, ("slot 'x': capture 1.5",)),
    Fault("a row_dim beyond the dimensions", lambda: slot(inner=(3,), row_dim=2), ConfigError,
          ("slot 'x': row_dim=2", "0 to 1")),
    Fault("a negative extent", lambda: slot(inner=(-1,)), ConfigError, (r"slot 'x': inner=\(-1,\)", "non-negative")),
    Fault("an extent that is no integer", lambda: slot(inner=(1.5,)), ConfigError, ("slot 'x': inner", "integers")),
    Fault("another policy for missing", lambda: slot(missing="zero"), ConfigError,
          ("slot 'x': missing='zero'", "'error' or 'pad'")),
    Fault("accepts another kind", lambda: slot(accepts=(torch.float32,)), ConfigError,
          ("slot 'x': accepts torch.float32", "same kind as torch.int64")),
    Fault("a range that is none", lambda: slot(valid=(5, 1)), ConfigError, ("slot 'x': valid=", "low <= high")),
    Fault("a computed value of no kind", lambda: slot(value="RAW"), ConfigError, ("value='RAW'", "RAW_REQUESTS")),
    Fault("a computed float", lambda: slot(dtype=torch.float32, pad=0.0, value=gg.RAW_TOKENS), ConfigError,
          ("slot 'x': value RAW_TOKENS in dtype torch.float32", "integer")),
    Fault("rank counts on another axis", lambda: slot(value=gg.RANK_COUNTS), ConfigError,
          ("slot 'x': value RANK_COUNTS on axis request", "axis='rank'")),
    Fault("a storage of another dtype", lambda: slot(storage=torch.zeros(8)), ConfigError,
          ("slot 'x': storage of torch.float32", "torch.int64")),
    Fault("a storage that is none", lambda: slot(storage=[0] * 8), ConfigError, ("storage list", "torch.Tensor")),
    Fault("a storage that needs grad",
          lambda: slot(dtype=torch.float32, pad=0.0, storage=torch.zeros(8, requires_grad=True)), ConfigError,
          ("slot 'x': storage that requires grad", r"detach\(\)")),
    Fault("a storage too small", lambda: build(slots=[*slots(), slot(storage=STORAGE[:3])]), ConfigError,
          ("slot 'x'", r"shape \(3,\)", r"ladder size 4 needs \(4,\)", "enlarge it or cut the ladder")),
    Fault("storages that overlap",
          lambda: build(slots=[*slots(), slot("x", storage=STORAGE[:8]), slot("y", storage=STORAGE[4:])]), ConfigError,
          ("slots '[xy]' and '[xy]' adopt overlapping storages", "give each its own")),
    Fault("a slot that is none", lambda: build(slots=[5]), ConfigError, ("slot",)),
    # config and the rest
    Fault("an unknown key", lambda: RunnerConfig(paddding=True), ConfigError,  # type: ignore[call-arg]
          ("RunnerConfig is not usable", "paddding", "known are")),
    Fault("a value of the wrong kind", lambda: RunnerConfig(waste_limit="x"), ConfigError,  # type: ignore[arg-type]
          ("RunnerConfig is not usable", "waste_limit")),
    Fault("a switch for nobody", lambda: build(config=RunnerConfig(glue={"mta": "off"})), ConfigError,
          (r"glue names preps \['mta'\]", r"this runner has \['meta'\]")),
    Fault("a config that is none", lambda: build(config={"padding": False}), ConfigError, ("RunnerConfig",)),
    Fault("EXTEND without max_requests", lambda: build(contract=contract(modes={Mode.EXTEND})), ConfigError,
          ("EXTEND ladder counts tokens", r"RunnerConfig\(max_requests=...\)")),
    Fault("EXTEND beside DECODE",
          lambda: build(contract=contract(modes={Mode.EXTEND, Mode.DECODE}), config=RunnerConfig(max_requests=4)),
          ConfigError, (r"\['decode', 'extend'\]", "a Runner of its own")),
    Fault("a table elsewhere", lambda: build(tables={"t": torch.zeros(9, device="meta")}), ConfigError,
          ("table 't' is on meta", "expected cpu")),
    Fault("a table that is none", lambda: build(tables={"t": None}), ConfigError, ("table 't' is a NoneType",)),
    Fault("no prep", lambda: Runner(slots=slots(), ladder=[2], prep=[]), ConfigError, (r"prep \[\]", "at least one")),
    Fault("a prep twice", lambda: Runner(slots=[slot("lens", pad=1)], ladder=[2], prep=[meta, meta]), ConfigError,
          ("prep 'meta' is given twice",)),
    Fault("a prep that is none", lambda: Runner(slots=slots(), ladder=[2], prep=[5]), ConfigError,  # type: ignore[list-item]
          ("prep 5", "a registered name or a callable")),
    Fault("a prep that is none, alone", lambda: Runner(slots=slots(), ladder=[2], prep=5), ConfigError,  # type: ignore[arg-type]
          ("prep 5", "a registered name or a callable")),
    Fault("a forward that is none", lambda: build(forward=5), ConfigError, ("forward", "callable")),
    Fault("no token for a request", lambda: build(tokens_per_request=0), ConfigError, ("tokens_per_request", "0")),
    Fault("fewer tokens than none", lambda: build(tokens_per_request=-1), ConfigError, ("tokens_per_request", "-1")),
    Fault("half a token", lambda: build(tokens_per_request=1.5), ConfigError, ("tokens_per_request", "1.5")),
    Fault("no variant", lambda: build(variants=()), ConfigError, ("variants",)),
    Fault("a device that is none", lambda: build(device="tpu"), ConfigError, ("device 'tpu'", "cpu", "cuda")),
    Fault("a device of another kind", lambda: build(device="meta"), ConfigError, ("device 'meta'", "cpu", "cuda")),
    Fault("ranks, which this version lacks", lambda: build(ranks=object()), ConfigError, ("ranks",)),
]  # fmt: skip


def _twice() -> None:
    registry = Registry()
    registry.register(CONTRACT)(meta)
    registry.register(CONTRACT)(meta)


@parametrized(BUILD)
def test_a_bad_declaration_is_refused_at_once(fault: Fault) -> None:
    before = STORAGE.clone()
    check(fault)
    assert torch.equal(STORAGE, before)


@pytest.mark.skipif(torch.accelerator.is_available(), reason="needs a machine without a GPU")
def test_a_gpu_that_is_not_there_is_refused() -> None:
    check(Fault("no GPU", lambda: build(device="cuda"), ConfigError, ("device 'cuda'", "no GPU", "device='cpu'")))


# Code that does not keep what it declared.


HOST = contract(host_free=False)


CAPTURE: list[Fault] = [
    Fault("a prep that raises", lambda: build(prep=_raising).capture(), CaptureError,
          ("no key could be captured", "the first cause", "LookupError: .*out of pages")),
    Fault("a prep that reads the host", lambda: build(prep=_reading, forward=None).capture(), CaptureError,
          ("no key could be captured", "item", "test_errors.py", "instead")),
    Fault("nothing that may be captured", lambda: build(prep=lambda view: {}, contract=HOST, forward=None).capture(),
          CaptureError, ("no key could be captured", "no forward, and no prep may be glued")),
    Fault("a prep that reads what it did not declare", lambda: build(prep=_undeclared).capture(), ContractError,
          ("prep 'meta' read 'loc'", "did not declare", r"\['lens', 'rows'\]", "correct the name")),
    Fault("a prep that binds a slot", lambda: build(prep=_binding).capture(), ContractError,
          ("prep 'meta' bound another tensor to 'lens'", "copy_")),
    Fault("an output that is not there", lambda: build(prep=lambda v: {"m": v.lens + 1}).capture(), ContractError,
          ("prep 'meta' declares output 'pages'", r"returned tensors \['m'\]")),
    Fault("an output of other rows", lambda: build(prep=lambda v: {"pages": v.lens[:1] + 1}).capture(), ContractError,
          ("'pages' on axis request", "4 rows", r"shape \(1,\)", "correct contract.outputs or the prep")),
    Fault("an output that hides its tensors", lambda: build(prep=_hiding).capture(), ContractError,
          ("prep 'meta' returned 'o' of type object", "register_dataclass")),
    Fault("an output on no axis", lambda: build(forward=lambda v, m: v.lens.sum()).capture(), ContractError,
          ("the forward's output", r"shape \(\)", "output_axes", "token")),
]  # fmt: skip


def _raising(view: Any) -> Any:
    raise LookupError("out of pages")


def _reading(view: Any) -> Any:
    return {"pages": view.lens + view.lens[0].item()}


def _undeclared(view: Any) -> Any:
    return {"pages": view.loc + 1}


def _hiding(view: Any) -> Any:
    return {"pages": view.lens + 1, "o": object()}


def _binding(view: Any) -> Any:
    view.lens = view.lens + 1
    return {"pages": view.lens}


@parametrized(CAPTURE)
def test_code_that_breaks_its_word_is_refused_at_capture(fault: Fault) -> None:
    check(fault)


def test_a_prep_that_raises_in_service_surfaces_as_itself() -> None:
    angry = {"now": False}

    def prep(view: Any) -> Any:
        if angry["now"]:
            raise LookupError("out of pages")
        return meta(view)

    runner = build(prep=prep, contract=CONTRACT.model_copy(update={"host_free": False}))
    runner.capture()
    angry["now"] = True
    with pytest.raises(LookupError, match=r"^out of pages$"):
        runner.replay(Batch(3, sources(3)))


def test_capturing_twice_is_refused_and_the_first_capture_stays(engine: Engine) -> None:
    with pytest.raises(CaptureError, match=r"reset\(\)"):
        engine.runner.capture([2])
    assert engine.runner.buckets == (Bucket(2, 2, 1), Bucket(4, 4, 1))
    engine.assert_serves()


def test_the_tree_is_that_of_the_design() -> None:
    tree = {
        "ContractError": gg.GraphGlueError,
        "BindError": gg.GraphGlueError,
        "CapacityError": BindError,
        "CaptureError": gg.GraphGlueError,
        "StaleTableError": gg.GraphGlueError,
        "DivergenceError": gg.GraphGlueError,
        "RankDisagreementError": gg.GraphGlueError,
        "ClosedError": gg.GraphGlueError,
        "ConfigError": gg.GraphGlueError,
    }
    for name, parent in tree.items():
        assert issubclass(getattr(gg, name), parent)
    assert issubclass(BindError, ValueError)
    raised = {error for rows in (BIND, USE, AFTER_CLOSE, BUILD, CAPTURE) for error in {fault.error for fault in rows}}
    raised.add(StaleTableError)
    assert raised == {
        BindError, CapacityError, CaptureError, ClosedError, ConfigError, ContractError, StaleTableError
    }  # fmt: skip
