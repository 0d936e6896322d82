"""Count what the audit catches, and how long it takes, on the CPU or a GPU.

    python tests/gallery/figures.py --device cuda --json figures.json
    python tests/gallery/figures.py --only generated --generated 1000

On a GPU each prep is audited in a worker process, because a faulty one that reads poison as an index ends
its process; the next prep then gets a new worker.
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import json
import logging
import subprocess
import sys
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "src")]  # run as a script, this folder stands first: nothing here is shadowed

import torch  # noqa: E402

import graphglue as gg  # noqa: E402
from graphglue.audit import Certificate, run_checks  # noqa: E402
from tests.gallery import GALLERY, Stage, correct, lookalikes, mutants, rounds, shipped, specimens  # noqa: E402

SECTIONS = ("gallery", "mutants", "generated", "lookalikes", "shipped", "seconds")
MAX_IDLE_WORKERS = 4
TWENTY = (1, 2, 4, 8, 12, *range(16, 129, 8))[:20]
Outcome = dict[str, Any]


# One job each: a name such as "gallery/item/faulty" -> what came of it.


def run_gallery(device: str, name: str, which: str) -> Outcome:
    """Audit one side of a specimen."""
    return rounds.examined(name, which, device)


def run_mutants(device: str, name: str) -> Outcome:
    """Audit a mutant, and compare it with the reference."""
    mutant = mutants.MUTANTS[name]
    failed = rounds.failures(mutants.audited(mutant, device))
    agrees = mutant.family == mutants.FAULT or mutants.agrees_with_reference(mutant)
    return {"family": mutant.family, "failed": failed, "agrees": agrees, "equivalent": mutants.EQUIVALENT.get(name)}


def run_generated(device: str, seed: str) -> Outcome:
    """Audit a generated correct prep."""
    runner, composed = correct.prep(int(seed), device)
    with runner:
        certificate = run_checks(runner, perturb=composed.forget, poisoning=True)
    return {**_silence(certificate), "leaves": [leaf.text for leaf in composed.leaves]}


def run_lookalikes(device: str, name: str) -> Outcome:
    """Audit a correct prep that looks like a wrong one."""
    stage = Stage.on(device)
    made = lookalikes.LOOKALIKES[name](stage)
    with made.runner(stage) as runner:
        return _silence(run_checks(runner, perturb=made.perturb, poisoning=True))


def run_shipped(device: str, name: str) -> Outcome:
    """Audit a shipped prep."""
    one = shipped.SHIPPED[name]
    with one.runner(one.make(one.module), device) as runner:
        return _silence(run_checks(runner, perturb=lambda: None, poisoning=True))


def run_seconds(device: str, name: str) -> Outcome:
    """Time a full audit of a shipped prep at twenty buckets; what a process does once was done before."""
    run_shipped(device, name)
    one = shipped.SHIPPED[name]
    with one.runner(one.make(one.module), device, TWENTY) as runner:
        begin = time.perf_counter()
        certificate = run_checks(runner, perturb=lambda: None, poisoning=True)
        total = time.perf_counter() - begin
        num_buckets = len(runner.buckets)
    checks = {check.name: check.seconds for check in certificate.checks}
    return {**_silence(certificate), "buckets": num_buckets, "total": round(total, 3), "checks": checks}


def _silence(certificate: Certificate) -> Outcome:
    verdicts = {check.name: check.verdict.value for check in certificate.checks}
    return {"failed": rounds.failures(certificate), "verdicts": verdicts}


RUN: dict[str, Callable[..., Outcome]] = {
    "gallery": run_gallery,
    "mutants": run_mutants,
    "generated": run_generated,
    "lookalikes": run_lookalikes,
    "shipped": run_shipped,
    "seconds": run_seconds,
}


def jobs_of(sections: Iterable[str], device: str, seeds: range) -> list[list[str]]:
    """List the jobs, each a section and its arguments."""
    kind = torch.device(device).type
    listed = {
        "gallery": [["gallery", one.name, which] for one in specimens(kind) for which in ("faulty", "twin")],
        "mutants": [["mutants", name] for name in mutants.MUTANTS],
        "generated": [["generated", str(seed)] for seed in seeds],
        "lookalikes": [["lookalikes", name] for name in lookalikes.LOOKALIKES],
        "shipped": [["shipped", name] for name in shipped.SHIPPED],
        "seconds": [["seconds", name] for name in shipped.SHIPPED],
    }
    return [job for section in sections for job in listed[section]]


def perform(job: list[str], device: str) -> Outcome:
    """Run one job; what it raises is an outcome too."""
    try:
        return RUN[job[0]](device, *job[1:])
    except Exception as error:  # an audit must not raise: that counts against it
        return {"raised": f"{type(error).__name__}: {error}", "failed": {}}


# Processes.


def here(jobs: Iterable[list[str]], device: str) -> Iterator[tuple[list[str], Outcome]]:
    """Run jobs in this process."""
    gg.Tape().record(lambda: torch.ones(1) + 1).replay()
    gc.collect()
    gc.freeze()  # what the imports made is never garbage, and each capture would look through it again
    for job in jobs:
        yield job, perform(job, device)


def in_workers(jobs: list[list[str]], device: str) -> Iterator[tuple[list[str], Outcome]]:
    """Run jobs in a worker process, and the rest in another one where a job ends it.

    Raises:
        RuntimeError: several workers in a row end before they have done anything.
    """
    waiting, idle = list(jobs), 0
    while waiting:
        if idle == MAX_IDLE_WORKERS:
            raise RuntimeError(f"{idle} workers in a row did nothing, the last one at {waiting[0]}; see their errors")
        command = [sys.executable, str(Path(__file__).resolve()), "--worker", "--device", device]
        idle += 1
        with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as worker:
            assert worker.stdin is not None
            assert worker.stdout is not None
            with contextlib.suppress(BrokenPipeError):  # it ended before it read them
                worker.stdin.write(json.dumps(waiting))
                worker.stdin.close()
            for line in worker.stdout:
                if line.startswith("{"):
                    idle = 0
                    yield waiting.pop(0), json.loads(line)
        if worker.returncode != 0 and waiting:
            yield waiting.pop(0), {"ended": f"the process ended with {worker.returncode}", "failed": {}}


def work(device: str) -> None:
    """Be a worker: read jobs, write one line of outcome for each, and stop once the device is broken."""
    for _, outcome in here(json.loads(sys.stdin.read()), device):
        broken = False
        try:
            torch.ones(1, device=device).sum().item()
        except Exception as error:
            broken, outcome = True, {**outcome, "broke": str(error)}
        print(json.dumps(outcome), flush=True)
        if broken:
            return


# Counts.


def counted(outcomes: list[tuple[list[str], Outcome]], device: str) -> dict[str, Any]:
    """Sum outcomes up, section by section."""
    by_section: dict[str, list[tuple[list[str], Outcome]]] = defaultdict(list)
    for job, outcome in outcomes:
        by_section[job[0]].append((job, outcome))
    count = {"gallery": _gallery, "mutants": _mutants, "seconds": _seconds}
    name = torch.cuda.get_device_name(device) if torch.device(device).type == "cuda" else "cpu"
    return {
        "device": name,
        "torch": torch.__version__,
        "graphglue": gg.__version__,
        **{section: count.get(section, _alarms)(done) for section, done in by_section.items()},
    }


def _gallery(done: list[tuple[list[str], Outcome]]) -> dict[str, Any]:
    faulty = {job[1]: outcome for job, outcome in done if job[2] == "faulty"}
    twins = {job[1]: outcome for job, outcome in done if job[2] == "twin"}
    total: Counter[str] = Counter()
    caught: Counter[str] = Counter()
    missed = {}
    for name, outcome in faulty.items():
        if not outcome.get("seen_here", True):
            continue
        check = GALLERY[name].check
        total[check] += 1
        if reason := outcome.get("missed") or outcome.get("raised") or outcome.get("ended"):
            missed[name] = reason
        else:
            caught[check] += 1
    alarms = {name: outcome for name, outcome in twins.items() if _is_alarm(outcome)}
    only_gpu = [name for name in faulty if GALLERY[name].only_gpu]
    return {
        "caught": {check: f"{caught[check]}/{total[check]}" for check in sorted(total)},
        "caught_in_all": f"{caught.total()}/{total.total()}",
        "by_any_check": sum(bool(outcome["failed"]) for outcome in faulty.values()),
        "missed": missed,
        "twins": len(twins),
        "false_alarms": alarms,
        "only_a_gpu_can_see": sorted(one.name for one in GALLERY.values() if one.only_gpu),
        "of_those_run": only_gpu,
    }


def _mutants(done: list[tuple[list[str], Outcome]]) -> dict[str, Any]:
    families: dict[str, Counter[str]] = {mutants.FAULT: Counter(), mutants.EDIT: Counter()}
    survived, by_check = [], Counter[str]()
    for job, outcome in done:
        counts = families[outcome.get("family", mutants.FAULT)]
        counts["total"] += 1
        by_check.update(outcome["failed"].keys())
        if outcome["failed"]:
            counts["caught by the audit"] += 1
        elif "ended" in outcome or "raised" in outcome:
            counts["ended the process"] += 1
        elif outcome.get("equivalent"):
            counts["equivalent"] += 1
        elif not outcome.get("agrees", True):
            counts["caught by the reference"] += 1
        else:
            survived.append(job[1])
    return {
        **{family: dict(counts) for family, counts in families.items()},
        "failed_checks": dict(by_check),
        "survived": survived,
        "equivalent": mutants.EQUIVALENT,
    }


def _alarms(done: list[tuple[list[str], Outcome]]) -> dict[str, Any]:
    verdicts: dict[str, Counter[str]] = defaultdict(Counter)
    for _, outcome in done:
        for check, verdict in outcome.get("verdicts", {}).items():
            verdicts[check][verdict] += 1
    alarms = {job[1]: outcome for job, outcome in done if _is_alarm(outcome)}
    return {
        "preps": len(done),
        "num_false_alarms": len(alarms),
        "false_alarms": alarms,
        "verdicts": {check: dict(counts) for check, counts in verdicts.items()},
    }


def _seconds(done: list[tuple[list[str], Outcome]]) -> dict[str, Any]:
    return {job[1]: outcome for job, outcome in done}


def _is_alarm(outcome: Outcome) -> bool:
    return bool(outcome["failed"]) or any(word in outcome for word in ("raised", "ended", "broke"))


def main() -> None:
    """Run the sections asked for, print the counts, and write them."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--json", type=Path, help="write the counts there")
    parser.add_argument("--only", nargs="+", choices=SECTIONS, default=SECTIONS)
    parser.add_argument("--generated", type=int, default=100, help="how many generated correct preps")
    parser.add_argument("--first-seed", type=int, default=0)
    parser.add_argument("--worker", action="store_true", help=argparse.SUPPRESS)
    asked = parser.parse_args()
    torch.set_num_threads(1)
    logging.disable(logging.ERROR)
    if asked.worker:
        return work(asked.device)
    begin = time.perf_counter()
    jobs = jobs_of(asked.only, asked.device, range(asked.first_seed, asked.first_seed + asked.generated))
    run = in_workers if torch.device(asked.device).type == "cuda" else here
    outcomes = []
    for job, outcome in run(jobs, asked.device):
        outcomes.append((job, outcome))
        if len(outcomes) % 50 == 0:
            print(f"{len(outcomes)} of {len(jobs)}, {time.perf_counter() - begin:.0f} s", file=sys.stderr, flush=True)
    text = json.dumps(counted(outcomes, asked.device), indent=2)
    print(text)
    if asked.json:
        asked.json.write_text(text + "\n")
    return None


if __name__ == "__main__":
    main()
