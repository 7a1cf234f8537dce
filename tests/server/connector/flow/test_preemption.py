"""Prefill runs out of blocks, or of budget, around a pull; stock parks such a request for ever (F6c)."""

import pytest
from engine_core import BLOCK, cold, text
from vllm.v1.request import RequestStatus

OPENING = text(1, 160)
RIVAL = text(5, 200)
LONG = 200
"""Tokens that the rival generates: in the end its blocks have taken most of what the other one's cache held."""
CACHING = pytest.mark.parametrize("caching", [True, False], ids=["prefix cache", "no prefix cache"])

# The rival's 13 blocks and the prompt's 18 just fit, until the rival generates its ninth token.
TIGHT = {"prefill": {"blocks": 1 + 13 + 18, "batch": 24}}


def history(pair):
    """A conversation's second prompt, with decode's handle for a stock pair."""
    _, answer = pair.turn(OPENING, 20)
    pair.forget()
    return OPENING + answer.tokens + text(2, 100), answer.params


def preempt_after_the_pull(pair, prompt, *, handle=None):
    """Throw out a prompt in chunks, whose pull went well, for the block that an earlier request needs next."""
    prefill = pair.prefill
    rival = prefill.add(RIVAL, LONG, None, name="rival")
    prefill.run(until=lambda: len(prefill.answers[rival].tokens) >= 4)
    request = pair.ask(prompt, handle=handle)
    prefill.run(until=lambda: prefill.request(request).num_preemptions > 0, steps=20)
    assert len(prefill.transport.pairs[request]) >= 11
    assert not prefill.transport.reads
    return rival, request


@CACHING
@pytest.mark.parametrize("asynchronous", [False, True], ids=["synchronous", "asynchronous"])
def test_a_request_preempted_after_its_pull_recomputes_and_finishes(start, caching, asynchronous):
    """It asks for no second read, ends in bounded steps with the cold answer, and its account adds up."""
    pair = start(caching=caching, asynchronous=asynchronous, **TIGHT)
    prompt, _ = history(pair)
    rival, request = preempt_after_the_pull(pair, prompt)
    answer = pair.prefill.finish(rival, request, steps=400)
    assert list(pair.prefill.transport.pairs) == [request]
    assert answer.tokens == cold(prompt, 1)
    assert pair.prefill.answers[rival].tokens == cold(RIVAL, LONG)
    assert answer.reuse == ("hit", 176, 0, 104)
    second = pair.decode.finish(pair.reply(prompt, 10, answer))
    assert second.tokens == cold(prompt, 10)
    pair.quiet()
    pair.prefill.drain()
    assert pair.prefill.free_blocks == 31


@CACHING
def test_stock_parks_a_request_preempted_after_its_pull_for_ever(start, caching):
    """Stock offers the same pull again, vLLM waits for it, and nobody has queued a read."""
    pair = start(stock=True, caching=caching, **TIGHT)
    prompt, handle = history(pair)
    rival, request = preempt_after_the_pull(pair, prompt, handle=handle)
    pair.prefill.finish(rival, steps=400)
    pair.prefill.idle(200)
    assert pair.prefill.status(request) is RequestStatus.WAITING_FOR_REMOTE_KVS
    assert pair.prefill.transport.reads == []
    assert list(pair.prefill.transport.pairs) == [request]


def test_stock_parks_a_request_whose_pull_failed_for_ever(start):
    """With `kv_load_failure_policy=recompute` stock waits for a second read that nobody queued."""
    pair = start(stock=True)
    prompt, handle = history(pair)
    pair.prefill.transport.failing = True
    request = pair.ask(prompt, handle=handle)
    pair.prefill.idle(200)
    assert pair.prefill.status(request) is RequestStatus.WAITING_FOR_REMOTE_KVS
    assert pair.prefill.transport.reads == []


def test_stock_prefill_without_the_flag_parks_whoever_brings_a_handle(start):
    """F6a: the offer is made without looking at `bidirectional_kv_xfer`, the read is not."""
    pair = start(stock=True, prefill={"extra": {"kv_recompute_threshold": 16}})
    prompt, handle = history(pair)
    request = pair.ask(prompt, handle=handle)
    pair.prefill.idle(200)
    assert pair.prefill.status(request) is RequestStatus.WAITING_FOR_REMOTE_KVS
    assert pair.prefill.transport.pairs == {}


