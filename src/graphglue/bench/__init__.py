"""The benchmark that a user can run: one step in all the ways there are, in one run.

On the CPU it runs a reduced version on the tape, which is for truth and not for speed.
"""

from __future__ import annotations

import logging
import platform
import time
from collections.abc import Callable, Mapping, Sequence
from datetime import datetime, timezone
from pathlib import Path

import torch

import graphglue as gg
from graphglue.bench import compositions, drafts, memory, ranks, scaling, segments, shadow, steps
from graphglue.bench.breakable import load_breakable
from graphglue.bench.peers import load_sglang
from graphglue.bench.results import BROKEN, Report, Row, Section
from graphglue.bench.sections import BUCKETS, Settings
from graphglue.bench.targets import targets_of
from graphglue.device.base import open_device
from graphglue.errors import ConfigError

logger = logging.getLogger("graphglue")

SECTIONS: Mapping[str, tuple[str, Callable[[Settings, Section], None]]] = {
    "floor": ("one step in all the ways there are", steps.run_floor),
    "crowd": ("the same with every way in each round, so that all start colder", steps.run_crowd),
    "peers": ("the leading engine's own classes, beside the one launch", steps.run_peers),
    "slots": ("host cost against the number of slots", scaling.run_slots),
    "keys": ("64 captured keys in turn, against one", scaling.run_keys),
    "capture": ("seconds and memory of capture", memory.run_capture),
    "fill": ("device time of a large slot's fill, against a plain copy", memory.run_fill),
    "shadow": ("what the shadow check costs, sampling no step and every step", shadow.run_shadow),
    "ranks": ("what agreeing costs, and what many ranks agree on", ranks.run_ranks),
    "speculative": ("a draft's padded step in 8 processes at once, with and without glue", drafts.run_drafts),
    "compositions": ("two ways to build the one launch", compositions.run_compositions),
    "segments": ("a prefill with an eager break in each layer, and the memory of its buckets", segments.run_segments),
}
PEERS: Mapping[str, Callable[[Path], object]] = {"breakable": load_breakable, "sglang": load_sglang}
_GPU_STEPS, _TAPE_STEPS, _TAPE_BUCKETS = 2000, 20, (1, 4, 16)
_TAPE_NOTE = "the CPU tape: for truth, not for speed; these times say nothing of a GPU"


def settings_of(
    device: str,
    steps: int | None = None,
    buckets: Sequence[int] | None = None,
    only: Sequence[str] = (),
    peers: Mapping[str, Path] | None = None,
    trace: Path | None = None,
) -> Settings:
    """Complete what a user asked for.

    Args:
        device: "cuda", "cpu", or "auto" for CUDA where there is a GPU.
        steps: timed steps of each row; 2,000, or 20 on the tape.
        buckets: requests; 1, 4, 16, 64, 256, or the first three on the tape.
        only: names of sections; all by default.
        peers: name -> folder of an unpacked package.
        trace: a CSV of arrivals, for the section ranks.

    Raises:
        ConfigError: an unknown section, peer or device, or no positive number.
    """
    _check(steps, buckets or (), only, peers or {})
    found = open_device(_chosen(device)).torch_device
    on_gpu = found.type == "cuda"
    return Settings(
        found,
        (_GPU_STEPS if on_gpu else _TAPE_STEPS) if steps is None else steps,
        tuple(sorted(set(buckets or (BUCKETS if on_gpu else _TAPE_BUCKETS)))),
        tuple(only),
        dict(peers or {}),
        trace,
    )


def _check(steps: int | None, buckets: Sequence[int], only: Sequence[str], peers: Mapping[str, Path]) -> None:
    if unknown := sorted(set(only) - set(SECTIONS)):
        raise ConfigError(f"--only names {unknown}; sections are {list(SECTIONS)}")
    if unknown := sorted(set(peers) - set(PEERS)):
        raise ConfigError(f"--peer names {unknown}; known are {', '.join(PEERS)}")
    for name, folder in peers.items():
        PEERS[name](folder)
    if steps is not None and steps < 1:
        raise ConfigError(f"--steps {steps}: expected a positive number")
    if buckets and min(buckets) < 1:
        raise ConfigError(f"--buckets {list(buckets)}: expected positive numbers")


def _chosen(device: str) -> str:
    if device != "auto":
        return device
    accelerator = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
    return "cuda" if accelerator is not None and accelerator.type == "cuda" else "cpu"


def run(settings: Settings, command: str = "", on_section: Callable[[Report], object] = lambda report: None) -> Report:
    """Run the sections one after the other, and hold what they saw against the targets.

    A section that fails has its error as a row; the others run.

    Args:
        settings: what to run.
        command: what was typed, for the report.
        on_section: called with what there is after each section.
    """
    report = Report(
        machine={"device": settings.gauge.name(), "host": platform.processor() or platform.machine()},
        date=datetime.now(timezone.utc).isoformat(timespec="seconds"),
        versions=_versions(),
        command=command,
        settings={
            "steps": settings.steps,
            "buckets": list(settings.buckets),
            "only": list(settings.only),
            "peers": {name: str(folder) for name, folder in settings.peers.items()},
            "trace": None if settings.trace is None else str(settings.trace),
        },
    )
    for name, (title, measure) in SECTIONS.items():
        if settings.only and name not in settings.only:
            continue
        report.sections.append(_run_section(settings, Section(name, title), measure))
        if settings.on_gpu:
            report.targets = targets_of(report)
        on_section(report)
    return report


def _run_section(settings: Settings, section: Section, measure: Callable[[Settings, Section], None]) -> Section:
    begin = time.perf_counter()
    try:
        measure(settings, section)
    except Exception as error:  # what is measured already is worth keeping, and so is what comes next
        logger.exception("section %s of the benchmark broke off", section.name)
        section.rows.append(Row(BROKEN, note=f"{type(error).__name__}: {error}"))
    section.seconds = time.perf_counter() - begin
    if not settings.on_gpu:
        section.notes.append(_TAPE_NOTE)
    return section


def _versions() -> dict[str, str]:
    cuda = torch.version.cuda or "none"
    return {"graphglue": gg.__version__, "torch": torch.__version__, "cuda": cuda, "python": platform.python_version()}
