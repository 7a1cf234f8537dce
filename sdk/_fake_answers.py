"""The bodies of a fake router's answers to chats and completions, in the OpenAI API's shapes."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from collections.abc import Mapping

JSON: Final = {"content-type": "application/json"}
EVENTS: Final = {"content-type": "text/event-stream"}


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


def event_stream(
    message: Mapping[str, Any], usage: Mapping[str, Any], body: Mapping[str, Any], *, breaks: bool
) -> bytes:
    """A streamed chat completion; one that breaks ends with an error event after its first text."""
    deltas: list[dict[str, Any]] = [{"role": "assistant", "content": ""}]
    if message.get("reasoning"):
        deltas += [{"reasoning": part} for part in halves(message["reasoning"])]
    deltas += [{"content": part} for part in halves(message["content"] or "")]
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
            for part in halves(function["arguments"])
        ]
    begun = frame("chat.completion.chunk", body)
    chunks: list[Any] = [
        {**begun, "choices": [{"index": 0, "delta": delta, "finish_reason": None}]} for delta in deltas
    ]
    if breaks:
        return _broken(chunks[:2])
    chunks.append({**begun, "choices": [{"index": 0, "delta": {}, "finish_reason": finish_reason(message)}]})
    return _ended(chunks, begun, usage, body)


def completion_stream(
    message: Mapping[str, Any], usage: Mapping[str, Any], body: Mapping[str, Any], *, breaks: bool
) -> bytes:
    """A streamed text completion; one that breaks ends with an error event after its first text."""
    begun = frame("text_completion", body)
    parts = halves(message["content"] or "")
    chunks = [
        {**begun, "choices": [{"index": 0, "text": part, "finish_reason": None, "logprobs": None}]}
        for part in parts
    ]
    if breaks:
        return _broken(chunks[:1])
    chunks.append({**begun, "choices": [{"index": 0, "text": "", "finish_reason": "stop", "logprobs": None}]})
    return _ended(chunks, begun, usage, body)


def _broken(chunks: list[Any]) -> bytes:
    error = {"error": {"message": "The fake router breaks the stream.", "type": "server_error", "code": None}}
    return b"".join(b"data: " + dump(event) + b"\n\n" for event in [*chunks, error])


def _ended(
    chunks: list[Any], begun: Mapping[str, Any], usage: Mapping[str, Any], body: Mapping[str, Any]
) -> bytes:
    if (body.get("stream_options") or {}).get("include_usage"):
        chunks = [*chunks, {**begun, "choices": [], "usage": usage}]
    return b"".join(b"data: " + dump(chunk) + b"\n\n" for chunk in chunks) + b"data: [DONE]\n\n"


def halves(text: str) -> list[str]:
    """A text in two pieces, as a stream brings it."""
    middle = len(text) // 2
    return [part for part in (text[:middle], text[middle:]) if part]
