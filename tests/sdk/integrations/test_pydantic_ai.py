"""pydantic-ai on the wire: its real agents, and a router in memory."""

from __future__ import annotations

import asyncio

import pytest

pytest.importorskip("pydantic_ai", reason="needs pydantic-ai; test_framework_versions.py brings it")

import pydantic_ai
from pydantic_ai.models.openai import OpenAIChatModel
from pydantic_ai.providers.openai import OpenAIProvider

from bidikv.examples import pydantic_ai_agent
from bidikv.integrations.pydantic_ai import BidiKV
from bidikv.testing import FakeRouter, ToolCall

ARGS = '{ "city" :"Oslo"}'


@pytest.fixture
def fake():
    """A router in memory."""
    return FakeRouter("It is sunny.")


@pytest.fixture
def make(fake):
    """Makes agents whose calls go to that router."""

    def make(capability, name="planner"):
        provider = OpenAIProvider(openai_client=fake.async_client())
        agent = pydantic_ai.Agent(
            OpenAIChatModel("m", provider=provider), name=name, capabilities=[capability]
        )

        @agent.tool_plain
        def weather(city: str) -> str:
            return f"{city} is sunny."

        return agent

    return make


def test_a_run_is_one_conversation(fake, make):
    """Also with its next run, which is given the history; every turn after the first is a hit."""
    capability = BidiKV()
    agent = make(capability)

    async def talk():
        fake.reply(tool_calls=[ToolCall("weather", ARGS)])
        first = await agent.run("Oslo?", conversation_id="ticket-17")
        second = await agent.run("Sure?", message_history=first.all_messages())
        return second.output

    assert asyncio.run(talk()) == "It is sunny."
    conversation = capability.conversation("ticket-17", "planner")
    assert fake.sessions == [conversation.id] * 3
    assert [turn.reason for turn in conversation.turns] == ["new_conversation", "hit", "hit"]
    assert [request.turn.agent for request in fake.requests] == ["planner"] * 3
    assert [told.path.rpartition("/")[2] for told in fake.told] == ["wait"]


def test_arguments_go_back_as_they_came(fake, make):
    """The framework spells them anew; the client puts the model's own spelling back."""
    fake.reply(tool_calls=[ToolCall("weather", ARGS)])
    asyncio.run(make(BidiKV()).run("Oslo?"))
    assistant = next(m for m in fake.requests[1].body["messages"] if m["role"] == "assistant")
    assert assistant["tool_calls"][0]["function"]["arguments"] == ARGS


def test_streams(fake, make):
    """A streamed run belongs to its conversation too."""
    capability = BidiKV()
    agent = make(capability)

    async def talk():
        async with agent.run_stream("Oslo?", conversation_id="s") as result:
            return await result.get_output()

    assert asyncio.run(talk()) == "It is sunny."
    assert fake.sessions == [capability.conversation("s", "planner").id]
    assert fake.requests[0].body["stream"] is True


def test_a_delegate_is_a_child(fake, make):
    """An agent that is called in a tool has a conversation of its own, and names its caller's."""
    capability = BidiKV()
    boss, helper = make(capability, "boss"), make(capability, "helper")

    @boss.tool_plain
    async def delegate() -> str:
        return (await helper.run("Look.")).output

    fake.reply(tool_calls=[ToolCall("delegate")])
    asyncio.run(boss.run("Oslo?", conversation_id="d"))
    outer, inner, last = fake.requests
    assert outer.session == last.session == capability.conversation("d", "boss").id
    assert inner.session != outer.session
    assert (inner.turn.agent, inner.turn.parent) == ("helper", outer.session)


def test_ids_are_stable_and_keyed(fake, make):
    """The same in every process, another one with a secret, and never the name itself."""
    for secret in (None, None, b"s"):
        asyncio.run(make(BidiKV(secret=secret)).run("hi", conversation_id="ticket-17"))
    first, second, keyed = fake.sessions
    assert first == second != keyed
    assert "ticket" not in str([dict(request.headers) for request in fake.requests])


def test_only_the_latest_are_kept(monkeypatch):
    """What is known of conversations is bounded."""
    monkeypatch.setattr("bidikv.integrations.pydantic_ai._KNOWN", 2)
    capability = BidiKV()
    first = capability.conversation("a")
    assert capability.conversation("a") is first
    capability.conversation("b")
    capability.conversation("c")
    again = capability.conversation("a")
    assert again is not first
    assert again.id == first.id


def test_the_example(fake, capsys):
    """It asks its two questions in one conversation, and tells of each turn."""
    fake.reply(tool_calls=[ToolCall("weather", ARGS)])
    with fake.serve() as base_url:
        assert pydantic_ai_agent.main(["--base-url", base_url, "--model", "m"]) == 0
    printed = capsys.readouterr().out
    assert len(set(fake.sessions)) == 1
    assert printed.count("It is sunny.") == 2
    assert "[turn 2] hit: prompt" in printed
