"""What legs take is learnt from legs."""

import pytest

from bidikv_server.router.core.ids import EngineUrl
from bidikv_server.router.core.leg_costs import LegCosts

P, D = EngineUrl("http://p"), EngineUrl("http://d")


def learnt():
    """A prefill engine that computes 1,000 tokens a second after 50 ms, and pulls ten times as fast after 20 ms."""
    costs = LegCosts()
    for tokens in (500, 1000, 1500, 2000, 2500):
        costs.prefilled(P, ahead=0, computed=tokens, pulled=0, seconds=0.05 + tokens / 1000, now_s=0.0)
        costs.prefilled(P, ahead=0, computed=100, pulled=tokens, seconds=0.12 + tokens / 10_000, now_s=0.0)
        costs.handed_over(D, tokens=tokens, seconds=0.01 + tokens / 20_000, now_s=0.0)
    return costs


def test_every_kind_of_leg_has_its_own_line():
    """Legs that pulled and those that did not are told apart, and so are engines."""
    costs = learnt()
    assert costs.prefill_s(P, ahead=0, computed=3000, pulled=0, now_s=0.0) == pytest.approx(3.05)
    assert costs.prefill_s(P, ahead=0, computed=100, pulled=2900, now_s=0.0) == pytest.approx(0.41, rel=0.01)
    assert costs.hand_over_s(D, tokens=0, now_s=0.0) == pytest.approx(0.01)
    assert costs.prefill_s(D, ahead=0, computed=3000, pulled=0, now_s=0.0) is None


def test_a_leg_waits_for_those_before_it():
    """What is ahead of a leg is computed before it, and counts as much."""
    costs = learnt()
    assert costs.prefill_s(P, ahead=2000, computed=1000, pulled=0, now_s=0.0) == pytest.approx(3.05)


def test_what_was_learnt_fades():
    """After some minutes without a leg of a kind nothing is known of it any more."""
    costs = learnt()
    assert costs.prefill_s(P, ahead=0, computed=1, pulled=0, now_s=300.0) is None


def test_alone_is_tried_and_then_known():
    """While no leg ran alone it is taken for as fast as one after prefill; then its own line counts."""
    costs = learnt()
    assert costs.alone_s(D, tokens=100, now_s=0.0) == pytest.approx(0.015)
    for tokens in (50, 100, 150, 200, 250):
        costs.ran_alone(D, tokens=tokens, seconds=2.0, now_s=0.0)
    assert costs.alone_s(D, tokens=100, now_s=0.0) == pytest.approx(2.0)


def test_a_new_engine_at_an_old_address():
    """It has no speed yet."""
    costs = learnt()
    costs.forget(P)
    assert costs.prefill_s(P, ahead=0, computed=1, pulled=0, now_s=0.0) is None
