"""How many things a request may hold. Whoever fills a body with nothing but brackets keeps the router busy for minutes.

Every client waits while one body is read, so the work is bounded by what a body holds and not by its size alone: most of a
large one is one image, or the text of one message. A body too small to be too much is not looked at.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

MAX_ITEMS: Final = 2**15
"""Messages, content parts, tool calls and tools together: each is looked at by itself. An agent's longest history has a few
thousand."""
MAX_VALUES: Final = 2**22
"""Of a body, and commas of its texts among them: more than the tokens of any prompt."""
_LISTS: Final = ("messages", "input", "previous_input_messages", "system", "tools")
_NESTED: Final = ("content", "output", "tool_calls")


def has_too_many_values(raw: bytes) -> bool:
    """Whether a body is not worth reading."""
    return len(raw) > MAX_VALUES and raw.count(b",") > MAX_VALUES


def crowded_field(raw: bytes, body: Mapping[str, Any]) -> str | None:
    """The field of a request that has too many items, if one has.

    Args:
        raw: The body's bytes: a list has no more items than they have commas, and one.
        body: What they say.
    """
    if len(raw) <= MAX_ITEMS or raw.count(b",") <= MAX_ITEMS:
        return None
    return next((name for name in _LISTS if _has_too_many(body.get(name))), None)


def _has_too_many(value: Any) -> bool:
    total = 0
    for items in _lists(value):
        total += len(items)
        if total > MAX_ITEMS:
            return True
    return False


def _lists(value: Any) -> Iterator[list[Any]]:
    """A list, and the lists of parts inside it."""
    waiting = [value] if isinstance(value, list) else []
    while waiting:
        items = waiting.pop()
        yield items
        waiting += [
            nested
            for item in items
            if isinstance(item, dict)
            for name in _NESTED
            if isinstance(nested := item.get(name), list)
        ]
