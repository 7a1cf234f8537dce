"""The router as a process."""

import asyncio
import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import time
import urllib.request

import httpx2
import pytest
from fake_engine import CHAT_EVENTS, FakeEngine, eventually, serving

from bidikv_server.router.server import create_server
from bidikv_server.router.settings import RouterSettings

PROGRAM = """
import sys
from bidikv_server.router.server import run
from bidikv_server.router.settings import RouterSettings
port, prefill, decode, grace = sys.argv[1:]
run(
    RouterSettings(
        prefill=(prefill,), decode=(decode,), port=int(port), max_in_flight=1, shutdown_grace_s=float(grace)
    )
)
"""


def free_port() -> int:
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        return sock.getsockname()[1]


def test_run_until_sigterm():
    """`run` serves until SIGTERM and then ends cleanly."""
    port = free_port()
    process = subprocess.Popen(
        [sys.executable, "-c", PROGRAM, str(port), "http://127.0.0.1:9", "http://127.0.0.1:9", "30"],
        env={**os.environ},
        stderr=subprocess.PIPE,
    )
    with process:
        try:
            deadline_s = time.monotonic() + 30
            while True:
                try:
                    with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=5) as answer:
                        assert answer.status == 200
                    break
                except OSError:
                    assert process.poll() is None
                    assert time.monotonic() < deadline_s
            process.send_signal(signal.SIGTERM)
            _, errors = process.communicate(timeout=20)
        finally:
            process.kill()
    assert b"Traceback" not in errors
    assert process.returncode == 0


def test_settings_reach_the_server():
    """Address, log level and grace come from the settings."""
    settings = RouterSettings(
        prefill=("http://p",), decode=("http://d",), host="::1", port=1, shutdown_grace_s=7
    )
    config = create_server(settings).config
    assert (config.host, config.port, config.timeout_graceful_shutdown) == ("::1", 1, 7)


@contextlib.asynccontextmanager
async def router_process(engine, *, grace_s: float):
    """A router process in front of this decode engine; it has to end by itself, and well."""
    port = free_port()
    async with serving(FakeEngine(), engine) as engine_urls:
        process = await asyncio.create_subprocess_exec(
            sys.executable,
            "-c",
            PROGRAM,
            str(port),
            *engine_urls,
            str(grace_s),
            stderr=asyncio.subprocess.PIPE,
        )
        try:
            async with httpx2.AsyncClient(base_url=f"http://127.0.0.1:{port}", timeout=20) as client:
                await asyncio.wait_for(_ready(client), 30)
                yield process, client
            _, errors = await asyncio.wait_for(process.communicate(), 20)
        finally:
            if process.returncode is None:
                process.kill()
                await process.wait()
    assert b"Traceback" not in errors
    assert process.returncode == 0


@pytest.mark.anyio
async def test_a_stop_signal_ends_no_stream():
    """On SIGTERM the running stream is finished, the waiting turn sent away, and nobody new is let in."""
    engine = FakeEngine(gate=asyncio.Event())
    async with router_process(engine, grace_s=30) as (process, client):
        running = asyncio.ensure_future(_chat(client, "first", stream=True))
        await eventually(lambda: engine.answered)
        queued = asyncio.ensure_future(_chat(client, "second"))
        await asyncio.wait_for(_one_waits(client), 10)
        process.send_signal(signal.SIGTERM)
        answer = await queued
        assert (answer.status_code, answer.headers["retry-after"]) == (503, "1")
        async with httpx2.AsyncClient(base_url=client.base_url) as newcomer:
            with pytest.raises(httpx2.ConnectError):
                await _chat(newcomer, "third")
        assert not running.done()
        engine.gate.set()
        assert (await running).content == b"".join(CHAT_EVENTS)
    assert len(engine.answered) == 1


@pytest.mark.anyio
@pytest.mark.parametrize("stream", [True, False])
async def test_a_stop_signal_waits_no_longer_than_the_grace_period(stream):
    """What runs longer ends with an error that the client can see, and its leg is aborted."""
    engine = FakeEngine(gate=asyncio.Event())
    async with router_process(engine, grace_s=1) as (process, client):
        running = asyncio.ensure_future(_chat(client, "first", stream=stream))
        await eventually(lambda: engine.answered)
        process.send_signal(signal.SIGTERM)
        answer = await running
        assert answer.status_code == (200 if stream else 503)
        told = answer.content.rpartition(b"data: ")[2] if stream else answer.content
        assert json.loads(told)["error"]["code"] == "shutting_down"
        await eventually(lambda: engine.aborted == 1)


async def _ready(client) -> None:
    while True:
        try:
            if (await client.get("/ready")).status_code == 200:
                return
        except httpx2.TransportError:
            await asyncio.sleep(0.05)


async def _one_waits(client) -> None:
    while True:
        if "bidikv_router_turns_queued 1.0" in (await client.get("/metrics")).text:
            return
        await asyncio.sleep(0.01)


async def _chat(client, content, **fields):
    body = {"model": "m", "messages": [{"role": "user", "content": content}], **fields}
    return await client.post("/v1/chat/completions", json=body)
