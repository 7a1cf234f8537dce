"""What one router commits, the others find: against a real server."""

import asyncio
from dataclasses import replace

import pytest
from fake_engine import eventually

from bidikv_server.reasons import Reason
from bidikv_server.router.core.conversations import Holder
from bidikv_server.router.core.digests import Chain, Digest, chain
from bidikv_server.router.core.engines import IndexInfo
from bidikv_server.router.core.history import TurnRecord
from bidikv_server.router.core.ids import ConversationKey, EngineUrl, Scope
from bidikv_server.router.core.kept import Kept
from bidikv_server.router.core.policy import Placement

from .conftest import SCOPE, prompt

pytestmark = pytest.mark.anyio

A = Holder(EngineUrl("http://a"), (IndexInfo("i", "a:1"), IndexInfo("j", "a:2")))
B = Holder(EngineUrl("http://b"))
RECORD = TurnRecord(
    turn=b"0123456789abcdef",
    reason=Reason.HIT,
    placement=Placement.HOME,
    prompt_tokens=100,
    remote_tokens=64,
    local_tokens=16,
    computed_tokens=20,
    diverged_at_token=None,
    prefill=None,
    decode=EngineUrl("http://a"),
    ttft_s=0.5,
    at_s=0.0,
)


async def turn(router, session, *contents, holder=A, scope=SCOPE):
    """One turn from plan to end; its place."""
    match = await router.store.find(scope, session, prompt(*contents, scope=scope))
    await router.store.commit(match, scope, replace(RECORD, turn=match.digest or b""), holder)
    return match


async def test_the_next_turn_at_another_router(server, routers):
    """It finds the last one, its engine and that engine's indexes, and hangs under it."""
    one, two = await routers(server.url), await routers(server.url)
    first = await turn(one, "s", "a")
    found = await turn(two, "s", "a", "b", "c", holder=B)
    assert found.key == first.key
    assert found.ancestor == found.own == found.latest
    assert found.ancestor.holder == A
    root, leaf = await one.store.turns(found.key)
    assert (leaf.parent, leaf.depth, leaf.holder) == (root.digest, 3, B)
    assert (await one.store.find(SCOPE, "s", prompt("a", "b", "c", "d", "e"))).own == leaf
    assert one.metric("bad_values_total") == two.metric("bad_values_total") == 0


async def test_without_a_name(server, routers):
    """A conversation that goes by its messages is the same one everywhere."""
    one, two = await routers(server.url), await routers(server.url)
    first = await turn(one, None, "a")
    found = await turn(two, None, "a", "b")
    assert (found.key, found.own.holder) == (first.key, A)
    short = chain({"prompt": "hi"}, SCOPE)
    match = await one.store.find(SCOPE, None, short)
    await one.store.commit(match, SCOPE, RECORD, B)
    assert (await two.store.find(SCOPE, None, short)).home.holder == B


@pytest.mark.parametrize(
    "other", [Scope("u", "m"), Scope("t", "n"), Scope("t", "m", cache_salt="x"), Scope("t", "m", adapter="x")]
)
async def test_scopes_are_apart(server, routers, other):
    """Another tenant's, model's or salt's session and text are found by nobody else."""
    one, two = await routers(server.url), await routers(server.url)
    mine = await turn(one, "s", "a")
    for session in ("s", None):
        found = await two.store.find(other, session, prompt("a", "b", scope=other))
        assert (found.source, found.key == mine.key) == (None, False)
    assert await two.store.known(mine.key, tenant="u") is None
    assert (await two.store.page(limit=9, tenant="u")).found == ()


async def test_a_foreign_conversation_is_not_even_looked_at(server, routers):
    """The server does the same for one as for a key that nobody has, so its time tells a tenant nothing."""
    one, two = await routers(server.url), await routers(server.url)
    mine = await turn(one, "s", "a")
    client, told = server.client(), []
    for key in (mine.key, ConversationKey("ab" * 16)):
        with client.monitor() as monitor:
            listening = monitor.listen()
            assert await two.store.known(key, tenant="u") is None
            client.ping()
            commands = []
            while (command := next(listening))["command"] != "PING":
                commands += [command["command"].split()[0]] if command["client_type"] == "lua" else []
        told.append(commands)
    assert told[0] == told[1] == ["EXISTS", "ZSCORE"]
    assert await two.store.known(mine.key, tenant="t") is not None


