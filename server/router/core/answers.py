"""Keeps transfer parameters out of answers.

An answer's bytes pass as they are. Stock vLLM writes `"kv_transfer_params": null`, which tells a client nothing and
stays. Only a filled-in value, with engines' addresses and block ids, is cut out and replaced by null; every other byte
stays where it is. vLLM's stream chunks have no such field, but the last event of a Responses stream holds the whole
response.
"""

from __future__ import annotations

import functools
import json
import re
from typing import Final

_FIELD: Final = re.compile(rb'"kv_transfer_params"\s*:\s*(?=[^\sn])')
"""The key itself: within a JSON string its quotation marks would be escaped."""
_COMMA: Final = re.compile(rb",\s*\Z")
_DEEPEST: Final = 2
"""vLLM writes the field into the answer itself, or into the response that an event holds. What is further in is the model's: a
tool may well have an argument of that name."""
_BRACKETS: Final = re.compile(rb'"(?:[^"\\]+|\\.)*+"|([\[{])|([\]}])', re.DOTALL)
LAST_RESPONSE_EVENT: Final = b"event: response.completed"


def conceal_transfer(raw: bytes, *, drop: bool = False) -> bytes:
    """The answer with the engine's `kv_transfer_params` null; the same object when it has nothing to hide.

    Args:
        raw: The answer's bytes.
        drop: Leave the field out, as an API does whose answers have none when it is null (Messages).
    """
    if _FIELD.search(raw) is None:
        return raw
    pieces: list[bytes] = []
    done = looked = depth = 0
    for match in _FIELD.finditer(raw):
        depth += _opened(raw, looked, match.start())
        looked = match.start()
        if match.start() < done or depth > _DEEPEST:
            continue
        try:
            text = raw[match.end() :].decode()
            _, length = json.JSONDecoder().raw_decode(text)
        except ValueError:
            break
        before = raw[done : match.start()]
        comma = _COMMA.search(before) if drop else None
        pieces.append(before[: comma.start()] if comma is not None else raw[done : match.end()] + b"null")
        done = match.end() + len(text[:length].encode())
    return b"".join((*pieces, raw[done:])) if pieces else raw


def _opened(raw: bytes, start: int, end: int) -> int:
    """How many more objects and lists are open at the end than at the start."""
    return sum(
        (bracket[1] is not None) - (bracket[2] is not None) for bracket in _BRACKETS.finditer(raw, start, end)
    )


def conceal(raw: bytes, names: tuple[str, ...]) -> bytes:
    """The answer with every member of these names null; the same object when it has nothing to hide."""
    match = _filled_in(names).search(raw)
    if match is None:
        return raw
    try:
        text = raw[match.end() :].decode()
        _, length = json.JSONDecoder().raw_decode(text)
    except ValueError:
        return raw
    return raw[: match.end()] + b"null" + conceal(text[length:].encode(), names)


@functools.cache
def _filled_in(names: tuple[str, ...]) -> re.Pattern[bytes]:
    return re.compile(rb'"(?:' + "|".join(names).encode() + rb')"\s*:\s*(?=[^\sn])')


class LastEventHolder:
    """Holds a stream back from its last event on, until that is whole and has nothing to hide. All else passes at once."""

    def __init__(self, last_event: bytes) -> None:
        self._last_event = last_event
        self._kept = b""
        self._holding = False
        self._in_line = False

    def feed(self, chunk: bytes) -> bytes:
        """Take the next bytes; what may pass now."""
        data, self._kept = self._kept + chunk, b""
        at = 0 if self._holding else self._find(data)
        self._holding = at is not None
        if at is None:
            # A line that may still become the last event's waits until that is clear.
            line = data.rfind(b"\n") + 1
            begun = line < len(data) and (line > 0 or not self._in_line)
            at = line if begun and self._last_event.startswith(data[line:]) else len(data)
        passed, self._kept = data[:at], data[at:]
        if passed:
            self._in_line = not passed.endswith(b"\n")
        return passed

    def end(self) -> bytes:
        """The last event is whole, or the stream broke off: what was held back."""
        kept, self._kept, self._holding = self._kept, b"", False
        return conceal_transfer(kept)

    def _find(self, data: bytes) -> int | None:
        """Where the last event begins: at the start of a line."""
        if data.startswith(self._last_event) and not self._in_line:
            return 0
        at = data.find(b"\n" + self._last_event)
        return at + 1 if at >= 0 else None
