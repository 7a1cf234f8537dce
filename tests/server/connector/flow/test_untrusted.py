"""What a client, or a broken router, may write into `kv_transfer_params`: nothing of it pins, parks or reads anything."""

import copy
import time

import pytest
from engine_core import cold, text

from bidikv_server import wire

OPENING = text(1, 100)
ALL = 63


def leg(**changes):
    """Params with a `bidikv` object that is well formed but for `changes`."""
    ours = {
        "v": wire.VERSION,
        "conversation": "c",
        "salt": "tenant",
        "sources": [],
        "retain_s": 60.0,
    } | changes
    return {"bidikv": ours}


JUNK = {
    "empty": {},
    "unknown key": {"x": 1},
    "no object": {"bidikv": 1},
    "empty object": {"bidikv": {}},
    "another version": leg(v=99),
    "a version that is no number": leg(v="1"),
    "no conversation": leg(conversation=None),
    "empty conversation": leg(conversation=""),
    "salt that is no text": leg(salt=3),
    "sources that are no list": leg(sources="127.0.0.1:1"),
    "sources that are no text": leg(sources=[1]),
    "retention that is no number": leg(retain_s="ever"),
    "no retention": leg(retain_s=0),
    "negative retention": leg(retain_s=-1e300),
    "negative infinity": leg(retain_s=float("-inf")),
}
PREFILL_ONLY = {
    "sources that are no addresses": leg(
        sources=["", ":", "host", "host:port", "127.0.0.1:99999", "\0", "ü:1"]
    ),
    "a forged handle": {
        "remote_block_ids": [[1, 2, 3, 4, 5, 6, 7]],
        "remote_engine_id": "e",
        "remote_request_id": "r",
        "remote_host": "127.0.0.1",
        "remote_port": 1,
        "remote_num_tokens": 100,
    },
}


@pytest.mark.parametrize("junk", JUNK.values(), ids=JUNK.keys())
def test_junk_pins_nothing_on_decode(start, junk):
    """The request is answered, its blocks are free when it has ended, and the index holds none of them (F9)."""
    pair = start()
    answer = pair.decode.finish(pair.decode.add(OPENING, 10, copy.deepcopy(junk)))
    assert answer.tokens == cold(OPENING, 10)
    pair.decode.drain()
    pair.decode.idle(2)
    assert pair.decode.free_blocks == ALL
    assert len(pair.decode.side._decode._index._index) == 0
    assert pair.decode.scheduler.reset_prefix_cache()


@pytest.mark.parametrize("junk", (JUNK | PREFILL_ONLY).values(), ids=(JUNK | PREFILL_ONLY).keys())
@pytest.mark.parametrize("is_prefill_leg", [True, False], ids=["prefill leg", "plain request"])
def test_junk_parks_and_reads_nothing_on_prefill(start, junk, is_prefill_leg):
    """The prompt is computed, within a bounded number of steps."""
    pair = start(prefill={"bidikv": {"lookup_timeout_s": 0.15}})
    params = copy.deepcopy(junk) | ({"do_remote_decode": True} if is_prefill_leg else {})
    request = pair.prefill.add(OPENING, 1, params)
    answer = pair.prefill.finish(request, steps=10)
    assert answer.tokens == cold(OPENING, 1)
    assert pair.prefill.transport.pairs == {}
    if is_prefill_leg:
        assert answer.reuse[1:] == (0, 0, 100)
        # As vLLM's own: the blocks wait for decode to read them, for the length of a lease.
        pair.abandon()
    assert pair.prefill.free_blocks == ALL
    assert not pair.prefill.side._prefill._turns


@pytest.mark.parametrize("junk", [{"x": 1}, leg(), {"do_remote_decode": False}], ids=["x", "ours", "false"])
def test_stock_decode_pins_whatever_brought_params_for_ever(start, junk):
    """F9: a request that was never in a batch of the connector's has no timer, so not even the TTL frees its blocks."""
    pair = start(stock=True)
    pair.decode.finish(pair.decode.add(OPENING, 10, junk))
    for _ in range(3):
        pair.decode.idle(3)
        pair.pass_time(100_000)
    assert pair.decode.free_blocks == ALL - 7
    assert not pair.decode.transport.sending
    assert not pair.decode.scheduler.reset_prefix_cache()


def test_stock_prefill_reads_whatever_blocks_a_client_names(start):
    """F9: a forged handle fetches another conversation's KV, and the answer is made from it."""
    pair = start(stock=True)
    _, answer = pair.turn(text(7, 100), 40)
    pair.forget()
    forged = answer.params | {"remote_request_id": "guessed"}
    request = pair.prefill.add(OPENING, 1, forged)
    assert pair.prefill.finish(request).tokens != cold(OPENING, 1)
    assert [remote for _, remote in pair.prefill.transport.pairs[request]]


