"""Tables: tensors or callables that are compared with what was captured, and the slots that index them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from graphglue import ConfigError, ContractError, Slot, StaleTableError
from graphglue.core.tables import Place, Tables, check_indices

CPU = torch.device("cpu")


def test_a_table_is_a_tensor_or_a_callable() -> None:
    tensor = torch.arange(6)
    tables = Tables({"t": tensor, "u": lambda: tensor}, CPU)
    assert tables.tensors["t"] is tables.tensors["u"] is tensor
    tables.check()


def test_contents_may_change() -> None:
    tensor = torch.arange(6)
    tables = Tables({"t": tensor}, CPU)
    tensor.add_(1)
    tables.check()


MOVES: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "address": lambda t: t.clone(),
    "shape": lambda t: t[:2],
    "stride": lambda t: t.t(),
    "dtype": lambda t: t.view(torch.float64),
    "offset": lambda t: t[1:],
}


@pytest.mark.parametrize("move", MOVES)
def test_a_callable_s_table_that_moved_is_stale(move: str) -> None:
    home = {"t": torch.arange(9).reshape(3, 3)}
    tables, old = Tables({"t": lambda: home["t"]}, CPU), home["t"]
    tables.check()
    home["t"] = MOVES[move](old)
    with pytest.raises(StaleTableError, match=r"table 't' moved.*rebind_table") as caught:
        tables.check()
    assert str(Place.of(old)) in str(caught.value)
    assert str(Place.of(home["t"])) in str(caught.value)
    home["t"] = old
    tables.check()


def test_a_tensor_whose_own_storage_moved_is_stale() -> None:
    tensor = torch.arange(6)
    tables = Tables({"t": tensor}, CPU)
    tensor.data = tensor.clone()
    with pytest.raises(StaleTableError, match="table 't' moved"):
        tables.check()


def test_another_tensor_at_the_same_place_is_the_same_table() -> None:
    tensor = torch.arange(6)
    tables = Tables({"t": lambda: tensor[:]}, CPU)
    tables.check()


def test_binding_again_takes_the_new_place() -> None:
    tables = Tables({"t": torch.arange(6)}, CPU)
    new = torch.arange(8)
    tables.bind("t", new)
    tables.check()
    assert tables.tensors["t"] is new


def test_lifetime_a_table_that_nobody_else_holds_stays() -> None:
    tables = Tables({"t": torch.arange(6)}, CPU)
    assert tables.tensors["t"].tolist() == list(range(6))


@pytest.mark.parametrize(
    ("source", "said"),
    [
        ([1, 2], "table 't' is a list; expected a tensor, or a callable returning one"),
        (None, "table 't' is a NoneType"),
        (lambda: [1], "table 't' is a list"),
        (torch.empty(3, device="meta"), "table 't' is on meta, expected cpu; move it first"),
        (lambda: torch.empty(3, device="meta"), "table 't' is on meta"),
    ],
)
def test_what_is_no_table_is_refused(source: Any, said: str) -> None:
    tables = Tables({"t": torch.arange(3)}, CPU)
    old = tables.tensors["t"]
    with pytest.raises(ConfigError, match=said):
        Tables({"t": source}, CPU)
    with pytest.raises(ConfigError, match=said):
        tables.bind("t", source)
    assert tables.tensors["t"] is old
    tables.check()


def index(pad: Any = 0, **more: Any) -> Slot:
    return Slot("rows", axis="request", dtype=torch.int64, pad=pad, index_of="t", **more)


@pytest.mark.parametrize("more", [{}, {"pad": 3}, {"idle": 3}, {"capture": 3}, {"capture": lambda row: 99}])
def test_pad_alias_pads_are_rows_of_the_table(more: dict[str, Any]) -> None:
    check_indices([index(**more)], {"t": torch.zeros(4, 2)})


@pytest.mark.parametrize(
    ("more", "said"),
    [
        ({"pad": 4}, "slot 'rows': pad 4 is no row of table 't', which has 4"),
        ({"pad": -1}, "slot 'rows': pad -1 is no row of table 't', which has 4; padded rows would read or write"),
        ({"idle": 4}, "idle 4 is no row"),
        ({"capture": -2}, "capture -2 is no row"),
    ],
)
def test_pad_alias_a_pad_beyond_the_table_is_refused(more: dict[str, Any], said: str) -> None:
    with pytest.raises(ContractError, match=said):
        check_indices([index(**more)], {"t": torch.zeros(4, 2)})


def test_an_index_of_an_unknown_table_is_refused() -> None:
    said = r"slot 'rows' indexes table 't', which was not handed in; tables are \['u'\]"
    with pytest.raises(ContractError, match=said):
        check_indices([index()], {"u": torch.zeros(4)})


def test_slots_that_index_nothing_are_not_looked_at() -> None:
    check_indices([Slot("x", axis="request", dtype=torch.int64, pad=-7)], {})


@pytest.mark.parametrize("name", ["keys", "values", "items", "get"])
def test_names_that_would_hide_tables_from_a_mapping_are_refused(name: str) -> None:
    with pytest.raises(ConfigError, match=f"'{name}' is reserved on every view's tables; rename the table"):
        Tables({name: torch.zeros(2)}, torch.device("cpu"))
