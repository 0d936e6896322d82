"""The router: one table that sends every replay somewhere, and says why.

The rows are those of design.md section 6. The first that holds wins; the last always holds.
"""

from __future__ import annotations

import enum
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import NamedTuple

from graphglue.core.batch import Mode
from graphglue.core.buckets import Bucket
from graphglue.core.contract import GENERIC, PrepContract
from graphglue.core.keys import Key


class Route(str, enum.Enum):
    """Where a prep or a forward goes."""

    GLUE = "glue"
    GRAPH = "graph"
    EAGER = "eager"
    SKIP = "skip"


class Reason(str, enum.Enum):
    """Why it goes there."""

    DISABLED = "disabled"
    RANK_VETO = "rank_veto"
    OVER_LADDER = "over_ladder"
    PADDING_DISABLED = "padding_disabled"
    WASTE = "waste"
    IDLE_SKIPPED = "idle_skipped"
    IDLE_EAGER = "idle_eager"
    NOT_HOST_FREE = "not_host_free"
    NO_CONTRACT = "no_contract"
    SWITCHED_OFF = "switched_off"
    MODE_NOT_DECLARED = "mode_not_declared"
    FEATURE_NOT_AUDITED = "feature_not_audited"
    RAGGED_NOT_DECLARED = "ragged_not_declared"
    PADDING_NOT_DECLARED = "padding_not_declared"
    NOT_CERTIFIED = "not_certified"
    QUARANTINED = "quarantined"
    NOT_CAPTURED = "not_captured"
    STAGED = "staged"
    IDLE = "idle"
    RAGGED = "ragged"
    PADDED = "padded"
    UNPADDED = "unpadded"
    # Only as Decision.forward_reason:
    NO_FORWARD_GRAPH = "no_forward_graph"
    FORWARD_QUARANTINED = "forward_quarantined"
    RAGGED_KEY = "ragged_key"
    AGREED_EAGER = "agreed_eager"
    METADATA_CHANGED = "metadata_changed"


class State(str, enum.Enum):
    """Where one key of a cache stands.

    ```text
    COLD --warm--> WARM --record--> CAPTURED
                    |                  |
                    +--fails--+        +--diverges--+
                              v                     v
                          QUARANTINED <-------------+
    QUARANTINED --maintain--> CAPTURED        any --reset--> COLD
    ```
    """

    COLD = "cold"
    WARM = "warm"
    CAPTURED = "captured"
    QUARANTINED = "quarantined"


@dataclass(frozen=True, slots=True)
class StepFacts:
    """What the router knows of one step, the same for every prep.

    ``waste_limit`` is the largest allowed bucket tokens / real tokens; 0 for no limit. ``agreed`` is what the
    ranks agreed to fill the slots to in an eager step, and ``scratch`` asks for tensors of its own then.
    """

    raw: Bucket
    bucket: Bucket | None  # None: nothing covers the raw extents
    mode: Mode
    features: frozenset[str] = frozenset()
    ragged: bool = False
    enabled: bool = True
    vetoed: bool = False
    padding: bool = True
    waste_limit: float = 0.0
    staged: bool = False
    agreed: Bucket | None = None
    scratch: bool = False

    @property
    def idle(self) -> bool:
        """Whether no request is real."""
        return self.raw.requests == 0

    @property
    def padded(self) -> bool:
        """Whether some rows of the bucket are not real; an IDLE step counts as padded."""
        extents = self.agreed or self.bucket
        return extents is None or self.raw[:2] != extents[:2]

    @property
    def wasteful(self) -> bool:
        """Whether the bucket is larger than the waste limit allows."""
        return bool(self.bucket and self.waste_limit and self.bucket.tokens > self.waste_limit * self.raw.tokens)

    @property
    def exact(self) -> bool:
        """Whether the step runs at its own extents: nothing covers them, or padding them is not wanted."""
        unwanted = not self.idle and (self.wasteful or (self.padded and not self.padding))
        return self.bucket is None or unwanted or self.agreed is not None

    @property
    def beyond(self) -> bool:
        """Whether it is filled into tensors of its own: the slots can not hold it, or have to stay as they are."""
        return self.scratch if self.agreed is not None else self.bucket is None


@dataclass(frozen=True, slots=True)
class PrepFacts:
    """What the router knows of one prep at this step's key."""

    contract: PrepContract | None
    state: State = State.COLD
    glue: str = "on"  # RunnerConfig.glue: on, unpadded, off
    generic_glue: bool = False
    certified: bool | None = None  # None: no certificate is required

    @property
    def declared(self) -> PrepContract:
        """The contract, or what a prep without one counts as."""
        return self.contract or GENERIC

    @property
    def padded(self) -> bool:
        """Whether the prep may be glued on padded replays."""
        return self.declared.padded and self.glue != "unpadded"


class Row(NamedTuple):
    """One row of the table. ``admits`` is False where the forward runs eagerly as well."""

    number: int
    holds: Callable[[StepFacts, PrepFacts], bool]
    prep: Route
    reason: Reason
    admits: bool = True


