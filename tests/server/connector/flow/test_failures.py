"""Reads that fail, wholly, in part or after the fact: recomputed, never believed, and never seen by another request."""

import pytest
from engine_core import BLOCK, cold, text
from vllm.v1.request import RequestStatus

from bidikv_server.connector.side_channel import Server

OPENING = text(1, 100)
CACHING = pytest.mark.parametrize("caching", [True, False], ids=["prefix cache", "no prefix cache"])


def history(pair):
    """A conversation's second prompt (160 tokens, of which decode holds 128), nothing of it left on prefill."""
    _, answer = pair.turn(OPENING)
    pair.forget()
    return OPENING + answer.tokens + text(2, 20)


def reading(pair, prompt, hold):
    """A prefill request whose read has got as far as `hold`; the request and the blocks it reads into."""
    for transport in pair.prefill.transports:
        transport.hold = hold
    request = pair.ask(prompt)
    pair.prefill.run(until=lambda: request in pair.prefill.transport.pairs)
    pair.prefill.idle(1)
    assert pair.prefill.status(request) is RequestStatus.WAITING_FOR_REMOTE_KVS
    return request, pair.prefill.blocks(request)


def take_everything(pair):
    """Decode serves a request that needs every block of its pool."""
    request = pair.decode.add(text(8, 62 * BLOCK), 8, None)
    answer = pair.decode.finish(request)
    assert answer.tokens == cold(text(8, 62 * BLOCK), 8)


def never_hashed_until_computed(pair, request, blocks):
    """Step on; whatever the prefix cache would hand out shows the prompt's own KV, in every step."""
    prompt = pair.prefill.request(request).prompt_token_ids
    for _ in range(30):
        if pair.prefill.answers[request].finish:
            return
        for index, block_id in enumerate(blocks):
            if pair.prefill.hashed([block_id]):
                right = pair.prefill.device.shows([*blocks[:index], block_id], prompt[: (index + 1) * BLOCK])
                assert right, f"block {index} is in the prefix cache with bytes that are not the prompt's"
        pair.prefill.idle(1)
    raise AssertionError("the request does not end")


@CACHING
def test_a_failed_read_is_recomputed(start, caching):
    """The transport's error costs the reuse: no wrong token, no cached block of it, no second read."""
    pair = start(caching=caching)
    prompt = history(pair)
    request, blocks = reading(pair, prompt, "read")
    assert pair.prefill.hashed(blocks) == []
    pair.prefill.transport.failing, pair.prefill.transport.hold = True, None
    never_hashed_until_computed(pair, request, blocks)
    answer = pair.prefill.answers[request]
    assert answer.reuse == ("transfer_failed", 0, 0, 160)
    assert answer.tokens == cold(prompt, 1)
    assert list(pair.prefill.transport.pairs) == [request]
    assert pair.prefill.counted("readback_blocks") == {"rejected": 8}
    assert pair.decode.finish(pair.reply(prompt, 10, answer)).tokens == cold(prompt, 10)


@CACHING
def test_a_failed_read_keeps_prefills_own_hit(start, caching):
    """What prefill had in its own cache before the read is used after its failure."""
    pair = start(caching=caching)
    _, answer = pair.turn(OPENING)
    pair.prefill.drain()
    prompt = OPENING + answer.tokens + text(2, 20)
    pair.prefill.transport.failing = True
    again = pair.prefill.finish(pair.ask(prompt))
    local = 96 if caching else 0
    assert again.reuse == ("transfer_failed", 0, local, 160 - local)
    assert again.tokens == cold(prompt, 1)


@pytest.mark.parametrize("failing", [(0,), (1,), (0, 1)], ids=["first rank", "second rank", "both ranks"])
@CACHING
def test_one_failed_rank_is_a_failed_read(start, failing, caching):
    """With two ranks the blocks count only if both have read and confirmed them, in whatever order they say so."""
    pair = start(ranks=2, caching=caching)
    prompt = history(pair)
    request, blocks = reading(pair, prompt, "read")
    slow, fast = pair.prefill.transports
    slow.failing, fast.failing = 0 in failing, 1 in failing
    slow.hold, fast.hold = "read", None
    pair.prefill.idle(3)
    assert pair.prefill.status(request) is RequestStatus.WAITING_FOR_REMOTE_KVS
    assert pair.prefill.hashed(blocks) == []
    slow.hold = None
    never_hashed_until_computed(pair, request, blocks)
    answer = pair.prefill.answers[request]
    assert answer.reuse == ("transfer_failed", 0, 0, 160)
    assert answer.tokens == cold(prompt, 1)


