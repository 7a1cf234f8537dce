"""LangChain messages as chat-completion messages, spelt as the model spelt them.

A turn can reuse the KV of the turn before only if the history comes back unchanged, so what the model generated is
sent back byte for byte, and everything else has exactly one spelling. Pure: no input or output, nothing mutated.
"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any, Final

from langchain_core.messages import (
    AIMessage,
    BaseMessage,
    ChatMessage,
    HumanMessage,
    SystemMessage,
    ToolMessage,
    convert_to_openai_data_block,
    is_data_content_block,
)

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from langchain_core.messages import InvalidToolCall, ToolCall

KEPT: Final = "bidikv"
"""Key of `AIMessage.additional_kwargs` under which is kept what LangChain's own fields lose:
{"reasoning": str, "args": {call id: str}, "null": True where the answer had no content, not even an empty one}."""


def to_wire(messages: Sequence[BaseMessage], *, reasoning: bool = True) -> list[dict[str, Any]]:
    """Convert a history, in order, with or without the model's reasoning.

    Raises:
        TypeError: A message has a type that chat completions do not know.
    """
    return [_message(message, reasoning=reasoning) for message in messages]


def _message(message: BaseMessage, *, reasoning: bool) -> dict[str, Any]:
    if isinstance(message, AIMessage):
        return _assistant(message, reasoning=reasoning)
    if isinstance(message, ToolMessage):
        return {"role": "tool", "tool_call_id": message.tool_call_id, "content": _content(message.content)}
    if isinstance(message, HumanMessage):
        role = "user"
    elif isinstance(message, SystemMessage):
        role = "system"
    elif isinstance(message, ChatMessage):
        role = message.role
    else:
        raise TypeError(f"chat completions have no role for {type(message).__name__}")
    wire = {"role": role, "content": _content(message.content)}
    return {**wire, "name": message.name} if message.name else wire


def _assistant(message: AIMessage, *, reasoning: bool) -> dict[str, Any]:
    """No `name`: frameworks add it, the model never generated it, and templates may print it."""
    kept = message.additional_kwargs.get(KEPT) or {}
    text = _text(message.content)
    wire: dict[str, Any] = {"role": "assistant", "content": None if kept.get("null") and not text else text}
    if reasoning and kept.get("reasoning"):
        wire["reasoning"] = kept["reasoning"]
    raw = kept.get("args") or {}
    calls = [_tool_call(call, raw) for call in message.tool_calls]
    calls += [_invalid_tool_call(call) for call in message.invalid_tool_calls]
    if calls:
        position = {call_id: index for index, call_id in enumerate(raw)}
        # Calls that could not be parsed are kept apart by LangChain; the model's order is that of `raw`.
        wire["tool_calls"] = sorted(calls, key=lambda call: position.get(call["id"], len(position)))
    return wire


def _tool_call(call: ToolCall, raw: Mapping[str, str]) -> dict[str, Any]:
    arguments = raw.get(call["id"] or "")
    if arguments is None or parse_arguments(arguments) != call["args"]:  # unknown, or edited since
        arguments = json.dumps(call["args"], ensure_ascii=False)
    return _function_call(call["id"], call["name"], arguments)


def _invalid_tool_call(call: InvalidToolCall) -> dict[str, Any]:
    return _function_call(call["id"], call["name"], call["args"])


def _function_call(call_id: str | None, name: str | None, arguments: str | None) -> dict[str, Any]:
    return {
        "id": call_id or "",
        "type": "function",
        "function": {"name": name or "", "arguments": arguments or ""},
    }


def parse_arguments(raw: str) -> dict[str, Any] | None:
    """A tool call's arguments; None if the text is not a JSON object."""
    try:
        parsed = json.loads(raw)
    except ValueError:
        return None
    return parsed if isinstance(parsed, dict) else None


def _text(content: str | list[str | dict[str, Any]] | None) -> str:
    """The text of an answer, without its block structure; "" where the model said nothing."""
    if not content:
        return ""
    if isinstance(content, str):
        return content
    return "".join(block if isinstance(block, str) else str(block.get("text") or "") for block in content)


def _content(content: str | list[str | dict[str, Any]] | None) -> str | list[dict[str, Any]]:
    """Text stays text; a list of nothing but one text becomes that text, so that both spellings are one prompt."""
    if not content:
        return ""
    if isinstance(content, str):
        return content
    blocks = [_block(block) for block in content]
    return str(blocks[0]["text"]) if len(blocks) == 1 and blocks[0].get("type") == "text" else blocks


def _block(block: str | dict[str, Any]) -> dict[str, Any]:
    if isinstance(block, str):
        return {"type": "text", "text": block}
    if block.get("type") == "text":
        return {"type": "text", "text": block.get("text") or ""}
    return convert_to_openai_data_block(block) if is_data_content_block(block) else block
