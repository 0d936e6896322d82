"""What an outside engineer broke the audit with, each as the kind that it stands for."""

from __future__ import annotations

import random
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any
from unittest.mock import MagicMock

import numpy as np
import pytest
import torch
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

import graphglue as gg
from graphglue.audit import Certificate, Verdict, audit
from graphglue.audit.certificate import why_uncertified
from graphglue.audit.command import made
from graphglue.audit.source import UNREADABLE, Source
from graphglue.device.base import open_device
from graphglue.errors import ConfigError
from tests.unit.audit.subjects import contract, good, make_runner, slots, table
from tests.unit.audit.test_certificate import audited, full

CPU = open_device("cpu")
SOURCES = {"seq_lens": [5, 6, 7], "rows": [1, 2, 3], "locations": [1, 2, 3], "offsets": np.arange(4, dtype=np.int32)}


def verdicts(certificate: Certificate) -> dict[str, str]:
    return {check.name: check.verdict.value for check in certificate.checks}


def failed(certificate: Certificate) -> set[str]:
    return {check.name for check in certificate.checks if check.verdict is Verdict.FAIL}


# Code that a certificate stands for.


def loaded(code: str) -> Any:
    module = ModuleType("engine")
    exec(compile(code, "engine.py", "exec"), module.__dict__)
    return module.__dict__["prep"]


CODE = {
    "an attribute of an attribute": """
class Config: pass
class Backend:
    def __init__(self):
        self.config = Config()
        self.config.page = {}
    def prep(self, view): return view.a // self.config.page
prep = Backend().prep""",
    "a property": """
class Backend:
    @property
    def page(self): return {}
    def prep(self, view): return view.a + self.page
prep = Backend().prep""",
    "a class method": """
class Backend:
    @classmethod
    def page(cls): return {}
    def prep(self, view): return view.a + self.page()
prep = Backend().prep""",
    "a base's method": """
class Base:
    def prep(self, view): return view.a + {}
class Backend(Base):
    def prep(self, view): return super().prep(view)
prep = Backend().prep""",
    "a class that it makes": """
class Plan:
    def __init__(self, view): self.lengths = view.a + {}
def prep(view): return Plan(view).lengths""",
    "a class that a helper makes": """
class Plan:
    def run(self, view): return view.a + {}
def make(): return Plan()
def prep(view): return make().run(view)""",
    "a constant of a class": """
class Pages:
    SIZE = {}
def prep(view): return view.a + Pages.SIZE""",
    "a constant of its own class": """
class Backend:
    SIZE = {}
    def prep(self, view): return view.a + self.SIZE
prep = Backend().prep""",
    "a function in a dict": """
def step(lengths): return lengths + {}
STEPS = dict(step=step)
def prep(view): return STEPS['step'](view.a)""",
    "a function in a list": """
def step(lengths): return lengths + {}
STEPS = [step]
def prep(view): return STEPS[0](view.a)""",
    "a number in a dict": """
SIZES = dict(page={})
def prep(view): return view.a + SIZES['page']""",
    "a function that it holds": """
class Backend:
    def __init__(self): self.step = lambda lengths: lengths + {}
    def prep(self, view): return self.step(view.a)
prep = Backend().prep""",
    "an object that it holds": """
class Layout:
    def step(self, lengths): return lengths + {}
class Backend:
    def __init__(self): self.layout = Layout()
    def prep(self, view): return self.layout.step(view.a)
prep = Backend().prep""",
    "slots": """
class Backend:
    __slots__ = ("page",)
    def __init__(self): self.page = {}
    def prep(self, view): return view.a + self.page
prep = Backend().prep""",
    "an object in a closure": """
class Config: pass
def make(page):
    config = Config()
    config.page = page
    def prep(view): return view.a + config.page
    return prep
prep = make({})""",
    "an enum": """
import enum
class Page(enum.Enum): SIZE = {}
def prep(view): return view.a + Page.SIZE.value""",
    "a module": """
import torch
class Backend(torch.nn.Module):
    def forward(self, view): return view.a + {}
prep = Backend()""",
}


@pytest.mark.parametrize("what", list(CODE))
def test_a_certificate_goes_out_of_date_wherever_the_code_takes_its_values_from(what: str) -> None:
    digests = [Source.of(loaded(CODE[what].replace("{}", str(number)))).digest for number in (16, 16, 32)]
    assert digests[0] == digests[1], "nothing changed"
    assert digests[0] != digests[2]


