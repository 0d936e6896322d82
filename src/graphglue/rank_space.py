"""What a runner and its rank group must have in common: the group's calls, and the keys."""

from __future__ import annotations

from typing import Any, Protocol

from graphglue.core.keys import KeySpace
from graphglue.errors import ConfigError
from graphglue.ranks.facts import RankFacts
from graphglue.ranks.plan import RankPlan
from graphglue.ranks.planner import Planner


class Ranks(Protocol):
    """What a runner needs of a rank group; ``RankGroup`` is one."""

    rank: int
    size: int
    planner: Planner

    def agree(self, facts: RankFacts) -> RankPlan:
        """Exchange facts and derive the plan."""

    def every(self, flag: bool) -> bool:
        """Tell whether a flag holds on every rank."""

    def union(self, bits: int) -> int:
        """Give the bits that any rank sets."""

    def compare(self, declaration: Any) -> None:
        """Compare what must be equal on all ranks."""


def checked_ranks(ranks: Any) -> Ranks | None:
    """Check what was given as ``ranks``.

    Raises:
        ConfigError: no rank group.
    """
    needed = ("rank", "size", "planner", "agree", "every", "union", "compare")
    if ranks is not None and (missing := [name for name in needed if not hasattr(ranks, name)]):
        raise ConfigError(f"ranks is a {type(ranks).__name__} without {missing}; expected a graphglue.ranks.RankGroup")
    return ranks


def agreed_space(space: KeySpace, ranks: Ranks | None, max_requests: int | None) -> KeySpace:
    """Round a runner's ladder as the planner rounds its own, and let each key carry the padding it is captured with.

    Raises:
        ConfigError: the planner plans for another ladder, width or number of request rows.
    """
    if ranks is None:
        return space
    planner = ranks.planner
    if not space.counts_tokens and planner.width != space.width:
        raise ConfigError(
            f"tokens_per_request={space.width}, but the ranks plan for width={planner.width}; give both one value"
        )
    expected = planner.extend_ladder if space.counts_tokens else planner.ladder
    rounded = planner.rounded(space.ladder, tokens=space.counts_tokens)
    if rounded != expected:
        raise ConfigError(
            f"ladder {list(space.ladder)} rounds to {list(rounded)} at alignment {planner.alignment}, but the ranks "
            f"plan for {list(expected)}; give Runner and Planner one ladder"
        )
    if space.counts_tokens and planner.max_requests not in (None, max_requests):
        raise ConfigError(
            f"RunnerConfig(max_requests={max_requests}), but Planner(max_requests={planner.max_requests}); give one"
        )
    agreed = KeySpace(rounded, space.width, space.modes, space.variants, space.ragged, max_requests)
    agreed.padding_of = lambda mode, bucket: planner.captured_padding(bucket, mode, ranks.size)
    return agreed
