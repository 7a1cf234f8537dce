"""Requests that are aborted: nothing stays allocated, nothing is remembered, and late reads hurt nobody."""

import threading

import pytest
from engine_core import BLOCK, PATIENCE_S, cold, text
from vllm.v1.request import RequestStatus

from bidikv_server.connector.side_channel import Server

OPENING = text(1, 100)
ALL = 63


@pytest.fixture(params=[False, True], ids=["synchronous", "asynchronous"])
def pair(start, request):
    """Engines with and without overlapping steps; prefill computes in chunks."""
    return start(prefill={"batch": 20}, asynchronous=request.param)


def history(pair):
    """A conversation's second prompt, nothing of it left on prefill."""
    _, answer = pair.turn(OPENING)
    pair.forget()
    return OPENING + answer.tokens + text(2, 60)


def left_behind(engine):
    """What the engine still has of its requests."""
    engine.drain()
    engine.idle(2)
    names = {
        engine.side: ("_reqs_need_recv", "_reqs_in_batch", "_reqs_not_processed", "_reqs_need_save"),
        engine.side._prefill: ("_turns", "_reads", "_reading_into", "_quarantine"),
        engine.side._decode: ("_to_unpin",),
    }
    left = [name for owner, owned in names.items() if owner for name in owned if getattr(owner, name)]
    return left + ["blocks"] * (ALL - engine.free_blocks)


def test_abort_while_the_lookup_is_under_way(pair, free_port):
    """No block was allocated yet; the answer that comes later finds nobody."""
    prompt = history(pair)
    answers = threading.Event()
    index = pair.decode.side._decode._index
    slow = Server(f"127.0.0.1:{free_port}", lambda data: answers.wait(PATIENCE_S) and index.answer(data))
    try:
        request = pair.ask(prompt, sources=[slow.address])
        pair.prefill.step()
        assert pair.prefill.blocks(request) == []
        pair.prefill.abort(request)
        answers.set()
        assert left_behind(pair.prefill) == []
    finally:
        answers.set()
        slow.close()
    assert pair.prefill.transport.pairs == {}
    assert pair.prefill.finish(pair.ask(prompt)).tokens == cold(prompt, 1)


def test_abort_while_the_read_is_under_way(pair):
    """The blocks that are still written to are nobody else's until the read has ended."""
    prompt = history(pair)
    pair.prefill.transport.hold = "read"
    request = pair.ask(prompt)
    pair.prefill.run(until=lambda: request in pair.prefill.transport.pairs)
    blocks = set(pair.prefill.blocks(request))
    pair.prefill.abort(request)
    pair.prefill.idle(3)
    assert pair.prefill.free_blocks == ALL - len(blocks)
    rival = pair.prefill.add(text(6, (ALL - len(blocks)) * BLOCK), 1, None)
    pair.prefill.finish(rival)
    assert not blocks & set(pair.prefill.device.table(rival))
    pair.prefill.transport.hold = None
    assert left_behind(pair.prefill) == []
    assert pair.prefill.hashed(blocks) == []


def test_abort_while_the_verdict_is_awaited(pair):
    """Read but not yet confirmed: the verdict, whichever it is, caches nothing."""
    prompt = history(pair)
    pair.prefill.transport.hold = "validation"
    request = pair.ask(prompt)
    pair.prefill.run(until=lambda: request in pair.prefill.transport.pairs)
    blocks = pair.prefill.blocks(request)
    pair.prefill.idle(2)
    pair.prefill.abort(request)
    pair.prefill.transport.hold = None
    assert left_behind(pair.prefill) == []
    assert pair.prefill.hashed(blocks) == []


def test_abort_between_the_read_and_vllms_hearing_of_it(pair):
    """The read has been reported; the scheduler has not promoted the request yet."""
    prompt = history(pair)
    request = pair.ask(prompt)
    scheduler = pair.prefill.scheduler
    pair.prefill.run(until=lambda: request in scheduler.finished_recving_kv_req_ids)
    pair.prefill.abort(request)
    assert left_behind(pair.prefill) == []


