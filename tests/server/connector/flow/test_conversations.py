"""Random conversations through both engines: faithful, edited, aborted, failing, raced; every answer is the cold one."""

import pytest
from engine_core import BLOCK, Pair, cold, text, unused_port
from hypothesis import HealthCheck, event, given, settings
from hypothesis import strategies as st

from bidikv_server.reasons import Reason

BLOCKS = 48
HITS = {Reason.HIT, Reason.HIT_DIVERGED, Reason.HIT_EVICTED, Reason.LOCAL}

moves = st.fixed_dictionaries(
    {
        "conversation": st.sampled_from("ab"),
        "edit": st.sampled_from(["extend", "extend", "extend", "repeat", "change", "cut"]),
        "where": st.floats(0, 1),
        "new": st.integers(1, 60),
        "count": st.integers(1, 40),
        "hold": st.sampled_from([None, None, "read", "validation", "overdue"]),
        "decode_takes": st.sampled_from([0, 0, 5, 30, BLOCKS - 2]),
        "fails": st.integers(0, 5).map(lambda n: n == 0),
        "aborted": st.integers(0, 5).map(lambda n: n == 0),
        "twice": st.booleans(),
        "forget": st.booleans(),
        "protect": st.booleans(),
    }
)


@pytest.fixture
def pairs(checkpoint):
    """Build a pair for one example after another, and stop it."""
    running = []

    def build(**kwargs):
        while running:
            running.pop().close()
        running.append(Pair(checkpoint, port=unused_port(), blocks=BLOCKS, **kwargs))
        return running[-1]

    yield build
    for pair in running:
        pair.close()


def edited(history, move, number):
    """What a client sends next."""
    at = int(len(history) * move["where"])
    old = {"change": [*history[:at], number], "cut": history[:at]}.get(move["edit"], history)
    return old if move["edit"] == "repeat" and old else old + text(1000 + number, move["new"])


def play(pair, move, prompt, number):
    """One move; the turn's answer, or None if it was aborted."""
    prefill, transport = pair.prefill, pair.prefill.transport
    if move["forget"] and not prefill.scheduler.requests:
        prefill.scheduler.reset_prefix_cache()
    transport.hold = move["hold"]
    requests = [pair.ask(prompt, conversation=move["conversation"]) for _ in range(1 + move["twice"])]
    prefill.idle(3)
    if move["decode_takes"]:
        rival = text(5000 + number, move["decode_takes"] * BLOCK - 1)
        assert pair.decode.finish(pair.decode.add(rival, 1, None)).tokens == cold(rival, 1)
    if move["aborted"]:
        prefill.abort(requests[0])
        requests = requests[1:]
    transport.failing, transport.hold = move["fails"], None
    for request in requests:
        answer = prefill.finish(request)
        assert answer.tokens == cold(prompt, 1)
        reason, remote, local, _ = answer.reuse
        event(reason)
        assert reason in HITS or remote == 0
        assert reason not in HITS or remote + local > 0
        assert remote % BLOCK == local % BLOCK == 0
    transport.failing = False
    if not requests:
        pair.abandon()
        return None
    decoded = pair.reply(
        prompt,
        move["count"],
        prefill.answers[requests[0]],
        conversation=move["conversation"],
        protect=move["protect"],
    )
    reply = pair.decode.finish(decoded)
    assert reply.tokens == cold(prompt, move["count"])
    pair.quiet()
    # Stock's lease on what only a retry had asked for.
    pair.abandon()
    return reply.tokens


@pytest.mark.parametrize("asynchronous", [False, True], ids=["synchronous", "asynchronous"])
@pytest.mark.parametrize("caching", [True, False], ids=["prefix cache", "no prefix cache"])
@given(story=st.lists(moves, min_size=2, max_size=8))
@settings(max_examples=15, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_every_answer_is_the_cold_one_and_every_block_comes_back(pairs, asynchronous, caching, story):
    """Whatever clients do and whatever goes wrong: cold answers, honest accounts, bounded steps, nothing left behind."""
    pair = pairs(asynchronous=asynchronous, caching=caching)
    histories = {"a": [], "b": []}
    for number, move in enumerate(story):
        prompt = edited(histories[move["conversation"]], move, number)[: (BLOCKS - 8) * BLOCK]
        reply = play(pair, move, prompt, number)
        if reply is not None:
            histories[move["conversation"]] = prompt + reply
    pair.abandon()
    pair.decode.drain()
    for engine in (pair.prefill, pair.decode):
        engine.idle(2)
        assert engine.free_blocks == BLOCKS - 1
        assert engine.scheduler.reset_prefix_cache()
    prefill, decode = pair.prefill.side._prefill, pair.decode.side._decode
    for left in (prefill._turns, prefill._reads, prefill._reading_into, prefill._quarantine):
        assert len(left) == 0
    decode._index._index.check_integrity()
    decode._protected.check_integrity()
    assert len(decode._index._index) == 0
