"""Whole turns through both schedulers: what is proven equal is pulled, and nothing else; stock pulls by position."""

import pytest
from engine_core import BLOCK, cold, text

OPENING = text(1, 100)
CACHING = pytest.mark.parametrize("caching", [True, False], ids=["prefix cache", "no prefix cache"])
STEPS = pytest.mark.parametrize("asynchronous", [False, True], ids=["synchronous", "asynchronous"])


def extended(answer, by=20):
    """The next prompt of a faithful client."""
    return OPENING + answer.tokens + text(2, by)


@CACHING
@STEPS
def test_a_faithful_turn_reads_every_whole_block(start, caching, asynchronous):
    """All whole blocks that decode retained are pulled, the answer is the cold one, and no block stays taken."""
    pair = start(caching=caching, asynchronous=asynchronous)
    _, answer = pair.turn(OPENING)
    pair.forget()
    prompt = extended(answer)
    first, second = pair.turn(prompt)
    assert first.reuse == ("hit", 128, 0, 32)
    assert second.tokens == cold(prompt, 40)
    assert first.tokens == second.tokens[:1]
    pair.prefill.drain()
    for engine in (pair.prefill, pair.decode):
        assert engine.free_blocks == 63


def test_what_was_pulled_enters_the_prefix_cache_under_the_right_tokens(start):
    """A pulled block is a cached block like any other: the next prompt finds it locally, with the right bytes."""
    pair = start()
    _, answer = pair.turn(OPENING)
    pair.forget()
    prompt = extended(answer)
    request = pair.ask(prompt)
    pair.prefill.transport.hold = "read"
    pair.prefill.idle(3)
    blocks = pair.prefill.blocks(request)
    assert pair.prefill.hashed(blocks) == []
    pair.prefill.transport.hold = None
    pair.prefill.finish(request)
    assert pair.prefill.hashed(blocks) == blocks
    assert pair.prefill.device.shows(blocks, prompt[: len(blocks) * BLOCK])
    again = pair.prefill.finish(pair.ask(prompt))
    assert again.reuse == ("local", 0, 144, 16)


def test_prefills_own_hit_is_not_pulled_again(start):
    """Only what lies beyond prefill's own prefix cache moves."""
    pair = start()
    _, answer = pair.turn(OPENING)
    pair.prefill.drain()
    request = pair.ask(extended(answer))
    assert pair.prefill.finish(request).reuse == ("hit", 32, 96, 32)
    assert len(pair.prefill.transport.pairs[request]) == 2


def planned(pair, request):
    """Decode's blocks that a request read, in prompt order."""
    return [remote for _, remote in pair.prefill.transport.pairs.get(request, [])]


EDITS = {
    "edited in the middle": (lambda prompt: [*prompt[:50], 7, *prompt[51:]], 48),
    "shortened in the middle": (lambda prompt: prompt[:70] + prompt[71:], 64),
    "shorter than what decode retained": (lambda prompt: prompt[:100], 96),
    "a fork of an earlier turn": (lambda prompt: prompt[:90] + text(9, 60), 80),
    "regenerated": (lambda prompt: prompt[:-60], 96),
}


