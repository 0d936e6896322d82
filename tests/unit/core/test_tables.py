"""Tables: tensors or callables that are compared with what was captured, and the slots that index them."""

from __future__ import annotations

import weakref
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


IN_PLACE: dict[str, Callable[[torch.Tensor], Any]] = {
    "shape": lambda t: t.resize_(2, 2),
    "stride": lambda t: t.t_(),
    "dimensions": lambda t: t.unsqueeze_(0),
    "offset": lambda t: t.set_(t[1:]),
    "storage": lambda t: t.set_(t.clone()),
    "dtype": lambda t: setattr(t, "data", t.view(torch.float64)),
}


@pytest.mark.parametrize("change", IN_PLACE)
def test_a_tensor_that_was_changed_in_place_is_stale(change: str) -> None:
    """It is the same object, and mostly at the same address: what graphs read of it is not what it is now."""
    tensor = torch.arange(9).reshape(3, 3)
    tables = Tables({"other": torch.arange(4), "t": tensor}, CPU)
    tables.check()
    was = Place.of(tensor)
    IN_PLACE[change](tensor)
    with pytest.raises(StaleTableError, match="table 't' moved") as caught:
        tables.check()
    assert str(was) in str(caught.value)
    assert str(Place.of(tensor)) in str(caught.value)


def test_no_tables_have_not_moved() -> None:
    Tables({}, CPU).check()


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


# Tables that were let go of: a runner that sleeps holds none of their memory.


def test_a_table_that_was_let_go_of_is_held_by_nobody_here_and_found_while_it_lives() -> None:
    tensor, home = torch.arange(6), {"u": torch.arange(4)}
    tables = Tables({"t": tensor, "u": lambda: home["u"]}, CPU)
    kept = weakref.ref(tensor)
    tables.let_go()
    assert tables.tensors == {}
    assert set(tables.names) == {"t", "u"}
    home["u"] = torch.arange(5)  # made anew meanwhile
    assert {name: tables.resolve(name, source).numel() for name, source in tables.current().items()} == {"t": 6, "u": 5}
    assert tables.current()["t"] is tensor
    assert tables.places["t"] == Place.of(tensor)  # where it was, to be compared with where it is
    del tensor
    assert kept() is None
    with pytest.raises(StaleTableError, match=r"tables \['t'\] were freed; hand in the new ones with rebind_table"):
        tables.current()
    new = torch.arange(7)
    tables.bind("t", new)
    assert tables.current()["t"] is new
    assert sorted(tables.names) == ["t", "u"]


def test_a_table_without_memory_is_not_found() -> None:
    tensor = torch.arange(6)
    tables = Tables({"t": tensor, "empty": torch.empty(0)}, CPU)
    assert set(tables.current()) == {"t", "empty"}  # one without rows has no memory to lose
    tensor.untyped_storage().resize_(0)
    with pytest.raises(StaleTableError, match="table 't' has no memory; make it anew first, or rebind_table it"):
        tables.current()


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


def test_a_number_has_no_rows() -> None:
    with pytest.raises(ContractError, match="pad 0 is no row of table 't', which has 0"):
        check_indices([index()], {"t": torch.tensor(7)})


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


def test_every_slot_is_looked_at_and_every_value_of_it() -> None:
    plain = Slot("x", axis="request", dtype=torch.int64, pad=-7)
    table = {"t": torch.zeros(4, 2)}
    with pytest.raises(ContractError, match="pad 9 is no row"):
        check_indices([plain, index(pad=9)], table)
    with pytest.raises(ContractError, match="pad 9 is no row"):
        check_indices([index(pad=9, capture=lambda row: 0)], table, {"rows": 2})


def test_capture_values_that_differ_by_row_are_rows_of_the_table() -> None:
    """As far as the largest bucket goes."""
    table, by_row = {"t": torch.zeros(4, 2)}, index(capture=lambda row: row)
    check_indices([by_row], table, {"rows": 4})
    with pytest.raises(ContractError, match=r"slot 'rows': capture\(4\) 4 is no row of table 't', which has 4"):
        check_indices([by_row], table, {"rows": 5})


def test_a_place_is_spelt_for_people() -> None:
    tensor = torch.zeros(2, 3, dtype=torch.int32)
    assert str(Place.of(tensor)) == f"{tensor.data_ptr():#x} int32[2, 3] strides [3, 1]"


def test_a_callable_that_returns_something_else_later_is_named() -> None:
    home: dict[str, Any] = {"t": torch.arange(3)}
    tables = Tables({"t": lambda: home["t"]}, CPU)
    home["t"] = [1]
    for ask in (tables.check, tables.current):
        with pytest.raises(ConfigError, match="table 't' is a list; expected a tensor, or a callable returning one"):
            ask()
