"""The OpenAI Agents SDK: a provider of models whose calls go out as turns, and hooks that say while a tool runs.

A run belongs to the conversation that is current when it starts: `with client.conversation(session_id): Runner.run(...)`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from bidikv.errors import MissingIntegrationError

try:
    from agents import OpenAIProvider, RunHooks
except ModuleNotFoundError as error:
    if error.name is None or error.name.partition(".")[0] != "agents":
        raise
    raise MissingIntegrationError("openai-agents") from error

from bidikv.conversations import ToolRun, current_conversation

if TYPE_CHECKING:
    from bidikv.client import AsyncOpenAI


def provider(client: AsyncOpenAI) -> OpenAIProvider:
    """Models behind a router, for `RunConfig(model_provider=...)`.

    Args:
        client: To the router. Its own retries stay in force; those of the framework are off unless it is told otherwise.
    """
    # Chat completions: the Responses API leaves the history to a server that stores it.
    return OpenAIProvider(openai_client=client, use_responses=False)


class BidiKVHooks(RunHooks[Any]):
    """Tells decode while a tool of the current conversation runs, so that it is protected meanwhile.

    For `Runner.run(..., hooks=BidiKVHooks())`. One object serves any number of runs.
    """

    def __init__(self) -> None:
        self._running: dict[tuple[str, str], ToolRun] = {}

    async def on_tool_start(self, context: Any, agent: Any, tool: Any) -> None:  # noqa: ARG002
        """Begin a tool's run."""
        conversation = current_conversation()
        if conversation is not None:
            run = conversation.tool(tool.name)
            self._running[conversation.id, _call(context, tool)] = run
            await run.__aenter__()

    async def on_tool_end(self, context: Any, agent: Any, tool: Any, result: object) -> None:  # noqa: ARG002
        """End it."""
        conversation = current_conversation()
        if conversation is not None and (
            run := self._running.pop((conversation.id, _call(context, tool)), None)
        ):
            await run.__aexit__(None, None, None)


def _call(context: Any, tool: Any) -> str:
    """A name of the call: calls of one tool may run at once."""
    return str(getattr(context, "tool_call_id", None) or tool.name)