@CACHING
@STEPS
@pytest.mark.parametrize(("edit", "proven"), EDITS.values(), ids=EDITS.keys())
def test_only_proven_blocks_are_planned(start, edit, proven, caching, asynchronous):
    """Whatever the client does to the history, the pulled blocks are the leading ones that it left alone (F1, F2)."""
    pair = start(caching=caching, asynchronous=asynchronous)
    _, answer = pair.turn(OPENING)
    retained = pair.decode.device.table(pair.decoded)
    pair.forget()
    prompt = edit(extended(answer))
    request = pair.ask(prompt)
    first = pair.prefill.finish(request)
    assert first.reuse[1:] == (proven, 0, len(prompt) - proven)
    assert first.tokens == cold(prompt, 1)
    assert planned(pair, request) == retained[: proven // BLOCK]
    second = pair.decode.finish(pair.reply(prompt, 30, first))
    assert second.tokens == cold(prompt, 30)


@pytest.mark.parametrize("edit", [edit for edit, _ in EDITS.values()], ids=EDITS.keys())
def test_stock_reads_by_position(start, edit):
    """Stock maps the last blocks that decode retained to the prompt's blocks, whatever the tokens: a wrong answer."""
    pair = start(stock=True)
    _, answer = pair.turn(OPENING)
    handle = answer.params
    retained = handle["remote_block_ids"][0]
    pair.forget()
    prompt = edit(extended(answer))
    request = pair.ask(prompt, handle=handle)
    first = pair.prefill.finish(request)
    assert planned(pair, request) == retained[-min(len(retained), -(-len(prompt) // BLOCK)) :]
    assert first.tokens != cold(prompt, 1)


def test_stock_is_right_when_the_history_only_grew(start):
    """So the made-up device is no judge that condemns everything: stock's one supported case is answered well."""
    pair = start(stock=True)
    _, answer = pair.turn(OPENING)
    pair.forget()
    prompt = extended(answer)
    first, second = pair.turn(prompt, handle=answer.params)
    assert first.tokens == cold(prompt, 1)
    assert second.tokens == cold(prompt, 40)


def test_a_turn_without_conversation_is_neither_looked_up_nor_retained(start):
    """Requests that the router did not mark go through as if there were no readback."""
    pair = start()
    plain = {"do_remote_decode": True, "do_remote_prefill": False}
    first = pair.prefill.finish(pair.prefill.add(OPENING, 1, plain))
    assert first.reuse == ("new_conversation", 0, 0, 100)
    second = pair.decode.finish(pair.decode.add(OPENING, 8, first.params))
    assert second.tokens == cold(OPENING, 8)
    pair.quiet()
    assert len(pair.decode.side._decode._index._index) == 0
    assert pair.decode.counted("retained_turns") == {}
    assert (pair.prefill.free_blocks, pair.decode.free_blocks) == (63, 63)


def test_another_tenants_equal_text_is_not_found(start):
    """The salt is part of every digest (F8)."""
    pair = start()
    _, answer = pair.turn(OPENING)
    pair.forget()
    pair.SALT = "another tenant"
    assert pair.prefill.finish(pair.ask(extended(answer))).reuse[1] == 0


def test_a_gain_below_the_threshold_is_left_alone_and_costs_nobody_anything(start):
    """Too little to be worth a transfer: computed, and the blocks stay readable for the next who asks (F17)."""
    pair = start(threshold=64)
    _, answer = pair.turn(OPENING)
    pair.forget()
    early = OPENING[:50] + text(4, 100)
    first = pair.prefill.finish(pair.ask(early))
    assert first.reuse == ("below_threshold", 0, 0, 150)
    assert pair.prefill.transport.pairs == {}
    again = pair.prefill.finish(pair.ask(extended(answer)))
    assert again.reuse == ("hit", 80, 48, 32)


def test_stock_throws_away_what_it_did_not_pull(start):
    """F17: below its threshold stock reads nothing and yet tells decode to free the turn's blocks."""
    pair = start(stock=True, threshold=64)
    _, answer = pair.turn(OPENING)
    pair.abandon()
    assert len(pair.decode.scheduler.requests) == 1
    # Prefill's own cache holds 96 of the 139 tokens: 43 are not worth a pull.
    request = pair.ask(extended(answer), handle=answer.params)
    pair.prefill.finish(request)
    assert planned(pair, request) == []
    pair.decode.idle(1)
    assert pair.decode.scheduler.requests == {}


@CACHING
@pytest.mark.parametrize("failing", [False, True], ids=["good read", "failed read"])
@pytest.mark.parametrize("own", [False, True], ids=["nothing local", "a local hit"])
def test_vllms_own_count_of_cached_tokens_is_ours(start, caching, failing, own):
    """What decode reports as `cached_tokens` is what prefill did not compute (F29), also when a read was dropped."""
    pair = start(caching=caching)
    _, answer = pair.turn(OPENING)
    pair.abandon() if own else pair.forget()
    pair.prefill.transport.failing = failing
    first = pair.prefill.finish(pair.ask(extended(answer)))
    _, remote, local, _ = first.reuse
    assert first.params["remote_prefill_cached_tokens"] == remote + local
    assert (remote == 0) == failing
    assert (local == 96) == (own and caching)


def test_a_handle_of_stock_bidirectional_mode_cannot_be_asked_for(start):
    """The two would pull into each other's requests: the connector names the key to remove (F23)."""
    with pytest.raises(ValueError, match="bidirectional_kv_xfer: remove it"):
        start(prefill={"extra": {"bidikv": {"role": "prefill"}, "bidirectional_kv_xfer": True}})
