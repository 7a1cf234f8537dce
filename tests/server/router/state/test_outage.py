"""The server is away, dies, hangs, comes back, refuses: the router goes on, and knows again what it may know."""

import asyncio
import logging
import time

import pytest
from fake_engine import eventually
from state_server import Proxy

from bidikv_server.router.core.ids import session_key
from bidikv_server.router.state import outage
from bidikv_server.router.state.connection import Script, StateServer, StateUnavailable

from .conftest import SCOPE, prompt
from .test_shared import RECORD, A, B, turn

pytestmark = pytest.mark.anyio
OUTCOMES = ("ok", "failed", "cancelled")


@pytest.fixture(autouse=True)
def soon(monkeypatch):
    """Looks for the server follow each other quickly."""
    monkeypatch.setattr(outage, "_FIRST_LOOK_S", 0.02)
    monkeypatch.setattr(outage, "_LONGEST_WAIT_S", 0.1)


def told(caplog, level=logging.WARNING):
    return [record.getMessage() for record in caplog.records if record.levelno == level]


async def back(*routers):
    await eventually(lambda: all(router.up for router in routers), within_s=20)


async def test_away_at_start(processes, routers, caplog):
    """Routers start, serve from their own memory, and share as soon as the server is there."""
    process = processes(running=False)
    one, two = await routers(process.url), await routers(process.url)
    assert not one.up
    await turn(one, "s", "a")
    assert (await one.store.find(SCOPE, "s", prompt("a", "b"))).own.holder == A
    assert (await two.store.find(SCOPE, "s", prompt("a", "b"))).source is None
    assert len(told(caplog)) == 2
    assert f"the shared state at {process.url} is down" in told(caplog)[0]
    process.start()
    await back(one, two)
    assert (await two.store.find(SCOPE, "s", prompt("a", "b"))).own.holder == A
    assert one.metric("written_back_total") == 1
    assert (await two.store.page(limit=9)).found[0][1] == 1


async def test_dies_and_comes_back_empty(processes, routers, caplog):
    """Nothing is lost that the router itself has seen; it is told once that the server is away, and once that it is back."""
    caplog.set_level(logging.INFO)
    process = processes()
    one, two = await routers(process.url), await routers(process.url)
    await turn(one, "s", "a")
    await turn(two, "t", "x")
    process.kill()
    caplog.clear()
    for contents in ("ab", "abc", "abcd"):
        assert (await turn(one, "s", *contents, holder=B)).own.depth == len(contents) - 1
    assert (await two.store.find(SCOPE, "s", prompt("a", "b"))).source is None
    assert (await turn(two, "t", "x", "y")).own.depth == 1
    known = (await two.store.page(limit=9)).found
    assert [entry.key for entry, _ in known] == [(await two.store.find(SCOPE, "t", prompt("x"))).key]
    process.start()
    await back(one, two)
    assert len(told(caplog)) == 2  # one of each router
    assert sum("is back after" in line for line in told(caplog, logging.INFO)) == 2
    assert one.metric("written_back_total") == 3
    assert (await two.store.find(SCOPE, "s", prompt(*"abcde"))).own.depth == 4
    assert (await one.store.find(SCOPE, "t", prompt(*"xyz"))).own.depth == 2


async def test_hangs(server, routers):
    """The call that meets the silence waits its time, and the ones after it none at all."""
    async with Proxy(server.port).serving() as proxy:
        url = f"redis://127.0.0.1:{proxy.port}"
        one = await routers(url, state_timeout_s=0.2)
        two = await routers(server.url)
        await turn(one, "s", "a")
        proxy.hang()
        began_s = time.monotonic()
        finding = [one.store.find(SCOPE, "s", prompt("a", "b")) for _ in range(20)]
        assert all(match.own.depth == 1 for match in await asyncio.gather(*finding))
        waited_s = time.monotonic() - began_s
        assert waited_s > 0.19
        assert one.metric("seconds_count", call="find", outcome="failed") >= 1
        skipped = one.metric("skipped_total", call="find")
        await turn(one, "s", "a", "b")
        assert one.metric("skipped_total", call="find") == skipped + 1
        assert one.metric("skipped_total", call="commit") == 1
        assert (await two.store.find(SCOPE, "s", prompt("a", "b"))).own.depth == 1
        proxy.flow()
        await back(one)
        assert (await two.store.find(SCOPE, "s", prompt("a", "b"))).own.depth == 2


async def test_a_client_that_leaves_is_no_outage(server, routers):
    """What its call was waiting for is dropped with its connection: no later call gets that answer, and nothing has failed."""
    async with Proxy(server.port).serving() as proxy:
        one = await routers(f"redis://127.0.0.1:{proxy.port}")
        await turn(one, "s", "a")
        await turn(one, "t", "b")
        proxy.hang()
        finding = asyncio.ensure_future(one.store.find(SCOPE, "s", prompt("a", "x")))
        await eventually(lambda: proxy.held)
        finding.cancel()
        await asyncio.wait((finding,))
        proxy.flow()
        other = await one.store.find(SCOPE, "t", prompt("b", "y"))
        assert (other.key, other.own.depth) == (session_key(SCOPE, "t"), 1)
        assert one.up
        counts = {outcome: one.metric("seconds_count", call="find", outcome=outcome) for outcome in OUTCOMES}
        assert counts == {"ok": 3, "failed": 0, "cancelled": 1}


