"""The gallery on a GPU: what only a GPU sees is caught there, and the rest by the same checks as on the CPU.

Poisoning ends a process that reads poison as an index, so it happens in workers.
"""

from __future__ import annotations

import pytest

from graphglue.audit import Verdict

from ..gallery import Specimen, figures, specimens
from ..gallery.rounds import audited, check_of, failures, missed, text_of

SAFE = [one for one in specimens("cuda") if one.check != "poison"]
POISONED = [one for one in specimens("cuda") if one.check == "poison" or one.check == "pointers"]


@pytest.mark.parametrize("specimen", SAFE, ids=lambda one: one.name)
def test_the_right_check_names_the_right_thing(specimen: Specimen) -> None:
    assert missed(specimen, audited(specimen, "faulty", "cuda", poisoning=False)) is None


@pytest.mark.parametrize("specimen", SAFE, ids=lambda one: one.name)
def test_the_correct_twin_passes_every_check(specimen: Specimen) -> None:
    certificate = audited(specimen, "twin", "cuda", poisoning=False)
    assert failures(certificate) == {}
    check = check_of(certificate, specimen.check)
    assert check.verdict is Verdict.PASS, text_of(check)


def test_poison_is_found_in_a_worker_and_twins_survive_it() -> None:
    jobs = [["gallery", one.name, which] for one in POISONED for which in ("faulty", "twin")]
    count = figures.counted(list(figures.in_workers(jobs, "cuda")), "cuda")["gallery"]
    assert count["missed"] == {}
    assert count["false_alarms"] == {}
    assert count["twins"] == len(POISONED)


def test_generated_correct_preps_raise_no_alarm() -> None:
    jobs = [["generated", str(seed)] for seed in range(40)]
    count = figures.counted(list(figures.in_workers(jobs, "cuda")), "cuda")["generated"]
    assert count["preps"] == 40
    assert count["false_alarms"] == {}
