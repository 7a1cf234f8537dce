"""What legs take is learnt from legs."""

import pytest

from bidikv_server.router.core.ids import EngineUrl
from bidikv_server.router.core.leg_costs import LegCosts

P, D = EngineUrl("http://p"), EngineUrl("http://d")


def computes(costs, computed, seconds, ahead=0):
    costs.prefilled(P, ahead=ahead, computed=computed, pulled=0, asked=False, seconds=seconds, now_s=0.0)


def reads_back(costs, computed, pulled, seconds, ahead=0):
    costs.prefilled(P, ahead=ahead, computed=computed, pulled=pulled, asked=True, seconds=seconds, now_s=0.0)


def prefill_s(costs, computed, pulled=0, *, engine=P, ahead=0, asked=False, now_s=0.0):
    return costs.prefill_s(engine, ahead=ahead, computed=computed, pulled=pulled, asked=asked, now_s=now_s)


def learnt():
    """A prefill engine that computes 1,000 tokens a second after 50 ms, and pulls ten times as fast after 20 ms more."""
    costs = LegCosts()
    for tokens in (500, 1000, 1500, 2000, 2500):
        computes(costs, tokens, 0.05 + tokens / 1000)
    for tokens in (500, 1000, 1500, 2000, 2500):
        reads_back(costs, 100, tokens, 0.17 + tokens / 10_000)
        costs.handed_over(D, tokens=tokens, seconds=0.01 + tokens / 20_000, now_s=0.0)
    return costs


def test_every_kind_of_leg_has_its_own_line():
    """Legs that asked and those that did not are told apart, and so are engines."""
    costs = learnt()
    assert prefill_s(costs, 3000) == pytest.approx(3.05)
    assert prefill_s(costs, 100, 2900, asked=True) == pytest.approx(0.46, rel=0.01)
    assert costs.hand_over_s(D, tokens=0, now_s=0.0) == pytest.approx(0.01)
    assert prefill_s(costs, 3000, engine=D) is None


def test_a_leg_waits_for_those_before_it():
    """What is ahead of a leg is computed before it, and counts as much."""
    costs = learnt()
    assert prefill_s(costs, 1000, ahead=2000) == pytest.approx(3.05)
    assert prefill_s(costs, 100, 500, ahead=2000, asked=True) == pytest.approx(2.22, rel=0.01)


def test_what_is_computed_beside_a_pull_counts_by_itself():
    """A long tool result after a short history is no pull of as many tokens, whatever the line was learnt from."""
    assert prefill_s(learnt(), 3000, 500, asked=True) == pytest.approx(3.12, rel=0.01)


def test_legs_that_asked_in_vain():
    """What prefill found too little to pull counts as asking, and is no price per token."""
    costs = LegCosts()
    for tokens in (500, 1000, 1500, 2000, 2500):
        computes(costs, tokens, 0.05 + tokens / 1000)
    for computed in (100, 200, 300, 100, 200):
        reads_back(costs, computed, 0, 0.06 + computed / 1000)
    assert prefill_s(costs, 200, 60, asked=True) == pytest.approx(0.26)


def test_speed_outlives_the_belief_in_load():
    """When nothing was only computed for minutes, a pulling leg's computed part still counts by the engine's speed."""
    costs = learnt()
    for tokens in (500, 1000, 1500, 2000, 2500):
        costs.prefilled(
            P, ahead=0, computed=100, pulled=tokens, asked=True, seconds=0.2 + tokens / 1e4, now_s=600.0
        )
    assert prefill_s(costs, 2000, now_s=600.0) is None
    assert prefill_s(costs, 2000, 500, asked=True, now_s=600.0) == pytest.approx(2.15, rel=0.01)


def test_what_was_learnt_fades():
    """After some minutes without a leg of a kind nothing is known of it any more."""
    costs = learnt()
    assert prefill_s(costs, 1, now_s=300.0) is None


def test_alone_is_tried_and_then_known():
    """While no leg ran alone it is taken for a hand-over and prefill's speed; then its own line counts."""
    costs = learnt()
    assert costs.alone_s(D, tokens=100, now_s=0.0, like=P) == pytest.approx(0.115)
    for tokens in (50, 100, 150, 200, 250):
        costs.ran_alone(D, tokens=tokens, seconds=2.0, now_s=0.0)
    assert costs.alone_s(D, tokens=100, now_s=0.0, like=P) == pytest.approx(2.0)
    assert LegCosts().alone_s(D, tokens=100, now_s=0.0, like=P) is None


def test_a_new_engine_at_an_old_address():
    """It has no speed yet."""
    costs = learnt()
    costs.forget(P)
    assert prefill_s(costs, 1) is None
