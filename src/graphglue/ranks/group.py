"""The group: ranks that exchange their facts once per step, and derive one plan."""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Literal

import numpy as np
import torch.distributed as dist

from graphglue.core.batch import Mode
from graphglue.errors import BindError, ConfigError, GraphGlueError, RankDisagreementError
from graphglue.ranks import facts as at
from graphglue.ranks.facts import RankFacts
from graphglue.ranks.gathered import check_digests
from graphglue.ranks.memory import MemoryTransport
from graphglue.ranks.plan import RankPlan
from graphglue.ranks.planner import Planner
from graphglue.ranks.transport import TorchTransport, Transport

_EXCHANGES = ("group", "memory")
_PATIENCE_S = 3.0  # how long ranks that were left behind look for each other


class RankGroup:
    """Agree with the other ranks: one all-gather of one small row per step, then a pure function.

    Building one is collective: the ranks compare their planners.

    Args:
        process_group: a ``torch.distributed`` group, None for the default one (or, where that is a device's alone as
            with "nccl", for one of its own over the same ranks: a gather on the communicator of a forward waits for
            it); or a ``Transport``.
        planner: derives the plans; the same on every rank.
        num_extra: integers that the engine adds to its facts.
        timeout_s: how long a rank waits for the others.
        check_every: compare the digest of the last plan in every so many steps; 0 for never.
        exchange: "group": rows are gathered by the process group; "memory": through memory that its ranks share, all on
            one host, several times faster; a rank that waits spins for up to 2 ms. The group serves the start-up. Each
            RankGroup has memory of its own: ranks that use two in another order wait for each other until timeout_s.

    Raises:
        RankDisagreementError: a rank was built with another planner, or did not come.
        ConfigError: torch.distributed is not initialised, a value that is not usable, or no memory that all share.

    Sync: the host waits for all ranks in ``finish``, ``agree``, ``every`` and ``compare``. Capturable: no.
    """

    def __init__(
        self,
        process_group: dist.ProcessGroup | Transport | None,
        planner: Planner,
        *,
        num_extra: int = 0,
        timeout_s: float = 300.0,
        check_every: int = 0,
        exchange: Literal["group", "memory"] = "group",
    ) -> None:
        if not isinstance(planner, Planner):
            raise ConfigError(f"planner is a {type(planner).__name__}; expected a graphglue.ranks.Planner")
        for name, value, least in (("num_extra", num_extra, 0), ("check_every", check_every, 0)):
            if type(value) is not int or value < least:
                raise ConfigError(f"{name}={value!r}: expected an integer of at least {least}")
        if not (isinstance(timeout_s, (int, float)) and math.isfinite(timeout_s) and timeout_s > 0):
            raise ConfigError(f"timeout_s={timeout_s!r}: expected a positive number of seconds")
        if exchange not in _EXCHANGES:
            raise ConfigError(f"exchange={exchange!r}: expected one of {_EXCHANGES}")
        self.planner, self.num_extra, self.timeout_s, self._check_every = planner, num_extra, timeout_s, check_every
        if process_group is None or isinstance(process_group, dist.ProcessGroup):
            self._transport: Transport = TorchTransport(process_group, at.EXTRA + num_extra, timeout_s)
        elif exchange == "memory":
            raise ConfigError(f'exchange="memory" needs a torch.distributed group to set it up; got {process_group!r}')
        elif all(hasattr(process_group, name) for name in ("rank", "size", "start", "finish", "exchange", "absent")):
            self._transport = process_group
        else:
            raise ConfigError(
                f"process_group is {process_group!r}; expected a torch.distributed group that this process is in, or a "
                "graphglue.ranks.Transport"
            )
        self.rank: int = self._transport.rank
        self.size: int = self._transport.size
        self._row = np.zeros(at.EXTRA + num_extra, dtype=np.int64)
        self._matrix = np.zeros((self.size, len(self._row)), dtype=np.int64)
        self._calls = self._steps = 0
        self._what = ""
        self._failed: str | None = None
        self._started: RankFacts | None = None
        self._fault: BindError | None = None
        self.plan: RankPlan | None = None
        self._compare_layouts(exchange)
        if exchange == "memory":
            self._share_memory()
        declaration = {**planner.declaration(), "check_every": str(check_every)}
        self._identity = _identity_of(declaration)
        self.compare(declaration)

    @property
    def matrix(self) -> np.ndarray:
        """The gathered rows of the last step: int64[ranks, fields], the engine's own from ``facts.EXTRA`` on."""
        return self._matrix

    def facts(self) -> list[RankFacts]:
        """Read what every rank stated in the last step."""
        return [RankFacts.decoded(row) for row in self._matrix]

    def agree(self, facts: RankFacts) -> RankPlan:
        """Exchange facts and derive the step's plan. Sync: the host waits for all ranks.

        Raises:
            RankDisagreementError: a rank did not come in time, is in another call, or differs in a digest.
            BindError: facts with another number of extra fields; the others were told that it is refused.
        """
        self.begin(facts)
        return self.finish()

    def begin(self, facts: RankFacts) -> None:
        """Send this rank's facts, and go on with other work until ``finish``. Sync: none.

        Raises:
            GraphGlueError: the last exchange was not finished.
        """
        if self._started is not None:
            raise GraphGlueError("begin() twice: call finish() first, one exchange is under way at a time")
        try:
            if not isinstance(facts, RankFacts):
                raise BindError(f"facts are a {type(facts).__name__}; expected graphglue.ranks.RankFacts")
            row = facts.encoded(self.num_extra)
        except BindError as error:  # the others must not wait for a rank that can not speak
            self._fault = error
            facts = RankFacts.refusal(getattr(facts, "mode", Mode.DECODE), (0,) * self.num_extra)
            row = facts.encoded(self.num_extra)
        self._row[:] = row
        self._steps += 1
        checks = self._check_every and self.plan is not None and self._steps % self._check_every == 0
        self._row[at.CHECK] = (
            (self.plan.digest << 1) & (2**63 - 1) if checks and self.plan is not None else self._identity
        )
        self._started = facts
        self._send(f"step {self._steps} with {facts.requests} requests of {facts.tokens} tokens")

    def finish(self) -> RankPlan:
        """Wait for the facts of all ranks, and derive the plan. Sync: the host waits.

        Raises:
            RankDisagreementError: as ``agree``.
            BindError: as ``agree``.
        """
        if self._started is None:
            raise GraphGlueError("finish() without begin(): no exchange is under way")
        self._started, fault, self._fault = None, self._fault, None
        rows = self._receive()
        np.copyto(self._matrix, rows)
        plan = self.planner.plan_encoded(rows)
        if (rows[:, at.CHECK] != self._row[at.CHECK]).any():
            self._explain_check(rows[:, at.CHECK].tolist())
        self.plan = plan
        if fault is not None:
            raise fault
        return plan

    def every(self, flag: bool) -> bool:
        """Tell whether a flag holds on every rank. Sync: the host waits.

        Raises:
            RankDisagreementError: a rank did not come in time, or is in another call.
        """
        return bool(self._gather(at.CAPTURE, int(flag), f"a vote of {bool(flag)} in a capture")[:, at.VOTE].min())

    def union(self, bits: int) -> int:
        """Give the bits that any rank sets, of the sizes of a ladder. Sync: the host waits.

        Raises:
            RankDisagreementError: as ``every``.
        """
        return at.missing_bits(self._gather(at.CAPTURE, 1, "a vote of sizes to capture", bits)[:, at.MISSING])

    def compare(self, declaration: Mapping[str, str]) -> None:
        """Compare what must be equal on all ranks, name by name. Sync: the host waits. For start-up.

        Raises:
            RankDisagreementError: names the rank that differs from most others, and both values.
        """
        text = json.dumps(dict(declaration)).encode()
        lengths = self._gather(at.COMPARE, len(text), f"a comparison of {sorted(declaration)}")[:, at.VOTE]
        with self._call("a comparison of declarations"):
            texts = self._transport.exchange(text, int(lengths.max()), self.timeout_s)
        declared = [json.loads(one) for one in texts]
        for name in dict.fromkeys(name for one in declared for name in one):
            _check_equal(name, [one.get(name, "nothing") for one in declared])

    def _gather(self, kind: int, number: int, what: str, bits: int = 0) -> np.ndarray:
        if self._started is not None:
            raise GraphGlueError("an exchange is under way; call finish() first")
        self._row[:] = 0
        self._row[at.FORMAT], self._row[at.VOTE] = kind, number
        self._row[at.MISSING] = at.word_of(bits)
        self._send(what)
        rows = self._receive()
        self._check_kind(kind, rows[:, at.FORMAT].tolist())
        return rows

    def _check_kind(self, kind: int, seen: Sequence[int]) -> None:
        for rank, other in enumerate(seen):
            if other != kind:
                raise RankDisagreementError(
                    f"rank {rank} is in {at.name_of(other)}, rank {self.rank} in {at.name_of(kind)}; ranks make the "
                    "same calls in the same order: capture, maintain and replay on all of them"
                )

    def _compare_layouts(self, exchange: str) -> None:
        """Compare how rows are sent before the first one is: a backend may abort on rows of two lengths."""
        row = np.zeros(at.EXTRA, dtype=np.int64)
        row[at.FORMAT], row[at.VOTE], row[at.MISSING] = at.COMPARE, self.num_extra, _EXCHANGES.index(exchange)
        with self._call("a comparison of num_extra"):
            texts = self._transport.exchange(row.tobytes(), row.nbytes, self.timeout_s)
        rows = [np.frombuffer(text.ljust(row.nbytes, b"\0"), dtype=np.int64) for text in texts]
        self._check_kind(at.COMPARE, [int(one[at.FORMAT]) for one in rows])
        _check_equal("num_extra", [str(one[at.VOTE]) for one in rows])
        _check_equal("exchange", [_EXCHANGES[int(one[at.MISSING])] for one in rows])

    def _share_memory(self) -> None:
        assert isinstance(self._transport, TorchTransport)
        with self._call("the set-up of shared memory"):
            self._transport = MemoryTransport(self._transport, at.EXTRA + self.num_extra, self.timeout_s)

    @contextmanager
    def _call(self, what: str) -> Iterator[None]:
        """Make a call of the start-up, and say who did not come to it."""
        self._calls += 1
        try:
            yield
        except ConfigError:  # raised on all ranks alike
            raise
        except Exception as error:
            raise self._left_behind(what, error) from error
        except BaseException:
            self._interrupted(what)
            raise

    def _send(self, what: str) -> None:
        if self._failed is not None:
            self._started = None
            raise RankDisagreementError(
                f"the group is of no use after a failed exchange; build another. {self._failed}"
            )
        self._calls += 1
        self._what = what
        try:
            self._transport.start(self._row, self.timeout_s)
        except Exception as error:
            self._started = None
            raise self._left_behind(what, error) from error
        except BaseException:
            self._interrupted(what)
            raise

    def _receive(self) -> np.ndarray:
        try:
            return self._transport.finish(self.timeout_s)
        except Exception as error:
            raise self._left_behind(self._what, error) from error
        except BaseException:
            self._interrupted(self._what)
            raise

    def _interrupted(self, what: str) -> None:
        """Let this rank make no further call: it could be paired with another of its peers'."""
        self._started = None
        self._failed = f"Rank {self.rank} was interrupted in exchange {self._calls}, {what}; restart the group."

    def _left_behind(self, what: str, error: Exception) -> RankDisagreementError:
        """Say which ranks did not come to a call."""
        away = self._transport.absent(self._calls, min(_PATIENCE_S, self.timeout_s))
        if away:
            who = f"{'rank' if len(away) == 1 else 'ranks'} {', '.join(map(str, away))} did not come to it"
        elif away is None:
            who = "some rank is gone, and with it the store that would say which (rank 0 holds it as a rule)"
        else:
            who = "all ranks came, some of them too late"
        cause = next(iter(str(error).splitlines()), type(error).__name__)
        self._failed = (
            f"Rank {self.rank} waited up to {self.timeout_s:g} s in exchange {self._calls}, {what}: {who}. A rank "
            f"left, hangs, or is in another call; restart the group. The backend says: {cause}"
        )
        return RankDisagreementError(self._failed)

    def _explain_check(self, checks: Sequence[int]) -> None:
        """Say why what the ranks hold against each other differs: their groups (odd), or their last plans (even)."""
        others = [rank for rank, seen in enumerate(checks) if seen & 1 and seen != self._identity]
        if self._row[at.CHECK] == self._identity:
            others = [rank for rank, seen in enumerate(checks) if seen != self._identity]
        if others:
            raise RankDisagreementError(
                f"rank {others[0]} agreed in another RankGroup than rank {self.rank}, with another planner, over the "
                "same process group; give each its own (new_group), or share one RankGroup with an extend_ladder"
            )
        try:
            check_digests(checks, "the plan of the last step")
        except RankDisagreementError:
            assert self.plan is not None
            plan = {name: str(value) for name, value in self.plan._asdict().items() if name != "digest"}
            self.compare(plan)  # all ranks see the difference, so all of them are here; it says which field
            raise


def _identity_of(declaration: Mapping[str, str]) -> int:
    """Hash what a group was built with: an odd number, the same in every process."""
    text = json.dumps(dict(declaration)).encode()
    return int.from_bytes(hashlib.blake2b(text, digest_size=7).digest(), "little") | 1


def _check_equal(name: str, values: list[str]) -> None:
    if len(set(values)) == 1:
        return
    usual = max(values, key=values.count)
    rank = next(rank for rank, value in enumerate(values) if value != usual)
    raise RankDisagreementError(
        f"rank {rank} was built with {name} {values[rank]}, most ranks (rank {values.index(usual)}) with {usual}; "
        "a group needs one configuration on all ranks"
    )
