"""The Responses API's items as messages, so that its histories are compared as those of chat completions are.

Pure: reads request bodies and parsed responses of the OpenAI client.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Final

from bidikv.spellings import meaning

if TYPE_CHECKING:
    from collections.abc import Sequence

_TEXTS: Final = frozenset({"input_text", "output_text", "text"})
_ENDS: Final = frozenset({"response.completed", "response.incomplete"})
_OF_THE_SERVER: Final = frozenset({"id", "status", "phase"})
"""Fields that the server adds to items, and that clients send back or not."""


class ItemsAnswer:
    """What the model said in a response.

    Attributes:
        finished: All of it has come.
        response_id: By which a later request may name it.
    """

    finished: Final = True
    blank_is_known: Final = False
    reasoning: Final = None

    def __init__(self, response: Any) -> None:
        self.response_id: str | None = getattr(response, "id", None)
        # What was parsed is of a type that older models of the package do not expect, and would warn of.
        items = [
            item.model_dump(warnings=False) if hasattr(item, "model_dump") else item
            for item in response.output
        ]
        self._messages = [message for item in items if (message := message_of_item(item)) is not None]

    def messages(self) -> list[dict[str, Any]]:
        """Its items, reasoning left out."""
        return self._messages


def ended_response(event: Any) -> Any:
    """The response that an event of a stream closes; None for other events."""
    return getattr(event, "response", None) if getattr(event, "type", None) in _ENDS else None


def shown_items(body: Mapping[str, Any]) -> tuple[list[Any], list[int | None]] | None:
    """The instructions and the items of a request as messages; None if it shows none.

    Returns:
        The messages, and for each its place in `input`; None for the instructions.
    """
    given = body.get("input")
    if isinstance(given, str):
        given = [{"role": "user", "content": given}]
    if not isinstance(given, list | tuple):
        return None
    messages: list[Any] = []
    places: list[int | None] = []
    if body.get("instructions"):
        messages.append({"role": "system", "content": body["instructions"]})
        places.append(None)
    for place, item in enumerate(given):
        message = message_of_item(item)
        if message is not None:
            messages.append(message)
            places.append(place)
    return messages, places


def message_of_item(item: Any) -> Any:
    """An item as the message that it stands for; None for reasoning, which clients send back or not."""
    if not isinstance(item, Mapping):
        return item
    kind = item.get("type")
    if kind == "reasoning":
        return None
    if kind == "function_call":
        function = {"name": item.get("name"), "arguments": item.get("arguments")}
        call = {"id": item.get("call_id"), "type": "function", "function": function}
        return {"role": "assistant", "content": None, "tool_calls": [call]}
    if kind == "function_call_output":
        return {"role": "tool", "tool_call_id": item.get("call_id"), "content": _content(item.get("output"))}
    if kind == "message" or "role" in item:
        return {"role": item.get("role"), "content": _content(item.get("content"))}
    return {name: value for name, value in item.items() if name not in _OF_THE_SERVER and value is not None}


def _content(content: Any) -> Any:
    """Text, also where it is a list of one; else the parts without what the server adds to them."""
    if not isinstance(content, list | tuple):
        return content
    parts = [
        {"text": part.get("text")} if isinstance(part, Mapping) and part.get("type") in _TEXTS else part
        for part in content
    ]
    return (
        parts[0]["text"]
        if len(parts) == 1 and isinstance(parts[0], Mapping) and [*parts[0]] == ["text"]
        else parts
    )


def restored_items(
    items: Sequence[Any], arguments: Mapping[str, str], restored: list[str]
) -> list[Any] | None:
    """A request's items with the model's own spelling of its calls; None if they have it.

    Args:
        items: As the caller sends them.
        arguments: Raw arguments by the id of the call.
        restored: Receives the paths of what is put right.
    """
    spelt: list[Any] | None = None
    for place, item in enumerate(items):
        if not isinstance(item, Mapping) or item.get("type") != "function_call":
            continue
        raw, sent = arguments.get(str(item.get("call_id"))), item.get("arguments")
        if raw is None or sent == raw or meaning(sent) != meaning(raw):
            continue
        spelt = list(items) if spelt is None else spelt
        spelt[place] = {**item, "arguments": raw}
        restored.append(f"input[{place}].arguments")
    return spelt
