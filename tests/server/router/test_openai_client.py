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


RESPONSE_EVENTS = (
    b'event: response.created\ndata: {"type":"response.created","sequence_number":0}\n\n',
    b'event: response.output_text.delta\ndata: {"type":"response.output_text.delta","delta":"Hello","sequence_number":1}\n\n',
    b'event: response.completed\ndata: {"type":"response.completed","response":{"id":"r"},"sequence_number":2}\n\n',
)


async def test_responses_stream(start):
    """Its events arrive as the client's own types."""
    cluster = await start()
    cluster.decode[0].events = RESPONSE_EVENTS
    async with client_of(cluster) as client:
        stream = await client.responses.create(model="m", input="hi", stream=True)
        kinds = [event.type async for event in stream]
    assert kinds == ["response.created", "response.output_text.delta", "response.completed"]


async def test_responses_mid_stream_failure(start):
    """A Responses stream that breaks off raises, too."""
    cluster = await start()
    cluster.decode[0].events = RESPONSE_EVENTS
    cluster.decode[0].failures.append(Failure(cut_after=2))
    async with client_of(cluster) as client:
        stream = await client.responses.create(model="m", input="hi", stream=True)
        with pytest.raises(openai.APIError, match="broke"):
            [event async for event in stream]


async def test_unknown_response(start):
    """What nobody keeps is not found."""
    cluster = await start()
    async with client_of(cluster) as client:
        with pytest.raises(openai.NotFoundError, match="resp_0"):
            await client.responses.create(model="m", input="hi", previous_response_id="resp_0")
        with pytest.raises(openai.NotFoundError, match="resp_0"):
            await client.responses.retrieve("resp_0")
