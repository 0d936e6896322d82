"""The check "trace": what a prep does that a replay could not repeat, and what it reads that it does not declare.

At each key the prep runs twice for real, under the rules of a recording, over slots filled with two different
steps; then it is recorded, on the CPU by the tape, which runs it on fake tensors. A fault is: a host read, a
shape that depends on contents, an upload of host values, random numbers, synchronisation, a write into a slot or
into a table that ``effects`` does not name, and memory from outside that is neither a declared slot nor table.

A buffer that the prep keeps between calls and fills in place is declared in ``contract.writes`` by the name of
the output leaf that lies in it ("page_table", or "plan" for "plan.page_table" too; any name for a bare tensor).
It may be read only after this run has written it. Memory that is kept and not returned can not be declared.
"""

from __future__ import annotations

import torch

from graphglue.audit.certificate import Finding, Verdict
from graphglue.audit.evidence import Evidence
from graphglue.audit.fakes import imitate
from graphglue.audit.subject import Region, Subject, Unseen
from graphglue.audit.witness import Testimony, Touch, finding_of, observe, place_of
from graphglue.core import trees
from graphglue.core.keys import Key
from graphglue.errors import CaptureError

NAME = "trace"
_OWN = "copy it into a tensor of the prep's own, such as clone()"
_DECLARE = "declare it in the contract (a slot in reads, a table in tables) and read it from the view"
_KEPT = "make it inside the prep, or return it and name its output leaf in contract.writes"
_COMPILED = (
    "contract.compile is set: the prep holds as it is written, but its compiled kernels were not seen; the check "
    "pointers looks at those"
)


def run(subject: Subject) -> tuple[Verdict, list[Finding]]:
    """Trace a prep at every key. Sync: the device."""
    evidence = Evidence(subject.prep)
    num_operations, num_keys = 0, 0
    for key in subject.keys:
        if subject.raws(key) and not evidence.is_full:
            num_operations, num_keys = max(num_operations, _trace_key(subject, key, evidence)), num_keys + 1
            subject.restore()
    if not num_keys:
        raise Unseen("no step is served by any key of this prep")
    if subject.on_gpu and subject.declared.compile:
        evidence.unseen("compile", _COMPILED)
    return evidence.result(f"up to {num_operations} operations at {num_keys} keys")


def _trace_key(subject: Subject, key: Key, evidence: Evidence) -> int:
    """Run a prep twice at a key and record it; return how many operations it has."""
    raws, runs = subject.raws(key), list[Testimony]()
    for seed, raw in enumerate((max(raws), raws[0])):
        subject.fill(key, raw, subject.sources(raw, seed))
        runs.append(seen := observe(subject, key))
        for finding in [*seen.broken, *_touched(subject, key, runs), *_returned(subject, runs)]:
            _fail(evidence, finding)
        for finding in seen.unseen:
            evidence.unseen(finding.text, finding.text, op=finding.op, where=finding.where)
        if seen.error is not None:
            return _raised(evidence, seen.error)
    if subject.on_gpu and not evidence.failed:
        _imitate(subject, key, evidence)
    _record(subject, key, evidence)
    return len(runs[-1].operations)


def _fail(evidence: Evidence, finding: Finding) -> None:
    """Note a fault once, although it shows at every key; one for each line and kind."""
    evidence.fail(f"{finding.where} {finding.text}", **finding.model_dump(exclude_none=True))


def _raised(evidence: Evidence, error: Exception) -> int:
    """Judge a prep that raised: what it did before counts first, because that may be the cause."""
    if not evidence.failed:
        raise error
    _fail(evidence, Finding(text=f"{type(error).__name__}: {error}", where=place_of(error)))
    return 0


def _touched(subject: Subject, key: Key, runs: list[Testimony]) -> list[Finding]:
    """Judge what the last run read and wrote of memory that it did not make; one finding for each memory."""
    seen, view, found = runs[-1], subject.view(key), dict[int, Finding]()
    declared = {view[name].data_ptr(): view[name] for name in view}
    buffers = _buffers(subject, seen)
    for touch in seen.touches:
        region = subject.region_of(touch.tensor)
        text = (
            _outside(touch, buffers, runs)
            if region is None
            else _written(subject, region)
            if touch.writes
            else _read(subject, region, touch, declared)
        )
        if text is not None:
            place = touch.tensor.data_ptr() if region is None else region.begin
            finding = finding_of(text, touch.op, touch.where, touch.tensor, [region] if region else [])
            found.setdefault(place, finding)
    return list(found.values())


