"""The router as a process under requests that nobody should send: it answers or hangs up, and stays as it was."""

from __future__ import annotations

import asyncio
import contextlib
import json
import re
import socket
import struct
import subprocess
import sys

import httpx2
import psutil
import pytest
from fake_engine import CHAT_EVENTS, FakeEngine, eventually, serving
from hostile import GOOD, MAX_BODY_BYTES, Attack, attacks, head, request

pytestmark = pytest.mark.anyio

ATTACKS = 10_000
WARM_UP = 2_000
AT_ONCE = 24
ANSWER_S = 30.0
UNANSWERED = 999
MAX_GROWTH_MIB = 48
"""Of resident memory after the warm-up: far below what a leak of 5 KB per request would be."""
_STATUS = re.compile(rb"HTTP/1\.1 (\d{3}) ")
PROGRAM = """
import sys
from bidikv_server.router.server import run
from bidikv_server.router.settings import RouterSettings
port, prefill, decode, settings = sys.argv[1:]
run(RouterSettings(prefill=(prefill,), decode=(decode,), port=int(port), admin_key="admin", **eval(settings)))
"""


@contextlib.asynccontextmanager
async def routing(**settings):
    """A router process in front of two engines; yields its port, itself and the engines."""
    engines = FakeEngine("prefill"), FakeEngine("decode")
    async with serving(*engines) as urls:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
        command = [sys.executable, "-c", PROGRAM, str(port), *urls, repr(settings)]
        process = subprocess.Popen(command, stderr=subprocess.PIPE)  # noqa: ASYNC220  # it returns at once
        log: list[bytes] = []
        reading = asyncio.create_task(asyncio.to_thread(lambda: log.extend(process.stderr)))
        try:
            await eventually(lambda: is_open(port) or process.poll() is not None, within_s=60.0)
            assert process.poll() is None, log
            yield port, process, engines, log
        finally:
            process.terminate()
            await asyncio.to_thread(process.wait, 30)
            await reading
            process.stderr.close()


def is_open(port: int) -> bool:
    with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port), timeout=1):
        return True
    return False


async def exchange(port: int, attack: Attack) -> list[int]:
    """Statuses of the answers; the connection has ended then."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    raw = b""
    with contextlib.suppress(ConnectionError):
        for piece in attack.pieces:
            writer.write(piece)
            await writer.drain()
        if attack.leaves:
            # Reset, not closed: the worst way to go.
            linger = struct.pack("ii", 1, 0)
            writer.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, linger)
        else:
            while data := await reader.read(2**16):
                raw += data
    writer.close()
    with contextlib.suppress(ConnectionError):
        await writer.wait_closed()
    return [int(status) for status in _STATUS.findall(raw) if status != b"100"]


async def good(port: int) -> None:
    async with httpx2.AsyncClient(base_url=f"http://127.0.0.1:{port}", timeout=30.0) as client:
        answer = await client.post("/v1/chat/completions", json={**GOOD, "stream": True})
        assert (answer.status_code, answer.content) == (200, b"".join(CHAT_EVENTS))


async def test_hostile_requests():
    """Ten thousand of them are refused or hung up on; memory stays flat, nothing is logged of it, and good requests work."""
    settings = {"max_body_bytes": MAX_BODY_BYTES, "log_level": "warning", "request_timeout_s": 5.0}
    wrong: list[tuple[str, tuple[bytes, ...], list[int]]] = []
    async with routing(**settings, max_conversations=100) as (port, process, engines, log):
        await good(port)
        queue = iter(attacks(seed=4, count=ATTACKS))
        sizes: list[int] = []
        done = 0

        async def work() -> None:
            nonlocal done
            for attack in queue:
                try:
                    statuses = await asyncio.wait_for(exchange(port, attack), ANSWER_S)
                except TimeoutError:
                    statuses = [UNANSWERED]
                if any(s >= 500 or (s < 400 and not attack.may_pass) for s in statuses):
                    wrong.append((attack.kind, tuple(piece[:300] for piece in attack.pieces[:2]), statuses))
                done += 1
                if done in {WARM_UP, ATTACKS}:
                    sizes.append(psutil.Process(process.pid).memory_info().rss)
                for engine in engines:
                    engine.seen.clear()

        await asyncio.gather(*(work() for _ in range(AT_ONCE)))
        assert wrong == []
        assert done == ATTACKS
        assert (sizes[1] - sizes[0]) / 2**20 < MAX_GROWTH_MIB
        await good(port)
        assert process.poll() is None
    assert [line for line in log if b"Traceback" in line] == []
    assert len(log) < 100


SLOW = (
    (),
    (b"POST /v1/chat/comple",),
    (b"\r\n",),
    (head(b"Content-Length: 100"), b"{"),
    (head(b"Transfer-Encoding: chunked"), b"2\r\n{"),
    (b"GET /live HTTP/1.1\r\nHost: h\r\n\r\nGET /li",),
    (b"GET /live HTTP/1.1\r\nHost: h\r\n\r\n", b"GET /li"),
)


async def test_slow_requests():
    """Whoever does not send his request within its time hears so and loses the connection."""
    async with routing(request_timeout_s=0.3) as (port, *_):
        sent = (asyncio.wait_for(exchange(port, Attack("slow", pieces)), ANSWER_S) for pieces in SLOW)
        assert [statuses[-1] for statuses in await asyncio.gather(*sent)] == [408] * len(SLOW)
        await good(port)


async def test_line_ends_are_no_request():
    """Nor do they keep a connection open that has had its answer."""
    async with routing(request_timeout_s=0.3) as (port, *_):
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(b"GET /live HTTP/1.1\r\nHost: h\r\n\r\n")
        assert b"ok" in await reader.readuntil(b"}")
        writer.write(b"\r\n")
        assert b" 408 " in await asyncio.wait_for(reader.read(), ANSWER_S)
        writer.close()


async def test_a_long_answer_is_not_a_slow_request():
    """The time is for requests: line ends or half a request behind a whole one do not cut its answer off."""
    async with routing(request_timeout_s=0.3) as (port, _, engines, _):
        engines[1].gate = asyncio.Event()
        for tail in (b"", b"\r\n", b"GET /li"):
            engines[1].gate.clear()
            body = json.dumps({**GOOD, "stream": True}).encode()
            raw = request(body).replace(b"Connection: close\r\n", b"") + tail
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
            writer.write(raw)
            assert b"200 OK" in await reader.readuntil(b"\r\n\r\n")
            with pytest.raises(TimeoutError):
                # More than the request may take, in which nothing may happen.
                await asyncio.wait_for(reader.readuntil(b"data: [DONE]\n\n"), 0.5)
            engines[1].gate.set()
            assert b"Hello" in await asyncio.wait_for(reader.readuntil(b"data: [DONE]\n\n"), ANSWER_S)
            writer.close()


@pytest.mark.skipif(not hasattr(socket, "TCP_USER_TIMEOUT"), reason="the kernel watches, on Linux")
async def test_a_client_that_takes_nothing():
    """Its connection ends, and with it the engine's work; nothing of the answer piles up in the router meanwhile."""
    async with routing(stalled_timeout_s=1.0) as (port, process, engines, _):
        event = b'data: {"x":"' + b"x" * 2**16 + b'"}\n\n'
        engines[1].events = (event,) * 1600
        before = psutil.Process(process.pid).memory_info().rss
        with socket.socket() as client:
            client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            client.connect(("127.0.0.1", port))
            client.sendall(request(json.dumps({**GOOD, "stream": True}).encode()))
            await asyncio.wait_for(counted(port, 'failed_turns_total{cause="client_gone"} 1.0'), ANSWER_S)
        assert (psutil.Process(process.pid).memory_info().rss - before) / 2**20 < MAX_GROWTH_MIB
        engines[1].events = CHAT_EVENTS
        await good(port)