def test_abort_while_the_rest_is_computed(pair):
    """After a good pull, between two chunks: pulled blocks stay in the prefix cache, under their own tokens."""
    prompt = history(pair)
    request = pair.ask(prompt)
    pair.prefill.run(until=lambda: pair.prefill.status(request) is RequestStatus.RUNNING)
    blocks = pair.prefill.blocks(request)[:8]
    pair.prefill.abort(request)
    assert left_behind(pair.prefill) == []
    assert pair.prefill.hashed(blocks) == blocks
    assert pair.prefill.device.shows(blocks, prompt[: 8 * BLOCK])
    again = pair.prefill.finish(pair.ask(prompt))
    assert again.reuse[:2] == ("local", 0)
    assert again.tokens == cold(prompt, 1)


def test_an_aborted_request_leaves_no_account_behind(pair):
    """It was no turn: an abort is counted, if at all, with what it had computed, and its answer is nobody's."""
    prompt = history(pair)
    request = pair.ask(prompt)
    pair.prefill.run(until=lambda: pair.prefill.status(request) is RequestStatus.RUNNING)
    pair.prefill.abort(request)
    assert left_behind(pair.prefill) == []
    assert pair.prefill.answers[request].params is None


def test_an_aborted_decode_request_is_not_retained(pair):
    """The client went away: its turn will not be extended, and its last step may still be running."""
    first = pair.prefill.finish(pair.ask(OPENING))
    request = pair.reply(OPENING, 40, first)
    pair.decode.run(until=lambda: len(pair.decode.answers[request].tokens) >= 10)
    pair.decode.abort(request)
    assert left_behind(pair.decode) == []
    assert len(pair.decode.side._decode._index._index) == 0
    assert pair.decode.counted("retained_turns") == {}


def test_a_decode_request_aborted_while_it_pulls_releases_both_sides(pair):
    """Prefill's blocks go as soon as the read has ended, decode's too."""
    first = pair.prefill.finish(pair.ask(OPENING))
    pair.decode.transport.hold = "read"
    request = pair.reply(OPENING, 40, first)
    pair.decode.run(until=lambda: request in pair.decode.transport.pairs)
    pair.decode.abort(request)
    pair.decode.transport.hold = None
    assert left_behind(pair.decode) == []
    assert left_behind(pair.prefill) == []


def test_a_later_turn_is_found_after_an_aborted_one(pair):
    """A retry after an abort extends the turn before: what that one left is still there."""
    prompt = history(pair)
    first = pair.prefill.finish(pair.ask(prompt))
    request = pair.reply(prompt, 40, first)
    pair.decode.run(until=lambda: len(pair.decode.answers[request].tokens) >= 3)
    pair.decode.abort(request)
    assert left_behind(pair.decode) == []
    pair.forget()
    again = pair.prefill.finish(pair.ask(prompt))
    assert again.reuse[:2] == ("hit", 128)
    assert again.tokens == cold(prompt, 1)


def test_a_turn_that_prefill_never_ran_leaves_decodes_blocks_free(pair):
    """Rejected or aborted before it was scheduled (F20): decode had lent nothing, so there is nothing to give back."""
    prompt = history(pair)
    request = pair.ask(prompt)
    pair.prefill.abort(request)
    assert left_behind(pair.prefill) == []
    assert left_behind(pair.decode) == []
    assert pair.prefill.finish(pair.ask(prompt)).reuse[:2] == ("hit", 128)


def test_stock_leaves_them_taken_until_their_ttl(start):
    """F20: nobody tells decode that the turn which was to read its blocks will never run."""
    pair = start(stock=True)
    _, answer = pair.turn(OPENING)
    pair.forget()
    request = pair.ask(OPENING + answer.tokens, handle=answer.params)
    pair.prefill.abort(request)
    for engine in (pair.prefill, pair.decode):
        engine.idle(20)
    assert pair.decode.free_blocks == ALL - 9
    pair.pass_time(481)
    pair.decode.drain()
    assert pair.decode.free_blocks == ALL
