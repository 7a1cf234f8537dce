"""Google ADK on the wire: its real runner and LiteLLM, and a router on loopback. Needs a venv of its own."""

from __future__ import annotations

import asyncio

import pytest

pytest.importorskip("google.adk", reason="needs google-adk and litellm, which fit no engine's environment")
pytest.importorskip("litellm")

from google.adk.agents import LlmAgent
from google.adk.models.lite_llm import LiteLlm
from google.adk.runners import Runner
from google.adk.sessions import InMemorySessionService
from google.genai import types

from bidikv.examples import google_adk_agent
from bidikv.headers import READBACK_HEADER
from bidikv.integrations.google_adk import BidiKVPlugin
from bidikv.testing import FakeRouter, ToolCall

pytestmark = pytest.mark.filterwarnings("default")  # the framework's own


def weather(city: str) -> str:
    """Tell the weather."""
    return f"{city} is sunny."


def run(fake, plugin, *questions):
    """Ask an agent with a tool, one question after the other, in one session."""

    async def talk(base_url):
        agent = LlmAgent(
            name="planner",
            model=LiteLlm(model="openai/m", api_base=base_url, api_key="k"),
            instruction="Look it up.",
            tools=[weather],
        )
        sessions = InMemorySessionService()
        runner = Runner(app_name="app", agent=agent, session_service=sessions, plugins=[plugin])
        session = await sessions.create_session(app_name="app", user_id="u", session_id="s")
        for question in questions:
            message = types.Content(role="user", parts=[types.Part(text=question)])
            async for _ in runner.run_async(user_id="u", session_id=session.id, new_message=message):
                pass

    with fake.serve() as base_url:
        asyncio.run(talk(base_url))


def test_a_session_is_one_conversation():
    """Its calls carry one id, keyed and the same in every process; turns after the first are hits."""
    fake, plugin = FakeRouter("It is sunny."), BidiKVPlugin()
    fake.reply(tool_calls=[ToolCall("weather", '{"city": "Oslo"}')])
    run(fake, plugin, "Oslo?", "Sure?")
    assert fake.sessions == [plugin.conversation_id("app", "u", "s", "planner")] * 3
    assert {request.turn.agent for request in fake.requests} == {"planner"}
    assert BidiKVPlugin(secret=b"x").conversation_id("app", "u", "s", "planner") not in fake.sessions


def test_readback_off():
    """For comparisons."""
    fake = FakeRouter("It is sunny.")
    run(fake, BidiKVPlugin(readback=False), "Oslo?")
    assert fake.requests[0].headers[READBACK_HEADER] == "off"


def test_the_example(capsys):
    """It asks its two questions in one conversation."""
    fake = FakeRouter("It is sunny.")
    fake.reply(tool_calls=[ToolCall("weather", '{"city": "Oslo"}')])
    with fake.serve() as base_url:
        assert google_adk_agent.main(["--base-url", base_url, "--model", "m"]) == 0
    assert len(fake.sessions) == 3
    assert len(set(fake.sessions)) == 1
    assert capsys.readouterr().out.count("It is sunny.") == 2
