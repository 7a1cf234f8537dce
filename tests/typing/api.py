"""The public API as a type checker sees it. Checked, never run."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, assert_type

from langchain_core.messages import AIMessage
from langchain_openai import ChatOpenAI
from openai import AsyncAzureOpenAI as PlainAsyncAzureOpenAI
from openai import Stream
from openai.types.chat import ChatCompletion, ChatCompletionChunk

import bidikv
from bidikv import testing
from bidikv.integrations import BidiKVChat, BidiKVMiddleware, adapt, close_thread, thread_report

if TYPE_CHECKING:
    from openai import OpenAI as PlainOpenAI


def names() -> None:
    """Conversations."""
    with bidikv.conversation("a", retain_s=60) as conversation:
        assert_type(conversation, bidikv.Conversation)
    assert_type(conversation.id, str)
    assert_type(conversation.child("planner"), bidikv.Conversation)
    assert_type(conversation.turns, list[bidikv.TurnReport])
    assert_type(bidikv.current_conversation(), bidikv.Conversation | None)
    assert_type(bidikv.session_id("a", 1, b"b"), str)
    assert_type(conversation.fork(), bidikv.Conversation)
    with conversation.hint(kind="aux", wait_s=3.5), conversation.tool("search", expected_s=90):
        assert_type(bidikv.run_in(conversation, len, "ab"), int)
    conversation.close()
    report = conversation.report()
    assert_type(report, bidikv.ReuseReport)
    assert_type(report.reused_tokens, int)
    assert_type(report.ttft_s, tuple[float | None, ...])
    assert_type(report.drifts, tuple[bidikv.Drift, ...])


def calls(client: bidikv.OpenAI) -> None:
    """The synchronous client."""
    plain: PlainOpenAI = client
    completion = client.chat.completions.create(model="m", messages=[{"role": "user", "content": "x"}])
    assert_type(completion, ChatCompletion)
    reuse = bidikv.reuse_of(completion)
    assert_type(reuse, bidikv.ReuseHeader | None)
    if reuse is not None:
        assert_type(reuse.reason, str)
        assert_type(reuse.remote_tokens, int | None)
    assert_type(client.with_options(timeout=3), bidikv.OpenAI)
    assert_type(client.copy(), bidikv.OpenAI)
    assert_type(client.conversation("a"), bidikv.Conversation)
    assert_type(bidikv.message_of(completion), dict[str, Any])
    assert_type(client.explain(completion).advice, str | None)
    stream = client.chat.completions.create(model="m", messages=[], stream=True)
    assert_type(stream, Stream[ChatCompletionChunk])
    plain.close()


def made() -> None:
    """Constructors: ours and the OpenAI client's arguments, and nothing else."""
    policy = bidikv.RetryPolicy(attempts=2, budget_s=10, retry_on=bidikv.is_transient)
    seen: list[bidikv.Drift] = []
    bidikv.OpenAI(api_key=lambda: "k", timeout=3, retry=policy, on_drift=seen.append)
    bidikv.OpenAI(on_drift="shout")  # type: ignore[arg-type]
    bidikv.OpenAI(bse_url="http://router/v1")  # type: ignore[call-arg]
    azure = bidikv.AsyncAzureOpenAI(azure_endpoint="http://x", api_version="1", restore="off", secret=b"s")
    plain: PlainAsyncAzureOpenAI = azure
    assert_type(bidikv.wrap(plain, readback=False), PlainAsyncAzureOpenAI)
    assert_type(bidikv.AzureOpenAI.from_env(), bidikv.AzureOpenAI)
    router = testing.FakeRouter()
    assert_type(router.client(on_drift="raise"), bidikv.OpenAI)
    with router.serve() as base_url:
        assert_type(base_url, str)


async def async_calls() -> None:
    """The asynchronous client."""
    client = bidikv.AsyncOpenAI(base_url="http://router/v1", api_key="k", conversation="a", readback=False)
    async with client.conversation() as conversation:
        completion = await client.chat.completions.create(model="m", messages=[])
    assert_type(conversation, bidikv.Conversation)
    assert_type(completion, ChatCompletion)
    assert_type(bidikv.turn_of(completion), bidikv.TurnReport | None)
    assert_type(await client.explain(conversation), bidikv.Explanation)
    await conversation.aclose()


def chat() -> None:
    """The chat model."""
    model = BidiKVChat(model="m", base_url="http://router/v1", temperature=0, conversation="a")
    model.bind_tools([{"type": "function"}], tool_choice="none").invoke("hi")
    assert_type(model.invoke("hi"), AIMessage)
    own = ChatOpenAI(model="m")
    assert_type(adapt(own, restore="all"), ChatOpenAI)
    adapt("gpt")  # type: ignore[type-var]
    BidiKVMiddleware(unsupported="raise", readback=False)
    BidiKVMiddleware(unsupported="often")  # type: ignore[arg-type]
    assert_type(thread_report("t"), bidikv.ReuseReport)
    close_thread(7)
