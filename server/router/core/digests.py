"""Rolling digests of a prompt: one per prefix at which a later prompt can branch off.

They place requests; they prove nothing about tokens. The engines compare tokens, block by block, before any reuse.
A chain starts at a seed over everything that stands in front of the messages (scope, tools, template options) and
takes one step per message, or per whole chunk of a completions prompt.
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final, NewType

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from bidikv_server.router.core.ids import Scope

Digest = NewType("Digest", bytes)

CHUNK_CHARACTERS: Final = 256
"""Step of a text prompt's chain."""
CHUNK_IDS: Final = 64
"""Step of a token-id prompt's chain."""

_SEED_FIELDS: Final = (
    "tools",
    "chat_template",
    "chat_template_kwargs",
    "documents",
    "reasoning_effort",
    "add_special_tokens",
    "truncate_prompt_tokens",
)
_MESSAGE_FIELDS: Final = ("role", "name", "content", "tool_calls", "tool_call_id", "function_call", "refusal")


@dataclass(frozen=True, slots=True)
class Chain:
    """Digests of one prompt.

    Attributes:
        prefixes: Shortest first; empty when the prompt is shorter than one step or has no usable shape.
        whole: Of the whole prompt, whatever its shape.
    """

    prefixes: tuple[Digest, ...]
    whole: Digest


def chain(body: Mapping[str, Any], scope: Scope) -> Chain:
    """Digests of a request's prompt: a chat if it has messages, else a completion."""
    prompt = body.get("messages", body.get("prompt"))
    kind, steps = _steps(prompt) if "messages" not in body else ("chat", _messages(prompt))
    seed = _seed(kind, body, scope)
    prefixes = _roll(seed, steps)
    if kind == "chat" and prefixes:
        return Chain(prefixes, prefixes[-1])
    return Chain(prefixes, _step(seed, _canonical(prompt)))


def _messages(messages: Any) -> list[Any]:
    if not isinstance(messages, list) or not all(isinstance(message, dict) for message in messages):
        return []
    return [_essence(message) for message in messages]


def _steps(prompt: Any) -> tuple[str, list[Any]]:
    """The whole chunks of a completions prompt: text or token ids, and one prompt only."""
    if isinstance(prompt, list) and len(prompt) == 1 and isinstance(prompt[0], str | list):
        prompt = prompt[0]
    if isinstance(prompt, str):
        size, kind = CHUNK_CHARACTERS, "text"
    elif isinstance(prompt, list) and all(type(token) is int for token in prompt):
        size, kind = CHUNK_IDS, "ids"
    else:
        return "other", []
    whole = len(prompt) - len(prompt) % size
    return kind, [prompt[start : start + size] for start in range(0, whole, size)]


def _seed(kind: str, body: Mapping[str, Any], scope: Scope) -> bytes:
    options = {name: body[name] for name in _SEED_FIELDS if body.get(name) is not None}
    identity = [kind, scope.tenant, scope.model, scope.adapter, scope.cache_salt, options]
    return hashlib.blake2b(_canonical(identity), digest_size=16).digest()


def _roll(seed: bytes, steps: Iterable[Any]) -> tuple[Digest, ...]:
    digests: list[Digest] = []
    previous = seed
    for step in steps:
        previous = _step(previous, _canonical(step))
        digests.append(previous)
    return tuple(digests)


def _step(previous: bytes, data: bytes) -> Digest:
    return Digest(hashlib.blake2b(previous + data, digest_size=16).digest())


def _essence(message: dict[str, Any]) -> dict[str, Any]:
    """What of a message decides its place in the conversation.

    Reasoning is left out: clients drop it from history. Null and absent are the same, because SDKs differ in which
    they send, and so are text and a list of one text part.
    """
    essence = {name: message[name] for name in _MESSAGE_FIELDS if message.get(name) is not None}
    if "content" in essence:
        essence["content"] = _content(essence["content"])
    if isinstance(calls := essence.get("tool_calls"), list):
        essence["tool_calls"] = [_tool_call(call) for call in calls]
    return essence


def _content(content: Any) -> Any:
    if not isinstance(content, list) or len(content) != 1 or not isinstance(part := content[0], dict):
        return content
    return part["text"] if part.get("type") == "text" and isinstance(part.get("text"), str) else content


def _tool_call(call: Any) -> Any:
    """A tool call with its arguments as values: clients write the same JSON with other whitespace."""
    if not isinstance(call, dict) or not isinstance(function := call.get("function"), dict):
        return call
    try:
        arguments = json.loads(function["arguments"])
    except (KeyError, TypeError, ValueError, RecursionError):
        arguments = function.get("arguments")
    return {"id": call.get("id"), "name": function.get("name"), "arguments": arguments}


def _canonical(value: Any) -> bytes:
    return json.dumps(value, sort_keys=True, separators=(",", ":")).encode("ascii")
