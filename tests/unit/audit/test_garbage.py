"""Garbage is legal, differs, and never stays."""

from __future__ import annotations

import mmap
from pathlib import Path

import pytest
import torch

from graphglue.audit import garbage
from graphglue.core.differences import bits_of, first_difference
from graphglue.testing import strategies

INTEGERS = (*strategies.INTEGERS, torch.uint16, torch.uint32, torch.uint64)
FLOATS = (*strategies.FLOATS, torch.float8_e4m3fn, torch.float8_e5m2)
DTYPES = (*INTEGERS, torch.bool, *FLOATS, torch.complex64)


def contents(dtype: torch.dtype) -> torch.Tensor:
    return torch.tensor([[3, 1, 2], [1, 2, 0]]).to(dtype)


def targets(**named: torch.Tensor) -> list[garbage.Target]:
    return garbage.targets_of(named.items())[0]


@pytest.mark.parametrize("variant", range(garbage.NUM_VARIANTS))
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_every_variant_differs(dtype: torch.dtype, variant: int) -> None:
    for one in (contents(dtype), torch.zeros(4).to(dtype), torch.ones(()).to(dtype)):
        other = garbage.variant_of(one, variant)
        assert (other.dtype, other.shape) == (one.dtype, one.shape)
        assert first_difference(one, other) is not None


@pytest.mark.parametrize("dtype", INTEGERS, ids=str)
def test_integers_stay_among_the_values_that_were_there(dtype: torch.dtype) -> None:
    for variant in range(garbage.NUM_VARIANTS):
        assert set(garbage.variant_of(contents(dtype), variant).flatten().tolist()) <= {0, 1, 2, 3}
        assert set(garbage.variant_of(torch.full((3,), 5).to(dtype), variant).tolist()) == {4}


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_floats_stay_finite(dtype: torch.dtype) -> None:
    one = torch.tensor([0.0, 1.0, float("nan")]).to(dtype)
    for variant in range(garbage.NUM_VARIANTS):
        assert garbage.variant_of(one, variant).to(torch.float32).isfinite().all()


def test_sums_and_extremes_and_order_each_change_in_some_variant() -> None:
    one = torch.tensor([4, 9, 7, 9])
    others = [garbage.variant_of(one, variant) for variant in range(garbage.NUM_VARIANTS)]
    for of in (torch.sum, torch.amax, torch.amin, torch.argmax, torch.cumsum):
        arguments = (0,) if of is torch.cumsum else ()
        assert any(not torch.equal(of(one, *arguments), of(other, *arguments)) for other in others), of


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_sentinel_is_nothing_that_the_tape_or_a_prep_leaves(dtype: torch.dtype) -> None:
    one = contents(dtype)
    sentinel = garbage.sentinel_of(one)
    assert (bits_of(sentinel) != bits_of(one)).all()
    if dtype.is_floating_point or dtype.is_complex:
        assert sentinel.to(torch.complex128).isnan().all()
        if dtype.itemsize > 1:
            assert first_difference(sentinel, torch.full_like(one, float("nan"))) is not None
    elif dtype is not torch.bool:
        assert (bits_of(sentinel) != int.from_bytes(b"\x7f" * dtype.itemsize, "big")).all()
        assert int(sentinel.to(torch.int64).amin()) > 100


def test_contents_come_back_whatever_happens() -> None:
    one, other = torch.arange(6), torch.arange(6)
    views = targets(front=one[:4], back=one[2:], other=other)
    changes = [(each.memory, garbage.variant_of(each.memory, 1)) for each in views]
    with garbage.overwritten(changes):
        assert one.tolist() != list(range(6))
        assert other.tolist() == [0] * 6
    with pytest.raises(KeyboardInterrupt), garbage.overwritten(changes):
        raise KeyboardInterrupt
    assert one.tolist() == other.tolist() == list(range(6))


def test_writing_is_unseen_by_the_tensor_itself() -> None:
    one = torch.ones(3, requires_grad=True)
    version = one._version
    (target,) = targets(one=one)
    with garbage.overwritten([(target.memory, torch.zeros(3))]):
        assert one.tolist() == [0, 0, 0]
    assert one.tolist() == [1, 1, 1]
    assert one._version == version


def test_memory_made_under_inference_mode_is_written_too() -> None:
    with torch.inference_mode():
        one = torch.ones(3)
    (target,) = targets(one=one)
    with garbage.overwritten([(target.memory, torch.zeros(3))]):
        assert one.tolist() == [0, 0, 0]
    assert one.tolist() == [1, 1, 1]


def test_expanded_and_large_tensors_are_written_once_and_in_part(monkeypatch: pytest.MonkeyPatch) -> None:
    (expanded,) = targets(one=torch.zeros(1, 2).expand(5, 2))
    assert expanded.is_whole
    assert expanded.memory.shape == (1, 2)
    monkeypatch.setattr(garbage, "MAX_BYTES", 64)
    large, small = targets(large=torch.zeros(4, 4, dtype=torch.int64), small=torch.zeros(8, dtype=torch.int64))
    assert not large.is_whole
    assert large.memory.shape == (2, 4)
    assert small.is_whole


def test_read_only_memory_is_left_out(tmp_path: Path) -> None:
    path = tmp_path / "weights"
    path.write_bytes(bytes(4096))
    with path.open("rb") as file, mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ) as mapped:
        with pytest.warns(UserWarning, match="not writable"):
            one = torch.frombuffer(mapped, dtype=torch.int64)
        assert garbage.targets_of([("weights", one)], garbage.read_only_ranges()) == ([], ["weights"])
        del one


def test_only_plain_tensors_are_memory_and_nothing_else() -> None:
    class Odd(torch.Tensor):
        pass

    assert garbage.is_plain(torch.zeros(1))
    assert garbage.is_plain(torch.nn.Parameter(torch.zeros(1)))
    assert not garbage.is_plain(torch.zeros(1).as_subclass(Odd))
    assert not garbage.is_plain(torch.zeros(2).to_sparse())
    assert not garbage.is_plain(torch.zeros(2, device="meta"))


def test_memory_on_a_gpu_is_never_taken_for_a_read_only_file() -> None:
    class OnGpu(torch.Tensor):
        is_cpu = property(lambda self: False)

    everywhere = [(0, 2**64)]
    given = torch.zeros(2).as_subclass(OnGpu)
    assert [target.name for target in garbage.targets_of([("x", given)], everywhere)[0]] == ["x"]
    assert garbage.targets_of([("x", torch.zeros(2))], everywhere) == ([], ["x"])
