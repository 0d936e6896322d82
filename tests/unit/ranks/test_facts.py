"""Facts: what a row holds, what follows from it, and what is refused."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import graphglue as gg
from graphglue.ranks import RankFacts
from graphglue.ranks import facts as at
from graphglue.ranks.facts import missing_bit, missing_bits, stacked

DECODE, EXTEND, VERIFY = gg.Mode.DECODE, gg.Mode.EXTEND, gg.Mode.VERIFY


def test_the_layout_is_what_version_1_says() -> None:
    """Other languages read it too: a change is a new version."""
    facts = RankFacts(3, 6, VERIFY, digest=99, extra=(-5, 7), prefix=40, missing=0b101, missing_extend=6)
    layout = (at.FORMAT, at.REQUESTS, at.TOKENS, at.MODE, at.ROW_TOKENS, at.VOTE, at.PREFILL_VOTE, at.REFUSED)
    assert (*layout, at.CONVERTIBLE, at.PREFIX, at.DIGEST, at.CHECK, at.MISSING, at.MISSING_EXTEND, at.EXTRA) == (
        *range(15),
    )
    row = facts.encoded(2)
    assert row.dtype == np.int64
    assert row.tolist() == [256, 3, 6, 1, 2, 1, 0, 0, 0, 40, 99, 0, 0b101, 6, -5, 7]
    assert [mode.value for mode in at.MODES] == ["decode", "verify", "draft", "draft_extend", "extend", "mixed"]


def test_a_row_is_made_once_and_can_not_be_changed() -> None:
    facts = RankFacts(1, 1, DECODE)
    assert facts.encoded() is facts.encoded()
    with pytest.raises(ValueError, match="read-only"):
        facts.encoded()[0] = 1


@pytest.mark.parametrize(
    ("facts", "prefill_vote", "convertible"),
    [
        (RankFacts(3, 3, DECODE), True, True),
        (RankFacts(3, 3, DECODE, convertible=False), False, False),
        (RankFacts(3, 6, DECODE), False, False),  # two tokens each are no one-token extend
        (RankFacts(3, 3, VERIFY), False, False),
        (RankFacts(3, 3, VERIFY, convertible=True), False, False),
        (RankFacts(3, 30, EXTEND), True, False),
        (RankFacts(3, 30, EXTEND, vote=False), False, False),
        (RankFacts(3, 3, DECODE, prefill_vote=False), False, True),
        (RankFacts(3, 3, DECODE, vote=False, prefill_vote=True), True, True),
        (RankFacts(0, 0, DECODE), True, False),
        (RankFacts(0, 0, EXTEND, vote=False), False, False),
        (RankFacts.refusal(DECODE), False, False),
    ],
)
def test_the_prefill_vote_follows_from_the_step(facts: RankFacts, prefill_vote: bool, convertible: bool) -> None:
    assert (facts.prefill_vote, facts.convertible) == (prefill_vote, convertible)


@pytest.mark.parametrize(
    ("given", "requests", "tokens", "width"),
    [
        (None, 3, 6, 2),
        (None, 3, 7, 0),
        (2, 3, 6, 2),
        (0, 3, 6, 0),
        ([2, 2, 2], 3, 6, 2),
        ([1, 2, 3], 3, 6, 0),
        (None, 0, 0, 0),
    ],
)
def test_the_shared_width(given: Any, requests: int, tokens: int, width: int) -> None:
    assert RankFacts(requests, tokens, DECODE, row_tokens=given).row_tokens == width


def test_a_refusal_votes_against_everything() -> None:
    facts = RankFacts(3, 3, DECODE, vote=True, prefill_vote=True, refused=True)
    assert (facts.vote, facts.prefill_vote) == (False, False)


@pytest.mark.parametrize(
    ("make", "text"),
    [
        (lambda: RankFacts(0, 3, DECODE), "0 requests and 3 tokens"),
        (lambda: RankFacts(3, 2, DECODE), "at least one"),
        (lambda: RankFacts(-1, -1, DECODE), "-1 requests"),
        (lambda: RankFacts(1, 2**31, DECODE), "at most"),
        (lambda: RankFacts(1.5, 2, DECODE), "not integers"),  # type: ignore[arg-type]
        (lambda: RankFacts(1, 1, "sleep"), "known mode"),  # type: ignore[arg-type]
        (lambda: RankFacts(1, 1, DECODE, digest=2**63), "int64"),
        (lambda: RankFacts(1, 1, DECODE, extra=(2**63,)), "int64"),
        (lambda: RankFacts(1, 1, DECODE, missing=-1), "int64"),
        (lambda: RankFacts(2, 6, DECODE, row_tokens=2), "row_tokens=2"),
        (lambda: RankFacts(2, 6, DECODE, row_tokens=[3, 4]), "one positive count for each"),
        (lambda: RankFacts(2, 6, DECODE, row_tokens=[6, 0]), "one positive count for each"),
        (lambda: RankFacts(2, 6, DECODE, row_tokens="33"), "expected a number, or one for each"),  # type: ignore[arg-type]
        (lambda: RankFacts(1, 1, DECODE, extra=(1,)).encoded(), "1 extra fields"),
    ],
)
def test_what_is_refused(make: Any, text: str) -> None:
    with pytest.raises(gg.BindError, match=text):
        make()


def test_numpy_integers_are_integers() -> None:
    facts = RankFacts(np.int32(2), np.int64(4), DECODE, row_tokens=np.int64(2), extra=(np.int64(3),))  # type: ignore[arg-type]
    assert RankFacts.decoded(facts.encoded(1)) == RankFacts(2, 4, DECODE, extra=(3,))


@pytest.mark.parametrize("position", [0, 61, 62, 63, 200])
@pytest.mark.parametrize(("name", "column"), [("missing", at.MISSING), ("missing_extend", at.MISSING_EXTEND)])
def test_missing_sizes_survive_the_wire(position: int, name: str, column: int) -> None:
    """Beyond the row's room the last bit stands for all: more is taken for missing, and never less."""
    facts = RankFacts(1, 1, DECODE, **{name: 1 << position})  # type: ignore[arg-type]
    seen = missing_bits(stacked([RankFacts(0, 0, DECODE), facts])[:, column])
    assert seen & missing_bit(position)
    if position < 63:
        assert seen == 1 << position


