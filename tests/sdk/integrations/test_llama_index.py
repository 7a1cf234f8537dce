"""LlamaIndex on the wire: its real LLM and agent, and a router in memory. Needs a venv of its own."""

from __future__ import annotations

import asyncio

import pytest

pytest.importorskip("llama_index.llms.openai_like", reason="needs llama-index, which is not installed here")

from llama_index.core.agent.workflow import FunctionAgent

import bidikv
from bidikv.examples import llama_index_agent
from bidikv.integrations.llama_index import llm
from bidikv.testing import FakeRouter, ToolCall

pytestmark = pytest.mark.filterwarnings("default")  # the framework's own
ARGS = '{ "city" :"Oslo"}'


def weather(city: str) -> str:
    """Tell the weather."""
    return f"{city} is sunny."


def test_an_agent_is_one_conversation():
    """Its calls carry the current conversation's id, and what the model wrote goes back as it came."""
    fake = FakeRouter("It is sunny.")
    fake.reply(tool_calls=[ToolCall("weather", ARGS)])

    async def talk():
        model = llm("m", client=fake.client(), async_client=fake.async_client())
        agent = FunctionAgent(tools=[weather], llm=model, system_prompt="Look it up.")
        with bidikv.conversation("t") as conversation:
            answer = await agent.run("Oslo?")
        return str(answer), conversation

    answer, conversation = asyncio.run(talk())
    assert answer == "It is sunny."
    assert fake.sessions == [conversation.id] * 2
    assistant = next(m for m in fake.requests[1].body["messages"] if m["role"] == "assistant")
    assert assistant["tool_calls"][0]["function"]["arguments"] == ARGS
    assert [turn.reason for turn in conversation.turns] == ["new_conversation", "hit"]


def test_synchronous_calls():
    """They go through the client that is given for them."""
    fake = FakeRouter("It is sunny.")
    with bidikv.conversation("t") as conversation:
        answer = llm("m", client=fake.client(), async_client=fake.async_client()).complete("Oslo?")
    assert answer.text == "It is sunny."
    assert fake.sessions == [conversation.id]


def test_the_example(capsys):
    """It asks its two questions in one conversation, and tells of each turn."""
    fake = FakeRouter("It is sunny.")
    fake.reply(tool_calls=[ToolCall("weather", ARGS)])
    with fake.serve() as base_url:
        assert llama_index_agent.main(["--base-url", base_url, "--model", "m"]) == 0
    printed = capsys.readouterr().out
    assert len(set(fake.sessions)) == 1
    assert printed.count("It is sunny.") == 2
    assert "[turn 2] hit: prompt" in printed