STATE = {
    "a counter": """
class Backend:
    calls = 0
    def prep(self, view):
        self.calls += 1
        return view.a
backend = Backend()
backend.calls = {}
prep = backend.prep""",
    "a memo": """
MEMO = dict(key={})
def prep(view):
    if 'key' not in MEMO: MEMO['key'] = 1
    return view.a""",
    "what only its maker sets": """
class Backend:
    def __init__(self): self.started = {}
    def prep(self, view): return view.a
prep = Backend().prep""",
}


@pytest.mark.parametrize("what", list(STATE))
def test_what_the_code_changes_or_never_reads_is_no_code(what: str) -> None:
    assert Source.of(loaded(STATE[what].replace("{}", "1"))) == Source.of(loaded(STATE[what].replace("{}", "2")))


class Proxy:
    """Answer everything with another one."""

    def __getattr__(self, name: str) -> Any:
        return Proxy()

    def __call__(self, view: Any) -> Any:
        return good(view)


class Refuses:
    """Raise whatever it is asked."""

    def __getattr__(self, name: str) -> Any:
        raise RuntimeError(name)

    def __repr__(self) -> str:
        raise RuntimeError("repr")

    def __call__(self, view: Any) -> Any:
        return good(view)


def wraps_itself(view: Any) -> Any:
    return good(view)


class Unbound:
    """Refuse to say what it stands for, as a proxy that is not bound yet."""

    @property
    def __class__(self) -> Any:
        raise RuntimeError("unbound")


UNBOUND = Unbound()


def names_what_is_unbound(view: Any) -> Any:
    assert UNBOUND is not None
    return good(view)


wraps_itself.__wrapped__ = wraps_itself  # type: ignore[attr-defined]
HOLDS = frozenset({Refuses()})


def holds_what_refuses(view: Any) -> Any:
    assert HOLDS
    return good(view)


@pytest.mark.parametrize(
    "prep",
    [Proxy(), Refuses(), wraps_itself, holds_what_refuses, names_what_is_unbound, MagicMock(side_effect=good)],
    ids=lambda one: type(one).__name__,
)
def test_objects_that_answer_anything_or_nothing_are_certified_like_others(prep: Any) -> None:
    certificate = audit(make_runner(prep, ladder=[2]))
    assert certificate.passed
    assert Source.of(prep) == Source.of(prep)
    make_runner(prep, config=gg.RunnerConfig(certificate="require"))


def test_code_that_can_not_be_read_is_certified_by_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    before = full(make_runner())
    monkeypatch.setattr("graphglue.audit.source._Reading.read", lambda *_: 1 / 0)
    now = audited(make_runner())
    assert now.source.startswith(UNREADABLE)
    assert now.source != audited(make_runner()).source
    assert "can not be read" in str(before.covers("prep", now, CPU))


def test_a_script_that_runs_is_the_module_that_was_audited(tmp_path: Path) -> None:
    code = (
        "import graphglue, sys\nfrom graphglue.audit.source import Source\nclass B:\n K = frozenset('abc')\n"
        " def __call__(s, v): return v.a if v.b in s.K else v.c\n"
        "if __name__ == '__main__': print(Source.of(B()).digest)\n"
    )
    (tmp_path / "serve.py").write_text(code)
    moved = tmp_path / "elsewhere"
    moved.mkdir()
    (moved / "serve.py").write_text("# moved\n\n" + code)
    as_module = "import serve; print(serve.Source.of(serve.B()).digest)"
    runs = [
        (tmp_path, ["serve.py"]), (tmp_path, ["-c", as_module]), (tmp_path, ["-m", "serve"]), (moved, ["serve.py"]),
    ]  # fmt: skip
    path = ":".join(sys.path)
    seen = [
        subprocess.run(
            [sys.executable, *how], cwd=at, env={"PYTHONPATH": f".:{path}"}, capture_output=True, text=True, check=True
        ).stdout
        for at, how in runs
    ]
    assert len(set(seen)) == 1, seen


# Certificates that can not be used.


