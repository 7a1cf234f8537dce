"""The public API as a type checker sees it. Checked, never run."""

from __future__ import annotations

from typing import TYPE_CHECKING, assert_type

from langchain_core.messages import AIMessage
from openai.types.chat import ChatCompletion

import bidikv
from bidikv.integrations import BidiKVChat

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
    plain.close()


async def async_calls() -> None:
    """The asynchronous client."""
    client = bidikv.AsyncOpenAI(base_url="http://router/v1", api_key="k", conversation="a", readback=False)
    async with client.conversation() as conversation:
        completion = await client.chat.completions.create(model="m", messages=[])
    assert_type(conversation, bidikv.Conversation)
    assert_type(completion, ChatCompletion)
    assert_type(bidikv.turn_of(completion), bidikv.TurnReport | None)


def chat() -> None:
    """The chat model."""
    model = BidiKVChat(model="m", base_url="http://router/v1", temperature=0, conversation="a")
    model.bind_tools([{"type": "function"}], tool_choice="none").invoke("hi")
    assert_type(model.invoke("hi"), AIMessage)
