"""The index service under fuzz: whatever arrives, it answers the next honest question."""

import random

import msgspec
import pytest

from bidikv_server.connector import index_service, messages
from bidikv_server.connector.core import digests
from bidikv_server.connector.index_service import IndexService
from bidikv_server.reasons import Reason

MESSAGES = 100_000
CHAIN = digests.chain(b"seed", range(32), block_size=4, blocks=8)
LOOKUP = messages.Lookup(messages.VERSION, "identity", "c", b"".join(CHAIN.digests))
CONNECTION = {"engine_id": "e", "host": "h", "port": 1, "tp_size": 1, "dcp_size": 1, "pp_size": 1}


def hostile(rng, honest):
    """Random bytes, or an honest message cut, flipped or doubled."""
    kind = rng.randrange(4)
    data = bytearray(rng.choice(honest))
    if kind == 0:
        return rng.randbytes(rng.randrange(200))
    if kind == 1:
        return bytes(data[: rng.randrange(len(data))])
    for _ in range(rng.randrange(1, 4)):
        data[rng.randrange(len(data))] = rng.randrange(256)
    return bytes(data) * (2 if kind == 3 else 1)


def test_a_hundred_thousand_hostile_messages():
    """No bytes stop the index, change what it holds, or make it confirm a read of nothing."""
    rng = random.Random(7)
    index = IndexService("identity", CONNECTION, 64)
    index.retain("c", CHAIN, range(8), ttl_s=480.0)
    question = messages.encode(LOOKUP)
    found = messages.decode(index.answer(question))
    check = messages.encode(
        messages.Validate(messages.VERSION, found.epoch, found.block_ids, found.generations)
    )
    renewal = messages.encode(messages.Renew(messages.VERSION, "c", 60.0))
    honest = [question, check, renewal, messages.encode(messages.Verdict(messages.VERSION, valid=True))]
    for _ in range(MESSAGES):
        reply = index.answer(hostile(rng, honest))
        assert reply is None or messages.decode(reply) is not None
    again = messages.decode(index.answer(question))
    assert (again.block_ids, again.reason) == (list(range(8)), Reason.HIT)
    assert messages.decode(index.answer(check)).valid
    asked, lost, held = index.take_counts()
    assert asked["malformed"] > MESSAGES / 2
    assert (lost, held) == ({}, 8)


class Clock:
    """Seconds that pass when a test says so."""

    def __init__(self, monkeypatch):
        self.now_s = 1000.0
        monkeypatch.setattr(index_service.time, "monotonic", lambda: self.now_s)


@pytest.fixture
def clock(monkeypatch):
    return Clock(monkeypatch)


def ask(index, message):
    return messages.decode(index.answer(messages.encode(message)))


def test_a_peer_renews_and_releases(clock):
    """The index acts at once; the engine's thread hears of it when it asks, once."""
    index = IndexService("identity", CONNECTION, 64, max_ttl_s=100.0)
    index.retain("c", CHAIN, range(8), ttl_s=10.0)
    clock.now_s += 9
    assert ask(index, messages.Renew(messages.VERSION, "c", 1e9)).valid
    assert index.take_changes() == {"c": clock.now_s + 100.0}
    assert index.take_changes() == {}
    clock.now_s += 99
    assert ask(index, LOOKUP).reason == Reason.HIT
    assert ask(index, messages.Release(messages.VERSION, "c")).valid
    assert index.take_changes() == {"c": None}
    assert ask(index, LOOKUP).reason == Reason.RELEASED
    assert not ask(index, messages.Release(messages.VERSION, "c")).valid
    assert not ask(index, messages.Renew(messages.VERSION, "c", 5.0)).valid
    assert index.take_changes() == {}
    assert index.take_counts()[0] == {"renew": 2, "release": 2, "lookup": 2}


@pytest.mark.parametrize("ttl_s", [0.0, -1.0, float("nan")])
def test_a_senseless_renewal_changes_nothing(ttl_s):
    """It is counted as malformed and gets no answer."""
    index = IndexService("identity", CONNECTION, 64)
    index.retain("c", CHAIN, range(8), ttl_s=10.0)
    assert index.answer(messages.encode(messages.Renew(messages.VERSION, "c", ttl_s))) is None
    assert (index.take_changes(), index.take_counts()[0]) == ({}, {"malformed": 1})


def test_a_new_turn_outdates_what_a_peer_asked_for():
    """A release that the engine has not heard of must not end the protection of the turn after it."""
    index = IndexService("identity", CONNECTION, 64)
    index.retain("c", CHAIN, range(8), ttl_s=10.0)
    ask(index, messages.Release(messages.VERSION, "c"))
    index.retain("c", CHAIN, range(8), ttl_s=10.0)
    assert index.take_changes() == {}


def test_a_turn_that_may_have_been_given_up_outdates_nothing():
    """What a peer asked for still reaches the engine's thread."""
    index = IndexService("identity", CONNECTION, 64)
    index.retain("c", CHAIN, range(8), ttl_s=10.0)
    ask(index, messages.Release(messages.VERSION, "c"))
    index.retain("c", CHAIN, range(8), ttl_s=10.0, complete=False)
    assert index.take_changes() == {"c": None}


def test_sweeping_forgets_what_nobody_asks_for(clock):
    """Expired digests are dropped without a lookup, and not more often than twice a second."""
    index = IndexService("identity", CONNECTION, 64)
    index.sweep()
    index.retain("c", CHAIN, range(8), ttl_s=0.1)
    clock.now_s += 0.2
    index.sweep()
    assert index.take_counts()[2] == 8
    clock.now_s += 0.3
    index.sweep()
    assert index.take_counts()[1:] == ({"expired": 8}, 0)


def test_an_older_peer_is_told_its_version():
    """Also when its messages have other fields than ours."""
    index = IndexService("identity", CONNECTION, 64)
    for data in (
        messages.encode(messages.Lookup(1, "identity", "c", b"")),
        msgspec.msgpack.encode(["lookup", 1]),
        msgspec.msgpack.encode(["a kind of its own", 7, {"x": 1}]),
    ):
        reply = messages.decode(index.answer(data))
        assert f"version {messages.VERSION}" in reply.message
    assert index.take_counts()[0] == {"refused": 3}


def test_readers_learn_of_a_new_registration():
    """A decode engine that slept registers its memory anew; a read with the old registration would miss it."""
    registrations = iter([0, 3])
    index = IndexService("identity", CONNECTION, 64, registration=lambda: next(registrations))
    assert [ask(index, LOOKUP).registration for _ in range(2)] == [0, 3]