async def test_prefixes_keep_routers_apart(server, routers):
    """Two clusters may use one server."""
    one, two = await routers(server.url), await routers(server.url, state_prefix="other")
    await turn(one, "s", "a")
    assert (await two.store.find(SCOPE, "s", prompt("a"))).source is None


async def test_one_call_each(server, routers):
    """A turn costs one round trip to be found and one to be remembered, however long its history is."""
    router = await routers(server.url)
    await turn(router, "s", *map(str, range(200)))
    client = server.client()
    with client.monitor() as monitor:
        listening = monitor.listen()
        await turn(router, "s", *map(str, range(202)))
        client.ping()
        sent = []
        while (command := next(listening))["command"] != "PING":
            sent += [command["command"]] if command["client_type"] != "lua" else []
    ours = [name for command in sent if (name := command.split()[0]) not in {"HELLO", "CLIENT"}]
    assert ours == ["EVALSHA", "EVALSHA"]


async def test_very_long_prompts(server, routers):
    """Only the longest prefixes are sent; a turn among them is found at its depth."""
    one, two = await routers(server.url), await routers(server.url)
    digests = tuple(Digest(number.to_bytes(16, "big")) for number in range(1, 5000))
    match = await one.store.find(SCOPE, "s", Chain(digests[:4800], digests[0]))
    await one.store.commit(match, SCOPE, RECORD, A)
    found = await two.store.find(SCOPE, "s", Chain(digests, digests[0]))
    assert found.own.depth == 4800


async def test_everything_expires(server, routers):
    """Every key has a time to live, and it is the idle time, twice of it for holders."""
    router = await routers(server.url, conversation_idle_s=50.0)
    await turn(router, "s", "a")
    await turn(router, "s", "a", "b")
    client = server.client()
    keys = {key for key in client.scan_iter() if not key.endswith(b":up")}
    assert len(keys) == 7
    for key in keys:
        assert 49_000 < client.pttl(key) <= (100_000 if b":h:" in key else 50_000), key


async def test_nothing_but_ours_is_written(server, routers):
    """Texts, session names, tenants' and models' names: only the last two, and in what explains a turn."""
    router = await routers(server.url)
    scope = Scope("tenant-name", "model-name")
    await turn(router, "session-name", "secret text", scope=scope)
    client = server.client()
    dump = {key: client.dump(key) for key in client.scan_iter()}
    everything = b"".join([*dump, *dump.values()])
    assert b"secret" not in everything
    assert b"session-name" not in everything
    assert not any(b"tenant-name" in key for key in dump)


async def test_bounds_hold_on_the_server(server, routers):
    """Turns, records and conversations are trimmed there as in memory; nothing of them stays."""
    router = await routers(server.url, max_turns=2, max_records=3, max_conversations=2)
    for number in range(5):
        await turn(router, "s", *"abcde"[: number + 1])
    key = (await router.store.find(SCOPE, "s", prompt("a"))).key
    third, fourth = await router.store.turns(key)
    assert (third.parent, third.depth, fourth.parent) == (None, 4, third.digest)
    assert len((await router.store.known(key)).records) == 3
    client = server.client()
    assert len(client.keys("*:t:*")) == 2
    for session in "xyz":
        router.fake_s[0] += 1
        await turn(router, session, session)
    assert len(client.keys("*:c:*")) == len(client.keys("*:t:*")) == len(client.keys("*:r:*")) == 2
    assert (await router.store.find(SCOPE, "s", prompt("a"))).source is None


