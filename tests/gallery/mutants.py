"""Mutants of the shipped preps: their source, changed in one place by a table of changes.

There are two families. A *fault* breaks what every contract promises: it reads on the host, keeps a tensor,
mixes rows, bakes a number, leaves rows unwritten. The audit must catch each of them, unless the change
can not be told from the original (``EQUIVALENT`` says why, one by one). An *edit* is what a slip of the hand
makes: another constant, comparison, operand or slot, a call left out. Most of those are another prep that is as
host-free as the first; the audit is silent on them by right, and the prep's slow reference must catch them.
"""

from __future__ import annotations

import ast
import copy
import inspect
import itertools
from collections.abc import Iterator
from dataclasses import dataclass
from types import ModuleType, SimpleNamespace
from typing import Any

import torch

from graphglue.audit import Certificate, run_checks
from graphglue.audit.subject import Subject

from .shipped import SHIPPED, Shipped

FAULT, EDIT = "fault", "edit"

# What stands in a mutant's module besides its own names.
_BESIDE = """
_kept, _counter, _engine, _live = {}, itertools.count(1), SimpleNamespace(scale=1), {}
def _undeclared(like):
    return _live.setdefault((like.shape, like.dtype), torch.ones_like(like))[...]
def _unwritten(like):
    made = torch.empty_like(like)
    made[:1] = like[:1]
    return made
def _written(like):
    return like.add_(1).sub_(1) if like.dtype != torch.bool else like.logical_not_().logical_not_()
"""

# Expressions with one tensor {0}, its rows on dim 0. Each is a fault wherever that tensor reaches a result.
READ_FAULTS = {
    "host read": "({0} + 0 * int({0}.reshape(-1)[0].item()))",
    "list": "torch.tensor({0}.tolist(), device={0}.device)",
    "over the host": "{0}.cpu().to({0}.device)",
    "branch on contents": "({0} if bool(({0} >= 0).all()) else {0} + 1)",
    "kept at first use": "_kept.setdefault(({1!r}, tuple({0}.shape)), {0}.clone())",
    "written in place": "_written({0})",
    "undeclared tensor": "({0} * _undeclared({0}))",
    "random": "({0} + torch.randint_like({0}, 1))",
    "host scalar": "({0} * _engine.scale)",
    "counter": "({0} + next(_counter))",
    "masked rows": "{0}[{0} == {0}]",
}
ROW_FAULTS = {
    "backwards": "{0}.flip(0)",
    "previous row, around": "{0}.roll(1, 0)",
    "sorted": "{0}.sort(0).values",
    "less the least": "({0} - {0}.amin(0))",
    "sum from the end": "{0}.flip(0).cumsum(0).flip(0).to({0}.dtype)",
    "bucket's count": "({0} + view.bucket.requests)",
}
RESULT_FAULTS = {
    **{name: READ_FAULTS[name] for name in ("host read", "kept at first use", "random", "counter", "host scalar")},
    **ROW_FAULTS,
    "unwritten rows": "_unwritten({0})",
}
TABLE_FAULTS = {name: READ_FAULTS[name] for name in READ_FAULTS if name != "masked rows"}

_COMPARISONS = {
    ast.Lt: ast.LtE,
    ast.LtE: ast.Lt,
    ast.Gt: ast.GtE,
    ast.GtE: ast.Gt,
    ast.Eq: ast.NotEq,
    ast.NotEq: ast.Eq,
}
_OPERATORS = {ast.Add: ast.Sub, ast.Sub: ast.Add, ast.Mult: ast.Add, ast.FloorDiv: ast.Mult, ast.Mod: ast.FloorDiv}
_DROPPED = {"clamp", "clone", "to", "contiguous", "where", "minimum", "maximum", "pad", "cumsum"}


@dataclass(frozen=True)
class Mutant:
    """One changed prep.

    Attributes:
        shipped: the prep that was changed.
        family: fault or edit.
        change: what was done, and where: unique among the mutants of a prep.
        source: its module's source.
    """

    shipped: Shipped
    family: str
    change: str
    source: str

    @property
    def name(self) -> str:
        """The prep and the change."""
        return f"{self.shipped.name}: {self.change}"

    def module(self) -> ModuleType:
        """Run the changed source as a module of its own."""
        made = ModuleType(f"mutant_of_{self.shipped.module.__name__.rpartition('.')[2]}")
        made.__file__ = self.shipped.module.__file__
        made.__dict__.update(itertools=itertools, SimpleNamespace=SimpleNamespace, torch=torch)
        exec(_BESIDE, made.__dict__)  # the tests' own text
        exec(compile(self.source, str(made.__file__), "exec"), made.__dict__)
        return made


