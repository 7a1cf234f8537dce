"""Chat models of other packages, and LangChain's middleware, made to name their conversations."""

from __future__ import annotations

import asyncio
import functools
import itertools
import warnings

import openai
import pytest
from langchain.agents import create_agent
from langchain.agents.middleware import ModelFallbackMiddleware, SummarizationMiddleware
from langchain_core.language_models.fake_chat_models import FakeListChatModel
from langchain_core.messages import AIMessage, HumanMessage
from langchain_core.tools import tool
from langgraph.checkpoint.memory import MemorySaver
from langgraph.graph import START, MessagesState, StateGraph
from langgraph.prebuilt import ToolNode, tools_condition

import bidikv
from bidikv.integrations import BidiKVChat, BidiKVMiddleware, adapt, thread_report
from bidikv.integrations.langgraph import awrap_tool_call, wrap_tool_call
from bidikv.testing import FakeRouter, ToolCall

langchain_openai = pytest.importorskip("langchain_openai", reason="adapts its models")

LONG = "What does the router do? " * 20
RAW = '{ "path" :"caf\\u00e9.py"}'


@tool
def look(path: str) -> str:
    """Look at a path."""
    return f"{path}: 24 lines"


@pytest.fixture
def router():
    """A router in memory, whose model calls a tool once and then answers."""
    router = FakeRouter()
    router.reply(tool_calls=[ToolCall("look", RAW)], reasoning="Let me look.")
    return router


def chat_openai(router, **options):
    http = router.transport()
    library = __import__(type(http).__mro__[1].__module__.partition(".")[0])
    return langchain_openai.ChatOpenAI(
        model="m",
        base_url="http://router/v1",
        api_key="k",
        http_client=library.Client(transport=http),
        http_async_client=library.AsyncClient(transport=http),
        **options,
    )


def thread(name):
    return {"configurable": {"thread_id": name}}


def asked(agent, config, *, mode):
    """Two questions of a thread."""
    for question in ("one", "two"):
        told = {"messages": [HumanMessage(question)]}
        if mode == "stream":
            list(agent.stream(told, config, stream_mode="messages"))
        elif mode == "invoke":
            agent.invoke(told, config)
        else:
            asyncio.run(agent.ainvoke(told, config))


@pytest.mark.parametrize("mode", ["invoke", "stream", "ainvoke"])
@pytest.mark.parametrize("by", ["adapter", "middleware"])
def test_an_agent_keeps_its_own_model(router, mode, by):
    """Its turns are one conversation, histories only grow, and what the model wrote goes back as it was."""
    model = chat_openai(router)
    more = {"middleware": [BidiKVMiddleware(restore="all")]} if by == "middleware" else {}
    agent = create_agent(
        model if more else adapt(model, restore="all"),
        [look],
        name="boss",
        system_prompt="Be brief.",
        checkpointer=MemorySaver(),
        **more,
    )
    config = thread(f"{by}-{mode}")
    asked(agent, config, mode=mode)
    assert len(set(router.sessions)) == 1
    assert router.sessions[0].startswith("c_")
    bodies = [request.body["messages"] for request in router.requests]
    for before, after in itertools.pairwise(bodies):
        assert after[: len(before)] == before
    answer = bodies[1][2]
    assert answer["tool_calls"][0]["function"]["arguments"] == RAW
    assert answer["reasoning"] == "Let me look."
    assert not any("name" in message for message in bodies[-1])
    report = thread_report(config["configurable"]["thread_id"])
    assert [turn.reason for turn in report.turns] == ["new_conversation", "hit", "hit"]
    assert [turn.drift.kind for turn in report.turns] == ["start", "append", "append"]
    last = agent.get_state(config).values["messages"][-1]
    assert last.usage_metadata["input_tokens"] > 0
    assert last.response_metadata["bidikv"]["reason"] == "hit"
    assert (len(router.told) > 0) is (by == "middleware")


async def events_of(model, config):
    """Pieces and the whole answer, as LangChain's events tell them."""
    told = [event async for event in model.astream_events(LONG, config, version="v2")]
    pieces = [event["data"]["chunk"] for event in told if event["event"] == "on_chat_model_stream"]
    return pieces, next(event["data"]["output"] for event in told if event["event"] == "on_chat_model_end")


async def pieces_of(model, config):
    return [piece async for piece in model.astream(LONG, config)]


@pytest.mark.parametrize("more", [{}, {"stream_usage": False}, {"use_responses_api": True}])
@pytest.mark.parametrize("mode", ["stream", "astream", "astream_events"])
def test_streams_carry_their_account(mode, more):
    """One piece has it, so that the merged answer has it once; its time is that of the first output."""
    router = FakeRouter()
    model, config = adapt(chat_openai(router, **more)), thread(f"{mode}{more}")
    for reason in ("new_conversation", "hit"):
        if mode == "stream":
            pieces = list(model.stream(LONG, config))
        elif mode == "astream":
            pieces = asyncio.run(pieces_of(model, config))
        else:
            pieces, whole = asyncio.run(events_of(model, config))
            assert whole.response_metadata["bidikv"]["reason"] == reason
        merged = functools.reduce(lambda left, right: left + right, pieces)
        account = merged.response_metadata["bidikv"]
        assert account["reason"] == reason
        assert account["ttft_s"] > 0
        assert account["session"] == router.sessions[-1]
        assert sum("bidikv" in piece.response_metadata for piece in pieces) == 1
        assert merged.text == router.text


