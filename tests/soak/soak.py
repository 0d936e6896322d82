"""The soak: random steps for as long as wanted, with everything that happens to a runner between steps.

Every decision is held against the model, sampled results against the slow reference, all counters against what was
counted here, and what process and device hold against what they held after the warm-up.
"""

from __future__ import annotations

import itertools
import json
import random
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import graphglue as gg

from .engine import CAPTURED, COLD, LADDER, Drawn, Engine, Fault, Model, drawn, reference
from .growth import Growth

PARTS = ("prep", "forward")


class Soak:
    """Drive one runner.

    Args:
        device: "cpu" (the tape) or "cuda".
        seed: of everything that is drawn.
        upkeep_every: steps between two actions on the runner.
        check_every: one step of so many has its results checked, and each of the first ones behind an action.
        engine: builds what is soaked.
    """

    def __init__(
        self,
        device: str = "cpu",
        seed: int = 0,
        upkeep_every: int = 5000,
        check_every: int = 16,
        engine: Callable[[str], Engine] = Engine,
    ) -> None:
        self.rng, self.engine, self.model = random.Random(seed), engine(device), Model()
        self.growth = Growth(device)
        self.upkeep_every, self.check_every = upkeep_every, check_every
        self.num_steps = self.num_checked = self.num_refused = 0
        self.routes: Counter[Any] = Counter()
        self.tokens: Counter[str] = Counter()
        self.quarantines, self.staging = Counter(dict.fromkeys(PARTS, 0)), Counter[str]()
        self._staged: tuple[Drawn, Any] | None = None
        self._check_next = 0
        self._actions: Iterator[Callable[[], None]] = itertools.cycle(
            (
                self.rewrite,
                self.break_one,
                self.refuse,
                self.repair,
                self.sleep,
                self.reset,
                self.capture,
                self.tell,
            )
        )

    @property
    def runner(self) -> gg.Runner:
        """What is soaked."""
        return self.engine.runner

    def run(self, steps: int, on_step: Callable[[], Any] = lambda: None) -> dict[str, Any]:
        """Run so many steps, and say what was seen; fails at the first fault."""
        begin, last = time.perf_counter(), self.tell
        self.engine.rewrite(self.rng)
        self.capture()
        for _ in range(steps // self.upkeep_every):
            self.steps(self.upkeep_every, on_step)
            action = next(self._actions)
            action()
            self.count()
            if action == last:  # the end of a round: the same is there as one round ago
                self.growth.look()
        self.steps(steps % self.upkeep_every, on_step)
        self.count()
        self.growth.check()
        return self.told(time.perf_counter() - begin)

    def told(self, seconds: float) -> dict[str, Any]:
        """Sum up, JSON-ready."""
        reasons: Counter[str] = Counter()
        for (_, _, reason, _, _), count in self.routes.items():
            reasons[reason] += count
        return {
            "device": self.engine.device,
            "steps": self.num_steps,
            "seconds": round(seconds, 1),
            "us_a_step": round(seconds / max(1, self.num_steps) * 1e6, 1),
            "checked": self.num_checked,
            "refused": self.num_refused,
            "reasons": dict(reasons),
            "quarantines": dict(self.quarantines),
            "staging": dict(self.staging),
            "first": self.growth.looks[self.growth.num_warm - 1],
            "last": self.growth.looks[-1],
            "grown": self.growth.grown,
        }

    # A step.

    def steps(self, count: int, on_step: Callable[[], Any] = lambda: None) -> None:
        """Run so many steps."""
        for _ in range(count):
            self.step()
            on_step()

    def step(self) -> None:
        """Run one step; some are staged, and of those some not taken."""
        step = drawn(self.rng)
        batch = step.batch(self.rng.choice(self.engine.wraps))
        taken = False
        if self.rng.random() < 0.08:
            taken = self.stage(step, batch)
            if taken and self.rng.random() < 0.25:
                step, taken = self.another(step), False
                batch = step.batch(self.rng.choice(self.engine.wraps))
        result = self.runner.replay(batch)
        self.num_steps += 1
        expected = self.model.expects(step, taken)
        decision = result.decision
        bucket = None if step.kind == "over" else tuple(decision.bucket)
        why = decision.forward_reason
        seen = (decision.prep.value, decision.forward.value, decision.reason.value, why and why.value, bucket)
        assert seen == expected, f"step {self.num_steps} ({step}) went {seen}, expected {expected}"
        self.routes[expected] += 1
        self.tokens["real"] += len(step.ids)
        self.tokens["bucket"] += len(step.ids) if bucket is None else bucket[1]
        if self._check_next > 0 or self.num_steps % self.check_every == 0:
            self._check_next -= 1
            self.check(step, result)

    def stage(self, step: Drawn, batch: gg.Batch) -> bool:
        """Stage a step; whether it was follows from its route."""
        if step.kind == "over":
            return False
        staged = self.runner.stage(batch)
        prep, _, reason, _, _ = self.model.expects(step, False)
        assert staged is (prep == "glue"), f"step {self.num_steps + 1} ({step}) staged: {staged}"
        self.staging["staged" if staged else f"not_staged {reason}"] += 1
        self.staging["taken"] += staged
        return staged

    def another(self, step: Drawn) -> Drawn:
        """Give a step that the staged one can not stand for: other values, or another step."""
        if self.rng.random() < 0.5:
            other = replace(step, lens=[length + 1 for length in step.lens])
        else:
            other = drawn(self.rng)
        alike = [(one.kind, len(one.lens), len(one.ids)) for one in (step, other)]
        self.staging["taken"] -= 1
        self.staging["rejected sources" if alike[0] == alike[1] else "rejected other_step"] += 1
        return other

    def check(self, step: Drawn, result: Any) -> None:
        """Hold metadata and outputs against the slow reference."""
        metadata, outputs = reference(step, self.engine.numbers, result.decision.bucket.requests)
        seen = (result.metadata["base"].tolist(), result.outputs.tolist())
        assert seen == (metadata, outputs), f"step {self.num_steps} ({step}) gave {seen}, expected {metadata, outputs}"
        self.num_checked += 1

    # Between steps.

    def rewrite(self) -> None:
        """Change what the table holds, in place."""
        self.engine.rewrite(self.rng)
        self._check_next = 16

    def break_one(self) -> None:
        """Drop all keys by another table, and have one size fail to be recorded."""
        fault = Fault(self.rng.choice(PARTS), self.rng.choice(LADDER))
        self.engine.table = self.engine.table.clone()
        self.runner.rebind_table("t", self.engine.table)
        self.engine.fault.part, self.engine.fault.size = fault.part, fault.size
        whole = {key.requests for key in self.runner.maintain()}
        assert whole == set(LADDER) - {fault.size}, (whole, fault)
        self._note_quarantine(fault.part)
        self.model.set_all(CAPTURED, fault)
        self._check_next = 16

    def repair(self) -> None:
        """Fail to repair the broken size, then repair it."""
        fault = Fault(self.engine.fault.part, self.engine.fault.size)
        assert self.runner.maintain() == []
        self._note_quarantine(fault.part)
        self.engine.fault.part = ""
        assert {key.requests for key in self.runner.maintain()} == {fault.size}
        self.model.set_all(CAPTURED)
        self._check_next = 16

    def refuse(self) -> None:
        """Hand in what does not fit."""
        for sources in ({"lens": [1]}, {"lens": [1.5], "rows": [0], "ids": [1, 2]}):
            try:
                self.runner.replay(gg.Batch(1, sources))
            except gg.BindError:
                self.num_refused += 1
            else:
                raise AssertionError(f"{sources} was not refused")

    def sleep(self) -> None:
        """Release and resume, with keys kept or dropped."""
        kept = self.rng.random() < 0.5
        self.runner.release(keep_keys=kept)
        try:
            self.runner.replay(gg.Batch.idle())
        except gg.ClosedError:
            self.num_refused += 1
        else:
            raise AssertionError("a step ran asleep")
        self.runner.resume(contents_lost=not kept)
        self._check_next = 16

    def reset(self) -> None:
        """Drop all keys: steps run eagerly."""
        self.runner.reset()
        self.model.set_all(COLD)

    def capture(self) -> None:
        """Capture all keys."""
        self.runner.capture(progress=False)
        self.model.set_all(CAPTURED)
        self._check_next = 16

    def tell(self) -> None:
        """Ask for everything that an engine may ask for."""
        json.dumps(self.runner.stats())
        record = self.runner.flight_record()
        assert len(record.steps) <= 64
        assert self.runner.can_replay(gg.Batch(3))

    def _note_quarantine(self, part: str) -> None:
        self.quarantines[part] += 2  # the uniform and the ragged key

    # Counters.

    def count(self) -> None:
        """Hold every counter against what was counted here."""
        stats = self.runner.stats()
        fields = ("prep", "forward", "reason", "forward_reason")
        seen = Counter(
            {
                (*(route[name] for name in fields), route["bucket"] and tuple(route["bucket"])): route["steps"]
                for route in stats["routes"]
            }
        )
        _hold("routes", seen, self.routes)
        _hold("steps", stats["steps"], self.num_steps)
        _hold("steps of all routes", sum(route["steps"] for route in stats["routes"]), self.num_steps)
        real, bucket = self.tokens["real"], self.tokens["bucket"]
        _hold(
            "tokens", [stats[f"{what}_tokens"] for what in ("real", "bucket", "padded")], [real, bucket, bucket - real]
        )
        broken = {"forward": self.quarantines["forward"], "base": self.quarantines["prep"]}
        _hold("quarantines", stats["quarantines"], broken)
        shadow = stats["shadow"]
        _hold("samples that passed", shadow["passed"], shadow["sampled"])
        _hold("samples that did not", (shadow["mismatched"], shadow["failed"]), (0, 0))
        self._count_staging(stats["staging"])

    def _count_staging(self, told: dict[str, Any]) -> None:
        parts = {"staged": told["staged"], "taken": told["staged_taken"]}
        parts.update({f"rejected {why}": count for why, count in told["staged_rejected"].items()})
        parts.update({f"not_staged {why}": count for why, count in told["not_staged"].items()})
        _hold("staging", +Counter(parts), +self.staging)
        _hold("staged", told["staged"], told["staged_taken"] + sum(told["staged_rejected"].values()))


def _hold(what: str, seen: Any, expected: Any) -> None:
    assert seen == expected, f"{what}: the runner counts {seen}, and here are {expected}"
