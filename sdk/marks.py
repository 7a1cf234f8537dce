"""What is kept of a message and of a tool: hashes of what they say, whatever its spelling, and none of its text.

Standard library only, pure.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Final, NamedTuple, TypeAlias

from bidikv.spellings import meaning, spell

if TYPE_CHECKING:
    from collections.abc import Iterable

Tools: TypeAlias = tuple[tuple[str, int], ...]
"""Hash of each tool by name, in order."""

MAPPING: Final = (dict, Mapping)
"""`dict` first: what the client hands over is that, and asking the abstract class takes longer than all the rest."""
_NOT_COMPARED: Final = frozenset({"reasoning", "reasoning_content", "refusal", "annotations", "audio"})
"""Fields of an answer that clients drop from history, or that no template prints."""
_MOST_MEANINGS: Final = 4096
_MEANINGS: Final[dict[int, int]] = {}
"""Hash of what a tool call's arguments mean, by the hash of their spelling."""


class Mark(NamedTuple):
    """What is kept of one message.

    Attributes:
        fields: Hash of each field that counts, whatever its spelling.
        role: Its role.
    """

    fields: dict[str, int]
    role: str


class Marks:
    """The marks of one history, which never change. What goes on from its end shares them: that takes what is new, not what was.

    Args:
        known: Begins with these marks; may be longer, where another history goes on from this one.
        count: How many of them are of this history.
    """

    __slots__ = ("_count", "_known")

    def __init__(self, known: list[Mark], count: int) -> None:
        self._known = known
        self._count = count

    def __len__(self) -> int:
        return self._count

    def __getitem__(self, index: int) -> Mark:
        return self._known[index if index >= 0 else self._count + index]

    def part(self, start: int, stop: int | None = None) -> list[Mark]:
        """Those between, as a list of its own."""
        return self._known[start : self._count if stop is None else stop]

    def then(self, shared: int, new: Iterable[Mark]) -> Marks:
        """So many of these marks, and new ones. Not for two threads at once."""
        # Where another history has gone on from here already, this one needs a list of its own.
        known = self._known if shared == len(self._known) else self._known[:shared]
        known.extend(new)
        return Marks(known, len(known))

    def goes_on_from(self, other: Marks) -> bool:
        """Whether it begins with those marks, not only with marks that say the same, and has more."""
        count = other._count
        return self._count > count > 0 and self._known[count - 1] is other._known[count - 1]


def mark_of(message: Any) -> Mark:
    """What to keep of one message.

    Null, empty and absent are the same, as are text and a list of one text, and two spellings of a tool call's JSON:
    clients differ in which they send, and prompts do not.
    """
    if isinstance(message, Mark):
        return message  # of a history that the server keeps
    if not isinstance(message, MAPPING):
        return Mark({"type": hash(type(message).__name__), "value": hash(repr(message))}, "")
    fields: dict[str, int] = {}
    for name, value in message.items():
        if not value or name in _NOT_COMPARED:
            continue
        if name == "tool_calls" and isinstance(value, list | tuple):
            for position, call in enumerate(value):
                _mark_call(fields, f"tool_calls[{position}]", call)
        else:
            fields[name] = hash(value) if type(value) is str else _hash_field(_plain(value, name))
    role = message.get("role")
    return Mark(fields, role if isinstance(role, str) else str(message.get("type", "")))


def _mark_call(fields: dict[str, int], path: str, call: Any) -> None:
    function = call.get("function") if isinstance(call, MAPPING) else None
    if not isinstance(function, MAPPING):
        fields[path] = _hash_field(call)
        return
    fields[f"{path}.id"] = _hash_field(call.get("id"))
    fields[f"{path}.function.name"] = _hash_field(function.get("name"))
    fields[f"{path}.function.arguments"] = _hash_arguments(function.get("arguments"))


def _hash_arguments(arguments: Any) -> int:
    """Hash of what a tool call's arguments mean. An answer is marked twice: as it comes, and as it is sent back."""
    if not isinstance(arguments, str):
        return _hash_field(arguments)
    spelling = hash(arguments)
    known = _MEANINGS.get(spelling)
    if known is None:
        if len(_MEANINGS) >= _MOST_MEANINGS:
            _MEANINGS.clear()
        known = _MEANINGS[spelling] = _hash_field(meaning(arguments))
    return known


def _plain(content: Any, field: str) -> Any:
    """A field's value; a content that is one text in a list is that text."""
    if (
        field == "content"
        and isinstance(content, list)
        and len(content) == 1
        and isinstance(content[0], Mapping)
    ):
        part = content[0]
        if part.get("type") == "text" and isinstance(part.get("text"), str):
            return part["text"]
    return content


def _hash_field(value: Any) -> int:
    if isinstance(value, str | bytes):
        return hash(value)
    spelt = spell(value)
    return hash(repr(value) if spelt is None else spelt)


def spelling_of(value: Any) -> int | None:
    """Hash of a JSON-like value in its exact spelling; None for anything else."""
    spelt = spell(value)
    return None if spelt is None else hash(spelt)


def tools_of(tools: object) -> Tools:
    """Hash of each tool by name, in order."""
    if not isinstance(tools, list | tuple):
        return ()
    return tuple((tool_name(tool), _hash_field(tool)) for tool in tools)


def tool_name(tool: Any) -> str:
    """A tool's name, or the type of one that has none."""
    if not isinstance(tool, Mapping):
        return type(tool).__name__
    function = tool.get("function")
    name = function.get("name") if isinstance(function, Mapping) else tool.get("name")
    return str(name or tool.get("type") or "")