def test_an_adapted_model_is_the_model_that_it_was(router):
    """Its class, its fields and the model given stay; adapted again, only options change."""
    model = chat_openai(router, temperature=0.5)
    adapted = adapt(model, readback=False)
    assert isinstance(adapted, langchain_openai.ChatOpenAI)
    assert not isinstance(model.root_client, bidikv.OpenAI)
    assert isinstance(adapted.root_async_client, bidikv.AsyncOpenAI)
    assert (adapted.temperature, adapted.stream_usage) == (0.5, True)
    assert (model.stream_usage, chat_openai(router, stream_usage=False).stream_usage) == (None, False)
    assert adapted.lc_id(), adapted.lc_secrets == (model.lc_id(), model.lc_secrets)
    adapted.invoke("hi", thread("adapted"))
    again = adapt(adapted, readback=True)
    again.invoke("hi", thread("adapted"))
    headers = [request.headers.get("x-bidikv-readback") for request in router.requests]
    assert headers == ["off", None]
    assert len(set(router.sessions)) == 1
    assert None not in router.sessions
    assert again.root_client._bidikv.memory is adapted.root_client._bidikv.memory
    with pytest.raises(TypeError, match="FakeListChatModel"):
        adapt(FakeListChatModel(responses=["a"]))


def test_a_summary_by_an_adapted_model_is_on_the_side():
    """What the summariser says of its call reaches the client, though it goes by the config alone."""
    router = FakeRouter()
    model = adapt(chat_openai(router))
    summary = SummarizationMiddleware(model, trigger=("messages", 4), keep=("messages", 1))
    agent = create_agent(model, [], checkpointer=MemorySaver(), middleware=[summary])
    for question in ("one", "two", "three"):
        agent.invoke({"messages": [HumanMessage(question)]}, thread("summed up"))
    assert [request.turn.kind for request in router.requests] == ["main", "main", "aux", "main"]
    assert router.requests[2].turn.agent in {"summarization", "SummarizationMiddleware"}
    assert router.requests[2].turn.parent == router.sessions[0]


def test_middleware_says_how_long_tools_take(router):
    """The conversation that waits is told of, whichever model it has, from coroutines too."""
    chat = BidiKVChat(model="m", client=router.client(), async_client=router.async_client())
    agent = create_agent(chat, [look], checkpointer=MemorySaver(), middleware=[BidiKVMiddleware()])
    asked(agent, thread("waits"), mode="invoke")
    router.reply(tool_calls=[ToolCall("look", RAW)])
    asked(agent, thread("waits too"), mode="ainvoke")
    assert [told.path.rpartition("/")[2] for told in router.told] == ["wait", "wait"]
    # It has been seen how long the tool takes.
    waits_s = [request.turn.wait_s for request in router.requests]
    assert waits_s[0] == 30
    assert waits_s[1] < 1


def test_a_graph_of_ones_own(router):
    """Its `ToolNode` takes the same wrappers."""
    chat = BidiKVChat(model="m", client=router.client())
    graph = StateGraph(MessagesState)
    graph.add_node("model", lambda state: {"messages": [chat.bind_tools([look]).invoke(state["messages"])]})
    graph.add_node("tools", ToolNode([look], wrap_tool_call=wrap_tool_call, awrap_tool_call=awrap_tool_call))
    graph.add_edge(START, "model")
    graph.add_conditional_edges("model", tools_condition)
    graph.add_edge("tools", "model")
    compiled = graph.compile(checkpointer=MemorySaver())
    compiled.invoke({"messages": [HumanMessage("one")]}, thread("own graph"))
    assert [told.path.rpartition("/")[2] for told in router.told] == ["wait"]
    assert len(router.requests) == 2


@pytest.mark.parametrize("unsupported", ["ignore", "warn", "raise"])
def test_a_model_without_a_client(unsupported):
    """It runs as it is, if that is wanted; it is warned of once."""
    agent = create_agent(
        FakeListChatModel(responses=["a"]), [], middleware=[BidiKVMiddleware(unsupported=unsupported)]
    )
    told = {"messages": [HumanMessage("hi")]}
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        if unsupported == "raise":
            with pytest.raises(TypeError, match="does not speak"):
                agent.invoke(told)
        else:
            assert [agent.invoke(told)["messages"][-1].text for _ in range(2)] == ["a", "a"]
    assert len(caught) == (unsupported == "warn")
    with pytest.raises(bidikv.ConfigurationError, match="unsupported"):
        BidiKVMiddleware(unsupported="often")


def test_the_model_that_is_fallen_back_to():
    """Each of an agent's models is adapted, and their calls are one conversation."""
    router, other = FakeRouter(), FakeRouter()
    router.fail(503, times=9)
    models = [chat_openai(router, max_retries=0), chat_openai(other)]
    agent = create_agent(models[0], [], middleware=[ModelFallbackMiddleware(models[1]), BidiKVMiddleware()])
    answer = agent.invoke({"messages": [HumanMessage("hi")]}, thread("falls"))["messages"][-1]
    assert isinstance(answer, AIMessage)
    assert router.sessions == other.sessions
    assert len(router.sessions) == 1


def test_errors_of_an_adapted_model():
    """They are marked as those of our own model are."""
    router = FakeRouter()
    router.fail(429, times=9)
    with pytest.raises(openai.RateLimitError) as caught:
        adapt(chat_openai(router), retry=bidikv.RetryPolicy(attempts=2, first_wait_s=0)).invoke("hi")
    assert isinstance(caught.value, RuntimeError)
    assert len(router.requests) == 2
