"""One round of the gallery: audit a prep, and say whether the right check named the right thing."""

from __future__ import annotations

import re
from typing import Any

import torch

from graphglue.audit import Certificate, Check, Verdict, run_checks

from .specimens import GALLERY, Specimen, Stage

FOLDER = "gallery"


def audited(specimen: Specimen, which: str, device: torch.device | str, poisoning: bool = True) -> Certificate:
    """Audit one side of a specimen on a stage of its own.

    Args:
        specimen: which pair.
        which: "faulty" or "twin".
        device: where.
        poisoning: whether this process may be ended by a prep that reads poison as an index.
    """
    stage = Stage.on(device)
    made = getattr(specimen.build(stage), which)
    with made.runner(stage) as runner:
        return run_checks(runner, perturb=made.perturb, poisoning=poisoning)


def check_of(certificate: Certificate, name: str) -> Check:
    """Find what one check says."""
    return next(check for check in certificate.checks if check.name == name)


def text_of(check: Check) -> str:
    """Spell a check's evidence."""
    return "\n".join(str(finding) for finding in check.evidence)


def missed(specimen: Specimen, certificate: Certificate) -> str | None:
    """Say why a certificate does not name a specimen's fault; None if it does."""
    check = check_of(certificate, specimen.check)
    if check.verdict is not Verdict.FAIL:
        return f"{specimen.check} says {check.verdict.value}: {text_of(check)}"
    if not re.search(specimen.evidence, text_of(check)):
        return f"{specimen.check} fails, but its evidence has no {specimen.evidence!r}: {text_of(check)}"
    if specimen.places and not any(finding.where and f"{FOLDER}/" in finding.where for finding in check.evidence):
        return f"{specimen.check} fails, but no finding gives a line of the prep: {text_of(check)}"
    return None


def failures(certificate: Certificate) -> dict[str, str]:
    """Give the evidence of every check that fails."""
    return {check.name: text_of(check) for check in certificate.checks if check.verdict is Verdict.FAIL}


def examined(name: str, which: str, device: str, poisoning: bool = True) -> dict[str, Any]:
    """Audit one side of a specimen, and give the outcome as plain values."""
    specimen = GALLERY[name]
    certificate = audited(specimen, which, device, poisoning)
    seen_here = torch.device(device).type == "cuda" or not specimen.only_gpu
    outcome: dict[str, Any] = {
        "check": specimen.check,
        "seen_here": seen_here,
        "failed": failures(certificate),
        "seconds": sum(check.seconds for check in certificate.checks),
    }
    if which == "faulty":
        outcome["missed"] = missed(specimen, certificate) if seen_here else None
    return outcome
