"""Small things that the connector benchmark's parts rely on."""

import os
import threading
import time

import pytest

from comparison.calls import Page, fan_out
from comparison.histories import DIVERGENCES
from comparison.idle import cpu_seconds


def text(messages):
    return "".join(message["content"] for message in messages)


def test_divergent_requests_do_not_extend_the_first():
    """Each differs from what decode holds, or is shorter."""
    for divergence in DIVERGENCES:
        assert divergence.then != divergence.first or divergence.between is not None
        assert not text(divergence.then).startswith(text(divergence.first) + "x")
    assert len({divergence.name for divergence in DIVERGENCES}) == len(DIVERGENCES) >= 4


def test_metrics_are_summed_over_matching_labels():
    """An engine has a sample per rank; labels narrow the sum down."""
    page = Page((("a", {"rank": "0", "k": "x"}, 1.0), ("a", {"rank": "1", "k": "y"}, 2.0), ("b", {}, 4.0)))
    assert (page.value("a"), page.value("a", k="y"), page.value("c")) == (3.0, 2.0, 0.0)


def test_processor_time_of_a_group():
    """It grows with what this process group does."""
    group = os.getpgid(0)
    before = cpu_seconds(group)
    until_s = time.process_time() + 0.2
    while time.process_time() < until_s:
        pass
    assert cpu_seconds(group) - before >= 0.15


def test_results_come_in_order():
    """Whatever ends first."""
    assert fan_out(lambda item: item * 2, range(20), 4) == [item * 2 for item in range(20)]


@pytest.mark.parametrize("at_once", [1, 4])
def test_a_failure_stops_what_has_not_begun(at_once):
    """The first error comes out, whichever item's it is, and nothing is begun after it."""
    begun = []
    all_begun = threading.Barrier(at_once)

    def work(item):
        begun.append(item)
        all_begun.wait(30)
        raise RuntimeError("no")

    with pytest.raises(RuntimeError, match="no"):
        fan_out(work, range(1000), at_once)
    assert len(begun) == at_once
