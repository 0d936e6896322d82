"""Generated correct preps raise no alarm: 25 while working, 1,000 under the profile deep.

``python tests/gallery/figures.py --only generated --generated 1000`` counts them on any device.
"""

from __future__ import annotations

import os

import pytest

from graphglue.audit import Verdict, run_checks

from ..gallery import correct
from ..gallery.rounds import check_of, failures

pytestmark = pytest.mark.usefixtures("frozen_imports")

COUNTS = {"dev": 25, "ci": 50, "deep": 1000}
NUM_PARTS = 5  # so that workers share them


@pytest.mark.parametrize("part", range(NUM_PARTS))
def test_a_generated_correct_prep_raises_no_alarm(part: int) -> None:
    for seed in range(part, COUNTS[os.environ.get("HYPOTHESIS_PROFILE", "dev")], NUM_PARTS):
        runner, composed = correct.prep(seed)
        with runner:
            certificate = run_checks(runner, perturb=composed.forget, poisoning=True)
        texts = [leaf.text for leaf in composed.leaves]
        assert failures(certificate) == {}, f"seed {seed}: {texts}"
        for check in ("trace", "same_ops", "poison", "double_capture"):
            assert check_of(certificate, check).verdict is Verdict.PASS, f"seed {seed}: {texts}"


def test_one_wrong_leaf_among_them_is_found() -> None:
    """Show that silence is no blindness: the same preps with a leaf that counts the pads as well."""
    num_spoiled = 0
    for seed in range(20):
        runner, composed = correct.prep(seed)
        with runner:
            if not runner.registrations[0].contract.padded or runner.space.ladder.largest < 2:
                continue  # its buckets are never padded
            composed.leaves[0] = composed.leaves[0].then("spoiled({})", lambda x, v: x * 1 + v.bucket.requests)
            num_spoiled += 1
            failed = failures(run_checks(runner, perturb=composed.forget, poisoning=True))
        assert "pad_image" in failed, f"seed {seed}"
    assert num_spoiled >= 10


def test_the_same_seed_gives_the_same_prep() -> None:
    texts = [[leaf.text for leaf in correct.prep(7)[1].leaves] for _ in range(2)]
    assert texts[0] == texts[1]
    assert texts[0] != [leaf.text for leaf in correct.prep(8)[1].leaves]