def mutants_of(shipped: Shipped) -> list[Mutant]:
    """Make all mutants of a prep, each once."""
    source = inspect.getsource(shipped.module)
    found: dict[str, Mutant] = {}
    for function in range(len(_preps(ast.parse(source)))):
        for family, change, tree in _changed(source, function, shipped):
            text = ast.unparse(ast.fix_missing_locations(tree))
            number = sum(known.startswith(change) for known in found)
            named = change if not number else f"{change} #{number + 1}"
            if text != ast.unparse(ast.parse(source)):
                found[named] = Mutant(shipped, family, named, text)
    return list(found.values())


def _preps(tree: ast.AST) -> list[ast.FunctionDef]:
    """Find the functions that take a view, the inner ones alone."""
    return [
        node
        for node in ast.walk(tree)
        if isinstance(node, ast.FunctionDef) and node.args.args and node.args.args[0].arg == "view"
    ]


def _changed(source: str, function: int, shipped: Shipped) -> Iterator[tuple[str, str, ast.AST]]:
    """Apply each change to each node that it fits, one at a time, to a fresh tree."""
    tree = ast.parse(source)
    body = _preps(tree)[function]
    refusals = {id(inner) for node in ast.walk(body) if _only_raises(node) for inner in ast.walk(node)}
    for position, node in enumerate(ast.walk(body)):
        if id(node) in refusals:
            continue
        for family, change, replacement in _replacements(node, shipped):
            fresh = copy.deepcopy(tree)
            target = next(itertools.islice(ast.walk(_preps(fresh)[function]), position, None))
            _Replace(target, replacement).visit(fresh)
            yield family, change, fresh


def _only_raises(node: ast.AST) -> bool:
    """Tell whether a node stands for a check that refuses, which no legal batch reaches."""
    return isinstance(node, ast.If) and isinstance(node.body[0], ast.Raise)


class _Replace(ast.NodeTransformer):
    def __init__(self, target: ast.AST, replacement: ast.AST) -> None:
        self._target, self._replacement = target, replacement

    def visit(self, node: ast.AST) -> Any:
        return self._replacement if node is self._target else super().visit(node)


def _replacements(node: ast.AST, shipped: Shipped) -> Iterator[tuple[str, str, ast.AST]]:
    if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Load):
        yield from _of_read(node, shipped)
    if isinstance(node, ast.Dict):
        yield from _of_results(node)
    yield from _edits(node, shipped)


def _of_read(node: ast.Attribute, shipped: Shipped) -> Iterator[tuple[str, str, ast.AST]]:
    text = ast.unparse(node)
    is_slot = text.startswith("view.") and node.attr in shipped.contract.reads
    is_table = text.startswith("view.tables.") and node.attr in shipped.contract.tables
    faults = {**READ_FAULTS, **ROW_FAULTS} if is_slot else TABLE_FAULTS if is_table else {}
    for name, template in faults.items():
        yield FAULT, f"{text}, {name}", _expression(template.format(text, node.attr))


def _of_results(node: ast.Dict) -> Iterator[tuple[str, str, ast.AST]]:
    for position, (key, value) in enumerate(zip(node.keys, node.values)):
        leaf = key.value if isinstance(key, ast.Constant) else str(position)
        for name, template in RESULT_FAULTS.items():
            changed = copy.deepcopy(node)
            changed.values[position] = _expression(template.format(f"({ast.unparse(value)})", str(leaf)))
            yield FAULT, f"result {leaf}, {name}", changed


def _edits(node: ast.AST, shipped: Shipped) -> Iterator[tuple[str, str, ast.AST]]:
    text = ast.unparse(node) if isinstance(node, ast.expr) else ""
    for changed in _edited(node, shipped):
        yield EDIT, f"{text} -> {ast.unparse(changed)}", changed


