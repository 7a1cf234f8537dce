"""pydantic-ai: a capability that makes each agent's calls turns of its conversation.

    model = OpenAIChatModel("my-model", provider=OpenAIProvider(openai_client=bidikv.AsyncOpenAI(...)))
    agent = Agent(model, capabilities=[BidiKV()])

The framework has conversations of its own: `agent.run(..., conversation_id="ticket-17")`, or what the message history says.
An agent that another one calls in a tool has one of its own, as a child of the caller's.
"""

from __future__ import annotations

from collections import OrderedDict
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import replace
from threading import Lock
from typing import TYPE_CHECKING, Any, Final

from bidikv.errors import MissingIntegrationError

try:
    from pydantic_ai.capabilities import AbstractCapability
    from pydantic_ai.models.wrapper import WrapperModel
except ModuleNotFoundError as error:
    if error.name is None or error.name.partition(".")[0] != "pydantic_ai":
        raise
    raise MissingIntegrationError("pydantic-ai") from error

from bidikv.conversations import Conversation, current_conversation

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from pydantic_ai import RunContext

_KNOWN: Final = 1024
"""Conversations whose reports are kept; the ids of others come out the same."""


class BidiKV(AbstractCapability[Any]):
    """Gives each model call the conversation of its run, and says while a tool of it runs.

    Its agents' models need a `bidikv.AsyncOpenAI`. One object serves any number of agents and runs.

    Args:
        secret: Keys the wire ids; see `bidikv.session_id`.
    """

    def __init__(self, *, secret: bytes | None = None) -> None:
        self._secret = secret
        self._known: OrderedDict[tuple[str, str], Conversation] = OrderedDict()
        self._lock = Lock()

    def conversation(self, conversation_id: str, agent: str | None = None) -> Conversation:
        """The conversation of one agent, with its turns' reports.

        Args:
            conversation_id: The framework's, as in a result's `conversation_id`.
            agent: Its name, if it has one.
        """
        key = (conversation_id, agent or "")
        with self._lock:
            known = self._known.pop(key, None)
            if known is None:
                above = current_conversation()
                known = Conversation(
                    key, agent=agent, parent=above.id if above else None, secret=self._secret
                )
            self._known[key] = known
            if len(self._known) > _KNOWN:
                self._known.popitem(last=False)
        return known

    async def wrap_model_request(self, ctx: RunContext[Any], *, request_context: Any, handler: Any) -> Any:
        """Make a model call part of the run's conversation."""
        conversation = self._of(ctx)
        if conversation is not None:
            # Through the model: newer versions open a stream in another task than this one.
            request_context = replace(request_context, model=_TurnModel(request_context.model, conversation))
        return await handler(request_context)

    async def wrap_tool_execute(
        self,
        ctx: RunContext[Any],
        *,
        call: Any,
        tool_def: Any,  # noqa: ARG002
        args: Any,
        handler: Any,
    ) -> Any:
        """Say that a tool runs; agents that it calls are children of this one."""
        conversation = self._of(ctx)
        if conversation is None:
            return await handler(args)
        async with conversation, conversation.tool(call.tool_name):
            return await handler(args)

    def _of(self, ctx: RunContext[Any]) -> Conversation | None:
        if ctx.conversation_id is None:
            return None
        return self.conversation(ctx.conversation_id, getattr(ctx.agent, "name", None))


class _TurnModel(WrapperModel):
    """A model as one run sees it: the run's conversation is current while a request is made."""

    def __init__(self, wrapped: Any, conversation: Conversation) -> None:
        super().__init__(wrapped)
        self._conversation = conversation

    async def request(self, *args: Any, **kwargs: Any) -> Any:
        with self._conversation:
            return await super().request(*args, **kwargs)

    @asynccontextmanager
    async def request_stream(self, *args: Any, **kwargs: Any) -> AsyncIterator[Any]:
        async with AsyncExitStack() as stack:
            # Not across the `yield`: who reads the stream would be in the conversation too.
            with self._conversation:
                stream = await stack.enter_async_context(super().request_stream(*args, **kwargs))
            yield stream