def rank_after_rank(pair, prompt, *, second_fails):
    """A read that ends on the first rank steps before it ends on the second."""
    request, _ = reading(pair, prompt, "validation")
    first, second = pair.prefill.transports
    first.hold = None
    pair.prefill.run(until=lambda: not first.reads)
    assert pair.prefill.status(request) is RequestStatus.WAITING_FOR_REMOTE_KVS
    second.hold, second.failing = None, second_fails
    if second_fails:
        second.reads[0].copied = False
    return pair.prefill.finish(request)


def test_two_good_ranks_are_one_hit(start):
    """In the account, and in the answer, whichever ends first."""
    pair = start(ranks=2)
    prompt = history(pair)
    answer = rank_after_rank(pair, prompt, second_fails=False)
    assert answer.reuse == ("hit", 128, 0, 32)
    assert answer.tokens == cold(prompt, 1)


@pytest.mark.parametrize("second_fails", [False, True], ids=["good", "failed"])
def test_a_read_of_two_ranks_is_counted_once(start, second_fails):
    """The metrics count reads, not ranks: verified, or rejected, never both and never twice."""
    pair = start(ranks=2)
    rank_after_rank(pair, history(pair), second_fails=second_fails)
    assert pair.prefill.counted("readback_blocks") == {"rejected" if second_fails else "verified": 8}


@CACHING
@pytest.mark.parametrize("aborted", [False, True], ids=["request goes on", "request aborted"])
@pytest.mark.parametrize("ranks", [1, 2])
def test_blocks_of_an_overdue_read_are_nobodys_until_it_stops_writing(start, ranks, aborted, caching):
    """The request recomputes elsewhere at once; the late bytes land in blocks that no other request was given."""
    pair = start(ranks=ranks, caching=caching)
    prompt = history(pair)
    prefill = pair.prefill
    request, blocks = reading(pair, prompt, "read")
    if aborted:
        prefill.abort(request)
    for transport in prefill.transports:
        transport.hold = "overdue"
    if not aborted:
        assert prefill.finish(request).reuse == ("transfer_failed", 0, 0, 160)
        assert prefill.answers[request].tokens == cold(prompt, 1)
        pair.abandon()
    prefill.idle(2)
    assert request not in prefill.scheduler.requests
    assert prefill.free_blocks == 63 - len(blocks)
    long = text(6, prefill.free_blocks * BLOCK - 8)
    rival = prefill.add(long, 6, None)
    prefill.step()
    # One rank after the other lets go; the bytes come with the first.
    for transport in prefill.transports:
        assert not set(blocks) & set(prefill.blocks(rival))
        transport.hold = None
        prefill.step()
    assert prefill.finish(rival).tokens == cold(long, 6)
    prefill.idle(2)
    assert prefill.free_blocks == 63
    assert prefill.hashed(blocks) == []


@CACHING
@pytest.mark.parametrize(
    "when", ["read", "validation"], ids=["before the bytes move", "after the bytes moved"]
)
def test_blocks_handed_out_during_a_read_are_not_believed(start, when, caching):
    """Decode serves another request from them between lookup and validation: the verdict is no, all is recomputed."""
    pair = start(caching=caching)
    prompt = history(pair)
    request, blocks = reading(pair, prompt, when)
    take_everything(pair)
    pair.prefill.transport.hold = None
    never_hashed_until_computed(pair, request, blocks)
    answer = pair.prefill.answers[request]
    assert answer.reuse == ("validation_failed", 0, 0, 160)
    assert answer.tokens == cold(prompt, 1)
    assert pair.prefill.counted("readback_blocks") == {"rejected": 8}


