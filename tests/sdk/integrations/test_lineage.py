"""A long-lived agent against the real router: which turn each call goes on from, and what it reuses."""

from __future__ import annotations

import asyncio
import sys
from collections import Counter, defaultdict
from pathlib import Path

import pytest
from langchain.agents import create_agent
from langchain.agents.middleware import SummarizationMiddleware
from langchain_core.messages import HumanMessage, SystemMessage, ToolMessage
from langchain_core.tools import tool
from langgraph.checkpoint.memory import MemorySaver
from langgraph.graph import START, MessagesState, StateGraph
from langgraph.types import Command, Send, interrupt

from bidikv.integrations import BidiKVChat, BidiKVMiddleware, aclose_thread, close_thread, thread_report

pytest.importorskip("aiohttp", reason="needs the router's libraries")
sys.path.insert(0, str(Path(__file__).parents[2] / "doubles"))

from fake_engine import serving
from retaining_engines import retaining

from bidikv_server.router.app import create_app
from bidikv_server.router.settings import RouterSettings


def play(body):
    """A model that does what the last question says, `do: tool tool+tool`, one step a turn, and then answers."""
    messages = body["messages"]
    asked = max(index for index, message in enumerate(messages) if message["role"] == "user")
    plan = messages[asked]["content"].partition("do: ")[2].split()
    done = sum(message["role"] == "assistant" for message in messages[asked:])
    if done >= len(plan):
        return {"role": "assistant", "content": f"Done after {done} steps, as the plan said."}
    calls = [
        {
            "index": index,
            "id": f"call_{len(messages)}_{index}",
            "type": "function",
            # As no JSON library writes it.
            "function": {"name": name, "arguments": f'{{ "what" :"caf\\u00e9 {len(messages)}{index}"}}'},
        }
        for index, name in enumerate(plan[done].split("+"))
    ]
    return {"role": "assistant", "content": None, "reasoning": "Let me see.", "tool_calls": calls}


def through_router(use):
    """Call `use(base_url)` in a thread while a router, a prefill and two decode engines run."""

    async def run(prefill):
        decodes = prefill.decodes.values()
        async with serving(prefill, *decodes) as (prefill_url, *decode_urls):
            settings = RouterSettings(prefill=(prefill_url,), decode=tuple(decode_urls), max_records=64)
            async with serving(create_app(settings), lifespan="on") as (url,):
                return await asyncio.to_thread(use, f"{url}/v1"), prefill

    with retaining(play, decodes=2) as prefill:
        return asyncio.run(run(prefill))


def build(base_url, chat=None, more=()):
    """A boss with a tool, a tool that asks a human, and a tool that is an agent of its own; and its model."""
    chat = chat or BidiKVChat(model="m", base_url=base_url, temperature=0)

    @tool
    def look(what: str) -> str:
        """Look something up."""
        return f"{what}: 24 degrees and sunny, light wind from the west."

    @tool
    def confirm(what: str) -> str:
        """Ask the human."""
        return f"The human says {interrupt(what)}."

    researcher = create_agent(chat, [look], name="researcher", system_prompt="You look things up, twice.")

    @tool
    def research(what: str) -> str:
        """Let somebody look into something."""
        found = researcher.invoke({"messages": [HumanMessage(f"Look into {what}. do: look look")]})
        return found["messages"][-1].text

    boss = create_agent(
        chat,
        [look, confirm, research],
        name="boss",
        system_prompt="You are the boss. " * 8,
        checkpointer=MemorySaver(),
        middleware=[*more, BidiKVMiddleware()],
    )
    return boss, chat


def ask(agent, config, question, *, stream):
    """Let an agent go on until it has answered or waits for a human."""
    told = question if isinstance(question, Command) else {"messages": [HumanMessage(question)]}
    if stream:
        list(agent.stream(told, config, stream_mode="messages"))
    else:
        agent.invoke(told, config)


