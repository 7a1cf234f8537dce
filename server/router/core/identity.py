"""Which conversation a request belongs to, from whatever its client sends to say so.

The first convention that is present decides, also when its value cannot be used: an ill-formed name is no name, and the next
convention may well mean something else. Names of groups (a cache key, a user) are no conversations and are not read.
`docs/identity.md` has the table.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final
from urllib.parse import unquote

from bidikv.headers import SESSION_HEADER
from bidikv_server.router.core.json_bytes import InvalidJson, read_value

if TYPE_CHECKING:
    from collections.abc import Callable

NO_SOURCE: Final = "none"
ILL_FORMED: Final = "ill_formed"

_NAME: Final = re.compile(r"[\x21-\x7e]{1,256}")
"""What the conventions allow in a name, all together. It is only ever hashed."""
_PLACEHOLDERS: Final = frozenset({"null", "none", "undefined", "nil", "default"})
"""What a client sends that has nothing to say. As a name it would join strangers."""


@dataclass(frozen=True, slots=True)
class Identity:
    """What a client said of a request's place.

    Attributes:
        session: The conversation's name; None if it gave none, or none that can be used.
        source: Which convention it used, for metrics: a key of `SOURCES`, `ill_formed` or `none`.
        parent: The conversation that this one was forked from, where the convention says.
        final: No turn of this conversation will follow.
    """

    session: str | None = None
    source: str = NO_SOURCE
    parent: str | None = None
    final: bool = False


@dataclass(frozen=True, slots=True)
class _Source:
    name: str
    find: Callable[[Mapping[str, Any], Mapping[str, str]], object]
    parent: tuple[str, ...] = ()
    final: str | None = None


def _header(name: str) -> Callable[[Mapping[str, Any], Mapping[str, str]], object]:
    return lambda _, headers: headers.get(name)


def _field(*path: str) -> Callable[[Mapping[str, Any], Mapping[str, str]], object]:
    def find(body: Mapping[str, Any], _: Mapping[str, str]) -> object:
        value: object = body
        for key in path:
            value = value.get(key) if isinstance(value, Mapping) else None
        return value

    return find


def _response_conversation(body: Mapping[str, Any], _: Mapping[str, str]) -> object:
    """`conversation` of the Responses API: an id, or an object that has one."""
    conversation = body.get("conversation")
    return conversation.get("id") if isinstance(conversation, Mapping) else conversation


def _codex_thread(_: Mapping[str, Any], headers: Mapping[str, str]) -> object:
    """Codex shares its session id among a thread and all it spawned; the thread is the conversation."""
    metadata = headers.get("x-codex-turn-metadata")
    if headers.get("thread-id") is not None or metadata is None:
        return headers.get("thread-id")
    try:
        fields = read_value(metadata)
    except (InvalidJson, RecursionError):
        return None
    return fields.get("thread_id") if isinstance(fields, dict) else None


def _baggage(_: Mapping[str, Any], headers: Mapping[str, str]) -> object:
    """W3C baggage: `gen_ai.conversation.id`, else `session.id`."""
    parts = [part.split(";")[0].strip().partition("=") for part in headers.get("baggage", "").split(",")]
    members = {key: value for key, _, value in parts}
    value = members.get("gen_ai.conversation.id") or members.get("session.id")
    return unquote(value) if value is not None else None


def _claude_user_id(body: Mapping[str, Any], _: Mapping[str, str]) -> object:
    """Older Claude Code: `metadata.user_id` ends in `_session_<id>`."""
    user = _field("metadata", "user_id")(body, {})
    return user.rpartition("_session_")[2] if isinstance(user, str) and "_session_" in user else None


SOURCES: Final = (
    _Source("body_session_id", _field("session_id"), parent=("x-parent-session-id",)),
    _Source("conversation_header", _header("x-conversation-id")),
    _Source("x_session_id", _header(SESSION_HEADER.lower()), parent=("x-parent-session-id",)),
    _Source(
        "dynamo",
        _header("x-dynamo-session-id"),
        parent=("x-dynamo-parent-session-id",),
        final="x-dynamo-session-final",
    ),
    _Source(
        "claude_code_agent",
        _header("x-claude-code-agent-id"),
        parent=("x-claude-code-parent-agent-id", "x-claude-code-session-id"),
    ),
    _Source("claude_code", _header("x-claude-code-session-id")),
    _Source("codex_thread", _codex_thread, parent=("x-codex-parent-thread-id",)),
    _Source("codex_session", lambda _, headers: headers.get("session-id", headers.get("session_id"))),
    _Source("session_affinity", _header("x-session-affinity")),
    _Source("opencode", _header("x-opencode-session")),
    _Source("deepseek", _header("x-deepseek-harness-session-id")),
    _Source("smg", _header("x-smg-routing-key")),
    _Source("litellm", _header("x-litellm-session-id")),
    _Source("litellm_body", _field("litellm_session_id")),
    _Source("litellm_metadata", _field("metadata", "session_id")),
    _Source("conversation_id", _field("conversation_id")),
    _Source("vllm_xargs", _field("vllm_xargs", "session_id")),
    _Source("responses", _response_conversation),
    _Source("baggage", _baggage),
    _Source("claude_user_id", _claude_user_id),
)
"""In order of precedence; the body's `session_id` before the header, as in vLLM. Who sends both a conversation and a session
(prime-rl) shares the session among many conversations."""


def identify(body: Mapping[str, Any], headers: Mapping[str, str]) -> Identity:
    """Read who a request belongs to.

    Args:
        body: The request's body.
        headers: By lower-case name.
    """
    for source in SOURCES:
        value = source.find(body, headers)
        if value is None:
            continue
        if not isinstance(value, str) or not _NAME.fullmatch(value) or value.lower() in _PLACEHOLDERS:
            return Identity(source=ILL_FORMED)
        parents = (headers.get(name) for name in source.parent)
        parent = next((name for name in parents if name and _NAME.fullmatch(name) and name != value), None)
        final = source.final is not None and headers.get(source.final, "").strip().lower() in {"1", "true"}
        return Identity(value, source.name, parent, final)
    return Identity()