def test_one_step_is_stated_for_two_runners() -> None:
    """The engine does not know yet whether a peer prefills."""
    decode = RankFacts(3, 3, DECODE, vote=False, missing=1, convertible=False)
    prefill = RankFacts(3, 3, DECODE, vote=False, prefill_vote=True, missing_extend=2)
    both = decode.beside(prefill)
    assert (both.vote, both.prefill_vote, both.convertible, both.missing, both.missing_extend) == (
        False,
        True,
        True,
        1,
        2,
    )
    refused = decode.beside(RankFacts.refusal(DECODE))  # its sources do not fit the prefill runner's slots
    assert (refused.refused, refused.prefill_vote, refused.convertible) == (False, False, False)


def test_rows_of_other_lengths_do_not_stack() -> None:
    with pytest.raises(gg.RankDisagreementError, match="rank 1 carries 1 extra fields, rank 0 0"):
        stacked([RankFacts(1, 1, DECODE), RankFacts(1, 1, DECODE, extra=(3,))])


@pytest.mark.parametrize(
    ("kind", "text"),
    [
        (at.CAPTURE, "a capture"),
        (at.COMPARE, "a comparison"),
        (2 << 8, "layout 2"),
        (0, "layout 0"),
        ((1 << 8) | 9, "layout 1"),
    ],
)
def test_a_row_of_something_else_is_told_apart(kind: int, text: str) -> None:
    row = RankFacts(1, 1, DECODE).encoded().copy()
    row[at.FORMAT] = kind
    with pytest.raises(gg.RankDisagreementError, match=text):
        RankFacts.decoded(row)
