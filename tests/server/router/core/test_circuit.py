"""Circuits open, let one leg try, and close."""

from hypothesis import given
from hypothesis import strategies as st

from bidikv_server.router.core.circuit import Circuit, CircuitRule, CircuitState

RULE = CircuitRule(failures=3, open_s=5.0)


def opened(now_s=0.0):
    circuit = Circuit()
    assert [circuit.failed(RULE, now_s) for _ in range(3)] == [False, False, True]
    return circuit


def test_only_failures_in_a_row_count():
    """One leg that ends well in between starts the count again."""
    circuit = Circuit()
    for _ in range(5):
        circuit.failed(RULE, 0.0)
        circuit.failed(RULE, 0.0)
        assert not circuit.succeeded()
    assert circuit.state is CircuitState.CLOSED


def test_a_leg_tries_and_closes():
    """After its time one leg may try; that it ends well closes the circuit, and the count starts again."""
    circuit = opened()
    assert not circuit.advance(4.9)
    assert circuit.advance(5.0)
    assert circuit.state is CircuitState.HALF_OPEN
    assert circuit.succeeded()
    assert circuit.state is CircuitState.CLOSED
    assert not circuit.failed(RULE, 6.0)


def test_a_leg_tries_and_fails():
    """It opens at once, for twice as long each time, up to a bound."""
    circuit, now_s, times = opened(), 0.0, []
    for _ in range(8):
        times.append(circuit.until_s - now_s)
        now_s = circuit.until_s
        circuit.advance(now_s)
        assert circuit.failed(RULE, now_s)
    assert times == [5.0, 10.0, 20.0, 40.0, 80.0, 160.0, 160.0, 160.0]


def test_old_legs_say_nothing():
    """While it is open, neither a leg that began before and ends well, nor one that fails, changes anything."""
    circuit = opened()
    assert not circuit.succeeded()
    assert not circuit.failed(RULE, 1.0)
    assert (circuit.state, circuit.until_s) == (CircuitState.OPEN, 5.0)


@given(st.lists(st.sampled_from(["good", "bad", "wait"]), max_size=60))
def test_it_always_comes_back(events):
    """Whatever happened, an engine whose legs end well is used again after at most 32 times the rule's seconds."""
    circuit, now_s = Circuit(), 0.0
    for event in events:
        if event == "wait":
            now_s += 3.0
            circuit.advance(now_s)
        elif event == "good":
            circuit.succeeded()
        else:
            circuit.failed(RULE, now_s)
    circuit.advance(now_s + 32 * RULE.open_s)
    circuit.succeeded()
    assert circuit.state is CircuitState.CLOSED
