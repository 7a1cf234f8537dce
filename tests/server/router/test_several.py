"""Several routers in front of the same engines, sharing a real state server: as good as one, and one fewer is enough."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import os
import socket
import subprocess
import sys
from collections import Counter
from dataclasses import dataclass

import httpx2
import pytest
from fake_engine import FakeEngine, eventually, serving
from state_server import PROGRAMS, StateProcess, free_port

from bidikv_server.router.app import create_app
from bidikv_server.router.settings import RouterSettings

pytestmark = pytest.mark.anyio

ADMIN = {"Authorization": "Bearer sk-admin"}
LIST = "/bidikv/v1/conversations"


@dataclass
class HonestPrefill(FakeEngine):
    """Finds what decode holds only if it is sent to the engine that decoded the conversation's last turn."""

    decode: tuple[FakeEngine, ...] = ()

    def _prefill(self, seen):
        session = seen.headers["x-session-id"]
        held = {
            engine.index_address
            for engine in self.decode
            if any(other.headers["x-session-id"] == session for other in engine.answered)
        }
        asked = set(seen.ours.get("sources", ()))
        self.account = {**self.account, "reason": "hit" if asked & held else "not_retained"}
        return super()._prefill(seen)


@dataclass
class Decode(FakeEngine):
    """Knows the address of its index."""

    index_address: str = ""


@dataclass
class Engines:
    """Running engines, and the settings that name them."""

    decode: tuple[Decode, ...]
    settings: dict[str, list[str]]


@pytest.fixture
def state(tmp_path):
    """A state server of the test's own."""
    assert PROGRAMS, "no Redis or Valkey server on PATH: run scripts/services.sh redis"
    process = StateProcess(tmp_path, PROGRAMS[0])
    process.start()
    yield process
    process.kill()


@pytest.fixture
async def engines(anyio_backend):
    """One prefill engine and two decode engines."""
    decode = tuple(Decode(f"decode-{number}", index_address=f"10.0.0.{number}:7000") for number in range(2))
    for engine in decode:
        engine.publish_index(engine.name, engine.index_address)
    prefill = HonestPrefill("prefill", decode=decode)
    async with serving(prefill, *decode) as urls:
        yield Engines(decode, {"prefill": urls[:1], "decode": urls[1:]})


@pytest.fixture
async def clients(engines):
    """A function that starts so many routers with these settings; clients of them."""
    async with contextlib.AsyncExitStack() as stack:

        async def _start(count: int, **given):
            settings = RouterSettings(
                **engines.settings,
                **{"probe_interval_s": 600.0, "admin_key": "sk-admin", "state_timeout_s": 5.0, **given},
            )
            apps = [create_app(settings) for _ in range(count)]
            urls = await stack.enter_async_context(serving(*apps, lifespan="on"))
            return [
                await stack.enter_async_context(httpx2.AsyncClient(base_url=url, timeout=20.0))
                for url in urls
            ]

        yield _start


async def play(clients, *, conversations: int = 6, turns: int = 5, named: bool = True) -> Counter[str]:
    """Interleaved conversations, each request at the next router; how often each reason was given."""
    reasons: Counter[str] = Counter()
    robin = itertools.cycle(clients)
    for turn in range(turns):
        for number in range(conversations):
            history = [{"role": "user", "content": f"question {number}"}]
            for past in range(turn):
                history += [
                    {"role": "assistant", "content": "Hello"},
                    {"role": "user", "content": f"more {past}"},
                ]
            answer = await next(robin).post(
                "/v1/chat/completions",
                json={"model": "m", "messages": history, "stream": bool(turn % 2)},
                headers={"X-Session-ID": f"s{number}"} if named else {},
            )
            assert answer.status_code == 200
            reasons[answer.headers["x-bidikv-reuse"].partition('reason="')[2].partition('"')[0]] += 1
    return reasons


