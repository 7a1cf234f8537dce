"""One suite for `BidiKVChat` in LangGraph's and LangChain's hands, whatever answers."""

from __future__ import annotations

import asyncio
import itertools
import json
import operator
from typing import Annotated, Literal, TypedDict

import pydantic
from langchain.agents import create_agent
from langchain.agents.middleware import AgentMiddleware
from langchain.agents.structured_output import ToolStrategy
from langchain_core.messages import AIMessage, AIMessageChunk, HumanMessage, SystemMessage
from langchain_core.tools import tool
from langgraph.checkpoint.memory import MemorySaver
from langgraph.graph import START, StateGraph
from langgraph.types import Command, Send, interrupt
from target import said, unstreamed

import bidikv
from bidikv.integrations import (
    BidiKVChat,
    BidiKVMiddleware,
    aclose_thread,
    close_thread,
    thread_report,
)
from bidikv.memory import Memory
from bidikv.testing import ToolCall, _http

SYSTEM = (
    "You keep a lighthouse, which stands on a rock in the sea, and you answer in one short sentence. "
    "Every evening you climb the stairs and light the lamp. Ships from many countries pass, and you write "
    "their names into a book. In winter the wind is strong, and the lamp needs more oil than in summer."
)


class What(pydantic.BaseModel):
    """What is meant."""

    what: Literal["sea", "lamp", "rock"]


@tool
def look(what: Literal["sea", "lamp", "rock"]) -> str:
    """Look at something."""
    return f"The {what} is as it was yesterday: calm and quiet."


@tool
def confirm(what: Literal["sea", "lamp", "rock"]) -> str:
    """Ask the human about it."""
    return f"The human says {interrupt(what)}."


class Prescribed(AgentMiddleware):
    """Has the model take the steps that its last question names, `do: look look`: the suites' model is too small to choose."""

    def _next(self, request):
        asked = max(i for i, message in enumerate(request.messages) if isinstance(message, HumanMessage))
        plan = request.messages[asked].text.partition("do: ")[2].split()
        done = sum(isinstance(message, AIMessage) for message in request.messages[asked:])
        return request.override(tool_choice=plan[done] if done < len(plan) else "none")

    def wrap_model_call(self, request, handler):
        """One step a turn, then an answer."""
        return handler(self._next(request))

    async def awrap_model_call(self, request, handler):
        """One step a turn, then an answer."""
        return await handler(self._next(request))


class Stage:
    """A chat model whose requests are seen on their way out, and a thread."""

    def __init__(self, target, thread_id="thread"):
        self.target = target
        self.bodies = []
        self.thread_id = f"{thread_id}-{target.key}"
        self.config = {"configurable": {"thread_id": self.thread_id}}
        http = _http()
        client = target.client(http_client=http.Client(event_hooks={"request": [self._see]}, timeout=300))
        # Closed in the loop that uses it, by `asynchronously`.
        self._async_client = target.async_client(
            http_client=http.AsyncClient(event_hooks={"request": [self._see_async]}, timeout=300)
        )
        # As for the clients that the model makes for itself: a thread may be asked either way.
        ours = {"on_drift": "raise", "memory": Memory()}
        self.chat = BidiKVChat(
            model=target.model,
            temperature=0,
            max_tokens=24,
            client=bidikv.wrap(client, **ours),
            async_client=bidikv.wrap(self._async_client, **ours),
        )

    def _see(self, request):
        if request.url.path.endswith("/chat/completions"):
            self.bodies.append(json.loads(request.content))

    async def _see_async(self, request):
        self._see(request)

    def agent(self, tools=(), *middleware, **options):
        """An agent of LangChain's on the chat model, with a checkpointer of its own unless one is given."""
        return create_agent(
            self.chat,
            list(tools),
            name="keeper",
            system_prompt=SYSTEM,
            middleware=[*middleware, Prescribed(), BidiKVMiddleware()],
            **{"checkpointer": MemorySaver(), **options},
        )

    def calls(self, *names):
        """Script the fake router's next answers: calls of these tools, spelt as no JSON library does it."""
        for number, name in enumerate(names):
            call = ToolCall(name, '{ "what" :"sea"}', f"call_{len(self.bodies)}_{number}")
            self.target.reply(tool_calls=[call])

    def asynchronously(self, coroutine):
        """Run a coroutine, and close the asynchronous client."""

        async def run():
            async with self._async_client:
                return await coroutine

        return asyncio.run(run())

    @property
    def turns(self):
        """Of the thread, by all its agents."""
        return thread_report(self.thread_id).turns

    def check(self, constrained=()):
        """Each turn reads back the ones before, and its prompt begins with theirs."""
        self.target.check(self.turns, constrained=constrained)
        assert [turn.drift.kind for turn in self.turns] == ["start"] + ["append"] * (len(self.turns) - 1)
        assert len(self.bodies) == len(self.turns)
        for before, after in itertools.pairwise(self.bodies):
            assert after["messages"][: len(before["messages"])] == before["messages"]
            assert after.get("tools") == before.get("tools")

    def check_answers(self, answers):
        """They are what the plain client gets for what was sent."""
        assert len(answers) == len(self.bodies)
        for body, answer in self.target.compared(list(zip(self.bodies, answers, strict=True))):
            self.target.same_as_plain(unstreamed(body), spelt(answer))


