"""Data-parallel groups: the facts that all ranks of a group state of one step."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from hypothesis import strategies as st

from graphglue.core.batch import Mode
from graphglue.ranks import RankFacts


@st.composite
def dp_groups(
    draw: st.DrawFn,
    ladder: Iterable[int],
    *,
    width: int = 1,
    min_ranks: int = 1,
    max_ranks: int = 8,
    modes: Sequence[Mode] = (Mode.DECODE,),
    num_extra: int = 0,
    vetoes: bool = True,
    idle: bool = True,
    over: bool = True,
) -> list[RankFacts]:
    """Draw what each rank of a group tells the others, in rank order, for ``Planner.plan``.

    All busy ranks run one drawn mode; an idle rank names any. Counts come from both ends of the ladder's
    sizes, where ranks most easily part.

    Args:
        ladder: sizes in requests, in tokens for modes that count tokens.
        width: tokens per request of the modes that count requests.
        min_ranks: the fewest ranks.
        max_ranks: the most ranks.
        modes: the modes to choose from.
        num_extra: integers that the engine adds on every rank.
        vetoes: whether a rank may veto the graph, or have had its batch refused.
        idle: whether a rank may have nothing to do.
        over: whether a rank may exceed the ladder.
    """
    sizes = sorted(set(ladder))
    mode = draw(st.sampled_from(modes))
    found = []
    for _ in range(draw(st.integers(min_ranks, max_ranks))):
        extra = tuple(draw(st.lists(st.integers(0, 99), min_size=num_extra, max_size=num_extra)))
        kind = draw(st.sampled_from(["busy"] * 5 + ["idle"] * idle + ["veto", "refused"] * vetoes))
        if kind == "refused":
            found.append(RankFacts.refusal(mode, extra))
        elif kind == "idle":
            found.append(RankFacts(0, 0, draw(st.sampled_from(modes)), extra=extra))
        else:
            requests, tokens = draw(_counts(sizes, mode, width, over))
            found.append(RankFacts(requests, tokens, mode, vote=kind != "veto", extra=extra))
    return found


@st.composite
def _counts(draw: st.DrawFn, sizes: Sequence[int], mode: Mode, width: int, over: bool) -> tuple[int, int]:
    near = {size + step for size in sizes for step in (-1, 0, 1)} | {1}
    most = sizes[-1] + 1 if over else sizes[-1]
    size = draw(st.sampled_from(sorted(count for count in near if 1 <= count <= most)) | st.integers(1, most))
    return (draw(st.integers(1, size)), size) if mode.counts_tokens else (size, size * width)
