"""The space of legal keys: what is captured, in which order, and which bucket covers a step."""

from __future__ import annotations

import pytest

from graphglue import Bucket, ConfigError, Key, Ladder, Mode
from graphglue.core.keys import KeySpace
from graphglue.ranks import Padding


def space(*sizes: int, **more: object) -> KeySpace:
    return KeySpace(Ladder(sizes), **more)  # type: ignore[arg-type]


@pytest.mark.parametrize("width", [1, 3])
def test_meta_shape_requests_and_tokens_are_padded_together(width: int) -> None:
    keys = space(2, 4, width=width)
    assert keys.cover(Bucket(1, width, width)) == Bucket(2, 2 * width, width)
    assert keys.cover(Bucket(3, 3 * width, width)) == Bucket(4, 4 * width, width)
    assert keys.cover(Bucket(4, 4 * width, width)) == Bucket(4, 4 * width, width)
    assert keys.cover(Bucket(5, 5 * width, width)) is None
    assert keys.cover(Bucket(0, 0, 0)) == Bucket(2, 2 * width, width)  # the dummy step of a rank without requests
    captured = keys.keys()
    assert {key.bucket for key in captured} == {Bucket(2, 2 * width, width), Bucket(4, 4 * width, width)}


def test_an_idle_step_takes_the_smallest_bucket() -> None:
    assert space(4, 2, width=3).cover(Bucket(0, 0, 0)) == Bucket(2, 6, 3)


@pytest.mark.parametrize(
    ("requests", "tokens", "bucket"),
    [
        (3, 10, Bucket(4, 16, 0)),  # 3 requests, 10 tokens of 4 a request: size 3 of the tokens, 4 of the ladder
        (1, 9, Bucket(4, 16, 0)),  # ceil(9 / 4) = 3 sizes for the tokens
        (2, 3, Bucket(2, 8, 0)),
        (5, 6, Bucket(8, 32, 0)),  # the requests decide
        (2, 32, Bucket(8, 32, 0)),
        (2, 33, None),
        (9, 18, None),
    ],
)
def test_ragged_steps_take_the_smallest_size_for_both_counts(requests: int, tokens: int, bucket: Bucket | None) -> None:
    assert space(1, 2, 4, 8, width=4).cover(Bucket(requests, tokens, 0)) == bucket


def test_ragged_and_uniform_steps_of_one_token_count_have_different_buckets() -> None:
    keys = space(4, 16, width=4)
    uniform, ragged, thin = (keys.cover(Bucket(r, 12, w)) for r, w in ((3, 4), (3, 0), (12, 1)))
    assert (uniform, ragged, thin) == (Bucket(4, 16, 4), Bucket(4, 16, 0), Bucket(16, 16, 1))


def test_a_uniform_step_of_another_width_keeps_its_width() -> None:
    keys = space(2, 4, width=4)
    assert keys.cover(Bucket(3, 6, 2)) == Bucket(4, 8, 2)
    assert keys.cover(Bucket(2, 16, 8)) == Bucket(2, 16, 8)  # as many tokens as the slots have
    assert keys.cover(Bucket(4, 32, 8)) is None  # more


def test_route_key_width_belongs_to_the_runner() -> None:
    target, draft = space(2, 4, width=4), space(2, 4, width=1)
    captured = target.keys()
    assert target.bucket(4) == Bucket(4, 16, 4)
    assert draft.bucket(4) == Bucket(4, 4, 1)
    assert draft.cover(Bucket(4, 16, 4)) is None
    assert target.cover(Bucket(4, 4, 1)) not in {key.bucket for key in captured}


def test_extend_ladders_count_tokens() -> None:
    keys = space(64, 16, modes=[Mode.EXTEND], max_requests=4)
    assert keys.counts_tokens
    assert keys.capacity == Bucket(4, 64, 0)
    assert keys.cover(Bucket(2, 9, 0)) == Bucket(4, 16, 0)
    assert keys.cover(Bucket(4, 17, 0)) == Bucket(4, 64, 0)
    assert keys.cover(Bucket(0, 0, 0)) == Bucket(4, 16, 0)
    assert keys.cover(Bucket(1, 65, 0)) is None
    assert keys.cover(Bucket(5, 9, 0)) is None
    listed = keys.keys()
    assert [key.bucket for key in listed] == [Bucket(4, 64, 0), Bucket(4, 16, 0)]


def test_keys_are_listed_largest_first_with_every_mode_shape_and_variant() -> None:
    keys = space(2, 4, width=3, modes=[Mode.VERIFY, Mode.DRAFT], variants=[None, "lora"], ragged=True).keys()
    assert [key.requests for key in keys] == [4] * 8 + [2] * 8
    assert set(keys) == {
        Key(mode, size, 3 * size, row_tokens, None, variant)
        for size in (2, 4)
        for mode in (Mode.VERIFY, Mode.DRAFT)
        for row_tokens in (3, 0)
        for variant in (None, "lora")
    }
    assert len(set(keys)) == len(keys)


def test_bucket_list_of_some_sizes() -> None:
    assert [key.requests for key in space(1, 2, 4).keys([1, 4])] == [4, 1]


def test_repeated_variants_are_one() -> None:
    assert len(space(2, variants=["a", "a", None]).keys()) == 2


def test_a_key_shows_its_bucket() -> None:
    assert Key(Mode.DECODE, 4, 8, 2).bucket == Bucket(4, 8, 2)


def test_a_key_is_spelt_for_people_in_messages() -> None:
    assert f"{Key(Mode.DECODE, 4, 8, 2)}" == "decode bucket of 4 requests and 8 tokens"
    ragged = Key(Mode.VERIFY, 4, 8, 0, Padding.SUM_LEN, "lora")
    assert str(ragged) == "verify bucket of 4 requests and 8 tokens, ragged, sum_len, variant 'lora'"


def test_the_raw_count_is_in_no_key() -> None:
    assert Key._fields == ("mode", "requests", "tokens", "row_tokens", "padding", "variant")


def test_modes_that_count_differently_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"modes \['decode', 'extend'\].*give EXTEND a Runner of its own"):
        space(4, modes=[Mode.EXTEND, Mode.DECODE], max_requests=2)


def test_extend_without_max_requests_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"counts tokens; set RunnerConfig\(max_requests=...\)"):
        space(4, modes=[Mode.EXTEND])
