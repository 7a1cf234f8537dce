"""The bodies of a fake router's answers, in the OpenAI API's shapes, and how it reads a prompt."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from collections.abc import Mapping

JSON: Final = {"content-type": "application/json"}


def frame(kind: str, body: Mapping[str, Any]) -> dict[str, Any]:
    """What every body begins with."""
    return {"id": "fake", "object": kind, "created": 1, "model": body.get("model", "fake")}


def finish_reason(message: Mapping[str, Any]) -> str:
    """Why such a message ends."""
    return "tool_calls" if message.get("tool_calls") else "stop"


def dump(value: Any) -> bytes:
    """A value as JSON."""
    return json.dumps(value).encode()


def json_reply(status: int, value: Any) -> tuple[int, dict[str, str], bytes]:
    """Status, headers and body of a JSON answer."""
    return status, dict(JSON), dump(value)


def error_reply(status: int, message: str) -> tuple[int, dict[str, str], bytes]:
    """An error in OpenAI's shape."""
    return json_reply(
        status, {"error": {"message": message, "type": "server_error", "param": None, "code": None}}
    )


def response_body(message: Mapping[str, Any], body: Mapping[str, Any]) -> bytes:
    """An answer of the Responses API."""
    text: dict[str, Any] = {"type": "output_text", "text": message["content"] or "", "annotations": []}
    item = {"type": "message", "id": "m", "role": "assistant", "status": "completed", "content": [text]}
    body_frame = {**frame("response", body), "created_at": 1, "status": "completed", "output": [item]}
    return dump({**body_frame, "parallel_tool_calls": True, "tool_choice": "auto", "tools": []})


def event_stream(
    message: Mapping[str, Any], usage: Mapping[str, Any], body: Mapping[str, Any], *, breaks: bool
) -> bytes:
    """A streamed chat completion; one that breaks ends with an error event after its first text."""
    deltas: list[dict[str, Any]] = [{"role": "assistant", "content": ""}]
    if message.get("reasoning"):
        deltas += [{"reasoning": part} for part in _halves(message["reasoning"])]
    deltas += [{"content": part} for part in _halves(message["content"] or "")]
    for index, call in enumerate(message.get("tool_calls", ())):
        function = call["function"]
        deltas.append(
            {
                "tool_calls": [
                    {**call, "index": index, "function": {"name": function["name"], "arguments": ""}}
                ]
            }
        )
        deltas += [
            {"tool_calls": [{"index": index, "function": {"arguments": part}}]}
            for part in _halves(function["arguments"])
        ]
    begun = frame("chat.completion.chunk", body)
    chunks: list[Any] = [
        {**begun, "choices": [{"index": 0, "delta": delta, "finish_reason": None}]} for delta in deltas
    ]
    if breaks:
        error = {
            "error": {"message": "The fake router breaks the stream.", "type": "server_error", "code": None}
        }
        return b"".join(b"data: " + dump(event) + b"\n\n" for event in [*chunks[:2], error])
    chunks.append({**begun, "choices": [{"index": 0, "delta": {}, "finish_reason": finish_reason(message)}]})
    if (body.get("stream_options") or {}).get("include_usage"):
        chunks.append({**begun, "choices": [], "usage": usage})
    return b"".join(b"data: " + dump(chunk) + b"\n\n" for chunk in chunks) + b"data: [DONE]\n\n"


def _halves(text: str) -> list[str]:
    middle = len(text) // 2
    return [part for part in (text[:middle], text[middle:]) if part]


def shared_characters(before: str, now: str) -> int:
    """Characters at the start that both have."""
    pairs = enumerate(zip(before, now, strict=False))
    return next((place for place, (old, new) in pairs if old != new), min(len(before), len(now)))


def spell_prompt(body: Mapping[str, Any]) -> str:
    """A prompt as a template would write it: tools first, then the messages, with reasoning left out."""
    parts = [json.dumps(body["tools"])] if body.get("tools") else []
    messages = body.get("messages", body.get("input", body.get("prompt", "")))
    if isinstance(messages, str):
        return "".join([*parts, messages])
    for message in messages:
        # Null and empty content are spelt alike: a stream does not say which of the two it was.
        fields = {
            name: value
            for name, value in message.items()
            if name not in {"reasoning", "index"} and (value or name != "content")
        }
        parts.append(json.dumps(fields, sort_keys=True))
    return "".join(parts)
