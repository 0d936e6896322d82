"""Specimens: small preps that are wrong in one way each, beside a correct twin.

A specimen is a value. Its two preps are built anew for every audit, on a stage of their own: slots,
tables, and the host state of a small engine.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import torch

import graphglue as gg

LADDER = (2, 5)  # raws 1 and 2 in the one, 3, 4 and 5 in the other
ROWS, CONTEXT, LOCATIONS = 6, 16, 48

# What gives a check something to say: the six of design.md, in the order they run.
CHECKS = ("trace", "same_ops", "poison", "double_capture", "pad_image", "pointers")


def slots() -> dict[str, gg.Slot]:
    """Give the slots that specimens choose from."""
    listed = [
        gg.Slot("seq_lens", axis="request", dtype=torch.int64, pad=1, valid=(2, CONTEXT)),
        gg.Slot("rows", axis="request", dtype=torch.int64, pad=0, index_of="req_to_token", valid=(0, ROWS - 1)),
        gg.Slot("out_cache_loc", axis="token", dtype=torch.int64, pad=0, valid=(0, LOCATIONS - 1)),
        gg.Slot("indptr", axis="offset", dtype=torch.int64, pad=gg.REPEAT_LAST),
        gg.Slot("scores", axis="request", dtype=torch.float32, pad=0.0, valid=(1, 8)),
        gg.Slot("order", axis="request", dtype=torch.int64, pad=0, valid=(0, 0)),
        gg.Slot("num_real", axis="fixed", dtype=torch.int64, pad=0, value=gg.RAW_REQUESTS),
        gg.Slot("setting", axis="fixed", dtype=torch.int64, pad=0, inner=(1,), missing="pad", valid=(0, 7)),
    ]
    return {slot.name: slot for slot in listed}


@dataclass
class Stage:
    """What one prep is built on: a device, tables, and an engine with host state."""

    device: torch.device
    tables: dict[str, torch.Tensor]
    engine: SimpleNamespace

    @classmethod
    def on(cls, device: torch.device | str) -> Stage:
        """Build a stage. Row 0 of each table, and location 0, are the sink."""
        device = torch.device(device)
        page_map = torch.arange(LOCATIONS, device=device).flip(0)
        locations = torch.arange(ROWS * CONTEXT, device=device).remainder(LOCATIONS).view(ROWS, CONTEXT)
        engine = SimpleNamespace(
            scale=3, causal=True, raw_bs=1, segments=[1], host_lens=[4, 4], step=0, last=None, device=device
        )
        return cls(device, {"req_to_token": locations, "page_map": page_map}, engine)


Prep = Callable[[Any], Any]


@dataclass(frozen=True)
class Made:
    """One prep and what it declares.

    Attributes:
        prep: called with a view.
        outputs: leaf -> axis.
        reads: the slots it declares.
        tables: the tables it declares.
        perturb: changes the host state that a wrong prep would bake.
        plan: computes slots on the host.
        pads: slots whose pad is another one here.
        width: tokens per request.
        contract: further fields of the contract.
    """

    prep: Prep
    outputs: Mapping[str, str]
    reads: tuple[str, ...] = ("seq_lens",)
    tables: tuple[str, ...] = ()
    perturb: Callable[[], Any] | None = None
    plan: Callable[[gg.Batch, gg.Bucket], Mapping[str, Any]] | None = None
    pads: Mapping[str, Any] = field(default_factory=dict)
    width: int = 1
    contract: Mapping[str, Any] = field(default_factory=dict)

    def runner(self, stage: Stage, ladder: tuple[int, ...] = LADDER) -> gg.Runner:
        """Build a runner of this prep alone; nothing is captured."""
        known = slots()
        for name, pad in self.pads.items():
            fields = {key: getattr(known[name], key) for key in known[name].__dataclass_fields__}
            known[name] = gg.Slot(**{**fields, "pad": pad})
        declared = gg.PrepContract(
            **{
                "name": "specimen",
                "reads": {name: known[name].pad for name in self.reads},
                "tables": self.tables,
                "outputs": dict(self.outputs),
                "modes": {gg.Mode.DECODE},
                **self.contract,
            }
        )
        registry = gg.Registry()
        registry.register(declared, plan=self.plan)(self.prep)
        return gg.Runner(
            slots=[known[name] for name in dict.fromkeys((*self.reads, "seq_lens", "rows"))],
            ladder=ladder,
            prep="specimen",
            registry=registry,
            tables=stage.tables,
            device=stage.device,
            tokens_per_request=self.width,
        )


@dataclass(frozen=True)
class Pair:
    """A wrong prep, and the right one that does the same job."""

    faulty: Made
    twin: Made


def both(faulty: Prep, twin: Prep, outputs: Mapping[str, str], **fields: Any) -> Pair:
    """Declare the same for both."""
    return Pair(Made(faulty, outputs, **fields), Made(twin, outputs, **fields))


def counted(rows: torch.Tensor) -> torch.Tensor:
    """Count rows, on their device."""
    return torch.arange(rows.shape[0], device=rows.device)


def columns(view: Any) -> torch.Tensor:
    """Count the columns of a table's row, on the device."""
    return torch.arange(CONTEXT, device=view.seq_lens.device)


@dataclass(frozen=True)
class Specimen:
    """One way of being wrong.

    Attributes:
        name: what it does.
        kinds: the field reports it stands for.
        check: the check that must name it.
        evidence: a pattern that this check's evidence must hold.
        build: makes the pair on a stage.
        places: whether the evidence must give a line of the prep.
        devices: where it can be run: a few would end the process on a GPU, or need one to run.
        only_gpu: no check on the CPU can see it.
    """

    name: str
    kinds: tuple[str, ...]
    check: str
    evidence: str
    build: Callable[[Stage], Pair]
    places: bool = False
    devices: tuple[str, ...] = ("cpu", "cuda")
    only_gpu: bool = False


GALLERY: dict[str, Specimen] = {}


def specimen(
    *kinds: str,
    check: str,
    evidence: str,
    places: bool | None = None,
    devices: tuple[str, ...] = ("cpu", "cuda"),
    only_gpu: bool = False,
) -> Callable[[Callable[[Stage], Pair]], Callable[[Stage], Pair]]:
    """Enter the decorated pair into the gallery, under the function's name."""
    if check not in CHECKS:
        raise ValueError(f"check {check!r}; expected one of {CHECKS}")

    def enter(build: Callable[[Stage], Pair]) -> Callable[[Stage], Pair]:
        """Keep the pair, and give its builder back."""
        name = build.__name__
        if name in GALLERY:
            raise ValueError(f"two specimens are named {name!r}")
        placed = check == "trace" if places is None else places
        GALLERY[name] = Specimen(name, kinds, check, evidence, build, placed, devices, only_gpu)
        return build

    return enter


def specimens(device: str) -> Iterator[Specimen]:
    """List the specimens that can be run on a kind of device."""
    return (one for one in GALLERY.values() if device in one.devices)
