"""A request's prompt as steps: one per message, or per whole chunk of a completions prompt, whatever API it came by.

A step holds what decides its place in a conversation. Spelling that differs between SDKs does not count: null and absent
are the same, and so are text and a list of one text part. Reasoning is left out, because clients drop it from history.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

from bidikv_server.router.core.json_bytes import InvalidJson, canonical, read_value, verbatim
from bidikv_server.router.core.mutations import BILLING_LINE, system_text, unmarked
from bidikv_server.router.core.paths import MESSAGES_PATH, RESPONSES_PATH

if TYPE_CHECKING:
    from collections.abc import Mapping

CHUNK_CHARACTERS: Final = 256
"""First steps of a text prompt's chain."""
CHUNK_IDS: Final = 64
"""First steps of a token-id prompt's chain."""
CHUNKS_OF_A_SIZE: Final = 1024
"""After so many steps they become four times as long: the largest body has a few thousand, and all clients wait for them."""

_OPTIONS: Final = (
    "tools",
    "chat_template",
    "chat_template_kwargs",
    "documents",
    "reasoning_effort",
    "add_special_tokens",
    "truncate_prompt_tokens",
)
"""What stands in front of the messages, or decides how they are rendered."""
_MESSAGE_FIELDS: Final = ("role", "name", "content", "tool_calls", "tool_call_id", "function_call", "refusal")
_PLAIN_ROLES: Final = ("user", "assistant")
_SYSTEM_ROLES: Final = frozenset({"system", "developer"})
_TEXT_PARTS: Final = frozenset({"text", "input_text", "output_text"})
_THINKING: Final = frozenset({"thinking", "redacted_thinking"})
_ITEM_NOISE: Final = frozenset({"id", "status", "annotations", "logprobs"})
"""What the Responses API adds to an item that it hands out; clients send it back or not."""


@dataclass(frozen=True, slots=True)
class Prompt:
    """One request's prompt.

    Attributes:
        kind: Its shape; prompts of two kinds never share a digest.
        options: What stands in front of the steps.
        steps: Empty when the prompt is shorter than one step or has no usable shape.
        rest: Stands for the whole prompt where the steps do not; None where they do.
    """

    kind: str
    options: dict[str, Any]
    steps: list[Any]
    rest: Any = None


def read_prompt(path: str, body: Mapping[str, Any], *, normalise: bool = True) -> Prompt:
    """The prompt of a request.

    Args:
        path: Endpoint.
        body: The request's body.
        normalise: Leave out what clients change by themselves (`mutations`).
    """
    options = {name: body[name] for name in _OPTIONS if body.get(name) is not None}
    if normalise and isinstance(tools := options.get("tools"), list):
        options["tools"] = [verbatim(tool) for tool in sorted(canonical(unmarked(tool)) for tool in tools)]
    if path == RESPONSES_PATH:
        return _responses(body, options, normalise=normalise)
    if path == MESSAGES_PATH:
        return _anthropic(body, options, normalise=normalise)
    if "messages" in body:
        return _chat(body["messages"], options, normalise=normalise)
    return _completion(body.get("prompt"), options)


def chat_step(message: Mapping[str, Any]) -> dict[str, Any] | None:
    """The step that an engine's answer to a chat will be in a later prompt."""
    return _chat_message(dict(message), normalise=True)


def is_answer(step: Any) -> bool:
    """Whether a step is the model's own: a message of its role, or a call of a tool (Responses API)."""
    return isinstance(step, dict) and (step.get("role") == "assistant" or step.get("type") == "function_call")


def parsed(arguments: Any) -> Any:
    """A tool call's arguments as values: clients write the same JSON with other white space."""
    if not isinstance(arguments, str):
        return arguments
    try:
        return read_value(arguments)
    except (InvalidJson, RecursionError):
        return arguments


def _chat(messages: Any, options: dict[str, Any], *, normalise: bool) -> Prompt:
    if not _is_list_of_objects(messages) or not messages:
        return Prompt("chat", options, [], messages)
    steps: list[Any] = []
    for message in messages:
        if len(message) == 2 and message.get("role") in _PLAIN_ROLES and type(message.get("content")) is str:
            # Most messages of most histories: nothing to leave out.
            steps.append(message)
        elif (step := _chat_message(message, normalise=normalise)) is not None:
            steps.append(step)
    return Prompt("chat", options, steps)


def _chat_message(message: dict[str, Any], *, normalise: bool) -> dict[str, Any] | None:
    """What of a message decides its place; None for a system message that says nothing but noise."""
    essence = {name: message[name] for name in _MESSAGE_FIELDS if message.get(name) is not None}
    if "content" in essence:
        essence["content"] = _content(essence["content"], normalise=normalise)
    if isinstance(calls := essence.get("tool_calls"), list):
        essence["tool_calls"] = [_tool_call(call) for call in calls]
    return _system(essence) if normalise and _is_system(message) else essence


def _tool_call(call: Any) -> Any:
    if not isinstance(call, dict) or not isinstance(function := call.get("function"), dict):
        return call
    return {
        "id": call.get("id"),
        "name": function.get("name"),
        "arguments": parsed(function.get("arguments")),
    }


def _content(content: Any, *, normalise: bool) -> Any:
    """Content as a text if it is no more than one."""
    if not isinstance(content, list):
        return content
    parts = [unmarked(part) for part in content] if normalise else content
    if len(parts) != 1 or not isinstance(part := parts[0], dict):
        return parts
    return part["text"] if part.get("type") in _TEXT_PARTS and isinstance(part.get("text"), str) else parts


