"""Statistics and verdicts of the connector benchmark."""

import pytest

from comparison import figures
from comparison.figures import Ratio


def runs(*values):
    return list(zip(figures.order(1), values, strict=True))


def test_a_steady_drift_cancels():
    """ABBA: a machine that gets slower at a steady pace makes neither side look better."""
    drifting = runs(100.0, 99.0, 98.0, 97.0)
    assert figures.ratio(drifting).of_medians == pytest.approx(1.0, abs=1e-3)


def test_the_spread_is_that_of_neighbours():
    """Each A is held against the B beside it."""
    result = figures.ratio(runs(10.0, 10.0, 8.0, 10.0))
    assert (result.low, result.high) == (1.0, 1.25)


@pytest.mark.parametrize("broken", [[], [("A", 1.0)], [("A", 1.0), ("A", 1.0)]])
def test_unpaired_runs_are_refused(broken):
    """Without a B beside each A there is nothing to compare."""
    with pytest.raises(ValueError, match="pairs"):
        figures.ratio(broken)


def test_time_per_token_leaves_the_first_out():
    """The first token's time is the prompt's."""
    assert figures.time_per_token([5.0, 5.1, 5.3], 3) == pytest.approx(0.15)


def test_time_per_token_counts_tokens_and_not_events():
    """One event may carry several tokens."""
    assert figures.time_per_token([0.0, 1.0], 5) == pytest.approx(0.25)


@pytest.mark.parametrize(("arrivals", "tokens"), [([1.0], 2), ([], 2), ([1.0, 2.0], 1)])
def test_a_single_token_has_no_time(arrivals, tokens):
    """A stream that was cut short is an error and no fast one."""
    with pytest.raises(ValueError, match="no time"):
        figures.time_per_token(arrivals, tokens)


@pytest.mark.parametrize(("retaining", "free"), [(0.049, True), (0.051, False), (0.0, True)])
def test_idle_verdict(retaining, free):
    """Three percent of a core above the engine that retains nothing."""
    assert figures.idle_is_free(0.02, retaining) is free


@pytest.mark.parametrize(
    ("throughput", "per_token", "preemptions", "good"),
    [(0.99, 1.01, 0, True), (0.97, 1.01, 0, False), (0.99, 1.03, 0, False), (1.0, 1.0, 1, False)],
)
def test_throughput_verdict(throughput, per_token, preemptions, good):
    """Two percent either way, and no preemption at all."""
    ratios = [Ratio(value, value, value) for value in (throughput, per_token)]
    assert figures.costs_nothing(*ratios, preemptions) is good


def test_a_noisy_machine_gives_no_verdict():
    """Where neighbouring runs disagree by more than the target, only a preemption is certain."""
    noisy, steady = Ratio(1.0, 0.9, 1.2), Ratio(1.0, 0.98, 1.02)
    assert figures.costs_nothing(noisy, steady, 0) is None
    assert figures.costs_nothing(steady, noisy, 0) is None
    assert figures.costs_nothing(noisy, noisy, 1) is False


@pytest.mark.parametrize(
    ("blocks", "lookup_ms", "fast"),
    [(2048, 8.9, True), (2048, 9.9, False), (8192, 39.0, False), (64, 99.0, None)],
)
def test_lookup_verdict(blocks, lookup_ms, fast):
    """Lookup and validation together; sizes without a target have no verdict."""
    assert figures.lookup_is_fast(blocks, lookup_ms, 1.0) is fast