async def test_hangs_at_a_commit(server, routers):
    """The turn ends within the time, and is made up for."""
    async with Proxy(server.port).serving() as proxy:
        one = await routers(f"redis://127.0.0.1:{proxy.port}", state_timeout_s=0.1)
        two = await routers(server.url)
        match = await one.store.find(SCOPE, "s", prompt("a"))
        proxy.hang()
        await one.store.commit(match, SCOPE, RECORD, A)
        assert not one.up
        proxy.flow()
        await back(one)
        assert (await two.store.find(SCOPE, "s", prompt("a", "b"))).own.depth == 1
        # The server may have done the first call though it could not say so: it is the same turn still.
        known = await two.store.known(match.key)
        assert len(known.records) == 1


async def test_cut_connections(server, routers):
    """A connection that broke while it was idle is opened anew, and nobody notices."""
    async with Proxy(server.port).serving() as proxy:
        one = await routers(f"redis://127.0.0.1:{proxy.port}")
        await turn(one, "s", "a")
        proxy.cut()
        await turn(one, "s", "a", "b")
        assert one.up
        assert one.metric("seconds_count", call="find", outcome="failed") == 0


@pytest.mark.parametrize("password", [None, "wrong"])
async def test_wrong_password(processes, routers, caplog, password):
    """The router serves alone and says what to set; the right one in either place does."""
    process = processes("--requirepass", "sesame")
    given = {"state_password": password} if password is not None else {}
    one = await routers(process.url, **given)
    assert not one.up
    assert "check user and password (state_url, state_password)" in told(caplog)[0]
    assert "wrong" not in caplog.text
    await turn(one, "s", "a")
    right = await routers(process.url, state_password="sesame")
    inside = await routers(process.url.replace("redis://", "redis://:sesame@"))
    assert right.up
    assert inside.up
    assert "sesame" not in caplog.text


async def test_full_and_read_only(processes, routers, caplog):
    """A server that takes no writes is as good as none, until it does."""
    process = processes()
    one = await routers(process.url)
    await turn(one, "s", "a")
    client = process.client()
    client.config_set("maxmemory", "1")
    await turn(one, "s", "a", "b")
    assert not one.up
    assert "maxmemory" in told(caplog)[0]
    client.config_set("maxmemory", "0")
    await back(one)
    client.replicaof("127.0.0.1", "1")
    assert (await turn(one, "s", "a", "b", "c")).own.depth == 2
    assert not one.up
    client.replicaof("NO", "ONE")
    await back(one)
    assert (await one.store.find(SCOPE, "s", prompt(*"abcd"))).own.depth == 3
    two = await routers(process.url)
    assert (await two.store.find(SCOPE, "s", prompt(*"abcd"))).own.depth == 3


async def test_no_redis_at_all(routers, caplog):
    """Something else listens there: the router serves alone."""

    async def answer(reader, writer):
        await reader.read(100)
        writer.write(b"HTTP/1.1 400 Bad Request\r\n\r\n")
        writer.close()

    async with await asyncio.start_server(answer, "127.0.0.1", 0) as other:
        port = other.sockets[0].getsockname()[1]
        one = await routers(f"redis://127.0.0.1:{port}")
        await turn(one, "s", "a")
        assert (await one.store.find(SCOPE, "s", prompt("a"))).own is not None
        assert not one.up
        await one.store.close()


async def test_more_than_can_be_kept(processes, routers, monkeypatch):
    """The oldest writes of a long outage go first, and are counted."""
    monkeypatch.setattr(outage, "_MAX_PENDING", 3)
    process = processes(running=False)
    one, two = await routers(process.url), await routers(process.url)
    for session in "abcde":
        await turn(one, session, session)
    assert one.metric("lost_total") == 2
    process.start()
    await back(one, two)
    found = [await two.store.find(SCOPE, session, prompt(session)) for session in "abcde"]
    assert [match.source is not None for match in found] == [False, False, True, True, True]


async def test_a_release_during_an_outage(processes, routers):
    """It is made up for, in its order among the turns."""
    process = processes()
    one, two = await routers(process.url), await routers(process.url)
    match = await turn(one, "s", "a")
    await turn(two, "s", "a", "b")
    process.kill()
    await one.store.forget(match.key)
    await turn(one, "s", "x")
    process.start()
    await back(one, two)
    found = await two.store.find(SCOPE, "s", prompt("x", "y"))
    assert found.own.depth == 1


async def test_the_time_of_a_call(server):
    """A call that gets no answer fails, also when every connection is taken; none waits for another's."""
    async with Proxy(server.port).serving() as proxy:
        url = f"redis://127.0.0.1:{proxy.port}"
        state = StateServer(url, password=None, prefix="p", timeout_s=0.1)
        proxy.hang()
        calls = (state.run(Script("page"), b"", "+inf", 1) for _ in range(200))
        results = await asyncio.gather(*calls, return_exceptions=True)
        assert {str(result) for result in results} == {"no answer within 0.1 s"}
        assert {type(result) for result in results} == {StateUnavailable}
        await state.close()