@pytest.mark.parametrize("text", ["", "{", "[" * 100_000, '{"checks": []}', "null", "\ud800"])
def test_a_certificate_that_is_none_sends_its_prep_to_the_eager_fallback(tmp_path: Path, text: str) -> None:
    path = tmp_path / "c.json"
    path.write_bytes(text.encode("utf-8", "surrogatepass"))
    runner = make_runner(
        config=gg.RunnerConfig(certificate="require", certificate_path=path), forward=lambda v, m: v.rows
    )
    runner.capture(progress=False)
    decision = runner.replay(gg.Batch(3, SOURCES)).decision
    assert (decision.prep, decision.reason) == (gg.Route.EAGER, gg.Reason.NOT_CERTIFIED)


@pytest.mark.parametrize("path", ["/", "/nowhere/c.json", "\0"])
def test_a_path_that_is_no_file_is_a_reason(path: str) -> None:
    assert "can not be read" in str(why_uncertified(Path(path), "prep", audited(make_runner()), CPU))


# What a step does beside what it returns.


def lengths(index_of: str | None = "lengths") -> dict[str, Any]:
    rows = gg.Slot("rows", axis="request", dtype=torch.int64, pad=0, index_of=index_of)
    tables = {"table": table(), "lengths": torch.zeros(32, dtype=torch.int64)}
    return {"with_slots": [rows if slot.name == "rows" else slot for slot in slots()], "tables": tables}


def effects(**changes: Any) -> gg.PrepContract:
    return contract(tables=("table", "lengths"), effects=("lengths",), **changes)


def adds_up_all_rows(view: Any) -> Any:
    view.tables.lengths[5:6].add_(view.seq_lens.sum())
    return good(view)


def counts_steps(view: Any) -> Any:
    view.tables.lengths[5:6].add_(1)
    return good(view)


def writes_its_rows(view: Any) -> Any:
    view.tables.lengths.index_copy_(0, view.rows, view.seq_lens)
    return good(view)


def does_another_thing_under_a_mode(view: Any) -> Any:
    view.tables.lengths[5:6].add_(int(torch._C._len_torch_dispatch_stack() > 0))
    return good(view)


@pytest.mark.parametrize(
    ("prep", "idle", "index_of", "expected"),
    [
        (adds_up_all_rows, "eager", "lengths", "fail"),
        (adds_up_all_rows, "eager", "table", "unknown"),
        (counts_steps, "glue", "lengths", "fail"),
        (counts_steps, "eager", "lengths", "pass"),
        (does_another_thing_under_a_mode, "eager", "lengths", "fail"),
        (writes_its_rows, "eager", "lengths", "pass"),
        (writes_its_rows, "glue", "lengths", "pass"),
        (writes_its_rows, "glue", "table", "pass"),
    ],
)
def test_pads_change_no_row_of_a_table_but_its_sink(prep: Any, idle: str, index_of: str, expected: str) -> None:
    certificate = audit(make_runner(prep, declared=effects(idle=idle), **lengths(index_of)))
    assert verdicts(certificate)["pad_image"] == expected


# What only the first call does.


def keeps(what: Callable[[Any], Any], memo: list[Any]) -> Any:
    def prep(view: Any) -> Any:
        if not memo:
            memo.append(what(view))
        return {**good(view), "positions": view.seq_lens + memo[0]}

    return prep


@pytest.mark.parametrize(
    ("what", "is_fault"),
    [
        (lambda view: int(view.seq_lens.max()), True),
        (lambda view: (view.seq_lens + 1).tolist()[0], True),
        (lambda view: view.tables.table[3, 3].item(), True),
        (lambda view: torch.arange(4).tolist()[2], False),
        (lambda view: view.bucket.requests * 0 + 2, False),
    ],
)
def test_a_number_that_the_first_call_read_from_the_device_and_kept_is_found(what: Any, is_fault: bool) -> None:
    certificate = audit(make_runner(keeps(what, [])))
    assert (failed(certificate) == {"double_capture"}) is is_fault
    assert certificate.passed is not is_fault


def test_a_planner_alone_does_not_pass_what_nobody_perturbed() -> None:
    class Backend:
        extra = 1

        def __init__(self) -> None:
            self.extra = 3

        def __call__(self, view: Any) -> Any:
            return {**good(view), "positions": view.seq_lens + self.extra}

    def plan(batch: gg.Batch, bucket: gg.Bucket) -> dict[str, Any]:
        return {"locations": [1] * batch.num_requests}

    check = next(one for one in audit(make_runner(Backend(), plan=plan)).checks if one.name == "double_capture")
    assert check.verdict is Verdict.UNKNOWN
    assert "self.extra" in check.evidence[0].text


