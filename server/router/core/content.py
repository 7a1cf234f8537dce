"""The content parts of a prompt, wherever an API puts them: in messages, in input items, inside tool results."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

_NESTED: Final = ("content", "output")
"""Where a part or an item may hold parts of its own: Anthropic's tool results, outputs of the Responses API's calls."""
_TEXT: Final = frozenset(
    {
        "custom_tool_call",
        "custom_tool_call_output",
        "function_call",
        "function_call_output",
        "input_text",
        "message",
        "output_text",
        "reasoning",
        "reasoning_text",
        "redacted_thinking",
        "refusal",
        "summary_text",
        "text",
        "thinking",
        "tool_addition",
        "tool_reference",
        "tool_removal",
        "tool_result",
        "tool_use",
    }
)
"""Types of parts and items that hold no media."""
_MEDIA_KEYS: Final = frozenset(
    {
        "audio_embeds",
        "audio_url",
        "file",
        "image_embeds",
        "image_pil",
        "image_url",
        "input_audio",
        "input_image",
        "prompt_embeds",
        "video_embeds",
        "video_url",
    }
)
"""Keys that make a part one of media, whatever its type says."""


@dataclass(frozen=True, slots=True)
class Media:
    """What of a prompt is no text, as far as one can see; what is not known counts as media.

    Attributes:
        present: Anything but text is in it.
        named: The client gives a part a name of its own (vLLM's `uuid`). Engines take the name for the content, and nothing
            proves that it stands for the same content twice.
    """

    present: bool
    named: bool


_NONE: Final = Media(present=False, named=False)


def media_of(body: Mapping[str, Any]) -> Media:
    """Look at every part and item of a request."""
    present = named = False
    for part in parts(body):
        if len(part) == 2 and type(part.get("content")) is str and type(part.get("role")) is str:
            # Most messages of most histories: a text, and whose it is.
            continue
        present = present or _is_media(part)
        named = named or part.get("uuid") is not None
    return Media(present, named) if present or named else _NONE


def parts(body: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    """Every content part and input item of a request that is an object."""
    waiting = [value for field in ("messages", "input") if isinstance(value := body.get(field), list)]
    while waiting:
        for part in waiting.pop():
            if not isinstance(part, dict):
                continue
            yield part
            for name in _NESTED:
                if isinstance(nested := part.get(name), list):
                    waiting.append(nested)  # noqa: PERF401  # it is what the loop consumes


def _is_media(part: dict[str, Any]) -> bool:
    kind = part.get("type", "text")
    return not isinstance(kind, str) or kind not in _TEXT or not _MEDIA_KEYS.isdisjoint(part)
