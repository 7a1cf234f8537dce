"""Figures and verdicts of the router benchmark, and the traffic that it sends."""

import asyncio
import json

import pytest

from overhead import figures, report
from overhead.client import Connection, Sight
from overhead.figures import Sample
from overhead.scenarios import SCENARIOS
from overhead.systems import NAMES, OURS
from overhead.traffic import TURNS, conversation, large_conversation


def sample(system, repetition=0, scenario="streams", **fields):
    values = {
        "seconds": 2.0,
        "turns": 1000,
        "events": 10_000,
        "reads": 10_000,
        "cpu_s": 0.5,
        "memory_mib": 60.0,
        "load_cpu": 0.1,
        "engines_cpu": 0.1,
        "first_ms": (1.0, 2.0),
        "transit_ms": (0.1, 0.2),
    }
    return Sample(system=system, scenario=scenario, repetition=repetition, **{**values, **fields})


def test_what_is_added_is_taken_within_a_round():
    """A machine that gets slower from round to round adds nothing."""
    samples = [
        sample(system, repetition, first_ms=(base + extra, 0.0))
        for repetition, base in enumerate((1.0, 10.0, 100.0))
        for system, extra in (("direct", 0.0), ("bidikv", 1.25))
    ]
    assert figures.added(samples, "bidikv", "streams", lambda s: s.first_ms[0]) == pytest.approx(1.25)
    assert figures.added(samples, "litellm", "streams", lambda s: s.first_ms[0]) is None


def test_per_core():
    """By the router's processor time, not by the clock."""
    assert figures.turns_per_core(sample("bidikv")) == 2000
    assert figures.events_per_core(sample("bidikv")) == 20_000
    assert figures.cpu_ms_per_turn(sample("bidikv")) == 0.5


def test_quantiles():
    """Median and 99th percentile, of few values too."""
    assert figures.quantiles([3.0, 1.0, 2.0]) == (2.0, 3.0)
    assert figures.quantiles([float(n) for n in range(1000)]) == (499.5, 990.0)
    assert all(value != value for value in figures.quantiles([]))  # noqa: PLR0124  # not a number


def everything(**ours):
    return [
        sample(system, scenario=scenario, **(ours if system in OURS else {}))
        for scenario in SCENARIOS
        for system in NAMES
    ]


def test_targets():
    """Each is met or missed by its own figure."""
    met = {what: is_met for what, _, is_met in report.targets(everything())}
    assert len(met) == 11
    assert [what for what, is_met in met.items() if not is_met] == [
        "events/s per core, at least 30,000",
        "our turns per core over litellm's, at least 3",
        "our events per core over litellm's, at least 3",
    ]
    slow = {what: is_met for what, _, is_met in report.targets(everything(first_ms=(20.0, 21.0), cpu_s=5.0))}
    assert not any(slow.values())


def test_what_was_not_measured_is_left_out():
    """Of targets and of the table."""
    only = [sample("direct"), sample("bidikv"), sample("bidikv-poll")]
    assert [what for what, _, _ in report.targets(only)] == [
        "added at 100 streams, p50, at most 1.5 ms",
        "added at 100 streams, p99, at most 6 ms",
        "added at 100 streams, polling, p50, at most 1.5 ms",
        "added at 100 streams, polling, p99, at most 6 ms",
    ]
    text = "\n".join(report.lines(only))
    assert "| | direct | bidikv | bidikv-poll |" in text
    assert "turns/s" not in text


def test_a_conversation_grows():
    """Every turn extends the one before it, and says its true length."""
    turns = conversation(1, 2, stream=True, max_tokens=7)
    assert len(turns) == TURNS
    before: list = []
    for turn in turns:
        head, _, body = turn.routed.partition(b"\r\n\r\n")
        assert f"Content-Length: {len(body)}".encode() in head
        messages = json.loads(body)["messages"]
        assert messages[: len(before)] == before
        before = messages
        prefill, decode = (json.loads(leg.partition(b"\r\n\r\n")[2]) for leg in turn.legs)
        assert prefill["kv_transfer_params"]["do_remote_decode"]
        assert prefill["messages"] == decode["messages"] == messages


def test_a_large_body_is_as_large_as_asked():
    """Within a tenth."""
    (turn,) = large_conversation(0, body_bytes=1_000_000, turns=1)
    assert len(turn.routed) == pytest.approx(1_000_000, rel=0.1)


@pytest.mark.parametrize("size", [1, 7, 10_000])
def test_events_are_counted_however_they_are_cut(size):
    """A stamp is read once, when its line is whole."""
    stream = b'data: {"content":"1"}\n\ndata: {"content": "22"}\n\ndata: {"content":"x"}\n\ndata: [DONE]\n\n'

    async def feed() -> Sight:
        sight = Sight(counting=True)
        connection = Connection(0, sight)
        connection._streamed = True
        for start in range(0, len(stream), size):
            connection.on_body(stream[start : start + size])
        assert connection._saw_done
        return sight

    assert len(asyncio.run(feed()).transit_ns) == 2
