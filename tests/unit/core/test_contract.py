"""Contracts: data that is checked, frozen and hashed, and that must fit slots, tables and each other."""

from __future__ import annotations

import math
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from graphglue import REPEAT_LAST, Axis, ContractError, Mode, PrepContract, Slot
from graphglue.core.contract import GENERIC, check_contracts

SRC = Path(__file__).parents[3] / "src"


def contract(**fields: Any) -> PrepContract:
    return PrepContract(**{"name": "p", "modes": {Mode.DECODE}, **fields})


def slot(pad: Any = 0, **more: Any) -> Slot:
    return Slot("x", axis="request", dtype=torch.float32, pad=pad, **more)


def test_defaults_are_those_of_the_design() -> None:
    bare = PrepContract(modes={Mode.DECODE})
    assert (bare.host_free, bare.padded, bare.ragged, bare.idle, bare.features) == (True, True, False, "eager", set())
    assert (bare.reads_end, bare.compile, bare.writes, bare.effects, bare.tables) == ("prep", False, (), (), ())


def test_a_prep_without_a_contract_counts_as_unpadded_decode() -> None:
    assert PrepContract(modes={Mode.DECODE}, padded=False) == GENERIC


def test_row_axes_are_spelled_or_enums() -> None:
    outputs = contract(outputs={"a": "token", "b": Axis.OFFSET, "c": "fixed", "d": "request"}).outputs
    assert outputs == {"a": Axis.TOKEN, "b": Axis.OFFSET, "c": Axis.FIXED, "d": Axis.REQUEST}


def test_a_contract_is_frozen_and_keeps_no_tie_to_what_it_came_from() -> None:
    reads, modes = {"x": 0}, {Mode.DECODE}
    made = contract(reads=reads, modes=modes)
    reads["y"] = 1
    modes.add(Mode.DRAFT)
    assert dict(made.reads) == {"x": 0}
    assert made.modes == {Mode.DECODE}
    with pytest.raises(ValueError, match="frozen"):
        made.padded = False  # type: ignore[misc]
    assert made.padded


@pytest.mark.parametrize(
    ("given", "pads"),
    [(1, (1,)), ((0, 1), (0, 1)), ([3], (3,)), (REPEAT_LAST, (REPEAT_LAST,)), (0.5, (0.5,))],
)
def test_one_pad_or_several(given: Any, pads: tuple[Any, ...]) -> None:
    assert contract(reads={"x": given}).pads_of("x") == pads


CHANGES: list[dict[str, Any]] = [
    {"name": "q"},
    {"reads": {"x": 2}},
    {"reads": {"x": (1, 2)}},
    {"reads": {"y": 1}},
    {"tables": ("t", "u")},
    {"outputs": {"m": "request"}},
    {"modes": {Mode.DECODE, Mode.DRAFT}},
    {"host_free": False},
    {"padded": False},
    {"ragged": True},
    {"idle": "glue"},
    {"features": {"lora"}},
    {"writes": ("w",)},
    {"effects": ("t",)},
    {"reads_end": "forward"},
    {"compile": True},
]
BASE: dict[str, Any] = {"reads": {"x": 1}, "tables": ("t",), "outputs": {"m": "token"}}


@pytest.mark.parametrize("change", CHANGES, ids=lambda change: next(iter(change)))
def test_every_field_changes_the_digest(change: dict[str, Any]) -> None:
    assert contract(**BASE).digest() != contract(**{**BASE, **change}).digest()


def test_equal_contracts_have_equal_digests_whatever_the_order() -> None:
    one = contract(reads={"x": (0, 1), "y": REPEAT_LAST}, outputs={"a": "token", "b": "fixed"}, features={"l", "m"})
    two = contract(reads={"y": REPEAT_LAST, "x": (1, 0)}, outputs={"b": "fixed", "a": "token"}, features={"m", "l"})
    assert one.digest() == two.digest()


def test_the_digest_is_the_same_in_another_process() -> None:
    code = (
        "from graphglue import *\n"
        "print(PrepContract(name='p', reads={'x': (0, 1), 'y': REPEAT_LAST}, tables=('t', 'u'),"
        " outputs={'m': 'token'}, modes=set(Mode), features={'lora', 'tbo', 'mm'}).digest())"
    )
    digests = {
        subprocess.run(
            [sys.executable, "-c", code],
            env={**os.environ, "PYTHONPATH": str(SRC), "PYTHONHASHSEED": seed},
            capture_output=True,
            text=True,
            check=True,
        ).stdout
        for seed in ("1", "2")
    }
    here = contract(
        reads={"x": (0, 1), "y": REPEAT_LAST},
        tables=("t", "u"),
        outputs={"m": "token"},
        modes=set(Mode),
        features={"lora", "tbo", "mm"},
    )
    assert digests == {here.digest() + "\n"}


@pytest.mark.parametrize(
    ("pad", "reads"),
    [
        (0, 0),
        (1, (0, 1)),
        (REPEAT_LAST, REPEAT_LAST),
        (REPEAT_LAST, (0, REPEAT_LAST)),
        (math.nan, math.nan),
        (2, 2.0),
    ],
)
def test_a_slot_whose_pad_is_among_the_contract_s_fits(pad: Any, reads: Any) -> None:
    check_contracts({"p": contract(reads={"x": reads})}, {"x": slot(pad)}, ())


def test_preps_that_share_a_pad_fit_one_slot() -> None:
    preps = {"p": contract(reads={"x": (0, 1)}), "q": contract(reads={"x": (1, 2)}), "r": contract(reads={})}
    check_contracts(preps, {"x": slot(1)}, ())


@pytest.mark.parametrize("pads", [((0,), (1,)), ((0,), (0, 1), (1,))])
def test_pad_derived_preps_with_different_pads_are_refused_whatever_the_slot(pads: Any) -> None:
    preps = {f"p{number}": contract(reads={"x": pad}) for number, pad in enumerate(pads)}
    for pad in (0, 1):
        with pytest.raises(ContractError, match="slot 'x'"):
            check_contracts(preps, {"x": slot(pad)}, ())


def test_an_idle_value_matters_only_to_a_prep_that_glues_idle_steps() -> None:
    other_idle = {"x": slot(0, idle=5)}
    check_contracts({"p": contract(reads={"x": 0}, idle="eager")}, other_idle, ())
    check_contracts({"p": contract(reads={"x": (0, 5)}, idle="glue")}, other_idle, ())
    with pytest.raises(ContractError, match=r"idle value 5.0, but prep 'p' glues IDLE steps and is right for 0"):
        check_contracts({"p": contract(reads={"x": 0}, idle="glue")}, other_idle, ())


def test_slots_that_no_prep_reads_may_have_any_pad() -> None:
    check_contracts({"p": contract()}, {"x": slot(77)}, ())


@pytest.mark.parametrize("modes", [{Mode.DECODE}, {Mode.EXTEND, Mode.DECODE}, {Mode.MIXED}])
def test_skipping_idle_steps_is_for_extend_only(modes: set[Mode]) -> None:
    assert contract(modes={Mode.EXTEND}, idle="skip").idle == "skip"
    with pytest.raises(ContractError, match=r"idle='skip' outside segmented EXTEND.*use idle='eager' or 'glue'"):
        contract(modes=modes, idle="skip")
