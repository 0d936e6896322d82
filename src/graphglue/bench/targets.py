"""What is to be reached on an H200, and what this run saw of it."""

from __future__ import annotations

from dataclasses import replace

from graphglue.bench import baselines, contenders, draft_steps, drafts, gathers, ranks, scaling, segments
from graphglue.bench.contenders import AGAIN, FLOOR, ONE_DEVICE, ONE_NUMPY
from graphglue.bench.memory import FILL, RATE
from graphglue.bench.results import Report, Row, Section, Target
from graphglue.bench.steps import DEEP_BUCKET


def targets_of(report: Report) -> list[Target]:
    """Hold a GPU's rows against the targets; those whose section was not run are left open."""
    return [
        *_step_targets(report.section("floor") or Section("floor", "")),
        *_fill_target(report.section("fill") or Section("fill", "")),
        *_slot_targets(report.section("slots") or Section("slots", "")),
        *_key_target(report.section("keys") or Section("keys", "")),
        *_rank_targets(report.section("ranks") or Section("ranks", "")),
        *_draft_target(report.section("speculative") or Section("speculative", "")),
        *_memory_targets(report.section("compositions") or Section("compositions", "")),
        *_segment_targets(report.section("segments") or Section("segments", "")),
    ]


def _step_targets(section: Section) -> list[Target]:
    floor = section.find(FLOOR, DEEP_BUCKET, padded=True)
    again = section.find(AGAIN, DEEP_BUCKET, padded=True)
    device = section.find(ONE_DEVICE, DEEP_BUCKET, padded=True)
    host = section.find(ONE_NUMPY, DEEP_BUCKET, padded=True)
    glue = section.find(contenders.GLUE_ALONE, DEEP_BUCKET, padded=True)
    eager = section.find(contenders.EAGER_ALONE, DEEP_BUCKET, padded=True)
    noise = _more(again)
    more = _more(device)
    p99 = None if device is None else _minus(device.host_p99_us, device.floor_p99_us)
    whole = None
    if device is not None and floor is not None and glue is not None:
        whole = _minus(_minus(device.device_us, floor.device_us), glue.device_us)
    unfilled = section.find(contenders.UNFILLED, DEEP_BUCKET, padded=True)
    filling = None if device is None or unfilled is None else _minus(device.device_us, unfilled.device_us)
    note = "" if noise is None else f" (noise {abs(noise):.2f} us)"
    return [
        _at_most("one launch, device sources, x the floor" + note, _times(device), 3.5, "x"),
        _at_most("the same, us more than the floor", more, 10.0, "us"),
        _at_most("one launch, numpy sources, x the floor", _times(host), 5.0, "x"),
        *_arena_targets(section),
        _at_most("p99 of one launch minus p99 of the floor", p99, 15.0, "us"),
        _at_most("device time beyond forward + glue, each replayed alone", whole, 3.0, "us"),
        _at_most("device time beyond forward + glue in one graph", filling, 3.0, "us"),
        _at_most("host cost of the glued prep / the eager prep", _ratio(glue, eager), 1 / 50, ""),
    ]


def _arena_targets(section: Section) -> list[Target]:
    """Compare with the arenas; a difference within the noise is none."""
    found = []
    ours = section.find(ONE_NUMPY, 256, padded=True)
    noise = _more(section.find(AGAIN, 256, padded=True)) or 0.0
    for label in (baselines.ARENA_SLICES, baselines.ARENA_BLOCK):
        theirs = section.find(label, 256, padded=True)
        target = _at_most(f"numpy sources, 255 on 256 / {label}", _ratio(ours, theirs), 1.0, "")
        more = _difference(ours, theirs)
        found.append(target if more is None else replace(target, reached=more <= abs(noise)))
    return found


def _fill_target(section: Section) -> list[Target]:
    rate = section.find(RATE)
    seen = None if rate is None else rate.values.get("rate_ratio")
    text = "-" if seen is None else f"{seen:.2f}"
    return [Target(FILL + ", rate / a plain copy's", "at least 0.80", text, None if seen is None else seen >= 0.8)]


def _slot_targets(section: Section) -> list[Target]:
    found = []
    for kind in (ONE_DEVICE, ONE_NUMPY):
        row = section.find(f"{scaling.PER_SLOT}: {kind}")
        seen = None if row is None else row.values.get("us_per_slot")
        found.append(_at_most(f"one more slot, {kind}", seen, 0.4, "us"))
    return found