def _is_system(message: Mapping[str, Any]) -> bool:
    return isinstance(role := message.get("role"), str) and role in _SYSTEM_ROLES


def _system(message: dict[str, Any]) -> dict[str, Any] | None:
    """A system message without what changes by itself; None if nothing is left of it."""
    content = message.get("content")
    if isinstance(content, str):
        text = system_text(content)
        return {**message, "content": text} if text or not content else None
    if not isinstance(content, list):
        return message
    parts = [part for part in map(_system_part, content) if part is not None]
    return {**message, "content": _content(parts, normalise=False)} if parts or not content else None


def _system_part(part: Any) -> Any:
    if not isinstance(part, dict) or not isinstance(text := part.get("text"), str):
        return part
    kept = system_text(text)
    return {**part, "text": kept} if kept or not text else None


def _anthropic(body: Mapping[str, Any], options: dict[str, Any], *, normalise: bool) -> Prompt:
    messages = body.get("messages")
    if not _is_list_of_objects(messages) or not messages:
        return Prompt("messages", options, [], [body.get("system"), messages])
    head = _anthropic_system(body.get("system"), normalise=normalise)
    steps = (_anthropic_message(message, normalise=normalise) for message in messages)
    return Prompt("messages", options, [step for step in (head, *steps) if step is not None])


def _anthropic_system(system: Any, *, normalise: bool) -> dict[str, Any] | None:
    """The system field as a message. vLLM joins its blocks and leaves an attribution block out whole."""
    if isinstance(system, list):
        texts = [
            text
            for block in system
            if isinstance(block, dict)
            and isinstance(text := block.get("text"), str)
            and not (normalise and text.startswith(BILLING_LINE))
        ]
        system = "".join(texts)
    if not isinstance(system, str) or not system:
        return None
    message = {"role": "system", "content": system}
    return _system(message) if normalise else message


def _anthropic_message(message: dict[str, Any], *, normalise: bool) -> dict[str, Any] | None:
    content = message.get("content")
    if isinstance(content, list):
        content = [
            _block(block, normalise=normalise)
            for block in content
            if not (isinstance(block, dict) and block.get("type") in _THINKING)
        ]
    essence = {"role": message.get("role"), "content": _content(content, normalise=normalise)}
    return _system(essence) if normalise and _is_system(message) else essence


def _block(block: Any, *, normalise: bool) -> Any:
    if not isinstance(block, dict):
        return block
    kept = {name: value for name, value in block.items() if value is not None}
    if "content" in kept:
        kept["content"] = _content(kept["content"], normalise=normalise)
    return unmarked(kept) if normalise else kept


def _responses(body: Mapping[str, Any], options: dict[str, Any], *, normalise: bool) -> Prompt:
    if isinstance(reasoning := body.get("reasoning"), dict) and reasoning.get("effort") is not None:
        options["reasoning_effort"] = reasoning["effort"]
    asked, earlier = body.get("input"), body.get("previous_input_messages")
    items = [{"role": "user", "content": asked}] if isinstance(asked, str) else asked
    if not _is_list_of_objects(items) or not items:
        return Prompt("responses", options, [], [body.get("instructions"), asked])
    steps = [_item(item, normalise=normalise) for item in items]
    if isinstance(instructions := body.get("instructions"), str) and instructions:
        message = {"role": "system", "content": instructions}
        steps.insert(0, _system(message) if normalise else message)
    if isinstance(earlier, list):
        steps[:0] = earlier
    return Prompt("responses", options, [step for step in steps if step is not None])


def _item(item: dict[str, Any], *, normalise: bool) -> dict[str, Any] | None:
    """What of an input item decides its place; None for reasoning."""
    kind = item.get("type", "message")
    if kind == "reasoning":
        return None
    kept = {name: value for name, value in item.items() if name not in _ITEM_NOISE and value is not None}
    if kind == "function_call":
        return {**kept, "arguments": parsed(item.get("arguments"))}
    if kind != "message":
        return kept
    essence = {"role": item.get("role"), "content": _item_content(item.get("content"), normalise=normalise)}
    return _system(essence) if normalise and _is_system(item) else essence


def _item_content(content: Any, *, normalise: bool) -> Any:
    if isinstance(content, list):
        content = [
            {name: value for name, value in part.items() if name not in _ITEM_NOISE and value is not None}
            if isinstance(part, dict)
            else part
            for part in content
        ]
    return _content(content, normalise=normalise)


def _completion(prompt: Any, options: dict[str, Any]) -> Prompt:
    """The whole chunks of a completions prompt: text or token ids, and one prompt only."""
    whole = prompt
    if isinstance(prompt, list) and len(prompt) == 1 and isinstance(prompt[0], str | list):
        prompt = prompt[0]
    if isinstance(prompt, str):
        size, kind = CHUNK_CHARACTERS, "text"
    elif isinstance(prompt, list) and all(type(token) is int for token in prompt):
        size, kind = CHUNK_IDS, "ids"
    else:
        return Prompt("other", options, [], whole)
    return Prompt(kind, options, _chunks(prompt, size), whole)


def _chunks(prompt: Any, size: int) -> list[Any]:
    """What a prompt is cut into: its whole chunks. Where one ends depends on nothing but its place."""
    chunks: list[Any] = []
    start = 0
    while len(prompt) - start >= size:
        end = start + min((len(prompt) - start) // size, CHUNKS_OF_A_SIZE) * size
        chunks += [prompt[begin : begin + size] for begin in range(start, end, size)]
        start, size = end, 4 * size
    return chunks


def _is_list_of_objects(value: Any) -> bool:
    return isinstance(value, list) and all(isinstance(entry, dict) for entry in value)
