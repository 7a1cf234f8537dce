"""Answers pass byte for byte and without delay."""

import asyncio

import pytest

pytestmark = pytest.mark.anyio

ODD_STREAM = (
    b': comment\r\n\r\ndata:  {"choices" : [ {"delta":{"role":"assistant","reasoning":"\xc3\xa9"}} ]}\n\n',
    b'data: {"choices":[{"delta":{"tool_calls":[{"index":0,"id":"t","function":{"name":"f",',
    b'"arguments":"{\\"a\\": 1}"}}]},"logprobs":{"content":[{"token":"x","logprob":-0.1}]}}]}\n',
    b'\ndata: {"kv_transfer_params":null}\n\n',
    b'data: {"choices":[],"usage":{"prompt_tokens":9,"prompt_tokens_details":{"cached_tokens":4}}}\n\n',
    b"data: [DONE]\n\n",
)
ODD_ANSWER = (
    b'{ "choices":[{"message":{"content":null,"tool_calls":[{"id":"t","function":{"name":"f","arguments":'
    b'"{\\"kv_transfer_params\\": {\\"x\\": 1}}"}}],"reasoning":"\\u00e9 \xc3\xa9"}}],  "usage":{"x":1.50},\n'
    b'"kv_transfer_params": null }\n'
)


async def test_stream_is_untouched(start):
    """Tool calls, reasoning, log probabilities, usage and odd white space come out as they went in."""
    cluster = await start()
    cluster.decode[0].events = ODD_STREAM
    answer = await cluster.chat("hi", stream=True)
    assert answer.content == b"".join(ODD_STREAM)
    assert answer.headers["content-type"] == "text/event-stream; charset=utf-8"


async def test_answer_is_untouched(start):
    """A whole answer comes out as it went in, even where its text speaks of transfer parameters."""
    cluster = await start()
    cluster.decode[0].answer = ODD_ANSWER
    answer = await cluster.chat("hi")
    assert answer.content == ODD_ANSWER
    assert answer.headers["content-length"] == str(len(ODD_ANSWER))


async def test_filled_in_transfer_params_are_concealed(start):
    """A decode engine's handle does not reach the client; the other bytes stay."""
    cluster = await start()
    cluster.decode[0].answer = ODD_ANSWER.replace(b": null }", b': {"remote_host": "10.0.0.1", "a": [1]} }')
    answer = await cluster.chat("hi")
    assert answer.content == ODD_ANSWER


async def test_first_chunk_is_not_held_back(start):
    """The first chunk reaches the client while the engine still holds the second."""
    cluster = await start()
    cluster.decode[0].gate = asyncio.Event()
    body = {"model": "m", "messages": [{"role": "user", "content": "hi"}], "stream": True}
    async with cluster.client.stream("POST", "/v1/chat/completions", json=body) as answer:
        chunks = answer.aiter_raw()
        assert await anext(chunks) == cluster.decode[0].events[0]
        cluster.decode[0].gate.set()
        rest = b"".join([chunk async for chunk in chunks])
    assert rest == b"".join(cluster.decode[0].events[1:])
