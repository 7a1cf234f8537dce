"""What an answer says of itself as it passes by: its id and how many tokens it took. Nothing of its text is kept for long."""

from __future__ import annotations

import json
import re
from collections import deque
from typing import Any, Final

_HEAD_BYTES: Final = 16 * 1024
_TAIL_BYTES: Final = 64 * 1024
"""Usage comes with the last events; an event that is longer than this goes without."""
_DATA: Final = re.compile(rb"^data: ?(\{.*)$", re.MULTILINE)
_USAGE: Final = b'"usage"'
_WRAPPERS: Final = ("response", "message")
"""Where the Responses API and Anthropic's put the answer's own fields."""


class AnswerSpotter:
    """Keeps the first event and the last bytes of an answer. Feed it every chunk, cut anywhere."""

    __slots__ = ("_head", "_is_stream", "_kept", "_tail")

    def __init__(self, *, is_stream: bool) -> None:
        self._is_stream = is_stream
        self._head = b""
        self._tail: deque[bytes] = deque()
        self._kept = 0

    def feed(self, chunk: bytes) -> None:
        """Take the next bytes."""
        if self._is_stream and len(self._head) < _HEAD_BYTES and b"\n\n" not in self._head:
            self._head = (self._head + chunk)[:_HEAD_BYTES]
        self._tail.append(chunk)
        self._kept += len(chunk)
        while self._is_stream and self._kept - len(self._tail[0]) > _TAIL_BYTES:
            self._kept -= len(self._tail.popleft())

    def response_id(self) -> str | None:
        """The answer's id, if it has begun with one."""
        documents = _events(self._head) if self._is_stream else [_document(b"".join(self._tail))]
        return next((found for d in documents if (found := _id(d)) is not None), None)

    def usages(self) -> list[dict[str, Any]]:
        """Every count of tokens that is known of the answer, the newest first."""
        tail = b"".join(self._tail)
        if _USAGE not in tail and _USAGE not in self._head:
            return []
        documents = [*_events(self._head), *_events(tail)][::-1] if self._is_stream else [_document(tail)]
        found = (body.get("usage") for document in documents for body in _bodies(document))
        return [usage for usage in found if isinstance(usage, dict)]

    def output_tokens(self) -> int | None:
        """Tokens generated, if the answer has ended with a count."""
        tail = b"".join(self._tail)
        documents = _events(tail)[::-1] if self._is_stream else [_document(tail)]
        return next((found for d in documents if (found := _generated(d)) is not None), None)


def _events(raw: bytes) -> list[dict[str, Any]]:
    return [_document(line) for line in _DATA.findall(raw.replace(b"\r", b"\n"))]


def _document(raw: bytes) -> dict[str, Any]:
    """A JSON object; empty if it is none, or cut off."""
    try:
        document = json.loads(raw)
    except (ValueError, RecursionError):
        return {}
    return document if isinstance(document, dict) else {}


def _bodies(document: dict[str, Any]) -> list[dict[str, Any]]:
    return [document, *(inner for name in _WRAPPERS if isinstance(inner := document.get(name), dict))]


def _id(document: dict[str, Any]) -> str | None:
    return next((value for body in _bodies(document) if isinstance(value := body.get("id"), str)), None)


def _generated(document: dict[str, Any]) -> int | None:
    for body in _bodies(document):
        usage = body.get("usage")
        counts = usage if isinstance(usage, dict) else {}
        for name in ("completion_tokens", "output_tokens"):
            if type(count := counts.get(name)) is int and count >= 0:
                return count
    return None
