"""How requests fail, told apart."""

from __future__ import annotations

import asyncio
from collections import deque

import pytest
from fake_engine import Failure, FakeEngine, eventually, serving

from bidikv_server.verify.client import Client, FailureKind, RequestFailed
from bidikv_server.verify.requests import CHAT_PATH, Request

pytestmark = pytest.mark.anyio
OPENAI = b'{"error": {"message": "no engine", "type": "server_error"}}'


@pytest.fixture
def anyio_backend():
    return "asyncio"


async def ask(failure=None, *, stream=True, timeout_s=5.0, events=None):
    engine = FakeEngine(failures=deque([failure]), **({"events": events} if events else {}))
    async with serving(engine) as (url,), Client(url, timeout_s=timeout_s) as client:
        return await client.ask(Request(CHAT_PATH, {"stream": stream, "messages": []}, {}))


async def failed(*args, **options):
    with pytest.raises(RequestFailed) as caught:
        await ask(*args, **options)
    return caught.value.kind, caught.value.clear


@pytest.mark.parametrize("stream", [True, False])
async def test_an_answer(stream):
    """Streamed or whole."""
    assert (await ask(stream=stream)).text == "Hello"


@pytest.mark.parametrize(
    ("failure", "kind", "clear"),
    [
        (Failure(status=503, body=OPENAI), FailureKind.HTTP_ERROR, True),
        (Failure(status=400, body=OPENAI), FailureKind.HTTP_ERROR, False),
        (Failure(status=503, body=b"<html>"), FailureKind.MALFORMED, False),
        (Failure(cut_after=1), FailureKind.CONNECTION, True),
        (Failure(end_after=2), FailureKind.TRUNCATED, False),
    ],
)
async def test_failures_are_told_apart(failure, kind, clear):
    """A client can act on a clear one; a stream that just ends is none."""
    assert await failed(failure) == (kind, clear)


async def test_an_error_in_the_stream_is_clear():
    """The engine or the router said so."""
    assert await failed(events=(b"data: " + OPENAI + b"\n\n",)) == (FailureKind.ERROR_EVENT, True)


async def test_nonsense_in_the_stream_is_malformed():
    """Not JSON."""
    assert await failed(events=(b"data: {nonsense\n\n",)) == (FailureKind.MALFORMED, False)


async def test_silence_is_a_hang():
    """After the client's own time."""
    assert await failed(Failure(hang=True), timeout_s=0.2) == (FailureKind.HUNG, False)


async def test_nobody_listens():
    """A clear failure; pages just are not there."""
    async with Client("http://127.0.0.1:9", timeout_s=5.0) as client:
        with pytest.raises(RequestFailed, match="connection"):
            await client.ask(Request(CHAT_PATH, {}, {}))
        assert await client.models() is None
        assert await client.kv_cache_usage("http://127.0.0.1:9") is None


async def test_usage_is_the_highest_of_an_engines_ranks():
    """Other metrics are not read."""
    engine = FakeEngine(
        index_lines=(
            "# HELP vllm:kv_cache_usage_perc x\n"
            'vllm:kv_cache_usage_perc{engine="0"} 0.0\nvllm:kv_cache_usage_perc{engine="1"} 2.5e-01\n'
            "vllm:other 7\n"
        )
    )
    async with serving(engine) as (url,), Client(url, timeout_s=5.0) as client:
        assert await client.kv_cache_usage(url) == 0.25


async def test_leaving_after_the_first_event():
    """The engine sees it."""
    engine = FakeEngine(gate=asyncio.Event())
    async with serving(engine) as (url,), Client(url, timeout_s=5.0) as client:
        await client.ask_and_leave(Request(CHAT_PATH, {"stream": True, "messages": []}, {}))
        await eventually(lambda: engine.aborted == 1)