def _edited(node: ast.AST, shipped: Shipped) -> Iterator[ast.AST]:
    if isinstance(node, ast.Constant) and type(node.value) is int:
        yield from (ast.Constant(node.value + step) for step in (1, -1))
    if isinstance(node, ast.Compare):
        for kind, other in _COMPARISONS.items():
            if isinstance(node.ops[0], kind):
                yield ast.Compare(node.left, [other()], node.comparators)
    if isinstance(node, ast.BinOp):
        for kind, other in _OPERATORS.items():
            if isinstance(node.op, kind):
                yield ast.BinOp(node.left, other(), node.right)
        yield node.left
    if isinstance(node, ast.Call):
        yield from _calls(node)
    if (
        isinstance(node, ast.Attribute)
        and ast.unparse(node).startswith("view.")
        and node.attr in shipped.contract.reads
    ):
        axes = {slot.name: slot.axis for slot in shipped.slots}
        yield from (
            ast.Attribute(node.value, other, node.ctx)
            for other in axes
            if other != node.attr and axes[other] == axes[node.attr]
        )


def _calls(node: ast.Call) -> Iterator[ast.AST]:
    """Leave out a call, or one of its keywords."""
    if isinstance(node.func, ast.Attribute) and node.func.attr in _DROPPED:
        owner = ast.unparse(node.func.value)
        from_module = owner.startswith("torch")
        yield node.args[-1 if node.func.attr == "where" else 0] if from_module else node.func.value
    for position in range(len(node.keywords)):
        kept = [keyword for at, keyword in enumerate(node.keywords) if at != position]
        yield ast.Call(node.func, node.args, kept)


def _expression(text: str) -> ast.expr:
    return ast.parse(text, mode="eval").body


# Outcomes.


def agrees_with_reference(mutant: Mutant, num_steps: int = 4) -> bool:
    """Tell whether a mutant computes what the shipped prep's slow reference does, in the dtypes of the original."""
    shipped = mutant.shipped
    with shipped.runner(shipped.make(mutant.module())) as runner:
        (subject,) = Subject.of(runner)
    key, original = subject.keys[-1], shipped.make(shipped.module)
    for seed, raw in zip(range(num_steps), reversed(subject.raws(key))):
        sources = subject.sources(raw, seed)
        listed = {name: tensor.tolist() for name, tensor in {**sources, **subject.tables}.items()}
        dtypes = {name: leaf.dtype for name, leaf in original(subject.exact_view(raw, sources, key)).items()}
        try:
            seen = subject.call(subject.exact_view(raw, sources, key))
        except Exception:  # a mutant may fail in any way
            return False
        if {name: leaf.dtype for name, leaf in seen.items()} != dtypes:
            return False
        if {name: leaf.tolist() for name, leaf in seen.items()} != shipped.expected(listed):
            return False
    return True


def audited(mutant: Mutant, device: torch.device | str = "cpu") -> Certificate:
    """Audit a mutant; its host state is perturbed."""
    module = mutant.module()
    engine = module.__dict__["_engine"]

    def perturb() -> None:
        engine.scale = engine.scale % 3 + 1

    with mutant.shipped.runner(mutant.shipped.make(module), device) as runner:
        return run_checks(runner, perturb=perturb, poisoning=True)


MUTANTS = {mutant.name: mutant for shipped in SHIPPED.values() for mutant in mutants_of(shipped)}


# Mutants that can not be told from the original, or that do no wrong; each was looked at.
_PADS_ARE_ZERO = "its pad rows hold 0, so a sum that begins at the last row is the same however far the batch is padded"
EQUIVALENT = {
    "paged-decode: result positions, sum from the end": _PADS_ARE_ZERO,
    "paged-decode: result write_locations, sum from the end": _PADS_ARE_ZERO,
    "paged-decode: view.out_cache_loc, sum from the end": _PADS_ARE_ZERO,
    "paged-decode: result cu_seq_lens, sorted": "running sums of positive lengths are in order already",
    "paged-decode: result cu_seq_lens, less the least": "the least of them is the leading 0",
    "paged-decode: locations.clone() -> locations": "a slot that a prep returns is copied by whoever calls it",
    "paged-decode: 0 -> -1": "the last dimension of a vector is its first",
}
