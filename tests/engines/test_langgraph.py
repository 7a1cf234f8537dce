"""A LangGraph agent of twenty turns on real engines: tools, a sub-agent, a human, a fork."""

import itertools
import uuid
from collections import defaultdict
from typing import Literal

import pytest

pytest.importorskip("langchain", reason="the agent is LangChain's")

from langchain.agents import create_agent
from langchain.agents.middleware import AgentMiddleware
from langchain_core.messages import AIMessage, HumanMessage
from langchain_core.tools import tool
from langgraph.checkpoint.memory import MemorySaver
from langgraph.types import Command, interrupt

from bidikv.integrations import BidiKVChat, BidiKVMiddleware, close_thread, thread_report

from .conftest import BLOCK, THRESHOLD


class Prescribed(AgentMiddleware):
    """Has the model take the steps that its last question names, `do: look look`: it is too small to choose."""

    def wrap_model_call(self, request, handler):
        """One step a turn, then an answer."""
        asked = max(i for i, message in enumerate(request.messages) if isinstance(message, HumanMessage))
        plan = request.messages[asked].text.partition("do: ")[2].split()
        done = sum(isinstance(message, AIMessage) for message in request.messages[asked:])
        return handler(request.override(tool_choice=plan[done] if done < len(plan) else "none"))


def build(chat):
    """A boss with a tool, a tool that asks a human, and a tool that is an agent of its own."""

    @tool
    def look(what: Literal["sea", "lamp", "rock"]) -> str:
        """Look at something."""
        return f"The {what} is as it was yesterday: calm and quiet."

    @tool
    def confirm(what: Literal["yes", "no"]) -> str:
        """Ask the human."""
        return f"The human says {interrupt(what)}."

    helper = create_agent(
        chat, [look], name="helper", system_prompt="You look at things.", middleware=[Prescribed()]
    )

    def helped(question: str) -> str:
        told = helper.invoke({"messages": [HumanMessage(f"{question} do: look look")]})
        return told["messages"][-1].text[:80]

    # One that asked twice for the same would be one helper with one history, whatever the model chose to ask for.
    @tool
    def research(what: Literal["ships", "weather"]) -> str:
        """Let somebody look into something."""
        return helped(f"Look into the {what}, please, and tell me.")

    @tool
    def survey(what: Literal["ships", "weather"]) -> str:
        """Let somebody survey something."""
        return helped(f"Survey the {what} from up here, and report.")

    return create_agent(
        chat,
        [look, confirm, research, survey],
        name="boss",
        system_prompt="You keep a lighthouse.",
        checkpointer=MemorySaver(),
        middleware=[Prescribed(), BidiKVMiddleware()],
    )


def test_a_langgraph_agent_of_twenty_turns(cluster):
    """Every turn after a conversation's first reads back at least the whole prompt of the turn that it goes on from."""
    chat = BidiKVChat(
        model=cluster.model_name,
        base_url=cluster.base_url,
        temperature=0,
        max_tokens=40,
        timeout=300,
        on_drift="raise",
    )
    thread = uuid.uuid4().hex
    config = {"configurable": {"thread_id": thread}}
    agent = build(chat)

    def ask(of, question):
        for _ in agent.stream({"messages": [HumanMessage(question)]}, of, stream_mode="messages"):
            pass
        return agent.get_state(config).config

    ask(config, "Is all well at the rock tonight? do: look research confirm look")
    assert agent.get_state(config).interrupts
    list(agent.stream(Command(resume="yes"), config, stream_mode="messages"))
    first = agent.get_state(config).config
    second = ask(config, "And what about the ships? do: look survey")
    ask(first, "No, tell me about the lamp. do: look")
    third = ask(second, "And tomorrow? do: look look")
    ask(third, "Thank you.")
    turns = thread_report(thread).turns
    close_thread(thread)
    chat._sync().close()

    assert len(turns) == 20
    assert all(turn.ttft_s > 0 for turn in turns)
    conversations = defaultdict(list)
    for turn in turns:
        conversations[turn.session].append(turn)
    assert sorted(len(played) for played in conversations.values()) == [3, 3, 14]
    for played in conversations.values():
        assert played[0].reason == "new_conversation"
        # A fork is no longer than the turn that it leaves, so the longest prompt before it bounds nothing there.
        for before, turn in itertools.pairwise(played):
            assert turn.reason == "hit" or (turn.drift.kind == "fork" and turn.reason == "hit_diverged")
            known = before.prompt_tokens if before.prompt_tokens < turn.prompt_tokens else 0
            assert turn.remote_tokens >= max(THRESHOLD, known // BLOCK * BLOCK)
            assert turn.remote_tokens + turn.computed_tokens == turn.prompt_tokens
    assert [turn.drift.kind for turn in turns].count("fork") == 1