ADMISSION = (
    Row(1, lambda s, p: not s.enabled, Route.EAGER, Reason.DISABLED, False),
    Row(2, lambda s, p: s.vetoed, Route.EAGER, Reason.RANK_VETO, False),
    Row(3, lambda s, p: s.bucket is None, Route.EAGER, Reason.OVER_LADDER, False),
    Row(4, lambda s, p: not s.idle and not s.padding and s.padded, Route.EAGER, Reason.PADDING_DISABLED, False),
    Row(4, lambda s, p: not s.idle and s.wasteful, Route.EAGER, Reason.WASTE, False),
)
TABLE = (
    *ADMISSION,
    Row(5, lambda s, p: s.idle and p.declared.idle == "skip", Route.SKIP, Reason.IDLE_SKIPPED),
    Row(6, lambda s, p: s.idle and p.declared.idle == "eager", Route.EAGER, Reason.IDLE_EAGER),
    Row(7, lambda s, p: not p.declared.host_free, Route.EAGER, Reason.NOT_HOST_FREE),
    Row(7, lambda s, p: p.contract is None and not p.generic_glue, Route.EAGER, Reason.NO_CONTRACT),
    Row(7, lambda s, p: p.glue == "off", Route.EAGER, Reason.SWITCHED_OFF),
    Row(8, lambda s, p: s.mode not in p.declared.modes, Route.EAGER, Reason.MODE_NOT_DECLARED),
    Row(9, lambda s, p: not s.features <= p.declared.features, Route.EAGER, Reason.FEATURE_NOT_AUDITED),
    Row(10, lambda s, p: s.ragged and not p.declared.ragged, Route.EAGER, Reason.RAGGED_NOT_DECLARED),
    Row(11, lambda s, p: s.padded and not p.padded, Route.EAGER, Reason.PADDING_NOT_DECLARED),
    Row(12, lambda s, p: p.certified is False, Route.EAGER, Reason.NOT_CERTIFIED),
    Row(13, lambda s, p: p.state is State.QUARANTINED, Route.EAGER, Reason.QUARANTINED),
    Row(14, lambda s, p: p.state is not State.CAPTURED, Route.EAGER, Reason.NOT_CAPTURED),
    Row(15, lambda s, p: s.staged, Route.GLUE, Reason.STAGED),
    Row(15, lambda s, p: s.idle, Route.GLUE, Reason.IDLE),
    Row(15, lambda s, p: s.ragged, Route.GLUE, Reason.RAGGED),
    Row(15, lambda s, p: s.padded, Route.GLUE, Reason.PADDED),
    Row(15, lambda s, p: True, Route.GLUE, Reason.UNPADDED),
)

# The weakest of several preps names the decision.
STRENGTH = {Route.EAGER: 0, Route.SKIP: 1, Route.GLUE: 2}


class PrepDecision(NamedTuple):
    """Where one prep goes, and why."""

    route: Route
    reason: Reason


@dataclass(frozen=True, slots=True)
class Decision:
    """Where one replay goes. Truthy when its forward replays as a graph.

    Attributes:
        prep: where the prep goes: GLUE, EAGER or SKIP; of several preps the weakest.
        forward: where the forward goes: GRAPH or EAGER.
        bucket: the extents the step runs at; the raw ones where it runs at exactly those (rows 3 and 4).
        key: the key whose graphs are replayed, or would be.
        reason: why the prep goes there.
        forward_reason: why the forward does not replay as a graph; None when it does.
        preps: each prep's own route and reason, by name.
    """

    prep: Route
    forward: Route
    bucket: Bucket
    key: Key
    reason: Reason
    forward_reason: Reason | None
    preps: Mapping[str, PrepDecision]

    def __bool__(self) -> bool:
        return self.forward is Route.GRAPH


def route_prep(step: StepFacts, prep: PrepFacts) -> Row:
    """Find the row of the table that decides one prep. Pure and total."""
    return next(row for row in TABLE if row.holds(step, prep))


def route(step: StepFacts, preps: Mapping[str, PrepFacts], key: Key, forward: State | None) -> Decision:
    """Decide one replay. Pure and total.

    Args:
        step: the step's facts.
        preps: the facts of each prep, by name; at least one.
        key: the key of this step: at the bucket, or at the raw extents where nothing covers them.
        forward: the state of the forward graph at this key; None where the runner has no forward.
    """
    rows = {name: route_prep(step, facts) for name, facts in preps.items()}
    # Of equally weak ones the earlier row, whatever the order of the preps: a later one may be what follows from it.
    weakest = min(rows.values(), key=lambda row: (STRENGTH[row.prep], row.number))
    reason = _forward_reason(step, weakest, forward)
    return Decision(
        prep=weakest.prep,
        forward=Route.EAGER if reason else Route.GRAPH,
        bucket=key.bucket,
        key=key,
        reason=weakest.reason,
        forward_reason=reason,
        preps={name: PrepDecision(row.prep, row.reason) for name, row in rows.items()},
    )


def _forward_reason(step: StepFacts, row: Row, forward: State | None) -> Reason | None:
    """Say why the forward can not replay as a graph; None if it can."""
    if not row.admits:
        return row.reason
    if step.agreed is not None:
        return Reason.AGREED_EAGER
    if forward is State.CAPTURED:
        return None
    if forward is State.QUARANTINED:
        return Reason.FORWARD_QUARANTINED
    return Reason.RAGGED_KEY if step.ragged and forward is not None else Reason.NO_FORWARD_GRAPH
