"""The fake router that users test with: its accounts are those of a real one, and it can be reached as one."""

from __future__ import annotations

import openai
import pytest

import bidikv
from bidikv.testing import FakeRouter, ToolCall

LONG = {"role": "user", "content": "a long question, " * 20}


def ask(client, *messages, **options):
    return client.chat.completions.create(model="m", messages=[LONG, *messages], **options)


@pytest.fixture
def router():
    return FakeRouter("a long answer, " * 20)


def test_accounts(router):
    """What extends is a hit, what changed is one up to there; off, auxiliary and ended turns leave nothing."""
    client = router.client(conversation="a")
    answer = bidikv.message_of(ask(client))
    more = {"role": "user", "content": "and?"}
    reports = [bidikv.turn_of(ask(client, answer, more))]
    reports.append(bidikv.turn_of(ask(client, {**answer, "content": "something else"}, more)))
    reports.append(bidikv.turn_of(ask(bidikv.wrap(client, readback=False), answer)))
    with client.conversation("a") as conversation:
        with conversation.hint(kind="aux"):
            ask(client, {"role": "user", "content": "title?"})
        with conversation.hint(final=True):
            reports.append(bidikv.turn_of(ask(client)))
        reports.append(bidikv.turn_of(ask(client)))
    assert [r.reason for r in reports] == ["hit", "hit_diverged", "readback_off", "hit", "released"]
    assert all(r.prompt_tokens == r.remote_tokens + r.computed_tokens for r in reports)
    assert reports[0].remote_tokens % 16 == 0
    assert 0 < reports[1].remote_tokens < reports[0].remote_tokens
    assert router.held == (bidikv.session_id("a"),)


def test_without_a_name(router):
    """A plain client's turns are placed by their messages."""
    with router.serve() as base_url, openai.OpenAI(base_url=base_url, api_key="k") as client:
        for expected in ("new_conversation", "hit"):
            assert bidikv.reuse_of(ask(client, stream=True)).reason == expected
        assert [model.id for model in client.models.list()] == ["fake"]
        with pytest.raises(openai.NotFoundError):
            client.embeddings.create(model="m", input="x")


def test_script(router):
    """Answers in the order of the script, then the usual one; failures when told to."""
    router.reply("first")
    router.reply(tool_calls=[ToolCall("look", '{"a":1}')], reasoning="Hm.")
    router.fail(429, retry_after_s=2)
    client = router.client(max_retries=0)
    assert ask(client).choices[0].message.content == "first"
    second = ask(client)
    assert second.choices[0].finish_reason == "tool_calls"
    assert second.choices[0].message.tool_calls[0].function.arguments == '{"a":1}'
    with pytest.raises(openai.RateLimitError) as caught:
        ask(client)
    assert caught.value.response.headers["retry-after"] == "2"
    assert ask(client).choices[0].message.content == router.text


def test_usage(router):
    """Counts come with an answer, and at the end of a stream that asks for them."""
    client = router.client()
    whole = ask(client).usage
    streamed = list(ask(client, stream=True, stream_options={"include_usage": True}))[-1].usage
    assert whole == streamed
    assert whole.total_tokens == whole.prompt_tokens + whole.completion_tokens


def test_streams_of_each_api(router):
    """Text completions and responses stream in their own shapes; tool calls and reasoning are items of a response."""
    client = router.client()
    chunks = list(client.completions.create(model="m", prompt="hi", stream=True))
    assert "".join(chunk.choices[0].text for chunk in chunks) == router.text
    router.reply("Let me see.", tool_calls=[ToolCall("look", '{"a":1}')], reasoning="Hm.")
    with client.responses.stream(model="m", input="hi") as events:
        kinds = [event.type for event in events]
        response = events.get_final_response()
    assert kinds[0] == "response.created"
    assert {"response.reasoning_text.delta", "response.output_text.delta"} < set(kinds)
    assert [item.type for item in response.output] == ["reasoning", "message", "function_call"]
    assert (response.output_text, response.output[2].arguments) == ("Let me see.", '{"a":1}')
    assert response.usage.total_tokens == response.usage.input_tokens + response.usage.output_tokens


def test_responses_that_go_on_from_one(router):
    """A kept response is gone on with, and an unknown one is refused."""
    client = router.client()
    first = client.responses.create(model="m", input="hi")
    with client.conversation() as conversation:
        client.responses.create(model="m", input="and?", previous_response_id=first.id)
    assert [turn.reason for turn in conversation.turns] == ["previous_response"]
    with pytest.raises(openai.NotFoundError, match="resp_0"):
        client.responses.create(model="m", input="and?", previous_response_id="resp_0")


def test_who_shares_what(router):
    """A fork reads what its parent's turn left; another history nothing, nor what goes on from a turn that was not to be kept."""
    client = router.client()
    parent = client.conversation()
    with parent:
        answer = bidikv.message_of(ask(client))
    with parent.fork():
        assert bidikv.reuse_of(ask(client, answer, {"role": "user", "content": "or?"})).reason == "hit"
    own = [{"role": "system", "content": "You are another. " * 20}, LONG]
    with parent.child("other") as child:
        for _ in range(2):
            with child.hint(retain_s=0):
                client.chat.completions.create(model="m", messages=own)
    assert [turn.reason for turn in child.turns] == ["new_conversation", "not_retained"]
