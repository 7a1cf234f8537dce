"""Google's Agent Development Kit: a plugin that gives each model call its conversation.

    runner = Runner(app_name=..., agent=agent, session_service=..., plugins=[BidiKVPlugin()])

For models by `LiteLlm`, which sends the request's headers on. Each agent of a session has a conversation of its own.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from bidikv.errors import MissingIntegrationError

try:
    from google.adk.plugins.base_plugin import BasePlugin
    from google.genai.types import HttpOptions
except ModuleNotFoundError as error:
    if error.name is None or error.name.partition(".")[0] != "google":
        raise
    raise MissingIntegrationError("google-adk", error.name) from error

from bidikv.headers import READBACK_HEADER, SESSION_HEADER, TURN_HEADER, TurnHeader
from bidikv.identity import find_header
from bidikv.ids import session_id

if TYPE_CHECKING:
    from google.adk.agents.callback_context import CallbackContext
    from google.adk.models.llm_request import LlmRequest


class BidiKVPlugin(BasePlugin):
    """Names the conversation of each model call in its headers; headers that a request has already stay.

    Args:
        secret: Keys the wire ids; see `bidikv.session_id`.
        readback: False serves every call without reuse from decode, for comparisons.
    """

    def __init__(self, *, secret: bytes | None = None, readback: bool = True) -> None:
        super().__init__(name="bidikv")
        self._secret = secret
        self._readback = readback

    def conversation_id(self, app: str, user: str, session: str, agent: str) -> str:
        """The wire id of one agent's turns in a session."""
        return session_id(app, user, session, agent, secret=self._secret)

    async def before_model_callback(
        self, *, callback_context: CallbackContext, llm_request: LlmRequest
    ) -> None:
        """Add the headers; the request goes on as it is."""
        session, agent = callback_context.session, callback_context.agent_name
        options = llm_request.config.http_options or HttpOptions()
        headers = dict(options.headers or {})
        if find_header(headers, SESSION_HEADER)[0] is None:
            headers[SESSION_HEADER] = self.conversation_id(
                session.app_name, session.user_id, session.id, agent
            )
        if find_header(headers, TURN_HEADER)[0] is None:
            headers[TURN_HEADER] = TurnHeader(agent=agent).format()
        if not self._readback and find_header(headers, READBACK_HEADER)[0] is None:
            headers[READBACK_HEADER] = "off"
        # A copy: what the agent was configured with is shared by all its calls.
        llm_request.config.http_options = options.model_copy(update={"headers": headers})
