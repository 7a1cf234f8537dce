"""JSON as bytes: read once, field by field, and written again without touching what did not change.

The router's only user of msgspec. A client's value goes to an engine as the very bytes that the client wrote, whatever
spelling of numbers, escapes and white space that is; field names are written anew, so that an engine sees exactly the
names that were checked here.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any, Final

import msgspec

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

_HALF_PAIR: Final = re.compile(rb"\\u[dD][89abABcdefCDEF]")
_FIELDS: Final = msgspec.json.Decoder(dict[str, msgspec.Raw])
_LIST: Final = msgspec.json.Decoder(list[msgspec.Raw])
_VALUE: Final = msgspec.json.Decoder()
_ENCODER: Final = msgspec.json.Encoder()
_CANONICAL: Final = msgspec.json.Encoder(order="sorted")


class InvalidJson(ValueError):  # noqa: N818
    """Bytes that are no JSON, or none that can be passed on; the message says where they go wrong."""


class NotAnObject(InvalidJson):
    """JSON, but of another kind."""


class JsonObject(dict[str, Any]):
    """A JSON object that was read from bytes, and the bytes of each of its values.

    Not to be changed: its values and their bytes belong together.
    """

    __slots__ = ("written",)

    def __init__(self, values: Mapping[str, Any], written: Mapping[str, msgspec.Raw]) -> None:
        super().__init__(values)
        self.written = written


def read_object(raw: bytes) -> JsonObject:
    """Read a JSON object. Of a field that is written twice the last one counts.

    Raises:
        InvalidJson: It is none.
        RecursionError: It is nested too deeply.
    """
    try:
        written = _FIELDS.decode(raw)
    except msgspec.ValidationError as error:
        raise NotAnObject(str(error)) from None
    except msgspec.DecodeError as error:
        raise InvalidJson(_explained(raw, error)) from None
    return JsonObject({name: _value(name, value) for name, value in written.items()}, written)


def read_value(raw: bytes | str | msgspec.Raw) -> Any:
    """Read any JSON value.

    Raises:
        InvalidJson: It is none.
        RecursionError: It is nested too deeply.
    """
    try:
        return _VALUE.decode(raw)
    except (msgspec.DecodeError, UnicodeEncodeError) as error:
        raise InvalidJson(str(error)) from None


def fields_in(raw: Any) -> dict[str, Any]:
    """The bytes of each value of a JSON object that an engine wrote; `read_value` reads one. Empty if it is no object.

    Args:
        raw: JSON, for instance a value of an object that was read like this; None is none.

    Raises:
        InvalidJson: It is no JSON.
        RecursionError: It is nested too deeply.
    """
    return _inside(_FIELDS, raw) or {}


def items_in(raw: Any) -> list[Any]:
    """The bytes of each item of a JSON list, likewise."""
    return _inside(_LIST, raw) or []


def _inside(decoder: Any, raw: Any) -> Any:
    try:
        return decoder.decode(raw) if raw is not None else None
    except msgspec.ValidationError:
        return None
    except msgspec.DecodeError as error:
        raise InvalidJson(str(error)) from None


def _explained(raw: bytes, error: msgspec.DecodeError) -> str:
    """What is wrong, in better words where the decoder takes one thing for another."""
    try:
        raw.decode()
    except UnicodeDecodeError as not_text:
        return f"it is not UTF-8 (byte {not_text.start})"
    if _HALF_PAIR.search(raw):
        return f"{error}, or a \\ud800 to \\udfff escape lacks its other half"
    return str(error)


def _value(name: str, written: msgspec.Raw) -> Any:
    """Its syntax is known to be right; its text and its numbers are not."""
    try:
        return _VALUE.decode(written)
    except msgspec.DecodeError as error:
        raise InvalidJson(f"{error} in field {name!r}") from None


def encode(value: Any) -> bytes:
    """Write a value."""
    return _ENCODER.encode(value)


def verbatim(raw: bytes) -> Any:
    """A value that is written already; whoever has it vouches that it is JSON."""
    return msgspec.Raw(raw)


def encode_from(source: Mapping[str, Any], body: Mapping[str, Any]) -> bytes:
    """Write an object, taking the values that come from `source` as they were written there.

    Args:
        source: What was read; only a `JsonObject` knows its bytes.
        body: Built from it. A value that is the very object of the same name in `source` is that value.
    """
    if not isinstance(source, JsonObject):
        return encode(body)
    written = source.written
    return _ENCODER.encode(
        {
            name: written[name] if name in written and source[name] is value else value
            for name, value in body.items()
        }
    )


canonical: Final[Callable[[Any], bytes]] = _CANONICAL.encode
"""Writes a value so that equal values give equal bytes: fields in order, no white space. A long prompt has a thousand steps."""
