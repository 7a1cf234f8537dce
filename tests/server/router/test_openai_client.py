"""The router as OpenAI's own client sees it."""

import contextlib

import openai
import pytest
from fake_engine import Failure

pytestmark = pytest.mark.anyio

MESSAGES = [{"role": "user", "content": "hi"}]


@contextlib.asynccontextmanager
async def client_of(cluster):
    async with openai.AsyncOpenAI(
        base_url=f"{cluster.client.base_url}/v1", api_key="k", max_retries=0
    ) as client:
        yield client


async def test_stream(start):
    """A stream arrives whole."""
    cluster = await start()
    async with client_of(cluster) as client:
        stream = await client.chat.completions.create(model="m", messages=MESSAGES, stream=True)
        text = "".join([chunk.choices[0].delta.content or "" async for chunk in stream])
    assert text == "Hello"


async def test_mid_stream_failure(start):
    """A stream that breaks off raises; it does not look like a short answer."""
    cluster = await start()
    cluster.decode[0].failures.append(Failure(cut_after=2))
    async with client_of(cluster) as client:
        stream = await client.chat.completions.create(model="m", messages=MESSAGES, stream=True)
        with pytest.raises(openai.APIError, match="broke"):
            [chunk async for chunk in stream]


async def test_error(start):
    """A router's error is an OpenAI error with its code."""
    cluster = await start()
    cluster.decode[0].healthy = False
    await cluster.probe()
    async with client_of(cluster) as client:
        with pytest.raises(openai.InternalServerError) as caught:
            await client.chat.completions.create(model="m", messages=MESSAGES)
    assert caught.value.code == "no_engine_available"
