"""The OpenAI Agents SDK on the wire: its real runner, and a router in memory."""

from __future__ import annotations

import asyncio

import pytest

pytest.importorskip("agents", reason="needs openai-agents; test_framework_versions.py brings it")

import agents

from bidikv.examples import openai_agents_agent
from bidikv.integrations.openai_agents import BidiKVHooks, provider
from bidikv.testing import FakeRouter, ToolCall

agents.set_tracing_disabled(disabled=True)
ARGS = '{ "city" :"Oslo"}'


@agents.function_tool
def weather(city: str) -> str:
    """Tell the weather."""
    return f"{city} is sunny."


@pytest.fixture
def fake():
    """A router in memory."""
    return FakeRouter("It is sunny.")


def run(fake, *questions, key="t", stream=False, hooks=None):
    """Ask an agent with a tool, one question after the other, in one session of the framework."""

    async def talk():
        async with fake.async_client() as client, client.conversation(key) as conversation:
            agent = agents.Agent(name="planner", instructions="Look it up.", tools=[weather], model="m")
            options = {
                "session": agents.SQLiteSession(key),
                "run_config": agents.RunConfig(model_provider=provider(client)),
                "hooks": hooks or BidiKVHooks(),
            }
            for question in questions:
                if stream:
                    result = agents.Runner.run_streamed(agent, question, **options)
                    async for _ in result.stream_events():
                        pass
                else:
                    result = await agents.Runner.run(agent, question, **options)
                assert result.final_output == "It is sunny."
            return conversation

    return asyncio.run(talk())


@pytest.mark.parametrize("stream", [False, True])
def test_a_run_is_one_conversation(fake, stream):
    """Its calls carry the conversation's id, and each turn after the first finds what the last one left."""
    fake.reply(tool_calls=[ToolCall("weather", ARGS)])
    conversation = run(fake, "Oslo?", "Sure?", stream=stream)
    assert fake.sessions == [conversation.id] * 3
    assert [turn.reason for turn in conversation.turns] == ["new_conversation", "hit", "hit"]
    assert [request.turn.kind for request in fake.requests] == ["main", "tool", "main"]
    assert [request.turn.index for request in fake.requests] == [0, 1, 2]
    assert all(turn.drift is None or not turn.drift.breaks_prefix for turn in conversation.turns)


def test_arguments_go_back_as_they_came(fake):
    """Byte for byte, in the chat API's form."""
    fake.reply(tool_calls=[ToolCall("weather", ARGS)])
    run(fake, "Oslo?")
    assistant = next(m for m in fake.requests[1].body["messages"] if m["role"] == "assistant")
    assert assistant["tool_calls"][0]["function"]["arguments"] == ARGS
    assert fake.requests[1].path.endswith("/chat/completions")


def test_tools_are_told_of(fake):
    """Decode hears of a tool that starts, and the hooks forget it when it ends."""
    fake.reply(tool_calls=[ToolCall("weather", ARGS), ToolCall("weather", ARGS)])
    hooks = BidiKVHooks()
    run(fake, "Oslo?", hooks=hooks)
    assert [told.path.rpartition("/")[2] for told in fake.told] == ["wait"] * 2
    assert hooks._running == {}


def test_runs_at_once_keep_apart(fake):
    """Two runs in one loop, each in its conversation."""

    async def both():
        async with fake.async_client() as client:
            config = agents.RunConfig(model_provider=provider(client))
            agent = agents.Agent(name="a", model="m")

            async def one(key):
                async with client.conversation(key) as conversation:
                    await agents.Runner.run(agent, "hi", run_config=config)
                return conversation.id

            return await asyncio.gather(one("a"), one("b"))

    ids = asyncio.run(both())
    assert set(fake.sessions) == set(ids)
    assert len(set(ids)) == 2


def test_the_framework_owns_its_retries(fake):
    """What it does with the client leaves the conversation on it."""
    fake.fail(503, times=1)
    conversation = run(fake, "Oslo?")
    assert fake.sessions == [conversation.id] * 2


def test_the_example(fake, capsys):
    """It asks its two questions in one conversation, and tells of each turn."""
    fake.reply(tool_calls=[ToolCall("weather", ARGS)])
    with fake.serve() as base_url:
        assert openai_agents_agent.main(["--base-url", base_url, "--model", "m"]) == 0
    printed = capsys.readouterr().out
    assert len(set(fake.sessions)) == 1
    assert printed.count("It is sunny.") == 2
    assert "[turn 2] hit: prompt" in printed
