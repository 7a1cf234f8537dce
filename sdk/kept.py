"""What is kept of one conversation: its histories, and the model's own spelling of its tool calls, reasoning and tools.

Bounded; whoever holds it keeps threads apart (`memory`).
"""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from bidikv.fidelity import is_as_generated, ordered_tools, restored_message
from bidikv.marks import MAPPING, Tools, spelling_of, tools_of

if TYPE_CHECKING:
    from bidikv.drift import History
    from bidikv.fidelity import Answer
    from bidikv.items import ItemsAnswer
    from bidikv.spellings import Rest

_HISTORIES: Final = 8
"""Branches and parallel calls."""
_SPELLINGS: Final = 512
"""Tool calls, and answers with reasoning."""
_RESPONSES: Final = 16
"""Responses that later requests may go on from."""
_SYSTEM_ROLES: Final = frozenset({"system", "developer"})


class KeptResponse(NamedTuple):
    """What is kept of a response that a later request may go on from.

    Attributes:
        history: Of its request, and what it says.
        opening: How many marks at its start are of instructions.
    """

    history: History
    opening: int


class KnownTools(NamedTuple):
    """The tools of a request as they are to be sent.

    Attributes:
        tools: See `History`.
        changes: The field to send in place of the caller's, if any.
        keys: What they are known by once the request is answered: the hash of their spelling, and what the body says beside the
            messages.
    """

    tools: Tools
    changes: Mapping[str, Any] = {}
    keys: tuple[int | Rest, ...] = ()


