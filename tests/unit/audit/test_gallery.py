"""The gallery on the CPU: each faulty prep is caught by the right check, and its correct twin passes all."""

from __future__ import annotations

import random
import re
from collections import Counter

import pytest
import torch

import graphglue as gg
from graphglue.audit import Verdict, audit
from graphglue.audit.holdings import reachable
from graphglue.core.differences import first_difference

from ...gallery import CHECKS, GALLERY, LADDER, Made, Pair, Specimen, Stage, specimens
from ...gallery.lookalikes import LOOKALIKES
from ...gallery.rounds import audited, check_of, failures, missed, text_of
from ...gallery.specimens import slots

pytestmark = pytest.mark.usefixtures("frozen_imports")

HERE = [one for one in specimens("cpu") if not one.only_gpu]
HIDDEN = [one for one in specimens("cpu") if one.only_gpu]


@pytest.mark.parametrize("specimen", HERE, ids=lambda one: one.name)
def test_the_right_check_names_the_right_thing(specimen: Specimen) -> None:
    assert missed(specimen, audited(specimen, "faulty", "cpu")) is None


@pytest.mark.parametrize("specimen", [*HERE, *HIDDEN], ids=lambda one: one.name)
def test_the_correct_twin_passes_every_check(specimen: Specimen) -> None:
    certificate = audited(specimen, "twin", "cpu")
    assert failures(certificate) == {}
    assert certificate.passed
    # The check that caught the faulty one has looked, so that its silence means something.
    if specimen in HERE:
        assert check_of(certificate, specimen.check).verdict is Verdict.PASS, text_of(
            check_of(certificate, specimen.check)
        )


@pytest.mark.parametrize("name", LOOKALIKES)
def test_what_only_looks_wrong_raises_no_alarm_and_is_left_as_it_was(name: str) -> None:
    stage = Stage.on("cpu")
    made = LOOKALIKES[name](stage)
    with made.runner(stage) as runner:
        own = {} if "writes" in made.contract else reachable(made.prep)[0]
        held = {**runner.tables, **runner.view(LADDER[1]), **own}
        before = {what: tensor.clone() for what, tensor in held.items()}
        states = random.getstate(), torch.get_rng_state().tolist()
        certificate = audit(runner, perturb=made.perturb)
        assert failures(certificate) == {}
        assert first_difference(before, held) is None
    assert states == (random.getstate(), torch.get_rng_state().tolist())


@pytest.mark.parametrize("specimen", HIDDEN, ids=lambda one: one.name)
def test_what_only_a_gpu_sees_is_not_said_to_pass(specimen: Specimen) -> None:
    certificate = audited(specimen, "faulty", "cpu")
    assert failures(certificate) == {}
    assert check_of(certificate, specimen.check).verdict is Verdict.UNKNOWN


@pytest.mark.parametrize("name", ["frozen_scalar", "host_mirror", "bound_never_reached"])
def test_host_state_that_nobody_changes_is_unknown_and_named(name: str) -> None:
    """Show the limit: without perturb these are not caught, and not said to pass."""
    stage = Stage.on("cpu")
    made = GALLERY[name].build(stage).faulty
    with made.runner(stage) as runner:
        check = check_of(audit(runner), "double_capture")
    assert check.verdict is Verdict.UNKNOWN
    assert "perturb" in text_of(check)
    assert "engine" in text_of(check)


def test_the_gallery_is_large_enough_and_uses_every_check() -> None:
    assert len(GALLERY) >= 60
    used = Counter(one.check for one in GALLERY.values())
    assert set(used) == set(CHECKS)
    assert all(
        one.kinds and all(re.fullmatch(r"[A-Z]+(-[A-Z]+)*-\d+", kind) for kind in one.kinds) for one in GALLERY.values()
    )


def test_the_kinds_of_the_field_reports_are_covered() -> None:
    kinds = {kind.rsplit("-", 1)[0] for one in GALLERY.values() for kind in one.kinds}
    assert kinds >= {
        "HOST-FROZEN", "PLAN-STALE", "REBIND", "LIFETIME", "POOL-ALIAS", "PAD-LEAK", "PAD-ALIAS", "PAD-DERIVED",
        "META-SHAPE", "UNSTAGED", "RNG", "STATE-CARRY", "TAIL-STALE", "FEATURE-GUARD",
    }  # fmt: skip


def sides_swapped(specimen: Specimen) -> Specimen:
    def build(stage: Stage) -> Pair:
        pair = specimen.build(stage)
        return Pair(faulty=pair.twin, twin=pair.faulty)

    return Specimen(specimen.name, specimen.kinds, specimen.check, specimen.evidence, build, specimen.places)


@pytest.mark.parametrize("check", [check for check in CHECKS if check != "pointers"])
def test_the_comparison_can_fail(check: str) -> None:
    swapped = sides_swapped(next(one for one in HERE if one.check == check))
    assert f"{check} says pass" in str(missed(swapped, audited(swapped, "faulty", "cpu")))
    assert check in failures(audited(swapped, "twin", "cpu"))


def test_evidence_of_something_else_is_not_enough() -> None:
    one = GALLERY["item"]
    other = Specimen(one.name, one.kinds, one.check, "another thing", one.build)
    assert "its evidence has no 'another thing'" in str(missed(other, audited(other, "faulty", "cpu")))


def test_of_two_preps_the_faulty_one_is_named() -> None:
    stage = Stage.on("cpu")
    pair = GALLERY["item"].build(stage)
    registry, names = gg.Registry(), ("wrong", "right")
    for name, made in zip(names, (pair.faulty, pair.twin)):
        reads = {slot: slots()[slot].pad for slot in made.reads}
        contract = gg.PrepContract(name=name, reads=reads, outputs=made.outputs, modes={gg.Mode.DECODE})
        registry.register(contract)(made.prep)
    listed = [slots()[name] for name in pair.faulty.reads]
    with gg.Runner(slots=listed, ladder=LADDER, prep=names, registry=registry) as runner:
        certificate = audit(runner)
    failed = {check.prep for check in certificate.checks if check.verdict is Verdict.FAIL}
    assert failed == {"wrong"}
    assert {check.prep for check in certificate.checks} == set(names)


def test_two_builds_share_no_state() -> None:
    """Each audit starts from a prep that nobody has called."""
    for specimen in HERE:
        pairs = [specimen.build(Stage.on("cpu")) for _ in range(2)]
        assert isinstance(pairs[0].faulty, Made)
        assert pairs[0].faulty.prep is not pairs[1].faulty.prep
