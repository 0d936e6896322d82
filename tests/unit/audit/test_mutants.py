"""Mutants of the shipped preps: the audit catches every fault, and audit or reference every slip of the hand."""

from __future__ import annotations

import os
from collections import Counter
from importlib import import_module
from pathlib import Path

import pytest

from graphglue import preps

from ...gallery.mutants import EDIT, EQUIVALENT, FAULT, MUTANTS, Mutant, agrees_with_reference, audited
from ...gallery.rounds import failures
from ...gallery.shipped import SHIPPED

pytestmark = pytest.mark.usefixtures("frozen_imports")

# Every fourth one while working; all of them otherwise.
EVERY = 4 if os.environ.get("HYPOTHESIS_PROFILE", "dev") == "dev" else 1
CHOSEN = [mutant for number, mutant in enumerate(MUTANTS.values()) if number % EVERY == 0]


def of(family: str) -> list[Mutant]:
    return [mutant for mutant in CHOSEN if mutant.family == family and mutant.name not in EQUIVALENT]


@pytest.mark.parametrize("mutant", of(FAULT), ids=lambda mutant: mutant.name)
def test_the_audit_catches_a_fault(mutant: Mutant) -> None:
    assert failures(audited(mutant))


@pytest.mark.parametrize("mutant", of(EDIT), ids=lambda mutant: mutant.name)
def test_the_audit_or_the_reference_catches_a_slip(mutant: Mutant) -> None:
    assert failures(audited(mutant)) or not agrees_with_reference(mutant)


@pytest.mark.parametrize("name", EQUIVALENT)
def test_an_equivalent_one_is_no_fault(name: str) -> None:
    mutant = MUTANTS[name]
    assert failures(audited(mutant)) == {}
    if mutant.family == EDIT:
        assert agrees_with_reference(mutant)


@pytest.mark.parametrize("name", SHIPPED)
def test_the_original_passes_and_agrees(name: str) -> None:
    shipped = SHIPPED[name]
    original = Mutant(shipped, EDIT, "nothing", Path(str(shipped.module.__file__)).read_text())
    assert failures(audited(original)) == {}
    assert agrees_with_reference(original)


def test_every_prep_of_the_gallery_has_mutants_of_both_families() -> None:
    folder = Path(str(preps.__file__)).parent
    modules = {import_module(f"graphglue.preps.{path.stem}") for path in folder.glob("*.py") if path.stem != "__init__"}
    assert {shipped.module for shipped in SHIPPED.values()} <= modules  # tests/property/test_preps.py holds the others
    counted = Counter((mutant.shipped.name, mutant.family) for mutant in MUTANTS.values())
    assert all(counted[name, FAULT] >= 50 and counted[name, EDIT] >= 15 for name in SHIPPED)