def test_an_array_that_a_prep_holds_is_named_as_host_state() -> None:
    mirror = np.full(4, 3)
    certificate = audit(make_runner(lambda view: {**good(view), "positions": view.seq_lens + int(mirror[0])}))
    check = next(one for one in certificate.checks if one.name == "double_capture")
    assert "mirror" in check.evidence[0].text


# What the audit leaves behind.


class PassingOn(TorchDispatchMode):
    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*args, **(kwargs or {}))


class CallingOn(TorchFunctionMode):
    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*args, **(kwargs or {}))


OWN = torch.Generator()
LIVE = table()
DISTURBING: dict[str, Callable[[], Any]] = {
    "torch's numbers": lambda: torch.randint(0, 9, (1,)),
    "a generator's numbers": lambda: torch.randint(0, 9, (1,), generator=OWN),
    "Python's numbers": random.random,
    "numpy's numbers": np.random.random,
    "the default dtype": lambda: torch.set_default_dtype(torch.float64),
    "deterministic algorithms": lambda: torch.use_deterministic_algorithms(True),
    "threads": lambda: torch.set_num_threads(torch.get_num_threads() + 1),
    "the default device": lambda: torch.set_default_device("cpu"),
    "gradients": lambda: torch.set_grad_enabled(True),
    "a dispatch mode": lambda: PassingOn().__enter__(),
    "a function mode": lambda: CallingOn().__enter__(),
    "the process": lambda: sys.exit(0),
    "a live table": lambda: LIVE[3].add_(1),
}


def process() -> list[Any]:
    return [
        random.getstate(), repr(np.random.get_state()), torch.get_rng_state().tolist(), OWN.get_state().tolist(),
        torch.get_default_dtype(), torch.are_deterministic_algorithms_enabled(), torch.get_num_threads(),
        torch.get_default_device(), torch.is_grad_enabled(), torch._C._len_torch_dispatch_stack(),
        torch._C._len_torch_function_stack(), LIVE.tolist(),
    ]  # fmt: skip


@pytest.mark.parametrize("what", list(DISTURBING))
def test_whatever_a_prep_sets_is_as_it_was_after_the_audit(what: str) -> None:
    def prep(view: Any) -> Any:
        DISTURBING[what]()
        return good(view)

    runner = make_runner(prep, ladder=[1, 2], tables={"table": LIVE})
    before = process()
    audit(runner)
    assert process() == before


def test_metadata_of_a_captured_runner_stays_though_it_lies_in_the_prep_s_buffers() -> None:
    buffer = torch.zeros(4, dtype=torch.int64)

    def prep(view: Any) -> Any:
        positions = buffer[: view.bucket.requests]
        return {**good(view), "positions": torch.sub(view.seq_lens, 1, out=positions)}

    runner = make_runner(prep, declared=contract(writes=("positions",)))
    runner.capture(progress=False)
    metadata = runner.prepare(gg.Batch(3, SOURCES)).metadata
    assert audit(runner).passed
    assert metadata["positions"].tolist() == [4, 5, 6, 0]


@pytest.mark.parametrize("at", [1, 7, 30, 60, 90])
def test_an_interrupt_leaves_nothing_on_and_nothing_poisoned(at: int) -> None:
    held, calls = torch.arange(4), [0]

    def prep(view: Any) -> Any:
        calls[0] += 1
        if calls[0] == at:
            raise KeyboardInterrupt
        return {**good(view), "positions": view.seq_lens + held[0]}

    runner, before = make_runner(prep), process()
    with pytest.raises(KeyboardInterrupt):
        audit(runner)
    assert process() == before
    assert held.tolist() == [0, 1, 2, 3]


# The command.


@pytest.mark.parametrize("code", ["import sys; sys.exit(0)", "import sys\ndef make(): sys.exit(0)"])
def test_a_target_that_ends_the_process_has_not_passed(
    code: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "exits.py").write_text(code)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "exits", raising=False)
    with pytest.raises(ConfigError, match="SystemExit"):
        made("exits:make")
