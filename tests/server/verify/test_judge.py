"""Same, near tie or mismatch."""

from __future__ import annotations

import pytest

from bidikv.headers import ReuseHeader
from bidikv_server.verify.answers import Answer, Position
from bidikv_server.verify.judge import common_prefix, compare, is_cold, is_near_tie

COLD = Answer("a b c", token_ids=(1, 2, 3), finish_reason="stop")
WARM = Answer("a x y", token_ids=(1, 8, 9), finish_reason="stop")


def run(*alternatives, first=1):
    """A run with log probabilities: a certain token, then these alternatives."""
    certain = Position(f"token_id:{first}", {f"token_id:{first}": 0.0})
    return Answer("", positions=(certain, *(Position(next(iter(a)), a) for a in alternatives)))


TOSS_UP = {"token_id:2": -0.69, "token_id:8": -0.70}
CLEAR = {"token_id:2": -0.1, "token_id:8": -3.0}


def test_equal_answers_do_not_differ():
    """Token ids, text, arguments and end."""
    assert compare(COLD, COLD) is None


@pytest.mark.parametrize(
    ("warm", "clause"),
    [
        (WARM, "generated token 1 is 8, cold it is 2"),
        (Answer("a", token_ids=(1,)), "generated token 1 is the end, cold it is 2"),
        (Answer("a b c!", token_ids=(1, 2, 3), finish_reason="stop"), "other text"),
        (Answer("a b c", token_ids=(1, 2, 3), finish_reason="length"), "other text"),
        (Answer("a b c", token_ids=(), finish_reason="stop"), "other text"),
    ],
)
def test_any_difference_is_found(warm, clause):
    """At its place."""
    difference = compare(warm, COLD)
    assert difference is not None
    assert difference.describe() == clause


@pytest.mark.parametrize(
    ("runs", "near"),
    [
        ([run(TOSS_UP), run(TOSS_UP)], True),
        ([run(TOSS_UP), run(CLEAR)], False),
        ([run(CLEAR), run(TOSS_UP)], False),
        ([run({"token_id:2": -0.1})], False),
        ([run(TOSS_UP, first=7)], False),
        ([run()], False),
        ([], False),
    ],
)
def test_a_near_tie_is_a_toss_up_in_every_run(runs, near):
    """Both tokens almost equally likely, after the same beginning; anything unknown is none."""
    assert is_near_tie(compare(WARM, COLD), WARM, COLD, runs, 0.05) is near


def test_an_answer_that_ends_early_is_no_near_tie():
    """Engines tell the end token too, so nothing at all is missing output."""
    short = Answer("a", token_ids=(1,))
    assert not is_near_tie(compare(short, COLD), short, COLD, [run(TOSS_UP)], 0.05)


@pytest.mark.parametrize(("other", "near"), [(-0.71, True), (-2.0, False)])
def test_texts_are_compared_where_there_are_no_ids(other, near):
    """At the first token that only one of the texts can have begun with."""
    warm, cold = Answer("a x"), Answer("a b")
    run = Answer("", positions=(Position("a", {"a": 0.0}), Position(" b", {" b": -0.7, " x": other})))
    assert is_near_tie(compare(warm, cold), warm, cold, [run, run], 0.05) is near


def test_same_ids_with_another_text_are_never_a_near_tie():
    """The relay lost or changed something."""
    broken = Answer("a b", token_ids=(1, 2, 3), finish_reason="stop")
    assert not is_near_tie(compare(broken, COLD), broken, COLD, [run(TOSS_UP)], 0.05)


def test_a_cold_run_reused_nothing():
    """As far as anybody tells."""
    assert is_cold(COLD)
    assert is_cold(Answer("", reuse=ReuseHeader("readback_off", 10, 0, 0, 10)))
    assert not is_cold(Answer("", reuse=ReuseHeader("hit", 10, 8, 0, 2)))
    assert not is_cold(Answer("", reuse=ReuseHeader("local", 10, 0, 8, 2)))


def test_common_prefix():
    """Its length."""
    assert common_prefix((1, 2, 3), (1, 2, 4)) == 2
    assert common_prefix((1,), (1, 2)) == 1
    assert common_prefix((), (1,)) == 0