def test_stock_with_a_host_buffer_parks_whoever_brings_a_handle(start):
    """F6b: where blocks are staged in host memory, stock remembers to save them and forgets to read."""
    pair = start(stock=True)
    prompt, handle = history(pair)
    pair.prefill.side.use_host_buffer = True
    request = pair.ask(prompt, handle=handle)
    pair.prefill.idle(200)
    assert pair.prefill.status(request) is RequestStatus.WAITING_FOR_REMOTE_KVS
    assert pair.prefill.transport.pairs == {}


def test_a_stock_handle_parks_nobody_on_our_prefill(start):
    """A handle in the params, from a stock router or a client, is not looked at (F6a, F9)."""
    stock = start(stock=True)
    prompt, handle = history(stock)
    pair = start()
    answer = pair.prefill.finish(pair.prefill.add(prompt, 1, handle))
    assert answer.reuse == ("new_conversation", 0, 0, len(prompt))
    assert answer.tokens == cold(prompt, 1)
    assert pair.prefill.transport.pairs == {}


def test_no_request_is_preempted_while_its_pull_is_under_way(start):
    """VLLM preempts only what runs: with its blocks held by a slow pull, others wait or preempt each other."""
    pair = start(**TIGHT)
    prompt, _ = history(pair)
    pair.prefill.transport.hold = "read"
    request = pair.ask(prompt)
    pair.prefill.run(until=lambda: request in pair.prefill.transport.pairs)
    rivals = [pair.prefill.add(text(seed, 120), 60, None) for seed in (6, 7)]
    pair.prefill.finish(*rivals, steps=400)
    assert pair.prefill.preemptions > 0
    assert pair.prefill.request(request).num_preemptions == 0
    assert pair.prefill.status(request) is RequestStatus.WAITING_FOR_REMOTE_KVS
    pair.prefill.transport.hold = None
    answer = pair.prefill.finish(request)
    assert answer.reuse == ("hit", 176, 0, 104)
    assert answer.tokens == cold(prompt, 1)
    for rival, seed in zip(rivals, (6, 7), strict=True):
        assert pair.prefill.answers[rival].tokens == cold(text(seed, 120), 60)


def test_a_cache_reset_that_preempts_is_survived(start):
    """`reset_prefix_cache(reset_running_requests=True)` throws a request out after its pull, in the same step."""
    pair = start(prefill={"batch": 24})
    prompt, _ = history(pair)
    request = pair.ask(prompt)
    prefill = pair.prefill
    prefill.run(until=lambda: prefill.status(request) is RequestStatus.RUNNING)
    assert prefill.scheduler.reset_prefix_cache(reset_running_requests=True)
    answer = prefill.finish(request)
    assert answer.tokens == cold(prompt, 1)
    assert list(prefill.transport.pairs) == [request]


@CACHING
@pytest.mark.parametrize("batch", [17, 40, 104, 105])
def test_what_a_pull_leaves_is_computed_in_chunks(start, batch, caching):
    """Whatever the token budget, the rest of the prompt is computed on the right KV, and nothing twice."""
    pair = start(caching=caching, prefill={"batch": batch})
    prompt, _ = history(pair)
    request = pair.ask(prompt)
    steps = 0
    while pair.prefill.answers[request].finish is None:
        pair.prefill.idle(1)
        steps += 1
        assert steps < 30
    answer = pair.prefill.answers[request]
    assert answer.reuse == ("hit", 176, 0, 104)
    assert answer.tokens == cold(prompt, 1)
    # Two steps for lookup and read at most, then one per chunk.
    assert -(-104 // batch) <= steps <= -(-104 // batch) + 3


@pytest.mark.parametrize("batch", [17, 64])
def test_a_prompt_that_decode_computed_in_chunks_is_retained_whole(start, batch):
    """Decode that computes a long prompt itself, chunk by chunk, offers every settled block of it."""
    pair = start(decode={"batch": batch})
    request = pair.decode_alone(OPENING, 20)
    generated = pair.decode.finish(request).tokens
    pair.decode.idle(2)
    assert generated == cold(OPENING, 20)
    prompt = OPENING + generated + text(3, 30)
    answer = pair.prefill.finish(pair.ask(prompt))
    assert answer.reuse == ("hit", (160 + 19) // BLOCK * BLOCK, 0, len(prompt) - 176)
    assert answer.tokens == cold(prompt, 1)
