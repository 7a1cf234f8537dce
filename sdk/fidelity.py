"""What an engine generated, in the form in which it goes back: byte for byte, as the next turn's prompt must begin.

Pure: reads parsed responses of the OpenAI client, and builds new messages beside those it is given.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

from bidikv.items import ItemsAnswer
from bidikv.marks import tool_name
from bidikv.spellings import meaning

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

_REASONING: Final = ("reasoning", "reasoning_content")
"""vLLM's name for it, and its older one."""


class Answer:
    """One generated message.

    Attributes:
        seen: Something of it has come.
        finished: All of it has come.
        blank_is_known: It is known if content without text is null or empty.
    """

    response_id: Final = None
    seen = True
    finished = True
    blank_is_known = True

    @property
    def reasoning(self) -> tuple[str, str] | None:
        """The field that it came under, and its text."""
        raise NotImplementedError

    def message(self) -> dict[str, Any]:
        """The message to send back."""
        raise NotImplementedError

    def messages(self) -> list[dict[str, Any]]:
        """The one message that it is."""
        return [self.message()]


class WholeAnswer(Answer):
    """One that came at once.

    Args:
        message: A parsed `ChatCompletionMessage`.
    """

    def __init__(self, message: Any) -> None:
        self._message = said = {"role": "assistant", "content": getattr(message, "content", None)}
        self._reasoning = found = _reasoning_in(message)
        if found is not None:
            said[found[0]] = found[1]
        calls = getattr(message, "tool_calls", None)
        if calls:
            said["tool_calls"] = [_call_of(call) for call in calls]

    @property
    def reasoning(self) -> tuple[str, str] | None:
        """See `Answer`."""
        return self._reasoning

    def message(self) -> dict[str, Any]:
        """See `Answer`."""
        return self._message


class StreamedAnswer(Answer):
    """One that is put together from the chunks of a stream, which opens with an empty text whatever the content is."""

    blank_is_known = False

    def __init__(self) -> None:
        self._content: list[str] = []
        self._null = True
        self._reasoning: list[str] = []
        self._reasoning_name: str | None = None
        self._calls: dict[int, dict[str, Any]] = {}
        self.seen = False
        self.finished = False

    def add(self, chunk: Any) -> None:
        """Take what a chunk brings of the first choice."""
        for choice in getattr(chunk, "choices", None) or ():
            delta = getattr(choice, "delta", None)
            if delta is None or choice.index != 0:
                continue
            self._take(delta)
            for call in delta.tool_calls or ():
                self._take_call(call.index, call)
            self.finished = self.finished or choice.finish_reason is not None

    def _take(self, part: Any) -> None:
        self.seen = True
        content = getattr(part, "content", None)
        if content is not None:
            self._null = False
            self._content.append(content)
        found = _reasoning_in(part)
        if found is not None:
            self._reasoning_name = self._reasoning_name or found[0]
            self._reasoning.append(found[1])

    def _take_call(self, index: int, call: Any) -> None:
        kept = self._calls.setdefault(
            index, {"id": None, "type": "function", "function": {"name": "", "arguments": ""}}
        )
        kept["id"] = kept["id"] or call.id
        function = getattr(call, "function", None)
        if function is not None:
            # Some servers repeat the name with every delta.
            kept["function"]["name"] = kept["function"]["name"] or function.name or ""
            kept["function"]["arguments"] += function.arguments or ""

    @property
    def reasoning(self) -> tuple[str, str] | None:
        """See `Answer`."""
        if self._reasoning_name is None:
            return None
        return self._reasoning_name, "".join(self._reasoning)

    def message(self) -> dict[str, Any]:
        """See `Answer`."""
        text = "".join(self._content)
        null = self._null or (not text and bool(self._calls))
        message: dict[str, Any] = {"role": "assistant", "content": None if null else text}
        if self.reasoning is not None:
            message[self.reasoning[0]] = self.reasoning[1]
        if self._calls:
            message["tool_calls"] = [
                {**call, "function": dict(call["function"])} for _, call in sorted(self._calls.items())
            ]
        return message


def _reasoning_in(part: Any) -> tuple[str, str] | None:
    """The field that it is under, and its text; None without any."""
    # Not by `getattr`, for which models that have no such field go a long way.
    declared, extra = getattr(part, "__dict__", {}), getattr(part, "model_extra", None) or {}
    for name in _REASONING:
        if text := declared.get(name) or extra.get(name):
            return name, text
    return None


