"""Asynchronous scheduling: a step still runs while the next is planned, and its writes come as late as they can."""

import pytest
from engine_core import BLOCK, cold, text

from bidikv_server.connector import scheduler as scheduler_side

OPENING = text(1, 100)
RIVAL = text(6, 100)


def read_into_an_aborted_requests_blocks(pair):
    """Abort a request while its chunk runs, and let the scheduler place a pull at once; the pull's answer and prompt."""
    _, answer = pair.turn(OPENING)
    pair.forget()
    prompt = OPENING + answer.tokens + text(2, 20)
    prefill = pair.prefill
    rival = prefill.add(RIVAL, 1, None)
    prefill.step()
    assert len(prefill._under_way) == 1
    written = set(prefill.blocks(rival))
    request = pair.ask(prompt)
    prefill.settle()
    prefill.abort(rival)
    prefill.step()
    overlap = written & {local for local, _ in prefill.transport.pairs.get(request, ())}
    return prefill.finish(request), prompt, overlap


OVERLAPPING = {"asynchronous": True, "caching": False}


def test_a_pull_never_lands_where_a_running_step_still_writes(start):
    """As `kv_both`, vLLM holds an aborted request's blocks back until the step has ended."""
    pair = start(**OVERLAPPING)
    answer, prompt, overlap = read_into_an_aborted_requests_blocks(pair)
    assert overlap == set()
    assert answer.reuse == ("hit", 128, 0, 32)
    assert answer.tokens == cold(prompt, 1)


def test_as_a_mere_producer_such_an_engine_reads_nothing_back(start):
    """Those blocks would be handed out at once, so the connector refuses, with a reason per request."""
    pair = start(**OVERLAPPING, prefill={"kv_role": "kv_producer"})
    answer, prompt, _ = read_into_an_aborted_requests_blocks(pair)
    assert answer.reuse == ("unsupported", 0, 0, 160)
    assert answer.tokens == cold(prompt, 1)


def test_without_that_refusal_the_answer_would_be_wrong(start, monkeypatch):
    """The danger is real: validation cannot see that prefill's own late step overwrote what was read."""
    monkeypatch.setattr(scheduler_side, "fence_objection", lambda _: None)
    pair = start(**OVERLAPPING, prefill={"kv_role": "kv_producer"})
    answer, prompt, overlap = read_into_an_aborted_requests_blocks(pair)
    assert overlap
    assert answer.reuse[0] == "hit"
    assert answer.tokens != cold(prompt, 1)


@pytest.mark.parametrize("caching", [True, False], ids=["prefix cache", "no prefix cache"])
@pytest.mark.parametrize("count", [1, 2, 15, 16, 17, 33])
def test_a_turn_that_stops_while_its_next_step_runs_is_retained_up_to_what_is_settled(start, count, caching):
    """The step that should not have been is still to write: nothing that it may touch is offered."""
    pair = start(asynchronous=True, caching=caching)
    prompt = text(count, 95)
    stop = cold(prompt, count)[-1]
    first = pair.prefill.finish(pair.ask(prompt))
    request = pair.reply(prompt, 60, first, sampling={"stop_token_ids": [stop]})
    decode = pair.decode
    decode.run(until=lambda: decode.answers[request].finish is not None)
    assert decode.answers[request].finish == "stop"
    assert decode.answers[request].tokens == cold(prompt, count)
    if count > 1:
        assert decode._under_way
    longer = prompt + cold(prompt, count) + text(2, 64)
    pair.quiet()
    pair.forget()
    answer = pair.prefill.finish(pair.ask(longer))
    assert answer.reuse[0] == "hit"
    assert answer.reuse[1] in {(95 + count - 1) // BLOCK * BLOCK, (95 + count - 2) // BLOCK * BLOCK}
    assert answer.tokens == cold(longer, 1)
    assert decode.free_blocks == 63


def test_retained_blocks_join_the_tail_of_the_free_queue_after_a_deferred_free(start):
    """They are freed when the running step has ended; were ours not the last reference, they would be taken first."""
    pair = start(**OVERLAPPING)
    prompt = text(3, 95)
    stop = cold(prompt, 20)[-1]
    decode = pair.decode
    request = decode.add(prompt, 60, pair.decode_params(), sampling={"stop_token_ids": [stop]})
    decode.finish(request)
    retained = decode.device.table(request)[: (95 + 19) // BLOCK]
    decode.idle(3)
    rival = decode.add(text(4, (63 - len(retained)) * BLOCK - 1), 1, None)
    decode.finish(rival)
    assert not set(retained) & set(decode.device.table(rival))
    longer = prompt + cold(prompt, 20) + text(2, 64)
    assert pair.prefill.finish(pair.ask(longer)).reuse[:2] == ("hit", 112)
