"""The check "pointers": every address in the captured graph's nodes, whatever launched them.

Torch sees the operations that it dispatches. A Triton kernel, one that was launched through cuda-python and cuBLAS
leave what they read in the parameters of the graph's nodes, and nowhere else. Each eight bytes there that fall into
memory are held against the slots, the declared tables and the recording's own pool.

A kernel's struct may have unset fields, in which an address is left over from something else. So what is no slot,
table or pool counts only if it stands there in a second recording too, on a stack that is clean for each operation.

Not seen: addresses that lie in device memory themselves (arrays of pointers), those that a kernel's code holds
(``__device__`` variables), those packed at an odd offset, and an odd one that ends like a small number.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from functools import partial

import torch

from graphglue.audit import atlas, names
from graphglue.audit.atlas import Kind, Sight, Stretch
from graphglue.audit.certificate import Finding, Verdict
from graphglue.audit.evidence import Evidence, spell_tensor
from graphglue.audit.subject import Subject, Unseen
from graphglue.core import trees
from graphglue.core.differences import spell_step
from graphglue.core.keys import Key
from graphglue.device.allocations import driver_allocation, torch_blocks
from graphglue.device.nodes import Node, nodes_of
from graphglue.device.stack import on_fresh_stack
from graphglue.errors import CaptureError
from graphglue.graphs.cuda import CudaRecording

NAME = "pointers"

_UNTOUCHING = ("empty", "event_record", "wait_event", "mem_alloc", "mem_free")  # nodes that read and write no memory
_BLAS = re.compile(r"gemm|gemv|nvjet|cublas|cutlass|splitk|xmma", re.IGNORECASE)
_MAX_NAME = 160
_ELEMENT_BYTES = 4  # a view of a smaller type may begin elsewhere; such an address that also ends like a count is lost

_DECLARE = "declare it in the contract and read it from the view, or make it inside the prep"
_FAULTS: dict[Kind, str] = {
    Kind.SLOT: f"a slot that the contract does not read; {_DECLARE}",
    Kind.TABLE: f"a table that the contract does not name; {_DECLARE}",
    Kind.LIVE_SLOT: "the runner's own slot, past the view: a twin in its place is not read; read the view's",
    Kind.LIVE_TABLE: "the runner's own table, past the view: one that is replaced is not noticed; read view.tables",
    Kind.MEMO: f"memory that a warm-up made and kept: a replay would never refresh it; {_DECLARE}",
    Kind.SCRATCH: f"memory that was made beside the recording and kept; {_DECLARE}",
    Kind.OTHER: f"memory that is neither a slot, a declared table nor made inside: undeclared; {_DECLARE}",
    Kind.FREED: f"memory that nobody holds any more, and that anybody may be given next; {_DECLARE}",
    Kind.HOST: "host memory: a replay takes what it holds by then; let plan() compute it, and pass it as a slot",
    Kind.DEVICE: f"undeclared device memory, which is not of torch's allocator; {_DECLARE}",
    Kind.MANAGED: f"undeclared managed memory, which the host may write at any time; {_DECLARE}",
}
_NO_TENSOR = "addresses memory in which no tensor lies: a library's own, a random generator's, or hidden from Python"
_BLIND = "no address of any memory stands in its parameters, so what it reads and writes is not seen"
_PAGEABLE = "pageable host memory: a replay takes what stands at that address by then; let plan() pass it as a slot"


@dataclass(frozen=True)
class Look:
    """What one recording's graph holds."""

    nodes: list[Node]
    sights: list[Sight]

    @property
    def shape(self) -> list[tuple[str, str, str]]:
        """What two recordings of one prep have in common."""
        return [(node.place, node.kind, node.name) for node in self.nodes]