async def test_too_many_connections():
    """One connection too many is told to come back, and those that are there are served."""
    async with routing(max_connections=2) as (port, *_):
        held = [await asyncio.open_connection("127.0.0.1", port) for _ in range(2)]
        statuses = await asyncio.wait_for(
            exchange(port, Attack("one more", (b"GET /live HTTP/1.1\r\n",))), ANSWER_S
        )
        assert statuses == [503]
        held.pop()[1].close()
        await good_soon(port)
        held.pop()[1].close()


async def test_a_client_that_leaves_a_pipeline():
    """The request that runs hears of it, although another one waits behind it."""
    async with routing() as (port, _, engines, _):
        engines[1].gate = asyncio.Event()
        body = json.dumps({**GOOD, "stream": True}).encode()
        raw = request(body).replace(b"Connection: close\r\n", b"")
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(raw * 3)
        await reader.readuntil(b"\r\n\r\n")
        writer.close()
        await eventually(lambda: engines[1].aborted == 1)
        assert len(engines[1].answered) == 1
        await good_when_open(port, engines)


async def test_garbage_behind_a_request():
    """The answer to the request comes whole and is the last one: the garbage's own could be taken for it."""
    async with routing() as (port, *_):
        body = json.dumps({**GOOD, "stream": True}).encode()
        raw = request(body).replace(b"Connection: close\r\n", b"")
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(raw + b"garbage\r\n\r\n" + raw)
        answer = await asyncio.wait_for(reader.read(), ANSWER_S)
        assert answer.count(b"HTTP/1.1") == 1
        assert answer.startswith(b"HTTP/1.1 200")
        assert b"[DONE]" in answer
        writer.close()


async def counted(port: int, metric: str) -> None:
    """Wait until the router's metrics say so."""
    async with httpx2.AsyncClient(base_url=f"http://127.0.0.1:{port}", timeout=30.0) as client:
        while True:
            if metric in (await client.get("/metrics")).text:
                return
            await asyncio.sleep(0.05)


async def good_when_open(port: int, engines) -> None:
    """A good request, for engines that have waited."""
    engines[1].gate.set()
    await good(port)


async def good_soon(port: int) -> None:
    """A good request, as soon as the router has seen that a client left."""
    while True:
        try:
            await good(port)
        except AssertionError:
            await asyncio.sleep(0.01)
        else:
            return