def twenty_turns(agent, thread_id, *, stream):
    """Two questions with tools, a human and sub-agents; a fork of the first; then on with the second."""
    config = {"configurable": {"thread_id": thread_id}}
    ask(agent, config, "Where should I go? do: look research confirm look", stream=stream)
    assert agent.get_state(config).interrupts
    ask(agent, config, Command(resume="yes"), stream=stream)
    first = agent.get_state(config).config
    ask(agent, config, "And what should I pack? do: look research+research", stream=stream)
    second = agent.get_state(config).config
    ask(agent, first, "No, somewhere cold. do: look", stream=stream)
    ask(agent, second, "And for how long? do: look", stream=stream)


@pytest.mark.parametrize("stream", [False, True])
def test_an_agent_of_twenty_turns(stream):
    """Tools, sub-agents, a fork and an interrupt: every turn reuses all that decode had, and goes on from the right turn."""
    thread = f"twenty-{stream}"

    def use(base_url):
        agent, chat = build(base_url)
        twenty_turns(agent, thread, stream=stream)
        turns, client = thread_report(thread).turns, chat._sync()
        told = {turn.key: client.get(f"/bidikv/conversations/{turn.key}", cast_to=object) for turn in turns}
        close_thread(thread)
        client.close()
        return turns, told

    (turns, told), prefill = through_router(use)
    assert len(turns) == len(prefill.legs) == 21
    legs = by_conversation(prefill)
    assert legs.keys() == told.keys()
    assert sorted(len(played) for played in legs.values()) == [3, 3, 3, 12]
    for key, played in legs.items():
        assert [str(leg.account.reason) for leg in played] == [reason_of(leg, played) for leg in played]
        assert [leg.account.remote_tokens for leg in played[1:]] == [
            leg.reusable_tokens for leg in played[1:]
        ]
        assert all(leg.account.remote_tokens > 0 for leg in played[1:])
        check_ancestors(told[key], [leg.seen.body["messages"] for leg in played])
    assert Counter(turn.drift.kind for turn in turns) == {"start": 4, "append": 16, "fork": 1}
    # Between an agent's turns there are tools, and each turn says so.
    decodes = prefill.decodes.values()
    assert all(seen.ours["protect"] for decode in decodes for seen in decode.answered)
    assert sum(decode.index.take_counts()[0].get("renew", 0) for decode in decodes if decode.answered) == 10
    assert sum(decode.held_tokens for decode in decodes) == 0


def reason_of(leg, played):
    """Of its conversation's turns, the first finds nothing, and the fork leaves what the last one went on with."""
    if leg is played[0]:
        return "new_conversation"
    return "hit_diverged" if leg.seen.body["messages"][-1]["content"].startswith("No,") else "hit"


def check_ancestors(told, prompts):
    """The router hung each turn under the deepest turn of its conversation that it goes on from."""
    names = [record["turn"] for record in reversed(told["recent"])]
    prompt_of_turn = dict(zip(names, prompts, strict=True))
    assert len(prompt_of_turn) == len(prompts)
    parents = {node["turn"]: node["parent"] for node in told["tree"]}
    for place, name in enumerate(names):
        prompt = prompt_of_turn[name]
        earlier = [
            other for other in names[:place] if prompt[: len(prompt_of_turn[other])] == prompt_of_turn[other]
        ]
        assert parents[name] == max(earlier, key=lambda other: len(prompt_of_turn[other]), default=None)


