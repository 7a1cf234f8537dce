"""Which conversation one call belongs to: a choice among what the call, its context and its client say."""

from __future__ import annotations

import logging
import sys
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from bidikv.conversations import Conversation, current_conversation
from bidikv.drift import count_answers
from bidikv.headers import READBACK_HEADER, SESSION_HEADER, SESSION_PATTERN, TurnHeader
from bidikv.marks import MAPPING

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from bidikv.hints import Hint, Kind

log = logging.getLogger(__name__)

_ENDPOINTS: Final = ("/chat/completions", "/completions", "/responses")


def is_generation(method: str, url: str) -> bool:
    """Whether a request makes the engine read a prompt, so that identity means something to the router."""
    known = url in _ENDPOINTS or url.partition("?")[0].rstrip("/").endswith(_ENDPOINTS)
    return known and method.lower() == "post"


class Identity(NamedTuple):
    """The outcome. With neither a conversation nor a session, the call goes out anonymous.

    Attributes:
        session: Wire id; None for none.
        conversation: The object to report to, when the id came from one.
        explicit: The caller sends the header, or has removed it: do not send it again.
    """

    session: str | None = None
    conversation: Conversation | None = None
    explicit: bool = False


def resolve(
    headers: Mapping[str, object],
    body: Mapping[str, object],
    client_conversation: Conversation | None,
    client_headers: Callable[[], Mapping[str, object]],
    *,
    secret: bytes | None = None,
) -> Identity:
    """Choose; the first that says something wins.

    The call's own header, the body's `session_id`, the current conversation, the surrounding LangGraph run, the
    client's conversation, the client's default headers. Changes nothing and never raises: a call without identity
    is a slower call, not a failed one.
    """
    name, value = find_header(headers, SESSION_HEADER)
    if name is not None:  # a value that is no text is openai's `Omit`: the caller wants no header
        return Identity(session=value if isinstance(value, str) else None, explicit=True)
    session = body.get("session_id")
    if session is not None:
        if isinstance(session, str) and SESSION_PATTERN.fullmatch(session):
            return Identity(session=session)
        log.debug("the body's session_id is not a session id that gateways let through; sending no header")
        return Identity()
    ambient = ambient_conversation(body, secret) if "langchain_core" in sys.modules else None
    conversation = ambient or current_conversation() or client_conversation
    if conversation is not None:
        return Identity(session=conversation.id, conversation=conversation)
    _, value = find_header(client_headers(), SESSION_HEADER)
    return Identity(session=value if isinstance(value, str) else None, explicit=True)


def ambient_conversation(body: Mapping[str, object], secret: bytes | None = None) -> Conversation | None:
    """The conversation of the LangGraph run that surrounds this call, or what stands beside the current one; None outside.

    Imports LangGraph: to be asked only where something has imported LangChain already.
    """
    try:
        from bidikv.integrations._threads import ambient_conversation as from_langgraph  # noqa: PLC0415

        return from_langgraph(body.get("messages", body.get("input")), secret=secret)
    except (ImportError, AttributeError, TypeError, ValueError):
        log.debug("no conversation from the surrounding LangGraph run", exc_info=True)
        return None


def headers_for(identity: Identity, headers: Mapping[str, object], *, readback: bool) -> dict[str, str]:
    """The headers to add to a call's own: whose turn it is, and whether it reads back. They stand for the client's, too."""
    added: dict[str, str] = {}
    if identity.session is not None and not identity.explicit:
        added[SESSION_HEADER] = identity.session
    if not readback and find_header(headers, READBACK_HEADER)[0] is None:
        added[READBACK_HEADER] = "off"
    return added


def turn_header(
    conversation: Conversation | None,
    body: Mapping[str, object],
    hint: Hint | None = None,
    answers: int | None = None,
) -> TurnHeader:
    """Describe a turn. Counts a call of the conversation where the body does not show the turns before it.

    Args:
        conversation: Whose turn it is; None if only a wire id is known.
        body: The request's.
        hint: What holds for the call, if that has been asked.
        answers: The model's messages in the body, if they have been counted.
    """
    index, answers_tool = None, False
    messages = body.get("messages")
    if isinstance(messages, list | tuple):
        index = count_answers(messages) if answers is None else answers
    shown = body.get("input") if messages is None else messages
    last = shown[-1] if shown and isinstance(shown, list | tuple) else None
    if isinstance(last, MAPPING):
        answers_tool = last.get("role") == "tool" or last.get("type") == "function_call_output"
    if conversation is None:
        return TurnHeader(index=index, kind="tool" if answers_tool else "main")
    hint = conversation.hints() if hint is None else hint
    kind: Kind = "tool" if answers_tool and hint.kind == "main" else hint.kind or "main"
    counted = conversation.next_index()
    return TurnHeader(
        index=counted if index is None else index,
        kind=kind,
        parent=conversation.parent,
        agent=hint.agent,
        retain_s=hint.retain_s,
        final=bool(hint.final),
        wait_s=_wait_s(conversation, hint, body),
    )


def _wait_s(conversation: Conversation, hint: Hint, body: Mapping[str, object]) -> float | None:
    """How long the next turn takes to come, because a tool may be called; None if it says when itself."""
    if hint.retain_s is not None or hint.final or hint.kind in {"aux", "compaction"}:
        return None
    if hint.wait_s is not None:
        return hint.wait_s
    return conversation.tool_wait_s() if body.get("tools") and body.get("tool_choice") != "none" else None


def find_header(headers: Mapping[str, object], name: str) -> tuple[str | None, Any]:
    """The spelling and value of a header, however the caller spelt it; (None, None) if absent."""
    if not headers:
        return None, None
    wanted = name.lower()
    return next(((key, value) for key, value in headers.items() if key.lower() == wanted), (None, None))
