"""LlamaIndex: its OpenAI-like LLM, over clients whose calls go out as turns.

A call belongs to the conversation that is current: `with bidikv.conversation(key): await agent.run(...)`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from bidikv.errors import MissingIntegrationError

try:
    from llama_index.llms.openai_like import OpenAILike
except ModuleNotFoundError as error:
    if error.name is None or error.name.partition(".")[0] != "llama_index":
        raise
    raise MissingIntegrationError("llama-index", "llama-index-llms-openai-like") from error

if TYPE_CHECKING:
    from bidikv.client import AsyncOpenAI, OpenAI


def llm(model: str, *, client: OpenAI, async_client: AsyncOpenAI, **options: Any) -> OpenAILike:
    """A chat model with tools behind a router.

    Args:
        model: Name under which the engines serve the model.
        client: Carries synchronous calls.
        async_client: Carries the others; give both the same `conversation`, if any.
        options: As for `OpenAILike`, such as `context_window` and `max_tokens`.
    """
    given = {"is_chat_model": True, "is_function_calling_model": True, "temperature": 0.0, **options}
    return OpenAILike(
        model=model,
        api_base=str(client.base_url),
        api_key=client.api_key,
        openai_client=client,
        async_openai_client=async_client,
        **given,
    )
