"""Retries by LangGraph and LangChain on top of the client's: counted on the wire."""

from __future__ import annotations

import asyncio

import openai
import pytest
from langchain.agents import create_agent
from langchain.agents.middleware import ModelRetryMiddleware
from langchain_core import exceptions
from langchain_core.messages import HumanMessage
from langgraph.graph import START, MessagesState, StateGraph
from langgraph.types import RetryPolicy as OuterPolicy

import bidikv
from bidikv.integrations import BidiKVChat
from bidikv.testing import FakeRouter

HELLO = {"messages": [HumanMessage("hi")]}
QUICK = {"initial_interval": 0.001, "max_attempts": 3, "jitter": False}


@pytest.fixture(autouse=True)
def at_once(monkeypatch):
    """Nobody waits."""
    monkeypatch.setattr("tenacity.nap.time.sleep", lambda _: None)


def chat_of(router, **options):
    """A model that tries three times, unless it is told otherwise; without waits of the client's own."""
    options = {"retry": bidikv.RetryPolicy(attempts=3, first_wait_s=0), **options}
    return BidiKVChat(
        model="m",
        client=router.client(max_retries=0) if options["retry"] is None else router.client(**options),
        async_client=None if options["retry"] is None else router.async_client(**options),
    )


def graph_of(chat, **policy):
    graph = StateGraph(MessagesState)
    graph.add_node(
        "model",
        lambda state: {"messages": [chat.invoke(state["messages"])]},
        retry_policy=OuterPolicy(**QUICK, **policy),
    )
    graph.add_edge(START, "model")
    return graph.compile()


@pytest.mark.parametrize("policy", [{}, {"retry_on": bidikv.is_transient}])
@pytest.mark.parametrize(
    ("status", "tries", "requests"),
    [(503, 3, 3), (429, 3, 3), (503, 0, 3), (400, 3, 1), (400, 0, 1), (404, 3, 1)],
)
def test_langgraphs_policy_does_not_multiply(policy, status, tries, requests):
    """Its default, which tries everything again, included; with no retries of the model's own, LangGraph's count."""
    router = FakeRouter()
    router.fail(status, times=20)
    chat = chat_of(router) if tries else chat_of(router, retry=None)
    with pytest.raises(openai.APIStatusError) as caught:
        graph_of(chat, **policy).invoke(HELLO)
    assert caught.value.status_code == status
    assert len(router.requests) == requests


def test_a_call_that_comes_good_is_one_turn():
    """Two failures and an answer, within the client's own tries."""
    router = FakeRouter()
    router.fail(503, times=2)
    assert graph_of(chat_of(router)).invoke(HELLO)["messages"][-1].text == router.text
    assert len(router.requests) == 3


@pytest.mark.parametrize(("status", "requests"), [(503, 3), (400, 1)])
def test_langchains_middleware_does_not_multiply(status, requests):
    """It goes by what the error says of itself."""
    router = FakeRouter()
    router.fail(status, times=20)
    retries = ModelRetryMiddleware(max_retries=2, initial_delay=0, on_failure="error")
    agent = create_agent(chat_of(router), [], middleware=[retries])
    with pytest.raises(openai.APIStatusError):
        agent.invoke(HELLO)
    with pytest.raises(openai.APIStatusError):
        asyncio.run(agent.ainvoke(HELLO))
    if hasattr(exceptions, "ModelError"):
        assert len(router.requests) == 2 * requests


def test_a_stream_that_breaks_may_be_asked_for_again():
    """Nobody has tried that again yet, so LangGraph does, once for each of its tries."""
    router = FakeRouter()
    router.break_stream()
    pieces = list(graph_of(chat_of(router)).stream(HELLO, stream_mode="messages"))
    assert pieces
    assert len(router.requests) == 2


def test_errors_are_also_langchains():
    """What a call fails with is of both libraries' classes, under the name that it had."""
    router = FakeRouter()
    for status, name in (
        (401, "ModelAuthenticationError"),
        (429, "ModelRateLimitError"),
        (400, "ModelInvalidRequestError"),
    ):
        router.fail(status)
        with pytest.raises(openai.APIStatusError) as caught:
            chat_of(router, retry=None).invoke("hi")
        kind = getattr(exceptions, name, None)
        assert kind is None or isinstance(caught.value, kind)
        assert isinstance(caught.value, RuntimeError) is (status != 429)
        assert caught.value.is_retryable is (status == 429)
        assert type(caught.value).__name__ in {"AuthenticationError", "RateLimitError", "BadRequestError"}


def test_the_clients_own_retries_become_a_policy():
    """A model without a client of its own, or with one that leaves retries to the OpenAI client."""
    router = FakeRouter()
    for chat in (
        BidiKVChat(model="m", base_url="http://router/v1"),
        BidiKVChat(model="m", client=router.client(), async_client=router.async_client()),
    ):
        assert [client._bidikv.retry.attempts for client in (chat._sync(), chat._async())] == [3, 3]
        assert chat._sync().max_retries == 0
    assert BidiKVChat(model="m", base_url="http://router/v1", max_retries=0)._sync()._bidikv.retry is None
    policy = bidikv.RetryPolicy(attempts=7)
    assert BidiKVChat(model="m", base_url="http://router/v1", retry=policy)._sync()._bidikv.retry is policy
