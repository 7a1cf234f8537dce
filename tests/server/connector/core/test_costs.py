"""Costs are learnt from what happened, fade, and decide only when enough is known."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bidikv_server.connector.core.costs import CostModel
from bidikv_server.cost_line import ENOUGH, HALF_LIFE_S, CostLine

seconds = st.floats(0.0, 1.0)


@given(seconds, st.floats(0.0, 1e-2), st.lists(st.integers(1, 100_000), min_size=5, max_size=20))
def test_a_line_is_found_again(fixed, slope, tokens):
    """The first observations on a line give that line back, or as much of it as they allow to tell."""
    line = CostLine()
    for count in tokens[: int(ENOUGH)]:
        line.observe(count, fixed + slope * count, 0.0)
    assert line.known(0.0)
    found_fixed, found_slope = line.fixed_and_slope()
    mean = sum(tokens[: int(ENOUGH)]) / int(ENOUGH)
    assert found_fixed + found_slope * mean == pytest.approx(fixed + slope * mean, rel=1e-6, abs=1e-9)
    assert found_fixed >= 0
    assert found_slope >= 0


@given(st.lists(st.tuples(st.integers(0, 10**6), seconds), min_size=5, max_size=30))
def test_no_observation_gives_a_negative_cost(observed):
    """Noise may point anywhere; a cost does not."""
    line = CostLine()
    for tokens, took in observed:
        line.observe(tokens, took, 0.0)
    assert all(part >= 0 and math.isfinite(part) for part in line.fixed_and_slope())


def learnt(*, fixed, per_token, rate, now_s=0.0):
    model = CostModel()
    model.pulled("d", 1, 1e6, now_s=now_s)  # The handshake's; it does not count.
    for tokens in (256, 1024, 4096, 512, 2048):
        model.pulled("d", tokens, fixed + per_token * tokens, now_s=now_s)
        model.computed(tokens, 0.01 + tokens / rate, now_s=now_s)
    return model


def test_the_crossover_is_where_the_two_lines_meet():
    """A tenth of a second before the first byte, 10,000 tokens/s computed, transfers ten times as fast: 1,111 tokens."""
    model = learnt(fixed=0.1, per_token=1e-5, rate=10_000)
    assert model.smallest_gain("d", now_s=0.0) == pytest.approx(0.1 / (1e-4 - 1e-5), rel=1e-3)


def test_a_slow_link_is_never_worth_it():
    """Moving a token takes longer than computing it."""
    assert learnt(fixed=0.0, per_token=1e-3, rate=10_000).smallest_gain("d", now_s=0.0) == math.inf


def test_nothing_is_decided_before_enough_is_known():
    """A pair of engines is judged by its own pulls, and not by fewer than it takes."""
    model = CostModel()
    model.pulled("d", 100, 0.1, now_s=0.0)
    for count in range(int(ENOUGH) - 1):
        model.pulled("d", 100 * (count + 1), 0.1, now_s=0.0)
        model.computed(100 * (count + 1), 0.1, now_s=0.0)
        assert model.smallest_gain("d", now_s=0.0) is None
    model.pulled("d", 1000, 0.1, now_s=0.0)
    assert model.smallest_gain("d", now_s=0.0) is None
    model.computed(1000, 0.1, now_s=0.0)
    assert model.smallest_gain("d", now_s=0.0) is not None
    assert model.smallest_gain("another", now_s=0.0) is None


def test_what_was_learnt_is_forgotten():
    """A pair that was slow is tried again, and a new pace replaces the old one."""
    model = learnt(fixed=0.0, per_token=1e-3, rate=10_000)
    assert model.smallest_gain("d", now_s=HALF_LIFE_S) is None
    for _ in range(3):
        for tokens in (256, 1024, 4096):
            model.pulled("d", tokens, 1e-6 * tokens, now_s=6 * HALF_LIFE_S)
            model.computed(tokens, tokens / 10_000, now_s=6 * HALF_LIFE_S)
    assert model.smallest_gain("d", now_s=6 * HALF_LIFE_S) < 500


def test_one_slow_pull_does_not_stop_pulling():
    """A stall is no link: it counts as rather slow, and others soon outweigh it."""
    model = learnt(fixed=0.01, per_token=1e-5, rate=10_000)
    model.pulled("d", 1024, 19.0, now_s=1.0)
    for count in range(8):
        model.pulled("d", 512 * (count + 1), 0.01 + 1e-5 * 512 * (count + 1), now_s=2.0)
        model.computed(512 * (count + 1), 512 * (count + 1) / 10_000, now_s=2.0)
    assert model.smallest_gain("d", now_s=2.0) < 1000


def test_pulls_that_go_wrong_are_given_up():
    """A pair whose reads run into their bound is not waited for in every turn."""
    model = learnt(fixed=0.01, per_token=1e-5, rate=10_000)
    for count in range(12):
        model.pulled("d", 1024, 20.0, now_s=float(count))
        model.computed(1024 + count, 0.1, now_s=float(count))
    assert model.smallest_gain("d", now_s=12.0) > 4096


def test_a_wrong_line_is_forgotten_soon():
    """However many observations it stands on."""
    line = CostLine()
    for count in range(10_000):
        line.observe(1000 + count % 7, 5.0, 0.0)
    assert line.known(0.0)
    assert not line.known(2.1 * HALF_LIFE_S)


def test_engines_that_are_gone_are_forgotten():
    """Epochs of restarted engines do not pile up."""
    model = CostModel()
    for number in range(500):
        model.pulled(f"d{number}", 100, 0.1, now_s=float(number))
    assert len(model._pulls) == 64
