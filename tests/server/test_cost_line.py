"""Seconds over tokens, learnt, and what is made of them when they are old."""

import pytest

from bidikv_server.cost_line import HALF_LIFE_S, CostLine


def line(observations=8, **fields):
    """One second, and a millisecond a token."""
    learnt = CostLine(**fields)
    for number in range(observations):
        learnt.observe(100 * (1 + number % 4), 1.0 + 0.1 * (1 + number % 4), 0.0)
    return learnt


def test_a_guess_is_what_is_known_while_it_is():
    """And nothing before enough was seen once."""
    assert line().guess(500, 0.0) == line().predict(500, 0.0) == pytest.approx(1.5)
    assert line(3).guess(500, 0.0) is None


@pytest.mark.parametrize("half_life_s", [HALF_LIFE_S, 10.0])
def test_a_guess_shrinks_with_age(half_life_s):
    """What is twice as slow is tried again after one more half-life, and in the end nothing is left."""
    learnt = line(half_life_s=half_life_s)
    assert learnt.guess(500, half_life_s) == pytest.approx(1.5)
    assert learnt.predict(500, 2 * half_life_s) is None
    assert learnt.guess(500, 2 * half_life_s) == pytest.approx(0.75)
    assert learnt.guess(500, 3 * half_life_s) == pytest.approx(0.375)
    assert learnt.guess(500, 6 * half_life_s) is None


def test_a_line_without_tokens():
    """What took time without any tokens takes that for few tokens, too."""
    learnt = CostLine()
    for _ in range(8):
        learnt.observe(0, 0.2, 0.0)
    assert learnt.predict(60, 0.0) == pytest.approx(0.2)