@dataclass(slots=True)
class Kept:
    """Of one conversation.

    Attributes:
        histories: As they went out last, with their answers; the newest first.
        arguments: By tool call, as the model wrote them.
        responses: By id.
        system: Its first system message, if that is to be repeated.
        keys: Under which routers know it.
        respelt: Requests have been put into another spelling, so that the next one will be as well.
    """

    histories: deque[History] = field(default_factory=lambda: deque(maxlen=_HISTORIES))
    arguments: OrderedDict[str, str] = field(default_factory=OrderedDict)
    responses: OrderedDict[str, KeptResponse] = field(default_factory=OrderedDict)
    system: Mapping[str, Any] | None = None
    keys: dict[str, None] = field(default_factory=dict)
    respelt: bool = False
    _blanks: OrderedDict[str, str | None] = field(default_factory=OrderedDict)
    _reasoning: OrderedDict[tuple[Any, ...], tuple[str, str]] = field(default_factory=OrderedDict)
    _tool_order: dict[str, int] = field(default_factory=dict)
    _tool_sets: OrderedDict[int | Rest, KnownTools] = field(default_factory=OrderedDict)

    def look_up_tools(self, tools: Any, rest: Rest | None, *, restore: bool) -> KnownTools:
        """Find a request's tools by what it says beside its messages, else by their own spelling.

        Args:
            tools: The request's field.
            rest: What the body says beside the messages; None if that is not known.
            restore: Put tools that are not known in the order of the first that were.
        """
        if not tools:
            return KnownTools(())
        if rest is not None and (known := self._tool_sets.get(rest)) is not None:
            return known
        spelling = spelling_of(tools)
        known = self._tool_sets.get(spelling or 0)
        changes: dict[str, Any] = {}
        if known is None and restore and isinstance(tools, list | tuple):
            ordered = ordered_tools(tools, self._tool_order)
            if ordered is not None:
                changes["tools"] = tools = ordered
                spelling, rest = spelling_of(tools), None
        keys = tuple(key for key in (spelling, rest) if key is not None)
        return KnownTools(tools_of(tools) if known is None else known.tools, changes, keys)

    def keep_tools(self, tools: Tools, keys: Sequence[int | Rest]) -> None:
        """Keep tools that were sent, under what they are known by."""
        for key in keys:
            if key not in self._tool_sets:
                _put(self._tool_sets, key, KnownTools(tools), most=2 * _HISTORIES)
                for name, _ in tools:
                    self._tool_order.setdefault(name, len(self._tool_order))

    def keep_system(self, messages: Any) -> None:
        """Keep the first system message, if none is."""
        if self.system is None:
            self.system = _system_of(messages)

    def with_system(self, messages: Sequence[Any]) -> list[Any] | None:
        """The messages with the system message that is kept; None if they have it, or have none."""
        current = _system_of(messages)
        if self.system is None or current is None or current == self.system:
            return None
        return [dict(self.system), *messages[1:]]

    def keep_answer(
        self, answer: Answer | ItemsAnswer, said: Sequence[Mapping[str, Any]], history: History, opening: int
    ) -> None:
        """Keep the model's own spelling of what clients spell otherwise, and what a later request may name.

        Args:
            answer: What the model said.
            said: The same as messages.
            history: Of its request, and what it says.
            opening: How many marks at its start are of instructions.
        """
        for message in said:
            calls = message.get("tool_calls", ()) if isinstance(message, MAPPING) else ()
            for call in calls:
                if call["id"]:
                    _put(self.arguments, call["id"], call["function"]["arguments"])
            if calls and calls[0]["id"] and not message["content"] and answer.blank_is_known:
                _put(self._blanks, calls[0]["id"], message["content"])
            if answer.reasoning is not None:
                _put(self._reasoning, _name(message), answer.reasoning)
        if answer.response_id is not None:
            _put(self.responses, answer.response_id, KeptResponse(history, opening), most=_RESPONSES)

    def keep_history(self, old: History, new: History) -> None:
        """Put a history first, in place of itself without its answer and of those that it only continues."""
        histories = self.histories
        if len(histories) == 1 and _continues(new, histories[0]):
            histories[0] = new  # a conversation without branches
            return
        others = [
            history
            for history in histories
            if history is not old and not _continues(new, history) and not _continues(history, new)
        ]
        histories.clear()
        histories.extend([new, *others][:_HISTORIES])

    def respell(
        self, messages: Sequence[Any], start: int, *, reasoning: bool
    ) -> tuple[list[Any], list[str]] | None:
        """The messages with the model's own spelling, and the paths of what that changes; None if they have it.

        Args:
            messages: The request's.
            start: The first one that may have another.
            reasoning: Put reasoning back that the client left out.
        """
        recalls = reasoning and bool(self._reasoning)
        if not self.arguments and not recalls:
            return None
        spelt: list[Any] | None = None
        restored: list[str] = []
        for index in range(start, len(messages)):
            message = messages[index]
            if not isinstance(message, dict) or not (message.get("tool_calls") or recalls):
                continue
            if message.get("role") != "assistant":
                continue
            if not recalls and is_as_generated(message, self.arguments, self._blanks):
                continue
            lost = self._reasoning.get(_name(message)) if recalls else None
            found = restored_message(message, self.arguments, self._blanks, lost)
            if found is not None:
                spelt = list(messages) if spelt is None else spelt
                spelt[index], fields = found
                restored += [f"messages[{index}].{name}" for name in fields]
        return None if spelt is None else (spelt, restored)


def _put(entries: OrderedDict[Any, Any], name: Any, value: Any, *, most: int = _SPELLINGS) -> None:
    entries[name] = value
    while len(entries) > most:
        entries.popitem(last=False)


def _continues(longer: History, shorter: History) -> bool:
    """Whether a history goes on from another one."""
    return longer.marks.goes_on_from(shorter.marks) and longer.tools == shorter.tools


def _name(message: Mapping[str, Any]) -> tuple[Any, ...]:
    """What tells one answer from another, as far as clients send it back."""
    calls = message.get("tool_calls") or ()
    return (
        hash(str(message.get("content") or "")),
        *(call.get("id") for call in calls if isinstance(call, Mapping)),
    )


def _system_of(messages: Any) -> Mapping[str, Any] | None:
    first = messages[0] if isinstance(messages, list | tuple) and messages else None
    return dict(first) if isinstance(first, Mapping) and first.get("role") in _SYSTEM_ROLES else None
