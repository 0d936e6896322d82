"""The static checks and certificates on CUDA: what the tape's rules name on the CPU is named here too, and more."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import graphglue as gg
from graphglue.audit import Certificate, Check, Finding, Verdict, audit, same_ops, trace
from graphglue.audit.subject import Subject
from tests.unit.audit import subjects
from tests.unit.audit.subjects import good

Prep = Callable[[Any], Any]


def make_runner(prep: Prep = good, config: gg.RunnerConfig | None = None, **changes: Any) -> gg.Runner:
    return subjects.make_runner(
        prep, (1, 4), subjects.contract(**changes), tables={"table": subjects.table().cuda()},
        with_slots=subjects.slots()[:2], device="cuda", config=config,
    )  # fmt: skip


def run_check(check: Any, prep: Prep, **changes: Any) -> tuple[Verdict, list[Finding]]:
    (subject,) = Subject.of(make_runner(prep, **changes))
    with subject.session():
        return check.run(subject)


def reads_item(view: Any) -> Any:
    return {**good(view), "positions": view.seq_lens - view.seq_lens.max().item()}


def reads_list(view: Any) -> Any:
    _ = view.seq_lens.tolist()
    return good(view)


def uploads_a_list(view: Any) -> Any:
    scale = torch.tensor([1, 2, 3, 4], device="cuda")[: view.bucket.requests]
    return {**good(view), "positions": view.seq_lens * scale}


def uploads_from_pinned_memory(view: Any) -> Any:
    host = torch.arange(view.bucket.requests, device="cpu").pin_memory()
    return {**good(view), "positions": view.seq_lens + host.to("cuda", non_blocking=True)}


def synchronizes(view: Any) -> Any:
    positions = view.seq_lens - 1
    torch.cuda.synchronize()
    return {**good(view), "positions": positions}


def draws(view: Any) -> Any:
    return {**good(view), "noise": torch.rand(4, device="cuda")}


CONSTANT: dict[str, torch.Tensor] = {}


def reads_a_constant(view: Any) -> Any:
    constant = CONSTANT.setdefault("constant", torch.arange(64, device="cuda"))
    return {**good(view), "positions": view.seq_lens + constant[: view.bucket.requests]}


def changes_a_slot(view: Any) -> Any:
    view.seq_lens.add_(1)
    return good(view)


@pytest.mark.parametrize(
    ("prep", "said"),
    [
        (reads_item, "item: reads a tensor on the host"),
        (reads_list, "tolist: reads a tensor on the host"),
        (uploads_a_list, "takes contents from host memory"),
        (uploads_from_pinned_memory, "takes contents from host memory"),
        (synchronizes, "can not be recorded"),
        (draws, "draws random numbers"),
        (reads_a_constant, "neither a slot, a table nor made in this call|an earlier call made and kept"),
        (changes_a_slot, "writes into slot 'seq_lens'"),
    ],
)
def test_a_fault_is_named_with_its_line(prep: Prep, said: str) -> None:
    verdict, found = run_check(trace, prep)
    assert verdict is Verdict.FAIL
    named = [finding for finding in found if re.search(said, str(finding))]
    assert named, found
    assert str(named[0].where).startswith(__file__)


@pytest.mark.parametrize("check", [trace, same_ops])
def test_a_correct_prep_passes(check: Any) -> None:
    verdict, found = run_check(check, good)
    assert verdict is Verdict.PASS, found


def test_an_address_that_is_handed_out_leaves_the_verdict_open() -> None:
    def prep(view: Any) -> Any:
        _ = view.seq_lens.data_ptr()
        return good(view)

    verdict, found = run_check(trace, prep)
    assert verdict is Verdict.UNKNOWN
    assert "what a kernel does that is launched with it was not seen" in found[0].text


def test_a_step_that_steers_is_found() -> None:
    calls: list[int] = []

    def prep(view: Any) -> Any:
        calls.append(1)
        return {**good(view), "positions": view.seq_lens - len(calls)}

    assert run_check(same_ops, prep)[0] is Verdict.FAIL


def test_an_audit_leaves_a_captured_runner_as_it_was() -> None:
    runner = make_runner()
    runner.capture(progress=False)
    batch = gg.Batch(3, {"seq_lens": [5, 6, 7], "rows": [1, 2, 3]})
    before = runner.replay(batch).metadata["positions"].clone()
    held = {name: slot.clone() for name, slot in runner.arena.targets(gg.Bucket(4, 4, 1)).items()}
    stats = runner.stats()
    certificate = audit(runner)
    assert certificate.passed, certificate.checks
    assert runner.stats() == stats
    after = runner.arena.targets(gg.Bucket(4, 4, 1))
    assert all(torch.equal(held[name], after[name]) for name in after)
    assert torch.equal(runner.replay(batch).metadata["positions"], before)


def by_name(certificate: Certificate) -> dict[str, Check]:
    return {check.name: check for check in certificate.checks}


def test_poison_stays_out_of_this_process() -> None:
    check = by_name(audit(make_runner()))["poison"]
    assert check.verdict is Verdict.UNKNOWN
    assert "graphglue audit MODULE:FACTORY" in check.evidence[0].text


def test_a_certificate_names_the_gpu_and_its_driver_and_certifies(tmp_path: Path) -> None:
    certificate = audit(make_runner())
    assert certificate.device == torch.cuda.get_device_name()
    assert certificate.versions["cuda"] == torch.version.cuda
    assert float(certificate.versions["driver"]) >= 12
    certificate.write(tmp_path / "c.json")
    for path, route in ((tmp_path / "c.json", gg.Route.GLUE), (tmp_path / "absent.json", gg.Route.EAGER)):
        runner = make_runner(config=gg.RunnerConfig(certificate="require", certificate_path=path))
        if route is gg.Route.GLUE:
            runner.capture(progress=False)
        step = runner.replay(gg.Batch(3, {"seq_lens": [5, 6, 7], "rows": [1, 2, 3]}))
        assert step.decision.prep is route
        assert step.metadata["positions"][:3].tolist() == [4, 5, 6]