def test_the_read_that_was_not_believed_had_foreign_bytes(start):
    """The race is real in this set-up: what was read belongs to decode's other request."""
    pair = start()
    prompt = history(pair)
    request, blocks = reading(pair, prompt, "read")
    take_everything(pair)
    pair.prefill.transport.hold = "validation"
    pair.prefill.idle(1)
    assert not pair.prefill.device.shows(blocks, prompt[: len(blocks) * BLOCK])
    assert not pair.prefill.device.shows(blocks[:1], prompt[:BLOCK])
    pair.prefill.transport.hold = None
    assert pair.prefill.finish(request).tokens == cold(prompt, 1)


def stock_turn(start, **settings):
    """A stock pair after one turn: the next prompt, nothing of it left on prefill, and decode's handle."""
    pair = start(stock=True, **settings)
    _, answer = pair.turn(OPENING)
    pair.forget()
    return pair, OPENING + answer.tokens + text(2, 20), answer.params


def test_stock_answers_from_a_handle_that_was_used_before(start):
    """F3: the first read frees decode's blocks; a retry gets what decode wrote into them since, and believes it."""
    pair, prompt, handle = stock_turn(start)
    assert pair.prefill.finish(pair.ask(prompt, handle=handle)).tokens == cold(prompt, 1)
    pair.decode.drain()
    take_everything(pair)
    pair.abandon()
    pair.forget()
    retry = pair.prefill.finish(pair.ask(prompt, handle=handle))
    assert retry.tokens != cold(prompt, 1)


def test_stock_answers_from_expired_blocks_if_the_router_drops_the_expiry(start):
    """F4: without `remote_blocks_expiry_time` nobody asks whether decode still holds what it promised."""
    pair, prompt, handle = stock_turn(start)
    pair.pass_time(481)
    pair.decode.drain()
    take_everything(pair)
    late = pair.prefill.finish(pair.ask(prompt, handle=handle | {"remote_blocks_expiry_time": None}))
    assert late.tokens != cold(prompt, 1)


def test_stock_fails_a_request_whose_blocks_have_expired(start):
    """F5, F28: with vLLM's default policy a lost reuse is a failed request."""
    pair, prompt, handle = stock_turn(start, policy="fail")
    pair.pass_time(481)
    late = pair.prefill.finish(pair.ask(prompt, handle=handle))
    assert (late.finish, late.tokens) == ("error", [])


def test_our_prefill_refuses_the_policy_that_fails_requests(start):
    """F28: an engine that would make an error of a lost reuse does not start."""
    with pytest.raises(ValueError, match="kv_load_failure_policy"):
        start(prefill={"policy": "fail"})


def test_only_the_handed_out_blocks_are_lost(start):
    """Decode takes some of the retained blocks: the rest, before the first gap, is still pulled."""
    pair = start(decode={"blocks": 24})
    prompt = history(pair)
    # 23 blocks, 8 of them retained: 18 leave the last 3 of the retained ones to be taken.
    taken = pair.decode.finish(pair.decode.add(text(8, 18 * BLOCK - 1), 1, None))
    assert taken.tokens == cold(text(8, 18 * BLOCK - 1), 1)
    answer = pair.prefill.finish(pair.ask(prompt))
    assert answer.reuse == ("hit_evicted", 5 * BLOCK, 0, 160 - 5 * BLOCK)
    assert answer.tokens == cold(prompt, 1)


def test_decode_restarted_on_the_same_port_confirms_nothing(start):
    """Another start has other blocks under the same numbers; its epoch gives it away (F22)."""
    pair = start()
    prompt = history(pair)
    request, blocks = reading(pair, prompt, "validation")
    pair.restart_decode()
    # The new engine has turns of its own under the very same block numbers and generations.
    pair.decode.finish(pair.decode_alone(text(9, 140), 8, conversation="other"))
    pair.decode.idle(2)
    pair.prefill.transport.hold = None
    never_hashed_until_computed(pair, request, blocks)
    answer = pair.prefill.answers[request]
    assert answer.reuse == ("validation_failed", 0, 0, 160)
    assert answer.tokens == cold(prompt, 1)