def run(subject: Subject) -> tuple[Verdict, list[Finding]]:
    """Record the prep at every key and look at all addresses of the graph.

    Sync: the device. Capturable: no.
    """
    if not subject.on_gpu:
        raise Unseen("needs a GPU: a tape has no kernels whose parameters could be read")
    judge, totals = _Judge(subject), Counter[str]()
    served = [key for key in subject.keys if subject.raws(key)]
    if not served:
        raise Unseen("no step is served by any key of this prep")
    for key in served:
        if judge.evidence.is_full:
            break
        _fill(subject, key)
        try:
            seen = look(subject, key)
        except CaptureError as error:
            judge.evidence.fail("record", f"{spell_step(key)} can not be recorded: {error}")
            continue
        judge.nodes(seen, key)
        judge.sights(_doubtless(subject, key, seen, judge.evidence), key, _workspaces(seen.sights))
        totals.update(_spell_seen(seen))
    found = ", ".join(f"{count} {what}" for what, count in sorted(totals.items()))
    return judge.evidence.result(f"{len(served)} keys; {found}")


def look(subject: Subject, key: Key, fresh_stack: bool = False) -> Look:
    """Record a key once, and read its graph.

    Args:
        subject, key: what to record.
        fresh_stack: record, but do not warm up, on a stack of its own, swept before each operation that torch
            dispatches: what those before it left is in no field of its kernel.

    Raises:
        CaptureError: the prep can not be recorded.
        Unseen: something else than graphglue's CUDA recorder recorded it.
    """
    device = subject.arena.device.torch_device
    before = torch_blocks(device)
    clean = partial(on_fresh_stack, device, sweep=not subject.declared.compile)
    recording = subject.record(key, clean) if fresh_stack else subject.record(key)
    try:
        if not isinstance(recording, CudaRecording):
            raise Unseen(f"a {type(recording).__name__} recorded it, whose graph can not be read")
        nodes = nodes_of(recording.graph)
        layers = (
            atlas.chart_regions((*subject.regions(), *subject.live), subject.reads),
            _kept_outputs(recording.outputs, subject.declared.writes),
            atlas.chart_owned(nodes),
            atlas.chart_blocks(torch_blocks(device), recording.pool, before, recording.reads),
        )
        return Look(nodes, atlas.sights_of(nodes, layers, driver_allocation))
    finally:
        recording.close()
        if subject.declared.effects:
            subject.restore()


def _fill(subject: Subject, key: Key) -> None:
    raw = max(subject.raws(key))
    subject.fill(key, raw, subject.sources(raw, seed=0))


def _kept_outputs(outputs: object, writes: Iterable[str]) -> list[Stretch]:
    """Chart the storages that ``contract.writes`` names, by output leaf, as the check "trace" does."""
    storages = {
        leaf.untyped_storage().data_ptr(): leaf.untyped_storage().nbytes()
        for name, leaf in trees.named_leaves(outputs)
        if isinstance(leaf, torch.Tensor)
        and any(name in ("", declared) or name.startswith(f"{declared}.") for declared in writes)
    }
    return atlas.in_order(Stretch(begin, begin + size, Kind.KEPT, "", True) for begin, size in storages.items())


def _doubtless(subject: Subject, key: Key, seen: Look, evidence: Evidence) -> list[Sight]:
    """Give the strange addresses that are no leftovers, by a second recording if any is in doubt."""
    found = atlas.strange(seen.sights)
    if all(sight.is_certain for sight in found):
        return found
    device = subject.arena.device
    device.synchronize()  # the other thread's work is not ordered behind this thread's
    try:
        again = look(subject, key, fresh_stack=True)
    except Exception as error:
        why = f"a second recording, on a thread of its own, failed: {type(error).__name__}: {error}"
    else:
        device.synchronize()
        if again.shape == seen.shape:
            return _no_counts(atlas.confirmed(found, atlas.strange(again.sights)), key, evidence)
        why = "a second recording has other nodes"
    evidence.unseen("second", f"{spell_step(key)}: {len(found)} addresses may be leftovers, because {why}")
    return [sight for sight in found if sight.is_certain]


def _no_counts(found: list[Sight], key: Key, evidence: Evidence) -> list[Sight]:
    """Leave out what may be a number beside half an address: a number for sure if no tensor's element begins there."""
    for sight in found:
        if sight.is_countlike and sight.word.value % _ELEMENT_BYTES == 0:
            text = (
                f"addresses {sight.stretch}, or is a number beside bytes that nobody set: {_spell_region(sight, key)}"
            )
            evidence.unseen(f"{sight.place}", text, op=spell_op(sight.node))
    return [sight for sight in found if not sight.is_countlike]