async def test_release_reaches_every_router(server, routers):
    """What one router forgets, the others forget when they look for it, also in their own memory."""
    one, two = await routers(server.url), await routers(server.url)
    match = await turn(one, "s", "a")
    await turn(two, "s", "a", "b", holder=B)
    assert {held.holder for held in await one.store.forget(match.key)} == {A, B}
    assert (await two.store.find(SCOPE, "s", prompt("a", "b", "c"))).source is None
    assert len(two.table) == 0
    assert await two.store.known(match.key) is None
    await turn(two, "s", "a", "b", "c")
    assert (await one.store.find(SCOPE, "s", prompt("a", "b", "c"))).own.depth == 3


async def test_admin_sees_all_routers(server, routers):
    """A conversation's records come from every router that had a turn of it; lists are by the last turn of all."""
    one, two = await routers(server.url), await routers(server.url)
    first = await turn(one, "s", "a")
    other = await turn(two, "o", "o", scope=Scope("u", "m"))
    one.fake_s[0] = two.fake_s[0] = 1e9 + 5
    await turn(two, "s", "a", "b")
    known = await one.store.known(first.key, tenant="t")
    assert [record.at_s for record in known.records] == [1e9, 1e9 + 5]
    assert replace(known.records[0], at_s=0.0) == replace(RECORD, turn=first.digest)
    page = await one.store.page(limit=1)
    assert ([(found.key, turns) for found, turns in page.found], page.more) == ([(first.key, 2)], True)
    page = await one.store.page(limit=1, before=page.found[-1][0].stamp)
    assert ([found.key for found, _ in page.found], page.more) == ([other.key], False)
    assert [found.key for found, _ in (await two.store.page(limit=9, tenant="u")).found] == [other.key]


async def test_a_turn_that_ran_alone(server, routers):
    """It is told about, and hides no turn that may be read back."""
    one, two = await routers(server.url), await routers(server.url)
    await turn(one, "s", "a")
    match = await turn(one, "s", "a", "b", holder=None)
    assert (await two.store.find(SCOPE, "s", prompt("a", "b"))).own.depth == 1
    assert len((await two.store.known(match.key)).records) == 2


async def test_a_client_that_leaves_at_the_end(server, routers):
    """A turn that ended is committed, though its request is cancelled meanwhile."""
    one, two = await routers(server.url), await routers(server.url)
    match = await one.store.find(SCOPE, "s", prompt("a"))
    committing = asyncio.ensure_future(one.store.commit(match, SCOPE, RECORD, A))
    await asyncio.sleep(0)
    committing.cancel()
    await asyncio.gather(committing, return_exceptions=True)
    await eventually(lambda: server.client().keys("*:c:*"))
    assert (await two.store.find(SCOPE, "s", prompt("a"))).own.holder == A


async def test_scripts_are_sent_once(server, routers):
    """The server gets a script's text when it does not know it, also after it was restarted."""
    router = await routers(server.url)
    await turn(router, "s", "a")
    server.client().script_flush()
    assert (await router.store.find(SCOPE, "s", prompt("a"))).own is not None
    assert router.up


async def test_responses_that_engines_keep(server, routers):
    """A response is found by the next router too, and by its tenant alone; the oldest go first."""
    one, two = await routers(server.url, max_responses=2), await routers(server.url)
    kept = Kept(EngineUrl("http://a"), ConversationKey("ab" * 16), Digest(b"0123456789abcdef"))
    one.store.keep_response("t", "resp_1", kept)
    assert await one.store.response("t", "resp_1") == kept
    await eventually(lambda: server.client().keys("*:k:*"))
    assert await two.store.response("t", "resp_1") == kept
    assert await two.store.response("u", "resp_1") is None
    assert await two.store.response("t", "resp_2") is None
    (key,) = server.client().keys("*:k:*")
    for odd in (b"", b"[]", b"[1,2,3]", b'["a","b","c"]', b"x" * 5000):
        server.client().set(key, odd)
        assert await two.store.response("t", "resp_1") is None
    assert two.metric("bad_values_total") == 4
    for number in range(2, 5):
        one.store.keep_response("t", f"resp_{number}", kept)
        await eventually(lambda number=number: server.client().zcard("bidikv:1:y") == min(number, 2))
    assert len(server.client().keys("*:k:*")) == 2
    assert one.up
