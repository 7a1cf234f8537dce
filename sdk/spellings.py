"""Exact spellings: of a request's messages as one run of bytes, and of a tool call's arguments as one for all that mean the same.

Standard library only, pure.
"""

from __future__ import annotations

import itertools
import json
import marshal
from typing import TYPE_CHECKING, Any, Final, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

_LIST_HEAD: Final = 5
"""Bytes before the first member of a marshalled list: its type and length."""
# As the OpenAI client spells a body. Where it ever spells otherwise, no end of the messages is found, and none is taken on trust.
_encode: Final = json.JSONEncoder(ensure_ascii=False, separators=(",", ":"), allow_nan=False).encode
_decode: Final = json.JSONDecoder().raw_decode


class Rest(NamedTuple):
    """What a body says beside its messages.

    Attributes:
        size: Bytes after the messages.
        exact: Their hash, and that of what comes before the messages.
    """

    size: int
    exact: int


class Spelling:
    """Messages as bytes that begin as those of any shorter list of the same messages do, perhaps with more after them.

    Args:
        view: Begins with the first message.
        before: Hash of what a body has before the messages, and of how many fields it has after them; None if this is no
            body, and ends with the messages.
    """

    __slots__ = ("_before", "_view")

    def __init__(self, view: memoryview, before: int | None) -> None:
        self._view = view
        self._before = before

    @classmethod
    def of(cls, messages: Sequence[Any]) -> Spelling:
        """A spelling made for these messages, which are walked through; it is empty where they are not JSON-like."""
        return cls(memoryview(spell(list(messages)) or b"")[_LIST_HEAD:], None)

    @classmethod
    def in_body(cls, content: bytes, body: Mapping[str, Any], name: str) -> Spelling | None:
        """The spelling in a request's body, whose bytes are there anyway; None if it is not found there.

        Args:
            content: The body as it is sent.
            body: Its fields, in the same order.
            name: The field with the messages.
        """
        head = f'"{name}":['.encode()
        start, place = content.find(head), list(body).index(name)
        if start < 0:
            return None
        # Quotation marks inside of texts are escaped, so that this is a field; but of which object?
        if content.count(b"{", 0, start) > 1:
            before = dict(itertools.islice(body.items(), place))
            try:
                opening = _encode(before)[:-1].encode() + b","
            except (TypeError, ValueError, RecursionError):
                return None
            start = len(opening)
            if not content.startswith(opening + head):
                return None
        start += len(head)
        return cls(memoryview(content)[start:], hash((len(body) - place, content[:start])))

    def begins(self, steps: Sequence[int], exact: int) -> bool:
        """Whether it begins with the bytes that these are the steps and the hash of."""
        if not steps or steps[-1] > len(self._view):
            return False
        chain = start = 0
        for end in steps:
            chain = self.hash(start, end, chain)
            start = end
        return chain == exact

    def hash(self, start: int, end: int, before: int = 0) -> int:
        """Hash of the bytes between, and of what is known by its own hash to come before them."""
        return hash((before, hash(self._view[start:end])))

    def split(
        self, messages: Sequence[Any], known: int, size: int, rest: Rest | None
    ) -> tuple[int, Rest | None]:
        """Where the messages end.

        Args:
            messages: All of them.
            known: How many at the start are known to take `size` bytes.
            size: These bytes.
            rest: What another body said beside its messages.

        Returns:
            How many bytes the messages take, 0 if that cannot be told; what the body says beside them, None if it is none.
        """
        before, whole = self._before, len(self._view)
        if before is None:
            return whole, None
        # What closed a list among a body's fields, with so many fields after it, closes the same list in another body.
        end = -1 if rest is None else whole - rest.size
        if rest is not None and end >= size and self.hash(end, whole, before) == rest.exact:
            return end, rest
        try:
            new = _encode(messages[known:]).encode()
        except (TypeError, ValueError, RecursionError):
            return 0, None
        # Its own bytes are the proof: of what they were made is what the rest of the messages is.
        between = b"," if known and len(new) > 2 else b""
        new = between + new[1:]
        end = size + len(new) - 1
        if self._view[size : end + 1] != new:
            return 0, None
        return end, Rest(whole - end, self.hash(end, whole, before))


def spell(value: Any) -> bytes | None:
    """A JSON-like value in one spelling; None for anything else. Version 2 of the format does not depend on identity."""
    try:
        return marshal.dumps(value, 2)
    except ValueError:
        return None


def meaning(arguments: Any) -> Any:
    """A tool call's arguments as the same bytes for all that mean the same; what is no JSON means itself."""
    if not isinstance(arguments, str):
        return arguments
    text = arguments.strip(" \t\n\r")
    try:
        value, end = _decode(text)
        # Spelt, because Python takes 1, 1.0 and true for equal.
        return (spell(_sorted(value)) or arguments) if end == len(text) else arguments
    except (ValueError, RecursionError):
        return arguments


def _sorted(value: Any) -> Any:
    """A parsed value whose parts come in one order."""
    if isinstance(value, dict):
        # Pairs in a tuple, which no parsed list is.
        return tuple([(name, _sorted(value[name])) for name in sorted(value)])
    return [_sorted(part) for part in value] if isinstance(value, list) else value
