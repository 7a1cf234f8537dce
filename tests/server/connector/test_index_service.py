"""The index service under fuzz: whatever arrives, it answers the next honest question."""

import random

from bidikv_server.connector import messages
from bidikv_server.connector.index_service import IndexService
from bidikv_server.reasons import Reason

MESSAGES = 100_000
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
    digests = [bytes([n]) * 32 for n in range(8)]
    index.retain("c", digests, range(8), ttl_s=480.0)
    question = messages.encode(messages.Lookup(messages.VERSION, "identity", "c", b"".join(digests)))
    found = messages.decode(index.answer(question))
    check = messages.encode(
        messages.Validate(messages.VERSION, found.epoch, found.block_ids, found.generations)
    )
    honest = [question, check, messages.encode(messages.Verdict(messages.VERSION, valid=True))]
    for _ in range(MESSAGES):
        reply = index.answer(hostile(rng, honest))
        assert reply is None or messages.decode(reply) is not None
    again = messages.decode(index.answer(question))
    assert (again.block_ids, again.reason) == (list(range(8)), Reason.HIT)
    assert messages.decode(index.answer(check)).valid
    asked, lost, held = index.take_counts()
    assert asked["malformed"] > MESSAGES / 2
    assert (lost, held) == ({}, 8)
