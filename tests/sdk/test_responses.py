"""The Responses API on the wire: what the model said is known as it is for chat completions."""

from __future__ import annotations

import asyncio
import json

import pytest

from bidikv.testing import FakeRouter, ToolCall

RAW = '{ "path" :"caf\\u00e9.py"}'
TOOLS = [{"type": "function", "name": "look", "parameters": {"type": "object"}, "strict": False}]
ASK = {"role": "user", "content": "What is in it? " * 20}
FORMS = ("create", "create streamed", "stream", "parse", "raw")


def told(client, form, **options):
    """The parsed response to one request, whichever way it is asked for."""
    responses, options = client.responses, {"model": "m", "tools": TOOLS, **options}
    if form == "create streamed":
        events = list(responses.create(**options, stream=True))
        return events[-1].response
    if form == "stream":
        with responses.stream(**options) as stream:
            return stream.get_final_response()
    if form == "raw":
        return responses.with_raw_response.create(**options).parse()
    return responses.parse(**options) if form == "parse" else responses.create(**options)


def plain(response, *, spelt):
    """Its items as many clients keep them: without what the server adds, calls in another spelling, no reasoning."""
    items = [item.to_dict() for item in response.output]
    if not spelt:
        return items
    kept = []
    for item in items:
        if item["type"] == "function_call":
            arguments = json.dumps(json.loads(item["arguments"]))
            kept.append(
                {"type": "function_call", "call_id": item["call_id"], "name": "look", "arguments": arguments}
            )
        elif item["type"] == "message":
            kept.append({"role": "assistant", "content": item["content"][0]["text"]})
    return kept


@pytest.mark.parametrize("spelt", [False, True])
@pytest.mark.parametrize("form", FORMS)
def test_full_histories(form, spelt):
    """Items that come back are the model's own, with its spelling of arguments; an edit of them is told with its place."""
    router = FakeRouter()
    router.reply("Let me see.", tool_calls=[ToolCall("look", RAW)], reasoning="hm")
    client = router.client(conversation="a")
    first = told(client, form, instructions="Be brief.", input=[ASK])
    result = {"type": "function_call_output", "call_id": first.output[-1].call_id, "output": "24 lines"}
    history = [ASK, *plain(first, spelt=spelt), result]
    second = told(client, form, instructions="Be brief.", input=history)
    longer = [*history, *plain(second, spelt=spelt), ASK]
    told(client, form, instructions="Be brief.", input=longer)
    edited = [*longer[:-2], {"role": "assistant", "content": "Something else."}, ASK]
    told(client, form, instructions="Be brief.", input=[*edited, ASK])
    told(client, form, instructions="Be long.", input=longer)
    turns = client._bidikv.conversation.turns
    assert [turn.drift.summary for turn in turns] == [
        "start",
        "append",
        "append",
        f"edit at input[{len(longer) - 2}].content",
        "system at instructions",
    ]
    sent = [item for item in router.requests[1].body["input"] if item.get("type") == "function_call"]
    assert [call["arguments"] for call in sent] == [RAW]
    assert turns[1].restored == (("input[2].arguments",) if spelt else ())
    assert [turn.reason for turn in turns[:3]] == ["new_conversation", "hit", "hit"]
    assert [request.turn.kind for request in router.requests[:3]] == ["main", "tool", "main"]
    assert all((turn.ttft_s is not None) is ("stream" in form) for turn in turns)


@pytest.mark.parametrize("form", FORMS)
def test_responses_that_are_named(form):
    """The history of a named response is known, and a full list of the same items goes on from it as well."""
    router = FakeRouter()
    router.reply(tool_calls=[ToolCall("look", RAW)], reasoning="hm")
    client = router.client(conversation="a", on_drift="raise")
    first = told(client, form, input=[ASK])
    result = {"type": "function_call_output", "call_id": first.output[-1].call_id, "output": "24 lines"}
    second = told(client, form, input=[result], previous_response_id=first.id)
    told(client, form, input="And?", previous_response_id=second.id)
    whole = [
        ASK,
        *plain(first, spelt=True),
        result,
        *plain(second, spelt=False),
        {"role": "user", "content": "So?"},
    ]
    told(client, form, input=whole)
    turns = client._bidikv.conversation.turns
    assert [turn.drift.kind for turn in turns] == ["start", "append", "append", "fork"]
    assert [turn.drift.kept_messages for turn in turns] == [0, 2, 4, 4]


def test_asynchronous_streams():
    """An asynchronous stream is read to its closing event in passing."""
    router = FakeRouter()
    client = router.async_client(conversation="a")

    async def ask(items):
        stream = await client.responses.create(model="m", input=items, stream=True)
        return [event async for event in stream][-1].response

    async def talk():
        first = await ask([ASK])
        await ask([ASK, *plain(first, spelt=True), ASK])

    asyncio.run(talk())
    assert [turn.drift.kind for turn in client._bidikv.conversation.turns] == ["start", "append"]


def test_odd_items():
    """Items of any kind are compared and sent as they are."""
    router = FakeRouter()
    client = router.client(conversation="a")
    odd = [
        ASK,
        {"type": "item_reference", "id": "msg_1"},
        {"type": "web_search_call", "id": "ws_1", "status": "completed", "action": None},
        {
            "role": "user",
            "content": [{"type": "input_text", "text": "a"}, {"type": "input_image", "image_url": "x"}],
        },
        {"type": "function_call", "call_id": "c", "name": "look", "arguments": "no JSON"},
        {"type": "function_call_output", "call_id": "c", "output": [{"type": "input_text", "text": "b"}]},
    ]
    client.responses.create(model="m", input=odd)
    longer = [*odd, {"role": "assistant", "content": router.text}, ASK]
    client.responses.create(model="m", input=longer)
    assert [request.body["input"] for request in router.requests] == [odd, longer]
    assert [turn.drift.kind for turn in client._bidikv.conversation.turns] == ["start", "append"]