def test_decode_restarted_before_the_lookup_holds_nothing(start):
    """The conversation is unknown to the new engine: a miss with a reason, and the next turn is a hit again."""
    pair = start()
    prompt = history(pair)
    pair.restart_decode()
    first, second = pair.turn(prompt)
    assert first.reuse == ("not_retained", 0, 0, 160)
    assert second.tokens == cold(prompt, 40)
    pair.forget()
    longer = prompt + second.tokens + text(3, 30)
    assert pair.prefill.finish(pair.ask(longer)).reuse[0] == "hit"


def test_decode_that_died_during_the_read_is_a_failed_transfer(start):
    """Its memory is gone and its index silent: recompute, within the bounds."""
    pair = start()
    prompt = history(pair)
    request, _ = reading(pair, prompt, "read")
    pair.decode.close()
    pair.prefill.transport.hold = None
    answer = pair.prefill.finish(request)
    assert answer.reuse == ("transfer_failed", 0, 0, 160)
    assert answer.tokens == cold(prompt, 1)


BRIEF = {"prefill": {"bidikv": {"lookup_timeout_s": 0.15}}}


def test_decode_that_died_after_the_read_cannot_confirm_it(start):
    """No verdict within the bound is a no: the bytes are dropped."""
    pair = start(prefill={"bidikv": {"read_timeout_s": 0.3}})
    prompt = history(pair)
    request, _ = reading(pair, prompt, "validation")
    pair.decode.close()
    pair.prefill.transport.hold = None
    answer = pair.prefill.finish(request)
    assert answer.reuse == ("validation_failed", 0, 0, 160)
    assert answer.tokens == cold(prompt, 1)


@pytest.mark.parametrize(
    ("reply", "reason", "patience"),
    [(None, "lookup_timeout", BRIEF), (b"not a message", "lookup_failed", {})],
    ids=["silent", "babbling"],
)
def test_an_index_that_does_not_answer_well_costs_a_recompute(start, reply, reason, patience):
    """One bounded wait, then the prompt is computed; vLLM is not told of a pull."""
    pair = start(**patience)
    prompt = history(pair)
    pair.decode.close()
    server = Server(pair.source, lambda _: reply)
    try:
        answer = pair.prefill.finish(pair.ask(prompt))
    finally:
        server.close()
    assert answer.reuse == (reason, 0, 0, 160)
    assert answer.tokens == cold(prompt, 1)
    assert pair.prefill.transport.pairs == {}


def test_an_index_that_is_gone_costs_a_recompute(start):
    """Nobody listens on the port."""
    pair = start(**BRIEF)
    prompt = history(pair)
    pair.decode.close()
    answer = pair.prefill.finish(pair.ask(prompt))
    assert answer.reuse == ("lookup_timeout", 0, 0, 160)
    assert answer.tokens == cold(prompt, 1)


def test_other_requests_run_while_a_lookup_is_under_way(start):
    """A slow index delays its own request only."""
    pair = start(prefill={"bidikv": {"lookup_timeout_s": 30.0}})
    prompt = history(pair)
    pair.decode.close()
    request = pair.ask(prompt)
    other = pair.prefill.add(text(7, 50), 5, None)
    for _ in range(10):
        pair.prefill.step()
    assert pair.prefill.answers[other].tokens == cold(text(7, 50), 5)
    assert pair.prefill.status(request) is RequestStatus.WAITING
    pair.prefill.abort(request)
    assert pair.prefill.free_blocks == 63


def test_an_index_that_refuses_costs_a_recompute(start):
    """Engines that differ in what decides a block's bytes exchange none (F24)."""
    pair = start(decode={"dtype": "bfloat16"})
    prompt = OPENING + text(2, 60)
    pair.decode.finish(pair.decode_alone(OPENING, 10))
    pair.decode.idle(2)
    answer = pair.prefill.finish(pair.ask(prompt))
    assert answer.reuse == ("incompatible", 0, 0, 160)
    assert answer.tokens == cold(prompt, 1)
