"""The bodies of a fake router's answers in the Responses API's shapes."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from bidikv._fake_answers import dump, halves

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping


def usage(prompt_tokens: int, generated_tokens: int) -> dict[str, Any]:
    """Counts of tokens."""
    return {
        "input_tokens": prompt_tokens,
        "input_tokens_details": {"cached_tokens": 0},
        "output_tokens": generated_tokens,
        "output_tokens_details": {"reasoning_tokens": 0},
        "total_tokens": prompt_tokens + generated_tokens,
    }


def whole(message: Mapping[str, Any], counts: Mapping[str, Any], body: Mapping[str, Any], name: str) -> bytes:
    """An answer in one piece."""
    return dump(_response(body, name, _items(message, name), counts))


def events(
    message: Mapping[str, Any], counts: Mapping[str, Any], body: Mapping[str, Any], name: str
) -> bytes:
    """The same as a stream of events."""
    items = _items(message, name)
    told = [
        {"type": "response.created", "response": _response(body, name, [], None)},
        *(event for index, item in enumerate(items) for event in _events_of(item, index)),
        {"type": "response.completed", "response": _response(body, name, items, counts)},
    ]
    lines = []
    for number, event in enumerate(told):
        head = f"event: {event['type']}\ndata: ".encode()
        lines.append(head + dump({**event, "sequence_number": number}) + b"\n\n")
    return b"".join(lines)


def _response(
    body: Mapping[str, Any], name: str, items: list[Any], counts: Mapping[str, Any] | None
) -> dict[str, Any]:
    return {
        "id": name,
        "object": "response",
        "created_at": 1,
        "model": body.get("model", "fake"),
        "status": "in_progress" if counts is None else "completed",
        "output": items,
        "parallel_tool_calls": True,
        "previous_response_id": body.get("previous_response_id"),
        "tool_choice": "auto",
        "tools": [],
        "usage": counts,
    }


def _items(message: Mapping[str, Any], name: str) -> list[dict[str, Any]]:
    """What the model said: its reasoning, its text, its tool calls."""
    items: list[dict[str, Any]] = []
    if message.get("reasoning"):
        thought = {"type": "reasoning_text", "text": message["reasoning"]}
        items.append({"type": "reasoning", "id": f"rs_{name}", "summary": [], "content": [thought]})
    if message["content"] or not message.get("tool_calls"):
        items.append(
            {
                "type": "message",
                "id": f"msg_{name}",
                "role": "assistant",
                "status": "completed",
                "content": [_text(message["content"] or "")],
            }
        )
    items += [
        {
            "type": "function_call",
            "id": f"fc_{call['id']}",
            "call_id": call["id"],
            "status": "completed",
            **call["function"],
        }
        for call in message.get("tool_calls", ())
    ]
    return items


def _text(text: str) -> dict[str, Any]:
    return {"type": "output_text", "text": text, "annotations": []}


def _events_of(item: Mapping[str, Any], index: int) -> Iterator[dict[str, Any]]:
    """One item, opened, filled piece by piece, and closed."""
    place = {"item_id": item["id"], "output_index": index}
    empty: dict[str, Any] = {"arguments": ""} if item["type"] == "function_call" else {"content": []}
    empty["status"] = "in_progress"
    yield {"type": "response.output_item.added", "output_index": index, "item": {**item, **empty}}
    if item["type"] == "function_call":
        filled, at = "response.function_call_arguments", place
        text, last = item["arguments"], {"arguments": item["arguments"], "name": item["name"]}
    else:
        part = item["content"][0]
        kind = "output_text" if item["type"] == "message" else "reasoning_text"
        filled, at = f"response.{kind}", {**place, "content_index": 0}
        text, last = part["text"], {"text": part["text"]}
        yield {"type": "response.content_part.added", **at, "part": {**part, "text": ""}}
    logprobs: dict[str, Any] = {"logprobs": []} if filled == "response.output_text" else {}
    for piece in halves(text):
        yield {"type": f"{filled}.delta", **at, "delta": piece, **logprobs}
    yield {"type": f"{filled}.done", **at, **last, **logprobs}
    if item["type"] != "function_call":
        yield {"type": "response.content_part.done", **at, "part": item["content"][0]}
    yield {"type": "response.output_item.done", "output_index": index, "item": item}