class _Judge:
    """Turn nodes and strange addresses into evidence."""

    def __init__(self, subject: Subject) -> None:
        self.evidence = Evidence(subject.prep)
        self._names = names.Names(subject.prep)
        self._seen: set[object] = set()

    def nodes(self, seen: Look, key: Key) -> None:
        """Judge nodes by their kind, and those that tell nothing."""
        addressing = {sight.node.place for sight in seen.sights}
        for node in seen.nodes:
            fields = {"op": spell_op(node), "region": f"{spell_step(key)}, node {node.place}"}
            about = f"{node.kind} {node.name}"
            if node.kind == "host":
                text = "runs a function on the host, inside the graph; compute it on the device, or in plan()"
                self.evidence.fail(about, text, **fields)
            elif node.unread:
                self.evidence.unseen(about, f"could not be read: {node.unread}", **fields)
            elif node.kind == "kernel" and node.place not in addressing:
                self.evidence.unseen(about, _BLIND, **fields)
            elif node.kind not in ("kernel", *atlas.COPIES, *_UNTOUCHING):
                text = f"a node of kind {node.kind!r}, whose memory is not looked at"
                self.evidence.unseen(about, text, **fields)

    def sights(self, sights: Iterable[Sight], key: Key, workspaces: set[Stretch]) -> None:
        """Judge addresses of memory that the prep may not use; each memory once."""
        for sight in sights:
            about = sight.place if sight.stretch is None else (sight.stretch.kind, sight.stretch.begin)
            if about not in self._seen:
                self._seen.add(about)
                self._sight(sight, key, sight.stretch in workspaces)

    def _sight(self, sight: Sight, key: Key, of_blas: bool) -> None:
        fields = {"op": spell_op(sight.node), "region": _spell_region(sight, key)}
        about, stretch = fields["region"], sight.stretch
        if stretch is None:
            self.evidence.fail(about, f"its {sight.word.place} is {_PAGEABLE}", **fields)
            return
        named = self._names.at(sight.word.value)
        if named is not None:
            fields["tensor"] = f"{named.name} {spell_tensor(named.tensor)}".lstrip()
        elif stretch.kind is Kind.SCRATCH and of_blas:
            return  # the workspace that torch gives to cuBLAS, one for each stream
        elif stretch.kind is Kind.SCRATCH or (of_blas and stretch.kind is Kind.DEVICE):
            text = (
                "addresses memory in which no tensor lies: a library's own, a random generator's, or hidden from Python"
            )
            self.evidence.unseen(about, text, **fields)
            return
        self.evidence.fail(about, f"addresses {_FAULTS[stretch.kind]}", **fields)


def _workspaces(sights: Iterable[Sight]) -> set[Stretch]:
    """Give the strange memory that cuBLAS addresses. Memsets and kernels that sum up its parts address it too."""
    return {
        sight.stretch for sight in atlas.strange(sights) if sight.stretch is not None and _BLAS.search(sight.node.name)
    }


def spell_op(node: Node) -> str:
    """Name a node as a person knows it: a kernel without what its templates repeat."""
    if node.kind != "kernel":
        return f"{node.kind} node"
    try:
        name = torch._C._demangle(node.name)
    except Exception:
        name = node.name
    name = name.removeprefix("void ")
    return name if len(name) <= _MAX_NAME else f"{name[:_MAX_NAME]}..."


def _spell_region(sight: Sight, key: Key) -> str:
    stretch = "pageable host memory" if sight.stretch is None else str(sight.stretch)
    begin = sight.word.value if sight.stretch is None else sight.stretch.begin
    return (
        f"{stretch} at {begin:#x}; {sight.word.place} of node {sight.node.place} holds {sight.word.value:#x}, "
        f"{spell_step(key)}"
    )


def _spell_seen(seen: Look) -> Counter[str]:
    """Count what was looked at."""
    counts = Counter(f"{node.kind} nodes" for node in seen.nodes)
    counts["addresses"] = len(seen.sights)
    return counts
