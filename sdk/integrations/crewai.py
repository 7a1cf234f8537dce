"""CrewAI: an interceptor that gives the calls of one LLM their conversation, and keeps their reports.

    llm = LLM(model="openai/my-model", base_url=..., api_key=..., interceptor=BidiKVInterceptor(conversation))

A crew's agents have prompts of their own, so each should have an LLM of its own: `conversation.child("researcher")`.
"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

from bidikv.errors import MissingIntegrationError

try:
    from crewai.llms.hooks.base import BaseInterceptor
except ModuleNotFoundError as error:
    if error.name is None or error.name.partition(".")[0] != "crewai":
        raise
    raise MissingIntegrationError("crewai") from error

from bidikv.conversations import Conversation, current_conversation
from bidikv.headers import SESSION_HEADER, TURN_HEADER
from bidikv.identity import Identity, headers_for, is_generation, turn_header
from bidikv.reuse import TurnReport, account_in

if TYPE_CHECKING:
    import httpx


class BidiKVInterceptor(BaseInterceptor[Any, Any]):
    """Sees each request and its response at the transport; changes nothing but headers.

    Args:
        conversation: Whose turns the calls are, in whatever thread the crew makes them; text is a key as in
            `bidikv.conversation`. None takes the one that is current then, which CrewAI's threads do not inherit.
        readback: False serves every call without reuse from decode, for comparisons.
    """

    def __init__(self, conversation: Conversation | str | None = None, *, readback: bool = True) -> None:
        self._conversation = Conversation(conversation) if isinstance(conversation, str) else conversation
        self._readback = readback

    def on_outbound(self, message: httpx.Request) -> httpx.Request:
        """Add the conversation's headers to a generation that does not name one."""
        conversation = self._conversation or current_conversation()
        if is_generation(message.method, message.url.path) and SESSION_HEADER not in message.headers:
            identity = Identity(conversation.id, conversation) if conversation is not None else Identity()
            body = json.loads(message.read())
            message.headers.update(headers_for(identity, message.headers, readback=self._readback))
            if conversation is not None and TURN_HEADER not in message.headers:
                message.headers[TURN_HEADER] = turn_header(conversation, body).format()
        return message

    def on_inbound(self, message: httpx.Response) -> httpx.Response:
        """Keep what the router says of the turn."""
        conversation = self._conversation or current_conversation()
        if conversation is not None:
            told, key = account_in(message.headers)
            report = TurnReport(session=conversation.id, told=told, key=key)
            if report.reuse is not None:
                conversation.turns.append(report)
        return message