def test_sent_nodes_are_told_apart():
    """Workers of one node that run at once each go on from their own last turn, over two rounds of tools."""

    class State(MessagesState):
        topics: list[str]

    def use(base_url):
        chat = BidiKVChat(model="m", base_url=base_url)
        bound = chat.bind_tools([{"name": "look", "parameters": {"type": "object", "properties": {}}}])

        async def worker(state):
            messages = [
                SystemMessage("You look things up. " * 9),
                HumanMessage(f"{state['topic']} do: look look"),
            ]
            for _ in range(2):
                messages.append(await bound.ainvoke(messages))
                messages.append(
                    ToolMessage("24 degrees and sunny.", tool_call_id=messages[-1].tool_calls[0]["id"])
                )
            return {"messages": [await bound.ainvoke(messages)]}

        graph = StateGraph(State)
        graph.add_node("worker", worker)
        graph.add_conditional_edges(
            START, lambda state: [Send("worker", {"topic": topic}) for topic in state["topics"]], ["worker"]
        )
        compiled = graph.compile(checkpointer=MemorySaver())

        async def run():
            await compiled.ainvoke(
                {"messages": [], "topics": [f"City {number}?" for number in range(5)]},
                {"configurable": {"thread_id": "sent"}},
            )
            await aclose_thread("sent")
            await chat._async().close()

        asyncio.run(run())

    _, prefill = through_router(use)
    legs = by_conversation(prefill)
    assert [len(played) for played in legs.values()] == [3] * 5
    for played in legs.values():
        assert [str(leg.account.reason) for leg in played[1:]] == ["hit", "hit"]
        assert [leg.account.remote_tokens for leg in played[1:]] == [
            leg.reusable_tokens for leg in played[1:]
        ]
    assert sum(decode.held_tokens for decode in prefill.decodes.values()) == 0


def test_time_travel():
    """A replayed turn is the same turn again; a branch that was left is gone on with as if nobody had left it."""

    def use(base_url):
        agent, chat = build(base_url)
        config = {"configurable": {"thread_id": "travel"}}
        ask(agent, config, "Where should I go? do: look", stream=False)
        before, head = (
            next(state.config for state in agent.get_state_history(config) if state.next == wanted)
            for wanted in (("model",), ())
        )
        agent.invoke(None, before)
        replayed = agent.get_state(config).config
        ask(agent, head, "No, somewhere cold, and take your time. do: look look look", stream=False)
        cold = agent.get_state(config).config
        ask(agent, replayed, "And for how long? do: look", stream=False)
        warm = agent.get_state(config).config
        ask(agent, cold, "Thank you.", stream=False)
        ask(agent, warm, "Thank you, that will do.", stream=False)
        turns = thread_report("travel").turns
        chat._sync().close()
        return turns

    turns, prefill = through_router(use)
    (played,) = by_conversation(prefill).values()
    assert [turn.drift.kind for turn in turns] == [
        "start", "append", "retry",
        "append", "append", "append", "append",
        "fork", "append",
        "append", "append",
    ]  # fmt: skip
    assert [str(leg.account.reason) for leg in played] == ["new_conversation"] + ["hit"] * 6 + [
        "hit_diverged",
        "hit",
        "hit",
        "hit",
    ]
    assert [leg.account.remote_tokens for leg in played[1:]] == [leg.reusable_tokens for leg in played[1:]]


def test_a_summary_is_made_on_the_side():
    """It is another conversation, is not retained, and the thread's own goes on from its new history."""

    def use(base_url):
        chat = BidiKVChat(model="m", base_url=base_url)
        summary = SummarizationMiddleware(chat, trigger=("messages", 4), keep=("messages", 1))
        agent, _ = build(base_url, chat, more=[summary])
        for question in ("one", "two", "three"):
            ask(agent, {"configurable": {"thread_id": "sum"}}, question, stream=False)
        chat._sync().close()

    _, prefill = through_router(use)
    main, side = by_conversation(prefill).values()
    assert (len(main), len(side)) == (3, 1)
    kept = {
        seen.ours["conversation"]: seen.ours["retain_s"] > 0
        for decode in prefill.decodes.values()
        for seen in decode.answered
    }
    assert kept == {main[0].seen.ours["conversation"]: True, side[0].seen.ours["conversation"]: False}
    assert [str(leg.account.reason) for leg in main] == ["new_conversation", "hit", "hit_diverged"]


def by_conversation(prefill):
    """The legs of each conversation, in order."""
    legs = defaultdict(list)
    for leg in prefill.legs:
        legs[leg.seen.ours["conversation"]].append(leg)
    return legs