def _key_target(section: Section) -> list[Target]:
    one, every = section.find(scaling.ONE_KEY), section.find(scaling.ALL_KEYS)
    seen = None
    if one is not None and every is not None and one.host_p99_us and every.host_p99_us:
        seen = every.host_p99_us / one.host_p99_us
    return [_at_most("p99 of all keys in turn / one key", seen, 1.5, "")]


def _rank_targets(section: Section) -> list[Target]:
    gathered = {size: section.find(ranks.gathered_label(size)) for size in ranks.GATHERED}
    by_nccl = section.find(ranks.gathered_label(2, gathers.NCCL))
    fleet = section.find(ranks.label_of(max(ranks.FLEETS)))
    after = section.find(ranks.AFTER, in_flight=ranks.IN_FLIGHT[-1])
    return [
        *(
            _at_most(f"agree / a bare all_gather, {size} gloo ranks", _times(row), 1.3, "x")
            for size, row in gathered.items()
        ),
        _at_most("agree / a bare all_gather with its copies, 2 NCCL ranks", _times(by_nccl), 1.3, "x"),
        _at_most(ranks.AFTER, None if after is None else after.host_us, 15.0, "us"),
        _at_most("the planner on 128 ranks", None if fleet is None else fleet.host_us, 50.0, "us"),
    ]


def _draft_target(section: Section) -> list[Target]:
    what = "in a draft's one launch beyond fill and forward, median of 8 processes"
    rows = {"glue": section.find(draft_steps.ONE), "compiled glue": section.find(draft_steps.COMPILED)}
    return [
        _at_most(f"{kind} {what}", None if row is None else row.values.get(drafts.GLUE_US), 1.0, "us")
        for kind, row in rows.items()
    ]


def _memory_targets(section: Section) -> list[Target]:
    largest = max((row for row in section.rows if "a_ratio" in row.values), key=_nodes, default=None)
    a_ratio, b_ratio = (None if largest is None else largest.values[name] for name in ("a_ratio", "b_ratio"))
    return [
        _at_most("driver memory at 2,000 nodes, A / the forwards alone", a_ratio, 1.1, ""),
        _at_most("driver memory at 2,000 nodes, B / the forwards alone", b_ratio, 2.1, ""),
    ]


def _segment_targets(section: Section) -> list[Target]:
    ours, theirs = (
        [section.find(segments.of_way(label, way)) for way in segments.WAYS] for label in (segments.OURS, segments.PEER)
    )
    memory, our_step = section.find(segments.MEMORY), section.find(segments.OUR_STEP)
    found = {} if memory is None else memory.values
    return [
        *(
            _at_most(segments.of_way("segmented replay / breakable-cuda-graphs'", way), _ratio(one, other), 0.8, "x")
            for way, one, other in zip(segments.WAYS, ours, theirs)
        ),
        _at_most(
            "a whole prefill step / one with slice copies, eager prep and breakable-cuda-graphs'",
            _ratio(our_step, section.find(segments.PEER_STEP)),
            0.8,
            "x",
        ),
        _at_most("12 token buckets / the largest alone, allocator", found.get("reserved_ratio"), 1.3, ""),
        _at_most("12 token buckets / the largest alone, driver", found.get("driver_ratio"), 1.3, ""),
    ]


def _nodes(row: Row) -> float:
    return row.values["forward_nodes"]


def _at_most(what: str, seen: float | None, limit: float, unit: str) -> Target:
    digits = 3 if limit < 0.1 else 2
    limit_text = f"at most {limit:.{digits}f} {unit}".strip()
    if seen is None:
        return Target(what, limit_text, "-", None)
    return Target(what, limit_text, f"{seen:.{digits}f} {unit}".strip(), seen <= limit)


def _times(row: Row | None) -> float | None:
    return None if row is None else row.times_floor


def _more(row: Row | None) -> float | None:
    """Give what a row costs beyond the floor in the same rounds."""
    return None if row is None else _minus(row.host_us, row.floor_us)


def _difference(row: Row | None, other: Row | None) -> float | None:
    return None if row is None or other is None else _minus(row.host_us, other.host_us)


def _ratio(row: Row | None, other: Row | None) -> float | None:
    if row is None or other is None or row.host_us is None or not other.host_us:
        return None
    return row.host_us / other.host_us


def _minus(left: float | None, right: float | None) -> float | None:
    return None if left is None or right is None else left - right