def spelt(answer):
    """A message of LangChain's as the model wrote it."""
    raw = answer.additional_kwargs.get("bidikv", {}).get("args", {})
    calls = [{"function": {"name": c["name"], "arguments": raw[c["id"]]}} for c in answer.tool_calls]
    return {"content": answer.text, "tool_calls": calls}


def answers_in(state):
    """The model's messages, in order."""
    return [message for message in state.values["messages"] if isinstance(message, AIMessage)]


def told(question):
    return {"messages": [HumanMessage(question)]}


class LangGraphSuite:
    """To be run with a fixture `target`."""

    def test_every_way_to_ask(self, target):
        """Invoked, streamed, awaited, as events: turns of one thread, each of which reads back the ones before."""
        stage = Stage(target)
        agent, config = stage.agent(), stage.config
        agent.invoke(told("What is in the sea?"), config)
        pieces = [
            piece
            for piece, _ in agent.stream(told("And on the rock?"), config, stream_mode="messages")
            if isinstance(piece, AIMessageChunk)
        ]

        async def run():
            await agent.ainvoke(told("Who lit the lamp?"), config)
            async for _ in agent.astream(told("And why?"), config, stream_mode="messages"):
                pass
            events = agent.astream_events(told("And when?"), config, version="v2")
            return [
                event["data"]["chunk"] async for event in events if event["event"] == "on_chat_model_stream"
            ]

        chunks = stage.asynchronously(run())
        answers = answers_in(agent.get_state(config))
        stage.check()
        assert [turn.ttft_s is not None for turn in stage.turns] == [False, True, False, True, True]
        assert "".join(piece.text for piece in pieces) == answers[1].text
        assert "".join(chunk.text for chunk in chunks) == answers[4].text
        for answer, turn in zip(answers, stage.turns, strict=True):
            account = answer.response_metadata["bidikv"]
            assert (account["reason"], account["remote_tokens"]) == (turn.reason, turn.remote_tokens)
            assert answer.usage_metadata["input_tokens"] == turn.prompt_tokens
            assert answer.usage_metadata["input_token_details"]["cache_read"] == turn.remote_tokens
        stage.check_answers(answers)

    def test_tools_and_a_human(self, target):
        """Two tools and an interrupt, which another process could go on from; then the thread ends."""
        stage, memory = Stage(target), MemorySaver()
        agent, config = stage.agent([look, confirm], checkpointer=memory), stage.config

        stage.calls("look", "confirm")
        agent.invoke(told("Is all well? do: look confirm"), config)
        assert agent.get_state(config).interrupts
        again = stage.agent([look, confirm], checkpointer=memory)
        list(again.stream(Command(resume="yes"), config, stream_mode="messages"))
        again.invoke(told("Thank you."), config)
        state = again.get_state(config)
        stage.check(constrained=[0, 1])
        assert [len(answer.tool_calls) for answer in answers_in(state)] == [1, 1, 0, 0]
        assert [turn.index for turn in stage.turns] == [0, 1, 2, 3]
        stage.check_answers(answers_in(state))
        close_thread(stage.thread_id)
        seen = len(stage.bodies)
        again.invoke(told("Are you there?"), config)
        (turn,) = stage.turns
        assert (turn.reason, turn.remote_tokens) == ("new_conversation", 0)
        assert len(stage.bodies) == seen + 1

    def test_tools_in_coroutines(self, target):
        """The asynchronous agent does the same, and its thread ends in a coroutine."""
        stage = Stage(target)
        agent, config = stage.agent([look, confirm]), stage.config
        stage.calls("look", "confirm")

        async def run():
            async for _ in agent.astream(
                told("Is all well? do: look confirm"), config, stream_mode="messages"
            ):
                pass
            await agent.ainvoke(Command(resume="yes"), config)
            turns = stage.turns
            await aclose_thread(stage.thread_id)
            return turns

        turns = stage.asynchronously(run())
        target.check(turns, constrained=[0, 1])
        assert len(turns) == 3
        assert stage.turns == ()
        stage.check_answers(answers_in(agent.get_state(config)))

    def test_time_travel(self, target):
        """A turn played again is the same turn; two branches go on from what they share, each with its own."""
        stage = Stage(target)
        agent, config = stage.agent(), stage.config
        answers = []

        def go(given, at):
            agent.invoke(given, at)
            state = agent.get_state(config)
            answers.append(answers_in(state)[-1])
            return state.config

        first = go(told("What is in the sea?"), config)
        second = go(told("And on the rock?"), config)
        before = next(
            state.config
            for state in agent.get_state_history(config)
            if state.next and "model" in state.next[0]
        )
        go(None, before)
        left = go(told("No, under the lamp, please?"), first)
        go(told("And far away?"), second)
        go(told("Thank you."), left)
        turns = stage.turns
        assert [turn.drift.kind for turn in turns[:4]] == ["start", "append", "retry", "fork"]
        assert turns[0].reason == "new_conversation"
        assert {turn.reason for turn in turns[1:]} <= {"hit", "hit_diverged"}
        assert [turn.reason for turn in (turns[1], turns[2], turns[5])] == ["hit"] * 3
        for parent, child in ((0, 1), (0, 2), (0, 3), (1, 4), (3, 5)):
            floor = (turns[parent].prompt_tokens - 1) // target.block * target.block
            assert turns[child].remote_tokens >= floor > 0, (parent, child)
        assert said(spelt(answers[1])) == said(spelt(answers[2]))
        assert len({turn.key for turn in turns}) == 1
        stage.check_answers(answers)

    def test_answers_of_a_schema(self, target):
        """Objects come out, of text or of a tool call, and the history is read back."""
        stage = Stage(target)
        texts = stage.chat.with_structured_output(What)
        raws = stage.chat.with_structured_output(What, include_raw=True)
        history = [SystemMessage(SYSTEM), HumanMessage("What is blue?")]
        first = raws.invoke(history, stage.config)
        assert isinstance(first["parsed"], What)
        history += [first["raw"], HumanMessage("And what is bright?")]
        second = raws.invoke(history, stage.config)
        assert stage.asynchronously(texts.ainvoke(history, stage.config)) == second["parsed"]
        turns = stage.turns
        target.check(turns, constrained=[0])
        assert [turn.drift.kind for turn in turns] == ["start", "append", "retry"]
        stage.check_answers([first["raw"], second["raw"], second["raw"]])
        stage.calls("What")
        calls = stage.chat.with_structured_output(What, method="function_calling")
        assert isinstance(calls.invoke(history, {"configurable": {"thread_id": "another"}}), What)

    def test_an_agent_that_answers_by_a_schema(self, target):
        """`create_agent(response_format=...)` gets its object in each turn, from a tool that has to be called."""
        stage = Stage(target)
        agent = create_agent(
            stage.chat,
            [],
            system_prompt=SYSTEM,
            response_format=ToolStrategy(What),
            checkpointer=MemorySaver(),
        )
        for question in ("What is blue?", "And what is bright?"):
            stage.calls("What")
            state = agent.invoke(told(question), stage.config)
            assert isinstance(state["structured_response"], What)
        stage.check(constrained=[0, 1])
        stage.check_answers(answers_in(agent.get_state(stage.config)))

    def test_workers_at_once(self, target):
        """Sent nodes of one thread run at once, and each goes on from its own last turn."""

        class State(TypedDict):
            topics: list[str]
            told: Annotated[list, operator.add]

        stage = Stage(target)

        async def worker(state):
            messages = [SystemMessage(SYSTEM), HumanMessage(f"Tell me about the {state['topic']}.")]
            answers = []
            for more in ("And more?", None):
                answers.append(await stage.chat.ainvoke(messages))
                messages += [answers[-1], HumanMessage(more or "")]
            return {"told": [(state["topic"], answers)]}

        graph = StateGraph(State)
        graph.add_node("worker", worker)
        graph.add_conditional_edges(
            START, lambda state: [Send("worker", {"topic": topic}) for topic in state["topics"]], ["worker"]
        )
        compiled = graph.compile(checkpointer=MemorySaver())
        given = {"topics": ["sea", "lamp"], "told": []}
        state = stage.asynchronously(compiled.ainvoke(given, stage.config))
        by_conversation = {}
        for turn in stage.turns:
            by_conversation.setdefault(turn.session, []).append(turn)
        assert [len(turns) for turns in by_conversation.values()] == [2, 2]
        for turns in by_conversation.values():
            target.check(turns)
        for topic, answers in state["told"]:
            bodies = [body for body in stage.bodies if topic in body["messages"][1]["content"]]
            for body, answer in zip(bodies, answers, strict=True):
                target.same_as_plain(unstreamed(body), spelt(answer))