INCOMPLETE = {
    "no block ids": {"do_remote_prefill": True},
    "empty block ids": {"do_remote_prefill": True, "remote_block_ids": []},
    "no engine": {"do_remote_prefill": True, "remote_block_ids": [[1, 2, 3, 4, 5, 6, 7]]},
}


@pytest.mark.parametrize("junk", INCOMPLETE.values(), ids=INCOMPLETE.keys())
@pytest.mark.parametrize("role", ["prefill", "decode"])
def test_an_incomplete_handle_is_no_handle(start, role, junk):
    """`do_remote_prefill` without saying from where: computed, neither an engine's death nor a request parked for ever."""
    engine = getattr(start(), role)
    answer = engine.finish(engine.add(OPENING, 5, copy.deepcopy(junk)), steps=50)
    assert answer.tokens == cold(OPENING, 5)


@pytest.mark.parametrize("junk", INCOMPLETE.values(), ids=INCOMPLETE.keys())
def test_stock_dies_of_an_incomplete_handle_or_waits_for_ever(start, junk):
    """F9: the assertion ends vLLM's engine core, and with it every request that it serves."""
    pair = start(stock=True)
    request = pair.decode.add(OPENING, 5, copy.deepcopy(junk))
    if junk.get("remote_block_ids"):
        pair.decode.idle(100)
        assert pair.decode.answers[request].finish is None
    else:
        with pytest.raises(AssertionError):
            pair.decode.idle(100)


TTL_S = 0.2


def expires(pair):
    """Whether what decode retained is called expired by the first who asks after the engine's own TTL."""
    asked_at_s = time.monotonic() + 1.5 * TTL_S
    while time.monotonic() < asked_at_s:
        time.sleep(0.01)
    return pair.prefill.finish(pair.ask(OPENING + text(2, 40))).reuse[0] == "expired"


@pytest.mark.parametrize(
    "retain_s",
    [
        480,
        1e300,
        float("inf"),
        2**63 - 1,
    ],
)
@pytest.mark.parametrize("protect", [False, True], ids=["soft", "protected"])
def test_no_request_is_retained_longer_than_the_engine_allows(start, retain_s, protect):
    """The engine's TTL bounds whatever the router or a client asks for, and costs no block meanwhile."""
    pair = start(decode={"ttl_s": TTL_S})
    pair.decode.finish(pair.decode_alone(OPENING, 10, retain_s=retain_s, protect=protect))
    pair.decode.idle(2)
    assert pair.decode.free_blocks == ALL
    assert expires(pair)


def children(pair, params, count=3):
    """The requests that vLLM makes of one with `n`: equal but for their names."""
    return [
        pair.decode.add(OPENING, 20, copy.deepcopy(params), name=f"{index}_parent") for index in range(count)
    ]


def test_every_choice_of_a_request_is_answered_and_pins_nothing(start):
    """F21: `n` > 1 becomes `n` requests with one conversation; each is answered, and every block is free again."""
    pair = start()
    first = pair.prefill.finish(pair.ask(OPENING))
    params = first.params | pair.decode_params()
    names = children(pair, params)
    pair.decode.finish(*names)
    assert [pair.decode.answers[name].tokens for name in names] == [cold(OPENING, 20)] * 3
    pair.quiet()
    pair.decode.drain()
    pair.prefill.drain()
    assert (pair.prefill.free_blocks, pair.decode.free_blocks) == (ALL, ALL)
    again = OPENING + cold(OPENING, 20) + text(2, 30)
    assert pair.prefill.finish(pair.ask(again)).tokens == cold(again, 1)


def test_stock_pins_every_choice_until_its_ttl(start):
    """F21: the handle of one choice at most is used; the blocks of all wait for the TTL."""
    pair = start(stock=True)
    first = pair.prefill.finish(pair.ask(OPENING))
    names = children(pair, first.params)
    pair.decode.finish(*names)
    handle = pair.decode.answers[names[0]].params
    pair.decode.idle(2)
    pair.prefill.idle(2)
    pair.forget()
    used = pair.prefill.finish(pair.ask(OPENING + cold(OPENING, 20) + text(2, 30), handle=handle))
    assert used.finish == "length"
    pair.decode.idle(10)
    assert sorted(pair.decode.scheduler.requests) == names[1:]
    assert pair.decode.free_blocks < ALL
    pair.pass_time(481)
    pair.decode.drain()
    assert pair.decode.free_blocks == ALL