@pytest.mark.parametrize("named", [True, False])
async def test_round_robin_reuses_as_one_router(state, clients, named):
    """Two routers that share give the same reasons, each as often, as one; two that do not give others."""
    (one,) = await clients(1)
    expected = await play([one], named=named)
    assert expected == {"new_conversation": 6, "hit": 24}
    # An odd number of conversations sends every turn of one to the other router than its last.
    shared = await clients(2, state_url=state.url)
    assert await play(shared, conversations=5, named=named) == {"new_conversation": 5, "hit": 20}
    alone = await clients(2)
    assert (await play(alone, conversations=5, named=named))["new_conversation"] > 5


async def test_a_router_is_lost(state, clients):
    """Conversations go on at the others, each turn at the engine that has it, and so do lists, reasons and releases."""
    one, two = await clients(2, state_url=state.url)
    await play([one], conversations=3, turns=2)
    await one.aclose()
    reasons = await play([two], conversations=3, turns=3)
    # The first two rounds repeat what was said at the lost router.
    assert reasons == {"hit": 9}
    listed = (await two.get(LIST, headers=ADMIN)).json()["data"]
    assert [entry["turns"] for entry in listed] == [3, 3, 3]
    told = (await two.get(f"{LIST}/{listed[0]['key']}", headers=ADMIN)).json()
    assert [turn["reason"] for turn in told["recent"]] == ["hit", "hit", "hit", "hit", "new_conversation"]
    assert (await two.delete(f"{LIST}/{listed[0]['key']}", headers=ADMIN)).json()["forgotten"] is True
    assert len((await two.get(LIST, headers=ADMIN)).json()["data"]) == 2


async def test_the_server_is_lost(state, clients):
    """Routers go on, each by what it has seen: round robin loses what only the other one knows, and nothing fails."""
    routers = await clients(2, state_url=state.url, state_timeout_s=0.5)
    assert await play(routers, conversations=3, turns=2) == {"new_conversation": 3, "hit": 3}
    state.kill()
    reasons = await play(routers, conversations=3, turns=4)
    # Each router has had one turn of each conversation: that is enough to find its engine.
    assert reasons == {"hit": 12}
    metrics = (await routers[0].get("/metrics")).text
    assert "bidikv_router_state_up 0.0" in metrics


@pytest.fixture
def router_process(state, engines, tmp_path):
    """`bidikv router` as a process of its own; it and its port."""
    port = free_port()
    command = [
        sys.executable, "-m", "bidikv_server.cli", "router", "--port", str(port),
        *(option for url in engines.settings["prefill"] for option in ("--prefill", url)),
        *(option for url in engines.settings["decode"] for option in ("--decode", url)),
    ]  # fmt: skip
    variables = {"BIDIKV_ROUTER_STATE_URL": state.url, "BIDIKV_ROUTER_STATE_TIMEOUT_S": "5"}
    with (tmp_path / "router.log").open("wb") as log:
        process = subprocess.Popen(command, env={**os.environ, **variables}, stdout=log, stderr=log)
    yield process, port
    process.kill()
    process.wait()


def listens(port: int) -> bool:
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) == 0


async def test_a_process_is_killed_under_a_stream(state, engines, clients, router_process):
    """What it had committed is there for the others; the turn that it took along is played again, and hits."""
    process, port = router_process
    # It has looked at its engines before it listens.
    await eventually(lambda: listens(port), within_s=60)
    async with httpx2.AsyncClient(base_url=f"http://127.0.0.1:{port}", timeout=20.0) as client:
        assert await play([client], conversations=1, turns=3) == {"new_conversation": 1, "hit": 2}
        for engine in engines.decode:
            engine.gate = asyncio.Event()
        before = sum(len(engine.answered) for engine in engines.decode)
        cut = asyncio.ensure_future(play([client], conversations=1, turns=1))
        await eventually(lambda: sum(len(engine.answered) for engine in engines.decode) > before)
        process.kill()
        with pytest.raises(httpx2.TransportError):
            await cut
    for engine in engines.decode:
        engine.gate = None
    (other,) = await clients(1, state_url=state.url)
    assert await play([other], conversations=1, turns=4) == {"hit": 4}


async def test_a_wrong_url_ends_the_start(engines):
    """The key is named."""
    with pytest.raises(ValueError, match="state_url"):
        RouterSettings(**engines.settings, state_url="http://x")
