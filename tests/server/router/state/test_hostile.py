"""Values on the server that no router has written: left out, counted, replaced when in the way, never an error."""

import random
import struct

import pytest

from bidikv_server.router.state.codec import holder_name

from .conftest import SCOPE, prompt
from .test_shared import A, B, turn

pytestmark = pytest.mark.anyio

KINDS = [b":c:", b":t:", b":h:", b":r:", b":z"]


@pytest.fixture
async def pair(server, routers):
    """Two routers, the first of which has had two turns; and the server's client."""
    one, two = await routers(server.url), await routers(server.url)
    await turn(one, "s", "a")
    await turn(one, "s", "a", "b")
    return one, two, server.client()


def keys_of(client, kind):
    return [key for key in client.scan_iter() if key.startswith(b"bidikv:1" + kind)]


def overwrite(client, key, how):
    """Put a value of another type, or of another shape, in a key's place."""
    kind = client.type(key)
    if how == "type":
        client.delete(key)
        (client.sadd if kind != b"set" else client.set)(key, b"odd")
    elif kind == b"hash":
        for field in client.hkeys(key):
            client.hset(key, field, how)
    elif kind == b"list":
        client.delete(key)
        client.rpush(key, how, how)
    elif kind == b"zset":
        client.zadd(key, {how: 1e300})
    else:
        client.set(key, how)


VALUES = ["type", b"", b"x", b"\0" * 16, b"\xff" * 40, b"\xff" * 64, b"[" * 5000, b"[1,2]", b"9" * 400]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("how", VALUES, ids=lambda value: str(value)[:12])
async def test_odd_values(pair, kind, how):
    """Every call still answers, nothing odd comes out of it, and the next turns put things right."""
    one, two, client = pair
    for key in keys_of(client, kind):
        overwrite(client, key, how)
    for router in (two, one):
        found = await router.store.find(SCOPE, "s", prompt("a", "b", "c"))
        assert {held.holder for held in (found.ancestor, found.own, found.latest) if held} <= {A}
        await router.store.find(SCOPE, None, prompt("a", "b", "c"))
        await router.store.known(found.key)
        await router.store.turns(found.key)
        await router.store.page(limit=9)
        await router.store.page(limit=9, tenant="t")
    # Names of conversations that are gone are no wonder.
    if kind not in {b":t:", b":z"} or len(how) % 16:
        assert two.metric("bad_values_total") > 0
    for contents in ("abc", "abcd"):
        await turn(two, "s", *contents, holder=B)
    found = await one.store.find(SCOPE, "s", prompt(*"abcde"))
    assert (found.own.depth, found.own.holder) == (4, B)
    assert (await one.store.known(found.key)).records
    await one.store.forget(found.key)
    assert (await two.store.find(SCOPE, "s", prompt("a"))).source is None
    assert one.up
    assert two.up


async def test_a_holder_that_is_not_what_its_name_says(pair):
    """A changed holder is nobody's; one that was put there whole names an engine, and the plan knows none such."""
    _, two, client = pair
    (key,) = keys_of(client, b":h:")
    client.set(key, b'["http://evil",[["i","evil:1"]]]')
    found = await two.store.find(SCOPE, "s", prompt("a", "b", "c"))
    assert found.source is None
    assert two.metric("bad_values_total") > 0


async def test_a_turn_of_another_depth(pair):
    """A record under a digest whose prompt has another length is not believed."""
    _, two, client = pair
    (key,) = keys_of(client, b":c:")
    for field, record in client.hgetall(key).items():
        if len(field) == 16:
            client.hset(key, field, record[:16] + struct.pack(">I", 9) + record[20:])
    found = await two.store.find(SCOPE, "s", prompt("a", "b", "c"))
    assert found.ancestor is None
    assert found.own is None


async def test_pointers_into_nothing(pair):
    """A turn whose conversation is gone is not found, nor are ones that point at each other's conversations."""
    _, two, client = pair
    for key in keys_of(client, b":t:"):
        client.set(key, bytes(16) + b"x" * 16)
    assert (await two.store.find(SCOPE, None, prompt("a", "b", "c"))).source is None


@pytest.mark.parametrize("seed", range(4))
async def test_noise(pair, seed):
    """Random bytes in random places."""
    one, two, client = pair
    chance = random.Random(seed)
    for _ in range(30):
        key = chance.choice(client.keys())
        overwrite(client, key, chance.choice([*VALUES, chance.randbytes(chance.choice([4, 16, 17, 40, 45]))]))
        router, session = chance.choice([one, two]), chance.choice(["s", "t", None])
        contents = chance.choice(["a", "ab", "abc", "x"])
        match = await turn(router, session, *contents, holder=chance.choice([A, B]))
        await router.store.known(match.key)
        await router.store.page(limit=3)
        await router.store.turns(match.key)
        if chance.random() < 0.2:
            await router.store.forget(match.key)
    assert one.up
    assert two.up


def test_holders_have_their_digest_as_name():
    """So that a name cannot come to mean another engine."""
    assert holder_name(b"a") != holder_name(b"b")
    assert len(holder_name(b"")) == 16
