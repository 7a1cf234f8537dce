"""Prefill runs out of blocks, or of budget, around a pull; stock parks such a request for ever (F6c)."""

import pytest
from engine_core import BLOCK, cold, text

from vllm.v1.request import RequestStatus

OPENING = text(1, 160)
CACHING = pytest.mark.parametrize("caching", [True, False], ids=["prefix cache", "no prefix cache"])


def preempted_after_its_pull(pair, prompt, *, handle=None):
    """A prompt in chunks whose pull went well, thrown out by another that has more right to the blocks."""
    rival = pair.prefill.add(text(5, 200), 24, None, name="rival")
    pair.prefill.idle(5)
    request = pair.ask(prompt, handle=handle)
    prefill = pair.prefill
    prefill.run(until=lambda: prefill.request(request).num_preemptions > 0 or prefill.answers[request].finish, steps=40)
    assert prefill.request(request).num_preemptions
    return rival, request


# 24 blocks: the rival's 13 and the prompt's 12 do not fit side by side once the rival has generated a little.
TIGHT = {"prefill": {"blocks": 26, "batch": 48}}


def history(pair):
    """A conversation's second prompt, with decode's handle for a stock pair."""
    _, answer = pair.turn(OPENING, 20)
    pair.forget()
    return OPENING + answer.tokens + text(2, 10), answer.params


@CACHING
def test_a_request_preempted_after_its_pull_recomputes_and_finishes(start, caching):
    """It asks for no second read, ends in bounded steps with the cold answer, and its account adds up."""
    pair = start(caching=caching, **TIGHT)
    prompt, _ = history(pair)
    rival, request = preempted_after_its_pull(pair, prompt)
    answer = pair.prefill.finish(rival, request)
    assert pair.prefill.preemptions >= 1
    assert len(pair.prefill.transport.pairs) == 1
    assert answer.tokens == cold(prompt, 1)
    assert pair.prefill.answers[rival].tokens == cold(text(5, 200), 24)
    assert answer.reuse[0] == "hit"
    second = pair.decode.finish(pair.reply(prompt, 10, answer))
    assert second.tokens == cold(prompt, 10)
    pair.quiet()
    pair.prefill.drain()
    assert pair.prefill.free_blocks == 25
