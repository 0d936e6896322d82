"""The checks that run a prep, on CUDA graphs: right preps pass, and one wrong prep of each kind is caught.

Nothing here reads poison as an index, which would end the process: tests/gpu/test_gallery.py runs such preps in
processes of their own.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

import graphglue as gg
from graphglue.audit import double_capture, pad_image, poison
from graphglue.audit.certificate import Verdict
from graphglue.audit.subject import Subject
from tests.unit.audit.subjects import contract, good, make_runner, table

Prep = Callable[[Any], Any]
STATE = {"count": 1}


def subject_of(prep: Prep, outputs: dict[str, str], perturb: Any = None, **changes: Any) -> Subject:
    declared = contract(outputs=outputs, **changes)
    runner = make_runner(prep, declared=declared, device="cuda", tables={"table": table().cuda()})
    (subject,) = Subject.of(runner, (), perturb)
    return subject


def judged(check: Any, prep: Prep, perturb: Any = None, **changes: Any) -> tuple[Verdict, str]:
    outputs = {"pages": "request", "positions": "request"} if prep is good else {"out": "request"}
    subject = subject_of(prep, outputs, perturb, **changes)
    with subject.session():
        verdict, found = check.run(subject)
    torch.cuda.synchronize()
    return verdict, "\n".join(map(str, found))


@pytest.mark.parametrize("check", [poison, double_capture, pad_image])
@pytest.mark.parametrize("idle", ["eager", "glue"])
def test_a_right_prep_passes(check: Any, idle: str) -> None:
    verdict, text = judged(check, good, lambda: None, idle=idle)
    assert verdict is Verdict.PASS, text


def test_random_numbers_are_alike_in_all_runs() -> None:
    prep = lambda view: {"out": view.seq_lens + torch.randint(1 << 40, view.seq_lens.shape, device="cuda")}  # noqa: E731
    assert judged(double_capture, prep, lambda: None)[0] is Verdict.PASS
    assert judged(poison, prep)[0] is Verdict.PASS


def test_an_undeclared_tensor_is_poisoned_and_put_back() -> None:
    secret = torch.arange(8, device="cuda")
    verdict, text = judged(poison, lambda view: {"out": view.seq_lens + secret.sum()})
    assert verdict is Verdict.FAIL
    assert "closure variable 'secret' (int64[8])" in text
    assert secret.tolist() == list(range(8))


def test_memory_behind_the_bucket_and_memory_that_is_not_written() -> None:
    beyond = lambda view: {"out": view.seq_lens + view.seq_lens.as_strided((4,), (1,)).sum()}  # noqa: E731
    verdict, text = judged(poison, beyond)
    assert verdict is Verdict.FAIL
    assert "slot 'seq_lens' beyond the bucket" in text

    def partial(view: Any) -> Any:
        out = torch.empty(view.bucket.requests, 2, dtype=torch.int64, device="cuda")
        out[:, 0] = view.seq_lens
        return {"out": out}

    verdict, text = judged(poison, partial)
    assert verdict is Verdict.FAIL
    assert "in the outputs before the run" in text
    assert "allocated and not written" in text


def test_state_that_is_carried_and_results_that_are_memoised() -> None:
    count, memo = torch.zeros(1, dtype=torch.int64, device="cuda"), {}

    def memoised(view: Any) -> Any:
        return {"out": memo.setdefault(view.bucket, view.seq_lens + 1)}

    verdict, text = judged(poison, lambda view: {"out": view.seq_lens + count.add_(1)})
    assert verdict is Verdict.FAIL
    assert "two runs of one step differ" in text
    verdict, text = judged(poison, memoised)
    assert verdict is Verdict.FAIL
    assert "is not computed by a run" in text


def test_a_baked_host_value() -> None:
    STATE["count"] = 1
    change = lambda: STATE.update(count=9)  # noqa: E731
    verdict, text = judged(double_capture, lambda view: {"out": view.seq_lens * 0 + STATE["count"]}, change)
    assert verdict is Verdict.FAIL
    assert "leaf 'out', real row 0: 9, expected 1 in the first capture" in text
    verdict, text = judged(double_capture, lambda view: {"out": view.seq_lens + int(view.seq_lens[0])}, change)
    assert verdict is Verdict.FAIL
    assert "the first capture was refused" in text


def test_pads_in_real_rows_and_matrix_products() -> None:
    verdict, text = judged(pad_image, lambda view: {"out": view.seq_lens - view.seq_lens.sum()})
    assert verdict is Verdict.FAIL
    assert "padded, which differs from unpadded: leaf 'out', real row 0" in text
    weights = torch.rand(64, 64, device="cuda")

    def product(view: Any) -> Any:
        return {"out": view.tables.table[view.rows].to(torch.float32) @ weights}

    assert judged(pad_image, product)[0] is not Verdict.FAIL  # rounding at another width is unknown, not a fault


def test_a_compiled_prep_may_round_but_its_integers_are_equal() -> None:
    def prep(view: Any) -> Any:
        lens = view.seq_lens.to(torch.float32)
        return {"out": torch.softmax(lens[:, None] * torch.arange(8, device=lens.device), 1), "n": view.seq_lens - 1}

    subject = subject_of(prep, {"out": "request", "n": "request"}, compile=True)
    with subject.session():
        verdict, found = pad_image.run(subject)
    assert verdict is not Verdict.FAIL, found


def test_the_runners_own_memory_stays_as_it_was() -> None:
    live = table().cuda()
    before = live.clone()
    runner = make_runner(good, device="cuda", tables={"table": live})
    runner.capture()
    step = runner.replay(
        gg.Batch(3, {"seq_lens": [4, 5, 6], "rows": [1, 2, 3], "locations": [7, 8, 9], "offsets": [0, 1, 2, 3]})
    )
    slots = {name: tensor.clone() for name, tensor in runner.arena.targets(runner.buckets[-1]).items()}
    metadata = {name: leaf.clone() for name, leaf in step.metadata.items()}
    (subject,) = Subject.of(runner, (), lambda: None)
    for check in (poison, double_capture, pad_image):
        with subject.session():
            assert check.run(subject)[0] is Verdict.PASS
    torch.cuda.synchronize()
    assert torch.equal(live, before)
    assert all(torch.equal(tensor, slots[name]) for name, tensor in runner.arena.targets(runner.buckets[-1]).items())
    assert all(torch.equal(leaf, metadata[name]) for name, leaf in step.metadata.items())