def _written(subject: Subject, region: Region) -> str | None:
    if region.kind == "table" and region.name in subject.declared.effects:
        return None
    if region.kind.endswith("table"):
        how = "and not through its view" if region.kind == "live table" else "which contract.effects does not name"
        return f"writes into table {region.name!r}, {how}; {_OWN}, or declare the effect and write through the view"
    return f"writes into slot {region.name!r}, which other preps and the forward read; {_OWN}"


def _read(subject: Subject, region: Region, touch: Touch, declared: dict[int, torch.Tensor]) -> str | None:
    if not subject.reads(region):
        return f"reads {region.kind} {region.name!r}, which it does not declare; {_DECLARE}"
    if region.kind.startswith("live"):
        path = f"view.tables.{region.name}" if region.kind == "live table" else f"view.{region.name}"
        return (
            f"reads {region.kind} {region.name!r} of the runner by a name of its own, so it misses the tensors of a "
            f"step that has others, and a table that was replaced; read {path}"
        )
    own = declared.get(region.begin)
    if own is not None and _end(touch.tensor) > _end(own):
        return f"reads slot {region.name!r} beyond its bucket, where an earlier step's values stand; stay in the view"
    return None


def _outside(touch: Touch, buffers: set[int], runs: list[Testimony]) -> str | None:
    storage = touch.tensor.untyped_storage()
    if storage.data_ptr() in buffers:
        if touch.writes or not touch.first:
            return None
        return "reads a buffer that contract.writes names before this run has written it, so it depends on the last run"
    if touch.writes:
        return f"writes in place into a buffer that it keeps and does not declare; {_KEPT}"
    if any(storage._cdata in earlier.made for earlier in runs[:-1]):
        return "reads a tensor that an earlier call made and kept: a replay would never refresh it; compute it anew"
    return f"reads a tensor that is neither a slot, a table nor made in this call; {_DECLARE}"


def _returned(subject: Subject, runs: list[Testimony]) -> list[Finding]:
    """Judge output leaves that nothing in this call made: they were memoised, or computed out of sight."""
    seen, found = runs[-1], list[Finding]()
    known = {touch.tensor.untyped_storage()._cdata for touch in seen.touches} | set(seen.made) | set(seen.baked)
    buffers = _buffers(subject, seen)
    for name, leaf in trees.named_leaves(seen.result):
        if not isinstance(leaf, torch.Tensor) or leaf.layout is not torch.strided or not leaf.numel():
            continue
        storage = leaf.untyped_storage()
        if storage._cdata in known or subject.region_of(leaf) is not None:
            continue
        how = "nothing in this call wrote it" if storage.data_ptr() in buffers else f"it was kept; {_KEPT}"
        text = f"returns leaf {name!r} that no operation of this call made: {how}"
        found.append(finding_of(text, None, None, leaf, []))
    return found


def _buffers(subject: Subject, seen: Testimony) -> set[int]:
    """Give the addresses of the storages that ``contract.writes`` names, by output leaf."""
    named, writes = trees.named_leaves(seen.result), subject.declared.writes
    return {
        leaf.untyped_storage().data_ptr()
        for name, leaf in named
        if isinstance(leaf, torch.Tensor)
        and leaf.layout is torch.strided
        and any(name in ("", declared) or name.startswith(declared + ".") for declared in writes)
    }


def _imitate(subject: Subject, key: Key, evidence: Evidence) -> None:
    found = imitate(subject, key)
    if found is not None:
        verdict, finding = found
        note = evidence.fail if verdict is Verdict.FAIL else evidence.unseen
        note("fakes", **finding.model_dump(exclude_none=True))


def _record(subject: Subject, key: Key, evidence: Evidence) -> None:
    """Record the prep, which refuses what the runs could not show: no fake kernel, a sync that torch does not see."""
    try:
        subject.record(key).close()
    except CaptureError as error:
        if not any(finding.where and finding.where in str(error) for finding in evidence.failed):
            place = place_of(error)
            evidence.fail("record", f"can not be recorded: {error}", **({"where": place} if place else {}))


def _end(tensor: torch.Tensor) -> int:
    last = sum((extent - 1) * abs(stride) for extent, stride in zip(tensor.shape, tensor.stride()))
    return tensor.data_ptr() + (last + 1) * tensor.element_size()
