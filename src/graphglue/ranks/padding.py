"""Padding rules: whether the ranks' rows meet as MAX_LEN or as SUM_LEN.

The model behind the cost rule: an all-gather moves ranks x largest rows, an all-reduce about twice the
sum of the rows. Examples for four ranks: [8, 7, 6, 0] is MAX_LEN (32 against 42), [8, 3, 3, 1] SUM_LEN
(32 against 30).
"""

from __future__ import annotations

import dataclasses
import functools
import inspect
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from graphglue.core.batch import Mode
from graphglue.errors import ConfigError
from graphglue.ranks.plan import Padding

Counts = tuple[int, ...]
Rule = Callable[[Counts, Mode], Padding]


@dataclass(frozen=True)
class CostRule:
    """Pick a padding from the aligned token counts of all ranks.

    Args:
        row_bytes: bytes of one token's row in the shared buffer.
        all_reduce_limit_bytes: what the fast all-reduce holds; decode takes it where the sum fits.
        all_to_all: experts exchange tokens by all-to-all, so nothing is gained by a short all-reduce.
        speculative: tokens of one request travel together; the same.
        max_len_only: an all-to-all that knows equal counts only.
        hybrid_state: a recurrent state needs a row on every rank that prefills.

    Source: the leading engine's padding mode, with its all-reduce override for decode.
    """

    row_bytes: int = 0
    all_reduce_limit_bytes: int = 16 * 2**20
    all_to_all: bool = False
    speculative: bool = False
    max_len_only: bool = False
    hybrid_state: bool = False

    def __call__(self, counts: Counts, mode: Mode) -> Padding:
        """Give the padding; ties go to MAX_LEN, whose equal parts symmetric memory likes."""
        return self.of_sums(len(counts), min(counts), max(counts), sum(counts), mode.counts_tokens)

    def of_sums(self, num_ranks: int, least: int, most: int, total: int, extends: bool) -> Padding:
        """Give the padding from what it depends on.

        Args:
            num_ranks: ranks of the group.
            least: the smallest aligned token count.
            most: the largest one.
            total: their sum.
            extends: whether the step prefills.
        """
        if self.max_len_only or num_ranks == 1:
            return Padding.MAX_LEN
        if extends:
            return Padding.MAX_LEN if self.hybrid_state and least == 0 else Padding.SUM_LEN
        fits = total * self.row_bytes <= self.all_reduce_limit_bytes
        if least > 0 and fits and not self.all_to_all and not self.speculative:
            return Padding.SUM_LEN
        return Padding.MAX_LEN if 2 * total >= most * num_ranks else Padding.SUM_LEN


def name_of(rule: Any) -> str:
    """Name a rule as precisely as all ranks can: its numbers where it has any, never an address."""
    if isinstance(rule, functools.partial):
        return f"{name_of(rule.func)} with {rule.args} {rule.keywords}"
    if dataclasses.is_dataclass(rule):
        return repr(rule)
    return f"{getattr(rule, '__module__', '')}.{getattr(rule, '__qualname__', type(rule).__qualname__)}"


def checked_rule(rule: Any) -> Rule:
    """Take an engine's own rule: a callable of the counts, or of the counts and the mode.

    Raises:
        ConfigError: no such callable.
    """
    if isinstance(rule, CostRule):
        return rule
    try:
        kinds = [p.kind for p in inspect.signature(rule).parameters.values() if p.default is inspect.Parameter.empty]
    except (TypeError, ValueError):
        raise ConfigError(f"rule={rule!r}: expected a callable of the counts (and the mode) of a step") from None
    takes_mode = len(kinds) > 1 or inspect.Parameter.VAR_POSITIONAL in kinds

    def checked(counts: Counts, mode: Mode) -> Padding:
        return Padding(rule(counts, mode) if takes_mode else rule(counts))

    return checked