def _call_of(call: Any) -> dict[str, Any]:
    """A whole tool call as it is sent back."""
    function = getattr(call, "function", None)
    name, arguments = ("", "") if function is None else (function.name or "", function.arguments or "")
    return {"id": call.id, "type": "function", "function": {"name": name, "arguments": arguments}}


def answer_in(response: Any) -> Answer | ItemsAnswer | None:
    """The first choice of a parsed chat completion, or all of a parsed response; None for anything else."""
    if getattr(response, "object", None) == "response":
        return ItemsAnswer(response)
    choices = getattr(response, "choices", None)
    message = getattr(choices[0], "message", None) if isinstance(choices, list) and choices else None
    return None if message is None else WholeAnswer(message)


def message_of(response: Any) -> dict[str, Any]:
    """The model's message as the next turn's history has to have it: `messages.append(bidikv.message_of(response))`.

    Tool arguments and reasoning are the model's own bytes; content is null where the model said nothing but a tool call.

    Args:
        response: A chat completion, parsed or raw; or a stream of one that has been read to its end.

    Raises:
        TypeError: It is no such thing, or its stream has brought nothing yet.
    """
    from bidikv.reuse import answer_of  # noqa: PLC0415 - that module watches the streams

    answer = answer_of(response)
    if not isinstance(answer, Answer) or not answer.seen:
        raise TypeError(f"there is no answer in {type(response).__name__} (a stream has to be read first)")
    return answer.message()


def is_as_generated(
    message: Mapping[str, Any], arguments: Mapping[str, str], blanks: Mapping[str, str | None]
) -> bool:
    """Whether a message's tool calls need no look of `restored_message`. Quick: all of a history is asked in every turn."""
    calls = message["tool_calls"]
    try:
        for call in calls:
            raw = arguments.get(call["id"])
            if raw is not None and raw != call["function"]["arguments"]:
                return False
        first = calls[0]["id"]
        return bool(message["content"]) or first not in blanks or blanks[first] == message["content"]
    except (TypeError, KeyError, IndexError):
        return False


def restored_message(
    message: Mapping[str, Any],
    arguments: Mapping[str, str],
    blanks: Mapping[str, str | None],
    reasoning: tuple[str, str] | None = None,
) -> tuple[dict[str, Any], list[str]] | None:
    """An assistant message as the model wrote it, and the fields that differ; None if it needs nothing.

    Only the spelling is restored. What means something else than what the model wrote was edited, and stays.

    Args:
        message: As the caller sends it.
        arguments: Raw arguments by the id of the tool call.
        blanks: Content of answers without text, null or empty, by the id of their first tool call.
        reasoning: Field and text to put back where the caller has dropped them.
    """
    changes: dict[str, Any] = {}
    fields: list[str] = []
    calls = message.get("tool_calls")
    if isinstance(calls, list) and calls:
        spelt = [_restored_call(call, arguments) for call in calls]
        changed = [position for position, call in enumerate(spelt) if call is not calls[position]]
        if changed:
            changes["tool_calls"] = spelt
            fields += [f"tool_calls[{position}].function.arguments" for position in changed]
        if not message.get("content") and _known(calls[0], blanks):
            blank = blanks[calls[0]["id"]]
            if message.get("content") != blank:
                changes["content"] = blank
                fields.append("content")
    if reasoning is not None and not any(message.get(name) for name in _REASONING):
        changes[reasoning[0]] = reasoning[1]
        fields.append(reasoning[0])
    return ({**message, **changes}, fields) if changes else None


def _known(call: Any, by_id: Mapping[str, Any]) -> bool:
    return isinstance(call, dict) and call.get("id") in by_id


def _restored_call(call: Any, arguments: Mapping[str, str]) -> Any:
    if not _known(call, arguments) or not isinstance(function := call.get("function"), dict):
        return call
    raw, sent = arguments[call["id"]], function.get("arguments")
    if sent == raw or meaning(sent) != meaning(raw):
        return call
    return {**call, "function": {**function, "arguments": raw}}


def ordered_tools(tools: Sequence[Any], known: Mapping[str, int]) -> list[Any] | None:
    """Tools in the order in which they were first offered, new ones last; None if they are.

    Tools of one name twice stay as they are: which of them is which cannot be told.
    """
    names = [tool_name(tool) for tool in tools]
    places = [known.get(name, len(known)) for name in names]
    if places == sorted(places) or len(set(names)) != len(names):
        return None
    return [tool for _, tool in sorted(zip(places, tools, strict=True), key=lambda pair: pair[0])]
