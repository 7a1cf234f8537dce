"""A LangGraph agent that looks around a source directory with tools, and then answers.

Every model call is one turn of one conversation: the graph's thread. The next tool is prescribed (`tool_choice`), so
that a model too small to choose still runs a real loop; its arguments and its answer are its own.

    python -m bidikv.examples.langgraph_agent --base-url http://127.0.0.1:8000/v1 --model MODEL --root sdk
"""

from __future__ import annotations

import sys
from functools import partial
from typing import TYPE_CHECKING, Any, TypeAlias

from langchain_core.messages import AIMessage, AIMessageChunk, HumanMessage, SystemMessage, ToolMessage
from langgraph.checkpoint.memory import MemorySaver
from langgraph.graph import END, START, MessagesState, StateGraph
from pydantic import SecretStr

from bidikv.examples.program import run_example
from bidikv.examples.source_tools import SourceTools
from bidikv.examples.turns import PLAN, SYSTEM, TurnRecord, parse_arguments, question_of
from bidikv.integrations.langgraph import BidiKVChat

if TYPE_CHECKING:
    import argparse
    from collections.abc import Callable, Iterator, Sequence

    from langgraph.graph.state import CompiledStateGraph

    from bidikv.examples.turns import Run

    Agent: TypeAlias = CompiledStateGraph[Any, Any, Any, Any]


class AgentState(MessagesState):
    """The conversation, and the model calls that the current question gets and has had."""

    turns: int
    done: int


def build_agent(chat: BidiKVChat, toolbox: SourceTools, plan: Sequence[str] = PLAN) -> Agent:
    """A graph of a `model` and a `tools` node that keeps its threads in memory.

    Args:
        chat: The model; set its temperature to 0 for repeatable runs.
        toolbox: The tools. They are offered in every turn, so that the start of the prompt never changes.
        plan: Names of the tools that the turns call, repeated as needed.
    """
    schemas = toolbox.schemas()

    def model(state: AgentState) -> dict[str, Any]:
        done = state["done"]
        choice = plan[done % len(plan)] if done < state["turns"] - 1 else "none"
        bound = chat.bind_tools(schemas, tool_choice=choice)
        return {"messages": [bound.invoke([SystemMessage(SYSTEM), *state["messages"]])], "done": done + 1}

    def tools(state: AgentState) -> dict[str, Any]:
        answer = state["messages"][-1]
        assert isinstance(answer, AIMessage)  # noqa: S101 - the edge below comes from `model` only
        results = [
            ToolMessage(toolbox.call(call["name"], call["args"]), tool_call_id=call["id"] or "")
            for call in answer.tool_calls
        ]
        results += [
            ToolMessage(f"error: {call['error']}", tool_call_id=call["id"] or "")
            for call in answer.invalid_tool_calls
        ]
        return {"messages": results or [HumanMessage("Go on.")]}

    def after_model(state: AgentState) -> str:
        return "tools" if state["done"] < state["turns"] else END

    graph = StateGraph(AgentState)
    graph.add_node("model", model)
    graph.add_node("tools", tools)
    graph.add_edge(START, "model")
    graph.add_conditional_edges("model", after_model, ["tools", END])
    graph.add_edge("tools", "model")
    return graph.compile(checkpointer=MemorySaver())


def run_agent(
    graph: Agent,
    *,
    on_turn: Callable[[TurnRecord], None] | None = None,
    **options: Any,
) -> list[TurnRecord]:
    """Ask one question and run all its turns; see `turns_of`.

    Raises:
        openai.APIError: The router cannot be reached, or fails a call.
    """
    records = []
    for record in turns_of(graph, **options):
        records.append(record)
        if on_turn:
            on_turn(record)
    return records


def turns_of(
    graph: Agent,
    *,
    thread_id: str,
    question: str,
    turns: int,
    on_token: Callable[[str], None] | None = None,
) -> Iterator[TurnRecord]:
    """Ask one question: `turns` model calls, of which the last answers in text.

    Args:
        graph: From `build_agent`.
        thread_id: The conversation; a known one is continued.
        question: The user's message.
        turns: Model calls, at least 1.
        on_token: Given each piece of text or of a tool call's arguments as it arrives.

    Raises:
        openai.APIError: The router cannot be reached, or fails a call.
    """
    index = 0
    asked = {"messages": [HumanMessage(question)], "turns": turns, "done": 0}
    limit = {"configurable": {"thread_id": thread_id}, "recursion_limit": 2 * turns + 5}
    for mode, event in graph.stream(asked, limit, stream_mode=["messages", "updates"]):  # type: ignore[call-overload]
        if mode == "messages" and isinstance(event[0], AIMessageChunk) and on_token:
            on_token(event[0].text + "".join(piece["args"] or "" for piece in event[0].tool_call_chunks))
        if mode == "updates" and "model" in event:
            yield record_of(event["model"]["messages"][0], index)
            index += 1


def record_of(answer: AIMessage, index: int) -> TurnRecord:
    """What an answer and its metadata say about its turn."""
    told = answer.response_metadata.get("bidikv") or {}
    calls = [*answer.tool_calls, *answer.invalid_tool_calls]
    raw = answer.additional_kwargs.get("bidikv", {}).get("args", {})
    return TurnRecord(
        index=index,
        text=answer.text,
        tool_name=calls[0]["name"] if calls else None,
        tool_args=raw.get(calls[0]["id"]) if calls else None,
        ttft_s=told.get("ttft_s"),
        session=told.get("session"),
        reason=told.get("reason"),
        prompt_tokens=told.get("prompt_tokens"),
        remote_tokens=told.get("remote_tokens"),
        local_tokens=told.get("local_tokens"),
        computed_tokens=told.get("computed_tokens"),
    )


def play(arguments: argparse.Namespace, run: Run) -> Iterator[list[TurnRecord]]:
    """Run the agent on one question."""
    chat = BidiKVChat(
        model=arguments.model,
        base_url=arguments.base_url,
        api_key=SecretStr(arguments.api_key),
        temperature=0,
        max_tokens=arguments.max_tokens,
        extra_body=run.extra_body(),
        readback=run.readback,
    )
    for record in turns_of(
        build_agent(chat, SourceTools(arguments.root)),
        thread_id=run.thread,
        question=question_of(arguments),
        turns=arguments.turns,
        on_token=run.on_token,
    ):
        yield [record]


def main(argv: list[str] | None = None) -> int:
    """Run the agent on one question."""
    arguments = parse_arguments("A LangGraph agent over a source directory.", argv)
    return run_example(arguments, partial(play, arguments))


if __name__ == "__main__":
    sys.exit(main())
