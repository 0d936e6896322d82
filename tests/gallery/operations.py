"""Operations of generated preps: each keeps real rows independent of padding, and reads nothing on the host."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch

from .specimens import counted

ROWS, CONTEXT, LOCATIONS = 5, 6, 24
INTEGER, BOOL, FLOAT = "integer", "bool", "float"
Compute = Callable[[Any], torch.Tensor]


@dataclass(frozen=True)
class Value:
    """One tensor of a generated prep.

    Attributes:
        axis: request, token, offset or fixed.
        kind: integer, bool or float.
        inner: extent of the second dimension; 0 for a vector.
        text: the same in words, for reports.
        compute: view -> tensor.
    """

    axis: str
    kind: str
    inner: int
    text: str
    compute: Compute

    def then(self, text: str, change: Callable[[torch.Tensor, Any], torch.Tensor], **fields: Any) -> Value:
        """Go on with another operation."""
        compute = self.compute
        return replace(self, text=text.format(self.text), compute=lambda view: change(compute(view), view), **fields)

    def wide(self) -> Value:
        """Give the same in int64, where sums and products can not be cut off differently."""
        return self.then("{}", lambda x, v: x.to(torch.int64))


def along(column: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
    """Shape a column so that it broadcasts over the second dimension of ``rows``."""
    return column.view(-1, *[1] * (rows.dim() - 1))


def is_real(rows: torch.Tensor, count: torch.Tensor) -> torch.Tensor:
    """Mark the real rows."""
    return along(counted(rows) < count, rows)


def owner(view: Any) -> torch.Tensor:
    """Give the request of each token; pad tokens belong to the last request."""
    tokens = torch.arange(view.bucket.tokens, device=view.indptr.device)
    request = torch.searchsorted(view.indptr[1:].to(torch.int64).contiguous(), tokens, right=True)
    return request.clamp(max=view.bucket.requests - 1)


def summed_from_zero(rows: torch.Tensor) -> torch.Tensor:
    """Give 0 and the running sums."""
    return torch.cat([rows.new_zeros((1, *rows.shape[1:])), rows.cumsum(0)])


def per_request(sums: torch.Tensor, view: Any) -> torch.Tensor:
    """Sum tokens by request, of running sums."""
    indptr = view.indptr.to(torch.int64)
    return sums[indptr[1:]] - sums[indptr[:-1]]


def changes(value: Value, rng: random.Random) -> list[Value]:
    """List the operations that fit a value."""
    a, b = rng.randint(-3, 6), rng.randint(1, 5)
    found = [value.then("{}.clone()", lambda x, v: x.clone())]
    if value.kind == BOOL:
        found += [
            value.then("~{}", lambda x, v: ~x),
            value.then("int({})", lambda x, v: x.to(torch.int64), kind=INTEGER),
            value.then(f"where({{}},{a},{b})", lambda x, v: torch.where(x, a, b), kind=INTEGER),
        ]
    if value.kind == FLOAT:
        found += [
            value.then("{}*2", lambda x, v: x * 2),
            value.then(f"({{}}+{b}/4)", lambda x, v: x + b / 4),
            value.then("({}>1)", lambda x, v: x > 1, kind=BOOL),
            value.then("clamp({},0,2)", lambda x, v: x.clamp(0, 2)),
            value.then("floor({})", lambda x, v: x.floor().to(torch.int64), kind=INTEGER),
        ]
    if value.kind == INTEGER:
        found += _arithmetic(value.wide(), a, b) + _lookups(value.wide())
    if value.inner:
        found += _within_rows(value)
    if value.kind == INTEGER and value.axis != "fixed":
        found += _across_rows(value.wide())
    return found + _to_another_axis(value)


def _arithmetic(value: Value, a: int, b: int) -> list[Value]:
    def filled(x: torch.Tensor, view: Any) -> torch.Tensor:
        made = torch.empty_like(x)
        return torch.add(x, a, out=made)

    return [
        value.then(f"({{}}*{a}+{b})", lambda x, v: x * a + b),
        value.then(f"({{}}//{b})", lambda x, v: x // b),
        value.then(f"({{}}%{b})", lambda x, v: x.remainder(b)),
        value.then(f"int32({{}}%{b})", lambda x, v: x.remainder(b).to(torch.int32)),
        value.then(f"clamp({{}},{a},9)", lambda x, v: x.clamp(a, 9)),
        value.then(f"where({{}}>{a})", lambda x, v: torch.where(x > a, x, -1)),
        value.then(f"({{}}>={a})", lambda x, v: x >= a, kind=BOOL),
        value.then(f"{{}}.add_({a})", lambda x, v: x.clone().add_(a)),
        value.then(f"add({{}},{a},out)", filled),
        value.then("masked_fill({})", lambda x, v: x.masked_fill(x < 0, b)),
        value.then("float({})", lambda x, v: x.remainder(1024).to(torch.float32), kind=FLOAT),
    ]


def _lookups(value: Value) -> list[Value]:
    found = [
        value.then("take(page_map,{})", lambda x, v: v.tables.page_map.take(x.remainder(LOCATIONS))),
        value.then("take(scales,{})", lambda x, v: v.tables.scales.take(x.remainder(LOCATIONS)), kind=FLOAT),
    ]
    if value.inner or value.axis == "fixed":
        return found
    columns = CONTEXT
    return [
        *found,
        value.then("page_map[{}]", lambda x, v: v.tables.page_map[x.remainder(LOCATIONS)]),
        value.then("req_to_token[{}]", lambda x, v: v.tables.req_to_token[x.remainder(ROWS)], inner=columns),
        value.then(
            "page_starts[{}]", lambda x, v: v.tables.req_to_token[:, ::2][x.remainder(ROWS)], inner=columns // 2
        ),
        value.then(
            "newest({})",
            lambda x, v: v.tables.req_to_token[x.remainder(ROWS)].gather(1, x.remainder(columns)[:, None]),
            inner=1,
        ),
        value.then(
            "(columns<{})",
            lambda x, v: torch.arange(columns, device=x.device)[None] < x[:, None],
            kind=BOOL,
            inner=columns,
        ),
        value.then("({}-columns)", lambda x, v: x[:, None] - torch.arange(columns, device=x.device), inner=columns),
    ]


def _within_rows(value: Value) -> list[Value]:
    found = [
        value.then("flip_row({})", lambda x, v: x.flip(1)),
        value.then("first_of({})", lambda x, v: x[:, 0], inner=0),
        value.then("transposed({})", lambda x, v: x.t().contiguous().t()),
    ]
    if value.kind == INTEGER:
        wide = value.wide()
        found += [
            wide.then("cumsum_row({})", lambda x, v: x.cumsum(1)),
            wide.then("sort_row({})", lambda x, v: x.sort(dim=1).values),
            wide.then("sum_row({})", lambda x, v: x.sum(1), inner=0),
            wide.then("max_row({})", lambda x, v: x.amax(1), inner=0),
            wide.then("valid_row({})", lambda x, v: torch.where(x > 2, x, -1)),
        ]
    if value.kind == BOOL:
        found.append(value.then("any_row({})", lambda x, v: x.any(1), inner=0))
    return found


def _across_rows(value: Value) -> list[Value]:
    """List what looks at other rows, and still not at the pads."""
    found = [
        value.then("cumsum({})", lambda x, v: x.cumsum(0)),
        value.then("before({})", lambda x, v: x.cumsum(0) - x),
        value.then("previous({})", lambda x, v: torch.cat([torch.zeros_like(x[:1]), x[:-1]])),
    ]
    if value.axis == "request":
        found += [
            value.then("real({})", lambda x, v: torch.where(is_real(x, v.num_real), x, -1)),
            value.then("cu({})", lambda x, v: summed_from_zero(x), axis="offset"),
        ]
    if value.axis in ("request", "token"):
        count = "num_real" if value.axis == "request" else "num_tokens"
        fixed = {"axis": "fixed", "inner": 0}
        found += [
            value.then("sum_real({})", lambda x, v: torch.where(is_real(x, v[count]), x, 0).sum(), **fixed),
            value.then("max_real({})", lambda x, v: torch.where(is_real(x, v[count]), x, -999).amax(), **fixed),
            value.then("first({})", lambda x, v: x[:1] * 1, **fixed),
        ]
    return found


def _to_another_axis(value: Value) -> list[Value]:
    found = []
    if value.axis == "request":
        found += [
            value.then("{}[owner]", lambda x, v: x[owner(v)], axis="token"),
            value.then("{}.index_select(owner)", lambda x, v: x.index_select(0, owner(v)), axis="token"),
        ]
    if value.axis == "token" and value.kind == INTEGER:
        wide = value.wide()
        found += [
            wide.then("by_request({})", lambda x, v: per_request(summed_from_zero(x), v), axis="request"),
            wide.then("place+{}", lambda x, v: x + along(counted(x) - v.indptr[owner(v)], x)),
        ]
    if value.axis == "offset" and value.kind == INTEGER:
        found.append(value.wide().then("diff({})", lambda x, v: x[1:] - x[:-1], axis="request"))
    return found


def joined(one: Value, other: Value, rng: random.Random) -> Value:
    """Combine two values of one axis, which broadcast over their second dimension."""
    if one.inner and other.inner and one.inner != other.inner and 1 not in (one.inner, other.inner):
        other = other.then("first_of({})", lambda x, v: x[:, 0], inner=0)
    inner = max(one.inner, other.inner)

    def both(change: Callable[[torch.Tensor, torch.Tensor], torch.Tensor]) -> Compute:
        def compute(view: Any) -> torch.Tensor:
            x, y = one.compute(view).to(torch.int64), other.compute(view).to(torch.int64)
            if one.axis == "fixed":
                x, y = x.reshape(-1)[:1], y.reshape(-1)[:1]
            elif x.dim() != y.dim():
                x, y = (x[:, None], y) if x.dim() < y.dim() else (x, y[:, None])
            return change(x, y)

        return compute

    combine = {
        "+": lambda x, y: x + y,
        "min": torch.minimum,
        "where": lambda x, y: torch.where(x > y, x, y - 1),
        "<": lambda x, y: (x < y).to(torch.int64),
    }
    name = rng.choice(sorted(combine))
    return Value(one.axis, INTEGER, inner, f"({one.text} {name} {other.text})", both(combine[name]))
